"""Captures: an immutable value with a model's captures so far, and the facts that they found.

Takes the model, the options and the topology (``Captures.empty``), and then one capture after another. Gives the
capture that is valid for a micro-batch, or why there is none.

A lookup (``holding``) has three steps:

1. ``kind_of`` makes the key of the micro-batch's kind, from its inputs, flags and modes.
2. ``families`` has the captures of this kind.
3. The first capture whose guard holds is the result.

It makes no captures: ``Capturing`` does, and returns new ``Captures``. A rank that fails to make a capture keeps the
old value, so nothing is undone.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.batch.description import Description, example_of
from fxpipe.batch.pattern import Flags, Pattern
from fxpipe.capture.guard import Captured, Family, Guard, KindKey, kind_of
from fxpipe.capture.questions import Questions
from fxpipe.capture.region_facts import RegionFacts
from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError
from fxpipe.graph.program import Program, Shapes
from fxpipe.graph.ranks import Placement
from fxpipe.graph.stage_graph import OwnGenerator, StageGraph
from fxpipe.options import Options
from fxpipe.schedules.schedule import Schedule
from fxpipe.search.choose import Balanced, Balancing
from fxpipe.search.simulated_layouts import Staged
from fxpipe.specs import ObjectValue
from fxpipe.stage.own_generators import own_generators
from fxpipe.trace import Cut
from fxpipe.trace.checks.on_fakes import shapes_of
from fxpipe.trace.cuts.cuts_by_name import resolve
from fxpipe.trace.reads import LatestReads, Reads

MOST = 64
"""The most captures that are remembered, apart from the present batch's captures."""
FAMILIES = 256
"""The most kinds of micro-batch without a capture whose varying sizes are remembered."""
LATER = "this kind of batch came after compile"


@dataclass(frozen=True, eq=False)
class Source:
    """The model and the options of its captures. All captures have the same source."""

    model: nn.Module
    own: Captured | None
    """The user's own stages: nothing is traced, and each micro-batch runs these stages."""
    cuts: Mapping[str, Cut]
    """The boundaries of ``boundaries=``: submodule path → where the submodule is cut."""
    balancing: Balancing
    latest: LatestReads = field(default_factory=LatestReads)
    """The ``reads`` of the present call, which ``run`` sets; watched regions check them for changes."""

    @property
    def options(self) -> Options:
        """The options of ``compile``."""
        return self.balancing.options

    def shapes(self, program: Program, example: Description, pattern: Pattern) -> dict[str, Shapes]:
        """Node → the shapes of its value for a micro-batch like ``example``, in the modes of ``pattern``."""
        how = self.balancing.device, pattern.ambient.autocast, self.balancing.compute
        return shapes_of(program, example_of(example), *how)


class First(NamedTuple):
    """The facts of the first capture, which later captures follow."""

    program: Program
    """The program, cut into stages."""
    run: Program
    """The program that the stages run: with calls of checkpointed layers."""
    layered: Program | None
    """The program with all layers checkpointed, if a search may choose this for stages."""
    searched: Balanced | None
    """The search result: the stages, or the ranks of the stages."""
    unused: frozenset[str]
    """The parameters and buffers that the program does not use."""
    numbers: Mapping[str, Tensor] = MappingProxyType({})
    """Copies of small integer and boolean buffers; such buffers may decide sizes."""


