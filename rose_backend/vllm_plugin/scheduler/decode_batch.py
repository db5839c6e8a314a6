"""Running requests that decode, as lists and arrays, so that a step schedules them without per-request decisions.

A decode computes one token or, with speculative decoding, one token and all its drafts. As in vLLM, scheduling a step
counts all of them as computed, and rejected drafts are subtracted when the step's output arrives.

The state of a request stays on vLLM's own object and is always up to date; the arrays save reading it in each step.
Sampled tokens without side effects are also appended and sent for all requests of a step at once (``FastOutputs``).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from operator import sub
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from rose_backend.vllm_plugin.kv_cache.running_requests import RunningRequests

_ROW, _CAPACITY, _COMPUTED, _PROMPT, _LAST_STEP, _KNOWN = range(6)
"""First index of ``DecodeBatch``'s ``numbers``: row in the block manager, tokens that fit into the row's blocks,
computed tokens, prompt tokens, ``RequestConstants.last_step`` and, with drafts only, tokens with known ids."""


@dataclass(frozen=True, slots=True)
class RequestConstants:
    """The parts of a request that do not change while it runs."""

    all_token_ids: list[int]
    """vLLM's own list, which grows."""
    output_token_ids: list[int]
    """vLLM's own list, which grows."""
    last_step: int
    """Token count from which the next step may be the last. Compared with computed tokens, or with sampled tokens when
    drafting."""
    last_output: int
    """Number of output tokens from which the next one is the last."""
    stop_token_ids: frozenset[int | None]
    has_tokens_only: bool
    """Whether outputs carry nothing but tokens and their log-probabilities: the request has no grammar, session or
    trace, and is not told its numbers of drafts."""
    has_logprobs: bool
    has_grammar: bool

    @classmethod
    def of(cls, request: Request, max_model_len: int) -> RequestConstants:
        """Read a request of an engine with ``max_model_len``."""
        params = request.sampling_params
        assert params is not None, "a generation model gets generation requests"
        max_tokens = min(request.num_prompt_tokens + request.max_tokens, max_model_len)
        has_grammar = request.structured_output_request is not None
        return cls(
            all_token_ids=request._all_token_ids,
            output_token_ids=request._output_token_ids,
            # A session continues with another limit.
            last_step=0 if request.resumable else max_tokens - 1,
            last_output=max_tokens - 1 - request.num_prompt_tokens,
            stop_token_ids=frozenset((params.eos_token_id, *(params.stop_token_ids or ()))),
            has_tokens_only=(
                params.repetition_detection is None
                and not has_grammar
                and not request.resumable
                and request.trace_headers is None
                and request.spec_decode_metrics is None
            ),
            has_logprobs=params.num_logprobs is not None,
            has_grammar=has_grammar,
        )


class AppendedTokens(NamedTuple):
    """What the fast path did in a step."""

    request_ids: list[str]
    """The requests that got their tokens. All others are unchanged, and left to vLLM."""
    counts: list[int] | None
    """Tokens that each of them got; None without drafts: one each."""
    outputs: dict[int, list[EngineCoreOutput]]
    """Their outputs, by client index."""


