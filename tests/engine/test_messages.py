"""Messages between the API process and the engine process: each comes out as it went in, and nothing else comes out."""

from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rose_backend import EngineConfig, SamplingParams, errors
from rose_backend.config import SpeculativeConfig
from rose_backend.engine.messages import (
    HEADER,
    Abort,
    AdapterAnswer,
    Add,
    Counted,
    Error,
    LoadAdapter,
    OutputBatch,
    PromptPiece,
    Ready,
    Refused,
    StartUp,
    Stop,
    TokenizerLoaded,
    Unload,
    Update,
    decode_answer,
    decode_command,
    encode,
    read_message,
)
from rose_backend.engine.outputs import (
    CompletionOutput,
    Counters,
    EngineLoad,
    EngineStats,
    Logprob,
    RequestOutput,
)
from rose_backend.engine.request import LoRARequest, ProcessedInput
from rose_backend.engine.structured_outputs import StructuredOutputsParams
from rose_backend.engine.tokenizer_loading import load_tokenizer
from rose_backend.errors import EngineStalledError, RequestError, RoseError

PARAMS = {
    "none": SamplingParams(),
    "numbers": SamplingParams(temperature=0, top_p=0.5, top_k=-1, seed=2**63 - 1, n=3, logprobs=20),
    "lists": SamplingParams(
        logit_bias={7: 1.5, 0: -3},
        allowed_token_ids=[1, 2],
        bad_words=["a"],
        stop=["b", "é"],
        stop_token_ids=(3,),
    ),
    "one stop": SamplingParams(stop="b", ignore_eos=True, max_tokens=None),
    "schema": SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"})),
    "choice": SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]).starting_after(5)),
}
LOGPROBS = [{5: Logprob(-0.5, 2, "a"), 9: Logprob(float("-inf"), 1, "é")}]
COUNTERS = Counters(
    EngineStats(steps=3, spec_decode_num_accepted_tokens_per_pos=(4, 2)), EngineLoad(1, 2, 0.25)
)


def sent_to_engine(message: Any) -> Any:
    """Return what the engine process reads."""
    return decode_command(encode(message)[HEADER.size :])


def sent_by_engine(message: Any) -> Any:
    """Return what the API process reads."""
    return decode_answer(encode(message)[HEADER.size :])


