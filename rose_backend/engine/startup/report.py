"""What an engine says about its start: which switches took effect, where the memory is, how long each part took.

Needs neither torch nor a model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from rich.console import Console
from rich.table import Table

from rose_backend.config import SWITCH_NAMES, Switches

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_MEMORY_NAMES = {
    "weights": "weights",
    "packed_copies": "packed copies of weights",
    "kv_pool": "KV pool",
    "decode_graphs": "CUDA graphs of decode steps",
    "prompt_graphs": "CUDA graphs of prompt passes",
    "workspace": "set aside for steps",
    "other": "CUDA, libraries, other programs",
    "free": "free",
}
_KERNEL_PARTS = ("fused_kv_append", "fused_mlp", "fused_sampler", "fused_add_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Where a device's memory is, in bytes. On a GPU all parts together are ``total``."""

    weights: int
    packed_copies: int
    """Weights once more, laid out for small batches."""
    kv_pool: int
    decode_graphs: int = 0
    """What their steps compute with; the graphs themselves are a part of ``other``."""
    prompt_graphs: int = 0
    workspace: int = 0
    """Free memory reserved for what the largest steps need beside graphs."""
    other: int = 0
    """CUDA's context, libraries, kernels and graphs, what rounding wastes, and other programs."""
    free: int = 0
    total: int | None = None
    """None on a CPU, where only weights and KV pool are known."""

    def parts(self) -> Iterator[tuple[str, int]]:
        """Yield name and bytes of each part there is."""
        for name, description in _MEMORY_NAMES.items():
            num_bytes = getattr(self, name)
            if num_bytes or (name == "free" and self.total is not None):
                yield description, num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUpReport:
    """An engine's memory, limits, and the seconds its start took."""

    memory: MemoryUse
    num_blocks: int
    """The null block included."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
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
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Sequences of ``max_model_len`` that the KV pool holds at once."""
        return (self.num_blocks - 1) / -(-self.max_model_len // self.block_size)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of everything, for people."""
        for name, num_bytes in self.memory.parts():
            yield name, f"{num_bytes / _MIB:,.0f} MiB"
        if self.memory.total is not None:
            yield "total", f"{self.memory.total / _MIB:,.0f} MiB"
        yield "KV blocks", f"{self.num_blocks:,} of {self.block_size} tokens: {self.num_kv_tokens:,} tokens"
        limit = "all that may run" if self.max_concurrency >= self.max_num_seqs else "more wait for blocks"
        yield "at full length", f"{self.max_concurrency:.1f} sequences of {self.max_model_len:,}; {limit}"
        yield (
            "a step at most",
            f"{self.max_num_seqs:,} sequences, {self.max_num_batched_tokens:,} tokens",
        )
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


_FIELD_NAMES = {each.name for each in fields(MemoryUse)} - {"total"}
assert set(_MEMORY_NAMES) == _FIELD_NAMES, "every part needs a name"


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
        Switch name to "on", "off", "on (...)" with what it runs on, or "not in force (...)" with the reason.
    """
    return {name: _describe(name, config, device) for name in SWITCH_NAMES}


def _describe(name: str, config: Switches, device: str) -> str:
    if not getattr(config, name):
        return "off"
    if name == "cuda_graph" and not captures_graphs(config, device):
        reason = "fused_sampler is off" if device == "cuda" else f"device is {device}"
        return f"not in force ({reason})"
    if name == "token_granular_hits" and not config.prefix_cache:
        return "not in force (prefix_cache is off)"
    if name in _KERNEL_PARTS:
        return "on (Triton kernels)" if device == "cuda" else "on (PyTorch operations)"
    return "on"


def captures_graphs(config: Switches, device: str) -> bool:
    """Return whether decode steps are captured. The unfused sampler waits for the device, which cannot be captured."""
    return config.cuda_graph and config.fused_sampler and device == "cuda"
