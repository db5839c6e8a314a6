"""Writes a story as one HTML page that needs nothing but itself; the same frames as in the terminal.

The policy in ``page.html`` makes the browser refuse whatever is not in the file.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

from rose_backend.block_view.story import BlockState, Cell, Frame, SlotKind, Story, Strip

_TEMPLATE = Path(__file__).parent / "page.html"


def render_page(story: Story) -> str:
    """Return the page."""
    numbered = list(enumerate(story.frames, start=1))
    contents = (
        f'<li><span class="number">{number}</span> <a href="#step-{number}">{escape(frame.title)}</a></li>'
        for number, frame in numbered
    )
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        num_steps=len(story.frames),
        block_size=story.block_size,
        prompt=escape(" ".join(story.prompt)),
        legend=_legend(),
        contents="".join(contents),
        steps="\n".join(_step(number, frame, story.block_size) for number, frame in numbered),
    )


def _legend() -> str:
    states = (
        f'<li class="{_css(state)}"><span class="mark" aria-hidden="true">{state.mark}</span>'
        f"<span>{state.label}: {state.meaning}</span></li>"
        for state in BlockState
    )
    slots = (
        f'<li class="held">{_slot("word" if kind in (SlotKind.COMPUTED, SlotKind.FOREIGN) else "", kind, "span")}'
        f"<span>{kind.label}: {kind.meaning}</span></li>"
        for kind in SlotKind
    )
    return "".join((*states, *slots))


def _step(number: int, frame: Frame, block_size: int) -> str:
    calls = "".join(f"<li><code>{escape(call)}</code></li>" for call in frame.calls)
    columns = max(len(strip.cells) for strip in frame.strips)
    # Wide enough for a few words; blocks of many tokens get more room.
    widths = f"--columns:{columns};--card-min:11rem;--card-max:{max(16, min(block_size * 2, 28))}rem"
    strips = "\n".join(map(_strip, frame.strips))
    pool = "".join(
        f'<li class="{_css(block.state)}" title="{block.state.label}">{_mark(block.state)} #{block.block_id}'
        f'<span class="sr"> {block.state.label}</span></li>'
        for block in frame.blocks
    )
    return f"""<section class="step" id="step-{number}" aria-labelledby="title-{number}">
<h2 id="title-{number}"><span class="number">{number}</span> {escape(frame.title)}</h2>
<p>{escape(frame.text)}</p>
<ul class="calls" aria-label="Calls">{calls}</ul>
<div class="strips" style="{widths}" tabindex="0" role="region" aria-label="Blocks in step {number}">
{strips}
</div>
<ul class="pool" aria-label="All blocks of the pool">{pool}</ul>
<p class="counts"><b>{frame.counts}</b> <span class="faint">({frame.history})</span></p>
</section>"""


def _strip(strip: Strip) -> str:
    """Return a strip below its links to the one above, if there is one."""
    links = "".join(
        f'<div class="link {link.kind}">{escape(link.text)}</div>' if link else "<div></div>"
        for link in strip.links
    )
    above = f'<div class="links"><div class="label"></div>{links}</div>\n' if links else ""
    notes = "".join(f"<span>{escape(note)}</span> " for note in strip.notes)
    cards = "\n".join(_card(cell) if cell else "<div></div>" for cell in strip.cells)
    return f"""{above}<div class="strip {strip.kind}">
<div class="label"><b>{escape(strip.name)}</b> {notes}</div>
{cards}
</div>"""


def _card(cell: Cell) -> str:
    block, state = cell.block, cell.block.state
    slots = "".join(_slot(word, kind, "li") for word, kind in cell.slots)
    findable = "✓ findable" if block.is_findable else "not findable yet"
    return (
        f'<article class="card {_css(state)}" aria-label="Block {block.block_id}">'
        f"<header><span>{_mark(state)} #{block.block_id} {state.label}</span>"
        f"<span>{block.references}</span></header>"
        f'<ol class="slots">{slots}</ol>'
        f"<footer><span>{escape(cell.fill)}</span><span>{findable}</span></footer></article>"
    )


def _slot(word: str, kind: SlotKind, tag: str) -> str:
    shown = escape("␣" if word == " " else word)
    # What the look of a slot says is said in words, too.
    hint = "" if kind is SlotKind.COMPUTED else f'<span class="sr"> {kind.label}</span>'
    return f'<{tag} class="slot {kind.name.lower()}">{shown}{hint}</{tag}>'


def _mark(state: BlockState) -> str:
    return f'<span aria-hidden="true">{state.mark}</span>'


def _css(state: BlockState) -> str:
    return state.name.lower()
