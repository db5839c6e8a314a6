"""Shows the KV cache of a running engine: reads the metrics that vLLM or `rose serve` exports, and draws them."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from rose_backend.errors import ConfigError, MetricsError

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

TIMEOUT_S = 5.0
_MAX_BYTES = 32 << 20
# Names of metrics without their prefix: vllm: of vLLM, rose: of `rose serve`.
_USAGE = "kv_cache_usage_perc"
_GAUGES = ("num_requests_running", "num_requests_waiting")
_QUERIES, _HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"
_PREEMPTIONS, _PROMPTS, _GENERATED = "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total"
_COUNTERS = (_QUERIES, _HITS, _PREEMPTIONS, _PROMPTS, _GENERATED)

_LABEL_WIDTH = 13
_BAR_WIDTH = 40
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*#@"
_UNKNOWN = "not served"


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of an engine, or the sum of several engines at one address. A value that is not served is None."""

    time_s: float
    """``time.monotonic`` at the answer."""
    usage: float
    """Share of the pool that requests hold, 0 to 1; the mean over the engines."""
    rose_usage: float | None
    """The same as Rose's block manager counts it, where both are served."""
    num_engines: int
    model: str
    num_blocks: int | None
    """KV blocks of all engines, without each engine's null block."""
    block_size: int | None
    totals: Mapping[str, float]
    """Gauges, and counters since the start, by metric name without its prefix; those that are served."""


def metrics_url(url: str) -> str:
    """Return the address to ask.

    Args:
        url: server's address, with or without ``/metrics``.

    Raises:
        ConfigError: not an http or https address.
    """
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_http = False
    if not is_http or any(character.isspace() or not character.isprintable() for character in url):
        raise ConfigError(f"url: got {url!r}, allowed is http://HOST:PORT or https://HOST:PORT")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/metrics") else f"{path}/metrics", fragment="").geturl()


