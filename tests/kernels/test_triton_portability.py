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
