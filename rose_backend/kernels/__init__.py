"""Every operation that touches activations or the KV cache.

Each module here holds launchers: they validate and then pick an implementation. ``reference/`` holds the same functions
in plain torch: the CPU path, and what every faster implementation is compared with.

Letters that shapes are written in, everywhere in this package:

======  =======================================================
``T``   tokens in the step
``R``   requests in the step
``HQ``  query heads
``HKV`` key/value heads; ``HQ`` is a multiple of it
``D``   head size
``NB``  KV blocks in the cache
``BS``  tokens per KV block
``MB``  width of the block table
``N``   pairs of a clone plan
``V``   vocabulary
``E``   width of the model
``I``   width of the MLP
``O``   outputs of a linear layer
``K``   alternatives reported per token
``M``   tokens with a bias per request
======  =======================================================
"""

from __future__ import annotations

from rose_backend.kernels.block_clone import block_clone
from rose_backend.kernels.fused_mlp import bias_gelu, bias_residual
from rose_backend.kernels.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from rose_backend.kernels.lm_head import lm_head_sample
from rose_backend.kernels.paged_decode import DecodePlan, paged_decode, plan_paged_decode
from rose_backend.kernels.paged_prefill import PrefillPlan, paged_prefill, plan_paged_prefill
from rose_backend.kernels.sampler import SampleOutput, SamplingTensors, sample, sample_unfused
from rose_backend.kernels.small_batch_linear import (
    PackedLinear,
    pack_linear,
    small_batch_linear,
    small_batch_linear_and_moments,
)
from rose_backend.kernels.write_kv import write_kv

__all__ = [
    "DecodePlan",
    "PackedLinear",
    "PrefillPlan",
    "SampleOutput",
    "SamplingTensors",
    "add_layer_norm",
    "add_rms_norm",
    "bias_gelu",
    "bias_residual",
    "block_clone",
    "layer_norm",
    "lm_head_sample",
    "pack_linear",
    "paged_decode",
    "paged_prefill",
    "plan_paged_decode",
    "plan_paged_prefill",
    "rms_norm",
    "sample",
    "sample_unfused",
    "small_batch_linear",
    "small_batch_linear_and_moments",
    "write_kv",
]
