"""Observed: what calls of opaque regions do, seen in one real run of the model on a micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fxpipe.errors import TopologyError, TraceError
from fxpipe.graph.boundary import recording
from fxpipe.graph.like import TensorLike
from fxpipe.graph.modes import within
from fxpipe.graph.opaque_call import TENSOR, Structure, unwritten
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.torch_compat import pytree
from fxpipe.trace.cuts.cutting import cutting
from fxpipe.trace.opaque.outside import assigns, buffers, held, persistent, state_of, switches
from fxpipe.trace.opaque.region_calls import watching
from fxpipe.trace.opaque.regions import Region, SeenCall
from fxpipe.trace.patching import refuse
from fxpipe.trace.record.touched import PythonState, TouchedMode
from fxpipe.trace.request import Request
from fxpipe.trace.state.reads import Reads
from fxpipe.trace.state.replay import Batch, as_in_a_step, gpus_of, own
from fxpipe.trace.state.snapshot import Attributes, State, storage_of
from fxpipe.trace.user_line import line_of

SeenCalls = Mapping[tuple[str, int], SeenCall]


def declared(request: Request) -> dict[tuple[str, int], SeenCall]:
    """What the user has said that regions return."""
    found = {}
    for region in request.whole:
        if region.returns is not None:
            parts = (region.path,) if region.method == "__call__" else ()
            names = {id(tensor): name for name, tensor in reversed(all_tensors(request.module).items())}
            used = [tensor for path in parts for tensor in all_tensors(request.module.get_submodule(path)).values()]
            reads = dict.fromkeys(names[id(tensor)] for tensor in used)
            returned = _described(region, region.returns, may_need_gradient=True)
            found[region.name, 0] = SeenCall(returned, parts, tuple(reads))
    return found


def observe(request: Request, batch: Batch, called: set[str]) -> SeenCalls:
    """Runs the model once on a micro-batch, and returns what each call of a region did. All that changes is put back.

    ``called``: the names of regions that are called, be it inside of others, are added to it. TraceError where the
    model fails, or a region does what it may not.
    """
    modules = [module for module in (request.module, request.loss_module) if module is not None]
    devices = gpus_of(modules)
    state, observer = State.of(modules, devices), _Observer(request)
    try:
        with as_in_a_step(request, devices), recording(observer.boundary):
            inputs = own(request, batch)
            with (
                watching(request.module, request.whole, observer.call),
                cutting(request.module, request.cuts, may_lack=True),
                within(request.autocast),
            ):
                request.call(inputs)
    except (TopologyError, TraceError):
        raise
    except Exception as error:
        raise TraceError(
            "the model cannot run on a micro-batch of the example, by which is seen what an opaque region "
            f"returns: {type(error).__name__}: {error}\n{line_of(error)}"
        ) from error
    finally:
        state.restore()
        called |= observer.called
    return observer.calls()


def check_called(request: Request, called: set[str]) -> None:
    """TraceError for a region that the model calls neither in training nor in evaluation."""
    never = [region.name for region in request.whole if region.name not in called]
    if never:
        raise TraceError(
            f"boundaries= keeps {', '.join(never)} whole, which {type(request.module).__name__}.forward never calls "
            "with these inputs, in training or in evaluation; name what runs, or give an example batch with all that "
            "the model takes: a later batch may lack some"
        )


class _Observer:
    def __init__(self, request: Request) -> None:
        self._seen: dict[tuple[str, int], SeenCall] = {}
        self._noted: dict[tuple[str, int], set[tuple[int, str]]] = {}
        self._module = request.module
        self._inside: Region | None = None
        self.called: set[str] = set()
        """The regions that were, be it inside of others."""
        self._paths = {id(vars(part)): path for path, part in request.module.named_modules()}
        self._names = {id(tensor): name for name, tensor in reversed(all_tensors(request.module).items())}

    def calls(self) -> SeenCalls:
        """Those that have been seen."""
        sets = {pair for call in self._seen.values() for pair in call.sets}
        asked = {key: {(self._paths.get(owner, ""), name) for owner, name in self._noted[key]} for key in self._seen}
        used: dict[str, dict[str, None]] = {}  # by another call, which another stage may hold
        for (name, _), call in self._seen.items():
            used.setdefault(name, {}).update(dict.fromkeys(call.reads))
        return {
            key: replace(call, asks=frozenset(sets & asked[key]), reads=tuple(used[key[0]]))
            for key, call in self._seen.items()
        }

    def boundary(self, value: Any, name: str | None, gather: Any) -> Any:
        if self._inside is not None:
            raise refuse(
                f"a boundary lies inside of {self._inside.name}, an opaque region: one call in one stage",
                "leave out one of them, or name smaller parts that are to be whole",
            )
        return value

    def call(self, region: Region, number: int, inner: Any, args: Any, kwargs: Any) -> Any:
        self.called.add(region.name)
        if self._inside is not None:
            return inner(*args, **kwargs)
        self._inside = region
        state, tensors = PythonState(self._module), list(all_tensors(self._module).items())
        states = [state_of(tensor) for _, tensor in tensors]
        attributes = Attributes(dict(self._module.named_modules()), tensors=True)
        held_before = [(place, held(place)) for place in buffers(self._module, [self._module])]
        called: list[nn.Module] = []
        try:
            mode = TouchedMode()
            with (
                unwritten(region.name, (args, kwargs)),
                _noting_calls(called),
                Reads().noting() as noted,
                mode,
                mode.noting() as touched,
            ):
                result = inner(*args, **kwargs)
        finally:
            self._inside = None
        writes = [
            name
            for (name, tensor), before in zip(tensors, states, strict=True)
            if state_of(tensor) != before or storage_of(tensor) in touched.writes
        ]
        parts = self._outermost(called)
        used = [
            self._names.get(id(tensor), name)  # another name for a buffer that an earlier call has set
            for name, tensor in tensors
            if storage_of(tensor) in touched.reads or any(_is_inside(name, path) for path in parts)
        ]
        reads = dict.fromkeys(used)
        sets = frozenset((self._paths[owner], name) for owner, name in state.changes() if owner in self._paths)
        sets |= frozenset(attributes.changes())
        self._check_sets(region, sets, (region.path, *parts))
        assigned = [place for place, buffer in held_before if held(place) is not buffer]
        for place in assigned:
            if persistent(place):
                raise TraceError(assigns(region.name, place[2]))
        sets = frozenset((path, name) for path, name in sets if name != "_buffers")  # which are named one by one
        self._noted[region.name, number] = noted
        given = frozenset(size for leaf in pytree.tree_leaves((args, kwargs)) for size in getattr(leaf, "shape", ()))
        returned = _described(region, result, torch.is_grad_enabled())
        seen = SeenCall(returned, parts, tuple(reads), tuple(writes), sets, given=given)
        self._seen[region.name, number] = seen
        return result

    def _outermost(self, called: list[nn.Module]) -> tuple[str, ...]:
        """The paths of the submodules that were called, without those inside of others."""
        paths = {self._paths[id(vars(part))] for part in called if id(vars(part)) in self._paths}
        return tuple(sorted(path for path in paths if not any(_is_inside(path, other) for other in paths)))

    def _check_sets(self, region: Region, sets: frozenset[tuple[str, str]], own: tuple[str, ...]) -> None:
        """``own``: the submodule itself, and those that it has called."""
        switched = next((path for path, name in sets if name == "training"), None)
        if switched is not None:
            raise TraceError(switches(region.name, switched))
        late = next((name for _, name in sets if name in ("_parameters", "_modules")), None)
        if late is not None:
            raise TraceError(
                f"{region.name}, an opaque region, makes or replaces a {_LATE[late]} when it runs, and stages and "
                "optimizers have those that were there before: make it in __init__, or call the model before compile"
            )
        inside = {path for path, _ in sets if path in own or any(_is_inside(path, part) for part in own[1:])}
        foreign = next((f"{path}.{name}" for path, name in sets if path not in inside), None)
        if foreign is not None:
            raise TraceError(
                f"{region.name}, an opaque region, sets {foreign} outside of it, which other stages would not see: "
                "return the value, or keep a larger part whole"
            )


_LATE = {"_parameters": "parameter", "_modules": "submodule"}


def _is_inside(path: str, other: str) -> bool:
    return path.startswith(f"{other}." if other else "") and path != other


@contextlib.contextmanager
def _noting_calls(called: list[nn.Module]) -> Iterator[None]:
    handle = register_module_forward_pre_hook(lambda module, args: called.append(module))
    try:
        yield
    finally:
        handle.remove()


def _described(region: Region, result: Any, may_need_gradient: bool) -> Any:
    """The value with a ``TensorLike`` for each tensor; TraceError for what cannot leave a region.

    ``may_need_gradient``: whether its floats may another time: behind a branch on a value, or once what was frozen is
    trained.
    """
    foreign = Structure(result).foreign()
    if foreign is not TENSOR:
        raise TraceError(
            f"{region.name}, an opaque region, returns a {type(foreign).__name__}, which is no tensor, no plain "
            "value and no container that torch.utils._pytree knows; keep a larger part whole, register it there, or "
            "return its tensors in a tuple, a list or a dict"
        )

    def described(tensor: Tensor) -> TensorLike:
        may = may_need_gradient and (tensor.is_floating_point() or tensor.is_complex())
        return replace(TensorLike.of(tensor), requires_grad=tensor.requires_grad or may)

    return pytree.tree_map_only(Tensor, described, result)
