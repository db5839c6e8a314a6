"""vLLM's ``ExampleConnector``, which keeps the K/V of prompts in files, in engines with Rose's block manager."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from tests.e2e.conftest import MakeEngine
from tests.e2e.test_vllm_features import assert_greedy, inputs_of, scheduler_of
from tests.support.reference_generation import NUM_NEW_TOKENS, GreedyReference, tie_free_case
from tests.support.stepped_engine import overlap_steps_on_cpu

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


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
    everything, answers = tie_free_case(tiny_model_path, vocab_size=2559)
    # Of a single token it says that it has 16 less than none.
    long = [index for index, prompt in enumerate(everything) if len(prompt) > 1]
    prompts = [everything[index] for index in long]
    reference = GreedyReference(
        *([each[index] for index in long] for each in (answers.token_ids, answers.leads))
    )
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    # The connector stores a prompt when it is admitted, so all of it has to be computed in that step.
    num_tokens = sum(map(len, prompts))
    with make_engine(
        kv_transfer_config=connector, max_num_batched_tokens=num_tokens, max_num_seqs=256
    ) as llm:
        assert_greedy(llm.generate(inputs_of(prompts), GREEDY, use_tqdm=False), reference)
        num_files = len(list(tmp_path.glob("*/*.safetensors")))
        assert num_files > 0
        for _ in range(2):
            assert llm.reset_prefix_cache()
            outputs = llm.generate(inputs_of(prompts), GREEDY, use_tqdm=False)
            assert_greedy(outputs, reference)
        scheduler_of(llm).kv_cache_manager.manager.check_integrity()
    # All that it has of a prompt came from the files: blocks before the last two tokens. Nothing new went there.
    assert [output.num_cached_tokens for output in outputs] == [
        (len(prompt) - 2) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts
    ]
    assert len(list(tmp_path.glob("*/*.safetensors"))) == num_files
