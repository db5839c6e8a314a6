"""``rose blocks``: copy-on-write in pictures, and the KV cache of a running engine."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose_backend.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_DESCRIPTION = """Show KV blocks. --demo runs Rose's block manager through a fork, first writes and a prefix hit, and
draws every block after each step. --url watches the KV cache of a running engine."""
_INTERVAL_S = (0.1, 3600.0)
_DEMO_OPTIONS = ("prompt", "tokens", "block_size", "step", "html")
_LIVE_OPTIONS = ("interval", "once")


def add_blocks_command(commands: Any) -> None:
    """Add the command to what ``ArgumentParser.add_subparsers`` returned."""
    parser = commands.add_parser(
        "blocks",
        help="copy-on-write in pictures, or the KV cache of a running engine",
        description=_DESCRIPTION,
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


def _blocks(args: argparse.Namespace) -> int:
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A prompt may have signs that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    if args.demo:
        _refuse(args, _LIVE_OPTIONS, "--url")
        _demo(args, Console(highlight=False))
    else:
        _refuse(args, _DEMO_OPTIONS, "--demo")
        _watch(args, Console(highlight=False))
    return 0


def _refuse(args: argparse.Namespace, names: tuple[str, ...], needed: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: allowed with {needed} only")


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
    interval_s = 2.0 if args.interval is None else args.interval
    low, high = _INTERVAL_S
    if not low <= interval_s <= high:
        raise ConfigError(f"--interval: got {interval_s}, allowed is {low} to {high:.0f} seconds")
    from rose_backend.block_view.monitor import metrics_url, watch

    is_once = args.once or not console.is_terminal or console.is_dumb_terminal
    watch(metrics_url(args.url), None if is_once else interval_s, console)
