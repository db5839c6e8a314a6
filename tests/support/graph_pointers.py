"""Which addresses captured CUDA graphs hold, and which of them belong to nothing that anybody has listed.

For workers of vLLM whose graphs were captured by ``capture_kept``: torch destroys what a graph consists of as soon as
it can be replayed, unless it is told to keep it.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import set_current_vllm_config

from rose_backend.vllm_plugin.step_graph.addresses import Range, addresses_of
from rose_backend.vllm_plugin.step_graph.draft_steps import AdaptiveSteps
from rose_backend.vllm_plugin.step_graph.head_steps import HeadSteps
from rose_backend.vllm_plugin.step_graph.runner_hooks import managers_of

MAX_NAME = 100
UNSET_BEYOND = 64
"""Larger parameters of torch's own kernels have words that are never written, as strides past a tensor's dimensions.
Addresses in these count only where memory is in use."""
UNSET_IN = "CatArrayBatchedCopy"
"""A kernel of torch's whose sizes and strides have such words in a smaller parameter."""
WORKSPACE_BYTES = (32 << 20, (2 * 4096 + 8 * 16) << 10)
"""Of cuBLAS, as torch allocates them on Hopper and on other GPUs."""
MAX_GAP = 1 << 40
"""Bytes between two addresses of torch's memory beyond which what lies between is taken for numbers."""
LOW_HALF = (1 << 32) - 1
_POINTER_TABLES = ("_ptrs", ".layout")
"""Names of listed tensors that hold addresses themselves."""


class Held(NamedTuple):
    """A word of a graph that may be an address."""

    where: str
    word: int
    is_certain: bool = True
    """Whether it was written; else it may be what was on the stack before."""


class KeptGraph(torch.cuda.CUDAGraph):
    """A graph whose nodes can be looked at after its capture."""

    def __init__(self, keep_graph: bool = True) -> None:
        super().__init__(keep_graph=True)


def capture_kept(worker: Any) -> None:
    """Capture all graphs of a worker again, so that ``find_strangers`` can look at them."""
    runner = worker.model_runner
    CUDAGraphWrapper.clear_all_graphs()
    for manager in managers_of(runner):
        manager.release_graphs()
    torch.cuda.synchronize()
    with patch.object(torch.cuda, "CUDAGraph", KeptGraph), set_current_vllm_config(runner.vllm_config):
        runner.capture_model()


def graphs_of(runner: Any) -> dict[str, torch.cuda.CUDAGraph]:
    """Return all graphs that are replayed in whole steps, vLLM's of the layers, of a head's, and Rose's around them."""
    layers, *of_head = managers_of(runner)
    steps = layers.rose_step_graphs
    names = [f"layers, {desc.uniform_token_count} of {desc.num_tokens} tokens" for desc in layers.graphs]
    found = dict(zip(names, layers.graphs.values(), strict=True))
    kinds = steps._by_depth if isinstance(steps, AdaptiveSteps) else {steps._query_len - 1: steps}
    around = []
    for depth, kind_of_steps in kinds.items():
        around += [
            (f"begin with {depth} drafts", kind_of_steps._begins),
            (f"end with {depth} drafts", kind_of_steps._ends),
        ]
        if isinstance(kind_of_steps, HeadSteps):
            around += [
                (f"later passes of {depth} drafts", kind_of_steps._begins_of_later_passes),
                (f"passes of {depth} drafts", kind_of_steps._ends_of_passes),
            ]
    for index, manager in enumerate(of_head):
        names = [
            f"head {index}, {desc.uniform_token_count} of {desc.num_tokens} tokens, "
            f"{getattr(desc, 'num_speculative_tokens', 'all')} drafts"
            for desc in manager.graphs
        ]
        found |= dict(zip(names, manager.graphs.values(), strict=True))
    for kind, captured in around:
        for size, parts in captured._graphs.items():
            found |= {f"{kind} {size}, part {part}": graph for part, graph in enumerate(parts)}
    return found


def find_strangers(worker: Any, unlisted: Iterable[str] = ()) -> tuple[int, int, list[str]]:
    """Look at every address that a worker's graphs hold.

    Args:
        unlisted: beginnings of names to take from the list of addresses.

    Returns:
        The numbers of graphs, and of addresses in them that are known; and one line for each address that is in no
        listed tensor, in no pool of these graphs and in no library's workspace, or that nothing is mapped to.
        Elements of tables of pointers count as addresses in graphs.
    """
    runner = worker.model_runner
    graphs = graphs_of(runner)
    without = tuple(unlisted)
    listed = {name: place for name, place in addresses_of(runner).items() if not name.startswith(without)}
    memory = _Memory(listed.values(), {graph.pool() for graph in graphs.values()})
    known, lines, mapped = 0, [], {}
    words = itertools.chain(
        *(_words_of_graph(graph.raw_cuda_graph(), name) for name, graph in graphs.items()),
        *(_words_in(name, place) for name, place in listed.items() if name.endswith(_POINTER_TABLES)),
    )
    for where, word, is_certain in words:
        if not memory.is_address(word):
            continue
        if word not in mapped:
            mapped[word] = _is_mapped(word)
        if mapped[word] and memory.is_known(word):
            known += is_certain
            continue
        if not mapped[word] and word & LOW_HALF == 0:
            # A 32-bit zero and four bytes of padding that were never written; no tensor here begins so round.
            continue
        owner = memory.describe(word)
        if is_certain or owner.startswith("active_allocated"):
            lines.append(f"{where}: {word:#x} is {'of nobody' if mapped[word] else 'not mapped'}, {owner}")
    return len(graphs), known, sorted(set(lines))


