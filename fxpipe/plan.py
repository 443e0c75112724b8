"""Plan: everything that is known about a step before it runs, for one pattern of inputs. Pure, and cached."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import passes as default_passes
from fxpipe.action import Op
from fxpipe.errors import PartitionError, ScheduleError
from fxpipe.ir import StageGraph
from fxpipe.lower import Instruction, lower, pairs
from fxpipe.pipeline import Pass, chain
from fxpipe.placement import place
from fxpipe.schedule import Schedule
from fxpipe.schedules import Family, Limited, build
from fxpipe.trace import Request, capture
from fxpipe.verify import Step, execution_order

WORTH_IT = 0.01
"""The part of a step by which a new table must be faster to be taken: less is within the noise of a measurement."""


@dataclass(frozen=True)
class Modes:
    """The state of a model that a capture depends on: each module's training flag, each parameter's requires_grad."""

    training: bytes
    trainable: bytes


@dataclass(frozen=True)
class Pattern:
    """What a capture depends on: which inputs there are, the values fixed in it, the modes of the model."""

    inputs: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...]
    microbatches: int
    with_loss: bool
    modes: Modes
    training: bool = True
    """Whether it is for a step; else for a forward-only run, where the user's own table need not fit."""


@dataclass(frozen=True)
class Plan:
    """A stage graph, its schedule, and each rank's instructions for the values that pass between stages."""

    graph: StageGraph
    schedule: Schedule
    instructions: tuple[tuple[Instruction, ...], ...]
    order: tuple[Step, ...]
    """All ranks' instructions in one order that a single process can run."""
    program: str
    """What was compiled, in words: the program and compile's options."""

    @property
    def description(self) -> str:
        """What must be equal on all ranks, in words; ``digest`` is its hash."""
        return "\n".join([self.program, *(" ".join(map(str, row)) for row in self.schedule.rows)])

    @property
    def output_rank(self) -> int:
        """The pipe rank that has the loss."""
        return self.graph.placement[self.graph.output_stage]

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.description.encode(), digest_size=8).hexdigest()


