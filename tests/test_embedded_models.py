"""The models in models/: format, size, tokenizer, English and answers, pinned texts, and what quantization changes."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose_backend import LLM, SamplingParams
from rose_backend.layers.attention import AttentionMetadata
from rose_backend.models.base import load_model
from scripts.tiny_chat.conversations import conversations
from scripts.tiny_gpt2 import corpus
from scripts.train_tiny_chat import as_stream

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny-gpt2"
CHAT_MODEL = ROOT / "models" / "tiny-qwen3-chat"
FLOAT8_MODEL = ROOT / "models" / "tiny-qwen3-chat-fp8"
INT4_MODEL = ROOT / "models" / "tiny-qwen3-chat-w4a16"
SCHEMES = {FLOAT8_MODEL: "FP8_DYNAMIC", INT4_MODEL: "W4A16"}
each_quantized = pytest.mark.parametrize("quantized", SCHEMES, ids=["float8", "int4"])
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
    ("model_path", "max_bytes", "dtypes"),
    [
        (MODEL, 3_000_000, {torch.float16}),
        (CHAT_MODEL, 4_000_000, {torch.bfloat16}),
        (FLOAT8_MODEL, 2_000_000, {torch.bfloat16, torch.float8_e4m3fn}),
        (INT4_MODEL, 1_200_000, {torch.bfloat16, torch.int32, torch.int64}),
    ],
    ids=["tiny-gpt2", "tiny-qwen3-chat", "tiny-qwen3-chat-fp8", "tiny-qwen3-chat-w4a16"],
)
def test_weights_are_small(model_path: Path, max_bytes: int, dtypes: set[torch.dtype]) -> None:
    path = model_path / "model.safetensors"
    assert path.stat().st_size <= max_bytes
    tensors = load_file(path)
    assert {tensor.dtype for tensor in tensors.values()} == dtypes
    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values())
    trained = CHAT_MODEL if model_path in SCHEMES else model_path
    num_parameters = read_json("training_log.json", trained)["parameters"]
    numbers = [
        tensor.numel() * (8 if name.endswith("_packed") else 1)
        for name, tensor in tensors.items()
        if not name.endswith(("_scale", "_shape"))
    ]
    assert sum(numbers) == num_parameters


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


def ask(model: Path, **options: Any) -> dict[str, str]:
    """Ask all questions: each answer must come to its end, and at least eight must be sensible."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in SENSIBLE
    ]
    with LLM(str(model), num_blocks=200, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=120))
    answers = {question: output.outputs[0].text for question, output in zip(SENSIBLE, outputs, strict=True)}
    sensible = [question for question, pattern in SENSIBLE.items() if re.search(pattern, answers[question])]
    assert len(sensible) >= 8, answers
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    return answers


def answers_in_readme(model: Path) -> dict[str, str]:
    """Return the questions of a model's README and what it says of their answers."""
    text = (model / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return {question: answer for question, answer in rows if question in SENSIBLE}


@pytest.mark.gpu
@pytest.mark.parametrize("model", [CHAT_MODEL, *SCHEMES], ids=["bfloat16", "float8", "int4"])
def test_it_answers_on_a_gpu(model: Path) -> None:
    ask(model, device="cuda", dtype="bfloat16")


def test_it_answers_as_its_readme_says() -> None:
    ask(CHAT_MODEL, device="cpu", dtype="float32")
    assert answers_in_readme(CHAT_MODEL) == read_json("training_log.json", CHAT_MODEL)["answers"]


@each_quantized
def test_quantized_weights_change_the_answers_that_their_readme_names(quantized: Path) -> None:
    answers, of_quantized = (ask(model, device="cpu", dtype="float32") for model in (CHAT_MODEL, quantized))
    differing = {question: answer for question, answer in of_quantized.items() if answer != answers[question]}
    assert differing == answers_in_readme(quantized)


@torch.inference_mode()
def losses(model: Path) -> torch.Tensor:
    """Return the standalone engine's loss at each token of conversations that the model was not trained on."""
    length, block_size = 256, 16
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = torch.tensor(as_stream(tokenizer, conversations(200, 3)))
    windows = ids[: len(ids) // length * length].view(-1, length)
    num_tokens = windows.numel()
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(0, num_tokens + 1, length, dtype=torch.int32),
        num_computed_tokens=torch.zeros(len(windows), dtype=torch.int32),
        block_table=torch.arange(num_tokens // block_size, dtype=torch.int32).view(len(windows), -1),
        slot_mapping=torch.arange(num_tokens),
        num_decodes=0,
    )
    loaded = load_model(model)
    config = loaded.config
    cache = torch.zeros(
        *(config.num_layers, 2, num_tokens // block_size, block_size), config.num_kv_heads, config.head_size
    )
    positions = torch.arange(length).repeat(len(windows))
    logits = loaded.compute_logits(loaded.forward(windows.flatten(), positions, cache, metadata))
    predicted = logits.view(len(windows), length, -1)[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(predicted, windows[:, 1:].flatten(), reduction="none")


@each_quantized
def test_quantized_weights_keep_the_perplexity(quantized: Path) -> None:
    perplexity, of_quantized = (math.exp(losses(model).mean()) for model in (CHAT_MODEL, quantized))
    assert of_quantized == pytest.approx(perplexity, rel=0.01)


def dequantized(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight's numbers, float32, by compressed-tensors."""
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    quantization = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    scales = stored[f"{name}_scale"].float()
    if f"{name}_packed" not in stored:
        return quantization.dequantize(stored[name], scales)
    shape = torch.Size(stored[f"{name}_shape"].tolist())
    return quantization.dequantize(packing.unpack_from_int32(stored[f"{name}_packed"], 4, shape), scales)


@each_quantized
def test_quantized_weights_are_read_as_compressed_tensors_reads_them(quantized: Path, tmp_path: Path) -> None:
    stored = load_file(quantized / "model.safetensors")
    names = {re.sub("_(packed|scale|shape)$", "", name) for name in stored}
    dense = {name: dequantized(name, stored) if f"{name}_scale" in stored else stored[name] for name in names}
    shutil.copytree(CHAT_MODEL, tmp_path, dirs_exist_ok=True)
    save_file(dense, tmp_path / "model.safetensors", {"format": "pt"})
    assert ask(tmp_path, device="cpu", dtype="float32") == ask(quantized, device="cpu", dtype="float32")
    torch.testing.assert_close(losses(tmp_path), losses(quantized), rtol=1e-4, atol=1e-4)


@each_quantized
def test_the_script_writes_the_quantized_model(quantized: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from scripts.quantize_tiny_chat import quantize

    quantize(CHAT_MODEL, tmp_path, SCHEMES[quantized])
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in quantized.iterdir() if path.name in written}
    configs = [json.loads(files.pop("config.json")) for files in (written, shipped)]
    for config in configs:  # of compressed-tensors
        del config["quantization_config"]["version"]
    assert configs[0] == configs[1]
    assert written == shipped
