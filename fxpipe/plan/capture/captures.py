"""Captures: from a pattern of inputs to the stages of a model, traced, cut and kept."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fxpipe import passes as default_passes
from fxpipe.batch.batch import joined_description
from fxpipe.batch.description import Description, example_of, for_any_words, known_by_type
from fxpipe.batch.objects import like_of
from fxpipe.batch.pattern import GivenInputs, Pattern
from fxpipe.distributed.forward_collectives import collectives_refused
from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError, TraceError
from fxpipe.graph.boundary import ignored
from fxpipe.graph.gathering import Places
from fxpipe.graph.like import ObjectValue
from fxpipe.graph.modes import evaluating
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.program import Program, SizeGuard
from fxpipe.graph.question import Answers, Unanswered
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.notebook import listed
from fxpipe.options import Options
from fxpipe.packed import counted
from fxpipe.passes.chain import chain
from fxpipe.plan.balance.choose import Balanced, Balancing
from fxpipe.plan.balance.node_costs import CostUnknown
from fxpipe.plan.capture.auto_opaque import capture_in_part, unused, with_unused
from fxpipe.plan.capture.capture_check import NOT_CHECKED, Sample, check
from fxpipe.plan.capture.on_fakes import shapes_of
from fxpipe.plan.capture.questions import Questions
from fxpipe.plan.capture.row_check import rows_meet, warn_of_rows
from fxpipe.plan.capture.sizes import (
    FAMILIES,
    Family,
    changing,
    entries_between,
    outline,
    sizes_between,
    unlike,
)
from fxpipe.progress import log, progress
from fxpipe.schedules.schedule import Schedule
from fxpipe.torch_compat import compiled_parts, pytree
from fxpipe.trace import NEED_SHAPES, Cut, Request
from fxpipe.trace.cuts.cuts_by_name import resolve
from fxpipe.trace.opaque.observed import SeenCalls, check_called, declared, observe, watch
from fxpipe.trace.opaque.regions import Region
from fxpipe.trace.patching import aside
from fxpipe.trace.request import Place
from fxpipe.trace.state.reads import Reads


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
    any_words: bool = False
    """Whether they hold for any strings in the inputs, which opaque regions alone read."""

    @property
    def of_one_shape(self) -> bool:
        """Whether the stages hold for micro-batches of no other shape."""
        return self.tracer in NEED_SHAPES


SMALL = 2**16
"""The most numbers of a buffer that is copied."""
MOST = 64
"""Captures that are kept, beyond those of the batch at hand."""
MANY = 10
"""So many captures are reported."""
OBSERVED = 16
"""The most micro-batches whose opaque regions' results are remembered."""
LATER = "this kind of batch came after compile"


