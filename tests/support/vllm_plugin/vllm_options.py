"""Every option of vLLM and what ROSE does with it, as ``vllm_options.txt`` lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Options:
    """The options of one of vLLM's classes; what each of the three is, the list's head says."""

    passes: list[str] = field(default_factory=list)
    serves: dict[str, str] = field(default_factory=dict)
    refuses: dict[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return all names."""
        return [*self.passes, *self.serves, *self.refuses]


def _read() -> tuple[dict[str, Options], dict[str, list[str]]]:
    """Return the options of each class, and for each release those that no other one has."""
    options: dict[str, Options] = {}
    only_in: dict[str, list[str]] = {}
    text = Path(__file__).with_suffix(".txt").read_text().replace("\n  ", " ")
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        name, _, said = rest.partition(": ")
        if line.startswith("["):
            owner = line.strip("[]")
        elif word == "only":
            only_in[name] = said.split()
        elif word == "passes":
            options.setdefault(owner, Options()).passes = rest.split()
        elif word in ("serves", "refuses"):
            getattr(options.setdefault(owner, Options()), word)[name] = said
    return options, only_in


OPTIONS, ONLY_IN = _read()
