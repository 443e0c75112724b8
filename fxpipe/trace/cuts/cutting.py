"""Cuts from outside: while a model is captured, submodules that are named behave as if their calls were marked."""

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
    """While it is open, each call of a submodule that ``cuts`` names is cut as by ``stage_boundary``.

    "before": all tensors among its arguments cross one boundary, which opens a stage of the submodule's name; "after":
    the tensors in what it returns do. A boundary lies outside of everything else that the call does: the submodule's
    hooks, and a ``__call__`` of its own class. Every call is cut where there are several.

    It belongs inside ``recording``, and around the call of the model: one for each run of it. TraceError where a named
    submodule was never called, unless forward ``may_lack`` it.
    """
    plan = _CutCalls(module, cuts)
    with handled([(named.module, "__call__") for named in plan.named.values()], plan.call):
        yield
    if not may_lack:
        plan.check_called()


@dataclass
class _Named:
    """A submodule that is cut. ``path``: the first name under which it was given; ``gathers``: what its boundaries
    gather, by the side that they are on."""

    path: str
    module: nn.Module
    gathers: dict[str, Gather | None] = field(default_factory=dict)
    calls: int = 0


class _CutCalls:
    """Who is cut where, and what is the model's own: parameters and buffers cross no boundary."""

    def __init__(self, module: nn.Module, cuts: Mapping[str, Cut]) -> None:
        self.module = module
        self.named: dict[int, _Named] = {}
        """The submodules that are cut, by the identity of their ``__dict__``."""
        modules = dict(module.named_modules(remove_duplicate=False))  # attributes may give stand-ins
        for path, cut in cuts.items():
            # a submodule with several names is one
            gathers = self.named.setdefault(id(vars(modules[path])), _Named(path, modules[path])).gathers
            sides = cut if isinstance(cut, GatheredCut) else GatheredCut(cut)
            for side, gather in (("before", sides.before), ("after", sides.after)):
                if sides.side in (side, "both"):
                    gathers[side] = gathers.get(side) or gather

    def call(self, key: Key, inner: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call of one of them."""
        named = self.named[key[0]]
        named.calls += 1
        path, gathers = named.path, named.gathers
        if "before" not in gathers:
            output = inner(*args, **kwargs)
        else:
            given = tuple(args), dict(kwargs)
            behind = self._cross(given, path, gathers["before"], f"{path} is given")
            passed = _Passed(given, behind, path)
            output = inner(*behind[0], **behind[1])
            passed.hand_back()
        return self._cross(output, None, gathers["after"], f"{path} returns") if "after" in gathers else output

    def _cross(self, value: Any, name: str | None, gather: Gather | None, fact: str) -> Any:
        """``value`` with its tensors behind one boundary."""
        mode, group = gather if gather is not None else (None, None)
        carry = partial(stage_boundary, name=name, gather=mode, group=group)
        refusal = f"{fact} no tensor that could cross a boundary", "name another submodule in boundaries="
        return crossing(value, self._may_cross, carry, _is_leaf, refusal)

    def _may_cross(self, leaf: Any) -> bool:
        if isinstance(leaf, fx.Proxy):
            return leaf.node.op != "get_attr"
        return isinstance(leaf, Tensor) and id(leaf) not in self._own_tensors

    @cached_property
    def _own_tensors(self) -> dict[int, Tensor]:
        """By id; found at the first call, when stand-ins for them are in place."""
        return {id(tensor): tensor for tensor in [*self.module.parameters(), *self.module.buffers()]}

    def check_called(self) -> None:
        never = [named.path for named in self.named.values() if not named.calls]
        if never:
            raise TraceError(
                f"boundaries= names {', '.join(never)}, which {type(self.module).__name__}.forward never calls with "
                "these inputs; name submodules that run, or give an example batch (example_args=) with all that the "
                "model takes: a later batch may lack some"
            )


def _is_leaf(value: Any) -> bool:
    """Containers are tuples, lists and dicts that hold something.

    Others, such as a cache of keys and values, and what is empty, may be there to be filled: the callee gets them.
    """
    return not isinstance(value, (tuple, list, dict)) or not value


class _Passed:
    """What a submodule is given behind its boundary, beside what its caller has: lists and dicts are its caller's own.

    What it puts into one of them, ``x[0] = self.branch(x[0])``, its caller finds there, as without the boundary.
    """

    def __init__(self, given: Any, behind: Any, path: str) -> None:
        self._path, self._behind = path, behind  # an identity is good as long as its object lives
        self._callers: dict[int, Any] = {}
        """What the caller has in place of a leaf or container that is behind the boundary, by identity."""
        self._containers: list[tuple[Any, Any, list[Any]]] = []
        self._pair(given, behind)

    def _pair(self, given: Any, behind: Any) -> None:
        self._callers[id(behind)] = given
        if given is behind or (_is_leaf(given) and not fields_of(given)):
            return
        if isinstance(given, (list, dict)) or fields_of(given):
            self._containers.append((given, behind, _entries(behind)))
        whose, theirs = (
            part.values() if isinstance(part, dict) else fields_of(part).values() or part for part in (given, behind)
        )
        for value, other in zip(whose, theirs, strict=True):
            self._pair(value, other)

    def hand_back(self) -> None:
        """Does to the caller's lists and dicts what was done to those behind the boundary.

        TraceError for one that was given twice, whose other copy knows nothing of it, and for one of another class.
        """
        given_as = Counter(id(given) for given, _, _ in self._containers)
        for given, behind, before in self._containers:
            now = _entries(behind)
            if len(now) == len(before) and all(value is other for value, other in zip(now, before, strict=True)):
                continue
            if given_as[id(given)] > 1 or (type(given) not in _PLAIN and not fields_of(given)):
                raise refuse(
                    f"{self._path} changes a {type(given).__name__} that it is given, which would be lost behind a "
                    "boundary",
                    "return what is new, or put stage_boundary on the tensors where forward makes them",
                )
            if fields := fields_of(behind):
                for name, part in fields.items():
                    object.__setattr__(given, name, self._callers.get(id(part), part))
                continue
            given.clear()
            if isinstance(given, dict):
                given.update({key: self._callers.get(id(part), part) for key, part in behind.items()})
            else:
                given.extend(self._callers.get(id(part), part) for part in behind)


_PLAIN = (list, dict, OrderedDict, defaultdict)


def _entries(container: Any) -> list[Any]:
    """What a list, a dict or a dataclass holds; of a dict the keys, too."""
    if fields := fields_of(container):
        return list(fields.values())
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


# --- what every tracer does with a boundary that it meets ---


def crossing(
    value: Any,
    is_traced: Callable[[Any], bool],
    carry: Callable[[list[Any]], Sequence[Any]],
    is_leaf: Callable[[Any], bool] | None = None,
    refusal: tuple[str, str] | None = None,
) -> Any:
    """``value`` with each traced tensor in it replaced by what ``carry`` gives for it, behind the boundary.

    ``refusal``: the fact and the remedy where it holds none.
    """
    leaves, made = _flat(value, is_leaf, is_traced)
    places = [place for place, leaf in enumerate(leaves) if is_traced(leaf)]
    if not places:
        fact = f"stage_boundary was given {type(value).__name__} {value!r:.60}, in which there is no traced tensor"
        raise refuse(*(refusal or (fact, "give it the tensors that cross the cut")))
    for place, behind in zip(places, carry([leaves[place] for place in places]), strict=True):
        leaves[place] = behind
    return made(iter(leaves))


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, or of a namespace; nothing for another value, and for what is a container as well."""
    if isinstance(value, (type, tuple, list, dict)):
        return {}
    if type(value) is SimpleNamespace:
        return dict(vars(value))
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _flat(
    value: Any, is_leaf: Callable[[Any], bool] | None, is_traced: Callable[[Any], bool], around: tuple[int, ...] = ()
) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    """The leaves of a value, and what makes it of others: those of a dataclass are its fields', and it is a copy then,
    where any of them is traced. ``around``: the dataclasses that it is in, by identity."""
    found, spec = pytree.tree_flatten(value, is_leaf)
    leaves: list[Any] = []
    makers: list[Callable[[Iterator[Any]], Any]] = []
    for leaf in found:
        fields = {} if is_traced(leaf) or id(leaf) in around else fields_of(leaf)
        inner, made = _flat([*fields.values()], is_leaf, is_traced, (*around, id(leaf))) if fields else ([], next)
        if any(map(is_traced, inner)):
            leaves += inner
            makers.append(partial(_with_fields, leaf, list(fields), made))
        else:
            leaves.append(leaf)
            makers.append(next)
    return leaves, lambda others: pytree.tree_unflatten([make(others) for make in makers], spec)


def _with_fields(value: Any, names: Sequence[str], made: Callable[[Iterator[Any]], Any], others: Iterator[Any]) -> Any:
    again = copy.copy(value)
    for name, part in zip(names, made(others), strict=True):
        object.__setattr__(again, name, part)
    return again


def check_boundaries(graph: fx.Graph, executed: int) -> None:
    """After every capture: boundaries found in the graph are boundaries executed."""
    found = sum(is_boundary(node) for node in graph.nodes)
    if found != executed:
        raise TraceError(f"{executed} boundaries were executed while tracing, {found} are in the graph")
