"""The tokenizer is the one that transformers' ``AutoTokenizer`` builds, whichever files say what it is."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from rose_backend import LLM, SamplingParams
from rose_backend.engine.request import InputProcessor
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.engine.tokenizer_loading import (
    TokenizerLoading,
    TokenizerParts,
    load_tokenizer,
    read_backend,
)
from rose_backend.errors import ModelError, RequestError
from rose_backend.server.chat_template import ChatTemplate
from tests.support.llama_checkpoints import change_json, write_checkpoint
from tests.support.reference_generation import tie_free_answer
from tests.support.tokenizer_layouts import CHAT_TEMPLATE, LAYOUTS, write_layout

MESSAGES = [{"role": "user", "content": "hi there </s> "}, {"role": "assistant", "content": "Zürich 🙂"}]
TEXTS = [
    "<|im_start|>user\nhi<|im_end|>\n",
    "Once upon a time there was a rose",
    "  spaces \t and\n\nlines ",
    "naïve café 🙂中文 ¼",
    "<s>a</s> <s> b</s><|endoftext|>[SEP] <tool><image><pad>",
    " rosewood rose, the rose",
    "",
]
# Loads each layout as the process that serves loads it: without torch, and handed over.
LOAD_ALL = """
import msgspec, sys
sys.modules["torch"] = None
from pathlib import Path
from rose_backend.engine.tokenizer_loading import load_tokenizer, write_backend
from transformers import AutoTokenizer
paths = map(Path, sys.argv[2:])
loaded = {path.name: load_tokenizer(path) for path in paths}
Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(loaded, enc_hook=write_backend))
"""
NUM_BYTES = 256
AUTO_TOKENIZER = "transformers.models.auto.tokenization_auto"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return where each layout is."""
    root = tmp_path_factory.mktemp("layouts")
    return {name: write_layout(root / name, name) for name in LAYOUTS}


@pytest.fixture(scope="module")
def handed_over(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what one process without torch makes of all layouts."""
    output = tmp_path_factory.mktemp("parts") / "parts"
    command = [sys.executable, "-c", LOAD_ALL, str(output), *map(str, directories.values())]
    subprocess.run(command, check=True, env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"})
    return msgspec.msgpack.decode(output.read_bytes(), type=dict[str, TokenizerParts], dec_hook=read_backend)


@pytest.fixture(params=LAYOUTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(name: str, directories: dict[str, Path]) -> Any:
    """Return transformers' tokenizer of a layout."""
    return _expected(directories[name])


@cache
def _expected(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(directory))


@pytest.fixture
def tokenizer(name: str, handed_over: dict[str, TokenizerParts]) -> Tokenizer:
    return Tokenizer(handed_over[name])


def texts_of(expected: Any) -> list[str]:
    """Return texts in which every added token stands alone, between words and between spaces."""
    added = [each.content for each in expected.added_tokens_decoder.values()]
    named = [text for each in added for text in (each, f"hi{each}there", f" a {each} b {each}")]
    return [*TEXTS, *named, "".join(added)]


def test_there_are_enough_layouts() -> None:
    assert len(LAYOUTS) >= 30


def test_token_ids(name: str, tokenizer: Tokenizer, expected: Any) -> None:
    for text in texts_of(expected):
        for adds in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=adds)
            assert ids == expected.encode(text, add_special_tokens=adds), (text, adds)


def test_texts(name: str, tokenizer: Tokenizer, expected: Any) -> None:
    draw = random.Random(name)
    streams = [draw.choices(range(len(expected)), k=12) for _ in range(40)]
    for ids in [*streams, *map(expected.encode, texts_of(expected))]:
        for skips in (True, False):
            text = expected.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skips) == text, (ids, skips)


def test_special_tokens(tokenizer: Tokenizer, expected: Any) -> None:
    assert tokenizer.special_tokens == expected.special_tokens_map
    named = "eos_token" in expected.special_tokens_map
    assert tokenizer.eos_token_id == (expected.eos_token_id if named else None)


def test_completions_and_conversations(name: str, tokenizer: Tokenizer, expected: Any) -> None:
    processor = InputProcessor(
        tokenizer, vocab_size=len(expected), max_model_len=4096, max_num_seqs=1, seed=0, eos_token_ids=()
    )
    for text in filter(expected.encode, texts_of(expected)):
        assert processor.process(text, SamplingParams()).token_ids.tolist() == expected.encode(text)
    template = ChatTemplate(None)
    template.use(tokenizer)
    for adds in (True, False):
        options: Any = {"tokenize": True, "return_dict": False, "add_generation_prompt": adds}
        text = template.render(MESSAGES, add_generation_prompt=adds, max_length=1000)
        assert processor.encode(
            text, max_tokens=1000, add_special_tokens=False
        ) == expected.apply_chat_template(MESSAGES, **options)


