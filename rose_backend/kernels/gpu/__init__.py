"""The operations of ``rose_backend.kernels`` as Triton kernels. Imported on first use: only GPUs need Triton."""
