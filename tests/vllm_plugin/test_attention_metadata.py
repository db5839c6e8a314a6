"""What ROSE's attention layers are told of a step, and what a captured CUDA graph may rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from tests.support.vllm_plugin.configs import MakeConfig
from tests.vllm_plugin.test_attention_backend import STEPS, Step


def n_grams(num_tokens: int) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": num_tokens, "prompt_lookup_max": 3}


def make_builder(config: Any) -> RoseAttentionMetadataBuilder:
    return RoseAttentionMetadataBuilder(None, ["layer"], config, torch.device("cpu"))


def test_rows_without_tokens_are_padding(make_config: MakeConfig) -> None:
    step = Step(STEPS["decodes"])
    common = step.common_metadata()
    last = common.query_start_loc[-1:]
    common.query_start_loc = common.query_start_loc_cpu = torch.cat((common.query_start_loc, last, last))
    common.seq_lens = torch.cat((common.seq_lens, torch.zeros(2, dtype=torch.int32)))
    common.block_table_tensor = torch.cat((step.table, torch.zeros(2, 8, dtype=torch.int32)))
    common.num_reqs += 2
    builder = make_builder(make_config())
    metadata = builder.build(0, common)
    assert metadata.decode_computed_tokens.tolist() == [0, 15, 16, 40, -1, -1]
    assert metadata.num_decodes == 4 and metadata.num_prefill_tokens == 0


def test_a_step_keeps_the_addresses_that_a_captured_graph_reads(make_config: MakeConfig) -> None:
    builder = make_builder(make_config())
    captured = builder.build_for_cudagraph_capture(Step([(0, 1)] * 4).common_metadata())
    common = Step(STEPS["decodes"]).common_metadata()
    metadata = builder.build(0, common)
    assert metadata.decode_computed_tokens.data_ptr() == captured.decode_computed_tokens.data_ptr()
    assert captured.decode_computed_tokens.tolist() == [0, 15, 16, 40]
    for name in ("query_start_loc", "slot_mapping"):
        assert getattr(metadata, name).data_ptr() == getattr(common, name).data_ptr()
    assert metadata.block_table.data_ptr() == common.block_table_tensor.data_ptr()


@pytest.mark.parametrize(
    ("num_drafts", "support", "threshold"),
    [(0, "UNIFORM_BATCH", 1), (4, "UNIFORM_BATCH", 5), (8, "UNIFORM_SINGLE_TOKEN_DECODE", 1)],
)
def test_what_is_declared_about_graphs_and_drafts(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    num_drafts: int,
    support: str,
    threshold: int,
) -> None:
    config = make_config(speculative_config=n_grams(num_drafts) if num_drafts else None)
    builder = make_builder(config)
    assert builder.reorder_batch_threshold == threshold
    # The torch reference kernels cannot be captured.
    assert builder.get_cudagraph_support(config, None) is AttentionCGSupport.NEVER
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    assert builder.get_cudagraph_support(config, None) is AttentionCGSupport[support]


def test_rows_with_drafts_are_decodes(make_config: MakeConfig) -> None:
    builder = make_builder(make_config(speculative_config=n_grams(4)))
    metadata = builder.build(0, Step([(20, 5), (37, 1), (0, 3), (3, 30), (0, 17)]).common_metadata())
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.max_decode_query_len) == (3, 9, 5)
    assert (metadata.first_prefill_row, metadata.num_prefill_tokens) == (3, 47)
    assert metadata.prefill_start_loc.tolist() == [0, 30, 47]
    assert metadata.decode_computed_tokens.tolist() == [20, 37, 0, -1, -1]
    assert metadata.prefill_computed_tokens.tolist() == [-1, -1, -1, 3, 0]
    single = builder.build(0, Step(STEPS["decodes"]).common_metadata())
    assert (single.num_decodes, single.num_decode_tokens, single.max_decode_query_len) == (4, 4, 1)
