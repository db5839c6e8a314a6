"""Models, tokens, health, version, metrics, and the line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from rose_backend import __version__
from rose_backend.block_view.monitor import parse_metrics
from rose_backend.server import routes
from tests.server.live_server import (
    MODEL,
    LiveServer,
    check_refused,
    error_of,
    long_stream,
    read_metric,
    running_server,
    wait_until,
)
from tests.support.patience import HANG_S

PROMPT = "Once upon a time"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_models_are_listed(server: LiveServer, tiny_model_path: Path) -> None:
    (card,) = server.openai.models.list().data
    assert (card.id, card.object, card.owned_by) == (MODEL, "model", "rose_backend")
    assert card.model_dump()["max_model_len"] == 1024
    assert card.model_dump()["root"] == str(tiny_model_path)


def test_several_names_for_the_model(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, {"served_model_names": ("one", "two")}) as server:
        assert [card.id for card in server.openai.models.list()] == ["one", "two"]
        for name in ("one", "two"):
            assert server.complete(model=name, prompt=PROMPT).json()["model"] == "one"
        assert server.complete(model="three", prompt=PROMPT).status_code == 404


def test_health_and_version(server: LiveServer) -> None:
    for answer in (server.http.get("/health"), server.http.get("/ping"), server.http.post("/ping")):
        assert (answer.status_code, answer.content) == (200, b"")
    assert server.http.post("/ping", content=b"{", headers={"Content-Type": "text/x"}).status_code == 200
    assert server.http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ping", "/v1/models", "/version", "/metrics", "/openapi.json", "/docs"]
)
def test_head_is_get_without_a_body(server: LiveServer, path: str) -> None:
    head, get = server.http.head(path), server.http.get(path)
    assert head.status_code == get.status_code == 200
    is_empty = path in ("/health", "/ping")
    assert head.content == b"" and bool(get.content) != is_empty
    names = ("content-length",) if is_empty else ("content-type", "content-length")
    # Of two looks at the metrics the second may be longer.
    same = names[:1] if path == "/metrics" else names
    assert [head.headers[name] for name in same] == [get.headers[name] for name in same]
    # The connection is still in order: no stray byte of a body stands before the next answer.
    assert server.http.get("/version").json() == {"version": __version__}


def test_head_of_what_cannot_be_read(server: LiveServer) -> None:
    for path, status in (("/v1/completions", 405), ("/tokenize", 405), ("/nothing", 404)):
        answer = server.http.head(path)
        assert answer.status_code == status and answer.content == b""


def test_the_pages_of_the_documentation_come_from_here(server: LiveServer) -> None:
    page = server.http.get("/docs").text
    links = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert len(links) == 3 and "//" not in "".join(links)
    for link in (*links, "/openapi.json"):
        answer = server.http.get(link)
        assert answer.status_code == 200 and answer.content
    assert "SwaggerUIBundle" in page


def test_tokens_there_and_back(server: LiveServer) -> None:
    text = "Once upon a time, 薔薇"
    answer = server.http.post("/tokenize", json={"prompt": text}).json()
    assert answer["tokens"] == server.engine.input_processor.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 1024
    assert server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokens_of_a_conversation(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    encode = server.engine.input_processor.tokenizer.encode
    for adds, end in ((None, "assistant:"), (True, "assistant:"), (False, "")):
        answer = server.http.post(
            "/tokenize", json={"messages": messages, "add_generation_prompt": adds}
        ).json()
        assert answer["tokens"] == encode("user: Hi\nassistant: Ho\n" + end)
        assert answer["token_strs"] is None and answer["count"] == len(answer["tokens"])
    chat = server.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    )
    assert chat.json()["prompt_token_ids"] == encode("user: Hi\nassistant: Ho\nassistant:")


TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALLED = {"id": "1", "function": {"name": "find", "arguments": '{"where": "here"}'}}


def test_conversations_are_rendered_as_in_chats(tiny_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ enable_thinking }}{{ reasoning_effort }}{{ x }}"
        "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{{ call.function.arguments.where }}{% endfor %}.{% endfor %}{{ '!' if add_generation_prompt }}"
    )
    messages = [
        {"role": "assistant", "tool_calls": [CALLED]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    seen = set()
    with running_server(tiny_model_path, {"chat_template": str(path)}) as server:
        decode = server.engine.input_processor.tokenizer.decode
        for fields in (
            {},
            {"tools": [TOOL]},
            {"chat_template_kwargs": {"x": "\u00fc", "enable_thinking": False}},
            {"reasoning_effort": "low"},
            {"continue_final_message": True},
            {"add_generation_prompt": False},
        ):
            body = {"messages": messages, **fields}
            once = {
                "tool_choice": "none" if "tools" in fields else None,
                "max_tokens": 1,
                "return_token_ids": True,
            }
            chat = server.post("/v1/chat/completions", {**body, **once})
            tokens = server.http.post("/tokenize", json=body).json()["tokens"]
            assert tokens == chat.json()["prompt_token_ids"] and "here" in decode(tokens)
            seen.add(decode(tokens))
        assert len(seen) == 6
        body = {"messages": messages, "tools": [TOOL] * 100, "tool_choice": "none"}
        check_refused(server.post("/v1/chat/completions", body), "messages", "allowed are at most 1023")
        assert server.http.post("/tokenize", json=body).json()["count"] > 1023
        # Nothing to call is no refusal here, as in vLLM.
        assert server.http.post("/tokenize", json={"messages": messages, "tools": []}).status_code == 200
        for fields, param, reason in (
            ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "which the server sets"),
            (
                {"continue_final_message": True, "add_generation_prompt": True},
                "continue_final_message",
                "one of them",
            ),
            ({"tools": [TOOL] * 129}, "tools", "at most 128 items"),
            (
                {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 99_999}}]},
                "tools",
                "ch",
            ),
            (
                {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
                "tool_choice",
                "supported",
            ),
            (
                {"messages": [{"role": "user", "content": "rose " * 9_000}]},
                "messages",
                "got 45000 characters",
            ),
        ):
            check_refused(server.post("/tokenize", {"messages": messages, **fields}), param, reason)
        for fields in (
            {"tools": [TOOL]},
            {"chat_template_kwargs": {"x": 1}},
            {"continue_final_message": True},
        ):
            (name,) = fields
            check_refused(server.post("/tokenize", {"prompt": "a", **fields}), name, "with messages only")
        assert server.http.post(
            "/tokenize", json={"prompt": "a", "tools": [], "reasoning_effort": "none"}
        ).is_success


@pytest.mark.parametrize("at_once", [1, 3, 4096])
def test_tokens_as_the_vocabulary_writes_them(
    server: LiveServer, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(routes, "_IDS_AT_ONCE", at_once)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    for body in (
        {"prompt": 'Once, 薔薇 "<|endoftext|>'},
        {"messages": [{"role": "user", "content": "a\nb"}]},
    ):
        answer = server.http.post("/tokenize", json={**body, "return_token_strs": True}).json()
        assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
        assert len(answer["token_strs"]) == answer["count"] > 2


def test_ids_without_a_token_leave_nothing_behind(server: LiveServer) -> None:
    decoder = server.engine.input_processor.tokenizer.decoder(skip_special_tokens=False)
    assert decoder is not None
    decoder.prepare()
    num_known = len(decoder._bytes_of)
    for first in range(0, 100_000, 1000):
        answer = server.http.post("/detokenize", json={"tokens": list(range(first, first + 1000))})
        assert (answer.status_code == 200) == (first + 1000 <= server.engine.input_processor.vocab_size)
    assert "tokens.0: got 99000, allowed are integers from 0 to 2559" in error_of(answer)["message"]
    answer = server.http.post("/detokenize", json={"tokens": [1] * 1024})
    assert answer.status_code == 200 and answer.json()["prompt"]
    answer = server.http.post("/detokenize", json={"tokens": [1] * 1025})
    assert "tokens: got 1025 token ids, allowed are at most 1024" in error_of(answer)["message"]
    assert len(decoder._bytes_of) == num_known


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "the rose " * 10}), ("/detokenize", {"tokens": [70] * 30})]
)
def test_long_work_leaves_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    def threads_of(limit: int) -> set[str]:
        names: set[str] = set()

        def note(*_: object, **__: object) -> object:
            names.add(threading.current_thread().name)
            return [70] * 30 if path == "/tokenize" else "text"

        monkeypatch.setattr(routes, "_MAX_INLINE_LENGTH", limit)
        monkeypatch.setattr(server.engine.input_processor.tokenizer, "encode", note)
        monkeypatch.setattr(server.engine.input_processor.tokenizer, "decode", note)
        assert server.http.post(path, json=body).status_code == 200
        return names

    assert threads_of(1000) == {"rose-server"}
    assert "rose-server" not in threads_of(20)


def test_long_lists_of_ids_are_written_in_parts(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = server.http.post("/tokenize", json={"prompt": "the rose " * 10}).content
    for number in (1, 3, len(json.loads(whole)["tokens"])):
        monkeypatch.setattr(routes, "_IDS_AT_ONCE", number)
        assert server.http.post("/tokenize", json={"prompt": "the rose " * 10}).content == whole
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_metrics_move(server: LiveServer) -> None:
    names = {
        "prompt_tokens_total": 10,
        "generation_tokens_total": 4 + 3 + 3,
        "prefix_cache_queries_total": 10,
        "time_to_first_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_time_per_output_token_seconds_count": 2,
        'request_success_total{finished_reason="length",model_name="tiny"}': 3,
        'http_responses_total{route="/v1/completions",status="200"}': 2,
        'http_responses_total{route="/v1/completions",status="400"}': 1,
        'http_responses_total{route="other",status="404"}': 1,
    }
    # Makes every series appear.
    server.complete(prompt=[1], n=0)
    server.http.get("/unknown")
    server.complete(prompt=[1])
    before = server.http.get("/metrics").text
    server.complete(prompt=[70, 71, 72, 73, 74], max_tokens=4, ignore_eos=True, stream=True)
    server.complete(prompt=[80, 81, 82, 83, 84], max_tokens=3, ignore_eos=True, n=2, seed=1)
    server.complete(prompt=[1], n=0)
    server.http.get("/another")
    after = server.http.get("/metrics").text
    moved = {name: read_metric(after, name) - read_metric(before, name) for name in names}
    assert moved == names
    # Tokens that come while the server is busy are delivered together.
    name = "inter_token_latency_seconds_count"
    assert read_metric(after, name) - read_metric(before, name) <= 3 + 2
    server.complete(prompt=[70, 71, 72, 73, 74], max_tokens=200, ignore_eos=True, stream=True)
    assert 1 <= server.metric(name) - read_metric(after, name) <= 199
    assert read_metric(after, "num_requests_running") == read_metric(after, "num_requests_waiting") == 0
    assert read_metric(after, "kv_cache_usage_perc") == 0
    assert read_metric(after, "num_preemptions_total") == 0


@pytest.mark.parametrize("frontend_multiprocessing", [False, True])
def test_metrics_of_drafts(tiny_model_path: Path, frontend_multiprocessing: bool) -> None:
    drafts = {
        "method": "ngram_gpu",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    settings = {"frontend_multiprocessing": frontend_multiprocessing}
    fields = {"prompt": [70, 71, 72] * 9, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with running_server(tiny_model_path, settings) as plain:
        text = plain.complete(**fields).json()["choices"][0]["text"]
        assert "spec_decode" not in plain.http.get("/metrics").text
    options = {"speculative_config": drafts, "adaptive_drafts": False}
    with running_server(tiny_model_path, settings, **options) as server:
        assert read_metric(server.http.get("/metrics").text, "spec_decode_num_drafts_total") == 0
        assert server.complete(**fields).json()["choices"][0]["text"] == text
        after = server.http.get("/metrics").text
    num_drafts = read_metric(after, "spec_decode_num_drafts_total")
    num_accepted = read_metric(after, "spec_decode_num_accepted_tokens_total")
    assert 0 < num_accepted <= read_metric(after, "spec_decode_num_draft_tokens_total") == 2 * num_drafts
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    by_position = [read_metric(after, f'{name}{{model_name="{MODEL}",position="{each}"}}') for each in (0, 1)]
    assert by_position[0] >= by_position[1] and sum(by_position) == num_accepted


DASHBOARD = (
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_sum",
    "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum",
)
"""Every series that vLLM's example dashboard for Grafana asks for, by its ``model_name``."""


