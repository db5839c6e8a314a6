"""On CUDA, in bfloat16: 4 layers of Qwen3.5's and Qwen3-Next's shapes beside stock without a prefix cache.

Shared heads are found from the third request on. vLLM's module of Qwen3.5 needs torchvision.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rose_backend.vllm_plugin.kv_cache.checkpoints import MIN_TOKENS_WORTH_A_CHECKPOINT
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.e2e.test_vllm_features import scheduler_of
from tests.e2e.test_vllm_gpu_parity import complete, judge_completions
from tests.support.half_precision import logprob_errors, wrong_tokens
from tests.support.random_checkpoints import VOCAB_SIZE, write_random_qwen3_5, write_random_qwen3_next

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    # vLLM's choice on Hopper needs CUTLASS's Python package.
    "gdn_prefill_backend": "triton",
    **GPU_MEMORY,
}
HEADS = (200, 333, 477)
ROUNDS = 5


@pytest.fixture(scope="module", params=["Qwen3.5", "Qwen3-Next"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "Qwen3.5":
        pytest.importorskip("torchvision")
        return write_random_qwen3_5(tmp_path_factory.mktemp("qwen3_5"))
    return write_random_qwen3_next(tmp_path_factory.mktemp("qwen3_next"))


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_shared_heads_say_what_stock_says(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    model_path: Path,
    runner: str,
    enforce_eager: bool,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
    choose = random.Random(7)
    heads = [[choose.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in HEADS]
    prompts = [
        (*head, *(choose.randrange(4, VOCAB_SIZE) for _ in range(choose.randint(20, 200))))
        for _ in range(ROUNDS)
        for head in heads
    ]
    lengths = [30] * len(prompts)
    options = {"model": str(model_path), "enforce_eager": enforce_eager, **OPTIONS}
    own = {"attention_backend": "FLASH_ATTN", "enable_prefix_caching": False}
    with make_engine(**options, **own) as llm:
        stock = complete(llm, tuple(prompts), lengths, logprobs=0)
    judged = judge_completions(model_path, tuple(prompts), stock)
    errors = logprob_errors(judged, stock)
    tolerance = 2 * float(errors.max())
    with make_engine(**options, disable_hybrid_kv_cache_manager=False) as llm:
        manager = scheduler_of(llm).kv_cache_manager.manager
        rose, num_hits = [], []
        for start in range(0, len(prompts), len(HEADS)):
            before = manager.stats.hit_tokens
            one_each = slice(start, start + len(HEADS))
            rose += complete(llm, tuple(prompts[one_each]), lengths[one_each], logprobs=0)
            num_hits.append(manager.stats.hit_tokens - before)
        manager.check_integrity()
    # The first computes a head, the second leaves a state behind it, or starts so close to it that none is worth it.
    assert num_hits[0] == 0
    worth = MIN_TOKENS_WORTH_A_CHECKPOINT * len(HEADS)
    assert all(sum(HEADS) - worth < found <= sum(HEADS) for found in num_hits[2:]), num_hits
    assert manager.stats.checkpoints >= len(HEADS)
    judged_rose = judge_completions(model_path, tuple(prompts), rose)
    assert not wrong_tokens(judged_rose, tolerance)
    assert float(logprob_errors(judged_rose, rose).mean()) < 1.25 * float(errors.mean())
