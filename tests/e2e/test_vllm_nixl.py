"""Prefill in one engine, decode in another: vLLM's ``NixlConnector`` between two engines with Rose's block manager.

The agents that copy are pretended ones, or, where the package ``nixl`` is installed, its own, over shared memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

from benchmarks.online.servers import free_port
from tests.e2e.conftest import MakeEngine
from tests.support.pretended_nixl import PretendedAgent
from tests.support.reference_generation import SAFE_LEAD, GreedyReference, Prompts, tie_free_case
from tests.support.stepped_engine import SteppedEngine, overlap_steps_on_cpu, tokens_of

NUM_NEW_TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
TO_DECODE_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False}


class Member:
    """One of two engines of this process.

    vLLM keeps the worker's side of a connector in a variable of the process. It is put there for each step.
    """

    def __init__(self, llm: Any, engine_class: type[SteppedEngine]) -> None:
        self.engine = engine_class(llm)
        self.num_scheduled_tokens = 0
        self._agent: Any = kv_transfer_state._KV_CONNECTOR_AGENT
        schedule = self.engine.scheduler.schedule

        def count_tokens(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.num_scheduled_tokens += output.total_num_scheduled_tokens
            return output

        self.engine.scheduler.schedule = count_tokens

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the process be this engine's."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self._agent
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def step(self) -> None:
        """Run one step, which may be without tokens."""
        with self.active():
            self.engine.step()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, and nothing waits for the other engine."""
        return not self.engine.is_busy and not self.engine.scheduler.requests

    @property
    def nixl(self) -> Any:
        """NIXL's agent, or the pretended one."""
        return self._agent.connector_worker.nixl_wrapper

    def end_leases(self) -> None:
        """Keep blocks no longer for engines that did not say that they have read them, as after 30 seconds."""
        worker = self._agent.connector_worker
        worker._reqs_to_send.update(dict.fromkeys(worker._reqs_to_send, 0.0))

    def close(self) -> None:
        """Check that no block is held."""
        self.engine.manager.check_integrity()
        assert self.engine.manager.usage == 0.0 and not len(self.engine.manager.clones.held_sources())


class StockEngine(SteppedEngine):
    """An engine with vLLM's own block manager."""

    @property
    def manager(self) -> Any:
        """What this file asks of Rose's block manager."""
        return SimpleNamespace(
            check_integrity=lambda: None,
            usage=self.scheduler.kv_cache_manager.usage,
            clones=SimpleNamespace(held_sources=tuple),
        )


@dataclass
class Pair:
    """Two engines: one that computes prompts, and one that goes on from there."""

    prefill: Member
    decode: Member

    def add(
        self, name: str, prompt: Any, to: str, transfer: dict[str, Any] | None, num_tokens: int = 1
    ) -> None:
        """Queue a request at the engine ``to``, with parameters of a transfer."""
        params = SamplingParams(**GREEDY, max_tokens=num_tokens, logprobs=0)
        if transfer is not None:
            params.extra_args = {"kv_transfer_params": transfer}
        getattr(self, to).engine.add(name, prompt, params)

    def step_until(self, is_done: Callable[[], bool]) -> None:
        """Step both engines in turn; they greet each other in threads of their own, however long that takes."""
        while not is_done():
            self.prefill.step()
            self.decode.step()
            time.sleep(0.0005)

    def compute_prompts(self, prompts: Prompts) -> list[dict[str, Any]]:
        """Compute prompts; return what the decoding engine has to know of each."""
        engine = self.prefill.engine
        for index, prompt in enumerate(prompts):
            self.add(f"p{index}", prompt, "prefill", dict(TO_DECODE_ELSEWHERE))
        self.step_until(lambda: len(finished(engine)) == len(prompts))
        outputs = forget(engine)
        return [outputs[f"p{index}"].kv_transfer_params for index in range(len(prompts))]

    def generate(self, prompts: Prompts, transfers: list[dict[str, Any] | None]) -> list[Any]:
        """Generate in the decoding engine, until nothing is left in either."""
        for index, (prompt, transfer) in enumerate(zip(prompts, transfers, strict=True)):
            self.add(f"d{index}", prompt, "decode", transfer, NUM_NEW_TOKENS)
        outputs = self.finish()
        return [outputs[f"d{index}"] for index in range(len(prompts))]

    def finish(self) -> dict[str, Any]:
        """Step until nothing is left in either engine, and return what the decoding one generated."""
        self.step_until(lambda: self.decode.is_idle)
        if PretendedAgent.fails_every:
            # vLLM tells the first engine of no failure.
            self.prefill.end_leases()
        self.step_until(lambda: self.prefill.is_idle)
        self.prefill.close()
        self.decode.close()
        return forget(self.decode.engine)


