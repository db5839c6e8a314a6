"""README.md and docs/: what they tell a reader to type exists, and the site can be built without a dead link.

No command is run: options are parsed by the parsers that would parse them. Figures are checked by
``tests/benchmarks/test_report.py``, which makes them from results.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import document_options
import document_tuning
import pytest

import rose_backend
from rose_backend.cli import build_parser
from rose_backend.cli.options import RoseParser
from rose_backend.config import PluginConfig
from rose_backend.server.protocol import (
    IGNORED,
    NOT_SUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    LoadLoRAAdapterRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
)
from tests.conftest import ROOT
from tests.support.patience import HANG_S
from tests.support.vllm_plugin.vllm_options import OPTIONS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOM_READMES = sorted((ROOT / "rose_backend").rglob("README.md"))
MAX_README_LINES = 220
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- (?:table|options|measured): .*?<!-- end of \w+ -->", re.DOTALL)
PARTS = (
    "benchmarks",
    "docs",
    "examples",
    "models",
    "requirements",
    "rose_backend",
    "scripts",
    "tests",
    ".ci",
)
PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, PARTS))})/[\w./*-]*[\w*/]")
"""A path in the repository."""
MEASURED = re.compile(r"\b\d[\d,.]*(?: ?(?:ms|µs|us|tok/s|tokens/s|TFLOP/s|TB/s)|x)(?![\w/])")
"""A figure that somebody has measured."""

WRAPPERS = {"sudo", "nice", "nohup", "time", "exec"}
SHELL_WORDS = {"for", "do", "done", "while", "if", "then", "fi"}
OTHER_PROGRAMS = {
    *(
        "cat",
        "cd",
        "cp",
        "curl",
        "docker",
        "lm_eval",
        "echo",
        "export",
        "git",
        "grep",
        "head",
        "jq",
        "kill",
        "ls",
        "mkdir",
    ),
    *(
        "nvidia-smi",
        "pip",
        "python",
        "python3",
        "rm",
        "sed",
        "sleep",
        "sort",
        "source",
        "tail",
        "vllm",
        "watch",
    ),
}
"""Programs that a page may name, beside ``rose`` and ``make``."""
VLLM_FRONT_END = {
    "host",
    "port",
    "api_key",
    "api_server_count",
    "chat_template",
    "enable_prompt_tokens_details",
    "lora_modules",
}
"""Options of ``vllm serve`` that are not its engine's."""
BODIES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadLoRAAdapterRequest,
    "/v1/unload_lora_adapter": UnloadLoRAAdapterRequest,
}

VLLM_BODIES = {
    "/v1/completions": ("openai.completion", "CompletionRequest"),
    "/v1/chat/completions": ("openai.chat_completion", "ChatCompletionRequest"),
    "/v1/responses": ("openai.responses", "ResponsesRequest"),
    "/v1/messages": ("anthropic", "AnthropicMessagesRequest"),
    "/v1/messages/count_tokens": ("anthropic", "AnthropicCountTokensRequest"),
    "/tokenize": ("serve.tokenize", "TokenizeCompletionRequest", "TokenizeChatRequest"),
    "/detokenize": ("serve.tokenize", "DetokenizeRequest"),
    "/v1/load_lora_adapter": ("serve.lora", "LoadLoRAAdapterRequest"),
    "/v1/unload_lora_adapter": ("serve.lora", "UnloadLoRAAdapterRequest"),
}
"""Module and models of each route's body in vLLM."""


def by_page(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def written_by_hand(page: Path) -> str:
    """Return a page's text without the tables that are made by a program."""
    return GENERATED.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(written_by_hand(page)) if found == language]


def inline_code(page: Path) -> list[str]:
    text = FENCE.sub("", written_by_hand(page))
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def shell_commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each simple command: pipes and lists are taken apart, redirections and comments left out.

    Raises:
        ValueError: a quotation has no end.
    """
    block = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", block, flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ")
    rest = ""
    for line in block.splitlines():
        rest += line + "\n"
        lexer = shlex.shlex(rest, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # a quotation goes on in the next line
        rest = ""
        command: list[str] = []
        is_file = False
        for word in [*words, ";"]:
            if set(word) <= set(";&|"):
                if command:
                    yield command
                command = []
            elif set(word) <= set("<>&"):
                is_file = True
            elif not is_file:
                command.append(word)
            else:
                is_file = False
    if rest:
        raise ValueError(f"a quotation without an end: {rest}")


class ParsedError(Exception):
    """Ends a program behind its parser."""


@pytest.fixture
def stop_behind_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``parse_args`` of benchmarks raise ParsedError where it would return."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args: Any, **options: Any) -> Any:
        parse(*args, **options)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def check_rose(words: list[str]) -> None:
    _, unknown = build_parser().parse_known_args(words)
    assert unknown == []


def check_module(words: list[str]) -> None:
    """Check ``python -m MODULE OPTIONS``: a benchmark's options, of others that they exist."""
    module, *arguments = words
    if module.split(".")[0] not in ("benchmarks", "tests", "rose_backend"):
        return
    assert importlib.util.find_spec(module) is not None
    if module.startswith("benchmarks."):
        with pytest.raises(ParsedError):
            importlib.import_module(module).main(arguments)


