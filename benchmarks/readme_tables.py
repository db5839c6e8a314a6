"""Write the README's tables from the files in benchmarks/results, or check that they agree.

    python -m benchmarks.readme_tables [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return result


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


TABLES: dict[str, Callable[[], str]] = {"block_manager": block_manager, "kv_cow_clone": kv_cow_clone}


def rewritten(text: str) -> str:
    """Return ``text`` with every table made anew."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end of table -->)"
        text, count = re.subn(
            pattern, lambda found, make=make: found[1] + make() + "\n" + found[2], text, flags=re.DOTALL
        )
        if count != 1:
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