def finished(engine: SteppedEngine) -> list[Any]:
    """Return the outputs of requests that are finished."""
    return [output for output in engine.outputs.values() if output.finished]


def forget(engine: SteppedEngine) -> dict[str, Any]:
    """Return all outputs since the last call."""
    outputs, engine.outputs = engine.outputs, {}
    return outputs


MakePair = Callable[..., contextlib.AbstractContextManager[Pair]]


@pytest.fixture(params=["pretended", "nixl"])
def agent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pretended":
        PretendedAgent.forget_all()
        monkeypatch.setattr(base_worker, "NixlWrapper", PretendedAgent)
        monkeypatch.setattr(base_worker, "nixl_agent_config", None)
    elif find_spec("nixl") is None:
        pytest.skip("needs the package nixl, which CI does not install")
    return str(request.param)


@pytest.fixture
def make_pair(make_engine: MakeEngine, agent: str, monkeypatch: pytest.MonkeyPatch) -> MakePair:
    @contextlib.contextmanager
    def pair(
        *,
        policy: str = "fail",
        num_decode_blocks: int | None = None,
        is_batched: bool = True,
        is_stock: bool = False,
    ) -> Iterator[Pair]:
        rose = {"block_manager": not is_stock, "batched_scheduling": is_batched}
        options: dict[str, Any] = {"additional_config": {"rose": rose}}
        cores = os.sched_getaffinity(0)
        with contextlib.ExitStack() as stack:
            members = []
            for role in ("kv_producer", "kv_consumer"):
                monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
                connector = KVTransferConfig(
                    kv_connector="NixlConnector",
                    kv_role=role,
                    kv_buffer_device="cpu",
                    kv_load_failure_policy=policy,
                )
                if role == "kv_consumer":
                    options["num_gpu_blocks_override"] = num_decode_blocks
                kv_transfer_state._KV_CONNECTOR_AGENT = None
                llm = stack.enter_context(make_engine(kv_transfer_config=connector, **options))
                # The connector moves the thread that made it to a core of its own.
                os.sched_setaffinity(0, cores)
                member = Member(llm, StockEngine if is_stock else SteppedEngine)
                assert isinstance(member.nixl, PretendedAgent) == (agent == "pretended")
                stack.enter_context(member.active())
                members.append(member)
            yield Pair(*members)

    return pair


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> tuple[Prompts, GreedyReference]:
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=2559)
    count = 24
    tokens = tuple(row[:NUM_NEW_TOKENS] for row in reference.token_ids[:count])
    return prompts[:count], GreedyReference(tokens, reference.leads[:count])


def assert_same(outputs: list[Any], others: list[Any], reference: GreedyReference) -> None:
    """Compare tokens with transformers', log-probabilities with those of one engine alone."""
    for index, (output, other) in enumerate(zip(outputs, others, strict=True)):
        tokens = tokens_of(output)
        assert tokens == reference.token_ids[index], reference.explain_difference(index, list(tokens))
        of_one, of_two = (
            [step[token].logprob for token, step in zip(tokens, each.outputs[0].logprobs, strict=True)]
            for each in (other, output)
        )
        assert of_two == pytest.approx(of_one, abs=SAFE_LEAD / 4)


@pytest.mark.parametrize("steps", ["awaited", "overlapped", "one by one"])
def test_one_engine_decodes_what_another_computed(
    make_pair: MakePair,
    case: tuple[Prompts, GreedyReference],
    monkeypatch: pytest.MonkeyPatch,
    steps: str,
) -> None:
    if steps == "overlapped":
        overlap_steps_on_cpu(monkeypatch)
    prompts, reference = case
    with make_pair(is_batched=steps != "one by one") as pair:
        alone = pair.generate(prompts, [None] * len(prompts))
        # Nothing, parts and all of it are here already.
        for kept in (0, 0, 8, len(prompts)):
            assert pair.decode.engine.scheduler.reset_prefix_cache()
            pair.generate(prompts[:kept], [None] * kept)
            before = pair.decode.num_scheduled_tokens
            outputs = pair.generate(prompts, pair.compute_prompts(prompts))
            assert_same(outputs, alone, reference)
            # Of a prompt only the last token was computed again.
            assert pair.decode.num_scheduled_tokens - before == len(prompts) * NUM_NEW_TOKENS


