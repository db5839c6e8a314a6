"""The MLP of a mixture of experts."""
