"""A prompt's last token beside decodes: not replayed as a decode where a model keeps features for its forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

from rose_backend.vllm_plugin.attention.audited_models import (
    wrap_determine_batch_execution,
    wrap_gather_batch_req_state,
)
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.patch_ledger import LEDGER, is_applied, resolve_owner
from tests.support.vllm_plugin.configs import MakeConfig

KEEPS, KEEPS_NOTHING = "Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
DECODES = [(30, 40), (20, 21)]
"""Prompt tokens of each row, and computed ones."""
TAIL = [(30, 40), (20, 19)]
PLAIN = getattr(RunnerV2.gather_batch_req_state, "__wrapped__", RunnerV2.gather_batch_req_state)
PLAIN_V1 = getattr(
    RunnerV1._determine_batch_execution_and_padding,
    "__wrapped__",
    RunnerV1._determine_batch_execution_and_padding,
)


@pytest.fixture(params=[KEEPS, KEEPS_NOTHING, "another backend", "text"])
def runner(
    request: pytest.FixtureRequest, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """Return what model runners know of their model."""
    config = make_config(attention_backend=None if request.param == "another backend" else "rose")
    architecture = KEEPS_NOTHING if request.param == KEEPS_NOTHING else KEEPS
    monkeypatch.setattr(config.model_config, "_architecture", architecture)
    return SimpleNamespace(
        vllm_config=config,
        model_config=config.model_config,
        supports_mm_inputs=request.param != "text",
        replays_tails=request.param != KEEPS,
    )


def uniform_tokens_v2(runner: SimpleNamespace, rows: list[tuple[int, int]]) -> int | None:
    """Return for how many tokens of each row vLLM looks for a graph of decodes; None: for none."""
    prompts, computed = np.array(rows).T
    vars(runner).update(
        decode_query_len=1,
        use_pp=False,
        adaptive_verification=None,
        pcp_manager=None,
        req_states=SimpleNamespace(
            req_id_to_index={str(row): row for row in range(len(rows))},
            prefill_len=SimpleNamespace(np=prompts),
            num_computed_prefill_tokens=np.minimum(prompts, computed),
        ),
    )
    output = SimpleNamespace(
        num_scheduled_tokens={str(row): 1 for row in range(len(rows))},
        total_num_scheduled_tokens=len(rows),
        scheduled_spec_decode_tokens={},
    )
    state, uniform = wrap_gather_batch_req_state(PLAIN)(runner, output, False)
    assert state.has_prefill == bool((computed < prompts).any())
    return uniform


def is_uniform_v1(runner: SimpleNamespace, rows: list[tuple[int, int]], force: bool | None = None) -> bool:
    """Return whether vLLM looks for a graph of decodes."""

    class DispatchedError(Exception):
        pass

    def dispatch(*, uniform_decode: bool, **kwargs: Any) -> None:
        raise DispatchedError(uniform_decode)

    prompts, computed = np.array(rows).T
    vars(runner).update(
        uniform_decode_query_len=1,
        _is_uniform_decode=RunnerV1._is_uniform_decode,
        # Rows behind the batch are what others left.
        input_batch=SimpleNamespace(
            num_prompt_tokens=np.append(prompts, 9),
            num_computed_tokens_cpu=np.append(computed, 0),
            lora_id_to_lora_request={},
        ),
        cudagraph_dispatcher=SimpleNamespace(dispatch=dispatch),
    )
    with pytest.raises(DispatchedError) as dispatched:
        wrap_determine_batch_execution(PLAIN_V1)(
            runner,
            num_tokens=len(rows),
            num_reqs=len(rows),
            num_scheduled_tokens_np=np.ones(len(rows), np.int32),
            max_num_scheduled_tokens=1,
            force_uniform_decode=force,
        )
    return bool(dispatched.value.args[0])


def test_a_tail_is_replayed_as_a_decode_only_where_nothing_is_kept(runner: SimpleNamespace) -> None:
    assert uniform_tokens_v2(runner, DECODES) == 1
    assert uniform_tokens_v2(runner, TAIL) == (1 if runner.replays_tails else None)
    assert is_uniform_v1(runner, DECODES)
    assert is_uniform_v1(runner, TAIL) is runner.replays_tails
    # As while graphs are captured.
    assert is_uniform_v1(runner, TAIL, force=True) and not is_uniform_v1(runner, DECODES, force=False)


@pytest.mark.parametrize("architecture", [KEEPS, KEEPS_NOTHING])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_runners_are_patched_for_models_that_are_not_audited(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, architecture: str, runner: str
) -> None:
    config = make_config()
    monkeypatch.setattr(config.model_config, "_architecture", architecture)
    monkeypatch.setattr(type(config), "use_v2_model_runner", runner == "v2")
    for name in ("prompt_tails_v1", "prompt_tails_v2"):
        owner, attribute = resolve_owner(LEDGER[name].target)
        method = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, getattr(method, "__wrapped__", method))
    RoseAttentionMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
    assert is_applied(f"prompt_tails_{runner}") == (architecture == KEEPS)
    assert not is_applied(f"prompt_tails_{'v2' if runner == 'v1' else 'v1'}")
