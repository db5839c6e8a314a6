"""Break the package in small ways, one at a time, and note which test finds each break.

    python -m tests.support.breaks --out before.json [--seed N] [--room ROOM] [--minutes N] [--list]
    python -m tests.support.breaks --compare before.json --out after.json

The first line chooses breaks by a seed, at least three in each room, makes each one alone in a copy of the last commit,
and runs the tests that are closest to it, up to the first failure. The second one makes in another tree the breaks that
were found, and prints which of them are missed there or have nothing to break any more. Results are written after each
break; the same command goes on where it was interrupted, and repeats what has timed out. Docstrings, log lines, error
texts and what only type checkers read are left alone, and so is what only runs on a GPU, but for Triton kernels, which
the interpreter runs.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

KINDS = ("comparison", "arithmetic", "condition", "statement", "constant", "arguments")
NUM_BREAKS = 60
MIN_PER_ROOM = 3
GPU_ONLY = ("kernels/gpu_properties.py",)
HANG_S = 240
"""Of one test, on the clock."""
WAVES = (3, 5, 8)
"""How many files of tests, of the closest ones, are run in one process after the other."""

# Folders and files with the tests of a room, the narrowest first.
TESTS = {
    "block_manager": ("block_manager", "../rose_backend/conformance/block_manager", "engine", "vllm_plugin"),
    "block_view": ("block_view", "test_cli.py"),
    "cli": ("test_cli.py", "engine", "server", "test_docs.py", "block_view"),
    "compile_ahead": ("compile_ahead", "kernels", "engine", "vllm_plugin"),
    "engine": ("engine", "server", "models"),
    "kernels": ("kernels", "../rose_backend/conformance/attention", "engine", "models"),
    "layers": ("kernels", "models", "engine", "vllm_plugin"),
    "models": ("models", "engine"),
    "scheduling": ("block_manager", "engine", "vllm_plugin"),
    "server": ("server", "engine"),
    "vllm_plugin": ("vllm_plugin", "../rose_backend/conformance"),
}

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_LOGS = re.compile(r"(.*\.)?(logger|log|warnings|logging)\.\w+|print")
_NAMES_TYPES = re.compile(r"(typing\.)?(TypeVar|ParamSpec|NewType|cast|Literal)|\w+(Error|Exception)")
_KEEPS_ORDER = re.compile(
    r"(.*\.)?(max|min|maximum|minimum|gcd|lcm|isclose|add|multiply|logical_\w+|\w+attr|isinstance)"
)
"""Functions whose arguments commute, or end any program at once when they are swapped."""
_ON_GPU = re.compile(r"\bis_cuda\b|torch\.cuda")


@dataclass(frozen=True)
class Break:
    """One change of one file. Line numbers move, so all but ``number`` say which one it is."""

    room: str
    file: str
    """Below the package."""
    function: str
    """Dotted, with its class; empty: none."""
    kind: str
    line: str
    """The text of its first line."""
    change: str
    """Old and new code of what is changed."""
    number: int
    """Of the line."""

    def is_like(self, other: Break, *fields: str) -> bool:
        """Return whether two breaks agree in these fields, in kind, line and change."""
        return all(getattr(self, f) == getattr(other, f) for f in (*fields, "kind", "line", "change"))


class Finder(ast.NodeVisitor):
    """Finds all breaks of one file: ``found`` has each with the node that it replaces and what by."""

    def __init__(self, source: str, file: str) -> None:
        self.found: list[tuple[Break, ast.expr | ast.stmt, ast.expr | ast.stmt]] = []
        self._lines = source.splitlines()
        self._file = file
        self._scope: list[str] = []
        self._last: list[ast.stmt] = []
        """The last statement of each function around."""
        self._visit_all(ast.parse(source).body)

    def _add(self, kind: str, old: ast.expr | ast.stmt, new: ast.expr | ast.stmt) -> None:
        change = " -> ".join(" ".join(ast.unparse(node).split())[:100] for node in (old, new))
        line = self._lines[old.lineno - 1].strip()
        room = room_of(self._file)
        found = Break(room, self._file, ".".join(self._scope), kind, line, change, old.lineno)
        self.found.append((found, old, new))

    def _visit_all(self, nodes: list[Any]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self._visit_all([*node.args.defaults, *node.args.kw_defaults])
        self._scope.append(node.name)
        self._last.append(node.body[-1])
        self._visit_all(node.body)
        self._last.pop()
        self._scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self._visit_all(node.body)
        self._scope.pop()

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if "TYPE_CHECKING" not in test and not _ON_GPU.search(test):
            if "__name__" in test:
                return
            self._negate(node.test)
            self._visit_all([node.test, *node.body])
        self._visit_all(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if not _ON_GPU.search(ast.unparse(node.test)):
            self._negate(node.test)
            self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, (ast.Constant, ast.Compare)):
            is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
            self._add("condition", test, test.operand if is_negated else ast.UnaryOp(ast.Not(), test))

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave it alone: a broken invariant is not what tests look for."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave it alone: it is what people read."""

    def visit_Raise(self, node: ast.Raise) -> None:
        if node.exc is not None and "NotImplemented" not in ast.unparse(node.exc):
            self._drop(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node is not self._last[-1]:
            self._drop(node)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call):
            if not _LOGS.fullmatch(ast.unparse(value.func)):
                self._drop(node)
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self._scope and isinstance(node.value, (ast.Subscript, ast.BinOp)):
            return  # an alias of a type
        is_attribute = isinstance(node.targets[0], ast.Attribute)
        if is_attribute and self._last and self._scope[-1] != "__init__":
            self._drop(node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.value])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._change_operator(node)
        self.generic_visit(node)

    def _drop(self, node: ast.stmt) -> None:
        self._add("statement", node, ast.Pass())

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            for op in _COMPARISONS[type(node.ops[0])]:
                new = deepcopy(node)
                new.ops = [op()]
                self._add("comparison", node, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        if not any(
            isinstance(s, (ast.JoinedStr, ast.List, ast.Tuple)) or _is_text(s) or _is_none(s) for s in sides
        ):
            self._change_operator(node)
        self.generic_visit(node)

    def _change_operator(self, node: ast.BinOp | ast.AugAssign) -> None:
        if op := _ARITHMETIC.get(type(node.op)):
            new = deepcopy(node)
            new.op = op()
            self._add("arithmetic", node, new)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, ast.Constant(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add("constant", node, ast.Constant(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        if _LOGS.fullmatch(function) or _NAMES_TYPES.fullmatch(function):
            return
        args = node.args
        if len(args) > 1 and not _KEEPS_ORDER.fullmatch(function):
            new = deepcopy(node)
            new.args[:2] = args[1], args[0]
            is_starred = any(isinstance(arg, ast.Starred) for arg in args[:2])
            if not is_starred and ast.unparse(new) != ast.unparse(node):
                self._add("arguments", node, new)
        self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> None:
        """Of a lambda: its defaults alone."""
        self._visit_all([*node.defaults, *node.kw_defaults])


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def broken(source: str, old: ast.expr | ast.stmt, new: ast.expr | ast.stmt) -> str:
    """Return the source with a node replaced; all lines but its own stay as they are."""
    lines = source.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: old.lineno - 1])) + old.col_offset
    end = sum(map(len, lines[: old.end_lineno - 1])) + old.end_col_offset
    text = ast.unparse(new)
    if isinstance(new, ast.expr) and not isinstance(new, (ast.Constant, ast.Call)):
        text = f"({text})"
    data = source.encode()
    changed = (data[:begin] + text.encode() + data[end:]).decode()
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), f"{text}: nothing is changed"
    return changed


