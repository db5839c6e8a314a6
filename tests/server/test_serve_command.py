"""``rose serve`` as a process: options, the API key's variable, a Unix socket, SIGTERM."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest

import rose_backend
from rose_backend import EngineConfig
from rose_backend.cli import main
from rose_backend.errors import ConfigError
from rose_backend.server.serve import _bound, bind
from rose_backend.server.settings import LoRAModule, ServerSettings
from tests.server.live_server import (
    LONG,
    is_alive,
    wait_until,
)
from tests.support.patience import HANG_S

CHAT_MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3-chat"


def run(*argv: str) -> int:
    """Return the exit code, whether ``main`` returns it or argparse raises it."""
    try:
        return main(["serve", *argv])
    except SystemExit as end:
        return int(end.code or 0)


@contextmanager
def serving(log: Path, *argv: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``rose serve`` and wait until it says that it is ready."""
    with log.open("wb") as file, launched(file, *argv, **environment) as process:
        wait_until(lambda: " serving " in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield process


@contextmanager
def launched(log: BinaryIO, *argv: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``rose serve``; kill it at the end."""
    # Like the console script: without the current directory on the path.
    command = [sys.executable, "-P", "-m", "rose_backend.cli", "serve", *argv]
    process = subprocess.Popen(command, stderr=log, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_process_from_start_to_end(tiny_model_path: Path, tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "socket"
    options = ("--uds", str(path), "--served-model-name", "tiny", "--num-blocks", "100", "--no-fused-mlp")
    with serving(log, "--model", str(tiny_model_path), *options, ROSE_API_KEY="secret") as process:
        transport = httpx.HTTPTransport(uds=str(path))
        headers = {"Authorization": "Bearer secret"}
        with httpx.Client(transport=transport, base_url="http://rose", timeout=HANG_S) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 401
            body = {**LONG, "max_tokens": 200, "stream": True, "model": "tiny"}
            with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(HANG_S) == 0
    assert not path.exists()
    text = log.read_text()
    assert re.search(rf"serving tiny on unix:{path} after \d+\.\d s\n", text)
    assert re.search(r"start-up: \d+\.\d s: imports \d", text), "it begins with the process"
    assert "route=/v1/completions status=200" in text and "finish=length" in text
    assert "killing" not in text, "the engine ends when told to"
    assert "Traceback" not in text and "secret" not in text
    # As Triton's libraries print it when a process ends that has imported them.
    assert "nanobind" not in text


def test_imports_and_the_end_of_the_engine_process(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is imported from the current directory, Triton not on a CPU, and the engine ends with the server."""
    here, chosen, address = tmp_path / "here", tmp_path / "chosen", tmp_path / "socket"
    mark = f"open({str(tmp_path)!r} + '/' + __name__, 'w').close()\n"
    for directory in (here, chosen):
        directory.mkdir()
    (here / "safetensors.py").write_text(mark + "raise ImportError('planted')")
    # Modules in PYTHONPATH are still found, which shows that marks are left.
    (chosen / "sitecustomize.py").write_text(mark)
    (chosen / "triton.py").write_text(mark + "raise ImportError('planted')")
    root = str(Path(rose_backend.__file__).resolve().parent.parent)
    monkeypatch.chdir(here)
    options = (str(tiny_model_path), "--uds", str(address), "--num-blocks", "100")
    path = os.pathsep.join([str(chosen), root])
    with serving(tmp_path / "log", *options, PYTHONPATH=path) as process:
        assert (tmp_path / "sitecustomize").exists()
        (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        # A service manager may signal all processes: the engine goes on for as long as it is needed.
        os.kill(child, signal.SIGTERM)
        transport = httpx.HTTPTransport(uds=str(address))
        with httpx.Client(transport=transport, base_url="http://rose", timeout=HANG_S) as client:
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 20})
        assert answer.status_code == 200
        process.kill()
        process.wait()
        wait_until(lambda: not is_alive(child))
    assert not (tmp_path / "safetensors").exists() and not (tmp_path / "triton").exists()


def client_of(path: Path) -> httpx.Client:
    """Return a client of the server on a Unix socket."""
    transport = httpx.HTTPTransport(uds=str(path))
    return httpx.Client(transport=transport, base_url="http://rose", timeout=HANG_S)


def engine_of(process: subprocess.Popen[bytes]) -> int:
    """Return the process id of a server's engine."""
    (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    return child


def test_a_killed_server_leaves_no_process_and_its_successor_serves(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    log, path = tmp_path / "log", tmp_path / "socket"
    options = (str(tiny_model_path), "--uds", str(path), "--num-blocks", "100", "--max-num-seqs", "1")
    # One after the other, so that they are still running whenever the signals come.
    body, got = {**LONG, "prompt": ["Once"] * 16, "stream": True}, list[str]()
    with serving(log, *options) as process, client_of(path) as client:
        engine = engine_of(process)
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            got.append(next(lines))
            process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                got.extend(lines)
        wait_until(lambda: not is_alive(engine))
    # Nobody can take it for a whole answer.
    events = [line.removeprefix("data: ") for line in got if line]
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events)
    assert path.is_socket(), "left over"
    with serving(log, *options) as process, client_of(path) as client:
        engine = engine_of(process)
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/health").status_code == 503)
            process.send_signal(signal.SIGTERM)
            *_, error, end = [line for line in lines if line]
        assert "the engine has stopped" in error and end == "data: [DONE]"
        assert process.wait(HANG_S) == 0
        wait_until(lambda: not is_alive(engine))
    assert not path.exists()


def test_a_full_disk_for_the_log_and_used_up_descriptors(tiny_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    options = (str(tiny_model_path), "--uds", str(path), "--num-blocks", "100")

    def is_ready() -> bool:
        return path.exists() and client.get("/health").status_code == 200

    with (
        open("/dev/full", "wb") as log,
        launched(log, *options) as process,
        client_of(path) as client,
    ):
        wait_until(lambda: process.poll() is not None or is_ready())
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            files = {int(entry.name) for entry in Path(f"/proc/{process.pid}/fd").iterdir()}
            num_files = min(set(range(len(files) + 1)) - files)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_files, limits[1]))
            # New clients are turned away, others are served on.
            with client_of(path) as other, pytest.raises(httpx.TransportError):
                other.get("/health")
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
            *_, last, end = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert end == "data: [DONE]"
        with client_of(path) as other:
            assert other.get("/health").status_code == 200


def test_a_unix_socket_works_again_and_again(tiny_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    settings = ServerSettings(served_model_names=("a",), uds=str(path))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    umask = os.umask(0o027)
    try:
        with _bound(settings) as listener:
            assert path.stat().st_mode & 0o027 == 0
            # Before it serves, and with its queue full.
            clients = []
            for _ in range(3):
                with pytest.raises(
                    ConfigError, match=r"^uds: got .*socket, which is in use \(a server listens"
                ):
                    bind(settings)
            listener.listen(0)
            try:
                while True:
                    clients.append(socket.socket(socket.AF_UNIX))
                    clients[-1].setblocking(False)
                    clients[-1].connect(str(path))
            except BlockingIOError:
                pass
            with pytest.raises(ConfigError, match="in use"):
                bind(settings)
            for client in clients:
                client.close()
    finally:
        os.umask(umask)
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is no socket"):
        bind(settings)
    assert path.read_text() == "precious"
    path.unlink()
    with _bound(settings):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_the_first_line_comes_before_what_takes_long_to_import() -> None:
    code = (
        "import logging, sys; from rose_backend.cli import main\n"
        "class Imported(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        print(*{'torch', 'fastapi', 'uvicorn', 'jinja2', 'rich'} & sys.modules.keys(), record.getMessage())\n"
        "        sys.stdout.flush(); os._exit(0)\n"
        "import os; logging.getLogger().addHandler(Imported()); main(['serve', 'some/model'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.startswith("starting to serve some/model with rose "), result.stderr


def test_the_process_that_serves_http_does_without_torch() -> None:
    code = """
import sys
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.server import serve
from rose_backend.server.chat_template import ChatTemplate
template = ChatTemplate(None)
template.use(Tokenizer(sys.argv[1]))
template.check_available()
assert template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True, max_length=1000)
sys.exit(bool({"torch", "rose_backend.compile_ahead"} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code, str(CHAT_MODEL)]).returncode == 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerSettings]]:
    """Return what servers were started with; none is really started."""
    calls: list[tuple[EngineConfig, ServerSettings]] = []
    monkeypatch.setattr("rose_backend.server.serve.serve", lambda *call: calls.append(call) or 0)
    monkeypatch.delenv("ROSE_API_KEY", raising=False)
    return calls


def test_defaults(started: list[tuple[EngineConfig, ServerSettings]]) -> None:
    assert run("some/model") == run("--model", "some/model") == 0
    expected = EngineConfig(model="some/model"), ServerSettings(served_model_names=("some/model",))
    assert started == [expected, expected]


def test_adapters_are_given_as_to_vllm(started: list[tuple[EngineConfig, ServerSettings]]) -> None:
    one, other = LoRAModule("a", "b=c"), LoRAModule("d", "e,f", "m")
    as_json = '{"name": "d", "path": "e,f", "base_model_name": "m", "is_3d_lora_weight": false}'
    for given, expected in (
        (("a=b=c",), (one,)),
        (("a=b=c", as_json), (one, other)),
        ((f"[{as_json}]", "", "a=b=c"), (other, one)),
    ):
        assert (
            run("m", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "4", "--lora-modules", *given)
            == 0
        )
        config, settings = started.pop()
        assert settings.lora_modules == expected
        assert (config.enable_lora, config.max_loras, config.max_lora_rank) == (True, 2, 4)


def test_every_option_reaches_its_place(
    started: list[tuple[EngineConfig, ServerSettings]], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "host": "::1",
        "port": 9,
        "uds": "u",
        "chat_template": "t",
        "max_connections": 10,
    }
    given |= {"max_header_bytes": 2000, "max_headers": 20, "header_timeout_s": 1.5, "body_timeout_s": 2.5}
    given |= {"keep_alive_timeout_s": 3.5, "max_body_bytes": 5, "max_prompts": 6, "max_answer_tokens": 7}
    given |= {"drain_timeout_s": 7.5, "send_timeout_s": 8.5, "tool_call_parser": "hermes"}
    given |= {"runtime_lora_dir": str(tmp_path), "lora_modules": "x=y"}
    given |= {"reasoning_parser": "qwen3", "otlp_traces_endpoint": "http://localhost:4317"}
    argv = [
        "m",
        "--served-model-name",
        "a",
        "b",
        "--api-key",
        "k1",
        "--api-key",
        "k2",
        *("--allowed-origins", '["https://x.org", "http://[::1]:80"]', "--allowed-methods", '["GET"]'),
        *("--allowed-headers", '["x-a"]', "--allow-credentials"),
        "--no-log-requests",
        "--no-log-stats",
        "--no-page",
        "--no-frontend-multiprocessing",
        "--share-prefix-cache",
        "--exact-cached-tokens",
        "--enable-auto-tool-choice",
        "--no-prefix-cache",
        "--no-token-granular-hits",
        "--seed",
        "3",
    ]
    argv += [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    given |= {"served_model_names": ("a", "b"), "api_keys": ("k1", "k2"), "log_requests": False}
    given |= {"log_stats": False, "page": False}
    given |= {"allowed_origins": ("https://x.org", "http://[::1]:80"), "allowed_methods": ("GET",)}
    given |= {"allowed_headers": ("x-a",), "allow_credentials": True}
    given |= {"share_prefix_cache": True, "exact_cached_tokens": True, "frontend_multiprocessing": False}
    given |= {"enable_auto_tool_choice": True, "lora_modules": (LoRAModule("x", "y"),)}
    # Which goes with two processes only; see below.
    assert {field.name for field in fields(ServerSettings)} == given.keys() | {"replicas"}, "every option"
    assert run(*argv) == 0
    config = EngineConfig(model="m", prefix_cache=False, token_granular_hits=False, seed=3)
    assert started == [(config, ServerSettings(**given))]


def test_replicas(
    started: list[tuple[EngineConfig, ServerSettings]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("m", "--replicas", "2") == run("m", "--replicas", '{"min_replicas": 3}') == 0
    assert [settings.replicas for _, settings in started] == [2, {"min_replicas": 3}]
    for options, reason in (
        (["0"], "replicas: got 0, allowed is an integer from 1 to 1024"),
        (["[2]"], "invalid number or JSON object value: '[2]'"),
        (["true"], "invalid number or JSON object value: 'true'"),
        (["2", "--no-frontend-multiprocessing"], "replicas: allowed with frontend_multiprocessing only"),
    ):
        assert run("m", "--replicas", *options) == 2
        assert reason in capsys.readouterr().err
    assert len(started) == 2


def test_replicas_need_ray(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rose_backend.server.replicas", raising=False)
    assert run(str(tiny_model_path), "--replicas", "2", "--port", "0") == 2
    assert "replicas: needs ray, which is not installed; pip install 'WHEEL[ray]'" in capsys.readouterr().err


def test_an_option_goes_before_the_variable(
    started: list[tuple[EngineConfig, ServerSettings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_API_KEY", "from-variable")
    assert run("m") == run("m", "--api-key", "from-option") == 0
    assert [settings.api_keys for _, settings in started] == [("from-variable",), ("from-option",)]


def test_keys_from_a_file(
    started: list[tuple[EngineConfig, ServerSettings]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    # Not asked for where a key is given.
    monkeypatch.setenv("ROSE_API_KEY", "from-variable")
    file = tmp_path / "keys"
    file.write_text("\ufeffone\n\n  #two \r\nthree")
    file.chmod(0o640)
    assert (
        run("m", "--api-key-file", str(file)) == run("m", "--api-key", "k", "--api-key-file", str(file)) == 0
    )
    keys = "one", "#two", "three"
    assert [settings.api_keys for _, settings in started] == [keys, ("k", *keys)]
    # Each run says first that it starts.
    assert len(caplog.messages) == 2 and all(line.startswith("starting to") for line in caplog.messages)
    caplog.clear()
    file.chmod(0o644)
    assert run("m", "--api-key-file", str(file)) == 0
    warning = f"api_key_file: every user of this machine can read {file}"
    assert [line for line in caplog.messages if not line.startswith("starting to")] == [warning]
    # A file without a key is a secret that is missing; it must not disable authentication.
    for content, reason in (
        (b"", "holds no key"),
        (b" \n\n", "holds no key"),
        (b"\xff", "(not UTF-8 text)"),
        (b"a secret", "api_key: got an empty key or one with spaces"),
    ):
        file.write_bytes(content)
        assert run("m", "--api-key-file", str(file)) == 2
        error = capsys.readouterr().err
        assert error.startswith("rose: error: api_key") and reason in error and "secret" not in error
    file.unlink()
    assert run("m", "--api-key-file", str(file)) == 2
    assert "(No such file or directory)" in capsys.readouterr().err
    assert len(started) == 3


@pytest.mark.parametrize("key", ["", " ", "\t\n"])
def test_an_empty_variable_is_no_key(
    started: list[tuple[EngineConfig, ServerSettings]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str,
) -> None:
    monkeypatch.setenv("ROSE_API_KEY", key)
    assert run("m") == 2 and not started
    assert capsys.readouterr().err.startswith("rose: error: ROSE_API_KEY: is set but empty")
    assert run("m", "--api-key", "from-option") == 0


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ((), ("serve: give the model once",)),
        (("m", "--model", "m"), ("serve: give the model once",)),
        (("m", "--port", "x"), ("--port", "'x'")),
        (("m", "--port", "99999"), ("port: got 99999",)),
        (("m", "--block-size", "0"), ("block_size: got 0",)),
        (("m", "--aip-key", "x"), ("--aip-key", "did you mean --api-key?")),
        (("/no/such/dir", "--port", "0"), ("/no/such/dir",)),
        (("m", "--host", "256.0.0.1"), ("host, port: got 256.0.0.1:8000, which cannot be used",)),
        (("m", "--allowed-origins", "*"), ("--allowed-origins", "JSON list of texts", "'*'")),
        (
            ("m", "--allowed-origins", '["https://x.org/"]'),
            ("allowed_origins: got 'https://x.org/', allowed are *",),
        ),
        (("m", "--allowed-origins", '["x.org"]'), ("allowed_origins: got 'x.org'",)),
        (("m", "--allowed-headers", '["a b"]'), ("allowed_headers: got 'a b'",)),
        (("m", "--allowed-methods", "[1]"), ("--allowed-methods", "JSON list of texts")),
        (("m", "--lora-modules", "5"), ("--lora-modules", "NAME=PATH or JSON", "'5'")),
        (("m", "--lora-modules", '{"name": 1, "path": "b"}'), ("--lora-modules", "NAME=PATH or JSON")),
        (("m", "--lora-modules", '{"name": "a"}'), ("--lora-modules", "NAME=PATH or JSON")),
        (("m", "--lora-modules", "[" * 100_000), ("--lora-modules", "NAME=PATH or JSON")),
        (("m", "--lora-modules", "=b"), ("lora_modules: got name '' and path 'b', allowed are",)),
        (("m", "--lora-modules", "a\nb=c"), ("lora_modules: got name 'a\\nb' and path 'c'",)),
        (("m", "--lora-modules", "m=b"), ("lora_modules: got 'm' twice",)),
        (("m", "--lora-modules", "a=b", "--port", "0"), ("lora_modules: allowed with enable_lora only",)),
        (("m", "--runtime-lora-dir", "/no/such"), ("runtime_lora_dir: got '/no/such', allowed is",)),
        (("m", "--drain-timeout-s", "-1"), ("drain_timeout_s: got -1.0",)),
        (("m", "--send-timeout-s", "-1"), ("send_timeout_s: got -1.0",)),
    ],
)
def test_mistakes(argv: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("rose: error: ") and error.count("\n") == 1
    assert all(part in error for part in parts)


def test_an_unreadable_chat_template(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tiny_model_path), "--port", "0", "--chat-template", "/no/file") == 2
    assert "chat_template: cannot read /no/file" in capsys.readouterr().err


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    flags = {"served_model_names": "served_model_name", "api_keys": "api_key"}
    for field in (*fields(EngineConfig), *fields(ServerSettings)):
        assert "--" + flags.get(field.name, field.name).replace("_", "-") in text
    assert "ROSE_API_KEY" in text
