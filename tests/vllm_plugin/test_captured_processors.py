"""Processors, reports and masks of replayed steps against vLLM's own kernels, interpreted, on random requests."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import logprob

from rose_backend.errors import IntegrityError
from rose_backend.vllm_plugin import captured_processors
from rose_backend.vllm_plugin.captured_processors import (
    MAX_LOGPROBS,
    CapturedProcessors,
    GrammarMasks,
    ReportRecord,
    RequestParameters,
    processor_arrays,
    report_as_graphs,
    why_graphs_do_not_report,
    wrap_compute_topk_scores,
)
from tests.support.interpreter import run_interpreted

SLOTS, VOCAB, MAX_LEN = 9, 77, 40
SAMPLE = "vllm.v1.worker.gpu.sample"
KERNELS = {
    f"{SAMPLE}.logit_bias": ("_bias_kernel",),
    f"{SAMPLE}.penalties": ("_penalties_kernel", "_bincount_kernel"),
    f"{SAMPLE}.bad_words": ("_bad_words_kernel",),
    f"{SAMPLE}.thinking_budget": (
        "_load_effective_token",
        "_update_committed_marker_cache_kernel",
        "_thinking_budget_kernel",
    ),
    f"{SAMPLE}.logprob": ("_topk_log_softmax_kernel", "_ranks_kernel"),
    f"{SAMPLE}.states": (),
}
START, END = (3, 4), (5, 6)


class HostTensor:
    """vLLM's tensor of request parameters, where there is no device: another one in each step, as there."""

    def __init__(self, size: int, dtype: torch.dtype, max_concurrency: int | None = None) -> None:
        self.np = torch.zeros(size, dtype=dtype).numpy()
        self.copy_to_uva()

    def copy_to_uva(self, n: int | None = None) -> torch.Tensor:
        self.gpu = torch.from_numpy(self.np.copy())
        return self.gpu


class HostRows:
    """vLLM's table with a row for each request, which is written when staged writes are applied."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.gpu = torch.zeros(shape, dtype=dtype)
        self._staged: list[tuple[int, int, list[Any]]] = []

    def stage_write(self, index: int, start: int, values: Any) -> None:
        self._staged.append((index, start, list(values)))

    def apply_write(self) -> None:
        for index, start, values in self._staged:
            self.gpu[index, start : start + len(values)] = torch.tensor(values, dtype=self.gpu.dtype)
        self._staged.clear()


def to_device(values: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype)


REPLACEMENTS = {
    "UvaBackedTensor": HostTensor,
    "StagedWriteTensor": HostRows,
    "async_tensor_h2d": to_device,
}


def vllm_sampler() -> Any:
    """Return vLLM's sampler with all of its processors, whose kernels are interpreted: its CPU build has none."""
    import triton

    for name, kernels in KERNELS.items():
        module: Any = import_module(name)
        module.triton, module.tl = triton, triton.language
        for kernel in kernels:
            function = getattr(module, kernel)
            if not hasattr(function, "run"):
                setattr(module, kernel, triton.jit(getattr(function, "fn", function)))
        for attribute, replacement in REPLACEMENTS.items():
            if hasattr(module, attribute):
                setattr(module, attribute, replacement)
    from vllm.v1.worker.gpu.sample import bad_words, logit_bias, penalties, states, thinking_budget
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    device = torch.device("cpu")

    def buffer(*shape: int) -> SimpleNamespace:
        values = torch.zeros(*shape, dtype=torch.int32)
        return SimpleNamespace(gpu=values, np=values.numpy())

    requests = SimpleNamespace(
        max_num_reqs=SLOTS,
        vocab_size=VOCAB,
        device=device,
        prompt_len=HostTensor(SLOTS, torch.int32),
        prefill_len=buffer(SLOTS),
        total_len=buffer(SLOTS),
        all_token_ids=buffer(SLOTS, MAX_LEN),
    )
    sampler = object.__new__(Sampler)
    sampler.req_states = requests
    sampler.sampling_states = states.SamplingStates(SLOTS, VOCAB)
    sampler.penalties_state = penalties.PenaltiesState(None, requests)
    sampler.logits_processors = [
        logit_bias.LogitBiasState(None, requests),
        sampler.penalties_state,
        bad_words.BadWordsState(None, requests),
    ]
    reasoning = SimpleNamespace(
        reasoning_start_token_ids=list(START),
        reasoning_end_token_ids=list(END),
        natural_reasoning_end_token_ids=list(END),
    )
    sampler.thinking_budget_state = thinking_budget.ThinkingBudgetState(requests, reasoning)
    sampler.logprob_token_ids_state = SimpleNamespace(
        add_request=lambda *_: None, apply_staged_writes=lambda: None
    )
    sampler.trace_replay_state = None
    sampler.needs_logits_processing = np.zeros(SLOTS, bool)
    return sampler


