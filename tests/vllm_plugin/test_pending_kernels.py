"""What an engine inside vLLM launches is recorded without a GPU, compiled while it loads, and waited for once."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm.compilation import backends
from vllm.config import CUDAGraphMode, LoRAConfig, set_current_vllm_config
from vllm.v1.worker.gpu.sample import gumbel, min_p

from rose_backend.compile_ahead import pool as compilation_pool
from rose_backend.compile_ahead.pool import CompiledKernel
from rose_backend.compile_ahead.recorded_launches import KernelSource, RecordedLaunches, record_launches
from rose_backend.kernels.attention.paged_decode import DecodeLoops
from rose_backend.kernels.gpu_properties import GpuProperties
from rose_backend.kernels.linear.small_batch_linear import WeightFormat
from rose_backend.kernels.pointwise.elementwise import Groups, RotationSizes
from rose_backend.kernels.sampling.ops import MASK_KERNELS, REPORT_KERNELS, SAMPLER_KERNELS
from rose_backend.vllm_plugin import pending_kernels
from rose_backend.vllm_plugin.attention import flash_attention
from rose_backend.vllm_plugin.attention.backend import RoseAttentionImpl
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata, RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.models.recorded_model import (
    RecordedAttention,
    RecordedDecoder,
    projections,
    recorded_step,
    recorded_steps,
)
from rose_backend.vllm_plugin.sampler import draw, why_vllm_draws
from tests.support.llama_checkpoints import write_checkpoint
from tests.support.quantized_checkpoints import GPU_SIZES, write_pair
from tests.support.vllm_plugin.configs import MakeConfig, connector
from tests.support.vllm_plugin.float8_on_cpu import Float8OnCpu
from tests.support.vllm_plugin.int4_on_cpu import take_int4_on_cpu

H200 = GpuProperties((9, 0), 132)
GPT2_KERNELS = {"_bias_kernel", "_norm_kernel"}
SAMPLING_KERNELS = {*SAMPLER_KERNELS, *REPORT_KERNELS, *MASK_KERNELS}
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
TWO_DRAFTS = {**N_GRAMS, "num_speculative_tokens": 2}
LAYER_KERNELS = {
    *("_embed_tokens_kernel", "_norm_kernel", "_rotate_kernel", "_silu_mul_kernel"),
    "small_batch_linear_kernel",
}
ATTENTION_KERNELS = {"_paged_decode_kernel", "_paged_prefill_kernel"}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """Let the parts that ask vLLM's platform believe in a GPU, and vLLM's own kernels launch nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gumbel, "apply_temperature", lambda *args: None)
    monkeypatch.setattr(min_p, "apply_min_p", lambda *args: None)
    monkeypatch.setattr(pending_kernels, "_begun", set())
    monkeypatch.setattr(pending_kernels, "_pending", [])
    yield


def make_layer(config: Any, **options: Any) -> RoseAttentionImpl:
    with set_current_vllm_config(config):
        return RoseAttentionImpl(2, 64, 0.125, 2, **options)


SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 512]


