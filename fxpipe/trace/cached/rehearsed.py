"""A rehearsal: forward is run once on fake tensors as ``torch.export`` runs it, to tell which capture it would give.

Under the same guard, so that what an export would refuse is not taken from a cache either. What a capture computes is
compared to it: forward may do something else each time it is called, or while it is traced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.graph.boundary import boundary
from fxpipe.graph.modes import Modes, within
from fxpipe.graph.program import Program
from fxpipe.torch_compat import FakeTensorMode, exporting, pytree
from fxpipe.trace.cached.facts import facts, sources
from fxpipe.trace.cached.not_kept import NotKept
from fxpipe.trace.cached.operator_digest import OperatorDigest, fakes_of
from fxpipe.trace.export.boundary_operator import marked
from fxpipe.trace.export.guard import TracingGuard
from fxpipe.trace.export.tracer import ExportedCall
from fxpipe.trace.fake import fake_model, needs_values, quiet
from fxpipe.trace.patching import aside
from fxpipe.trace.request import Request

_AS_CALLED: Mapping[Any, Any] = {boundary: marked, torch.ops.aten.detach_.default: torch.ops.aten.detach.default}
"""What forward has called in place of what a graph holds; export lets ``torch.tensor`` detach its copy in place."""


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
    done: Sequence[str]
    """Call by call, what was computed of what."""
    outline: Sequence[str]
    """The same of the tensors that were returned."""


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
        own = _own(request.module)  # that a list holds, say
    guard = TracingGuard(request.module, request.loss_module)
    with guard.preserving(), fake_model(request.module, request.device, request.compute) as fake:
        call = ExportedCall(request, guard, fake.inputs(request.example), {})
        digest = OperatorDigest([*own, *_own(request.module), *fakes_of(call.values)], _paths(request))
        with exporting(), within(request.autocast), fake.mode, digest.watching():
            call.flat(request.module, call.tensors, ())
            known += [str(call.spec), *map(digest.value, call.returned)]
        if guard.random.rewind():
            raise NotKept("Python's, NumPy's or torch's random numbers are drawn outside of operators")
    with aside():
        known += [digest.hexdigest(), str(guard.cached_regions), *sources(digest.files)]
    key = hashlib.sha256("\n".join(known).encode("utf-8", "surrogatepass")).hexdigest()
    result, outline = call.spec, digest.outline(call.returned)
    return RunOnFakes(key, call.values, fake.mode, result, call.boundaries, digest.operators, digest.done, outline)


def check_same(program: Program, request: Request, rehearsal: RunOnFakes) -> None:
    """NotKept where the program computes anything else than the rehearsal did, or of anything else."""
    assert request.example is not None
    made: dict[fx.Node, Any] = {}
    with fake_model(request.module, request.device, request.compute) as fake:
        values = fake.inputs(request.example)
        digest = OperatorDigest([*_own(request.module), *fakes_of(values)], {})
        once = torch.autocast("cpu", enabled=False)  # weights that are cast stay known until it is left
        with once, within(request.autocast), fake.mode, digest.watching():
            for node in program.graph.nodes:
                made[node] = _run(program, node, values, made)
    before = iter(rehearsal.done)
    outline = digest.outline(pytree.tree_leaves(made[program.graph.output_node()]))
    if outline != rehearsal.outline or not all(call in before for call in digest.done):
        raise NotKept("forward does something else each time it is called, or while it is traced")


def _run(program: Program, node: fx.Node, values: Mapping[str, Any], made: Mapping[fx.Node, Any]) -> Any:
    if node.op == "placeholder":
        return values[str(node.target)]
    if node.op == "get_attr":
        return program.attribute(str(node.target))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
    if node.op == "output":
        return args
    function: Any = _AS_CALLED.get(node.target, node.target)
    modes = node.meta.get("modes", Modes())
    with within(modes.autocast), torch.set_grad_enabled(modes.grad is not False):
        return function(*args, **kwargs)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_buffers(), *module.named_parameters()]


def _paths(request: Request) -> dict[int, str]:
    """The submodules of the model, and of a loss function that is one."""
    loss = request.loss_module
    named = [(f"loss_fn {path}", part) for path, part in loss.named_modules()] if loss is not None else []
    return {id(vars(part)): path for path, part in [*named, *request.module.named_modules()]}
