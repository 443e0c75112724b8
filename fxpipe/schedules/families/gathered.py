"""GPipe (Huang et al. 2019): all forwards, then all backwards; and its variants with a gathered stage, which runs once
for a group of K micro-batches, such as the loss of a whole batch.

    store_all           0F0 0F1 0F2 0F3          0B0 0B1 0B2 0B3
                            1F0 1F1 1F2 1F3  1B0 1B1 1B2 1B3
                                         2F0-3 2B0-3

``group_interleaved`` runs the backwards of a group among the forwards of the next group; ``cached`` (GradCache, Gao et
al. 2021) holds only the inputs of the stages before the join, and runs their forwards again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.families.limits import (
    Caps,
    Chosen,
    Maker,
    shortest,
    shortest_within_limits,
    with_fewer_microbatches,
)
from fxpipe.schedules.families.list_scheduling import Priority, backward_first, forward_first, list_schedule
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.families.solve import with_recompute
from fxpipe.schedules.kinds import Kind
from fxpipe.validation import is_whole, shown

MANY = 3_000
"""Above so many actions, a table with fewer groups decides the best number of micro-batches in flight."""


def gpipe(problem: Problem) -> tuple[Row, ...]:
    """Rows with every forward before every backward; peak in flight is the number of micro-batches.

    On a balanced chain of p stages the bubble is (p − 1) / (m + p − 1). Stages that run in groups come in the middle,
    group by group: forward, backward.
    """
    return tuple(_gpipe_row(problem, stages) for stages in problem.stages_of)


def _gpipe_row(problem: Problem, stages: Sequence[int]) -> Row:
    # Gathered stages run between the other stages' forwards and backwards: they need all forwards of a group.
    alone = [stage for stage in stages if problem.group(stage) == 1]
    forward = [action for stage in alone for action in problem.actions(stage, Kind.F)]
    backward = [
        action for stage in reversed(alone) if problem.backward[stage] for action in problem.actions(stage, Kind.B)
    ]
    gathered = [stage for stage in stages if problem.group(stage) > 1]
    return (*forward, *_group_by_group(problem, gathered), *backward)


def _group_by_group(problem: Problem, stages: Sequence[int]) -> Iterator[Action]:
    """Yields the groups in the same order on all ranks: by the micro-batch that completes the group."""
    sizes = {problem.group(stage) for stage in stages}
    ends = sorted((end, size) for size in sizes for end in range(size, problem.microbatches + 1, size))
    for end, size in ends:
        mine = [stage for stage in stages if problem.group(stage) == size]
        yield from (Action(stage, Kind.F, end - size, size) for stage in mine)
        yield from (Action(stage, Kind.B, end - size, size) for stage in reversed(mine) if problem.backward[stage])


def store_all(problem: Problem) -> tuple[Row, ...]:
    """All forwards, the groups, all backwards: GPipe's order. Peak in flight is the number of micro-batches."""
    _check(problem, "store_all")
    return gpipe(problem)


def group_interleaved(problem: Problem) -> tuple[Row, ...]:
    """1F1B across groups: a stage d(s) from the sink warms up with K + d(s) − 1 forwards or more, the best found by
    simulation at ``problem.costs``, within ``in_flight`` and ``memory`` if possible."""
    _check(problem, "group_interleaved")
    return interleaved_groups(problem)


def cached(problem: Problem) -> tuple[Row, ...]:
    """Forwards keep only their inputs; after the join, each runs again, directly before its backward.

    The stages that feed a gathered stage are recomputed, and hold one micro-batch each; the order is the shorter of
    ``store_all`` and ``group_interleaved`` for backwards of F + B. Before groups of 1 no stage is recomputed.
    """
    _check(problem, "cached")
    feeding = [stage for stage, size in enumerate(_behind(problem)) if size > problem.group(stage)]
    orders = (gpipe, interleaved_groups) if _several(problem) else (gpipe,)
    makers = [partial(_cached, feeding=feeding, maker=maker) for maker in orders]
    best = shortest_within_limits(problem, makers) or shortest(problem, makers, problem.costs)
    return best.rows


GATHERED = ("store_all", "group_interleaved", "cached")
"""The names of the families that need gathered stages."""


def fastest(problem: Problem) -> Chosen:
    """Returns the fastest simulated table of ``GATHERED`` within the limits; of equal tables, with several groups, the
    table that holds less; one group cannot be interleaved. If none fits, the table that holds least."""
    makers = (group_interleaved, store_all, cached) if _several(problem) else (store_all, cached)
    choice = shortest_within_limits(problem, makers)
    maker = choice.maker if choice else cached
    return Chosen.named(choice.rows if choice else cached(problem), maker.__name__)


