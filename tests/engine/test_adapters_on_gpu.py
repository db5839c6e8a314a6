"""LoRA adapters on a GPU, where steps with them are captured graphs of their own: greedy tokens equal transformers'."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rose_backend import AsyncEngine, LoRARequest
from rose_backend.engine.decode_runner import DecodeRunner
from tests.support.adapters import GREEDY, AdapterCase, make_case

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "num_blocks": 2000,
    "max_num_seqs": 48,
    "max_num_batched_tokens": 512,
}
EVERY = [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AdapterCase:
    return make_case(tmp_path_factory.mktemp("qwen3"), "qwen3")


def test_all_adapters_at_once_and_each_alone(case: AdapterCase) -> None:
    with case.llm(**OPTIONS) as llm:
        runner = llm.core._runner
        assert runner.prompts is not None
        assert runner.decoder._adapted_graphs._graphs.keys() == runner.decoder._graphs._graphs.keys()
        assert runner.prompts._adapted_graphs._graphs.keys() == runner.prompts._graphs._graphs.keys()
        assert case.generate(llm, EVERY) == []
        for each in EVERY:
            assert case.generate(llm, [each], num_prompts=2) == []


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph": False},
        {"fused_kv_append": False, "fused_mlp": False},
        {"max_num_batched_tokens": 37, "num_blocks": 26, "max_model_len": 400},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "adaptive_drafts": False},
    ],
    ids=["launched", "not packed", "preempted", "drafts"],
)
def test_other_ways_to_the_same_tokens(case: AdapterCase, options: dict[str, Any]) -> None:
    with case.llm(**{**OPTIONS, **options}) as llm:
        assert case.generate(llm, EVERY) == []


def test_steps_without_an_adapter_have_the_plain_graphs(
    case: AdapterCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_adapters: list[bool] = []
    enqueue_again = DecodeRunner.enqueue_again

    def note(decoder: DecodeRunner) -> int:
        has_adapters.append(decoder._has_adapters)
        return enqueue_again(decoder)

    monkeypatch.setattr(DecodeRunner, "enqueue_again", note)
    with case.llm(**OPTIONS) as llm:
        for which, expected in (([0], {False}), ([1], {True}), ([0], {False})):
            assert case.generate(llm, which) == []
            assert set(has_adapters) == expected
            has_adapters.clear()


def test_adapters_come_and_go_beside_requests(case: AdapterCase) -> None:
    """Prompts run beside decode steps there, and weights are copied on a stream of their own."""

    async def answer(engine: AsyncEngine, which: int, lora: LoRARequest | None, prompt: int) -> bool:
        tokens: list[int] = []
        async for output in engine.generate(list(case.prompts[which][prompt]), GREEDY, lora_request=lora):
            tokens = output.outputs[0].token_ids
        return tuple(tokens) == case.references[which].token_ids[prompt]

    async def serve() -> list[bool]:
        options = {**OPTIONS, "enable_lora": True, "max_loras": 3, "dtype": "float32"}
        engine = AsyncEngine(str(case.path), **options)
        done: list[bool] = []

        async def keep_busy(which: int) -> None:
            for index in range(60):
                done.append(await answer(engine, which, case.adapters[which], index % 6))

        try:
            async with asyncio.TaskGroup() as tasks:
                for which in (0, 1, 0, 1):
                    tasks.create_task(keep_busy(which))
                for number in range(12):
                    which, first = 2 + number % 3, case.adapters[2 + number % 3]
                    assert first is not None
                    lora = LoRARequest("changing", 100 + number, first.lora_path)
                    answers = [tasks.create_task(answer(engine, which, lora, prompt)) for prompt in range(6)]
                    done += await asyncio.gather(*answers)
                    engine.unload_adapter(lora.lora_int_id)
        finally:
            await engine.shutdown()
        return done

    done = asyncio.run(serve())
    assert len(done) == 4 * 60 + 12 * 6 and all(done)


def test_in_bfloat16_answers_begin_as_with_merged_weights(case: AdapterCase) -> None:
    """Products are rounded more than in float32, so texts part sooner or later; without it at once."""
    prompts = [list(prompt) for prompt in case.prompts[1]]
    with case.llm(**OPTIONS, dtype="bfloat16") as llm:
        outputs = llm.generate(prompts * 2, GREEDY, lora_request=[case.adapters[1]] * 6 + [None] * 6)
    expected = [token_ids[0] for token_ids in case.references[1].token_ids] * 2
    agrees = [
        output.outputs[0].token_ids[0] == token for output, token in zip(outputs, expected, strict=True)
    ]
    assert sum(agrees[:6]) >= 4 and sum(agrees[6:]) <= 2, agrees
