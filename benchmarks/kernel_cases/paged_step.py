"""One layer's attention in one step: new tokens, and a cache laid out as vLLM hands it to every backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    """A model's attention shape."""

    name: str
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        """Factor on query-key products."""
        return self.head_size**-0.5

    @property
    def token_bytes(self) -> int:
        """One token's keys and values."""
        return 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def query_bytes(self) -> int:
        """One token's query."""
        return self.num_query_heads * self.head_size * self.dtype.itemsize


GPT2 = Heads("GPT-2", 12, 12, 64, torch.float16)
LLAMA_8B = Heads("Llama-8B", 32, 8, 128, torch.bfloat16)


@dataclass(frozen=True)
class PagedStep:
    """``num_rows`` requests with ``num_computed`` cached and ``query_len`` new tokens each."""

    heads: Heads
    query: torch.Tensor  # [T, HQ, D], with key and value views of one projection's output
    key: torch.Tensor  # [T, HKV, D]
    value: torch.Tensor  # [T, HKV, D]
    storage: torch.Tensor  # [NB, BS, HKV, 2 * D]: keys and values of a head side by side
    block_table: torch.Tensor  # [R, MB] int32
    num_computed: int
    query_len: int

    @property
    def num_rows(self) -> int:
        """Requests."""
        return self.block_table.shape[0]

    @property
    def seq_len(self) -> int:
        """Tokens of a request, the new ones included."""
        return self.num_computed + self.query_len

    @property
    def key_cache(self) -> torch.Tensor:
        """Return [NB, BS, HKV, D]."""
        return self.storage[..., : self.heads.head_size]

    @property
    def value_cache(self) -> torch.Tensor:
        """Return [NB, BS, HKV, D]."""
        return self.storage[..., self.heads.head_size :]

    def per_row(self, value: int) -> torch.Tensor:
        """Return [R] int32, all ``value``."""
        return torch.full((self.num_rows,), value, dtype=torch.int32, device="cuda")

    def query_start_loc(self) -> torch.Tensor:
        """Return [R + 1] int32."""
        starts = torch.arange(self.num_rows + 1, dtype=torch.int32, device="cuda")
        return starts * self.query_len

    def slot_mapping(self) -> torch.Tensor:
        """Return [T] int64: where the new tokens go."""
        block_size = self.storage.shape[1]
        positions = torch.arange(self.num_computed, self.seq_len, device="cuda")
        blocks = self.block_table[:, positions // block_size].long()
        return (blocks * block_size + positions % block_size).flatten()

    def stored(self) -> torch.Tensor:
        """Return what the cache holds for the new tokens, [T, HKV, 2 * D]."""
        return self.storage.flatten(0, 1)[self.slot_mapping()]

    def forget(self) -> None:
        """Overwrite the new tokens in the cache."""
        self.storage.flatten(0, 1)[self.slot_mapping()] = float("nan")

    def with_block_size(self, block_size: int) -> PagedStep:
        """Return a step over a cache of larger blocks with the same content; it shares the new tokens."""
        content = self.storage[self.block_table.long()]
        storage = content.reshape(-1, block_size, *self.storage.shape[2:])
        table = torch.arange(len(storage), dtype=torch.int32, device="cuda").view(self.num_rows, -1)
        return PagedStep(
            self.heads, self.query, self.key, self.value, storage, table, self.num_computed, self.query_len
        )


def make_steps(
    heads: Heads, num_rows: int, num_computed: int, query_len: int, num_sets: int
) -> list[PagedStep]:
    """Return ``num_sets`` steps with random content over one cache, their blocks shuffled together."""
    width = -(-(num_computed + query_len) // BLOCK_SIZE)
    shape = (num_sets * num_rows * width, BLOCK_SIZE, heads.num_kv_heads, 2 * heads.head_size)
    storage = torch.randn(shape, dtype=heads.dtype, device="cuda")
    tables = torch.randperm(shape[0], device="cuda").to(torch.int32).view(num_sets, num_rows, width)
    widths = [heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads]
    steps = []
    for table in tables:
        projected = torch.randn(
            num_rows * query_len, sum(widths), heads.head_size, dtype=heads.dtype, device="cuda"
        )
        query, key, value = projected.split(widths, dim=1)
        steps.append(PagedStep(heads, query, key, value, storage, table, num_computed, query_len))
    return steps
