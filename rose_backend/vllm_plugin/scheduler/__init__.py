"""vLLM's schedulers with Rose's block manager and batched scheduling of decodes."""
