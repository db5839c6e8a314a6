"""When a text ends, and what of it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from rose_backend import LLM, CompletionOutput, SamplingParams
from tests.engine.conftest import GREEDY

PROMPT = "Once upon a time there was a"
LONG = replace(GREEDY, max_tokens=40)


def complete(llm: LLM, params: SamplingParams, prompt: str | list[int] = PROMPT) -> CompletionOutput:
    return llm.generate([prompt], params)[0].outputs[0]


def test_stop_string_across_token_boundaries(llm: LLM) -> None:
    whole = complete(llm, LONG)
    pieces = [llm.tokenizer.decode([token_id]) for token_id in whole.token_ids]
    # From the middle of one token to the middle of the third.
    stop = pieces[10][-1] + pieces[11] + pieces[12][:2]
    expected = whole.text[: whole.text.index(stop)]
    stopped = complete(llm, replace(LONG, stop=["never seen", stop]))
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (expected, "stop", stop)
    assert len(stopped.token_ids) <= 13
    assert whole.token_ids[: len(stopped.token_ids)] == stopped.token_ids
    kept = complete(llm, replace(LONG, stop=stop, include_stop_str_in_output=True))
    assert kept.text == expected + stop


def test_streamed_text_never_shows_any_of_the_stop_string(llm: LLM) -> None:
    whole = complete(llm, LONG).text
    stop = whole[30:45]
    seen = [output.outputs[0] for output in llm.stream(PROMPT, replace(LONG, stop=stop))]
    assert all(whole[: whole.index(stop)].startswith(completion.text) for completion in seen)
    assert (
        "".join(completion.delta_text for completion in seen) == seen[-1].text == whole[: whole.index(stop)]
    )


def test_stop_string_counts_in_the_last_token_too(llm: LLM) -> None:
    whole = complete(llm, GREEDY)
    stop = llm.tokenizer.decode(whole.token_ids[-1:])[-2:]
    first = next(count for count in range(1, 17) if stop in llm.tokenizer.decode(whole.token_ids[:count]))
    stopped = complete(llm, replace(GREEDY, stop=stop, max_tokens=first))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_stop_token(llm: LLM) -> None:
    whole = complete(llm, LONG)
    token_id = whole.token_ids[7]
    end = whole.token_ids.index(token_id)
    stopped = complete(llm, replace(LONG, stop_token_ids=[5, token_id]))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token_id)
    assert stopped.token_ids == whole.token_ids[: end + 1]
    assert stopped.text == llm.tokenizer.decode(whole.token_ids[:end])
    kept = complete(llm, replace(LONG, stop_token_ids=[token_id], include_stop_str_in_output=True))
    assert kept.text == llm.tokenizer.decode(whole.token_ids[: end + 1])


def test_end_of_text(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    # No draw of this model ends soon: make a token that it does produce the end-of-text token.
    whole = complete(llm, LONG)
    eos = whole.token_ids[9]
    llm.core._state.eos_token_ids = (eos,)
    ended = complete(llm, replace(LONG, ignore_eos=False))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(eos) + 1]
    assert ended.text == llm.tokenizer.decode(ended.token_ids[:-1])
    assert complete(llm, LONG).token_ids == whole.token_ids
    late = complete(llm, replace(LONG, ignore_eos=False, min_tokens=20))
    assert eos not in late.token_ids[:20] and len(late.token_ids) >= 20


def test_min_tokens_forbids_stop_tokens_and_stop_strings(llm: LLM) -> None:
    whole = complete(llm, LONG)
    token_id = whole.token_ids[3]
    late = complete(llm, replace(LONG, stop_token_ids=[token_id], min_tokens=12))
    assert token_id not in late.token_ids[:12]
    assert len(late.token_ids) >= 12
    stop = whole.text[5:8]
    first_end = whole.text.index(stop) + 3
    assert len(complete(llm, replace(LONG, stop=stop)).text) == first_end - 3
    late = complete(llm, replace(LONG, stop=stop, min_tokens=12))
    assert len(late.token_ids) > 12
    assert late.text.startswith(llm.tokenizer.decode(whole.token_ids[:12]))


def test_length(llm: LLM) -> None:
    for max_tokens in (1, 2, 17):
        completion = complete(llm, replace(GREEDY, max_tokens=max_tokens))
        assert (len(completion.token_ids), completion.finish_reason) == (max_tokens, "length")


def test_max_tokens_none_fills_the_window(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=50)
    prompt = list(range(1, 31))
    completion = complete(llm, replace(GREEDY, max_tokens=None), prompt)
    assert (len(completion.token_ids), completion.finish_reason) == (20, "length")
    assert len(complete(llm, replace(GREEDY, max_tokens=None), list(range(1, 50))).token_ids) == 1


def test_tokens_behind_a_stop_are_not_cached(llm: LLM) -> None:
    stop_token = complete(llm, LONG).token_ids[5]
    assert llm.core.manager.reset_prefix_cache()
    stopped = complete(llm, replace(LONG, stop_token_ids=[stop_token]))
    known = llm.tokenizer.encode(PROMPT) + stopped.token_ids
    output = llm.generate([[*known, 77, 78]], GREEDY)[0]
    # The stop token was drawn, but no step computed it.
    assert output.num_cached_tokens == len(known) - 1


@pytest.mark.parametrize(
    "prompt", ["薔薇は六月に咲く。", "naïve café 🌹🌹", "\n\t ", "a\u0301\u200d", "<|endoftext|>"]
)
def test_any_text_streams_to_its_final_form(llm: LLM, prompt: str) -> None:
    params = SamplingParams(temperature=3.0, seed=5, max_tokens=60, ignore_eos=True)
    seen = [output.outputs[0] for output in llm.stream(prompt, params)]
    final = complete(llm, params, prompt)
    assert "".join(completion.delta_text for completion in seen) == seen[-1].text == final.text
    assert seen[-1].token_ids == final.token_ids
    assert final.text == llm.tokenizer.decode(final.token_ids)
    for earlier, later in pairwise(seen):
        assert later.text.startswith(earlier.text)
        assert not earlier.text.endswith("\ufffd" * 4)


def test_streams_of_several_completions(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=12, stop=["e"])
    deltas = ["", "", ""]
    last = None
    for output in llm.stream(PROMPT, params):
        for completion in output.outputs:
            deltas[completion.index] += completion.delta_text
        last = output
    assert last is not None and last.finished
    assert deltas == [completion.text for completion in last.outputs]
    final = llm.generate(PROMPT, params)[0]
    assert [completion.text for completion in final.outputs] == deltas


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream(PROMPT, replace(LONG, n=3))
    next(stream)
    next(stream)
    assert llm.core.num_unfinished == 1
    stream.close()  # type: ignore[attr-defined]
    assert llm.core.num_unfinished == 0
    assert llm.core.manager.num_free_blocks == llm.core.manager.num_usable_blocks
