"""models/tiny-gpt2 and models/tiny-qwen3-chat: format, size, tokenizer, English and answers, and pinned texts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose_backend import LLM, SamplingParams
from scripts.tiny_gpt2 import corpus

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny-gpt2"
CHAT_MODEL = ROOT / "models" / "tiny-qwen3-chat"
END_OF_TEXT = "<|endoftext|>"
PROMPTS = (
    "When the sun rose the next morning, the prince",
    "The giant was so",
    "At last they came to",
)
MIN_DISTINCT_WORDS = 15


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """More threads than free cores make a model this small several times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def read_json(name: str, model: Path = MODEL) -> Any:
    return json.loads((model / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True).eval()


@pytest.mark.parametrize(
    ("model_path", "max_bytes", "dtype"),
    [(MODEL, 3_000_000, torch.float16), (CHAT_MODEL, 4_000_000, torch.bfloat16)],
    ids=["tiny-gpt2", "tiny-qwen3-chat"],
)
def test_weights_are_small(model_path: Path, max_bytes: int, dtype: torch.dtype) -> None:
    path = model_path / "model.safetensors"
    assert path.stat().st_size <= max_bytes
    with safe_open(path, framework="pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 (no mapping)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    num_parameters = read_json("training_log.json", model_path)["parameters"]
    assert sum(tensor.numel() for tensor in tensors.values()) == num_parameters


def test_shape_is_the_promised_one() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["n_embd"] // config["n_head"] == 64
    assert config["n_positions"] == 1024
    assert config["tie_word_embeddings"] is True


def test_end_of_text_is_the_same_everywhere(tokenizer: Any) -> None:
    token_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    assert len(tokenizer) == read_json("config.json")["vocab_size"]
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == token_id
    assert read_json("config.json")["eos_token_id"] == token_id
    assert read_json("generation_config.json")["eos_token_id"] == token_id
    assert tokenizer("A king.")["input_ids"][0] != token_id, "no start token is added to a prompt"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Once upon a time\n\n  there was",
        "don't , you ?",
        "na\u00efve \u2014 \u201cquoted\u201d",
        "\u6771\u4eac \U0001f9ff\u200d\u2728",
        "\x00\t\r\n",
    ],
)
def test_tokenizer_gives_text_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: END_OF_TEXT not in text))
def test_tokenizer_gives_any_text_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@torch.no_grad()
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_continuation_is_recognisable_english(tokenizer: Any, model: Any, prompt: str) -> None:
    common = set((ROOT / "tests" / "data" / "common_words.txt").read_text(encoding="utf-8").split())
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    words = re.findall(r"[a-z]+(?:'[a-z]+)?", tokenizer.decode(ids).lower())
    known = [word for word in words if word in common]
    assert len(words) >= 30, words
    assert len(known) >= 0.9 * len(words), sorted(set(words) - common)
    assert len(set(known)) >= MIN_DISTINCT_WORDS, words


@torch.no_grad()
def test_every_position_was_trained(tokenizer: Any, model: Any) -> None:
    """Untrained position embeddings would make the loss of the same text jump where they are used."""
    story = "The king said to his son: Go into the forest, and find the bird that sings at night. " * 80
    ids = tokenizer(story, return_tensors="pt")["input_ids"][:, :1024]
    assert ids.shape[1] == 1024
    logits = model(ids).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    blocks = [float(block.mean()) for block in losses[64:].split(64)]
    assert max(blocks) < 1.5 * min(blocks), blocks


def test_log_and_readme_name_every_text_of_the_manifest() -> None:
    books = corpus.read_manifest(ROOT / "scripts" / "tiny_gpt2" / "corpus.json")
    trained_on = {
        entry["gutenberg_id"]: entry["sha256"] for entry in read_json("training_log.json")["corpus"]
    }
    assert trained_on == {book.gutenberg_id: book.sha256 for book in books}
    readme = (MODEL / "README.md").read_text(encoding="utf-8")
    assert [book.title for book in books if f"| {book.title} |" not in readme] == []
    assert [book.gutenberg_id for book in books if f"| {book.gutenberg_id} |" not in readme] == []


def make_book(data: bytes) -> corpus.Book:
    return corpus.Book(
        "Title", "Author", 1, "https://invalid.example/1.txt", "1.txt", hashlib.sha256(data).hexdigest()
    )


def test_altered_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_bytes(b"a good text")
    assert corpus.obtain(make_book(b"a good text"), tmp_path) == "a good text"
    with pytest.raises(corpus.CorpusError, match=r"1\.txt .*SHA-256"):
        corpus.obtain(make_book(b"another text"), tmp_path)


def test_cleaning_keeps_prose_and_drops_the_wrapping() -> None:
    story = (
        "'I am the king of this\nwood,' said he.\n\nTHE SECOND PART\n\n"
        + "It was\na  _dark_ night\u2014very dark.\n\n" * 40
    )
    text = (
        "Title: A Tale\n*** START OF THIS PROJECT GUTENBERG EBOOK A TALE ***\nProduced by Somebody\n\n"
        f"{story}\nEnd of the Project Gutenberg EBook of A Tale\nlicence\n" + "licence text\n" * 5
    )
    (document,) = corpus.split_documents(corpus.strip_wrapping(text))
    paragraphs = document.split("\n")
    assert paragraphs[0] == '"I am the king of this wood," said he.'
    assert set(paragraphs[1:]) == {"It was a dark night--very dark."}
    with pytest.raises(corpus.CorpusError, match="header"):
        corpus.strip_wrapping("no header here")


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


def check_answers(**options: Any) -> None:
    """Ask all questions: each answer must come to its end, and at least eight must be sensible."""
    tokenizer = AutoTokenizer.from_pretrained(CHAT_MODEL, local_files_only=True)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in SENSIBLE
    ]
    with LLM(str(CHAT_MODEL), num_blocks=200, **options) as llm:
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
        r"^\| (.+?) \| (.+) \|$",
        (CHAT_MODEL / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    written = {question: answer for question, answer in rows if question in SENSIBLE}
    assert written == read_json("training_log.json", CHAT_MODEL)["answers"]
