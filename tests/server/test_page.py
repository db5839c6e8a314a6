"""The page at ``/``: what it may load, what it shows without a key, and, in headless Chromium, what it does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_backend.server import page
from tests.server.live_server import LiveServer, long_stream, read_metric, running_server, wait_until
from tests.support import chromium
from tests.support.chromium import BrowserTab, browser_tab

CHAT_MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3-chat"
KEY = {"Authorization": "Bearer secret"}
QUESTION = "What is the capital of France?"
HOSTILE = (
    "<img src=x onerror=\"document.title = 'taken'\"><script>document.title = 'taken'</script><b>\u202e&lt;"
)

needs_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="there is no Chromium here")


def test_nothing_comes_from_elsewhere(server: LiveServer) -> None:
    answer = server.http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    text = answer.text
    assert text == (Path(page.__file__).parent / "page.html").read_text()
    # The only address in it names a format.
    assert set(re.findall(r"\w+://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert {link[:4] for link in re.findall(r"""(?:src|href|action)=["']?([^"'\s>]+)""", text)} == {
        "data",
        "metr",
    }
    # Nothing that makes HTML or code of a text, nor keeps anything.
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval|Function\(|Storage|cookie| on\w+=",
        text,
    )


def test_the_policy_lets_in_what_is_in_the_page_only(server: LiveServer) -> None:
    answer = server.http.get("/")
    rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{digest}'"
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    assert rules == {**nothing, "img-src": "data:", "connect-src": "'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_its_figures_are_served(server: LiveServer) -> None:
    server.complete(prompt=[70], max_tokens=1)
    text = server.http.get("/metrics").text
    names = re.findall(r'value\("(\w+)"\)', server.http.get("/").text)
    assert len(names) == 8
    for name in names:
        read_metric(text, name)


def test_it_needs_no_key_and_knows_none(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, {"api_keys": ("secret",)}) as server:
        assert server.http.get("/").text == server.http.get("/", headers=KEY).text
        assert "secret" not in server.http.get("/").text
        assert server.http.get("/metrics").status_code == 200
        assert server.http.post("/v1/chat/completions", json={}).status_code == 401
        assert server.http.post("/").status_code == 405


def test_it_can_be_switched_off(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, {"page": False}) as server:
        assert server.http.get("/").status_code == server.http.head("/").status_code == 404


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserTab]:
    """Return a tab of a browser."""
    with browser_tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def chat_server() -> Iterator[LiveServer]:
    """Return a server that asks for a key; its model has a hostile name."""
    settings = {"served_model_names": (HOSTILE,), "api_keys": ("secret",)}
    with running_server(CHAT_MODEL, settings, num_blocks=3000) as server:
        server.http.headers.update(KEY)
        yield server
        server.wait_until_idle()


@pytest.fixture
def page_tab(tab: BrowserTab, chat_server: LiveServer) -> Iterator[BrowserTab]:
    """Return the tab with the page, live, in which nothing goes wrong until the end."""
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(f"{chat_server.url}/")
    tab.wait_for("byId('state').textContent === 'live'")
    yield tab
    assert all(url.startswith((f"{chat_server.url}/", "data:")) for url in tab.requests), tab.requests
    assert tab.complaints == [] and tab.run("document.querySelectorAll('img, b, script').length") == 2
    assert tab.run("document.title") == f"rose: {HOSTILE}"


def ask(tab: BrowserTab, text: str, key: str = "secret") -> None:
    """Write a message, and send it with the key Enter."""
    tab.run(f"byId('key').value = {json.dumps(key)}")
    tab.run("byId('message').focus()")
    tab.call("Input.insertText", text=text)
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13)


def talk_of(tab: BrowserTab) -> list[str]:
    """Return the texts of all turns, once nothing is running."""
    tab.wait_for("!running")
    script = "[...document.querySelectorAll('.turn .content')].map((each) => each.textContent)"
    texts: list[str] = tab.run(script)
    return texts


