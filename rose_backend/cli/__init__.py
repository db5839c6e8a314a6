"""The ``rose`` command: ``rose generate``, ``serve``, ``warmup``, ``bench``, ``blocks`` and ``env``."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from rose_backend import __version__
from rose_backend.cli.generate import add_generate_command
from rose_backend.cli.options import EXIT_USAGE, RoseParser, unknown_option_message
from rose_backend.cli.serve import add_serve_command
from rose_backend.cli.tools import add_bench_command, add_blocks_command, add_env_command, add_warmup_command
from rose_backend.errors import ConfigError, RoseError

_LOG_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit code: 0, 2 for a mistake in options or input, 128 + the signal's number when interrupted: 130 for
        Ctrl-C, 143 for SIGTERM.
    """
    parser = build_parser()
    try:
        _set_up_logging()
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            parser.error(unknown_option_message(unknown, parser))
        return args.run(args) or 0
    except BrokenPipeError:
        # The reader of our output has left. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RoseError, OSError) as error:
        if os.environ.get("ROSE_LOG_LEVEL", "").lower() == "debug":
            raise
        print(f"rose: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt as interrupt:
        print("rose: interrupted", file=sys.stderr)
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)


def build_parser() -> RoseParser:
    """Return the parser of all commands; docs/options.md is made from it."""
    parser = RoseParser(prog="rose", description="Faster LLM serving, inside vLLM and without.")
    parser.add_argument("--version", action="version", version=f"rose {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_generate_command(commands)
    add_serve_command(commands)
    add_warmup_command(commands)
    add_bench_command(commands)
    add_blocks_command(commands)
    add_env_command(commands)
    return parser


def _set_up_logging() -> None:
    level = os.environ.get("ROSE_LOG_LEVEL", "warning").lower()
    if level not in _LOG_LEVELS:
        raise ConfigError(f"ROSE_LOG_LEVEL: got {level!r}, allowed are {', '.join(_LOG_LEVELS)}")
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if level != "debug":
        # Libraries' loading bars would stand between the prompt and the streamed text.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
