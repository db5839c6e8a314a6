"""Prompts with images inside vLLM: what stock vLLM says, hits to the token, never across a difference in an image.

Qwen's models need torchvision to prepare images, which the set-up for CPUs does not install. On CUDA, from graphs:
texts before, beside and behind pictures say what stock vLLM says, which runs eagerly, so that all of a model's Python
runs in every step. Qwen3-VL's clears features behind a step; prompts of the others are replayed from full graphs.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers.utils import is_torchvision_available
from vllm import SamplingParams
from vllm.config import CUDAGraphMode, KVEventsConfig
from vllm.lora.request import LoRARequest

from rose_backend.vllm_plugin.models import decoder
from rose_backend.vllm_plugin.plugin_logger import STEPS
from rose_backend.vllm_plugin.step_graph.steps import StepGraphs
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.random_checkpoints import LORA_MODULES, save_adapter
from tests.support.random_vision_checkpoints import (
    IMAGE_IN_PROMPT,
    write_random_paddleocr_vl,
    write_random_qwen2_5_vl,
    write_random_qwen3_vl,
)
from tests.support.stepped_engine import SteppedEngine, overlap_steps_on_cpu, tokens_of
from tests.support.vllm_engines import runner_of

ROUNDING = 1e-3
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TOKENS_PER_IMAGE = {(84, 140): 15, (140, 84): 15, (112, 112): 16, (168, 168): 36}

Part = Sequence[int] | Image.Image
Expected = tuple[dict[str, Any], list[tuple[int, ...]]]


def picture(seed: int, size: tuple[int, int] = (168, 168)) -> Image.Image:
    """Make a picture of ``size``, height and width; neighbouring ones share neither colours nor edges."""
    colours = np.random.default_rng(seed).integers(0, 256, (*(side // 14 for side in size), 3), np.uint8)
    return Image.fromarray(colours.repeat(14, 0).repeat(14, 1))


def prompt_of(*parts: Part) -> dict[str, Any]:
    """Return vLLM's input of texts and pictures, one behind the other."""
    tokens: list[int] = []
    for part in parts:
        tokens += IMAGE_IN_PROMPT if isinstance(part, Image.Image) else part
    pictures = [part for part in parts if isinstance(part, Image.Image)]
    return {"prompt_token_ids": tokens} | ({"multi_modal_data": {"image": pictures}} if pictures else {})


def left_open(prompt: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt without the token that ends its picture: the last token is one of the picture's."""
    return {**prompt, "prompt_token_ids": prompt["prompt_token_ids"][:-1]}


rng = random.Random(4)
HEAD, QUESTION, OTHER = ([rng.randrange(260, 4000) for _ in range(length)] for length in (21, 13, 30))
A, B, WIDE, HIGH = picture(1), picture(2), picture(3, (84, 140)), picture(3, (140, 84))
PROMPTS: dict[str, dict[str, Any]] = {
    "text": prompt_of(HEAD, QUESTION),
    "a picture": prompt_of(HEAD, A, QUESTION),
    "another picture": prompt_of(HEAD, B, QUESTION),
    "another question": prompt_of(HEAD, A, OTHER),
    "first": prompt_of(A, QUESTION),
    "another one first": prompt_of(B, QUESTION),
    "last": prompt_of(HEAD, A),
    # From the cache a step has one token, which is the picture's.
    "left open": left_open(prompt_of(HEAD, B)),
    "two": prompt_of(HEAD, A, QUESTION, B, OTHER),
    "two, another second": prompt_of(HEAD, A, QUESTION, WIDE, OTHER),
    "two, the other way round": prompt_of(HEAD, B, QUESTION, A, OTHER),
    "twice the same, side by side": prompt_of(HEAD, A, A, QUESTION),
    "wide": prompt_of(HEAD, WIDE, QUESTION),
    "high, of the same number of tokens": prompt_of(HEAD, HIGH, QUESTION),
    "many": prompt_of(HEAD, WIDE, A, HIGH, B, picture(5, (112, 112)), OTHER),
}


MODELS: dict[str, Callable[[Path], Path]] = {
    "PaddleOCR-VL": write_random_paddleocr_vl,
    "Qwen2.5-VL": write_random_qwen2_5_vl,
    "Qwen3-VL": write_random_qwen3_vl,
}


@pytest.fixture(scope="module", params=MODELS)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    if request.param.startswith("Qwen") and not is_torchvision_available():
        pytest.skip("torchvision is not installed")
    return str(MODELS[request.param](tmp_path_factory.mktemp("model")))


def crowd() -> list[dict[str, Any]]:
    """Return 200 prompts of few beginnings, pictures and ends."""
    draw = random.Random(9)
    pictures = [picture(seed, draw.choice(list(TOKENS_PER_IMAGE))) for seed in range(10, 18)]
    prompts = []
    for _ in range(200):
        parts: list[Part] = [HEAD[: draw.choice((3, 17, 21))]]
        for _ in range(draw.randrange(4)):
            parts += [draw.choice(pictures), OTHER[: draw.choice((0, 1, 30))]]
        prompts.append(prompt_of(*parts, QUESTION[: draw.randrange(1, 13)]))
    return prompts


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine, model: str) -> Expected:
    """Return what stock vLLM says without a prefix cache: to each of ``PROMPTS``, and the tokens to the crowd."""
    stock = {"attention_backend": None, "enable_prefix_caching": False, "block_size": 32}
    with make_engine(model=model, **stock) as llm:
        assert llm.llm_engine.vllm_config.model_config.uses_mrope
        said = llm.generate(list(PROMPTS.values()), GREEDY, use_tqdm=False)
        tokens = [tokens_of(output) for output in llm.generate(crowd(), GREEDY, use_tqdm=False)]
    return dict(zip(PROMPTS, said, strict=True)), tokens


