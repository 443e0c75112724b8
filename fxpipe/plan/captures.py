"""Captures: from a pattern of inputs to the stages of a model, traced, cut and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxpipe import passes as default_passes
from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError, TraceError
from fxpipe.graph.boundary import ignored
from fxpipe.graph.program import Program, SizeGuard
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.hardware import Hardware
from fxpipe.options import Options
from fxpipe.passes.chain import chain
from fxpipe.plan.batch import Description, untold
from fxpipe.plan.capture_check import Sample, check
from fxpipe.plan.memory import Account
from fxpipe.plan.pattern import Pattern
from fxpipe.plan.reads import Reads
from fxpipe.plan.replay import checkpoints_that_keep
from fxpipe.plan.sizes import differences, holds, outline, size_at, told_of_nothing, varying
from fxpipe.progress import progress, tell
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Schedule
from fxpipe.trace import NEED_SHAPES, Cut, Request, capture
from fxpipe.trace.cuts_by_name import AUTO, resolve
from fxpipe.trace.request import Place

if TYPE_CHECKING:
    from fxpipe.plan.balance import Balanced, NodeCosts, StageWork


@dataclass(frozen=True)
class Captured:
    """The stages of one capture, and its program in words. ``tracer``: the name of the one that made it."""

    graph: StageGraph
    text: str
    tracer: str = ""
    placement: tuple[int, ...] | None = None
    """The rank of each stage, where it was searched for."""
    costs: Costs | None = None
    """What the search reckoned with."""
    holds_for: SizeGuard | None = None
    """For which sizes it holds, where it was captured with symbolic ones."""
    program: Program | None = None
    """What the stages were cut from, where some of them gather."""
    fixed_sizes: str = ""
    """Of which sizes that vary forward makes numbers, and where, in words."""

    @property
    def of_one_shape(self) -> bool:
        """Whether the stages hold for micro-batches of no other shape."""
        return self.tracer in NEED_SHAPES


_REMEMBERED = 20
"""With so many captured shapes a new one is compared; of earlier ones it is known what varied."""


@dataclass
class _Family:
    """Micro-batches that differ in sizes alone: those captured so far, and the captures with symbolic sizes."""

    shapes: deque[Description] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    varying: frozenset[Place] = frozenset()
    """Dimensions that were seen to vary, by shapes that are no longer remembered, too."""
    general: list[tuple[Pattern, SizeGuard]] = field(default_factory=list)

    def copy(self) -> _Family:
        """One that changes by itself."""
        return dataclasses.replace(self, shapes=self.shapes.copy(), general=list(self.general))

    def holding(self, shape: Description | None) -> Pattern | None:
        """The pattern of the latest capture that holds for this shape, too."""
        if shape is None:
            return None
        return next((pattern for pattern, guard in reversed(self.general) if holds(guard, shape)), None)

    def free(self, shape: Description | None) -> frozenset[Place]:
        """The dimensions of a new shape to be kept symbolic: those that vary, and are not of size 1 in it."""
        if shape is None:
            return frozenset()
        return varying(shape, self.shapes) | frozenset(place for place in self.varying if size_at(shape, place) > 1)

    def note(self, shape: Description, pattern: Pattern, made: Captured) -> None:
        """A shape was captured."""
        self.varying |= varying(shape, self.shapes)
        self.shapes.append(shape)
        self.general += [] if made.holds_for is None else [(pattern, made.holds_for)]


@dataclass
class _Count:
    """Of captures, for a word where they are many."""

    shapes: deque[Description] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    number: int = 0
    fixed: dict[str, None] = field(default_factory=dict)
    """What was told of sizes that captures have as numbers."""

    def copy(self) -> _Count:
        """One that changes by itself."""
        return dataclasses.replace(self, shapes=self.shapes.copy(), fixed=dict(self.fixed))

    def note(self, shape: Description, made: Captured) -> None:
        """Tells of sizes that a capture has as numbers, and of the tenth capture."""
        self.shapes.append(shape)
        self.number += 1
        if made.fixed_sizes and made.fixed_sizes not in self.fixed:
            self.fixed[made.fixed_sizes] = None
            tell(f"fxpipe: {made.fixed_sizes}")
        if self.number == MANY:
            what = f"{MANY} captures by now, since batches differ in {differences(self.shapes)}"
            tell("\n".join([f"fxpipe: {what}{_REMEDY.get(made.tracer, '')}", *self.fixed]))


MANY = 10
"""So many captures are worth a word."""
MOST = 64
"""Captures that are kept, beyond those of the batch at hand."""
_FAMILIES = 256
_REMEDY = {
    "record": "; what record captures has each size and number as it was: pad batches to a few sizes, or, where it "
    'captures the model, write tracer="export", which keeps sizes that vary symbolic'
}
LATER = "this kind of batch came after compile"


@dataclass
class Captures:
    """Captures a model as it is asked to, each pattern once."""

    model: nn.Module
    options: Options
    topology: Topology
    device: torch.device
    """Where a model that is on no device yet will run."""
    cuts: Mapping[str, Cut]
    """Boundaries named from outside: submodule path → where it is cut."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Tracers whose capture was found wrong, and what of it: they are not tried again."""
    kept: dict[Pattern, Captured] = field(default_factory=dict)
    families: dict[Hashable, _Family] = field(default_factory=dict)
    first: Program | None = None
    costed: tuple[Any, NodeCosts] | None = None
    """What was last asked what it takes, and the answer."""
    reads: Reads = field(default_factory=Reads)
    counts: dict[bool, _Count] = field(default_factory=dict)
    """Of captures for steps, and for evaluations."""
    used: list[Pattern] = field(default_factory=list)
    """The captures that were asked for, by their patterns; whoever asks clears it before."""

    @staticmethod
    def none_yet(model: nn.Module, options: Options, topology: Topology, device: torch.device) -> Captures:
        """Before the first one. RunError, PartitionError: what the options name cannot be cut."""
        captures = Captures(model, options, topology, device, resolve(model, options.boundaries))
        if captures.finds_cuts and isinstance(options.schedule, Schedule):
            raise RunError('boundaries="auto" finds its own cuts, and the schedule given is for others; name a family')
        if captures.finds_cuts and options.placement is not None:
            raise RunError('boundaries="auto" finds its own stages and places them; leave placement= out')
        if captures.finds_cuts and options.passes is not None:
            raise RunError('boundaries="auto" cuts in place of the pass partition; leave passes= out')
        return captures

    @property
    def finds_cuts(self) -> bool:
        """Whether stages are cut and placed where that simulates best; else they are cut where they are marked."""
        return bool(self.options.boundaries == AUTO)

    @property
    def finds_placement(self) -> bool:
        """Whether nobody has said on which rank each stage runs."""
        return self.options.placement is None and not isinstance(self.options.schedule, Schedule)

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

    def of(self, pattern: Pattern, sample: Sample | str) -> list[Captured]:
        """The stages for each micro-batch of a pattern; one object where nothing depends on their shapes.

        ``sample``: the micro-batches on which new stages are checked against the model; or why they are not.
        """
        shapes = pattern.shapes or (None,) * pattern.microbatches
        for shape in shapes:
            self._of_one(pattern, shape, sample)
        keys = [self._of_one(pattern, shape, sample) for shape in shapes]  # by the captures that hold for most
        self.used += keys
        found = [self.kept[key] for key in keys]
        if any(captured.tracer in self.wrong for captured in found):  # only a later shape has shown it
            self.kept.clear()
            self.families.clear()
            self.first = None
            self.used.clear()
            return self.of(pattern, sample)
        return found

    def keep(self, used: Collection[Pattern]) -> None:
        """Drops all captures but these. What was seen to vary is remembered."""
        self.kept = {pattern: captured for pattern, captured in self.kept.items() if pattern in used}
        self.families = dict(list(self.families.items())[-_FAMILIES:])
        for family in self.families.values():
            family.general = [entry for entry in family.general if entry[0] in used]

    @contextlib.contextmanager
    def or_as_before(self) -> Iterator[None]:
        """Where what is inside fails, all is as before: ranks on which it has not failed drop theirs, too."""
        before = dict(self.kept), {key: family.copy() for key, family in self.families.items()}, self.first
        beside = dict(self.wrong), {key: count.copy() for key, count in self.counts.items()}
        try:
            with self.reads.or_as_before():
                yield
        except BaseException:
            self.kept, self.families, self.first = before
            self.wrong, self.counts = beside
            raise

    def _of_one(self, pattern: Pattern, shape: Description | None, sample: Sample | str) -> Pattern:
        """The pattern under which the capture for a shape is kept."""
        shapes = () if shape is None else (shape,)
        this = dataclasses.replace(pattern, microbatches=1, shapes=shapes, everyone=())
        family = _Family() if shape is None else self.families.setdefault(_family(this, shape), _Family())
        for pattern_kept in (this.for_any_shape(), family.holding(shape), this):
            if pattern_kept in self.kept:
                return pattern_kept
        made = self._captured(pattern, shape, sample, family.free(shape))
        for name, leaf in untold(shape) if made.of_one_shape and shape is not None else ():
            raise TraceError(
                f"input {name!r} holds {leaf!r:.200}, which is no tensor, and what {made.tracer} captures would hold "
                'for this one alone; pass a tensor, or, for a plain value, compile with tracer="export" or "record"'
            )
        key = this if made.of_one_shape else this.for_any_shape()
        self.kept[key] = made
        if shape is not None and made.of_one_shape:
            family.note(shape, this, made)
            self.counts.setdefault(pattern.training, _Count()).note(shape, made)
        return key

    def _captured(
        self, pattern: Pattern, shape: Description | None, sample: Sample | str, free: frozenset[Place]
    ) -> Captured:
        """The stages that the first tracer makes whose stages are right. ``free``: dimensions that may be symbolic."""
        accepted: list[Captured] = []

        def accept(program: Program) -> None:
            if program.tracer in self.wrong:
                raise TraceError(self.wrong[program.tracer])
            cut, made = self._cut(program, pattern, shape)
            places = [i for i, other in enumerate(pattern.shapes) if not made.of_one_shape or other == shape]
            accepted.append(self._checked(made, request, sample, places))
            self.first = self.first or cut

        request = Request(
            self.model,
            pattern.inputs,
            dict(pattern.fixed),
            self.options.loss_fn if pattern.with_loss else None,
            example=None if shape is None else example_of(pattern, shape),
            cuts=self.cuts,
            may_lack_cuts=self.first is not None,  # which has called them all
            training=pattern.training,
            autocast=pattern.autocast,
            varying=free,
            device=self.device,
            compute=self.compute,
            accept=accept,
        )
        tracer = self.options.tracer if self.options.parallelize is None else "record"  # which leaves modules whole
        with (
            progress(f"capturing {type(self.model).__name__}"),
            ignored(self.finds_cuts),
            self.reads.noting() as read,
            told_of_nothing(shape or ()),
        ):
            program = capture(request, tracer)
        roots = [root for root in (self.model, request.loss_module) if root is not None]
        self.reads.keep(read, roots, _called(program))
        (made,) = accepted
        return made

    def _checked(self, made: Captured, request: Request, sample: Sample | str, places: Sequence[int]) -> Captured:
        """The stages, once they have been run against the model, with a word about it."""
        if isinstance(sample, str):
            told = f"not checked: {sample}"
        else:
            try:
                with progress("checking the stages against the model"):
                    told = check(made.graph, request, sample, places)
            except TraceError as error:
                self.wrong[made.tracer] = str(error)
                raise
        head, *rest = made.graph.origin.splitlines()
        graph = dataclasses.replace(made.graph, origin="\n".join([f"{head}, {told}", *rest]))
        return dataclasses.replace(made, graph=graph)

    def without_tracers(self, wrong: Mapping[str, str]) -> Captures:
        """Before the first one; these tracers, with what is wrong of them, are not tried."""
        return dataclasses.replace(self, wrong=dict(wrong), kept={}, families={}, first=None)

    def with_tensors_of_module(self) -> Captures:
        """The same captures; their stages hold what the model now holds, and nothing that it has let go of."""
        kept = {
            pattern: dataclasses.replace(captured, graph=captured.graph.with_tensors_of_module())
            for pattern, captured in self.kept.items()
        }
        return dataclasses.replace(self, kept=kept)

    # cutting and placing

    def _cut(self, program: Program, pattern: Pattern, shape: Description | None) -> tuple[Program, Captured]:
        """The program with its stages, and they themselves."""
        first = self.first
        found: Balanced | None = None
        if self.finds_cuts:
            program = chain(default_passes.before_balance(), program)
            if first is None:
                found = self._searched(program, pattern, shape)
                program = found.program
            else:
                program = default_passes.follow(program, first)
            program = chain((default_passes.name_stages,), program)
        else:
            passes = self.options.passes
            program = chain(default_passes.default() if passes is None else passes, program)
            more = len(program.stage_names) > self.topology.size("pipe") > 1
            if self.finds_placement and more and first is None and shape is not None:
                found = self._placed(program, pattern, shape)
        return program, Captured(
            default_passes.split(program),
            _told(self.model, program),
            program.tracer,
            found.placement if found is not None else None,
            found.costs if found is not None else None,
            program.holds_for,
            program if program.gathered else None,
            program.fixed_sizes,
        )

    def _placed(self, program: Program, pattern: Pattern, shape: Description) -> Balanced | None:
        """The best placement found; None where what the stages cost is not known, so that parameters count."""
        from fxpipe.plan.balance import CostUnknown

        try:
            return self._searched(program, pattern, shape)
        except CostUnknown as error:
            if self.options.memory_per_rank is not None:
                raise
            tell(f"stages are placed by the number of their parameters: {error}")
            return None

    def stage_work(self, pattern: Pattern, placement: tuple[int, ...]) -> StageWork | None:
        """What the stages take, told from the shapes of a pattern; None where these, or the costs, are not known."""
        from fxpipe.plan.balance import BlockGraph, CostUnknown, StageWork, work_of_stages

        program, shape = self.first, pattern.shapes[0] if pattern.shapes else None
        if program is None or shape is None:
            return None

        def work(keeping: bool = False) -> BlockGraph:
            return work_of_stages(program, self._costs(program, pattern, shape, keeping))

        try:
            with progress("costing the stages"):
                costs = self._costs(program, pattern, shape)
                return StageWork(work(), partial(work, keeping=True), placement, pattern.microbatches, costs)
        except CostUnknown as error:
            tell(f"what the stages take is not known: {error}")
            return None

    def _costs(self, program: Program, pattern: Pattern, shape: Description, keeping: bool = False) -> NodeCosts:
        """What nodes take, each program's once. ``keeping``: where checkpoints keep their activations, as in an R."""
        from fxpipe.plan.balance import costs_from_shapes

        known = (program.graph, pattern.autocast, shape, keeping)
        if self.costed is None or self.costed[0] != known:
            with checkpoints_that_keep() if keeping else contextlib.nullcontext():
                found = costs_from_shapes(
                    program,
                    example_of(pattern, shape),
                    self.device,
                    pattern.autocast,
                    self.hardware,
                    self.compute,
                    Account.of(self.options, self.topology),
                )
            self.costed = known, found
        return self.costed[1]

    def _searched(self, program: Program, pattern: Pattern, shape: Description | None) -> Balanced:
        """The program with the best stages found, and the rank of each, which are told."""
        from fxpipe.plan.balance import balance, place_stages  # it simulates a lot, which few need

        if shape is None:
            raise RunError(
                'boundaries="auto" needs the shapes of a batch: pass example_args= or example_kwargs=, one batch as it '
                "will be passed in calls"
            )
        with progress("balancing the stages"):
            costs = self._costs(program, pattern, shape)
            given = (program, self.topology.size("pipe"), pattern.microbatches, costs, self.options.schedule)
            memory, again = self.options.memory_per_rank, self.options.recompute
            if self.finds_cuts:
                found = balance(*given, memory, bool(again))
            else:
                every = program.stage_names if again else ()
                found = place_stages(*given, memory, again if isinstance(again, tuple) else every)
        if found.others:
            tell(str(found))
        return found


def _called(program: Program) -> list[nn.Module]:
    """The submodules that the program calls as they are."""
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_module"}
    return [program.module.get_submodule(target) for target in targets - program.opaque.keys()]


def _family(pattern: Pattern, shape: Description) -> Hashable:
    return dataclasses.replace(pattern, shapes=()), outline(shape)


def example_of(pattern: Pattern, shape: Description) -> dict[str, Any]:
    """The inputs of a capture, each with a ``TensorLike`` for each tensor."""
    return {name: given.like for name, given in shape if name in pattern.inputs}


def _told(model: nn.Module, program: Program) -> str:
    constants = [f"{name}: {_fingerprint(tensor)}" for name, tensor in program.constants.items()]
    return "\n".join([type(model).__name__, str(program), *constants])


def _fingerprint(tensor: Tensor) -> str:
    """A hash of a constant: ranks that have made it with different seeds must not go on."""
    if tensor.is_meta:
        return "on the meta device"
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), buffer)
    return f"constant {list(tensor.shape)} {hashlib.blake2b(buffer.getbuffer(), digest_size=8).hexdigest()}"
