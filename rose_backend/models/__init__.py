"""Models as plain functions over ``rose_backend.kernels``, and loading of Hugging Face checkpoints."""
