"""One engine of the matrix, with Rose or without, in a process of its own: ``python -m tests.gpu_matrix.side``.

It starts one engine, lets it answer all traffic, and goes on as ``reference``, which adds what float32 says of every
token and writes all of it as JSON. What that means is decided by ``verdict``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before vLLM is imported: one process, no network, few threads.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# Stock's other sampler is compiled for minutes where none was before; draws are not compared.
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"

import torch
from vllm import LLM, PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.gpu_matrix.cases import CASES, ENGINE_OPTIONS, Case
from tests.gpu_matrix.reference import drawn
from tests.gpu_matrix.traffic import CHOICES, NUM_TOP, TOP_K, Ask, Picture, first_asks, mixed_asks
from tests.support.stepped_engine import SteppedEngine

SIDES = ("rose", "stock")
WITHOUT_PROMPT_LOGPROBS = ("LoRA", "prompt embeddings")
"""vLLM has none for embeddings; beside LoRA, 0.32 stops with an error on a CPU: it adapts logits of too few rows."""


class StockEngine(SteppedEngine):
    """Without Rose's block manager, whose books are recounted after every step."""

    class _NoManager:
        usage = 0.0

        def check_integrity(self) -> None:
            pass

        def held_sources(self) -> tuple[()]:
            return ()

        @property
        def clones(self) -> Any:
            return self

    manager = _NoManager()  # type: ignore[assignment]


class Side:
    """A case's engine and what it has answered."""

    def __init__(self, case: Case, side: str, path: Path) -> None:
        self.case, self.path, self.is_rose = case, path, side == "rose"
        self.answers: dict[str, dict[str, Any]] = {}
        self.counts = {"mixed_steps": 0, "chunked_steps": 0, "cached_tokens": 0}
        llm = LLM(**self._options())
        self.engine = SteppedEngine(llm) if self.is_rose else StockEngine(llm)
        self.llm = llm
        self._table: torch.Tensor | None = None

    def _options(self) -> dict[str, Any]:
        options = ENGINE_OPTIONS | _with_path(self.case.options, self.path) | {"model": str(self.path)}
        options |= {"dtype": self.case.dtype}
        if self.is_rose:
            options |= {"attention_backend": "rose"}
            options |= {"num_gpu_blocks_override": self.case.num_blocks, "block_size": 16}
        if torch.cuda.is_available():
            # Others share the GPU; the cache's size is given.
            return {"attention_backend": self.case.stock_backend, "gpu_memory_utilization": 0.05} | options
        return options | {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}

    def run(self) -> None:
        """Let the engine answer everything."""
        first = first_asks(bool(self.case.placeholder))
        self.one_by_one(first, "")
        self.all_at_once(mixed_asks(bool(self.case.placeholder), has_adapter=self.case.feature == "LoRA"))
        self.counts["preemptions"] = self.engine.num_preemptions
        self.counts |= self._metrics()
        self.one_by_one(first, "again-")
        if self.case.reset_step is not None:
            # The reset emptied the cache. Of requests since then with one prompt, the first leaves K/V, the second a
            # checkpoint of the states inside it, and only the third can hit that.
            for prefix in ("third-", "fourth-"):
                self.one_by_one(first, prefix)
        self._forget()
        self.one_by_one(first, "afresh-")
        self.counts["loaded_tokens"] = self._metrics()["loaded_tokens"] - self.counts["loaded_tokens"]

    def one_by_one(self, asks: Sequence[Ask], prefix: str) -> None:
        """Ask one at a time."""
        for ask in asks:
            self._add(ask)
            self._keep([ask], prefix)

    def all_at_once(self, asks: Sequence[Ask]) -> None:
        """Ask while others are being answered, step by step as ``traffic`` has it."""
        coming, step = sorted(asks, key=lambda ask: ask.arrival_step), 0
        schedule = self.engine.scheduler.schedule

        def counted(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            counts = list(output.num_scheduled_tokens.values())
            self.counts["mixed_steps"] += bool(counts) and min(counts) <= 4 and max(counts) > 8
            self.counts["chunked_steps"] += any(
                tokens > 8 and not self._ends_prompt(name)
                for name, tokens in output.num_scheduled_tokens.items()
            )
            return output

        self.engine.scheduler.schedule = counted
        while coming or self.engine.is_busy:
            while coming and coming[0].arrival_step <= step:
                self._add(coming.pop(0))
            if self.is_rose and step == self.case.reset_step:
                assert self.llm.reset_prefix_cache(reset_running_requests=True)
            self.engine.step()
            step += 1
        self.engine.scheduler.schedule = schedule
        self._keep(asks, "")

    def _ends_prompt(self, name: str) -> bool:
        request = self.engine.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)

    def _forget(self) -> None:
        """Lose all K/V: nothing of it may be found, unless it was kept elsewhere."""
        if self.case.feature == "sleep and wake":
            for level in (1, 2):
                self.llm.sleep(level=level)
                self.llm.wake_up()
            self.llm.collective_rpc("reload_weights")
        else:
            assert self.llm.reset_prefix_cache()

    def _metrics(self) -> dict[str, int]:
        values = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        names = {
            "drafted": "vllm:spec_decode_num_draft_tokens",
            "accepted": "vllm:spec_decode_num_accepted_tokens",
            "loaded_tokens": "vllm:external_prefix_cache_hits",
        }
        return {key: int(values.get(name) or 0) for key, name in names.items()}

    def _add(self, ask: Ask) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": [], "multi_modal_data": {"image": []}}
        for part in ask.parts:
            if isinstance(part, Picture):
                # Without the token behind a picture where that is the prompt's end.
                prompt["prompt_token_ids"] += self.case.placeholder[: 2 if part is ask.parts[-1] else 3]
                prompt["multi_modal_data"]["image"].append(drawn(part))
            else:
                prompt["prompt_token_ids"] += part
        if not prompt["multi_modal_data"]["image"]:
            del prompt["multi_modal_data"]
        if self.case.feature == "prompt embeddings":
            prompt = {"prompt_embeds": self._embeddings()[prompt["prompt_token_ids"]]}
        options: dict[str, Any] = {}
        if ask.is_adapted:
            options["lora_request"] = LoRARequest("an adapter", 1, str(self.path / "adapter"))
        self.engine.add(ask.name, prompt, self._params(ask), **options)

    def _params(self, ask: Ask) -> Any:
        if self.case.feature == "pooling":
            return PoolingParams(task="embed")
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": ask.max_tokens, "ignore_eos": True}
        if ask.kind == "logprobs":
            options["logprobs"] = NUM_TOP
        elif ask.kind == "prompt_logprobs" and self.case.feature not in WITHOUT_PROMPT_LOGPROBS:
            options |= {"logprobs": 0, "prompt_logprobs": 0}
        elif ask.kind == "structured":
            options |= {"structured_outputs": StructuredOutputsParams(choice=CHOICES), "ignore_eos": False}
        elif not ask.is_greedy:
            options |= {"temperature": 1.0, "top_k": TOP_K, "n": 3 if ask.kind == "n" else 1}
            # vLLM brings the completions of one request together only in a final output.
            options["output_kind"] = RequestOutputKind.FINAL_ONLY
        return SamplingParams(**options)

    def _embeddings(self) -> torch.Tensor:
        if self._table is None:
            from safetensors.torch import load_file

            self._table = load_file(self.path / "model.safetensors")["model.embed_tokens.weight"].to(
                self.llm.llm_engine.vllm_config.model_config.dtype
            )
        return self._table

    def _keep(self, asks: Sequence[Ask], prefix: str) -> None:
        outputs = self.engine.drain()
        for ask in asks:
            output = outputs[ask.name]
            answer: dict[str, Any] = {"ask": dataclasses.asdict(ask) | {"is_greedy": ask.is_greedy}}
            self.counts["cached_tokens"] += output.num_cached_tokens or 0
            if self.case.feature == "pooling":
                answer["embedding"] = output.outputs.data.tolist()
            else:
                answer["completions"] = [_completion(completion) for completion in output.outputs]
                answer["prompt_logprobs"] = _own_logprobs(
                    output.prompt_logprobs and output.prompt_logprobs[1:], (output.prompt_token_ids or [])[1:]
                )
            # With placeholders of pictures as often as the model sees them; of embeddings vLLM knows no tokens.
            is_embedded = self.case.feature == "prompt embeddings"
            answer["prompt"] = list(sum(ask.parts, ()) if is_embedded else output.prompt_token_ids)
            self.answers[prefix + ask.name] = answer


