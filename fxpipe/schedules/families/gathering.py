"""Which stages run for a group of micro-batches at once: those that are gathered, and all behind them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

from fxpipe.errors import ScheduleError
from fxpipe.schedules.families.problem import Problem
from fxpipe.validation import shown


def groups_behind(gather: Mapping[int, int | None], problem: Problem) -> tuple[int, ...]:
    """Per stage, of how many micro-batches its actions are.

    ``gather``: stage → K; None: all micro-batches. ScheduleError where there is no such stage, K does not divide the
    micro-batches, or groups of two sizes meet.
    """
    m, given = problem.microbatches, dict[int, int]()
    for stage, wanted in gather.items():
        if not (isinstance(stage, Integral) and 0 <= stage < len(problem.placement)):
            raise ScheduleError(f"gather names stage {shown(stage)}; they are 0 to {len(problem.placement) - 1}")
        size = m if wanted is None else wanted
        if not (isinstance(size, Integral) and size >= 1) or m % size:
            fitting = ", ".join(str(number) for number in range(1, m + 1) if m % number == 0)
            raise ScheduleError(
                f"stage {stage} is gathered in groups of {shown(wanted)}, which do not divide {m} micro-batches; "
                f"write one of {fitting:.60}"
            )
        given[int(stage)] = int(size)
    groups: dict[int, tuple[int, int]] = {}  # stage → the gathered stage whose group it runs in, and its size
    for stage in problem.order:
        own = [(stage, given[stage])] if stage in given else []
        before = [groups[source] for source, target in problem.edges if target == stage and source in groups]
        for origin, size in own + before:
            first = groups.setdefault(stage, (origin, size))
            if first[1] != size:
                raise ScheduleError(
                    f"stage {stage} is behind groups of two sizes, {first[1]} micro-batches at stage {first[0]} and "
                    f"{size} at stage {origin}; gather both in the same way"
                )
    return tuple(groups[stage][1] if stage in groups else 1 for stage in range(len(problem.placement)))
