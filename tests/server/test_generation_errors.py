"""A model that computes NaN: the request that meets it ends with an error, others go on, and every body stays JSON."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from safetensors.torch import load_file, save_file

from rose_backend.engine.outputs import (
    CompletionOutput,
    Counters,
    EngineLoad,
    EngineStats,
    Logprob,
    RequestOutput,
)
from rose_backend.errors import GenerationError
from rose_backend.server.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from rose_backend.server.generation import Generation
from rose_backend.server.service import RequestRecord, ServerMetrics, Service
from tests.server.live_server import MODEL, USAGE, LiveServer, error_of, read_metric, running_server

FIRST_BROKEN = 60
LONG: dict[str, Any] = {
    "prompt": list(range(100, 110)),
    "max_tokens": 200,
    "ignore_eos": True,
    "temperature": 0,
}
SHORT: dict[str, Any] = {**LONG, "max_tokens": 20}
MESSAGE = "the model's logits for this request are all NaN or minus infinity, so no token can be chosen"


def ended(reason: str) -> str:
    """Return the metric that counts completions which ended so."""
    return f'request_success_total{{finished_reason="{reason}",model_name="{MODEL}"}}'


@pytest.fixture(scope="module", params=[False, True], ids=["one-process", "two-processes"])
def broken(
    request: pytest.FixtureRequest, tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Return a server of a model whose hidden states are NaN from position 60 on."""
    path = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny_model_path, path)
    (weights,) = path.glob("*.safetensors")
    tensors = load_file(weights)
    (name,) = (name for name in tensors if name.endswith("wpe.weight"))
    tensors[name] = tensors[name].clone()
    tensors[name][FIRST_BROKEN:] = math.nan
    save_file(tensors, weights, {"format": "pt"})
    with running_server(path, {"frontend_multiprocessing": request.param}) as server:
        yield server


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 2}, {"n": 2, "temperature": 1, "seed": 1}, {"stop": ["no such text"]}],
    ids=str,
)
def test_an_answer_that_cannot_go_on(broken: LiveServer, fields: dict[str, Any]) -> None:
    short = broken.text(**SHORT)
    num_failed, num_aborted = (broken.metric(ended(reason)) for reason in ("error", "abort"))
    answer = broken.complete(**{**LONG, **fields})
    assert answer.status_code == 500
    error = error_of(answer)
    assert (error["message"], error["type"], error["code"]) == (MESSAGE, "server_error", "generation_error")
    with broken.http.stream("POST", "/v1/completions", json={**LONG, **fields, "stream": True}) as stream:
        assert stream.status_code == 200
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["message"] == MESSAGE
    # What it had generated was streamed, but for what came together with the error.
    texts = [json.loads(event)["choices"] for event in events[:-2]]
    assert texts and all(choice["finish_reason"] is None for choices in texts for choice in choices)
    num_failed, num_aborted = (
        broken.metric(ended("error")) - num_failed,
        broken.metric(ended("abort")) - num_aborted,
    )
    assert num_failed >= 2 and num_failed + num_aborted == 2 * fields.get("n", 1)
    # No other request is touched, of this prompt neither.
    assert broken.http.get("/health").status_code == 200
    assert broken.text(**SHORT) == short
    broken.wait_until_idle()


def test_prompts_beside_it_end_with_it(broken: LiveServer) -> None:
    answer = broken.complete(**{**LONG, "prompt": [[1, 2, 3], list(range(80))], "max_tokens": 30})
    assert answer.status_code == 500 and error_of(answer)["message"] == MESSAGE
    broken.wait_until_idle()
    with pytest.raises(openai.InternalServerError):
        broken.openai.completions.create(model=MODEL, prompt=list(range(80)))
    broken.wait_until_idle()


@pytest.mark.parametrize(
    ("n", "reasons"), [(1, {"error": 1}), (4, {"error": 1, "stop": 1, "abort": 2})], ids=["one", "four"]
)
def test_each_completion_beside_an_error_is_counted_once(n: int, reasons: dict[str, int]) -> None:
    class Engine:
        async def generate_deltas(
            self, processed: object, *, request_id: str
        ) -> AsyncGenerator[RequestOutput, None]:
            if n > 1:
                others = [CompletionOutput(1, "a", [5], finish_reason="stop"), CompletionOutput(2, "a", [5])]
                yield RequestOutput(request_id, None, [1], others)
            failed = CompletionOutput(0, "", [], finish_reason="error")
            yield RequestOutput(request_id, None, [1], [failed], finished=n == 1)

    metrics = ServerMetrics(MODEL, block_size=16, num_blocks=1, max_model_len=100)
    service = SimpleNamespace(
        engine=Engine(), engine_request_ids=set(), metrics=metrics, hit_unit=16, tracing=None
    )
    record = RequestRecord("id", "/v1/completions")
    inputs: Any = [SimpleNamespace(params=SimpleNamespace(n=n))]

    async def read() -> None:
        async for _ in Generation(cast(Service, service), record, inputs).outputs():
            pass

    with pytest.raises(GenerationError):
        asyncio.run(read())
    shown = metrics.render(Counters(EngineStats(), EngineLoad(0, 0, 0.0))).decode()
    for reason in metrics.request_success:
        assert read_metric(shown, ended(reason)) == reasons.get(reason, 0), reason
    assert record.finish_reasons == set(reasons)


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_every_body_is_json(kind: type[Answer], logprob: float) -> None:
    """Rows with some NaN, or with an infinite logit, have tokens whose log-probability is no number."""
    positions = [{5: Logprob(logprob, 1, "a"), 6: Logprob(logprob, 2, "b")}]
    completion = CompletionOutput(0, "a", [5], positions, logprob, "length", None, "a")
    output = RequestOutput("r", None, [1], [completion], True)
    options = AnswerOptions("id", 0, MODEL)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    answer = (
        kind(options)
        if kind is CompletionAnswer
        else ChatAnswer(options, token_bytes=lambda token_id: b"a", num_top_logprobs=2)
    )
    list(answer.keep(0, output))
    event = b"".join(answer.events(0, output)).decode().strip().rpartition("data: ")[2]
    shown = -9999.0 if logprob == -math.inf else None
    for content in (b"".join(answer.body(USAGE)).decode(), event):
        (choice,) = json.loads(content, parse_constant=refuse)["choices"]
        found = choice["logprobs"]
        if kind is CompletionAnswer:
            assert found["token_logprobs"] == [shown] and found["top_logprobs"] == [{"a": shown, "b": shown}]
        else:
            assert [entry["logprob"] for entry in found["content"][0]["top_logprobs"]] == [shown, shown]
