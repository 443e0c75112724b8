"""Caps: how many micro-batches a stage may hold whose forward has run and whose backward has not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from fxpipe.errors import ScheduleError
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.in_flight import peak_bytes, peak_in_flight
from fxpipe.schedules.schedule import Schedule

Caps = tuple[int, ...]
"""The most micro-batches in flight, per stage."""


def caps(problem: Problem) -> Caps:
    """What the user allows, per stage or in bytes per rank; or else as many as 1F1B holds, d(s), and as a round trip
    takes.

    A stage never gets more than the stages that feed it: their backward comes after its own, so it could not use it.
    """
    wanted = list(map(max, problem.depth, round_trip_caps(problem)))
    if problem.in_flight is not None:
        wanted = list(problem.in_flight)
    wanted = [min(cap, problem.microbatches) for cap in wanted]
    if problem.memory is not None:
        _fit(wanted, problem)
    for stage in problem.order:
        if problem.backward[stage]:
            for target in problem.targets[stage]:
                wanted[target] = min(wanted[target], wanted[stage])
    return tuple(wanted)


def round_trip_caps(problem: Problem) -> Caps:
    """⌈round trip(s) / bottleneck period⌉: Little's law, as many as it takes to keep the busiest rank busy.

    The round trip leads from the start of a stage's forward to the end of its backward, over the longest path to a
    sink and back, with a hop's latency both ways; the period is what the busiest rank does for a micro-batch. With
    equal costs and no latency this is d(s), the cap of 1F1B. Never more than all micro-batches.
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
    """Lowers the caps of each rank, the highest first, until what its stages may hold fits its memory."""
    sizes, memory = problem.costs.activation_bytes, problem.memory
    assert sizes is not None
    assert memory is not None
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


def excess(
    schedule: Schedule, costs: Costs, in_flight: Sequence[int] | None, memory: Sequence[float] | None
) -> str | None:
    """Which limit a table breaks, in words; None where it keeps within all. ``in_flight``: per stage, ``memory``: per
    rank, which costs without ``activation_bytes`` do not give."""
    if in_flight is not None:
        for stage, (peak, cap) in enumerate(zip(peak_in_flight(schedule), in_flight, strict=True)):
            if peak > cap:
                return f"holds {peak} micro-batches at stage {stage}, in_flight={cap}"
    if memory is not None and costs.activation_bytes is not None:
        held = peak_bytes(schedule, dataclasses.replace(costs, again_bytes=None))  # the limit is of what is in flight
        for rank, (most, room) in enumerate(zip(held, memory, strict=True)):
            if exceeds(most, room):
                return f"holds {most:g} bytes on rank {rank}, memory={room:g}"
    return None


def exceeds(held: float, room: float) -> bool:
    """Whether it is more than fits, and not for rounding alone."""
    return held > room * (1 + 1e-9)
