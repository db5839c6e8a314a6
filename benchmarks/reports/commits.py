"""Which commit has the sources that a result was measured on, and how many later commits changed them.

The counts belong to one commit, which is noted beside them: ``python -m benchmarks.report`` counts anew, ``--check``
and the tests do not, so that pages stay right when commits are added.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

SOURCES = ":(glob)rose_backend/**/*.py"
"""What a digest is of, in git's words: all Python files of the package."""
COMMITS = {
    "0bc68454b06a4630": "c9cb932",
    "7f34b86f6b652a37": "15d9350",
    "5f2349c1eb711ee0": "bb87551",
    "cde27bb955c80ae0": "9284310",
    "38c04b9951d1d612": "f00eac3",
    "7ed99bfb03d1ecf6": "7e1cc20",
    "150b493ba640fbb1": "2145dc8",
    "635f72b61410c9a5": "767695d",
    "e3d3f3be6fd5fe59": "2b381bf",
    "74e316f06762f331": "c0cad35",
    "804bab44ef7b0f0c": "a1bbfd1",
    "dbf7e5cc16e90cd1": "130f14d",
    "0960b50e02957936": "fca7de6",
    "414eed5ccde5189b": "7950450",
    "46beff57b023f1fb": "891e8cf",
    "94facc4f88991104": "52107a4",
    "ba762ad472dd1608": "0d20e9c",
    "ec37daddaca92b8c": "35e2dde",
    "5f1d599ba99f66f6": "2043d2d",
    "362af6f304d91d05": "565c3f4",
    "599447310db3df2c": "0359739",
    "cbb1652fd183cdf8": "72efd5b",
    "5a9cc545e2b746fd": "f5be7a6",
    "ac5b196703977cc8": "8a4036a",
    "eb6565aa4d23961b": "311f865",
    "f0f09174dbd0f609": "95a2428",
    "3d8b2c1ceb281e58": "015d7e8",
    "4de95daab18e39f8": "de64e60",
    "b1c355619e1dc31d": "60e9b4c",
    "cpu/block_manager.json": "df57675",
    "h200/kv_append.json": "8323458",
    "h200/kv_cow_clone_float16.json": "8323458",
    "h200/vllm_serving.json": "7e9561b",
}
"""Digest of sources -> the first commit that has them; result without a digest -> the commit that brought it."""


class LaterCommits(NamedTuple):
    """How many commits changed the sources since those of a result."""

    as_of: str
    """The last commit that is counted."""
    counts: dict[str, int]
    """First commit with a result's sources -> commits after it, up to ``as_of``."""

    def since(self, commit: str) -> str:
        """Return what is said of a result's sources."""
        count = self.counts[commit]
        return f"{count:,} later commit{'' if count == 1 else 's'} up to {self.as_of} changed the package"


def read(path: Path) -> LaterCommits:
    """Return what was counted last."""
    return LaterCommits(**json.loads(path.read_text()))


def write(path: Path, found: LaterCommits) -> None:
    """Note what was counted."""
    path.write_text(json.dumps(found._asdict(), indent=1) + "\n")


def count(root: Path, as_of: str) -> LaterCommits | None:
    """Count in the history of the checkout at ``root``; None where that is not whole, as in a shallow clone."""
    try:
        if git(root, "rev-parse", "--is-shallow-repository") != "false":
            return None
        last = git(root, "rev-parse", "--short=7", as_of)
    except (OSError, subprocess.CalledProcessError):
        return None
    options = ("rev-list", "--count", "--no-merges", "--full-history")
    counts = {
        commit: int(git(root, *options, f"{commit}..{last}", "--", SOURCES))
        for commit in sorted(set(COMMITS.values()))
    }
    return LaterCommits(last, counts)


def git(root: Path, *arguments: str) -> str:
    """Return what git prints."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
