"""What models are built from: attention over paged K/V, and norms, linear layers and MLPs. Knows kernels, no model."""
