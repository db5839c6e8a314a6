"""Every switch and limit of rose_backend, with its default and its check; and the cores that a process may use.

``Switches`` is what both engines share. ``EngineConfig`` is the standalone engine's, ``PluginConfig`` is what a vLLM
server passes through ``--additional-config '{"rose": {...}}'``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeGuard

from rose_backend.errors import ConfigError, nearest_name_hint

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
GENERATION_CONFIGS = ("auto", "none")
KV_CANARY_MODES = ("off", "log", "raise")
STEP_BUDGETS = ("auto", "off")
"""Besides numbers of milliseconds."""

DRAFT_METHODS = ("ngram", "ngram_gpu", "eagle3")
MAX_SPECULATIVE_TOKENS = 7
"""Drafts of a request in a step: decode attention takes up to 8 tokens of a row."""
MAX_PROMPT_LOOKUP = 1024

MAX_RUN_AHEAD = 4
MAX_PACKED_ROWS = 256
"""Of a product that takes in the norm before it, see ``rose_backend.kernels.small_batch_linear``."""
MAX_NUM_THREADS = 1024
MAX_LORAS = 8
MAX_LORA_RANK = 64
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_RANGES = {
    "block_size": (1, 1024),
    "max_num_seqs": (1, 65_536),
    "max_num_batched_tokens": (1, 1 << 20),
    "max_model_len": (2, 1 << 24),
    "num_blocks": (2, (1 << 31) - 1),
    "num_threads": (1, MAX_NUM_THREADS),
    "run_ahead": (0, MAX_RUN_AHEAD),
    "max_queue_size": (1, 10_000_000),
    "max_loras": (1, MAX_LORAS),
    "max_lora_rank": (1, MAX_LORA_RANK),
    "seed": (0, (1 << 63) - 1),
}
"""Options of ``EngineConfig`` that are integers, and their limits."""

# Limits on one request, checked before anything is copied or allocated.
MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
"""In a request, and as sequences of tokens: a word has up to two."""
MAX_BAD_WORD_LENGTH = 1024
MAX_BAD_WORD_TOKENS = 1024
"""Of all bad words together."""
MAX_CACHE_SALT_LENGTH = 128
# At both ends of these ranges, and all at once, logits of +-1e4 stay finite float32 numbers.
MAX_TEMPERATURE = 1000.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
"""Of presence and frequency penalty; their negative is the lowest."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The fused and cached parts, each of which can be switched off alone.

    In vLLM, its own ``--no-enable-prefix-caching`` and ``--no-enable-chunked-prefill`` work as well.
    """

    removed_options: ClassVar[Mapping[str, str]] = {}
    """Options of earlier releases, and the error text for each."""

    fused_kv_append: bool = True
    """Attention stores the new K/V itself; off: a separate write runs before it."""
    fused_mlp: bool = True
    """What lies between the products of an MLP is one operation each: bias + GELU, bias + residual, SiLU * up."""
    fused_sampler: bool = True
    """Rose's one-pass sampler; off: plain torch operations (standalone) or vLLM's own sampler."""
    fused_add_layernorm: bool = True
    """Residual add and LayerNorm or RMSNorm as one operation. In vLLM, ``fused_mlp`` and this one both off keep vLLM's
    layers."""
    cuda_graph: bool = True
    """Replay decode steps from CUDA graphs where the device and the kernels allow it."""
    chunked_prefill: bool = True
    """Split long prompts over several steps; off: a prompt is computed in one step."""
    prefix_cache: bool = True
    """Reuse K/V of earlier requests that share a prefix."""
    token_granular_hits: bool = True
    """Let prefix hits end at any token; off: at block borders only, as vLLM's own."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                raise ConfigError(
                    f"{field.name}: got {getattr(self, field.name)!r}, allowed are true and false"
                )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], *, source: str) -> Self:
        """Build from user-supplied options.

        Args:
            options: option name to value.
            source: how to call the place the options came from in an error.

        Raises:
            ConfigError: removed option (the release is named), unknown option (the nearest valid one is named) or bad
                value.
        """
        valid = [field.name for field in fields(cls)]
        for name in options:
            if name in cls.removed_options:
                raise ConfigError(f"{name}: {cls.removed_options[name]}")
            if name not in valid:
                hint = nearest_name_hint(name, valid)
                raise ConfigError(f"{source}: unknown option {name!r}{hint} (valid: {', '.join(valid)})")
        return cls(**dict(options))


