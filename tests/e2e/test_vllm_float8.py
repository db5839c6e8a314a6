"""Float8 checkpoints inside vLLM with Rose's layers, on a CPU: vLLM's methods load them, its kernels are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from rose_backend.errors import ModelError
from rose_backend.kernels import Float8Weight
from rose_backend.kernels.arguments import MAX_ROWS
from rose_backend.vllm_plugin.models import decoder
from tests.e2e.conftest import MakeEngine
from tests.support.llama_checkpoints import VOCAB_SIZE
from tests.support.quantized_checkpoints import FORMATS, KEPT, write_pair
from tests.support.quantized_engines import GREEDY, assert_right, complete, linears
from tests.support.random_checkpoints import write_random_adapter
from tests.support.reference_generation import Prompts, parity_prompts
from tests.support.vllm_engines import inputs_of, runner_of
from tests.support.vllm_plugin.float8_on_cpu import Float8OnCpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_vllm_gpu_quantized.py is for GPUs")

ONE_SCALE = ("fp8", "modelopt", "compressed-tensors tensor")
"""vLLM rounds parts of a fused module again, to one scale."""


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return parity_prompts(VOCAB_SIZE)[:10]


@pytest.mark.parametrize(
    ("family", "form"),
    [*(("qwen3", form) for form in FORMATS), ("llama-biases", FORMATS[0]), ("qwen2", FORMATS[2])],
)
def test_both_ways_compute_what_the_checkpoint_says(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Prompts,
    packed: list[Any],
    family: str,
    form: str,
) -> None:
    # vLLM's Qwen2 divides the width by the number of heads.
    path, dense = write_pair(tmp_path, family, form, **({"head_dim": 48} if family == "qwen2" else {}))
    vllms = Float8OnCpu(monkeypatch)
    answers = []
    for rows in (None, 0):
        packed.clear()
        vllms.rows.clear()
        options = {"additional_config": {"rose": {"max_quantized_rows": rows}}}
        with make_engine(model=str(path), **options) as llm:
            pairs = linears(llm)
            answers.append(complete(llm, prompts))
        assert bool(packed) == (rows is None) and vllms.rows
        is_float8 = [isinstance(linear.weight, Float8Weight) for _, linear in pairs]
        assert is_float8 == [True] * 7 + [False] and "layers.1.mlp.down_proj" in KEPT
        for module, linear in pairs[:7]:
            # In memory once, as vLLM has it.
            assert linear.packed.weight is linear.weight
            assert linear.weight.values.data_ptr() == module.weight.data_ptr()
            assert linear.weight.has_blocks == ("block" in form)
    if form not in ONE_SCALE:
        assert_right(dense, prompts, answers[0])
    assert [each.token_ids for each in answers[0]] == [each.token_ids for each in answers[1]]


@pytest.mark.parametrize(("rows", "num_prompts", "by_rose"), [(3, 3, True), (3, 4, False), (0, 1, False)])
def test_the_option_says_how_many_decodes_are_roses(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packed: list[Any],
    rows: int,
    num_prompts: int,
    by_rose: bool,
) -> None:
    path, dense = write_pair(tmp_path, "qwen3", "fp8 blocks")
    vllms = Float8OnCpu(monkeypatch)
    few: Prompts = tuple((5 + index, 9, 2) for index in range(num_prompts))
    with make_engine(model=str(path), additional_config={"rose": {"max_quantized_rows": rows}}) as llm:
        assert_right(dense, few, complete(llm, few))
    # All prompts are one step. Their decodes are of one row each.
    assert vllms.rows[0] == 3 * num_prompts
    assert bool(packed) is by_rose and (num_prompts in vllms.rows) is not by_rose


def test_switched_off(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: Prompts
) -> None:
    path, dense = write_pair(tmp_path, "qwen3", "fp8 blocks")
    Float8OnCpu(monkeypatch)
    with make_engine(model=str(path), additional_config={"rose": {"quantized_layers": False}}) as llm:
        assert not isinstance(runner_of(llm).model, decoder.RoseDecoder)
        assert_right(dense, prompts, complete(llm, prompts))


class UnreadWeights:
    """Ways in which a weight cannot be read, each with what is said of it."""

    REARRANGED = "Fp8LinearMethod with MarlinFP8ScaledMMLinearKernel"
    NAN = "a weight that is not a number"


def spoil(path: Path, module: str) -> None:
    """Put a NaN code into a matrix of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    tensors[f"{module}.weight"].view(torch.uint8)[1, 2] = 0xFF
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("reason", [UnreadWeights.REARRANGED, UnreadWeights.NAN])
def test_one_weight_that_cannot_be_read_leaves_all_products_to_vllm(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Prompts,
    packed: list[Any],
    reason: str,
) -> None:
    path, dense = write_pair(tmp_path, "qwen3", "fp8 blocks")
    if reason == UnreadWeights.NAN:
        Float8OnCpu(monkeypatch)
        spoil(path, "model.layers.0.mlp.up_proj")
    else:
        Float8OnCpu(monkeypatch, blocks="MarlinFP8ScaledMMLinearKernel")
    said: list[str] = []
    monkeypatch.setattr(decoder.logger, "warning", lambda text, *args: said.append(text % args))
    with make_engine(model=str(path)) as llm:
        answers = complete(llm, prompts)
        if reason == UnreadWeights.REARRANGED:
            assert_right(dense, prompts, answers)
    assert said == [f"All products with float8 weights are vLLM's: {reason}"] and not packed


