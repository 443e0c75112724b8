"""The export tracer: ``torch.export`` on fake tensors. It needs the batch's shapes, and records every operator.

Takes: a ``Request`` with an example. Gives: a ``Program`` of ATen operators, valid for the example's sizes, except for
the dimensions in ``request.varying`` that stay symbolic.

1. Fake tensors replace parameters, buffers and the example's tensors.
2. ``torch.export.export`` runs forward. Boundaries and opaque regions are operators of fxpipe, so that export keeps
   them.
3. ``TracingGuard`` refuses effects that a graph of operators cannot hold, and ``Decisions`` answers questions about
   values.
4. ``Conversion`` turns the exported program into a ``Program`` with the model's names.
5. If forward asked for an unknown value, the program computes this value instead. ``request.ask`` gets it, and raises
   ``Unanswered`` so that the capture starts again with the answer.

A size may stay symbolic in the export and still be fixed by the code. ``export`` therefore captures up to three times:
with all varying dimensions, without the lengths of lists, and without symbolic sizes.

It refuses branches on values without an answer, an ``autograd.Function``, activation checkpoints and hooks on
gradients.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind

from fxpipe.errors import FxpipeError, RunError, TraceError
from fxpipe.graph.boundary import Gather, recording, words
from fxpipe.graph.program import Program
from fxpipe.patches import replaced
from fxpipe.specs import TensorSpec
from fxpipe.stage.modes import within
from fxpipe.stage.opaque_call import PLAIN_LEAF, TENSOR, OpaqueCall, opaque_calls
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.export import module_calls_ended
from fxpipe.torch_compat.fakes import DataDependentOutputException, DynamicOutputShapeException
from fxpipe.torch_compat.sizes import GuardOnDataDependentSymNode, sizes_like_any
from fxpipe.trace.cuts.cutting import check_boundaries, crossing, cutting
from fxpipe.trace.export.conversion import Conversion, modes_as_operations
from fxpipe.trace.export.decisions import Asked, Decisions, fixing_lines, symbolic_lengths
from fxpipe.trace.export.guard import RandomWatch, TracingGuard, refuse_random_numbers
from fxpipe.trace.export.layer_calls import Differs
from fxpipe.trace.export.operators import SizeClauses, marked, whole
from fxpipe.trace.export.repeats import Repeats, expand
from fxpipe.trace.fake import fake_model, refuse_objects
from fxpipe.trace.opaque.region_calls import RegionCall, Regions
from fxpipe.trace.patching import as_in_run, refuse
from fxpipe.trace.request import Place, Request, named
from fxpipe.user_line import is_torchs, line_of

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

_LINES = 3
"""The number of user lines that a message shows."""
_COMPUTED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""The types of the values that a graph computes: tensors, and Python numbers that depend on tensors."""


def export(request: Request) -> Program:
    """Captures by running forward on fake tensors. Dimensions that vary stay symbolic if the model allows it; otherwise
    ``Program.fixed_sizes`` says why not.

    Args:
        request: needs ``example``; ``varying`` says which dimensions may stay symbolic.

    Raises:
        TraceError: for code that no graph can hold, with the user's line.
        RunError: forward itself raised an error on the way that answers of the batch chose.
        Unanswered: forward asked a question about the inputs (raised by ``request.ask``).
    """
    capture = _export_regions if request.seen else _export
    if not request.varying:
        return capture(request)
    try:
        program = capture(request)
        opened = [call for part in program.opaque.values() for call in opaque_calls(part) if call.opened]
        lists = [opened for call in opened for opened in call.opened if not opened.unpacked]
        counted = _as_large(request, {opened.count for opened in lists})
        if not counted:
            return program
        # a list has one entry for each image, say: the capture is valid for that number of images alone,
        # so this captures again with that dimension as a number
        made_again = capture(replace(request, varying=request.varying - counted))
        looks = " and ".join(f"forward looks at entries of a list that {call.name} returns" for call in opened)
        lines = [f"{looks}, so each number of them takes a capture", *dict.fromkeys(each.opened_at for each in lists)]
        return made_again.replace(fixed_sizes="\n".join(filter(None, [*lines, made_again.fixed_sizes])))
    except TraceError as error:
        why = f"torch.export takes no symbolic size of {named(request.varying)}: {error}"
    return capture(replace(request, varying=frozenset())).replace(fixed_sizes=why)


