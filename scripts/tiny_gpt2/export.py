"""What the training leaves behind: float16 weights, configuration, a log, sample continuations."""

from __future__ import annotations

import dataclasses
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GPT2LMHeadModel, PreTrainedTokenizerFast

from tiny_gpt2.corpus import Book, Corpus
from tiny_gpt2.training import TrainingResult, TrainingSettings

MAX_WEIGHT_BYTES = 3_000_000
SAMPLE_PROMPTS = (
    "Once upon a time there was a king who had",
    "The old woman looked at the little girl and said,",
    "Dorothy and the Scarecrow walked along the road",
    "In the middle of the forest stood a small house, and",
    "When the sun rose the next morning, the prince",
)


def save_model(model: GPT2LMHeadModel, output: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors in float16.

    Raises ValueError when the weights are larger than ``MAX_WEIGHT_BYTES``.
    """
    weights = model.half().cpu().eval()
    end_of_text = weights.config.eos_token_id
    weights.generation_config = GenerationConfig(
        bos_token_id=end_of_text, eos_token_id=end_of_text, pad_token_id=end_of_text, do_sample=False
    )
    weights.save_pretrained(output)
    size = (output / "model.safetensors").stat().st_size
    if size > MAX_WEIGHT_BYTES:
        raise ValueError(f"model.safetensors has {size} bytes, at most {MAX_WEIGHT_BYTES} are allowed")


@torch.no_grad()
def greedy_samples(output: Path, new_tokens: int = 60) -> dict[str, str]:
    """Load the written files in float32 on the CPU; return one greedy continuation per sample prompt."""
    model = GPT2LMHeadModel.from_pretrained(output, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output, local_files_only=True)
    samples = {}
    for prompt in SAMPLE_PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=new_tokens,
            do_sample=False,
        )[0]
        samples[prompt] = tokenizer.decode(ids[inputs["input_ids"].shape[1] :])
    return samples


def write_log(
    output: Path,
    *,
    books: list[Book],
    corpus: Corpus,
    token_counts: dict[str, int],
    settings: TrainingSettings,
    result: TrainingResult,
    float16_validation: float,
) -> None:
    """Write training_log.json: texts and hashes, settings, losses, versions. Nothing about the machine."""
    log: dict[str, Any] = {
        "parameters": result.model.num_parameters(),
        "documents": {"train": len(corpus.train), "validation": len(corpus.validation)},
        "tokens": token_counts,
        "settings": dataclasses.asdict(settings),
        "best": dataclasses.asdict(result.best),
        "float16_validation": round(float16_validation, 4),
        "evaluations": [
            {"step": e.step, "train": round(e.train, 4), "validation": round(e.validation, 4)}
            for e in result.evaluations
        ],
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")},
        "corpus": [
            {"gutenberg_id": book.gutenberg_id, "title": book.title, "file": book.file, "sha256": book.sha256}
            for book in books
        ],
    }
    (output / "training_log.json").write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
