"""A small stand-in for vLLM's model runner with decode graphs, and what its requests' tokens must be."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.punica_wrapper.utils import convert_mapping
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from rose_backend.vllm_plugin.sampler import ReplayedSampling
from tests.support.decode_steps import NUM_SLOTS

MAX_REQS, MAX_LEN, VOCAB_SIZE, BLOCK_SIZE = 8, 64, 31, 4
SIZES = (1, 2, 4, 8)
MIXED_SIZES = (4, 6, 16, 32, 48)
"""Tokens of graphs of steps with prompts."""
GROUPS: dict[str, tuple[tuple[int, int | None, int], ...]] = {
    "one group": ((BLOCK_SIZE, None, 1),),
    "one group, two shapes": ((BLOCK_SIZE, None, 2),),
    "windows": ((BLOCK_SIZE, None, 1), (BLOCK_SIZE, 9, 1), (BLOCK_SIZE, 9, 1)),
    "sizes, windows and shapes": ((2, 7, 2), (BLOCK_SIZE, None, 1), (8, 20, 3), (BLOCK_SIZE, 9, 1)),
}
"""Tokens per block, window and metadata builders of each KV cache group."""
STATE, MAMBA2_STATE = -1, -2
"""In the place of a window: the group's layers keep a state, of gated delta nets or of Mamba 2."""
STATE_GROUPS: dict[str, tuple[tuple[int, int | None, int], ...]] = {
    "states": ((BLOCK_SIZE, None, 1), (BLOCK_SIZE, STATE, 1)),
    "states first": ((BLOCK_SIZE, MAMBA2_STATE, 1), (BLOCK_SIZE, STATE, 2), (BLOCK_SIZE, None, 2)),
}
NUM_STATE_BLOCKS = 10_000