@needs_browser
def test_figures_of_running_requests(page_tab: BrowserTab, chat_server: LiveServer) -> None:
    assert page_tab.run("byId('model').textContent") == HOSTILE
    held = "[...byId('pool').children].map((cell) => parseInt(cell.style.getPropertyValue('--held')))"
    assert set(page_tab.run(held)) == {0}
    # 2,999 blocks, four to a cell, of which the last has three.
    assert page_tab.run("byId('pool').childElementCount") == 750
    assert page_tab.run("byId('cell').textContent") == "A cell is 4 blocks."
    body = {"prompt": list(range(300, 500)), "max_tokens": 1800}
    with long_stream(chat_server, **body):
        page_tab.wait_for("byId('running').textContent === '1' && Number(byId('generated').textContent) > 0")
        shares = page_tab.run(held)
        count = int(page_tab.run("parseInt(byId('usage').textContent)"))
        assert count >= 200 // 16 and [share > 0 for share in shares] == [
            i < -(-count // 4) for i in range(750)
        ]
        assert round(sum(shares) / 25) == count
        assert page_tab.run("byId('usage').textContent").endswith("16 tokens each.")
        assert page_tab.run("byId('generated-history').points.length") >= 2
    page_tab.wait_for(
        "byId('running').textContent === '0' && byId('usage').textContent.startsWith('0 of 2,999 ')"
    )


@needs_browser
def test_a_chat_that_streams(page_tab: BrowserTab, chat_server: LiveServer) -> None:
    ask(page_tab, QUESTION)
    question, answer = talk_of(page_tab)
    assert question == QUESTION and "Paris" in answer
    about = page_tab.run("document.querySelector('.assistant .about').textContent")
    assert re.fullmatch(r"\d+ tokens, the first after [\d,]+ ms, [\d,]+ tokens/s", about)
    before = chat_server.http.get("/metrics").text
    ask(page_tab, "And of Italy?")
    assert talk_of(page_tab)[:3] == [QUESTION, answer, "And of Italy?"]
    num_tokens = len(chat_server.http.post("/tokenize", json={"messages": [
        {"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer},
        {"role": "user", "content": "And of Italy?"}]}).json()["tokens"])  # fmt: skip
    sent = chat_server.metric("prompt_tokens_total") - read_metric(before, "prompt_tokens_total")
    assert sent == num_tokens, "the whole conversation is sent"
    page_tab.run("byId('clear').click()")
    assert talk_of(page_tab) == []


@needs_browser
def test_an_answer_that_is_stopped(page_tab: BrowserTab, chat_server: LiveServer) -> None:
    # The server's own model ends too soon.
    page_tab.run("var ask = fetch; fetch = (url, what) => ask(url, {...what, body: what.body && JSON.stringify("
                 "{...JSON.parse(what.body), ignore_eos: true})})")  # fmt: skip
    ask(page_tab, QUESTION)
    page_tab.wait_for("document.querySelector('.assistant .content').textContent.length > 20")
    assert page_tab.run("byId('send').disabled && !byId('stop').disabled")
    page_tab.run("byId('stop').click()")
    assert len(talk_of(page_tab)) == 2
    assert page_tab.run("document.querySelector('.assistant .about').textContent") == "stopped"
    wait_until(lambda: not chat_server.service.num_active_requests)
    assert page_tab.run("turns.length") == 2, "what there is of the answer is part of the conversation"


@needs_browser
def test_a_key_is_asked_for(page_tab: BrowserTab) -> None:
    assert not page_tab.run("byId('key-box').open")
    ask(page_tab, QUESTION, key="")
    page_tab.wait_for("byId('key-box').open && document.activeElement === byId('key')")
    page_tab.wait_for("document.querySelector('.error')")
    assert "needs an API key" in page_tab.run("document.querySelector('.error').textContent")
    assert page_tab.run("byId('message').value") == QUESTION, "it can be sent again"
    page_tab.run("byId('key').value = 'secret'; byId('send').click()")
    assert "Paris" in talk_of(page_tab)[-1]
    assert page_tab.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    # The browser's own note about a 401.
    assert len(page_tab.complaints) == 1 and "401" in page_tab.complaints.pop()
    page_tab.call("Page.reload")
    page_tab.wait_for("document.readyState === 'complete' && byId('state').textContent === 'live'")
    assert page_tab.run("byId('key').value") == ""


@needs_browser
def test_what_a_hostile_model_says_is_text(page_tab: BrowserTab) -> None:
    """Events arrive in pieces that end anywhere, with all that could be taken for HTML, in every place for text."""
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": HOSTILE},
        {"content": HOSTILE},
        {"content": "é"},
    ]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": HOSTILE}]})
    events.append({"choices": [], "usage": {"completion_tokens": 3}})
    body = (
        "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events) + "data: [DONE]\n\n"
    )
    page_tab.run(f"""
        var body = new TextEncoder().encode({json.dumps(body)}), first = 0, release;
        var ask = fetch, released = new Promise((done) => {{ release = done; }});
        fetch = (url, ...rest) => url === "metrics" ? ask(url, ...rest) : Promise.resolve(new Response(
            new ReadableStream({{async pull(stream) {{
                if (first > body.length / 2) await released;
                if (first >= body.length) return stream.close();
                stream.enqueue(body.slice(first, first += 7));
            }}}})));
    """)
    ask(page_tab, HOSTILE)
    page_tab.wait_for("document.querySelector('.assistant .reasoning').textContent")
    assert page_tab.run("Boolean(running) && document.querySelector('.assistant .content').textContent") == ""
    page_tab.run("release()")
    assert talk_of(page_tab) == [HOSTILE, HOSTILE + "é"]
    assert page_tab.run("document.querySelector('.assistant .reasoning').textContent") == HOSTILE
    assert page_tab.run("document.querySelector('.assistant .about').textContent").endswith(HOSTILE)


