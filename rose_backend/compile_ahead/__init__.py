"""Kernels compiled by other processes before they are needed. Imported only where there is a GPU."""
