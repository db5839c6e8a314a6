"""Structured outputs: texts are what was asked for, in any company, and others' texts stay what they were."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_backend import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from rose_backend.engine import grammars
from rose_backend.engine.core import EngineCore
from rose_backend.engine.grammars import Grammar, GrammarCompiler, GrammarMasks
from rose_backend.engine.output_thread import OutputHandler
from rose_backend.errors import RequestError
from tests.engine.conftest import keeps_serving
from tests.engine.test_sampling_extras import make_ahead  # noqa: F401  # a fixture
from tests.support.crowd import crowd, tokens_of
from tests.support.patience import HANG_S
from tests.support.reference_generation import reference_logits

EOS = 2559
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["rose", "tulip"]},
        "of": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "of"],
}
CHOICES = ["red rose", "white rose", "red tulip"]


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "kind", "of"]
        and len(value["name"]) <= 8
        and value["age"] in range(100)
        and value["kind"] in ("rose", "tulip")
        and len(value["of"]) <= 3
        and all(isinstance(each, bool) for each in value["of"])
    )


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, is_of_schema),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        {"regex": r"[0-9]{3}-[a-f]{4,9}"},
        lambda text: re.fullmatch(r"[0-9]{3}-[a-f]{4,9}", text),
    ),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "grammar": (
        {"grammar": 'start: "a" start | "b" ("c" | "dé")'},
        lambda text: re.fullmatch("a*b(c|dé)", text),
    ),
}


def structured(kind: str, **options: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(**KINDS[kind][0])
    return SamplingParams(structured_outputs=wanted, **{"max_tokens": 80, "seed": 3, **options})


def texts_of(output: RequestOutput) -> list[str]:
    return [completion.text for completion in output.outputs]


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_texts_are_what_was_asked_for_and_change_nobody_elses(
    make_ahead: Callable[..., LLM],  # noqa: F811
    run_ahead: int,
) -> None:
    llm = make_ahead(run_ahead)
    prompts, params = crowd(8, seed=4, max_tokens=30)
    alone = tokens_of(llm, prompts, params)
    kinds = [kind for kind in KINDS for _ in range(2)]
    own = [structured(kind, n=1 + index % 2, seed=index, temperature=1.0) for index, kind in enumerate(kinds)]
    own_prompts = [[index + 1] * (5 * index + 1) for index in range(len(own))]
    lonely = [tokens_of(llm, [prompt], [each])[0] for prompt, each in zip(own_prompts, own, strict=True)]
    outputs = llm.generate([*prompts, *own_prompts], [*params, *own])
    assert [[c.token_ids for c in output.outputs] for output in outputs[: len(prompts)]] == alone
    num_whole = 0
    for kind, output, expected in zip(kinds, outputs[len(prompts) :], lonely, strict=True):
        assert [c.token_ids for c in output.outputs] == expected
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                num_whole += 1
                assert KINDS[kind][1](completion.text), completion.text
                assert completion.token_ids[-1] == EOS and EOS not in completion.token_ids[:-1]
    assert num_whole >= 8  # the others wrote for too long


def test_masked_draws_against_the_definition(llm: LLM, tiny_model_path: Path) -> None:
    texts = [llm.tokenizer.decode([token_id]) for token_id in range(EOS)]
    fits = {token_id: text for token_id, text in enumerate(texts) if re.fullmatch("[ a-m]{1,20}", text)}
    prompt, expected = [7, 300, 301, 302, 7], list[int]()
    while not expected or expected[-1] != EOS:
        logits = reference_logits(tiny_model_path, prompt + expected)[-1].numpy()
        room = 20 - len("".join(texts[each] for each in expected))
        allowed = [token_id for token_id, text in fits.items() if len(text) <= room]
        if room < 20:
            allowed.append(EOS)
        expected.append(max(allowed, key=lambda token_id: float(logits[token_id])))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=30,
        logprobs=2,
        structured_outputs=StructuredOutputsParams(regex="[ a-m]{1,20}"),
    )
    (completion,) = llm.generate([prompt], params)[0].outputs
    assert completion.token_ids == expected
    # As in vLLM, log-probabilities are those of what the mask has left.
    first = completion.logprobs[0]
    logits = reference_logits(tiny_model_path, prompt)[-1].double()[sorted(fits)]
    assert first[expected[0]].logprob == pytest.approx(float(logits.log_softmax(0).max()), abs=2e-4)
    assert first[expected[0]].rank == 1


def test_preempted_completions_go_on_where_they_were(make_llm: Callable[..., LLM]) -> None:
    prompts = [[index + 1] * 20 for index in range(4)]
    own = [structured("regex", temperature=1.0, seed=index, n=2) for index in range(4)]
    own = [replace(each, structured_outputs=StructuredOutputsParams(regex="[a-z ]{300}")) for each in own]
    free = [SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)] * 4
    limits = {"device": "cpu", "max_num_seqs": 12, "max_model_len": 128}
    expected = tokens_of(make_llm(**limits), prompts * 2, [*free, *own])
    tight = make_llm(**limits, num_blocks=24, run_ahead=2)
    assert tokens_of(tight, prompts * 2, [*free, *own]) == expected
    assert tight.stats.preemptions > 4


def test_min_tokens_yields_only_to_a_text_that_can_only_end(llm: LLM) -> None:
    params = structured("regex", n=8, max_tokens=12, temperature=1.0)
    params = replace(params, structured_outputs=StructuredOutputsParams(regex="[q ]*"))
    lengths = [len(each.token_ids) for each in llm.generate("The", params)[0].outputs]
    assert min(lengths) < 9
    lengths = [len(each.token_ids) for each in llm.generate("The", replace(params, min_tokens=9))[0].outputs]
    assert min(lengths) >= 10
    params = structured("choice", min_tokens=60, logprobs=0)
    (completion,) = llm.generate("The", params)[0].outputs
    assert completion.text in CHOICES and completion.finish_reason == "stop"


def test_stop_tokens_and_strings_end_texts_as_ever(llm: LLM) -> None:
    wanted = StructuredOutputsParams(regex="aaabbb")
    params = SamplingParams(structured_outputs=wanted, max_tokens=20, stop=["ab"], temperature=0.0)
    (completion,) = llm.generate("The", params)[0].outputs
    assert (completion.text, completion.stop_reason) == ("aa", "ab")
    # Where the text may end, a stop token may be drawn, too; with ignore_eos nothing else is left to follow.
    params = replace(params, stop=None, stop_token_ids=[17], ignore_eos=True, temperature=1.0, n=8, seed=1)
    endings = set()
    for completion in llm.generate("The", params)[0].outputs:
        assert completion.text == "aaabbb"
        endings.add(completion.stop_reason)
        assert set(completion.token_ids[6:]) <= {17, EOS}
    assert 17 in endings


@pytest.mark.parametrize("extras", [{"repetition_penalty": 1.5, "frequency_penalty": 0.5}, {"logprobs": 20}])
def test_penalties_and_logprobs_of_masked_rows(
    make_ahead: Callable[..., LLM],  # noqa: F811
    extras: dict[str, Any],
) -> None:
    llm = make_ahead(2)
    plain, special = structured("json", temperature=0.0), structured("json", temperature=0.0, **extras)
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    others = [free, replace(free, **extras)]
    expected = [tokens_of(llm, [[5] * 9], [each])[0] for each in (plain, special, *others)]
    outputs = llm.generate([[5] * 9] * 4, [plain, special, *others])
    assert [[c.token_ids for c in output.outputs] for output in outputs] == expected
    assert (expected[0] == expected[1]) == ("logprobs" in extras)
    for output in outputs[:2]:
        assert is_of_schema(output.outputs[0].text)
    for entry in outputs[1].outputs[0].logprobs or ():
        assert sum(math.exp(each.logprob) for each in entry.values()) <= 1 + 1e-5


def test_bias_allowed_tokens_and_bad_words_hold_beside_a_grammar(llm: LLM) -> None:
    (a,), (b,) = (llm.core.input_processor.tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    wanted = StructuredOutputsParams(regex="[abc]{6,8}")
    common = {"structured_outputs": wanted, "max_tokens": 20, "min_tokens": 8, "temperature": 0.0}
    limits: list[dict[str, Any]] = [
        {"allowed_token_ids": [a, EOS]},
        {"allowed_token_ids": [a, b, EOS], "logit_bias": {b: 100.0}},
        {"allowed_token_ids": [a, b, EOS], "logit_bias": {b: 100.0}, "bad_words": ["b"]},
        {"logprobs": 0},
    ]
    params = [SamplingParams(**common, **each) for each in limits]
    # Together with a request that has neither, and again from the prefix cache.
    for _ in range(2):
        outputs = llm.generate([[7] * 9] * 5, [*params, SamplingParams(max_tokens=20, temperature=0.0)])
        assert [output.outputs[0].text for output in outputs[:3]] == ["a" * 8, "b" * 8, "a" * 8]
        assert re.fullmatch("[abc]{8}", outputs[3].outputs[0].text)


@pytest.mark.parametrize(
    ("regex", "allowed", "limits", "may_begin"),
    [
        ("[ab]+", "c", {}, False),
        ("[ab]+", "cb", {}, True),
        ("a?", "c", {}, False),
        ("a?", "c", {"stop_token_ids": list(range(60, 99))}, True),
        ("a?", "", {}, True),
        ("b+", "", {}, False),
        ("b*", "", {"min_tokens": 1}, False),
    ],
)
def test_allowed_tokens_of_which_none_may_be_the_first(
    llm: LLM, regex: str, allowed: str, limits: dict[str, Any], may_begin: bool
) -> None:
    token_ids = [*llm.tokenizer.encode(allowed), *(() if allowed else (EOS,))]
    structured = StructuredOutputsParams(regex=regex)
    params = SamplingParams(
        structured_outputs=structured, allowed_token_ids=token_ids, max_tokens=1, **limits
    )
    if may_begin:
        assert llm.generate("a", params)[0].outputs[0].finish_reason in ("stop", "length")
    else:
        with pytest.raises(RequestError, match="allowed_token_ids: got none that may begin") as caught:
            llm.generate("a", params)
        assert caught.value.parameter == "allowed_token_ids"


def test_a_text_begins_behind_a_token(llm: LLM) -> None:
    begins_after = llm.tokenizer.encode(" the")[0]
    wanted = StructuredOutputsParams(choice=["xyz"], begins_after=begins_after)
    params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=wanted)
    (completion,) = llm.generate("Once upon a time", params)[0].outputs
    free = llm.generate("Once upon a time", replace(params, structured_outputs=None, max_tokens=60))[0]
    head, tail = completion.text.split(" the", 1)
    assert tail == "xyz" and completion.finish_reason == "stop"
    assert free.outputs[0].text.startswith(head + " the")


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "structured_outputs: got none of them"),
    "two": ({"regex": "a", "json": {}}, "structured_outputs: got json and regex"),
    "syntax of a regex": ({"regex": "(a"}, "structured_outputs.regex: got one that cannot be compiled"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-ahead and look-behind, is not supported"),
    "deep regex": ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "structured_outputs.regex: "),
    "long regex": ({"regex": "a" * 65_537}, "got 65537 characters, allowed is at most 65536"),
    "NUL": ({"regex": "a\0"}, "got NUL or half of a character"),
    "half a character": ({"choice": ["\ud800"]}, "got NUL or half of a character"),
    "no choices": ({"choice": []}, "structured_outputs.choice: got list"),
    "an empty choice": ({"choice": ["a", ""]}, "none of them empty"),
    "many choices": ({"choice": ["a"] * 65_537}, "at most 65536 texts"),
    "long choices": ({"choice": ["a" * 40_000, "b" * 40_000]}, "got 80000 characters"),
    "grammar": ({"grammar": "start: unknown"}, 'structured_outputs.grammar: .*unknown name: "unknown"'),
    "deep grammar": ({"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "cannot be compiled"),
    "empty grammar": ({"grammar": " "}, "structured_outputs.grammar: got an empty text"),
    "text of a schema": ({"json": "{"}, "structured_outputs.json: got a text that is no JSON"),
    "deep text": ({"json": "[" * 60_000}, "structured_outputs.json: got a text that is no JSON"),
    "a list": ({"json": [1]}, "structured_outputs.json: got list"),
    "type": ({"json": {"type": "objec"}}, "Invalid type: objec"),
    "keyword": ({"json": {"not": {}}}, "Unimplemented keys"),
    "endless": ({"json": {"$ref": "#"}}, "structured_outputs.json: got one that cannot be compiled"),
    "unsatisfiable": ({"json": {"allOf": [{"type": "null"}, {"type": "object"}]}}, "Unsatisfiable"),
    "huge counts": ({"json": {"items": {"maxItems": 10**9}}}, "got maxItems of more than that"),
    "products": (
        {
            "json": {
                "allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(9)]} for i in range(9)]
            }
        },
        "schema too large",
    ),
    "a large multiple": (
        {"json": {"type": "integer", "multipleOf": 999_983}},
        "multipleOf of more than that",
    ),
    "a fine multiple": ({"json": {"type": "number", "multipleOf": 1.00001}}, "multipleOf of more than that"),
    "a long multiple": ({"json": {"type": "number", "multipleOf": 1e300}}, "multipleOf of more than that"),
    "many multiples": (
        {"json": {"properties": {str(n): {"type": "integer", "multipleOf": 5001} for n in range(2)}}},
        "multipleOf of more than that",
    ),
    "multiples of both": (
        {"json": {"allOf": [{"type": "integer", "multipleOf": n} for n in (997, 991)]}},
        "multipleOf of more than that",
    ),
    "a schema in a grammar": ({"grammar": 'start: %json {"type": "null"}'}, "got %json in one"),
    "options in a grammar": ({"grammar": '%llguidance {}\nstart: "a"'}, "got %llguidance in one"),
    "long names": (
        {"json": {"properties": {"a" * 70_000: {}}}},
        "characters and more, allowed is at most 65536",
    ),
    "many values": ({"json": {"enum": [0] * 16_384}}, "at most 64 levels and 16384 values"),
    "structural tag": ({"structural_tag": "{}"}, "structured_outputs.structural_tag: .* not supported"),
    "whitespace": (
        {"json": {}, "whitespace_pattern": " "},
        "structured_outputs.whitespace_pattern: .* not supp",
    ),
    "no object": ({"json_object": False}, "structured_outputs.json_object: got False"),
}
UNUSABLE["deep schema"] = (
    {"json": json.loads('{"items":' * 65 + "{}" + "}" * 65)},
    "at most 64 levels and 16384 values",
)


@pytest.mark.parametrize("name", list(UNUSABLE))
def test_what_cannot_be_followed_is_refused_by_name(llm: LLM, name: str) -> None:
    options, message = UNUSABLE[name]
    with keeps_serving(llm), pytest.raises(RequestError, match=message) as refusal:
        llm.generate("The", SamplingParams(structured_outputs=StructuredOutputsParams(**options)))
    assert str(refusal.value.parameter).startswith("structured_outputs")
    assert len(str(refusal.value)) < 800


def test_a_grammar_that_cannot_go_on_ends_its_own_completion_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grammar, "finish", _failing(Grammar.finish, after=4))
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = llm.generate("Once", free)[0].outputs[0].token_ids
    with keeps_serving(llm):
        broken, other = llm.generate(["The", "Once"], [structured("json"), free])
    assert other.outputs[0].token_ids == expected
    (completion,) = broken.outputs
    assert completion.finish_reason == "error" and len(completion.token_ids) == 4
    assert "structured_outputs.json: its grammar cannot go on" in str(completion.stop_reason)


def _failing(finish: Callable[..., None], after: int) -> Callable[..., None]:
    """Let a grammar follow a token that it does not allow, after some that it does."""

    def run(self: Grammar, mask: Any) -> None:
        if self.num_tokens == after:
            assert not self._matcher.consume_tokens([EOS])
        finish(self, mask)

    return run


def test_a_grammar_that_takes_long_to_follow_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ambiguous without end: the time for a token grows with the cube of the text."""
    wanted = StructuredOutputsParams(grammar="start: s\ns: s s | s s s | /[a-z0-9 ]/")
    endless = SamplingParams(max_tokens=400, seed=1, structured_outputs=wanted)
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = llm.generate("Once", free)[0].outputs[0].token_ids
    # Of a CPU's time; JSON takes far less, on any machine.
    monkeypatch.setattr(grammars, "_MAX_FOLLOW_S", 0.2)
    with keeps_serving(llm):
        (broken,), (other,), (json_object,) = (
            each.outputs for each in llm.generate(["The", "Once", "The"], [endless, free, structured("json")])
        )
    assert other.token_ids == expected and is_of_schema(json_object.text)
    assert broken.finish_reason == "error" and len(broken.token_ids) < 400
    assert (
        broken.stop_reason
        == "structured_outputs.grammar: its grammar cannot go on (following it takes too long)"
    )


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.001] * 100, []),
        ([0.021, 0.001], [0]),
        ([0.004] * 20, []),
        ([0.019, 0.018, 0.004, 0.017], [0]),
        ([0.019, 0.018, 0.019, 0.018], [0, 2]),
    ],
)
def test_the_slowest_grammars_of_a_step_give_up(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], expected: list[int]
) -> None:
    now = 0.0

    class Slow:
        error = None

        def __init__(self, takes: float) -> None:
            self.takes = takes

        def follow(self, token_ids: list[int]) -> None:
            nonlocal now
            now += self.takes

        def give_up(self, reason: str) -> None:
            self.error = reason

    monkeypatch.setattr(grammars.time, "thread_time", lambda: now)
    slow = [Slow(takes) for takes in seconds]
    grammars._follow_all(slow, [[1]] * len(slow))  # type: ignore[arg-type]
    assert [index for index, each in enumerate(slow) if each.error is not None] == expected


