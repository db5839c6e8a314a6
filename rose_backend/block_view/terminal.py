"""Draws a story in the terminal. Colors only help: each state has a sign and a word as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from rose_backend.block_view.story import BlockState, Cell, Frame, Link, SlotKind, Story, Strip

_STATE_STYLES = {
    BlockState.SHARED: "bold magenta",
    BlockState.HELD: "green",
    BlockState.CLONE_SOURCE: "bold yellow",
    BlockState.CACHED: "cyan",
    BlockState.FREE: "bright_black",
    BlockState.NULL: "bright_black",
}
_SLOT_STYLES = {SlotKind.FOREIGN: "bright_black", SlotKind.RESERVED: "yellow", SlotKind.EMPTY: "bright_black"}
_LABEL_WIDTH = 14
# Just enough for the lower edge: "A may write" and the mark of a findable block.
_MIN_CARD_WIDTH = 21
# Fits into the narrowest card, in brackets too.
_MAX_WORD_WIDTH = 15
_MAX_TEXT_WIDTH = 100
# The signs of a picture, for terminals without Unicode.
_ASCII = str.maketrans("◆●▲○□∅╭╮╰╯─│·✓║⇓…␣", "&*>o.0++++-|-f|v~_")


def print_story(story: Story, console: Console, *, only: int | None = None) -> None:
    """Print all frames of a story.

    Args:
        console: its width and encoding decide the layout and the signs.
        only: number of the one frame to print, from 1.
    """
    drawing = _Drawing(story, console)
    for number, frame in enumerate(story.frames, start=1):
        if only in (None, number):
            title = Text(f"{number} of {len(story.frames)}  {frame.title}", style="bold")
            console.print(Rule(title, align="left", style="magenta"))
            for line in drawing.frame_lines(frame):
                line.rstrip()
                if console.options.ascii_only:
                    line.plain = line.plain.translate(_ASCII)
                console.print(line, no_wrap=True, overflow="ignore", crop=False)


class _Drawing:
    """Lays out one story for one console."""

    def __init__(self, story: Story, console: Console) -> None:
        self._console = console
        self._width = console.width
        self._reserved = "_" * min(3, max(1, *map(cell_len, story.prompt)))
        space = max(self._width - _LABEL_WIDTH, _MIN_CARD_WIDTH)
        cells = [cell for frame in story.frames for strip in frame.strips for cell in strip.cells if cell]
        longest = max(cell_len(Text(" ").join(self._slots(cell)).plain) for cell in cells)
        # Two cards side by side at least, where the terminal allows it.
        widest = max((space - 1) // 2, _MIN_CARD_WIDTH)
        self._card_width = min(max(longest + 4, _MIN_CARD_WIDTH), widest)
        self._num_columns = max((space + 1) // (self._card_width + 1), 1)

    def frame_lines(self, frame: Frame) -> Iterable[Text]:
        for line in Text(frame.text).wrap(self._console, min(self._width - 2, _MAX_TEXT_WIDTH)):
            yield Text(" ").append_text(line)
        yield Text(" " + "   ".join(frame.calls), style="bold cyan")
        yield from self._strip_lines(frame)
        yield Text()
        yield from self._map_lines(frame)
        counts = [Text(frame.counts, style="bold"), Text(frame.history)]
        for line in (*_wrap(counts, self._width - 1, gap=4), *_wrap(self._legend(), self._width - 1, gap=2)):
            yield Text(" ").append_text(line)
        yield Text()

    def _strip_lines(self, frame: Frame) -> Iterable[Text]:
        """Yield all strips; too long ones are broken, those of equal positions all at the same column."""
        aligned = [strip for strip in frame.strips if strip.kind != "cached"]
        for group in (aligned, frame.strips[len(aligned) :]):
            for first in range(0, max((len(strip.cells) for strip in group), default=0), self._num_columns):
                yield Text()
                columns = slice(first, first + self._num_columns)
                visible = [strip for strip in group if any(strip.cells[columns])]
                for index, strip in enumerate(visible):
                    if index:
                        yield self._link_line(strip.links[columns])
                    yield from self._cards(strip, columns)

    def _cards(self, strip: Strip, columns: slice) -> Iterable[Text]:
        label = [Text(f" {strip.name}", style="bold" if strip.kind == "sequence" else "")]
        # What is said of a strip as a whole stands where it begins.
        if not any(strip.cells[: columns.start]):
            label += [Text(f" {note}") for note in strip.notes]
        cells = strip.cells[columns]
        words = [_wrap(self._slots(cell), self._card_width - 4, gap=1) if cell else [] for cell in cells]
        height = max(map(len, words))
        cards = [self._card(*pair, height) for pair in zip(cells, words, strict=True)]
        for line, parts in enumerate(zip(*cards, strict=True)):
            start = _fit(label[line] if line < len(label) else Text(), _LABEL_WIDTH)
            yield Text.assemble(start, Text(" ").join(parts))

    def _card(self, cell: Cell | None, words: list[Text], height: int) -> list[Text]:
        """Return the lines of a card with ``height`` lines of words, or of an empty column."""
        if cell is None:
            return [Text(" " * self._card_width)] * (height + 2)
        block, style = cell.block, _STATE_STYLES[cell.block.state]
        side = Text("│", style=style)
        lines = [*words, *[Text()] * (height - len(words))]
        return [
            self._edge("╭╮", f"{block.state.mark} #{block.block_id}", f" {block.references} ─", style),
            *(Text.assemble(side, " ", _fit(line, self._card_width - 4), " ", side) for line in lines),
            self._edge("╰╯", cell.fill, " ✓ ─" if block.is_findable else "", style),
        ]

    def _edge(self, corners: str, left: str, right: str, style: str) -> Text:
        start = f"{corners[0]}─ {left} "
        fill = self._card_width - cell_len(start) - cell_len(right) - 1
        return Text(f"{start}{'─' * fill}{right}{corners[1]}", style=style)

    def _slots(self, cell: Cell) -> list[Text]:
        return [self._slot(word, kind) for word, kind in cell.slots]

    def _slot(self, word: str, kind: SlotKind) -> Text:
        if kind is SlotKind.RESERVED:
            shown = self._reserved
        elif kind is SlotKind.EMPTY:
            shown = "·"
        else:
            shown = "␣" if word == " " else word
            if cell_len(shown) > _MAX_WORD_WIDTH:
                shown = set_cell_size(shown, _MAX_WORD_WIDTH - 1).rstrip() + "…"
            if kind is SlotKind.FOREIGN:
                shown = f"({shown})"
        return Text(shown, style=_SLOT_STYLES.get(kind, ""))

    def _link_line(self, links: Sequence[Link | None]) -> Text:
        line = Text(" " * _LABEL_WIDTH)
        for link in links:
            if link is None:
                line.append(" " * (self._card_width + 1))
                continue
            sign, state = ("⇓", BlockState.CLONE_SOURCE) if link.kind == "copy" else ("║", BlockState.SHARED)
            line.append(f"{sign} {link.text} {sign}".center(self._card_width) + " ", _STATE_STYLES[state])
        return line

    def _map_lines(self, frame: Frame) -> Iterable[Text]:
        cell = len(str(len(frame.blocks))) + 3
        per_line = max((self._width - _LABEL_WIDTH) // cell, 1)
        for first in range(0, len(frame.blocks), per_line):
            labels = ("", "") if first else (" pool", " blocks")
            ids, marks = (_fit(Text(label), _LABEL_WIDTH) for label in labels)
            for block in frame.blocks[first : first + per_line]:
                ids.append(f"#{block.block_id}".ljust(cell), _STATE_STYLES[block.state])
                marks.append(block.state.mark.ljust(cell), _STATE_STYLES[block.state])
            yield ids
            yield marks

    def _legend(self) -> list[Text]:
        states = [Text(f"{state.mark} {state.label}", style=_STATE_STYLES[state]) for state in BlockState]
        slots = [
            Text.assemble(self._slot("word", kind), (f" {kind.label}", "bright_black")) for kind in SlotKind
        ]
        return [*states, *slots, Text("✓ findable", style="bright_black")]


def _wrap(items: Iterable[Text], width: int, *, gap: int) -> list[Text]:
    """Join items into as few lines as fit."""
    lines: list[Text] = []
    for item in items:
        if lines and cell_len(lines[-1].plain) + gap + cell_len(item.plain) <= width:
            lines[-1] = Text(" " * gap).join([lines[-1], item])
        else:
            lines.append(item)
    return lines


def _fit(text: Text, width: int) -> Text:
    text.truncate(width, pad=True)
    return text
