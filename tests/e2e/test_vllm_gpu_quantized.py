"""On CUDA: float8 and int4 checkpoints inside vLLM with Rose's layers, beside stock vLLM and what float32 says of them.

``tests/vllm_plugin/test_float8_on_gpu.py`` and ``test_int4_on_gpu.py`` have single products, in seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from rose_backend.vllm_plugin import config_hook
from rose_backend.vllm_plugin.models.decoder import RoseDecoder
from rose_backend.vllm_plugin.plugin_logger import STEPS
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.eagle_checkpoints import write_eagle3_drafter
from tests.support.half_precision import judge, logprob_errors, mixed_prompts
from tests.support.llama_checkpoints import VOCAB_SIZE
from tests.support.quantized_checkpoints import FORMATS, GPU_SIZES, write_pair
from tests.support.random_checkpoints import write_random_adapter
from tests.support.vllm_engines import (
    draft_counts,
    has_roses_layers,
    inputs_of,
    needs_two_gpus,
    runner_of,
)

pytestmark = pytest.mark.gpu

HALF: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 160, **GPU_MEMORY}
STOCK: dict[str, Any] = {**HALF, "attention_backend": None, "enable_prefix_caching": False, "block_size": 32}
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160], "cudagraph_mode": "FULL"}
ROSE: dict[str, Any] = {
    **{**HALF, "enforce_eager": False},
    **{"compilation_config": GRAPHS, "enable_prefix_caching": False},
}
PROMPTS, LENGTHS = mixed_prompts(VOCAB_SIZE, max_len=300)
"""More than one step's: there are always more requests, and fewer, than Rose's kernel takes."""
INT4 = (
    *("pack-quantized 128", "pack-quantized 32", "pack-quantized all", "pack-quantized 64 zeros"),
    *("awq 128 zeros", "gptq 128"),
)
SLACK = 1.05
"""Of errors that should be equal: both sides sample other roundings."""


def mean_error(llm: Any, dense: Path, adapter: LoRARequest | None = None) -> float:
    """Return by how much an engine's log-probabilities are off, of tokens that it has chosen itself."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=0) for length in LENGTHS
    ]
    outputs = llm.generate(inputs_of(PROMPTS), params, use_tqdm=False, lora_request=adapter)
    completions = [output.outputs[0] for output in outputs]
    judged = judge(dense, PROMPTS, [list(each.token_ids) for each in completions])
    return float(logprob_errors(judged, completions).mean())


