"""Llama, MiMo, Mistral, Qwen2, Qwen3 inside vLLM with Rose's layers: what stock vLLM and transformers say in float32.

On a CPU layers are packed for few decodes only where a test asks for it; a GPU does so by itself.
"""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.lora.model_manager import create_lora_manager
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.parameter import BasevLLMParameter, ModelWeightParameter
from vllm.utils.torch_utils import set_default_torch_dtype

from rose_backend.compile_ahead.recorded_launches import KernelSource, record_launches
from rose_backend.errors import ModelError
from rose_backend.kernels.gpu_properties import GpuProperties
from rose_backend.kernels.sampling.ops import MASK_KERNELS, REPORT_KERNELS, SAMPLER_KERNELS
from rose_backend.layers.linear import Linear, Mlp, Norm
from rose_backend.vllm_plugin import pending_kernels
from rose_backend.vllm_plugin.models import decoder
from rose_backend.vllm_plugin.models.recorded_model import recorded_layer, recorded_steps
from rose_backend.vllm_plugin.step_graph import addresses as graph_addresses
from tests.e2e.conftest import MakeEngine
from tests.support.half_precision import judge, logprob_errors, wrong_tokens
from tests.support.llama_checkpoints import CASES, VOCAB_SIZE, change_json, write_checkpoint
from tests.support.reference_generation import GreedyReference, Prompts, parity_prompts, tie_free_case
from tests.support.vllm_engines import (
    assert_greedy,
    count_preemptions,
    files_below,
    first,
    generate,
    manager_of,
    runner_of,
    scheduler_of,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_vllm_gpu_parity.py and _features.py have these for GPUs"
)

ROUNDING = 1e-4
"""Of log-probabilities, between two ways of computing in float32."""
FAMILIES = [*(name for name in CASES if name not in ("smollm3", "qwen3-moe")), "mimo"]
# Heads of 32: vLLM's own attention for CPUs, which others are compared with, takes no smaller ones.
write = partial(write_checkpoint, hidden_size=128)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
VLLMS_LAYERS = {"rose": {"fused_mlp": False, "fused_add_layernorm": False}}


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return parity_prompts(VOCAB_SIZE)[:32]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param != "mimo":
        return write(path, request.param)
    # The same checkpoint is a MiMo without its MTP module.
    change_json(write(path, "qwen2") / "config.json", architectures=["MiMoForCausalLM"])
    return path


def complete(llm: Any, prompts: Prompts, params: SamplingParams = GREEDY) -> list[Any]:
    outputs = generate(llm, prompts, params)
    return [each for output in outputs for each in output.outputs]


def assert_right(path: Path, prompts: Prompts, completions: list[Any]) -> None:
    judged = judge(path, prompts, [list(completion.token_ids) for completion in completions])
    assert wrong_tokens(judged, ROUNDING) == []
    assert float(logprob_errors(judged, completions).max()) < ROUNDING


def has_roses_layers(llm: Any) -> bool:
    return isinstance(runner_of(llm).model, decoder.RoseDecoder)


def assert_recorded_as_loaded(llm: Any) -> None:
    """What kernels are compiled ahead for has the shapes of what vLLM has loaded."""
    model = runner_of(llm).model
    ahead = dict(tensors_of(recorded_layer(llm.llm_engine.vllm_config, model._attention[0].impl)))
    assert {"qkv.weight", "mlp.gate_up.weight", "mlp.down.weight", "mlp_norm.weight"} <= set(ahead)
    assert ahead == dict(tensors_of(model._layers[0]))