def room_of(file: str) -> str:
    """Return the room of a file of the package: its first folder, or a module that is a room of one file."""
    return file.split("/")[0].removesuffix(".py")


def find_breaks(package: Path) -> list[Break]:
    """Return every break of a package that there could be."""
    found = []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if room_of(file) in TESTS and file not in GPU_ONLY:
            found += [each for each, _, _ in Finder(path.read_text(encoding="utf-8"), file).found]
    return found


def choose(candidates: list[Break], seed: int, count: int = NUM_BREAKS) -> list[Break]:
    """Return ``count`` breaks of different functions, first one of every room, then another one, and so on.

    Each room has at least ``MIN_PER_ROOM``, large rooms more. All kinds are as frequent where there are enough.
    """
    by_room: dict[str, list[Break]] = {}
    for each in candidates:
        by_room.setdefault(each.room, []).append(each)
    rng = random.Random(seed)
    rooms = sorted(by_room)
    shares = dict.fromkeys(rooms, MIN_PER_ROOM)
    sizes = [len(by_room[room]) for room in rooms]
    for room in rng.choices(rooms, sizes, k=max(count - MIN_PER_ROOM * len(rooms), 0)):
        shares[room] += 1
    chosen: dict[str, list[Break]] = {}
    for room in rooms:
        own = random.Random(f"{seed} {room}")
        left = own.sample(by_room[room], len(by_room[room]))
        kinds = own.sample(KINDS, len(KINDS))
        picked: list[Break] = []
        while len(picked) < shares[room] and left:
            kinds.append(kinds.pop(0))
            pick = next((each for each in left if each.kind == kinds[-1]), left[0])
            picked.append(pick)
            left = [each for each in left if (each.file, each.function) != (pick.file, pick.function)]
        chosen[room] = picked
    rounds = range(max(map(len, chosen.values()), default=0))
    return [chosen[room][i] for i in rounds for room in rooms if i < len(chosen[room])]


