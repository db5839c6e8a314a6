"""GPT-2 against transformers in float32: logits of any chunking, tokens around block boundaries, every switch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rose_backend.config import Switches
from rose_backend.engine.startup import storage_bytes
from rose_backend.layers.attention import AttentionMetadata
from rose_backend.models.base import load_model
from rose_backend.models.gpt2 import GPT2
from tests.support.moments import record_moments
from tests.support.paged_sequences import BLOCK_SIZE, PagedSequences
from tests.support.tiny_checkpoint import write_random_gpt2

VOCAB_SIZE = 512
TOLERANCE = 1e-4
MODEL_SWITCHES = ["fused_kv_append", "fused_mlp", "fused_add_layernorm"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gpt2(tmp_path_factory.mktemp("gpt2"), vocab_size=VOCAB_SIZE, n_positions=256)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> GPT2:
    return load_model(checkpoint)


def random_tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def reference_logits(reference: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference(token_ids.unsqueeze(0)).logits[0]


@pytest.fixture(params=[None, *MODEL_SWITCHES, "all"])
def switched_model(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[GPT2]:
    off = MODEL_SWITCHES if request.param == "all" else [request.param] if request.param else []
    yield load_model(checkpoint, switches=Switches(**dict.fromkeys(off, False)))


def test_logits_of_chunks_and_decodes(switched_model: GPT2, reference: torch.nn.Module) -> None:
    tokens = [random_tokens(200, seed=1), random_tokens(90, seed=2), random_tokens(49, seed=3)]
    sequences = PagedSequences(switched_model, tokens)
    steps = [(100, 15, 0), (1, 1, 16), (1, 16, 1), (14, 1, 1), (1, 40, 30), (83, 17, 1)]
    parts: list[list[torch.Tensor]] = [[], [], []]
    for counts in steps:
        for row, logits in enumerate(sequences.step(list(counts))):
            parts[row].append(logits)
    for row, token_ids in enumerate(tokens):
        actual = torch.cat(parts[row])
        assert actual.dtype == torch.float32
        assert len(actual) == len(token_ids)
        expected = reference_logits(reference, token_ids)
        assert expected.std() > 0.5
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_the_way_for_few_decodes_agrees(
    checkpoint: Path, reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Taken by itself on a GPU only.
    model = load_model(checkpoint)
    assert isinstance(model, GPT2)
    num_bytes = storage_bytes(model.weights)
    model.pack_for_small_batches()
    # No matrix is there twice; a packed layer has vectors of its own.
    assert storage_bytes(model.weights) < 1.02 * num_bytes
    tokens = [random_tokens(30, seed=1), random_tokens(21, seed=2), random_tokens(17, seed=3)]
    sequences = PagedSequences(model, tokens)
    sequences.step([20, 16, 1])
    seen = record_moments(monkeypatch)
    for index in range(5):
        for row, logits in enumerate(sequences.step([1, 1, 1])):
            expected = reference_logits(reference, tokens[row])[(20, 16, 1)[row] + index]
            torch.testing.assert_close(logits[0], expected, rtol=0, atol=TOLERANCE)
    assert len(seen) == 5 * 2 * model.config.num_layers


def test_greedy_tokens_around_block_boundaries(model: GPT2, reference: torch.nn.Module) -> None:
    lengths = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 200]
    num_new = 24
    prompts = [random_tokens(length, seed=length) for length in lengths]
    sequences = PagedSequences(model, prompts)
    counts = lengths
    for _ in range(num_new):
        for row, logits in enumerate(sequences.step(counts)):
            sequences.token_ids[row] = torch.cat((sequences.token_ids[row], logits[-1:].argmax(-1)))
        counts = [1] * len(lengths)
    continuations = set()
    for prompt, actual in zip(prompts, sequences.token_ids, strict=True):
        # One pass suffices: if every token is the reference's choice after those before it, so is the whole text.
        choices = reference_logits(reference, actual[:-1]).argmax(-1)
        assert torch.equal(actual[len(prompt) :], choices[len(prompt) - 1 :])
        continuations.add(tuple(actual[-num_new:].tolist()))
    assert len(continuations) == len(lengths), "the random model should continue each prompt differently"


def test_last_tokens_alone(switched_model: GPT2) -> None:
    model = switched_model
    tokens = [random_tokens(40, seed=seed) for seed in range(3)]
    plain, lean = PagedSequences(model, tokens), PagedSequences(model, tokens)
    for sequences in (plain, lean):
        sequences.step([5, 6, 7])
    input_ids, positions, metadata = lean.inputs([0, 1, 2], [20, 1, 33])
    metadata = replace(
        metadata,
        # Two rows of padding after them, without tokens.
        query_start_loc=torch.tensor([0, 20, 21, 54, 54, 54], dtype=torch.int32),
        num_computed_tokens=torch.tensor([5, 6, 7, -1, -1], dtype=torch.int32),
        block_table=lean.block_table[[0, 1, 2, 0, 0]],
    )
    last_only = replace(metadata, last_tokens_only=True)
    expected = model.forward(input_ids, positions, plain.kv_cache, metadata)
    actual = model.forward(input_ids, positions, lean.kv_cache, last_only)
    assert actual.shape == (5, model.config.hidden_size)
    torch.testing.assert_close(actual[:3], expected[[19, 20, 53]], rtol=0, atol=1e-5)
    torch.testing.assert_close(lean.kv_cache, plain.kv_cache, rtol=0, atol=0, equal_nan=True)
    nothing = replace(
        last_only,
        query_start_loc=torch.zeros(3, dtype=torch.int32),
        num_computed_tokens=torch.tensor([-1, -1], dtype=torch.int32),
        block_table=lean.block_table[:2],
    )
    hidden = model.forward(input_ids, positions, lean.kv_cache, nothing)
    assert hidden.shape == (2, model.config.hidden_size)


def test_padding_rows_change_nothing(model: GPT2) -> None:
    tokens = [random_tokens(20, seed=1), random_tokens(20, seed=2)]
    plain, padded = PagedSequences(model, tokens), PagedSequences(model, tokens)
    for sequences in (plain, padded):
        sequences.step([19, 19])
    expected = torch.cat(plain.step([1, 1]))
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(5, dtype=torch.int32),
        num_computed_tokens=torch.tensor([19, -1, 19, -1], dtype=torch.int32),
        block_table=padded.block_table[[0, 0, 1, 1]],
        slot_mapping=torch.tensor([-1, -1, -1, -1]),
        num_decodes=4,
    )
    input_ids = torch.tensor([tokens[0][19], 0, tokens[1][19], 0])
    hidden = model.forward(input_ids, torch.tensor([19, 0, 19, 0]), padded.kv_cache, metadata)
    torch.testing.assert_close(model.compute_logits(hidden)[::2], expected, rtol=0, atol=1e-5)
    assert torch.equal(padded.kv_cache.isnan(), plain.kv_cache.isnan())


def test_only_the_tokens_slots_are_written(switched_model: GPT2) -> None:
    sequences = PagedSequences(switched_model, [random_tokens(21)])
    sequences.step([21])
    written = ~sequences.kv_cache.isnan()
    expected = torch.zeros_like(written)
    for position in range(21):
        block = int(sequences.block_table[0, position // BLOCK_SIZE])
        expected[:, :, block, position % BLOCK_SIZE] = True
    assert torch.equal(written, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_follow_float32(checkpoint: Path, model: GPT2, dtype: str) -> None:
    half = load_model(checkpoint, dtype=dtype)
    assert half.config.dtype == getattr(torch, dtype)
    tokens = random_tokens(40)
    expected = PagedSequences(model, [tokens]).step([40])[0]
    sequences = PagedSequences(half, [tokens])
    actual = torch.cat((sequences.step([39])[0], sequences.step([1])[0]))
    assert actual.dtype == torch.float32
    # Relative to the spread of the logits: bfloat16 keeps 8 bits, and some dozen roundings add up.
    spread = expected.std()
    bound = 0.01 if dtype == "float16" else 0.08
    assert (actual - expected).abs().mean() / spread < bound
