"""On CUDA: steps that are replayed whole outlast sleep and reloads, and graphs hold no address that nobody has listed.

Sleeping engines have a process of their own: vLLM's allocator serves one engine per process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from rose_backend.draft_depth import DraftDepth
from rose_backend.vllm_plugin.plugin_logger import STEPS
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.eagle_checkpoints import write_eagle3_drafter
from tests.support.graph_pointers import capture_kept, find_strangers
from tests.support.quantized_checkpoints import GPU_SIZES, write_pair
from tests.support.random_checkpoints import (
    VOCAB_SIZE,
    WRITERS,
    write_random_granite_hybrid,
    write_random_lfm2,
    write_random_qwen3,
    write_random_qwen3_next,
)
from tests.support.random_vision_checkpoints import write_random_qwen2_5_vl, write_random_qwen3_vl
from tests.support.reference_generation import parity_prompts
from tests.support.vllm_engines import has_roses_layers, inputs_of

pytestmark = pytest.mark.gpu

GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16], "cudagraph_mode": "FULL"}
VLLMS_LAYERS = {"rose": {"fused_mlp": False, "fused_add_layernorm": False}}
OPTIONS: dict[str, Any] = {
    "enforce_eager": False,
    "max_num_seqs": 16,
    "compilation_config": GRAPHS,
    **GPU_MEMORY,
}
PROMPTS = [prompt for prompt in parity_prompts(VOCAB_SIZE) if len(prompt) < 200][:12]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.8, "min_p": 0.02, "logprobs": 3},
    {"temperature": 0.7, "logit_bias": {5: 4.0, 7: -100.0}, "min_tokens": 3},
)
"""Of every end, and with a report."""
KINDS_BESIDE_DRAFTS = ({"temperature": 0.0}, {"temperature": 0.9}, KINDS[2])
"""Of both ends, and what is left to vLLM's steps; it refuses min-p and bias."""


def said(llm: Any, of: Sequence[dict[str, Any]] = KINDS) -> list[Any]:
    """Return what an engine says to requests of these kinds, all of it from its weights: nothing is cached before."""
    assert llm.reset_prefix_cache()
    answers: list[Any] = []
    for kinds in (of[:1], of[:2], of):
        params = [
            SamplingParams(max_tokens=20, ignore_eos=True, seed=index, **kinds[index % len(kinds)])
            for index in range(len(PROMPTS))
        ]
        # Paused, so that the first step has them all: each time steps are the same.
        llm.sleep(level=0)
        llm.enqueue(inputs_of(PROMPTS), params, use_tqdm=False)
        llm.wake_up(tags=["scheduling"])
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert len(outputs) == len(PROMPTS)
        answers += [tuple(output.outputs[0].token_ids) for output in outputs]
    return answers


# Asked of workers.
def count_replayed(worker: Any) -> int:
    return STEPS.rose


def which_capture(worker: Any) -> int:
    return id(worker.model_runner.cudagraph_manager.rose_step_graphs)


def plant(worker: Any) -> None:
    """Let the product with the head read a tensor that no owner of addresses leads to."""
    # Of the model itself, which gets it back before the next capture.
    steps = worker.model_runner.cudagraph_manager.rose_step_graphs
    multiply, planted = steps._compute_logits, torch.zeros(1 << 16, dtype=torch.float16, device="cuda")
    steps._compute_logits = lambda hidden_states: (
        (logits := multiply(hidden_states)) + planted[: logits.shape[1]]
    )


def move(worker: Any, prefix: str) -> list[str]:
    """Put copies in the place of weights, and spoil what was there, as who sends weights by himself may do."""
    model, moved = worker.model_runner.model, []
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            kept, parameter.data = parameter.data, parameter.data.clone()
            kept.fill_(float("nan") if kept.is_floating_point() else -1)
            moved.append(name)
    worker.model_runner.reset_lora_state()
    return moved


Ask = Callable[..., Any]


