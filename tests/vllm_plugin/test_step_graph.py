"""Replayed steps: which engines have them, which steps are replayed, and what is left behind, as by vLLM's kernels."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.compilation import cudagraph_pool
from vllm.config import CUDAGraphMode, LoRAConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.forward_context import get_forward_context
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionBackend
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor, UvaBufferPool
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.ec_connector import NO_OP_EC_CONNECTOR
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridAttnMetadata, MambaHybridModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.utils import AttentionGroup

from rose_backend.errors import IntegrityError
from rose_backend.kernels.decode_step.ops import end_step, write_block_ids
from rose_backend.vllm_plugin.attention.backend import RoseAttentionBackend
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.kv_cache.spec import RoseAttentionSpec
from rose_backend.vllm_plugin.models.eagle3 import RoseEagle3LlamaForCausalLM
from rose_backend.vllm_plugin.options import CONNECTORS_OUTSIDE_OF_LAYERS, OTHER_DRAFTER, SCHEDULER_CLASS
from rose_backend.vllm_plugin.plugin_logger import STEPS
from rose_backend.vllm_plugin.step_graph import addresses as graph_addresses
from rose_backend.vllm_plugin.step_graph import runner_hooks, whole_steps
from rose_backend.vllm_plugin.step_graph.adapters import StepAdapters
from rose_backend.vllm_plugin.step_graph.addresses import (
    StaleGraphs,
    which_graphs_hold,
    wrap_reset_lora_state,
    wrap_worker_method,
)
from rose_backend.vllm_plugin.step_graph.inputs import ModelInputs, copies_of, groups_of
from rose_backend.vllm_plugin.step_graph.outputs import NUM_BUFFERS
from rose_backend.vllm_plugin.step_graph.reasons import (
    FIELDS_OF_MIXED_STEPS,
    FIELDS_OF_OTHER_STEPS,
    NUM_LOGITS_PROCESSORS,
    STATE_BUILDERS,
    has_prompts,
    why_engine_is_not_replayed,
    why_step_is_not_replayed,
)
from rose_backend.vllm_plugin.step_graph.steps import StepGraphs
from tests.support.decode_steps import (
    BLOCK_SIZES,
    NUM_SLOTS,
    POISON,
    make_case,
    make_mixed_case,
    make_sampled,
)
from tests.support.interpreter import run_interpreted
from tests.support.random_checkpoints import (
    write_random_granite_hybrid,
    write_random_lfm2,
    write_random_qwen3_next,
)
from tests.support.vllm_plugin.configs import connector
from tests.support.vllm_plugin.decode_kernels import (
    begin_as_vllm,
    end_as_vllm,
    end_drafts_as_vllm,
    positions_as_vllm,
)
from tests.support.vllm_plugin.steady_runner import (
    BLOCK_SIZE,
    GROUPS,
    MAX_LEN,
    MAX_LORAS,
    MAX_REQS,
    STATE_GROUPS,
    VOCAB_SIZE,
    Desc,
    Requests,
    Runner,
    SamplingRunner,
    make_output,
    rope_state,
    state_after,
)

WIDTH = MAX_LEN // BLOCK_SIZE


def run(steps: StepGraphs, output: SchedulerOutput) -> list[int]:
    assert steps.launch(output), STEPS
    result = steps.take_output(None)
    assert result is not None and steps.take_output(None) is None
    told = result.get_output()
    assert told.req_ids == output.scheduled_cached_reqs.req_ids
    assert [told.req_id_to_index[each] for each in told.req_ids] == list(range(len(told.req_ids)))
    return [token for (token,) in told.sampled_token_ids]


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.mark.parametrize("sees_pictures", [False, True], ids=["text", "multimodal"])
@pytest.mark.parametrize(("seed", "share_own"), [(5, 0.0), (0, 0.4), (1, 0.4)])
@pytest.mark.parametrize("groups", [*GROUPS.values(), *STATE_GROUPS.values()], ids=[*GROUPS, *STATE_GROUPS])
def test_requests_come_and_go(
    groups: tuple[tuple[int, int | None, int], ...], seed: int, share_own: float, sees_pictures: bool
) -> None:
    runner = Runner(groups)
    if sees_pictures:
        runner.see_pictures()
    steps, requests, choose = StepGraphs(runner), Requests(runner), random.Random(seed)
    states, num_own = runner.req_states, 0
    for _ in range(200):
        requests.come_and_go(choose)
        if not requests.tokens:
            continue
        before = states.last_sampled_tokens.clone()
        if choose.random() < share_own:
            # As after a step that ``launch`` leaves to vLLM.
            steps._loaded_batch = None
            (got, _), num_own = runner.own_step(requests.step()), num_own + 1
        else:
            got = run(steps, requests.step())
        assert got == requests.expect()
        for request_id, tokens in requests.tokens.items():
            slot, length = states.req_id_to_index[request_id], len(tokens)
            assert states.all_token_ids.gpu[slot, :length].tolist() == tokens
            assert int(states.total_len.gpu[slot]) == int(states.num_computed_tokens.gpu[slot]) + 1 == length
            assert int(states.last_sampled_tokens[slot]) == tokens[-1]
            counts = runner.block_tables.num_blocks.np[:, slot].tolist()
            assert counts == [*map(len, requests.blocks[request_id])]
        idle = [slot for slot in range(MAX_REQS) if slot not in states.req_id_to_index.values()]
        assert torch.equal(states.last_sampled_tokens[idle], before[idle])
    assert requests.count > 25 and (40 < num_own < 160) == (share_own > 0)


def test_the_same_batch_is_not_taken_over_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, requests = StepGraphs(runner), Requests(runner)
    for _ in range(3):
        requests.add(5)
    calls: list[str] = []
    monkeypatch.setattr(runner, "update_requests", lambda output: calls.append("update"))
    for _ in range(4):
        assert run(steps, requests.step()) == requests.expect()
    assert calls == ["update"]
    requests.end("request 1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "update_requests", Runner.update_requests.__get__(runner))
        assert run(steps, requests.step()) == requests.expect()


def test_a_vllm_step_in_between_makes_the_batch_load_again(runner: Runner) -> None:
    """Slots may be given to others by vLLM's own steps, although the requests of the next step are the same."""
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    requests.add(4)
    assert run(steps, requests.step()) == requests.expect()
    prompts = make_output(list(requests.tokens), [4, 5])
    prompts.scheduled_new_reqs = [object()]  # type: ignore[list-item]
    assert not steps.launch(prompts) and steps.take_output(None) is None
    states = runner.req_states
    # vLLM's step moves the second request to another slot.
    old, new = states.req_id_to_index["request 1"], states.free.pop()
    for tensor in (
        states.num_computed_tokens.gpu,
        states.total_len.gpu,
        states.all_token_ids.gpu,
        states.last_sampled_tokens,
        runner.block_tables.block_tables[0].gpu,
    ):
        tensor[new] = tensor[old]
        tensor[old] = 1
    counts = runner.block_tables.num_blocks.np[0]
    counts[new] = counts[old]
    states.req_id_to_index["request 1"] = new
    assert run(steps, requests.step()) == requests.expect()


def test_new_blocks_of_all_groups_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(GROUPS["sizes, windows and shapes"])
    steps, requests = StepGraphs(runner), Requests(runner)
    written = []

    def write(writes: torch.Tensor, groups: Any) -> None:
        written.append(writes.shape[1])
        write_block_ids(writes, groups)

    monkeypatch.setattr(whole_steps, "write_block_ids", write)
    for _ in range(3):
        requests.add(8)
    counts = []
    for _ in range(9):
        assert run(steps, requests.step()) == requests.expect()
        counts.append(len(written))
    # Blocks of 2, 4, 8 and 4 tokens; the first step's come with the batch, and nothing is written where none is full.
    assert counts == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert written == [3, 3 * 3, 3, 3 * 4]
    tables = runner.block_tables
    for request_id, blocks in requests.blocks.items():
        slot = runner.req_states.req_id_to_index[request_id]
        for index, of_group in enumerate(blocks):
            assert tables.num_blocks.np[index, slot] == len(of_group)
            assert tables.block_tables[index].gpu[slot, : len(of_group)].tolist() == of_group


def test_new_blocks_are_zeroed_and_states_copied_in_replayed_steps() -> None:
    runner = Runner(STATE_GROUPS["states"])
    steps, requests, checkpoint = StepGraphs(runner), Requests(runner), 77
    requests.add(5)
    requests.add(9)
    for step in range(6):
        output = requests.step()
        if step % 2:
            output.new_block_ids_to_zero = [step, step + 1]
        if step == 4:
            copied = state_after(requests.tokens["request 1"][:-1])
            output.kv_cache_block_copies = [(requests.blocks["request 1"][1][0], checkpoint)]  # type: ignore[list-item]
        assert run(steps, output) == requests.expect()
    # Before the step moved the state on. What is new is zeroed once, whether the batch is another or the same.
    assert runner.states[1, 0, checkpoint] == copied != state_after(requests.tokens["request 1"][:-1])
    assert runner.zeroed == [1, 2, 3, 4, 5, 6]


def test_prompts_beside_states_are_vllms() -> None:
    runner = SamplingRunner(STATE_GROUPS["states first"])
    steps, requests = StepGraphs(runner), Requests(runner)
    assert all(end != "mixed" for end, _ in steps._all_ends())
    requests.add(3)
    request_id, reason = requests.arrive(5, 4), "prompts of a model with states"
    count = STEPS.vllm.get(reason, 0)
    assert not steps.launch(requests.mixed_step({request_id: 1}))
    # Its last token alone looks like a decode.
    runner.add_requests(requests.mixed_step({request_id: 1}))
    assert not steps.launch(requests.mixed_step({request_id: 1}))
    assert STEPS.vllm[reason] == count + 2
    del requests.tokens[request_id]
    assert run(steps, requests.step()) == requests.expect()


@pytest.mark.parametrize("group", [0, 1])
def test_a_row_without_room_is_an_error(group: int) -> None:
    runner = Runner(((BLOCK_SIZE, None, 1), (BLOCK_SIZE, 9, 1)))
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    assert run(steps, requests.step()) == requests.expect()
    runner.block_tables.num_blocks.np[group, runner.req_states.req_id_to_index["request 0"]] = WIDTH
    output = requests.step()
    output.scheduled_cached_reqs.new_block_ids[0] = ([5], [6])
    with pytest.raises(IntegrityError, match=f"blocks {WIDTH} to {WIDTH + 1}, a row has {WIDTH}"):
        steps.launch(output)


@pytest.mark.parametrize("name", FIELDS_OF_OTHER_STEPS)
def test_a_step_with_anything_else_is_vllms(name: str) -> None:
    output = make_output(["a"], [5])
    assert why_step_is_not_replayed(output) is None
    setattr(output, name, [1])
    assert why_step_is_not_replayed(output) is not None


@pytest.mark.parametrize("name", FIELDS_OF_MIXED_STEPS)
def test_prompts_are_recognized_by_what_comes_with_them(name: str) -> None:
    output = make_output(["a"], [5])
    output.kv_cache_block_copies, output.new_block_ids_to_zero = [object()], [7]  # type: ignore[list-item]
    assert not has_prompts(output)
    setattr(output, name, [1])
    assert has_prompts(output) and why_step_is_not_replayed(output) is None


