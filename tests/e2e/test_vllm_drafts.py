"""Rose's layers beside drafts that are looked up: texts are those without drafts, whatever drafts are right.

A coin with a seed decides in place of vLLM's lookup which drafts are right. Layers are packed on a CPU where a test
asks for it; a GPU does so by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.lora.request import LoRARequest
from vllm.v1.spec_decode.ngram_proposer import NgramProposer
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata
from rose_backend.vllm_plugin.models import decoder
from rose_backend.vllm_plugin.options import batches_decode_steps
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.half_precision import judge, logprob_errors, wrong_tokens
from tests.support.llama_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.moments import record_moments
from tests.support.random_checkpoints import VOCAB_SIZE as RANDOM_VOCAB_SIZE
from tests.support.random_checkpoints import WRITERS, write_random_adapter
from tests.support.reference_generation import Prompts, parity_prompts
from tests.support.vllm_engines import (
    NGRAM,
    count_preemptions,
    draft_counts,
    generate,
    inputs_of,
    manager_of,
    runner_of,
    scheduler_of,
)
from tests.support.vllm_plugin.configs import rose

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests below have these for GPUs")
ROUNDING = 1e-4
"""Of log-probabilities and hidden states, between two ways of computing in float32."""
GPU_ROUNDING = 1e-3
NUM_NEW = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
# Heads of 32, as in test_vllm_layers.py.
write = partial(write_checkpoint, hidden_size=128)
Texts = Sequence[tuple[int, ...]]


class Drafter:
    """Stands for vLLM's lookup: drafts go on as a text does, or part from it somewhere.

    Attributes:
        share_right: of the drafts, each of which makes all behind it wrong, too.
        share_none: of the rows, which get fewer drafts than asked for, or none.
    """

    def __init__(self, texts: Texts, share_right: float, share_none: float) -> None:
        self._texts, self._rng = texts, random.Random(7)
        self.share_right, self.share_none = share_right, share_none

    def drafts_behind(self, known: tuple[int, ...], most: int) -> list[int]:
        """Return up to ``most`` drafts."""
        rng = self._rng
        text = next((each for each in self._texts if each[: len(known)] == known), known)
        drafts = list(text[len(known) : len(known) + most])
        if rng.random() < self.share_none:
            del drafts[rng.randrange(most) :]
        for place, draft in enumerate(drafts):
            if rng.random() >= self.share_right:
                wrong = 1 + (draft - 1 + rng.randrange(1, VOCAB_SIZE - 1)) % (VOCAB_SIZE - 1)
                drafts[place:] = [wrong] * (len(drafts) - place)
                break
        return drafts

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """As ``NgramProposer.propose``, of model runner V1."""
        return [
            self.drafts_behind(tuple(token_ids_cpu[row, : num_tokens_no_spec[row]]), num_speculative_tokens)
            if sampled
            else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def propose_on_device(
        self, speculator: Any, input_batch: Any, *args: Any, dummy_run: bool = False, **options: Any
    ) -> torch.Tensor:
        """As ``NgramGPUSpeculator.propose``, of model runner V2: what is missing is the last token again."""
        drafts, states = speculator.drafts[: input_batch.num_reqs], speculator.req_states
        if not dummy_run:
            slots = input_batch.idx_mapping[: input_batch.num_reqs].tolist()
            for row, slot in enumerate(slots):
                known = tuple(states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist())
                found = self.drafts_behind(known, drafts.shape[1])
                filled = [*found, *known[-1:] * (drafts.shape[1] - len(found))]
                drafts[row] = torch.tensor(filled, device=drafts.device)
        return drafts


DRAFTERS = {"all right": (1.0, 0.0), "all wrong": (0.0, 0.0), "random": (0.7, 0.4)}


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Pack layers as on a GPU; return what is noted of products that sum up the moments for the next one."""
    monkeypatch.setattr(decoder, "packs_layers", lambda switches, device: True)
    yield record_moments(monkeypatch)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[RoseAttentionMetadata]:
    """Return the metadata of every step of Rose's layers."""
    seen: list[RoseAttentionMetadata] = []
    init = decoder.ModuleAttention.__init__

    def record(self: Any, modules: Sequence[Any], out: torch.Tensor) -> None:
        init(self, modules, out)
        if (metadata := decoder.get_attention_context(modules[0].layer_name)[0]) is not None:
            seen.append(metadata)

    monkeypatch.setattr(decoder.ModuleAttention, "__init__", record)
    return seen


