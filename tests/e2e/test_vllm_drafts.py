"""Rose's layers beside drafts, looked up or a head's: texts are those without, whatever drafts are right.

A coin with a seed decides in place of vLLM's lookup, or of a head that has run, which drafts are right. Layers are
packed on a CPU where a test asks for it; a GPU does so by itself.
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
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.v1.spec_decode.ngram_proposer import NgramProposer
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata, RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.models import decoder
from rose_backend.vllm_plugin.models.eagle3 import RoseEagle3LlamaForCausalLM
from rose_backend.vllm_plugin.options import batches_decode_steps
from rose_backend.vllm_plugin.plugin_logger import STEPS
from rose_backend.vllm_plugin.step_graph.draft_steps import DraftSteps
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.gpu_matrix.drafters import write_with_eagle_head, write_with_mtp_head
from tests.support.eagle_checkpoints import write_eagle3_drafter
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
    needs_two_gpus,
    runner_of,
    scheduler_of,
)
from tests.support.vllm_plugin.configs import rose

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests below have these for GPUs")
ROUNDING = 1e-4
"""Of log-probabilities and hidden states, between two ways of computing in float32."""
GPU_ROUNDING = 1e-3
NUM_NEW = 24
SILENT = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
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

    def write_behind(self, states: Any, slots: Sequence[int]) -> None:
        """Write drafts of all these request slots in the place of those that a replayed step has left."""
        for slot in slots:
            known = tuple(states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist())
            drafts = self.drafts_behind(known, states.draft_tokens.shape[1])
            states.draft_tokens[slot, : len(drafts)] = torch.tensor(drafts, device=states.draft_tokens.device)

    def put_into(self, drafts: torch.Tensor, known: tuple[int, ...]) -> None:
        """Write the drafts of a row: what is missing is the last token again."""
        found = self.drafts_behind(known, len(drafts))
        drafts.copy_(torch.tensor([*found, *known[-1:] * (len(drafts) - len(found))]))

    def put_behind_heads(
        self, runner: Any, drafts: torch.Tensor, sampled_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """As ``GPUModelRunner.propose_draft_token_ids``, of model runner V1, whose head has made ``drafts``."""
        for row, request_id in enumerate(runner.input_batch.req_ids):
            request = runner.requests[request_id]
            sampled = [token for token in sampled_token_ids[row].tolist() if token >= 0]
            self.put_into(drafts[row], (*request.prompt_token_ids, *request.output_token_ids, *sampled))
        return drafts

    def put_on_device(self, drafts: torch.Tensor, states: Any, input_batch: Any) -> torch.Tensor:
        """As a speculator's ``propose``, of model runner V2, on its tensor of drafts."""
        slots = input_batch.idx_mapping[: input_batch.num_reqs].tolist()
        for row, slot in enumerate(slots):
            known = tuple(states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist())
            self.put_into(drafts[row], known)
        return drafts[: input_batch.num_reqs]


PROPOSE_V1, PROPOSE_V2 = RunnerV1.propose_draft_token_ids, EagleSpeculator.propose
DRAFTERS_OF_V2 = {each: each.propose for each in (EagleSpeculator, MTPSpeculator, StandaloneARSpeculator)}
"""With K/V of their own."""
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


def n_grams(num_tokens: int, model: Path | None = None) -> dict[str, Any]:
    return {
        "speculative_config": {**NGRAM, "num_speculative_tokens": num_tokens},
        "disable_log_stats": False,
        # In each step, right or wrong.
        **rose(adaptive_drafts=False),
    }


