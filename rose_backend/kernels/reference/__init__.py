"""Plain torch twins of launchers in ``rose_backend.kernels``; short ones stand beside their launcher."""
