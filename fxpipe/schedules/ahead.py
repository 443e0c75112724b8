"""Ahead: how far a stage without backward, which waits for nobody behind it, may run ahead of the stages that read it.

What it has made and nobody has taken is held, so its F of micro-batch k waits for its readers' F of k − cap. A cap is
as many as keeps stages between it and its readers busy: 1 + d(s) − d(t) for a reader t, 2 for the next stage, and
so many groups where t runs in groups. Where a table runs further ahead than that, or would take longer, all caps are
doubled until it does not; a cap of all micro-batches is none.

Nothing can deadlock by it: a table that simulates with these waits has an order in which all its actions can run, and
the messages that a cap waits for are posted before the action that it names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from fxpipe.graph.topological import topological_order
from fxpipe.schedules.dependency import Dependencies


def held_back(
    free: Dependencies,
    backward: Sequence[bool],
    microbatches: int,
    makespan: Callable[[Dependencies], float],
    turns: Sequence[int],
) -> Dependencies:
    """``free`` with the least caps by which a step takes no longer. ``makespan``: of a step by such dependencies;
    infinite where it deadlocks. ``turns``: on how many ranks each stage is: who waits has sent what it waits for."""
    readers = _readers(free, backward)
    if not readers or (today := makespan(free)) == math.inf:
        return free
    caps = _least(free, readers, turns)
    while any(cap < microbatches for cap in caps.values()):
        held = dataclasses.replace(free, ahead=caps, readers=readers)
        if makespan(held) <= today * (1 + 1e-9):
            return held
        caps = {stage: 2 * cap for stage, cap in caps.items()}
    return free


def _readers(free: Dependencies, backward: Sequence[bool]) -> Mapping[int, tuple[int, ...]]:
    """Those of each stage without backward."""
    found: dict[int, tuple[int, ...]] = {}
    for stage, sources in free.sources.items():
        for source in sources:
            if not backward[source]:
                found[source] = (*found.get(source, ()), stage)
    return found


def _least(free: Dependencies, readers: Mapping[int, tuple[int, ...]], turns: Sequence[int]) -> Mapping[int, int]:
    after: dict[int, list[int]] = {stage: [] for stage in range(len(turns))}
    for stage, sources in free.sources.items():
        for source in sources:
            after[source].append(stage)
    depth = [1] * len(turns)
    for stage in reversed(list(topological_order({stage: stage for stage in range(len(turns))}, after))):
        depth[stage] = 1 + max((depth[target] for target in after[stage]), default=0)
    wanted = {
        stage: max((1 + depth[stage] - depth[reader]) * free.groups.get(reader, 1) for reader in mine)
        for stage, mine in readers.items()
    }
    rounds = {stage: turns[stage] * free.groups.get(stage, 1) for stage in wanted}
    return {stage: -(-cap // rounds[stage]) * rounds[stage] for stage, cap in wanted.items()}
