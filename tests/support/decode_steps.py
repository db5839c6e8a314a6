"""Steady decode steps of random request slots, and loops over the rows that say what must become of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from rose_backend.kernels.arguments import (
    MixedRows,
    StateGroup,
    StepGroup,
    StepGroups,
    StepInputs,
    StepState,
)
from rose_backend.kernels.decode_step.ops import NO_SLOT, begin_decode_step, begin_mixed_step

NUM_SLOTS, VOCAB_SIZE, MAX_LEN = 9, 23, 200
POISON = 77
BLOCK_SIZES: dict[str, tuple[int, ...]] = {
    "one group": (16,),
    "wide blocks": (48,),
    "two groups": (16, 16),
    "two sizes": (16, 48),
    "seven groups": (16, 16, 32, 16, 48, 16, 16),
}
"""Tokens per block of each group."""


@dataclass
class Case:
    """A random state of slots, and inputs that hold other values."""

    slots: torch.Tensor
    state: StepState
    inputs: StepInputs
    groups: StepGroups
    tokens: torch.Tensor

    def begin(self) -> None:
        """Write the step's inputs."""
        begin_decode_step(self.slots, self.state, self.inputs, self.groups, padding_slot=NUM_SLOTS)

    def copy(self) -> Self:
        """Return the case with copies of all that a step writes."""
        return replace(
            self, state=_copy(self.state), inputs=_copy(self.inputs), groups=copy_of_groups(self.groups)
        )

    def tensors(self) -> dict[str, Any]:
        """All that a step reads and writes, by name."""
        named = {**vars(self.state), **vars(self.inputs)}
        for index, group in enumerate(self.groups.groups):
            named |= {f"{name} of group {index}": value for name, value in vars(group).items()}
        return named


def copy_of_groups(groups: StepGroups, **changed: Any) -> StepGroups:
    """Return copies of all tensors, some of them replaced."""
    return StepGroups(*(replace(_copy(group), **changed) for group in groups.groups))


def _copy(tensors: Any) -> Any:
    values = {each.name: getattr(tensors, each.name) for each in fields(tensors)}
    copies = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()
    }
    return type(tensors)(**copies)


