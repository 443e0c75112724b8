"""Estimates: the seconds and bytes that a plan takes at least, from the work of a micro-batch, before any table.

A micro-batch takes T seconds of work, and C seconds on its longest path. With m of them, each of p ranks works for
about m T/p seconds, and the pipeline fills and drains in C − T/p seconds. A chain has C = T, and (m + p − 1) T/p is
1F1B's time for equal stages. ``uneven`` says how much longer the best cut into p stages takes; the tables of plans that
were simulated say it more exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from fxpipe.graph.program import LAYERS, Program
from fxpipe.hardware import Hardware
from fxpipe.options import AUTO
from fxpipe.policies import Zero
from fxpipe.search.node_costs import NodeCost, NodeCosts

FULL = ("1f1b", "gpipe")
"""The families that fill and drain with whole forwards and backwards; others may take less time."""


@dataclass(frozen=True)
class GridPlan:
    """A plan of the grid of ``choose``. ``rows``: the rows of a micro-batch. ``others``: the ranks of the axes that are
    neither "pipe" nor "data"; ``shards``: the ranks that shard the state of ``zero``."""

    axes: tuple[tuple[str, int], ...]
    microbatches: int
    rows: int
    zero: Zero
    recompute: object
    offload: object
    shards: int

    @property
    def pipe(self) -> int:
        return dict(self.axes)["pipe"]

    @property
    def others(self) -> int:
        return math.prod(size for name, size in self.axes if name not in ("pipe", "data"))

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed or offloaded."""
        return self.recompute is False and self.offload is False

    def __str__(self) -> str:
        axes = " × ".join(f"{name} {size}" for name, size in self.axes)
        return f"{axes}, {self.microbatches} micro-batches of {self.rows}, {self.zero}"


@dataclass(frozen=True)
class MicrobatchWork:
    """The work of a micro-batch on all stages together, in seconds and bytes."""

    seconds: float
    forward: float
    path: float
    """The longest path of a micro-batch, forward and backward."""
    largest: float
    """The seconds of the largest node, which no cut divides."""
    saved: float
    """The bytes that are kept for the backward."""
    by_layers: float
    """The bytes that are kept if each layer is checkpointed; 0 if not known."""
    weights: float
    """The bytes of all parameters."""


def work_of(
    program: Program, costs: NodeCosts, times: float = 1.0, by_layers: NodeCosts | None = None
) -> MicrobatchWork:
    """The work of a micro-batch with ``times`` as many rows as the one that was costed. ``by_layers``: the costs with
    checkpointed layers.

    Arithmetic and saved bytes grow with the rows. Reading the weights, and operators as short as a launch, do not.
    """
    hardware = costs.hardware
    bandwidth = hardware.reached * (hardware.bandwidth or 1.0)

    def seconds_of(cost: NodeCost) -> float:
        seconds = cost.forward + cost.backward
        # Forward writes the results, unless they are views. Backward reads their gradients, and writes as many.
        moved = cost.bytes_out * ((cost.forward > 0) + 2 * (cost.backward > 0))
        least = times * max(cost.ideal / hardware.reached, moved / bandwidth)
        if seconds <= 4 * hardware.launch:
            return max(seconds, least)
        weights = 3 * sum(costs.parameters[key].size for key in cost.parameters) / bandwidth
        fixed = min(weights, seconds)
        return max(fixed + times * (seconds - fixed), least)

    ends: dict[str, float] = {}
    seconds = {name: seconds_of(cost) for name, cost in costs.nodes.items()}
    for node in program.nodes:
        begin = max((ends[operand.name] for operand in node.all_input_nodes), default=0.0)
        ends[node.name] = begin + seconds.get(node.name, 0.0)
    whole = sum(cost.forward + cost.backward for cost in costs.nodes.values()) or 1.0
    total = sum(seconds.values())
    return MicrobatchWork(
        total,
        total * sum(cost.forward for cost in costs.nodes.values()) / whole,
        max(ends.values(), default=0.0),
        max(seconds.values(), default=0.0),
        times * _saved(costs),
        0.0 if by_layers is None else times * _saved(by_layers),
        sum(each.size for each in costs.parameters.values() if each.count),
    )


def _saved(costs: NodeCosts) -> float:
    return costs.saved_bytes(frozenset[int]().union(*(cost.saved for cost in costs.nodes.values())))


