"""Drafts of an EAGLE-3 head: texts are those without drafts, and the head proposes what it would over whole texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.kernels.arguments import DraftedRows
from tests.engine.test_drafts import NOT_ADAPTIVE, WIDTHS, Drafter, plain_crowd, texts_of
from tests.support.crowd import crowd, tokens_of
from tests.support.eagle_checkpoints import write_eagle3_head
from tests.support.eagle_reference import DenseHead
from tests.support.llama_checkpoints import write_checkpoint

VOCAB_SIZE = 2560
"""Of the tokens of ``crowd``."""


class Pair(NamedTuple):
    """A model and its head."""

    model: Path
    head: Path

    def drafts(self, num_drafts: int) -> dict[str, Any]:
        return {"method": "eagle3", "model": str(self.head), "num_speculative_tokens": num_drafts}


def write_pair(path: Path, case: str, layers: list[int], **changes: Any) -> Pair:
    model = write_checkpoint(path / "model", case, vocab_size=VOCAB_SIZE, num_hidden_layers=4)
    known = changes.pop("draft_vocab_size", 1000)
    head = write_eagle3_head(
        path / "head",
        model,
        draft_vocab_size=known,
        std=0.2,
        eagle_aux_hidden_state_layer_ids=layers,
        **changes,
    )
    return Pair(model, head)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a model of each family that has published heads; the second head is asked for other layers' states."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        return write_pair(path, "llama", [0, 2, 3])
    return write_pair(path, "qwen3", [3, 1], norm_before_residual=True, rope_theta=1e6)


MakeEngine = Callable[..., LLM]


@pytest.fixture
def make_engine(pair: Pair) -> Iterator[MakeEngine]:
    """Return a function that makes engines with the head, checked and closed at the end, or without if ``num_drafts``
    is 0."""
    made: list[LLM] = []

    def make(num_drafts: int = 3, widths: tuple[int, ...] = WIDTHS, **options: Any) -> LLM:
        drafts = {"speculative_config": pair.drafts(num_drafts)} if num_drafts else {}
        made.append(
            LLM(
                str(pair.model),
                **{"dtype": "float32", "max_num_seqs": 24, "num_blocks": 800}
                | NOT_ADAPTIVE
                | drafts
                | options,
            )
        )
        made[-1].core._runner.decoder.widths = widths
        return made[-1]

    yield make
    for llm in made:
        llm.core.check_integrity()
        llm.close()


class Mixed:
    """Asks the head, notes what it says, and lets what is known to come be verified in place of some of that.

    Args:
        texts: all tokens of each completion, prompts included; one that is in none of them gets the head's drafts.
    """

    def __init__(self, llm: LLM, num_drafts: int, texts: list[list[int]]) -> None:
        self._drafts = llm.core._runner.decoder.drafts
        self._ask = self._drafts.propose
        self._right = Drafter("some", num_drafts, texts)
        self.proposed: list[tuple[list[int], list[int]]] = []
        """Known tokens, and the head's drafts after them."""
        self._drafts.propose = self

    def __call__(self, rows: DraftedRows) -> torch.Tensor:
        own, right = self._ask(rows), self._right(rows)
        for row, computed in enumerate(rows.num_computed_tokens.tolist()):
            if computed >= 1:
                known = rows.token_ids[rows.slots[row], : computed + 1].tolist()
                self.proposed.append((known, own[row].tolist()))
        return torch.where(right >= 0, right, own)


