"""Which models run with Rose's layers, and the names they have in vLLM's model registry.

The names are new ones: vLLM's own classes stay in the registry untouched, also for engines of the same process that do
not use ROSE. The different architecture name also keeps compiled graphs apart in vLLM's compile cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.plugin_logger import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from rose_backend.config import PluginConfig

MODEL_CLASSES = {"RoseGPT2LMHeadModel": "rose_backend.vllm_plugin.models.gpt2:RoseGPT2LMHeadModel"}
_ROSE_ARCHITECTURES = {"GPT2LMHeadModel": "RoseGPT2LMHeadModel"}
_TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def choose_model_class(vllm_config: VllmConfig, options: PluginConfig) -> str | None:
    """Point the configuration at Rose's class for its model, if there is one and it is switched on.

    Returns:
        The architecture name chosen, or None when vLLM's own class stays.

    Raises:
        ConfigError: weights are offloaded in a way that Rose's class cannot wait for.
    """
    model_config = vllm_config.model_config
    from vllm.model_executor.models.registry import ModelRegistry

    if model_config is None or not (options.fused_mlp or options.fused_add_layernorm):
        return None
    architectures = getattr(model_config.hf_config, "architectures", None) or []
    if len(architectures) == 1 and architectures[0] in MODEL_CLASSES:
        return str(architectures[0])
    # ``architecture`` is what vLLM resolved: with --model-impl transformers it is another name, which stays.
    chosen = _ROSE_ARCHITECTURES.get(model_config.architecture)
    if (
        chosen not in ModelRegistry.models
        # The user has registered another class.
        or model_config.architecture in model_config.model_class_overrides
        or model_config.runner_type != "generate"
        or model_config.convert_type != "none"
    ):
        return None
    activation = getattr(model_config.hf_config, "activation_function", None)
    if activation not in _TANH_GELUS:
        logger.info(
            "Activation %s is not GELU in its tanh form: the model keeps vLLM's own layers", activation
        )
        return None
    if _hooks_blocks(vllm_config):
        raise ConfigError(
            "weight offloading (--offload-group-size, --cpu-offload-gb without UVA): Rose's GPT-2 layers run parts of "
            "blocks, and offloaded weights arrive with whole ones; "
            '--additional-config \'{"rose": {"fused_mlp": false, "fused_add_layernorm": false}}\' keeps vLLM\'s layers'
        )
    model_config.hf_config.architectures = [chosen]
    return chosen


def _hooks_blocks(vllm_config: VllmConfig) -> bool:
    """Whether vLLM fetches a layer's weights when the whole layer is called, which Rose's model never does.

    Weights that the GPU reads in host memory (UVA) need no call.
    """
    offload = vllm_config.offload_config
    backend = offload.offload_backend
    if backend == "prefetch" or (backend == "auto" and offload.prefetch.offload_group_size > 0):
        return True
    if offload.uva.cpu_offload_gb == 0:
        return False
    import vllm.envs as envs
    from vllm.utils.platform_utils import is_uva_available

    return envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA or not is_uva_available()