class FastOutputs:
    """Requests of one step whose sampled tokens are appended and sent without vLLM's per-request code.

    Args:
        requests: that compute ``num_tokens`` tokens each.
        constants: of each of them; requests that need more than their tokens are left to vLLM.
        num_tokens: one, and the drafts.

    Attributes:
        num_tokens: as given.
    """

    def __init__(
        self, requests: Sequence[Request], constants: Sequence[RequestConstants], num_tokens: int
    ) -> None:
        self.num_tokens = num_tokens
        is_simple = [each.has_tokens_only for each in constants]
        self._requests = list(compress(requests, is_simple))
        self._request_ids = [request.request_id for request in self._requests]
        constants = list(compress(constants, is_simple))
        self._output_token_ids = [each.output_token_ids for each in constants]
        self._appends = [
            (request, each.output_token_ids.append, each.all_token_ids.append)
            if num_tokens == 1
            else (request, each.output_token_ids.extend, each.all_token_ids.extend)
            for request, each in zip(self._requests, constants, strict=True)
        ]
        self._last_outputs = [each.last_output for each in constants]
        self._ids_with_logprobs = {
            request.request_id
            for request, each in zip(self._requests, constants, strict=True)
            if each.has_logprobs
        }
        # The union over all requests: a request that samples any of these is left to vLLM, which checks its own set.
        self._stop_token_ids = frozenset[int | None]().union(*{each.stop_token_ids for each in constants})
        self._clients = {request.client_index for request in self._requests}
        self._hashes_blocks = any(request._block_hasher is not None for request in self._requests)
        # Tokens that each request may get before all are checked again, unless ``num_interventions`` changes.
        self._num_usual_tokens, self._num_interventions = 0, -1

    def append_tokens(
        self,
        model_runner_output: Any,
        num_placeholders: int,
        num_interventions: int,
        holds_encoder_outputs: Callable[[Request], bool],
    ) -> AppendedTokens:
        """Append this step's tokens to every request that does not finish and has no other event.

        Args:
            model_runner_output: vLLM's output of the step.
            num_placeholders: ``num_output_placeholders`` that scheduling added per token: 1 or 0.
            num_interventions: a count that grows with every call that may have changed a request, such as an abort.
            holds_encoder_outputs: whether encoder outputs are still cached for a request; vLLM's code releases them.
        """
        index, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        request_ids, appends = self._request_ids, self._appends
        if model_runner_output.req_ids != request_ids:
            sampled = [sampled[index[request_id]] for request_id in request_ids]
        if not self._are_all_usual(sampled, num_interventions, holds_encoder_outputs):
            is_usual = self._which_are_usual(sampled, holds_encoder_outputs)
            request_ids, appends = list(compress(request_ids, is_usual)), list(compress(appends, is_usual))
            sampled = list(compress(sampled, is_usual))
        counts = None
        if self.num_tokens == 1:
            for (request, append_output, append_to_all), (token,) in zip(appends, sampled, strict=True):
                append_output(token)
                append_to_all(token)
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= num_placeholders
        else:
            counts = self._extend(appends, sampled, num_placeholders)
        if self._hashes_blocks:
            for request, _, _ in appends:
                request.update_block_hashes()
        outputs = list(map(EngineCoreOutput, request_ids, sampled))
        logprobs = model_runner_output.logprobs
        if logprobs and self._ids_with_logprobs:
            for output in outputs:
                if output.request_id in self._ids_with_logprobs:
                    count = len(output.new_token_ids)
                    output.new_logprobs = logprobs.slice_request(index[output.request_id], count)
        return AppendedTokens(request_ids, counts, self._by_client(appends, outputs))

    def _extend(self, appends: list[Any], sampled: list[list[int]], num_placeholders: int) -> list[int]:
        """Append what was accepted and take back what was rejected; return how many tokens each request got."""
        num_tokens, num_placeholders = self.num_tokens, num_placeholders * self.num_tokens
        counts = list(map(len, sampled))
        for (request, extend_output, extend_all), tokens, count in zip(appends, sampled, counts, strict=True):
            extend_output(tokens)
            extend_all(tokens)
            request.num_in_flight_tokens -= num_tokens
            # Accepted or not, each scheduled token had its placeholder.
            request.num_output_placeholders -= num_placeholders
            request.num_computed_tokens -= num_tokens - count
        return counts

    def _are_all_usual(
        self,
        sampled: list[list[int]],
        num_interventions: int,
        holds_encoder_outputs: Callable[[Request], bool],
    ) -> bool:
        """Whether every request only needs its tokens appended; False if some request needs vLLM's code.

        After a check of all requests the answer stays true, without another check, until a request may reach its
        length limit, a stop token is sampled, or ``num_interventions`` changes.
        """
        num_tokens = self.num_tokens
        is_known = self._num_usual_tokens >= num_tokens and num_interventions == self._num_interventions
        if is_known and self._stop_nothing(sampled):
            self._num_usual_tokens -= num_tokens
            return True
        self._num_usual_tokens, self._num_interventions = 0, num_interventions
        if not all(self._which_are_usual(sampled, holds_encoder_outputs)):
            return False
        num_outputs = map(len, self._output_token_ids)
        self._num_usual_tokens = (
            min(map(sub, self._last_outputs, num_outputs), default=num_tokens) - num_tokens
        )
        return True

    def _stop_nothing(self, sampled: list[list[int]]) -> bool:
        """Whether each row has tokens, one without drafts, and none that may stop a request."""
        if self.num_tokens > 1:
            return all(sampled) and self._stop_token_ids.isdisjoint(chain.from_iterable(sampled))
        try:
            return self._stop_token_ids.isdisjoint([token for (token,) in sampled])
        except ValueError:
            return False

    def _which_are_usual(
        self, sampled: list[list[int]], holds_encoder_outputs: Callable[[Request], bool]
    ) -> list[bool]:
        running, stop_token_ids = RequestStatus.RUNNING, self._stop_token_ids
        return [
            0 < len(new) <= self.num_tokens
            and stop_token_ids.isdisjoint(new)
            and len(output) + len(new) <= last
            and request.status is running
            and not request.num_stale_output_tokens
            and request.prefill_stats is None
            and not request.events
            and not (request.has_encoder_inputs and holds_encoder_outputs(request))
            for request, output, new, last in zip(
                self._requests, self._output_token_ids, sampled, self._last_outputs, strict=True
            )
        ]

    def _by_client(
        self, appends: list[Any], outputs: list[EngineCoreOutput]
    ) -> dict[int, list[EngineCoreOutput]]:
        if outputs and len(self._clients) == 1:
            return dict.fromkeys(self._clients, outputs)
        by_client: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        for (request, _, _), output in zip(appends, outputs, strict=True):
            by_client[request.client_index].append(output)
        return by_client


