"""A lower bound of every table's makespan."""

from __future__ import annotations

from collections.abc import Sequence
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
    others'. ``groups``: K of each stage. ``rows``: the table, if it has an I or an R.
    """
    count, ranks = len(stages.placement), [ranks_of(entry) for entry in stages.placement]
    size = groups or (1,) * count
    gradient, forward = list(costs.backward), list(costs.forward)
    for stage, kind in dict.fromkeys((action.stage, action.kind) for row in rows for action in row):
        if kind.messages is BACKWARD:
            gradient[stage] = min(gradient[stage], kind.times(costs)[stage])
        elif kind.is_optional and kind.part_of is BACKWARD:  # for all micro-batches
            forward[stage] += kind.times(costs)[stage]
    head, tail = [0.0] * count, [0.0] * count
    after: dict[int, list[int]] = {stage: [] for stage in range(count)}
    for source, target in stages.edges:
        after[source].append(target)
    # Longest paths, in topological order. A gathered target needs K forwards of its source first, and returns K
    # gradients; a source on r ranks runs ⌈K / r⌉ of these one after another.
    for source in topological_order({stage: stage for stage in range(count)}, after):
        for target in after[source]:
            hop = costs.comm * set(ranks[source]).isdisjoint(ranks[target])
            times = -(-max(size[target] // size[source], 1) // len(ranks[source]))
            head[target] = max(head[target], head[source] + times * costs.forward[source] + hop)
            if stages.backward[source] and stages.backward[target]:
                tail[target] = max(tail[target], tail[source] + times * gradient[source] + hop)
    bounds = []
    for rank in range(rank_count(stages.placement)):
        mine = [stage for stage in range(count) if rank in ranks[stage]]
        for some in {tuple(mine), tuple(stage for stage in mine if len(ranks[stage]) == 1)} - {()}:
            work = sent = 0.0
            for s in some:
                turns = len(range(ranks[s].index(rank), stages.microbatches // size[s], len(ranks[s])))
                work += (forward[s] + costs.backward[s] * stages.backward[s]) * turns
                sent += (forward[s] + gradient[s] * stages.backward[s]) * turns
            # The rank may run W's while the last gradient is under way, so only F and G add the tail.
            last = min(tail[s] for s in some)
            bounds.append(min(head[s] for s in some) + max(work, sent + last))
    return max(bounds, default=0.0)
