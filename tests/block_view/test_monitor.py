"""What an engine's metrics say, and how the live view tells it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from rose_backend.block_view import monitor
from rose_backend.errors import MetricsError
from tests.support.metrics_server import SAMPLE, MetricsServer, values


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    """A server with metrics, reached without any proxy."""
    monkeypatch.setenv("no_proxy", "*")
    running = MetricsServer()
    yield running
    running.vanish()


def test_several_engines_are_added_up_and_what_is_not_served_is_said() -> None:
    two = SAMPLE + values(SAMPLE, kv_cache_usage_perc=0.75, num_requests_running=2).replace(
        'engine="0"', 'engine="1"'
    )
    reading = monitor.parse_metrics(two, "http://e", 0.0)
    assert (reading.usage, reading.num_engines, reading.num_blocks) == (0.5, 2, 512)
    assert reading.totals["num_requests_running"] == 14
    assert reading.totals["prefix_cache_hits_total"] == 3000
    little = monitor.parse_metrics('vllm:kv_cache_usage_perc{model_name="m"} 0.5\n', "http://e", 0.0)
    assert little.num_blocks is None and little.totals == {}
    assert render(little).count("not served") == 5
    unsized = SAMPLE.replace('num_gpu_blocks="257"', 'num_gpu_blocks="None"')
    assert monitor.parse_metrics(unsized, "http://e", 0.0).num_blocks is None


def test_roses_own_count_is_shown_beside_vllms_or_alone() -> None:
    own = 'rose:kv_cache_usage_perc{model_name="m"} 0.125\n'
    both = monitor.parse_metrics(SAMPLE + own, "http://e", 0.0)
    assert re.search(r"Rose counts +█{5}░{35} 12\.5%", render(both))
    alone = monitor.parse_metrics(own, "http://e", 0.0)
    assert alone.usage == 0.125 and "Rose counts" not in render(alone)


def render(*readings: monitor.Reading) -> str:
    shown = monitor.Monitor("http://e", readings[0])
    for reading in readings[1:]:
        shown.add(reading)
    console = Console(file=io.StringIO(), width=80)
    console.print(shown.render(console))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_changes_are_counted_over_the_last_interval_only() -> None:
    later = values(
        SAMPLE,
        kv_cache_usage_perc=0.5,
        prefix_cache_queries_total=2400,
        prefix_cache_hits_total=1600,
        num_preemptions_total=9,
        prompt_tokens_total=6000,
        generation_tokens_total=720,
    )
    first, second = (
        monitor.parse_metrics(text, "e", time_s) for text, time_s in ((SAMPLE, 10.0), (later, 14.0))
    )
    text = render(first, second)
    assert "66.7% since start: 1,600 of 2,400" in text and "25.0% in the last 4.0 s" in text
    assert "250/s of prompts, 20/s generated" in text
    assert "9 since start, 2 in the last 4.0 s" in text
    assert "▅█ highest 50.0%" in text
    # Counters that go back: the engine was started anew, and nothing can be said of the interval.
    assert "in the last" not in render(second, first) and "/s of prompts" not in render(second, first)
    assert "none asked for in the last 4.0 s" in render(first, monitor.parse_metrics(SAMPLE, "e", 14.0))


def test_watching_goes_on_while_the_engine_is_silent(
    engine: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures: list[str] = []
    waits: list[float] = []
    console = Console(file=io.StringIO(), width=80, force_terminal=True)

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        pictures.append(console.file.getvalue())  # type: ignore[attr-defined]
        console.file.truncate(0)
        engine.status = 500 if len(waits) in (2, 3) else 200
        if len(waits) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(monitor.time, "sleep", sleep)
    monkeypatch.setattr(monitor.time, "strftime", lambda _: f"00:00:{len(waits):02}")
    monitor.watch(f"{engine.url}/metrics", 0.5, console)  # returns: Ctrl-C is no mistake here
    assert waits == [0.5] * 5 and engine.num_requests == 5
    silent = [re.search(r"no answer since (\d\d:\d\d:\d\d), still asking", picture) for picture in pictures]
    assert [found is not None for found in silent] == [False, False, True, True, False]
    assert silent[2][1] == silent[3][1]  # type: ignore[index]
    assert "answered 500" in pictures[2] and "12 running" in pictures[2]


def test_names_from_the_engine_cannot_steer_the_terminal() -> None:
    reading = monitor.parse_metrics('vllm:kv_cache_usage_perc{model_name="a\x1b[2Jb"} 0.5\n', "e", 0.0)
    assert "\x1b" not in render(reading) and "a\N{REPLACEMENT CHARACTER}[2Jb" in render(reading)


def test_an_endless_answer_is_not_read_to_its_end(
    engine: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_MAX_BYTES", 40)
    with pytest.raises(MetricsError):
        monitor.read_metrics(f"{engine.url}/metrics")
