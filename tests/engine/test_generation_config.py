"""generation_config.json: its end tokens always count, its sampling parameters where a caller says nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rose_backend import LLM, EngineConfig, SamplingParams
from rose_backend.cli import main
from rose_backend.engine.async_engine import AsyncEngine
from rose_backend.engine.request import sampling_defaults
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import ConfigError, ModelError, RequestError
from tests.support.llama_checkpoints import WINDOW, change_json, write_checkpoint
from tests.support.reference_generation import tie_free_answer

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that no test changes."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def greedy(original: Path) -> tuple[int, ...]:
    """Return what transformers takes for the likeliest tokens behind ``PROMPT``."""
    return tie_free_answer(original, PROMPT, 32)


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint without generation_config.json, whose files may be changed."""
    for path in original.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").unlink()
    return tmp_path


def write_generation_config(checkpoint: Path, **fields: Any) -> None:
    change_json(checkpoint / "generation_config.json", **fields)


def answer(llm: LLM, params: SamplingParams | None = None) -> list[int]:
    tokens: list[int] = llm.generate([PROMPT], params)[0].outputs[0].token_ids
    return tokens


def open_llm(checkpoint: Path, **options: Any) -> LLM:
    return LLM(str(checkpoint), **{"device": "cpu", "dtype": "float32", "num_blocks": 200, **options})


def test_its_parameters_are_those_of_a_caller_without_any(checkpoint: Path, greedy: tuple[int, ...]) -> None:
    # A draw among one token, at the temperature of a file that asks for draws.
    write_generation_config(checkpoint, do_sample=True, temperature=0.6, top_k=1, max_new_tokens=20)
    with open_llm(checkpoint) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=1, max_tokens=20)
        assert answer(llm) == list(greedy[:20])
        stream = list(llm.stream(PROMPT))
        assert stream[-1].outputs[0].token_ids == list(greedy[:20])
        # A caller who says something says everything.
        drawn = [answer(llm, SamplingParams(seed=seed)) for seed in range(4)]
        assert all(len(tokens) == 16 for tokens in drawn) and len(set(map(tuple, drawn))) > 1


def test_off(checkpoint: Path, greedy: tuple[int, ...]) -> None:
    write_generation_config(checkpoint, temperature=0.6, top_k=1, max_new_tokens=20)
    with open_llm(checkpoint, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert len(answer(llm)) == 16 and answer(llm) != list(greedy[:16])


def test_every_field_is_read_and_others_are_not(checkpoint: Path) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
    }
    others = {"do_sample": False, "num_beams": 4, "transformers_version": "5.0.0", "top_a": None}
    write_generation_config(checkpoint, **fields, **others)
    defaults = sampling_defaults(EngineConfig(model=str(checkpoint)))
    assert defaults.fields == fields and defaults.max_new_tokens is None
    assert json.loads(str(defaults)) == fields
    write_generation_config(checkpoint, **dict.fromkeys(fields), max_new_tokens=9)
    assert str(sampling_defaults(EngineConfig(model=str(checkpoint)))) == '{"max_new_tokens": 9}'


def test_its_limit_ends_with_the_window(checkpoint: Path) -> None:
    write_generation_config(checkpoint, max_new_tokens=5000, eos_token_id=[])
    with open_llm(checkpoint, max_model_len=48) as llm:
        outputs = llm.generate([PROMPT, [1] * 40])
        assert [len(output.outputs[0].token_ids) for output in outputs] == [43, 8]
        with pytest.raises(RequestError, match="max_tokens: got 5000"):
            answer(llm, llm.get_default_sampling_params())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "generation_config.json: temperature: got 'hot'"),
        ({"max_new_tokens": 0}, "generation_config.json: max_tokens: got 0"),
        ({"top_p": 1.5}, "--generation-config none ignores its sampling parameters"),
    ],
)
def test_impossible_values(checkpoint: Path, fields: dict[str, Any], message: str) -> None:
    write_generation_config(checkpoint, **fields)
    with pytest.raises(ModelError) as caught:
        LLM(str(checkpoint), device="cpu")
    assert message in str(caught.value)
    with open_llm(checkpoint, generation_config="none") as llm:
        assert len(answer(llm)) == 16


