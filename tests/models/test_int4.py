"""Checkpoints in 4 bits: the same numbers as of a dense checkpoint, in every format; what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_backend import LLM, SamplingParams
from rose_backend.errors import ModelError
from rose_backend.kernels import Int4Weight, quantized_linear, small_batch_linear
from rose_backend.layers.decoder import max_packed_int4_rows, max_packed_rows
from rose_backend.models.base import load_model
from tests.support.half_precision import judge
from tests.support.llama_checkpoints import VOCAB_SIZE, change_json, write_checkpoint
from tests.support.quantized_checkpoints import (
    INT4_FORMATS,
    codes_of,
    describe,
    linears_of,
    packed,
    quantized_in_4_bits,
    write_pair,
)
from tests.support.reference_generation import greedy_differences


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", "pack-quantized 128"),
        ("qwen2", "pack-quantized 32"),
        ("llama-biases", "awq 128 zeros"),
        ("mistral", "gptq 64 zeros"),
    ],
)
@pytest.mark.parametrize("packs", [False, True], ids=["as loaded", "packed"])
def test_answers_are_those_of_the_dense_checkpoint(
    tmp_path: Path, family: str, form: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose_backend.models.base.packs_layers", lambda *_: packs)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    prompts = [[5, 9, 2], list(range(1, 60)), [VOCAB_SIZE - 1]]
    answers = []
    for path in write_pair(tmp_path, family, form):
        with LLM(str(path), device="cpu", dtype="float32") as llm:
            answers.append([output.outputs[0] for output in llm.generate(prompts, params)])
    assert [each.token_ids for each in answers[0]] == [each.token_ids for each in answers[1]]
    if not packs:
        assert [each.logprobs for each in answers[0]] == [each.logprobs for each in answers[1]]


@pytest.mark.parametrize("form", INT4_FORMATS)
def test_every_matrix_is_the_one_that_was_meant(tmp_path: Path, form: str) -> None:
    quantized, dense = write_pair(tmp_path, "qwen3", form)
    model, expected = load_model(quantized), load_model(dense)
    pairs = list(zip(linears_of(model), linears_of(expected), strict=True))
    assert [isinstance(each.weight, Int4Weight) for each, _ in pairs] == [True] * 7 + [False]
    for each, same in pairs[:7]:
        assert isinstance(each.weight, Int4Weight) and isinstance(same.weight, torch.Tensor)
        each.weight.check()
        assert torch.equal(each.weight.dequantized(torch.float32), same.weight.t())
    model.pack_for_small_batches()
    for before, after in zip(pairs, linears_of(model), strict=True):
        if isinstance(before[0].weight, Int4Weight):
            assert after.packed is not None and after.packed.weight is after.weight is before[0].weight


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scales_are_kept_in_their_type(tmp_path: Path, stored: torch.dtype) -> None:
    path, _ = write_pair(tmp_path, "qwen3", INT4_FORMATS[0])
    change_tensors(path, "_scale", lambda tensor: tensor.to(stored))
    kept = torch.float32 if stored is torch.float64 else stored
    for weight in (each.weight for each in linears_of(load_model(path, dtype="bfloat16"))[:7]):
        assert isinstance(weight, Int4Weight) and weight.scales.dtype is kept
    # Of matrices that become one, in a type that has them all.
    other = torch.bfloat16 if stored is torch.float16 else torch.float16
    change_tensors(path, "k_proj.weight_scale", lambda tensor: tensor.to(other))
    joined, alone = (each.weight for each in linears_of(load_model(path, dtype="bfloat16"))[:2])
    assert isinstance(joined, Int4Weight) and joined.scales.dtype is torch.float32
    assert isinstance(alone, Int4Weight) and alone.scales.dtype is kept


@pytest.mark.parametrize("form", [form for form in INT4_FORMATS if form.startswith("pack-quantized")])
def test_codes_are_packed_as_compressed_tensors_packs_them(form: str) -> None:
    """So that a wrong order here is no wrong order there."""
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    scheme = pytest.importorskip("compressed_tensors.quantization").QuantizationScheme
    weight = torch.randn(48, 384, generator=torch.Generator().manual_seed(0))
    stored, meant = quantized_in_4_bits(weight, form)
    (group,) = describe(form, [])["config_groups"].values()
    has_zeros = "weight_zero_point" in stored
    given = {"weight": weight, "weight_scale": stored["weight_scale"].float()}
    if has_zeros:
        # As numbers from -8 on, which is what codes are there.
        zeros = stored["weight_zero_point"].t().contiguous().view(torch.uint8)
        given["weight_zero_point"] = (torch.stack([zeros & 15, zeros >> 4], -1).flatten(1).t() - 8).to(
            torch.int8
        )
    theirs = base.PackedQuantizationCompressor.compress(given, scheme(**group))
    assert set(theirs) == set(stored)
    for name in set(stored) - {"weight_scale"}:
        assert torch.equal(theirs[name], stored[name])
    back = base.PackedQuantizationCompressor.decompress(theirs, scheme(**group))
    assert torch.equal(back["weight"], meant)


def test_codes_are_packed_as_vllm_packs_them() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils")
    weight = torch.randn(48, 384, generator=torch.Generator().manual_seed(0))
    stored, _ = quantized_in_4_bits(weight, "awq 128 zeros")
    codes, _, zeros = codes_of(weight.unflatten(1, (-1, 128)), has_zeros=True)
    assert torch.equal(stored["qweight"], utils.awq_pack(codes.flatten(1).t().int(), 4, 384, 48))
    assert torch.equal(stored["qzeros"], utils.awq_pack(zeros.t().int(), 4, 3, 48))
    stored, _ = quantized_in_4_bits(weight, "gptq_v2 128 zeros")
    assert torch.equal(stored["qweight"], utils.gptq_pack(codes.flatten(1).t().int(), 4, 384, 48))
    assert torch.equal(stored["qzeros"], utils.pack_cols(zeros.t().int(), 4, 3, 48))


def test_a_model_without_memory_has_the_matrices_that_config_json_names(tmp_path: Path) -> None:
    path, _ = write_pair(tmp_path, "qwen3", INT4_FORMATS[0])
    with_weights = load_model(path, device="meta", dtype="float32")
    (path / "model.safetensors").unlink()
    without = load_model(path, device="meta", dtype="float32")
    for model in (with_weights, without):
        assert [isinstance(each.weight, Int4Weight) for each in linears_of(model)] == [True] * 7 + [False]


def test_small_batches_are_larger_with_weights_in_4_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max_packed_rows(4096) < max_packed_int4_rows()
    monkeypatch.setattr("rose_backend.layers.decoder.max_packed_rows", lambda _: 1)
    monkeypatch.setattr("rose_backend.models.base.max_packed_int4_rows", lambda: 2)
    decodes: Any = SimpleNamespace(decodes_only=True)
    for path, most in zip(write_pair(tmp_path, "qwen3", INT4_FORMATS[0]), (2, 1), strict=True):
        model = load_model(path)
        model.pack_for_small_batches()
        first_norms = [model._decoder.first_norm(rows, decodes) for rows in (most, most + 1)]
        assert [norm is not None for norm in first_norms] == [True, False]


def test_prompts_of_few_tokens_are_multiplied_by_roses_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = mock.Mock(side_effect=small_batch_linear), mock.Mock(side_effect=quantized_linear)
    monkeypatch.setattr("rose_backend.layers.linear.small_batch_linear", few)
    monkeypatch.setattr("rose_backend.layers.linear.quantized_linear", many)
    monkeypatch.setattr("rose_backend.models.streaming.max_packed_int4_rows", lambda: 2)
    quantized, dense = write_pair(tmp_path, "qwen3", INT4_FORMATS[0])
    for each, same in list(
        zip(linears_of(load_model(quantized)), linears_of(load_model(dense)), strict=True)
    )[:7]:
        assert each.many_rows is not None and isinstance(same.weight, torch.Tensor)
        for num_rows in (1, 2, 3):
            before = few.call_count, many.call_count
            x = torch.randn(num_rows, each.num_inputs)
            torch.testing.assert_close(each.many_rows(x), x @ same.weight)
            calls = few.call_count - before[0], many.call_count - before[1]
            assert calls == ((1, 0) if num_rows <= 2 else (0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["pack-quantized 128", "pack-quantized 32", "awq 128 zeros"])
def test_on_a_gpu(tmp_path: Path, form: str) -> None:
    """Prompts, and decodes of 150 requests: in float32 the dense tokens, in 16 bits no further off than dense ones."""
    quantized, dense = write_pair(tmp_path, "qwen3", form)
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(1, VOCAB_SIZE, length).tolist()) for length in (1, 17, 300, *[40] * 147)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    errors = {}
    halves = [(path, dtype) for dtype in ("bfloat16", "float16") for path in (quantized, dense)]
    for path, dtype in [(quantized, "float32"), *halves]:
        with LLM(str(path), device="cuda", dtype=dtype, max_num_seqs=160) as llm:
            answers = [output.outputs[0] for output in llm.generate(list(map(list, prompts)), params)]
        tokens = [each.token_ids for each in answers]
        if dtype == "float32":
            assert not (differences := greedy_differences(dense, tuple(prompts), tokens)), differences
            continue
        given = torch.tensor(
            [
                [
                    of_token[token].logprob
                    for of_token, token in zip(each.logprobs, each.token_ids, strict=True)
                ]
                for each in answers
            ]
        )
        truth = torch.stack([each.logprobs for each in judge(dense, tuple(prompts), tokens)])
        errors[path, dtype] = float((given - truth).abs().max())
    for dtype in ("bfloat16", "float16"):
        assert errors[quantized, dtype] <= 2 * errors[dense, dtype]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
GROUPS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def with_weights(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {**GROUPS, **changes}}},
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "bits": 3}, "quantization_config.bits=3 is not supported, allowed are 4"),
        ({**GPTQ, "desc_act": True}, "desc_act=True is not supported, allowed are False, null"),
        (
            {**GPTQ, "checkpoint_format": "marlin"},
            "checkpoint_format='marlin' is not supported, allowed are gptq, gp",
        ),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "quantization_config.dynamic is not supported"),
        ({**GPTQ, "lm_head": True}, "quantization_config.lm_head is not supported"),
        ({**AWQ, "bits": 8}, "quantization_config.bits=8 is not supported, allowed are 4"),
        ({**AWQ, "zero_point": False}, "zero_point=False is not supported, allowed are True"),
        ({**AWQ, "version": "gemv"}, "version='gemv' is not supported, allowed are gemm, GEMM, null"),
        ({**AWQ, "group_size": 16}, "group_size=16 is not supported, allowed are 32, 64, 128, -1"),
        (with_weights(num_bits=8), "weights.num_bits=8 is not supported, allowed are 4"),
        (with_weights(type="float"), "weights.type='float' is not supported, allowed are int, null"),
        (
            with_weights(symmetric=None, group_size=-1),
            "weights.group_size=-1 is not supported, allowed are 32, 64",
        ),
        (with_weights(dynamic=True), "weights.dynamic=True is not supported"),
        (
            with_weights(actorder="group"),
            "weights.actorder='group' is not supported, allowed are null, False",
        ),
        (with_weights(strategy="tensor_group"), "weights.strategy='tensor_group' is not supported"),
        (with_weights(group_size=16), "weights.group_size=16 is not supported, allowed are 32, 64, 128"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_is_refused_by_name(tmp_path: Path, config: Any, message: str) -> None:
    path = write_checkpoint(tmp_path / "model", "llama")
    change_json(path / "config.json", quantization_config=config)
    # Before weights are looked at.
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError) as refused:
        load_model(path)
    assert message in str(refused.value)


def change_tensors(path: Path, ending: str, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    found = {
        name: new.contiguous()
        for name, tensor in tensors.items()
        if name.endswith(ending) and (new := change(tensor)) is not None
    }
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}
    save_file({**kept, **found}, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        (
            "layers.0.self_attn.k_proj.weight_packed",
            lambda tensor: None,
            "q_proj, layers.0.self_attn.k_proj, layers.0.self_attn.v_proj are computed together: all must be quantized",
        ),
        (
            "layers.0.mlp.down_proj.weight_scale",
            lambda tensor: tensor * float("inf"),
            "layers.0.mlp.down_proj has weights or scales that are not numbers",
        ),
        (
            "layers.0.mlp.down_proj.weight_scale",
            lambda tensor: tensor[:, :-1],
            "'model.layers.0.mlp.down_proj.weight_scale' has shape [384, 2], expected [384, 3]",
        ),
        (
            "layers.0.mlp.down_proj.weight_packed",
            lambda tensor: tensor[:, :-1],
            "'model.layers.0.mlp.down_proj.weight_packed' has shape [384, 47], expected [384, 48]",
        ),
        (
            "layers.0.mlp.down_proj.weight_packed",
            lambda tensor: tensor.long(),
            "'model.layers.0.mlp.down_proj.weight_packed' is stored as I64, expected I32",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, ending: str, change: Any, message: str) -> None:
    path, _ = write_pair(tmp_path, "qwen3", INT4_FORMATS[0])
    change_tensors(path, ending, change)
    with pytest.raises(ModelError) as refused:
        load_model(path, dtype="float32")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (
            "k_proj.qzeros",
            "layers.0.self_attn.k_proj is symmetric by config.json, and has other zeros than 8",
        ),
        ("down_proj.g_idx", r"layers.0.mlp.down_proj has its columns in another order \(g_idx\)"),
    ],
)
def test_what_gptq_leaves_to_the_tensors(tmp_path: Path, ending: str, message: str) -> None:
    path, _ = write_pair(tmp_path, "qwen3", "gptq 128")
    change_tensors(path, ending, lambda tensor: tensor.flip(0) if ending.endswith("g_idx") else tensor + 1)
    with pytest.raises(ModelError, match=message):
        load_model(path)
    # Checkpoints without act-order may lack both.
    for name in ("qzeros", "g_idx"):
        change_tensors(path, name, lambda tensor: None)
    assert isinstance(linears_of(load_model(path))[0].weight, Int4Weight)


def test_biases_of_zeros_are_none(tmp_path: Path) -> None:
    path, _ = write_pair(tmp_path, "qwen3", "gptq 128")
    tensors = load_file(path / "model.safetensors")
    bias = tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(384)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert linears_of(load_model(path))[1].bias is None
    bias[7] = 0.5
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"o_proj\.bias' is a bias that config\.json leaves out, and not 0"):
        load_model(path)


def test_a_quantized_head_is_refused(tmp_path: Path) -> None:
    path, _ = write_pair(tmp_path, "qwen3", INT4_FORMATS[0])
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight_packed"] = packed(torch.zeros(VOCAB_SIZE, 384))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor 'lm_head.weight_packed' would not be used"):
        load_model(path)


def test_depths_that_groups_do_not_divide_and_experts_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "narrow", "llama")
    write_groups(path)
    with pytest.raises(ModelError, match=r"v_proj have 64 columns, no multiple of 128 that share a scale"):
        load_model(path, device="meta", dtype="float32")
    path = write_checkpoint(tmp_path / "experts", "qwen3-moe", hidden_size=128, intermediate_size=128)
    write_groups(path)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts in 4 bits are not supported"):
        load_model(path, device="meta", dtype="float32")


def write_groups(path: Path) -> None:
    """Say in a checkpoint's config.json that all of it is in 4 bits, and leave the weights away."""
    change_json(path / "config.json", quantization_config={**with_weights(), "ignore": ["lm_head"]})
    (path / "model.safetensors").unlink()
