"""Attention of one step over paged K/V: which rows take which kernel, and what all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from rose_backend.kernels import (
    AttentionOptions,
    DecodePlan,
    HeadRotation,
    NewTokens,
    PagedKV,
    PrefillPlan,
    empty_rows,
    paged_decode,
    paged_prefill,
    plan_paged_decode,
    plan_paged_prefill,
    write_kv,
)

_Plan = TypeVar("_Plan")
KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Lengths and block tables of the requests of one step, decodes first. Shape letters: ``rose_backend.kernels``."""

    query_start_loc: torch.Tensor | None
    """[R + 1] int32: tokens of request ``r`` are ``query_start_loc[r] .. query_start_loc[r + 1] - 1`` of the step.
    May be None where all requests take decode attention."""
    num_computed_tokens: torch.Tensor
    """[R] int32: tokens stored before this step. Negative marks a padding row among the decodes."""
    block_table: torch.Tensor
    """[R, MB] int32."""
    slot_mapping: torch.Tensor | None
    """[T] int64: block id * BS + offset of each token, -1 for padding. Read only with ``fused_kv_append`` off."""
    num_decodes: int
    """So many requests in front have ``decode_query_len`` tokens each and take decode attention; the others take
    prefill attention."""
    mean_query_len: float | None = None
    """Tokens per request that prefill attention chooses its tiles for; None: tokens / rows, padding included."""
    last_tokens_only: bool = False
    """Return the hidden state of each request's last token only; for steps without decodes."""
    decode_query_len: int = 1
    """More than 1 needs ``query_start_loc``, and that no request takes prefill attention."""


def slots_of_rows(
    num_computed_tokens: torch.Tensor,  # [R] int32
    block_table: torch.Tensor,  # [R, MB] int32
    query_len: int,
    block_size: int,
) -> torch.Tensor:
    """Return where the next ``query_len`` tokens of each row are stored, int64 ``[R * query_len]``; -1 for padding.

    Args:
        num_computed_tokens: negative marks a padding row.
    """
    offsets = torch.arange(query_len, device=block_table.device)
    places = num_computed_tokens.clamp(min=0).long()[:, None] + offsets
    slots = block_table.gather(1, places // block_size).long() * block_size + places % block_size
    return torch.where(num_computed_tokens[:, None] < 0, -1, slots).flatten()


@dataclass(slots=True)
class AttentionRows(Generic[_Plan]):
    """Requests of a step that take the same kernel."""

    tokens: slice
    """Their tokens within the step."""
    block_table: torch.Tensor  # [R, MB] int32
    num_computed_tokens: torch.Tensor  # [R] int32
    query_start_loc: torch.Tensor | None = None  # [R + 1] int32, counted from the first of ``tokens``
    max_query_len: int = 1
    """Of decodes; more than 1 needs ``query_start_loc``."""
    mean_query_lens: Sequence[float | None] = (None,)
    """Of prefills: tokens per row that attention chooses its tiles for, one call each; None: those of the step."""
    plans: dict[tuple[int | None, bool], _Plan | None] = field(default_factory=dict)
    """By ``_shared_by``: made by the first layer that needs one, shared by the others."""

    def kv(self, key_cache: torch.Tensor, value_cache: torch.Tensor) -> PagedKV:
        """Return what these requests attend to in a layer's caches."""
        return PagedKV(
            key_cache,
            value_cache,
            self.block_table,
            self.num_computed_tokens,
            self.query_start_loc,
            self.max_query_len,
        )


@dataclass(slots=True)
class AttentionStep:
    """One step, as all its attention layers see it."""

    decode: AttentionRows[DecodePlan] | None
    prefill: AttentionRows[PrefillPlan] | None
    slot_mapping: torch.Tensor | None
    """[T] int64: where a separate write stores new keys and values before attention runs; None: attention does."""


class StepAttention(Protocol):
    """Attention of all layers in one step: what a caller of ``run_layers`` brings."""

    appends: bool
    """Decode attention stores new keys and values itself, and can begin before they are complete."""

    @property
    def decodes_only(self) -> bool:
        """Whether all requests take decode attention."""

    @property
    def rotates(self) -> bool:
        """Whether attention can rotate queries and keys: it ``appends``, and each token is its request's only one."""

    @property
    def last_tokens(self) -> torch.Tensor | None:
        """[R] int64: the tokens whose final hidden states are wanted; None: all."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # [T, HQ, D]
        key: torch.Tensor,  # [T, HKV, D]
        value: torch.Tensor,  # [T, HKV, D]
        *,
        overlap: bool = False,
        rotation: HeadRotation | None = None,
    ) -> torch.Tensor:
        """Store keys and values of a layer, attend, and return [T, HQ * D], valid until the next layer's call.

        Args:
            overlap, rotation: see ``attend``; only where ``decodes_only`` and ``appends``, and where it ``rotates``.
        """


class PagedAttention:
    """Attention of a model's layers in one step, over a KV cache ``[L, 2, NB, BS, HKV, D]``; a ``StepAttention``."""

    __slots__ = (
        *("_caches", "_options", "_out", "_step"),
        *("appends", "decodes_only", "last_tokens", "rotates"),
    )

    def __init__(
        self,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        options: AttentionOptions,
        *,
        num_tokens: int,
        num_heads: int,
        fused_kv_append: bool,
    ) -> None:
        split, tables, computed = metadata.num_decodes, metadata.block_table, metadata.num_computed_tokens
        slots = None if fused_kv_append else metadata.slot_mapping
        assert fused_kv_append or (slots is not None and slots.shape[0] == num_tokens), (
            "slot_mapping is needed"
        )
        self._options = options
        self._step = step = AttentionStep(None, None, slots)
        self.appends = fused_kv_append
        query_len = metadata.decode_query_len
        self.decodes_only = num_tokens == split * query_len
        self.rotates = self.appends and self.decodes_only and query_len == 1
        self.last_tokens: torch.Tensor | None = None
        if split:
            step.decode = AttentionRows(
                slice(0, split * query_len),
                tables[:split],
                computed[:split],
                None if query_len == 1 else metadata.query_start_loc,
                max_query_len=query_len,
            )
            plan_decode(step.decode, step.decode.kv(*kv_cache[0].unbind(0)), options)
        if computed.shape[0] > split:
            assert metadata.query_start_loc is not None, "prefill attention needs query_start_loc"
            start_loc = metadata.query_start_loc[split:] - split
            step.prefill = AttentionRows(
                slice(split, num_tokens),
                tables[split:],
                computed[split:],
                start_loc,
                mean_query_lens=(metadata.mean_query_len,),
            )
            if metadata.last_tokens_only:
                # -1 for padding before all requests: it picks some token, and the result is not read.
                self.last_tokens = start_loc[1:].long() - 1
        self._caches = kv_cache.unbind(0)
        self._out = empty_rows(kv_cache, num_tokens, num_heads, kv_cache.shape[-1])

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # [T, HQ, D]
        key: torch.Tensor,  # [T, HKV, D]
        value: torch.Tensor,  # [T, HKV, D]
        *,
        overlap: bool = False,
        rotation: HeadRotation | None = None,
    ) -> torch.Tensor:
        """Attend; see ``StepAttention``."""
        key_cache, value_cache = self._caches[layer].unbind(0)
        attend(
            query,
            NewTokens(key, value),
            (key_cache, value_cache),
            self._step,
            self._options,
            self._out,
            overlap=overlap,
            rotation=rotation,
        )
        return self._out.flatten(1)


