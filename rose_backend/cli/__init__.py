"""The ``rose`` command: ``rose generate``, ``serve``, ``warmup``, ``blocks`` and ``env``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rose_backend import __version__
from rose_backend.cli.blocks import add_blocks_command
from rose_backend.cli.options import (
    EXIT_USAGE,
    RoseParser,
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
    unknown_option_message,
)
from rose_backend.cli.serve import add_serve_command
from rose_backend.cli.warmup import add_warmup_command
from rose_backend.config import SWITCH_NAMES, EngineConfig, Switches
from rose_backend.engine.process_settings import note_imports
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import RequestError, RoseError

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
        level = _log_level()
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            parser.error(unknown_option_message(unknown, parser))
        logging.basicConfig(
            level=level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
        )
        if level != "debug":
            _quieten_libraries()
        return int(args.run(args))
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
        return 128 + (interrupt.number if isinstance(interrupt, _Terminated) else signal.SIGINT)


def build_parser() -> RoseParser:
    """Return the parser of all commands; docs/options.md is made from it."""
    parser = RoseParser(prog="rose", description="Faster LLM serving, inside vLLM and without.")
    parser.add_argument("--version", action="version", version=f"rose {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    generate = commands.add_parser(
        "generate",
        help="generate text for one prompt, or for a file of prompts",
        description="Stream the continuation of --prompt to the terminal, or write those of --prompts to --output.",
    )
    source = generate.add_argument_group("input and output")
    source.add_argument("--model", required=True, metavar="PATH", help="local directory or Hugging Face id")
    source.add_argument("--prompt", metavar="TEXT", help="one prompt")
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help='one prompt per line, blank lines left out; with a name ending in .jsonl, lines {"prompt": ..., and any '
        "sampling field}",
    )
    source.add_argument(
        "--output",
        metavar="FILE.jsonl",
        help="where to write the results of --prompts, one object per line, each as soon as it is finished; its "
        '"index" is that of the prompt\'s line, from 0',
    )
    add_sampling_options(generate)
    add_engine_options(generate)
    generate.set_defaults(run=_generate)
    add_serve_command(commands)
    add_warmup_command(commands)
    add_blocks_command(commands)
    env = commands.add_parser(
        "env",
        help="versions, device and parts in force",
        description="Print what a bug report needs: versions, device, and which parts are in force.",
    )
    add_engine_options(env)
    env.set_defaults(run=_env)
    return parser


def _generate(args: argparse.Namespace) -> int:
    _check_sources(args.prompt, args.prompts, args.output)
    config = EngineConfig(model=args.model, **engine_options(args))
    given = sampling_options(args)
    SamplingParams(**given)
    with _sigterm_interrupts():
        # Imported here: it loads torch, which takes seconds; mistakes in the options are reported before.
        from rose_backend.cli.generate import generate_file, stream_prompt

        note_imports()
        if args.prompt is not None:
            return stream_prompt(config, args.prompt, given)
        return generate_file(config, args.prompts, args.output, given)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""

    number = signal.SIGTERM


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that what is open is closed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_sources(prompt: str | None, prompts: str | None, output: str | None) -> None:
    if (prompt is None) == (prompts is None):
        raise RequestError("generate: give either --prompt TEXT, or --prompts FILE with --output FILE.jsonl")
    if prompts is not None and output is None:
        raise RequestError("--output: needed with --prompts, a file to write the results to")
    if prompt is not None and output is not None:
        raise RequestError("--output: allowed with --prompts only; --prompt writes to the terminal")


def _env(args: argparse.Namespace) -> int:
    from rose_backend.cli.environment import environment_report

    switches = Switches(**{name: getattr(args, name) for name in SWITCH_NAMES})
    for name, value in environment_report(switches, args.device):
        print(f"{name:20} {value}")
    return 0


def _log_level() -> str:
    level = os.environ.get("ROSE_LOG_LEVEL", "warning").lower()
    if level not in _LOG_LEVELS:
        print(
            f"rose: error: ROSE_LOG_LEVEL: got {level!r}, allowed are {', '.join(_LOG_LEVELS)}",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_USAGE)
    return level


def _quieten_libraries() -> None:
    # Their loading bars would stand between the prompt and the streamed text.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
