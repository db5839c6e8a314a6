"""Command lines of benchmarks: options that several have, defaults, and checks of values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

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


def add_device_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--device`` and ``--dtype``; ``set_device_defaults`` completes them."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", help="default: float16, on a CPU float32")


def set_device_defaults(options: argparse.Namespace) -> None:
    """Fill in what depends on the machine."""
    import torch  # --help need not wait for it

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("float16" if options.device == "cuda" else "float32")


def fill_in(options: argparse.Namespace, **defaults: tuple[object, object]) -> None:
    """Set options that were not given: to the first of two values, with ``--quick`` to the second."""
    for name, values in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])


def check_at_least(
    parser: argparse.ArgumentParser, options: argparse.Namespace, least: float, *names: str
) -> None:
    """Exit, naming option, value and limit, if a value or an entry of a list is below ``least``."""
    _check(parser, options, names, f"at least {least}", lambda value: value >= least)


def check_above_zero(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Exit, naming option and value, if a value or an entry of a list is not above 0."""
    _check(parser, options, names, "has to be above 0", lambda value: value > 0)


def _check(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    names: tuple[str, ...],
    limit: str,
    is_allowed: Callable[[float], bool],
) -> None:
    for name in names:
        value = getattr(options, name)
        values = value if isinstance(value, list | tuple) else [value]
        if value is not None and not all(map(is_allowed, values)):
            parser.error(f"--{name.replace('_', '-')}: got {value}, {limit}")
