"""What another release of vLLM has moved of what the plug-in uses, found in sources."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests import next_vllm
from tests.next_vllm import Seam, Sources, compare, page_of, seams_of

OLD = {
    "__init__.py": "",
    "core.py": '''
        """A module."""
        from .parts import handed_on
        LIMIT = 3
        class Manager:
            def __init__(self): self.size = 1
            def allocate(self, request):
                """Old words."""
                return request  # and a comment
            def free(self, request): return None
            def untouched(self): return 1
        def helper(a, b=2): return a
        try:
            from fast import quick
        except ImportError:
            def quick(): return 0
    ''',
    "parts/__init__.py": "from vllm.parts.inner import handed_on",
    "parts/inner.py": "def handed_on(): return 1",
    "gone.py": "x = 1",
}
NEW = OLD | {
    "core.py": '''
        from .parts import handed_on
        LIMIT = 4
        class Manager:
            def __init__(self): self.size = 1
            def allocate(self, request):
                """New words."""
                return request
            def untouched(self): return 2
        def helper(a, b=2, *, c): return a
        try:
            from fast import quick
        except ImportError:
            def quick(): return 0
    ''',
}
del NEW["gone.py"]
PLUGIN = """
from vllm import gone
from vllm.core import LIMIT, Manager, handed_on, helper, quick
def use(manager):
    from vllm.core import nothing_that_is_there
    return manager.allocate(1), manager.free(2)
"""
MOVED = [Seam("vllm", "gone"), Seam("vllm.core", "Manager.free")]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return folder


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    return write(tmp_path / "plugin", {"some.py": PLUGIN})


def test_what_has_moved_is_found(tmp_path: Path, plugin: Path) -> None:
    old, new = (Sources(write(tmp_path / name, files)) for name, files in (("old", OLD), ("new", NEW)))
    seams, named = seams_of(plugin)
    found = compare(old, new, [Seam("vllm.core", "Manager.untouched"), *seams], named)
    assert found.gone == MOVED
    assert set(found.changed) == {
        Seam("vllm.core", each) for each in ("Manager.untouched", "LIMIT", "helper")
    }
    assert "+def helper(a, b=2, *, c):" in found.changed[Seam("vllm.core", "helper")]
    # ``__init__``, ``allocate``, ``quick``, and ``handed_on``, which is defined elsewhere.
    assert found.num_same == 4
    page = page_of(found, "1", "2")
    assert "2 are gone, 3 are different, 4 are the same." in page
    assert "- `vllm.core:Manager.free`" in page and "-LIMIT = 3\n+LIMIT = 4" in page


def test_a_release_is_downloaded_and_compared(
    tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def run(command: list[str], *, check: bool) -> None:
        asked.append(command[-1])
        (folder,) = (Path(each.removeprefix("--dest=")) for each in command if each.startswith("--dest="))
        with zipfile.ZipFile(folder / "vllm-9.9.0-py3-none-any.whl", "w") as wheel:
            for name, text in NEW.items():
                wheel.writestr(f"vllm/{name}", dedent(text))
            wheel.writestr("vllm/kernels.so", "no source")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(next_vllm, "PLUGIN", plugin)
    monkeypatch.setattr(next_vllm, "LEDGER", {})
    monkeypatch.setattr(next_vllm, "installed", lambda: ("1.0", write(tmp_path / "old", OLD)))
    page = tmp_path / "page.md"
    assert next_vllm.main(["--out", str(page)]) == 1
    assert "2 gone, 2 different, 4 the same" in capsys.readouterr().out
    assert page.read_text().startswith("# Rose's seams in vLLM 9.9.0, compared with 1.0\n")
    assert next_vllm.main(["--vllm", "9.9.0"]) == 1 and asked == ["vllm", "vllm==9.9.0"]


def test_every_seam_of_this_vllm_is_found() -> None:
    """But for names that packages make at run time."""
    _, root = next_vllm.installed()
    sources = Sources(root)
    seams, named = seams_of(next_vllm.PLUGIN)
    replaced: list[Any] = [Seam(*patch.target.split(":")) for patch in next_vllm.LEDGER.values()]
    assert [seam for seam in replaced if sources.find(seam) is None] == []
    lost = [
        str(seam)
        for seam in seams
        if sources.find(seam) is None and not sources.has_module(f"{seam.module}.{seam.name}")
    ]
    assert len(seams) > 100 and lost == []
    assert compare(sources, sources, [*replaced, *seams], named)[:2] == ([], {})
