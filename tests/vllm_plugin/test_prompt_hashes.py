"""Which requests may share blocks, and how far: adapters, tenants, images, embeddings; and what is hashed once."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from rose_backend.block_manager.prefix_index import PrefixHasher
from rose_backend.vllm_plugin.kv_cache import prompt_hashes
from rose_backend.vllm_plugin.kv_cache.prompt_hashes import (
    NEVER_SHARED,
    ItemIds,
    namespace_of,
    wrap_preprocess_add_request,
)
from tests.support.vllm_plugin.managers import BLOCK_SIZE, admit, look_up, make_manager, make_request
from tests.support.vllm_plugin.traffic import make_hasher

PROMPT = list(range(40))
ADAPTERS = {
    "none": None,
    "a": LoRARequest("a", 1, "/adapters/one"),
    "a under another number": LoRARequest("a", 2, "/adapters/one"),
    "a with other weights": LoRARequest("a", 1, "/adapters/two"),
    "b with a's weights": LoRARequest("b", 1, "/adapters/one"),
}
SALTS = (None, "", "x", "y", "('lora', 'a', '/adapters/one')")


def keyed_request(name: str, adapter: str, salt: str | None) -> Any:
    return make_request(name, PROMPT, salt, lora_request=ADAPTERS[adapter])


def test_requests_share_exactly_where_vllms_hashes_are_equal() -> None:
    hasher = make_hasher(hash_function=sha256_cbor)
    kinds = list(itertools.product(ADAPTERS, SALTS))
    hashes = [hasher(keyed_request("r", *kind))[0] for kind in kinds]
    shared = 0
    for (first, first_hash), (second, second_hash) in itertools.product(
        zip(kinds, hashes, strict=True), repeat=2
    ):
        manager = make_manager(40)
        admit(manager, keyed_request("first", *first))
        num_hits = look_up(manager, keyed_request("second", *second))
        # To the token, as always, or nothing at all.
        assert num_hits == (39 if first_hash == second_hash else 0), (first, second)
        shared += num_hits > 0
    assert len(kinds) < shared < len(kinds) ** 2


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
    manager = object() if is_stock else make_manager(11, enable_kv_cache_events=events)
    core: Any = SimpleNamespace(
        scheduler=SimpleNamespace(kv_cache_manager=manager, connector=connector),
        request_block_hasher=make_hasher(hash_function=sha256_cbor),
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


# Multimodal items: hits end at any token, inside an item, too, and never behind a difference.
IMAGE = 90
"""Placeholder token."""


def item(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


def with_items(name: str, *parts: Any) -> Request:
    """Make a request of texts (lists of tokens) and images (identifier and length), one behind the other."""
    tokens: list[int] = []
    features = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
        else:
            features.append(item(part[0], len(tokens), part[1]))
            tokens += [IMAGE] * part[1]
    request = make_request(name, tokens)
    request.mm_features = features
    return request


def hits_of(first: Request, second: Request) -> int:
    manager = make_manager(40)
    admit(manager, first)
    num_hits = look_up(manager, second)
    manager.manager.check_integrity()
    return num_hits


TEXT = list(range(10))
CASES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], int]] = {
    "the same image": ((TEXT, ("a", 20), TEXT), (TEXT, ("a", 20), TEXT), 39),
    "another image": ((TEXT, ("a", 20), TEXT), (TEXT, ("b", 20), TEXT), 10),
    "another image of another length": ((TEXT, ("a", 20), TEXT), (TEXT, ("b", 21), TEXT), 10),
    "one name for images of two lengths": ((TEXT, ("a", 20), TEXT), (TEXT, ("a", 21), TEXT), 10),
    "another text behind it": ((TEXT, ("a", 20), TEXT), (TEXT, ("a", 20), [1, 2, 3]), 30),
    "image first": ((("a", 20), TEXT), (("a", 20), TEXT, TEXT), 30),
    "another image first": ((("a", 20), TEXT), (("b", 20), TEXT), 0),
    "text where an image was": ((TEXT, ("a", 20), TEXT), (TEXT, [IMAGE] * 20, TEXT), 10),
    "an image where text was": ((TEXT, [IMAGE] * 20, TEXT), (TEXT, ("a", 20), TEXT), 10),
    "a second image": ((TEXT, ("a", 20), ("b", 20), TEXT), (TEXT, ("a", 20), ("c", 20), TEXT), 30),
    "images the other way round": ((TEXT, ("a", 9), ("b", 9)), (TEXT, ("b", 9), ("a", 9)), 10),
    "an image twice": ((TEXT, ("a", 9), ("a", 9), TEXT), (TEXT, ("a", 9), TEXT), 19),
    "an image last": ((TEXT, ("a", 20)), (TEXT, ("a", 20)), 29),
}


@pytest.mark.parametrize("name", CASES)
def test_hits_end_where_prompts_differ(name: str) -> None:
    first, second, expected = CASES[name]
    assert hits_of(with_items("first", *first), with_items("second", *second)) == expected


def test_a_prompt_that_was_cut_inside_an_image_is_found_to_the_token() -> None:
    manager = make_manager(40)
    first = with_items("first", TEXT, ("a", 30), TEXT)
    manager.new_step_starts()
    assert manager.allocate_slots(first, 23) is not None
    first.num_computed_tokens = 23
    manager.free(first)
    assert look_up(manager, with_items("second", TEXT, ("a", 30))) == 23
    assert manager.get_computed_blocks(with_items("third", TEXT, ("b", 30)))[1] == 10


def test_one_name_for_items_of_other_tokens() -> None:
    """A client may give two items one name; a video's placeholders have the times of its pictures among them."""
    first, second = (with_items(name, TEXT, ("a", 20), TEXT) for name in ("first", "second"))
    second._all_token_ids[20] = 5
    assert hits_of(first, second) == 10


