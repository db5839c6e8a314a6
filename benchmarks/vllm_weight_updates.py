"""Time weight updates and sleep inside vLLM, as trainers for reinforcement learning ask for them.

    python -m benchmarks.vllm_weight_updates [--shape llama-8b] [--updates 20] [--starts 3] [--quick]

Each start of each backend is a process of its own. Its weights are replaced, in turns, by two sets of tensors that are
on the device already. An update is timed from the call until the device is done. After each one, all tensors that the
layers read are compared, bit for bit, with those that loading the set afresh would give. Answers to the same prompts
(texts and bits of log-probabilities, as a digest) are compared between starts, and the table shows those of all
entrances. On a GPU engines also sleep (level 1) and wake up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reports.text import grouped, markdown, publish
from benchmarks.support.checkpoint import (
    LLAMA_1B,
    LLAMA_8B,
    QWEN3_06B,
    checkpoint,
    model_facts,
    one_checkpoint,
)
from benchmarks.support.cli import DEFAULT, at_least, new_parser, set_device_defaults
from benchmarks.support.comparison import add_engine_options, chosen, set_engine_defaults
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.timing import no_garbage_collection
from benchmarks.support.workload import RandomRequests
from benchmarks.vllm_request_kinds import is_one_start, run_starts, wait_for_turn
from benchmarks.vllm_step_profile import BACKENDS, Engine

Weights = list[tuple[str, Any]]
SHAPES = (LLAMA_8B, LLAMA_1B, QWEN3_06B)
BUCKET_BYTES = 512 << 20
NUM_ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 32, 32
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""vLLM's module -> a checkpoint's parts of it."""


def load_whole(worker: Any, weights: Weights) -> None:
    """Load all tensors in one call of the model."""
    worker.model_runner.model.load_weights(weights=weights)


def load_in_buckets(worker: Any, weights: Weights) -> None:
    """Load buckets of ``BUCKET_BYTES``, as trainers send them."""
    bucket: Weights = []
    for name, tensor in weights:
        if bucket and sum(each.nbytes for _, each in bucket) + tensor.nbytes > BUCKET_BYTES:
            load_whole(worker, bucket)
            bucket = []
        bucket.append((name, tensor))
    load_whole(worker, bucket)


def load_one_by_one(worker: Any, weights: Weights) -> None:
    """Load each tensor by a call of its own."""
    for each in weights:
        load_whole(worker, [each])


def transfer(worker: Any, weights: Weights) -> None:
    """Run a session of vLLM's weight transfer, whose engine has the tensors already."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    worker, runner = worker.worker, worker.model_runner
    engine: Any = IPCWeightTransferEngine(None, worker.vllm_config, runner.device, runner.model)
    engine.update_weights = lambda info: runner.model.load_weights(info["weights"])
    worker.weight_transfer_engine = engine
    worker.start_weight_update()
    worker.update_weights({"weights": weights})
    worker.finish_weight_update()
    worker.weight_transfer_engine = None


def reload(worker: Any, weights: Weights) -> None:
    """Let vLLM reload from tensors."""
    worker.reload_weights(weights_iterator=iter(weights))


ENTRANCES: dict[str, Callable[[Any, Weights], None]] = {
    "load_weights": load_whole,
    "load_weights, buckets": load_in_buckets,
    "load_weights, one by one": load_one_by_one,
    "weight transfer": transfer,
    "reload_weights": reload,
}


def worker_of(engine: Engine) -> Any:
    """Return the worker, which is in this process."""
    return engine.engine.engine_core.engine_core.model_executor.driver_worker


def read_sets(model: str, device: Any) -> list[Weights]:
    """Return a checkpoint's tensors, and others of the same sizes, on the device."""
    from safetensors.torch import load_file

    first: Weights = []
    for path in sorted(Path(model).glob("*.safetensors")):
        first += load_file(path, device=str(device)).items()
    # As large as the first ones, so that answers stay as meaningful.
    return [first, [(name, each.flip(0) if each.ndim > 1 else each * 1.125) for name, each in first]]


