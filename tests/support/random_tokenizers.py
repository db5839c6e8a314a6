"""Small tokenizers with each kind of decoder, and random prompts and answers for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

SPECIAL = ["<s>", "</s>", "<|end|>"]
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = "é中ก薔🙂🏳🇫"


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and what random texts are made of."""

    backend: Tokenizer
    words: list[int]
    special: list[int]
    parts: list[int]
    """Tokens that hold a part of a character, and U+FFFD, which looks like one."""
    byte_ids: list[int] | None
    """The token of each byte; None if there are none."""

    def prompt(self, rng: random.Random) -> tuple[list[int], list[int]]:
        """Return tokens of whole characters, and those of one that is not finished, mostly none."""
        tokens = [token for _ in range(rng.randrange(9)) for token in self._piece(rng, is_whole=True)]
        unfinished: list[int] = []
        if self.byte_ids is not None and rng.random() < 0.2:
            data = rng.choice(CHARACTERS).encode()
            unfinished = [self.byte_ids[byte] for byte in data[: rng.randrange(1, len(data))]]
        return tokens, unfinished

    def answer(self, rng: random.Random) -> list[int]:
        """Return fewer tokens than streams wait for, of any kind."""
        tokens = [token for _ in range(rng.randrange(25)) for token in self._piece(rng, is_whole=False)]
        return tokens[:60]

    def _piece(self, rng: random.Random, *, is_whole: bool) -> Sequence[int]:
        choice = rng.random()
        if choice < 0.15:
            return [rng.choice(self.special)]
        if choice < 0.2:
            return [self.backend.get_vocab_size() + rng.randrange(50)]
        if self.byte_ids is not None and choice < 0.6:
            data = rng.choice(CHARACTERS).encode()
            if not is_whole and choice < 0.25:
                data = data[: rng.randrange(1, len(data) + 1)] if rng.random() < 0.5 else rng.randbytes(1)
            return [self.byte_ids[byte] for byte in data]
        return [rng.choice(self.words if is_whole else self.words + self.parts)]


def _make(
    words: list[str], decoder: object, byte_names: list[str] | None = None, parts: Sequence[str] = ()
) -> Kind:
    names = [*words, *parts, *(byte_names or [])]
    backend = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool é>", special=False)])
    ids = {name: backend.token_to_id(name) for name in (*names, *SPECIAL, "<tool é>")}
    return Kind(
        backend,
        [ids[word] for word in (*words, "<tool é>")],
        [ids[name] for name in SPECIAL],
        [ids[part] for part in parts],
        None if byte_names is None else [ids[name] for name in byte_names],
    )


def _byte_level() -> Kind:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    names = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]

    def name(data: bytes) -> str:
        return "".join(names[byte] for byte in data)

    words = [name(word.encode()) for word in (" the", " rose", "s.", "x🙂")]
    parts = [b"a\xf0\x9f", b"\x99\x82", b"\x82 b", b"\xe4\xb8", b"\xad\xe4", UNKNOWN.encode()]
    return _make(words, decoders.ByteLevel(), names, list(map(name, parts)))


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_PIECES = ["▁", "▁▁", "▁the", "▁rose", "▁x", "s", ".", "x"]
_SENTENCE_PIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]

KINDS: dict[str, Callable[[], Kind]] = {
    "byte-level": _byte_level,
    "byte-fallback": lambda: _make(
        _PIECES, decoders.Sequence([*_SENTENCE_PIECE, decoders.Strip(" ", 1, 0)]), _BYTES, [UNKNOWN]
    ),
    "byte-fallback-unstripped": lambda: _make(_PIECES, decoders.Sequence(_SENTENCE_PIECE), _BYTES, [UNKNOWN]),
    "metaspace": lambda: _make(_PIECES, decoders.Metaspace(), None, [UNKNOWN]),
    "word-piece": lambda: _make(
        ["the", "rose", "##s", "##", "n't", ".", ",", "'"], decoders.WordPiece(), None, [UNKNOWN]
    ),
    "suffix": lambda: _make(["the</w>", "ro", "se</w>", "</w>", ".", ".</w>"], decoders.BPEDecoder()),
    "ctc": lambda: _make(["a", "b", "<pad>", "|", "c"], decoders.CTC()),
    "none": lambda: _make(["the", "rose", "s", "."], None),
}


def save(kind: Kind, directory: Path) -> Path:
    """Write the tokenizer where ``rose_backend`` finds it."""
    kind.backend.save(str(directory / "tokenizer.json"))
    return directory
