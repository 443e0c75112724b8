"""Recomputation: a table of any family with the forwards of some stages run again for their backwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.schedule import Row


def with_recompute(rows: Sequence[Sequence[Action]], stages: Collection[int]) -> tuple[Row, ...]:
    """The rows with an R directly in front of each B or I of these stages, but for those that have one.

    It waits for nothing, so that it runs while the gradient is under way; and only one micro-batch of a rank's is held
    whole at a time. Earlier it would hold more, and gain only where a rank idles in front of something else.
    """
    present = {action.stage for row in rows for action in row if action.op is Op.R}
    return tuple(tuple(_again(row, frozenset(stages) - present)) for row in rows)


def _again(row: Sequence[Action], stages: Collection[int]) -> Iterator[Action]:
    for action in row:
        if action.stage in stages and action.op in (Op.B, Op.I):
            yield action._replace(op=Op.R)
        yield action
