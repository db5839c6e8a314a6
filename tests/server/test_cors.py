"""Which web pages browsers let use the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.live_server import LiveServer, running_server, stream

PAGE = "https://chat.example.com"
ALLOWS = "access-control-allow-origin"
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 2}


def asks(server: LiveServer, origin: str, **headers: str) -> Any:
    """Ask as a browser does before a page's request, without a key."""
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return server.http.options("/v1/completions", headers={"Origin": origin, **asked, **headers})


def test_no_page_may_unless_the_server_says_so(server: LiveServer) -> None:
    answer = asks(server, PAGE)
    assert answer.status_code == 405 and ALLOWS not in answer.headers
    answer = server.http.post("/v1/completions", json=BODY, headers={"Origin": PAGE})
    assert answer.status_code == 200 and ALLOWS not in answer.headers


def test_pages_of_an_origin(tiny_model_path: Path) -> None:
    settings = {"allowed_origins": (PAGE,), "api_keys": ("key",)}
    with running_server(tiny_model_path, settings) as server:
        answer = asks(server, PAGE)
        assert answer.status_code == 200 and answer.headers[ALLOWS] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in answer.headers
        for other in ("https://evil.example.com", f"{PAGE}.evil.org", "null"):
            answer = asks(server, other)
            assert answer.status_code == 400 and ALLOWS not in answer.headers
            answer = server.http.get("/health", headers={"Origin": other})
            assert answer.status_code == 200 and ALLOWS not in answer.headers
        # Refusals of the key, of a field and of the route can be read by the page, too.
        key = {"Authorization": "Bearer key"}
        for path, headers, status in (
            ("/v1/completions", {}, 401),
            ("/v1/completions", key, 200),
            ("/tokenize", key, 400),
            ("/nothing", key, 404),
        ):
            body = {} if path == "/tokenize" else BODY
            answer = server.http.post(path, json=body, headers={"Origin": PAGE, **headers})
            assert answer.status_code == status and answer.headers[ALLOWS] == PAGE
            assert len(answer.headers.get_list("x-request-id")) == 1


def test_pages_of_all_origins(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, {"allowed_origins": ("*",)}) as server:
        assert asks(server, PAGE).headers[ALLOWS] == "*"
        whole = server.http.post("/v1/completions", json={**BODY, "temperature": 0}, headers={"Origin": PAGE})
        assert whole.headers[ALLOWS] == "*"
        server.http.headers["Origin"] = PAGE
        events = stream(server, **BODY, temperature=0)
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == whole.json()["choices"][0]["text"]


@pytest.mark.parametrize("name", ["allowed_methods", "allowed_headers"])
def test_what_pages_may_send(tiny_model_path: Path, name: str) -> None:
    allowed = {"allowed_methods": "GET", "allowed_headers": "x-other"}[name]
    settings = {"allowed_origins": (PAGE,), name: (allowed,), "allow_credentials": True}
    with running_server(tiny_model_path, settings) as server:
        answer = asks(server, PAGE)
        assert answer.status_code == 400
        assert answer.headers["access-control-allow-credentials"] == "true"
        asked = {
            "Access-Control-Request-Method": "GET",
            "Access-Control-Request-Headers": "content-type,x-other",
        }
        assert asks(server, PAGE, **asked).status_code == 200
