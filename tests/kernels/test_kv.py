"""Stores of keys and values, and clones of blocks: exactly the named slots and blocks change, bit for bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from rose_backend.errors import ShapeError
from rose_backend.kernels import block_clone, write_kv
from rose_backend.kernels.arguments import CACHE_DTYPE
from rose_backend.kernels.kv import cache_writes, ops
from rose_backend.kernels.kv.ops import from_cache, to_cache
from tests.support.implementations import DTYPES, GPU, INTERPRETER, Implementation
from tests.support.paged_inputs import (
    CACHE_LAYOUTS,
    PagedInputs,
    build_paged_inputs,
    expected_storage,
    same_bits,
)


def store(inputs: PagedInputs) -> None:
    arguments = inputs.new_key, inputs.new_value, inputs.key_cache, inputs.value_cache, inputs.slot_mapping
    write_kv(*arguments, key_scale=inputs.key_scale, value_scale=inputs.value_scale)


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exactly_the_named_slots_are_written(
    implementation: Implementation, dtype: torch.dtype, layout: str
) -> None:
    inputs = build_paged_inputs(
        [0, 5, -1, 13, 8], [1, 9, 3, 19, 7], head_size=24, dtype=dtype, layout=layout, device=implementation.device
    )  # fmt: skip
    # Every innermost stride may be another than 1.
    inputs.new_key = inputs.new_key.transpose(0, 2).contiguous().transpose(0, 2)
    assert (inputs.slot_mapping < 0).sum() == 3
    stored = expected_storage(inputs)
    assert not same_bits(stored, inputs.storage)
    implementation(store, inputs)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("scales", [(None, None), (0.5, 2.0), (0.02, 3.0)], ids=str)
def test_float8_caches(
    implementation: Implementation, layout: str, scales: tuple[float | None, float | None]
) -> None:
    inputs = build_paged_inputs(
        [3, -1, 8, 31],
        [2, 3, 7, 40],
        layout=layout,
        dtype=torch.float16,
        cache_dtype=CACHE_DTYPE,
        key_scale=scales[0],
        value_scale=scales[1],
        device=implementation.device,
    )
    if implementation.name == "interpreter":
        if scales[0] == 0.02:
            pytest.skip("the interpreter rounds numbers wrongly that float8 does not hold exactly")
        for new in (inputs.new_key, inputs.new_value):
            new.copy_(2.0 ** torch.randint(-3, 12, new.shape))
    inputs.new_value[0] = 1e4  # Is limited.
    stored = expected_storage(inputs)
    implementation(store, inputs)
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("lengths", [[], [-1, -1]], ids=str)
def test_nothing_to_store(implementation: Implementation, lengths: list[int]) -> None:
    inputs = build_paged_inputs(lengths, device=implementation.device)
    before = inputs.storage.clone()
    implementation(store, inputs)
    assert same_bits(inputs.storage, before)


def test_mismatches_of_stores_are_named() -> None:
    for change, message in (
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, r"slot_mapping: expected T=2, got 3"),
        ({"new_key": torch.zeros(2, 2, 16).half()}, r"new_value: expected dtype torch.float16 as new_key, got to"),
        (
            dict.fromkeys(("new_key", "new_value"), torch.zeros(2, 2, 16).half()),
            r"key_cache: expected dtype torch.float16 as new_key, or torch.flo",
        ),
        ({"value_scale": torch.ones(1)}, r"value_scale: expected None with caches of torch.float32"),
    ):  # fmt: skip
        inputs = build_paged_inputs([3, 8])
        for name, value in change.items():
            setattr(inputs, name, value)
        with pytest.raises(ShapeError, match=message):
            store(inputs)


@triton.jit
def _to_cache_kernel(out_ptr, values_ptr, scale_ptr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    scale = cache_writes.load_scale(scale_ptr)
    stored = cache_writes.to_cache(tl.load(values_ptr + lanes), scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + lanes, stored)


def convert(out: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None) -> None:
    _to_cache_kernel[(1,)](out, values, scale, len(values))


def edge_values() -> torch.Tensor:
    """Every number that float8 holds, the ties between neighbours, and what lies outside its range."""
    held = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(CACHE_DTYPE).float()
    steps = held[~held.isnan()].sort().values
    ties = (steps[1:] + steps[:-1]) / 2
    outside = torch.tensor([448.0, 449.0, 464.0, 465.0, 1e4, -1e4, float("inf"), float("-inf"), float("nan")])
    values = torch.cat((held, ties, ties * 1.001, outside, torch.randn(300)))
    return torch.nn.functional.pad(values, (0, 2048 - len(values)))


def nearest_by_search(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the nearest finite numbers; of two equally near ones that with an even last bit."""
    order = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    held = order.view(CACHE_DTYPE).double()
    distance = (values.double().clamp(-448, 448)[:, None] - held).abs().nan_to_num(float("inf"))
    is_nearest = distance == distance.min(1, keepdim=True).values
    preferred = is_nearest * (2 - order % 2)
    return order[preferred.argmax(1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.03, 7.0])
