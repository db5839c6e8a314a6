"""Drafts of an EAGLE-3 head: texts are those without drafts, and the head proposes what it would over whole texts."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_backend import LLM, SamplingParams
from rose_backend.engine import scheduler
from rose_backend.kernels.arguments import DraftedRows
from tests.engine.conftest import GREEDY
from tests.engine.test_drafts import NOT_ADAPTIVE, WIDTHS, Clock, Drafter, plain_crowd, texts_of
from tests.support import quantized_checkpoints
from tests.support.crowd import crowd, tokens_of
from tests.support.eagle_checkpoints import write_eagle3_head, write_right_pair
from tests.support.eagle_reference import DenseHead
from tests.support.llama_checkpoints import write_checkpoint
from tests.support.side_passes import SideSteps, serve_with_side_passes

MODELS = Path(__file__).parents[2] / "models"
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
        texts: all tokens of each completion, prompts included; None: the head's drafts are verified.
    """

    def __init__(self, llm: LLM, num_drafts: int, texts: list[list[int]] | None = None) -> None:
        self._drafts = llm.core._runner.decoder.drafts
        self._ask = self._drafts.propose
        self._right = None if texts is None else Drafter("some", num_drafts, texts)
        self.proposed: list[tuple[list[int], list[int]]] = []
        """Known tokens, and the head's drafts after them."""
        self._drafts.propose = self

    def __call__(self, rows: DraftedRows, num_drafts: int) -> torch.Tensor:
        own = self._ask(rows, num_drafts)
        for row, computed in enumerate(rows.num_computed_tokens.tolist()):
            if computed >= 1:
                known = rows.token_ids[rows.slots[row], : computed + 1].tolist()
                self.proposed.append((known, own[row].tolist()))
        return own if self._right is None else self._right(rows, num_drafts)

    def check(self, pair: Pair, num_drafts: int, lengths: dict[tuple[int, ...], int]) -> None:
        """Check some of what the head has said against what it says over whole texts.

        Args:
            lengths: of each prompt, tokens that there may be; places past them have no block.
        """
        inside = [
            (known, drafts)
            for known, drafts in self.proposed
            if any(
                len(known) + num_drafts <= most and tuple(known[: len(prompt)]) == prompt
                for prompt, most in lengths.items()
            )
        ]
        chosen = random.Random(1).sample(inside, min(len(inside), 250))
        dense = DenseHead(*pair)
        different = [known for known, drafts in chosen if dense.propose(known, num_drafts) != drafts]
        assert not different, (
            f"{len(different)} of {len(chosen)}, after {[len(known) for known in different]} tokens"
        )
        assert len({tuple(drafts) for _, drafts in chosen}) > 50


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
    mixed.check(pair, num_drafts, {tuple(prompt): len(prompt) + 20 for prompt in prompts})


@pytest.mark.parametrize("form", ["fp8 blocks", "compressed-tensors channel", "pack-quantized 128"])
def test_same_text_of_a_quantized_model(tmp_path: Path, form: str) -> None:
    """And the head, whose weights are not quantized, proposes what it does beside dense ones that are equal."""
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 4}
    quantized, dense = quantized_checkpoints.write_pair(tmp_path, "qwen3", form, **sizes)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    head = write_eagle3_head(tmp_path / "head", dense, draft_vocab_size=1000, std=0.2, **layers)
    rng, num_drafts = random.Random(8), 3
    prompts = [rng.sample(range(1, VOCAB_SIZE), rng.choice((1, 6, 30))) for _ in range(20)]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=n, temperature=0.7 * (n % 2)) for n in range(20)
    ]
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 24, "num_blocks": 800, **NOT_ADAPTIVE}
    with closing(LLM(str(quantized), **options)) as llm:
        expected = tokens_of(llm, prompts, params)
    drafts = Pair(quantized, head).drafts(num_drafts)
    with closing(LLM(str(quantized), **options, speculative_config=drafts)) as drafting:
        mixed = Mixed(drafting, num_drafts, texts_of(prompts, expected))
        assert tokens_of(drafting, prompts, params) == expected
        assert drafting.stats.spec_decode_num_accepted_tokens > 100
        drafting.core.check_integrity()
    mixed.check(Pair(dense, head), num_drafts, {tuple(prompt): len(prompt) + 20 for prompt in prompts})


@pytest.fixture(scope="module")
def write_right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Pair]:
    """Return a function that writes a model and a head that is right but for a share of what decides; see
    ``write_right_pair``."""
    return lambda share: Pair(
        *write_right_pair(tmp_path_factory.mktemp("right"), share=share, vocab_size=VOCAB_SIZE)
    )


