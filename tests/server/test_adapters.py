"""LoRA adapters over HTTP: named as models, loaded and unloaded while requests run, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from rose_backend.engine import adapters as adapter_tables
from rose_backend.engine.outputs import RequestOutput
from rose_backend.errors import ConfigError
from rose_backend.models.adapters import AdapterSlots
from rose_backend.server import adapters as served_adapters
from rose_backend.server.settings import LoRAModule, ServerSettings
from tests.server.live_server import MODEL, LiveServer, error_of, running_server, wait_until
from tests.server.test_fuzz import CHECK_NAMES
from tests.server.test_llama_server import CHAT_TEMPLATE, MESSAGES
from tests.support.adapters import GREEDY, NUM_TOKENS, AdapterCase, make_case, write_adapter
from tests.support.llama_checkpoints import change_json
from tests.support.patience import HANG_S

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
STATIC = "adapter 1"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AdapterCase:
    case = make_case(tmp_path_factory.mktemp("qwen3"), "qwen3")
    (case.path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return case


def settings(case: AdapterCase, **fields: Any) -> dict[str, Any]:
    """Return settings of a server with one adapter, whose clients may load those of ``case``."""
    module = LoRAModule(STATIC, str(case.path.parent / "adapter1"))
    return {"lora_modules": (module,), "runtime_lora_dir": str(case.path.parent), **fields}


@pytest.fixture(scope="module", params=[False, True], ids=["one-process", "two-processes"])
def server(request: pytest.FixtureRequest, case: AdapterCase) -> Iterator[LiveServer]:
    fields = settings(case, frontend_multiprocessing=request.param)
    with running_server(case.path, fields, enable_lora=True, max_loras=3) as server:
        yield server
        server.wait_until_idle()


def names(server: LiveServer) -> list[str]:
    return [card["id"] for card in server.http.get("/v1/models").json()["data"]]


def load(server: LiveServer, name: str, path: str, **fields: Any) -> Any:
    return server.post(LOAD, {"lora_name": name, "lora_path": path, **fields})


def unload(server: LiveServer, name: str) -> Any:
    return server.post(UNLOAD, {"lora_name": name})


def body_of(case: AdapterCase, name: str, adapter: int, prompt: int) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": list(case.prompts[adapter][prompt]),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def difference(server: LiveServer, case: AdapterCase, name: str, adapter: int, prompt: int) -> str | None:
    """Return how an answer differs from transformers'; None: it does not."""
    answer = server.post("/v1/completions", body_of(case, name, adapter, prompt))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    token_ids = answer.json()["choices"][0]["token_ids"]
    reference = case.references[adapter]
    if tuple(token_ids) == reference.token_ids[prompt]:
        return None
    return f"{name}: {reference.explain_difference(prompt, token_ids)}"


def test_models_are_listed_with_their_parents(server: LiveServer, case: AdapterCase) -> None:
    base, adapter = server.http.get("/v1/models").json()["data"]
    assert base["id"] == MODEL and base["parent"] is None
    assert adapter["id"] == STATIC and adapter["parent"] == MODEL and adapter["max_model_len"] is None
    assert adapter["root"] == str(case.path.parent / "adapter1")
    assert adapter.keys() == base.keys()


def test_rows_with_and_without_adapters_run_together(server: LiveServer, case: AdapterCase) -> None:
    assert load(server, "second", "adapter2").text == "Success: LoRA adapter 'second' added successfully."
    order = [
        (name, which, prompt)
        for prompt in range(6)
        for name, which in ((MODEL, 0), (STATIC, 1), ("second", 2))
    ]
    with ThreadPoolExecutor(8) as pool:
        assert not [each for each in pool.map(lambda one: difference(server, case, *one), order) if each]
    assert unload(server, "second").text == "Success: LoRA adapter 'second' removed successfully."


