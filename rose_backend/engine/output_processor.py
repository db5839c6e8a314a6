"""Turns tokens into texts, log-probabilities and outputs, and finds stop strings. Runs in the output thread."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager.sequence_table import concatenate_ranges
from rose_backend.engine.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from rose_backend.engine.request import Completion, CompletionText, Request
from rose_backend.engine.tokenizer import (
    MAX_TOKENS_BEFORE,
    ByteLevelDecoder,
    Decoder,
    Detokenizer,
    Tokenizer,
    TokenTexts,
    text_of,
)

LogprobWords = NDArray[np.float32]
"""``[S, 2 + 2K]``, of the rows sampled in a step: log-probability and rank of the sampled token (1 = most likely), then
the K largest log-probabilities, falling, and their tokens. Rank and tokens are the bits of int32 numbers."""


def logprobs_entry(
    words: LogprobWords, token_id: int, num_logprobs: int, texts: TokenTexts, before: list[int]
) -> dict[int, Logprob]:
    """Return the dictionary of one row, ``[2 + 2K]``: its sampled token and its ``num_logprobs`` most likely ones.

    Args:
        before: tokens in front, see ``TokenTexts.text``.
    """
    numbers = words.view(np.int32)
    first_token = 1 + len(words) // 2
    top_logprobs = words[2:first_token][:num_logprobs].tolist()
    top_tokens = numbers[first_token:][:num_logprobs].tolist()
    entry = {token_id: Logprob(float(words[0]), int(numbers[1]), texts.text(token_id, before))}
    for rank, (candidate, logprob) in enumerate(zip(top_tokens, top_logprobs, strict=True), start=1):
        if candidate != token_id:
            entry[candidate] = Logprob(logprob, rank, texts.text(candidate, before))
    return entry


class Ending(NamedTuple):
    """How the step loop ended a completion. A stop string in its last token takes precedence."""

    reason: FinishReason
    stop_token: int | None


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One step's tokens of ``F`` completions with ``needs_each_token``, and which completions ended in it."""

    completions: list[Completion]  # [F]
    token_ids: list[int]  # [F], negative where an error ended the completion in place of a token
    indices: NDArray[np.intp]  # [F], of each in logprobs
    logprobs: LogprobWords | None
    endings: dict[Completion, Ending]
    """Of any completion. One without ``needs_each_token`` has left its slot: its ``token_ids`` are complete."""
    has_first_tokens: bool
    """Some of the tokens are the first ones of their completion."""


@dataclass(frozen=True, slots=True)
class IncrementalTokens:
    """Some tokens of ``N`` completions without ``needs_each_token``, detokenized before these end.

    Many may end in one step: detokenizing all of their tokens then would leave the device idle.
    """

    completions: list[Completion]  # [N]
    starts: list[int]  # [N], where in prompt and output the first token of each stands
    counts: list[int]  # [N]
    token_ids: NDArray[np.int32]  # [sum(counts)]


@dataclass(frozen=True, slots=True)
class Abort:
    """End what has not finished of a request; no step computes anything for it any more."""

    request: Request


class StopCheck(NamedTuple):
    """How far the output thread has checked a completion with stop strings."""

    num_tokens: int
    """Output tokens that were checked; the last of them ended the text if ``is_stopped``."""
    is_stopped: bool


