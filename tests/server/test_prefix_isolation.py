"""One client tries to read another's prompt through the prefix cache, token by token, in every way that it can see."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.datastructures import Headers

from rose_backend.server.service import CacheNamespaces
from rose_backend.server.settings import ServerSettings
from tests.server.live_server import MODEL, LiveServer, read_metric, running_server, wait_until
from tests.support.patience import HANG_S

VICTIM, ATTACKER = "key-of-the-victim", "key-of-the-attacker"
KEYS = {"api_keys": (VICTIM, ATTACKER)}
# Tokens of a text that both clients know, with a number in it that only the victim knows.
KNOWN = list(range(100, 119))
DIGITS = list(range(500, 510))
SECRET = [DIGITS[digit] for digit in (4, 0, 9)]
SECRET_PROMPT = [*KNOWN, *SECRET, *range(300, 330)]  # 52
ANYTHING = 7


class Reading(NamedTuple):
    """What one guess has cost."""

    cached_tokens: int
    """That the answer tells."""
    metrics: tuple[tuple[str, float], ...]
    """All that has changed in the open metrics, but for times."""
    computed_tokens: int
    """Of the prompt, inside the engine."""


def headers_of(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def send(server: LiveServer, ids: list[int], key: str | None, salt: str | None = None) -> int:
    """Return how many tokens were cached, as the answer tells it."""
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    answer = server.http.post("/v1/completions", json=body, headers=headers_of(key))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def counters_of(server: LiveServer) -> dict[str, float]:
    lines = re.findall(r"(?m)^(rose:\S+) (\S+)$", server.http.get("/metrics").text)
    return {name: float(value) for name, value in lines if "_seconds" not in name and "/metrics" not in name}


def measure(server: LiveServer, ids: list[int], key: str | None, salt: str | None) -> Reading:
    server.wait_until_idle()
    before, computed = counters_of(server), server.counters().stats.prompt_tokens_computed
    cached_tokens = send(server, ids, key, salt)
    server.wait_until_idle()
    after = counters_of(server)
    changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
    metrics = tuple((name, change) for name, change in sorted(changes.items()) if change)
    return Reading(cached_tokens, metrics, server.counters().stats.prompt_tokens_computed - computed)


def guesses(server: LiveServer, key: str | None, salt: str | None = None) -> Iterator[dict[int, Reading]]:
    """Guess every digit of the secret; yield what each of the ten guesses has cost.

    Where nothing tells the right one, the attacker is told it all the same, and goes on with the next.
    """
    found: list[int] = []
    send(server, [*KNOWN, ANYTHING], key, salt)
    for digit in SECRET:
        # The last token is always computed, so something has to follow the guess.
        yield {guess: measure(server, [*KNOWN, *found, guess, ANYTHING], key, salt) for guess in DIGITS}
        found.append(digit)


def what_stands_out(readings: dict[int, Reading], see: Callable[[Reading], Any]) -> int | None:
    """Return the one digit whose guess looks different, if there is one."""
    seen = [see(reading) for reading in readings.values()]
    odd = [digit for digit, reading in readings.items() if seen.count(see(reading)) == 1]
    assert len(set(seen)) == 1 or len(odd) == 1, seen
    return odd[0] if odd else None


def stolen(server: LiveServer, key: str | None, salt: str | None = None) -> list[list[int | None]]:
    """Return the digits found by cached tokens, by metrics and by computed tokens."""
    guessed = list(guesses(server, key, salt))
    return [[what_stands_out(readings, itemgetter(way)) for readings in guessed] for way in range(3)]


NOTHING: list[int | None] = [None] * len(SECRET)


@contextmanager
def attacked(model: Path, settings: dict[str, Any], **options: Any) -> Iterator[LiveServer]:
    """Run a server that has served the victim's prompt."""
    with running_server(model, {**KEYS, **settings}, **options) as server:
        assert send(server, SECRET_PROMPT, VICTIM) == 0
        yield server


@pytest.mark.parametrize("settings", [{}, {"exact_cached_tokens": True}], ids=["default", "exact counts"])
def test_a_key_finds_nothing_of_another_keys_prompt(tiny_model_path: Path, settings: dict[str, Any]) -> None:
    with attacked(tiny_model_path, settings) as server:
        assert stolen(server, ATTACKER) == [NOTHING, NOTHING, NOTHING]
        # With one key the cache works as ever, to the token.
        computed = server.counters().stats.prompt_tokens_computed
        cached = send(server, [*SECRET_PROMPT[:30], ANYTHING], VICTIM)
        assert cached == (30 if settings.get("exact_cached_tokens") else 16)
        assert server.counters().stats.prompt_tokens_computed - computed == 1


def test_one_cache_for_all_keys_gives_everything_away(tiny_model_path: Path) -> None:
    settings = {"share_prefix_cache": True, "exact_cached_tokens": True}
    with attacked(tiny_model_path, settings) as server:
        assert stolen(server, ATTACKER) == [SECRET, SECRET, SECRET]


def test_rounded_counts_hide_single_tokens_where_only_counts_are_visible(tiny_model_path: Path) -> None:
    with attacked(tiny_model_path, {"share_prefix_cache": True}) as server:
        assert stolen(server, ATTACKER) == [NOTHING, NOTHING, SECRET]


@pytest.mark.parametrize(("block_size", "num_told"), [(4, 48), (32, 32)])
def test_the_unit_of_counts_is_a_block_of_16_tokens_or_more(
    tiny_model_path: Path, block_size: int, num_told: int
) -> None:
    with attacked(tiny_model_path, {"share_prefix_cache": True}, block_size=block_size) as server:
        assert stolen(server, ATTACKER)[:2] == [NOTHING, NOTHING]
        hits = server.metric("prefix_cache_hits_total")
        assert send(server, [*SECRET_PROMPT, ANYTHING], ATTACKER) == num_told
        assert server.metric("prefix_cache_hits_total") - hits == num_told


