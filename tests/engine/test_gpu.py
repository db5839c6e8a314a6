"""The standalone engine on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.config import SWITCH_NAMES
from tests.support.reference_generation import (
    NUM_NEW_TOKENS,
    greedy_differences,
    load_reference_model,
    parity_prompts,
    tie_free_case,
)
from tests.support.tiny_checkpoint import write_random_gpt2_124m

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def gpt2_124m_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a randomly initialised GPT-2 of 124M parameters."""
    return write_random_gpt2_124m(tmp_path_factory.mktemp("gpt2_124m"))


@pytest.mark.parametrize("switched_off", [None, *SWITCH_NAMES])
def test_greedy_tokens_equal_transformers(tiny_model_path: Path, switched_off: str | None) -> None:
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=2559)
    options = {} if switched_off is None else {switched_off: False}
    with LLM(
        str(tiny_model_path), device="cuda", dtype="float32", num_blocks=1000, max_num_seqs=64, **options
    ) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate([list(prompt) for prompt in prompts], GREEDY)
            for index, output in enumerate(outputs):
                actual = output.outputs[0].token_ids
                assert tuple(actual) == reference.token_ids[index], reference.explain_difference(
                    index, actual
                )
        llm.core.check_integrity()


@pytest.mark.parametrize("manner", ["at once", "alone", "no prefix cache", "chunks", "preemption"])
def test_gpt2_of_124m_parameters(gpt2_124m_path: Path, manner: str) -> None:
    prompts = parity_prompts(50_257, seed=0)
    options: dict[str, dict[str, Any]] = {
        "no prefix cache": {"prefix_cache": False},
        "chunks": {"max_num_batched_tokens": 77},
        "preemption": {"num_blocks": 200},
    }
    own = {"num_blocks": 4200, "max_num_seqs": 64, **options.get(manner, {})}
    with LLM(str(gpt2_124m_path), device="cuda", dtype="float32", **own) as llm:
        batches = [(prompt,) for prompt in prompts] if manner == "alone" else [prompts]
        outputs = [
            output.outputs[0].token_ids
            for batch in batches
            for output in llm.generate([list(prompt) for prompt in batch], GREEDY)
        ]
        assert (llm.stats.preemptions > 0) == (manner == "preemption")
        llm.core.check_integrity()
    assert not (differences := greedy_differences(gpt2_124m_path, prompts, outputs)), "\n".join(differences)


def test_half_precision_log_probabilities_are_as_good_as_torch(tiny_model_path: Path) -> None:
    prompts, _ = tie_free_case(tiny_model_path, vocab_size=2559)
    prompts = tuple(prompt for prompt in prompts if len(prompt) == 200)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    with LLM(str(tiny_model_path), device="cuda", dtype="float16", num_blocks=1000) as llm:
        outputs = llm.generate([list(prompt) for prompt in prompts], params)
    batch = torch.tensor(prompts)
    model = load_reference_model(tiny_model_path)
    with torch.inference_mode():
        exact = model(batch).logits[:, -1].log_softmax(-1)
        half = model.half().cuda()(batch.cuda()).logits[:, -1].float().log_softmax(-1).cpu()
    model.float().cpu()
    torch_error = (half - exact).abs().amax(-1)
    for row, output in enumerate(outputs):
        for token_id, logprob in output.outputs[0].logprobs[0].items():
            # One rounding of a logit of this size beside twice torch's own error.
            bound = 2 * float(torch_error[row]) + 2**-10 * abs(float(exact[row, token_id]))
            assert abs(logprob.logprob - float(exact[row, token_id])) <= bound
