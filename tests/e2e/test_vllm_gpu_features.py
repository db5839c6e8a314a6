"""On CUDA, with both model runners: float32 against transformers, speculation, sleep, reset, float8, several GPUs."""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config import CUDAGraphMode

from benchmarks.support.engines import as_flags
from benchmarks.vllm_weight_updates import ENTRANCES, find_stale, read_sets, tensors_read
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata
from rose_backend.vllm_plugin.options import batches_decode_steps
from rose_backend.vllm_plugin.plugin_logger import SAMPLES
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.half_precision import judge, logprob_errors, mixed_prompts, wrong_tokens
from tests.support.random_checkpoints import VOCAB_SIZE as RANDOM_VOCAB_SIZE
from tests.support.random_checkpoints import WRITERS
from tests.support.reference_generation import (
    NUM_NEW_TOKENS,
    GreedyReference,
    Prompts,
    greedy_differences,
    parity_prompts,
    reference_logits,
    tie_free_case,
)
from tests.support.vllm_engines import (
    NGRAM,
    RUNNERS,
    VOCAB_SIZE,
    assert_drafts_were_kept_and_rejected,
    assert_greedy,
    draft_counts,
    finish,
    generate,
    manager_of,
    metrics_of,
    needs_two_gpus,
    runner_of,
    scheduler_of,
    start,
)
from tests.support.vllm_server import running_server

pytestmark = pytest.mark.gpu

FLOAT32_ROUNDING = 1e-3
"""Leads that two ways of computing in float32 may see on different sides."""


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> tuple[Prompts, GreedyReference]:
    return tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE)


@RUNNERS
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_ngram_speculation(
    make_engine: MakeEngine, case: tuple[Prompts, GreedyReference], runner: str, eager: bool
) -> None:
    options: dict[str, Any] = {"speculative_config": NGRAM, "enforce_eager": eager, **GPU_MEMORY}
    with make_engine(runner=runner, num_gpu_blocks_override=400, disable_log_stats=False, **options) as llm:
        mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        assert mode.decode_mode() == (CUDAGraphMode.NONE if eager else CUDAGraphMode.FULL)
        before = draft_counts(llm)
        for _ in range(2):
            assert_greedy(generate(llm, case[0]), case[1])
        assert_drafts_were_kept_and_rejected(llm, before)
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.stats.clones > 0 and manager.usage == 0.0


@RUNNERS
def test_blocks_that_were_offloaded_come_back(
    make_engine: MakeEngine, case: tuple[Prompts, GreedyReference], runner: str
) -> None:
    options: dict[str, Any] = {"kv_offloading_size": 1.0, "max_num_batched_tokens": 500, **GPU_MEMORY}
    with make_engine(runner=runner, num_gpu_blocks_override=200, disable_log_stats=False, **options) as llm:
        for _ in range(3):
            assert_greedy(generate(llm, case[0]), case[1])
            # What was offloaded stays.
            assert llm.reset_prefix_cache()
        values = metrics_of(llm)
        assert values["vllm:external_prefix_cache_hits"] > 1000
        manager_of(llm).check_integrity()


@RUNNERS
def test_random_draws_with_speculation_follow_the_seed(
    make_engine: MakeEngine, case: tuple[Prompts, GreedyReference], runner: str
) -> None:
    # On a CPU there is nothing to compare: vLLM 0.32 loses the temperature of drafted rows there, with any backend.
    prompts = tuple(prompt for prompt in case[0] if len(prompt) < 100)[:8]
    with make_engine(runner=runner, speculative_config=NGRAM, **GPU_MEMORY) as llm:
        draws, drawn_by_rose, drawn_by_vllm = [], SAMPLES.rose, sum(SAMPLES.vllm.values())
        # A prompt that is found but for its last token starts with another number of drafts, so with other draws, than
        # one that is not: that is how vLLM speculates. The first run fills the cache.
        for seed in (0, 1, 1, 2):
            params = SamplingParams(
                temperature=0.8, top_p=0.9, top_k=30, seed=seed, max_tokens=24, ignore_eos=True
            )
            outputs = generate(llm, prompts, params)
            draws.append([output.outputs[0].token_ids for output in outputs])
        # vLLM's sampler draws from seeds, in steps with drafts and without; Rose's draws in V2's steps without either:
        # those of prompts alone that are not in the cache.
        assert SAMPLES.rose == drawn_by_rose and sum(SAMPLES.vllm.values()) - drawn_by_vllm >= 4 * len(
            prompts
        )
        assert llm.reset_prefix_cache()
        params = SamplingParams(temperature=0.8, top_p=0.9, top_k=30, max_tokens=24, ignore_eos=True)
        generate(llm, prompts, params)
        assert (SAMPLES.rose - drawn_by_rose >= len(prompts)) == (runner == "V2"), str(SAMPLES)
    assert draws[1] == draws[2] != draws[3]


