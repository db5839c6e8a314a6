"""The ``rose`` command and ``rose blocks``: results where asked for, one line for each mistake."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from rose_backend import LLM, EngineConfig, LoRARequest, SamplingParams, __version__
from rose_backend.block_view.page import render_page
from rose_backend.block_view.story import tell_story
from rose_backend.cli import main
from rose_backend.cli.generate import _completion_record
from rose_backend.config import SWITCH_NAMES
from rose_backend.engine.outputs import CompletionOutput, Logprob
from tests.support.adapters import write_adapter
from tests.support.metrics_server import SAMPLE, MetricsServer
from tests.support.patience import HANG_S


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: for a tiny model more are no faster, and far slower when other programs run."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def run(*argv: str) -> int:
    """Return the exit code, whether ``main`` returns it or argparse raises it."""
    try:
        return main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def assert_one_line_error(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rose: error: ")
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_prompt_streams_the_text(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(str(tiny_model_path)) as llm:
        expected = llm.generate("The king", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    code = run(
        "generate",
        "--model",
        str(tiny_model_path),
        "--prompt",
        "The king",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
    )
    assert (code, capsys.readouterr().out) == (0, expected + "\n")


def test_an_adapter_for_all_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(__file__).parent.parent / "models" / "tiny-qwen3-chat"
    adapter = write_adapter(tmp_path / "adapter", model)
    lora = LoRARequest("lora", 1, str(adapter))
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(model), enable_lora=True) as llm:
        (adapted,) = llm.generate("The king", greedy, lora_request=lora)
        (plain,) = llm.generate("The king", greedy)
    argv = [
        "generate",
        "--model",
        str(model),
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "--lora-path",
        str(adapter),
    ]
    assert run(*argv, "--enable-lora", "--prompt", "The king") == 0
    text = capsys.readouterr().out
    assert text == adapted.outputs[0].text + "\n" != plain.outputs[0].text + "\n"
    (tmp_path / "prompts.txt").write_text("The king")
    files = ("--prompts", str(tmp_path / "prompts.txt"), "--output", str(tmp_path / "out.jsonl"))
    assert run(*argv, "--enable-lora", *files) == 0
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert record["outputs"][0]["text"] == adapted.outputs[0].text
    capsys.readouterr()
    assert run(*argv, "--prompt", "The king") == 2
    assert_one_line_error(capsys, "--lora-path: allowed with --enable-lora only")


def test_tokens_are_biased_allowed_and_forbidden(
    tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "logit_bias": {"259": 50, "307": -2.5},
        "allowed_token_ids": [259, 307, 623],
        "bad_words": ["the the"],
    }
    argv = ["--prompt", "The king", "--logit-bias", json.dumps(given["logit_bias"]), "--bad-words", "the the"]
    argv += [word for each in (259, 307, 623) for word in ("--allowed-token-ids", str(each))]
    assert run("generate", "--model", str(tiny_model_path), *argv, "--temperature", "0") == 0
    with LLM(str(tiny_model_path)) as llm:
        (completion,) = llm.generate("The king", SamplingParams(temperature=0, **given))[0].outputs
    assert capsys.readouterr().out == completion.text + "\n"
    assert completion.token_ids[:4] == [259, completion.token_ids[1], 259, completion.token_ids[3]]
    assert {completion.token_ids[1], completion.token_ids[3]} <= {307, 623}
    for text in ("{5", "5"):
        assert run("generate", "--model", str(tiny_model_path), "--prompt", "a", "--logit-bias", text) == 2
        assert_one_line_error(capsys, "logit")


def test_several_completions_are_told_apart(
    tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--prompt", "The king", "--n", "2", "--sampling-seed", "3", "--no-prefix-cache"]
    assert run("generate", "--model", str(tiny_model_path), *argv) == 0
    with LLM(str(tiny_model_path)) as llm:
        texts = [c.text for c in llm.generate("The king", SamplingParams(n=2, seed=3))[0].outputs]
    expected = "".join(f"--- completion {index} ---\n{text}\n" for index, text in enumerate(texts))
    assert capsys.readouterr().out == expected


def test_file_of_prompts(tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "The king", "max_tokens": 30},
        {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 0},
        {"prompt": "Die Rose blüht", "stop": "e", "n": 2, "seed": 1, "temperature": 0.7},
        {
            "prompt": "The king",
            "bad_words": ["was"],
            "logit_bias": {"259": 3},
            "allowed_token_ids": [259, 307],
        },
    ]
    source.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    argv = ["--prompts", str(source), "--output", str(target), "--temperature", "0", "--max-num-seqs", "2"]
    assert run("generate", "--model", str(tiny_model_path), *argv) == 0
    records = sorted(
        map(json.loads, target.read_text(encoding="utf-8").splitlines()), key=itemgetter("index")
    )
    with LLM(str(tiny_model_path)) as llm:
        for index, (line, record) in enumerate(zip(lines, records, strict=True)):
            fields = {"temperature": 0.0} | {name: value for name, value in line.items() if name != "prompt"}
            output = llm.generate([line["prompt"]], SamplingParams(**fields))[0]  # type: ignore[arg-type, list-item]
            assert (record["index"], record["prompt"]) == (index, line["prompt"])
            assert [o["text"] for o in record["outputs"]] == [c.text for c in output.outputs]
            assert [o["token_ids"] for o in record["outputs"]] == [c.token_ids for c in output.outputs]
            assert [o["finish_reason"] for o in record["outputs"]] == [
                c.finish_reason for c in output.outputs
            ]
    assert len(records[1]["outputs"][0]["logprobs"]) == 2
    assert [each and list(each) for each in records[1]["prompt_logprobs"]] == [None, ["6"], ["7"]]
    assert "prompt_logprobs" not in records[0]
    captured = capsys.readouterr()
    assert captured.out == ""
    num_tokens = sum(len(each["token_ids"]) for record in records for each in record["outputs"])
    assert f"generating: 4 of 4 prompts finished, {num_tokens:,} tokens, " in captured.err
    assert captured.err.endswith(f"4 of 4 answers are in {target}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_finished_before_a_signal_is_in_the_file(
    number: signal.Signals,
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    # The first prompt is the last to finish.
    lines = [{"prompt": "The king", "max_tokens": 200}, *({"prompt": "The queen", "max_tokens": 2},) * 49]
    source.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    generate = LLM.generate_unordered

    def interrupted(llm: LLM, *args: Any, **options: Any) -> Iterator[Any]:
        for count, finished in enumerate(generate(llm, *args, **options), 1):
            yield finished
            if count == 49:
                signal.raise_signal(number)

    monkeypatch.setattr(LLM, "generate_unordered", interrupted)
    handler = signal.getsignal(signal.SIGTERM)
    argv = ["--prompts", str(source), "--output", str(target), "--ignore-eos"]
    assert run("generate", "--model", str(tiny_model_path), *argv) == 128 + number
    assert signal.getsignal(signal.SIGTERM) is handler
    records = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert sorted(record["index"] for record in records) == list(range(1, 50))
    assert f"49 of 50 answers are in {target}\nrose: interrupted\n" in capsys.readouterr().err


def test_an_answer_is_in_the_file_before_the_next_is_asked_for(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    source.write_text("The king\nThe queen\nThe rose", encoding="utf-8")
    generate, sizes = LLM.generate_unordered, []

    def watched(llm: LLM, *args: Any, **options: Any) -> Iterator[Any]:
        for finished in generate(llm, *args, **options):
            yield finished
            sizes.append(target.read_bytes().count(b"\n"))

    monkeypatch.setattr(LLM, "generate_unordered", watched)
    argv = ["--prompts", str(source), "--output", str(target), "--max-tokens", "2"]
    assert run("generate", "--model", str(tiny_model_path), *argv) == 0
    assert sizes == [1, 2, 3]


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, -1.5])
def test_every_record_is_json(logprob: float) -> None:
    completion = CompletionOutput(0, "a", [5], [{5: Logprob(logprob, 1, "a")}], logprob, "length")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(json.dumps(_completion_record(completion)), parse_constant=refuse)
    shown = {math.inf: None, -math.inf: -9999.0, -1.5: -1.5}.get(logprob)
    assert record["logprobs"] == [{"5": {"logprob": shown, "rank": 1, "decoded_token": "a"}}]
    assert record["cumulative_logprob"] == (logprob if logprob == -1.5 else None)


def test_text_file_has_one_prompt_per_line(tiny_model_path: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    # Blank lines hold no prompt but count as lines; a form feed and U+2028 end none.
    text = "\nThe king\n \n\n  The queen  \r\nThe\x0cold\u2028king\n\n"
    source.write_text(text, encoding="utf-8", newline="")
    assert (
        run("generate", "--model", str(tiny_model_path), "--prompts", str(source), "--output", str(target))
        == 0
    )
    lines = target.read_text(encoding="utf-8").split("\n")
    records = sorted((json.loads(line) for line in lines if line), key=itemgetter("index"))
    expected = [(1, "The king"), (4, "  The queen  "), (5, "The\x0cold\u2028king")]
    assert [(record["index"], record["prompt"]) for record in records] == expected


def test_drafts_change_no_answer(tiny_model_path: Path, tmp_path: Path) -> None:
    answers = []
    config = (
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
    )
    for options in ([], ["--speculative-config", config, "--no-adaptive-drafts"]):
        source, target = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
        source.write_text("the king and the king and the\nOnce upon a time\n", encoding="utf-8")
        argv = ["--prompts", str(source), "--output", str(target), "--dtype", "float32", "--max-tokens", "30"]
        assert run("generate", "--model", str(tiny_model_path), *argv, "--temperature", "0", *options) == 0
        answers.append(sorted(target.read_text(encoding="utf-8").splitlines()))
    assert answers[0] == answers[1]


def test_blank_lines_between_objects_count_as_lines(tiny_model_path: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "The king"}\n\n{"prompt": "The\u2028queen"}\n', encoding="utf-8")
    argv = ["--prompts", str(source), "--output", str(target), "--max-tokens", "1"]
    assert run("generate", "--model", str(tiny_model_path), *argv) == 0
    lines = target.read_text(encoding="utf-8").split("\n")
    records = sorted((json.loads(line) for line in lines if line), key=itemgetter("index"))
    expected = [(0, "The king"), (2, "The\u2028queen")]
    assert [(record["index"], record["prompt"]) for record in records] == expected


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ((), ("COMMAND",)),
        (("genrate",), ("genrate", "generate")),
        (("generate", "--prompt", "a"), ("--model",)),
        (("generate", "--model", "m"), ("--prompt TEXT", "--prompts FILE")),
        (("generate", "--model", "m", "--prompts", "f"), ("--output",)),
        (("generate", "--model", "m", "--prompt", "a", "--output", "f"), ("--output",)),
        (("generate", "--model", "m", "--prompt", "a", "--blok-size", "8"), ("--blok-size", "--block-size")),
        (("generate", "--model", "m", "--prompt", "a", "--no-fused-mpl"), ("did you mean --no-fused-mlp?",)),
        (("generate", "--model", "m", "--prompt", "a", "--pacing"), ("--pacing: removed in release 0.2.0",)),
        (("serve", "m", "--no-pacing"), ("--no-pacing: removed in release 0.2.0",)),
        (("generate", "--model", "m", "--prompt", "a", "--block", "8"), ("--block",)),
        (("generate", "--model", "m", "--prompt", "a", "--block-size", "x"), ("--block-size", "'x'")),
        (("generate", "--model", "m", "--prompt", "a", "--block-size", "0"), ("block_size: got 0",)),
        (("generate", "--model", "m", "--prompt", "a", "--top-p", "nan"), ("top_p: got nan",)),
        (("generate", "--model", "m", "--prompt", "a", "--max-tokens", "-3"), ("max_tokens: got -3",)),
        (("generate", "--model", "/no/such/dir", "--prompt", "a"), ("/no/such/dir",)),
        (("generate", "--model", "m", "--prompts", "/no/file", "--output", "/tmp/x"), ("/no/file",)),
        (("env", "--dtype", "int4"), ("--dtype", "int4")),
        (("serve", "m", "--speculative-config", "ngram"), ("--speculative-config", "JSON", "'ngram'")),
        (
            ("serve", "m", "--speculative-config", '{"method": "mtp"}'),
            ("method: got 'mtp', allowed are ngram,",),
        ),
        (
            (
                "generate",
                "--model",
                "m",
                "--prompt",
                "a",
                "--speculative-config",
                '{"num_speculative_token": 1}',
            ),
            ("unknown field 'num_speculative_token'", "did you mean 'num_speculative_tokens'?"),
        ),
    ],
)
def test_mistakes(argv: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert_one_line_error(capsys, *parts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2: not valid JSON"),
        ("[1]", 'line 2: a JSON object with "prompt" is needed'),
        ('{"text": "a"}', 'line 2: a JSON object with "prompt" is needed'),
        ('{"prompt": "a", "temprature": 1}', "did you mean 'temperature'?"),
        ('{"prompt": "a", "n": 0}', "line 2: n: got 0"),
        ('{"prompt": ""}', "prompt: got no tokens"),
        ('{"prompt": {}}', "prompt: got dict"),
    ],
)
def test_bad_line_leaves_the_output_alone(
    line: str, message: str, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    target.write_text("precious", encoding="utf-8")
    assert (
        run("generate", "--model", str(tiny_model_path), "--prompts", str(source), "--output", str(target))
        == 2
    )
    assert_one_line_error(capsys, message)
    assert target.read_text(encoding="utf-8") == "precious"


def test_help_shows_every_option_and_no_command_that_does_not_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("generate", "--help") == 0
    text = capsys.readouterr().out
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingParams)):
        assert f"--{field.name.replace('_', '-')}" in text
    for name in SWITCH_NAMES:
        assert f"--no-{name.replace('_', '-')}" in text
    assert run("--help") == 0
    commands = capsys.readouterr().out
    assert all(
        f"\n    {name} " in commands for name in ("generate", "serve", "warmup", "bench", "blocks", "env")
    )
    assert "benchmark" not in commands


def test_bench_without_vllm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(os, "execv", None)  # else it would become this process
    assert run("bench", "serve", "--backend", "openai") == 2
    assert_one_line_error(capsys, "bench: needs vLLM, which is not installed; pip install 'WHEEL[vllm]'")
    assert run("bench", "throughput") == 2
    assert_one_line_error(capsys, "'throughput' (choose from")
    assert run("bench", "--help") == 0
    assert "rose bench serve [-h] [OPTIONS OF vllm bench serve]" in capsys.readouterr().out


def test_env_reports_versions_and_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("env", "--device", "cpu", "--no-fused-mlp") == 0
    report = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert report["rose"] == __version__
    # What is installed, which is not always what torch calls itself: builds from an index leave "+cu130" out.
    assert report["torch"] == version("torch")
    assert set(SWITCH_NAMES) <= set(report)
    assert {"python", "triton", "vllm", "transformers", "numpy", "flashinfer", "platform", "device"} <= set(
        report
    )
    assert report["fused_mlp"] == "off"
    assert report["fused_sampler"].startswith("on")
    assert report["cuda_graph"] == "unavailable (device is cpu)"


def test_debug_level_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_LOG_LEVEL", "debug")
    with pytest.raises(ValueError, match="block_size"):
        main(["generate", "--model", "m", "--prompt", "a", "--block-size", "0"])


def test_unknown_log_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ROSE_LOG_LEVEL", "loud")
    assert run("env") == 2
    assert_one_line_error(capsys, "ROSE_LOG_LEVEL: got 'loud'")


def test_module_run_is_quick_and_light() -> None:
    code = "import sys, rose_backend.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    result = subprocess.run(
        [sys.executable, "-m", "rose_backend.cli", "--version"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, f"rose {__version__}\n")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    """A server with metrics, reached without any proxy."""
    monkeypatch.setenv("no_proxy", "*")
    running = MetricsServer()
    yield running
    running.vanish()


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ((), ("--demo", "--url")),
        (("--demo", "--url", "http://a"), ("--url", "--demo")),
        (("--demo", "--block-size", "1"), ("block_size: got 1", "2 to 32")),
        (("--demo", "--block-size", "33"), ("block_size: got 33", "2 to 32")),
        (("--demo", "--block-size", "x"), ("--block-size", "'x'")),
        (("--demo", "--prompt", " "), ("prompt: got 0 words", "1 to 96")),
        (("--demo", "--prompt", "a " * 97), ("prompt: got 97 words", "1 to 96")),
        (("--demo", "--tokens", "bytes"), ("--tokens", "'bytes'")),
        (("--demo", "--step", "0"), ("--step: got 0", "1 to 7")),
        (("--demo", "--step", "8"), ("--step: got 8", "1 to 7")),
        (("--demo", "--step", "1", "--html", "f"), ("--step: not allowed with --html",)),
        (("--demo", "--html", "/no/such/dir/f"), ("/no/such/dir/f",)),
        (("--demo", "--once"), ("--once: allowed with --url only",)),
        (("--demo", "--interval", "1"), ("--interval: allowed with --url only",)),
        (("--url", "http://a", "--html", "f"), ("--html: allowed with --demo only",)),
        (("--url", "http://a", "--block-size", "4"), ("--block-size: allowed with --demo only",)),
        (("--url", "http://a", "--interval", "0"), ("--interval: got 0.0", "0.1 to 3600")),
        (("--url", "http://a", "--interval", "nan"), ("--interval: got nan", "0.1 to 3600")),
        (("--url", "localhost:8000"), ("url: got 'localhost:8000'", "http://HOST:PORT")),
        (("--url", "file:///etc/passwd"), ("url: got 'file:///etc/passwd'", "http://HOST:PORT")),
        (("--url", "ftp://a:1"), ("url: got 'ftp://a:1'", "http://HOST:PORT")),
        (("--url", "http://a:x"), ("url: got 'http://a:x'", "http://HOST:PORT")),
        (("--demo", "--blok-size", "4"), ("did you mean --block-size?",)),
    ],
)
def test_mistakes_of_blocks(
    argv: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("blocks", *argv) == 2
    assert_one_line_error(capsys, *parts)


def test_help_groups_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("blocks", "--help") == 0
    text = capsys.readouterr().out
    with_demo, with_url = text.index("\nwith --demo:"), text.index("\nwith --url:")
    for option in ("--prompt", "--tokens", "--block-size", "--step", "--html"):
        assert with_demo < text.index(f"\n  {option}") < with_url
    for option in ("--interval", "--once"):
        assert with_url < text.index(f"\n  {option}")


def test_piped_output_has_no_escape_codes_and_one_step_can_be_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("blocks", "--demo", "--step", "3") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "#2 -> #3" in out and "2 of 7" not in out and "4 of 7" not in out
    assert re.search(r"A may write .*\n.*same block.*copy 2 tokens", out)
    assert re.search(r"\n B .*\n.*one rose ___ ___.*\n.*B may write", out)


def test_signs_that_the_terminal_lacks_are_replaced() -> None:
    command = [
        sys.executable,
        "-m",
        "rose_backend.cli",
        "blocks",
        "--demo",
        "--step",
        "1",
        "--prompt",
        "blüht \x1b[5m",
    ]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    finished = subprocess.run(command, capture_output=True, env=environment, timeout=HANG_S, check=False)
    assert finished.returncode == 0, finished.stderr
    assert b"bl?ht" in finished.stdout and b"\x1b" not in finished.stdout


def test_page_is_written_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "blocks.html"
    assert (
        run("blocks", "--demo", "--html", str(target), "--tokens", "characters", "--prompt", "Röslein") == 0
    )
    captured = capsys.readouterr()
    assert captured.out == "" and str(target) in captured.err
    assert target.read_text(encoding="utf-8") == render_page(tell_story("Röslein", tokens="characters"))


@pytest.mark.parametrize("options", [("--once",), ()])
def test_one_reading_is_printed(
    options: tuple[str, ...], engine: MetricsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("blocks", "--url", engine.url, *options) == 0
    out = capsys.readouterr().out
    assert engine.num_requests == 1
    assert "\x1b" not in out
    for line in (
        r"KV cache of rose-garden at http://127.0.0.1:\d+/metrics",
        r"pool in use +█{10}░{30} 25\.0%",
        r"blocks +64 of 256, 32 tokens each",
        r"requests +12 running, 3 waiting",
        r"prefix hits +75\.0% since start: 1,500 of 2,000 prompt tokens",
        r"tokens +5,000 of prompts, 640 generated since start",
        r"preempted +7 since start",
    ):
        assert re.search(rf"(?m)^ ?{line}", out), (line, out)
    assert "Rose counts" not in out


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("<html><body>Hello</body></html>", 200, "answered, but not with Prometheus metrics"),
        ('{"object": "list"}', 200, "answered, but not with Prometheus metrics"),
        ("python_info 1.0\n", 200, "answered with metrics, but not with vllm:kv_cache_usage_perc"),
        ("", 200, "answered with metrics, but not with vllm:kv_cache_usage_perc"),
        (
            "vllm:kv_cache_usage_perc NaN\n",
            200,
            "answered with metrics, but not with vllm:kv_cache_usage_perc",
        ),
        (SAMPLE, 503, "answered 503 Service Unavailable"),
    ],
)
def test_an_answer_that_is_no_engines(
    body: str, status: int, message: str, engine: MetricsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.body, engine.status = body, status
    assert run("blocks", "--url", engine.url, "--once") == 2
    assert_one_line_error(capsys, f"{engine.url}/metrics: {message}")


def test_no_engine(engine: MetricsServer, capsys: pytest.CaptureFixture[str]) -> None:
    engine.vanish()
    assert run("blocks", "--url", f"{engine.url}/metrics") == 2
    assert_one_line_error(capsys, f"{engine.url}/metrics: no answer (Connection refused)")


def test_missing_parser_says_how_to_install_it(
    engine: MetricsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    assert run("blocks", "--url", engine.url, "--once") == 2
    assert_one_line_error(capsys, "needs prometheus_client", "pip install 'WHEEL[serve]' brings it")


def test_engine_vanishes_midway_in_a_real_terminal(engine: MetricsServer) -> None:
    reader, terminal_side = pty.openpty()
    command = [sys.executable, "-m", "rose_backend.cli", "blocks", "--url", engine.url, "--interval", "0.1"]
    with subprocess.Popen(
        command, stdin=terminal_side, stdout=terminal_side, stderr=terminal_side
    ) as process:
        os.close(terminal_side)
        read_until(reader, "12 running")
        engine.vanish()
        read_until(reader, "no answer since")
        process.send_signal(signal.SIGINT)
        read_until(reader, None)
        assert process.wait(timeout=HANG_S) == 0
    os.close(reader)


def read_until(descriptor: int, text: str | None) -> None:
    """Read a terminal until a text has come; with None until nobody writes to it any more."""
    seen, end = b"", time.monotonic() + HANG_S
    while text is None or text.encode() not in seen:
        assert time.monotonic() < end, seen
        try:
            seen += os.read(descriptor, 65_536)
        except OSError:  # the other side is closed
            assert text is None, seen
            return
