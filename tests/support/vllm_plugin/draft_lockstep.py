"""Steps with drafts against vLLM's own functions from the same states, its kernels interpreted: a process of its own.

vLLM's CPU build looks for a CPU backend of Triton when it is imported, and has no kernels without. Here it finds one.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm.triton_utils import HAS_TRITON  # noqa: E402
from vllm.v1.worker.gpu import input_batch  # noqa: E402
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import gather_draft_sampled  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample  # noqa: E402

from rose_backend.vllm_plugin.step_graph.draft_steps import DraftSteps  # noqa: E402
from tests.support.vllm_plugin.draft_runner import DraftRequests, DraftRunner  # noqa: E402
from tests.support.vllm_plugin.steady_runner import MAX_LEN, MAX_REQS, VOCAB_SIZE  # noqa: E402

LIKELY = 2
"""Tokens that are much more likely than others, so that drafts are often right."""


@dataclass
class State:
    """What a step changes of requests, by slot."""

    computed: torch.Tensor
    total: torch.Tensor
    token_ids: torch.Tensor
    last: torch.Tensor
    drafts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, runner: DraftRunner) -> State:
        """Return copies of a runner's."""
        states = runner.req_states
        tensors = (
            *(states.num_computed_tokens.gpu, states.total_len.gpu, states.all_token_ids.gpu),
            *(states.last_sampled_tokens, states.draft_tokens),
            runner.sampler.penalties_state.output_bin_counts,
        )
        return cls(*(tensor.clone() for tensor in tensors))


def make_lookup(runner: DraftRunner) -> Any:
    """Return a stand-in for vLLM's lookup, whose kernels the interpreter does not take."""

    def propose(batch: Any, *args: Any) -> torch.Tensor:
        num_sampled, last, state = args[4], args[6], runner.req_states
        assert len(num_sampled) == batch.num_reqs and (num_sampled > 0).all()
        return look_up(
            batch.idx_mapping, state.total_len.gpu, state.all_token_ids.gpu, last, runner.num_drafts
        )

    return SimpleNamespace(propose=propose)


def look_up(
    slots: torch.Tensor, total: torch.Tensor, token_ids: torch.Tensor, last: torch.Tensor, num_drafts: int
) -> torch.Tensor:
    """Return what has followed the last token before; the last token again where there is no more."""
    rows = []
    for slot in slots.tolist():
        known = token_ids[slot, : int(total[slot])].tolist()
        places = [place for place, token in enumerate(known[:-1]) if token == known[-1]]
        found = known[places[-1] + 1 :][:num_drafts] if places else []
        rows.append([*found, *[int(last[slot])] * (num_drafts - len(found))])
    return torch.tensor(rows)


def step_as_vllm(runner: DraftRunner, ids: list[str], state: State, draws: bool) -> list[list[int]]:
    """Move a state on by a step of these requests, whose layers have just been run; return their tokens."""
    states, of = runner.req_states, runner.sampler.sampling_states
    num_rows, query_len = len(ids), runner.decode_query_len
    slots = torch.tensor([states.req_id_to_index[each] for each in ids])
    starts = torch.arange(num_rows + 1, dtype=torch.int32) * query_len
    positions, seq_lens = torch.zeros(MAX_LEN, dtype=torch.int64), torch.zeros(MAX_REQS, dtype=torch.int32)
    input_ids, prefill_lens = torch.zeros(MAX_LEN, dtype=torch.int32), states.prefill_len.gpu
    input_batch.prepare_pos_seq_lens(slots, starts, state.computed, positions, seq_lens)
    indices = input_batch.combine_sampled_and_draft_tokens(
        *(input_ids, slots, state.last, starts, seq_lens, prefill_lens, state.drafts, starts),
        num_rows * query_len,
    )
    slot_of_logit, places = input_batch.expand_idx_mapping(slots, num_rows * query_len, starts, query_len)
    drafts, pos = gather_draft_sampled(input_ids, positions, indices, slot_of_logit, places, prefill_lens)
    logits = runner.model.compute_logits(runner.cudagraph_manager.hidden_states[indices])
    temperature, seeds = (torch.from_numpy(each.np.copy()) for each in (of.temperature, of.seeds))
    if draws:
        logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        apply_temperature(logits, slot_of_logit, temperature)
    rates, num_drafts = runner.rejection_sampler.synthetic_conditional_rates, runner.num_drafts
    sampled, num_sampled = rejection_sample(
        *(logits, None, drafts, starts, pos, slots, slot_of_logit, places, temperature, seeds, num_drafts),
        rates,
        use_block_verification=runner.rejection_sampler.use_block_verification,
    )
    num_sampled, num_rejected = input_batch.get_num_sampled_and_rejected(
        num_sampled, seq_lens, starts, slots, prefill_lens
    )
    input_batch.post_update(
        *(slots, state.computed, state.last, state.counts, sampled, num_sampled, num_rejected, starts),
        *(state.token_ids, state.total),
    )
    state.drafts[slots] = look_up(slots, state.total, state.token_ids, state.last, num_drafts)
    return [row[:count] for row, count in zip(sampled.tolist(), num_sampled.tolist(), strict=True)]


def compare(num_drafts: int, draws: bool, dtype: str, method: str, seed: int) -> list[int]:
    """Take some steps both ways; return how many tokens rows got."""
    runner, rng = DraftRunner(num_drafts), np.random.default_rng(seed)
    table = torch.randn(4096, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    table[:, :LIKELY] += 6
    # Ties.
    table.view(-1)[::7] = 1.5
    runner.model.compute_logits = lambda hidden: table[hidden[:, 0].long() % 4096].to(getattr(torch, dtype))
    rejection = runner.rejection_sampler
    rejection.use_block_verification = method == "block"
    if method == "synthetic":
        rejection.synthetic_conditional_rates = torch.full((num_drafts,), 0.7)
    requests, states, of = DraftRequests(runner, 0.5, seed), runner.req_states, runner.sampler.sampling_states
    for num_prompt_tokens in (3, 9, 14, 5, 11):
        requests.add(num_prompt_tokens)
    for slot in states.req_id_to_index.values():
        of.seeds.np[slot] = rng.integers(-(2**62), 2**62)
        of.temperature.np[slot] = rng.choice([0, 1, 0.5, 1.3]) if draws else 0
        states.all_token_ids.gpu[slot] %= LIKELY
        states.draft_tokens[slot] = torch.from_numpy(rng.integers(0, LIKELY, num_drafts))
    runner.speculator = make_lookup(runner)
    steps, counts = DraftSteps(runner, num_drafts), []
    for _ in range(4):
        ids, state = list(requests.running), State.of(runner)
        assert steps.launch(requests.step())
        told = steps.take_output(None).get_output().sampled_token_ids  # type: ignore[union-attr]
        assert told == step_as_vllm(runner, ids, state, draws)
        for name, tensor in vars(State.of(runner)).items():
            assert torch.equal(tensor, getattr(state, name)), name
        requests.hear(ids, told)
        counts += map(len, told)
    return counts


if __name__ == "__main__":
    assert HAS_TRITON
    torch.set_num_threads(1)
    print(json.dumps([compare(**case) for case in json.loads(sys.argv[1])]))
