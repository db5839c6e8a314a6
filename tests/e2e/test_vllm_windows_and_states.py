"""Models with sliding windows, or states beside K/V: the text is that of vLLM's own parts without a prefix cache.

Where it can, windows have KV cache groups of their own and let go of what they have passed; else all K/V is kept.
Checkpoints of states are copied into the cache at the ends of prompts, at junctions and at requests' ends; a hit ends
at one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from rose_backend.vllm_plugin.kv_cache.checkpoints import MIN_TOKENS_WORTH_A_CHECKPOINT
from rose_backend.vllm_plugin.kv_cache.spec import RoseAttentionSpec
from rose_backend.vllm_plugin.step_graph.reasons import has_prompts, why_step_is_not_replayed
from tests.e2e.conftest import MakeEngine
from tests.support.half_precision import mixed_prompts
from tests.support.random_checkpoints import (
    SLIDING_WINDOW,
    VOCAB_SIZE,
    write_random_gemma3,
    write_random_gemma4,
    write_random_gpt_oss,
    write_random_granite_hybrid,
    write_random_lfm2,
    write_random_mistral,
)
from tests.support.reference_generation import Prompts
from tests.support.stepped_engine import SteppedEngine, overlap_steps_on_cpu
from tests.support.vllm_engines import draft_counts, generate, manager_of, scheduler_of

ROUNDING = 1e-3
"""Log-probabilities that two ways of computing in float32 may differ by."""
BLOCK_SIZE = 16

WITH_WINDOWS: dict[str, Callable[[Path], Path]] = {
    "Mistral": write_random_mistral,
    "Gemma 3": write_random_gemma3,
    "Gemma 4": write_random_gemma4,
    "gpt-oss": write_random_gpt_oss,
}
WITH_STATES: dict[str, Callable[[Path], Path]] = {
    "LFM2": write_random_lfm2,
    "Granite 4 H": write_random_granite_hybrid,
}
windows = pytest.mark.parametrize("case", WITH_WINDOWS, indirect=True)
states = pytest.mark.parametrize("case", WITH_STATES, indirect=True)
HEADS = (70, 150, 211, 333)
"""Lengths of what prompts of models with states begin with, in turn."""
NUM_FEW_BLOCKS = {"LFM2": 60, "Granite 4 H": 40}
"""A sequence of the longest length, its states, and little more."""

NUM_WINDOW_GROUPS = {"Gemma 3": 3, "gpt-oss": 1}
"""KV cache groups of layers with windows, beside one of layers without. Models that are not here have one group."""
WINDOW_COLUMNS = -(-(SLIDING_WINDOW - 1) // BLOCK_SIZE) + 1

DRAFTER_BACKENDS = {"Mistral": "ROSE", "Gemma 3": None}
"""None: the one that vLLM chooses."""


@dataclass(frozen=True)
class Case:
    """Prompts, and what vLLM's own parts make of them: up to twelve windows long, or with one of four heads."""

    name: str
    model: str
    prompts: Prompts
    expected: list[list[tuple[int, float]]]
    """Tokens and log-probabilities."""
    heads: list[int]
    """Of each prompt, which head it has."""

    @property
    def has_states(self) -> bool:
        return self.name in WITH_STATES

    @property
    def params(self) -> SamplingParams:
        return params_of(self.name)

    @property
    def options(self) -> dict[str, Any]:
        """Of its engines."""
        return options_of(self.name)

    @property
    def num_window_groups(self) -> int:
        return NUM_WINDOW_GROUPS.get(self.name, 0)

    def num_blocks(self, indices: Any) -> int:
        """Blocks that these prompts need to be generated for, all at once."""
        lengths = [len(self.prompts[index]) + self.params.max_tokens for index in indices]
        columns = [-(-length // BLOCK_SIZE) for length in lengths]
        return sum(count + self.num_window_groups * min(count, WINDOW_COLUMNS) for count in columns)

    def check_counters(self, engine: SteppedEngine) -> None:
        """Requests were preempted, blocks evicted, hits ended inside blocks, and states or blocks were copied."""
        stats = engine.manager.stats
        assert engine.num_preemptions > 0
        copies = stats.checkpoints if self.has_states else stats.clones
        assert min(stats.evictions, copies, stats.partial_hits) > 0, stats

    def check_groups(self, llm: Any) -> None:
        groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec) for group in groups]
        assert kinds.count(RoseAttentionSpec) == 1 and len(kinds) == 1 + self.num_window_groups
        assert kinds.count(SlidingWindowSpec) == self.num_window_groups

    def differences(self, indices: Any, outputs: list[Any]) -> list[str]:
        lines = []
        for index, output in zip(indices, outputs, strict=True):
            pairs = zip(said(output), self.expected[index], strict=True)
            for place, ((token, logprob), (wanted, known)) in enumerate(pairs):
                if token != wanted or abs(logprob - known) > ROUNDING:
                    lines.append(f"prompt {index}, place {place}: {token} {logprob}, not {wanted} {known}")
                    break
        return lines


