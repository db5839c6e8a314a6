"""What ``benchmarks/kernels.py`` times: one module per family of kernels, each with ``cases()``."""
