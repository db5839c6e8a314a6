"""A process of ``vllm serve`` with Rose is killed under load: clients are told, and the other processes can end."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.patience import HANG_S
from tests.support.vllm_server import family_of, kill_what_is_left, start_server

ARGUMENTS = (
    *("--attention-backend", "rose", "--served-model-name", "tiny", "--dtype", "float32"),
    *("--enforce-eager", "--block-size", "16", "--num-gpu-blocks-override", "200"),
    # One request after the other, so that some are unfinished whenever a process is killed.
    *("--max-num-seqs", "1"),
)
HELD_UP_S = 3
"""Long enough for a request to be answered if nothing holds it up."""
LONG = {"prompt": ["Once"] * 16, "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize(
    ("name", "num_workers"), [("", 1), ("VLLM::EngineCore", 1), ("VLLM::Worker_TP1", 2)], ids=str
)
def test_a_killed_process_of_vllm(tiny_model_path: Path, tmp_path: Path, name: str, num_workers: int) -> None:
    arguments = (*ARGUMENTS, "--tensor-parallel-size", str(num_workers))
    server = start_server(tiny_model_path, tmp_path / "log", *arguments)
    family, got = [], list[str]()
    try:
        server.wait_until_ready()
        family = family_of(server.process.pid)
        (engine,) = (each for each in family if each.name() == "VLLM::EngineCore")
        # Stopped, it holds requests up, and serves them when it goes on.
        engine.suspend()
        with ThreadPoolExecutor() as pool:
            held_up = pool.submit(server.post, "/v1/completions", model="tiny", prompt="Once", max_tokens=2)
            assert not wait([held_up], HELD_UP_S).done
            engine.resume()
            assert held_up.result().status_code == 200
        victim = next(each for each in family if each.name() == name) if name else family[0]
        body = {"model": "tiny", **LONG, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            got.append(next(lines))
            victim.kill()
            if name:
                got.extend(lines)
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    got.extend(lines)
                # vLLM's engine does not notice.
                engine.kill()
        assert server.process.wait(HANG_S) == (0 if name else -signal.SIGKILL)
        assert not psutil.wait_procs(family, HANG_S)[1]
    finally:
        server.client.close()
        kill_what_is_left(family_of(server.process.pid) or family)
    events = [line.removeprefix("data: ") for line in got if line]
    if name:
        error, end = events[-2:]
        assert "EngineCore encountered an issue" in json.loads(error)["error"]["message"] and end == "[DONE]"
        del events[-2:]
    # Nobody can take it for a whole answer.
    ends = [json.loads(event)["choices"][0]["finish_reason"] for event in events]
    assert len(ends) < 16 * 1000 and ends.count("length") < 16
