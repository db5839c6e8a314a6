"""Without vLLM the suites cannot be imported."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_suites.py"]
