"""Requests made up from the server's own OpenAPI schema: no failure, no leak, and the same answer afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from rose_backend.server.middleware import GENERATING_ROUTES
from rose_backend.server.routes import DIRECT_ROUTES
from tests.server.live_server import MODEL, running_server
from tests.support.patience import HANG_S

NUM_EXAMPLES = 12
# What the server answers must be as it says. Whether a request is allowed cannot be told from the schema alone.
CHECK_NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


def shown(choice: Any) -> Any:
    """Return a choice without its numbers, which depend a little on what the prefix cache supplied."""
    return choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]


def test_made_up_requests(tiny_model_path: Path, chat_template: Path) -> None:
    settings = {"chat_template": str(chat_template), "max_body_bytes": 1 << 16}
    with running_server(tiny_model_path, settings, max_model_len=40) as server:
        body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "logprobs": 2}
        before = server.complete(**body).json()["choices"]
        schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
        schema.config.update(base_url=server.url)
        checks = [check for check in CHECKS.get_all() if check.__name__ in CHECK_NAMES]
        assert len(checks) == len(CHECK_NAMES)
        statuses: set[tuple[str, int]] = set()
        kinds: set[str] = set()

        for result in schema.get_all_operations():
            operation = result.ok()
            # A request without a body has nothing that could be wrong.
            for mode in tuple(GenerationMode) if operation.body else (GenerationMode.POSITIVE,):

                @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
                @hypothesis.settings(
                    # Few bodies have either a prompt or messages, and nothing that goes with the other only.
                    max_examples=NUM_EXAMPLES * (5 if operation.path == "/tokenize" else 1),
                    deadline=None,
                    database=None,
                    derandomize=True,
                    suppress_health_check=list(hypothesis.HealthCheck),
                )
                def send(case: schemathesis.Case) -> None:
                    named = isinstance(case.body, dict) and isinstance(case.body.get("model"), str)
                    if named and case.path.startswith("/v1/messages"):
                        # Has to be given there, and cannot be guessed.
                        case.body["model"] = MODEL
                    answer = case.call(timeout=HANG_S)
                    statuses.add((case.path, answer.status_code))
                    case.validate_response(answer, checks=checks)
                    if answer.status_code == 200 and case.path in GENERATING_ROUTES:
                        # Streams are rare among made-up requests; every good one is sent once more as one.
                        case.body |= {"stream": True, "prompt_logprobs": None}
                        answer = case.call(timeout=HANG_S)
                        kinds.add(answer.headers["content-type"][0])
                        case.validate_response(answer, checks=checks)

                send()
        server.wait_until_idle()
        assert server.metric("kv_cache_usage_perc") == 0
        after = server.complete(**body).json()["choices"]
        assert [shown(choice) for choice in after] == [shown(choice) for choice in before]
        for path in DIRECT_ROUTES:
            assert {(path, 200), (path, 400)} <= statuses, f"one-sided requests to {path}: {statuses}"
        assert kinds == {"text/event-stream; charset=utf-8"}