def make_gpu_config(make_config: MakeConfig, sizes: list[int] = SIZES, **options: Any) -> Any:
    """Return a configuration with full graphs of these sizes, made for the platform that is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.platforms.current_platform.is_cuda", lambda: False)
        config = make_config(**{"dtype": "float16", "enforce_eager": False, "max_num_seqs": 48, **options})
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    config.compilation_config.cudagraph_capture_sizes = sizes
    return config


def sources_of(config: Any, layer: RoseAttentionImpl) -> list[KernelSource]:
    with on_cuda():
        return pending_kernels.record(config, layer, H200).sources


def record(make_config: MakeConfig, layer: dict[str, Any] | None = None, **options: Any) -> Counter[str]:
    config = make_gpu_config(make_config, **options)
    sources = sources_of(config, make_layer(config, **(layer or {})))
    assert all(source.module.startswith("rose_backend.kernels.") for source in sources)
    return Counter(source.name for source in sources)


def test_all_parts_are_recorded(make_config: MakeConfig) -> None:
    dtype = torch.get_default_dtype()
    recorded = record(make_config)
    assert set(recorded) == ATTENTION_KERNELS | SAMPLING_KERNELS | GPT2_KERNELS
    # One for each length of prompts that prefill attention is tuned for.
    assert recorded["_paged_prefill_kernel"] > 3
    assert torch.get_default_dtype() is dtype


@pytest.mark.parametrize(
    ("layer", "options", "names"),
    [
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}, {"_store_chunk_kernel"}),
        ({}, {"additional_config": {"rose": {"fused_kv_append": False}}}, {"_write_kv_kernel"}),
        ({"sinks": torch.zeros(2), "sliding_window": 64}, {}, set()),
        ({"logits_soft_cap": 30.0, "alibi_slopes": [0.5, 0.25]}, {}, set()),
        ({}, {"speculative_config": N_GRAMS}, set()),
        # More rows of its 2 heads than begin at once.
        ({}, {"max_num_seqs": 600}, {"_longest_first_kernel"}),
    ],
    ids=str,
)
def test_other_layers_are_recorded(
    make_config: MakeConfig, layer: dict[str, Any], options: dict[str, Any], names: set[str]
) -> None:
    assert ATTENTION_KERNELS | names <= set(record(make_config, layer, **options))


@pytest.mark.parametrize("is_drafter", [False, True])
def test_layers_of_a_drafter_are_vllms(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_drafter: bool
) -> None:
    path = write_checkpoint(tmp_path, "llama")
    config = make_gpu_config(make_config, model=str(path), speculative_config=N_GRAMS)
    monkeypatch.setattr(backends, "model_tag", "eagle_head" if is_drafter else "backbone")
    recorded = {source.name for source in sources_of(config, make_layer(config))}
    assert ("_silu_mul_kernel" in recorded) is not is_drafter
    assert ("_write_kv_kernel" in recorded) is is_drafter


@pytest.mark.parametrize(("name", "appends"), [("OffloadingConnector", True), ("ExampleConnector", False)])
def test_layers_beside_a_connector_are_recorded_as_they_run(
    make_config: MakeConfig, name: str, appends: bool
) -> None:
    config = make_config(**connector(name))
    assert RecordedAttention(config, make_layer(config)).appends is appends


def test_parts_that_are_off_are_left_out(make_config: MakeConfig) -> None:
    off = {"fused_sampler": False, "fused_mlp": False, "fused_add_layernorm": False}
    assert set(record(make_config, additional_config={"rose": off})) == ATTENTION_KERNELS
    # Draws are launched where no graph is captured.
    assert set(record(make_config, additional_config={"rose": {"cuda_graph": False}})) == (
        ATTENTION_KERNELS | GPT2_KERNELS | set(SAMPLER_KERNELS)
    )


def kind_of(source: KernelSource) -> tuple[bool | None, bool]:
    """Return whether decode attention norms the heads that it rotates, None if it rotates none; and if it overlaps."""
    values = source.constexprs.values()
    rotation = next((each for each in values if isinstance(each, RotationSizes)), None)
    (loops,) = (each for each in values if isinstance(each, DecodeLoops))
    return None if rotation is None else rotation.NORM, loops.OVERLAP


@pytest.fixture
def decoder_config(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Any]:
    def make(case: str, **options: Any) -> Any:
        path = write_checkpoint(tmp_path / case, case, hidden_size=128)
        return make_gpu_config(
            make_config, [*SIZES[:-1], 96, 160, 512], **{"model": str(path), "max_num_seqs": 160, **options}
        )

    return make


@pytest.mark.parametrize("case", ["llama-biases", "mistral", "qwen2", "qwen3"])
def test_layers_are_recorded_with_the_attention_they_are_around(
    decoder_config: Callable[..., Any], case: str
) -> None:
    def recorded(**options: Any) -> list[KernelSource]:
        config = decoder_config(case, **options)
        return sources_of(config, make_layer(config))

    sources = recorded()
    assert {source.name for source in sources} == ATTENTION_KERNELS | SAMPLING_KERNELS | LAYER_KERNELS

    def decode_kinds(sources: list[KernelSource]) -> set[Any]:
        return {kind_of(source) for source in sources if source.name == "_paged_decode_kernel"}

    # Few decodes rotate on their way, more of them do not, and mixed steps do not begin early either.
    has_norm = case == "qwen3"
    assert decode_kinds(sources) == {(has_norm, True), (None, True), (None, False)}
    # With heads of one size any number does, without beginning early where the library multiplies.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rose_backend.layers.decoder.ALWAYS_ROTATED", make_layer(decoder_config(case)).head_size
        )
        assert decode_kinds(recorded()) == {(has_norm, True), (None, False)}
        patch.setattr("rose_backend.layers.decoder.max_packed_rows", lambda *_, **__: 100)
        assert decode_kinds(recorded()) == {(has_norm, True), (has_norm, False), (None, False)}
    # A rank's products are the library's.
    ranks = {source.name for source in recorded(tensor_parallel_size=2)}
    embedding = {"_embed_tokens_kernel"}
    assert ranks | embedding == ATTENTION_KERNELS | SAMPLING_KERNELS | LAYER_KERNELS - {
        "small_batch_linear_kernel"
    }
    off = {"fused_add_layernorm": False, "fused_mlp": False}
    assert {source.name for source in recorded(additional_config={"rose": off})} == (
        ATTENTION_KERNELS | SAMPLING_KERNELS
    )


@pytest.mark.parametrize("has_mrope", [False, True])
def test_rotations_by_token_are_recorded_with_mrope(
    decoder_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, has_mrope: bool
) -> None:
    """And embeddings copied as if by ids, which are the tokens' own rows."""
    config = decoder_config("qwen3")
    monkeypatch.setattr(type(config.model_config), "uses_mrope", has_mrope)
    sources = sources_of(config, make_layer(config))
    rotations = {
        each
        for source in sources
        if source.name == "_paged_decode_kernel"
        for each in source.constexprs.values()
        if isinstance(each, RotationSizes)
    }
    assert {rotation.BY_TOKEN for rotation in rotations} == {has_mrope}
    ids = {s.signature["input_ids_ptr"] for s in sources if s.name == "_embed_tokens_kernel"}
    assert ids == {"*i64" if has_mrope else "*i32"}


