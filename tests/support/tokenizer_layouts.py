"""Directories with tokenizers, laid out as real repositories have them: what a tokenizer is, several files say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TRAINING_TEXT = [
    "Once upon a time there was a rose in the garden of the king.",
    "The king said to the rose: you are red, and the garden is green.",
    "user assistant system hi hello there, how are you? I'm fine, thanks.",
    "Zürich, São Paulo, naïve café, 12 roses and 3,456 thorns.",
] * 4
CHAT_TEMPLATE = (
    "{{ bos_token if bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Change = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Layout:
    """One directory.

    Attributes:
        base: name of a function below that makes ``tokenizer.json``.
        model_type: of ``config.json``.
        config: ``tokenizer_config.json``; None: there is none.
        files: others, as JSON.
        change: edits ``tokenizer.json``; None: nothing.
        leaves: files that stay, where ``tokenizer.json`` does not.
    """

    base: str
    model_type: str
    config: Mapping[str, Any] | None
    files: Mapping[str, Any] = field(default_factory=dict)
    change: Change | None = None
    leaves: tuple[str, ...] = ("tokenizer.json",)


def token(content: str, **flags: bool) -> dict[str, Any]:
    """Return an added token as JSON."""
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    """Return an added token as the fields of ``tokenizer_config.json`` have it."""
    return {"__type": "AddedToken", **token(content, **flags)}


def decoder_of(base: str, *tokens: dict[str, Any]) -> dict[str, Any]:
    """Return ``added_tokens_decoder`` with tokens behind those of a base."""
    ids = ids_behind(base, *(each["content"] for each in tokens))
    return {str(ids[each["content"]]): each for each in tokens}


def ids_behind(base: str, *names: str) -> dict[str, int]:
    """Return ids of tokens behind those of a base."""
    start = _bases()[base].get_vocab_size()
    return {name: start + index for index, name in enumerate(names)}


def _byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TRAINING_TEXT, trainer)
    return made


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _pieces() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *_BYTES], show_progress=False
    )
    made.train_from_iterator(TRAINING_TEXT, trainer)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    content = json.loads(made.to_str())
    # The trainer makes byte tokens special, and published ones are not.
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] not in _BYTES]
    content["model"].update(byte_fallback=True, fuse_unk=True)
    return Tokenizer.from_str(json.dumps(content))


def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TRAINING_TEXT, trainer)
    made.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return made


def _words() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    made.train_from_iterator(TRAINING_TEXT, trainer)
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


@cache
def _bases() -> dict[str, Tokenizer]:
    return {
        "byte-level": _byte_level(),
        "pieces": _pieces(),
        "unigram": _unigram(),
        "words": _words(),
        "sentencepiece": _pieces(),
    }


def _add(*tokens: dict[str, Any]) -> Change:
    """Return a change that adds tokens behind all others."""

    def change(content: dict[str, Any]) -> None:
        start = max(
            [*content["model"]["vocab"].values(), *(each["id"] for each in content["added_tokens"])],
        )
        for index, each in enumerate(tokens):
            content["added_tokens"].append({"id": start + 1 + index, **each})

    return change


def _begin_with(name: str) -> Change:
    def change(content: dict[str, Any]) -> None:
        (index,) = (each["id"] for each in content["added_tokens"] if each["content"] == name)
        made = processors.TemplateProcessing(f"{name} $A", f"{name} $A {name} $B", [(name, index)])
        backend = Tokenizer(models.BPE())
        backend.post_processor = made
        content["post_processor"] = json.loads(backend.to_str())["post_processor"]

    return change


def _save_training_state(length: int, direction: str) -> Change:
    def change(content: dict[str, Any]) -> None:
        backend = Tokenizer(models.BPE())
        backend.enable_truncation(length)
        backend.enable_padding(direction=direction, pad_id=1, pad_token="<|endoftext|>", length=2 * length)
        saved = json.loads(backend.to_str())
        content.update(truncation=saved["truncation"], padding=saved["padding"])

    return change


_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
_END = {"eos_token": "<|endoftext|>"}
_CHATML = [token("<|im_start|>"), token("<|im_end|>")]
_NAMED = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_QWEN = {
    "tokenizer_class": "Qwen2Tokenizer",
    "added_tokens_decoder": decoder_of("byte-level", *_CHATML),
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "add_prefix_space": False,
    "bos_token": None,
    "split_special_tokens": False,
    **_NAMED,
}
_LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_LLAMA_TYPED = {
    **_LLAMA,
    "bos_token": typed("<s>"),
    "eos_token": typed("</s>"),
    "unk_token": typed("<unk>"),
    "added_tokens_decoder": {"0": token("<unk>"), "1": token("<s>"), "2": token("</s>")},
}

LAYOUTS: dict[str, Layout] = {
    "gpt2": Layout("byte-level", "gpt2", {"tokenizer_class": "GPT2Tokenizer", **_END}),
    "gpt2-without-config": Layout("byte-level", "gpt2", None),
    "gpt2-slow-files": Layout("byte-level", "gpt2", {}, leaves=("vocab.json", "merges.txt")),
    "gpt2-prefix-space": Layout(
        "byte-level", "gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, **_END}
    ),
    "llama3": Layout(
        "byte-level",
        "llama",
        {**_FAST, "bos_token": "<|begin|>", "eos_token": "<|im_end|>"},
        change=lambda content: (
            _add(token("<|begin|>"), *_CHATML)(content),
            _begin_with("<|begin|>")(content),
        )[0],
    ),
    "llama3-tokens-in-config": Layout(
        "byte-level",
        "llama",
        {**_FAST, "eos_token": "<|im_end|>", "added_tokens_decoder": decoder_of("byte-level", *_CHATML)},
    ),
    "qwen2": Layout("byte-level", "qwen2", _QWEN),
    "qwen3": Layout("byte-level", "qwen3", _QWEN),
    "qwen2-slow-files": Layout("byte-level", "qwen2", _QWEN, leaves=("vocab.json", "merges.txt")),
    "added-tokens-file": Layout(
        "byte-level",
        "qwen3",
        {"tokenizer_class": "Qwen2Tokenizer", **_NAMED},
        {"added_tokens.json": ids_behind("byte-level", "<|im_start|>", "<|im_end|>", "<tool>")},
        leaves=("vocab.json", "merges.txt"),
    ),
    "special-tokens-map": Layout(
        "byte-level",
        "gpt_neox",
        _FAST,
        {"special_tokens_map.json": {**_NAMED, "bos_token": token("<|im_start|>")}},
    ),
    "additional-special-tokens": Layout(
        "byte-level",
        "llama",
        {**_FAST, **_NAMED, "additional_special_tokens": ["<|im_start|>", typed("<tool>")]},
    ),
    "extra-special-tokens": Layout(
        "byte-level", "llama", {**_FAST, **_NAMED, "extra_special_tokens": ["<|im_start|>", "<tool>"]}
    ),
    "named-extra-special-tokens": Layout(
        "byte-level", "llama", {**_FAST, **_NAMED, "extra_special_tokens": {"image_token": "<image>"}}
    ),
    "split-special-tokens": Layout(
        "byte-level", "qwen2", {**_QWEN, "split_special_tokens": True}, change=_add(*_CHATML)
    ),
    "special-in-config-only": Layout(
        "byte-level",
        "llama",
        {**_FAST, **_NAMED, "added_tokens_decoder": decoder_of("byte-level", *_CHATML)},
        change=_add(token("<|im_start|>", special=False), token("<|im_end|>", special=False)),
    ),
    "special-in-json-only": Layout(
        "byte-level",
        "llama",
        {
            **_FAST,
            **_END,
            "added_tokens_decoder": decoder_of(
                "byte-level", token("<|im_start|>", special=False), token("<|im_end|>", special=False)
            ),
        },
        change=_add(*_CHATML),
    ),
    "stripping-tokens": Layout(
        "byte-level",
        "llama",
        {
            **_FAST,
            **_END,
            "added_tokens_decoder": decoder_of(
                "byte-level",
                token("<|im_start|>", lstrip=True),
                token("<|im_end|>", rstrip=True),
                token("rose", special=False, single_word=True, normalized=True),
            ),
        },
    ),
    "adds-both-ends": Layout(
        "byte-level",
        "llama",
        {**_FAST, **_NAMED, "bos_token": "<|im_start|>", "add_bos_token": True, "add_eos_token": True},
    ),
    "adds-no-start": Layout(
        "byte-level",
        "llama",
        {**_FAST, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False},
        change=lambda content: (_add(*_CHATML)(content), _begin_with("<|im_start|>")(content))[0],
    ),
    "class-of-another-library": Layout(
        "byte-level", "llama", {"tokenizer_class": "SomebodysTokenizer", **_END}, change=_add(*_CHATML)
    ),
    "deepseek": Layout(
        "byte-level",
        "deepseek_v3",
        {"tokenizer_class": "LlamaTokenizerFast", "eos_token": typed("<|im_end|>"), "add_bos_token": False},
        change=_add(*_CHATML),
    ),
    "truncation-and-padding": Layout(
        "byte-level", "llama", {**_FAST, **_END}, change=_save_training_state(4, "left")
    ),
    "truncation-and-padding-gpt2": Layout(
        "byte-level", "gpt2", {"tokenizer_class": "GPT2Tokenizer"}, change=_save_training_state(3, "right")
    ),
    "llama2": Layout("pieces", "llama", {**_LLAMA_TYPED, "legacy": False, "add_bos_token": True}),
    "llama2-legacy": Layout("pieces", "llama", {**_LLAMA, "legacy": True}),
    "llama2-pad-token": Layout(
        "pieces",
        "llama",
        {**_LLAMA, "pad_token": "<pad>"},
        {"added_tokens.json": ids_behind("pieces", "<pad>")},
    ),
    "llama2-without-config": Layout("pieces", "llama", None),
    "mistral": Layout("pieces", "mistral", {**_LLAMA_TYPED, "add_bos_token": True, "add_eos_token": False}),
    "phi3": Layout(
        "pieces",
        "phi3",
        {
            **_LLAMA,
            "added_tokens_decoder": decoder_of(
                "pieces", token("<|im_start|>", rstrip=True), token("<|im_end|>", rstrip=True)
            ),
        },
        change=_add(token("<|im_start|>"), token("<|im_end|>")),
    ),
    "gemma": Layout(
        "pieces", "gemma", {**_LLAMA, "tokenizer_class": "GemmaTokenizer", "add_bos_token": True}
    ),
    "sentencepiece-file": Layout("sentencepiece", "llama", _LLAMA, leaves=("tokenizer.model",)),
    "unigram": Layout("unigram", "llama", {**_FAST, "eos_token": "</s>", "unk_token": "<unk>"}),
    "unigram-t5": Layout(
        "unigram", "t5", {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "extra_ids": 0}
    ),
    "wordpiece": Layout("words", "bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": True}),
    "wordpiece-slow-file": Layout("words", "bert", {}, leaves=("vocab.txt",)),
}


def write_layout(path: Path, name: str) -> Path:
    """Write one of ``LAYOUTS`` with a chat template, and return ``path``."""
    layout = LAYOUTS[name]
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": layout.model_type}))
    content = json.loads(_bases()[layout.base].to_str())
    if layout.change is not None:
        layout.change(content)
    vocab: Any = content["model"]["vocab"]
    writers: dict[str, Callable[[Path], object]] = {
        "tokenizer.json": lambda file: file.write_text(json.dumps(content)),
        "vocab.json": lambda file: file.write_text(json.dumps(vocab)),
        "merges.txt": lambda file: file.write_text(
            "".join([f"{' '.join(pair)}\n" for pair in content["model"]["merges"]])
        ),
        "vocab.txt": lambda file: file.write_text("\n".join(sorted(vocab, key=vocab.get))),
        "tokenizer.model": _train_sentencepiece,
    }
    for file in layout.leaves:
        writers[file](path / file)
    for file, fields in layout.files.items():
        (path / file).write_text(json.dumps(fields))
    if layout.config is not None:
        (path / "tokenizer_config.json").write_text(
            json.dumps({**layout.config, "chat_template": CHAT_TEMPLATE})
        )
    else:
        (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def _train_sentencepiece(file: Path) -> None:
    with file.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TRAINING_TEXT),
            model_writer=model,
            model_type="bpe",
            vocab_size=400,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