class OutputProcessor:
    """Keeps the text side of completions (``Completion.text``) up to date."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def process(
        self, message: NewTokens | IncrementalTokens | Abort
    ) -> tuple[list[Request], dict[Completion, StopCheck]]:
        """Update completions.

        Returns:
            Requests with new output for their caller, and the stop checks of completions with stop strings.
        """
        if isinstance(message, Abort):
            return self._abort(message.request), {}
        if isinstance(message, IncrementalTokens):
            self._take_incremental(message)
            return [], {}
        stop_checks: dict[Completion, StopCheck] = {}
        touched: dict[Request, None] = {}
        for index, completion in enumerate(message.completions):
            text = completion.text
            # The step loop may have drawn tokens after a stop string before it learned of it.
            if text.finish_reason is not None:
                continue
            touched[completion.request] = None
            if text.is_decoded_lazily and completion not in message.endings:
                text.token_ids.append(message.token_ids[index])
                continue
            self._see_token(completion, index, message)
            if text.stream is not None and text.stream.has_stop_strings:
                stop_checks[completion] = StopCheck(len(text.token_ids), text.is_finished)
        plain = [completion for completion in message.endings if not completion.needs_each_token]
        if plain:
            self._finish_batch(plain, message.endings)
            touched.update((completion.request, None) for completion in plain)
        updated = [request for request in touched if request.is_streaming or request.is_finished]
        return updated, stop_checks

    def request_output(self, request: Request) -> RequestOutput:
        """Return what is new in the request since its previous output; all of a stream share the prompt's list."""
        request.has_output = True
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_list(),
            outputs=[new for each in request.completions if (new := self._news(each)) is not None],
            finished=request.is_finished,
            num_cached_tokens=request.num_cached_tokens or 0,
            scheduled_s=request.scheduled_s,
        )

    def _abort(self, request: Request) -> list[Request]:
        if request.is_finished:
            return []
        request.is_aborted = True
        for completion in request.completions:
            text = completion.text
            if text.is_finished:
                continue
            text.finish_reason = "abort"
            if not completion.needs_each_token:
                _take_remaining([completion], None)
            if text.stream is not None:
                _catch_up(text, len(text.token_ids))
                text.stream.close()
            text.final = self._describe(completion)
        return [request]

    def _see_token(self, completion: Completion, index: int, message: NewTokens) -> None:
        text, token_id = completion.text, message.token_ids[index]
        num_logprobs = completion.request.params.logprobs
        has_token = token_id >= 0
        if has_token:
            text.token_ids.append(token_id)
        if (
            has_token
            and text.logprobs is not None
            and num_logprobs is not None
            and message.logprobs is not None
        ):
            words = message.logprobs[message.indices[index]]
            before = text.token_ids[-1 - MAX_TOKENS_BEFORE : -1]
            entry = logprobs_entry(words, token_id, num_logprobs, self._tokenizer.token_texts, before)
            text.logprobs.append(entry)
            text.cumulative_logprob += entry[token_id].logprob
        ending = message.endings.get(completion)
        if ending is not None:
            text.finish_reason, text.stop_reason = ending.reason, ending.stop_token
        if text.stream is not None:
            self._extend_text(completion, text.stream)
        if text.is_finished:
            text.final = self._describe(completion)

    def _extend_text(self, completion: Completion, stream: Detokenizer) -> None:
        text = completion.text
        stop_string = _catch_up(text, len(_shown_token_ids(completion)))
        if text.is_finished and stop_string is None:
            stop_string = stream.close()
        if stop_string is not None:
            text.finish_reason, text.stop_reason = "stop", stop_string

    def _finish_batch(self, completions: list[Completion], endings: dict[Completion, Ending]) -> None:
        """Finish completions without ``needs_each_token``. Many may end in one step: they are detokenized together."""
        batches: defaultdict[Decoder, list[Completion]] = defaultdict(list)
        for completion in completions:
            completion.text.finish_reason, completion.text.stop_reason = endings[completion]
            batches[self._decoder(completion.request)].append(completion)
        for decoder, batch in batches.items():
            _take_remaining(batch, decoder)
            for completion in batch:
                text = completion.text
                if text.num_decoded > len(_shown_token_ids(completion)):
                    # The last token was decoded before it was known to be a stop token that is not shown.
                    text.stream = None
                if text.stream is not None:
                    self._extend_text(completion, text.stream)
                text.final = self._describe(completion)

    def _take_incremental(self, message: IncrementalTokens) -> None:
        taken: defaultdict[Decoder, list[tuple[CompletionText, int, int]]] = defaultdict(list)
        end = 0
        for completion, first, count in zip(message.completions, message.starts, message.counts, strict=True):
            start, end = end, end + count
            text, request = completion.text, completion.request
            # The first may be the prompt's, or known from before a preemption. After a gap, all wait for the end.
            num_known = len(request.prompt_token_ids) + len(text.token_ids) - first
            if not text.is_finished and 0 <= num_known < count:
                taken[self._decoder(request)].append((text, start + num_known, end))
        for decoder, spans in taken.items():
            _extend(spans, message.token_ids, decoder)

    def _decoder(self, request: Request) -> Decoder:
        return self._tokenizer.decoder(skip_special_tokens=request.params.skip_special_tokens)

    def _describe(self, completion: Completion) -> CompletionOutput:
        """Return what is new in a completion, and note that it has been reported."""
        text, stream = completion.text, completion.text.stream
        if not text.is_finished:
            _catch_up(text, len(text.token_ids))
        delta = self._whole_text(completion) if stream is None else stream.take_delta()
        start, text.num_reported = text.num_reported, len(text.token_ids)
        logprobs, cumulative_logprob = text.logprobs, None
        if logprobs is not None:
            text.logprobs, cumulative_logprob = [], text.cumulative_logprob
        return CompletionOutput(
            index=completion.index,
            text=delta,
            token_ids=text.token_ids[start:],
            logprobs=logprobs,
            cumulative_logprob=cumulative_logprob,
            finish_reason=text.finish_reason,
            stop_reason=text.stop_reason,
            delta_text=delta,
        )

    def _news(self, completion: Completion) -> CompletionOutput | None:
        """Return what is new in a completion; None for nothing."""
        text = completion.text
        if text.is_finished:
            final, text.final = text.final, None
            return final
        return self._describe(completion) if text.num_reported < len(text.token_ids) else None

    def _whole_text(self, completion: Completion) -> str:
        """Return the text of a completion without stream, which has ended."""
        text, shown = completion.text, _shown_token_ids(completion)
        if text.num_decoded == len(shown):
            return text_of(text.decoded_bytes)
        stream = self._decoder(completion.request).stream(completion.request.text_context)
        return stream.extend(shown) + stream.close()


