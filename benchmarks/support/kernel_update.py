"""Put the families of one run of ``kernels`` into the report of another."""

from __future__ import annotations

from typing import Any

# What has to be the same for figures of two runs to stand in one report. Each ratio is of one run in any case.
_SAME = ("kernels_digest", "gpu", "driver", "versions", "repeats", "samples_per_repeat")
# What the report says once for all families, so that a family from another run has its own.
_OF_A_RUN = ("date", "commit", "copy_bytes_per_s")


def check_update(report: dict[str, Any], old: dict[str, Any]) -> None:
    """End the program unless families of ``report`` may replace those of ``old``.

    Raises:
        SystemExit: other kernels, another kind of GPU, other versions or settings; the message names what differs.
    """
    for name in _SAME:
        if report[name] != old[name]:
            raise SystemExit(f"--update: {name}: this run has {report[name]!r}, the file {old[name]!r}")


def updated(report: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Return ``report`` with the families that only ``old`` has, each with the facts of the run that it is from."""
    kept = {name: state for name, state in old["families"].items() if name not in report["families"]}
    of_old_run = {name: old[name] for name in _OF_A_RUN}
    families = {name: {**of_old_run, **state} for name, state in kept.items()}
    rows = [row for row in old["rows"] if row["family"] in kept]
    return {
        **report,
        "families": {**families, **report["families"]},
        "missing_peers": {**old["missing_peers"], **report["missing_peers"]},
        "rows": [*rows, *report["rows"]],
    }
