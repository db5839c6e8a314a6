"""Which requests are admitted from the queue when blocks are short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rose_backend import SamplingParams
from rose_backend import scheduling as in_flight_prefixes
from rose_backend.block_manager import BlockManager
from rose_backend.config import EngineConfig
from rose_backend.engine.request import InputProcessor
from rose_backend.engine.scheduler import Admission
from rose_backend.engine.sequence_state import DeferredCommits, SequenceState
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.engine.tokenizer_loading import TokenizerParts
from tests.support.random_tokenizers import KINDS

STEM = [1, 2, 3, 4, 5, 6]  # a block and half of one


def make(
    num_blocks: int, max_num_seqs: int = 8, **options: Any
) -> tuple[Admission, BlockManager, InputProcessor]:
    """Return an empty engine's queue over blocks of four tokens."""
    manager = BlockManager(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_model_len=40,
        prefix_cache=True,
        bytes_per_block=1,
    )
    tokenizer = Tokenizer(TokenizerParts(KINDS["byte-level"]().backend, False, {}, {}))
    processor = InputProcessor(
        tokenizer, vocab_size=100, max_model_len=40, max_num_seqs=8, seed=0, eos_token_ids=()
    )
    config = EngineConfig(model="m", max_num_seqs=max_num_seqs, max_num_batched_tokens=64, **options)
    state = SequenceState(max_num_seqs, 40, ())
    return (
        Admission(config, manager, state, DeferredCommits(manager, state, lambda *_: None)),
        manager,
        processor,
    )


def queue(
    admission: Admission, processor: InputProcessor, *prompts: list[int], n: int = 1, tenant: bytes = b""
) -> None:
    for prompt in prompts:
        (checked,) = processor.process_all([prompt], [SamplingParams(max_tokens=4, n=n)], tenant=tenant)
        admission.waiting.append(processor.build(checked).completions[0])


def remember(manager: BlockManager, tokens: list[int]) -> None:
    """Leave ``tokens`` in the prefix cache."""
    ids, row = np.array(tokens, np.int32), np.zeros(1, np.int64)
    admitted = manager.add(ids, match=manager.match(ids))
    assert admitted is not None and admitted.row == 0 and manager.reserve(row, len(ids)).ok
    manager.commit(row, np.array([len(ids)]), ids)
    manager.free(row)


@pytest.mark.parametrize(("num_blocks", "num_admitted"), [(11, 2), (10, 1)])
def test_two_that_want_the_same_half_filled_block(num_blocks: int, num_admitted: int) -> None:
    # Each may take it over, so each seems to need no copy; but only one can. With 9 blocks the copy does not fit.
    admission, manager, processor = make(num_blocks)
    remember(manager, STEM)
    queue(admission, processor, STEM + list(range(50, 64)), STEM + list(range(70, 86)), n=2)
    rows, counts, num_cached = admission.admit(64, 0)
    assert (len(rows), counts.tolist(), num_cached) == (
        num_admitted,
        [14, 16][:num_admitted],
        6 * num_admitted,
    )
    assert len(admission.waiting) == 2 - num_admitted and admission.num_reserved_slots == num_admitted
    assert manager.num_free_rows == 8 - num_admitted
    manager.check_integrity()
    # Nothing has been freed: it is not looked up again.
    assert not admission.may_admit(num_admitted)
    if num_admitted == 1:
        manager.free(rows)
        admission.num_reserved_slots -= 1
        rows, counts, num_cached = admission.admit(64, 0)
        assert (counts.tolist(), num_cached) == ([16], 6)
        manager.check_integrity()


def test_one_is_admitted_where_two_together_need_a_copy_that_no_block_is_left_for() -> None:
    admission, manager, processor = make(3)
    remember(manager, STEM)
    queue(admission, processor, [*STEM[:3], 10], [*STEM, 11])
    first, second = admission.waiting
    rows, counts, num_cached = admission.admit(64, 0)
    # The first may overwrite the full block, the second continue the other one, but not together. Nobody runs who could
    # free blocks: the second has to give its own back.
    assert (counts.tolist(), num_cached, first.slot) == ([1], 3, rows[0])
    assert list(admission.waiting) == [second] and manager.num_free_rows == 7
    manager.check_integrity()
    assert not admission.may_admit(1)


def test_requests_without_blocks_keep_their_place_in_the_queue() -> None:
    admission, manager, processor = make(5)
    remember(manager, STEM)
    # Nobody needs a further block, but all except the first need a copy of the half-filled one, and two are free.
    queue(admission, processor, *([*STEM, 10 + index, 9] for index in range(5)))
    last = [list(admission.waiting)[3], list(admission.waiting)[4]]
    _, counts, _ = admission.admit(64, 0)
    assert counts.tolist() == [2, 2, 2] and list(admission.waiting) == last
    manager.check_integrity()


def test_whole_sequences_are_counted_for_all_requests_admitted_together() -> None:
    admission, manager, processor = make(13)
    queue(admission, processor, *([first] * 20 for first in (7, 8, 9)))
    rows, counts, _ = admission.admit(45, 0)
    # Of 12 blocks the first two need 10. The 5 tokens left for the third would fit, but not all of it.
    assert counts.tolist() == [20, 20]
    assert len(admission.waiting) == 1 and manager.num_free_rows == 6 and manager.num_free_blocks == 2
    assert not admission.may_admit(2)
    manager.free(rows)
    assert admission.may_admit(0) and admission.admit(45, 0)[1].tolist() == [20]
    manager.check_integrity()


