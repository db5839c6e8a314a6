"""Options that ``offline_compare`` and ``arrivals`` share: which engines, on what, and where each is installed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.checkpoint import GPT2_124M, LLAMA_1B, SHAPES, ModelFacts
from benchmarks.support.engines import EngineOptions

ROSE_HOSTS = ("rose", "rose-in-vllm")
_VLLMS = ("rose-in-vllm", "vllm")
QUICK_MODEL = "models/tiny-gpt2"
# The standalone engine serves GPT-2 only, and SGLang is not needed to tell what Rose is worth inside vLLM.
BACKENDS_BY_SHAPE = {LLAMA_1B: ("rose-in-vllm", "vllm")}
"""Those that run unless others are asked for, where that is not all of them."""


def add_engine_options(parser: argparse.ArgumentParser, backends: tuple[str, ...]) -> None:
    """Add the options; ``set_defaults``, ``engine_options`` and ``environment`` read them."""
    group = parser.add_argument_group("engines")
    group.add_argument("--backends", nargs="+", choices=backends)
    parser.set_defaults(offered_backends=backends)
    weights = group.add_mutually_exclusive_group()
    weights.add_argument("--model", help="checkpoint; default: random weights")
    weights.add_argument(
        "--shape", choices=SHAPES, default=GPT2_124M, help="of random weights (default: %(default)s)"
    )
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    group.add_argument("--dtype", help="default: float16, on a CPU float32")
    group.add_argument("--max-num-seqs", type=int, default=256, help="default: %(default)s")
    group.add_argument(
        "--kv-cache-tokens", type=int, help="KV cache of each engine (default: --max-num-seqs full windows)"
    )
    for option, value, text in (
        ("--python-path", "DIR", "where it is installed, if not where this runs"),
        ("--env", "NAME=VALUE", "variable for its process"),
        ("--engine-options", "JSON", "options in its own words, over those that are given here"),
    ):
        group.add_argument(
            option,
            action="append",
            default=[],
            type=_of_backend(backends),
            metavar=f"BACKEND={value}",
            help=f"{text}; may be given several times",
        )
    group.add_argument(
        "--no-pause",
        dest="pause",
        action="store_false",
        help="let idle engines run on beside the one that has its turn",
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the engines print here")
    parser.add_argument("--quick", action="store_true", help=f"a few seconds, small sizes on {QUICK_MODEL}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")


def set_defaults(options: argparse.Namespace) -> None:
    """Fill in what depends on the machine and on ``--quick``."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("float16" if options.device == "cuda" else "float32")
    if options.backends is None:
        usual = BACKENDS_BY_SHAPE.get(options.shape, options.offered_backends)
        options.backends = [backend for backend in options.offered_backends if backend in usual]
    if options.quick:
        if options.shape == GPT2_124M:
            options.model = options.model or QUICK_MODEL
        options.max_num_seqs = min(options.max_num_seqs, 16)
    size = ", two narrow layers" if options.quick else ""
    options.model_name = options.model or f"random weights, {SHAPES[options.shape]}'s shapes{size}"


def engine_options(
    options: argparse.Namespace, backend: str, model: str, facts: ModelFacts, switches_off: list[str]
) -> EngineOptions:
    """Return what a worker makes its engine from."""
    tokens = options.kv_cache_tokens or options.max_num_seqs * facts.max_model_len
    element_bytes = 4 if options.dtype == "float32" else 2
    # vLLM compiles its models for longer than all of a quick run takes.
    extra: dict[str, Any] = {"enforce_eager": True} if options.quick and backend in _VLLMS else {}
    for text in _given(options.engine_options, backend):
        extra |= json.loads(text)
    return EngineOptions(
        model=model,
        dtype=options.dtype,
        device=options.device,
        max_num_seqs=options.max_num_seqs,
        kv_cache_tokens=tokens,
        kv_cache_bytes=tokens * facts.kv_elements_per_token * element_bytes,
        switches_off=switches_off,
        extra=extra,
    )


def environment(options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Return the arguments of ``WorkerPool.add`` that say where a backend is installed."""
    paths = _given(options.python_path, backend)
    pairs = (text.partition("=") for text in _given(options.env, backend))
    # On a CPU each vLLM would bind its worker to the first core, where all of them start one after the other.
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if options.quick and backend in _VLLMS else {}
    return {
        "python_path": paths[-1] if paths else None,
        "environment": unbound | {name: value for name, _, value in pairs},
    }


def _of_backend(backends: tuple[str, ...]) -> Callable[[str], tuple[str, str]]:
    def parse(text: str) -> tuple[str, str]:
        backend, equals, value = text.partition("=")
        if not equals or backend not in backends:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, needed is BACKEND=..., BACKEND one of {', '.join(backends)}"
            )
        return backend, value

    return parse


def _given(values: list[tuple[str, str]], backend: str) -> list[str]:
    return [value for name, value in values if name == backend]
