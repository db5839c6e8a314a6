"""Queued outputs are merged per request: the API server handles fewer of them, and clients get the same."""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics import stats
from vllm.v1.metrics.stats import (
    IterationStats,
    LoRARequestStates,
    PrefillStats,
    RequestStateStats,
    SchedulerStats,
)

from rose_backend.vllm_plugin.patch_ledger import apply_patch
from rose_backend.vllm_plugin.scheduler.merged_outputs import (
    KNOWN_NAMES,
    has_tokens_only,
    merge_outputs,
    wrap_update_from_output,
)
from tests.support.vllm_plugin.configs import MakeConfig, rose

SPECIAL = {"prefill_stats": PrefillStats(num_prompt_tokens=3)}
KINDS = ("plain", "plain", "plain", "special", "end", "nothing")


def message(*outputs: EngineCoreOutput, weights: str = "a") -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=list(outputs), scheduler_stats=SchedulerStats(), weight_version=weights, timestamp=1.0
    )


@st.composite
def traffic(draw: st.DrawFn) -> list[EngineCoreOutputs]:
    """Messages of a few requests, most with one more token of each."""
    messages = []
    for step in range(draw(st.integers(1, 12))):
        outputs = []
        for request in draw(st.permutations(range(4))):
            kind = draw(st.sampled_from(KINDS))
            if kind == "nothing":
                continue
            token_ids = [100 * step + 10 * request + index for index in range(draw(st.integers(0, 2)))]
            special = SPECIAL if kind == "special" else {}
            end = {"finish_reason": FinishReason.STOP, "stop_reason": step} if kind == "end" else {}
            outputs.append(EngineCoreOutput(str(request), token_ids, **special, **end))
        messages.append(message(*outputs, weights=draw(st.sampled_from("aaab"))))
    return messages


def story(messages: list[EngineCoreOutputs]) -> dict[str, list[Any]]:
    """Return all that a request is told, in its order, token by token."""
    told: dict[str, list[Any]] = defaultdict(list)
    for each in messages:
        for output in each.outputs:
            told[output.request_id] += [(token_id, each.weight_version) for token_id in output.new_token_ids]
            if not has_tokens_only(output):
                told[output.request_id].append(output.prefill_stats)
            if output.finished:
                told[output.request_id].append((output.finish_reason, output.stop_reason))
    return dict(told)


@given(traffic())
def test_every_request_is_told_the_same_in_the_same_order(messages: list[EngineCoreOutputs]) -> None:
    before, plain_before = story(messages), sum(len(each.outputs) for each in messages)
    stats = [each.scheduler_stats for each in messages]
    # As calls come: each time for what is left of the queue.
    for begin in range(len(messages)):
        merge_outputs(messages[begin:])
    assert {request: told for request, told in before.items() if told} == {
        request: told for request, told in story(messages).items() if told
    }
    assert sum(len(each.outputs) for each in messages) <= plain_before
    assert [each.scheduler_stats for each in messages] == stats


def test_what_waits_becomes_one_output_per_request() -> None:
    steps = [message(*(EngineCoreOutput(name, [step]) for name in "abc")) for step in range(5)]
    steps[2].outputs[1].prefill_stats = SPECIAL["prefill_stats"]
    steps[3].outputs[2].finish_reason = FinishReason.LENGTH
    steps[4].outputs.pop()
    merge_outputs(steps)
    assert [[(each.request_id, each.new_token_ids) for each in step.outputs] for step in steps] == [
        [],
        [("b", [0, 1])],
        [("b", [2])],
        [("c", [0, 1, 2, 3])],
        [("a", [0, 1, 2, 3, 4]), ("b", [3, 4])],
    ]
    assert steps[3].outputs[0].finish_reason == FinishReason.LENGTH


