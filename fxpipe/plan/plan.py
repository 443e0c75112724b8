"""Plan: all facts about a step that are known before it runs; and ``PlansSoFar``, the plans made so far.

Takes: stages, a schedule, and instructions, from ``Plans``. Gives: ``Plan``, a frozen value that ``run`` executes,
and its ``digest``, by which ranks compare plans.

One plan is for one number of micro-batches, and for training or evaluation. Its micro-batches may have different
captures (``graphs``), which all fit the same stages (``graph``) and run the same table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxpipe.batch.pattern import Pattern
from fxpipe.capture.captures import Captures
from fxpipe.capture.guard import Guard
from fxpipe.device import with_shared_names
from fxpipe.distributed.topology import Topology
from fxpipe.graph.gathering import Places
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.options import Options
from fxpipe.plain_data import digest_of, number_of
from fxpipe.plan.activations import Kept
from fxpipe.schedules.lower import Instruction
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import Step
from fxpipe.stage.opaque_call import has_opaque_calls


@dataclass(frozen=True)
class Plan:
    """A stage graph, its schedule, and each rank's instructions for the values that pass between stages."""

    graph: StageGraph
    """The stages, and all values that pass between them for any micro-batch."""
    graphs: tuple[StageGraph, ...]
    """The stages for each micro-batch. If captures are tied to shapes, each shape has its own code. If a micro-batch
    lacks an input, some of its stages compute and send nothing."""
    schedule: Schedule
    instructions: tuple[tuple[Instruction, ...], ...]
    order: tuple[Step, ...]
    """All ranks' instructions in a single order that one process can run."""
    program: str
    """The compiled program as text. Ranks have already compared their options."""
    captures: tuple[Guard, ...] = ()
    """The guards of the captures that made the graphs."""
    places: Places = field(default_factory=dict)
    """The row dimensions of gathered values, if the captures are valid for one shape."""

    @property
    def description(self) -> str:
        """The text that must be equal on all ranks; ``digest`` is its hash."""
        ahead = [f"stage {stage} ahead by {cap}" for stage, cap in self.schedule.dependencies.ahead.items()]
        text = with_shared_names(self.program)
        layers = [f"layers of {name} checkpointed" for name in sorted(self.graph.by_layers)]
        return "\n".join([text, *layers, *ahead, *(" ".join(map(str, row)) for row in self.schedule.rows)])

    @cached_property
    def group(self) -> int:
        """The number of micro-batches in a loss: 1, or the group size of the stage that returns the loss."""
        return self.graph.groups(len(self.graphs))[self.graph.output_stage]

    @cached_property
    def output_ranks(self) -> tuple[int, ...]:
        """The pipe ranks that make the loss; the first rank has the complete loss."""
        return tuple(sorted(self.graph.ranks(self.graph.output_stage)))

    @cached_property
    def has_all_rows(self) -> bool:
        """Whether the loss, or the output, of each replica is of the rows of all replicas."""
        gathered = self.graph[self.graph.output_stage].gathered
        return gathered is not None and gathered.modes == {"global"}

    @cached_property
    def counts(self) -> bool:
        """Whether the loss is known to be a ``Sum`` whose count depends only on the inputs."""
        return all(graph.counting is not None and graph.counting.function is not None for graph in self.graphs)

    @cached_property
    def fixes_loss(self) -> bool:
        """Whether the loss stage was captured for fixed shapes, so that the loss has always the same type and metrics.

        Opaque regions, the user's own stages, and modules that symbolic captures call are Python code that may vary.
        """
        of_sizes = all(guard.sizes is not None for guard in self.captures)
        return of_sizes and not any(has_opaque_calls(graph[graph.output_stage].module) for graph in self.graphs)

    @cached_property
    def halved(self) -> tuple[frozenset[int], ...]:
        """For each micro-batch, the stages whose backward the table splits into I and W."""
        halves = self.schedule.dependencies.halves
        return tuple(frozenset(stage for stage, of in halves if of == index) for index in range(len(self.graphs)))

    @cached_property
    def row_digests(self) -> tuple[int, ...]:
        """A number for each row: rows with equal numbers run the same actions in the same order."""
        return tuple(digest_of(map(str, row)) for row in self.schedule.rows)

    @cached_property
    def pass_digests(self) -> tuple[int, ...]:
        """A number for each row: rows with equal numbers begin and end stages in the same order, at any row length."""
        # First uses in order, then last uses backwards: FSDP2 gathers a stage and reduces its gradients at these uses.
        passes = [[f"{action.stage}{action.kind}" for action in row] for row in self.schedule.rows]
        return tuple(digest_of([*dict.fromkeys(row), *dict.fromkeys(reversed(row))]) for row in passes)

    @cached_property
    def digest(self) -> str:
        """A hash of ``description``."""
        return f"{number_of(self.description.encode()):x}"


@dataclass(frozen=True, eq=False)
class PlansSoFar:
    """The plans made so far, and what they were made from.

    ``by_pattern`` is in the order in which the plans were made: the first plan decides which stages there are.
    """

    topology: Topology
    options: Options
    captures: Captures
    """The source of the stages: captures of the model, or the user's own stages."""
    by_pattern: Mapping[Pattern, Plan] = field(default_factory=dict)
    shown: Pattern | None = None
    """The pattern of the first plan, with its shapes."""
    marks: Mapping[str, Kept] | None = None
    """How each stage's activations reach its backward, by the stages' names, if chosen before the first plan."""

    @property
    def first(self) -> Plan:
        """The first plan. All later plans must have its stages."""
        return next(iter(self.by_pattern.values()))


def values_of(graphs: Sequence[StageGraph]) -> list[str] | None:
    """The value of each edge, so that a value is sent only once to several stages of a rank. None if micro-batches have
    different captures: different values may then have the same name."""
    return [edge.value for edge in graphs[0].edges] if all(graph is graphs[0] for graph in graphs) else None
