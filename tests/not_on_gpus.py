"""Tests that do not run with FXPIPE_DEVICE=cuda: why, and the beginnings of their names, from ``tests/`` on."""

from __future__ import annotations

NOT_ON_GPUS = {
    "needs no device": """
        formats/
        schedules/
        test_docstrings.py
        test_imports.py
        test_public_surface.py
        """,
}

NOT_ON_SIMULATED_GPUS = {
    "a process that is spawned imports torch before it imports what simulates a GPU": """
        distributed/test_launch.py::test_launch_returns_the_results_by_rank
        """,
}


def reason(nodeid: str, simulated: bool) -> str:
    """Why that test does not run; an empty string where it does."""
    for why, names in (NOT_ON_GPUS | (NOT_ON_SIMULATED_GPUS if simulated else {})).items():
        if nodeid.startswith(tuple(f"tests/{name.strip()}" for name in names.strip().split("\n"))):
            return why
    return ""
