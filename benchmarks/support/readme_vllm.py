"""The README's tables of Rose inside vLLM: servers under load, parts one by one, and a model of the Llama family."""

from __future__ import annotations

from typing import Any

from benchmarks.support.compare_parts import HOST, PAIRS, STOCK
from benchmarks.support.compare_report import Row, by_case, compared
from benchmarks.support.markdown import markdown, milliseconds
from benchmarks.support.readme_compare import (
    COMPARISON_COMMAND,
    LABELS,
    cell,
    check_complete,
    losses_line,
    source,
    versions,
)
from benchmarks.support.vllm_serving_report import OUTPUTS_APART, losses

SERVING_COMMAND = "python -m benchmarks.vllm_serving"
FOUR_API_SERVERS_COMMAND = " ".join(
    (SERVING_COMMAND, *(f"""--engine-options '{side}={{"api_server_count": 4}}'""" for side in (HOST, STOCK)))
)
PARTS_COMMAND = f"{COMPARISON_COMMAND} --backends rose-in-vllm vllm --compare-parts"
LLAMA_COMMAND = f"{COMPARISON_COMMAND} --shape llama-1b"

HOST_ONLY_COMMAND = " ".join(
    (
        SERVING_COMMAND,
        "--model models/tiny-gpt2 --device cpu --step-ms 1.5 --compare-joined-outputs --start-in-turn",
        "--loads 0.5 --requests 256 --clients 1",
    )
)

SIDES = (HOST, STOCK)
_SERVED = {HOST: LABELS[HOST], OUTPUTS_APART: "the same, `joined_outputs` off", STOCK: LABELS[STOCK]}
_FIGURES = {
    **{f"p{share}_{name}_ms": f"{name.upper()} p{share}" for name in ("ttft", "tpot") for share in (50, 99)},
    "output_throughput": "output tokens/s",
    "prefilled_tokens": "prefilled tokens",
}
NOISE = 0.02
"""Share of a time by which two sides may differ without a reason: a part within it neither pays nor costs."""


def serving_table(result: dict[str, Any]) -> str:
    """Return latencies, throughput and prefilled tokens at every load, every goal that was missed and every loss.

    Raises:
        SystemExit: a side is missing, or a request failed; such a comparison is not published.
    """
    failed = sum(row["failed"] for row in result["rows"])
    if failed or not all("times" in row for row in result["comparison"]):
        raise SystemExit(f"vllm_serving: {failed} requests failed, both sides are needed at every load")
    rows = []
    for row in result["comparison"]:
        for side, label in _SERVED.items():
            if side in row["medians"]:
                load = _load(row) if side == HOST else ""
                rows.append((load, label, *_serving_cells(row["medians"][side])))
        times = row["times"]
        ratio = times["output_throughput"]
        rows.append(("", "Rose / vLLM", _ratios(times, "ttft"), _ratios(times, "tpot"), f"{ratio:.2f}x", ""))
    header = ("", "", "TTFT p50 / p99", "TPOT p50 / p99", "output tokens/s", "prefilled tokens")
    missed = [
        f"{goal['name']} ({goal['value']:.2f} {goal['unit']}, at {'least' if goal['at_least'] else 'most'} "
        f"{goal['limit']:g})"
        for goal in result["bars"]
        if not goal["met"]
    ]
    verdict = f"Goals missed: {'; '.join(missed) if missed else 'none'}, of {len(result['bars'])}."
    return "\n\n".join((markdown(header, rows), _serving_source(result), verdict, _serving_losses(result)))


