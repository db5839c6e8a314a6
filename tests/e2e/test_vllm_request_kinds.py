"""What a request may ask for beside its prompt, together with prefix hits, chunks and overlapped steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from rose_backend.vllm_plugin.plugin_logger import SAMPLES
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.reference_generation import reference_logits, tie_free_answer
from tests.support.stepped_engine import SteppedEngine, overlap_steps_on_cpu, tokens_of
from tests.support.vllm_engines import random_tokens

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
ENGINE_OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 61,
    "max_num_seqs": 12,
    # The embedded model would fill JSON with blanks.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


RUNNERS = [
    pytest.param(None, id="CPU"),
    pytest.param("V2", marks=pytest.mark.gpu),
    pytest.param("V1", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=RUNNERS)
def shared_engine(make_engine: MakeEngine, request: pytest.FixtureRequest) -> Iterator[SteppedEngine]:
    with pytest.MonkeyPatch.context() as environment:
        options = GPU_MEMORY if request.param else {}
        if not request.param:
            overlap_steps_on_cpu(environment)
        with make_engine(runner=request.param, **ENGINE_OPTIONS, **options) as llm:
            yield SteppedEngine(llm)


@pytest.fixture
def engine(shared_engine: SteppedEngine) -> SteppedEngine:
    """Return the engine with an empty prefix cache."""
    assert shared_engine.llm.reset_prefix_cache()
    return shared_engine


def test_several_completions_are_single_runs(engine: SteppedEngine) -> None:
    prompt = random_tokens(45, seed=12)
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 12, "ignore_eos": True}
    several = SamplingParams(n=4, seed=100, output_kind=RequestOutputKind.FINAL_ONLY, **options)
    outputs = [engine.generate([prompt], several)[0] for _ in range(2)]
    singles = engine.generate([prompt] * 4, [SamplingParams(seed=100 + i, **options) for i in range(4)])
    for output in outputs:
        assert [tuple(c.token_ids) for c in output.outputs] == [tokens_of(single) for single in singles]
    assert len(set(map(tokens_of, singles))) == 4
    assert [output.num_cached_tokens for output in (outputs[1], *singles)] == [44] * 5


def penalised_leads(
    model_path: Path, prompt: list[int], tokens: list[int], params: SamplingParams
) -> torch.Tensor:
    """Return by how much each token's logit leads all others once penalties are applied, as the OpenAI interface and
    the paper on CTRL define them."""
    logits = reference_logits(model_path, [*prompt, *tokens])[len(prompt) - 1 : -1].clone()
    for position, row in enumerate(logits):
        seen, counts = sorted({*prompt, *tokens[:position]}), Counter(tokens[:position])
        factor = params.repetition_penalty
        row[seen] = torch.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
        for token, count in counts.items():
            row[token] -= params.presence_penalty + count * params.frequency_penalty
    index = torch.tensor(tokens)[:, None]
    return logits.gather(1, index)[:, 0] - logits.scatter(1, index, float("-inf")).amax(1)


@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.4},
    ],
    ids=lambda penalty: ", ".join(penalty),
)
def test_penalties(engine: SteppedEngine, tiny_model_path: Path, penalty: dict[str, float]) -> None:
    prompt = random_tokens(40, seed=11)
    params = SamplingParams(**penalty, **{**GREEDY, "max_tokens": 32})
    # Beside one without, so that both kinds of rows stand in one batch; the second time the prompts are found.
    for _ in range(2):
        penalised, plain = engine.generate([prompt] * 2, [params, SamplingParams(**GREEDY)])
        assert tokens_of(plain) == tie_free_answer(tiny_model_path, prompt, 16)
        tokens = list(tokens_of(penalised))
        assert penalised_leads(tiny_model_path, prompt, tokens, params).min() > -1e-3
        assert tuple(tokens[:16]) != tokens_of(plain)
    assert penalised.num_cached_tokens == 39


AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": ["a red rose", "a blue king"]}, "a red rose|a blue king"),
    "regex": ({"regex": "[0-9]{3}-[a-f]{4}"}, "[0-9]{3}-[a-f]{4}"),
    "json": ({"json": AGE}, r'\{"age": ?[1-9][0-9]?\}'),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structured_output_with_hits(engine: SteppedEngine, kind: str) -> None:
    structure, pattern = STRUCTURES[kind]
    params = SamplingParams(
        temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputsParams(**structure)
    )
    # Beside a request without a structure, so that both kinds of rows stand in one batch.
    prompts = [random_tokens(39, seed=13), random_tokens(20, seed=14)]
    cold, warm = (engine.generate(prompts, [params, SamplingParams(**GREEDY)]) for _ in range(2))
    assert [output.num_cached_tokens for output in (*cold, *warm)] == [0, 0, 38, 19]
    assert list(map(tokens_of, cold)) == list(map(tokens_of, warm))
    assert re.fullmatch(pattern, cold[0].outputs[0].text), cold[0].outputs[0].text


def test_logprobs_with_and_without_hits(engine: SteppedEngine, tiny_model_path: Path) -> None:
    prompt = random_tokens(70, seed=15)
    params = SamplingParams(logprobs=3, **GREEDY)
    (cold,), (warm,) = (engine.generate([prompt], params) for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 69)
    assert tokens_of(cold) == tokens_of(warm) == tie_free_answer(tiny_model_path, prompt, 16)
    exact = reference_logits(tiny_model_path, [*prompt, *tokens_of(cold)]).log_softmax(-1)[69:-1]
    for output in (cold, warm):
        for token, logprobs, row in zip(tokens_of(output), output.outputs[0].logprobs, exact, strict=True):
            assert logprobs[token].rank == 1 and len(logprobs) == 3
            for token_id, entry in logprobs.items():
                assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)


def test_prompt_logprobs_read_nothing_from_the_cache(engine: SteppedEngine, tiny_model_path: Path) -> None:
    prompt = random_tokens(150, seed=16)
    (plain,) = engine.generate([prompt], SamplingParams(**GREEDY))
    (asked,) = engine.generate([prompt], SamplingParams(prompt_logprobs=2, **GREEDY))
    (after,) = engine.generate([prompt], SamplingParams(**GREEDY))
    assert [output.num_cached_tokens for output in (plain, asked, after)] == [0, 0, 149]
    assert tokens_of(plain) == tokens_of(asked) == tokens_of(after)
    exact = reference_logits(tiny_model_path, prompt).log_softmax(-1)
    assert len(asked.prompt_logprobs) == 150 and asked.prompt_logprobs[0] is None
    for position, logprobs in enumerate(asked.prompt_logprobs[1:]):
        token = prompt[position + 1]
        assert logprobs[token].logprob == pytest.approx(float(exact[position, token]), abs=1e-4)


def test_salts_and_requests_that_skip_the_cache(engine: SteppedEngine) -> None:
    prompt = random_tokens(50, seed=17)
    skipping = SamplingParams(skip_reading_prefix_cache=True, **GREEDY)
    # What each finds, in this order: its own tenant's content only, and what a request that skips has written.
    for salt, params, num_cached in [
        (None, SamplingParams(**GREEDY), 0),
        ("one", SamplingParams(**GREEDY), 0),
        ("other", skipping, 0),
        ("other", skipping, 0),
        ("other", SamplingParams(**GREEDY), 49),
        ("one", SamplingParams(**GREEDY), 49),
        (None, SamplingParams(**GREEDY), 49),
        ("third", SamplingParams(**GREEDY), 0),
    ]:
        engine.add("request", prompt, params, salt=salt)
        output = engine.drain()["request"]
        assert output.num_cached_tokens == num_cached, salt
        assert tokens_of(output) == tokens_of(engine.generate([prompt], skipping)[0])


def test_resets_between_and_during_requests(engine: SteppedEngine, tiny_model_path: Path) -> None:
    prompt = random_tokens(90, seed=18)
    expected = tie_free_answer(tiny_model_path, prompt, 16)
    engine.generate([prompt], SamplingParams(**GREEDY))
    assert engine.llm.reset_prefix_cache()
    assert engine.generate([prompt], SamplingParams(**GREEDY))[0].num_cached_tokens == 0
    for num_steps in range(1, 9):
        engine.add("runs", prompt, SamplingParams(**GREEDY))
        for _ in range(num_steps):
            engine.step()
        assert not engine.llm.reset_prefix_cache(), "a request holds blocks"
        preemptions_before = engine.num_preemptions
        assert engine.llm.reset_prefix_cache(reset_running_requests=True)
        assert engine.num_preemptions == preemptions_before + 1
        assert engine.manager.usage == 0.0 and not len(engine.manager.cache.cached_blocks())
        assert tokens_of(engine.drain()["runs"]) == expected


def test_stop_strings_and_min_tokens_with_hits(engine: SteppedEngine, tiny_model_path: Path) -> None:
    tokenizer = engine.llm.get_tokenizer()
    prompt = tokenizer("The king said that the queen had seen the garden and the rose in the morning")[
        "input_ids"
    ]
    answer = tie_free_answer(tiny_model_path, prompt, 40)
    text = tokenizer.decode(answer)
    stop = text[30:34]
    cases = {
        "stop string": (SamplingParams(stop=[stop], temperature=0.0, max_tokens=40), text[: text.find(stop)]),
        "kept": (
            SamplingParams(stop=[stop], include_stop_str_in_output=True, temperature=0.0, max_tokens=40),
            text[: text.find(stop) + 4],
        ),
        "none": (SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), text),
    }
    for _ in range(2):
        outputs = engine.generate([prompt] * 3, [params for params, _ in cases.values()])
        assert [output.outputs[0].text for output in outputs] == [expected for _, expected in cases.values()]
    assert [output.num_cached_tokens for output in outputs] == [len(prompt) - 1] * 3

    # A stop token that would come first of all is held back for min_tokens, hits or not.
    held_back = SamplingParams(stop_token_ids=[answer[0]], min_tokens=8, temperature=0.0, max_tokens=16)
    warm, _ = engine.generate([prompt, random_tokens(33, seed=19)], [held_back, SamplingParams(**GREEDY)])
    assert engine.llm.reset_prefix_cache()
    (cold,) = engine.generate([prompt], held_back)
    assert (warm.num_cached_tokens, cold.num_cached_tokens) == (len(prompt) - 1, 0)
    assert tokens_of(warm) == tokens_of(cold)
    assert answer[0] not in tokens_of(warm)[:8] and len(tokens_of(warm)) >= 8


DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
DRAWN_KINDS: dict[str, dict[str, Any]] = {
    "no more": {},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {17: 100.0}},
    "allowed tokens": {"allowed_token_ids": [5, 6, 7]},
    "bad words": {"bad_words": ["the", "and"], "temperature": 0.2},
    "min tokens": {"min_tokens": 8, "stop_token_ids": list(range(300, 400))},
    "log-probabilities": {"logprobs": 3},
    "log-probabilities of the prompt": {"prompt_logprobs": 2},
    "grammar": {
        "structured_outputs": StructuredOutputsParams(regex="[0-9]{3}-[a-f]{4}"),
        "ignore_eos": False,
    },
    "nobody's seed": {"seed": None},
    "greedy": {"temperature": 0.0},
}


def test_rose_draws_for_every_kind_of_request_the_same_in_any_batch(engine: SteppedEngine) -> None:
    params = {kind: SamplingParams(**{**DRAWN, **options}) for kind, options in DRAWN_KINDS.items()}
    prompts = [random_tokens(30, seed=20 + index) for index in range(len(params))]
    by_vllm, before = dict(SAMPLES.vllm), SAMPLES.rose
    together = dict(zip(params, engine.generate(prompts, list(params.values())), strict=True))
    num_drawn = sum(len(tokens_of(output)) for kind, output in together.items() if kind != "greedy")
    # A prompt that is cut in pieces draws for each, a grammar's end is seen a step late, and the greedy one is counted
    # where others draw.
    assert 0 <= SAMPLES.rose - before - num_drawn <= 3 * len(params) + len(tokens_of(together["greedy"]))
    for kind, prompt in zip(params, prompts, strict=True):
        before = SAMPLES.rose
        (alone,) = engine.generate([prompt], params[kind])
        if kind != "nobody's seed":
            assert tokens_of(alone) == tokens_of(together[kind]), kind
        num_drawn = 0 if kind == "greedy" else len(tokens_of(alone))
        assert 0 <= SAMPLES.rose - before - num_drawn <= (3 if num_drawn else 0), kind
    assert SAMPLES.vllm == by_vllm
    assert set(tokens_of(together["bias"])) == {17}
    assert set(tokens_of(together["allowed tokens"])) <= {5, 6, 7}
    assert re.fullmatch("[0-9]{3}-[a-f]{4}", together["grammar"].outputs[0].text)
    tokenizer = engine.llm.get_tokenizer()
    text = " " + " ".join(map(str, tokens_of(together["bad words"]))) + " "
    for word in ("the", " the", "and", " and"):
        banned = tokenizer.encode(word, add_special_tokens=False)
        assert f" {' '.join(map(str, banned))} " not in text, word
    assert not set(tokens_of(together["min tokens"])[:8]) & set(range(300, 400))


@pytest.mark.parametrize("options", [{}, pytest.param(GPU_MEMORY, marks=pytest.mark.gpu)], ids=["CPU", "GPU"])
def test_a_client_is_told_of_whole_blocks(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    prompt = random_tokens(50, seed=21)
    guess = [*prompt[:37], 5, 6]
    told = []
    with make_engine(additional_config={"rose": {"exact_cached_tokens": False}}, **options) as llm:
        engine = SteppedEngine(llm)
        for tokens, salt in (
            (prompt, None),
            (guess, None),
            (guess[1:], None),
            (guess, "other"),
            (guess, "other"),
        ):
            engine.add("request", tokens, SamplingParams(**GREEDY), salt=salt)
            told.append(engine.drain()["request"].num_cached_tokens)
        stats = engine.manager.stats
        assert (stats.hit_tokens, stats.reported_hit_tokens) == (37 + 38, 32 + 32)
    assert told == [0, 32, 0, 0, 32]
