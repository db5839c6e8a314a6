"""Draws an engine's readings: once, or repeatedly until Ctrl-C."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from rose_backend.block_view.metrics import Reading, read_metrics
from rose_backend.errors import MetricsError

_LABEL_WIDTH = 13
_BAR_WIDTH = 40
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*#@"
_UNKNOWN = "not served"


def show_once(url: str, console: Console) -> None:
    """Print one reading; raises what ``read_metrics`` raises."""
    console.print(Monitor(url, read_metrics(url)).render(console))


def watch(url: str, interval_s: float, console: Console) -> None:
    """Show readings until Ctrl-C. An engine that stops answering is asked again.

    Raises:
        MetricsError: the very first reading failed.
    """
    monitor = Monitor(url, read_metrics(url))
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
        self._before: Reading | None = None
        self._usages = deque([first.usage], maxlen=_BAR_WIDTH)
        self._rates: deque[float] = deque(maxlen=_BAR_WIDTH)
        self._silent_since = ""
        self._error = ""

    def add(self, reading: Reading) -> None:
        """Take a new reading."""
        self._before = None if _restarted(self._last, reading) else self._last
        self._last = reading
        self._usages.append(reading.usage)
        rate = self._rate("generation_tokens")
        if rate is not None:
            self._rates.append(rate)
        self._silent_since = ""

    def miss(self, error: MetricsError) -> None:
        """Note that no reading could be had."""
        if not self._silent_since:
            self._silent_since = time.strftime("%H:%M:%S")
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
        reading = self._last
        yield "pool in use", _bar(reading.usage, is_ascii)
        if reading.rose_usage is not None:
            yield "Rose counts", _bar(reading.rose_usage, is_ascii)
        if len(self._usages) > 1:
            yield "", _history(self._usages, f"highest {max(self._usages):.1%}", is_ascii)
        yield "blocks", Text(_blocks(reading))
        yield "requests", _say("{:,.0f} running, {:,.0f} waiting", reading.running, reading.waiting)
        yield "prefix hits", Text(_hits_since_start(reading))
        hits, queries = self._change("hit_tokens"), self._change("query_tokens")
        if hits is not None and queries is not None:
            yield "", Text(f"{_share(hits, queries)} {self._in_the_last}")
        prompt_rate, generated_rate = self._rate("prompt_tokens"), self._rate("generation_tokens")
        if prompt_rate is None or generated_rate is None:
            total = "{:,.0f} of prompts, {:,.0f} generated since start"
            yield "tokens", _say(total, reading.prompt_tokens, reading.generation_tokens)
        else:
            yield "tokens", Text(f"{prompt_rate:,.0f}/s of prompts, {generated_rate:,.0f}/s generated")
        if len(self._rates) > 1:
            yield "", _history(self._rates, f"highest {max(self._rates):,.0f} generated/s", is_ascii)
        preempted, change = _say("{:,.0f} since start", reading.preemptions), self._change("preemptions")
        yield "preempted", preempted if change is None else preempted + f", {change:,.0f} {self._in_the_last}"

    @property
    def _in_the_last(self) -> str:
        return f"in the last {self._change('time_s'):.1f} s"

    def _change(self, name: str) -> float | None:
        new, old = getattr(self._last, name, None), getattr(self._before, name, None)
        return None if new is None or old is None else float(new - old)

    def _rate(self, name: str) -> float | None:
        change, seconds = self._change(name), self._change("time_s")
        return None if change is None or seconds is None else change / max(seconds, 1e-9)


def _restarted(before: Reading, now: Reading) -> bool:
    """Whether a counter went back: then another process answers, and differences mean nothing."""
    names = ("query_tokens", "hit_tokens", "preemptions", "prompt_tokens", "generation_tokens")
    return any((getattr(now, name) or 0) < (getattr(before, name) or 0) for name in names)


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


def _say(text: str, *values: float | None) -> Text:
    return Text(_UNKNOWN if None in values else text.format(*values))


def _hits_since_start(reading: Reading) -> str:
    hits, queries = reading.hit_tokens, reading.query_tokens
    if hits is None or queries is None:
        return _UNKNOWN
    return f"{_share(hits, queries)} since start: {hits:,.0f} of {queries:,.0f} prompt tokens"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "none asked for"


def _printable(text: str) -> str:
    """Make text from outside harmless in a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
