"""Send the same requests to several engines in turns, and compare what callers would see.

    python -m benchmarks.online_compare [trace] [--backends rose rose-in-vllm vllm sglang] [--scales 0.006 0.012 0.025]
                                        [--trace qwen_traceA_blksz_16.jsonl] [--json FILE] [--quick]
    python -m benchmarks.online_compare poisson [--sets random shared-prefix] [--loads 0.25 0.5 1.0] [--step-ms 1.5]
    python -m benchmarks.online_compare in-process [--backends rose vllm] [--share 0.5]
    python -m benchmarks.online_compare streams [--shape qwen3-0.6b --interval 0.125] [--arrivals fixed poisson]
                                        [--compare-step-budget]

Engines take turns as in offline_compare. Every turn has prompts that no engine has seen before.

trace: servers as users start them (rose serve, vllm serve, SGLang's launch_server) answer a chat trace, without --trace
one that is made up with its published statistics. --scales MULTIPLIES the times at which requests are sent: a smaller
scale is more load. All lengths are multiplied by --length-scale, and requests that do not fit the model's window even
so are left out and counted. Prompts share prefixes as the trace does, within one turn only.

poisson: ``vllm serve`` with Rose and with vLLM's own best backend. The first turn with each set of requests sends all
of them at once; then come Poisson arrivals at shares (--loads) of the requests per second that saturated vLLM's own
server, or at --rates. random: prompts of 512 random tokens, 128 new ones. shared-prefix: one of 8 system prompts of 500
tokens, which end inside a block, and a tail of 16 to 64 tokens. prefilled_tokens are prompt tokens less those found in
the prefix cache, as the server counts them; client_busy near 1 says that the client was the limit; server_busy are
cores that the server kept busy. With --step-ms no model runs, and figures are of the servers' own work alone.

in-process: streams of Rose's AsyncEngine and vLLM's AsyncLLM, each in one process with its callers, without HTTP.
First all requests at once: what an engine completes a second is its capacity. Then Poisson arrivals at --share of the
smallest capacity (or at --rate) for all ("same load"), and at --share of each engine's own capacity ("own load").

streams: --streams long streams run all the while, one after the other in each place, and prompts that no engine has
seen arrive --interval seconds apart: what do they do to the streams, and how long do they wait? Callers live in the
process of the engine's client (vLLM's AsyncLLM, Rose's RemoteEngine), without HTTP, with the event loop and the largest
step of the engine's own server. A gap is the time between two pieces of one stream as its caller gets them, and
benchmarks/online/streams.py says what else it means. --compare-step-budget: Rose in vLLM with a step budget, too. All
engines keep their models and KV caches on one GPU, of --kv-cache-tokens each, by default room for the streams and a few
prompts: for Llama 8B 16 GB and 15 GB, so that two engines fit 80 GB, and three 141 GB.

Figures have the names of ``vllm bench serve``: TTFT is the time to the first token from when a request was due, ITL the
gap between two pieces of an answer, TPOT the time per token behind the first one, E2EL the time to the last token. An
engine that makes fewer tokens than it was asked for has failed that request.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.online.workloads import WORKLOADS
from benchmarks.support.comparison import compare, parse_comparison


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    workload = WORKLOADS[arguments.pop(0) if arguments and arguments[0] in WORKLOADS else "trace"]
    return parse_comparison(__doc__, arguments, workload)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; the status is 1 if an engine or a request failed, or none was there."""
    return compare(parse_options(arguments))


if __name__ == "__main__":
    sys.exit(main())
