"""The demonstration shows what the block manager says, whatever the prompt and the block size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager
from rose_backend.block_view.story import BlockState, Frame, SlotKind, Story, Strip, tell_story


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
        blocks, pool, stats = frame.blocks, manager.pool, manager.stats
        assert [block.ref_count for block in blocks] == manager.pool.ref_counts.tolist()
        findable = [block.block_id for block in blocks if block.is_findable]
        assert findable == sorted(manager.cache.cached_blocks().tolist())
        assert [len(block.words) for block in blocks] == manager.pool.num_written_tokens.tolist()
        rows = np.flatnonzero(manager.table.is_active)
        sequences = sequences_of(frame)
        assert [num_computed(strip) for strip in sequences] == manager.num_computed_tokens[rows].tolist()
        for strip in sequences:
            assert strip.notes[0] == f"{num_computed(strip)} computed"
        tables = [manager.block_table[row, : manager.num_row_blocks[row]].tolist() for row in rows]
        assert [ids_of(strip) for strip in sequences] == tables
        names = {row: strip.name for row, strip in zip(rows.tolist(), sequences, strict=True)}
        assert [block.writer for block in blocks] == [names.get(row) for row in manager.pool.writers.tolist()]
        assert eviction_order(frame) == pool.cached_blocks().tolist()
        free, cached = len(pool.free_blocks()), pool.num_cached_blocks
        held = np.count_nonzero(pool.ref_counts)
        assert free + cached == manager.num_free_blocks
        assert frame.counts == f"free {free} + cached {cached} + held {held} = {pool.num_blocks - 1} blocks"
        assert frame.history == (
            f"so far: forks {stats.forks}, copies {stats.clones}, prompt tokens found {stats.hit_tokens} of "
            f"{stats.query_tokens}"
        )


def sequences_of(frame: Frame) -> list[Strip]:
    return [strip for strip in frame.strips if strip.kind == "sequence"]


def num_computed(strip: Strip) -> int:
    return sum(kind is SlotKind.COMPUTED for cell in strip.cells for _, kind in cell.slots)


def ids_of(strip: Strip) -> list[int]:
    return [cell.block.block_id for cell in strip.cells]


def eviction_order(frame: Frame) -> list[int]:
    return [block_id for strip in frame.strips if strip.kind == "cached" for block_id in ids_of(strip)]


def copies_of(frame: Frame) -> list[tuple[int, int, str]]:
    """Return source, destination and text of each copy that a picture shows."""
    return [
        (above.block.block_id, below.block.block_id, link.text)
        for upper, lower in zip(frame.strips, frame.strips[1:], strict=False)
        for above, below, link in zip(upper.cells, lower.cells, lower.links, strict=False)
        if link is not None and link.kind == "copy"
    ]


def num_held(frame: Frame) -> int:
    return sum(block.ref_count > 0 for block in frame.blocks)


def test_the_default_story_teaches_copy_on_write() -> None:
    prompt, fork, first_write, written, ended, hit, hit_write = tell_story().frames
    assert cells(prompt) == {"A": "1: In a garden grows, 2: one rose _ _"}
    assert cells(fork) == {
        "A": "1: In a garden grows, 2: one rose _ _",
        "B": "1: In a garden grows, 2: one rose . .",
    }
    assert {fork.blocks[1].state, fork.blocks[2].state} == {BlockState.SHARED}
    assert "copies 0," in fork.history
    assert cells(first_write) == {
        "A": "1: In a garden grows, 2: one rose _ _",
        "B": "1: In a garden grows, 3: one rose _ _",
    }
    assert copies_of(first_write) == [(2, 3, "copy 2 tokens")]
    assert first_write.blocks[2].state is BlockState.CLONE_SOURCE
    assert not first_write.blocks[3].is_findable
    assert cells(written) == {
        "A": "1: In a garden grows, 2: one rose and _",
        "B": "1: In a garden grows, 3: one rose but _",
    }
    assert written.blocks[3].is_findable and copies_of(written) == []
    assert (sequences_of(ended), num_held(ended), eviction_order(ended)) == ([], 0, [2, 3, 1])
    assert cells(hit) == {"C": "1: In a garden grows, 2: one rose (and) ."}
    assert hit.history.endswith("prompt tokens found 6 of 14")
    assert "6 of its 8 tokens" in hit.text and "whole blocks would have found 4" in hit.text
    assert cells(hit_write) == {"C": "1: In a garden grows, 4: one rose _ _"}
    assert copies_of(hit_write) == [(2, 4, "copy 2 tokens")]


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
        for row in sequences_of(frame)
    }


@pytest.mark.parametrize("tokens", ["words", "characters"])
@pytest.mark.parametrize("block_size", [2, 3, 4, 7, 16, 32])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 13, 32, 96])
def test_any_prompt_and_block_size_tell_the_same_story(tokens: str, block_size: int, num_tokens: int) -> None:
    prompt = ("ab " if tokens == "words" else "x") * num_tokens
    frames = tell_story(prompt, block_size=block_size, tokens=tokens).frames
    for frame in frames:
        states = [block.state for block in frame.blocks]
        free, cached = states.count(BlockState.FREE), states.count(BlockState.CACHED)
        total = len(frame.blocks) - 1
        assert frame.counts == f"free {free} + cached {cached} + held {num_held(frame)} = {total} blocks"
        assert free + cached + num_held(frame) == total
    _, fork, first_write, written, ended, hit, hit_write = frames
    assert {cell.block.ref_count for row in sequences_of(fork) for cell in row.cells} == {2}
    parent, child = sequences_of(first_write)
    ((*copy, _),) = copies_of(first_write)
    assert copy == [ids_of(parent)[-1], ids_of(child)[-1]]
    assert parent.cells[:-1] == child.cells[:-1]
    assert [num_computed(strip) for strip in sequences_of(written)] == [num_computed(parent) + 1] * 2
    assert len(eviction_order(ended)) == num_held(first_write)
    assert num_computed(sequences_of(hit)[0]) == num_computed(parent) and num_computed(parent) % block_size
    assert len(copies_of(hit_write)) == 1