@pytest.fixture(scope="module", params=["awaited steps", "overlapped steps, packed layers"])
def engine(
    expected: Expected, make_engine: MakeEngine, model: str, request: pytest.FixtureRequest
) -> Iterator[SteppedEngine]:
    """Return an engine whose chunks end inside pictures, with a tenth of the 1,000 blocks that the crowd asks for."""
    with pytest.MonkeyPatch.context() as environment:
        if request.param != "awaited steps":
            overlap_steps_on_cpu(environment)
            # As a GPU packs them, so that steps that only decode have small batches.
            environment.setattr(decoder, "packs_layers", lambda switches, device: True)
        options = {"max_num_batched_tokens": 53, "max_num_seqs": 32, "num_gpu_blocks_override": 101}
        with make_engine(model=model, **options) as llm:
            has_own_layers = "qwen" in Path(model, "config.json").read_text().lower()
            assert isinstance(runner_of(llm).model, decoder.RoseDecoder) is has_own_layers
            yield SteppedEngine(llm)


def assert_same(output: Any, stock: Any) -> None:
    assert tokens_of(output) == tokens_of(stock)
    for entry, expected_entry, token in zip(
        output.outputs[0].logprobs, stock.outputs[0].logprobs, tokens_of(stock), strict=True
    ):
        assert entry[token].logprob == pytest.approx(expected_entry[token].logprob, abs=ROUNDING)


def test_texts_and_logprobs_are_stock_vllms(engine: SteppedEngine, expected: Expected) -> None:
    assert len({tokens_of(output) for output in expected[0].values()}) == len(PROMPTS)
    # Computed, all at once; then from the cache; then each alone, with an empty cache and from it.
    for _ in range(2):
        for name, output in zip(PROMPTS, engine.generate(list(PROMPTS.values()), GREEDY), strict=True):
            assert_same(output, expected[0][name])
    for name, prompt in PROMPTS.items():
        assert engine.llm.reset_prefix_cache()
        for is_cached in (False, True):
            (output,) = engine.generate([prompt], GREEDY)
            assert_same(output, expected[0][name])
            num_tokens = len(output.prompt_token_ids)
            assert output.num_cached_tokens == (num_tokens - 1 if is_cached else 0), name


TO_PICTURE = len(HEAD) + 1
BEHIND_PICTURE = TO_PICTURE + TOKENS_PER_IMAGE[168, 168] + 1


