"""Draws a story in the terminal. Every state has a mark and a word of its own: colours only help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from rose_backend.block_view.strips import (
    Link,
    LinkKind,
    Strip,
    StripKind,
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


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The signs of a picture."""

    marks: Mapping[BlockState, str]
    corners: str
    horizontal: str
    vertical: str
    empty: str
    findable: str
    same: str
    copy: str
    ellipsis: str
    space: str


UNICODE = Glyphs(
    marks=MARKS,
    corners="╭╮╰╯",
    horizontal="─",
    vertical="│",
    empty="·",
    findable="✓",
    same="║",
    copy="⇓",
    ellipsis="…",
    space="␣",
)
ASCII = Glyphs(
    marks={
        BlockState.SHARED: "&",
        BlockState.HELD: "*",
        BlockState.CLONE_SOURCE: ">",
        BlockState.CACHED: "o",
        BlockState.FREE: ".",
        BlockState.NULL: "0",
    },
    corners="++++",
    horizontal="-",
    vertical="|",
    empty="-",
    findable="f",
    same="|",
    copy="v",
    ellipsis="~",
    space="_",
)


def print_story(story: Story, console: Console, *, only: int | None = None) -> None:
    """Print all frames of a story.

    Args:
        story: what to draw.
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
    """The measures of one story on one console, and its lines."""

    def __init__(self, story: Story, console: Console) -> None:
        self._console = console
        self._block_size = story.block_size
        self._glyphs = ASCII if console.options.ascii_only else UNICODE
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
        yield from self._wrap(Text(frame.text))
        yield Text(" " + "   ".join(frame.calls), style="bold cyan")
        yield from self._strip_lines(frame)
        yield Text()
        yield from self._map_lines(frame)
        yield from self._pack([Text(counts_line(frame), style="bold"), Text(history_line(frame))], gap=4)
        yield from self._pack(self._legend(), gap=2)
        yield Text()

    def _wrap(self, text: Text) -> Iterable[Text]:
        for line in text.wrap(self._console, min(self._width - 2, _MAX_TEXT_WIDTH)):
            yield Text(" ").append_text(line)

    def _strip_lines(self, frame: Frame) -> Iterable[Text]:
        """Yield all strips; too long ones are broken, those of equal positions all at the same column."""
        strips = strips_of(frame, self._block_size)
        aligned = [strip for strip in strips if strip.kind is not StripKind.CACHED]
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
        name = Text(f" {strip.name}", style="bold" if strip.kind is StripKind.SEQUENCE else "")
        label = [name, *(Text(f" {note}") for note in strip.notes if with_notes)]
        cards = [self._card(cell) if cell is not None else [] for cell in cells]
        height = max(len(card) for card in cards)
        for line in range(max(height, len(label))):
            start = self._fit(label[line] if line < len(label) else Text(), _LABEL_WIDTH)
            parts = (self._card_line(*pair, line, height) for pair in zip(cells, cards, strict=True))
            yield Text.assemble(start, Text(" ").join(parts))

    def _card(self, cell: CellView) -> list[Text]:
        """Return the lines inside a card, without its edges at the sides."""
        words = [self._slot(word, kind) for word, kind in cell.slots]
        inner = [Text()]
        for word in words:
            if cell_len(inner[-1].plain) + 1 + cell_len(word.plain) > self._card_width - 4 and inner[-1]:
                inner.append(Text())
            inner[-1] = Text(" ").join([inner[-1], word]) if inner[-1] else word
        return [Text(), *inner, Text()]

    def _card_line(self, cell: CellView | None, card: list[Text], line: int, height: int) -> Text:
        if cell is None:
            return Text(" " * self._card_width)
        block, glyphs = cell.block, self._glyphs
        style = STATE_STYLES[block.state]
        if line == 0:
            mark = f"{glyphs.marks[block.state]} #{block.block_id}"
            return self._edge(glyphs.corners[:2], mark, references_note(block), style)
        if line == height - 1:
            found = glyphs.findable if block.is_findable else ""
            return self._edge(glyphs.corners[2:], fill_note(block, self._block_size), found, style)
        side = Text(glyphs.vertical, style=style)
        content = card[line] if line < len(card) - 1 else Text()
        return Text.assemble(side, " ", self._fit(content, self._card_width - 4), " ", side)

    def _edge(self, corners: str, left: str, right: str, style: str) -> Text:
        bar = self._glyphs.horizontal
        end = f" {right} {bar}" if right else ""
        start = f"{corners[0]}{bar} {left} "
        fill = self._card_width - cell_len(start) - cell_len(end) - 1
        return Text(f"{start}{bar * fill}{end}{corners[1]}", style=style)

    def _slot(self, word: str, kind: SlotKind) -> Text:
        if kind is SlotKind.RESERVED:
            shown = self._reserved
        elif kind is SlotKind.EMPTY:
            shown = self._glyphs.empty
        else:
            shown = self._glyphs.space if word == " " else word
            if cell_len(shown) > _MAX_WORD_WIDTH:
                shown = set_cell_size(shown, _MAX_WORD_WIDTH - 1).rstrip() + self._glyphs.ellipsis
            if kind is SlotKind.FOREIGN:
                shown = f"({shown})"
        return Text(shown, style=_SLOT_STYLES.get(kind, ""))

    def _link_line(self, links: Sequence[Link | None]) -> Text:
        line = Text(" " * _LABEL_WIDTH)
        for link in links:
            shown = Text(" " * self._card_width)
            if link is not None:
                is_copy = link.kind is LinkKind.COPY
                sign = self._glyphs.copy if is_copy else self._glyphs.same
                style = STATE_STYLES[BlockState.CLONE_SOURCE if is_copy else BlockState.SHARED]
                shown = Text(f"{sign} {link.text} {sign}".center(self._card_width), style=style)
            line += shown + Text(" ")
        return line

    def _map_lines(self, frame: Frame) -> Iterable[Text]:
        cell = len(str(len(frame.pool.blocks))) + 3
        per_line = max((self._width - _LABEL_WIDTH) // cell, 1)
        for first in range(0, len(frame.pool.blocks), per_line):
            part = frame.pool.blocks[first : first + per_line]
            ids, marks = Text(" pool" if not first else ""), Text(" blocks" if not first else "")
            ids, marks = self._fit(ids, _LABEL_WIDTH), self._fit(marks, _LABEL_WIDTH)
            for block in part:
                style = STATE_STYLES[block.state]
                ids += Text(f"#{block.block_id}".ljust(cell), style=style)
                marks += Text(f"{self._glyphs.marks[block.state]}".ljust(cell), style=style)
            yield ids
            yield marks

    def _legend(self) -> list[Text]:
        states = [
            Text(f"{self._glyphs.marks[state]} {state.value}", style=STATE_STYLES[state])
            for state in BlockState
        ]
        slots = [
            Text.assemble(self._slot("word", kind), (f" {kind.value}", "bright_black")) for kind in SlotKind
        ]
        return [*states, *slots, Text(f"{self._glyphs.findable} findable", style="bright_black")]

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
