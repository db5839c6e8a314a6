"""``rose generate``: stream one prompt, or work through a file of prompts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rose_backend.config import EngineConfig
from rose_backend.engine.input_processor import sampling_defaults
from rose_backend.engine.llm import LLM
from rose_backend.engine.outputs import CompletionOutput, RequestOutput, json_logprob
from rose_backend.engine.request import Prompt
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.startup import show_start_up
from rose_backend.errors import RequestError


class LineOfPrompts(NamedTuple):
    """A prompt from a file."""

    line_index: int
    """From 0: what ``index`` in the output says."""
    prompt: Prompt
    fields: dict[str, Any]
    """Of ``SamplingParams``, checked."""


def stream_prompt(config: EngineConfig, prompt: str, given: dict[str, Any]) -> int:
    """Write a continuation to stdout as it is generated; several, when ``n`` asks for them, one after the other.

    Args:
        given: ``SamplingParams`` fields; the model's generation_config.json may have others.
    """
    params = SamplingParams(**{**sampling_defaults(config).fields, **given})
    with LLM.from_config(config) as llm:
        show_start_up(llm.core.start_up)
        if params.n > 1:
            for completion in llm.generate(prompt, params)[0].outputs:
                print(f"--- completion {completion.index} ---\n{completion.text}")
            return 0
        for output in llm.stream(prompt, params):
            sys.stdout.write(output.outputs[0].delta_text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def generate_file(config: EngineConfig, prompts: str, output: str, given: dict[str, Any]) -> int:
    """Generate for every line of ``prompts`` and write one JSON object per prompt to ``output``.

    Each is written as soon as it is finished, so an interrupted run leaves all answers that progress counts. Lines are
    therefore in the order in which prompts finish; ``index`` says whose they are.

    Args:
        prompts: text file, or .jsonl file whose lines may override ``given``.
        given: ``SamplingParams`` fields of lines that say nothing else; generation_config.json may have others.

    Raises:
        RequestError: a line is not usable; its number is named and nothing has been generated.
        OSError: a file cannot be read or written.
    """
    requests = read_prompts(Path(prompts), given)
    # Behind the file's mistakes: the model may have to be downloaded.
    defaults = sampling_defaults(config).fields
    params = [SamplingParams(**{**defaults, **request.fields}) for request in requests]
    with LLM.from_config(config) as llm:
        show_start_up(llm.core.start_up)
        # Checks every request, so a bad line leaves an existing output file alone.
        finished = llm.generate_unordered([request.prompt for request in requests], params, progress=True)
        num_written = 0
        try:
            with open(output, "w", encoding="utf-8") as file:
                for index, result in finished:
                    record = _as_record(requests[index].line_index, result)
                    # One call for the line and its end: where a signal comes between two, half a line would stay.
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    file.flush()
                    num_written += 1
        finally:
            print(f"{num_written} of {len(requests)} answers are in {output}", file=sys.stderr)
    return 0


def read_prompts(path: Path, given: dict[str, Any]) -> list[LineOfPrompts]:
    """Read a file of prompts, one a line; blank lines hold none, and leave a gap in the indexes.

    Raises:
        RequestError: a line is no JSON object, has no "prompt", or holds a sampling field that is not allowed.
        OSError: the file cannot be read.
    """
    try:
        # Not splitlines(): a prompt may hold form feeds and Unicode's line separators, which end no line of the file.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    requests: list[LineOfPrompts] = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            prompt, fields = _parse_line(line, given, source=f"{path} line {index + 1}")
        else:
            prompt, fields = line, given
        requests.append(LineOfPrompts(index, prompt, fields))
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
    return {
        "index": index,
        "prompt": output.prompt if output.prompt is not None else output.prompt_token_ids,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [_completion_record(completion) for completion in output.outputs],
    }


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
        record["logprobs"] = [
            {
                str(token_id): {**entry._asdict(), "logprob": json_logprob(entry.logprob)}
                for token_id, entry in position.items()
            }
            for position in completion.logprobs
        ]
    return record
