"""The size of a step on which data-parallel ranks of a mixture of experts agree: one vote per step, as in vLLM.

Experts are spread over the ranks, so that all ranks run each step together, with as many tokens; a rank without
requests runs a dummy step. Before a step each rank says what it has to run, in one collective, and each learns which
CUDA graph it is to replay. A rank that voted twice in a step, or not at all, would leave all ranks waiting for each
other. So a step that Rose may replay votes by vLLM's own function, with vLLM's arguments, where vLLM would. It replays
the graph that vLLM would replay. A step that Rose has voted on and does not replay hands the answer to vLLM's step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

from rose_backend.errors import IntegrityError
from rose_backend.vllm_plugin.patch_ledger import swapped


class StepVotes:
    """The vote on the current step of one model runner.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2).
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        # What the ranks were asked in the current step, as vLLM's function takes it, and its answer.
        self._vote: tuple[dict[str, Any], Any] | None = None

    def begin_step(self) -> None:
        """Forget the vote on the step before."""
        self._vote = None

    def dispatch(
        self,
        num_requests: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_adapters: int,
        max_query_len: int | None,
    ) -> Any:
        """Return vLLM's ``BatchExecutionDescriptor`` of a step; all data-parallel ranks have agreed on its tokens.

        The arguments are those of vLLM's ``CudaGraphManager.dispatch``. In a step's first call ranks wait for each
        other; further calls return the same answer.
        """
        runner = self._runner
        if runner.dp_size == 1:
            return runner.cudagraph_manager.dispatch(
                num_requests, num_tokens, uniform_token_count, num_adapters, max_query_len
            )
        if self._vote is None:
            question = {
                "cudagraph_manager": runner.cudagraph_manager,
                "num_reqs": num_requests,
                "num_tokens": num_tokens,
                "uniform_token_count": uniform_token_count,
                "dp_size": runner.dp_size,
                "dp_rank": runner.dp_rank,
                "max_query_len": max_query_len,
                "num_active_loras": num_adapters,
                "parallel_config": runner.parallel_config,
                "uniform_decode": uniform_token_count == 1,
            }
            self._vote = question, dispatch_cg_and_sync_dp(**question)
        return self._vote[1][0]

    @contextmanager
    def handed_on(self) -> Iterator[None]:
        """Let vLLM's own step, inside the ``with`` block, take the answer in place of a vote if ranks have voted.

        Raises:
            IntegrityError: vLLM's step asks something else, twice or never. All ranks would wait for each other.
        """
        if self._vote is None:
            yield
            return
        question, answer = self._vote
        answers = [answer]

        def take_answer(*args: Any, **kwargs: Any) -> Any:
            asked = _arguments(*args, **kwargs)
            if not answers or asked != _arguments(**question):
                raise IntegrityError(
                    "step graph: data-parallel ranks voted once, and vLLM's step "
                    + (f"asks {asked} in place of {question}" if answers else "asks again")
                )
            return answers.pop()

        with swapped("step_graph_vote", take_answer):
            yield
        if answers:
            raise IntegrityError(
                "step graph: data-parallel ranks voted, and vLLM's step has not asked for the answer"
            )


def _arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return all arguments of vLLM's function by name, those left out, too."""
    bound = inspect.signature(dispatch_cg_and_sync_dp).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
