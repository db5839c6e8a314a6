"""On CUDA: steady decode steps are replayed whole, alternate with vLLM's own, and say the same to the bit.

``ROSE_STEP_GRAPH_REQUESTS``, at least 150 so that blocks are evicted, and ``ROSE_STEP_GRAPH_STEPS`` set the length of
the two longer tests. ``test_a_long_day`` is long as it is.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.kv_cache_interface import MambaSpec

from benchmarks.support.engines import as_flags
from rose_backend.draft_depth import DraftDepth, draft_depths
from rose_backend.kernels.attention import paged_decode
from rose_backend.kernels.captured_graphs import CapturedGraphs
from rose_backend.vllm_plugin.plugin_logger import STEPS
from rose_backend.vllm_plugin.step_graph.draft_steps import DraftSteps
from rose_backend.vllm_plugin.step_graph.steps import StepGraphs
from rose_backend.vllm_plugin.step_graph.whole_steps import WholeSteps
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.gpu_matrix.drafters import write_with_eagle_head, write_with_mtp_head
from tests.support import random_checkpoints
from tests.support.eagle_checkpoints import write_eagle3_drafter
from tests.support.half_precision import judge, logprob_errors, mixed_prompts, wrong_tokens
from tests.support.patience import HANG_S
from tests.support.random_checkpoints import (
    write_random_gemma3,
    write_random_gemma4,
    write_random_gpt_oss,
    write_random_granite_hybrid,
    write_random_lfm2,
    write_random_qwen3_5,
    write_random_qwen3_moe,
    write_random_qwen3_next,
)
from tests.support.random_vision_checkpoints import write_random_qwen2_5_vl, write_random_qwen3_vl
from tests.support.reference_generation import parity_prompts
from tests.support.vllm_engines import (
    ROSES_LAYERS,
    count_preemptions,
    draft_counts,
    generate,
    has_roses_layers,
    inputs_of,
    lose_loads,
    manager_of,
    metrics_of,
    needs_two_gpus,
    scheduler_of,
)
from tests.support.vllm_server import running_server

pytestmark = pytest.mark.gpu

REPLAYED_BUT_FOR = {
    "prompts without a full graph",
    "prompts of a model with states",
    "prompts of a model audited for decodes only",
    "no tokens",
    "more requests than full graphs of decodes take",
}
"""Reasons for steps of vLLM's, whatever requests ask for."""
NUM_REQUESTS = int(os.environ.get("ROSE_STEP_GRAPH_REQUESTS", "1000"))
NUM_STEPS = int(os.environ.get("ROSE_STEP_GRAPH_STEPS", "2000"))
WRITERS: dict[str, Callable[[Path], Path]] = {
    **random_checkpoints.WRITERS,
    "gpt-oss": write_random_gpt_oss,
    "Gemma 3": write_random_gemma3,
    "Gemma 4": write_random_gemma4,
    "Qwen3.5": write_random_qwen3_5,
    "Qwen3-Next": write_random_qwen3_next,
    "LFM2": write_random_lfm2,
    "Granite 4 H": write_random_granite_hybrid,
    "Qwen2.5-VL": write_random_qwen2_5_vl,
    "Qwen3-VL": write_random_qwen3_vl,
    "EAGLE": write_with_eagle_head,
    "MiMo": write_with_mtp_head,
}
VLLMS_LAYERS = {"fused_mlp": False, "fused_add_layernorm": False}
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64, 128, 256]}
DECODE_GRAPHS = {**GRAPHS, "cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}
"""Without compiled layers, which only steps with prompts would gain from."""
DELTA_NETS = ("Qwen3.5", "Qwen3-Next")
M_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
"""As Qwen3.5 has it for text, too."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT-2", {"compilation_config": GRAPHS}),
    **{
        # With sizes of our own, graphs of steps with prompts would be those of vLLM's compiled layers.
        name: (name, {"compilation_config": {**GRAPHS, "cudagraph_mode": "FULL"}})
        for name in ("Qwen3", "Llama")
    },
    "Qwen3 with vLLM's layers": ("Qwen3", {"compilation_config": GRAPHS}),
    # Gemma 4 has one KV cache group, with layers of two shapes. Multimodal models get texts here.
    **{
        name: (name, {"compilation_config": GRAPHS})
        for name in ("gpt-oss", "Gemma 3", "Gemma 4", "Qwen2.5-VL", "Qwen3-VL")
    },
    **{
        name: (name, {"compilation_config": DECODE_GRAPHS, **options})
        for name, options in {
            "Qwen3.5": {"gdn_prefill_backend": "triton", "hf_overrides": {"rope_parameters": M_ROPE}},
            "Qwen3-Next": {"gdn_prefill_backend": "triton"},
            "LFM2": {},
            "Granite 4 H": {},
        }.items()
    },
}
"""Checkpoint and options by name."""
WITH_HEAD = {
    "EAGLE": ("EAGLE", MODELS["Llama"][1]),
    "MiMo": ("MiMo", MODELS["Llama"][1]),
    "MiMo with vLLM's layers": ("MiMo", {"compilation_config": GRAPHS}),
}
"""Models with a head of the first kind beside them, or an MTP module, which are often right."""
NUM_GROUPS = {"gpt-oss": 2, "Gemma 3": 4}
"""KV cache groups: one of layers without a window, the others of layers with one. Models that are not here have one."""
NUM_STATE_GROUPS = {**dict.fromkeys(DELTA_NETS, 3), "LFM2": 2, "Granite 4 H": 3}
"""KV cache groups of layers with a state, beside one of attention."""
SHARES_OF_BLOCKS = {"gpt-oss": 1.5, "Gemma 3": 2.5, "LFM2": 1.2} | dict.fromkeys(
    (*DELTA_NETS, "Granite 4 H"), 0.4
)
"""Of the blocks of 16 tokens that one group needs. States make blocks wider, but for LFM2's."""
HALF_DTYPES = dict.fromkeys(("gpt-oss", "Gemma 3", "Gemma 4", *NUM_STATE_GROUPS), "bfloat16")
"""vLLM refuses Gemma in float16, and FlashAttention takes gpt-oss' sinks in bfloat16 alone."""
VOCAB_SIZE = 1000


def is_never(_: int) -> bool:
    return False


def is_random(seed: int) -> Callable[[int], bool]:
    choose = random.Random(seed)
    return lambda _: choose.random() < 0.5


def half_dtype(model: str) -> str:
    return HALF_DTYPES.get(model, "float16")


def scaled_blocks(model: str, num_blocks: int) -> int:
    """Return a pool that is about as short for a model with several groups as ``num_blocks`` are for one group."""
    return int(num_blocks * SHARES_OF_BLOCKS.get(model, 1))


def check_groups(llm: Any, model: str) -> None:
    specs = [group.kv_cache_spec for group in scheduler_of(llm).kv_cache_config.kv_cache_groups]
    windows = [getattr(spec, "sliding_window", None) for spec in specs]
    num_windows, num_states = NUM_GROUPS.get(model, 1) - 1, NUM_STATE_GROUPS.get(model, 0)
    assert len(specs) == 1 + num_windows + num_states
    assert windows.count(random_checkpoints.SLIDING_WINDOW) == num_windows
    assert sum(isinstance(spec, MambaSpec) for spec in specs) == num_states


MakeReplaying = Callable[..., contextlib.AbstractContextManager[Any]]


@pytest.fixture
def make_replaying(make_engine: MakeEngine, tiny_model_path: Path, tmp_path: Path) -> MakeReplaying:
    """Return a function that starts an engine of one of ``MODELS``, with graphs and, by default, in half precision."""

    def start(model: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
        kind, graphs = (MODELS | WITH_HEAD)[model]
        if model == "Qwen3.5":
            pytest.importorskip("torchvision")
        path = tiny_model_path if kind == "GPT-2" else WRITERS[kind](tmp_path)
        drafter = options.get("speculative_config", {})
        if drafter.get("method") == "eagle3":
            # Not 0: vLLM's norms write over the embeddings that it gives to a head, unless they are compiled.
            head = write_eagle3_drafter(
                path, drafter["num_speculative_tokens"], eagle_aux_hidden_state_layer_ids=[1, 2, 4]
            )
            options["speculative_config"] = head | drafter
        elif drafter.get("method") == "eagle":
            options["speculative_config"] = {"model": str(path / "draft"), **drafter}
        of_all = {"dtype": half_dtype(model), "max_num_seqs": 48, "enforce_eager": False, **GPU_MEMORY}
        return make_engine(model=str(path), **of_all | graphs | options)

    return start


ReplayWhen = Callable[[Callable[[int], bool]], None]
Launch = Callable[[WholeSteps, Any], bool]
LAUNCH: Launch = WholeSteps.launch


def launch_when(wanted: Callable[[int], bool]) -> Launch:
    """Return a launch of steps that replays only those for which ``wanted``, given the step's number, is true."""
    count = 0

    def chosen(self: WholeSteps, output: Any) -> bool:
        nonlocal count
        count += 1
        if wanted(count):
            return LAUNCH(self, output)
        self._loaded_batch = None
        return False

    return chosen


@pytest.fixture
def replay_when(monkeypatch: pytest.MonkeyPatch) -> ReplayWhen:
    """Return a function that lets steps be replayed only where ``wanted``, given the step's number, is true."""
    return lambda wanted: monkeypatch.setattr(WholeSteps, "launch", launch_when(wanted))


def set_rule_of_worker(_: Any, rule: str) -> int:
    """Say in a worker's process which steps are replayed; return how many were so far."""
    rules = {"never": is_never, "always": lambda _: True, "at random": is_random(3)}
    WholeSteps.launch = launch_when(rules[rule])  # type: ignore[method-assign]
    return STEPS.rose


BAD_WORDS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}


def params_of_every_kind(num_requests: int, one_in: int = 4) -> list[SamplingParams]:
    """Greedy and drawn requests, and every kind that asks for more than a draw, with many ends.

    Args:
        one_in: how many requests have one that is not plain.
    """
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.0, "min_tokens": 3},
        {"temperature": 1.2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.8, "logprobs": 3},
        {"temperature": 0.0, "n": 3} | {"temperature": 0.7},
        {"temperature": 0.0, "stop_token_ids": list(range(0, VOCAB_SIZE, 50)), "ignore_eos": False},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "frequency_penalty": 0.7, "logprobs": 20},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 7: -3.0, 11: -100.0}, "logprobs": 0},
        {"temperature": 0.7, "allowed_token_ids": list(range(3, 300, 7)), "top_p": 0.8},
        BAD_WORDS,
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": list(range(0, VOCAB_SIZE, 10))},
    ]
    params = []
    for index in range(num_requests):
        kind = kinds[index // one_in % len(kinds)] if index % one_in == one_in - 1 else kinds[index % 2]
        options = {"ignore_eos": True, "max_tokens": 3 + 7 * (index % 11), "seed": index, **kind}
        params.append(SamplingParams(**options))
        if index % one_in == one_in - 1 and index // one_in % len(kinds) == kinds.index(BAD_WORDS):
            # Of one, two and three tokens.
            params[-1]._bad_words_token_ids = [
                *([token] for token in range(0, VOCAB_SIZE, 9)),
                *([token, token + 1] for token in range(1, 40)),
                *([token, token, token] for token in range(40, 60)),
            ][:128]
    return params


def said(outputs: list[Any]) -> list[list[Any]]:
    return [
        [
            (
                tuple(each.token_ids),
                each.finish_reason,
                None
                if each.logprobs is None
                else [sorted((k, v.logprob) for k, v in at.items()) for at in each.logprobs],
            )
            for each in output.outputs
        ]
        for output in outputs
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["half", "float32"])
def test_both_kinds_of_steps_say_the_same_to_the_bit(
    make_replaying: MakeReplaying,
    replay_when: ReplayWhen,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    dtype: str,
) -> None:
    if model in DELTA_NETS and dtype == "float32":
        pytest.skip("vLLM's kernels of gated delta nets take no float32")
    num_mixed = 0
    run_mixed_layers = StepGraphs._run_mixed_layers

    def counted(self: StepGraphs, output: Any) -> Any:
        nonlocal num_mixed
        batch = run_mixed_layers(self, output)
        num_mixed += not isinstance(batch, str)
        return batch

    monkeypatch.setattr(StepGraphs, "_run_mixed_layers", counted)
    prompts = parity_prompts(VOCAB_SIZE)[:60]
    params = params_of_every_kind(len(prompts))
    answers: list[Any] = []
    STEPS.vllm.clear()
    # Few blocks: requests are preempted and come back. Prefix hits end inside blocks, so blocks are cloned.
    options: dict[str, Any] = {} if dtype == "half" else {"dtype": dtype}
    with make_replaying(model, num_gpu_blocks_override=scaled_blocks(model, 500), **options) as llm:
        check_groups(llm, model)
        assert has_roses_layers(llm) == (model in ROSES_LAYERS)
        # Chunks make the same steps in each run only if the cache holds the same, too.
        for wanted in (is_never, is_random(1), lambda _: True, is_random(2)):
            replay_when(wanted)
            assert llm.reset_prefix_cache()
            before = STEPS.rose
            answers.append(said(generate(llm, prompts, params)))
            assert (STEPS.rose > before) == (wanted is not is_never), STEPS
        manager_of(llm).check_integrity()
    assert STEPS.vllm.keys() <= REPLAYED_BUT_FOR
    # Steps with prompts, where vLLM has captured full graphs of them.
    assert num_mixed > 0 or MODELS[model][1]["compilation_config"].get("cudagraph_mode") != "FULL"
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
    assert answers[3] == answers[0]


LEFT_WITH_DRAFTS = {
    *("prompts beside drafts", "rows with fewer drafts, or parts of prompts", "resumed requests"),
    *("no tokens", "more requests than full graphs of decodes take"),
}
"""Reasons for steps of vLLM's beside drafts, whatever requests ask for."""
REQUESTS_LEFT_WITH_DRAFTS = {
    "log-probabilities beside drafts",
    "logits processors beside drafts",
    "top-k, top-p or min-p beside drafts",
}


def n_grams(num_drafts: int, is_adaptive: bool = False, **options: Any) -> dict[str, Any]:
    speculative = {"num_speculative_tokens": num_drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    return {
        "speculative_config": {"method": "ngram", **speculative, **options},
        "disable_log_stats": False,
        "runner": "V2",
        # All of them have a full graph of decodes, whatever the number of drafts.
        "max_num_seqs": 32,
        "additional_config": {"rose": {"adaptive_drafts": is_adaptive}},
    }


def synthetic(num_drafts: int) -> dict[str, Any]:
    """Return options by which three of four drafts are accepted, and so become part of a text."""
    length = 0.75 * num_drafts + 1
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


def of_head(
    num_drafts: int, method: str = "eagle3", is_adaptive: bool = False, **options: Any
) -> dict[str, Any]:
    """Return what ``n_grams`` does of a head, which ``make_replaying`` writes beside its model."""
    drafter = {"method": method, "num_speculative_tokens": num_drafts, **options}
    return n_grams(num_drafts, is_adaptive) | {"speculative_config": drafter}


def params_beside_drafts(num_requests: int, *, is_plain: bool) -> list[SamplingParams]:
    """Greedy and drawn requests with many ends; unless ``is_plain``, some whose steps are vLLM's."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.0, "stop_token_ids": list(range(0, VOCAB_SIZE, 50)), "ignore_eos": False},
        {"temperature": 1.2},
        {"temperature": 0.0},
        {"temperature": 0.1},
        {"temperature": 0.0, "n": 3} | {"temperature": 0.3},
    ]
    others: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_k": 40},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ]
    params = []
    for index in range(num_requests):
        is_other = not is_plain and index % 13 == 12
        kind = others[index // 13 % 3] if is_other else kinds[index % len(kinds)]
        length = 3 + 3 * (index % 5) if is_other else 3 + 11 * (index % 11)
        params.append(SamplingParams(**{"ignore_eos": True, "max_tokens": length, "seed": index, **kind}))
    return params


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("model", ["GPT-2", "Qwen3", "Llama", "Qwen3 with vLLM's layers", "Gemma 3"])
@pytest.mark.parametrize("dtype", ["half", "float32"])
def test_steps_with_drafts_say_the_same_to_the_bit(
    make_replaying: MakeReplaying, replay_when: ReplayWhen, model: str, dtype: str, num_drafts: int
) -> None:
    options = {} if dtype == "half" else {"dtype": dtype}
    say_the_same_to_the_bit(make_replaying, replay_when, model, options | n_grams(num_drafts))


def say_the_same_to_the_bit(
    make_replaying: MakeReplaying, replay_when: ReplayWhen, model: str, options: dict[str, Any]
) -> None:
    prompts = parity_prompts(VOCAB_SIZE)[:60]
    STEPS.vllm.clear()
    # Few blocks: requests are preempted and come back.
    options = {"num_gpu_blocks_override": scaled_blocks(model, 500), **options}
    with make_replaying(model, **options) as llm:
        for is_plain in (True, False):
            params = params_beside_drafts(len(prompts), is_plain=is_plain)
            answers: list[Any] = []
            counts: list[Any] = []
            for wanted in (is_never, is_random(1), lambda _: True, is_random(2)):
                replay_when(wanted)
                assert llm.reset_prefix_cache()
                before, drafted = STEPS.rose, draft_counts(llm)
                answers.append(said(generate(llm, prompts, params)))
                counts.append([now - then for now, then in zip(draft_counts(llm), drafted, strict=True)])
                assert (STEPS.rose > before) == (wanted is not is_never), STEPS
            assert answers[1:] == answers[:1] * 3
            assert counts[1:] == counts[:1] * 3 and 0 < counts[0][1] < counts[0][0]
            allowed = LEFT_WITH_DRAFTS | (set() if is_plain else REQUESTS_LEFT_WITH_DRAFTS)
            assert STEPS.vllm.keys() <= allowed
        assert STEPS.vllm.keys() & REQUESTS_LEFT_WITH_DRAFTS
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.usage == 0.0


@pytest.mark.parametrize(
    ("model", "dtype", "num_drafts", "method"),
    [
        ("Qwen3", "half", 1, "eagle3"),
        ("Qwen3", "half", 3, "eagle3"),
        ("Qwen3", "float32", 3, "eagle3"),
        ("Llama", "half", 7, "eagle3"),
        ("Qwen3 with vLLM's layers", "half", 3, "eagle3"),
        ("EAGLE", "half", 3, "eagle"),
        ("MiMo", "half", 1, "mtp"),
        ("MiMo", "half", 3, "mtp"),
        ("MiMo", "float32", 3, "mtp"),
        ("MiMo with vLLM's layers", "half", 3, "mtp"),
    ],
)
def test_steps_with_drafts_of_a_head_say_the_same_to_the_bit(
    make_replaying: MakeReplaying,
    replay_when: ReplayWhen,
    model: str,
    dtype: str,
    num_drafts: int,
    method: str,
) -> None:
    """Also where most drafts are accepted whatever they are, so that texts are the head's."""
    options = {} if dtype == "half" else {"dtype": dtype}
    drafts = of_head(num_drafts, method, **synthetic(num_drafts))
    say_the_same_to_the_bit(make_replaying, replay_when, model, options | drafts)


@pytest.mark.parametrize(("model", "method"), [("EAGLE", "eagle"), ("MiMo", "mtp")])
def test_drafts_of_a_head_are_accepted_as_vllm_does(
    make_replaying: MakeReplaying, replay_when: ReplayWhen, model: str, method: str
) -> None:
    say_the_same_to_the_bit(make_replaying, replay_when, model, of_head(3, method))


def choose_at_random(seed: int) -> Callable[[DraftDepth, int], int]:
    """Return a replacement of ``DraftDepth.choose`` that changes its mind now and then."""
    rng, chosen = random.Random(seed), 0

    def choose(self: DraftDepth, num_requests: int) -> int:
        nonlocal chosen
        if rng.random() < 0.15:
            chosen = rng.choice(draft_depths(self.num_drafts))
        return chosen

    return choose


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        *((model, n_grams(3, is_adaptive=True)) for model in ("GPT-2", "Qwen3", "Llama", "Gemma 3")),
        # Texts are the head's, which would draft something else without what it has passed over meanwhile.
        ("Qwen3", of_head(3, is_adaptive=True, **synthetic(3))),
        ("EAGLE", of_head(1, "eagle", is_adaptive=True, **synthetic(1))),
        ("MiMo", of_head(2, "mtp", is_adaptive=True, **synthetic(2))),
    ],
    ids=["GPT-2", "Qwen3", "Llama", "Gemma 3", "EAGLE-3", "EAGLE", "MTP"],
)
def test_drafts_that_come_and_go_say_the_same_to_the_bit(
    make_replaying: MakeReplaying,
    replay_when: ReplayWhen,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    drafts: dict[str, Any],
) -> None:
    replayed = dict.fromkeys(draft_depths(drafts["speculative_config"]["num_speculative_tokens"]), 0)
    sample_with, sample_without = DraftSteps._sample, StepGraphs._replay_end

    def counted_with(self: DraftSteps, *args: Any) -> None:
        replayed[self._num_drafts] += 1
        sample_with(self, *args)

    def counted_without(self: StepGraphs, *args: Any) -> None:
        replayed[0] += 1
        sample_without(self, *args)

    monkeypatch.setattr(DraftSteps, "_sample", counted_with)
    monkeypatch.setattr(StepGraphs, "_replay_end", counted_without)
    prompts = parity_prompts(VOCAB_SIZE)[:60]
    kinds: list[dict[str, Any]] = [
        *[{}] * 20,
        {"logprobs": 2, "max_tokens": 9},
        {"repetition_penalty": 1.3, "max_tokens": 9},
        {"stop_token_ids": list(range(0, VOCAB_SIZE, 50)), "ignore_eos": False},
    ]
    params = [
        SamplingParams(
            **{"temperature": 0.0, "ignore_eos": True, "max_tokens": 3 + 11 * (index % 11)}
            | kinds[index % len(kinds)]
        )
        for index in range(len(prompts))
    ]
    answers: list[Any] = []
    options: dict[str, Any] = {
        "num_gpu_blocks_override": scaled_blocks(model, 500),
        # Only full graphs of any mix come with those of decodes with drafts and without.
        "compilation_config": {**GRAPHS, "cudagraph_mode": "FULL"},
    }
    with make_replaying(model, **options, **drafts) as llm:
        # Of each number of drafts, about twelve steps are replayed, and half of them where half of all are.
        for wanted, least in ((is_never, 0), (lambda _: True, 6), (is_random(2), 3)):
            monkeypatch.setattr(DraftDepth, "choose", choose_at_random(8))
            # vLLM takes seeds of requests without one from here; those of synthetic acceptance, too.
            np.random.seed(8)
            replay_when(wanted)
            assert llm.reset_prefix_cache()
            before = dict(replayed)
            answers.append(said(generate(llm, prompts, params)))
            grown = [replayed[depth] - before[depth] for depth in replayed]
            assert min(grown) >= least and (least or not any(grown)), grown
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.usage == 0.0
    assert answers[1] == answers[0] and answers[2] == answers[0]


