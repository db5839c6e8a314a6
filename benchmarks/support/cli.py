"""Command lines of benchmarks: options that several have, checks of values, and what engines are started with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support.checkpoint import GPT2_124M, LLAMA_1B, SHAPES, ModelFacts
from benchmarks.support.engines import EngineOptions
from benchmarks.support.worker_pool import worker_environment

QUICK_MODEL = "models/tiny-gpt2"


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with ``--quick`` and ``--json``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a short run on a CPU: small sizes, rough figures"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add what runs and where; ``set_model_defaults`` completes it."""
    parser.add_argument("--model", help="checkpoint; default: random weights, GPT-2 124M's shapes")
    add_device_options(parser)


def add_device_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--device`` and ``--dtype``; ``set_device_defaults`` completes them."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", help="default: float16, on a CPU float32")


def set_device_defaults(options: argparse.Namespace) -> None:
    """Fill in what depends on the machine."""
    import torch  # --help need not wait for it

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("float16" if options.device == "cuda" else "float32")


def set_model_defaults(options: argparse.Namespace) -> None:
    """Fill in what depends on the machine and on ``--quick``."""
    set_device_defaults(options)
    if options.quick:
        options.model = options.model or QUICK_MODEL
    options.model_name = options.model or "random weights, GPT-2 124M's shapes"


def fill_in(options: argparse.Namespace, **defaults: object) -> None:
    """Set options that were not given: to the first of two values, with ``--quick`` to the second."""
    for name, values in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])  # type: ignore[index]


def check_at_least(
    parser: argparse.ArgumentParser, options: argparse.Namespace, least: float, *names: str
) -> None:
    """Exit, naming option, value and limit, if a value or an entry of a list is below ``least``."""
    _check(parser, options, names, f"at least {least}", lambda value: value >= least)


def check_above_zero(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Exit, naming option and value, if a value or an entry of a list is not above 0 or not finite."""
    _check(parser, options, names, "above 0", lambda value: 0 < value < float("inf"))


def _check(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    names: tuple[str, ...],
    limit: str,
    is_allowed: Callable[[float], bool],
) -> None:
    for name in names:
        value = getattr(options, name)
        is_list = isinstance(value, list | tuple)
        if value is not None and not all(map(is_allowed, value if is_list else [value])):
            got = list(value) if is_list else value
            must = "each has to be " if is_list else "has to be " if limit == "above 0" else ""
            parser.error(f"--{name.replace('_', '-')}: got {got}, {must}{limit}")


_VLLMS = ("rose-in-vllm", "vllm")
# The standalone engine serves GPT-2 only, and SGLang is not needed to tell what Rose is worth inside vLLM.
BACKENDS_BY_SHAPE = {LLAMA_1B: ("rose-in-vllm", "vllm")}
"""Default engines of a shape, where that is not all of them."""


def add_engine_options(parser: argparse.ArgumentParser, backends: tuple[str, ...]) -> None:
    """Add the options; ``set_engine_defaults`` and ``add_engines`` read them."""
    group = parser.add_argument_group("engines")
    group.add_argument("--backends", nargs="+", choices=backends)
    parser.set_defaults(offered_backends=backends)
    weights = group.add_mutually_exclusive_group()
    weights.add_argument("--model", help="checkpoint; default: random weights")
    weights.add_argument(
        "--shape", choices=SHAPES, default=GPT2_124M, help="of random weights (default: %(default)s)"
    )
    add_device_options(group)
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


def set_engine_defaults(options: argparse.Namespace) -> None:
    """Fill in what depends on the machine and on ``--quick``."""
    set_device_defaults(options)
    if options.backends is None:
        usual = BACKENDS_BY_SHAPE.get(options.shape, options.offered_backends)
        options.backends = [backend for backend in options.offered_backends if backend in usual]
    if options.quick:
        if options.shape == GPT2_124M:
            options.model = options.model or QUICK_MODEL
        options.max_num_seqs = min(options.max_num_seqs, 16)
    size = ", two narrow layers" if options.quick else ""
    options.model_name = options.model or f"random weights, {SHAPES[options.shape]}'s shapes{size}"


def add_engines(
    engines: Any,
    sides: dict[str, tuple[str, list[str]]],
    options: argparse.Namespace,
    model: str,
    facts: ModelFacts,
) -> None:
    """Add every side, name -> backend and switched-off parts, to a ``WorkerPool`` or ``Servers``."""
    for name, (backend, switches_off) in sides.items():
        chosen = engine_options(options, backend, model, facts, switches_off)
        engines.add(name, backend, chosen, environment(options, backend))


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
        step_ms=getattr(options, "step_ms", None),
    )


def environment(options: argparse.Namespace, backend: str) -> dict[str, str]:
    """Return the variables of the process that runs a backend, which may be installed elsewhere."""
    paths = _given(options.python_path, backend)
    pairs = (text.partition("=") for text in _given(options.env, backend))
    # On a CPU each vLLM would bind its worker to the first core, where all of them start one after the other.
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if options.quick and backend in _VLLMS else {}
    chosen = unbound | {name: value for name, _, value in pairs}
    return worker_environment(backend, paths[-1] if paths else None, chosen)


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
