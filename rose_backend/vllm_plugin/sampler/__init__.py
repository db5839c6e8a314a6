"""Rose's sampler in both of vLLM's model runners."""
