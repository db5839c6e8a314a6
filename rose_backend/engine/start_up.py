"""From options to a loaded model with its KV pool; everything that can be refused is refused here."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from rose_backend.config import EngineConfig
from rose_backend.engine.kv_pool import KVShape, allocate_kv_cache, choose_num_blocks
from rose_backend.engine.parts import captures_graphs, parts_in_force
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import ConfigError
from rose_backend.models.gpt2 import GPT2
from rose_backend.models.registry import load_model
from rose_backend.models.weight_loading import resolve_model_path

logger = logging.getLogger(__name__)

_DEFAULT_RUN_AHEAD = {"cpu": 0, "cuda": 1}
"""A CPU computes a step while the host waits anyway: there is nothing to run ahead of."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What an engine is built around."""

    model: GPT2
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    """Prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    kv_cache: torch.Tensor  # [L, 2, NB, BS, H, D]
    device: torch.device
    captures_graphs: bool
    run_ahead: int
    """Steps that may be in flight behind the one that is read."""
    parts: dict[str, str]
    """Every switch, and whether its part is in force."""


def load(config: EngineConfig) -> LoadedModel:
    """Load the model and make its KV pool.

    Raises:
        ConfigError: the options do not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """
    device = resolve_device(config.device)
    directory = resolve_model_path(config.model)
    model = load_model(directory, dtype=config.dtype, device=device.type, switches=config)
    max_model_len = _resolve_max_model_len(config, model.config.n_positions)
    shape = KVShape(model.config.n_layer, model.config.n_head, model.config.head_size, model.config.dtype)
    num_blocks = choose_num_blocks(
        config,
        shape,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        width=model.config.n_embd,
        device=device,
    )
    eos_token_id = model.config.eos_token_id
    loaded = LoadedModel(
        model=model,
        tokenizer=Tokenizer(directory),
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        num_blocks=num_blocks,
        kv_cache=allocate_kv_cache(num_blocks, config.block_size, shape, device),
        device=device,
        captures_graphs=captures_graphs(config, device.type),
        run_ahead=_DEFAULT_RUN_AHEAD[device.type] if config.run_ahead is None else config.run_ahead,
        parts=parts_in_force(config, device.type),
    )
    _log_start(config, loaded, device)
    return loaded


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


def _resolve_max_model_len(config: EngineConfig, window: int) -> int:
    max_model_len = window if config.max_model_len is None else config.max_model_len
    if max_model_len > window:
        raise ConfigError(
            f"max_model_len: got {max_model_len}, allowed are at most {window}, the model's window"
        )
    if not config.chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens: got {config.max_num_batched_tokens}, with chunked_prefill off at least "
            f"max_model_len, which is {max_model_len}, is needed"
        )
    return max_model_len


def _log_start(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> None:
    parts = ", ".join(f"{name} {state}" for name, state in loaded.parts.items())
    logger.info(
        "%s on %s in %s: window %d, %d KV blocks of %d tokens (%.1f MiB); %s",
        config.model,
        device,
        str(loaded.kv_cache.dtype).removeprefix("torch."),
        loaded.max_model_len,
        loaded.num_blocks,
        config.block_size,
        loaded.kv_cache.nbytes / (1 << 20),
        parts,
    )
