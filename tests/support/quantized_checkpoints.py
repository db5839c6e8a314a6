"""Checkpoints whose linear layers are in 8 or 4 bits, in each format, and the dense checkpoints that are equal to them.

Scales, numbers and codes are made by formulas, not by what reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from rose_backend.layers.linear import Linear, Mlp
from rose_backend.models.base import CausalLM
from tests.support.llama_checkpoints import write_checkpoint

FORMATS = (
    "fp8 blocks",
    "fp8",
    "compressed-tensors channel",
    "compressed-tensors block",
    "modelopt",
    "compressed-tensors tensor",
)
INT4_FORMATS = (
    "pack-quantized 128",
    "pack-quantized 64",
    "pack-quantized 32",
    "pack-quantized all",
    "pack-quantized 128 zeros",
    "pack-quantized 64 zeros",
    "pack-quantized all zeros",
    "awq 128 zeros",
    "awq all zeros",
    "gptq 128",
    "gptq 64 zeros",
    "gptq_v2 128 zeros",
    "gptq_v2 all",
)
"""And how many columns share a scale, and whether they share a zero."""
BLOCK = 128
LARGEST = 448.0
"""That e4m3 has."""
# Blocks that end inside the depth of a product, and inside the rows of one.
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Whole groups, and words that end past the depth of a product.
INT4_SIZES = {**SIZES, "hidden_size": 384}
# Whole blocks: what all of vLLM's kernels take.
GPU_SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
KEPT = "model.layers.1.mlp.down_proj"


def write_pair(path: Path, family: str, form: str, **changes: Any) -> tuple[Path, Path]:
    """Write a quantized checkpoint, with one matrix that is not, and one in float32 that is equal to it."""
    sizes = INT4_SIZES if form in INT4_FORMATS else SIZES
    quantized = write_checkpoint(path / "quantized", family, **{**sizes, **changes})
    dense = Path(shutil.copytree(quantized, path / "dense"))
    meant = quantize(quantized, form, ignored=(KEPT,))
    save_file(
        {name: tensor.contiguous() for name, tensor in meant.items()},
        dense / "model.safetensors",
        {"format": "pt"},
    )
    return quantized, dense


def quantize(
    folder: Path, form: str, *, ignored: tuple[str, ...] = (), device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Quantize the linear layers of a dense checkpoint in one file, and return its tensors as they were meant.

    Args:
        form: one of ``FORMATS`` or of ``INT4_FORMATS``.
        ignored: names of modules that stay as they are, beside the head.
        device: that computes.

    Returns:
        All tensors of the checkpoint by name, those that were quantized in float32: numbers times scales.
    """
    path = folder / "model.safetensors"
    stored, meant = quantized(load_file(path, device=device), form, ignored=ignored)
    save_file(stored, path, {"format": "pt"})
    write_description(folder, form, ["lm_head", *ignored])
    return meant