@pytest.mark.parametrize(
    "name", ["qwen2", "split-special-tokens", "truncation-and-padding", "sentencepiece-file"]
)
def test_both_ways_to_load(name: str, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    here = Tokenizer(directories[name])
    monkeypatch.delitem(sys.modules, AUTO_TOKENIZER)
    there = Tokenizer(directories[name])
    for text in TEXTS:
        assert here.encode(text) == there.encode(text)
    assert (here.eos_token_id, here.special_tokens) == (there.eos_token_id, there.special_tokens)
    assert here.chat_templates == there.chat_templates == {"default": CHAT_TEMPLATE}


def test_the_files_of_a_model_with_tokens_in_its_config(directories: dict[str, Path]) -> None:
    assert Tokenizer(directories["qwen2"]).encode("<|im_start|>user\nhi<|im_end|>\n") == [
        378,
        362,
        199,
        305,
        379,
        199,
    ]


@pytest.mark.parametrize("name", ["truncation-and-padding", "truncation-and-padding-gpt2"])
def test_a_long_prompt_is_whole(name: str, directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer(directories[name])
    text = "Once upon a time there was a rose"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    processor = InputProcessor(
        tokenizer, vocab_size=400, max_model_len=20, max_num_seqs=1, seed=0, eos_token_ids=()
    )
    with pytest.raises(RequestError, match="allowed are at most 19"):
        processor.process(text * 20, SamplingParams())


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", "{not JSON"),
        ("tokenizer_config.json", "[1, 2]"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [3]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}'),
        ("tokenizer_config.json", '{"eos_token": {"content": 7}}'),
        ("tokenizer_config.json", '{"tokenizer_class": "BertModel"}'),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": "a"}',
        ),
        ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": 5}'),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": [{"a": 1}]}',
        ),
        ("tokenizer.json", "\0\1"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 3}}'),
        ("special_tokens_map.json", '["a"]'),
        ("config.json", '"gpt2"'),
        ("tokenizer_config.json", '{"chat_template": "\\ud800"}'),
    ],
)
def test_files_that_say_nonsense(tmp_path: Path, file: str, content: str) -> None:
    write_layout(tmp_path, "gpt2-without-config")
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=f"^{tmp_path}: ") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_file_of_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match=rf"^{tmp_path}: no tokenizer, one of tokenizer.json, "):
        load_tokenizer(tmp_path)


def test_nonsense_that_another_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout(tmp_path, "gpt2-without-config")
    (tmp_path / "tokenizer_config.json").write_text("{not JSON")
    monkeypatch.delitem(sys.modules, AUTO_TOKENIZER)
    with pytest.raises(ModelError, match=rf"^{tmp_path}: no usable tokenizer \(JSONDecodeError: "):
        load_tokenizer(tmp_path)


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    write_layout(tmp_path, "gpt2-without-config")
    (tmp_path / "config.json").write_text('{"model_type": "theirs"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": [null, "theirs.Theirs"]}}'
    )
    (tmp_path / "theirs.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(
        ModelError, match=r"no usable tokenizer \(ValueError: .* contains custom code"
    ) as caught:
        load_tokenizer(tmp_path)
    # transformers' error has several.
    assert "\n" not in str(caught.value)


def test_a_process_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout(tmp_path, "gpt2")
    monkeypatch.delitem(sys.modules, AUTO_TOKENIZER)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ModelError, match=r"no usable tokenizer \(loading it ended with exit code 1\)"):
        load_tokenizer(tmp_path)


def test_nobody_waits_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout(tmp_path, "gpt2")
    monkeypatch.delitem(sys.modules, AUTO_TOKENIZER)
    with TokenizerLoading(tmp_path) as loading:
        pass
    assert loading._process is not None and loading._process.returncode == -signal.SIGKILL


def test_a_token_that_the_model_does_not_have(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer(directories["qwen2"])
    processor = InputProcessor(
        tokenizer, vocab_size=379, max_model_len=40, max_num_seqs=1, seed=0, eos_token_ids=()
    )
    assert processor.process("hi <|im_start|>", SamplingParams()).token_ids[-1] == 378
    with pytest.raises(RequestError, match=r"prompt: .* '<\|im_end\|>', token 379, allowed are .* up to 378"):
        processor.process("hi <|im_end|> there", SamplingParams())


@pytest.mark.parametrize("named_by", ["tokenizer_config.json", "special_tokens_map.json"])
def test_an_answer_ends_at_the_end_token_of_other_files(named_by: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3", eos_token_id=None)
    (tmp_path / "generation_config.json").unlink()
    greedy = tie_free_answer(checkpoint, [3, 1, 4, 1, 5], 32)
    # The tokenizer of which tokenizer.json has all tokens below one that the model writes.
    last = max((each for each in greedy if each > NUM_BYTES), key=greedy.index)
    backend = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    backend["vocab"] = {text: index for text, index in backend["vocab"].items() if index < last}
    backend["merges"] = [pair for pair in backend["merges"] if "".join(pair) in backend["vocab"]]
    change_json(checkpoint / "tokenizer.json", model=backend)
    change_json(checkpoint / "tokenizer_config.json", eos_token="absent")
    change_json(checkpoint / named_by, eos_token="<|im_end|>")
    with LLM(str(checkpoint), device="cpu", dtype="float32", num_blocks=100) as llm:
        output = llm.generate([[3, 1, 4, 1, 5]], SamplingParams(temperature=0.0, max_tokens=32))[0].outputs[0]
    assert output.token_ids == list(greedy[: greedy.index(last) + 1]) and output.finish_reason == "stop"