def test_items_that_overlap_are_one() -> None:
    """Pictures of a video and its sound share positions: another one of either is another content."""

    def video(name: str, pictures: str, sound: str) -> Request:
        request = make_request(name, [*TEXT, *[IMAGE] * 20, *TEXT])
        request.mm_features = [item(pictures, 10, 20), item(sound, 14, 6)]
        return request

    for pictures, sound in itertools.product("ab", "cd"):
        expected = 39 if (pictures, sound) == ("a", "c") else 10
        assert hits_of(video("first", "a", "c"), video("second", pictures, sound)) == expected


def test_items_are_told_apart_by_all_that_vllm_says_of_them() -> None:
    """A new field may tell two items apart that have the same name and place."""
    fields = {each.name for each in dataclasses.fields(MultiModalFeatureSpec)}
    assert fields == {"data", "modality", "identifier", "mm_position", "mm_hash"}
    assert {each.name for each in dataclasses.fields(PlaceholderRange)} == {"offset", "length", "is_embed"}
    assert "mm_features" in {each.name for each in dataclasses.fields(NewRequestData)}


def random_prompt(rng: random.Random) -> tuple[Any, ...]:
    """Make a prompt of few texts and images, so that two of them often begin alike."""
    lengths = {"a": 7, "b": 7, "c": 19}
    parts: list[Any] = []
    for _ in range(rng.randrange(1, 6)):
        name = rng.choice(["a", "b", "c", "text", "text"])
        parts.append([IMAGE, 1, 2, 3][: rng.randrange(1, 5)] if name == "text" else (name, lengths[name]))
    return *parts, [5]


def contents_of(request: Request) -> list[Any]:
    contents: list[Any] = list(request._all_token_ids)
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        contents[offset : offset + length] = [(feature.identifier, index) for index in range(length)]
    return contents


def test_random_prompts_share_what_vllms_hashes_share_and_more() -> None:
    hasher = make_hasher(hash_function=sha256_cbor)
    rng = random.Random(1)
    num_inside = 0
    for _ in range(400):
        first, second = (with_items(name, *random_prompt(rng)) for name in ("first", "second"))
        pairs = zip(contents_of(first), contents_of(second), strict=False)
        num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        hashes = zip(hasher(first), hasher(second), strict=False)
        num_blocks = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], hashes))
        assert num_blocks == num_equal // BLOCK_SIZE
        expected = min(num_equal, second.num_tokens - 1)
        assert hits_of(first, second) == (expected if expected >= 4 else 0)
        num_inside += num_equal % BLOCK_SIZE > 0
    assert num_inside > 100