def tensors_of(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name, shape, type and strides of each tensor of a layer as it is loaded; None where there is none."""
    for field in fields(part):
        value, inner = getattr(part, field.name), f"{name}{field.name}"
        if isinstance(value, (Linear, Mlp, Norm)):
            yield from tensors_of(value, f"{inner}.")
        elif isinstance(value, torch.Tensor):
            yield inner, (value.shape, value.dtype, value.stride())
        elif value is None:
            yield inner, None


def test_stock_vllm_says_the_same(make_engine: MakeEngine, checkpoint: Path, prompts: Prompts) -> None:
    answers = []
    for options in ({}, {"attention_backend": None, "block_size": 32}):
        with make_engine(model=str(checkpoint), **options) as llm:
            assert has_roses_layers(llm) is not bool(options)
            answers.append(complete(llm, prompts))
            if not options:
                assert_recorded_as_loaded(llm)
    assert_right(checkpoint, prompts, answers[0])
    for ours, theirs in zip(*answers, strict=True):
        assert ours.token_ids == theirs.token_ids
        logprobs = [
            [entry[token].logprob for entry, token in zip(each.logprobs, each.token_ids, strict=True)]
            for each in (ours, theirs)
        ]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=ROUNDING)


def test_packed_then_from_the_cache_and_several_at_once(
    make_engine: MakeEngine, checkpoint: Path, prompts: Prompts, packed: list[Any]
) -> None:
    with make_engine(model=str(checkpoint)) as llm:
        assert runner_of(llm).model._layers[0].mlp.gate_up.packed is not None
        for _ in range(2):
            assert_right(checkpoint, prompts, complete(llm, prompts))
        several = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, logprobs=0, n=3)
        drawn = complete(llm, prompts[:8], several)
        three = tuple(prompt for prompt in prompts[:8] for _ in range(3))
        judged = judge(checkpoint, three, [list(each.token_ids) for each in drawn])
        assert float(logprob_errors(judged, drawn).max()) < ROUNDING
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.stats.partial_hits > 0, manager.stats
    assert packed, "no step took the way for few decodes"


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}], ids=str)
def test_in_chunks_through_too_few_blocks(
    make_engine: MakeEngine, checkpoint: Path, prompts: Prompts, packed: list[Any], options: dict[str, Any]
) -> None:
    few = {"num_gpu_blocks_override": 70, "max_num_batched_tokens": 101, "max_num_seqs": 16}
    with make_engine(model=str(checkpoint), **few, **options) as llm:
        preempted = count_preemptions(scheduler_of(llm))
        assert_right(checkpoint, prompts, complete(llm, prompts))
        assert preempted
        manager_of(llm).check_integrity()
    assert packed


@pytest.mark.parametrize("checkpoint", ["llama-biases", "qwen3"], indirect=True)
@pytest.mark.parametrize("off", ["fused_mlp", "fused_add_layernorm", "fused_kv_append", "block_manager"])
def test_parts_switched_off(
    make_engine: MakeEngine, checkpoint: Path, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    # As on a GPU, where what is off decides.
    device = torch.device("meta")
    monkeypatch.setattr(
        decoder, "packs_layers", lambda switches, _, packs=decoder.packs_layers: packs(switches, device)
    )
    with make_engine(model=str(checkpoint), additional_config={"rose": {off: False}}) as llm:
        assert has_roses_layers(llm)
        assert (runner_of(llm).model._layers[0].qkv.packed is None) == (off != "block_manager")
        assert_right(checkpoint, prompts, complete(llm, prompts))


@pytest.mark.parametrize("checkpoint", ["qwen3"], indirect=True)
def test_both_parts_of_layers_off(make_engine: MakeEngine, checkpoint: Path, prompts: Prompts) -> None:
    with make_engine(model=str(checkpoint), additional_config=VLLMS_LAYERS) as llm:
        assert not has_roses_layers(llm)
        assert_right(checkpoint, prompts, complete(llm, prompts))


@pytest.mark.parametrize("checkpoint", ["qwen2"], indirect=True)
def test_embedded_prompts(
    make_engine: MakeEngine, checkpoint: Path, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "packs_layers", lambda switches, device: True)
    forward, num_calls = decoder.RoseDecoder.forward, 0

    def compare(self: Any, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        nonlocal num_calls
        before, num_calls = inputs_embeds.clone(), num_calls + 1
        hidden = forward(self, *args, inputs_embeds=inputs_embeds, **kwargs)
        assert torch.equal(inputs_embeds, before), "what the runner keeps was overwritten"
        return hidden

    monkeypatch.setattr(decoder.RoseDecoder, "forward", compare)
    table = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    embedded = [{"prompt_embeds": table[list(prompt)]} for prompt in prompts[:12]]
    with make_engine(model=str(checkpoint), enable_prompt_embeds=True) as llm:
        assert has_roses_layers(llm)
        outputs = llm.generate(embedded, GREEDY, use_tqdm=False)
        assert_right(checkpoint, prompts[:12], [output.outputs[0] for output in outputs])
    assert num_calls > 1


@pytest.mark.parametrize("checkpoint", ["llama-biases", "qwen3"], indirect=True)
@pytest.mark.parametrize("enable_lora", [False, True])
def test_what_steps_launch_on_a_gpu_is_compiled_ahead(
    make_engine: MakeEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, enable_lora: bool
) -> None:
    """The model itself, on tensors without memory that pass for a GPU's."""
    gpu, meta = GpuProperties((9, 0), 132), torch.device("meta")
    options: dict[str, Any] = {
        "model": str(checkpoint),
        "dtype": "float16",
        "max_num_seqs": 96,
        "max_model_len": 1024,
        "block_size": 16,
    }
    products = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    lora = {"enable_lora": True, "max_loras": 2, "lora_target_modules": products}
    options |= lora if enable_lora else {}
    with make_engine(**options):  # Brings what vLLM builds layers with.
        config = EngineArgs(attention_backend="rose", **options).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.float16), meta:
            model = initialize_model(config)
            if enable_lora:
                lora_manager = create_lora_manager(
                    model, 96, 8192, VOCAB_SIZE, config.lora_config, config, meta
                )
                told = SimpleNamespace(no_lora_flag_cpu=False)
                (wrapper,) = lora_manager.punica_wrapper_mapping.values()
                wrapper.token_mapping_meta = told
        monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
        config.compilation_config.cudagraph_capture_sizes = [1, 8, 64, 96, 512]
        attention = [each.impl for each in model._attention]
        ahead = pending_kernels.record(config, attention[0], gpu).sources
        launched: list[KernelSource] = []
        with torch.inference_mode(), record_launches(gpu) as recorded:
            for module in model._attention:
                module.impl.process_weights_after_loading(torch.float16)
                module.kv_cache = torch.empty((64, 2, 16, 64), dtype=torch.float16, device=meta)
            metadatas = list(recorded_steps(config, attention[0]))
            for index, metadata in enumerate(metadatas * (2 if enable_lora else 1)):
                if enable_lora:
                    told.no_lora_flag_cpu = index < len(metadatas)
                tokens = torch.empty(metadata.num_actual_tokens, dtype=torch.int64, device=meta)
                by_layer = {module.layer_name: metadata for module in model._attention}
                with set_forward_context(by_layer, config, slot_mapping={}):
                    hidden = model(tokens.int(), tokens)
                assert hidden.shape == (metadata.num_actual_tokens, 128)
            launched += recorded.sources
    assert model._layers[0].qkv.packed is not None
    assert any(source.name == "_adapters_shrink_kernel" for source in launched) == enable_lora
    missing = [source for source in launched if source not in ahead]
    assert not missing, missing
    sampling = {*SAMPLER_KERNELS, *REPORT_KERNELS, *MASK_KERNELS}
    assert {source.name for source in ahead if source not in launched} <= sampling


