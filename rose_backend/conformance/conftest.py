"""Names the scenes, applies what is declared to differ, and leaves out the suite that no option asks for."""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest

from rose_backend.conformance.plugin import DIFFERENCES

FOLDER = Path(__file__).resolve().parent
OPTIONS = {"attention": "conformance_attention_backend", "block_manager": "conformance_block_manager"}
"""Suite -> the option that names what it tests."""

# Without vLLM no scene can be imported, let alone run.
collect_ignore_glob = [] if find_spec("vllm") else ["*/test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", "gpu: needs a CUDA device; skipped with the reason where there is none"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a suite out if only the other one's option is given."""
    if collection_path.parent != FOLDER or collection_path.name not in OPTIONS:
        return None
    is_named = {suite: bool(config.getoption(option, None)) for suite, option in OPTIONS.items()}
    return True if any(is_named.values()) and not is_named[collection_path.name] else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each scene its name, and the mark of a declared difference: then it must fail."""
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        name = scene_name(item)
        item.user_properties.append(("scene", name))
        for pattern, what in config.stash.get(DIFFERENCES, {}).items():
            if fnmatchcase(name, pattern):
                item.add_marker(pytest.mark.xfail(reason=what, strict=True))


def scene_name(item: pytest.Item) -> str:
    """Return ``suite: what the test is called: its parameters``, without brackets, which patterns use."""
    assert isinstance(item, pytest.Function)
    words = item.originalname.removeprefix("test_").replace("_", " ")
    parameters = f": {item.callspec.id}" if hasattr(item, "callspec") else ""
    return f"{item.path.relative_to(FOLDER).parts[0]}: {words}{parameters}".replace("[", "(").replace(
        "]", ")"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