@pytest.mark.parametrize(("run_ahead", "is_late"), [(0, False), (1, True), (3, True)])
def test_prompts_beside_decodes(
    pair: Pair, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, run_ahead: int, is_late: bool
) -> None:
    """What a pass in flight leaves of its prompts is not touched by the steps beside it, nor by requests that end."""
    monkeypatch.setattr(scheduler, "MAX_PROMPT_TOKENS_AMONG_DECODES", 0)
    rng = random.Random(6)
    prompts = [rng.sample(range(1, VOCAB_SIZE), rng.choice((1, 2, 17, 40))) for _ in range(30)]
    params = [
        SamplingParams(
            max_tokens=rng.randrange(2, 25),
            ignore_eos=True,
            seed=index,
            temperature=0.7 * (index % 2),
            n=1 + index % 3,
        )
        for index in range(30)
    ]
    prompts = [[*prompt, 7] if len(prompt) % 16 == 0 else prompt for prompt in prompts]
    expected = tokens_of(make_engine(0), prompts, params)
    drafting = make_engine(run_ahead=run_ahead, max_num_seqs=9)
    mixed = Mixed(drafting, 3, texts_of(prompts, expected))
    side = SideSteps(lambda num_looks: num_looks > 4, is_late=is_late)
    core, outputs, arrivals = serve_with_side_passes(drafting, side), {}, list(range(30))[::-1]
    while arrivals or core.num_unfinished:
        if arrivals and rng.random() < 0.2:
            index = arrivals.pop()
            core.add(core.input_processor.make(prompts[index], params[index], request_id=str(index)))
        if core.can_step:
            outputs |= {output.request_id: output for output in core.step() if output.finished}
    assert side.num_begun > 5
    for index in range(30):
        assert [each.token_ids for each in outputs[str(index)].outputs] == expected[index]
    lengths = {
        tuple(prompt): len(prompt) + (each.max_tokens or 0)
        for prompt, each in zip(prompts, params, strict=True)
    }
    mixed.check(pair, 3, lengths)


def random_prompts(num_prompts: int) -> list[list[int]]:
    rng = random.Random(8)
    return [rng.sample(range(1, VOCAB_SIZE), 3 + 5 * index) for index in range(num_prompts)]


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("num_drafts", [1, 4, 7])
def test_all_drafts_of_a_head_that_is_right_are_accepted(
    write_right: Callable[[float], Pair], run_ahead: int, num_drafts: int
) -> None:
    pair, prompts, options = write_right(0.0), random_prompts(6), {"dtype": "float32", "num_blocks": 200}
    params = replace(GREEDY, max_tokens=1 + 5 * (num_drafts + 1))
    with LLM(str(pair.model), **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    drafts = {"speculative_config": pair.drafts(num_drafts), "run_ahead": run_ahead} | NOT_ADAPTIVE
    with LLM(str(pair.model), **options, **drafts) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
        stats = llm.stats
    # After the first token five steps are enough; the last token of a text may come before the drafts' end.
    assert stats.spec_decode_num_drafts == 5 * len(prompts)
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 40, "block_size": 8}], ids=str)
def test_a_head_that_is_often_right(
    write_right: Callable[[float], Pair], run_ahead: int, options: dict[str, Any]
) -> None:
    pair, prompts, num_drafts = write_right(0.008), random_prompts(10), 3
    params = [
        SamplingParams(temperature=0.2 * (index % 2), seed=index, max_tokens=40, ignore_eos=True)
        for index in range(10)
    ]
    options = {"dtype": "float32", "num_blocks": 400, **options}
    with LLM(str(pair.model), **options) as llm:
        expected = tokens_of(llm, prompts, params)
    drafts = {"speculative_config": pair.drafts(num_drafts), "run_ahead": run_ahead} | NOT_ADAPTIVE
    with LLM(str(pair.model), **options, **drafts) as llm:
        asked = Mixed(llm, num_drafts)
        for _ in range(2):
            assert tokens_of(llm, prompts, params) == expected
        by_place = llm.stats.spec_decode_num_accepted_tokens_per_pos
        num_drafted = llm.stats.spec_decode_num_drafts
    assert num_drafted > by_place[0] > by_place[1] > by_place[2] > 20
    asked.check(pair, num_drafts, {tuple(prompt): len(prompt) + 40 for prompt in prompts})


