"""vLLM's ``KVCacheManager`` interface over Rose's block manager."""
