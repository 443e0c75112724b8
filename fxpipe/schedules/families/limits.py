"""Limits: the most micro-batches of a stage, the most bytes of a rank, and the shortest table within these limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.in_flight import peak_bytes, peak_in_flight
from fxpipe.schedules.schedule import Schedule
from fxpipe.validation import is_list

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "zb_h1",
    "greedy",
    "store_all",
    "group_interleaved",
    "cached",
    "zb_v",
    "v_min",
]
"""A name out of ``SCHEDULES``, for editors and type checkers."""

Family = Callable[[Problem], Sequence[Sequence[Action]]]
"""Problem → a row of actions for each rank."""

Caps = tuple[int, ...]
"""The most micro-batches in flight, per stage: their forward has run, and their backward has not."""

InFlight = int | Sequence[int] | Literal["2x"]
"""The most micro-batches in flight: a number, one per stage, or twice what the family's own table holds."""


@dataclass(frozen=True)
class Limited:
    """A family that solves problems at these costs and within these limits; None leaves the problem's own value.

    ``solve.in_numbers`` replaces ``in_flight="2x"``, which only a table has, before the other methods are called.
    """

    family: Family
    name: str
    costs: Costs | None = None
    in_flight: InFlight | None = None
    memory: float | Sequence[float] | None = None

    def __call__(self, problem: Problem) -> Sequence[Sequence[Action]]:
        return self.family(self.within(problem))

    def or_else(self, other: Limited) -> Limited:
        """Returns the same family; each limit, cost or byte count that is None here is taken from ``other``."""
        costs = self.costs if self.costs is not None else other.costs
        if costs is not None and other.costs is not None:
            costs = costs.or_else(other.costs)
        in_flight = other.in_flight if self.in_flight is None else self.in_flight
        return Limited(self.family, self.name, costs, in_flight, other.memory if self.memory is None else self.memory)

    def excess(self, schedule: Schedule) -> str | None:
        """Says which limit a table breaks; None if the table breaks no limit."""
        stages = len(schedule.placement)
        in_flight, memory = _each(self.in_flight, stages), _each(self.memory, len(schedule.rows))
        return excess(schedule, self.costs or Costs.of(stages), in_flight, memory)

    def within(self, problem: Problem) -> Problem:
        """Returns the problem at these costs and within these limits; ScheduleError if they do not fit the problem."""
        in_flight, memory = _each(self.in_flight, len(problem.placement)), _each(self.memory, problem.ranks)
        problem = replace(
            problem,
            costs=problem.costs if self.costs is None else self.costs,
            in_flight=problem.in_flight if in_flight is None else tuple(map(int, in_flight)),
            memory=problem.memory if memory is None else memory,
        )
        problem.check()
        return problem


def _each(limit: Any, count: int) -> tuple[Any, ...] | None:
    """Returns a tuple of limits from one number for all, or from a list."""
    return None if limit is None else tuple(limit) if is_list(limit) else (limit,) * count


def excess(
    schedule: Schedule, costs: Costs, in_flight: Sequence[int] | None, memory: Sequence[float] | None
) -> str | None:
    """Says which limit a table breaks; None if the table breaks no limit. ``in_flight`` is per stage, ``memory`` in
    bytes per rank; costs without ``activation_bytes`` have no bytes to compare with ``memory``."""
    if in_flight is not None:
        for stage, (peak, cap) in enumerate(zip(peak_in_flight(schedule), in_flight, strict=True)):
            if peak > cap:
                return f"holds {peak} micro-batches at stage {stage}, in_flight={cap}"
    if memory is not None and costs.activation_bytes is not None:
        resting = costs.changed(lambda each: replace(each, again_bytes=None))  # the limit is for those in flight
        peaks = peak_bytes(schedule, resting)
        for rank, (most, room) in enumerate(zip(peaks, memory, strict=True)):
            if exceeds(most, room):
                return f"holds {most:g} bytes on rank {rank}, memory={room:g}"
    return None


def exceeds(size: float, room: float) -> bool:
    """Whether the bytes held are more than the room, beyond rounding errors."""
    return size > room * (1 + 1e-9)


# --- how many micro-batches a stage may hold ---


def caps(problem: Problem) -> Caps:
    """Returns the user's caps, per stage or from the bytes per rank; by default the larger of 1F1B's d(s) and the cap
    for a round trip.

    A stage never gets a higher cap than the stages that feed it: it could not use more, as their backward comes later.
    """
    wanted = list(problem.in_flight or map(max, problem.depth, round_trip_caps(problem)))
    wanted = [min(cap, problem.microbatches) for cap in wanted]
    if problem.memory is not None:
        _fit(wanted, problem)
    # Goes downstream, so that a cap of the first stage limits all later stages. A frozen stage holds nothing, and
    # limits none.
    for stage in problem.order:
        if problem.backward[stage]:
            for target in problem.targets[stage]:
                wanted[target] = min(wanted[target], wanted[stage])
    return tuple(wanted)


