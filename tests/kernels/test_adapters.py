"""LoRA adapters added to products: against two products in float64 for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import AdapterRows, Adapters, adapter_rows, add_adapters, norm_input_of, pack_norm
from rose_backend.kernels.linear import adapters as gpu
from tests.support.aot import compile_launch, compiles, record_launches
from tests.support.error_budget import assert_within_budget
from tests.support.implementations import GPU, REFERENCE, Implementation, each_dtype, kernels_only

HALF = torch.float16


def make_adapters(
    num_places: int, rank: int, depth: int, widths: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> Adapters:
    generator = torch.Generator().manual_seed(num_places + rank)

    def draw(scale: float, *shape: int) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)

    downs = tuple(draw(depth**-0.5, num_places, rank, depth) for _ in widths)
    return Adapters(downs, tuple(draw(rank**-0.5, num_places, width, rank) for width in widths))


def add(
    x: torch.Tensor, adapters: Adapters, places: torch.Tensor, out: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return ``out``, which the interpreter's process has written."""
    add_adapters(x, adapters, adapter_rows(places), out, **options)
    return out


def products(x: torch.Tensor, adapters: Adapters, places: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return what adapters make of each row, in ``dtype``."""
    rows = []
    for row, place in zip(x.to(dtype), places, strict=True):
        if 0 <= place < len(adapters.downs[0]):
            pairs = zip(adapters.downs, adapters.ups, strict=True)
            rows.append(torch.cat([row @ d[place].to(dtype).t() @ u[place].to(dtype).t() for d, u in pairs]))
        else:
            rows.append(torch.zeros(sum(up.shape[1] for up in adapters.ups), dtype=dtype, device=x.device))
    return torch.stack(rows)


CASES = {
    "no row": ([], 3, 8, (48, 16, 16)),
    "one row": ([1], 2, 16, (70,)),
    "one row without": ([-1], 2, 16, (70,)),
    "all kinds in a tile": ([2, -1, 0, 1, 0, 9, 2, 1, -7], 3, 8, (48, 16, 16)),
    "tiles with and without": ([-1] * 16 + [0] * 17 + [-1, 1], 8, 33, (40, 40)),
    "long prompts": ([1] * 130 + [-1] * 66 + [0] * 70 + [2], 3, 64, (40, 40)),
}
"""Places of rows, number of places, rank, and widths of the parts."""


@each_dtype
@pytest.mark.parametrize("case", CASES)
def test_each_row_gets_its_adapters_products(
    implementation: Implementation, dtype: torch.dtype, case: str
) -> None:
    listed, num_places, rank, widths = CASES[case]
    depth, device = 600, implementation.device
    adapters = make_adapters(num_places, rank, depth, widths, dtype, device)
    generator = torch.Generator().manual_seed(3)
    # Rows are further apart than they are long, and what lies between them is never read.
    x = torch.full((len(listed), depth + 8), float("nan"), dtype=dtype)
    x[:, :depth] = torch.randn(len(listed), depth, generator=generator)
    base = torch.randn(len(listed), sum(widths) + 5, generator=generator).to(dtype).to(device)
    x, places = x.to(device), torch.tensor(listed, dtype=torch.int64, device=device)
    kept = [each.clone() for each in (x, places, base, *adapters.downs, *adapters.ups)]
    for alternating in (False, True) if len(widths) == 2 else (False,):
        wide = base.clone()
        actual = implementation(
            add, x[:, :depth], adapters, places, wide[:, : sum(widths)], alternating=alternating
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
        without = [row for row, place in enumerate(listed) if not 0 <= place < num_places]
        assert torch.equal(actual[without], before[without])
    for tensor, before in zip((x, places, base, *adapters.downs, *adapters.ups), kept, strict=True):
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
    places = torch.tensor(listed, device=implementation.device)
    actual = implementation(add, left, adapters, places, base.clone())
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
        implementation(add, x, adapters, torch.tensor(places, device=x.device), torch.zeros_like(x[:, :128]))
        for places in (alone, mixed)
    ]
    same = [row for row, place in enumerate(mixed) if place == 2]
    assert len(same) > 12 and torch.equal(results[0][same], results[1][same])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 17)}, "downs: dimension 2|E"),
        ({"rows": AdapterRows(*torch.zeros(2, 3, dtype=torch.int32))}, "places: expected dtype torch.int64"),
        ({"out": torch.zeros(3, 9)}, "out: expected O=10, got 9"),
        ({"out": torch.zeros(3, 10).half()}, "dtype"),
        ({"alternating": True}, "alternating: expected False"),
        ({"x": torch.zeros(16, 3).t()}, "x: expected innermost stride 1"),
        ({"adapters": Adapters((), ())}, "expected 1 to 3 parts, got 0 and 0"),
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


@compiles("_adapters_down_kernel", "_adapters_up_kernel")
def test_kernels_of_adapters(capability: int) -> None:
    with record_launches(gpu, "_adapters_down_kernel", "_adapters_up_kernel") as launches:
        for num_rows, rank, depth, widths, dtype in (
            (1, 16, 1024, (2048, 1024, 1024), torch.bfloat16),
            (32, 16, 3072, (1024,), HALF),
            (256, 64, 1024, (3072, 3072), torch.bfloat16),
            (4096, 64, 4096, (4096, 1024, 1024), HALF),
            (4096, 8, 14336, (4096,), torch.bfloat16),
        ):
            x = torch.empty(num_rows, depth, dtype=dtype)
            downs = tuple(torch.empty(8, rank, depth, dtype=dtype) for _ in widths)
            ups = tuple(torch.empty(8, width, rank, dtype=dtype) for width in widths)
            rows = adapter_rows(torch.zeros(num_rows, dtype=torch.int64))
            out = torch.empty(num_rows, sum(widths), dtype=dtype)
            gpu.add_adapters(x, Adapters(downs, ups), rows, out, alternating=len(widths) == 2)
        for dtype in (HALF, torch.bfloat16):
            hidden, weight = torch.empty(32, 1024, dtype=dtype), torch.empty(1024, dtype=dtype)
            left = norm_input_of(hidden, pack_norm(weight, 1e-5))
            left = left._replace(moments=torch.empty(32, 2, 32))
            downs = tuple(torch.empty(8, 16, 1024, dtype=dtype) for _ in range(3))
            ups = tuple(torch.empty(8, width, 16, dtype=dtype) for width in (2048, 1024, 1024))
            rows, out = adapter_rows(torch.zeros(32, dtype=torch.int64)), torch.empty(32, 4096, dtype=dtype)
            gpu.add_adapters(left, Adapters(downs, ups), rows, out)
    assert len(launches) == 14
    for launch in launches:
        resources = compile_launch(launch, capability)
        assert "ld.global.v4" in resources.ptx or "cp.async" in resources.ptx


@pytest.mark.gpu
def test_rows_of_a_large_step_lie_past_the_first_two_billion_numbers() -> None:
    """Of the first product's parts, of the input and of the output."""
    num_rows, depth, width = 180_000, 12_000, 16
    adapters = make_adapters(2, 8, depth, (width,), HALF, "cuda")
    x = torch.zeros(num_rows, depth, dtype=HALF, device="cuda")
    x[-50:] = torch.randn(50, depth, device="cuda")
    places = torch.full((num_rows,), -1, device="cuda")
    places[-50:] = 1
    out = torch.zeros(num_rows, width, dtype=HALF, device="cuda")
    GPU(add_adapters, x, adapters, adapter_rows(places), out)
    expected = torch.zeros(50, width, dtype=HALF)
    REFERENCE(add_adapters, x[-50:].cpu(), cpu(adapters), adapter_rows(places[-50:].cpu()), expected)
    torch.testing.assert_close(out[-50:].cpu(), expected, rtol=1e-2, atol=1e-2)
    assert not out[:-50].any()


def cpu(adapters: Adapters) -> Adapters:
    return Adapters(*(tuple(each.cpu() for each in part) for part in (adapters.downs, adapters.ups)))