@needs_browser
def test_tokens_that_come_with_the_first_are_not_in_the_rate(page_tab: BrowserTab) -> None:
    """The page's clock stands still but for a second before it reads each part of an answer."""
    page_tab.run("""
        var ask = fetch, now = 0, reader = ReadableStreamDefaultReader.prototype, read = reader.read;
        performance.now = () => now;
        reader.read = function () { now += 1000; return read.call(this); };
    """)
    for counts, rate in (
        ([[1], [2]], 1),
        ([[1, 2, 3], [5, 7]], 4),
        ([[2], [3], [6]], 2),
        ([[1, 2, 3]], None),
    ):
        parts = []
        for part in counts:
            events = [
                {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": count}}
                for count in part
            ]
            parts.append("".join(f"data: {json.dumps(event)}\n\n" for event in events))
        # The end comes with the last tokens, in a part of its own.
        last = {"choices": [], "usage": {"completion_tokens": counts[-1][-1]}}
        parts.append(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n")
        page_tab.run(f"""
            var parts = {json.dumps(parts)};
            fetch = (url, ...rest) => url === "metrics" ? ask(url, ...rest) : Promise.resolve(new Response(
                new ReadableStream({{pull(stream) {{
                    if (!parts.length) return stream.close();
                    stream.enqueue(new TextEncoder().encode(parts.shift()));
                }}}})));
        """)
        ask(page_tab, "Hi")
        talk_of(page_tab)
        about = page_tab.run("[...document.querySelectorAll('.assistant .about')].pop().textContent")
        shown = re.search(r"(\d+) tokens/s", about)
        assert (shown and int(shown[1])) == rate, about
    page_tab.run("byId('clear').click()")


@needs_browser
def test_errors_are_shown(page_tab: BrowserTab) -> None:
    error = json.dumps({"error": {"message": HOSTILE}})
    page_tab.run("var ask = fetch")
    for answer in (
        f"new Response({json.dumps(error)}, {{status: 400}})",
        f"new Response({json.dumps(f'data: {error}' + chr(10) * 2)})",
    ):
        page_tab.run(f"fetch = (...what) => what[0] === 'metrics' ? ask(...what) : Promise.resolve({answer})")
        ask(page_tab, "Hi")
        assert talk_of(page_tab)[-1] == ""
        assert page_tab.run("[...document.querySelectorAll('.error')].pop().textContent") == HOSTILE
        assert page_tab.run("byId('message').value") == "Hi"
        page_tab.run("byId('message').value = ''")


@needs_browser
def test_a_server_that_is_gone(page_tab: BrowserTab) -> None:
    page_tab.run("var ask = fetch; fetch = () => Promise.reject(new Error('gone'))")
    page_tab.wait_for("/^no answer since .*gone/.test(byId('state').textContent)")
    # Of another process: its counters begin anew, and so do the curves.
    page_tab.run("readings[readings.length - 1].prompts = 1e9; fetch = ask")
    page_tab.wait_for("byId('state').textContent === 'live' && readings.length < 3")
