"""LoRA adapters added to products: against two products in float64 for each row."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.errors import ShapeError
from rose_backend.kernels import AdapterRows, Adapters, adapter_rows, add_adapters, norm_input_of, pack_norm
from rose_backend.kernels.linear import adapters as gpu
from tests.support.aot import compile_launch, compiles, overlapped, record_launches
from tests.support.implementations import GPU, REFERENCE, Implementation, each_dtype, kernels_only

HALF = torch.float16


def make_adapters(
    num_slots: int, rank: int, depth: int, widths: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> Adapters:
    generator = torch.Generator().manual_seed(num_slots + rank)

    def draw(scale: float, *shape: int) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)

    lora_a = tuple(draw(depth**-0.5, num_slots, rank, depth) for _ in widths)
    return Adapters(lora_a, tuple(draw(rank**-0.5, num_slots, width, rank) for width in widths))


def add(
    x: torch.Tensor, adapters: Adapters, slots: torch.Tensor, out: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return ``out``, which the interpreter's process has written."""
    add_adapters(x, adapters, adapter_rows(slots), out, **options)
    return out


def products(x: torch.Tensor, adapters: Adapters, slots: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return what adapters make of each row, in ``dtype``."""
    rows = []
    for row, slot in zip(x.to(dtype), slots, strict=True):
        if 0 <= slot < len(adapters.lora_a[0]):
            pairs = zip(adapters.lora_a, adapters.lora_b, strict=True)
            rows.append(torch.cat([row @ a[slot].to(dtype).t() @ b[slot].to(dtype).t() for a, b in pairs]))
        else:
            rows.append(torch.zeros(sum(b.shape[1] for b in adapters.lora_b), dtype=dtype, device=x.device))
    return torch.stack(rows)


CASES = {
    "no row": ([], 3, 8, (48, 16, 16)),
    "one row": ([1], 2, 16, (70,)),
    "one row without": ([-1], 2, 16, (70,)),
    "all kinds in a tile": ([2, -1, 0, 1, 0, 9, 2, 1, -7, 2**32 + 1, -(2**62)], 3, 8, (48, 16, 16)),
    "tiles with and without": ([-1] * 16 + [0] * 17 + [-1, 1], 8, 33, (40, 40)),
    "more slots than programs of a tile": ([*range(-1, 20)], 20, 8, (40, 40)),
    "a hundred rows": ([2] * 20 + [1] * 3 + [-1] * 40 + [0, 5, 7] * 14, 8, 16, (40, 40)),
    "long prompts": ([1] * 130 + [-1] * 66 + [0] * 70 + [2], 3, 64, (40, 40)),
}
"""Slots of rows, number of slots, rank, and widths of the slices."""


@each_dtype
@pytest.mark.parametrize("case", CASES)
def test_each_row_gets_its_adapters_products(
    implementation: Implementation, dtype: torch.dtype, case: str
) -> None:
    listed, num_slots, rank, widths = CASES[case]
    depth, device = 600, implementation.device
    adapters = make_adapters(num_slots, rank, depth, widths, dtype, device)
    generator = torch.Generator().manual_seed(3)
    # Rows are further apart than they are long, and what lies between them is never read.
    x = torch.full((len(listed), depth + 8), float("nan"), dtype=dtype)
    x[:, :depth] = torch.randn(len(listed), depth, generator=generator)
    base = torch.randn(len(listed), sum(widths) + 5, generator=generator).to(dtype).to(device)
    x, slots = x.to(device), torch.tensor(listed, dtype=torch.int64, device=device)
    kept = [each.clone() for each in (x, slots, base, *adapters.lora_a, *adapters.lora_b)]
    for alternating in (False, True) if len(widths) == 2 else (False,):
        wide = base.clone()
        actual = implementation(
            add, x[:, :depth], adapters, slots, wide[:, : sum(widths)], alternating=alternating
        )
        assert torch.equal(wide[:, sum(widths) :], base[:, sum(widths) :])
        if not listed:
            continue
        exact = products(x[:, :depth], adapters, listed, torch.float64)
        rounded = products(x[:, :depth], adapters, listed, dtype)
        if alternating:
            exact, rounded = (
                each.unflatten(1, (2, -1)).transpose(1, 2).flatten(1) for each in (exact, rounded)
            )
        before = base[:, : sum(widths)]
        assert_within_budget(actual, before.double() + exact, before + rounded)
        without = [row for row, slot in enumerate(listed) if not 0 <= slot < num_slots]
        assert torch.equal(actual[without], before[without])
    for tensor, before in zip((x, slots, base, *adapters.lora_a, *adapters.lora_b), kept, strict=True):
        assert torch.equal(tensor.nan_to_num(), before.nan_to_num())


@each_dtype
@pytest.mark.parametrize("num_parts", [1, 4])
def test_of_what_is_left_to_a_norm(
    implementation: Implementation, dtype: torch.dtype, num_parts: int
) -> None:
    depth, widths, listed = 600, (40, 24), [1, -1, 0, 2, 1]
    adapters = make_adapters(3, 16, depth, widths, dtype, implementation.device)
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (
        (3 * torch.randn(shape, generator=generator)).to(dtype).to(implementation.device)
        for shape in ((len(listed), depth), (depth,))
    )
    left = norm_input_of(hidden, pack_norm(weight, 1e-5))
    # Parts that have to be added.
    left = left._replace(moments=(left.moments / num_parts).expand(-1, -1, num_parts).contiguous())
    base = torch.randn(len(listed), 64, generator=generator).to(dtype).to(implementation.device)
    slots = torch.tensor(listed, device=implementation.device)
    actual = implementation(add, left, adapters, slots, base.clone())
    wide = hidden.double()
    exact = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    rounded = torch.nn.functional.rms_norm(hidden, weight.shape, weight, 1e-5)
    assert_within_budget(
        actual,
        base.double() + products(exact, adapters, listed, torch.float64),
        base + products(rounded, adapters, listed, dtype),
    )
    assert torch.equal(actual[1], base[1])


@kernels_only
def test_a_row_is_the_same_whatever_others_have(implementation: Implementation) -> None:
    adapters = make_adapters(4, 16, 1024, (64, 32, 32), HALF, implementation.device)
    x = torch.randn(20, 1024, generator=torch.Generator().manual_seed(0)).half().to(implementation.device)
    alone = [2] * 20
    mixed = [2 if row % 3 else (row % 5) - 1 for row in range(20)]
    results = [
        implementation(add, x, adapters, torch.tensor(slots, device=x.device), torch.zeros_like(x[:, :128]))
        for slots in (alone, mixed)
    ]
    same = [row for row, slot in enumerate(mixed) if slot == 2]
    assert len(same) > 12 and torch.equal(results[0][same], results[1][same])


@kernels_only
def test_an_adapter_that_is_not_finite_does_not_reach_the_rows_of_others(
    implementation: Implementation,
) -> None:
    adapters = make_adapters(3, 8, 200, (40, 24), HALF, implementation.device)
    x = torch.randn(10, 200, generator=torch.Generator().manual_seed(0)).half().to(implementation.device)
    slots = torch.tensor([0, 1, 2, -1, 1, 0, 2, 0, 1, -1], device=x.device)
    expected, actual = torch.zeros(2, 10, 64, dtype=HALF, device=x.device)
    implementation(add, x, adapters, slots, expected)
    for weights in (*adapters.lora_a, *adapters.lora_b):
        weights[1] = float("nan")
    implementation(add, x, adapters, slots, actual)
    assert torch.equal(actual[slots != 1], expected[slots != 1])
    assert actual[slots == 1].isnan().all()


def add_between_guards(
    x: torch.Tensor, adapters: Adapters, slots: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Return what then stands before and behind the scratch memory, which was sevens."""
    guarded: list[torch.Tensor] = []
    new_empty = torch.Tensor.new_empty

    def with_guards(like: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        if not isinstance(shape[0], tuple):
            return new_empty(like, *shape, **options)
        guarded.append(new_empty(like, 3, *shape[0], **options).fill_(float("nan")))
        guarded[0][::2] = 7
        return guarded[0][1]

    rows = adapter_rows(slots)
    with mock.patch.object(torch.Tensor, "new_empty", with_guards):
        add_adapters(x, adapters, rows, out)
    return guarded[0][::2]


@kernels_only
@pytest.mark.parametrize("num_tokens", [2, 16, 27, 259])
def test_nothing_is_written_around_scratch_memory_and_result(
    implementation: Implementation, num_tokens: int
) -> None:
    """Of the sizes of Qwen3 0.6B's o_proj, with numbers behind the step's tokens as vLLM's buffers may hold them."""
    depth, width, device = 2048, 1024, implementation.device
    adapters = make_adapters(8, 16, depth, (width,), HALF, device)
    x = torch.randn(num_tokens, depth, generator=torch.Generator().manual_seed(0)).half().to(device)
    stale = [-1, 8, 2**40, -(2**62), 2**31 + 2, 2**63 - 1]
    slots = [row % 8 if row % 3 else stale[row // 3 % len(stale)] for row in range(num_tokens)]
    out = torch.full((3, num_tokens, width), 7.0, dtype=HALF, device=device)
    around = implementation(add_between_guards, x, adapters, torch.tensor(slots, device=device), out[1])
    assert (around == 7).all() and (out[::2] == 7).all()
    has_adapter = torch.tensor([0 <= slot < 8 for slot in slots])
    is_changed = (out[1] != 7).any(1).cpu()
    assert torch.equal(is_changed, has_adapter) and out.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 17)}, "lora_a: dimension 2|E"),
        ({"rows": AdapterRows(*torch.zeros(2, 3, dtype=torch.int32))}, "slots: expected dtype torch.int64"),
        ({"out": torch.zeros(3, 9)}, "out: expected O=10, got 9"),
        ({"out": torch.zeros(3, 10).half()}, "dtype"),
        ({"alternating": True}, "alternating: expected False"),
        ({"x": torch.zeros(16, 3).t()}, "x: expected innermost stride 1"),
        ({"adapters": Adapters((), ())}, "expected 1 to 3 slices, got 0 and 0"),
        (
            {"adapters": Adapters((torch.zeros(2, 16, 4).mT,), (torch.zeros(2, 10, 4),))},
            "expected contiguous",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(3, 16),
        "adapters": make_adapters(2, 4, 16, (6, 4), torch.float32),
        "rows": adapter_rows(torch.zeros(3, dtype=torch.int64)),
        "out": torch.zeros(3, 10),
    }
    add_adapters(**arguments)
    with pytest.raises(ShapeError, match=message):
        add_adapters(**arguments | change)


@compiles("_adapters_shrink_kernel", "_adapters_expand_kernel")
def test_kernels_of_adapters(capability: int) -> None:
    with record_launches(gpu, "_adapters_shrink_kernel", "_adapters_expand_kernel") as launches:
        for num_rows, rank, depth, widths, dtype in (
            (1, 16, 1024, (2048, 1024, 1024), torch.bfloat16),
            (256, 64, 1024, (3072, 3072), torch.bfloat16),
            (4096, 64, 4096, (4096, 1024, 1024), HALF),
            (300, 64, 600, (40,), torch.float32),
        ):
            x = torch.empty(num_rows, depth, dtype=dtype)
            lora_a = tuple(torch.empty(8, rank, depth, dtype=dtype) for _ in widths)
            lora_b = tuple(torch.empty(8, width, rank, dtype=dtype) for width in widths)
            rows = adapter_rows(torch.zeros(num_rows, dtype=torch.int64))
            out = torch.empty(num_rows, sum(widths), dtype=dtype)
            gpu.add_adapters(x, Adapters(lora_a, lora_b), rows, out, alternating=len(widths) == 2)
        hidden, weight = torch.empty(32, 1024, dtype=HALF), torch.empty(1024, dtype=HALF)
        left = norm_input_of(hidden, pack_norm(weight, 1e-5))._replace(moments=torch.empty(32, 2, 32))
        lora_a = (torch.empty(8, 16, 1024, dtype=HALF),)
        lora_b = (torch.empty(8, 3072, 16, dtype=HALF),)
        rows, out = adapter_rows(torch.zeros(32, dtype=torch.int64)), torch.empty(32, 3072, dtype=HALF)
        gpu.add_adapters(left, Adapters(lora_a, lora_b), rows, out)
    assert len(launches) == 10
    for launch in launches:
        resources = compile_launch(overlapped(launch, capability), capability)
        assert "ld.global.v4" in resources.ptx or "cp.async" in resources.ptx
        if capability >= 90:
            # Before anything is loaded, and in programs without rows of adapters, too.
            assert resources.ptx.index("griddepcontrol.wait") < resources.ptx.index("ld.global")
        if launch.arguments["EXACT"] and launch.kernel is gpu._adapters_shrink_kernel:
            # A block's products are added to those before, where compilers would rather go on with their sum.
            assert re.search(r"add(\.rn)?\.f32", resources.ptx)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 256, 4096])