@pytest.mark.parametrize(
    ("first", "second", "num_hits"),
    [
        ("a picture", "another picture", TO_PICTURE),
        ("a picture", "another question", BEHIND_PICTURE),
        ("a picture", "two", BEHIND_PICTURE + len(QUESTION)),
        ("two", "two, another second", BEHIND_PICTURE + len(QUESTION) + 1),
        ("two", "two, the other way round", TO_PICTURE),
        ("first", "another one first", 0),
        ("wide", "high, of the same number of tokens", TO_PICTURE),
        ("last", "a picture", BEHIND_PICTURE),
        ("twice the same, side by side", "a picture", BEHIND_PICTURE),
    ],
)
def test_hits_end_where_pictures_differ(
    engine: SteppedEngine,
    expected: Expected,
    first: str,
    second: str,
    num_hits: int,
) -> None:
    assert engine.llm.reset_prefix_cache()
    engine.generate([PROMPTS[first]], GREEDY)
    (output,) = engine.generate([PROMPTS[second]], GREEDY)
    assert output.num_cached_tokens == num_hits
    assert_same(output, expected[0][second])


def test_200_requests_through_a_tenth_of_the_blocks(engine: SteppedEngine, expected: Expected) -> None:
    assert engine.llm.reset_prefix_cache()
    before, num_preemptions = engine.manager.stats.as_dict(), engine.num_preemptions
    finished = engine.come_and_go(crowd(), GREEDY, seed=3)
    grown = {name: count - before[name] for name, count in engine.manager.stats.as_dict().items()}
    assert engine.num_preemptions > num_preemptions
    assert min(grown[name] for name in ("evictions", "clones", "partial_hits", "hit_tokens")) > 0, grown
    assert not [index for index, output in finished.items() if tokens_of(output) != expected[1][index]]


EXTRAS: dict[str, dict[str, Any]] = {
    "n-gram drafts": {"speculative_config": NGRAM},
    "KV cache events": {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")},
    "hits at block borders only": {"additional_config": {"rose": {"token_granular_hits": False}}},
    "vLLM's own block manager": {"additional_config": {"rose": {"block_manager": False}}, "block_size": 32},
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_images_beside(make_engine: MakeEngine, model: str, expected: Expected, extra: str) -> None:
    with make_engine(model=model, max_num_batched_tokens=97, **EXTRAS[extra]) as llm:
        for _ in range(2):
            outputs = llm.generate(list(PROMPTS.values()), GREEDY, use_tqdm=False)
            assert [tokens_of(output) for output in outputs] == list(map(tokens_of, expected[0].values()))


def write_adapter(model: str, path: Path) -> LoRARequest:
    """Write an adapter of a Qwen checkpoint's language model."""
    random_numbers, tensors = torch.Generator().manual_seed(1), {}
    for name, weight in load_file(Path(model, "model.safetensors")).items():
        layer, _, module = name.removesuffix(".weight").partition(".self_attn.")
        if module in LORA_MODULES["self_attn"] and name.endswith(".weight"):
            stem = f"base_model.model.model.language_model.layers.{layer.split('.')[-1]}.self_attn.{module}"
            for part, shape in (("lora_A", (8, weight.shape[1])), ("lora_B", (weight.shape[0], 8))):
                tensors[f"{stem}.{part}.weight"] = 0.2 * torch.randn(shape, generator=random_numbers)
    save_adapter(tensors, path, rank=8)
    return LoRARequest("an adapter", 1, str(path))


def test_adapters_beside_images(
    make_engine: MakeEngine, model: str, expected: Expected, tmp_path: Path
) -> None:
    """The same pictures with and without an adapter: none finds what the other has computed."""
    if "qwen" not in Path(model, "config.json").read_text().lower():
        pytest.skip("vLLM has no adapters for PaddleOCR-VL")
    prompts, adapter = list(PROMPTS.values()), write_adapter(model, tmp_path)
    requests = [adapter] * len(prompts) + [None] * len(prompts)
    # On a CPU vLLM 0.32 gives rows without an adapter the last of the places for one: it has to stay empty.
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    stock = {"attention_backend": None, "enable_prefix_caching": False, "block_size": 32}
    with make_engine(model=model, **lora, **stock) as llm:
        adapted = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapter)
    said = [*map(tokens_of, adapted), *map(tokens_of, expected[0].values())]
    assert len(set(said)) == len(said)
    with make_engine(model=model, max_num_batched_tokens=97, **lora) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts * 2, GREEDY, use_tqdm=False, lora_request=requests)
            assert list(map(tokens_of, outputs)) == said
        assert min(output.num_cached_tokens for output in outputs) > 0


