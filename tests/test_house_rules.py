"""Functions stay short and take few arguments, and what is public is used by more than tests.

The tables list the exceptions. Those of long functions and wide signatures may only shrink: an entry that is no longer
needed fails like a new offender.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rose_backend"
# Where a name counts as used, besides the package itself.
USERS = ("benchmarks", "examples", "scripts", "docs", "README.md", "pyproject.toml")

MAX_LINES = 70
MAX_PARAMETERS = 8

# File and function -> its lines at most. Kernels are among them.
LONG_FUNCTIONS = {
    "kernels/attention/paged_decode.py _paged_decode_kernel": 171,
    "kernels/attention/paged_prefill.py _paged_prefill_kernel": 104,
    "kernels/linear/small_batch_linear.py small_batch_linear_kernel": 109,
}
# File and function -> its parameters at most. Kernels and references take as many as they need.
WIDE_SIGNATURES = {
    "block_manager/books.py Books.__init__": 10,
}
# The same where vLLM prescribes the signature.
VLLM_SIGNATURES = {
    "vllm_plugin/attention/backend.py RoseAttentionBackend.supports_combination": 9,
    "vllm_plugin/attention/backend.py RoseAttentionImpl.__init__": 11,
    "vllm_plugin/attention/backend.py RoseAttentionImpl.forward": 11,
    "vllm_plugin/kv_cache/manager.py RoseKVCacheManager.__init__": 11,
    "vllm_plugin/kv_cache/manager.py RoseKVCacheManager.allocate_slots": 11,
    "vllm_plugin/sampler.py ReplayedSampling.__call__": 9,
}

# Who calls public names that occur nowhere else in the package -> those names.
CALLED_FROM_OUTSIDE = {
    "asyncio's transports": {
        *("connection_made", "connection_lost", "data_received", "eof_received"),
        *("pause_writing", "resume_writing"),
    },
    "httptools' parser": {
        *("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
    },
    "Ray Serve, of a router": {
        *("initialize_state", "choose_replicas", "on_send_request", "on_request_completed"),
        *("on_replica_actor_died", "update_replicas"),
    },
    "Ray Serve, of a replica": {"check_health"},
    "uvicorn": {"handle_exit", "on_response_complete", "send_400_response"},
    "Triton's launch of a kernel": {"launch_metadata"},
    "vLLM's choice of an attention backend": {
        *("get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes", "get_cudagraph_support"),
        *("supports_head_size", "supports_sliding_window", "supports_sink", "supports_attn_type"),
        *("supports_combination", "customize_spec"),
    },
    "vLLM's scheduler, of its KV cache manager": {
        *("create_kv_cache_blocks", "get_computed_blocks_for_connector"),
        *("truncate_computed_blocks", "remove_skipped_blocks", "pop_blocks_for_free", "evict_blocks"),
        *("get_block_ids_for_computed_tokens", "estimate_cached_tokens", "record_blocks_for_zeroing"),
        *("record_prefix_cache_stats", "make_prefix_cache_stats"),
        *("take_boundary_state_offloads", "finalize_partial_tail_offloads"),
    },
    "part of the interface of vLLM's KV cache manager, which tests/vllm_plugin/test_interface_drift.py compares": {
        "get_num_common_prefix_blocks",
    },
    "vLLM's KV connectors, of blocks": {"get_unhashed_block_ids", "is_null"},
    "vLLM's engine, of a step's output": {"get_output", "get_kv_connector_output"},
    "vLLM's model registry, by the names that model_choice.py makes": {
        *("RoseMiMoForCausalLM", "RoseMistralForCausalLM", "RoseQwen2ForCausalLM", "RoseQwen3ForCausalLM"),
        *("RoseQwen2_5_VLForConditionalGeneration", "RoseQwen3VLForConditionalGeneration"),
    },
    "vLLM's drafter, of the model of a head": {"get_top_tokens"},
    "FastAPI, of a route": {"find_response", "list_models"},
    "users, as of vLLM's LLM": {"get_default_sampling_params"},
    "published test vectors of the random generator, which tests hold the reference to": {"philox4x32"},
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(package: Path) -> Iterator[tuple[Path, str, Function]]:
    """Yield the file, the qualified name and the node of each function below ``package``."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if not isinstance(child, ast.ClassDef):
                    yield prefix + child.name, child
                yield from visit(child, f"{prefix}{child.name}.")
            else:
                yield from visit(child, prefix)

    for path in sorted(package.rglob("*.py")):
        for name, node in visit(ast.parse(path.read_text(encoding="utf-8")), ""):
            yield path.relative_to(package), name, node