@dataclass(frozen=True, eq=False)
class Captures:
    """A model's captures. ``Capturing`` makes new ``Captures`` with one more."""

    source: Source
    families: Mapping[KindKey, Family] = field(default_factory=dict)
    """``kind_of`` a micro-batch → its captures."""
    wrong: Mapping[tuple[bool, str], str] = field(default_factory=dict)
    """(in training, tracer) → the error in the tracer's capture at compile. Such a tracer is not tried again."""
    first: First | None = None
    reads: Reads = field(default_factory=Reads)
    regions: RegionFacts = field(default_factory=RegionFacts)
    questions: Questions = field(default_factory=Questions)
    any_words: bool = False
    """Whether a capture is valid for any strings. Descriptions then omit strings; later captures try the same first."""
    objects: Mapping[ObjectValue, Any] = field(default_factory=dict)
    """This rank's inputs that are neither tensors nor plain values."""
    reports: tuple[str, ...] = ()
    """The log lines for the user about captures, each line once."""

    @staticmethod
    def empty(
        model: nn.Module | StageGraph,
        options: Options,
        topology: Topology,
        device: torch.device,
        known: dict[Hashable, Any] | None = None,
    ) -> Captures:
        """The captures before the first capture. RunError, PartitionError if the options' cuts are not possible.

        Args:
            model: the model, or the user's own stages.
            options: the options of ``compile``.
            topology: the ranks of all axes.
            device: the device on which a model without a device will run.
            known: what earlier plans of the same model found, to which these add. They may differ in their topology,
                ``microbatches``, ``zero``, ``recompute``, ``offload`` and memory. None: nothing is shared.
        """
        module, own = (model.module, _own(model)) if isinstance(model, StageGraph) else (model, None)
        cuts, whole, finds_cuts, found = resolve(module, options.boundaries)
        balancing = Balancing(options, topology, device, finds_cuts, found, known=known)
        captures = Captures(Source(module, own, cuts, balancing), regions=RegionFacts(whole))
        given: dict[str, Any] = {"passes": options.passes}
        if found is None:
            given |= {"placement": options.placement}
            given["schedule"] = options.schedule if isinstance(options.schedule, Schedule) else None
        for name, value in given.items() if finds_cuts else ():
            if value is not None:
                raise RunError(
                    f'boundaries="auto" finds its own stages, and places them; leave {name}= out'
                    + ", or give the cuts that it found: boundaries=forward_backward.cuts" * (name != "passes")
                )
        if whole and options.parallelize is not None:
            raise RunError(
                f"{whole[0].name} is opaque, and runs the model's own modules, of which parallelize= changes copies; "
                "leave out one of them, or give the stages by StageGraph.from_callables"
            )
        return captures

    def __iter__(self) -> Iterator[Captured]:
        """Yields the captures that are remembered."""
        return chain.from_iterable(family.captured for family in self.families.values())

    @property
    def guards(self) -> list[Guard]:
        """The guards of the captures."""
        return [each.guard for each in self]

    @property
    def program(self) -> Program | None:
        """The first captured program; None before the first capture."""
        return None if self.first is None else self.first.program

    @property
    def searched(self) -> Balanced | None:
        """The search result for the first capture."""
        return None if self.first is None else self.first.searched

    @property
    def notes(self) -> list[str]:
        """Descriptions of the opaque regions that the user did not name, and of the questions about inputs."""
        asked = chain.from_iterable(self.questions.described(guard.answers) for guard in self.guards)
        return list(dict.fromkeys([*self.regions.by_itself.values(), *asked]))

    def family(self, batch: Pattern) -> Family:
        """The captures of the kind of a micro-batch that are valid for some sizes only."""
        return Family() if batch.shape is None else self.families.get(kind_of(batch, batch.shape), Family())

    def holding(self, batch: Pattern) -> Captured | None:
        """The capture that is valid for a micro-batch: for any sizes, or else as ``Family.holding``."""
        of_any_size = self.families.get(kind_of(batch, None), Family())
        return of_any_size.holding(batch) or self.family(batch).holding(batch)

    def why_anew(self, batch: Pattern) -> str:
        """Why a micro-batch needs a new capture, in words: its differences from the capture that differs least."""
        known = self.source.model, self.reads, self.questions
        others = [guard for guard in reversed(self.guards) if guard.values.training == batch.training]
        reasons = sorted((guard.why_not(batch, *known) for guard in others), key=len)
        first = f"it is the first {'batch' if batch.training else 'evaluation'}"
        return "; ".join(reasons[0]) if reasons else first

    def with_captured(self, captured: Captured) -> Captures:
        """The captures with one more."""
        key = kind_of(captured.guard.values, captured.guard.shape)
        family = self.families.get(key, Family()).with_captured(captured)
        return replace(self, families={**self.families, key: family})

    def without(self, training: bool) -> Captures:
        """The captures of the other mode. ``training``: whether the captures for training are dropped."""
        families = {key: family for key, family in self.families.items() if key[0].training != training}
        return replace(self, families=families, first=None if training else self.first)

    def without_search(self) -> Captures:
        """The captures without the search result, so that other tables are chosen."""
        return replace(self, first=None if self.first is None else self.first._replace(searched=None))

    def only(self, used: Collection[Guard]) -> Captures:
        """The captures with these guards, with all dimensions seen to vary; without objects, which each call brings."""
        families = {
            key: replace(family, captured=tuple(each for each in family.captured if each.guard in used))
            for key, family in self.families.items()
        }
        latest = {*list(families)[-FAMILIES:]}
        families = {key: family for key, family in families.items() if family.captured or key in latest}
        questions = self.questions.only([guard.answers for guard in used])
        return replace(self, families=families, questions=questions, objects={})

    def stage_work(self, pattern: Pattern, placement: Placement) -> Staged | None:
        """The stages' work derived from the shapes of a pattern; None if shapes or costs are not known."""
        first = self.first
        if first is None:
            return None
        return self.source.balancing.stage_work(first.run, pattern, placement, first.layered)

    @property
    def inputs_with_objects(self) -> set[str]:
        """The inputs that are or hold objects in some capture."""
        inputs = [given for guard in self.guards for given in guard.values.given]
        fixed = {name for each in inputs for name, value in each.fixed if isinstance(value, ObjectValue)}
        inside = ((name, leaf) for each in inputs for name, _, leaves in each.holding for leaf in leaves)
        return fixed | {name for name, leaf in inside if isinstance(leaf, ObjectValue)}

    def with_tensors_of_module(self) -> Captures:
        """The same captures, whose stages hold the module's present tensors and release the tensors that it dropped."""
        families = {
            key: replace(family, captured=tuple(each.with_tensors_of_module() for each in family.captured))
            for key, family in self.families.items()
        }
        own = self.source.own and self.source.own.with_tensors_of_module()
        return replace(self, families=families, source=replace(self.source, own=own))


def _own(graph: StageGraph) -> Captured:
    """Stages that the user gave, with their own random generators, each of the first stage that can reach it."""
    generators = dict[str, OwnGenerator]()
    for stage in graph:
        for name, value in own_generators(stage.module).items():
            if all(value is not other.value for other in generators.values()):
                generators[f"{stage.name} {name}"] = OwnGenerator(value, stage.index)
    guard = Guard(Pattern((), False, Flags(b"", b"")))
    return Captured(replace(graph, generators=generators), guard, f"{graph}")
