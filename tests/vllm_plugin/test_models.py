"""Which models get Rose's layers, and what of a configuration keeps vLLM's, with the reason in the start-up line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.utils import is_torchvision_available
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.config import vllm as vllm_config
from vllm.config.kernel import IrOpPriorityConfig
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

from rose_backend.config import PluginConfig
from rose_backend.errors import ConfigError
from rose_backend.kernels import HeadRotation, rotate_query_key
from rose_backend.kernels.arguments import MAX_ROWS
from rose_backend.vllm_plugin import config_hook
from rose_backend.vllm_plugin.config_hook import describe_parts
from rose_backend.vllm_plugin.models import gpt2, model_choice
from rose_backend.vllm_plugin.models.decoder import RoseConstants
from rose_backend.vllm_plugin.models.model_choice import (
    DECODERS,
    QWEN2_5_VL,
    QWEN3_VL,
    ModelChoice,
    choose_model_class,
)
from rose_backend.vllm_plugin.options import OTHER_DRAFTER, rose_options
from tests.gpu_matrix.drafters import write_with_mtp_head
from tests.support.eagle_checkpoints import write_eagle3_drafter
from tests.support.llama_checkpoints import change_json, write_checkpoint
from tests.support.quantized_checkpoints import FORMATS, INT4_FORMATS, write_pair
from tests.support.random_vision_checkpoints import qwen2_5_vl_config, qwen3_vl_config
from tests.support.vllm_plugin.configs import MakeConfig, idle_parts, n_grams, rose
from tests.support.vllm_plugin.float8_on_cpu import H100, Float8OnCpu
from tests.support.vllm_plugin.int4_on_cpu import take_int4_on_cpu


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    def write(case: str, **changes: Any) -> str:
        return str(write_checkpoint(tmp_path_factory.mktemp(case), case, **changes))

    return write


@pytest.fixture(scope="module")
def llama(checkpoints: Callable[..., str]) -> str:
    return checkpoints("llama")


def layers_of(config: Any) -> str:
    (name,) = config.model_config.hf_config.architectures
    return str(name)


def choose_again(config: Any) -> ModelChoice:
    """Choose for a finished configuration that a test has changed."""
    config.model_config.hf_config.architectures = [config.model_config.architecture]
    return choose_model_class(config, rose_options(config))


@pytest.mark.parametrize(
    "case", ["llama", "llama-biases", "llama-yarn", "llama-linear", "mistral", "qwen2", "qwen3"]
)
def test_families_get_roses_layers(
    make_config: MakeConfig, rose_log: list[str], checkpoints: Callable[..., str], case: str
) -> None:
    config = make_config(model=checkpoints(case), enforce_eager=False)
    name = layers_of(config)
    assert name in DECODERS.values() and name == DECODERS[config.model_config.architecture]
    (line,) = rose_log
    assert f"model {name} (fused MLP, fused add + RMSNorm);" in line
    assert "fused_mlp" not in idle_parts(line)
    # vLLM's own class is where it was.
    assert ModelRegistry.models[config.model_config.architecture].module_name.startswith("vllm.")


def test_nothing_is_compiled_around_roses_layers(
    make_config: MakeConfig, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        vllm_config.logger, "warning_once", lambda text, *args, **kwargs: warnings.append(text)
    )
    config = make_config(model=llama, enforce_eager=False)
    assert config.compilation_config.mode == CompilationMode.NONE
    custom_ops = list(config.compilation_config.custom_ops)
    # The engine core finishes its copy again.
    config.__post_init__()
    assert config.compilation_config.mode == CompilationMode.NONE
    # Nor does vLLM say that the user had switched compilation off.
    assert not [text for text in warnings if "compilation" in text]
    assert config.compilation_config.custom_ops == custom_ops and layers_of(config) in DECODERS.values()
    stock = make_config(
        model=llama,
        enforce_eager=False,
        **rose(fused_mlp=False, fused_add_layernorm=False),
    )
    assert stock.compilation_config.mode != CompilationMode.NONE and layers_of(stock) in DECODERS


def test_adapters_have_roses_layers(make_config: MakeConfig, llama: str) -> None:
    config = make_config(model=llama, enable_lora=True, max_loras=8, max_lora_rank=64)
    assert layers_of(config) in DECODERS.values()


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_drafts_that_are_looked_up_have_roses_layers(
    make_config: MakeConfig, llama: str, method: str
) -> None:
    config = make_config(model=llama, speculative_config=n_grams() | {"method": method})
    assert layers_of(config) in DECODERS.values()


@pytest.mark.parametrize(
    ("head", "custom_ops"),
    [("EAGLE-3", []), ("EAGLE-3", ["-silu_and_mul"]), ("EAGLE-3", ["all", "+quant_fp8"]), ("MTP", [])],
    ids=str,
)
def test_models_with_heads_have_roses_layers_beside_fused_ones_of_vllms(
    make_config: MakeConfig,
    checkpoints: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    head: str,
    custom_ops: list[str],
) -> None:
    def priority(config: Any) -> IrOpPriorityConfig:
        compiles = config.compilation_config.mode != CompilationMode.NONE
        return IrOpPriorityConfig.with_default(["native"] if compiles else ["vllm_c", "native"])

    # As on a GPU.
    monkeypatch.setattr(current_platform, "get_default_ir_op_priority", priority)
    if head == "MTP":
        model, name = write_with_mtp_head(tmp_path), "RoseMiMoForCausalLM"
        drafter: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
    else:
        model, name = Path(checkpoints("llama")), "RoseLlamaForCausalLM"
        drafter = write_eagle3_drafter(model, 2, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    config = make_config(
        model=str(model),
        enforce_eager=False,
        speculative_config=drafter,
        compilation_config={"custom_ops": custom_ops},
        ir_op_priority={"fused_add_rms_norm": ["oink"]},
    )
    for _ in range(2):
        assert layers_of(config) == name
        compilation, chosen = config.compilation_config, config.kernel_config.ir_op_priority
        assert compilation.mode == CompilationMode.NONE
        assert {*compilation.custom_ops} == {"all", *custom_ops}
        assert chosen.rms_norm == ["vllm_c", "native"] and chosen.fused_add_rms_norm[0] == "oink"
        # The engine core finishes its copy again.
        config.__post_init__()


def head_of(config: Any) -> str:
    (architecture,) = config.speculative_config.draft_model_config.hf_config.architectures
    return str(architecture)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"num_hidden_layers": 2}, "more than one layer"),
        ({"norm_output": True}, "another output"),
        ({"hidden_act": "gelu"}, "another activation than SiLU"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary positions of another kind"),
    ],
    ids=str,
)
def test_eagle3_heads_have_roses_layer_where_it_is_theirs(
    make_config: MakeConfig,
    checkpoints: Callable[..., str],
    rose_log: list[str],
    fields: dict[str, Any],
    reason: str | None,
) -> None:
    model = Path(checkpoints("llama"))
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    drafter = write_eagle3_drafter(model, 2, **ids, **fields)
    config = make_config(model=str(model), speculative_config=drafter)
    said = [line for line in rose_log if "head that drafts" in line]
    for _ in range(2):
        assert layers_of(config) == "RoseLlamaForCausalLM"
        assert (head_of(config) == model_choice.EAGLE3_HEAD) == (reason is None)
        assert config.speculative_config.use_local_argmax_reduction == (reason is None)
        # The engine core finishes its copy again.
        config.__post_init__()
    assert said == ([] if reason is None else [f"The layers of the head that drafts are vLLM's: {reason}"])


@pytest.mark.parametrize("backend", ["CPU_ATTN", None])
def test_eagle3_heads_with_another_attention_have_vllms_layer(
    make_config: MakeConfig, checkpoints: Callable[..., str], rose_log: list[str], backend: str | None
) -> None:
    """Model runner V1, which a CPU has, gives them another one by itself."""
    model = Path(checkpoints("llama"))
    drafter = write_eagle3_drafter(model, 2, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    config = make_config(model=str(model), speculative_config=drafter | {"attention_backend": backend})
    assert head_of(config) != model_choice.EAGLE3_HEAD
    assert (
        "The layers of the head that drafts are vLLM's: another attention backend for the drafter" in rose_log
    )


def test_probabilistic_drafts_keep_the_heads_logits(
    make_config: MakeConfig, checkpoints: Callable[..., str]
) -> None:
    model = Path(checkpoints("llama"))
    drafter = write_eagle3_drafter(model, 2, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    config = make_config(
        model=str(model), speculative_config=drafter | {"draft_sample_method": "probabilistic"}
    )
    assert head_of(config) == model_choice.EAGLE3_HEAD
    assert not config.speculative_config.use_local_argmax_reduction


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_a_drafter_with_a_model_keeps_vllms_layers(
    make_config: MakeConfig, rose_log: list[str], llama: str, tiny_model_path: Path, case: str
) -> None:
    model = llama if case == "llama" else str(tiny_model_path)
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    config = make_config(model=model, speculative_config=draft)
    if case == "gpt2":
        assert layers_of(config) == model_choice.GPT2
    else:
        assert layers_of(config) == "LlamaForCausalLM"
        assert idle_parts(rose_log[0])["fused_mlp"] == OTHER_DRAFTER


@pytest.mark.parametrize("on", ["fused_mlp", "fused_add_layernorm"])
def test_one_part_alone(make_config: MakeConfig, rose_log: list[str], llama: str, on: str) -> None:
    both = ("fused_mlp", "fused_add_layernorm")
    config = make_config(model=llama, additional_config={"rose": {name: name == on for name in both}})
    assert layers_of(config) in DECODERS.values()
    part = {"fused_mlp": "fused MLP", "fused_add_layernorm": "fused add + RMSNorm"}[on]
    assert f"model RoseLlamaForCausalLM ({part});" in rose_log[0]


@pytest.fixture
def takes_images(make_config: MakeConfig, tiny_model_path: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes the configuration of a model that takes images."""
    if not is_torchvision_available():
        pytest.skip("torchvision is not installed")

    def make(name: str, **options: Any) -> Any:
        config = {QWEN2_5_VL: qwen2_5_vl_config, QWEN3_VL: qwen3_vl_config}[name]()
        config.architectures = [name]
        config.save_pretrained(tmp_path)
        return make_config(model=str(tmp_path), tokenizer=str(tiny_model_path), **options)

    return make


