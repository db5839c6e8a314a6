"""Steps of model runner V2 that are replayed: the same tokens as step by step, for the right requests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample import gumbel, min_p, states
from vllm.v1.worker.gpu.sample.sampler import Sampler

from rose_backend.vllm_plugin import sampler as sampler_module
from rose_backend.vllm_plugin.captured_processors import RequestParameters, sampling_arrays
from rose_backend.vllm_plugin.plugin_logger import Counts
from rose_backend.vllm_plugin.sampler import (
    DrawGraphs,
    ReplayedSampling,
    RoseDraws,
    copy_parameters_when_they_change,
)

VOCAB, SLOTS = 512, 24
LOGITS_DTYPE = torch.float16


class HostTensor:
    """vLLM's tensor of request parameters, where there is no device: a copy per call, as there."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.np = torch.zeros(size, dtype=dtype).numpy()
        self.copy_to_uva()

    def copy_to_uva(self) -> None:
        self.gpu = torch.from_numpy(self.np.copy())


def apply_temperature(logits: torch.Tensor, slots: torch.Tensor, temperature: torch.Tensor) -> None:
    of_row = temperature[slots.long()]
    logits /= torch.where(of_row == 0, 1.0, of_row)[:, None]


def apply_min_p(logits: torch.Tensor, slots: torch.Tensor, min_p: torch.Tensor) -> None:
    lowest = logits.max(-1, keepdim=True).values + min_p[slots.long()].log()[:, None]
    logits.masked_fill_(logits < lowest, -torch.inf)


class Penalties:
    """A logits processor in the place of vLLM's: requests that repeat less get all their logits but one banned."""

    def __init__(self) -> None:
        self.is_used = np.zeros(SLOTS, bool)

    def add_request(self, req_idx: int, params: SamplingParams) -> bool:
        self.is_used[req_idx] = params.repetition_penalty != 1.0
        return bool(self.is_used[req_idx])

    def apply_staged_writes(self) -> None:
        pass

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        for row, slot in enumerate(ctx.idx_mapping_np):
            if self.is_used[slot]:
                logits[row] = torch.where(torch.arange(VOCAB, device=logits.device) == slot, 0.0, -torch.inf)
        return logits


class BareSampler(Sampler):
    """vLLM's own sampler with the states that this test needs, and Rose's draw."""

    def __init__(self, device: str) -> None:
        def silent() -> SimpleNamespace:
            return SimpleNamespace(
                add_request=lambda *args: False, apply_staged_writes=lambda: None, apply=lambda *args: None
            )

        self.sampling_states = states.SamplingStates(SLOTS, VOCAB)
        self.logits_processors = [Penalties()]
        self.thinking_budget_state, self.logprob_token_ids_state = silent(), silent()
        self.trace_replay_state = None
        self.needs_logits_processing = np.zeros(SLOTS, bool)
        self.use_flashinfer = self.use_xpu_sampler = False
        self.logprobs_mode = "raw_logprobs"
        self.device = device
        model = SimpleNamespace(
            use_fp64_gumbel=False, return_sampling_mask=False, logprobs_mode="raw_logprobs"
        )
        self._sample_random = RoseDraws(
            self,
            SimpleNamespace(
                model_config=model, speculative_config=None, watermark_config=None, use_v2_model_runner=True
            ),
        )

    def step(self, logits: torch.Tensor, slots: list[int], positions: list[int]) -> torch.Tensor:
        """Draw as vLLM's model runner does, for one row of each slot."""
        self.apply_staged_writes()
        mapping = torch.tensor(slots, dtype=torch.int32, device=self.device)
        pos = torch.tensor(positions, device=self.device)
        bounds = np.zeros(len(slots), np.int32)
        tokens, _ = self.sample(logits, mapping, mapping, np.array(slots, np.int32), pos, pos, pos, bounds)
        return tokens


