"""Say which of Rose's seams another release of vLLM has moved, from its sources: nothing of it is installed.

    python -m tests.next_vllm [--vllm 0.34.0] [--out PAGE.md]

pip downloads the newest vLLM, or the one asked for. What the plug-in replaces (``patch_ledger.py``) and what it imports
is compared with the vLLM that is installed here, comments and docstrings left out; of a class, the members that the
plug-in names. The page shows what is gone and what is different. The status is 1 if something is gone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rose_backend.vllm_plugin.patch_ledger import LEDGER

PLUGIN = Path(__file__).resolve().parents[1] / "rose_backend" / "vllm_plugin"
_MOST_HOPS = 5
"""From a package that hands a name on to the module that defines it."""
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Seam(NamedTuple):
    """Something of vLLM that the plug-in uses."""

    module: str
    name: str
    """In the module; of a member with its class: ``Class.member``."""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


class Sources:
    """The Python files of one vLLM.

    Args:
        root: the folder ``vllm``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}

    def find(self, seam: Seam) -> Node | None:
        """Return what defines a seam; None if nothing does. Members may be those of a class's bases."""
        owner, _, member = seam.name.partition(".")
        found = self._find(seam.module, owner, _MOST_HOPS)
        if found is None or not member:
            return found and found[1]
        return self._member(*found, member, _MOST_HOPS)

    def has_module(self, module: str) -> bool:
        """Whether there is such a module."""
        return self._tree(module) is not None

    def _find(self, module: str, name: str, hops: int) -> tuple[str, Node] | None:
        """Return a definition, and the module that it stands in."""
        tree = self._tree(module)
        if tree is None or not hops:
            return None
        defined = _definitions(tree.body)
        if name in defined:
            return module, defined[name]
        package = module if self._is_package(module) else module.rpartition(".")[0]
        for origin, original, known_as in _imports(tree, package):
            if known_as == name:
                return self._find(origin, original, hops - 1)
            if known_as == "*" and (found := self._find(origin, name, hops - 1)) is not None:
                return found
        return None

    def _member(self, module: str, node: Node, name: str, hops: int) -> Node | None:
        if not isinstance(node, ast.ClassDef) or not hops:
            return None
        if (own := members_of(node).get(name)) is not None:
            return own
        for base in node.bases:
            found = self._find(module, ast.unparse(base), _MOST_HOPS)
            if found is not None and (inherited := self._member(*found, name, hops - 1)) is not None:
                return inherited
        return None

    def _place(self, module: str) -> Path:
        return self._root.joinpath(*module.split(".")[1:])

    def _is_package(self, module: str) -> bool:
        return (self._place(module) / "__init__.py").is_file()

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            place = self._place(module)
            files = [place / "__init__.py", *([place.with_suffix(".py")] if "." in module else [])]
            file = next((each for each in files if each.is_file()), None)
            self._trees[module] = None if file is None else ast.parse(file.read_text(encoding="utf-8"))
        return self._trees[module]


def _definitions(body: Sequence[ast.stmt]) -> dict[str, Node]:
    """Return what statements define, those in branches, too; of several definitions the last one."""
    found: dict[str, Node] = {}
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.If | ast.Try):
            handlers = [each.body for each in getattr(statement, "handlers", [])]
            for branch in (statement.body, *handlers, statement.orelse, getattr(statement, "finalbody", [])):
                found |= _definitions(branch)
    return found


def members_of(node: Node) -> dict[str, Node]:
    """Return what a class defines itself; nothing of anything else."""
    return _definitions(node.body) if isinstance(node, ast.ClassDef) else {}