def as_numbers_and_texts(value: object) -> object:
    """Return what was sent without the types of its containers."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), strict=False)


@pytest.mark.parametrize("name", PARAMS)
def test_requests(name: str) -> None:
    params = PARAMS[name]
    ids = np.array([5, 0, 2**31 - 1], np.int32)
    processed = ProcessedInput(7, "text", ids, params, b"cache", [[1, 2], [3]], b"key", 2)

    message = sent_to_engine(Add.of("one", processed))
    got = message.processed()
    assert message.request_id == "one" and got.prompt is None
    assert got.token_ids.dtype == np.int32 and got.token_ids.tolist() == ids.tolist()
    got.token_ids[0] = 1  # the engine's own
    assert (got.number, got.namespace, got.bad_words_token_ids) == (7, b"cache", [[1, 2], [3]])
    assert (got.tenant, got.lora_id) == (b"key", 2)
    assert isinstance(got.params, SamplingParams)
    assert as_numbers_and_texts(got.params) == as_numbers_and_texts(params)
    for properties in ("stop_strings", "is_greedy", "has_penalties", "has_processors"):
        assert getattr(got.params, properties) == getattr(params, properties)
    structured = params.structured_outputs
    if structured is not None:
        assert isinstance(got.params.structured_outputs, StructuredOutputsParams)
        # Compiled grammars are found by it.
        again = sent_to_engine(Add.of("two", processed)).params.structured_outputs
        assert {got.params.structured_outputs: 1}[again] == 1
        assert again.lark_grammar() == structured.lark_grammar()


def test_values_that_were_checked_are_not_checked_again() -> None:
    params = copy.deepcopy(PARAMS["schema"])
    # For a schema that takes longer than all the rest.
    object.__setattr__(params, "top_p", 7.0)
    object.__setattr__(params.structured_outputs, "json", "no JSON")
    got = sent_to_engine(Add.of("one", ProcessedInput(1, None, np.arange(3), params, b"", []))).params
    assert (got.top_p, got.structured_outputs.json) == (7.0, "no JSON")


def test_small_commands() -> None:
    for message in (Abort("é"), Unload(3), LoadAdapter(LoRARequest("a", 1, "/a")), Stop()):
        assert sent_to_engine(message) == message


def test_options() -> None:
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    config = EngineConfig(model="m", speculative_config=drafts, seed=2**63 - 1, cuda_graph=False)
    start = sent_to_engine(StartUp.of(config, 10))
    assert EngineConfig(**start.options) == config and start.log_level == 10
    ready = sent_by_engine(Ready(start.options, 5, 6, 7, COUNTERS, (8, 9)))
    assert EngineConfig(**ready.options) == config
    assert (ready.vocab_size, ready.max_model_len, ready.num_blocks, ready.counters) == (5, 6, 7, COUNTERS)
    assert ready.eos_token_ids == (8, 9)


def test_a_tokenizer(tiny_model_path: Path) -> None:
    parts = load_tokenizer(tiny_model_path)
    got = sent_to_engine(TokenizerLoaded(parts)).parts
    assert got.backend.to_str() == parts.backend.to_str() and got[1:] == parts[1:]


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_outputs(has_logprobs: bool) -> None:
    completions = [
        CompletionOutput(0, "a", [5], LOGPROBS if has_logprobs else None, -0.5, "stop", "x", "a"),
        CompletionOutput(1, "", [], None, None, None, 7),
    ]
    output = RequestOutput("one", "prompt", [1, 2], completions, True, 3, 0.5)
    (update,) = sent_by_engine(OutputBatch([Update.of(output)])).updates
    assert update.output("prompt", [1, 2]) == output
    if has_logprobs:
        assert isinstance(update.completions[0].logprobs[0][5], Logprob)


def test_values_of_a_callers_own_classes_are_plain_ones() -> None:
    class Text(str):
        pass

    class Number(float):
        pass

    params = SamplingParams(stop=[Text("a")], temperature=Number(0.5), logit_bias={3: 10**29})
    processed = ProcessedInput(0, None, np.arange(3, dtype=np.int32), params, b"", [], b"", 0)
    sent = sent_to_engine(Add.of("id", processed)).processed().params
    assert (sent.stop, sent.temperature, sent.logit_bias) == (["a"], 0.5, {3: 1e29})
    assert type(sent.stop[0]) is str and type(sent.temperature) is float


def test_numbers_of_numpy_are_numbers() -> None:
    completion = CompletionOutput(np.int64(0), "a", [np.int32(5)], None, np.float64(-0.5))
    output = RequestOutput("one", None, [1], [completion])
    (update,) = sent_by_engine(OutputBatch([Update.of(output)])).updates
    got = update.completions[0]
    assert (type(got.index), type(got.token_ids[0]), type(got.cumulative_logprob)) == (int, int, float)


def test_log_probabilities_of_prompts() -> None:
    words = np.arange(12, dtype=np.float32).reshape(3, 4)
    words[0, 1:2].view(np.int32)[:] = 1  # a rank is no number as float32
    piece = sent_by_engine(PromptPiece.of("one", 4, words))
    assert (piece.request_id, piece.first) == ("one", 4)
    assert piece.words().view(np.int32).tolist() == words.view(np.int32).tolist()


def test_counters() -> None:
    assert sent_by_engine(Counted(COUNTERS)) == Counted(COUNTERS)


ERRORS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RoseError)
]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_keep_type_and_message(kind: type[RoseError]) -> None:
    error = kind() if kind is EngineStalledError else kind("n: got 0 \udcff")
    if isinstance(error, RequestError):
        error.parameter, error.value = "n", object()
    got = sent_by_engine(Error.of(error)).restored()
    assert type(got) is kind and str(got) == str(error).replace("\udcff", "\\udcff")
    if isinstance(got, RequestError):
        assert (got.parameter, got.value) == ("n", None)
        assert type(sent_by_engine(Refused("one", Error.of(error))).error.refusal()) is kind
        assert type(sent_by_engine(AdapterAnswer(1, Error.of(error))).error.refusal()) is kind
    else:
        with pytest.raises(TypeError, match=f"refused with {kind.__name__}"):
            Error.of(error).refusal()


@pytest.mark.parametrize("kind", ["Exception", "difflib", "nearest_name_hint", "Iterable", ""])
def test_other_types_are_no_errors(kind: str) -> None:
    with pytest.raises(TypeError, match="lacks"):
        Error(kind, "text", None).restored()


@pytest.mark.parametrize(
    "message",
    [
        Abort(5),
        Unload("a"),
        Add("one", 1, b"", {"n": "1"}, b"", [], b"", 0),
        Add("one", 1, "text", SamplingParams(), b"", [], b"", 0),
        LoadAdapter({"lora_name": "a", "lora_int_id": 0, "lora_path": "b"}),
        TokenizerLoaded(("no tokenizer", False, {}, {})),
        Counted(COUNTERS),  # which only the engine says
    ],
)
def test_other_types_are_refused(message: Any) -> None:
    with pytest.raises(ValueError):
        sent_to_engine(message)


def test_damaged_messages_are_refused_or_are_other_messages() -> None:
    rng = np.random.default_rng(0)
    batch = OutputBatch([Update("one", 0, False, [CompletionOutput(0, "é", [5], LOGPROBS)], 0.5, False)])
    num_refused = 0
    for content, decode in (
        (
            encode(Add.of("one", ProcessedInput(1, None, np.arange(9), PARAMS["lists"], b"", [])))[4:],
            decode_command,
        ),
        (encode(batch)[4:], decode_answer),
        (encode(Error("ModelError", "text", None))[4:], decode_answer),
    ):
        for end in range(len(content)):
            with pytest.raises(ValueError):
                decode(content[:end])
        for _ in range(2_000):
            damaged = bytearray(content)
            damaged[rng.integers(len(content))] = rng.integers(256)
            try:
                assert isinstance(decode(bytes(damaged)), msgspec.Struct)
            except ValueError:
                num_refused += 1
    assert 1_000 < num_refused < 6_000


def test_a_connection_that_ends_within_a_message() -> None:
    content = encode(Abort("one"))
    assert read_message(io.BytesIO(content), decode_command) == Abort("one")
    for end in range(len(content)):
        assert read_message(io.BytesIO(content[:end]), decode_command) is None
