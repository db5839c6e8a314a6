"""When what running requests have computed becomes findable, and that no lookup asks for more than it gains."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import Request

from rose_backend.vllm_plugin.kv_cache_manager import RoseKVCacheManager
from tests.vllm_plugin.test_kv_cache_manager import BLOCK_SIZE, admit, make_manager, make_request


def look_up(manager: RoseKVCacheManager, tokens: list[int]) -> int:
    """Return how many of these tokens a request finds that is looked up in the next step."""
    manager.new_step_starts()
    request = make_request("lookup", [*tokens, -1])
    _, num_hits, _ = manager.get_computed_blocks(request)
    manager.free(request)
    return num_hits


def decode(manager: RoseKVCacheManager, request: Request, token: int) -> None:
    request.append_output_token_ids(token)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens += 1


def test_a_running_request_is_found_by_its_prompt_and_its_full_blocks() -> None:
    manager = make_manager()
    request = make_request("a", list(range(BLOCK_SIZE + 5)))
    admit(manager, request)
    assert look_up(manager, request._all_token_ids) == BLOCK_SIZE + 5
    for token in range(100, 100 + BLOCK_SIZE):
        decode(manager, request, token)
        num_computed = request.num_computed_tokens
        full = num_computed - num_computed % BLOCK_SIZE
        assert look_up(manager, request._all_token_ids) == max(full, BLOCK_SIZE + 5)
    manager.free(request)
    assert look_up(manager, request._all_token_ids) == request.num_computed_tokens
    manager.manager.check_integrity()


def test_chunks_of_a_prompt_are_found_to_its_last_token() -> None:
    manager = make_manager()
    prompt = list(range(3 * BLOCK_SIZE + 4))
    request = make_request("a", prompt)
    manager.new_step_starts()
    blocks, _, _ = manager.get_computed_blocks(request)
    # The second chunk fills no block; the last one is short, but ends the prompt.
    for end, num_found in ((19, 19), (21, 19), (49, 49), (52, 52)):
        manager.allocate_slots(request, end - request.num_computed_tokens, 0, blocks)
        request.num_computed_tokens = end
        assert look_up(manager, prompt) == num_found


def test_a_step_in_which_nobody_fills_a_block_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    requests = [make_request(f"r{index}", [100 * index + n for n in range(4 + index)]) for index in range(3)]
    for request in requests:
        admit(manager, request)
    look_up(manager, [1, 2, 3])
    committed: list[list[int]] = []
    commit = manager.manager.commit

    def counted(rows: Any, *args: Any) -> None:
        committed.append(rows.tolist())
        commit(rows, *args)

    monkeypatch.setattr(manager.manager, "commit", counted)
    for step in range(BLOCK_SIZE):
        for request in requests:
            decode(manager, request, step)
        look_up(manager, [1, 2, 3])
    # Each request fills one block, each in another step.
    assert sorted(committed) == [[0], [1], [2]]