@pytest.mark.parametrize("max_model_len", [39, 48, 49])
@pytest.mark.parametrize(("run_ahead", "share"), [(0, 0.0), (4, 0.0), (2, 0.008)])
def test_the_last_tokens_before_the_greatest_length(
    write_right: Callable[[float], Pair], run_ahead: int, share: float, max_model_len: int
) -> None:
    pair = write_right(share)
    prompts = [[7 + index] * (max_model_len - 1 - index) for index in range(12)]
    params = [replace(GREEDY, max_tokens=None), SamplingParams(seed=3, max_tokens=None, ignore_eos=True)] * 6
    options = {"dtype": "float32", "max_num_seqs": 12, "max_model_len": max_model_len}
    with LLM(str(pair.model), **options) as llm:
        expected = tokens_of(llm, prompts, params)
    assert [len(one[0]) for one in expected] == list(range(1, 13))
    drafts = {"speculative_config": pair.drafts(7), "run_ahead": run_ahead} | NOT_ADAPTIVE
    # As few blocks as there may be: those of one sequence.
    for num_blocks in (None, -(-max_model_len // 16) + 1):
        with LLM(str(pair.model), num_blocks=num_blocks, **options, **drafts) as llm:
            assert tokens_of(llm, prompts, params) == expected
            assert llm.stats.spec_decode_num_drafts > 0
            llm.core.check_integrity()


def test_prompts_of_one_token(pair: Pair, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed by a decode step, in which there is nothing to ask the head about."""
    prompts, params = [[5 + index] for index in range(6)], replace(GREEDY, max_tokens=20)
    expected = tokens_of(make_engine(0), prompts, [params] * 6)
    # What attention leaves out.
    monkeypatch.setattr(
        "rose_backend.layers.attention.empty_rows", lambda like, *shape: like.new_full(shape, torch.nan)
    )
    drafting = make_engine(7, widths=(8,), block_size=2)
    asked = Mixed(drafting, 7)
    assert tokens_of(drafting, prompts, [params] * 6) == expected
    (short,) = tokens_of(drafting, [[90]], [replace(params, max_tokens=2)])
    assert len(short[0]) == 2
    assert not drafting.core._runner._kv_cache.isnan().any()
    asked.check(pair, 7, {tuple(prompt): 21 for prompt in prompts})


def test_a_head_is_asked_where_it_pays(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts nothing is known of what it would say, so it is tried now and then."""
    prompts, params = random_prompts(3), [replace(GREEDY, max_tokens=900)] * 3
    expected = tokens_of(make_engine(0), prompts, params)
    drafting = make_engine(run_ahead=1, adaptive_drafts=True)
    clock = Clock(drafting, monkeypatch)
    assert tokens_of(drafting, prompts, params) == expected
    late = clock.steps[100:]
    assert late.count(0) > 0.9 * len(late) > 300
    assert set(late) > {0}, late


@pytest.mark.parametrize("name", ["qwen3-moe", "smollm3", "tiny-qwen3-chat-fp8", "tiny-qwen3-chat-w4a16"])
def test_other_models(tmp_path: Path, name: str) -> None:
    embedded = MODELS / name
    model = embedded if embedded.is_dir() else write_checkpoint(tmp_path / "model", name)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    pair = Pair(model, write_eagle3_head(tmp_path / "head", model, draft_vocab_size=400, std=0.2, **layers))
    prompts = [list(range(5 + index, 15 + 3 * index)) for index in range(8)]
    params = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=30, ignore_eos=True)
        for index in range(8)
    ]
    options = {"dtype": "float32", "num_blocks": 300, "max_num_seqs": 8}
    with LLM(str(model), **options) as llm:
        expected = tokens_of(llm, prompts, params)
    with LLM(str(model), speculative_config=pair.drafts(3), **NOT_ADAPTIVE, **options) as llm:
        asked = Mixed(llm, 3, texts_of(prompts, expected))
        assert tokens_of(llm, prompts, params) == expected
        assert llm.stats.spec_decode_num_accepted_tokens > 100
    if model is not embedded:
        asked.check(pair, 3, {tuple(prompt): len(prompt) + 30 for prompt in prompts})


def test_a_block_holds_a_layer_of_the_head(pair: Pair, make_engine: MakeEngine) -> None:
    plain, drafting = make_engine(0), make_engine()
    shapes = [llm.core._runner._kv_cache.shape for llm in (plain, drafting)]
    assert shapes[1] == (shapes[0][0] + 1, *shapes[0][1:])
    space = {"cpu_kvcache_space_gib": 0.01, "num_blocks": None}
    counts = [make_engine(num_drafts, **space).core.manager.num_usable_blocks + 1 for num_drafts in (0, 3)]
    assert counts[1] == int(0.01 * 2**30) // (drafting.core._runner._kv_cache.nbytes // 800)
    assert counts[1] < counts[0]


def test_a_head_with_an_embedding_of_its_own(pair: Pair, tmp_path: Path) -> None:
    """The same as the model's says the same, and another one something else."""
    of_model = load_file(pair.model / "model.safetensors")["model.embed_tokens.weight"]
    said = []
    for embedding in (None, of_model, of_model.flip(0)):
        head = tmp_path / str(len(said))
        shutil.copytree(pair.head, head)
        if embedding is not None:
            tensors = load_file(head / "model.safetensors") | {"embed_tokens.weight": embedding.contiguous()}
            save_file(tensors, head / "model.safetensors")
        drafts = {"speculative_config": Pair(pair.model, head).drafts(3)} | NOT_ADAPTIVE
        with LLM(str(pair.model), dtype="float32", num_blocks=100, **drafts) as llm:
            asked = Mixed(llm, 3)
            llm.generate([[5, 6, 7, 8, 9]], GREEDY)
        said.append(asked.proposed)
    assert said[0] == said[1] != said[2]
