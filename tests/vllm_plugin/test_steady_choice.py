"""Which engines have steady steps, by their KV cache groups: over a stand-in for vLLM's model runner."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.worker.gpu.ec_connector import NO_OP_EC_CONNECTOR
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.utils import AttentionGroup

from rose_backend.vllm_plugin.attention.backend import RoseAttentionBackend
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.kv_cache.spec import RoseAttentionSpec
from rose_backend.vllm_plugin.step_graph import (
    NUM_LOGITS_PROCESSORS,
    why_engine_is_not_steady,
)

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16}
FULL = RoseAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=40)
STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


class OtherBuilder(RoseAttentionMetadataBuilder):
    """Stands for another backend's."""


def make_group(spec: Any, builder: type[Any] = RoseAttentionMetadataBuilder) -> AttentionGroup:
    group = AttentionGroup(RoseAttentionBackend, ["layer"], spec, 0)
    group.metadata_builders = [object.__new__(builder)]
    return group


def make_runner(*groups: list[AttentionGroup]) -> Any:
    """Return a runner with nothing that a steady step leaves out, but for what its KV cache groups are."""
    state, sampler = object.__new__(DefaultModelState), object.__new__(Sampler)
    for name, value in (("rope_state", None), ("prompt_embeds_state", None)):
        setattr(state, name, value)
    state.num_new_sampled_tokens_per_step = 1
    sampler.logits_processors = [object()] * NUM_LOGITS_PROCESSORS
    sampler.trace_replay_state, sampler.return_sampling_mask, sampler.compute_nans = None, False, False
    off = ("use_aux_hidden_state_outputs", "use_pp", "use_dcp", "is_pooling_model", "uses_inputs_embeds")
    nothing = ("speculative_config", "lora_config", "pcp_manager", "ubatch_runner", "encoder_cache")
    nothing += ("aux_output_connector", "fast_prefill", "batch_sharder")
    return SimpleNamespace(
        **dict.fromkeys((*off, "check_ep_fault"), False),
        **dict.fromkeys(nothing),
        model_state=state,
        sampler=sampler,
        cudagraph_manager=SimpleNamespace(_capture_descs={CUDAGraphMode.FULL: [object()]}),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(enable_eplb=False),
            observability_config=SimpleNamespace(cudagraph_metrics=False),
        ),
        dp_size=1,
        kv_connector=NO_OP_KV_CONNECTOR,
        ec_connector=NO_OP_EC_CONNECTOR,
        model=SimpleNamespace(lm_head=object()),
        attn_groups=list(groups),
        block_tables=SimpleNamespace(num_kv_cache_groups=len(groups), redirect_writes_to_null_block=False),
    )


@pytest.mark.parametrize(
    "specs",
    [[[FULL]], [[FULL, FULL]], [[FULL], [WINDOW]], [[WINDOW], [FULL, FULL], *[[WINDOW]] * 5]],
    ids=["one group", "two shapes", "windows", "seven groups"],
)
def test_any_number_of_attention_groups_is_served(specs: list[list[Any]]) -> None:
    runner = make_runner(*([make_group(spec) for spec in of_group] for of_group in specs))
    assert why_engine_is_not_steady(runner) is None


def add(group: list[AttentionGroup]) -> Callable[[Any], None]:
    def change(runner: Any) -> None:
        runner.attn_groups.append(group)
        runner.block_tables.num_kv_cache_groups += 1

    return change


def split_blocks(runner: Any) -> None:
    runner.attn_groups[1][0].kernel_block_size = 8


def redirect(runner: Any) -> None:
    runner.block_tables.redirect_writes_to_null_block = True


def forget_a_group(runner: Any) -> None:
    runner.block_tables.num_kv_cache_groups = 3


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "states": (add([make_group(STATE)]), "layers with a state"),
    "another backend beside Rose": (
        add([make_group(FULL), make_group(FULL, OtherBuilder)]),
        "another attention backend",
    ),
    "another backend": (add([make_group(WINDOW, OtherBuilder)]), "another attention backend"),
    "no layers": (add([]), "KV cache groups without attention"),
    "a table without layers": (forget_a_group, "KV cache groups without attention"),
    "split blocks": (split_blocks, "blocks split for a kernel"),
    "null block": (redirect, "writes to the null block"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_groups_are_vllms_and_the_reason_is_told(case: str) -> None:
    change, reason = CHANGES[case]
    runner = make_runner([make_group(FULL)], [make_group(WINDOW)])
    change(runner)
    assert why_engine_is_not_steady(runner) == reason


@pytest.mark.parametrize(
    "descs",
    [{}, {CUDAGraphMode.FULL: []}, {CUDAGraphMode.PIECEWISE: [object()]}],
    ids=["none", "empty", "other"],
)
def test_an_engine_without_full_graphs_is_vllms(descs: dict[CUDAGraphMode, list[Any]]) -> None:
    runner = make_runner([make_group(FULL)])
    assert why_engine_is_not_steady(runner) is None
    runner.cudagraph_manager._capture_descs = descs
    assert why_engine_is_not_steady(runner) == "no full graphs of decodes"
    runner.cudagraph_manager = None
    assert why_engine_is_not_steady(runner) == "no full graphs of decodes"


def test_no_group_at_all_is_vllms() -> None:
    assert why_engine_is_not_steady(make_runner()) == "KV cache groups without attention"
