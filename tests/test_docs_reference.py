"""The pages for people who run servers name what the code says: metrics, error messages, refusals, log lines."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rose_backend.block_manager.prefix_cache import CacheStats
from rose_backend.config import PluginConfig
from rose_backend.engine.outputs import Counters, EngineLoad, EngineStats
from rose_backend.server.service import ServerMetrics
from rose_backend.vllm_plugin.registration import SUPPORTED_VERSIONS, is_supported

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "rose_backend").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
CODE = re.compile(r"`([^`]+)`")

ERRORS = frozenset(
    {
        *("ConfigError", "ModelError", "RequestError", "QueueFullError", "EngineDeadError", "MetricsError"),
        *("ApiError", "SetUpError", "ServeError"),
    }
)
"""Classes whose messages reach a user; the first string among the arguments is the message."""
REFUSED_FEATURES = frozenset(
    {"_unsupported_by_attention", "_unsupported_beside_states", "_unsupported_by_manager"}
)
"""Functions that return what a refusal names -> whether it is used."""
LOG_CALLS = frozenset({"warning", "error", "exception"})
MIN_LETTERS = 8
"""Of a message; one with fewer passes on another message, such as ``f"{field}: {reason}"``."""
VARIABLE = "\0"
"""Stands in a message for what is known at run time only."""


class Site(NamedTuple):
    """A message in the sources."""

    place: str
    text: str


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def code_spans(text: str) -> set[str]:
    """Return what a page has in code style, blocks left out."""
    return set(CODE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)))


# Messages of the sources


def module_constants() -> dict[str, str]:
    """Return the texts and numbers that are assigned to a name once in the package, which messages may hold."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                name = ast.unparse(node.targets[0])
                if name.isupper():
                    found.setdefault(name, set()).add(str(node.value.value))
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


CONSTANTS = module_constants()


def text_of(node: ast.expr) -> str | None:
    """Return the text of a string expression, ``VARIABLE`` in place of what varies; None for other expressions."""
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, str):
            return None
        # The places of a logging call's arguments.
        return " ".join(re.sub(r"%[sdg]", VARIABLE, node.value).split())
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(part.value)
            if isinstance(part, ast.Constant)
            else CONSTANTS.get(ast.unparse(part.value), VARIABLE)  # type: ignore[attr-defined]
            for part in node.values
        ]
        return " ".join("".join(parts).split())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        if left is not None or right is not None:
            return f"{left or VARIABLE} {right or VARIABLE}"
    return None


def called_name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def sites() -> Iterator[Site]:
    """Yield every message that a user can meet; those that only pass on another message are left out."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            candidates: list[ast.expr] = []
            if isinstance(node, ast.Call):
                is_log = called_name(node) in LOG_CALLS and ast.unparse(node.func).startswith("logger.")
                if is_log or called_name(node) in ERRORS:
                    candidates = node.args
            elif isinstance(node, ast.FunctionDef) and node.name in REFUSED_FEATURES:
                returned = node.body[-1]
                assert isinstance(returned, ast.Return) and isinstance(returned.value, ast.Dict)
                for feature in returned.value.keys:
                    assert feature is not None
                    yield Site(f"{path.relative_to(ROOT)}:{feature.lineno}", text_of(feature) or "")
            text = next((text for each in candidates if (text := text_of(each)) is not None), "")
            if len(re.findall("[A-Za-z]", text)) >= MIN_LETTERS:
                yield Site(f"{path.relative_to(ROOT)}:{node.lineno}", text)  # type: ignore[attr-defined]


def all_texts() -> set[str]:
    """Return every string of the sources, whatever it is for, and what ``refused(field, reason)`` makes of two."""
    texts = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.expr) and (text := text_of(node)):
                texts.add(text)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refused":
                texts.add(": ".join(text_of(each) or VARIABLE for each in node.args))
    return texts


# Messages of the page


def entries(text: str) -> list[str]:
    """Return the messages that a page explains: the code in front of the colon of an item of a list."""
    found: list[str] = []
    for item in re.findall(r"^- (`.+?)(?=^- |^$|^#)", text, re.MULTILINE | re.DOTALL):
        head = re.match(r"`[^`]+`(,\s+`[^`]+`)*(?=:\s)", item)
        assert head is not None, f"no colon behind the messages of this item: {item}"
        found += [" ".join(message.split()) for message in CODE.findall(head[0])]
    return found


def pattern(entry: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in entry.split("...")))


def unmatched(patterns: list[re.Pattern[str]], found: list[Site]) -> list[Site]:
    return [site for site in found if not any(each.fullmatch(site.text) for each in patterns)]


def test_every_message_is_explained() -> None:
    found = list(sites())
    assert len(found) > 130
    missing = unmatched([pattern(entry) for entry in entries(page("troubleshooting.md"))], found)
    shown = "\n".join(f"{site.place}: {site.text.replace(VARIABLE, '...')}" for site in missing)
    assert not missing, f"docs/troubleshooting.md has no entry for:\n{shown}"


def test_no_message_is_invented() -> None:
    texts = all_texts()
    listed = entries(page("troubleshooting.md"))
    assert len(listed) == len(set(listed))
    for entry in listed:
        each = pattern(entry)
        assert any(each.fullmatch(text) for text in texts), f"nothing in the sources says: {entry}"


@pytest.mark.parametrize(
    ("entry", "text", "is_match"),
    [
        ("model: directory ... has no config.json", "model: directory \0 has no config.json", True),
        # What varies cannot be promised.
        ("model: directory ... has no config.json", "model: directory \0 has no \0", False),
        ("...: got ..., allowed are ...", "\0: got \0, allowed are true and false", True),
        ("...: got ..., allowed are ...", "\0: \0", False),
    ],
)
def test_entries_match_messages(entry: str, text: str, is_match: bool) -> None:
    assert (pattern(entry).fullmatch(text) is not None) is is_match


# Metrics


def registered_metrics() -> dict[str, tuple[str, frozenset[str]]]:
    """Return name -> kind and labels of all metrics of ``rose serve``, counters with ``_total``."""
    metrics = ServerMetrics("m", block_size=16, num_blocks=10, max_model_len=100)
    metrics.responses.labels("other", "404").inc()
    text = metrics.render(
        Counters(EngineStats(spec_decode_num_accepted_tokens_per_pos=(0,)), EngineLoad(0, 0, 0.0))
    ).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        if not family.name.endswith("_created"):
            labels = frozenset(name for sample in family.samples for name in sample.labels) - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = family.type, labels
    return found


def table_rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of the table whose header line begins with ``header``."""
    _, _, rest = text.partition(f"\n{header}")
    assert rest, f"no table {header!r}"
    lines = rest.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_metric_is_documented() -> None:
    documented = {}
    for name, kind, labels, *_ in table_rows(page("observability.md"), "| Metric |"):
        documented[name.strip("`")] = kind, frozenset(CODE.findall(labels))
    assert documented == registered_metrics()


