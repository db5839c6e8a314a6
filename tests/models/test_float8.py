"""Checkpoints in 8 bits: the same numbers as of a dense checkpoint, in every format; what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_backend import LLM, SamplingParams
from rose_backend.errors import ModelError
from rose_backend.kernels import Float8Experts, Float8Weight, InputQuantization
from rose_backend.layers.linear import Mlp, SparseMlp
from rose_backend.models.base import load_model
from rose_backend.models.quantization import Float8Quantization
from tests.support.half_precision import judge, logprob_errors
from tests.support.llama_checkpoints import NUM_EXPERTS, VOCAB_SIZE, change_json, write_checkpoint
from tests.support.quantized_checkpoints import (
    FORMATS,
    GPU_SIZES,
    linears_of,
    quantize,
    quantizes_inputs,
    write_pair,
)
from tests.support.reference_generation import greedy_differences

EXPERTS: dict[str, Any] = {"moe_intermediate_size": 160}


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("qwen3", form) for form in FORMATS),
        ("llama-biases", FORMATS[0]),
        ("qwen2", FORMATS[2]),
        ("qwen3-moe", "fp8 blocks"),
        ("qwen3-moe", "compressed-tensors block"),
    ],
)
def test_answers_are_those_of_the_dense_checkpoint(tmp_path: Path, family: str, form: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    prompts = [[5, 9, 2], list(range(1, 60)), [VOCAB_SIZE - 1]]
    answers = []
    for path in write_pair(tmp_path, family, form, **(EXPERTS if family == "qwen3-moe" else {})):
        with LLM(str(path), device="cpu", dtype="float32") as llm:
            answers.append([output.outputs[0] for output in llm.generate(prompts, params)])
    assert [each.token_ids for each in answers[0]] == [each.token_ids for each in answers[1]]
    assert [each.logprobs for each in answers[0]] == [each.logprobs for each in answers[1]]


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_kept_as_they_are_stored(tmp_path: Path, form: str) -> None:
    path, _ = write_pair(tmp_path, "qwen3", form)
    stored = load_file(path / "model.safetensors")
    model = load_model(path)
    linears = linears_of(model)
    assert [isinstance(each.weight, Float8Weight) for each in linears] == [True] * 7 + [False]
    qkv = linears[0].weight
    assert isinstance(qkv, Float8Weight)
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(
        qkv.values.view(torch.uint8), torch.cat([stored[name] for name in names]).view(torch.uint8)
    )
    assert qkv.has_blocks == ("block" in form) and qkv.scales.shape == (
        (4, 2) if qkv.has_blocks else (512, 1)
    )
    model.pack_for_small_batches()
    packed = linears_of(model)
    for before, after in zip(linears[:7], packed[:7], strict=True):
        assert after.packed is not None and after.packed.weight is after.weight is before.weight


@pytest.mark.parametrize("form", ["fp8 blocks", "compressed-tensors channel"])
def test_packed_layers_compute_the_same(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    float8, _ = write_pair(tmp_path, "qwen3", form)
    answers = []
    for packs in (False, True):
        if packs:
            monkeypatch.setattr("rose_backend.models.base.packs_layers", lambda *_: True)
        with LLM(str(float8), device="cpu", dtype="float32") as llm:
            answers.append(
                [each.outputs[0].token_ids for each in llm.generate([[5, 9, 2], [7] * 40], params)]
            )
    assert answers[0] == answers[1]


def test_experts_answer_as_transformers_does_with_what_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    float8, dense = write_pair(tmp_path, "qwen3-moe", "fp8 blocks", **EXPERTS)
    prompts = ((5, 9, 2), tuple(range(1, 60)), (VOCAB_SIZE - 1,), (7,) * 40)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for packs in (False, True):
        monkeypatch.setattr("rose_backend.models.base.packs_layers", lambda *_, packs=packs: packs)
        with LLM(str(float8), device="cpu", dtype="float32") as llm:
            tokens = [each.outputs[0].token_ids for each in llm.generate(list(map(list, prompts)), params)]
        assert not (differences := greedy_differences(dense, prompts, tokens)), differences


def test_experts_are_kept_as_they_are_stored(tmp_path: Path) -> None:
    path, _ = write_pair(tmp_path, "qwen3-moe", "fp8 blocks", **EXPERTS)
    stored, model = load_file(path / "model.safetensors"), load_model(path)
    sparse, dense = model.weights.layers[0].mlp, model.weights.layers[1].mlp
    assert isinstance(sparse, SparseMlp) and isinstance(dense, Mlp)
    assert isinstance(sparse.router.weight, torch.Tensor)
    for weight, parts in (
        (sparse.experts.gate_up, ("gate_proj", "up_proj")),
        (sparse.experts.down, ("down_proj",)),
    ):
        assert isinstance(weight, Float8Experts)
        for expert, (place, part) in itertools.product((0, 3, 7), enumerate(parts)):
            name = f"model.layers.0.mlp.experts.{expert}.{part}.weight"
            values, scales = stored[name], stored[f"{name}_scale_inv"].float()
            assert torch.equal(weight.values[expert, place].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(weight.scales[expert, place], scales)


# All experts, as rounding decides which of more a token takes.
ON_GPU = [
    ("qwen3", "fp8 blocks", {}),
    ("qwen3", "compressed-tensors channel", {}),
    ("qwen3-moe", "fp8 blocks", EXPERTS | {"num_experts_per_tok": NUM_EXPERTS}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "form", "changes"), ON_GPU, ids=str)
def test_on_a_gpu(tmp_path: Path, family: str, form: str, changes: dict[str, Any]) -> None:
    """In float32 the dense tokens; in bfloat16 no further off than transformers with activations in 8 bits, too.

    Prompts, and decodes of 150 requests.
    """
    float8, dense = write_pair(tmp_path, family, form, **{**GPU_SIZES, **changes})
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(1, VOCAB_SIZE, length).tolist()) for length in (1, 17, 300, *[40] * 147)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    quantized = quantizes_inputs(float8, by_group=form == "fp8 blocks", dtype=torch.bfloat16)
    for dtype in ("float32", "bfloat16"):
        with LLM(str(float8), device="cuda", dtype=dtype, max_num_seqs=160) as llm:
            answers = [output.outputs[0] for output in llm.generate(list(map(list, prompts)), params)]
        tokens = [each.token_ids for each in answers]
        if dtype == "float32":
            assert not (differences := greedy_differences(dense, tuple(prompts), tokens)), differences
            continue
        truth = judge(dense, tuple(prompts), tokens)
        theirs = judge(dense, tuple(prompts), tokens, change=quantized)
        error = max(
            float((one.logprobs - other.logprobs).abs().max())
            for one, other in zip(truth, theirs, strict=True)
        )
        assert float(logprob_errors(truth, answers).max()) <= 2 * error


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3", "fp8 blocks"), ("llama-biases", "compressed-tensors channel"), ("qwen3-moe", "fp8 blocks")],
)
def test_products_of_activations_in_8_bits(
    tmp_path: Path, family: str, form: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts, and of decodes unless layers are packed, compared with transformers' products of such activations."""
    experts = EXPERTS | {"num_experts_per_tok": NUM_EXPERTS}
    float8, dense = write_pair(tmp_path, family, form, **GPU_SIZES, **(experts if "moe" in family else {}))
    by_group = form == "fp8 blocks"
    quantization = InputQuantization(by_group=by_group, aligned_scales=by_group)
    monkeypatch.setattr("rose_backend.models.streaming.library_quantization", lambda *_: quantization)
    monkeypatch.setattr("rose_backend.models.base._max_packed_rows", lambda *_: 32)
    monkeypatch.setattr("rose_backend.models.base.packs_layers", lambda *_: packs)
    params = SamplingParams(temperature=0.0, max_tokens=4 if not packs else 1, ignore_eos=True, logprobs=0)
    # One of a single token is a decode.
    prompts = ((5, 9, 2), tuple(range(1, 60)), (VOCAB_SIZE - 1, 7))
    with LLM(str(float8), device="cpu", dtype="float32") as llm:
        answers = [output.outputs[0] for output in llm.generate(list(map(list, prompts)), params)]
    tokens = [each.token_ids for each in answers]
    change = quantizes_inputs(float8, by_group=by_group, dtype=torch.float32)
    expected, exact = (judge(dense, prompts, tokens, change=each) for each in (change, None))
    error = float(logprob_errors(expected, answers).max())
    # A number at the border of two codes may become either.
    assert error < 0.1 * float(logprob_errors(exact, answers).max())