class Estimates:
    """Estimates of plans. ``work``: rows of a micro-batch → its work. ``static``: (zero, shards) → the bytes of all
    parameters, gradients and states on a replica's ranks together. ``uneven``: pipe ranks → the seconds of the best cut
    as a multiple of the seconds of equal stages."""

    def __init__(
        self,
        work: Callable[[int], MicrobatchWork],
        static: Callable[[Zero, int], float],
        uneven: Callable[[int], float],
        hardware: Hardware,
        schedule: object,
    ) -> None:
        self._work, self._static, self._uneven = work, cache(static), cache(uneven)
        self._hardware, self._is_full = hardware, schedule in FULL
        self._factors: dict[tuple[int, int], float] = {}
        self._longer: dict[tuple[object, object], float] = {}

    def bytes(self, plan: GridPlan) -> float:
        """The bytes of the fullest rank, at least: a mean over ranks. With "auto" the activations of one micro-batch
        stay, or the inputs of the layers of all in flight."""
        pipe, count, work = plan.pipe, plan.microbatches, self._work(plan.rows)
        in_flight = sum(min(pipe - rank, count) for rank in range(pipe)) / pipe if self._is_full else 1.0
        stored = in_flight * work.saved if plan.keeps_all else work.saved
        if plan.recompute in (AUTO, LAYERS):
            stored = min(stored, in_flight * work.by_layers)
        static = self._static(plan.zero, plan.shards) / plan.others
        return (static + stored) / pipe

    def seconds(self, plan: GridPlan) -> float:
        """The seconds of a step, at least, as far as earlier tables tell."""
        factor = self._factors.get((plan.pipe, plan.rows))
        if factor is not None:
            return self._least(plan) * factor
        # How long ranks wait for recomputation and copies is known from other pipelines only.
        return self._least(plan) * self._uneven(plan.pipe) * self._longer.get((plan.recompute, plan.offload), 1.0)

    def fastest(self, plans: Iterable[GridPlan]) -> GridPlan | None:
        """The plan with the least estimate of its seconds; None without plans. Bounds of cuts, which take long for many
        ranks, are computed only where the plan may be the fastest without them."""
        best, least = None, math.inf
        for plan in sorted(plans, key=self._least):
            if self._least(plan) >= least:
                break
            if (seconds := self.seconds(plan)) < least:
                best, least = plan, seconds
        return best

    def learn(self, plan: GridPlan, seconds: float) -> None:
        """Notes the seconds of a plan that was simulated."""
        factor, key, way = seconds / self._least(plan), (plan.pipe, plan.rows), (plan.recompute, plan.offload)
        self._factors[key] = max(1.0, min(factor, self._factors.get(key, factor)))
        if not plan.keeps_all:
            longer = factor / self._uneven(plan.pipe)
            self._longer[way] = max(1.0, min(longer, self._longer.get(way, longer)))

    def of_equal_stages(self, work: MicrobatchWork, pipe: int, count: int) -> float:
        """The seconds of a table of equal stages."""
        share = work.seconds / pipe
        fill = max(work.path - share, 0.0) if self._is_full else 0.0
        return max(count * share + fill, count * work.largest)

    def _least(self, plan: GridPlan) -> float:
        work, pipe, count, hardware = self._work(plan.rows), plan.pipe, plan.microbatches, self._hardware
        table = self.of_equal_stages(work, pipe, count)
        if not plan.keeps_all and hardware.memory is not None:
            plain = self.bytes(replace(plan, recompute=False, offload=False))
            leaving = plain - self.bytes(plan)
            part = min(max(plain - hardware.memory, 0.0) / leaving, 1.0) if leaving > 0 else 0.0
            again = count * work.forward / pipe
            ways = [part * again] * (plan.recompute == AUTO)
            if plan.offload == AUTO and hardware.host_link:
                copies = count * part * work.saved / pipe / hardware.host_link
                ways.append(max(copies - table, 0.0))
            table += again if plan.recompute == LAYERS else min(ways, default=0.0)
        if plan.shards == 1 or hardware.link is None:
            return table
        # In a ring, a reduce-scatter or an all-gather sends (S - 1) / S of a tensor, an all-reduce twice as much.
        part = (1 - 1 / plan.shards) * work.weights / pipe / plan.others / hardware.link
        times = {0: 2, 2: count}.get(plan.zero.level, 1)
        return max(table, times * part) + part * (plan.zero.level > 0)
