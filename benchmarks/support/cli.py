"""Command lines of benchmarks: options that several have, and checks of values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

QUICK_MODEL = "models/tiny-gpt2"
DEFAULT = "(default: %(default)s)"


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with ``--quick`` and ``--json``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
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


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return an argument's type: numbers from ``least`` on."""

    def parse(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"got {value}, at least {least}")
        return value

    return parse


def above_zero(text: str) -> float:
    """Read an argument that is above 0."""
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"got {value}, has to be above 0")
    return value


def check_at_least(
    parser: argparse.ArgumentParser, options: argparse.Namespace, least: float, *names: str
) -> None:
    """Exit, naming option, value and limit, if a value or an entry of a list is below ``least``."""
    for name in names:
        value = getattr(options, name)
        if value is not None and min(value if isinstance(value, list | tuple) else [value]) < least:
            parser.error(f"--{name.replace('_', '-')}: got {value}, at least {least}")
