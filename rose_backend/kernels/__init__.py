"""Every operation that touches activations or the KV cache.

An operation is one folder. Its ``ops.py`` holds the launchers: they validate and then pick an implementation, in Triton
or in plain torch, which is the CPU path and what every faster implementation is compared with.

Letters that shapes are written in, everywhere in this package:

======  =======================================================
``L``   layers
``T``   tokens in the step
``R``   requests in the step
``MR``  requests that a buffer has room for
``C``   requests of a chunk, or candidate tokens of a request
``Q``   queries of a request
``S``   key positions that the queries of a call attend to
``H``   heads, of queries or of keys
``HQ``  query heads
``HKV`` key/value heads; ``HQ`` is a multiple of it
``D``   head size
``DR``  rotated part of a head, even
``NB``  KV blocks in the cache
``BS``  tokens per KV block
``MB``  width of the block table
``G``   KV cache groups of a model
``W``   block-table columns that a request uses
``N``   entries of a list: pairs of a clone plan, stored tokens, steps of a history, drafts
``V``   vocabulary; ``V'`` with padding rows after it
``E``   width of the model
``I``   width of the MLP, or of an expert's
``X``   experts of a layer; ``A`` of them for each token
``O``   outputs of a linear layer
``K``   alternatives reported per token
``M``   tokens with a bias per request
``P``   parts of a sum; rows of the position embedding or of the rotary table; tokens that are kept of a request
``U``   LoRA slots; ``Z`` is the largest rank of an adapter
======  =======================================================
"""

from __future__ import annotations

from rose_backend.kernels.arguments import (
    AdapterRows,
    Adapters,
    AttentionOptions,
    Experts,
    Float8Experts,
    Float8Weight,
    HeadRotation,
    InputQuantization,
    Int4Weight,
    NewTokens,
    NormInput,
    PackedLinear,
    PackedNorm,
    PagedKV,
    QuantizedActivations,
    SampleOutput,
    SamplingTensors,
    empty_rows,
    norm_input_of,
)
from rose_backend.kernels.attention.ops import (
    DecodePlan,
    PrefillPlan,
    paged_decode,
    paged_prefill,
    plan_paged_decode,
    plan_paged_prefill,
)
from rose_backend.kernels.experts.ops import expert_mlp
from rose_backend.kernels.kv.ops import block_clone, write_kv
from rose_backend.kernels.linear.ops import (
    adapter_rows,
    add_adapters,
    library_quantization,
    pack_linear,
    pack_norm,
    quantized_linear,
    small_batch_linear,
    small_batch_linear_before_norm,
)
from rose_backend.kernels.pointwise.ops import (
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    bias_residual,
    embed_tokens,
    layer_norm,
    quantize,
    rms_norm,
    rms_norm_quantized,
    rotate_query_key,
    silu_mul,
    silu_mul_quantized,
)
from rose_backend.kernels.sampling.ops import sample, sample_unfused
