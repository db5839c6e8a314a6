"""Write the README's tables from the files in benchmarks/results, or check that they agree.

    python -m benchmarks.readme_tables [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. Tables of whole engines may be left out
as long as there is no result file for them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support.readme_compare import (
    ARRIVALS_COMMAND,
    COMPARISON_COMMAND,
    arrivals_table,
    markdown,
    offline_table,
    switches_table,
)

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return result


def micros(us: float) -> str:
    return f"{us:,.0f} µs" if us >= 10 else f"{us:.1f} µs"


def block_manager() -> str:
    """One step of 256 running requests, and one lookup."""
    result = read("cpu/block_manager.json")
    scenes = result["scenes"]
    decode, prompt = scenes["steady_decode"], scenes["long_prompt"]
    rows = []
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
    return markdown(
        ("256 requests, blocks of 16", "Rose", "Rose behind vLLM's interface", "vLLM's manager"), rows
    ) + ("\n\n" + source)


def kv_cow_clone() -> str:
    """Clone, append and free for a batch of requests that share a block of one token."""
    result = read("h200/kv_cow_clone_float16.json")
    rows = []
    for row in result["rows"]:
        if row["batch"] in (1, 16, 256):
            loop, batched = (row["variants"][name]["total"]["median"] for name in ("loop", "batched"))
            rows.append((str(row["batch"]), micros(loop), micros(batched), f"{loop / batched:.1f}x"))
    source = (
        f"Medians, {result['machine']['device']}, float16, 12 layers, blocks of 64; `{result['command']}`."
    )
    return (
        markdown(("requests", "one by one, layer by layer", "one plan, one launch", ""), rows)
        + "\n\n"
        + source
    )


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


def kernels() -> str:
    """Kernels beside the best of their peers, and every loss."""
    command = "python -m benchmarks.kernels --prove --json benchmarks/results/h200/kernels.json"
    if not (RESULTS / "h200" / "kernels.json").is_file():
        return f"Not published yet: `{command}` measures on a GPU."
    result = read("h200/kernels.json")
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
            f"Medians, {result['gpu']} (copy {result['copy_bytes_per_s'] / 1e12:.2f} TB/s), {kernel_versions(result)}; "
            f"`{command}`.",
            kernel_losses(result["rows"]),
        )
    )


def kernel_versions(result: dict[str, Any]) -> str:
    names = {"torch": "torch", "triton": "Triton", "vllm": "vLLM", "flashinfer-python": "flashinfer"}
    versions = result["versions"]
    return ", ".join(f"{label} {versions[name]}" for name, label in names.items() if name in versions)


def kernel_losses(rows: list[dict[str, Any]]) -> str:
    best = {
        row["case"]: min((side.get("times_rose") or 1.0, peer) for peer, side in row["sides"].items())
        for row in rows
    }
    lost = [f"{case} ({ratio:.2f}x, {peer})" for case, (ratio, peer) in best.items() if ratio < 1.0]
    return f"Slower than a peer in {len(lost)} of {len(rows)} cases" + (
        f": {'; '.join(lost)}." if lost else "."
    )


OFFLINE_FILE = "h200/offline_compare.json"
SWITCHES_FILE = "h200/offline_switches.json"
ARRIVALS_FILE = "h200/arrivals.json"


def published(name: str, make: Callable[[dict[str, Any]], str], command: str) -> str:
    """Return the table of a result file, or how to get one."""
    if not (RESULTS / name).is_file():
        return f"Not published yet: `{command}` measures on a GPU."
    return make(read(name))


def offline_compare() -> str:
    """Whole engines side by side."""
    return published(OFFLINE_FILE, offline_table, COMPARISON_COMMAND)


def offline_switches() -> str:
    """Rose with one part switched off at a time."""
    return published(SWITCHES_FILE, switches_table, f"{COMPARISON_COMMAND} --compare-fused-mlp")


def arrivals() -> str:
    """What streaming callers see."""
    return published(ARRIVALS_FILE, arrivals_table, ARRIVALS_COMMAND)


TABLES: dict[str, Callable[[], str]] = {
    "block_manager": block_manager,
    "kv_cow_clone": kv_cow_clone,
    "kernels": kernels,
    "offline_compare": offline_compare,
    "offline_switches": offline_switches,
    "arrivals": arrivals,
}
FILES_OF_OPTIONAL_TABLES = {
    "offline_compare": OFFLINE_FILE,
    "offline_switches": SWITCHES_FILE,
    "arrivals": ARRIVALS_FILE,
}


def rewritten(text: str) -> str:
    """Return ``text`` with every table made anew."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end of table -->)"
        text, count = re.subn(
            pattern, lambda found, make=make: found[1] + make() + "\n" + found[2], text, flags=re.DOTALL
        )
        file = FILES_OF_OPTIONAL_TABLES.get(name)
        may_be_absent = file is not None and not (RESULTS / file).is_file()
        if count != 1 and not (count == 0 and may_be_absent):
            raise SystemExit(f"README.md: table {name}: expected once, found {count} times")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if README and results differ"
    )
    options = parser.parse_args()
    before = README.read_text()
    after = rewritten(before)
    if options.check:
        if after != before:
            print("README.md differs from benchmarks/results: run python -m benchmarks.readme_tables")
        return int(after != before)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
