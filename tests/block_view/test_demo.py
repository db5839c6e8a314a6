"""The demonstration shows what the block manager says, whatever the prompt and the block size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager
from rose_backend.block_view.demo import TOKEN_KINDS, tell_story
from rose_backend.block_view.view_model import BlockState, Frame, SlotKind, Story


def replay(story: Story) -> Iterator[BlockManager]:
    """Make the calls of the default story on a manager of our own; yield it after each step."""
    manager = BlockManager(num_blocks=9, block_size=4, max_num_seqs=2, max_model_len=16)
    ids = np.arange(6, dtype=np.int32)
    a = manager.add(ids).row
    manager.reserve(np.array([a]), 6)
    manager.commit(np.array([a]), 6, ids)
    yield manager
    both = np.array([a, *manager.fork(a, 1)])
    yield manager
    manager.reserve(both, 1)
    plan = manager.take_clone_plan()
    yield manager
    manager.finish_clone_plan(plan)
    manager.commit(both, 1, np.array([6, 7], np.int32))
    yield manager
    manager.free(both)
    yield manager
    c = manager.add(np.array([0, 1, 2, 3, 4, 5, 8, 9], np.int32)).row
    yield manager
    manager.reserve(np.array([c]), 2)
    assert manager.take_clone_plan() is not None
    yield manager


def test_every_number_of_the_story_is_the_managers() -> None:
    story = tell_story()
    assert len(story.frames) == 7
    for frame, manager in zip(story.frames, replay(story), strict=True):
        blocks = frame.pool.blocks
        assert [block.ref_count for block in blocks] == manager.pool.ref_counts.tolist()
        findable = [block.block_id for block in blocks if block.is_findable]
        assert findable == sorted(manager.cache.cached_blocks().tolist())
        assert [len(block.words) for block in blocks] == manager.pool.num_written_tokens.tolist()
        rows = np.flatnonzero(manager.table.is_active)
        assert [row.num_computed for row in frame.rows] == manager.num_computed_tokens[rows].tolist()
        tables = [manager.block_table[row, : manager.num_row_blocks[row]].tolist() for row in rows]
        assert [[cell.block.block_id for cell in row.cells] for row in frame.rows] == tables
        names = {row: view.name for row, view in zip(rows.tolist(), frame.rows, strict=True)}
        assert [block.writer for block in blocks] == [names.get(row) for row in manager.pool.writers.tolist()]
        assert frame.pool.eviction_order == tuple(manager.pool.cached_blocks().tolist())
        assert frame.pool.num_free + frame.pool.num_cached == manager.num_free_blocks
        assert frame.counters == manager.stats.as_dict()


def test_the_default_story_teaches_copy_on_write() -> None:
    prompt, fork, first_write, written, ended, hit, hit_write = tell_story().frames
    assert cells(prompt) == {"A": "1: In a garden grows, 2: one rose _ _"}
    assert cells(fork) == {
        "A": "1: In a garden grows, 2: one rose _ _",
        "B": "1: In a garden grows, 2: one rose . .",
    }
    assert {fork.pool.blocks[1].state, fork.pool.blocks[2].state} == {BlockState.SHARED}
    assert fork.counters["clones"] == 0
    assert cells(first_write) == {
        "A": "1: In a garden grows, 2: one rose _ _",
        "B": "1: In a garden grows, 3: one rose _ _",
    }
    (copy,) = first_write.copies
    assert (copy.source, copy.destination, copy.num_tokens) == (2, 3, 2)
    assert first_write.pool.blocks[2].state is BlockState.CLONE_SOURCE
    assert not first_write.pool.blocks[3].is_findable
    assert cells(written) == {
        "A": "1: In a garden grows, 2: one rose and _",
        "B": "1: In a garden grows, 3: one rose but _",
    }
    assert written.pool.blocks[3].is_findable and written.copies == ()
    assert (ended.rows, ended.pool.num_held, ended.pool.eviction_order) == ((), 0, (2, 3, 1))
    assert cells(hit) == {"C": "1: In a garden grows, 2: one rose (and) ."}
    assert (hit.counters["hit_tokens"], hit.counters["partial_hits"]) == (6, 1)
    assert "6 of its 8 tokens" in hit.text and "whole blocks would have found 4" in hit.text
    assert cells(hit_write) == {"C": "1: In a garden grows, 4: one rose _ _"}
    assert [(copy.source, copy.destination) for copy in hit_write.copies] == [(2, 4)]


def cells(frame: Frame) -> dict[str, str]:
    """Return each sequence as one line of text."""
    signs = {SlotKind.RESERVED: "_", SlotKind.EMPTY: "."}
    return {
        row.name: ", ".join(
            f"{cell.block.block_id}: "
            + " ".join(
                signs.get(kind, f"({word})" if kind is SlotKind.FOREIGN else word)
                for word, kind in cell.slots
            )
            for cell in row.cells
        )
        for row in frame.rows
    }


@pytest.mark.parametrize("tokens", TOKEN_KINDS)
@pytest.mark.parametrize("block_size", [2, 3, 4, 7, 16, 32])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 13, 32, 96])
def test_any_prompt_and_block_size_tell_the_same_story(tokens: str, block_size: int, num_tokens: int) -> None:
    prompt = ("ab " if tokens == "words" else "x") * num_tokens
    frames = tell_story(prompt, block_size=block_size, tokens=tokens).frames
    for frame in frames:
        pool = frame.pool
        assert pool.num_free + pool.num_cached + pool.num_held == len(pool.blocks) - 1
        states = [block.state for block in pool.blocks]
        assert states.count(BlockState.FREE) == pool.num_free
        assert states.count(BlockState.CACHED) == pool.num_cached
    _, fork, first_write, written, ended, hit, hit_write = frames
    assert {cell.block.ref_count for row in fork.rows for cell in row.cells} == {2}
    parent, child = first_write.rows
    (copy,) = first_write.copies
    assert (copy.source, copy.destination) == (
        parent.cells[-1].block.block_id,
        child.cells[-1].block.block_id,
    )
    assert parent.cells[:-1] == child.cells[:-1]
    assert written.rows[0].num_computed == written.rows[1].num_computed == parent.num_computed + 1
    assert ended.pool.num_cached == first_write.pool.num_held
    assert hit.rows[0].num_computed == parent.num_computed and hit.rows[0].num_computed % block_size
    assert len(hit_write.copies) == 1