def random_params(choose: random.Random) -> SamplingParams:
    """Return what one request asks for; any mix of processors, often none."""

    def sometimes(values: dict[str, Any], probability: float = 0.4) -> dict[str, Any]:
        return values if choose.random() < probability else {}

    tokens = choose.sample(range(VOCAB), 12)
    params = SamplingParams(
        temperature=0.0,
        **sometimes({"repetition_penalty": 1.7, "presence_penalty": 0.3}),
        **sometimes({"frequency_penalty": -0.9}),
        **sometimes({"allowed_token_ids": [*tokens, *START, *END]}, 0.2),
        **sometimes({"logit_bias": {token: choose.uniform(-9, 9) for token in tokens[:4]}}),
        **sometimes({"min_tokens": 12, "stop_token_ids": tokens[4:9]}),
        **sometimes({"thinking_token_budget": choose.randrange(4)}),
        **sometimes({"structured_outputs": StructuredOutputsParams(regex="a*")}),
    )
    if choose.random() < 0.4:
        # One token, and two of which the first has often been generated.
        params._bad_words_token_ids = [[tokens[9]], [choose.randrange(8), tokens[10]]]
    return params


OF_A_STEP = {"logits", "expanded_idx_mapping", "req_ids", "pos", "token_ids", "input_ids"}
"""Arguments of vLLM's functions that a step has in buffers of its own."""


@contextmanager
def held_addresses() -> Iterator[list[tuple[str, int]]]:
    """Return a list to which calls of vLLM's processors add the other tensors that they are given."""
    held: list[tuple[str, int]] = []

    def holding(function: Any) -> Any:
        names = list(inspect.signature(function).parameters)

        def call(*args: Any) -> None:
            values = zip(names, args, strict=True)
            held.extend(
                (name, value.data_ptr())
                for name, value in values
                if name not in OF_A_STEP and torch.is_tensor(value)
            )
            function(*args)

        return call

    with ExitStack() as stack:
        for name in ("logit_bias", "penalties", "bad_words", "thinking_budget"):
            module = import_module(f"{SAMPLE}.{name}")
            function = f"apply_{name}"
            stack.enter_context(mock.patch.object(module, function, holding(getattr(module, function))))
        yield held


