"""Decode steps of Rose beside the time that reading their bytes takes, and why some take longer than that."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.reports.engines import HOST, PLAIN, ROSE_HOSTS, compared
from benchmarks.reports.text import LABELS, Result, grouped, markdown, milliseconds
from benchmarks.support.checkpoint import (
    GEMMA3_4B,
    GPT2_124M,
    GPT_OSS_20B,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_8B_AWQ,
    LLAMA_8B_FP8,
    LLAMA_8B_INT4,
    QWEN3_06B,
    QWEN3_8B_FP8,
    QWEN3_14B_AWQ,
    QWEN3_30B,
    QWEN3_30B_FP8,
    QWEN3_VL_4B,
    QWEN35_4B,
    SHAPES,
)
from benchmarks.support.step_bytes import bytes_of_shape
from benchmarks.vllm_step_profile import PROMPT_TOKENS, WARM_UP_STEPS

LOW_SHARE = 0.7
"""Below it the page says why."""
GPUS = {"h200": "H200", "h100": "H100"}
_SHAPES_OF = {f"random weights, {label}'s shapes": shape for shape, label in SHAPES.items()}


class Step(NamedTuple):
    """A decode step that was measured."""

    gpu: str
    """A folder of results."""
    shape: str
    dtype: str
    batch: int
    host: str
    ms: float
    context: float
    """Tokens of each request whose keys and values it read, on average."""
    file: str
    copy_bytes_per_s: float
    """Of a large copy, measured by the same call; 0 where it measured none."""


class Reason(NamedTuple):
    """Why steps take longer than their bytes."""

    shapes: tuple[str, ...]
    batches: range
    text: str


_FEW, _MANY = range(1, 65), range(65, 1 << 20)
REASONS = (
    Reason(
        (GPT2_124M, LLAMA_1B, QWEN3_06B, QWEN3_VL_4B),
        _FEW,
        "the step waits for kernel launches. Each kernel needs what the previous one wrote, and most read so "
        "little that starting and ending them takes longer. Fewer and longer kernels would help, such as one "
        "persistent kernel per layer. GPT-2 inside vLLM also waits for the CPU. Llama 1B and Qwen3-VL 4B have "
        "the same kernels, but were not profiled",
    ),
    Reason(
        (GPT2_124M, LLAMA_1B, QWEN3_06B, QWEN3_VL_4B),
        _MANY,
        "there are as many launches, matrix products are bound by computation, and attention reads few tokens "
        "of each request. Contexts longer than in these runs raise the share, and so would faster products",
    ),
    Reason(
        (QWEN3_30B, QWEN3_30B_FP8, GPT_OSS_20B),
        range(1, 9),
        "with few requests a layer waits for kernel launches. In float8, with one request, a layer of Qwen3 "
        "30B-A3B takes 43 µs in eight dependent launches; reading its bytes would take 13 µs. Two launches for "
        "the experts instead of four were no faster. One persistent kernel per layer would help. gpt-oss's "
        "experts are vLLM's",
    ),
    Reason(
        (LLAMA_8B_FP8, QWEN3_8B_FP8, LLAMA_8B_INT4, LLAMA_8B_AWQ, QWEN3_14B_AWQ),
        range(1, 33),
        "a product takes 3.4 µs plus 1.3 times the time of its bytes, with any tile, in float8 as in int4, "
        "because the four dependent launches of a layer start cold. The fewer the bytes, the more the constant "
        "part weighs. One persistent kernel per layer would help",
    ),
    Reason(
        (LLAMA_8B_INT4, LLAMA_8B_AWQ),
        range(33, 1 << 20),
        "products are bound by computation, and also unpack weights. Specialized warps, as in Machete, would "
        "help",
    ),
    Reason(
        (LLAMA_8B, LLAMA_8B_FP8, QWEN3_8B_FP8),
        _MANY,
        "products are bound by computation; in float8, activations have to be quantized first. Faster products "
        "would help: [Llama 8B](inside_vllm.md#llama-31-8b-with-vllm-and-without) says how far "
        "the library's are from their limit",
    ),
    Reason(
        (GEMMA3_4B, QWEN35_4B),
        range(1, 1 << 20),
        "the layers are vLLM's, with more launches than Rose's. Layers of Rose's own would help",
    ),
)
"""Models and numbers of requests -> why a share of theirs may be below ``LOW_SHARE``."""

Work = tuple[str, str, str, int]
"""GPU, shape, dtype and number of requests."""


def copy_rates(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the fastest copy of each GPU in any result, in bytes per second."""
    rates: dict[str, float] = {}
    for file, result in results.items():
        rates[_gpu(file)] = max(rates.get(_gpu(file), 0.0), result.get("copy_bytes_per_s", 0.0))
    return rates


def newest_steps(results: Mapping[str, Result]) -> dict[Work, dict[str, Step]]:
    """Return the steps of each host, of the newest result that has one: of whole engines where there are any.

    They are in the order of ``GPUS`` and ``SHAPES``, from small batches to large ones.
    """
    found: dict[Work, dict[str, Step]] = {}

    def newest_last(each: tuple[str, Result]) -> tuple[bool, str]:
        return each[1].get("benchmark") == "offline_compare", each[1]["date"]

    for file, result in sorted(results.items(), key=newest_last):
        for step in _steps(file, result):
            found.setdefault((step.gpu, step.shape, step.dtype, step.batch), {})[step.host] = step
    gpus, shapes = list(GPUS), list(SHAPES)
    order = sorted(found, key=lambda work: (gpus.index(work[0]), shapes.index(work[1]), work[3]))
    return {work: found[work] for work in order}


