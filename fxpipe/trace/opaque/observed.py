"""Observes the effects of each call of an opaque region in one real run of the model on a micro-batch.

In each step it checks that a call changes no further tensor or attribute that other code reads.

Takes: a ``Request`` with regions, and a micro-batch with numbers. Gives: ``SeenCalls``, (region's name, number of the
call) → ``SeenCall``.

1. The model runs once as in a step, with the same modes; boundaries do nothing.
2. Around each call of a region the observer compares: tensors by version, storage and the operators that ran;
   attributes by a snapshot; random generators by their states; submodules by a hook.
3. The result is described: a ``TensorSpec`` for each tensor.
4. All state is restored.
5. Once stages are assigned, ``watch`` installs a check in each call: a step raises if a call changes something else.

A region inside of a region belongs to the outer one. Effects that a pipeline cannot have are refused: a boundary
inside, a changed training flag, new parameters, attributes set on other parts of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fxpipe.errors import RunError, TopologyError, TraceError
from fxpipe.graph.boundary import recording
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import all_tensors, first_names, own_tensors
from fxpipe.patches import replaced
from fxpipe.seeds import RandomState
from fxpipe.snapshots.snapshot import Snapshot, State, storage_of
from fxpipe.specs import TensorSpec
from fxpipe.stage.modes import within
from fxpipe.stage.opaque_call import TENSOR, OpaqueCall, Structure
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.tensors import version_of
from fxpipe.trace.cuts.cutting import cutting
from fxpipe.trace.opaque.region_calls import watching
from fxpipe.trace.opaque.regions import Region, SeenCall
from fxpipe.trace.patching import refuse
from fxpipe.trace.reads import noting
from fxpipe.trace.record.tape import TouchedMode
from fxpipe.trace.replay import Batch, as_in_a_step, gpus_of, in_compute_dtype, own
from fxpipe.trace.request import Request
from fxpipe.user_line import line_of

SeenCalls = Mapping[tuple[str, int], SeenCall]


def declared(request: Request) -> dict[tuple[str, int], SeenCall]:
    """The key of a region's call → the call, for the regions whose results ``boundaries=`` describes."""
    calls = {}
    names = first_names(request.module)
    for region in request.whole:
        if region.returns is not None:
            is_method = region.method != "__call__"
            used = {} if is_method else all_tensors(request.module.get_submodule(region.path))
            reads = dict.fromkeys(names[id(tensor)] for tensor in used.values())
            returned = _described(region, region.returns, may_need_gradient=True)
            calls[region.name, 0] = SeenCall(returned, () if is_method else (region.path,), tuple(reads))
    return calls


