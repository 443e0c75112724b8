"""Capturing: traces a model for a pattern of inputs, cuts it into stages, and checks them."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fxpipe import passes as default_passes
from fxpipe.batch.batch import joined_description
from fxpipe.batch.description import Description, example_of, for_any_words, known_by_type
from fxpipe.batch.objects import spec_of
from fxpipe.batch.pattern import GivenInputs, Pattern
from fxpipe.capture.auto_opaque import capture_in_part, unused, with_unused
from fxpipe.capture.captures import Captured, Captures, Observed
from fxpipe.distributed.forward_collectives import collectives_refused
from fxpipe.errors import TraceError
from fxpipe.graph.boundary import ignored
from fxpipe.graph.program import Program, Shapes, gather_of, is_boundary
from fxpipe.graph.question import Unanswered
from fxpipe.no_gc import paused
from fxpipe.notebook import listed
from fxpipe.packed import counted
from fxpipe.passes.chain import chain
from fxpipe.progress import progress
from fxpipe.search.choose import Balanced
from fxpipe.search.node_costs import CostUnknown
from fxpipe.specs import ObjectValue
from fxpipe.stage.modes import evaluating
from fxpipe.stage.opaque_call import opaque_calls
from fxpipe.stage.own_generators import own_generators
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.modules import compiled_parts
from fxpipe.trace import Request
from fxpipe.trace.checks.capture_check import NOT_CHECKED, Sample, check
from fxpipe.trace.checks.on_fakes import shapes_of
from fxpipe.trace.checks.row_check import check_reduction, rows_meet, warn_of_rows
from fxpipe.trace.checks.sizes import Family, changing, entries_between, outline, sizes_between, unlike
from fxpipe.trace.opaque.observed import SeenCalls, check_called, declared, observe, watch
from fxpipe.trace.opaque.regions import Region
from fxpipe.trace.reads import Reads, ignoring_reads, noting
from fxpipe.trace.request import Place

SMALL = 2**16
"""The most elements of a buffer that is copied."""
MANY = 10
"""The number of captures in a mode, training or evaluation, at which a report is logged."""
OBSERVED = 16
"""The most micro-batches for which the results of opaque regions are remembered."""


def _is_block(path: str, module: nn.Module) -> bool:
    """Whether a module is an entry of a module list, or has no list inside: a search cuts between such modules."""
    lists = nn.ModuleList | nn.ModuleDict | nn.Sequential
    in_a_list = any(name.isdecimal() for name in path.split("."))
    return in_a_list or not any(isinstance(part, lists) for part in module.modules())


class Examined(NamedTuple):
    """A tracer's program, the same program cut into stages, and the stages, which were checked against the model.
    ``searched`` and ``unused``: as in ``Captures``."""

    program: Program
    cut: Program
    captured: Captured
    searched: Balanced | None
    unused: frozenset[str]
    checked: str = ""
    """The outcome of the check against the model, in words."""


class Capturing:
    """Makes the captures that a plan needs. ``captures``: all captures so far, replaced after each new capture. The
    planner takes them over if all ranks have made the plan."""

    def __init__(self, captures: Captures) -> None:
        self.captures = captures

    def of(self, pattern: Pattern, sample: Sample | str) -> list[Captured]:
        """The stages for each micro-batch of a pattern; the same object for micro-batches that share a capture.

        ``sample``: the micro-batches on which new stages are checked against the model, or the reason for no check.
        """
        if (graph := self.captures.own_stages) is not None:
            return [Captured(graph.with_backward(), f"{graph}")] * pattern.microbatches
        keys, alone, has_words = list[Pattern](), pattern.each(), True
        # Twice: a later micro-batch's capture with symbolic sizes may also be valid for the earlier micro-batches.
        for number in [*range(pattern.microbatches)] * 2:
            if has_words and self.captures.any_words:
                pattern, has_words = pattern.for_any_words(), False
                alone = pattern.each()
            keys.append(self._of_one(alone[number], pattern, sample))
        captured = [self.captures.by_pattern[key] for key in keys[pattern.microbatches :]]
        # A later shape may show that a tracer is wrong. Then the next tracer captures all patterns of this mode again.
        if any((pattern.training, each.tracer) in self.captures.wrong for each in captured):
            others = {key: each for key, each in self.captures.by_pattern.items() if key.training != pattern.training}
            first = None if pattern.training else self.captures.first
            self.captures = replace(self.captures, by_pattern=others, families={}, first=first)
            return self.of(pattern, sample)
        return captured

    def _of_one(self, this: Pattern, pattern: Pattern, sample: Sample | str) -> Pattern:
        """The key in ``captures.by_pattern`` of the capture for a micro-batch; makes the capture if none is valid."""
        # 1. A valid capture: for any shape, with symbolic sizes, or for this shape and the answers of this micro-batch.
        captures, shape, answers = self.captures, this.shape, this.answered
        kind = None if shape is None else (replace(this, shapes=(), answers=()), outline(shape))
        family = captures.families.get(kind, Family())
        paths = dict.fromkeys(captured.answers for captured in captures.by_pattern.values())
        keys = [this.for_any_shape(), *(this.for_answers(path) for path in paths if set(path) <= set(answers))]
        if shape is not None and (general := family.holding(shape, answers)) is not None:
            keys.insert(1, general)
        for key in keys:
            if key in captures.by_pattern:
                return key
        # 2. A new capture. Its key includes the answers to the questions that forward asked about the inputs.
        free = frozenset[Place]() if shape is None else family.free(shape)
        self.captures, captured = CaptureRun(self, this, pattern, sample).capture(free)
        captures = replace(self.captures, any_words=self.captures.any_words or captured.any_words)
        if shape is not None and captured.of_one_shape and captured.any_words:
            this, shape = this.for_any_words(), for_any_words(shape)
            kind = replace(this, shapes=(), answers=()), outline(shape)
            family = captures.families.get(kind, Family())
        key = this.for_answers(captured.answers) if captured.of_one_shape else this.for_any_shape()
        if shape is not None and captured.of_one_shape:
            for name in known_by_type(shape):
                raise Unanswered(name, "", captures.asks_numbers)
            families = {**captures.families, kind: family.noting(shape, key, captured.holds_for)}
            captures = replace(captures, families=families)
        captures = replace(captures, by_pattern={**captures.by_pattern, key: replace(captured, patterns=(key,))})
        self.captures = replace(captures, reports=_reports(captures, key))
        return key


class CaptureRun:
    """Traces a model for one micro-batch, cuts the program into stages, and checks the stages. ``this``: the pattern
    of the micro-batch. ``pattern``: the pattern of the batch."""

    def __init__(self, capturing: Capturing, this: Pattern, pattern: Pattern, sample: Sample | str) -> None:
        self.capturing, self.this, self.pattern, self.sample = capturing, this, pattern, sample
        self.captures, self.shape = capturing.captures, this.shape
        self.options, self.balancing = self.captures.options, self.captures.balancing
        self.observed: list[Observed] = []  # what opaque regions did in real runs

    @paused()
    def capture(self, free: frozenset[Place]) -> tuple[Captures, Captured]:
        """Returns the updated captures, and the stages of the first tracer whose stages pass the check. ``free``: the
        dimensions that may be symbolic."""
        # 1. The capture. Its reads of Python attributes are noted, since a changed attribute needs another capture.
        request = self._request(free)
        request = self.observe(request) if request.whole else request
        observe = self.observe if self._can_run(self.sample) else None
        tries = self.captures.any_words or self.captures.first is None
        with (
            progress(f"capturing {type(self.captures.model).__name__}"),
            ignored(self.balancing.finds_cuts),
            noting() as noted,
        ):
            examined, request, added = capture_in_part(request, self.options, self.examine, self.shares, observe, tries)
        # 2. The facts about the model that the capture found.
        program, captured = examined.program, replace(examined.captured, any_words=request.any_words)
        captures = self._with_regions(examined, request, added)
        watch(examined.cut, captures.latest.changed)
        beside = [*captures.by_itself.values(), *captures.questions.described(program.answers)]
        captures = replace(
            captures,
            first=captures.first or examined.cut,
            searched=examined.searched,
            unused=examined.unused,
            reads=self._reads(program, request, noted),
            asks_numbers=request.asks_numbers,
            observed=(*captures.observed, *self.observed)[-2 * OBSERVED :],
            beside=tuple(dict.fromkeys((*captures.beside, *beside))),
            numbers=captures.numbers or _numbers_in(captures.model),
        )
        # 3. The text that .stages shows.
        whole = tuple(f"{region.name}." for region in request.whole)  # opaque regions run as the user has them
        compiled = [name for name in compiled_parts(program.module) if not f"{name}.".startswith(whole)]
        if compiled and self.options.stage_compiler is None:
            plain = f"{listed(compiled)} run as plain code, though compiled"
            beside.append(f"{plain}; stage_compiler=torch.compile compiles what a stage runs")
        head, *rest = captured.graph.origin.splitlines()
        origin = "\n".join([f"{head}, {examined.checked}", *rest, *beside])
        return captures, replace(captured, graph=replace(captured.graph, origin=origin))

    def _with_regions(self, examined: Examined, request: Request, added: Mapping[str, str]) -> Captures:
        """The captures with this capture's opaque regions. ``added``: the regions that no tracer could capture."""
        captures = self.capturing.captures
        dropped = (region for region in captures.whole if not region.varies and region not in request.whole)
        by_itself = {**captures.by_itself, **added}
        # A region that only other regions call belongs to those regions.
        inside = by_itself.keys() - {name for name, _ in request.seen} if added else set()
        calls = (call for part in examined.cut.opaque.values() for call in opaque_calls(part))
        unpacked = {call.name for call in calls if any(listing.unpacked for listing in call.opened)}
        return replace(
            captures,
            whole=tuple(region for region in (*request.whole, *dropped) if region.name not in inside),
            by_itself={name: words for name, words in by_itself.items() if name not in inside},
            unpacked=captures.unpacked | unpacked,
        )

    def _reads(self, program: Program, request: Request, noted: set[tuple[int, str]]) -> Reads:
        """The reads with this capture's reads. Only attributes that were traced through are compared: a submodule that
        stages call sees its own changes."""
        own = {  # attributes that regions set: only regions read them, or a capture refuses them
            (id(vars(self.captures.model.get_submodule(path))), name)
            for seen in request.seen.values()
            for path, name in seen.sets
        }
        targets = {str(node.target) for node in program.nodes if node.op == "call_module"}
        called = [program.module.get_submodule(target) for target in targets - program.opaque.keys()]
        reads = self.captures.reads
        return reads.with_capture(noted - own, request.roots, called, program.sets, program.computed_with)

    def _request(self, free: frozenset[Place]) -> Request:
        """The request for a tracer."""
        captures, this, shape = self.captures, self.this, self.shape
        request = Request(
            captures.model,
            this.inputs,
            {name: self._objects(name, value) for name, value in this.given[0].fixed},
            self.options.loss_fn if self.pattern.with_loss else None,
            example=None if shape is None else {n: self._objects(n, like) for n, like in example_of(shape).items()},
            cuts=captures.cuts,
            may_lack_cuts=captures.first is not None,  # the first capture has called all cuts
            training=self.pattern.training,
            autocast=self.pattern.ambient.autocast,
            varying=free,
            device=captures.device,
            compute=self.balancing.compute,
            whole=captures.whole,
            call_context=partial(collectives_refused, captures.topology),
            numbers=captures.numbers,
            asks_numbers=captures.asks_numbers,
            fixed_leaves={name: [leaf is not None for leaf in leaves] for name, _, leaves in this.given[0].holding},
        )
        request = replace(request, generators=own_generators(request.module, request.loss_fn))
        if self.options.parallelize is not None:  # the function needs the user's modules
            request = replace(request, is_leaf_module=_is_block if self.balancing.finds_cuts else lambda *_: True)
        if this.asks and self.options.tracing.name == "auto" and self.options.tracing.opaque:
            return replace(request, answers=dict(this.answered), ask=captures.questions.ask)
        return request

    def _objects(self, name: str, value: Any) -> Any:
        """An input with its objects in place of their descriptions; TraceError if this rank lacks an object."""

        def looked_up(value: ObjectValue) -> Any:
            if value not in self.captures.objects:
                raise TraceError(
                    f"input {name!r} is or holds {value}, on which forward may branch, and this rank was given None; "
                    "pass it on all ranks of a pipe group"
                )
            return self.captures.objects[value]

        return pytree.tree_map_only(ObjectValue, looked_up, value)

    def _check_unchanged(self, inputs: GivenInputs) -> None:
        """TraceError if forward has changed an object among its inputs."""
        inside = ((name, leaf) for name, _, leaves in inputs.holding for leaf in leaves)
        for name, value in (*inputs.fixed, *inside):
            if isinstance(value, ObjectValue) and spec_of(self.captures.objects[value]) != value:
                raise TraceError(
                    f"forward changes {value}, which is or is in input {name!r}, while it is captured, and no stage "
                    "would do so; return what it computes, or keep it in a tensor"
                )

    def _can_run(self, sample: Sample | str) -> TypeGuard[Sample]:
        """Whether the model can run on a micro-batch of the sample, to show what opaque regions return."""
        on_meta = any(parameter.is_meta for parameter in self.captures.model.parameters())
        return isinstance(sample, Sample) and not sample.later and self.shape is not None and not on_meta

    def shares(self, examined: Examined) -> dict[str, float]:
        """Region → its fraction of a step's FLOPs, forward and backward; empty if the costs are not known. FLOPs, not
        seconds: the number of kernels is not known for code that cannot run on fake tensors."""
        program = examined.cut
        try:
            assert self.shape is not None
            costs = self.balancing.costs(program, self.pattern, self.shape)
        except CostUnknown:
            return {}
        total = sum(cost.flops + cost.backward_flops for cost in costs.nodes.values()) or 1.0
        shares: dict[str, float] = {}
        for node in program.nodes:
            part = (costs[node.name].flops + costs[node.name].backward_flops) / total
            for name in {call.name for call in opaque_calls(program.opaque.get(str(node.target)))}:
                shares[name] = shares.get(name, 0.0) + part
        return shares

    def observe(self, request: Request) -> Request:
        """The request with the behaviour of its opaque regions: from the user's declarations, from a real run, or
        guessed from an earlier run."""
        self.observed, shape = [], self.shape  # earlier observations were of fewer regions
        seen = dict(declared(request))
        if shape is not None and self._can_run(self.sample):
            seen |= self._seen(request, self.sample.batches[self.pattern.shapes.index(shape)], shape)
        elif shape is not None:
            seen |= self._guessed({region.name for region in request.whole}, shape)
        return replace(request, seen=seen)

    def _seen(self, request: Request, batch: Mapping[str, Any], shape: Description) -> SeenCalls:
        """Runs the model, and returns what each call of an opaque region did."""
        training, called = self.pattern.training, set[str]()
        with progress("running an opaque region"), ignored(self.balancing.finds_cuts):
            seen = observe(request, batch, called)
            self.observed.append((training, shape, {**declared(request), **seen}))
            evaluates = not training
            if training:
                # Evaluation is also observed now, because later this rank holds only its own part of the model. A model
                # may fail to evaluate a batch for training.
                with evaluating(self.captures.model), contextlib.suppress(TraceError):
                    self.observed.append((False, shape, {**declared(request), **observe(request, batch, called)}))
                    evaluates = True
            if evaluates and not request.may_lack_cuts:
                check_called(request, called)
        return seen

    def _guessed(self, names: set[str], shape: Description) -> SeenCalls:
        """The calls of these regions, guessed from the observed micro-batch that is most like this micro-batch."""

        # The best observation called these regions, in this mode, and each of its sizes maps to one size of this shape.
        def unlikeness(observed: Observed) -> tuple[int, bool, tuple[int, int]]:
            training, then, calls = observed
            return len(names - {name for name, _ in calls}), training != self.pattern.training, unlike(then, shape)

        if not self.captures.observed:
            return {}
        _, then, calls = min(self.captures.observed, key=unlikeness)
        sizes, entries = sizes_between(then, shape), entries_between(then, shape)
        lengths = sizes_between(then, shape, or_same=True)
        # A result that forward unpacks, as in (a, b) = region(x), always has the same number of entries.
        return {
            key: seen.guessed(sizes, {} if key[0] in self.captures.unpacked else lengths, entries)
            for key, seen in calls.items()
        }

    def examine(self, request: Request, program: Program) -> Examined:
        """Cuts a tracer's program into stages and checks them against the model; TraceError if they differ."""
        wrong = self.capturing.captures.wrong
        for training in (True, self.pattern.training):  # evaluation does not try a tracer that is wrong in training
            if (training, program.tracer) in wrong:
                raise TraceError(wrong[training, program.tracer])
        self._check_unchanged(self.this.given[0])
        examined = self._cut(program, request.whole)
        with ignoring_reads():
            checked = self._checked(examined.captured, request, self.sample)
            if checked.startswith(NOT_CHECKED):
                self._look_for_rows(examined.cut)
        return examined._replace(checked=checked)

    def _checked(self, captured: Captured, request: Request, sample: Sample | str) -> str:
        """Runs the stages against the model and returns the outcome in words; TraceError if they differ."""

        def holds(batch: Mapping[str, Any]) -> bool:
            return set(captured.answers) <= set(self.captures.questions.answers(batch) if captured.answers else ())

        if isinstance(sample, str) or not self.options.tracing.check:  # the sample then only shows what regions do
            return f"{NOT_CHECKED}: {sample if isinstance(sample, str) else 'fxpipe.Tracing(check=False)'}"
        # The micro-batches for which this capture is valid: all of this shape, or all with the same inputs.
        each = [pattern if captured.of_one_shape else pattern.for_any_shape() for pattern in self.pattern.each()]
        numbers = [number for number, pattern in enumerate(each) if pattern in (self.this, self.this.for_any_shape())]
        try:
            with progress("checking the stages against the model"):
                return check(captured.graph, request, sample, numbers, holds, self.options.loss_weight)
        except TraceError as error:
            if not sample.later and not request.any_words:  # later, this tracer's other captures are in use
                captures = self.capturing.captures
                wrong = {**captures.wrong, (request.training, captured.tracer): str(error)}
                self.capturing.captures = replace(captures, wrong=wrong)
            raise

    def _look_for_rows(self, program: Program) -> None:
        """Warns if the first training capture shows that rows of a micro-batch interact. RunError for a sum of them."""
        pattern, batch_dim = self.pattern, self.options.batch_dim
        is_first = self.captures.first is None and pattern.training and pattern.microbatches > 1
        if is_first and self.options.tracing.check:
            check_reduction(program, pattern.microbatches)
        if self.shape is None or not is_first or not self.options.tracing.check or counted(batch_dim):
            return
        doubled = joined_description([self.shape] * 2, batch_dim)
        warn_of_rows(rows_meet(program, self._shapes(program, self.shape), self._shapes(program, doubled)))

    def _shapes(self, program: Program, example: Description) -> dict[str, Shapes]:
        """Node → the shapes of its value for a micro-batch like ``example``."""
        how = self.captures.device, self.pattern.ambient.autocast, self.balancing.compute
        return shapes_of(program, example_of(example), *how)

    def _cut(self, program: Program, whole: Collection[Region]) -> Examined:
        """Cuts a program into stages, without a check. ``whole``: the opaque regions of the program."""
        traced, first, unused_names, balancing = program, self.captures.first, self.captures.unused, self.balancing
        searched = None if first is None else self.captures.searched
        # Opaque calls were kept for their effects, and some nodes only answer questions: both kinds may be unused.
        if whole or program.answers:
            program = default_passes.drop_unused(program)
        if whole:
            unused_names = unused(program) if first is None else unused_names
            program = with_unused(program, unused_names)
        program = program.replace(first=first)
        # A search finds the cuts, or the user marked them. Later captures are cut where the first capture was.
        if balancing.finds_cuts:
            program = chain(default_passes.before_balance(), program)
            names = default_passes.name_stages, default_passes.gather
            if first is not None:
                program = default_passes.partition(program)
            elif balancing.found is not None:
                program = balancing.found.applied(program)
            else:
                if any(map(gather_of, filter(is_boundary, program.nodes))):
                    program = chain((default_passes.partition, *names), program)
                searched = balancing.searched(program, self.pattern, self.shape)
                program = searched.program
            program = chain(names, program)
        else:
            passes = self.options.passes
            if passes is not None and self.shape is not None:  # the user's own may read the shapes
                program = program.replace(shapes=self._shapes(program, self.shape))
            program = chain(default_passes.default() if passes is None else passes, program)
        if first is None and self.shape is not None and balancing.finds_placement_of(len(program.stage_names)):
            searched = balancing.placed(program, self.pattern, self.shape)
        constants = [f"{name}: {_fingerprint(tensor)}" for name, tensor in program.constants.items()]
        captured = Captured(
            default_passes.split(program),
            "\n".join([type(self.captures.model).__name__, str(program), *constants]),
            program.tracer,
            program.holds_for,
            program if program.gathered else None,
            program.fixed_sizes,
            program.answers,
        )
        return Examined(traced, program, captured, searched, unused_names)


