"""Every vLLM attribute that this plugin replaces, as data, and the only code that replaces them.

``apply_patch`` replaces a target for the life of the process, ``swapped`` inside a ``with`` block and for one thread.
Each replacement behaves like the original for engines that do not use ROSE. ``docs/how_it_works/plugin.md`` lists what
puts each entry in place.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_MARK = "__rose_patch__"


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute of vLLM."""

    target: str
    """``module:attribute`` or ``module:Class.attribute``."""
    reason: str
    """What the replacement is for, and why no public way does it."""
    remove_when: str
    """What vLLM would have to offer."""
    build: str = ""
    """``module:function``: called with the original, returns the replacement, which gets the original's name and
    signature. For a classmethod both are plain functions. Empty for a temporary replacement."""
    only_while: str = "always"
    """For a temporary replacement, when it is in place; "always" for one that stays once it is applied."""


_PLUGIN = "rose_backend.vllm_plugin"
_MODEL_RUNNERS = {1: "vllm.v1.worker.gpu_model_runner", 2: "vllm.v1.worker.gpu.model_runner"}

LEDGER: dict[str, Patch] = {
    "finish_config": Patch(
        target="vllm.config.vllm:VllmConfig.__post_init__",
        reason="with ROSE selected: read the rose options, refuse unsupported features before anything is loaded, "
        "choose Rose's scheduler and model classes. Plugins get no call with the configuration.",
        remove_when="vLLM offers general plugins a hook on the finished configuration",
        build=f"{_PLUGIN}.config_hook:wrap_post_init",
    ),
    "cpu_backend_choice": Patch(
        target="vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
        reason="the CPU platform returns CPU_ATTN whatever backend was selected",
        remove_when="CpuPlatform honours a selected out-of-tree backend as CudaPlatform does",
        build=f"{_PLUGIN}.config_hook:wrap_get_attn_backend_cls",
    ),
    "block_manager_class": Patch(
        target="vllm.v1.core.sched.scheduler:KVCacheManager",
        reason="Scheduler.__init__ builds its manager from this name; there is no factory or setting for it",
        remove_when="the scheduler takes its KV cache manager, or its class, as an argument",
        only_while="RoseScheduler.__init__ runs, in its thread",
    ),
    "windowed_layer_spec": Patch(
        target="vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec",
        reason="where Rose's block manager keeps all K/V of sliding-window layers, in one KV cache group: "
        "AttentionBackend.customize_spec does not get the configuration, and disable_hybrid_kv_cache_manager does "
        "nothing where all layers have a window",
        remove_when="customize_spec gets the configuration, or vLLM can keep all K/V of every model's windows",
        build=f"{_PLUGIN}.kv_cache.spec:wrap_get_kv_cache_spec",
    ),
    "request_block_hashes": Patch(
        target="vllm.v1.engine.core:EngineCore.preprocess_add_request",
        reason="vLLM hashes the blocks of every request, and without KV events nothing reads these hashes. For models "
        "with states, streaming input is also refused here, request by request: the end of a turn takes its last "
        "token back, which a state cannot.",
        remove_when="a KV cache manager can say that it does not read Request.block_hashes",
        build=f"{_PLUGIN}.kv_cache.prompt_hashes:wrap_preprocess_add_request",
    ),
    "kv_canary": Patch(
        target="vllm.v1.worker.gpu_worker:Worker.execute_model",
        reason="with kv_canary, workers check their KV cache before a step, whichever code runs the step",
        remove_when="vLLM has a hook in workers that runs before each step",
        build=f"{_PLUGIN}.kv_cache.canary:wrap_execute_model",
    ),
    "gpt2_inner_model": Patch(
        target="vllm.model_executor.models.gpt2:GPT2Model",
        reason="GPT2LMHeadModel.__init__ builds its decoder from this name; building a second one would register every "
        "attention layer twice",
        remove_when="GPT2LMHeadModel takes its decoder class as an attribute",
        only_while="RoseGPT2LMHeadModel.__init__ runs, in its thread",
    ),
    "sampler_v1": Patch(
        target="vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.__init__",
        reason="model runner V1 builds its sampler directly; with ROSE selected, Rose's sampler takes its place, or "
        "draws by vLLM's are counted for the log",
        remove_when="the sampler can be chosen by configuration or registered",
        build=f"{_PLUGIN}.sampler:wrap_sampler_v1_init",
    ),
    "sampler_v2": Patch(
        target="vllm.v1.worker.gpu.sample.sampler:Sampler.__init__",
        reason="as sampler_v1, in model runner V2; steps that only filter and sample are replayed from CUDA graphs, "
        "drafts are counted, and sampling parameters are copied to the device only when there are new ones",
        remove_when="custom_sampler is offered for every model, not only through the model class",
        build=f"{_PLUGIN}.sampler:wrap_sampler_v2_init",
    ),
    "mamba2_state_spec": Patch(
        target="vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.get_kv_cache_spec",
        reason="Mamba 2 layers save a state in the middle of a prompt to a block that vLLM's manager allocates for it; "
        "Rose's manager copies checkpoints instead, and all its columns are the block of the running state",
        remove_when="a KV cache manager can say that it allocates no blocks for states in the middle of a prompt",
        build=f"{_PLUGIN}.kv_cache.spec:wrap_get_state_spec",
    ),
    **{
        f"block_copies_v{version}": Patch(
            target=f"{model_runner}:copy_kv_cache_blocks_inplace",
            reason="of layers in different groups that share an address, vLLM copies only the first one's bytes: if "
            "that is a small state, the rest of a K/V block is not copied. The replacement passes the widest layer "
            "first. Both model runners import the function by name.",
            remove_when="copy_kv_cache_blocks_inplace copies whole blocks, whichever layer is first",
            build=f"{_PLUGIN}.kv_cache.spec:wrap_copy_kv_cache_blocks",
        )
        for version, model_runner in _MODEL_RUNNERS.items()
    },
    "decode_graphs": Patch(
        target="vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        reason="cudagraph_mode FULL captures one graph per size for any step, with prefill attention for steps that "
        "only decode, too; steps of long rows are launched, so that FlashAttention 3 can attend them",
        remove_when="CUDAGraphMode has full graphs of mixed steps beside full graphs of decodes",
        build=f"{_PLUGIN}.attention.mixed_graphs:wrap_init_candidates",
    ),
    **{
        f"prompt_tails_v{version}": Patch(
            target=f"{_MODEL_RUNNERS[version]}:GPUModelRunner.{method}",
            reason="vLLM replays a step in which a prompt has one token left as if it only decoded. A model that is "
            "not audited may store image features on itself before its forward pass, and would then use them in the "
            "next step",
            remove_when="vLLM replays no graph of decodes for a prompt's token, or its models store no features "
            "on themselves",
            build=f"{_PLUGIN}.attention.audited_models:{build}",
        )
        for version, method, build in (
            (1, "_determine_batch_execution_and_padding", "wrap_determine_batch_execution"),
            (2, "gather_batch_req_state", "wrap_gather_batch_req_state"),
        )
    },
    "step_graph_capture": Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model",
        reason="prologues and ends of steps are captured right after vLLM's graphs, in the same memory pool; its size "
        "is estimated from graphs of more sizes than vLLM's two",
        remove_when="vLLM captures whole steps",
        build=f"{_PLUGIN}.step_graph.runner_hooks:wrap_capture_model",
    ),
    "step_graph_execution": Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        reason="steps are replayed whole instead of launched one operation at a time",
        remove_when="vLLM replays whole steps",
        build=f"{_PLUGIN}.step_graph.runner_hooks:wrap_execute_model",
    ),
    "step_graph_vote": Patch(
        target="vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp",
        reason="data-parallel ranks of a mixture of experts vote once per step; if Rose has taken part in the vote and "
        "does not replay the step, vLLM's code must get the answer instead of voting again",
        remove_when="execute_model takes the answer as an argument",
        only_while="execute_model runs a step that was voted on and is not replayed whole, in its thread",
    ),
    "step_graph_sampling": Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        reason="a step that was replayed whole has its tokens already; in other steps the LM head multiplies as many "
        "rows as in a replay, so that both round alike",
        remove_when="vLLM replays whole steps",
        build=f"{_PLUGIN}.step_graph.runner_hooks:wrap_sample_tokens",
    ),
    "step_graph_logprobs": Patch(
        target="vllm.v1.worker.gpu.sample.sampler:compute_topk_scores",
        reason="log-probabilities of replayed steps and of vLLM's own must be equal to the bit, so Rose's kernels make "
        "both: vLLM's takes a program per row, and torch.topk breaks ties in any way",
        remove_when="vLLM replays whole steps with log-probabilities",
        build=f"{_PLUGIN}.captured_processors:wrap_compute_topk_scores",
    ),
    "step_graph_reload": Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.reset_lora_state",
        reason="vLLM calls it after every replacement of weights: graphs may hold the addresses of what was replaced",
        remove_when="vLLM tells plugins of replaced weights, or promises that they never move",
        build=f"{_PLUGIN}.step_graph.addresses:wrap_reset_lora_state",
    ),
    **{
        f"step_graph_{method}": Patch(
            target=f"vllm.v1.worker.gpu_worker:Worker.{method}",
            reason=f"as step_graph_reload, {when}",
            remove_when="vLLM tells plugins of replaced weights, or promises that they never move",
            build=f"{_PLUGIN}.step_graph.addresses:wrap_worker_method",
        )
        for method, when in (
            ("wake_up", "where memory was given back and has been taken again"),
            ("reload_weights", "also on a rank on which it fails: ranks compare together"),
            ("finish_weight_update", "also on a rank on which it fails: ranks compare together"),
        )
    },
    "merged_outputs": Patch(
        target="vllm.v1.engine.core_client:AsyncMPClient.get_output_async",
        reason="the API server handles outputs step by step, however many steps are queued; with ROSE selected, queued "
        "outputs are merged per request first",
        remove_when="vLLM's front end merges its queued outputs",
        build=f"{_PLUGIN}.scheduler.merged_outputs:wrap_get_output_async",
    ),
    "output_statistics": Patch(
        target="vllm.v1.metrics.stats:IterationStats.update_from_output",
        reason="the front end reads an environment variable for every output, which takes longer than its statistics; "
        "it matters only where NaNs were counted",
        remove_when="vLLM's front end caches the environment, as its engine core does",
        build=f"{_PLUGIN}.scheduler.merged_outputs:wrap_update_from_output",
    ),
}


