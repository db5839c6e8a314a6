"""The block manager under the standalone engine when blocks are short and everything is shared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rose_backend import LLM, SamplingParams
from rose_backend.engine.core import EngineCore
from rose_backend.engine.outputs import RequestOutput
from tests.engine.conftest import GREEDY
from tests.support.pressure_case import PressureCase, pressure_case

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> PressureCase:
    return pressure_case(tiny_model_path, vocab_size=2559)


def greedy(max_tokens: int) -> SamplingParams:
    return replace(GREEDY, max_tokens=max_tokens)


def generate(llm: LLM, case: PressureCase, indices: list[int]) -> list[RequestOutput]:
    return llm.generate([case.prompts[i] for i in indices], [greedy(case.max_tokens[i]) for i in indices])


def wrong_answers(case: PressureCase, indices: list[int], outputs: list[RequestOutput]) -> list[str]:
    return [
        f"request {index} ({case.kinds[index]}): got {output.outputs[0].token_ids}, expected {case.expected[index]}"
        for index, output in zip(indices, outputs, strict=True)
        if tuple(output.outputs[0].token_ids) != case.expected[index]
    ]


@pytest.mark.parametrize("max_num_batched_tokens", [53, 2048])
def test_200_requests_through_a_tenth_of_the_blocks_they_need(
    make_llm: Callable[..., LLM], case: PressureCase, max_num_batched_tokens: int
) -> None:
    everyone = list(range(len(case.prompts)))
    llm = make_llm(
        num_blocks=1 + case.num_blocks_needed(BLOCK_SIZE) // 10,
        max_model_len=400,
        max_num_seqs=64,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    outputs = generate(llm, case, everyone)
    assert not (wrong := wrong_answers(case, everyone, outputs)), "\n".join(wrong[:4])
    stats, cache_stats = llm.stats, llm.core.manager.stats
    assert min(stats.preemptions, stats.recomputed_tokens, stats.cached_tokens) > 0, stats
    assert min(cache_stats.evictions, cache_stats.clones, cache_stats.partial_hits) > 0, cache_stats

    # The same text as one at a time: from what is left in the cache, and without any.
    sample = case.sample(20)
    cold = make_llm(max_model_len=400, prefix_cache=False)
    for engine in (llm, cold):
        for index in sample:
            (alone,) = generate(engine, case, [index])
            assert alone.outputs[0].text == outputs[index].outputs[0].text, f"request {index}"


def test_random_arrivals_and_aborts(make_llm: Callable[..., LLM], case: PressureCase) -> None:
    rng = random.Random(11)
    core = make_llm(max_num_seqs=12, num_blocks=60, max_model_len=400, max_num_batched_tokens=61).core
    finished: dict[str, RequestOutput] = {}
    aborted: dict[str, RequestOutput] = {}
    live: list[str] = []
    sampled: dict[str, SamplingParams] = {}
    arrivals = list(range(len(case.prompts)))
    rng.shuffle(arrivals)
    while arrivals or core.num_unfinished:
        for _ in range(rng.choice((0, 0, 1, 3))):
            if arrivals:
                index = arrivals.pop()
                name, params = str(index), greedy(case.max_tokens[index])
                if rng.random() < 0.15:
                    params = replace(params, temperature=1.0, n=rng.choice((1, 2, 4)), seed=index)
                    sampled[name] = params
                core.add(core.input_processor.make(case.prompts[index], params, request_id=name))
                live.append(name)
        if live and rng.random() < 0.15:
            name = live.pop(rng.randrange(len(live)))
            output = core.abort(name)
            assert output is not None
            aborted[name] = output
        for output in core.step():
            finished[output.request_id] = output
            live.remove(output.request_id)
        core.check_integrity()
    assert len(finished) + len(aborted) == len(case.prompts)
    stats, cache_stats = core.stats, core.manager.stats
    assert min(len(aborted), stats.preemptions, cache_stats.evictions, cache_stats.clones) > 5
    assert core.manager.usage == 0.0

    for name, output in (finished | aborted).items():
        if name not in sampled:
            tokens = tuple(output.outputs[0].token_ids)
            assert tokens == case.expected[int(name)][: len(tokens)], f"request {name}"
            assert name in aborted or len(tokens) == case.max_tokens[int(name)]
    alone = make_llm(prefix_cache=False)
    for name in list(sampled.keys() & finished.keys())[:12]:
        (expected,) = alone.generate([case.prompts[int(name)]], sampled[name])
        assert [c.token_ids for c in finished[name].outputs] == [c.token_ids for c in expected.outputs], name


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 2559, length).tolist()


def add(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 24) -> None:
    core.add(core.input_processor.make(prompt, greedy(max_tokens), request_id=name))


def run(core: EngineCore) -> dict[str, RequestOutput]:
    finished = {}
    while core.num_unfinished:
        finished |= {output.request_id: output for output in core.step()}
        core.check_integrity()
    return finished


def answers(llm: LLM, prompts: dict[str, list[int]], max_tokens: int = 24) -> dict[str, list[int]]:
    outputs = llm.generate(list(prompts.values()), greedy(max_tokens))
    return {name: output.outputs[0].token_ids for name, output in zip(prompts, outputs, strict=True)}


@pytest.mark.parametrize(("num_shared", "num_clones", "num_claims"), [(43, 2, 0), (47, 1, 1)])
def test_a_part_filled_block_of_a_cache_entry_and_two_sessions(
    make_llm: Callable[..., LLM], num_shared: int, num_clones: int, num_claims: int
) -> None:
    core, cold = make_llm().core, make_llm(prefix_cache=False)
    entry = random_tokens(40, seed=1)
    # The last of the eight new tokens is never computed: 47 tokens stay in the cache, 15 of them in the third block.
    entry += answers(cold, {"entry": entry}, 8)["entry"]
    add(core, "entry", entry[:40], 8)
    run(core)
    prompts = {name: entry[:num_shared] + random_tokens(20, seed) for seed, name in enumerate("ab", start=2)}
    before = replace(core.manager.stats)
    for name, prompt in prompts.items():
        add(core, name, prompt)
    core.step()
    rows = [request.completions[0].slot for request in core._requests.values()]
    tables = core.manager.block_table[rows]
    # Two full blocks are shared; each session writes into a third block of its own.
    assert (tables[0, :2] == tables[1, :2]).all() and tables[0, 2] != tables[1, 2]
    finished = run(core)
    expected = answers(cold, prompts)
    assert {name: finished[name].outputs[0].token_ids for name in prompts} == expected
    assert [finished[name].num_cached_tokens for name in prompts] == [num_shared] * 2
    assert core.manager.stats.clones - before.clones == num_clones
    assert core.manager.stats.claims - before.claims == num_claims

    # Nobody has disturbed the entry: it is found again to its last token, and is what it was.
    prompts["again"] = [*entry[:47], 7]
    add(core, "again", prompts["again"])
    again = run(core)["again"]
    assert again.num_cached_tokens == 47
    assert again.outputs[0].token_ids == answers(cold, prompts)["again"]


def test_two_sessions_behind_a_full_block_copy_nothing(make_llm: Callable[..., LLM]) -> None:
    core, cold = make_llm().core, make_llm(prefix_cache=False)
    stem = random_tokens(2 * BLOCK_SIZE, seed=4)
    add(core, "stem", [*stem, 5])
    run(core)
    prompts = {"a": [*stem, 11], "b": [*stem, 12]}
    for name, prompt in prompts.items():
        add(core, name, prompt)
    core.step()
    rows = [request.completions[0].slot for request in core._requests.values()]
    tables = core.manager.block_table[rows]
    assert (tables[0, :2] == tables[1, :2]).all() and tables[0, 2] != tables[1, 2]
    finished = run(core)
    assert [finished[name].num_cached_tokens for name in prompts] == [32, 32]
    assert {name: finished[name].outputs[0].token_ids for name in prompts} == answers(cold, prompts)
    assert core.stats.clones == 0 and core.manager.stats.claims == 0


@pytest.mark.parametrize("victim", ["owner", "copier"])
def test_either_side_of_a_clone_may_leave_at_any_step(make_llm: Callable[..., LLM], victim: str) -> None:
    core, cold = make_llm(num_blocks=30, max_model_len=400).core, make_llm(prefix_cache=False)
    owner = random_tokens(40, seed=6)
    prompts = {"owner": owner, "copier": owner[:38] + random_tokens(5, seed=7)}
    expected = answers(cold, prompts)
    (survivor,) = prompts.keys() - {victim}
    for abort_step in range(8):
        assert core.manager.reset_prefix_cache()
        clones_before = core.stats.clones
        add(core, "owner", prompts["owner"])
        core.step()
        add(core, "copier", prompts["copier"])
        for _ in range(abort_step):
            core.step()
        assert core.abort(victim) is not None
        core.check_integrity()
        assert run(core)[survivor].outputs[0].token_ids == expected[survivor]
        # Before its first step a copier has copied nothing, and an owner that has left writes no more: a claim.
        assert core.stats.clones - clones_before == (0 if abort_step == 0 and victim == "copier" else 1)


def test_rows_freed_while_their_clone_is_pending(make_llm: Callable[..., LLM]) -> None:
    core, cold = make_llm(num_blocks=27, max_model_len=400).core, make_llm(prefix_cache=False)
    manager, kv_cache = core.manager, core._runner._kv_cache
    owner = random_tokens(40, seed=8)
    fork = np.array([*owner[:38], 9], np.int32)
    add(core, "owner", owner)
    core.step()
    core._pipeline._commits.flush()  # as a prompt in the queue would have done
    source = int(manager.block_table[core._requests["owner"].completions[0].slot, 2])

    # The copy's only holder leaves: the copy is called off.
    admission = manager.add(fork)
    assert admission is not None and admission.num_cached_tokens == 38
    assert manager.reserve(np.array([admission.row]), 1).ok
    assert manager.clones.held_sources().tolist() == [source]
    manager.free(np.array([admission.row]))
    assert not len(manager.clones.held_sources())
    core.check_integrity()

    # The source's only holder leaves: the clone queue holds it until the copy has run.
    admission = manager.add(fork)
    assert admission is not None and manager.reserve(np.array([admission.row]), 1).ok
    copy = int(manager.block_table[admission.row, 2])
    content = kv_cache[:, :, source, :6].clone()
    core.abort("owner")
    assert manager.pool.ref_counts[source] == 1
    # The step that copies fills all other blocks.
    filler = {"filler": random_tokens(22 * BLOCK_SIZE - 5, seed=9)}
    add(core, "filler", filler["filler"], max_tokens=5)
    core.step()
    assert manager.usage == 25 / 26 and manager.pool.ref_counts[source] == 0
    assert bool((kv_cache[:, :, copy, :6] == content).all())
    manager.free(np.array([admission.row]))
    assert run(core)["filler"].outputs[0].token_ids == answers(cold, filler, 5)["filler"]
