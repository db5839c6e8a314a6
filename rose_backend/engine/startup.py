"""From options to an engine that is ready to serve: the model, its KV pool, its graphs, and the start-up report.

All checks of options against model and machine are here. What only a GPU needs is in ``gpu_startup.py``, which is not
imported on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from rose_backend.config import SWITCH_NAMES, EngineConfig, Switches
from rose_backend.engine.head_drafts import load_draft_head
from rose_backend.engine.kv_pool import (
    allocate_kv_cache,
    cached_sizes,
    choose_max_model_len,
    choose_num_blocks,
    gpu_reserve_bytes,
)
from rose_backend.engine.model_runner import ModelRunner, captures_graphs
from rose_backend.engine.process_settings import (
    CpuThreads,
    check_num_threads,
    choose_cpu_threads,
    take_imports,
)
from rose_backend.engine.progress import LoadingProgress
from rose_backend.engine.request import generation_eos_token_ids
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.engine.tokenizer_loading import PendingTokenizer, TokenizerLoading
from rose_backend.errors import ConfigError, RoseError, kind_and_text
from rose_backend.kernels import Adapters, PackedLinear
from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.kernels.sampling.ops import SAMPLER_KERNELS
from rose_backend.models.adapters import AdapterSlots, why_no_adapters
from rose_backend.models.base import CausalLM, load_model
from rose_backend.models.config import ModelConfig
from rose_backend.models.eagle3 import Eagle3Head, check_head
from rose_backend.models.weights import resolve_model_path
from rose_backend.scheduling import default_token_budget

if TYPE_CHECKING:
    from rose_backend.compile_ahead.pool import AheadCompilation, Compilations


logger = logging.getLogger(__name__)

_MIB = 1 << 20
_KERNEL_PARTS = ("fused_kv_append", "fused_mlp", "fused_sampler", "fused_add_layernorm")
_DEFAULT_RUN_AHEAD = {"cpu": 0, "cuda": 1}
"""On a CPU, steps run on the cores that schedule them, so running ahead hides nothing."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What an engine is built around."""

    config: EngineConfig
    """The options, with ``max_num_batched_tokens`` chosen where it was None."""
    model: CausalLM
    tokenizer: Tokenizer
    max_model_len: int
    """Prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    kv_cache: torch.Tensor  # [L, 2, NB, BS, HKV, D]; the last layer is a head's, if there is one
    run_ahead: int
    """Steps that may be in flight after the one whose tokens are read."""
    cpu_threads: CpuThreads | None
    """Threads of a step's operations; None on other devices."""
    weight_bytes: int
    packed_bytes: int
    """Further copies of weights, laid out for small batches."""
    compilation: AheadCompilation | None
    """Kernels that other processes compile in the meantime; None if none do."""
    seconds: dict[str, float]
    """How long each part of loading took."""
    head: Eagle3Head | None = None
    """What makes drafts; None: they are looked up, if there are any."""
    lora_slots: AdapterSlots | None = None
    """Room for LoRA adapters; None: there is none."""


def load(
    config: EngineConfig, *, is_online: bool = False, tokenizer: PendingTokenizer | None = None
) -> LoadedModel:
    """Load the model and make its KV pool.

    Args:
        is_online: clients read tokens as they come; decides ``max_num_batched_tokens`` if that is None.
        tokenizer: loaded by the caller; None loads it in parallel with the weights.

    Raises:
        ConfigError: the options do not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """
    if tokenizer is not None:
        return _load(config, is_online, tokenizer)
    with TokenizerLoading(resolve_model_path(config.model)) as loading:
        return _load(config, is_online, loading)


