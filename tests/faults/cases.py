"""The cases: each rank, in each phase, killed and stopped, in a chain of four; and in each layout one rank."""

from __future__ import annotations

from itertools import product

from tests.faults.training import LAYOUTS, PHASES, RANKS, Fault

TIMEOUT = 6.0
SIGNALS = ("SIGKILL", "SIGSTOP")


def cases() -> list[Fault]:
    """144 of them: over the other layouts, too, each rank is struck in each phase by each signal."""
    chain, *others = LAYOUTS
    every = [Fault(chain, *one, TIMEOUT) for one in product(PHASES, SIGNALS, range(RANKS))]
    turns = [
        Fault(layout, phase, kind, (turn + place) % RANKS, TIMEOUT)
        for (place, phase), kind, (turn, layout) in product(enumerate(PHASES), SIGNALS, enumerate(others))
    ]
    return every + turns
