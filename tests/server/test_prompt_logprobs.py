"""Answers hold the log-probabilities of prompts as vLLM writes them, with the values of transformers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.logprobs import create_prompt_logprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from rose_backend.engine import outputs as engine_outputs
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.engine.tokenizer_loading import load_tokenizer
from rose_backend.server.answers import AnswerOptions, CompletionAnswer
from tests.server.live_server import USAGE, LiveServer, check_refused, running_server, stream

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3-chat"
TEXT = "Once upon a time, 薔薇 and a rose 🌹 <|im_end|> naïve"
PROMPTS = [TEXT, "The rose", "a"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}


class Reference:
    """What transformers computes and vLLM makes of it."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.serving = object.__new__(OpenAIServingCompletion)
        self.serving.return_tokens_as_token_ids = False
        self.serving.enable_prompt_tokens_details = self.serving.enable_per_request_metrics = False
        self.serving.enable_force_include_usage = False
        self.serving.system_fingerprint = None

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Return those of all tokens after each of some, ``[P, V]``."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(-1)

    def entries(self, token_ids: list[int], number: int, start: int = 1) -> list[Any]:
        """Return vLLM's lists of the tokens from index ``start`` on, after None for what is in front of them."""
        processor = LogprobsProcessor(self.tokenizer, None, create_prompt_logprobs(False), None, None, number)
        chosen = torch.tensor(token_ids[start:])[:, None]
        logprobs = self.logprobs(token_ids)[start - 1 : -1]
        top = logprobs.topk(number)
        tensors = LogprobsTensors(
            torch.cat([chosen, top.indices], 1),
            torch.cat([logprobs.gather(1, chosen), top.values], 1),
            (logprobs >= logprobs.gather(1, chosen)).sum(1),
        )
        if len(chosen):
            processor._update_prompt_logprobs(tensors)
        found = processor.prompt_logprobs
        assert isinstance(found, list)
        return found

    def output(self, body: dict[str, Any], prompt: str) -> RequestOutput:
        """Return what vLLM's engine returns for one prompt."""
        request = CompletionRequest.model_validate({"prompt": prompt, **body})
        params = request.to_sampling_params(body["max_tokens"], {})
        ids = self.tokenizer(prompt).input_ids
        whole, max_tokens = list(ids), params.max_tokens
        assert max_tokens is not None
        while len(whole) < len(ids) + max_tokens:
            whole.append(int(self.logprobs(whole)[-1].argmax()))
        new, asked = whole[len(ids) :], params.prompt_logprobs
        completion = CompletionOutput(
            0,
            self.tokenizer.decode(new, skip_special_tokens=True),
            new,
            0.0,
            None if params.logprobs is None else self.entries(whole, params.logprobs, len(ids))[1:],
            finish_reason="length",
        )
        prompt_logprobs = None if asked is None else self.entries(ids, asked)
        return RequestOutput("r", prompt, ids, prompt_logprobs, [completion], True)

    def choices(self, body: dict[str, Any], prompts: list[str]) -> list[dict[str, Any]]:
        """Return the choices that vLLM's server makes of these."""
        request = CompletionRequest.model_validate({"prompt": prompts, **body})
        made = [self.output(body, prompt) for prompt in prompts]
        metadata = RequestResponseMetadata(request_id="r")
        if not request.stream:
            answer = self.serving.request_output_to_completion_response(
                made, request, "r", 0, "m", self.tokenizer, metadata
            )
            choices: list[dict[str, Any]] = answer.model_dump(mode="json")["choices"]
            return choices

        async def results() -> AsyncIterator[tuple[int, RequestOutput]]:
            for each in enumerate(made):
                yield each

        async def events() -> list[str]:
            arguments = (results(), "r", 0, "m", len(made), self.tokenizer, metadata)
            return [each async for each in self.serving.completion_stream_generator(request, [], *arguments)]

        return [json.loads(each[6:])["choices"][0] for each in asyncio.run(events())[:-1]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module", params=[False, True], ids=["one-process", "two-processes"])
def qwen3(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    settings = {"frontend_multiprocessing": request.param, "chat_template": None}
    with running_server(MODEL, settings, max_num_batched_tokens=16) as server:
        yield server


def check_same(ours: Any, theirs: Any, path: str = "") -> None:
    """Check that JSON is the same, the order of candidates included, numbers but for rounding."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), path
        # Who did not ask for a field gets none, where vLLM has null.
        assert ours.keys() == {name for name in theirs if theirs[name] is not None or name in ours}, path
        if "logprobs" in path and path.endswith("]"):
            assert list(ours) == [name for name in theirs if name in ours], path
        for name, value in ours.items():
            check_same(value, theirs[name], f"{path}.{name}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), path
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            check_same(one, other, f"{path}[{index}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-4), path
    else:
        assert (type(ours), ours) == (type(theirs), theirs), path


def joined(choices: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Return all that the events of one choice say."""
    events = [each for each in choices if each["index"] == index]
    lists: dict[str, list[Any]] = {}
    for each in events:
        for name, values in (each["logprobs"] or {}).items():
            lists.setdefault(name, []).extend(values)
    text = "".join(each["text"] for each in events)
    return {"text": text, "logprobs": lists, "finish_reason": events[-1]["finish_reason"]}


BODIES: list[dict[str, Any]] = [
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"echo": True, "logprobs": 0, "max_tokens": 1},
    {"echo": True, "max_tokens": 0},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 20, "max_tokens": 1},
    {"prompt_logprobs": 5, "logprobs": 2, "echo": True},
    {"prompt_logprobs": 1, "logprobs": 3, "echo": True},
    {"prompt_logprobs": 2, "max_tokens": 0, "echo": True},
    {"echo": True, "logprobs": 1, "return_token_ids": True},
    {"echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True},
    {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True},
]


def named(body: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in body.items())


@pytest.mark.parametrize("fields", BODIES, ids=named)
def test_answers_are_vllms(qwen3: LiveServer, reference: Reference, fields: dict[str, Any]) -> None:
    body = {**GREEDY, **fields}
    answer = qwen3.complete(prompt=PROMPTS, **body)
    assert answer.status_code == 200, answer.text
    check_same(answer.json()["choices"], reference.choices(body, PROMPTS))
    # As in vLLM, the token that is computed and not shown counts.
    assert answer.json()["usage"]["completion_tokens"] == len(PROMPTS) * max(body["max_tokens"], 1)


@pytest.mark.parametrize("fields", [BODIES[0], BODIES[1], {"prompt_logprobs": 0}], ids=named)
def test_streams_are_vllms(qwen3: LiveServer, reference: Reference, fields: dict[str, Any]) -> None:
    body = {**GREEDY, **fields}
    choices = [each["choices"][0] for each in stream(qwen3, prompt=PROMPTS, **body)]
    expected = reference.choices({**body, "stream": True}, PROMPTS)
    for index in range(len(PROMPTS)):
        check_same(joined(choices, index), joined(expected, index))
    assert all("prompt_logprobs" not in each for each in choices)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_each_of_n_choices_has_them(qwen3: LiveServer, reference: Reference, is_streaming: bool) -> None:
    body = {"n": 3, "seed": 4, "temperature": 1, "max_tokens": 4, "echo": True, "logprobs": 1}
    prompts = PROMPTS[:2]
    if is_streaming:
        events = [each["choices"][0] for each in stream(qwen3, prompt=prompts, **body)]
        choices = [joined(events, index) for index in range(6)]
    else:
        choices = qwen3.complete(prompt=prompts, **body).json()["choices"]
    expected = reference.choices({**GREEDY, "echo": True, "logprobs": 1, "max_tokens": 0}, prompts)
    for index, choice in enumerate(choices):
        wanted = expected[index // 3]
        count = len(wanted["logprobs"]["tokens"])
        assert len(choice["logprobs"]["tokens"]) > count
        for name, values in choice["logprobs"].items():
            check_same(values[:count], wanted["logprobs"][name])
        # Offsets go on where the prompt's tokens end.
        length = sum(map(len, choice["logprobs"]["tokens"][:count]))
        assert choice["logprobs"]["text_offset"][count] == length
        if not is_streaming:
            check_same(choice["prompt_logprobs"], wanted["prompt_logprobs"])


@pytest.mark.parametrize("number", [0, 3])
def test_chats_have_one_field_for_all_choices(qwen3: LiveServer, reference: Reference, number: int) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi there"}],
        "n": 2,
        "max_tokens": 3,
        "prompt_logprobs": number,
        "return_token_ids": True,
    }
    answer = qwen3.post("/v1/chat/completions", body).json()
    expected = ChatCompletionResponse.model_validate(
        {**answer, "prompt_logprobs": reference.entries(answer["prompt_token_ids"], number)}
    )
    check_same(answer["prompt_logprobs"], expected.model_dump(mode="json")["prompt_logprobs"])
    assert all("prompt_logprobs" not in each for each in answer["choices"])
    refusal = qwen3.post("/v1/chat/completions", body | {"stream": True, "prompt_logprobs": 1})
    check_refused(refusal, "prompt_logprobs", "got 1 with stream")


MULTIPLE_CHOICE = [
    ("The capital of France is", [" Paris", " London", " a small red rose"]),
    ("Once upon a", [" time", " king of the old castle"]),
]
LAST_WORDS = [("The king lived in a", [" castle"]), ("She opened the", [" door and went home"])]
ROLLING = "The king rose and walked to the castle where an old woman told him of the road. " * 4


@pytest.mark.parametrize("task", ["multiple choice", "last words", "rolling"])
def test_scores_of_lm_eval_are_transformers(qwen3: LiveServer, reference: Reference, task: str) -> None:
    """Send the requests of lm-eval's ``local-completions``, and sum as it does."""
    tokenize = reference.tokenizer
    pairs: list[tuple[list[int], int]] = []
    if task == "rolling":
        # Windows, the first of which begins with the token for that, each with one token of context.
        ids = [tokenize.bos_token_id or tokenize.eos_token_id, *tokenize(ROLLING).input_ids]
        pairs = [(ids[first : first + 33], 1) for first in range(0, len(ids) - 1, 32)]
    else:
        for context, endings in MULTIPLE_CHOICE if task == "multiple choice" else LAST_WORDS:
            for ending in endings:
                ids = tokenize(context + ending).input_ids
                pairs.append((ids, len(tokenize(context).input_ids)))
    found: list[tuple[float, bool]] = []
    for first in range(0, len(pairs), 3):
        batch = pairs[first : first + 3]
        answer = qwen3.complete(
            model="tiny",
            prompt=[ids for ids, _ in batch],
            temperature=0,
            max_tokens=1,
            logprobs=1,
            seed=1234,
            echo=True,
        ).json()
        choices = sorted(answer["choices"], key=lambda each: each["index"])
        for choice, (_, start) in zip(choices, batch, strict=True):
            values = choice["logprobs"]["token_logprobs"][start:-1]
            tops = choice["logprobs"]["top_logprobs"][start:-1]
            is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
            found.append((sum(values), is_greedy))
    for (ids, start), (total, is_greedy) in zip(pairs, found, strict=True):
        logprobs, rest = reference.logprobs(ids)[start - 1 : -1], torch.tensor(ids[start:])
        assert total == pytest.approx(float(logprobs.gather(1, rest[:, None]).sum()), abs=1e-3)
        assert is_greedy == bool((logprobs.argmax(-1) == rest).all())
    assert len({is_greedy for _, is_greedy in found}) == (2 if task == "multiple choice" else 1)


def test_nobody_gets_another_tenants_prompt(reference: Reference) -> None:
    with running_server(MODEL, {"api_keys": ("one", "two")}) as server:
        body = {**GREEDY, "prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 0}
        for key in ("one", "two", "one"):
            answer = server.http.post(
                "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            check_same(answer.json()["choices"], reference.choices(body, [TEXT]))


@pytest.mark.parametrize("is_streaming", [False, True])
def test_long_ones_are_written_in_pieces(is_streaming: bool) -> None:
    texts = Tokenizer(load_tokenizer(MODEL)).token_texts
    logprobs = engine_outputs.PromptLogprobs(np.full(1000, 5, np.int32), 20, texts)
    words = np.full((999, 42), -1.5, np.float32)
    words[:, 1], words[:, 22:] = (
        np.int32(7).view(np.float32),
        np.arange(6, 26, dtype=np.int32).view(np.float32),
    )
    words[0, 0], words[1, 0] = math.nan, -math.inf
    logprobs.write(1, words)
    made: list[int] = []
    entry = logprobs._entry
    logprobs._entry = lambda place: made.append(place) or entry(place)  # type: ignore[method-assign]
    answer = CompletionAnswer(AnswerOptions("id", 1, "m"), echoed_logprobs=3, decode=lambda ids: "first")
    completion = engine_outputs.CompletionOutput(0, "text", [1], [], finish_reason="length")
    state = engine_outputs.RequestOutput("r", None, [5], [completion], True, prompt_logprobs=logprobs)
    pieces = answer.events(0, state) if is_streaming else (each.encode() for each in answer.keep(0, state))
    content, most = b"", 0
    for piece in pieces:
        content += piece
        most, _ = max(most, len(made)), made.clear()
    assert 0 < most <= 32
    if not is_streaming:
        content = b"".join(answer.body(USAGE))
    choice = json.loads(content.removeprefix(b"data: "))["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 1000
    assert choice["logprobs"]["token_logprobs"][:4] == [None, None, -9999.0, -1.5]
    assert all(len(each) <= 4 for each in choice["logprobs"]["top_logprobs"][1:])
    if not is_streaming:
        assert [len(each or ()) for each in choice["prompt_logprobs"]] == [0, *[21] * 999]
        assert choice["prompt_logprobs"][1]["5"] == {"logprob": None, "rank": 7, "decoded_token": "&"}


def test_they_count_as_tokens_of_an_answer(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, {"max_answer_tokens": 120}) as server:
        fits = {"prompt": [[5] * 9] * 3, "max_tokens": 1, "prompt_logprobs": 3}
        assert server.complete(**fits).status_code == 200
        check_refused(server.complete(**fits | {"n": 2}), "max_tokens", "got up to 222 tokens in 6")
        check_refused(
            server.complete(prompt=[[5] * 9] * 3, max_tokens=0, echo=True, logprobs=4),
            "max_tokens",
            "got up to 177 tokens in 3",
        )