def test_stored_numbers(dtype: torch.dtype, scale: float | None) -> None:
    values = edge_values().to(dtype)
    factor = None if scale is None else torch.tensor(scale)
    stored = to_cache(values, CACHE_DTYPE, factor)
    scaled = values.float() / (1.0 if scale is None else factor)
    real = ~scaled.isnan()
    # Comparing numbers, not bytes: zero has two.
    assert torch.equal(stored[real].float(), nearest_by_search(scaled[real]).view(CACHE_DTYPE).float())
    assert stored[~real].float().isnan().all()


def test_interpreted_kernels_round_the_same() -> None:
    # Numbers that are held exactly: Triton's interpreter itself rounds others wrongly.
    held = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(CACHE_DTYPE)
    normal = held[(held.float().abs() >= 2**-6) & (held.float().abs() < 448)]
    values = torch.cat((normal.float(), torch.tensor([448.0, 500.0, -1e9, float("inf")])))[-128:] * 0.5
    scale = torch.tensor([0.5])
    stored = torch.zeros(len(values), dtype=CACHE_DTYPE)
    INTERPRETER(convert, stored, values, scale)
    assert torch.equal(stored.view(torch.uint8), to_cache(values, CACHE_DTYPE, scale).view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.03])
def test_kernels_on_a_gpu_round_the_same(dtype: torch.dtype, scale: float | None) -> None:
    values = edge_values().to(dtype).cuda()
    factor = None if scale is None else torch.tensor(scale, device="cuda")
    stored = torch.zeros(len(values), dtype=CACHE_DTYPE, device="cuda")
    convert(stored, values, factor)
    expected = to_cache(values, CACHE_DTYPE, factor)
    real = ~values.isnan()
    assert torch.equal(stored[real].view(torch.uint8), expected[real].view(torch.uint8))
    assert stored[~real].float().isnan().all()


def test_scales_are_undone() -> None:
    scale = torch.tensor([0.5])
    values = torch.tensor([1.0, -3.5, 448.0, 300.0])
    stored = to_cache(values, CACHE_DTYPE, scale)
    assert from_cache(stored, torch.float32, scale).tolist() == [1.0, -3.5, 224.0, 224.0]
    assert from_cache(stored, torch.float16, None).tolist() == [2.0, -7.0, 448.0, 448.0]
    assert to_cache(values, torch.float32, None) is values
    assert from_cache(values, torch.float32, None) is values


CHAIN, CYCLE = [(1, 2), (2, 3), (3, 4)], [(1, 2), (2, 3), (3, 1)]
PAIRS = {
    "one": [(4, 0)],
    "independent": [(1, 5), (2, 6), (3, 0)],
    "fan": [(3, 0), (3, 1), (3, 6)],
    "chain": CHAIN,
    "chain_backwards": CHAIN[::-1],
    "cycle": CYCLE,
    "swap_and_copy": [(0, 6), (6, 0), (2, 4)],
    "to_itself": [(1, 1), (5, 2)],
}


def clone(cache: torch.Tensor, ids: torch.Tensor, block_dim: int, most: int = 8192) -> None:
    """Clone by ids on the cache's device, at most ``most`` of which may depend on each other in one program."""
    with mock.patch.object(cache_writes, "MAX_DEPENDENT_PAIRS", most):
        block_clone(cache, *ids.unbind(1), block_dim=block_dim)


