"""Every example runs on the embedded model and shows what it promises."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [name, str(model)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_has_a_test() -> None:
    tested = {"generate.py", "stream.py", "share_prefix.py", "sample_n.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_generate(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("generate.py", tiny_model_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"'.+' -> '.{40,}'|'.+' -> \".{40,}\"", line) for line in lines)


def test_stream(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("stream.py", tiny_model_path, monkeypatch)
    out = capsys.readouterr().out
    # How many pieces there are, and in which order, depends on how busy the machine is; what they make does not.
    pieces = [
        (name, ast.literal_eval(piece))
        for name, piece in re.findall(r"^(left|right): (.+)$", out, re.MULTILINE)
    ]
    for name, prompt in (
        ("left", "The old woman opened the door and"),
        ("right", "The wolf went into the wood and"),
    ):
        text = "".join(piece for of, piece in pieces if of == name)
        assert len(text) > 24 and f"\n{prompt}{text}" in out


def test_share_prefix(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("share_prefix.py", tiny_model_path, monkeypatch)
    numbers = re.findall(
        r"prompt tokens: (\d+), cached: (\d+), blocks cloned: (\d+)", capsys.readouterr().out
    )
    (first_length, *first), (_, second_cached, second_clones) = [tuple(map(int, match)) for match in numbers]
    assert first == [0, 0]
    assert 16 < second_cached < first_length and second_cached % 16 != 0
    assert second_clones == 1


def test_sample_n(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("sample_n.py", tiny_model_path, monkeypatch)
    out = capsys.readouterr().out
    assert len(set(re.findall(r"^[0-3]: (.+)", out, re.MULTILINE))) == 4
    [(length, computed, clones)] = re.findall(
        r"prompt tokens: (\d+), computed: (\d+), blocks cloned: (\d+)", out
    )
    assert length == computed
    assert clones == "3"
