"""vLLM's logits processors, log-probabilities and grammar masks (model runner V2) in a form that CUDA graphs can hold.

In each step vLLM looks at its requests to see which kernels they need, and hands them parameters in tensors that move.
Here parameters are copied to fixed addresses when there are new requests, and every kernel runs for all rows: each
returns early for a row that does not need it, so one graph serves any mix of requests. The state that processors keep
of tokens (counts, masks of prompts, scan positions) is vLLM's own, at addresses that stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.errors import IntegrityError
from rose_backend.kernels.arguments import LogprobReport
from rose_backend.kernels.captured_graphs import FixedInputs
from rose_backend.kernels.sampling.ops import mask_logits, report_logprobs

MAX_LOGPROBS = 20
"""Most likely tokens that graphs report; vLLM's default of ``--max-logprobs``."""

_DRAWS = ("temperature", "min_p", "top_k", "top_p", "seeds")
SAMPLING_PARAMETERS = (*_DRAWS, "num_logprobs")
"""What a draw and a report need."""
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_BIASES = (
    "num_allowed_token_ids",
    "num_logit_bias",
    "min_lens",
    "num_stop_token_ids",
    "restore_when_all_masked",
)
_NEUTRAL = {"repetition_penalty": 1, "thinking_token_budget": -1, "num_logprobs": -1}
"""Values of rows without a request that are not 0. Their temperature of 0 makes them greedy."""


def sampling_arrays(states: Any) -> dict[str, NDArray[Any]]:
    """Return vLLM's arrays, by request slot, of ``SAMPLING_PARAMETERS``.

    Args:
        states: vLLM's ``SamplingStates``.
    """
    # Numbers of log-probabilities have no tensor in vLLM.
    return {name: getattr(states, name).np for name in _DRAWS} | {"num_logprobs": states.num_logprobs}


def processor_arrays(sampler: Any) -> dict[str, NDArray[Any]]:
    """Return vLLM's arrays, by request slot, of what its logits processors need.

    Args:
        sampler: vLLM's ``Sampler``, with no processors but its own.
    """
    bias, penalties, bad_words = sampler.logits_processors
    arrays = {name: getattr(penalties, name).np for name in _PENALTIES}
    arrays |= {name: getattr(bias, name).np for name in _BIASES}
    arrays["num_bad_words"] = bad_words.num_bad_words.np
    arrays["prompt_len"] = sampler.req_states.prompt_len.np
    if sampler.thinking_budget_state.enabled:
        arrays["thinking_token_budget"] = sampler.thinking_budget_state.thinking_token_budget.np
    return arrays


class RequestParameters:
    """Numbers of each request at fixed addresses, with a last slot that belongs to no request.

    Args:
        arrays: vLLM's, by name, one number for each request slot. They are read again by each ``take``.

    Attributes:
        padding_slot: the last one.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], device: torch.device) -> None:
        self._arrays = arrays
        self.padding_slot = len(next(iter(arrays.values())))
        self._inputs = FixedInputs(
            {name: (array.dtype.type, (self.padding_slot + 1,)) for name, array in arrays.items()}, device
        )
        self.take()

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the numbers of all request slots, and of the padding slot."""
        return self._inputs.tensors[name]

    def take(self) -> None:
        """Copy what vLLM has of its requests. To be called in every step in which that has changed."""
        on_cpu, record = self._inputs.begin()
        for name, array in self._arrays.items():
            record[name][: self.padding_slot] = array
            record[name][self.padding_slot] = _NEUTRAL.get(name, 0)
        self._inputs.send(on_cpu)