def clone_by_ids_on_the_cpu(cache: torch.Tensor, ids: torch.Tensor, block_dim: int) -> None:
    """Have the launcher look for destinations that are sources, which ids on the device do not allow."""
    with torch._C.DisableTorchFunction():
        ops._launch(cache, *ids.unbind(1), block_dim)


def check_clone(
    call: Implementation,
    storage: torch.Tensor,
    cache: torch.Tensor,
    pairs: list[tuple[int, int]],
    block_dim: int,
    id_dtype: torch.dtype = torch.int32,
    **options: int,
) -> None:
    """Clone with ids on the device and on the CPU; sources are those before the call, and nothing beside changes."""
    ids, before = torch.tensor(pairs, dtype=id_dtype), storage.clone()
    view = before.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    sources, destinations = ids.long().to(storage.device).unbind(1)
    expected = before.clone()
    expected_view = expected.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    expected_view.movedim(block_dim, 0)[destinations] = view.movedim(block_dim, 0)[sources]
    call(clone, cache, ids.to(storage.device), block_dim, **options)
    assert same_bits(storage, expected)
    if call.has_kernels:
        storage.copy_(before)
        call(clone_by_ids_on_the_cpu, cache, ids, block_dim)
        assert same_bits(storage, expected)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_every_kind(implementation: Implementation, name: str) -> None:
    storage = torch.randn(2, 2, 7, 4, 3, 8).half().to(implementation.device)
    for id_dtype in (torch.int32, torch.int64):
        check_clone(implementation, storage, storage, PAIRS[name], 2, id_dtype)


@pytest.mark.parametrize(
    "layout", ["keys", "every_second", "blocks_innermost", "blocks_outermost", "shifted", "padded", "bytes"]
)
def test_any_layout_and_nothing_beside_it(implementation: Implementation, layout: str) -> None:
    storage = torch.randn(2, 7, 4, 3, 16).half()
    if layout == "shifted":
        storage = torch.randn(2 * 7 * 12 + 1).half()
    elif layout == "padded":
        storage = torch.randn(2, 57).half()
    elif layout == "bytes":
        storage = torch.randint(0, 255, (2, 7, 13), dtype=torch.uint8)
    storage = storage.to(implementation.device)
    cache, block_dim = {
        "keys": lambda: (storage[..., :8], 1),
        "every_second": lambda: (storage[..., ::2], -4),
        "blocks_innermost": lambda: (storage.movedim(1, -1), -1),
        "blocks_outermost": lambda: (storage.movedim(1, 0), 0),
        "shifted": lambda: (storage[1:].view(2, 7, 12), 1),
        # Blocks are 16 bytes apart, layers are not a multiple of that.
        "padded": lambda: (storage[:, :56].unflatten(1, (7, 8)), 1),
        "bytes": lambda: (storage, 1),
    }[layout]()
    check_clone(implementation, storage, cache, CYCLE, block_dim)
    check_clone(implementation, storage, cache, PAIRS["independent"], block_dim)


def test_more_dependent_pairs_than_one_program_holds(implementation: Implementation) -> None:
    storage = torch.randn(2, 7, 8, device=implementation.device)
    check_clone(implementation, storage, storage, CYCLE, 1, most=2)


def test_no_pairs(implementation: Implementation) -> None:
    cache = torch.randn(3, 2, device=implementation.device)
    before = cache.clone()
    implementation(clone, cache, torch.zeros(0, 2, dtype=torch.int32, device=implementation.device), 0)
    assert same_bits(cache, before)


def test_mismatches_of_clones_are_named() -> None:
    cache, ids = torch.zeros(3, 2), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ShapeError, match="dst_block_ids: expected N=2, got 1"):
        block_clone(cache, ids, ids[:1])
    with pytest.raises(ShapeError, match=r"src_block_ids: expected dtype torch.int32 or torch.int64"):
        block_clone(cache, ids.short(), ids)
    with pytest.raises(ShapeError, match=r"block_dim: expected a dimension of kv_cache \[3, 2\], got 2"):
        block_clone(cache, ids, ids, block_dim=2)