@pytest.mark.parametrize("drafts", [n_grams, of_head], ids=["n-grams", "EAGLE-3"])
def test_drafts_that_never_pay_are_left_out(
    make_replaying: MakeReplaying, drafts: Callable[..., dict[str, Any]]
) -> None:
    prompts = [prompt for prompt in parity_prompts(VOCAB_SIZE) if len(prompt) < 100][:32]
    never = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.0}
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    with make_replaying("Qwen3", **drafts(7, is_adaptive=True, **never)) as llm:
        generate(llm, prompts, params)
        drafted, _ = draft_counts(llm)
        # Until the two have been compared.
        assert 0 < drafted < 0.3 * 7 * 300 * len(prompts)


@pytest.mark.parametrize("drafts", [n_grams, of_head], ids=["n-grams", "EAGLE-3"])
@pytest.mark.parametrize("is_async", [True, False])
def test_most_steps_with_drafts_are_replayed(
    make_replaying: MakeReplaying, is_async: bool, drafts: Callable[..., dict[str, Any]]
) -> None:
    prompts = [prompt for prompt in parity_prompts(VOCAB_SIZE) if len(prompt) < 100][:32]
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    options = {} if is_async else {"async_scheduling": False}
    with make_replaying("Qwen3", **drafts(3), **options) as llm:
        config = llm.llm_engine.vllm_config
        assert config.scheduler_config.async_scheduling == is_async
        STEPS.vllm.clear()
        before = STEPS.rose
        generate(llm, prompts, params)
        replayed = STEPS.rose - before
        assert replayed > 20 and sum(STEPS.vllm.values()) < 0.2 * replayed, STEPS


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_synthetic_acceptance_is_vllms(
    make_replaying: MakeReplaying, replay_when: ReplayWhen, num_drafts: int
) -> None:
    prompts = [prompt for prompt in parity_prompts(VOCAB_SIZE) if len(prompt) < 100][:40]
    params = [
        SamplingParams(temperature=index % 2 * 0.8, seed=index, max_tokens=120, ignore_eos=True)
        for index in range(len(prompts))
    ]
    answers, accepted = [], []
    with make_replaying("Qwen3", **n_grams(num_drafts, **synthetic(num_drafts))) as llm:
        for wanted in (is_never, lambda _: True, is_random(3)):
            replay_when(wanted)
            assert llm.reset_prefix_cache()
            before, drafted = STEPS.rose, draft_counts(llm)
            answers.append(said(generate(llm, prompts, params)))
            now = draft_counts(llm)
            accepted.append((now[1] - drafted[1]) / (now[0] - drafted[0]))
            assert (STEPS.rose > before) == (wanted is not is_never), STEPS
    for others in answers[1:]:
        assert [index for index, said_so in enumerate(answers[0]) if said_so != others[index]] == []
    assert accepted[1:] == accepted[:1] * 2
    assert 0.65 < accepted[0] < 0.85


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        *(("Qwen3", n_grams(3)), ("GPT-2", n_grams(3))),
        ("Qwen3", of_head(3, **synthetic(3))),
    ],
    ids=["Qwen3", "GPT-2", "EAGLE-3"],
)
def test_requests_with_drafts_come_and_go(
    make_replaying: MakeReplaying,
    replay_when: ReplayWhen,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    drafts: dict[str, Any],
) -> None:
    """And are aborted, beside prompts that are computed in chunks."""
    monkeypatch.setattr(
        sys.modules[__name__],
        "params_of_every_kind",
        lambda count, one_in: params_beside_drafts(count, is_plain=False),
    )
    prompts = [prompt for prompt in parity_prompts(VOCAB_SIZE) if len(prompt) < 300]
    answers = []
    STEPS.vllm.clear()
    options = {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 400}
    with make_replaying(model, **options, **drafts) as llm:
        for wanted in (is_never, lambda _: True, is_random(3)):
            replay_when(wanted)
            assert llm.reset_prefix_cache()
            before = STEPS.rose
            answers.append(come_and_go(llm, prompts, NUM_REQUESTS))
            assert (STEPS.rose - before > NUM_REQUESTS // 8) == (wanted is not is_never), STEPS
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.usage == 0.0
    assert STEPS.vllm.keys() <= LEFT_WITH_DRAFTS | REQUESTS_LEFT_WITH_DRAFTS
    for others in answers[1:]:
        different = [name for name, answer in others.items() if answer != answers[0].get(name)]
        assert different == [] and others.keys() == answers[0].keys()


@pytest.mark.parametrize("model", ["GPT-2", "Qwen3", "Qwen3 with vLLM's layers", "gpt-oss"])
def test_rows_that_begin_in_turns_say_the_same_to_the_bit(
    make_replaying: MakeReplaying, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    prompts = parity_prompts(VOCAB_SIZE)[:40]
    params = params_of_every_kind(len(prompts))
    answers: list[Any] = []
    were_captured: list[bool] = []
    order = paged_decode.longest_first

    def counted(lengths: torch.Tensor) -> torch.Tensor:
        were_captured.append(torch.cuda.is_current_stream_capturing())
        return order(lengths)

    monkeypatch.setattr(paged_decode, "longest_first", counted)
    for in_turns in (False, True):
        with monkeypatch.context() as patches:
            if in_turns:
                # As if the rows of the tiny model were too many to begin all at once.
                patches.setattr(paged_decode, "begins_in_turns", lambda *_: True)
            with make_replaying(model) as llm:
                before = STEPS.rose
                answers.append(said(generate(llm, prompts, params)))
                assert STEPS.rose > before, STEPS
        assert bool(were_captured) == in_turns
    # In graphs, and in front of each in the run that compiles its kernels.
    assert set(were_captured) == {False, True}
    assert answers[1] == answers[0]


def come_and_go(llm: Any, prompts: Any, num_requests: int) -> dict[str, list[Any]]:
    """Run requests of every kind that arrive and are aborted at random, the same in each call; return the answers.

    What an aborted request has said until then is part of them.
    """
    choose = random.Random(7)
    params = params_of_every_kind(220, one_in=11)
    engine, said_so_far = llm.llm_engine, {}
    waiting, running = iter(range(num_requests)), set()
    is_complete = False
    while not is_complete or engine.has_unfinished_requests():
        # In bursts, with steps between them that nobody joins.
        for _ in range(choose.choice((1, 2, 5, 12)) if choose.random() < 0.06 else 0):
            index = next(waiting, None)
            if index is None:
                is_complete = True
                break
            prompt = prompts[choose.randrange(len(prompts))]
            running.add(name := f"{num_requests}-{index}")
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, params[index % len(params)])
        if running and choose.random() < 0.005:
            aborted = choose.choice(sorted(running))
            running.discard(aborted)
            engine.abort_request([aborted])
        for output in engine.step():
            said_so_far[output.request_id] = said([output])
            if output.finished:
                running.discard(output.request_id)
    return said_so_far


@pytest.mark.parametrize("model", MODELS)
def test_requests_that_come_and_go_get_the_same_answers(
    make_replaying: MakeReplaying, replay_when: ReplayWhen, model: str
) -> None:
    prompts = [prompt for prompt in parity_prompts(VOCAB_SIZE) if len(prompt) < 300]
    answers = []
    STEPS.vllm.clear()
    with make_replaying(model, num_gpu_blocks_override=scaled_blocks(model, 400)) as llm:
        check_groups(llm, model)
        for wanted in (is_never, lambda _: True, is_random(3)):
            replay_when(wanted)
            assert llm.reset_prefix_cache()
            before = STEPS.rose
            answers.append(come_and_go(llm, prompts, NUM_REQUESTS))
            assert (STEPS.rose - before > NUM_REQUESTS // 4) == (wanted is not is_never), STEPS
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.usage == 0.0 and min(manager.stats.clones, manager.stats.evictions) > 0
        assert (manager.stats.checkpoints > 0) == (model in NUM_STATE_GROUPS)
    assert STEPS.vllm.keys() <= REPLAYED_BUT_FOR
    assert len(answers[0]) > 0.9 * NUM_REQUESTS
    for others in answers[1:]:
        different = [name for name, answer in others.items() if answer != answers[0].get(name)]
        assert different == [] and others.keys() == answers[0].keys()


@needs_two_gpus
@pytest.mark.parametrize("model", ["Qwen3", "Llama"])
def test_two_gpus_replay_the_same_steps(
    make_replaying: MakeReplaying, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    prompts = [prompt for prompt in parity_prompts(VOCAB_SIZE) if len(prompt) < 300]
    compilation = {**MODELS[model][1]["compilation_config"], "pass_config": {"fuse_allreduce_rms": False}}
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 400,
        "tensor_parallel_size": 2,
        # Answers of other processes come at any time, and the next step would be made before or after.
        "async_scheduling": False,
        "compilation_config": compilation,
    }
    answers = []
    with make_replaying(model, **options) as llm:
        for rule in ("never", "always", "at random"):
            before = llm.collective_rpc(set_rule_of_worker, args=(rule,))
            assert llm.reset_prefix_cache()
            answers.append(come_and_go(llm, prompts, NUM_REQUESTS))
            after = llm.collective_rpc(set_rule_of_worker, args=("never",))
            assert before[0] == before[1] and after[0] == after[1]
            assert (after[0] - before[0] > NUM_REQUESTS // 4) == (rule != "never")
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.usage == 0.0 and min(manager.stats.clones, manager.stats.evictions) > 0
    assert len(answers[0]) > 0.9 * NUM_REQUESTS
    assert answers[1] == answers[0] and answers[2] == answers[0]


@needs_two_gpus
@pytest.mark.parametrize("parallel", ["--enable-expert-parallel", "--no-enable-expert-parallel"])
@pytest.mark.parametrize("graphs", ["of any mix", "of decodes only"])
def test_data_parallel_ranks_replay_the_steps_of_their_experts_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str, graphs: str
) -> None:
    """Ranks that idle, compute prompts, or have more requests than graphs take meet ranks that only decode."""
    # vLLM's kernel of experts multiplies float32 as Triton does by default, in TF32, whose errors are too large.
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    path = write_random_qwen3_moe(tmp_path / "model")
    prompts, _ = mixed_prompts(VOCAB_SIZE, max_len=400)
    options: dict[str, Any] = {"max_num_batched_tokens": 512, **GPU_MEMORY}
    if graphs == "of decodes only":
        sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16], "cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}
        options["compilation_config"] = sizes
    arguments = ["--attention-backend", "rose", "--dtype", "float32", parallel, "--data-parallel-size", "2"]
    with running_server(path, tmp_path / "log", *arguments, *as_flags(options)) as server:

        def ask(index: int) -> list[int]:
            response = server.post(
                "/v1/completions",
                model=str(path),
                prompt=list(prompts[index]),
                max_tokens=8 + index % 50,
                temperature=0,
                ignore_eos=True,
                return_token_ids=True,
            )
            assert response.status_code == 200, response.text
            tokens: list[int] = response.json()["choices"][0]["token_ids"]
            return tokens

        replayed: dict[str, int] = {}
        start = time.monotonic()
        while time.monotonic() < start + HANG_S and sum(count > 300 for count in replayed.values()) < 2:
            # The first: one rank has nothing to do. The last: no graph takes as many.
            for num_requests in (1, 2, 7, 24, 3, 64):
                with ThreadPoolExecutor(num_requests) as pool:
                    answers = list(pool.map(ask, range(num_requests)))
                judged = judge(path, prompts[:num_requests], answers)
                assert wrong_tokens(judged, 1e-3) == []
            # Of each worker, its last count.
            counts = re.findall(r"pid=(\d+)\).* steps since start-up: (\d+) replayed whole", server.log)
            replayed = {pid: int(count) for pid, count in counts}
        assert min(replayed.values(), default=0) > 300 and len(replayed) == 2, server.log[-4000:]


@pytest.mark.parametrize("model", NUM_GROUPS)
def test_windows_let_go_of_blocks_while_steps_are_replayed(
    make_replaying: MakeReplaying, replay_when: ReplayWhen, model: str
) -> None:
    """Long answers in a pool that holds them only because windows slide on; their blocks go to others at once."""
    block_size, num_new_tokens = 16, 400
    prompts = [prompt[:length] for prompt in parity_prompts(VOCAB_SIZE) for length in (30, 64, 100, 131)][:48]
    longest = max(map(len, prompts))
    params = [
        SamplingParams(
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=num_new_tokens - 37 * (index % 5),
            ignore_eos=True,
        )
        for index in range(len(prompts))
    ]
    columns = -(-(longest + num_new_tokens) // block_size)
    # What a window reaches, which may begin inside a block, and the block that a run-ahead step may be given.
    windowed = -(-(random_checkpoints.SLIDING_WINDOW - 1) // block_size) + 2
    # vLLM has a graph of decodes for so many.
    at_once = 8
    num_blocks = 1 + at_once * (columns + (NUM_GROUPS[model] - 1) * windowed)
    answers = []
    with make_replaying(model, num_gpu_blocks_override=num_blocks, max_num_seqs=at_once) as llm:
        check_groups(llm, model)
        preempted = count_preemptions(scheduler_of(llm))
        for wanted in (is_never, lambda _: True, is_random(5)):
            replay_when(wanted)
            assert llm.reset_prefix_cache()
            before = STEPS.rose
            answers.append(said(generate(llm, prompts, params)))
            # Six waves of eight, with a step of prompts where one begins.
            assert (STEPS.rose - before > num_new_tokens) == (wanted is not is_never), STEPS
            assert not preempted
        manager = manager_of(llm)
        manager.check_integrity()
        # What windows have passed stays to be found until it is needed.
        assert manager.usage == 0.0 and manager.stats.evictions > 0
    # Without windows that let go, not half of the requests would fit.
    assert at_once * columns * NUM_GROUPS[model] > num_blocks
    assert answers[1] == answers[0] and answers[2] == answers[0]


def kinds_of_short_requests() -> tuple[list[SamplingParams], list[SamplingParams]]:
    """Return plain requests, and those of every kind that asks for more than a draw."""
    plain: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.2},
        {"temperature": 0.0, "stop_token_ids": list(range(0, VOCAB_SIZE, 50)), "ignore_eos": False},
        {"temperature": 0.7, "n": 3},
        {"temperature": 0.0, "stop": ["e", "th"], "ignore_eos": False},
    ]
    special: list[dict[str, Any]] = [
        {"temperature": 0.0, "min_tokens": 1, "stop_token_ids": list(range(0, VOCAB_SIZE, 10))},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.8, "frequency_penalty": 0.5},
        {"temperature": 0.8, "logprobs": 3},
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 7: -3.0}},
        {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
        {
            **{"temperature": 0.8, "logprobs": 2, "repetition_penalty": 1.2},
            "structured_outputs": StructuredOutputsParams(regex="[a-e]{2,9}"),
        },
    ]

    def params_of(kinds: list[dict[str, Any]], longest: int) -> list[SamplingParams]:
        return [
            SamplingParams(
                **{
                    "ignore_eos": True,
                    "max_tokens": 1 + index % longest,
                    "seed": index,
                    **kinds[index % len(kinds)],
                }
            )
            for index in range(longest * len(kinds))
        ]

    return params_of(plain, 17), params_of(special, 5)


