"""One step on the device: inputs from the row buffers, forward passes, next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend import kernels
from rose_backend.block_manager import BlockManager
from rose_backend.config import EngineConfig
from rose_backend.engine.decode_buffers import SAMPLING_FIELDS, DecodeBuffers
from rose_backend.engine.decode_runner import DecodeRunner, graph_widths
from rose_backend.engine.logprobs import StepLogprobs, pack_logprobs
from rose_backend.engine.progress import Track, no_progress
from rose_backend.engine.prompt_graphs import PromptGraphs
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.engine.scheduler import Step
from rose_backend.engine.special_draws import SpecialDraws
from rose_backend.engine.staging import download, upload
from rose_backend.models.attention_metadata import AttentionMetadata


class CausalLM(Protocol):
    """What the runner needs of a model."""

    config: Any

    def forward(
        self,
        input_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        kv_cache: torch.Tensor,  # [L, 2, NB, BS, H, D]
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return hidden states ``[T, E]``; writes the tokens' K/V."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[R, V]``."""
        ...


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Outcome of a step's forward passes. ``T`` and ``R`` count what is not in the decode part."""

    decode_rows: Int32Array  # [D], have drawn already
    decode_step: int
    decode_slots: NDArray[np.int64]  # [D]
    rows: Int32Array  # [R]
    num_new_tokens: Int32Array  # [R]
    hidden: torch.Tensor | None  # [T, E]
    token_ids: Int32Array  # [T], what was computed, row after row
    last_token_indices: NDArray[np.int64]  # [R], of each row's last token in hidden


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that ``ModelRunner.sample`` draws; they may not be there yet."""

    token_ids: torch.Tensor  # [S] int64, in host memory
    report: (
        torch.Tensor | None
    )  # see StepLogprobs, in host memory; None when no row asked for more than a token


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One new token for each of ``S`` rows."""

    token_ids: NDArray[np.int64]  # [S]
    logprobs: StepLogprobs | None
    """None when no row asked for any."""


