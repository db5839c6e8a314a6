"""The two ends of a steady decode step against loops over the rows that say what each tensor must hold."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.decode_state import DecodeInputs, DecodeState
from rose_backend.kernels.steady_decode import NO_SLOT, begin_steady_decode, end_steady_decode

NUM_SLOTS, VOCAB_SIZE, MAX_LEN = 9, 23, 200
POISON = 77
SHAPES = [(0, 0), (1, 1), (1, 4), (3, 3), (5, 8), (0, 3)]
"""Requests and rows."""


@dataclass
class Case:
    """A random state of slots, and inputs that hold other values."""

    slots: torch.Tensor
    state: DecodeState
    inputs: DecodeInputs
    tokens: torch.Tensor
    block_size: int

    def begin(self) -> None:
        begin_steady_decode(
            self.slots, self.state, self.inputs, block_size=self.block_size, padding_slot=NUM_SLOTS
        )

    def copy(self) -> Case:
        return replace(self, state=_copy(self.state), inputs=_copy(self.inputs))


def _copy(tensors: Any) -> Any:
    values = {each.name: getattr(tensors, each.name) for each in fields(tensors)}
    return type(tensors)(**{name: None if value is None else value.clone() for name, value in values.items()})


def make_case(
    num_requests: int, num_rows: int, *, block_size: int = 16, counts: bool = True, device: str = "cpu"
) -> Case:
    generator = torch.Generator().manual_seed(100 * num_requests + num_rows)

    def random(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device, dtype)

    def poison(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, POISON, device=device).to(dtype)

    width = -(-MAX_LEN // block_size)
    computed = random(MAX_LEN - 1, NUM_SLOTS)
    # Positions at both ends of a block, and the first of all.
    computed[:4] = torch.tensor([0, block_size - 1, block_size, MAX_LEN - 2], device=device)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_requests]
    rows = torch.full((num_rows,), NO_SLOT)
    rows[:num_requests] = slots
    state = DecodeState(
        num_computed_tokens=computed,
        last_tokens=random(VOCAB_SIZE, NUM_SLOTS, dtype=torch.int64),
        total_lens=computed + 1,
        token_ids=random(VOCAB_SIZE, NUM_SLOTS, MAX_LEN),
        output_counts=random(5, NUM_SLOTS, VOCAB_SIZE) if counts else None,
        block_table=random(1000, NUM_SLOTS, width) + 1,
    )
    size = num_rows + 2
    inputs = DecodeInputs(
        input_ids=poison(size),
        positions=poison(size, dtype=torch.int64),
        seq_lens=poison(size),
        num_computed_tokens=poison(size),
        query_start_loc=torch.cat((poison(1) * 0, poison(size))),
        is_padding=poison(size, dtype=torch.bool),
        block_table=poison(size, width),
        slot_mapping=poison(size, dtype=torch.int64),
        request_slots=poison(size),
    )
    tokens = random(VOCAB_SIZE, num_rows, dtype=torch.int64)
    return Case(rows.to(device), state, inputs, tokens, block_size)


def check_begin(before: Case, after: Case) -> None:
    """Hold every element of every tensor to what the rows say."""
    expected, state, block_size = _copy(before.inputs), before.state, before.block_size
    num_requests = sum(slot != NO_SLOT for slot in before.slots.tolist())
    for row, slot in enumerate(before.slots.tolist()):
        is_real = slot != NO_SLOT
        computed = int(state.num_computed_tokens[slot]) if is_real else -1
        num_blocks = computed // block_size + 1 if is_real else 0
        expected.input_ids[row] = state.last_tokens[slot] if is_real else 0
        expected.positions[row] = max(computed, 0)
        expected.seq_lens[row] = computed + 1
        expected.num_computed_tokens[row] = computed
        expected.query_start_loc[row + 1] = row + 1 if is_real else num_requests
        expected.is_padding[row] = not is_real
        expected.request_slots[row] = slot if is_real else NUM_SLOTS
        if is_real:
            expected.block_table[row, :num_blocks] = state.block_table[slot, :num_blocks]
            block = int(state.block_table[slot, num_blocks - 1])
            expected.slot_mapping[row] = block * block_size + computed % block_size
        else:
            expected.block_table[row] = 0
            expected.slot_mapping[row] = NO_SLOT
    _assert_equal(after.inputs, expected)
    _assert_equal(after.state, before.state)


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
    _assert_equal(after.state, expected)


def _assert_equal(actual: Any, expected: Any) -> None:
    for each in fields(expected):
        got, wanted = getattr(actual, each.name), getattr(expected, each.name)
        assert (got is None) == (wanted is None), each.name
        assert got is None or torch.equal(got, wanted), each.name


def check_both_ends(case: Case) -> None:
    before = case.copy()
    case.begin()
    check_begin(before, case)
    before = case.copy()
    end_steady_decode(case.slots, case.tokens, case.state)
    check_end(before, case)
    _assert_equal(case.inputs, before.inputs)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(("num_requests", "num_rows"), SHAPES)
def test_both_ends_of_a_step(num_requests: int, num_rows: int, block_size: int) -> None:
    check_both_ends(make_case(num_requests, num_rows, block_size=block_size))


def test_outputs_need_not_be_counted() -> None:
    check_both_ends(make_case(2, 3, counts=False))


def test_steps_follow_each_other() -> None:
    case = make_case(4, 5)
    case.state.num_computed_tokens.fill_(14)
    case.state.total_lens.fill_(15)
    seen = []
    for step in range(5):
        case.begin()
        seen.append(case.inputs.input_ids[:4].tolist())
        assert case.inputs.positions[:4].tolist() == [14 + step] * 4
        end_steady_decode(case.slots, case.tokens + step, case.state)
    assert seen[1:] == [(case.tokens[:4] + step).tolist() for step in range(4)]


@pytest.mark.parametrize(
    ("owner", "name"),
    [("inputs", "positions"), ("inputs", "block_table"), ("state", "last_tokens")],
)
def test_wrong_tensors_are_refused(owner: str, name: str) -> None:
    case = make_case(2, 3)
    tensors = getattr(case, owner)
    wrong = getattr(tensors, name)[..., :1].bool()
    with pytest.raises(ShapeError, match=name):
        replace(case, **{owner: replace(tensors, **{name: wrong})}).begin()