def _load(config: EngineConfig, is_online: bool, pending: PendingTokenizer) -> LoadedModel:
    start = time.perf_counter()
    device = resolve_device(config.device)
    check_num_threads(config, device)
    if config.max_num_batched_tokens is None:
        token_budget = default_token_budget(device, is_online=is_online)
        config = dataclasses.replace(config, max_num_batched_tokens=token_budget)
    directory = resolve_model_path(config.model)
    compilation = None if device.type == "cpu" else _start_compilation(directory, config, device)
    kernels_known = time.perf_counter()
    drafts = config.drafts

    def check_sizes(sizes: ModelConfig) -> None:
        if drafts is not None and drafts.model is not None:
            check_head(drafts.model, sizes)
        if config.enable_lora and (why := why_no_adapters(sizes)) is not None:
            raise ConfigError(f"enable_lora: got True, allowed is False for a model with {why}")

    with LoadingProgress() as progress:
        model = load_model(
            directory,
            dtype=config.dtype,
            device=device.type,
            switches=config,
            max_model_len=config.max_model_len,
            on_progress=progress.update,
            check_sizes=check_sizes,
        )
    sizes = model.config
    max_model_len = choose_max_model_len(config, sizes.max_position_embeddings)
    head = load_draft_head(config, model)
    lora_slots = model.add_lora_slots(config.max_loras, config.max_lora_rank) if config.enable_lora else None
    if not config.chunked_prefill and config.token_budget < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens: got {config.token_budget}, with chunked_prefill off at least "
            f"max_model_len, which is {max_model_len}, is needed"
        )
    weights_loaded = time.perf_counter()
    cached = cached_sizes(sizes, head)
    num_blocks = choose_num_blocks(config, cached, max_model_len=max_model_len, device=device)
    kv_cache = allocate_kv_cache(num_blocks, config.block_size, cached, device)
    pool_made = time.perf_counter()
    tokenizer = Tokenizer(pending.result())
    if not is_online:
        tokenizer.prepare()
    of_head = None if head is None else head.weights
    weight_bytes = storage_bytes((model.weights, of_head), leave_out=(PackedLinear, Adapters))
    return LoadedModel(
        config=config,
        model=model,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(directory, sizes, tokenizer),
        num_blocks=num_blocks,
        kv_cache=kv_cache,
        run_ahead=_DEFAULT_RUN_AHEAD[device.type] if config.run_ahead is None else config.run_ahead,
        cpu_threads=choose_cpu_threads(config, device, weight_bytes // sizes.dtype.itemsize),
        weight_bytes=weight_bytes,
        packed_bytes=storage_bytes((model.weights, of_head), leave_out=Adapters) - weight_bytes,
        compilation=compilation,
        seconds={
            "kernel list": kernels_known - start,
            "weights": weights_loaded - kernels_known,
            "KV pool": pool_made - weights_loaded,
            "tokenizer": time.perf_counter() - pool_made,
        },
        head=head,
        lora_slots=lora_slots,
    )


def _start_compilation(
    directory: Path, config: EngineConfig, device: torch.device
) -> AheadCompilation | None:
    """Let processes compile while this one reads weights."""
    try:
        from rose_backend.engine.gpu_startup import compile_starts

        return compile_starts(directory, [config], gpu_properties(device))
    except RoseError:
        raise
    except Exception as error:  # the start itself has not failed
        _warn_of_failed_compilation(kind_and_text(error))
        return None


def _warn_of_failed_compilation(why: str) -> None:
    from rose_backend.compile_ahead.pool import COMPILES_ALONE

    logger.warning("%s: %s", COMPILES_ALONE, why)


def resolve_device(name: str) -> torch.device:
    """Return the device to run on; "auto" takes a GPU where there is one.

    Raises:
        ConfigError: "cuda" was asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            "device: got 'cuda', but this PyTorch sees no CUDA device; allowed here are auto and cpu"
        )
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _eos_token_ids(directory: Path, sizes: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the end tokens of all files that name some: conversations end with others than plain texts do."""
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    named = dict.fromkeys((*sizes.eos_token_ids, *generation_eos_token_ids(directory), *own))
    return tuple(each for each in named if 0 <= each < sizes.vocab_size)


def storage_bytes(holder: Any, *, leave_out: tuple[type, ...] | type = ()) -> int:
    """Return the bytes of all tensors in dataclasses, mappings and sequences, each allocation counted once.

    Args:
        leave_out: types of dataclasses whose tensors do not count.
    """
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, leave_out):
            return
        elif dataclasses.is_dataclass(value):
            for each in dataclasses.fields(value):
                visit(getattr(value, each.name))
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                visit(each)

    visit(holder)
    return sum(storages.values())