class ModelRunner:
    """Runs steps of one model over one KV pool. Nothing here waits for the device.

    Args:
        kv_cache: ``[L, 2, NB, BS, H, D]``.
    """

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        manager: BlockManager,
        state: RowState,
        kv_cache: torch.Tensor,
    ) -> None:
        self._model = model
        self._manager = manager
        self._state = state
        self._kv_cache = kv_cache
        self._device = kv_cache.device
        self._block_size = config.block_size
        self._sample_tokens = kernels.sample if config.fused_sampler else kernels.sample_unfused
        self._writes_apart = not config.fused_kv_append
        vocab_size = int(model.config.vocab_size)
        self._special = SpecialDraws(state, self._sample_tokens, vocab_size, self._device)
        widths = () if self._device.type == "cpu" else graph_widths(config.max_num_seqs)
        self.decoder = DecodeRunner(self._decode, self._special, manager, state, self._device, widths)
        self.prompts: PromptGraphs | None = None
        self._max_num_batched_tokens = config.token_budget

    @torch.inference_mode()
    def warm_up_draws(self) -> None:
        """Draw in each way that ``sample`` can, for a row that nobody holds: kernels are compiled there."""
        rows = np.zeros(1, np.int32)
        params = self._sampling_tensors(rows)
        logits = self._model.compute_logits(self._kv_cache.new_zeros((1, self._model.config.n_embd)))
        self._sample_tokens(logits, params)
        self._special.draw(logits, params, rows)

    def capture_prompts(self, track: Track = no_progress) -> None:
        """Capture forward passes over prompts in CUDA graphs."""
        if self._writes_apart:
            return
        self.prompts = PromptGraphs(
            lambda ids, positions, metadata: self._model.forward(ids, positions, self._kv_cache, metadata),
            self._max_num_batched_tokens,
            self._manager.block_table.shape[1],
            self._device,
        )
        self.prompts.capture(track)

    @torch.inference_mode()
    def forward(self, step: Step) -> Forwarded:
        """Run the step's clones and its forward passes, which write the K/V of every token in it.

        The decode part goes through fixed buffers and draws its tokens itself; all else is one pass of its own.
        """
        plan = step.clone_plan
        if plan is not None:
            src, dst = upload(self._device, plan.src_block_ids, plan.dst_block_ids)
            kernels.block_clone(self._kv_cache, src, dst, block_dim=2)
            self._manager.finish_clone_plan(plan)
        split, decode_step, decode_slots = 0, 0, np.empty(0, np.int64)
        if step.num_decodes:
            split = step.num_decodes
            decode_step, decode_slots = self.decoder.enqueue(step.rows[:split])
        rows, counts = step.rows[split:], step.num_new_tokens[split:]
        hidden, token_ids = None, np.empty(0, np.int32)
        if len(rows):
            hidden, token_ids = self._forward_chunks(rows, counts)
        last_token_indices = np.cumsum(counts, dtype=np.int64) - 1
        return Forwarded(
            step.rows[:split],
            decode_step,
            decode_slots,
            rows,
            counts,
            hidden,
            token_ids,
            last_token_indices,
        )

    @torch.inference_mode()
    def sample(
        self, forwarded: Forwarded, due: NDArray[np.intp], rows: Int32Array, sources: NDArray[np.intp]
    ) -> Drawn:
        """Draw the next token of ``rows``.

        Args:
            due: ``[D]`` indices of the rows of ``forwarded`` that have computed all their tokens.
            rows: ``[S]`` rows to draw for; several may share one distribution.
            sources: ``[S]`` for each the index in ``due`` whose distribution it draws from.
        """
        assert forwarded.hidden is not None, "no row is due"
        (last,) = upload(self._device, forwarded.last_token_indices[due])
        logits = self._model.compute_logits(forwarded.hidden[last])
        if len(rows) != len(due):
            logits = logits[upload(self._device, sources)[0]]
        params, state = self._sampling_tensors(rows), self._state
        is_special = bool(np.count_nonzero(state.is_special[rows]))
        drawn = (
            self._special.draw(logits, params, rows) if is_special else self._sample_tokens(logits, params)
        )
        self.decoder.put_first_tokens(rows, drawn.token_ids)
        report = download(pack_logprobs(logits, drawn)) if is_special else None
        return Drawn(download(drawn.token_ids), report)

    def _decode(self, buffers: DecodeBuffers, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_computed = buffers.num_computed_tokens[:width]
        block_table = buffers.block_table[:width]
        slot_mapping = None
        if self._writes_apart:
            positions = buffers.positions[:width]
            blocks = block_table.gather(1, (positions // self._block_size)[:, None])[:, 0].long()
            slot_mapping = blocks * self._block_size + positions % self._block_size
            slot_mapping = torch.where(num_computed < 0, -1, slot_mapping)
        metadata = AttentionMetadata(
            query_start_loc=None,
            num_computed_tokens=num_computed,
            block_table=block_table,
            slot_mapping=slot_mapping,
            num_decodes=width,
        )
        hidden = self._model.forward(
            buffers.input_ids[:width], buffers.positions[:width], self._kv_cache, metadata
        )
        logits = self._model.compute_logits(hidden)
        return self._sample_tokens(logits, buffers.sampling(width)).token_ids, logits

    def _forward_chunks(self, rows: Int32Array, counts: Int32Array) -> tuple[torch.Tensor, Int32Array]:
        """Compute ``counts[i]`` tokens of ``rows[i]``. Single ones are chunks, too: captured or not, one kernel."""
        start = self._manager.num_computed_tokens[rows]
        ends = np.cumsum(counts, dtype=np.int64)
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(start - (ends - counts), counts)
        token_ids = self._state.token_ids[row_of_token, positions]
        width = -(-int((start + counts).max()) // self._block_size)
        inputs = (
            token_ids.astype(np.int64),
            positions,
            np.concatenate([[0], ends]).astype(np.int32),
            start,
            self._manager.block_table[rows, :width],
        )
        if self.prompts is not None and (hidden := self.prompts.run(*inputs)) is not None:
            return hidden, token_ids
        blocks = self._manager.block_table[row_of_token, positions // self._block_size].astype(np.int64)
        ids, where, query_start_loc, num_computed, block_table, slot_mapping = upload(
            self._device, *inputs, blocks * self._block_size + positions % self._block_size
        )
        metadata = AttentionMetadata(query_start_loc, num_computed, block_table, slot_mapping, num_decodes=0)
        return self._model.forward(ids, where, self._kv_cache, metadata), token_ids

    def _sampling_tensors(self, rows: Int32Array) -> kernels.SamplingTensors:
        state = self._state
        values = {name: getattr(state, name)[rows] for name in SAMPLING_FIELDS}
        tensors = upload(
            self._device, state.num_tokens[rows].astype(np.int64), state.seed[rows], *values.values()
        )
        fields = dict(zip(values, tensors[2:], strict=True))
        return kernels.SamplingTensors(position=tensors[0], seed=tensors[1], num_logprobs=-1, **fields)