@pytest.mark.parametrize(("dtype", "splits"), [("bfloat16", True), ("float16", False)])
def test_split_activations_are_recorded_where_they_have_all_bits(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, splits: bool
) -> None:
    Float8OnCpu(monkeypatch)
    path, _ = write_pair(tmp_path, "qwen3", "fp8 blocks")
    config = make_gpu_config(make_config, SIZES, model=str(path), dtype=dtype)
    sources = sources_of(config, make_layer(config))
    assert ("_split_kernel" in {each.name for each in sources}) == splits
    formats = {
        value for each in sources for value in each.constexprs.values() if isinstance(value, WeightFormat)
    }
    assert any(each.SPLIT for each in formats) == splits


@pytest.mark.parametrize(
    ("form", "block"), [("fp8 blocks", 128), ("fp8", 1), ("compressed-tensors channel", 1)]
)
def test_products_with_float8_weights_are_recorded(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, block: int
) -> None:
    Float8OnCpu(monkeypatch)
    path, _ = write_pair(tmp_path, "qwen3", form)

    def recorded(**options: Any) -> list[KernelSource]:
        sizes = [*SIZES[:-1], 128, 512]
        config = make_gpu_config(
            make_config, sizes, model=str(path), max_num_seqs=128, dtype="float32", **options
        )
        return [
            each
            for each in sources_of(config, make_layer(config))
            if each.name == "small_batch_linear_kernel"
        ]

    sources = recorded()
    formats = [
        value for each in sources for value in each.constexprs.values() if isinstance(value, WeightFormat)
    ]
    assert len(formats) == len(sources) > 10 and {each.SCALE_ROWS for each in formats} == {block}
    # More decodes are vLLM's products, of input that the kernels in front quantize.
    assert len(recorded(additional_config={"rose": {"max_quantized_rows": 8}})) < len(sources)
    assert not recorded(additional_config={"rose": {"max_quantized_rows": 0}})


