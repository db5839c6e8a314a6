"""Draws a story in the terminal. Every state has a mark and a word of its own: colours only help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from rose_backend.block_view.strips import (
    Link,
    Strip,
    counts_line,
    fill_note,
    history_line,
    links_between,
    references_note,
    strips_of,
)
from rose_backend.block_view.view_model import MARKS, BlockState, CellView, Frame, SlotKind, Story

STATE_STYLES = {
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
                console.print(line, no_wrap=True, overflow="ignore", crop=False)


class _Drawing:
    """Lays out one story for one console."""

    def __init__(self, story: Story, console: Console) -> None:
        self._console = console
        self._block_size = story.block_size
        self._signs = _ASCII if console.options.ascii_only else {}
        self._width = console.width
        self._reserved = "_" * min(3, max(1, *map(cell_len, story.prompt)))
        space = max(self._width - _LABEL_WIDTH, _MIN_CARD_WIDTH)
        longest = max(
            sum(cell_len(self._slot(*slot).plain) + 1 for slot in cell.slots) - 1
            for frame in story.frames
            for strip in strips_of(frame, story.block_size)
            for cell in strip.cells
            if cell is not None
        )
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
        yield from self._pack([Text(counts_line(frame), style="bold"), Text(history_line(frame))], gap=4)
        yield from self._pack(self._legend(), gap=2)
        yield Text()

    def _sign(self, text: str) -> str:
        return text.translate(self._signs)

    def _strip_lines(self, frame: Frame) -> Iterable[Text]:
        """Yield all strips; too long ones are broken, those of equal positions all at the same column."""
        strips = strips_of(frame, self._block_size)
        aligned = [strip for strip in strips if strip.kind != "cached"]
        for group in (aligned, strips[len(aligned) :]):
            for first in range(0, max((len(strip.cells) for strip in group), default=0), self._num_columns):
                yield Text()
                yield from self._part_lines(group, slice(first, first + self._num_columns), frame)

    def _part_lines(self, group: Sequence[Strip], columns: slice, frame: Frame) -> Iterable[Text]:
        visible = [strip for strip in group if any(strip.cells[columns])]
        for index, strip in enumerate(visible):
            if index:
                yield self._link_line(links_between(visible[index - 1], strip, frame)[columns])
            # What is said of a strip as a whole stands where it begins.
            with_notes = not any(strip.cells[: columns.start])
            yield from self._cards(strip, strip.cells[columns], with_notes=with_notes)

    def _cards(self, strip: Strip, cells: Sequence[CellView | None], *, with_notes: bool) -> Iterable[Text]:
        name = Text(f" {strip.name}", style="bold" if strip.kind == "sequence" else "")
        label = [name, *(Text(f" {note}") for note in strip.notes if with_notes)]
        words = [self._words(cell) if cell is not None else [] for cell in cells]
        height = max(map(len, words))
        cards = [self._card(*pair, height) for pair in zip(cells, words, strict=True)]
        for line, parts in enumerate(zip(*cards, strict=True)):
            start = self._fit(label[line] if line < len(label) else Text(), _LABEL_WIDTH)
            yield Text.assemble(start, Text(" ").join(parts))

    def _words(self, cell: CellView) -> list[Text]:
        lines = [Text()]
        for word in (self._slot(*slot) for slot in cell.slots):
            if cell_len(lines[-1].plain) + 1 + cell_len(word.plain) > self._card_width - 4 and lines[-1]:
                lines.append(Text())
            lines[-1] = Text(" ").join([lines[-1], word]) if lines[-1] else word
        return lines

    def _card(self, cell: CellView | None, words: list[Text], height: int) -> list[Text]:
        """Return the lines of a card with ``height`` lines of words, or of an empty column."""
        if cell is None:
            return [Text(" " * self._card_width)] * (height + 2)
        block = cell.block
        style = STATE_STYLES[block.state]
        side = Text(self._sign("│"), style=style)
        lines = [*words, *[Text()] * (height - len(words))]
        mark, found = f"{self._sign(MARKS[block.state])} #{block.block_id}", self._sign("✓")
        return [
            self._edge("╭╮", mark, references_note(block), style),
            *(Text.assemble(side, " ", self._fit(line, self._card_width - 4), " ", side) for line in lines),
            self._edge("╰╯", fill_note(block, self._block_size), found if block.is_findable else "", style),
        ]

    def _edge(self, corners: str, left: str, right: str, style: str) -> Text:
        corners, bar = self._sign(corners), self._sign("─")
        end = f" {right} {bar}" if right else ""
        start = f"{corners[0]}{bar} {left} "
        fill = self._card_width - cell_len(start) - cell_len(end) - 1
        return Text(f"{start}{bar * fill}{end}{corners[1]}", style=style)

    def _slot(self, word: str, kind: SlotKind) -> Text:
        if kind is SlotKind.RESERVED:
            shown = self._reserved
        elif kind is SlotKind.EMPTY:
            shown = self._sign("·")
        else:
            shown = self._sign("␣") if word == " " else word
            if cell_len(shown) > _MAX_WORD_WIDTH:
                shown = set_cell_size(shown, _MAX_WORD_WIDTH - 1).rstrip() + self._sign("…")
            if kind is SlotKind.FOREIGN:
                shown = f"({shown})"
        return Text(shown, style=_SLOT_STYLES.get(kind, ""))

    def _link_line(self, links: Sequence[Link | None]) -> Text:
        line = Text(" " * _LABEL_WIDTH)
        for link in links:
            shown = Text(" " * self._card_width)
            if link is not None:
                is_copy = link.kind == "copy"
                sign = self._sign("⇓" if is_copy else "║")
                style = STATE_STYLES[BlockState.CLONE_SOURCE if is_copy else BlockState.SHARED]
                shown = Text(f"{sign} {link.text} {sign}".center(self._card_width), style=style)
            line += shown + Text(" ")
        return line

    def _map_lines(self, frame: Frame) -> Iterable[Text]:
        cell = len(str(len(frame.pool.blocks))) + 3
        per_line = max((self._width - _LABEL_WIDTH) // cell, 1)
        for first in range(0, len(frame.pool.blocks), per_line):
            labels = ("", "") if first else (" pool", " blocks")
            ids, marks = (self._fit(Text(label), _LABEL_WIDTH) for label in labels)
            for block in frame.pool.blocks[first : first + per_line]:
                style = STATE_STYLES[block.state]
                ids += Text(f"#{block.block_id}".ljust(cell), style=style)
                marks += Text(self._sign(MARKS[block.state]).ljust(cell), style=style)
            yield ids
            yield marks

    def _legend(self) -> list[Text]:
        states = [
            Text(f"{self._sign(MARKS[state])} {state.value}", style=STATE_STYLES[state])
            for state in BlockState
        ]
        slots = [
            Text.assemble(self._slot("word", kind), (f" {kind.value}", "bright_black")) for kind in SlotKind
        ]
        return [*states, *slots, Text(f"{self._sign('✓')} findable", style="bright_black")]

    def _pack(self, items: Iterable[Text], *, gap: int) -> Iterable[Text]:
        """Put items behind each other into as few lines as fit."""
        line = Text(" ")
        for item in items:
            if cell_len(line.plain) + gap + cell_len(item.plain) > self._width and line.plain.strip():
                yield line
                line = Text(" ")
            if line.plain.strip():
                line.append(" " * gap)
            line += item
        yield line

    @staticmethod
    def _fit(text: Text, width: int) -> Text:
        fitted = text.copy()
        fitted.truncate(width, pad=True)
        return fitted
