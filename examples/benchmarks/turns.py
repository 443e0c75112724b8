"""Figures of this checkout and of an earlier one, measured in turns, for commands that know ``--before FOLDER``.

A command measures in a fresh process and prints its figures as one line of JSON, the last line of its output.
``git worktree add FOLDER COMMIT`` makes the folder.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

import fxpipe

HERE = Path(__file__).resolve().parents[2]
Figures = dict[str, float]


def measured(script: str, arguments: Sequence[str], checkout: Path = HERE, seconds: float = 600) -> Figures:
    """What ``script`` prints last, run with fxpipe of ``checkout`` in a fresh process.

    Raises:
        subprocess.CalledProcessError: the script failed; its output has gone to this process's stderr.
        subprocess.TimeoutExpired: it took longer than ``seconds``.
    """
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(script).resolve()), *arguments]
    run = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, timeout=seconds)
    if run.returncode:
        sys.stderr.write(run.stdout)
        run.check_returncode()
    return json.loads(run.stdout.splitlines()[-1])


def in_turns(script: str, arguments: Sequence[str], before: Path | None, rounds: int) -> dict[str, Figures]:
    """Medians by figure: ``now``, and with ``before``, an earlier checkout, ``before`` and ``ratio``, now over before.

    Now this checkout is first in a round and now the other. The ratio is the median of the rounds' ratios.
    """
    trees = {"now": HERE} | ({"before": before.resolve()} if before else {})
    rows: list[dict[str, Figures]] = []
    for turn in range(rounds):
        names = list(trees) if turn % 2 == 0 else list(reversed(trees))
        rows.append({name: measured(script, arguments, trees[name]) for name in names})
    medians = {}
    for figure in rows[0]["now"]:
        medians[figure] = {name: statistics.median(row[name][figure] for row in rows) for name in trees}
        if before:
            medians[figure]["ratio"] = statistics.median(row["now"][figure] / row["before"][figure] for row in rows)
    return medians


def without_checks() -> dict[str, Any]:
    """The options of ``compile``, here or in an earlier checkout, by which it compares neither captures nor batches."""
    if hasattr(fxpipe, "Checks"):
        return {"tracer": fxpipe.Tracing(check=False), "checks": fxpipe.Checks(batches=False)}
    return {"check_capture": False, "check_batches": False}


def table(medians: dict[str, Figures]) -> str:
    """A row for each figure, its ratio last."""
    return tabulate([{"": figure, **row} for figure, row in medians.items()], headers="keys", floatfmt=".4g")
