"""Tuned configurations of kernels: what decides only how fast they are."""
