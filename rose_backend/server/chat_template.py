"""Conversations to prompts, with the template that came with the model."""

from __future__ import annotations

import reprlib
import sys
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import ConfigError, RequestError, kind_and_text
from rose_backend.server.protocol import ChatMessage, refused

_MAX_REASON_LENGTH = 500
"""Characters of an error that a template raises, which may quote the conversation."""


class ChatTemplate:
    """The template for conversations: that of a file, or the model's, which ``use`` brings.

    Args:
        path: file with a template to use instead of the model's; None takes the model's own.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, path: str | None) -> None:
        self._template = None if path is None else _read(path)
        self._missing = "this model has no chat template"
        self._tokenizer: Tokenizer | None = None

    def use(self, tokenizer: Tokenizer) -> None:
        """Take the model's own template unless there is one already, and the tokenizer for all prompts.

        Raises:
            ConfigError: it is no template.
        """
        self._tokenizer = tokenizer
        templates = tokenizer.chat_templates
        if self._template is None:
            # As in vLLM and transformers, the others are for requests with tools and the like.
            self._template = templates.get("default")
            if templates:
                self._missing = (
                    f"this model has several chat templates ({reprlib.repr(sorted(templates))}), none of them "
                    "named default"
                )
        self.check_syntax()

    def check_syntax(self) -> None:
        """Check the template, if there is one, without a conversation.

        Raises:
            ConfigError: it is no template.
        """
        if self._template is None:
            return
        try:
            self._render(
                [{"role": "user", "content": "?"}], add_generation_prompt=False, max_length=sys.maxsize
            )
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat_template: line {error.lineno}: {error.message}") from error
        except Exception:
            # It does not accept so short a conversation, or none at all; requests report that.
            pass

    def check_available(self) -> None:
        """Refuse conversations if there is no template.

        Raises:
            RequestError: there is none.
        """
        if self._template is None:
            raise refused(
                "messages",
                f"{self._missing}; use /v1/completions, or start the server with --chat-template FILE",
            )

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, max_length: int) -> str:
        """Return the prompt's text.

        Args:
            messages: answer of ``plain_messages``.
            max_length: of the text, in characters. A template can make any number of one message.

        Raises:
            RequestError: the template refuses the conversation, or fails, or the text is longer or no valid Unicode.
        """
        try:
            text = self._render(self._for_template(messages), add_generation_prompt, max_length)
        except Exception as error:  # a template is a program, and may fail in any way
            reason = kind_and_text(error)[:_MAX_REASON_LENGTH]
            raise refused("messages", f"the model's chat template refuses them ({reason})") from error
        if len(text) > max_length:
            raise refused(
                "messages",
                f"got more than {max_length} characters from the chat template, allowed are at most "
                f"{max_length}",
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise refused("messages", f"not valid Unicode text ({error.reason})") from error
        return text

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, max_length: int) -> str:
        """Return the text, or a start of it that is longer than ``max_length``."""
        # Imported here: it takes a second, and is not needed without a template. It does not import torch.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = _compile_jinja_template(self._template)
        parts: list[str] = []
        length = 0
        for part in template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **({} if self._tokenizer is None else self._tokenizer.special_tokens),
        ):
            parts.append(part)
            length += len(part)
            if length > max_length:
                break
        return "".join(parts)

    def _for_template(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in roles that the template knows, as in vLLM: one that does not name the role developer gets
        such messages as the system's, and then all of the system's as one in front."""
        assert self._template is not None
        is_known = '"developer"' in self._template or "'developer'" in self._template
        if is_known or all(message["role"] != "developer" for message in messages):
            return messages
        instructions = [message for message in messages if message["role"] in ("system", "developer")]
        others = [message for message in messages if message["role"] not in ("system", "developer")]
        if len(instructions) == 1 and messages[0] is instructions[0]:
            return [{**instructions[0], "role": "system"}, *others]
        texts = [message["content"] for message in instructions if message["content"]]
        return [{"role": "system", "content": "\n\n".join(texts)}, *others]


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
