"""Int4 checkpoints inside vLLM with Rose's layers, on a CPU: vLLM's methods load them, Rose's layers multiply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from rose_backend import LLM
from rose_backend import SamplingParams as RoseSamplingParams
from rose_backend.kernels import Int4Weight
from rose_backend.vllm_plugin.models import decoder
from tests.e2e.conftest import MakeEngine
from tests.support.half_precision import judge, logprob_errors
from tests.support.llama_checkpoints import VOCAB_SIZE
from tests.support.quantized_checkpoints import INT4_FORMATS, KEPT, write_pair
from tests.support.quantized_engines import GREEDY, assert_right, complete, linears, linears_of
from tests.support.random_checkpoints import write_random_adapter
from tests.support.reference_generation import Prompts, parity_prompts
from tests.support.vllm_engines import generate, inputs_of, runner_of
from tests.support.vllm_plugin.int4_on_cpu import take_int4_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_vllm_gpu_quantized.py is for GPUs")

INT4_MODEL = Path(__file__).parents[2] / "models" / "tiny-qwen3-chat-w4a16"
LOADED = [form for form in INT4_FORMATS if not (form.startswith("gptq") and "zeros" in form)]
"""vLLM takes GPTQ's symmetric checkpoints only."""
OF_EACH_PACKAGE = ["pack-quantized 128 zeros", "pack-quantized 32", "awq 128 zeros", "gptq 128"]


@pytest.fixture(autouse=True)
def int4_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    take_int4_on_cpu(monkeypatch)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return parity_prompts(VOCAB_SIZE)[:10]


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("qwen3", form) for form in LOADED),
        *(("llama-biases", LOADED[0]), ("qwen2", LOADED[2]), ("mistral", "awq 128 zeros")),
    ],
)
def test_few_and_many_rows_are_multiplied_by_what_the_checkpoint_says(
    make_engine: MakeEngine, tmp_path: Path, prompts: Prompts, packed: list[Any], family: str, form: str
) -> None:
    # vLLM's Qwen2 divides the width by the number of heads.
    path, dense = write_pair(tmp_path, family, form, **({"head_dim": 96} if family == "qwen2" else {}))
    for rows in (None, 0):
        packed.clear()
        options = {"additional_config": {"rose": {"max_quantized_rows": rows}}}
        with make_engine(model=str(path), **options) as llm:
            pairs = linears(llm)
            assert_right(dense, prompts, complete(llm, prompts))
        assert bool(packed) == (rows is None)
        is_int4 = [isinstance(linear.weight, Int4Weight) for _, linear in pairs]
        assert is_int4 == [True] * 7 + [False] and "layers.1.mlp.down_proj" in KEPT
        for module, linear in pairs[:7]:
            weight = linear.weight
            assert linear.packed.weight is weight and (weight.zeros is not None) == ("zeros" in form)
            # In memory once.
            parameters = dict(module.named_parameters(recurse=False))
            parameters.pop("weight_shape", None)
            tensors = {each.data_ptr() for each in parameters.values()}
            kept = (weight.words, weight.scales, weight.zeros, linear.bias)
            assert tensors == {each.data_ptr() for each in kept if each is not None}


@pytest.mark.parametrize(("rows", "num_prompts", "by_rose"), [(3, 3, True), (3, 4, False), (None, 4, True)])
def test_the_option_says_how_many_decodes_take_the_weights_as_they_are(
    make_engine: MakeEngine,
    tmp_path: Path,
    packed: list[Any],
    rows: int | None,
    num_prompts: int,
    by_rose: bool,
) -> None:
    path, dense = write_pair(tmp_path, "qwen3", LOADED[0])
    few: Prompts = tuple((5 + index, 9, 2) for index in range(num_prompts))
    with make_engine(model=str(path), additional_config={"rose": {"max_quantized_rows": rows}}) as llm:
        assert_right(dense, few, complete(llm, few))
    assert bool(packed) is by_rose


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", OF_EACH_PACKAGE)
def test_errors_in_16_bits_are_at_most_those_of_a_dense_model(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Prompts,
    form: str,
    dtype: str,
) -> None:
    monkeypatch.setattr(decoder, "packs_layers", lambda switches, device: True)
    errors = []
    quantized, dense = write_pair(tmp_path, "qwen3", form)
    for path in (quantized, dense):
        with make_engine(model=str(path), dtype=dtype) as llm:
            assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
            completions = complete(llm, prompts)
        judged = judge(dense, prompts, [list(each.token_ids) for each in completions])
        errors.append(float(logprob_errors(judged, completions).mean()))
    assert errors[0] <= errors[1] * 1.25, errors


