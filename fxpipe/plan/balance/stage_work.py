"""Stage work: what the stages of a cut program take, with and without recomputation, derived from shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.graph.ranks import Placement
from fxpipe.plan.balance.block_graph import BlockGraph
from fxpipe.plan.balance.node_costs import NodeCosts
from fxpipe.plan.balance.simulated_layouts import Staged, StageLayout
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.in_flight import peak_bytes
from fxpipe.schedules.schedule import Schedule, Timeline


@dataclass(frozen=True)
class StageWork:
    """``plain``: a block for each stage. ``keeping``: the same where what the model checkpoints keeps its activations,
    as it does in an R; reckoned where it is asked for."""

    plain: BlockGraph
    keeping: Callable[[], BlockGraph]
    placement: Placement
    microbatches: int
    nodes: NodeCosts
    """What the stages' nodes take."""

    def simulated(self, schedule: Schedule, recomputed: Sequence[bool]) -> Timeline:
        """When each action of a table would run."""
        return schedule.planned(self.costs(recomputed))

    def costs(self, recomputed: Sequence[bool]) -> Costs:
        """Those of the stages, of which some are recomputed."""
        one = self._plain.costs
        if not any(recomputed):
            return one
        other = self._keeping.costs

        def chosen(name: str) -> list[float]:
            pairs = zip(getattr(one, name), getattr(other, name), recomputed, strict=True)
            return [again if is_again else plain for plain, again, is_again in pairs]

        checkpoints = None
        if one.again_bytes is not None:  # in an R they keep all
            pairs = zip(one.again_bytes, recomputed, strict=True)
            checkpoints = tuple(0.0 if is_again else size for size, is_again in pairs)
        return dataclasses.replace(
            one,
            again_bytes=checkpoints,
            backward=tuple(chosen("backward")),
            activation_bytes=tuple(chosen("activation_bytes")),
            deferred_bytes=None if one.deferred_bytes is None else tuple(chosen("deferred_bytes")),
        )

    def peaks(self, plan: Timeline) -> tuple[float, ...]:
        """Per rank the most bytes of parameters with gradients and optimizer state, and of activations."""
        held = peak_bytes(plan.schedule, plan.costs)
        return tuple(a + b for a, b in zip(self._plain.static_bytes, held, strict=True))

    def seconds(self, plan: Timeline) -> float:
        """Those of a step, no fewer than the busiest link takes, with the sums of tied gradients behind it."""
        return self._plain.whole(plan.makespan)

    @cached_property
    def _plain(self) -> Staged:
        return self._staged(self.plain)

    @cached_property
    def _keeping(self) -> Staged:
        return self._staged(self.keeping())

    def _staged(self, work: BlockGraph) -> Staged:
        return Staged(work, StageLayout(tuple(range(len(work))), self.placement), self.microbatches)
