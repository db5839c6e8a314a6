"""Sequences over one paged KV cache, which a model advances without an engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from rose_backend.layers.attention import AttentionMetadata
from rose_backend.models.base import CausalLM

BLOCK_SIZE = 16


class PagedSequences:
    """Several sequences over one shuffled, NaN-filled cache, advanced in any steps."""

    def __init__(self, model: CausalLM, token_ids: list[torch.Tensor], seed: int = 0) -> None:
        self.model = model
        self.token_ids = list(token_ids)
        self.num_computed = [0] * len(token_ids)
        config = model.config
        width = -(-config.max_position_embeddings // BLOCK_SIZE)
        num_blocks = width * len(token_ids) + 1
        self.kv_cache = torch.full(
            (config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_size),
            float("nan"),
            dtype=config.dtype,
        )
        blocks = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.block_table = blocks.view(len(token_ids), width).to(torch.int32)

    def inputs(
        self, rows: list[int], lengths: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Return tokens, positions and metadata of a step of ``rows``, all of which take prefill attention."""
        spans = [
            torch.arange(self.num_computed[row], self.num_computed[row] + length)
            for row, length in zip(rows, lengths, strict=True)
        ]
        tables = self.block_table[rows].long()
        slots = [
            table[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE
            for table, span in zip(tables, spans, strict=True)
        ]
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            num_computed_tokens=torch.tensor([self.num_computed[row] for row in rows], dtype=torch.int32),
            block_table=self.block_table[rows],
            slot_mapping=torch.cat(slots),
            num_decodes=0,
        )
        tokens = [self.token_ids[row][span] for row, span in zip(rows, spans, strict=True)]
        return torch.cat(tokens), torch.cat(spans), metadata

    def step(self, counts: list[int]) -> list[torch.Tensor]:
        """Compute ``counts[i]`` further tokens of each sequence in one step; return each one's logits."""
        decodes = [row for row, count in enumerate(counts) if count == 1]
        rows = decodes + [row for row, count in enumerate(counts) if count > 1]
        lengths = [counts[row] for row in rows]
        input_ids, positions, metadata = self.inputs(rows, lengths)
        metadata = replace(metadata, num_decodes=len(decodes))
        hidden = self.model.forward(input_ids, positions, self.kv_cache, metadata)
        by_row = dict(zip(rows, self.model.compute_logits(hidden).split(lengths), strict=True))
        for row in rows:
            self.num_computed[row] += counts[row]
        return [by_row.get(row, torch.empty(0, self.model.config.vocab_size)) for row in range(len(counts))]
