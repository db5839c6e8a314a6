"""Drafts of an EAGLE-3 head on a GPU: captured steps propose what the head does over whole texts, and texts are the
same."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rose_backend import LLM, SamplingParams
from rose_backend.engine import scheduler
from rose_backend.engine.head_drafts import HeadDrafts
from rose_backend.kernels.arguments import DraftedRows
from tests.engine.test_drafts import NOT_ADAPTIVE, plain_crowd
from tests.engine.test_head_drafts import VOCAB_SIZE, Pair, write_pair
from tests.engine.test_side_passes_on_gpu import Server
from tests.support.crowd import crowd, tokens_of
from tests.support.eagle_checkpoints import write_right_pair
from tests.support.eagle_reference import DenseHead
from tests.support.near_ties import near_ties
from tests.support.soak import assert_idle, count_completions

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_blocks": 3000, "max_num_seqs": 48}
OPTIONS |= NOT_ADAPTIVE
NUM_REQUESTS, NUM_DRAFTS, MAX_TOKENS = 40, 3, 40
MAX_STEPS = 4096
NEAR_TIE = 1e-3


def often_right(path: Path) -> Pair:
    return Pair(*write_right_pair(path, share=0.008, vocab_size=VOCAB_SIZE))


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "llama": lambda path: write_pair(path, "llama", [0, 2, 3]),
    "qwen3": lambda path: write_pair(path, "qwen3", [3, 1], norm_before_residual=True, rope_theta=1e6),
    "often right": often_right,
}


class Log:
    """Keeps what the head says in each step, in captured graphs, too: it knows a text by its first token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._num_steps = self._kept = torch.empty(0)
        ask = HeadDrafts._ask_head

        def logged(drafts: HeadDrafts, rows: DraftedRows) -> torch.Tensor:
            proposed = ask(drafts, rows)
            if proposed.is_cuda:
                self._keep(rows, proposed)
            return proposed

        monkeypatch.setattr(HeadDrafts, "_ask_head", logged)

    def begin(self) -> None:
        """Forget what was kept, before an engine is made."""
        self._num_steps = torch.zeros(1, dtype=torch.int64, device="cuda")
        shape = MAX_STEPS, OPTIONS["max_num_seqs"], 2 + NUM_DRAFTS
        self._kept = torch.full(shape, -1, dtype=torch.int64, device="cuda")

    def _keep(self, rows: DraftedRows, proposed: torch.Tensor) -> None:
        first = rows.token_ids[rows.slots, 0].long()
        kept = torch.cat([first[:, None], rows.num_computed_tokens.long()[:, None], proposed], dim=1)
        padded = F.pad(kept, (0, 0, 0, self._kept.shape[1] - len(kept)), value=-1)
        self._kept.index_copy_(0, self._num_steps % MAX_STEPS, padded[None])
        self._num_steps += 1

    def read(self, texts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
        """Return the drafts after each part of a text that they were made for.

        Args:
            texts: each with a first token of its own; places past their ends have no block.
        """
        assert 0 < self._num_steps.item() < MAX_STEPS
        by_first = {text[0]: text for text in texts}
        said = {}
        for first, computed, *drafts in self._kept.flatten(0, 1).tolist():
            if computed >= 1 and computed + 1 + NUM_DRAFTS <= len(by_first[first]):
                said[tuple(by_first[first][: computed + 1])] = drafts
        return said


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of one completion each, which share all but the first token with others."""
    rng = random.Random(11)
    stem = rng.sample(range(1, VOCAB_SIZE), 70)
    prompts = [[index + 5, *stem[: rng.choice((2, 15, 40, 69))]] for index in range(NUM_REQUESTS)]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=index, temperature=0.3 * (index % 2))
        for index in range(NUM_REQUESTS)
    ]
    return prompts, params


@pytest.mark.parametrize("name", PAIRS)
def test_captured_steps_say_what_launched_ones_and_whole_texts_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pair, log = PAIRS[name](tmp_path), Log(monkeypatch)
    prompts, params = prompts_and_params()
    with LLM(str(pair.model), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts, params)
    assert near_ties(pair.model, prompts, params, expected) == [], "choose other prompts"
    texts = [prompt + tokens[0] for prompt, tokens in zip(prompts, expected, strict=True)]
    drafts = {"speculative_config": pair.drafts(NUM_DRAFTS)}
    said: dict[bool, dict[tuple[int, ...], list[int]]] = {}
    for is_captured in (True, False):
        log.begin()
        with LLM(str(pair.model), cuda_graph=is_captured, **drafts, **OPTIONS) as llm:
            assert (len(llm.core._runner.decoder._draft_graphs._graphs) > 0) == is_captured
            for _ in range(2):  # the second time from the prefix cache
                assert tokens_of(llm, prompts, params) == expected
            llm.core.check_integrity()
            by_place = llm.stats.spec_decode_num_accepted_tokens_per_pos
        said[is_captured] = log.read(texts)
    assert name != "often right" or by_place[0] > by_place[1] > by_place[2] > 50
    dense, num_compared = DenseHead(*pair), 0
    for known in random.Random(2).sample(sorted(said[True].keys() & said[False].keys()), 200):
        reference = dense.propose_with_margins(list(known), NUM_DRAFTS)
        if min(margin for _, margin in reference) > NEAR_TIE:
            num_compared += 1
            assert said[True][known] == said[False][known] == [draft for draft, _ in reference], len(known)
    assert num_compared > 150


def test_steps_without_drafts_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, log, rng = often_right(tmp_path), Log(monkeypatch), random.Random(4)
    prompts, params = prompts_and_params()
    with LLM(str(pair.model), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts, params)
    texts = [prompt + tokens[0] for prompt, tokens in zip(prompts, expected, strict=True)]
    log.begin()
    drafts = {"speculative_config": pair.drafts(NUM_DRAFTS), "adaptive_drafts": True}
    with LLM(str(pair.model), **{**OPTIONS, **drafts}) as llm:
        adaptive: Any = llm.core._pipeline._adaptive_drafts
        adaptive.choose = lambda _: NUM_DRAFTS * (rng.random() < 0.7)
        assert tokens_of(llm, prompts, params) == expected
        llm.core.check_integrity()
    said, dense = log.read(texts), DenseHead(*pair)
    for known in rng.sample(sorted(said), 100):
        reference = dense.propose_with_margins(list(known), NUM_DRAFTS)
        if min(margin for _, margin in reference) > NEAR_TIE:
            assert said[known] == [draft for draft, _ in reference], len(known)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Any, Any, Any]:
    """Return a model and its head, a crowd, and its texts without drafts."""
    pair = often_right(tmp_path_factory.mktemp("pair"))
    prompts, params = plain_crowd(60, seed=17, max_tokens=60)
    with LLM(str(pair.model), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts, params)
    assert near_ties(pair.model, prompts, params, expected) == [], "choose another crowd"
    return pair, prompts, params, expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 0},
        {"run_ahead": 3},
        {"prefix_cache": False},
        {"token_granular_hits": False},
        {"max_num_batched_tokens": 200},
        {"num_blocks": 90, "max_model_len": 256},
        {"fused_sampler": False},
        {"fused_kv_append": False},
        {"fused_mlp": False, "fused_add_layernorm": False},
        {"max_num_seqs": 7},
    ],
    ids=str,
)
def test_same_text_whatever_the_path(case: tuple[Pair, Any, Any, Any], options: dict[str, Any]) -> None:
    pair, prompts, params, expected = case
    num_others = count_completions()
    for num_drafts in (3, 7):
        drafts = {"speculative_config": pair.drafts(num_drafts)}
        with LLM(str(pair.model), **{**OPTIONS, **drafts, **options}) as llm:
            actual = tokens_of(llm, prompts, params)
            assert_idle(llm.core, num_others=num_others)
            assert llm.stats.spec_decode_num_accepted_tokens > 50
            assert llm.stats.preemptions > 0 or "num_blocks" not in options
        different = [index for index in range(len(prompts)) if actual[index] != expected[index]]
        assert not different, f"requests {different}: {[params[index] for index in different[:3]]}"


def test_same_text_beside_requests_without_drafts(case: tuple[Pair, Any, Any, Any]) -> None:
    pair = case[0]
    prompts, params = crowd(40, seed=7)
    with LLM(str(pair.model), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts, params)
    own = {**OPTIONS, "max_num_seqs": 4, "speculative_config": pair.drafts(3)}
    with LLM(str(pair.model), **own) as llm:
        assert tokens_of(llm, prompts, params) == expected
        assert llm.stats.spec_decode_num_accepted_tokens > 0


def test_prompts_beside_decodes(case: tuple[Pair, Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_PROMPT_TOKENS_AMONG_DECODES", 0)
    pair, prompts, params, expected = case
    own = {name: value for name, value in OPTIONS.items() if name != "device"}
    server = Server(pair.model, speculative_config=pair.drafts(3), **own)
    with closing(server.core):
        rng = random.Random(2)
        for round_number in range(4):
            aborted = server.serve(prompts, params, rng, name := f"round {round_number}")
            for index in set(range(len(prompts))) - aborted:
                tokens = [each.token_ids for each in server.outputs[f"{name} {index}"].outputs]
                assert tokens == expected[index], f"request {index}: {params[index]}"
        assert server.num_begun > 8
        assert server.core.stats.spec_decode_num_accepted_tokens > 100


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path: Path, dtype: str) -> None:
    """A head that is right is right there, too, but where rounding decides."""
    pair = Pair(*write_right_pair(tmp_path, share=0.0, vocab_size=VOCAB_SIZE))
    prompts, _ = prompts_and_params()
    drafts = {"speculative_config": pair.drafts(NUM_DRAFTS)}
    with LLM(str(pair.model), **{**OPTIONS, **drafts, "dtype": dtype}) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True))
        llm.core.check_integrity()
        stats = llm.stats
    assert stats.spec_decode_num_accepted_tokens > 0.9 * stats.spec_decode_num_draft_tokens > 500
