"""Serve a model that counts on from each request's own start, and compare every number of every answer.

    python -m tests.counting [--host standalone|vllm] [--requests N] [--drafts D ...] [--rose JSON]

Requests share prefixes of any length, have siblings, are preempted in a small pool, and are left after 1 to 40 ms and
sent again. Prints what was served and what the engine has counted; status 1 and the wrong numbers where there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.counting.checkpoint import write_counting_gpt2
from tests.counting.hosts import Settings, can_sample, run_in_vllm, run_standalone
from tests.counting.traffic import Requests, serve

HOSTS = {"standalone": run_standalone, "vllm": run_in_vllm}


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", choices=HOSTS, default="standalone")
    parser.add_argument("--requests", type=int, default=2000, help="of all engines together (default: 2000)")
    parser.add_argument("--concurrency", type=int, default=96, help="clients (default: 96)")
    parser.add_argument("--seqs", type=int, default=32, help="of a step (default: 32)")
    parser.add_argument("--blocks", type=int, default=80, help="of the KV pool (default: 80)")
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[0, 3], help="of a request, an engine each (default: 0 3)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rose", type=json.loads, default={}, help="further options of Rose's, as JSON")
    options = parser.parse_args(arguments)
    num_requests = -(-options.requests // len(options.drafts))
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        model = write_counting_gpt2(Path(folder), dtype)
        for num_drafts in options.drafts:
            settings = Settings(model, options.seqs, options.blocks, num_drafts, options.rose)
            requests = Requests(options.seed, samples=can_sample(options.host, num_drafts))
            send = functools.partial(
                serve, requests=requests, num_requests=num_requests, concurrency=options.concurrency
            )
            started_s = time.monotonic()
            outcome, counts = asyncio.run(HOSTS[options.host](settings, send))
            print(
                f"{options.host}, {settings}: {outcome.num_requests} requests, {outcome.num_aborts} aborts, "
                f"{time.monotonic() - started_s:.0f} s; {counts}",
                *outcome.wrong,
                sep="\n",
                flush=True,
            )
            if outcome.wrong:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