def come_in_waves(llm: Any, prompts: Any, num_requests: int) -> dict[str, list[Any]]:
    """Run short requests that arrive in waves, the same in each call; return the answers, see ``come_and_go``.

    Some waves have requests whose steps are vLLM's; some are more than fit at once.
    """
    choose = random.Random(11)
    plain, special = kinds_of_short_requests()
    engine, said_so_far, running = llm.llm_engine, {}, {}
    num_added = 0
    while num_added < num_requests or engine.has_unfinished_requests():
        if num_added < num_requests and choose.random() < 0.07:
            is_mixed = choose.random() < 0.3
            for _ in range(min(choose.choice((3, 12, 25, 70)), num_requests - num_added)):
                kinds = special if is_mixed and choose.random() < 0.4 else plain
                # Shared up to any token.
                stem = choose.choice(prompts)[: choose.randrange(1, 60)]
                prompt = [*stem, *choose.choices(range(1, VOCAB_SIZE), k=choose.randrange(12))]
                name, params = f"wave-{num_added}", kinds[num_added % len(kinds)]
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
                running[name] = None
                num_added += 1
        if running and choose.random() < 0.02:
            aborted = choose.choice(list(running))
            del running[aborted]
            engine.abort_request([aborted])
        for output in engine.step():
            said_so_far[output.request_id] = said([output])
            if output.finished:
                running.pop(output.request_id, None)
    # A stop string is found while a step of its request is in flight, and its blocks are released behind that.
    for _ in range(3):
        engine.step()
    return said_so_far