def test_a_model_without_memory_has_the_matrices_that_config_json_names(tmp_path: Path) -> None:
    path, _ = write_pair(tmp_path, "qwen3", "fp8 blocks")
    with_weights = load_model(path, device="meta", dtype="float32")
    (path / "model.safetensors").unlink()
    without = load_model(path, device="meta", dtype="float32")
    for model in (with_weights, without):
        assert [isinstance(each.weight, Float8Weight) for each in linears_of(model)] == [True] * 7 + [False]


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1.mlp", "model.layers.1.mlp.down_proj", True),
        ("model.layers.1", "model.layers.11.mlp.down_proj", False),
        ("re:.*down_proj$", "model.layers.1.mlp.down_proj", True),
        ("re:.*down$", "model.layers.1.mlp.down_proj", False),
        ("model.layers.0*", "model.layers.0.mlp.down_proj", True),
        ("down_proj", "model.layers.1.mlp.down_proj", True),
    ],
)
def test_modules_that_are_ignored(pattern: str, module: str, expected: bool) -> None:
    assert Float8Quantization("rows", "weight_scale", ignored=(pattern,)).ignores(module) is expected


COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


def with_weights(**changes: Any) -> dict[str, Any]:
    weights = {**COMPRESSED["config_groups"]["group_0"]["weights"], **changes}
    return {**COMPRESSED, "config_groups": {"group_0": {"weights": weights}}}


