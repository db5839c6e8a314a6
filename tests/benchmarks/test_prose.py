"""Sentences of README and docs/performance that give numbers of results give those that the results have."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import report
from benchmarks.reports import serving
from benchmarks.reports.engines import HOST, STOCK, by_case, compared, fastest_peers
from benchmarks.reports.text import grouped

Result = dict[str, Any]
STEPS = [f"step, {num_requests} requests, greedy" for num_requests in (1, 8, 32, 128, 256)]


def medians(name: str) -> dict[str, dict[str, float]]:
    """Return case -> side -> median of a result."""
    cases = by_case(report.read(name)["rows"])
    return {case: {side: compared(row) for side, row in sides.items()} for case, sides in cases.items()}


def turns(name: str, case: str, side: str) -> list[float]:
    row = by_case(report.read(name)["rows"])[case][side]
    return sorted(turn[row["figure"]] for turn in row["turns"])


def span(values: list[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def shares(name: str) -> str:
    """Return the range of Rose's greedy steps inside vLLM over vLLM's fastest published ones."""
    result = report.read(name)
    cases = {case: sides for case, sides in by_case(result["rows"]).items() if case in STEPS}
    fastest = {case: fastest_peers(result, sides, report.published())[STOCK] for case, sides in cases.items()}
    return span([compared(sides[HOST]) / fastest[case] for case, sides in cases.items()])


def first_token(name: str, scale: float, side: str) -> list[float]:
    rows = grouped(report.read(name)["rows"], "mode", "scale", "backend")["greedy", scale, side]
    return [row["p50_ttft_ms"] for row in rows]


def answered(name: str, scale: float, side: str) -> str:
    figures = serving.points(report.read(name)["rows"])["greedy", scale][side]
    return f"{figures['request_throughput']:.0f}"


def at_a_glance() -> str:
    qwen3, llama = shares("h200/vllm_qwen3.json"), shares("h200/vllm_llama8b_start_1.json")
    return (
        f"a decode step inside vLLM takes {qwen3} of the fastest time that we measured for vLLM with Qwen3 0.6B, and "
        f"{llama} with Llama 3.1 8B."
    )


def attention_alone() -> str:
    cases = medians("h200/vllm_parts.json")
    worth = [cases[case][STOCK] / cases[case][f"{HOST}, only attention"] for case in STEPS if case in cases]
    slower, faster = 1 - min(worth), max(worth) - 1
    return f"switched on alone inside vLLM they make a step {slower:.0%} slower to {faster:.0%} faster"


def mend() -> str:
    result = report.read("h200/standalone_before_after.json")
    worth = [each["after / before"] for each in result["medians"].values()]
    return f"which changed the engine's speed by {max(abs(1 - each) for each in worth):.0%} at most"


def fast_run() -> str:
    cases = medians("earlier/h200_offline_compare_0363667.json")
    one, most = (cases[f"step, {count} requests, greedy"] for count in (1, 256))
    return (
        f"SGLang took {one['sglang']:.2f} ms with one request and {most['sglang']:.2f} ms with 256, Rose standalone "
        f"{one['rose']:.3f} and {most['rose']:.3f}"
    )


def drawn_and_greedy() -> str:
    cases = medians("h200/qwen3_modes.json")
    drawn = [
        cases[case.replace("greedy", "top-k 50, top-p 0.9")]["rose"] / cases[case]["rose"] for case in STEPS
    ]
    one, eight, some, more, most = (f"{share:.2f}" for share in drawn)
    assert (one, some) == (eight, more)
    return (
        f"takes {one} of a greedy step's time with 1 or 8 requests, {some} with 32 or 128 and {most} with 256"
    )


def experts() -> str:
    cases = medians("h200/vllm_gpt_oss.json")
    gains = [cases[case][STOCK] / cases[case][HOST] - 1 for case in STEPS[1:]]
    return f"with 8 requests and more: there Rose is ahead by {min(gains):.0%} to {max(gains):.0%}."


def sglang_turns() -> str:
    first, second, third = turns("h200/vllm_qwen3.json", STEPS[-1], "sglang")
    return f"SGLang's three turns at 256 requests were {first:.2f}, {second:.2f} and {third:.2f} ms"


def nano_vllm_turns() -> str:
    name = "h200/vllm_qwen3.json"
    case = next(case for case in medians(name) if case.startswith("nano-vllm"))
    of = {side: span(turns(name, case, side)) for side in ("rose", HOST, STOCK, "sglang")}
    return (
        f"The first table's turns are {of['rose']} s without vLLM, {of[HOST]} s inside vLLM, {of[STOCK]} s for vLLM "
        f"and {of['sglang']} s for SGLang."
    )


def saturated() -> str:
    result = report.read("h200/vllm_trace.json")
    sent, (alone, rose) = (
        serving.requests_per_s(result, 0.014),
        (answered("h200/vllm_trace.json", 0.014, side) for side in (STOCK, HOST)),
    )
    return f"of {sent:.0f} requests a second it answers {alone}; with Rose it answers {rose}."


def first_tokens_of_turns(name: str, scale: float) -> str:
    rose, alone = (span(first_token(name, scale, side), ".0f") for side in (HOST, STOCK))
    return f"the median TTFT of single turns was {rose} ms with Rose and {alone} ms without"


def behind(name: str, scale: float | None = None) -> int:
    losses = report.read(name)["losses"]
    return sum(
        loss["backend"] == HOST and scale in (None, loss["scale"]) and loss["mode"] == "greedy"
        for loss in losses
    )


def one_behind() -> str:
    (loss,) = (each for each in report.read("h200/online_compare.json")["losses"] if each["scale"] > 0.01)
    return f"but for one median that is {loss['rose'] - loss['peers']:.1f} ms behind."


CLAIMS = {
    "README.md": [at_a_glance, attention_alone, mend],
    "docs/performance/engines.md": [fast_run, drawn_and_greedy],
    "docs/performance/inside_vllm.md": [experts, sglang_turns, nano_vllm_turns],
    "docs/performance/servers.md": [
        one_behind,
        saturated,
        lambda: first_tokens_of_turns("h200/online_compare.json", 0.009),
        lambda: first_tokens_of_turns("h200/vllm_trace.json", 0.006),
        lambda: f"Rose is behind in {behind('h200/vllm_trace.json')} of the 48 figures",
        lambda: f"it is behind vLLM in {behind('h200/online_compare.json', 0.009)} of 12 figures",
    ],
}
"""Page -> what makes each of its sentences, or parts of sentences, from the results."""


@pytest.mark.parametrize("page", CLAIMS)
def test_sentences_and_results_agree(page: str) -> None:
    text = " ".join((report.ROOT / page).read_text().split())
    assert [claim for make in CLAIMS[page] if (claim := make()) not in text] == []


def test_what_is_said_to_be_older_is_older_and_nothing_else_is() -> None:
    mended = report.read("h200/standalone_before_after.json")["date"]
    of_gpt2 = {
        what: report.read(report.TABLES[table].file)["date"]
        for what, table, *_ in report.SUMMARY
        if what.startswith("standalone")
    }
    assert [what for what, date in of_gpt2.items() if date < mended] == [
        what for what in of_gpt2 if what.startswith("standalone: server")
    ]


def test_rose_is_ahead_where_it_is_said_to_be_ahead_everywhere() -> None:
    result = report.read("h200/offline_compare.json")
    for sides in by_case(result["rows"]).values():
        peer = min(fastest_peers(result, sides, report.published()).values())
        assert all(compared(sides[host]) < peer for host in ("rose", HOST))
    trace = serving.points(report.read("h200/online_compare.json")["rows"])
    for sides in trace.values():
        assert all(
            sides["rose"][f] < sides[peer][f] for peer in (STOCK, "sglang") for f in serving.FIGURES
        ), "`rose serve` is ahead of both peers in every figure"