def check_make(words: list[str], variables: dict[str, str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, value = word.partition("=")
        if is_variable:
            variables[name] = value
        else:
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"no target {name}"
    for name in variables:
        known = re.search(rf"^{name} \?=", makefile, re.MULTILINE) or name == "ROSE_DEVICE"
        assert known or name.startswith("ROSE_RANDOM_"), f"no variable {name}"
    check_vllm(shlex.split(variables.get("ARGS", "")))


def check_vllm(words: list[str]) -> None:
    """Check the names of vLLM's options, and Rose's keys of ``--additional-config``."""
    names = {*OPTIONS["EngineArgs"].names(), *OPTIONS["AsyncEngineArgs"].names(), *VLLM_FRONT_END}
    keys = {field.name for field in fields(PluginConfig)}
    for word, value in pairwise([*words, ""]):
        option, _, own_value = word.partition("=")
        if not option.startswith("--"):
            continue
        path = option.removeprefix("--").split(".")
        name = path[0].replace("-", "_")
        assert name in names or name.removeprefix("no_") in names, f"vLLM has no {option}"
        if name == "additional_config":
            given = path[2:] if len(path) > 1 else json.loads(own_value or value)["rose"]
            assert path[1:2] in ([], ["rose"]) and set(given) <= keys, f"no key {given}"


def check_curl(words: list[str]) -> None:
    """Check that a body is JSON with fields that the route knows."""
    for word, value in pairwise(words):
        if word in ("-d", "--data", "--json") and not value.startswith("@"):
            (url,) = (word for word in words if "://" in word)
            model = BODIES[f"/{url.split('/', 3)[3]}"]
            assert json.loads(value).keys() <= model.model_fields.keys() | NOT_SUPPORTED.keys() | IGNORED


def check_pytest(words: list[str]) -> None:
    """Check the suites' options, pytest's own apart."""
    options = {word for word in words if re.match(r"--(attention|own|block|conformance)-", word)}
    plugin = (ROOT / "rose_backend" / "conformance" / "plugin.py").read_text()
    assert [option for option in options if f'"{option}"' not in plugin] == []


def check_command(words: list[str]) -> None:
    variables = {}
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] in WRAPPERS):
        name, _, value = words.pop(0).partition("=")
        if name not in WRAPPERS:
            variables[name] = value
    if words and words[0] == "timeout":
        words = words[2:]
    if not words or words[0] in SHELL_WORDS:
        return
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program == "rose":
        check_rose(rest)
    elif program == "make":
        check_make(rest, variables)
    elif program == "vllm":
        check_vllm(rest)
    elif program == "curl":
        check_curl(rest)
    elif program == "pytest":
        check_pytest(rest)
    elif program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK), f"{program}: no script that can be run"
        source = (ROOT / program).read_text()
        assert [word for word in rest if word.startswith("--") and f"{word} " not in source] == []
    elif program in ("python", "python3") and rest[:1] == ["-m"]:
        check_module(rest[1:])
    else:
        assert program in OTHER_PROGRAMS, f"{program}: misspelt, or missing in OTHER_PROGRAMS"


@by_page([*PAGES, ROOT / "CONTRIBUTING.md"])
@pytest.mark.usefixtures("stop_behind_parsers")
def test_commands_can_be_typed(page: Path) -> None:
    for block in blocks(page, "bash"):
        for words in shell_commands(block):
            command = " ".join(words)
            try:
                check_command(words)
            except (SystemExit, AssertionError, ValueError, KeyError) as error:
                raise AssertionError(f"{page.name}: {command}: {error}") from error