def test_a_graph_follows_the_slots_of_its_rows(num_tokens: int) -> None:
    """Of Qwen3 0.6B's qkv_proj, captured while no row had an adapter; rows of padding have what was there before."""
    adapters = make_adapters(8, 16, 1024, (2048, 1024, 1024), torch.bfloat16, "cuda")
    x = torch.randn(num_tokens, 1024, device="cuda").bfloat16()
    slots = torch.full((num_tokens,), -1, device="cuda")
    out = torch.zeros(num_tokens, 4096, dtype=torch.bfloat16, device="cuda")
    add(x, adapters, slots, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(x, adapters, slots, out)
    for listed in (
        [row % 8 for row in range(num_tokens)],
        [7, *[2**40] * (num_tokens - 1)],
        [-1] * num_tokens,
    ):
        slots.copy_(torch.tensor(listed))
        out.zero_()
        graph.replay()
        replayed = out.clone()
        add(x, adapters, slots, out.zero_())
        assert torch.equal(replayed, out)
        assert out.any(1).tolist() == [0 <= slot < 8 for slot in listed]


@pytest.mark.gpu
def test_rows_of_a_large_step_lie_past_the_first_two_billion_numbers() -> None:
    """Of scratch memory, of the input and of the output."""
    num_rows, depth, width = 180_000, 12_000, 16
    adapters = make_adapters(2, 8, depth, (width,), HALF, "cuda")
    x = torch.zeros(num_rows, depth, dtype=HALF, device="cuda")
    x[-50:] = torch.randn(50, depth, device="cuda")
    slots = torch.full((num_rows,), -1, device="cuda")
    slots[-50:] = 1
    out = torch.zeros(num_rows, width, dtype=HALF, device="cuda")
    GPU(add_adapters, x, adapters, adapter_rows(slots), out)
    expected = torch.zeros(50, width, dtype=HALF)
    REFERENCE(add_adapters, x[-50:].cpu(), cpu(adapters), adapter_rows(slots[-50:].cpu()), expected)
    torch.testing.assert_close(out[-50:].cpu(), expected, rtol=1e-2, atol=1e-2)
    assert not out[:-50].any()


def cpu(adapters: Adapters) -> Adapters:
    return Adapters(*(tuple(each.cpu() for each in part) for part in (adapters.lora_a, adapters.lora_b)))
