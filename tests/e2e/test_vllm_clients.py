"""``rose serve`` and ``vllm serve`` answer the calls of four clients alike, but for what docs/standalone.md lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.server.live_server import running_server as running_rose
from tests.support.answer_differences import Difference, differences
from tests.support.client_calls import Call, all_calls
from tests.support.recording_proxy import Exchange, RecordingProxy, recording_proxy
from tests.support.scripted_checkpoint import write_scripted_qwen3
from tests.support.vllm_server import running_server as running_vllm

MODEL = "scripted"
WINDOW = 256
ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "client_requests.json"
"""Requests of the clients that are too large to install everywhere; ``python -m tests.support.record_clients``."""
PACKAGES = {"langchain": "langchain_openai", "litellm": "litellm"}
OTHERS = "all other paths, and other methods"
ROUTES = {
    *(f"POST /v1/{name}" for name in ("completions", "chat/completions", "responses", "messages")),
    *("POST /v1/messages/count_tokens", "POST /tokenize", "POST /detokenize", "GET /v1/models"),
    *("GET /health", "GET /ping", "GET /version"),
}


class Documented(NamedTuple):
    """A row of the table in docs/standalone.md."""

    routes: frozenset[str]
    paths: tuple[str, ...]
    first: str
    second: str
    reason: str

    def covers(self, route: str, difference: Difference) -> bool:
        """Return whether the row says what is different."""
        return (
            route in self.routes
            and any(_fits(difference.path, path) for path in self.paths)
            and _says(self.first, difference.first)
            and _says(self.second, difference.second)
        )


class Compared(NamedTuple):
    """What one call came to at both servers."""

    outcomes: tuple[str, str]
    differences: list[tuple[str, Difference]]
    """With their routes."""


def _fits(path: str, pattern: str) -> bool:
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern


def _says(cell: str, value: str) -> bool:
    """Return whether a cell that gives a value gives this one."""
    return not cell.startswith("`") or value in re.findall(r"`([^`]+)`", cell)


def documented_differences() -> list[Documented]:
    """Return the rows of the table."""
    page = (ROOT / "docs" / "standalone.md").read_text()
    table = page.split("### Differences from vLLM")[1].split("\n\n")
    rows = next(part for part in table if part.startswith("| Route")).splitlines()[2:]
    found = []
    for row in rows:
        routes, paths, first, second, reason = (cell.strip() for cell in row.strip("|").split(" | "))
        names = re.findall(r"`([^`]+)`", routes) or [OTHERS]
        found.append(
            Documented(frozenset(names), tuple(re.findall(r"`([^`]+)`", paths)), first, second, reason)
        )
    return found


@pytest.fixture(scope="module")
def proxies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RecordingProxy, RecordingProxy]]:
    """Return proxies of both servers, with one model and the same options."""
    folder = tmp_path_factory.mktemp("clients")
    model = write_scripted_qwen3(folder / "model")
    arguments = (
        *("--attention-backend", "rose", "--dtype", "float32", "--served-model-name", MODEL),
        *("--max-num-seqs", "8", "--max-model-len", str(WINDOW), "--enable-prompt-tokens-details"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )
    settings = {
        "served_model_names": (MODEL,),
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    with (
        running_vllm(model, folder / "vllm.log", *arguments) as vllm,
        running_rose(model, settings, max_model_len=WINDOW) as rose,
        recording_proxy(rose.url) as first,
        recording_proxy(vllm.url) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def compared(proxies: tuple[RecordingProxy, RecordingProxy]) -> dict[str, Compared]:
    """Return what each call came to, by its name."""
    found = {}
    for call in all_calls():
        package = PACKAGES.get(call.client)
        if package is None or find_spec(package) is not None:
            found[call.name] = _compare(call, proxies)
    recorded = json.loads(RECORDED.read_text())
    for name, requests in recorded.items():
        for number, request in enumerate(requests):
            if name not in found:
                call = Call(
                    name.partition(" ")[0], f"{name} {number}", lambda url, _, r=request: _repeat(url, r)
                )
                found[f"{name}, request {number}"] = _compare(call, proxies)
    return found


def _repeat(url: str, request: dict[str, str]) -> None:
    headers = {"Content-Type": "application/json"}
    httpx.post(f"{url}{request['path']}", content=request["content"], headers=headers, timeout=60)


def _compare(call: Call, proxies: tuple[RecordingProxy, RecordingProxy]) -> Compared:
    first, second = (call.outcome(proxy.url, MODEL) for proxy in proxies)
    ours, theirs = (proxy.take() for proxy in proxies)
    assert ours and len(ours) == len(theirs), f"{call.name}: {first}, {second}"
    found = []
    for one, other in zip(ours, theirs, strict=True):
        assert one[:3] == other[:3], call.name
        found += [(_route(one), each) for each in differences(one, other)]
    return Compared((first, second), found)


def _route(exchange: Exchange) -> str:
    path = exchange.path.partition("?")[0]
    return path if f"{exchange.method} {path}" in ROUTES else OTHERS


def test_what_differs_is_documented(compared: dict[str, Compared]) -> None:
    rows = documented_differences()
    missing = [
        (name, route, *difference)
        for name, (_, found) in compared.items()
        for route, difference in found
        if not any(row.covers(route, difference) for row in rows)
    ]
    assert not missing, "\n".join(map(str, missing))


def test_clients_raise_the_same_errors_where_the_status_is_the_same(compared: dict[str, Compared]) -> None:
    for name, (outcomes, found) in compared.items():
        if not any(difference.path.startswith("status: ") for _, difference in found):
            assert outcomes[0] == outcomes[1], name


def test_what_is_documented_is_there_and_has_a_reason(compared: dict[str, Compared]) -> None:
    rows = documented_differences()
    found = [each for one in compared.values() for each in one.differences]
    assert 0 < len(rows) <= 15
    for row in rows:
        assert row.reason and row.paths, row
        for route in row.routes:
            assert any(row.covers(route, each) for at, each in found if at == route), (route, row)
        for path in row.paths:
            assert any(_fits(each.path, path) for at, each in found if at in row.routes), (path, row)


def test_the_calls_are_many_and_come_from_four_clients(compared: dict[str, Compared]) -> None:
    clients = [name.partition(" ")[0] for name in compared]
    assert len(compared) >= 400 and set(clients) == {"openai", "anthropic", "langchain", "litellm", "plain"}
    assert sum(each.outcomes == ("answered", "answered") for each in compared.values()) > 200