@pytest.mark.parametrize("checkpoint", ["qwen3"], indirect=True)
def test_keys_and_values_that_a_connector_saves_and_loads_by_layer(
    make_engine: MakeEngine,
    checkpoint: Path,
    prompts: Prompts,
    packed: list[Any],
    plans: list[Any],
    tmp_path: Path,
) -> None:
    long = tuple(prompt for prompt in prompts if len(prompt) > 16)
    whole = {"max_num_batched_tokens": sum(map(len, long)), "max_num_seqs": 64}
    with make_engine(model=str(checkpoint), kv_transfer_config=files_below(tmp_path), **whole) as llm:
        assert has_roses_layers(llm)
        assert_right(checkpoint, long, complete(llm, long))
        saved = {path.stem for path in tmp_path.glob("*/*.safetensors")}
        assert saved == {attention.layer_name for attention in runner_of(llm).model._attention}
        assert llm.reset_prefix_cache()
        outputs = generate(llm, long, GREEDY)
        assert_right(checkpoint, long, [output.outputs[0] for output in outputs])
    assert all(output.num_cached_tokens for output in outputs if len(output.prompt_token_ids) > 17)
    assert packed and not plans


def memory_of(model: Any) -> dict[str, int]:
    """Return where the tensors are that captured graphs would read."""
    found = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for index, layer in enumerate(model._layers):
        for name in ("qkv", "attn_out", "mlp.gate_up", "mlp.down"):
            linear = attrgetter(name)(layer)
            found[f"{index} {name}"] = linear.weight.data_ptr()
            biases = (linear.bias, None if linear.packed is None else linear.packed.bias)
            found |= {f"{index} {name} {n}": b.data_ptr() for n, b in enumerate(biases) if b is not None}
        for name in ("attn_norm", "mlp_norm"):
            found[f"{index} {name}"] = getattr(layer, name).weight.data_ptr()
    return found


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_reloaded_weights_are_where_the_old_ones_were(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    is_packed: bool,
) -> None:
    # On a CPU vLLM goes on with the old head where it is tied to the embedding, with its own layers, too.
    old, new = (write(tmp_path / f"{seed}", case, seed=seed, tie_word_embeddings=False) for seed in range(2))
    monkeypatch.setattr(decoder, "packs_layers", lambda switches, device: is_packed)
    few = parity_prompts(VOCAB_SIZE)[:12]
    with make_engine(model=str(old)) as llm:
        assert_right(old, few, complete(llm, few))
        memory = memory_of(runner_of(llm).model)
        for path in (new, old, new):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            assert llm.reset_prefix_cache()
            assert_right(path, few, complete(llm, few))
            assert memory_of(runner_of(llm).model) == memory


