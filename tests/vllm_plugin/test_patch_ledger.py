"""Every patch is in the ledger, its target exists, and it can be taken back."""

from __future__ import annotations

import ast
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

from rose_backend import vllm_plugin
from rose_backend.vllm_plugin.patch_ledger import LEDGER, apply_patch, is_applied, resolve_owner, swapped
from tests.conftest import ROOT

PLUGIN_FOLDER = Path(vllm_plugin.__file__).parent
ALWAYS = [name for name, patch in LEDGER.items() if patch.only_while == "always"]
TEMPORARY = [name for name, patch in LEDGER.items() if patch.only_while != "always"]


@pytest.mark.parametrize("name", LEDGER)
def test_entry_is_complete_and_its_target_exists(name: str) -> None:
    patch = LEDGER[name]
    resolve_owner(patch.target)
    assert len(patch.reason) > 20 and len(patch.remove_when) > 20
    assert bool(patch.build) == (patch.only_while == "always")
    if patch.build:
        module, _, function = patch.build.partition(":")
        assert callable(getattr(import_module(module), function))


def test_pages_list_the_ledgers_entries() -> None:
    def listed(page: str, header: str) -> list[str]:
        _, _, rows = (ROOT / "docs" / page).read_text().partition(f"\n| {header} |")
        cells = [line.split("|")[1] for line in rows.split("\n\n")[0].splitlines()[2:]]
        return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]

    assert sorted(listed("how_it_works/plugin.md", "Entry")) == sorted(LEDGER)
    proposal = "proposals/runner_components.md"
    gone = listed(proposal, "Patch")
    assert set(gone) <= set(LEDGER)
    assert f"\n{len(gone)} of {len(LEDGER)} entries of" in (ROOT / "docs" / proposal).read_text()


@pytest.mark.parametrize("name", ALWAYS)
def test_applying_twice_wraps_once(name: str) -> None:
    owner, attribute = resolve_owner(LEDGER[name].target)
    apply_patch(name)
    once = vars(owner)[attribute]
    apply_patch(name)
    assert vars(owner)[attribute] is once and is_applied(name)
    function = getattr(once, "__func__", once)
    assert not hasattr(function.__wrapped__, "__rose_patch__")


@pytest.mark.parametrize("name", TEMPORARY)
def test_temporary_replacement_is_undone_even_after_an_error(name: str) -> None:
    owner, attribute = resolve_owner(LEDGER[name].target)
    original = getattr(owner, attribute)
    with pytest.raises(ZeroDivisionError), swapped(name, lambda: "replacement"):
        assert getattr(owner, attribute)() == "replacement"
        with swapped(name, lambda: "inner"):
            assert getattr(owner, attribute)() == "inner"
        assert getattr(owner, attribute)() == "replacement"
        raise ZeroDivisionError
    assert getattr(owner, attribute) is original


@pytest.mark.parametrize("name", TEMPORARY)
def test_temporary_replacement_is_seen_by_its_own_thread_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute = resolve_owner(LEDGER[name].target)
    monkeypatch.setattr(owner, attribute, original := (lambda: "original"))
    both_inside, first_is_out = threading.Barrier(3), threading.Barrier(3)

    def build(replacement: str, *, goes_first: bool) -> list[str]:
        seen = []
        with swapped(name, lambda: replacement):
            both_inside.wait()
            seen.append(getattr(owner, attribute)())
            if not goes_first:
                first_is_out.wait()
                seen.append(getattr(owner, attribute)())
        if goes_first:
            first_is_out.wait()
        return seen

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(build, "one", goes_first=True)
        two = pool.submit(build, "two", goes_first=False)
        both_inside.wait()
        seen_elsewhere = getattr(owner, attribute)()
        first_is_out.wait()
        assert seen_elsewhere == "original"
        assert one.result() == ["one"] and two.result() == ["two", "two"]
    assert getattr(owner, attribute) is original


def test_a_target_that_is_gone_is_named() -> None:
    with pytest.raises(AttributeError, match="no_such_attribute"):
        resolve_owner("vllm.config.vllm:VllmConfig.no_such_attribute")


@pytest.mark.parametrize(
    "path",
    sorted(PLUGIN_FOLDER.rglob("*.py")),
    ids=lambda path: str(path.relative_to(PLUGIN_FOLDER)),
)
def test_no_other_code_assigns_to_what_vllm_owns(path: Path) -> None:
    if path.stem == "patch_ledger":
        return
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        and (getattr(node, "module", None) or node.names[0].name).split(".")[0] == "vllm"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            for target in targets:
                base = target
                while isinstance(base, ast.Attribute | ast.Subscript):
                    base = base.value
                is_plain_name = base is target
                assert is_plain_name or not isinstance(base, ast.Name) or base.id not in imported, (
                    ast.unparse(node)
                )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("setattr", "delattr"), f"line {node.lineno}: {ast.unparse(node)}"