def _catch_up(text: CompletionText, num_tokens: int) -> str | None:
    """Add the first ``num_tokens`` tokens to the stream, unless it has them; returns the stop string it found."""
    new = text.token_ids[text.num_decoded : num_tokens]
    if not new or text.stream is None:
        return None
    text.num_decoded = num_tokens
    return text.stream.extend(new)


def _take_remaining(completions: list[Completion], decoder: Decoder | None) -> None:
    """Add the tokens that were not sent in portions, of completions that have left their slots."""
    rests, spans, hidden, end = [], [], [], 0
    for completion in completions:
        text = completion.text
        rest = completion.token_ids[len(completion.request.prompt_token_ids) + len(text.token_ids) :]
        start, end = end, end + len(rest)
        rests.append(rest)
        # A stop token that is not shown has no text.
        is_hidden = start < end and not _shows_last_token(completion)
        spans.append((text, start, end - is_hidden))
        if is_hidden:
            hidden.append((text, int(rest[-1])))
    _extend(spans, np.concatenate(rests), decoder)
    for text, token_id in hidden:
        text.token_ids.append(token_id)


def _extend(
    spans: list[tuple[CompletionText, int, int]],
    token_ids: NDArray[np.int32],
    decoder: Decoder | None,
) -> None:
    """Add to each text its tokens in ``token_ids``, ``[start, end)``, decoded unless ``decoder`` is None."""
    starts, ends = (np.array([span[place] for span in spans]) for place in (1, 2))
    token_ids = token_ids[concatenate_ranges(starts, ends - starts)]
    pieces = decoder.pieces_of(token_ids, ends - starts) if isinstance(decoder, ByteLevelDecoder) else None
    listed, position = token_ids.tolist(), 0
    for index, (text, start, end) in enumerate(spans):
        text.token_ids += listed[position : position + end - start]
        position += end - start
        if pieces is not None:
            text.decoded_bytes += pieces[index]
            text.num_decoded += end - start
        elif decoder is not None:
            _catch_up(text, len(text.token_ids))


def _shows_last_token(completion: Completion) -> bool:
    """Whether the newest token belongs to the text; a stop token does so only when that was asked for."""
    return completion.text.finish_reason != "stop" or completion.request.params.include_stop_str_in_output


def _shown_token_ids(completion: Completion) -> list[int]:
    token_ids = completion.text.token_ids
    return token_ids if _shows_last_token(completion) else token_ids[:-1]
