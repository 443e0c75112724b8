"""Bound: no table of a stage graph that splits the same backwards in halves can take less time than this."""

from __future__ import annotations

from fxpipe.graph.topological import topological_order
from fxpipe.schedules.action import Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Schedule


def lower_bound(schedule: Schedule, costs: Costs) -> float:
    """max over ranks of [shortest head + max(m·Σ(F + B), m·Σ(F + G) + shortest tail)].

    A head is the longest forward path to a stage of the rank, before the rank can begin; a tail the longest backward
    path behind its last gradient. G is what a stage needs before it sends a gradient: B, or, where the table splits
    its backward, I alone, for the W's may come last. Without a split that is head + m·Σ(F + B) + tail.
    """
    count = len(schedule.placement)
    split = {action.stage for row in schedule.rows for action in row if action.op is Op.I}
    gradient = [costs.input[s] if s in split else costs.backward[s] for s in range(count)]
    head = [0.0] * count
    tail = [0.0] * count
    after: dict[int, list[int]] = {stage: [] for stage in range(count)}
    for source, target in schedule.edges:
        after[source].append(target)
    for source in topological_order({stage: stage for stage in range(count)}, after):  # longest paths
        for target in after[source]:
            hop = costs.comm * (schedule.placement[source] != schedule.placement[target])
            head[target] = max(head[target], head[source] + costs.forward[source] + hop)
            if schedule.backward[source] and schedule.backward[target]:
                tail[target] = max(tail[target], tail[source] + gradient[source] + hop)
    stages: dict[int, list[int]] = {}
    for stage, rank in enumerate(schedule.placement):
        stages.setdefault(rank, []).append(stage)
    bounds = []
    for mine in stages.values():
        all_of_it = sum(costs.per_microbatch(s, schedule.backward[s]) for s in mine)
        sent = sum(costs.forward[s] + gradient[s] * schedule.backward[s] for s in mine)
        m, last = schedule.microbatches, min(tail[s] for s in mine)
        bounds.append(min(head[s] for s in mine) + max(m * all_of_it, m * sent + last))
    return max(bounds, default=0.0)
