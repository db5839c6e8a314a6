"""The standalone engine on a CUDA device. The kernels are the torch twins there, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.config import SWITCH_NAMES
from tests.support.reference_generation import NUM_NEW_TOKENS, load_reference_model, tie_free_case

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("switched_off", [None, *SWITCH_NAMES])
def test_greedy_tokens_equal_transformers(tiny_model_path: Path, switched_off: str | None) -> None:
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=2559)
    options = {} if switched_off is None else {switched_off: False}
    with LLM(str(tiny_model_path), device="cuda", dtype="float32", num_blocks=1000, **options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate([list(prompt) for prompt in prompts], GREEDY)
            for index, output in enumerate(outputs):
                actual = output.outputs[0].token_ids
                assert tuple(actual) == reference.token_ids[index], reference.explain_difference(
                    index, actual
                )
        llm.core.check_integrity()


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
