"""Hooks at vLLM's start-up: check and complete the configuration, write the start-up line."""