def _gpu(file: str) -> str:
    return file.partition("/")[0]


def _steps(file: str, result: Result) -> Iterator[Step]:
    """Yield a result's plain steps of one GPU: greedy, without drafts or adapters."""
    gpu, settings = _gpu(file), result.get("settings", {})
    shape = _SHAPES_OF.get(settings.get("model", ""))
    if shape is None or gpu not in GPUS or "adapters" in settings:
        return
    of_model, copy = (gpu, shape, settings.get("dtype", "")), result.get("copy_bytes_per_s", 0.0)
    if result.get("benchmark") == "offline_compare":
        for row in result["rows"]:
            options = settings.get("engine_options", {}).get(row["backend"], {})
            changed = options.keys() & {"speculative_config", "data_parallel_size"}
            if row["scene"] != "decode" or row["mode"] != "greedy" or changed:
                continue
            if row["backend"] in ROSE_HOSTS:
                context = statistics.mean(row["input_len"]) + statistics.mean(row["output_len"]) / 2
                yield Step(*of_model, row["num_requests"], row["backend"], compared(row), context, file, copy)
    elif result.get("benchmark") == "vllm_request_kinds":
        for (scene, backend, batch), rows in grouped(
            result["rows"], "scene", "backend", "num_requests"
        ).items():
            if scene == PLAIN and backend == HOST:
                context = PROMPT_TOKENS + WARM_UP_STEPS + settings["steps"] / 2
                ms = statistics.median(row["step_ms"] for row in rows)
                yield Step(*of_model, batch, backend, ms, context, file, copy)


def launches(results: Mapping[str, Result]) -> dict[tuple[str, int, str], int]:
    """Return the kernels of a step of a shape, batch and host, of the newest profile on any GPU."""
    found = {}
    for _, result in sorted(results.items(), key=lambda each: each[1]["date"]):
        kind, backend = result.get("benchmark"), result.get("backend", "rose")
        shape = _SHAPES_OF.get(result.get("settings", {}).get("model", ""))
        if shape is None or kind not in ("step_profile", "vllm_step_profile") or backend not in ROSE_HOSTS:
            continue
        for profile in result["profiles"]:
            if profile.get("scene", "decode") == "decode":
                batch = profile["batch"] if kind == "step_profile" else profile["num_requests"]
                found[shape, batch, backend] = round(profile["launches"])
    return found


def table(results: Mapping[str, Result]) -> str:
    """Return each step of Rose beside its bytes' time, what was measured where, and why shares are low.

    Args:
        results: all published ones by their files.

    Raises:
        ValueError: a share is below ``LOW_SHARE``, and no reason is known.
    """
    rates, kernels, works = copy_rates(results), launches(results), newest_steps(results)
    rows, low = list[tuple[str, ...]](), list[tuple[str, int]]()
    for (gpu, shape, dtype, batch), hosts in works.items():
        read, cells = list[str](), list[str]()
        for host in ROSE_HOSTS:
            if (step := hosts.get(host)) is None:
                cells += ["", ""]
                continue
            num_bytes = bytes_of_shape(shape, dtype).of(batch, step.context)
            floor_ms = 1e3 * num_bytes / (step.copy_bytes_per_s or rates[gpu])
            read = read or [f"{num_bytes / 1e9:.2f} GB", f"{milliseconds(floor_ms)} ms"]
            cells += [f"{milliseconds(step.ms)} ms", f"{floor_ms / step.ms:.0%}"]
            if floor_ms / step.ms < LOW_SHARE:
                low.append((shape, batch))
        where = short_name(shape) + (", H100" if gpu == "h100" else "")
        counts = [str(kernels.get((shape, batch, host), "–")) for host in ROSE_HOSTS]
        rows.append((where, str(batch), *read, *cells, " / ".join(counts) if {*counts} != {"–"} else ""))
    sides = [cell for host in ROSE_HOSTS for cell in (LABELS[host], "share")]
    files = dict.fromkeys(step.file for hosts in works.values() for step in hosts.values())
    speeds = " and ".join(f"{rates[gpu] / 1e12:.2f} TB/s on an {label}" for gpu, label in GPUS.items())
    source = (
        f"Shares are the time of the bytes over that of the step. A large copy: {speeds}, the fastest in any result, "
        f"where the run itself measured none. "
        f"Steps: the newest of {', '.join(f'`{file}`' for file in files)}; greedy, without drafts."
    )
    header = ("", "requests", "bytes", "their time", *sides, "launches")
    return markdown(header, rows, source, _reasons(low))


def short_name(shape: str) -> str:
    """Return what people call a shape, without the format of its scales."""
    return SHAPES[shape].partition(",")[0]


def _reasons(low: list[tuple[str, int]]) -> str:
    """Return why steps of some shapes and batches have low shares."""
    for shape, batch in low:
        if not any(shape in reason.shapes and batch in reason.batches for reason in REASONS):
            raise ValueError(f"{short_name(shape)}, {batch} requests: no reason is known for its low share")
    lines = [f"Below {LOW_SHARE:.0%}, and what would lift it:", ""]
    for reason in REASONS:
        found: dict[str, list[int]] = {}
        for shape, batch in low:
            if (
                shape in reason.shapes
                and batch in reason.batches
                and batch not in found.setdefault(shape, [])
            ):
                found[shape].append(batch)
        named = (
            f"{short_name(shape)} ({', '.join(map(str, sorted(batches)))})"
            for shape, batches in found.items()
        )
        if found:
            lines.append(f"- **{', '.join(named)}**: {reason.text}.")
    return "\n".join(lines)