def num_lines(node: Function) -> int:
    """Return the lines from ``def`` to the last one."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_parameters(node: Function) -> int:
    """Return the named parameters, ``self`` and ``cls`` apart."""
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_kernel(node: Function) -> bool:
    """Return whether Triton compiles it."""
    return any("jit" in ast.unparse(each) for each in node.decorator_list)


def compare(found: Mapping[str, int], limit: int, exceptions: Mapping[str, int], what: str) -> list[str]:
    """Return one line for each number over ``limit`` that no exception allows, and for each exception without need."""
    wrong = [
        f"{name}: {number} {what}, allowed are {exceptions.get(name, limit)}"
        for name, number in found.items()
        if number > exceptions.get(name, limit)
    ]
    return wrong + [
        f"{name}: is listed and no longer needs to be" for name in exceptions if found.get(name, 0) <= limit
    ]


def find_long_functions(package: Path, exceptions: Mapping[str, int]) -> list[str]:
    """Return one line for each function that is too long."""
    found = {f"{path.as_posix()} {name}": num_lines(node) for path, name, node in functions(package)}
    return compare(found, MAX_LINES, exceptions, "lines")


def find_wide_signatures(package: Path, exceptions: Mapping[str, int]) -> list[str]:
    """Return one line for each function, neither kernel nor reference, with too many parameters."""
    found = {
        f"{path.as_posix()} {name}": num_parameters(node)
        for path, name, node in functions(package)
        if not is_kernel(node) and path.name != "reference.py"
    }
    return compare(found, MAX_PARAMETERS, exceptions, "parameters")


class Names(ast.NodeVisitor):
    """Public functions, classes and methods of one file, and the names that it uses.

    A use is a name that is read, an attribute, or a string that is a name or a dotted path. Imports, ``__all__``,
    recursion and an override's call of what it overrides are none.
    """

    def __init__(self, source: str) -> None:
        self.defined: dict[str, int] = {}
        self.used: set[str] = set()
        self._enclosing: list[str] = []
        self._num_functions = 0
        self.visit(ast.parse(source))

    def visit_ClassDef(self, node: ast.ClassDef | Function) -> None:
        if not node.name.startswith("_") and not self._num_functions:
            self.defined.setdefault(node.name, node.lineno)
        is_function = not isinstance(node, ast.ClassDef)
        self._enclosing.append(node.name)
        self._num_functions += is_function
        self.generic_visit(node)
        self._num_functions -= is_function
        self._enclosing.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef

    def visit_Assign(self, node: ast.Assign) -> None:
        if ast.unparse(node.targets[0]) != "__all__":
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id not in self._enclosing:
            self.used.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr not in self._enclosing or ast.unparse(node.value) not in ("self", "cls", "super()"):
            self.used.add(node.attr)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value):
            self.used.update(re.findall(r"\w+", node.value))


def names_in(path: Path) -> set[str]:
    """Return the names that a file outside of the package uses: of prose only what is marked as code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return Names(text).used
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    return set(re.findall(r"\w+", text))


def find_unused_names(package: Path, users: Collection[Path], exceptions: Collection[str]) -> list[str]:
    """Return one line for each public name of ``package`` that neither it nor ``users`` use, and for each exception
    without need. The suites of ``conformance`` are tests, which pytest calls.
    """
    used: set[str] = set()
    used_by_suites: set[str] = set()
    for user in users:
        # Proposals list what vLLM calls, which is no use of ours.
        paths = [
            each
            for each in user.rglob("*")
            if each.suffix in (".py", ".md", ".toml") and "proposals" not in each.parts
        ]
        used.update(*(names_in(path) for path in (paths if user.is_dir() else [user])))
    defined: dict[str, str] = {}
    for path in sorted(package.rglob("*.py")):
        names = Names(path.read_text(encoding="utf-8"))
        is_suite = path.relative_to(package).parts[0] == "conformance"
        (used_by_suites if is_suite else used).update(names.used)
        for name, line in names.defined.items():
            if not (is_suite and name.startswith(("test_", "pytest_"))):
                defined.setdefault(name, f"{path.relative_to(package).as_posix()}:{line}")
    unused = {
        name
        for name in defined.keys() - used
        if not (defined[name].startswith("conformance/") and name in used_by_suites)
    }
    wrong = [f"{defined[name]}: nothing but tests uses {name}" for name in sorted(unused - set(exceptions))]
    return wrong + [
        f"{name}: is listed and no longer needs to be" for name in sorted(set(exceptions) - unused)
    ]


def test_functions_are_short() -> None:
    assert find_long_functions(PACKAGE, LONG_FUNCTIONS) == []


def test_functions_take_few_parameters() -> None:
    assert find_wide_signatures(PACKAGE, WIDE_SIGNATURES | VLLM_SIGNATURES) == []