def interleaved_groups(problem: Problem, split: bool = False) -> tuple[Row, ...]:
    """The shortest list schedule, of several numbers of micro-batches in flight. ``split``: splits backwards."""
    # The steady state repeats, so the shortest order for a few groups is the shortest for many: one list schedule of
    # the full size is enough.
    few = with_fewer_microbatches(problem, MANY, 4)
    best = shortest_within_limits(few, _makers(few, split))
    maker = best.maker if best else next(_makers(problem, split))
    return best.rows if best and few is problem else maker(problem)


def _several(problem: Problem) -> bool:
    """Whether some stage has more than one group."""
    return any(1 < size < problem.microbatches for size in problem.groups or ())


def _makers(problem: Problem, split: bool) -> Iterator[Maker]:
    """Makers from K + d(s) − 1 in flight to two groups more, in growing steps: the next group, and a round trip."""
    extra, most = 0, 2 * max(problem.groups or (1,)) + max(problem.depth)
    while extra <= most:
        for priority in (forward_first, backward_first):
            yield partial(_listed, extra=extra, priority=priority, split=split)
        if _caps(problem, extra) == _caps(problem, problem.microbatches):
            return
        extra += max(1, extra // 2)


def _listed(problem: Problem, extra: int, priority: Priority, split: bool) -> tuple[Row, ...]:
    caps = _caps(problem, extra)
    return list_schedule(problem, problem.costs, caps, priority, weight_caps=caps if split else None)


def _caps(problem: Problem, extra: int) -> Caps:
    """Returns the caps: K + d(s) − 1 + ``extra`` micro-batches before a group; a gathered stage holds d(s) groups."""
    caps = []
    for stage, (behind, depth) in enumerate(zip(_behind(problem), problem.depth, strict=True)):
        size = problem.group(stage)
        # A stage before the join must make a whole group before the first gradient returns; a gathered stage counts
        # groups.
        wanted = behind + depth - 1 + extra if size == 1 else size * depth
        caps.append(min(wanted, problem.microbatches))
    return tuple(caps)


def _behind(problem: Problem) -> list[int]:
    """Returns, per stage, the largest group size of the stage itself and of all stages after it."""
    sizes = [problem.group(stage) for stage in range(len(problem.placement))]
    for stage in reversed(problem.order):
        sizes[stage] = max([sizes[stage], *(sizes[target] for target in problem.targets[stage])])
    return sizes


def _cached(problem: Problem, feeding: list[int], maker: Maker) -> tuple[Row, ...]:
    trained = [stage for stage in feeding if problem.backward[stage] and stage not in problem.recomputed]
    # The order is made for backwards of F + B; each backward is then split into R and B.
    costs = problem.costs.with_recompute(trained)
    free = replace(problem, costs=costs, in_flight=None, memory=None)
    return with_recompute(maker(free), trained)


def _check(problem: Problem, name: str) -> None:
    if problem.groups is None:
        raise ScheduleError(
            f'"{name}" is for a stage that runs once for several micro-batches, and here none does; write '
            'stage_boundary(..., gather="batch"), build(..., gather={stage: None}), or "1f1b"'
        )


# --- The stages that run once for a group of micro-batches: the gathered stages, and all stages after them ---


def groups_behind(gather: Mapping[int, int | None], problem: Problem) -> tuple[int, ...]:
    """Returns, per stage, the number of micro-batches in an action.

    ``gather``: stage → K; None: all micro-batches. ScheduleError if a stage does not exist, K does not divide the
    micro-batches, or groups of two sizes meet.
    """
    m, stages = problem.microbatches, range(len(problem.placement))
    for stage, wanted in gather.items():
        if stage not in stages:
            raise ScheduleError(f"gather names stage {shown(stage)}; they are 0 to {stages[-1]}")
        if wanted is not None and not (is_whole(wanted) and wanted >= 1 and m % wanted == 0):
            raise ScheduleError(
                f"stage {stage} is gathered in groups of {shown(wanted)}, which do not divide {m} micro-batches; "
                "write a divisor, or None for all of them"
            )
    # Groups go downstream: a stage that needs a gathered value can run no earlier than the whole group.
    groups = [1] * len(stages)
    for stage in problem.order:
        sizes = {groups[source] for source, target in problem.edges if target == stage} - {1}
        if stage in gather:
            sizes.add(gather[stage] or m)
        if len(sizes) > 1:
            raise ScheduleError(
                f"stage {stage} is behind groups of two sizes, {sorted(sizes)} micro-batches; gather in one way"
            )
        groups[stage] = next(iter(sizes), 1)
    return tuple(groups)
