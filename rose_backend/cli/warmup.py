"""``rose warmup``: compile a model's kernels before it is served, for example when a container image is built."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from typing import Any

from rose_backend.cli.options import add_engine_options, engine_options
from rose_backend.config import EngineConfig
from rose_backend.errors import ConfigError, RoseError


def add_warmup_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``rose warmup`` with its options."""
    parser = commands.add_parser(
        "warmup",
        help="compile a model's kernels into Triton's cache",
        description="Compile all kernels that generate and serve launch with the same options into Triton's cache "
        "(TRITON_CACHE_DIR), in one process per core, which takes minutes with two cores. Weights are not read: "
        "config.json is enough.",
    )
    parser.add_argument("path", metavar="PATH", help="local directory or Hugging Face id")
    group = parser.add_argument_group("GPU to compile for", "Without these: the one that is here.")
    group.add_argument(
        "--compute-capability",
        metavar="X.Y",
        help="such as 9.0 for H100 and H200; no GPU is needed",
    )
    group.add_argument(
        "--multiprocessors",
        type=int,
        metavar="N",
        help="of that GPU (default: those of A100, H100 SXM and H200, or B200)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=_warmup)


def _warmup(args: argparse.Namespace) -> int:
    config = EngineConfig(model=args.path, **engine_options(args))
    capability = _capability(args.compute_capability)
    if args.multiprocessors is not None and capability is None:
        raise ConfigError("multiprocessors: allowed with --compute-capability only")
    print(
        f"compiling kernels for {args.path}, in one process per core: with two cores this takes minutes",
        flush=True,
    )
    _log_progress()
    # Imported here: neither --help, nor mistakes in the options, nor the line above should wait for torch.
    from rose_backend.compile_ahead.pool import cache_directory
    from rose_backend.engine.gpu_startup import warm_cache

    start = time.perf_counter()
    kernels, failure = warm_cache(config, capability, args.multiprocessors)
    if failure is not None:
        raise RoseError(f"warmup: {failure}")
    num_cached = sum(kernel.was_cached for kernel in kernels)
    print(
        f"{len(kernels)} kernels in {cache_directory()}: {len(kernels) - num_cached} compiled, {num_cached} there "
        f"before, {time.perf_counter() - start:.1f} s"
    )
    if not all(kernel.has_launcher for kernel in kernels):
        print(
            "what launches them needs CUDA's driver, which is not here: the first start compiles it, in seconds"
        )
    return 0


def _log_progress() -> None:
    """Let stderr have lines of progress where it is no terminal, which has a bar, unless ROSE_LOG_LEVEL is set."""
    if not sys.stderr.isatty() and "ROSE_LOG_LEVEL" not in os.environ:
        logging.getLogger("rose_backend.engine.progress").setLevel(logging.INFO)


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None:
        raise ConfigError(f"compute_capability: got {text!r}, allowed are numbers such as 8.0 and 9.0")
    return int(match[1]), int(match[2])
