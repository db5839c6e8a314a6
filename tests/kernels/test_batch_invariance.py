"""Products and attention with ``batch_invariant``: right, and each row bit for bit what it is beside any others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_backend import kernels
from rose_backend.errors import ShapeError
from rose_backend.kernels import (
    AttentionOptions,
    HeadRotation,
    NewTokens,
    NormInput,
    PackedNorm,
    PagedKV,
    batch_invariant_linear,
    norm_input_of,
    pack_linear,
    pack_norm,
    small_batch_linear,
    small_batch_linear_before_norm,
)
from rose_backend.kernels.attention import batch_invariant as attention
from tests.support.attention_calls import decode, prefill
from tests.support.implementations import GPU, INTERPRETER, REFERENCE, Implementation
from tests.support.paged_inputs import (
    OPTION_NAMES,
    OPTIONS,
    check_attention,
    expected_storage,
    make_inputs,
    resolve_options,
    same_bits,
)
from tests.support.sampling_cases import random_case

FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32
# Depths that end within a tile, in one part and in several; more columns than a tile has.
SHAPES = [(48, 40), (1100, 70), (64, 200)]


def dtype_of(implementation: Implementation) -> torch.dtype:
    """Return a dtype that it computes as it should: the interpreter truncates bfloat16."""
    return {REFERENCE: FLOAT32, INTERPRETER: FLOAT16, GPU: BFLOAT16}[implementation]


def check_same(found: torch.Tensor, expected: torch.Tensor, like: Implementation, *place: Any) -> None:
    """Compare bits; of the interpreter values, as NumPy rounds a row of a product by its place among the others."""
    if like is INTERPRETER:
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    else:
        assert same_bits(found, expected), place


def random_product(shape: tuple[int, int], rows: int, like: Implementation) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(like.device).manual_seed(rows)
    depth, width = shape

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=like.device).to(dtype_of(like))

    return draw(rows, depth), draw(width, depth).t(), draw(width)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_right_and_its_rows_are_what_they_are_alone(
    implementation: Implementation, shape: tuple[int, int]
) -> None:
    x, weight, bias = random_product(shape, 131, implementation)
    expected = x.double() @ weight.double() + bias.double()
    product = implementation(batch_invariant_linear, x, weight, bias)
    assert product.dtype == x.dtype
    assert (product - expected).abs().max() <= 2 * ((x @ weight + bias) - expected).abs().max() + 1e-6
    wide = implementation(batch_invariant_linear, x, weight, dtype=FLOAT32)
    assert wide.dtype == FLOAT32
    torch.testing.assert_close(wide.double(), expected - bias.double(), rtol=1e-3, atol=1e-3)
    for rows in (slice(0, 1), slice(17, 20), slice(60, 125), slice(3, 131)):
        found = implementation(batch_invariant_linear, x[rows], weight, bias)
        check_same(found, product[rows], implementation, rows)
        found = implementation(batch_invariant_linear, x[rows], weight, dtype=FLOAT32)
        check_same(found, wide[rows], implementation, rows)


def test_a_program_that_has_all_parts_adds_them_up() -> None:
    """Where there are as many tiles as processors."""
    x, weight, bias = random_product((512, 70), 8448, INTERPRETER)
    found = INTERPRETER(batch_invariant_linear, x, weight, bias)
    torch.testing.assert_close(found.float(), x.float() @ weight.float() + bias, rtol=1e-2, atol=5e-2)


def test_a_product_takes_a_matrix_in_any_order(implementation: Implementation) -> None:
    x, weight, _ = random_product((48, 40), 5, implementation)
    other = weight.contiguous()
    assert other.stride() != weight.stride()
    expected = implementation(batch_invariant_linear, x, weight)
    torch.testing.assert_close(implementation(batch_invariant_linear, x, other), expected)


def test_no_rows_are_no_product(implementation: Implementation) -> None:
    x, weight, bias = random_product((48, 40), 0, implementation)
    assert implementation(batch_invariant_linear, x, weight, bias).shape == (0, 40)


AROUND = ["RMSNorm", "gated", "LayerNorm", "adds"]


class LayerProducts:
    """A product with one kind of operations around it, of random rows."""

    def __init__(self, shape: tuple[int, int], rows: int, kind: str, like: Implementation) -> None:
        self.like, self.kind = like, kind
        generator = torch.Generator().manual_seed(rows + shape[0])

        def draw(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(dtype_of(like)).to(like.device)

        depth, width = shape
        self._x, weight, bias = draw(rows, depth), draw(width, depth) / depth**0.5, draw(width)
        self._residual, self._next_norm = draw(rows, width), pack_norm(1 + draw(width) / 8, 1e-5)
        scale, folded = 1 + draw(depth) / 8, {}
        if kind == "LayerNorm":
            folded = {"norm_weight": scale, "norm_bias": draw(depth)}
        norm = PackedNorm(None, 1e-5) if folded else pack_norm(scale, 1e-5)
        self._before = norm_input_of(self._x, norm)
        layer = pack_linear(weight, bias, gated=kind == "gated", **folded)
        self._layer = replace(layer, batch_invariant=True)

    def __call__(self, rows: Any = slice(None), *, reference: bool = False) -> tuple[torch.Tensor, ...]:
        """Return everything that is made of ``rows``; ``reference``: by kernels that are not batch-invariant."""
        layer = replace(self._layer, batch_invariant=not reference)
        if self.kind == "adds":
            residual = self._residual[rows]
            out, after = self.like(
                small_batch_linear_before_norm,
                self._x[rows],
                layer,
                self._next_norm,
                residual=residual,
                gelu=True,
            )
            return out, after.scaled, after.moments.sum(2) if reference else after.moments
        scaled, moments, norm = self._before
        return (
            self.like(small_batch_linear, NormInput(scaled[rows], moments[rows].contiguous(), norm), layer),
        )


@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_right_with_all_that_is_around_it(
    implementation: Implementation, shape: tuple[int, int], kind: str
) -> None:
    products = LayerProducts(shape, 131, kind, implementation)
    whole = products()
    expected = products(reference=True)
    for found, right in zip(whole, expected, strict=True):
        wide = found.sum(2) if found.ndim == 3 else found
        torch.testing.assert_close(wide.float(), right.float(), rtol=2e-2, atol=2e-2)
    if implementation is not REFERENCE:
        for rows in (slice(0, 1), slice(17, 20), slice(60, 125), slice(3, 131)):
            for found, right in zip(products(rows), whole, strict=True):
                check_same(found, right[rows], implementation, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.parametrize("shape", [(1024, 4096), (3072, 1024), (4096, 4096), (768, 2304)], ids=str)
def test_layers_of_a_model_are_the_same_in_any_batch(shape: tuple[int, int], kind: str) -> None:
    products = LayerProducts(shape, 4096, kind, GPU)
    whole = products()
    counts = [1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300, 1000, 2049]
    for count in counts:
        rows = torch.randperm(4096, generator=torch.Generator().manual_seed(count))[:count].cuda()
        for found, right in zip(products(rows), whole, strict=True):
            check_same(found, right[rows], GPU, count)


def test_what_a_layer_cannot_leave_is_refused() -> None:
    x, weight, _ = random_product((48, 40), 2, INTERPRETER)
    layer = replace(pack_linear(weight.t(), gated=True), batch_invariant=True)
    with pytest.raises(ShapeError, match="next_norm: expected None after a gated layer"):
        INTERPRETER(small_batch_linear_before_norm, x, layer, pack_norm(torch.ones(20).to(x.dtype), 1e-5))


# Qwen3 0.6B: query, key and value, both of what is led back, gate and factor; Llama 3.1 8B; a head; GPT-2.
MODEL_SHAPES = [
    *((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (4096, 6144), (4096, 4096), (4096, 28_672)),
    *((14_336, 4096), (1024, 151_936), (768, 2304)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
def test_rows_of_a_model_are_the_same_in_any_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """One to 8,192 rows, beside random ones, at random places."""
    depth, width = shape
    most = 8192 if width < 100_000 else 1024
    generator = torch.Generator("cuda").manual_seed(depth + width)
    x = torch.randn((most, depth), generator=generator, device="cuda").to(dtype)
    weight = (torch.randn((width, depth), generator=generator, device="cuda") / depth**0.5).to(dtype).t()
    whole = batch_invariant_linear(x, weight, dtype=FLOAT32)
    # Beside a product of the same numbers in float32.
    error = (whole[:64] - x[:64].float() @ weight.float()).abs().max()
    assert error < 2e-2
    counts = [1, 2, 3, 16, 31, 63, 64, 65, 100, 127, 128, 129, 255, 256, 300, 1000, 4096]
    counts += torch.randint(1, most, (40,), generator=torch.Generator().manual_seed(width)).tolist()
    for count in counts:
        rows = torch.randperm(most, generator=generator, device="cuda")[: min(count, most)]
        found = batch_invariant_linear(x[rows], weight, dtype=FLOAT32)
        assert torch.equal(found.view(torch.int32), whole[rows].view(torch.int32)), count


COMPUTED, QUERY_LENS = [0, 5, -1, 13, 0, 8, 21, 300, 520], [1, 9, 3, 19, 0, 8, 1, 1, 70]


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_prompts_are_attended_as_they_should(implementation: Implementation, options: dict[str, Any]) -> None:
    shape = (6, 2, 16, 8)
    inputs = make_inputs(
        COMPUTED, QUERY_LENS, shape, dtype=dtype_of(implementation), device=implementation.device
    )
    options = resolve_options(options, shape, implementation.device)
    stored = expected_storage(inputs)
    out = implementation(prefill, inputs, batch_invariant=True, **options)
    check_attention(inputs, out, **{name: options[name] for name in OPTION_NAMES & options.keys()})
    assert same_bits(inputs.storage, stored)


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_decodes_are_attended_as_they_should(implementation: Implementation, options: dict[str, Any]) -> None:
    shape = (6, 2, 16, 8)
    lengths = [0, 5, -1, 1100, 255, 256, 257, 21]
    inputs = make_inputs(lengths, None, shape, dtype=dtype_of(implementation), device=implementation.device)
    options = resolve_options(options, shape, implementation.device)
    stored = expected_storage(inputs)
    out = implementation(decode, inputs, batch_invariant=True, **options)
    check_attention(inputs, out, **{name: options[name] for name in OPTION_NAMES & options.keys()})
    assert same_bits(inputs.storage, stored)


class Sequences:
    """Random queries, keys and values of some sequences, and a cache that they are computed into, step by step."""

    def __init__(
        self, lengths: list[int], shape: tuple[int, int, int, int], like: Implementation, seed: int
    ) -> None:
        self.lengths, self.like = lengths, like
        num_heads, num_kv_heads, head_size, self._block_size = shape
        generator = torch.Generator().manual_seed(seed)
        widths = [-(-length // self._block_size) for length in lengths]
        self._tables = torch.zeros((len(lengths), max(widths)), dtype=torch.int32)
        for row, blocks in enumerate(torch.randperm(sum(widths), generator=generator).split(widths)):
            self._tables[row, : widths[row]] = blocks
        dtype, device = dtype_of(like), like.device
        total = num_heads + 2 * num_kv_heads
        self._tokens = [
            torch.randn((length, total, head_size), generator=generator).to(dtype).to(device)
            for length in lengths
        ]
        self._heads = [num_heads, num_kv_heads, num_kv_heads]
        self._cache = torch.zeros(
            (2, sum(widths), self._block_size, num_kv_heads, head_size), dtype=dtype, device=device
        )
        self.options = AttentionOptions(head_size**-0.5, batch_invariant=True)

    def step(self, parts: list[tuple[int, int, int]], *, as_decodes: bool = False) -> list[torch.Tensor]:
        """Attend tokens ``start .. end - 1`` of each (row, start, end) in one call; return each part's output."""
        device = self.like.device
        qkv = torch.cat([self._tokens[row][start:end] for row, start, end in parts])
        query, key, value = qkv.split(self._heads, dim=1)
        lengths = [end - start for _, start, end in parts]
        kv = PagedKV(
            *self._cache,
            self._tables[[row for row, _, _ in parts]].to(device),
            torch.tensor([start for _, start, _ in parts], dtype=torch.int32, device=device),
            None if as_decodes else torch.tensor([0, *lengths], device=device).cumsum(0).int(),
        )
        function = kernels.paged_decode if as_decodes else kernels.paged_prefill
        out = torch.full_like(query, float("nan"))
        self.like(function, query, NewTokens(key, value), kv, options=self.options, out=out)
        return list(out.split(lengths))

    def whole(self) -> list[torch.Tensor]:
        """Return each sequence's output, computed alone and at once."""
        return [self.step([(row, 0, length)])[0] for row, length in enumerate(self.lengths)]


