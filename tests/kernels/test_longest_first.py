"""In which order rows of a step begin to be attended, and that it changes no result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend import kernels
from rose_backend.compile_ahead.recorded_launches import record_launches as record_compilations
from rose_backend.kernels import AttentionOptions, NewTokens
from rose_backend.kernels.attention import split_context as gpu
from rose_backend.kernels.gpu_properties import GpuProperties, meta_stands_for
from rose_backend.kernels.tuning.attention import begins_in_turns
from rose_backend.layers.attention import AttentionRows, AttentionStep, attend, plan_decode
from tests.support.aot import compile_launch, compiles, record_launches
from tests.support.attention_calls import plan_paged_decode
from tests.support.interpreter import run_interpreted
from tests.support.paged_inputs import build_paged_inputs

H200 = GpuProperties((9, 0), 132)


@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 300])
def test_order_is_that_of_a_stable_sort(num_rows: int) -> None:
    # Few lengths: many rows are equally long, and some have nothing to do.
    lengths = torch.randint(
        -1, 40, (num_rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    )
    order = run_interpreted(gpu.longest_first, lengths)
    assert order.dtype == torch.int32
    assert order.tolist() == sorted(range(num_rows), key=lambda row: -int(lengths[row]))


@compiles("_longest_first_kernel")
def test_compiles_without_spills(capability: int) -> None:
    with record_launches(gpu, "_longest_first_kernel") as launches:
        gpu.longest_first(torch.zeros(256, dtype=torch.int32))
    assert compile_launch(launches[0], capability).spill_bytes == 0


def plan(num_rows: int, window: int | None = None) -> Any:
    table, lengths = (
        torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((num_rows, 4), num_rows)
    )
    cache = torch.empty(4, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    return plan_paged_decode(table, lengths, cache, options=AttentionOptions(1.0, window))


def test_rows_are_ordered_where_they_cannot_all_begin_at_once() -> None:
    with record_compilations(H200) as recorded, meta_stands_for(H200):
        assert plan(132) is None and not recorded.sources
        assert plan(133).shape == (133,)
        assert [source.name for source in recorded.sources] == ["_longest_first_kernel"]
        # With a window, long rows read no more than others.
        assert plan(256, window=128) is None
    assert not begins_in_turns(8 * 132, 132) and begins_in_turns(8 * 132 + 1, 132)


def test_a_plan_is_made_once_before_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options["options"].sliding_window)
        return kernels.plan_paged_decode(*args, **options)

    monkeypatch.setattr("rose_backend.layers.attention.plan_paged_decode", counted)
    inputs = build_paged_inputs([5, 9])
    rows = AttentionRows(slice(0, 2), inputs.block_table, inputs.num_computed_tokens)
    options = AttentionOptions(0.25)
    new, cache = NewTokens(inputs.new_key, inputs.new_value), (inputs.key_cache, inputs.value_cache)
    step, out = AttentionStep(rows, None, None), torch.empty_like(inputs.query)
    with pytest.raises(AssertionError, match="plan_decode comes before layers that overlap"):
        attend(inputs.query, new, cache, step, options, out, overlap=True)
    kv = rows.kv(*cache)
    first = plan_decode(rows, kv, options)
    assert plan_decode(rows, kv, options) is first
    attend(inputs.query, new, cache, step, options, out, overlap=True)
    plan_decode(rows, kv, AttentionOptions(0.25, 4))
    assert calls == [None, 4]
