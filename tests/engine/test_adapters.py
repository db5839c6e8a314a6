"""LoRA adapters: greedy tokens equal transformers' with merged weights, whatever else is in the batch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_backend import LLM, AsyncEngine, LoRARequest
from rose_backend.errors import ConfigError, RequestError
from rose_backend.layers import linear
from tests.support.adapters import GREEDY, KINDS, NUM_TOKENS, AdapterCase, make_case, write_adapter
from tests.support.llama_checkpoints import write_checkpoint
from tests.support.reference_generation import greedy_reference

FAMILIES = ("llama", "llama-biases", "mistral", "qwen2", "qwen3", "smollm3")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AdapterCase:
    return make_case(tmp_path_factory.mktemp("qwen3"), "qwen3")


EVERY = list(range(len(KINDS) + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_adapters_at_once_and_each_alone(family: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, family)
    with case.llm() as llm:
        assert case.generate(llm, EVERY) == []
        for each in EVERY:
            assert case.generate(llm, [each], num_prompts=2) == []


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_chunks_and_preemption(case: AdapterCase, run_ahead: int) -> None:
    limits = {"max_num_batched_tokens": 37, "num_blocks": 26, "max_model_len": 400}
    with case.llm(**limits, run_ahead=run_ahead) as llm:
        assert case.generate(llm, EVERY) == []
        assert llm.stats.preemptions > 0 and llm.stats.recomputed_tokens > 0


def test_several_completions(case: AdapterCase) -> None:
    with case.llm() as llm:
        assert case.generate(llm, EVERY, params=replace(GREEDY, n=3), num_prompts=3) == []


@pytest.mark.parametrize("adaptive_drafts", [False, True])
def test_drafts(case: AdapterCase, adaptive_drafts: bool) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with case.llm(speculative_config=drafts, adaptive_drafts=adaptive_drafts) as llm:
        assert case.generate(llm, EVERY) == []
        assert adaptive_drafts or llm.stats.spec_decode_num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["fused_kv_append", "fused_mlp", "fused_sampler", "fused_add_layernorm"])
def test_switches_off(case: AdapterCase, name: str) -> None:
    with case.llm(**{name: False}) as llm:
        assert case.generate(llm, EVERY, num_prompts=3) == []


def test_log_probabilities_are_the_adapters(case: AdapterCase) -> None:
    """Of a prompt, too, whose pass computes the hidden states of all its tokens."""
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    prompt = list(case.prompts[1][4])
    with case.llm() as llm:
        adapted, plain = llm.generate([prompt] * 2, params, lora_request=[case.adapters[1], None])
    with LLM(str(case.path.parent / "merged1"), device="cpu", dtype="float32") as merged:
        (expected,) = merged.generate([prompt], params)
    for got in (adapted, plain):
        close = [
            np.allclose(
                [logprob.logprob for each in (*ours, *of_prompt(got)) for logprob in each.values()],
                [logprob.logprob for each in (*theirs, *of_prompt(expected)) for logprob in each.values()],
                atol=1e-3,
            )
            for ours, theirs in [(got.outputs[0].logprobs, expected.outputs[0].logprobs)]
        ]
        assert close == [got is adapted]


@pytest.mark.parametrize("quantized", ["tiny-qwen3-chat-fp8", "tiny-qwen3-chat-w4a16"])
def test_models_with_quantized_weights_have_adapters(
    quantized: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    """They differ less from those without than an adapter changes either."""
    models = tiny_model_path.parent
    adapter = write_adapter(tmp_path / "adapter", models / "tiny-qwen3-chat", alpha=4)
    params = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    loras = [LoRARequest("adapter", 1, str(adapter)), None]
    found = []
    for name in ("tiny-qwen3-chat", quantized):
        with LLM(str(models / name), device="cpu", dtype="float32", enable_lora=True) as llm:
            outputs = llm.generate(["What is the capital of France?"] * 2, params, lora_request=loras)
            found += [
                np.array([logprob.logprob for each in of_prompt(output) for logprob in each.values()])
                for output in outputs
            ]
    adapted, plain, quantized_adapted, _ = found
    assert np.abs(quantized_adapted - adapted).mean() < 0.2 * np.abs(adapted - plain).mean()


def of_prompt(output: Any) -> list[Any]:
    return [each for each in output.prompt_logprobs if each is not None]


def test_prefixes_are_shared_by_requests_of_one_adapter_only(case: AdapterCase) -> None:
    prompt = list(case.prompts[1][5])
    with case.llm() as llm:
        for each in (1, 2, None):
            for expected in (0, len(prompt) - 1):
                adapter = None if each is None else case.adapters[each]
                (output,) = llm.generate([prompt], GREEDY, lora_request=adapter)
                assert output.num_cached_tokens == expected
        # With a salt, too.
        salted = {"prompt_token_ids": prompt, "cache_salt": "salt"}
        (output,) = llm.generate([salted], GREEDY, lora_request=case.adapters[1])
        assert output.num_cached_tokens == 0


def test_an_adapter_that_is_loaded_again_finds_no_prefix_of_its_old_weights(
    case: AdapterCase, tmp_path: Path
) -> None:
    """Its files have changed meanwhile; a request that was under way keeps the old ones."""
    prompt, lora = list(case.prompts[3][5]), LoRARequest("changing", 9, str(tmp_path / "changing"))
    write_adapter(tmp_path / "changing", case.path, seed=1, **KINDS[0])
    with case.llm(max_loras=2) as llm:
        before = llm.stream(prompt, GREEDY, lora_request=lora)
        next(before)
        llm.core.adapter_table().unload(9)
        write_adapter(tmp_path / "changing", case.path, seed=3, **KINDS[2])
        (output,) = llm.generate([prompt], GREEDY, lora_request=lora)
        assert output.num_cached_tokens == 0
        assert tuple(output.outputs[0].token_ids) == case.references[3].token_ids[5]
        *_, last = before
        old = greedy_reference(case.path.parent / "merged1", (tuple(prompt),), NUM_TOKENS)
        assert tuple(last.outputs[0].token_ids) == old.token_ids[0]


def test_more_adapters_than_slots_take_turns(case: AdapterCase) -> None:
    with case.llm(max_loras=2) as llm:
        for which in ([1, 2], [3, 4], [0, 1, 4]):
            assert case.generate(llm, which, num_prompts=2) == []
        with pytest.raises(RequestError, match="lora_name: got 'adapter 3', allowed are 2 adapters"):
            case.generate(llm, [1, 2, 3], num_prompts=1)


def test_a_slot_with_requests_is_not_given_away(case: AdapterCase) -> None:
    prompt = list(case.prompts[1][5])
    with case.llm(max_loras=1) as llm:
        under_way = llm.stream(prompt, GREEDY, lora_request=case.adapters[1])
        next(under_way)
        with pytest.raises(RequestError, match="lora_name: got 'adapter 2', allowed are 1 adapters"):
            llm.generate([prompt], GREEDY, lora_request=case.adapters[2])
        llm.core.adapter_table().unload(1)
        with pytest.raises(RequestError, match="1 of them until requests under way have ended"):
            llm.generate([prompt], GREEDY, lora_request=case.adapters[2])
        *_, last = under_way
        assert tuple(last.outputs[0].token_ids) == case.references[1].token_ids[5]
        assert case.generate(llm, [2], num_prompts=2) == []


def test_what_cannot_be_loaded_takes_no_others_slot(case: AdapterCase, tmp_path: Path) -> None:
    broken = write_adapter(tmp_path / "broken", case.path, rank=2)
    (broken / "adapter_model.safetensors").write_bytes(b"")
    with case.llm(max_loras=1) as llm:
        assert case.generate(llm, [1], num_prompts=1) == []
        for path in (broken, tmp_path / "none"):
            with pytest.raises(RequestError, match=r"^lora_path: "):
                llm.generate("a", GREEDY, lora_request=LoRARequest("broken", 7, str(path)))
            assert llm.core.adapter_table().has(case.adapters[1])
        assert case.generate(llm, [2], num_prompts=1) == []
        assert not llm.core.adapter_table().has(case.adapters[1])


def test_a_slot_is_not_given_away_before_all_prompts_are_added(case: AdapterCase) -> None:
    prompts = [list(case.prompts[which][5]) for which in (1, 1, 1, 1, 2)]
    adapters = [case.adapters[which] for which in (1, 1, 1, 1, 2)]
    with case.llm(max_loras=2, max_num_seqs=1, max_queue_size=1) as llm:
        under_way = llm.generate_unordered(prompts, GREEDY, lora_request=adapters)
        found = dict([next(under_way)])
        with pytest.raises(RequestError, match="lora_name: got 'adapter 3', allowed are 2 adapters"):
            llm.generate(prompts[:1], GREEDY, lora_request=case.adapters[3])
        found |= dict(under_way)
        assert [tuple(found[index].outputs[0].token_ids) for index in range(5)] == [
            case.references[which].token_ids[5] for which in (1, 1, 1, 1, 2)
        ]
        left = llm.generate_unordered(prompts, GREEDY, lora_request=adapters)
        next(left)
        left.close()
        assert case.generate(llm, [3, 4], num_prompts=2) == []


def test_an_iterator_loads_again_what_was_replaced_before_it_started(case: AdapterCase) -> None:
    prompt = list(case.prompts[1][5])
    with case.llm(max_loras=1) as llm:
        later = llm.stream(prompt, GREEDY, lora_request=case.adapters[1])
        assert case.generate(llm, [2], num_prompts=2) == []
        *_, last = later
        assert tuple(last.outputs[0].token_ids) == case.references[1].token_ids[5]
        # What cannot be loaded is refused at once.
        with pytest.raises(RequestError, match="lora_path: directory '/no/such' has no adapter_config"):
            llm.generate_unordered([prompt], GREEDY, lora_request=LoRARequest("a", 7, "/no/such"))


def test_steps_without_an_adapter_have_no_products_of_adapters(
    case: AdapterCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    add_adapters = linear.add_adapters

    def note(*args: Any, **options: Any) -> None:
        calls.append(1)
        add_adapters(*args, **options)

    monkeypatch.setattr(linear, "add_adapters", note)
    with case.llm() as llm:
        assert case.generate(llm, [0]) == [] and not calls
        assert case.generate(llm, [0, 1]) == [] and calls
        calls.clear()
        assert case.generate(llm, [0]) == [] and not calls


def test_what_adapters_do_not_go_with_is_refused(
    case: AdapterCase, tiny_model_path: Path, tmp_path: Path
) -> None:
    adapter = case.adapters[1]
    with (
        LLM(str(case.path), device="cpu") as llm,
        pytest.raises(RequestError, match="lora_request: got one, allowed is none without enable_lora"),
    ):
        llm.generate("a", GREEDY, lora_request=adapter)
    with pytest.raises(ConfigError, match="enable_lora: got True, allowed is False for a model with an MLP"):
        LLM(str(tiny_model_path), device="cpu", enable_lora=True)
    experts = write_checkpoint(tmp_path / "experts", "qwen3-moe")
    with pytest.raises(ConfigError, match="enable_lora: got True, allowed is False for a model with experts"):
        LLM(str(experts), device="cpu", enable_lora=True)
    head = {"method": "eagle3", "num_speculative_tokens": 2, "model": "head"}
    with pytest.raises(ConfigError, match="enable_lora: got True, allowed is False with drafts of an EAGLE"):
        case.llm(speculative_config=head)
    for name, value, most in (("max_loras", 9, 8), ("max_lora_rank", 65, 64), ("max_loras", 0, 8)):
        with pytest.raises(ConfigError, match=f"{name}: got {value}, allowed is an integer from 1 to {most}"):
            case.llm(**{name: value})


def test_wrong_lora_requests_are_refused(case: AdapterCase) -> None:
    for fields, message in (
        (("", 1, "path"), "lora_name: got ''"),
        (("a", 0, "path"), "lora_int_id: got 0"),
        (("a", True, "path"), "lora_int_id: got True"),
        (("a", 1, "a\0b"), "lora_path: got"),
        (("a", 1, "\udcff"), "lora_path: got"),
    ):
        with pytest.raises(RequestError, match=message):
            LoRARequest(*fields)
    adapter, wrong = case.adapters[1], LoRARequest("other", 1, "elsewhere")
    with case.llm() as llm:
        with pytest.raises(RequestError, match="lora_request: got 1 for 2 prompts"):
            llm.generate(["a", "b"], GREEDY, lora_request=[adapter])
        with pytest.raises(RequestError, match="lora_request: got str, allowed are a LoRARequest"):
            llm.generate(["a"], GREEDY, lora_request=["adapter"])  # type: ignore[list-item]
        with pytest.raises(
            RequestError, match="lora_int_id: got 1 for 'other' from 'elsewhere', allowed is 'adapter 1'"
        ):
            llm.generate(["a", "b"], GREEDY, lora_request=[adapter, wrong])
        with pytest.raises(RequestError, match="lora_path: directory '/no/such' has no adapter_config"):
            llm.generate("a", GREEDY, lora_request=LoRARequest("a", 7, "/no/such"))
        assert case.generate(llm, EVERY, num_prompts=2) == []


def test_an_async_engine_loads_an_adapter_once_for_all_that_ask(case: AdapterCase) -> None:
    async def answer(engine: AsyncEngine, which: int, prompt: int) -> list[int]:
        stream = engine.generate(list(case.prompts[which][prompt]), GREEDY, lora_request=case.adapters[which])
        return [output.outputs[0].token_ids async for output in stream][-1]

    async def serve() -> None:
        engine = AsyncEngine(str(case.path), device="cpu", dtype="float32", enable_lora=True, max_loras=4)
        order = [(which, prompt) for prompt in range(3) for which in EVERY]
        try:
            answers = await asyncio.gather(*(answer(engine, *one) for one in order))
            assert [tuple(each) for each in answers] == [
                case.references[which].token_ids[prompt] for which, prompt in order
            ]
            with pytest.raises(RequestError, match="lora_name: got 'fifth', allowed are 4 adapters at once"):
                await anext(engine.generate("a", lora_request=LoRARequest("fifth", 5, "path")))
            with pytest.raises(RequestError, match="lora_request: got str, allowed is a LoRARequest"):
                await anext(engine.generate("a", lora_request="adapter"))  # type: ignore[arg-type]
        finally:
            await engine.shutdown()

    asyncio.run(serve())


def test_an_adapter_that_is_unloaded_before_its_prompt_is_submitted(case: AdapterCase) -> None:
    """Is loaded again, or refused if another has its id; no prompt is answered with the other one."""

    async def serve() -> None:
        engine = AsyncEngine(str(case.path), device="cpu", dtype="float32", enable_lora=True, max_loras=2)
        load = engine.load_adapter
        first, second = case.adapters[1], case.adapters[2]
        nexts: list[LoRARequest | None] = []

        async def load_and_unload(lora: LoRARequest) -> None:
            await load(lora)
            if nexts:
                engine.unload_adapter(lora.lora_int_id)
                if (other := nexts.pop()) is not None:
                    await load(other)

        engine.load_adapter = load_and_unload  # type: ignore[method-assign]
        try:
            prompt = list(case.prompts[1][0])
            for other in (None, second):
                nexts.append(other)
                outputs = [each async for each in engine.generate(prompt, GREEDY, lora_request=first)]
                assert not nexts
                assert tuple(outputs[-1].outputs[0].token_ids) == case.references[1].token_ids[0]
            nexts.append(replace(second, lora_int_id=1))
            with pytest.raises(RequestError, match=r"^lora_int_id: got 1 for 'adapter 1' from"):
                await anext(engine.generate(prompt, GREEDY, lora_request=first))
        finally:
            await engine.shutdown()

    asyncio.run(serve())


def test_an_async_engine_without_adapters_goes_on(case: AdapterCase) -> None:
    async def serve() -> None:
        engine = AsyncEngine(str(case.path), device="cpu", dtype="float32")
        try:
            with pytest.raises(RequestError, match="allowed is none without enable_lora"):
                engine.unload_adapter(1)
            outputs = [output async for output in engine.generate(list(case.prompts[0][0]), GREEDY)]
            assert tuple(outputs[-1].outputs[0].token_ids) == case.references[0].token_ids[0]
        finally:
            await engine.shutdown()

    asyncio.run(serve())
