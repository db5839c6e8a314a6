"""Rose's sampler in model runner V2: which steps are vLLM's, what is counted, and when parameters are copied."""

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
from vllm.config.watermarking import WatermarkConfig

from rose_backend.vllm_plugin.config_hook import describe_parts
from rose_backend.vllm_plugin.models.model_choice import ModelChoice
from rose_backend.vllm_plugin.options import rose_options
from rose_backend.vllm_plugin.plugin_logger import Counts
from rose_backend.vllm_plugin.sampler import RoseDraws, wrap_sampler_v2_init
from tests.support.vllm_plugin.configs import MakeConfig
from tests.vllm_plugin.test_sampler import NGRAM, logits_of


class FakeV2Sampler:
    """What Rose uses of vLLM's sampler: the state of requests by slot, and a draw of its own that always takes 0."""

    def __init__(
        self,
        temperatures: list[float],
        seeds: list[int],
        *,
        has_seed: tuple[bool, ...] = (),
        logprobs: tuple[bool, ...] = (),
        watermarks: tuple[bool, ...] = (),
        device: str = "cpu",
    ) -> None:
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(
                gpu=torch.tensor(temperatures, device=device), np=np.array(temperatures, np.float32)
            ),
            seeds=SimpleNamespace(gpu=torch.tensor(seeds, device=device)),
            any_explicit_seed=lambda slots: bool(np.array(has_seed)[slots].any()),
        )
        self.watermarking = SimpleNamespace(np=np.array(watermarks))
        self.needs_logits_processing = np.zeros(len(temperatures), bool)
        self._logprobs = np.array(logprobs)
        self.num_vllm_draws = 0

    def get_logprobs_dims(self, slots: Any) -> tuple[int, int] | None:
        return (1, 0) if self._logprobs[slots].any() else None

    def _sample_random(
        self, logits: torch.Tensor, mapping: Any, slots: Any, pos: Any, top_k: Any, top_p: Any, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_vllm_draws += 1
        return torch.zeros(len(logits), dtype=torch.int64), logits.fill_(7.0)


def draws_of(sampler: Any, **config: Any) -> RoseDraws:
    model = SimpleNamespace(use_fp64_gumbel=False, return_sampling_mask=False, logprobs_mode="raw_logprobs")
    vars(model).update({name: config.pop(name) for name in list(config) if hasattr(model, name)})
    defaults = {"speculative_config": None, "watermark_config": None, "use_v2_model_runner": True}
    return RoseDraws(sampler, SimpleNamespace(model_config=model, **{**defaults, **config}))


def draw_v2(
    draws: RoseDraws,
    rows: torch.Tensor,
    slots: list[int],
    top_k: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    mapping = torch.tensor(slots, dtype=torch.int32)
    if positions is None:
        positions = torch.arange(len(slots), device=rows.device)
    return draws(rows, mapping.to(rows.device), mapping.numpy(), positions, top_k, None, False)


def test_v2_draws_by_seed_and_position_and_leaves_greedy_rows_greedy(counts: Counts) -> None:
    # Slots 0 to 3 hold request state; the rows of a step point into them in any order.
    draws = draws_of(FakeV2Sampler([1.0, 0.0, 0.7, 1.0], [5, 6, 7, 5]))
    rows = logits_of(1).expand(4, -1)
    positions = torch.tensor([10, 4, 10, 9])
    drawn, returned = draw_v2(draws, rows, [3, 1, 0, 2], positions=positions)
    assert returned is rows
    assert drawn[1] == rows[1].argmax()
    # Slots 3 and 0 have the same seed, position and logits.
    assert drawn[0] == drawn[2]
    again, _ = draw_v2(draws, rows[:1], [2], positions=positions[3:])
    assert again[0] == drawn[3]
    assert (counts.rose, counts.vllm) == (5, {})


def test_v2_takes_the_first_of_the_most_likely_tokens_in_greedy_steps(counts: Counts) -> None:
    draws = draws_of(FakeV2Sampler([1.0, 0.0, 0.0], [5, 6, 7]), use_fp64_gumbel=True)
    rows = logits_of(2).to(torch.bfloat16)
    rows[1, [40, 20]] = rows.max() + 1
    drawn, returned = draw_v2(draws, rows, [2, 1])
    assert returned is rows and drawn.dtype == torch.int64
    assert drawn.tolist() == [int(rows[0].float().argmax()), 20]
    assert (counts.rose, counts.vllm) == (0, {})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_v2_takes_no_token_whose_logit_a_penalty_made_nan(counts: Counts, temperature: float) -> None:
    # vLLM allows a repetition penalty of 1e-46, which is 0 in float32: 0 times minus infinity, for a forbidden token.
    sampler = FakeV2Sampler([0.0, temperature], [5, 6])
    rows = logits_of(2)
    rows[1] = -torch.inf
    rows[1, 30], rows[1, 20] = 1.0, torch.nan
    sampler.needs_logits_processing[1] = True
    drawn, returned = draw_v2(draws_of(sampler), rows, [0, 1])
    assert drawn.tolist() == [int(rows[0].argmax()), 30]
    assert returned is rows and rows[1, 20].isnan(), "processed log-probabilities are vLLM's"


@pytest.mark.parametrize(
    ("option", "reason"), [("use_fp64_gumbel", "float64 noise"), ("return_sampling_mask", "sampling masks")]
)
def test_v2_leaves_engines_to_vllm_whose_every_draw_needs_it(
    counts: Counts, option: str, reason: str
) -> None:
    sampler = FakeV2Sampler([1.0, 0.0], [5, 6])
    draws = draws_of(sampler, **{option: True})
    for _ in range(3):
        drawn, returned = draw_v2(draws, logits_of(2), [1, 0])
        assert drawn.tolist() == [0, 0] and (returned == 7).all()
    assert sampler.num_vllm_draws == 3
    assert (counts.rose, counts.vllm) == (0, {reason: 6})


def test_v2_leaves_steps_with_a_watermark_to_vllm(counts: Counts) -> None:
    sampler = FakeV2Sampler([1.0, 1.0, 0.0], [5, 6, 7], watermarks=(True, False, True))
    draws = draws_of(sampler, watermark_config="some")
    for slots, is_vllms in (([0, 1], True), ([1], False), ([1, 2], False), ([2, 0], True)):
        before = sampler.num_vllm_draws
        draw_v2(draws, logits_of(len(slots)), slots)
        assert sampler.num_vllm_draws - before == is_vllms, slots
    assert (counts.rose, counts.vllm) == (3, {"watermarks": 4})


def test_v2_leaves_seeds_to_vllm_where_it_draws_from_them_in_steps_with_drafts(counts: Counts) -> None:
    sampler = FakeV2Sampler([1.0, 1.0], [5, 6], has_seed=(True, False))
    draws = draws_of(sampler, speculative_config="some")
    plain = draws_of(FakeV2Sampler([1.0, 1.0], [5, 6]))
    rows = logits_of(1)
    drawn, returned = draw_v2(draws, rows, [1])
    assert torch.equal(drawn, draw_v2(plain, rows, [1])[0]) and returned is rows and not (rows == 7).any()
    assert sampler.num_vllm_draws == 0
    assert draw_v2(draws, rows, [0])[0].tolist() == [0]
    assert (counts.rose, counts.vllm) == (2, {"seeds beside drafts": 1})


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_v2_draws_from_the_distribution_that_it_reports(counts: Counts, mode: str) -> None:
    # vLLM filters with a kernel of its own where there is a device, whatever tensors it gets.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampler = FakeV2Sampler([1.0, 1.0], [5, 6], logprobs=(True, False), device=device)
    draws = draws_of(sampler, logprobs_mode=mode)
    rows, top_k = logits_of(2).to(device), torch.tensor([4, 2], device=device)
    best = rows.topk(4).indices
    _, unfiltered = draw_v2(draws, rows[1:].clone(), [1], top_k[1:])
    assert torch.equal(unfiltered, rows[1:]), "no request asks for it"
    drawn, filtered = draw_v2(draws, rows.clone(), [0, 1], top_k)
    assert [set(row.isfinite().nonzero()[:, 0].tolist()) for row in filtered] == [
        set(best[0].tolist()),
        set(best[1, :2].tolist()),
    ]
    assert filtered.gather(1, drawn[:, None]).isfinite().all()
    assert sampler.num_vllm_draws == 0 and counts.rose == 3
    plain = draws_of(FakeV2Sampler([1.0, 1.0], [5, 6], device=device))
    assert torch.equal(draw_v2(plain, rows, [0, 1], top_k)[0], drawn)


class V2Sampler:
    """What of vLLM's class is replaced, and how often parameters were copied."""

    def __init__(self, vllm_config: Any, custom_logits_processors: Any = ()) -> None:
        self.sampling_states = SimpleNamespace(temperature=SimpleNamespace(np=np.array([1.0, 0.0, 0.0])))
        self.added: list[tuple[int, Any]] = []
        self.copied: list[int] = []

    def _sample_random(self) -> str:
        return "vLLM"

    def apply_sampling_params(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

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
    assert isinstance(vars(v2_sampler(make_config()))["_sample_random"], RoseDraws)
    off = {"additional_config": {"rose": {"fused_sampler": False}}}
    for options in ({"attention_backend": "CPU_ATTN"}, off, {**off, "speculative_config": NGRAM}):
        assert not vars(v2_sampler(make_config(**options))).keys() & {
            *("_sample_random", "apply_sampling_params", "add_request")
        }


def test_v2_counts_the_drafts_that_vllm_checks(
    make_config: MakeConfig, v2_sampler: type[V2Sampler], counts: Counts
) -> None:
    sampler: Any = v2_sampler(make_config(speculative_config=NGRAM))
    for slots in ([0, 1], [1, 2], [2, 0, 1]):
        arguments = ("logits", "expanded", "mapping", np.array(slots), "pos")
        assert sampler.apply_sampling_params(*arguments) == (arguments, {})
        # As a step without drafts calls it.
        sampler.apply_sampling_params(*arguments, skip_top_k_top_p=True)
    # The second step is greedy.
    assert (counts.rose, counts.vllm) == (0, {"drafts": 5})
    assert "add_request" not in vars(sampler)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "sampler Rose;"),
        ({"speculative_config": NGRAM}, "sampler Rose (drafts and seeds by vLLM's own);"),
        ({"logprobs_mode": "processed_logprobs"}, "sampler Rose;"),
    ],
    ids=["plain", "drafts", "processed log-probabilities"],
)
def test_the_line_at_start_up_says_what_is_vllms(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], part: str
) -> None:
    config = make_config(**options)
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    assert part in describe_parts(config, rose_options(config), ModelChoice(None))


def test_watermarks_are_named_at_start_up(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    monkeypatch.setattr(config, "watermark_config", WatermarkConfig(key=3))
    assert "sampler Rose (watermarks by vLLM's own);" in describe_parts(
        config, rose_options(config), ModelChoice(None)
    )


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