NewBlockIds = list[tuple[list[int], ...] | None]


class DecodeRequestData(CachedRequestData):
    """vLLM's ``CachedRequestData`` of decodes, whose token counts become lists only when they are first read.

    Steps that are replayed whole do not read them. Pickled, it becomes vLLM's own class.
    """

    _batch_numbers: NDArray[np.int64]
    _num_more: int
    """Tokens that each request has computed since ``_batch_numbers`` was read."""

    @classmethod
    def of(
        cls, request_ids: list[str], new_block_ids: NewBlockIds, numbers: NDArray[np.int64], num_more: int
    ) -> DecodeRequestData:
        """Build the data of a step of a batch.

        Args:
            numbers: see ``DecodeBatch``.
            num_more: tokens that each request has computed beyond these numbers.
        """
        data = cls.__new__(cls)
        data.req_ids = request_ids
        data.resumed_req_ids = set()
        data.new_token_ids = []
        data.all_token_ids = {}
        data.new_block_ids = new_block_ids
        data._batch_numbers, data._num_more = numbers, num_more
        return data

    @cached_property
    def num_computed_tokens(self) -> list[int]:  # type: ignore[override]
        """Of each request, before the step."""
        computed: list[int] = (self._batch_numbers[_COMPUTED] + self._num_more).tolist()
        return computed

    @cached_property
    def num_output_tokens(self) -> list[int]:  # type: ignore[override]
        """Of each request, placeholders included: a decode has computed all its tokens but the newest one."""
        numbers = self._batch_numbers
        outputs: list[int] = (numbers[_COMPUTED] - numbers[_PROMPT] + (self._num_more + 1)).tolist()
        return outputs

    def __reduce__(self) -> tuple[type[CachedRequestData], tuple[Any, ...]]:
        fields = dataclasses.fields(CachedRequestData)
        return CachedRequestData, tuple(getattr(self, field.name) for field in fields)


