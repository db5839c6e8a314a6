"""Prompts that a GPU computes beside streams: each text is the one that its request gets alone, many rounds long."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend import LLM, RequestOutput, SamplingParams
from rose_backend.config import EngineConfig
from rose_backend.engine import scheduler
from rose_backend.engine.core import EngineCore
from rose_backend.engine.output_thread import OutputHandler
from tests.support.crowd import crowd, tokens_of
from tests.support.tiny_checkpoint import write_random_gpt2_124m

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NUM_ROUNDS = 12
SLEEP_CYCLES = 3_000_000
"""Of the GPU's clock, about 2 ms: a few decode steps."""
TIE = {"float32": 1e-3, "bfloat16": 0.5}
"""Greater leads of the likeliest token are no matter of how sums are rounded, which depends on who is beside."""
PATHS: list[dict[str, Any]] = [
    {},
    {"prefix_cache": False},
    {"max_num_batched_tokens": 300},
    {"run_ahead": 0},
    {"run_ahead": 3},
    {"num_blocks": 260},
]


class Server:
    """An engine as in a server, driven step by step.

    Attributes:
        outputs: of requests that have ended, the aborted ones included, by request id.
        num_begun: passes beside decode steps.
        num_waited: looks that found such a pass in flight.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self.outputs: dict[str, RequestOutput] = {}
        self.num_begun = self.num_waited = 0
        config = EngineConfig(model=str(path), device=DEVICE, **options)
        self.core = EngineCore(config, output_handler=OutputHandler(self._take))
        side = self.core._runner.side
        assert side is not None
        self._begin, self._is_over = side.begin, side.is_over
        side.begin, side.is_over = self._count, self._look  # type: ignore[method-assign]

    def serve(
        self, prompts: list[list[int]], params: list[SamplingParams], rng: random.Random, name: str
    ) -> set[int]:
        """Serve requests that come at any time, abort some; return which of them were aborted."""
        core, arrivals, aborted = self.core, list(range(len(prompts)))[::-1], set()
        while arrivals or core.num_unfinished:
            if core.can_step:
                core.step()
            for _ in range(min(rng.choice((0, 0, 0, 0, 1, 2)), len(arrivals))):
                index = arrivals.pop()
                request_id = f"{name} {index}"
                core.add(core.input_processor.make(prompts[index], params[index], request_id=request_id))
            if rng.random() < 0.05:
                live = [each for each in core._requests if each not in self.outputs]
                in_pass = [
                    completion.request.request_id
                    for slot in core._scheduler._slots_in_pass.tolist()
                    if (completion := core._state.completions[slot]) is not None
                ]
                if live and core.end(chosen := rng.choice(in_pass or live)):
                    aborted.add(int(chosen.split()[-1]))
        core.check_integrity()
        return aborted

    def _take(self, outputs: list[RequestOutput]) -> None:
        self.outputs |= {output.request_id: output for output in outputs if output.finished}

    def _count(self, compute: Callable[[], Any]) -> None:
        def late() -> Any:
            # The small model's passes would be over before the next step: they read and write late.
            torch.cuda._sleep(SLEEP_CYCLES)
            outcome = compute()
            torch.cuda._sleep(SLEEP_CYCLES)
            return outcome

        self.num_begun += 1
        self._begin(late)

    def _look(self) -> bool:
        is_over = self._is_over()
        self.num_waited += not is_over
        return is_over


@pytest.fixture(autouse=True)
def short_prompts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute prompts of any length beside decodes."""
    monkeypatch.setattr(scheduler, "MAX_PROMPT_TOKENS_AMONG_DECODES", 0)


@pytest.fixture(scope="module")
def gpt2_124m_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gpt2_124m(tmp_path_factory.mktemp("gpt2_124m"))


