"""Losses and tables of parts: the block manager, clones and appends in the KV cache, kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.reports.text import Result, Row, all_figures, command, listed, markdown, micros

BATCHES = (1, 16, 256)
APPEND_BATCHES = (1, 32, 256)
SIDES = {"rose_core": "Rose", "rose_in_vllm": "Rose behind vLLM's interface", "stock": "vLLM's manager"}
WAYS_TO_CLONE = {
    "loop": "one by one, layer by layer",
    "batched_torch": "one plan, torch copies",
    "batched": "one plan, one launch",
}
# Results from before this variant was dropped name it under their losses.
_CLONES = {**WAYS_TO_CLONE, "loop_filled": "one by one, filled part only"}
WAYS_TO_APPEND = {
    "append": "append one by one",
    "reserve_write": "one write a layer",
    "reserve_fused": "stored by attention",
}
OURS = {"kv_cow_clone": ("batched_torch", "batched"), "kv_append": ("reserve_write", "reserve_fused")}
"""Variants of Rose: losses are counted for these, against every variant before them."""

# What the README calls a case -> its name in the file.
KERNEL_ROWS = {
    "decode attention, GPT-2, 1 row of 1,024 tokens": "decode GPT-2 B=1 context 1,024",
    "decode attention, GPT-2, 32 rows of 1,024": "decode GPT-2 B=32 context 1,024",
    "decode attention, GPT-2, 256 rows of 1,024": "decode GPT-2 B=256 context 1,024",
    "decode attention, Llama-8B, 1 row of 32,768": "decode Llama-8B B=1 context 32,768",
    "decode attention, Llama-8B, 64 rows of 4,096": "decode Llama-8B B=64 context 4,096",
    "prefill attention, GPT-2, 32 prompts of 512": "prefill GPT-2 32 x 512",
    "prefill attention, Llama-8B, 4 prompts of 8,192": "prefill Llama-8B 4 x 8,192",
    "prefill attention, Llama-8B, 2 chunks of 2,048 after 6,144": "prefill Llama-8B 2 x 2,048 after 6,144",
    "clone of 1 block, 12 layers": "clone 1 block of 12 layers",
    "clone of 256 blocks, 12 layers": "clone 256 blocks of 12 layers",
    "four products of a GPT-2 layer, 1 row": "products of a GPT-2 layer, 1 row",
    "four products of a GPT-2 layer, 32 rows": "products of a GPT-2 layer, 32 rows",
    "four products of a GPT-2 layer, 256 rows": "products of a GPT-2 layer, 256 rows",
    "GPT-2's head and the most likely token, 32 rows": "head and sample B=32 greedy",
    "sampler, 256 rows, greedy": "sample B=256 greedy",
    "sampler, 1 row, top-k 50 and top-p 0.9": "sample B=1 top-k 50, top-p 0.9",
    "sampler, 256 rows, top-k 50 and top-p 0.9": "sample B=256 top-k 50, top-p 0.9",
    "sampler, 256 rows, top-p 0.9": "sample B=256 top-p 0.9",
}
KERNELS_COMMAND = "python -m benchmarks.kernels --prove --json benchmarks/results/h200/kernels.json"


def block_manager_table(result: Result) -> str:
    """Return one step of 256 running requests, one lookup, and every loss."""
    scenes = result["scenes"]
    decode, prompt = scenes["steady_decode"], scenes["long_prompt"]
    rows: list[tuple[str, ...]] = []
    for label, phase in (("no block fills up", "inside"), ("every request needs a new block", "rolls_over")):
        medians = (micros(decode[side][phase]["median"]) for side in SIDES)
        rows.append((f"decode step, {label}", *medians))
    copies = micros(scenes["copy_on_write"]["median"])
    rows.append(("copy-on-write of 256 tails", copies, "", "no such thing"))
    lookups = (
        prompt[side]["match" if side == "rose_core" else "get_computed_blocks.again"]["median"]
        for side in SIDES
    )
    rows.append(("lookup of a cached prompt of 4,096 tokens, hashed before", *map(micros, lookups)))
    machine, versions = result["machine"], result["versions"]
    source = f"Medians, one core of an {machine['cpu']}, vLLM {versions['vllm']}; {command(result)}."
    lost = (
        f"{loss['name']}, {SIDES[loss['side']]}: {micros(loss['rose_us'])} against {micros(loss['stock_us'])}"
        for loss in result["losses"]
    )
    table = markdown(("256 requests, blocks of 16", *SIDES.values()), rows)
    return "\n\n".join((table, source, listed("Losses", lost)))


def scenes_table(result: Result) -> str:
    """Return every figure of a result with nested ``scenes``."""
    table = markdown(("figure", "us: median (p10 - p90)"), all_figures(result["scenes"]))
    return f"{table}\n\n{command(result)}."


def kv_cow_clone_table(result: Result) -> str:
    """Return clone, append and free for a batch of requests that share a block of one token."""
    ways = [name for name in WAYS_TO_CLONE if name in result["rows"][0]["variants"]]
    rows = []
    for row in result["rows"]:
        if row["batch"] in BATCHES:
            totals = [row["variants"][name]["total"]["median"] for name in ways]
            rows.append((str(row["batch"]), *map(micros, totals), f"{totals[0] / totals[-1]:.1f}x"))
    settings = result["settings"]
    source = (
        f"Medians, {result['machine']['device']}, {settings['dtype']}, {settings['num_layers']} layers, "
        f"blocks of {settings['block_size']}; {command(result)}."
    )
    table = markdown(("requests", *(WAYS_TO_CLONE[name] for name in ways), ""), rows)
    return "\n\n".join((table, source, _variants_lost(result["losses"], "request", _CLONES)))


def kv_append_table(result: Result) -> str:
    """Return what a decode step takes with each way to store its tokens, and every loss."""
    rows = []
    for row in result["rows"]:
        if row["batch"] in APPEND_BATCHES:
            ways = [row["variants"][name] for name in WAYS_TO_APPEND]
            totals = [way["total"]["median"] for way in ways]
            replayed = (micros(way["graph"]["median"]) if "graph" in way else "" for way in ways[1:])
            cells = (*map(micros, totals), f"{totals[0] / totals[2]:.1f}x", *replayed)
            rows.append((str(row["batch"]), *cells))
    header = (
        "sequences",
        "append one by one",
        "reserve, one write a layer",
        "reserve, stored by attention",
        "",
        "one write a layer, in a graph",
        "stored by attention, in a graph",
    )
    settings = result["settings"]
    source = (
        f"Medians, one decode step, attention of {settings['num_layers']} layers included, "
        f"{result['machine']['device']}, {settings['dtype']}, {settings['context']} tokens each; {command(result)}."
    )
    lost = _variants_lost(result["losses"], "sequence", WAYS_TO_APPEND)
    return "\n\n".join((markdown(header, rows), source, lost))


def variant_losses(rows: Sequence[Row], ours: Sequence[str]) -> list[Row]:
    """Return every case in which a variant of Rose took longer than one that stands before it.

    Args:
        rows: ``batch``, and ``variants``: name -> part -> spread, ``total`` and maybe ``graph`` included.
        ours: the variants of Rose; all others stand before them.

    Returns:
        For each: ``batch``; ``figure``, "total" or "graph"; ``variant`` with its ``us``, and ``faster`` with its
        ``faster_us``: medians in microseconds.
    """
    found = []
    for row in rows:
        pairs = itertools.combinations(row["variants"], 2)
        for faster, name in ((earlier, later) for earlier, later in pairs if later in ours):
            sides = row["variants"][name], row["variants"][faster]
            for figure in ("total", "graph"):
                if all(figure in side for side in sides):
                    us, faster_us = (side[figure]["median"] for side in sides)
                    if us > faster_us:
                        loss = {"batch": row["batch"], "figure": figure, "variant": name, "us": us}
                        found.append({**loss, "faster": faster, "faster_us": faster_us})
    return found


def _variants_lost(losses: Sequence[Row], what: str, names: dict[str, str]) -> str:
    where = {"total": "", "graph": " in a graph"}
    lost = (
        f"{loss['batch']} {what}{'s' * (loss['batch'] > 1)}{where[loss['figure']]}, {names[loss['variant']]}: "
        f"{micros(loss['us'])} against {micros(loss['faster_us'])} ({names[loss['faster']]})"
        for loss in losses
    )
    return listed("Losses", lost)


def kernel_problems(result: Result) -> list[str]:
    """Return what is unproved, and every peer that is missing or was not timed."""
    return [
        *(
            f"{family} is unproved: {state['unproved_because']}"
            for family, state in result["families"].items()
            if state["unproved_because"]
        ),
        *(f"not every peer was timed: {peer} ({why})" for peer, why in result["missing_peers"].items()),
        *(
            f"not every peer was timed: {peer} in {row['case']} ({side['error']})"
            for row in result["rows"]
            for peer, side in row["sides"].items()
            if "error" in side
        ),
    ]


def kernels_table(result: Result) -> str:
    """Return kernels beside the best of their peers, and every loss."""
    by_name = {row["case"]: row for row in result["rows"]}
    rows = []
    for label, name in KERNEL_ROWS.items():
        sides = by_name[name]["sides"]
        rose = sides["Rose"]
        best_us, best = min((side["p50_us"], peer) for peer, side in sides.items() if peer != "Rose")
        speed = f"{rose['copy_share']:.0%} of copy"
        if by_name[name]["family"] == "prefill":
            speed = f"{rose['tflop_per_s']:.0f} TFLOP/s"
        ratio = f"{best_us / rose['p50_us']:.2f}x"
        rows.append((label, micros(rose["p50_us"]), speed, f"{micros(best_us)}, {best}", ratio))
    names = {"torch": "torch", "triton": "Triton", "vllm": "vLLM", "flashinfer-python": "flashinfer"}
    versions = ", ".join(
        f"{label} {result['versions'][name]}" for name, label in names.items() if name in result["versions"]
    )
    source = (
        f"Medians, {result['gpu']} (copy {result['copy_bytes_per_s'] / 1e12:.2f} TB/s), {versions}; "
        f"`{KERNELS_COMMAND}`."
    )
    table = markdown(("", "Rose", "", "best peer", "peer / Rose"), rows)
    return "\n\n".join((table, source, _kernel_losses(result["rows"])))


def all_kernels_table(result: Result) -> str:
    """Return every case and side; a peer's time over Rose's only where the family's tests have passed."""
    rows = []
    for row in result["rows"]:
        for side, figures in row["sides"].items():
            cells = ["not timed"]
            if "error" not in figures:
                times = (f"{figures[name]:,.2f}" for name in ("p20_us", "p50_us", "p80_us"))
                ratio = figures.get("times_rose", "")
                ratio = "unproved" if ratio is None else ratio and f"{ratio:.2f}"
                speeds = (f"{figures['gb_per_s']:,.0f}", f"{figures['copy_share']:.1%}")
                cells = [*times, *speeds, f"{figures['tflop_per_s']:.0f}", ratio]
            rows.append((row["case"] if side == "Rose" else "", side, *cells))
    header = ("case", "side", "p20 us", "p50 us", "p80 us", "GB/s", "of copy", "TFLOP/s", "x Rose")
    copy = f"{result['copy_bytes_per_s'] / 1e12:.2f} TB/s"
    source = f"{result['gpu']}, driver {result['driver']}, copy {copy}."
    problems = "\n".join(f"- {problem[:300]}" for problem in kernel_problems(result))
    return "\n\n".join((markdown(header, rows), source, problems, _kernel_losses(result["rows"])))


def _kernel_losses(rows: Sequence[Row]) -> str:
    best = {
        row["case"]: min((side.get("times_rose") or 1.0, peer) for peer, side in row["sides"].items())
        for row in rows
    }
    lost = [f"{case} ({ratio:.2f}x, {peer})" for case, (ratio, peer) in best.items() if ratio < 1.0]
    count = f"Slower than a peer in {len(lost)} of {len(rows)} cases"
    return count + (f": {'; '.join(lost)}." if lost else ".")
