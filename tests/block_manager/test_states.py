"""States of recurrent layers: where a hit ends, what is kept, and how long. The simulation checks what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rose_backend.block_manager import BlockManager, GroupType
from rose_backend.errors import ConfigError, RowError
from tests.support.block_manager.managers import add, compute, make, run_copies

GROUP_TYPES = [GroupType(), GroupType(num_groups=3, is_state=True)]


def make_states(num_blocks: int = 200, **options: Any) -> BlockManager:
    return make(num_blocks, **{"max_model_len": 320, "group_types": GROUP_TYPES, "block_size": 16, **options})


def run_to(manager: BlockManager, row: int, tokens: np.ndarray, *ends: int, keeps: bool = False) -> None:
    """Compute up to each of ``ends``, and make a checkpoint there."""
    for end in ends:
        compute(manager, row, tokens[int(manager.num_computed_tokens[row]) : end])
        if keeps:
            manager.checkpoint([row])


def serve(
    manager: BlockManager, tokens: np.ndarray, *, keeps: tuple[int, ...] = (), known: bool = True
) -> int:
    """Run a prompt to its end, with checkpoints at ``keeps``; return the length of its hit."""
    row, num_cached = add(manager, tokens)
    run_to(manager, row, tokens, *(end for end in keeps if end > num_cached), keeps=True)
    run_to(manager, row, tokens, len(tokens))
    run_copies(manager)
    manager.free([row], states_are_known=np.array([known]))
    manager.check_integrity()
    return num_cached


def serve_others(manager: BlockManager, *seeds: int) -> None:
    """Run prompts that share nothing and leave no checkpoint."""
    for seed in seeds:
        serve(manager, prompt(0, 60, seed), known=False)


def prompt(head: int, tail: int = 0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate((np.arange(head), 1_000 + rng.integers(0, 1_000_000, tail))).astype(np.int32)


def test_a_hit_ends_at_the_last_checkpoint_before_what_differs() -> None:
    manager = make_states()
    serve(manager, prompt(100, 60, 1), keeps=(48, 77, 130))
    for head, tail, expected in (
        (100, 60, 77),
        (77, 60, 77),
        (76, 60, 48),
        (47, 60, 0),
        (77, 0, 48),
        (78, 0, 77),
    ):
        match = manager.match(prompt(head, tail, 2))
        # All but the last token, whose logits are needed.
        assert (match.num_tokens, match.num_known_tokens) == (expected, min(head, head + tail - 1))


def test_the_end_of_a_sequence_is_a_checkpoint_if_its_state_is_known() -> None:
    for known in (True, False):
        manager = make_states()
        serve(manager, prompt(90), known=known)
        assert manager.match(prompt(95)).num_tokens == (90 if known else 0)


def test_a_row_that_starts_from_a_checkpoint_of_the_same_step_copies_the_running_state() -> None:
    manager = make_states()
    assert manager.states is not None
    row, _ = add(manager, prompt(48))
    run_to(manager, row, prompt(48), 32, keeps=True)
    other, num_cached = add(manager, prompt(48))
    assert num_cached == 32 and manager.reserve([other], 5).ok
    plan = manager.take_clone_plan()
    # All sources are read before anything is written: the checkpoint's own copy would come too late.
    running = manager.states.blocks_of([row])[:, 0].tolist()
    assert plan is not None and sorted(plan.src_block_ids.tolist()) == sorted(2 * running)


def test_states_take_blocks_of_the_same_pool() -> None:
    manager = make_states(1 + 8)
    tokens = prompt(60)
    assert manager.blocks_needed(manager.match(tokens), 32) == 2 + 3
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
    manager = make_states(1 + 40)
    serve(manager, prompt(64, 16, 1), keeps=(64,))
    for seed in (2, 3):
        assert serve(manager, prompt(64, 16, seed)) == 64
    for seed in range(4, 12):
        serve_others(manager, seed)
        assert serve(manager, prompt(64, 16, 20 + seed)) == 64
    assert manager.stats.evictions > 0


def test_a_checkpoint_is_passed_over_while_its_prefix_is_held() -> None:
    manager = make_states(1 + 30)
    serve(manager, prompt(32, 16, 1), keeps=(32,))
    row, num_cached = add(manager, prompt(32, 100, 2))
    assert num_cached == 32
    run_to(manager, row, prompt(32, 100, 2), 50)
    serve_others(manager, *range(4, 10))
    assert manager.stats.evictions > 0 and manager.match(prompt(32, 9, 3)).num_tokens == 32
    manager.free([row])
    serve_others(manager, *range(10, 20))
    assert manager.match(prompt(32, 9, 3)).num_tokens == 0


def test_the_last_checkpoint_of_a_running_row_is_kept_while_it_runs() -> None:
    """Requests that come meanwhile with the same prompt start there."""
    manager = make_states(1 + 36)
    tokens = prompt(100)
    row, _ = add(manager, tokens)
    run_to(manager, row, tokens, 48, 80, keeps=True)
    run_to(manager, row, tokens, 90)
    serve_others(manager, *range(4, 10))
    assert manager.match(tokens).num_tokens == 80
    # The one before is like any other.
    assert manager.match(tokens[:79]).num_tokens == 0
    manager.free([row])
    serve_others(manager, *range(10, 20))
    assert manager.match(tokens).num_tokens == 0


@pytest.mark.parametrize("keeps, num_earlier", [((32,), 2), ((), 0)])
def test_a_checkpoint_on_the_way_of_a_row_is_as_young_as_its_end(
    keeps: tuple[int, ...], num_earlier: int
) -> None:
    """Others have come and gone since; the prefix is of no use without its state, so both are evicted together."""
    manager = make_states(1 + 60)
    tokens = prompt(32, 40, 2)
    for seed in range(num_earlier):
        serve(manager, prompt(32, 8, 50 + seed), keeps=keeps)
    row, _ = add(manager, tokens)
    # One of its own, if there are none of earlier ones.
    run_to(manager, row, tokens, 64, keeps=not keeps)
    serve_others(manager, *range(4, 10))
    run_to(manager, row, tokens, 70)
    manager.free([row])
    length = 32 if keeps else 64
    num_found = 0
    for seed in range(10, 40):
        serve_others(manager, seed)
        match = manager.match(tokens)
        if match.num_known_tokens >= length:
            assert match.num_tokens == length
            num_found += 1
    assert num_found > 3 and manager.match(tokens).num_tokens == 0


def test_tokens_of_many_lengths_and_continuations() -> None:
    """The longest of many checkpoints after the same blocks is found among others that differ."""
    manager = make_states(4_000, block_size=64)
    rng = np.random.default_rng(5)
    kept: set[tuple[int, ...]] = set()
    for _ in range(150):
        tokens = rng.integers(0, 2, int(rng.integers(1, 63))).astype(np.int32)
        kept.add(tuple(tokens.tolist()))
        serve(manager, tokens)
    for _ in range(300):
        tokens = rng.integers(0, 2, 63).astype(np.int32)
        match = manager.match(tokens)
        ends = range(match.num_known_tokens, -1, -1)
        assert match.num_tokens == next(
            end for end in ends if not end or tuple(tokens[:end].tolist()) in kept
        )


def test_mistakes() -> None:
    state = GroupType(is_state=True)
    for group_types in (
        [state],
        [state, GroupType()],
        [GroupType(), state, state],
        [GroupType(), state, GroupType(4)],
    ):
        with pytest.raises(ConfigError, match="group_types: got"):
            make_states(group_types=group_types)
    with pytest.raises(ConfigError, match="window: got 4"):
        GroupType(4, is_state=True)
    manager = make_states()
    row, _ = add(manager, prompt(9))
    with pytest.raises(RowError, match="states cannot be forked"):
        manager.fork(row, 1)
    manager.checkpoint([row])
    assert manager.stats.checkpoints == 0, "no step has run, so there is no state"


def test_an_earlier_lookup_of_a_checkpoint_that_is_gone_is_repeated() -> None:
    manager = make_states()
    serve(manager, prompt(48), keeps=(20,))
    match = manager.match(prompt(32, 8, 2))
    assert match.num_tokens == 20
    manager.pool.share(np.array([match.checkpoint]))
    manager.uncache(np.array([match.checkpoint]))
    manager.clones.release_blocks(np.array([match.checkpoint]))
    added = manager.add(prompt(32, 8, 2), match=match)
    assert added is not None and added.num_cached_tokens == 0
    manager.check_integrity()


def test_a_state_whose_copy_was_called_off_is_no_checkpoint() -> None:
    manager = make_states()
    serve(manager, prompt(20))
    row, num_cached = add(manager, prompt(40))
    assert num_cached == 20 and manager.reserve([row], 4).ok
    # Nothing else would know that the copy is not to be kept.
    manager.uncache(np.array([manager.match(prompt(40)).checkpoint]))
    manager.free([row], states_are_known=np.array([True]))
    manager.check_integrity()
    assert manager.match(prompt(40)).num_tokens == 0
