"""Verify replicas: tables whose stages see the rows of all replicas, played together.

Where such a stage runs forward, and where its gradient is cut, its rank waits for the same rank of every replica: a
collective of them, in the order of their rows, before what the action makes is sent. Replicas that run one table come
to its end where a single one does, for they can make each of its steps in turn; those with tables of their own may wait
for each other around a circle, though each table by itself comes to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.dependency import Link
from fxpipe.schedules.lower import Compute, Instruction, Reduce, lower
from fxpipe.schedules.no_gc import paused
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.table import grid
from fxpipe.schedules.verify import Machine


@dataclass(frozen=True, slots=True)
class Meet(Reduce):
    """Wait until these ranks, one of each replica, have come to the collective of this action."""

    action: Action


@paused()
def verify_replicas(tables: Sequence[Schedule], shared: Collection[int]) -> None:
    """ScheduleError, with its table and the failing cells marked, unless every rank of every replica gets to the end
    of its row. ``tables``: a replica's each, of the same stages. ``shared``: those that see the rows of all."""
    for table in tables:
        table.verify()
    ranks, stages = len(tables[0].rows), len(tables[0].placement)
    instructions: list[tuple[Instruction, ...]] = []
    rows = [row for number, table in enumerate(tables) for row in _shifted(table.rows, number * stages)]
    links = [Link(a + n * stages, b + n * stages) for n, table in enumerate(tables) for a, b in table.edges]
    placement = [rank + n * ranks for n, table in enumerate(tables) for rank in table.placement]
    tied = [[stage + n * stages for stage in group] for n, table in enumerate(tables) for group in table.tied]
    backward = [flag for table in tables for flag in table.backward]
    ahead = {s + n * stages: cap for n, table in enumerate(tables) for s, cap in table.dependencies.ahead.items()}
    for rank, row in enumerate(lower(rows, links, placement, backward, tied, ahead)):
        meeting = tuple(range(rank % ranks, len(rows), ranks))
        instructions.append(tuple(step for one in row for step in _with_meeting(one, meeting, stages, shared)))
    machine = Machine(instructions, links, backward)
    for _ in machine.run():
        pass
    waiting = {rank: step.action for rank, step in machine.waiting() if isinstance(step, Meet)}
    if waiting:
        waits = [f"rank {rank % ranks} of replica {rank // ranks} at {action}" for rank, action in waiting.items()]
        first = next(iter(waiting)) // ranks
        marked = [action for rank, action in waiting.items() if rank // ranks == first]
        raise ScheduleError(
            "the replicas wait for each other: a stage that sees the rows of all runs when all have come to it, and "
            f"these wait for the other replicas: {'; '.join(waits)}. The table of replica {first}:\n"
            f"{grid(tables[first], marked)}"
        )


def _shifted(rows: Sequence[Sequence[Action]], first: int) -> list[list[Action]]:
    return [[action._replace(stage=action.stage + first) for action in row] for row in rows]


def _with_meeting(
    step: Instruction, ranks: tuple[int, ...], stages: int, shared: Collection[int]
) -> tuple[Instruction, ...]:
    """A step, and the collective that is a part of it."""
    if not isinstance(step, Compute) or step.action.op not in (Op.F, Op.B, Op.I):
        return (step,)
    action = step.action._replace(stage=step.action.stage % stages)
    return (step, Meet(ranks, action)) if action.stage in shared else (step,)
