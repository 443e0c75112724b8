"""A rehearsal: forward is run once on fake tensors as ``torch.export`` runs it, to tell which capture it would give.

Under the same guard, so that what an export would refuse is not taken from a cache either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fxpipe.graph.modes import within
from fxpipe.torch_compat import FakeTensorMode, exporting, pytree
from fxpipe.trace.cached.facts import facts, sources
from fxpipe.trace.cached.not_kept import NotKept
from fxpipe.trace.cached.operator_digest import OperatorDigest, fakes_of
from fxpipe.trace.export.guard import TracingGuard
from fxpipe.trace.export.tracer import ExportedCall
from fxpipe.trace.fake import fake_model, needs_values, quiet
from fxpipe.trace.patching import aside
from fxpipe.trace.request import Request


@dataclass(frozen=True)
class RunOnFakes:
    """What a run on fake tensors has shown. ``key``: the same for two runs that give the same capture."""

    key: str
    values: Mapping[str, Any]
    """The inputs, on fake tensors of ``mode``."""
    mode: FakeTensorMode
    result: pytree.TreeSpec
    boundaries: int
    operators: frozenset[Any]
    """Those that were called, below autograd."""


def rehearse(request: Request) -> RunOnFakes:
    """NotKept where forward cannot be run so, or where what it does is not all seen."""
    try:
        with quiet():
            return _rehearse(request)
    except NotKept:
        raise
    except Exception as error:  # what is wrong with it, an export says better
        asks = "forward asks for the value of a tensor, and a run without numbers has none"
        raise NotKept(asks if needs_values(error) else f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _rehearse(request: Request) -> RunOnFakes:
    assert request.example is not None
    with aside():
        known = facts(request)
        own = {f"{name} itself": tensor for name, tensor in _own(request.module).items()}  # that a list holds, say
    guard = TracingGuard(request.module, request.loss_module)
    with guard.preserving(), fake_model(request.module, request.device, request.compute) as fake:
        call = ExportedCall(request, guard, fake.inputs(request.example), {})
        given = _own(request.module) | own | fakes_of(call.values)
        digest = OperatorDigest(given, _paths(request))
        with exporting(), within(request.autocast), fake.mode, digest.watching():
            call.flat(request.module, call.tensors, ())
            known += [str(call.spec), *map(digest.value, call.returned)]
        if guard.random.rewind():
            raise NotKept("Python's, NumPy's or torch's random numbers are drawn outside of operators")
    with aside():
        known += [digest.hexdigest(), str(guard.cached_regions), *sources(digest.files)]
    key = hashlib.sha256("\n".join(known).encode("utf-8", "surrogatepass")).hexdigest()
    return RunOnFakes(key, call.values, fake.mode, call.spec, call.boundaries, digest.operators)


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _paths(request: Request) -> dict[int, str]:
    """The submodules of the model, and of a loss function that is one."""
    loss = request.loss_module
    named = [(f"loss_fn {path}", part) for path, part in loss.named_modules()] if loss is not None else []
    return {id(vars(part)): path for path, part in [*named, *request.module.named_modules()]}
