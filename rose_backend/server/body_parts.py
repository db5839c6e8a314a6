"""Counts of values, fields and lists in a large body, checked before it is parsed.

Parsing strings and literals holds the interpreter lock, for up to seconds with 16 MiB of short ones, in which no stream
sends anything. A body with more values than any request may have is refused without parsing.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from rose_backend.errors import RequestError
from rose_backend.server.settings import MAX_BODY_FIELDS, MAX_BODY_LISTS

COUNTED_BODY_BYTES = 1 << 17
"""Smaller bodies are parsed in a few milliseconds with any content."""
_CHUNK_BYTES = 1 << 18
"""Bytes counted at once; between two chunks other threads may take the interpreter lock."""


_WORDS = np.frombuffer(b'"tfn', np.uint8)


class BodyParts(NamedTuple):
    """Numbers of strings, and of structural characters outside of them."""

    commas: int
    colons: int
    brackets: int
    """Opening ones, of lists and objects."""
    words: int
    """Strings, names of fields included, and true, false and null."""


def check_body_parts(content: bytes, max_prompts: int, max_model_len: int) -> None:
    """Refuse a body that has more values than any request may have. May run in any thread.

    Args:
        content: the body, which may not be JSON.

    Raises:
        RequestError: there are too many fields, lists and objects, strings and literals, or values.
    """
    parts = count_body_parts(content)
    max_lists = max_prompts + MAX_BODY_LISTS
    # Each field and each list may be followed by a comma.
    max_values = max_prompts * max_model_len + MAX_BODY_FIELDS + max_lists
    for what, number, limit in (
        ("fields", parts.colons, MAX_BODY_FIELDS),
        ("lists and objects", parts.brackets, max_lists),
        # Each field has a name, and may have one for its value; a list of prompts has many.
        ("strings, truth values and nulls", parts.words, 2 * MAX_BODY_FIELDS + max_lists),
        ("values", parts.commas, max_values),
    ):
        if number > limit:
            raise RequestError(
                f"body: got {number} {what}, allowed are at most {limit} in one request", parameter="body"
            )


def count_body_parts(content: bytes) -> BodyParts:
    """Count without parsing, about as fast as hashing."""
    totals = np.zeros(4, np.int64)
    is_inside, rest = False, b""
    for first in range(0, len(content), _CHUNK_BYTES):
        chunk = rest + content[first : first + _CHUNK_BYTES]
        # A backslash and the character it escapes must be in the same chunk.
        rest = b"\\" if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 else b""
        chunk = chunk[: len(chunk) - len(rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        data = np.frombuffer(chunk, np.uint8)
        if not data.size:
            continue
        inside = np.logical_xor.accumulate(data == ord('"')) ^ is_inside
        is_inside = bool(inside[-1])
        outside = data[~inside]
        # Of a string, only the quotation mark at its end is outside.
        totals += [
            np.count_nonzero(outside == ord(",")),
            np.count_nonzero(outside == ord(":")),
            np.count_nonzero((outside == ord("[")) | (outside == ord("{"))),
            np.count_nonzero(np.isin(outside, _WORDS)),
        ]
    return BodyParts(*totals.tolist())


def as_utf8(content: bytes) -> bytes:
    """Return JSON in UTF-8 from any encoding that ``json.loads`` reads; other content is returned as it is."""
    encoding = json.detect_encoding(content)
    if encoding in ("utf-8", "utf-8-sig"):
        return content
    try:
        return content.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeError:
        return content
