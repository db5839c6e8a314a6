"""Model families on top of ``rose_backend.layers``, one file each, and loading of Hugging Face checkpoints."""
