"""Judge what a run on a GPU wrote, keep the verdicts, and put the table into docs/models.md.

    python -m tests.gpu_matrix FOLDER

FOLDER is what ``ROSE_GPU_MATRIX`` named while ``pytest -m gpu tests/e2e/test_gpu_matrix.py`` ran. No GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.gpu_matrix.run import judge_folder
from tests.gpu_matrix.table import PAGE, keep_results, read_results, with_table


def main() -> int:
    """Return 1 if anything is different."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    verdicts = judge_folder(parser.parse_args().folder)
    keep_results(verdicts)
    PAGE.write_text(with_table(PAGE.read_text(), read_results()))
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict['outcome']}", *verdict["complaints"], sep="\n    ")
    return int(any(verdict["outcome"] == "different" for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