@dataclass(frozen=True)
class Desc:
    num_tokens: int
    cg_mode: CUDAGraphMode = CUDAGraphMode.FULL
    uniform_token_count: int | None = 1
    num_active_loras: int = 0

    @property
    def num_reqs(self) -> int:
        return min(self.num_tokens // (self.uniform_token_count or 1), MAX_REQS)


class Tables:
    """Block tables whose writes are staged, as vLLM's are."""

    def __init__(self, block_sizes: list[int]) -> None:
        self.block_sizes = block_sizes
        self.num_kv_cache_groups = num_groups = len(block_sizes)
        shapes = [(MAX_REQS, MAX_LEN // size) for size in block_sizes]
        self.block_tables = [SimpleNamespace(gpu=torch.zeros(*shape, dtype=torch.int32)) for shape in shapes]
        self.input_block_tables = [torch.zeros(*shape, dtype=torch.int32) for shape in shapes]
        self.slot_mappings = torch.zeros(num_groups, MAX_LEN, dtype=torch.int64)
        self.num_blocks = SimpleNamespace(np=np.zeros((num_groups, MAX_REQS), np.int32))
        self._staged: list[tuple[int, int, int, list[int]]] = []

    def append_block_ids(self, slot: int, block_ids: tuple[list[int], ...], overwrite: bool) -> None:
        for index, of_group in enumerate(block_ids):
            start = 0 if overwrite else int(self.num_blocks.np[index, slot])
            self._staged.append((index, slot, start, of_group))
            self.num_blocks.np[index, slot] = start + len(of_group)

    def apply_staged_writes(self) -> None:
        for index, slot, start, ids in self._staged:
            row = self.block_tables[index].gpu[slot]
            row[start : start + len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self._staged.clear()


class Manager:
    """Graphs of decodes and of steps with prompts: hidden states that depend on every input of a token."""

    def __init__(self, runner: Runner) -> None:
        mixed = [Desc(size, uniform_token_count=None) for size in MIXED_SIZES]
        plain = [*(Desc(size) for size in SIZES), *mixed]
        self.graphs = dict.fromkeys(
            [*plain, *(replace(desc, num_active_loras=MAX_LORAS + 1) for desc in plain)]
        )
        self.hidden_states = torch.zeros(MAX_LEN, 1, dtype=torch.float64)
        self._runner = runner

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int = 0,
        max_query_len: int | None = None,
    ) -> Desc:
        captured_loras = MAX_LORAS + 1 if num_active_loras else 0
        query_len = uniform_token_count or 1
        if 1 < query_len <= self._runner.decode_query_len:
            size = next(size for size in SIZES if size * query_len >= num_tokens)
            return Desc(size * query_len, uniform_token_count=query_len)
        if uniform_token_count == 1 and num_tokens <= SIZES[-1]:
            size = next(size for size in SIZES if size >= num_tokens)
            return Desc(size, num_active_loras=captured_loras)
        size = next((size for size in MIXED_SIZES if size >= num_tokens), None)
        if size is None:
            return Desc(num_tokens, CUDAGraphMode.NONE, None, captured_loras)
        return Desc(size, uniform_token_count=None, num_active_loras=captured_loras)

    def run_fullgraph(self, desc: Desc) -> None:
        runner, rows, inputs = self._runner, desc.num_reqs, self._runner.input_buffers
        if desc.uniform_token_count == 1:
            of_row = torch.arange(rows)
            offsets = torch.zeros(rows, dtype=torch.int64)
        else:
            starts = inputs.query_start_loc[: rows + 1].long()
            assert (inputs.seq_lens[:rows] >= starts.diff()).all() and not starts[0]
            of_row = torch.repeat_interleave(torch.arange(rows), starts.diff())
            offsets = torch.arange(len(of_row)) - starts[of_row]
            assert torch.equal(
                inputs.is_padding[: desc.num_tokens], torch.arange(desc.num_tokens) >= starts[-1]
            )
            assert (runner.block_tables.slot_mappings[:, len(of_row) : desc.num_tokens] == -1).all()
        hidden = runner.read_tokens(len(of_row))
        for index, (block_size, window, _) in enumerate(runner.groups):
            if window is not None and window < 0:
                for nth, group in enumerate(runner.attn_groups[index]):
                    hidden += (5 + nth) * self._next_states(index, group.get_metadata_builder(), rows, nth)
                continue
            for nth, group in enumerate(runner.attn_groups[index]):
                decodes, prompts = group.get_metadata_builder().computed_tokens[:, :rows].long()
                if desc.uniform_token_count == 1:
                    computed = decodes
                else:
                    # A row is of one kind at most; padding is of none.
                    computed = torch.maximum(decodes, prompts)
                    is_row = starts.diff() > 0
                    assert torch.equal((decodes >= 0).int() + (prompts >= 0).int(), is_row.int())
                    assert torch.equal(prompts >= 0, starts.diff() > runner.decode_query_len)
                lengths = computed[of_row] + offsets + 1
                hidden += (5 + nth) * lengths
            table = runner.block_tables.input_block_tables[index][of_row].long()
            columns = torch.arange(table.shape[1])[None]
            # Columns behind the sequence, and those that the window has passed, may hold anything.
            used = columns * block_size < lengths[:, None]
            if window is not None:
                used &= (columns + 1) * block_size > (lengths - window)[:, None]
            hidden += (7 + index) * (table * used * (columns + 1)).sum(1)
            hidden += (11 + index) * runner.block_tables.slot_mappings[index, : len(of_row)]
        if desc.num_active_loras:
            num_tokens = min(len(of_row), len(runner.adapters.token_places))
            hidden[:num_tokens] += 13 * runner.adapters.weights[runner.adapters.token_places[:num_tokens]]
        self.hidden_states[: len(of_row), 0] = hidden

    def _next_states(self, index: int, builder: Any, rows: int, nth: int) -> torch.Tensor:
        """Move the states on that rows have; return them."""
        runner, inputs = self._runner, self._runner.input_buffers
        blocks = runner.state_blocks_of(builder)[:rows].long()
        is_real = blocks != 0
        if type(builder) is GDNAttentionMetadataBuilder:
            assert torch.equal(builder.non_spec_query_start_loc[: rows + 1].diff() > 0, is_real)
        states = runner.states[index, nth]
        real = blocks[is_real]
        assert len(set(real.tolist())) == len(real)
        states[real] = next_state(states[real], inputs.input_ids[:rows][is_real].long())
        assert not states[0]
        return states[blocks]


def next_state(state: Any, token: Any) -> Any:
    """Return the state after one more token."""
    return (5 * state + token + 1) % 10_007


class Runner:
    """What the steps touch of vLLM's GPUModelRunner."""

    def __init__(self, groups: tuple[tuple[int, int | None, int], ...] = GROUPS["one group"]) -> None:
        self.device = torch.device("cpu")
        self.dp_size, self.dp_rank, self.parallel_config = 1, 0, object()
        self.max_num_reqs, self.vocab_size = MAX_REQS, VOCAB_SIZE
        self.speculative_config: Any = None
        self.speculator: Any = None
        self.decode_query_len = 1
        self.groups = groups
        self.block_tables = Tables([block_size for block_size, _, _ in groups])
        ints = {"dtype": torch.int32}
        self.input_buffers = SimpleNamespace(
            input_ids=torch.zeros(MAX_LEN, **ints),
            positions=torch.zeros(MAX_LEN, dtype=torch.int64),
            seq_lens=torch.zeros(MAX_REQS, **ints),
            query_start_loc=torch.zeros(MAX_REQS + 1, **ints),
            is_padding=torch.zeros(MAX_LEN, dtype=torch.bool),
        )
        self.attn_groups = [
            [_group_with_builder(window) for _ in range(count)] for _, window, count in groups
        ]
        # By group, metadata builder and block.
        self.states = torch.zeros(len(groups), 3, NUM_STATE_BLOCKS, dtype=torch.int64)
        self.model_state: Any = SimpleNamespace(
            rope_state=None,
            supports_mm_inputs=False,
            _mamba_state_idx_gpu=torch.zeros(MAX_REQS, **ints),
        )
        self.zeroed: list[int] = []
        self.kv_block_zeroer = SimpleNamespace(zero_block_ids=self.zeroed.extend)
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            free=list(range(MAX_REQS)),
            prefill_len=SimpleNamespace(np=np.zeros(MAX_REQS, np.int32), gpu=torch.zeros(MAX_REQS, **ints)),
            num_computed_tokens=SimpleNamespace(gpu=torch.zeros(MAX_REQS, **ints)),
            total_len=SimpleNamespace(gpu=torch.zeros(MAX_REQS, **ints)),
            all_token_ids=SimpleNamespace(gpu=torch.zeros(MAX_REQS, MAX_LEN, **ints)),
            last_sampled_tokens=torch.zeros(MAX_REQS, 1, dtype=torch.int64),
        )
        self.sampler = SimpleNamespace(
            sample=None,
            sampling_states=SimpleNamespace(
                temperature=SimpleNamespace(np=np.zeros(MAX_REQS)), num_logprobs=np.full(MAX_REQS, -1)
            ),
            needs_logits_processing=np.zeros(MAX_REQS, bool),
            penalties_state=SimpleNamespace(output_bin_counts=torch.zeros(MAX_REQS, VOCAB_SIZE, **ints)),
            get_logprobs_dims=self._logprobs_dims,
        )
        self.prompt_logprobs_worker = SimpleNamespace(
            uses_prompt_logprobs=np.zeros(MAX_REQS, bool), token_id_scores={}
        )
        self.model = SimpleNamespace(compute_logits=self._logits, lm_head=torch.nn.Linear(1, 1))
        self.kv_caches = [torch.zeros(2, 2)]
        self.products: list[int] = []
        self.execute_model_state: Any = None
        self.kv_connector: Any = NO_OP_KV_CONNECTOR
        self.encoder_cache: Any = None
        self.lora_config: Any = None
        self.cudagraph_manager = Manager(self)

    def _logprobs_dims(self, slots: Any) -> Any:
        most = int(self.sampler.sampling_states.num_logprobs[slots].max())
        return None if most < 0 else (most, 0)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.products.append(len(hidden))
        words = hidden[:, 0].long()
        if self.lora_config is not None:
            places = self.adapters.row_places[: len(hidden)]
            words[: len(places)] += 17 * self.adapters.weights[places]
        return torch.nn.functional.one_hot(words % VOCAB_SIZE, VOCAB_SIZE).float()

    def serve_adapters(self) -> None:
        """Have LoRA on, with one weight per adapter, which layers and head use."""
        self.adapters = Adapters()
        self.lora_config = self.adapters.lora_config
        self.lora_state, self.lora_manager = LoraState(MAX_REQS), self.adapters.of_worker
        self.model.lora_manager = self.adapters

    def _ensure_lora_enabled(self) -> None:
        pass

    def _set_active_loras(self, *inputs: Any) -> None:
        self.adapters.num_mappings += 1
        LoRAModelRunnerMixin._set_active_loras(self, *inputs)  # type: ignore[arg-type]

    def see_pictures(self, architecture: str = "Qwen2_5_VLForConditionalGeneration") -> None:
        """Have a multimodal model: layers read embeddings and M-RoPE positions in place of ids and positions."""
        self.model_config = SimpleNamespace(architecture=architecture)
        self.model.embed_input_ids = embed_input_ids
        self.encoder_cache = EncoderCache()
        # vLLM's own but for its kernels.
        columns = self.model_state._mamba_state_idx_gpu
        state = self.model_state = object.__new__(DefaultModelState)
        state._mamba_state_idx_gpu = columns
        state.supports_mm_inputs, state.mm_pruner, state.prompt_embeds_state = True, None, None
        state.encoder_cache = self.encoder_cache
        of_embeds = {"hidden_size": 1, "dtype": torch.float64, "device": self.device}
        state.encoder_runner = EncoderRunner(
            self.model, MAX_LEN, encoder_cache=self.encoder_cache, **of_embeds
        )
        state.rope_state = rope_state(3)
        state.rope_state.prepare_positions = self._prepare_positions
        state.execute_mm_encoder = self._encode

    def _encode(self, scheduled: dict[str, list[int]]) -> None:
        for request_id, indices in scheduled.items():
            for feature in (self.encoder_cache.mm_features[request_id][index] for index in indices):
                assert feature.identifier not in self.encoder_cache.encoder_outputs
                self.encoder_cache.encoder_outputs[feature.identifier] = features_of(feature)

    def _prepare_positions(self, slots: torch.Tensor, starts: torch.Tensor, lens: Any, computed: Any) -> None:
        rope = self.model_state.rope_state
        for row, slot in enumerate(slots.tolist()):
            first, tokens = int(computed[slot]), slice(*starts[row : row + 2].tolist())
            positions = torch.arange(first, first + tokens.stop - tokens.start)
            if first < lens[slot]:
                of_slot = rope.prefill_positions.gpu.view(-1, 3, MAX_LEN)[slot]
                rope.positions[:, tokens] = of_slot[:, positions].long()
            else:
                rope.positions[:, tokens] = positions + rope.prefill_delta.gpu[slot]

    def read_tokens(self, num_tokens: int) -> torch.Tensor:
        """Return of each token what its id, or embedding, and its positions make."""
        rope, inputs = self.model_state.rope_state, self.input_buffers
        if rope is None:
            return inputs.input_ids[:num_tokens] + 3 * inputs.positions[:num_tokens]
        embeds = self.model_state.encoder_runner.inputs_embeds[:num_tokens, 0].long()
        return embeds + (POSITION_WEIGHTS[:, None] * rope.positions[:, :num_tokens]).sum(0)

    def set_delta(self, slot: int, num_prompt_tokens: int) -> None:
        """Say where the tokens of a prompt and those behind it are; of a prompt with pictures they are less far."""
        if (rope := self.model_state.rope_state) is None:
            return
        rope.prefill_delta.np[slot] = delta_of(num_prompt_tokens)
        rope.prefill_positions.gpu.view(-1, 3, MAX_LEN)[slot] = positions_in_prompt(torch.arange(MAX_LEN))
        rope.apply_staged_writes()

    def add(self, request_id: str, prompt: list[int], last: int) -> None:
        """Put a request in whose prompt has been computed, and whose first token is ``last``."""
        states, slot = self.req_states, self.req_states.free.pop()
        states.req_id_to_index[request_id] = slot
        states.prefill_len.np[slot] = states.prefill_len.gpu[slot] = len(prompt)
        states.num_computed_tokens.gpu[slot] = len(prompt)
        states.total_len.gpu[slot] = len(prompt) + 1
        states.all_token_ids.gpu[slot, : len(prompt) + 1] = torch.tensor([*prompt, last], dtype=torch.int32)
        states.last_sampled_tokens[slot] = last
        self.sampler.penalties_state.output_bin_counts[slot] = 0
        blocks = self.new_blocks(slot, len(prompt))
        self.block_tables.append_block_ids(slot, blocks, overwrite=True)
        self.block_tables.apply_staged_writes()
        self.model_state._mamba_state_idx_gpu[slot] = (len(prompt) - 1) // BLOCK_SIZE
        for index, of_group in enumerate(blocks):
            self.states[index, :, of_group[-1]] = state_after(prompt)

    def state_blocks_of(self, builder: Any) -> torch.Tensor:
        """Return what layers with a state read of their metadata builder: a block of each row."""
        if type(builder) is Mamba2AttentionMetadataBuilder:
            return builder.state_indices_tensor_d[:, 0]
        return builder.non_spec_state_indices_tensor

    def new_blocks(self, slot: int, num_tokens: int) -> tuple[list[int], ...]:
        """Return the blocks of a prompt; the null block where a window has passed, of a state one everywhere."""
        return tuple(
            [
                1000 * index + slot + 1
                if window is not None and window < 0
                else 0
                if window is not None and (column + 1) * size <= num_tokens - window
                else 1000 * index + 100 * slot + column + 1
                for column in range(-(-num_tokens // size))
            ]
            for index, (size, window, _) in enumerate(self.groups)
        )

    def finish_requests(self, output: SchedulerOutput) -> None:
        for request_id in sorted(output.finished_req_ids | (output.preempted_req_ids or set())):
            slot = self.req_states.req_id_to_index.pop(request_id)
            self.req_states.free.append(slot)
            if self.lora_config is not None:
                self.lora_state.remove_request(request_id)
            if self.encoder_cache is not None:
                self.encoder_cache.remove_request(request_id)

    def free_states(self, output: SchedulerOutput) -> None:
        for name in output.free_encoder_mm_hashes:
            self.encoder_cache.free_encoder_cache(name)

    def add_requests(self, output: SchedulerOutput) -> None:
        """Put new requests in, of whose prompts tokens may have been computed before."""
        states = self.req_states
        for new in output.scheduled_new_reqs:
            slot = states.free.pop()
            states.req_id_to_index[new.req_id] = slot
            assert new.prefill_token_ids is not None
            num_tokens = len(new.prefill_token_ids)
            self.set_delta(slot, num_tokens)
            if self.encoder_cache is not None:
                self.encoder_cache.add_request(new.req_id, new.mm_features)
            states.prefill_len.np[slot] = states.total_len.gpu[slot] = num_tokens
            states.prefill_len.gpu[slot] = num_tokens
            states.num_computed_tokens.gpu[slot] = new.num_computed_tokens
            states.all_token_ids.gpu[slot, :num_tokens] = torch.tensor(new.prefill_token_ids)
            self.sampler.penalties_state.output_bin_counts[slot] = 0
            self.block_tables.append_block_ids(slot, new.block_ids, overwrite=True)
            if self.lora_config is not None:
                self.lora_state.add_request(new.req_id, slot, new.lora_request)

    def update_requests(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                slot = self.req_states.req_id_to_index[request_id]
                self.block_tables.append_block_ids(slot, block_ids, overwrite=False)
        self.zeroed.extend(output.new_block_ids_to_zero or ())
        for source, destination in output.kv_cache_block_copies or ():
            self.states[:, :, destination] = self.states[:, :, source]

    def own_step(self, output: SchedulerOutput) -> tuple[list[int], Any]:
        """Run a step of decodes as vLLM does, from its own counts of blocks.

        Returns:
            The tokens, and what the KV connector reports.
        """
        self.finish_requests(output)
        self.free_states(output)
        self.update_requests(output)
        self.block_tables.apply_staged_writes()
        ids = output.scheduled_cached_reqs.req_ids
        if not ids:
            return [], self.kv_connector.no_forward(output).kv_connector_output
        slots = [self.req_states.req_id_to_index[each] for each in ids]
        num_adapters = 0
        if self.lora_config is not None:
            inputs = self.lora_state.make_lora_inputs(ids, np.array(slots), np.ones(len(ids), np.int32))
            num_adapters = len(inputs[-1])
            self._set_active_loras(*inputs)
        desc = self.cudagraph_manager.dispatch(len(ids), len(ids), 1, num_adapters)
        states, inputs, rows = self.req_states, self.input_buffers, len(ids)
        computed = states.num_computed_tokens.gpu[slots]
        inputs.input_ids[:rows] = states.last_sampled_tokens[slots, 0].int()
        inputs.positions[:rows] = computed
        if (rope := self.model_state.rope_state) is not None:
            rope.positions[:, :rows] = computed + rope.prefill_delta.gpu[slots]
            self.model_state.encoder_runner.get_inputs_embeds(inputs.input_ids[:rows], [], torch.zeros(rows))
        for index, (block_size, window, _) in enumerate(self.groups):
            if window is not None and window < 0:
                self._prepare_states(index, slots, desc.num_tokens)
            else:
                self._prepare_group(index, block_size, slots, desc.num_tokens)
        self.model_state._mamba_state_idx_gpu[slots] = computed // BLOCK_SIZE
        batch = SimpleNamespace(idx_mapping=torch.tensor(slots), req_ids=ids, num_tokens=rows)
        self.kv_connector.pre_forward(output, batch, attn_metadata={})
        self.cudagraph_manager.run_fullgraph(desc)
        self.kv_connector.finish_forward()
        tokens = self.model.compute_logits(self.cudagraph_manager.hidden_states[:rows]).argmax(-1)
        states.all_token_ids.gpu[slots, states.total_len.gpu[slots].long()] = tokens.int()
        states.last_sampled_tokens[slots, 0] = tokens
        states.total_len.gpu[slots] += 1
        states.num_computed_tokens.gpu[slots] += 1
        self.sampler.penalties_state.output_bin_counts[slots, tokens] += 1
        return tokens.tolist(), self.kv_connector.post_forward(output.finished_req_ids)

    def _prepare_states(self, index: int, slots: list[int], num_rows: int) -> None:
        """Copy the states of rows that reach another column to its block, which is the same, and tell layers of it."""
        computed = self.req_states.num_computed_tokens.gpu[slots]
        last = self.model_state._mamba_state_idx_gpu[slots]
        assert torch.equal(last, (computed - 1) // BLOCK_SIZE)
        table = self.block_tables.block_tables[index].gpu[slots]
        blocks = table.gather(1, (computed // BLOCK_SIZE).long()[:, None])[:, 0]
        assert torch.equal(blocks, table.gather(1, last.long()[:, None])[:, 0])
        for group in self.attn_groups[index]:
            builder = group.get_metadata_builder()
            of_rows = self.state_blocks_of(builder)
            of_rows[: len(slots)], of_rows[len(slots) : num_rows] = blocks, 0
            if type(builder) is GDNAttentionMetadataBuilder:
                rows = torch.arange(num_rows + 1).clamp(max=len(slots))
                builder.non_spec_query_start_loc[: num_rows + 1] = rows

    def _prepare_group(self, index: int, block_size: int, slots: list[int], num_rows: int) -> None:
        tables, computed = self.block_tables, self.req_states.num_computed_tokens.gpu
        for row in range(num_rows):
            is_real = row < len(slots)
            num_computed = int(computed[slots[row]]) if is_real else -1
            for group in self.attn_groups[index]:
                group.get_metadata_builder().decode_computed_tokens[row] = num_computed
            tables.slot_mappings[index, row] = -1
            if not is_real:
                tables.input_block_tables[index][row] = 0
                continue
            table, count = tables.block_tables[index].gpu[slots[row]], tables.num_blocks.np[index, slots[row]]
            tables.input_block_tables[index][row, :count] = table[:count]
            block, offset = int(table[num_computed // block_size]), num_computed % block_size
            tables.slot_mappings[index, row] = block * block_size + offset


class Processors:
    """In the place of vLLM's: a slot's logits are moved on by as many tokens as ``shifts`` says."""

    def __init__(self) -> None:
        self.shifts = [0] * (MAX_REQS + 1)

    def apply(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
    ) -> None:
        assert len(logits) == len(slots) == len(positions) == len(ids)
        real = slots[slots != MAX_REQS].tolist()
        assert len(set(real)) == len(real), "rows of padding have the slot of a request"
        for row, slot in enumerate(slots.tolist()):
            logits[row] = logits[row].roll(self.shifts[slot])


class Draws:
    """In the place of ``DrawGraphs``: the largest logit, and three rows at a time."""

    def __init__(self) -> None:
        self.parameters = {"num_logprobs": torch.full((MAX_REQS + 1,), -1, dtype=torch.int32)}

    def compute(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        process: Any,
    ) -> None:
        for start in range(0, len(logits), 3):
            rows = slice(start, min(start + 3, len(logits)))
            own = logits[rows].clone()
            if process is not None:
                process(own, rows)
            tokens[rows] = own.argmax(-1)


class SamplingRunner(Runner):
    """With Rose's sampler: all that steps sample is replayed."""

    def __init__(self, groups: tuple[tuple[int, int | None, int], ...] = GROUPS["one group"]) -> None:
        super().__init__(groups)
        self.processors, self.draws = Processors(), Draws()
        replayed = object.__new__(ReplayedSampling)
        replayed.graphs = self.draws  # type: ignore[assignment]
        replayed.is_changed = np.zeros(MAX_REQS, bool)
        replayed.whole_steps = lambda max_num_rows: self.processors  # type: ignore[method-assign, assignment, return-value]
        self.replayed = self.sampler.sample = replayed
        self.sampler.logprobs_mode = "raw_logprobs"

    def process(self, slot: int, shift: int) -> None:
        self.replayed.is_changed[slot], self.processors.shifts[slot] = bool(shift), shift

    def report(self, slot: int, num_logprobs: int) -> None:
        self.sampler.sampling_states.num_logprobs[slot] = num_logprobs
        self.draws.parameters["num_logprobs"][slot] = num_logprobs


POSITION_WEIGHTS = torch.tensor([3, 13, 17])


def delta_of(num_prompt_tokens: int) -> int:
    """Return by how much positions behind a prompt are more than numbers of tokens: never."""
    return -(num_prompt_tokens % 5)


def positions_in_prompt(tokens: torch.Tensor) -> torch.Tensor:
    """Return the positions of a prompt's tokens in three dimensions."""
    return tokens * torch.tensor([[2], [3], [4]]) // 4


def features_of(picture: MultiModalFeatureSpec) -> torch.Tensor:
    """Return what an encoder makes of a picture, as no token's embedding is."""
    first = 1000 * (1 + int(picture.identifier))
    return torch.arange(first, first + picture.mm_position.length, dtype=torch.float64)[:, None]


def embed_input_ids(
    ids: torch.Tensor, multimodal_embeddings: Any = (), *, is_multimodal: torch.Tensor | None = None
) -> torch.Tensor:
    """Return embeddings of one element."""
    embeds = 2 * ids.double()[:, None] + 1
    if len(multimodal_embeddings):
        assert is_multimodal is not None and len(is_multimodal) == len(ids)
        embeds[is_multimodal] = torch.cat(list(multimodal_embeddings))
    return embeds


def rope_state(num_dims: int) -> RopeState:
    """Return vLLM's M-RoPE positions, with what takes turns on a GPU taking turns here."""
    with patch.object(buffer_utils, "is_uva_available", lambda: False):
        return RopeState(num_dims, NUM_SLOTS, MAX_LEN, MAX_LEN, torch.device("cpu"))


MAX_LORAS = 2
NUM_ADAPTERS_IN_MEMORY = 3


class Adapters(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """vLLM's manager of adapters, which come and go as they do there; an adapter's weight is a number."""

    def __init__(self) -> None:
        self.lora_config = SimpleNamespace(
            max_loras=MAX_LORAS, max_cpu_loras=NUM_ADAPTERS_IN_MEMORY, specialize_active_lora=False
        )
        self.lora_index_to_id = [None] * MAX_LORAS
        self._registered_adapters = AdapterLRUCache(NUM_ADAPTERS_IN_MEMORY, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(MAX_LORAS, self._deactivate_adapter)
        self._last_mapping = self._last_slot_layout = None
        self.modules = {"all": SimpleNamespace(set_lora=self._set, reset_lora=None)}
        # What is at the last place is of rows without an adapter.
        self.weights = torch.tensor([-1] * MAX_LORAS + [0])
        self.token_places = self.row_places = torch.tensor([], dtype=torch.int64)
        self.num_mappings = 0
        self.of_worker = object.__new__(LRUCacheWorkerLoRAManager)
        self.of_worker._adapter_manager = self
        self.of_worker._load_adapter = self._load

    def _load(self, request: LoRARequest) -> Any:
        weight = torch.tensor(int(request.lora_path))
        return SimpleNamespace(id=request.lora_int_id, lora_a=weight, lora_b=weight)

    def _add_adapter(self, lora: Any) -> None:
        self._registered_adapters[lora.id] = lora

    def _get_lora_layer_weights(self, lora: Any, module_name: str) -> Any:
        return SimpleNamespace(lora_a=lora.lora_a, lora_b=lora.lora_b)

    def _set(self, place: int, weight: torch.Tensor, _: torch.Tensor) -> None:
        self.weights[place] = weight

    def _set_adapter_mapping(self, mapping: Any) -> None:
        device = torch.device("cpu")
        self.token_places, self.row_places, *_ = convert_mapping(
            mapping, self.lora_index_to_id, MAX_LORAS + 1, VOCAB_SIZE, device
        )


class Builder:
    """Metadata builder of a KV cache group."""

    def __init__(self) -> None:
        self.computed_tokens = torch.full((2, MAX_REQS), -1, dtype=torch.int32)

    @property
    def decode_computed_tokens(self) -> torch.Tensor:
        return self.computed_tokens[0]

    def take_computed_tokens(self) -> torch.Tensor:
        return self.computed_tokens


def _group_with_builder(window: int | None) -> SimpleNamespace:
    builder: Any = Builder()
    if window == STATE:
        builder = object.__new__(GDNAttentionMetadataBuilder)
        builder.non_spec_state_indices_tensor = torch.full((MAX_REQS,), 9, dtype=torch.int32)
        builder.non_spec_query_start_loc = torch.arange(MAX_REQS + 1, dtype=torch.int32)
    elif window == MAMBA2_STATE:
        builder = object.__new__(Mamba2AttentionMetadataBuilder)
        builder.state_indices_tensor_d = torch.full((MAX_REQS, 1), 9, dtype=torch.int32)
    return SimpleNamespace(get_metadata_builder=lambda: builder, metadata_builders=[builder])


class Requests:
    """What the tokens of each request must be: one after the other, from the request's own state alone."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, tuple[list[int], ...]] = {}
        self.finished: set[str] = set()
        self.count = 0
        self.num_prompt_tokens: dict[str, int] = {}
        self.pictures: dict[str, list[MultiModalFeatureSpec]] = {}
        self.computed: dict[str, int] = {}
        """Of requests whose prompt is not over; they are in ``tokens``, too."""
        self.adapter_of: dict[str, LoRARequest] = {}

    def come_and_go(self, choose: random.Random) -> None:
        """Add a request where there is room, by chance, and end some and those that are full."""
        if len(self.tokens) < MAX_REQS - len(self.finished) and choose.random() < 0.3:
            self.add(choose.randrange(1, 20))
        for request_id in list(self.tokens):
            if len(self.tokens[request_id]) >= MAX_LEN - 1 or choose.random() < 0.03:
                self.end(request_id)

    def add(self, num_prompt_tokens: int) -> None:
        request_id = f"request {self.count}"
        self.count += 1
        prompt = [(3 * self.count + index) % VOCAB_SIZE for index in range(num_prompt_tokens)]
        self.runner.add(request_id, prompt, last=self.count % VOCAB_SIZE)
        self.tokens[request_id] = [*prompt, self.count % VOCAB_SIZE]
        slot = self.runner.req_states.req_id_to_index[request_id]
        self.runner.set_delta(slot, num_prompt_tokens)
        self.num_prompt_tokens[request_id] = num_prompt_tokens
        self.blocks[request_id] = self.runner.new_blocks(slot, num_prompt_tokens)

    def end(self, request_id: str) -> None:
        del self.tokens[request_id]
        self.finished.add(request_id)

    def arrive(self, num_prompt_tokens: int, num_cached: int, *pictures: tuple[int, int, int]) -> str:
        """Let a request come whose prompt the next steps compute, after ``num_cached`` of its tokens.

        Args:
            pictures: name, first token and number of tokens of each.
        """
        request_id = f"request {self.count}"
        self.count += 1
        self.num_prompt_tokens[request_id] = num_prompt_tokens
        self.pictures[request_id] = [
            MultiModalFeatureSpec(None, "image", str(name), PlaceholderRange(first, length))
            for name, first, length in pictures
        ]
        self.tokens[request_id] = [
            (5 * self.count + index) % VOCAB_SIZE for index in range(num_prompt_tokens)
        ]
        self.blocks[request_id] = self.runner.new_blocks(self.count, num_prompt_tokens)
        self.computed[request_id] = num_cached
        return request_id

    def mixed_step(self, counts: dict[str, int]) -> SchedulerOutput:
        """Return a step of decodes, and of ``counts`` tokens of prompts that are not over."""
        prompts = {each: count for each, count in counts.items() if each in self.computed}
        left = {each: tokens for each, tokens in self.tokens.items() if each not in self.computed}
        waiting, self.tokens = self.tokens, left
        output, self.tokens = self.step(), waiting
        cached, known = output.scheduled_cached_reqs, self.runner.req_states.req_id_to_index
        for request_id, count in prompts.items():
            output.num_scheduled_tokens[request_id] = count
            output.total_num_scheduled_tokens += count
            self._schedule_pictures(output, request_id, self.computed[request_id], count)
            if request_id in known:
                cached.req_ids.append(request_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(self.computed[request_id])
                cached.num_output_tokens.append(0)
                continue
            new = SimpleNamespace(
                req_id=request_id,
                prefill_token_ids=list(self.tokens[request_id]),
                num_computed_tokens=self.computed[request_id],
                block_ids=self.blocks[request_id],
                mm_features=self.pictures[request_id],
                sampling_params=SamplingParams(temperature=0.0),
                lora_request=self.adapter_of.get(request_id),
            )
            output.scheduled_new_reqs.append(new)  # type: ignore[arg-type]
        return output

    def _schedule_pictures(self, output: SchedulerOutput, request_id: str, start: int, count: int) -> None:
        """Let pictures be encoded that are not, and of which a step computes tokens."""
        scheduled = output.scheduled_encoder_inputs
        known = {*self.runner.encoder_cache.encoder_outputs} if self.runner.encoder_cache else set()
        known |= {self.pictures[each][index].identifier for each in scheduled for index in scheduled[each]}
        for index, picture in enumerate(self.pictures[request_id]):
            first, length = picture.mm_position.offset, picture.mm_position.length
            if first < start + count and start < first + length and picture.identifier not in known:
                scheduled.setdefault(request_id, []).append(index)
                known.add(picture.identifier)

    def expect_mixed(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Return the next token of each request of a step, none of those whose prompt goes on; append it."""
        told = {}
        for request_id, count in output.num_scheduled_tokens.items():
            if request_id in self.computed:
                self.computed[request_id] += count
                if self.computed[request_id] < len(self.tokens[request_id]):
                    told[request_id] = list[int]()
                    continue
                del self.computed[request_id]
            told[request_id] = [self._next(request_id)]
        return told

    def step(self) -> SchedulerOutput:
        """Return the scheduler's output of a step for all, with a block where one is needed."""
        ids, new_blocks = list(self.tokens), []
        computed = [len(self.tokens[each]) - 1 for each in ids]
        for request_id, num_computed in zip(ids, computed, strict=True):
            new = tuple(
                [
                    blocks[-1]
                    if window is not None and window < 0
                    else 1000 + 7 * len(blocks) + self.count + index
                ]
                if num_computed >= len(blocks) * size
                else []
                for index, (blocks, (size, window, _)) in enumerate(
                    zip(self.blocks[request_id], self.runner.groups, strict=True)
                )
            )
            for blocks, more in zip(self.blocks[request_id], new, strict=True):
                blocks.extend(more)
            new_blocks.append(new if any(new) else None)
        finished, self.finished = self.finished, set()
        return make_output(ids, computed, new_blocks, finished)

    def expect(self) -> list[int]:
        """Return the next token of each, and append it."""
        return [self._next(request_id) for request_id in self.tokens]

    def _read(self, request_id: str, token: int, position: int) -> int:
        """Return what ``Runner.read_tokens`` must of a token."""
        if self.runner.model_state.rope_state is None:
            return token + 3 * position
        embed, num_prompt_tokens = 2 * token + 1, self.num_prompt_tokens[request_id]
        for picture in self.pictures.get(request_id, ()):
            place = position - picture.mm_position.offset
            if 0 <= place < picture.mm_position.length:
                embed = int(features_of(picture)[place])
        positions = torch.full((3, 1), position + delta_of(num_prompt_tokens))
        if position < num_prompt_tokens:
            positions = positions_in_prompt(torch.tensor([position]))
        return embed + int((POSITION_WEIGHTS * positions[:, 0]).sum())

    def _next(self, request_id: str) -> int:
        tokens = self.tokens[request_id]
        position = len(tokens) - 1
        hidden = self._read(request_id, tokens[-1], position)
        for index, (size, window, num_builders) in enumerate(self.runner.groups):
            blocks = self.blocks[request_id][index]
            if window is not None and window < 0:
                hidden += sum(5 + nth for nth in range(num_builders)) * state_after(tokens)
                continue
            first = 0 if window is None else max(position + 1 - window, 0) // size
            last = position // size
            read = sum((column + 1) * blocks[column] for column in range(first, last + 1))
            hidden += sum(5 + nth for nth in range(num_builders)) * (position + 1)
            hidden += (7 + index) * read + (11 + index) * (blocks[last] * size + position % size)
        if request_id in self.adapter_of:
            hidden += (13 + 17) * int(self.adapter_of[request_id].lora_path)
        tokens.append(hidden % VOCAB_SIZE)
        return tokens[-1]


def state_after(tokens: list[int]) -> int:
    """Return the state after these tokens."""
    return functools.reduce(next_state, tokens, 0)


def make_output(
    ids: list[str], computed: list[int], new_blocks: list[Any] | None = None, finished: set[str] | None = None
) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = finished or set()
    output.num_scheduled_tokens = dict.fromkeys(ids, 1)
    output.total_num_scheduled_tokens = len(ids)
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=ids,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=new_blocks or [None] * len(ids),
        num_computed_tokens=computed,
        num_output_tokens=[1] * len(ids),
    )
    return output
