"""Bias, allowed tokens, bad words and ``min_tokens`` do to logits what vLLM's own processors do."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.engine.logits_processors import ProcessorTables
from rose_backend.engine.request import InputProcessor
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import RequestError
from rose_backend.kernels.sampling.reference import apply_processors
from tests.engine.conftest import GREEDY
from tests.support.sampling_cases import make_params

WORDS = [
    "the",
    " king",
    "King",
    "very angry",
    "  two  spaces",
    "ü",
    "薔薇",
    "I'm",
    "a",
    ",",
    "x y z",
    "\tand",
]
NUM_ROWS, VOCAB_SIZE = 24, 2560


def make_input_processor(path: Path) -> InputProcessor:
    sizes = {"vocab_size": VOCAB_SIZE, "max_model_len": 1024, "max_num_seqs": 4}
    return InputProcessor(Tokenizer(path), **sizes, seed=0, eos_token_ids=())


def vllm_params(path: Path, fields: dict[str, Any]) -> Any:
    """Return vLLM's parameters with the tokens of their bad words."""
    from vllm import SamplingParams as Params
    from vllm.tokenizers import get_tokenizer

    params = Params.from_optional(**fields)
    params.update_from_tokenizer(get_tokenizer(str(path)))
    return params


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-qwen3-chat"])
def test_bad_words_are_vllms_tokens(model: str) -> None:
    pytest.importorskip("vllm")
    from vllm.exceptions import VLLMValidationError

    path = Path(__file__).parents[2] / "models" / model
    expected = vllm_params(path, {"bad_words": [*WORDS, "the"]}).bad_words_token_ids
    processed = make_input_processor(path).process([5], SamplingParams(bad_words=[*WORDS, "the"]))
    assert processed.bad_words_token_ids == expected
    assert len(WORDS) < len(expected) < 2 * len(WORDS)
    for word in (" ", "\n\t"):
        with pytest.raises(RequestError, match=r"^bad_words: got .*, which has no tokens"):
            make_input_processor(path).process([5], SamplingParams(bad_words=[word]))
        with pytest.raises(VLLMValidationError, match="must tokenize to at least one token"):
            vllm_params(path, {"bad_words": [word]})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fine", "\ud800"], r"got '\\ud800', allowed is strings of 1 to 1024 Unicode characters"),
        (
            ["ab " * 340, "ba " * 340],
            "or 1024 tokens, with and without a space before each word, allowed are at most that many",
        ),
        (
            [chr(97 + index % 26) + chr(97 + index // 26) for index in range(128)],
            "got more than 128 sequences, or 1024 tokens",
        ),
    ],
)
def test_bad_words_that_are_refused_as_tokens(tiny_model_path: Path, words: list[str], message: str) -> None:
    inputs = make_input_processor(tiny_model_path)
    for _ in range(2):
        with pytest.raises(RequestError, match=message) as caught:
            inputs.process([5], SamplingParams(bad_words=words))
        assert caught.value.parameter == "bad_words"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bad_words": ["!", '"']}, "bad_words"),
        ({"bad_words": ["!"], "min_tokens": 1}, "min_tokens"),
        ({"bad_words": ["!"], "allowed_token_ids": [0]}, "allowed_token_ids"),
        ({"bad_words": ["!"], "min_tokens": 1, "ignore_eos": True}, None),
        ({"bad_words": ["!"], "allowed_token_ids": [1]}, None),
        ({"bad_words": ["!!"], "allowed_token_ids": [0]}, None),
        ({"bad_words": ["!"], "min_tokens": 1, "structured_outputs": {"regex": "x?"}}, None),
    ],
    ids=str,
)
def test_limits_that_leave_no_token(tiny_model_path: Path, fields: dict[str, Any], field: str | None) -> None:
    inputs = InputProcessor(
        Tokenizer(tiny_model_path),
        **{"vocab_size": 2, "max_model_len": 99, "max_num_seqs": 4, "seed": 0},
        eos_token_ids=(1,),
    )
    params = SamplingParams.from_mapping(fields, source="test")
    refused: RequestError | None = None
    try:
        inputs.process([1], params)
    except RequestError as error:
        refused = error
    assert (refused and refused.parameter) == field, refused


def random_fields(choose: random.Random) -> dict[str, Any]:
    """Return what a request asks for: any mix."""
    fields: dict[str, Any] = {"ignore_eos": True, "max_tokens": 99}
    if choose.random() < 0.7:
        fields["bad_words"] = choose.sample(WORDS, choose.randrange(1, 9))
    if choose.random() < 0.5:
        fields["logit_bias"] = {choose.randrange(VOCAB_SIZE): choose.uniform(-100, 100) for _ in range(200)}
    if choose.random() < 0.5:
        fields["allowed_token_ids"] = choose.sample(range(VOCAB_SIZE), 300)
    if choose.random() < 0.5:
        fields |= {"min_tokens": choose.randrange(9), "stop_token_ids": choose.sample(range(VOCAB_SIZE), 99)}
    return fields


