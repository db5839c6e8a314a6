"""Passes over padding that launch every kernel: the start runs them, and ``compile_ahead.py`` records them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch

from rose_backend import kernels
from rose_backend.config import EngineConfig
from rose_backend.engine.execution.decode_runner import launched_widths
from rose_backend.engine.execution.model_runner import ModelRunner
from rose_backend.engine.progress import show_progress
from rose_backend.layers.attention import AttentionMetadata
from rose_backend.layers.linear import fewest_halved_rows
from rose_backend.models.base import CausalLM
from rose_backend.models.config import ModelConfig


class PaddedModel(Protocol):
    """What passes over padding need; of a ``LoadedModel``, or without its weights."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model(self) -> CausalLM: ...

    @property
    def kv_cache(self) -> torch.Tensor: ...


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
    model: PaddedModel,
    captures_graphs: bool,
    part: Callable[[str], contextlib.AbstractContextManager[None]] = lambda name: contextlib.nullcontext(),
    before_draws: Callable[[], None] = lambda: None,
) -> None:
    """Launch each kernel that a step can launch, on padding, and capture the graphs.

    Args:
        part: entered around each part of the work, given its name.
        before_draws: called before the first of the sampler's kernels is launched.
    """
    with part("kernels"):
        warm_kernels(model)
    before_draws()
    with part("sampler"):
        runner.warm_up_draws()
        launched = launched_widths(model.config.max_num_seqs)
        runner.decoder.warm_up(launched if captures_graphs else (*runner.decoder.widths, *launched))
    if captures_graphs:
        with part("decode graphs"):
            runner.decoder.capture()
        with part("prompt graphs"):
            runner.capture_prompts()


@torch.inference_mode()
def warm_kernels(loaded: PaddedModel) -> None:
    """Launch each kernel that a step can reach outside captured graphs, on padding."""
    from rose_backend.kernels.tuning.attention_decode import num_processors, row_counts

    config, device = loaded.config, loaded.kv_cache.device
    sizes = loaded.model.config, num_processors(device)
    passes = padding_passes(config, decode_kinds(*sizes), token_counts(*sizes))
    for each in show_progress("preparing kernels", passes):
        _run_padding(loaded, each)
    for num_pairs in row_counts(config.max_num_seqs):
        null_block = torch.zeros(num_pairs, dtype=torch.int32, device=device)
        kernels.block_clone(loaded.kv_cache, null_block, null_block, block_dim=2)


def decode_kinds(model: ModelConfig, num_processors: int) -> Callable[[int], Hashable]:
    """Return ``decode_kind`` of this model's heads on a GPU of so many multiprocessors."""
    from rose_backend.kernels.tuning.attention_decode import decode_kind

    return functools.partial(
        decode_kind,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        dtype=model.dtype,
        num_processors=num_processors,
    )


def token_counts(model: ModelConfig, num_processors: int) -> list[int]:
    """Return numbers of tokens: products of chunks of any number are cut as those of one of these, or of one token."""
    from rose_backend.kernels.tuning.experts import TUNED_PAIRS_PER_EXPERT

    counts = [fewest_halved_rows(model.hidden_size, num_processors)]
    if (experts := model.experts) is not None:
        counts += [pairs * experts.num_experts // experts.top_k + 1 for pairs in TUNED_PAIRS_PER_EXPERT]
    return counts


def padding_passes(
    config: EngineConfig,
    decode_kind: Callable[[int], Hashable] = lambda num_rows: None,
    token_counts: Sequence[int] = (),
) -> list[PaddingPass]:
    """Return passes that reach every kernel that a forward pass within the limits can launch, the largest first.

    Args:
        decode_kind: what decode attention over so many rows is compiled for.
        token_counts: of passes over one chunk, where the limits allow them.
    """
    from rose_backend.kernels.tuning.attention_decode import row_counts, rows_tile
    from rose_backend.kernels.tuning.attention_prefill import TUNED_QUERY_LENS

    passes = {PaddingPass(num_rows, 0, 0) for num_rows in row_counts(config.max_num_seqs, decode_kind)}
    for query_len in TUNED_QUERY_LENS:
        for num_rows in row_counts(config.max_num_seqs):
            fitting = max(min(num_rows, config.token_budget // query_len), 1)
            if rows_tile(fitting) == rows_tile(num_rows):
                passes.add(PaddingPass(0, fitting, min(query_len, config.token_budget)))
    passes |= {PaddingPass(0, 1, count) for count in token_counts if count <= config.token_budget}
    return sorted(passes, key=lambda each: each.num_tokens, reverse=True)


def _run_padding(loaded: PaddedModel, each: PaddingPass) -> None:
    num_decodes, num_prefills, tokens_per_prefill = each
    num_rows, num_tokens, device = num_decodes + num_prefills, each.num_tokens, loaded.kv_cache.device
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
    loaded.model.forward(zeros, zeros, loaded.kv_cache, metadata)