def test_public_names_are_used_by_more_than_tests() -> None:
    exceptions = [name for names in CALLED_FROM_OUTSIDE.values() for name in names]
    assert len(set(exceptions)) == len(exceptions)
    assert find_unused_names(PACKAGE, [ROOT / each for each in USERS], exceptions) == []


def plant(folder: Path, file: str, source: str) -> Path:
    """Write one file of a package below ``folder``; return the package's folder."""
    path = folder / "package" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return folder / "package"


def source_of(lines: int, parameters: int, *, decorator: str = "") -> str:
    """Return a class whose method has that many lines, and that many parameters besides ``self``."""
    arguments = ", ".join(["self", *(f"argument_{index}" for index in range(parameters - 1)), "*", "last"])
    body = "\n".join(["        pass"] * (lines - 1))
    return f"class Owner:\n    {decorator}\n    def method({arguments}):\n{body}\n"


def test_a_long_function_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "kernels/ops.py", source_of(MAX_LINES + 1, 2, decorator="@triton.jit"))
    name = "kernels/ops.py Owner.method"
    assert find_long_functions(package, {}) == [f"{name}: 71 lines, allowed are 70"]
    assert find_long_functions(package, {name: 71}) == []
    (package / "kernels/ops.py").write_text(source_of(MAX_LINES, 2))
    assert find_long_functions(package, {}) == []
    assert find_long_functions(package, {name: 71}) == [f"{name}: is listed and no longer needs to be"]


def test_a_listed_function_that_grows_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "ops.py", source_of(MAX_LINES + 3, 2))
    assert find_long_functions(package, {"ops.py Owner.method": 72}) == [
        "ops.py Owner.method: 73 lines, allowed are 72"
    ]


def test_a_wide_signature_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "ops.py", source_of(2, MAX_PARAMETERS + 1))
    assert find_wide_signatures(package, {}) == ["ops.py Owner.method: 9 parameters, allowed are 8"]
    assert find_wide_signatures(package, {"ops.py Owner.method": 9}) == []
    (package / "ops.py").write_text(source_of(2, MAX_PARAMETERS))
    assert find_wide_signatures(package, {}) == []


@pytest.mark.parametrize(
    ("file", "decorator"), [("attention/kernels.py", "@triton.jit"), ("attention/reference.py", "")]
)
def test_kernels_and_references_take_what_they_need(tmp_path: Path, file: str, decorator: str) -> None:
    package = plant(tmp_path, file, source_of(2, MAX_PARAMETERS + 1, decorator=decorator))
    assert find_wide_signatures(package, {}) == []


@pytest.mark.parametrize(
    "source",
    [
        "def unused():\n    return unused()",
        "class unused:\n    pass",
        "class _Owner(Base):\n    def unused(self):\n        super().unused()",
        "class _Owner:\n    async def unused(self):\n        '''See unused.'''",
        "from elsewhere import unused as other\n__all__ = ['unused']\n@property\ndef unused():\n    pass",
    ],
)
def test_a_name_that_only_tests_use_is_found(tmp_path: Path, source: str) -> None:
    package = plant(tmp_path, "room/file.py", source)
    (found,) = find_unused_names(package, [], [])
    assert found.startswith("room/file.py:") and found.endswith("nothing but tests uses unused")
    assert find_unused_names(package, [], ["unused"]) == []


@pytest.mark.parametrize(
    ("user", "text"),
    [
        ("package/other.py", "from room import file\nfile.name()"),
        ("package/other.py", "TARGET = 'room.file:name'"),
        ("package/other.py", "class _Wrapper:\n    def name(self):\n        self._inner.name()"),
        ("examples/one.py", "name()"),
        ("docs/page.md", "Call `room.name()`."),
        ("docs/page.md", "```python\nname()\n```"),
    ],
)
def test_a_used_name_passes_and_needs_no_exception(tmp_path: Path, user: str, text: str) -> None:
    package = plant(tmp_path, "room.py", "def name():\n    pass")
    users = [tmp_path / "examples", tmp_path / "docs"]
    for folder in users:
        folder.mkdir()
    (tmp_path / user).write_text(text)
    assert find_unused_names(package, users, []) == []
    assert find_unused_names(package, users, ["name"]) == ["name: is listed and no longer needs to be"]


def test_a_word_of_prose_is_no_use(tmp_path: Path) -> None:
    package = plant(tmp_path, "room.py", "'''A name.'''\ndef name():\n    pass")
    (tmp_path / "page.md").write_text("Every name is listed.")
    assert len(find_unused_names(package, [tmp_path / "page.md"], [])) == 1