def loaded_bytes(llm: Any) -> int:
    """Return the memory of a model's weights, and of all else that its modules keep."""
    model = runner_of(llm).model
    tensors = [*model.parameters(), *model.buffers()]
    if isinstance(model, RoseDecoder):
        linears = [each for layer in model._layers for each in (layer.qkv, layer.attn_out, *_mlp(layer))]
        tensors += [each.weight.scales for each in linears if hasattr(each.weight, "scales")]
        # Cosines and sines are of a model's longest window, whatever its size.
        tensors = [each for each in tensors if each is not model.rose_constants.rotary_table]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def _mlp(layer: Any) -> tuple[Any, Any]:
    return layer.mlp.gate_up, layer.mlp.down


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, "bfloat16") for form in (*FORMATS, "fp8_per_tensor", *INT4)),
        *((form, "float16") for form in INT4[-2:]),
    ],
)
def test_errors_are_at_most_stocks(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, dtype: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(config_hook, "log_once", lines.append)
    is_online = form == "fp8_per_tensor"
    path, dense = write_pair(tmp_path, "qwen3", "fp8 blocks" if is_online else form, **GPU_SIZES)
    model = {"model": str(dense), "quantization": form} if is_online else {"model": str(path)}
    with make_engine(**model, **(STOCK | {"dtype": dtype})) as llm:
        stock, stock_bytes = mean_error(llm, dense), loaded_bytes(llm)
    options = ROSE | {"dtype": dtype, "additional_config": {"rose": {"max_quantized_rows": 64}}}
    with make_engine(**model, **options) as llm:
        assert has_roses_layers(llm) and runner_of(llm).model._max_packed_rows == 64
        before = STEPS.rose
        roses = mean_error(llm, dense)
        assert STEPS.rose > before + 20, dict(STEPS.vllm)
        assert loaded_bytes(llm) <= 1.01 * stock_bytes
    said = "int4 weights with a scale" if form in INT4 else "float8 weights with scales of"
    assert any(said in line for line in lines)
    print(f"{form}: mean error {roses:.2e}, stock vLLM's {stock:.2e}")
    assert roses <= SLACK * stock


@pytest.mark.parametrize(
    "options", [{"max_quantized_rows": 0}, {"max_quantized_rows": 160}, {"quantized_layers": False}], ids=str
)
@pytest.mark.parametrize("form", ["fp8 blocks", "compressed-tensors channel", "awq 128 zeros"])
def test_options(make_engine: MakeEngine, tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    path, dense = write_pair(tmp_path, "qwen3", form, **GPU_SIZES)
    with make_engine(model=str(path), **STOCK) as llm:
        stock = mean_error(llm, dense)
    with make_engine(model=str(path), **ROSE, additional_config={"rose": options}) as llm:
        assert has_roses_layers(llm) is ("quantized_layers" not in options)
        assert mean_error(llm, dense) <= SLACK * stock


@pytest.mark.parametrize("form", ["fp8 blocks", "pack-quantized 128"])
def test_adapters(make_engine: MakeEngine, tmp_path: Path, form: str) -> None:
    path, dense = write_pair(tmp_path, "qwen3", form, **GPU_SIZES)
    merged = write_random_adapter(dense, tmp_path / "adapter")
    adapter = LoRARequest("an adapter", 1, str(tmp_path / "adapter"))
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with make_engine(model=str(path), **STOCK, **lora) as llm:
        stock = mean_error(llm, merged, adapter)
    with make_engine(model=str(path), **ROSE, **lora) as llm:
        assert has_roses_layers(llm)
        assert mean_error(llm, merged, adapter) <= SLACK * stock


@pytest.mark.parametrize("form", ["fp8 blocks", "pack-quantized 128"])
def test_an_eagle_head(make_engine: MakeEngine, tmp_path: Path, form: str) -> None:
    path, dense = write_pair(tmp_path, "qwen3", form, **GPU_SIZES)
    drafter = write_eagle3_drafter(path, 3, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    with make_engine(model=str(path), **STOCK) as llm:
        stock = mean_error(llm, dense)
    with make_engine(
        model=str(path), **ROSE, runner="V2", speculative_config=drafter, disable_log_stats=False
    ) as llm:
        assert has_roses_layers(llm)
        assert mean_error(llm, dense) <= SLACK * stock
        assert draft_counts(llm)[0] > 0


def test_a_weight_that_is_no_number_leaves_products_to_vllm(make_engine: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_pair(tmp_path, "qwen3", "fp8 blocks", **GPU_SIZES)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[1, 2] = 0x7F
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with make_engine(model=str(path), **{**ROSE, "enforce_eager": True}) as llm:
        assert has_roses_layers(llm) and runner_of(llm).model._max_packed_rows == 0


@needs_two_gpus
@pytest.mark.parametrize("form", ["pack-quantized 128", "awq 128 zeros"])
def test_two_gpus(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    lines: list[str] = []
    monkeypatch.setattr(config_hook, "log_once", lines.append)
    path, dense = write_pair(tmp_path, "qwen3", form, **GPU_SIZES)
    with make_engine(model=str(path), **STOCK, tensor_parallel_size=2) as llm:
        stock = mean_error(llm, dense)
    with make_engine(model=str(path), **ROSE, tensor_parallel_size=2) as llm:
        roses = mean_error(llm, dense)
    assert any("int4 weights with a scale" in line for line in lines)
    print(f"{form}: mean error {roses:.2e}, stock vLLM's {stock:.2e}")
    assert roses <= SLACK * stock
