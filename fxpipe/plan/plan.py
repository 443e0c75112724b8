"""Plan: all that is known about a step before it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxpipe.batch.pattern import Pattern
from fxpipe.device import with_shared_names
from fxpipe.graph.gathering import Places
from fxpipe.graph.opaque_call import has_opaque_calls
from fxpipe.graph.plain_data import digest_of
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.schedules.lower import Instruction
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import Step


@dataclass(frozen=True)
class Plan:
    """A stage graph, its schedule, and each rank's instructions for the values that pass between stages."""

    graph: StageGraph
    """The stages, and all values that pass between them for any micro-batch."""
    graphs: tuple[StageGraph, ...]
    """The stages for each micro-batch: where shapes are a part of a capture, each shape has its own code; and where it
    lacks an input, some do nothing, and send nothing."""
    schedule: Schedule
    instructions: tuple[tuple[Instruction, ...], ...]
    order: tuple[Step, ...]
    """All ranks' instructions in one order that a single process can run."""
    program: str
    """What was compiled, in words. That ranks have the same options was compared before."""
    captures: tuple[Pattern, ...] = ()
    """The captures that its graphs come from, as ``Captures`` keeps them."""
    places: Places = field(default_factory=dict)
    """Where gathered values have their rows, if these captures hold for one shape."""

    @property
    def description(self) -> str:
        """What must be equal on all ranks, in words; ``digest`` is its hash."""
        ahead = [f"stage {stage} ahead by {cap}" for stage, cap in self.schedule.dependencies.ahead.items()]
        text = with_shared_names(self.program)
        return "\n".join([text, *ahead, *(" ".join(map(str, row)) for row in self.schedule.rows)])

    @cached_property
    def group(self) -> int:
        """Of how many micro-batches a loss is: 1, or as many as a group of the stage that returns it has."""
        return self.graph.groups(len(self.graphs))[self.graph.output_stage]

    @property
    def output_ranks(self) -> tuple[int, ...]:
        """The pipe ranks that make the loss; the first one has the whole of it."""
        return tuple(sorted(self.graph.ranks(self.graph.output_stage)))

    @cached_property
    def counts(self) -> bool:
        """Whether the loss is known to be a ``Sum`` whose items the inputs alone decide."""
        return all(graph.counting is not None and graph.counting.function is not None for graph in self.graphs)

    @cached_property
    def fixes_loss(self) -> bool:
        """Whether what makes the loss was captured for some shapes, and so is always of one type with the same metrics.

        An opaque region, the user's own stages, and modules that symbolic captures call, are Python that may not be.
        """
        captured = bool(self.captures) and all(pattern.shapes for pattern in self.captures)
        return captured and not any(has_opaque_calls(graph[graph.output_stage].module) for graph in self.graphs)

    def __str__(self) -> str:
        return f"{self.graph}\n{self.schedule}"

    @cached_property
    def halved(self) -> tuple[frozenset[int], ...]:
        """For each micro-batch the stages whose backward of it the table has as I and W."""
        halves = self.schedule.dependencies.halves
        return tuple(frozenset(stage for stage, of in halves if of == place) for place in range(len(self.graphs)))

    @cached_property
    def row_digests(self) -> tuple[int, ...]:
        """A number for each row: rows of one number run the same actions in one order."""
        return tuple(digest_of(map(str, row)) for row in self.schedule.rows)

    @cached_property
    def pass_digests(self) -> tuple[int, ...]:
        """The same for the order in which a row's stages begin and end, however many micro-batches there are."""
        # First uses in order, then last uses backwards: FSDP2 gathers a stage at these, and reduces its gradients.
        passes = [[f"{action.stage}{action.op}" for action in row] for row in self.schedule.rows]
        return tuple(digest_of([*dict.fromkeys(row), *dict.fromkeys(reversed(row))]) for row in passes)

    @cached_property
    def digest(self) -> str:
        """A hash of ``description``."""
        return hashlib.blake2b(self.description.encode(), digest_size=8).hexdigest()


def values_of(graphs: Sequence[StageGraph]) -> list[str] | None:
    """What each edge carries, so that one value is sent once to those on one rank. None where micro-batches have
    captures of their own: there a value may bear the name of another one."""
    return [edge.value for edge in graphs[0].edges] if all(graph is graphs[0] for graph in graphs) else None
