"""``LLM``: how it feeds the engine, and several iterators that take turns with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rose_backend import LLM, SamplingParams
from rose_backend.engine.outputs import RequestOutput
from tests.engine.conftest import GREEDY

LONG = replace(GREEDY, max_tokens=40, ignore_eos=True)


def test_the_first_step_starts_before_all_requests_are_built(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(max_num_batched_tokens=64, max_num_seqs=16)
    prompts = [[index + 2] * 30 for index in range(12)]
    expected = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    step, known = llm.core.step, []

    def noting() -> list[RequestOutput]:
        known.append(llm.core.num_unfinished)
        return step()

    monkeypatch.setattr(llm.core, "step", noting)
    outputs = llm.generate(prompts, GREEDY)
    assert known[:2] == [3, 12]  # 3 x 30 tokens are more than a step takes
    assert [output.outputs[0].token_ids for output in outputs] == expected
    known.clear()
    llm.generate([[3]] * 12, GREEDY)
    assert known[0] == 12


def test_alternating_iterators_get_their_own_outputs(llm: LLM) -> None:
    prompts = ["Once upon a time", "The rose"]
    expected = [[output.outputs[0].text for output in llm.stream(prompt, LONG)] for prompt in prompts]
    streams = [llm.stream(prompt, LONG) for prompt in prompts]
    taken = list(zip(*streams, strict=True))
    assert [[output.outputs[0].text for output in texts] for texts in zip(*taken, strict=True)] == expected

    many = llm.generate_unordered([[index + 2] * 20 for index in range(6)], GREEDY)
    first = next(many)
    other = llm.generate("The rose", LONG)[0]
    assert other.outputs[0].text == expected[1][-1]
    assert sorted(index for index, _ in (first, *many)) == list(range(6))


def test_an_iterator_that_is_closed_leaves_nothing_behind(llm: LLM) -> None:
    stream, many = (
        llm.stream("The rose", LONG),
        llm.generate_unordered([[5] * 9, [6] * 9], [GREEDY, replace(LONG, max_tokens=20)]),
    )
    next(stream)
    next(many)
    assert len(list(stream)) == LONG.max_tokens - 1
    assert [output.finished for output in llm._unclaimed] == [True]
    many.close()  # type: ignore[attr-defined]
    assert llm.core.num_unfinished == 0 and llm._unclaimed == []
    llm.core.check_integrity()


def test_new_text_of_a_sibling_that_ended_is_new_once(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=40, stop=["a", "."])
    outputs = list(llm.stream("Once upon a time", params))
    last = outputs[-1].outputs
    assert len({len(completion.token_ids) for completion in last}) == 3, "they end at different times"
    for completion in last:
        news = [output.outputs[completion.index].delta_text for output in outputs if len(output.outputs) == 3]
        assert "".join(news) == completion.text


def test_the_table_that_decodes_many_texts_is_made_before_the_first_of_them(
    make_llm: Callable[..., LLM],
) -> None:
    decoder = make_llm().tokenizer.decoder()
    assert decoder is not None and "_table" in vars(decoder)