Pair = tuple[BareSampler, BareSampler]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def samplers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Return a sampler that replays what it can, from graphs where there is a device, and one that does not."""
    device = request.param
    if device == "cpu":
        monkeypatch.setattr(states, "UvaBackedTensor", HostTensor)
        monkeypatch.setattr(gumbel, "apply_temperature", apply_temperature)
        monkeypatch.setattr(states, "apply_temperature", apply_temperature)
        monkeypatch.setattr(min_p, "apply_min_p", apply_min_p)
        monkeypatch.setattr(states, "apply_min_p", apply_min_p)
    replaying, plain = BareSampler(device), BareSampler(device)
    arrays = sampling_arrays(replaying.sampling_states)
    graphs = DrawGraphs(RequestParameters(arrays, torch.device(device)), VOCAB)
    if device == "cuda":
        graphs.capture()
    replaying.sample = ReplayedSampling(replaying, graphs)
    copy_parameters_when_they_change(replaying)
    return replaying, plain


KINDS: tuple[Callable[[int], SamplingParams], ...] = (
    lambda seed: SamplingParams(temperature=0.0),
    lambda seed: SamplingParams(temperature=1.0, seed=seed),
    lambda seed: SamplingParams(temperature=0.7, seed=seed),
    lambda seed: SamplingParams(temperature=1.3, top_k=20, seed=seed),
    lambda seed: SamplingParams(temperature=0.9, top_p=0.8, seed=seed),
    lambda seed: SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=seed),
    lambda seed: SamplingParams(temperature=0.8, min_p=0.1, seed=seed),
    lambda seed: SamplingParams(temperature=1.1, min_p=0.05, top_p=0.9, seed=seed),
)


def add_to_both(pair: Pair, slot: int, params: SamplingParams) -> None:
    for sampler in pair:
        sampler.add_request(slot, params)


def draw_both(
    pair: Pair, slots: list[int], generator: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seed = int(generator.integers(1 << 30))
    logits = torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.to(pair[0].device, LOGITS_DTYPE)
    positions = generator.integers(1, 1000, len(slots)).tolist()
    kept = logits.clone()
    first, second = (sampler.step(logits, slots, positions) for sampler in pair)
    assert torch.equal(logits, kept), "logits are other code's, too"
    return first, second, logits


def test_the_same_tokens_as_step_by_step(samplers: Pair, counts: Counts) -> None:
    generator = np.random.default_rng(3)
    for slot in range(SLOTS):
        add_to_both(samplers, slot, KINDS[slot % len(KINDS)](slot))
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(60):
        if step % 5 == 4:
            # A request finishes, another one gets its slot.
            slot = int(generator.integers(SLOTS))
            add_to_both(samplers, slot, KINDS[int(generator.integers(len(KINDS)))](step))
        num_rows = int(generator.integers(1, SLOTS + 1))
        slots = generator.permutation(SLOTS)[:num_rows].tolist()
        drawn, expected, _ = draw_both(samplers, slots, generator)
        assert drawn.dtype == torch.int64 and drawn.tolist() == expected.tolist(), (step, slots)
        earlier.append((drawn, expected))
    # A later step has not written to what an earlier one has returned.
    assert all(torch.equal(drawn, expected) for drawn, expected in earlier)
    assert counts.vllm == {}


@pytest.mark.parametrize("num_rows", [1, 7, SLOTS])
def test_a_whole_steps_graph_draws_the_same_tokens(samplers: Pair, num_rows: int) -> None:
    for slot in range(SLOTS):
        add_to_both(samplers, slot, KINDS[slot % len(KINDS)](slot))
    generator = np.random.default_rng(num_rows)
    replaying, plain = samplers
    for _ in range(3):
        slots = generator.permutation(SLOTS)[:num_rows].tolist()
        positions = generator.integers(1, 1000, num_rows).tolist()
        seeded = torch.Generator().manual_seed(num_rows)
        logits = (torch.randn(num_rows, VOCAB, generator=seeded) * 3).to(plain.device, LOGITS_DTYPE)
        kept, expected = logits.clone(), plain.step(logits, slots, positions)
        # A step before, with more rows: its logits lie where these come to lie.
        draw_both(samplers, list(range(SLOTS)), generator)
        of_rows = (torch.tensor(slots, dtype=torch.int32), torch.tensor(positions))
        drawn = torch.full((num_rows,), -7, device=plain.device)
        replaying.sample.graphs.compute(logits, *(each.to(plain.device) for each in of_rows), drawn)
        assert drawn.tolist() == expected.tolist() and torch.equal(logits, kept)


def test_a_step_with_more_rows_than_fit_is_drawn_in_parts(
    samplers: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaying, plain = samplers
    for slot in range(SLOTS):
        add_to_both(samplers, slot, KINDS[slot % len(KINDS)](slot))
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(SLOTS, VOCAB, generator=generator) * 3).to(plain.device, LOGITS_DTYPE)
    slots, positions = torch.arange(SLOTS, dtype=torch.int32), torch.arange(SLOTS) + 5
    expected = plain.step(logits, slots.tolist(), positions.tolist())
    replaying.apply_staged_writes()
    monkeypatch.setattr(sampler_module, "MAX_LOGITS_BYTES", 4 * VOCAB * 17)
    graphs = DrawGraphs(replaying.sample.graphs.parameters, VOCAB)
    assert graphs.max_rows == 17
    processed: list[tuple[int, int]] = []
    drawn = torch.full((SLOTS,), -7, device=plain.device)
    of_rows = (slots.to(plain.device), positions.to(plain.device))
    graphs.compute(logits, *of_rows, drawn, lambda own, rows: processed.append((rows.start, rows.stop)))
    assert drawn.tolist() == expected.tolist() and processed == [(0, 16), (16, SLOTS)]


def test_padding_rows_of_a_graph_belong_to_no_request(samplers: Pair) -> None:
    """Drawn again and again, the rows of a larger step before would be scaled until they are infinite."""
    generator = np.random.default_rng(5)
    for slot in range(8):
        add_to_both(samplers, slot, SamplingParams(temperature=0.5, seed=slot))
    draw_both(samplers, list(range(8)), generator)
    logits = samplers[0].sample.graphs._logits
    for num_rows in (5, 5, 7, 6):
        filling = logits[num_rows:8].clone()
        draw_both(samplers, list(range(num_rows)), generator)
        assert torch.equal(logits[num_rows:8], filling), num_rows


def test_only_steps_that_filter_and_draw_are_replayed(
    samplers: Pair, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(4)
    replayed: list[int] = []
    draw = DrawGraphs.draw
    monkeypatch.setattr(
        DrawGraphs,
        "draw",
        lambda self, logits, *args: replayed.append(len(logits)) or draw(self, logits, *args),
    )
    add_to_both(samplers, 0, SamplingParams(temperature=0.0))
    add_to_both(samplers, 1, SamplingParams(temperature=0.8, seed=1))
    add_to_both(samplers, 2, SamplingParams(temperature=1.0, seed=2, repetition_penalty=1.5))
    for slots, is_replayed in (([0], False), ([1, 0], True), ([2], False), ([1, 2], False), ([1], True)):
        replayed.clear()
        drawn, expected, logits = draw_both(samplers, slots, generator)
        assert drawn.tolist() == expected.tolist() and bool(replayed) == is_replayed, slots
        for token, slot, row in zip(drawn.tolist(), slots, logits, strict=True):
            assert slot == 1 or token == (2 if slot == 2 else int(row.argmax()))
    # The slot's next request is an ordinary one.
    add_to_both(samplers, 2, SamplingParams(temperature=1.0, seed=2))
    replayed.clear()
    draw_both(samplers, [2, 1], generator)
    assert replayed == [2]
    # Both samplers count; replayed draws count as the others do, and greedy steps do not.
    assert counts.rose == 2 * (2 + 1 + 2 + 1 + 2)


def test_log_probabilities_are_vllms(samplers: Pair) -> None:
    sampler = samplers[0]
    sampler.add_request(0, SamplingParams(temperature=0.5, seed=0))
    sampler.apply_staged_writes()
    logits = torch.randn(1, VOCAB).to(sampler.device, LOGITS_DTYPE)
    slot = torch.zeros(1, dtype=torch.int32, device=sampler.device)
    pos = torch.ones(1, dtype=torch.int64, device=sampler.device)
    arguments = (logits, slot, slot, np.zeros(1, np.int32), pos, pos, pos, np.zeros(1, np.int32))
    _, raw = sampler.sample(*arguments)
    _, processed = sampler.sample(*arguments, return_logprobs=True)
    assert raw is logits
    assert torch.allclose(processed, logits.float() / 0.5)


@pytest.mark.parametrize("shape", [(0, VOCAB), (SLOTS + 1, VOCAB), (2, VOCAB - 1)])
def test_other_shapes_are_not_served(samplers: Pair, shape: tuple[int, int]) -> None:
    graphs = samplers[0].sample.graphs
    assert not graphs.serves(torch.zeros(shape)) and graphs.serves(torch.zeros(SLOTS, VOCAB))