def _shared_by(options: AttentionOptions, device: torch.device) -> tuple[int | None, bool]:
    """Return what layers have in common that share a plan: ALiBi slopes differ between models, not between layers.

    A graph that is being captured has to contain what makes its plans.
    """
    return options.sliding_window, device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def plan_decode(
    rows: AttentionRows[DecodePlan],
    kv: PagedKV,
    options: AttentionOptions,
    *,
    overlap: bool = False,
) -> DecodePlan | None:
    """Return what all layers with these options share in a step.

    Args:
        kv: of ``rows``; of the caches only shape, dtype and device are used.
        overlap: for attention that overlaps the kernel before it. The plan must exist by then: call this before
            the layers, with a kernel in between that overlaps nothing.
    """
    key = _shared_by(options, kv.key_cache.device)
    if key not in rows.plans:
        assert not overlap, "plan_decode comes before layers that overlap"
        rows.plans[key] = plan_paged_decode(kv, options=options)
    return rows.plans[key]


def attend(
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv_cache: KeysValues,  # [NB, BS, HKV, D] each  written
    step: AttentionStep,
    options: AttentionOptions,
    out: torch.Tensor,  # [T, HQ, D]  written
    *,
    overlap: bool = False,
    rotation: HeadRotation | None = None,
) -> None:
    """Run one layer: store the step's keys and values and attend over each request's whole history.

    Where the kernels store (``step.slot_mapping`` is None), no request may read blocks that another one writes in the
    same step. Tokens of no request are padding: ``out`` stays as it is there.

    Args:
        new: None where keys and values are stored already, as with layers that share a cache.
        overlap: decode attention may start before ``query`` and ``new`` are complete; see ``paged_decode``.
        rotation: of ``query`` and new keys, only where all requests take decode attention with one token each, and the
            kernels store.
    """
    assert rotation is None or step.prefill is None, "prefill attention does not rotate"
    if new is not None and (slots := step.slot_mapping) is not None:
        write_kv(
            new.key[: slots.shape[0]],
            new.value[: slots.shape[0]],
            *kv_cache,
            slots,
            key_scale=options.key_scale,
            value_scale=options.value_scale,
        )
        new = None
    if (decode := step.decode) is not None:
        tokens, kv = decode.tokens, decode.kv(*kv_cache)
        paged_decode(
            query[tokens],
            _tokens_of(new, tokens),
            kv,
            options=options,
            out=out[tokens],
            plan=plan_decode(decode, kv, options, overlap=overlap),
            overlap=overlap,
            rotation=rotation,
        )
    if (prefill := step.prefill) is not None:
        tokens, kv = prefill.tokens, prefill.kv(*kv_cache)
        shared_by = _shared_by(options, query.device)
        if shared_by not in prefill.plans:
            num_step_tokens = tokens.stop - tokens.start
            prefill.plans[shared_by] = plan_paged_prefill(
                kv, options=options, num_step_tokens=num_step_tokens
            )
        new_tokens = _tokens_of(new, tokens)
        for mean_query_len in prefill.mean_query_lens:
            paged_prefill(
                query[tokens],
                new_tokens,
                kv,
                options=options,
                out=out[tokens],
                plan=prefill.plans[shared_by],
                mean_query_len=mean_query_len,
            )


def _tokens_of(new: NewTokens | None, tokens: slice) -> NewTokens | None:
    return None if new is None else NewTokens(new.key[tokens], new.value[tokens])
