"""On CUDA: K/V in float8. Compared with float32 by transformers, and with FLASH_ATTN's float8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.e2e.test_vllm_features import VOCAB_SIZE, inputs_of
from tests.support.half_precision import judge, logprob_errors, mixed_prompts
from tests.support.random_checkpoints import WRITERS
from tests.support.reference_generation import Prompts, reference_logits, tie_free_case

pytestmark = pytest.mark.gpu

NUM_NEW_TOKENS = 32


def generate(make_engine: MakeEngine, prompts: Prompts, cache_type: torch.dtype, **options: Any) -> list[Any]:
    """Return one completion per prompt with the log-probability of each of its tokens.

    In bfloat16: FLASH_ATTN's float8 gives no other output.
    """
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=0)
    with make_engine(dtype="bfloat16", **GPU_MEMORY, **options) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert {layer.kv_cache.dtype for layer in layers} == {cache_type}
        outputs = llm.generate(inputs_of(prompts), params, use_tqdm=False)
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
    plain = generate(make_engine, prompts, torch.bfloat16)
    rose = generate(make_engine, prompts, torch.uint8, kv_cache_dtype="fp8")
    flash = generate(make_engine, prompts, torch.uint8, kv_cache_dtype="fp8", attention_backend="FLASH_ATTN")
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
    plain = generate(make_engine, prompts, torch.bfloat16, model=str(path))
    rose = generate(make_engine, prompts, torch.uint8, **float8)
    flash = generate(make_engine, prompts, torch.uint8, attention_backend="FLASH_ATTN", **float8)
    errors = []
    for completions in (plain, rose, flash):
        judged = judge(path, prompts, [list(completion.token_ids) for completion in completions])
        errors.append(logprob_errors(judged, completions).mean().item())
    print(f"{model}: mean error: bfloat16 {errors[0]}, ROSE float8 {errors[1]}, FLASH_ATTN {errors[2]}")
    assert errors[0] < errors[1] <= errors[2]