@pytest.mark.parametrize(
    ("form", "group", "has_zeros"),
    [("pack-quantized 32", 32, False), ("pack-quantized all zeros", 0, True), ("awq 128 zeros", 128, True)],
)
def test_products_with_int4_weights_are_recorded(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    group: int,
    has_zeros: bool,
) -> None:
    take_int4_on_cpu(monkeypatch)
    path, _ = write_pair(tmp_path, "qwen3", form)

    def recorded(*, rows: int = 256, **options: Any) -> dict[str, list[KernelSource]]:
        options["additional_config"] = {"rose": {"max_quantized_rows": rows}}
        config = make_gpu_config(
            make_config, [*SIZES[:-1], 128, 512], model=str(path), max_num_seqs=128, **options
        )
        sources = sources_of(config, make_layer(config))
        names = ("small_batch_linear_kernel", "_dequantize_int4_kernel")
        return {name: [each for each in sources if each.name == name] for name in names}

    sources = recorded(dtype="bfloat16")
    few, many = sources.values()
    formats = [value for each in few for value in each.constexprs.values() if isinstance(value, WeightFormat)]
    assert len(formats) == len(few) > 10 and {each.STEP for each in formats} == {32 if group == 32 else 64}
    # Attention's output may be one group.
    assert {0, *(each.GROUP for each in formats)} == {0, group}
    # Of each depth one. Zeros are bytes.
    assert len(many) == 2
    assert {"*u8" in each.signature.values() for each in many} == {has_zeros}
    assert [bool(each) for each in recorded(dtype="float16", rows=0).values()] == [False, True]
    # Without the option, so many requests leave vLLM's layers.
    config = make_gpu_config(make_config, SIZES, model=str(path), max_num_seqs=129, dtype="bfloat16")
    layer = make_layer(config)
    launched = {each.name for each in sources_of(config, layer)}
    assert launched.isdisjoint({"small_batch_linear_kernel", "_dequantize_int4_kernel"})
    with record_launches(H200), on_cuda():
        num_steps = len(list(recorded_steps(config, layer)))
        config.model_config.hf_config.architectures = ["RoseQwen3ForCausalLM"]
        assert len(list(recorded_steps(config, layer))) > num_steps
    # A rank's products are by both kernels, too.
    assert all(recorded(dtype="bfloat16", tensor_parallel_size=2).values())


@pytest.mark.parametrize(("form", "by_row"), [("fp8 blocks", False), ("compressed-tensors channel", True)])
def test_kernels_that_quantize_are_recorded(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, by_row: bool
) -> None:
    Float8OnCpu(monkeypatch)
    path, _ = write_pair(tmp_path, "qwen3", form, **GPU_SIZES)
    config = make_gpu_config(make_config, model=str(path), dtype="bfloat16")
    found = {
        (each.name, value.BY_ROW)
        for each in sources_of(config, make_layer(config))
        for value in each.constexprs.values()
        if isinstance(value, Groups)
    }
    assert found == {("_norm_kernel", by_row), ("_silu_mul_kernel", by_row)}


class Pool:
    """Stands for the processes: 'compiles' a kernel when it is asked for."""

    failure: str | None = None
    num_processes: int | None = None
    num_finished = 0
    loaded: ClassVar[list[int]] = []
    """Kernels of each kind of layer whose kernels were loaded."""

    def __init__(self, num_processes: int | None) -> None:
        Pool.num_processes = num_processes
        self.sources: list[KernelSource] = []

    def submit(self, sources: list[KernelSource]) -> None:
        self.sources = sources

    def finished(self) -> Iterator[CompiledKernel]:
        for source in self.sources:
            Pool.num_finished += 1
            yield CompiledKernel(source, None, folder=".")

    def close(self) -> None:
        pass


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> type[Pool]:
    monkeypatch.setattr(compilation_pool, "CompilationPool", Pool)
    monkeypatch.setattr(Pool, "num_finished", 0)
    monkeypatch.setattr(Pool, "loaded", [])
    monkeypatch.setattr(RecordedLaunches, "load", lambda self: Pool.loaded.append(len(self.sources)))
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    monkeypatch.setattr("rose_backend.kernels.gpu_properties.gpu_properties", lambda device: H200)
    return Pool


