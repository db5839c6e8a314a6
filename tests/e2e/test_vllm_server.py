"""``vllm serve MODEL --attention-backend rose``: a real process, real HTTP, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.online.servers import free_port
from tests.support.reference_generation import greedy_differences
from tests.support.vllm_server import VllmServer, run_until_exits, running_server

MODEL_NAME = "tiny"
SERVER_ARGUMENTS = (
    *("--attention-backend", "rose"),
    *("--served-model-name", MODEL_NAME),
    *("--dtype", "float32"),
    *("--block-size", "128"),
    *("--max-num-seqs", "16"),
    "--enable-prompt-tokens-details",
    *("--additional-config", json.dumps({"rose": {"exact_cached_tokens": True}})),
)


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with running_server(tiny_model_path, log_path, *SERVER_ARGUMENTS) as running:
        yield running
        assert "Traceback" not in running.log
    # The context manager has sent Ctrl-C and found no process left.
    assert running.process.returncode is not None


def complete(server: VllmServer, prompt: Any, **parameters: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", model=MODEL_NAME, prompt=prompt, **parameters)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def cached_tokens(completion: dict[str, Any]) -> int:
    return int(completion["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_log_names_the_feature_status_once(server: VllmServer) -> None:
    lines = [line for line in server.log.splitlines() if "Rose is active" in line]
    assert len(lines) == 1, lines
    for part in (
        "attention ROSE",
        "RoseKVCacheManager (prefix hits to the token, reported exactly)",
        "fused MLP",
        "sampler Rose",
        "; disabled: none; ",
    ):
        assert part in lines[0]


def test_health_models_and_metrics(server: VllmServer) -> None:
    assert server.client.get("/health").status_code == 200
    assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == [MODEL_NAME]
    metrics = server.client.get("/metrics").text
    assert "vllm:prefix_cache_hits_total" in metrics and "vllm:kv_cache_usage_perc" in metrics


def test_completion_is_the_models_greedy_continuation(server: VllmServer, tiny_model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_path))
    prompt = tokenizer("Once upon a time there was a")["input_ids"]
    completion = complete(
        server, prompt, temperature=0, max_tokens=32, ignore_eos=True, return_token_ids=True
    )
    (choice,) = completion["choices"]
    assert greedy_differences(tiny_model_path, (tuple(prompt),), [choice["token_ids"]]) == []
    assert choice["text"] == tokenizer.decode(choice["token_ids"])


def test_streaming_sends_the_same_text_in_pieces(server: VllmServer) -> None:
    parameters = {"prompt": "The king said", "temperature": 0, "max_tokens": 24}
    whole = complete(server, **parameters)["choices"][0]["text"]
    pieces = []
    body = {"model": MODEL_NAME, "stream": True, **parameters}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(pieces) == whole and len(pieces) > 10


def test_a_hit_inside_a_block_costs_one_copy_and_disturbs_nobody(server: VllmServer) -> None:
    first = [7 * index % 2000 + 1 for index in range(120)]
    second = first[:100] + [3 * index % 2000 + 1 for index in range(60)]
    parameters = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    hits_before = prefix_hits(server)
    before = complete(server, first, **parameters)
    alone = complete(server, second, cache_salt="another tenant", **parameters)
    shared = complete(server, second, **parameters)
    again = complete(server, first, **parameters)
    assert cached_tokens(before) == 0 and cached_tokens(alone) == 0
    assert cached_tokens(shared) == 100
    assert prefix_hits(server) - hits_before == 100 + cached_tokens(again)
    assert shared["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert again["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    # The manager logs its counters with the first copy.
    (line,) = [line for line in server.log.splitlines() if "Rose block manager since start-up" in line][:1]
    assert "partial_hits 1," in line and "clones 1," in line


def prefix_hits(server: VllmServer) -> float:
    return metric(server, "vllm:prefix_cache_hits_total")


def metric(server: VllmServer, name: str) -> float:
    for line in server.client.get("/metrics").text.splitlines():
        if line.startswith(name):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name}")


def test_metrics_follow_the_pool_and_the_prefix_cache(server: VllmServer) -> None:
    def state() -> tuple[float, float, float]:
        names = ("kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total")
        usage, queries, hits = (metric(server, f"vllm:{name}") for name in names)
        return usage, queries, hits

    usage, queries, hits = state()
    assert usage == 0.0
    prompt = [11 * index % 2000 + 1 for index in range(300)]
    # A salt of its own, so that no earlier prompt has a token in common.
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": "metrics",
    }
    usages = []
    streamed = {**body, "max_tokens": 600, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=streamed) as response:
        for number, line in enumerate(response.iter_lines()):
            # Twice only: asking takes the time of many tokens, and the server does not wait for who reads slowly.
            if number in (0, 200):
                assert line.startswith("data: ")
                usages.append(metric(server, "vllm:kv_cache_usage_perc"))
    # 300 tokens in blocks of 128 to begin with, 900 in the end.
    assert 0 < usages[0] < usages[-1] < 1, usages
    assert state() == (0.0, queries + 300, hits)
    assert server.post("/v1/completions", **body, max_tokens=8).status_code == 200
    assert state() == (0.0, queries + 600, hits + 299)


def test_several_completions_with_a_seed(server: VllmServer) -> None:
    parameters = {"prompt": "In the morning", "n": 4, "seed": 11, "temperature": 1.0, "max_tokens": 16}
    first = [choice["text"] for choice in complete(server, **parameters)["choices"]]
    again = [choice["text"] for choice in complete(server, **parameters)["choices"]]
    assert first == again and len(set(first)) == 4
    # Child i of seed s is what seed s + i gives alone.
    single = complete(server, **{**parameters, "n": 1, "seed": 13})["choices"][0]["text"]
    assert single == first[2]


BAD_REQUESTS: dict[str, dict[str, Any]] = {
    "longer than the window": {"prompt": [5] * 1025},
    "empty prompt": {"prompt": []},
    "negative max_tokens": {"max_tokens": -1},
    "huge max_tokens": {"max_tokens": 1 << 40},
    "negative n": {"n": -1},
    "huge n": {"n": 1 << 30},
    "bad top_k": {"top_k": -5},
    "huge logprobs": {"logprobs": 100_000},
    "negative logprobs": {"logprobs": -7},
    "token id beyond the vocabulary": {"prompt": [1 << 20]},
    "negative token id": {"prompt": [-3]},
    "top_p above one": {"top_p": 1.5},
    "negative temperature": {"temperature": -1.0},
    "wrong type": {"max_tokens": "many"},
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_requests_get_one_clear_error_and_the_server_goes_on(server: VllmServer, case: str) -> None:
    body = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 4, **BAD_REQUESTS[case]}
    response = server.post("/v1/completions", **body)
    assert 400 <= response.status_code < 500, f"{response.status_code}: {response.text[:300]}"
    assert response.json()["error"]["message"]
    assert complete(server, "Once", max_tokens=2)["choices"][0]["text"]


def test_a_huge_top_k_keeps_every_token(server: VllmServer) -> None:
    parameters = {"prompt": "In the morning", "seed": 3, "max_tokens": 12}
    plain = complete(server, **parameters)["choices"][0]["text"]
    assert complete(server, top_k=1 << 40, **parameters)["choices"][0]["text"] == plain


def test_unknown_model_name_is_not_found(server: VllmServer) -> None:
    response = server.post("/v1/completions", model="no-such-model", prompt="Once")
    assert response.status_code == 404 and "no-such-model" in response.json()["error"]["message"]


REFUSED_AT_START: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown option": (
        ("--additional-config", '{"rose": {"fused_mpl": false}}'),
        "unknown option 'fused_mpl'; did you mean 'fused_mlp'?",
    ),
    "pool too small": (
        ("--num-gpu-blocks-override", "8", "--block-size", "128"),
        # vLLM's own check comes first.
        "To serve at least one request with the model's max seq len (1024)",
    ),
    "residency metrics": (
        ("--kv-cache-metrics",),
        "Rose's block manager does not support KV cache residency metrics",
    ),
    "unknown model": ((), "no-such-folder"),
}


# Four servers, one of which gets as far as starting its engine's processes.
def test_what_cannot_work_is_refused_at_start_up_with_one_line(tiny_model_path: Path, tmp_path: Path) -> None:
    commands: dict[str, list[str]] = {}
    for name, (arguments, _) in REFUSED_AT_START.items():
        model = tmp_path / "no-such-folder" if name == "unknown model" else tiny_model_path
        commands[name] = [str(model), "--port", str(free_port()), "--attention-backend", "rose", *arguments]
    ends = run_until_exits(commands, tmp_path)
    assert ends.keys() == REFUSED_AT_START.keys()
    for name, (_, message) in REFUSED_AT_START.items():
        status, log = ends[name]
        assert status > 0, name
        lines = [line for line in log.splitlines() if message in line]
        assert lines, f"{name}: {log[-2000:]}"
