"""Behind vLLM's Rust API server (``VLLM_USE_RUST_FRONTEND=1``), where nothing of Rose's or vLLM's Python checks runs.

The engine gets requests as messages; what must hold for every client, salts and rounded counts among it, is the
engine's own. The first tests send such messages to an engine of this process. The last one starts the Rust server, and
needs its binary, which vLLM's packages for GPUs bring.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import vllm
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder

from tests.e2e.conftest import MakeEngine
from tests.support.reference_generation import greedy_differences, tie_free_answer
from tests.support.vllm_server import VllmServer, running_server

RUST_BINARY = Path(os.environ.get("VLLM_RUST_FRONTEND_PATH") or Path(vllm.__file__).parent / "vllm-rs")
BLOCK_SIZE = 16
SALT = {"cache_salt": "another tenant"}
PROMPT = [7 * index % 2000 + 1 for index in range(60)]
SAMPLING: dict[str, Any] = {
    "temperature": 0.0,
    "watermarking": True,
    "top_p": 1.0,
    "top_k": 0,
    "max_tokens": 12,
    "min_tokens": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop_token_ids": [],
    "_eos_token_id": 0,
    "_all_stop_token_ids": [0],
    "routed_experts_prompt_start": 0,
}


@pytest.fixture(scope="module")
def llm(make_engine: MakeEngine) -> Iterator[Any]:
    rose = {"exact_cached_tokens": False}
    with make_engine(block_size=BLOCK_SIZE, additional_config={"rose": rose}) as started:
        yield started


def send(llm: Any, name: str, prompt: list[int], *, salt: str | None = None, **sampling: Any) -> None:
    """Send what the Rust server of vLLM 0.32 and 0.33 sends: an array of 22 fields, sampling parameters as a map."""
    fields = [name, prompt, None, SAMPLING | sampling, None, 0.0, None, salt, *([None] * 3), 0, 0, 0, None]
    fields += [False, name.partition("-")[0], None, {"chat_template_kwargs": {}}, False, None, None]
    request = MsgpackDecoder(EngineCoreRequest).decode(msgspec.msgpack.encode(fields))
    assert (request.request_id, request.cache_salt, len(fields)) == (name, salt, 22)
    core = llm.llm_engine.engine_core.engine_core
    core.add_request(*core.preprocess_add_request(request))


def receive(llm: Any) -> dict[str, tuple[list[int], int, Any]]:
    """Return of each request its tokens, its cached tokens as told to the client, and why it ended."""
    core = llm.llm_engine.engine_core.engine_core
    received: dict[str, tuple[list[int], int, Any]] = {}
    while core.scheduler.has_unfinished_requests():
        for result in (core.step_fn()[0] or {}).values():
            for output in result.outputs:
                tokens, num_cached, _ = received.get(output.request_id, ([], 0, None))
                if output.prefill_stats is not None:
                    num_cached = output.prefill_stats.num_cached_tokens
                reason = (output.finish_reason, output.stop_reason)
                received[output.request_id] = (tokens + output.new_token_ids, num_cached, reason)
    core.scheduler.kv_cache_manager.manager.check_integrity()
    return received


def test_texts_and_stop_tokens(llm: Any, tiny_model_path: Path) -> None:
    expected = list(tie_free_answer(tiny_model_path, PROMPT, 12))
    send(llm, "whole-1", PROMPT)
    send(llm, "stopped-2", PROMPT, stop_token_ids=[expected[3]])
    send(llm, "late-3", PROMPT, stop_token_ids=[expected[3]], _all_stop_token_ids=[expected[3]], min_tokens=4)
    received = receive(llm)
    assert received["whole-1"][0] == expected
    assert received["whole-1"][2] == (FinishReason.LENGTH, None)
    num_stopped = expected.index(expected[3]) + 1
    assert received["stopped-2"][0] == expected[:num_stopped]
    assert received["stopped-2"][2] == (FinishReason.STOP, expected[3])
    assert len(received["late-3"][0]) > 4


def test_draws_are_those_of_the_python_front_end(llm: Any) -> None:
    # The Rust server sends floats of 32 bits.
    single = {name: np.float32(value).item() for name, value in (("temperature", 0.8), ("top_p", 0.9))}
    send(llm, "drawn-1", PROMPT, **single, top_k=20, seed=7)
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=7, max_tokens=12)
    drawn = receive(llm)["drawn-1"][0]
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert drawn == list(output.outputs[0].token_ids)


def test_salts_part_and_counts_are_rounded_in_the_engine(llm: Any) -> None:
    prompt = [11 * index % 2000 + 1 for index in range(60)]
    told = []
    for number, salt in enumerate((None, "one", "one", "two", None)):
        send(llm, f"told-{number}", prompt, salt=salt)
        told.append(receive(llm)[f"told-{number}"][1])
    # 59 tokens are found, and 48 of them fill blocks.
    assert told == [0, 0, 48, 0, 48]


@pytest.fixture(scope="module")
def rust_server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log_path = tmp_path_factory.mktemp("rust") / "server.log"
    environment = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(RUST_BINARY)}
    arguments = ("--attention-backend", "rose", "--dtype", "float32", "--served-model-name", "tiny")
    arguments += ("--block-size", str(BLOCK_SIZE), "--enforce-eager", "--enable-prompt-tokens-details")
    with running_server(tiny_model_path, log_path, *arguments, environment=environment) as server:
        yield server
        assert "Traceback" not in server.log


@pytest.mark.skipif(
    not RUST_BINARY.is_file(),
    reason="needs vLLM's Rust API server: vllm-rs in vLLM's folder, or its path in VLLM_RUST_FRONTEND_PATH",
)
def test_the_rust_server(rust_server: VllmServer, tiny_model_path: Path) -> None:
    def complete(**parameters: Any) -> Any:
        body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **parameters}
        return rust_server.post("/v1/completions", **body)

    (line,) = [line for line in rust_server.log.splitlines() if "Rose is active" in line]
    assert "joined_outputs (vLLM's Rust front end)" in line
    first, salted, again = (complete(return_token_ids=True, **salt).json() for salt in ({}, SALT, {}))
    (choice,) = first["choices"]
    assert greedy_differences(tiny_model_path, (tuple(PROMPT),), [choice["token_ids"]]) == []
    assert salted["choices"][0]["text"] == again["choices"][0]["text"] == choice["text"]
    details = [(each["usage"].get("prompt_tokens_details") or {}) for each in (first, salted, again)]
    assert [each.get("cached_tokens", 0) for each in details] == [0, 0, 48]
    for wrong in ({"prompt": [10_000_000]}, {"prompt": [1] * 5000}, {"temperature": -1}, {"n": 3}):
        assert complete(**wrong).status_code == 400, wrong
    pieces, body = [], {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "stream": True}
    with rust_server.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                pieces += [each["text"] for each in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == choice["text"]
    metrics = rust_server.client.get("/metrics").text
    (hits,) = re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", metrics, re.MULTILINE)
    assert float(hits) > 0 and float(hits) % BLOCK_SIZE == 0