def test_the_first_layer_begins_and_launches_wait(make_config: MakeConfig, pool: type[Pool]) -> None:
    config = make_gpu_config(make_config)
    for _ in range(3):
        make_layer(config)
    assert len(pending_kernels._pending) == 1 and pool.num_finished == 0
    pending_kernels.wait_for_kernels(*SAMPLER_KERNELS)
    num_finished = pool.num_finished
    assert num_finished > 0
    pending_kernels.wait_for_kernels(*SAMPLER_KERNELS)
    assert pool.num_finished == num_finished and not pool.loaded
    RoseAttentionMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
    assert pending_kernels._pending == [] and pool.num_finished > num_finished
    assert pool.loaded == [pool.num_finished]
    # Everything is in the cache now.
    pending_kernels._begun.clear()
    make_layer(config)
    assert [each.compilation.is_over for each in pending_kernels._pending] == [True]
    pending_kernels.wait_for_kernels()
    assert pool.loaded == [pool.num_finished] * 2, "what an earlier start has compiled is loaded, too"
    pending_kernels._begun.clear()
    make_layer(config)
    make_layer(config, sliding_window=64)
    assert [each.compilation.is_over for each in pending_kernels._pending] == [True, False]


def test_another_engine_of_the_process_begins_too(make_config: MakeConfig, pool: type[Pool]) -> None:
    config, larger, *adapted = [make_gpu_config(make_config) for _ in range(4)]
    # The same layers, in steps of more requests, and beside adapters.
    larger.scheduler_config.max_num_seqs = 2 * config.scheduler_config.max_num_seqs
    for each, rank in zip(adapted, (8, 16), strict=True):
        each.lora_config = LoRAConfig(max_lora_rank=rank)
    for each in (config, larger, *adapted, config):
        make_layer(each)
    assert len(pending_kernels._pending) == 4
    pending_kernels.wait_for_kernels()


def test_language_models_of_other_sizes_beside_the_same_encoder_are_told_apart(
    make_config: MakeConfig,
) -> None:
    config, keys = make_gpu_config(make_config), []
    for size in (1024, 2048):
        config.model_config.hf_text_config = SimpleNamespace(intermediate_size=size)
        keys.append(pending_kernels._key(config))
    assert keys[0] != keys[1]


def test_models_whose_weights_are_stored_otherwise_are_told_apart(make_config: MakeConfig) -> None:
    config = make_gpu_config(make_config)
    keys = [pending_kernels._key(config)]
    config.model_config.quantization = "fp8_per_tensor"
    keys.append(pending_kernels._key(config))
    for size in (64, 128):
        fields = {"quant_method": "awq", "group_size": size}
        config.model_config.hf_text_config = SimpleNamespace(quantization_config=fields)
        keys.append(pending_kernels._key(config))
    assert all(key not in keys[:index] for index, key in enumerate(keys))


