"""Threads have short turns while steps run, and only then."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from rose_backend import LLM, SamplingParams
from rose_backend.engine.process_settings import begin_serving, end_serving, short_switch_interval

pytestmark = pytest.mark.usefixtures("serves_nobody")


def test_the_switch_interval_is_short_during_steps_of_generate_only(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    step, during = llm.core.step, []
    monkeypatch.setattr(llm.core, "step", lambda: (during.append(sys.getswitchinterval()), step())[1])
    before = sys.getswitchinterval()
    for _ in llm.stream("The rose", SamplingParams(max_tokens=4)):
        assert sys.getswitchinterval() == before
    assert during and max(during) < 1e-3 < before
    with pytest.raises(ZeroDivisionError), short_switch_interval():
        raise ZeroDivisionError
    assert sys.getswitchinterval() == before


def test_the_last_user_restores_the_switch_interval() -> None:
    before = sys.getswitchinterval()
    begin_serving()
    with short_switch_interval():
        end_serving()
        assert sys.getswitchinterval() < 1e-3
    assert sys.getswitchinterval() == pytest.approx(before)