def _as_large(request: Request, counts: Collection[int]) -> frozenset[Place]:
    """The varying dimensions whose size in the example is one of ``counts``, the lengths of lists."""
    leaves = {name: pytree.tree_leaves(value) for name, value in (request.example or {}).items()}
    return frozenset(dim for dim in request.varying if leaves[dim[0]][dim[1]].shape[dim[2]] in counts)


def _export(request: Request) -> Program:
    """Exports, and exports again if forward sets memos, with these set: TraceError if the second call sets others, or
    computes something else."""
    program = _export_call(request)
    if program.memos:
        with replaced(program.memos):
            again = _export_call(request)
        if again.memos or f"{again}" != f"{program}":
            names = ", ".join(name for _, name, _ in (*program.memos, *again.memos))
            raise TraceError(f"forward sets {names} in its first call, and does something else in its second call")
    return program


@as_in_run
def _export_call(request: Request) -> Program:
    guard = TracingGuard(request)
    repeats = Repeats(request, lambda: guard.own.read)
    try:
        return _export_once(request, guard, repeats)
    except (Differs, FxpipeError):
        if not repeats.followed:
            raise
    return _export_once(request, TracingGuard(request))


def _export_once(request: Request, guard: TracingGuard, repeats: Repeats | None = None) -> Program:
    assert request.example is not None
    refuse_objects(request.example)
    with guard.preserving():
        # 1. fake tensors
        with fake_model(request.module, request.device, request.compute) as fake:
            stand_ins = {key: list(map(fake.leaf, seen.specs)) for key, seen in request.seen.items()}
            call = ExportedCall(request, guard, repeats, fake.inputs(request.example, request.any_words), stand_ins)
            # 2. and 3. the export
            with fixing_lines() as lines:  # stays empty if no size is symbolic
                exported = _exported(call)
        # 4. the program
        program = call.program(exported).replace(
            sets=guard.own.taken, memos=tuple(guard.memos), fixed_sizes=call.fixed_sizes(exported, lines)
        )
    answers = tuple(call.decisions.used.items())
    # 5. a question
    if call.question is not None:
        request.ask(request, program, call.question, answers)
        raise TraceError(_branches(call.question.line)) from call.question
    check_boundaries(program.graph, call.boundaries)
    return program.replace(answers=answers)


def _export_regions(request: Request) -> Program:
    """Exports, and exports again with larger sizes if the program assumes a size of 0 or 1 in a region's result. The
    second program is returned if it is valid for the seen sizes, too: it is more general."""
    program = _export(request)
    if not any(guard.is_of_few for guard in _guards(program)):
        return program
    # with sizes of 3 in place of 0 and 1, which torch.export specializes
    try:
        wider = _export(replace(request, seen={key: seen.general for key, seen in request.seen.items()}))
    except TraceError:
        return program
    assert request.example is not None
    specs = [leaf for leaf in pytree.tree_leaves(dict(request.example)) if isinstance(leaf, TensorSpec)]
    specs += [spec for seen in request.seen.values() for spec in seen.specs]
    shapes = dict(enumerate(spec.shape for spec in specs))
    return wider if all(guard.broken(shapes) is None for guard in _guards(wider)) else program


def _guards(program: Program) -> list[SizeClauses]:
    """The size conditions that a program assumes for the results of regions."""
    guards = [module.guard for module in program.opaque.values() if isinstance(module, OpaqueCall)]
    return [guard for guard in guards if isinstance(guard, SizeClauses)]


