"""One step on the device: inputs from the row buffers, forward pass, next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend import kernels
from rose_backend.block_manager import BlockManager
from rose_backend.config import EngineConfig
from rose_backend.engine.logprobs import StepLogprobs, compute_logprobs
from rose_backend.engine.penalty_table import PenaltyTable
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.engine.scheduler import Step
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
    """Outcome of a forward pass."""

    hidden: torch.Tensor  # [T, E]
    token_ids: Int32Array  # [T], what was computed, row after row
    last_token_indices: NDArray[np.int64]  # [R], of each row's last token in hidden


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One new token for each of ``S`` rows."""

    token_ids: NDArray[np.int64]  # [S]
    logprobs: StepLogprobs | None
    """None when no row asked for any."""


class ModelRunner:
    """Runs steps of one model over one KV pool.

    Args:
        kv_cache: ``[L, 2, NB, BS, H, D]``.
        eos_token_ids: tokens that may not be drawn before ``min_tokens``.
    """

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        manager: BlockManager,
        state: RowState,
        kv_cache: torch.Tensor,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._model = model
        self._manager = manager
        self._state = state
        self._kv_cache = kv_cache
        self._device = kv_cache.device
        self._block_size = config.block_size
        self._eos_token_ids = eos_token_ids
        self._sample_tokens = kernels.sample if config.fused_sampler else kernels.sample_unfused
        self._penalties = PenaltyTable(state, int(model.config.vocab_size), self._device)
        self._device_table = None
        if self._device.type != "cpu":
            self._device_table = torch.zeros(
                manager.block_table.shape, dtype=torch.int32, device=self._device
            )

    @torch.inference_mode()
    def forward(self, step: Step) -> Forwarded:
        """Run the step's clones and its forward pass, which writes the K/V of every token in it."""
        plan = step.clone_plan
        if plan is not None:
            src, dst = torch.from_numpy(plan.src_block_ids), torch.from_numpy(plan.dst_block_ids)
            kernels.block_clone(self._kv_cache, src, dst, block_dim=2)
            self._manager.finish_clone_plan(plan)
        rows, counts = step.rows, step.num_new_tokens
        start = self._manager.num_computed_tokens[rows]
        ends = np.cumsum(counts, dtype=np.int64)
        if step.num_decodes == len(rows):
            row_of_token, positions = rows, start.astype(np.int64)
        else:
            row_of_token = np.repeat(rows, counts)
            positions = np.arange(ends[-1]) + np.repeat(start - (ends - counts), counts)
        token_ids = self._state.token_ids[row_of_token, positions]
        blocks = self._manager.block_table[row_of_token, positions // self._block_size].astype(np.int64)
        metadata = AttentionMetadata(
            query_start_loc=self._to_device(np.concatenate([[0], ends]).astype(np.int32)),
            num_computed_tokens=self._to_device(start),
            block_table=self._gather_block_table(rows, int((start + counts).max())),
            slot_mapping=self._to_device(blocks * self._block_size + positions % self._block_size),
            num_decodes=step.num_decodes,
        )
        hidden = self._model.forward(
            self._to_device(token_ids.astype(np.int64)), self._to_device(positions), self._kv_cache, metadata
        )
        return Forwarded(hidden, token_ids, ends - 1)

    @torch.inference_mode()
    def sample(
        self, forwarded: Forwarded, due: NDArray[np.intp], rows: Int32Array, sources: NDArray[np.intp]
    ) -> SampledTokens:
        """Draw the next token of ``rows``.

        Args:
            due: ``[D]`` indices of the step's rows that have computed all their tokens.
            rows: ``[S]`` rows to draw for; several may share one distribution.
            sources: ``[S]`` for each the index in ``due`` whose distribution it draws from.
        """
        last = self._to_device(forwarded.last_token_indices[due])
        logits = self._model.compute_logits(forwarded.hidden[last])
        if len(rows) != len(due):
            logits = logits[self._to_device(sources)]
        num_top = int(self._state.num_logprobs[rows].max())
        raw_logits = logits
        banned = self._banned_before_min_tokens(rows)
        if banned is not None:
            raw_logits = logits.clone() if num_top >= 0 else logits
            logits[banned] = float("-inf")
        token_ids = self._sample_tokens(logits, self._sampling_tensors(rows)).token_ids
        self._penalties.record(rows, token_ids)
        logprobs = compute_logprobs(raw_logits, token_ids, num_top) if num_top >= 0 else None
        return SampledTokens(token_ids.cpu().numpy(), logprobs)

    def _sampling_tensors(self, rows: Int32Array) -> kernels.SamplingTensors:
        state = self._state
        prompt_mask, output_counts = self._penalties.gather(rows)
        return kernels.SamplingTensors(
            temperature=self._to_device(state.temperature[rows]),
            top_k=self._to_device(state.top_k[rows]),
            top_p=self._to_device(state.top_p[rows]),
            min_p=self._to_device(state.min_p[rows]),
            seed=self._to_device(state.seed[rows]),
            position=self._to_device(state.num_tokens[rows].astype(np.int64)),
            presence_penalty=self._to_device(state.presence_penalty[rows]),
            frequency_penalty=self._to_device(state.frequency_penalty[rows]),
            repetition_penalty=self._to_device(state.repetition_penalty[rows]),
            prompt_mask=prompt_mask,
            output_counts=output_counts,
            num_logprobs=-1,
        )

    def _banned_before_min_tokens(self, rows: Int32Array) -> tuple[torch.Tensor, torch.Tensor] | None:
        early = np.flatnonzero(self._state.num_tokens[rows] < self._state.min_num_tokens[rows])
        row_indices: list[int] = []
        token_ids: list[int] = []
        for index in early.tolist():
            row = int(rows[index])
            completion = self._state.completions[row]
            assert completion is not None, f"row {row} holds no completion"
            banned = list(completion.request.params.stop_token_ids or ())
            if self._state.stops_at_eos[row]:
                banned.extend(self._eos_token_ids)
            row_indices.extend([index] * len(banned))
            token_ids.extend(banned)
        if not token_ids:
            return None
        return torch.tensor(row_indices, device=self._device), torch.tensor(token_ids, device=self._device)

    def _gather_block_table(self, rows: Int32Array, max_num_tokens: int) -> torch.Tensor:
        if self._device_table is None:
            width = -(-max_num_tokens // self._block_size)
            return torch.from_numpy(self._manager.block_table[rows, :width])
        changed = self._manager.take_changed_rows()
        if len(changed):
            self._device_table[self._to_device(changed)] = self._to_device(self._manager.block_table[changed])
        return self._device_table[self._to_device(rows)]

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        # Every array here was made by indexing, so the tensor never shares memory with a persistent buffer.
        return torch.from_numpy(array).to(self._device, non_blocking=True)