def test_hits_at_block_borders_tell_nothing_inside_a_block(tiny_model_path: Path) -> None:
    settings = {"share_prefix_cache": True, "exact_cached_tokens": True}
    with attacked(tiny_model_path, settings, token_granular_hits=False) as server:
        assert stolen(server, ATTACKER) == [NOTHING, NOTHING, NOTHING]
        assert send(server, [*SECRET_PROMPT, ANYTHING], ATTACKER) == 48


def test_without_keys_all_share_but_for_salts(tiny_model_path: Path) -> None:
    settings = {"api_keys": (), "exact_cached_tokens": True}
    with running_server(tiny_model_path, settings) as server:
        send(server, SECRET_PROMPT, None, "salt of one tenant")
        assert stolen(server, None) == stolen(server, None, "another salt") == [NOTHING] * 3
        # A key makes no difference on a server without keys.
        assert send(server, SECRET_PROMPT, "whatever", "salt of one tenant") == len(SECRET_PROMPT) - 1
        assert send(server, [*KNOWN, DIGITS[1], ANYTHING], "whatever") == len(KNOWN) + 2 - 1


def test_a_salt_divides_a_keys_cache_and_opens_no_others(tiny_model_path: Path) -> None:
    with attacked(tiny_model_path, {"exact_cached_tokens": True}) as server:
        num_all = len(SECRET_PROMPT) - 1
        cached = [
            send(server, SECRET_PROMPT, key, salt)
            for key, salt in [
                (VICTIM, "a"),
                (VICTIM, "a"),
                (VICTIM, "b"),
                (VICTIM, None),
                (ATTACKER, "a"),
                (ATTACKER, None),
                (ATTACKER, "a"),
            ]
        ]
        assert cached == [0, num_all, 0, num_all, 0, 0, num_all]


def test_salts_of_chats_and_streams(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "A text that is long enough for a block or two: " + "rose " * 30}]

    def usage_of(answer: httpx.Response) -> int:
        assert answer.status_code == 200, answer.text
        return int(re.findall(r'"cached_tokens": ?(\d+)', answer.text)[-1])

    for route, content in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "Another text: " + "thorn " * 30}),
    ):
        body = {**content, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
        cached = [
            usage_of(server.http.post(route, json={**body, "cache_salt": salt}))
            for salt in ("one", "one", "two", None)
        ]
        assert cached[1] >= 16 and cached[1] % 16 == 0 and cached[::2] == [0, 0] and cached[3] == 0


def namespace_of(namespaces: CacheNamespaces, key: str, salt: str | None) -> bytes:
    return namespaces.namespace(Headers(headers_of(key)), salt)


def test_the_engine_hears_of_neither_key_nor_salt() -> None:
    settings = ServerSettings(served_model_names=("m",), api_keys=("ab", "a"))
    namespaces = CacheNamespaces(settings)
    pairs = [("ab", None), ("a", None), ("ab", "c"), ("a", "bc"), ("a", "b"), ("ab", "b"), ("ab", "\ud800")]
    salts = [namespace_of(namespaces, *pair) for pair in pairs]
    assert len(set(salts)) == len(pairs) and {len(salt) for salt in salts} == {32}
    assert salts == [namespace_of(namespaces, *pair) for pair in pairs]
    # Another server with the same keys makes different ones.
    assert not set(salts) & {namespace_of(CacheNamespaces(settings), *pair) for pair in pairs}


@pytest.mark.parametrize("shares_cache", [False, True])
def test_tenants_are_keys_whatever_their_salts(shares_cache: bool) -> None:
    settings = ServerSettings(served_model_names=("m",), api_keys=("a", "b"), share_prefix_cache=shares_cache)
    namespaces = CacheNamespaces(settings)
    tenants = [namespaces.tenant(Headers(headers_of(key))) for key in ("a", "b", "a")]
    assert tenants[0] == tenants[2] != tenants[1] and {len(each) for each in tenants} == {32}
    assert namespaces.tenant(Headers({"x-api-key": "b"})) == tenants[1]
    open_to_all = CacheNamespaces(ServerSettings(served_model_names=("m",)))
    assert open_to_all.tenant(Headers(headers_of("a"))) == b""


def test_a_key_does_not_wait_for_640_sequences_of_another_one(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, KEYS, max_num_seqs=4) as server:

        def num_waiting() -> float:
            return read_metric(server.http.get("/metrics").text, "num_requests_waiting")

        flood = {"model": MODEL, "prompt": [[number] for number in range(640)], "max_tokens": 600}
        flood |= {"ignore_eos": True, "stream": True}
        with server.http.stream(
            "POST", "/v1/completions", json=flood, headers=headers_of(ATTACKER)
        ) as answer:
            wait_until(lambda: num_waiting() >= 630)
            body = {"model": MODEL, "prompt": [700], "max_tokens": 2, "ignore_eos": True}
            own = server.http.post("/v1/completions", json=body, headers=headers_of(VICTIM), timeout=HANG_S)
            assert own.json()["usage"]["completion_tokens"] == 2
            assert num_waiting() >= 600 and answer.status_code == 200


def test_one_namespace_for_requests_that_are_not_told_apart() -> None:
    for settings in (
        ServerSettings(served_model_names=("m",)),
        ServerSettings(served_model_names=("m",), api_keys=("a", "b"), share_prefix_cache=True),
    ):
        namespaces = CacheNamespaces(settings)
        assert namespace_of(namespaces, "a", None) == b""
        assert namespace_of(namespaces, "a", "s") == namespace_of(namespaces, "b", "s") != b""
