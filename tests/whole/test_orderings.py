"""What orders streams is taken out of fxpipe, one ordering at a time, and a small run on simulated GPUs notices."""

from __future__ import annotations

import re

import pytest

from tests import simulated_gpu
from tests.gpus import Gpus
from tests.simulated_gpu.ordering_scenarios import SCENARIOS
from tests.simulated_gpu.orderings import ORDERINGS, Ordering, removed

SECONDS = 60.0


def as_it_is(name: str) -> None:
    SCENARIOS[name]()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_plain_pytorch_and_ordered(name: str, gpus: Gpus) -> None:
    gpus.run(as_it_is, name, ranks=SCENARIOS[name].ranks)


def without(ordering: Ordering) -> None:
    """What the device reports goes in front of the error of a number that is wrong for it."""
    with removed(ordering):
        try:
            as_it_is(ordering.scenario)
        except Exception as error:
            reports = simulated_gpu.summary(simulated_gpu.faults())
            raise AssertionError(f"{reports}\n{error!r}") from None


def label(ordering: Ordering) -> str:
    taken = [line.strip() for line in ordering.before.splitlines() if line not in ordering.after]
    return f"{ordering.file}: {taken[0]}"


@pytest.mark.parametrize("ordering", ORDERINGS, ids=label)
def test_an_ordering_that_is_taken_out_is_noticed(ordering: Ordering, gpus: Gpus) -> None:
    ranks = SCENARIOS[ordering.scenario].ranks
    outcomes = gpus.outcomes(without, ordering, ranks=ranks, seconds=SECONDS)
    assert re.search(ordering.noticed, "\n".join(outcome.traceback for outcome in outcomes))