def test_an_unknown_choice() -> None:
    with pytest.raises(ConfigError, match="generation_config: got 'vllm', allowed are auto, none"):
        EngineConfig(model="m", generation_config="vllm")


@pytest.mark.parametrize("generation_config", ["auto", "none"])
def test_end_tokens_of_every_file_count(
    checkpoint: Path, greedy: tuple[int, ...], generation_config: str
) -> None:
    first = {token: index for index, token in reversed(list(enumerate(greedy)))}
    late, middle, early = sorted(first, key=lambda token: -first[token])[:3]
    params = SamplingParams(temperature=0.0, max_tokens=32)

    def stops_at(token: int) -> None:
        with open_llm(checkpoint, generation_config=generation_config) as llm:
            output = llm.generate([PROMPT], params)[0].outputs[0]
            assert output.token_ids == list(greedy[: first[token] + 1]) and output.finish_reason == "stop"
            ignoring = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
            assert answer(llm, ignoring) == list(greedy)

    change_json(checkpoint / "config.json", eos_token_id=late)
    stops_at(late)
    # Ids outside the vocabulary end nothing.
    write_generation_config(checkpoint, eos_token_id=[100_000, middle])
    stops_at(middle)
    backend = json.loads((checkpoint / "tokenizer.json").read_text())
    (text,) = (token for token, index in backend["model"]["vocab"].items() if index == early)
    change_json(checkpoint / "tokenizer_config.json", eos_token={"__type": "AddedToken", "content": text})
    assert Tokenizer(checkpoint).eos_token_id == early
    stops_at(early)


def test_end_tokens_that_are_no_ids(checkpoint: Path) -> None:
    write_generation_config(checkpoint, eos_token_id="end")
    with pytest.raises(
        ModelError, match=r"generation_config.json: eos_token_id must be one integer, or a list"
    ):
        LLM(str(checkpoint), device="cpu")


def test_async_engine(checkpoint: Path, greedy: tuple[int, ...]) -> None:
    write_generation_config(checkpoint, temperature=0.0, max_new_tokens=20)

    async def run() -> list[int]:
        engine = AsyncEngine(str(checkpoint), device="cpu", dtype="float32", num_blocks=200)
        try:
            return [output async for output in engine.generate(PROMPT)][-1].outputs[0].token_ids
        finally:
            await engine.shutdown()

    assert asyncio.run(run()) == list(greedy[:20])


def test_rose_generate(checkpoint: Path, tmp_path: Path, greedy: tuple[int, ...]) -> None:
    write_generation_config(checkpoint, temperature=0.7, top_k=1)
    lines = [{"prompt": PROMPT}, {"prompt": PROMPT, "top_k": 0, "seed": 1, "temperature": 1.5}]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def generate(*argv: str) -> list[list[int]]:
        files = ["--prompts", str(prompts), "--output", str(output)]
        fixed = ["--device", "cpu", "--dtype", "float32", "--max-tokens", "12", "--num-blocks", "200"]
        assert main(["generate", "--model", str(checkpoint), *files, *fixed, *argv]) == 0
        return [json.loads(line)["outputs"][0]["token_ids"] for line in output.read_text().splitlines()]

    likeliest = list(greedy[:12])
    from_file, from_line = generate()
    assert from_file == likeliest != from_line
    assert generate("--top-k", "0")[0] != likeliest
    assert generate("--generation-config", "none")[0] != likeliest
    assert generate("--generation-config", "none", "--temperature", "0")[0] == likeliest


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_names_the_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--generation-config {auto,none}" in text and "(default: auto)" in text


def test_the_window_is_the_checkpoints(checkpoint: Path) -> None:
    with open_llm(checkpoint) as llm:
        assert llm.core.input_processor.max_model_len == WINDOW