@pytest.mark.parametrize("form", ["fp8 blocks", "fp8", "compressed-tensors channel"])
def test_reloaded_weights_are_where_the_old_ones_were(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Prompts,
    packed: list[Any],
    form: str,
) -> None:
    Float8OnCpu(monkeypatch)
    paths = [
        write_pair(tmp_path / str(seed), "qwen3", form, seed=seed, tie_word_embeddings=False)[0]
        for seed in range(2)
    ]
    expected = []
    for path in paths:
        with make_engine(model=str(path)) as llm:
            expected.append([each.token_ids for each in complete(llm, prompts)])
    assert expected[0] != expected[1]
    with make_engine(model=str(paths[0])) as llm:
        memory = memory_of(llm)
        for turn in (1, 0, 1):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(paths[turn])})
            assert llm.reset_prefix_cache()
            packed.clear()
            assert [each.token_ids for each in complete(llm, prompts)] == expected[turn]
            assert packed and memory_of(llm) == memory
        spoil(paths[0], "model.layers.1.self_attn.q_proj")
        with pytest.raises(
            ModelError, match="cannot be read by Rose's kernels: a weight that is not a number"
        ):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(paths[0])})


def memory_of(llm: Any) -> list[tuple[int, int]]:
    """Return where float8 weights and their scales are, that captured graphs would read."""
    weights = [linear.weight for _, linear in linears(llm)[:7]]
    # Nothing else is looked for at the addresses of graphs that comes and goes.
    assert all(each.has_nan is None for each in runner_of(llm).model._float8)
    return [(weight.values.data_ptr(), weight.scales.data_ptr()) for weight in weights]


def test_weights_quantized_while_they_are_loaded(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Prompts,
    packed: list[Any],
) -> None:
    _, dense = write_pair(tmp_path, "qwen3", "fp8 blocks")
    answers = []
    for quantization in ("fp8_per_tensor", "fp8_per_block"):
        for rows in (None, 0):
            Float8OnCpu(monkeypatch)
            options = {"additional_config": {"rose": {"max_quantized_rows": rows}}}
            packed.clear()
            with make_engine(model=str(dense), quantization=quantization, **options) as llm:
                assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
                answers.append([each.token_ids for each in complete(llm, prompts)])
            assert bool(packed) == (rows is None)
    assert answers[0] == answers[1] and answers[2] == answers[3]


@pytest.mark.parametrize("form", ["fp8 blocks", "compressed-tensors channel"])
def test_adapters(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Prompts,
    packed: list[Any],
    form: str,
) -> None:
    """Added to what products with float8 weights are, beside requests without one."""
    vllms = Float8OnCpu(monkeypatch)
    path, dense = write_pair(tmp_path, "qwen3", form)
    merged = write_random_adapter(dense, tmp_path / "adapter")
    adapter = LoRARequest("an adapter", 1, str(tmp_path / "adapter"))
    requests = [adapter] * len(prompts) + [None] * len(prompts)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    for rows in (MAX_ROWS, 0):
        packed.clear()
        vllms.rows.clear()
        options = {"additional_config": {"rose": {"max_quantized_rows": rows}}}
        with make_engine(model=str(path), **lora, **options) as llm:
            assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
            outputs = llm.generate(inputs_of(prompts * 2), GREEDY, use_tqdm=False, lora_request=requests)
        answers = [output.outputs[0] for output in outputs]
        assert_right(merged, prompts, answers[: len(prompts)])
        assert_right(dense, prompts, answers[len(prompts) :])
        assert bool(packed) == bool(rows) and vllms.rows
