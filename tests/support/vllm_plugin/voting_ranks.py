"""One of several data-parallel ranks in a process of its own, with vLLM's vote on each step."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import dp_utils, model_runner

from rose_backend.vllm_plugin.plugin_logger import STEPS
from rose_backend.vllm_plugin.step_graph import runner_hooks
from rose_backend.vllm_plugin.step_graph.steps import StepGraphs
from tests.support.patience import HANG_S
from tests.support.vllm_plugin.steady_runner import MAX_LEN, MAX_REQS, Requests, SamplingRunner

NUM_RANKS = 2
PROMPT_ROOM = 60
"""Tokens of a step; the largest graph takes fewer."""


@dataclass
class Course:
    """What one rank has done, step by step."""

    votes: list[Any] = field(default_factory=list)
    """What all ranks said together, in each collective."""
    layers: list[Any] = field(default_factory=list)
    """Mode, tokens and uniform count of what was run, dummy steps included."""
    kinds: Counter[str] = field(default_factory=Counter)


def run_rank(rank: int, store: str, seeds: list[int], num_steps: int) -> dict[tuple[int, bool], Course]:
    """Run the same steps as vLLM's and with Rose, in step with the other ranks; return both, by seed."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=HANG_S)
    dist.init_process_group("gloo", f"file://{store}", timeout, NUM_RANKS, rank)
    try:
        return {
            (seed, has_rose): Rank(rank, seed, has_rose=has_rose).run(num_steps)
            for seed in seeds
            for has_rose in (False, True)
        }
    finally:
        # If this one has failed, the others must not wait for it.
        dist.destroy_process_group()


