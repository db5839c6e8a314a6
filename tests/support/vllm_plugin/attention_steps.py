"""Steps of ROSE's attention with plain softmax attention beside them, and vLLM's choice of graphs without a device."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.lora_utils import get_lora_capture_cases

from rose_backend.vllm_plugin.attention.backend import RoseAttentionImpl
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.patch_ledger import apply_patch

BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 16, 24, 4, 2, 64
SCALE = HEAD_SIZE**-0.5
# (tokens computed before, new tokens): decodes, fresh prompts, chunks that start inside a block.
STEPS = {
    "mixed": [(0, 1), (37, 1), (16, 1), (0, 33), (5, 20)],
    "decodes": [(0, 1), (15, 1), (16, 1), (40, 1)],
    "prefills": [(0, 17), (31, 2), (3, 30)],
}


class Step:
    """Random requests with their history already in the cache."""

    def __init__(self, rows: list[tuple[int, int]], *, cache_order: str = "BHNC", padding: int = 0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = rows
        num_tokens = sum(new for _, new in rows)
        self.num_tokens = num_tokens
        self.query = torch.randn(num_tokens + padding, NUM_HEADS, HEAD_SIZE, generator=generator)
        self.key = torch.randn(num_tokens + padding, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
        self.value = torch.randn(num_tokens + padding, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
        # Slots that no request has written hold NaN: reading one shows.
        sizes = {"B": NUM_BLOCKS, "H": NUM_KV_HEADS, "N": BLOCK_SIZE, "C": 2 * HEAD_SIZE}
        storage = torch.full([sizes[letter] for letter in cache_order], float("nan"))
        self.cache = storage.permute([cache_order.index(letter) for letter in "BHNC"])
        width = 8
        free = torch.randperm(NUM_BLOCKS - 1, generator=generator).add(1).tolist()
        self.table = torch.zeros(len(rows), width, dtype=torch.int32)
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []
        slots, starts = [], [0]
        for row, (computed, new) in enumerate(rows):
            for column in range(-(-(computed + new) // BLOCK_SIZE)):
                self.table[row, column] = free.pop()
            key = torch.randn(computed, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
            value = torch.randn(computed, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
            self.history.append((key, value))
            for position in range(computed):
                block = int(self.table[row, position // BLOCK_SIZE])
                self.cache[block, :, position % BLOCK_SIZE] = torch.cat((key[position], value[position]), -1)
            for position in range(computed, computed + new):
                slots.append(
                    int(self.table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
                )
            starts.append(starts[-1] + new)
        self.slot_mapping = torch.tensor(slots + [-1] * padding)
        self.starts = starts

    def common_metadata(self) -> CommonAttentionMetadata:
        start_loc = torch.tensor(self.starts, dtype=torch.int32)
        seq_lens = torch.tensor([computed + new for computed, new in self.rows], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=start_loc,
            query_start_loc_cpu=start_loc,
            seq_lens=seq_lens,
            num_reqs=len(self.rows),
            num_actual_tokens=self.num_tokens,
            max_query_len=max(new for _, new in self.rows),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.table,
            slot_mapping=self.slot_mapping,
        )

    def expected(self, sliding_window: int | None = None) -> torch.Tensor:
        out = torch.empty(self.num_tokens, NUM_HEADS, HEAD_SIZE)
        for row, (computed, new) in enumerate(self.rows):
            tokens = slice(self.starts[row], self.starts[row + 1])
            key, value = (
                torch.cat((known, new[tokens])).repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1)
                for known, new in zip(self.history[row], (self.key, self.value), strict=True)
            )
            scores = torch.einsum("qhd,khd->hqk", self.query[tokens], key) * SCALE
            distance = (torch.arange(new) + computed)[:, None] - torch.arange(computed + new)[None]
            hidden = (distance < 0) | (distance >= (sliding_window or 1 << 30))
            out[tokens] = torch.einsum(
                "hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value
            )
        return out

    def expected_cache(self) -> torch.Tensor:
        """Return the cache with the new tokens stored; what nobody has written counts as -1e9."""
        cache = self.cache.clone()
        for token, slot in enumerate(self.slot_mapping[: self.num_tokens].tolist()):
            new = torch.cat((self.key[token], self.value[token]), -1)
            cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = new
        return cache.nan_to_num(nan=-1e9)

    def check(self, output: torch.Tensor, sliding_window: int | None = None) -> None:
        """Compare an output, in which padding is 7, with plain attention."""
        expected = self.expected(sliding_window)
        torch.testing.assert_close(output[: self.num_tokens], expected, rtol=1e-5, atol=1e-5)
        assert (output[self.num_tokens :] == 7.0).all(), "padding was written"


def make_layer(config: Any, **options: Any) -> RoseAttentionImpl:
    with set_current_vllm_config(config):
        return RoseAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS, **options)


def make_builder(config: Any, device: str = "cpu") -> RoseAttentionMetadataBuilder:
    with set_current_vllm_config(config):
        return RoseAttentionMetadataBuilder(None, ["layer"], config, torch.device(device))


def attend(layer: RoseAttentionImpl, step: Step, metadata: Any) -> torch.Tensor:
    output = torch.full_like(step.query, 7.0)
    assert layer.forward(None, step.query, step.key, step.value, step.cache, metadata, output) is output
    return output


class Manager(CudaGraphManager):
    """vLLM's choice of graphs without a device."""

    def __init__(
        self, config: Any, mode: CUDAGraphMode, max_num_reqs: int, decode_query_len: int = 1
    ) -> None:
        self.vllm_config, self.compilation_config = config, config.compilation_config
        self.cudagraph_mode, self.max_num_reqs, self.decode_query_len = mode, max_num_reqs, decode_query_len
        self.varlen_decode, self.ubatch_runner = False, None
        self.lora_capture_cases = get_lora_capture_cases(config.lora_config, config.compilation_config)
        self._lora_dispatch_map, self._max_lora_case = self._build_lora_dispatch_map()
        self._candidates, self._capture_descs = {}, {}
        self._graphs_captured = True
        apply_patch("decode_graphs")
        self._init_candidates()


