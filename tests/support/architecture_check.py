"""Asks vLLM with ROSE, architecture by architecture, whether it would start. ``python -m`` prints the answers as JSON.

A program of its own: most vision models import torchvision, which the set-up for CPUs lacks. Nothing of it is called
before images arrive, so an empty module in its place lets them be imported; other tests shall not see that.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

WORKS, TEXT_ALONE, STOCK_MANAGER, REFUSED = (
    "works",
    "works for text alone",
    "works with `block_manager` off",
    "refused",
)
ATTEMPTS: dict[str, dict[str, Any]] = {
    WORKS: {},
    TEXT_ALONE: {"language_model_only": True},
    STOCK_MANAGER: {"additional_config": {"rose": {"block_manager": False}}},
}
ARCHITECTURES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "LlamaForCausalLM": "llama",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "GptOssForCausalLM": "gpt_oss",
    "MistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "NemotronHForCausalLM": "nemotron_h",
    "SmolLM3ForCausalLM": "smollm3",
}
"""The ones that are served most, with transformers' name of their configuration."""


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and all below it: modules that have every name that is asked of them, as an empty class."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def empty_class(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = empty_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def outcome_of(architecture: str, model_type: str) -> str:
    """Return which of ``ATTEMPTS`` is the first that vLLM starts with, or ``REFUSED`` and why."""
    from transformers import AutoConfig
    from vllm.engine.arg_utils import EngineArgs

    from tests.support.tiny_checkpoint import write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size=400, model_max_length=512)
        config = AutoConfig.for_model(model_type)
        config.architectures = [architecture]
        config.save_pretrained(folder)
        error = None
        for outcome, options in ATTEMPTS.items():
            try:
                EngineArgs(
                    model=folder, attention_backend="rose", max_model_len=256, **options
                ).create_engine_config()
            except ValueError as caught:
                error = caught
            else:
                return outcome
    return f"{REFUSED}: {error}"


def main() -> None:
    """Print the outcome of each of ``ARCHITECTURES``."""
    import transformers  # noqa: F401  # asks whether torchvision is installed before it is found
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(EmptyModules())
    logging.disable(logging.CRITICAL)
    if not current_platform.device_type:
        current_platform.device_type = "cpu"
    # vLLM looks at each kind of model in a process of its own, to leave CUDA alone; it imports all of vLLM.
    registry._run_in_subprocess = lambda look: look()
    outcomes = {name: outcome_of(name, model_type) for name, model_type in ARCHITECTURES.items()}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