class Rank:
    """A model runner and the scheduler's part, of one rank."""

    def __init__(self, rank: int, seed: int, *, has_rose: bool) -> None:
        self.choose = random.Random(NUM_RANKS * seed + rank)
        runner = self.runner = SamplingRunner()
        runner.dp_size, runner.dp_rank = NUM_RANKS, rank
        vars(runner).update(
            decode_query_len=1, use_pp=False, pcp_manager=None, adaptive_verification=None, ubatch_runner=None
        )
        runner.req_states.num_computed_prefill_tokens = np.zeros(MAX_REQS, np.int32)
        self.requests, self.expected = Requests(runner), dict[str, list[int]]()
        self.course, self.has_rose, self.is_idle = Course(), has_rose, False
        if has_rose:
            manager: Any = runner.cudagraph_manager
            manager.rose_step_graphs = StepGraphs(runner)
            manager.rose_graph_addresses = SimpleNamespace(may_differ=False)
        self.steps: StepGraphs | None = getattr(runner.cudagraph_manager, "rose_step_graphs", None)
        own = self._vllm_step
        self.execute = (
            runner_hooks.wrap_execute_model(lambda _, *args, **kwargs: own(*args, **kwargs))
            if has_rose
            else lambda _, *args, **kwargs: own(*args, **kwargs)
        )
        self._run_fullgraph = runner.cudagraph_manager.run_fullgraph
        runner.cudagraph_manager.run_fullgraph = self._replay  # type: ignore[method-assign]

    def run(self, num_steps: int) -> Course:
        group = SimpleNamespace(cpu_group=dist.group.WORLD, cpu_all_reduce_=self._all_reduce)
        with (
            patch.object(dp_utils, "get_dp_group", lambda: group),
            patch.object(dist, "all_reduce", self._all_reduce),
        ):
            for _ in range(num_steps):
                self._step()
        return self.course

    def _all_reduce(self, tensor: torch.Tensor, group: Any = None, *, reduce: Any = dist.all_reduce) -> None:
        reduce(tensor, group=group)
        self.course.votes.append(tensor.tolist())

    def _replay(self, desc: Any) -> None:
        self._run_fullgraph(desc)
        self._note_layers(desc)

    def _note_layers(self, desc: Any) -> None:
        self.course.layers.append((desc.cg_mode.name, desc.num_tokens, desc.uniform_token_count))

    def _step(self) -> None:
        """Run what vLLM's engine runs between two looks at what the other ranks have left."""
        output = self._schedule()
        if not (output.total_num_scheduled_tokens or output.finished_req_ids):
            self._dummy_step()
            return
        self.expected = self.requests.expect_mixed(output)
        replayed, of_vllm = self.course.layers.copy(), sum(STEPS.vllm.values())
        self.execute(self.runner, output)
        if not output.total_num_scheduled_tokens:
            self._dummy_step()
            return
        told = None if self.steps is None else self.steps.take_output(None)
        is_vllms = self.steps is None or sum(STEPS.vllm.values()) > of_vllm
        assert is_vllms == (told is None) and len(self.course.layers) == len(replayed) + 1
        if told is not None:
            got = told.get_output()
            assert dict(zip(got.req_ids, got.sampled_token_ids, strict=True)) == self.expected
            _, num_tokens, uniform = self.course.layers[-1]
            own = output.total_num_scheduled_tokens
            kind = "decodes" if uniform else "mixed"
            self.course.kinds[f"{kind}, more" if num_tokens >= 2 * own else kind] += 1
        self._check_states()

    def _schedule(self) -> SchedulerOutput:
        choose, requests = self.choose, self.requests
        if choose.random() < (0.2 if self.is_idle else 0.05):
            self.is_idle = not self.is_idle
        for request_id in list(requests.tokens):
            is_long = len(requests.tokens[request_id]) >= MAX_LEN - 1
            is_known = request_id in self.runner.req_states.req_id_to_index
            if is_long or (is_known and choose.random() < (0.4 if self.is_idle else 0.04)):
                requests.end(request_id)
                requests.computed.pop(request_id, None)
        has_room = len(requests.tokens) < MAX_REQS - len(requests.finished)
        if has_room and not self.is_idle and choose.random() < 0.25:
            num_tokens = choose.choice([1, 2, 7, 19, 55, 55])
            requests.arrive(num_tokens, choose.randrange(num_tokens))
        counts, room = {}, PROMPT_ROOM - len(requests.tokens)
        for request_id, computed in requests.computed.items():
            most = min(len(requests.tokens[request_id]) - computed, room)
            counts[request_id] = choose.choice([1, most, most])
            room -= counts[request_id]
        output = requests.mixed_step(counts)
        output.has_sync_kv_loads = choose.random() < 0.15
        return output

    def _vllm_step(self, output: SchedulerOutput, intermediate_tensors: Any = None) -> None:
        """Do what vLLM's step does up to its vote; tokens are right by definition, and rubbish is left behind."""
        runner, states, cached = self.runner, self.runner.req_states, output.scheduled_cached_reqs
        runner.finish_requests(output)
        runner.add_requests(output)
        runner.update_requests(output)
        runner.block_tables.apply_staged_writes()
        if not output.total_num_scheduled_tokens:
            return
        num_computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        num_computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, count in num_computed.items():
            slot = states.req_id_to_index[request_id]
            states.num_computed_prefill_tokens[slot] = min(count, states.prefill_len.np[slot])
        counts = output.num_scheduled_tokens
        batch, uniform = model_runner.GPUModelRunner.gather_batch_req_state(runner, output, False)  # type: ignore[arg-type]
        assert batch is not None
        votes = len(self.course.votes)
        desc = self._dispatch(
            len(counts), batch.num_tokens, uniform, None if batch.has_prefill else max(counts.values())
        )
        self.course.kinds["own vote" if len(self.course.votes) > votes else "handed on"] += 1
        self._note_layers(desc)
        for request_id, tokens in self.expected.items():
            slot = states.req_id_to_index[request_id]
            states.num_computed_tokens.gpu[slot] = num_computed[request_id] + counts[request_id]
            for token in tokens:
                states.all_token_ids.gpu[slot, states.total_len.gpu[slot]] = token
                states.total_len.gpu[slot] += 1
                states.last_sampled_tokens[slot] = token
        self._leave_rubbish()

    def _dispatch(
        self, num_reqs: int, num_tokens: int, uniform: int | None, max_query_len: int | None
    ) -> Any:
        """Ask as ``execute_model`` does."""
        runner = self.runner
        desc, sync = model_runner.dispatch_cg_and_sync_dp(
            runner.cudagraph_manager,  # type: ignore[arg-type]
            num_reqs,
            num_tokens,
            uniform,
            runner.dp_size,
            runner.dp_rank,
            max_query_len=max_query_len,
            need_eager=False,
            num_active_loras=0,
            parallel_config=runner.parallel_config,  # type: ignore[arg-type]
            allow_ubatching=False,
            uniform_decode=uniform == 1,
        )
        assert sync is not None and len(sync.num_tokens_across_dp) == NUM_RANKS
        return desc

    def _dummy_step(self) -> None:
        self.course.kinds["dummy"] += 1
        desc = self._dispatch(1, 1, 1, 1)
        self._note_layers(desc)
        if desc.cg_mode == CUDAGraphMode.FULL:
            self._leave_rubbish()

    def _leave_rubbish(self) -> None:
        runner = self.runner
        inputs, tables = runner.input_buffers, runner.block_tables
        inputs.query_start_loc[1:] = 5
        rubbish = [inputs.input_ids, inputs.positions, inputs.seq_lens, tables.slot_mappings]
        rubbish += [*tables.input_block_tables, runner.cudagraph_manager.hidden_states]
        rubbish += [
            each.get_metadata_builder().computed_tokens for groups in runner.attn_groups for each in groups
        ]
        for tensor in rubbish:
            tensor.fill_(3)
        inputs.is_padding.fill_(True)

    def _check_states(self) -> None:
        states, requests = self.runner.req_states, self.requests
        for request_id, tokens in requests.tokens.items():
            if (slot := states.req_id_to_index.get(request_id)) is None:
                continue
            assert states.all_token_ids.gpu[slot, : len(tokens)].tolist() == tokens
            assert int(states.total_len.gpu[slot]) == len(tokens)
            computed = requests.computed.get(request_id, len(tokens) - 1)
            assert int(states.num_computed_tokens.gpu[slot]) == computed
            assert request_id in requests.computed or int(states.last_sampled_tokens[slot]) == tokens[-1]
