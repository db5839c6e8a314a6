"""Drafts on a GPU, where lookup, layers, draws and acceptance are one captured graph: the same text as without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend import LLM
from rose_backend.engine.drafts import Drafts
from rose_backend.kernels.arguments import DraftedRows
from tests.engine.test_drafts import NOT_ADAPTIVE, n_grams, plain_crowd, texts_of
from tests.support.crowd import crowd, tokens_of
from tests.support.near_ties import near_ties
from tests.support.random_checkpoints import write_random_llama, write_random_qwen3
from tests.support.soak import assert_idle, count_completions

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_blocks": 3000, "max_num_seqs": 48}
OPTIONS |= NOT_ADAPTIVE
NUM_REQUESTS = 60


class KnownTexts:
    """Proposes what is known to come on the device, in a captured graph: it knows a text by its first token.

    Args:
        texts: all tokens of one completion of each request, prompts included.
        share: of drafts that are right.
    """

    def __init__(self, texts: Sequence[list[int]], num_drafts: int, share: float) -> None:
        longest = max(map(len, texts)) + num_drafts + 1
        table = torch.zeros(max(text[0] for text in texts) + 1, longest, dtype=torch.int64)
        for text in texts:
            table[text[0], : len(text)] = torch.tensor(text)
        self._table = table.cuda()
        self._offsets = torch.arange(1, num_drafts + 1, device="cuda")
        is_right = torch.rand(longest, generator=torch.Generator().manual_seed(6)) < share
        self._is_right = is_right.cuda()

    def __call__(self, rows: DraftedRows) -> torch.Tensor:
        first = rows.token_ids[rows.slots, 0].long().clamp(0, len(self._table) - 1)
        places = (rows.num_computed_tokens.long()[:, None] + self._offsets).clamp(0, self._table.shape[1] - 1)
        right = self._table[first[:, None], places]
        return torch.where(self._is_right[places], right, (right - 1).clamp(min=-1))


Case = tuple[list[list[int]], list[Any], list[list[list[int]]]]


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> Case:
    """Return prompts, each with a first token of its own, parameters, and the texts without drafts."""
    prompts, params = plain_crowd(NUM_REQUESTS, seed=17, max_tokens=60)
    prompts = [[index + 5, *prompt] for index, prompt in enumerate(prompts)]
    with LLM(str(tiny_model_path), **OPTIONS) as llm:
        return prompts, params, tokens_of(llm, prompts, params)


def test_no_draw_of_this_crowd_is_a_near_tie(tiny_model_path: Path, case: Case) -> None:
    assert near_ties(tiny_model_path, *case) == []


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 7])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.0, None], ids=["right", "some", "wrong", "looked up"])
def test_same_text(
    tiny_model_path: Path,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
    num_drafts: int,
) -> None:
    prompts, params, expected = case
    if share is not None:
        texts = texts_of(prompts, [each[:1] for each in expected])
        proposed = KnownTexts(texts, num_drafts, share)
        monkeypatch.setattr(Drafts, "_look_up", lambda _, rows: proposed(rows))
    num_others = count_completions()
    with LLM(str(tiny_model_path), speculative_config=n_grams(num_drafts), **OPTIONS) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert tokens_of(llm, prompts, params) == expected
        assert_idle(llm.core, num_others=num_others)
        stats = llm.stats
    assert stats.spec_decode_num_draft_tokens == num_drafts * stats.spec_decode_num_drafts > 500
    accepted = stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens
    # Of a request's completions only the first one's text is known.
    least, most = {1.0: (0.1, 1), 0.7: (0.05, 0.9), 0.0: (0, 0.01), None: (0.001, 1)}[share]
    assert least <= accepted <= most


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph": False},
        {"run_ahead": 0},
        {"run_ahead": 3},
        {"prefix_cache": False},
        {"max_num_batched_tokens": 61},
        {"num_blocks": 90, "max_model_len": 256},
        {"fused_sampler": False},
        {"fused_kv_append": False},
        {"fused_mlp": False, "fused_add_layernorm": False},
        {"max_num_seqs": 7},
    ],
    ids=str,
)
def test_same_text_whatever_the_path(
    tiny_model_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    prompts, params, expected = case
    proposed = KnownTexts(texts_of(prompts, [each[:1] for each in expected]), 3, 0.8)
    monkeypatch.setattr(Drafts, "_look_up", lambda _, rows: proposed(rows))
    with LLM(str(tiny_model_path), speculative_config=n_grams(3), **{**OPTIONS, **options}) as llm:
        actual = tokens_of(llm, prompts, params)
        llm.core.check_integrity()
        assert llm.stats.spec_decode_num_accepted_tokens > 100
        assert llm.stats.preemptions > 0 or "num_blocks" not in options
    different = [index for index in range(len(prompts)) if actual[index] != expected[index]]
    assert not different, f"requests {different}: {[params[index] for index in different[:3]]}"


def test_same_text_beside_requests_without_drafts(tiny_model_path: Path) -> None:
    """Near ties are looked for in this crowd by ``test_decode_graphs``."""
    prompts, params = crowd(40, seed=7)
    with LLM(str(tiny_model_path), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts, params)
    own = {**OPTIONS, "max_num_seqs": 4, "speculative_config": n_grams(3)}
    with LLM(str(tiny_model_path), **own) as llm:
        assert tokens_of(llm, prompts, params) == expected
        assert llm.stats.spec_decode_num_accepted_tokens > 0


def test_texts_up_to_the_greatest_length(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of the model, past which it has no positions."""
    prompts, params = plain_crowd(8, seed=3)
    prompts = [[index + 5, *([7, 8, 9] * 330)][: 1024 - 3 * index - 1] for index in range(8)]
    params = [type(each)(temperature=0.0, max_tokens=None, ignore_eos=True) for each in params]
    with LLM(str(tiny_model_path), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts, params)
    proposed = KnownTexts(texts_of(prompts, expected), 7, 0.9)
    monkeypatch.setattr(Drafts, "_look_up", lambda _, rows: proposed(rows))
    with LLM(str(tiny_model_path), speculative_config=n_grams(7), run_ahead=2, **OPTIONS) as llm:
        assert tokens_of(llm, prompts, params) == expected
        llm.core.check_integrity()
        assert llm.stats.spec_decode_num_accepted_tokens > 0


@pytest.mark.parametrize("write", [write_random_llama, write_random_qwen3], ids=["llama", "qwen3"])
def test_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    path = write(tmp_path)
    prompts, params = plain_crowd(30, seed=5, max_tokens=40)
    prompts = [[index + 5, *prompt] for index, prompt in enumerate(prompts)]
    with LLM(str(path), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts, params)
    if near_ties(path, prompts, params, expected):
        pytest.fail("choose another crowd: a draw of this one is a near tie")
    proposed = KnownTexts(texts_of(prompts, [each[:1] for each in expected]), 3, 0.8)
    monkeypatch.setattr(Drafts, "_look_up", lambda _, rows: proposed(rows))
    with LLM(str(path), speculative_config=n_grams(3), **OPTIONS) as llm:
        assert tokens_of(llm, prompts, params) == expected
        llm.core.check_integrity()
        assert llm.stats.spec_decode_num_accepted_tokens > 100
