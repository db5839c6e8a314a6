"""Scheduling policies that the standalone engine and the vLLM plug-in share; they decide, and compute nothing."""