def n_grams(num_tokens: int) -> dict[str, Any]:
    return {"speculative_config": {**NGRAM, "num_speculative_tokens": num_tokens}, "disable_log_stats": False}


def complete(llm: Any, prompts: Prompts, params: Any = GREEDY) -> list[Any]:
    return [output.outputs[0] for output in generate(llm, prompts, params)]


def texts_of(prompts: Prompts, completions: Sequence[Any]) -> Texts:
    return [(*prompt, *each.token_ids) for prompt, each in zip(prompts, completions, strict=True)]


def assert_right(
    path: Path, prompts: Prompts, completions: Sequence[Any], tolerance: float = ROUNDING
) -> None:
    judged = judge(path, prompts, [list(each.token_ids) for each in completions])
    assert wrong_tokens(judged, tolerance) == []
    assert float(logprob_errors(judged, completions).max()) < tolerance


def draft_as(monkeypatch: pytest.MonkeyPatch, texts: Texts, kind: str) -> None:
    drafter = Drafter(texts, *DRAFTERS[kind])
    monkeypatch.setattr(NgramProposer, "propose", drafter.propose)
    monkeypatch.setattr(
        NgramGPUSpeculator, "propose", lambda *args, **options: drafter.propose_on_device(*args, **options)
    )


@on_cpu
@pytest.mark.parametrize(
    ("case", "num_drafts"), [("llama", 1), ("qwen3", 3), ("llama-biases", 7), ("qwen2", 8)]
)
def test_texts_are_those_without_drafts(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packed: list[Any],
    steps: list[RoseAttentionMetadata],
    case: str,
    num_drafts: int,
) -> None:
    """Mixed with prompts in chunks, and from the cache."""
    path, prompts = write(tmp_path, case), parity_prompts(VOCAB_SIZE)[:32]
    with make_engine(model=str(path)) as llm:
        alone = complete(llm, prompts)
    texts = texts_of(prompts, alone)
    with make_engine(model=str(path), max_num_batched_tokens=300, **n_grams(num_drafts)) as llm:
        assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
        for drafter in DRAFTERS:
            draft_as(monkeypatch, texts, drafter)
            drafted, accepted = draft_counts(llm)
            completions = complete(llm, prompts)
            assert texts_of(prompts, completions) == texts
            assert_right(path, prompts, completions)
            now_drafted, now_accepted = draft_counts(llm)
            shares = {"all right": (0.99, 1.0), "all wrong": (0.0, 0.01), "random": (0.1, 0.9)}[drafter]
            assert shares[0] <= (now_accepted - accepted) / (now_drafted - drafted) <= shares[1]
        manager_of(llm).check_integrity()
    # Nine tokens are more than decode attention takes.
    with_drafts = {step.decodes_only for step in steps if step.num_decode_tokens > step.num_decodes}
    assert with_drafts == ({False, True} if num_drafts < 8 else set())
    assert any(len(hidden) > len(prompts) for hidden in packed) == (num_drafts < 8)


@on_cpu
@pytest.mark.parametrize("drafter", ["all right", "random"])
def test_through_too_few_blocks(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packed: list[Any],
    drafter: str,
) -> None:
    path, prompts = write(tmp_path, "mistral"), parity_prompts(VOCAB_SIZE)[:32]
    with make_engine(model=str(path)) as llm:
        texts = texts_of(prompts, complete(llm, prompts))
    draft_as(monkeypatch, texts, drafter)
    few = {"num_gpu_blocks_override": 70, "max_num_batched_tokens": 101, "max_num_seqs": 16}
    with make_engine(model=str(path), **few, **n_grams(3)) as llm:
        assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
        preempted = count_preemptions(scheduler_of(llm))
        completions = complete(llm, prompts)
        assert preempted
        assert_right(path, prompts, completions)
        manager_of(llm).check_integrity()
    assert packed


