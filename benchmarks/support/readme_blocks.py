"""The README's tables of block management and of what it writes, from what the scripts of the same names wrote."""

from __future__ import annotations

from typing import Any

from benchmarks.support.markdown import markdown, micros, milliseconds

BATCHES = (1, 16, 256)
APPEND_BATCHES = (1, 32, 256)
STREAMING_METRICS, STREAMING_SHARES = ("ttft", "itl", "latency"), (50, 95, 99)


SIDES = {"rose_core": "Rose", "rose_in_vllm": "Rose behind vLLM's interface"}


def block_manager_table(result: dict[str, Any]) -> str:
    """Return one step of 256 running requests, one lookup, and every loss."""
    scenes = result["scenes"]
    decode, prompt = scenes["steady_decode"], scenes["long_prompt"]
    rows: list[tuple[str, ...]] = []
    for label, phase in (("no block fills up", "inside"), ("every request needs a new block", "rolls_over")):
        rose, adapter, stock = (
            decode[side][phase]["median"] for side in ("rose_core", "rose_in_vllm", "stock")
        )
        rows.append((f"decode step, {label}", micros(rose), micros(adapter), micros(stock)))
    rows.append(
        ("copy-on-write of 256 tails", micros(scenes["copy_on_write"]["median"]), "", "no such thing")
    )
    lookup = "get_computed_blocks.again"
    rows.append(
        (
            "lookup of a cached prompt of 4,096 tokens, hashed before",
            micros(prompt["rose_core"]["match"]["median"]),
            *(micros(prompt[side][lookup]["median"]) for side in ("rose_in_vllm", "stock")),
        )
    )
    machine, versions = result["machine"], result["versions"]
    source = f"Medians, one core of an {machine['cpu']}, vLLM {versions['vllm']}; `{result['command']}`."
    header = ("256 requests, blocks of 16", "Rose", "Rose behind vLLM's interface", "vLLM's manager")
    lost = [
        f"{loss['name']}, {SIDES[loss['side']]}: {micros(loss['rose_us'])} against {micros(loss['stock_us'])}"
        for loss in result["losses"]
    ]
    return "\n\n".join((markdown(header, rows), source, _verdict(lost)))


WAYS_TO_CLONE = {
    "loop": "one by one, layer by layer",
    "batched_torch": "one plan, torch copies",
    "batched": "one plan, one launch",
}


def kv_cow_clone_table(result: dict[str, Any]) -> str:
    """Return clone, append and free for a batch of requests that share a block of one token."""
    ways = [name for name in WAYS_TO_CLONE if name in result["rows"][0]["variants"]]
    rows = []
    for row in result["rows"]:
        if row["batch"] in BATCHES:
            totals = [row["variants"][name]["total"]["median"] for name in ways]
            rows.append((str(row["batch"]), *map(micros, totals), f"{totals[0] / totals[-1]:.1f}x"))
    header = ("requests", *(WAYS_TO_CLONE[name] for name in ways), "")
    settings = result["settings"]
    source = (
        f"Medians, {result['machine']['device']}, {settings['dtype']}, {settings['num_layers']} layers, "
        f"blocks of {settings['block_size']}; `{result['command']}`."
    )
    lost = _variant_losses(
        result["losses"], "request", {**WAYS_TO_CLONE, "loop_filled": "one by one, filled part only"}
    )
    return "\n\n".join((markdown(header, rows), source, _verdict(lost)))


WAYS_TO_APPEND = {
    "append": "append one by one",
    "reserve_write": "one write a layer",
    "reserve_fused": "stored by attention",
}


def kv_append_table(result: dict[str, Any]) -> str:
    """Return what a decode step takes with each way to store its tokens, and every loss."""
    rows = []
    for row in result["rows"]:
        if row["batch"] in APPEND_BATCHES:
            ways = [row["variants"][name] for name in WAYS_TO_APPEND]
            totals = [way["total"]["median"] for way in ways]
            replayed = [way["graph"]["median"] for way in ways[1:]]
            cells = (*map(micros, totals), f"{totals[0] / totals[2]:.1f}x", *map(micros, replayed))
            rows.append((str(row["batch"]), *cells))
    header = ("sequences", "append one by one", "reserve, one write a layer", "reserve, stored by attention", "",
              "one write a layer, in a graph", "stored by attention, in a graph")  # fmt: skip
    settings = result["settings"]
    source = (
        f"Medians, one decode step, attention of {settings['num_layers']} layers included, "
        f"{result['machine']['device']}, {settings['dtype']}, {settings['context']} tokens each; `{result['command']}`."
    )
    lost = _variant_losses(result["losses"], "sequence", WAYS_TO_APPEND)
    return "\n\n".join((markdown(header, rows), source, _verdict(lost)))


def streaming_table(result: dict[str, Any]) -> str:
    """Return each scene with block management one by one and at once, and every figure that is worse at once."""
    rows = []
    for row in result["rows"]:
        latencies = (
            " / ".join(milliseconds(row[f"p{share}_{metric}_ms"]) for share in STREAMING_SHARES)
            for metric in STREAMING_METRICS
        )
        rows.append((row["scene"], row["side"], *latencies, f"{row['output_throughput']:,.0f}"))
    header = ("p50 / p95 / p99 in ms", "blocks", "TTFT", "ITL", "latency", "tokens/s")
    settings = result["settings"]
    source = (
        f"Medians of {settings['repeat_runs']} runs, {settings['num_requests']} requests at once, {result['device']}, "
        f"{settings['model']}, {settings['dtype']}; `{result['command']}`."
    )
    return "\n\n".join((markdown(header, rows), source, _verdict(_streaming_losses(result))))


def _streaming_losses(result: dict[str, Any]) -> list[str]:
    sides = {(row["scene"], row["side"]): row for row in result["rows"]}
    lost = []
    for scene in dict.fromkeys(row["scene"] for row in result["rows"]):
        before, after = sides[scene, "one by one"], sides[scene, "at once"]
        lost += [
            f"{scene}, {metric.upper() if metric in ('ttft', 'itl') else metric} p{share} "
            f"{milliseconds(after[name])} against {milliseconds(before[name])}"
            for metric in STREAMING_METRICS
            for share in STREAMING_SHARES
            for name in [f"p{share}_{metric}_ms"]
            if after[name] > before[name]
        ]
        speeds = after["output_throughput"], before["output_throughput"]
        if speeds[0] < speeds[1]:
            lost.append(f"{scene}, tokens/s {speeds[0]:,.0f} against {speeds[1]:,.0f}")
    return lost


def _variant_losses(losses: list[dict[str, Any]], what: str, names: dict[str, str]) -> list[str]:
    where = {"total": "", "graph": " in a graph"}
    return [
        f"{loss['batch']} {what}{'s' * (loss['batch'] > 1)}{where[loss['figure']]}, {names[loss['variant']]}: "
        f"{micros(loss['us'])} against {micros(loss['faster_us'])} ({names[loss['faster']]})"
        for loss in losses
    ]


def _verdict(lost: list[str]) -> str:
    return f"Losses: {'; '.join(lost) if lost else 'none'}."
