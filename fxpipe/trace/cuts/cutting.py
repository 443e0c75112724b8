"""Cuts by name: during a capture, calls of the named submodules are cut as if forward called ``stage_boundary``. All
tracers use it, and the same code lets a value cross a boundary.

Takes: the model, and the cuts (submodule's path → side). Gives: ``cutting``, a context around one run of the model;
``crossing``, a value with its tensors behind a boundary; ``check_boundaries``, which compares the graph with the run.

For a call ``y = self.block(x, cache)`` with a cut "before":

1. All tensors in the arguments go through one boundary named after the submodule. The model's own tensors do not.
2. The submodule is called with the tensors behind the boundary, in copies of the lists and dicts.
3. What the submodule changed in these copies is repeated in the caller's lists and dicts.

A cut "after" lets the tensors of the result go through one boundary. It makes no stages: passes do this later, from the
``boundary`` nodes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.errors import TraceError
from fxpipe.graph.boundary import Gather, stage_boundary
from fxpipe.graph.program import is_boundary
from fxpipe.torch_compat import pytree
from fxpipe.trace.patching import Key, handled, refuse
from fxpipe.trace.request import Cut, GatheredCut


@contextlib.contextmanager
def cutting(module: nn.Module, cuts: Mapping[str, Cut], may_lack: bool = False) -> Iterator[None]:
    """While this context is open, each call of a submodule that ``cuts`` names is cut as by ``stage_boundary``.

    "before": all tensors among the call's arguments cross one boundary, which opens a stage of the submodule's name;
    "after": all tensors in the call's result cross one boundary. The boundary is outside of the whole call, with the
    submodule's hooks and the ``__call__`` of its class. If forward calls a submodule several times, each call is cut.

    Enter this context inside ``recording``, once for each run of the model. TraceError if forward never called a named
    submodule, unless ``may_lack``.
    """
    plan = _CutCalls(module, cuts)
    with handled([(named.module, "__call__") for named in plan.named.values()], plan.call):
        yield
    if not may_lack:
        plan.check_called()


@dataclass
class _Named:
    """A submodule that is cut. ``path``: the first of its names in ``cuts``; ``gathers``: the side of a boundary → the
    boundary's gather."""

    path: str
    module: nn.Module
    gathers: dict[str, Gather | None] = field(default_factory=dict)
    calls: int = 0