def memory_while_decoding(llm: Any, num_steps: int) -> list[tuple[int, int]]:
    """Replay ``num_steps`` steps and more; return the bytes in use after each round, of the device and pinned ones."""
    engine, sizes, end = llm.llm_engine, [], STEPS.rose + num_steps
    while STEPS.rose < end:
        for index in range(3):
            params = SamplingParams(
                temperature=0.0, max_tokens=300 + 40 * index, ignore_eos=True, detokenize=False
            )
            engine.add_request(f"{STEPS.rose}-{index}", {"prompt_token_ids": [5 + index] * 20}, params)
        while engine.has_unfinished_requests():
            engine.step()
        torch.cuda.synchronize()
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        sizes.append((torch.cuda.memory_allocated(), pinned))
    return sizes


@pytest.mark.parametrize(
    ("model", "num_steps"), [("GPT-2", 100_000), ("Qwen3", 10_000), ("Llama", 10_000), ("gpt-oss", 10_000)]
)
def test_a_long_day(
    make_replaying: MakeReplaying, replay_when: ReplayWhen, model: str, num_steps: int
) -> None:
    """10,000 requests say the same to the bit whether steps alternate or not; then memory does not grow."""
    num_requests = 10_000
    prompts = [prompt for prompt in parity_prompts(VOCAB_SIZE) if len(prompt) > 100]
    with make_replaying(model, num_gpu_blocks_override=scaled_blocks(model, 90)) as llm:
        check_groups(llm, model)
        scheduler = scheduler_of(llm)
        # A grammar that is ready at some time decides at which step its request comes.
        scheduler.structured_output_manager._use_async_grammar_compilation = False
        preempted = count_preemptions(scheduler)
        answers = []
        for wanted in (is_never, is_random(4)):
            replay_when(wanted)
            assert llm.reset_prefix_cache()
            before = STEPS.rose
            answers.append(come_in_waves(llm, prompts, num_requests))
        assert STEPS.rose - before > 300, STEPS
        manager = scheduler.kv_cache_manager.manager
        manager.check_integrity()
        assert manager.usage == 0.0
        assert len(preempted) > 5 and min(manager.stats.clones, manager.stats.evictions) > 1000
        different = [name for name, answer in answers[1].items() if answer != answers[0].get(name)]
        assert different == [] and len(answers[0]) == len(answers[1]) > 0.9 * num_requests
        replay_when(lambda _: True)
        sizes = memory_while_decoding(llm, num_steps)
    assert len(sizes) > 8 and sizes[-1][0] <= sizes[5][0] and sizes[-1][1] <= sizes[5][1] + (64 << 10), sizes


