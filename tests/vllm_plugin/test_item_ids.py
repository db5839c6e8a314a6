"""Multimodal items in prefix lookups: hits end at any token, inside an item, too, and never behind a difference."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request

from rose_backend.vllm_plugin.kv_cache import prompt_hashes
from rose_backend.vllm_plugin.kv_cache.prompt_hashes import NEVER_SHARED, ItemIds, namespace_of
from tests.vllm_plugin.test_kv_cache_manager import BLOCK_SIZE, admit, make_manager, make_request

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
    manager.new_step_starts()
    num_hits: int = manager.get_computed_blocks(second)[1]
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
    manager.new_step_starts()
    assert manager.get_computed_blocks(with_items("second", TEXT, ("a", 30)))[1] == 23
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
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256_cbor)
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
    return Request(name, None, SamplingParams(max_tokens=50), None, prompt_embeds=embeddings, **options)


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
    manager.new_step_starts()
    assert manager.get_computed_blocks(with_items("second", *parts))[1] == 10
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
