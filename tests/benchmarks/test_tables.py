"""Tables that are published: what they show, every loss that they admit, and when there are none."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.online.timeline import METRICS, PERCENTILES
from benchmarks.report import TABLES, problems, read
from benchmarks.reports import peers
from benchmarks.reports.engines import (
    HOST,
    INSIDE_VLLM_TIMES,
    ONLY_ATTENTION,
    ONLY_MANAGER,
    PART_SIDES,
    STOCK,
    inside_vllm_bars,
    losses,
    offline_table,
    parts_table,
)
from benchmarks.reports.parts import OURS, block_manager_table, kernels_table, variant_losses, variants_table
from benchmarks.reports.serving import (
    COMPARED,
    OUTPUTS_APART,
    compare,
    in_process_table,
    poisson_bars,
    poisson_table,
    trace_losses,
    trace_table,
)


def row(case: str, backend: str, value: float) -> dict[str, Any]:
    scene = case.split(",")[0]
    figure = "step_ms" if scene == "decode" else "duration"
    figures = {
        figure: {"median": value, "samples": 2 if scene == "mixed" else 3},
        "output_throughput": {"median": 1e5 / value},
    }
    return {"case": case, "scene": scene, "backend": backend, "figure": figure, "figures": figures}


SETTINGS = {"model": "some model", "dtype": "float16"}


def report(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    backends = dict.fromkeys(row["backend"] for row in rows)
    return {
        "benchmark": "some",
        "command": "python -m benchmarks.some --repeats 3",
        "device": "some GPU",
        "settings": SETTINGS,
        "backends": {name: {"version": f"of {name}"} for name in backends},
        "missing": {},
        "failed": {},
        "losses": losses(row for row in rows if "case" in row),
        "rows": rows,
        **changes,
    }


ROWS = [
    row("decode, 1", "rose", 0.25),
    row("decode, 1", "vllm", 1.0),
    row("decode, 1", "sglang", 0.75),
    row("mixed", "rose", 5.0),
    row("mixed", "vllm", 10.0),
    row("mixed", "sglang", 4.0),
]


def test_every_engine_and_every_loss_is_shown() -> None:
    text = offline_table(report(ROWS))
    assert "|  | Rose | vLLM | SGLang | best peer / Rose |" in text
    assert "| decode, 1 | 0.25 ms | 1 ms | 0.75 ms | 3.00x |" in text
    assert "| mixed | 5.00 s, 20 k tok/s | 10.00 s, 10 k tok/s | 4.00 s, 25 k tok/s | 0.80x |" in text
    assert "Medians of 2 to 3 turns, some GPU, some model, float16; " in text
    assert "; Rose of rose, vLLM of vllm, SGLang of sglang; `python -m" in text
    assert text.endswith("Slower in 1 of 4 comparisons:\n\n- Rose behind SGLang: mixed (1.25x its time)")
    assert offline_table(report(ROWS[:3])).endswith("No losses in 2 comparisons.")


def test_a_version_that_was_not_yet_raised_is_not_shown_as_a_release() -> None:
    text = offline_table(report(ROWS, backends={"rose": {"version": "0.1.0"}, "vllm": {"version": "0.1.0"}}))
    assert "; Rose 0.2.0 development, vLLM 0.1.0; " in text


def test_switches_are_compared_with_their_own_host() -> None:
    rows = [
        row("decode, 1", "rose", 0.25),
        row("decode, 1", "rose, fused_mlp off", 0.5),
        row("decode, 1", "rose-in-vllm", 1.0),
        row("decode, 1", "rose-in-vllm, block_manager off", 1.5),
    ]
    text = parts_table(report(rows))
    assert "| Rose, all of it | 0.25 ms |" in text and "| Rose in vLLM, all of it | 1 ms |" in text
    assert "| `fused_mlp` | 2.00x |" in text
    assert "| `block_manager` | 1.50x |" in text
    assert text.endswith("A gain of 2% or more in 2 cases.")
    rows[1] = row("decode, 1", "rose, fused_mlp off", 0.249)
    some = "Slower with the part, or no gain above 2%, in 1 of 2 cases:\n\n- `fused_mlp`: decode, 1 (0.996x)"
    assert parts_table(report(rows)).endswith(some)


def test_latencies_and_losses_at_the_same_load_are_shown() -> None:
    figures = {f"p{p}_{m}_ms": float(p) for p in (50, 90, 99) for m in ("ttft", "tpot", "itl", "e2el")}
    same: dict[str, Any] = {"scene": "same load", "request_rate": 1234.5, "turns": [1] * 4, **figures}
    rows = [
        {"scene": "capacity", "backend": "rose", "request_rate": None, "turns": [1] * 4, **figures},
        {**same, "backend": "rose", "p50_itl_ms": 0.12345},
    ]
    text = in_process_table(report(rows, losses=[]))
    latencies = "50 / 90 / 99 | 50 / 90 / 99 | 0.123 / 90 / 99 | 50 / 90 / 99"
    assert f"| same load, 1,234 requests/s | Rose | {latencies} |" in text
    assert "capacity" not in text
    assert "Medians of 4 turns, some GPU" in text
    assert text.endswith("No losses in 0 comparisons.")
    vllm = {**same, "backend": "vllm", "p99_ttft_ms": 98.0, "p50_itl_ms": 0.1, "p90_itl_ms": 91.0}
    own = {**vllm, "scene": "own load", "backend": "rose", "p90_ttft_ms": 1000.0}
    text = in_process_table(report([*rows, vllm, own], losses=[]))
    lost = "- same load: Rose behind vLLM: TTFT p99 99 ms against 98 ms; ITL p50 0.123 ms against 0.1 ms"
    assert text.endswith(f"Slower in 2 of 12 comparisons:\n\n{lost}")


def test_a_ratio_is_to_the_fastest_run_of_a_peer_and_names_it() -> None:
    def run(device: str = "some GPU", release: str = "1", **medians: float) -> dict[str, Any]:
        rows = [row("decode, 1", side, median) for side, median in medians.items()]
        versions = {side: {"version": release} for side in medians}
        return {**report(rows), "benchmark": "offline_compare", "device": device, "backends": versions}

    named = run(rose=1.0, vllm=6.0, sglang=5.0)
    others = [
        run(vllm=3.0, sglang=7.0, rose=0.1),
        run(device="another", vllm=2.0),
        run(release="2", vllm=2.0),
    ]
    others.append({**run(vllm=2.0), "settings": {"model": "another", "dtype": "float16"}})
    others.append({**run(vllm=2.0), "settings": {"model": "some model", "dtype": "bfloat16"}})
    text = offline_table(named, peers.fastest([named, *others]))
    assert "| decode, 1 | 1 ms | 6 ms | 5 ms | 3.00x (vLLM 3 ms) |" in text and "Ratios are to" in text
    alone = offline_table(named)
    assert "| decode, 1 | 1 ms | 6 ms | 5 ms | 5.00x |" in alone and "Ratios are to" not in alone


@pytest.mark.parametrize(
    ("changes", "ratio"),
    [
        ({"method": "ngram_gpu"}, "2.00x (vLLM 2 ms)"),
        ({"method": "eagle3"}, "4.00x"),
        ({"num_speculative_tokens": 1}, "4.00x"),
    ],
)
def test_lookups_of_the_same_drafts_are_one_peer(changes: dict[str, Any], ratio: str) -> None:
    drafter = {"method": "ngram", "num_speculative_tokens": 3}

    def run(drafts: dict[str, Any], **medians: float) -> dict[str, Any]:
        of_all = report([row("decode, 1", side, median) for side, median in medians.items()])
        options = {"engine_options": {"vllm": {"speculative_config": drafts}}}
        facts = {"benchmark": "offline_compare", "backends": {side: {"version": "1"} for side in medians}}
        return {**of_all, **facts, "settings": {**of_all["settings"], **options}}

    named, other = run(drafter, rose=1.0, vllm=4.0), run(drafter | changes, vllm=2.0)
    assert f"| decode, 1 | 1 ms | 4 ms | {ratio} |" in offline_table(named, peers.fastest([named, other]))


def poisson_turn(name: str, rate: float | None, backend: str, value: float, **changes: Any) -> dict[str, Any]:
    figures = {**dict.fromkeys(COMPARED, value), "failed": 0, "client_busy": 0.25}
    return {"set": name, "rate": rate, "backend": backend, **figures, **changes}


def poisson_report(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    comparison, start_up_s = compare(rows), {HOST: 21.0, STOCK: 20.0}
    facts = {
        "benchmark": "vllm_serving",
        "settings": SETTINGS | {"requests": 512, "seconds": 3.5},
        "start_up_s": start_up_s,
        "comparison": comparison,
        "bars": poisson_bars(comparison, start_up_s),
    }
    return report(rows, **facts | changes)


SERVED = [
    *(poisson_turn("random", None, HOST, value) for value in (3.0, 13.5, 90.0)),
    *(poisson_turn("random", None, STOCK, 10.0) for _ in range(3)),
    *(poisson_turn("shared-prefix", 38.5, HOST, 5.0) for _ in range(2)),
    *(poisson_turn("shared-prefix", 38.5, STOCK, 4.0) for _ in range(2)),
]


def test_servers_are_shown_at_every_load_with_every_loss() -> None:
    text = poisson_table(poisson_report(SERVED))
    figures = "13.5 ms | 13.5 ms | 13.5 ms | 13.5 ms | 14 | 14"
    assert f"| random, all at once | Rose in vLLM | {figures} |" in text
    assert "| random, all at once | vLLM | 10 ms | 10 ms | 10 ms | 10 ms | 10 | 10 |" in text
    assert "| random, all at once | Rose / vLLM | 1.35x | 1.35x | 1.35x | 1.35x | 1.35x | 1.35x |" in text
    assert "| shared-prefix, 38 requests/s | Rose in vLLM | 5 ms | 5 ms |" in text
    assert "Medians of 2 to 3 turns, 512 requests at once or 3.5 s of Poisson arrivals, some GPU, " in text
    assert "; Rose in vLLM of rose-in-vllm, vLLM of vllm; " in text
    assert "Start-up: Rose in vLLM 21.0 s, vLLM 20.0 s; busiest client process: 25% of a core." in text
    _, verdict, lost = text.rpartition("Slower in 10 of 12 comparisons:\n\n")
    assert verdict and len(lost.splitlines()) == 2 and "output tokens/s" not in lost
    assert "- random, all at once: Rose in vLLM behind vLLM: TTFT p50 13.5 ms against 10 ms; " in lost
    assert lost.endswith("; prefilled tokens 5 against 4")


def test_a_server_with_a_part_off_and_servers_without_a_model_say_so() -> None:
    rows = [*SERVED, poisson_turn("random", None, OUTPUTS_APART, 7.0)]
    settings = {**poisson_report(rows)["settings"], "step_ms": 1.5, "rust_front_end": True}
    text = poisson_table(poisson_report(rows, settings=settings))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[3].startswith("| random, all at once | the same, `joined_outputs` off | 7 ms | 7 ms |")
    assert lines[4].startswith("| random, all at once | vLLM |") and ", no model (1.5 ms a step), " in text
    assert " arrivals, no model (1.5 ms a step), vLLM's API server in Rust, " in text
    behind = "- random, all at once: Rose in vLLM behind the same, `joined_outputs` off: TTFT p50 13.5 ms against 7 ms"
    assert behind in text


def test_losses_of_a_server_are_all_its_figures_that_are_worse_and_no_other() -> None:
    slow = poisson_turn("random", None, STOCK, 2.0, output_throughput=1.0)
    even = poisson_report([poisson_turn("random", None, HOST, 2.0, output_throughput=1.0), slow])
    assert poisson_table(even).endswith("No losses in 6 comparisons.")
    less = poisson_report([poisson_turn("random", None, HOST, 1.0, output_throughput=0.4), slow])
    lost = "- random, all at once: Rose in vLLM behind vLLM: output tokens/s 0 against 1"
    assert poisson_table(less).endswith(f"Slower in 1 of 6 comparisons:\n\n{lost}")


def parts_report(**times: float) -> dict[str, Any]:
    values = {STOCK: 4.0, ONLY_ATTENTION: 3.0, ONLY_MANAGER: 2.0, HOST: 1.0}
    rows = [
        row("decode, 1", side, values.get(side, times.get(side.removeprefix(f"{HOST}, ").split()[0], 1.5)))
        for side in (STOCK, HOST, *PART_SIDES)
    ]
    return report(rows)


def test_parts_are_compared_with_the_side_that_lacks_nothing_else() -> None:
    text = parts_table(parts_report(fused_mlp=1.01, fused_sampler=0.9))
    assert "| time without / with the part | decode, 1 |" in text
    assert "| vLLM, all of it | 4 ms |" in text and "| Rose in vLLM, all of it | 1 ms |" in text
    assert "| `attention` | 1.33x |" in text
    assert "| `block_manager` | 1.50x |" in text
    assert "| `batched_scheduling` | 1.50x |" in text
    assert text.endswith(
        "Slower with the part, or no gain above 2%, in 2 of 8 cases:\n\n"
        "- `fused_mlp`: decode, 1 (1.010x)\n- `fused_sampler`: decode, 1 (0.900x)"
    )
    assert parts_table(parts_report()).endswith("A gain of 2% or more in 8 cases.")


def test_another_model_is_set_against_vllm() -> None:
    rows = [row("decode, 1", HOST, 0.5), row("decode, 1", STOCK, 1.0), row("mixed", HOST, 6.0)]
    rows.append(row("mixed", STOCK, 3.0))
    text = offline_table(report(rows))
    assert "|  | Rose in vLLM | vLLM | vLLM / Rose in vLLM |" in text
    assert "| decode, 1 | 0.5 ms | 1 ms | 2.00x |" in text
    assert text.endswith(
        "Slower in 1 of 2 comparisons:\n\n- Rose in vLLM behind vLLM: mixed (2.00x its time)"
    )


def test_goals_inside_vllm_are_shares_of_its_time() -> None:
    steps = [f"step, {count} requests, greedy" for count in (1, 8, 128, 256)]
    offline = "offline, 256 x 512 in, 128 out, greedy"
    rows = [
        *(row(name, side, value) for name in steps for side, value in ((STOCK, 4.0), (HOST, 2.1))),
        *(row("step, 256 requests, drawn", side, 1.0) for side in (HOST, STOCK)),
        *(row(offline, side, value) for side, value in ((STOCK, 1.4), (HOST, 1.0))),
        *(row("offline, 8 x 512 in, 128 out, greedy", side, 1.0) for side in (HOST, STOCK)),
        row("step, 1 requests, greedy", "rose", 1.0),
    ]
    found = {goal["name"]: (goal["value"], goal["limit"], goal["met"]) for goal in inside_vllm_bars(rows)}
    assert found == {
        "rose-in-vllm, goal: step, 1 requests, greedy": (0.525, 0.95, True),
        "rose-in-vllm, goal: step, 128 requests, greedy": (0.525, 0.6, True),
        "rose-in-vllm, goal: step, 256 requests, greedy": (0.525, 0.5, False),
        f"rose-in-vllm, goal: {offline}": (pytest.approx(1 / 1.4), 1 / 1.4, True),
    }


def test_goals_inside_vllm_are_for_cases_that_there_are() -> None:
    cases = {row["case"] for row in read(TABLES["offline_compare"].file)["rows"]}
    assert INSIDE_VLLM_TIMES.keys() <= cases


def trace_turn(
    backend: str, scale: float, value: float, mode: str = "greedy", **changes: float
) -> dict[str, Any]:
    figures = {f"p{share}_{metric}_ms": value * share for metric in METRICS for share in PERCENTILES}
    others = {"output_throughput": 1.0, "request_throughput": 1.0, "client_busy": 0.1, "failed": 0}
    return {"backend": backend, "mode": mode, "scale": scale, **figures, **others, **changes}


TRACE_ROWS = [
    trace_turn("rose", 0.1, 0.1),
    trace_turn("rose", 0.2, 0.1),
    trace_turn("vllm", 0.1, 0.2, p99_itl_ms=0.125),
    trace_turn("vllm", 0.2, 0.2),
    trace_turn("vllm", 0.2, 0.4),
]


ALT = "Latencies of 2 servers over the load"


def trace_report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = {"mean": 100.4, "p50": 69.5, "p90": 300.0, "p99": 808.0}
    trace = {
        "source": "a made-up trace",
        "num_requests": 1000,
        "seconds": 250.0,
        "length_scale": 0.1,
        "num_left_out": 16,
        "max_model_len": 1024,
        "input_length": lengths,
        "output_length": lengths,
        "best_prefix_hit_ratio": 0.774,
    }
    return report(rows, trace=trace, losses=trace_losses(rows))


def test_every_load_is_shown_with_the_workload() -> None:
    text = trace_table(trace_report(TRACE_ROWS))
    lines = text.splitlines()
    assert lines[:3] == ["Greedy:", "", f"![{ALT}, greedy](../figures/online_compare_greedy.svg)"]
    assert lines[4] == "| p50 / p90 / p99 in ms |  | Rose | vLLM |"
    assert lines[6] == "| scale 0.2, 20 requests/s | answered/s | 1 | 1 |"
    assert lines[7] == "|  | TTFT | 5 / 9 / 9.9 | 15 / 27 / 29.7 |"
    assert lines[8].startswith("|  | TPOT | ")
    assert lines[11] == "| scale 0.1, 40 requests/s | answered/s | 1 | 1 |"
    assert lines[12] == "|  | TTFT | 5 / 9 / 9.9 | 10 / 18 / 19.8 |"
    assert lines[4 + 2 + 2 * (1 + len(METRICS)) + 3] == "Slower in 1 of 24 comparisons:"
    assert "Medians of 1 to 2 turns, 1,000 requests each, some GPU, " in text
    assert "all lengths times 0.1, 16 requests left out that do not fit 1,024 tokens even so" in text
    assert "input 100 (p50 70, p99 808)" in text and "could supply 77% of the prompt blocks" in text
    assert "some model" in text and "Rose of rose, vLLM of vllm" in text


def test_losses_of_all_modes_are_named() -> None:
    sampled = [trace_turn(name, 0.1, value, "sampled") for name, value in (("rose", 0.2), ("vllm", 0.25))]
    sampled[0]["p50_ttft_ms"] = 130.0
    text = trace_table(trace_report([*TRACE_ROWS, *sampled]))
    picture = f"![{ALT}, sampled](../figures/online_compare_sampled.svg)\n"
    assert text.partition(picture)[2].splitlines()[3:5] == [
        "| scale 0.1, 40 requests/s | answered/s | 1 | 1 |",
        "|  | TTFT | 130 / 18 / 19.8 | 12.5 / 22.5 / 24.8 |",
    ]
    assert text.endswith(
        "Slower in 2 of 36 comparisons:\n\n"
        "- greedy, scale 0.1: Rose behind vLLM: ITL p99 9.9 ms against 0.125 ms\n"
        "- sampled, scale 0.1: Rose behind vLLM: TTFT p50 130 ms against 12.5 ms"
    )
    assert trace_table(trace_report(TRACE_ROWS[3:] + TRACE_ROWS[1:2])).endswith(
        "No losses in 12 comparisons."
    )


def test_every_figure_behind_a_peer_is_a_loss() -> None:
    rows = [
        *(trace_turn("rose", 0.1, 2.0, p99_itl_ms=value) for value in (100.0, 500.0, 600.0)),
        trace_turn("vllm", 0.1, 3.0),
        trace_turn("vllm", 0.2, 1.0),
        trace_turn("sglang", 0.1, 4.0, p50_ttft_ms=75.0),
        trace_turn("rose-in-vllm", 0.2, 1.0),
    ]
    found = [(loss["peer"], loss["figure"], loss["rose"], loss["peers"]) for loss in trace_losses(rows)]
    assert found == [
        ("vllm", "p99_itl_ms", 500.0, 297.0),
        ("sglang", "p50_ttft_ms", 100.0, 75.0),
        ("sglang", "p99_itl_ms", 500.0, 396.0),
    ]


def test_pictures_have_the_name_of_their_result() -> None:
    assert f"![{ALT}, greedy](../figures/some_trace_greedy.svg)" in trace_table(
        trace_report(TRACE_ROWS), "some_trace"
    )


def part_report(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "benchmark": "kv_append",
        "command": "python -m benchmarks.some",
        "machine": {"device": "some GPU"},
        "versions": {"torch": "2", "python": "3"},
        "settings": {"dtype": "float16", "num_layers": 12, "block_size": 64, "context": 512},
        "rows": rows,
        **changes,
    }


def figures(total: float, graph: float | None = None) -> dict[str, Any]:
    return {"total": {"median": total}} | ({} if graph is None else {"graph": {"median": graph}})


def test_all_ways_to_clone_are_shown() -> None:
    ways = {"loop": 900.0, "loop_filled": 80.0, "batched_torch": 85.0, "batched": 90.0}
    rows = [{"batch": batch, "variants": {way: figures(us) for way, us in ways.items()}} for batch in (1, 2)]
    lost = variant_losses(rows[:1], OURS["kv_cow_clone"])
    text = variants_table(part_report(rows, losses=lost, benchmark="kv_cow_clone"))
    assert (
        "| requests | one by one, layer by layer | one by one, filled part only | one plan, torch copies "
        "| one plan, one launch |" in text
    )
    assert "| 1 | 900 µs | 80 µs | 85 µs | 90 µs |" in text and "\n| 2 | 900 µs |" in text
    assert "Medians, some GPU, float16, 12 layers, blocks of 64, 512 tokens each; torch 2; `python -m" in text
    filled = "80 µs (one by one, filled part only)"
    assert text.endswith(
        "Slower in 3 of 10 comparisons:\n\n"
        f"- one plan, torch copies: batch of 1: 85 µs against {filled}\n"
        f"- one plan, one launch: batch of 1: 90 µs against {filled}; "
        "batch of 1: 90 µs against 85 µs (one plan, torch copies)"
    )
    none = variants_table(part_report(rows, losses=[], benchmark="kv_cow_clone"))
    assert none.endswith("No losses in 10 comparisons.")


def test_ways_to_append_are_shown_alone_and_in_a_graph() -> None:
    rows = [
        {
            "batch": 32,
            "variants": {
                "append": figures(300.0),
                "reserve_write": figures(400.0, 90.0),
                "reserve_fused": figures(200.0, 95.0),
            },
        }
    ]
    text = variants_table(part_report(rows, losses=variant_losses(rows, OURS["kv_append"])))
    assert "| 32 | 300 µs | 400 µs | 200 µs | 90 µs | 95 µs |" in text
    assert text.endswith(
        "Slower in 2 of 4 comparisons:\n\n"
        "- reserve, one write a layer: batch of 32: 400 µs against 300 µs (append one by one)\n"
        "- reserve, stored by attention, in a graph: batch of 32: 95 µs against 90 µs (reserve, one write a layer)"
    )


def test_losses_of_the_block_manager_are_shown() -> None:
    median = {"median": 10.0}
    lookups = {"get_computed_blocks.again": median, "match": median}
    sides = ("rose_core", "rose_in_vllm", "stock")
    scenes = {
        "steady_decode": {side: {"inside": median, "rolls_over": median} for side in sides},
        "long_prompt": dict.fromkeys(sides, lookups),
        "copy_on_write": median,
    }
    lost = [{"name": "some lookup", "side": "rose_in_vllm", "rose_us": 30.0, "stock_us": 20.0}]
    facts = {"scenes": scenes, "machine": {"cpu": "some processor"}, "versions": {"vllm": "1"}}
    text = block_manager_table(part_report([], losses=lost, **facts))
    of = "the comparisons with vLLM's manager"
    lookup = "- Rose behind vLLM's interface: some lookup: 30 µs against 20 µs"
    assert text.endswith(f"Slower in 1 of {of}:\n\n{lookup}")
    assert block_manager_table(part_report([], losses=[], **facts)).endswith(f"No losses in {of}.")


def test_a_loss_is_every_variant_of_rose_that_one_before_it_beats() -> None:
    variants = {"loop": figures(3.0), "slower": figures(7.0), "write": figures(4.0, 2.0)}
    rows: list[dict[str, Any]] = [
        {"batch": 1, "variants": {**variants, "fused": figures(5.0, 1.0)}},
        {"batch": 2, "variants": {**variants, "fused": figures(2.0, 2.5)}},
    ]
    found = variant_losses(rows, ("write", "fused"))
    assert [(loss["batch"], loss["figure"], loss["variant"], loss["faster"]) for loss in found] == [
        (1, "total", "write", "loop"),
        (1, "total", "fused", "loop"),
        (1, "total", "fused", "write"),
        (2, "total", "write", "loop"),
        (2, "graph", "fused", "write"),
    ]
    assert (found[0]["us"], found[0]["faster_us"]) == (4.0, 3.0)


def kernel_report(**changes: Any) -> dict[str, Any]:
    def sides(peer_us: float) -> dict[str, Any]:
        return {
            "Rose": {"p50_us": 20.0, "copy_share": 0.5, "tflop_per_s": 77.0},
            "slow": {"p50_us": 90.0, "times_rose": 4.5},
            "best": {"p50_us": peer_us, "times_rose": peer_us / 20.0},
        }

    rows = [
        {"case": name, "family": name.split()[0], "sides": sides(30.0)}
        for name in ("decode A", "decode B", "prefill A")
    ]
    rows[0]["sides"] = sides(19.0)
    report = {
        "gpu": "some GPU",
        "driver": "1.2",
        "copy_bytes_per_s": 4.1e12,
        "versions": {"torch": "2.11", "python": "3.12"},
        "missing_peers": {},
        "families": {"decode": {"unproved_because": None}},
        "rows": rows,
    }
    return {**report, **changes}


def test_kernels_are_compared_with_the_best_peer_and_losses_are_named() -> None:
    text = kernels_table(kernel_report())
    assert "| decode A | 20 µs | 50% of copy | 19 µs, best | 0.95x |" in text
    assert "| decode B | 20 µs | 50% of copy | 30 µs, best | 1.50x |" in text
    assert "| prefill A | 20 µs | 77 TFLOP/s | 30 µs, best | 1.50x |" in text
    source = (
        "Medians, some GPU, driver 1.2, copy 4.10 TB/s; torch 2.11; `python -m benchmarks.kernels --prove`."
    )
    assert source in text
    assert text.endswith("Slower in 1 of 3 cases:\n\n- behind best: decode A (0.95x)")


LACKS = {"sglang": "no module\nsecond line"}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (report(ROWS, missing=LACKS), "not every engine has run: sglang (no module)"),
        (report(ROWS, failed=LACKS), "not every engine has run: sglang (no module)"),
        (
            poisson_report([*SERVED, poisson_turn("random", None, HOST, 3.0, failed=2)]),
            f"2 requests of {HOST} failed",
        ),
        (
            poisson_report([row for row in SERVED if row["backend"] == HOST]),
            "both sides are needed at every load",
        ),
        (trace_report([trace_turn("rose", 0.1, 1.0, failed=3)]), "3 requests of rose failed"),
        (
            kernel_report(families={"decode": {"unproved_because": "one failed"}}),
            "decode is unproved: one failed",
        ),
        (kernel_report(missing_peers={"best": "no module"}), "not every peer was timed: best (no module)"),
        (
            kernel_report(rows=[{"case": "work", "sides": {"Rose": {}, "best": {"error": "broke"}}}]),
            "not every peer was timed: best in work (broke)",
        ),
    ],
)
def test_what_failed_or_is_incomplete_or_unproved_is_not_published(
    result: dict[str, Any], message: str
) -> None:
    assert problems(result) == [message]


def test_what_is_whole_is_published() -> None:
    for result in (report(ROWS), poisson_report(SERVED), trace_report(TRACE_ROWS), kernel_report()):
        assert problems(result) == []
