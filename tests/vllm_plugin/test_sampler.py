"""Rose's sampler in both model runners: reproducible draws, which steps are vLLM's, what is counted and replayed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.config.watermarking import WatermarkConfig
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu.sample import gumbel, min_p, states

from rose_backend.vllm_plugin import sampler as rose_sampler
from rose_backend.vllm_plugin.captured_processors import RequestParameters, sampling_arrays
from rose_backend.vllm_plugin.config_hook import describe_parts
from rose_backend.vllm_plugin.models.model_choice import ModelChoice
from rose_backend.vllm_plugin.options import rose_options
from rose_backend.vllm_plugin.plugin_logger import Counts, sample_counts
from rose_backend.vllm_plugin.sampler import (
    MAX_LOGITS_BYTES,
    DrawGraphs,
    ReplayedSampling,
    RequestDraws,
    RoseDraws,
    RoseTopKTopP,
    captures_draws,
    copy_parameters_when_they_change,
    draw_graph_sizes,
    wrap_sampler_v2_init,
)
from tests.support.vllm_plugin.configs import MakeConfig, n_grams, rose
from tests.support.vllm_plugin.fake_samplers import (
    SLOTS,
    VOCAB,
    BareSampler,
    FakeV2Sampler,
    HostTensor,
    V2Sampler,
    apply_min_p,
    apply_temperature,
    draws_of,
)

VOCAB_SIZE = 300
FLAT = torch.zeros(1, VOCAB_SIZE)


def logits_of(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 3


def seeded(**seeds: int) -> dict[int, Any]:
    """Return generators by row, as ``row0=seed``."""
    return {int(row[3:]): torch.Generator().manual_seed(seed) for row, seed in seeds.items()}


def draw_flat(sampler: RoseTopKTopP, generators: dict[int, Any], count: int) -> list[int]:
    return [int(sampler(FLAT, generators, None, None)[0]) for _ in range(count)]


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
    lonely, batch = seeded(row0=42), seeded(row0=1, row2=42, row3=3)
    order = torch.tensor([1, 3, 0, 2])
    for _ in range(8):
        expected = alone(logits[:1], lonely, top_k[:1], top_p[:1])[0]
        got = together(logits[order], batch, top_k[order], top_p[order])[0]
        assert got[2] == expected[0]


def test_successive_draws_differ_start_again_with_a_new_generator_and_go_on_with_a_kept_one() -> None:
    sampler, kept = RoseTopKTopP(), seeded(row0=9)[0]
    first = draw_flat(sampler, seeded(row0=9), 20)
    assert first == draw_flat(sampler, seeded(row0=9), 20) and len(set(first)) > 10
    # What vLLM does when a request leaves the batch and returns: the table entry is made anew from the request.
    assert first[:6] == [draw_flat(sampler, {0: kept}, 1)[0] for _ in range(6)]


def test_taking_a_draw_back_repeats_it() -> None:
    sampler, generators = RoseTopKTopP(), seeded(row0=11)
    first = draw_flat(sampler, generators, 1)
    draws = generators[0]
    # gpu_model_runner does this for the unfinished chunk of a prompt.
    draws.set_offset(draws.get_offset() - 4)
    assert draw_flat(sampler, generators, 1) == first
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
    weights = logits[0, :3].softmax(-1)
    num_draws, num_rows = 20_000, 2000
    sampler, filters = RoseTopKTopP(), (torch.full((num_rows,), 3), torch.full((num_rows,), 0.95))
    counts = torch.zeros(logits.shape[1])
    for _ in range(num_draws // num_rows):
        drawn = sampler(logits.expand(num_rows, -1), {}, *filters)[0]
        counts += torch.bincount(drawn, minlength=logits.shape[1])
    sigma = (weights * (1 - weights) / num_draws).sqrt()
    assert counts[3:].sum() == 0
    assert ((counts[:3] / num_draws - weights).abs() < 5 * sigma).all(), counts


@pytest.mark.parametrize("options", [{}, {"fused_sampler": False}], ids=["on", "off"])
def test_vllms_v1_sampler_is_replaced_only_where_asked(
    make_config: MakeConfig, options: dict[str, Any]
) -> None:
    current_platform.import_kernels()
    with set_current_vllm_config(make_config(**rose(**options))):
        assert isinstance(TopKTopPSampler().forward, RoseTopKTopP) is not bool(options)
        _, reported = TopKTopPSampler("processed_logits").forward(logits_of(1), {}, torch.tensor([3]), None)
        assert reported is not None and reported.isfinite().sum() == 3
    with set_current_vllm_config(make_config(attention_backend="CPU_ATTN")):
        assert not isinstance(TopKTopPSampler().forward, RoseTopKTopP)
    assert not isinstance(TopKTopPSampler().forward, RoseTopKTopP)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "processed_logits"])
def test_v1_draws_from_the_distribution_that_it_reports(counts: Counts, mode: str) -> None:
    rows, top_k = logits_of(3), torch.tensor([4, 2, VOCAB_SIZE])
    plain, _ = RoseTopKTopP()(rows.clone(), seeded(row0=3, row1=4), top_k, None)
    drawn, reported = RoseTopKTopP(mode)(rows.clone(), seeded(row0=3, row1=4), top_k, None)
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
    [({"use_fp64_gumbel": True}, "float64 noise"), ({"speculative_config": n_grams()}, "drafts")],
    ids=["float64 noise", "drafts"],
)
def test_v1_leaves_engines_to_vllm_whose_every_draw_needs_it(
    make_config: MakeConfig, counts: Counts, rose_log: list[str], options: dict[str, Any], reason: str
) -> None:
    with set_current_vllm_config(make_config(**options)):
        sampler = TopKTopPSampler()
    assert f"sampler vLLM's own ({reason})" in rose_log[0]
    current_platform.import_kernels()
    drawn = []
    for each in (sampler, TopKTopPSampler()):
        torch.manual_seed(3)
        drawn.append(each(logits_of(4), seeded(row1=1), torch.tensor([3] * 4), None)[0])
    assert torch.equal(*drawn)
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


# Model runner V2.
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


MakeSampler = Callable[..., Any]


@pytest.fixture
def make_v2_sampler(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> MakeSampler:
    """Return a function that makes a sampler from engine arguments."""
    monkeypatch.setattr(V2Sampler, "__init__", wrap_sampler_v2_init(V2Sampler.__init__))

    def make(custom_logits_processors: Any = (), **options: Any) -> Any:
        return V2Sampler(make_config(**options), custom_logits_processors=custom_logits_processors)

    return make


OFF = rose(fused_sampler=False)


def test_v2_sampler_object_is_replaced_only_where_asked(make_v2_sampler: MakeSampler) -> None:
    assert isinstance(vars(make_v2_sampler())["_sample_random"], RoseDraws)
    for options in ({"attention_backend": "CPU_ATTN"}, OFF, {**OFF, "speculative_config": n_grams()}):
        assert not vars(make_v2_sampler(**options)).keys() & {
            *("_sample_random", "apply_sampling_params", "add_request")
        }


def test_v2_counts_the_drafts_that_vllm_checks(make_v2_sampler: MakeSampler, counts: Counts) -> None:
    sampler = make_v2_sampler(speculative_config=n_grams())
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
        ({"speculative_config": n_grams()}, "sampler Rose (drafts and seeds by vLLM's own);"),
        ({"logprobs_mode": "processed_logprobs"}, "sampler Rose;"),
        ({"watermark_config": WatermarkConfig(key=3)}, "sampler Rose (watermarks by vLLM's own);"),
    ],
    ids=["plain", "drafts", "processed log-probabilities", "watermarks"],
)
def test_the_line_at_start_up_says_what_is_vllms(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], part: str
) -> None:
    watermarks = options.get("watermark_config")
    config = make_config(**({} if watermarks else options))
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    monkeypatch.setattr(config, "watermark_config", watermarks)
    assert part in describe_parts(config, rose_options(config), ModelChoice(None))


def test_v2_copies_parameters_in_steps_with_new_requests_only(make_v2_sampler: MakeSampler) -> None:
    sampler = make_v2_sampler()
    for num_new in (0, 0, 1, 0, 2, 0, 0, 1):
        for _ in range(num_new):
            sampler.add_request(len(sampler.added), "parameters")
        sampler.apply_staged_writes()
    # The first step copies what vLLM starts with.
    assert sampler.copied == [0, 1, 3, 4]
    assert sampler.added == [(index, "parameters") for index in range(4)]
    # What other code may change is copied in every step.
    for sampler in (make_v2_sampler(["one"]), make_v2_sampler(**OFF)):
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


# Draws of model runner V2 as CUDA graphs: which engines replay them, and for how many rows.
def test_sizes_rise_to_what_fits() -> None:
    assert draw_graph_sizes(1, 100) == (1,)
    assert draw_graph_sizes(24, 512) == (1, 2, 4, 8, 16, 24)
    assert draw_graph_sizes(256, 50257)[-3:] == (192, 224, 256)
    for vocab_size in (50257, 151936):
        sizes = draw_graph_sizes(1024, vocab_size)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] * vocab_size * 4 <= MAX_LOGITS_BYTES < (sizes[-1] + 1) * vocab_size * 4
    assert draw_graph_sizes(8, MAX_LOGITS_BYTES) == ()


def test_graphs_are_captured_unless_they_are_switched_off(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not captures_draws(make_config())
    config = make_config()
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    config.model_config.enforce_eager = False
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
        config.compilation_config.cudagraph_mode = mode
        assert captures_draws(config) == (mode == CUDAGraphMode.FULL)
    for name, is_captured in (("enforce_eager", False), ("enable_sleep_mode", True)):
        with monkeypatch.context() as patch:
            patch.setattr(config.model_config, name, True)
            assert captures_draws(config) == is_captured, name
    config.additional_config = {"rose": {"cuda_graph": False}}
    assert not captures_draws(config)


def test_samplers_replay_where_rose_may_draw_for_everybody(
    make_v2_sampler: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Any] = []

    class Graphs:
        def __init__(self, parameters: Any, vocab_size: int) -> None:
            captured.append(parameters)
            self.is_captured = False

        def capture(self) -> None:
            self.is_captured = True

    monkeypatch.setattr(rose_sampler, "DrawGraphs", Graphs)
    monkeypatch.setattr(rose_sampler, "sampling_arrays", lambda states: {"states": states})
    monkeypatch.setattr(rose_sampler, "processor_arrays", lambda sampler: {"sampler": sampler})
    monkeypatch.setattr(rose_sampler, "RequestParameters", lambda arrays, device: arrays)
    monkeypatch.setattr(rose_sampler, "captures_draws", lambda config: True)
    sampler = make_v2_sampler()
    # Memory that is allocated while a model loads does not outlast a deep sleep.
    assert isinstance(sampler.sample, ReplayedSampling) and not captured
    for _ in range(2):
        assert sampler.sample.graphs.is_captured
    assert captured == [{"states": sampler.sampling_states, "sampler": sampler}]
    for options in (OFF, {"speculative_config": n_grams()}, {"custom_logits_processors": ["one"]}):
        assert "sample" not in vars(make_v2_sampler(**options)), options
    with monkeypatch.context() as patch:
        # Steps may then have no drafts.
        patch.setattr(rose_sampler, "adapts_drafts", lambda config: True)
        patch.setattr(rose_sampler, "why_vllm_draws", lambda config: None)
        made = vars(make_v2_sampler(speculative_config=n_grams()))
        assert isinstance(made["sample"], ReplayedSampling) and "apply_sampling_params" in made
    for name, answer in (
        ("why_vllm_draws", "float64 noise"),
        ("is_watermarked", True),
        ("captures_draws", False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(rose_sampler, name, lambda config, answer=answer: answer)
            assert "sample" not in vars(make_v2_sampler()), name
    assert len(captured) == 1


# Steps that are replayed: the same tokens as step by step, for the right requests.
LOGITS_DTYPE = torch.float16
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
    replaying.sample = ReplayedSampling(replaying, lambda: graphs)
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


@pytest.mark.parametrize("has_drafts", [False, True])
def test_seeds_are_vllms_where_steps_may_have_drafts(
    samplers: Pair, counts: Counts, has_drafts: bool
) -> None:
    replaying, _ = samplers
    sample_as_vllm, asked = replaying.sample._sample_as_vllm, list[Any]()
    replaying.sample._has_drafts = has_drafts
    replaying.sample._sample_as_vllm = lambda *args: (asked.append(args[3].tolist()), sample_as_vllm(*args))[
        1
    ]
    replaying.add_request(0, SamplingParams(temperature=1.0))
    replaying.add_request(1, SamplingParams(temperature=1.0, seed=4))
    logits = torch.randn(1, VOCAB).to(replaying.device, LOGITS_DTYPE)
    for slot in (0, 1):
        replaying.step(logits, [slot], [5])
    assert asked == ([[1]] if has_drafts else [])


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
    monkeypatch.setattr(rose_sampler, "MAX_LOGITS_BYTES", 4 * VOCAB * 17)
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