@dataclass
class Planner:
    """Makes plans for a model (or the user's own stage graph) and keeps them."""

    model: nn.Module | StageGraph
    ranks: int
    schedule: str | Family | Schedule
    placement: Mapping[str, int] | None
    tracer: str
    loss_fn: Callable[..., Any] | None
    passes: Sequence[Pass] | None
    notes: str = ""
    """What else the ranks must have in common, in words."""

    def __post_init__(self) -> None:
        self._plans: dict[Pattern, Plan] = {}

    @property
    def module(self) -> nn.Module:
        return self.model.module if isinstance(self.model, StageGraph) else self.model

    @property
    def first(self) -> Plan:
        """The plan that was made first, whose stages all later ones must have."""
        return next(iter(self._plans.values()))

    def plan(self, pattern: Pattern) -> Plan:
        """The plan for a pattern of inputs; TraceError, PartitionError or ScheduleError where there can be none."""
        if pattern not in self._plans:
            plan = self._make(pattern)
            if self._plans:
                self._check_same_stages(plan)
            self._plans[pattern] = plan
        return self._plans[pattern]

    def _make(self, pattern: Pattern) -> Plan:
        graph, text = self._stage_graph(pattern)
        graph = dataclasses.replace(graph, placement=place(graph, self.ranks, self._wanted(graph)))
        return self._scheduled(graph, pattern, f"{text}\n{self.notes}")

    def rescheduled(self, family: Limited) -> Planner:
        """A planner with this family's tables for training; this very one where its table may stay.

        It may where it keeps within the family's limits, and the new one is not faster by ``WORTH_IT`` at its costs.
        Limits of the family in force go on, unless the new one has others. ScheduleError where there is no such table.
        """
        if isinstance(self.schedule, Limited):
            family = family.or_else(self.schedule)
        planner = dataclasses.replace(self, schedule=family)
        planner._plans = dict(self._plans)
        for pattern, plan in self._plans.items():
            if pattern.training:
                planner._plans[pattern] = planner._scheduled(plan.graph, pattern, plan.program)
        present, new = self.first.schedule, planner.first.schedule
        before, after = (table.simulate(family.costs or 1).makespan for table in (present, new))
        stays = family.excess(present) is None and after > before * (1 - WORTH_IT)
        return self if stays else planner

    def _stage_graph(self, pattern: Pattern) -> tuple[StageGraph, str]:
        if isinstance(self.model, StageGraph):
            return self.model.with_backward(), f"{self.model}"
        loss_fn = self.loss_fn if pattern.with_loss else None
        request = Request(self.model, pattern.inputs, dict(pattern.fixed), loss_fn)
        program = capture(request, self.tracer)
        steps = default_passes.default() if self.passes is None else self.passes
        program = chain(steps, program)
        constants = [f"{name}: {_fingerprint(tensor)}" for name, tensor in program.constants.items()]
        text = "\n".join([type(self.model).__name__, str(program), *constants])
        return default_passes.split(program), text

    def let_go(self) -> None:
        """Makes the plans hold what the module now holds, and nothing that it has let go of."""
        if isinstance(self.model, StageGraph):
            self.model = self.model.with_tensors_of_module()
        for pattern, plan in self._plans.items():
            self._plans[pattern] = dataclasses.replace(plan, graph=plan.graph.with_tensors_of_module())

    def _wanted(self, graph: StageGraph) -> Mapping[str, int] | None:
        """The rank of each stage: as in the first plan, or as the user's table or ``placement`` says."""
        ranks: Sequence[int] = self.schedule.placement if isinstance(self.schedule, Schedule) else ()
        if self._plans and graph.names == self.first.graph.names:
            ranks = self.first.graph.placement
        if not ranks:
            return self.placement
        if len(ranks) != len(graph):
            raise ScheduleError(f"the schedule is for {len(ranks)} stages, the model has {len(graph)}")
        return dict(zip(graph.names, ranks, strict=True))

    def _scheduled(self, graph: StageGraph, pattern: Pattern, program: str) -> Plan:
        """The plan that runs the table of this graph."""
        schedule = self._schedule(graph, pattern)
        cell = next((action for row in schedule.rows for action in row if action.op in (Op.I, Op.W)), None)
        if cell is not None:
            raise ScheduleError(
                f"{schedule.name} has backwards in two halves ({cell}); such tables can be planned, simulated and "
                'drawn, but not run yet. Write schedule="1f1b", or B in place of I and W'
            )
        instructions = lower(schedule.rows, graph.edges, schedule.placement, schedule.backward, schedule.tied)
        order = execution_order(instructions, graph.edges, schedule.backward)
        return Plan(graph, schedule, instructions, tuple(order), program)

    def _schedule(self, graph: StageGraph, pattern: Pattern) -> Schedule:
        backward, microbatches = tuple(stage.has_backward for stage in graph), pattern.microbatches
        tied = self.first.graph.tied if self._plans else graph.tied  # who holds a copy must hear of its gradient
        if not isinstance(self.schedule, Schedule) or not pattern.training:
            return build(
                "1f1b" if isinstance(self.schedule, Schedule) else self.schedule,
                graph.stage_edges,
                microbatches,
                graph.placement,
                backward=backward,
                names=graph.names,
                tied=tied,
            )
        if self.schedule.microbatches != microbatches:
            raise ScheduleError(
                f"the schedule is for {self.schedule.microbatches} micro-batches, the batch has {microbatches}; "
                f"pass microbatches={self.schedule.microbatches}"
            )
        schedule = dataclasses.replace(
            self.schedule, edges=graph.stage_edges, backward=backward, stage_names=graph.names, tied=tied
        )
        schedule.verify()
        return schedule

    def _check_same_stages(self, plan: Plan) -> None:
        """A later capture must leave every stage and every tensor where it is."""
        first, now = self.first.graph, plan.graph
        if first.names != now.names or first.placement != now.placement:
            raise PartitionError(
                f"this kind of batch gives the stages {list(now.names)} on ranks {list(now.placement)}, the first "
                f"kind gave {list(first.names)} on {list(first.placement)}; a model must keep its stages. "
                "Use example_args= of the kind that uses most of it"
            )
        new = set(pairs(plan.instructions)) - set(pairs(self.first.instructions))
        if new:
            raise PartitionError(
                f"this kind of batch sends between pipe ranks {sorted(new)}, which the first kind did not; compile "
                "again, or with example_args= of the kind that uses most of the model"
            )
        for before, after in zip(first, now, strict=True):
            moved = sorted(set(after.tensors) - set(before.tensors))
            if moved:
                raise PartitionError(
                    f"this kind of batch uses {moved[0]} in stage {after.name}, which the first kind did not; "
                    "use example_args= of the kind that uses most of the model"
                )


def _fingerprint(tensor: Tensor) -> str:
    """A hash of a constant: ranks that have made it with different seeds must not go on."""
    if tensor.is_meta:
        return "on the meta device"
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), buffer)
    return f"constant {list(tensor.shape)} {hashlib.blake2b(buffer.getbuffer(), digest_size=8).hexdigest()}"
