"""On CUDA: decode steps are replayed from full CUDA graphs, attention included, and say the same as eager ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.config import CUDAGraphMode

from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.e2e.test_vllm_features import VOCAB_SIZE, inputs_of, scheduler_of
from tests.support.reference_generation import NUM_NEW_TOKENS, tie_free_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_decode_steps_are_replayed(
    make_engine: MakeEngine,
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps_in_python: list[RoseAttentionMetadata],
    runner: str,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE)
    # Requests end one after the other, so graphs run with every number of padding rows.
    lengths = [NUM_NEW_TOKENS - index % 40 for index in range(len(prompts))]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64]}
    with make_engine(enforce_eager=False, compilation_config=graphs, **GPU_MEMORY) as llm:
        config = llm.llm_engine.vllm_config
        assert config.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        for attempt in range(2):
            steps_in_python.clear()
            outputs = llm.generate(inputs_of(prompts), params, use_tqdm=False)
            for index, output in enumerate(outputs):
                tokens = tuple(output.outputs[0].token_ids)
                expected = reference.token_ids[index][: lengths[index]]
                assert tokens == expected, reference.explain_difference(index, list(tokens))
            if attempt == 0:
                # The second time prompts are found in the cache, and their first steps look like decodes.
                assert steps_in_python and all(step.num_prefill_tokens for step in steps_in_python)
        scheduler_of(llm).kv_cache_manager.manager.check_integrity()