def parts_table(result: dict[str, Any]) -> str:
    """Return what each part is worth in every case, and which does not pay where.

    Raises:
        SystemExit: a side is missing or failed.
    """
    check_complete(result)
    cases = by_case(result["rows"])
    rows = [
        (f"{LABELS[side]}, all of it", *(cell(sides[side]) for sides in cases.values()))
        for side in (STOCK, HOST)
    ]
    idle, harmful = [], []
    for part, (without, with_it) in PAIRS.items():
        worth = {case: compared(sides[without]) / compared(sides[with_it]) for case, sides in cases.items()}
        rows.append((f"`{part}`", *(f"{times:.2f}x" for times in worth.values())))
        idle += [f"`{part}` in {case}" for case, times in worth.items() if abs(times - 1) <= NOISE]
        harmful += [
            f"`{part}` in {case} ({times:.2f}x)" for case, times in worth.items() if times < 1 - NOISE
        ]
    table = markdown(("time without / with the part", *cases), rows)
    verdict = (
        f"No difference (within {NOISE:.0%}): {'; '.join(idle) if idle else 'nowhere'}. "
        f"Slower with the part: {'; '.join(harmful) if harmful else 'nowhere'}."
    )
    return "\n\n".join((table, source(result), verdict))


def llama_table(result: dict[str, Any]) -> str:
    """Return every case of Rose inside vLLM beside vLLM, and every loss.

    Raises:
        SystemExit: a side is missing or failed.
    """
    check_complete(result)
    cases = by_case(result["rows"])
    rows = [
        (
            case,
            *(cell(sides[side]) for side in SIDES),
            f"{compared(sides[STOCK]) / compared(sides[HOST]):.2f}x",
        )
        for case, sides in cases.items()
    ]
    header = ("", *(LABELS[side] for side in SIDES), "vLLM / Rose in vLLM")
    return "\n\n".join((markdown(header, rows), source(result), losses_line(result, len(cases))))


def _load(row: Row) -> str:
    rate = "all at once" if row["rate"] is None else f"{row['rate']:.0f} requests/s"
    return f"{row['set']}, {rate}"


def _serving_losses(result: dict[str, Any]) -> str:
    lost = [
        f"{_load(loss)}: {_FIGURES[loss['figure']]} {_figure(loss, 'rose')} against {_figure(loss, 'peers')} "
        f"({_SERVED[loss['peer']]})"
        for loss in losses(result["comparison"])
    ]
    return f"Losses of Rose in vLLM: {'; '.join(lost) if lost else 'none'}."


def _figure(loss: dict[str, Any], side: str) -> str:
    return f"{milliseconds(loss[side])} ms" if loss["figure"].endswith("_ms") else f"{loss[side]:,.0f}"


def _serving_cells(medians: dict[str, float]) -> tuple[str, ...]:
    latencies = (
        " / ".join(milliseconds(medians[f"p{share}_{name}_ms"]) for share in (50, 99)) + " ms"
        for name in ("ttft", "tpot")
    )
    return (*latencies, f"{medians['output_throughput']:,.0f}", f"{medians['prefilled_tokens']:,.0f}")


def _ratios(times: dict[str, float], name: str) -> str:
    return " / ".join(f"{times[f'p{share}_{name}_ms']:.2f}x" for share in (50, 99))


def _serving_source(result: dict[str, Any]) -> str:
    settings, start_up = result["settings"], result["start_up_s"]
    turns: dict[tuple[str, float | None, str], int] = {}
    for row in result["rows"]:
        key = (row["set"], row["rate"], row["backend"])
        turns[key] = turns.get(key, 0) + 1
    counts = " to ".join(str(count) for count in sorted({min(turns.values()), max(turns.values())}))
    busiest = max(row["client_busy"] for row in result["rows"])
    step_ms = settings.get("step_ms")
    device = result["device"] if step_ms is None else f"no model, {step_ms:g} ms a step"
    return (
        f"Medians of {counts} turns, {settings['requests']} requests at once or {settings['seconds']:g} s of "
        f"Poisson arrivals, {device}, {settings['model']}, {settings['dtype']}; {versions(result)}; start-up "
        f"{', '.join(f'{LABELS[side]} {start_up[side]:.1f} s' for side in SIDES)}; "
        f"busiest client process {busiest:.0%} of a core; `{result['command']}`."
    )