@by_page([*PAGES, ROOT / "CONTRIBUTING.md"])
@pytest.mark.usefixtures("stop_behind_parsers")
def test_commands_in_sentences_have_options_that_exist(page: Path) -> None:
    parser = build_parser()
    names = parser.option_names()
    for code in inline_code(page):
        words = code.split()
        program = words[0].removeprefix(".venv/bin/")
        if program == "rose" and len(words) > 1:
            (commands,) = (a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
            assert words[1] in commands or words[1].startswith("--"), code
            names_here = commands[words[1]].option_names() if words[1] in commands else names
            assert [w for w in words[2:] if w.startswith("--") and w not in names_here] == [], code
        elif program in ("make", "python") and "..." not in code:
            check_command(shlex.split(code))


@pytest.mark.parametrize(
    "command",
    [
        "rose serve models/tiny-gpt2 --prot 8000",
        "rose generate --prompt x",
        "roes env",
        "make sevre",
        "make serve ARG=--max-model-len",
        "ARGS='--max-modell-len 512' make serve",
        "vllm serve MODEL --atention-backend rose",
        "vllm serve MODEL --additional-config.rose.fused_mpl false",
        """vllm serve MODEL --additional-config '{"rose": {"fused_mpl": false}}'""",
        "python -m benchmarks.report --chek",
        "pytest --pyargs rose_backend.conformance --attention-backends CPU_ATTN",
        "python -m benchmarks.no_such_thing",
        "nice .venv/bin/python -m tests.no_such_thing | tail",
        """curl http://127.0.0.1/v1/completions -d '{"promt": "x"}'""",
        """curl http://127.0.0.1/v1/completions -d '{"prompt": "x",}'""",
    ],
)
@pytest.mark.usefixtures("stop_behind_parsers")
def test_mistakes_in_commands_are_noticed(command: str) -> None:
    with pytest.raises((SystemExit, AssertionError, ValueError)):
        for words in shell_commands(command):
            check_command(words)


def test_shell_commands_are_taken_apart() -> None:
    block = "a 'b\nc' \\\n  d > file # e\nX=1 f 2>&1 | g && h\ncat <<END\nnot a command\nEND\n"
    assert list(shell_commands(block)) == [["a", "b\nc", "d"], ["X=1", "f", "2"], ["g"], ["h"], ["cat"]]


@by_page(PAGES)
def test_named_files_exist(page: Path) -> None:
    text = written_by_hand(page)
    code = "\n".join([*inline_code(page), *(code for _, code in FENCE.findall(text))])
    named = {match.rstrip("/") for match in PATH.findall(re.sub(r"\w+://\S+", "", code))}
    assert [name for name in sorted(named) if not list(ROOT.glob(name))] == []


@by_page([ROOT / "CONTRIBUTING.md", *ROOM_READMES])
def test_files_that_contributors_are_told_of_exist(page: Path) -> None:
    """Paths count from the root, the package or the page's folder; a lone file or folder is called that somewhere."""
    bases = (ROOT, ROOT / "rose_backend", page.parent)
    names = {path.name for part in PARTS for path in (ROOT / part).rglob("*")} | set(PARTS)
    named = {code for code in inline_code(page) if re.fullmatch(r"[\w.*/-]*(\.py|/)", code)}
    missing = [name for name in named if not any(list(base.glob(name.rstrip("/"))) for base in bases)]
    assert [
        name for name in sorted(missing) if "/" in name.rstrip("/") or name.rstrip("/") not in names
    ] == []


@by_page(ROOM_READMES)
def test_the_readme_of_a_room_names_every_file(page: Path) -> None:
    named = " ".join(inline_code(page))
    modules = [path.name for path in page.parent.rglob("*.py") if path.name != "__init__.py"]
    assert [name for name in modules if not re.search(rf"(?<!\w){name}", named)] == []


@by_page(PAGES)
def test_python_compiles_and_imports_what_there_is(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, str(page), "exec")
        for names in re.findall(r"^from rose_backend import (.+)$", code, re.MULTILINE):
            assert set(names.split(", ")) <= set(rose_backend.__all__)


@by_page(PAGES)
def test_figures_have_a_command_that_repeats_them(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        # A table's own command counts for the text about it.
        if found := MEASURED.findall(GENERATED.sub("", section)):
            has_source = re.search(
                r"benchmarks\.\w|benchmarks/results|make bench|rose_backend/\S+\.py", section
            )
            assert has_source, f"{section.splitlines()[0]}: {found} without a command, a result or a source"


def test_a_figure_is_told_from_other_numbers() -> None:
    assert MEASURED.search("it takes 1,234.5 ms") and MEASURED.search("2.5x faster")
    assert not MEASURED.search("Linux x86-64, 4 x 8 tokens, 10 s, 0.32 and 16x16 blocks, `ttft_ms`")


def test_wheels_have_todays_version() -> None:
    for page in PAGES:
        versions = re.findall(r"rose_backend-(\d[\d.]*\d)", page.read_text(encoding="utf-8"))
        assert set(versions) <= {rose_backend.__version__}, page.name


def test_pages_name_no_package_index() -> None:
    """Rose is on none: whatever pip is told to install is a file, a folder or an address."""
    wrong = re.compile(r"'?rose[-_]backend(\[\w+\])?(?! @|\[|-\*|-\d)")
    commands = [line for page in PAGES for line in re.findall(r"pip install (.+)", page.read_text())]
    assert [line for line in commands if wrong.match(line)] == []
    assert wrong.match("rose-backend") and wrong.match("'rose_backend[serve]'")


def slugs(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def links_of(page: Path) -> list[tuple[str, Path, str]]:
    """Return each of a page's links inside the repository: as it is written, its file, its anchor."""
    links = re.findall(r"\[[^\]]+\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8")))
    parts = [(link, *link.partition("#")) for link in links if "://" not in link]
    return [
        (link, (page.parent / path).resolve() if path else page, anchor) for link, path, _, anchor in parts
    ]


@by_page([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOM_READMES])
def test_links_outside_of_the_site_lead_somewhere(page: Path) -> None:
    for link, target, anchor in links_of(page):
        assert target.exists(), link
        assert not anchor or anchor in slugs(target.read_text(encoding="utf-8")), link


def pages_within(start: Path, num_links: int) -> set[Path]:
    """Return the pages that a reader gets to by at most that many links."""
    reached = new = {start}
    for _ in range(num_links):
        new = {target for page in new for _, target, _ in links_of(page) if target.suffix == ".md"} - reached
        reached = reached | new
    return reached


def sections(page: Path) -> list[str]:
    """Return a page's list items and paragraphs, each with the heading above it."""
    found, heading = [], ""
    for text in re.split(r"\n\n+|\n(?=#|- |\d+\. )", written_by_hand(page)):
        if text.startswith("#"):
            heading = text
        found.append(f"{heading}\n{text}")
    return found


def named_in(path: Path, name: str) -> bool:
    """Return whether a file defines a function, a class, or a method given as ``Class.method``."""
    scope: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in scope if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        scope = found[0].body
    return True


QUESTIONS = [
    # Words of the question, the room in whose README a reader begins, and the function or class that is the answer.
    ("paged decode's mask", "kernels", "rose_backend/kernels/attention/paged_decode.py", "_visible_logits"),
    ("tile configuration was measured", "kernels", "benchmarks/tune_decode_layer.py", "search"),
    (
        "write `num_computed_tokens`",
        "block_manager",
        "rose_backend/block_manager/reservation.py",
        "commit_rows",
    ),
    ("client disconnects", "server", "rose_backend/server/generation.py", "ClientWatch"),
    ("client disconnects", "server", "rose_backend/engine/core.py", "EngineCore.end"),
    ("new activation", "kernels", "rose_backend/kernels/linear/small_batch_linear.py", "_finish"),
    ("new activation", "layers", "rose_backend/layers/linear.py", "ResidualStream"),
    ("new weight format", "layers", "rose_backend/models/quantization.py", "read_quantization"),
    ("new weight format", "layers", "rose_backend/vllm_plugin/models/int4_weights.py", "int4_scheme"),
    (
        "decode step, from vLLM's scheduler",
        "vllm_plugin",
        "rose_backend/vllm_plugin/step_graph/whole_steps.py",
        "WholeSteps.launch",
    ),
]


@pytest.mark.parametrize(("words", "room", "file", "name"), QUESTIONS)
def test_a_question_is_answered_two_links_away(words: str, room: str, file: str, name: str) -> None:
    assert named_in(ROOT / file, name)
    for start in (ROOT / "README.md", ROOT / "rose_backend" / room / "README.md"):
        texts = [text for page in pages_within(start, 2) for text in sections(page)]
        answers = [text for text in texts if words in text and f"`{name}`" in text]
        assert any(re.search(rf"`[\w/]*\b{Path(file).name}`", text) for text in answers), start


def test_what_a_question_is_answered_by_is_looked_up() -> None:
    core = ROOT / "rose_backend" / "engine" / "core.py"
    assert named_in(core, "EngineCore.end") and not named_in(core, "EngineCore.ends")
    page = ROOT / "rose_backend" / "layers" / "README.md"
    assert pages_within(page, 0) == {page}
    assert pages_within(ROOT / "README.md", 1) < pages_within(ROOT / "README.md", 2)


def test_the_readme_is_short_and_begins_with_the_reader() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_README_LINES
    two_screens = "\n".join(lines[:80])
    for needed in (
        "Does it run my model?",
        "What do I gain?",
        "pip install",
        "Rose is active",
        "Switch it off",
    ):
        assert needed in two_screens


def test_options_are_those_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert document_options.main(["--check"]) == 0, capsys.readouterr().err


def test_a_changed_option_is_noticed() -> None:
    text = document_options.PAGE.read_text(encoding="utf-8")
    for option in ("`--max-queue-size N`", "| `joined_outputs` | `true`", "(default: 127.0.0.1)", "`top_k`"):
        changed = text.replace(option, "`--other`")
        assert changed != text and document_options.rewritten(changed) == text
    with pytest.raises(SystemExit, match="expected"):
        document_options.rewritten(text.replace("<!-- options: env -->", ""))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("route", document_options.ROUTES)
def test_every_field_of_vllms_requests_is_documented(route: str) -> None:
    module, *names = VLLM_BODIES[route]
    protocol = importlib.import_module(f"vllm.entrypoints.{module}.protocol")
    theirs = {field for name in names for field in getattr(protocol, name).model_fields}
    column = list(document_options.ROUTES).index(route) + 1
    documented = set()
    for line in document_options.request_table().splitlines()[2:]:
        cells = line.strip("| ").split(" | ")
        if cells[column] != "no field":
            documented |= set(re.findall(r"`(\w+)`", cells[0]))
    assert theirs - documented == set(), "a field of vLLM's that is neither served, refused nor ignored"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("what", ["load", "unload"])
def test_every_field_of_vllms_requests_for_adapters_is_documented(what: str) -> None:
    route = f"/v1/{what}_lora_adapter"
    module, name = VLLM_BODIES[route]
    protocol = importlib.import_module(f"vllm.entrypoints.{module}.protocol")
    theirs, ours = getattr(protocol, name).model_fields, BODIES[route].model_fields
    assert {field: each.default for field, each in theirs.items()} == {
        field: each.default for field, each in ours.items() if field != "model"
    }
    text = (ROOT / "docs" / "lora.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (both|load|unload) \|", text, re.MULTILINE)
    assert sorted(theirs) == sorted(field for field, where in rows if where in ("both", what))


def test_measured_choices_are_those_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert document_tuning.main(["--check"]) == 0, capsys.readouterr().err


def test_a_changed_choice_is_noticed() -> None:
    text = document_tuning.PAGE.read_text(encoding="utf-8")
    for part in ("block_n=256", "rows 17 to 32, ", "≥ 1025", "H100/H200", "| 173 |"):
        changed = text.replace(part, "other")
        assert changed != text and document_tuning.rewritten(changed) == text


def test_every_option_and_variable_is_documented() -> None:
    text = document_options.PAGE.read_text(encoding="utf-8")
    parser: RoseParser = build_parser()
    missing = [name for name in parser.option_names() if not re.search(rf"`{name}[` ]", text)]
    assert set(missing) <= {"-h", "--help", "--version"}
    sources = "".join(path.read_text() for path in (ROOT / "rose_backend").rglob("*.py"))
    variables = set(re.findall(r'"(ROSE_[A-Z_]+)"', sources))
    assert "ROSE_LOG_LEVEL" in variables
    assert [name for name in sorted(variables) if f"`{name}`" not in text] == []


def build_site(folder: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("material", reason="building the site needs mkdocs-material (the dev extra)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "built")]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=HANG_S, env={"NO_MKDOCS_2_WARNING": "1"}
    )


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of what the site is built from."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


def test_the_site_loads_nothing_from_elsewhere(sources: Path) -> None:
    done = build_site(sources)
    assert done.returncode == 0, done.stderr
    pages = list((sources / "built").rglob("*.html"))
    assert len(pages) > 5
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*https?://[^>]*>", page.read_text())
        assert loaded == [], page.name


def spoil_a_link(folder: Path) -> None:
    (folder / "docs" / "index.md").write_text("# A\n\n[b](no_such_page.md)\n")


def spoil_an_anchor(folder: Path) -> None:
    (folder / "docs" / "index.md").write_text("# A\n\n[b](install.md#no-such-heading)\n")


def add_a_page_that_no_menu_has(folder: Path) -> None:
    (folder / "docs" / "forgotten.md").write_text("# A\n")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (spoil_a_link, "no_such_page.md"),
        (spoil_an_anchor, "#no-such-heading"),
        (add_a_page_that_no_menu_has, "forgotten.md"),
    ],
)
def test_a_dead_end_fails_the_build(sources: Path, spoil: Callable[[Path], None], named: str) -> None:
    spoil(sources)
    done = build_site(sources)
    assert done.returncode == 1 and named in done.stderr, done.stderr
