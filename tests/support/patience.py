"""How long a test waits for what happens on any machine, however slow or busy: only a hang takes longer."""

HANG_S = 900.0
"""Seconds. A test as a whole has twice as long, see ``timeout`` in pyproject.toml."""