def test_nothing_but_buffers_outlasts_a_deep_sleep(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any]
) -> None:
    path = write(tmp_path, "llama-biases", tie_word_embeddings=False)
    few = parity_prompts(VOCAB_SIZE)[:12]
    with make_engine(model=str(path)) as llm:
        assert_right(path, few, complete(llm, few))
        model = runner_of(llm).model
        # As vLLM's worker does it on a GPU: memory is given back, and what was in buffers is put there again.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        lost = [parameter.data for name, parameter in model.named_parameters() if "lm_head" not in name]
        lost.append(model.rose_constants.rotary_table)
        for layer in model._layers:
            for linear in (layer.qkv, layer.attn_out, layer.mlp.gate_up, layer.mlp.down):
                lost += [linear.bias, linear.packed.bias]
        for tensor in [*lost, *model.buffers()]:
            tensor.fill_(float("nan"))
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        llm.collective_rpc("reload_weights")
        assert llm.reset_prefix_cache()
        assert_right(path, few, complete(llm, few))


@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_any_weights_may_be_reloaded_alone(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any], case: str
) -> None:
    old, new = (write(tmp_path / f"{seed}", case, seed=seed, tie_word_embeddings=False) for seed in range(2))
    few = parity_prompts(VOCAB_SIZE)[:12]
    before, weights = (load_file(path / "model.safetensors") for path in (old, new))

    def check(llm: Any, mixed: Path) -> None:
        """Hold the engine to a checkpoint of what it has been given until now."""
        copytree(old, mixed)
        save_file(before, mixed / "model.safetensors", {"format": "pt"})
        assert llm.reset_prefix_cache()
        assert_right(mixed, few, complete(llm, few))

    def some_of(*kinds: str) -> list[tuple[str, torch.Tensor]]:
        found = [(name, tensor) for name, tensor in weights.items() if any(kind in name for kind in kinds)]
        assert found
        return found

    with make_engine(model=str(old)) as llm:
        memory = memory_of(runner_of(llm).model)
        # The last ones are whatever is left: after them all is new.
        for kinds in (
            ("input_layernorm",),
            ("post_attention_layernorm", "o_proj"),
            ("gate_proj", "up_proj"),
            ("",),
        ):
            some = some_of(*kinds)
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(some)})
            before.update(some)
            check(llm, tmp_path / kinds[0] / "mixed")
        assert memory_of(runner_of(llm).model) == memory
        with pytest.raises(ValueError, match="cannot be saved"):
            runner_of(llm).model.state_dict()


Weights = list[tuple[str, torch.Tensor]]


def load(worker: Any, buckets: list[Weights]) -> None:
    """As the worker extensions of trainers do it, without any other call."""
    for bucket in buckets:
        worker.model_runner.model.load_weights(weights=bucket)


def load_one_by_one(worker: Any, buckets: list[Weights]) -> None:
    load(worker, [[each] for bucket in buckets for each in bucket])


def load_and_process(worker: Any, buckets: list[Weights]) -> None:
    load(worker, buckets)
    runner = worker.model_runner
    process_weights_after_loading(runner.model, runner.model_config, runner.device)


def load_patches(worker: Any, buckets: list[Weights]) -> None:
    """As vLLM's engine for sparse updates does it with what it has received."""
    for bucket in buckets:
        patches = [
            CheckpointWeightPatch(name, tuple(new.shape), new.dtype, new.flatten(), torch.arange(new.numel()))
            for name, new in bucket
        ]
        load_checkpoint_weight_patches(worker.model_runner.model, patches)