def test_any_other_field_makes_an_output_one_of_its_own() -> None:
    joined = {"request_id", "new_token_ids", "finish_reason", "stop_reason"}
    for name in EngineCoreOutput.__struct_fields__:
        output = EngineCoreOutput("a", [1])
        setattr(output, name, 7 if name == "num_nans_in_logits" else "something")
        assert has_tokens_only(output) == (name in joined), name


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_readers_get_the_same_texts(tiny_model_path: Any, kind: RequestOutputKind) -> None:
    """Stop strings inside a joined piece, stop tokens, lengths and plain texts, through vLLM's own processor."""
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_path))
    words = tokenizer("the king said that he would not go to the old town by the sea again")["input_ids"]
    stops: list[dict[str, Any]] = [{}, {"stop": ["would no"]}, {"stop": ["he"], "min_tokens": 6}]
    stops.append({"stop": ["town"], "include_stop_str_in_output": True})
    params = [SamplingParams(max_tokens=len(words), output_kind=kind, **stop) for stop in stops]
    messages = []
    for step, word in enumerate(words):
        is_last = step == len(words) - 1
        outputs = [
            EngineCoreOutput(str(index), [word], finish_reason=FinishReason.LENGTH if is_last else None)
            for index in range(len(params))
        ]
        if not step:
            for output in outputs:
                output.prefill_stats = SPECIAL["prefill_stats"]
        messages.append(message(*outputs))
    joined = copy.deepcopy(messages)
    merge_outputs(joined)
    assert sum(len(each.outputs) for each in joined) == 2 * len(params)
    alone, together = (read(tokenizer, params, each) for each in (messages, joined))
    assert alone == together
    assert [text for text, *_ in together][1].endswith(" he ")


def read(tokenizer: Any, params: list[SamplingParams], messages: list[EngineCoreOutputs]) -> list[Any]:
    """Return text, tokens and end of each request, as its reader puts the pieces together."""
    processor = OutputProcessor(tokenizer, log_stats=True)
    readers = [RequestOutputCollector(each.output_kind, str(index)) for index, each in enumerate(params)]
    for index, each in enumerate(params):
        request = EngineCoreRequest(str(index), [5, 6, 7], None, each, None, time.time(), None, None, None)
        request.external_req_id = str(index)
        processor.add_request(request, None, queue=readers[index])
    for each in messages:
        if each.outputs:
            processor.process_outputs(each.outputs, each.timestamp, IterationStats())
    read = []
    for reader in readers:
        output = reader.get_nowait()
        assert output is not None and output.finished
        (completion,) = output.outputs
        read.append(
            (completion.text, list(completion.token_ids), completion.finish_reason, completion.stop_reason)
        )
    return read


@pytest.fixture
def make_client(make_config: MakeConfig) -> Callable[..., AsyncMPClient]:
    """Return a function that makes the part of a client that hands outputs to the API server."""

    def make(kind: type[AsyncMPClient] = AsyncMPClient, **options: Any) -> AsyncMPClient:
        client = kind.__new__(kind)
        client.vllm_config = make_config(**options)
        client.outputs_queue = asyncio.Queue()
        client._ensure_output_queue_task = lambda: None  # type: ignore[method-assign]
        return client

    apply_patch("merged_outputs")
    return make


def take_all(client: AsyncMPClient, waiting: list[Any]) -> list[Any]:
    """Let ``waiting`` pile up in front of a client; return what it hands out, exceptions included."""

    async def take() -> list[Any]:
        for each in waiting:
            client.outputs_queue.put_nowait(each)
        taken: list[Any] = []
        for _ in waiting:
            try:
                outputs = await client.get_output_async()
                taken.append([(each.request_id, each.new_token_ids) for each in outputs.outputs])
            except ValueError as error:
                taken.append(str(error))
        return taken

    return asyncio.run(take())