def test_a_dashboard_for_vllm_finds_everything(server: LiveServer) -> None:
    server.complete(prompt=PROMPT, max_tokens=2, ignore_eos=True)
    text = server.http.get("/metrics").text
    for name in DASHBOARD:
        assert re.search(rf'(?m)^rose:{name}{{(.*,)?model_name="{MODEL}"', text), name


def test_the_dashboard_asks_for_what_is_served(server: LiveServer) -> None:
    server.complete(prompt=PROMPT, max_tokens=2, ignore_eos=True)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            # Prometheus itself says which server a sample is of.
            labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    board = json.loads((EXAMPLES / "grafana_dashboard.json").read_text())
    variables = {each["name"]: each for each in board["templating"]["list"]}
    for name in ("model_name", "instance"):
        match = re.fullmatch(r"label_values\((rose:\w+), (\w+)\)", variables[name]["definition"])
        assert match and match[2] in labels[match[1]] and variables[name]["query"]["query"] == match[0]
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert len(targets) == 30
    for query, legend in ((each["expr"], each["legendFormat"]) for each in targets):
        selectors = re.findall(r"(rose:\w+)\{(.*?)\}", query)
        assert selectors and len(selectors) == query.count("rose:"), query
        known = set.intersection(*(labels.get(name, set()) for name, _ in selectors))
        matchers = ", ".join(text for _, text in selectors).split(", ")
        asked = {each.partition("=")[0] for each in matchers} | set(re.findall(r"\{\{(\w+)\}\}", legend))
        asked |= {name for group in re.findall(r"by \((.*?)\)", query) for name in group.split(", ")}
        assert asked <= known, f"{query} ({legend}): {asked - known}"
        assert set(re.findall(r"\$(\w+)", query)) <= variables.keys() | {"__rate_interval"}, query


