"""GPT-2 against transformers in float32: logits of any chunking, tokens around block boundaries, every switch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rose_backend.config import Switches
from rose_backend.engine.startup.load import storage_bytes
from rose_backend.layers.attention import AttentionMetadata
from rose_backend.models.gpt2 import GPT2
from rose_backend.models.registry import load_model
from tests.support.moments import record_moments
from tests.support.tiny_checkpoint import write_random_gpt2

BLOCK_SIZE = 16
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


class Sequences:
    """Several sequences over one shuffled, NaN-filled cache, advanced in any steps."""

    def __init__(self, model: GPT2, token_ids: list[torch.Tensor], seed: int = 0) -> None:
        self.model = model
        self.token_ids = token_ids
        self.num_computed = [0] * len(token_ids)
        config = model.config
        width = -(-config.max_position_embeddings // BLOCK_SIZE)
        num_blocks = width * len(token_ids) + 1
        self.kv_cache = torch.full(
            (config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_size),
            float("nan"),
        )
        blocks = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.block_table = blocks.view(len(token_ids), width).to(torch.int32)

    def step(self, counts: list[int]) -> list[torch.Tensor]:
        """Compute ``counts[i]`` further tokens of each sequence in one step; return each one's logits."""
        rows = [row for row in range(len(counts)) if counts[row] == 1]
        num_decodes = len(rows)
        rows += [row for row in range(len(counts)) if counts[row] > 1]
        tokens, positions, slots = [], [], []
        for row in rows:
            span = torch.arange(self.num_computed[row], self.num_computed[row] + counts[row])
            tokens.append(self.token_ids[row][span])
            positions.append(span)
            slots.append(self.block_table[row].long()[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE)
        lengths = [counts[row] for row in rows]
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            num_computed_tokens=torch.tensor([self.num_computed[row] for row in rows], dtype=torch.int32),
            block_table=self.block_table[rows],
            slot_mapping=torch.cat(slots),
            num_decodes=num_decodes,
        )
        hidden = self.model.forward(torch.cat(tokens), torch.cat(positions), self.kv_cache, metadata)
        by_row = dict(zip(rows, self.model.compute_logits(hidden).split(lengths), strict=True))
        for row in rows:
            self.num_computed[row] += counts[row]
        return [by_row.get(row, torch.empty(0, self.model.config.vocab_size)) for row in range(len(counts))]


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
    sequences = Sequences(switched_model, tokens)
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
    sequences = Sequences(model, tokens)
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
    sequences = Sequences(model, list(prompts))
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
    model, lengths = switched_model, [20, 1, 33]
    tokens = [random_tokens(40, seed=seed) for seed in range(3)]
    plain, lean = Sequences(model, list(tokens)), Sequences(model, list(tokens))
    for sequences in (plain, lean):
        sequences.step([5, 6, 7])
    input_ids = torch.cat([tokens[row][5 + row :][:length] for row, length in enumerate(lengths)])
    spans = [torch.arange(5 + row, 5 + row + length) for row, length in enumerate(lengths)]
    slots = [
        lean.block_table[row].long()[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE
        for row, span in enumerate(spans)
    ]
    metadata = AttentionMetadata(
        # Two rows of padding behind, without tokens.
        query_start_loc=torch.tensor([0, 20, 21, 54, 54, 54], dtype=torch.int32),
        num_computed_tokens=torch.tensor([5, 6, 7, -1, -1], dtype=torch.int32),
        block_table=lean.block_table[[0, 1, 2, 0, 0]],
        slot_mapping=torch.cat(slots),
        num_decodes=0,
    )
    expected = model.forward(input_ids, torch.cat(spans), plain.kv_cache, metadata)
    actual = model.forward(
        input_ids, torch.cat(spans), lean.kv_cache, replace(metadata, last_tokens_only=True)
    )
    assert actual.shape == (5, model.config.hidden_size)
    torch.testing.assert_close(actual[:3], expected[[19, 20, 53]], rtol=0, atol=1e-5)
    torch.testing.assert_close(lean.kv_cache, plain.kv_cache, rtol=0, atol=0, equal_nan=True)
    nothing = replace(metadata, query_start_loc=torch.zeros(3, dtype=torch.int32), last_tokens_only=True)
    nothing = replace(nothing, num_computed_tokens=torch.tensor([-1, -1], dtype=torch.int32))
    hidden = model.forward(
        input_ids, torch.cat(spans), lean.kv_cache, replace(nothing, block_table=lean.block_table[:2])
    )
    assert hidden.shape == (2, model.config.hidden_size)


def test_padding_rows_change_nothing(model: GPT2) -> None:
    tokens = [random_tokens(20, seed=1), random_tokens(20, seed=2)]
    plain, padded = Sequences(model, list(tokens)), Sequences(model, list(tokens))
    for sequences in (plain, padded):
        sequences.step([19, 19])
    expected = plain.step([1, 1])
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(5, dtype=torch.int32),
        num_computed_tokens=torch.tensor([19, -1, 19, -1], dtype=torch.int32),
        block_table=padded.block_table[[0, 0, 1, 1]],
        slot_mapping=torch.tensor([-1, -1, -1, -1]),
        num_decodes=4,
    )
    input_ids = torch.tensor([tokens[0][19], 0, tokens[1][19], 0])
    hidden = model.forward(input_ids, torch.tensor([19, 0, 19, 0]), padded.kv_cache, metadata)
    logits = model.compute_logits(hidden)
    torch.testing.assert_close(logits[0:1], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[2:3], expected[1], rtol=0, atol=1e-5)
    assert torch.equal(padded.kv_cache.isnan(), plain.kv_cache.isnan())


def test_only_the_tokens_slots_are_written(switched_model: GPT2) -> None:
    sequences = Sequences(switched_model, [random_tokens(21)])
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
    expected = Sequences(model, [tokens]).step([40])[0]
    sequences = Sequences(half, [tokens])
    sequences.kv_cache = sequences.kv_cache.to(half.config.dtype)
    actual = torch.cat((sequences.step([39])[0], sequences.step([1])[0]))
    assert actual.dtype == torch.float32
    # Relative to the spread of the logits: bfloat16 keeps 8 bits, and some dozen roundings add up.
    spread = expected.std()
    bound = 0.01 if dtype == "float16" else 0.08
    assert (actual - expected).abs().mean() / spread < bound
