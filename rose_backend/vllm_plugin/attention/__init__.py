"""ROSE among vLLM's attention backends: backend, metadata, and CUDA graphs of mixed steps."""