def _completion(completion: Any) -> dict[str, Any]:
    tokens = list(completion.token_ids)
    return {
        "text": completion.text,
        "tokens": tokens,
        "logprobs": _own_logprobs(completion.logprobs, tokens),
        "top": [
            sorted((entry.logprob for entry in step.values()), reverse=True)
            for step in completion.logprobs or ()
        ],
    }


def _own_logprobs(steps: Any, tokens: Sequence[int]) -> list[float] | None:
    if not steps:
        return None
    return [step[token].logprob for step, token in zip(steps, tokens, strict=True)]


def _with_path(value: Any, path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _with_path(each, path) for key, each in value.items()}
    return value.replace("{path}", str(path)) if isinstance(value, str) else value


def versions() -> dict[str, str]:
    """Return what ran."""
    import transformers
    import triton
    import vllm

    import rose_backend

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    modules = (vllm, torch, triton, transformers)
    names = {module.__name__: str(module.__version__) for module in modules}
    return names | {"rose_backend": rose_backend.__version__, "device": device}


def main() -> None:
    """Run one side of one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("checkpoint", type=Path, help="folder that the case's checkpoint was written to")
    parser.add_argument("out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    case = CASES[options.case]
    report: dict[str, Any] = {"case": case.name, "side": options.side, "versions": versions()}
    report["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    if lacking := case.lacking:
        options.out.write_text(json.dumps(report | {"not_run": f"missing: {', '.join(lacking)}"}))
        return
    if options.side == "rose":
        from rose_backend.vllm_plugin import register

        register()
    else:
        os.environ["VLLM_PLUGINS"] = ""
    started = time.monotonic()
    side = Side(case, options.side, options.checkpoint)
    ready = time.monotonic()
    side.run()
    report["seconds"] = {"start": ready - started, "traffic": time.monotonic() - ready}
    answers = options.out.with_suffix(".answers")
    answers.write_text(json.dumps(report | {"counts": side.counts, "answers": side.answers}))
    # vLLM has changed some of transformers' classes in this process, which also holds memory of the GPU.
    sys.stdout.flush()
    command = [
        sys.executable,
        "-m",
        "tests.gpu_matrix.reference",
        str(options.checkpoint),
        str(answers),
        str(options.out),
    ]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
