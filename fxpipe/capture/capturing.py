"""Capturing: finds the capture that is valid for each micro-batch, and makes a capture where none is.

Takes ``Captures``, the pattern of a batch, and its micro-batches with real tensors, if a rank has them. Gives new
``Captures``, and a capture for each micro-batch. For a micro-batch without a valid capture:

1. A request says what the tracer needs: the inputs, the cuts, and the sizes that vary.
2. The model runs once, if it has opaque regions, to show what they return.
3. A tracer captures the model; ``auto_opaque`` changes the request until a tracer can.
4. The program is cut into stages, and the stages run once against the model.
5. What the capture found goes into the new ``Captures``: the attributes that it read, regions, questions.
6. The text for ``.stages`` is written.

It places no stage on a rank and makes no table: ``plan`` does. It asks no other rank: all ranks of a pipe group make
the same captures from the same pattern.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from fxpipe.batch.description import example_of, known_by_type
from fxpipe.batch.objects import spec_of
from fxpipe.batch.pattern import Pattern
from fxpipe.capture.auto_opaque import capture_in_part
from fxpipe.capture.captures import Captures
from fxpipe.capture.examining import Examined, check_rows_apart, cut
from fxpipe.capture.guard import Captured
from fxpipe.capture.region_facts import Observed, observed_in_run
from fxpipe.distributed.forward_collectives import collectives_refused
from fxpipe.errors import TraceError
from fxpipe.graph.boundary import ignored
from fxpipe.graph.program import Program
from fxpipe.graph.question import Unanswered
from fxpipe.no_gc import paused
from fxpipe.notebook import listed
from fxpipe.passes.checkpoint_layers import around_layers
from fxpipe.patches import replaced
from fxpipe.progress import progress
from fxpipe.search.node_costs import CostUnknown
from fxpipe.specs import ObjectValue
from fxpipe.stage.opaque_call import opaque_calls
from fxpipe.stage.own_generators import own_generators
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.modules import compiled_parts
from fxpipe.trace import Request
from fxpipe.trace.checks.capture_check import NOT_CHECKED, Sample, check
from fxpipe.trace.checks.sizes import changing
from fxpipe.trace.opaque.observed import declared, watch
from fxpipe.trace.reads import Reads, ignoring_reads, noting
from fxpipe.trace.request import Place

SMALL = 2**16
"""The most elements of a buffer that is copied."""
MANY = 10
"""The number of captures in a mode, training or evaluation, at which a report is logged."""


def _is_block(path: str, module: nn.Module) -> bool:
    """Whether a module is an entry of a module list, or has no list inside: a search cuts between such modules."""
    lists = nn.ModuleList | nn.ModuleDict | nn.Sequential
    in_a_list = any(name.isdecimal() for name in path.split("."))
    return in_a_list or not any(isinstance(part, lists) for part in module.modules())


@dataclass(frozen=True)
class Capturing:
    """Makes the captures that a batch needs. Each method takes ``Captures``, and returns new ones."""

    pattern: Pattern
    """The pattern of the batch."""
    sample: Sample | str
    """The micro-batches on which new stages are checked against the model, or the reason for no check."""
    wrong: dict[tuple[bool, str], str] = field(default_factory=dict)
    """The tracers that this object has found wrong, as in ``Captures``. They count even if the capture then fails."""

    def of(self, captures: Captures) -> tuple[Captures, list[Captured]]:
        """Returns the new captures, and the capture for each micro-batch of the pattern: the same object for
        micro-batches that share a capture.

        Raises:
            TraceError: no tracer can capture the model, or the stages differ from the model.
            PartitionError: the program cannot be cut into stages.
            Unanswered: forward asks a new question about its inputs.
        """
        training, count, any_words = self.pattern.training, self.pattern.microbatches, captures.any_words
        if (own := captures.source.own) is not None:  # a parameter may be frozen since the last plan
            return captures, [replace(own, graph=own.graph.with_backward(), text=f"{own.graph}")] * count
        run = replace(self, pattern=self.pattern.for_any_words()) if any_words else self
        alone, found = run.pattern.each(), list[Captured]()
        # Twice: a later micro-batch's capture with symbolic sizes may also be valid for the earlier micro-batches.
        for number in [*range(count)] * 2:
            captures, captured = run._of_one(captures, alone[number])
            found.append(captured)
            if captures.any_words != any_words:  # the first capture for any strings
                return self.of(captures)
        found = found[count:]
        # A later shape may show that a tracer is wrong. Then the next tracer captures all patterns of this mode again.
        if any((training, each.tracer) in captures.wrong for each in found):
            return self.of(captures.without(training))
        return captures, found

    def _of_one(self, captures: Captures, this: Pattern) -> tuple[Captures, Captured]:
        """The capture that is valid for a micro-batch, which is made if there is none."""
        if (captured := captures.holding(this)) is not None:
            return captures, captured
        why = captures.why_anew(this)
        captures, captured = self._capture(captures, this)
        for name in known_by_type(captured.guard.shape or ()):
            raise Unanswered(name, "", captures.questions.numbers)
        captured = replace(captured, why=why)
        captures = captures.with_captured(captured)
        return replace(captures, reports=_reports(captures, captured, this.training)), captured

    @paused()
    def _capture(self, captures: Captures, this: Pattern) -> tuple[Captures, Captured]:
        """Captures the model for a micro-batch: the stages of the first tracer whose stages pass the check. Errors as
        ``of``."""
        source, results = captures.source, list[Examined]()

        def traced() -> _TracedProgram:
            # 1. The request. 2. The regions.
            observed = list[Observed]()
            request = self._request(captures, this)
            observe = partial(self._observed, captures, this, observed)
            request = observe(request) if request.whole else request
            # 3. The capture. 4. Its check. Reads of attributes are noted: a changed attribute needs another capture.
            with (
                progress(f"capturing {type(source.model).__name__}"),
                ignored(source.balancing.finds_cuts),
                replaced(captures.reads.memos),
                noting() as noted,
            ):
                examined, request, added = capture_in_part(
                    request,
                    source.options,
                    partial(self._examined, captures, this),
                    partial(self._shares, captures, this),
                    observe if _shows_regions(self.sample, source.model, this) else None,
                    captures.any_words or captures.first is None,
                )
            results.append(examined)
            return _TracedProgram(examined.program, request, added, observed, noted)

        once = source.balancing.once
        program, request, added, observed, noted = once(("traced", this, source.options.layers), traced)
        # An earlier plan of the model may have traced it. This plan then only cuts the program.
        (examined,) = results or [self._examined(captures, this, request, program)]
        # 5. The facts about the model that the capture found.
        captured = examined.captured
        watch(examined.cut, source.latest.changed)
        captures = replace(
            captures,
            first=captures.first or examined.first._replace(numbers=_numbers_in(source.model)),
            regions=captures.regions.with_capture(examined.cut, request, added, observed),
            reads=once(("reads", this, source.options.layers), lambda: _reads(captures, program, request, noted)),
            questions=replace(captures.questions, numbers=request.asks_numbers),
            any_words=captures.any_words or request.any_words,
            wrong={**captures.wrong, **self.wrong},
        )
        # 6. The text that .stages shows.
        notes = [*captures.regions.by_itself.values(), *captures.questions.described(program.answers)]
        whole = tuple(f"{region.name}." for region in request.whole)  # opaque regions run as the user has them
        compiled = [name for name in compiled_parts(program.module) if not f"{name}.".startswith(whole)]
        if compiled and source.options.stage_compiler is None:
            plain = f"{listed(compiled)} run as plain code, though compiled"
            notes.append(f"{plain}; stage_compiler=torch.compile compiles what a stage runs")
        head, *rest = captured.graph.origin.splitlines()
        origin = "\n".join([f"{head}, {examined.checked}", *rest, *notes])
        return captures, replace(captured, graph=replace(captured.graph, origin=origin))

    def _request(self, captures: Captures, this: Pattern) -> Request:
        """The request for a tracer: the inputs with their objects, the cuts, the modes, and the sizes that vary."""
        source, shape, inputs = captures.source, this.shape, this.given[0]
        options = source.options
        objects = partial(_with_objects, captures)
        request = Request(
            source.model,
            this.inputs,
            {name: objects(name, value) for name, value in inputs.fixed},
            options.loss_fn if self.pattern.with_loss else None,
            example=None if shape is None else {name: objects(name, like) for name, like in example_of(shape).items()},
            cuts=source.cuts,
            may_lack_cuts=captures.first is not None,  # the first capture has called all cuts
            training=self.pattern.training,
            autocast=self.pattern.ambient.autocast,
            varying=frozenset[Place]() if shape is None else captures.family(this).free(shape),
            device=source.balancing.device,
            compute=source.balancing.compute,
            whole=captures.regions.whole,
            call_context=partial(collectives_refused, source.balancing.topology),
            numbers={} if captures.first is None else captures.first.numbers,
            asks_numbers=captures.questions.numbers,
            fixed_leaves={name: [leaf is not None for leaf in leaves] for name, _, leaves in inputs.holding},
        )
        if self.pattern.training:
            request = replace(request, around_layers=around_layers(request.module, options.layers))
        request = replace(request, generators=own_generators(request.module, request.loss_fn))
        if options.parallelize is not None:  # the function needs the user's modules
            request = replace(request, is_leaf_module=_is_block if source.balancing.finds_cuts else lambda *_: True)
        if this.asks and options.tracing.name == "auto" and options.tracing.opaque:
            return replace(request, answers=dict(this.answered), ask=captures.questions.ask)
        return request

    def _observed(self, captures: Captures, this: Pattern, observed: list[Observed], request: Request) -> Request:
        """The request with the behaviour of its opaque regions: from the user's declarations, from a real run, or
        guessed from an earlier run. ``observed``: takes the behaviour in the real run."""
        observed.clear()  # earlier observations were of fewer regions
        shape = this.shape
        if shape is None:
            return replace(request, seen=declared(request))
        if _shows_regions(self.sample, request.module, this):
            batch = self.sample.batches[self.pattern.shapes.index(shape)]
            observed += observed_in_run(request, batch, shape, captures.source.balancing.finds_cuts)
            return replace(request, seen=observed[0][2])
        guessed = captures.regions.guessed({region.name for region in request.whole}, shape, this.training)
        return replace(request, seen={**declared(request), **guessed})

    def _shares(self, captures: Captures, this: Pattern, examined: Examined) -> dict[str, float]:
        """Region → its fraction of a step's FLOPs, forward and backward; empty if the costs are not known. FLOPs, not
        seconds: the number of kernels is not known for code that cannot run on fake tensors."""
        program = examined.cut
        try:
            assert this.shape is not None
            costs = captures.source.balancing.costs(program, self.pattern, this.shape)
        except CostUnknown:
            return {}
        total = sum(cost.flops + cost.backward_flops for cost in costs.nodes.values()) or 1.0
        shares: dict[str, float] = {}
        for node in program.nodes:
            part = (costs[node.name].flops + costs[node.name].backward_flops) / total
            for name in {call.name for call in opaque_calls(program.opaque.get(str(node.target)))}:
                shares[name] = shares.get(name, 0.0) + part
        return shares

    def _examined(self, captures: Captures, this: Pattern, request: Request, program: Program) -> Examined:
        """Cuts a tracer's program into stages and checks them against the model; TraceError if they differ."""
        wrong = {**captures.wrong, **self.wrong}
        for training in (True, this.training):  # evaluation does not try a tracer that is wrong in training
            if (training, program.tracer) in wrong:
                raise TraceError(wrong[training, program.tracer])
        _check_unchanged(captures, this)
        examined = cut(captures, program, request, self.pattern, this)
        with ignoring_reads():
            checked = self._checked(captures, this, examined.captured, request)
            if checked.startswith(NOT_CHECKED) and captures.first is None and this.training:
                check_rows_apart(captures.source, examined.cut, self.pattern, this.shape)
        return examined._replace(checked=checked)

    def _checked(self, captures: Captures, this: Pattern, captured: Captured, request: Request) -> str:
        """Runs the stages against the model and returns the outcome in words; TraceError if they differ."""
        sample, guard, options = self.sample, captured.guard, captures.source.options

        def holds(batch: Mapping[str, Any]) -> bool:
            return set(guard.answers) <= set(captures.questions.answers(batch) if guard.answers else ())

        if isinstance(sample, str) or not options.tracing.check:  # the sample then only shows what regions do
            return f"{NOT_CHECKED}: {sample if isinstance(sample, str) else 'fxpipe.Tracing(check=False)'}"
        # The micro-batches for which this capture is valid: all of this shape, or all with the same inputs.
        each = [pattern if guard.sizes else pattern.for_any_shape() for pattern in self.pattern.each()]
        numbers = [number for number, pattern in enumerate(each) if pattern in (this, this.for_any_shape())]
        try:
            with progress("checking the stages against the model"):
                return check(captured.graph, request, sample, numbers, holds, options.loss_weight)
        except TraceError as error:
            if not sample.later and not request.any_words:  # later, this tracer's other captures are in use
                self.wrong[request.training, captured.tracer] = str(error)
            raise