def check_random_mixes(seed: int) -> int:
    """Compare steps of random requests with vLLM's; return how many logits its processors have changed."""
    choose, sampler = random.Random(seed), vllm_sampler()
    held_at_first: list[tuple[str, int]] = []
    all_params: dict[int, SamplingParams] = {}
    requests, num_changed = sampler.req_states, 0
    parameters = RequestParameters(processor_arrays(sampler), torch.device("cpu"))
    processors = CapturedProcessors(sampler, parameters, SLOTS)
    addresses = [parameters[name].data_ptr() for name in processor_arrays(sampler)]
    for step in range(12):
        for slot in range(SLOTS) if step == 0 else [choose.randrange(SLOTS)]:
            # A new request, whose slot had another one before.
            length, prompt = choose.randrange(14, 20), choose.randrange(1, 14)
            tokens = torch.tensor([choose.randrange(8) for _ in range(length)], dtype=torch.int32)
            requests.all_token_ids.gpu[slot, :length] = tokens
            requests.prompt_len.np[slot], requests.prefill_len.np[slot] = prompt, length
            requests.total_len.np[slot] = length
            all_params[slot] = random_params(choose)
            sampler.add_request(slot, all_params[slot])
        requests.prompt_len.copy_to_uva()
        sampler.apply_staged_writes()
        parameters.take()
        slots = choose.sample(range(SLOTS), choose.randrange(1, SLOTS + 1))
        count = len(slots)
        rows = torch.tensor([*slots, *[SLOTS] * choose.randrange(3)][:SLOTS], dtype=torch.int32)
        positions = torch.zeros(len(rows), dtype=torch.int64)
        positions[:count] = (requests.total_len.gpu[slots] - 1).long()
        input_ids = torch.zeros(len(rows), dtype=torch.int32)
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(100 * seed + step))
        for row, slot in enumerate(slots):
            if all_params[slot].structured_outputs is not None and choose.random() < 0.5:
                # A grammar that allows stop tokens only, which min_tokens must leave then.
                forbidden = torch.ones(VOCAB, dtype=torch.bool)
                forbidden[all_params[slot].stop_token_ids] = False
                logits[row, forbidden] = float("-inf")
        # Scan positions of thinking are state: both find them as they were.
        thinking = sampler.thinking_budget_state
        scans = thinking.cached_last_start, thinking.cached_last_end, thinking.cached_scan_pos
        before = [each.clone() for each in scans]
        actual = logits.clone()
        with held_addresses() as held:
            processors.apply(actual, rows, positions, input_ids)
        # A graph goes on to read where it read when it was captured.
        assert (held_at_first := held_at_first or held) == held
        after = [each.clone() for each in scans]
        for each, value in zip(scans, before, strict=True):
            each.copy_(value)
        mapping = rows[:count]
        expected = sampler.apply_sampling_params(
            logits[:count],
            mapping,
            mapping,
            np.array(slots, np.int32),
            positions[:count],
            input_ids[:count],
            torch.zeros(count, dtype=torch.int32),
            requests.total_len.np[slots],
        )
        assert torch.equal(actual[:count], expected), (seed, step)
        assert torch.equal(actual[count:], logits[count:])
        assert all(map(torch.equal, scans, after))
        num_changed += int((expected != logits[:count]).sum())
        for slot, token in zip(slots, expected.argmax(-1).tolist(), strict=True):
            if requests.total_len.np[slot] < MAX_LEN:
                requests.all_token_ids.gpu[slot, requests.total_len.np[slot]] = token
                requests.total_len.np[slot] += 1
                sampler.penalties_state.output_bin_counts[slot, token] += 1
    assert addresses == [parameters[name].data_ptr() for name in processor_arrays(sampler)]
    return num_changed


@pytest.mark.parametrize("seed", range(4))
def test_random_mixes_of_requests_are_processed_as_by_vllm(seed: int) -> None:
    assert run_interpreted(check_random_mixes, seed) > 500