class DecodeBatch:
    """The leading running requests, up to the first that does not decode. One object serves steps of the same requests.

    Args:
        running: these requests, in vLLM's order.
        requests: those of them that get a token; the others wait for their last token from a step in flight.
        constants: of each of ``requests``.
        numbers: int64 ``[5, N]``, with drafts ``[6, N]``: one column for each of ``requests``; ``_ROW`` and the
            constants defined with it are the indices of its rows.
        holders: all requests that hold blocks, these among them.
        max_model_len: of the engine.
    """

    def __init__(
        self,
        running: list[Request],
        requests: list[Request],
        constants: list[RequestConstants],
        numbers: NDArray[np.int64],
        holders: RunningRequests,
        max_model_len: int,
    ) -> None:
        self.running = running
        self._num_tokens = num_tokens = holders.tokens_per_decode
        self.request_ids = [request.request_id for request in requests]
        """Like ``num_scheduled_tokens`` shared by all steps of the batch, so it must not be changed."""
        self.num_scheduled_tokens = dict.fromkeys(self.request_ids, num_tokens)
        self.total_num_scheduled_tokens = num_tokens * len(requests)
        self.fast_outputs = FastOutputs(requests, constants, num_tokens)
        self._drafts = dict.fromkeys(self.request_ids, [-1] * (num_tokens - 1)) if num_tokens > 1 else {}
        self._requests, self._constants = requests, constants
        self._grammar_requests = [r for r, each in zip(requests, constants, strict=True) if each.has_grammar]
        self.has_grammar = bool(self._grammar_requests)
        """Whether a request has structured output."""
        self._holders, self._max_model_len = holders, max_model_len
        self._is_stale = False
        self._count_from(numbers)

    def _count_from(self, numbers: NDArray[np.int64]) -> None:
        """Count steps from 0 again, starting at these numbers."""
        self._numbers, self._num_steps = numbers, 0
        # A request that gets no token now may be gone at the next step.
        is_complete = len(self._requests) == len(self.running)
        self._last_step = int(self._num_certain_steps().min()) if is_complete else 0
        self._num_steps_with_room = self._num_steps_that_fit(numbers[_CAPACITY], numbers[_COMPUTED])
        self._full_at_step = int(self._num_steps_with_room.min())

    def _num_steps_that_fit(
        self, capacity: NDArray[np.int64], num_computed_tokens: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return how many steps of each request, [N], fit into its blocks, with the drafter's look-ahead slots."""
        num_free: NDArray[np.int64] = capacity - num_computed_tokens - self._holders.num_lookahead_tokens
        return num_free // self._num_tokens

    def _num_certain_steps(self) -> NDArray[np.int64]:
        """Return how many steps, counted from step 0, each request certainly has with all its tokens, [N]."""
        num_computed_tokens, last_steps = self._numbers[_COMPUTED], self._numbers[_LAST_STEP]
        if self._num_tokens == 1:
            return last_steps - num_computed_tokens
        # num_computed_tokens assumes that all drafts are accepted, and vLLM trims drafts at max_model_len by it.
        # Whether a step may be the last depends on tokens already sampled.
        num_that_fit = (self._max_model_len - 1 - num_computed_tokens) // self._num_tokens
        return np.where(self._numbers[_KNOWN] < last_steps, num_that_fit, 0)

    @classmethod
    def at_head_of(
        cls,
        running: list[Request],
        known_constants: Mapping[Request, RequestConstants],
        holders: RunningRequests,
        max_model_len: int,
        last: DecodeBatch | None,
    ) -> DecodeBatch | None:
        """Return the batch of the running requests before the first that computes another number of tokens, if any.

        Args:
            known_constants: constants of the decodes of the last step that vLLM's code scheduled.
            last: the batch of the step before; requests that are in both are not read again.
        """
        known = {} if last is None else last._positions_of_next()
        num_tokens = holders.tokens_per_decode
        requests: list[Request] = []
        positions: list[int] = []
        new_requests: list[Request] = []
        num_known, num_seen = 0 if last is None else len(last._requests), 0
        for request in running:
            position = known.get(request)
            if position is None:
                num_new_tokens = _num_new_tokens(request, max_model_len)
                if num_new_tokens not in (0, num_tokens) or request.is_prefill_chunk:
                    break
                if num_new_tokens:
                    position = num_known + len(new_requests)
                    new_requests.append(request)
            num_seen += 1
            if position is not None:
                requests.append(request)
                positions.append(position)
        if not requests:
            return None
        # After steps of a batch they may be out of date, for a request that has left it and joined again.
        noted = known_constants if last is None else {}
        constants = [noted.get(each) or RequestConstants.of(each, max_model_len) for each in new_requests]
        rows = [holders.row_of[request.request_id] for request in new_requests]
        columns = [
            rows,
            [holders.capacity[row] for row in rows],
            [request.num_computed_tokens for request in new_requests],
            [request.num_prompt_tokens for request in new_requests],
            [each.last_step for each in constants],
        ]
        if num_tokens > 1:
            columns.append([len(each.all_token_ids) for each in constants])
        numbers = np.array(columns, np.int64)
        if last is not None:
            constants = last._constants + constants
            constants = [constants[position] for position in positions]
            numbers = np.concatenate((last._numbers_now(), numbers), 1)[:, positions]
        return cls(running[:num_seen], requests, constants, numbers, holders, max_model_len)

    def _positions_of_next(self) -> dict[Request, int]:
        """Return the position of each request that will certainly get another token."""
        if not self._has_outputs_or_placeholders():
            return {}
        known = dict(zip(self._requests, range(len(self._requests)), strict=True))
        for position in np.flatnonzero(self._num_certain_steps() <= self._num_steps).tolist():
            del known[self._requests[position]]
        return known

    def _numbers_now(self) -> NDArray[np.int64]:
        numbers = self._numbers.copy()
        numbers[_COMPUTED] += self._num_steps * self._num_tokens
        return numbers

    def note_tokens(self, counts: list[int] | None) -> None:
        """Uncount the drafts that the output of an earlier step has rejected. Needed with drafts only.

        Args:
            counts: tokens that each request got from a step of this batch; None if requests may have changed in other
                ways, so that they have to be read again.
        """
        if counts is None:
            self._is_stale = True
            return
        numbers = self._numbers_now()
        numbers[_COMPUTED] -= self._num_tokens - np.array(counts)
        numbers[_KNOWN] += counts
        self._count_from(numbers)

    def _read_again(self) -> None:
        numbers = self._numbers.copy()
        numbers[_COMPUTED] = [request.num_computed_tokens for request in self._requests]
        if self._num_tokens > 1:
            numbers[_KNOWN] = [len(each.all_token_ids) for each in self._constants]
        self._is_stale = False
        self._count_from(numbers)

    def _has_outputs_or_placeholders(self) -> bool:
        """Whether the tokens of the step before are known or have placeholders; the same for all requests."""
        request = self._requests[0]
        num_known = len(self._constants[0].all_token_ids) + request.num_output_placeholders
        return num_known - request.num_computed_tokens == 1

    def is_at_head_of(self, running: list[Request]) -> bool:
        """Whether the next step decodes exactly these requests again: none leaves, and none after them would join."""
        if self._is_stale:
            self._read_again()
        num_requests = len(self.running)
        if self._num_steps >= self._last_step or not self._has_outputs_or_placeholders():
            return False
        if len(running) == num_requests:
            return running == self.running
        return running[:num_requests] == self.running and running[num_requests].is_prefill_chunk

    def before_last_decode(self) -> list[Request]:
        """Return the requests before the last one that gets a token."""
        return self.running[: self.running.index(self._requests[-1])]

    def allocate_slots(self) -> NewBlockIds | None:
        """Make room for the next step's tokens of each request.

        Returns:
            ``new_block_ids`` of vLLM's ``CachedRequestData``, or None when blocks are short; then nothing has changed.
        """
        new_block_ids: NewBlockIds = [None] * len(self._requests)
        if self._num_steps >= self._full_at_step:
            full = np.flatnonzero(self._num_steps_with_room <= self._num_steps)
            full_rows, holders = self._numbers[_ROW][full].tolist(), self._holders
            blocks = holders.allocate_next_blocks(full_rows, len(self._requests))
            if blocks is None:
                return None
            capacity = np.array([holders.capacity[row] for row in full_rows])
            self._numbers[_CAPACITY, full] = capacity
            self._num_steps_with_room[full] = self._num_steps_that_fit(
                capacity, self._numbers[_COMPUTED, full]
            )
            self._full_at_step = int(self._num_steps_with_room.min())
            for position, new in zip(full.tolist(), blocks, strict=True):
                new_block_ids[position] = new
        return new_block_ids

    def rows_with_other_blocks(self, new_block_ids: NewBlockIds, block_size: int) -> list[int]:
        """Return the positions of requests that get a block, or whose last known token has filled one.

        Args:
            new_block_ids: from ``allocate_slots``.
            block_size: tokens of a block.
        """
        rows = enumerate(zip(new_block_ids, self._constants, strict=True))
        return [
            row for row, (new, each) in rows if new is not None or len(each.all_token_ids) % block_size == 0
        ]

    @property
    def lacks_grammar_tokens(self) -> bool:
        """Whether a grammar needs tokens of a step in flight before it can make its mask."""
        return any(request.num_output_placeholders for request in self._grammar_requests)

    def has_no_use_for_drafts(self, is_unused: Callable[[Request, int, int], bool]) -> bool:
        """Whether no request has a step after the next one. (Usually the first request has one, which ends the check.)

        Args:
            is_unused: vLLM's test of one request, given its computed tokens and those that the next step computes.
        """
        num_tokens = self._num_tokens
        return all(is_unused(request, request.num_computed_tokens, num_tokens) for request in self._requests)

    def data_of_next_step(self, new_block_ids: NewBlockIds) -> CachedRequestData:
        """Return the part of the next step's scheduler output that the workers get.

        Args:
            new_block_ids: from ``allocate_slots``.
        """
        num_more = self._num_steps * self._num_tokens
        return DecodeRequestData.of(self.request_ids, new_block_ids, self._numbers, num_more)

    def drafts_of_next_step(self) -> dict[str, list[int]]:
        """Return placeholders for each request's drafts in the next step's scheduler output; workers have the drafts.

        A copy: with grammars, vLLM's engine core replaces the placeholders of one step with the drafts themselves.
        """
        return self._drafts.copy()

    def advance(self, num_placeholders: int, step_seq: int | None) -> None:
        """Count the next step's tokens of every request as scheduled.

        Args:
            num_placeholders: ``num_output_placeholders`` to add per token: 1 with asynchronous scheduling, else 0.
            step_seq: vLLM's number of the step, if it frees blocks only after the last step that writes to them; None
                if it does not.
        """
        self._num_steps += 1
        num_tokens = self._num_tokens
        num_placeholders *= num_tokens
        for request in self._requests:
            request.num_computed_tokens += num_tokens
            request.num_in_flight_tokens += num_tokens
            request.num_output_placeholders += num_placeholders
        if step_seq is not None:
            for request in self._requests:
                request.last_sched_seq = step_seq


def _num_new_tokens(request: Request, max_model_len: int) -> int:
    """Return how many tokens of a running request vLLM would schedule if the step had no limits."""
    computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
    if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
        # A step in flight computes its last token.
        return 0
    return min(request.num_tokens_with_spec + placeholders, max_model_len - 1) - computed
