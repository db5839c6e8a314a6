"""The standalone engine: continuous batching over rose_backend's block manager, kernels and models. Never imports vllm.

README.md beside this file has the reading order.
"""
