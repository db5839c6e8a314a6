"""A seeded random day of a vLLM server: arrivals, priorities, every kind of request, aborts and cache resets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.support.pressure_case import PressureCase
from tests.support.stepped_engine import MAX_STEPS, SteppedEngine

CHOICES = ["a red rose", "a blue king", "the old garden wall"]
GREEDY_KINDS = ("plain", "logprobs", "prompt_logprobs", "salted", "cold", "stop_token", "stop_string")
KINDS = (*GREEDY_KINDS, "plain", "plain", "plain", "sampled", "choice")
LOST_BY_RESETS = ("prompt_logprobs", "sampled")
"""What vLLM 0.32 gets wrong, whoever manages its blocks, when running requests are reset with a step in flight: that
step's prompt logprobs and draws are dropped and not made again."""

_NEVER = "this is never said"


@dataclass(frozen=True)
class Visit:
    """One request of the day."""

    name: str
    index: int  # of the prompt in the case
    kind: str
    params: SamplingParams
    salt: str | None
    priority: int
    arrival_step: int
    abort_step: int | None


@dataclass
class Day:
    """What happened."""

    visits: list[Visit]
    outputs: dict[str, Any]
    aborted: set[str] = field(default_factory=set)
    num_resets: int = 0


def plan_visits(
    case: PressureCase, tokenizer: Any, num_requests: int, *, seed: int, without: tuple[str, ...] = ()
) -> list[Visit]:
    """Return ``num_requests`` visits to prompts of ``case``, of all ``KINDS`` but ``without``."""
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if kind not in without]
    visits = []
    step = 0
    for number in range(num_requests):
        # Bursts and lulls.
        step += rng.choice((0, 0, 0, 1, 2, 5))
        kind, index = rng.choice(kinds), rng.randrange(len(case.prompts))
        visits.append(
            Visit(
                name=f"v{number}",
                index=index,
                kind=kind,
                params=_params(case, tokenizer, index, kind, seed=number),
                salt=rng.choice(("one", "other")) if kind == "salted" else None,
                priority=rng.randrange(3),
                arrival_step=step,
                abort_step=step + rng.randrange(40) if rng.random() < 0.15 else None,
            )
        )
    return visits


def spend_day(
    engine: SteppedEngine, case: PressureCase, visits: list[Visit], *, seed: int, has_resets: bool
) -> Day:
    """Step the engine until all visits have ended; the block manager is recounted after every step and abort.

    Args:
        has_resets: now and then the prefix cache is emptied, and whoever runs has to begin again.
    """
    rng = random.Random(seed)
    day = Day(visits, {})
    coming = sorted(visits, key=lambda visit: visit.arrival_step)
    leaving = [visit for visit in visits if visit.abort_step is not None]
    for step in range(MAX_STEPS):
        while coming and coming[0].arrival_step <= step:
            visit = coming.pop(0)
            engine.add(
                visit.name, case.prompts[visit.index], visit.params, salt=visit.salt, priority=visit.priority
            )
        for visit in [visit for visit in leaving if visit.abort_step == step]:
            if not (visit.name in engine.outputs and engine.outputs[visit.name].finished):
                day.aborted.add(visit.name)
                engine.abort(visit.name)
        if has_resets and rng.random() < 0.02:
            assert engine.llm.reset_prefix_cache(reset_running_requests=True)
            engine.manager.check_integrity()
            day.num_resets += 1
        elif rng.random() < 0.05:
            # Refused while anybody holds blocks.
            assert engine.llm.reset_prefix_cache() == (engine.manager.usage == 0.0)
        if engine.is_busy:
            engine.step()
        elif not coming:
            day.outputs = engine.drain()
            return day
    raise AssertionError(f"{MAX_STEPS} steps, and requests are still unfinished")


def wrong_outputs(day: Day, case: PressureCase, tokenizer: Any) -> list[str]:
    """Return one line for each output that is not what the request alone would have got."""
    lines = []
    for visit in day.visits:
        output = day.outputs.get(visit.name)
        is_aborted = visit.name in day.aborted
        if output is None:
            problem = None if is_aborted else "no output"
        elif not (is_aborted or output.finished):
            problem = "unfinished"
        else:
            problem = _problem(visit, output, case, tokenizer, is_aborted)
        if problem is not None:
            lines.append(f"{visit.name} ({visit.kind}, prompt {visit.index}): {problem}")
    return lines


def _params(case: PressureCase, tokenizer: Any, index: int, kind: str, seed: int) -> SamplingParams:
    expected, max_tokens = case.expected[index], case.max_tokens[index]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    if kind == "logprobs":
        options["logprobs"] = 2
    elif kind == "prompt_logprobs":
        options["prompt_logprobs"] = 1
    elif kind == "cold":
        options["skip_reading_prefix_cache"] = True
    elif kind == "stop_token":
        options["stop_token_ids"] = [expected[max_tokens // 2]]
    elif kind == "stop_string":
        options["stop"] = [_stop_string(tokenizer, case.prompts[index], expected)]
    elif kind == "sampled":
        options |= {"temperature": 0.9, "top_k": 50, "seed": seed, "n": 1 + seed % 3, "max_tokens": 16}
        # vLLM brings the completions of one request together only in a final output.
        options["output_kind"] = RequestOutputKind.FINAL_ONLY
    elif kind == "choice":
        options |= {"structured_outputs": StructuredOutputsParams(choice=CHOICES), "ignore_eos": False}
    return SamplingParams(**options)


def _stop_string(tokenizer: Any, prompt: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return a word of the second half of the text, or what never comes."""
    text = tokenizer.decode(expected)
    words = [word for word in text[len(text) // 2 :].split() if word.isascii() and word.isalpha()]
    # A prompt that ends inside a character runs into the text that vLLM searches.
    is_clean = "\ufffd" not in tokenizer.decode([*prompt[-8:], *expected])
    return words[0] if words and is_clean else _NEVER


def _problem(visit: Visit, output: Any, case: PressureCase, tokenizer: Any, is_aborted: bool) -> str | None:
    completions, expected = output.outputs, case.expected[visit.index]
    tokens = tuple(completions[0].token_ids)
    if visit.kind == "sampled":
        return None if is_aborted or len(completions) == visit.params.n else "completions are missing"
    if visit.kind == "choice":
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        is_right = any(choice.startswith(text) for choice in CHOICES) if is_aborted else text in CHOICES
        return None if is_right else f"got {text!r}"
    if tokens != expected[: len(tokens)]:
        return f"got {tokens}, expected {expected}"
    if is_aborted:
        return None
    if visit.kind in ("cold", "prompt_logprobs") and output.num_cached_tokens:
        return f"read {output.num_cached_tokens} tokens from the cache"
    if visit.kind == "stop_token":
        stop = visit.params.stop_token_ids[0]
        is_whole = tokens == expected[: expected.index(stop) + 1]
    elif visit.kind == "stop_string":
        (stop,) = visit.params.stop
        is_whole = tokens == expected if stop == _NEVER else _ends_with_first(tokenizer, tokens, stop)
    else:
        is_whole = tokens == expected
    if not is_whole:
        return f"ended after {len(tokens)} tokens"
    if visit.kind == "logprobs" and len(completions[0].logprobs) != len(tokens):
        return "logprobs are missing"
    if visit.kind == "prompt_logprobs" and len(output.prompt_logprobs) != len(case.prompts[visit.index]):
        return "prompt logprobs are missing"
    return None


def _ends_with_first(tokenizer: Any, tokens: tuple[int, ...], stop: str) -> bool:
    return stop in tokenizer.decode(tokens) and stop not in tokenizer.decode(tokens[:-1])
