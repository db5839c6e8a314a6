"""The README's table of kernels, from what ``kernels`` wrote."""

from __future__ import annotations

from typing import Any

from benchmarks.support.markdown import markdown, micros

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


COMMAND = "python -m benchmarks.kernels --prove --json benchmarks/results/h200/kernels.json"


def kernels_table(result: dict[str, Any]) -> str:
    """Return kernels beside the best of their peers, and every loss."""
    for family, state in result["families"].items():
        if state["unproved_because"]:
            raise SystemExit(f"kernels.json: {family} is unproved: {state['unproved_because']}")
    absent = [f"{peer} ({why})" for peer, why in result["missing_peers"].items()]
    absent += [
        f"{peer} in {row['case']} ({side['error']})"
        for row in result["rows"]
        for peer, side in row["sides"].items()
        if "error" in side
    ]
    if absent:
        raise SystemExit(f"kernels.json: not every peer was timed: {'; '.join(absent)}")
    by_name = {row["case"]: row for row in result["rows"]}
    rows = []
    for label, name in KERNEL_ROWS.items():
        sides = by_name[name]["sides"]
        rose = sides["Rose"]
        best_us, best = min((side["p50_us"], peer) for peer, side in sides.items() if peer != "Rose")
        bound_by_products = by_name[name]["family"] == "prefill"
        speed = (
            f"{rose['tflop_per_s']:.0f} TFLOP/s" if bound_by_products else f"{rose['copy_share']:.0%} of copy"
        )
        ratio = f"{best_us / rose['p50_us']:.2f}x"
        rows.append((label, micros(rose["p50_us"]), speed, f"{micros(best_us)}, {best}", ratio))
    return "\n\n".join(
        (
            markdown(("", "Rose", "", "best peer", "peer / Rose"), rows),
            f"Medians, {result['gpu']} (copy {result['copy_bytes_per_s'] / 1e12:.2f} TB/s), {_versions(result)}; "
            f"`{COMMAND}`.{_other_runs(result['families'])}",
            _losses(result["rows"]),
        )
    )


def _other_runs(families: dict[str, Any]) -> str:
    """Return which families are from runs of their own; ``kernels --update`` leaves their facts with them."""
    elsewhere = {
        name: state["copy_bytes_per_s"] / 1e12 for name, state in families.items() if "date" in state
    }
    if not elsewhere:
        return ""
    copies = ", ".join(sorted({f"{copy:.2f}" for copy in elsewhere.values()}))
    return (
        f" Of earlier runs with the same sources, each with its tests before it (copy {copies} TB/s): "
        f"{', '.join(elsewhere)}."
    )


def _versions(result: dict[str, Any]) -> str:
    names = {"torch": "torch", "triton": "Triton", "vllm": "vLLM", "flashinfer-python": "flashinfer"}
    versions = result["versions"]
    return ", ".join(f"{label} {versions[name]}" for name, label in names.items() if name in versions)


def _losses(rows: list[dict[str, Any]]) -> str:
    best = {
        row["case"]: min((side.get("times_rose") or 1.0, peer) for peer, side in row["sides"].items())
        for row in rows
    }
    lost = [f"{case} ({ratio:.2f}x, {peer})" for case, (ratio, peer) in best.items() if ratio < 1.0]
    return f"Slower than a peer in {len(lost)} of {len(rows)} cases" + (
        f": {'; '.join(lost)}." if lost else "."
    )