def test_switched_off(make_engine: MakeEngine, tmp_path: Path, prompts: Prompts) -> None:
    path, _ = write_pair(tmp_path, "qwen3", LOADED[0])
    # vLLM's own kernel has no float32.
    options = {"dtype": "bfloat16", "additional_config": {"rose": {"quantized_layers": False}}}
    with make_engine(model=str(path), **options) as llm:
        assert not isinstance(runner_of(llm).model, decoder.RoseDecoder)
        assert len(complete(llm, prompts)) == len(prompts)


@pytest.mark.parametrize("form", OF_EACH_PACKAGE)
def test_reloaded_weights_are_where_the_old_ones_were(
    make_engine: MakeEngine, tmp_path: Path, prompts: Prompts, packed: list[Any], form: str
) -> None:
    paths = [
        write_pair(tmp_path / str(seed), "qwen3", form, seed=seed, tie_word_embeddings=False)
        for seed in range(2)
    ]
    with make_engine(model=str(paths[0][0])) as llm:
        assert_right(paths[0][1], prompts, complete(llm, prompts))
        memory = memory_of(llm)
        for turn in (1, 0, 1):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(paths[turn][0])})
            assert llm.reset_prefix_cache()
            packed.clear()
            assert_right(paths[turn][1], prompts, complete(llm, prompts))
            assert packed and memory_of(llm) == memory


def memory_of(llm: Any) -> list[int]:
    """Return where int4 weights are, that captured graphs would read."""
    weights = [linear.weight for _, linear in linears(llm)[:7]]
    tensors = [tensor for each in weights for tensor in (each.words, each.scales, each.zeros)]
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("form", OF_EACH_PACKAGE)
def test_adapters(
    make_engine: MakeEngine, tmp_path: Path, prompts: Prompts, packed: list[Any], form: str
) -> None:
    """Added to what products with int4 weights are, beside requests without one."""
    path, dense = write_pair(tmp_path, "qwen3", form)
    merged = write_random_adapter(dense, tmp_path / "adapter")
    adapter = LoRARequest("an adapter", 1, str(tmp_path / "adapter"))
    requests = [adapter] * len(prompts) + [None] * len(prompts)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    for rows in (None, 0):
        packed.clear()
        options = {"additional_config": {"rose": {"max_quantized_rows": rows}}}
        with make_engine(model=str(path), **lora, **options) as llm:
            assert isinstance(runner_of(llm).model, decoder.RoseDecoder)
            outputs = llm.generate(inputs_of(prompts * 2), GREEDY, use_tqdm=False, lora_request=requests)
        answers = [output.outputs[0] for output in outputs]
        assert_right(merged, prompts, answers[: len(prompts)])
        assert_right(dense, prompts, answers[len(prompts) :])
        assert bool(packed) == (rows is None)


def test_the_chat_model_answers_as_without_vllm(make_engine: MakeEngine, packed: list[Any]) -> None:
    prompts: Prompts = tuple(tuple(range(5 + 3 * index, 40 + 5 * index)) for index in range(4))
    params = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    with LLM(str(INT4_MODEL), device="cpu", dtype="float32") as alone:
        outputs = alone.generate(list(map(list, prompts)), RoseSamplingParams(**params))
        expected = [list(output.outputs[0].token_ids) for output in outputs]
    with make_engine(model=str(INT4_MODEL)) as llm:
        outputs = generate(llm, prompts, SamplingParams(**params))
        assert all(isinstance(linear.weight, Int4Weight) for _, linear in linears(llm))
    assert packed and [list(output.outputs[0].token_ids) for output in outputs] == expected


def weights_and_reductions(worker: Any) -> tuple[list[str], bool]:
    model = worker.model_runner.model
    kinds = [type(linear.weight).__name__ for _, _, linear in linears_of(model)]
    return kinds, model._all_reduce is not None


@pytest.mark.parametrize(
    ("family", "form"),
    # Of the second, ranks have a part of a row each, and all have its scale.
    [("llama-biases", "awq 128 zeros"), ("qwen3", "pack-quantized all zeros")],
)
def test_ranks_have_a_part_of_each_weight(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Prompts,
    family: str,
    form: str,
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    # Halves of whole groups.
    path, dense = write_pair(tmp_path, family, form, hidden_size=512, intermediate_size=512)
    # Steps of more rows than Rose's kernel takes, and of fewer.
    options = {"tensor_parallel_size": 2, "additional_config": {"rose": {"max_quantized_rows": 8}}}
    with make_engine(model=str(path), **options) as llm:
        ((kinds, reduces), other) = llm.collective_rpc(weights_and_reductions)
        assert kinds == ["Int4Weight"] * 7 + ["Tensor"] and reduces and other == (kinds, reduces)
        assert_right(dense, prompts, complete(llm, prompts))
        assert_right(dense, prompts[:3], complete(llm, prompts[:3]))
