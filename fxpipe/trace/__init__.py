"""``TRACERS``: the front ends. A tracer is a function from a ``Request`` to a ``Program``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fxpipe.errors import TraceError, nearest
from fxpipe.graph.program import Program
from fxpipe.options import TracerName
from fxpipe.trace.export.tracer import export
from fxpipe.trace.furthest import Refusal, Uncaptured, entering, keep_whole, refused_in, uncaptured
from fxpipe.trace.patching import plain_modes
from fxpipe.trace.record.tracer import record
from fxpipe.trace.request import Cut, Request
from fxpipe.trace.symbolic.tracer import symbolic

Tracer = Callable[[Request], Program]


def auto(request: Request) -> Program:
    """What the first tracer makes, in the order of ``TRACERS``, that can; ``Uncaptured`` with the reasons of all."""
    refusals: list[Refusal] = []
    for name, tracer in TRACERS.items():
        if tracer is auto:
            continue
        if name in NEED_SHAPES and request.example is None:
            break
        try:
            with entering(request.module) as entered:
                program = _traced(tracer, request)
            return _accepted(program.replace(refusals=tuple((one.tracer, one.reason) for one in refusals)), request)
        except TraceError as error:
            refusals.append(Refusal(name, str(error), len(entered), refused_in(error, request)))
    hint = "" if request.example is not None else f"\n{_ASK_FOR_EXAMPLE}"
    raise uncaptured(refusals, request, hint)


def _traced(tracer: Tracer, request: Request) -> Program:
    """What a tracer makes in the grad mode in which the stages will run."""
    with plain_modes(grad=request.training):
        return tracer(request)


def _accepted(program: Program, request: Request) -> Program:
    if request.accept is not None:
        request.accept(program, request)
    return program


TRACERS: Mapping[TracerName, Tracer] = MappingProxyType(
    {"symbolic": symbolic, "export": export, "record": record, "auto": auto}
)
NEED_SHAPES = frozenset({"export", "record"})
"""The tracers whose programs hold for micro-batches of one shape."""
_ASK_FOR_EXAMPLE = (
    "the tracers export and record need the shapes of a batch: pass example_args= or example_kwargs= to "
    "fxpipe.compile, one batch as it will be passed in calls"
)


def capture(request: Request, tracer: TracerName = "auto") -> Program:
    """Captures a model with the tracer of that name; TraceError where it is unknown, refuses, or is not accepted."""
    if tracer not in TRACERS:
        raise TraceError(f"unknown tracer {tracer!r}{nearest(tracer, TRACERS)}")
    if tracer in NEED_SHAPES and request.example is None:
        raise TraceError(_ASK_FOR_EXAMPLE)
    if tracer == "auto":
        return auto(request)
    try:
        program = _traced(TRACERS[tracer], request)
    except TraceError as error:
        hint = keep_whole(refused_in(error, request), request)
        raise TraceError(f"{error}{hint}") from error if hint else error.__cause__
    return _accepted(program, request)


__all__ = ["NEED_SHAPES", "TRACERS", "Cut", "Request", "Tracer", "Uncaptured", "capture"]