def _reports(captures: Captures, key: Pattern) -> tuple[str, ...]:
    """The reports to the user, with those about the latest capture, of the pattern ``key``."""
    shapes = [
        other.shape for other in captures.by_pattern if other.training == key.training and other.shape is not None
    ]
    fixed_sizes = captures.by_pattern[key].fixed_sizes
    reports = [f"fxpipe: {fixed_sizes}"] if fixed_sizes else []
    if len(shapes) == MANY:
        sizes, values = (", ".join(map(repr, names)) for names in changing(shapes))
        by_size = f'sizes of {sizes} change: pad batches to a few sizes; tracer="export" keeps sizes symbolic'
        by_value = (
            f"strings or numbers of Python's in {values} change, and a program holds for those it was captured "
            'with: pass tensors, or keep what reads them opaque, boundaries={"the submodule": "whole"}'
        )
        reasons = [by_value] * bool(values) + [by_size] * bool(sizes) or ["each for an outcome of what forward asks"]
        reports.append(f"fxpipe: {MANY} captures by now: {'; '.join(reasons)}")
    return tuple(dict.fromkeys((*captures.reports, *reports)))


def _numbers_in(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's small integer and boolean buffers. After compile a rank holds only its own stages' buffers,
    and later captures may need the others."""
    buffers = model.named_buffers(remove_duplicate=False)
    small = [(name, buffer) for name, buffer in buffers if not buffer.is_meta and buffer.numel() <= SMALL]
    return {name: buffer.clone() for name, buffer in small if not buffer.dtype.is_floating_point}


def _fingerprint(tensor: Tensor) -> str:
    """A hash of a constant, by which ranks detect that they captured different constants from different seeds."""
    if tensor.is_meta:
        return "on the meta device"
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), buffer)
    return f"constant {list(tensor.shape)} {hashlib.blake2b(buffer.getbuffer(), digest_size=8).hexdigest()}"
