"""Requests with their history already in the cache, and what attention over them is by definition."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch

from rose_backend.conformance.attention.batch import Row
from rose_backend.conformance.attention.cases import Case

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values [T, HKV, D] to slots [T] of a cache: (cache, slots, key, value)."""


class Scene:
    """One step's requests: queries, new keys and values, and a cache that holds their history.

    Every slot that no request has written holds ``garbage``; so do the table's columns past a request's last block.
    """

    def __init__(
        self,
        case: Case,
        rows: tuple[Row, ...],
        cache: torch.Tensor,
        *,
        garbage: float = 300.0,
        seed: int = 0,
        store: Store | None = None,
    ) -> None:
        """Lay the requests out in ``cache``, a [NB, HKV, BS, 2 * D] view of ``case``'s cache type.

        Args:
            store: writes history for a backend that orders a block in its own way; None writes K in the first half of
                the last dimension and V in the other.
        """
        self._store_history = store or self._store
        self.case, self.rows, self.cache = case, rows, cache
        self.device = cache.device
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self.block_size = cache.shape[2]
        num_tokens = sum(row.query_len for row in rows)
        self.query = self._random(num_tokens, case.heads)
        self.key = self._random(num_tokens, case.kv_heads)
        self.value = self._random(num_tokens, case.kv_heads)
        self.block_tables = self._hand_out_blocks()
        self.starts = torch.tensor([0, *(row.query_len for row in rows)]).cumsum(0).tolist()
        self.slot_mapping = torch.cat(
            [self._slots(index, row.num_computed_tokens, row.seq_len) for index, row in enumerate(rows)]
        )
        self._fill(garbage)

    def _random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        shape = (num_tokens, num_heads, self.case.head_size)
        return torch.randn(shape, generator=self._generator, device=self.device).to(self.case.dtype)

    def _hand_out_blocks(self) -> list[torch.Tensor]:
        """Return each row's block ids; block 0 belongs to no row."""
        counts = [-(-row.seq_len // self.block_size) for row in self.rows]
        order = torch.randperm(self.cache.shape[0] - 1, generator=self._generator, device=self.device) + 1
        assert sum(counts) <= len(order), f"the cache has {len(order)} blocks, {sum(counts)} are needed"
        return list(order[: sum(counts)].split(counts))

    def _slots(self, row: int, begin: int, end: int) -> torch.Tensor:
        positions = torch.arange(begin, end, device=self.device)
        return (
            self.block_tables[row][positions // self.block_size] * self.block_size
            + positions % self.block_size
        )

    def _fill(self, garbage: float) -> None:
        stored = _as_stored(torch.tensor(garbage, device=self.device), self.case, 1.0)
        self.cache.fill_(stored.item() if self.cache.dtype == torch.uint8 else garbage)
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, row in enumerate(self.rows):
            key = self._random(row.num_computed_tokens, self.case.kv_heads)
            value = self._random(row.num_computed_tokens, self.case.kv_heads)
            self.history.append((key, value))
            self._store_history(self.cache, self._slots(index, 0, row.num_computed_tokens), key, value)

    def _store(
        self, cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        stored = torch.cat(
            (
                _as_stored(key, self.case, self.case.key_scale),
                _as_stored(value, self.case, self.case.value_scale),
            ),
            -1,
        )
        cache[slots // self.block_size, :, slots % self.block_size] = stored

    def row(self, index: int) -> Scene:
        """Return the scene of one of the requests alone, in the same blocks."""
        alone, tokens = copy(self), slice(self.starts[index], self.starts[index + 1])
        alone.rows, alone.starts = self.rows[index : index + 1], [0, self.rows[index].query_len]
        alone.query, alone.key, alone.value = self.query[tokens], self.key[tokens], self.value[tokens]
        alone.slot_mapping = self.slot_mapping[tokens]
        alone.block_tables, alone.history = (
            self.block_tables[index : index + 1],
            self.history[index : index + 1],
        )
        return alone

    def expected_cache(self, slot_mapping: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole allocation, byte by byte, as it must be once the new tokens are stored; -1 is skipped."""
        slots = self.slot_mapping if slot_mapping is None else slot_mapping
        storage = allocation(self.cache).clone()
        clone = storage.view(self.cache.dtype).as_strided(
            self.cache.shape, self.cache.stride(), self.cache.storage_offset()
        )
        kept = slots >= 0
        self._store(clone, slots[kept], self.key[kept], self.value[kept])
        return storage

    def attention(self, dtype: torch.dtype, query: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return each row's attention by the definition, [query_len, HQ, D], all operations in ``dtype``.

        Args:
            query: [T, HQ, D] that the backend saw, where it rounds queries; None for the scene's.
        """
        query = self.query if query is None else query
        return [self._attend(index, query, dtype) for index in range(len(self.rows))]

    def _attend(self, index: int, query: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        case, row = self.case, self.rows[index]
        tokens = slice(self.starts[index], self.starts[index + 1])
        old_key, old_value = self.history[index]
        key = _as_read(torch.cat((old_key, self.key[tokens])), case, case.key_scale, dtype)
        value = _as_read(torch.cat((old_value, self.value[tokens])), case, case.value_scale, dtype)
        groups = case.heads // case.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query[tokens].to(dtype), key) * case.head_size**-0.5
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        positions = torch.arange(row.seq_len, device=self.device)
        distance = positions[row.num_computed_tokens :, None] - positions[None]
        if case.alibi:
            scores = scores - self.alibi_slopes.to(dtype)[:, None, None] * distance.to(dtype)
        hidden = distance < 0
        if case.sliding_window is not None:
            hidden |= distance >= case.sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if case.sinks:
            sinks = self.sinks.to(dtype)[:, None, None].expand(-1, row.query_len, 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)

    @property
    def alibi_slopes(self) -> torch.Tensor:
        """[HQ] float32."""
        return alibi_slopes(self.case).to(self.device)

    @property
    def sinks(self) -> torch.Tensor:
        """[HQ] in the case's type."""
        return sinks(self.case).to(self.device)


def alibi_slopes(case: Case) -> torch.Tensor:
    """Return one slope per query head, [HQ] float32."""
    return torch.tensor([2.0 ** (-(head + 1) / 2) for head in range(case.heads)])


def sinks(case: Case) -> torch.Tensor:
    """Return one logit per query head, [HQ], some of which outweigh all tokens and some none."""
    return torch.linspace(-2.0, 3.0, case.heads).to(case.dtype)


def allocation(view: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the storage that ``view`` is part of."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def _as_stored(values: torch.Tensor, case: Case, scale: float) -> torch.Tensor:
    if not case.has_float8_cache:
        return values.to(case.dtype)
    limit = torch.finfo(case.float8).max
    return (values.float() / scale).clamp(-limit, limit).to(case.float8).view(torch.uint8)


def _as_read(values: torch.Tensor, case: Case, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if not case.has_float8_cache:
        return values.to(dtype)
    # The device's scale is a float32 number.
    exact_scale = torch.tensor(scale, dtype=torch.float32).double().item()
    return (_as_stored(values, case, scale).view(case.float8).double() * exact_scale).to(dtype)