def _exported(call: ExportedCall) -> torch.export.ExportedProgram:
    """Runs ``torch.export`` on a call.

    These are the failures:

    - fxpipe's own errors pass through.
    - An unanswered question, and an operation that needs values, become "forward branches on a value".
    - An error of the user's code after an answer is a RunError, since a run would raise it, too.
    - Any other error is quoted in a TraceError.

    If Python code drew random numbers, it exports again with ``RandomWatch`` to find the line.
    """
    printed = io.StringIO()  # on failure, torch.export prints the graph that it has so far
    arguments = call.tensors, [tensor for returned in call.stand_ins.values() for tensor in returned]
    sizes = call.dynamic_shapes if call.request.varying or call.stand_ins else None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(within(call.request.autocast))
            stack.enter_context(modes_as_operations())
            stack.enter_context(contextlib.redirect_stderr(printed))
            if call.stand_ins:
                stack.enter_context(sizes_like_any())
            if sizes is not None:
                stack.enter_context(symbolic_lengths())
            exported = torch.export.export(_Root(call), arguments, dynamic_shapes=sizes, strict=False)
    except FxpipeError:
        raise
    except Exception as error:
        if call.question is not None:  # forward asked for a value that the graph does not compute
            raise TraceError(_branches(call.question.line)) from call.question
        *_, (raised_in, _) = traceback.walk_tb(error.__traceback__)
        if call.decisions.used and not is_torchs(raised_in.f_code.co_filename):
            raise RunError(f"forward raised {type(error).__name__}: {error}\n{line_of(error)}") from error
        line = line_of(error)
        if isinstance(error, _NEEDS_VALUES):
            raise TraceError(_branches(line)) from error
        text = f"torch.export cannot follow the model: {type(error).__name__}: {error}\n{line}".rstrip()
        raise TraceError(text) from error
    sys.stderr.write(printed.getvalue())
    if call.guard.random.rewind():
        if call.is_watched:  # the code behind forward's last operation drew
            refuse_random_numbers()
        call.is_watched = True  # exports again to find the line, which may be in a part that can be opaque
        return _exported(call)
    return exported


def _branches(line: str) -> str:
    """The message for code that reads a value, with the user's line."""
    return (
        "forward branches on the value of a tensor, or asks for it, and a capture knows shapes only; use torch.where, "
        f"or tracer='record' where the branch is inside a submodule\n{line}"
    ).rstrip()


