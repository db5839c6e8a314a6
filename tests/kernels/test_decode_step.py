"""The two ends of a decode step against loops over the rows that say what each tensor must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import DraftedRows, StepGroups
from rose_backend.kernels.decode_step.ops import (
    accept_drafts,
    advance_rows,
    begin_decode_step,
    end_step,
    look_up_drafts,
    write_block_ids,
)
from tests.support.decode_steps import (
    BLOCK_SIZES,
    MAX_LEN,
    NUM_SLOTS,
    Case,
    MixedCase,
    assert_equal,
    check_begin,
    check_end,
    check_end_with_drafts,
    check_groups,
    check_mixed_begin,
    check_mixed_end,
    copy_of_groups,
    make_case,
    make_mixed_case,
    make_sampled,
    random_writes,
)
from tests.support.implementations import Implementation

each_block_sizes = pytest.mark.parametrize("block_sizes", BLOCK_SIZES.values(), ids=BLOCK_SIZES)
SHAPES = [(0, 0), (1, 1), (1, 4), (3, 3), (5, 8), (0, 3), (2, 200), (9, 512)]
"""Requests and rows; with the second but last kernels count more rows than a tile has."""


def groups_here(case: Case) -> StepGroups:
    """Return the case's groups with the addresses of this process."""
    return StepGroups(*case.groups.groups)


def begin(case: Case) -> None:
    begin_decode_step(case.slots, case.state, case.inputs, groups_here(case), padding_slot=NUM_SLOTS)


def end(case: Case) -> None:
    end_step(case.slots, case.tokens, case.state)


def write(writes: torch.Tensor, case: Case) -> None:
    write_block_ids(writes, groups_here(case))


def check_both_ends(call: Implementation, case: Case) -> None:
    before = case.copy()
    call(begin, case)
    check_begin(before, case)
    before = case.copy()
    call(end, case)
    check_end(before, case)
    assert_equal(case.inputs, before.inputs)


@each_block_sizes
def test_both_ends_of_a_step(implementation: Implementation, block_sizes: Sequence[int]) -> None:
    for num_requests, num_rows in SHAPES:
        if num_rows <= 200 or implementation.name == "gpu":
            case = make_case(num_requests, num_rows, block_sizes=block_sizes, device=implementation.device)
            check_both_ends(implementation, case)


@pytest.mark.parametrize(("num_states", "block_sizes"), [(1, (48,)), (3, (16, 48)), (2, ())], ids=str)
def test_states_are_one_block_of_each_row(
    implementation: Implementation, num_states: int, block_sizes: Sequence[int]
) -> None:
    for num_requests, num_rows in SHAPES[:-1]:
        case = make_case(
            num_requests,
            num_rows,
            block_sizes=block_sizes or (16,),
            num_states=num_states,
            device=implementation.device,
        )
        if not block_sizes:
            case.groups = StepGroups(*case.groups.groups[:num_states])
        check_both_ends(implementation, case)
        writes, expected = random_writes(case, 3)
        implementation(write, writes, case)
        check_groups(case.groups, expected)


def test_steps_with_prompts_take_no_states() -> None:
    case = make_mixed_case([3], 1, 3)
    states = make_case(1, 1, num_states=1).groups.groups[0]
    with pytest.raises(ShapeError, match="none with states"):
        replace(case, groups=StepGroups(*case.groups.groups, states)).begin()


def begin_mixed(case: MixedCase) -> None:
    replace(case, groups=groups_here(case)).begin()


def end_with_drafts(case: Case, tokens: torch.Tensor, num_sampled: torch.Tensor) -> None:
    end_step(case.slots, tokens, case.state, num_sampled=num_sampled)


def end_mixed(case: MixedCase) -> None:
    end_step(case.slots, case.tokens, case.state, case.rows)


MIXED = {
    "no rows": ([], 0, 0),
    "nothing real": ([], 3, 5),
    "a prompt": ([150], 1, 150),
    "decodes only": ([1, 1, 1], 4, 4),
    "both": ([1, 1, 1, 2, 7, 130], 8, 150),
    "as many as there are": ([1, 1, 1, 1, 1, 1, 3, 17, 129], 9, 400),
    "drafts": ([4, 4, 4, 4], 6, 24),
    "fewer drafts": ([4, 1, 2, 3, 2, 4, 5, 4, 130], 9, 160),
}
"""Tokens of each request, rows and tokens."""