class CapturedProcessors:
    """vLLM's bias, allowed tokens, ``min_tokens``, penalties, bad words and thinking budgets, in its order.

    Args:
        sampler: vLLM's ``Sampler``.
        parameters: of ``processor_arrays``.
        max_num_rows: of a step.
    """

    def __init__(self, sampler: Any, parameters: RequestParameters, max_num_rows: int) -> None:
        self._bias, self._penalties, self._bad_words = sampler.logits_processors
        self._thinking = sampler.thinking_budget_state
        self._parameters = parameters
        device = sampler.req_states.device
        # A row is its request's first and only position: there are no drafts before it.
        self._positions_of_drafts = torch.zeros(max_num_rows, dtype=torch.int32, device=device)

    def apply(
        self,
        logits: torch.Tensor,  # [R, V] float32  written
        slots: torch.Tensor,  # [R] int32, row -> request slot; the padding slot without a request
        positions: torch.Tensor,  # [R] int64
        input_ids: torch.Tensor,  # [R] int32
    ) -> None:
        """Change the logits as vLLM's processors would those of these requests."""
        from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words
        from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias
        from vllm.v1.worker.gpu.sample.penalties import apply_penalties

        of, bias, penalties, bad_words = self._parameters, self._bias, self._penalties, self._bad_words
        drafts, states = self._positions_of_drafts[: len(logits)], bad_words.req_states
        apply_logit_bias(
            logits,
            slots,
            positions,
            of["num_allowed_token_ids"],
            bias.allowed_token_ids.gpu,
            of["num_logit_bias"],
            bias.logit_bias_token_ids.gpu,
            bias.logit_bias.gpu,
            of["min_lens"],
            of["num_stop_token_ids"],
            of["restore_when_all_masked"],
            bias.stop_token_ids.gpu,
            True,
        )
        apply_penalties(
            logits,
            slots,
            input_ids,
            drafts,
            *(of[name] for name in _PENALTIES),
            penalties.prompt_bin_mask,
            penalties.output_bin_counts,
        )
        offsets = bad_words.bad_word_offsets.gpu
        apply_bad_words(
            logits,
            slots,
            bad_words.bad_word_token_ids.gpu,
            offsets,
            of["num_bad_words"],
            states.all_token_ids.gpu,
            of["prompt_len"],
            states.total_len.gpu,
            input_ids,
            drafts,
            offsets.shape[1] - 1,
        )
        if self._thinking.enabled:
            self._force_end_of_thinking(logits, slots, input_ids, drafts)

    def _force_end_of_thinking(
        self, logits: torch.Tensor, slots: torch.Tensor, input_ids: torch.Tensor, drafts: torch.Tensor
    ) -> None:
        from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

        thinking = self._thinking
        apply_thinking_budget(
            logits,
            slots,
            slots,
            self._parameters["thinking_token_budget"],
            thinking.req_states.all_token_ids.gpu,
            thinking.req_states.total_len.gpu,
            input_ids,
            drafts,
            thinking.cached_last_start,
            thinking.cached_last_end,
            thinking.cached_scan_pos,
            thinking.reasoning_start_token_ids,
            thinking.natural_reasoning_end_token_ids,
            thinking.reasoning_end_token_ids,
        )


class GrammarMasks:
    """Masks of allowed tokens, a row of bits for each request with a grammar, that a step's logits get.

    Args:
        max_num_rows: of a step.
        vocab_size: of the model.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        num_words = -(-vocab_size // 32)
        self._bitmask = torch.zeros(max_num_rows, num_words, dtype=torch.int32, device=device)
        self._mask_rows = torch.full((max_num_rows,), -1, dtype=torch.int32, device=device)
        self._num_used = 0

    def upload(self, grammar_output: Any, index_of: Mapping[str, int]) -> None:
        """Copy the masks of one step, which the next ``apply`` reads.

        Args:
            grammar_output: vLLM's; None if no request has a mask.
            index_of: request id to row of the step.

        Raises:
            IntegrityError: a mask is for a request that is not in the step.
        """
        masks = [] if grammar_output is None else grammar_output.structured_output_request_ids
        if not (masks or self._num_used):
            return
        is_pinned = self._bitmask.is_cuda
        # torch keeps pinned memory until the copy has run. vLLM fills the next masks into the memory of these.
        mask_rows = torch.full(self._mask_rows.shape, -1, dtype=torch.int32, pin_memory=is_pinned)
        for mask, request_id in enumerate(masks):
            if request_id not in index_of:
                raise IntegrityError(f"step graph: got the grammar of request {request_id}, which has no row")
            mask_rows[index_of[request_id]] = mask
        if masks:
            bitmask = grammar_output.grammar_bitmask
            words = torch.empty(bitmask.shape, dtype=torch.int32, pin_memory=is_pinned)
            words.numpy()[:] = bitmask
            self._bitmask[: len(words)].copy_(words, non_blocking=True)
        self._mask_rows.copy_(mask_rows, non_blocking=True)
        self._num_used = len(masks)

    def apply(self, logits: torch.Tensor) -> None:
        """Forbid in each row, in place, what its mask does not allow."""
        mask_logits(logits, self._bitmask, self._mask_rows[: len(logits)])


class ReportRecord:
    """What a step reports of its rows: 64-bit words of token ids, a rank, and log-probabilities.

    One copy takes the whole record of all rows to the CPU.

    Args:
        max_num_rows: of a step.
    """

    NUM_WORDS = (MAX_LOGPROBS + 1) + 1 + (MAX_LOGPROBS + 2) // 2

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.words = torch.zeros(max_num_rows, self.NUM_WORDS, dtype=torch.int64, device=device)
        self._num_columns = min(MAX_LOGPROBS, vocab_size) + 1

    def write(
        self,
        logits: torch.Tensor,  # [R, V]
        token_ids: torch.Tensor,  # [R] int64
        num_logprobs: torch.Tensor,  # [R] int32
    ) -> LogprobReport:
        """Fill in the rows that ask for at least 0 of the most likely tokens; return views of all rows."""
        rows, columns = self.words[: len(logits)], self._num_columns
        logprobs = rows[:, MAX_LOGPROBS + 2 :].view(torch.float32)
        report = LogprobReport(rows[:, :columns], logprobs[:, :columns], rows[:, MAX_LOGPROBS + 1])
        report_logprobs(logits, token_ids, num_logprobs, report)
        return report

    @staticmethod
    def read(words: NDArray[np.int64], num_logprobs: int) -> Any:
        """Convert a record on the CPU, [R, NUM_WORDS], to vLLM's ``LogprobsLists``, with ``num_logprobs`` per row."""
        from vllm.v1.outputs import LogprobsLists

        logprobs = words[:, MAX_LOGPROBS + 2 :].view(np.float32)
        num_columns = num_logprobs + 1
        return LogprobsLists(words[:, :num_columns], logprobs[:, :num_columns], words[:, MAX_LOGPROBS + 1])