def test_a_start_survives_what_goes_wrong(
    make_config: MakeConfig, pool: type[Pool], rose_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_gpu_config(make_config)
    monkeypatch.setattr(pool, "failure", "a process ended")
    make_layer(config)
    pending_kernels.wait_for_kernels()
    message = "Rose: kernels are compiled one after the other, in this process: "
    assert rose_log[-1] == f"{message}a process ended"

    def fail(*args: Any) -> None:
        raise ValueError("no such thing")

    pending_kernels._begun.clear()
    monkeypatch.setattr(pool, "failure", None)
    with monkeypatch.context() as patch:
        patch.setattr(RecordedLaunches, "load", fail)
        make_layer(config)
        pending_kernels.wait_for_kernels()
    assert rose_log[-1] == f"{message}ValueError: no such thing"
    monkeypatch.setattr(pending_kernels, "record", fail)
    make_layer(config, sliding_window=64)
    assert rose_log[-1] == f"{message}ValueError: no such thing"
    pending_kernels.wait_for_kernels()


# No step launches a kernel of Rose that was not found at the start: random steps.
NUM_STEPS = 300
META = torch.device("meta")
H100, A100 = GpuProperties((9, 0), 132), GpuProperties((8, 0), 108)
APART = {"rose": {"fused_kv_append": False}}
NOTHING: dict[str, Any] = {}

# Query and KV heads, their size, the GPU; further options of the layer, and of the engine.
Case = tuple[tuple[int, int, int], GpuProperties, dict[str, Any], dict[str, Any]]
LAYERS: dict[str, Case] = {
    "heads of 64": ((12, 12, 64), H100, NOTHING, NOTHING),
    "Llama 8B": ((32, 8, 128), H100, NOTHING, {"max_num_seqs": 256}),
    "Llama 8B, one request at a time": ((32, 8, 128), H100, NOTHING, {"max_num_seqs": 1}),
    "Llama 8B on an A100": ((32, 8, 128), A100, NOTHING, {"max_num_seqs": 700}),
    "FlashAttention": ((32, 8, 128), H100, {"may_use_flash": True}, {"max_num_seqs": 48}),
    "drafts": ((32, 8, 128), H100, NOTHING, {"speculative_config": N_GRAMS}),
    "a drafter": ((32, 8, 128), H100, {"is_drafter": True}, {"speculative_config": N_GRAMS}),
    "float8": ((16, 4, 128), H100, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
    "stored apart": ((8, 1, 256), H100, NOTHING, {"additional_config": APART}),
    "window and sinks": ((64, 8, 64), H100, {"sliding_window": 128, "sinks": torch.zeros(64)}, NOTHING),
    "heads of 72": ((5, 5, 72), H100, {"alibi_slopes": [0.5] * 5, "logits_soft_cap": 30.0}, NOTHING),
}


@pytest.fixture
def gpu_config(make_config: MakeConfig) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        sizes = [1, 2, 4, *range(8, 513, 8), *range(576, 1089, 64)]
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, **options}
        return make_gpu_config(make_config, sizes, **options)

    return make


@contextmanager
def on_cuda() -> Iterator[None]:
    """Let vLLM believe in a GPU, on which FlashAttention 3 does nothing; the write in front of it is Rose's."""
    module = SimpleNamespace(flash_attn_varlen_func=lambda **arguments: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
        patch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
        patch.setattr(flash_attention, "_schedule", lambda *arguments: None)
        yield


class RandomSteps:
    """Describes steps as vLLM does: decodes, with drafts or without, prompts and parts of prompts; launched, or as they
    are captured.
    """

    def __init__(self, config: Any, layer: Any) -> None:
        self.rng = np.random.default_rng(3)
        self._config = config
        self._builder = RoseAttentionMetadataBuilder(None, ["layer"], config, META)
        self._builder._uses_flash = layer.may_use_flash

    def next(self) -> RoseAttentionMetadata:
        scheduler, rng = self._config.scheduler_config, self.rng
        num_rows = self._size(min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))
        num_decodes = int(rng.choice([num_rows, num_rows - 1, 0, rng.integers(0, num_rows + 1)]))
        most_tokens = self._builder.reorder_batch_threshold
        # All drafts that are asked for, or some.
        query_lens = rng.integers(rng.choice([1, most_tokens]), most_tokens + 1, num_decodes)
        num_prompts = num_rows - num_decodes
        most = scheduler.max_num_batched_tokens - int(query_lens.sum())
        if num_prompts and most > num_prompts:
            shares = np.full(num_prompts, 1 / num_prompts)
            prompts = 1 + rng.multinomial(self._size(most - num_prompts), shares)
            if rng.random() < 0.2:
                prompts[:] = 1
                prompts[-1] = self._size(most - num_prompts)
            query_lens = np.concatenate([query_lens, np.sort(prompts)])
        if len(query_lens) == 0:
            return self.next()
        common = recorded_step(self._config, query_lens.tolist())
        if rng.random() < 0.3:
            return self._builder.build_for_cudagraph_capture(common)
        return self._builder.build(0, common)

    def _size(self, most: int) -> int:
        """Return 1 to ``most``, small ones, powers of two and their neighbors more often."""
        near = int(2 ** self.rng.uniform(0, np.log2(most + 1)))
        return int(np.clip(self.rng.choice([near, near - 1, near + 1, near // 16 * 16]), 1, most))


def run_random_steps(
    config: Any, layer: Any, gpu: GpuProperties, run: Callable[[RoseAttentionMetadata], None]
) -> None:
    """Run steps on tensors without memory, behind what a start records; compare their kernels."""
    with on_cuda():
        at_start = {each.key for each in pending_kernels.record(config, layer, gpu).compilations}
    assert len(at_start) > 5
    vocab_size = config.model_config.get_vocab_size()
    with on_cuda(), torch.inference_mode(), record_launches(gpu) as recorded:
        steps = RandomSteps(config, layer)
        for _ in range(NUM_STEPS):
            metadata = steps.next()
            run(metadata)
            if why_vllm_draws(config) is not None:
                continue
            num_rows = len(metadata.query_start_loc) - 1
            width = vocab_size + int(steps.rng.choice([0, -vocab_size % 64]))
            logits = torch.empty((num_rows, width), device=META)[:, :vocab_size]
            values = torch.empty(num_rows, device=META)
            top_k = values.to(torch.int64) if steps.rng.random() < 0.5 else None
            draw(logits, values, top_k, None if top_k is None else values, values.long(), values.long())
    late = [
        (source.name, source.signature, source.constexprs, source.attributes)
        for source, each in zip(recorded.sources, recorded.compilations, strict=True)
        if each.key not in at_start
    ]
    assert not late, "\n".join(map(str, late))


@pytest.mark.parametrize("case", LAYERS)
def test_attention_of_random_steps(gpu_config: Callable[..., Any], case: str) -> None:
    (heads, kv_heads, head_size), gpu, options, engine = LAYERS[case]
    config = gpu_config(**engine)
    own = {name: value for name, value in options.items() if name not in ("may_use_flash", "is_drafter")}
    with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patch:
        if "is_drafter" in options:
            patch.setattr(backends, "model_tag", "eagle_head")
        layer = RoseAttentionImpl(heads, head_size, head_size**-0.5, kv_heads, **own)
    layer.may_use_flash = "may_use_flash" in options
    attend = RecordedAttention(config, layer)
    turn = 0

    def run(metadata: RoseAttentionMetadata) -> None:
        nonlocal turn
        layouts = list(projections(config, layer, metadata.num_actual_tokens))
        turn += 1
        query, key, value = layouts[turn % len(layouts)]
        attend.metadata = metadata
        attend(0, query, key, value)

    run_random_steps(config, layer, gpu, run)


@pytest.mark.parametrize(
    ("case", "gpu", "options"),
    [
        ("llama-biases", H100, {"max_num_seqs": 256}),
        ("qwen3", H100, {"max_num_seqs": 600, "dtype": "bfloat16"}),
        ("qwen2", A100, {"max_num_batched_tokens": 300}),
        ("mistral", H100, {"tensor_parallel_size": 2}),
        ("llama-biases", H100, {"speculative_config": TWO_DRAFTS, "dtype": "bfloat16"}),
        ("qwen3", H100, {"speculative_config": TWO_DRAFTS, "max_num_seqs": 1, "dtype": "float32"}),
        ("qwen3", H100, {"additional_config": {"rose": {"fused_mlp": False}}}),
        ("qwen3", H100, {"quantization": "fp8_per_block", "dtype": "bfloat16"}),
        ("llama-biases", H100, {"quantization": "fp8_per_channel", "max_num_seqs": 256}),
        ("llama-biases", H100, {"form": "awq 128 zeros", "dtype": "bfloat16"}),
        ("qwen3", A100, {"form": "pack-quantized 32", "tensor_parallel_size": 2, "dtype": "float16"}),
    ],
)
def test_layers_of_random_steps(
    gpu_config: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    gpu: GpuProperties,
    options: dict[str, Any],
) -> None:
    Float8OnCpu(monkeypatch)
    take_int4_on_cpu(monkeypatch)
    sizes = {"hidden_size": 1024, "intermediate_size": 384}
    options = dict(options)
    form = options.pop("form", None)
    path = write_checkpoint(tmp_path / case, case, **sizes) if form is None else tmp_path / case
    if form is not None:
        path, _ = write_pair(path, case, form, **sizes)
    config = gpu_config(model=str(path), **options)
    with set_current_vllm_config(config):
        layer = RoseAttentionImpl(16, 128, 128**-0.5, 8)
    run_random_steps(config, layer, gpu, RecordedDecoder(config, layer).run)