@pytest.mark.parametrize(
    "model", ["Qwen3", "Llama", "Qwen3 with vLLM's layers"]
)  # with and without a tied head
def test_new_weights_speak_in_replayed_steps(make_engine: MakeEngine, tmp_path: Path, model: str) -> None:
    kind, graphs = MODELS[model]
    write: Any = WRITERS[kind]
    old, new = write(tmp_path / "old"), write(tmp_path / "new", seed=1)
    prompts = parity_prompts(VOCAB_SIZE)[:16]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float16", "enforce_eager": False, **graphs, **GPU_MEMORY}

    def run(llm: Any) -> list[Any]:
        before = STEPS.rose
        answers = [output.outputs[0].token_ids for output in generate(llm, prompts, params)]
        assert STEPS.rose > before, STEPS
        return answers

    with make_engine(model=str(new), **options) as llm:
        assert has_roses_layers(llm) == (model in ROSES_LAYERS)
        expected = run(llm)
    with make_engine(model=str(old), **options) as llm:
        first = run(llm)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
        assert llm.reset_prefix_cache()
        assert run(llm) == expected != first
        # As trainers do it, without any other call.
        weights = list(load_file(old / "model.safetensors", device="cuda").items())
        llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights(weights))
        assert llm.reset_prefix_cache()
        assert run(llm) == first


