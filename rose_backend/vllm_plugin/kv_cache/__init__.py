"""Rose's block manager behind the interface of vLLM's ``KVCacheManager``."""