def raised(problem: Problem, own: Sequence[int]) -> Caps:
    """Returns a family's own caps, raised as far as ``in_flight`` and ``memory`` allow; none is lowered.

    All are raised by the same factor, but none by a larger factor than the stages that feed it. What a rank may wait
    without delaying the next depends on how many more micro-batches it holds than the ranks behind it.
    """
    if problem.in_flight is None:
        return tuple(own)
    most = caps(replace(problem, in_flight=tuple(map(max, own, problem.in_flight))))
    factors = [max(cap / least, 1.0) for cap, least in zip(most, own, strict=True)]
    for stage in problem.order:
        for target in problem.targets[stage] if problem.backward[stage] else ():
            factors[target] = min(factors[target], factors[stage])
    return tuple(int(factor * least + 1e-9) for factor, least in zip(factors, own, strict=True))


def round_trip_caps(problem: Problem) -> Caps:
    """Returns ⌈round trip(s) / bottleneck period⌉ per stage, by Little's law: enough to keep the busiest rank busy.

    The round trip goes from the start of a stage's forward to the end of its backward, over the longest path to a sink
    and back, with the latency of messages both ways. The period is the busiest rank's time for a micro-batch. With
    equal costs and no latency the cap is d(s), as for 1F1B. No cap exceeds the number of micro-batches.
    """
    costs, backward = problem.costs, problem.backward
    own = [costs.per_microbatch(stage, backward[stage]) for stage in range(len(problem.placement))]
    round_trip = list(own)
    for stage in reversed(problem.order):
        for target in problem.targets[stage]:
            hop = 2 * costs.comm * (problem.placement[stage] != problem.placement[target])
            round_trip[stage] = max(round_trip[stage], own[stage] + hop + round_trip[target])
    period = max(sum(own[stage] for stage in stages) for stages in problem.stages_of)
    if not period:
        return problem.depth
    most = problem.microbatches
    return tuple(max(1, math.ceil(min(trip / period, most) - 1e-9)) for trip in round_trip)  # 3.0000000001 is 3


def _fit(wanted: list[int], problem: Problem) -> None:
    """Lowers the caps of each rank, the highest first, until the bytes that its stages may hold fit its memory."""
    sizes, memory = problem.costs.activation_bytes or (), problem.memory or ()
    for rank, stages in enumerate(problem.stages_of):
        mine = [stage for stage in stages if problem.backward[stage]]
        while exceeds(sum(wanted[stage] * sizes[stage] for stage in mine), memory[rank]):
            highest = max(mine, key=lambda stage: (wanted[stage], sizes[stage]))
            if wanted[highest] == 1:
                least = sum(sizes[stage] for stage in mine)
                raise ScheduleError(
                    f"rank {rank} may hold {memory[rank]:g} bytes, but one micro-batch at each of its stages {mine} "
                    f"takes {least:g}; use smaller micro-batches, or move a stage"
                )
            wanted[highest] -= 1


# --- the shortest of several tables ---

Maker = Callable[[Problem], tuple[Row, ...]]


def with_fewer_microbatches(problem: Problem, actions: int, least: int) -> Problem:
    """Returns the problem with so few micro-batches that a table has about ``actions`` actions, but at least ``least``
    groups, or micro-batches if no stage is gathered, to reach the steady state and leave it."""
    size = math.lcm(*problem.groups or (1,))
    fewer = size * max(actions // (2 * len(problem.placement) * size), least)
    if fewer >= problem.microbatches:
        return problem
    return replace(problem, microbatches=fewer, costs=problem.costs.first(fewer))


class Shortest(NamedTuple):
    """A table, the function that made it, and its makespan."""

    maker: Maker
    rows: tuple[Row, ...]
    makespan: float


class Chosen(tuple[Row, ...]):
    """Rows that were chosen among the rows of several families, and the chosen family's name."""

    name: str

    @staticmethod
    def named(rows: tuple[Row, ...], name: str) -> Chosen:
        """Returns the rows under a name."""
        chosen = Chosen(rows)
        chosen.name = name
        return chosen

    @staticmethod
    def renamed(other: Sequence[Sequence[Action]], rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Returns rows that were made from ``other``, under the name of ``other`` if it has a name."""
        return Chosen.named(rows, other.name) if isinstance(other, Chosen) else rows


def shortest(problem: Problem, makers: Iterable[Maker], costs: Costs) -> Shortest:
    """Returns the table of the least makespan at these costs, the first of equal ones; stops at the lower bound."""
    best = _shortest(problem, makers, costs, limited=False)
    assert best is not None
    return best


def shortest_within_limits(problem: Problem, makers: Iterable[Maker]) -> Shortest | None:
    """As ``shortest``, at ``problem.costs``, among the tables within its limits; None if no table is."""
    return _shortest(problem, makers, problem.costs, limited=True)


def shortest_of(problem: Problem, makers: Sequence[Maker]) -> Shortest:
    """Returns the shortest table at F = 1 and B = 2 within the limits; if none is within, the shortest of all."""
    costs = Costs.of(len(problem.placement))
    return _shortest(problem, makers, costs, limited=True) or shortest(problem, makers, costs)


def _shortest(problem: Problem, makers: Iterable[Maker], costs: Costs, limited: bool) -> Shortest | None:
    best: Shortest | None = None
    for maker in makers:
        rows = maker(problem)
        schedule = problem.table(rows)
        if limited and excess(schedule, problem.costs, problem.in_flight, problem.memory) is not None:
            continue
        plan = schedule.simulate(costs)
        if best is None or plan.makespan < best.makespan:
            best = Shortest(maker, rows, plan.makespan)
        # No table is shorter than the bound, so later tables need not be made.
        if best.makespan <= plan.lower_bound:
            break
    return best
