"""Models of vLLM's registry with Rose's fused layers."""
