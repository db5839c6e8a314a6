"""Linear layers, with the norm before and the residual add after them, and the MLP made of two.

They are in one file because kernels fuse them: small batches compute norm, product and residual add in one launch, and
for other batches a norm includes the residual add before it. ``ResidualStream`` chooses between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from rose_backend.config import Switches
from rose_backend.kernels import (
    AdapterRows,
    Adapters,
    Experts,
    InputQuantization,
    Int4Weight,
    NormInput,
    PackedLinear,
    PackedNorm,
    QuantizedActivations,
    adapter_rows,
    add_adapters,
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    bias_residual,
    empty_rows,
    expert_mlp,
    layer_norm,
    pack_linear,
    pack_norm,
    quantize,
    quantized_linear,
    rms_norm,
    rms_norm_quantized,
    silu_mul,
    silu_mul_quantized,
    small_batch_linear,
    small_batch_linear_before_norm,
)
from rose_backend.kernels.arguments import Weight
from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.kernels.tuning.measured import constants

_TILE = constants("products in halves")["library_tile"]
"""Rows and columns of the library's tiles where it splits the inner dimension."""


@dataclass(frozen=True, slots=True)
class Norm:
    """LayerNorm, or RMSNorm where there is no bias."""

    weight: torch.Tensor  # [E]
    bias: torch.Tensor | None  # [E]
    eps: float
    packed: PackedNorm | None = None
    """The norm as a packed layer after it needs it, for small batches. RMSNorm's shares ``weight``. LayerNorm is folded
    into that layer, and ``weight`` and ``bias`` are then 1 and 0."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight + bias``."""

    weight: Weight
    """[E, O], any strides: library products take any. A quantized weight is [O, E]."""
    bias: torch.Tensor | None  # [O]
    packed: PackedLinear | None = None
    """The layer for small batches. It shares memory with ``weight``, which therefore has its order of rows (see
    ``PackedLinear.alternates``)."""
    adapters: Adapters | None = None
    many_rows: Callable[[torch.Tensor | QuantizedActivations], torch.Tensor] | None = None
    """Returns the product of a batch that is not small, bias included, [T, O]: vLLM's own quantized product, or
    ``int4_product``. None: a library multiplies by ``weight``. vLLM may keep ``weight`` in a layout that only its own
    product can read; then there is no ``packed``."""
    quantization: InputQuantization | None = None
    """How to quantize the input of ``many_rows``, or of a library's product by a ``Float8Weight``. None: the product
    takes the input as it is."""

    @property
    def num_inputs(self) -> int:
        """``E``."""
        return self.weight.shape[0 if isinstance(self.weight, torch.Tensor) else 1]

    @property
    def num_outputs(self) -> int:
        """``O``."""
        return self.weight.shape[1 if isinstance(self.weight, torch.Tensor) else 0]


@dataclass(frozen=True, slots=True)
class Mlp:
    """Two linear layers with an activation between them."""

    gate_up: Linear  # [E, I], without a gate; [E, 2 * I] of a gated MLP
    down: Linear  # [I, E]


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """A mixture of experts: a router chooses some of many gated MLPs for each token."""

    router: Linear  # [E, X]
    experts: Experts


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's tensors: attention and MLP, each after a norm."""

    attn_norm: Norm
    qkv: Linear  # [E, (HQ + 2 * HKV) * D]: query, key and value side by side
    attn_out: Linear  # [HQ * D, E]
    mlp_norm: Norm
    mlp: Mlp | SparseMlp
    query_norm: torch.Tensor | None = None  # [D]: RMSNorm of each head, before the rotation
    key_norm: torch.Tensor | None = None  # [D]


def packs_layers(switches: Switches, device: torch.device) -> bool:
    """Whether to use ``pack_layer``: packed products fuse everything at once, and are faster on a GPU only."""
    is_fused = switches.fused_kv_append and switches.fused_mlp and switches.fused_add_layernorm
    return device.type != "cpu" and is_fused