@RUNNERS
@pytest.mark.parametrize("backend", [None, "ROSE"], ids=["drafter on its own backend", "drafter on ROSE"])
def test_draft_model(
    make_engine: MakeEngine,
    case: tuple[Prompts, GreedyReference],
    tiny_model_path: Path,
    runner: str,
    backend: str | None,
) -> None:
    draft = {"method": "draft_model", "model": str(tiny_model_path), "num_speculative_tokens": 3}
    if backend:
        draft["attention_backend"] = backend
    with make_engine(
        runner=runner,
        num_gpu_blocks_override=400,
        disable_log_stats=False,
        speculative_config=draft,
        **GPU_MEMORY,
    ) as llm:
        assert scheduler_of(llm).scheduler_config.async_scheduling
        assert batches_decode_steps(llm.llm_engine.vllm_config) == (runner == "V2")
        before = draft_counts(llm)
        for _ in range(2):
            assert_greedy(generate(llm, case[0]), case[1])
        num_drafted, num_accepted = (now - then for now, then in zip(draft_counts(llm), before, strict=True))
        # The drafter is the model itself: what it gets wrong, it was told wrong by its cache.
        assert num_accepted > 0.9 * num_drafted > 0, (num_accepted, num_drafted)
        manager_of(llm).check_integrity()


@RUNNERS
@pytest.mark.parametrize("level", [1, 2])
def test_no_sleep_lets_a_lost_cache_be_found(
    make_engine: MakeEngine,
    case: tuple[Prompts, GreedyReference],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    level: int,
) -> None:
    # vLLM's allocator serves one engine per process, and keeps a little after its end: each engine has its own process.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with make_engine(runner=runner, enable_sleep_mode=True, **GPU_MEMORY) as llm:
        assert_greedy(generate(llm, case[0]), case[1])
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:
            llm.collective_rpc("reload_weights")
        outputs = generate(llm, case[0])
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
            outputs = generate(llm, prompts)
            judged = judge(path, prompts, [output.outputs[0].token_ids for output in outputs])
            assert wrong_tokens(judged, FLOAT32_ROUNDING) == []


@pytest.mark.parametrize("is_checkpoint_format", [True, False])
def test_norms_reloaded_alone_are_what_graphs_read(
    make_engine: MakeEngine, tmp_path: Path, is_checkpoint_format: bool
) -> None:
    path, other = WRITERS["Qwen3"](tmp_path / "old"), tmp_path / "new"
    prompts = mixed_prompts(RANDOM_VOCAB_SIZE, max_len=300)[0][:32]
    weights = load_file(path / "model.safetensors")
    norms = {
        name: torch.linspace(-2, 3, len(weight)).to(weight)
        for name, weight in weights.items()
        if name.endswith("layernorm.weight")
    }
    assert norms
    copytree(path, other)
    save_file(weights | norms, other / "model.safetensors", {"format": "pt"})
    options = {"enforce_eager": False, "max_num_batched_tokens": 512, **GPU_MEMORY}
    with make_engine(model=str(path), **options) as llm:
        assert llm.llm_engine.vllm_config.model_config.hf_config.architectures == ["RoseQwen3ForCausalLM"]
        first = [output.outputs[0].token_ids for output in generate(llm, prompts)]
        assert wrong_tokens(judge(path, prompts, first), FLOAT32_ROUNDING) == []
        reloaded = {"weights_iterator": list(norms.items()), "is_checkpoint_format": is_checkpoint_format}
        llm.collective_rpc("reload_weights", kwargs=reloaded)
        assert llm.reset_prefix_cache()
        tokens = [output.outputs[0].token_ids for output in generate(llm, prompts)]
        assert tokens != first and wrong_tokens(judge(other, prompts, tokens), FLOAT32_ROUNDING) == []


