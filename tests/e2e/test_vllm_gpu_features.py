"""On CUDA: speculation, sleep and reset under asynchronous scheduling with both model runners; several GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode

from benchmarks.support.engines import as_flags
from rose_backend.vllm_plugin.plugin_logger import SAMPLES
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.e2e.test_vllm_features import (
    GREEDY,
    NGRAM,
    VOCAB_SIZE,
    assert_drafts_were_kept_and_rejected,
    assert_greedy,
    draft_counts,
    finish,
    inputs_of,
    scheduler_of,
    start,
)
from tests.support.half_precision import judge, mixed_prompts, wrong_tokens
from tests.support.random_checkpoints import VOCAB_SIZE as RANDOM_VOCAB_SIZE
from tests.support.random_checkpoints import WRITERS
from tests.support.reference_generation import GreedyReference, Prompts, greedy_differences, tie_free_case
from tests.support.vllm_server import running_server

pytestmark = pytest.mark.gpu

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
RUNNERS = pytest.mark.parametrize("runner", ["V2", "V1"])
FLOAT32_ROUNDING = 1e-3
"""Leads that two ways of computing in float32 may see on different sides."""


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> tuple[Prompts, GreedyReference]:
    return tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE)


def choose_runner(monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))


@RUNNERS
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_ngram_speculation(
    make_engine: MakeEngine,
    case: tuple[Prompts, GreedyReference],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    eager: bool,
) -> None:
    choose_runner(monkeypatch, runner)
    options: dict[str, Any] = {"speculative_config": NGRAM, "enforce_eager": eager, **GPU_MEMORY}
    with make_engine(num_gpu_blocks_override=400, disable_log_stats=False, **options) as llm:
        mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        assert mode.decode_mode() == (CUDAGraphMode.NONE if eager else CUDAGraphMode.FULL)
        before = draft_counts(llm)
        for _ in range(2):
            assert_greedy(llm.generate(inputs_of(case[0]), GREEDY, use_tqdm=False), case[1])
        assert_drafts_were_kept_and_rejected(llm, before)
        manager = scheduler_of(llm).kv_cache_manager.manager
        manager.check_integrity()
        assert manager.stats.clones > 0 and manager.usage == 0.0


@RUNNERS
def test_blocks_that_were_offloaded_come_back(
    make_engine: MakeEngine,
    case: tuple[Prompts, GreedyReference],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
) -> None:
    choose_runner(monkeypatch, runner)
    options: dict[str, Any] = {"kv_offloading_size": 1.0, "max_num_batched_tokens": 500, **GPU_MEMORY}
    with make_engine(num_gpu_blocks_override=200, disable_log_stats=False, **options) as llm:
        for _ in range(3):
            assert_greedy(llm.generate(inputs_of(case[0]), GREEDY, use_tqdm=False), case[1])
            # What was offloaded stays.
            assert llm.reset_prefix_cache()
        values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert values["vllm:external_prefix_cache_hits"] > 1000
        scheduler_of(llm).kv_cache_manager.manager.check_integrity()


@RUNNERS
def test_random_draws_with_speculation_follow_the_seed(
    make_engine: MakeEngine,
    case: tuple[Prompts, GreedyReference],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
) -> None:
    # On a CPU there is nothing to compare: vLLM 0.32 loses the temperature of drafted rows there, with any backend.
    choose_runner(monkeypatch, runner)
    prompts = tuple(prompt for prompt in case[0] if len(prompt) < 100)[:8]
    with make_engine(speculative_config=NGRAM, **GPU_MEMORY) as llm:
        draws, drawn_by_rose, drawn_by_vllm = [], SAMPLES.rose, sum(SAMPLES.vllm.values())
        # A prompt that is found but for its last token starts with another number of drafts, so with other draws, than
        # one that is not: that is how vLLM speculates. The first run fills the cache.
        for seed in (0, 1, 1, 2):
            params = SamplingParams(
                temperature=0.8, top_p=0.9, top_k=30, seed=seed, max_tokens=24, ignore_eos=True
            )
            outputs = llm.generate(inputs_of(prompts), params, use_tqdm=False)
            draws.append([output.outputs[0].token_ids for output in outputs])
        # vLLM's sampler draws from seeds, in steps with drafts and without; Rose's draws in V2's steps without either:
        # those of prompts alone that are not in the cache.
        assert SAMPLES.rose == drawn_by_rose and sum(SAMPLES.vllm.values()) - drawn_by_vllm >= 4 * len(
            prompts
        )
        assert llm.reset_prefix_cache()
        params = SamplingParams(temperature=0.8, top_p=0.9, top_k=30, max_tokens=24, ignore_eos=True)
        llm.generate(inputs_of(prompts), params, use_tqdm=False)
        assert (SAMPLES.rose - drawn_by_rose >= len(prompts)) == (runner == "V2"), str(SAMPLES)
    assert draws[1] == draws[2] != draws[3]


@RUNNERS
@pytest.mark.parametrize("backend", [None, "ROSE"], ids=["drafter on its own backend", "drafter on ROSE"])
def test_draft_model(
    make_engine: MakeEngine,
    case: tuple[Prompts, GreedyReference],
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    backend: str | None,
) -> None:
    choose_runner(monkeypatch, runner)
    draft = {"method": "draft_model", "model": str(tiny_model_path), "num_speculative_tokens": 3}
    if backend:
        draft["attention_backend"] = backend
    with make_engine(
        num_gpu_blocks_override=400, disable_log_stats=False, speculative_config=draft, **GPU_MEMORY
    ) as llm:
        assert scheduler_of(llm).scheduler_config.async_scheduling
        before = draft_counts(llm)
        for _ in range(2):
            assert_greedy(llm.generate(inputs_of(case[0]), GREEDY, use_tqdm=False), case[1])
        num_drafted, num_accepted = (now - then for now, then in zip(draft_counts(llm), before, strict=True))
        # The drafter is the model itself: what it gets wrong, it was told wrong by its cache.
        assert num_accepted > 0.9 * num_drafted > 0, (num_accepted, num_drafted)
        scheduler_of(llm).kv_cache_manager.manager.check_integrity()


@RUNNERS
@pytest.mark.parametrize("level", [1, 2])
def test_no_sleep_lets_a_lost_cache_be_found(
    make_engine: MakeEngine,
    case: tuple[Prompts, GreedyReference],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    level: int,
) -> None:
    choose_runner(monkeypatch, runner)
    # vLLM's allocator serves one engine per process, and keeps a little after its end: each engine has its own process.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with make_engine(enable_sleep_mode=True, **GPU_MEMORY) as llm:
        assert_greedy(llm.generate(inputs_of(case[0]), GREEDY, use_tqdm=False), case[1])
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:
            llm.collective_rpc("reload_weights")
        outputs = llm.generate(inputs_of(case[0]), GREEDY, use_tqdm=False)
        assert_greedy(outputs, case[1])
        long = [output for output in outputs if len(output.prompt_token_ids) >= 200]
        assert [output.num_cached_tokens for output in long] == [0] * len(long) != []


@pytest.mark.parametrize("level", [1, 2])
def test_packed_layers_wake_up_where_their_graphs_expect_them(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    path = WRITERS["Qwen3"](tmp_path)
    prompts = mixed_prompts(RANDOM_VOCAB_SIZE, max_len=300)[0][:32]
    options = {"enable_sleep_mode": True, "enforce_eager": False, "max_num_batched_tokens": 512}
    with make_engine(model=str(path), **options, **GPU_MEMORY) as llm:
        assert llm.llm_engine.vllm_config.model_config.hf_config.architectures == ["RoseQwen3ForCausalLM"]
        for turn in range(2):
            if turn:
                llm.sleep(level=level)
                llm.wake_up()
                if level == 2:
                    llm.collective_rpc("reload_weights")
            outputs = llm.generate(inputs_of(prompts), GREEDY, use_tqdm=False)
            judged = judge(path, prompts, [output.outputs[0].token_ids for output in outputs])
            assert wrong_tokens(judged, FLOAT32_ROUNDING) == []


@RUNNERS
def test_a_reset_while_steps_are_in_flight(
    make_engine: MakeEngine,
    case: tuple[Prompts, GreedyReference],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
) -> None:
    choose_runner(monkeypatch, runner)
    with make_engine(**GPU_MEMORY) as llm:
        assert scheduler_of(llm).scheduler_config.async_scheduling
        manager = scheduler_of(llm).kv_cache_manager.manager
        for attempt in range(3):
            indices = start(llm, case[0], f"attempt{attempt}-")
            assert llm.reset_prefix_cache(reset_running_requests=True)
            assert manager.usage == 0.0
            assert_greedy(finish(llm, indices), case[1])
            manager.check_integrity()


# Without stages beside drafts, which vLLM 0.32 does not run with any attention backend: under V1 it looks for the
# drafter on each stage, and only the last one has it; under V2 the first stage counts more drafts than it was given
# tokens (`assert (num_scheduled_tokens_np >= num_logits).all()` in prepare_inputs, seen with TRITON_ATTN) and is lost.
PARALLEL: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "tensor, drafts": {"tensor_parallel_size": 2, "speculative_config": NGRAM},
    "pipeline, small chunks": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 77},
}


@needs_two_gpus
@RUNNERS
@pytest.mark.parametrize("manner", PARALLEL)
def test_two_gpus(
    make_engine: MakeEngine,
    case: tuple[Prompts, GreedyReference],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    manner: str,
) -> None:
    choose_runner(monkeypatch, runner)
    # vLLM sees only whether torch holds a CUDA context here; looking for devices, as tests do, rules out forks, too.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with make_engine(num_gpu_blocks_override=400, **PARALLEL[manner], **GPU_MEMORY) as llm:
        for _ in range(2):
            assert_greedy(llm.generate(inputs_of(case[0]), GREEDY, use_tqdm=False), case[1])
        manager = scheduler_of(llm).kv_cache_manager.manager
        manager.check_integrity()
        assert min(manager.stats.clones, manager.stats.evictions) > 0, manager.stats


@needs_two_gpus
@pytest.mark.parametrize(("executor", "runner"), [("mp", "V2"), ("mp", "V1"), ("ray", "V2")])
@pytest.mark.parametrize("model", ["Llama", "Qwen3"])
def test_grouped_heads_on_two_gpus(
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    executor: str,
    runner: str,
) -> None:
    choose_runner(monkeypatch, runner)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if executor == "ray":
        ray = pytest.importorskip("ray", reason="ray is not installed")
        # An engine leaves its placement group, and so both GPUs, to the process that it ran in.
        request.addfinalizer(ray.shutdown)
    path = WRITERS[model](tmp_path)
    prompts = mixed_prompts(RANDOM_VOCAB_SIZE, max_len=400)[0][:64]
    parallel: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": executor}
    # flashinfer's all-reduce may use NVLink multicast, which not every machine allows.
    parallel["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    # Compiled, with CUDA graphs (fewer for smaller steps); each GPU has one K/V head.
    options = {"enforce_eager": False, "max_num_batched_tokens": 512, **parallel, **GPU_MEMORY}
    with make_engine(model=str(path), **options) as llm:
        for _ in range(2):
            outputs = llm.generate(inputs_of(prompts), GREEDY, use_tqdm=False)
            judged = judge(path, prompts, [output.outputs[0].token_ids for output in outputs])
            assert wrong_tokens(judged, FLOAT32_ROUNDING) == []
        manager = scheduler_of(llm).kv_cache_manager.manager
        manager.check_integrity()
        assert min(manager.stats.partial_hits, manager.stats.clones) > 0, manager.stats


@needs_two_gpus
def test_data_parallel_engines_have_a_cache_each(tiny_model_path: Path, tmp_path: Path) -> None:
    prompt = [7 * index % 2000 + 1 for index in range(120)]
    arguments = ["--attention-backend", "rose", "--dtype", "float32"]
    arguments += as_flags({"max_num_batched_tokens": 512, **GPU_MEMORY})
    with running_server(
        tiny_model_path, tmp_path / "server.log", *arguments, "--data-parallel-size", "2"
    ) as server:
        answers = []
        for _ in range(8):
            response = server.post(
                "/v1/completions",
                model=str(tiny_model_path),
                prompt=prompt,
                max_tokens=20,
                temperature=0,
                ignore_eos=True,
                return_token_ids=True,
            )
            assert response.status_code == 200, response.text
            answers.append(response.json()["choices"][0]["token_ids"])
    assert greedy_differences(tiny_model_path, (tuple(prompt),) * 8, answers) == []
