"""Captures: from a pattern of inputs to the stages of a model, traced, cut and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxpipe import passes as default_passes
from fxpipe.distributed.forward_collectives import collectives_refused
from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError, TraceError
from fxpipe.graph.boundary import ignored
from fxpipe.graph.modes import evaluating
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.program import Program, SizeGuard
from fxpipe.graph.question import Answers, Unanswered
from fxpipe.graph.ranks import Placement
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.options import Options
from fxpipe.passes.alias_groups import names_of_written
from fxpipe.passes.chain import chain
from fxpipe.plan.balance.balancing import Balancing
from fxpipe.plan.capture.auto_opaque import capture_in_part, shares_of
from fxpipe.plan.capture.capture_check import Sample, check
from fxpipe.plan.capture.opaque_methods import unused, with_unused
from fxpipe.plan.capture.questions import Questions
from fxpipe.plan.capture.row_places import check_rows_known
from fxpipe.plan.capture.sizes import (
    FAMILIES,
    Count,
    Family,
    entries_between,
    family_of,
    naming_what_is_absent,
    sizes_between,
    unlike,
)
from fxpipe.plan.inputs.batch import Description, example_of, known_by_type
from fxpipe.plan.inputs.pattern import Pattern
from fxpipe.progress import progress
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Schedule
from fxpipe.trace import NEED_SHAPES, Cut, Request
from fxpipe.trace.cuts.cuts_by_name import is_auto, named, regions, resolve
from fxpipe.trace.opaque.observed import SeenCalls, check_called, declared, observe
from fxpipe.trace.opaque.outside import watch
from fxpipe.trace.opaque.regions import Region
from fxpipe.trace.patching import aside
from fxpipe.trace.request import Place
from fxpipe.trace.state.reads import Reads

if TYPE_CHECKING:
    from fxpipe.plan.balance import Balanced, StageWork


Wrong = tuple[bool, str]
"""In training or not, and the name of a tracer."""


@dataclass(frozen=True)
class Captured:
    """The stages of one capture, and its program in words. ``tracer``: the name of the one that made it."""

    graph: StageGraph
    text: str
    tracer: str = ""
    placement: Placement | None = None
    """The rank of each stage, where it was searched for."""
    costs: Costs | None = None
    """What the search reckoned with."""
    holds_for: SizeGuard | None = None
    """For which sizes it holds, where it was captured with symbolic ones."""
    program: Program | None = None
    """What the stages were cut from, where some of them gather."""
    fixed_sizes: str = ""
    """Of which sizes that vary forward makes numbers, and where, in words."""
    answers: Answers = ()
    """What forward asked about the inputs, and the answers for which it holds."""

    @property
    def of_one_shape(self) -> bool:
        """Whether the stages hold for micro-batches of no other shape."""
        return self.tracer in NEED_SHAPES


SMALL = 2**16
"""The most numbers of a buffer that is copied."""
MOST = 64
"""Captures that are kept, beyond those of the batch at hand."""
OBSERVED = 16
"""The most micro-batches whose opaque regions' results are remembered."""
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
    balancing: Balancing
    wrong: dict[Wrong, str] = field(default_factory=dict)
    """What was found wrong of captures at compile: these tracers are not tried again."""
    kept: dict[Pattern, Captured] = field(default_factory=dict)
    families: dict[Hashable, Family] = field(default_factory=dict)
    first: Program | None = None
    reads: Reads = field(default_factory=Reads)
    counts: dict[bool, Count] = field(default_factory=dict)
    """Of captures for steps, and for evaluations."""
    whole: tuple[Region, ...] = ()
    """The opaque regions, which run for real in every step."""
    by_itself: dict[str, str] = field(default_factory=dict)
    """Those of them that no tracer could capture → what part of a step they take, and why, in words."""
    beside: dict[str, None] = field(default_factory=dict)
    """What captures keep opaque by themselves and what they ask of the inputs, in words."""
    observed: list[tuple[bool, Description, SeenCalls]] = field(default_factory=list)
    """What it was seen to do of late: in training or not, on what micro-batch."""
    unpacked: frozenset[str] = frozenset()
    """The regions of which forward unpacks what they return."""
    unused: frozenset[str] = frozenset()
    """The parameters and buffers that the first capture does not use."""
    questions: Questions = field(default_factory=Questions)
    """What forward has asked about its inputs so far."""
    asks_numbers: bool = False
    """Whether it asks for numbers, too, since nothing else captures the model."""
    paths: dict[Answers, None] = field(default_factory=dict)
    """The answers for which captures were made."""
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """Small buffers of integers and truth values as the first capture found them, which may decide sizes."""
    used: list[Pattern] = field(default_factory=list)
    """The captures that were asked for, by their patterns; whoever asks clears it before."""

    @staticmethod
    def empty(model: nn.Module, options: Options, topology: Topology, device: torch.device) -> Captures:
        """Before the first one. RunError, PartitionError: what the options name cannot be cut."""
        boundaries = named(model, options.boundaries)
        balancing = Balancing(options, topology, device, is_auto(model, boundaries))
        cuts, whole = resolve(model, boundaries), regions(model, boundaries)
        captures = Captures(model, options, topology, device, cuts, balancing, whole=whole)
        if balancing.finds_cuts and isinstance(options.schedule, Schedule):
            raise RunError('boundaries="auto" finds its own cuts, and the schedule given is for others; name a family')
        if balancing.finds_cuts and options.placement is not None:
            raise RunError('boundaries="auto" finds its own stages and places them; leave placement= out')
        if balancing.finds_cuts and options.passes is not None:
            raise RunError('boundaries="auto" cuts in place of the pass partition; leave passes= out')
        if whole and options.parallelize is not None:
            raise RunError(
                f"{whole[0].name} is opaque, and parallelize= works on copies of a stage's modules, which an opaque "
                "region does not call: it runs the model's own; leave out one of them, or give the stages by "
                "StageGraph.from_callables, whose modules parallelize= is given"
            )
        return captures

    def of(self, pattern: Pattern, sample: Sample | str) -> list[Captured]:
        """The stages for each micro-batch of a pattern; one object where nothing depends on their shapes.

        ``sample``: the micro-batches on which new stages are checked against the model; or why they are not.
        """
        each = pattern.each()
        for one in each:
            self._of_one(one, pattern, sample)
        keys = [self._of_one(one, pattern, sample) for one in each]  # by the captures that hold for most
        self.used += keys
        found = [self.kept[key] for key in keys]
        if any(self._is_wrong(key) for key in keys):  # only a later shape has shown it
            for key in [key for key in self.kept if key.training == pattern.training]:
                del self.kept[key]
            self.families.clear()
            self.first = None if pattern.training else self.first
            self.used.clear()
            return self.of(pattern, sample)
        return found

    def _is_wrong(self, key: Pattern) -> bool:
        return (key.training, self.kept[key].tracer) in self.wrong

    def keep(self, used: Collection[Pattern]) -> None:
        """Drops all captures but these. What was seen to vary is remembered."""
        self.kept = {pattern: captured for pattern, captured in self.kept.items() if pattern in used}
        self.paths = dict.fromkeys(captured.answers for captured in self.kept.values())
        self.questions.keep(self.paths)
        self.families = dict(list(self.families.items())[-FAMILIES:])
        for family in self.families.values():
            family.general = [entry for entry in family.general if entry[0] in used]

    @property
    def first_tracer(self) -> str:
        return self.first.tracer if self.first is not None else ""

    @contextlib.contextmanager
    def rolled_back_on_error(self) -> Iterator[None]:
        """Where what is inside fails, all is as before: ranks on which it has not failed drop theirs, too."""
        before = dict(self.kept), {key: family.copy() for key, family in self.families.items()}, self.first
        opaque = self.whole, dict(self.by_itself)
        beside = dict(self.wrong), {key: count.copy() for key, count in self.counts.items()}
        try:
            with self.reads.rolled_back_on_error():
                yield
        except BaseException:
            self.kept, self.families, self.first = before
            self.wrong, self.counts = beside
            self.whole, self.by_itself = opaque
            raise

    def _of_one(self, this: Pattern, pattern: Pattern, sample: Sample | str) -> Pattern:
        """The pattern under which the capture for a micro-batch of ``pattern`` is kept."""
        shape, family = this.shape, self._family_of(this, new := Family())
        if shape is not None and family is new:
            self.families[family_of(this, shape)] = new
        known = self._known(this, family)
        if known is not None:
            return known
        made = self._captured(this, pattern, sample, family.free(shape))
        for name, leaf in known_by_type(shape) if made.of_one_shape and shape is not None else ():
            raise TraceError(
                f"input {name!r} holds {leaf!r:.200}, which is no tensor, and what {made.tracer} captures would hold "
                'for this one alone; pass a tensor, or, for a plain value, compile with tracer="export" or "record"'
            )
        key = this.for_answers(made.answers) if made.of_one_shape else this.for_any_shape()
        self.kept[key] = made
        self.paths[made.answers] = None
        if shape is not None and made.of_one_shape:
            family.note(shape, key, made.holds_for)
            asked = self.questions.described(made.answers)
            self.counts.setdefault(pattern.training, Count()).note(shape, made.fixed_sizes, made.tracer, asked)
        return key

    def _family_of(self, this: Pattern, new: Family) -> Family:
        """The family of a capture for this micro-batch alone, or else a ``new`` one."""
        return new if this.shape is None else self.families.get(family_of(this, this.shape), new)

    def _known(self, this: Pattern, family: Family) -> Pattern | None:
        """The capture that holds for a micro-batch, by its pattern, where there is one."""
        given = this.answered
        own = (this.for_answers(path) for path in self.paths if set(path) <= set(given))
        patterns = this.for_any_shape(), family.holding(this.shape, given), *own
        return next((pattern for pattern in patterns if pattern in self.kept), None)

    def _captured(self, this: Pattern, pattern: Pattern, sample: Sample | str, free: frozenset[Place]) -> Captured:
        """The stages that the first tracer makes whose stages are right. ``free``: dimensions that may be symbolic."""
        shape, any_shape = this.shape, this.for_any_shape()
        accepted: list[Captured] = []
        cuts: list[Program] = []

        def accept(program: Program, request: Request) -> None:
            for training in (True, pattern.training):  # what is wrong in training is not tried in evaluation
                if (training, program.tracer) in self.wrong:
                    raise TraceError(self.wrong[training, program.tracer])
            cut, made = self._cut(program, pattern, shape, request.whole)
            each = [one if made.of_one_shape else one.for_any_shape() for one in pattern.each()]
            places = [place for place, one in enumerate(each) if one in (this, any_shape)]
            with aside():
                accepted.append(self._checked(made, request, sample, places))
            cuts.append(cut)

        request = Request(
            self.model,
            this.inputs,
            dict(this.fixed),
            self.options.loss_fn if pattern.with_loss else None,
            example=None if shape is None else example_of(shape),
            cuts=self.cuts,
            may_lack_cuts=self.first is not None,  # which has called them all
            training=pattern.training,
            autocast=pattern.ambient.autocast,
            varying=free,
            device=self.device,
            compute=self.balancing.compute,
            whole=self.whole,
            around=partial(collectives_refused, self.topology),
            numbers=self.numbers,
            accept=accept,
            asks_numbers=self.asks_numbers,
        )
        if this.asks and self.options.tracer == "auto" and self.options.auto_opaque:
            request = dataclasses.replace(request, answers=dict(this.answered), ask=self.questions.ask)
        seen_before = len(self.observed)

        def observe(request: Request) -> Request:
            del self.observed[seen_before:]  # of fewer regions
            return dataclasses.replace(request, seen=self._seen(request, pattern, shape, sample))

        def shares() -> Mapping[str, float]:
            return self._shares(cuts[-1], pattern, shape)

        request = observe(request) if self.whole else request
        observes = observe if self._can_run(sample, shape) else None
        with (
            progress(f"capturing {type(self.model).__name__}"),
            ignored(self.balancing.finds_cuts),
            self.reads.noting() as noted,
            naming_what_is_absent(shape or ()),
        ):
            try:
                program, request, by_itself = capture_in_part(request, self.options, observes, shares)
            except Unanswered as error:
                self.asks_numbers = error.numbers
                raise
        self.whole, self.asks_numbers = request.whole, request.asks_numbers
        roots = [root for root in (self.model, request.loss_module) if root is not None]
        own = {
            (id(vars(self.model.get_submodule(path))), name)
            for seen in request.seen.values()
            for path, name in seen.sets  # which only regions read, or a capture refuses
        }
        self.reads.keep(noted - own, roots, _called(program), program.sets)
        made, cut = accepted[-1], cuts[-1]
        self.first = self.first or cut
        if by_itself:
            self._note_opaque(by_itself, shares(), {name for name, _ in request.seen})
        beside = [*self.by_itself.values(), *self.questions.described(program.answers)]
        self.beside |= dict.fromkeys(beside)
        if beside:
            origin = "\n".join([made.graph.origin, *beside])
            made = dataclasses.replace(made, graph=dataclasses.replace(made.graph, origin=origin))
        calls = [call for part in cut.opaque.values() for call in opaque_calls(part)]
        self.unpacked |= {call.name for call in calls if any(listing.unpacked for listing in call.opened)}
        watch(cut, self.reads.changed)
        self.numbers = self.numbers or _small_numbers(self.model)
        return made

    def _note_opaque(self, added: Mapping[str, str], shares: Mapping[str, float], called: Collection[str]) -> None:
        """``added``: region → why no tracer could capture it. Those that nothing ``called`` lie inside of others, which
        run them."""
        for name, why in added.items():
            self.by_itself[name] = f"{name} is opaque, {shares.get(name, 0.0):.0%} of a step's FLOPs: {why}"
        inside = self.by_itself.keys() - called
        self.by_itself = {name: words for name, words in self.by_itself.items() if name not in inside}
        self.whole = tuple(region for region in self.whole if region.name not in inside)

    def _can_run(self, sample: Sample | str, shape: Description | None) -> bool:
        """Whether the model can run on a micro-batch, which shows what a region returns."""
        return isinstance(sample, Sample) and not sample.later and shape is not None and not _on_meta(self.model)

    def _shares(self, program: Program, pattern: Pattern, shape: Description | None) -> Mapping[str, float]:
        """The part of a step that each region takes; nothing where it is not known."""
        from fxpipe.plan.balance import CostUnknown

        try:
            assert shape is not None
            return shares_of(program, self.balancing.costs(program, pattern, shape))
        except CostUnknown:
            return {}

    def _seen(self, request: Request, pattern: Pattern, shape: Description | None, sample: Sample | str) -> SeenCalls:
        """What calls of opaque regions do: as the user has said, as a real run shows, or as an earlier one
        has shown."""
        found = declared(request)
        if self._can_run(sample, shape):
            assert isinstance(sample, Sample)
            assert shape is not None
            with progress("running an opaque region"), ignored(self.balancing.finds_cuts):
                batch = sample.batches[pattern.shapes.index(shape)]
                called: set[str] = set()
                found |= observe(request, batch, called)
                self.observed.append((pattern.training, shape, found))
                evaluates = True
                if pattern.training and any(module.training for module in self.model.modules()):
                    # later, this rank has its own part of the model alone; a model may not evaluate such a batch
                    evaluates = False
                    with evaluating(self.model), contextlib.suppress(TraceError):
                        self.observed.append((False, shape, {**declared(request), **observe(request, batch, called)}))
                        evaluates = True
                if evaluates and not request.may_lack_cuts:
                    check_called(request, called)
            del self.observed[: -2 * OBSERVED]
        elif self.observed and shape is not None:
            names = {region.name for region in request.whole}  # of which an earlier run may have seen fewer
            order = [
                (len(names - {name for name, _ in calls}), training != pattern.training, unlike(then, shape))
                for training, then, calls in self.observed
            ]
            _, then, calls = self.observed[order.index(min(order))]
            sizes, entries = sizes_between(then, shape), entries_between(then, shape)
            lengths = sizes_between(then, shape, or_same=True)
            for key, seen in calls.items():
                found[key] = seen.guessed(sizes, {} if key[0] in self.unpacked else lengths, entries)
        return found

    def _checked(self, made: Captured, request: Request, sample: Sample | str, places: Sequence[int]) -> Captured:
        """The stages, once they have been run against the model, with a word about it."""
        if isinstance(sample, str) or not self.options.check_capture:  # of regions, it has shown what they do
            checked = f"not checked: {sample if isinstance(sample, str) else 'check_capture=False'}"
        else:
            try:
                with progress("checking the stages against the model"):
                    checked = check(made.graph, request, sample, places, partial(self._has, made.answers))
            except TraceError as error:
                if not sample.later:  # or other captures are in use
                    self.wrong[request.training, made.tracer] = str(error)
                raise
        head, *rest = made.graph.origin.splitlines()
        graph = dataclasses.replace(made.graph, origin="\n".join([f"{head}, {checked}", *rest]))
        return dataclasses.replace(made, graph=graph)

    def _has(self, answers: Answers, batch: Mapping[str, Any]) -> bool:
        """Whether forward is given these answers by a micro-batch."""
        return not answers or set(answers) <= set(self.questions.answers(batch))

    def without_tracers(self, wrong: Mapping[Wrong, str]) -> Captures:
        """Before the first one; these tracers, with what is wrong of them, are not tried."""
        given = regions(self.model, named(self.model, self.options.boundaries))
        return dataclasses.replace(self, wrong=dict(wrong), kept={}, families={}, first=None, whole=given, by_itself={})

    def with_tensors_of_module(self) -> Captures:
        """The same captures; their stages hold what the model now holds, and nothing that it has let go of."""
        kept = {
            pattern: dataclasses.replace(captured, graph=captured.graph.with_tensors_of_module())
            for pattern, captured in self.kept.items()
        }
        return dataclasses.replace(self, kept=kept)

    def stage_work(self, pattern: Pattern, placement: Placement) -> StageWork | None:
        """What the stages take, derived from the shapes of a pattern; None where these, or the costs, are not known."""
        return self.balancing.stage_work(self.first, pattern, placement)

    def _cut(
        self, program: Program, pattern: Pattern, shape: Description | None, whole: Collection[Region]
    ) -> tuple[Program, Captured]:
        """The program with its stages, and they themselves. ``whole``: what is opaque in it."""
        first = self.first
        found: Balanced | None = None
        if whole or program.answers:
            program = default_passes.drop_unused(program)
        if whole:
            self.unused = unused(program) if first is None else self.unused
            program = with_unused(program, self.unused)
        if first is not None:
            program = program.replace(written_before=names_of_written(first))
        if self.balancing.finds_cuts:
            program = chain(default_passes.before_balance(), program)
            if first is None:
                found = self.balancing.searched(program, pattern, shape)
                program = found.program
            else:
                program = default_passes.follow(program, first)
            program = chain((default_passes.name_stages,), program)
        else:
            passes = self.options.passes
            program = chain(default_passes.default() if passes is None else passes, program)
            program = program if first is None else default_passes.as_before(program, first)
            if first is None and shape is not None and self.balancing.finds_placement_of(len(program.stage_names)):
                found = self.balancing.placed(program, pattern, shape)
        graph = default_passes.split(program if first is None else default_passes.read_where_held(program, first))
        example = {} if shape is None else example_of(shape)
        check_rows_known(graph, program, example, self.device, pattern.ambient.autocast, self.balancing.compute)
        return program, Captured(
            graph,
            _told(self.model, program),
            program.tracer,
            found.placement if found is not None else None,
            found.costs if found is not None else None,
            program.holds_for,
            program if program.gathered else None,
            program.fixed_sizes,
            program.answers,
        )


def _small_numbers(model: nn.Module) -> dict[str, Tensor]:
    buffers = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if not buffer.is_meta}
    kept = {name: buffer for name, buffer in buffers.items() if buffer.numel() <= SMALL}
    return {name: buffer.clone() for name, buffer in kept.items() if not buffer.dtype.is_floating_point}


def _on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _called(program: Program) -> list[nn.Module]:
    """The submodules that the program calls as they are."""
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_module"}
    return [program.module.get_submodule(target) for target in targets - program.opaque.keys()]


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
