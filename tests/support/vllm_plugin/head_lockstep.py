"""Steps with the drafts of a head against vLLM's own, its kernels interpreted: a process of its own.

Two runners take the same steps: one replays those that a coin chooses, the other none. The head is vLLM's speculator
but for its layers, which keep what they have read in a cache of K/V, and read it again by their attention metadata.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.triton_utils import HAS_TRITON  # noqa: E402
from vllm.v1.worker.gpu import input_batch  # noqa: E402
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import gather_draft_sampled  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (  # noqa: E402
    TargetDependentARSpeculator,
)

from rose_backend.draft_depth import draft_depths  # noqa: E402
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder  # noqa: E402
from rose_backend.vllm_plugin.step_graph.draft_steps import AdaptiveSteps  # noqa: E402
from rose_backend.vllm_plugin.step_graph.head_steps import HeadSteps, PlainHeadSteps, StoringHeadSteps  # noqa: E402
from tests.support.vllm_plugin.draft_runner import DraftRequests, DraftRunner  # noqa: E402
from tests.support.vllm_plugin.steady_runner import (  # noqa: E402
    GROUPS,
    MAX_LEN,
    MAX_REQS,
    SIZES,
    VOCAB_SIZE,
    Desc,
)

LIKELY = 2
"""Tokens that are much more likely than others where requests are drawn, so that drafts are often right."""
NUM_AUXILIARY = 3


class Head(TargetDependentARSpeculator):  # type: ignore[misc]
    """A speculator of vLLM's with layers that say what they have read.

    Args:
        share_right: of the drafts that follow on a request's own text.
        method: in vLLM; the head of ``eagle3`` reads auxiliary hidden states.
        max_model_len: of the head, whose passes stay before it.
    """

    def __init__(self, runner: HeadRunner, share_right: float, method: str, max_model_len: int) -> None:
        self.runner, self.share_right, self.device = runner, share_right, runner.device
        self.method = method
        self.num_speculative_steps, self.max_num_reqs = runner.num_drafts, MAX_REQS
        self.max_model_len, self.dp_size, self.dp_rank = max_model_len, 1, 0
        self.pcp_manager = self.eplb_state = self.draft_logits = self.acceptance_estimator = None
        self.use_local_argmax_reduction, self.supports_decode_metadata_update = False, True
        self.model = SimpleNamespace(
            combine_hidden_states=self._combine, compute_logits=self._logits, store=self._store
        )
        self.draft_attn_layer_names = {"head"}
        size = len(runner.input_buffers.input_ids)
        self.hidden_states = torch.zeros(size, 1, dtype=torch.float64)
        self.temperature = torch.zeros(MAX_REQS)
        self.seeds, self.idx_mapping, self.last_token_indices, self.sample_src_positions = (
            torch.zeros(MAX_REQS, dtype=torch.int64) for _ in range(4)
        )
        self.current_draft_step = torch.tensor(0)
        self.draft_tokens = torch.zeros(MAX_REQS, self.num_speculative_steps, dtype=torch.int64)
        self.input_buffers = SimpleNamespace(
            **{name: torch.zeros_like(tensor) for name, tensor in vars(runner.input_buffers).items()}
        )
        self.block_tables = runner.block_tables
        # Of each place in the cache, a token and what the layers below made of it.
        self.tokens = torch.full((1000 * runner.groups[0][0],), -1, dtype=torch.int64)
        self.values = torch.zeros(len(self.tokens), dtype=torch.int64)
        self.computed_tokens = torch.full((MAX_REQS,), -1, dtype=torch.int32)
        builder = object.__new__(RoseAttentionMetadataBuilder)
        group = SimpleNamespace(
            update_draft_decode_metadata=builder.update_draft_decode_metadata,
            map_to_kernel_block_table=lambda table: None,
            kv_cache_group_id=0,
        )
        self.attn_groups = [[group]]
        query_lens = [depth + 1 for depth in draft_depths(runner.num_drafts)]
        self.prefill_cudagraph_manager = HeadGraphs(self, *query_lens, is_first=True)
        self.decode_cudagraph_manager = HeadGraphs(self, 1)
        # Of the first pass.
        self.num_rows = 0
        self.texts: dict[tuple[int, ...], list[int]] = {}

    def _combine(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.shape[1] == NUM_AUXILIARY
        return hidden @ torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() % VOCAB_SIZE, VOCAB_SIZE).float()

    def run_graph(self, desc: Desc, is_first: bool) -> None:
        """Do what vLLM captures of the first pass, or of all later ones."""
        rows, num_tokens, nothing = desc.num_reqs, desc.num_tokens, CUDAGraphMode.NONE
        if is_first:
            self.num_rows = rows
            self._prefill(rows, num_tokens, {}, None, None, nothing)
            return
        of_rows = slice(rows)
        metadata: Any = SimpleNamespace(
            max_decode_query_len=1,
            query_start_loc=self.input_buffers.query_start_loc[: rows + 1],
            seq_lens=self.input_buffers.seq_lens[of_rows],
            decode_computed_tokens=self.computed_tokens[of_rows],
            steps={},
        )
        assert isinstance(desc, LaterPasses)
        # What the others leave is not this graph's.
        self.draft_tokens[:, desc.num_drafts :] = -7
        self._generate_fused_drafts(rows, num_tokens, metadata, None, None, nothing, desc.num_drafts)

    def _run_model(
        self, num_tokens: int, attn_metadata: Any, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        runner, buffers = self.runner, self.input_buffers
        slots = self.block_tables.slot_mappings[0, :num_tokens].tolist()
        ids, hidden = buffers.input_ids[:num_tokens].tolist(), self.hidden_states[:num_tokens, 0].tolist()
        for slot, token, value in zip(slots, ids, hidden, strict=True):
            if slot >= 0:
                self.tokens[slot], self.values[slot] = token, int(value)
        if attn_metadata:
            starts, computed = list(range(num_tokens + 1)), self.computed_tokens
        else:
            # The first pass reads what the target's layers do.
            starts = runner.input_buffers.query_start_loc[: self.num_rows + 1].tolist()
            computed = runner.attn_groups[0][0].get_metadata_builder().computed_tokens[0]
        last, fed_back = torch.zeros(2, num_tokens, 1, dtype=torch.float64).unbind(0)
        for row in range(len(starts) - 1):
            for token in range(starts[row], starts[row + 1]):
                if int(computed[row]) >= 0:
                    length = int(computed[row]) + token - starts[row] + 1
                    last[token], fed_back[token] = self._read(row, length)
        return last, fed_back

    def _store(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for slot, token, value in zip(slots.tolist(), token_ids.tolist(), hidden[:, 0].tolist(), strict=True):
            if slot >= 0:
                self.tokens[slot], self.values[slot] = token, int(value)

    def _read(self, row: int, length: int) -> tuple[int, int]:
        """Return the draft after what a row's first places have, and what the next pass is given."""
        size = self.runner.groups[0][0]
        places = torch.arange(length)
        blocks = self.block_tables.input_block_tables[0][row].long()
        read = blocks[places // size] * size + places % size
        known, values = tuple(self.tokens[read].tolist()), self.values[read].tolist()
        rng = random.Random(f"{known} {values}")
        next_value = rng.randrange(1000)
        if self.runner.is_drawn:
            return rng.randrange(LIKELY), next_value
        text = next((text for start, text in self.texts.items() if start == known[: len(start)]), None)
        # A place has the token after its own.
        if text is None or list(known) != text[1 : length + 1]:
            return rng.randrange(VOCAB_SIZE), next_value
        right = [*text, 0][length + 1]
        error = 0 if rng.random() < self.share_right else rng.randrange(1, VOCAB_SIZE)
        return (right + error) % VOCAB_SIZE, next_value

    def remember(self, request_id: str, text: list[int], num_prompt_tokens: int, blocks: list[int]) -> None:
        """Have passed a prompt, whose last token's successor is known."""
        size = self.runner.groups[0][0]
        self.texts[tuple(text[1 : num_prompt_tokens + 1])] = text
        for place in range(num_prompt_tokens):
            slot = blocks[place // size] * size + place % size
            self.tokens[slot], self.values[slot] = text[place + 1], place


@dataclass(frozen=True)
class LaterPasses(Desc):
    """Of all passes after the first that so many drafts need."""

    num_drafts: int = 0


class EagleHead(Head, EagleSpeculator):  # type: ignore[misc]
    """Of either kind."""


class MtpModule(Head, MTPSpeculator):  # type: ignore[misc]
    """Reads the model's own hidden states."""


class HeadGraphs:
    """Graphs of the head's passes, of as many tokens in each row."""

    def __init__(self, head: Head, *query_lens: int, is_first: bool = False) -> None:
        self._head, self._query_lens, self._is_first = head, query_lens, is_first

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **options: Any
    ) -> Desc:
        assert uniform_token_count in self._query_lens
        size = next(size for size in SIZES if size * uniform_token_count >= num_tokens)
        return Desc(size * uniform_token_count, uniform_token_count=uniform_token_count)

    def specialize_spec_tokens(self, desc: Desc, num_drafts: int) -> Desc:
        return LaterPasses(**vars(desc), num_drafts=num_drafts)

    def run_fullgraph(self, desc: Desc) -> None:
        self._head.run_graph(desc, self._is_first)


class HeadRunner(DraftRunner):
    """Requests with drafts of a head. ``is_drawn``: they follow no text that is known before."""

    def __init__(
        self,
        num_drafts: int,
        groups: tuple[tuple[int, int | None, int], ...],
        *,
        is_drawn: bool,
        seed: int,
        **of_head: Any,
    ) -> None:
        super().__init__(num_drafts, groups)
        self.is_drawn = is_drawn
        self.block_tables.cp_size = 1  # type: ignore[attr-defined]
        self.block_tables.compute_slot_mappings = self._compute_slots  # type: ignore[attr-defined]
        self.req_states.next_prefill_tokens = torch.zeros(1, MAX_REQS, dtype=torch.int32)
        self.speculator: Any = (MtpModule if of_head["method"] == "mtp" else EagleHead)(self, **of_head)
        # The head's layer is in the first one.
        names = [["model"] for _ in groups]
        names[0] = ["model", "head"]
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=each) for each in names]
        )
        manager, run = self.cudagraph_manager, self.cudagraph_manager.run_fullgraph
        manager.aux_hidden_states = []  # type: ignore[attr-defined]
        if self.speculator.method == "eagle3":
            manager.aux_hidden_states = [torch.zeros(MAX_LEN, 1, dtype=torch.float64) for _ in range(3)]  # type: ignore[attr-defined]

        def run_fullgraph(desc: Desc) -> None:
            run(desc)
            for index, states in enumerate(manager.aux_hidden_states):  # type: ignore[attr-defined]
                states.copy_(manager.hidden_states % (7 + index))

        manager.run_fullgraph = run_fullgraph  # type: ignore[method-assign]
        if is_drawn:
            table = torch.randn(4096, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
            table[:, :LIKELY] += 6
            self.model.compute_logits = lambda hidden: table[hidden[:, 0].long() % 4096]

    def _compute_slots(
        self, slots: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, num_tokens: int
    ) -> None:
        """As vLLM's ``BlockTables.compute_slot_mappings``."""
        tables, mappings = self.block_tables, self.block_tables.slot_mappings
        mappings[:, int(starts[len(slots)]) :] = -1
        for index, size in enumerate(tables.block_sizes):
            for row, slot in enumerate(slots.tolist()):
                for token in range(int(starts[row]), int(starts[row + 1])):
                    column, offset = divmod(int(positions[token]), size)
                    block = int(tables.block_tables[index].gpu[slot, column]) if slot >= 0 else 0
                    mappings[index, token] = block * size + offset if slot >= 0 else -1

    def own_step(self, output: Any) -> list[list[int]]:  # type: ignore[override]
        """Run a step as vLLM does; return its tokens."""
        self.finish_requests(output)
        self.update_requests(output)
        self.block_tables.apply_staged_writes()
        ids, states, inputs = output.scheduled_cached_reqs.req_ids, self.req_states, self.input_buffers
        num_rows, query_len = len(ids), output.num_scheduled_tokens[output.scheduled_cached_reqs.req_ids[0]]
        num_tokens = num_rows * query_len
        slots = torch.tensor([states.req_id_to_index[each] for each in ids])
        desc = self.cudagraph_manager.dispatch(num_rows, num_tokens, query_len)
        starts = inputs.query_start_loc
        starts.copy_(torch.arange(len(starts)).clamp(max=num_rows) * query_len)
        inputs.is_padding[: desc.num_tokens] = torch.arange(desc.num_tokens) >= num_tokens
        input_batch.prepare_pos_seq_lens(
            slots, starts, states.num_computed_tokens.gpu, inputs.positions, inputs.seq_lens
        )
        logit_starts = starts[: num_rows + 1].clone()
        indices = input_batch.combine_sampled_and_draft_tokens(
            *(inputs.input_ids, slots, states.last_sampled_tokens, starts, inputs.seq_lens),
            *(states.prefill_len.gpu, states.draft_tokens, logit_starts),
            num_tokens,
        )
        self._prepare_attention(slots, desc)
        self.cudagraph_manager.run_fullgraph(desc)
        sample = self._sample if query_len > 1 else self._sample_one
        sampled, num_sampled, num_rejected = sample(slots, indices, logit_starts)
        input_batch.post_update(
            *(slots, states.num_computed_tokens.gpu, states.last_sampled_tokens),
            self.sampler.penalties_state.output_bin_counts,
            *(sampled, num_sampled, num_rejected, starts, states.all_token_ids.gpu, states.total_len.gpu),
        )
        num_next = output.num_spec_tokens_to_schedule
        states.draft_tokens[slots] = self._let_head_propose(slots, desc, num_sampled, num_rejected, num_next)
        return [row[:count] for row, count in zip(sampled.tolist(), num_sampled.tolist(), strict=True)]

    def _prepare_attention(self, slots: torch.Tensor, desc: Desc) -> None:
        tables, inputs, num_rows = self.block_tables, self.input_buffers, len(slots)
        for index, of_group in enumerate(tables.input_block_tables):
            of_group[num_rows : desc.num_reqs] = 0
            for row, slot in enumerate(slots.tolist()):
                count = int(tables.num_blocks.np[index, slot])
                of_group[row, :count] = tables.block_tables[index].gpu[slot, :count]
        self._compute_slots(slots, inputs.query_start_loc, inputs.positions, desc.num_tokens)
        query_lens = inputs.query_start_loc.diff()
        computed = torch.where(query_lens > 0, inputs.seq_lens - query_lens, -1)
        for group in (group for of_group in self.attn_groups for group in of_group):
            group.get_metadata_builder().computed_tokens[0] = computed
            group.get_metadata_builder().computed_tokens[1] = -1

    def _sample(
        self, slots: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs, of, prefill_lens = (
            self.input_buffers,
            self.sampler.sampling_states,
            self.req_states.prefill_len.gpu,
        )
        slot_of_logit, places = input_batch.expand_idx_mapping(
            slots, len(indices), starts, self.decode_query_len
        )
        drafts, positions = gather_draft_sampled(
            *(inputs.input_ids, inputs.positions, indices, slot_of_logit, places, prefill_lens)
        )
        logits = self.model.compute_logits(self.cudagraph_manager.hidden_states[indices])
        temperature, seeds = (torch.from_numpy(each.np.copy()) for each in (of.temperature, of.seeds))
        if self.is_drawn:
            logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
            apply_temperature(logits, slot_of_logit, temperature)
        sampled, num_sampled = rejection_sample(
            *(logits, None, drafts, starts, positions, slots, slot_of_logit, places, temperature, seeds),
            self.num_drafts,
            self.rejection_sampler.synthetic_conditional_rates,
        )
        num_sampled, num_rejected = input_batch.get_num_sampled_and_rejected(
            num_sampled, inputs.seq_lens, starts, slots, prefill_lens
        )
        return sampled, num_sampled, num_rejected

    def _sample_one(
        self, slots: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sample a step without drafts, whose requests are greedy."""
        logits = self.model.compute_logits(self.cudagraph_manager.hidden_states[indices])
        ones = torch.ones(len(slots), dtype=torch.int32)
        return logits.argmax(dim=-1)[:, None], ones, torch.zeros_like(ones)

    def _let_head_propose(
        self,
        slots: torch.Tensor,
        desc: Desc,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        num_next: int,
    ) -> torch.Tensor:
        inputs, states, manager = self.input_buffers, self.req_states, self.cudagraph_manager
        of, num_rows, num_tokens = self.sampler.sampling_states, len(slots), desc.num_tokens
        query_len = desc.uniform_token_count
        assert query_len is not None
        batch: Any = SimpleNamespace(
            num_reqs=num_rows,
            num_tokens=num_rows * query_len,
            num_tokens_after_padding=num_tokens,
            num_scheduled_tokens=np.full(num_rows, query_len),
            seq_lens_cpu_upper_bound=inputs.seq_lens[:num_rows],
            idx_mapping=slots,
            input_ids=inputs.input_ids[:num_tokens],
            positions=inputs.positions[:num_tokens],
            query_start_loc=inputs.query_start_loc[: desc.num_reqs + 1],
            seq_lens=inputs.seq_lens[: desc.num_reqs],
            decode_graph_eligible=True,
        )
        drafts: torch.Tensor = self.speculator.propose(
            *(batch, {}, {}, manager.hidden_states[:num_tokens]),
            [each[:num_tokens] for each in manager.aux_hidden_states],  # type: ignore[attr-defined]
            *(num_sampled, num_rejected, states.last_sampled_tokens, states.next_prefill_tokens),
            *(torch.from_numpy(of.temperature.np), torch.from_numpy(of.seeds.np)),
            num_speculative_tokens=num_next,
        )
        drafts[:, num_next:] = -1
        return drafts


class HeadRequests(DraftRequests):
    """Requests whose drafts a head makes."""

    def __init__(self, runner: HeadRunner, share_right: float, seed: int) -> None:
        super().__init__(runner, share_right, seed)
        self.num_lookahead_tokens = runner.num_drafts

    def add(self, num_prompt_tokens: int) -> None:
        super().add(num_prompt_tokens)
        request_id, runner = self.running[-1], self.runner
        text = self.texts[request_id]
        runner.speculator.remember(request_id, text, num_prompt_tokens, self.all_blocks[request_id][0])
        states, of = runner.req_states, runner.sampler.sampling_states
        slot = states.req_id_to_index[request_id]
        if runner.is_drawn:  # type: ignore[attr-defined]
            rng = np.random.default_rng(self.count)
            of.seeds.np[slot] = rng.integers(-(2**62), 2**62)
            of.temperature.np[slot] = rng.choice([0, 1, 0.5, 1.3])
            states.draft_tokens[slot] = torch.from_numpy(rng.integers(0, LIKELY, runner.num_drafts))

    def hear(self, ids: Any, told: Any, num_drafts: int | None = None) -> None:
        super().hear(ids, told, num_drafts)
        for request_id, tokens in zip(ids, told, strict=True):
            self.num_known[request_id] += len(tokens)


def state_of(runner: HeadRunner) -> dict[str, torch.Tensor]:
    """Return what a step changes, of all slots that have a request, and of the head's cache what has been computed."""
    states, head, size = runner.req_states, runner.speculator, runner.groups[0][0]
    slots = sorted(states.req_id_to_index.values())
    cached = []
    for slot in slots:
        # Behind them is what rejected drafts have left, and steps of others before.
        places = torch.arange(int(states.num_computed_tokens.gpu[slot]))
        blocks = runner.block_tables.block_tables[0].gpu[slot].long()
        cached.append(blocks[places // size] * size + places % size)
    in_cache = torch.cat(cached) if cached else torch.tensor([], dtype=torch.int64)
    return {
        "computed": states.num_computed_tokens.gpu[slots],
        "total": states.total_len.gpu[slots],
        "token ids": states.all_token_ids.gpu[slots],
        "last": states.last_sampled_tokens[slots],
        "drafts": states.draft_tokens[slots],
        "counts": runner.sampler.penalties_state.output_bin_counts[slots],
        "tokens in the cache": head.tokens[in_cache],
        "values in the cache": head.values[in_cache],
    }


def compare(
    num_drafts: int,
    groups: str,
    seed: int,
    *,
    num_steps: int = 25,
    share_right: float = 0.8,
    share_replayed: float = 0.6,
    is_drawn: bool = False,
    method: str = "eagle3",
    synthetic: bool = False,
    max_model_len: int = MAX_LEN,
    share_turned: float = 0.0,
    stores: bool = False,
) -> list[int]:
    """Take steps with requests that come and go, a scheduler that is a step ahead; return how many tokens rows got.

    Args:
        share_turned: of the steps, after which another number of drafts is made; if none, all have them all.
        stores: whether steps without drafts store what the head keeps without a pass.
    """
    of_head = {"share_right": share_right, "method": method, "max_model_len": max_model_len}
    runners = [
        HeadRunner(num_drafts, GROUPS[groups], is_drawn=is_drawn, seed=seed, **of_head) for _ in range(2)
    ]
    if synthetic:
        for runner in runners:
            runner.rejection_sampler.synthetic_conditional_rates = torch.full((num_drafts,), 0.7)
    plain = StoringHeadSteps if stores else PlainHeadSteps
    depths, choose = draft_depths(num_drafts) if share_turned else (num_drafts,), random.Random(seed)
    by_depth = {depth: HeadSteps(runners[0], depth) if depth else plain(runners[0]) for depth in depths}
    steps = AdaptiveSteps(by_depth) if share_turned else by_depth[num_drafts]
    now, num_replayed = num_drafts, dict.fromkeys(depths, 0)
    both = [HeadRequests(runner, share_right, seed) for runner in runners]
    counts: list[int] = []
    ahead: list[tuple[HeadRequests, list[str], list[list[int]], int]] = []
    for _ in range(num_steps):
        for request_id in list(both[0].running):
            if not both[0].has_room(request_id) or choose.random() < 0.03:
                for requests in both:
                    requests.end(request_id)
        if len(both[0].running) < MAX_REQS - len(both[0].finished) and choose.random() < 0.5:
            length = choose.randint(2, 20)
            for requests in both:
                requests.add(length)
        if not both[0].running:
            continue
        told = []
        is_replayed = choose.random() < share_replayed
        following = choose.choice(depths) if choose.random() < share_turned else now
        for requests, runner in zip(both, runners, strict=True):
            output = requests.step(now, following)
            if runner is runners[0] and is_replayed and following == now:
                assert steps.launch(output)
                num_replayed[now] += 1
                told.append(steps.take_output(None).get_output().sampled_token_ids)  # type: ignore[union-attr]
            else:
                if runner is runners[0] and following == now:
                    by_depth[now].disarm()
                elif runner is runners[0]:
                    assert not steps.launch(output)
                told.append(runner.own_step(output))
        assert told[0] == told[1]
        expected = state_of(runners[1])
        for name, tensor in state_of(runners[0]).items():
            # Nobody reads drafts of a step that makes none.
            if name == "drafts" and not following:
                continue
            assert torch.equal(tensor, expected[name]), name
        for requests, ids, tokens, of_step in ahead:
            requests.hear(ids, tokens, of_step)
        ahead = [(each, list(each.running), tokens, now) for each, tokens in zip(both, told, strict=True)]
        now = following
        counts += map(len, told[0])
        if not is_drawn and not synthetic:
            for request_id, tokens in zip(both[0].running, told[0], strict=True):
                slot = runners[0].req_states.req_id_to_index[request_id]
                length = int(runners[0].req_states.total_len.gpu[slot])
                assert both[0].texts[request_id][length - len(tokens) : length] == tokens
    assert not share_turned or min(num_replayed.values()) > num_steps // 20, num_replayed
    return counts


if __name__ == "__main__":
    assert HAS_TRITON
    torch.set_num_threads(1)
    print(json.dumps([compare(**case) for case in json.loads(sys.argv[1])]))