def transfer(worker: Any, buckets: list[Weights]) -> None:
    """By vLLM's weight transfer, whose engine finds in this process what it would receive."""
    worker, runner = worker.worker, worker.model_runner
    engine = IPCWeightTransferEngine(None, worker.vllm_config, runner.device, runner.model)
    engine.update_weights = lambda info: runner.model.load_weights(info["weights"])
    worker.weight_transfer_engine = engine
    worker.start_weight_update()
    for bucket in buckets:
        worker.update_weights({"weights": bucket})
    worker.finish_weight_update()


def reload(worker: Any, buckets: list[Weights]) -> None:
    worker.reload_weights(weights_iterator=itertools.chain(*buckets))


def assert_packed(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Each packed tensor is, bit for bit, what packing the weights of a checkpoint afresh gives."""
    for index, layer in enumerate(model._layers):
        parts = {
            "self_attn": {"q_proj": layer.qkv, "o_proj": layer.attn_out},
            "mlp": {"gate_proj": layer.mlp.gate_up, "down_proj": layer.mlp.down},
        }
        beside = {"q_proj": ("k_proj", "v_proj"), "gate_proj": ("up_proj",)}
        for (owner, part, linear), kind in itertools.product(
            ((owner, part, linear) for owner, found in parts.items() for part, linear in found.items()),
            ("weight", "bias"),
        ):
            names = [f"model.layers.{index}.{owner}.{name}.{kind}" for name in (part, *beside.get(part, ()))]
            if names[0] not in weights:
                assert kind == "bias" and linear.bias is None is linear.packed.bias
                continue
            plain = torch.cat([weights[name] for name in names])
            if part == "gate_proj":
                plain = plain.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            of_library = linear.weight.t() if kind == "weight" else linear.bias
            assert torch.equal(getattr(linear.packed, kind), plain) and torch.equal(of_library, plain)
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = layer.attn_norm if name == "input_layernorm" else layer.mlp_norm
            assert torch.equal(norm.packed.weight, weights[f"model.layers.{index}.{name}.weight"])


def with_head_of(old: Path, new: Path) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint: on a CPU vLLM multiplies with a copy of the head, which it makes once."""
    weights = load_file(new / "model.safetensors")
    weights["lm_head.weight"] = load_file(old / "model.safetensors")["lm_head.weight"]
    save_file(weights, new / "model.safetensors", {"format": "pt"})
    return weights


@pytest.mark.parametrize(
    ("update", "case"),
    [
        (load, "llama-biases"),
        (load_one_by_one, "qwen3"),
        (load_and_process, "llama-biases"),
        (load_patches, "llama-biases"),
        (transfer, "llama-biases"),
        (reload, "qwen3"),
    ],
)
def test_updates_in_buckets_by_any_entrance(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any], update: Any, case: str
) -> None:
    old, new = (write(tmp_path / f"{seed}", case, seed=seed, tie_word_embeddings=False) for seed in range(2))
    weights = {new: with_head_of(old, new), old: load_file(old / "model.safetensors")}
    few = parity_prompts(VOCAB_SIZE)[:12]
    with make_engine(model=str(old)) as llm:
        runner = runner_of(llm)
        assert_packed(runner.model, weights[old])
        memory = memory_of(runner.model)
        for turn, path in enumerate((new, old, new)):
            named = list(weights[path].items())
            random.Random(turn).shuffle(named)
            buckets = [named[first::4] for first in range(4)]
            llm.collective_rpc(partial(update, buckets=buckets))
            assert_packed(runner.model, weights[path])
            assert llm.reset_prefix_cache()
            assert_right(path, few, complete(llm, few))
        assert memory_of(runner.model) == memory
    assert packed