def quantized(
    tensors: dict[str, torch.Tensor], form: str, *, ignored: tuple[str, ...] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what is stored of some tensors of a checkpoint, and what ``quantize`` returns."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module in ignored or not name.endswith(".weight"):
            stored[name] = meant[name] = tensor
            continue
        if form in INT4_FORMATS:
            parts, meant[name] = quantized_in_4_bits(tensor.float(), form)
            stored |= {f"{module}.{part}": value for part, value in parts.items()}
            continue
        scales = scales_of(tensor.float(), form)
        spread = spread_out(scales, tensor.shape)
        stored[name] = (tensor.float() / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        meant[name] = stored[name].float() * spread
        stored[f"{module}.{'weight_scale_inv' if form == 'fp8 blocks' else 'weight_scale'}"] = scales
        if form in ("fp8", "modelopt"):
            stored[f"{module}.input_scale"] = torch.tensor(0.5)
            if module.endswith("k_proj"):  # of the K/V cache
                stored[f"{module}.{'k_scale' if form == 'modelopt' else 'output_scale'}"] = torch.tensor(0.5)
    return stored, meant


def quantizes_inputs(
    float8: Path, *, by_group: bool, dtype: torch.dtype
) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Return what makes products of a dense checkpoint's model take activations in 8 bits, where weights are.

    Args:
        float8: the checkpoint in 8 bits. Products of experts are left as they are.
        by_group: activations have a scale for each group of 128 columns, not for each row.
        dtype: of the model.
    """
    stored = load_file(float8 / "model.safetensors")
    names = {name.removesuffix(".weight") for name in stored if stored[name].dtype is torch.float8_e4m3fn}

    def rounded(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        groups = given[0].float().unflatten(-1, (-1, BLOCK if by_group else given[0].shape[-1]))
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
        codes = (groups / scales).to(torch.float8_e4m3fn)
        return ((codes.float() * scales).flatten(-2).to(given[0].dtype),)

    def change(model: torch.nn.Module) -> torch.nn.Module:
        for name, module in model.to(dtype).named_modules():
            if name in names and ".experts." not in name:
                module.register_forward_pre_hook(rounded)
        return model

    return change


def quantized_in_4_bits(weight: torch.Tensor, form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors that are stored of a matrix, by their names below its module's, and the matrix as meant."""
    package, group, *zeros = form.split()
    grouped = weight.unflatten(1, (-1, weight.shape[1] if group == "all" else int(group)))
    codes, scales, of_groups = codes_of(grouped, has_zeros=bool(zeros))
    # A bfloat16 of this size is a float16, too.
    meant = ((codes - of_groups[..., None]) * scales.float()[..., None]).flatten(1)
    if package == "awq":
        # Columns 0, 2, 4, ... of eight are in the lowest bits.
        turns = [0, 2, 4, 6, 1, 3, 5, 7]
        of_columns, of_zeros = (
            packed(each.t().unflatten(1, (-1, 8))[..., turns].flatten(1))
            for each in (codes.flatten(1), of_groups)
        )
        return {"qweight": of_columns, "qzeros": of_zeros, "scales": scales.half().t().contiguous()}, meant
    if package.startswith("gptq"):
        # What version 1 stores is one less, so that there is no 0.
        shift = int(package == "gptq")
        if zeros and shift:
            codes, of_groups = codes.clamp(min=1), of_groups.clamp(min=1)
            meant = ((codes - of_groups[..., None]) * scales.float()[..., None]).flatten(1)
        return {
            "qweight": packed(codes.flatten(1)).t().contiguous(),
            "qzeros": packed(of_groups.t() - shift),
            "scales": scales.half().t().contiguous(),
            "g_idx": (torch.arange(weight.shape[1]) // grouped.shape[2]).int(),
        }, meant
    stored = {
        "weight_packed": packed(codes.flatten(1)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        stored["weight_zero_point"] = packed(of_groups.t()).t().contiguous()
    return stored, meant


def codes_of(grouped: torch.Tensor, *, has_zeros: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, bfloat16 scales and zeros of the groups of columns of a matrix, [O, N, columns] and [O, N]."""
    if has_zeros:
        least, most = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = ((most - least) / 15).bfloat16()
        zeros = (-least / scales.float()).round().clamp(0, 15)
    else:
        scales = (grouped.abs().amax(2) / 7.5).bfloat16()
        zeros = torch.full_like(scales, 8.0, dtype=torch.float32)
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, 15), scales, zeros


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return int32 numbers of eight codes of the last axis each: number ``i`` of them is in bits ``4 i .. 4 i + 3``."""
    places = 16 ** torch.arange(8, device=codes.device)
    sums = (codes.long().unflatten(-1, (-1, 8)) * places).sum(-1)
    return torch.where(sums < 1 << 31, sums, sums - (1 << 32)).int()


def linears_of(model: CausalLM) -> list[Linear]:
    """Return the linear layers of a dense model, layer after layer."""
    found = []
    for layer in model.weights.layers:
        assert isinstance(layer.mlp, Mlp)
        found += [layer.qkv, layer.attn_out, layer.mlp.gate_up, layer.mlp.down]
    return found


def write_description(folder: Path, form: str, ignored: list[str]) -> None:
    """Say in a checkpoint's JSON files how it is quantized."""
    fields = json.loads((folder / "config.json").read_text())
    described = describe(form, ignored)
    if form == "modelopt":
        (folder / "hf_quant_config.json").write_text(json.dumps(described))
    else:
        fields["quantization_config"] = described
    (folder / "config.json").write_text(json.dumps(fields))


def scales_of(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Return the scales of a matrix, as they are stored: its largest numbers become e4m3's largest."""
    if form in ("fp8", "modelopt"):
        return weight.abs().amax() / LARGEST
    if form == "compressed-tensors tensor":
        return weight.abs().amax()[None] / LARGEST
    if form == "compressed-tensors channel":
        return weight.abs().amax(1, keepdim=True) / LARGEST
    padded = F.pad(weight, (0, -weight.shape[1] % BLOCK, 0, -weight.shape[0] % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / LARGEST
    # Qwen's are in bfloat16.
    return scales.bfloat16() if form == "fp8 blocks" else scales


def spread_out(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the scale of each number, float32."""
    scales = scales.float()
    if scales.numel() == 1 or (scales.shape[1] == 1 and shape[1] > BLOCK):
        return scales.expand(shape)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[: shape[0], : shape[1]]


def describe(form: str, ignored: list[str]) -> dict[str, Any]:
    """Return what config.json says, or, of ModelOpt, a file of its own."""
    if form == "modelopt":
        return {
            "producer": {"name": "modelopt", "version": "0.37.0"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ignored},
        }
    if form.startswith("fp8"):
        blocks = {"weight_block_size": [BLOCK, BLOCK]} if form == "fp8 blocks" else {}
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic" if blocks else "static",
            "modules_to_not_convert": ignored,
            **blocks,
        }
    if form in INT4_FORMATS:
        package, group, *zeros = form.split()
        if package == "awq":
            sizes = {"bits": 4, "group_size": -1 if group == "all" else int(group), "zero_point": bool(zeros)}
            return {"quant_method": "awq", "version": "gemm", "modules_to_not_convert": ignored, **sizes}
        if package.startswith("gptq"):
            sizes = {"bits": 4, "group_size": -1 if group == "all" else int(group), "sym": not zeros}
            return {"quant_method": "gptq", "checkpoint_format": package, "desc_act": False, **sizes}
        weights = {"num_bits": 4, "type": "int", "symmetric": not zeros, "dynamic": False, "actorder": None}
        weights |= {"strategy": "channel" if group == "all" else "group"}
        weights |= {"group_size": None if group == "all" else int(group)}
        return _compressed("pack-quantized", weights, None, ignored)
    strategy = form.split()[1]
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    return _compressed("float-quantized", weights, inputs, ignored)


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignored: list[str]
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