class _CutCalls:
    """The submodules to cut, and the model's parameters and buffers, which cross no boundary."""

    def __init__(self, module: nn.Module, cuts: Mapping[str, Cut]) -> None:
        self.module = module
        self.named: dict[int, _Named] = {}
        """The id of a submodule's ``__dict__`` → the submodule to cut."""
        modules = dict(module.named_modules(remove_duplicate=False))  # attributes may give stand-ins
        for path, cut in cuts.items():
            # all names of a submodule share one entry
            gathers = self.named.setdefault(id(vars(modules[path])), _Named(path, modules[path])).gathers
            sides = cut if isinstance(cut, GatheredCut) else GatheredCut(cut)
            for side, gather in (("before", sides.before), ("after", sides.after)):
                if sides.side in (side, "both"):
                    gathers[side] = gathers.get(side) or gather

    def call(self, key: Key, inner: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Handles a call of a named submodule: boundaries around the unpatched call."""
        named = self.named[key[0]]
        named.calls += 1
        path, gathers = named.path, named.gathers
        if "before" not in gathers:
            output = inner(*args, **kwargs)
        else:
            # 1. to 3. cross, call, repeat changes
            arguments = tuple(args), dict(kwargs)
            behind = self._cross(arguments, path, gathers["before"], f"{path} is given")
            passed = _Passed(arguments, behind, path)
            output = inner(*behind[0], **behind[1])
            passed.hand_back()
        return self._cross(output, None, gathers["after"], f"{path} returns") if "after" in gathers else output

    def _cross(self, value: Any, name: str | None, gather: Gather | None, fact: str) -> Any:
        mode, group = gather if gather is not None else (None, None)
        carry = partial(stage_boundary, name=name, gather=mode, group=group)
        refusal = f"{fact} no tensor that could cross a boundary", "name another submodule in boundaries="
        return crossing(value, self._may_cross, carry, _is_leaf, refusal)

    def _may_cross(self, leaf: Any) -> bool:
        """Whether a leaf is a traced tensor that is no parameter or buffer of the model."""
        if isinstance(leaf, fx.Proxy):
            return leaf.node.op != "get_attr"
        return isinstance(leaf, Tensor) and id(leaf) not in self._own_tensors

    @cached_property
    def _own_tensors(self) -> dict[int, Tensor]:
        """The model's parameters and buffers by id, taken at the first call, when fake tensors have replaced them."""
        return {id(tensor): tensor for tensor in [*self.module.parameters(), *self.module.buffers()]}

    def check_called(self) -> None:
        """TraceError for a named submodule that was never called."""
        never = [named.path for named in self.named.values() if not named.calls]
        if never:
            raise TraceError(
                f"boundaries= names {', '.join(never)}, which {type(self.module).__name__}.forward never calls with "
                "these inputs; name submodules that run, or give an example batch (example_args=) with all that the "
                "model takes: a later batch may lack some"
            )


def _is_leaf(value: Any) -> bool:
    """Whether the value is a leaf: anything but a non-empty tuple, list or dict.

    The callee gets leaves themselves: it may fill an empty container, or another, such as a cache of keys and values.
    """
    return not isinstance(value, (tuple, list, dict)) or not value


class _Passed:
    """A submodule's arguments after its boundary, paired with the caller's arguments before the boundary.

    If the submodule changes a list or dict, ``x[0] = self.branch(x[0])``, the caller's list or dict changes, too.
    """

    def __init__(self, caller: Any, behind: Any, path: str) -> None:
        self._path, self._behind = path, behind  # an id is valid as long as its object lives
        self._callers: dict[int, Any] = {}
        """The id of a leaf or container after the boundary → the caller's leaf or container."""
        self._containers: list[tuple[Any, Any, list[Any]]] = []
        self._pair(caller, behind)

    def _pair(self, caller: Any, behind: Any) -> None:
        """Pairs a value with the value after the boundary, and all that is in both, container by container."""
        self._callers[id(behind)] = caller
        if caller is behind or (_is_leaf(caller) and not fields_of(caller)):
            return
        if isinstance(caller, (list, dict)) or fields_of(caller):
            self._containers.append((caller, behind, _entries(behind)))
        whose, theirs = (
            part.values() if isinstance(part, dict) else fields_of(part).values() or part for part in (caller, behind)
        )
        for value, other in zip(whose, theirs, strict=True):
            self._pair(value, other)

    def hand_back(self) -> None:
        """Repeats in the caller's lists and dicts the changes that the submodule made in their copies.

        TraceError for a changed container that is passed twice, as the other copy lacks it, or is of another class.
        """
        given_as = Counter(id(caller) for caller, _, _ in self._containers)
        for caller, behind, before in self._containers:
            now = _entries(behind)
            if len(now) == len(before) and all(value is other for value, other in zip(now, before, strict=True)):
                continue
            if given_as[id(caller)] > 1 or (type(caller) not in _PLAIN and not fields_of(caller)):
                raise refuse(
                    f"{self._path} changes a {type(caller).__name__} that it is given, which would be lost behind a "
                    "boundary",
                    "return what is new, or put stage_boundary on the tensors where forward makes them",
                )
            if fields := fields_of(behind):
                for name, part in fields.items():
                    object.__setattr__(caller, name, self._callers.get(id(part), part))
                continue
            caller.clear()
            if isinstance(caller, dict):
                caller.update({key: self._callers.get(id(part), part) for key, part in behind.items()})
            else:
                caller.extend(self._callers.get(id(part), part) for part in behind)


_PLAIN = (list, dict, OrderedDict, defaultdict)


def _entries(container: Any) -> list[Any]:
    """The entries of a list, dict or dataclass; for a dict, the keys and the values."""
    if fields := fields_of(container):
        return list(fields.values())
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


# --- shared by all tracers: how values cross a boundary ---


def crossing(
    value: Any,
    is_traced: Callable[[Any], bool],
    carry: Callable[[list[Any]], Sequence[Any]],
    is_leaf: Callable[[Any], bool] | None = None,
    refusal: tuple[str, str] | None = None,
) -> Any:
    """``value`` with each traced tensor replaced by the tensor that ``carry`` returns for it, after the boundary.

    Args:
        value: a tensor, or any pytree or dataclass with tensors. Other leaves stay the same objects.
        is_traced: whether a leaf is a tensor of the tracer.
        carry: the traced tensors, in order → as many tensors behind one boundary.
        is_leaf: what counts as a leaf, besides pytree's own leaves.
        refusal: the fact and the remedy of the TraceError if ``value`` holds no traced tensor.
    """
    leaves, build = _flat(value, is_leaf, is_traced)
    places = [index for index, leaf in enumerate(leaves) if is_traced(leaf)]
    if not places:
        fact = f"stage_boundary was given {type(value).__name__} {value!r:.60}, in which there is no traced tensor"
        raise refuse(*(refusal or (fact, "give it the tensors that cross the cut")))
    for index, behind in zip(places, carry([leaves[index] for index in places]), strict=True):
        leaves[index] = behind
    return build(iter(leaves))


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass or SimpleNamespace; empty for any other value, and for a class, tuple, list or dict."""
    if isinstance(value, (type, tuple, list, dict)):
        return {}
    if type(value) is SimpleNamespace:
        return dict(vars(value))
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _flat(
    value: Any, is_leaf: Callable[[Any], bool] | None, is_traced: Callable[[Any], bool], around: tuple[int, ...] = ()
) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    """The leaves of a value, and a function that builds the value from other leaves. A dataclass with a traced leaf
    counts as a container of its fields, and is built as a copy. ``around``: the ids of the dataclasses around."""
    parts, spec = pytree.tree_flatten(value, is_leaf)
    leaves: list[Any] = []
    makers: list[Callable[[Iterator[Any]], Any]] = []
    for leaf in parts:
        fields = {} if is_traced(leaf) or id(leaf) in around else fields_of(leaf)
        inner, build = _flat([*fields.values()], is_leaf, is_traced, (*around, id(leaf))) if fields else ([], next)
        if any(map(is_traced, inner)):
            leaves += inner
            makers.append(partial(_with_fields, leaf, list(fields), build))
        else:
            leaves.append(leaf)
            makers.append(next)
    return leaves, lambda others: pytree.tree_unflatten([make(others) for make in makers], spec)


def _with_fields(value: Any, names: Sequence[str], build: Callable[[Iterator[Any]], Any], others: Iterator[Any]) -> Any:
    """A copy of a dataclass with new values in the named fields, without a call of its ``__init__``."""
    again = copy.copy(value)
    for name, part in zip(names, build(others), strict=True):
        object.__setattr__(again, name, part)
    return again


def check_boundaries(graph: fx.Graph, executed: int) -> None:
    """Numbers the boundaries. TraceError unless the graph has as many as forward executed during the capture."""
    markers = list(filter(is_boundary, graph.nodes))
    if len(markers) != executed:
        raise TraceError(f"{executed} boundaries were executed while tracing, {len(markers)} are in the graph")
    for number, marker in enumerate(markers):
        marker.meta["boundary"] = number  # a pass may drop others
