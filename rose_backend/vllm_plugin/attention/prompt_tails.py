"""Steps in which every row has one token, and some row's is the last one of a prompt.

vLLM replays its graphs of decodes for them, too. Where that token belongs to an image, features of it are written in
front of the step for the model's ``forward`` to use and clear; the replay uses them and clears nothing, so that the
next step adds them to another request's tokens. Prefix hits that end at any token make such steps common.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rose_backend.vllm_plugin.attention.audited_models import find_unaudited
from rose_backend.vllm_plugin.options import is_rose_selected


def _keeps_features(runner: Any) -> bool:
    """Whether a model runner's model may keep features of images, audio or video between the parts of a step."""
    return (
        runner.supports_mm_inputs
        and is_rose_selected(runner.vllm_config)
        and find_unaudited(runner.model_config) is not None
    )


def wrap_gather_batch_req_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``GPUModelRunner.gather_batch_req_state`` (V2); see the patch ledger."""

    @functools.wraps(original)
    def gather_batch_req_state(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        state, uniform_token_count = original(self, *args, **kwargs)
        if (
            uniform_token_count is not None
            and state is not None
            and state.has_prefill
            and _keeps_features(self)
        ):
            return state, None
        return state, uniform_token_count

    return gather_batch_req_state


def wrap_determine_batch_execution(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``GPUModelRunner._determine_batch_execution_and_padding`` (V1); see the patch ledger."""

    @functools.wraps(original)
    def _determine_batch_execution_and_padding(
        self: Any, *, num_reqs: int, force_uniform_decode: bool | None = None, **kwargs: Any
    ) -> Any:
        if force_uniform_decode is None and _keeps_features(self):
            batch = self.input_batch
            is_prompt = batch.num_computed_tokens_cpu[:num_reqs] < batch.num_prompt_tokens[:num_reqs]
            force_uniform_decode = False if is_prompt.any() else None
        return original(self, num_reqs=num_reqs, force_uniform_decode=force_uniform_decode, **kwargs)

    return _determine_batch_execution_and_padding