def warm_up(runner: ModelRunner, loaded: LoadedModel) -> StartUpReport:
    """Make ``runner`` ready to serve, so that no step waits for a kernel to be compiled."""
    config, seconds = loaded.config, {**take_imports(), **loaded.seconds}
    graph_bytes: dict[str, int] = {}
    kernels: Compilations | None = None
    if loaded.kv_cache.device.type != "cpu":
        kernels = _warm_up_gpu(runner, loaded, seconds, graph_bytes)
    memory, total_memory = _memory_use(loaded, graph_bytes)
    report = StartUpReport(
        config=config,
        memory=memory,
        total_memory=total_memory,
        num_blocks=loaded.num_blocks,
        max_model_len=loaded.max_model_len,
        cpu_threads=None if loaded.cpu_threads is None else str(loaded.cpu_threads),
        seconds=seconds,
        num_kernels=0 if kernels is None else len(kernels.names),
        kernel_seconds=0.0 if kernels is None else kernels.seconds,
    )
    report.log()
    return report


def _warm_up_gpu(
    runner: ModelRunner, loaded: LoadedModel, seconds: dict[str, float], reserved_bytes: dict[str, int]
) -> Compilations:
    """Launch every kernel and capture the graphs.

    Args:
        seconds: gets the time of each part.
        reserved_bytes: gets the memory that the allocator reserved in each part.

    Returns:
        What was compiled, or loaded from disk.
    """
    from rose_backend.compile_ahead.pool import watch_compilations
    from rose_backend.engine.gpu_startup import launch_everything

    device, compilation = loaded.kv_cache.device, loaded.compilation

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        start, reserved = time.perf_counter(), torch.cuda.memory_reserved(device)
        yield
        torch.cuda.synchronize(device)
        # Blocks that the allocator has cached but no tensor uses do not count.
        torch.cuda.empty_cache()
        seconds[name] = time.perf_counter() - start
        reserved_bytes[name] = torch.cuda.memory_reserved(device) - reserved

    def wait_for_sampler() -> None:
        start = time.perf_counter()
        failure = None if compilation is None else compilation.wait()
        if failure is not None:
            _warn_of_failed_compilation(failure)
        seconds["compilation"] += time.perf_counter() - start

    with watch_compilations() as compilations:
        start = time.perf_counter()
        if compilation is not None:
            # The sampler's kernels take longest: forward passes are prepared without them.
            compilation.wait_for_others(*SAMPLER_KERNELS)
        seconds["compilation"] = time.perf_counter() - start
        launch_everything(runner, loaded.config, loaded.model, loaded.kv_cache, part, wait_for_sampler)
    return compilations


