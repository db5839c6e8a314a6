"""A tiny GPT-2 that counts on from each request's own start, by reading its whole context through attention.

Tokens are numbers in cycles: of a cycle's ``CYCLE_LENGTH`` numbers each is followed by the next, the last by the first.
The token after position ``p`` is the successor, not of the token at ``p``, but of an earlier equal one: the first layer
looks up one position, the second another whose answer by the first layer it passes on. Positions are some cycles back,
chosen once for each ``p``. So a number depends on K/V of both layers all over the context, and a block of another
request, an old one, or one of its own in the wrong place gives a number of another cycle, or a wrong one of this.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.tiny_checkpoint import write_tokenizer

NUM_CYCLES, CYCLE_LENGTH = 132, 31
VOCAB_SIZE = NUM_CYCLES * CYCLE_LENGTH
MAX_MODEL_LEN = 512
HEADER_LENGTH = 8
"""Tokens at the start of a prompt that no number depends on, other than those of the header itself."""

_SLOT = 64
"""Values of a hidden state that hold one code; it has six, one a head. Only the first head's values are passed on."""
_SUCCESSOR, _FIRST, _SECOND, _POSITION, _LOOKED_UP_FIRST, _LOOKED_UP_SECOND = range(6)
_WIDTH = 6 * _SLOT
_SHARPNESS = 16.0
"""Of attention: the position looked up is some 50 above all others before the softmax."""


def write_counting_gpt2(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint, with a tokenizer of bytes, and return its directory, which is created where needed."""
    path.mkdir(parents=True, exist_ok=True)
    end_of_text = write_tokenizer(path, vocab_size=512, model_max_length=MAX_MODEL_LEN)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=MAX_MODEL_LEN,
        n_embd=_WIDTH,
        n_layer=2,
        n_head=6,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(float("ln_" in name and name.endswith("weight")))
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (VOCAB_SIZE, _SLOT), generator=generator) * 2.0 - 1.0
    positions = torch.randint(0, 2, (MAX_MODEL_LEN, _SLOT), generator=generator) * 2.0 - 1.0
    transformer = model.transformer
    _write(transformer.wte.weight, _SUCCESSOR, codes[[successor(each) for each in range(VOCAB_SIZE)]])
    _write(transformer.wpe.weight, _POSITION, positions)
    for slot, table in ((_LOOKED_UP_FIRST, 0), (_LOOKED_UP_SECOND, 1)):
        _write(transformer.wpe.weight, slot, positions[lookups()[table]])
    for layer, query, source, target in (
        (transformer.h[0], _LOOKED_UP_FIRST, _SUCCESSOR, _FIRST),
        (transformer.h[1], _LOOKED_UP_SECOND, _FIRST, _SECOND),
    ):
        for at, (slot, scale) in enumerate(((query, _SHARPNESS), (_POSITION, 1.0), (source, 1.0))):
            _pass_on(layer.attn.c_attn.weight, slot, at * _WIDTH, scale)
        _pass_on(layer.attn.c_proj.weight, 0, target * _SLOT, 1.0)
    _write(model.lm_head.weight, _SECOND, 2.0 * codes)
    model.generation_config.eos_token_id = end_of_text
    model.to(dtype).save_pretrained(path)
    return path


def successor(token: int) -> int:
    """Return the number after ``token`` in its cycle."""
    cycle, number = divmod(token, CYCLE_LENGTH)
    return cycle * CYCLE_LENGTH + (number + 1) % CYCLE_LENGTH


def count_on(token: int, count: int) -> list[int]:
    """Return the ``count`` numbers after ``token``."""
    cycle, number = divmod(token, CYCLE_LENGTH)
    return [cycle * CYCLE_LENGTH + (number + 1 + step) % CYCLE_LENGTH for step in range(count)]


def lookups() -> torch.Tensor:
    """Return for each layer the position that each position looks up, ``[2, MAX_MODEL_LEN]``."""
    positions = torch.arange(MAX_MODEL_LEN)
    num_cycles_back = ((positions - HEADER_LENGTH).clamp(0) // CYCLE_LENGTH)[None]
    share = torch.rand((2, MAX_MODEL_LEN), generator=torch.Generator().manual_seed(1))
    return positions - (share * (num_cycles_back + 1)).long() * CYCLE_LENGTH


def _write(weight: torch.Tensor, slot: int, values: torch.Tensor) -> None:
    weight.data[:, slot * _SLOT : (slot + 1) * _SLOT] = values


def _pass_on(weight: torch.Tensor, slot: int, column: int, scale: float) -> None:
    """Let a product, ``[in, out]`` as GPT-2 stores it, write a slot of its input to the columns from ``column`` on."""
    weight.data[slot * _SLOT : (slot + 1) * _SLOT, column : column + _SLOT] = scale * torch.eye(_SLOT)