@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_any_weight_may_be_loaded_alone_and_wrong_ones_change_nothing(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any], case: str
) -> None:
    old, new = (write(tmp_path / f"{seed}", case, seed=seed, tie_word_embeddings=False) for seed in range(2))
    weights, others = (load_file(path / "model.safetensors") for path in (old, new))
    few = parity_prompts(VOCAB_SIZE)[:12]
    with make_engine(model=str(old)) as llm:
        model = runner_of(llm).model
        layer = "model.layers.1"
        names = [name for name in others if name.startswith(layer)]
        assert {f"{layer}.self_attn.q_proj.weight", f"{layer}.input_layernorm.weight"} <= set(names)
        for name in names:
            shape = others[name].shape
            wrong: Weights = [
                (f"{name}.no_such", others[name]),
                (name, others[name][: len(others[name]) // 2]),
                (name, others[name].new_zeros(*shape, 3)),
                (name, others[name][..., :1]),
            ]
            for each in wrong:
                # Whatever vLLM's loader of the weight raises, which has no one class.
                with pytest.raises((ValueError, KeyError, RuntimeError, AssertionError, AttributeError)):
                    model.load_weights([each])
            assert_packed(model, weights)
            model.load_weights([(name, others[name])])
            weights[name] = others[name]
            assert_packed(model, weights)
        # What comes before a wrong one is loaded, what comes behind it is not.
        first, last = (f"model.layers.0.mlp.{name}.weight" for name in ("gate_proj", "up_proj"))
        with pytest.raises(ValueError, match="no_such"):
            model.load_weights([(first, others[first]), ("no_such", others[first]), (last, others[last])])
        weights[first] = others[first]
        assert_packed(model, weights)
        assert llm.reset_prefix_cache()
        mixed = copytree(old, tmp_path / "mixed")
        save_file(weights, mixed / "model.safetensors", {"format": "pt"})
        assert_right(mixed, few, complete(llm, few))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_loads_its_rows_of_a_gate(num_ranks: int, is_fused: bool) -> None:
    gate, up = torch.randn(2, 8, 3)
    size = 8 // num_ranks
    for rank in range(num_ranks):
        # As vLLM loads them the first time.
        halves: Any = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
        torch.nn.Module.__init__(halves)
        halves.tp_rank, halves.tp_size, halves.output_sizes = rank, num_ranks, [8, 8]
        halves.prefix = "gate"
        param = BasevLLMParameter.__new__(ModelWeightParameter, torch.empty(2 * size, 3))
        param._output_dim, param.tp_rank, param.tp_size = 0, rank, num_ranks
        halves.quant_method = SimpleNamespace(packed_address=None)
        weights = [(torch.cat([gate, up]), None)] if is_fused else [(gate, 0), (up, 1)]
        for weight, part in weights:
            decoder._load_gate_up(halves, param, weight, part)
        wanted = param.data.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).clone()
        assert not torch.isnan(wanted).any()
        own = param.data.clone()
        halves.quant_method.packed_address = param.data_ptr()
        param.data.fill_(torch.nan)
        for weight, part in weights:
            decoder._load_gate_up(halves, param, weight, part)
        assert torch.equal(param.data, wanted)
        # In vLLM's own format, of this rank alone.
        param.data.fill_(torch.nan)
        decoder._copy_gate_up(halves, param, own)
        assert torch.equal(param.data, wanted)
        for wrong in (torch.zeros(2 * size + 4, 3), own[:-1]):
            with pytest.raises(ModelError, match="gate: a weight has shape"):
                decoder._copy_gate_up(halves, param, wrong)
            with pytest.raises((RuntimeError, IndexError)):
                decoder._load_gate_up(halves, param, wrong[: 2 * size - 1], None)
            assert torch.equal(param.data, wanted)


def test_a_tied_head_follows_its_embedding(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any]
) -> None:
    path = write(tmp_path, "qwen2")
    with make_engine(model=str(path)) as llm:
        model = runner_of(llm).model
        address = model.lm_head.weight.data_ptr()
        table = torch.randn_like(model.lm_head.weight)[:VOCAB_SIZE]
        # Some trainers send the head, too; vLLM leaves it out.
        model.load_weights(
            [("model.embed_tokens.weight", table), ("lm_head.weight", torch.zeros_like(table))]
        )
        assert torch.equal(model.lm_head.weight[:VOCAB_SIZE], table)
        assert model.lm_head.weight.data_ptr() == address == model.model.embed_tokens.weight.data_ptr()


def test_nothing_keeps_a_model_whose_engine_has_ended(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any]
) -> None:
    """vLLM keeps the weight loaders of every model, for reloads."""
    path = write(tmp_path, "llama-biases")
    with make_engine(model=str(path), dtype="float16") as llm:
        modules = [weakref.ref(each) for each in runner_of(llm).model.modules()]
    del llm
    gc.collect()
    assert not [each() for each in modules if each() is not None]