def pack_layer(layer: DecoderLayer) -> DecoderLayer:
    """Prepare a layer for small batches, once. Every matrix is in memory once."""
    mlp: Mlp | SparseMlp
    if isinstance(layer.mlp, SparseMlp):
        mlp = replace(layer.mlp, router=pack(layer.mlp.router, layer.mlp_norm))
    else:
        gated = layer.mlp.gate_up.num_outputs != layer.mlp.down.num_inputs
        mlp = Mlp(pack(layer.mlp.gate_up, layer.mlp_norm, gated=gated), pack(layer.mlp.down))
    return replace(
        layer,
        attn_norm=with_packed(layer.attn_norm),
        qkv=pack(layer.qkv, layer.attn_norm),
        attn_out=pack(layer.attn_out),
        mlp_norm=with_packed(layer.mlp_norm),
        mlp=mlp,
    )


def pack(linear: Linear, norm: Norm | None = None, *, gated: bool = False) -> Linear:
    """Prepare one linear layer for small batches, as ``pack_layer`` does all of a layer's.

    Args:
        norm: the norm before it, which is folded in if it is LayerNorm.
        gated: whether it is the gate and up projection of a gated MLP.
    """
    weight = linear.weight.t() if isinstance(linear.weight, torch.Tensor) else linear.weight
    folded = None if norm is None or norm.bias is None else norm
    packed = pack_linear(
        weight,
        linear.bias,
        norm_weight=None if folded is None else folded.weight,
        norm_bias=None if folded is None else folded.bias,
        gated=gated,
    )
    if not isinstance(packed.weight, torch.Tensor):
        return replace(linear, packed=packed)
    bias = None if packed.bias is None else packed.bias.to(packed.weight.dtype)
    return Linear(packed.weight.t(), bias, packed, linear.adapters)


