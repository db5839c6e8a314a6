"""What happens to fields of a request that are not part of its model.

Three kinds. A field that would change the answer and is not supported is refused by name, unless its value asks for
nothing. A field that changes no answer is ignored. A field that nobody knows is ignored as well, with a debug line,
unless its name is so close to a known one that it is probably misspelt: then it is refused.
"""

from __future__ import annotations

import difflib
import logging
import reprlib
from collections.abc import Mapping
from typing import Any

from rose_backend.errors import RequestError
from rose_backend.server.request_models import Body
from rose_backend.server.settings import MAX_UNKNOWN_FIELDS

logger = logging.getLogger(__name__)

_OFF: tuple[object, ...] = (None, False)
_EMPTY: tuple[object, ...] = (None, [], {}, "")
# Field -> values that ask for nothing. OpenAI's first, then vLLM's.
NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "logit_bias": _EMPTY,
    "suffix": _EMPTY,
    "response_format": (None, {"type": "text"}),
    "tools": _EMPTY,
    "tool_choice": (None, "none", "auto"),
    "functions": _EMPTY,
    "function_call": (None, "none", "auto"),
    "modalities": (None, [], ["text"]),
    "audio": _EMPTY,
    "prediction": _EMPTY,
    "reasoning_effort": (None, "none"),
    "web_search_options": _EMPTY,
    "echo": _OFF,
    "add_special_tokens": (None, True),
    "use_beam_search": _OFF,
    "length_penalty": (None, 1.0),
    "early_stopping": _OFF,
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
    "prompt_embeds": _EMPTY,
    "allowed_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "logits_processors": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "structured_outputs": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_grammar": _EMPTY,
    "chat_template": _EMPTY,
    "chat_template_kwargs": _EMPTY,
    "continue_final_message": _OFF,
    "documents": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "spaces_between_special_tokens": (None, True),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "return_token_strs": _OFF,
    "kv_transfer_params": _EMPTY,
    "vllm_xargs": _EMPTY,
}
IGNORED = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
        "priority",
        "request_id",
        "session_id",
    }
)
_MAX_NAME_LENGTH = 64
_LIKENESS = 0.8


def check_other_fields(body: Body) -> None:
    """Go through the fields that ``body``'s model does not have.

    Raises:
        RequestError: one is not supported, or probably misspelt; or there are too many that nobody knows.
    """
    if not body.model_extra:
        return
    known = type(body).model_fields.keys() | NOT_SUPPORTED.keys() | IGNORED
    unknown = []
    for name, value in body.model_extra.items():
        if name in NOT_SUPPORTED:
            _check_asks_for_nothing(name, value)
        elif name not in IGNORED:
            unknown.append(name)
    _check_number(len(unknown))
    for name in unknown:
        close = difflib.get_close_matches(name[:_MAX_NAME_LENGTH], known, n=1, cutoff=_LIKENESS)
        if close:
            raise RequestError(
                f"{reprlib.repr(name)}: unknown field; did you mean {close[0]!r}?", parameter=name
            )
    if unknown:
        logger.debug("ignored unknown fields %s", reprlib.repr(unknown))


def check_number_of_fields(model: type[Body], fields: Mapping[str, Any]) -> None:
    """Refuse too many unknown fields before anything is done with each of them.

    Raises:
        RequestError: there are more than nobody may know.
    """
    num_known = len(model.model_fields) + len(NOT_SUPPORTED) + len(IGNORED)
    if len(fields) > num_known + MAX_UNKNOWN_FIELDS:
        known = model.model_fields.keys() | NOT_SUPPORTED.keys() | IGNORED
        _check_number(len(fields.keys() - known))


def _check_number(num_unknown: int) -> None:
    if num_unknown > MAX_UNKNOWN_FIELDS:
        raise RequestError(
            f"body: got {num_unknown} unknown fields, allowed are at most {MAX_UNKNOWN_FIELDS}",
            parameter="body",
        )


def _check_asks_for_nothing(name: str, value: Any) -> None:
    if value in NOT_SUPPORTED[name]:
        return
    neutral = " or ".join("null" if item is None else repr(item) for item in NOT_SUPPORTED[name])
    raise RequestError(
        f"{name}: got {reprlib.repr(value)}, which is not supported; allowed is {neutral}", parameter=name
    )
