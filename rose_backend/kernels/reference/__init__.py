"""Plain torch twins of the launchers in ``rose_backend.kernels``, under the same names."""
