"""Bound: no table of a stage graph that splits the same backwards in halves can take less time than this."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.graph.ranks import rank_count, ranks_of
from fxpipe.graph.topological import topological_order
from fxpipe.schedules.action import Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Schedule


def lower_bound(schedule: Schedule, costs: Costs, groups: Sequence[int] | None = None) -> float:
    """max over ranks of [shortest head + max(m·Σ(F + B), m·Σ(F + G) + shortest tail)].

    A head is the longest forward path to a stage of the rank, before the rank can begin; a tail the longest backward
    path behind its last gradient. G is what a stage needs before it sends a gradient: B, or, where the table splits
    its backward, I alone, for the W's may come last. Without a split that is head + m·Σ(F + B) + tail.

    An R counts as work, and not in tails, for it need not wait. A gathered stage has m / K actions; its head has K
    forwards of each stage that feeds it, and the tails of those K gradients. ``groups``: K of each stage, where the
    table has no rows. Of a stage on several ranks each has its turns; a rank is also looked at without such stages,
    whose heads and tails may be shorter than those of the rest.
    """
    count, ranks = len(schedule.placement), [ranks_of(place) for place in schedule.placement]
    size = schedule.groups if groups is None else groups
    split = {action.stage for row in schedule.rows for action in row if action.op is Op.I}
    again = {action.stage for row in schedule.rows for action in row if action.op is Op.R}
    gradient = [costs.input[s] if s in split else costs.backward[s] for s in range(count)]
    head = [0.0] * count
    tail = [0.0] * count
    after: dict[int, list[int]] = {stage: [] for stage in range(count)}
    for source, target in schedule.edges:
        after[source].append(target)
    for source in topological_order({stage: stage for stage in range(count)}, after):  # longest paths
        for target in after[source]:
            hop = costs.comm * set(ranks[source]).isdisjoint(ranks[target])
            times = -(-max(size[target] // size[source], 1) // len(ranks[source]))
            head[target] = max(head[target], head[source] + times * costs.forward[source] + hop)
            if schedule.backward[source] and schedule.backward[target]:
                tail[target] = max(tail[target], tail[source] + times * gradient[source] + hop)
    bounds = []
    for rank in range(rank_count(schedule.placement)):
        mine = [stage for stage in range(count) if rank in ranks[stage]]
        for some in {tuple(mine), tuple(stage for stage in mine if len(ranks[stage]) == 1)} - {()}:
            forward = {s: costs.forward[s] * (2 if s in again else 1) for s in some}
            runs = {s: _turns(schedule.microbatches // size[s], ranks[s], rank) for s in some}
            all_of_it = sum((forward[s] + costs.backward[s] * schedule.backward[s]) * runs[s] for s in some)
            sent = sum((forward[s] + gradient[s] * schedule.backward[s]) * runs[s] for s in some)
            last = min(tail[s] for s in some)
            bounds.append(min(head[s] for s in some) + max(all_of_it, sent + last))
    return max(bounds, default=0.0)


def _turns(count: int, ranks: tuple[int, ...], rank: int) -> int:
    """How many of so many micro-batches, or groups, a stage runs on one of its ranks."""
    return len(range(ranks.index(rank), count, len(ranks)))
