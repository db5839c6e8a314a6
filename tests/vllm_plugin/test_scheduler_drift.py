"""What batched scheduling builds, takes apart and counts on is in this vLLM as it was read. Needs no GPU and no engine.

Run it against any installed vLLM, as test_interface_drift.py; test_batched_scheduling.py compares what the two do.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched import async_scheduler, utils
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rose_backend.vllm_plugin.scheduler.decode_batch import DecodeRequestData
from rose_backend.vllm_plugin.scheduler.scheduler import BatchedScheduling
from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.simulation import make_simulation

# Of the objects that a batched step builds or takes apart: every field that was looked at. A new one may say something
# that the batched step has to say, too.
STEP_FIELDS: dict[Any, set[str]] = {
    SchedulerOutput: {
        *(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
        ),
        *(
            "scheduled_spec_decode_tokens",
            "scheduled_encoder_inputs",
            "finished_req_ids",
            "preempted_req_ids",
        ),
        *("free_encoder_mm_hashes", "scheduled_encoder_input_stats", "has_structured_output_requests"),
        *("pending_structured_output_tokens", "num_invalid_spec_tokens", "kv_connector_metadata"),
        *(
            "has_sync_kv_loads",
            "aux_output_connector_metadata",
            "ec_connector_metadata",
            "ec_manager_metadata",
        ),
        *("new_block_ids_to_zero", "kv_cache_block_copies", "kv_connector_block_state"),
        *("num_spec_tokens_to_schedule", "num_common_prefix_blocks"),
        # From 0.33 on.
        *("skip_drafts", "encoder_input_updates"),
    },
    CachedRequestData: {
        *("req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids"),
        *("num_computed_tokens", "num_output_tokens"),
    },
    EngineCoreOutput: {
        *("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output"),
        *("finish_reason", "stop_reason", "events", "kv_transfer_params", "ec_transfer_params"),
        *("trace_headers", "prefill_stats", "routed_experts", "num_nans_in_logits", "mm_cache_miss_hashes"),
        *("new_sampling_mask", "spec_decode_metrics", "prompt_token_id_logprobs"),
        # From 0.33 on.
        "error",
    },
    EngineCoreOutputs: {
        *("engine_index", "outputs", "scheduler_stats", "timestamp", "utility_output", "finished_requests"),
        *("wave_complete", "start_wave", "weight_version"),
    },
    ModelRunnerOutput: {
        *("req_ids", "req_id_to_index", "sampled_token_ids", "logprobs", "prompt_logprobs_dict"),
        *("prompt_token_id_logprobs_dict", "pooler_output", "kv_connector_output", "ec_connector_output"),
        *("num_nans_in_logits", "cudagraph_stats", "aux_output_connector_output", "sampling_masks"),
    },
}

# What the batched path reads or sets on vLLM's own objects.
SCHEDULER_MEMBERS = {
    *("running", "waiting", "kv_holding_waiting", "deferred_waiting", "requests", "finished_req_ids"),
    *("reset_preempted_req_ids", "prev_step_scheduled_req_ids", "num_waiting_for_streaming_input"),
    *("max_num_active_reqs", "max_num_scheduled_tokens", "max_model_len", "current_step", "_pause_state"),
    *("prefill_capacity_bound", "use_v2_model_runner", "encoder_cache_manager"),
    *("sched_step_seq", "enable_kv_cache_events", "get_request_counts", "_free_cow_retained_blocks"),
    *("_handle_blocked_waiting_request", "_preempt_request", "finish_requests", "make_stats"),
    *("finished_req_ids_dict", "grammar_compile_error_reqs", "encoder_cache_mismatch_reqs"),
}
# Outside its loop over requests, ``update_from_output`` reads these of the scheduler: what a steady step reports itself
# is what is left of it without connectors, errors and stopped requests.
END_OF_STEP_MEMBERS = {
    *("make_stats", "kv_cache_manager", "kv_event_publisher", "finished_req_ids_dict", "perf_metrics"),
    *("grammar_compile_error_reqs", "encoder_cache_mismatch_reqs", "finish_requests"),
    # Only with a connector.
    *("connector", "ec_connector", "recompute_kv_load_failures", "_handle_failed_recving"),
    *("_handle_invalid_blocks", "_update_from_kv_xfer_finished", "defer_block_free", "processed_step_seq"),
    *("_drain_deferred_frees", "_drain_deferred_loads"),
    # Only for stopped requests.
    *("running", "waiting", "kv_holding_waiting", "deferred_waiting", "_enqueue_waiting_request"),
}
# What may end the usual course of a running request, and the functions that change it.
COURSE_OF_A_REQUEST = {"status", "events", "prefill_stats", "num_stale_output_tokens"}
CHANGES_OF_COURSE = {
    *("finish_requests", "_preempt_request"),  # They count as interventions.
    *("update_from_output", "check_stop", "_handle_stopped_request"),  # Of requests that are left to vLLM.
    *("schedule", "_handle_blocked_waiting_request", "add_request"),  # Of requests that are not running.
    "_update_request_as_session",  # Sessions are always left to vLLM.
}
REQUEST_MEMBERS = {
    *("num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens", "num_stale_output_tokens"),
    *(
        "num_prompt_tokens",
        "num_tokens_with_spec",
        "max_tokens",
        "is_prefill_chunk",
        "prefill_stats",
        "events",
    ),
    *("status", "structured_output_request", "resumable", "trace_headers", "client_index", "_block_hasher"),
    *("_all_token_ids", "_output_token_ids", "update_block_hashes", "sampling_params"),
    *("mm_features", "has_encoder_inputs"),
}
SAMPLING_MEMBERS = {
    *("eos_token_id", "stop_token_ids", "logprobs", "logprob_token_ids", "repetition_detection"),
}


@pytest.mark.parametrize("owner", STEP_FIELDS, ids=lambda owner: owner.__name__)
def test_steps_and_outputs_have_no_new_fields(owner: Any) -> None:
    fields = getattr(owner, "__struct_fields__", None) or tuple(owner.__dataclass_fields__)
    assert not set(fields) - STEP_FIELDS[owner], f"new fields of {owner.__name__}"
    if owner is EngineCoreOutput:
        # Built by position, thousands of times a second.
        assert fields[:2] == ("request_id", "new_token_ids")


@pytest.mark.parametrize("name", ["schedule", "update_from_output", "add_request"])
def test_the_scheduler_is_called_as_the_batched_one_takes_it(name: str) -> None:
    for theirs in (Scheduler, AsyncScheduler):
        ours, wanted = (
            inspect.signature(getattr(owner, name)).parameters for owner in (BatchedScheduling, theirs)
        )
        assert list(ours) == list(wanted)
        assert [p.default for p in ours.values()] == [p.default for p in wanted.values()]


def test_scheduler_and_requests_have_what_the_batched_path_uses(make_config: MakeConfig) -> None:
    scheduler = make_simulation(make_config, num_blocks=20, block_size=16, max_num_seqs=2).scheduler
    missing = SCHEDULER_MEMBERS - set(dir(scheduler))
    assert not missing, f"vLLM's Scheduler has lost {sorted(missing)}"
    for name in ("get_freed_mm_hashes", "get_manager_metadata", "get_cached_input_ids"):
        assert callable(getattr(scheduler.encoder_cache_manager, name))
    params = SamplingParams(max_tokens=1)
    request = Request("a", [1, 2, 3], params, None)
    missing = REQUEST_MEMBERS - set(dir(request)) | SAMPLING_MEMBERS - set(dir(params))
    assert not missing, f"vLLM's Request and SamplingParams have lost {sorted(missing)}"
    # The facts of a request hold these two lists: they must stay the same objects.
    lists = request._all_token_ids, request._output_token_ids
    request.append_output_token_ids(4)
    assert (request._all_token_ids, request._output_token_ids) == ([1, 2, 3, 4], [4])
    assert lists[0] is request._all_token_ids and lists[1] is request._output_token_ids
    assert RequestStatus.is_finished(RequestStatus.FINISHED_ABORTED)
    assert not RequestStatus.is_finished(RequestStatus.RUNNING)


def test_the_end_of_a_step_uses_nothing_new() -> None:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(Scheduler.update_from_output))).body
    assert isinstance(function, ast.FunctionDef)
    statements = [each for each in function.body if not _is_loop_over_requests(each)]
    assert len(statements) == len(function.body) - 1, "the loop over requests is written otherwise"
    used = {
        node.attr
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert not used - END_OF_STEP_MEMBERS, f"Scheduler.update_from_output uses {used - END_OF_STEP_MEMBERS}"


def _is_loop_over_requests(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.For) and ast.unparse(statement.iter) == "num_scheduled_tokens.items()"


@pytest.mark.parametrize("module", [scheduler_module, async_scheduler, utils])
def test_nothing_new_changes_the_course_of_a_request(module: Any) -> None:
    functions = [
        node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.FunctionDef)
    ]
    changing = {function.name for function in functions if any(_changes_of_course(function))}
    assert not changing - CHANGES_OF_COURSE, f"{module.__name__} changes requests in {changing}"
    assert module is not scheduler_module or changing >= {"finish_requests", "_preempt_request"}


def _changes_of_course(function: ast.FunctionDef) -> Iterator[ast.AST]:
    for node in ast.walk(function):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and node.attr in COURSE_OF_A_REQUEST:
            yield node
        if isinstance(node, ast.Attribute) and node.attr == "record_event":
            yield node


def test_data_of_decodes_is_vllms_own() -> None:
    numbers = np.array([[0, 1], [32, 32], [20, 9], [17, 4], [99, 99]])
    lazy = DecodeRequestData.of(["a", "b"], [None, ([3],)], numbers, 2)
    other = pickle.loads(pickle.dumps(lazy))
    wanted = CachedRequestData(["a", "b"], set(), [], {}, [None, ([3],)], [22, 11], [6, 8])
    assert type(other) is CachedRequestData
    assert other == wanted
    assert repr(lazy).replace("DecodeRequestData", "CachedRequestData") == repr(wanted)
    assert lazy.num_reqs == 2 and not lazy.is_context_phase("a")
    assert lazy.num_computed_tokens is lazy.num_computed_tokens