@on_cpu
@pytest.mark.parametrize("num_drafts", [1, 7])
def test_up_to_the_longest_sequence(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packed: list[Any],
    num_drafts: int,
) -> None:
    path, max_model_len = write(tmp_path, "qwen3"), 64
    prompts = tuple(
        tuple(np.random.default_rng(length).integers(1, VOCAB_SIZE, length).tolist())
        for length in range(max_model_len - 20, max_model_len)
    )
    params = [
        SamplingParams(temperature=0.0, max_tokens=max_model_len - len(prompt), ignore_eos=True, logprobs=0)
        for prompt in prompts
    ]
    options: dict[str, Any] = {"model": str(path), "max_model_len": max_model_len}
    with make_engine(**options) as llm:
        texts = texts_of(prompts, complete(llm, prompts, params))
    assert {len(text) for text in texts} == {max_model_len}
    with make_engine(**options, **n_grams(num_drafts)) as llm:
        for drafter in DRAFTERS:
            draft_as(monkeypatch, texts, drafter)
            completions = complete(llm, prompts, params)
            assert texts_of(prompts, completions) == texts
            assert_right(path, prompts, completions)
            manager_of(llm).check_integrity()
    assert packed


@on_cpu
def test_beside_adapters(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: list[Any]
) -> None:
    path, prompts = write(tmp_path / "model", "qwen3"), parity_prompts(VOCAB_SIZE)[:16]
    write_random_adapter(path, tmp_path / "adapter")
    # Every other request has none.
    requests = [LoRARequest("an adapter", 1, str(tmp_path / "adapter")), None] * (len(prompts) // 2)

    def adapted(llm: Any) -> Texts:
        outputs = llm.generate(inputs_of(prompts), GREEDY, use_tqdm=False, lora_request=requests)
        return texts_of(prompts, [output.outputs[0] for output in outputs])

    options: dict[str, Any] = {"model": str(path), "max_num_batched_tokens": 300, "enable_lora": True}
    options |= {"max_loras": 2, "max_lora_rank": 8}
    with make_engine(**options) as llm:
        texts = adapted(llm)
        assert texts != texts_of(prompts, complete(llm, prompts))
    with make_engine(**options, **n_grams(3)) as llm:
        assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
        for drafter in DRAFTERS:
            draft_as(monkeypatch, texts, drafter)
            assert adapted(llm) == texts
    assert packed


@on_cpu
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_hidden_states_of_rows_with_drafts(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    case: str,
    is_packed: bool,
) -> None:
    """Against vLLM's layers or, as it knows nothing of packed weights, Rose's products of many rows."""
    path, prompts = write(tmp_path, case), parity_prompts(VOCAB_SIZE)[:12]
    with make_engine(model=str(path)) as llm:
        texts = texts_of(prompts, complete(llm, prompts))
    if is_packed:
        request.getfixturevalue("packed")
    monkeypatch.setattr(
        decoder.RoseLinearMethod, "apply", lambda self, layer, x, bias=None: F.linear(x, layer.weight, bias)
    )
    forward, num_compared = decoder.RoseDecoder.forward, 0

    def compare(
        self: Any, input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        nonlocal num_compared
        hidden = forward(self, input_ids, positions, *args, **kwargs)
        metadata = decoder.get_attention_context(self._attention[0].layer_name)[0]
        if metadata is not None and metadata.decodes_only and metadata.max_decode_query_len > 1:
            # Keys and values are stored a second time, where they are.
            other: Callable[..., torch.Tensor] = partial(super(decoder.RoseDecoder, self).forward)
            if is_packed:
                monkeypatch.setattr(self, "_max_packed_rows", 0)
                other = partial(forward, self)
            expected = other(input_ids, positions, *args, **kwargs)
            monkeypatch.setattr(self, "_max_packed_rows", None)
            num = metadata.num_actual_tokens
            torch.testing.assert_close(hidden[:num], expected[:num], atol=ROUNDING, rtol=ROUNDING)
            num_compared += 1
        return hidden

    monkeypatch.setattr(decoder.RoseDecoder, "forward", compare)
    draft_as(monkeypatch, texts, "random")
    with make_engine(model=str(path), **n_grams(3)) as llm:
        assert texts_of(prompts, complete(llm, prompts)) == texts
    assert num_compared > 5


@pytest.mark.gpu
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("model", ["Llama", "Qwen3"])
def test_in_full_cuda_graphs(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps_in_python: list[Any],
    model: str,
    num_drafts: int,
) -> None:
    path, prompts = WRITERS[model](tmp_path), parity_prompts(RANDOM_VOCAB_SIZE)
    options: dict[str, Any] = {"model": str(path), "enforce_eager": False, **GPU_MEMORY}
    options |= {"runner": "V2", "max_num_batched_tokens": 500, "num_gpu_blocks_override": 400}
    with make_engine(**options) as llm:
        texts = texts_of(prompts, complete(llm, prompts))
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=NUM_NEW, ignore_eos=True)
    with make_engine(**options, **n_grams(num_drafts)) as llm:
        config = llm.llm_engine.vllm_config
        assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
        assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL
        assert config.speculative_config.method == "ngram_gpu" and config.scheduler_config.async_scheduling
        assert batches_decode_steps(config)
        steps_in_python.clear()
        # The first run fills the cache: a prompt that is found starts with another number of drafts.
        draws = [texts_of(prompts[:16], complete(llm, prompts[:16], seeded)) for _ in range(3)]
        assert draws[1] == draws[2]
        for kind in DRAFTERS:
            draft_as(monkeypatch, texts, kind)
            drafted, accepted = draft_counts(llm)
            completions = complete(llm, prompts)
            assert_right(path, prompts, completions, GPU_ROUNDING)
            now_drafted, now_accepted = draft_counts(llm)
            # Drafts behind a text's end are wrong.
            shares = {"all right": (0.5, 1.0), "all wrong": (0.0, 0.05), "random": (0.05, 0.9)}[kind]
            assert shares[0] <= (now_accepted - accepted) / (now_drafted - drafted) <= shares[1]
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.stats.clones > 0 and manager.usage == 0.0
    assert not [step for step in steps_in_python if step.decodes_only]


@pytest.mark.gpu
@pytest.mark.parametrize("is_batched", [True, False])
def test_scheduled_at_once_through_too_few_blocks(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_batched: bool
) -> None:
    """To the longest sequence, too, and with tokens that stop a text inside its drafts."""
    path, prompts = WRITERS["Qwen3"](tmp_path), parity_prompts(RANDOM_VOCAB_SIZE)[:32]
    max_model_len = max(map(len, prompts)) + NUM_NEW // 2
    options: dict[str, Any] = {"model": str(path), "enforce_eager": False, **GPU_MEMORY}
    options |= {"runner": "V2", "max_num_batched_tokens": 101, "max_num_seqs": 16}
    options |= {"max_model_len": max_model_len, **rose(batched_scheduling=is_batched)}
    with make_engine(**options) as llm:
        alone = complete(llm, prompts)
        texts = texts_of(prompts, alone)
        assert {len(each.token_ids) for each in alone} > {NUM_NEW}
    num_blocks = max_model_len // 16 + 8
    with make_engine(**options, num_gpu_blocks_override=num_blocks, **n_grams(3)) as llm:
        assert batches_decode_steps(llm.llm_engine.vllm_config) == is_batched
        preempted = count_preemptions(scheduler_of(llm))
        for kind in DRAFTERS:
            draft_as(monkeypatch, texts, kind)
            assert_right(path, prompts, complete(llm, prompts), GPU_ROUNDING)
            # The ninth new token of each text, unless another one was as likely.
            params = [
                SamplingParams(
                    temperature=0.0, max_tokens=NUM_NEW, stop_token_ids=[text[len(prompt) + 8]], logprobs=0
                )
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            stopped = complete(llm, prompts, params)
            assert_right(path, prompts, stopped, GPU_ROUNDING)
            assert sum(len(each.token_ids) <= 9 for each in stopped) > len(prompts) // 2
        assert preempted
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.usage == 0.0