def read_metrics(url: str) -> Reading:
    """Ask once.

    Args:
        url: answer of ``metrics_url``.

    Raises:
        MetricsError: no answer, or one without KV cache metrics; the message is one line.
    """
    request = urllib.request.Request(url, headers={"Accept": "text/plain"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            body = answer.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        raise MetricsError(
            f"{url}: answered {error.code} {error.reason}; is this an engine's address?"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise MetricsError(f"{url}: no answer ({' '.join(str(text).split())})") from error
    return parse_metrics(body.decode("utf-8", errors="replace"), url, time.monotonic())


def parse_metrics(text: str, url: str, time_s: float) -> Reading:
    """Read Prometheus' text format.

    Args:
        text: the answer's body.
        url: for errors.
        time_s: when it came.

    Raises:
        MetricsError: prometheus_client is missing, or the text has no vLLM KV-cache metrics.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise MetricsError(
            "url: needs prometheus_client, which is not installed; pip install 'WHEEL[serve]' brings it"
        ) from error
    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append(sample)
    except ValueError as error:
        raise MetricsError(f"{url}: answered, but not with Prometheus metrics") from error

    def find(name: str) -> Sequence[Sample]:
        return samples.get(f"vllm:{name}") or samples.get(f"rose:{name}") or ()

    def config(label: str) -> list[int]:
        # A label that is not known yet reads "None".
        texts = [sample.labels.get(label, "") for sample in find("cache_config_info")]
        return [int(text) for text in texts if text.isdecimal()]

    usages, rose_usages = find(_USAGE), samples.get(f"rose:{_USAGE}", ())
    if not usages:
        raise MetricsError(
            f"{url}: answered with metrics, but not with vllm:{_USAGE}; is this an engine's address?"
        )
    block_counts, block_sizes = config("num_gpu_blocks"), set(config("block_size"))
    return Reading(
        time_s=time_s,
        usage=_total(usages) / len(usages),
        rose_usage=_total(rose_usages) / len(rose_usages) if rose_usages not in ((), usages) else None,
        num_engines=len(usages),
        model=", ".join(sorted({sample.labels.get("model_name", "") for sample in usages} - {""})),
        num_blocks=sum(count - 1 for count in block_counts) if block_counts else None,
        block_size=block_sizes.pop() if len(block_sizes) == 1 else None,
        totals={name: _total(found) for name in (*_GAUGES, *_COUNTERS) if (found := find(name))},
    )


def _total(samples: Sequence[Sample]) -> float:
    return float(sum(sample.value for sample in samples))


def watch(url: str, interval_s: float | None, console: Console) -> None:
    """Show readings until Ctrl-C. An engine that stops answering is asked again.

    Args:
        url: answer of ``metrics_url``.
        interval_s: between two readings; None prints one and returns.

    Raises:
        MetricsError: the very first reading failed.
    """
    monitor = Monitor(url, read_metrics(url))
    if interval_s is None:
        console.print(monitor.render(console))
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(monitor.render(console), refresh=True)
                time.sleep(interval_s)
                try:
                    monitor.add(read_metrics(url))
                except MetricsError as error:
                    monitor.miss(error)
    except KeyboardInterrupt:
        pass


class Monitor:
    """Remembers readings and draws the latest, with what changed since the one before."""

    def __init__(self, url: str, first: Reading) -> None:
        self._url = url
        self._last = first
        # What each counter has grown by in the last interval, and its length.
        self._changes: dict[str, float] = {}
        self._seconds = 0.0
        self._usages = deque([first.usage], maxlen=_BAR_WIDTH)
        self._rates: deque[float] = deque(maxlen=_BAR_WIDTH)
        self._silent_since = ""
        self._error = ""

    def add(self, reading: Reading) -> None:
        """Take a new reading."""
        old, new = self._last.totals, reading.totals
        # A counter that goes back belongs to another process: differences mean nothing.
        is_same_engine = all(new.get(name, 0.0) >= old.get(name, 0.0) for name in _COUNTERS)
        common = [name for name in _COUNTERS if is_same_engine and name in old and name in new]
        self._changes = {name: new[name] - old[name] for name in common}
        self._seconds = max(reading.time_s - self._last.time_s, 1e-9)
        self._last = reading
        self._usages.append(reading.usage)
        if _GENERATED in self._changes:
            self._rates.append(self._changes[_GENERATED] / self._seconds)
        self._silent_since = ""

    def miss(self, error: MetricsError) -> None:
        """Note that no reading could be had."""
        self._silent_since = self._silent_since or time.strftime("%H:%M:%S")
        self._error = str(error)

    def render(self, console: Console) -> Group:
        """Draw the state."""
        reading = self._last
        engines = f", {reading.num_engines} engines" if reading.num_engines > 1 else ""
        title = _printable(f"KV cache of {reading.model or 'an engine'} at {self._url}{engines}")
        lines = [
            Text(no_wrap=True).append(f" {name:<{_LABEL_WIDTH}}", style="bold").append_text(value)
            for name, value in self._lines(console.options.ascii_only)
        ]
        if self._silent_since:
            since = f" no answer since {self._silent_since}, still asking; Ctrl-C ends"
            lines += [Text(since, style="bold red"), Text(f" {_printable(self._error)}", style="red")]
        return Group(Rule(Text(title), align="left", style="magenta"), *lines)

    def _lines(self, is_ascii: bool) -> Iterator[tuple[str, Text]]:
        """Yield the label and the text of each line."""
        reading, changes, seconds = self._last, self._changes, self._seconds
        in_the_last = f"in the last {seconds:.1f} s"
        yield "pool in use", _bar(reading.usage, is_ascii)
        if reading.rose_usage is not None:
            yield "Rose counts", _bar(reading.rose_usage, is_ascii)
        if len(self._usages) > 1:
            yield "", _history(self._usages, f"highest {max(self._usages):.1%}", is_ascii)
        yield "blocks", Text(_blocks(reading))
        yield "requests", self._say("{:,.0f} running, {:,.0f} waiting", *_GAUGES)
        share = _share(reading.totals, "since start")
        yield "prefix hits", self._say(share + ": {:,.0f} of {:,.0f} prompt tokens", _HITS, _QUERIES)
        if _HITS in changes and _QUERIES in changes:
            yield "", Text(_share(changes, in_the_last))
        if _PROMPTS in changes and _GENERATED in changes:
            prompts, generated = changes[_PROMPTS] / seconds, changes[_GENERATED] / seconds
            yield "tokens", Text(f"{prompts:,.0f}/s of prompts, {generated:,.0f}/s generated")
        else:
            totals = "{:,.0f} of prompts, {:,.0f} generated since start"
            yield "tokens", self._say(totals, _PROMPTS, _GENERATED)
        if len(self._rates) > 1:
            yield "", _history(self._rates, f"highest {max(self._rates):,.0f} generated/s", is_ascii)
        preempted = self._say("{:,.0f} since start", _PREEMPTIONS)
        if _PREEMPTIONS in changes:
            preempted += f", {changes[_PREEMPTIONS]:,.0f} {in_the_last}"
        yield "preempted", preempted

    def _say(self, text: str, *names: str) -> Text:
        values = [self._last.totals.get(name) for name in names]
        return Text(_UNKNOWN if None in values else text.format(*values))


def _bar(share: float, is_ascii: bool) -> Text:
    full, empty = ("#", "-") if is_ascii else ("█", "░")
    filled = round(min(max(share, 0.0), 1.0) * _BAR_WIDTH)
    style = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    rest = _BAR_WIDTH - filled
    return Text.assemble((full * filled, style), (empty * rest, "bright_black"), (f" {share:.1%}", "bold"))


def _history(values: deque[float], label: str, is_ascii: bool) -> Text:
    levels = _ASCII_LEVELS if is_ascii else _LEVELS
    top = max(values) or 1.0
    line = "".join(levels[min(int(value / top * len(levels)), len(levels) - 1)] for value in values)
    return Text.assemble((line.rjust(_BAR_WIDTH), "magenta"), (f" {label}", "bright_black"))


def _blocks(reading: Reading) -> str:
    if reading.num_blocks is None:
        return _UNKNOWN
    size = f", {reading.block_size} tokens each" if reading.block_size else ""
    return f"{round(reading.usage * reading.num_blocks):,} of {reading.num_blocks:,}{size}"


def _share(counts: Mapping[str, float], when: str) -> str:
    hits, queries = counts.get(_HITS, 0.0), counts.get(_QUERIES, 0.0)
    return f"{hits / queries:.1%} {when}" if queries else f"none asked for {when}"


def _printable(text: str) -> str:
    """Make text from outside harmless in a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