def test_times_of_a_request_add_up(server: LiveServer) -> None:
    names = [f"request_{part}_time_seconds" for part in ("queue", "prefill", "decode")]
    before = server.http.get("/metrics").text
    server.complete(prompt=[[70, 71, 72], [80, 81]], max_tokens=20, ignore_eos=True, n=2, seed=1)
    after = server.http.get("/metrics").text

    def moved(name: str) -> float:
        return read_metric(after, name) - read_metric(before, name)

    assert [moved(f"{name}_count") for name in names] == [2, 2, 2]
    parts = [moved(f"{name}_sum") for name in names]
    assert min(parts) > 0 and sum(parts) <= moved("e2e_request_latency_seconds_sum")
    assert parts[0] + parts[1] <= moved("time_to_first_token_seconds_sum")
    for name, count, total in (("prompt", 2, 5), ("generation", 4, 80), ("max_num_generation", 2, 40)):
        assert moved(f"request_{name}_tokens_count") == count
        assert moved(f"request_{name}_tokens_sum") == total
    buckets = re.findall(r'rose:request_prompt_tokens_bucket{le="(\S+?)"', after)
    # The model's window is 1024.
    assert buckets == [f"{each}.0" for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)] + ["+Inf"]


def test_the_block_view_reads_them(server: LiveServer) -> None:
    server.complete(prompt=PROMPT)
    reading = parse_metrics(server.http.get("/metrics").text, server.url, 0.0)
    assert (reading.usage, reading.model, reading.num_engines) == (0.0, MODEL, 1)
    assert (reading.num_blocks, reading.block_size) == (599, 16)
    names = ("num_requests_running", "num_requests_waiting", "num_preemptions_total")
    assert [reading.totals[name] for name in names] == [0, 0, 0]
    names = ("generation_tokens_total", "prompt_tokens_total", "prefix_cache_queries_total")
    assert all(reading.totals[name] for name in names)
    assert "prefix_cache_hits_total" in reading.totals


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rose_backend.server.requests"]


