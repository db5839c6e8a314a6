"""Any KV cache manager of vLLM's interface, driven as vLLM's scheduler does."""
