"""Given: checks of the arguments that a user passes for a table, made where they come in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import Kind
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
    "tied": Expected(list_of(list_of(is_whole)), "a list of groups of stage numbers, [(0, 3)]"),
    "costs": Expected(lambda value: isinstance(value, Costs), "fxpipe.Costs.of(stages, forward=1, backward=2)"),
    "in_flight": Expected(
        lambda value: one_or_each(is_whole)(value) or (isinstance(value, str) and value == "2x"),
        'a whole number, one for each stage, or "2x"',
    ),
    "recompute": Expected(list_of(is_flag), "a list with True or False for each stage"),
    "offload": Expected(list_of(is_flag), "a list with True or False for each stage"),
    "gather": Expected(
        lambda value: isinstance(value, Mapping), "a dict, stage → micro-batches in a group, or None for all: {4: None}"
    ),
    "gather_cost": Expected(
        lambda value: list_of(is_number)(value) and len(value) == 2, "F and B of a group, a pair of numbers: (1, 2)"
    ),
    "memory": Expected(one_or_each(is_number), "a number of bytes, or one for each rank"),
}
"""Argument → its expected kind, if the argument is not None."""


def check_given(**arguments: Any) -> None:
    """Raises ScheduleError for the first argument that is not of its kind in ``KINDS``; most arguments may be None."""
    required = ("rows", "edges", "microbatches", "tied")
    wanted = {name: value for name, value in arguments.items() if value is not None or name in required}
    check(ScheduleError, KINDS, **wanted)


def check_graph(edges: Iterable[tuple[int, int]], stages: int, microbatches: int) -> None:
    """Raises ScheduleError for fewer than 1 micro-batch, and for edges that name unknown stages."""
    if microbatches < 1:
        raise ScheduleError(f"{microbatches} micro-batches; at least 1 is needed")
    for source, target in edges:
        if not (0 <= source < stages and 0 <= target < stages):
            raise ScheduleError(f"edge {source}-{target} names a stage outside of 0..{stages - 1}")


def check_length(name: str, entries: Sequence[object], count: int, what: str = "stages") -> None:
    """Raises ScheduleError unless the list has an entry for each stage, or each rank."""
    if len(entries) != count:
        raise ScheduleError(f"{name} has {len(entries)} entries for {count} {what}")


def check_costs(costs: Costs, stages: int, microbatches: int) -> None:
    """Raises ScheduleError unless the costs are of so many stages, and, if they differ, of so many micro-batches."""
    check_length("costs.forward", costs.forward, stages)
    if costs.by_microbatch:
        check_length("each row of costs", costs.by_microbatch, microbatches, "micro-batches")


def check_cells(rows: Sequence[Sequence[Any]], stages: int, microbatches: int) -> None:
    """Raises ScheduleError unless each cell is an action of an existing stage and of existing micro-batches."""
    for cell in chain.from_iterable(rows):
        # One comparison covers the usual types, as a table has thousands of cells; others, such as numpy's, need more.
        usual = type(cell) is Action and tuple(map(type, cell)) == (int, Kind, int, int)
        if not usual and not (
            isinstance(cell, Action) and isinstance(cell.kind, Kind) and all(map(is_whole, cell[::2]))
        ):
            raise ScheduleError(f"{shown(cell)} is no Action; write Action(2, Kind.F, 0), or Action.parse('2F0')")
        stage, _, microbatch, count = cell
        if not 0 <= stage < stages:
            raise ScheduleError(f"{cell} is of a stage outside of 0..{stages - 1}")
        if not 0 <= microbatch < microbatch + count <= microbatches:
            raise ScheduleError(f"{cell} is of a micro-batch outside of 0..{microbatches - 1}")


def in_order(value: Any) -> Any:
    """Returns an iterable as a tuple; any other value unchanged, for ``check_given`` to refuse."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)) else value


def nested(value: Any) -> Any:
    """Returns an iterable of iterables as a tuple of tuples."""
    value = in_order(value)
    return tuple(map(in_order, value)) if isinstance(value, tuple) else value
