"""vLLM's ``ExampleConnector`` and ``OffloadingConnector`` in engines with Rose's block manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from tests.e2e.conftest import MakeEngine
from tests.support.half_precision import mixed_prompts
from tests.support.llama_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.reference_generation import (
    NUM_NEW_TOKENS,
    SAFE_LEAD,
    GreedyReference,
    Prompts,
    tie_free_case,
)
from tests.support.stepped_engine import overlap_steps_on_cpu
from tests.support.vllm_engines import (
    HostCopies,
    assert_greedy,
    files_below,
    first,
    generate,
    lose_loads,
    manager_of,
    metrics_of,
)

BLOCK_SIZE = 16


@pytest.mark.parametrize(
    ("model", "steps"), [("GPT-2", "awaited"), ("GPT-2", "overlapped"), ("Qwen3", "overlapped")]
)
def test_offloaded_blocks_come_back(
    make_engine: MakeEngine,
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plans: list[Any],
    model: str,
    steps: str,
) -> None:
    if steps == "overlapped":
        overlap_steps_on_cpu(monkeypatch)
    monkeypatch.setattr(CPUOffloadingSpec, "get_worker", lambda spec, kv_caches: HostCopies(kv_caches))
    # With prompts of whole blocks, of which everything is offloaded: their last token is computed again.
    if model == "GPT-2":
        path, vocab_size = tiny_model_path, 2559
    else:
        path, vocab_size = write_checkpoint(tmp_path, "qwen3", hidden_size=128), VOCAB_SIZE
    prompts, reference = tie_free_case(path, vocab_size=vocab_size)
    # Requests are preempted: what they had is loaded again.
    options = {"model": str(path), "max_num_batched_tokens": 500, "num_gpu_blocks_override": 200}
    with make_engine(kv_offloading_size=1.0, disable_log_stats=False, **options) as llm:
        for _ in range(3):
            assert_greedy(generate(llm, prompts), reference)
            assert llm.reset_prefix_cache()
        hits = metrics_of(llm)
        assert hits["vllm:external_prefix_cache_hits"] > 1000
        manager_of(llm).check_integrity()
    assert plans or model != "Qwen3"


def test_loads_that_fail_are_computed(
    make_engine: MakeEngine, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap_steps_on_cpu(monkeypatch)
    prompts, reference = first(32, tie_free_case(tiny_model_path, vocab_size=2559))
    options, reports = lose_loads(monkeypatch)
    with make_engine(max_num_batched_tokens=500, num_gpu_blocks_override=150, **options) as llm:
        for _ in range(2):
            assert_greedy(generate(llm, prompts), reference)
            assert llm.reset_prefix_cache()
        manager_of(llm).check_integrity()
    assert len(reports) > 3


def test_as_many_blocks_move_as_behind_vllms_own_block_manager(
    make_engine: MakeEngine, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, _ = mixed_prompts(2559, max_len=400)
    moved = []
    for block_manager in (True, False):
        workers: list[HostCopies] = []

        def make_worker(spec: Any, kv_caches: Any, workers: list[HostCopies] = workers) -> HostCopies:
            workers.append(HostCopies(kv_caches))
            return workers[-1]

        monkeypatch.setattr(CPUOffloadingSpec, "get_worker", make_worker)
        rose = {"rose": {"block_manager": block_manager}}
        with make_engine(kv_offloading_size=1.0, additional_config=rose) as llm:
            counts = []
            # From the second round on heads of prompts are in the tier, or here, or in both. Those that come together
            # share no head: whether one waits for another is up to the block manager.
            for turn in range(3):
                for together in (prompts[:40:2], *([prompt] for prompt in prompts[turn : 40 + turn : 3])):
                    generate(llm, together)
                    counts.append((workers[0].num_stored, workers[0].num_loaded))
                assert llm.reset_prefix_cache()
        moved.append(counts)
    assert moved[0] == moved[1]
    assert min(moved[0][-1]) > 100


def prompts_for_files(model_path: Path) -> tuple[Prompts, GreedyReference]:
    """Return prompts for ``ExampleConnector``: of a single token it says that it has 16 less than none."""
    prompts, reference = tie_free_case(model_path, vocab_size=2559)
    long = [index for index, prompt in enumerate(prompts) if len(prompt) > 1]
    tokens, leads = (tuple(each[index] for index in long) for each in (reference.token_ids, reference.leads))
    return tuple(prompts[index] for index in long), GreedyReference(tokens, leads)


@pytest.mark.parametrize("steps", ["awaited", "overlapped"])
def test_prompts_are_loaded_after_a_reset(
    make_engine: MakeEngine,
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: str,
) -> None:
    if steps == "overlapped":
        overlap_steps_on_cpu(monkeypatch)
    prompts, reference = prompts_for_files(tiny_model_path)
    connector = files_below(tmp_path)
    # The connector stores a prompt when it is admitted, so all of it has to be computed in that step.
    num_tokens = sum(map(len, prompts))
    with make_engine(
        kv_transfer_config=connector, max_num_batched_tokens=num_tokens, max_num_seqs=256
    ) as llm:
        assert_greedy(generate(llm, prompts), reference)
        num_files = len(list(tmp_path.glob("*/*.safetensors")))
        assert num_files > 0
        for _ in range(2):
            assert llm.reset_prefix_cache()
            outputs = generate(llm, prompts)
            assert_greedy(outputs, reference)
        manager_of(llm).check_integrity()
    # All that it has of a prompt came from the files: blocks before the last two tokens. Nothing new went there.
    assert [output.num_cached_tokens for output in outputs] == [
        (len(prompt) - 2) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts
    ]
    assert len(list(tmp_path.glob("*/*.safetensors"))) == num_files


def test_one_engine_decodes_what_another_wrote_to_shared_storage(
    make_engine: MakeEngine, tiny_model_path: Path, tmp_path: Path
) -> None:
    prompts, reference = prompts_for_files(tiny_model_path)
    prefill = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    decode = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=0)
    options = {"max_num_batched_tokens": sum(map(len, prompts)), "max_num_seqs": 256}
    with make_engine(**options) as llm:
        alone = generate(llm, prompts, decode)
    with make_engine(kv_transfer_config=files_below(tmp_path, "kv_producer"), **options) as llm:
        generate(llm, prompts, prefill)
    num_files = len(list(tmp_path.glob("*/*.safetensors")))
    assert num_files > 0
    with make_engine(kv_transfer_config=files_below(tmp_path, "kv_consumer"), **options) as llm:
        outputs = generate(llm, prompts, decode)
        manager_of(llm).check_integrity()
    assert_greedy(outputs, reference)
    # Its own cache was empty: blocks before the last two tokens came from the files.
    assert [output.num_cached_tokens for output in outputs] == [
        (len(prompt) - 2) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts
    ]
    for output, other in zip(outputs, alone, strict=True):
        ours, theirs = (
            [next(iter(step.values())).logprob for step in each.outputs[0].logprobs]
            for each in (output, other)
        )
        assert ours == pytest.approx(theirs, abs=SAFE_LEAD / 4)
