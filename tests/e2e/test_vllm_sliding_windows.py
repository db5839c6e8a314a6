"""Models with sliding windows under Rose's block manager: the text is that of vLLM's own CPU backend.

Where it can, windows have KV cache groups of their own and let go of what they have passed; else all K/V is kept.
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
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from rose_backend.vllm_plugin.kv_cache.spec import RoseAttentionSpec
from tests.e2e.conftest import MakeEngine
from tests.e2e.test_vllm_features import draft_counts, inputs_of, scheduler_of
from tests.support.half_precision import mixed_prompts
from tests.support.random_checkpoints import (
    SLIDING_WINDOW,
    VOCAB_SIZE,
    write_random_gemma3,
    write_random_gemma4,
    write_random_gpt_oss,
    write_random_mistral,
)
from tests.support.reference_generation import Prompts
from tests.support.stepped_engine import SteppedEngine

ROUNDING = 1e-3
"""Log-probabilities that two ways of computing in float32 may differ by."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, logprobs=2)
BLOCK_SIZE = 16
OPTIONS: dict[str, Any] = {"max_model_len": 560, "max_num_seqs": 32, "kv_cache_memory_bytes": 48 << 20}

WRITERS: dict[str, Callable[[Path], Path]] = {
    "Mistral": write_random_mistral,
    "Gemma 3": write_random_gemma3,
    "Gemma 4": write_random_gemma4,
    "gpt-oss": write_random_gpt_oss,
}

