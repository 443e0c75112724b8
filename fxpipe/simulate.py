"""Simulate: costs → when each action runs, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fxpipe.action import Action, Op
from fxpipe.dependency import in_order
from fxpipe.errors import ScheduleError

if TYPE_CHECKING:
    from fxpipe.schedule import Schedule

Cost = float | Sequence[float]


class Span(NamedTuple):
    """When an action runs, in units of the given costs."""

    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """``spans`` of all actions; ``makespan``; ``bubble``, the idle part of all ranks' time (mean over ranks);
    ``peak_in_flight``, micro-batches whose forward has run and whose backward has not, per stage; ``lower_bound``."""

    spans: Mapping[Action, Span]
    makespan: float
    bubble: float
    peak_in_flight: tuple[int, ...]
    lower_bound: float


def simulate(
    schedule: Schedule, forward: Cost = 1, backward: Cost = 2, weight: Cost | None = None, comm: float = 0
) -> Simulation:
    """Runs every action as early as its row and its dependencies allow.

    Without ``weight`` an I costs half a backward, and a W the other half.
    """
    costs = _Costs(schedule, forward, backward, weight)
    spans: dict[Action, Span] = {}
    free = [0.0] * len(schedule.rows)
    ran = [0] * len(schedule.rows)
    for rank, _, action, before in in_order(schedule.rows, schedule.dependencies):
        hops = [comm * (schedule.placement[other.stage] != rank) for other in before]
        arrivals = [spans[other].end + hop for other, hop in zip(before, hops, strict=True)]
        start = max([free[rank], *arrivals])
        free[rank] = start + costs.of(action)
        spans[action] = Span(start, free[rank])
        ran[rank] += 1
    stuck = [str(row[count]) for row, count in zip(schedule.rows, ran, strict=True) if count < len(row)]
    if stuck:
        raise ScheduleError(f"the table comes to a halt at {', '.join(stuck)}; verify() says why")
    makespan = max(free, default=0.0)
    busy = sum(span.end - span.start for span in spans.values())
    return Simulation(
        spans=spans,
        makespan=makespan,
        bubble=1 - busy / (makespan * len(free)) if makespan else 0.0,
        peak_in_flight=_peaks(schedule),
        lower_bound=_lower_bound(schedule, costs, comm),
    )


class _Costs:
    """What each action costs."""

    def __init__(self, schedule: Schedule, forward: Cost, backward: Cost, weight: Cost | None) -> None:
        count = len(schedule.placement)
        full = _per_stage(backward, count)
        w = _per_stage(weight, count) if weight is not None else [cost / 2 for cost in full]
        self._of = {
            Op.F: _per_stage(forward, count),
            Op.B: full,
            Op.I: [b - c for b, c in zip(full, w, strict=True)],
            Op.W: w,
        }

    def of(self, action: Action) -> float:
        costs = self._of[action.op]
        if not 0 <= action.stage < len(costs):
            raise ScheduleError(f"{action} is of a stage outside of 0..{len(costs) - 1}; verify() says where")
        return costs[action.stage]

    def per_microbatch(self, stage: int, backward: bool) -> float:
        return self._of[Op.F][stage] + (self._of[Op.B][stage] if backward else 0)

    def forward(self, stage: int) -> float:
        return self._of[Op.F][stage]

    def backward(self, stage: int) -> float:
        return self._of[Op.B][stage]


def _per_stage(cost: Cost, count: int) -> list[float]:
    if isinstance(cost, (int, float)):
        return [float(cost)] * count
    if len(cost) != count:
        raise ScheduleError(f"{len(cost)} costs for {count} stages; give one number, or one per stage")
    return [float(c) for c in cost]


def _peaks(schedule: Schedule) -> tuple[int, ...]:
    split = {action.stage for row in schedule.rows for action in row if action.op is Op.W}
    in_flight = [0] * len(schedule.placement)
    peaks = list(in_flight)
    for row in schedule.rows:
        for action in row:
            if action.op is Op.F and schedule.backward[action.stage]:
                in_flight[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], in_flight[action.stage])
            elif action.op is (Op.W if action.stage in split else Op.B):
                in_flight[action.stage] -= 1
    return tuple(peaks)


def _lower_bound(schedule: Schedule, costs: _Costs, comm: float) -> float:
    """max over ranks of [shortest head + m·Σ(F + B) on the rank + shortest tail].

    A head is the longest forward path to a stage of the rank before the rank can begin, a tail the longest backward
    path behind its last backward.
    """
    count = len(schedule.placement)
    head = [0.0] * count
    tail = [0.0] * count
    for _ in range(count):  # longest paths by relaxation: at most as many rounds as stages
        for source, target in schedule.edges:
            hop = comm * (schedule.placement[source] != schedule.placement[target])
            head[target] = max(head[target], head[source] + costs.forward(source) + hop)
            if schedule.backward[source] and schedule.backward[target]:
                tail[target] = max(tail[target], tail[source] + costs.backward(source) + hop)
    bounds = []
    for rank in range(len(schedule.rows)):
        mine = [stage for stage in range(count) if schedule.placement[stage] == rank]
        work = sum(costs.per_microbatch(stage, schedule.backward[stage]) for stage in mine)
        bounds.append(
            min(head[stage] for stage in mine) + schedule.microbatches * work + min(tail[stage] for stage in mine)
        )
    return max(bounds, default=0.0)
