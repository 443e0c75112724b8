"""A step that orders its micro-batches by ``microbatch_cost=`` is plain PyTorch's in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fxpipe.schedules import pyramid
from tests.graphs import FAMILIES
from tests.harness import Engines, Run, assert_run, compiled, cut, reference, stepped
from tests.models import CASES, Case, Inputs

COSTS = [3.0, 1.0, 0.0, 7.0, 2.0, 5.0, 4.0, 6.0]
"""Of micro-batches 0, 1, …: in a pyramid they are 2, 4, 6, 7, 3, 5, 0, 1."""


class Told:
    """A function of costs that tells one number after the other, and counts its calls."""

    def __init__(self, costs: Sequence[Any]) -> None:
        self.costs, self.calls = list(costs), 0

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        return self.costs[(self.calls - 1) % len(self.costs)]


def in_order(case: Case, order: Sequence[int]) -> Case:
    """The case whose micro-batches plain PyTorch runs in this order."""
    whole = case.cut or cut
    return replace(case, cut=lambda batch, count: [whole(batch, count)[number] for number in order])


def run(case: Case, costs: Sequence[Any], batches: Sequence[Inputs], options: dict[str, Any]) -> Run:
    return stepped(compiled(case, microbatch_cost=Told(costs), **options), case, batches)


def test_the_pyramid_of_costs() -> None:
    assert pyramid(COSTS) == (2, 4, 6, 7, 3, 5, 0, 1)


@pytest.mark.parametrize(
    ("name", "family", "engine"),
    [
        (name, FAMILIES[number % len(FAMILIES)], ["local", "strict 0", "distributed"][number % 3])
        for number, name in enumerate(CASES)
    ],
)
def test_a_step_is_plain_pytorch_in_the_order_of_costs(name: str, family: str, engine: str, engines: Engines) -> None:
    case = replace(CASES[name], microbatches=4, rows=10)
    costs = COSTS[:4]
    batches = case.batches(2)
    runs = engines(engine)(case.ranks, partial(run, case, costs, batches, {"schedule": family}))
    assert_run(runs, reference(in_order(case, pyramid(costs)), batches)[0], case.tolerance)