def _imports(tree: ast.AST, package: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the module, the name there and the name here of each import from a module, wherever it stands.

    Args:
        package: the one that ``tree`` is in, for relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield origin, alias.name, alias.asname or alias.name


def seams_of(folder: Path) -> tuple[list[Seam], set[str]]:
    """Return what Python files import from vLLM, and all names of attributes, functions and keywords in them."""
    seams, named = set(), set()
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        seams |= {Seam(origin, name) for origin, name, _ in _imports(tree) if origin.split(".")[0] == "vllm"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                named.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named.add(node.name)
            elif isinstance(node, ast.keyword) and node.arg:
                named.add(node.arg)
    return sorted(seams), named


def text_of(node: Node) -> str:
    """Return a definition as Python writes it, without docstrings."""
    bare = copy.deepcopy(node)
    for each in ast.walk(bare):
        body = getattr(each, "body", None)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and body:
            is_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            each.body = body[is_text:] or [ast.Pass()]
    return ast.unparse(bare)


class Comparison(NamedTuple):
    """What another release made of seams."""

    gone: list[Seam]
    changed: dict[Seam, str]
    """With the difference."""
    num_same: int


def compare(old: Sources, new: Sources, seams: Sequence[Seam], named: set[str]) -> Comparison:
    """Compare seams of two releases; those that ``old`` does not have are left out.

    Args:
        named: members of classes that count.
    """
    gone: list[Seam] = []
    changed: dict[Seam, str] = {}
    num_same = 0
    for seam in seams:
        before, after = old.find(seam), new.find(seam)
        if before is None:
            # A module that is imported by itself, or what vLLM does not define.
            module = f"{seam.module}.{seam.name}"
            if old.has_module(module) and not new.has_module(module):
                gone.append(seam)
            continue
        if after is None:
            gone.append(seam)
            continue
        pairs: list[tuple[Seam, Node, Node | None]] = [(seam, before, after)]
        if isinstance(before, ast.ClassDef):
            own = [
                (name, node)
                for name, node in members_of(before).items()
                if name in named or name == "__init__"
            ]
            parts = [(Seam(seam.module, f"{seam.name}.{name}"), node) for name, node in own]
            pairs = [(part, node, new.find(part)) for part, node in parts]
        for each, one, other in pairs:
            if other is None:
                gone.append(each)
            elif (difference := _difference(one, other)) != "":
                changed[each] = difference
            else:
                num_same += 1
    return Comparison(gone, changed, num_same)


def _difference(before: Node, after: Node) -> str:
    lines = [text_of(each).splitlines() for each in (before, after)]
    return "\n".join(list(difflib.unified_diff(*lines, lineterm="", n=2))[2:])


def page_of(comparison: Comparison, old: str, new: str) -> str:
    """Return the page, in Markdown; ``old`` and ``new`` are versions."""
    gone, changed, num_same = comparison
    parts = [
        f"# Rose's seams in vLLM {new}, compared with {old}",
        f"{len(gone)} are gone, {len(changed)} are different, {num_same} are the same.",
        "## Gone",
        "\n".join(f"- `{seam}`" for seam in gone) or "Nothing.",
        "## Different",
    ]
    parts += [f"### `{seam}`\n\n```diff\n{difference}\n```" for seam, difference in changed.items()]
    return "\n\n".join(parts) + "\n"


def download(wanted: str | None, folder: Path) -> tuple[str, Path]:
    """Download a release of vLLM; return its version and its folder of Python files.

    Args:
        wanted: its version; None: the newest one.
    """
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 34)] + [
        "--platform=manylinux1_x86_64"
    ]
    requirement = "vllm" if wanted is None else f"vllm=={wanted}"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *(*platforms, "--python-version=3.12", f"--dest={folder}", requirement),
        ],
        check=True,
    )
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return wheel.name.split("-")[1], folder / "vllm"


def installed() -> tuple[str, Path]:
    """Return version and folder of the vLLM that is installed."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed here: there is nothing to compare with")
    return version("vllm"), Path(spec.submodule_search_locations[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Download, compare, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="VERSION", help="default: the newest one")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="default: print it")
    options = parser.parse_args(arguments)
    seams, named = seams_of(PLUGIN)
    replaced = [Seam(*patch.target.split(":")) for patch in LEDGER.values()]
    old, old_root = installed()
    with tempfile.TemporaryDirectory() as folder:
        new, new_root = download(options.vllm, Path(folder))
        found = compare(Sources(old_root), Sources(new_root), [*replaced, *seams], named)
    page = page_of(found, old, new)
    if options.out is None:
        print(page)
    else:
        options.out.write_text(page, encoding="utf-8")
        print(
            f"vLLM {new}: {len(found.gone)} gone, {len(found.changed)} different, {found.num_same} the same"
        )
    return int(bool(found.gone))


if __name__ == "__main__":
    sys.exit(main())
