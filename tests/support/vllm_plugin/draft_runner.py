"""The stand-in for vLLM's model runner with drafts, and a scheduler that runs a step ahead of the tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from rose_backend.draft_depth import draft_depths
from tests.support.vllm_plugin.steady_runner import (
    GROUPS,
    MAX_LEN,
    MAX_REQS,
    SIZES,
    VOCAB_SIZE,
    Desc,
    Requests,
    Runner,
    make_output,
)


class DraftRunner(Runner):
    """Greedy requests with drafts, which ``propose_for`` makes of a request's slot and number of tokens."""

    def __init__(
        self, num_drafts: int, groups: tuple[tuple[int, int | None, int], ...] = GROUPS["one group"]
    ) -> None:
        super().__init__(groups)
        self.speculative_config, self.num_drafts = SimpleNamespace(), num_drafts
        self.decode_query_len = num_drafts + 1
        self.dtype = torch.float32
        for depth in draft_depths(num_drafts)[1:]:
            descs = [Desc(size * (depth + 1), uniform_token_count=depth + 1) for size in SIZES]
            self.cudagraph_manager.graphs |= dict.fromkeys(descs)
        self.propose_for: Callable[[int, int], list[int]] = lambda slot, length: [0] * num_drafts
        self.req_states.draft_tokens = torch.zeros(MAX_REQS, num_drafts, dtype=torch.int64)
        states = self.sampler.sampling_states
        states.min_p = SimpleNamespace(np=np.zeros(MAX_REQS, np.float32))
        states.temperature = SimpleNamespace(np=np.zeros(MAX_REQS, np.float32))
        states.top_p = SimpleNamespace(np=np.ones(MAX_REQS, np.float32))
        states.top_k = SimpleNamespace(np=np.full(MAX_REQS, VOCAB_SIZE, np.int32))
        states.seeds = SimpleNamespace(np=np.zeros(MAX_REQS, np.int64))
        self.sampler.use_fp64_gumbel = False
        self.sampler.logits_processors = (
            SimpleNamespace(use_logit_bias=np.zeros(MAX_REQS, bool)),
            SimpleNamespace(use_penalty=np.zeros(MAX_REQS, bool)),
            SimpleNamespace(num_bad_words=SimpleNamespace(np=np.zeros(MAX_REQS, np.int32))),
        )
        self.sampler.thinking_budget_state = SimpleNamespace(
            enabled=True, use_thinking_budget=np.zeros(MAX_REQS, bool)
        )
        self.rejection_sampler = SimpleNamespace(
            synthetic_conditional_rates=None, use_block_verification=False
        )
        self.speculator = SimpleNamespace(propose=self._propose)
        self.told: list[tuple[list[str], int]] = []
        self.draft_tokens_handler = SimpleNamespace(
            set_draft_tokens=lambda batch, drafts: self.told.append((batch.req_ids, drafts.shape[1]))
        )

    def _propose(self, batch: Any, *args: Any) -> torch.Tensor:
        num_sampled, last = args[4], args[6]
        assert len(num_sampled) == batch.num_reqs and last is self.req_states.last_sampled_tokens
        lengths = self.req_states.total_len.gpu
        drafts = [self.propose_for(slot, int(lengths[slot])) for slot in batch.idx_mapping.tolist()]
        return torch.tensor(drafts)

    def own_step_with_drafts(
        self, output: SchedulerOutput, next_tokens: dict[str, list[int]]
    ) -> list[list[int]]:
        """Run a step as vLLM does; ``next_tokens`` are those of each request's text behind what it has."""
        self.finish_requests(output)
        self.update_requests(output)
        self.block_tables.apply_staged_writes()
        states, told = self.req_states, []
        for request_id in output.scheduled_cached_reqs.req_ids:
            slot = states.req_id_to_index[request_id]
            text, drafts = next_tokens[request_id], states.draft_tokens[slot].tolist()
            count, num_drafts = 1, len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            while count <= num_drafts and drafts[count - 1] == text[count - 1]:
                count += 1
            start = int(states.total_len.gpu[slot])
            states.all_token_ids.gpu[slot, start : start + count] = torch.tensor(text[:count])
            for token in text[:count]:
                self.sampler.penalties_state.output_bin_counts[slot, token] += 1
            states.total_len.gpu[slot] += count
            states.num_computed_tokens.gpu[slot] += count
            states.last_sampled_tokens[slot] = text[count - 1]
            states.draft_tokens[slot] = torch.tensor(self.propose_for(slot, start + count))
            states.draft_tokens[slot, output.num_spec_tokens_to_schedule :] = -1
            told.append(text[:count])
        return told