def _memory_use(loaded: LoadedModel, graph_bytes: dict[str, int]) -> tuple[dict[str, int], int | None]:
    """Return the bytes by what they are for, and the device's memory.

    Args:
        graph_bytes: what captured steps compute with; the graphs themselves are among CUDA's.
    """
    memory = {
        "weights": loaded.weight_bytes,
        "packed copies of weights": loaded.packed_bytes,
        "LoRA slots": 0 if loaded.lora_slots is None else loaded.lora_slots.num_bytes,
        "KV pool": loaded.kv_cache.nbytes,
    }
    if loaded.kv_cache.device.type == "cpu":
        return memory, None
    memory["CUDA graphs of decode steps"] = graph_bytes.get("decode graphs", 0)
    memory["CUDA graphs of prompt passes"] = graph_bytes.get("prompt graphs", 0)
    free, total = torch.cuda.mem_get_info(loaded.kv_cache.device)
    reserve = gpu_reserve_bytes(loaded.config, loaded.model.config)
    known = sum(memory.values())
    # Free memory reserved for what the largest steps need besides graphs.
    captured = memory["CUDA graphs of decode steps"] + memory["CUDA graphs of prompt passes"]
    memory["set aside for steps"] = workspace = min(max(reserve - captured, 0), free)
    # Kernels and graphs, what rounding wastes.
    memory["CUDA, libraries, other programs"] = total - free - known
    memory["free"] = free - workspace
    return memory, total


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUpReport:
    """An engine's memory, limits, and the seconds its start took."""

    config: EngineConfig
    """The options, with a value for each that was left open."""
    memory: dict[str, int]
    """Bytes by what they are for. On a GPU all together are ``total_memory``."""
    total_memory: int | None = None
    """None on a CPU, where only weights and KV pool are known."""
    num_blocks: int
    """The null block included."""
    max_model_len: int
    cpu_threads: str | None = None
    """How many a step's operations are split over, and why; None where they do not run on a CPU."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By part of the start, in order."""
    num_kernels: int = 0
    """Triton kernels that were compiled, or loaded from Triton's cache on disk."""
    kernel_seconds: float = 0.0
    """How long that took; part of ``seconds``."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return (self.num_blocks - 1) * self.config.block_size

    @property
    def max_concurrency(self) -> float:
        """Sequences of ``max_model_len`` that the KV pool holds at once."""
        return (self.num_blocks - 1) / -(-self.max_model_len // self.config.block_size)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of everything, for people."""
        for name, num_bytes in self.memory.items():
            if num_bytes or name == "free":
                yield name, f"{num_bytes / _MIB:,.0f} MiB"
        if self.total_memory is not None:
            yield "total", f"{self.total_memory / _MIB:,.0f} MiB"
        yield (
            "KV blocks",
            f"{self.num_blocks:,} of {self.config.block_size} tokens: {self.num_kv_tokens:,} tokens",
        )
        limit = (
            "all that may run" if self.max_concurrency >= self.config.max_num_seqs else "more wait for blocks"
        )
        yield "at full length", f"{self.max_concurrency:.1f} sequences of {self.max_model_len:,}; {limit}"
        yield (
            "a step at most",
            f"{self.config.max_num_seqs:,} sequences, {self.config.token_budget:,} tokens",
        )
        if self.config.drafts is not None:
            yield "drafts", str(self.config.drafts)
        if self.config.kv_canary != "off":
            yield "KV canary", self.config.kv_canary
        if self.cpu_threads is not None:
            yield "CPU threads", self.cpu_threads
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        yield "start-up", f"{sum(self.seconds.values()):.1f} s: {parts}"
        if self.num_kernels:
            yield "kernels", f"{self.num_kernels} compiled or loaded in {self.kernel_seconds:.1f} s of that"

    def log(self) -> None:
        """Log every line."""
        for name, value in self.lines():
            logger.info("%s: %s", name, value)


def show_start_up(report: StartUpReport) -> None:
    """Print the report as a table on stderr if that is a terminal; otherwise the log has it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    table = Table(show_header=False, title="start-up", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in report.lines():
        table.add_row(name, value)
    console.print(table)


def feature_status(config: Switches, device: str) -> dict[str, str]:
    """Describe every switch.

    Args:
        config: the switches asked for.
        device: "cpu" or "cuda".

    Returns:
        Switch name to "on", "off", "on (...)" with what it runs on, or "unavailable (...)" with the reason.
    """
    return {name: _describe(name, config, device) for name in SWITCH_NAMES}


def _describe(name: str, config: Switches, device: str) -> str:
    if not getattr(config, name):
        return "off"
    if name == "cuda_graph" and not captures_graphs(config, device):
        reason = "fused_sampler is off" if device == "cuda" else f"device is {device}"
        return f"unavailable ({reason})"
    if name == "token_granular_hits" and not config.prefix_cache:
        return "unavailable (prefix_cache is off)"
    if name in _KERNEL_PARTS:
        return "on (Triton kernels)" if device == "cuda" else "on (PyTorch operations)"
    return "on"