def test_graphs_read_updated_weights_whatever_brings_them(make_engine: MakeEngine, tmp_path: Path) -> None:
    path, other = WRITERS["Qwen3"](tmp_path / "old"), tmp_path / "new"
    prompts = mixed_prompts(RANDOM_VOCAB_SIZE, max_len=300)[0][:32]
    (old, new) = sets = read_sets(str(path), torch.device("cuda"))
    copytree(path, other)
    save_file({name: each.cpu() for name, each in new}, other / "model.safetensors", {"format": "pt"})
    options = {"enforce_eager": False, "max_num_batched_tokens": 512, **GPU_MEMORY}
    with make_engine(model=str(path), runner="V2", **options) as llm:
        model, manager = runner_of(llm).model, runner_of(llm).cudagraph_manager
        assert any(not isinstance(read, torch.Tensor) for _, read in tensors_read(model)), "nothing is packed"
        steps = manager.rose_step_graphs
        for entrance, (turn, weights) in itertools.product(ENTRANCES, enumerate(3 * sets[::-1])):
            shuffled = random.Random(turn).sample(weights, len(weights))
            llm.collective_rpc(partial(ENTRANCES[entrance], weights=shuffled))
            assert find_stale(model, weights) == [], entrance
            assert llm.reset_prefix_cache()
            tokens = [output.outputs[0].token_ids for output in generate(llm, prompts)]
            now = path if weights is old else other
            assert wrong_tokens(judge(now, prompts, tokens), FLOAT32_ROUNDING) == [], entrance
        assert manager.rose_step_graphs is steps, "graphs were captured again"


@RUNNERS
def test_a_reset_while_steps_are_in_flight(
    make_engine: MakeEngine, case: tuple[Prompts, GreedyReference], runner: str
) -> None:
    with make_engine(runner=runner, **GPU_MEMORY) as llm:
        assert scheduler_of(llm).scheduler_config.async_scheduling
        manager = manager_of(llm)
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
    # vLLM sees only whether torch holds a CUDA context here; looking for devices, as tests do, rules out forks, too.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with make_engine(runner=runner, num_gpu_blocks_override=400, **PARALLEL[manner], **GPU_MEMORY) as llm:
        for _ in range(2):
            assert_greedy(generate(llm, case[0]), case[1])
        manager = manager_of(llm)
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
    with make_engine(runner=runner, model=str(path), **options) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts)
            judged = judge(path, prompts, [output.outputs[0].token_ids for output in outputs])
            assert wrong_tokens(judged, FLOAT32_ROUNDING) == []
        manager = manager_of(llm)
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


OPTIONS: dict[str, dict[str, Any]] = {
    "compiled": {"enforce_eager": False},
    "eager": {},
    "no prefix cache, chunks": {"enable_prefix_caching": False, "max_num_batched_tokens": 77},
    "preemption": {"num_gpu_blocks_override": 200},
    "no in-kernel write": {"additional_config": {"rose": {"fused_kv_append": False}}},
    "vLLM's block manager": {"additional_config": {"rose": {"block_manager": False}}},
}


@pytest.mark.parametrize("manner", OPTIONS)
@RUNNERS
def test_tiny_model(
    make_engine: MakeEngine, case: tuple[Prompts, GreedyReference], runner: str, manner: str
) -> None:
    with make_engine(runner=runner, **GPU_MEMORY, **OPTIONS[manner]) as llm:
        assert scheduler_of(llm).scheduler_config.async_scheduling
        for _ in range(2):
            assert_greedy(generate(llm, case[0]), case[1])
        if manner != "vLLM's block manager":
            manager = manager_of(llm)
            manager.check_integrity()
            assert manager.usage == 0.0


@pytest.mark.parametrize("manner", ["eager", "alone", "no prefix cache, chunks", "preemption"])
def test_gpt2_of_124m_parameters(make_engine: MakeEngine, gpt2_124m_path: Path, manner: str) -> None:
    prompts = parity_prompts(50_257, seed=0)
    options = {"model": str(gpt2_124m_path), **GPU_MEMORY, **OPTIONS.get(manner, {})}
    with make_engine(**options) as llm:
        batches = [(prompt,) for prompt in prompts] if manner == "alone" else [prompts]
        outputs = [output for batch in batches for output in generate(llm, batch)]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert greedy_differences(gpt2_124m_path, prompts, answers) == []