@dataclass(eq=False)
class ExportedCall:
    """The call that torch.export traces: it takes the inputs' tensors, and returns the result's tensors.

    torch.export accepts flat tensors only. So the call rebuilds the inputs around the traced tensors, and flattens the
    result. It keeps the result's other leaves and structure for the program. The export may run the call several
    times: all that is kept is from the last run.
    """

    request: Request
    guard: TracingGuard
    repeats: Repeats | None
    values: Mapping[str, Any]
    stand_ins: Mapping[tuple[str, int], list[Tensor]]

    def __post_init__(self) -> None:
        self.decisions = Decisions(self.request.answers, self.request.asks_numbers)
        self.question: Asked | None = None
        """The unanswered question at which forward ended, if any; the export then computes the value asked for."""
        self.boundaries, self.is_watched = 0, False
        self._given: dict[tuple[str, int], list[Tensor]] = {}
        self.regions = Regions(self.request, lambda leaf: isinstance(leaf, _COMPUTED), self._keep)
        self._result: list[Any] = []
        self._spec = pytree.tree_structure(None)
        """The pytree structure of the result."""
        self._leaves = [
            (name, index, leaf)
            for name, value in self.values.items()
            for index, leaf in enumerate(pytree.tree_leaves(value))
            if isinstance(leaf, Tensor)
        ]
        """The inputs' tensors: (input's name, index of the leaf in the input, tensor)."""

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for _, _, leaf in self._leaves]

    @property
    def dynamic_shapes(self) -> tuple[list[dict[int, Any]], list[dict[int, Any]]]:
        """The dimensions of ``tensors``, and of the stand-ins, that torch.export keeps symbolic if the model allows
        it."""
        varying = self.request.varying
        inputs = [
            {dim: Dim.AUTO for dim in range(leaf.dim()) if (name, index, dim) in varying}
            for name, index, leaf in self._leaves
        ]
        returned = [leaf for leaves in self.stand_ins.values() for leaf in leaves]
        return inputs, [dict.fromkeys(range(leaf.dim()), Dim.AUTO) for leaf in returned]

    def fixed_sizes(self, exported: torch.export.ExportedProgram, lines: Sequence[tuple[str, bool]]) -> str:
        """A message with the varying dimensions that the capture fixed to a number, and the user lines that did so."""
        varying = self.request.varying
        inputs = [node for node in exported.graph.nodes if node.op == "placeholder"]
        specs = zip(inputs, exported.graph_signature.input_specs, strict=True)
        tensors = [node.meta["val"] for node, spec in specs if spec.kind is InputKind.USER_INPUT]
        places = [
            (name, index, dim)
            for (name, index, _), tensor in zip(self._leaves, tensors, strict=False)
            for dim, size in enumerate(tensor.shape)
            if (name, index, dim) in varying and not (isinstance(size, torch.SymInt) and size.node.expr.free_symbols)
        ]
        # a region's result has symbolic sizes, too, and the code may compare one to its own number: .expand(3, -1, -1)
        shown = list(dict.fromkeys(line for line, of_size in lines if line and (places or not of_size)))[:_LINES]
        if not varying or not (places or shown):
            return ""
        what = f"the size of {named(places)}" if places else "a size"
        return "\n".join([f"forward makes a number of Python's of {what}, so each takes a capture", *shown])

    def flat(self, model: nn.Module, tensors: Sequence[Tensor], stand_ins: Sequence[Tensor]) -> list[Any]:
        """The tensors that the model, or torch.export's stand-in for the model, computes from these tensors. Stores
        the result's other leaves and structure."""
        inputs, results = iter(tensors), iter(stand_ins)
        self._given = {key: list(islice(results, len(leaves))) for key, leaves in self.stand_ins.items()}
        values = pytree.tree_map_only(Tensor, lambda _: next(inputs), dict(self.values))
        try:
            with module_calls_ended():
                result = self.result(model, values)
        except Asked as question:
            self.question, result = question, question.value
        returned, self._spec = pytree.tree_flatten(result)
        # the graph's result leaves out objects, such as a cache of keys and values
        self._result = [
            TENSOR if isinstance(leaf, _COMPUTED) else leaf if isinstance(leaf, PLAIN_LEAF) else None
            for leaf in returned
        ]
        if self.repeats is not None:
            self.repeats.check_outside(returned)
        return [leaf for leaf in returned if isinstance(leaf, _COMPUTED)]

    def result(self, model: nn.Module, values: Mapping[str, Any]) -> Any:
        """Calls the model, or torch.export's stand-in for it, with everything that the tracer watches; returns the part
        of the result that the program returns."""
        # torch.export may run forward several times: only the last run's boundaries count
        self.boundaries = 0
        request = replace(self.request, module=model)
        cuts = cutting(self.request.module, request.cuts, request.may_lack_cuts)
        asking = self.decisions.answered()
        watch = RandomWatch(self.guard.random) if self.is_watched else contextlib.nullcontext()
        repeats = contextlib.nullcontext() if self.repeats is None or self.is_watched else self.repeats.watched()
        with asking, watch, recording(self._record), self.regions.as_nodes(), repeats, cuts, self.guard.tracing():
            return request.wanted(request.call(values))

    def _record(self, value: Any, name: str | None, gather: Gather | None) -> Any:
        """The tensors after a boundary, by the operator ``marked``, which export records."""

        def carry(tensors: list[Tensor]) -> Sequence[Tensor]:
            self.boundaries += 1
            behind: Sequence[Tensor] = marked(tensors, *words(name, gather))
            return behind

        return crossing(value, lambda leaf: isinstance(leaf, Tensor), carry)

    def _keep(self, call: RegionCall) -> list[Tensor]:
        """The traced stand-ins for the tensors that a region's call returns."""
        tensors = [value for value in call.values if isinstance(value, Tensor)]
        numbers = [value for value in call.values if not isinstance(value, Tensor)]
        other = next((value for value in numbers if not isinstance(value, torch.SymInt)), None)
        if other is not None or call.key not in self._given:
            raise refuse(
                f"{call.region.name}, an opaque region, is given {other!r}, a number of no whole kind or "
                "called more often than it was seen to be",
                "give it a tensor",
            )
        returned = whole(tensors, numbers, self._given[call.key], len(self.regions.calls) - 1)
        specs = call.seen.specs
        return [tensor if spec.requires_grad else tensor.detach() for tensor, spec in zip(returned, specs, strict=True)]

    def program(self, exported: torch.export.ExportedProgram) -> Program:
        """The converted program; its result is the asked value if forward ended at a question."""
        expand(exported)
        module, calls, of_any_size = self.request.module, self.regions.calls, self.question is not None
        program = Conversion(exported, module, self.values, self._result, self.stand_ins, calls, of_any_size).program()
        return program.replace(result=self._spec)


class _Root(nn.Module):
    """The module passed to torch.export. torch.export calls a stand-in for it, so it stores no state."""

    def __init__(self, call: ExportedCall) -> None:
        super().__init__()
        self.model = call.request.module
        self._flat = call.flat

    def forward(self, tensors: Sequence[Tensor], stand_ins: Sequence[Tensor]) -> list[Any]:
        return self._flat(self.model, tensors, stand_ins)
