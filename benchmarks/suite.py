"""Run the published benchmarks one after the other, each into a file of its own, within a limit of time.

    python -m benchmarks.suite [--steps kernels offline_compare] [--max-seconds 1800] [--results DIR] [--quick]
                               [--python-path vllm=DIR] [--env sglang=NAME=VALUE]

Steps begin in the order of --list, or of --steps. One that is at it when the time is up is interrupted; comparisons
then write the turns that were whole, and with --resume take only those that the files in --results lack. Random
checkpoints are made once, in a folder that all steps share, so that vLLM compiles once. --python-path and --env go to
the steps that compare engines. The status is 1 if a step failed or was left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.support.checkpoint import KEPT_IN
from benchmarks.support.engines import as_flags

ROOT = Path(__file__).resolve().parent.parent
MIN_SECONDS = 20.0  # a step does not begin with less
GRACE_SECONDS = 45.0  # from the interrupt until a step that does not end is killed

_ENGINES = ("rose", "rose-in-vllm", "vllm", "sglang")
_INSIDE_VLLM = ("rose-in-vllm", "vllm")
_OFFLINE, _ONLINE = "benchmarks.offline_compare", "benchmarks.online_compare"
_FOUR_API_SERVERS = """--engine-options '{}={{"api_server_count": 4}}'"""

_TRACE = "--backends rose-in-vllm vllm --scales 0.006 0.009 0.014 0.028 --modes greedy --repeats 5"
_GREEDY_STEPS = "--scenes decode offline --batches 1 8 32 128 256 --cases greedy --repeats 3"
_STEPS_AND_NANO_VLLM = (
    "--scenes decode offline nano-vllm --batches 1 8 32 128 256 --cases greedy nano-vllm --repeats 3"
)
_QWEN3 = "--shape qwen3-0.6b --dtype bfloat16 --kv-cache-tokens 196608"
_GEMMA3 = "--shape gemma-3-4b --dtype bfloat16 --kv-cache-tokens 163840"
_GPT_OSS = "--shape gpt-oss-20b --dtype bfloat16 --kv-cache-tokens 163840"
_STREAMS = f"{_ONLINE} streams --backends rose rose-in-vllm vllm --dtype bfloat16 --prompts 300"
_POISSON = "--requests 512 --seconds 3 --repeats 3"
_TWO_RANKS = '{"data_parallel_size":2,"enable_expert_parallel":true}'
_SHARED_PREFIXES = f"{_ONLINE} poisson --sets shared-prefix --loads 0.25 0.5 0.75 1.0 {_POISSON}"
_NGRAM = (
    '{"enable_flashinfer_autotune":false,"speculative_config":{"method":"ngram","num_speculative_tokens":3,'
    '"prompt_lookup_max":3,"rejection_sample_method":"synthetic","synthetic_acceptance_rates":[0.81,0.656,0.531]}}'
)


def _eagle3(num_drafts: int, acceptance: str) -> str:
    return (
        '{"enable_flashinfer_autotune":false,"speculative_config":{"method":"eagle3","model":"eagle3-head",'
        f'"num_speculative_tokens":{num_drafts},"rejection_sample_method":"synthetic",{acceptance}}}}}'
    )


# A first draft that is always right, and a third that never is.
_EAGLE3 = _eagle3(3, '"synthetic_acceptance_length":2.7')
# Each draft is as likely to be right as the one before it; 2.7 tokens a step with three of them.
_EAGLE3_CHAT = _eagle3(3, '"synthetic_acceptance_rates":[0.7415,0.5498,0.4077]')
_EAGLE3_CHAT_7 = _eagle3(7, '"synthetic_acceptance_rates":[0.7415,0.5498,0.4077,0.3023,0.2242,0.1662,0.1233]')
_EAGLE3_NEVER = _eagle3(3, '"synthetic_acceptance_rates":[0,0,0]')
_LLAMA_DRAFTS = (
    f"{_OFFLINE} --shape llama-8b --dtype bfloat16 --scenes decode --batches 1 32 256 --cases greedy "
    "--kv-cache-tokens 81920"
)
_EAGLE3_ALONE = _EAGLE3_CHAT.replace('"enable_flashinfer_autotune":false,', "")
STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kernels": ("benchmarks.kernels --prove", ()),
    "kernels_int4": ("benchmarks.kernels --prove --families int4", ()),
    "kernels_float8_rows": ("benchmarks.kernels --families float8 --match 'by rows'", ()),
    "kernels_float8_blocks": ("benchmarks.kernels --families float8 --match 'by blocks'", ()),
    "draft_changes": ("benchmarks.draft_changes --dtype bfloat16", ()),
    "hit_differences_qwen3": (
        "benchmarks.hit_differences --shape qwen3-0.6b --dtype bfloat16",
        _ENGINES[:3],
    ),
    "kv_cow_clone_float16": ("benchmarks.kv_cow_clone --device cuda --dtype float16", ()),
    "kv_append": ("benchmarks.kv_append --device cuda --dtype float16", ()),
    "offline_compare": (f"{_OFFLINE} --scenes decode offline --repeats 5", _ENGINES),
    "offline_mixed": (f"{_OFFLINE} --scenes mixed", _ENGINES),
    "arrivals": (f"{_ONLINE} in-process", _ENGINES[:3]),
    "offline_switches": (
        f"{_OFFLINE} --backends rose --scenes decode offline --batches 1 256 --compare-fused-mlp "
        "--compare-fused-sampler --compare-fused-kv-append --compare-fused-add-layernorm --compare-cuda-graph "
        "--compare-prefix-cache --compare-run-ahead",
        ("rose",),
    ),
    "online_compare": (f"{_ONLINE} --scales 0.006 0.009 0.014 0.028", _ENGINES),
    "vllm_serving": (
        f"{_ONLINE} poisson --sets random shared-prefix --loads 0.25 0.5 0.75 1.0 {_POISSON}",
        _INSIDE_VLLM,
    ),
    "vllm_serving_4_api_servers": (
        f"{_ONLINE} poisson --sets random --loads 0.5 1.0 {_POISSON} "
        f"{_FOUR_API_SERVERS.format('rose-in-vllm')} {_FOUR_API_SERVERS.format('vllm')}",
        _INSIDE_VLLM,
    ),
    "vllm_parts": (
        f"{_OFFLINE} --backends rose-in-vllm vllm --compare-parts --scenes decode offline --batches 1 32 256 "
        "--cases greedy --kv-cache-tokens 196608 --repeats 3",
        _INSIDE_VLLM,
    ),
    **dict.fromkeys(
        ("vllm_gpt2_start_1", "vllm_gpt2_start_2", "vllm_gpt2_start_3"),
        (f"{_OFFLINE} --backends rose-in-vllm vllm {_GREEDY_STEPS}", _INSIDE_VLLM),
    ),
    "vllm_qwen3": (f"{_OFFLINE} --backends {' '.join(_ENGINES)} {_STEPS_AND_NANO_VLLM} {_QWEN3}", _ENGINES),
    "vllm_qwen3_start_2": (f"{_OFFLINE} --backends rose-in-vllm vllm {_GREEDY_STEPS} {_QWEN3}", _INSIDE_VLLM),
    "vllm_qwen3_start_3": (
        f"{_OFFLINE} --backends {' '.join(_ENGINES[:3])} {_STEPS_AND_NANO_VLLM} {_QWEN3}",
        _ENGINES[:3],
    ),
    "qwen3_30b_a3b": (
        f"{_OFFLINE} --backends rose vllm --shape qwen3-30b-a3b --dtype bfloat16 --kv-cache-tokens 16384 "
        "--scenes decode --batches 1 8 32 --cases greedy --repeats 3",
        ("rose", "vllm"),
    ),
    **dict.fromkeys(
        ("vllm_llama8b_start_1", "vllm_llama8b_start_2"),
        (
            f"{_OFFLINE} --backends rose rose-in-vllm vllm {_GREEDY_STEPS} --shape llama-8b --dtype bfloat16 "
            "--kv-cache-tokens 163840",
            _ENGINES[:3],
        ),
    ),
    **{
        f"vllm_{name}_fp8": (
            f"{_OFFLINE} --backends rose rose-in-vllm vllm --shape {shape} --dtype bfloat16 --max-num-seqs 128 "
            "--scenes decode offline --batches 1 8 32 128 --cases greedy --offline 64 512 128",
            _ENGINES[:3],
        )
        for name, shape in (("llama8b", "llama-8b-fp8"), ("qwen3_8b", "qwen3-8b-fp8"))
    },
    **{
        f"vllm_llama8b_{name}": (
            f"{_OFFLINE} --backends {' '.join(backends)} --shape llama-8b-{name} --dtype bfloat16 --max-num-seqs 128 "
            "--scenes decode offline --batches 1 8 32 64 128 --cases greedy --offline 64 512 128 "
            """--engine-options 'rose-in-vllm={"enable_flashinfer_autotune":false}' """
            """--engine-options 'vllm={"enable_flashinfer_autotune":false}'""",
            backends,
        )
        for name, backends in (("int4", _ENGINES[:3]), ("awq", _INSIDE_VLLM))
    },
    "vllm_qwen3_14b_awq": (
        f"{_OFFLINE} --shape qwen3-14b-awq --dtype bfloat16 --max-num-seqs 32 --scenes decode --batches 1 32 "
        "--cases greedy --backends rose-in-vllm vllm "
        """--engine-options 'rose-in-vllm={"enable_flashinfer_autotune":false}' """
        """--engine-options 'vllm={"enable_flashinfer_autotune":false}'""",
        _INSIDE_VLLM,
    ),
    "vllm_llama": (
        f"{_OFFLINE} --shape llama-1b --scenes decode offline --cases greedy --repeats 3",
        _INSIDE_VLLM,
    ),
    **{
        f"vllm_{name}": (
            f"{_OFFLINE} --shape {shape} --dtype bfloat16 --backends rose-in-vllm vllm --scenes decode "
            f"--batches 1 32 256 --cases greedy --compare-drafts --kv-cache-tokens {room} "
            f"--engine-options 'rose-in-vllm={options}' --engine-options 'vllm={options}'",
            _INSIDE_VLLM,
        )
        for name, shape, options, room in (
            ("ngram_qwen3", "qwen3-0.6b", _NGRAM, 98_304),
            ("ngram_llama8b", "llama-8b", _NGRAM, 98_304),
            ("eagle3_qwen3", "qwen3-0.6b", _EAGLE3, 98_304),
            ("eagle3_llama8b", "llama-8b", _EAGLE3, 81_920),
        )
    },
    "vllm_eagle3_7_drafts_llama8b": (
        f"{_LLAMA_DRAFTS} --backends rose-in-vllm vllm --engine-options 'rose-in-vllm={_EAGLE3_CHAT_7}' "
        f"--engine-options 'vllm={_EAGLE3_CHAT_7}'",
        _INSIDE_VLLM,
    ),
    "vllm_eagle3_never_right_llama8b": (
        f"{_LLAMA_DRAFTS} --backends rose-in-vllm --compare-drafts --compare-host rose-in-vllm "
        f"--engine-options 'rose-in-vllm={_EAGLE3_NEVER}'",
        _INSIDE_VLLM[:1],
    ),
    "eagle3_llama8b": (
        f"{_LLAMA_DRAFTS} --backends rose rose-in-vllm --compare-drafts --compare-host rose-in-vllm "
        f"--engine-options 'rose={_EAGLE3_ALONE}' --engine-options 'rose-in-vllm={_EAGLE3_CHAT}'",
        _ENGINES[:2],
    ),
    "vllm_gpt_oss": (f"{_OFFLINE} --backends rose-in-vllm vllm {_GREEDY_STEPS} {_GPT_OSS}", _INSIDE_VLLM),
    "vllm_gemma3_serving": (f"{_SHARED_PREFIXES} {_GEMMA3}", _INSIDE_VLLM),
    "vllm_gpt_oss_serving": (f"{_SHARED_PREFIXES} {_GPT_OSS}", _INSIDE_VLLM),
    "vllm_trace": (f"{_ONLINE} {_TRACE}", _INSIDE_VLLM),
    "vllm_trace_rust": (f"{_ONLINE} {_TRACE} --rust-front-end", _INSIDE_VLLM),
    "streams_llama8b": (f"{_STREAMS} --shape llama-8b --stream-tokens 2048", _ENGINES[:3]),
    "streams_qwen3": (
        f"{_STREAMS} --shape qwen3-0.6b --interval 0.125 --compare-step-budget --arrivals fixed poisson",
        _ENGINES[:3],
    ),
    "vllm_request_kinds_qwen3": (
        "benchmarks.vllm_request_kinds --shape qwen3-0.6b --dtype bfloat16 --starts 3 --steps 64 --kinds plain "
        "penalties bias 'bad words' min_tokens '5 log-probabilities' 'JSON schema'",
        _INSIDE_VLLM,
    ),
    "vllm_adapters_qwen3": (
        "benchmarks.vllm_request_kinds --shape qwen3-0.6b --dtype bfloat16 --starts 3 --steps 48 --kinds plain "
        "--start-at-once --adapters 8 --adapter-rank 16 "
        "--engine-options 'rose-in-vllm={\"kv_cache_memory_bytes\":4000000000}' "
        "--engine-options 'vllm={\"kv_cache_memory_bytes\":4000000000}'",
        _INSIDE_VLLM,
    ),
    "vllm_qwen3_vl": (
        "benchmarks.vllm_request_kinds --shape qwen3-vl-4b --dtype bfloat16 --starts 2 --steps 48 --kinds plain "
        "--start-at-once --engine-options 'rose-in-vllm={\"kv_cache_memory_bytes\":6000000000}' "
        "--engine-options 'vllm={\"kv_cache_memory_bytes\":6000000000}'",
        _INSIDE_VLLM,
    ),
    "vllm_qwen3_5": (
        "benchmarks.vllm_request_kinds --shape qwen3.5-4b --dtype bfloat16 --starts 2 --steps 48 --kinds plain "
        "--start-at-once --engine-options "
        '\'rose-in-vllm={"kv_cache_memory_bytes":18000000000,"gdn_prefill_backend":"triton"}\' '
        '--engine-options \'vllm={"kv_cache_memory_bytes":18000000000,"gdn_prefill_backend":"triton"}\'',
        _INSIDE_VLLM,
    ),
    "vllm_experts_2_ranks": (
        f"{_OFFLINE} --backends rose-in-vllm vllm --shape qwen3-30b-a3b-12-layers --dtype bfloat16 "
        "--kv-cache-tokens 163840 --scenes decode --batches 1 32 256 --cases greedy --repeats 3 "
        f"--engine-options 'rose-in-vllm={_TWO_RANKS}' --engine-options 'vllm={_TWO_RANKS}'",
        _INSIDE_VLLM,
    ),
    # Not published from an H200 yet.
    "vllm_gemma3": (f"{_OFFLINE} --backends rose-in-vllm vllm {_GREEDY_STEPS} {_GEMMA3}", _INSIDE_VLLM),
    "sglang_gpt2": (
        f"{_OFFLINE} --backends rose-in-vllm sglang {_GREEDY_STEPS}",
        ("rose-in-vllm", "sglang"),
    ),
}
"""Result file -> what follows ``python -m`` (with ``--quick`` up to the first option), and the engines it compares."""


def command(name: str, options: argparse.Namespace, result: Path) -> list[str]:
    """Return the command line of a step that writes ``result``."""
    arguments, backends = STEPS[name]
    words = shlex.split(arguments)
    if options.quick:
        words = [*itertools.takewhile(lambda word: not word.startswith("--"), words), "--quick"]
    for option in ("python_path", "env"):
        for text in getattr(options, option):
            words += as_flags({option: text}) if text.partition("=")[0] in backends else []
    words += ["--resume", str(result)] if resumes(name, options, result) else []
    return [sys.executable, "-m", *words, "--json", str(result)]


def resumes(name: str, options: argparse.Namespace, result: Path) -> bool:
    """Whether a step goes on from what is in ``result``: comparisons of engines can."""
    return options.resume and STEPS[name][0].startswith((_OFFLINE, _ONLINE)) and result.is_file()


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", nargs="+", choices=list(STEPS), default=list(STEPS), metavar="STEP")
    add("--list", action="store_true", help="print the steps' commands and end")
    add("--max-seconds", type=float, default=float("inf"), help="for all steps together")
    add("--results", type=Path, default=Path("build/suite"), metavar="DIR", help="(default: %(default)s)")
    add("--resume", action="store_true", help="keep turns that comparisons in --results hold")
    add("--quick", action="store_true", help="each step with its --quick, on a CPU, too")
    for option, value in (("--python-path", "BACKEND=DIR"), ("--env", "BACKEND=NAME=VALUE")):
        add(option, action="append", default=[], metavar=value, help="for comparisons")
    options = parser.parse_args(arguments)
    if options.max_seconds <= 0:
        parser.error(f"--max-seconds: got {options.max_seconds}, has to be above 0")
    return options


def run_step(command: list[str], log: Path, environment: dict[str, str], seconds: float) -> str:
    """Run a command in a session of its own, interrupted after ``seconds``; return how it ended."""
    with log.open("wb") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            status = process.wait(None if seconds == float("inf") else seconds)
            return "done" if status == 0 else f"ended with status {status}"
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
            # Only the benchmark itself: what it has started it ends itself.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE_SECONDS)
                outcome = "interrupted"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                outcome = "killed"
            if isinstance(stop, KeyboardInterrupt):
                raise
            return outcome


def run(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Run all steps; return for each its name, how it ended, its seconds and whether there is a result."""
    deadline, rows = time.monotonic() + options.max_seconds, []
    folder = options.results.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as checkpoints:
        environment = {**os.environ, KEPT_IN: os.environ.get(KEPT_IN, checkpoints)}
        for name in options.steps:
            start, result, log = time.monotonic(), folder / f"{name}.json", folder / f"{name}.log"
            if not resumes(name, options, result):
                result.unlink(missing_ok=True)
            outcome = "no time left"
            if deadline - start >= MIN_SECONDS:
                console.print(f"{name}: {log}")
                outcome = run_step(command(name, options, result), log, environment, deadline - start)
            row = {"step": name, "outcome": outcome, "seconds": time.monotonic() - start}
            rows.append({**row, "has_result": result.is_file()})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite and say how each step ended."""
    options = parse_options(arguments)
    console = Console(soft_wrap=True)
    if options.list:
        for name in options.steps:
            words = command(name, options, options.results / f"{name}.json")
            console.print(f"{name}: python {subprocess.list2cmdline(words[1:])}", markup=False)
        return 0
    # Steps inherit it if interrupts are ignored here, as in a background job of a shell script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = run(options, console)
    for row in rows:
        result = "a result" if row["has_result"] else "no result"
        console.print(f"{row['step']}: {row['outcome']} after {row['seconds']:.0f} s, {result}")
    return int(any(row["outcome"] != "done" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
