"""Loads a model's tokenizer with transformers, in another process, which does not import torch.

The vocabulary, the special tokens and the start of a prompt are spread over up to a dozen files and depend on classes
of transformers. Importing these takes 1.5 s without torch and three times as long with it. So another process does it
while this one loads the model, and returns a form that needs the tokenizers library alone.
"""

from __future__ import annotations

import io
import os
import reprlib
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from tokenizers import Tokenizer

from rose_backend.config import is_unicode
from rose_backend.errors import ModelError, kind_and_text
from rose_backend.models.weights import read_json

_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
_CHAT_TEMPLATE_FILE = "chat_template.json"
"""A processor's, for images and text alike; transformers' tokenizers do not read it."""
_AUTO_TOKENIZER = "transformers.models.auto.tokenization_auto"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = (
    # An import of torch fails, and transformers does without what needs it.
    "import sys; sys.modules['torch'] = None; sys.path.append(sys.argv[2]); "
    "from rose_backend.engine.tokenizer_loading import main; main()"
)
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "HF_HUB_OFFLINE": "1",
    # Says that PyTorch was not found.
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


class TokenizerParts(NamedTuple):
    """What the files of a tokenizer say. msgspec can send it, with ``write_backend`` and ``read_backend``."""

    backend: Tokenizer
    splits_special_tokens: bool
    """The names of special tokens in a text are text like any other. Not part of a backend as it is sent."""
    special_tokens: dict[str, str | list[str]]
    """Their texts by name, ``eos_token`` for example; chat templates use them."""
    chat_templates: dict[str, str]
    """By name; the only one is called ``default``."""


class _Answer(msgspec.Struct):
    """What the process that loads a tokenizer writes: one of the two."""

    parts: TokenizerParts | None
    error: str | None


def write_backend(value: object) -> str:
    """Return a tokenizer of the tokenizers library as JSON, for msgspec."""
    if not isinstance(value, Tokenizer):
        raise TypeError(f"{type(value).__name__} is not sent to other processes")
    return value.to_str()


def read_backend(kind: type, value: Any) -> Tokenizer:
    """Return what ``write_backend`` has written, for msgspec.

    Raises:
        ValueError: it is something else.
    """
    try:
        return Tokenizer.from_str(value)
    except Exception as error:  # the library raises no other type
        raise ValueError(f"no tokenizer: {error}") from error


class PendingTokenizer(Protocol):
    """A tokenizer that something else is loading."""

    def result(self) -> TokenizerParts:
        """Wait for it.

        Raises:
            ModelError: there is no usable fast tokenizer.
        """


class TokenizerLoading(AbstractContextManager["TokenizerLoading"]):
    """A tokenizer that another process loads, or this one has, if it had imported transformers' tokenizers before.

    Args:
        directory: local directory with ``tokenizer.json`` or the files it can be made from; nothing is downloaded.

    Raises:
        ModelError: there are no such files.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        # Without any of them transformers would silently build an empty tokenizer.
        if not any((self._directory / name).is_file() for name in _FILES):
            raise ModelError(f"{directory}: no tokenizer, one of {', '.join(_FILES)} is needed")
        self._process: subprocess.Popen[bytes] | None = None
        if _AUTO_TOKENIZER not in sys.modules:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(self._directory), str(_PACKAGE_ROOT)],
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # Ctrl-C is for this process, which ends it.
                process_group=0,
            )

    def result(self) -> TokenizerParts:
        """Wait for the tokenizer; once only.

        Raises:
            ModelError: there is no usable fast tokenizer.
        """
        if self._process is None:
            return _load(self._directory)
        content, _ = self._process.communicate()
        if self._process.returncode:
            raise ModelError(
                f"{self._directory}: no usable tokenizer (loading it ended with exit code {self._process.returncode})"
            )
        answer = msgspec.msgpack.decode(content, type=_Answer, dec_hook=read_backend)
        if answer.parts is None:
            raise ModelError(answer.error)
        return answer.parts

    def __exit__(self, *error: object) -> None:
        """End the process if nobody has waited for it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def load_tokenizer(directory: str | Path) -> TokenizerParts:
    """Load a tokenizer and wait for it; errors are those of ``TokenizerLoading``."""
    with TokenizerLoading(directory) as loading:
        return loading.result()


def _load(directory: Path) -> TokenizerParts:
    from transformers import AutoTokenizer

    try:
        # The repository's own code is never run, and Mistral's own format has no fast form.
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False, mistral_format=False
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    # A file can say anything, and a panic of the tokenizers library is no Exception.
    except BaseException as error:
        first_line = kind_and_text(error).strip().partition("\n")[0]
        raise ModelError(f"{directory}: no usable tokenizer ({first_line})") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{directory}: its tokenizer has no fast form (tokenizer.json); only fast ones are supported"
        )
    # Left over from a training.
    backend.no_truncation()
    backend.no_padding()
    _mark_special_tokens(backend)
    return TokenizerParts(
        backend,
        bool(tokenizer.split_special_tokens),
        tokenizer.special_tokens_map,
        _chat_templates(directory, tokenizer.chat_template),
    )


def _mark_special_tokens(backend: Any) -> None:
    """Mark as special what decoding leaves out: a token that was special once stays so whatever files say later, but
    its mark, which is all that can be sent, does not."""
    for token_id, token in backend.get_added_tokens_decoder().items():
        if not token.special and backend.decode([token_id]) != backend.decode(
            [token_id], skip_special_tokens=False
        ):
            token.special = True
            backend.add_special_tokens([token])


def _chat_templates(directory: Path, found: object) -> dict[str, str]:
    """Return templates by name.

    Args:
        found: what the tokenizer has: one, several by name, or None.

    Raises:
        ModelError: one is no text.
    """
    path = directory / _CHAT_TEMPLATE_FILE
    if found is None and path.is_file():
        found = read_json(path).get("chat_template")
    templates: dict[str, Any] = (
        found if isinstance(found, dict) else {} if found is None else {"default": found}
    )
    for name, template in templates.items():
        if not is_unicode(name) or not is_unicode(template):
            raise ModelError(
                f"{directory}: chat template {name!r} must be text, got {reprlib.repr(template)}"
            )
    return templates


def main() -> None:
    """Load the tokenizer of the directory that is the first argument; write its parts, or the ``ModelError``."""
    # Whatever a library prints belongs to the log.
    with io.FileIO(os.dup(1), "w") as raw, io.BufferedWriter(raw) as output:
        os.dup2(2, 1)
        try:
            answer = _Answer(_load(Path(sys.argv[1])), None)
        except ModelError as error:
            answer = _Answer(None, str(error))
        output.write(msgspec.msgpack.encode(answer, enc_hook=write_backend))