def test_blocks_are_described_by_few_wide_dimensions() -> None:
    cache = torch.empty(12, 2, 100, 16, 12, 64, dtype=torch.float16, device="meta")
    layout = cache_writes.block_layout(tuple(cache.shape), cache.stride(), 2, 2, 16)
    assert (layout.shape, layout.strides) == ((3072, 24), (1, 307200))
    assert (layout.element.primitive_bitwidth, layout.block_stride) == (64, 3072)


@pytest.mark.gpu
@pytest.mark.parametrize("num_pairs", [1, 2, 3, 100, 256, 1000, 9000])
@pytest.mark.parametrize("kind", ["independent", "chain", "cycle", "fan"])
def test_many_pairs_of_every_kind(kind: str, num_pairs: int) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    blocks = torch.randperm(2 * num_pairs + 3, generator=generator).tolist()
    if kind == "independent":
        pairs = list(zip(blocks[:num_pairs], blocks[num_pairs:], strict=False))
    elif kind == "fan":
        pairs = [(blocks[0], block) for block in blocks[1 : num_pairs + 1]]
    else:
        end = blocks[0] if kind == "cycle" else blocks[num_pairs]
        pairs = list(zip(blocks[:num_pairs], [*blocks[1:num_pairs], end], strict=True))
    pairs = [pairs[index] for index in torch.randperm(num_pairs, generator=generator).tolist()]
    cache = torch.randint(-(2**15), 2**15, (3, 2, len(blocks), 4, 2, 40), dtype=torch.int16, device="cuda")
    check_clone(GPU, cache, cache, pairs, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("layout", ["keys", "every_second", "last"])
def test_clone_views_and_leave_the_rest(layout: str, offset: int) -> None:
    # Words of 16, 8 and 2 bytes, depending on where the storage starts.
    storage = torch.randint(-(2**15), 2**15, (2 * 60 * 16 * 2 * 128 + 8,), dtype=torch.int16, device="cuda")
    whole = storage[offset : offset + 2 * 60 * 16 * 2 * 128].view(2, 60, 16, 2, 128)
    cache = {"keys": whole[..., :64], "every_second": whole[..., ::2], "last": whole.movedim(1, -1)}[layout]
    block_dim = cache.ndim - 1 if layout == "last" else 1
    check_clone(GPU, storage, cache, [(1, 2), (2, 3), (3, 1), (50, 10)], block_dim, torch.int64)


@pytest.mark.gpu
def test_clone_past_two_to_the_31() -> None:
    cache = torch.empty(2, 1200, 1_000_000, dtype=torch.float16, device="cuda")
    assert cache[0].numel() < 2**31 < cache.numel()
    cache[:, [3, 700, 1199]] = torch.randn(2, 3, 1_000_000, device="cuda").half()
    sources = cache[:, [1199, 3]].clone()
    for device in ("cpu", "cuda"):
        cache[:, [1198, 1100]] = float("nan")
        block_clone(
            cache,
            torch.tensor([1199, 3], device=device),
            torch.tensor([1198, 1100], device=device),
            block_dim=1,
        )
        assert torch.equal(cache[:, [1198, 1100]], sources)
        assert torch.equal(cache[:, [1199, 3]], sources)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["independent", "chain", "cycle"])
def test_a_thousand_clones_agree_and_graphs_replay(kind: str) -> None:
    start = torch.randn(12, 2, 600, 16, 64, device="cuda").half()
    order = torch.randperm(600, device="cuda")
    src = order[:256].contiguous()
    dst = {"independent": order[256:512], "chain": order[1:257], "cycle": src.roll(1)}[kind].contiguous()
    expected = start.clone()
    ops._block_clone(expected, src, dst, block_dim=2)
    cache = start.clone()
    graph = torch.cuda.CUDAGraph()
    block_clone(cache, src, dst, block_dim=2)
    with torch.cuda.graph(graph):
        block_clone(cache, src, dst, block_dim=2)
    for _ in range(1000):
        cache.copy_(start)
        graph.replay()
        assert torch.equal(cache, expected)