@pytest.mark.parametrize("kind", [AsyncMPClient, DPLBAsyncMPClient])
def test_a_client_joins_what_waits(
    make_client: Callable[..., AsyncMPClient], kind: type[AsyncMPClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(kind)
    monkeypatch.setattr(client, "_format_exception", lambda error: error)
    waiting: list[Any] = [message(EngineCoreOutput("a", [step])) for step in range(3)]
    assert take_all(client, [*waiting, ValueError("dead")]) == [[], [], [("a", [0, 1, 2])], "dead"]
    # Alone in its queue, a message is handed out as it came.
    assert take_all(client, [message(EngineCoreOutput("a", [3]))]) == [[("a", [3])]]


@pytest.mark.parametrize(
    "options",
    [rose(joined_outputs=False), {"attention_backend": None}],
    ids=str,
)
def test_nothing_is_merged_where_the_switch_or_rose_is_off(
    make_client: Callable[..., AsyncMPClient], options: dict[str, Any]
) -> None:
    waiting = [message(EngineCoreOutput("a", [step])) for step in range(3)]
    assert take_all(make_client(**options), waiting) == [[("a", [step])] for step in range(3)]


def test_merged_messages_are_not_merged_again(
    make_client: Callable[..., AsyncMPClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, sizes = make_client(), list[int]()

    def count(messages: list[EngineCoreOutputs]) -> None:
        sizes.append(len(messages))
        merge_outputs(messages)

    monkeypatch.setattr("rose_backend.vllm_plugin.scheduler.merged_outputs.merge_outputs", count)
    waiting = [message(EngineCoreOutput("a", [step])) for step in range(6)]

    async def take() -> list[list[int]]:
        taken = []
        for number in range(6):
            # Four wait at first, two more come before the third is taken.
            for each in {0: waiting[:4], 2: waiting[4:]}.get(number, []):
                client.outputs_queue.put_nowait(each)
            outputs = await client.get_output_async()
            taken.append([token_id for output in outputs.outputs for token_id in output.new_token_ids])
        return taken

    assert asyncio.run(take()) == [[], [], [], [], [], [0, 1, 2, 3, 4, 5]]
    assert sizes == [4, 4]


# Statistics of outputs are those of vLLM's own function; of outputs with tokens only, without the environment.
VLLMS = inspect.unwrap(IterationStats.update_from_output)


def counted(update: Any) -> tuple[Any, ...]:
    """Return what a front end counts of random outputs of ten requests."""
    rng = random.Random(3)
    iteration, lora_states = IterationStats(), LoRARequestStates()
    iteration.iteration_timestamp = 100.0
    states = [RequestStateStats(arrival_time=index / 10) for index in range(10)]
    for index in range(400):
        state = states[rng.randrange(10)]
        output = EngineCoreOutput(f"r{index}", [1] * rng.randrange(4))
        is_first = state.first_token_ts == 0.0
        if is_first:
            output.prefill_stats = PrefillStats(num_prompt_tokens=7, num_computed_tokens=5)
        if rng.random() < 0.1:
            output.events = [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED, 3.0)]
        if rng.random() < 0.1:
            output.num_nans_in_logits = 2
        update(iteration, output, 1.0 + index, is_first, state, lora_states, None)
    fields = {name: value for name, value in vars(iteration).items() if name != "prompt_token_stats"}
    return fields, vars(iteration.prompt_token_stats), [asdict(state) for state in states]


@pytest.mark.parametrize("counts_nans", [False, True])
def test_statistics_are_vllms(monkeypatch: pytest.MonkeyPatch, counts_nans: bool) -> None:
    monkeypatch.setattr(stats, "envs", SimpleNamespace(VLLM_COMPUTE_NANS_IN_LOGITS=counts_nans))
    vllms, ours = counted(VLLMS), counted(wrap_update_from_output(VLLMS))
    assert ours == vllms
    assert any(state["is_corrupted"] for state in ours[2]) == counts_nans


def test_plain_outputs_are_counted_without_vllms_function() -> None:
    assert KNOWN_NAMES.issuperset(VLLMS.__code__.co_names)
    calls: list[bool] = []

    def vllms(self: Any, output: Any, timestamp: float, is_prefilling: bool, *_: Any) -> None:
        calls.append(is_prefilling)

    update, iteration, state = wrap_update_from_output(vllms), IterationStats(), RequestStateStats()
    for is_prefilling in (True, False, False):
        update(iteration, EngineCoreOutput("r", [1, 2]), 1.0, is_prefilling, state, None, None)
    assert calls == [True] and state.num_generation_tokens == iteration.num_generation_tokens == 4


def test_a_function_that_counts_more_stays() -> None:
    def vllms(self: Any, output: Any, timestamp: float, is_prefilling: bool, *_: Any) -> None:
        self.num_of_something_new = 1

    update, iteration = wrap_update_from_output(vllms), IterationStats()
    update(iteration, EngineCoreOutput("r", [1]), 1.0, False, RequestStateStats(), None, None)
    assert iteration.num_of_something_new == 1 and iteration.num_generation_tokens == 0
