"""scripts/serve.py: what it refuses, what it starts, and that it leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import serve

from benchmarks.online import servers
from tests.support.patience import HANG_S

# Stands for vllm: answers /health, starts a helper that ignores SIGTERM, ends on SIGINT unless told to be stubborn.
FAKE_VLLM = """#!{python}
import http.server, os, signal, subprocess, sys
code = "import signal, time; signal.signal(15, 1); time.sleep(3600)"
new_session = "session" in os.environ.get("FAKE", "")
null = subprocess.DEVNULL
helper = subprocess.Popen([sys.executable, "-c", code], stdout=null, stderr=null, start_new_session=new_session)
print("helper", helper.pid, "server", os.getpid(), flush=True)
if os.environ.get("FAKE") == "dies":
    sys.exit(3)
if os.environ.get("FAKE") == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *arguments):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
try:
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
except KeyboardInterrupt:
    print("server ended in order", flush=True)
"""
DRIVER = """
import sys
sys.path.insert(0, {scripts!r})
import serve
serve.SECONDS_BEFORE_TERMINATE = serve.SECONDS_BEFORE_KILL = 1.0
serve.SECONDS_FOR_HELPERS = 0.5
sys.executable = {python!r}
sys.exit(serve.main({arguments!r}))
"""


@pytest.fixture
def free_port() -> int:
    """Return a port that nothing uses at the moment."""
    return servers.free_port()


def launch(folder: Path, port: int, behavior: str = "") -> subprocess.Popen[str]:
    """Start scripts/serve.py with the fake vllm in ``folder`` and the model ``gpt2``."""
    script = folder / "vllm"
    script.write_text(FAKE_VLLM.format(python=sys.executable))
    script.chmod(0o755)
    driver = DRIVER.format(
        scripts=str(Path(serve.__file__).parent),
        python=str(folder / "python"),
        arguments=["gpt2", "--port", str(port)],
    )
    environment = {**os.environ, "FAKE": behavior}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", driver],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """Return the lines of a process's output up to the first that begins with ``start``."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return lines
    raise AssertionError(f"no line begins with {start!r}:\n{''.join(lines)}")


def process_ids(lines: list[str]) -> list[int]:
    """Return the ids of the fake server and its helper."""
    words = next(line for line in lines if line.startswith("helper")).split()
    return [int(words[1]), int(words[3])]