def check_random_steps(sequences: Sequences, whole: list[torch.Tensor], most: int, seed: int) -> None:
    """Compute all sequences in random chunks, several rows a step, and compare each with ``whole``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    done = [0] * len(sequences.lengths)
    while rows := [row for row, length in enumerate(sequences.lengths) if done[row] < length]:
        chosen = rows[: draw(1, len(rows) + 1)]
        as_decodes = draw(0, 3) == 0
        parts = []
        for row in chosen:
            size = 1 if as_decodes or draw(0, 2) else draw(1, most)
            parts.append((row, done[row], min(done[row] + size, sequences.lengths[row])))
        for (row, start, end), found in zip(parts, sequences.step(parts, as_decodes=as_decodes), strict=True):
            check_same(found, whole[row][start:end], sequences.like, row, start, end, as_decodes)
            done[row] = end


@pytest.mark.parametrize("window", [None, 37])
def test_tokens_are_the_same_in_any_chunks_and_batches(
    implementation: Implementation, window: int | None
) -> None:
    sequences = Sequences([40, 300, 1, 530], (4, 2, 16, 8), implementation, seed=3)
    sequences.options = replace(sequences.options, sliding_window=window)
    check_random_steps(sequences, sequences.whole(), most=120, seed=4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(16, 8, 128, 16), (32, 8, 128, 16), (12, 12, 64, 16), (5, 1, 96, 32)], ids=str
)
def test_long_sequences_are_the_same_in_any_chunks_and_batches(shape: tuple[int, int, int, int]) -> None:
    lengths = [*range(1, 300, 7), 1000, 4097, 9001]
    sequences = Sequences(lengths, shape, GPU, seed=5)
    whole = sequences.whole()
    for seed in range(3):
        check_random_steps(sequences, whole, most=3000, seed=seed)


@pytest.mark.gpu
def test_more_splits_than_can_be_stored_are_the_same() -> None:
    sequences = Sequences([9000] * 8, (4, 2, 64, 16), GPU, seed=6)
    whole = sequences.whole()
    decodes = [(row, 8999, 9000) for row in range(8)]
    for most in (1, 100, 4096):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "_MAX_RECORDS", most)
            for found, row in zip(sequences.step(decodes, as_decodes=True), whole, strict=True):
                assert same_bits(found, row[8999:])


def test_what_it_does_not_take_is_refused(implementation: Implementation) -> None:
    inputs = make_inputs(
        [3], None, (4, 2, 16, 8), dtype=dtype_of(implementation), device=implementation.device
    )
    table = torch.ones((8, 16), device=implementation.device)
    with pytest.raises(ShapeError, match="rotation: expected none with batch_invariant"):
        implementation(decode, inputs, batch_invariant=True, rotation=HeadRotation(table))


@pytest.mark.parametrize(("dtype", "head_size"), [(FLOAT32, 16), (FLOAT16, 144)], ids=str)
def test_a_gpu_refuses_other_types_and_heads(dtype: torch.dtype, head_size: int) -> None:
    inputs = make_inputs([3], [2], (4, 2, head_size, 8), dtype=dtype)
    with pytest.raises(ShapeError, match="expected float16 or bfloat16 and D of at most 128"):
        INTERPRETER(prefill, inputs, batch_invariant=True)
    if dtype is FLOAT32:
        x, weight, _ = random_product((48, 40), 2, REFERENCE)
        with pytest.raises(ShapeError, match="x: expected float16 or bfloat16"):
            INTERPRETER(batch_invariant_linear, x, weight)


@pytest.mark.parametrize("choose", [kernels.sample, kernels.sample_unfused])
def test_rows_that_are_drawn_apart_have_all_their_parameters(choose: Any) -> None:
    logits, params = random_case(40, 67, seed=1)
    assert (
        params.prompt_mask is not None and params.output_counts is not None and params.processors is not None
    )
    params = replace(params, num_logprobs=3)
    together, apart = choose(logits, params), kernels.sample_each(choose, logits, params)
    assert apart.token_ids.tolist() == together.token_ids.tolist()
    assert apart.top_token_ids.tolist() == together.top_token_ids.tolist()
    torch.testing.assert_close(apart.logprob, together.logprob)
    torch.testing.assert_close(apart.top_logprobs, together.top_logprobs)
    nothing = replace(params, num_logprobs=-1)
    assert kernels.sample_each(choose, logits, nothing).logprob is None
    for row in (3, 17):
        alone = choose(logits[row : row + 1], params.keep(slice(row, row + 1)))
        assert same_bits(alone.top_logprobs, apart.top_logprobs[row : row + 1])


def test_torch_alone_would_not_do() -> None:
    """Else the reference needs no rows of its own, and the tests above say nothing."""
    x, weight, _ = random_product((1100, 70), 131, REFERENCE)
    whole = x @ weight
    assert any(not same_bits(x[:count] @ weight, whole[:count]) for count in range(1, 131))
