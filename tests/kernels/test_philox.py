"""Random bits: published known answers, Triton's generator word for word, and a mapping that never leaves (0, inf)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rose_backend.kernels.sampling.reference import exponential_noise, philox4x32, token_bits, vocabulary_bits
from tests.support.patience import HANG_S

ALL_ONES = 0xFFFFFFFF
# (counter, key, result): the vectors published with Random123 for philox4x32-10.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0]
POSITIONS = [0, 1, 1023, 2**31 - 1, 7, 65_536]

TRITON_PROGRAM = """
import json, sys
import torch, triton, triton.language as tl

@triton.jit
def bits_kernel(out_ptr, seed_ptr, position_ptr, num_tokens, TILE: tl.constexpr):
    row = tl.program_id(0)
    tokens = tl.arange(0, TILE)
    zero = tokens * 0
    position = tl.load(position_ptr + row).to(tl.int32)
    first, second, third, fourth = tl.philox(tl.load(seed_ptr + row), tokens // 4, zero + position, zero, zero)
    word = tl.where(tokens % 4 == 0, first, tl.where(tokens % 4 == 1, second, tl.where(tokens % 4 == 2, third, fourth)))
    tl.store(out_ptr + row * num_tokens + tokens, word.to(tl.int64), mask=tokens < num_tokens)

seeds, positions, num_tokens = json.loads(sys.argv[1])
out = torch.zeros(len(seeds), num_tokens, dtype=torch.int64)
bits_kernel[(len(seeds),)](out, torch.tensor(seeds), torch.tensor(positions), num_tokens, TILE=128)
print(json.dumps((out & 0xFFFFFFFF).tolist()))
"""


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32(
        tuple(torch.tensor([[word]]) for word in counter), tuple(torch.tensor([[word]]) for word in key)
    )
    assert tuple(word.item() for word in words) == expected


def test_four_tokens_share_a_counter() -> None:
    tokens = torch.arange(50).unsqueeze(0)
    bits = token_bits(tokens, torch.tensor(SEEDS), torch.tensor(POSITIONS))
    quads = torch.arange(13).unsqueeze(0)
    zero = torch.zeros_like(quads)
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        key = (torch.tensor([[seed & ALL_ONES]]), torch.tensor([[(seed >> 32) & ALL_ONES]]))
        words = philox4x32((quads, zero + position, zero, zero), key)
        for word in range(4):
            assert torch.equal(bits[row, word::4], words[word][0, : len(bits[row, word::4])])


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 50])
def test_vocabulary_bits_are_those_of_its_tokens(vocab_size: int) -> None:
    seed, position = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    expected = token_bits(torch.arange(vocab_size).unsqueeze(0), seed, position)
    assert torch.equal(vocabulary_bits(vocab_size, seed, position), expected)


def test_token_bits_by_row_and_by_column_agree() -> None:
    seed, position = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    whole = token_bits(torch.arange(90).unsqueeze(0), seed, position)
    chosen = torch.randint(0, 90, (len(SEEDS), 7), generator=torch.Generator().manual_seed(0))
    chosen_before = chosen.clone()
    assert torch.equal(token_bits(chosen, seed, position), whole.gather(1, chosen))
    assert torch.equal(chosen, chosen_before)
    assert torch.equal(token_bits(chosen[2:3], seed[2:3], position[2:3]), whole[2:3].gather(1, chosen[2:3]))


def test_equal_to_triton(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    num_tokens = 100
    program = tmp_path / "philox_in_triton.py"
    program.write_text(TRITON_PROGRAM)
    finished = subprocess.run(
        [sys.executable, str(program), json.dumps([SEEDS, POSITIONS, num_tokens])],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    expected = torch.tensor(json.loads(finished.stdout))
    actual = token_bits(torch.arange(num_tokens).unsqueeze(0), torch.tensor(SEEDS), torch.tensor(POSITIONS))
    assert torch.equal(actual, expected)


def test_noise_is_positive_and_finite() -> None:
    bits = torch.tensor([0, 1, 2**31, ALL_ONES - 1, ALL_ONES])
    before = bits.clone()
    noise = exponential_noise(bits)
    assert torch.equal(bits, before)
    assert torch.isfinite(noise).all()
    assert (noise > 0).all()
    # Exponential: -log of a number half a step away from the ends of (0, 1).
    assert noise[0].item() == pytest.approx(33 * 0.6931471805599453)
    assert noise[-1].item() == pytest.approx(2.0**-33, rel=1e-6)
    assert noise[-2].item() == pytest.approx(3 * 2.0**-33, rel=1e-6)


def test_noise_is_exponential() -> None:
    bits = token_bits(torch.arange(50_000).unsqueeze(0), torch.tensor([5]), torch.tensor([9]))
    noise = exponential_noise(bits)
    # Six standard errors of mean 1, and of the share above 1 (which is 1/e).
    assert abs(noise.mean().item() - 1.0) < 6 / 50_000**0.5
    assert abs((noise > 1).double().mean().item() - 0.36787944) < 6 * (0.3679 * 0.6321 / 50_000) ** 0.5