def eagle3(num_tokens: int, model: Path, **fields: Any) -> dict[str, Any]:
    """Return what ``n_grams`` does of a head beside ``model``.

    Args:
        fields: of the head's config; without them, it reads what enters and leaves the first two layers.
    """
    fields = fields or {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return {
        "speculative_config": write_eagle3_drafter(model, num_tokens, **fields),
        "disable_log_stats": False,
        **rose(adaptive_drafts=False),
    }


def mtp(num_tokens: int, model: Path) -> dict[str, Any]:
    """Return what ``n_grams`` does of the MTP module of ``model``."""
    drafter = {"method": "mtp", "num_speculative_tokens": num_tokens}
    if not torch.cuda.is_available():
        # As of an EAGLE head.
        drafter["attention_backend"] = "ROSE"
    return n_grams(num_tokens) | {"speculative_config": drafter}


def draft_model(num_tokens: int, model: Path) -> dict[str, Any]:
    """Return what ``n_grams`` does of ``model``, which drafts for itself."""
    drafter = {"method": "draft_model", "model": str(model), "num_speculative_tokens": num_tokens}
    return n_grams(num_tokens) | {"speculative_config": drafter}


SPECULATIONS = pytest.mark.parametrize("speculation", [n_grams, eagle3], ids=["n-grams", "EAGLE-3"])


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


SAMPLE = DraftSteps._sample


def draft_as(monkeypatch: pytest.MonkeyPatch, texts: Texts, kind: str) -> None:
    drafter = Drafter(texts, *DRAFTERS[kind])

    def sample(self: DraftSteps, batch: Any, output: Any) -> None:
        SAMPLE(self, batch, output)
        drafter.write_behind(self._runner.req_states, [*batch.slots.values()])

    monkeypatch.setattr(DraftSteps, "_sample", sample)
    monkeypatch.setattr(NgramProposer, "propose", drafter.propose)
    monkeypatch.setattr(
        RunnerV1,
        "propose_draft_token_ids",
        lambda runner, step, sampled, *args: (
            drafts
            if isinstance(drafts := PROPOSE_V1(runner, step, sampled, *args), list)
            else drafter.put_behind_heads(runner, drafts, sampled)
        ),
    )

    def lookup(
        self: Any, input_batch: Any, *args: Any, dummy_run: bool = False, **options: Any
    ) -> torch.Tensor:
        drafts = self.drafts[: input_batch.num_reqs]
        return drafts if dummy_run else drafter.put_on_device(drafts, self.req_states, input_batch)

    monkeypatch.setattr(NgramGPUSpeculator, "propose", lookup)


def draft_behind_heads(monkeypatch: pytest.MonkeyPatch, llm: Any, texts: Texts, kind: str) -> None:
    """Do what ``draft_as`` does for a drafter with K/V of its own, of an engine with model runner V2."""
    drafter, states = Drafter(texts, *DRAFTERS[kind]), runner_of(llm).req_states
    speculator = type(runner_of(llm).speculator)

    def propose(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        drafts = DRAFTERS_OF_V2[speculator](self, *args, **options)
        return drafts if options.get("dummy_run") else drafter.put_on_device(drafts, states, args[0])

    def sample(self: DraftSteps, batch: Any, output: Any) -> None:
        SAMPLE(self, batch, output)
        drafter.write_behind(states, [*batch.slots.values()])

    monkeypatch.setattr(speculator, "propose", propose)
    monkeypatch.setattr(DraftSteps, "_sample", sample)


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
@SPECULATIONS
@pytest.mark.parametrize("drafter", ["all right", "random"])
def test_through_too_few_blocks(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packed: list[Any],
    drafter: str,
    speculation: Callable[..., dict[str, Any]],
) -> None:
    path, prompts = write(tmp_path, "mistral"), parity_prompts(VOCAB_SIZE)[:32]
    with make_engine(model=str(path)) as llm:
        texts = texts_of(prompts, complete(llm, prompts))
    draft_as(monkeypatch, texts, drafter)
    few = {"num_gpu_blocks_override": 70, "max_num_batched_tokens": 101, "max_num_seqs": 16}
    with make_engine(model=str(path), **few, **speculation(3, path)) as llm:
        assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
        preempted = count_preemptions(scheduler_of(llm))
        completions = complete(llm, prompts)
        assert preempted
        assert_right(path, prompts, completions)
        manager_of(llm).check_integrity()
    assert packed


@on_cpu
@SPECULATIONS
@pytest.mark.parametrize("num_drafts", [1, 7])
def test_up_to_the_longest_sequence(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packed: list[Any],
    num_drafts: int,
    speculation: Callable[..., dict[str, Any]],
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
    with make_engine(**options, **speculation(num_drafts, path)) as llm:
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
@pytest.mark.parametrize(
    ("case", "is_packed", "has_adapters"),
    [
        *(("llama-biases", False, False), ("qwen3", False, False)),
        *(("llama-biases", True, False), ("qwen3", True, False), ("qwen3", True, True)),
    ],
)
def test_hidden_states_of_rows_with_drafts(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    case: str,
    is_packed: bool,
    has_adapters: bool,
) -> None:
    """Against vLLM's layers or, as it knows nothing of packed weights, Rose's products of many rows; auxiliary, too."""
    path, prompts = write(tmp_path / "model", case), parity_prompts(VOCAB_SIZE)[:12]
    options: dict[str, Any] = {"model": str(path)}
    requests = None
    if has_adapters:
        write_random_adapter(path, tmp_path / "adapter")
        requests = [LoRARequest("an adapter", 1, str(tmp_path / "adapter")), None] * (len(prompts) // 2)
        options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}

    def complete_adapted(llm: Any) -> Texts:
        outputs = llm.generate(inputs_of(prompts), GREEDY, use_tqdm=False, lora_request=requests)
        return texts_of(prompts, [output.outputs[0] for output in outputs])

    with make_engine(**options) as llm:
        texts = complete_adapted(llm)
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
        self.model._set_aux_hidden_state_layers((0, 1, 2))
        hidden, auxiliary = forward(self, input_ids, positions, *args, **kwargs)
        metadata = decoder.get_attention_context(self._attention[0].layer_name)[0]
        if metadata is not None and metadata.decodes_only and metadata.max_decode_query_len > 1:
            # Keys and values are stored a second time, where they are.
            kept = [each.clone() for each in auxiliary]
            other: Callable[..., Any] = partial(super(decoder.RoseDecoder, self).forward)
            if is_packed:
                monkeypatch.setattr(self, "_max_packed_rows", 0)
                other = partial(forward, self)
            expected, others = other(input_ids, positions, *args, **kwargs)
            monkeypatch.setattr(self, "_max_packed_rows", None)
            num = metadata.num_actual_tokens
            for got, wanted in zip((hidden, *auxiliary), (expected, *others), strict=True):
                torch.testing.assert_close(got[:num], wanted[:num], atol=ROUNDING, rtol=ROUNDING)
            assert all(map(torch.equal, auxiliary, kept)) and len(others) == 3
            num_compared += 1
        return hidden

    monkeypatch.setattr(decoder.RoseDecoder, "forward", compare)
    draft_as(monkeypatch, texts, "random")
    with make_engine(**options, **n_grams(3)) as llm:
        assert complete_adapted(llm) == texts
    assert num_compared > 5


def pass_and_store(passes: list[int]) -> Callable[..., Any]:
    """Return a replacement of the forward pass of Rose's heads, which then lets them store the same K/V once more.

    Args:
        passes: gets the number of places of each pass.
    """
    original = RoseEagle3LlamaForCausalLM.forward

    def forward(self: Any, **given: Any) -> Any:
        found = original(self, **given)
        metadata, module, kv_cache, _ = get_attention_context(self._attention.layer_name)
        if metadata is not None:
            num_tokens = metadata.num_actual_tokens
            slots = metadata.slot_mapping[:num_tokens]
            caches = [each.flatten(0, 1) for each in module.impl._caches(kv_cache)]
            stored = [each[slots[slots >= 0]] for each in caches]
            for each in caches:
                each[slots[slots >= 0]] = torch.nan
            names = ("input_ids", "positions", "hidden_states")
            self.store(*(given[name][:num_tokens] for name in names), slots)
            for each, expected in zip(caches, stored, strict=True):
                assert torch.equal(each[slots[slots >= 0]], expected)
            passes.append(num_tokens)
        return found

    return forward


@on_cpu
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("llama", {}),
        # Embeddings, and what leaves the last layer: with 8 of them heads get what enters 2, 4 and 5 otherwise.
        ("qwen3", {"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}),
        # The product with the model's vocabulary, which the head does not know to its end.
        ("llama without a head's product", {}),
    ],
)
def test_heads_read_what_vllms_layers_give_them_and_draft_what_vllms_heads_do(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    case: str,
    fields: dict[str, Any],
    is_packed: bool,
) -> None:
    """Beside vLLM's layers and head, and a separate write of all K/V."""
    family, _, shares_product = case.partition(" without ")
    path, prompts = write(tmp_path, family, num_hidden_layers=8), parity_prompts(VOCAB_SIZE)[:12]
    options: dict[str, Any] = {"model": str(path), "max_num_batched_tokens": 300}
    options |= eagle3(3, path, norm_before_residual=case == "qwen3", **fields)
    if shares_product:
        file = Path(options["speculative_config"]["model"], "model.safetensors")
        tensors = load_file(file)
        del tensors["lm_head.weight"]
        save_file(tensors, file, {"format": "pt"})

    def run(**switches: bool) -> tuple[Texts, list[list[torch.Tensor]], Any]:
        """Return each text, what heads got and made in each step, and the model."""
        seen: list[list[torch.Tensor]] = []

        def propose(runner: Any, step: Any, sampled: torch.Tensor, *args: Any) -> torch.Tensor:
            # As the runner gives them to its head: hidden states, some of them, auxiliary ones.
            states, num_tokens = args[3], step.total_num_scheduled_tokens
            assert states is not None and all(each.shape == args[1].shape for each in states)
            drafts = PROPOSE_V1(runner, step, sampled, *args)
            seen.append([*(each[:num_tokens].clone() for each in states), drafts.clone()])
            return drafts

        monkeypatch.setattr(RunnerV1, "propose_draft_token_ids", propose)
        with make_engine(**options | rose(**switches)) as llm:
            texts, model = texts_of(prompts, complete(llm, prompts)), runner_of(llm).model
            layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
            appends = {name: layer.impl.appends_in_attention for name, layer in layers.items()}
        # The head's layer is the ninth one.
        is_fused = switches.get("fused_kv_append", True)
        assert appends == {
            f"model.layers.{index}.self_attn.attn": is_fused and index < 8 for index in range(9)
        }
        return texts, seen, model

    passes: list[int] = []
    monkeypatch.setattr(RoseEagle3LlamaForCausalLM, "forward", pass_and_store(passes))
    texts, expected, model = run(fused_mlp=False, fused_add_layernorm=False, fused_kv_append=False)
    assert not isinstance(model, decoder.RoseDecoder) and not passes
    if is_packed:
        request.getfixturevalue("packed")
    found, got, model = run()
    assert max(passes) > 100
    assert isinstance(model, decoder.RoseDecoder) and found == texts and len(got) == len(expected) > 10
    for step, wanted in zip(got, expected, strict=True):
        for each, other in zip(step[:-1], wanted[:-1], strict=True):
            torch.testing.assert_close(each, other, atol=10 * ROUNDING, rtol=ROUNDING)  # of eight layers
        assert torch.equal(step[-1], wanted[-1])


@on_cpu
@pytest.mark.parametrize(
    ("case", "num_drafts"), [("llama-biases", 1), ("qwen3", 7), ("qwen2", 8), ("EAGLE", 2), ("MTP", 3)]
)
def test_texts_beside_heads_are_those_without(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packed: list[Any],
    steps: list[RoseAttentionMetadata],
    case: str,
    num_drafts: int,
) -> None:
    """Mixed with prompts in chunks, and from the cache. ``EAGLE`` is a first kind of head, ``MTP`` a module."""
    write_other = {"EAGLE": write_with_eagle_head, "MTP": write_with_mtp_head}.get(case)
    path = write_other(tmp_path) if write_other else write(tmp_path, case)
    prompts = parity_prompts(VOCAB_SIZE)[:32]
    with make_engine(model=str(path)) as llm:
        texts = texts_of(prompts, complete(llm, prompts))
    heads = mtp(num_drafts, path) if case == "MTP" else eagle3(num_drafts, path)
    if case == "EAGLE":
        heads["speculative_config"] |= {"method": "eagle", "model": str(path / "draft")}
    with make_engine(model=str(path), max_num_batched_tokens=300, **heads) as llm:
        assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
        for drafter in DRAFTERS:
            draft_as(monkeypatch, texts, drafter)
            drafted, accepted = draft_counts(llm)
            completions = complete(llm, prompts)
            assert texts_of(prompts, completions) == texts
            assert_right(path, prompts, completions)
            now_drafted, now_accepted = draft_counts(llm)
            # Drafts behind a text's end are wrong.
            shares = {"all right": (0.8, 1.0), "all wrong": (0.0, 0.01), "random": (0.1, 0.9)}[drafter]
            assert shares[0] <= (now_accepted - accepted) / (now_drafted - drafted) <= shares[1]
        manager_of(llm).check_integrity()
    with_drafts = {step.decodes_only for step in steps if step.num_decode_tokens > step.num_decodes}
    assert with_drafts == ({False, True} if num_drafts < 8 else set())
    assert any(len(hidden) > len(prompts) for hidden in packed) == (num_drafts < 8)


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
            # With log-probabilities steps are vLLM's; without, they are replayed.
            replayed = STEPS.rose
            silent = complete(llm, prompts, SILENT)
            assert STEPS.rose >= replayed + NUM_NEW // (num_drafts + 1)
            judged = judge(path, prompts, [list(each.token_ids) for each in silent])
            assert wrong_tokens(judged, GPU_ROUNDING) == []
            now_drafted, now_accepted = draft_counts(llm)
            # Drafts behind a text's end are wrong.
            shares = {"all right": (0.5, 1.0), "all wrong": (0.0, 0.05), "random": (0.05, 0.9)}[kind]
            assert shares[0] <= (now_accepted - accepted) / (now_drafted - drafted) <= shares[1]
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.stats.clones > 0 and manager.usage == 0.0
    assert not [step for step in steps_in_python if step.decodes_only]


TextStates = dict[tuple[int, ...], torch.Tensor]


def record_heads(monkeypatch: pytest.MonkeyPatch, llm: Any, texts: Texts) -> tuple[TextStates, TextStates]:
    """Let some drafts be right, with model runner V2; return what heads get, and make, of each text.

    Returns:
        Auxiliary hidden states of each text's last token, side by side; drafts behind it.
    """
    states, drafter = runner_of(llm).req_states, Drafter(texts, *DRAFTERS["random"])
    got: TextStates = {}
    made: TextStates = {}

    def propose(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        drafts = PROPOSE_V2(self, *args, **options)
        if options.get("dummy_run"):
            return drafts
        batch, _, _, _, auxiliary, num_sampled, num_rejected, *_ = args
        side_by_side = torch.cat(auxiliary, dim=1).cpu()
        positions, rejected, sampled = (
            each.tolist() for each in (batch.positions, num_rejected, num_sampled)
        )
        for row, slot in enumerate(batch.idx_mapping[: batch.num_reqs].tolist()):
            text = tuple(states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist())
            for token in range(
                batch.query_start_loc_np[row], batch.query_start_loc_np[row + 1] - rejected[row]
            ):
                got[text[: positions[token] + 1]] = side_by_side[token]
            if sampled[row]:
                made[text] = drafts[row].cpu()
        return drafter.put_on_device(drafts, states, batch)

    monkeypatch.setattr(EagleSpeculator, "propose", propose)
    return got, made


@pytest.mark.gpu
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("model", ["Llama", "Qwen3"])
def test_heads_read_on_a_gpu_what_vllms_layers_give_them(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, is_eager: bool
) -> None:
    path, prompts = WRITERS[model](tmp_path), parity_prompts(RANDOM_VOCAB_SIZE)[:24]
    options: dict[str, Any] = {
        "model": str(path),
        "runner": "V2",
        "max_num_batched_tokens": 300,
        **GPU_MEMORY,
    }
    with make_engine(**options) as llm:
        texts = texts_of(prompts, complete(llm, prompts))
    # Not 0: on a GPU vLLM's norms write over the embeddings that it gives to a head, unless they are compiled.
    options |= eagle3(3, path, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    # Replayed steps do not call what is recorded.
    of_both = {"step_graph": False, "adaptive_drafts": False}
    vllms = {"fused_mlp": False, "fused_add_layernorm": False, "fused_kv_append": False, **of_both}
    with pytest.MonkeyPatch.context() as patch:
        # Each of the head's steps is described by the host.
        patch.setattr(RoseAttentionMetadataBuilder, "supports_draft_decode_metadata_update", False)
        with make_engine(**options | rose(**vllms)) as llm:
            assert not isinstance(runner_of(llm).model, decoder.RoseDecoder)
            # Not while the next engine warms up, of whose requests nobody knows anything.
            expected, wanted_drafts = record_heads(patch, llm, texts)
            complete(llm, prompts)
    with make_engine(**options | rose(**of_both), enforce_eager=is_eager) as llm:
        assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
        assert runner_of(llm).speculator.supports_decode_metadata_update
        got, drafts = record_heads(monkeypatch, llm, texts)
        complete(llm, prompts)
    both = sorted(got.keys() & expected.keys())
    # A rounding may decide a word, of few texts.
    assert len(both) > 0.9 * len(expected) > 1000
    for text in both:
        torch.testing.assert_close(got[text], expected[text], atol=10 * GPU_ROUNDING, rtol=GPU_ROUNDING)
    same = [torch.equal(drafts[text], wanted_drafts[text]) for text in drafts.keys() & wanted_drafts.keys()]
    assert sum(same) > 0.95 * len(same) > 100


@pytest.mark.gpu
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("model", ["Llama", "Qwen3", "MiMo"])
def test_heads_in_full_cuda_graphs(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps_in_python: list[Any],
    model: str,
    num_drafts: int,
) -> None:
    write_model, heads = (write_with_mtp_head, mtp) if model == "MiMo" else (WRITERS[model], eagle3)
    path, prompts = write_model(tmp_path), parity_prompts(RANDOM_VOCAB_SIZE)
    options: dict[str, Any] = {"model": str(path), "enforce_eager": False, **GPU_MEMORY}
    options |= {"runner": "V2", "max_num_batched_tokens": 500, "num_gpu_blocks_override": 400}
    with make_engine(**options) as llm:
        texts = texts_of(prompts, complete(llm, prompts))
    with make_engine(**options, **heads(num_drafts, path)) as llm:
        config = llm.llm_engine.vllm_config
        assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
        assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL
        assert config.scheduler_config.async_scheduling
        steps_in_python.clear()
        for kind in DRAFTERS:
            draft_behind_heads(monkeypatch, llm, texts, kind)
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
def test_heads_beside_adapters_on_a_gpu(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = WRITERS["Qwen3"](tmp_path / "model"), parity_prompts(RANDOM_VOCAB_SIZE)[:16]
    merged = write_random_adapter(path, tmp_path / "adapter")
    adapter = LoRARequest("an adapter", 1, str(tmp_path / "adapter"))
    # vLLM's kernels have adapters in half precision only.
    options: dict[str, Any] = {"model": str(path), "dtype": "float16", "enforce_eager": False, **GPU_MEMORY}
    options |= {"runner": "V2", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    # Every other request has none.
    judges, requests = [merged, path] * 8, [adapter, None] * 8

    def adapted(llm: Any) -> list[Any]:
        outputs = llm.generate(inputs_of(prompts), GREEDY, use_tqdm=False, lora_request=requests)
        return [output.outputs[0] for output in outputs]

    with make_engine(**options) as llm:
        texts = texts_of(prompts, adapted(llm))
    with make_engine(**options, **eagle3(3, path)) as llm:
        assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
        for kind in DRAFTERS:
            draft_behind_heads(monkeypatch, llm, texts, kind)
            completions = adapted(llm)
            for each in (path, merged):
                own = [index for index, judge_path in enumerate(judges) if judge_path == each]
                assert_right(
                    each,
                    [prompts[index] for index in own],
                    [completions[index] for index in own],
                    0.05,
                )


@pytest.mark.gpu
@needs_two_gpus
def test_heads_on_two_gpus(make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    path, prompts = WRITERS["Llama"](tmp_path), parity_prompts(RANDOM_VOCAB_SIZE)
    options: dict[str, Any] = {"model": str(path), "enforce_eager": False, "tensor_parallel_size": 2}
    options |= {"runner": "V2", "max_num_batched_tokens": 500, **GPU_MEMORY}
    with make_engine(**options, **eagle3(3, path)) as llm:
        (name,) = llm.llm_engine.vllm_config.model_config.hf_config.architectures
        assert name == "RoseLlamaForCausalLM"
        for _ in range(2):
            assert_right(path, prompts, complete(llm, prompts), GPU_ROUNDING)
        assert draft_counts(llm)[0] > 0
        manager_of(llm).check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize(
    "speculation", [n_grams, eagle3, draft_model], ids=["n-grams", "EAGLE-3", "draft model"]
)
def test_scheduled_at_once_through_too_few_blocks(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speculation: Callable[..., dict[str, Any]],
    is_batched: bool,
) -> None:
    """To the longest sequence, too, and with tokens that stop a text inside its drafts."""
    path, prompts = WRITERS["Qwen3"](tmp_path), parity_prompts(RANDOM_VOCAB_SIZE)[:32]
    max_model_len = max(map(len, prompts)) + NUM_NEW // 2
    options: dict[str, Any] = {"model": str(path), "enforce_eager": False, **GPU_MEMORY}
    options |= {"runner": "V2", "max_num_batched_tokens": 101, "max_num_seqs": 16}
    options |= {"max_model_len": max_model_len}
    with make_engine(**options) as llm:
        alone = complete(llm, prompts)
        texts = texts_of(prompts, alone)
        assert {len(each.token_ids) for each in alone} > {NUM_NEW}
    num_blocks = max_model_len // 16 + 8
    options |= speculation(3, path) | rose(batched_scheduling=is_batched, adaptive_drafts=False)
    with make_engine(**options, num_gpu_blocks_override=num_blocks) as llm:
        assert batches_decode_steps(llm.llm_engine.vllm_config) == is_batched
        preempted = count_preemptions(scheduler_of(llm))
        for kind in DRAFTERS:
            if speculation is not n_grams:
                draft_behind_heads(monkeypatch, llm, texts, kind)
            else:
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
