"""Every kernel that an engine launches on a GPU; nothing here is imported on a CPU.

Passes over padding launch them all. A start runs these passes twice: first on tensors without memory, which only
records what has to be compiled, so that other processes compile it while weights load; then on the device, where the
compiled kernels are loaded and graphs captured. There is no second list of kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rose_backend.block_manager import BlockManager
from rose_backend.compile_ahead.pool import AheadCompilation, CompiledKernel, CompleteStarts
from rose_backend.compile_ahead.recorded_launches import KernelSource, record_launches
from rose_backend.config import EngineConfig, check_int
from rose_backend.engine.decode_runner import launched_widths
from rose_backend.engine.head_drafts import load_draft_head
from rose_backend.engine.kv_pool import allocate_kv_cache, cached_sizes, choose_max_model_len
from rose_backend.engine.model_runner import ModelRunner, captures_graphs
from rose_backend.engine.progress import show_progress
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.errors import ConfigError
from rose_backend.kernels import block_clone
from rose_backend.kernels.gpu_properties import GpuProperties, gpu_properties
from rose_backend.kernels.tuning.choices import (
    TUNED_PAIRS_PER_EXPERT,
    TUNED_QUERY_LENS,
    decode_kind,
    int4_kind,
    num_processors,
    row_counts,
    rows_tile,
)
from rose_backend.layers.attention import AttentionMetadata
from rose_backend.layers.decoder import max_packed_int4_rows
from rose_backend.layers.linear import fewest_halved_rows
from rose_backend.models.base import CausalLM, load_model
from rose_backend.models.config import ModelConfig
from rose_backend.models.eagle3 import resolve_head_path
from rose_backend.models.quantization import Int4Quantization
from rose_backend.models.weights import CONFIG_FILE, resolve_model_path
from rose_backend.scheduling import default_token_budgets

_NUM_PROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}
"""Of A100, H100 SXM and H200, B200."""
_LOWEST_CAPABILITY = (8, 0)
_NUM_BLOCKS = 1024
"""No kernel depends on how many there are."""
_NO_EFFECT = (
    "model",
    "device",
    "num_blocks",
    "gpu_memory_utilization",
    "cpu_kvcache_space_gib",
    "num_threads",
    "run_ahead",
    "seed",
    "generation_config",
    "max_queue_size",
    "adaptive_drafts",
)
"""Options that choose no kernel."""


class PaddingPass(NamedTuple):
    """A forward pass in which all rows are padding: it launches kernels that neither read nor write K/V."""

    num_decodes: int
    num_prefills: int
    tokens_per_prefill: int

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return self.num_decodes + self.num_prefills * self.tokens_per_prefill


def launch_everything(
    runner: ModelRunner,
    config: EngineConfig,
    model: CausalLM,
    kv_cache: torch.Tensor,
    part: Callable[[str], contextlib.AbstractContextManager[None]] = lambda name: contextlib.nullcontext(),
    before_draws: Callable[[], None] = lambda: None,
) -> None:
    """Launch each kernel that a step can launch, on padding, and capture the graphs.

    Args:
        config, model, kv_cache: what ``runner`` was made of; on ``meta``, launches can only be recorded.
        part: entered around each part of the work, given its name.
        before_draws: called before the first of the sampler's kernels is launched.
    """
    with part("kernels"):
        warm_kernels(config, model, kv_cache)
    before_draws()
    has_graphs = captures_graphs(config, "cuda")
    with part("sampler"):
        runner.warm_up_draws()
        launched = launched_widths(config.max_num_seqs)
        runner.decoder.warm_up(launched if has_graphs else (*runner.decoder.widths, *launched))
    if has_graphs:
        with part("decode graphs"):
            runner.decoder.capture()
        with part("prompt graphs"):
            runner.capture_prompts()


@torch.inference_mode()
def warm_kernels(config: EngineConfig, model: CausalLM, kv_cache: torch.Tensor) -> None:
    """Launch each kernel that a step can reach outside captured graphs, on padding.

    A head's kernels are the same in all steps: warming decode steps up launches them.
    """
    device = kv_cache.device
    sizes = model.config, num_processors(device)
    passes = padding_passes(config, decode_kinds(*sizes), token_counts(*sizes))
    for has_adapters in (False, True) if config.enable_lora else (False,):
        for each in show_progress("preparing kernels", passes):
            _run_padding(model, kv_cache, each, has_adapters=has_adapters)
    for num_pairs in row_counts(config.max_num_seqs):
        null_block = torch.zeros(num_pairs, dtype=torch.int32, device=device)
        block_clone(kv_cache, null_block, null_block, block_dim=2)


def decode_kinds(model: ModelConfig, num_processors: int) -> Callable[[int], Hashable]:
    """Return what decodes are compiled for: ``decode_kind`` of this model's heads on a GPU with ``num_processors``."""
    of_attention = functools.partial(
        decode_kind,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        dtype=model.dtype,
        num_processors=num_processors,
    )
    if not isinstance(model.quantization, Int4Quantization):
        return of_attention
    return lambda num_rows: (of_attention(num_rows), int4_kind(num_rows))