CASES = [("Qwen2.5-VL", "V2"), ("Qwen3-VL", "V2"), ("Qwen3-VL", "V1"), ("PaddleOCR-VL", "V2")]
NUM_GPU_TOKENS = 12
GPU_GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_GPU_TOKENS, ignore_eos=True, logprobs=2)
GPU_ROUNDING = 0.02
"""Of a log-probability. Features of a picture that is another request's change them by ten times as much and more."""

draw = random.Random(11)
TEXTS = {
    f"text of {length} tokens": prompt_of([draw.randrange(260, 4000) for _ in range(length)])
    for length in (1, 2, 7, 16, 33, 70, 126, 200)
}
OPEN_PICTURES = {
    "a picture, left open": left_open(prompt_of(HEAD, A)),
    "two, left open": left_open(prompt_of(OTHER, B, QUESTION, A)),
}
ALL = {**TEXTS, **PROMPTS, **OPEN_PICTURES}
ENGINE: dict[str, Any] = {
    "max_num_seqs": 16,
    # Chunks end inside pictures, and few sizes of graphs are captured.
    "max_num_batched_tokens": 128,
    **GPU_MEMORY,
    "kv_cache_memory_bytes": 256 << 20,
}
FOR_DECODES = "prompts of a model audited for decodes only"
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
                outputs = llm.generate(list(ALL.values()), GPU_GREEDY, use_tqdm=False)
        assert len({tokens_of(output) for output in outputs}) == len(ALL)
        return path, dict(zip(ALL, outputs, strict=True))

    return ask


@pytest.fixture(scope="module")
def stock(case: tuple[str, str], say_as_stock: Callable[[str], Stock]) -> Said:
    """Return what stock vLLM says to each prompt, without a prefix cache."""
    return say_as_stock(case[0])[1]


@pytest.fixture(scope="module")
def gpu_engine(
    stock: Said, case: tuple[str, str], say_as_stock: Callable[[str], Stock], make_engine: MakeEngine
) -> Iterator[SteppedEngine]:
    model, runner = case
    with make_engine(model=say_as_stock(model)[0], runner=runner, enforce_eager=False, **ENGINE) as llm:
        yield SteppedEngine(llm)


def differences(said: Said, stock: Said) -> list[str]:
    """Return where each answer leaves stock's, unless stock might have drawn the other token as well."""
    found = []
    for name, output in said.items():
        drawn, expected = output.outputs[0], stock[name.partition(" (")[0]].outputs[0]
        for place, (token, wanted) in enumerate(zip(drawn.token_ids, expected.token_ids, strict=True)):
            of_stock = {each: entry.logprob for each, entry in expected.logprobs[place].items()}
            error = abs(drawn.logprobs[place][token].logprob - of_stock.get(token, float("inf")))
            if error > GPU_ROUNDING or of_stock[wanted] - of_stock[token] > 2 * GPU_ROUNDING:
                found.append(f"{name}, token {place}: {token} instead of {wanted}, {error:.3f} apart")
                break
            if token != wanted:
                break
    return found


def reasons_since(before: dict[str, int]) -> set[str]:
    """Return why steps have been vLLM's since their counts were ``before``."""
    return {reason for reason, count in STEPS.vllm.items() if count > before.get(reason, 0)}


def ask_alone(gpu_engine: SteppedEngine, names: Any, when: str) -> Said:
    """Ask one after the other, with an empty cache."""
    said = {}
    for name in names:
        assert gpu_engine.llm.reset_prefix_cache()
        (said[f"{name} ({when})"],) = gpu_engine.generate([ALL[name]], GPU_GREEDY)
    return said


