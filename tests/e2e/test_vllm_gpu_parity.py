"""On CUDA, in half precision: 200 mixed prompts say with ROSE what they say with FLASH_ATTN, on six models' shapes.

Mistral 7B v0.1's has a sliding window in all layers, which most prompts exceed by far; Gemma 3 4B's and gpt-oss 20B's
have one in some, and sizes as published.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.lora.request import LoRARequest

from rose_backend.vllm_plugin.attention import flash_attention, mixed_graphs
from rose_backend.vllm_plugin.kv_cache.checkpoints import MIN_TOKENS_WORTH_A_CHECKPOINT
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.half_precision import (
    Judged,
    first_differences,
    judge,
    logprob_errors,
    mixed_prompts,
    num_disputed,
    wrong_tokens,
)
from tests.support.random_checkpoints import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    WRITERS,
    write_random_adapter,
    write_random_gemma3_4b,
    write_random_gpt_oss_20b,
    write_random_mistral,
    write_random_qwen3_5,
    write_random_qwen3_next,
)
from tests.support.reference_generation import Prompts
from tests.support.vllm_engines import (
    NGRAM,
    ROSES_LAYERS,
    RUNNERS,
    assert_drafts_were_kept_and_rejected,
    draft_counts,
    has_roses_layers,
    inputs_of,
    manager_of,
    scheduler_of,
)

pytestmark = pytest.mark.gpu

HALF: dict[str, Any] = {"dtype": "float16", "max_model_len": 1024, **GPU_MEMORY}
MANNERS: dict[str, dict[str, Any]] = {
    "compiled": {"enforce_eager": False},
    "eager, small chunks, no prefix cache": {"max_num_batched_tokens": 333, "enable_prefix_caching": False},
    # About half of what 64 sequences need: vLLM preempts.
    "eager, few blocks": {"num_gpu_blocks_override": 300},
}
NUM_GROUPS = {"Gemma 3 4B": 4, "gpt-oss 20B": 2}
"""KV cache groups: one of layers without a window, the others of layers with one. Models that are not here have one."""


@dataclass(frozen=True)
class Stock:
    """What FLASH_ATTN makes of the prompts."""

    model: str
    model_path: Path
    options: dict[str, Any]
    """Of its engine, and of those that are compared with it."""
    prompts: Prompts
    num_new_tokens: list[int]
    judged: list[Judged]
    mean_error: float
    tolerance: float
    """A lead is a difference of two logits, each wrong by as much as half precision makes it here."""


def complete(
    llm: Any,
    prompts: Prompts,
    num_new_tokens: list[int],
    logprobs: int | None = None,
    adapter: LoRARequest | None = None,
) -> list[Any]:
    """Return the greedy completion of each prompt."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=logprobs)
        for length in num_new_tokens
    ]
    outputs = llm.generate(inputs_of(prompts), params, use_tqdm=False, lora_request=adapter)
    return [output.outputs[0] for output in outputs]


def judge_completions(model_path: Path, prompts: Prompts, completions: list[Any]) -> list[Judged]:
    return judge(model_path, prompts, [list(completion.token_ids) for completion in completions])