def long_prompts(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return streams to decode, and prompts to compute beside them, many of which begin alike."""
    rng = random.Random(seed)
    stems = [[rng.randrange(50_000) for _ in range(500)] for _ in range(3)]
    prompts, params = [], []
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    for index in range(60):
        own = [rng.randrange(50_000) for _ in range(rng.choice((1, 15, 16, 17, 90, 350)))]
        stem = rng.choice(stems)[: rng.choice((0, 0, 37, 256, 500))]
        prompts.append(stem + own)
        num_texts = 3 if index % 11 == 5 else 1
        params.append(replace(greedy, max_tokens=rng.choice((1, 3, 40, 120)), n=num_texts))
    return prompts, params


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(
    request: pytest.FixtureRequest, gpt2_124m_path: Path
) -> Iterator[tuple[str, list[list[int]], list[SamplingParams], list[RequestOutput]]]:
    """Yield the type, prompts, parameters, and what each request gets alone, with log-probabilities."""
    prompts, params = long_prompts(seed=3)
    options: dict[str, Any] = {"device": DEVICE, "dtype": request.param, "prefix_cache": False}
    with LLM(str(gpt2_124m_path), num_blocks=2000, max_num_seqs=8, **options) as llm:
        outputs = [
            llm.generate([prompt], replace(each, logprobs=2))[0]
            for prompt, each in zip(prompts, params, strict=True)
        ]
    yield request.param, prompts, params, outputs


def differences(expected: RequestOutput, actual: RequestOutput, tie: float) -> Iterator[str]:
    """Yield where texts differ first, unless the likeliest tokens there are within ``tie`` of each other."""
    for reference, completion in zip(expected.outputs, actual.outputs, strict=True):
        pairs = list(zip(reference.token_ids, completion.token_ids, strict=True))
        at = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if at is None:
            continue
        assert reference.logprobs is not None
        best = sorted((each.logprob for each in reference.logprobs[at].values()), reverse=True)
        if best[0] - best[1] > tie:
            yield f"{actual.request_id}.{completion.index}, token {at}: {pairs[at]}, lead {best[0] - best[1]}"


@pytest.mark.parametrize("options", PATHS, ids=str)
def test_greedy_texts_beside_others_are_those_of_requests_alone(
    gpt2_124m_path: Path,
    alone: tuple[str, list[list[int]], list[SamplingParams], list[RequestOutput]],
    options: dict[str, Any],
) -> None:
    dtype, prompts, params, expected = alone
    server = Server(gpt2_124m_path, **{"dtype": dtype, "num_blocks": 2000, "max_num_seqs": 48, **options})
    with closing(server.core):
        rng, wrong, num_checked = random.Random(1), [], 0
        for round_number in range(NUM_ROUNDS):
            aborted = server.serve(prompts, params, rng, name := f"round {round_number}")
            for index in set(range(len(prompts))) - aborted:
                wrong += differences(expected[index], server.outputs[f"{name} {index}"], TIE[dtype])
                num_checked += 1
        assert not wrong, f"{len(wrong)} of {num_checked}: " + "\n".join(wrong[:10])
        assert num_checked > NUM_ROUNDS * len(prompts) // 2
        assert server.num_begun > 4 * NUM_ROUNDS
        # Or nothing was shown.
        assert server.num_waited > server.num_begun
        assert server.core.manager.num_free_blocks == server.core.manager.num_usable_blocks


def test_texts_of_all_kinds_beside_others(tiny_model_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 3000, "max_num_seqs": 64}
    prompts, params = crowd(150, seed=16)
    with LLM(str(tiny_model_path), device=DEVICE, **options) as llm:
        expected = tokens_of(llm, prompts, params)
    server = Server(tiny_model_path, **options)
    with closing(server.core):
        rng = random.Random(2)
        for round_number in range(NUM_ROUNDS):
            aborted = server.serve(prompts, params, rng, name := f"round {round_number}")
            for index in set(range(len(prompts))) - aborted:
                tokens = [each.token_ids for each in server.outputs[f"{name} {index}"].outputs]
                assert tokens == expected[index], f"request {index}: {params[index]}"
        assert server.num_begun > 2 * NUM_ROUNDS