@pytest.mark.gpu
def test_texts_before_beside_and_behind_pictures(gpu_engine: SteppedEngine, stock: Said) -> None:
    num_replayed, own = STEPS.rose, dict(STEPS.vllm)
    said = ask_alone(gpu_engine, TEXTS, "before")
    names = list(ALL)
    for turn in range(3):
        assert gpu_engine.llm.reset_prefix_cache()
        draw.shuffle(names)
        for name in names:
            gpu_engine.add(f"{name} (beside, {turn})", ALL[name], GPU_GREEDY)
            # Decodes of texts run beside prompts of pictures, and the other way round.
            for _ in range(draw.randrange(3)):
                gpu_engine.step()
        said |= gpu_engine.drain()
        said |= ask_alone(gpu_engine, TEXTS, f"behind, {turn}")
    for name in (*PROMPTS, *OPEN_PICTURES):
        said |= ask_alone(gpu_engine, [name, "text of 7 tokens"], f"behind {name}")
    assert not (found := differences(said, stock)), "\n".join(found)
    if gpu_engine.llm.llm_engine.vllm_config.use_v2_model_runner:
        # All steps that only decode: each answer has one at least that nothing else is in.
        assert STEPS.rose - num_replayed > 100
        assert reasons_since(own) <= {"no tokens", "prompts without a full graph", FOR_DECODES}


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.5, 1.0], ids=["by chance", "always"])
def test_pictures_that_are_preempted_and_computed_again(
    case: tuple[str, str],
    say_as_stock: Callable[[str], Stock],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
) -> None:
    """Replayed steps alternate with vLLM's, of few blocks; chunks of pictures run beside decodes."""
    if case[1] == "V1":
        pytest.skip("model runner V1 has no replayed steps")
    path, stock = say_as_stock(case[0])
    launch, choose, said = StepGraphs.launch, random.Random(7), {}

    def launch_by_chance(self: StepGraphs, output: Any) -> bool:
        if choose.random() < share:
            return launch(self, output)
        self._loaded_batch = None
        return False

    monkeypatch.setattr(StepGraphs, "launch", launch_by_chance)
    short = {**ENGINE, "num_gpu_blocks_override": 33, "max_model_len": 256}
    with make_engine(model=path, runner="V2", enforce_eager=False, **short) as llm:
        engine, num_replayed = SteppedEngine(llm), STEPS.rose
        for turn in range(2):
            for name in choose.sample(list(ALL), len(ALL)):
                engine.add(f"{name} ({turn})", ALL[name], GPU_GREEDY)
            said |= engine.drain()
        assert engine.num_preemptions > 0 and STEPS.rose - num_replayed > 20
    assert not (found := differences(said, stock)), "\n".join(found)


@pytest.mark.gpu
def test_a_step_of_one_token_that_is_a_pictures(gpu_engine: SteppedEngine, stock: Said) -> None:
    said = {}
    for name in OPEN_PICTURES:
        assert gpu_engine.llm.reset_prefix_cache()
        for times in range(2):
            (output,) = gpu_engine.generate([ALL[name]], GPU_GREEDY)
            said[f"{name} ({times})"] = output
            assert output.num_cached_tokens == times * (len(output.prompt_token_ids) - 1)
        for text in TEXTS:
            (said[f"{text} (behind {name})"],) = gpu_engine.generate([ALL[text]], GPU_GREEDY)
    assert not (found := differences(said, stock)), "\n".join(found)


@pytest.mark.gpu
def test_prompts_are_replayed_where_no_python_is_needed(
    gpu_engine: SteppedEngine, case: tuple[str, str], steps_in_python: list[Any]
) -> None:
    config = gpu_engine.llm.llm_engine.vllm_config
    assert gpu_engine.llm.reset_prefix_cache()
    own = dict(STEPS.vllm)
    gpu_engine.generate([prompt_of(HEAD, picture(77), QUESTION), TEXTS["text of 33 tokens"]], GPU_GREEDY)
    assert config.use_v2_model_runner == (case[1] == "V2")
    has_roses_layers = isinstance(runner_of(gpu_engine.llm).model, decoder.RoseDecoder)
    assert has_roses_layers is (case[0].startswith("Qwen") and case[1] == "V2")
    is_replayed = case[0] != "Qwen3-VL"
    has_pieces, mode = case == ("Qwen3-VL", "V1"), CUDAGraphMode.FULL
    if not is_replayed:
        mode = CUDAGraphMode.FULL_AND_PIECEWISE if has_pieces else CUDAGraphMode.FULL_DECODE_ONLY
    assert config.compilation_config.cudagraph_mode == mode
    assert bool(steps_in_python) != is_replayed
    assert all(step.num_prefill_tokens for step in steps_in_python), "a step that only decodes was launched"
    if case[1] == "V2":
        assert reasons_since(own) - {"no tokens"} == (set() if is_replayed else {FOR_DECODES})
