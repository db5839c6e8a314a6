"""Rose's sampler in model runner V1: reproducible per request, independent of the batch, right distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from rose_backend.vllm_plugin.plugin_logger import Counts, sample_counts
from rose_backend.vllm_plugin.sampler import RequestDraws, RoseTopKTopP
from tests.support.vllm_plugin.configs import MakeConfig

VOCAB_SIZE = 300
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def logits_of(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 3


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_row_without_a_token_draws_what_vllms_sampler_does(value: float) -> None:
    logits = torch.full((2, VOCAB_SIZE), value)
    logits[1, 7] = 0.0
    filters = torch.tensor([5, 5]), torch.tensor([0.9, 0.9])
    stock, _ = TopKTopPSampler().forward_native(logits.clone(), {}, *filters)
    drawn, _ = RoseTopKTopP()(logits.clone(), {}, *filters)
    assert drawn[0] == stock[0] == 0 and drawn[1] == 7


def test_a_seeded_request_draws_the_same_alone_and_in_any_batch() -> None:
    logits = logits_of(4)
    top_k, top_p = torch.tensor([50, 3, 300, 20]), torch.tensor([0.9, 1.0, 0.5, 0.7])
    alone, together = RoseTopKTopP(), RoseTopKTopP()
    lonely: dict[int, Any] = {0: generator_of(42)}
    batch: dict[int, Any] = {0: generator_of(1), 2: generator_of(42), 3: generator_of(3)}
    order = torch.tensor([1, 3, 0, 2])
    for _ in range(8):
        expected = alone(logits[:1], lonely, top_k[:1], top_p[:1])[0]
        got = together(logits[order], batch, top_k[order], top_p[order])[0]
        assert got[2] == expected[0]


def test_successive_draws_differ_and_start_again_with_a_new_generator() -> None:
    flat = torch.zeros(1, VOCAB_SIZE)
    sampler = RoseTopKTopP()
    generators: dict[int, Any] = {0: generator_of(9)}
    first = [int(sampler(flat, generators, None, None)[0]) for _ in range(20)]
    generators = {0: generator_of(9)}
    second = [int(sampler(flat, generators, None, None)[0]) for _ in range(20)]
    assert first == second and len(set(first)) > 10


def test_a_generator_that_comes_back_to_the_batch_goes_on_where_it_was() -> None:
    flat = torch.zeros(1, VOCAB_SIZE)
    kept, sampler = generator_of(9), RoseTopKTopP()
    steady: dict[int, Any] = {0: generator_of(9)}
    expected = [int(RoseTopKTopP.__call__(sampler, flat, steady, None, None)[0]) for _ in range(6)]
    got = []
    for _ in range(6):
        # What vLLM does when a request leaves the batch and returns: the table entry is made anew from the request.
        generators: dict[int, Any] = {0: kept}
        got.append(int(sampler(flat, generators, None, None)[0]))
    assert got == expected


def test_taking_a_draw_back_repeats_it() -> None:
    flat = torch.zeros(1, VOCAB_SIZE)
    sampler = RoseTopKTopP()
    generators: dict[int, Any] = {0: generator_of(11)}
    first = sampler(flat, generators, None, None)[0]
    draws = generators[0]
    # gpu_model_runner does this for the unfinished chunk of a prompt.
    draws.set_offset(draws.get_offset() - 4)
    assert torch.equal(sampler(flat, generators, None, None)[0], first)
    assert RequestDraws(3).get_offset() == 0


def test_rows_without_a_seed_differ_by_row_and_step_and_follow_the_engines_seed() -> None:
    flat = torch.zeros(64, VOCAB_SIZE)
    torch.manual_seed(1)
    sampler = RoseTopKTopP()
    first, second = sampler(flat, {}, None, None)[0], sampler(flat, {}, None, None)[0]
    assert len(set(first.tolist())) > 30 and not torch.equal(first, second)
    assert torch.equal(RoseTopKTopP()(flat, {}, None, None)[0], first)
    torch.manual_seed(2)
    assert not torch.equal(RoseTopKTopP()(flat, {}, None, None)[0], first)


def test_frequencies_follow_the_filtered_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0] + [-5.0] * 5])
    top_k, top_p = 3, 0.95
    weights = logits[0, :3].softmax(-1)
    num_draws = 20_000
    sampler = RoseTopKTopP()
    rows = 2000
    counts = torch.zeros(logits.shape[1])
    for _ in range(num_draws // rows):
        drawn = sampler(logits.expand(rows, -1), {}, torch.full((rows,), top_k), torch.full((rows,), top_p))[
            0
        ]
        counts += torch.bincount(drawn, minlength=logits.shape[1])
    sigma = (weights * (1 - weights) / num_draws).sqrt()
    assert counts[3:].sum() == 0
    assert ((counts[:3] / num_draws - weights).abs() < 5 * sigma).all(), counts


@pytest.mark.parametrize("options", [{}, {"fused_sampler": False}], ids=["on", "off"])
def test_vllms_v1_sampler_is_replaced_only_where_asked(
    make_config: MakeConfig, options: dict[str, Any]
) -> None:
    current_platform.import_kernels()
    with set_current_vllm_config(make_config(additional_config={"rose": options})):
        assert isinstance(TopKTopPSampler().forward, RoseTopKTopP) is not bool(options)
        _, reported = TopKTopPSampler("processed_logits").forward(logits_of(1), {}, torch.tensor([3]), None)
        assert reported is not None and reported.isfinite().sum() == 3
    with set_current_vllm_config(make_config(attention_backend="CPU_ATTN")):
        assert not isinstance(TopKTopPSampler().forward, RoseTopKTopP)
    assert not isinstance(TopKTopPSampler().forward, RoseTopKTopP)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "processed_logits"])
def test_v1_draws_from_the_distribution_that_it_reports(counts: Counts, mode: str) -> None:
    rows, top_k = logits_of(3), torch.tensor([4, 2, VOCAB_SIZE])
    plain, _ = RoseTopKTopP()(rows.clone(), {0: generator_of(3), 1: generator_of(4)}, top_k, None)
    drawn, reported = RoseTopKTopP(mode)(rows.clone(), {0: generator_of(3), 1: generator_of(4)}, top_k, None)
    assert torch.equal(drawn[:2], plain[:2])
    if mode == "raw_logprobs":
        assert reported is None
    else:
        assert reported is not None and reported.isfinite().sum(1).tolist() == top_k.tolist()
        assert reported[range(3), drawn].isfinite().all()
        expected = rows.masked_fill(~reported.isfinite(), float("-inf"))
        if mode == "processed_logprobs":
            expected = expected.log_softmax(-1)
        assert torch.allclose(reported, expected)
    assert (counts.rose, counts.vllm) == (6, {})


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"use_fp64_gumbel": True}, "float64 noise"), ({"speculative_config": NGRAM}, "drafts")],
    ids=["float64 noise", "drafts"],
)
def test_v1_leaves_engines_to_vllm_whose_every_draw_needs_it(
    make_config: MakeConfig, counts: Counts, rose_log: list[str], options: dict[str, Any], reason: str
) -> None:
    with set_current_vllm_config(make_config(**options)):
        sampler = TopKTopPSampler()
    assert f"sampler vLLM's own ({reason})" in rose_log[0]
    current_platform.import_kernels()
    torch.manual_seed(3)
    drawn = sampler(logits_of(4), {1: generator_of(1)}, torch.tensor([3] * 4), None)[0]
    torch.manual_seed(3)
    expected = TopKTopPSampler()(logits_of(4), {1: generator_of(1)}, torch.tensor([3] * 4), None)[0]
    assert torch.equal(drawn, expected)
    assert (counts.rose, counts.vllm) == (0, {reason: 4})


def test_the_counts_are_logged_every_ten_seconds_and_when_there_is_a_new_reason(
    monkeypatch: pytest.MonkeyPatch, rose_log: list[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("rose_backend.vllm_plugin.plugin_logger.time.monotonic", lambda: now)
    counts = sample_counts()
    counts.count_rose(3)
    counts.count_rose(4)
    now = 109.9
    counts.count_rose(1)
    counts.count_vllm("drafts", 2)
    counts.count_vllm("drafts", 5)
    now = 120.0
    counts.count_rose(1)
    assert [line.removeprefix("Rose sampler, draws since start-up: ") for line in rose_log] == [
        "3 by Rose's sampler, 0 by vLLM's",
        "8 by Rose's sampler, 2 by vLLM's for drafts",
        "9 by Rose's sampler, 7 by vLLM's for drafts",
    ]
