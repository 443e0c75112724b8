"""Balancing: what a program's stages take, derived from shapes, and where it is best cut and placed."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError
from fxpipe.graph.program import Program
from fxpipe.graph.ranks import Placement
from fxpipe.hardware import Hardware
from fxpipe.options import AUTO, Options
from fxpipe.plan.balance.memory import Account
from fxpipe.plan.capture.sizes import bytes_of_inputs
from fxpipe.plan.inputs.batch import Description, example_of
from fxpipe.plan.inputs.pattern import Pattern
from fxpipe.progress import log, progress
from fxpipe.schedules.schedule import Schedule
from fxpipe.trace.state.replay import checkpoints_that_keep

if TYPE_CHECKING:
    from fxpipe.plan.balance import Balanced, NodeCosts, StageWork


@dataclass
class Balancing:
    """Costs programs, and cuts and places them, by the options of one ``compile``."""

    options: Options
    topology: Topology
    device: torch.device
    """Where a model that is on no device yet will run."""
    finds_cuts: bool = False
    """Whether a search cuts and places the stages; else they are cut where they are marked."""
    costed: tuple[Any, NodeCosts] | None = None
    """What was last asked what it takes, and the answer."""

    def finds_placement_of(self, stages: int) -> bool:
        """Whether nobody has said on which rank each stage runs, and there is a choice, or a limit to be kept."""
        ranks = self.topology.size("pipe")
        limited = self.options.memory_per_rank is not None and self.options.recompute != AUTO  # which sees to it
        left = self.options.placement is None and not isinstance(self.options.schedule, Schedule)
        return left and (stages > ranks > 1 or (limited and stages >= ranks))

    @property
    def hardware(self) -> Hardware:
        """What costs are reckoned with; all links of a pipeline are as slow as the slowest."""
        hardware = Hardware.of(self.options.hardware)
        if self.topology.size("pipe") == 1:
            return hardware
        return dataclasses.replace(hardware, link=hardware.wire(self.topology.crosses_nodes("pipe")))

    @property
    def compute(self) -> torch.dtype | None:
        """The type in which floating-point parameters and inputs will be, where ``precision`` changes it."""
        return None if self.options.precision is None else self.options.precision.compute

    @property
    def halves(self) -> bool:
        """Whether what W keeps is known: not where backwards run whole, nor where a compiler cuts them."""
        return self.options.stage_compiler is None and self.options.parallelize is None

    def placed(self, program: Program, pattern: Pattern, shape: Description) -> Balanced | None:
        """The best placement found; None where what the stages cost is not known, so that parameters count."""
        from fxpipe.plan.balance import CostUnknown

        try:
            return self.searched(program, pattern, shape)
        except CostUnknown as error:
            if self.options.memory_per_rank is not None:
                raise
            log(f"stages are placed by the number of their parameters: {error}")
            return None

    def stage_work(self, program: Program | None, pattern: Pattern, placement: Placement) -> StageWork | None:
        """What the stages take, derived from the shapes of a pattern; None where these, or the costs, are not known."""
        from fxpipe.plan.balance import BlockGraph, CostUnknown, StageWork, work_of_stages

        shape = pattern.shapes[0] if pattern.shapes else None
        if program is None or shape is None:
            return None

        def work(keeping: bool = False) -> BlockGraph:
            found = work_of_stages(program, self.costs(program, pattern, shape, keeping))
            return dataclasses.replace(found, gather={stage: one.group for stage, one in program.gathered.items()})

        try:
            with progress("costing the stages"):
                costs = self.costs(program, pattern, shape)
                return StageWork(work(), partial(work, keeping=True), placement, pattern.microbatches, costs)
        except CostUnknown as error:
            log(f"what the stages take is not known: {error}")
            return None

    def costs(self, program: Program, pattern: Pattern, shape: Description, keeping: bool = False) -> NodeCosts:
        """What nodes take, each program's once. ``keeping``: where checkpoints keep their activations, as in an R."""
        from fxpipe.plan.balance import costs_from_shapes

        known = (program.graph, pattern.ambient.autocast, shape, keeping, pattern.shapes)
        if self.costed is None or self.costed[0] != known:
            with checkpoints_that_keep() if keeping else contextlib.nullcontext():
                found = costs_from_shapes(
                    program,
                    example_of(shape),
                    self.device,
                    pattern.ambient.autocast,
                    self.hardware,
                    self.compute,
                    Account.of(self.options, self.topology),
                    bytes_of_inputs(pattern.shapes, self.options.precision),
                    self.halves,
                )
            self.costed = known, found
        return self.costed[1]

    def searched(self, program: Program, pattern: Pattern, shape: Description | None) -> Balanced:
        """The program with the best stages found, and the rank of each, which are logged."""
        from fxpipe.plan.balance import balance, place_stages  # it simulates a lot, which few need

        if shape is None:
            raise RunError(
                'boundaries="auto" needs the shapes of a batch: pass example_args= or example_kwargs=, one batch as it '
                "will be passed in calls"
            )
        with progress("balancing the stages"):
            costs = self.costs(program, pattern, shape)
            given = (program, self.topology.size("pipe"), pattern.microbatches, costs, self.options.schedule)
            search = balance if self.finds_cuts else place_stages
            several = self.options.zero != 3 and self.options.parallelize is None
            found = search(*given, self.options.memory_per_rank, self.options.recompute, several)
        if found.others:
            log(str(found))
        return found