def test_adapters_come_and_go_under_load(server: LiveServer, case: AdapterCase) -> None:
    """Each is unloaded while a request uses it, which is answered to its end, and another one takes its name."""
    differences: list[str | None] = []
    is_over = threading.Event()

    def keep_busy(name: str, which: int) -> None:
        while not is_over.is_set():
            differences.append(difference(server, case, name, which, len(differences) % 6))

    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(keep_busy, MODEL, 0), pool.submit(keep_busy, STATIC, 1)]
        try:
            for which in (2, 3, 4, 2, 3, 4):
                assert load(server, "changing", f"adapter{which}").status_code == 200
                assert names(server) == [MODEL, STATIC, "changing"]
                body = body_of(case, "changing", which, 5) | {"stream": True}
                with server.http.stream("POST", "/v1/completions", json=body) as answer:
                    lines = answer.iter_lines()
                    first = next(lines)
                    assert unload(server, "changing").status_code == 200
                    events = [line.removeprefix("data: ") for line in (first, *lines) if line]
                assert events.pop() == "[DONE]"
                chunks = [json.loads(event) for event in events]
                token_ids = [each for chunk in chunks for each in chunk["choices"][0]["token_ids"]]
                assert tuple(token_ids) == case.references[which].token_ids[5]
                assert {chunk["model"] for chunk in chunks} == {"changing"}
                gone = server.complete(model="changing", prompt="a")
                assert gone.status_code == 404 and error_of(gone)["code"] == "model_not_found"
        finally:
            is_over.set()
        for each in pending:
            each.result(HANG_S)
    assert differences and not any(differences)


def test_what_was_submitted_before_an_adapter_is_unloaded_is_answered(
    server: LiveServer, case: AdapterCase
) -> None:
    assert load(server, "leaving", "adapter2").status_code == 200
    served = server.service.adapters.find("leaving")
    assert served is not None
    engine, lora_id = server.engine, served.lora.lora_int_id
    prompt = engine.input_processor.process(list(case.prompts[2][5]), GREEDY)._replace(lora_id=lora_id)

    async def submit_and_unload() -> list[int]:
        async def answer() -> list[int]:
            outputs = engine.generate_deltas(prompt, request_id=None)
            return [token async for output in outputs for token in output.outputs[0].token_ids]

        answering = asyncio.ensure_future(answer())
        await asyncio.sleep(0)
        engine.unload_adapter(lora_id)
        return await answering

    answered = asyncio.run_coroutine_threadsafe(submit_and_unload(), server._loop).result(HANG_S)
    assert tuple(answered) == case.references[2].token_ids[5]
    assert unload(server, "leaving").status_code == 200


