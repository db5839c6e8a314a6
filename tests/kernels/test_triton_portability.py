"""What every supported Triton must be able to parse: 3.6 stops at constructs that newer ones take."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rose_backend import kernels

KERNEL_FILES = sorted(Path(kernels.__file__).parent.rglob("*.py"))


def nested_targets(source: str) -> list[int]:
    """Return the lines that assign to a tuple inside a tuple, such as ``(a, b), c = ...``."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            items = target.elts if isinstance(target, ast.Tuple) else []
            if any(isinstance(item, (ast.Tuple, ast.List)) for item in items):
                lines.append(node.lineno)
    return lines


def shapes_of_fields(source: str) -> list[int]:
    """Return the lines that take the shape of zeros from fields of a tuple, such as ``tl.zeros([TILES.TILE])``."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.zeros"
        if any(isinstance(each, ast.Attribute) and each.attr.isupper() for each in ast.walk(node.args[0]))
    ]


def returned_nones(source: str) -> list[int]:
    """Return the lines where a jitted function returns a tuple of names of which one begins as None."""
    lines = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or "triton.jit" not in map(
            ast.unparse, function.decorator_list
        ):
            continue
        nones: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                pairs = zip(node.targets[0].elts, getattr(node.value, "elts", ()), strict=False)
                nones.update(ast.unparse(name) for name, value in pairs if ast.unparse(value) == "None")
            elif isinstance(node, ast.Assign) and ast.unparse(node.value) == "None":
                nones.update(map(ast.unparse, node.targets))
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
        lines += [
            node.lineno
            for node in returns
            if isinstance(node.value, ast.Tuple) and {"None", *nones} & {*map(ast.unparse, node.value.elts)}
        ]
    return lines


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.stem)
def test_no_kernel_returns_none_in_a_tuple(path: Path) -> None:
    found = returned_nones(path.read_text())
    assert found == [], (
        "Triton 3.6 raises TypeError: cannot convert None of type <class 'NoneType'> to tensor"
    )


@pytest.mark.parametrize("nones", ["b = None", "b, c = None, 1", "c = 1"])
def test_returned_nones_are_found(nones: str) -> None:
    value = "None" if nones == "c = 1" else "b"
    source = f"@triton.jit\ndef f(a):\n    {nones}\n    return a, {value}\n"
    assert returned_nones(source) == [4]
    assert returned_nones(source.replace("@triton.jit\n", "")) == []
    assert returned_nones("@triton.jit\ndef f(a):\n    b = None\n    return a\n") == []


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.stem)
def test_no_kernel_takes_the_shape_of_zeros_from_a_tuple(path: Path) -> None:
    found = shapes_of_fields(path.read_text())
    assert found == [], (
        "Triton 3.6 raises AttributeError: 'int' object has no attribute 'type'; tl.full does not"
    )


def test_shapes_of_fields_are_found() -> None:
    assert shapes_of_fields("tl.zeros([TILE], tl.int32)\ntl.zeros([TILES.TILE, 4], tl.int32)\n") == [2]


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.stem)
def test_no_kernel_unpacks_nested_tuples(path: Path) -> None:
    assert nested_targets(path.read_text()) == [], "Triton 3.6 raises TypeError: unhashable type: 'list'"


def test_nested_tuples_are_found() -> None:
    assert nested_targets("a, b = f()\n(a, b), c = g()\n") == [2]