def test_parts_of_a_prompt_have_the_ids_of_the_whole() -> None:
    ids = ItemIds(BLOCK_SIZE)
    request = with_items("a", TEXT, ("a", 7), ("b", 5), [IMAGE] * 3, ("a", 7), TEXT)
    request.append_output_token_ids([IMAGE, 7])
    whole = ids.tokens_of(request)
    assert whole == [*TEXT, *[-1] * 7, *[-2] * 5, *[IMAGE] * 3, *[-1] * 7, *TEXT, IMAGE, 7]
    for start, end in itertools.combinations(range(len(whole) + 1), 2):
        assert ids.tokens_of(request, start, end) == whole[start:end]
    assert request._all_token_ids[10] == IMAGE


def embedded(name: str, embeddings: torch.Tensor, **options: Any) -> Request:
    return make_request(name, None, prompt_embeds=embeddings, **options)


def test_prompt_embeddings_are_shared_as_vllms_hashes_say_and_to_the_token() -> None:
    rows = torch.randn(40, 8)
    other, shorter, longer = rows.clone(), rows[:25], torch.cat((rows, rows))
    other[20, 3] += 1
    assert hits_of(embedded("first", rows), embedded("second", rows.clone())) == 39
    # Blocks of embeddings are the same or they are not.
    assert hits_of(embedded("first", rows), embedded("second", other)) == 16
    assert hits_of(embedded("first", rows), embedded("second", longer)) == 32
    assert hits_of(embedded("first", rows), embedded("second", shorter)) == 16
    assert hits_of(embedded("first", rows), make_request("second", [0] * 40)) == 0
    # Tokens that follow.
    answered = embedded("first", rows)
    answered.append_output_token_ids([5, 6])
    again = embedded("second", rows)
    again.append_output_token_ids([5, 7, 8])
    assert hits_of(answered, again) == 41


def test_tokens_between_prompt_embeddings_are_told_from_them() -> None:
    rows, tokens = torch.zeros(40, 8), [7] * 20 + [0] * 20
    masks = [[True] * 20 + [False] * 20, [True] * 40]
    first, second = (
        Request("r", tokens, SamplingParams(), None, prompt_embeds=rows, prompt_is_token_ids=mask)
        for mask in masks
    )
    other = Request("r", [8] * 40, SamplingParams(), None, prompt_embeds=rows, prompt_is_token_ids=masks[1])
    assert hits_of(first, second) == 16
    assert hits_of(second, other) == 0


def test_a_dropped_item_is_computed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_hashes, "MAX_ITEMS", 2)
    manager = make_manager(40)
    parts = (TEXT, ("a", 20), TEXT)
    admit(manager, with_items("first", *parts))
    for name in ("b", "c"):
        admit(manager, with_items(name, TEXT, (name, 20)))
    assert look_up(manager, with_items("second", *parts)) == 10
    assert manager.get_computed_blocks(with_items("third", TEXT, ("c", 20), TEXT))[1] == 30


def test_a_waiting_prompt_keeps_the_ids_that_it_was_hashed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_hashes, "MAX_ITEMS", 1)
    manager = make_manager(40)
    waiting = with_items("waiting", ("a", 20), TEXT)
    assert manager.get_computed_blocks(waiting)[1] == 0
    before = manager._prompts.get(waiting).token_ids.tolist()
    manager._prompts._item_ids.tokens_of(with_items("other", ("b", 20)))
    waiting._all_token_ids.extend(TEXT)
    waiting.num_prompt_tokens += len(TEXT)
    assert manager._prompts.get(waiting).token_ids.tolist() == [*before, *TEXT]


def test_no_prefix_reaches_behind_an_item_without_an_id_of_its_own() -> None:
    manager = make_manager(40)
    manager._prompts._item_ids._unused = itertools.count(NEVER_SHARED + 1, -1)
    for name, expected in (("a", 39), ("b", 10), ("c", 10)):
        parts = (TEXT, (name, 20), TEXT)
        first = with_items(f"first {name}", *parts)
        admit(manager, first)
        manager.free(first)
        manager.new_step_starts()
        # Not even the same item is found again once the ids are used up.
        assert manager.get_computed_blocks(with_items(f"second {name}", *parts))[1] == expected
        assert manager.get_computed_blocks(with_items(f"third {name}", TEXT, ("z", 20), TEXT))[1] == 10
    manager.manager.check_integrity()


def test_items_do_not_change_the_namespace() -> None:
    salted = [with_items("a", ("a", 20), TEXT), with_items("b", ("a", 20), TEXT)]
    salted[1].cache_salt = "salt"
    assert hits_of(*salted) == 0
    assert namespace_of(salted[0]) == b"" != namespace_of(salted[1])
