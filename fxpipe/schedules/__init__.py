"""``SCHEDULES``: the families. A family is a pure function from a stage graph to rows of actions.

To add one: write ``family(problem) -> rows`` in a file of its own, and give it a row in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from fxpipe.errors import ScheduleError, nearest
from fxpipe.schedule import Row, Schedule
from fxpipe.schedules.gpipe import gpipe
from fxpipe.schedules.one_f_one_b import one_f_one_b
from fxpipe.schedules.problem import Problem

Family = Callable[[Problem], tuple[Row, ...]]

SCHEDULES: Mapping[str, Family] = MappingProxyType({"1f1b": one_f_one_b, "gpipe": gpipe})


def build(
    name: str,
    edges: Sequence[tuple[int, int]],
    microbatches: int,
    placement: Sequence[int] | None = None,
    stages: int | None = None,
    backward: Sequence[bool] | None = None,
    names: Sequence[str] | None = None,
) -> Schedule:
    """The verified schedule of that family for a bare stage graph.

    ``edges``: pairs of stage numbers. ``placement``: the rank of each stage; None: a rank for each. ``stages``: how
    many; None: as many as ``placement`` has, or as ``edges`` mention. ``backward``: whether each stage has one; None:
    all do. ScheduleError where they do not fit each other.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}{nearest(name, SCHEDULES)}")
    count = _count(edges, placement, stages)
    problem = Problem.checked(
        edges=tuple((int(source), int(target)) for source, target in edges),
        microbatches=microbatches,
        placement=tuple(range(count)) if placement is None else tuple(placement),
        backward=(True,) * count if backward is None else tuple(backward),
    )
    schedule = Schedule(
        rows=SCHEDULES[name](problem),
        edges=problem.edges,
        placement=problem.placement,
        backward=problem.backward,
        microbatches=microbatches,
        name=name,
        stage_names=tuple(names) if names is not None else tuple(map(str, range(count))),
    )
    schedule.verify()
    return schedule


def _count(edges: Sequence[tuple[int, int]], placement: Sequence[int] | None, stages: int | None) -> int:
    mentioned = 1 + max((stage for edge in edges for stage in edge), default=-1)
    given = max(mentioned, 1) if placement is None else len(placement)
    count = given if stages is None else stages
    if count < max(mentioned, 1):
        what = f"the edges mention stage {mentioned - 1}" if edges else "at least one is needed"
        raise ScheduleError(f"{count} stages, but {what}; write stages={max(mentioned, 1)}")
    if placement is not None and len(placement) != count:
        raise ScheduleError(f"placement= has {len(placement)} entries for {count} stages")
    return count


__all__ = ["SCHEDULES", "Family", "Problem", "build"]
