"""A package that pretends to be SGLang, so that workers can be tested without an engine: it answers at once.

It prints to stdout, as engines do, and reads two environment variables: ``FAKE_LOST_TOKENS`` makes each answer shorter
by so many tokens, ``FAKE_CALLS`` ends the process in the call after so many.
"""

from __future__ import annotations

from pathlib import Path

_ENGINE = """
import os

class Engine:
    def __init__(self, **options):
        print("hello from the engine")
        self.calls = 0

    def generate(self, input_ids, sampling_params):
        print("generating for", len(input_ids))
        self.calls += 1
        if self.calls > int(os.environ.get("FAKE_CALLS", 1000)):
            print("something terrible")
            os._exit(3)
        lost = int(os.environ.get("FAKE_LOST_TOKENS", 0))
        return [{"meta_info": {"completion_tokens": p["max_new_tokens"] - lost}} for p in sampling_params]

    def shutdown(self):
        print("goodbye")
"""


def write_fake_sglang(folder: Path) -> str:
    """Write the package below ``folder`` and return what to put on PYTHONPATH."""
    package = folder / "sglang" / "srt" / "entrypoints"
    package.mkdir(parents=True)
    for part in (folder / "sglang", folder / "sglang" / "srt", package):
        (part / "__init__.py").write_text('__version__ = "0.fake"\n')
    (package / "engine.py").write_text(_ENGINE)
    return str(folder)
