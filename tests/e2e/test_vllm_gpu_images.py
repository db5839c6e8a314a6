"""On CUDA, in float32, from graphs: texts before, beside and behind pictures say what stock vLLM says; pictures, too.

Qwen3-VL's Python clears features behind a step; Qwen2.5-VL's and PaddleOCR-VL's keep nothing, and their prompts are
replayed from full graphs. Stock runs eagerly, so that all of a model's Python runs in every step.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import CUDAGraphMode

from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.e2e.test_vllm_images import HEAD, OTHER, PROMPTS, QUESTION, A, B, picture, prompt_of
from tests.support.random_vision_checkpoints import (
    write_random_paddleocr_vl,
    write_random_qwen2_5_vl,
    write_random_qwen3_vl,
)
from tests.support.stepped_engine import SteppedEngine, tokens_of

pytestmark = pytest.mark.gpu

MODELS: dict[str, Callable[[Path], Path]] = {
    "Qwen2.5-VL": write_random_qwen2_5_vl,
    "Qwen3-VL": write_random_qwen3_vl,
    "PaddleOCR-VL": write_random_paddleocr_vl,
}
CASES = [("Qwen2.5-VL", "V2"), ("Qwen3-VL", "V2"), ("Qwen3-VL", "V1"), ("PaddleOCR-VL", "V2")]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
ROUNDING = 0.02
"""Of a log-probability. Features of a picture that is another request's change them by ten times as much and more."""

draw = random.Random(11)
TEXTS = {
    f"text of {length} tokens": prompt_of([draw.randrange(260, 4000) for _ in range(length)])
    for length in (1, 2, 7, 16, 33, 70, 126, 200)
}
_open = prompt_of(HEAD, A)
OPEN_PICTURES = {
    # Without the token that ends a picture: the last token is one of the picture's.
    f"{name}, left open": {**prompt, "prompt_token_ids": prompt["prompt_token_ids"][:-1]}
    for name, prompt in (("a picture", _open), ("two", prompt_of(OTHER, B, QUESTION, A)))
}
ALL = {**TEXTS, **PROMPTS, **OPEN_PICTURES}
ENGINE: dict[str, Any] = {
    "max_num_seqs": 16,
    # Chunks end inside pictures, and few sizes of graphs are captured.
    "max_num_batched_tokens": 128,
    **GPU_MEMORY,
    "kv_cache_memory_bytes": 256 << 20,
}
Said = dict[str, Any]
Stock = tuple[str, Said]
"""A model's path, and what stock vLLM says."""


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return a model and a model runner."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def say_as_stock(make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stock]:
    """Return a function of a model's name, which asks stock vLLM once for all cases of the model."""

    @functools.cache
    def ask(name: str) -> Stock:
        path = str(MODELS[name](tmp_path_factory.mktemp("model")))
        own = {"attention_backend": "TRITON_ATTN", "enable_prefix_caching": False}
        with pytest.MonkeyPatch.context() as environment:
            # vLLM's attention for float32 multiplies in TF32 otherwise.
            environment.setenv("TRITON_F32_DEFAULT", "ieee")
            with make_engine(model=path, **ENGINE, **own) as llm:
                outputs = llm.generate(list(ALL.values()), GREEDY, use_tqdm=False)
        assert len({tokens_of(output) for output in outputs}) == len(ALL)
        return path, dict(zip(ALL, outputs, strict=True))

    return ask


@pytest.fixture(scope="module")
def stock(case: tuple[str, str], say_as_stock: Callable[[str], Stock]) -> Said:
    """Return what stock vLLM says to each prompt, without a prefix cache."""
    return say_as_stock(case[0])[1]


@pytest.fixture(scope="module")
def engine(
    stock: Said, case: tuple[str, str], say_as_stock: Callable[[str], Stock], make_engine: MakeEngine
) -> Iterator[SteppedEngine]:
    model, runner = case
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
        with make_engine(model=say_as_stock(model)[0], enforce_eager=False, **ENGINE) as llm:
            yield SteppedEngine(llm)


def differences(said: Said, stock: Said) -> list[str]:
    """Return where each answer leaves stock's, unless stock might have drawn the other token as well."""
    found = []
    for name, output in said.items():
        drawn, expected = output.outputs[0], stock[name.partition(" (")[0]].outputs[0]
        for place, (token, wanted) in enumerate(zip(drawn.token_ids, expected.token_ids, strict=True)):
            of_stock = {each: entry.logprob for each, entry in expected.logprobs[place].items()}
            error = abs(drawn.logprobs[place][token].logprob - of_stock.get(token, float("inf")))
            if error > ROUNDING or of_stock[wanted] - of_stock[token] > 2 * ROUNDING:
                found.append(f"{name}, token {place}: {token} instead of {wanted}, {error:.3f} apart")
                break
            if token != wanted:
                break
    return found


def ask_alone(engine: SteppedEngine, names: Any, when: str) -> Said:
    """Ask one after the other, with an empty cache."""
    said = {}
    for name in names:
        assert engine.llm.reset_prefix_cache()
        (said[f"{name} ({when})"],) = engine.generate([ALL[name]], GREEDY)
    return said


def test_texts_before_beside_and_behind_pictures(engine: SteppedEngine, stock: Said) -> None:
    said = ask_alone(engine, TEXTS, "before")
    names = list(ALL)
    for turn in range(3):
        assert engine.llm.reset_prefix_cache()
        draw.shuffle(names)
        for name in names:
            engine.add(f"{name} (beside, {turn})", ALL[name], GREEDY)
            # Decodes of texts run beside prompts of pictures, and the other way round.
            for _ in range(draw.randrange(3)):
                engine.step()
        said |= engine.drain()
        said |= ask_alone(engine, TEXTS, f"behind, {turn}")
    for name in (*PROMPTS, *OPEN_PICTURES):
        said |= ask_alone(engine, [name, "text of 7 tokens"], f"behind {name}")
    assert not (found := differences(said, stock)), "\n".join(found)


def test_a_step_of_one_token_that_is_a_pictures(engine: SteppedEngine, stock: Said) -> None:
    said = {}
    for name in OPEN_PICTURES:
        assert engine.llm.reset_prefix_cache()
        for times in range(2):
            (output,) = engine.generate([ALL[name]], GREEDY)
            said[f"{name} ({times})"] = output
            assert output.num_cached_tokens == times * (len(output.prompt_token_ids) - 1)
        for text in TEXTS:
            (said[f"{text} (behind {name})"],) = engine.generate([ALL[text]], GREEDY)
    assert not (found := differences(said, stock)), "\n".join(found)


def test_prompts_are_replayed_where_no_python_is_needed(
    engine: SteppedEngine, case: tuple[str, str], steps_in_python: list[Any]
) -> None:
    config = engine.llm.llm_engine.vllm_config
    assert engine.llm.reset_prefix_cache()
    engine.generate([prompt_of(HEAD, picture(77), QUESTION), TEXTS["text of 33 tokens"]], GREEDY)
    assert config.use_v2_model_runner == (case[1] == "V2")
    is_replayed = case[0] != "Qwen3-VL"
    mode = CUDAGraphMode.FULL if is_replayed else CUDAGraphMode.FULL_AND_PIECEWISE
    assert config.compilation_config.cudagraph_mode == mode
    assert bool(steps_in_python) != is_replayed
    assert all(step.num_prefill_tokens for step in steps_in_python), "a step that only decodes was launched"