def exists(process_id: int) -> bool:
    """Whether a process is there, zombies included."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("number", "behavior", "expected"),
    [
        (signal.SIGINT, "", 0),
        (signal.SIGTERM, "", 0),
        (signal.SIGINT, "helper in a new session", 0),
        (signal.SIGINT, "stubborn", 1),
    ],
)
def test_a_signal_ends_everything_in_order_and_kills_a_stubborn_server(
    tmp_path: Path, free_port: int, number: int, behavior: str, expected: int
) -> None:
    with launch(tmp_path, free_port, behavior) as process:
        lines = read_until(process, "curl ")
        process.send_signal(number)
        assert process.stdout is not None
        lines += process.stdout.readlines()
        status = process.wait(timeout=HANG_S)
    assert status == expected
    assert lines[0].startswith("$ vllm serve gpt2 ") and lines[1].startswith("Starting vLLM: it imports ")
    assert ("server ended in order\n" in lines) == (status == 0)
    assert len([line for line in lines if "curl" in line]) == 1
    assert f"http://127.0.0.1:{free_port}/v1/completions" in "".join(lines)
    assert not any(exists(process_id) for process_id in process_ids(lines))


def test_a_server_that_dies_is_reported_with_its_status(tmp_path: Path, free_port: int) -> None:
    with launch(tmp_path, free_port, "dies") as process:
        output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 3
    assert "ended by itself before it was ready (status 3)" in output
    assert "curl" not in output
    assert not any(exists(process_id) for process_id in process_ids(output.splitlines()))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal exists on Linux only")
def test_the_server_ends_even_when_its_launcher_is_killed(tmp_path: Path, free_port: int) -> None:
    with launch(tmp_path, free_port) as process:
        helper, server = process_ids(read_until(process, "curl "))
        process.kill()
        process.wait(timeout=HANG_S)
        deadline = time.monotonic() + HANG_S
        while exists(server) and time.monotonic() < deadline:
            time.sleep(0.05)
        is_gone = not exists(server)
        os.kill(helper, signal.SIGKILL)
    assert is_gone


class SlowServer:
    """Answers after 40 s of its own clock."""

    stop_requests: tuple[int, ...] = ()
    now = 0.0

    def wait(self, seconds: float) -> int | None:
        self.now += 5.0
        return 0 if self.now > 100 else None


def test_a_start_that_takes_long_says_so_and_what_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = SlowServer()
    monkeypatch.setattr(serve.time, "monotonic", lambda: server.now)
    monkeypatch.setattr(serve, "is_healthy", lambda host, port: server.now >= 40)
    assert serve.supervise(server, "127.0.0.1", 1, "gpt2") == 1  # type: ignore[arg-type]
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[:2] == [f"vLLM is still starting, {seconds} s so far" for seconds in (15, 30)]
    assert lines[2] == "Ready after 40 s; Ctrl-C ends it. Try:"
    assert lines[3].startswith("curl ") and not lines[4:]


def test_a_port_that_is_in_use_or_out_of_range_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve.main(["gpt2", "--port", str(port)]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        f"ERROR: PORT: {port} cannot be used (Address already in use). Choose another: PORT={port + 1} make serve"
    ]
    assert captured.out == ""
    for port in (0, -1, 65536):
        with pytest.raises(serve.ServeError, match=f"PORT: got {port}, allowed is a number from 1 to 65535"):
            serve.check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    "model",
    ["./nowhere", "/nowhere/model", "models/nowhere", "../nowhere", "a/b/c", "", "with space", "~/model"],
)
def test_a_model_that_cannot_exist_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(serve.ServeError, match="does not exist and is no Hugging Face id"):
        serve.check_model(model)


def test_a_directory_with_a_model_and_a_hub_id_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(serve.ServeError, match=r"without config\.json"):
        serve.check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    serve.check_model(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for hub_id in ("gpt2", "openai-community/gpt2", "Qwen/Qwen3-0.6B", "s3://bucket/model"):
        serve.check_model(hub_id)


def test_a_missing_vllm_is_named(tmp_path: Path) -> None:
    with pytest.raises(serve.ServeError, match="Run make set-up"):
        serve.check_installation(tmp_path / "vllm")


def test_arguments_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = serve.server_arguments(
        "gpt2", 9000, ["--max-model-len", "64"], is_cpu=True, has_compiler=True
    )
    assert arguments == [
        *["serve", "gpt2", "--port", "9000", "--host", "127.0.0.1", "--attention-backend", "rose"],
        *["--enable-prompt-tokens-details", "--max-model-len", "64"],
    ]
    own = ["--attention-backend=CPU_ATTN", "--no-enable-prompt-tokens-details"]
    assert serve.server_arguments("gpt2", 1, own, is_cpu=True, has_compiler=True)[6:] == own
    for own in (["--host", "0.0.0.0"], ["--host=::"]):
        arguments = serve.server_arguments("gpt2", 1, own, is_cpu=True, has_compiler=True)
        assert "127.0.0.1" not in arguments and arguments[-len(own) :] == own
    assert capsys.readouterr().out == ""
    assert "--enforce-eager" in serve.server_arguments("gpt2", 1, [], is_cpu=True, has_compiler=False)
    assert "no C++ compiler" in capsys.readouterr().out
    assert "--enforce-eager" not in serve.server_arguments("gpt2", 1, [], is_cpu=False, has_compiler=False)


def test_the_users_environment_wins() -> None:
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONSAFEPATH": "1"}
    assert serve.server_environment({"A": "1"}) == {"A": "1", **defaults}
    chosen = {"VLLM_CPU_KVCACHE_SPACE": "8", "PYTHONSAFEPATH": ""}
    assert serve.server_environment(chosen) == chosen


def test_option_values_are_found_in_both_spellings() -> None:
    assert serve.option_value(["--host", "::1", "--x"], "--host") == "::1"
    assert serve.option_value(["--host=::1"], "--host") == "::1"
    assert serve.option_value(["--hostname", "a", "--host"], "--host") is None


def test_the_curl_line_survives_a_shell() -> None:
    line = serve.curl_line("it's", "::1", 8000)
    printed = subprocess.run(
        ["sh", "-c", line.replace("curl", "printf '%s\\n'", 1)], capture_output=True, text=True
    )
    assert "\n" not in line
    assert '"model": "it\'s"' in printed.stdout and "http://[::1]:8000/v1/completions" in printed.stdout
