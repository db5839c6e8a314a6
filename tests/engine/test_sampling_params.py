"""Every field is checked when the object is made, and against the model when the request is submitted."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest

from rose_backend import SamplingParams
from rose_backend.cli import options as cli_options
from rose_backend.errors import RequestError

NAN = math.nan


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", value) for value in (0, -1, 129, 10**30, True, 1.0, "2", None)],
        *[("max_tokens", value) for value in (0, -5, 2**31, True, 3.0, "16")],
        *[("min_tokens", value) for value in (-1, 17, True, None)],
        *[("temperature", value) for value in (-0.1, 1000.1, 1e39, 1e300, NAN, math.inf, True, "hot", None)],
        *[("temperature", value) for value in (10**30, 10**400, -(10**400))],
        *[("top_k", value) for value in (-2, 2**31, True, 1.5)],
        *[("top_p", value) for value in (0.0, -0.1, 1.1, NAN, True)],
        *[("min_p", value) for value in (-0.1, 1.1, NAN)],
        *[("seed", value) for value in (-1, 2**63, 1.0, True)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, 0.0099, 1e-38, 100.1, 1e39, NAN, math.inf)],
        *[("repetition_penalty", value) for value in (True, "1", None, 10**400)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, NAN)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN)],
        *[("logprobs", value) for value in (-1, 21, 10**9, True, 1.0)],
        *[("stop", value) for value in ("", [""], ["x" * 257], ["x"] * 17, [1], 5, {"a"}, "\ud800")],
        ("bad_words", ["\udfff"]),
        *[("stop_token_ids", value) for value in ([-1], [True], ["1"], [1] * 129, 7, "ab")],
        *[("allowed_token_ids", value) for value in ([], [-1], [2**31], [True], ["1"], 7, "ab", {1: 2})],
        ("allowed_token_ids", [1] * 1025),
        *[("logit_bias", {5: value}) for value in (NAN, math.inf, -math.inf, True, "1", None, 1e31, 10**400)],
        *[("logit_bias", {key: 1.0}) for key in (-1, 2**31, 10**40, True, 1.0, "", "x", "9" * 5000, None)],
        *[("logit_bias", value) for value in ([(1, 2)], "5", dict.fromkeys(range(1_000_000), 1.0))],
        *[("bad_words", value) for value in ("ab", [""], [1], [None], ["x" * 1025], ["x"] * 100_000, {"a"})],
        *[("ignore_eos", value) for value in (1, "no", None)],
        *[("include_stop_str_in_output", value) for value in (0, None)],
        *[("skip_special_tokens", value) for value in (1, "yes")],
    ],
)
def test_refusals_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{field}: got .*, allowed is ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 128),
        ("max_tokens", None),
        ("temperature", 0),
        ("temperature", 1000),
        ("temperature", 5e-324),
        ("top_k", -1),
        ("top_p", 1),
        ("top_p", 5e-324),
        ("min_p", 1.0),
        ("seed", 2**63 - 1),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100),
        ("presence_penalty", -2),
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0),
        ("frequency_penalty", 2),
        ("stop", "x" * 256),
        ("stop", ("a", "b")),
        ("logprobs", 0),
        ("logprobs", 20),
        ("allowed_token_ids", list(range(1024))),
        ("logit_bias", {token_id: 1e30 for token_id in range(1024)}),
        ("bad_words", ["x" * 1024] * 128),
    ],
)
def test_limits_themselves_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", 1e39, "a number from 0 to 1000"),
        ("repetition_penalty", 1e-38, "a number from 0.01 to 100"),
        ("presence_penalty", 3, "a number from -2 to 2"),
        ("frequency_penalty", 3, "a number from -2 to 2"),
        ("top_p", 0, "a number above 0 to 1"),
    ],
)
def test_refusals_docs_and_help_say_the_range(field: str, value: float, allowed: str) -> None:
    with pytest.raises(RequestError, match=f"{field}: got {re.escape(repr(value))}, allowed is {allowed}$"):
        SamplingParams(**{field: value})
    low, high = (float(text) for text in re.findall(r"-?[\d.]+", allowed))
    start = f"above {low:g} up" if "above" in allowed else f"{low:g}"
    documented = re.search(rf"    {field}: .*\n    \"\"\"(.*)", inspect.getsource(SamplingParams))
    assert documented is not None
    for text in (documented[1], cli_options._SAMPLING_HELP[field]):
        assert text.lower().startswith(f"{start} to {high:g};")


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_p, params.top_k) == (
        1,
        16,
        1.0,
        1.0,
        0,
    )


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 95}, "max_tokens"),
        ({"max_tokens": None, "min_tokens": 95}, "min_tokens"),
        ({"n": 9}, "n"),
        ({"top_k": 501}, "top_k"),
        ({"stop_token_ids": [3, 500]}, "stop_token_ids"),
        ({"allowed_token_ids": [3, 500]}, "allowed_token_ids"),
        ({"logit_bias": {3: 1.0, 500: 1.0}}, "logit_bias"),
    ],
)
def test_check_against_the_model(options: dict[str, Any], field: str) -> None:
    limits = {"prompt_length": 6, "vocab_size": 500, "max_model_len": 100, "max_num_seqs": 8}
    with pytest.raises(RequestError, match=f"^{field}: got ") as caught:
        SamplingParams(**options).check_against_model(**limits)
    assert caught.value.parameter == field
    lists = {"stop_token_ids": [499], "allowed_token_ids": [499], "logit_bias": {499: 1.0}}
    SamplingParams(n=8, top_k=500, max_tokens=94, **lists).check_against_model(**limits)


def test_bias_takes_token_ids_as_texts() -> None:
    # As JSON has them; of two for one token the last counts.
    assert SamplingParams(logit_bias={"5": 1.0, " 05": 2, 7: 3.0}).logit_bias == {5: 2, 7: 3.0}


def test_unknown_field_names_the_nearest() -> None:
    with pytest.raises(
        RequestError, match=r"line 3: unknown sampling option 'temprature'; did you mean 'temperature'"
    ):
        SamplingParams.from_mapping({"temprature": 1}, source="line 3")


def test_integer_too_long_to_print_is_refused_like_any_other() -> None:
    with pytest.raises(RequestError, match=r"^max_tokens: got an integer of 16610 bits"):
        SamplingParams(max_tokens=10**5000)
