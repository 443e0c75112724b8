"""Given: what a person may give for a table, looked at where it comes in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.validation import (
    Expected,
    check,
    is_edge,
    is_flag,
    is_number,
    is_text,
    is_whole,
    list_of,
    one_or_each,
    shown,
)

_MOST_COVERED = 2_000_000  # micro-batches in groups: a file of somebody else's may have 0F0-999999999
_NAMES = Expected(list_of(is_text), "a list with the name of each stage")
KINDS: Mapping[str, Expected] = {
    "rows": Expected(list_of(lambda row: isinstance(row, tuple)), "a list with a row of Actions for each rank"),
    "edges": Expected(list_of(is_edge), "a list of pairs of stage numbers, [(0, 1), (1, 2)]"),
    "microbatches": Expected(is_whole, "a whole number"),
    "placement": Expected(list_of(one_or_each(is_whole)), "a list with the rank, or ranks, of each stage, [0, (1, 2)]"),
    "stages": Expected(is_whole, "a whole number"),
    "backward": Expected(list_of(is_flag), "a list with True or False for each stage"),
    "names": _NAMES,
    "stage_names": _NAMES,
    "name": Expected(is_text, "a text"),
    "path": Expected(lambda value: isinstance(value, (str, os.PathLike)), "the path of a file"),
    "tied": Expected(list_of(list_of(is_whole)), "a list of groups of stage numbers, [(0, 3)]"),
    "costs": Expected(lambda value: isinstance(value, Costs), "fxpipe.Costs.of(stages, forward=1, backward=2)"),
    "in_flight": Expected(one_or_each(is_number), "a whole number, or one for each stage"),
    "recompute": Expected(list_of(is_flag), "a list with True or False for each stage"),
    "gather": Expected(
        lambda value: isinstance(value, Mapping), "a dict, stage → micro-batches in a group, or None for all: {4: None}"
    ),
    "gather_cost": Expected(
        lambda value: list_of(is_number)(value) and len(value) == 2, "F and B of a group, a pair of numbers: (1, 2)"
    ),
    "memory": Expected(one_or_each(is_number), "a number of bytes, or one for each rank"),
}
"""Argument → what it is, where it is given at all."""


def check_given(**given: Any) -> None:
    """ScheduleError for the first that is none of what ``KINDS`` has under its name; None is not given."""
    check(ScheduleError, KINDS, **{name: value for name, value in given.items() if value is not None})


def check_graph(edges: Iterable[tuple[int, int]], stages: int, microbatches: int) -> None:
    """ScheduleError for no micro-batch, and for edges of other stages."""
    if microbatches < 1:
        raise ScheduleError(f"{microbatches} micro-batches; at least 1 is needed")
    for source, target in edges:
        if not (0 <= source < stages and 0 <= target < stages):
            raise ScheduleError(f"edge {source}-{target} names a stage outside of 0..{stages - 1}")


def check_costs(costs: Costs, stages: int) -> None:
    """ScheduleError where they are of another number of stages."""
    if len(costs.forward) != stages:
        raise ScheduleError(f"the costs are of {len(costs.forward)} stages, and there are {stages}")


def check_cells(rows: Sequence[Sequence[Any]]) -> None:
    """ScheduleError unless the cells are actions: of a stage and a micro-batch by number."""
    cells = list(chain.from_iterable(rows))
    fits = set(map(type, cells)) <= {Action} and set(map(type, chain.from_iterable(cells))) <= {int, Op}
    if not fits or min(map(attrgetter("count"), cells), default=1) < 1:  # in loops of C, for a table has many
        _check_strangers(cells)
    covered = sum(map(attrgetter("count"), cells))
    if covered > max(len(cells), _MOST_COVERED):
        largest = max(cells, key=attrgetter("count"))
        raise ScheduleError(f"{largest} and others cover {covered:,} micro-batches; at most {_MOST_COVERED:,} are read")


def _check_strangers(cells: Sequence[Any]) -> None:
    stranger = [cell for cell in cells if not _is_action(cell)]
    if stranger:
        raise ScheduleError(f"{shown(stranger[0])} is no Action; write Action(2, Op.F, 0), or Action.parse('2F0')")


def _is_action(cell: Any) -> bool:
    if not (isinstance(cell, Action) and isinstance(cell.op, Op)):
        return False
    return all(map(is_whole, (cell.stage, cell.microbatch, cell.count))) and cell.count >= 1


def in_order(value: Any) -> Any:
    """What comes one after another as a tuple; anything else unchanged, for ``check_given`` to refuse."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)) else value


def nested(value: Any) -> Any:
    """The same for groups of things that come one after another."""
    value = in_order(value)
    return tuple(map(in_order, value)) if isinstance(value, tuple) else value
