"""Write the tables in docs/options.md from the code that reads the options, or check that they agree.

    python scripts/document_options.py [--check]

A table stands between ``<!-- options: NAME -->`` and ``<!-- end of options -->``; NAME is a command of ``rose``,
``--additional-config`` for the keys that vLLM passes on, or ``requests`` for the fields of HTTP requests. What stands
around the tables is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rose_backend import config
from rose_backend.cli import build_parser
from rose_backend.config import PluginConfig
from rose_backend.server.protocol import (
    IGNORED,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
PLUGIN_KEYS = "--additional-config"
REQUESTS = "requests"
ROUTES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SECTION = re.compile(r"(<!-- options: (?P<name>.+?) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command of ``rose``."""
    (choices,) = (
        action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(choices)


def command_tables(parser: argparse.ArgumentParser) -> str:
    """Return a command's options, one table for each group of its ``--help``."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for group in parser._action_groups:
        title = group.title or ""
        name = "General" if title in ("positional arguments", "options") else title[:1].upper() + title[1:]
        for action in group._group_actions:
            if not isinstance(action, argparse._HelpAction):
                rows.setdefault(name, []).append((_names(action), _help(action)))
    return "\n\n".join(f"**{name}**\n\n{table(('Option', 'Meaning'), rows[name])}" for name in rows)


def plugin_table() -> str:
    """Return the keys that ``--additional-config`` may have under ``rose``."""
    meanings = _field_docstrings("Switches") | _field_docstrings("PluginConfig")
    rows = [
        (f"`{field.name}`", f"`{str(field.default).lower()}`", _prose(meanings[field.name]))
        for field in dataclasses.fields(PluginConfig)
    ]
    return table(("Key", "Default", "Meaning"), rows)


def request_table() -> str:
    """Return what becomes of each field of a request, those alike in one row."""
    served = dict.fromkeys(name for model in ROUTES.values() for name in model.model_fields)
    rows: dict[tuple[str, ...], list[str]] = {}
    refused = {name for model in ROUTES.values() for name in model.not_supported}
    for name in (*served, *sorted(refused - served.keys()), *sorted(IGNORED - served.keys())):
        rows.setdefault(tuple(_state(name, model) for model in ROUTES.values()), []).append(f"`{name}`")
    head = ("Fields", *(f"`{route}`" for route in ROUTES))
    return table(head, ((", ".join(names), *states) for states, names in rows.items()))


def _state(name: str, model: type[Body]) -> str:
    if name in model.model_fields:
        return "served"
    if name in model.not_supported:
        return f"refused unless {', '.join(f'`{json.dumps(value)}`' for value in model.not_supported[name])}"
    return "ignored" if name in IGNORED else "no field"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def rewritten(text: str) -> str:
    """Return ``text`` with every table made anew.

    Raises:
        SystemExit: a table is missing, there twice, or of a command that does not exist.
    """
    tables = {name: command_tables(parser) for name, parser in commands().items()}
    tables[PLUGIN_KEYS] = plugin_table()
    tables[REQUESTS] = request_table()
    found = [match["name"] for match in SECTION.finditer(text)]
    if sorted(found) != sorted(tables):
        raise SystemExit(f"docs/options.md: tables {sorted(found)}, expected {sorted(tables)}")
    return SECTION.sub(lambda match: f"{match[1]}\n{tables[match['name']]}\n\n{match[3]}", text)


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = ""
    if action.nargs != 0:
        choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
        value = f" {action.metavar or choices}"
        value += " ..." if action.nargs == "+" else ""
    return "<br>".join(f"`{name}{value}`" for name in action.option_strings)


def _help(action: argparse.Action) -> str:
    # Some releases of Python add the default to the help of switches, behind the one that says "on" or "off".
    text = re.sub(r"(\(default: .+\)) \(default: %\(default\)s\)$", r"\1", action.help or "")
    return _prose(text % {"default": action.default})


def _prose(text: str) -> str:
    # reStructuredText's code to Markdown's; no HTML by accident.
    return " ".join(text.split()).replace("``", "`").replace("<", "&lt;")


def _field_docstrings(class_name: str) -> dict[str, str]:
    """Return field name -> the string below it, of a dataclass in ``rose_backend.config``."""
    tree = ast.parse(inspect.getsource(config))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    strings = {}
    for field, below in zip(found.body, found.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            strings[field.target.id] = str(below.value.value)
    return strings


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; the status is 1 if the page differs from the code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page differs")
    options = parser.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8")
    after = rewritten(before)
    if options.check:
        if after != before:
            print("docs/options.md differs from the code: run make docs", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