@pytest.mark.parametrize("name", [QWEN2_5_VL, QWEN3_VL])
def test_language_models_beside_images_have_roses_layers(
    takes_images: Callable[..., Any], rose_log: list[str], name: str
) -> None:
    config = takes_images(name)
    assert layers_of(config) == f"Rose{name}" and f"model Rose{name} (fused MLP" in rose_log[0]
    # What the language model inside is built from, which is no engine's configuration.
    inner = config.with_hf_config(config.model_config.hf_text_config, architectures=["Qwen3ForCausalLM"])
    assert layers_of(inner) == "Qwen3ForCausalLM" and layers_of(config) == f"Rose{name}"
    assert inner.compilation_config.mode == CompilationMode.NONE


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mm_encoder_only": True}, "--mm-encoder-only"),
        ({"compilation_config": {"compile_mm_encoder": True}}, "compile_mm_encoder"),
        ({"quantization": "fp8_per_block"}, "quantized weights beside an encoder of images"),
        ({"hf_overrides": {"text_config": {"rope_parameters": None}}}, "rotary positions of another kind"),
    ],
    ids=str,
)
def test_vllms_layers_stay_beside_images(
    takes_images: Callable[..., Any],
    rose_log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    reason: str,
) -> None:
    Float8OnCpu(monkeypatch)
    config = takes_images(QWEN3_VL, **arguments)
    assert layers_of(config) == QWEN3_VL and idle_parts(rose_log[-1])["fused_mlp"] == reason


