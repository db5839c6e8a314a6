"""Which requests may share blocks, and that a waiting request is hashed once."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from rose_backend.block_manager.prefix_index import PrefixHasher
from rose_backend.vllm_plugin.kv_cache.prompt_hashes import namespace_of, wrap_preprocess_add_request
from tests.vllm_plugin.test_kv_cache_manager import BLOCK_SIZE, admit, make_manager, make_request

PROMPT = list(range(40))
ADAPTERS = {
    "none": None,
    "a": LoRARequest("a", 1, "/adapters/one"),
    "a under another number": LoRARequest("a", 2, "/adapters/one"),
    "a with other weights": LoRARequest("a", 1, "/adapters/two"),
    "b with a's weights": LoRARequest("b", 1, "/adapters/one"),
}
SALTS = (None, "", "x", "y", "('lora', 'a', '/adapters/one')")


def keyed_request(name: str, adapter: str, salt: str | None, **options: Any) -> Any:
    request = make_request(name, PROMPT)
    request.lora_request, request.cache_salt = ADAPTERS[adapter], salt
    return request


def test_requests_share_exactly_where_vllms_hashes_are_equal() -> None:
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256_cbor)
    kinds = list(itertools.product(ADAPTERS, SALTS))
    hashes = [hasher(keyed_request("r", *kind))[0] for kind in kinds]
    shared = 0
    for (first, first_hash), (second, second_hash) in itertools.product(
        zip(kinds, hashes, strict=True), repeat=2
    ):
        manager = make_manager(40)
        admit(manager, keyed_request("first", *first))
        manager.new_step_starts()
        num_hits = manager.get_computed_blocks(keyed_request("second", *second))[1]
        # To the token, as always, or nothing at all.
        assert num_hits == (39 if first_hash == second_hash else 0), (first, second)
        shared += num_hits > 0
    assert len(kinds) < shared < len(kinds) ** 2


def test_no_key_is_the_plain_namespace() -> None:
    assert namespace_of(make_request("a", PROMPT)) == b""


@pytest.fixture
def num_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count blocks that are hashed."""
    counts: list[int] = []
    chain_digest = PrefixHasher.chain_digest

    def count(self: PrefixHasher, parent: bytes, tokens: bytes) -> bytes:
        counts.append(1)
        return chain_digest(self, parent, tokens)

    monkeypatch.setattr(PrefixHasher, "chain_digest", count)
    return counts


def test_a_waiting_request_is_hashed_once(num_hashed: list[int]) -> None:
    manager = make_manager(11)
    admit(manager, make_request("holder", list(range(500, 620))))
    del num_hashed[:]
    late = make_request("late", list(range(100)))
    for _ in range(5):
        assert admit(manager, late) is None
    manager._flush()
    # Committing the holder's blocks hashes them, once. Of the late one only the first block is asked for.
    assert len(num_hashed) == 120 // BLOCK_SIZE + 1
    # So it is when tokens arrive while it waits again.
    late._all_token_ids.extend(range(100, 130))
    assert admit(manager, late) is None
    assert len(num_hashed) == 120 // BLOCK_SIZE + 1
    assert len(manager._prompts._of_request) == 1


@pytest.mark.parametrize("end", ["admitted", "freed", "popped"])
def test_hashes_are_kept_only_while_a_request_waits(end: str) -> None:
    manager = make_manager(11)
    request = make_request("a", PROMPT)
    manager.get_computed_blocks(request)
    assert len(manager._prompts._of_request) == 1
    if end == "admitted":
        admit(manager, request)
    elif end == "freed":
        manager.free(request)
    else:
        assert manager.pop_blocks_for_free(request) == []
    assert len(manager._prompts._of_request) == 0


def test_the_tokens_of_a_prompt_are_kept_until_they_are_committed() -> None:
    manager = make_manager(40)
    request, tokens = make_request("a", PROMPT), [*PROMPT, 900, 901]
    admit(manager, request)
    prompts = manager._prompts
    request.append_output_token_ids(tokens[len(PROMPT) :])
    spans = [(0, 7), (7, 7), (7, 39), (39, 41), (41, 42)]
    for start, end in spans:
        is_kept = "a" in prompts._admitted
        assert prompts.tokens_to_commit([request], [start], [end]).tolist() == tokens[start:end]
        assert is_kept == (start < len(PROMPT))
    session = make_request("session", PROMPT)
    session.resumable = True
    admit(manager, session)
    assert not prompts._admitted
    gone = make_request("gone", PROMPT)
    admit(manager, gone)
    assert list(prompts._admitted) == ["gone"]
    both = prompts.tokens_to_commit([request, gone, request], [40, 3, 41], [41, 9, 42])
    assert both.tolist() == [900, *PROMPT[3:9], 901] and both.dtype == np.int32
    manager.free(gone)
    assert not prompts._admitted


def test_a_streaming_session_may_take_tokens_back() -> None:
    manager = make_manager(11)
    first = make_request("first", PROMPT)
    admit(manager, first)
    manager.new_step_starts()
    session = make_request("session", PROMPT)
    session.resumable = True
    assert manager.get_computed_blocks(session)[1] == 39
    session._all_token_ids[8:] = range(900, 932)
    assert manager.get_computed_blocks(session)[1] == 8


def test_hits_are_the_same_with_and_without_kept_hashes() -> None:
    manager = make_manager(40)
    first = make_request("first", PROMPT)
    admit(manager, first)
    manager.free(first)
    late = make_request("late", [*PROMPT[:37], *range(700, 720)])
    prompt = manager._prompts.get(late)
    kept = manager.manager.match(prompt.token_ids, block_hashes=prompt.block_hashes)
    fresh = manager.manager.match(np.array(late._all_token_ids, np.int32))
    assert kept.num_tokens == fresh.num_tokens == 37
    assert kept.block_ids.tolist() == fresh.block_ids.tolist() and kept.chain_digest == fresh.chain_digest


@pytest.mark.parametrize(
    ("events", "connector", "is_stock", "hashes"),
    [
        (False, None, False, False),
        (True, None, False, True),
        (False, "a connector", False, True),
        (False, None, True, True),
    ],
    ids=["Rose's manager", "KV events", "connector", "vLLM's manager"],
)
def test_vllm_hashes_prompts_only_where_someone_reads_it(
    events: bool, connector: Any, is_stock: bool, hashes: bool
) -> None:
    init_none_hash(sha256_cbor)
    manager = object() if is_stock else make_manager(11, enable_kv_cache_events=events)
    core: Any = SimpleNamespace(
        scheduler=SimpleNamespace(kv_cache_manager=manager, connector=connector),
        request_block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256_cbor),
        mm_receiver_cache=None,
    )
    request = make_request("a", PROMPT)
    wire = EngineCoreRequest("a", PROMPT, None, request.sampling_params, None, 0.0, None, None, None)
    preprocess = wrap_preprocess_add_request(inspect.unwrap(EngineCore.preprocess_add_request))
    made, _ = preprocess(core, wire)
    assert made._all_token_ids == PROMPT
    assert len(made.block_hashes) == (len(PROMPT) // BLOCK_SIZE if hashes else 0)
    made.append_output_token_ids(list(range(BLOCK_SIZE)))
    assert len(made.block_hashes) == ((len(PROMPT) + BLOCK_SIZE) // BLOCK_SIZE if hashes else 0)
