"""Two servers for most tests, with the engine in this process and in its own, and the engine to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer  # noqa: F401  # this process then loads tokenizers, in no time

from rose_backend import LLM
from tests.server.live_server import LiveServer, running_server

CHAT_TEMPLATE = """{%- macro endless() -%}{{ endless() }}{%- endmacro -%}
{%- for message in messages -%}
{%- if message.content == "forbidden" -%}{{ raise_exception("not this word") }}{%- endif -%}
{%- if message.content == "divided" -%}{{ 1 // 0 }}{%- endif -%}
{%- if message.content == "endless" -%}{{ endless() }}{%- endif -%}
{%- if message.content == "huge" -%}{{ "a" * 10 ** 18 }}{%- endif -%}
{%- if message.content == "nothing" -%}{{ message.tools.name }}{%- endif -%}
{%- if message.name == "refused" -%}{{ raise_exception(message.content) }}{%- endif -%}
{{ message.role }}{{ " " + message.name if message.name }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt -%}assistant:{%- endif -%}"""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: for a tiny model more are no faster, and far slower when other programs run."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def chat_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a template for conversations."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(CHAT_TEMPLATE)
    return path


@pytest.fixture(scope="session")
def shared_servers(tiny_model_path: Path, chat_template: Path) -> Iterator[Callable[[bool], LiveServer]]:
    """Return a function that starts a server with a chat template, once with its engine in this process and once not.

    Not a parametrized fixture, which would be closed and started again whenever the parameter changes.
    """
    with ExitStack() as stack:

        @cache
        def start(frontend_multiprocessing: bool) -> LiveServer:
            settings = {
                "chat_template": str(chat_template),
                "frontend_multiprocessing": frontend_multiprocessing,
            }
            return stack.enter_context(running_server(tiny_model_path, settings))

        yield start


@pytest.fixture(params=[False, True], ids=["one-process", "two-processes"])
def server(
    request: pytest.FixtureRequest, shared_servers: Callable[[bool], LiveServer]
) -> Iterator[LiveServer]:
    """Return the shared server of each kind; fails the test that leaves anything behind in it."""
    server = shared_servers(request.param)
    yield server
    server.wait_until_idle()


@pytest.fixture(scope="session")
def llm(tiny_model_path: Path) -> Iterator[LLM]:
    """Return an engine that answers without a server."""
    with LLM(str(tiny_model_path), dtype="float32", max_num_seqs=8, num_blocks=600) as llm:
        yield llm