def as_stock(
    model: str,
    model_path: Path,
    options: dict[str, Any],
    prompts: Prompts,
    num_new_tokens: list[int],
    completions: list[Any],
    sharpness: float = 5,
) -> Stock:
    """Return stock's side; ``sharpness`` is how far half of all tokens lead at least, in tolerances."""
    judged = judge_completions(model_path, prompts, completions)
    errors = logprob_errors(judged, completions)
    tolerance = 2 * float(errors.max())
    leads = sorted(float(lead) for output in judged for lead in output.leads)
    assert tolerance < leads[len(leads) // 2] / sharpness, "the logits are too flat to tell right from wrong"
    assert not wrong_tokens(judged, tolerance)
    return Stock(model, model_path, options, prompts, num_new_tokens, judged, float(errors.mean()), tolerance)


MODELS = {
    **WRITERS,
    "Mistral 7B v0.1": write_random_mistral,
    "Gemma 3 4B": write_random_gemma3_4b,
    "gpt-oss 20B": write_random_gpt_oss_20b,
}
VLLMS_LAYERS = {"rose": {"fused_mlp": False, "fused_add_layernorm": False}}
OPTIONS = {
    # Prompts that are longer than its window of 1,024.
    "Gemma 3 4B": {**HALF, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN},
    "gpt-oss 20B": {**HALF, "dtype": "bfloat16"},
}
# bfloat16 rounds eight times as coarsely as float16, and experts amplify it: there it is left to mean errors, which are
# compared for all models, to tell wrong attention.
SHARPNESS = {"Gemma 3 4B": 1.5, "gpt-oss 20B": 0.5}


@pytest.fixture(scope="module", params=MODELS)
def stock(
    request: pytest.FixtureRequest, make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> Stock:
    model_path = tmp_path_factory.mktemp("model")
    MODELS[request.param](model_path)
    options = OPTIONS.get(request.param, HALF)
    prompts, num_new_tokens = mixed_prompts(VOCAB_SIZE, max_len=options["max_model_len"] - 124)
    with make_engine(model=str(model_path), attention_backend="FLASH_ATTN", **options) as llm:
        completions = complete(llm, prompts, num_new_tokens, logprobs=0)
    sharpness = SHARPNESS.get(request.param, 5)
    return as_stock(request.param, model_path, options, prompts, num_new_tokens, completions, sharpness)


def assert_as_close_as_stock(stock: Stock, completions: list[Any]) -> None:
    """Log-probabilities differ from float32's by little more than stock's, and never by twice its largest error."""
    judged = judge_completions(stock.model_path, stock.prompts, completions)
    errors = logprob_errors(judged, completions)
    mean_error, worst = float(errors.mean()), float(errors.max())
    print(
        f"errors of log-probabilities: ROSE {mean_error:.2e} (worst {worst:.2e}),"
        f" FLASH_ATTN {stock.mean_error:.2e} (worst {stock.tolerance / 2:.2e})"
    )
    assert mean_error < 1.25 * stock.mean_error
    assert worst < stock.tolerance


def assert_same_but_for_ties(stock: Stock, completions: list[Any]) -> None:
    """Every token is the likeliest one behind those before it, or as good as; so is the first that differs."""
    judged = judge_completions(stock.model_path, stock.prompts, completions)
    wrong = wrong_tokens(judged, stock.tolerance)
    assert not wrong, "\n".join([f"tolerance {stock.tolerance:.2e}", *wrong[:8]])
    parted = first_differences(judged, stock.judged)
    # Both sides chose among tokens that float32 holds for equally likely within the tolerance.
    assert all(
        min(side[index].leads[place] for side in (judged, stock.judged)) >= -stock.tolerance
        for index, place in parted
    )
    ours, theirs = num_disputed(judged), num_disputed(stock.judged)
    print(
        f"{len(parted)} of {len(judged)} prompts part at a tie (tolerance {stock.tolerance:.1e}); float32 disputes"
        f" {ours} tokens of ROSE, {theirs} of FLASH_ATTN"
    )
    assert ours <= 1.5 * theirs + 10


@RUNNERS
@pytest.mark.parametrize("manner", MANNERS)
def test_200_prompts(
    make_engine: MakeEngine, stock: Stock, steps_in_python: list[Any], runner: str, manner: str
) -> None:
    num_groups = NUM_GROUPS.get(stock.model, 1)
    options = {**stock.options, **MANNERS[manner]}
    if "num_gpu_blocks_override" in options:
        # Of prompts that are shorter than a window, its groups keep as much as the others.
        options["num_gpu_blocks_override"] *= num_groups
    with make_engine(runner=runner, model=str(stock.model_path), **options) as llm:
        config = llm.llm_engine.vllm_config
        assert config.scheduler_config.async_scheduling and config.use_v2_model_runner == (runner == "V2")
        assert len(scheduler_of(llm).kv_cache_config.kv_cache_groups) == num_groups
        has_graphs = manner == "compiled"
        # Runner V2 replays steps with prompts, too.
        graphs = CUDAGraphMode.FULL if runner == "V2" else CUDAGraphMode.FULL_AND_PIECEWISE
        mode = config.compilation_config.cudagraph_mode
        assert mode == (graphs if has_graphs else CUDAGraphMode.NONE)
        # Runner V1 replays steps with prompts in pieces, which need compiled layers, as GPT-2's are.
        in_pieces = has_graphs and runner == "V1" and stock.model != "GPT-2"
        assert has_roses_layers(llm) == (stock.model in ROSES_LAYERS and not in_pieces)
        steps_in_python.clear()
        completions = complete(llm, stock.prompts, stock.num_new_tokens)
        if has_graphs and runner == "V2":
            # But for steps that are too long for the graphs of a wide model.
            largest = config.compilation_config.max_cudagraph_capture_size
            assert all(step.num_actual_tokens > largest for step in steps_in_python)
        elif has_graphs:
            assert steps_in_python and all(step.num_prefill_tokens for step in steps_in_python)
        assert_same_but_for_ties(stock, completions)
        again = complete(llm, stock.prompts, stock.num_new_tokens, logprobs=0)
        assert_same_but_for_ties(stock, again)
        assert_as_close_as_stock(stock, again)
        manager = manager_of(llm)
        manager.check_integrity()
        if config.cache_config.enable_prefix_caching:
            assert min(manager.stats.partial_hits, manager.stats.clones) > 0, manager.stats
        if manner == "eager, few blocks":
            assert manager.stats.evictions > 0


@pytest.mark.parametrize("stock", ["Llama", "Qwen3"], indirect=True)
@pytest.mark.parametrize("manner", ["compiled", "eager, few blocks"])
def test_vllms_layers_around_roses_attention(make_engine: MakeEngine, stock: Stock, manner: str) -> None:
    options = {**stock.options, **MANNERS[manner]}
    with make_engine(model=str(stock.model_path), additional_config=VLLMS_LAYERS, **options) as llm:
        assert not has_roses_layers(llm)
        completions = complete(llm, stock.prompts, stock.num_new_tokens, logprobs=0)
        assert_same_but_for_ties(stock, completions)
        assert_as_close_as_stock(stock, completions)
        manager_of(llm).check_integrity()


@pytest.mark.parametrize("stock", ["Llama", "Qwen3"], indirect=True)
@pytest.mark.parametrize("off", ["fused_mlp", "fused_add_layernorm", "fused_kv_append", "block_manager"])
def test_roses_layers_with_a_part_switched_off(make_engine: MakeEngine, stock: Stock, off: str) -> None:
    options = {**stock.options, "additional_config": {"rose": {off: False}}}
    with make_engine(model=str(stock.model_path), enforce_eager=False, **options) as llm:
        assert has_roses_layers(llm)
        completions = complete(llm, stock.prompts, stock.num_new_tokens, logprobs=0)
        assert_same_but_for_ties(stock, completions)
        assert_as_close_as_stock(stock, completions)


@RUNNERS
@pytest.mark.parametrize("stock", ["Qwen3"], indirect=True)
@pytest.mark.parametrize("manner", MANNERS)
def test_prompts_that_flash_attention_attends(
    make_engine: MakeEngine, stock: Stock, monkeypatch: pytest.MonkeyPatch, runner: str, manner: str
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 needs compute capability 9.0")
    # Prompts here are short: graphs serve most steps of runner V2, and the first ones are launched.
    monkeypatch.setattr(flash_attention, "FASTER_FROM", (flash_attention.Threshold(0, 64),))
    monkeypatch.setattr(mixed_graphs, "LAUNCHED_FROM", 64)
    num_rows: list[int] = []
    attend = flash_attention.flash_prefill

    def record(*args: Any) -> None:
        num_rows.append(len(args[5].seq_lens))
        attend(*args)

    monkeypatch.setattr(flash_attention, "flash_prefill", record)
    with make_engine(runner=runner, model=str(stock.model_path), **stock.options, **MANNERS[manner]) as llm:
        assert_same_but_for_ties(stock, complete(llm, stock.prompts, stock.num_new_tokens))
        assert num_rows and max(num_rows) > 1
        # What it stored is found in the cache now, and little is left to prefill.
        assert_same_but_for_ties(stock, complete(llm, stock.prompts, stock.num_new_tokens))
        manager_of(llm).check_integrity()


@RUNNERS
@pytest.mark.parametrize("stock", ["Qwen3"], indirect=True)
def test_drafts(make_engine: MakeEngine, stock: Stock, runner: str) -> None:
    with make_engine(
        runner=runner, model=str(stock.model_path), speculative_config=NGRAM, disable_log_stats=False, **HALF
    ) as llm:
        before = draft_counts(llm)
        assert_same_but_for_ties(stock, complete(llm, stock.prompts, stock.num_new_tokens))
        assert_drafts_were_kept_and_rejected(llm, before)
        manager_of(llm).check_integrity()


@RUNNERS
@pytest.mark.parametrize("stock", ["Llama"], indirect=True)
def test_adapters(make_engine: MakeEngine, stock: Stock, tmp_path: Path, runner: str) -> None:
    merged = write_random_adapter(stock.model_path, tmp_path)
    adapter = LoRARequest("an adapter", 1, str(tmp_path))
    options = {"model": str(stock.model_path), "enable_lora": True, "max_lora_rank": 8, **HALF}
    requests = (stock.prompts, stock.num_new_tokens)
    with make_engine(runner=runner, attention_backend="FLASH_ATTN", **options) as llm:
        adapted_stock = as_stock(
            stock.model, merged, HALF, *requests, complete(llm, *requests, logprobs=0, adapter=adapter)
        )
    with make_engine(runner=runner, **options) as llm:
        # There are no graphs, of which model runner V1 would have pieces.
        assert has_roses_layers(llm)
        assert_same_but_for_ties(stock, complete(llm, *requests))
        # Nothing that was computed without the adapter is found with it.
        assert_same_but_for_ties(adapted_stock, complete(llm, *requests, adapter=adapter))
        assert_same_but_for_ties(stock, complete(llm, *requests))
        manager_of(llm).check_integrity()
    assert len(first_differences(adapted_stock.judged, stock.judged)) > len(stock.prompts) / 2


STATE_OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    # vLLM's choice on Hopper needs CUTLASS's Python package.
    "gdn_prefill_backend": "triton",
    **GPU_MEMORY,
}
HEADS = (200, 333, 477)
ROUNDS = 5


@pytest.fixture(scope="module", params=["Qwen3.5", "Qwen3-Next"])
def model_with_states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "Qwen3.5":
        pytest.importorskip("torchvision")
        return write_random_qwen3_5(tmp_path_factory.mktemp("qwen3_5"))
    return write_random_qwen3_next(tmp_path_factory.mktemp("qwen3_next"))


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "compiled"])
@RUNNERS
def test_shared_heads_say_what_stock_says(
    make_engine: MakeEngine, model_with_states: Path, runner: str, enforce_eager: bool
) -> None:
    choose = random.Random(7)
    heads = [[choose.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in HEADS]
    prompts = [
        (*head, *(choose.randrange(4, VOCAB_SIZE) for _ in range(choose.randint(20, 200))))
        for _ in range(ROUNDS)
        for head in heads
    ]
    lengths = [30] * len(prompts)
    options = {"model": str(model_with_states), "enforce_eager": enforce_eager, **STATE_OPTIONS}
    own = {"attention_backend": "FLASH_ATTN", "enable_prefix_caching": False}
    with make_engine(runner=runner, **options, **own) as llm:
        stock = complete(llm, tuple(prompts), lengths, logprobs=0)
    judged = judge_completions(model_with_states, tuple(prompts), stock)
    errors = logprob_errors(judged, stock)
    tolerance = 2 * float(errors.max())
    with make_engine(runner=runner, **options, disable_hybrid_kv_cache_manager=False) as llm:
        manager = manager_of(llm)
        rose, num_hits = [], []
        for start in range(0, len(prompts), len(HEADS)):
            before = manager.stats.hit_tokens
            one_each = slice(start, start + len(HEADS))
            rose += complete(llm, tuple(prompts[one_each]), lengths[one_each], logprobs=0)
            num_hits.append(manager.stats.hit_tokens - before)
        manager.check_integrity()
    # The first computes a head, the second leaves a state behind it, or starts so close to it that none is worth it.
    assert num_hits[0] == 0
    worth = MIN_TOKENS_WORTH_A_CHECKPOINT * len(HEADS)
    assert all(sum(HEADS) - worth < found <= sum(HEADS) for found in num_hits[2:]), num_hits
    assert manager.stats.checkpoints >= len(HEADS)
    judged_rose = judge_completions(model_with_states, tuple(prompts), rose)
    assert not wrong_tokens(judged_rose, tolerance)
    assert float(logprob_errors(judged_rose, rose).mean()) < 1.25 * float(errors.mean())
