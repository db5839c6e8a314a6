"""Published shapes with random weights, and windows of 131,072 tokens: logits as near to float32 as torch's own.

On a CPU the same code runs over small shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.layers.attention import AttentionMetadata
from rose_backend.models.base import load_model

BLOCK_SIZE = 16
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}


PLAIN = {"rope_type": "default", "rope_theta": 1_000_000.0}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (
        LlamaConfig,
        {"vocab_size": 128_256, "rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 131_072},
    ),
    "qwen3": (Qwen3Config, {"max_position_embeddings": 40_960, "tie_word_embeddings": True}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "max_position_embeddings": 40_960,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
}
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size"),
)


def shape(family: str, *sizes: int, **changes: Any) -> PreTrainedConfig:
    """Return a config with these ``SIZES``."""
    config, fields = FAMILIES[family]
    common = {"vocab_size": 151_936, "rope_parameters": PLAIN, "rms_norm_eps": 1e-5}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return config(**dict(zip(SIZES, sizes, strict=True)), **{**common, **ends, **fields, **changes})


SHAPES = {
    "Qwen3 0.6B": shape("qwen3", 1024, 28, 16, 8, 128, 3072),
    "Llama 3.2 1B": shape("llama", 2048, 16, 32, 8, 64, 8192, tie_word_embeddings=True),
    # All of 8 experts: which of 128 a token takes is decided by rounding.
    "Qwen3 30B-A3B, 2 layers": shape("qwen3-moe", 2048, 2, 32, 4, 128, 6144, num_experts=8),
    # A quarter of its layers: all of them in float32 and in 16 bits would take a minute to make.
    "Llama 3.1 8B, 8 layers": shape("llama", 4096, 8, 32, 8, 128, 14_336),
}
WHOLE_8B = shape("llama", 4096, 32, 32, 8, 128, 14_336)
FAR = {"vocab_size": 1000, "max_position_embeddings": 131_072}
LONG = {
    "llama3": shape("llama", 512, 2, 4, 1, 128, 1024, **FAR),
    "yarn": shape("qwen3", 512, 2, 4, 2, 128, 1024, rope_parameters=YARN, **FAR),
}
NEAR = {"vocab_size": 300, "max_position_embeddings": 512}
OLD_WINDOW = {"original_max_position_embeddings": 128}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
SMALL = {
    "experts": shape("qwen3-moe", 64, 2, 4, 2, 16, 128, **NEAR, **FEW_EXPERTS),
    "llama3": shape("llama", 64, 2, 4, 1, 16, 128, **NEAR, rope_parameters=LLAMA3_ROPE | OLD_WINDOW),
    "yarn": shape("qwen3", 64, 2, 4, 2, 16, 128, **NEAR, rope_parameters=YARN | OLD_WINDOW),
}


@dataclass
class Case:
    """A model, the same weights in transformers' model, and a cache of shuffled blocks full of NaN."""

    model: Any
    path: Path
    device: str
    dtype: torch.dtype

    @classmethod
    def make(cls, path: Path, config: Any, dtype: torch.dtype, device: str) -> Case:
        torch.manual_seed(0)
        with torch.device(device):
            reference = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for parameter in reference.parameters():
            if parameter.ndim == 1:
                parameter.data.normal_(1.0, 0.1)
        reference.save_pretrained(path)
        del reference
        model = load_model(path, dtype=str(dtype).removeprefix("torch."), device=device)
        return cls(model, path, device, dtype)

    def cache(self, num_blocks: int) -> torch.Tensor:
        config = self.model.config
        shape = (config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_size)
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)

    def expected(self, tokens: torch.Tensor, keep: int) -> list[torch.Tensor]:
        """Return logits of the last ``keep`` tokens of each row, [B, keep, V]: float64 of float32, and of the dtype."""
        results = []
        for dtype in (torch.float32, self.dtype):
            reference = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype).to(self.device).eval()
            is_long = tokens.shape[1] > 8192 and dtype == torch.float32
            with torch.inference_mode(), _attending_in_chunks() if is_long else contextlib.nullcontext():
                parts = [
                    reference(part, logits_to_keep=keep, use_cache=False).logits
                    for part in tokens.split(max(8192 // tokens.shape[1], 1))
                ]
            results.append(torch.cat(parts))
            del reference
            if self.device == "cuda":
                torch.cuda.empty_cache()
        return [results[0].double(), results[1]]

    @torch.inference_mode()
    def step(
        self,
        cache: torch.Tensor,
        table: torch.Tensor,  # [B, MB]
        tokens: torch.Tensor,  # [B, Q]
        start: int,
    ) -> torch.Tensor:
        """Compute a chunk of each row, and return the logits of its last token, [B, V]."""
        num_rows, count = tokens.shape
        span = torch.arange(start, start + count, device=self.device)
        slots = table.long()[:, span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE
        metadata = AttentionMetadata(
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=self.device) * count,
            num_computed_tokens=torch.full((num_rows,), start, dtype=torch.int32, device=self.device),
            block_table=table,
            slot_mapping=slots.reshape(-1),
            num_decodes=num_rows if count == 1 else 0,
        )
        positions = span.repeat(num_rows)
        hidden = self.model.forward(tokens.reshape(-1), positions, cache, metadata)
        last = torch.arange(1, num_rows + 1, device=self.device) * count - 1
        return self.model.compute_logits(hidden[last])


@contextlib.contextmanager
def _attending_in_chunks() -> Iterator[None]:
    """Replace torch's attention, whose float32 way keeps all products at once: 64 GiB for 131,072 tokens."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        assert options.get("is_causal") and options.get("attn_mask") is None
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = torch.empty_like(query)
        for start in range(0, query.shape[2], 1024):
            stop = min(start + 1024, query.shape[2])
            logits = query[:, :, start:stop] @ key[:, :, :stop].transpose(2, 3) * options["scale"]
            hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=query.device).triu(start + 1)
            out[:, :, start:stop] = logits.masked_fill_(hidden, float("-inf")).softmax(3) @ value[:, :, :stop]
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        yield


def random_tokens(config: Any, num_rows: int, length: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(config.vocab_size, (num_rows, length), generator=generator).to(device)


def shuffled_table(num_rows: int, width: int, device: str, first: int = 1) -> torch.Tensor:
    blocks = torch.randperm(num_rows * width, generator=torch.Generator().manual_seed(4)) + first
    return blocks.view(num_rows, width).int().to(device)


def check_rows(path: Path, config: Any, dtype: torch.dtype, device: str, rows: list[int]) -> None:
    """Compare a chunk, a chunk behind it, and single tokens of 1 and more sequences."""
    case = Case.make(path, config, dtype, device)
    length, cut = 40, 23
    tokens = random_tokens(config, max(rows), length, device)
    exact, same = case.expected(tokens, keep=length - cut + 1)
    wrong = []
    for num_rows in rows:
        table = shuffled_table(num_rows, -(-length // BLOCK_SIZE), device)
        cache = case.cache(table.numel() + 1)
        ends = [(0, cut), (cut, length - 2), (length - 2, length - 1), (length - 1, length)]
        for start, stop in ends:
            actual = case.step(cache, table, tokens[:num_rows, start:stop], start)
            index = stop - cut
            try:
                assert_within_budget(actual.to(dtype), exact[:num_rows, index], same[:num_rows, index])
            except AssertionError as error:
                wrong.append(f"{num_rows} rows, tokens {start} to {stop}: {error}")
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_rows(tmp_path, SHAPES[name], dtype, "cuda", [1, 32, 256])


@pytest.mark.gpu
def test_all_layers_of_llama_8b(tmp_path: Path) -> None:
    check_rows(tmp_path, WHOLE_8B, torch.bfloat16, "cuda", [1, 32, 256])


@pytest.mark.parametrize("name", SMALL)
def test_small_shapes(name: str, tmp_path: Path) -> None:
    check_rows(tmp_path, SMALL[name], torch.bfloat16, "cpu", [1, 5])


def check_long(path: Path, config: Any, device: str, lengths: list[int], chunk: int, far: int) -> None:
    """Compare single tokens behind long contexts that were computed in chunks; the last block ids are ``far``."""
    dtype = torch.bfloat16
    case = Case.make(path, config, dtype, device)
    tokens = random_tokens(config, 1, max(lengths) + 1, device)
    width = -(-(max(lengths) + 1) // BLOCK_SIZE)
    table = shuffled_table(1, width, device, first=far)
    cache = case.cache(far + width)
    done = 0
    for length in sorted(lengths):
        while done < length:
            stop = min(done + chunk, length)
            prompt = case.step(cache, table, tokens[:, done:stop], done)
            done = stop
        actual = case.step(cache, table, tokens[:, length : length + 1], length)
        exact, same = case.expected(tokens[:, : length + 1], keep=2)
        assert_within_budget(prompt.to(dtype), exact[:, 0], same[:, 0])
        assert_within_budget(actual.to(dtype), exact[:, 1], same[:, 1])
        done = length + 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG)
def test_long_contexts(name: str, tmp_path: Path) -> None:
    config = LONG[name]
    # Elements of one layer's keys and values up to a block of the sequence: beyond 2^31.
    far = 2**31 // (BLOCK_SIZE * config.num_key_value_heads * config.head_dim) + 5
    check_long(tmp_path, config, "cuda", [32_768, 131_070], 8192, far)


@pytest.mark.parametrize("name", SMALL)
def test_contexts_of_a_small_window(name: str, tmp_path: Path) -> None:
    check_long(tmp_path, SMALL[name], "cpu", [130, 510], 100, far=7)
