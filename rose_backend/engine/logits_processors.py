"""Bias, allowed tokens, bad words and ``min_tokens`` of requests, in tables on the device by request slot."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.config import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_STOP_TOKEN_IDS,
)
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.kernels.arguments import LogitsProcessors, TokenLimits
from rose_backend.kernels.captured_graphs import upload
from rose_backend.kernels.sampling.ops import write_bitmask

_NO_TOKEN = 2**31 - 1


class ProcessorTables:
    """Fixed tensors, since captured graphs hold their addresses: about 26 KB and a bit per token for each request slot.

    An entry is written once, before its slot's first draw. Then the device keeps what is drawn, without the host.

    Args:
        vocab_size: V.
    """

    def __init__(self, state: SequenceState, vocab_size: int, device: torch.device) -> None:
        num_slots, num_ends = len(state.num_tokens), MAX_STOP_TOKEN_IDS + max(len(state.eos_token_ids), 1)
        # Whatever a model's tokenizer says, kernels are those that were compiled before it was loaded.
        num_stops = -(-num_ends // MAX_STOP_TOKEN_IDS) * MAX_STOP_TOKEN_IDS
        self._state = state
        self._device = device
        # TokenLimits but its last field, and bias.
        self._widths = (
            *(2, num_stops, MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
            *(MAX_LOGIT_BIAS_TOKENS, MAX_LOGIT_BIAS_TOKENS),
        )
        self._tables = [
            torch.zeros((num_slots, width), dtype=torch.int32, device=device) for width in self._widths
        ]
        lengths, stops, allowed, word_ends, word_tokens, self._bias_token_ids, bias = self._tables
        # Rows without an entry leave what they draw in the last one, which nobody reads.
        drawn = torch.zeros((num_slots + 1, MAX_BAD_WORD_TOKENS), dtype=torch.int64, device=device)
        self._limits = TokenLimits(lengths, stops, allowed, word_ends, word_tokens, drawn)
        self._bias = bias.view(torch.float32)
        self._bitmask = torch.zeros((num_slots, -(-vocab_size // 32)), dtype=torch.int32, device=device)

    def admit(self, slots: NDArray[np.int64]) -> None:
        """Write the entries of ``slots``, int64 ``[N]``."""
        records = np.full((len(slots), sum(self._widths)), -1, np.int32)
        drawn = np.zeros((len(slots), MAX_BAD_WORD_TOKENS), np.int64)
        for slot, record, columns in zip(slots.tolist(), records, drawn, strict=True):
            self._fill(slot, np.split(record, np.cumsum(self._widths)[:-1]), columns)
        to, new_records, new_drawn = upload(self._device, slots, records, drawn)
        for table, part in zip(self._tables, new_records.split(self._widths, 1), strict=True):
            table.index_copy_(0, to, part)
        self._limits.drawn_token_ids.index_copy_(0, to, new_drawn)

    def prepare(self, entries: torch.Tensor, position: torch.Tensor) -> LogitsProcessors:
        """Return what is done to the logits of the next draws, after it was made ready on the device.

        Args:
            entries: int32 ``[R]``, the slot of each row that has an entry, else -1.
            position: int64 ``[R]``, of the token to draw.
        """
        write_bitmask(self._bitmask, entries, position, self._limits)
        return LogitsProcessors(entries, self._bitmask, self._bias_token_ids, self._bias)

    def note(self, entries: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Keep ``token_ids``, int64 ``[R]``, which rows have drawn; the rest as in ``prepare``."""
        drawn = self._limits.drawn_token_ids
        rows = entries.to(torch.int64).where(entries >= 0, len(drawn) - 1)
        drawn.view(-1).scatter_(0, rows * drawn.shape[1] + position % drawn.shape[1], token_ids)

    def _fill(self, slot: int, record: list[NDArray[np.int32]], drawn: NDArray[np.int64]) -> None:
        state, completion = self._state, self._state.completion(slot)
        request = completion.request
        lengths, stops, allowed, word_ends, word_tokens, bias_token_ids, bias = record
        num_prompt_tokens, num_tokens = int(state.num_prompt_tokens[slot]), int(state.num_tokens[slot])
        lengths[:] = num_prompt_tokens, state.min_num_tokens[slot]
        words = request.bad_words_token_ids
        for column, values in (
            (stops, state.stops_before_min_tokens(completion)),
            (allowed, request.params.allowed_token_ids or ()),
            (word_ends, list(itertools.accumulate(map(len, words)))),
            (word_tokens, list(itertools.chain(*words))),
        ):
            column[: len(values)] = values
        biases = sorted((request.params.logit_bias or {}).items())
        bias_token_ids[:] = _NO_TOKEN
        bias_token_ids[: len(biases)] = [token_id for token_id, _ in biases]
        bias.view(np.float32)[: len(biases)] = [value for _, value in biases]
        known = np.arange(max(num_prompt_tokens, num_tokens - len(drawn)), num_tokens)
        drawn[known % len(drawn)] = state.token_ids[slot, known]