def test_queries_and_prose_use_metrics_that_exist() -> None:
    known = registered_metrics()
    samples = {
        f"{name}{end}" if kind == "histogram" else name
        for name, (kind, _) in known.items()
        for end in ("_bucket", "_sum", "_count")
    }
    for name in sorted(ROOT.glob("docs/*.md")):
        used = set(re.findall(r"\brose:\w+", name.read_text(encoding="utf-8")))
        assert used <= samples | known.keys(), name


def test_metrics_of_vllm_exist() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    sources = [*folder.glob("v1/**/metrics/*.py"), *folder.glob("v1/**/metrics.py")]
    known = {
        name for path in sources for name in re.findall(r'"(vllm:\w+)"', path.read_text(encoding="utf-8"))
    }
    for name in ("observability.md", "troubleshooting.md"):
        used = {each.removesuffix("_total") for each in re.findall(r"\bvllm:\w+", page(name))}
        assert used and used <= known, name


# Log lines


def reasons() -> set[str]:
    """Return why parts of Rose inside vLLM may be idle, or draws be vLLM's: what the functions named why return."""
    found: set[str] = set()
    for path in (ROOT / "rose_backend" / "vllm_plugin").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and re.match("_?why_", function.name):
                for node in ast.walk(function):
                    values: list[ast.expr | None] = []
                    if isinstance(node, ast.Return):
                        values = [
                            node.value,
                            getattr(node.value, "body", None),
                            getattr(node.value, "orelse", None),
                        ]
                    elif isinstance(node, ast.Dict):
                        values = list(node.keys)
                    names = [
                        CONSTANTS.get(ast.unparse(each)) or text_of(each)
                        for each in values
                        if each is not None
                    ]
                    found.update(name.replace(VARIABLE, "...") for name in names if name)
    return found


def test_every_reason_of_the_start_up_line_is_documented() -> None:
    found = reasons()
    assert {"drafts", "only with Rose's block manager", "cudagraph_mode NONE", "watermarks"} <= found
    assert found - code_spans(page("observability.md")) == set()


def test_every_counter_of_the_block_manager_is_documented() -> None:
    documented = [name.strip("`") for name, *_ in table_rows(page("observability.md"), "| Field | Unit |")]
    assert documented == list(CacheStats().as_dict())


# Words and versions


def test_the_glossary_has_the_words_of_log_lines() -> None:
    text = page("glossary.md")
    switches = {field.name for field in dataclasses.fields(PluginConfig)}
    assert (switches | set(CacheStats().as_dict())) - code_spans(text) == set()


def test_the_glossary_says_each_word_once_and_in_one_sentence() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", page("glossary.md"), re.MULTILINE)
    words = [
        word for names, _ in rows for word in re.sub(r" \(.*\)", "", names).split(", ") if word != "Word"
    ]
    assert len(words) > 60 and len(words) == len(set(words))
    for names, meaning in rows:
        assert meaning == "Meaning" or re.fullmatch(r"[^.]*(\.\w[^.]*)*\.", meaning), names


def test_the_versions_of_vllm_are_the_supported_ones() -> None:
    text = page("upgrading_vllm.md")
    (versions, _), (others, _) = table_rows(text, "| vLLM |")
    assert others == "any other"
    stated = set(versions.split(", "))
    assert stated == {f"0.{minor}" for minor in range(100) if is_supported(f"0.{minor}.0")}
    assert f"it supports vLLM {SUPPORTED_VERSIONS}, this is" in text