def matched(wanted: Break, candidates: list[Break]) -> Break | None:
    """Return the same break of another tree; functions and files may have moved. None: its line is gone."""
    for fields in (("file", "function"), ("function",), ("file",), ()):
        alike = [each for each in candidates if each.is_like(wanted, *fields)]
        if alike and (fields or len(alike) == 1):
            # A function may have the same line twice.
            return min(alike, key=lambda each: abs(each.number - wanted.number))
    return None


def close_tests(wanted: Break, tests: Path) -> list[str]:
    """Return files of tests, the closest to a break first, relative to the tests' folder.

    Those named like its file come first, then those that name its function, class or file, by folder and length.
    """
    stem = Path(wanted.file).stem
    if stem in ("ops", "reference", "__init__"):
        stem = Path(wanted.file).parent.name
    names = [name for name in wanted.function.split(".") if name and not name.startswith("__")]
    module = "rose_backend/" + wanted.file.removesuffix(".py").removesuffix("/__init__")
    patterns = [rf"\b{name}\b" for name in reversed(names)]
    patterns += [re.escape(module.replace("/", ".")), rf"\b{stem}\b"]
    ranked = []
    for order, place in enumerate(TESTS[wanted.room]):
        root = tests / place
        for path in sorted(root.rglob("test_*.py")) if root.is_dir() else [root]:
            if path.exists() and "gpu" not in path.stem:
                text = path.read_text(encoding="utf-8")
                is_named = path.stem.startswith(f"test_{stem}")
                mentions = [re.search(pattern, text) is None for pattern in patterns]
                key = (not is_named, mentions.count(True), order, len(text))
                ranked.append((key, path.relative_to(tests).as_posix()))
    return [name for _, name in sorted(ranked)]


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield the folder of a copy of the last commit."""
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
        copy = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(copy)], check=True)
        try:
            yield copy
        finally:
            subprocess.run([*git, "remove", "--force", str(copy)], check=False)


@contextmanager
def applied(wanted: Break, package: Path) -> Iterator[None]:
    """Break a package, and mend it again."""
    path = package / wanted.file
    source = path.read_text(encoding="utf-8")
    old, new = next((old, new) for each, old, new in Finder(source, wanted.file).found if each == wanted)
    path.write_text(broken(source, old, new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")


def _seconds_of(group: int) -> float:
    """Return the CPU seconds of a process group so far, of children that have ended too."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[2]) == group:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_tests(
    tests: list[str], tree: Path, budget_s: float, *, stops: bool = True
) -> tuple[list[str], float, bool]:
    """Run tests of a tree.

    Args:
        tests: files, or names of tests.
        budget_s: CPU seconds; three times as many on the clock.
        stops: at the first failure.

    Returns:
        What failed, CPU seconds, and whether the budget was enough.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *["-x"] * stops]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, f"--timeout={HANG_S}", *tests],
            cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        started, used = time.monotonic(), 0.0
        try:
            while process.poll() is None:
                time.sleep(0.5)
                used = max(used, _seconds_of(process.pid))
                if used > budget_s or time.monotonic() - started > 3 * budget_s:
                    return [], used, False
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        output.seek(0)
        text = output.read()
    if process.returncode in (0, 5):  # 5: nothing in these files is run here
        return [], used, True
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return failed or [f"exit code {process.returncode}"], used, True


def look_for(wanted: Break, tree: Path, budget_s: float, first: str = "") -> dict[str, Any]:
    """Return the result of a break: "found" with the test that found it, "missed", or "timeout".

    Args:
        first: a file of tests that is run before the others.
    """
    files = close_tests(wanted, tree / "tests")
    waves = list(WAVES)
    if first in files:
        files.remove(first)
        files.insert(0, first)
        waves.insert(0, 1)
    used, result = 0.0, {"result": "missed", "test": ""}
    with applied(wanted, tree / "rose_backend"):
        for count in waves:
            wave, files = [f"tests/{name}" for name in files[:count]], files[count:]
            if not wave:
                break
            failed, seconds, is_whole = run_tests(wave, tree, budget_s - used)
            used += seconds
            if failed:
                result = {"result": "found", "test": failed[0]}
                break
            if not is_whole or used >= budget_s:
                result["result"] = "timeout"
                break
    return {**result, "seconds": round(used, 1)}


def confirm(results: list[dict[str, Any]], tree: Path, budget_s: float) -> None:
    """Set what was found by a test that fails without a break, too, to "unclear"."""
    tests = sorted({r["test"] for r in results if r["result"] == "found" and "::" in r["test"]})
    # Whole files' worth of parameters: a name may be cut off at a dash.
    failed, _, _ = run_tests(sorted({test.split("[")[0] for test in tests}), tree, budget_s, stops=False)
    for r in results:
        if r.get("test") in failed:
            r["result"] = "unclear"


def lost(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """Return one line for each break that was found before and is not afterwards."""
    lines = []
    for was in (each for each in before if each["result"] == "found"):
        now = next((each for each in after if each["before"] == identity(was)), None)
        if now is None:
            lines.append(f"not run: {describe(was)}")
        elif now["result"] != "found":
            what = "its line is gone" if now["result"] == "gone" else now["result"]
            lines.append(f"{what}: {describe(was)}; found before by {was['test']}")
    return lines


def identity(result: dict[str, Any]) -> list[str]:
    """Return what tells a break from others."""
    return [result[name] for name in ("file", "function", "kind", "line", "change")]


def describe(result: dict[str, Any]) -> str:
    return f"{result['file']}:{result['number']} {result['function']}, {result['kind']}: {result['change']}"


def _planned(
    options: argparse.Namespace, candidates: list[Break]
) -> list[tuple[Break | None, dict[str, Any]]]:
    """Return the breaks to make, each with what its result begins with; None: its line is gone."""
    if options.compare is None:
        wanted = choose(candidates, options.seed)
        plan = [(each, {**asdict(each), "before": None}) for each in wanted]
    else:
        plan = []
        for was in json.loads(options.compare.read_text(encoding="utf-8"))["breaks"]:
            if was["result"] == "found":
                old = Break(**{name: was[name] for name in Break.__dataclass_fields__})
                new = matched(old, candidates)
                result = {**asdict(new or old), "before": identity(was)}
                plan.append((new, result | {"first": was["test"].split("::")[0].removeprefix("tests/")}))
    return [each for each in plan if options.room in (None, each[1]["room"])]


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if ``--compare`` has lost a break."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", choices=sorted(TESTS), help="only this room's breaks")
    parser.add_argument("--out", type=Path, help="where results go, and what is not repeated")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="make the breaks that FILE says were found"
    )
    parser.add_argument(
        "--budget", type=float, default=120, help="CPU seconds of a break's tests (default: 120)"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no break afterwards")
    parser.add_argument("--lock", type=Path, help="a file that is locked during each break, as flock does")
    parser.add_argument("--list", action="store_true", help="print the breaks and run nothing")
    options = parser.parse_args(arguments)
    if options.list:
        for _, result in _planned(options, find_breaks(ROOT / "rose_backend")):
            print(describe(result))
        return 0
    with copied_tree() as tree:
        results = _run(options, tree)
    if options.compare is None:
        return 0
    lines = lost(json.loads(options.compare.read_text(encoding="utf-8"))["breaks"], results)
    print("\n".join(lines) or "nothing that was found is missed")
    return int(bool(lines))


def _run(options: argparse.Namespace, tree: Path) -> list[dict[str, Any]]:
    """Return all results, after each of which they are written."""
    end = time.monotonic() + 60 * options.minutes
    commit = subprocess.check_output(["git", "-C", str(tree), "rev-parse", "HEAD"], text=True).strip()
    results: list[dict[str, Any]] = []
    if options.out is not None and options.out.exists():
        earlier = json.loads(options.out.read_text(encoding="utf-8"))["breaks"]
        results = [each for each in earlier if each["result"] != "timeout"]
    done = [(identity(each), each["before"]) for each in results]

    def keep() -> None:
        if options.out is not None:
            content = {"seed": options.seed, "commit": commit, "breaks": results}
            options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    for wanted, result in _planned(options, find_breaks(tree / "rose_backend")):
        if (identity(result), result["before"]) in done:
            continue
        with options.lock.open("w") if options.lock else nullcontext() as lock:
            if lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
            if time.monotonic() > end:
                return results
            first = result.pop("first", "")
            result |= look_for(wanted, tree, options.budget, first) if wanted else {"result": "gone"}
        results.append(result)
        keep()
        print(f"{result['result']}: {describe(result)} {result.get('test', '')}", flush=True)
        time.sleep(1)  # for those who wait for the lock
    confirm(results, tree, min(10 * options.budget, (end - time.monotonic()) / 3))
    keep()
    return results


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
