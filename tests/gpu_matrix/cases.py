"""The rows of the matrix: an architecture of docs/models.md each, then a feature each on a small Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.gpu_matrix import checkpoints, drafters, pictures
from tests.gpu_matrix.traffic import CHUNK, MAX_LEN, MAX_RUNNING

EXPERTS = ("vllm._moe_C_stable_libtorch",)
"""vLLM's operators for experts, a file of its wheel for GPUs."""
VISION = ("torchvision",)
ENGINE_OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_LEN,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": MAX_RUNNING,
    "kv_cache_memory_bytes": 512 << 20,
    "disable_log_stats": False,
    "seed": 0,
    # Hits are counted to the token. Without Rose nobody reads it.
    "additional_config": {"rose": {"exact_cached_tokens": True}},
}
NUM_BLOCKS = 64
"""Of 16 tokens: twice what the longest request takes, and a third of what all that run at once ask for."""


@dataclass(frozen=True)
class Case:
    """One row: a checkpoint, how engines are started for it, and what is done beyond the common traffic."""

    name: str
    write: Callable[[Path], Path]
    dtype: str = "float16"
    options: dict[str, Any] = field(default_factory=dict)
    """Of both sides' engines, beside ``ENGINE_OPTIONS``; "{path}" in a string stands for the checkpoint's folder."""
    feature: str = ""
    """A feature's row: what ``side`` and ``verdict`` do for it."""
    num_blocks: int = NUM_BLOCKS
    """Of Rose's side, few enough that requests are preempted."""
    reset_step: int | None = None
    """Step of the mixed traffic at which Rose's cache is reset, and all that run have to begin again."""
    placeholder: tuple[int, ...] = ()
    """What stands for a picture in a prompt. Without, there are no pictures."""
    needs: tuple[str, ...] = ()
    """Modules that not every installation has."""
    stock_backend: str | None = None
    """Attention backend of the side without Rose, on a GPU; None: vLLM's choice."""

    @property
    def lacking(self) -> list[str]:
        """Modules that this installation has not."""
        # vLLM for CPUs has the operators for experts elsewhere.
        needs = [name for name in self.needs if name not in EXPERTS or torch.cuda.is_available()]
        return [name for name in needs if find_spec(name) is None]


def _text(architecture: str, dtype: str = "float16", **fields: Any) -> Case:
    write = partial(checkpoints.write_text_model, architecture, dtype=getattr(torch, dtype))
    return Case(architecture, write, dtype, **fields)


def _llama(
    feature: str, dtype: str = "float16", write: Callable[[Path], Path] | None = None, **options: Any
) -> Case:
    write = write or partial(checkpoints.write_text_model, "LlamaForCausalLM", dtype=getattr(torch, dtype))
    return Case(feature, write, dtype, options, feature=feature)


def _qwen(architecture: str, write: Callable[[Path], Path], **fields: Any) -> Case:
    fields = {"needs": VISION} | fields
    return Case(architecture, write, placeholder=pictures.QWEN_PLACEHOLDER, **fields)


# Blocks are as wide as states are large: few enough of them would make requests wait, not be preempted.
_STATES: dict[str, Any] = {"num_blocks": 200, "reset_step": 12}
# vLLM's choice on Hopper needs CUTLASS's Python package.
_DELTA_NET: dict[str, Any] = _STATES | {"options": {"gdn_prefill_backend": "triton"}}


ARCHITECTURES = (
    _text("Qwen3ForCausalLM"),
    _text("Qwen3MoeForCausalLM", needs=EXPERTS),
    _text("Qwen2ForCausalLM"),
    _qwen(
        "Qwen3_5ForConditionalGeneration",
        partial(pictures.write_qwen3_5, has_experts=False),
        **_DELTA_NET,
    ),
    _qwen(
        "Qwen3_5MoeForConditionalGeneration",
        partial(pictures.write_qwen3_5, has_experts=True),
        **_DELTA_NET,
        needs=EXPERTS + VISION,
    ),
    _qwen("Qwen3VLForConditionalGeneration", pictures.write_qwen3_vl),
    _qwen("Qwen2_5_VLForConditionalGeneration", pictures.write_qwen2_5_vl),
    _text("LlamaForCausalLM"),
    Case(
        "Gemma3ForConditionalGeneration",
        pictures.write_gemma3,
        "bfloat16",
        {"language_model_only": True},
        num_blocks=160,
    ),
    # vLLM refuses Gemma 3 in float16; FlashAttention's sinks are bfloat16.
    _text("Gemma3ForCausalLM", "bfloat16", num_blocks=160),
    # FlashAttention 4, vLLM's choice on Hopper, needs CUTLASS's Python package.
    _text("Gemma4ForCausalLM", "bfloat16", stock_backend="TRITON_ATTN"),
    _text("GptOssForCausalLM", "bfloat16", num_blocks=110, needs=EXPERTS),
    _text("MistralForCausalLM"),
    Case(
        "Mistral3ForConditionalGeneration",
        pictures.write_mistral3,
        placeholder=pictures.MISTRAL_PLACEHOLDER,
        needs=VISION,
    ),
    _text("Phi3ForCausalLM"),
    _text("GraniteForCausalLM"),
    # In float16, vLLM 0.32 scales the shared expert of these two down instead of the others up, and nothing else.
    _text("Glm4MoeForCausalLM", "bfloat16", needs=EXPERTS),
    _text("NemotronHForCausalLM", "bfloat16", **_STATES, needs=EXPERTS),
    _text("SmolLM3ForCausalLM"),
)

FEATURES = (
    _llama("LoRA", write=checkpoints.write_with_adapter, enable_lora=True, max_loras=2, max_lora_rank=8),
    _llama("prompt embeddings", enable_prompt_embeds=True),
    _llama(
        "n-gram drafts",
        write=drafters.write_repetitive_llama,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    ),
    _llama(
        "draft model",
        write=drafters.write_with_draft_model,
        speculative_config={"method": "draft_model", "model": "{path}/draft", "num_speculative_tokens": 3},
    ),
    _llama(
        "EAGLE head",
        write=drafters.write_with_eagle_head,
        speculative_config={"method": "eagle", "model": "{path}/draft", "num_speculative_tokens": 2},
    ),
    _llama(
        "MTP head",
        write=drafters.write_with_mtp_head,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ),
    # FlashAttention's float8 gives no other output than bfloat16. It rounds so coarsely that layers have to be small.
    _llama(
        "float8 K/V",
        "bfloat16",
        write=partial(drafters.write_llama, dtype=torch.bfloat16),
        kv_cache_dtype="fp8",
    ),
    _llama("sleep and wake", enable_sleep_mode=True),
    _llama("offloading", kv_offloading_size=1.0),
    _llama("pooling", runner="pooling"),
)
CASES = {case.name: case for case in (*ARCHITECTURES, *FEATURES)}