@pytest.mark.parametrize(("run_ahead", "num_drafts"), [(0, 3), (1, 1), (2, 7)])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["head", "mixed"])
def test_same_text(make_engine: MakeEngine, run_ahead: int, num_drafts: int, is_mixed: bool) -> None:
    prompts, params = plain_crowd(40, seed=1)
    expected = tokens_of(make_engine(0), prompts, params)
    drafting = make_engine(num_drafts, run_ahead=run_ahead)
    if is_mixed:
        Mixed(drafting, num_drafts, texts_of(prompts, expected))
    assert tokens_of(drafting, prompts, params) == expected
    stats = drafting.stats
    assert stats.generated_tokens == sum(len(one) for completions in expected for one in completions)
    assert stats.spec_decode_num_draft_tokens == num_drafts * stats.spec_decode_num_drafts > 200
    assert not is_mixed or stats.spec_decode_num_accepted_tokens > 100


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_same_text_beside_requests_without_drafts(make_engine: MakeEngine, run_ahead: int) -> None:
    prompts, params = crowd(60, seed=7, max_tokens=25)
    expected = make_engine(0).generate(prompts, params)
    tokens = [[c.token_ids for c in output.outputs] for output in expected]
    drafting = make_engine(widths=(2, 3), run_ahead=run_ahead, max_num_seqs=3)
    Mixed(drafting, 3, texts_of(prompts, tokens))
    for output, other in zip(drafting.generate(prompts, params), expected, strict=True):
        for ours, theirs in zip(output.outputs, other.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids and ours.text == theirs.text
            assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
            for mine, reference in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                assert mine.keys() == reference.keys()
                assert all(abs(mine[token].logprob - reference[token].logprob) < 1e-4 for token in mine)
    assert drafting.stats.spec_decode_num_accepted_tokens > 0


LIMITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 90},
    "whole blocks": {"token_granular_hits": False},
    "small blocks": {"block_size": 4, "num_blocks": 3000},
    "pressure": {"num_blocks": 28, "max_model_len": 256, "max_num_batched_tokens": 90},
    "separate writes": {"fused_kv_append": False},
    "no cache": {"prefix_cache": False},
}


@pytest.mark.parametrize("limits", LIMITS)
def test_proposals_are_those_over_whole_texts(pair: Pair, make_engine: MakeEngine, limits: str) -> None:
    """After drafts that were accepted, and others, hits, chunks, siblings, preemptions and steps without drafts."""
    rng, num_drafts = random.Random(4), 3
    stem = [rng.randrange(1, VOCAB_SIZE) for _ in range(41)]
    prompts = [
        # Siblings of a prompt that ends with a block share its last place, see ``HeadDrafts``.
        [
            *stem[: rng.choice((0, 9, 41))],
            1 + index,
            *rng.sample(range(1, VOCAB_SIZE), rng.choice((1, 5, 32))),
        ]
        for index in range(20)
    ]
    params = [
        SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            seed=index,
            temperature=0.7 * (index % 2),
            n=1 + 2 * (index % 4 == 1),
        )
        for index in range(20)
    ]
    prompts = [[*prompt, 7] if len(prompt) % 4 == 0 else prompt for prompt in prompts]
    expected = tokens_of(make_engine(0), prompts, params)
    drafting = make_engine(num_drafts, run_ahead=1, adaptive_drafts=True, **LIMITS[limits])
    drafting.core._pipeline._adaptive_drafts.choose = lambda _: num_drafts * (rng.random() < 0.8)
    mixed = Mixed(drafting, num_drafts, texts_of(prompts, expected))
    for _ in range(2):
        assert tokens_of(drafting, prompts, params) == expected
    stats = drafting.stats
    assert stats.spec_decode_num_accepted_tokens > 100
    assert stats.preemptions > 0 or limits != "pressure"
    assert stats.prefix_cache_hits > 100 or limits == "no cache"
    dense = DenseHead(*pair)
    # Places past a request's greatest length have no block.
    lengths = {tuple(prompt): len(prompt) + 20 - num_drafts for prompt in prompts}
    inside = [
        (known, drafts)
        for known, drafts in mixed.proposed
        if any(
            len(known) <= most and tuple(known[: len(prompt)]) == prompt for prompt, most in lengths.items()
        )
    ]
    chosen = rng.sample(inside, min(len(inside), 250))
    different = [known for known, drafts in chosen if dense.propose(known, num_drafts) != drafts]
    assert not different, (
        f"{len(different)} of {len(chosen)}, after {[len(known) for known in different]} tokens"
    )
    assert len({tuple(drafts) for _, drafts in chosen}) > 50
