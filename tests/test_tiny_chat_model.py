"""models/tiny-qwen3-chat: its format and size, and that it answers what its README says, in the standalone engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from rose_backend import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny-qwen3-chat"
MAX_WEIGHT_BYTES = 4_000_000
SENSIBLE = {
    "Hello!": r"^Hello",
    "Who are you?": r"language model",
    "What colour is the sky?": r"\bblue\b",
    "What is the capital of France?": r"\bParis\b",
    "What is 7 plus 5?": r"\b12\b",
    "What is the opposite of hot?": r"\bcold\b",
    "How many legs does a spider have?": r"\b8\b",
    "Why is the sky blue?": r"[Ll]ight",
    "What is a KV cache?": r"keys and values",
    "Tell me a story about a fox.": r"^Once upon a time .*\bfox\b",
}
"""Questions of the model's README, and what a sensible answer has."""


def read_json(name: str) -> Any:
    return json.loads((MODEL / name).read_text(encoding="utf-8"))


def test_weights_are_small_and_bfloat16() -> None:
    path = MODEL / "model.safetensors"
    assert path.stat().st_size <= MAX_WEIGHT_BYTES
    with safe_open(path, framework="pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 (no mapping)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == read_json("training_log.json")["parameters"]


def check_answers(**options: Any) -> None:
    """Ask all questions: each answer must come to its end, and at least eight must be sensible."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in SENSIBLE
    ]
    with LLM(str(MODEL), num_blocks=200, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=120))
    answers = {question: output.outputs[0].text for question, output in zip(SENSIBLE, outputs, strict=True)}
    sensible = [question for question, pattern in SENSIBLE.items() if re.search(pattern, answers[question])]
    assert len(sensible) >= 8, answers
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


@pytest.mark.gpu
def test_it_answers_on_a_gpu() -> None:
    check_answers(device="cuda", dtype="bfloat16")


def test_it_answers_as_its_readme_says() -> None:
    check_answers(device="cpu", dtype="float32")
    rows = re.findall(
        r"^\| (.+?) \| (.+) \|$", (MODEL / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    written = {question: answer for question, answer in rows if question in SENSIBLE}
    assert written == read_json("training_log.json")["answers"]