@each_block_sizes
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("shape", MIXED)
def test_both_ends_of_a_step_with_prompts(
    implementation: Implementation, shape: str, num_drafts: int, block_sizes: Sequence[int]
) -> None:
    case = make_mixed_case(
        *MIXED[shape], block_sizes=block_sizes, num_drafts=num_drafts, device=implementation.device
    )
    before = case.copy()
    implementation(begin_mixed, case)
    check_mixed_begin(before, case)
    before = case.copy()
    implementation(end_mixed, case)
    check_mixed_end(before, case)
    assert_equal(case.inputs, before.inputs)


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_accepted_drafts_are_appended(implementation: Implementation, num_drafts: int) -> None:
    for num_requests, num_rows in SHAPES[:-2]:
        case = make_case(num_requests, num_rows, device=implementation.device)
        case.state.total_lens.clamp_(max=MAX_LEN - num_drafts - 1)
        tokens, num_sampled = make_sampled(case, num_drafts)
        before = case.copy()
        implementation(end_with_drafts, case, tokens, num_sampled)
        check_end_with_drafts(before, case, tokens, num_sampled)


def test_steps_with_prompts_take_no_numbers_of_tokens() -> None:
    case = make_mixed_case([3], 1, 3)
    with pytest.raises(ShapeError, match="num_sampled"):
        end_step(case.slots, case.tokens[:, None], case.state, case.rows, torch.ones(1, dtype=torch.int32))


@each_block_sizes
@pytest.mark.parametrize("num_writes", [0, 1, 40])
def test_block_ids_go_to_their_groups(
    implementation: Implementation, num_writes: int, block_sizes: Sequence[int]
) -> None:
    # Seven groups of 40 are more than a program's.
    case = make_case(2, 3, block_sizes=block_sizes, device=implementation.device)
    writes, expected = random_writes(case, num_writes)
    implementation(write, writes, case)
    check_groups(case.groups, expected)


def test_outputs_need_not_be_counted(implementation: Implementation) -> None:
    for num_requests, num_rows in ((2, 3), (3, 5)):
        case = make_case(num_requests, num_rows, counts=False, device=implementation.device)
        check_both_ends(implementation, case)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_tables_wider_than_a_tile(implementation: Implementation, num_groups: int) -> None:
    case = make_case(3, 5, block_sizes=[16] * num_groups, device=implementation.device)
    table = torch.arange(NUM_SLOTS * 2500).to(case.state.token_ids).view(NUM_SLOTS, 2500)
    step_table = table.new_full((7, 2500), 5)
    case.groups = copy_of_groups(case.groups, state_table=table, block_table=step_table, block_size=1)
    # With tables of its own for each group.
    case.groups = copy_of_groups(case.groups)
    case.state.num_computed_tokens[case.slots[:3]] = table.new_tensor([1100, 2499, 1024])
    before = case.copy()
    implementation(begin, case)
    check_begin(before, case)


