"""Writes a story as one HTML page that needs nothing but itself; the same frames and strips as in the terminal."""

from __future__ import annotations

from html import escape
from pathlib import Path

from rose_backend.block_view.strips import (
    Strip,
    counts_line,
    fill_note,
    history_line,
    links_between,
    references_note,
    strips_of,
)
from rose_backend.block_view.view_model import MARKS, BlockState, CellView, Frame, SlotKind, Story

# The policy makes the browser refuse whatever is not in the file.
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Copy-on-write of KV blocks</title>
<style>{style}</style>
</head>
"""
_STYLE_SHEET = Path(__file__).parent / "page.css"
_STATE_MEANINGS = {
    BlockState.SHARED: "several sequences read it",
    BlockState.HELD: "one sequence reads it",
    BlockState.CLONE_SOURCE: "held until its copy has run",
    BlockState.CACHED: "no sequence reads it, prefix lookups still find it",
    BlockState.FREE: "nothing in it",
    BlockState.NULL: "fills unused table entries, never allocated",
}
_SLOT_MEANINGS = {
    SlotKind.COMPUTED: "its keys and values are there",
    SlotKind.FOREIGN: "written, but not part of this sequence",
    SlotKind.RESERVED: "this sequence may write it",
    SlotKind.EMPTY: "this sequence has to reserve it first",
}


def render_page(story: Story) -> str:
    """Return the page."""
    prompt = escape(" ".join(story.prompt))
    size = story.block_size
    return "\n".join(
        (
            _HEAD.format(style=_STYLE_SHEET.read_text(encoding="utf-8")) + "<body>\n<header>",
            "<h1>Copy-on-write of KV blocks, in <span>" + f"{len(story.frames)} steps</span></h1>",
            "<p>Every number and every block below was read from a real block manager, step by step. "
            f"A block holds {size} tokens; the prompt is <q>{prompt}</q>.</p>",
            "</header>",
            _legend(),
            _contents(story),
            "<main>",
            *(_step(number, frame, size) for number, frame in enumerate(story.frames, start=1)),
            "</main>\n</body>\n</html>\n",
        )
    )


def _legend() -> str:
    states = (
        f'<li class="{_css(state)}"><span class="mark" aria-hidden="true">{MARKS[state]}</span>'
        f"<span>{state.value}: {_STATE_MEANINGS[state]}</span></li>"
        for state in BlockState
    )
    slots = (
        f'<li class="held">{_slot("word" if kind in (SlotKind.COMPUTED, SlotKind.FOREIGN) else "", kind, "span")}'
        f"<span>{kind.value}: {_SLOT_MEANINGS[kind]}</span></li>"
        for kind in SlotKind
    )
    return f'<ul class="legend" aria-label="Legend">{"".join((*states, *slots))}</ul>'


def _contents(story: Story) -> str:
    items = (
        f'<li><span class="number">{number}</span> <a href="#step-{number}">{escape(frame.title)}</a></li>'
        for number, frame in enumerate(story.frames, start=1)
    )
    return f'<nav aria-label="Steps"><ol>{"".join(items)}</ol></nav>'


def _step(number: int, frame: Frame, block_size: int) -> str:
    calls = "".join(f"<li><code>{escape(call)}</code></li>" for call in frame.calls)
    return "\n".join(
        (
            f'<section class="step" id="step-{number}" aria-labelledby="title-{number}">',
            f'<h2 id="title-{number}"><span class="number">{number}</span> {escape(frame.title)}</h2>',
            f"<p>{escape(frame.text)}</p>",
            f'<ul class="calls" aria-label="Calls">{calls}</ul>',
            _strips(number, frame, block_size),
            _pool(frame),
            f'<p class="counts"><b>{counts_line(frame)}</b> '
            f'<span class="faint">({history_line(frame)})</span></p>',
            "</section>",
        )
    )


def _strips(number: int, frame: Frame, block_size: int) -> str:
    strips = strips_of(frame, block_size)
    columns = max(len(strip.cells) for strip in strips)
    # Wide enough for a few words; blocks of many tokens get more room.
    widths = f"--columns:{columns};--card-min:11rem;--card-max:{max(16, min(block_size * 2, 28))}rem"
    parts = [
        f'<div class="strips" style="{widths}" tabindex="0" role="region" aria-label="Blocks in step {number}">'
    ]
    for index, strip in enumerate(strips):
        parts.append(_strip(strip, block_size))
        if index + 1 < len(strips):
            parts.append(_links(strip, strips[index + 1], frame))
    return "\n".join((*parts, "</div>"))


def _strip(strip: Strip, block_size: int) -> str:
    notes = "".join(f"<span>{escape(note)}</span> " for note in strip.notes)
    cards = "\n".join(_card(cell, block_size) if cell is not None else "<div></div>" for cell in strip.cells)
    return (
        f'<div class="strip {strip.kind}">\n'
        f'<div class="label"><b>{escape(strip.name)}</b> {notes}</div>\n{cards}\n</div>'
    )


def _card(cell: CellView, block_size: int) -> str:
    block = cell.block
    slots = "".join(_slot(word, kind, "li") for word, kind in cell.slots)
    findable = "<span>✓ findable</span>" if block.is_findable else "<span>not findable yet</span>"
    return (
        f'<article class="card {_css(block.state)}" aria-label="Block {block.block_id}">'
        f"<header><span>{_mark(block.state)} #{block.block_id} {block.state.value}</span>"
        f"<span>{references_note(block)}</span></header>"
        f'<ol class="slots">{slots}</ol>'
        f"<footer><span>{escape(fill_note(block, block_size))}</span>{findable}</footer></article>"
    )


def _slot(word: str, kind: SlotKind, tag: str) -> str:
    shown = escape("␣" if word == " " else word)
    # What the look of a slot says is said in words, too.
    hint = "" if kind is SlotKind.COMPUTED else f'<span class="sr"> {kind.value}</span>'
    return f'<{tag} class="slot {kind.name.lower()}">{shown}{hint}</{tag}>'


def _links(upper: Strip, lower: Strip, frame: Frame) -> str:
    links = "".join(
        f'<div class="link {link.kind}">{escape(link.text)}</div>' if link else "<div></div>"
        for link in links_between(upper, lower, frame)
    )
    return f'<div class="links"><div class="label"></div>{links}</div>'


def _pool(frame: Frame) -> str:
    items = (
        f'<li class="{_css(block.state)}" title="{block.state.value}">{_mark(block.state)} #{block.block_id}'
        f'<span class="sr"> {block.state.value}</span></li>'
        for block in frame.pool.blocks
    )
    return f'<ul class="pool" aria-label="All blocks of the pool">{"".join(items)}</ul>'


def _mark(state: BlockState) -> str:
    return f'<span aria-hidden="true">{MARKS[state]}</span>'


def _css(state: BlockState) -> str:
    return state.name.lower()