def launch_reports(max_num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Launch what reports and masks launch, on tensors without memory."""
    meta = torch.device("meta")
    # As a head with rows of padding leaves them.
    for width in (vocab_size, -(-vocab_size // 16) * 16):
        logits = torch.empty(max_num_rows, width, dtype=dtype, device=meta)[:, :vocab_size]
        tokens = torch.empty(max_num_rows, dtype=torch.int64, device=meta)
        ReportRecord(max_num_rows, vocab_size, meta).write(logits, tokens, tokens.int())
        GrammarMasks(max_num_rows, vocab_size, meta).apply(logits)


def why_graphs_do_not_report(sampler: Any, num_logprobs: int, num_token_ids: int) -> str | None:
    """Return why log-probabilities of a step are vLLM's; None if graphs report them.

    Args:
        sampler: vLLM's ``Sampler``.
        num_logprobs, num_token_ids: what its ``get_logprobs_dims`` returns.
    """
    if num_token_ids:
        return "log-probabilities of given tokens"
    if sampler.logprobs_mode != "raw_logprobs":
        return "another mode of log-probabilities"
    return f"more than {MAX_LOGPROBS} log-probabilities" if num_logprobs > MAX_LOGPROBS else None


_REPORTING: WeakSet[Any] = WeakSet()
"""``LogprobTokenIdsState`` of each sampler whose steps are replayed: by it the patched function knows its caller."""


def report_as_graphs(sampler: Any) -> None:
    """Let vLLM's own steps of a sampler report by the same function as replayed ones, so that both round alike."""
    _REPORTING.add(sampler.logprob_token_ids_state)


def wrap_compute_topk_scores(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``compute_topk_scores`` in vLLM's sampler; see the patch ledger."""

    @functools.wraps(original)
    def compute_topk_scores(
        logits: torch.Tensor,
        num_logprobs: int,
        sampled_token_ids: torch.Tensor,
        cu_num_logits: Any = None,
        logprob_token_ids_state: Any = None,
        expanded_idx_mapping: torch.Tensor | None = None,
        max_per_req_token_ids: int = 0,
        logits_mode: bool = False,
    ) -> Any:
        if (
            logprob_token_ids_state not in _REPORTING
            or cu_num_logits is not None
            or max_per_req_token_ids
            or logits_mode
            or num_logprobs > MAX_LOGPROBS
        ):
            return original(
                logits,
                num_logprobs,
                sampled_token_ids,
                cu_num_logits,
                logprob_token_ids_state,
                expanded_idx_mapping,
                max_per_req_token_ids,
                logits_mode,
            )
        from vllm.v1.outputs import LogprobsTensors

        # A record, too: in memory of another shape Triton would compile another kernel.
        record = ReportRecord(len(logits), logits.shape[1], logits.device)
        counts = torch.full((len(logits),), num_logprobs, dtype=torch.int32, device=logits.device)
        ids, logprobs, ranks = record.write(logits, sampled_token_ids, counts)
        return LogprobsTensors(ids[:, : num_logprobs + 1], logprobs[:, : num_logprobs + 1], ranks)

    return compute_topk_scores
