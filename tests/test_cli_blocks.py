"""``rose blocks``: output where it is wanted, one line for each mistake, and an engine that comes and goes."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_backend.block_view.page import render_page
from rose_backend.block_view.story import tell_story
from rose_backend.cli import main
from tests.support.metrics_server import SAMPLE, MetricsServer
from tests.support.patience import HANG_S


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    """A server with metrics, reached without any proxy."""
    monkeypatch.setenv("no_proxy", "*")
    running = MetricsServer()
    yield running
    running.vanish()


def run(*argv: str) -> int:
    """Return the exit code, whether ``main`` returns it or argparse raises it."""
    try:
        return main(["blocks", *argv])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ((), ("--demo", "--url")),
        (("--demo", "--url", "http://a"), ("--url", "--demo")),
        (("--demo", "--block-size", "1"), ("block_size: got 1", "2 to 32")),
        (("--demo", "--block-size", "33"), ("block_size: got 33", "2 to 32")),
        (("--demo", "--block-size", "x"), ("--block-size", "'x'")),
        (("--demo", "--prompt", " "), ("prompt: got 0 words", "1 to 96")),
        (("--demo", "--prompt", "a " * 97), ("prompt: got 97 words", "1 to 96")),
        (("--demo", "--tokens", "bytes"), ("--tokens", "'bytes'")),
        (("--demo", "--step", "0"), ("--step: got 0", "1 to 7")),
        (("--demo", "--step", "8"), ("--step: got 8", "1 to 7")),
        (("--demo", "--step", "1", "--html", "f"), ("--step: not allowed with --html",)),
        (("--demo", "--html", "/no/such/dir/f"), ("/no/such/dir/f",)),
        (("--demo", "--once"), ("--once: allowed with --url only",)),
        (("--demo", "--interval", "1"), ("--interval: allowed with --url only",)),
        (("--url", "http://a", "--html", "f"), ("--html: allowed with --demo only",)),
        (("--url", "http://a", "--block-size", "4"), ("--block-size: allowed with --demo only",)),
        (("--url", "http://a", "--interval", "0"), ("--interval: got 0.0", "0.1 to 3600")),
        (("--url", "http://a", "--interval", "nan"), ("--interval: got nan", "0.1 to 3600")),
        (("--url", "localhost:8000"), ("url: got 'localhost:8000'", "http://HOST:PORT")),
        (("--url", "file:///etc/passwd"), ("url: got 'file:///etc/passwd'", "http://HOST:PORT")),
        (("--url", "ftp://a:1"), ("url: got 'ftp://a:1'", "http://HOST:PORT")),
        (("--url", "http://a:x"), ("url: got 'http://a:x'", "http://HOST:PORT")),
        (("--demo", "--blok-size", "4"), ("did you mean --block-size?",)),
    ],
)
def test_mistakes(argv: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert_one_line_error(capsys, *parts)


def assert_one_line_error(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rose: error: ") and captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_help_groups_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    with_demo, with_url = text.index("\nwith --demo:"), text.index("\nwith --url:")
    for option in ("--prompt", "--tokens", "--block-size", "--step", "--html"):
        assert with_demo < text.index(f"\n  {option}") < with_url
    for option in ("--interval", "--once"):
        assert with_url < text.index(f"\n  {option}")


def test_piped_output_has_no_escape_codes_and_one_step_can_be_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--demo", "--step", "3") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "#2 -> #3" in out and "2 of 7" not in out and "4 of 7" not in out
    assert re.search(r"A may write .*\n.*same block.*copy 2 tokens", out)
    assert re.search(r"\n B .*\n.*one rose ___ ___.*\n.*B may write", out)


def test_signs_that_the_terminal_lacks_are_replaced() -> None:
    command = [
        sys.executable,
        "-m",
        "rose_backend.cli",
        "blocks",
        "--demo",
        "--step",
        "1",
        "--prompt",
        "blüht \x1b[5m",
    ]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    finished = subprocess.run(command, capture_output=True, env=environment, timeout=HANG_S, check=False)
    assert finished.returncode == 0, finished.stderr
    assert b"bl?ht" in finished.stdout and b"\x1b" not in finished.stdout


def test_page_is_written_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "blocks.html"
    assert run("--demo", "--html", str(target), "--tokens", "characters", "--prompt", "Röslein") == 0
    captured = capsys.readouterr()
    assert captured.out == "" and str(target) in captured.err
    assert target.read_text(encoding="utf-8") == render_page(tell_story("Röslein", tokens="characters"))


@pytest.mark.parametrize("options", [("--once",), ()])
def test_one_reading_is_printed(
    options: tuple[str, ...], engine: MetricsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--url", engine.url, *options) == 0
    out = capsys.readouterr().out
    assert engine.num_requests == 1
    assert "\x1b" not in out
    for line in (
        r"KV cache of rose-garden at http://127.0.0.1:\d+/metrics",
        r"pool in use +█{10}░{30} 25\.0%",
        r"blocks +64 of 256, 32 tokens each",
        r"requests +12 running, 3 waiting",
        r"prefix hits +75\.0% since start: 1,500 of 2,000 prompt tokens",
        r"tokens +5,000 of prompts, 640 generated since start",
        r"preempted +7 since start",
    ):
        assert re.search(rf"(?m)^ ?{line}", out), (line, out)
    assert "Rose counts" not in out


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("<html><body>Hello</body></html>", 200, "answered, but not with Prometheus metrics"),
        ('{"object": "list"}', 200, "answered, but not with Prometheus metrics"),
        ("python_info 1.0\n", 200, "answered with metrics, but not with vllm:kv_cache_usage_perc"),
        ("", 200, "answered with metrics, but not with vllm:kv_cache_usage_perc"),
        (
            "vllm:kv_cache_usage_perc NaN\n",
            200,
            "answered with metrics, but not with vllm:kv_cache_usage_perc",
        ),
        (SAMPLE, 503, "answered 503 Service Unavailable"),
    ],
)
def test_an_answer_that_is_no_engines(
    body: str, status: int, message: str, engine: MetricsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.body, engine.status = body, status
    assert run("--url", engine.url, "--once") == 2
    assert_one_line_error(capsys, f"{engine.url}/metrics: {message}")


def test_no_engine(engine: MetricsServer, capsys: pytest.CaptureFixture[str]) -> None:
    engine.vanish()
    assert run("--url", f"{engine.url}/metrics") == 2
    assert_one_line_error(capsys, f"{engine.url}/metrics: no answer (Connection refused)")


def test_missing_parser_says_how_to_install_it(
    engine: MetricsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    assert run("--url", engine.url, "--once") == 2
    assert_one_line_error(capsys, "needs prometheus_client", "pip install 'WHEEL[serve]' brings it")


def test_engine_vanishes_midway_in_a_real_terminal(engine: MetricsServer) -> None:
    reader, terminal_side = pty.openpty()
    command = [sys.executable, "-m", "rose_backend.cli", "blocks", "--url", engine.url, "--interval", "0.1"]
    with subprocess.Popen(
        command, stdin=terminal_side, stdout=terminal_side, stderr=terminal_side
    ) as process:
        os.close(terminal_side)
        read_until(reader, "12 running")
        engine.vanish()
        read_until(reader, "no answer since")
        process.send_signal(signal.SIGINT)
        read_until(reader, None)
        assert process.wait(timeout=HANG_S) == 0
    os.close(reader)


def read_until(descriptor: int, text: str | None) -> None:
    """Read a terminal until a text has come; with None until nobody writes to it any more."""
    seen, end = b"", time.monotonic() + HANG_S
    while text is None or text.encode() not in seen:
        assert time.monotonic() < end, seen
        try:
            seen += os.read(descriptor, 65_536)
        except OSError:  # the other side is closed
            assert text is None, seen
            return