def test_as_many_bytes_move_as_behind_vllms_own_block_manager(
    make_pair: MakePair, case: tuple[Prompts, GreedyReference], agent: str
) -> None:
    if agent != "pretended":
        pytest.skip("bytes are counted by the pretended agents")
    prompts, _ = case
    moved = []
    for is_stock in (False, True):
        PretendedAgent.forget_all()
        with make_pair(is_stock=is_stock) as pair:
            counts = []
            for kept in (0, 5, len(prompts)):
                assert pair.decode.engine.scheduler.reset_prefix_cache()
                # Heads of prompts, which end inside blocks and at their ends.
                pair.generate(
                    tuple(prompt[: len(prompt) // 2 + 1] for prompt in prompts[:kept]), [None] * kept
                )
                pair.generate(prompts, pair.compute_prompts(prompts))
                counts.append(PretendedAgent.num_bytes)
        moved.append(counts)
    assert moved[0] == moved[1]
    assert moved[0][0] > 0 and moved[0][1] - moved[0][0] > moved[0][2] - moved[0][1]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_loads_that_fail(
    make_pair: MakePair, case: tuple[Prompts, GreedyReference], agent: str, policy: str
) -> None:
    if agent != "pretended":
        pytest.skip("the pretended agents fail on demand")
    prompts, reference = case
    with make_pair(policy=policy) as pair:
        alone = pair.generate(prompts, [None] * len(prompts))
        assert pair.decode.engine.scheduler.reset_prefix_cache()
        PretendedAgent.fails_every = 3
        outputs = pair.generate(prompts, pair.compute_prompts(prompts))
        failed = [index for index, output in enumerate(outputs) if output.outputs[0].finish_reason == "error"]
        assert len(failed) == (len(prompts) // 3 if policy == "fail" else 0)
        good = [index for index in range(len(prompts)) if index not in failed]
        tokens, leads = ([each[index] for index in good] for each in (reference.token_ids, reference.leads))
        chosen = GreedyReference(tuple(tokens), tuple(leads))
        assert_same([outputs[index] for index in good], [alone[index] for index in good], chosen)
        # Nothing of a failed load is found.
        PretendedAgent.fails_every = 0
        assert_same(pair.generate(prompts, [None] * len(prompts)), alone, reference)


def test_aborts_at_any_time_free_both_sides(
    make_pair: MakePair, case: tuple[Prompts, GreedyReference]
) -> None:
    prompts, reference = case
    with make_pair() as pair:
        alone = pair.generate(prompts, [None] * len(prompts))
        for num_steps in (0, 1, 2, 3, 6, 12):
            assert pair.decode.engine.scheduler.reset_prefix_cache()
            transfers = pair.compute_prompts(prompts)
            for index, (prompt, transfer) in enumerate(zip(prompts, transfers, strict=True)):
                pair.add(f"d{index}", prompt, "decode", transfer, NUM_NEW_TOKENS)
            for _ in range(num_steps):
                pair.prefill.step()
                pair.decode.step()
            for index in range(0, len(prompts), 2):
                pair.decode.engine.abort(f"d{index}")
            outputs = pair.finish()
            for index in range(1, len(prompts), 2):
                assert tokens_of(outputs[f"d{index}"]) == reference.token_ids[index]
        assert_same(pair.generate(prompts, [None] * len(prompts)), alone, reference)


def test_a_preempted_request_computes_what_it_had_loaded(
    make_pair: MakePair, case: tuple[Prompts, GreedyReference]
) -> None:
    prompts, reference = case
    with make_pair(num_decode_blocks=80) as pair:
        alone = pair.generate(prompts, [None] * len(prompts))
        before = pair.decode.engine.num_preemptions
        assert pair.decode.engine.scheduler.reset_prefix_cache()
        assert_same(pair.generate(prompts, pair.compute_prompts(prompts)), alone, reference)
        assert pair.decode.engine.num_preemptions > before
