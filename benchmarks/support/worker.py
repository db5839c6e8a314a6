"""One engine in a process of its own: takes commands and gives answers, one JSON object a line, on stdin and stdout.

    python -m benchmarks.support.worker offline rose

    {"op": "start", "options": {...}, "vocab_size": N}  -> {"facts": {...}}, or {"missing": "why it is not installed"}
    {"op": "generate", "workload": {...}}               -> {"seconds": ..., "input_tokens": ..., "output_tokens": ...}
    {"op": "serve", "workload": {...}, "rate": R|null}  -> figures as ``vllm bench serve`` names them; null: all at once
    {"op": "wake"}                                      -> {}, after one token for a prompt of no interest
    {"op": "close"}                                     -> {}

A failure is {"error": "..."}. Whatever the engine prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.online.timeline import Timeline, play, summary
from benchmarks.support.engines import EngineOptions, make_offline, make_streaming, module_of
from benchmarks.support.workload import MODES, RandomRequests

Answer = dict[str, Any]
# No other prompt begins with token 0: this one leaves nothing in a prefix cache that a turn could find.
WAKING_PROMPT = [0, 1, 2, 3]


class OfflineWorker:
    """Runs one engine's ``generate``."""

    def __init__(self, backend: str, options: EngineOptions, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.engine = make_offline(backend, options)

    def generate(self, command: Answer) -> Answer:
        """Time one call; prompts and parameters are the same for every engine."""
        workload = RandomRequests.from_json(command["workload"])
        prompts, output_lens = workload.prompts(self._vocab_size), workload.output_lens()
        start = time.perf_counter()
        output_tokens = self.engine.generate(prompts, output_lens, MODES[workload.mode])
        seconds = time.perf_counter() - start
        check_output(output_tokens, output_lens)
        return {"seconds": seconds, "input_tokens": sum(map(len, prompts)), "output_tokens": output_tokens}

    def wake(self, command: Answer) -> Answer:
        """Let all of the engine's processes do something."""
        self.engine.generate([WAKING_PROMPT], [1], MODES["greedy"])
        return {}

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


class StreamingWorker:
    """Runs one engine's ``stream`` for many callers on one event loop."""

    def __init__(self, backend: str, options: EngineOptions, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._runner = asyncio.Runner()

        async def make() -> Any:
            return make_streaming(backend, options)

        self.engine = self._runner.run(make())

    def serve(self, command: Answer) -> Answer:
        """Play one workload and sum up."""
        workload, rate = RandomRequests.from_json(command["workload"]), command["rate"]
        prompts, output_lens = workload.prompts(self._vocab_size), workload.output_lens()
        due = workload.arrivals(rate)
        sampling = MODES[workload.mode]

        async def send(prompt: list[int], output_len: int, timeline: Timeline) -> None:
            async for num_tokens in self.engine.stream(prompt, output_len, sampling):
                if num_tokens:
                    timeline.saw(num_tokens)

        timelines, duration = self._runner.run(play(send, prompts, output_lens, due))
        check_output(sum(timeline.num_tokens for timeline in timelines), output_lens)
        return summary(timelines, duration)

    def wake(self, command: Answer) -> Answer:
        """Let all of the engine's processes do something."""

        async def read() -> None:
            async for _ in self.engine.stream(WAKING_PROMPT, 1, MODES["greedy"]):
                pass

        self._runner.run(read())
        return {}

    def close(self) -> None:
        """Stop the engine."""
        self._runner.run(self.engine.aclose())
        self._runner.close()


def check_output(output_tokens: int, output_lens: list[int]) -> None:
    """Raise unless every token that was asked for has come."""
    if output_tokens != sum(output_lens):
        raise RuntimeError(f"got {output_tokens} new tokens, {sum(output_lens)} were asked for")


def start(kind: str, backend: str, command: Answer) -> tuple[Any, Answer]:
    """Return a worker with its engine, or None and why there is none."""
    options = EngineOptions(**command["options"])
    try:
        worker = {"offline": OfflineWorker, "streaming": StreamingWorker}[kind](
            backend, options, command["vocab_size"]
        )
    except ModuleNotFoundError as error:
        # Another missing module means a broken installation, which is reported as a failure.
        if error.name != module_of(backend):
            raise
        return None, {"missing": str(error)}
    # What is there stays: collections that look at all of it would hit some engine's run at random.
    gc.collect()
    gc.freeze()
    return worker, {"facts": worker.engine.facts()}


def serve_commands(kind: str, backend: str, answer: Callable[[Answer], None]) -> None:
    """Carry out what comes on stdin, until "close" or its end."""
    worker: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["op"] == "start":
                worker, reply = start(kind, backend, command)
                answer(reply)
            elif command["op"] == "close":
                if worker is not None:
                    worker.close()
                answer({})
                return
            else:
                answer(getattr(worker, command["op"])(command))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Keep stdout for answers and give engines stderr instead."""
    kind, backend = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(reply: Answer) -> None:
            answers.write(json.dumps(reply) + "\n")
            answers.flush()

        serve_commands(kind, backend, answer)


if __name__ == "__main__":
    main()
