"""The fast path of ``update_from_output``: sampled tokens without side effects, for all requests of a step at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from operator import sub
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class RequestConstants:
    """What of a request does not change while it runs."""

    all_token_ids: list[int]
    """vLLM's own list, which grows."""
    output_token_ids: list[int]
    """vLLM's own list, which grows."""
    last_step: int
    """Number of computed tokens from which a step may be the last one, which vLLM checks twice before scheduling."""
    last_output: int
    """Number of output tokens from which the next one is the last."""
    stop_token_ids: frozenset[int | None]
    has_tokens_only: bool
    """Whether an output carries tokens only: no log-probabilities, no grammar, no session, no trace."""
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
                params.logprobs is None
                and not params.logprob_token_ids
                and params.repetition_detection is None
                and not has_grammar
                and not request.resumable
                and request.trace_headers is None
            ),
            has_grammar=has_grammar,
        )


class KnownConstants:
    """Caches the constants of the requests of the last call of ``of``.

    Args:
        max_model_len: tokens of a request at most.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._known: dict[Request, RequestConstants] = {}

    def read(self, requests: Sequence[Request]) -> list[RequestConstants]:
        """Return the constants of each request without touching the cache."""
        return [RequestConstants.of(request, self._max_model_len) for request in requests]

    def of(self, requests: Sequence[Request]) -> list[RequestConstants]:
        """Return the constants of each request, which become the cache."""
        known, max_model_len = self._known, self._max_model_len
        constants = [
            known.get(request) or RequestConstants.of(request, max_model_len) for request in requests
        ]
        self._known = dict(zip(requests, constants, strict=True))
        return constants


class FastOutputs:
    """Requests of one step whose sampled token is appended and sent without vLLM's per-request code.

    Args:
        requests: that compute one token each.
        constants: of each of them; requests that need more than their tokens are left to vLLM.
    """

    def __init__(self, requests: Sequence[Request], constants: Sequence[RequestConstants]) -> None:
        is_simple = [each.has_tokens_only for each in constants]
        self._requests = list(compress(requests, is_simple))
        self._request_ids = [request.request_id for request in self._requests]
        constants = list(compress(constants, is_simple))
        self._output_token_ids = [each.output_token_ids for each in constants]
        self._appends = [
            (request, each.output_token_ids.append, each.all_token_ids.append)
            for request, each in zip(self._requests, constants, strict=True)
        ]
        self._last_outputs = [each.last_output for each in constants]
        # The union over all requests: a token in it is left to vLLM, which checks that request's stop tokens.
        self._stop_token_ids = frozenset[int | None]().union(*{each.stop_token_ids for each in constants})
        self._clients = {request.client_index for request in self._requests}
        self._hashes_blocks = any(request._block_hasher is not None for request in self._requests)
        # Tokens that all requests may get before each is to be looked at again, as long as nobody intervenes.
        self._num_usual_tokens, self._num_interventions = 0, -1

    def append_tokens(
        self,
        model_runner_output: Any,
        num_placeholders: int,
        num_interventions: int,
        holds_encoder_outputs: Callable[[Request], bool],
    ) -> tuple[list[str], dict[int, list[EngineCoreOutput]]]:
        """Append this step's token to every request that does not finish and has no other event.

        Args:
            model_runner_output: of the step.
            num_placeholders: that the step had added to each request.
            num_interventions: changes with every call that may have changed a request.
            holds_encoder_outputs: whether outputs of an encoder are kept for a request, which vLLM releases when the
                step after them is over.

        Returns:
            The ids of these requests, and their outputs by client. All other requests are unchanged.
        """
        index, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        request_ids, appends = self._request_ids, self._appends
        if model_runner_output.req_ids != request_ids:
            sampled = [sampled[index[request_id]] for request_id in request_ids]
        if not self._are_all_usual(sampled, num_interventions, holds_encoder_outputs):
            is_usual = self._which_are_usual(sampled, holds_encoder_outputs)
            request_ids, appends = list(compress(request_ids, is_usual)), list(compress(appends, is_usual))
            sampled = list(compress(sampled, is_usual))
        for (request, append_output, append_to_all), (token,) in zip(appends, sampled, strict=True):
            append_output(token)
            append_to_all(token)
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= num_placeholders
        if self._hashes_blocks:
            for request, _, _ in appends:
                request.update_block_hashes()
        outputs = list(map(EngineCoreOutput, request_ids, sampled))
        return request_ids, self._by_client(appends, outputs)

    def _are_all_usual(
        self,
        sampled: list[list[int]],
        num_interventions: int,
        holds_encoder_outputs: Callable[[Request], bool],
    ) -> bool:
        """Whether the token of each request is appended as usual; False if it is to be found out one by one.

        Once all requests were, they are until a token may be the last of one, stops one, or somebody intervenes.
        """
        is_known = self._num_usual_tokens > 0 and num_interventions == self._num_interventions
        if is_known and self._stop_nothing(sampled):
            self._num_usual_tokens -= 1
            return True
        self._num_usual_tokens, self._num_interventions = 0, num_interventions
        if not all(self._which_are_usual(sampled, holds_encoder_outputs)):
            return False
        num_outputs = map(len, self._output_token_ids)
        self._num_usual_tokens = min(map(sub, self._last_outputs, num_outputs), default=1) - 1
        return True

    def _stop_nothing(self, sampled: list[list[int]]) -> bool:
        """Whether each row is one token, and none that may stop a request."""
        try:
            return self._stop_token_ids.isdisjoint([token for (token,) in sampled])
        except ValueError:
            return False

    def _which_are_usual(
        self, sampled: list[list[int]], holds_encoder_outputs: Callable[[Request], bool]
    ) -> list[bool]:
        running, stop_token_ids = RequestStatus.RUNNING, self._stop_token_ids
        return [
            len(new) == 1
            and new[0] not in stop_token_ids
            and len(output) < last
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
