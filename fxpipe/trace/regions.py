"""Regions that are kept whole: what ``boundaries=`` names as such, and how a capture makes one node of each call."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fxpipe.errors import TraceError
from fxpipe.graph.kept import TENSOR, Kept, Structure
from fxpipe.graph.like import TensorLike
from fxpipe.graph.program import Effects
from fxpipe.torch_compat import pytree
from fxpipe.trace.patching import patched, refuse

if TYPE_CHECKING:
    from fxpipe.trace.request import Request

WHOLE = "whole"


@dataclass(frozen=True)
class Region:
    """A submodule, or a method of one, whose Python runs for real. ``returns``: what it returns, with a tensor of any
    device for each tensor, where the user has said it."""

    name: str
    path: str
    method: str = "__call__"
    returns: Any = None


@dataclass(frozen=True)
class Seen:
    """What one call of a region was seen to do, on real numbers.

    ``returned``: what it returned, with a ``TensorLike`` for each tensor. ``parts``: the submodules that it has called;
    ``reads``: the parameters and buffers that it may use, ``writes``: those that it has written, by name; ``sets``: the
    attributes that it has changed, (the path of their module, their name).
    """

    returned: Any
    parts: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    sets: frozenset[tuple[str, str]] = frozenset()

    @property
    def likes(self) -> list[TensorLike]:
        """What stands for the tensors that it returns."""
        return [like for like in pytree.tree_leaves(self.returned) if isinstance(like, TensorLike)]

    def guessed(self, sizes: Mapping[int, int]) -> Seen:
        """What it may do for a batch of other ``sizes``: those of its inputs then → those now. A guess, from which a
        capture begins: what it returns is held against the capture in each step."""
        return replace(self, returned=_guessed(self.returned, sizes))

    @property
    def general(self) -> Seen:
        """With other sizes in place of 0 and 1, which a capture might take for special ones."""
        returned = pytree.tree_map_only(TensorLike, lambda like: _resized(like, {0: _SOME, 1: _SOME}), self.returned)
        return replace(self, returned=returned)


_SOME = 3
"""A size that is like any other."""


def _guessed(returned: Any, sizes: Mapping[int, int]) -> Any:
    """A value for other sizes; a list of tensors alike is as long as such a size is, as one for each image is."""
    if isinstance(returned, TensorLike):
        many = _resized(returned, {old: new for old, new in sizes.items() if old > 1})
        return many if not many.shape or many.shape[0] != 1 else _resized_first(many, sizes.get(1, 1))
    if type(returned) in (list, tuple):
        parts = [_guessed(part, sizes) for part in returned]
        alike = parts and all(isinstance(part, TensorLike) and part == parts[0] for part in parts)
        return type(returned)(parts[:1] * sizes.get(len(parts), len(parts)) if alike else parts)
    leaves, spec = pytree.tree_flatten(returned, is_leaf=lambda part: part is not returned)
    return returned if spec.is_leaf() else pytree.tree_unflatten([_guessed(leaf, sizes) for leaf in leaves], spec)


def _resized_first(like: TensorLike, size: int) -> TensorLike:
    """With another first dimension: one image may be several."""
    return replace(like, shape=(size, *like.shape[1:]))


def _resized(like: TensorLike, sizes: Mapping[int, int]) -> TensorLike:
    shape = tuple(sizes.get(size, size) for size in like.shape)
    if shape == like.shape:
        return like
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like.stride[dim], -dim)):
        stride[dim], step = step, step * max(shape[dim], 1)
    return replace(like, shape=shape, stride=tuple(stride))


@dataclass
class Call:
    """One call of a region in a capture."""

    region: Region
    number: int
    seen: Seen
    kept: Kept
    values: list[Any]
    """What stands for the tensors, and for what else is computed, that it is given."""

    @property
    def key(self) -> tuple[str, int]:
        """Which call it is."""
        return self.region.name, self.number

    @property
    def target(self) -> str:
        """Under which name the graph calls it."""
        return f"whole_{self.region.name.replace('.', '_')}_{self.number}"

    def stack(self, around: Mapping[str, Any]) -> dict[str, Any]:
        """The submodules that it is called in, and it itself, as a node tells them."""
        return {**around, self.region.path: (self.region.path, nn.Module)}

    @property
    def effects(self) -> Effects:
        """It may return what it is given, and may draw random numbers another time."""
        shares, seen = tuple(range(len(self.values))), self.seen
        return Effects(seen.reads, seen.writes, shares, draws_random=True, is_rehearsed=True)


@dataclass
class Regions:
    """The regions of a capture, and the calls of them that it has met.

    ``carry``: makes a node of a call, and gives what stands for the tensors that it returns; ``is_value``: tells what
    stands for one.
    """

    request: Request
    is_value: Callable[[Any], bool]
    carry: Callable[[Call], Sequence[Any]]
    runs: Callable[[], bool] = lambda: False
    """Whether a call is to run now in place of becoming a node."""
    calls: list[Call] = field(default_factory=list)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While it is open, each call of a region becomes one node."""
        self.calls.clear()
        with watching(self.request.module, self.request.whole, self._call), self._unread():
            yield

    @property
    def opaque(self) -> dict[str, nn.Module]:
        """For ``Program.opaque``."""
        return {call.target: call.kept for call in self.calls}

    @property
    def effects(self) -> dict[str, Effects]:
        """By target."""
        return {call.target: call.effects for call in self.calls}

    def _call(self, region: Region, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.runs():
            return inner(*args, **kwargs)
        given = Structure((args, kwargs), self.is_value)
        if given.foreign is not TENSOR:
            raise refuse(
                f"{region.name}, which is kept whole, is given a {type(given.foreign).__name__}, which cannot stand in "
                "a graph",
                "keep a larger part of the model whole, in which it is made",
            )
        seen = self._seen(region, number)
        module = self.request.module
        returned = Structure(seen.returned, lambda leaf: isinstance(leaf, TensorLike))
        parts = {path.replace(".", "_"): module.get_submodule(path) for path in seen.parts}
        kept = Kept(region.name, module.get_submodule(region.path), region.method, parts, given, returned)
        call = Call(region, number, seen, kept, list(given.tensors))
        self.calls.append(call)
        return returned.filled(self.carry(call))

    def _seen(self, region: Region, number: int) -> Seen:
        seen = self.request.seen.get((region.name, number)) or self.request.seen.get((region.name, 0))
        if seen is not None:
            return seen
        raise TraceError(
            f"{region.name} is kept whole, and what it returns is not known, since it has not run on a batch: pass "
            "example_args= or example_kwargs=, a batch with numbers in which it is called; or, for a model on "
            f'the meta device, say what: boundaries={{"{region.name}": {{"whole": torch.empty(8, 16, device="meta")}}}}'
        )

    @contextlib.contextmanager
    def _unread(self) -> Iterator[None]:
        """While it is open, no other code reads the attributes that regions set, since they are set in a step only."""
        sets = {pair for seen in self.request.seen.values() for pair in seen.sets}
        owners: dict[type, set[tuple[int, str]]] = {}
        for path, name in sets:
            module = self.request.module.get_submodule(path)
            owners.setdefault(type(module), set()).add((id(vars(module)), name))
        with contextlib.ExitStack() as stack:
            for kind, names in owners.items():
                stack.enter_context(patched(kind, "__getattribute__", _guarded(kind, names)))
            yield


def _guarded(kind: type, names: set[tuple[int, str]]) -> Callable[[Any, str], Any]:
    words, plain = {name for _, name in names}, kind.__getattribute__

    def read(module: Any, name: str) -> Any:
        if name in words and (id(object.__getattribute__(module, "__dict__")), name) in names:
            raise refuse(
                f"forward reads .{name} of a {kind.__name__}, which a region that is kept whole sets when it runs",
                "return it from there, or keep what reads it whole with it",
            )
        return plain(module, name)  # type: ignore[call-arg]

    return read


Handler = Callable[[Region, int, Callable[..., Any], Any, Any], Any]
"""(the region, which of its calls, what it does by itself, args, kwargs) → what the call returns."""


@contextlib.contextmanager
def watching(model: nn.Module, regions: Sequence[Region], handle: Handler) -> Iterator[None]:
    """While it is open, each call of a region is handed to ``handle``. It belongs inside of ``cutting``."""
    numbers: Counter[str] = Counter()
    modules = dict(model.named_modules(remove_duplicate=False))
    by_place = {(id(vars(modules[region.path])), region.method): region for region in regions}
    places = dict.fromkeys((type(modules[region.path]), region.method) for region in regions)

    def patch(owner: type, method: str) -> Callable[..., Any]:
        own = vars(owner).get(method)
        plain = getattr(owner, method)

        @functools.wraps(plain)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # super() is looked up at each call: torch.fx patches nn.Module.__call__, too, and later
            inner = getattr(super(owner, module), method) if own is None else own.__get__(module)
            region = by_place.get((id(vars(module)), method))
            if region is None:
                return inner(*args, **kwargs)
            numbers[region.name] += 1
            return handle(region, numbers[region.name] - 1, inner, args, kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, method in places:
            stack.enter_context(patched(owner, method, patch(owner, method)))
        yield
