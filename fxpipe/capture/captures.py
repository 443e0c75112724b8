"""Captures: an immutable value with a model's stages for each pattern of inputs, and the facts that captures found."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch.description import Description
from fxpipe.batch.pattern import Pattern
from fxpipe.capture.questions import Questions
from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError
from fxpipe.graph.gathering import Places
from fxpipe.graph.program import Program, SizeGuard
from fxpipe.graph.question import Answers, Unanswered
from fxpipe.graph.ranks import Placement
from fxpipe.graph.stage_graph import OwnGenerator, StageGraph
from fxpipe.options import Options
from fxpipe.schedules.schedule import Schedule
from fxpipe.search.choose import Balanced, Balancing
from fxpipe.search.simulated_layouts import Staged
from fxpipe.specs import ObjectValue
from fxpipe.stage.own_generators import own_generators
from fxpipe.trace import NEED_SHAPES, Cut
from fxpipe.trace.checks.sizes import FAMILIES, Family
from fxpipe.trace.cuts.cuts_by_name import resolve
from fxpipe.trace.opaque.observed import SeenCalls
from fxpipe.trace.opaque.regions import Region
from fxpipe.trace.reads import LatestReads, Reads


@dataclass(frozen=True, eq=False)
class Captured:
    """The stages of a capture, and its program as text. ``tracer``: the name of the tracer that made the capture."""

    graph: StageGraph
    text: str
    tracer: str = ""
    holds_for: SizeGuard | None = None
    """The guard that tells for which sizes a capture with symbolic sizes is valid."""
    program: Program | None = None
    """The program from which the stages were cut, if some stages gather."""
    fixed_sizes: str = ""
    """A report of the varying sizes that forward turns into numbers, and where."""
    answers: Answers = ()
    """The questions that forward asked about the inputs, and the answers for which the capture is valid."""
    places: Places = field(default_factory=dict)
    """The row dimensions of gathered values, if the stages are valid for one shape."""
    patterns: tuple[Pattern, ...] = ()
    """The keys in ``Captures`` of this capture, and of the captures of groups that gave it stages."""
    any_words: bool = False
    """Whether the stages are valid for any strings in the inputs, because only opaque regions read strings."""

    @property
    def of_one_shape(self) -> bool:
        """Whether the stages are tied to the captured shape."""
        return self.tracer in NEED_SHAPES


Observed = tuple[bool, Description, SeenCalls]
"""(in training, micro-batch, calls): the observed calls of opaque regions in a run of the model."""
MOST = 64
"""The most captures that are remembered, apart from those of the present batch."""
LATER = "this kind of batch came after compile"


@dataclass(frozen=True, eq=False)
class Captures:
    """A model's captures, one for each pattern. ``Capturing`` replaces them by new ``Captures`` with one more.

    If the user gave stages, nothing is traced, and each micro-batch runs these stages.
    """

    model: nn.Module
    own_stages: StageGraph | None
    options: Options
    topology: Topology
    device: torch.device
    """The device on which a model without a device will run."""
    cuts: Mapping[str, Cut]
    """The boundaries of ``boundaries=``: submodule path → where the submodule is cut."""
    balancing: Balancing
    latest: LatestReads = field(default_factory=LatestReads)
    """The ``reads`` of the present call, which ``run`` sets; watched regions check them for changes."""
    wrong: Mapping[tuple[bool, str], str] = field(default_factory=dict)
    """(in training, tracer) → the error in the tracer's capture at compile. Such a tracer is not tried again."""
    by_pattern: Mapping[Pattern, Captured] = field(default_factory=dict)
    families: Mapping[Hashable, Family] = field(default_factory=dict)
    first: Program | None = None
    searched: Balanced | None = None
    """The search result for the first capture: its stages, or the ranks of its stages."""
    reads: Reads = field(default_factory=Reads)
    reports: tuple[str, ...] = ()
    """The log lines for the user about captures, each line once."""
    whole: tuple[Region, ...] = ()
    """The opaque regions, which a step calls as Python code."""
    by_itself: Mapping[str, str] = field(default_factory=dict)
    """Each opaque region that no tracer could capture → its fraction of a step's FLOPs and the reason, in words."""
    beside: tuple[str, ...] = ()
    """Descriptions of these regions and of the questions about inputs, for ``.stages`` and the preview."""
    observed: tuple[Observed, ...] = ()
    unpacked: frozenset[str] = frozenset()
    """The regions whose results forward unpacks."""
    unused: frozenset[str] = frozenset()
    """The parameters and buffers that the first capture does not use."""
    questions: Questions = field(default_factory=Questions)
    asks_numbers: bool = False
    """Whether forward may also ask for numbers, because the model cannot be captured otherwise."""
    any_words: bool = False
    """Whether a capture is valid for any strings. Descriptions then omit strings; later captures try the same first."""
    objects: Mapping[ObjectValue, Any] = field(default_factory=dict)
    """This rank's inputs that are neither tensors nor plain values."""
    by_value: bool = False
    """Whether a capture is valid only for some Python numbers, so that descriptions of batches include numbers."""
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """Copies of small integer and boolean buffers from the first capture; such buffers may decide sizes."""

    @staticmethod
    def empty(model: nn.Module | StageGraph, options: Options, topology: Topology, device: torch.device) -> Captures:
        """The captures before the first capture. RunError, PartitionError if the options' cuts are not possible."""
        module, own_stages = (model.module, _drawing(model)) if isinstance(model, StageGraph) else (model, None)
        cuts, whole, finds_cuts, found = resolve(module, options.boundaries)
        balancing = Balancing(options, topology, device, finds_cuts, found)
        captures = Captures(module, own_stages, options, topology, device, cuts, balancing, whole=whole)
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

    def only(self, used: Collection[Pattern]) -> Captures:
        """The captures of these patterns, with all dimensions seen to vary; without objects, which each call brings."""
        by_pattern = {pattern: captured for pattern, captured in self.by_pattern.items() if pattern in used}
        families = {
            key: replace(family, general=tuple(entry for entry in family.general if entry[0] in used))
            for key, family in list(self.families.items())[-FAMILIES:]
        }
        questions = self.questions.only([captured.answers for captured in by_pattern.values()])
        return replace(self, by_pattern=by_pattern, questions=questions, objects={}, families=families)

    def asking(self, error: Unanswered) -> Captures:
        """The captures with the question that ``error`` left unanswered, which each micro-batch then answers."""
        captures = replace(self, asks_numbers=error.numbers)
        if error.question is None:
            return replace(captures, by_value=True)
        return replace(captures, questions=self.questions.with_question(error.question))

    def stage_work(self, pattern: Pattern, placement: Placement) -> Staged | None:
        """The stages' work derived from the shapes of a pattern; None if shapes or costs are not known."""
        return self.balancing.stage_work(self.first, pattern, placement)

    @property
    def inputs_with_objects(self) -> set[str]:
        """The inputs that are or hold objects in some capture."""
        inputs = [each for pattern in self.by_pattern for each in pattern.given]
        fixed = {name for each in inputs for name, value in each.fixed if isinstance(value, ObjectValue)}
        inside = ((name, leaf) for each in inputs for name, _, leaves in each.holding for leaf in leaves)
        return fixed | {name for name, leaf in inside if isinstance(leaf, ObjectValue)}

    def with_tensors_of_module(self) -> Captures:
        """The same captures, whose stages hold the module's present tensors and release the tensors that it dropped."""
        by_pattern = {
            pattern: replace(captured, graph=captured.graph.with_tensors_of_module())
            for pattern, captured in self.by_pattern.items()
        }
        own_stages = None if self.own_stages is None else self.own_stages.with_tensors_of_module()
        return replace(self, by_pattern=by_pattern, own_stages=own_stages)


def _drawing(graph: StageGraph) -> StageGraph:
    """Stages that the user gave, with their own random generators, each of the first stage that can reach it."""
    generators = dict[str, OwnGenerator]()
    for stage in graph:
        for name, value in own_generators(stage.module).items():
            if all(value is not other.value for other in generators.values()):
                generators[f"{stage.name} {name}"] = OwnGenerator(value, stage.index)
    return replace(graph, generators=generators)