def test_seeded_draws_do_not_depend_on_the_batch(make_engine: MakeEngine, tiny_model_path: Path) -> None:
    prompts = parity_prompts(2559)[:16]
    params = [SamplingParams(temperature=0.9, top_k=50, top_p=0.9, seed=i, max_tokens=16) for i in range(16)]
    with make_engine(enable_prefix_caching=False, **GPU_MEMORY) as llm:
        together = generate(llm, prompts, params)
        alone = [generate(llm, [prompts[i]], params[i])[0] for i in range(16)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


@RUNNERS
def test_decode_steps_are_replayed(
    make_engine: MakeEngine, tiny_model_path: Path, steps_in_python: list[RoseAttentionMetadata], runner: str
) -> None:
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE)
    # Requests end one after the other, so graphs run with every number of padding rows.
    lengths = [NUM_NEW_TOKENS - index % 40 for index in range(len(prompts))]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64]}
    with make_engine(runner=runner, enforce_eager=False, compilation_config=graphs, **GPU_MEMORY) as llm:
        config = llm.llm_engine.vllm_config
        assert config.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        for attempt in range(2):
            steps_in_python.clear()
            outputs = generate(llm, prompts, params)
            for index, output in enumerate(outputs):
                tokens = tuple(output.outputs[0].token_ids)
                expected = reference.token_ids[index][: lengths[index]]
                assert tokens == expected, reference.explain_difference(index, list(tokens))
            if attempt == 0:
                # The second time prompts are found in the cache, and their first steps look like decodes.
                assert steps_in_python and all(step.num_prefill_tokens for step in steps_in_python)
        manager_of(llm).check_integrity()


def in_bfloat16(
    make_engine: MakeEngine, prompts: Prompts, cache_type: torch.dtype, **options: Any
) -> list[Any]:
    """Return one completion per prompt with the log-probability of each of its tokens.

    In bfloat16: FLASH_ATTN's float8 gives no other output.
    """
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=0)
    with make_engine(dtype="bfloat16", **GPU_MEMORY, **options) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert {layer.kv_cache.dtype for layer in layers} == {cache_type}
        outputs = generate(llm, prompts, params)
    return [output.outputs[0] for output in outputs]


def mean_error(model_path: Path, prompts: Prompts, completions: list[Any]) -> float:
    """Return by how much tokens' log-probabilities differ from float32's behind the same tokens, on average."""
    errors = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = list(completion.token_ids)
        exact = reference_logits(model_path, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        got = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        errors.append((exact[range(len(tokens)), tokens] - torch.tensor(got)).abs())
    return torch.cat(errors).mean().item()


def test_float8_is_as_close_to_float32_as_flash_attentions(
    make_engine: MakeEngine, tiny_model_path: Path
) -> None:
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE)
    plain = in_bfloat16(make_engine, prompts, torch.bfloat16)
    rose = in_bfloat16(make_engine, prompts, torch.uint8, kv_cache_dtype="fp8")
    flash = in_bfloat16(
        make_engine, prompts, torch.uint8, kv_cache_dtype="fp8", attention_backend="FLASH_ATTN"
    )
    errors = [mean_error(tiny_model_path, prompts, completions) for completions in (plain, rose, flash)]
    print(
        f"mean error of log-probabilities: bfloat16 {errors[0]}, ROSE float8 {errors[1]}, FLASH_ATTN {errors[2]}"
    )
    # FLASH_ATTN rounds queries and weights to float8 as well.
    assert errors[0] < errors[1] <= errors[2]
    # Where float32 prefers the first token clearly, all of them do.
    clear = [index for index in range(len(prompts)) if reference.leads[index][0] > 10 * max(errors)]
    assert len(clear) > 8
    for completions in (rose, flash):
        first_tokens = [completions[index].token_ids[0] for index in clear]
        assert first_tokens == [reference.token_ids[index][0] for index in clear]


@pytest.mark.parametrize("model", ["Llama", "Qwen3"])
def test_float8_with_grouped_heads(make_engine: MakeEngine, tmp_path: Path, model: str) -> None:
    path = WRITERS[model](tmp_path)
    prompts = mixed_prompts(VOCAB_SIZE)[0]
    float8 = {"model": str(path), "kv_cache_dtype": "fp8"}
    plain = in_bfloat16(make_engine, prompts, torch.bfloat16, model=str(path))
    rose = in_bfloat16(make_engine, prompts, torch.uint8, **float8)
    flash = in_bfloat16(make_engine, prompts, torch.uint8, attention_backend="FLASH_ATTN", **float8)
    errors = []
    for completions in (plain, rose, flash):
        judged = judge(path, prompts, [list(completion.token_ids) for completion in completions])
        errors.append(logprob_errors(judged, completions).mean().item())
    print(f"{model}: mean error: bfloat16 {errors[0]}, ROSE float8 {errors[1]}, FLASH_ATTN {errors[2]}")
    assert errors[0] < errors[1] <= errors[2]