class Buffers:
    """What a graph reads and writes: room for ``num_rows`` requests and ``num_tokens`` tokens, padded as vLLM does."""

    def __init__(self, num_rows: int, num_tokens: int, device: str) -> None:
        self.num_rows, self.num_tokens = num_rows, num_tokens
        self.query = torch.zeros(num_tokens, NUM_HEADS, HEAD_SIZE, device=device)
        self.key = torch.zeros(num_tokens, NUM_KV_HEADS, HEAD_SIZE, device=device)
        self.value, self.output = torch.zeros_like(self.key), torch.zeros_like(self.query)
        self.cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, device=device)
        self.starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.table = torch.zeros(num_rows, 8, dtype=torch.int32, device=device)
        self.slot_mapping = torch.full((num_tokens,), -1, device=device)
        self.starts_cpu = torch.zeros(num_rows + 1, dtype=torch.int32)
        self.max_query_len = num_tokens

    def fill(self, step: Step) -> None:
        rows, tokens = len(step.rows), step.num_tokens
        self.max_query_len = max(new for _, new in step.rows)
        for buffer, values in ((self.query, step.query), (self.key, step.key), (self.value, step.value)):
            buffer.fill_(float("nan"))
            buffer[:tokens] = values
        self.output.fill_(7.0)
        self.cache.copy_(step.cache)
        self.starts_cpu.fill_(tokens)
        self.starts_cpu[: rows + 1] = torch.tensor(step.starts, dtype=torch.int32)
        self.starts.copy_(self.starts_cpu)
        self.seq_lens.zero_()
        self.seq_lens[:rows] = torch.tensor([sum(row) for row in step.rows])
        self.table.zero_()
        self.table[:rows] = step.table
        self.slot_mapping.fill_(-1)
        self.slot_mapping[:tokens] = step.slot_mapping

    def common_metadata(self) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts_cpu,
            seq_lens=self.seq_lens,
            num_reqs=self.num_rows,
            num_actual_tokens=self.num_tokens,
            max_query_len=self.max_query_len,
            max_seq_len=128,
            block_table_tensor=self.table,
            slot_mapping=self.slot_mapping,
        )
