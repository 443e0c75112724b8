"""The export tracer: ``torch.export``'s, on fake tensors. It needs shapes, and sees every operation."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError
from fxpipe.graph.boundary import Gather, recording, words
from fxpipe.graph.like import TensorLike
from fxpipe.graph.modes import within
from fxpipe.graph.program import Program
from fxpipe.torch_compat import DataDependentOutputException, DynamicOutputShapeException, guard_on_data, pytree
from fxpipe.trace.crossing import check_boundaries, crossing
from fxpipe.trace.cutting import cutting
from fxpipe.trace.export.boundary_operator import marked
from fxpipe.trace.export.conversion import TENSOR, Traced, modes_as_operations
from fxpipe.trace.export.guard import PLAIN, RandomWatch, TracingGuard, random_numbers_drawn
from fxpipe.trace.fake import fake_model
from fxpipe.trace.patching import plain_modes
from fxpipe.trace.request import Request
from fxpipe.trace.user_line import line_of

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, guard_on_data())

_COMPUTED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""What a graph computes: tensors, and Python numbers that are the values of tensors."""


@plain_modes()
def export(request: Request) -> Program:
    """Captures by running forward on fake tensors; TraceError for what a graph cannot hold, with the user's line."""
    assert request.example is not None
    _refuse_objects(request.example)
    guard = TracingGuard(request.module, request.loss_module)
    with guard.preserving():
        with fake_model(request.module, request.device, request.compute) as fake:
            call = _ExportedCall(request, guard, fake.inputs(request.example))
            exported = _exported(call)
        program = call.traced(exported).program()
    check_boundaries(program.graph, call.boundaries)
    return program


def _refuse_objects(example: Mapping[str, Any]) -> None:
    """What an object holds would be the same in every micro-batch."""
    for name, value in example.items():
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, (TensorLike, *PLAIN)):
                raise TraceError(
                    f"input {name!r} holds a {type(leaf).__name__}, which is neither a tensor nor a plain value, and a "
                    "graph would keep the one of this call; pass its tensors in a tuple, a list or a dict"
                )


def _exported(call: _ExportedCall) -> torch.export.ExportedProgram:
    printed = io.StringIO()  # where it fails, torch.export prints all that it has of the graph
    try:
        with within(call.request.autocast), modes_as_operations(), contextlib.redirect_stderr(printed):
            exported = torch.export.export(_Root(call), (call.tensors,), strict=False)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(_explain(error)) from error
    sys.stderr.write(printed.getvalue())
    if call.guard.random.rewind():
        raise _where_drawn(call)
    return exported


def _explain(error: Exception) -> str:
    line = line_of(error)
    at = f"\n{line}" if line else ""
    if isinstance(error, _NEEDS_VALUES):
        return (
            "forward branches on the value of a tensor, or asks for it, and a capture knows shapes only; use "
            f"torch.where, or tracer='record' where the branch is inside a submodule{at}"
        )
    return f"torch.export cannot follow the model: {type(error).__name__}: {error}{at}"


def _where_drawn(call: _ExportedCall) -> TraceError:
    """Runs the call once more, watched, to find the line."""
    try:
        with RandomWatch(call.guard.random):
            call.run(call.request.module, call.values)
    except TraceError as error:
        return error
    return random_numbers_drawn()


class _ExportedCall:
    """The call that is exported: from the tensors among the inputs to the tensors of the result."""

    def __init__(self, request: Request, guard: TracingGuard, values: Mapping[str, Any]) -> None:
        self.request, self.guard, self.values = request, guard, values
        self.boundaries = 0
        self._result: list[Any] = []
        self._spec = pytree.tree_structure(None)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(dict(self.values)) if isinstance(leaf, Tensor)]

    def flat(self, model: nn.Module, tensors: Sequence[Tensor]) -> list[Any]:
        """What the model computes of these tensors; keeps what else is in its result."""
        given = iter(tensors)
        values = pytree.tree_map_only(Tensor, lambda _: next(given), dict(self.values))
        leaves, self._spec = pytree.tree_flatten(self.run(model, values))
        self._result = [_kept(leaf) for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, _COMPUTED)]

    def run(self, model: nn.Module, values: Mapping[str, Any]) -> Any:
        """Calls the model, or the stand-in for it by which torch.export tells the submodules of a call."""
        self.boundaries = 0
        request = replace(self.request, module=model)
        cuts = cutting(self.request.module, request.cuts, request.may_lack_cuts)
        with recording(self._record), cuts, self.guard.forward():
            return request.wanted(request.call(values))

    def _record(self, value: Any, name: str | None, gather: Gather | None) -> Any:
        def carry(tensors: list[Tensor]) -> Sequence[Tensor]:
            self.boundaries += 1
            behind: Sequence[Tensor] = marked(tensors, *words(name, gather))
            return behind

        return crossing(value, lambda leaf: isinstance(leaf, Tensor), carry)

    def traced(self, exported: torch.export.ExportedProgram) -> Traced:
        cached = tuple(self.guard.cached_regions)
        return Traced(exported, self.request.module, self.values, self._result, self._spec, cached)


class _Root(nn.Module):
    """What torch.export is given. It calls a stand-in for this module, so nothing is kept here."""

    def __init__(self, call: _ExportedCall) -> None:
        super().__init__()
        self.model = call.request.module
        self._flat = call.flat

    def forward(self, tensors: Sequence[Tensor]) -> list[Any]:
        return self._flat(self.model, tensors)


def _kept(leaf: Any) -> Any:
    """A leaf of the result as a graph can return it; None for an object such as a cache of keys and values."""
    if isinstance(leaf, _COMPUTED):
        return TENSOR
    return leaf if isinstance(leaf, PLAIN) else None