REFUSED: list[tuple[Any, str]] = [
    (
        {"bits": 4},
        "quantization_config.quant_method=None is not supported, allowed are fp8, compressed-tensors, ",
    ),
    (
        {"quant_method": "bitsandbytes"},
        "quant_method='bitsandbytes' is not supported, allowed are fp8, compressed-tensors, modelopt",
    ),
    ({"quant_method": ["fp8"]}, "quant_method=['fp8'] is not supported"),
    ("fp8", "quantization_config must be an object, got 'fp8'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported, allowed are e4m3, null"),
    (
        {"quant_method": "fp8", "weight_block_size": [64, 128]},
        "weight_block_size=[64, 128] is not supported, allowed are [128, 128]",
    ),
    (
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        "modules_to_not_convert must be a list of names, got 'lm_head'",
    ),
    (
        {**COMPRESSED, "format": "int-quantized"},
        "format='int-quantized' is not supported, allowed are float-quantized, pack-quantized",
    ),
    ({**COMPRESSED, "config_groups": {}}, "config_groups must have one group, got {}"),
    ({**COMPRESSED, "config_groups": {"a": 5}}, "config_groups.a.weights must be an object, got None"),
    ({**COMPRESSED, "transform_config": {"a": 1}}, "transform_config is not supported"),
    (with_weights(num_bits=4), "config_groups.group_0.weights.num_bits=4 is not supported, allowed are 8"),
    (with_weights(type="int"), "weights.type='int' is not supported, allowed are float"),
    (with_weights(symmetric=False), "weights.symmetric=False is not supported"),
    (
        with_weights(strategy="group"),
        "weights.strategy='group' is not supported, allowed are channel, tensor, block",
    ),
    (with_weights(strategy="block"), "weights.block_structure=None is not supported, allowed are [128, 128]"),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "quant_algo='NVFP4' is not supported, allowed are FP8",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused_by_name(tmp_path: Path, config: Any, message: str) -> None:
    path = write_checkpoint(tmp_path / "model", "llama")
    change_json(path / "config.json", quantization_config=config)
    # Before weights are looked at.
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError) as refused:
        load_model(path)
    assert message in str(refused.value)