def test_what_comes_of_pictures_is_done_in_replayed_steps(runner: Runner) -> None:
    runner.see_pictures()
    updates: list[Any] = []
    runner.encoder_cache.update_encoder_inputs = lambda *update: updates.append(update)
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    for is_loaded in (False, True):
        outputs = runner.encoder_cache.encoder_outputs = {"a": torch.zeros(1), "b": torch.zeros(1)}
        output = requests.step()
        output.free_encoder_mm_hashes = ["a"]
        # From vLLM 0.33 on.
        output.encoder_input_updates = {"request 0": {0: None}}
        assert (steps._loaded_batch is not None) == is_loaded
        assert run(steps, output) == requests.expect()
        assert [*outputs] == ["b"] and updates == [("request 0", {0: None})] * (1 + is_loaded)
    assert run(steps, requests.step()) == requests.expect() and len(updates) == 2


def test_prompts_of_models_that_clear_features_are_vllms() -> None:
    runner = SamplingRunner()
    runner.see_pictures("Qwen3VLForConditionalGeneration")
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    counts = [STEPS.vllm.get("prompts of a model audited for decodes only", 0)]
    request_id = requests.arrive(5, 2)
    assert not steps.launch(requests.mixed_step({request_id: 2}))
    # The last token of a prompt looks like a decode, and may be a picture's.
    runner.add(request_id, [1, 2, 3, 4, 5], last=0)
    requests.computed[request_id] = 4
    output = requests.mixed_step({request_id: 1})
    assert not has_prompts(output) and not steps.launch(output)
    assert STEPS.vllm["prompts of a model audited for decodes only"] == counts[0] + 2


def test_what_a_request_wants_decides(runner: Runner) -> None:
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    slot, sampler = runner.req_states.req_id_to_index["request 0"], runner.sampler
    output = make_output(["request 0"], [3])
    for reason, array, value in (
        ("log-probabilities without Rose's sampler", sampler.sampling_states.num_logprobs, 2),
        ("random draws by vLLM's sampler", sampler.sampling_states.temperature.np, 0.7),
        ("logits processors without Rose's sampler", sampler.needs_logits_processing, True),
        ("prompts without Rose's sampler", runner.req_states.prefill_len.np, 4),
    ):
        count, kept = STEPS.vllm.get(reason, 0), array[slot]
        array[slot] = value
        assert not steps.launch(output)
        assert STEPS.vllm[reason] == count + 1
        array[slot] = kept
    output.has_structured_output_requests = True
    assert not steps.launch(output)
    assert STEPS.vllm["structured output without Rose's sampler"] > 0
    output.has_structured_output_requests = False
    assert steps.launch(output)


