"""``rose bench serve``, which is ``vllm bench serve``, against ``rose serve``: figures, and no word of complaint."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.live_server import running_server
from tests.support.patience import HANG_S

CHAT_MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3-chat"
# vLLM says this of prompts that it has drawn itself, whatever it measures.
OWN_WARNING = re.compile(r".*WARNING.* Across all generated prompts, there were .*\n")
COMPLAINT = re.compile("WARNING|Warning|ERROR|Error|Traceback|unavailable|mismatch|not ready")


@pytest.mark.parametrize(
    "options",
    [
        ("--backend", "openai", "--ready-check-timeout-sec", "60", "--logprobs", "2"),
        ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--top-k", "20"),
    ],
    ids=["completions", "chats"],
)
def test_figures_without_warnings(tmp_path: Path, options: tuple[str, ...]) -> None:
    with running_server(CHAT_MODEL, {"served_model_names": (str(CHAT_MODEL),)}) as server:
        command = [
            *(sys.executable, "-P", "-m", "rose_backend.cli", "bench", "serve", "--base-url", server.url),
            *("--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "6"),
            *("--num-prompts", "5", "--temperature", "0", "--save-result", "--save-detailed"),
            *("--result-dir", str(tmp_path), "--result-filename", "result.json", *options),
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        # Triton says what it leaves behind at the end of any process, vLLM's own too.
        said = OWN_WARNING.sub("", run.stdout) + run.stderr.partition("nanobind: ")[0]
        assert run.returncode == 0, said
        assert not COMPLAINT.search(said), said
        text = server.http.get("/metrics").text
    answers = set(re.findall(r'http_responses_total{route="(\S+)",status="(\d+)"}', text))
    assert {status for _, status in answers} == {"200"} and ("/tokenize", "200") in answers
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["model_id"]) == (5, 0, str(CHAT_MODEL))
    # The server's own numbers, which it sends at the end of a stream.
    assert result["output_lens"] == [6] * 5 and result["total_output_tokens"] == 30
    assert len(result["ttfts"]) == 5 and min(result["ttfts"]) > 0
    assert re.search(r"Successful requests: +5 ", run.stdout) and not any(result["errors"])