def test_a_file_of_modelopt_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path, _ = write_pair(tmp_path, "qwen3", "modelopt")
    change_json(path / "config.json", quantization_config=None)
    assert isinstance(linears_of(load_model(path))[0].weight, Float8Weight)
    change_json(path / "hf_quant_config.json", quantization="FP8")
    with pytest.raises(ModelError, match=r"hf_quant_config.json: quantization must be an object, got 'FP8'"):
        load_model(path)


def change_tensors(path: Path, **changes: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    for name, change in changes.items():
        tensors[name] = change(tensors[name])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "model.layers.0.self_attn.k_proj.weight",
            lambda tensor: tensor.bfloat16(),
            "q_proj, layers.0.self_attn.k_proj, layers.0.self_attn.v_proj are computed together: all must be quantized",
        ),
        (
            "model.layers.1.mlp.up_proj.weight",
            lambda tensor: torch.full_like(tensor.view(torch.uint8), 0x7F).view(tensor.dtype),
            "layers.1.mlp.gate_proj, layers.1.mlp.up_proj has weights or scales that are not numbers",
        ),
        (
            "model.layers.0.mlp.down_proj.weight_scale",
            lambda tensor: tensor * float("inf"),
            "layers.0.mlp.down_proj has weights or scales that are not numbers",
        ),
        (
            "model.layers.0.mlp.down_proj.weight_scale",
            lambda tensor: tensor[:-1],
            "'model.layers.0.mlp.down_proj.weight_scale' has shape [191, 1], expected [192, 1]",
        ),
        (
            "model.embed_tokens.weight",
            lambda tensor: tensor.to(torch.float8_e4m3fn),
            "'model.embed_tokens.weight' is stored as F8_E4M3, which only linear layers",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, change: Any, message: str) -> None:
    path, _ = write_pair(tmp_path, "qwen3", "compressed-tensors channel")
    change_tensors(path, **{name: change})
    with pytest.raises(ModelError) as refused:
        load_model(path, dtype="float32")
    assert message in str(refused.value)


def test_blocks_of_two_matrices_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "llama")  # 64 query rows before 32 of keys
    quantize(path, "fp8 blocks")
    with pytest.raises(
        ModelError, match=r"have \[64, 32, 32\] rows, and all but the last must have a multiple of 128"
    ):
        load_model(path)


@pytest.mark.parametrize(("form", "scales"), [("compressed-tensors channel", "rows"), ("modelopt", "tensor")])
def test_experts_without_scales_of_blocks_are_refused(tmp_path: Path, form: str, scales: str) -> None:
    path = write_checkpoint(tmp_path / "model", "qwen3-moe")
    quantize(path, form)
    with pytest.raises(
        ModelError,
        match=rf"layers\.0\.mlp\.experts in 8 bits with scales of {scales} are not supported, allowed are b",
    ):
        load_model(path)


def test_other_types_without_scales_are_converted_as_before(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "llama")
    change_tensors(
        path, **{"model.layers.0.mlp.down_proj.weight": lambda tensor: tensor.to(torch.float8_e4m3fn)}
    )
    weight = linears_of(load_model(path))[3].weight
    assert isinstance(weight, torch.Tensor) and weight.dtype is torch.float32
    assert json.loads((path / "config.json").read_text()).get("quantization_config") is None