class _Memory:
    """Device memory of a process, and whose it is."""

    def __init__(self, listed: Iterable[Range], pools: set[Any]) -> None:
        segments = torch.cuda.memory_snapshot()
        self._segments = segments
        known = [*listed]
        for segment in segments:
            if tuple(segment["segment_pool_id"]) in pools:
                known.append(Range(segment["address"], segment["total_size"]))
            known += [
                Range(block["address"], block["size"])
                for block in segment["blocks"]
                if block["state"] == "active_allocated" and block["requested_size"] in WORKSPACE_BYTES
            ]
        self._known = sorted(known)
        # A range may end behind the next one's beginning.
        self._ends = list(itertools.accumulate((sum(each) for each in self._known), max))
        # Beside sleep mode torch's memory lies in several places, with room for any two numbers between them.
        self._windows: list[tuple[int, int]] = []
        for each in sorted(segments, key=lambda each: each["address"]):
            start, end = each["address"], each["address"] + each["total_size"]
            if self._windows and start - self._windows[-1][1] < MAX_GAP:
                start = self._windows.pop()[0]
            self._windows.append((start, end))

    def is_address(self, word: int) -> bool:
        """Whether a word lies where torch's memory lies, or is an address that CUDA knows."""
        if word < 1 << 32:
            return False
        return any(start <= word < end for start, end in self._windows) or _is_of_cuda(word)

    def is_known(self, address: int) -> bool:
        index = bisect.bisect_right(self._known, (address, 1 << 62)) - 1
        return index >= 0 and address < self._ends[index]

    def describe(self, address: int) -> str:
        for segment in self._segments:
            for block in segment["blocks"]:
                if block["address"] <= address < block["address"] + block["size"]:
                    return f"{block['state']} of {block['size']} bytes in pool {segment['segment_pool_id']}"
        return "none of torch's"


def _words_of_graph(graph: Any, where: str) -> Iterator[Held]:
    from cuda.bindings import driver

    graph = driver.CUgraph(int(graph))
    _, count = _checked(driver.cuGraphGetNodes(graph, 0))
    nodes, _ = _checked(driver.cuGraphGetNodes(graph, count))
    kinds = driver.CUgraphNodeType
    for node in nodes[:count]:
        (kind,) = _checked(driver.cuGraphNodeGetType(node))
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            yield from _words_of_kernel(node, where)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            (copy,) = _checked(driver.cuGraphMemcpyNodeGetParams(node))
            for name in ("srcDevice", "srcHost", "dstDevice", "dstHost"):
                yield Held(f"{where}: copy, {name}", int(getattr(copy, name) or 0))
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            (filled,) = _checked(driver.cuGraphMemsetNodeGetParams(node))
            yield Held(f"{where}: fill", int(filled.dst))
        elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            (child,) = _checked(driver.cuGraphChildGraphNodeGetGraph(node))
            yield from _words_of_graph(child, where)
        else:
            assert kind in (kinds.CU_GRAPH_NODE_TYPE_EMPTY, kinds.CU_GRAPH_NODE_TYPE_EVENT_RECORD), kind


def _words_of_kernel(node: Any, where: str) -> Iterator[Held]:
    from cuda.bindings import driver

    (params,) = _checked(driver.cuGraphKernelNodeGetParams(node))
    function = params.func
    if not int(function):
        (function,) = _checked(driver.cuKernelGetFunction(params.kern))
    (name,) = _checked(driver.cuFuncGetName(function))
    name = name.decode()
    where = f"{where}: {name[:MAX_NAME]}"
    pointers = int(params.kernelParams or 0)
    if not pointers:
        yield from _words_of_buffer(int(params.extra), where)
        return
    for index in itertools.count():
        error, offset, size = driver.cuFuncGetParamInfo(function, index)
        if error != driver.CUresult.CUDA_SUCCESS:
            return
        is_certain = not ("at6native" in name and size > (8 if UNSET_IN in name else UNSET_BEYOND))
        value = ctypes.string_at(ctypes.c_void_p.from_address(pointers + 8 * index).value, size)
        for start in range(-offset % 8, size - 7, 8):
            (word,) = struct.unpack_from("<Q", value, start)
            yield Held(f"{where}, parameter {index} at {start} of {size}", word, is_certain)


def _words_of_buffer(extra: int, where: str) -> Iterator[Held]:
    """Yield the words of a kernel's parameters that were given in one piece, by a list of tagged pointers."""
    tags = {}
    for index in itertools.count(0, 2):
        tag = ctypes.c_uint64.from_address(extra + 8 * index).value
        if not tag:
            break
        tags[tag] = ctypes.c_uint64.from_address(extra + 8 * index + 8).value
    # CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE.
    size = ctypes.c_size_t.from_address(tags[2]).value
    for start in range(0, size - 7, 8):
        yield Held(f"{where}, parameters at {start}", ctypes.c_uint64.from_address(tags[1] + start).value)


def _words_in(name: str, place: Range) -> Iterator[Held]:
    for index, (word,) in enumerate(struct.iter_unpack("<Q", _read(*place))):
        yield Held(f"{name}[{index}]", word)


def _read(address: int, num_bytes: int) -> bytes:
    from cuda.bindings import driver

    buffer = ctypes.create_string_buffer(num_bytes)
    _checked(driver.cuMemcpyDtoH(ctypes.addressof(buffer), driver.CUdeviceptr(address), num_bytes))
    return buffer.raw


def _is_mapped(address: int) -> bool:
    try:
        return len(_read(address, 1)) == 1
    except RuntimeError:
        return False


def _is_of_cuda(address: int) -> bool:
    from cuda.bindings import driver

    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    error, _ = driver.cuPointerGetAttribute(kind, driver.CUdeviceptr(address))
    return bool(error == driver.CUresult.CUDA_SUCCESS)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if error:
        raise RuntimeError(f"the CUDA driver says {error}")
    return tuple(values)
