"""The picture in the terminal and the page hold the same blocks as the frames, in words as well as in colours."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rose_backend.block_view.page import render_page
from rose_backend.block_view.story import BlockState, Story, tell_story
from rose_backend.block_view.terminal import print_story

# The steps whose picture shows one copy.
COPYING = ("First write: the block is copied", "Its first write: copied from the cache")


def draw(story: Story, width: int, **console: Any) -> str:
    file = console.pop("file", io.StringIO())
    print_story(story, Console(file=file, width=width, **console))
    return str(file.getvalue())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("options", [{}, {"block_size": 2}, {"block_size": 32, "tokens": "characters"}])
def test_picture_fits_and_shows_every_block(width: int, options: dict[str, Any]) -> None:
    story = tell_story(
        "There grows a 漢字 rose in Unterunsbach-on-the-very-long-river for you and me", **options
    )
    picture = draw(story, width)
    assert max(cell_len(line) for line in picture.splitlines()) <= width
    assert options.get("tokens") or "Unterunsbach-o…" in picture
    steps = re.split(r"(?m)^\d of 7  ", picture)[1:]
    for frame, step in zip(story.frames, steps, strict=True):
        assert step.startswith(frame.title)
        assert frame.counts in step and frame.history in step
        cards = re.findall(r"(\S) #(\d+) ─+ (\d+) refs? ─╮", step)
        drawn = [cell.block for strip in frame.strips for cell in strip.cells if cell]
        wanted = [(block.state.mark, str(block.block_id), str(block.ref_count)) for block in drawn]
        assert sorted(cards) == sorted(wanted)
        for state in BlockState:
            assert f"{state.mark} {state.label}" in step
        assert step.count("⇓ copy") == (frame.title in COPYING)


def test_map_marks_every_block_below_its_id() -> None:
    story = tell_story()
    lines = draw(story, 80).splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith(" pool ")]
    for frame, start in zip(story.frames, starts, strict=True):
        assert lines[start].split()[1:] == [f"#{block.block_id}" for block in frame.blocks]
        assert lines[start + 1].split()[1:] == [block.state.mark for block in frame.blocks]


def test_a_shared_block_has_one_colour_on_both_rows() -> None:
    picture = draw(tell_story(), 80, force_terminal=True, color_system="standard", no_color=False)
    shared = re.findall(r"(\x1b\[[\d;]*m)╭─ ◆ #1", picture)
    assert len(shared) == 6 and set(shared) == {"\x1b[1;35m"}
    assert set(re.findall(r"(\x1b\[[\d;]*m)╭─ ▲ #2", picture)) == {"\x1b[1;33m"}


def test_a_terminal_without_unicode_gets_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_story(tell_story(), Console(file=file, width=80))
    file.flush()
    picture = file.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "+- > #2 --- 2 refs -+" in picture and "v copy 2 tokens v" in picture


class Page(HTMLParser):
    """Collects what a page holds, and checks that its elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in ("meta", "br", "link", "img"):
            self._open.append(tag)
        if "id" in attributes:
            self.ids.append(str(attributes["id"]))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        section = next((name for name in reversed(self.ids) if name.startswith("step")), "head")
        if "style" not in self._open:
            self.text[section] = self.text.get(section, "") + data

    def having(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.mark.parametrize(
    "options", [{}, {"block_size": 2, "prompt": "a b c d e <script>alert(1)</script> & </body>"}]
)
def test_page_holds_every_block_and_nothing_from_elsewhere(options: dict[str, Any]) -> None:
    story = tell_story(**options)
    text = render_page(story)
    page = Page(text)
    wanted = [
        f"Block {cell.block.block_id}"
        for frame in story.frames
        for strip in frame.strips
        for cell in strip.cells
        if cell is not None
    ]
    assert [attributes["aria-label"] for attributes in page.having("article")] == wanted
    for number, frame in enumerate(story.frames, start=1):
        step = page.text[f"step-{number}"]
        assert frame.title in step and frame.text in step
        for block in frame.blocks:
            assert f"#{block.block_id}" in step and block.state.label in step
        assert frame.counts in step and frame.history in step
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.elements}
    for _, attributes in page.elements:
        assert not {"src", "srcset", "onclick", "onload", "action"} & set(attributes)
        assert str(attributes.get("href", "#")).startswith("#")
    assert {str(link["href"])[1:] for link in page.having("a")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"url\(|@import|https?:", text)
    assert {"lang": "en"} in page.having("html")
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    if "prompt" in options:
        assert "<script>alert(1)</script>" in page.text["head"]


def test_slots_say_in_words_what_they_are() -> None:
    page = Page(render_page(tell_story()))
    assert page.text["step-6"].count("not read here") == 1
    assert page.text["step-1"].count("reserved") == 1 + 2  # the sequence's label, and its two slots
    assert page.text["step-3"].count("copy 2 tokens") == 1
    assert page.text["step-3"].count("not findable yet") == 1
