"""Imports inside rose_backend go one way only, and heavy ones stay out of the light rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.patience import HANG_S

PACKAGE = Path(__file__).resolve().parent.parent / "rose_backend"

CORE = frozenset({"errors", "config", "block_manager", "scheduling", "draft_depth", "kernels", "layers"})
ENGINE_CORE = CORE | {"models"}
EVERYTHING = ENGINE_CORE | {"compile_ahead", "engine", "server", "vllm_plugin"}

# Room -> rooms that it may import. "__init__" is the package's own front door.
ALLOWED = {
    "errors": frozenset[str](),
    "config": frozenset({"errors"}),
    "block_manager": frozenset({"errors", "config"}),
    "scheduling": frozenset({"errors", "config", "block_manager"}),
    "draft_depth": frozenset({"config"}),
    "kernels": frozenset({"errors", "config"}),
    "layers": frozenset({"errors", "config", "kernels"}),
    "models": frozenset({"errors", "config", "kernels", "layers"}),
    "compile_ahead": frozenset({"errors", "config", "kernels"}),
    "engine": ENGINE_CORE | {"compile_ahead"},
    "server": ENGINE_CORE | {"engine"},
    "vllm_plugin": CORE | {"compile_ahead"},
    "block_view": frozenset({"errors", "config", "block_manager"}),
    "conformance": frozenset({"vllm_plugin"}),
    "cli": EVERYTHING | {"block_view"},
    "__init__": EVERYTHING - {"server"},
}
# The front door may import the rest only inside functions or for type checkers: `import rose_backend` stays cheap.
LAZY_ROOMS = {"__init__": frozenset({"errors", "config"})}
# Room -> third-party modules that it may import; a room that is not named may import all but vllm.
THIRD_PARTY = {
    "errors": frozenset[str](),
    "config": frozenset[str](),
    "__init__": frozenset[str](),
    "block_manager": frozenset({"numpy"}),
    "scheduling": frozenset({"numpy", "torch"}),
    "draft_depth": frozenset({"numpy"}),
    "block_view": frozenset({"numpy", "rich", "prometheus_client"}),
}
# Third-party module -> the only rooms that may import it.
ONLY_IN = {"vllm": ("vllm_plugin", "conformance"), "pytest": ("conformance",)}
HEAVY_MODULES = (
    *("torch", "triton", "vllm", "transformers", "flashinfer", "fastapi"),
    "rose_backend.compile_ahead",
)
# What an engine on a CPU must do without, although it may import torch.
NOT_ON_A_CPU = ("triton", "vllm", "transformers", "flashinfer", "rose_backend.compile_ahead")


class ImportedModule(NamedTuple):
    """One import found in a file."""

    name: str
    line: int
    is_lazy: bool


class ImportCollector(ast.NodeVisitor):
    """Collects every import of one module, the literal ones of importlib.import_module too."""

    def __init__(self, package_parts: list[str]) -> None:
        self.found: list[ImportedModule] = []
        self._members: list[str] = []
        self._package_parts = package_parts
        self._lazy_depth = 0

    def modules(self) -> set[str]:
        """Return every name that was imported, and every name that was imported from it, be it a module or not."""
        return {each.name for each in self.found} | set(self._members)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            base = self._package_parts[: len(self._package_parts) - node.level + 1]
            module = ".".join([*base, module] if module else base)
        if module == "rose_backend":
            for alias in node.names:
                self._add(f"rose_backend.{alias.name}", node.lineno)
        else:
            self._add(module, node.lineno)
            self._members += [f"{module}.{alias.name}" for alias in node.names]

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__") and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                self._add(target.value, node.lineno)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_lazily(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._visit_lazily(node)
        else:
            self.generic_visit(node)

    def _visit_lazily(self, node: ast.AST) -> None:
        self._lazy_depth += 1
        self.generic_visit(node)
        self._lazy_depth -= 1

    def _add(self, name: str, line: int) -> None:
        self.found.append(ImportedModule(name, line, self._lazy_depth > 0))


def find_violations(package: Path) -> list[str]:
    """Return one line for each import under ``package`` that goes the wrong way."""
    violations = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        room = relative.parts[0].removesuffix(".py")
        if room not in ALLOWED:
            violations.append(f"{relative}: room {room!r} has no rule; add it to ALLOWED")
            continue
        package_parts = ["rose_backend", *relative.parts[:-1]]
        collector = ImportCollector(package_parts)
        collector.visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
        for imported in collector.found:
            reason = judge(room, imported)
            if reason:
                violations.append(f"{relative}:{imported.line}: {room} imports {imported.name}: {reason}")
    return violations


def judge(room: str, imported: ImportedModule) -> str:
    """Return why an import is wrong, or an empty string."""
    first, _, rest = imported.name.partition(".")
    if first == "rose_backend":
        target = rest.partition(".")[0]
        if target in ("", room, "__version__"):
            return ""
        if target not in ALLOWED[room]:
            return f"allowed are {', '.join(sorted(ALLOWED[room])) or 'none'}"
        if room in LAZY_ROOMS and not imported.is_lazy and target not in LAZY_ROOMS[room]:
            return "only inside a function"
        return ""
    if first in sys.stdlib_module_names:
        return ""
    if room not in ONLY_IN.get(first, (room,)):
        return f"only {' and '.join(ONLY_IN[first])} may import {first}"
    if room in THIRD_PARTY and first not in THIRD_PARTY[room]:
        return f"third-party modules allowed are {', '.join(sorted(THIRD_PARTY[room])) or 'none'}"
    return ""


def test_imports_go_one_way() -> None:
    assert find_violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("errors.py", "from rose_backend import config"),
        ("errors.py", "import numpy"),
        ("config.py", "import torch"),
        ("block_manager/pool.py", "import torch"),
        ("block_manager/pool.py", "def f():\n    from ..kernels import block_clone"),
        ("kernels/clone.py", "import rose_backend.block_manager.block_pool"),
        ("kernels/kv/clone.py", "from ...models import gpt2"),
        ("layers/attention.py", "from rose_backend.models.gpt2 import GPT2"),
        ("models/gpt2.py", "from rose_backend.engine import llm"),
        ("engine/core.py", "from vllm import LLM"),
        ("engine/core.py", "import importlib\nimportlib.import_module('vllm.config')"),
        ("engine/core.py", "from rose_backend.vllm_plugin import options"),
        ("engine/core.py", "from rose_backend.server import app"),
        ("engine/core.py", "if TYPE_CHECKING:\n    from rose_backend import vllm_plugin"),
        (
            "vllm_plugin/scheduler/scheduler.py",
            "from rose_backend.engine.scheduler import Scheduler",
        ),
        ("vllm_plugin/scheduler/scheduler.py", "from rose_backend import LLM"),
        ("vllm_plugin/attention/backend.py", "from rose_backend.models import registry"),
        ("block_view/page.py", "import torch"),
        ("block_view/monitor.py", "from rose_backend.engine.llm import LLM"),
        ("cli/__init__.py", "def run():\n    import vllm"),
        ("compile_ahead/pool.py", "from rose_backend.engine.llm import LLM"),
        ("server/app.py", "from rose_backend.cli.options import engine_options"),
        ("server/app.py", "from rose_backend.vllm_plugin import options"),
        ("__init__.py", "from rose_backend.engine.llm import LLM"),
        ("engine/core.py", "import pytest"),
        ("vllm_plugin/options.py", "from rose_backend.conformance import report"),
        ("conformance/report.py", "from rose_backend.engine.llm import LLM"),
        ("utils.py", ""),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    violations = find_violations(tmp_path)
    assert len(violations) == 1 and violations[0].startswith(file)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config.py", "from rose_backend.errors import ConfigError\nimport dataclasses"),
        (
            "block_manager/pool.py",
            "import numpy as np\nfrom .table import Table\nfrom rose_backend import errors",
        ),
        (
            "engine/core.py",
            "import torch\nfrom rose_backend.models.base import load_model\nfrom rose_backend import kernels",
        ),
        (
            "vllm_plugin/scheduler/scheduler.py",
            "import vllm\nfrom rose_backend.block_manager import BlockManager",
        ),
        ("conformance/conftest.py", "import pytest, vllm\nfrom rose_backend.vllm_plugin import register"),
        ("cli/blocks.py", "import torch\nfrom rose_backend.engine.llm import LLM"),
        ("cli/serve.py", "def run():\n    from rose_backend.server import serve"),
        ("server/app.py", "import fastapi\nfrom rose_backend.engine.async_engine import AsyncEngine"),
        ("__init__.py", "if TYPE_CHECKING:\n    from rose_backend.engine.llm import LLM"),
    ],
)
def test_a_right_import_passes(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert find_violations(tmp_path) == []


def graph_of_imports(package: Path, *, by_room: bool) -> dict[str, set[str]]:
    """Return which files of ``package`` import which, imports in functions and for type checkers included.

    Args:
        by_room: a folder below a room, as ``engine.output``, is one node; files elsewhere stay nodes of their own.
    """
    names = {
        ".".join([package.name, *path.relative_to(package).with_suffix("").parts]): path
        for path in package.rglob("*.py")
    }

    def node(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:3]) if by_room and len(parts) > 3 else name

    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        if path.name == "__init__.py":
            continue
        collector = ImportCollector(name.split(".")[:-1])
        collector.visit(ast.parse(path.read_text(encoding="utf-8")))
        targets = graph.setdefault(node(name), set())
        targets.update(node(each) for each in collector.modules() if each in names and each != name)
    for name, targets in graph.items():
        targets.discard(name)
    return graph


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of one circle, the first one again at its end; empty if there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            if circle := visit(target, [*path, node]):
                return circle
        done.add(node)
        return []

    for node in sorted(graph):
        if circle := visit(node, []):
            return circle
    return []


def write_package(folder: Path, files: dict[str, str]) -> Path:
    """Write the files of a package ``rose_backend`` below ``folder``; return its folder."""
    for name, source in files.items():
        path = folder / "rose_backend" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder / "rose_backend"


def test_a_circle_of_lazy_imports_is_found(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "server/a.py": "if TYPE_CHECKING:\n    from rose_backend.server.b import B",
            "server/b.py": "def f():\n    from rose_backend.server import c",
            "server/c.py": "import rose_backend.server.a",
        },
    )
    circle = find_circle(graph_of_imports(package, by_room=False))
    assert set(circle) == {f"rose_backend.server.{name}" for name in "abc"} and circle[0] == circle[-1]


def test_a_circle_of_rooms_is_found_where_files_have_none(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "engine/output/a.py": "from rose_backend.engine import request",
            "engine/request.py": "from rose_backend.engine.output.b import B",
            "engine/output/b.py": "",
        },
    )
    assert find_circle(graph_of_imports(package, by_room=False)) == []
    assert find_circle(graph_of_imports(package, by_room=True))


@pytest.mark.parametrize("by_room", [False, True], ids=["files", "rooms"])
def test_there_is_no_import_circle(by_room: bool) -> None:
    assert find_circle(graph_of_imports(PACKAGE, by_room=by_room)) == []


@pytest.mark.parametrize(
    "statement",
    [
        "import rose_backend",
        "import rose_backend.config, rose_backend.errors",
        "import rose_backend.block_manager",
        "import rose_backend.cli",
        "import rose_backend.block_view.page, rose_backend.block_view.terminal, rose_backend.block_view.monitor",
        "import rose_backend.vllm_plugin",
        "import rose_backend.conformance.plugin",
    ],
)
def test_light_modules_import_nothing_heavy(statement: str, tmp_path: Path) -> None:
    code = f"{statement}\nimport sys\nprint(*[name for name in {HEAVY_MODULES!r} if name in sys.modules])"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == []


@pytest.mark.parametrize(
    "model", ["tiny-gpt2", "tiny-qwen3-chat", "tiny-qwen3-chat-fp8", "tiny-qwen3-chat-w4a16"]
)
def test_an_engine_on_a_cpu_works_without_what_only_gpus_and_vllm_need(model: str, tmp_path: Path) -> None:
    # None in sys.modules makes an import fail, wherever it stands.
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_ON_A_CPU!r}))\n"
        "from rose_backend import LLM, SamplingParams\n"
        f"llm = LLM({str(PACKAGE.parent / 'models' / model)!r}, device='cpu', num_blocks=100, max_model_len=64)\n"
        "(answer,) = llm.generate(['a'], SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "print(len(answer.outputs[0].token_ids))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["3"]
