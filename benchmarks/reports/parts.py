"""Losses and tables of parts: the block manager, clones and appends in the KV cache, kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from benchmarks.reports.text import (
    Result,
    Row,
    all_figures,
    caption,
    command,
    grouped,
    markdown,
    micros,
    verdict,
    versions,
)

SIDES = {"rose_core": "Rose", "rose_in_vllm": "Rose behind vLLM's interface", "stock": "vLLM's manager"}
WAYS = {
    "kv_cow_clone": {
        "loop": "one by one, layer by layer",
        # Results from before this variant was dropped have it.
        "loop_filled": "one by one, filled part only",
        "batched_torch": "one plan, torch copies",
        "batched": "one plan, one launch",
    },
    "kv_append": {
        "append": "append one by one",
        "reserve_write": "reserve, one write a layer",
        "reserve_fused": "reserve, stored by attention",
    },
}
OURS = {"kv_cow_clone": ("batched_torch", "batched"), "kv_append": ("reserve_write", "reserve_fused")}
"""Variants of Rose: losses are counted for these, against every variant before them."""

IN_A_GRAPH = {"total": "", "graph": ", in a graph"}
# The tests of the kernels have to pass on the machine that times them.
KERNELS_COMMAND = "python -m benchmarks.kernels --prove"


def block_manager_table(result: Result) -> str:
    """Return one step of 256 running requests, one lookup, and every loss."""
    scenes = result["scenes"]
    steps, prompt, copies = scenes["steady_decode"], scenes["long_prompt"], scenes["copy_on_write"]
    match = {side: "match" if side == "rose_core" else "get_computed_blocks.again" for side in SIDES}
    lookups = [prompt[side][name] for side, name in match.items()]
    found = {
        "decode step, no block fills up": [steps[side]["inside"] for side in SIDES],
        "decode step, every request needs a new block": [steps[side]["rolls_over"] for side in SIDES],
        "lookup of a cached prompt of 4,096 tokens, hashed before": lookups,
    }
    rows = [(name, *(micros(side["median"]) for side in sides)) for name, sides in found.items()]
    rows.append(("copy-on-write of 256 tails", micros(copies["median"]), "", "no such thing"))
    lost = (
        (SIDES[loss["side"]], f"{loss['name']}: {micros(loss['rose_us'])} against {micros(loss['stock_us'])}")
        for loss in result["losses"]
    )
    header, source = (
        ("256 requests, blocks of 16", *SIDES.values()),
        f"one core of an {result['machine']['cpu']}",
    )
    return markdown(
        header, rows, caption(result, source), verdict(lost, "the comparisons with vLLM's manager")
    )


def prefix_hits_table(result: Result) -> str:
    """Return the share of prompt tokens that both managers found, for each trace, window and size of the pool."""
    points = result["points"]
    shares = sorted({point["share"] for point in points})
    rows, lost = [], []
    for (trace, window), cases in itertools.groupby(points, lambda point: (point["trace"], point["window"])):
        cells = {}
        for point in cases:
            rose, vllm = (point[side]["hit_tokens"] for side in ("rose", "vllm"))
            total = point["prompt_tokens"]
            cells[point["share"]] = f"{rose / total:.1%} / {vllm / total:.1%}"
            if rose < vllm:
                lost.append((f"{trace}, window of {window:,}", f"{point['share']:.0%}: {rose:,} of {vllm:,}"))
        rows.append((trace, f"{window:,}", *(cells[share] for share in shares)))
    header = ("trace", "window", *(f"{share:.0%} of the blocks" for share in shares))
    sums = []
    for trace, cases in grouped(points, "trace").items():
        rose, vllm = (sum(point[side]["hit_tokens"] for point in cases) for side in ("rose", "vllm"))
        sums.append(f"{trace} {rose / vllm:.3f}")
    return markdown(
        header,
        rows,
        f"Shares of prompt tokens found, Rose / vLLM's manager, and in sum Rose's over vLLM's: {', '.join(sums)}; "
        f"{versions(result)}; {command(result)}.",
        verdict(lost, "the comparisons with vLLM's manager", some="Fewer hits"),
    )


def state_hits_table(result: Result) -> str:
    """Return the share of prompt tokens that both managers found with states, for each trace and size of the pool."""
    rows, lost, sums = [], [], []
    for trace, cases in grouped(result["points"], "trace").items():
        for case in cases:
            rose, vllm = (case[side]["hit_tokens"] for side in ("rose", "vllm"))
            total, shared = case["prompt_tokens"], case["shared_tokens"]
            heads = [f"{case[side]['shared_hit_tokens'] / shared:.1%}" for side in ("rose", "vllm") if shared]
            share = f"{case['share']:.0%}"
            rows.append(
                (trace, share, f"{rose / total:.1%}", f"{vllm / total:.1%}", " / ".join(heads) or "-")
            )
            if rose < vllm:
                lost.append((trace, f"{share}: {rose:,} of {vllm:,}"))
        rose, vllm = (sum(case[side]["hit_tokens"] for case in cases) for side in ("rose", "vllm"))
        sums.append(f"{trace} {rose / vllm:.3f}" if vllm else f"{trace} {rose:,} of 0")
    return markdown(
        ("trace", "share of the blocks", "Rose", "vLLM", "shared heads, Rose / vLLM"),
        rows,
        "Shares of prompt tokens found, and of heads from the third request with the same one on; in sum Rose's over "
        f"vLLM's: {', '.join(sums)}; {versions(result)}; {command(result)}.",
        verdict(lost, "the comparisons with vLLM's manager", some="Fewer hits"),
    )


def scenes_table(result: Result) -> str:
    """Return every figure of a result with nested ``scenes``."""
    rows = all_figures(result["scenes"])
    return markdown(("figure", "us: median (p10 - p90)"), rows, f"{command(result)}.")


def variants_table(result: Result) -> str:
    """Return every batch with all ways to copy or to store, and every loss."""
    names, settings, rows = WAYS[result["benchmark"]], result["settings"], result["rows"]
    figures = {
        f"{label}{where}": [row["variants"][name][figure]["median"] for row in rows]
        for figure, where in IN_A_GRAPH.items()
        for name, label in names.items()
        if figure in rows[0]["variants"].get(name, ())
    }
    cells = [[micros(us) for us in found] for found in figures.values()]
    facts = [f"{settings['num_layers']} layers", f"blocks of {settings['block_size']}"]
    facts += [f"{settings['context']} tokens each"] if "context" in settings else []
    lost = []
    for loss in result["losses"]:
        values = f"{micros(loss['us'])} against {micros(loss['faster_us'])} ({names[loss['faster']]})"
        title = names[loss["variant"]] + IN_A_GRAPH[loss["figure"]]
        lost.append((title, f"batch of {loss['batch']}: {values}"))
    of = f"{sum(1 for _ in _variant_pairs(rows, OURS[result['benchmark']]))} comparisons"
    source = caption(result, result["machine"]["device"], settings["dtype"], *facts)
    by_batch = zip((str(row["batch"]) for row in rows), *cells, strict=True)
    return markdown(("requests", *figures), by_batch, source, verdict(lost, of))


kv_cow_clone_table = kv_append_table = variants_table


def _variant_pairs(rows: Sequence[Row], ours: Sequence[str]) -> Iterator[Row]:
    """Yield each variant of Rose beside each that stands before it, of every batch."""
    for row in rows:
        for (faster, earlier), (name, side) in itertools.combinations(row["variants"].items(), 2):
            for figure in IN_A_GRAPH if name in ours else ():
                if figure in side and figure in earlier:
                    pair = {"batch": row["batch"], "figure": figure, "variant": name}
                    times = {"us": side[figure]["median"], "faster_us": earlier[figure]["median"]}
                    yield {**pair, **times, "faster": faster}


def variant_losses(rows: Sequence[Row], ours: Sequence[str]) -> list[Row]:
    """Return every case in which a variant of Rose, one of ``ours``, took longer than one that stands before it.

    For each: ``batch``; ``figure``, "total" or "graph"; ``variant`` and ``faster``, with medians in microseconds
    ``us`` and ``faster_us``.
    """
    return [pair for pair in _variant_pairs(rows, ours) if pair["us"] > pair["faster_us"]]


def prefill_flash_attention_table(result: Result) -> str:
    """Return Rose's time over FlashAttention 3's by new and cached tokens of a row, least and most over rows."""
    rows, settings, lines = result["rows"], result["settings"], []
    for (heads, context), found in sorted(grouped(rows, "heads", "context").items()):
        ratios = {
            length: [row["ratio"] for row in group] for length, group in grouped(found, "query_len").items()
        }
        name = "{}, {} / {} heads".format(heads, *settings["heads"][heads])
        lines.append([name, f"{context:,}", *(f"{min(x):.2f} to {max(x):.2f}x" for x in ratios.values())])
    header = ("Rose / FlashAttention 3", "cached tokens", *(f"{length:,} new" for length in ratios))
    facts = (result["device"], settings["dtype"], f"blocks of {settings['block_size']}")
    num_rows = f"{' / '.join(str(count) for count in grouped(rows, 'rows'))} rows of equal lengths"
    slower = f"Slower in {sum(row['ratio'] > 1 for row in rows)} of {len(rows)} cases: those above 1."
    return markdown(header, lines, caption(result, *facts, num_rows), slower)


def kernel_problems(result: Result) -> list[str]:
    """Return what is unproved, and every peer that is missing or was not timed."""
    states = {family: state["unproved_because"] for family, state in result["families"].items()}
    found = [f"{family} is unproved: {why}" for family, why in states.items() if why]
    absent = list(result["missing_peers"].items())
    for row in result["rows"]:
        sides = row["sides"].items()
        absent += [(f"{peer} in {row['case']}", side["error"]) for peer, side in sides if "error" in side]
    return [*found, *(f"not every peer was timed: {peer} ({why})" for peer, why in absent)]


def kernels_table(result: Result) -> str:
    """Return every kernel beside the best of its peers, and every loss."""
    rows = []
    for row in result["rows"]:
        rose = row["sides"]["Rose"]
        best_us, best = min((side["p50_us"], peer) for peer, side in row["sides"].items() if peer != "Rose")
        is_prefill = row["family"] == "prefill"
        speed = f"{rose['tflop_per_s']:.0f} TFLOP/s" if is_prefill else f"{rose['copy_share']:.0%} of copy"
        ratio = f"{best_us / rose['p50_us']:.2f}x"
        rows.append((row["case"], micros(rose["p50_us"]), speed, f"{micros(best_us)}, {best}", ratio))
    _, option, families = result.get("command", "").partition(" --families")
    source = caption({**result, "command": KERNELS_COMMAND + option + families}, _gpu(result))
    header = ("", "Rose", "", "best peer", "peer / Rose")
    return markdown(header, rows, source, _kernel_losses(result["rows"]))


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
    problems = "\n".join(f"- {problem[:300]}" for problem in kernel_problems(result))
    return markdown(header, rows, f"{_gpu(result)}.", problems, _kernel_losses(result["rows"]))


def _gpu(result: Result) -> str:
    return f"{result['gpu']}, driver {result['driver']}, copy {result['copy_bytes_per_s'] / 1e12:.2f} TB/s"


def _kernel_losses(rows: Sequence[Row]) -> str:
    lost = []
    for row in rows:
        ratio, peer = min((side.get("times_rose") or 1.0, peer) for peer, side in row["sides"].items())
        lost += [(f"behind {peer}", f"{row['case']} ({ratio:.2f}x)")] if ratio < 1.0 else []
    return verdict(lost, f"{len(rows)} cases")