def tensors_read(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield what steps read, by the names of vLLM's modules; where products are packed, Rose's ``PackedLinear``."""
    packed = getattr(model, "_layers", None)
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        read = {
            "self_attn.qkv_proj": attention.qkv_proj.weight,
            "self_attn.o_proj": attention.o_proj.weight,
            "mlp.gate_up_proj": mlp.gate_up_proj.weight,
            "mlp.down_proj": mlp.down_proj.weight,
        }
        if packed is not None:
            ours = packed[index]
            products = (ours.qkv, ours.attn_out, ours.mlp.gate_up, ours.mlp.down)
            read = {
                name: linear.packed or linear.weight.t() for name, linear in zip(read, products, strict=True)
            }
        for name in ("input_layernorm", "post_attention_layernorm"):
            read[name] = getattr(layer, name).weight
        yield from ((f"model.layers.{index}.{name}", tensor) for name, tensor in read.items())
    yield "model.norm", model.model.norm.weight
    yield "model.embed_tokens", model.model.embed_tokens.weight
    yield "lm_head", model.lm_head.weight


def find_stale(model: Any, weights: Weights) -> list[str]:
    """Return the names of what steps would read that is not what loading ``weights`` afresh gives."""
    import torch

    by_name, stale = dict(weights), []
    by_name.setdefault("lm_head.weight", by_name["model.embed_tokens.weight"])
    for name, tensor in tensors_read(model):
        layer, module = name.rsplit(".", 2)[0], ".".join(name.rsplit(".", 2)[1:])
        parts = [f"{layer}.{part}" for part in FUSED.get(module, ())] or [name]
        fresh = torch.cat([by_name[f"{part}.weight"] for part in parts])
        if not isinstance(tensor, torch.Tensor):
            from rose_backend.kernels import pack_linear

            fresh, tensor = pack_linear(fresh, gated=tensor.is_gated).weight, tensor.weight
        # Rows of padding follow those of the vocabulary.
        if not torch.equal(tensor[: len(fresh)], fresh.to(tensor.dtype)):
            stale.append(name)
    return stale


def answer(engine: Engine, vocab_size: int) -> str:
    """Return a digest of answers to the same prompts as ever: tokens, and the bits of their log-probabilities."""
    engine.llm.reset_prefix_cache()
    lengths = (PROMPT_TOKENS, PROMPT_TOKENS), (ANSWER_TOKENS, ANSWER_TOKENS)
    prompts = RandomRequests(NUM_ANSWERS, *lengths, 0).requests(vocab_size).prompts
    params = engine._params(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=1)
    outputs = engine.llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    digest = hashlib.sha256()
    for output in outputs:
        completion = output.outputs[0]
        chosen_ones = zip(completion.logprobs, completion.token_ids, strict=True)
        digest.update(np.array(completion.token_ids, np.int64).tobytes())
        digest.update(np.array([each[token].logprob for each, token in chosen_ones], np.float64).tobytes())
    return digest.hexdigest()[:16]


def graphs_of(engine: Engine) -> int | None:
    """Return what tells the steps that are replayed whole from those of another capture; None: there are none."""
    manager = getattr(worker_of(engine).model_runner, "cudagraph_manager", None)
    steps = getattr(manager, "rose_step_graphs", None)
    return None if steps is None else id(steps)


def timed_ms(call: Callable[[], object]) -> float:
    """Return the time of a call and of the device's work for it."""
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def time_updates(engine: Engine, name: str, sets: list[Weights], num_updates: int, vocab_size: int) -> Any:
    """Return the row of an entrance, after updates that end with the second set."""
    model, graphs, times, stale = worker_of(engine).model_runner.model, graphs_of(engine), [], []
    for number in reversed(range(num_updates)):
        weights = sets[(number + 1) % 2]
        call = partial(engine.llm.collective_rpc, partial(ENTRANCES[name], weights=weights))
        with no_garbage_collection():
            times.append(timed_ms(call))
        stale += find_stale(model, weights)
    return {
        "scene": name,
        "times_ms": times,
        "stale": sorted(set(stale)),
        "first_answers_ms": timed_ms(lambda: answer(engine, vocab_size)),
        "answers": answer(engine, vocab_size),
        "graphs_kept": graphs == graphs_of(engine) if graphs is not None else None,
    }


def time_sleeps(engine: Engine, num_sleeps: int, vocab_size: int) -> Any:
    """Return the row of sleep and wake-up."""
    graphs, sleeps, wakes = graphs_of(engine), [], []
    for _ in range(num_sleeps):
        sleeps.append(timed_ms(lambda: engine.llm.sleep(level=1)))
        wakes.append(timed_ms(engine.llm.wake_up))
    return {
        "scene": "sleep level 1, wake up",
        "times_ms": [sleep + wake for sleep, wake in zip(sleeps, wakes, strict=True)],
        "wake_ms": wakes,
        "stale": [],
        "first_answers_ms": timed_ms(lambda: answer(engine, vocab_size)),
        "answers": answer(engine, vocab_size),
        "graphs_kept": graphs == graphs_of(engine) if graphs is not None else None,
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one start of one backend."""
    with checkpoint(options.model, options.shape, small=options.quick) as model:
        facts = model_facts(model)
        engine = Engine(options, model, facts)
        wait_for_turn(options)
        sets = read_sets(model, worker_of(engine).model_runner.device)
        scene = {
            "scene": "as loaded",
            "times_ms": [],
            "stale": find_stale(worker_of(engine).model_runner.model, sets[0]),
        }
        rows = [{**scene, "answers": answer(engine, facts.vocab_size), "graphs_kept": None}]
        for name in options.entrances:
            rows.append(time_updates(engine, name, sets, options.updates, facts.vocab_size))
            print(f"{options.backend}: {rows[-1]}", file=sys.stderr, flush=True)
        if options.device == "cuda" and options.sleeps:
            rows.append(time_sleeps(engine, options.sleeps, facts.vocab_size))
        engine.close()
    return rows


def table(report: dict[str, Any]) -> str:
    """Return a line for each scene of each backend, over all starts."""
    lines = []
    for (scene, backend), rows in grouped(report["rows"], "scene", "backend").items():
        times = [time_ms for row in rows for time_ms in row["times_ms"]]
        stale = sorted({name for row in rows for name in row["stale"]})
        kept = {row["graphs_kept"] for row in rows} - {None}
        lines.append(
            (
                scene,
                backend,
                *((f"{q:,.1f}" for q in np.percentile(times, (50, 99))) if times else ("", "")),
                f"{statistics.median(row.get('first_answers_ms', 0.0) for row in rows):,.0f}",
                "all" if not stale else f"NOT {', '.join(stale[:4])}",
                {True: "yes", False: "NO"}[kept == {True}] if kept else "",
                ", ".join(sorted({row["answers"] for row in rows})),
            )
        )
    header = (
        "update",
        "engine",
        "median ms",
        "p99 ms",
        "first answers ms",
        "tensors right",
        "graphs kept",
        "answers",
    )
    return markdown(header, lines, f"{report['device']}, {report['settings']['model']}")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    number = at_least(1)
    parser.add_argument("--updates", type=number, help="by each entrance (default: 20)")
    parser.add_argument("--starts", type=number, help="of each backend (default: 3)")
    parser.add_argument("--sleeps", type=at_least(0), default=3, help="of each start on a GPU " + DEFAULT)
    parser.add_argument("--entrances", nargs="+", choices=list(ENTRANCES), default=list(ENTRANCES))
    parser.add_argument(
        "--start-at-once",
        action="store_true",
        help="all engines first, and time them in turns; the device must hold them all",
    )
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of one start, in a process of its own
    add_engine_options(parser, BACKENDS)
    parser.set_defaults(shape=LLAMA_8B)
    options = parser.parse_args(arguments)
    options.kv_cache_tokens = None
    set_device_defaults(options)
    # On a CPU vLLM's layers drop the weights that they have rearranged: there is nothing to update.
    set_engine_defaults(options, BACKENDS if options.device == "cuda" else BACKENDS[:1])
    if options.model is None and options.shape not in SHAPES:
        parser.error(f"--shape: got {options.shape}, allowed are {', '.join(SHAPES)}")
    for name, value in zip(("updates", "starts"), (2, 1) if options.quick else (20, 3), strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.device == "cuda":
        options.engine_options += [(backend, json.dumps({"enable_sleep_mode": True})) for backend in BACKENDS]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; the status is 1 if a tensor was wrong, or answers were not the same in all starts."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_options(arguments)
    if is_one_start(options, measure):
        return 0
    with one_checkpoint(options.model, options.shape, small=options.quick):
        rows = [
            {"start": number // len(options.backends), "backend": backend, **row}
            for number, (backend, of_start) in enumerate(
                run_starts(
                    "benchmarks.vllm_weight_updates",
                    arguments,
                    options.backends * options.starts,
                    at_once=options.start_at_once,
                )
            )
            for row in of_start
        ]
    names = ("dtype", "max_num_seqs", "updates", "starts", "sleeps", "start_at_once", "backends", "quick")
    settings = chosen(options, *names)
    report = {
        "benchmark": "vllm_weight_updates",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {"model": options.model_name, **settings},
        "rows": rows,
    }
    publish(report, table(report), options.json)
    answers = grouped(rows, "scene", "backend").values()
    differ = any(len({row["answers"] for row in of_scene}) > 1 for of_scene in answers)
    return int(differ or any(row["stale"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
