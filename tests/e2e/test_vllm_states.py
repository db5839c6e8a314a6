"""Models with states beside K/V under Rose's block manager: the text is that of vLLM without a prefix cache.

Checkpoints are copied into the cache at the ends of prompts, at junctions and at rows' ends; a hit ends at one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import MambaSpec

from rose_backend.vllm_plugin.kv_cache.checkpoints import MIN_TOKENS_WORTH_A_CHECKPOINT
from rose_backend.vllm_plugin.kv_cache.spec import RoseAttentionSpec
from tests.e2e.conftest import MakeEngine
from tests.e2e.test_vllm_features import inputs_of, scheduler_of
from tests.e2e.test_vllm_sliding_windows import ROUNDING, lead, said
from tests.support.random_checkpoints import VOCAB_SIZE, write_random_granite_hybrid, write_random_lfm2
from tests.support.reference_generation import Prompts
from tests.support.stepped_engine import SteppedEngine, overlap_steps_on_cpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
BLOCK_SIZE = 16
OPTIONS: dict[str, Any] = {
    "max_model_len": 560,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 64 << 20,
    # vLLM's operator for CPUs turns queries and keys of LFM2 wrongly: it takes the stride of heads for that of tokens.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
WRITERS: dict[str, Callable[[Path], Path]] = {
    "LFM2": write_random_lfm2,
    "Granite 4 H": write_random_granite_hybrid,
}


@dataclass(frozen=True)
class Case:
    """Prompts that share heads, and what vLLM's own parts make of them without a prefix cache."""

    name: str
    model: str
    prompts: Prompts
    expected: list[list[tuple[int, float]]]
    """Tokens and log-probabilities."""
    heads: list[int]
    """Of each prompt, which head it has."""

    def differences(self, indices: Any, outputs: list[Any]) -> list[str]:
        lines = []
        for index, output in zip(indices, outputs, strict=True):
            pairs = zip(said(output), self.expected[index], strict=True)
            for place, ((token, logprob), (wanted, known)) in enumerate(pairs):
                if token != wanted or abs(logprob - known) > ROUNDING:
                    lines.append(f"prompt {index}, place {place}: {token} {logprob}, not {wanted} {known}")
                    break
        return lines


NUM_FEW_BLOCKS = {"LFM2": 60, "Granite 4 H": 40}
"""A sequence of the longest length, its states, and little more."""
HEADS = (70, 150, 211, 333)


@pytest.fixture(scope="module", params=WRITERS)
def case(
    request: pytest.FixtureRequest, make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    model = str(WRITERS[request.param](tmp_path_factory.mktemp("states")))
    choose = random.Random(3)

    def draw(count: int) -> list[int]:
        return [choose.randrange(4, VOCAB_SIZE) for _ in range(count)]

    stems = [draw(length) for length in HEADS]
    prompts = [(*stems[index % 4], *draw(choose.randint(5, 120))) for index in range(48)]
    own = {"attention_backend": None, "block_size": 32, "enable_prefix_caching": False}
    with make_engine(model=model, **OPTIONS, **own) as llm:
        outputs = llm.generate(inputs_of(tuple(prompts)), GREEDY, use_tqdm=False)
    # Rounding may decide between tokens that are almost equally likely.
    clear = [index for index, output in enumerate(outputs) if lead(output) > 2 * ROUNDING]
    assert len(clear) > 24
    return Case(
        request.param,
        model,
        tuple(prompts[index] for index in clear),
        [said(outputs[index]) for index in clear],
        [index % 4 for index in clear],
    )


def test_heads_are_found_to_the_token_from_the_third_request_on(make_engine: MakeEngine, case: Case) -> None:
    with make_engine(model=case.model, **OPTIONS, block_size=BLOCK_SIZE) as llm:
        groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec) for group in groups]
        assert kinds.count(RoseAttentionSpec) == 1 and kinds.count(MambaSpec) == len(kinds) - 1 > 0
        engine, num_seen = SteppedEngine(llm), [0] * len(HEADS)
        for index, (tokens, head) in enumerate(zip(case.prompts, case.heads, strict=True)):
            (output,) = engine.generate([tokens], GREEDY)
            assert case.differences([index], [output]) == []
            # Less only where the end of a wide block is so close to the head's that a state behind it is not worth it.
            least = HEADS[head] - (0 if case.name == "LFM2" else MIN_TOKENS_WORTH_A_CHECKPOINT - 1)
            assert num_seen[head] < 2 or least <= output.num_cached_tokens <= HEADS[head]
            assert num_seen[head] or not output.num_cached_tokens
            num_seen[head] += 1
        assert min(num_seen) > 3 and engine.manager.stats.checkpoints > 0

        # The next turn of a conversation starts where the last answer ended; its last token was never computed. A short
        # answer's state is not kept where it takes the memory of more than four times as many tokens.
        size = (len(kinds) - 1) * groups[0].kv_cache_spec.block_size
        tokens, answer = case.prompts[0], [token for token, _ in case.expected[0]]
        (output,) = engine.generate([(*tokens, *answer, 7, 8, 9)], GREEDY)
        is_kept = len(answer) - 1 >= size // 4
        assert output.num_cached_tokens == len(tokens) + (len(answer) - 1 if is_kept else 0)
        assert is_kept == (case.name == "LFM2")


