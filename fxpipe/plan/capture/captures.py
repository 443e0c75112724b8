"""Captures: the stages of a model for each pattern of inputs, and what else captures have shown of it. A value."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch.description import Description
from fxpipe.batch.pattern import Pattern
from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError
from fxpipe.graph.gathering import Places
from fxpipe.graph.like import ObjectValue
from fxpipe.graph.program import Program, SizeGuard
from fxpipe.graph.question import Answers, Unanswered
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.options import Options
from fxpipe.plan.balance.choose import Balanced, Balancing
from fxpipe.plan.capture.questions import Questions
from fxpipe.plan.capture.sizes import FAMILIES, Family
from fxpipe.schedules.schedule import Schedule
from fxpipe.trace import NEED_SHAPES, Cut
from fxpipe.trace.cuts.cuts_by_name import resolve
from fxpipe.trace.opaque.observed import SeenCalls
from fxpipe.trace.opaque.regions import Region
from fxpipe.trace.state.reads import LatestReads, Reads


@dataclass(frozen=True, eq=False)
class Captured:
    """The stages of one capture, and its program in words. ``tracer``: the name of the one that made it."""

    graph: StageGraph
    text: str
    tracer: str = ""
    holds_for: SizeGuard | None = None
    """For which sizes it holds, where it was captured with symbolic ones."""
    program: Program | None = None
    """What the stages were cut from, where some of them gather."""
    fixed_sizes: str = ""
    """Of which sizes that vary forward makes numbers, and where, in words."""
    answers: Answers = ()
    """What forward asked about the inputs, and the answers for which it holds."""
    places: Places = field(default_factory=dict)
    """Where what the stages gather has its rows, if they hold for one shape."""
    patterns: tuple[Pattern, ...] = ()
    """The patterns under which ``Captures`` has it, and the captures for groups whose stages it has."""
    any_words: bool = False
    """Whether they hold for any strings in the inputs, which opaque regions alone read."""

    @property
    def of_one_shape(self) -> bool:
        """Whether the stages hold for micro-batches of no other shape."""
        return self.tracer in NEED_SHAPES


Observed = tuple[bool, Description, SeenCalls]
"""What regions were seen to do: in training or not, on what micro-batch."""
MOST = 64
"""Captures that are remembered, beyond those of the batch at hand."""
LATER = "this kind of batch came after compile"


@dataclass(frozen=True, eq=False)
class Captures:
    """A model's captures, each pattern's once; ``Capturing`` returns others, with one more.

    With the user's own stages nothing is traced: each micro-batch has these.
    """

    model: nn.Module
    own_stages: StageGraph | None
    options: Options
    topology: Topology
    device: torch.device
    """Where a model that is on no device yet will run."""
    cuts: Mapping[str, Cut]
    """Boundaries named from outside: submodule path → where it is cut."""
    balancing: Balancing
    latest: LatestReads = field(default_factory=LatestReads)
    """The ``reads`` that ``run`` goes by, for the regions that captures have watched."""
    wrong: Mapping[tuple[bool, str], str] = field(default_factory=dict)
    """(in training or not, tracer) → what was found wrong of its capture at compile: it is not tried again."""
    by_pattern: Mapping[Pattern, Captured] = field(default_factory=dict)
    families: Mapping[Hashable, Family] = field(default_factory=dict)
    first: Program | None = None
    searched: Balanced | None = None
    """The stages of the first capture, or their ranks, that a search has found."""
    reads: Reads = field(default_factory=Reads)
    counts: tuple[int, int] = (0, 0)
    """The number of captures for evaluations, and for steps."""
    reports: tuple[str, ...] = ()
    """What the user is told of the captures, each line once."""
    whole: tuple[Region, ...] = ()
    """The opaque regions, which run for real in every step."""
    by_itself: Mapping[str, str] = field(default_factory=dict)
    """The opaque regions that no tracer could capture → what part of a step they take, and why, in words."""
    beside: tuple[str, ...] = ()
    """What captures keep opaque by themselves and what they ask of the inputs, in words."""
    observed: tuple[Observed, ...] = ()
    """The latest."""
    unpacked: frozenset[str] = frozenset()
    """The regions whose results forward unpacks."""
    unused: frozenset[str] = frozenset()
    """The parameters and buffers that the first capture does not use."""
    questions: Questions = field(default_factory=Questions)
    """What forward has asked about its inputs so far."""
    asks_numbers: bool = False
    """Whether it asks for numbers, too, since nothing else captures the model."""
    any_words: bool = False
    """Whether the first one holds for any strings: then descriptions have their types alone, and later ones are to."""
    objects: Mapping[ObjectValue, Any] = field(default_factory=dict)
    """What this rank was given beside tensors and plain values."""
    by_value: bool = False
    """Whether a capture holds for some of Python's numbers alone, so that batches are described with these."""
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """Small buffers of integers and truth values as the first capture found them, which may decide sizes."""

    @staticmethod
    def empty(model: nn.Module | StageGraph, options: Options, topology: Topology, device: torch.device) -> Captures:
        """Before the first one. RunError, PartitionError: what the options name cannot be cut."""
        module, own_stages = (model.module, model) if isinstance(model, StageGraph) else (model, None)
        cuts, whole, finds_cuts = resolve(module, options.boundaries)
        balancing = Balancing(options, topology, device, finds_cuts)
        captures = Captures(module, own_stages, options, topology, device, cuts, balancing, whole=whole)
        if finds_cuts and isinstance(options.schedule, Schedule):
            raise RunError('boundaries="auto" finds its own cuts, and the schedule given is for others; name a family')
        if finds_cuts and options.placement is not None:
            raise RunError('boundaries="auto" finds its own stages and places them; leave placement= out')
        if finds_cuts and options.passes is not None:
            raise RunError('boundaries="auto" cuts in place of the pass partition; leave passes= out')
        if whole and options.parallelize is not None:
            raise RunError(
                f"{whole[0].name} is opaque, and parallelize= works on copies of a stage's modules, which an opaque "
                "region does not call: it runs the model's own; leave out one of them, or give the stages by "
                "StageGraph.from_callables, whose modules parallelize= is given"
            )
        return captures

    def only(self, used: Collection[Pattern]) -> Captures:
        """These captures alone, with all that was seen to vary, and no objects: each call brings its own."""
        by_pattern = {pattern: captured for pattern, captured in self.by_pattern.items() if pattern in used}
        families = {
            key: replace(family, general=tuple(entry for entry in family.general if entry[0] in used))
            for key, family in list(self.families.items())[-FAMILIES:]
        }
        questions = self.questions.only([captured.answers for captured in by_pattern.values()])
        return replace(self, by_pattern=by_pattern, questions=questions, objects={}, families=families)

    def asking(self, error: Unanswered) -> Captures:
        """The captures, which ask of each micro-batch what one more could not be made without."""
        asked = replace(self, asks_numbers=error.numbers)
        if error.question is None:
            return replace(asked, by_value=True)
        return replace(asked, questions=self.questions.with_question(error.question))

    @property
    def inputs_with_objects(self) -> set[str]:
        """The inputs that captures have objects from."""
        given = [each for pattern in self.by_pattern for each in pattern.given]
        fixed = {name for each in given for name, value in each.fixed if isinstance(value, ObjectValue)}
        inside = ((name, leaf) for each in given for name, _, leaves in each.holding for leaf in leaves)
        return fixed | {name for name, leaf in inside if isinstance(leaf, ObjectValue)}

    def with_tensors_of_module(self) -> Captures:
        """The same captures; their stages hold what the model now holds, and nothing that it has let go of."""
        by_pattern = {
            pattern: replace(captured, graph=captured.graph.with_tensors_of_module())
            for pattern, captured in self.by_pattern.items()
        }
        own_stages = None if self.own_stages is None else self.own_stages.with_tensors_of_module()
        return replace(self, by_pattern=by_pattern, own_stages=own_stages)