class _TracedProgram(NamedTuple):
    """A capture before its cut, which is the same for all topologies."""

    program: Program
    request: Request
    added: Mapping[str, str]
    """The regions that became opaque, with a reason each."""
    observed: list[Observed]
    noted: set[tuple[int, str]]
    """The attributes that the capture read."""


def _shows_regions(sample: Sample | str, model: nn.Module, this: Pattern) -> TypeGuard[Sample]:
    """Whether the model can run on a micro-batch of the sample, to show what opaque regions return."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    return isinstance(sample, Sample) and not sample.later and this.shape is not None and not on_meta


def _reads(captures: Captures, program: Program, request: Request, noted: set[tuple[int, str]]) -> Reads:
    """The reads with this capture's reads. Only attributes that were traced through are compared: a submodule that
    stages call sees its own changes."""
    own = {  # attributes that regions set: only regions read them, or a capture refuses them
        (id(vars(captures.source.model.get_submodule(path))), name)
        for seen in request.seen.values()
        for path, name in seen.sets
    }
    return captures.reads.with_capture(noted - own, request, program)


def _with_objects(captures: Captures, name: str, value: Any) -> Any:
    """An input with its objects in place of their descriptions; TraceError if this rank lacks an object."""

    def looked_up(value: ObjectValue) -> Any:
        if value not in captures.objects:
            raise TraceError(
                f"input {name!r} is or holds {value}, on which forward may branch, and this rank was given None; "
                "pass it on all ranks of a pipe group"
            )
        return captures.objects[value]

    return pytree.tree_map_only(ObjectValue, looked_up, value)


def _check_unchanged(captures: Captures, this: Pattern) -> None:
    """TraceError if forward has changed an object among its inputs."""
    inputs = this.given[0]
    inside = ((name, leaf) for name, _, leaves in inputs.holding for leaf in leaves)
    for name, value in (*inputs.fixed, *inside):
        if isinstance(value, ObjectValue) and spec_of(captures.objects[value]) != value:
            raise TraceError(
                f"forward changes {value}, which is or is in input {name!r}, while it is captured, and no stage "
                "would do so; return what it computes, or keep it in a tensor"
            )


def _reports(captures: Captures, captured: Captured, training: bool) -> tuple[str, ...]:
    """The reports to the user, with those about the latest capture."""
    guards = [guard for guard in captures.guards if guard.values.training == training]
    shapes = [guard.shape for guard in guards if guard.shape is not None]
    reports = [f"fxpipe: {captured.fixed_sizes}"] if captured.fixed_sizes else []
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