def params_of(name: str) -> SamplingParams:
    max_tokens = 20 if name in WITH_STATES else 25
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


def options_of(name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"max_model_len": 560, "max_num_seqs": 32}
    if name in WITH_STATES:
        # vLLM's operator for CPUs turns queries and keys of LFM2 wrongly: it takes the stride of heads for that of
        # tokens.
        operators = {"custom_ops": ["all", "-rotary_embedding"]}
        return {**options, "kv_cache_memory_bytes": 64 << 20, "compilation_config": operators}
    return {**options, "kv_cache_memory_bytes": 48 << 20}


def said(output: Any) -> list[tuple[int, float]]:
    tokens, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
    return [(token, entry[token].logprob) for token, entry in zip(tokens, logprobs, strict=True)]


def lead(output: Any) -> float:
    """Return by how much the likeliest token is ahead of the next, where it is least."""
    ranked = [sorted(entry.values(), key=lambda one: one.rank) for entry in output.outputs[0].logprobs]
    return min(first.logprob - second.logprob for first, second, *_ in ranked)


def prompts_with_heads() -> Prompts:
    choose = random.Random(3)

    def draw(count: int) -> list[int]:
        return [choose.randrange(4, VOCAB_SIZE) for _ in range(count)]

    stems = [draw(length) for length in HEADS]
    return tuple((*stems[index % 4], *draw(choose.randint(5, 120))) for index in range(48))


@pytest.fixture(scope="module", params=[*WITH_WINDOWS, *WITH_STATES])
def case(
    request: pytest.FixtureRequest, make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    name, has_states = request.param, request.param in WITH_STATES
    model = str((WITH_WINDOWS | WITH_STATES)[name](tmp_path_factory.mktemp("model")))
    prompts = prompts_with_heads() if has_states else mixed_prompts(VOCAB_SIZE, max_len=400)[0][:48]
    own = {"attention_backend": None, "block_size": 32, "enable_prefix_caching": False}
    with make_engine(model=model, **options_of(name), **own) as llm:
        outputs = generate(llm, prompts, params_of(name))
    # Rounding may decide between tokens that are almost equally likely.
    clear = [index for index, output in enumerate(outputs) if lead(output) > 2 * ROUNDING]
    num_long = sum(len(prompts[index]) > 4 * SLIDING_WINDOW for index in clear)
    assert len(clear) > (24 if has_states else 30) and num_long > 12
    expected = [said(outputs[index]) for index in clear]
    heads = [index % len(HEADS) for index in clear]
    return Case(name, model, tuple(prompts[index] for index in clear), expected, heads)


@windows
def test_through_a_tenth_of_the_blocks_in_chunks_then_alone_and_from_the_cache(
    make_engine: MakeEngine, case: Case
) -> None:
    everyone = range(len(case.prompts))
    few = {"num_gpu_blocks_override": 1 + case.num_blocks(everyone) // 13, "max_num_batched_tokens": 77}
    with make_engine(model=case.model, **case.options, **few) as llm:
        case.check_groups(llm)
        engine = SteppedEngine(llm)
        assert case.differences(everyone, engine.generate(case.prompts, case.params)) == []
        case.check_counters(engine)

        # Shared heads are longer than a window: what the last tokens attend to is all in the cache.
        longest = sorted(everyone, key=lambda index: -len(case.prompts[index]))[:8]
        for index in longest:
            assert engine.llm.reset_prefix_cache()
            for num_cached in (0, len(case.prompts[index]) - 1):
                outputs = engine.generate([case.prompts[index]], case.params)
                assert case.differences([index], outputs) == []
                assert outputs[0].num_cached_tokens == num_cached


def test_200_requests_come_and_go(make_engine: MakeEngine, case: Case) -> None:
    choose = random.Random(5)
    chosen = [choose.randrange(len(case.prompts)) for _ in range(200)]
    # A tenth of what all of them need, and room for the longest.
    num_blocks = 300 if case.has_states else 1 + case.num_blocks(chosen) // 10
    few = {"num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 301}
    with make_engine(model=case.model, **case.options, **few) as llm:
        engine = SteppedEngine(llm)
        finished = engine.come_and_go([case.prompts[index] for index in chosen], case.params, seed=6)
        case.check_counters(engine)
    assert case.differences([chosen[name] for name in finished], list(finished.values())) == []


@pytest.mark.parametrize("case", ["Gemma 3"], indirect=True)
def test_vllms_own_block_manager_drops_what_windows_have_passed(make_engine: MakeEngine, case: Case) -> None:
    handed_back = {"additional_config": {"rose": {"block_manager": False}}}
    with make_engine(model=case.model, **case.options, **handed_back, max_num_batched_tokens=77) as llm:
        groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec) for group in groups for _ in group.layer_names]
        assert kinds.count(SlidingWindowSpec) == 3 and kinds.count(RoseAttentionSpec) == 1
        chosen = range(16)
        outputs = generate(llm, case.prompts[: len(chosen)], case.params)
        assert case.differences(chosen, outputs) == []


@pytest.mark.parametrize("case", DRAFTER_BACKENDS, indirect=True)
def test_a_drafter_with_windows(make_engine: MakeEngine, case: Case) -> None:
    draft: dict[str, Any] = {"method": "draft_model", "model": case.model, "num_speculative_tokens": 3}
    if (backend := DRAFTER_BACKENDS[case.name]) is not None:
        draft["attention_backend"] = backend
    few = {"block_size": 32, "max_num_batched_tokens": 300, "disable_log_stats": False}
    with make_engine(model=case.model, **case.options, **few, speculative_config=draft) as llm:
        chosen, num_accepted = range(16), draft_counts(llm)[1]
        for _ in range(2):
            outputs = generate(llm, case.prompts[: len(chosen)], case.params)
            assert case.differences(chosen, outputs) == []
        num_accepted = draft_counts(llm)[1] - num_accepted
        # The drafter is the model itself: what it gets wrong, it was told wrong by its cache. Three of four tokens
        # behind the first are drafts.
        assert num_accepted > 0.97 * 2 * len(chosen) * (case.params.max_tokens - 1) * 3 / 4
        manager = manager_of(llm)
        manager.check_integrity()
        assert min(manager.stats.partial_hits, manager.stats.clones) > 0, manager.stats


@pytest.mark.parametrize("case", ["Gemma 4"], indirect=True)
def test_layers_that_share_caches_of_several_shapes_are_refused_by_name(case: Case) -> None:
    def finish(**options: Any) -> None:
        args = {"model": case.model, "attention_backend": "rose", "dtype": "float32"}
        EngineArgs(**args, **options).create_engine_config()

    finish()
    shared = {"hf_overrides": {"num_kv_shared_layers": 1}}
    with pytest.raises(ValueError, match="layers that share K/V beside layers of other shapes"):
        finish(**shared)
    finish(**shared, additional_config={"rose": {"block_manager": False}})


@states
def test_heads_are_found_to_the_token_from_the_third_request_on(make_engine: MakeEngine, case: Case) -> None:
    with make_engine(model=case.model, **case.options) as llm:
        groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec) for group in groups]
        assert kinds.count(RoseAttentionSpec) == 1 and kinds.count(MambaSpec) == len(kinds) - 1 > 0
        engine, num_seen = SteppedEngine(llm), [0] * len(HEADS)
        for index, (tokens, head) in enumerate(zip(case.prompts, case.heads, strict=True)):
            (output,) = engine.generate([tokens], case.params)
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
        (output,) = engine.generate([(*tokens, *answer, 7, 8, 9)], case.params)
        is_kept = len(answer) - 1 >= size // 4
        assert output.num_cached_tokens == len(tokens) + (len(answer) - 1 if is_kept else 0)
        assert is_kept == (case.name == "LFM2")


