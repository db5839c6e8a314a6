"""FlashAttention 3 behind ROSE on compute capability 9.0: what it attends, beside Rose's kernel and the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

from rose_backend.vllm_plugin.attention import flash_attention
from rose_backend.vllm_plugin.attention.backend import RoseAttentionImpl
from rose_backend.vllm_plugin.attention.flash_attention import (
    FlashRows,
    Threshold,
    flash_prefill,
    uses_flash_attention,
)
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata, RoseAttentionMetadataBuilder
from tests.support.paged_inputs import (
    PagedInputs,
    Shape,
    check_attention,
    expected_storage,
    make_inputs,
    same_bits,
)
from tests.support.vllm_plugin.configs import MakeConfig

pytestmark = pytest.mark.gpu

HEAD_SIZE = 128
# Computed and new tokens of each row, decodes first.
STEPS = {
    "fresh": ([0], [8192]),
    "behind a context": ([6144, 6144], [2048, 2048]),
    "many short rows": ([0, 3, 64, 127, 128, 129, 500, 0] * 8, [2, 17, 64, 100, 128, 130, 3, 255] * 8),
    "beside decodes": ([37, 600, 0, 16, 6144, 0, 900], [1, 1, 1, 1, 2048, 4097, 3]),
}


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def config(request: pytest.FixtureRequest, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a configuration of a model with heads of 128; skip where there is no FlashAttention 3."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 needs compute capability 9.0")
    config = make_config(dtype=str(request.param).removeprefix("torch."), block_size=16)
    monkeypatch.setattr(type(config.model_config), "get_head_size", lambda self: HEAD_SIZE)
    assert uses_flash_attention(config), "vLLM for CUDA bundles it"
    return config


def common_metadata(step: PagedInputs) -> CommonAttentionMetadata:
    query_lens = step.query_start_loc.diff()
    seq_lens = step.num_computed_tokens + query_lens
    return CommonAttentionMetadata(
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=step.query_start_loc.cpu(),
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens.cpu(),
        num_reqs=len(seq_lens),
        num_actual_tokens=len(step.query),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=step.block_table,
        slot_mapping=step.slot_mapping,
    )


def make_step(lengths: list[int], query_lens: list[int], shape: Shape, dtype: torch.dtype) -> PagedInputs:
    return make_inputs(lengths, query_lens, shape, dtype=dtype, layout="vllm", device="cuda")


def make(config: Any, name: str, shape: Shape) -> PagedInputs:
    return make_step(*STEPS[name], shape, config.model_config.dtype)


class Layers:
    """Layers of one step, run through ROSE. Output that nobody writes is NaN."""

    def __init__(self, config: Any, step: PagedInputs) -> None:
        self.step = step
        num_heads, num_kv_heads = step.query.shape[1], step.key_cache.shape[2]
        with set_current_vllm_config(config):
            self._impl = RoseAttentionImpl(num_heads, HEAD_SIZE, step.scale, num_kv_heads)
            builder = RoseAttentionMetadataBuilder(None, ["layer"], config, torch.device("cuda"))
        self.metadata: RoseAttentionMetadata = builder.build(0, common_metadata(step))

    def run(self) -> torch.Tensor:
        step, out = self.step, torch.full_like(self.step.query, float("nan"))
        self._impl.forward(None, step.query, step.new_key, step.new_value, step.storage, self.metadata, out)
        return out


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("kernel", ["FlashAttention 3", "Rose"])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("name", STEPS)
def test_every_row_is_within_the_bound_and_stored(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str, block_size: int, kernel: str, fused: bool
) -> None:
    is_flash = kernel != "Rose"
    monkeypatch.setattr(flash_attention, "FASTER_FROM", (Threshold(0, 2 if is_flash else 1 << 30),))
    config.additional_config = {"rose": {"fused_kv_append": fused}}
    step = make(config, name, (4, 2, HEAD_SIZE, block_size))
    stored = expected_storage(step)
    layers = Layers(config, step)
    assert (layers.metadata.flash_rows is not None) == is_flash
    calls: list[FlashRows] = []
    attend = flash_attention.flash_prefill
    monkeypatch.setattr(
        flash_attention, "flash_prefill", lambda *args: (calls.append(args[5]), attend(*args))
    )
    first = layers.run()
    check_attention(step, first, by_row=True)
    assert same_bits(step.storage, stored)
    # A second layer of the step has the same schedule.
    assert torch.equal(layers.run(), first)
    # Blocks of 128 are Rose's, whatever was chosen.
    assert len(calls) == (2 if is_flash and block_size != 128 else 0)
    assert all(len(rows.schedules) == 1 for rows in calls)


@pytest.mark.parametrize(
    "shape", [(16, 8, 128, 16), (32, 8, 128, 16), (8, 1, 128, 32), (4, 4, 128, 64)], ids=str
)
def test_shapes_of_heads(config: Any, shape: Shape) -> None:
    step = make_step([0, 1500, 700], [1, 1000, 513], shape, config.model_config.dtype)
    out = torch.full_like(step.query, float("nan"))
    metadata = common_metadata(step)
    rows = FlashRows(
        slice(0, len(step.query)),
        step.block_table,
        step.query_start_loc,
        metadata.seq_lens,
        metadata.slot_mapping,
        metadata.max_query_len,
        metadata.max_seq_len,
    )
    caches = (step.key_cache, step.value_cache)
    flash_prefill(step.query, step.new_key, step.new_value, *caches, rows, step.scale, out)
    check_attention(step, out, by_row=True)


@pytest.mark.parametrize("layout", ["BHNC", "BNHC", "HBNC"])
def test_layouts_of_vllms_view(config: Any, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(flash_attention, "FASTER_FROM", (Threshold(0, 2),))
    step = make(config, "beside decodes", (4, 2, HEAD_SIZE, 16))
    sizes = dict(zip("BHNC", step.storage.shape, strict=True))
    laid_out = torch.empty([sizes[letter] for letter in layout], dtype=step.storage.dtype, device="cuda")
    view = laid_out.permute([layout.index(letter) for letter in "BHNC"])
    step.storage = view.copy_(step.storage)
    by_token = view.transpose(1, 2)
    step.key_cache, step.value_cache = by_token[..., :HEAD_SIZE], by_token[..., HEAD_SIZE:]
    check_attention(step, Layers(config, step).run(), by_row=True)


def test_the_table_decides(config: Any) -> None:
    for name, is_flash in (("fresh", True), ("behind a context", True), ("many short rows", False)):
        rows = Layers(config, make(config, name, (4, 2, HEAD_SIZE, 16))).metadata.flash_rows
        assert (rows is not None) == is_flash, name


def test_blocks_of_128_tokens_still_need_rose(config: Any) -> None:
    # Once this fails, FlashAttention 3 leaves out what lies behind a request's last token, and may have such blocks.
    step = make(config, "fresh", (4, 2, HEAD_SIZE, 128))
    for name in ("query", "new_key", "new_value", "slot_mapping"):
        setattr(step, name, getattr(step, name)[:8100])
    step.query_start_loc.clamp_(max=8100)
    metadata = common_metadata(step)
    rows = FlashRows(
        slice(0, 8100),
        step.block_table,
        step.query_start_loc,
        metadata.seq_lens,
        metadata.slot_mapping,
        8100,
        8100,
    )
    out = torch.zeros_like(step.query)
    caches = (step.key_cache, step.value_cache)
    flash_prefill(step.query, step.new_key, step.new_value, *caches, rows, step.scale, out)
    assert out.isnan().any()
