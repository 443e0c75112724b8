"""Recomputation: a table of any family with the forwards of some stages run again for their backwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.families.beside import placed_beside
from fxpipe.schedules.families.limits import Chosen, Family, exceeds
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row, Schedule


def solved(family: Family, problem: Problem) -> Sequence[Sequence[Action]]:
    """A family's rows, with an R for each backward of the stages that ``problem.recompute`` marks."""
    if not problem.recomputed:
        return placed_beside(family, problem)
    rows = placed_beside(family, reckoned(problem))
    return Chosen.like(rows, with_recompute(rows, problem.recomputed))


def reckoned(problem: Problem) -> Problem:
    """What a family is asked in its place, whose table has no R: B takes F + B; from F to B the inputs are held; and
    memory is less by the most that a micro-batch or group holds beside them while it is run again, one at a time."""
    costs, memory = problem.costs.with_recompute(problem.recomputed), problem.memory
    whole = costs.activation_bytes
    if whole is not None:
        kept = costs.input_bytes or (0.0,) * len(whole)
        held = tuple(kept[s] if s in problem.recomputed else size for s, size in enumerate(whole))
        costs = dataclasses.replace(costs, activation_bytes=held)
        if memory is not None:
            beside = [max(size - held[s], 0) * problem.group(s) for s, size in enumerate(whole)]
            most = [max(beside[stage] for stage in stages) for stages in problem.stages_of]
            for rank, (room, one) in enumerate(zip(memory, most, strict=True)):
                if exceeds(one, room):
                    raise ScheduleError(
                        f"rank {rank} may hold {room:g} bytes, but what is run again at once takes {one:g} beside its "
                        "inputs; use smaller micro-batches, or move a stage"
                    )
            memory = tuple(max(room - one, 0) for room, one in zip(memory, most, strict=True))
    return dataclasses.replace(problem, costs=costs, memory=memory)


def with_recompute(rows: Sequence[Sequence[Action]], stages: Collection[int]) -> tuple[Row, ...]:
    """The rows with an R directly in front of each B or I of these stages, but for those that have one.

    It waits for nothing, so that it runs while the gradient is under way; and only one micro-batch of a rank's is held
    whole at a time. Earlier it would hold more, and gain only where a rank idles in front of something else.
    """
    left = frozenset(stages) - {action.stage for row in rows for action in row if action.op is Op.R}

    def again(row: Sequence[Action]) -> Iterator[Action]:
        for action in row:
            if action.stage in left and action.op in (Op.B, Op.I):
                yield action._replace(op=Op.R)
            yield action

    return tuple(tuple(again(row)) for row in rows)


def worthwhile(schedule: Schedule) -> tuple[bool, ...]:
    """The stages whose backward does not always follow its forward at once: between the two nothing else would be
    held in their place."""
    found = [False] * len(schedule.placement)
    for row in schedule.rows:
        for action, following in zip(row, [*row[1:], None], strict=True):
            if action.op is Op.F and schedule.backward[action.stage]:
                found[action.stage] |= following is None or following._replace(op=Op.F) != action
    return tuple(found)