@pytest.mark.parametrize("is_async", [False, True])
def test_through_few_blocks_in_chunks(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, case: Case, is_async: bool
) -> None:
    if is_async:
        overlap_steps_on_cpu(monkeypatch)
    everyone = range(len(case.prompts))
    few = {"num_gpu_blocks_override": NUM_FEW_BLOCKS[case.name], "max_num_batched_tokens": 77}
    with make_engine(model=case.model, **OPTIONS, block_size=BLOCK_SIZE, **few) as llm:
        engine = SteppedEngine(llm)
        for _ in range(2):
            assert case.differences(everyone, engine.generate(case.prompts, GREEDY)) == []
        stats = engine.manager.stats
        assert engine.num_preemptions > 0
        assert min(stats.evictions, stats.checkpoints, stats.partial_hits) > 0, stats


def test_200_requests_come_and_go(make_engine: MakeEngine, case: Case) -> None:
    choose = random.Random(5)
    chosen = [choose.randrange(len(case.prompts)) for _ in range(200)]
    few = {"num_gpu_blocks_override": 300, "max_num_batched_tokens": 301}
    with make_engine(model=case.model, **OPTIONS, block_size=BLOCK_SIZE, **few) as llm:
        engine = SteppedEngine(llm)
        for name, index in enumerate(chosen):
            engine.add(f"{name}", case.prompts[index], GREEDY)
            if choose.random() < 0.3:
                engine.step()
            if choose.random() < 0.1:
                engine.abort(f"{choose.randrange(max(name - 20, 0), name + 1)}")
            if name == 120:
                assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        outputs = engine.drain()
        stats = engine.manager.stats
        assert engine.num_preemptions > 0
        assert min(stats.evictions, stats.checkpoints, stats.partial_hits) > 0, stats
    # An aborted one has said something, or nothing.
    whole = [name for name in range(200) if f"{name}" in outputs and outputs[f"{name}"].finished]
    assert 150 < len(whole) < 200
    assert case.differences([chosen[name] for name in whole], [outputs[f"{name}"] for name in whole]) == []


@pytest.mark.parametrize("case", ["Granite 4 H"], indirect=True)
@pytest.mark.parametrize("option", ["batched_scheduling", "token_granular_hits", "fused_kv_append"])
def test_with_a_part_switched_off(make_engine: MakeEngine, case: Case, option: str) -> None:
    off = {"additional_config": {"rose": {option: False}}}
    with make_engine(model=case.model, **OPTIONS, block_size=BLOCK_SIZE, **off) as llm:
        engine, chosen = SteppedEngine(llm), range(16)
        for _ in range(2):
            outputs = engine.generate([case.prompts[index] for index in chosen], GREEDY)
            assert case.differences(chosen, outputs) == []
        assert engine.manager.stats.hit_tokens > 0
        if option == "token_granular_hits":
            assert not engine.manager.stats.partial_hits
