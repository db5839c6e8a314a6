"""Every mistake gets one clear error, allocates nothing, and leaves the engine serving."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_backend import LLM, SamplingParams
from rose_backend.errors import ConfigError, EngineDeadError, ModelError, RequestError
from tests.engine.conftest import GREEDY, keeps_serving


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: got no tokens"),
        ([[]], "prompt: got no tokens"),
        ([[1] * 1024], "prompt: got 1024 tokens, allowed are at most 1023"),
        ("word " * 3000, "prompt: got [0-9]+ tokens, allowed are at most 1023"),
        ([[1, 2560]], "prompt: got token id 2560, allowed are integers from 0 to 2559"),
        ([[-1]], "prompt: got token id -1"),
        ([[1, 2.0]], "prompt: got token id float"),
        ([[1, True]], "prompt: got token id bool"),
        ([[10**30]], "prompt: got token id int"),
        ([None], "prompt: got NoneType, allowed are a string and a list of token ids"),
        ([{}], "prompt: got dict with \\[\\], allowed are prompt or prompt_token_ids, and cache_salt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt: got dict with"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt: got dict with"),
        ({"prompt": {"prompt": "a"}}, "prompt: got dict, allowed are"),
        ({"prompt_token_ids": [1, 2560]}, "prompt: got token id 2560"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt: got '', allowed is a string of 1 to 128 characters"),
        ({"prompt": "a", "cache_salt": "x" * 129}, "cache_salt: got 'xxx"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt: got 5"),
        *(([{"prompt": "a", "cache_salt": f"a{character}"}], "cache_salt: got 'a") for character in "@/\\\0"),
        (5, "prompts: got int"),
        ("a\ud800", "prompt: not valid Unicode text"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with keeps_serving(llm), pytest.raises(RequestError, match=f"^{message}"):
        llm.generate(prompt, replace(GREEDY, max_tokens=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 1020}, "max_tokens: got 1020, allowed is at most [0-9]+ after a prompt of"),
        ({"max_tokens": 10**9}, "max_tokens: got 1000000000"),
        ({"n": 33}, "n: got 33, allowed is at most 32, the engine's max_num_seqs"),
        ({"top_k": 2561}, "top_k: got 2561, allowed is -1 to 2560"),
        ({"top_k": 10**9}, "top_k: got 1000000000"),
        ({"stop_token_ids": [2560]}, "stop_token_ids: got 2560, allowed is ids from 0 to 2559"),
    ],
)
def test_parameters_that_do_not_fit_the_model(llm: LLM, options: dict[str, Any], message: str) -> None:
    with keeps_serving(llm), pytest.raises(RequestError, match=f"^{message}"):
        llm.generate("some words of text", SamplingParams(**options))


def test_one_bad_prompt_among_many_computes_nothing(llm: LLM) -> None:
    with keeps_serving(llm):
        steps = llm.stats.steps
        with pytest.raises(RequestError):
            llm.generate(["fine", "", "fine too"])
        with pytest.raises(RequestError, match=r"^sampling_params: got 1 for 2 prompts"):
            llm.generate(["a", "b"], [GREEDY])
        with pytest.raises(RequestError, match=r"^sampling_params: got dict"):
            llm.generate(["a"], [{"n": 1}])  # type: ignore[list-item]
        assert llm.stats.steps == steps


@pytest.mark.parametrize("index", [0, 63, 64, 149])
@pytest.mark.parametrize(
    "bad", [[], [1, True], [0, False, 5], [3, -1], [3, 2.0], [2**40], [10**6], [7] * 2000, {1}]
)
def test_a_bad_prompt_among_many_is_refused_as_it_is_alone(llm: LLM, index: int, bad: Any) -> None:
    with pytest.raises(RequestError) as alone:
        llm.generate([bad], GREEDY)
    prompts: list[Any] = [[5, 0, 1, 9], (0, 1), [2] * 30] * 50
    prompts[index] = bad
    steps = llm.stats.steps
    with pytest.raises(RequestError) as among:
        llm.generate_unordered(prompts, GREEDY)
    assert str(among.value) == str(alone.value) and llm.stats.steps == steps


def test_prompts_are_taken_as_they_are_in_any_company(llm: LLM) -> None:
    processor = llm.core.input_processor
    prompts: list[Any] = [[5, 0, 1, 9], [0], [1, 1], *([index + 2] * 7 for index in range(100))]
    params = [replace(GREEDY, max_tokens=index + 1) for index in range(len(prompts))]
    lists = processor.process_all(prompts, [GREEDY] * len(prompts))
    mixed = processor.process_all([*prompts, np.array([4, 5]), (6, 7), "text"], [GREEDY] * (len(prompts) + 3))
    for prompt, one, other in zip([*prompts, [4, 5], [6, 7]], [*lists, None, None], mixed, strict=False):
        for checked in (one, other):
            assert checked is None or checked.token_ids.tolist() == prompt
            assert checked is None or (checked.prompt is None and checked.token_ids.dtype == np.int32)
    assert [each.params for each in processor.process_all(prompts, params)] == params
    assert mixed[-1].prompt == "text" and len({checked.number for checked in (*lists, *mixed)}) == 209


def test_full_queue(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_queue_size=2, max_num_seqs=1)
    make, add = llm.core.input_processor.make, llm.core.add
    for name in ("a", "b"):
        add(make("text", GREEDY, request_id=name))
    with pytest.raises(RequestError, match=r"^queue: got a request while 2 wait, allowed are 2"):
        add(make("text", GREEDY, request_id="c"))
    llm.core.step()
    with pytest.raises(RequestError, match=r"^request_id: got 'a', which an unfinished request has"):
        add(make("text", GREEDY, request_id="a"))
    while llm.core.num_unfinished:
        llm.core.step()
    # A list longer than the queue is fed in bit by bit.
    assert len(llm.generate(["text"] * 7, GREEDY)) == 7


def test_an_unknown_id_is_not_aborted(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    with keeps_serving(llm):
        assert llm.core.abort("unknown") is None


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_abort_affects_no_other_request(make_llm: Callable[..., LLM], when: str) -> None:
    llm = make_llm(max_num_batched_tokens=32, max_num_seqs=4)
    core = llm.core
    expected = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    victim = core.input_processor.make([7] * 100, replace(GREEDY, n=3), request_id="victim")
    core.add(core.input_processor.make("Once upon a time", GREEDY, request_id="other"))
    core.add(victim)
    for _ in range({"waiting": 0, "prefilling": 2, "decoding": 6}[when]):
        core.step()
    output = core.abort("victim")
    assert output is not None and output.finished
    assert {completion.finish_reason for completion in output.outputs} == {"abort"}
    assert len(output.outputs) == (3 if when == "decoding" else 1)
    assert core.abort("victim") is None
    finished = [o for _ in range(40) for o in core.step()]
    assert [(o.request_id, o.outputs[0].token_ids) for o in finished] == [("other", expected)]
    # All four rows are free again.
    assert len(llm.generate("Once upon a time", replace(GREEDY, n=4))[0].outputs) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 16}, "LLM: unknown option 'block_sise'; did you mean 'block_size'"),
        ({"pacing": True}, "pacing: removed in release 0.2.0 "),
        (
            {"num_blocks": 64},
            "num_blocks: a pool of 64 blocks of 16 tokens can never hold .* needs num_blocks 65 ",
        ),
        ({"num_blocks": 9, "block_size": 128}, None),
        (
            {"num_blocks": 8, "block_size": 128},
            "num_blocks: a pool of 8 blocks of 128 tokens .* needs num_blocks 9 ",
        ),
        ({"cpu_kvcache_space_gib": 0.0001}, "cpu_kvcache_space_gib: a pool of [0-9]+ blocks"),
        ({"max_model_len": 1025}, "max_model_len: got 1025, allowed are at most 1024"),
        (
            {"chunked_prefill": False, "max_num_batched_tokens": 1023},
            "max_num_batched_tokens: got 1023, with chunked_prefill off at least max_model_len, which is 1024,",
        ),
        ({"chunked_prefill": False, "max_num_batched_tokens": 1024}, None),
        ({"device": "cuda:7"}, "device: got 'cuda:7'"),
        ({"fused_mlp": 1}, "fused_mlp: got 1"),
    ],
)
def test_start_up(make_llm: Callable[..., LLM], options: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert make_llm(**options).generate("Once", GREEDY)[0].finished
        return
    with pytest.raises(ConfigError, match=f"^{message}"):
        make_llm(**options)


def test_smallest_pool_holds_one_full_sequence(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_blocks=5, block_size=16, max_model_len=64)
    fill = replace(GREEDY, max_tokens=None)
    prompts = [[3] * 20, [3] * 20 + [4] * 20, [3] * 30]
    outputs = llm.generate(prompts, fill)
    roomy = make_llm(max_model_len=64).generate(prompts, fill)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in roomy]
    assert all(len(o.outputs[0].token_ids) == 64 - len(p) for o, p in zip(outputs, prompts, strict=True))


def test_unknown_and_damaged_models(tiny_model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no-such-model"):
        LLM(str(tmp_path / "no-such-model"))
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_model_path, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"model.safetensors"):
        LLM(str(damaged))
    without_tokenizer = tmp_path / "without-tokenizer"
    shutil.copytree(tiny_model_path, without_tokenizer, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ModelError, match=r"tokenizer"):
        LLM(str(without_tokenizer))


def test_failure_inside_a_step_ends_the_engine_with_its_cause(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()

    def fail(*args: object) -> None:
        raise ZeroDivisionError("made for this test")

    monkeypatch.setattr(llm.core._runner, "forward", fail)
    with pytest.raises(EngineDeadError, match=r"ZeroDivisionError: made for this test") as caught:
        llm.generate("Once")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineDeadError, match=r"the engine stopped earlier: ZeroDivisionError"):
        llm.generate("Once")


def test_ctrl_c_inside_a_step_stays_ctrl_c(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.core._runner, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("Once")
    with pytest.raises(EngineDeadError, match=r"stopped earlier: KeyboardInterrupt"):
        llm.generate("Once")


def test_closed_llm(make_llm: Callable[..., LLM], tiny_model_path: Path) -> None:
    with LLM(str(tiny_model_path)) as llm:
        pass
    llm.close()
    with pytest.raises(EngineDeadError, match=r"closed"):
        llm.generate("Once")
