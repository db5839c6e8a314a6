"""The plugin's logger: a child of vLLM's, so that its lines get vLLM's format, level and destination."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.rose_backend")