def test_min_tokens_holds_while_an_answer_reasons(llm: LLM) -> None:
    wanted = StructuredOutputsParams(choice=["xyz"], begins_after=5)
    (matcher,) = GrammarMasks(2560).fill(
        [llm.core.grammars.compile(SamplingParams(min_tokens=3, structured_outputs=wanted))], [[9, 9]]
    )
    mask = matcher.view(np.uint32)
    assert not mask[EOS >> 5] >> np.uint32(EOS & 31) & 1 and mask[0] == 0xFFFFFFFF


def test_few_compiled_grammars_are_kept(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    monkeypatch.setattr(grammars, "_MAX_CACHED", 2)
    compiled: list[Any] = []
    monkeypatch.setattr(
        GrammarCompiler, "_compile", _noting(GrammarCompiler._compile, compiled), raising=True
    )
    for choice in ("one", "two", "one", "three", "one", "two"):
        params = replace(structured("choice"), structured_outputs=StructuredOutputsParams(choice=[choice]))
        assert texts_of(llm.generate("The", params)[0]) == [choice]
    assert [each.choice[0] for each in compiled] == ["one", "two", "three", "two"]
    assert len(llm.core.grammars._cache) == 2


def test_grammars_of_a_tenant_do_not_wait_for_all_of_another_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_NUM_COMPILERS", 1)
    has_begun, may_go_on, order = threading.Event(), threading.Event(), []

    def compile_later(compiler: GrammarCompiler, params: SamplingParams) -> Any:
        has_begun.set()
        assert may_go_on.wait(HANG_S)
        return params.seed

    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    compiler = GrammarCompiler(llm.core.input_processor.tokenizer, EOS + 1, [EOS])

    def start(number: int, tenant: bytes) -> Future[None]:
        return compiler.start(SamplingParams(seed=number), order.append, tenant)

    first = start(0, b"many")
    assert has_begun.wait(HANG_S)
    second, *_ = [start(number, b"many") for number in range(1, 6)]
    for number in (6, 7):
        start(number, b"few")
    assert second.cancel() and not first.cancel()
    may_go_on.set()
    compiler._threads.shutdown()
    assert order == [0, 6, 2, 7, 3, 4, 5]


def _noting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def run(self: GrammarCompiler, wanted: StructuredOutputsParams) -> Any:
        calls.append(wanted)
        return function(self, wanted)

    return run


class Streams:
    """An engine whose outputs go to a handler, as in servers, driven by the test."""

    def __init__(self, make_llm: Callable[..., LLM], device: str = "cpu") -> None:
        self.finished: dict[str, RequestOutput] = {}
        self.token_ids: defaultdict[str, list[int]] = defaultdict(list)
        self._handler = OutputHandler(self._deliver, lambda request_id: True)
        self.core = EngineCore(make_llm(device=device).core.config, output_handler=self._handler)
        self.refused: dict[str, RequestError] = {}

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        self.finished |= {output.request_id: output for output in outputs if output.finished}
        for output in outputs:
            for completion in output.outputs:
                self.token_ids[output.request_id] += completion.token_ids

    def add(self, prompt: list[int] | str = "The", **all_params: SamplingParams) -> None:
        for request_id, params in all_params.items():
            request = self.core.input_processor.make(prompt, params, request_id=request_id, is_streaming=True)
            self.core.add(request)

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            with self._handler.changed:
                self._handler.changed.wait_for(lambda: self.core.can_step)
            self.refused |= dict(self.core.carry_out(deque()))
            self.core.step()


@pytest.fixture
def streams(make_llm: Callable[..., LLM]) -> Any:
    streams = Streams(make_llm)
    yield streams
    streams.core.check_integrity()
    streams.core.close()


def test_an_aborted_request_is_not_compiled(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    may_compile, compiled = threading.Event(), []
    original = GrammarCompiler.compile

    def compile_late(self: GrammarCompiler, params: SamplingParams) -> Grammar:
        assert may_compile.wait(HANG_S)
        compiled.append(params.seed)
        return original(self, params)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_late)
    for number in range(6):
        streams.add(**{f"r{number}": structured("choice", seed=number)})
    for number in (3, 5):
        assert streams.core.end(f"r{number}")
    may_compile.set()
    streams.run_until(lambda: {"r0", "r1", "r2", "r4"} <= set(streams.finished))
    # Two threads had begun with the first ones.
    assert sorted(compiled) == [0, 1, 2, 4]


def test_the_compiler_is_told_whose_grammar_it_is(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, tenants = streams.core.input_processor, []

    def start(params: SamplingParams, done: object, tenant: bytes) -> Future[None]:
        tenants.append(tenant)
        return Future()

    monkeypatch.setattr(streams.core.grammars, "start", start)
    (checked,) = processor.process_all(["The"], [structured("choice")], tenant=b"few")
    streams.core.add(processor.build(checked, request_id="r"))
    assert tenants == [b"few"] and streams.core.end("r")
    streams.run_until(lambda: "r" in streams.finished)


def test_others_go_on_while_a_grammar_is_compiled(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    may_compile = threading.Event()
    compile_one = GrammarCompiler.compile

    def wait_and_compile(self: GrammarCompiler, params: SamplingParams) -> Grammar:
        may_compile.wait()
        return compile_one(self, params)

    monkeypatch.setattr(GrammarCompiler, "compile", wait_and_compile)
    free = SamplingParams(temperature=0.0, max_tokens=20)
    bad = replace(free, structured_outputs=StructuredOutputsParams(regex="(?=a)"))
    try:
        streams.add(choice=structured("choice"), bad=bad, gone=structured("choice"), free=free)
        streams.run_until(lambda: "free" in streams.finished)
        assert streams.core.num_waiting == 3 and streams.finished.keys() == {"free"}
        streams.core.end("gone")
        assert streams.core.num_waiting == 2
        streams.run_until(lambda: "gone" in streams.finished)
    finally:
        may_compile.set()
    streams.run_until(lambda: "choice" in streams.finished and bool(streams.refused))
    assert (
        streams.refused.keys() == {"bad"} and streams.refused["bad"].parameter == "structured_outputs.regex"
    )
    assert streams.finished["gone"].outputs[0].finish_reason == "abort"
    streams.run_until(lambda: not streams.core.num_unfinished)
    assert not streams.core.num_waiting


class Panic(BaseException):
    """As those of llguidance, no ``Exception``."""


@pytest.mark.parametrize("failing", ["_index", "compile"])
def test_a_failure_of_the_library_is_a_refusal(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*arguments: object) -> None:
        raise Panic("spoilt") if failing == "compile" else ZeroDivisionError("spoilt")

    streams.core.grammars._tokens = None
    monkeypatch.setattr(GrammarCompiler, failing, fail)
    streams.add(bad=structured("choice"))
    streams.run_until(lambda: bool(streams.refused))
    assert "spoilt" in str(streams.refused["bad"]) and not streams.core.num_unfinished


def allowed_after(llm: LLM, text: str, wanted: StructuredOutputsParams) -> set[str]:
    params = SamplingParams(structured_outputs=wanted)
    grammar, token_ids = llm.core.grammars.compile(params), llm.tokenizer.encode(text)
    masks = llm.core._runner._extras.masks.fill([grammar], [token_ids])
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    return {llm.tokenizer.decode([token_id]) for token_id in np.flatnonzero(bits).tolist()}


def test_a_mask_allows_the_tokens_whose_bits_are_set(llm: LLM) -> None:
    assert allowed_after(llm, "", StructuredOutputsParams(choice=["a", "b"])) == {"a", "b"}


@pytest.mark.parametrize(
    ("more", "may_go_on"),
    [
        ({}, False),
        ({"additionalProperties": True}, True),
        ({"additionalProperties": False}, False),
        ({"anyOf": [{"required": ["a"]}]}, True),
        ({"properties": {"a": {"const": {"properties": {}}}}}, False),
    ],
    ids=str,
)
def test_an_object_has_the_properties_that_are_listed(
    llm: LLM, more: dict[str, Any], may_go_on: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"], **more}
    text = '{"a":{"properties":{}}'
    assert ("," in allowed_after(llm, text, StructuredOutputsParams(json=schema))) == may_go_on


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_texts_on_a_gpu_are_those_on_a_cpu(make_llm: Callable[..., LLM], cuda_graph: bool) -> None:
    prompts, others = crowd(12, seed=4, max_tokens=40)
    kinds = [kind for kind in KINDS for _ in range(4)]
    extras: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"repetition_penalty": 1.2}, {"min_tokens": 5}]
    own = [structured(kind, temperature=0.0, **extras[index % 4]) for index, kind in enumerate(kinds)]
    own_prompts = [[index + 1] * (5 * index + 1) for index in range(len(own))]
    expected = tokens_of(make_llm(device="cpu", max_num_seqs=40), own_prompts, own)
    llm = make_llm(device="cuda", max_num_seqs=40, cuda_graph=cuda_graph)
    tokens = tokens_of(llm, [*own_prompts, *prompts], [*own, *others])
    assert tokens[: len(own)] == expected


@pytest.mark.gpu
def test_prompts_beside_decodes_on_a_gpu_are_masked(make_llm: Callable[..., LLM]) -> None:
    prompt = [5, 9, 300] * 250
    params = {kind: structured(kind, temperature=0.0) for kind in KINDS}
    expected = tokens_of(make_llm(device="cpu"), [prompt] * len(params), list(params.values()))
    streams = Streams(make_llm, "cuda")
    try:
        streams.add(free=SamplingParams(temperature=0.0, max_tokens=700, ignore_eos=True))
        streams.run_until(lambda: streams.core.stats.generated_tokens > 5)
        streams.add(prompt, **params)
        streams.run_until(lambda: not streams.core.num_unfinished)
    finally:
        streams.core.close()
    assert [[streams.token_ids[kind]] for kind in params] == expected