def int4_product(
    weight: Int4Weight,  # [O, E]
    bias: torch.Tensor | None,  # [O]
    max_rows: int,
) -> Callable[[torch.Tensor | QuantizedActivations], torch.Tensor]:
    """Return the product of steps other than small batches: by Rose's kernel up to ``max_rows``, else a library's."""
    layer = pack_linear(weight, bias)

    def multiply(x: torch.Tensor | QuantizedActivations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "nothing quantizes its input"
        return small_batch_linear(x, layer) if len(x) <= max_rows else quantized_linear(x, weight, bias)

    return multiply


def with_packed(norm: Norm) -> Norm:
    """Return the norm before a packed layer: RMSNorm as it is, of LayerNorm what is not folded into the layer."""
    if norm.bias is None:
        return replace(norm, packed=pack_norm(norm.weight, norm.eps))
    ones, zeros = torch.ones_like(norm.weight), torch.zeros_like(norm.bias)
    return Norm(ones, zeros, norm.eps, PackedNorm(None, norm.eps))


class ResidualStream:
    """Hidden states of a step: layers read them through a norm and add to them.

    Args:
        hidden: ``[T, E]``; written if the batch is small.
        switches: which operations are fused; results agree within rounding.
        norm_input: the sums that the first packed norm needs of ``hidden``; required for a small batch.
        is_small_batch: every layer is packed and there are at most ``MAX_ROWS`` tokens (see ``small_batch_linear``).
            A layer's norm and residual add are then parts of its products.
        all_reduce: sums over ranks what a layer adds; None: there is one rank. Excludes small batches, in which the
            product itself adds to ``hidden``.
        adapter_rows: LoRA slots of the step's tokens; None: no token has an adapter.
    """

    __slots__ = (
        *("_adapter_rows", "_all_reduce", "_delta", "_is_held", "_norm_input"),
        *("hidden", "is_small_batch", "switches"),
    )

    def __init__(
        self,
        hidden: torch.Tensor,
        switches: Switches,
        norm_input: NormInput | None = None,
        *,
        is_small_batch: bool = False,
        all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        adapter_rows: AdapterRows | None = None,
    ) -> None:
        assert all_reduce is None or not is_small_batch, "a rank's product is not all that is added"
        self._all_reduce, self._adapter_rows = all_reduce, adapter_rows
        self.hidden = hidden
        self.switches = switches
        self.is_small_batch = is_small_batch
        self._delta: torch.Tensor | None = None  # [T, E] or [2, T, E]: the next norm adds it to ``hidden``
        self._norm_input = norm_input  # of ``hidden``, for the next packed norm
        # Whether the caller keeps ``hidden``: the next add of a small batch then writes to a new tensor.
        self._is_held = False

    def normed(self, norm: Norm) -> torch.Tensor:
        """Return ``norm(hidden states)``, [T, E]."""
        delta, self._delta = self._delta, None
        weight, bias, eps = norm.weight, norm.bias, norm.eps
        if delta is None:
            if bias is None:
                return rms_norm(self.hidden, weight, eps)
            return layer_norm(self.hidden, weight, bias, eps)
        if self.switches.fused_add_layernorm:
            if bias is None:
                normed, self.hidden = add_rms_norm(delta, self.hidden, weight, eps)
            else:
                normed, self.hidden = add_layer_norm(delta, self.hidden, weight, bias, eps)
            return normed
        self.hidden = delta + self.hidden
        if bias is None:
            return F.rms_norm(self.hidden, weight.shape, weight, eps)
        return F.layer_norm(self.hidden, weight.shape, weight, bias, eps)

    def _normed_quantized(self, norm: Norm, quantization: InputQuantization) -> QuantizedActivations:
        delta, self._delta = self._delta, None
        x, residual = (self.hidden, None) if delta is None else (delta, self.hidden)
        quantized, self.hidden = rms_norm_quantized(x, residual, norm.weight, norm.eps, quantization)
        return quantized

    def _quantization(self, linear: Linear) -> InputQuantization | None:
        """Return how the kernel before a product quantizes its input; None: it does not."""
        found, fuses = linear.quantization, self.switches.fused_add_layernorm and self.switches.fused_mlp
        # Adapters read what is not quantized.
        has_adapters = self._adapter_rows is not None and linear.adapters is not None
        return None if has_adapters or not fuses else found

    def project(self, norm: Norm, linear: Linear, *, gelu: bool = False) -> torch.Tensor:
        """Return ``linear(norm(hidden states))``, [T, O], followed by GELU in its tanh form if asked.

        Of a packed, gated layer a small batch gives ``silu(gate) * up``, [T, O / 2].
        """
        assert not gelu or self._adapter_rows is None, "products with GELU have no adapters"
        if self.is_small_batch:
            assert linear.packed is not None and self._norm_input is not None, (
                "small batches need packed layers"
            )
            if self._adapter_rows is None or linear.adapters is None:
                return small_batch_linear(self._norm_input, linear.packed, gelu=gelu)
            # The activation comes after what adapters add.
            projected = small_batch_linear(self._norm_input, replace(linear.packed, is_gated=False))
            self._add_adapters(self._norm_input, linear, projected)
            if not linear.packed.is_gated:
                return projected
            return silu_mul(projected, alternating=linear.packed.alternates)
        quantization = self._quantization(linear)
        if quantization is not None and norm.bias is None:
            return self._product(self._normed_quantized(norm, quantization), linear)
        normed = self.normed(norm)
        if gelu and self.switches.fused_mlp and normed.is_cuda and linear.bias is not None:
            # The library's product carries bias and GELU itself: this saves a separate bias + GELU kernel.
            assert isinstance(linear.weight, torch.Tensor), "GPT-2's alone"
            return torch._addmm_activation(linear.bias, normed, linear.weight, use_gelu=True)
        projected = self._product(normed, linear)
        return F.gelu(projected, approximate="tanh") if gelu else projected

    def add(
        self,
        x: torch.Tensor | QuantizedActivations,  # [T, I]
        linear: Linear,
        next_norm: Norm | None = None,
    ) -> None:
        """Add ``linear(x)`` to the hidden states. A small batch needs ``next_norm``, which reads them."""
        if self.is_small_batch:
            assert linear.packed is not None and isinstance(x, torch.Tensor), (
                "small batches need packed layers"
            )
            assert next_norm is not None and next_norm.packed is not None, "and a packed norm after each"
            hidden = self.hidden
            if self._is_held:
                self.hidden, self._is_held = empty_rows(hidden, *hidden.shape), False
                if self._adapter_rows is not None:
                    hidden = self.hidden.copy_(hidden)
            # Before the product, which leaves all that there is to the norm.
            self._add_adapters(x, linear, hidden)
            _, self._norm_input = small_batch_linear_before_norm(
                x, linear.packed, next_norm.packed, residual=hidden, out=self.hidden
            )
        elif self._all_reduce is not None:
            self._delta = self._all_reduce(self._product(x, linear))
        elif (
            self.switches.fused_add_layernorm
            and self._adapter_rows is None
            and isinstance(x, torch.Tensor)
            and isinstance(linear.weight, torch.Tensor)
            and linear.many_rows is None
            and adds_halves(x, linear)
        ):
            # The halves of both inner dimensions, multiplied apart; the next norm sums them.
            halves = x.unflatten(1, (2, -1)).transpose(0, 1)
            self._delta = torch.bmm(halves, linear.weight.unflatten(0, (2, -1)))
        else:
            self._delta = self._product(x, linear)

    def add_given(self, x: torch.Tensor) -> None:
        """Add ``x``, [T, E], to the hidden states, where the batch is not small."""
        assert not self.is_small_batch, "what is left to the next norm would be of other hidden states"
        self.hidden = self.hidden + x

    def _product(self, x: torch.Tensor | QuantizedActivations, linear: Linear) -> torch.Tensor:
        product = _product(x, linear)
        if not isinstance(x, QuantizedActivations):
            self._add_adapters(x, linear, product)
        return product

    def _add_adapters(self, x: torch.Tensor | NormInput, linear: Linear, out: torch.Tensor) -> None:
        """Add to ``out`` what adapters of ``linear`` make of ``x``."""
        if self._adapter_rows is not None and linear.adapters is not None:
            alternating = linear.packed is not None and linear.packed.alternates
            add_adapters(x, linear.adapters, self._adapter_rows, out, alternating=alternating)

    def hold(self) -> torch.Tensor:
        """Return the hidden states, [T, E], for the caller to keep: what is added next is written elsewhere.

        Only right after ``project`` or ``normed``, when no residual add is pending.
        """
        assert self._delta is None, "hidden states are not complete"
        self._is_held = self.is_small_batch
        return self.hidden

    def keep(self, tokens: torch.Tensor) -> None:
        """Drop all tokens but ``tokens``, [R] int64. Only right after ``project``, when no residual add is pending."""
        self.hidden = self.hidden[tokens]
        if self._adapter_rows is not None:
            order, rising = self._adapter_rows
            self._adapter_rows = adapter_rows(torch.empty_like(rising).index_copy_(0, order, rising)[tokens])

    def gelu_mlp(self, norm: Norm, mlp: Mlp, next_norm: Norm) -> None:
        """Add ``down(gelu(up(norm(hidden states))))``, GELU in its tanh form; both layers have a bias."""
        up, down = mlp.gate_up, mlp.down
        if self.is_small_batch or self.hidden.is_cuda or not self.switches.fused_mlp:
            return self.add(self.project(norm, up, gelu=True), down, next_norm)
        assert up.bias is not None and down.bias is not None, "a GELU MLP has biases"
        assert isinstance(up.weight, torch.Tensor) and isinstance(down.weight, torch.Tensor), "GPT-2's alone"
        assert self._all_reduce is None, "the residual would be added on every rank"
        wide = bias_gelu(self.normed(norm) @ up.weight, up.bias)
        self.hidden = bias_residual(wide @ down.weight, down.bias, self.hidden)
        return None

    def silu_mlp(self, norm: Norm, mlp: Mlp, next_norm: Norm) -> None:
        """Add ``down(silu(gate) * up)``, where ``gate_up(norm(hidden states))`` is gate and up side by side."""
        gate_up, down = mlp.gate_up, mlp.down
        projected = self.project(norm, gate_up)
        if self.is_small_batch:
            return self.add(projected, down, next_norm)
        alternating = gate_up.packed is not None and gate_up.packed.alternates
        quantization = self._quantization(down)
        if quantization is not None:
            return self.add(silu_mul_quantized(projected, quantization, alternating=alternating), down)
        if self.switches.fused_mlp:
            return self.add(silu_mul(projected, alternating=alternating), down)
        gate, up = projected.unflatten(1, (-1, 2)).unbind(2) if alternating else projected.chunk(2, dim=-1)
        return self.add(F.silu(gate) * up, down)

    def sparse_mlp(self, norm: Norm, mlp: SparseMlp, next_norm: Norm) -> None:
        """Add what the experts that the router chooses make of ``norm(hidden states)``."""
        assert self._all_reduce is None, "the residual would be added on every rank"
        if self.is_small_batch:
            assert self._norm_input is not None and next_norm.packed is not None, "small batches are packed"
            _, self._norm_input = expert_mlp(
                self._norm_input,
                self.project(norm, mlp.router),
                mlp.experts,
                residual=self.hidden,
                out=self.hidden,
                next_norm=next_norm.packed,
            )
        else:
            normed = self.normed(norm)
            self._delta, _ = expert_mlp(normed, _product(normed, mlp.router), mlp.experts)


def compute_logits(
    hidden: torch.Tensor,  # [R, E]; rows may be further apart
    padded_head: torch.Tensor,  # [V', E]
    vocab_size: int,
) -> torch.Tensor:
    """Return float32 logits [R, V]. The head has rows of padding after the vocabulary's, see ``HEAD_ALIGNMENT``."""
    if hidden.is_cuda and hidden.dtype is not torch.float32:
        logits = torch.mm(hidden, padded_head.t(), out_dtype=torch.float32)
    else:
        logits = F.linear(hidden, padded_head).float()
    return logits[:, :vocab_size]


def adds_halves(x: torch.Tensor, linear: Linear) -> bool:
    """Return whether to multiply the halves of the inner dimension separately, for the next norm to add.

    A product of few rows has fewer tiles than the GPU has processors. The library then splits the inner dimension and
    adds the parts in a launch of its own, which the norm can do on the side. It pays where the tiles of two halves fit
    on the GPU together and nearly fill it. Not in float16, where a half may overflow although the sum does not.
    Rounding both halves is as exact as rounding the whole product.
    """
    if x.device.type == "cpu" or x.dtype is not torch.bfloat16 or linear.bias is not None:
        return False
    num_processors = gpu_properties(x.device).num_processors
    num_tiles = 2 * -(-x.shape[0] // _TILE) * -(-linear.num_outputs // _TILE)
    is_deep = x.shape[1] >= 2 * linear.num_outputs and x.shape[1] % 16 == 0
    return x.shape[0] > _TILE and is_deep and num_processors // 2 < num_tiles <= num_processors


def fewest_halved_rows(width: int, num_processors: int) -> int:
    """Return the fewest rows that ``adds_halves`` may take of a product with ``width`` columns."""
    tiles_per_row = 2 * -(-width // _TILE)
    return max(num_processors // 2 // tiles_per_row, 1) * _TILE + 1


def _product(x: torch.Tensor | QuantizedActivations, linear: Linear) -> torch.Tensor:
    if linear.many_rows is not None:
        return linear.many_rows(x)
    if not isinstance(linear.weight, torch.Tensor):
        if linear.quantization is not None and isinstance(x, torch.Tensor):
            x = quantize(x, linear.quantization)
        return quantized_linear(x, linear.weight, linear.bias)
    assert isinstance(x, torch.Tensor), "products of weights in 16 bits take no others"
    return x @ linear.weight if linear.bias is None else torch.addmm(linear.bias, x, linear.weight)