def test_requests_with_grammars_say_the_same_to_the_bit(
    make_engine: MakeEngine, replay_when: ReplayWhen
) -> None:
    prompts = parity_prompts(VOCAB_SIZE)[:24]
    grammars = (
        None,
        {"choice": ["yes", "no"]},
        {"regex": "[a-e ]{5,25}"},
        {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 9}},
    )
    extras: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.9, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.4, "min_tokens": 4},
    )
    params = [
        SamplingParams(
            seed=index,
            max_tokens=5 + 3 * (index % 9),
            structured_outputs=grammar and StructuredOutputsParams(**grammar),
            **extras[index % len(extras)],
        )
        for index, grammar in ((index, grammars[index % len(grammars)]) for index in range(len(prompts)))
    ]
    answers: list[Any] = []
    STEPS.vllm.clear()
    with make_engine(enforce_eager=False, compilation_config=GRAPHS, **GPU_MEMORY) as llm:
        # A grammar that is ready at some time decides at which step its request comes.
        scheduler_of(llm).structured_output_manager._use_async_grammar_compilation = False
        for wanted in (is_never, lambda _: True, is_random(6)):
            replay_when(wanted)
            assert llm.reset_prefix_cache()
            before = STEPS.rose
            outputs = generate(llm, prompts, params)
            answers.append(said(outputs))
            assert (STEPS.rose > before) == (wanted is not is_never), STEPS
    assert STEPS.vllm.keys() <= REPLAYED_BUT_FOR
    for output, param in zip(outputs, params, strict=True):
        if param.structured_outputs is not None and param.structured_outputs.choice:
            # The prompt's last bytes may be no whole character yet.
            assert output.outputs[0].text.endswith(("yes", "no"))
    assert answers[1] == answers[0] and answers[2] == answers[0]


