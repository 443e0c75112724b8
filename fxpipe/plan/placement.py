"""Placement: which pipe rank each stage runs on."""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.errors import PartitionError, nearest
from fxpipe.graph.stage_graph import StageGraph

_GATHERED = "its boundary gathers inputs, and all that is computed stands behind it; "


def place(graph: StageGraph, ranks: int, wanted: Mapping[str, int] | None) -> tuple[int, ...]:
    """The rank of each stage: as wanted, or in topological order, balanced by parameters.

    PartitionError where there are more ranks than stages, a name is unknown, or a rank would have no stage.
    """
    if len(graph) < ranks:
        none = "" if len(graph) > 1 else _GATHERED if graph[0].gathered else "no stage_boundary was reached; "
        raise PartitionError(
            f"{ranks} pipe ranks, but the model has {len(graph)} stage{'s' * (len(graph) > 1)} "
            f"({', '.join(graph.names)}); {none}"
            f"mark {ranks - len(graph)} more with fxpipe.stage_boundary or boundaries=, or use fewer ranks"
        )
    if wanted is None:
        return _balanced([1 + sum(p.numel() for p in stage.parameters.values()) for stage in graph], ranks)
    for name in wanted:
        if name not in graph.names:
            raise PartitionError(f"placement names stage {name!r}, which does not exist{nearest(name, graph.names)}")
    missing = [name for name in graph.names if name not in wanted]
    if missing:
        raise PartitionError(f"placement does not say where {missing} run; name all stages: {list(graph.names)}")
    placement = tuple(wanted[name] for name in graph.names)
    if sorted(set(placement)) != list(range(ranks)):
        raise PartitionError(
            f"placement uses ranks {sorted(set(placement))}; with {ranks} pipe ranks each needs a stage"
        )
    return placement


def _balanced(costs: list[int], ranks: int) -> tuple[int, ...]:
    """Contiguous groups, none empty, whose greatest cost is least: dynamic programming over the last cut.

    With the cut further back the last group takes less and those in front of it more, so the best cut is where their
    costs meet, and moves back with the end.
    """
    prefix = [0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]  # best[r][n]: (greatest cost, last cut) of n stages on r
    for used in range(1, ranks + 1):
        row, before, cut = dict[int, tuple[int, int]](), best[-1], used - 1
        for end in range(used, len(costs) - (ranks - used) + 1):
            total = prefix[end]
            greatest = max(before[cut][0], total - prefix[cut])
            while cut + 1 < end and cut + 1 in before:
                behind = max(before[cut + 1][0], total - prefix[cut + 1])
                if behind >= greatest:
                    break
                cut, greatest = cut + 1, behind
            row[end] = greatest, cut
        best.append(row)
    placement: list[int] = []
    end = len(costs)
    for used in range(ranks, 0, -1):
        cut = best[used][end][1]
        placement = [used - 1] * (end - cut) + placement
        end = cut
    return tuple(placement)
