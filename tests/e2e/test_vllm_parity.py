"""vLLM with ROSE generates greedily what transformers generates in float32, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams

from rose_backend.config import SWITCH_NAMES
from rose_backend.vllm_plugin.kv_cache.manager import MIN_TOKENS_WORTH_COPYING
from tests.e2e.conftest import MakeEngine
from tests.support.reference_generation import (
    NUM_NEW_TOKENS,
    GreedyReference,
    Prompts,
    greedy_differences,
    parity_prompts,
    tie_free_case,
)
from tests.support.vllm_engines import (
    VOCAB_SIZE,
    assert_greedy,
    count_preemptions,
    generate,
    manager_of,
    runner_of,
    scheduler_of,
)

PLUGIN_SWITCHES = (*SWITCH_NAMES, "block_manager")


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> tuple[Prompts, GreedyReference]:
    return tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def prompts(case: tuple[Prompts, GreedyReference]) -> Prompts:
    return case[0]


@pytest.fixture(scope="module")
def reference(case: tuple[Prompts, GreedyReference]) -> GreedyReference:
    return case[1]


def test_all_at_once_then_from_the_cache_then_alone(
    make_engine: MakeEngine, prompts: Prompts, reference: GreedyReference
) -> None:
    with make_engine() as llm:
        from rose_backend.vllm_plugin.attention.backend import RoseAttentionImpl
        from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
        from rose_backend.vllm_plugin.models.gpt2 import RoseGPT2LMHeadModel
        from rose_backend.vllm_plugin.sampler import RoseTopKTopP

        scheduler, runner = scheduler_of(llm), runner_of(llm)
        assert type(scheduler.kv_cache_manager) is RoseKVCacheManager
        assert type(runner.model) is RoseGPT2LMHeadModel
        assert type(runner.model.transformer.h[0].attn.attn.impl) is RoseAttentionImpl
        assert type(runner.sampler.topk_topp_sampler.forward) is RoseTopKTopP

        assert_greedy(generate(llm, prompts), reference)
        assert llm.llm_engine.engine_core.engine_core.request_block_hasher is None, "nobody reads its hashes"
        # Again: every prompt but its last token comes from the cache, to the token.
        again = generate(llm, prompts)
        assert_greedy(again, reference)
        hits = [len(prompt) - 1 for prompt in prompts]
        assert [output.num_cached_tokens for output in again] == [
            num_hits if num_hits >= MIN_TOKENS_WORTH_COPYING else 0 for num_hits in hits
        ]
        assert llm.reset_prefix_cache()
        alone = [generate(llm, (prompt,))[0] for prompt in prompts]
        assert_greedy(alone, reference)
        assert alone[0].num_cached_tokens == 0
        manager = scheduler.kv_cache_manager.manager
        assert manager.usage == 0.0
        manager.check_integrity()


def test_without_prefix_cache_in_chunks_that_split_blocks(
    make_engine: MakeEngine, prompts: Prompts, reference: GreedyReference
) -> None:
    with make_engine(enable_prefix_caching=False, max_num_batched_tokens=77, max_num_seqs=16) as llm:
        outputs = generate(llm, prompts)
        assert_greedy(outputs, reference)
        assert not any(output.num_cached_tokens for output in outputs)

        # A seeded request whose prompt takes several chunks draws the same tokens as in one chunk.
        longest = max(prompts, key=len)
        seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=12, top_k=40, ignore_eos=True)
        chunked = generate(llm, (longest,), seeded)[0].outputs[0].token_ids
    with make_engine() as llm:
        mixed = generate(llm, (prompts[0], longest, prompts[1]), seeded)
        assert mixed[1].outputs[0].token_ids == chunked
        other = SamplingParams(temperature=1.0, seed=6, max_tokens=12, top_k=40, ignore_eos=True)
        assert generate(llm, (longest,), other)[0].outputs[0].token_ids != chunked


def test_with_a_pool_too_small_for_the_load(
    make_engine: MakeEngine, prompts: Prompts, reference: GreedyReference
) -> None:
    # 100 blocks of 16 tokens: one and a half of the longest sequences.
    with make_engine(num_gpu_blocks_override=101, max_num_batched_tokens=300) as llm:
        preempted = count_preemptions(scheduler_of(llm))
        assert_greedy(generate(llm, prompts), reference)
        assert preempted
        manager = manager_of(llm)
        assert manager.stats.evictions > 0
        manager.check_integrity()


def test_conversations_that_share_parts_of_blocks(
    make_engine: MakeEngine, prompts: Prompts, reference: GreedyReference, tiny_model_path: Path
) -> None:
    with make_engine(block_size=128, max_num_batched_tokens=500) as llm:
        assert_greedy(generate(llm, prompts), reference)
        # Each next turn goes on from a different place inside the first one's answer.
        turns = tuple(
            (*prompt, *answer[: 7 * (index % 9)], 300 + index, 11, 12)
            for index, (prompt, answer) in enumerate(zip(prompts, reference.token_ids, strict=True))
            if len(prompt) < 900
        )
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        outputs = generate(llm, turns, params)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        assert greedy_differences(tiny_model_path, turns, answers) == []
        assert all(
            output.num_cached_tokens >= len(turn) - 3
            for output, turn in zip(outputs, turns, strict=True)
            if len(turn) - 3 >= MIN_TOKENS_WORTH_COPYING
        )
        stats = manager_of(llm).stats
        assert stats.clones + stats.claims >= 40, stats


@pytest.mark.parametrize("switched_off", [*PLUGIN_SWITCHES, "all but block_manager"])
def test_every_switch_leaves_the_tokens_as_they_are(
    make_engine: MakeEngine, prompts: Prompts, reference: GreedyReference, switched_off: str
) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from rose_backend.vllm_plugin.sampler import RoseTopKTopP

    # One prompt of each length, twice: equal prompts in one step meet vLLM's early publishing.
    chosen = list({len(prompt): index for index, prompt in enumerate(prompts)}.values()) * 2
    some = tuple(prompts[index] for index in chosen)
    expected = GreedyReference(
        tuple(reference.token_ids[index] for index in chosen),
        tuple(reference.leads[index] for index in chosen),
    )
    names = [switched_off] if switched_off in PLUGIN_SWITCHES else SWITCH_NAMES
    is_on = {name: name not in names for name in PLUGIN_SWITCHES}
    with make_engine(additional_config={"rose": dict.fromkeys(names, False)}) as llm:
        assert_greedy(generate(llm, some), expected)
        scheduler, runner = scheduler_of(llm), runner_of(llm)
        manager, attention = scheduler.kv_cache_manager, runner.model.transformer.h[0].attn.attn
        assert (type(manager) is not KVCacheManager) == is_on["block_manager"]
        assert manager.enable_caching == is_on["prefix_cache"]
        if is_on["block_manager"]:
            assert manager._full_blocks_only != is_on["token_granular_hits"]
            assert is_on["token_granular_hits"] or not manager.manager.stats.partial_hits
        assert scheduler.scheduler_config.enable_chunked_prefill == is_on["chunked_prefill"]
        assert attention.impl.appends_in_attention == (is_on["fused_kv_append"] and is_on["block_manager"])
        draws = type(runner.sampler.topk_topp_sampler.forward) is RoseTopKTopP
        assert draws == is_on["fused_sampler"]


def test_another_backend_runs_vllms_own_parts_only(
    make_engine: MakeEngine, prompts: Prompts, reference: GreedyReference
) -> None:
    from vllm.model_executor.models.gpt2 import GPT2LMHeadModel, GPT2Model
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    with make_engine(attention_backend=None, block_size=32) as llm:
        scheduler, runner = scheduler_of(llm), runner_of(llm)
        assert type(scheduler) is Scheduler and type(scheduler.kv_cache_manager) is KVCacheManager
        assert type(runner.model) is GPT2LMHeadModel and type(runner.model.transformer) is GPT2Model
        assert runner.sampler.topk_topp_sampler.forward.__func__ is TopKTopPSampler.forward_cpu
        assert runner.model.transformer.h[0].attn.attn.backend.name == "CPU_ATTN"
        assert_greedy(
            generate(llm, prompts[:16]), GreedyReference(reference.token_ids[:16], reference.leads[:16])
        )
        assert llm.llm_engine.engine_core.engine_core.request_block_hasher is not None


def test_gpt2_of_124m_parameters(make_engine: MakeEngine, gpt2_124m_path: Path) -> None:
    prompts = parity_prompts(50_000)
    with make_engine(model=str(gpt2_124m_path)) as llm:
        answers = [list(output.outputs[0].token_ids) for output in generate(llm, prompts)]
    assert all(len(answer) == NUM_NEW_TOKENS for answer in answers)
    assert greedy_differences(gpt2_124m_path, prompts, answers) == []
