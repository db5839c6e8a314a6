"""Turns sampled tokens into what callers see: stop decisions, text, log-probabilities, outputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose_backend.engine.model_runner import SampledTokens
from rose_backend.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from rose_backend.engine.request import Completion, Request
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.engine.tokenizer import Tokenizer


class OutputProcessor:
    """Applies one step's tokens to all rows at once; looks at single completions only where something happened.

    A completion is looked at when it ends, or when it asked to see each token (stream, stop strings, stop tokens,
    logprobs). The tokens of all others lie in the row buffers until they end.

    Args:
        eos_token_ids: tokens that end a completion unless it ignores them.
    """

    def __init__(self, state: RowState, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._state = state
        self._tokenizer = tokenizer
        self._eos_token_ids = np.array(eos_token_ids, np.int64)

    def apply(self, rows: Int32Array, sampled: SampledTokens) -> tuple[NDArray[np.int32], list[Completion]]:
        """Append one token to each of ``rows``.

        Returns:
            The rows whose completion has ended, and the completions with something new for their caller.
        """
        state, token_ids = self._state, sampled.token_ids
        positions = state.num_tokens[rows]
        state.token_ids[rows, positions] = token_ids
        state.num_tokens[rows] = positions + 1
        # np.isin sorts; there are one or two of them.
        is_eos = np.zeros(len(rows), np.bool_)
        for eos_token_id in self._eos_token_ids.tolist():
            is_eos |= token_ids == eos_token_id
        is_eos &= state.stops_at_eos[rows]
        is_full = positions + 1 >= state.max_num_tokens[rows]
        finished: list[Completion] = []
        news: list[Completion] = []
        for index in np.flatnonzero(is_eos | is_full | state.wants_each_token[rows]).tolist():
            completion = state.completions[int(rows[index])]
            assert completion is not None, f"row {int(rows[index])} holds no completion"
            self._see_token(
                completion, index, sampled, is_eos=bool(is_eos[index]), is_full=bool(is_full[index])
            )
            if completion.is_finished:
                finished.append(completion)
            if completion.is_finished or completion.request.is_streaming:
                news.append(completion)
        self._describe_finished(finished)
        return np.array([completion.row for completion in finished], np.int32), news

    def close(self, completion: Completion, reason: FinishReason) -> None:
        """End a completion from outside; keeps what it has."""
        completion.finish_reason = reason
        if completion.text_stream is not None:
            completion.text_stream.close()
        completion.final = self._describe(completion)

    def request_output(self, request: Request) -> RequestOutput:
        """Describe the request as it is now, and note that the caller has seen this much of its text."""
        return request.make_output(self._snapshot)

    def _see_token(
        self, completion: Completion, index: int, sampled: SampledTokens, *, is_eos: bool, is_full: bool
    ) -> None:
        token_id = int(sampled.token_ids[index])
        params = completion.request.params
        if completion.logprobs is not None and params.logprobs is not None and sampled.logprobs is not None:
            entry = sampled.logprobs.entry(index, token_id, params.logprobs, self._tokenizer)
            completion.logprobs.append(entry)
            completion.cumulative_logprob += entry[token_id].logprob
        if is_eos or token_id in (params.stop_token_ids or ()):
            completion.finish_reason = "stop"
            completion.stop_reason = None if is_eos else token_id
        elif is_full:
            completion.finish_reason = "length"
        self._extend_text(completion, token_id)

    def _extend_text(self, completion: Completion, token_id: int) -> None:
        stream = completion.text_stream
        if stream is None:
            return
        stop_string = None
        if self._shows(completion):
            stop_string = stream.push(token_id)
        if completion.is_finished and stop_string is None:
            stop_string = stream.close()
        if stop_string is not None:
            completion.finish_reason = "stop"
            completion.stop_reason = stop_string

    def _shows(self, completion: Completion) -> bool:
        """Whether the newest token belongs to the text; a stop token does so only when that was asked for."""
        return completion.finish_reason != "stop" or completion.request.params.include_stop_str_in_output

    def _describe_finished(self, completions: list[Completion]) -> None:
        """Set ``final`` of each. Many may end in one step: their texts are made at once."""
        for skips_special in (True, False):
            plain = [
                completion
                for completion in completions
                if completion.text_stream is None
                and completion.request.params.skip_special_tokens is skips_special
            ]
            shown = [self._shown_token_ids(completion) for completion in plain]
            texts = self._tokenizer.decode_batch(shown, skip_special_tokens=skips_special)
            for completion, text in zip(plain, texts, strict=True):
                completion.final = self._describe(completion, text)
        for completion in completions:
            if completion.text_stream is not None:
                completion.final = self._describe(completion)

    def _shown_token_ids(self, completion: Completion) -> list[int]:
        token_ids = self._token_ids(completion)
        return token_ids if self._shows(completion) else token_ids[:-1]

    def _describe(self, completion: Completion, text: str | None = None) -> CompletionOutput:
        """Args: text: of a completion without a stream, where it is known already."""
        token_ids = self._token_ids(completion)
        stream, params = completion.text_stream, completion.request.params
        if stream is not None:
            text, delta = stream.visible_text, stream.take_delta()
        else:
            if text is None:
                shown = self._shown_token_ids(completion)
                text = self._tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
            delta = text
        return CompletionOutput(
            index=completion.index,
            text=text,
            token_ids=token_ids,
            logprobs=None if completion.logprobs is None else list(completion.logprobs),
            cumulative_logprob=None if completion.logprobs is None else completion.cumulative_logprob,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            delta_text=delta,
        )

    def _snapshot(self, completion: Completion) -> CompletionOutput:
        if completion.final is None:
            return self._describe(completion)
        final = completion.final
        # Siblings may go on for long; text that was reported as new once is not new again.
        completion.final = CompletionOutput(
            final.index,
            final.text,
            final.token_ids,
            final.logprobs,
            final.cumulative_logprob,
            final.finish_reason,
            final.stop_reason,
        )
        return final

    def _token_ids(self, completion: Completion) -> list[int]:
        if completion.row >= 0:
            return self._state.output_token_ids(completion.row)
        ids: list[int] = completion.token_ids[len(completion.request.prompt_token_ids) :].tolist()
        return ids
