"""Attention over a paged KV cache that also stores the new tokens' keys and values."""
