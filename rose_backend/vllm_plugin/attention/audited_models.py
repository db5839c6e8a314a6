"""Model classes whose steps with prompts may be replayed from a full CUDA graph.

A replayed graph repeats what the device did at capture, and calls no Python. A class whose Python ``forward`` changes
something that a later step reads, such as a buffer of image features that it clears after use, would then give
one request's features to another one. vLLM's own graphs of such steps leave that Python in place, and so every class
that nobody has read keeps them. Adding a class means reading its ``forward``, and what that calls, in every vLLM that
the plugin accepts; ``tests/vllm_plugin/test_mixed_graphs.py`` holds each to a scan of vLLM's sources.

vLLM also replays its graphs of decodes for steps in which every row has one token and some row's is the last one of a
prompt. Where that token belongs to an image, features of it are written before the step for the model's ``forward``
to use and clear; the replay uses them and clears nothing, so that the next step adds them to another request's tokens.
Prefix hits that end at any token make such steps common, so they are launched for the classes that are not audited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import ModelConfig

from rose_backend.vllm_plugin.options import is_rose_selected

_VLLM = "vllm.model_executor.models."
_ROSE = "rose_backend.vllm_plugin.models."

_LAYERS = "Token ids or embeddings go through the layers, and every value lives in one step."
_EXPERTS = f"{_LAYERS} The device chooses each token's experts."
_HEAD = "Token ids and the model's hidden states, which vLLM copies to a buffer first, go through the layers."
_WRAPPER = (
    "Embeddings of images are written into the runner's buffer before forward, which passes that buffer on to the "
    "language model's layers and keeps nothing."
)
_ROSE_LAYERS = "The loop of rose_backend/layers: a step's residual stream and attention are made in forward."

AUDITED_CLASSES: dict[str, str] = {
    **{
        f"{_ROSE}decoder:Rose{family}ForCausalLM": _ROSE_LAYERS
        for family in ("Llama", "MiMo", "Mistral", "Qwen2", "Qwen3")
    },
    f"{_ROSE}gpt2:RoseGPT2LMHeadModel": _LAYERS,
    f"{_ROSE}eagle3:RoseEagle3LlamaForCausalLM": _HEAD,
    f"{_VLLM}gpt2:GPT2LMHeadModel": _LAYERS,
    f"{_VLLM}llama:LlamaForCausalLM": _LAYERS,
    f"{_VLLM}mimo:MiMoForCausalLM": _LAYERS,
    f"{_VLLM}mistral:MistralForCausalLM": _LAYERS,
    f"{_VLLM}mixtral:MixtralForCausalLM": _EXPERTS,
    f"{_VLLM}qwen2:Qwen2ForCausalLM": _LAYERS,
    f"{_VLLM}qwen2_moe:Qwen2MoeForCausalLM": _EXPERTS,
    f"{_VLLM}qwen3:Qwen3ForCausalLM": _LAYERS,
    f"{_VLLM}qwen3_moe:Qwen3MoeForCausalLM": _EXPERTS,
    f"{_VLLM}gemma:GemmaForCausalLM": _LAYERS,
    f"{_VLLM}gemma2:Gemma2ForCausalLM": _LAYERS,
    f"{_VLLM}gemma3:Gemma3ForCausalLM": _LAYERS,
    f"{_VLLM}gemma4:Gemma4ForCausalLM": (
        f"{_EXPERTS} Fast prefill keeps rows in buffers; it is refused at start-up (kv_sharing_fast_prefill)."
    ),
    f"{_VLLM}gpt_oss:GptOssForCausalLM": _EXPERTS,
    f"{_VLLM}phi3:Phi3ForCausalLM": f"{_LAYERS} max_model_len alone chooses between long and short rotary tables.",
    f"{_VLLM}granite:GraniteForCausalLM": _LAYERS,
    f"{_VLLM}glm4:Glm4ForCausalLM": _LAYERS,
    f"{_VLLM}glm4_moe:Glm4MoeForCausalLM": _EXPERTS,
    f"{_VLLM}commandr:CohereForCausalLM": _LAYERS,
    f"{_VLLM}olmoe:OlmoeForCausalLM": _EXPERTS,
    f"{_VLLM}llama_eagle:EagleLlamaForCausalLM": _HEAD,
    f"{_VLLM}llama_eagle3:Eagle3LlamaForCausalLM": _HEAD,
    f"{_VLLM}mimo_mtp:MiMoMTP": _HEAD,
    f"{_VLLM}gemma3_mm:Gemma3ForConditionalGeneration": _WRAPPER,
    f"{_VLLM}idefics3:Idefics3ForConditionalGeneration": _WRAPPER,
    f"{_VLLM}mistral3:Mistral3ForConditionalGeneration": _WRAPPER,
    f"{_VLLM}paddleocr_vl:PaddleOCRVLForConditionalGeneration": _WRAPPER,
    f"{_VLLM}qwen2_vl:Qwen2VLForConditionalGeneration": _WRAPPER,
    f"{_VLLM}qwen2_5_vl:Qwen2_5_VLForConditionalGeneration": (
        f"{_WRAPPER} The vision encoder remembers rotary tables; it runs outside of these graphs."
    ),
}
"""``module:class``, exactly, as a subclass may keep what its base does not, with the reason."""

_FEATURES = (
    "A step with images writes their features before forward and clears them afterwards. In a step without images "
    "forward adds zeros, or with Rose's layers nothing, and embed_input_ids only reads the table."
)
_STATES = (
    "Layers with a state find and leave it where metadata says. Without images, embed_input_ids only reads the "
    "table, and forward keeps nothing."
)
AUDITED_FOR_DECODES: dict[str, str] = {
    f"{_VLLM}qwen3_vl:Qwen3VLForConditionalGeneration": _FEATURES,
    f"{_VLLM}qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration": f"{_FEATURES} {_EXPERTS}",
    **{
        f"{_VLLM}qwen3_5:Qwen3_5{kind}": _STATES
        for kind in (
            "ForCausalLM",
            "MoeForCausalLM",
            "ForConditionalGeneration",
            "MoeForConditionalGeneration",
        )
    },
}
"""Further classes, of whose steps only those that just decode may be replayed without any Python."""


_FROM_CONFIG = ""
_LANGUAGE_MODELS = {
    f"{_VLLM}gemma3_mm:Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    f"{_VLLM}mistral3:Mistral3ForConditionalGeneration": _FROM_CONFIG,
    f"{_VLLM}qwen2_vl:Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    f"{_VLLM}qwen2_5_vl:Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
}
"""Audited classes that look up their language model in vLLM's registry, and its architecture there."""


