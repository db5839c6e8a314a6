"""A run of some families updates a report: theirs are replaced, the others keep the facts of their own run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.support.kernel_update import check_update, updated


def report(families: dict[str, str], **changes: Any) -> dict[str, Any]:
    """Return what a run of ``families``, name -> what its one row says, wrote."""
    return {
        "date": "today",
        "commit": "new",
        "copy_bytes_per_s": 2e12,
        "kernels_digest": "digest",
        "gpu": "some GPU",
        "driver": "1",
        "versions": {"torch": "2"},
        "repeats": 5,
        "samples_per_repeat": 5,
        "families": {name: {"tests": [name], "unproved_because": None} for name in families},
        "missing_peers": {},
        "rows": [{"family": name, "case": text} for name, text in families.items()],
        **changes,
    }


OLD = report(
    {"decode": "old decode", "clone": "old clone"}, date="yesterday", commit="old", copy_bytes_per_s=1e12
)


def test_only_the_families_of_the_run_are_replaced() -> None:
    new = updated(report({"decode": "new decode"}), OLD)
    assert [row["case"] for row in new["rows"]] == ["old clone", "new decode"]
    assert new["families"]["clone"] == {
        "date": "yesterday",
        "commit": "old",
        "copy_bytes_per_s": 1e12,
        "tests": ["clone"],
        "unproved_because": None,
    }
    assert new["families"]["decode"] == {"tests": ["decode"], "unproved_because": None}
    assert new["commit"] == "new" and new["copy_bytes_per_s"] == 2e12


def test_an_old_family_keeps_its_facts_through_two_updates() -> None:
    twice = updated(report({"decode": "newest"}, commit="newest"), updated(report({"decode": "new"}), OLD))
    assert twice["families"]["clone"]["commit"] == "old"


@pytest.mark.parametrize("name", ["kernels_digest", "gpu", "driver", "versions", "repeats"])
def test_runs_that_differ_are_refused_by_name(name: str) -> None:
    with pytest.raises(SystemExit, match=f"--update: {name}: this run has 'other'"):
        check_update(report({"decode": "new"}, **{name: "other"}), OLD)
    check_update(report({"decode": "new"}), OLD)