@pytest.mark.parametrize("sees_pictures", [False, True], ids=["text", "multimodal"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_prompts_are_computed_beside_decodes(
    groups: tuple[tuple[int, int | None, int], ...], seed: int, sees_pictures: bool
) -> None:
    """In chunks, after hits, in steps of their own and beside others; chunks and hits may end inside pictures."""
    runner, choose = SamplingRunner(groups), random.Random(seed)
    if sees_pictures:
        runner.see_pictures()
    steps, requests, states = StepGraphs(runner), Requests(runner), runner.req_states
    counted = dict(STEPS.vllm)
    num_mixed = num_decodes_only = num_last_tokens = num_encoded = num_freed = 0
    for _ in range(250):
        for request_id in list(requests.tokens):
            is_long = len(requests.tokens[request_id]) >= MAX_LEN - 1
            if is_long or (choose.random() < 0.06 and request_id in states.req_id_to_index):
                requests.end(request_id)
                requests.computed.pop(request_id, None)
        if len(requests.tokens) < MAX_REQS - len(requests.finished) and choose.random() < 0.3:
            num_tokens = choose.choice([1, 2, 7, 19, 40])
            # The same picture in many prompts; one may be first, and one last.
            pictures = [
                (4 * min(5, num_tokens - first) + choose.randrange(4), first, min(5, num_tokens - first))
                for first in range(choose.randrange(4), num_tokens, 8)
                if sees_pictures and choose.random() < 0.6
            ]
            requests.arrive(num_tokens, choose.randrange(num_tokens), *pictures)
        counts, room = {}, 48 - len(requests.tokens)
        for request_id, computed in requests.computed.items():
            most = min(len(requests.tokens[request_id]) - computed, room)
            counts[request_id] = choose.choice([1, most, choose.randint(1, most)])
            room -= counts[request_id]
        output = requests.mixed_step(counts)
        if not output.total_num_scheduled_tokens:
            requests.finished = output.finished_req_ids
            continue
        if sees_pictures and choose.random() < 0.1 and not output.scheduled_encoder_inputs:
            idle = {*runner.encoder_cache.encoder_outputs} - {
                picture.identifier for each in counts for picture in requests.pictures[each]
            }
            output.free_encoder_mm_hashes, num_freed = sorted(idle), num_freed + len(idle)
        num_encoded += len(output.scheduled_encoder_inputs)
        num_mixed += has_prompts(output)
        num_last_tokens += not has_prompts(output) and bool(counts)
        num_decodes_only += not counts
        assert steps.launch(output), STEPS.vllm
        told = steps.take_output(None).get_output()  # type: ignore[union-attr]
        expected = requests.expect_mixed(output)
        assert told.req_ids == [*told.req_id_to_index] and set(told.req_ids) == set(expected)
        assert dict(zip(told.req_ids, told.sampled_token_ids, strict=True)) == expected
        for request_id, tokens in requests.tokens.items():
            if request_id not in states.req_id_to_index:
                continue
            slot, is_prompt = states.req_id_to_index[request_id], request_id in requests.computed
            assert states.all_token_ids.gpu[slot, : len(tokens)].tolist() == tokens
            assert int(states.total_len.gpu[slot]) == len(tokens)
            computed = requests.computed[request_id] if is_prompt else len(tokens) - 1
            assert int(states.num_computed_tokens.gpu[slot]) == computed
            assert is_prompt or int(states.last_sampled_tokens[slot]) == tokens[-1]
    assert num_mixed > 50 and num_decodes_only > 30 and num_last_tokens > 3
    assert not sees_pictures or min(num_encoded, num_freed) > 5
    assert counted == STEPS.vllm


def adapter(number: int, weight: int, **options: Any) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, str(weight), **options)


@pytest.mark.parametrize("seed", range(4))
def test_adapters_come_and_go(seed: int) -> None:
    """Between a few places, with requests and, as ``add_lora`` and ``remove_lora`` do, between steps."""
    runner, choose = SamplingRunner(), random.Random(seed)
    runner.serve_adapters()
    steps, requests, adapters = StepGraphs(runner), Requests(runner), runner.adapters
    known = {number: adapter(number, 10 * number) for number in range(1, 6)}
    to_load, num_replayed = STEPS.vllm.get("an adapter to load", 0), 0
    for _ in range(300):
        for request_id in list(requests.tokens):
            is_long = len(requests.tokens[request_id]) >= MAX_LEN - 1
            if is_long or (choose.random() < 0.05 and request_id in runner.req_states.req_id_to_index):
                requests.end(request_id)
                requests.computed.pop(request_id, None)
        active = {requests.adapter_of[each] for each in requests.tokens if each in requests.adapter_of}
        if len(requests.tokens) < MAX_REQS - len(requests.finished) and choose.random() < 0.2:
            wanted = choose.choice([None, *known.values()])
            if wanted is None or len(active | {wanted}) <= MAX_LORAS:
                request_id = requests.arrive(choose.randint(1, 20), 0)
                if wanted is not None:
                    requests.adapter_of[request_id] = wanted
                    active.add(wanted)
        if choose.random() < 0.1:
            number = choose.choice(list(known))
            if known[number] not in active:
                # Other weights under the same number.
                known[number] = adapter(number, choose.randrange(100))
                adapters.remove_adapter(number)
            choose.choice(
                [adapters.of_worker.remove_adapter, lambda n: adapters.of_worker.add_adapter(known[n])]
            )(number)
        counts = {
            request_id: choose.randint(1, min(len(requests.tokens[request_id]) - computed, 5))
            for request_id, computed in requests.computed.items()
        }
        output = requests.mixed_step(counts)
        if not output.total_num_scheduled_tokens:
            requests.finished = output.finished_req_ids
            continue
        if not steps.launch(output):
            assert STEPS.vllm["an adapter to load"] > to_load
            for each in runner.lora_state.get_activate_loras(list(requests.tokens)) | {
                new.lora_request for new in output.scheduled_new_reqs if new.lora_request
            }:
                # As vLLM's step does.
                adapters.of_worker.add_adapter(each)
            assert steps.launch(output), STEPS.vllm
        num_replayed += 1
        told = steps.take_output(None).get_output()  # type: ignore[union-attr]
        expected = requests.expect_mixed(output)
        assert dict(zip(told.req_ids, told.sampled_token_ids, strict=True)) == expected
    assert STEPS.vllm["an adapter to load"] > to_load + 5 and num_replayed > 200
    assert num_replayed / 8 < adapters.num_mappings < num_replayed


def test_rows_are_told_their_adapters_where_batch_or_places_change() -> None:
    runner = SamplingRunner()
    runner.serve_adapters()
    steps, requests, adapters = StepGraphs(runner), Requests(runner), runner.adapters
    for number in (1, 2):
        adapters.of_worker.add_adapter(adapter(number, number))
        request_id = requests.arrive(1, 0)
        requests.adapter_of[request_id] = adapter(number, number)

    def step() -> int:
        output, before = requests.mixed_step(dict.fromkeys(requests.computed, 1)), adapters.num_mappings
        assert steps.launch(output), STEPS.vllm
        told = steps.take_output(None).get_output()  # type: ignore[union-attr]
        assert told.sampled_token_ids == [*requests.expect_mixed(output).values()]
        return adapters.num_mappings - before

    # A prompt's last token is no steady step; the next one takes the batch over.
    assert [step() for _ in range(4)] == [1, 1, 0, 0]
    # A third adapter comes into the place of the one that was used least recently, which comes back in its turn.
    adapters.of_worker.add_adapter(adapter(3, 3))
    assert set(adapters.lora_index_to_id) != {1, 2} and [step() for _ in range(3)] == [1, 0, 0]
    assert set(adapters.lora_index_to_id) == {1, 2}
    requests.end("request 0")
    assert [step() for _ in range(3)] == [1, 0, 0]
    # Behind a step of vLLM's, which tells rows theirs.
    (tokens, _), expected = runner.own_step(requests.step()), requests.expect()
    assert tokens == expected
    steps._loaded_batch = None
    assert [step() for _ in range(3)] == [1, 0, 0]


def test_an_adapter_that_is_not_in_memory_is_vllms_to_load() -> None:
    runner = SamplingRunner()
    runner.serve_adapters()
    steps, requests = StepGraphs(runner), Requests(runner)
    request_id = requests.arrive(2, 0)
    requests.adapter_of[request_id] = adapter(1, 7)

    def is_replayed() -> bool:
        output = requests.mixed_step(dict.fromkeys(requests.computed, 2))
        count = STEPS.vllm.get("an adapter to load", 0)
        if not steps.launch(output):
            assert STEPS.vllm["an adapter to load"] == count + 1 and steps.take_output(None) is None
            return False
        assert steps.take_output(None) is not None
        requests.expect_mixed(output)
        return True

    assert not is_replayed()
    runner.lora_manager.add_adapter(adapter(1, 7))
    assert is_replayed() and is_replayed()
    runner.lora_manager.remove_adapter(1)
    assert not is_replayed()
    # It is read from its files in each of vLLM's steps.
    runner.lora_manager.add_adapter(adapter(1, 7))
    assert is_replayed()
    runner.lora_state.lora_requests[request_id] = adapter(1, 7, load_inplace=True)
    steps._loaded_batch = None
    assert not is_replayed()


def test_an_end_with_more_rows_than_the_layers_graph_has_none_of_an_earlier_step() -> None:
    runner = SamplingRunner()
    steps, requests = StepGraphs(runner), Requests(runner)
    for _ in range(MAX_REQS):
        requests.add(3)
    assert run(steps, requests.step()) == requests.expect()
    for index in range(4):
        requests.end(f"request {index}")
    # Five rows with six tokens: the graph of the layers has six rows, the end eight.
    output = requests.mixed_step({requests.arrive(2, 0): 2})
    assert steps.launch(output) and steps.take_output(None) is not None
    assert steps._inputs.request_slots[5:].tolist() == [MAX_REQS] * (MAX_REQS - 5)


def test_prompts_that_are_vllms_change_nothing() -> None:
    runner = SamplingRunner()
    steps, requests, states = StepGraphs(runner), Requests(runner), runner.req_states
    requests.add(3)
    request_id = requests.arrive(20, 0)

    def check(reason: str, output: SchedulerOutput) -> None:
        count, free = STEPS.vllm.get(reason, 0), list(states.free)
        assert not steps.launch(output) and steps.take_output(None) is None
        assert STEPS.vllm.get(reason, 0) == count + 1, STEPS.vllm
        assert request_id not in states.req_id_to_index and states.free == free

    for params, reason in (
        (SamplingParams(prompt_logprobs=1), "log-probabilities of prompts"),
        (SamplingParams(logprobs=-1), "more than 20 log-probabilities"),
        (SamplingParams(logprob_token_ids=[1]), "log-probabilities of given tokens"),
    ):
        output = requests.mixed_step({request_id: 5})
        output.scheduled_new_reqs[0].sampling_params = params
        check(reason, output)
    check("prompts without a full graph", requests.mixed_step({request_id: 48}))
    output = requests.mixed_step({request_id: 5})
    output.scheduled_cached_reqs.resumed_req_ids = {"request 0"}
    check("resumed requests", output)
    runner.report(states.req_id_to_index["request 0"], 21)
    check("more than 20 log-probabilities", requests.mixed_step({request_id: 5}))
    runner.report(states.req_id_to_index["request 0"], -1)
    # Where a part of the prompt has been computed by vLLM's step.
    runner.prompt_logprobs_worker.token_id_scores["request 5"] = object()
    check("log-probabilities of prompts", requests.mixed_step({request_id: 5}))
    runner.prompt_logprobs_worker.token_id_scores.clear()
    output = requests.mixed_step({request_id: 5})
    assert steps.launch(output) and steps.take_output(None) is not None
    requests.expect_mixed(output)
    runner.prompt_logprobs_worker.uses_prompt_logprobs[states.req_id_to_index[request_id]] = True
    assert not steps.launch(requests.mixed_step({request_id: 5}))


def test_vllms_own_steps_with_prompts_multiply_as_many_rows() -> None:
    runner = SamplingRunner()
    steps = StepGraphs(runner)
    hidden = torch.arange(3, dtype=torch.float64)[:, None]
    # Of prompts, and with the last token of a prompt beside decodes.
    for num_tokens, num_rows in ((20, 32), (3, 4)):
        batch = SimpleNamespace(num_tokens=num_tokens, num_reqs=3, has_prefill=True)
        runner.execute_model_state = SimpleNamespace(
            input_batch=batch,
            hidden_states=runner.cudagraph_manager.hidden_states[:num_rows],
            dp_sync_state=None,
        )
        steps.note_vllm_step()
        runner.products.clear()
        assert runner.model.compute_logits(hidden).argmax(-1).tolist() == [0, 1, 2]
        # Once: prompts' log-probabilities multiply what they have.
        assert len(runner.model.compute_logits(hidden)) == 3
        assert runner.products == [4, 3]
    runner.execute_model_state = None
    steps.note_vllm_step()
    assert len(runner.model.compute_logits(hidden)) == 3 and runner.products[-1] == 3


def grammar_of(allowed: dict[str, list[int]]) -> Any:
    words = [[sum(1 << token for token in tokens)] for tokens in allowed.values()]
    return SimpleNamespace(
        structured_output_request_ids=[*allowed], grammar_bitmask=np.array(words, np.int32)
    )


def test_any_mix_of_requests_is_sampled_in_replayed_steps() -> None:
    runner, choose = SamplingRunner(), random.Random(3)
    steps, requests, states = StepGraphs(runner), Requests(runner), runner.req_states
    num_replayed, ends = STEPS.rose, set()
    for _ in range(300):
        if len(requests.tokens) < MAX_REQS - len(requests.finished) and choose.random() < 0.3:
            requests.add(choose.randrange(1, 20))
            slot = states.req_id_to_index[f"request {requests.count - 1}"]
            is_plain = choose.random() < 0.6
            runner.process(slot, 0 if is_plain else choose.choice([0, 3]))
            runner.report(slot, -1 if is_plain else choose.choice([-1, 0, 2]))
            runner.sampler.sampling_states.temperature.np[slot] = 0 if is_plain else choose.choice([0, 0.7])
        for request_id in list(requests.tokens):
            if len(requests.tokens[request_id]) >= MAX_LEN - 1 or choose.random() < 0.08:
                requests.end(request_id)
        if not requests.tokens:
            continue
        output, natural = requests.step(), requests.expect()
        ids, grammar = list(requests.tokens), None
        slots = [states.req_id_to_index[request_id] for request_id in ids]
        allowed = {
            request_id: choose.sample(range(VOCAB_SIZE), 5)
            for request_id in choose.sample(ids, len(ids))
            if choose.random() < 0.3
        }
        output.has_structured_output_requests = choose.random() < 0.4
        if output.has_structured_output_requests and allowed:
            grammar = grammar_of(allowed)
        before = states.total_len.gpu.clone()
        assert steps.launch(output)
        if output.has_structured_output_requests:
            # The masks are made meanwhile.
            assert torch.equal(states.total_len.gpu, before)
        told = steps.take_output(grammar)
        assert told is not None
        ends.add(steps._loaded_batch.end if steps._loaded_batch and grammar is None else "with masks")
        result = told.get_output()
        for row, (request_id, slot) in enumerate(zip(ids, slots, strict=True)):
            logits = torch.nn.functional.one_hot(torch.tensor(natural[row]), VOCAB_SIZE).float()
            if grammar is not None and request_id in allowed:
                mask = torch.ones(VOCAB_SIZE, dtype=torch.bool)
                mask[allowed[request_id]] = False
                logits[mask] = float("-inf")
            token = int(logits.roll(runner.processors.shifts[slot]).argmax())
            requests.tokens[request_id][-1] = token
            assert result.sampled_token_ids[row] == [token] == [int(states.last_sampled_tokens[slot])]
            if (count := int(runner.sampler.sampling_states.num_logprobs[slot])) >= 0:
                lists = result.logprobs.slice_request(row, 1)
                ids = lists.logprob_token_ids[0, : count + 1].tolist()
                assert ids[0] == token and len(set(ids[1:])) == count
                assert torch.equal(logits[ids[1:]], logits.topk(count).values)
                expected = logits.log_softmax(-1)[ids]
                torch.testing.assert_close(torch.tensor(lists.logprobs[0, : count + 1]), expected)
                assert lists.sampled_token_ranks[0] == int((logits >= logits[token]).sum())
        if (runner.sampler.sampling_states.num_logprobs[slots] < 0).all():
            assert result.logprobs is None
    assert STEPS.rose - num_replayed > 100 and ends == {"greedy", "drawn", "processed", "with masks"}


def test_masks_come_for_steps_that_wait_for_them() -> None:
    runner = SamplingRunner()
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    assert steps.launch(requests.step())
    with pytest.raises(IntegrityError, match="sampled without"):
        steps.take_output(grammar_of({"request 0": [1]}))
    assert steps.take_output(None) is not None
    requests.expect()
    output = requests.step()
    output.has_structured_output_requests = True
    assert steps.launch(output)
    with pytest.raises(IntegrityError, match="never asked"):
        steps.launch(output)
    with pytest.raises(IntegrityError, match="request 7, which has no row"):
        steps.take_output(grammar_of({"request 7": [1]}))


class Loads:
    """The worker's side of a KV connector: notes its calls among the step's products, and reports by chance."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.calls: list[Any] = []
        self._choose = random.Random(seed)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self)
        runner.kv_connector = ActiveKVConnector(VllmConfig(), {})
        for owner, name in ((runner.cudagraph_manager, "run_fullgraph"), (runner.model, "compute_logits")):
            setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.calls.append(name)
            return call(*args)

        return noted

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of which only the call matters."""
        return lambda *args: self.calls.append((name, *args))

    def start_load_kv(self, context: Any, **_: Any) -> None:
        assert context is get_forward_context()
        self.calls.append("start_load_kv")

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        self.calls.append(("get_transfer_results", *sorted(finished)))
        return KVConnectorTransferResults(*({self._name()} for _ in range(3)))

    def get_block_ids_with_load_errors(self) -> set[int]:
        self.calls.append("get_block_ids_with_load_errors")
        return {each for each in range(9) if self._choose.random() < 0.1}

    def build_connector_worker_meta(self) -> str:
        self.calls.append("build_connector_worker_meta")
        return self._name()

    def _name(self) -> str:
        return f"request {self._choose.randrange(1000)}"


def run_with_loads(
    monkeypatch: pytest.MonkeyPatch, share_own: float, seed: int
) -> tuple[list[Any], list[tuple[list[int], KVConnectorOutput]], list[bool]]:
    """Return the calls of a KV connector, the tokens and reports of each step, and which steps were replayed."""
    runner, choose, choose_own = SamplingRunner(), random.Random(seed), random.Random(seed)
    loads = Loads(runner, monkeypatch, seed)
    steps, requests = StepGraphs(runner), Requests(runner)
    results: list[Any] = []
    is_replayed: list[bool] = []
    for index in range(150):
        requests.come_and_go(choose)
        if index == 70:
            for request_id in list(requests.tokens):
                requests.end(request_id)
        output = requests.step()
        output.kv_connector_metadata = f"metadata {index}"  # type: ignore[assignment]
        output.has_sync_kv_loads = choose.random() < 0.1
        output.has_structured_output_requests = choose.random() < 0.2
        expected = requests.expect()
        if choose_own.random() < share_own or not steps.launch(output):
            steps._loaded_batch = None
            tokens, reported = runner.own_step(output)
            is_replayed.append(False)
        else:
            launched = steps.take_output(None)
            assert launched is not None
            told = launched.get_output()
            assert launched.get_kv_connector_output() is told.kv_connector_output
            tokens, reported = [token for (token,) in told.sampled_token_ids], told.kv_connector_output
            is_replayed.append(True)
        assert tokens == expected
        results.append((tokens, reported))
    return loads.calls, results, is_replayed


@pytest.mark.parametrize("seed", range(3))
def test_a_connector_is_called_as_in_vllms_own_steps(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Beside steps without tokens, loads before the layers, and loads that fail."""
    sync, empty = STEPS.vllm.get("has_sync_kv_loads", 0), STEPS.vllm.get("no tokens", 0)
    calls, results, _ = run_with_loads(monkeypatch, 1.0, seed)
    assert any(reported.invalid_block_ids for _, reported in results)
    for share_own in (0.0, 0.5):
        found_calls, found, is_replayed = run_with_loads(monkeypatch, share_own, seed)
        assert found_calls == calls and found == results
        assert 30 < is_replayed.count(True) < len(results)
    assert STEPS.vllm["has_sync_kv_loads"] > sync and STEPS.vllm["no tokens"] > empty


def test_steps_with_prompts_call_a_connector_as_decodes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SamplingRunner()
    loads = Loads(runner, monkeypatch, 0)
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    requests.add(3)
    requests.end("request 1")
    traces = []
    for counts in ({}, {requests.arrive(9, 4): 2}):
        loads.calls.clear()
        output = requests.mixed_step(counts)
        output.kv_connector_metadata = "metadata"  # type: ignore[assignment]
        assert has_prompts(output) == bool(counts) and steps.launch(output)
        told = steps.take_output(None)
        assert told is not None and told.get_output().kv_connector_output.finished_sending
        requests.expect_mixed(output)
        traces.append([*loads.calls])
    decodes, prompts = traces
    assert ("get_transfer_results", "request 1") in decodes and decodes.index("run_fullgraph") == 2
    assert prompts == [("get_transfer_results",) if "request 1" in each else each for each in decodes]


MOVABLE = {
    "model.lm_head.weight": StaleGraphs.ROSES,
    "model.layer.weight": StaleGraphs.ALL,
    "model.layer.packed.0": StaleGraphs.ALL,
    "kv_caches.0": StaleGraphs.ALL,
    "input_buffers.positions": StaleGraphs.ALL,
    "block_tables.input_block_tables.0": StaleGraphs.ALL,
    "block_tables.block_tables.0.gpu": StaleGraphs.ALL,
    "block_tables.slot_mappings": StaleGraphs.ALL,
    "attn_groups.0.0.metadata_builders.0.computed_tokens": StaleGraphs.ALL,
    "cudagraph_manager.hidden_states": StaleGraphs.ALL,
    "req_states.total_len.gpu": StaleGraphs.ROSES,
    "req_states.last_sampled_tokens": StaleGraphs.ROSES,
    "model_state.rope_state.positions": StaleGraphs.ALL,
    "model_state.encoder_runner.inputs_embeds": StaleGraphs.ALL,
    "model.language_model.lm_head.weight": StaleGraphs.ROSES,
    "sampler.penalties_state.output_bin_counts": StaleGraphs.ROSES,
    "sampler.sample.graphs.parameters.num_logprobs": StaleGraphs.ROSES,
    "cudagraph_manager.rose_step_graphs._slots": StaleGraphs.ROSES,
    "cudagraph_manager.rose_step_graphs._model_inputs._deltas": StaleGraphs.ROSES,
    "cudagraph_manager.rose_step_graphs._groups.layout": StaleGraphs.ROSES,
    "cudagraph_manager.rose_step_graphs._row_inputs._bytes": StaleGraphs.ROSES,
    "cudagraph_manager.rose_step_graphs._masks._bitmask": StaleGraphs.ROSES,
    "cudagraph_manager.rose_step_graphs._record.words": StaleGraphs.ROSES,
    "speculator.model.weight": StaleGraphs.ALL,
    "speculator.draft_tokens": StaleGraphs.ALL,
}
"""What graphs hold, one of each kind, and which graphs hold it."""


class Layer(torch.nn.Linear):
    """A layer with a packed form, which is no parameter."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.packed = (torch.zeros(3),)


class CapturedRunner(SamplingRunner):
    """With steps, behind its own and vLLM's methods as they are patched."""

    vllm_config = SimpleNamespace(additional_config={"rose": {}})

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        groups: tuple[tuple[int, int | None, int], ...] = GROUPS["one group"],
    ) -> None:
        super().__init__(groups)
        self.see_pictures()
        self.model.language_model = SimpleNamespace(lm_head=torch.nn.Linear(1, 1))
        self.events: list[Any] = []
        self.model.layer, self.model.take_moved_weights = Layer(), lambda: self.events.append("taken")
        of_head = object.__new__(CudaGraphManager)
        of_head.release_graphs = lambda: self.events.append("released the head's")  # type: ignore[method-assign]
        of_speculator = Layer()
        of_speculator.take_moved_weights = lambda: self.events.append("taken by the head")  # type: ignore[attr-defined]
        self.speculator = SimpleNamespace(
            model=of_speculator, draft_tokens=torch.zeros(3), prefill_cudagraph_manager=of_head
        )
        monkeypatch.setattr(StepGraphs, "capture", self._note_capture)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        monkeypatch.setattr(runner_hooks, "set_current_vllm_config", lambda _: nullcontext())
        monkeypatch.setattr(runner_hooks, "largest_of_ranks", lambda stale: max(stale, self.elsewhere))
        monkeypatch.setattr(runner_hooks, "why_engine_is_not_replayed", lambda _: None)
        monkeypatch.setattr(runner_hooks, "_room_for_logits", self._give_stream)
        addresses_of = graph_addresses.addresses_of
        self.num_comparisons = -1
        self.elsewhere = StaleGraphs.NONE

        def counted(runner: Any) -> Any:
            self.num_comparisons += 1
            return addresses_of(runner)

        monkeypatch.setattr(graph_addresses, "addresses_of", counted)
        self.execute = runner_hooks.wrap_execute_model(lambda self, *args: self.events.append("vLLM's step"))
        self.take = runner_hooks.wrap_sample_tokens(lambda self, grammar: None)
        self.own_logits = self.model.compute_logits
        runner_hooks._capture_steps(self, "stream")  # type: ignore[arg-type]
        self.events.clear()

    def _note_capture(self, stream: Any) -> None:
        # The method of a class: the steps are those that have just replaced the product with the head.
        steps = self.model.compute_logits.__self__
        steps.stream = stream
        self.events.append(("Rose's", stream))

    @contextmanager
    def _give_stream(self, _: Any, streams: list[Any]) -> Iterator[None]:
        yield
        streams.append("another stream")

    def capture_model(self) -> None:
        runner_hooks.wrap_capture_model(lambda self, profile_only: self.events.append("vLLM's"))(self)

    def replace(self, path: str) -> None:
        """Put a copy in the place of a tensor."""
        owner, (*parents, last) = self, path.split(".")
        for name in parents:
            owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
        if isinstance(owner, tuple):
            self.model.layer.packed = tuple(each.clone() for each in owner)
        elif isinstance(owner, dict):
            owner[last] = owner[last].clone()
        elif isinstance(owner, list):
            owner[int(last)] = owner[int(last)].clone()
        elif isinstance(owner, torch.nn.Module):
            setattr(owner, last, torch.nn.Parameter(getattr(owner, last).detach().clone()))
        else:
            setattr(owner, last, getattr(owner, last).clone())

    def run(self, output: SchedulerOutput) -> list[int]:
        assert self.execute(self, output) is None
        told = self.take(self, None).get_output()
        return [token for (token,) in told.sampled_token_ids]


@pytest.mark.parametrize("path", MOVABLE)
def test_what_has_moved_is_told_by_name(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    runner = CapturedRunner(monkeypatch)
    addresses = runner.cudagraph_manager.rose_graph_addresses
    assert addresses.find_moved() == []
    runner.replace(path)
    moved = addresses.find_moved()
    assert moved == [path] and which_graphs_hold(moved) == MOVABLE[path]


@pytest.mark.parametrize(
    "path",
    [
        "attn_groups.0.0.metadata_builders.0.state_indices_tensor_d",
        "attn_groups.1.1.metadata_builders.0.non_spec_state_indices_tensor",
        "attn_groups.1.0.metadata_builders.0.non_spec_query_start_loc",
        "model_state._mamba_state_idx_gpu",
    ],
)
def test_what_steps_tell_layers_of_states_is_listed(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    runner = CapturedRunner(monkeypatch, STATE_GROUPS["states first"])
    builder = runner.attn_groups[1][0].metadata_builders[0]
    of_a_step = torch.zeros(3, 1, dtype=torch.int32)
    # Of the step before, as vLLM's model state leaves it.
    builder.mamba_aligned_state_indices = of_a_step[:2]
    addresses = graph_addresses.GraphAddresses(runner)
    builder.mamba_aligned_state_indices = of_a_step
    assert addresses.find_moved() == []
    runner.replace(path)
    assert addresses.find_moved() == [path] and which_graphs_hold([path]) == StaleGraphs.ALL


def test_every_tensor_that_steps_and_graphs_of_layers_use_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CapturedRunner(monkeypatch)
    found = graph_addresses.addresses_of(runner).values()
    steps = runner.cudagraph_manager.rose_step_graphs
    used = [
        *(
            getattr(owner, each.name)
            for owner in (steps._state, steps._inputs, *steps._groups.groups)
            for each in fields(owner)
        ),
        *steps._row_inputs.tensors.values(),
        *runner.model.lm_head.parameters(),
        *runner.model.language_model.lm_head.parameters(),
        *(runner.model_state.rope_state.positions, runner.model_state.encoder_runner.inputs_embeds),
        steps._model_inputs._deltas,
        *(steps._slots, steps._tokens, steps._last_hidden, steps._groups.layout),
    ]
    addresses = [each.data_ptr() for each in used if isinstance(each, torch.Tensor)]
    assert len(addresses) > 20
    for address in addresses:
        assert any(start <= address < start + num_bytes for start, num_bytes in found)


def test_memory_reaches_to_the_last_element_of_a_view() -> None:
    runner = CapturedRunner.__new__(CapturedRunner)
    rows = torch.zeros(4, 10)
    for name in graph_addresses._OWNERS:
        setattr(runner, name, None)
    runner.device, runner.kv_caches = rows.device, [rows[1:, :3], rows[:0]]
    found = graph_addresses.addresses_of(runner)
    # Other tests of the process may have left a workspace.
    listed = {name: place for name, place in found.items() if "workspace" not in name}
    assert listed == {"kv_caches.0": (rows.data_ptr() + 40, 4 * 23)}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tied_head_is_listed_as_the_embedding_too(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    runner = CapturedRunner(monkeypatch)
    layers, head = torch.nn.Module(), runner.model.lm_head
    layers.embedding = head
    vars(runner.model)["first" if is_first else "layers"] = layers
    if is_first:
        runner.model = SimpleNamespace(**dict(reversed(vars(runner.model).items())))
        runner.cudagraph_manager.rose_step_graphs._model_inputs._model = runner.model
    runner.cudagraph_manager.rose_graph_addresses = graph_addresses.GraphAddresses(runner)
    head.weight = torch.nn.Parameter(torch.zeros(1, 1))
    moved = runner.cudagraph_manager.rose_graph_addresses.find_moved()
    assert len(moved) == 2 and which_graphs_hold(moved) == StaleGraphs.ALL


def test_what_adapters_are_in_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CapturedRunner(monkeypatch)
    config = LoRAConfig(max_lora_rank=8, max_loras=2, lora_dtype=torch.float16)
    layer = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.base_layer, layer.hidden_size, layer.device = (
        SimpleNamespace(vocab_size=VOCAB_SIZE),
        4,
        runner.device,
    )
    layer.sharded_to_full_mapping = None
    layer.create_lora_weights(2, config)
    meta = LoRAKernelMeta.make(2, 16, runner.device)
    layer.punica_wrapper = SimpleNamespace(token_mapping_meta=meta)
    runner.model.layer.product = layer
    found = graph_addresses.addresses_of(runner)
    for name in ("lora_a_stacked", "lora_b_stacked"):
        assert found[f"model.layer.product.{name}"].address == getattr(layer, name).data_ptr()
    for field in fields(meta):
        value = getattr(meta, field.name)
        if isinstance(value, torch.Tensor):
            name = f"model.layer.product.punica_wrapper.token_mapping_meta.{field.name}"
            assert found[name].address == value.data_ptr()


def test_tensors_that_take_turns_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CapturedRunner(monkeypatch)
    backed, pool = object.__new__(UvaBackedTensor), object.__new__(UvaBufferPool)
    backed.gpu, pool._curr_buffer = torch.zeros(3), torch.zeros(3)
    addresses = graph_addresses.addresses_of(runner)
    runner.req_states.backed, runner.block_tables.pools = backed, [pool]
    # Nor what is of the requests of one step, or on another device.
    runner.execute_model_state, runner.req_states.elsewhere = torch.zeros(3), torch.zeros(3, device="meta")
    runner.encoder_cache.encoder_outputs["a picture"] = torch.zeros(3)
    runner.model_state.rope_state.apply_staged_writes()
    assert graph_addresses.addresses_of(runner) == addresses


def test_the_log_names_some_of_many(monkeypatch: pytest.MonkeyPatch, rose_log: list[str]) -> None:
    runner = CapturedRunner(monkeypatch)
    runner.cudagraph_manager.release_graphs = lambda: None  # type: ignore[attr-defined]
    runner.cudagraph_manager.rose_graph_addresses._captured |= {
        f"model.layers.{n}": graph_addresses.Range(0, 1) for n in range(50)
    }
    wrap_reset_lora_state(lambda _: None)(runner)
    assert runner_hooks._steps_of(runner) is not None
    (line,) = (line for line in rose_log if "captured again" in line)
    assert "because 50 tensors of" in line and line.endswith("model.layers.19, ...")


@pytest.mark.parametrize("path", [None, *MOVABLE])
def test_graphs_are_captured_again_once_where_something_has_moved(
    monkeypatch: pytest.MonkeyPatch, rose_log: list[str], path: str | None
) -> None:
    runner = CapturedRunner(monkeypatch)
    manager, requests = runner.cudagraph_manager, Requests(runner)
    manager.release_graphs = lambda: runner.events.append("released")  # type: ignore[attr-defined]
    requests.add(3)
    assert runner.run(requests.step()) == requests.expect()
    if path is not None:
        runner.replace(path)
    before = manager.rose_step_graphs
    wrap_reset_lora_state(lambda _: runner.events.append("reset"))(runner)
    # While some memory may still be asleep nothing is looked at.
    wrap_worker_method(lambda _, tags: runner.events.append(tags))(
        SimpleNamespace(model_runner=runner), tags=["weights"]
    )
    assert runner.events == ["reset", ["weights"]] and runner.num_comparisons == 0
    for _ in range(4):
        assert runner.run(requests.step()) == requests.expect()
    stale = StaleGraphs.NONE if path is None else MOVABLE[path]
    captured: dict[StaleGraphs, list[Any]] = {
        StaleGraphs.NONE: [],
        StaleGraphs.ROSES: [("Rose's", "stream")],
        StaleGraphs.ALL: [
            "taken",
            "taken by the head",
            "released",
            "released the head's",
            "vLLM's",
            ("Rose's", "another stream"),
        ],
    }
    assert runner.events[2:] == captured[stale]
    # One comparison, and a new list where graphs are new.
    assert runner.num_comparisons == (1 if path is None else 2)
    assert (manager.rose_step_graphs is before) == (path is None)
    assert manager.rose_step_graphs._compute_logits == runner.own_logits, "wrapped twice"
    told = [line.rpartition(": ")[2] for line in rose_log if "captured again" in line]
    assert told == ([] if path is None else [path])


@pytest.mark.parametrize("path", ["model.lm_head.weight", "kv_caches.0"])
def test_data_parallel_ranks_do_not_capture_again_while_others_run_steps(
    monkeypatch: pytest.MonkeyPatch, rose_log: list[str], path: str
) -> None:
    runner = CapturedRunner(monkeypatch)
    runner.dp_size, requests = 2, Requests(runner)
    requests.add(3)
    runner.replace(path)
    wrap_reset_lora_state(lambda _: None)(runner)
    output = requests.step()
    for _ in range(2):
        assert runner.execute(runner, output) is None
    assert runner.events == ["vLLM's step"] * 2 and runner.model.compute_logits == runner.own_logits
    assert rose_log == [
        f"Rose step graph: steps of this rank are vLLM's from now on, because 1 tensors have moved: {path}"
    ]


@pytest.mark.parametrize("what", ["reloads", "wakes"])
def test_who_reloads_or_wakes_up_compares(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    runner = CapturedRunner(monkeypatch)
    addresses = runner.cudagraph_manager.rose_graph_addresses
    assert not addresses.may_differ
    if what == "reloads":
        wrap_reset_lora_state(lambda _: None)(runner)
    else:
        wrap_worker_method(lambda _, tags: None)(SimpleNamespace(model_runner=runner), tags=None)
    assert addresses.may_differ


def test_a_rank_on_which_a_reload_fails_compares_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CapturedRunner(monkeypatch)

    def fail(_: Any) -> None:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        wrap_worker_method(fail)(SimpleNamespace(model_runner=runner))
    assert runner.cudagraph_manager.rose_graph_addresses.may_differ


def test_all_ranks_capture_where_something_has_moved_on_one(
    monkeypatch: pytest.MonkeyPatch, rose_log: list[str]
) -> None:
    runner = CapturedRunner(monkeypatch)
    requests, runner.elsewhere = Requests(runner), StaleGraphs.ROSES
    requests.add(3)
    for _ in range(2):
        assert runner.run(requests.step()) == requests.expect()
    assert runner.events == [] and runner.num_comparisons == 0
    wrap_reset_lora_state(lambda _: None)(runner)
    for _ in range(2):
        assert runner.run(requests.step()) == requests.expect()
    assert runner.events == [("Rose's", "stream")] and any(
        "because 0 tensors of this rank" in line for line in rose_log
    )


def test_a_rank_alone_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_addresses, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    assert graph_addresses.largest_of_ranks(StaleGraphs.ROSES) is StaleGraphs.ROSES


def test_ranks_agree_on_the_most_that_one_of_them_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert group == "CPUs" and op == torch.distributed.ReduceOp.MAX
        tensor.clamp_(min=int(StaleGraphs.ALL))

    group = SimpleNamespace(world_size=2, cpu_group="CPUs")
    monkeypatch.setattr(graph_addresses, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    assert graph_addresses.largest_of_ranks(StaleGraphs.NONE) is StaleGraphs.ALL


def test_runners_without_steps_are_left_alone() -> None:
    runner = SimpleNamespace(cudagraph_manager=None)
    wrap_reset_lora_state(lambda _: None)(runner)
    wrap_worker_method(lambda _: None)(SimpleNamespace(model_runner=runner))
    assert runner_hooks._steps_of(runner) is None


def test_steps_are_not_given_up_before_their_tokens_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CapturedRunner(monkeypatch)
    requests = Requests(runner)
    requests.add(3)
    runner.execute(runner, requests.step())
    runner.replace("model.lm_head.weight")
    wrap_reset_lora_state(lambda _: None)(runner)
    with pytest.raises(IntegrityError, match="never asked"):
        runner.execute(runner, requests.step())


def test_tokens_that_nobody_asks_for_are_an_error(runner: Runner) -> None:
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    assert steps.launch(requests.step())
    with pytest.raises(IntegrityError, match="never asked"):
        steps.launch(requests.step())


def test_outputs_may_be_read_late(runner: Runner) -> None:
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    outputs, expected = [], []
    for _ in range(5):
        assert steps.launch(requests.step())
        outputs.append(steps.take_output(None))
        expected.append(requests.expect())
    assert [[t for (t,) in each.get_output().sampled_token_ids] for each in outputs] == expected


def test_tokens_that_a_later_step_has_overwritten_are_an_error(runner: Runner) -> None:
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    outputs = []
    for _ in range(NUM_BUFFERS + 1):
        assert steps.launch(requests.step())
        outputs.append(steps.take_output(None))
        requests.expect()
    assert len(outputs[1].get_output().sampled_token_ids) == 1
    with pytest.raises(IntegrityError, match="step 0 were asked for after 9 steps"):
        outputs[0].get_output()


class HookedRunner:
    """A model runner whose methods, vLLM's part of them, only note that they were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.calls: list[Any] = []
        self.cudagraph_manager = SimpleNamespace(_capture_descs={})
        self.vllm_config = SimpleNamespace(additional_config={"rose": options})
        self.streams: list[Any] = []
        self.speculative_config = None
        monkeypatch.setattr(
            runner_hooks, "StepGraphs", lambda _: SimpleNamespace(capture=self.streams.append)
        )
        monkeypatch.setattr(runner_hooks, "GraphAddresses", lambda runner: "addresses")
        monkeypatch.setattr(runner_hooks, "_room_for_logits", self.note_stream)

    @contextmanager
    def note_stream(self, _: Any, streams: list[Any]) -> Iterator[None]:
        yield
        streams.append("vLLM's stream")

    def method(self, name: str, result: Any) -> Any:
        def call(self: HookedRunner, *args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return result

        return call

    def capture(self, **options: Any) -> int:
        hooked = runner_hooks.wrap_capture_model(self.method("capture", 7))
        return int(hooked(self, **options))


@pytest.mark.parametrize(
    ("drafter", "is_adaptive", "kinds"),
    [
        (None, False, ["StepGraphs"]),
        (NgramGPUSpeculator, False, ["DraftSteps 3"]),
        (NgramGPUSpeculator, True, ["StepGraphs", "DraftSteps 1", "DraftSteps 3"]),
        (EagleSpeculator, False, ["HeadSteps 3"]),
        (EagleSpeculator, True, ["PlainHeadSteps", "HeadSteps 1", "HeadSteps 3"]),
        (EagleSpeculator, True, ["StoringHeadSteps", "HeadSteps 1", "HeadSteps 3"]),
        (MTPSpeculator, False, ["HeadSteps 3"]),
        (MTPSpeculator, True, ["PlainHeadSteps", "HeadSteps 1", "HeadSteps 3"]),
    ],
)
def test_which_kinds_of_steps_are_captured(
    monkeypatch: pytest.MonkeyPatch, drafter: type[Any] | None, is_adaptive: bool, kinds: list[str]
) -> None:
    is_roses = "StoringHeadSteps" in kinds
    made: list[str] = []
    captured: list[tuple[str, Any]] = []

    class Steps:
        def __init__(self, name: str, runner: Any, *num_drafts: int) -> None:
            self.name = " ".join([name, *map(str, num_drafts)])
            made.append(self.name)

        def capture(self, stream: Any) -> None:
            captured.append((self.name, stream))

    for name in ("StepGraphs", "DraftSteps", "HeadSteps", "PlainHeadSteps", "StoringHeadSteps"):
        monkeypatch.setattr(runner_hooks, name, functools.partial(Steps, name))
    monkeypatch.setattr(runner_hooks, "depths_of", lambda config: (0, 1, 3) if is_adaptive else (3,))
    monkeypatch.setattr(runner_hooks, "GraphAddresses", lambda runner: None)
    runner = SimpleNamespace(
        speculative_config=None if drafter is None else object(),
        speculator=None if drafter is None else object.__new__(drafter),
        vllm_config=None,
        cudagraph_manager=SimpleNamespace(),
    )
    if runner.speculator is not None:
        runner.speculator.model = object.__new__(RoseEagle3LlamaForCausalLM if is_roses else torch.nn.Module)
    runner_hooks._capture_steps(runner, "stream")  # type: ignore[arg-type]
    assert made == kinds
    # The largest logits first: those of steps with drafts.
    assert captured == [(kind, "stream") for kind in reversed(kinds)]


@pytest.mark.parametrize("reason", [None, "LoRA"])
@pytest.mark.parametrize("is_on", [True, False])
def test_graphs_are_captured_behind_vllms(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, is_on: bool
) -> None:
    monkeypatch.setattr(runner_hooks, "why_engine_is_not_replayed", lambda _: reason)
    hooked = HookedRunner(monkeypatch, step_graph=is_on)
    is_steady = is_on and reason is None
    assert hooked.capture(profile_only=True) == 7
    assert not hasattr(hooked.cudagraph_manager, "rose_step_graphs") and not hooked.streams
    assert hooked.capture() == 7
    # Graphs of one stream share memory.
    assert hooked.streams == (["vLLM's stream"] if is_steady else [])
    assert hasattr(hooked.cudagraph_manager, "rose_step_graphs") == is_steady
    assert [kwargs["profile_only"] for _, _, kwargs in hooked.calls] == [True, False]


def test_logits_are_allocated_on_vllms_stream_before_its_first_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class Graphs:
        def __init__(self, compute: Any) -> None:
            self._compute = compute

        def capture(self, sizes: list[int], pool: Any, stream: Any) -> None:
            events.append((pool, stream, *(self._compute(size, None).shape for size in sizes)))

    class Captures(Runner):
        model_config = SimpleNamespace(get_hidden_size=lambda: 1)
        vllm_config = SimpleNamespace(use_cumem_cudagraph_pool=False)
        dtype = torch.float64

    class Streams:
        pool = "vLLM's pool"
        _capture_descs: ClassVar = {CUDAGraphMode.FULL: [Desc(size) for size in (4 * MAX_REQS, MAX_REQS, 1)]}

        def _capture_stream(self, desc: Desc) -> str:
            return "vLLM's stream"

    monkeypatch.setattr(runner_hooks, "CapturedGraphs", {int: Graphs})
    monkeypatch.setattr(cudagraph_pool, "set_graph_pool_id", lambda _: None)
    captures, manager, streams = Captures(), Streams(), []
    captures.cudagraph_manager = manager
    with runner_hooks._room_for_logits(captures, streams):
        for desc in manager._capture_descs[CUDAGraphMode.FULL]:
            # The stream is asked for as an argument of the graph's capture.
            events.append((desc.num_tokens, manager._capture_stream(desc)))
    first, *graphs = events
    assert first == ("vLLM's pool", "vLLM's stream", (MAX_REQS, VOCAB_SIZE))
    assert graphs == [(size, "vLLM's stream") for size in (4 * MAX_REQS, MAX_REQS, 1)]
    assert streams == ["vLLM's stream"] and "_capture_stream" not in vars(manager)


@pytest.mark.parametrize("small", [(2, 4), (0, 1), (0, 0), (-4, -2)], ids=str)
@pytest.mark.parametrize("num_graphs", [0, 1, 9, 10, 11, 105])
def test_the_memory_of_graphs_is_estimated_from_graphs_of_all_sizes(
    monkeypatch: pytest.MonkeyPatch, num_graphs: int, small: tuple[int, int]
) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import _extrapolate_full_graph_memory

    mib, sizes = 1 << 20, list(range(num_graphs, 0, -1))
    monkeypatch.setattr(runner_hooks, "why_engine_is_not_replayed", lambda _: "LoRA")
    hooked = HookedRunner(monkeypatch)
    manager = hooked.cudagraph_manager
    manager._capture_descs, manager._capture_mem_samples = {CUDAGraphMode.FULL: sizes}, []
    manager._max_full_descs_to_capture = 2
    captured: list[int] = []

    def memory_of(size: int) -> int:
        return mib * {num_graphs: 90, num_graphs - 1: -20, num_graphs - 2: 20}.get(size, small[size % 2])

    def capture(self: HookedRunner, *, profile_only: bool) -> int:
        captured.extend(manager._capture_descs[CUDAGraphMode.FULL][: manager._max_full_descs_to_capture])
        manager._capture_mem_samples.extend(map(memory_of, captured))
        return sum(map(memory_of, captured))

    measured = runner_hooks.wrap_capture_model(capture)(hooked, profile_only=True)
    assert manager._capture_descs[CUDAGraphMode.FULL] == sizes
    samples = manager._capture_mem_samples
    if num_graphs <= runner_hooks.PROFILED_GRAPHS:
        assert captured == sizes[:2] and samples == [*map(memory_of, captured)]
        return
    assert len(set(captured)) == runner_hooks.PROFILED_GRAPHS and captured == sorted(captured, reverse=True)
    assert captured[:3] == sizes[:3] and captured[-1] == 1
    assert max(np.diff(captured[2:])) < 0 and np.ptp(np.diff(captured[2:])) <= 1 + (num_graphs > 20)
    # As vLLM computes it. No graph gives back what others need.
    estimate = measured - sum(samples) + _extrapolate_full_graph_memory(samples, num_graphs)
    exact = measured + sum(max(memory_of(size), 0) for size in set(sizes) - set(captured))
    assert exact - num_graphs * mib <= estimate <= exact + num_graphs * mib


def test_other_calls_of_a_step_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = HookedRunner(monkeypatch)
    launched, outputs = [], ["output"]
    steps = SimpleNamespace(
        launch=lambda output: launched.append(output) or output == "steady",
        take_output=lambda grammar: outputs.pop() if outputs else None,
        note_vllm_step=lambda: launched.append("noted"),
        votes=SimpleNamespace(handed_on=lambda: nullcontext(launched.append("handed on"))),
    )
    execute = runner_hooks.wrap_execute_model(hooked.method("execute", "vLLM's"))
    sample = runner_hooks.wrap_sample_tokens(hooked.method("sample", "vLLM's"))
    # Before graphs are captured, while vLLM profiles.
    assert execute(hooked, "steady") == sample(hooked, None) == "vLLM's"
    hooked.cudagraph_manager.rose_step_graphs = steps
    hooked.cudagraph_manager.rose_graph_addresses = SimpleNamespace(may_differ=False)
    assert execute(hooked, "steady", None) is None
    assert execute(hooked, "other") == "vLLM's"
    assert execute(hooked, "steady", object()) == "vLLM's"
    assert execute(hooked, "steady", dummy_run=True) == "vLLM's"
    # A dummy step has a vote of its own.
    assert launched == ["steady", "other", "handed on"]
    assert sample(hooked, None) == "output"
    assert sample(hooked, "grammar") == "vLLM's" and launched[-1] == "noted"


def test_vllms_own_decode_steps_multiply_as_many_rows(runner: Runner) -> None:
    StepGraphs(runner)
    steps = StepGraphs(runner)
    hidden = runner.cudagraph_manager.hidden_states
    batch = SimpleNamespace(num_tokens=3, num_reqs=3, has_prefill=False)
    state = runner.execute_model_state = SimpleNamespace(
        input_batch=batch, hidden_states=hidden[:4], dp_sync_state=None
    )
    steps.note_vllm_step()
    runner.products.clear()
    assert len(runner.model.compute_logits(hidden[:3])) == 3
    # Once: prompts' log-probabilities and other steps multiply what they have.
    assert len(runner.model.compute_logits(hidden[:3])) == 3
    assert runner.products == [4, 3]
    # Beside ranks that have more requests, or prompts.
    for uniform_token_count, product in ((1, 4), (None, 3)):
        state.hidden_states = hidden[:8]
        state.dp_sync_state = SimpleNamespace(uniform_token_count=uniform_token_count)
        steps.note_vllm_step()
        runner.products.clear()
        runner.model.compute_logits(hidden[:3])
        assert runner.products == [product]
    runner.products[:] = [4, 3]
    for other in (
        SimpleNamespace(num_tokens=5, num_reqs=3, has_prefill=True),
        SimpleNamespace(num_tokens=3, num_reqs=2, has_prefill=True),
    ):
        runner.execute_model_state = SimpleNamespace(
            input_batch=other, hidden_states=hidden[:4], dp_sync_state=None
        )
        steps.note_vllm_step()
        runner.model.compute_logits(hidden[:2])
    assert runner.products[2:] == [2, 2]


# Which engines have steady steps, by their KV cache groups.
SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16}
FULL = RoseAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=40)
STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")


class OtherBuilder(RoseAttentionMetadataBuilder):
    """Stands for another backend's."""


class OtherStateBuilder(GDNAttentionMetadataBuilder):
    """Stands for one that keeps more than its base class."""


def make_group(spec: Any, builder: type[Any] = RoseAttentionMetadataBuilder) -> AttentionGroup:
    group = AttentionGroup(RoseAttentionBackend, ["layer"], spec, 0)
    group.metadata_builders = [object.__new__(builder)]
    return group


def make_runner(*groups: list[AttentionGroup]) -> Any:
    """Return a runner with nothing that a steady step leaves out, but for what its KV cache groups are."""
    has_states = any(isinstance(group.kv_cache_spec, MambaSpec) for of_group in groups for group in of_group)
    state = object.__new__(MambaHybridModelState if has_states else DefaultModelState)
    sampler = object.__new__(Sampler)
    state.rope_state = state.prompt_embeds_state = state.mm_pruner = None
    state.supports_mm_inputs, state.num_new_sampled_tokens_per_step = False, 1
    sampler.logits_processors = [object()] * NUM_LOGITS_PROCESSORS
    sampler.trace_replay_state, sampler.return_sampling_mask, sampler.compute_nans = None, False, False
    off = ("use_aux_hidden_state_outputs", "use_pp", "use_dcp", "is_pooling_model")
    nothing = ("speculative_config", "lora_config", "pcp_manager", "ubatch_runner")
    nothing += ("aux_output_connector", "fast_prefill", "batch_sharder")
    return SimpleNamespace(
        **dict.fromkeys((*off, "check_ep_fault"), False),
        **dict.fromkeys(nothing),
        model_state=state,
        sampler=sampler,
        cudagraph_manager=SimpleNamespace(_capture_descs={CUDAGraphMode.FULL: [object()]}),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(enable_eplb=False, tensor_parallel_size=1, data_parallel_size=1),
            observability_config=SimpleNamespace(cudagraph_metrics=False),
            kv_transfer_config=None,
            scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER_CLASS),
            cache_config=SimpleNamespace(use_replayssm=False),
            lora_config=None,
            model_config=SimpleNamespace(is_moe=False, is_multimodal_model=False, is_hybrid=False),
        ),
        ec_connector=NO_OP_EC_CONNECTOR,
        model=SimpleNamespace(lm_head=object()),
        # Of a text model nobody asks whether it is audited.
        model_config=SimpleNamespace(
            architecture="NobodysForCausalLM",
            hf_text_config=SimpleNamespace(architectures=None, model_type=""),
        ),
        attn_groups=list(groups),
        block_tables=SimpleNamespace(num_kv_cache_groups=len(groups), redirect_writes_to_null_block=False),
    )


@pytest.mark.parametrize(
    "specs",
    [[[FULL]], [[FULL, FULL]], [[FULL], [WINDOW]], [[WINDOW], [FULL, FULL], *[[WINDOW]] * 5]],
    ids=["one group", "two shapes", "windows", "seven groups"],
)
def test_any_number_of_attention_groups_is_served(specs: list[list[Any]]) -> None:
    runner = make_runner(*([make_group(spec) for spec in of_group] for of_group in specs))
    assert why_engine_is_not_replayed(runner) is None


@pytest.mark.parametrize("builder", STATE_BUILDERS)
def test_states_beside_attention_are_served_with_roses_block_manager(builder: type[Any]) -> None:
    runner = make_runner([make_group(FULL)], [make_group(STATE, builder)], [make_group(STATE, builder)])
    assert why_engine_is_not_replayed(runner) is None
    runner.vllm_config.cache_config.use_replayssm = True
    assert why_engine_is_not_replayed(runner) == "--use-replayssm"
    runner.vllm_config.scheduler_config.scheduler_cls = None
    assert why_engine_is_not_replayed(runner) == "states without Rose's block manager"


def change(path: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets an attribute of block tables or of the second group."""

    def set_value(runner: Any) -> None:
        owner = runner.attn_groups[1][0] if path == "kernel_block_size" else runner.block_tables
        setattr(owner, path, value)

    return set_value


def add(*group: AttentionGroup) -> Callable[[Any], None]:
    def set_value(runner: Any) -> None:
        runner.attn_groups.append(list(group))
        runner.block_tables.num_kv_cache_groups += 1

    return set_value


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another kind of state": (add(make_group(STATE, OtherStateBuilder)), "another attention backend"),
    "another backend beside Rose": (
        add(make_group(FULL), make_group(FULL, OtherBuilder)),
        "another attention backend",
    ),
    "another backend": (add(make_group(WINDOW, OtherBuilder)), "another attention backend"),
    "no layers": (add(), "KV cache groups without attention"),
    "a table without layers": (change("num_kv_cache_groups", 3), "KV cache groups without attention"),
    "split blocks": (change("kernel_block_size", 8), "blocks split for a kernel"),
    "null block": (change("redirect_writes_to_null_block", True), "writes to the null block"),
}


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("model_config.is_moe", False, None),
        ("lora_config.specialize_active_lora", True, "--specialize-active-lora"),
        ("model_config.is_moe", True, "LoRA of experts"),
        ("model_config.is_multimodal_model", True, "LoRA of a multimodal model"),
        ("model_config.is_hybrid", True, "LoRA of a model with states"),
        ("parallel_config.tensor_parallel_size", 2, "LoRA with tensor parallelism"),
    ],
)
def test_engines_with_adapters_are_replayed(path: str, value: Any, reason: str | None) -> None:
    runner = make_runner([make_group(FULL)])
    config = runner.vllm_config
    config.lora_config = runner.lora_config = SimpleNamespace(specialize_active_lora=False)
    owner, name = path.split(".")
    setattr(getattr(config, owner), name, value)
    assert why_engine_is_not_replayed(runner) == reason


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("is_moe_model", True, None),
        ("all2all_backend", "nixl_ep", "--all2all-backend nixl_ep"),
        ("enable_elastic_ep", True, "elastic expert parallelism"),
    ],
)
def test_engines_of_data_parallel_ranks_are_replayed(name: str, value: Any, reason: str | None) -> None:
    runner = make_runner([make_group(FULL)])
    parallel_config = runner.vllm_config.parallel_config
    vars(parallel_config).update(
        data_parallel_size=2,
        is_moe_model=True,
        enable_elastic_ep=False,
        all2all_backend="allgather_reducescatter",
    )
    setattr(parallel_config, name, value)
    assert why_engine_is_not_replayed(runner) == reason


def set_drafts(runner: Any) -> None:
    runner.speculative_config = SimpleNamespace(rejection_sample_method="standard")
    runner.speculator = object.__new__(NgramGPUSpeculator)
    runner.rejection_sampler = object.__new__(RejectionSampler)
    runner.rejection_sampler.watermark_key = runner.adaptive_verification = None
    runner.decode_query_len, runner.dp_size = 8, 1


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("decode_query_len", 8, None),
        ("speculative_config.rejection_sample_method", "synthetic", None),
        ("speculative_config.rejection_sample_method", "fly", "another rejection sampler"),
        ("rejection_sampler.watermark_key", 5, "another rejection sampler"),
        ("rejection_sampler", object(), "another rejection sampler"),
        ("speculator", object(), OTHER_DRAFTER),
        # A subclass may do more between its passes.
        ("speculator", object.__new__(type("Other", (MTPSpeculator,), {})), OTHER_DRAFTER),
        ("speculator", object.__new__(MultiModuleMTPSpeculator), OTHER_DRAFTER),
        ("decode_query_len", 9, "more drafts than decode attention takes"),
        ("adaptive_verification", object(), "adaptive verification"),
        ("dp_size", 2, "drafts with data parallelism"),
        ("lora_config", object(), "drafts beside LoRA"),
        ("model_state.rope_state", object(), "drafts of a multimodal model"),
        ("model_state.supports_mm_inputs", True, "drafts of a multimodal model"),
    ],
)
def test_n_gram_drafts_are_served(path: str, value: Any, reason: str | None) -> None:
    runner = make_runner([make_group(FULL)])
    set_drafts(runner)
    *owners, name = path.split(".")
    setattr(functools.reduce(getattr, owners, runner), name, value)
    assert why_engine_is_not_replayed(runner) == reason


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_speculative_steps", 7, None),
        ("draft_logits", torch.zeros(1), "probabilistic drafts"),
        ("supports_decode_metadata_update", False, "a graph for each pass of a head"),
        ("share_mtp_topk_indices", True, "top-k indices that passes share"),
    ],
)
@pytest.mark.parametrize("speculator", [EagleSpeculator, MTPSpeculator])
def test_drafts_of_heads_are_served(speculator: type[Any], name: str, value: Any, reason: str | None) -> None:
    runner = make_runner([make_group(FULL)])
    set_drafts(runner)
    head = runner.speculator = object.__new__(speculator)
    head.num_speculative_steps, head.draft_logits, head.supports_decode_metadata_update = 3, None, True
    setattr(head, name, value)
    assert why_engine_is_not_replayed(runner) == reason
    # With one draft there are no later passes.
    head.num_speculative_steps = 1
    is_of_later_passes = name == "supports_decode_metadata_update"
    assert why_engine_is_not_replayed(runner) == (None if is_of_later_passes else reason)


def test_drafts_beside_states_are_vllms() -> None:
    runner = make_runner([make_group(FULL)], [make_group(STATE, GDNAttentionMetadataBuilder)])
    set_drafts(runner)
    assert why_engine_is_not_replayed(runner) == "drafts beside states"


@pytest.mark.parametrize("smallest", [1, 2, 8])
def test_vllms_kernels_write_no_rows_behind_an_end_that_is_captured(smallest: int) -> None:
    """They write each row that the mapping has, so it has none that the smallest end has not."""
    mapped: list[Any] = []

    def note(config: Any, counts: Any, *_: Any, num_active_loras: int) -> Any:
        assert config == "LoRA" and num_active_loras == 1
        mapped.extend(counts)
        return nullcontext()

    runner = SimpleNamespace(lora_config="LoRA", maybe_dummy_run_with_lora=note)
    with StepAdapters(runner).in_one_row():
        assert mapped and sum(mapped) <= smallest


@pytest.mark.parametrize("case", CHANGES)
def test_other_groups_are_vllms_and_the_reason_is_told(case: str) -> None:
    make_change, reason = CHANGES[case]
    runner = make_runner([make_group(FULL)], [make_group(WINDOW)])
    make_change(runner)
    assert why_engine_is_not_replayed(runner) == reason


@pytest.mark.usefixtures("make_config")
@pytest.mark.parametrize("needs", ["embeddings", "M-RoPE", "a language model's head"])
@pytest.mark.parametrize(
    ("architecture", "is_replayed"),
    [
        ("Qwen2_5_VLForConditionalGeneration", True),
        ("Qwen3VLForConditionalGeneration", True),
        ("Qwen3VLMoeForConditionalGeneration", True),
        ("PaddleOCRVLForConditionalGeneration", True),
        ("Ernie4_5_VLMoeForConditionalGeneration", False),
        ("Granite4VisionForConditionalGeneration", False),
        ("Mistral3ForConditionalGeneration", False),
    ],
)
def test_multimodal_engines_are_replayed_if_their_class_is_audited(
    architecture: str, is_replayed: bool, needs: str
) -> None:
    runner = make_runner([make_group(FULL)])
    runner.model_config.architecture, state = architecture, runner.model_state
    if needs == "embeddings":
        state.supports_mm_inputs = True
    elif needs == "M-RoPE":
        state.rope_state = object()
    else:
        runner.model = SimpleNamespace(language_model=SimpleNamespace(lm_head=object()))
    # Mistral's language model has an architecture that nobody knows.
    unaudited = "" if architecture.startswith("Mistral") else architecture
    reason = None if is_replayed else f"{unaudited} is not among the audited models"
    assert why_engine_is_not_replayed(runner) == reason
    state.mm_pruner = object()
    assert why_engine_is_not_replayed(runner) == (reason or "pruning of videos")


QUERIES = {"lmcache.mp.transfer_intermediate_tensors": True}


@pytest.mark.parametrize(
    ("options", "is_replayed"),
    [
        *((connector(name), True) for name in CONNECTORS_OUTSIDE_OF_LAYERS),
        (connector("ExampleConnector"), False),
        (connector("LMCacheMPConnector", QUERIES), False),
        (connector("OffloadingConnector", kv_connector_module_path="my_module"), False),
    ],
    ids=str,
)
def test_engines_with_a_connector_outside_of_layers_are_replayed(
    options: dict[str, Any], is_replayed: bool
) -> None:
    runner = make_runner([make_group(FULL)])
    runner.vllm_config.kv_transfer_config = options["kv_transfer_config"]
    reason = None if is_replayed else "a KV connector that works layer by layer"
    assert why_engine_is_not_replayed(runner) == reason


def test_an_engine_without_full_graphs_or_groups_is_vllms() -> None:
    runner = make_runner([make_group(FULL)])
    others: list[Any] = [{}, {CUDAGraphMode.FULL: []}, {CUDAGraphMode.PIECEWISE: [object()]}]
    for manager in (None, *(SimpleNamespace(_capture_descs=descs) for descs in others)):
        runner.cudagraph_manager = manager
        assert why_engine_is_not_replayed(runner) == "no full graphs of decodes"
    assert why_engine_is_not_replayed(make_runner()) == "KV cache groups without attention"


# Both ends of a steady step against what vLLM's own kernels leave, interpreted, on random states.
@pytest.mark.parametrize("block_sizes", BLOCK_SIZES.values(), ids=BLOCK_SIZES)
@pytest.mark.parametrize(("num_requests", "num_rows"), [(1, 1), (3, 4), (5, 8), (8, 8)])
def test_a_step_leaves_what_vllms_leaves(
    num_requests: int, num_rows: int, block_sizes: tuple[int, ...]
) -> None:
    case = make_case(num_requests, num_rows, block_sizes=block_sizes)
    theirs = case.copy()
    case.begin()
    run_interpreted(begin_as_vllm, theirs, num_requests)
    rows, requests = slice(num_rows), slice(num_requests)
    for name, part in (
        ("input_ids", requests),
        ("positions", requests),
        ("seq_lens", rows),
        ("query_start_loc", slice(num_rows + 1)),
    ):
        ours, wanted = getattr(case.inputs, name)[part], getattr(theirs.inputs, name)[part]
        assert torch.equal(ours, wanted), name
    for ours_of, theirs_of in zip(case.groups.groups, theirs.groups.groups, strict=True):
        for name in ("block_table", "slot_mapping"):
            assert torch.equal(getattr(ours_of, name)[rows], getattr(theirs_of, name)[rows]), name
        # What attention is told of a request: computed tokens, and none in rows of padding.
        assert torch.equal(ours_of.num_computed_tokens[rows], theirs.inputs.seq_lens[rows] - 1)
    end_step(case.slots, case.tokens, case.state)
    run_interpreted(end_as_vllm, theirs, num_requests)
    for each in fields(case.state):
        ours, wanted = getattr(case.state, each.name), getattr(theirs.state, each.name)
        assert ours is wanted is None or torch.equal(ours, wanted), each.name


@pytest.mark.parametrize("num_dims", [3, 4])
@pytest.mark.parametrize(("num_requests", "num_rows"), [(1, 1), (3, 4), (8, 8)])
def test_positions_in_all_dimensions_are_vllms(num_requests: int, num_rows: int, num_dims: int) -> None:
    case = make_case(num_requests, num_rows)
    theirs = rope_state(num_dims)
    generator = np.random.default_rng(num_rows)
    theirs.prefill_delta.np[:] = generator.integers(-50, 50, NUM_SLOTS)
    theirs.apply_staged_writes()
    ours = SimpleNamespace(
        num_dims=num_dims, prefill_delta=theirs.prefill_delta, positions=theirs.positions.clone()
    )
    state = SimpleNamespace(rope_state=ours, supports_mm_inputs=False)
    runner = Runner()
    runner.model_state, runner.model_config = state, SimpleNamespace(architecture="Nobodys")
    inputs = ModelInputs(runner, num_rows)
    inputs.take_over(case.slots[:num_requests].numpy(), num_rows)
    # vLLM's go on to the other buffer, with new requests.
    before = theirs.prefill_delta.gpu
    theirs.prefill_delta.copy_to_uva()
    before.fill_(99)
    case.begin()
    inputs.write(case.inputs, num_rows)
    run_interpreted(positions_as_vllm, theirs, case, num_requests)
    assert torch.equal(ours.positions[:, :num_requests], theirs.positions[:, :num_requests])
    assert (ours.positions[:, num_requests:] == 0).all()


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES.values(), ids=BLOCK_SIZES)
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("counts", [[1, 1, 1], [30], [1, 1, 1, 2, 9, 130], [4, 4, 4, 4, 4], [4, 3, 2, 4, 20]])
def test_a_step_with_prompts_leaves_what_vllms_leaves(
    counts: list[int], num_drafts: int, block_sizes: tuple[int, ...]
) -> None:
    """Or with drafts behind last tokens: where all rows have all of them, such a step is replayed."""
    num_requests, num_rows, num_tokens = len(counts), len(counts) + 2, sum(counts) + 5
    case = make_mixed_case(counts, num_rows, num_tokens, block_sizes=block_sizes, num_drafts=num_drafts)
    theirs = case.copy()
    case.begin()
    run_interpreted(begin_as_vllm, theirs, num_requests)
    rows, tokens = slice(num_rows), slice(sum(counts))
    for name, part in (
        ("input_ids", tokens),
        ("positions", tokens),
        ("seq_lens", rows),
        ("query_start_loc", slice(num_rows + 1)),
    ):
        assert torch.equal(getattr(case.inputs, name)[part], getattr(theirs.inputs, name)[part]), name
    for ours_of, theirs_of in zip(case.groups.groups, theirs.groups.groups, strict=True):
        assert torch.equal(ours_of.block_table[rows], theirs_of.block_table[rows])
        assert torch.equal(ours_of.slot_mapping[:num_tokens], theirs_of.slot_mapping[:num_tokens])
    if num_drafts and {*counts} == {num_drafts + 1}:
        new_tokens, num_sampled = make_sampled(case, num_drafts)
        end_step(case.slots, new_tokens, case.state, num_sampled=num_sampled)
        run_interpreted(end_drafts_as_vllm, theirs, num_requests, new_tokens, num_sampled)
    else:
        end_step(case.slots, case.tokens, case.state, case.rows)
        run_interpreted(end_as_vllm, theirs, num_requests)
    for each in fields(case.state):
        ours, wanted = getattr(case.state, each.name), getattr(theirs.state, each.name)
        assert ours is wanted is None or torch.equal(ours, wanted), each.name


# What vLLM's metadata builders leave where graphs of decodes read it: the backend, and what graphs hold of metadata.
STATES: dict[str, tuple[Callable[[Path], Path], type[Any], set[str]]] = {
    "gated delta nets": (
        write_random_qwen3_next,
        GDNAttentionBackend,
        {"non_spec_state_indices_tensor", "non_spec_query_start_loc"},
    ),
    "Mamba 2": (write_random_granite_hybrid, Mamba2AttentionBackend, {"state_indices_tensor_d", "seq_lens"}),
    "convolutions": (
        write_random_lfm2,
        ShortConvAttentionBackend,
        {"state_indices_tensor_d", "seq_lens"},
    ),
}


class StateSteps:
    """Two KV cache groups of layers with a state, their metadata by vLLM's builders, and a random decode step."""

    def __init__(self, config: Any, backend: type[Any], num_requests: int, num_rows: int) -> None:
        self.case = make_case(num_requests, num_rows, num_states=2)
        self.num_rows = num_rows
        first, second, _ = self.case.groups.groups
        block_size = first.block_size
        spec = replace(STATE, block_size=block_size)
        groups = [AttentionGroup(backend, [f"layer {index}"], spec, index) for index in range(2)]
        for group in groups:
            group.create_metadata_builders(config, torch.device("cpu"))
        self.attn_groups = [[group] for group in groups]
        self.tables = [first.state_table, second.state_table]
        self.input_buffers = self.case.inputs
        self.max_num_reqs = NUM_SLOTS
        self.block_tables = SimpleNamespace(
            block_tables=[SimpleNamespace(gpu=table) for table in self.tables], block_sizes=[block_size] * 2
        )
        self.model_state = SimpleNamespace(
            rope_state=None,
            supports_mm_inputs=False,
            _mamba_state_idx_gpu=torch.full((NUM_SLOTS,), -1, dtype=torch.int32),
        )
        self.model, self.device = None, torch.device("cpu")

    def build(self, *, for_capture: bool) -> dict[str, Any]:
        """Return vLLM's metadata of the step by layer; of no requests while graphs are captured."""
        rows, slots = self.num_rows, self.case.slots
        is_real = (slots >= 0) & (not for_capture)
        inputs = self.case.inputs
        inputs.seq_lens[:rows] = 1
        starts = torch.arange(rows + 1, dtype=torch.int32)
        if not for_capture:
            computed = self.case.state.num_computed_tokens[slots.clamp(min=0)]
            inputs.seq_lens[:rows] = torch.where(is_real, computed + 1, 0)
            starts.clamp_(max=int(is_real.sum()))
        inputs.query_start_loc[: rows + 1] = starts
        seq_lens = inputs.seq_lens[:rows]
        tables = [torch.where(is_real[:, None], table[slots.clamp(min=0)], 0) for table in self.tables]
        for (group,), table in zip(self.attn_groups, tables, strict=True):
            builder = group.get_metadata_builder()
            if type(builder) is GDNAttentionMetadataBuilder:
                # As on a GPU.
                builder.supports_update_block_table = True
                builder.mamba_aligned_state_indices = mamba_get_block_table_tensor(
                    table, seq_lens, group.kv_cache_spec, "align"
                )
        return build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=rows,
            num_tokens=rows,
            query_start_loc_gpu=inputs.query_start_loc[: rows + 1],
            query_start_loc_cpu=starts,
            max_query_len=1,
            seq_lens=inputs.seq_lens,
            max_seq_len=100,
            block_tables=tables,
            slot_mappings=torch.zeros(2, rows),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None, None]),
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            model_specific_attn_metadata=MambaHybridAttnMetadata(torch.zeros(rows, dtype=torch.bool)),
            for_cudagraph_capture=for_capture,
        )

    def begin(self) -> None:
        """Run a step's prologue."""
        steps: Any = object.__new__(StepGraphs)
        steps._runner, steps._slots, steps._state = self, self.case.slots, self.case.state
        steps._inputs, steps._groups = self.case.inputs, groups_of(self)
        steps._model_inputs = ModelInputs(self, self.num_rows)
        steps._copies = copies_of(self)
        steps._begin(self.num_rows, None)


@pytest.mark.parametrize(("num_requests", "num_rows"), [(1, 1), (3, 4), (5, 8), (8, 8)])
@pytest.mark.parametrize("kind", STATES)
def test_layers_read_of_states_what_vllms_builders_write(
    make_config: Callable[..., Any], tmp_path: Path, kind: str, num_requests: int, num_rows: int
) -> None:
    write, backend, held_names = STATES[kind]
    config = make_config(model=str(write(tmp_path)), max_num_seqs=16)
    assert config.cache_config.mamba_cache_mode == "align"
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.compilation_config.max_cudagraph_capture_size = 8
    steps = StateSteps(config, backend, num_requests, num_rows)
    captured = steps.build(for_capture=True)
    theirs = steps.build(for_capture=False)
    held = {
        (layer, each.name): getattr(metadata, each.name)
        for layer, metadata in captured.items()
        for each in fields(metadata)
    }
    tensors = {key: value for key, value in held.items() if isinstance(value, torch.Tensor) and value.numel()}
    assert {name for _, name in tensors} == held_names
    wanted = {key: getattr(theirs[key[0]], key[1]).clone() for key in tensors}
    for (layer, name), value in held.items():
        # What a graph has in place of tensors is what vLLM would give each of its steps.
        if not isinstance(value, torch.Tensor):
            assert getattr(theirs[layer], name) == value, name
    for tensor in tensors.values():
        tensor.fill_(POISON)
    # As vLLM's capture left it.
    for (_, name), tensor in tensors.items():
        if name == "non_spec_query_start_loc":
            tensor[0] = 0
    steps.begin()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, wanted[key]), key
    padding = slice(num_requests, num_rows)
    for name in ("non_spec_state_indices_tensor", "state_indices_tensor_d"):
        assert all(not tensor[padding].any() for key, tensor in tensors.items() if key[1] == name)
    run_interpreted(check_no_state_moves, steps)


def check_no_state_moves(steps: StateSteps) -> None:
    """Let vLLM look where it would copy states to for the same step, and find it in the column where it is."""
    import triton
    from vllm.v1.worker import mamba_utils

    mamba_utils.tl = triton.language  # type: ignore[assignment]
    function: Any = mamba_utils.preprocess_mamba_align_fused_kernel
    kernel = triton.jit(getattr(function, "fn", function))
    slots = steps.case.slots[steps.case.slots >= 0].clone()
    columns = steps.model_state._mamba_state_idx_gpu.clone()
    others = torch.full((3, NUM_SLOTS), -7, dtype=torch.int32)
    kernel[(1,)](
        slots,
        columns,
        steps.case.state.num_computed_tokens,
        steps.case.inputs.query_start_loc,
        *others,
        len(slots),
        BLOCK_SIZE=256,
        MAMBA_BLOCK_SIZE=steps.block_tables.block_sizes[0],
    )
    assert torch.equal(columns, steps.model_state._mamba_state_idx_gpu)
    # From where, and by how many tokens; no count of drafts was reset.
    assert torch.equal(others[1][slots], columns[slots]) and (columns[slots] >= 0).all()
    assert (others[0] == -7).all()
