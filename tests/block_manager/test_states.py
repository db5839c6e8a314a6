"""States of recurrent layers: where a hit ends, what is kept, and how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, GroupKind
from rose_backend.errors import ConfigError, RowError

SIZE = 16
KINDS = [GroupKind(), GroupKind(num_groups=3, is_state=True)]


def make_manager(num_blocks: int = 200, **options: Any) -> BlockManager:
    return BlockManager(
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_model_len=320,
        **{"kinds": KINDS, "block_size": SIZE, **options},
    )


def run_to(manager: BlockManager, row: int, tokens: np.ndarray, end: int) -> None:
    start = int(manager.num_computed_tokens[row])
    assert manager.reserve([row], end - start).ok
    run_copies(manager)
    manager.commit([row], end - start, tokens[start:end])
    manager.check_integrity()


def run_copies(manager: BlockManager) -> int:
    plan = manager.take_clone_plan()
    if plan is None:
        return 0
    manager.finish_clone_plan(plan)
    return len(plan)


def add(manager: BlockManager, tokens: np.ndarray) -> tuple[int, int]:
    added = manager.add(tokens)
    assert added is not None
    return added.row, added.num_cached_tokens


def serve(
    manager: BlockManager, tokens: np.ndarray, *, keeps: tuple[int, ...] = (), known: bool = True
) -> int:
    """Run a prompt to its end, with checkpoints at ``keeps``; return the length of its hit."""
    row, num_cached = add(manager, tokens)
    for end in (*(end for end in keeps if end > num_cached), len(tokens)):
        run_to(manager, row, tokens, end)
        if end in keeps:
            manager.checkpoint([row])
    run_copies(manager)
    manager.free([row], states_are_known=np.array([known]))
    manager.check_integrity()
    return num_cached


def prompt(head: int, tail: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate((np.arange(head), 1_000 + rng.integers(0, 1_000_000, tail))).astype(np.int32)


def test_a_hit_ends_at_the_last_checkpoint_before_what_differs() -> None:
    manager = make_manager()
    serve(manager, prompt(100, 60, 1), keeps=(48, 77, 130))
    assert manager.match(prompt(100, 60, 2)).num_tokens == 77
    assert manager.match(prompt(100, 60, 2)).num_known_tokens == 100
    assert manager.match(prompt(77, 60, 2)).num_tokens == 77
    assert manager.match(prompt(76, 60, 2)).num_tokens == 48
    assert manager.match(prompt(47, 60, 2)).num_tokens == 0
    # All but the last token, whose logits are needed.
    assert manager.match(prompt(77, 0)).num_tokens == 48
    assert manager.match(prompt(78, 0)).num_tokens == 77


def test_the_end_of_a_sequence_is_a_checkpoint_if_its_state_is_known() -> None:
    for known in (True, False):
        manager = make_manager()
        serve(manager, prompt(90, 0), known=known)
        assert manager.match(prompt(95, 0)).num_tokens == (90 if known else 0)
        assert manager.match(prompt(95, 0)).num_known_tokens == 90


def test_a_checkpoint_stays_as_it_is_while_its_row_goes_on() -> None:
    manager = make_manager()
    tokens = prompt(80, 0)
    row, _ = add(manager, tokens)
    run_to(manager, row, tokens, 40)
    running = manager.states.blocks_of([row])[:, 0].tolist()
    manager.checkpoint([row])
    plan = manager.take_clone_plan()
    assert plan is not None
    assert plan.src_block_ids.tolist() == running and set(plan.num_tokens.tolist()) == {SIZE}
    assert not set(plan.dst_block_ids.tolist()) & set(running)
    manager.finish_clone_plan(plan)
    run_to(manager, row, tokens, 80)
    assert manager.states.blocks_of([row])[:, 0].tolist() == running
    # Whoever starts from it gets a copy, and not the checkpoint itself.
    other, num_cached = add(manager, tokens[:60])
    assert num_cached == 40 and manager.reserve([other], 10).ok
    copies = manager.take_clone_plan()
    assert copies is not None
    states = list(zip(copies.src_block_ids.tolist(), copies.dst_block_ids.tolist(), strict=True))
    mine = manager.states.blocks_of([other])[:, 0].tolist()
    assert [pair for pair in states if pair[1] in mine] == list(
        zip(plan.dst_block_ids.tolist(), mine, strict=True)
    )


def test_a_row_that_starts_from_a_checkpoint_of_the_same_step_copies_the_running_state() -> None:
    manager = make_manager()
    tokens = prompt(48, 0)
    row, _ = add(manager, tokens)
    run_to(manager, row, tokens, 32)
    running = manager.states.blocks_of([row])[:, 0].tolist()
    manager.checkpoint([row])
    other, num_cached = add(manager, tokens)
    assert num_cached == 32 and manager.reserve([other], 5).ok
    plan = manager.take_clone_plan()
    assert plan is not None
    # All sources are read before anything is written: the checkpoint's own copy would come too late.
    assert sorted(plan.src_block_ids.tolist()) == sorted(2 * running)


def test_states_take_blocks_of_the_same_pool() -> None:
    manager = make_manager(num_blocks=1 + 8)
    tokens = prompt(60, 0)
    match = manager.match(tokens)
    assert manager.blocks_needed(match, 32) == 2 + 3
    row, _ = add(manager, tokens)
    assert manager.blocks_to_grow(row, 32, 32) == 2 + 3
    run_to(manager, row, tokens, 32)
    assert manager.num_free_blocks == 8 - 2 - 3
    assert manager.blocks_to_grow(row, 64, 32) == 2
    # One block is left for each row's next column, then there is none for a checkpoint.
    manager.checkpoint([row])
    assert manager.stats.checkpoints == 0 and manager.num_free_blocks == 3
    other, _ = add(manager, prompt(5, 5, 3))
    assert not manager.reserve([other], 5).ok
    assert not manager.reserve([other, row], [5, 1]).servable[0]
    manager.free([row], states_are_known=np.array([True]))
    assert manager.num_free_blocks == 8
    # The checkpoint is held beside the copy of it.
    assert manager.blocks_needed(manager.match(tokens), 48) == 2 + 3 + 3 + 1
    assert manager.pool.take_new_kv_blocks().tolist() != []
    assert len(manager.pool.take_new_kv_blocks()) == 0


def test_a_shared_prefix_and_its_checkpoint_are_kept_alike() -> None:
    """What several requests started from is as young as the K/V before it, however long they ran since."""
    manager = make_manager(num_blocks=1 + 40)
    serve(manager, prompt(64, 16, 1), keeps=(64,))
    for seed in (2, 3):
        assert serve(manager, prompt(64, 16, seed)) == 64
    for seed in range(4, 12):
        serve(manager, prompt(0, 60, seed), known=False)
        assert serve(manager, prompt(64, 16, 20 + seed)) == 64
    assert manager.stats.evictions > 0


def test_a_checkpoint_is_passed_over_while_its_prefix_is_held() -> None:
    manager = make_manager(num_blocks=1 + 30)
    serve(manager, prompt(32, 16, 1), keeps=(32,))
    row, num_cached = add(manager, prompt(32, 100, 2))
    assert num_cached == 32
    run_to(manager, row, prompt(32, 100, 2), 50)
    for seed in range(4, 10):
        serve(manager, prompt(0, 60, seed), known=False)
    assert manager.stats.evictions > 0
    assert manager.match(prompt(32, 9, 3)).num_tokens == 32
    manager.free([row])
    for seed in range(10, 20):
        serve(manager, prompt(0, 60, seed), known=False)
    assert manager.match(prompt(32, 9, 3)).num_tokens == 0


def test_the_last_checkpoint_of_a_running_row_is_kept_while_it_runs() -> None:
    """Requests that come meanwhile with the same prompt start there."""
    manager = make_manager(num_blocks=1 + 36)
    tokens = prompt(100, 0)
    row, _ = add(manager, tokens)
    for end in (48, 80):
        run_to(manager, row, tokens, end)
        manager.checkpoint([row])
        run_copies(manager)
    run_to(manager, row, tokens, 90)
    for seed in range(4, 10):
        serve(manager, prompt(0, 60, seed), known=False)
    assert manager.match(tokens).num_tokens == 80
    # The one before is like any other.
    assert manager.match(tokens[:79]).num_tokens == 0
    manager.free([row])
    for seed in range(10, 20):
        serve(manager, prompt(0, 60, seed), known=False)
    assert manager.match(tokens).num_tokens == 0


def test_equal_states_are_kept_once() -> None:
    manager = make_manager()
    for _ in range(3):
        serve(manager, prompt(50, 0), keeps=(33, 50))
    assert manager.stats.checkpoints == 2
    assert manager.cache is not None and manager.cache.states is not None
    assert len(manager.cache.states.block_ids()) == 2


def test_tokens_of_many_lengths_and_continuations() -> None:
    """The longest of many checkpoints behind the same blocks is found among others that differ."""
    manager = make_manager(num_blocks=4_000, block_size=64)
    rng = np.random.default_rng(5)
    kept: set[tuple[int, ...]] = set()
    for _ in range(150):
        tokens = rng.integers(0, 2, int(rng.integers(1, 63))).astype(np.int32)
        kept.add(tuple(tokens.tolist()))
        serve(manager, tokens)
    for _ in range(300):
        tokens = rng.integers(0, 2, 63).astype(np.int32)
        known = manager.match(tokens).num_known_tokens
        lengths = [
            len(one) for one in kept if len(one) <= known and tuple(tokens[: len(one)].tolist()) == one
        ]
        assert manager.match(tokens).num_tokens == max(lengths, default=0)


def test_namespaces_share_no_state() -> None:
    manager = make_manager()
    serve(manager, prompt(50, 0))
    assert manager.match(prompt(60, 0), namespace=b"other").num_tokens == 0
    assert manager.match(prompt(60, 0)).num_tokens == 50
    assert manager.reset_prefix_cache()
    assert manager.match(prompt(60, 0)).num_tokens == 0


def test_mistakes() -> None:
    state = GroupKind(is_state=True)
    for kinds in (
        [state],
        [state, GroupKind()],
        [GroupKind(), state, state],
        [GroupKind(), state, GroupKind(4)],
    ):
        with pytest.raises(ConfigError, match="kinds: got"):
            make_manager(kinds=kinds)
    with pytest.raises(ConfigError, match="window: got 4"):
        GroupKind(4, is_state=True)
    manager = make_manager()
    row, _ = add(manager, prompt(9, 0))
    with pytest.raises(RowError, match="states cannot be forked"):
        manager.fork(row, 1)
    with pytest.raises(RowError, match="not in use"):
        manager.checkpoint([row + 1])
    manager.checkpoint([row])
    assert manager.stats.checkpoints == 0, "no step has run, so there is no state"


def test_a_checkpoint_on_the_way_of_a_row_is_as_young_as_its_end() -> None:
    """Others have come and gone since; the prefix is of no use without its state, so both are evicted together."""
    for keeps, num_earlier in (((32,), 2), ((), 0)):
        manager = make_manager(num_blocks=1 + 60)
        tokens = prompt(32, 40, 2)
        for seed in range(num_earlier):
            serve(manager, prompt(32, 8, 50 + seed), keeps=keeps)
        row, _ = add(manager, tokens)
        run_to(manager, row, tokens, 64)
        if not keeps:
            # One of its own.
            manager.checkpoint([row])
            run_copies(manager)
        for seed in range(4, 10):
            serve(manager, prompt(0, 60, seed), known=False)
        run_to(manager, row, tokens, 70)
        manager.free([row])
        length = 32 if keeps else 64
        num_found = 0
        for seed in range(10, 40):
            serve(manager, prompt(0, 60, seed), known=False)
            match = manager.match(tokens)
            if match.num_known_tokens >= length:
                assert match.num_tokens == length
                num_found += 1
        assert num_found > 3 and manager.match(tokens).num_tokens == 0


def test_an_earlier_lookup_of_a_checkpoint_that_is_gone_is_repeated() -> None:
    manager = make_manager()
    serve(manager, prompt(48, 0), keeps=(20,))
    match = manager.match(prompt(32, 8, 2))
    assert match.num_tokens == 20
    manager.pool.share(np.array([match.checkpoint]))
    manager.uncache(np.array([match.checkpoint]))
    manager.clones.release_blocks(np.array([match.checkpoint]))
    added = manager.add(prompt(32, 8, 2), match=match)
    assert added is not None and added.num_cached_tokens == 0
    manager.check_integrity()


def test_a_state_whose_copy_was_called_off_is_no_checkpoint() -> None:
    manager = make_manager()
    serve(manager, prompt(20, 0))
    row, num_cached = add(manager, prompt(40, 0))
    assert num_cached == 20 and manager.reserve([row], 4).ok
    checkpoint = manager.match(prompt(40, 0)).checkpoint
    # Nothing else would know that the copy is not to be kept.
    manager.uncache(np.array([checkpoint]))
    manager.free([row], states_are_known=np.array([True]))
    manager.check_integrity()
    assert manager.match(prompt(40, 0)).num_tokens == 0
