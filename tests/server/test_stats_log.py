"""The line about throughput."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_backend.engine.outputs import Counters, EngineLoad, EngineStats
from rose_backend.server import serve, stats_log
from rose_backend.server.stats_log import StatsLog
from tests.server.live_server import running_server, wait_until

IDLE = EngineLoad(0, 0, 0.0)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[tuple[str, str]]]:
    """Return level and text of the lines so far, which grows."""
    found: list[tuple[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append((record.levelname, record.getMessage()))

    caplog.set_level(logging.DEBUG, logger=stats_log.logger.name)
    handler = Keep()
    stats_log.logger.addHandler(handler)
    yield found
    stats_log.logger.removeHandler(handler)


def test_what_it_says(lines: list[tuple[str, str]]) -> None:
    before = EngineStats(prompt_tokens_computed=100, generated_tokens=50, preemptions=3)
    log = StatsLog(Counters(before, IDLE), 100.0)
    after = EngineStats(prompt_tokens_computed=125, generated_tokens=90, preemptions=5)
    after.prefix_cache_queries, after.prefix_cache_hits, after.reported_prefix_cache_hits = 64, 39, 32
    log.write(Counters(after, EngineLoad(4, 2, 0.1234)), 120.0)
    # 25 computed and 7 more that were found and not told of.
    assert lines == [
        (
            "INFO",
            "Avg prompt throughput: 1.6 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 4 reqs, "
            "Waiting: 2 reqs, Preemptions: 2, KV cache usage: 12.3%, Prefix cache hit rate: 50.0%",
        )
    ]


def test_accepted_drafts(lines: list[tuple[str, str]]) -> None:
    first = EngineStats(spec_decode_num_draft_tokens=30, spec_decode_num_accepted_tokens=30)
    log = StatsLog(Counters(first, IDLE), 0.0)
    stats = EngineStats(spec_decode_num_draft_tokens=70, spec_decode_num_accepted_tokens=40)
    log.write(Counters(stats, IDLE), 10.0)
    log.write(Counters(stats, IDLE), 20.0)
    assert lines[0][1].endswith(", Avg Draft acceptance rate: 25.0%") and "Draft" not in lines[1][1]


def test_exact_cached_tokens(lines: list[tuple[str, str]]) -> None:
    log = StatsLog(Counters(EngineStats(), IDLE), 0.0, exact_cached_tokens=True)
    stats = EngineStats(prompt_tokens_computed=25, prefix_cache_queries=64, prefix_cache_hits=39)
    log.write(Counters(stats, IDLE), 10.0)
    assert "prompt throughput: 2.5 tokens/s" in lines[0][1] and lines[0][1].endswith("hit rate: 60.9%")


def test_one_line_after_the_last_traffic(lines: list[tuple[str, str]]) -> None:
    log = StatsLog(Counters(EngineStats(), IDLE), 0.0)
    # Tokens behind a stop string are taken back.
    for index, generated in enumerate((0, 5, 5, 5, 6, 4, 4)):
        log.write(Counters(EngineStats(generated_tokens=generated), IDLE), 10.0 * (index + 1))
    assert [level for level, _ in lines] == ["DEBUG", "INFO", "INFO", "DEBUG", "INFO", "INFO", "DEBUG"]
    rates = [re.findall(r"generation throughput: (\S+) tokens/s", text)[0] for _, text in lines]
    assert rates == ["0.0", "0.5", "0.0", "0.0", "0.1", "0.0", "0.0"]
    assert lines[0][1].endswith("KV cache usage: 0.0%"), "nothing was looked up"


@pytest.mark.parametrize("load", [EngineLoad(1, 0, 0.1), EngineLoad(0, 1, 0.0)])
def test_requests_that_get_no_token_are_traffic(lines: list[tuple[str, str]], load: EngineLoad) -> None:
    log = StatsLog(Counters(EngineStats(), IDLE), 0.0)
    for index in range(3):
        log.write(Counters(EngineStats(), load), 10.0 * (index + 1))
    assert [level for level, _ in lines] == ["INFO"] * 3


@pytest.mark.parametrize("frontend_multiprocessing", [False, True])
def test_a_server_writes_it(
    tiny_model_path: Path,
    lines: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    frontend_multiprocessing: bool,
) -> None:
    monkeypatch.setattr(stats_log, "_INTERVAL_S", 0.01)
    settings = {"frontend_multiprocessing": frontend_multiprocessing}
    with running_server(tiny_model_path, settings) as server:
        assert server.complete(prompt=[70, 71, 72], max_tokens=50, ignore_eos=True).status_code == 200
        # Other servers of this process, which have no traffic, may write lines, too.
        wait_until(lambda: any("generation throughput: 0.0" not in text for _, text in lines))


def test_it_can_be_switched_off(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []

    async def note(engine: object, **_: object) -> None:
        begun.append(engine)

    monkeypatch.setattr(serve, "log_stats", note)
    for is_on in (True, False):
        with running_server(tiny_model_path, {"log_stats": is_on}) as server:
            assert server.complete(prompt=[70], max_tokens=1).status_code == 200
            assert begun == [server.engine] * is_on
        begun.clear()