@pytest.mark.parametrize(
    "writes",
    [
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(3, 2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
    ],
    ids=["int32", "three rows", "one dimension"],
)
def test_other_writes_are_refused(writes: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="writes"):
        write_block_ids(writes, make_case(1, 1).groups)


def test_steps_follow_each_other() -> None:
    case = make_case(4, 5)
    case.state.num_computed_tokens.fill_(14)
    case.state.total_lens.fill_(15)
    seen = []
    for step in range(5):
        case.begin()
        seen.append(case.inputs.input_ids[:4].tolist())
        assert case.inputs.positions[:4].tolist() == [14 + step] * 4
        end_step(case.slots, case.tokens + step, case.state)
    assert seen[1:] == [(case.tokens[:4] + step).tolist() for step in range(4)]


@pytest.mark.parametrize(("owner", "name"), [("inputs", "positions"), ("state", "last_tokens")])
def test_wrong_tensors_are_refused(owner: str, name: str) -> None:
    case = make_case(2, 3)
    tensors = getattr(case, owner)
    wrong = getattr(tensors, name)[..., :1].bool()
    with pytest.raises(ShapeError, match=name):
        replace(case, **{owner: replace(tensors, **{name: wrong})}).begin()


@pytest.mark.parametrize(
    ("group", "name"),
    [
        *((1, name) for name in ("state_table", "block_table", "slot_mapping", "num_computed_tokens")),
        *((0, name) for name in ("state_table", "state_blocks", "last_columns")),
    ],
)
def test_wrong_tensors_of_a_group_are_refused(group: int, name: str) -> None:
    case = make_case(2, 3, num_states=1)
    groups: list[Any] = [*case.groups.groups]
    groups[group] = replace(groups[group], **{name: getattr(groups[group], name)[..., :1].bool()})
    with pytest.raises(ShapeError, match=f"of group {group}"):
        replace(case, groups=StepGroups(*groups)).begin()


LENGTHS = [7, -1, 0, 300, -1]


def state(device: str = "cpu") -> dict[str, torch.Tensor]:
    num_computed = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    positions = num_computed.clamp(min=0).long()
    return {
        "token_ids": torch.tensor([11, 12, 13, 14, 15], device=device),
        "input_ids": torch.zeros_like(positions),
        "num_computed_tokens": num_computed,
        "positions": positions,
        "draw_positions": positions + 1,
        "history": positions.new_full((4, 6), -1),
        "step_index": torch.tensor([9], device=device),
    }


def test_advance(implementation: Implementation) -> None:
    tensors = state(implementation.device)
    implementation(advance_rows, **tensors)
    assert tensors["input_ids"].tolist() == [11, 12, 13, 14, 15]
    assert tensors["num_computed_tokens"].tolist() == [8, -1, 1, 301, -1]
    assert tensors["positions"].tolist() == [8, 0, 1, 301, 0]
    assert tensors["draw_positions"].tolist() == [9, 1, 2, 302, 1]
    assert tensors["step_index"].tolist() == [10]
    expected = torch.full((4, 6), -1)
    expected[9 % 4, :5] = tensors["token_ids"]
    assert torch.equal(tensors["history"].cpu(), expected)


@pytest.mark.parametrize("name", ["num_computed_tokens", "history"])
def test_advance_refuses_other_types(name: str) -> None:
    tensors: dict[str, Any] = state()
    tensors[name] = tensors[name].float()
    with pytest.raises(ShapeError, match=name):
        advance_rows(**tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("num_states", [0, 2])
@each_block_sizes
def test_replays_follow_the_slots(block_sizes: tuple[int, ...], num_states: int) -> None:
    """A graph captured without any request serves whatever requests its rows are given later."""
    case = make_case(0, 6, block_sizes=block_sizes, num_states=num_states, device="cuda")
    case.begin()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.begin()
        end_step(case.slots, case.tokens, case.state)
    reference = make_case(0, 6, block_sizes=block_sizes, num_states=num_states)
    reference.begin()
    for each in (case, reference):
        each.state.num_computed_tokens.clamp_(max=100)
        each.state.total_lens.clamp_(max=101)
    for slots in ([3, 1, -1, -1, -1, -1], [3, 1, 7, 0, 8, 2], [1, -1, -1, -1, -1, -1]):
        for each in (case, reference):
            each.slots.copy_(torch.tensor(slots))
        graph.replay()
        reference.begin()
        end_step(reference.slots, reference.tokens, reference.state)
        replayed = case.tensors()
        for name, tensor in reference.tensors().items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(replayed[name].cpu(), tensor), (slots, name)


NUM_PLACES = 2100
"""Tokens that a request has room for: several parts of a lookup."""


def drafted_rows(device: str = "cpu", vocab_size: int = 3) -> DraftedRows:
    """Return rows of requests with few different tokens, two rows of padding among them."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([1, 2, 9, 0, 2090, NUM_PLACES, 1025, 0, 40])
    slots = torch.tensor([4, 0, 8, 9, 2, 6, 1, 9, 3])
    token_ids = torch.randint(vocab_size, (10, NUM_PLACES), generator=generator, dtype=torch.int32)
    positions = (lengths - 1).clamp(min=0)
    return DraftedRows(
        slots.to(device),
        token_ids.to(device),
        token_ids[slots, positions].long().to(device),
        (lengths - 1).int().to(device),
        positions.to(device),
        (positions + 1).to(device),
    )


def looked_up(tokens: list[int], num_drafts: int, min_n: int, max_n: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return (tokens[end : end + num_drafts] + tokens[-1:] * num_drafts)[:num_drafts]
    return tokens[-1:] * num_drafts


@pytest.mark.parametrize(("num_drafts", "min_n", "max_n"), [(3, 5, 5), (1, 1, 1), (7, 2, 40), (5, 30, 40)])
@pytest.mark.parametrize("vocab_size", [3, 100])
def test_lookups(
    implementation: Implementation, num_drafts: int, min_n: int, max_n: int, vocab_size: int
) -> None:
    rows = drafted_rows(implementation.device, vocab_size)
    before = [each.clone() for each in rows]
    drafts = implementation(look_up_drafts, rows, num_drafts=num_drafts, min_n=min_n, max_n=max_n)
    for row, computed in enumerate(rows.num_computed_tokens.tolist()):
        if computed >= 0:
            known = rows.token_ids[rows.slots[row], : computed + 1].tolist()
            assert drafts[row].tolist() == looked_up(known, num_drafts, min_n, max_n)
    assert drafts.shape == (9, num_drafts) and drafts.dtype is torch.int64
    assert all(torch.equal(*each) for each in zip(rows, before, strict=True))


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
def test_acceptance(implementation: Implementation, num_drafts: int) -> None:
    rows = drafted_rows(implementation.device)
    before = DraftedRows(*(each.clone() for each in rows))
    generator = torch.Generator().manual_seed(num_drafts)
    drawn = torch.randint(-1, 2, (9, num_drafts + 1), generator=generator)
    drafts = torch.randint(-1, 2, (9, num_drafts), generator=generator)
    drafts[1], drafts[6] = drawn[1, 1:], drawn[6, :num_drafts]
    history = torch.full((4, 9, 12), 77, device=implementation.device)
    step_index = torch.tensor([9], device=implementation.device)
    given = [each.to(implementation.device) for each in (drawn, drafts)]
    implementation(accept_drafts, *given, rows, history, step_index)
    expected, token_ids = torch.full((4, 9, 12), 77), before.token_ids.clone()
    for row, computed in enumerate(before.num_computed_tokens.tolist()):
        new = [int(drawn[row, 0])]
        while len(new) <= num_drafts and int(drafts[row, len(new) - 1]) == new[-1] >= 0:
            new.append(int(drawn[row, len(new)]))
        expected[1, : num_drafts + 1, row] = torch.tensor(new + [-2] * (num_drafts + 1 - len(new)))
        num_counted = 0 if computed < 0 else min(len(new), NUM_PLACES - 1 - computed)
        kept = new[: max(NUM_PLACES - 1 - computed, 0)] if computed >= 0 else []
        token_ids[rows.slots[row], computed + 1 : computed + 1 + len(kept)] = torch.tensor(
            kept, dtype=torch.int32
        )
        assert int(rows.input_ids[row]) == new[-1]
        for old, lengths in zip(before[3:], rows[3:], strict=True):
            assert int(lengths[row]) == int(old[row]) + num_counted
    assert torch.equal(history.cpu(), expected) and step_index.tolist() == [10]
    assert torch.equal(rows.token_ids.cpu(), token_ids.cpu()) and torch.equal(rows.slots, before.slots)


@pytest.mark.parametrize("name", ["slots", "token_ids", "num_computed_tokens"])
def test_drafts_of_other_types_are_refused(name: str) -> None:
    rows = drafted_rows()
    wrong = rows._replace(**{name: getattr(rows, name).float()})
    with pytest.raises(ShapeError, match=name):
        look_up_drafts(wrong, num_drafts=2, min_n=1, max_n=2)
    tokens = torch.zeros(9, 3, dtype=torch.int64)
    history, step_index = torch.zeros(4, 3, 9, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ShapeError, match=name):
        accept_drafts(tokens, tokens[:, 1:], wrong, history, step_index)
    with pytest.raises(ShapeError, match="drafts"):
        accept_drafts(tokens, tokens, rows, history, step_index)