def observe(request: Request, batch: Batch, called: set[str]) -> SeenCalls:
    """Runs the model on a micro-batch, and returns the calls of its regions. Restores all state that the run changes.

    Adds to ``called`` the names of the regions that the model calls, also inside of other regions. TraceError if the
    model fails, or if a region has an effect that regions may not have.
    """
    # 1. to 3. one run, as in a step
    devices = gpus_of(request.roots)
    state, observer = State.from_modules(request.roots, devices, request.generators), _Observer(request)
    try:
        # draws from the model's own generators show in their states, which are not reset between modules here
        step = as_in_a_step(replace(request, generators={}), devices)
        with in_compute_dtype(request), step, recording(observer.boundary):
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
    finally:  # 4. restore
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
    """Sees the calls of regions in one run. Its memory: the calls so far, and the region that runs now."""

    def __init__(self, request: Request) -> None:
        self._seen: dict[tuple[str, int], SeenCall] = {}
        self._module, self._generators = request.module, request.generators
        self._inside: Region | None = None
        self.called: set[str] = set()
        """The names of the regions that the model called, also inside of other regions."""
        self._paths = {id(vars(part)): path for path, part in self._module.named_modules()}
        self._names = first_names(self._module)

    def calls(self) -> SeenCalls:
        """The observed calls, by region's name and number of the call."""
        sets = frozenset[tuple[str, str]]().union(*(call.sets for call in self._seen.values()))
        # a region's calls may be in several stages, and each call may use all tensors that any of them used
        used: dict[str, dict[str, None]] = {}
        for (name, _), call in self._seen.items():
            used.setdefault(name, {}).update(dict.fromkeys(call.reads))
        return {
            key: replace(call, asks=sets & call.asks, reads=tuple(used[key[0]])) for key, call in self._seen.items()
        }

    def boundary(self, value: Any, name: str | None, gather: Any) -> Any:
        """Lets a value pass outside of regions; TraceError for a boundary inside of one."""
        if self._inside is not None:
            raise refuse(
                f"a boundary lies inside of {self._inside.name}, an opaque region: one call in one stage",
                "leave out one of them, or name smaller parts that are to be whole",
            )
        return value

    def call(self, region: Region, number: int, inner: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call of a region, and notes its effects. A call inside of another region just runs."""
        self.called.add(region.name)
        if self._inside is not None:
            return inner(*args, **kwargs)
        # 2. a snapshot finds changed attributes; versions, and the operators that ran, find changed tensors
        before, tensors = Snapshot(self._module), all_tensors(self._module)
        states = {name: _state_of(tensor) for name, tensor in tensors.items()}
        given, random = _versions(args, kwargs), RandomState(own=self._generators)
        called: list[nn.Module] = []
        mode, watched = TouchedMode(), register_module_forward_pre_hook(lambda module, args: called.append(module))
        with replaced([(self, "_inside", region)]), watched, noting() as noted, mode, mode.noting() as touched:
            result = inner(*args, **kwargs)
        # a write through .data does not raise the version: TouchedMode sees the operator
        writes = [
            name
            for name, tensor in tensors.items()
            if _state_of(tensor) != states[name] or storage_of(tensor) in touched.writes
        ]
        # the outermost of the submodules that the region called: they hold the others
        paths = {self._paths[id(vars(part))] for part in called if id(vars(part)) in self._paths}
        parts = tuple(sorted(path for path in paths if not any(_is_inside(path, other) for other in paths)))
        reads = dict.fromkeys(
            self._names.get(id(tensor), name)  # the second name is for a buffer that an earlier call has set
            for name, tensor in tensors.items()
            if storage_of(tensor) in touched.reads or any(_is_inside(name, path) for path in parts)
        )
        sets = frozenset(self._sets(region, before, tensors))
        _check_sets(region, sets, (region.path, *parts))
        asks = frozenset((self._paths.get(owner, ""), name) for owner, name in noted)
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=_are_words)
        sizes = frozenset(size for leaf in leaves for size in getattr(leaf, "shape", ()))
        sizes |= {len(leaf) for leaf in leaves if _are_words(leaf)}
        # 3. the result
        returned = _described(region, result, torch.is_grad_enabled())
        overwrites = frozenset(dict(_versions(args, kwargs).items() - given.items()))
        self._seen[region.name, number] = SeenCall(
            returned, parts, tuple(reads), tuple(writes), sets, asks, sizes, overwrites, random.moved()
        )
        return result

    def _sets(self, region: Region, before: Snapshot, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        """(module's path, name) of each attribute and buffer that a call has changed."""
        names = {*before.changes(), *(name for name in before.written() if name not in tensors)}
        for path, _, name in (name.rpartition(".") for name in names):
            if path in self._paths.values() and name != "_buffers":
                yield path, name
        for path, part in self._module.named_modules():
            for name, buffer in part._buffers.items():
                full = f"{path}.{name}" if path else name
                if buffer is tensors.get(full):
                    continue
                if name not in part._non_persistent_buffers_set:
                    raise TraceError(
                        f"{region.name}, an opaque region, assigns {full}, a buffer that is a part of state_dict, "
                        f"which would keep the old one: write into it, self.{name}.copy_(...), or register it with "
                        "persistent=False"
                    )
                yield path, name


def _versions(args: Any, kwargs: Any) -> dict[int, int]:
    """Position among the leaves of a call's arguments → how often the tensor was written; no inference tensors."""
    leaves = enumerate(pytree.tree_leaves((args, kwargs)))
    return {index: version_of(leaf) for index, leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()}


def _are_words(value: Any) -> bool:
    """Whether a value is a list of strings, whose length may be a batch's number of rows."""
    return isinstance(value, (list, tuple)) and any(isinstance(part, str) for part in value)


def _check_sets(region: Region, sets: frozenset[tuple[str, str]], own: tuple[str, ...]) -> None:
    """Raises TraceError for an attribute that no region may set. ``own``: the paths of the region's submodule and of
    the submodules that the region called."""
    for path, name in sorted(sets):
        if name == "training":
            raise TraceError(
                f"{region.name}, an opaque region, switches {path or 'the model'} between training and evaluation when "
                "it runs, and micro-batches in flight and other ranks have it as it was: set it between steps, for the "
                "whole model, or set it back before the region returns"
            )
        if name in ("_parameters", "_modules"):
            raise TraceError(
                f"{region.name}, an opaque region, makes or replaces one of {path or 'the model'}'s {name[1:]} when it "
                "runs, and stages and optimizers have those that were there before: make it in __init__, or call the "
                "model before compile"
            )
        if path not in own and not any(_is_inside(path, part) for part in own[1:]):
            raise TraceError(
                f"{region.name}, an opaque region, sets {path}.{name} outside of it, which other stages would not see: "
                "return the value, or keep a larger part whole"
            )


def _is_inside(path: str, other: str) -> bool:
    """Whether a path is a proper part of another."""
    return path.startswith(f"{other}." if other else "") and path != other


def _described(region: Region, result: Any, may_need_gradient: bool) -> Any:
    """The value with a ``TensorSpec`` for each tensor; TraceError for a value that a region may not return.

    ``may_need_gradient``: whether its floating-point tensors may require a gradient in another step, as after a branch
    on a value, or once the user unfreezes a parameter.
    """
    foreign = Structure(result).foreign()
    if foreign is not TENSOR:
        raise TraceError(
            f"{region.name}, an opaque region, returns a {type(foreign).__name__}, which is no tensor, no plain "
            "value and no container that torch.utils._pytree knows; keep a larger part whole, register it there, or "
            "return its tensors in a tuple, a list or a dict"
        )

    def described(tensor: Tensor) -> TensorSpec:
        may = may_need_gradient and (tensor.is_floating_point() or tensor.is_complex())
        return replace(TensorSpec.from_tensor(tensor), requires_grad=tensor.requires_grad or may)

    return pytree.tree_map_only(Tensor, described, result)


# --- 5. In a step: a region may change a tensor that other code reads only if the observed run changed that tensor ---


def watch(program: Program, changed: Callable[[], str | None]) -> None:
    """Installs in each region's call a check of its changes. The program's stages must be assigned.

    ``changed``: returns the name of an attribute that other code reads and that has changed since the step began.
    """
    calls = {
        node: call
        for node in program.nodes
        if node.op == "call_module" and isinstance(call := program.opaque.get(str(node.target)), OpaqueCall)
    }
    of = {node: (call.name, program.stage_of.get(node.name)) for node, call in calls.items()}
    for node, call in calls.items():
        others = (other for other in program.nodes if of.get(other) != of[node])
        read = {name for other in others for name in own_tensors(program, other)}
        # the graph orders the observed writes; all other tensors that other code reads must stay unchanged
        names = sorted(read - set(program.effects[node.name].writes))
        call.watch = partial(_unchanged, call.name, program.module, names, changed)


@contextlib.contextmanager
def _unchanged(
    region: str, module: nn.Module, names: Sequence[str], changed: Callable[[], str | None]
) -> Iterator[None]:
    """RunError if the code inside of the context changes one of the tensors ``names``, which other code reads."""
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]

    def states() -> list[tuple[int, int, int]]:
        return [_state_of(part._buffers.get(name, part._parameters.get(name))) for part, name in places]

    before = states()
    yield
    written = (name for name, was, now in zip(names, before, states(), strict=True) if was != now)
    other = next(written, None) or changed()
    if other is not None:
        raise RunError(
            f"{region}, an opaque region, changes {other}, which code outside of it reads, and which it did not change "
            "when the model was captured: return the value, or keep what reads it whole with it"
        )


def _state_of(tensor: Tensor | None) -> tuple[int, int, int]:
    """The tensor's id, its version, and its storage's id, which ``.data = ...`` changes."""
    return (id(None), 0, 0) if tensor is None else (id(tensor), version_of(tensor), storage_of(tensor))