def test_one_line_for_each_request(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rose_backend.server.requests")
    ids = list(range(300, 320))
    for number in (1, 2):
        server.http.post(
            "/v1/completions",
            # A stream's line is no different.
            json={"prompt": ids, "max_tokens": 3, "ignore_eos": True, "stream": number == 2},
            headers={"X-Request-Id": f"r{number}"},
        )
    server.http.post("/v1/completions", json={"prompt": "a", "n": 0}, headers={"X-Request-Id": "bad"})
    server.http.get("/health")
    server.http.get("/nothing%0Aelse")
    # A line is written after its answer.
    wait_until(lambda: len(lines_of(caplog)) == 4)
    fresh, cached, bad, unknown = lines_of(caplog)
    start = r"id=r%d route=/v1/completions status=200 prompt_tokens=20 cached_tokens=%s output_tokens=3 "
    times = r"ttft_ms=\d+\.\d latency_ms=\d+\.\d finish=length"
    assert re.fullmatch(start % (1, "0") + times, fresh)
    assert re.fullmatch(start % (2, "16") + times, cached)
    assert re.fullmatch(r"id=bad route=/v1/completions status=400 latency_ms=\d+\.\d error='n: got 0.*'", bad)
    assert "route=other status=404" in unknown and "\n" not in unknown


def test_a_request_that_ends_without_a_token_has_none_in_its_line(
    tiny_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rose_backend.server.requests")
    with running_server(tiny_model_path, max_num_seqs=1) as server, ThreadPoolExecutor(1) as pool:
        with long_stream(server):
            before = set(server.service.engine_request_ids)
            waiting = pool.submit(server.complete, prompt=PROMPT)
            wait_until(lambda: server.counters().load.num_waiting == 1)
            (last,) = server.service.engine_request_ids - before
            assert asyncio.run_coroutine_threadsafe(server.engine.abort(last), server._loop).result(HANG_S)
            usage = waiting.result(HANG_S).json()["usage"]
        assert usage["completion_tokens"] == 0 < usage["prompt_tokens"]
        wait_until(lambda: len(lines_of(caplog)) == 2)
    without = next(line for line in lines_of(caplog) if "status=200 latency_ms=" in line)
    assert "finish=abort" in without and "tokens=" not in without


def test_the_log_can_be_switched_off(tiny_model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rose_backend.server.requests")
    with running_server(tiny_model_path, {"log_requests": False}) as quiet:
        quiet.complete(prompt=PROMPT)
    assert not lines_of(caplog)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "forbidden"}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 300_000}]}, "messages"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools.0.function"),
        ("/tokenize", {"prompt": "a" * 300_000}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [2**31]}, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
        ("/detokenize", {"tokens": [1, 2, 2560]}, "tokens.2"),
        ("/detokenize", {"tokens": [1] * 1025}, "tokens"),
        ("/detokenize", {"tokens": [1], "token": 2}, "token"),
    ],
)
def test_bad_tokens(server: LiveServer, path: str, body: dict[str, object], param: str) -> None:
    check_refused(server.post(path, body), param, param)