NUM_WINDOW_GROUPS = {"Gemma 3": 3, "gpt-oss": 1}
"""KV cache groups of layers with windows, beside one of layers without. Models that are not here have one group."""
WINDOW_COLUMNS = -(-(SLIDING_WINDOW - 1) // BLOCK_SIZE) + 1

DRAFTER_BACKENDS = {"Mistral": "ROSE", "Gemma 3": None}
"""None: the one that vLLM chooses."""


@dataclass(frozen=True)
class Case:
    """Prompts up to twelve windows long, and what vLLM's own parts make of them."""

    name: str
    model: str
    prompts: Prompts
    expected: list[list[tuple[int, float]]]
    """Tokens and log-probabilities."""

    @property
    def num_window_groups(self) -> int:
        return NUM_WINDOW_GROUPS.get(self.name, 0)

    def num_blocks(self, indices: Any) -> int:
        """Blocks that these prompts need to be generated for, all at once."""
        lengths = [len(self.prompts[index]) + GREEDY.max_tokens for index in indices]
        columns = [-(-length // BLOCK_SIZE) for length in lengths]
        return sum(count + self.num_window_groups * min(count, WINDOW_COLUMNS) for count in columns)

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


def said(output: Any) -> list[tuple[int, float]]:
    tokens, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
    return [(token, entry[token].logprob) for token, entry in zip(tokens, logprobs, strict=True)]


def lead(output: Any) -> float:
    """Return by how much the likeliest token is ahead of the next, where it is least."""
    ranked = [sorted(entry.values(), key=lambda one: one.rank) for entry in output.outputs[0].logprobs]
    return min(first.logprob - second.logprob for first, second, *_ in ranked)


@pytest.fixture(scope="module", params=WRITERS)
def case(
    request: pytest.FixtureRequest, make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    model = str(WRITERS[request.param](tmp_path_factory.mktemp("windows")))
    prompts = mixed_prompts(VOCAB_SIZE, max_len=400)[0][:48]
    own = {"attention_backend": None, "block_size": 32, "enable_prefix_caching": False}
    with make_engine(model=model, **OPTIONS, **own) as llm:
        outputs = llm.generate(inputs_of(prompts), GREEDY, use_tqdm=False)
    # Rounding may decide between tokens that are almost equally likely.
    clear = [index for index, output in enumerate(outputs) if lead(output) > 2 * ROUNDING]
    assert len(clear) > 30 and sum(len(prompts[index]) > 4 * SLIDING_WINDOW for index in clear) > 12
    return Case(
        request.param,
        model,
        tuple(prompts[index] for index in clear),
        [said(outputs[index]) for index in clear],
    )


def test_through_a_tenth_of_the_blocks_in_chunks_then_alone_and_from_the_cache(
    make_engine: MakeEngine, case: Case
) -> None:
    everyone = range(len(case.prompts))
    few = {"num_gpu_blocks_override": 1 + case.num_blocks(everyone) // 13, "max_num_batched_tokens": 77}
    with make_engine(model=case.model, **OPTIONS, **few) as llm:
        case.check_groups(llm)
        engine = SteppedEngine(llm)
        assert case.differences(everyone, engine.generate(case.prompts, GREEDY)) == []
        stats = engine.manager.stats
        assert engine.num_preemptions > 0
        assert min(stats.evictions, stats.clones, stats.partial_hits) > 0, stats

        # Shared heads are longer than a window: what the last tokens attend to is all in the cache.
        longest = sorted(everyone, key=lambda index: -len(case.prompts[index]))[:8]
        for index in longest:
            assert engine.llm.reset_prefix_cache()
            for num_cached in (0, len(case.prompts[index]) - 1):
                outputs = engine.generate([case.prompts[index]], GREEDY)
                assert case.differences([index], outputs) == []
                assert outputs[0].num_cached_tokens == num_cached


def test_200_requests_come_and_go(make_engine: MakeEngine, case: Case) -> None:
    choose = random.Random(5)
    # A tenth of what all of them need, and room for the longest.
    chosen = [choose.randrange(len(case.prompts)) for _ in range(200)]
    few = {"num_gpu_blocks_override": 1 + case.num_blocks(chosen) // 10, "max_num_batched_tokens": 301}
    with make_engine(model=case.model, **OPTIONS, **few) as llm:
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
        assert min(stats.evictions, stats.clones, stats.partial_hits) > 0, stats
    # An aborted one has said something, or nothing.
    whole = [name for name in range(200) if f"{name}" in outputs and outputs[f"{name}"].finished]
    assert 150 < len(whole) < 200
    assert case.differences([chosen[name] for name in whole], [outputs[f"{name}"] for name in whole]) == []


@pytest.mark.parametrize("case", ["Gemma 3"], indirect=True)
def test_vllms_own_block_manager_drops_what_windows_have_passed(make_engine: MakeEngine, case: Case) -> None:
    handed_back = {"additional_config": {"rose": {"block_manager": False}}}
    with make_engine(model=case.model, **OPTIONS, **handed_back, max_num_batched_tokens=77) as llm:
        groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec) for group in groups for _ in group.layer_names]
        assert kinds.count(SlidingWindowSpec) == 3 and kinds.count(RoseAttentionSpec) == 1
        chosen = range(16)
        inputs = inputs_of(tuple(case.prompts[index] for index in chosen))
        assert case.differences(chosen, llm.generate(inputs, GREEDY, use_tqdm=False)) == []


@pytest.mark.parametrize("case", DRAFTER_BACKENDS, indirect=True)
def test_a_drafter_with_windows(make_engine: MakeEngine, case: Case) -> None:
    draft: dict[str, Any] = {"method": "draft_model", "model": case.model, "num_speculative_tokens": 3}
    if (backend := DRAFTER_BACKENDS[case.name]) is not None:
        draft["attention_backend"] = backend
    few = {"block_size": 32, "max_num_batched_tokens": 300, "disable_log_stats": False}
    with make_engine(model=case.model, **OPTIONS, **few, speculative_config=draft) as llm:
        chosen, num_accepted = range(16), draft_counts(llm)[1]
        for _ in range(2):
            inputs = inputs_of(tuple(case.prompts[index] for index in chosen))
            assert case.differences(chosen, llm.generate(inputs, GREEDY, use_tqdm=False)) == []
        num_accepted = draft_counts(llm)[1] - num_accepted
        # The drafter is the model itself: what it gets wrong, it was told wrong by its cache. Three of four tokens
        # behind the first are drafts.
        assert num_accepted > 0.97 * 2 * len(chosen) * (GREEDY.max_tokens - 1) * 3 / 4
        manager = scheduler_of(llm).kv_cache_manager.manager
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