def token_counts(model: ModelConfig, num_processors: int) -> list[int]:
    """Return numbers of tokens: any other number has the tile configuration of one of these, or of one token."""
    counts = [fewest_halved_rows(model.hidden_size, num_processors)]
    if isinstance(model.quantization, Int4Quantization):
        # Rose's kernel multiplies prompts of few tokens, too.
        counts += row_counts(max_packed_int4_rows(), int4_kind)
    if (experts := model.experts) is not None:
        counts += [int(pairs * experts.num_experts) // experts.top_k + 1 for pairs in TUNED_PAIRS_PER_EXPERT]
    return counts


def padding_passes(
    config: EngineConfig,
    decode_kind: Callable[[int], Hashable] = lambda num_rows: None,
    token_counts: Sequence[int] = (),
) -> list[PaddingPass]:
    """Return passes that reach every kernel that a forward pass within the limits can launch, the largest first.

    Args:
        decode_kind: what decode attention over a number of rows is compiled for.
        token_counts: of passes over one chunk, where the limits allow them.
    """
    passes = {PaddingPass(num_rows, 0, 0) for num_rows in row_counts(config.max_num_seqs, decode_kind)}
    for query_len in TUNED_QUERY_LENS:
        for num_rows in row_counts(config.max_num_seqs):
            fitting = max(min(num_rows, config.token_budget // query_len), 1)
            if rows_tile(fitting) == rows_tile(num_rows):
                passes.add(PaddingPass(0, fitting, min(query_len, config.token_budget)))
    passes |= {PaddingPass(0, 1, count) for count in token_counts if count <= config.token_budget}
    return sorted(passes, key=lambda each: each.num_tokens, reverse=True)


def _run_padding(model: CausalLM, kv_cache: torch.Tensor, each: PaddingPass, *, has_adapters: bool) -> None:
    num_decodes, num_prefills, tokens_per_prefill = each
    num_rows, num_tokens, device = num_decodes + num_prefills, each.num_tokens, kv_cache.device
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    starts[num_decodes:] = num_decodes + torch.arange(num_prefills + 1) * tokens_per_prefill
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    metadata = AttentionMetadata(
        query_start_loc=starts.to(device),
        num_computed_tokens=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
        block_table=torch.zeros((num_rows, 1), dtype=torch.int32, device=device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        num_decodes=num_decodes,
    )
    # Of no adapter: kernels depend on how many tokens there are.
    of_adapters: dict[str, Any] = {"lora_slots": zeros - 1} if has_adapters else {}
    model.forward(zeros, zeros, kv_cache, metadata, **of_adapters)


def compile_starts(
    directory: Path, configs: list[EngineConfig], gpu: GpuProperties, *, again: bool = False
) -> AheadCompilation:
    """Begin to compile what starts on a GPU need.

    Args:
        directory: of the checkpoint; without weights, config.json says which there would be.
        configs: options of each start, with ``max_num_batched_tokens`` chosen.
        again: check every kernel even if an earlier start noted that all are there.

    Raises:
        ModelError: the model cannot be loaded.
    """

    def record() -> list[KernelSource]:
        sources: list[KernelSource] = []
        for config in configs:
            sources += [each for each in record_start(directory, config, gpu) if each not in sources]
        return sources

    starts = [CompleteStarts(gpu, *_key(directory, config)) for config in configs]
    return AheadCompilation(
        starts,
        record,
        again=again,
        progress=lambda kernels, total: show_progress("compiling kernels", kernels, total=total),
    )


def record_start(directory: Path, config: EngineConfig, gpu: GpuProperties) -> list[KernelSource]:
    """Return all that a start on a GPU launches; arguments and errors are those of ``compile_starts``."""
    with record_launches(gpu) as recorded:
        meta = torch.device("meta")
        model = load_model(
            directory,
            dtype=config.dtype,
            device=meta.type,
            switches=config,
            max_model_len=config.max_model_len,
        )
        head = load_draft_head(config, model)
        if config.enable_lora:
            model.add_lora_slots(config.max_loras, config.max_lora_rank)
        sizes = cached_sizes(model.config, head)
        max_model_len = choose_max_model_len(config, sizes.max_position_embeddings)
        kv_cache = allocate_kv_cache(_NUM_BLOCKS, config.block_size, sizes, meta)
        manager = BlockManager(
            num_blocks=_NUM_BLOCKS,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            prefix_cache=False,
        )
        state = SequenceState(config.max_num_seqs, max_model_len, ())
        runner = ModelRunner(model, config, manager, state, kv_cache, head)
        launch_everything(runner, config, model, kv_cache)
    return recorded.sources


def _key(directory: Path, config: EngineConfig) -> list[object]:
    options = [
        (field.name, getattr(config, field.name)) for field in fields(config) if field.name not in _NO_EFFECT
    ]
    directories = [directory]
    if config.drafts is not None and config.drafts.model is not None:
        directories.append(resolve_head_path(config.drafts.model))
    return [*((each / CONFIG_FILE).read_bytes() for each in directories), options]


def warm_cache(
    config: EngineConfig, capability: tuple[int, int] | None, num_processors: int | None
) -> tuple[list[CompiledKernel], str | None]:
    """Compile what starts with these options need, online and offline.

    Args:
        capability: of the GPU to compile for; None takes this machine's.
        num_processors: of that GPU; None takes those of the usual model with this capability.

    Returns:
        The kernels, and why some were not compiled; None if all were.

    Raises:
        ConfigError: there is no such GPU, or Triton's cache cannot be written.
        ModelError: the model cannot be loaded.
    """
    from triton import knobs

    if knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET: got 1, with which nothing is compiled; leave it unset")
    device = None
    if capability is None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "compute_capability: there is no GPU here to compile for; name one, such as --compute-capability 9.0 "
                "for H100 and H200"
            )
        device = torch.device("cuda")
        gpu = gpu_properties(device)
    else:
        gpu = _named_gpu(capability, num_processors)
    budgets = (
        default_token_budgets(device)
        if config.max_num_batched_tokens is None
        else [config.max_num_batched_tokens]
    )
    configs = [replace(config, max_num_batched_tokens=budget) for budget in budgets]
    directory = resolve_model_path(config.model, needs_weights=False)
    compilation = compile_starts(directory, configs, gpu, again=True)
    failure = compilation.wait()
    return compilation.kernels, failure


def _named_gpu(capability: tuple[int, int], num_processors: int | None) -> GpuProperties:
    if capability < _LOWEST_CAPABILITY:
        got, lowest = (".".join(map(str, version)) for version in (capability, _LOWEST_CAPABILITY))
        raise ConfigError(f"compute_capability: got {got}, allowed are {lowest} and later")
    if num_processors is None:
        if capability not in _NUM_PROCESSORS:
            known = ", ".join(".".join(map(str, version)) for version in _NUM_PROCESSORS)
            raise ConfigError(f"multiprocessors: needed for other compute capabilities than {known}")
        num_processors = _NUM_PROCESSORS[capability]
    check_int("multiprocessors", num_processors, 1, 1024)
    return GpuProperties(capability, num_processors)
