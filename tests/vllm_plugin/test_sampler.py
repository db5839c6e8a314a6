"""Rose's sampler in vLLM's place: reproducible per request, independent of the batch, right distribution."""

from __future__ import annotations

import ast
import re
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from rose_backend.vllm_plugin.sampler import (
    RequestDraws,
    RoseTopKTopP,
    sample_random,
    wrap_sampler_v2_init,
)
from tests.vllm_plugin.conftest import MakeConfig

VOCAB_SIZE = 300


def logits_of(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 3


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    with set_current_vllm_config(make_config(additional_config={"rose": options})):
        assert isinstance(TopKTopPSampler().forward, RoseTopKTopP) is not bool(options)
    with set_current_vllm_config(make_config(attention_backend="CPU_ATTN")):
        assert not isinstance(TopKTopPSampler().forward, RoseTopKTopP)
    assert not isinstance(TopKTopPSampler().forward, RoseTopKTopP)


def fake_v2_sampler(temperatures: list[float], seeds: list[int]) -> Any:
    states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=torch.tensor(temperatures), np=np.array(temperatures, np.float32)),
        seeds=SimpleNamespace(gpu=torch.tensor(seeds)),
    )
    return SimpleNamespace(sampling_states=states)


def test_v2_draws_by_seed_and_position_and_leaves_greedy_rows_greedy() -> None:
    # Slots 0 to 3 hold request state; the rows of a step point into them in any order.
    sampler = fake_v2_sampler([1.0, 0.0, 0.7, 1.0], [5, 6, 7, 5])
    rows = logits_of(1).expand(4, -1)
    mapping = torch.tensor([3, 1, 0, 2], dtype=torch.int32)
    positions = torch.tensor([10, 4, 10, 9])
    drawn, returned = sample_random(sampler, rows, mapping, mapping.numpy(), positions, None, None, False)
    assert returned is rows
    assert drawn[1] == rows[1].argmax()
    # Slots 3 and 0 have the same seed, position and logits.
    assert drawn[0] == drawn[2]
    slot = mapping[3:]
    again, _ = sample_random(sampler, rows[:1], slot, slot.numpy(), positions[3:], None, None, False, False)
    assert again[0] == drawn[3]


def test_v2_takes_the_first_of_the_most_likely_tokens_where_nobody_draws() -> None:
    sampler = fake_v2_sampler([1.0, 0.0, 0.0], [5, 6, 7])
    rows = logits_of(2).to(torch.bfloat16)
    rows[1, [40, 20]] = rows.max() + 1
    mapping = torch.tensor([2, 1], dtype=torch.int32)
    drawn, returned = sample_random(sampler, rows, mapping, mapping.numpy(), torch.zeros(2), None, None)
    assert returned is rows and drawn.dtype == torch.int64
    assert drawn.tolist() == [int(rows[0].float().argmax()), 20]


class V2Sampler:
    """What of vLLM's class is replaced, and how often parameters were copied."""

    def __init__(
        self, vllm_config: Any, return_sampling_mask: bool = False, custom_logits_processors: Any = ()
    ) -> None:
        self.return_sampling_mask = return_sampling_mask
        self.added: list[tuple[int, Any]] = []
        self.copied: list[int] = []

    def _sample_random(self) -> str:
        return "vLLM"

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        self.added.append((req_idx, sampling_params))

    def apply_staged_writes(self) -> None:
        self.copied.append(len(self.added))


@pytest.fixture
def v2_sampler(monkeypatch: pytest.MonkeyPatch) -> type[V2Sampler]:
    monkeypatch.setattr(V2Sampler, "__init__", wrap_sampler_v2_init(V2Sampler.__init__))
    return V2Sampler


def test_v2_sampler_object_is_replaced_only_where_asked(
    make_config: MakeConfig, v2_sampler: type[V2Sampler]
) -> None:
    config = make_config()
    assert "_sample_random" in vars(v2_sampler(config))
    assert "_sample_random" not in vars(v2_sampler(config, return_sampling_mask=True))
    assert "_sample_random" not in vars(v2_sampler(make_config(attention_backend="CPU_ATTN")))


def test_v2_copies_parameters_in_steps_with_new_requests_only(
    make_config: MakeConfig, v2_sampler: type[V2Sampler]
) -> None:
    sampler = v2_sampler(make_config())
    for num_new in (0, 0, 1, 0, 2, 0, 0, 1):
        for _ in range(num_new):
            sampler.add_request(len(sampler.added), "parameters")
        sampler.apply_staged_writes()
    # The first step copies what vLLM starts with.
    assert sampler.copied == [0, 1, 3, 4]
    assert sampler.added == [(index, "parameters") for index in range(4)]


def test_v2_copies_in_every_step_what_other_code_may_change(
    make_config: MakeConfig, v2_sampler: type[V2Sampler]
) -> None:
    for sampler in (
        v2_sampler(make_config(), custom_logits_processors=["one"]),
        v2_sampler(make_config(additional_config={"rose": {"fused_sampler": False}})),
    ):
        for _ in range(3):
            sampler.apply_staged_writes()
        assert sampler.copied == [0, 0, 0]


def test_vllm_writes_sampling_parameters_in_add_request_only() -> None:
    """Sampling states that anything else wrote would not reach the device; see ``copy_parameters_when_they_change``."""
    folder = Path(str(files("vllm") / "v1" / "worker" / "gpu" / "sample"))
    writers: set[str] = set()
    for path in folder.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                source = ast.unparse(function)
                if ".stage_write" in source or re.search(r"\.np\[.*\] = ", source):
                    writers.add(function.name)
    assert writers <= {"add_request", "stage_write", "stage_write_elem"}, writers