def asks(llm: Any) -> Ask:
    """Return a function that asks an engine's only worker."""

    def ask(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        (answer,) = llm.collective_rpc(function, args=args, kwargs=kwargs)
        return answer

    return ask


def assert_no_strangers(ask: Ask) -> None:
    num_graphs, num_known, strangers = ask(find_strangers)
    assert strangers == []
    # Every kernel has addresses.
    assert num_graphs > 30 and num_known > 5 * num_graphs


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def write_quantized(path: Path, form: str, seed: int = 0) -> Path:
    path, _ = write_pair(path, "qwen3", form, vocab_size=VOCAB_SIZE, seed=seed, **GPU_SIZES)
    return path


QUANTIZED_OPTIONS = {"dtype": "bfloat16", "additional_config": {"rose": {"max_quantized_rows": 64}}}
QUANTIZED = {
    form: partial(write_quantized, form=form)
    for form in ("fp8 blocks", "fp8", "compressed-tensors channel", "pack-quantized 128", "awq 128 zeros")
}


@pytest.mark.parametrize("model", ["Qwen3", "Llama", *QUANTIZED])
def test_graphs_hold_what_is_listed_and_nothing_else(
    make_engine: MakeEngine, tmp_path: Path, model: str
) -> None:
    path = {**WRITERS, **QUANTIZED}[model](tmp_path)
    options = OPTIONS | (QUANTIZED_OPTIONS if model in QUANTIZED else {"dtype": "float16"})
    with make_engine(model=str(path), **options) as llm:
        assert has_roses_layers(llm)
        ask, answers = asks(llm), said(llm)
        ask(capture_kept)
        before = ask(count_replayed)
        assert said(llm) == answers and ask(count_replayed) > before
        assert_no_strangers(ask)
        # Everybody else's tensors are looked for, too.
        for prefix in ("model.", "sampler.", "cudagraph_manager.", "Rose's workspace"):
            _, _, strangers = ask(find_strangers, (prefix,))
            assert any("of nobody" in line for line in strangers), (prefix, strangers)
        ask(plant)
        ask(capture_kept)
        _, _, strangers = ask(find_strangers)
        assert strangers and all(line.startswith("end") and "of nobody" in line for line in strangers)


@pytest.mark.parametrize("write", [write_random_qwen3_next, write_random_lfm2, write_random_granite_hybrid])
def test_graphs_hold_what_is_listed_of_layers_with_a_state(
    make_engine: MakeEngine, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    graphs = {**GRAPHS, "cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}
    options = {**OPTIONS, "compilation_config": graphs, "gdn_prefill_backend": "triton", "dtype": "bfloat16"}
    with make_engine(model=str(write(tmp_path)), **options) as llm:
        ask, answers = asks(llm), said(llm)
        captured, before = ask(which_capture), ask(count_replayed)
        # What vLLM makes anew in its own steps has not moved.
        assert ask(move, "no such name") == []
        assert said(llm) == answers
        assert ask(which_capture) == captured and ask(count_replayed) > before + 20
        ask(capture_kept)
        assert said(llm) == answers
        assert_no_strangers(ask)


@pytest.mark.parametrize("write", [write_random_qwen2_5_vl, write_random_qwen3_vl])
def test_graphs_of_multimodal_models_hold_nothing_else(
    make_engine: MakeEngine, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    # Layers as they are written, and no graphs of their parts.
    graphs = {**GRAPHS, "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    options = {**OPTIONS, "compilation_config": graphs}
    with make_engine(model=str(write(tmp_path)), dtype="float16", **options) as llm:
        ask, answers = asks(llm), said(llm)
        ask(capture_kept)
        before = ask(count_replayed)
        assert said(llm) == answers and ask(count_replayed) > before
        assert_no_strangers(ask)
        for prefix in ("model_state.rope_state", "model_state.encoder_runner"):
            _, _, strangers = ask(find_strangers, (prefix,))
            assert any("of nobody" in line for line in strangers), (prefix, strangers)


def move_head(worker: Any) -> None:
    """Do what ``move`` does with the weights of a head."""
    for parameter in worker.model_runner.speculator.model.parameters():
        kept, parameter.data = parameter.data, parameter.data.clone()
        kept.fill_(float("nan") if kept.is_floating_point() else -1)
    worker.model_runner.reset_lora_state()


def test_graphs_of_heads_hold_nothing_else_and_are_captured_again(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts in all steps, and then in those of seeded requests only."""
    path = write_random_qwen3(tmp_path)
    drafter = write_eagle3_drafter(path, 3, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    # Whatever they are, most drafts are accepted.
    drafter |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    options = {**OPTIONS, "runner": "V2", "speculative_config": drafter, "dtype": "float16"}
    with make_engine(model=str(path), **options) as llm:
        ask = asks(llm)

        def said_beside() -> list[Any]:
            answers: list[Any] = []
            for num_drafts in (3, 0):
                monkeypatch.setattr(DraftDepth, "choose", lambda *_, chosen=num_drafts: chosen)
                answers += said(llm, KINDS_BESIDE_DRAFTS)
            return answers

        answers = said_beside()
        ask(capture_kept)
        before = ask(count_replayed)
        assert said_beside() == answers and ask(count_replayed) > before
        assert_no_strangers(ask)
        _, _, strangers = ask(find_strangers, ("speculator.",))
        assert any("of nobody" in line for line in strangers), strangers
        captured, before = ask(which_capture), ask(count_replayed)
        ask(move_head)
        assert said_beside() == answers
        assert ask(which_capture) != captured and ask(count_replayed) > before


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("model", ["Qwen3", *QUANTIZED])
def test_steps_are_replayed_after_sleep_and_reloads(
    make_engine: MakeEngine, tmp_path: Path, model: str
) -> None:
    write = QUANTIZED.get(model, write_random_qwen3)
    old, new = (write(tmp_path / f"{seed}", seed=seed) for seed in range(2))
    options = {**OPTIONS, "enable_sleep_mode": True} | (QUANTIZED_OPTIONS if model in QUANTIZED else {})
    with make_engine(model=str(new), **options) as llm:
        # A fresh engine with the other weights.
        answers_of_new = said(llm)
    with make_engine(model=str(old), **options) as llm:
        assert has_roses_layers(llm)
        ask = asks(llm)
        answers = said(llm)
        assert ask(count_replayed) > 20 and answers != answers_of_new
        ask(capture_kept)
        captured = ask(which_capture)
        for level, tags in ((1, None), (2, None), (2, ["weights"]), (1, None)):
            llm.sleep(level=level)
            llm.wake_up(tags=tags)
            if level == 2:
                ask("reload_weights")
            if tags is not None:
                llm.wake_up(tags=["kv_cache"])
            before = ask(count_replayed)
            assert said(llm) == answers, (level, tags)
            assert ask(count_replayed) > before + 20
            assert_no_strangers(ask)
        for path, expected in ((old, answers), (new, answers_of_new), (old, answers)):
            ask("reload_weights", weights_path=str(path))
            before = ask(count_replayed)
            assert said(llm) == expected, path
            assert ask(count_replayed) > before + 20
        assert_no_strangers(ask)
        # Nothing has moved.
        assert ask(which_capture) == captured


@pytest.mark.parametrize(
    ("prefix", "layers"),
    [
        *(("lm_head", "Rose's"), ("model.norm", "Rose's"), ("", "vLLM's")),
        # Nothing of quantized weights is packed.
        *(("model.layers", form) for form in QUANTIZED),
    ],
)
def test_graphs_are_captured_again_where_weights_have_moved(
    make_engine: MakeEngine, tmp_path: Path, prefix: str, layers: str
) -> None:
    path = QUANTIZED.get(layers, WRITERS["Llama"])(tmp_path)
    options = dict(OPTIONS) | (QUANTIZED_OPTIONS if layers in QUANTIZED else {})
    if layers == "vLLM's":
        options |= {
            "additional_config": VLLMS_LAYERS,
            "compilation_config": {"cudagraph_capture_sizes": GRAPHS["cudagraph_capture_sizes"]},
        }
    with make_engine(model=str(path), **options) as llm:
        assert has_roses_layers(llm) == (layers != "vLLM's")
        ask, answers = asks(llm), said(llm)
        captured, before = ask(which_capture), ask(count_replayed)
        assert ask(move, prefix)
        reasons = dict(STEPS.vllm)
        assert said(llm) == answers
        assert ask(which_capture) != captured and ask(count_replayed) > before + 20
        assert STEPS.vllm.keys() == reasons.keys()
        captured = ask(which_capture)
        assert said(llm) == answers and ask(which_capture) == captured