SWITCH_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Switches))


@dataclass(frozen=True, kw_only=True)
class PluginConfig(Switches):
    """Options under the key ``rose`` of vLLM's ``--additional-config``."""

    block_manager: bool = True
    """Rose's KV block manager; off: vLLM's own manager keeps the block tables."""
    batched_scheduling: bool = True
    """Schedule all requests of a step that only decodes at once; off: vLLM's own loops over requests. Needs the block
    manager."""
    step_graph: bool = True
    """Replay whole steps as CUDA graphs, inputs, sampling and update included; off: the layers alone, and vLLM launches
    the rest. Needs full CUDA graphs."""
    adaptive_drafts: bool = True
    """Make as many of the drafts (n-grams, EAGLE, MTP) in a step as are measured to give the most tokens per second,
    all, some or none; off: all in each step. Needs batched scheduling."""
    joined_outputs: bool = True
    """Merge, per request, the outputs that wait for a busy API server; off: it handles one step's outputs after the
    other."""
    quantized_layers: bool = True
    """Use Rose's layers with float8 and int4 weights, too; off: vLLM's."""
    max_quantized_rows: int | None = None
    """Largest step that Rose's kernels multiply with quantized weights, at most 256. With float8 weights it counts
    decode requests; larger steps, and prompts, use vLLM's products, which round activations to 8 bits, and 0 leaves
    all steps to them. Default: 32 with scales per block, and in bfloat16 on compute capability 9.0; elsewhere vLLM's
    layers stay. With int4 weights it counts tokens, prompts included; larger steps use a library's products in 16
    bits. Default: 256 if ``--max-num-seqs``, times the tokens of a request in a step with drafts, is at most 128;
    otherwise vLLM's layers stay."""
    exact_cached_tokens: bool = False
    """Report every cached token to clients and metrics; off: whole blocks only. ``rose serve`` has an option of the
    same name."""
    step_budget: str | float = "off"
    """How long a step with prompts may take, while running requests wait for it. ``auto``: 1.5 times as long as one
    without prompts, longer if prompts would wait too long; a number: that many milliseconds; ``off``: as long as the
    prompt tokens that vLLM gives a step. Needs batched scheduling."""
    kv_canary: str = "off"
    """Check K/V every 16 steps for writes that nobody may make and for values computed from free blocks. ``log``: a
    line for each check that finds some; ``raise``: the engine ends. Needs the block manager; reads all K/V."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kv_canary", self.kv_canary, KV_CANARY_MODES)
        object.__setattr__(self, "step_budget", read_step_budget("step_budget", self.step_budget))
        if self.max_quantized_rows is not None:
            check_int("max_quantized_rows", self.max_quantized_rows, 0, MAX_PACKED_ROWS)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Drafts of the standalone engine: names, defaults and meaning are vLLM's.

    Raises:
        ConfigError: a value is outside its range, or missing.
    """

    method: str = ""
    """``ngram``: what followed the last tokens earlier in prompt and output; ``ngram_gpu`` is the same. ``eagle3``:
    what an EAGLE-3 head makes of the model's hidden states."""
    num_speculative_tokens: int = 0
    """Drafts that a request gets in a step."""
    model: str | None = None
    """Local directory or Hugging Face id of the head; only with ``eagle3``, which needs it."""
    prompt_lookup_max: int | None = None
    """Last tokens that are looked up, at most; None: as many as at least, or 5."""
    prompt_lookup_min: int | None = None
    """The same, at least; None: as many as at most."""

    def __post_init__(self) -> None:
        owner = "speculative_config"
        if self.method not in DRAFT_METHODS:
            got = repr(self.method) if self.method else "none"
            raise ConfigError(f"{owner}.method: got {got}, allowed are {', '.join(DRAFT_METHODS)}")
        if self.num_speculative_tokens == 0 and type(self.num_speculative_tokens) is int:
            raise ConfigError(
                f"{owner}.num_speculative_tokens: got none or 0, allowed is an integer from 1 to "
                f"{MAX_SPECULATIVE_TOKENS}"
            )
        check_int(f"{owner}.num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if self.has_head:
            self._check_head()
            return
        if self.model is not None:
            raise ConfigError(f"{owner}.model: got {self.model!r}, allowed is none with method {self.method}")
        most, least = self.prompt_lookup_max, self.prompt_lookup_min
        for name, value in (("max", most), ("min", least)):
            if value is not None:
                check_int(f"{owner}.prompt_lookup_{name}", value, 1, MAX_PROMPT_LOOKUP)
        if most is None:
            most = 5 if least is None else least
        if least is None:
            least = most
        if least > most:
            raise ConfigError(
                f"{owner}.prompt_lookup_min: got {least}, allowed are 1 to prompt_lookup_max, which is {most}"
            )
        object.__setattr__(self, "prompt_lookup_max", most)
        object.__setattr__(self, "prompt_lookup_min", least)

    @property
    def has_head(self) -> bool:
        """Whether an EAGLE head makes the drafts."""
        return self.method == "eagle3"

    def _check_head(self) -> None:
        owner = "speculative_config"
        if not is_unicode(self.model) or not self.model:
            got = "none" if self.model is None else repr(self.model)
            raise ConfigError(
                f"{owner}.model: got {got}, allowed is a directory or a Hugging Face id of a head"
            )
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"{owner}.{name}: got {value!r}, allowed is none with method {self.method}")

    @classmethod
    def read(cls, value: object) -> SpeculativeConfig:
        """Return the drafts that a mapping of field names to values asks for.

        Raises:
            ConfigError: it is no mapping, or has an unknown field or a bad value.
        """
        if isinstance(value, cls):
            return value
        valid = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"speculative_config: got {value!r}, allowed is an object with the fields {', '.join(valid)}"
            )
        for name in value:
            if name not in valid:
                hint = nearest_name_hint(str(name), valid)
                raise ConfigError(
                    f"speculative_config: unknown field {name!r}{hint} (valid: {', '.join(valid)})"
                )
        return cls(**value)

    def __str__(self) -> str:
        source = f"what followed the last {self.prompt_lookup_min} to {self.prompt_lookup_max} tokens before"
        if self.has_head:
            source = f"the head {self.model}"
        return f"{self.num_speculative_tokens} a request in a step, by {self.method}: {source}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Switches):
    """Options of the standalone engine. Names are vLLM's where the meaning is the same.

    Raises:
        ConfigError: a value is outside its range; nothing has been loaded or allocated yet.
    """

    removed_options: ClassVar[Mapping[str, str]] = {
        "pacing": "removed in release 0.2.0 (it paid at no load measured)"
    }

    model: str
    """Local directory or Hugging Face id."""
    dtype: str = "auto"
    """``auto`` takes float32 on CPU and the checkpoint's own type on a GPU."""
    device: str = "auto"
    block_size: int = 16
    """Tokens per KV block."""
    max_num_seqs: int = 256
    """Sequences that may run at once; each of a request's ``n`` completions counts."""
    max_num_batched_tokens: int | None = None
    """Tokens one step may compute, prompts and decodes together; None chooses for the device and the kind of use, see
    ``rose_backend.scheduling``."""
    max_model_len: int | None = None
    """Prompt plus output, in tokens; None takes the model's own window."""
    num_blocks: int | None = None
    """KV blocks to allocate; None sizes the pool from memory."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights, activations and the KV pool may take together."""
    cpu_kvcache_space_gib: float = 1.0
    """Memory of the KV pool on a CPU, in GiB, at most; never more than all sequences can use."""
    num_threads: int | None = None
    """Threads that the operations of a step are split over on a CPU; None takes OMP_NUM_THREADS where that is set, and
    otherwise chooses by the model's size and the cores there are, see ``rose_backend.engine.process_settings``."""
    run_ahead: int | None = None
    """Decode steps that the host may start before it has read the tokens of the one before them; 0 reads each step's
    tokens first. None takes 1 on a GPU and 0 on a CPU."""
    seed: int = 0
    """Seeds requests that bring no seed."""
    generation_config: str = "auto"
    """Sampling parameters that a caller leaves open are those of the model's generation_config.json; ``none``: those of
    ``SamplingParams``, as ``vllm`` in vLLM's option of this name. The file's end tokens count either way."""
    max_queue_size: int = 10_000
    """Requests that may wait; one more is refused."""
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    """Drafts, which decode steps verify: the fields of ``SpeculativeConfig``, as which it is kept. None: no drafts."""
    adaptive_drafts: bool = True
    """Make as many drafts in a step as give the most tokens per second, as measured; off: all in each."""
    enable_lora: bool = False
    """Take LoRA adapters, whose slots are allocated at the start."""
    max_loras: int = MAX_LORAS
    """LoRA slots: adapters that are loaded at once."""
    max_lora_rank: int = 16
    """Largest rank of an adapter, for which all slots have room."""
    kv_canary: str = "off"
    """Check K/V every 16 steps for writes that nobody may make and for values computed from free blocks. ``log``: a
    line for each check that finds some; ``raise``: the engine ends. Each check reads the whole KV pool."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculative_config is not None:
            drafts = SpeculativeConfig.read(self.speculative_config)
            object.__setattr__(self, "speculative_config", drafts)
            if drafts.has_head and self.enable_lora:
                raise ConfigError("enable_lora: got True, allowed is False with drafts of an EAGLE head")
            if drafts.has_head and self.kv_canary != "off":
                raise ConfigError(
                    f"kv_canary: got {self.kv_canary!r}, allowed is off with drafts of an EAGLE head"
                )
        choices = {"dtype": DTYPES, "device": DEVICES, "generation_config": GENERATION_CONFIGS}
        for name, allowed in {**choices, "kv_canary": KV_CANARY_MODES}.items():
            check_choice(name, getattr(self, name), allowed)
        if not is_unicode(self.model) or not self.model:
            raise ConfigError(f"model: got {self.model!r}, a directory or a Hugging Face id is needed")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            # What is None unless it is given is chosen at start-up.
            if value is not None or getattr(type(self), name) is not None:
                check_int(name, value, low, high)
        share = self.gpu_memory_utilization
        if not _is_number(share) or not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization: got {share!r}, allowed is more than 0 and at most 1")
        if not _is_number(self.cpu_kvcache_space_gib) or not 0.0 < self.cpu_kvcache_space_gib < float("inf"):
            raise ConfigError(
                f"cpu_kvcache_space_gib: got {self.cpu_kvcache_space_gib!r}, allowed is a number above 0"
            )

    @property
    def token_budget(self) -> int:
        """``max_num_batched_tokens`` of a running engine, which has chosen it where it was None."""
        assert self.max_num_batched_tokens is not None, "max_num_batched_tokens is chosen at start-up"
        return self.max_num_batched_tokens

    @property
    def drafts(self) -> SpeculativeConfig | None:
        """``speculative_config`` as it is kept."""
        config = self.speculative_config
        assert config is None or isinstance(config, SpeculativeConfig), "it was read when this was made"
        return config


def is_unicode(value: object) -> TypeGuard[str]:
    """Whether it is a text of Unicode's characters alone: JSON may have halves of some, a command line other bytes."""
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_step_budget(name: str, value: object) -> str | float:
    """Return ``auto``, ``off`` or a number of milliseconds, from a number or a text.

    Raises:
        ConfigError: it is none of these.
    """
    if value in STEP_BUDGETS:
        return str(value)
    try:
        milliseconds = float(value) if isinstance(value, str) or _is_number(value) else 0.0
    except ValueError:
        milliseconds = 0.0
    if not 0.0 < milliseconds < float("inf"):
        raise ConfigError(
            f"{name}: got {value!r}, allowed are {', '.join(STEP_BUDGETS)} and a number of milliseconds above 0"
        )
    return milliseconds


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{name}: got {value!r}, allowed are {', '.join(allowed)}")


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError unless ``value`` is an integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}: got {value!r}, allowed is an integer from {low} to {high}")


def num_usable_cores() -> int:
    """Return the cores that this process may use: its affinity, and the CPU quota of its container, rounded down."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(min(num_cores, _cpu_quota() or num_cores), 1)


def _cpu_quota() -> int | None:
    """Return the whole cores of the control group's quota (version 2); None without one."""
    try:
        quota, period = _CPU_MAX.read_text().split()
        return max(int(quota) // int(period), 1)
    except (OSError, ValueError, ZeroDivisionError):  # "max 100000" is no limit
        return None