def test_tokens_of_a_step_are_handed_out_in_order() -> None:
    admission, manager, processor = make(60)
    queue(admission, processor, [7] * 10, [8] * 10, [9] * 10)
    rows, counts, num_cached = admission.admit(25, 0)
    assert (counts.tolist(), num_cached, rows.tolist()) == ([10, 10, 5], 0, [0, 1, 2])
    assert not admission.waiting
    manager.check_integrity()


def test_a_long_queue_moves_several_at_a_time() -> None:
    admission, manager, processor = make(2000, max_num_seqs=96)  # three at a time

    def num_admitted(num_running: int) -> int:
        may_admit = admission.may_admit(num_running)
        rows, _, _ = admission.admit(64, num_running)
        assert may_admit == (len(rows) > 0)
        return len(rows)

    queue(admission, processor, *([1 + index % 90] for index in range(105)))
    assert [num_admitted(0), num_admitted(64)] == [64, 32]
    for freed, expected in (([0], 0), ([1], 0), ([2], 3), ([3], 0)):
        manager.free(np.array(freed))
        assert num_admitted(90) == expected
    assert num_admitted(0) == 1  # whoever is alone has nobody to wait for
    for freed, expected in (([4, 5, 6], 3), ([7], 0), ([8], 2)):
        manager.free(np.array(freed))
        assert num_admitted(90) == expected
    assert not admission.waiting


@pytest.fixture
def few_are_worth_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight_prefixes, "MIN_TOKENS_WORTH_WAITING", len(STEM))


@pytest.mark.usefixtures("few_are_worth_waiting")
def test_prompts_behind_one_that_waits_for_a_prefix_come_in() -> None:
    admission, manager, processor = make(60)
    queue(admission, processor, [*STEM, 50], [*STEM, 60, 61], [7] * 10, [*STEM, 70], [8] * 5)
    waiting = [list(admission.waiting)[1], list(admission.waiting)[3]]
    rows, counts, _ = admission.admit(64, 0)
    assert counts.tolist() == [7, 10, 5] and list(admission.waiting) == waiting
    manager.commit(rows[:1].astype(np.int64), counts[:1], np.array([*STEM, 50]))
    _, counts, num_cached = admission.admit(64, 3)
    assert (counts.tolist(), num_cached) == ([2, 1], 12) and not admission.waiting
    manager.check_integrity()


@pytest.mark.usefixtures("few_are_worth_waiting")
@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "num_admitted"),
    [(60, 2, 1), (60, 3, 2), (7, 8, 2), (6, 8, 1)],
    ids=["no row to spare", "a row to spare", "blocks to spare", "no blocks to spare"],
)
def test_rows_and_blocks_of_a_deferred_prompt_are_kept(
    num_blocks: int, max_num_seqs: int, num_admitted: int
) -> None:
    admission, manager, processor = make(num_blocks, max_num_seqs)
    queue(admission, processor, [*STEM, 50], [*STEM, 60], [7] * 8)
    first_waiting = list(admission.waiting)[1]
    rows, counts, _ = admission.admit(64, 0)
    assert counts.tolist() == [7, 8][:num_admitted] and next(iter(admission.waiting)) is first_waiting
    manager.commit(rows[:1].astype(np.int64), counts[:1], np.array([*STEM, 50]))
    _, counts, num_cached = admission.admit(64, num_admitted)
    assert (counts.tolist()[0], num_cached) == (1, 6)
    manager.check_integrity()


@pytest.mark.usefixtures("few_are_worth_waiting")
def test_no_half_prompt_overtakes_a_deferred_one() -> None:
    admission, manager, processor = make(60)
    queue(admission, processor, [*STEM, 50], [*STEM, 60], [7] * 30)
    waiting = list(admission.waiting)[1:]
    rows, counts, _ = admission.admit(20, 0)
    assert counts.tolist() == [7] and list(admission.waiting) == waiting
    manager.commit(rows.astype(np.int64), counts, np.array([*STEM, 50]))
    _, counts, num_cached = admission.admit(20, 1)
    assert (counts.tolist(), num_cached) == ([1, 19], 6) and not admission.waiting


@pytest.mark.parametrize(("budget", "num_admitted"), [(30, 2), (29, 1)])
def test_a_whole_prompt_may_take_all_tokens_that_are_left(budget: int, num_admitted: int) -> None:
    admission, _, processor = make(40, chunked_prefill=False)
    queue(admission, processor, list(range(20)), list(range(50, 60)))
    rows, counts, _ = admission.admit(budget, 0)
    assert counts.tolist() == [20, 10][:num_admitted] and len(admission.waiting) == 2 - len(rows)


def test_nobody_is_looked_up_again_for_a_turn_before_something_is_free() -> None:
    admission, manager, processor = make(40, max_num_seqs=2)
    for tenant in (b"a", b"b"):
        queue(admission, processor, [1, 2, 3], [4, 5, 6], tenant=tenant)
    slots, _, _ = admission.admit(64, 0)
    assert len(slots) == len(admission.waiting) == 2
    assert admission.may_admit(2) and not len(admission.admit(64, 2)[0])
    assert not admission.may_admit(2)
    manager.free(slots[:1].astype(np.int64))
    assert admission.may_admit(1)
