"""Suites that show where a vLLM attention backend or KV cache manager differs; pytest runs them."""
