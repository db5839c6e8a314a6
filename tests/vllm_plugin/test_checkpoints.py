"""Groups with states behind vLLM's interface: where checkpoints are made, and what a request is told of its blocks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.kv_cache.checkpoints import TOKENS_BETWEEN_CHECKPOINTS
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.prompt_hashes import wrap_preprocess_add_request
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec, wrap_copy_kv_cache_blocks
from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.fake_worker import STATE as STATE_WINDOW
from tests.support.vllm_plugin.managers import begin, full_spec, make_manager, make_request, state_of
from tests.support.vllm_plugin.simulation import make_simulation

STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
SPECS = (STATE, as_rose_spec(full_spec()), STATE)
WIDE = (as_rose_spec(full_spec(block_size=528)), *[dataclasses.replace(STATE, block_size=528)] * 3)


def make(num_blocks: int = 200, specs: Any = SPECS, **options: Any) -> RoseKVCacheManager:
    return make_manager(num_blocks, specs=specs, **{"max_model_len": 256, **options})


def admit(manager: RoseKVCacheManager, name: str, prompt: list[int], chunk: int | None = None) -> Any:
    """Admit a request and compute its prompt, cut at its junction and at chunks; return it and its hit."""
    request = make_request(name, prompt)
    manager.new_step_starts()
    blocks, num_hits, junction = manager.get_computed_blocks(request)
    while (start := request.num_computed_tokens or num_hits) < len(prompt):
        end = min(len(prompt), start + (chunk or len(prompt)))
        end = junction if start < junction < end else end
        is_new = request.num_computed_tokens == 0
        found = (num_hits, blocks) if is_new else (0, None)
        assert manager.allocate_slots(request, end - start, *found) is not None
        run_copies(manager)
        request.num_computed_tokens = end
        manager.new_step_starts()
    run_copies(manager)
    return request, num_hits, junction


def run_copies(manager: RoseKVCacheManager) -> list[tuple[int, int]]:
    copies, held = manager.take_kv_cache_block_copies()
    manager.block_pool.free_blocks(held)
    manager.manager.check_integrity()
    return [(copy.src_block_id, copy.dst_block_id) for copy in copies]


def checkpoints(manager: RoseKVCacheManager) -> int:
    return manager.manager.stats.checkpoints


def test_the_third_request_with_a_head_starts_behind_it() -> None:
    manager, head = make(), [*range(100)]
    hits = [admit(manager, f"{index}", head + [1000 * index] * 40)[1:] for index in range(1, 5)]
    # The second leaves a checkpoint at the junction, and is told of it.
    assert hits == [(0, 0), (0, 100), (100, 0), (100, 0)]
    # Of the first one's end and the junction: the tail behind that is short.
    assert checkpoints(manager) == 2


def test_running_states_are_in_every_column_and_stay_there() -> None:
    manager = make()
    request, _, _ = admit(manager, "a", [*range(100)])
    first, kv, second = manager.get_block_ids("a")
    assert len(set(first)) == len(set(second)) == 1 and len(first) == len(second) == len(set(kv)) == 7
    assert manager.take_new_block_ids() == kv, "states are not zeroed"
    assert not {first[0], second[0]} & set(kv)
    request.append_output_token_ids([7] * 30)
    new = manager.allocate_slots(request, 30).get_block_ids()
    assert new[0] == first[:2] and new[2] == second[:2] and len(new[1]) == 2
    assert manager.get_block_ids("a")[0] == first[:1] * 9
    assert manager.take_new_block_ids() == new[1]
    assert manager.take_new_block_ids() == []


def test_a_hit_is_told_without_its_states_and_copied_for_all_groups() -> None:
    manager = make()
    first, _, _ = admit(manager, "a", [*range(100)])
    _, kv, _ = manager.get_block_ids("a")
    manager.free(first)
    request = make_request("b", [*range(100), 5, 6])
    manager.new_step_starts()
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    assert num_hits == 100
    assert blocks.get_block_ids() == ([0] * 7, kv, [0] * 7)
    checkpoint = manager.manager.pool.blocks_of_groups(np.array([blocks.match.checkpoint]), 2)[:, 0].tolist()
    allocated = manager.allocate_slots(request, 2, num_hits, blocks).get_block_ids()
    mine = [allocated[0][0], allocated[2][0]]
    assert not set(mine) & set(checkpoint)
    assert set(zip(checkpoint, mine, strict=True)) <= set(run_copies(manager))


def test_a_state_ahead_of_the_known_tokens_is_not_kept() -> None:
    for num_placeholders in (0, 1):
        manager = make()
        request, _, _ = admit(manager, "a", [*range(20)])
        request.append_output_token_ids([7] * 5)
        assert manager.allocate_slots(request, 5) is not None
        # Scheduled beyond the last token that has come back.
        request.num_computed_tokens = 25 + num_placeholders
        manager.free(request)
        manager.new_step_starts()
        found = manager.get_computed_blocks(make_request("b", [*range(20), *[7] * 5, 8, 9]))
        assert found[1] == (0 if num_placeholders else 25)


def test_long_prompts_leave_checkpoints_on_the_way() -> None:
    manager = make(4_000, max_model_len=20_000)
    length = 2 * TOKENS_BETWEEN_CHECKPOINTS + 2_000
    admit(manager, "a", [*range(length)], chunk=1_000)
    # At the first chunk's end that is so far behind the last, twice, and at the prompt's end.
    assert checkpoints(manager) == 3
    _, num_hits, _ = admit(manager, "b", [*range(TOKENS_BETWEEN_CHECKPOINTS + 1_500), *[5] * 100])
    assert num_hits == 3_000


def test_short_steps_from_one_checkpoint_to_the_next_leave_none() -> None:
    manager = make()
    admit(manager, "a", [*range(100)])
    _, num_hits, junction = admit(manager, "b", [*range(120)])
    assert (num_hits, junction, checkpoints(manager)) == (100, 0, 1)
    admit(manager, "c", [*range(170)])
    assert checkpoints(manager) == 2


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(STATE, mamba_cache_mode="none"),
        dataclasses.replace(STATE, block_size=32),
        dataclasses.replace(STATE, num_speculative_blocks=1),
        dataclasses.replace(STATE, num_prefill_checkpoint_blocks=1),
    ],
    ids=["mode", "block size", "speculation", "checkpoints of the worker"],
)
def test_states_that_workers_keep_otherwise_are_refused(other: MambaSpec) -> None:
    with pytest.raises(ConfigError, match=r"mamba_cache_mode align\); this model has MambaSpec"):
        make(specs=(other, as_rose_spec(full_spec())))
    with pytest.raises(ConfigError, match="this model has MambaSpec"):
        make(specs=(STATE,))


def test_a_pool_holds_a_state_and_what_it_is_copied_from() -> None:
    # 64 columns of 16 tokens, and two states of two groups.
    assert make(1 + 64 + 4, max_model_len=1_024)
    with pytest.raises(ConfigError, match=r"max_model_len 1024 \(68 blocks\)"):
        make(64 + 4, max_model_len=1_024)


def test_blocks_are_copied_as_far_as_the_widest_layer_reaches() -> None:
    """vLLM copies layers that begin at one address once; the first may be a small state."""
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    storage = torch.arange(2 * 4 * 8, dtype=torch.float32)
    small = storage.as_strided((4, 2), (8, 1))
    whole = storage.as_strided((4, 8), (8, 1))
    expected = whole.clone()
    expected[2] = whole[1]
    wrap_copy_kv_cache_blocks(copy_kv_cache_blocks_inplace)([small, whole], 4, [(1, 2)])
    assert torch.equal(whole, expected)


def test_sessions_are_refused_one_by_one_where_a_turn_takes_a_token_back() -> None:
    for is_async, specs in ((True, SPECS), (False, SPECS), (True, None)):
        scheduler = SimpleNamespace(kv_cache_manager=make(specs=specs), connector=None)
        engine = SimpleNamespace(scheduler=scheduler, async_scheduling=is_async, request_block_hasher=None)
        add = wrap_preprocess_add_request(lambda engine, request: request)
        assert add(engine, SimpleNamespace(resumable=False))
        if is_async and specs is not None:
            with pytest.raises(ConfigError, match="--no-async-scheduling"):
                add(engine, SimpleNamespace(resumable=True))
        else:
            assert add(engine, SimpleNamespace(resumable=True))


def test_a_wide_block_is_cut_off_the_end_of_a_prompt_for_what_only_a_question_follows() -> None:
    manager = make(100, specs=WIDE, max_model_len=4_000)
    checkpoints = manager.checkpoints
    request = make_request("a", [*range(1_500)])
    # Two blocks, and more than 64 tokens behind them.
    assert checkpoints.next_stop(request, 0) == 1_056 and checkpoints.next_stop(request, 1_056) == 0
    request.shared_prefix_boundary = 700
    assert checkpoints.next_stop(request, 0) == 700 and checkpoints.next_stop(request, 700) == 1_056
    assert checkpoints.next_stop(make_request("b", [*range(1_056 + 63)]), 0) == 0
    assert checkpoints.next_stop(make_request("c", [*range(528)]), 0) == 0

    def serve(name: str, prompt: list[int], *ends: int) -> int:
        request = make_request(name, prompt)
        manager.new_step_starts()
        blocks, num_hits, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        request.num_computed_tokens = num_hits
        for end in ends:
            found = (num_hits, blocks) if request.num_computed_tokens == num_hits else (0, None)
            assert manager.allocate_slots(request, end - request.num_computed_tokens, *found) is not None
            run_copies(manager)
            request.num_computed_tokens = end
            manager.new_step_starts()
            run_copies(manager)
        manager.free(request)
        return num_hits

    # What stands behind it has to save a quarter of the state's 1,584 tokens, at the end of the prompt and of the row.
    assert serve("d", [*range(1_400)], 1_056, 1_400) == 0
    assert manager.manager.stats.checkpoints == 1
    assert serve("e", [*range(1_200), *[5] * 100], 1_200, 1_300) == 1_056
    assert serve("f", [*range(1_460), *[6] * 100], 1_400, 1_560) == 1_200
    assert serve("g", [*range(1_460), *[7] * 100], 1_560) == 1_400
    assert manager.manager.stats.checkpoints == 3


def go_on(manager: RoseKVCacheManager, request: Any, end: int) -> None:
    """Compute a running request to a position, and begin the next step."""
    if end > request.num_computed_tokens:
        assert manager.allocate_slots(request, end - request.num_computed_tokens) is not None
        request.num_computed_tokens = end
    manager.new_step_starts()
    run_copies(manager)


def lead(
    *ends: int, length: int = 250, num_lacking: int = 0, **options: Any
) -> tuple[RoseKVCacheManager, Any, Any]:
    """Return a manager, a request that is computed to the last of ``ends``, and one with its prompt and more.

    The second prompt lacks the last ``num_lacking`` tokens of the first.
    """
    manager = make(**{"max_model_len": 400, **options})
    leader = make_request("a", [*range(length)])
    assert begin(manager, leader, ends[0]) == 0
    for end in ends:
        go_on(manager, leader, end)
    return manager, leader, make_request("b", [*range(length - num_lacking), 5, 6])


def test_a_prompt_waits_for_a_checkpoint_that_another_one_is_on_its_way_to() -> None:
    manager, leader, second = lead(50, 100)
    before = state_of(manager)
    assert begin(manager, second) is None and state_of(manager) == before
    assert manager.defers(second) and not manager.defers(make_request("c", [7] * 40))
    prompt, match = manager._look_up(second, None)
    assert manager.checkpoints.coming_for(prompt, match) is not None
    # Whose tokens no hit reaches.
    assert manager.checkpoints.coming_for(dataclasses.replace(prompt, num_shareable=249), match) is None
    go_on(manager, leader, 249)
    assert begin(manager, second) is None
    go_on(manager, leader, 250)
    assert not manager.defers(second)
    assert begin(manager, second) == 250


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_behind_one_that_waits_for_a_checkpoint_do_not_wait(
    make_config: MakeConfig, depth: int
) -> None:
    simulation = make_simulation(
        make_config,
        num_blocks=100,
        block_size=16,
        max_num_seqs=8,
        depth=depth,
        max_num_batched_tokens=400,
        long_prefill_token_threshold=50,
        windows=(STATE_WINDOW, None),
    )
    prompt = [*range(120)]
    # The fourth does not fit into one step, and waits for nobody either.
    steps = simulation.serve(prompt, [*prompt, 900], [7] * 30, [8] * 90)
    assert steps[:3] == [
        {"r0": 50, "r2": 30, "r3": 50},
        {"r0": 50, "r2": 1, "r3": 40},
        {"r0": 20, "r2": 1, "r3": 1},
    ]
    assert steps[3]["r1"] == 1


def test_a_prompt_that_waits_for_a_checkpoint_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, leader, second = lead(50)
    lookups = []
    look_up = manager._look_up
    monkeypatch.setattr(manager, "_look_up", lambda *given: lookups.append(given) or look_up(*given))
    for end in (100, 150, 200):
        go_on(manager, leader, end)
        assert manager.defers(second)
        assert (manager._deferred.num_rows, manager._deferred.num_blocks) == (1, 18)
    assert len(lookups) == 1
    go_on(manager, leader, 250)
    assert not manager.defers(second)


@pytest.mark.parametrize(
    ("prompt", "salt"),
    [([*range(249), 7, 7, 7], None), ([*range(250)], None), ([*range(250), 5, 6], "another tenant")],
    ids=["parts before it", "ends there", "another tenant"],
)
def test_no_prompt_waits_for_a_checkpoint_that_it_cannot_use(prompt: list[int], salt: str | None) -> None:
    manager, _, _ = lead(40, 60)
    request = make_request("c", prompt, salt)
    assert not manager.defers(request)
    assert begin(manager, request) == 0


def test_no_prompt_waits_for_one_that_is_behind_its_match_or_few_tokens_ahead() -> None:
    manager, leader, third = lead(100)
    assert begin(manager, make_request("c", [*range(150)])) == 0
    go_on(manager, leader, 140)
    assert manager.get_computed_blocks(third)[1] == 150 and not manager.defers(third)
    go_on(manager, leader, 150)
    assert manager.defers(third)
    manager.new_step_starts()
    assert begin(manager, make_request("d", [*range(220)]), 70) == 150
    go_on(manager, leader, 230)
    assert manager.get_computed_blocks(third)[1] == 220 and not manager.defers(third)


def test_a_prompt_waits_for_junctions_and_checkpoints_on_the_way_not_for_what_follows() -> None:
    manager, head = make(4_000, max_model_len=20_000), [*range(3_000)]
    leader, second, third, fourth = (
        make_request(f"{each}", [*head, *[each] * length])
        for each, length in ((1, 3_000), (2, 500), (3, 500), (4, 500))
    )
    assert begin(manager, leader, 1_000) == 0
    manager.new_step_starts()
    assert manager.defers(second)
    go_on(manager, leader, 2_100)
    # The next is more than 4,000 tokens from the start.
    assert not manager.defers(second) and begin(manager, second, 500) == 2_100
    go_on(manager, leader, 3_500)
    blocks, num_hits, junction = manager.get_computed_blocks(third)
    assert (num_hits, junction) == (2_100, 3_000)
    assert manager.allocate_slots(third, 500, num_hits, blocks) is not None
    third.num_computed_tokens = 2_600
    manager.new_step_starts()
    assert manager.defers(fourth)
    go_on(manager, third, junction)
    # The end of the third, behind its junction.
    assert begin(manager, make_request("e", [*head, *[3] * 500, 9])) is None
    assert begin(manager, fourth, 500) == 3_000


def test_a_prompt_waits_no_longer_when_the_other_one_has_ended() -> None:
    manager, leader, second = lead(100)
    assert manager.defers(second)
    manager.free(leader)
    manager.new_step_starts()
    assert not manager.defers(second) and begin(manager, second) == 100


def test_no_prompt_waits_on_when_the_other_one_has_passed_the_place() -> None:
    manager, leader, second = lead(
        200, length=1_200, num_lacking=100, num_blocks=100, specs=WIDE[:2], max_model_len=4_000
    )
    assert manager.defers(second)
    # A step that is not cut at the last block's end, 1,056, leaves no checkpoint there.
    go_on(manager, leader, 1_100)
    assert not manager.defers(second)


@pytest.mark.parametrize(
    ("length", "full_blocks_only", "last"),
    [(1_200, False, 1_056), (1_000, True, 528)],
    ids=["saves too little", "no block ends there"],
)
def test_no_prompt_waits_for_the_end_of_another_one_that_leaves_no_checkpoint_there(
    length: int, full_blocks_only: bool, last: int
) -> None:
    options = {"num_blocks": 100, "specs": WIDE, "max_model_len": 4_000}
    manager, leader, second = lead(200, length=length, full_blocks_only=full_blocks_only, **options)
    assert manager.defers(second)
    go_on(manager, leader, last)
    assert not manager.defers(second) and begin(manager, second) == last
