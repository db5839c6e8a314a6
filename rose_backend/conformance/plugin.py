"""The suites' options, checked before anything runs, and the report. pytest loads it everywhere: it must stay small.

Its entry point has the module's name, so that ``-p rose_backend.conformance.plugin`` loads it no second time.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
import warnings
from pathlib import Path

import pytest

from rose_backend.conformance.report import SUFFIXES, Reporter

DIFFERENCES = pytest.StashKey[dict[str, str]]()
"""What ``--conformance-differences`` declares: pattern of scenes -> what differs."""


def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """Add the options to runs that name the suites; other runs keep these names for themselves."""
    if not any(re.search(r"rose_backend[./]conformance(?!\.plugin)", arg) for arg in args):
        return
    group = parser.getgroup(
        "rose_backend.conformance", "conformance of attention backends and block managers"
    )
    group.addoption(
        "--attention-backend",
        dest="conformance_attention_backend",
        metavar="NAME|MODULE:CLASS",
        help="the backend under test: vLLM's name for it, or a class",
    )
    group.addoption(
        "--own-block-order",
        dest="conformance_own_block_order",
        action="store_true",
        help="the backend orders a block's keys and values in its own way: compare outputs, not the cache",
    )
    group.addoption(
        "--block-manager",
        dest="conformance_block_manager",
        metavar="MODULE:CLASS",
        help="the KV cache manager under test: a class, or a function, that takes vLLM's arguments",
    )
    group.addoption(
        "--conformance-differences",
        type=Path,
        metavar="FILE.toml",
        help="differences by design: [[difference]] with scene (a pattern) and what",
    )
    group.addoption(
        "--conformance-report",
        type=Path,
        action="append",
        metavar="FILE.html|FILE.json",
        help="write what became of each scene; may be given twice",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the files that options name."""
    config.stash[DIFFERENCES] = {}
    if path := config.getoption("conformance_differences", None):
        config.stash[DIFFERENCES] = read_differences(path)
    paths = config.getoption("conformance_report", None) or []
    if wrong := [str(path) for path in paths if path.suffix not in SUFFIXES]:
        raise pytest.UsageError(
            f"--conformance-report: {wrong[0]} ends with neither {' nor '.join(SUFFIXES)}"
        )
    if paths and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporter(config, paths))


def read_differences(path: Path) -> dict[str, str]:
    """Return pattern of scenes -> what differs.

    Raises:
        pytest.UsageError: the file cannot be read, or has something else in it.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["difference"]
        declared = {entry["scene"]: entry["what"] for entry in entries}
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise pytest.UsageError(
            f"--conformance-differences: {path} needs [[difference]] with scene and what: {error!r}"
        ) from error
    return declared


def pytest_sessionstart(session: pytest.Session) -> None:
    """Find what is under test, to complain once and not in each scene."""
    backend = session.config.getoption("conformance_attention_backend", None)
    manager = session.config.getoption("conformance_block_manager", None)
    if backend is None and manager is None:
        return
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("rose_backend.conformance needs vLLM, which is not installed")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        with warnings.catch_warnings(action="ignore"):
            if backend:
                from rose_backend.conformance.attention.host import find_backend

                find_backend(backend)
            if manager:
                from rose_backend.conformance.block_manager.managers import find_manager

                find_manager(manager)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"nothing to test: {error}") from error
