"""Conversations to prompts, with the template that came with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from rose_backend.errors import ConfigError, ModelError, RequestError
from rose_backend.models.weights import read_json, resolve_model_path
from rose_backend.server.request_models import ChatMessage

# Templates refuse with an error of Jinja's, or fail on an unexpected conversation.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError)


class ChatTemplate:
    """The model's chat template, if it has one.

    Args:
        model: directory or Hugging Face id, as the engine was given it.
        path: file with a template to use instead; None takes the tokenizer's own.

    Raises:
        ConfigError: the file cannot be read, or is no template.
        ModelError: there is no such model, or it has no usable tokenizer.
    """

    def __init__(self, model: str, path: str | None) -> None:
        self._tokenizer: Any = None
        template = None if path is None else _read(path)
        directory = resolve_model_path(model)
        if template is None and not _has_template(directory):
            return
        # Imported here: it takes seconds, and is not needed without a template.
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), use_fast=True, local_files_only=True
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{directory}: no usable tokenizer ({error})") from error
        if template is not None:
            self._tokenizer.chat_template = template
        self._check_syntax()

    def check_available(self) -> None:
        """Refuse conversations if the model has no template.

        Raises:
            RequestError: the model has no template.
        """
        if self._tokenizer is None:
            raise RequestError(
                "messages: this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                parameter="messages",
            )

    def encode(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        """Return the prompt's token ids.

        Args:
            messages: answer of ``plain_messages``.

        Raises:
            RequestError: the template refuses the conversation.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except _REFUSALS as error:
            raise RequestError(
                f"messages: the model's chat template refuses them ({error})", parameter="messages"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _check_syntax(self) -> None:
        try:
            self._tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat_template: line {error.lineno}: {error.message}") from error
        except _REFUSALS:
            # It does not accept so short a conversation; requests report that.
            pass


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as templates expect them, with one text each.

    Raises:
        RequestError: a message has a part that is not supported.
    """
    plain = []
    for index, message in enumerate(messages):
        for name, value in (message.model_extra or {}).items():
            # Clients send an answer of an earlier turn back with all its empty fields.
            if value not in (None, [], {}, ""):
                raise RequestError(
                    f"messages.{index}.{name}: not supported; allowed are role, content and name",
                    parameter="messages",
                )
        content = message.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        plain.append(
            {"role": message.role, "content": text} | ({"name": message.name} if message.name else {})
        )
    return plain


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {path} ({error})") from error


def _has_template(directory: Path) -> bool:
    names = ("chat_template.jinja", "chat_template.json")
    config = directory / "tokenizer_config.json"
    return any((directory / name).is_file() for name in names) or (
        config.is_file() and bool(read_json(config).get("chat_template"))
    )
