"""The server does with each field of a request what the table in docs/options.md says."""

from __future__ import annotations

import re
from typing import Any

import document_options
import pytest

from tests.server.live_server import MODEL, LiveServer, error_of
from tests.server.test_chat import MESSAGES

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The rose", "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "temperature": 0},
    "/v1/responses": {"input": "The rose", "max_output_tokens": 2, "temperature": 0},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "temperature": 0},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES},
    "/tokenize": {"prompt": "The rose"},
    "/detokenize": {"tokens": [5, 6]},
}
ODD = [[[[]]]]
"""No field has a value like this one."""


def states(route: str) -> dict[str, str]:
    """Return what becomes of each field of a route's requests."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in document_options.request_table().splitlines())
    column = head.index(f"`{route}`")
    return {name: row[column] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def answered(server: LiveServer, route: str, fields: dict[str, Any]) -> Any:
    """Return what an answer says but for its id and time."""
    answer = server.post(route, BODIES[route] | fields)
    assert answer.status_code == 200, (fields, answer.text)
    # Of generated text only what was generated: the rest depends on when, and on what came before.
    body = answer.json()
    if "output" in body:
        return body["output"][0]["content"], body["status"], body["max_output_tokens"]
    if "content" in body:
        return body["content"], body["stop_reason"]
    return body.get("choices", body)


@pytest.mark.parametrize("route", BODIES)
def test_fields_are_served_refused_and_ignored_as_documented(server: LiveServer, route: str) -> None:
    assert document_options.ROUTES.keys() == BODIES.keys()
    plain, by_field = answered(server, route, {}), states(route)
    assert len(by_field) > 80 and {"served", "ignored"} < set(by_field.values())
    for name, state in by_field.items():
        if state in ("ignored", "no field"):
            for value in (ODD, "text", 5):
                assert answered(server, route, {name: value}) == plain, name
            continue
        refusal = server.post(route, BODIES[route] | {name: ODD})
        assert refusal.status_code == 400, name
        error = error_of(refusal)
        assert str(error["param"]).partition(".")[0] == name, error
        assert ("which is not supported" in error["message"]) == (state != "served"), error
    elsewhere = [name for name, state in by_field.items() if state == "no field"]
    assert answered(server, route, dict.fromkeys(elsewhere, 5)) == plain
    for name, neutral in document_options.ROUTES[route].not_supported.items():
        if by_field[name] != "served":
            for value in neutral:
                assert answered(server, route, {name: value}) == plain, (name, value)
