"""Small jobs with fixed inputs: what they are given, and first tokens drawn by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.engine.decode_runner import sampling_of_rows
from rose_backend.engine.model_runner import ModelRunner, PassInputs
from rose_backend.engine.sequence_state import SAMPLING_FIELDS
from rose_backend.kernels.captured_graphs import Inputs, SizedGraphs


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 6, 9])
def test_sampling_fields_start_alike_for_any_number_of_rows(num_rows: int) -> None:
    words = torch.arange(num_rows * len(SAMPLING_FIELDS), dtype=torch.int32).view(num_rows, -1)
    fields = sampling_of_rows(words)
    assert list(fields) == list(SAMPLING_FIELDS)
    for index, values in enumerate(fields.values()):
        assert values.view(torch.int32).tolist() == words[:, index].tolist()
        assert values.is_contiguous()
        assert values.data_ptr() % 16 == 0


def test_entries_are_rounded_up_by_repeating_the_last() -> None:
    seen: list[dict[str, Any]] = []
    graphs = SizedGraphs(
        lambda inputs: seen.append({name: tensor.tolist() for name, tensor in inputs.items()}),
        {"word": (np.int32, ()), "pair": (np.int64, (2,)), "share": (np.float32, ())},
        (2, 5),
        torch.device("cpu"),
    )

    def run(count: int) -> bool:
        numbers = np.arange(count)
        pairs = np.stack([numbers, numbers + 2**40], axis=1)
        return graphs.run(word=numbers + 7, pair=pairs, share=numbers / 4)

    assert run(5) and run(1) and run(3)
    assert not run(6) and len(seen) == 3
    assert seen[0]["word"] == [7, 8, 9, 10, 11] and seen[0]["share"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert seen[1] == {"word": [7, 7], "pair": [[0, 2**40]] * 2, "share": [0.0, 0.0]}
    assert seen[2]["pair"] == [[0, 2**40], [1, 2**40 + 1]] + [[2, 2**40 + 2]] * 3


class EagerPrompts:
    """Computes as a captured pass does: hidden states stay in one place until the next pass."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.hidden = torch.zeros(512, int(runner._model.config.hidden_size))

    def run(self, inputs: PassInputs) -> torch.Tensor:
        prompts, self._runner.prompts = self._runner.prompts, None
        hidden = self._runner._forward_chunks(inputs).states
        self._runner.prompts = prompts
        self.hidden[: len(hidden)] = hidden
        return self.hidden[: len(hidden)]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_first_tokens_of_captured_passes(
    make_llm: Callable[..., LLM], run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [
        SamplingParams(n=3, seed=5, max_tokens=6),
        SamplingParams(temperature=0.0, max_tokens=6),
        SamplingParams(seed=1, top_k=5, max_tokens=6, logprobs=2),
        *(
            SamplingParams(seed=seed, temperature=1.5, top_p=0.9, min_p=0.01, max_tokens=6)
            for seed in range(8)
        ),
    ]
    prompts = [[3 + index] * (index + 2) for index in range(len(params))]
    options = {"device": "cpu", "max_num_seqs": 16, "max_num_batched_tokens": 64, "run_ahead": run_ahead}
    llm, other = make_llm(**options), make_llm(**options)
    runner = other.core._runner
    eager = EagerPrompts(runner)
    drawn: list[int] = []
    draw = runner._draw_first

    def draw_first(inputs: Inputs) -> None:
        drawn.append(len(inputs["seed"]))
        draw(inputs)

    monkeypatch.setattr(runner, "_draw_first", draw_first)
    runner.prompts = eager  # type: ignore[assignment]
    runner.first_draws = runner.make_first_draws()
    outputs, expected = other.generate(prompts, params), llm.generate(prompts, params)
    assert [[each.token_ids for each in output.outputs] for output in outputs] == [
        [each.token_ids for each in output.outputs] for output in expected
    ]
    assert drawn and set(drawn) <= {4, 16}
    shown = outputs[2].outputs[0].logprobs
    assert shown is not None and [len(alternatives) >= 2 for alternatives in shown] == [True] * 6