def test_weights_in_another_format_are_rearranged_as_those_of_a_checkpoint(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any]
) -> None:
    old, new = (write(tmp_path / f"{seed}", "llama-biases", seed=seed) for seed in range(2))
    few, mixed = parity_prompts(VOCAB_SIZE)[:12], tmp_path / "mixed"
    weights, others = (load_file(path / "model.safetensors") for path in (old, new))
    names = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.o_proj": (),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj": (),
        "input_layernorm": (),
        "post_attention_layernorm": (),
    }
    plain = []
    for layer, (module, parts) in itertools.product(("model.layers.0", "model.layers.1"), names.items()):
        for kind in ("weight", "bias") if "proj" in module else ("weight",):
            theirs = [f"{layer}.{part}.{kind}" for part in parts or (module,)]
            weights.update({name: others[name] for name in theirs})
            plain.append((f"{layer}.{module}.{kind}", torch.cat([others[name] for name in theirs])))
    copytree(old, mixed)
    save_file(weights, mixed / "model.safetensors", {"format": "pt"})
    with make_engine(model=str(old)) as llm:
        memory = memory_of(runner_of(llm).model)
        with pytest.raises(AttributeError, match="no_such"):
            reload_as_it_is(llm, [("model.layers.0.mlp.gate_up_proj.no_such", torch.zeros(1))])
        assert_right(old, few, complete(llm, few))
        reload_as_it_is(llm, plain)
        assert_right(mixed, few, complete(llm, few))
        assert memory_of(runner_of(llm).model) == memory


def reload_as_it_is(llm: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    options = {"weights_iterator": iter(tensors), "is_checkpoint_format": False}
    llm.collective_rpc("reload_weights", kwargs=options)
    assert llm.reset_prefix_cache()


def test_a_norm_in_half_precision_is_scaled_anew_in_every_reload(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any]
) -> None:
    path = write(tmp_path, "llama")
    with make_engine(model=str(path), dtype="float16") as llm:
        model, name = runner_of(llm).model, "model.layers.0.input_layernorm.weight"
        norm = model._layers[0].attn_norm.packed
        assert norm.scale.item() >= norm.weight.abs().max()
        address = norm.scale.data_ptr()
        for largest, is_checkpoint_format in (
            (9.0, True),
            (60_000.0, False),
            (50.0, None),
            (0.75, False),
            (3.0, True),
            (0.1, None),
        ):
            weights = [(name, torch.full((128,), largest, dtype=torch.float16))]
            if is_checkpoint_format is None:
                model.load_weights(weights)
            else:
                options = {"weights_iterator": iter(weights), "is_checkpoint_format": is_checkpoint_format}
                llm.collective_rpc("reload_weights", kwargs=options)
            assert torch.equal(norm.weight, weights[0][1])
            assert largest <= norm.scale.item() < 2 * largest and norm.scale.data_ptr() == address
            now = model._layers[0].attn_norm.packed
            assert (now.weight.data_ptr(), now.scale) == (norm.weight.data_ptr(), norm.scale)


NUM_TOKENS = 32
MANNERS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    # vLLM 0.32 makes room for what the first half hands to the second in a warm-up step, which on a CPU only compiled
    # models have; "eager" is a compiler that changes nothing.
    "pipeline": {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 3, "backend": "eager"},
    },
}