@pytest.mark.parametrize("user_chose", [False, True])
@pytest.mark.parametrize("name", [QWEN2_5_VL, QWEN3_VL])
def test_graphs_beside_images(
    takes_images: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, user_chose: bool
) -> None:
    config = takes_images(name, enforce_eager=False)
    compilation = config.compilation_config
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    for is_v2 in (False, True):
        monkeypatch.setattr(type(config), "use_v2_model_runner", is_v2)
        compilation.mode, compilation.cudagraph_mode = (
            CompilationMode.VLLM_COMPILE,
            CUDAGraphMode.FULL_AND_PIECEWISE,
        )
        config.model_config.hf_config.architectures = [name]
        choice = choose_model_class(config, rose_options(config), has_default_graphs=not user_chose)
        # Qwen2.5-VL's steps with prompts are captured: choose_mixed_graphs has replaced the pieces.
        if is_v2 and not user_chose and name == QWEN3_VL:
            assert choice == (f"Rose{name}", None)
            assert compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
        else:
            assert choice == (None, "piecewise CUDA graphs")
            assert compilation.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("section", [(16, 24, 24), (24, 20, 20), (3, 5, 5), (1, 1, 0)], ids=str)
def test_mrope_angles(section: tuple[int, int, int], is_interleaved: bool) -> None:
    """Against float64, where slices of time's angles are replaced, and vLLM's own module."""
    half, num_tokens = sum(section), 7
    with set_current_vllm_config(VllmConfig()):
        rotary = MRotaryEmbedding(
            2 * half, 2 * half, 50, 1e4, True, torch.float32, list(section), is_interleaved
        )
    positions = torch.randint(0, 200, (3, num_tokens), generator=torch.Generator().manual_seed(half))
    angles = RoseConstants(rotary, torch.device("cpu")).angles_of(positions)
    of_axis = positions.double()[:, :, None] * 1e4 ** -(torch.arange(half, dtype=torch.float64) / half)
    exact = of_axis[0].clone()
    for axis in (1, 2):
        if is_interleaved:
            chosen = slice(axis, 3 * section[axis], 3)
        else:
            chosen = slice(sum(section[:axis]), sum(section[: axis + 1]))
        exact[:, chosen] = of_axis[axis][:, chosen]
    torch.testing.assert_close(angles.double(), torch.cat((exact.cos(), exact.sin()), 1), atol=1e-4, rtol=0)
    query, key = torch.randn(2, num_tokens, 3 * 2 * half)
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    turned = [each.clone().view(num_tokens, 3, -1) for each in (query, key)]
    rotate_query_key(*turned, torch.arange(num_tokens), HeadRotation(angles, by_token=True))
    for ours, theirs in zip(turned, expected, strict=True):
        torch.testing.assert_close(ours.flatten(1), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"enable_lora": True, "lora_dtype": "float16"}, "LoRA in another dtype"),
        ({"enable_lora": True, "fully_sharded_loras": True}, "--fully-sharded-loras"),
        ({"enable_lora": True, "max_loras": 9}, "LoRA of more than 8 adapters at once"),
        ({"enable_lora": True, "max_lora_rank": 128}, "LoRA of ranks above 64"),
        ({"enable_lora": True, "tensor_parallel_size": 2}, "LoRA with tensor parallelism"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"cpu_offload_gb": 1}, "weight offloading"),
        ({"offload_group_size": 2}, "weight offloading"),
        ({"load_format": "sharded_state"}, "this load format"),
        ({"runner": "pooling"}, "no layers of Rose's for this model"),
        (
            {
                "model_class_overrides": {
                    "LlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM"
                }
            },
            "no layers of Rose's for this model",
        ),
        *(
            ({"hf_overrides": {"rope_parameters": rope}}, "rotary positions of another kind")
            for rope in (
                {"rope_type": "dynamic", "factor": 2.0},
                {"rope_type": "default", "partial_rotary_factor": 0.5},
                {"rope_type": "default", "mrope_section": [2, 2, 4]},
            )
        ),
        ({"hf_overrides": {"is_causal": False}}, "attention in both directions"),
    ],
    ids=str,
)
def test_vllms_layers_stay(
    make_config: MakeConfig, rose_log: list[str], llama: str, arguments: dict[str, Any], reason: str
) -> None:
    config = make_config(model=llama, **arguments)
    assert layers_of(config) in ("LlamaForCausalLM", "LlamaModel")
    idle = idle_parts(rose_log[-1])
    assert idle["fused_mlp"] == idle["fused_add_layernorm"] == reason
    assert "model vLLM's own Llama" in rose_log[-1]


