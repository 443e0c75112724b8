"""A lower bound of every table's makespan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

from fxpipe.graph.ranks import Placement, rank_count, ranks_of
from fxpipe.graph.topological import topological_order
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import BACKWARD


class PlacedStages(Protocol):
    """What a table and a ``Problem`` have in common: see the fields of ``Problem``."""

    @property
    def edges(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def backward(self) -> tuple[bool, ...]: ...


def lower_bound(
    stages: PlacedStages, costs: Costs, groups: Sequence[int] | None, rows: Sequence[Sequence[Action]] = ()
) -> float:
    """Returns a lower bound of the makespan of all tables of a stage graph that split the same backwards in halves.

    It is the max over ranks of [shortest head + max(m·Σ(F + B), m·Σ(F + G) + shortest tail)].

    A head is the longest forward path to a stage of the rank, before the rank can begin; a tail the longest backward
    path after its last gradient. G is a stage's time before it sends a gradient: B, or, if the table splits its
    backward, only I, since the W's may come last. Without a split the bound is head + m·Σ(F + B) + tail.

    An R counts as work, and not in tails, since an R need not wait. A gathered stage has m / K actions; its head has K
    forwards of each stage that feeds it, and the tails of these stages have K gradients. A stage on several ranks gives
    each rank its turns; a second bound of a rank omits such stages, whose heads and tails may be shorter than the
    others'. ``groups``: K of each stage. ``rows``: the table, if it has an I or an R. If micro-batches differ, heads
    and tails are the shortest of all micro-batches.
    """
    count, ranks = len(stages.placement), [ranks_of(entry) for entry in stages.placement]
    size = groups or (1,) * count
    forward, gradient, work, sent = _times(stages, costs, size, rows)
    head, tail = ([[0.0] * len(times) for times in forward] for _ in range(2))
    after: dict[int, list[int]] = {stage: [] for stage in range(count)}
    for source, target in stages.edges:
        after[source].append(target)
    # Longest paths, in topological order. A gathered target needs K forwards of its source first, and returns K
    # gradients; a source on r ranks runs ⌈K / r⌉ of these one after another.
    for source in topological_order({stage: stage for stage in range(count)}, after):
        for target in after[source]:
            hop = costs.comm * set(ranks[source]).isdisjoint(ranks[target])
            needs = max(size[target] // size[source], 1), len(ranks[source])
            _extend(head[target], head[source], forward[source], *needs, hop)
            if stages.backward[source] and stages.backward[target]:
                _extend(tail[target], tail[source], gradient[source], *needs, hop)
    bounds = []
    for rank in range(rank_count(stages.placement)):
        mine = [stage for stage in range(count) if rank in ranks[stage]]
        for some in {tuple(mine), tuple(stage for stage in mine if len(ranks[stage]) == 1)} - {()}:
            turns = {s: range(ranks[s].index(rank), stages.microbatches // size[s], len(ranks[s])) for s in some}
            whole, first = (sum(_sum(times[s], turns[s]) for s in some) for times in (work, sent))
            # The rank may run W's while the last gradient is under way, so only F and G add the tail.
            last = min(min(tail[s]) for s in some)
            bounds.append(min(min(head[s]) for s in some) + max(whole, first + last))
    return max(bounds, default=0.0)


def _times(
    stages: PlacedStages, costs: Costs, size: Sequence[int], rows: Sequence[Sequence[Action]]
) -> list[list[list[float]]]:
    """Four lists: F; what precedes a gradient in a backward; all work, F and R included; and F, R and that part of the
    backward. Each has per stage one time per micro-batch or group, or a single time if all are alike."""
    kinds = dict.fromkeys((action.stage, action.kind) for row in rows for action in row)
    columns = []
    for each in costs.by_microbatch or (costs,):
        gradient, forward = list(each.backward), list(each.forward)
        for stage, kind in kinds:
            if kind.messages is BACKWARD:
                gradient[stage] = min(gradient[stage], kind.times(each)[stage])
            elif kind.is_optional and kind.part_of is BACKWARD:  # for all micro-batches
                forward[stage] += kind.times(each)[stage]
        both = [
            [f + b * trained for f, b, trained in zip(forward, part, stages.backward, strict=True)]
            for part in (each.backward, gradient)
        ]
        columns.append((each.forward, gradient, *both))

    def per_action(times: Sequence[float], group: int) -> list[float]:
        return [fmean(times[first : first + group]) for first in range(0, len(times), group)]

    return [list(map(per_action, zip(*part, strict=True), size)) for part in zip(*columns, strict=True)]


def _extend(
    paths: list[float], before: Sequence[float], times: Sequence[float], needs: int, turns: int, hop: float
) -> None:
    """Extends the longest paths to a target's actions by the paths through a source's, each of which takes ``times``.

    ``needs``: how many of the source's actions an action of the target needs; these run on ``turns`` ranks in turn.
    """
    for index, path in enumerate(paths):
        for turn in range(min(needs, turns)):
            mine = [number % len(times) for number in range(index * needs + turn, (index + 1) * needs, turns)]
            least = min(before[number] for number in mine)
            paths[index] = path = max(path, least + math.fsum(times[number] for number in mine) + hop)


def _sum(times: Sequence[float], turns: range) -> float:
    """The time of the actions with these numbers."""
    return times[0] * len(turns) if len(times) == 1 else math.fsum(times[number] for number in turns)
