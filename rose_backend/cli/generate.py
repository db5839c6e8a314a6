"""``rose generate``: stream one prompt, or work through a file of prompts."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from rose_backend.cli.options import (
    Commands,
    add_engine_options,
    add_sampling_options,
    engine_config,
    sampling_options,
)
from rose_backend.engine.outputs import CompletionOutput, RequestOutput, json_logprobs
from rose_backend.engine.process_settings import note_imports
from rose_backend.engine.request import LoRARequest
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import RequestError

if TYPE_CHECKING:
    from rose_backend.engine.llm import LLM
    from rose_backend.engine.request import Prompt

Requests: TypeAlias = "dict[int, tuple[Prompt, dict[str, Any]]]"
"""Index of a prompt's line, from 0 -> the prompt, and fields of ``SamplingParams``, which are checked."""


def add_generate_command(commands: Commands) -> None:
    """Add ``rose generate`` with its options."""
    parser = commands.add_parser(
        "generate",
        help="generate text for one prompt, or for a file of prompts",
        description="Stream the continuation of --prompt to the terminal, or write those of --prompts to --output.",
    )
    source = parser.add_argument_group("input and output")
    source.add_argument("--model", required=True, metavar="PATH", help="local directory or Hugging Face id")
    source.add_argument("--prompt", metavar="TEXT", help="one prompt")
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help='one prompt per line, blank lines left out; with a name ending in .jsonl, lines {"prompt": ..., and any '
        "sampling field}",
    )
    source.add_argument(
        "--output",
        metavar="FILE.jsonl",
        help="where to write the results of --prompts, one object per line, each as soon as it is finished; its "
        '"index" is that of the prompt\'s line, from 0',
    )
    source.add_argument(
        "--lora-path", metavar="PATH", help="directory of a LoRA adapter for all prompts; needs --enable-lora"
    )
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> None:
    if (args.prompt is None) == (args.prompts is None):
        raise RequestError("generate: give either --prompt TEXT, or --prompts FILE with --output FILE.jsonl")
    if args.prompts is not None and args.output is None:
        raise RequestError("--output: needed with --prompts, a file to write the results to")
    if args.prompt is not None and args.output is not None:
        raise RequestError("--output: allowed with --prompts only; --prompt writes to the terminal")
    config = engine_config(args.model, args)
    given = sampling_options(args)
    SamplingParams(**given)
    lora = None if args.lora_path is None else LoRARequest("lora", 1, args.lora_path)
    if lora is not None and not config.enable_lora:
        raise RequestError("--lora-path: allowed with --enable-lora only")
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        is_file = args.prompts is not None
        requests = read_prompts(Path(args.prompts), given) if is_file else {0: (args.prompt, given)}
        # Imported here: it loads torch, which takes seconds; mistakes in options and file are reported before.
        from rose_backend.engine.llm import LLM
        from rose_backend.engine.request import sampling_defaults
        from rose_backend.engine.startup import show_start_up

        note_imports()
        # The model may have to be downloaded.
        defaults = sampling_defaults(config).fields
        params = [SamplingParams(**{**defaults, **fields}) for _, fields in requests.values()]
        with LLM.from_config(config) as llm:
            show_start_up(llm.core.start_up)
            if is_file:
                _write_answers(llm, requests, params, args.output, lora)
            else:
                _stream(llm, args.prompt, params[0], lora)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Let SIGTERM end the command as Ctrl-C does, so that what is open is closed."""
    raise KeyboardInterrupt(number)


def _stream(llm: LLM, prompt: str, params: SamplingParams, lora: LoRARequest | None) -> None:
    """Write a continuation to stdout as it is generated; several, when ``n`` asks for them, one after the other."""
    if params.n > 1:
        for completion in llm.generate(prompt, params, lora_request=lora)[0].outputs:
            print(f"--- completion {completion.index} ---\n{completion.text}")
        return
    for output in llm.stream(prompt, params, lora_request=lora):
        sys.stdout.write(output.outputs[0].delta_text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _write_answers(
    llm: LLM, requests: Requests, params: list[SamplingParams], output: str, lora: LoRARequest | None
) -> None:
    """Generate for every request, and write one JSON object each to the file ``output``.

    Each is written as soon as it is finished, so an interrupted run leaves all answers that progress counts. Lines are
    therefore in the order in which prompts finish; ``index`` says whose they are.
    """
    indexes, prompts = list(requests), [prompt for prompt, _ in requests.values()]
    # Checks every request, so a bad line leaves an existing output file alone.
    finished = llm.generate_unordered(prompts, params, lora_request=lora, progress=True)
    num_written = 0
    try:
        with open(output, "w", encoding="utf-8") as file:
            for position, result in finished:
                record = _as_record(indexes[position], result)
                # One call for the line and its end: where a signal comes between two, half a line would stay.
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                num_written += 1
    finally:
        print(f"{num_written} of {len(prompts)} answers are in {output}", file=sys.stderr)


def read_prompts(path: Path, given: dict[str, Any]) -> Requests:
    """Read a file of prompts, one a line; blank lines hold none.

    Raises:
        RequestError: a line is no JSON object, has no "prompt", or holds a sampling field that is not allowed.
        OSError: the file cannot be read.
    """
    try:
        # Not splitlines(): a prompt may hold form feeds and Unicode's line separators, which end no line of the file.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    requests: Requests = {}
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        is_object = path.suffix == ".jsonl"
        source = f"{path} line {index + 1}"
        requests[index] = _parse_line(line, given, source=source) if is_object else (line, given)
    if not requests:
        raise RequestError(f"{path}: holds no prompt")
    return requests


def _parse_line(line: str, given: dict[str, Any], *, source: str) -> tuple[Prompt, dict[str, Any]]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{source}: not valid JSON ({error})") from error
    if not isinstance(fields, dict) or "prompt" not in fields:
        raise RequestError(f'{source}: a JSON object with "prompt" is needed')
    prompt = fields.pop("prompt")
    try:
        SamplingParams.from_mapping({**given, **fields}, source="line")
    except RequestError as error:
        raise RequestError(f"{source}: {error}", parameter=error.parameter, value=error.value) from error
    return prompt, {**given, **fields}


def _as_record(index: int, output: RequestOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": index,
        "prompt": output.prompt if output.prompt is not None else output.prompt_token_ids,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [_completion_record(completion) for completion in output.outputs],
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [json_logprobs(each) for each in output.prompt_logprobs]
    return record


def _completion_record(completion: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        total = completion.cumulative_logprob
        record["cumulative_logprob"] = total if total is not None and math.isfinite(total) else None
        record["logprobs"] = [json_logprobs(each) for each in completion.logprobs]
    return record