def rejection_sample(
    logits: torch.Tensor,
    draft_logits: None,
    draft_sampled: torch.Tensor,
    starts: torch.Tensor,
    pos: torch.Tensor,
    slots: torch.Tensor,
    slot_of_logit: torch.Tensor,
    places: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    num_drafts: int,
    rates: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's for greedy requests, by loops."""
    num_rows = len(starts) - 1
    # vLLM's kernels take no strides.
    given = (draft_sampled, starts, pos, slots, slot_of_logit, places, temperature, seeds)
    assert all(each.is_contiguous() for each in given)
    assert starts.tolist() == [row * (num_drafts + 1) for row in range(num_rows + 1)]
    assert places.tolist() == [*range(num_drafts + 1)] * num_rows
    assert slot_of_logit.tolist() == [slot for slot in slots.tolist() for _ in range(num_drafts + 1)]
    assert len(draft_sampled) == len(pos) == len(logits) == num_rows * (num_drafts + 1)
    assert not temperature[slots.long()].any() and len(temperature) == MAX_REQS + 1
    best = logits.argmax(dim=-1).view(num_rows, -1).tolist()
    drafts = draft_sampled.view(num_rows, -1)[:, 1:].tolist()
    tokens, counts = torch.full((num_rows, num_drafts + 1), -7), []
    for row in range(num_rows):
        count = 1
        while count <= num_drafts and drafts[row][count - 1] == best[row][count - 1]:
            count += 1
        tokens[row, :count] = torch.tensor(best[row][:count])
        counts.append(count)
    return tokens, torch.tensor(counts, dtype=torch.int32)


class DraftRequests:
    """Requests whose whole texts are known from the start, and what vLLM's scheduler makes of them.

    Args:
        share_right: of the drafts.

    Attributes:
        num_lookahead_tokens: behind a step's own, for which blocks are there, too.
    """

    num_lookahead_tokens = 0

    def __init__(self, runner: DraftRunner, share_right: float, seed: int) -> None:
        self.runner, self._share_right = runner, share_right
        self._rng = random.Random(seed)
        self.running: list[str] = []
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.num_known: dict[str, int] = {}
        """Tokens that have been computed and sampled; the device's, of which the scheduler hears later."""
        self.texts: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}
        self._optimistic: dict[str, int] = {}
        """Computed tokens as vLLM's scheduler counts them: as if all drafts in flight were right."""
        self.count = 0
        runner.propose_for = self._propose

    def add(self, num_prompt_tokens: int) -> None:
        requests = Requests(self.runner)
        requests.count = self.count
        requests.add(num_prompt_tokens)
        self.count += 1
        (request_id,) = requests.tokens
        slot = self.runner.req_states.req_id_to_index[request_id]
        self._blocks[request_id] = [len(of_group) for of_group in requests.blocks[request_id]]
        for index, (blocks, (size, _, _)) in enumerate(
            zip(requests.blocks[request_id], self.runner.groups, strict=True)
        ):
            blocks.extend(
                1000 * index + 100 * slot + column + 1 for column in range(len(blocks), MAX_LEN // size)
            )
        while len(requests.tokens[request_id]) < MAX_LEN:
            requests.expect()
        self.texts[request_id] = requests.tokens[request_id]
        self.num_known[request_id] = num_prompt_tokens + 1
        self._optimistic[request_id] = num_prompt_tokens
        self.all_blocks = {**getattr(self, "all_blocks", {}), request_id: requests.blocks[request_id]}
        self.running.append(request_id)
        self.runner.req_states.draft_tokens[slot] = torch.tensor(self._propose(slot, num_prompt_tokens + 1))

    def _propose(self, slot: int, length: int) -> list[int]:
        names = {index: name for name, index in self.runner.req_states.req_id_to_index.items()}
        if slot not in names or names[slot] not in self.texts:
            return [0] * self.runner.num_drafts
        # The same for a request and a length: rows of padding ask, too.
        rng = random.Random(f"{names[slot]} {length}")
        drafts = (self.texts[names[slot]] + [0] * self.runner.num_drafts)[
            length : length + self.runner.num_drafts
        ]
        return [
            each if rng.random() < self._share_right else (each + rng.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE
            for each in drafts
        ]

    def end(self, request_id: str) -> None:
        self.running.remove(request_id)
        self.finished.add(request_id)

    def has_room(self, request_id: str) -> bool:
        return self._optimistic[request_id] + 2 * self.runner.decode_query_len <= MAX_LEN

    def step(self, num_drafts: int | None = None, num_next: int | None = None) -> SchedulerOutput:
        """Return the scheduler's output of a step for all, which has ``num_drafts`` and makes ``num_next``; or all."""
        num_drafts = self.runner.num_drafts if num_drafts is None else num_drafts
        ids, query_len = list(self.running), num_drafts + 1
        computed, new_blocks = [self._optimistic[each] for each in ids], []
        for request_id, start in zip(ids, computed, strict=True):
            new = []
            for index, (size, _, _) in enumerate(self.runner.groups):
                num_tokens = start + query_len + self.num_lookahead_tokens
                have, need = self._blocks[request_id][index], -(-num_tokens // size)
                new.append(self.all_blocks[request_id][index][have:need])
                self._blocks[request_id][index] = max(have, need)
            new_blocks.append(tuple(new) if any(new) else None)
            self._optimistic[request_id] += query_len
        finished, self.finished = self.finished, set()
        output = make_output(ids, computed, new_blocks, finished)
        output.num_scheduled_tokens = dict.fromkeys(ids, query_len)
        output.total_num_scheduled_tokens = query_len * len(ids)
        output.scheduled_spec_decode_tokens = {each: [-1] * num_drafts for each in ids if num_drafts}
        output.num_spec_tokens_to_schedule = self.runner.num_drafts if num_next is None else num_next
        return output

    def expect(self, ids: Sequence[str], num_drafts: int | None = None) -> list[list[int]]:
        """Return each request's next tokens by its drafts, if any, which the step has now verified."""
        told = []
        for request_id in ids:
            start = self.num_known[request_id]
            drafts = self._propose(self.runner.req_states.req_id_to_index[request_id], start)[:num_drafts]
            text = self.texts[request_id]
            count = 1
            while count <= len(drafts) and drafts[count - 1] == text[start + count - 1]:
                count += 1
            self.num_known[request_id] += count
            told.append(text[start : start + count])
        return told

    def hear(self, ids: Sequence[str], told: Sequence[list[int]], num_drafts: int | None = None) -> None:
        """Take back the drafts that were not right."""
        query_len = self.runner.decode_query_len if num_drafts is None else num_drafts + 1
        for request_id, tokens in zip(ids, told, strict=True):
            self._optimistic[request_id] -= query_len - len(tokens)

    def next_tokens(self) -> dict[str, list[int]]:
        return {each: self.texts[each][self.num_known[each] :] for each in self.running}
