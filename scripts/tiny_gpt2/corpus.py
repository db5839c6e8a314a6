"""The training text: public-domain books, pinned by commit and SHA-256, cleaned into plain paragraphs."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
import urllib.request
from dataclasses import dataclass
from pathlib import Path

MANIFEST = Path(__file__).with_name("corpus.json")
MIN_DOCUMENT_CHARS = 1000
VALIDATION_EVERY = 40

_HEADER_END = re.compile(
    r"^(?:\*\*\* ?START OF TH(?:IS|E) PROJECT GUTENBERG.*|\*END.{0,2}THE SMALL PRINT!.*)$", re.MULTILINE
)
_FOOTER_START = re.compile(
    r"^\W*(?:END OF (?:THE |THIS )?PROJECT GUTENBERG|PROJECT GUTENBERG'?S? ETEXT OF|THE END\W*$)",
    re.MULTILINE | re.IGNORECASE,
)
_BOOKKEEPING = re.compile(
    r"gutenberg|^produced by|^e-?text (?:prepared|produced)|proofread|transcriber|copyright|preparer", re.I
)
_SOURCE_NOTE = re.compile(r"^\(\d+\)|^[(\[].{0,120}[)\]]\.?$")
_ASIDE = re.compile(r"\[(?:Illustration|Footnote|Transcriber|Frontispiece)[^\]]*\]", re.IGNORECASE)
_TYPOGRAPHY = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'}
    | {"\u2013": "-", "\u2014": "--", "\u00a0": " ", "_": "", "|": ""}
)
_OPENING_QUOTE = re.compile(
    r"(?:(?<=^)|(?<=[\s(\-\"]))'(?!(?:tis|twas|twould|twill|em|till)\b)(?=[A-Za-z])", re.IGNORECASE
)
_CLOSING_QUOTE = re.compile(r"(?<=[.,!?;:\-])'(?![A-Za-z])")


class CorpusError(RuntimeError):
    """A text could not be obtained, or is not byte for byte the pinned one."""


@dataclass(frozen=True, slots=True)
class Book:
    """One book of the manifest. ``sha256`` is of the file as published, before any cleaning."""

    title: str
    author: str
    gutenberg_id: int
    url: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Cleaned documents (stories and chapters); paragraphs are separated by one newline."""

    train: list[str]
    validation: list[str]


def read_manifest(path: Path = MANIFEST) -> list[Book]:
    """Return the books in the order in which they are trained on."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    return [
        Book(
            title=entry["title"],
            author=entry["author"],
            gutenberg_id=entry["gutenberg_id"],
            url=manifest["url"].format(**entry),
            file=entry["file"],
            sha256=entry["sha256"],
        )
        for entry in manifest["books"]
    ]


def obtain(book: Book, corpus_dir: Path) -> str:
    """Return the text of ``book`` from ``corpus_dir``, downloading it there first when it is missing.

    Raises CorpusError when the download fails or the bytes do not have the pinned SHA-256.
    """
    path = corpus_dir / book.file
    if path.exists():
        data = path.read_bytes()
    else:
        try:
            with urllib.request.urlopen(book.url, timeout=60) as response:
                data = response.read()
        except OSError as error:
            raise CorpusError(f"could not download {book.title!r} from {book.url}: {error}") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != book.sha256:
        raise CorpusError(f"{book.file} ({book.title!r}) has SHA-256 {digest}, expected {book.sha256}")
    if not path.exists():
        corpus_dir.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return data.decode("utf-8-sig")


def build(books: list[Book], corpus_dir: Path) -> Corpus:
    """Obtain and clean every book; every ``VALIDATION_EVERY``-th document is held out for validation."""
    bodies = [strip_wrapping(obtain(book, corpus_dir)) for book in books]
    documents = [document for body in bodies for document in split_documents(body)]
    held_out = documents[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    train = [text for index, text in enumerate(documents) if (index + 1) % VALIDATION_EVERY]
    return Corpus(train=train, validation=held_out)


def strip_wrapping(text: str) -> str:
    """Return the book itself, without the Project Gutenberg header and footer."""
    text = text.replace("\r\n", "\n")
    headers = [match.end() for match in _HEADER_END.finditer(text) if match.end() < len(text) // 2]
    if not headers:
        raise CorpusError(f"no Project Gutenberg header found in the text that starts {text[:60]!r}")
    body = text[headers[-1] :]
    footers = [match.start() for match in _FOOTER_START.finditer(body) if match.start() > len(body) // 2]
    if not footers:
        raise CorpusError(f"no Project Gutenberg footer found in the text that starts {text[:60]!r}")
    return body[: footers[0]]


def split_documents(body: str) -> list[str]:
    """Split a book at its larger gaps into chapters or stories, each a string of cleaned paragraphs."""
    body = unicodedata.normalize("NFC", _ASIDE.sub("", body).translate(_TYPOGRAPHY))
    single_quoted = len(_OPENING_QUOTE.findall(body)) > body.count('"')
    documents: list[str] = []
    for section in re.split(r"\n(?:[ \t]*\n){3,}", body):
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n[ \t]*\n", section)]
        kept = [unify_quotes(part) if single_quoted else part for part in paragraphs if is_prose(part)]
        text = "\n".join(kept)
        # Gaps around pictures and verses also look like chapter ends: short pieces stay where they stood.
        if documents and text and min(len(text), len(documents[-1])) < MIN_DOCUMENT_CHARS:
            documents[-1] = f"{documents[-1]}\n{text}"
        elif text:
            documents.append(text)
    return documents


def unify_quotes(paragraph: str) -> str:
    """Turn British single quotation marks into double ones, so that one model sees one convention."""
    return _CLOSING_QUOTE.sub('"', _OPENING_QUOTE.sub('"', paragraph))


def is_prose(paragraph: str) -> bool:
    """Tell sentences from headings, tables of contents, rules and bookkeeping lines.

    The strict share of lower-case letters also costs some very short remarks: 0.3 % of the characters.
    """
    if not paragraph or _BOOKKEEPING.search(paragraph) or _SOURCE_NOTE.search(paragraph):
        return False
    ends_a_sentence = paragraph.rstrip("\"')*").endswith((".", "!", "?", ":", ";", ",", "-"))
    letters = sum(character.isalpha() for character in paragraph)
    lower = sum(character.islower() for character in paragraph)
    starts_like_a_heading = re.match(r"(?:chapter|contents|preface|[IVXLC]+\.)\b", paragraph, re.IGNORECASE)
    return ends_a_sentence and lower > 0.6 * len(paragraph) and letters > 0 and not starts_like_a_heading
