"""Where everything lies that captured graphs of a model runner read and write, and whether it is still there.

Graphs hold addresses. vLLM reloads weights in place and wakes up with all memory where it was, but whoever sends
weights may also put other tensors in the place of a model's. So addresses are listed when graphs are captured, and
compared before the next step once weights have been replaced or the engine has slept. Other steps compare nothing.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor, UvaBufferPool
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from rose_backend.kernels.gpu_properties import current_workspace

_OWNERS = (
    *("model", "kv_caches", "input_buffers", "block_tables", "attn_groups", "cudagraph_manager"),
    *("req_states", "sampler", "rejection_sampler", "speculator"),
    # Of the state's other parts, outputs of encoders come and go.
    *(
        "model_state.rope_state",
        "model_state.encoder_runner.inputs_embeds",
        "model_state._mamba_state_idx_gpu",
    ),
)
"""Paths from vLLM's ``GPUModelRunner`` (V2): whatever graphs hold belongs to one of them, or to a workspace."""
_HELD_BY_ROSE_ALONE = (
    *("model.lm_head.", "model.language_model.lm_head."),
    "cudagraph_manager.rose_",
    "req_states.",
    "sampler.",
    "rejection_sampler.",
    "Rose's workspace.",
)
"""vLLM's graphs are of the layers, from the input buffers to the hidden states, and of a drafter."""
_NOT_HELD = (UvaBackedTensor, UvaBufferPool)
"""Their tensors take turns, from step to step."""
_OF_ONE_STEP = ("mamba_aligned_state_indices",)
"""Attributes of metadata builders. Graphs read what builders copy from them."""
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "triton"}
"""Their objects are not looked into, apart from modules and containers."""


class Range(NamedTuple):
    """Memory of one tensor, from its first to its last element."""

    address: int
    num_bytes: int


def addresses_of(runner: Any) -> dict[str, Range]:
    """Return where each tensor on the runner's device lies that graphs may hold.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2), its graphs captured.

    Returns:
        By the tensor's path from the runner, such as ``model.lm_head.weight``. A tensor that two paths lead to is there
        twice: either path may later lead to another one.
    """
    found: dict[str, Range] = {}
    # Objects are kept, so that no id is used again.
    seen: dict[int, Any] = {id(runner): runner}
    # Draws are launched, and captured, outside of any engine's workspace.
    queue = deque(
        [*((path, _owned(runner, path)) for path in _OWNERS), ("Rose's workspace", current_workspace())]
    )
    if is_workspace_manager_initialized():
        queue.append(("workspace", current_workspace_manager()))
    while queue:
        name, value = queue.popleft()
        if isinstance(value, torch.Tensor):
            if value.device.type == runner.device.type and value.numel():
                found[name] = Range(value.data_ptr(), _num_bytes(value))
        elif id(value) not in seen:
            seen[id(value)] = value
            queue.extend((f"{name}.{key}", part) for key, part in _parts_of(value))
        elif isinstance(value, torch.nn.Module):
            # A tied head is the embedding, too, which other graphs hold than the head's.
            tensors = ((key, part) for key, part in _parts_of(value) if isinstance(part, torch.Tensor))
            queue.extend((f"{name}.{key}", part) for key, part in tensors)
    return found


def _owned(runner: Any, path: str) -> Any:
    """Return what a path leads to; None for what a model does not have."""
    for name in path.split("."):
        runner = getattr(runner, name, None)
    return runner


def _num_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the names and values of what an object holds; of a module, parameters and submodules as attributes."""
    if isinstance(value, Mapping):
        yield from value.items()
        return
    if isinstance(value, list | tuple):
        yield from zip(getattr(value, "_fields", range(len(value))), value, strict=True)
        return
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    is_open = isinstance(value, torch.nn.Module | SimpleNamespace) or module not in _LIBRARIES
    if not is_open or isinstance(value, _NOT_HELD) or kind.__module__.startswith("vllm.config"):
        return
    for name in (name for each in kind.__mro__ for name in vars(each).get("__slots__", ())):
        if name not in ("__dict__", "__weakref__") and hasattr(value, name):
            yield name, getattr(value, name)
    for name, part in getattr(value, "__dict__", {}).items():
        if name in _OF_ONE_STEP:
            continue
        if isinstance(value, torch.nn.Module) and name in ("_parameters", "_buffers", "_modules"):
            yield from part.items()
        else:
            yield name, part


class GraphAddresses:
    """What the graphs of a model runner hold, as it was when they were captured.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2), its graphs and Rose's captured.

    Attributes:
        may_differ: whether weights have been replaced, or the engine has slept, since they were compared last.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._captured = addresses_of(runner)
        self.may_differ = False

    def find_moved(self) -> list[str]:
        """Compare, and return the names of all tensors that are elsewhere now, or gone."""
        now = addresses_of(self._runner)
        return [name for name, place in self._captured.items() if now.get(name) != place]


class StaleGraphs(IntEnum):
    """Graphs that hold something that has moved."""

    NONE = 0
    ROSES = 1
    """What surrounds the layers."""
    ALL = 2
    """Also vLLM's, of the layers."""


def which_graphs_hold(names: list[str]) -> StaleGraphs:
    """Return which graphs hold one of these tensors at least."""
    if not names:
        return StaleGraphs.NONE
    return StaleGraphs.ROSES if all(map(_is_held_by_rose_alone, names)) else StaleGraphs.ALL


def _is_held_by_rose_alone(name: str) -> bool:
    return name.startswith(_HELD_BY_ROSE_ALONE)


def largest_of_ranks(stale: StaleGraphs) -> StaleGraphs:
    """Return the largest of what all ranks of the tensor parallel group call this with."""
    group = get_tp_group()
    if group.world_size == 1:
        return stale
    largest = torch.tensor(int(stale))
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return StaleGraphs(int(largest))


def _note(runner: Any) -> None:
    addresses = getattr(getattr(runner, "cudagraph_manager", None), "rose_graph_addresses", None)
    if addresses is not None:
        addresses.may_differ = True


def wrap_reset_lora_state(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Build the replacement of ``GPUModelRunner.reset_lora_state``; see the patch ledger."""

    @functools.wraps(original)
    def reset_lora_state(self: Any) -> None:
        original(self)
        _note(self)

    return reset_lora_state


def wrap_worker_method(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of a method of ``Worker`` after which tensors may lie elsewhere; see the patch ledger.

    Ranks compare together, so each has to know of it, also one on which the method has failed.
    """

    @functools.wraps(original)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        finally:
            _note(self.model_runner)

    return noting
