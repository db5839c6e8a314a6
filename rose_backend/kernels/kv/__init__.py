"""Writes to the KV cache outside attention: single slots and copies of whole blocks."""
