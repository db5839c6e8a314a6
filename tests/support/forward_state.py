"""Finds, in the sources of models, what Python changes while a step is computed: state that outlives the step.

``python -m tests.support.forward_state FOLDER`` prints what it finds below the folder of a ``vllm`` package.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

ENTRY_POINTS = ("forward", "embed_input_ids")
"""Of a model: what a replayed graph leaves out, and what runs in front of every step."""

ROOMS = ("model_executor/models", "models", "model_executor/layers")
"""Where vLLM keeps its models and what they are made of, below its package."""

_OF_CONTAINERS = {
    *("append", "appendleft", "extend", "insert", "remove", "clear", "pop", "popleft", "popitem"),
    *("update", "setdefault", "add", "discard", "__setattr__", "__setitem__"),
}
"""Methods that change a container. A tensor's end in an underscore."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class ModelClass:
    """One class of the sources."""

    name: str
    """``module:class``."""
    node: ast.ClassDef
    find: Callable[[ast.expr], ModelClass | None]
    """Returns the class that an expression names where this one is defined."""

    @cached_property
    def bases(self) -> list[ModelClass]:
        """Those that were read, too."""
        return self._named(self.node.bases)

    @cached_property
    def used(self) -> list[ModelClass]:
        """Classes that its body names."""
        return self._named(node for part in self.node.body for node in ast.walk(part))

    def _named(self, nodes: Iterable[ast.AST]) -> list[ModelClass]:
        named = (
            self.find(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
        )
        return [each for each in named if each is not None and each is not self]

    def lineage(self) -> list[ModelClass]:
        """Return itself and what it inherits from, in the order in which methods are looked up."""
        found: list[ModelClass] = [self]
        for base in self.bases:
            found += [each for each in base.lineage() if each not in found]
        return found

    def reached(self) -> list[ModelClass]:
        """Return itself and all classes that it may be built of."""
        found: dict[str, ModelClass] = {}
        waiting = [self]
        while waiting:
            each = waiting.pop()
            if each.name not in found:
                found[each.name] = each
                waiting += [*each.bases, *each.used]
        return list(found.values())

    def find_method(self, name: str, behind: ModelClass | None = None) -> tuple[ModelClass, _Function] | None:
        """Return a method and the class that has it; with ``behind`` what ``super()`` in that class finds."""
        lineage = self.lineage()
        for each in lineage[lineage.index(behind) + 1 if behind in lineage else 0 :]:
            for node in each.node.body:
                if isinstance(node, _Function) and node.name == name:
                    return each, node
        return None

    def changes(self) -> set[str]:
        """Return the attributes that its entry points, and the methods that these call on it, change."""
        found: set[str] = set()
        waiting = [self.find_method(name) for name in ENTRY_POINTS]
        seen: list[_Function] = []
        while waiting:
            entry = waiting.pop()
            if entry is None or entry[1] in seen:
                continue
            owner, method = entry
            seen.append(method)
            found |= set(_changed_attributes(method))
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Call):
                    if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                        waiting.append(self.find_method(node.attr))
                    elif isinstance(node.value, ast.Call) and _name_of(node.value.func) == "super":
                        waiting.append(self.find_method(node.attr, owner))
        return found


def read_classes(package: Path, name: str, rooms: tuple[str, ...] = ROOMS) -> dict[str, ModelClass]:
    """Parse all classes below the rooms of a package, by ``module:class``."""
    trees: dict[str, ast.Module] = {}
    gc.disable()  # It would look through all trees again and again.
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            parts = path.relative_to(package).with_suffix("").parts
            module = ".".join([name, *(part for part in parts if part != "__init__")])
            trees[module] = ast.parse(path.read_text())
    gc.enable()
    classes: dict[str, ModelClass] = {}
    for module, tree in trees.items():
        find = partial(_find_class, classes, module, _imports_of(module, tree))
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef):
                classes[f"{module}:{node.name}"] = ModelClass(f"{module}:{node.name}", node, find)
    return classes


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, those below conditions included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                yield from _statements(getattr(node, part, []))


def _find_class(
    classes: dict[str, ModelClass], module: str, imports: dict[str, str], node: ast.expr
) -> ModelClass | None:
    name = _name_of(node)
    return classes.get(f"{module}:{name}") or classes.get(imports.get(name, ""))


def find_state(classes: dict[str, ModelClass]) -> dict[str, set[str]]:
    """Return the attributes that each class changes in a step, of those that change any."""
    found = {name: each.changes() for name, each in classes.items()}
    return {name: changes for name, changes in found.items() if changes}


def _imports_of(module: str, tree: ast.Module) -> dict[str, str]:
    """Return what a module imports: the name that it has there, as ``module:name``."""
    names = {}
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            names.update({alias.asname or alias.name: f"{origin}:{alias.name}" for alias in node.names})
    return names


def _name_of(node: ast.expr) -> str:
    """Return a name's or attribute's last part; "" of anything else."""
    if isinstance(node, ast.Subscript):
        return _name_of(node.value)
    return getattr(node, "id", getattr(node, "attr", ""))


def _changed_attributes(method: _Function) -> Iterator[str]:
    """Yield what a method changes that was there before it was called."""
    held = {"self": ""}  # names of this method, and the attribute that they stand for
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            attribute = _attribute_of(node.value, held)
            if attribute:
                held[node.targets[0].id] = attribute
    for node in ast.walk(method):
        for changed in _changed_by(node):
            attribute = _attribute_of(changed, held)
            if attribute and not isinstance(changed, ast.Name):
                yield attribute
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names


def _changed_by(node: ast.AST) -> list[ast.expr]:
    """Return the expressions whose values a statement or call changes."""
    if isinstance(node, ast.Assign):
        return [each for target in node.targets for each in _flat(target)]
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
        return _flat(node.target)
    if isinstance(node, ast.Delete):
        return node.targets
    if not isinstance(node, ast.Call):
        return []
    changed = [each.value for each in node.keywords if each.arg == "out"]
    name = _name_of(node.func)
    if name in ("setattr", "delattr") and len(node.args) > 1:
        attribute = node.args[1]
        name = str(attribute.value) if isinstance(attribute, ast.Constant) else "?"
        changed.append(ast.Attribute(node.args[0], name))
    elif isinstance(node.func, ast.Attribute) and (
        name in _OF_CONTAINERS or (name.endswith("_") and not name.endswith("__"))
    ):
        changed.append(ast.Subscript(node.func.value, ast.Constant(0)))
    return changed


def _flat(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [each for element in target.elts for each in _flat(element)]
    return [target.value] if isinstance(target, ast.Starred) else [target]


def _attribute_of(node: ast.expr, held: dict[str, str]) -> str:
    """Return the attribute of ``self`` that an expression lies in; "" if in none."""
    last = ""
    while True:
        if isinstance(node, ast.Attribute):
            last, node = node.attr, node.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Name) and node.id in held:
            return held[node.id] or last
        else:
            return ""


if __name__ == "__main__":
    for found, attributes in sorted(find_state(read_classes(Path(sys.argv[1]), "vllm")).items()):
        print(found, *sorted(attributes))