@dataclass
class Captures:
    """Captures a model, each pattern once."""

    model: nn.Module
    options: Options
    topology: Topology
    device: torch.device
    """Where a model that is on no device yet will run."""
    cuts: Mapping[str, Cut]
    """Boundaries named from outside: submodule path → where it is cut."""
    balancing: Balancing
    wrong: dict[tuple[bool, str], str] = field(default_factory=dict)
    """(in training or not, tracer) → what was found wrong of its capture at compile: it is not tried again."""
    kept: dict[Pattern, Captured] = field(default_factory=dict)
    families: dict[Hashable, Family] = field(default_factory=dict)
    first: Program | None = None
    found: Balanced | None = None
    """The stages of the first one, or their ranks, where these were searched for."""
    reads: Reads = field(default_factory=Reads)
    counts: Counter[bool] = field(default_factory=Counter)
    """Of captures for steps, and for evaluations."""
    fixed: set[str] = field(default_factory=set)
    """What was reported of sizes that captures have as numbers."""
    whole: tuple[Region, ...] = ()
    """The opaque regions, which run for real in every step."""
    by_itself: dict[str, str] = field(default_factory=dict)
    """Those of them that no tracer could capture → what part of a step they take, and why, in words."""
    beside: dict[str, None] = field(default_factory=dict)
    """What captures keep opaque by themselves and what they ask of the inputs, in words."""
    observed: list[tuple[bool, Description, SeenCalls]] = field(default_factory=list)
    """What it was seen to do of late: in training or not, on what micro-batch."""
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
    objects: dict[ObjectValue, Any] = field(default_factory=dict)
    """What this rank was given beside tensors and plain values."""
    by_value: bool = False
    """Whether a capture holds for some of Python's numbers alone, so that batches are described with these."""
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """Small buffers of integers and truth values as the first capture found them, which may decide sizes."""
    used: list[Pattern] = field(default_factory=list)
    """The captures that were asked for, by their patterns; whoever asks clears it before."""

    @staticmethod
    def empty(model: nn.Module, options: Options, topology: Topology, device: torch.device) -> Captures:
        """Before the first one. RunError, PartitionError: what the options name cannot be cut."""
        cuts, whole, finds_cuts = resolve(model, options.boundaries)
        balancing = Balancing(options, topology, device, finds_cuts)
        captures = Captures(model, options, topology, device, cuts, balancing, whole=whole)
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

    def of(self, pattern: Pattern, sample: Sample | str) -> list[Captured]:
        """The stages for each micro-batch of a pattern; one object where nothing depends on their shapes.

        ``sample``: the micro-batches on which new stages are checked against the model; or why they are not.
        """
        keys: list[Pattern] = []
        # Twice: a later micro-batch may be captured with symbolic sizes, which holds for the earlier ones, too.
        for place in [*range(pattern.microbatches)] * 2:
            pattern = pattern.for_any_words() if self.any_words else pattern
            keys.append(self._of_one(pattern.each()[place], pattern, sample))
        keys = keys[pattern.microbatches :]
        # A tracer may be found wrong by a later shape only: then all of the mode are captured again, by the next one.
        if any((key.training, self.kept[key].tracer) in self.wrong for key in keys):
            self.kept = {key: one for key, one in self.kept.items() if key.training != pattern.training}
            self.families.clear()
            self.first = None if pattern.training else self.first
            self.used.clear()
            return self.of(pattern, sample)
        self.used += keys
        return [self.kept[key] for key in keys]

    def keep(self, used: Collection[Pattern]) -> None:
        """Drops all captures but these. What was seen to vary is remembered."""
        self.kept = {pattern: captured for pattern, captured in self.kept.items() if pattern in used}
        self.questions.keep([captured.answers for captured in self.kept.values()])
        self.objects.clear()  # each call brings its own
        self.families = {
            key: replace(family, general=tuple(entry for entry in family.general if entry[0] in used))
            for key, family in list(self.families.items())[-FAMILIES:]
        }

    @contextlib.contextmanager
    def rolled_back_on_error(self) -> Iterator[None]:
        """If the block fails, on this rank or another, what was captured in it is dropped."""
        # Collections that are changed in place are copied; what else is here is assigned anew.
        fields = ("kept", "families", "first", "wrong", "whole", "by_itself", "any_words")
        before = {name: dict(v) if isinstance(v := getattr(self, name), dict) else v for name in fields}
        try:
            with self.reads.rolled_back_on_error():
                yield
        except BaseException:
            vars(self).update(before)
            raise

    def _of_one(self, this: Pattern, pattern: Pattern, sample: Sample | str) -> Pattern:
        """The pattern under which the capture for a micro-batch of ``pattern`` is kept."""
        # 1. A capture that holds: for any shape, with symbolic sizes, or for this shape, with answers that are given.
        shape, given = this.shape, this.answered
        place = None if shape is None else (replace(this, shapes=(), answers=()), outline(shape))
        family = self.families.get(place, Family())
        paths = dict.fromkeys(captured.answers for captured in self.kept.values())
        known = [this.for_any_shape(), *(this.for_answers(path) for path in paths if set(path) <= set(given))]
        if shape is not None and (general := family.holding(shape, given)) is not None:
            known.insert(1, general)
        for key in known:
            if key in self.kept:
                return key
        # 2. A new one. What it asked of the inputs is a part of the key that it is kept under.
        made = self._captured(this, pattern, sample, frozenset() if shape is None else family.free(shape))
        self.any_words |= made.any_words
        if shape is not None and made.of_one_shape and made.any_words:
            this, shape = this.for_any_words(), for_any_words(shape)
            place = replace(this, shapes=(), answers=()), outline(shape)
            family = self.families.get(place, Family())
        key = this.for_answers(made.answers) if made.of_one_shape else this.for_any_shape()
        if shape is not None and made.of_one_shape:
            for name in known_by_type(shape):
                self.by_value = True
                raise Unanswered(name, "", self.asks_numbers)
            self.families[place] = family.noting(shape, key, made.holds_for)
            self._report(made, pattern.training)
        self.kept[key] = made
        return key

    def _report(self, made: Captured, training: bool) -> None:
        if made.fixed_sizes and made.fixed_sizes not in self.fixed:
            self.fixed.add(made.fixed_sizes)
            log(f"fxpipe: {made.fixed_sizes}")
        self.counts[training] += 1
        if self.counts[training] == MANY:
            shapes = [key.shape for key in self.kept if key.training == training and key.shape is not None]
            sizes, values = (", ".join(map(repr, names)) for names in changing(shapes))
            by_size = f'sizes of {sizes} change: pad batches to a few sizes; tracer="export" keeps sizes symbolic'
            by_value = (
                f"strings or numbers of Python's in {values} change, and a program holds for those it was captured "
                'with: pass tensors, or keep what reads them opaque, boundaries={"the submodule": "whole"}'
            )
            reasons = [by_value] * bool(values) + [by_size] * bool(sizes) or [
                "each for an outcome of what forward asks"
            ]
            log(f"fxpipe: {MANY} captures by now: {'; '.join(reasons)}")

    def _captured(self, this: Pattern, pattern: Pattern, sample: Sample | str, free: frozenset[Place]) -> Captured:
        """The stages that the first tracer makes whose stages are right. ``free``: dimensions that may be symbolic."""
        shape = this.shape
        accepted: list[tuple[Program, Captured, str]] = []

        def accept(program: Program, request: Request) -> None:
            for training in (True, pattern.training):  # what is wrong in training is not tried in evaluation
                if (training, program.tracer) in self.wrong:
                    raise TraceError(self.wrong[training, program.tracer])
            self._check_unchanged(this.given[0])
            cut, made = self._cut(program, pattern, shape, request.whole)
            # The micro-batches that this capture is for: those of one shape, or all that have the same inputs.
            each = [one if made.of_one_shape else one.for_any_shape() for one in pattern.each()]
            places = [place for place, one in enumerate(each) if one in (this, this.for_any_shape())]
            with aside():
                checked = self._checked(made, request, sample, places)
                if checked.startswith(NOT_CHECKED):
                    self._look_for_rows(cut, pattern, shape)
                accepted.append((cut, made, checked))

        request = self._request(this, pattern, free, accept)
        seen_before = len(self.observed)

        def observe(request: Request) -> Request:
            del self.observed[seen_before:]  # of fewer regions
            return replace(request, seen=self._seen(request, pattern, shape, sample))

        def shares() -> Mapping[str, float]:
            return self._shares(accepted[-1][0], pattern, shape)

        # 1. The capture. What it reads of Python's state is noted, since a change of that makes another capture.
        request = observe(request) if self.whole else request
        observes = observe if self._can_run(sample, shape) else None
        tries = self.any_words or self.first is None
        with (
            progress(f"capturing {type(self.model).__name__}"),
            ignored(self.balancing.finds_cuts),
            self.reads.noting() as noted,
        ):
            try:
                program, request, by_itself = capture_in_part(request, self.options, observes, shares, tries)
            except Unanswered as error:
                self.asks_numbers = error.numbers
                raise
        # 2. What it has shown of the model. A submodule that stages call follows its own changes: only what was traced
        # through is compared.
        dropped = (region for region in self.whole if not region.varies and region not in request.whole)
        self.whole, self.asks_numbers = (*request.whole, *dropped), request.asks_numbers
        own = {  # which only regions read, or a capture refuses
            (id(vars(self.model.get_submodule(path))), name)
            for seen in request.seen.values()
            for path, name in seen.sets
        }
        targets = {str(node.target) for node in program.nodes if node.op == "call_module"}
        called = [program.module.get_submodule(target) for target in targets - program.opaque.keys()]
        self.reads.keep(noted - own, request.roots, called, program.sets, program.computed_with)
        cut, made, checked = accepted[-1]
        self.first = self.first or cut
        self.by_itself |= by_itself
        # A region that only other regions call is a part of them.
        inside = self.by_itself.keys() - {name for name, _ in request.seen} if by_itself else set()
        self.by_itself = {name: words for name, words in self.by_itself.items() if name not in inside}
        self.whole = tuple(region for region in self.whole if region.name not in inside)
        beside = [*self.by_itself.values(), *self.questions.described(program.answers)]
        self.beside |= dict.fromkeys(beside)
        # 3. What .stages says of it.
        kept = tuple(f"{region.name}." for region in request.whole)  # which runs as the user has it
        compiled = [name for name in compiled_parts(program.module) if not f"{name}.".startswith(kept)]
        if compiled and self.options.stage_compiler is None:
            plain = f"{listed(compiled)} run as plain code, though compiled"
            beside.append(f"{plain}; stage_compiler=torch.compile compiles what a stage runs")
        head, *rest = made.graph.origin.splitlines()
        origin = "\n".join([f"{head}, {checked}", *rest, *beside])
        made = replace(made, graph=replace(made.graph, origin=origin), any_words=request.any_words)
        calls = (call for part in cut.opaque.values() for call in opaque_calls(part))
        self.unpacked |= {call.name for call in calls if any(listing.unpacked for listing in call.opened)}
        watch(cut, self.reads.changed)
        # Copies, as a rank holds only its own stages' buffers once compile is done, and later captures may need others.
        if not self.numbers:
            buffers = self.model.named_buffers(remove_duplicate=False)
            small = [(name, one) for name, one in buffers if not one.is_meta and one.numel() <= SMALL]
            self.numbers = {name: one.clone() for name, one in small if not one.dtype.is_floating_point}
        return made

    def _request(
        self, this: Pattern, pattern: Pattern, free: frozenset[Place], accept: Callable[[Program, Request], None]
    ) -> Request:
        """What a tracer is asked. It makes a program, which ``accept`` cuts into stages and checks before it counts."""
        shape = this.shape
        request = Request(
            self.model,
            this.inputs,
            {name: self._objects(name, value) for name, value in this.given[0].fixed},
            self.options.loss_fn if pattern.with_loss else None,
            example=None if shape is None else {n: self._objects(n, like) for n, like in example_of(shape).items()},
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
            holding={name: [leaf is not None for leaf in leaves] for name, _, leaves in this.given[0].holding},
        )
        if this.asks and self.options.tracer == "auto" and self.options.auto_opaque:
            return replace(request, answers=dict(this.answered), ask=self.questions.ask)
        return request

    def _objects(self, name: str, value: Any) -> Any:
        """An input with the objects that it has; TraceError where this rank was not given one."""

        def given(value: ObjectValue) -> Any:
            if value not in self.objects:
                raise TraceError(
                    f"input {name!r} is or holds {value}, on which forward may branch, and this rank was given None; "
                    "pass it on all ranks of a pipe group"
                )
            return self.objects[value]

        return pytree.tree_map_only(ObjectValue, given, value)

    @property
    def with_objects(self) -> set[str]:
        """The inputs that captures have objects from."""
        given = [each for pattern in self.kept for each in pattern.given]
        fixed = {name for each in given for name, value in each.fixed if isinstance(value, ObjectValue)}
        inside = ((name, leaf) for each in given for name, _, leaves in each.holding for leaf in leaves)
        return fixed | {name for name, leaf in inside if isinstance(leaf, ObjectValue)}

    def _check_unchanged(self, given: GivenInputs) -> None:
        """TraceError where forward has changed an object that it is given."""
        inside = ((name, leaf) for name, _, leaves in given.holding for leaf in leaves)
        for name, value in (*given.fixed, *inside):
            if isinstance(value, ObjectValue) and like_of(self.objects[value]) != value:
                raise TraceError(
                    f"forward changes {value}, which is or is in input {name!r}, while it is captured, and no stage "
                    "would do so; return what it computes, or keep it in a tensor"
                )

    def _can_run(self, sample: Sample | str, shape: Description | None) -> TypeGuard[Sample]:
        """Whether the model can run on a micro-batch, which shows what a region returns."""
        on_meta = any(parameter.is_meta for parameter in self.model.parameters())
        return isinstance(sample, Sample) and not sample.later and shape is not None and not on_meta

    def _shares(self, program: Program, pattern: Pattern, shape: Description | None) -> dict[str, float]:
        """Region → the part of a step's FLOPs that its calls have, forward and backward; nothing where it is not known.
        Seconds would say less: of what cannot run without numbers the number of kernels is not known."""
        try:
            assert shape is not None
            costs = self.balancing.costs(program, pattern, shape)
        except CostUnknown:
            return {}
        total = sum(cost.flops + cost.backward_flops for cost in costs.nodes.values()) or 1.0
        shares: dict[str, float] = {}
        for node in program.nodes:
            part = (costs[node.name].flops + costs[node.name].backward_flops) / total
            for name in {call.name for call in opaque_calls(program.opaque.get(str(node.target)))}:
                shares[name] = shares.get(name, 0.0) + part
        return shares

    def _seen(self, request: Request, pattern: Pattern, shape: Description | None, sample: Sample | str) -> SeenCalls:
        """What calls of opaque regions do: as the user has said, as a real run shows, or as an earlier one
        has shown."""
        found = dict(declared(request))
        if shape is None:
            return found
        if not self._can_run(sample, shape):
            return {**found, **self._guessed({region.name for region in request.whole}, pattern.training, shape)}
        with progress("running an opaque region"), ignored(self.balancing.finds_cuts):
            batch = sample.batches[pattern.shapes.index(shape)]
            called: set[str] = set()
            found |= observe(request, batch, called)
            self.observed.append((pattern.training, shape, found))
            evaluates = True
            if pattern.training:
                # Evaluation is seen now, too: later this rank has its own part of the model alone. A model may not be
                # able to evaluate a batch for training.
                evaluates = False
                with evaluating(self.model), contextlib.suppress(TraceError):
                    self.observed.append((False, shape, {**declared(request), **observe(request, batch, called)}))
                    evaluates = True
            if evaluates and not request.may_lack_cuts:
                check_called(request, called)
        del self.observed[: -2 * OBSERVED]
        return found

    def _guessed(self, names: set[str], training: bool, shape: Description) -> SeenCalls:
        """What these regions do, by the observed micro-batch that is most like this one."""

        # The micro-batch that shows most: that called these regions, in this mode, with sizes that map to one each.
        def unlikeness(one: tuple[bool, Description, SeenCalls]) -> tuple[int, bool, tuple[int, int]]:
            then_training, then, calls = one
            return len(names - {name for name, _ in calls}), then_training != training, unlike(then, shape)

        if not self.observed:
            return {}
        _, then, calls = min(self.observed, key=unlikeness)
        sizes, entries = sizes_between(then, shape), entries_between(then, shape)
        lengths = sizes_between(then, shape, or_same=True)
        # What forward unpacks has always as many entries: (a, b) = region(x).
        return {
            key: seen.guessed(sizes, {} if key[0] in self.unpacked else lengths, entries) for key, seen in calls.items()
        }

    def _checked(self, made: Captured, request: Request, sample: Sample | str, places: Sequence[int]) -> str:
        """What came of running the stages against the model, in words; TraceError where they differ."""

        def holds(batch: Mapping[str, Any]) -> bool:
            return set(made.answers) <= set(self.questions.answers(batch) if made.answers else ())

        if isinstance(sample, str) or not self.options.check_capture:  # of regions, it has shown what they do
            return f"{NOT_CHECKED}: {sample if isinstance(sample, str) else 'check_capture=False'}"
        try:
            with progress("checking the stages against the model"):
                return check(made.graph, request, sample, places, holds, self.options.loss_weight)
        except TraceError as error:
            if not sample.later and not request.any_words:  # else other captures by this tracer are in use
                self.wrong[request.training, made.tracer] = str(error)
            raise

    def _look_for_rows(self, program: Program, pattern: Pattern, shape: Description | None) -> None:
        """Warns where shapes alone show that rows of a micro-batch meet, of the first capture in training."""
        is_first = self.first is None and pattern.training and pattern.microbatches > 1
        if shape is None or not is_first or not self.options.check_capture or counted(self.options.batch_dim):
            return
        examples = [shape, joined_description([shape, shape], self.options.batch_dim)]
        how = self.device, pattern.ambient.autocast, self.balancing.compute
        warn_of_rows(rows_meet(program, *(shapes_of(program, example_of(one), *how) for one in examples)))

    def with_tensors_of_module(self) -> Captures:
        """The same captures; their stages hold what the model now holds, and nothing that it has let go of."""
        kept = {
            pattern: replace(captured, graph=captured.graph.with_tensors_of_module())
            for pattern, captured in self.kept.items()
        }
        return replace(self, kept=kept)

    def _cut(
        self, program: Program, pattern: Pattern, shape: Description | None, whole: Collection[Region]
    ) -> tuple[Program, Captured]:
        """The program with its stages, and they themselves. ``whole``: what is opaque in it."""
        first = self.first
        if first is None:
            self.found = None
        # What is opaque was kept for its effects, and what answers a question was computed for it: both may be unused.
        if whole or program.answers:
            program = default_passes.drop_unused(program)
        if whole:
            self.unused = unused(program) if first is None else self.unused
            program = with_unused(program, self.unused)
        program = program.replace(first=first)
        # Cuts are searched for, or marked. Later captures are cut where the first one was.
        if self.balancing.finds_cuts:
            program = chain(default_passes.before_balance(), program)
            if first is None:
                self.found = self.balancing.searched(program, pattern, shape)
                program = self.found.program
            else:
                program = default_passes.partition(program)
            program = chain((default_passes.name_stages,), program)
        else:
            passes = self.options.passes
            program = chain(default_passes.default() if passes is None else passes, program)
            if first is None and shape is not None and self.balancing.finds_placement_of(len(program.stage_names)):
                self.found = self.balancing.placed(program, pattern, shape)
        graph = default_passes.split(program)
        constants = [f"{name}: {_fingerprint(tensor)}" for name, tensor in program.constants.items()]
        return program, Captured(
            graph,
            "\n".join([type(self.model).__name__, str(program), *constants]),
            program.tracer,
            program.holds_for,
            program if program.gathered else None,
            program.fixed_sizes,
            program.answers,
        )


def _fingerprint(tensor: Tensor) -> str:
    """A hash of a constant: ranks that have made it with different seeds must not go on."""
    if tensor.is_meta:
        return "on the meta device"
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), buffer)
    return f"constant {list(tensor.shape)} {hashlib.blake2b(buffer.getbuffer(), digest_size=8).hexdigest()}"
