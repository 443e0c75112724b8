"""Greedy: list scheduling at the stages' real costs, which is what 1F1B becomes when they are uneven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import fastest
from fxpipe.schedules.families.limits import (
    Caps,
    Choice,
    Maker,
    caps,
    round_trip_caps,
    shortest,
    shortest_within_limits,
    with_fewer_microbatches,
)
from fxpipe.schedules.families.list_scheduling import PRIORITIES, list_schedule
from fxpipe.schedules.families.one_f_one_b import with_caps
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row

MANY = 10_000
"""Of a table of more actions only few are made to choose from."""


def greedy(problem: Problem) -> tuple[Row, ...]:
    """The shortest of several tables at ``problem.costs``.

    A stage holds at most d(s) or ⌈round trip / bottleneck period⌉ micro-batches, whichever is more, or else what
    ``in_flight`` and ``memory`` say. 1F1B is among the tables: greedy is never slower within the same limits. Which of
    the others to make for very many micro-batches is found out with fewer: steady work repeats. Where ``memory`` is
    given, and the costs give what a W that is put off holds, ``deferred_bytes``, backwards may come in halves, each W
    anywhere that memory allows.
    """
    if problem.is_grouped:
        return fastest(problem)
    limits = caps(problem)
    lean, usual = (tuple(map(min, wanted, limits)) for wanted in (round_trip_caps(problem), problem.depth))
    tried = tuple(dict.fromkeys([lean, usual, limits]))
    makers = [maker for held in tried for maker in _makers(problem.costs, held)]
    few = with_fewer_microbatches(problem, MANY, 2 * max(problem.depth))
    if few is not problem:
        makers = [partial(with_caps, caps=usual), shortest(few, makers, problem.costs).maker]
    whole = shortest(problem, makers, problem.costs)
    halves = None if problem.memory is None or problem.costs.deferred_bytes is None else _in_halves(problem, few, tried)
    return halves.rows if halves is not None and halves.makespan < whole.makespan else whole.rows


def _in_halves(problem: Problem, few: Problem, tried: Sequence[Caps]) -> Choice | None:
    """The shortest with backwards in halves; None where all hold too much, as a W may that needs more than its I."""
    costs, room = problem.costs, problem.memory
    makers = [
        partial(list_schedule, costs=costs, caps=held, priority=one, room=room) for held in tried for one in PRIORITIES
    ]
    if few is problem:
        return shortest_within_limits(problem, makers)
    best = shortest_within_limits(few, makers)
    return best and shortest_within_limits(problem, [best.maker])


def _makers(costs: Costs, held: Caps) -> Iterator[Maker]:
    """Tables that hold no more than this: 1F1B first, which is often good enough, then one for each priority."""
    yield partial(with_caps, caps=held)
    for priority in PRIORITIES:
        yield partial(list_schedule, costs=costs, caps=held, priority=priority)
