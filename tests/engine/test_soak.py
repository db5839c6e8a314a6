"""Hundreds of requests of all kinds through a small engine, with aborts: right to the last, and nothing stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from rose_backend import LLM
from tests.support.crowd import crowd
from tests.support.soak import assert_idle, count_completions, differences_alone, soak


def test_hundreds_of_requests(make_llm: Callable[..., LLM], tiny_model_path: Path) -> None:
    llm = make_llm(
        run_ahead=2,
        max_num_seqs=24,
        num_blocks=40,
        max_model_len=256,
        max_num_batched_tokens=200,
    )
    num_others = count_completions()
    llm.core._runner.decoder.widths = (2, 4, 8, 16, 24)
    prompts, params = crowd(120, seed=0, max_tokens=20)
    finished, num_aborted = soak(llm.core, prompts, params, seed=0)
    assert len(finished) + num_aborted == 120 and num_aborted > 5
    assert llm.stats.preemptions > 0
    assert_idle(llm.core, num_others=num_others)
    sample = random.Random(1).sample(sorted(finished), 10)
    assert differences_alone(llm, tiny_model_path, prompts, params, finished, sample) == []