@pytest.mark.parametrize("manner", MANNERS)
def test_both_halves_write_and_copy_the_same_blocks(
    make_engine: MakeEngine, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, manner: str
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    prompts, whole = first(16, tie_free_case(tiny_model_path, vocab_size=2559))
    reference = GreedyReference(tuple(row[:NUM_TOKENS] for row in whole.token_ids), whole.leads)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with make_engine(num_gpu_blocks_override=120, **MANNERS[manner]) as llm:
        assert llm.llm_engine.vllm_config.parallel_config.world_size == 2
        for _ in range(2):
            assert_greedy(generate(llm, prompts, params), reference)
        manager = manager_of(llm)
        manager.check_integrity()
        assert min(manager.stats.clones, manager.stats.evictions) > 0, manager.stats


def names_and_reductions(worker: Any) -> tuple[str, bool]:
    model = worker.model_runner.model
    return type(model).__name__, model._all_reduce is not None


def test_roses_layers_sum_over_ranks(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    # With biases, which one rank adds.
    model = write_checkpoint(tmp_path, "llama-biases")
    prompts = parity_prompts(VOCAB_SIZE)[:24]
    with make_engine(model=str(model), tensor_parallel_size=2, max_num_batched_tokens=300) as llm:
        ((name, reduces), other) = llm.collective_rpc(names_and_reductions)
        assert name.startswith("Rose") and reduces and other == (name, reduces)
        for _ in range(2):
            assert_right(model, prompts, complete(llm, prompts))
        manager_of(llm).check_integrity()


def test_what_graphs_hold_of_packed_layers_is_listed(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any]
) -> None:
    path = write(tmp_path, "llama-biases", tie_word_embeddings=False)
    with make_engine(model=str(path)) as llm:
        runner = runner_of(llm)
        model, caches = runner.model, runner.kv_caches
        # What else model runner V2 has, V1 has not.
        others = dict.fromkeys(graph_addresses._OWNERS)
        runner = SimpleNamespace(**others | {"device": runner.device, "model": model, "kv_caches": caches})
        found = graph_addresses.addresses_of(runner)
        assert graph_addresses.addresses_of(runner) == found
        workspace = model._attention[0].impl.workspace._tensors.values()
        tensors = [
            *model.parameters(),
            *model.buffers(),
            *caches,
            *(each for kept in workspace for each in kept),
        ]
        for layer in model._layers:
            for linear in (layer.qkv, layer.attn_out, layer.mlp.gate_up, layer.mlp.down):
                tensors += [linear.bias, linear.packed.bias, linear.packed.weight]
        assert len(tensors) > 40
        for tensor in tensors:
            address = tensor.data_ptr()
            assert any(start <= address < start + num_bytes for start, num_bytes in found.values())
        assert found["model.lm_head.weight"].address == model.lm_head.weight.data_ptr()


def test_a_deep_sleep_keeps_all_that_is_made_of_weights(
    make_engine: MakeEngine, tmp_path: Path, packed: list[Any]
) -> None:
    """Or loads it again: parameters are in checkpoints, and buffers are kept."""
    path = write(tmp_path, "llama-biases")
    with make_engine(model=str(path), dtype="float16") as llm:
        model = runner_of(llm).model
        restored = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        for layer in model._layers:
            tensors = [norm.packed.scale for norm in (layer.attn_norm, layer.mlp_norm)]
            for linear in (layer.qkv, layer.attn_out, layer.mlp.gate_up, layer.mlp.down):
                tensors += [linear.weight, linear.bias, linear.packed.weight, linear.packed.bias]
            assert all(each.untyped_storage().data_ptr() in restored for each in tensors)


@pytest.mark.parametrize("is_packed", [True, False])
def test_tensors_in_the_place_of_weights_are_taken(
    make_engine: MakeEngine, tmp_path: Path, request: pytest.FixtureRequest, is_packed: bool
) -> None:
    old, new = (
        write(tmp_path / f"{seed}", "llama-biases", seed=seed, tie_word_embeddings=False) for seed in range(2)
    )
    # On a CPU vLLM keeps a copy of the head that it multiplies with.
    weights, head = (
        load_file(new / "model.safetensors"),
        load_file(old / "model.safetensors")["lm_head.weight"],
    )
    kept = {"lm_head.weight": head}
    if is_packed:
        # Nothing tells whether the rows of another tensor are packed.
        of_old = load_file(old / "model.safetensors")
        kept |= {name: of_old[name] for name in weights if "gate_proj" in name or "up_proj" in name}
    save_file(weights | kept, new / "model.safetensors", metadata={"format": "pt"})
    few = parity_prompts(VOCAB_SIZE)[:12]
    with make_engine(model=str(new)) as llm:
        loaded = {name: each.detach().clone() for name, each in runner_of(llm).model.named_parameters()}
    if is_packed:
        request.getfixturevalue("packed")
    with make_engine(model=str(old)) as llm:
        assert_right(old, few, complete(llm, few))
        model = runner_of(llm).model
        for name, parameter in model.named_parameters():
            if not (is_packed and "gate_up" in name):
                parameter.data = loaded[name].clone()
        # The second time nothing is new.
        for _ in range(2):
            model.take_moved_weights()
            assert llm.reset_prefix_cache()
            assert_right(new, few, complete(llm, few))
        if is_packed:
            (gate_up, *_) = (each for name, each in model.named_parameters() if "gate_up_proj.weight" in name)
            gate_up.data = gate_up.data.clone()
            with pytest.raises(
                ModelError, match="gate_up_proj: another tensor is in the place of a packed weight"
            ):
                model.take_moved_weights()