@states
@pytest.mark.parametrize("is_async", [False, True])
def test_through_few_blocks_in_chunks(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, case: Case, is_async: bool
) -> None:
    if is_async:
        overlap_steps_on_cpu(monkeypatch)
    everyone = range(len(case.prompts))
    few = {"num_gpu_blocks_override": NUM_FEW_BLOCKS[case.name], "max_num_batched_tokens": 77}
    with make_engine(model=case.model, **case.options, **few) as llm:
        engine = SteppedEngine(llm)
        for _ in range(2):
            assert case.differences(everyone, engine.generate(case.prompts, case.params)) == []
        case.check_counters(engine)


@states
def test_new_blocks_and_checkpoints_come_with_decodes_that_can_be_replayed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    with make_engine(model=case.model, **case.options) as llm:
        scheduler, decodes = scheduler_of(llm), []
        schedule = scheduler.schedule

        def noting(*args: Any) -> Any:
            output = schedule(*args)
            if output.total_num_scheduled_tokens and not has_prompts(output):
                decodes.append(output)
            return output

        monkeypatch.setattr(scheduler, "schedule", noting)
        everyone = range(len(case.prompts))
        assert case.differences(everyone, generate(llm, case.prompts, case.params)) == []
    assert {why_step_is_not_replayed(output) for output in decodes} == {None}
    assert any(output.kv_cache_block_copies for output in decodes)
    assert any(output.new_block_ids_to_zero for output in decodes)


@pytest.mark.parametrize("case", ["Granite 4 H"], indirect=True)
@pytest.mark.parametrize("option", ["batched_scheduling", "token_granular_hits", "fused_kv_append"])
def test_with_a_part_switched_off(make_engine: MakeEngine, case: Case, option: str) -> None:
    off = {"additional_config": {"rose": {option: False}}}
    with make_engine(model=case.model, **case.options, **off) as llm:
        engine, chosen = SteppedEngine(llm), range(16)
        for _ in range(2):
            outputs = engine.generate([case.prompts[index] for index in chosen], case.params)
            assert case.differences(chosen, outputs) == []
        assert engine.manager.stats.hit_tokens > 0
        if option == "token_granular_hits":
            assert not engine.manager.stats.partial_hits