def make_case(
    num_requests: int,
    num_rows: int,
    *,
    block_sizes: Sequence[int] = (16,),
    num_states: int = 0,
    counts: bool = True,
    device: str = "cpu",
) -> Case:
    """Return rows with and without requests; ``block_sizes`` are those of each group of attention.

    Groups with states come first, with the last one's block size.
    """
    generator = torch.Generator().manual_seed(100 * num_requests + num_rows)

    def random(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device, dtype)

    def poison(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, POISON, device=device).to(dtype)

    computed = random(MAX_LEN - 1, NUM_SLOTS)
    # Positions at both ends of a block, and the first of all.
    computed[:4] = torch.tensor([0, block_sizes[-1] - 1, block_sizes[-1], MAX_LEN - 2], device=device)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_requests]
    rows = torch.full((num_rows,), NO_SLOT)
    rows[:num_requests] = slots
    state = StepState(
        num_computed_tokens=computed,
        last_tokens=random(VOCAB_SIZE, NUM_SLOTS, dtype=torch.int64),
        total_lens=computed + 1,
        token_ids=random(VOCAB_SIZE, NUM_SLOTS, MAX_LEN),
        output_counts=random(5, NUM_SLOTS, VOCAB_SIZE) if counts else None,
    )
    size = num_rows + 2
    inputs = StepInputs(
        input_ids=poison(size),
        positions=poison(size, dtype=torch.int64),
        seq_lens=poison(size),
        query_start_loc=torch.cat((poison(1) * 0, poison(size))),
        is_padding=poison(size, dtype=torch.bool),
        request_slots=poison(size),
    )
    groups: list[StepGroup | StateGroup] = [
        # Columns may differ here: which of them is read must be seen.
        StateGroup(
            state_table=random(1000, NUM_SLOTS, MAX_LEN // block_sizes[-1] + 1) + 1,
            state_blocks=poison(size),
            last_columns=poison(NUM_SLOTS),
            block_size=block_sizes[-1],
        )
        for _ in range(num_states)
    ]
    for index, block_size in enumerate(block_sizes):
        width = -(-MAX_LEN // block_size) + index
        table = random(1000, NUM_SLOTS, width) + 1
        if index:
            # Columns that a window has passed are the null block, never the one that the new token goes to.
            first = (computed - 20 * index).clamp(min=0) // block_size
            table[torch.arange(width, device=device) < first[:, None]] = 0
        groups.append(
            StepGroup(
                state_table=table,
                block_table=poison(size, width),
                slot_mapping=poison(size, dtype=torch.int64),
                num_computed_tokens=poison(size),
                block_size=block_size,
            )
        )
    tokens = random(VOCAB_SIZE, num_rows, dtype=torch.int64)
    return Case(rows.to(device), state, inputs, StepGroups(*groups), tokens)


def check_begin(before: Case, after: Case) -> None:
    """Hold every element of every tensor to what the rows say."""
    expected, state = _copy(before.inputs), before.state
    num_requests = sum(slot != NO_SLOT for slot in before.slots.tolist())
    for row, slot in enumerate(before.slots.tolist()):
        is_real = slot != NO_SLOT
        computed = int(state.num_computed_tokens[slot]) if is_real else -1
        expected.input_ids[row] = state.last_tokens[slot] if is_real else 0
        expected.positions[row] = max(computed, 0)
        expected.seq_lens[row] = computed + 1
        expected.query_start_loc[row + 1] = row + 1 if is_real else num_requests
        expected.is_padding[row] = not is_real
        expected.request_slots[row] = slot if is_real else NUM_SLOTS
    assert_equal(after.inputs, expected)
    assert_equal(after.state, before.state)
    assert len(after.groups.groups) == len(before.groups.groups)
    for index, group in enumerate(before.groups.groups):
        assert_equal(after.groups.groups[index], _group_after(before, group))


def _group_after(before: Case, group: StepGroup | StateGroup) -> StepGroup | StateGroup:
    expected: StepGroup | StateGroup = _copy(group)
    for row, slot in enumerate(before.slots.tolist()):
        if isinstance(expected, StateGroup):
            column = int(before.state.num_computed_tokens[slot]) // group.block_size
            expected.state_blocks[row] = 0 if slot == NO_SLOT else group.state_table[slot, column]
            if slot != NO_SLOT:
                expected.last_columns[slot] = column
            continue
        if slot == NO_SLOT:
            expected.num_computed_tokens[row] = expected.slot_mapping[row] = -1
            expected.block_table[row] = 0
            continue
        computed = int(before.state.num_computed_tokens[slot])
        num_blocks = computed // group.block_size + 1
        expected.num_computed_tokens[row] = computed
        expected.block_table[row, :num_blocks] = group.state_table[slot, :num_blocks]
        block = int(group.state_table[slot, num_blocks - 1])
        expected.slot_mapping[row] = block * group.block_size + computed % group.block_size
    return expected


def check_end(before: Case, after: Case) -> None:
    """Hold every element of the state to what the rows say."""
    expected = _copy(before.state)
    for slot, token in zip(before.slots.tolist(), before.tokens.tolist(), strict=True):
        if slot == NO_SLOT:
            continue
        expected.token_ids[slot, int(expected.total_lens[slot])] = token
        expected.last_tokens[slot] = token
        expected.total_lens[slot] += 1
        expected.num_computed_tokens[slot] += 1
        if expected.output_counts is not None:
            expected.output_counts[slot, token] += 1
    assert_equal(after.state, expected)


def make_sampled(case: Case, num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of each row, some there twice, and how many of them it gets: each number in turn."""
    num_rows, most = len(case.slots), num_drafts + 1
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(0, VOCAB_SIZE, (num_rows, most), generator=generator)
    tokens[:, ::2] = tokens[:, :1].clone()
    num_sampled = torch.arange(num_rows, dtype=torch.int32) % most + 1
    return tokens.to(case.slots.device), num_sampled.to(case.slots.device)


def check_end_with_drafts(before: Case, after: Case, tokens: torch.Tensor, num_sampled: torch.Tensor) -> None:
    """Hold every element of the state to what the rows say."""
    expected = _copy(before.state)
    for slot, of_row, count in zip(before.slots.tolist(), tokens.tolist(), num_sampled.tolist(), strict=True):
        if slot == NO_SLOT:
            continue
        start = int(expected.total_lens[slot])
        expected.token_ids[slot, start : start + count] = torch.tensor(of_row[:count])
        expected.last_tokens[slot] = of_row[count - 1]
        expected.total_lens[slot] += count
        expected.num_computed_tokens[slot] += count
        for token in of_row[:count]:
            expected.output_counts[slot, token] += 1
    assert_equal(after.state, expected)


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare two groups of tensors, field by field."""
    for each in fields(expected):
        got, wanted = getattr(actual, each.name), getattr(expected, each.name)
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(got, wanted), each.name
        else:
            assert got == wanted, each.name


def random_writes(case: Case, num_writes: int) -> tuple[torch.Tensor, StepGroups]:
    """Return entries at different places of all groups, and the tables that they must leave."""
    generator = torch.Generator().manual_seed(num_writes)
    expected = copy_of_groups(case.groups)
    entries = []
    first = 0
    for group in expected.groups:
        table = group.state_table
        for place in torch.randperm(table.numel(), generator=generator)[:num_writes].tolist():
            block = int(torch.randint(1, 1 << 20, (), generator=generator))
            entries.append((first + place, block))
            table[place // table.shape[1], place % table.shape[1]] = block
        first += table.numel()
    order = torch.randperm(len(entries), generator=generator)
    writes = torch.tensor(entries, dtype=torch.int64).view(-1, 2)[order].t()
    return writes.contiguous().to(case.slots.device), expected


def check_groups(actual: StepGroups, expected: StepGroups) -> None:
    """Hold every element of every block table to what it must be."""
    for got, wanted in zip(actual.groups, expected.groups, strict=True):
        assert_equal(got, wanted)


@dataclass
class MixedCase(Case):
    """A step in which some rows compute parts of prompts, or drafts."""

    rows: MixedRows
    computed_tokens: torch.Tensor
    num_tokens: int

    def begin(self) -> None:
        """Write the step's inputs."""
        begin_mixed_step(
            self.rows,
            self.state,
            self.inputs,
            self.groups,
            self.computed_tokens,
            num_tokens=self.num_tokens,
            max_query_len=max([1, *self.rows.query_start_loc.diff().tolist()]),
            padding_slot=NUM_SLOTS,
        )

    def copy(self) -> Self:
        """Return the case with copies of all that a step writes."""
        return replace(super().copy(), computed_tokens=self.computed_tokens.clone())


def make_mixed_case(
    counts: Sequence[int],
    num_rows: int,
    num_tokens: int,
    *,
    block_sizes: Sequence[int] = (16,),
    num_drafts: int = 0,
    device: str = "cpu",
) -> MixedCase:
    """Return a step with ``counts`` new tokens of its requests, padded to so many rows and tokens.

    Args:
        num_drafts: of each request; there are rows with fewer.
    """
    case = make_case(len(counts), num_rows, block_sizes=block_sizes, device=device)
    if num_drafts:
        drafts = torch.arange(NUM_SLOTS * num_drafts, device=device).view(NUM_SLOTS, num_drafts) + 1000
        case.state = replace(case.state, draft_tokens=drafts)
    size = num_tokens + 3
    inputs = replace(
        case.inputs,
        **{
            name: torch.full((size,), POISON, device=device).to(getattr(case.inputs, name).dtype)
            for name in ("input_ids", "positions", "is_padding")
        },
    )
    groups = []
    for group in case.groups.groups:
        # A window may have passed no block that gets new tokens: none has, here.
        table = torch.arange(1, group.state_table.numel() + 1, device=device).to(torch.int32)
        slot_mapping = torch.full((size,), POISON, device=device)
        groups.append(replace(group, state_table=table.view_as(group.state_table), slot_mapping=slot_mapping))
    slots = case.slots.tolist()
    is_prompt, is_due = [0] * num_rows, [0] * num_rows
    for row, count in enumerate(counts):
        # The rows in turn: a decode's, a part of a prompt, and its last part.
        kind = 1 + row % 2 if count > 1 + num_drafts else row % 3
        is_prompt[row], is_due[row] = int(kind > 0), int(kind != 1)
        computed = int(case.state.num_computed_tokens[slots[row]])
        case.state.num_computed_tokens[slots[row]] = min(computed, MAX_LEN - 1 - count)
    starts = torch.zeros(num_rows + 1, dtype=torch.int32)
    starts[1 : len(counts) + 1] = torch.tensor(counts).cumsum(0)
    starts[len(counts) + 1 :] = sum(counts)
    rows = MixedRows(
        case.slots,
        starts.to(device),
        *(torch.tensor(each, dtype=torch.int32, device=device) for each in (is_prompt, is_due)),
    )
    computed_tokens = torch.full((2, num_rows + 2), POISON, dtype=torch.int32, device=device)
    return MixedCase(
        case.slots, case.state, inputs, StepGroups(*groups), case.tokens, rows, computed_tokens, num_tokens
    )


def check_mixed_begin(before: MixedCase, after: MixedCase) -> None:
    """Hold every element of every tensor to what the rows say."""
    expected, state, rows = _copy(before.inputs), before.state, before.rows
    starts = rows.query_start_loc.tolist()
    computed_tokens = before.computed_tokens.clone()
    groups = [_copy(group) for group in before.groups.groups]
    for row, slot in enumerate(before.slots.tolist()):
        start, end = starts[row : row + 2]
        is_real = slot != NO_SLOT
        computed = int(state.num_computed_tokens[slot]) if is_real else 0
        expected.seq_lens[row] = computed + end - start
        expected.query_start_loc[row + 1] = end
        expected.request_slots[row] = slot if is_real else NUM_SLOTS
        most = 1 if state.draft_tokens is None else 1 + state.draft_tokens.shape[1]
        for kind, is_here in enumerate((0 < end - start <= most, end - start > most)):
            computed_tokens[kind, row] = computed if is_real and is_here else -1
        for token in range(start, end):
            position = computed + token - start
            known = state.token_ids[slot, position] if rows.is_prompt[row] else state.last_tokens[slot]
            if token > start and state.draft_tokens is not None and not rows.is_prompt[row]:
                known = state.draft_tokens[slot, token - start - 1]
            expected.input_ids[token], expected.positions[token] = known, position
            for group in groups:
                block = int(group.state_table[slot, position // group.block_size])
                group.slot_mapping[token] = block * group.block_size + position % group.block_size
        for group in groups:
            if is_real:
                # Behind the step's own tokens a drafter may go on.
                last_column = (computed + end - start + most - 2) // group.block_size
                num_blocks = min(last_column + 1, group.state_table.shape[1])
                group.block_table[row, :num_blocks] = group.state_table[slot, :num_blocks]
            else:
                group.block_table[row] = 0
    expected.is_padding[: before.num_tokens] = torch.arange(before.num_tokens) >= starts[-1]
    for group in groups:
        group.slot_mapping[starts[-1] : before.num_tokens] = NO_SLOT
    assert_equal(after.inputs, expected)
    assert_equal(after.state, before.state)
    assert torch.equal(after.computed_tokens, computed_tokens)
    for got, wanted in zip(after.groups.groups, groups, strict=True):
        assert_equal(got, wanted)


def check_mixed_end(before: MixedCase, after: MixedCase) -> None:
    """Hold every element of the state to what the rows say."""
    expected, rows = _copy(before.state), before.rows
    counts = rows.query_start_loc.diff().tolist()
    for row, (slot, token) in enumerate(zip(before.slots.tolist(), before.tokens.tolist(), strict=True)):
        if slot == NO_SLOT:
            continue
        expected.num_computed_tokens[slot] += counts[row]
        if rows.is_due[row]:
            expected.token_ids[slot, int(expected.total_lens[slot])] = token
            expected.last_tokens[slot] = token
            expected.total_lens[slot] += 1
            if expected.output_counts is not None:
                expected.output_counts[slot, token] += 1
    assert_equal(after.state, expected)