def apply_patch(name: str) -> None:
    """Replace one target permanently; does nothing if it is replaced already.

    Raises:
        KeyError: no such entry.
        AttributeError: the target does not exist in this vLLM.
    """
    patch = LEDGER[name]
    owner, attribute = resolve_owner(patch.target)
    if is_applied(name):
        return
    current = inspect.getattr_static(owner, attribute)
    original = current.__func__ if isinstance(current, classmethod) else current
    module, _, function = patch.build.partition(":")
    replacement = functools.update_wrapper(getattr(import_module(module), function)(original), original)
    setattr(replacement, _MARK, name)
    setattr(owner, attribute, classmethod(replacement) if isinstance(current, classmethod) else replacement)


def is_applied(name: str) -> bool:
    """Whether the target is permanently replaced in this process."""
    owner, attribute = resolve_owner(LEDGER[name].target)
    current = inspect.getattr_static(owner, attribute)
    return getattr(getattr(current, "__func__", current), _MARK, None) == name


class _PerThread:
    """Dispatches calls of a vLLM callable: to a thread's replacement in that thread, to the original in all others."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.num_users = 0
        """``swapped`` contexts that are open; changed under the lock only."""
        self.in_this_thread = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.in_this_thread, "replacement", self.original)(*args, **kwargs)


_swap_lock = threading.Lock()


@contextmanager
def swapped(name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace one callable target inside the ``with`` block, for the calling thread only.

    Other threads may build engines at the same time, with Rose or without.
    """
    owner, attribute = resolve_owner(LEDGER[name].target)
    with _swap_lock:
        switch = inspect.getattr_static(owner, attribute)
        if not isinstance(switch, _PerThread):
            switch = _PerThread(switch)
            setattr(owner, attribute, switch)
        switch.num_users += 1
    here = switch.in_this_thread
    outer = getattr(here, "replacement", switch.original)
    here.replacement = replacement
    try:
        yield
    finally:
        here.replacement = outer
        with _swap_lock:
            switch.num_users -= 1
            if not switch.num_users:
                setattr(owner, attribute, switch.original)


def resolve_owner(target: str) -> tuple[Any, str]:
    """Return the object that holds the target, and the attribute's name.

    Raises:
        AttributeError: the target does not exist.
    """
    module, _, path = target.partition(":")
    *parents, attribute = path.split(".")
    owner: Any = import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    if inspect.getattr_static(owner, attribute, None) is None:
        raise AttributeError(f"vLLM has no {target}")
    return owner, attribute