def vllm_logits(logits: torch.Tensor, params: list[Any], outputs: list[list[int]]) -> torch.Tensor:
    """Return what vLLM's sampler makes of logits before penalties."""
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.sampler import Sampler

    processors = [
        kind(None, torch.device("cpu"), False)
        for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor)
    ]
    rows = [(row, *each) for row, each in enumerate(zip(params, [[]] * len(params), outputs, strict=True))]
    is_forbidden = torch.zeros(logits.shape, dtype=torch.bool)
    for row, each in enumerate(params):
        if each.allowed_token_ids:
            is_forbidden[row] = True
            is_forbidden[row, each.allowed_token_ids] = False
    for processor in processors:
        processor.update_state(BatchUpdate(len(params), removed=[], added=rows, moved=[]))
    words = {row: each.bad_words_token_ids for row, each in enumerate(params) if each.bad_words}
    metadata = SimpleNamespace(
        bad_words_token_ids=words,
        no_penalties=True,
        output_token_ids=outputs,
        allowed_token_ids_mask=is_forbidden,
        logitsprocs=SimpleNamespace(non_argmax_invariant=processors),
        thinking_budget_state_holder=None,
    )
    result: torch.Tensor = Sampler().apply_logits_processors(logits.clone(), metadata, False)
    return result


@pytest.mark.parametrize("seed", range(3))
def test_logits_are_vllms(tiny_model_path: Path, seed: int) -> None:
    pytest.importorskip("vllm")
    choose, inputs = random.Random(seed), make_input_processor(tiny_model_path)
    state = SequenceState(NUM_ROWS + 2, 1024)
    tables = ProcessorTables(state, VOCAB_SIZE, torch.device("cpu"))
    fields = [random_fields(choose) for _ in range(NUM_ROWS)]
    params = [vllm_params(tiny_model_path, each) for each in fields]
    slots, outputs = np.array(choose.sample(range(NUM_ROWS + 2), NUM_ROWS)), []
    for slot, each, theirs in zip(slots.tolist(), fields, params, strict=True):
        # Prompts end with words, too, which do not count.
        words = theirs.bad_words_token_ids or [[7]]
        prompt = [*choose.choices(range(VOCAB_SIZE), k=5), *choose.choice(words)]
        outputs.append(choose.choices(range(VOCAB_SIZE), k=choose.randrange(9)) + choose.choice(words)[:-1])
        (completion,) = inputs.make(prompt, SamplingParams(**each)).completions
        completion.token_ids = np.array(prompt + outputs[-1], np.int32)
        state.fill(slot, completion)
    tables.admit(slots)
    entries = np.where(state.has_processor_entry[slots], slots, -1).astype(np.int32)
    position = torch.from_numpy(state.num_tokens[slots].astype(np.int64))
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    processors = tables.prepare(torch.from_numpy(entries), position)
    ours = apply_processors(logits, make_params(NUM_ROWS, processors=processors))
    theirs = vllm_logits(logits, params, outputs)
    assert torch.equal(ours, theirs)
    # Kernels search in it.
    assert (processors.bias_token_ids.diff(dim=1) >= 0).all()
    assert not torch.equal(ours, logits)


def test_rows_without_an_entry_leave_others_alone() -> None:
    tables = ProcessorTables(SequenceState(2, 64), VOCAB_SIZE, torch.device("cpu"))
    for position in range(1025):
        tables.note(
            torch.tensor([0, -1, 1, -1], dtype=torch.int32),
            torch.full((4,), position),
            torch.tensor([position, 5, 6, 7]),
        )
    drawn = tables._limits.drawn_token_ids
    assert drawn[0].tolist() == [1024, *range(1, 1024)] and set(drawn[1].tolist()) == {6}


def test_kernels_do_not_depend_on_how_many_tokens_end_a_text() -> None:
    """Kernels are compiled ahead for a model whose tokenizer is not known yet."""
    tables = [
        ProcessorTables(SequenceState(2, 64, ends), 100, torch.device("cpu")) for ends in ((), (3, 5, 7))
    ]
    shapes = [[each.shape for each in made._limits] for made in tables]
    assert shapes[0] == shapes[1]


def test_an_answer_without_a_token_left_ends_with_an_error(make_llm: Callable[..., LLM]) -> None:
    # The second token would have to follow "the", which is the only other one.
    params = {"allowed_token_ids": [259, 623], "bad_words": ["king", "the the"], "max_tokens": 5}
    llm = make_llm()
    assert llm.tokenizer.encode(" the king") == [259, 623]
    (completion,) = llm.generate([[9, 8]], SamplingParams(**params))[0].outputs
    assert (completion.token_ids, completion.finish_reason) == ([259], "error")
    assert llm.generate([[9, 8]], GREEDY)[0].outputs[0].finish_reason == "length"
