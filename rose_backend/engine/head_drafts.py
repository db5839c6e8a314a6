"""Drafts that an EAGLE head makes, in the steps that verify them.

For each request, the *features* of its last computed token are kept: the combination of the model's hidden states that
the head reads. A step starts with the head at that position, with the newest token as input; it stores the head's keys
and values there and, if the step has drafts, continues from draft to draft. After the layers, keys and values of
accepted drafts are stored again, made from the model's hidden states instead of the head's own. Steps without drafts
and passes over prompts only store keys and values; in a prompt, the token after each position is known except at the
last. So at every position before a request's last computed token, the head's layer of the KV cache is the same as
without drafts, and prefix hits, siblings and preempted requests can use it.
"""

from __future__ import annotations

from typing import Any

import torch

from rose_backend.config import EngineConfig, SpeculativeConfig
from rose_backend.engine.drafts import Drafts
from rose_backend.engine.kv_pool import choose_max_model_len
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.kernels.arguments import DraftedRows
from rose_backend.layers.attention import AttentionMetadata, slots_of_rows
from rose_backend.models.base import CausalLM
from rose_backend.models.eagle3 import Eagle3Head, load_head


def load_draft_head(config: EngineConfig, model: CausalLM) -> Eagle3Head | None:
    """Return the head that makes drafts for a model; None if none does. Errors are those of ``load_head``."""
    drafts = config.drafts
    if drafts is None or drafts.model is None:
        return None
    max_model_len = choose_max_model_len(config, model.config.max_position_embeddings)
    return load_head(drafts.model, model, max_model_len=max_model_len)


class HeadDrafts(Drafts):
    """``Drafts`` that an EAGLE head proposes.

    Requests that share a whole block and differ in the token after it share what one of them has stored for the
    block's last place, although that depends on this token: a draft may be another one then, a text is not.

    Args:
        head: whose keys and values are in the last layer of ``kv_cache``.
        kv_cache: ``[L, 2, NB, BS, HKV, D]``.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        state: SequenceState,
        head: Eagle3Head,
        kv_cache: torch.Tensor,
        *,
        is_adaptive: bool,
    ) -> None:
        super().__init__(config, state, kv_cache.device, is_adaptive=is_adaptive)
        self.propose = self._ask_head
        self.head = head
        self._kv_cache = kv_cache[-1:]
        self._block_size = kv_cache.shape[3]
        num_slots, self._max_model_len = state.token_ids.shape
        # The last one is that of rows without a request.
        self._features = kv_cache.new_zeros((num_slots + 1, head.config.hidden_size))
        self._block_table = torch.empty(0)

    def rows_of(self, buffers: Any, width: int) -> DraftedRows:
        """As ``Drafts.rows_of``; the head reads their block tables, too."""
        self._block_table = buffers.block_table[:width]
        return super().rows_of(buffers, width)

    def propose_none(self, rows: DraftedRows) -> torch.Tensor:
        """Return the drafts of a step that has none; the head's keys and values for the newest tokens are stored."""
        num_computed, positions = self._place(rows, 0)
        slots = slots_of_rows(num_computed, self._block_table, 1, self._block_size)
        self.head.store(rows.input_ids, self._features[rows.slots], positions, slots, self._kv_cache)
        return super().propose_none(rows)

    def accept(
        self,
        drawn: torch.Tensor,
        drafts: torch.Tensor,
        rows: DraftedRows,
        buffers: Any,
        features: torch.Tensor | None,
    ) -> None:
        """End a step; see ``Drafts.accept``."""
        assert features is not None, "a head needs the model's hidden states"
        num_rows, num_drafts = drafts.shape
        of_rows = features.view(num_rows, num_drafts + 1, -1)
        if num_drafts:
            # Those of drafts that are not accepted are stored over before anything reads them.
            positions = rows.positions[:, None] + torch.arange(num_drafts, device=drafts.device)
            self.head.store(
                drafts.flatten(),
                of_rows[:, :-1].flatten(0, 1),
                positions.clamp(max=self._max_model_len - 1).flatten(),
                slots_of_rows(rows.num_computed_tokens, self._block_table, num_drafts, self._block_size),
                self._kv_cache,
            )
        num_before = rows.num_computed_tokens.clone()
        super().accept(drawn, drafts, rows, buffers, features)
        num_accepted = (rows.num_computed_tokens - num_before - 1).clamp(min=0).long()
        last = of_rows.gather(1, num_accepted[:, None, None].expand(-1, 1, of_rows.shape[2]))
        self._features.index_copy_(0, rows.slots, last[:, 0])

    def read_prompts(
        self,
        input_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        features: torch.Tensor,  # [T, E]
        metadata: AttentionMetadata,
        next_ids: torch.Tensor,  # [R] int64
        slots: torch.Tensor,  # [R] int64
    ) -> None:
        """Store the head's keys and values after a pass over prompts.

        Args:
            next_ids: of the token after each row's last one, where that is known; else anything, as the step that gets
                this token stores over it.
            slots: request slots; -1 for rows of padding.
        """
        assert metadata.query_start_loc is not None
        ends = metadata.query_start_loc[1:].long()
        places = torch.arange(len(input_ids), device=input_ids.device)
        rows = torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)
        following = torch.where(places + 1 == ends[rows], next_ids[rows], input_ids.roll(-1))
        blocks = metadata.block_table[rows, positions // self._block_size].long()
        stored_at = blocks * self._block_size + positions % self._block_size
        stored_at = torch.where(places < ends[-1], stored_at, -1)
        self.head.store(following, features, positions, stored_at, self._kv_cache)
        self._features[slots] = features[ends - 1]

    def copy(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Give request slots, int64 ``[N]``, the features of others: they have computed the same tokens."""
        self._features[slots] = self._features[sources]

    def _ask_head(self, rows: DraftedRows, depth: int) -> torch.Tensor:
        token_ids, features, drafts = rows.input_ids, self._features[rows.slots], []
        for step in range(depth):
            num_computed, positions = self._place(rows, step)
            slots = None
            if not self.head.switches.fused_kv_append:
                slots = slots_of_rows(num_computed, self._block_table, 1, self._block_size)
            metadata = AttentionMetadata(
                query_start_loc=None,
                num_computed_tokens=num_computed,
                block_table=self._block_table,
                slot_mapping=slots,
                num_decodes=len(num_computed),
            )
            token_ids, features = self.head.forward(token_ids, features, positions, self._kv_cache, metadata)
            drafts.append(token_ids)
        return torch.stack(drafts, dim=1)

    def _place(self, rows: DraftedRows, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the head is in its pass number ``step``: tokens before it, int32 ``[R]``, and positions.

        Padding rows, and those whose first token is computed in this step, have no place.
        """
        computed = rows.num_computed_tokens
        before = torch.where(computed > 0, computed + (step - 1), -1)
        return before, (rows.positions + (step - 1)).clamp(0, self._max_model_len - 1)