def find_unaudited(model_config: ModelConfig, *, only_decodes: bool = False) -> str | None:
    """Return the architecture, of the model or of the language model inside, that has no audited class; None if none.

    What counts is the class that vLLM's registry has for it: a user may have registered another one.

    Args:
        only_decodes: whether steps with prompts are left out.
    """
    outer = model_config.architecture
    path = class_of(outer)
    if only_decodes and path in AUDITED_FOR_DECODES:
        return None
    if path not in AUDITED_CLASSES:
        return outer
    inner = _LANGUAGE_MODELS.get(path)
    if inner == _FROM_CONFIG:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        # As vLLM builds it of a language model's part of a config.json.
        text_config = model_config.hf_text_config
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text_config.model_type, text_config.model_type)
        inner = str(text_config.architectures[0] if text_config.architectures else known)
    return inner if inner is not None and class_of(inner) not in AUDITED_CLASSES else None


def class_of(architecture: str) -> str:
    """Return ``module:class`` of what vLLM's registry has for an architecture; "" if it has nothing."""
    from vllm.model_executor.models.registry import ModelRegistry

    entry = ModelRegistry.models.get(architecture)
    if entry is None:
        return ""
    model_class = getattr(entry, "model_cls", None)
    if model_class is not None:
        return f"{model_class.__module__}:{model_class.__qualname__}"
    return f"{entry.module_name}:{entry.class_name}"


def _keeps_features(runner: Any) -> bool:
    """Whether a model runner's model may keep features of images, audio or video between the parts of a step."""
    return (
        runner.supports_mm_inputs
        and is_rose_selected(runner.vllm_config)
        and find_unaudited(runner.model_config) is not None
    )


def wrap_gather_batch_req_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``GPUModelRunner.gather_batch_req_state`` (V2); see the patch ledger."""

    def gather_batch_req_state(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        state, uniform_token_count = original(self, *args, **kwargs)
        if (
            uniform_token_count is not None
            and state is not None
            and state.has_prefill
            and _keeps_features(self)
        ):
            return state, None
        return state, uniform_token_count

    return gather_batch_req_state


def wrap_determine_batch_execution(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``GPUModelRunner._determine_batch_execution_and_padding`` (V1); see the patch ledger."""

    def _determine_batch_execution_and_padding(
        self: Any, *, num_reqs: int, force_uniform_decode: bool | None = None, **kwargs: Any
    ) -> Any:
        if force_uniform_decode is None and _keeps_features(self):
            batch = self.input_batch
            is_prompt = batch.num_computed_tokens_cpu[:num_reqs] < batch.num_prompt_tokens[:num_reqs]
            force_uniform_decode = False if is_prompt.any() else None
        return original(self, num_reqs=num_reqs, force_uniform_decode=force_uniform_decode, **kwargs)

    return _determine_batch_execution_and_padding
