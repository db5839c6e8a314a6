"""Steady steps over a small stand-in for vLLM's model runner: which steps are replayed, and what is left behind."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm.compilation import cudagraph_pool
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from rose_backend.errors import IntegrityError
from rose_backend.kernels.decode_step.ops import write_block_ids
from rose_backend.vllm_plugin import step_graph
from rose_backend.vllm_plugin.plugin_logger import STEPS
from rose_backend.vllm_plugin.sampler import ReplayedSampling
from rose_backend.vllm_plugin.step_graph import (
    FIELDS_OF_PROMPTS,
    NUM_BUFFERS,
    SteadySteps,
    why_step_is_not_steady,
)

MAX_REQS, MAX_LEN, VOCAB_SIZE, BLOCK_SIZE, WIDTH = 8, 64, 31, 4, 16
SIZES = (1, 2, 4, 8)
GROUPS: dict[str, tuple[tuple[int, int | None, int], ...]] = {
    "one group": ((BLOCK_SIZE, None, 1),),
    "one group, two shapes": ((BLOCK_SIZE, None, 2),),
    "windows": ((BLOCK_SIZE, None, 1), (BLOCK_SIZE, 9, 1), (BLOCK_SIZE, 9, 1)),
    "sizes, windows and shapes": ((2, 7, 2), (BLOCK_SIZE, None, 1), (8, 20, 3), (BLOCK_SIZE, 9, 1)),
}
"""Tokens per block, window and metadata builders of each KV cache group."""


@dataclasses.dataclass(frozen=True)
class Desc:
    num_tokens: int
    cg_mode: CUDAGraphMode = CUDAGraphMode.FULL
    uniform_token_count: int = 1


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
    """One decode graph for each size: hidden states that depend on every input of a row."""

    def __init__(self, runner: Runner) -> None:
        self.graphs = {Desc(size): None for size in SIZES}
        self.hidden_states = torch.zeros(SIZES[-1], 1, dtype=torch.float64)
        self._runner = runner

    def dispatch(self, num_reqs: int, *_: Any) -> Desc:
        return Desc(next(size for size in SIZES if size >= num_reqs))

    def run_fullgraph(self, desc: Desc) -> None:
        runner, rows = self._runner, desc.num_tokens
        tables, inputs = runner.block_tables, runner.input_buffers
        hidden = inputs.input_ids[:rows] + 3 * inputs.positions[:rows]
        for index, (block_size, window, _) in enumerate(runner.groups):
            for nth, group in enumerate(runner.attn_groups[index]):
                lengths = group.get_metadata_builder().decode_computed_tokens[:rows].long() + 1
                hidden += (5 + nth) * lengths
            table = tables.input_block_tables[index][:rows].long()
            columns = torch.arange(table.shape[1])[None]
            # Columns behind the sequence, and those that the window has passed, may hold anything.
            used = columns * block_size < lengths[:, None]
            if window is not None:
                used &= (columns + 1) * block_size > (lengths - window)[:, None]
            hidden += (7 + index) * (table * used * (columns + 1)).sum(1)
            hidden += (11 + index) * tables.slot_mappings[index, :rows]
        self.hidden_states[:rows, 0] = hidden


class Runner:
    """What the steps touch of vLLM's GPUModelRunner."""

    def __init__(self, groups: tuple[tuple[int, int | None, int], ...] = GROUPS["one group"]) -> None:
        self.device = torch.device("cpu")
        self.max_num_reqs, self.vocab_size = MAX_REQS, VOCAB_SIZE
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
        self.attn_groups = [[_group_with_builder() for _ in range(count)] for _, _, count in groups]
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            free=list(range(MAX_REQS)),
            prefill_len=SimpleNamespace(np=np.zeros(MAX_REQS, np.int32)),
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
        self.model = SimpleNamespace(compute_logits=self._logits, lm_head=torch.nn.Linear(1, 1))
        self.products: list[int] = []
        self.execute_model_state: Any = None
        self.cudagraph_manager = Manager(self)

    def _logprobs_dims(self, slots: Any) -> Any:
        most = int(self.sampler.sampling_states.num_logprobs[slots].max())
        return None if most < 0 else (most, 0)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.products.append(len(hidden))
        return torch.nn.functional.one_hot(hidden[:, 0].long() % VOCAB_SIZE, VOCAB_SIZE).float()

    def add(self, request_id: str, prompt: list[int], last: int) -> None:
        """Put a request in whose prompt has been computed, and whose first token is ``last``."""
        states, slot = self.req_states, self.req_states.free.pop()
        states.req_id_to_index[request_id] = slot
        states.prefill_len.np[slot] = len(prompt)
        states.num_computed_tokens.gpu[slot] = len(prompt)
        states.total_len.gpu[slot] = len(prompt) + 1
        states.all_token_ids.gpu[slot, : len(prompt) + 1] = torch.tensor([*prompt, last], dtype=torch.int32)
        states.last_sampled_tokens[slot] = last
        self.sampler.penalties_state.output_bin_counts[slot] = 0
        self.block_tables.append_block_ids(slot, self.new_blocks(slot, len(prompt)), overwrite=True)
        self.block_tables.apply_staged_writes()

    def new_blocks(self, slot: int, num_tokens: int) -> tuple[list[int], ...]:
        """Return the blocks of a prompt; the null block where a window has passed."""
        return tuple(
            [
                0
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

    def free_states(self, output: SchedulerOutput) -> None:
        pass

    add_requests = free_states

    def update_requests(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                slot = self.req_states.req_id_to_index[request_id]
                self.block_tables.append_block_ids(slot, block_ids, overwrite=False)

    def own_step(self, output: SchedulerOutput) -> list[int]:
        """Run a step of decodes as vLLM does, from its own counts of blocks; return the tokens."""
        self.finish_requests(output)
        self.update_requests(output)
        self.block_tables.apply_staged_writes()
        ids = output.scheduled_cached_reqs.req_ids
        slots = [self.req_states.req_id_to_index[each] for each in ids]
        desc = self.cudagraph_manager.dispatch(len(ids))
        states, inputs, rows = self.req_states, self.input_buffers, len(ids)
        computed = states.num_computed_tokens.gpu[slots]
        inputs.input_ids[:rows] = states.last_sampled_tokens[slots, 0].int()
        inputs.positions[:rows] = computed
        for index, (block_size, _, _) in enumerate(self.groups):
            self._prepare_group(index, block_size, slots, desc.num_tokens)
        self.cudagraph_manager.run_fullgraph(desc)
        tokens = self.model.compute_logits(self.cudagraph_manager.hidden_states[:rows]).argmax(-1)
        states.all_token_ids.gpu[slots, states.total_len.gpu[slots].long()] = tokens.int()
        states.last_sampled_tokens[slots, 0] = tokens
        states.total_len.gpu[slots] += 1
        states.num_computed_tokens.gpu[slots] += 1
        self.sampler.penalties_state.output_bin_counts[slots, tokens] += 1
        result: list[int] = tokens.tolist()
        return result

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


def _group_with_builder() -> SimpleNamespace:
    builder = SimpleNamespace(decode_computed_tokens=torch.full((MAX_REQS,), -1, dtype=torch.int32))
    return SimpleNamespace(get_metadata_builder=lambda: builder)


class Requests:
    """What the tokens of each request must be: one after the other, from the request's own state alone."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, tuple[list[int], ...]] = {}
        self.finished: set[str] = set()
        self.count = 0

    def add(self, num_prompt_tokens: int) -> None:
        request_id = f"request {self.count}"
        self.count += 1
        prompt = [(3 * self.count + index) % VOCAB_SIZE for index in range(num_prompt_tokens)]
        self.runner.add(request_id, prompt, last=self.count % VOCAB_SIZE)
        self.tokens[request_id] = [*prompt, self.count % VOCAB_SIZE]
        slot = self.runner.req_states.req_id_to_index[request_id]
        self.blocks[request_id] = self.runner.new_blocks(slot, num_prompt_tokens)

    def end(self, request_id: str) -> None:
        del self.tokens[request_id]
        self.finished.add(request_id)

    def step(self) -> SchedulerOutput:
        """Return the scheduler's output of a step for all, with a block where one is needed."""
        ids, new_blocks = list(self.tokens), []
        computed = [len(self.tokens[each]) - 1 for each in ids]
        for request_id, num_computed in zip(ids, computed, strict=True):
            new = tuple(
                [1000 + 7 * len(blocks) + self.count + index] if num_computed >= len(blocks) * size else []
                for index, (blocks, (size, _, _)) in enumerate(
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

    def _next(self, request_id: str) -> int:
        tokens = self.tokens[request_id]
        position = len(tokens) - 1
        hidden = tokens[-1] + 3 * position
        for index, (size, window, num_builders) in enumerate(self.runner.groups):
            blocks = self.blocks[request_id][index]
            first = 0 if window is None else max(position + 1 - window, 0) // size
            last = position // size
            read = sum((column + 1) * blocks[column] for column in range(first, last + 1))
            hidden += sum(5 + nth for nth in range(num_builders)) * (position + 1)
            hidden += (7 + index) * read + (11 + index) * (blocks[last] * size + position % size)
        tokens.append(hidden % VOCAB_SIZE)
        return tokens[-1]


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


def run(steps: SteadySteps, output: SchedulerOutput) -> list[int]:
    assert steps.launch(output), STEPS
    result = steps.take_output(None)
    assert result is not None and steps.take_output(None) is None
    told = result.get_output()
    assert told.req_ids == output.scheduled_cached_reqs.req_ids
    assert [told.req_id_to_index[each] for each in told.req_ids] == list(range(len(told.req_ids)))
    return [token for (token,) in told.sampled_token_ids]


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_requests_come_and_go(groups: tuple[tuple[int, int | None, int], ...]) -> None:
    runner = Runner(groups)
    steps, requests, choose = SteadySteps(runner), Requests(runner), random.Random(5)
    for _ in range(400):
        if len(requests.tokens) < MAX_REQS - len(requests.finished) and choose.random() < 0.3:
            requests.add(choose.randrange(1, 20))
        for request_id in list(requests.tokens):
            if len(requests.tokens[request_id]) >= MAX_LEN - 1 or choose.random() < 0.03:
                requests.end(request_id)
        if not requests.tokens:
            continue
        before = runner.req_states.last_sampled_tokens.clone()
        got, expected = run(steps, requests.step()), requests.expect()
        assert got == expected
        states = runner.req_states
        for request_id, tokens in requests.tokens.items():
            slot = states.req_id_to_index[request_id]
            assert states.all_token_ids.gpu[slot, : len(tokens)].tolist() == tokens
            assert (
                int(states.total_len.gpu[slot])
                == len(tokens)
                == int(states.num_computed_tokens.gpu[slot]) + 1
            )
            assert int(states.last_sampled_tokens[slot]) == tokens[-1]
        idle = [slot for slot in range(MAX_REQS) if slot not in states.req_id_to_index.values()]
        assert torch.equal(states.last_sampled_tokens[idle], before[idle])
    assert requests.count > 50


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_both_kinds_of_steps_alternate(groups: tuple[tuple[int, int | None, int], ...], seed: int) -> None:
    runner = Runner(groups)
    steps, requests, choose = SteadySteps(runner), Requests(runner), random.Random(seed)
    num_own = 0
    for _ in range(200):
        while len(requests.tokens) < MAX_REQS - len(requests.finished) and choose.random() < 0.3:
            requests.add(choose.randrange(1, 20))
        for request_id in list(requests.tokens):
            if len(requests.tokens[request_id]) >= MAX_LEN - 1 or choose.random() < 0.03:
                requests.end(request_id)
        if not requests.tokens:
            continue
        if choose.random() < 0.4:
            # As after a step that ``launch`` leaves to vLLM.
            steps._armed = None
            got, num_own = runner.own_step(requests.step()), num_own + 1
        else:
            got = run(steps, requests.step())
        assert got == requests.expect()
    assert 40 < num_own < 160
    for request_id, of_groups in requests.blocks.items():
        if request_id in requests.tokens:
            slot = runner.req_states.req_id_to_index[request_id]
            assert runner.block_tables.num_blocks.np[:, slot].tolist() == [*map(len, of_groups)]


def test_the_same_batch_is_not_taken_over_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, requests = SteadySteps(runner), Requests(runner)
    for _ in range(3):
        requests.add(5)
    calls: list[str] = []
    monkeypatch.setattr(runner, "update_requests", lambda output: calls.append("update"))
    for _ in range(4):
        assert run(steps, requests.step()) == requests.expect()
    assert calls == ["update"]
    requests.end("request 1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "update_requests", Runner.update_requests.__get__(runner))
        assert run(steps, requests.step()) == requests.expect()


def test_another_step_in_between_disarms(runner: Runner) -> None:
    """Slots may be given to others by vLLM's own steps, although the requests of the next step are the same."""
    steps, requests = SteadySteps(runner), Requests(runner)
    requests.add(3)
    requests.add(4)
    assert run(steps, requests.step()) == requests.expect()
    prompts = make_output(list(requests.tokens), [4, 5])
    prompts.scheduled_new_reqs = [object()]  # type: ignore[list-item]
    assert not steps.launch(prompts) and steps.take_output(None) is None
    states = runner.req_states
    # vLLM's step moves the second request to another slot.
    old, new = states.req_id_to_index["request 1"], states.free.pop()
    for tensor in (
        states.num_computed_tokens.gpu,
        states.total_len.gpu,
        states.all_token_ids.gpu,
        states.last_sampled_tokens,
        runner.block_tables.block_tables[0].gpu,
    ):
        tensor[new] = tensor[old]
        tensor[old] = 1
    counts = runner.block_tables.num_blocks.np[0]
    counts[new] = counts[old]
    states.req_id_to_index["request 1"] = new
    assert run(steps, requests.step()) == requests.expect()


def test_new_blocks_of_all_groups_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(GROUPS["sizes, windows and shapes"])
    steps, requests = SteadySteps(runner), Requests(runner)
    written = []

    def write(writes: torch.Tensor, groups: Any) -> None:
        written.append(writes.shape[1])
        write_block_ids(writes, groups)

    monkeypatch.setattr(step_graph, "write_block_ids", write)
    for _ in range(3):
        requests.add(8)
    counts = []
    for _ in range(9):
        assert run(steps, requests.step()) == requests.expect()
        counts.append(len(written))
    # Blocks of 2, 4, 8 and 4 tokens; the first step's come with the batch, and nothing is written where none is full.
    assert counts == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert written == [3, 3 * 3, 3, 3 * 4]
    tables = runner.block_tables
    for request_id, blocks in requests.blocks.items():
        slot = runner.req_states.req_id_to_index[request_id]
        for index, of_group in enumerate(blocks):
            assert tables.num_blocks.np[index, slot] == len(of_group)
            assert tables.block_tables[index].gpu[slot, : len(of_group)].tolist() == of_group


@pytest.mark.parametrize("group", [0, 1])
def test_a_row_without_room_is_an_error(group: int) -> None:
    runner = Runner(((BLOCK_SIZE, None, 1), (BLOCK_SIZE, 9, 1)))
    steps, requests = SteadySteps(runner), Requests(runner)
    requests.add(3)
    assert run(steps, requests.step()) == requests.expect()
    runner.block_tables.num_blocks.np[group, runner.req_states.req_id_to_index["request 0"]] = WIDTH
    output = requests.step()
    output.scheduled_cached_reqs.new_block_ids[0] = ([5], [6])
    with pytest.raises(IntegrityError, match=f"blocks {WIDTH} to {WIDTH + 1}, a row has {WIDTH}"):
        steps.launch(output)


@pytest.mark.parametrize("name", FIELDS_OF_PROMPTS)
def test_a_step_with_anything_else_is_vllms(name: str) -> None:
    output = make_output(["a"], [5])
    assert why_step_is_not_steady(output) is None
    setattr(output, name, [1])
    assert why_step_is_not_steady(output) is not None


def test_every_field_of_a_step_is_known() -> None:
    """A field that a new vLLM adds may ask for something that a replay does not do."""
    known = {
        *(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
        ),
        *("finished_req_ids", "preempted_req_ids", "scheduled_spec_decode_tokens", "num_invalid_spec_tokens"),
        *("num_spec_tokens_to_schedule", "scheduled_encoder_inputs", "scheduled_encoder_input_stats"),
        *("free_encoder_mm_hashes", "ec_connector_metadata", "ec_manager_metadata"),
        *("has_structured_output_requests", "pending_structured_output_tokens"),
        *("kv_connector_metadata", "kv_connector_block_state", "has_sync_kv_loads"),
        *("aux_output_connector_metadata", "new_block_ids_to_zero", "kv_cache_block_copies"),
        "num_common_prefix_blocks",
    }
    of_later_versions = {"encoder_input_updates", "skip_drafts"}
    assert {each.name for each in dataclasses.fields(SchedulerOutput)} - of_later_versions == known
    assert {each.name for each in dataclasses.fields(CachedRequestData)} == {
        "req_ids",
        "resumed_req_ids",
        "new_token_ids",
        "all_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    }


def test_what_a_request_wants_decides(runner: Runner) -> None:
    steps, requests = SteadySteps(runner), Requests(runner)
    requests.add(3)
    slot, sampler = runner.req_states.req_id_to_index["request 0"], runner.sampler
    output = make_output(["request 0"], [3])
    for reason, array, value in (
        ("log-probabilities without Rose's sampler", sampler.sampling_states.num_logprobs, 2),
        ("random draws by vLLM's sampler", sampler.sampling_states.temperature.np, 0.7),
        ("logits processors without Rose's sampler", sampler.needs_logits_processing, True),
        ("prompts", runner.req_states.prefill_len.np, 4),
    ):
        count, kept = STEPS.vllm.get(reason, 0), array[slot]
        array[slot] = value
        assert not steps.launch(output)
        assert STEPS.vllm[reason] == count + 1
        array[slot] = kept
    output.has_structured_output_requests = True
    assert not steps.launch(output)
    assert STEPS.vllm["structured output without Rose's sampler"] > 0
    output.has_structured_output_requests = False
    assert steps.launch(output)


class Processors:
    """In the place of vLLM's: a slot's logits are moved on by as many tokens as ``shifts`` says."""

    def __init__(self) -> None:
        self.shifts = [0] * (MAX_REQS + 1)

    def apply(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
    ) -> None:
        assert len(logits) == len(slots) == len(positions) == len(ids)
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

    def __init__(self) -> None:
        super().__init__()
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


def grammar_of(allowed: dict[str, list[int]]) -> Any:
    words = [[sum(1 << token for token in tokens)] for tokens in allowed.values()]
    return SimpleNamespace(
        structured_output_request_ids=[*allowed], grammar_bitmask=np.array(words, np.int32)
    )


def test_any_mix_of_requests_is_sampled_in_replayed_steps() -> None:
    runner, choose = SamplingRunner(), random.Random(3)
    steps, requests, states = SteadySteps(runner), Requests(runner), runner.req_states
    num_replayed, ends = STEPS.rose, set()
    for _ in range(150):
        if len(requests.tokens) < MAX_REQS - len(requests.finished) and choose.random() < 0.4:
            requests.add(choose.randrange(1, 20))
            slot = states.req_id_to_index[f"request {requests.count - 1}"]
            runner.process(slot, choose.choice([0, 0, 3]))
            runner.report(slot, choose.choice([-1, -1, 0, 2]))
            runner.sampler.sampling_states.temperature.np[slot] = choose.choice([0, 0, 0.7])
        for request_id in list(requests.tokens):
            if len(requests.tokens[request_id]) >= MAX_LEN - 1 or choose.random() < 0.05:
                requests.end(request_id)
        if not requests.tokens:
            continue
        output, natural = requests.step(), requests.expect()
        ids, grammar = list(requests.tokens), None
        slots = [states.req_id_to_index[request_id] for request_id in ids]
        allowed = {
            request_id: choose.sample(range(VOCAB_SIZE), 5)
            for request_id in choose.sample(ids, len(ids))
            if choose.random() < 0.3
        }
        output.has_structured_output_requests = choose.random() < 0.4
        if output.has_structured_output_requests and allowed:
            grammar = grammar_of(allowed)
        before = states.total_len.gpu.clone()
        assert steps.launch(output)
        if output.has_structured_output_requests:
            # The masks are made meanwhile.
            assert torch.equal(states.total_len.gpu, before)
        told = steps.take_output(grammar)
        assert told is not None
        ends.add(steps._armed.end if steps._armed and grammar is None else "with masks")
        result = told.get_output()
        for row, (request_id, slot) in enumerate(zip(ids, slots, strict=True)):
            logits = torch.nn.functional.one_hot(torch.tensor(natural[row]), VOCAB_SIZE).float()
            if grammar is not None and request_id in allowed:
                mask = torch.ones(VOCAB_SIZE, dtype=torch.bool)
                mask[allowed[request_id]] = False
                logits[mask] = float("-inf")
            token = int(logits.roll(runner.processors.shifts[slot]).argmax())
            requests.tokens[request_id][-1] = token
            assert result.sampled_token_ids[row] == [token] == [int(states.last_sampled_tokens[slot])]
            if (count := int(runner.sampler.sampling_states.num_logprobs[slot])) >= 0:
                lists = result.logprobs.slice_request(row, 1)
                ids = lists.logprob_token_ids[0, : count + 1].tolist()
                assert ids[0] == token and len(set(ids[1:])) == count
                assert torch.equal(logits[ids[1:]], logits.topk(count).values)
                expected = logits.log_softmax(-1)[ids]
                torch.testing.assert_close(torch.tensor(lists.logprobs[0, : count + 1]), expected)
                assert lists.sampled_token_ranks[0] == int((logits >= logits[token]).sum())
        if (runner.sampler.sampling_states.num_logprobs[slots] < 0).all():
            assert result.logprobs is None
    assert STEPS.rose - num_replayed > 100 and ends == {"greedy", "drawn", "processed", "with masks"}


def test_masks_come_for_steps_that_wait_for_them() -> None:
    runner = SamplingRunner()
    steps, requests = SteadySteps(runner), Requests(runner)
    requests.add(3)
    assert steps.launch(requests.step())
    with pytest.raises(IntegrityError, match="sampled without"):
        steps.take_output(grammar_of({"request 0": [1]}))
    assert steps.take_output(None) is not None
    requests.expect()
    output = requests.step()
    output.has_structured_output_requests = True
    assert steps.launch(output)
    with pytest.raises(IntegrityError, match="never asked"):
        steps.launch(output)
    with pytest.raises(IntegrityError, match="request 7, which has no row"):
        steps.take_output(grammar_of({"request 7": [1]}))


def test_a_head_that_has_moved_is_not_read(runner: Runner) -> None:
    steps, requests = SteadySteps(runner), Requests(runner)
    requests.add(3)
    assert run(steps, requests.step()) == requests.expect()
    runner.model.lm_head.weight = torch.nn.Parameter(torch.zeros(1, 1))
    assert not steps.launch(requests.step())
    assert STEPS.vllm["a head whose weights have moved"] > 0


def test_tokens_that_nobody_asks_for_are_an_error(runner: Runner) -> None:
    steps, requests = SteadySteps(runner), Requests(runner)
    requests.add(3)
    assert steps.launch(requests.step())
    with pytest.raises(IntegrityError, match="never asked"):
        steps.launch(requests.step())


def test_outputs_may_be_read_late(runner: Runner) -> None:
    steps, requests = SteadySteps(runner), Requests(runner)
    requests.add(3)
    outputs, expected = [], []
    for _ in range(5):
        assert steps.launch(requests.step())
        outputs.append(steps.take_output(None))
        expected.append(requests.expect())
    assert [[t for (t,) in each.get_output().sampled_token_ids] for each in outputs] == expected


def test_tokens_that_a_later_step_has_overwritten_are_an_error(runner: Runner) -> None:
    steps, requests = SteadySteps(runner), Requests(runner)
    requests.add(3)
    outputs = []
    for _ in range(NUM_BUFFERS + 1):
        assert steps.launch(requests.step())
        outputs.append(steps.take_output(None))
        requests.expect()
    assert len(outputs[1].get_output().sampled_token_ids) == 1
    with pytest.raises(IntegrityError, match="step 0 were asked for after 9 steps"):
        outputs[0].get_output()


class HookedRunner:
    """A model runner whose methods, vLLM's part of them, only note that they were called."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.calls: list[Any] = []
        self.cudagraph_manager = SimpleNamespace(_capture_descs={})
        self.vllm_config = SimpleNamespace(additional_config={"rose": options})
        self.streams: list[Any] = []
        monkeypatch.setattr(step_graph, "SteadySteps", lambda _: SimpleNamespace(capture=self.streams.append))
        monkeypatch.setattr(step_graph, "_room_for_logits", self.note_stream)

    @contextmanager
    def note_stream(self, _: Any, streams: list[Any]) -> Iterator[None]:
        yield
        streams.append("vLLM's stream")

    def method(self, name: str, result: Any) -> Any:
        def call(self: HookedRunner, *args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return result

        return call

    def capture(self, **options: Any) -> int:
        hooked = step_graph.wrap_capture_model(self.method("capture", 7))
        return int(hooked(self, **options))


@pytest.mark.parametrize("reason", [None, "LoRA"])
@pytest.mark.parametrize("is_on", [True, False])
def test_graphs_are_captured_behind_vllms(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, reason: str | None, is_on: bool
) -> None:
    monkeypatch.setattr(step_graph, "why_engine_is_not_steady", lambda _: reason)
    hooked = HookedRunner(runner, monkeypatch, step_graph=is_on)
    is_steady = is_on and reason is None
    assert hooked.capture(profile_only=True) == 7
    assert not hasattr(hooked.cudagraph_manager, "rose_steady_steps") and not hooked.streams
    assert hooked.capture() == 7
    # Graphs of one stream share memory.
    assert hooked.streams == (["vLLM's stream"] if is_steady else [])
    assert hasattr(hooked.cudagraph_manager, "rose_steady_steps") == is_steady
    assert [kwargs["profile_only"] for _, _, kwargs in hooked.calls] == [True, False]


def test_logits_are_allocated_on_vllms_stream_before_its_first_graph(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    class Graphs:
        def __init__(self, compute: Any) -> None:
            self._compute = compute

        def capture(self, sizes: list[int], pool: Any, stream: Any) -> None:
            events.append((pool, stream, *(self._compute(size, None).shape for size in sizes)))

    class Captures(Runner):
        model_config = SimpleNamespace(get_hidden_size=lambda: 1)
        vllm_config = SimpleNamespace(use_cumem_cudagraph_pool=False)
        dtype = torch.float64

    class Streams:
        pool = "vLLM's pool"
        _capture_descs: ClassVar = {CUDAGraphMode.FULL: [Desc(size) for size in (4 * MAX_REQS, MAX_REQS, 1)]}

        def _capture_stream(self, desc: Desc) -> str:
            return "vLLM's stream"

    monkeypatch.setattr(step_graph, "CapturedGraphs", {int: Graphs})
    monkeypatch.setattr(cudagraph_pool, "set_graph_pool_id", lambda _: None)
    captures, manager, streams = Captures(), Streams(), []
    captures.cudagraph_manager = manager
    with step_graph._room_for_logits(captures, streams):
        for desc in manager._capture_descs[CUDAGraphMode.FULL]:
            # The stream is asked for as an argument of the graph's capture.
            events.append((desc.num_tokens, manager._capture_stream(desc)))
    first, *graphs = events
    assert first == ("vLLM's pool", "vLLM's stream", (MAX_REQS, VOCAB_SIZE))
    assert graphs == [(size, "vLLM's stream") for size in (4 * MAX_REQS, MAX_REQS, 1)]
    assert streams == ["vLLM's stream"] and "_capture_stream" not in vars(manager)


@pytest.mark.parametrize("small", [(2, 4), (0, 1), (0, 0), (-4, -2)], ids=str)
@pytest.mark.parametrize("num_graphs", [0, 1, 9, 10, 11, 105])
def test_the_memory_of_graphs_is_estimated_from_graphs_of_all_sizes(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, num_graphs: int, small: tuple[int, int]
) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import _extrapolate_full_graph_memory

    mib, sizes = 1 << 20, list(range(num_graphs, 0, -1))
    monkeypatch.setattr(step_graph, "why_engine_is_not_steady", lambda _: "LoRA")
    hooked = HookedRunner(runner, monkeypatch)
    manager = hooked.cudagraph_manager
    manager._capture_descs, manager._capture_mem_samples = {CUDAGraphMode.FULL: sizes}, []
    manager._max_full_descs_to_capture = 2
    captured: list[int] = []

    def memory_of(size: int) -> int:
        return mib * {num_graphs: 90, num_graphs - 1: -20, num_graphs - 2: 20}.get(size, small[size % 2])

    def capture(self: HookedRunner, *, profile_only: bool) -> int:
        captured.extend(manager._capture_descs[CUDAGraphMode.FULL][: manager._max_full_descs_to_capture])
        manager._capture_mem_samples.extend(map(memory_of, captured))
        return sum(map(memory_of, captured))

    measured = step_graph.wrap_capture_model(capture)(hooked, profile_only=True)
    assert manager._capture_descs[CUDAGraphMode.FULL] == sizes
    samples = manager._capture_mem_samples
    if num_graphs <= step_graph.PROFILED_GRAPHS:
        assert captured == sizes[:2] and samples == [*map(memory_of, captured)]
        return
    assert len(set(captured)) == step_graph.PROFILED_GRAPHS and captured == sorted(captured, reverse=True)
    assert captured[:3] == sizes[:3] and captured[-1] == 1
    assert max(np.diff(captured[2:])) < 0 and np.ptp(np.diff(captured[2:])) <= 1 + (num_graphs > 20)
    # As vLLM computes it. No graph gives back what others need.
    estimate = measured - sum(samples) + _extrapolate_full_graph_memory(samples, num_graphs)
    exact = measured + sum(max(memory_of(size), 0) for size in set(sizes) - set(captured))
    assert exact - num_graphs * mib <= estimate <= exact + num_graphs * mib


def test_other_calls_of_a_step_are_vllms(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = HookedRunner(runner, monkeypatch)
    launched, outputs = [], ["output"]
    steps = SimpleNamespace(
        launch=lambda output: launched.append(output) or output == "steady",
        take_output=lambda grammar: outputs.pop() if outputs else None,
        note_vllm_step=lambda: launched.append("noted"),
    )
    execute = step_graph.wrap_execute_model(hooked.method("execute", "vLLM's"))
    sample = step_graph.wrap_sample_tokens(hooked.method("sample", "vLLM's"))
    # Before graphs are captured, while vLLM profiles.
    assert execute(hooked, "steady") == sample(hooked, None) == "vLLM's"
    hooked.cudagraph_manager.rose_steady_steps = steps
    assert execute(hooked, "steady", None) is None
    assert execute(hooked, "other") == "vLLM's"
    assert execute(hooked, "steady", object()) == "vLLM's"
    assert execute(hooked, "steady", dummy_run=True) == "vLLM's"
    assert launched == ["steady", "other"]
    assert sample(hooked, None) == "output"
    assert sample(hooked, "grammar") == "vLLM's" and launched[-1] == "noted"


def test_vllms_own_decode_steps_multiply_as_many_rows(runner: Runner) -> None:
    SteadySteps(runner)
    steps = SteadySteps(runner)
    hidden = runner.cudagraph_manager.hidden_states
    batch = SimpleNamespace(num_tokens=3, num_reqs=3)
    runner.execute_model_state = SimpleNamespace(input_batch=batch, hidden_states=hidden[:4])
    steps.note_vllm_step()
    runner.products.clear()
    assert len(runner.model.compute_logits(hidden[:3])) == 3
    # Once: prompts' log-probabilities and other steps multiply what they have.
    assert len(runner.model.compute_logits(hidden[:3])) == 3
    assert runner.products == [4, 3]
    for other in (SimpleNamespace(num_tokens=5, num_reqs=3), SimpleNamespace(num_tokens=3, num_reqs=2)):
        runner.execute_model_state = SimpleNamespace(input_batch=other, hidden_states=hidden[:4])
        steps.note_vllm_step()
        runner.model.compute_logits(hidden[:2])
    assert runner.products[2:] == [2, 2]