def test_a_request_keeps_its_adapter_until_all_its_prompts_are_submitted(
    server: LiveServer, case: AdapterCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is replaced and unloaded meanwhile; who loads another one waits for the slot."""
    submission = server.service.submission
    which = {"held": 2, "replaced": 3}
    for name, number in which.items():
        assert load(server, name, f"adapter{number}").status_code == 200
    asyncio.run_coroutine_threadsafe(submission.acquire(), server._loop).result(HANG_S)
    with ThreadPoolExecutor(3) as pool:
        try:
            answers = {}
            for name, number in which.items():
                body = body_of(case, name, number, 5)
                body["prompt"] = [body["prompt"]] * 3
                answers[name] = pool.submit(server.post, "/v1/completions", body)
            wait_until(lambda: len(submission._waiters or ()) == len(which))
            assert unload(server, "held").status_code == 200
            monkeypatch.setattr(served_adapters, "_WAIT_S", 0.0)
            refusal = load(server, "replaced", "adapter4", load_inplace=True)
            assert refusal.status_code == 400
            assert error_of(refusal)["message"] == (
                "lora_name: got 'replaced', allowed are 3 adapters at once (max_loras), which are loaded; 1 of them "
                "until requests under way have ended"
            )
            monkeypatch.setattr(served_adapters, "_WAIT_S", HANG_S)
            loading = pool.submit(load, server, "replaced", "adapter4", load_inplace=True)
            wait_until(lambda: loading.done() or bool(server.service.adapters._has_left._waiters))
        finally:
            server._loop.call_soon_threadsafe(submission.release)
        for name, number in which.items():
            answer = answers[name].result(HANG_S)
            assert answer.status_code == 200, answer.text
            token_ids = {tuple(each["token_ids"]) for each in answer.json()["choices"]}
            assert token_ids == {case.references[number].token_ids[5]}
        assert loading.result(HANG_S).status_code == 200, loading.result().text
    assert difference(server, case, "replaced", 4, 5) is None
    assert unload(server, "replaced").status_code == 200


def test_an_adapter_is_replaced_in_place(server: LiveServer, case: AdapterCase) -> None:
    """And finds no prefix that was computed with the weights before."""
    assert load(server, "replaced", "adapter2").status_code == 200
    assert difference(server, case, "replaced", 2, 5) is None
    again = server.post("/v1/completions", body_of(case, "replaced", 2, 5)).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    answer = load(server, "replaced", "adapter3")
    assert answer.status_code == 400
    assert error_of(answer)["message"].startswith(
        "The lora adapter 'replaced' has already been loaded. If you"
    )
    assert load(server, "replaced", "adapter3", load_inplace=True).status_code == 200
    assert names(server).count("replaced") == 1
    fresh = server.post("/v1/completions", body_of(case, "replaced", 2, 5)).json()
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert difference(server, case, "replaced", 3, 5) is None
    assert unload(server, "replaced").status_code == 200


def test_every_route_takes_an_adapter(server: LiveServer) -> None:
    short: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", short),
        ("/v1/messages", short | {"messages": MESSAGES[1:]}),
        ("/v1/responses", {"input": "The rose", "max_output_tokens": 3, "temperature": 0}),
    ):
        texts = {}
        for name in (MODEL, STATIC):
            answer = server.post(path, body | {"model": name})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            texts[name] = str(
                answer.json().get("choices") or answer.json().get("content") or answer.json()["output"]
            )
        assert texts[MODEL] != texts[STATIC]
        assert server.post(path, body | {"model": "nobody"}).status_code == 404
    assert server.post("/tokenize", {"model": STATIC, "prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {"lora_name": "a"}, 400, "lora_path: "),
        (
            LOAD,
            {"lora_name": "", "lora_path": "a"},
            400,
            "Both 'lora_name' and 'lora_path' must be provided.",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": ""},
            400,
            "Both 'lora_name' and 'lora_path' must be provided.",
        ),
        (LOAD, {"lora_name": 5, "lora_path": "a"}, 400, "lora_name: "),
        (
            LOAD,
            {"lora_name": MODEL, "lora_path": "a"},
            400,
            f"The lora adapter '{MODEL}' conflicts with a served",
        ),
        (
            LOAD,
            {"lora_name": STATIC, "lora_path": "a"},
            400,
            f"The lora adapter '{STATIC}' has already been loaded.",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "nothing"},
            404,
            "Loading lora a failed: No adapter found for nothing",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "base"},
            404,
            "Loading lora a failed: No adapter found for base",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "../../../etc"},
            400,
            "lora_path: got '../../../etc', allowed are",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "/etc"},
            400,
            "lora_path: got '/etc', allowed are directories inside",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "/no/such"},
            400,
            "lora_path: got '/no/such', allowed are directories",
        ),
        (LOAD, {"lora_name": "a", "lora_path": "a\0b"}, 400, "lora_path: got what cannot be a path"),
        (LOAD, {"lora_name": "a", "lora_path": "\ud800"}, 400, "lora_path: got what cannot be a path"),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "a" * 4000},
            400,
            "lora_path: got a path that cannot be followed",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "a/" * 2049},
            400,
            "lora_path: got 4098 characters, allowed are",
        ),
        (LOAD, {"lora_name": "\ud800", "lora_path": "adapter2"}, 400, "lora_name: got "),
        (
            LOAD,
            {"lora_name": "a" * 300, "lora_path": "adapter2"},
            400,
            "lora_name: got 300 characters, allowed are",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "b", "load_in_place": True},
            400,
            "'load_in_place': unknown field",
        ),
        (UNLOAD, {"lora_name": ""}, 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
        (UNLOAD, {"lora_name": "nobody"}, 404, "The lora adapter 'nobody' cannot be found."),
        (UNLOAD, {"lora_name": MODEL}, 404, f"The lora adapter '{MODEL}' cannot be found."),
        (UNLOAD, {}, 400, "lora_name: "),
    ],
)
def test_refusals(server: LiveServer, path: str, body: dict[str, Any], status: int, message: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    assert error_of(answer)["message"].startswith(message)
    assert names(server) == [MODEL, STATIC]


def test_made_up_requests(server: LiveServer) -> None:
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    schema.config.update(base_url=server.url)
    checks = [check for check in CHECKS.get_all() if check.__name__ in CHECK_NAMES]
    statuses = set()
    for path in (LOAD, UNLOAD):
        operation = schema[path]["POST"]
        for mode in GenerationMode:

            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            @hypothesis.settings(max_examples=40, deadline=None, database=None, derandomize=True)
            def send(case: schemathesis.Case) -> None:
                answer = case.call(timeout=HANG_S)
                statuses.add((case.path, answer.status_code))
                case.validate_response(answer, checks=checks)

            send()
    assert {(LOAD, 400), (UNLOAD, 400), (UNLOAD, 404)} <= statuses
    assert names(server) == [MODEL, STATIC]


def test_links_lead_nowhere_else(server: LiveServer, case: AdapterCase, tmp_path: Path) -> None:
    """An adapter outside of the directory is not read through one inside, as a whole or in part."""
    write_adapter(tmp_path / "outside", case.path)
    inside = case.path.parent / "inside"
    inside.symlink_to(tmp_path / "outside")
    part = case.path.parent / "part"
    part.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (part / name).symlink_to(tmp_path / "outside" / name)
    try:
        for name in ("inside", "part"):
            answer = load(server, "a", name)
            assert answer.status_code == 400
            assert "allowed are directories inside that of --runtime-lora-dir" in error_of(answer)["message"]
    finally:
        inside.unlink()
        for file in part.iterdir():
            file.unlink()
        part.rmdir()


def test_what_cannot_be_loaded_leaves_its_slot_free(server: LiveServer, case: AdapterCase) -> None:
    broken = write_adapter(case.path.parent / "broken", case.path, rank=2)
    change_json(broken / "adapter_config.json", use_dora=True)
    for _ in range(3):
        answer = load(server, "broken", "broken")
        assert answer.status_code == 400 and error_of(answer)["param"] == "lora_path"
        assert error_of(answer)["message"].startswith("lora_path: adapter_config.json: use_dora: got True")
    assert difference(server, case, STATIC, 1, 2) is None
    for name in ("b", "c"):
        assert load(server, name, "adapter2").status_code == 200
    answer = load(server, "d", "adapter2")
    assert answer.status_code == 400
    assert (
        error_of(answer)["message"]
        == "lora_name: got 'd', allowed are 3 adapters at once (max_loras), which are loaded"
    )
    for name in ("b", "c"):
        assert unload(server, name).status_code == 200


def test_clients_see_paths_as_they_gave_them(server: LiveServer, case: AdapterCase) -> None:
    folder = case.path.parent
    partial = folder / 'it\'s "part"'
    partial.mkdir(exist_ok=True)
    shutil.copy(folder / "adapter2" / "adapter_config.json", partial)
    damaged = write_adapter(folder / "damaged", case.path, rank=2) / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:50])
    for path in (partial.name, "damaged", str(folder / "damaged")):
        answer = load(server, "a", path)
        assert answer.status_code == 400 and error_of(answer)["param"] == "lora_path"
        message = error_of(answer)["message"]
        assert repr(path)[1:-1] in message and (path.startswith("/") or str(folder) not in message), message
    # Where the folder's path is part of what was given.
    around = f"{folder}/damaged" + "/../damaged" * 99
    message = error_of(load(server, "a", around))["message"]
    assert message.count("/../damaged") < 20 and len(message) < 1000, message
    for path in ("./adapter2", str(folder / "adapter2")):
        assert load(server, "a", path).status_code == 200
        assert server.http.get("/v1/models").json()["data"][-1]["root"] == path
        assert difference(server, case, "a", 2, 1) is None
        assert unload(server, "a").status_code == 200


def test_requests_are_answered_while_an_adapter_is_read(
    case: AdapterCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read, goes_on = threading.Event(), threading.Event()
    read = AdapterSlots.load

    def wait_and_load(slots: AdapterSlots, slot: int, directory: Path) -> None:
        if directory.name == "adapter2":
            is_read.set()
            assert goes_on.wait(HANG_S)
        read(slots, slot, directory)

    monkeypatch.setattr(AdapterSlots, "load", wait_and_load)
    with running_server(case.path, settings(case), enable_lora=True) as server, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, server, "slow", "adapter2")
        assert is_read.wait(HANG_S)
        try:
            for name, which in ((MODEL, 0), (STATIC, 1)):
                assert difference(server, case, name, which, 3) is None
            assert server.complete(model="slow", prompt="a").status_code == 404
        finally:
            goes_on.set()
        assert loading.result(HANG_S).status_code == 200
        assert difference(server, case, "slow", 2, 3) is None


def test_a_request_whose_adapter_was_unloaded_on_its_way_is_refused(case: AdapterCase) -> None:
    with running_server(case.path, settings(case), enable_lora=True) as server:
        served = server.service.adapters.find(STATIC)
        assert served is not None
        server.engine.unload_adapter(served.lora.lora_int_id)
        answer = server.complete(model=STATIC, prompt="a", max_tokens=1)
        assert answer.status_code == 400
        assert (
            error_of(answer)["message"]
            == "model: got a LoRA adapter that is not loaded, allowed are those that are"
        )
        assert difference(server, case, MODEL, 0, 1) is None


def test_a_load_waits_for_the_slot_of_what_was_unloaded_before(
    case: AdapterCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unload is carried out after the present step, which goes on until the load waits."""
    is_stepping, goes_on, waits = threading.Event(), threading.Event(), threading.Event()
    wait_for = threading.Condition.wait_for

    with (
        running_server(case.path, settings(case), enable_lora=True, max_loras=1) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        step, table = server.core.step, server.core.adapter_table()

        def stop_and_step() -> list[RequestOutput]:
            is_stepping.set()
            assert goes_on.wait(HANG_S)
            return step()

        def note_and_wait(condition: threading.Condition, *args: Any) -> bool:
            if condition is table._lock:
                waits.set()
            return wait_for(condition, *args)

        monkeypatch.setattr(adapter_tables, "_WAIT_S", HANG_S)
        monkeypatch.setattr(server.core, "step", stop_and_step)
        monkeypatch.setattr(threading.Condition, "wait_for", note_and_wait)
        answering = pool.submit(difference, server, case, MODEL, 0, 5)
        assert is_stepping.wait(HANG_S)
        try:
            assert unload(server, STATIC).status_code == 200
            loading = pool.submit(load, server, "next", "adapter2")
            wait_until(lambda: loading.done() or waits.is_set())
        finally:
            goes_on.set()
        assert loading.result(HANG_S).status_code == 200, loading.result().text
        assert answering.result(HANG_S) is None
        assert difference(server, case, "next", 2, 5) is None


def test_without_a_directory_clients_cannot_load(case: AdapterCase) -> None:
    fields = settings(case, runtime_lora_dir=None)
    with running_server(case.path, fields, enable_lora=True) as server:
        assert {load(server, "a", "adapter2").status_code, unload(server, STATIC).status_code} == {404}
        assert names(server) == [MODEL, STATIC]
        assert LOAD not in server.http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("frontend_multiprocessing", [False, True])
def test_a_server_does_not_start_with_an_adapter_that_cannot_be_loaded(
    case: AdapterCase, frontend_multiprocessing: bool
) -> None:
    from rose_backend import EngineConfig
    from rose_backend.server.serve import serve

    config = EngineConfig(model=str(case.path), enable_lora=True, num_blocks=200)
    wrong = LoRAModule("wrong", str(case.path))
    fields: dict[str, Any] = {"served_model_names": (MODEL,), "port": 0, "lora_modules": (wrong,)}
    with pytest.raises(
        ConfigError, match=r"lora_modules: 'wrong': lora_path: directory .* has no adapter_config"
    ):
        serve(config, ServerSettings(**fields, frontend_multiprocessing=frontend_multiprocessing))


def test_settings_are_checked(case: AdapterCase) -> None:
    for fields, message in (
        ({"lora_modules": (LoRAModule("", "a"),)}, "lora_modules: got "),
        ({"lora_modules": (LoRAModule("a", ""),)}, "lora_modules: got "),
        ({"lora_modules": (LoRAModule(MODEL, "a"),)}, f"lora_modules: got '{MODEL}' twice"),
        ({"lora_modules": (LoRAModule("a", "a"), LoRAModule("a", "b"))}, "lora_modules: got 'a' twice"),
        ({"runtime_lora_dir": "/no/such"}, "runtime_lora_dir: got '/no/such', allowed is a directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServerSettings(served_model_names=(MODEL,), **fields)
    for name, value in settings(case).items():
        with (
            pytest.raises(ConfigError, match=f"{name}: allowed with enable_lora only"),
            running_server(case.path, {name: value}),
        ):
            pass
