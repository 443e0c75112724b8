"""``TRACERS``: the front ends. A tracer is a function from a ``Capture`` to a ``Program``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fxpipe.errors import TraceError, nearest
from fxpipe.ir import Program
from fxpipe.trace.request import Request
from fxpipe.trace.symbolic import symbolic

Tracer = Callable[[Request], Program]

TRACERS: Mapping[str, Tracer] = MappingProxyType({"symbolic": symbolic, "auto": symbolic})


def capture(request: Request, tracer: str = "auto") -> Program:
    """Captures a model with the tracer of that name; TraceError where it is unknown or must refuse."""
    if tracer not in TRACERS:
        raise TraceError(f"unknown tracer {tracer!r}{nearest(tracer, TRACERS)}")
    return TRACERS[tracer](request)


__all__ = ["TRACERS", "Request", "Tracer", "capture"]