def change(path: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets what an attribute path below a configuration names."""
    *owners, name = path.split(".")

    def set_value(config: Any) -> None:
        for owner in owners:
            config = getattr(config, owner)
        setattr(config, name, value)

    return set_value


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        ("llama", change("quant_config", SimpleNamespace()), "quantized weights other than float8 and int4"),
        ("llama", change("model_config.quantization", "fp8"), "quantized weights other than float8 and int4"),
        (
            "llama",
            change("weight_transfer_config", SimpleNamespace(backend="sparse_nccl")),
            "this weight transfer backend",
        ),
        ("llama", change("kernel_config.linear_backend", "torch"), "this linear backend"),
        ("llama", change("parallel_config.enable_dbo", True), "dual batch overlap"),
        (
            "llama",
            change("attention_config.backend_per_kind", {"sliding_attention": "FLASH_ATTN"}),
            "another attention backend for some layers",
        ),
        (
            "qwen2",
            change("model_config.hf_config.dual_chunk_attention_config", {"chunk_size": 8}),
            "dual chunk attention",
        ),
        ("mistral", change("model_config.hf_config.llama_4_scaling", {"beta": 0.1}), "scaled queries"),
        ("mistral", change("model_config.hf_config.ada_rms_norm_t_cond", True), "adaptive norms"),
    ],
)
def test_vllms_layers_stay_where_a_machine_without_a_gpu_cannot_be_asked(
    make_config: MakeConfig,
    checkpoints: Callable[..., str],
    case: str,
    change: Callable[[Any], None],
    reason: str,
) -> None:
    config = make_config(model=checkpoints(case))
    assert choose_again(config).reason is None
    change(config)
    choice = choose_again(config)
    assert choice == (None, reason) and layers_of(config) in DECODERS
    line = describe_parts(config, rose_options(config), choice)
    assert idle_parts(line)["fused_mlp"] == reason


FLOAT8 = dict(zip(FORMATS, ("blocks", "matrices", "rows", "blocks", "matrices", "matrices"), strict=True))
"""What has a scale of its own in each format."""


@pytest.fixture
def float8(tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes the configuration of a checkpoint in a format, on an H100."""

    def make(form: str, *, fields: dict[str, Any] | None = None, **options: Any) -> Any:
        platform = {name: options.pop(name) for name in ("capability", "is_cuda") if name in options}
        Float8OnCpu(monkeypatch, **platform)
        path, _ = write_pair(tmp_path, "qwen3", form)
        if fields is not None:
            described = json.loads((path / "config.json").read_text())["quantization_config"]
            change_json(path / "config.json", quantization_config=described | fields)
        return make_config(**{"model": str(path), "enforce_eager": False, **options})

    return make


@pytest.mark.parametrize("form", FORMATS)
def test_float8_weights_have_roses_layers(float8: Callable[..., Any], rose_log: list[str], form: str) -> None:
    config = float8(form)
    assert layers_of(config) == "RoseQwen3ForCausalLM"
    assert (
        f"RoseQwen3ForCausalLM (fused MLP, fused add + RMSNorm, float8 weights with scales of {FLOAT8[form]});"
        in (rose_log[0])
    )
    # What vLLM's own products launch first is no row of torch operations.
    assert config.compilation_config.mode == CompilationMode.NONE
    assert "+quant_fp8" in config.compilation_config.custom_ops
    config.__post_init__()
    assert layers_of(config) == "RoseQwen3ForCausalLM"


def test_what_the_user_says_of_quantized_activations_stays(float8: Callable[..., Any]) -> None:
    config = float8("fp8", compilation_config={"custom_ops": ["-quant_fp8"]})
    assert "+quant_fp8" not in config.compilation_config.custom_ops


@pytest.mark.parametrize("rows", [-1, MAX_ROWS + 1, True, "many"])
def test_how_many_decodes_may_be_roses(rows: Any) -> None:
    assert PluginConfig(max_quantized_rows=MAX_ROWS).max_quantized_rows == MAX_ROWS
    with pytest.raises(
        ConfigError, match=f"max_quantized_rows: got {rows!r}, allowed is an integer from 0 to 256"
    ):
        PluginConfig(max_quantized_rows=rows)


@pytest.mark.parametrize(
    ("quantization", "gate_rows", "reason"),
    [
        *(("fp8_per_tensor", 96, None), ("fp8_per_channel", 96, None), ("fp8_per_block", 128, None)),
        ("fp8_per_block", 96, "blocks with rows of gate and factor"),
        ("mxfp8", 128, "quantized weights other than float8 and int4"),
    ],
)
def test_weights_quantized_online(
    make_config: MakeConfig,
    rose_log: list[str],
    checkpoints: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    quantization: str,
    gate_rows: int,
    reason: str | None,
) -> None:
    Float8OnCpu(monkeypatch)
    path = checkpoints("llama", intermediate_size=gate_rows)
    config = make_config(model=path, quantization=quantization)
    assert (layers_of(config) in DECODERS.values()) is (reason is None)
    assert idle_parts(rose_log[0]).get("fused_mlp") == reason


def test_a_quantized_gpt2_has_vllms_layers(
    make_config: MakeConfig, rose_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Float8OnCpu(monkeypatch)
    assert layers_of(make_config(quantization="fp8_per_tensor")) == "GPT2LMHeadModel"
    assert idle_parts(rose_log[0])["fused_mlp"] == "quantized weights"


def with_blocks_of(*block: int) -> dict[str, Any]:
    return {"weight_block_size": list(block)}


@pytest.mark.parametrize(
    ("form", "options", "reason"),
    [
        ("fp8 blocks", {"is_cuda": False}, "float8 weights without a CUDA device"),
        ("fp8", {"capability": (8, 6)}, "float8 weights on this GPU"),
        ("fp8 blocks", {"capability": (8, 9)}, "float8 weights on this GPU"),
        ("fp8 blocks", {"capability": (10, 0)}, "float8 weights on this GPU"),
        ("compressed-tensors channel", {"capability": (10, 0)}, None),
        ("fp8", {"capability": (8, 9)}, None),
        ("fp8 blocks", {"fields": with_blocks_of(64, 128)}, "quantized weights other than float8 and int4"),
        ("fp8 blocks", {"fields": {"store_dtype": "mxfp4"}}, "quantized weights other than float8 and int4"),
        ("fp8", {"enable_lora": True}, None),
        ("fp8", {"tensor_parallel_size": 2}, "float8 weights with tensor parallelism"),
        ("fp8", {"additional_config": {"rose": {"quantized_layers": False}}}, "quantized_layers off"),
        (
            "fp8 blocks",
            {"kernel_config": {"linear_backend_per_quant": {"fp8_block_w8a8": "triton"}}},
            "this linear backend",
        ),
    ],
    ids=str,
)
def test_vllms_layers_stay_with_other_float8_weights(
    float8: Callable[..., Any],
    rose_log: list[str],
    form: str,
    options: dict[str, Any],
    reason: str | None,
) -> None:
    config = float8(form, **options)
    assert idle_parts(rose_log[0]).get("fused_mlp") == reason
    assert (layers_of(config) in DECODERS.values()) is (reason is None)
    if reason == "quantized_layers off":
        assert "disabled: quantized_layers;" in rose_log[0]


@pytest.mark.parametrize(
    ("form", "rows", "given", "is_roses"),
    [
        (form, rows, given, "block" in form or rows is not None or given == ("bfloat16", H100))
        for form in FORMATS
        for rows in (None, 0, 8)
        for given in (("bfloat16", H100), ("float16", H100), ("bfloat16", (8, 9)), ("bfloat16", (10, 0)))
        if given[1] == H100 or "block" not in form
    ],
)
def test_float8_layers_are_roses_where_they_were_measured_to_be_faster(
    make_config: MakeConfig,
    rose_log: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    rows: int | None,
    given: tuple[str, tuple[int, int]],
    is_roses: bool,
) -> None:
    dtype, capability = given
    Float8OnCpu(monkeypatch, measured=True, capability=capability)
    path, _ = write_pair(tmp_path, "qwen3", form)
    options = {"rose": {"max_quantized_rows": rows}}
    config = make_config(model=str(path), dtype=dtype, additional_config=options)
    assert (layers_of(config) in DECODERS.values()) is is_roses
    reason = None if is_roses else "float8 weights for which vLLM's kernel may be faster"
    assert idle_parts(rose_log[0]).get("fused_mlp") == reason


@pytest.fixture
def int4(tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes the configuration of a checkpoint in a format, on a GPU."""

    def make(form: str, *, fields: dict[str, Any] | None = None, is_cuda: bool = True, **options: Any) -> Any:
        take_int4_on_cpu(monkeypatch, is_cuda=is_cuda)
        path, _ = write_pair(tmp_path, "qwen3", form)
        described = json.loads((path / "config.json").read_text())["quantization_config"]
        change_json(path / "config.json", quantization_config=described | (fields or {}))
        sizes = {"dtype": "float32", "enforce_eager": False, "max_num_seqs": 64}
        return make_config(**{"model": str(path), **sizes, **options})

    return make


@pytest.mark.parametrize("form", [form for form in INT4_FORMATS if "gptq" not in form or "zeros" not in form])
def test_int4_weights_have_roses_layers(int4: Callable[..., Any], rose_log: list[str], form: str) -> None:
    config = int4(form)
    assert layers_of(config) == "RoseQwen3ForCausalLM"
    zero = " and a zero" if "zeros" in form else ""
    columns = "a row" if "all" in form else f"{form.split()[1]} columns"
    parts = f"fused MLP, fused add + RMSNorm, int4 weights with a scale{zero} for {columns}"
    assert f"RoseQwen3ForCausalLM ({parts});" in rose_log[0]
    # No product is one of activations in 8 bits.
    assert "+quant_fp8" not in config.compilation_config.custom_ops


def with_group(**changes: Any) -> dict[str, Any]:
    """Return fields of a compressed-tensors checkpoint whose only group differs."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights | changes.pop("weights", {}), **changes}
    return {"config_groups": {"group_0": group, **changes.pop("others", {})}}


INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
OTHER_GROUP = with_group(weights={"group_size": 64}, targets=["re:.*down_proj"])["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("form", "fields", "is_roses"),
    [
        *(
            ("gptq 128", {"dynamic": {rule: {"bits": 8}}}, rule[0] == "-")
            for rule in ("-:.*q", "+:.*q", ".*")
        ),
        ("gptq 128", {"bits": 8}, False),
        ("gptq 128", {"desc_act": True, "group_size": -1}, True),
        ("awq 128 zeros", {"group_size": 16}, False),
        ("awq 128 zeros", {"zero_point": False}, False),
        ("pack-quantized 128", with_group(), True),
        ("pack-quantized 128", with_group(format="pack-quantized"), True),
        ("pack-quantized 128", with_group(weights={"actorder": "static"}), True),
        ("pack-quantized 128", with_group(weights={"num_bits": 8}), False),
        ("pack-quantized 128", with_group(weights={"type": "float"}), False),
        ("pack-quantized 128", with_group(weights={"group_size": 16}), False),
        ("pack-quantized 128", with_group(weights={"strategy": "tensor", "group_size": None}), False),
        ("pack-quantized 128", {"transform_config": {"config_groups": {}}}, False),
        ("pack-quantized 128", with_group(input_activations=INT8_TOKENS), False),
        (
            "pack-quantized 128",
            with_group(output_activations={**INT8_TOKENS, "strategy": "tensor", "dynamic": False}),
            False,
        ),
        (
            "pack-quantized 128",
            {"config_groups": {**with_group()["config_groups"], "group_1": OTHER_GROUP}},
            False,
        ),
    ],
    ids=str,
)
def test_other_int4_weights_have_vllms_layers(
    int4: Callable[..., Any], rose_log: list[str], form: str, fields: dict[str, Any], is_roses: bool
) -> None:
    config = int4(form, fields=fields)
    assert (layers_of(config) in DECODERS.values()) is is_roses
    reason = None if is_roses else "quantized weights other than float8 and int4"
    assert idle_parts(rose_log[0]).get("fused_mlp") == reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_cuda": False}, "int4 weights without a CUDA device"),
        ({"tensor_parallel_size": 2}, None),
        ({"additional_config": {"rose": {"quantized_layers": False}}}, "quantized_layers off"),
        (
            {"kernel_config": {"linear_backend_per_quant": {"mixed_precision": "marlin"}}},
            "this linear backend",
        ),
        ({"kernel_config": {"linear_backend": "marlin"}}, "this linear backend"),
        ({"enable_lora": True}, None),
        ({"additional_config": {"rose": {"max_quantized_rows": 0}}}, None),
        (
            {"max_num_seqs": 129},
            "int4 weights with a large --max-num-seqs, without max_quantized_rows",
        ),
        ({"max_num_seqs": 129, "additional_config": {"rose": {"max_quantized_rows": 256}}}, None),
        ({"max_num_seqs": 32, "speculative_config": n_grams(3)}, None),
        (
            {"max_num_seqs": 33, "speculative_config": n_grams(3)},
            "int4 weights with a large --max-num-seqs, without max_quantized_rows",
        ),
    ],
    ids=str,
)
def test_vllms_layers_stay_with_int4_weights(
    int4: Callable[..., Any], rose_log: list[str], options: dict[str, Any], reason: str | None
) -> None:
    config = int4("pack-quantized 128", **options)
    assert idle_parts(rose_log[0]).get("fused_mlp") == reason
    assert (layers_of(config) in DECODERS.values()) is (reason is None)


def test_activations_that_marlin_should_quantize_leave_vllms_layers(
    int4: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert layers_of(int4("awq 128 zeros")) == "Qwen3ForCausalLM"


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_weights_that_are_loaded_anew_may_be_roses(make_config: MakeConfig, llama: str, backend: str) -> None:
    config = make_config(model=llama)
    config.weight_transfer_config = SimpleNamespace(backend=backend)
    assert choose_again(config).reason is None


def test_batch_invariance(make_config: MakeConfig, llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(model=llama)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert choose_again(config).reason == "batch invariance"


def test_graphs_are_settled_before_layers_are_chosen_by_them(
    make_config: MakeConfig, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def choose(config: Any, options: Any, **graphs: Any) -> ModelChoice:
        order.append("layers")
        return choose_model_class(config, options, **graphs)

    monkeypatch.setattr(config_hook, "choose_mixed_graphs", lambda config: order.append("graphs"))
    monkeypatch.setattr(config_hook, "choose_model_class", choose)
    make_config(model=llama)
    assert order == ["graphs", "layers"]
    order.clear()
    # With sizes of the user's own no graphs are chosen for them.
    make_config(model=llama, cudagraph_capture_sizes=[1, 2])
    assert order == ["layers"]


@pytest.mark.parametrize(
    ("graphs", "mode", "reason"),
    [
        (CUDAGraphMode.FULL, CompilationMode.VLLM_COMPILE, None),
        (CUDAGraphMode.FULL_DECODE_ONLY, CompilationMode.VLLM_COMPILE, None),
        (CUDAGraphMode.NONE, CompilationMode.NONE, None),
        (CUDAGraphMode.FULL_AND_PIECEWISE, CompilationMode.VLLM_COMPILE, "piecewise CUDA graphs"),
        (CUDAGraphMode.PIECEWISE, CompilationMode.VLLM_COMPILE, "piecewise CUDA graphs"),
        (
            CUDAGraphMode.FULL,
            CompilationMode.STOCK_TORCH_COMPILE,
            "this compilation mode",
        ),
    ],
)
def test_on_a_gpu_the_graphs_decide(
    make_config: MakeConfig,
    llama: str,
    monkeypatch: pytest.MonkeyPatch,
    graphs: CUDAGraphMode,
    mode: CompilationMode,
    reason: str | None,
) -> None:
    config = make_config(model=llama)
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    config.compilation_config.cudagraph_mode, config.compilation_config.mode = graphs, mode
    choice = choose_again(config)
    assert choice.reason == reason
    assert (config.compilation_config.mode == CompilationMode.NONE) == (reason is None)
    # A model that need not have pieces is compiled no other way.
    rest = model_choice._why_steps_are_compiled(config, may_drop_piecewise=True)
    assert rest == (None if reason == "piecewise CUDA graphs" else reason)


# GPT-2's operations as torch sees them: schemas, fake implementations, and values.
def inputs(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for shape in shapes]


CASES = {
    "bias_gelu": (gpt2.bias_gelu, [(5, 32), (32,)], ()),
    "bias_residual": (gpt2.bias_residual, [(5, 32), (32,), (5, 32)], ()),
    "layer_norm": (gpt2.layer_norm, [(5, 32), (32,), (32,)], (1e-5,)),
    "add_layer_norm": (gpt2.add_layer_norm, [(5, 32), (5, 32), (32,), (32,)], (1e-5,)),
}


@pytest.mark.parametrize("name", CASES)
def test_torch_accepts_schema_and_fake_implementation(name: str) -> None:
    operation, shapes, scalars = CASES[name]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operation.default, (*inputs(*shapes), *scalars), test_utils=checks)


def test_values() -> None:
    x, bias = inputs((5, 32), (32,))
    expected = F.gelu(x + bias, approximate="tanh")
    gpt2.bias_gelu(x, bias)
    torch.testing.assert_close(x, expected)
    x, bias, residual = inputs((5, 32), (32,), (5, 32))
    expected = x + bias + residual
    gpt2.bias_residual(x, bias, residual)
    torch.testing.assert_close(x, expected)
    x, residual, weight, bias = inputs((5, 32), (5, 32), (32,), (32,))
    normed, total = gpt2.add_layer_norm(x, residual, weight, bias, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.layer_norm(x + residual, (32,), weight, bias, 1e-5))
    torch.testing.assert_close(gpt2.layer_norm(total, weight, bias, 1e-5), normed)


def test_compiled_code_calls_them_in_order() -> None:
    x, bias, residual = inputs((5, 32), (32,), (5, 32))

    def run(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        widened = x * 2
        gpt2.bias_gelu(widened, bias)
        gpt2.bias_residual(widened, bias, residual)
        return widened

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, bias, residual), run(x, bias, residual))