@pytest.mark.parametrize("loads", ["vLLM's", "some fail"])
def test_offloaded_blocks_come_back_in_replayed_steps(
    make_replaying: MakeReplaying, replay_when: ReplayWhen, monkeypatch: pytest.MonkeyPatch, loads: str
) -> None:
    prompts = parity_prompts(VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    options, reports = ({"kv_offloading_size": 1.0}, None) if loads == "vLLM's" else lose_loads(monkeypatch)
    answers = []
    STEPS.vllm.clear()
    # Few blocks: requests are preempted, and what they had is loaded again.
    options |= {"dtype": "float32", "num_gpu_blocks_override": 200, "disable_log_stats": False}
    with make_replaying("Qwen3", **options) as llm:
        assert has_roses_layers(llm)
        for wanted in (is_never, lambda _: True, is_random(1)):
            replay_when(wanted)
            # What was offloaded stays.
            assert llm.reset_prefix_cache()
            num_replayed, num_hits = STEPS.rose, metrics_of(llm)["vllm:external_prefix_cache_hits"]
            answers.append([output.outputs[0].token_ids for output in generate(llm, prompts, params)])
            assert (STEPS.rose - num_replayed > 40) == (wanted is not is_never), STEPS
            if len(answers) > 1:
                assert metrics_of(llm)["vllm:external_prefix_cache_hits"] - num_hits > 1000
        manager_of(llm).check_integrity()
        path = llm.llm_engine.vllm_config.model_config.model
    assert STEPS.vllm.keys() <= REPLAYED_BUT_FOR and (reports is None or len(reports) > 20)
    # When a load is done varies, and so does which rows are computed together: close tokens may change places.
    judged = judge(path, prompts, answers[0])
    clear = [index for index, output in enumerate(judged) if output.leads.min() > 1e-3]
    assert len(clear) > len(prompts) // 2
    for other in answers[1:]:
        assert [index for index in clear if other[index] != answers[0][index]] == []


@pytest.mark.parametrize(
    ("model", "layers"), [("Qwen3", "Rose's"), ("Llama", "Rose's"), ("Qwen3", "vLLM's")]
)  # with and without a tied head, which Llama's adapters change
def test_adapters_come_and_go_in_replayed_steps(
    make_engine: MakeEngine, tmp_path: Path, model: str, layers: str
) -> None:
    """Three adapters for two places, beside requests without one and with the same prompts.

    vLLM's kernels add parts of a product in any order, so that texts differ at ties, from one run to the next, too.
    """
    base = WRITERS[model](tmp_path / "base")
    models: dict[LoRARequest | None, Path] = {None: base}
    for number in (1, 2, 3):
        path = tmp_path / f"adapter {number}"
        merged = random_checkpoints.write_random_adapter(base, path, seed=number, with_head=model == "Llama")
        models[LoRARequest(path.name, number, str(path))] = merged
    prompts = parity_prompts(VOCAB_SIZE)[:12]
    requests = [adapter for _ in prompts for adapter in models]
    inputs = inputs_of([prompt for prompt in prompts for _ in models])
    params = [
        SamplingParams(temperature=0.0, max_tokens=8 + 5 * (index % 7), ignore_eos=True, logprobs=0)
        for index in range(len(inputs))
    ]
    options: dict[str, Any] = {
        **{"model": str(base), "dtype": "float16", "enforce_eager": False, "max_num_seqs": 32},
        **{"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
        **GPU_MEMORY,
    }

    def judged(llm: Any) -> tuple[list[list[Any]], float]:
        """Return float32's view of the texts with each adapter, and the largest error of a log-probability."""
        outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=requests)
        views, worst = [], 0.0
        for nth, path in enumerate(models.values()):
            completions = [output.outputs[0] for output in outputs[nth :: len(models)]]
            views.append(judge(path, prompts, [list(each.token_ids) for each in completions]))
            worst = max(worst, float(logprob_errors(views[-1], completions).max()))
        return views, worst

    with make_engine(attention_backend="FLASH_ATTN", **options) as llm:
        theirs, error = judged(llm)
    switches = {} if layers == "Rose's" else VLLMS_LAYERS
    with make_engine(additional_config={"rose": switches}, **options) as llm:
        assert has_roses_layers(llm) == (layers == "Rose's")
        STEPS.vllm.clear()
        for number in (1, 2, 3):
            before = STEPS.rose
            ours, worst = judged(llm)
            assert worst < 2 * error
            for mine, stocks in zip(ours, theirs, strict=True):
                assert wrong_tokens(mine, 2 * error) == wrong_tokens(stocks, 2 * error) == []
            assert STEPS.rose > before + 40, STEPS
            llm.llm_engine.remove_lora(number)
        assert STEPS.vllm["an adapter to load"] > 2
        assert STEPS.vllm.keys() <= REPLAYED_BUT_FOR | {"an adapter to load"}
        manager_of(llm).check_integrity()


def test_both_kinds_of_steps_say_the_same_to_the_bit_beside_adapters(
    make_engine: MakeEngine, replay_when: ReplayWhen, tmp_path: Path
) -> None:
    """Of Rose's layers, whose products with adapters do not depend on the order in which a GPU gets to their parts."""
    base = WRITERS["Qwen3"](tmp_path / "base")
    adapters: list[LoRARequest | None] = [None]
    for number in (1, 2):
        path = tmp_path / f"adapter {number}"
        random_checkpoints.write_random_adapter(base, path, rank=8 * number, seed=number)
        adapters.append(LoRARequest(path.name, number, str(path)))
    prompts = parity_prompts(VOCAB_SIZE)[:48]
    params = params_of_every_kind(len(prompts))
    # In turns of three, where kinds of requests are in turns of two and four.
    requests = [adapters[index % 3] for index in range(len(prompts))]
    answers = []
    with make_engine(
        **{"model": str(base), "dtype": "float16", "enforce_eager": False, "max_num_seqs": 48},
        **{"enable_lora": True, "max_loras": 2, "max_lora_rank": 16},
        **GPU_MEMORY,
    ) as llm:
        assert has_roses_layers(llm)
        assert all(llm.llm_engine.add_lora(each) for each in adapters if each is not None)
        for wanted in (is_never, is_random(1), lambda _: True):
            replay_when(wanted)
            assert llm.reset_prefix_cache()
            before = STEPS.rose
            outputs = llm.generate(inputs_of(prompts), params, use_tqdm=False, lora_request=requests)
            answers.append(said(outputs))
            assert (STEPS.rose > before) == (wanted is not is_never), STEPS
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def test_switched_off_nothing_is_replayed(make_engine: MakeEngine) -> None:
    prompts = parity_prompts(VOCAB_SIZE)[:8]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options = {"additional_config": {"rose": {"step_graph": False}}, "compilation_config": GRAPHS}
    with make_engine(enforce_eager=False, **options, **GPU_MEMORY) as llm:
        before = (STEPS.rose, dict(STEPS.vllm))
        generate(llm, prompts, params)
        assert (STEPS.rose, STEPS.vllm) == before


def test_captures_follow_what_fills_their_tensors(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy GPU, tensors that are filled on one stream were read on another before, and indices were garbage."""
    create, capture, filled = StepGraphs.__init__, CapturedGraphs.capture, []

    def create_slowly(self: StepGraphs, runner: Any) -> None:
        torch.cuda._sleep(1_000_000_000)
        create(self, runner)
        filled.append(torch.cuda.current_stream().record_event())

    def capture_afterwards(self: CapturedGraphs[Any], *args: Any, **kwargs: Any) -> None:
        if filled:
            torch.cuda.current_stream().synchronize()
            filled.append(filled[0].query())
        capture(self, *args, **kwargs)

    monkeypatch.setattr(StepGraphs, "__init__", create_slowly)
    monkeypatch.setattr(CapturedGraphs, "capture", capture_afterwards)
    with make_engine(enforce_eager=False, compilation_config=GRAPHS, **GPU_MEMORY):
        assert filled[1:] == [True, True]


def test_memory_does_not_grow(make_engine: MakeEngine) -> None:
    """Thousands of steps with requests that come and go take no memory of the device or of pinned host memory."""
    prompts = parity_prompts(VOCAB_SIZE)[:40]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40 + 3 * index, ignore_eos=True)
        for index in range(len(prompts))
    ]
    with make_engine(enforce_eager=False, compilation_config=GRAPHS, **GPU_MEMORY) as llm:
        sizes = []
        # A round has about 160 steps.
        for _ in range(max(NUM_STEPS // 160, 12)):
            generate(llm, prompts, params)
            torch.cuda.synchronize()
            sizes.append(
                (torch.cuda.memory_allocated(), torch.cuda.host_memory_stats()["allocated_bytes.current"])
            )
        # A pinned buffer of each step would be 700 KiB by now; vLLM itself keeps a little.
        assert sizes[-1][0] <= sizes[3][0] and sizes[-1][1] <= sizes[3][1] + (64 << 10), sizes