def compare_reports() -> None:
    """Compare what vLLM's kernels report with what graphs report."""
    sampler, num_logprobs = vllm_sampler(), 5
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([1, 76, 40, int(logits[3].argmax())])
    replaced = wrap_compute_topk_scores(logprob.compute_topk_scores)
    state = sampler.logprob_token_ids_state = logprob.LogprobTokenIdsState.__new__(
        logprob.LogprobTokenIdsState
    )

    def compute(**options: Any) -> LogprobsTensors:
        result: LogprobsTensors = replaced(
            logits, num_logprobs, tokens, None, logprob_token_ids_state=state, **options
        )
        return result

    vllms = compute()
    calls: list[int] = []
    original = captured_processors.report_logprobs
    captured_processors.report_logprobs = lambda *args: calls.append(len(args[0])) or original(*args)
    try:
        assert compute() is not None and not calls
        report_as_graphs(sampler)
        reported = compute()
        assert calls == [4]
        scores = compute(logits_mode=True)
        assert calls == [4] and torch.equal(scores.logprobs, logits.gather(1, scores.logprob_token_ids))
    finally:
        captured_processors.report_logprobs = original
    assert torch.equal(vllms.logprob_token_ids, reported.logprob_token_ids)
    assert torch.equal(vllms.selected_token_ranks, reported.selected_token_ranks)
    torch.testing.assert_close(vllms.logprobs, reported.logprobs, rtol=0, atol=1e-6)
    record = ReportRecord(6, VOCAB, torch.device("cpu"))
    record.write(logits, tokens, torch.tensor([num_logprobs, -1, 0, num_logprobs], dtype=torch.int32))
    lists = ReportRecord.read(record.words[:4].numpy().copy(), num_logprobs)
    for row, count in ((0, 6), (2, 1), (3, 6)):
        assert (
            lists.logprob_token_ids[row, :count].tolist() == reported.logprob_token_ids[row, :count].tolist()
        )
        assert lists.logprobs[row, :count].tolist() == reported.logprobs[row, :count].tolist()
        assert lists.sampled_token_ranks[row] == reported.selected_token_ranks[row]
    assert lists.logprob_token_ids[2, 1:].tolist() == [0] * num_logprobs
    assert not record.words[1].any() and not record.words[4:].any()


def test_reports_are_vllms_and_only_of_samplers_with_a_step_graph() -> None:
    run_interpreted(compare_reports)


@pytest.mark.parametrize(
    ("mode", "dims", "reason"),
    [
        ("raw_logprobs", (MAX_LOGPROBS, 0), None),
        ("raw_logprobs", (MAX_LOGPROBS + 1, 0), "more than 20 log-probabilities"),
        ("raw_logprobs", (0, 3), "log-probabilities of given tokens"),
        ("processed_logprobs", (2, 0), "another mode of log-probabilities"),
    ],
)
def test_what_is_not_reported_is_told(mode: str, dims: tuple[int, int], reason: str | None) -> None:
    assert why_graphs_do_not_report(SimpleNamespace(logprobs_mode=mode), *dims) == reason


def test_parameters_of_the_last_slot_change_nothing() -> None:
    arrays = {name: np.full(3, 5, np.float32) for name in ("repetition_penalty", "min_p")}
    arrays |= {name: np.full(3, 5, np.int32) for name in ("num_logprobs", "thinking_token_budget")}
    parameters = RequestParameters(arrays, torch.device("cpu"))
    arrays["min_p"][1] = 7
    assert parameters["min_p"].tolist() == [5, 5, 5, 0]
    parameters.take()
    assert parameters["min_p"].tolist() == [5, 7, 5, 0]
    assert parameters["repetition_penalty"].tolist() == [5, 5, 5, 1]
    for name in ("num_logprobs", "thinking_token_budget"):
        assert parameters[name].tolist() == [5, 5, 5, -1]


def test_masks_are_those_of_this_step() -> None:
    masks = GrammarMasks(4, 40, torch.device("cpu"))
    bits = np.array([[0b101, 0], [0, 0b10]], np.int32)
    grammar = SimpleNamespace(structured_output_request_ids=["c", "a"], grammar_bitmask=bits)

    def allowed() -> list[list[int]]:
        logits = torch.zeros(3, 40)
        masks.apply(logits)
        return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]

    everything = list(range(40))
    assert allowed() == [everything] * 3
    masks.upload(grammar, {"a": 0, "b": 1, "c": 2})
    bits[:] = 0  # vLLM's memory, for the next step
    assert allowed() == [[33], everything, [0, 2]]
    masks.upload(None, {"a": 0})
    assert allowed() == [everything] * 3
    with pytest.raises(IntegrityError, match="request c, which has no row"):
        masks.upload(grammar, {"a": 0})
