"""Engines over the embedded model; one that tests may share, and ways to see that it was left as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer  # noqa: F401  # this process then loads tokenizers, in no time

from rose_backend import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: for a tiny model more are no faster, and far slower when other programs run."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def shared_llm(tiny_model_path: Path) -> Iterator[LLM]:
    """Return an engine that agrees with float32 on a GPU, too; its prefix cache keeps what earlier tests computed."""
    with LLM(str(tiny_model_path), max_num_seqs=32, dtype="float32") as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Return the shared engine with an empty prefix cache; fails the test that leaves anything behind in it."""
    assert shared_llm.core.manager.reset_prefix_cache()
    yield shared_llm
    assert shared_llm.core.num_unfinished == 0
    shared_llm.core.check_integrity()


@pytest.fixture
def make_llm(tiny_model_path: Path) -> Iterator[Callable[..., LLM]]:
    """Return a function that makes float32 engines of its own for a test, checked and closed at its end."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(str(tiny_model_path), **{"dtype": "float32", **options}))
        return made[-1]

    yield make
    for llm in made:
        if llm.core.is_alive:
            llm.core.check_integrity()
        llm.close()


@contextmanager
def keeps_serving(llm: LLM, prompt: str = "Once upon a time") -> Iterator[None]:
    """Check that a normal request gives the same text before and after the body, and that nothing is held."""
    before = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    yield
    llm.core.check_integrity()
    assert llm.core.num_unfinished == 0
    assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == before
