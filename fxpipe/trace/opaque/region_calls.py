"""Calls of opaque regions during a capture: each call becomes one node.

Takes: a ``Request`` with its regions and their observed calls, and a tracer's functions ``is_value`` and ``carry``.
Gives: ``Regions.as_nodes``, a context around one run of forward, and ``Regions.calls``, the calls that became nodes.

1. Forward calls a region. The region does not run, except in a rehearsal of a submodule around it.
2. Its arguments are taken apart: tensors and computed numbers become the node's arguments, the rest is kept in an
   ``OpaqueCall``.
3. The observed call says what it returns, reads, writes and sets.
4. ``carry`` makes the node, and returns the tracer's values for the results. Forward gets them in the observed
   structure.

Code outside of regions that reads an attribute that a region sets is refused: in a pipeline it would read an old value.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from fxpipe.errors import TraceError
from fxpipe.graph.program import Effects
from fxpipe.patches import replaced
from fxpipe.stage.opaque_call import TENSOR, OpaqueCall, Structure
from fxpipe.torch_compat import pytree
from fxpipe.trace.opaque.regions import Region, SeenCall
from fxpipe.trace.patching import Key, handled, refuse
from fxpipe.trace.reads import ignoring_reads
from fxpipe.trace.request import Request, tensors_of_words
from fxpipe.user_line import current_line, is_users


@dataclass(frozen=True)
class RegionCall:
    """One call of a region in a capture."""

    region: Region
    number: int
    target: str
    """The name by which the graph calls the region."""
    seen: SeenCall
    opaque: OpaqueCall
    values: list[Any]
    """The tracer's values for the tensors and the computed numbers among the arguments."""
    generators: frozenset[int]
    """The ids of the model's own random generators from which the call drew."""

    @property
    def key(self) -> tuple[str, int]:
        """The key of the observed call in ``Request.seen``."""
        return self.region.name, self.number

    @property
    def effects(self) -> Effects:
        """The effects of a call in any step: it may draw random numbers, and its result may alias each argument."""
        # the code may branch on any number, so that another step may do more than the observed one
        shares, seen = tuple(range(len(self.values))), self.seen
        return Effects(seen.reads, seen.writes, shares, True, is_rehearsed=True, generators=self.generators)


@dataclass(frozen=True)
class Regions:
    """The regions of a capture, and their calls so far.

    ``carry``: makes a node of a call, and returns the tracer's values for the call's results; ``is_value``: whether an
    argument is a value of the tracer.
    """

    request: Request
    is_value: Callable[[Any], bool]
    carry: Callable[[RegionCall], Sequence[Any]]
    runs: Callable[[], bool] = lambda: False
    """Returns whether a call runs now, as in a rehearsal, instead of becoming a node."""
    calls: list[RegionCall] = field(default_factory=list)

    @contextlib.contextmanager
    def as_nodes(self) -> Iterator[None]:
        """While this context is open, each call of a region becomes one node."""
        self.calls.clear()
        with watching(self.request.module, self.request.whole, self._call), self._unread():
            yield

    @cached_property
    def _objects(self) -> set[int]:
        """The ids of the modules' attributes, such as ``config``, and of the objects among the inputs; each rank has
        its own copies of these."""
        ids = {id(value) for part in self.request.module.modules() for value in vars(part).values()}
        return ids | set(map(id, pytree.tree_leaves([dict(self.request.fixed), dict(self.request.example or {})])))

    @property
    def opaque(self) -> dict[str, nn.Module]:
        """For ``Program.opaque``."""
        return {call.target: call.opaque for call in self.calls}

    def _call(self, region: Region, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handles a call of a region: adds it to ``calls``, and returns the tracer's values in the structure of the
        result. TraceError for an argument that no graph can hold, and for a call of which no result is known."""
        # 1. in a rehearsal of a submodule around the region, the region runs
        if self.runs():
            with ignoring_reads():
                return inner(*args, **kwargs)
        # 2. the arguments
        arguments = Structure(tensors_of_words((args, kwargs)), self.is_value)
        foreign = arguments.foreign(self._objects)
        if foreign is not TENSOR:
            raise refuse(
                f"{region.name}, an opaque region, is given a {type(foreign).__name__}, which cannot stand in a graph",
                "keep a larger part of the model whole, in which it is made",
            )
        # 3. the observed call
        seen = self._seen(region, number)
        module = self.request.module
        returned = Structure(seen.returned, line=current_line)
        parts = {str(index): module.get_submodule(path) for index, path in enumerate(seen.parts)}
        opaque = OpaqueCall(region.name, module.get_submodule(region.path), region.method, parts, arguments, returned)
        opaque.attributes, opaque.varies = seen.sets | seen.asks, region.varies
        positions = (position for position, leaf in enumerate(arguments.leaves) if leaf is TENSOR)
        opaque.overwrites = [index for index, position in enumerate(positions) if position in seen.overwrites]
        # 4. the node
        index = self.request.whole.index(region)  # tells enc.proj from enc_proj
        target = f"whole_{region.name.replace('.', '_')}_{index}_{number}"
        generators = frozenset(id(each) for name, each in self.request.generators.items() if name in seen.moved)
        call = RegionCall(region, number, target, seen, opaque, list(arguments.tensors), generators)
        self.calls.append(call)
        return returned.filled(self.carry(call))

    def _seen(self, region: Region, number: int) -> SeenCall:
        """The observed call of this number, or else the first: a call in a loop may be more often than was observed."""
        seen = self.request.seen.get((region.name, number)) or self.request.seen.get((region.name, 0))
        if seen is not None:
            return seen
        raise TraceError(
            f"{region.name} is opaque, and what it returns is not known, since it has not run on a batch: pass "
            "example_args= or example_kwargs=, a batch with numbers in which it is called; or, for a model on "
            f'the meta device, say what: boundaries={{"{region.name}": {{"whole": torch.empty(8, 16, device="meta")}}}}'
        )

    def _unread(self) -> contextlib.AbstractContextManager[None]:
        """While this context is open, user code that reads an attribute that a region sets raises TraceError."""
        sets = {pair for seen in self.request.seen.values() for pair in seen.sets}
        owners: dict[type, set[tuple[int, str]]] = {}
        for path, name in sets:
            module = self.request.module.get_submodule(path)
            owners.setdefault(type(module), set()).add((id(vars(module)), name))
        return replaced((kind, "__getattribute__", _guarded(kind, names)) for kind, names in owners.items())


def _guarded(kind: type, names: set[tuple[int, str]]) -> Callable[[Any, str], Any]:
    """``__getattribute__`` of a class, which refuses users' reads of these attributes of these modules."""
    words, plain = {name for _, name in names}, kind.__getattribute__

    def read(module: Any, name: str) -> Any:
        mine = name in words and (id(object.__getattribute__(module, "__dict__")), name) in names
        if mine and is_users(sys._getframe(1).f_code.co_filename):  # torch.export reads all buffers
            raise refuse(
                f"forward reads .{name} of a {kind.__name__}, which an opaque region sets when it runs",
                "return it from there, or keep what reads it whole with it",
            )
        return plain(module, name)  # type: ignore[call-arg]

    return read


Handler = Callable[[Region, int, Callable[..., Any], Any, Any], Any]
"""(region, number of the call, the plain call, args, kwargs) → the call's result."""


@contextlib.contextmanager
def watching(model: nn.Module, regions: Sequence[Region], handle: Handler) -> Iterator[None]:
    """While this context is open, ``handle`` gets each call of a region. Enter ``cutting`` inside of this context.

    The order matters: a boundary at a region's call is then outside of the region. Calls are numbered from 0 for each
    region, in the order in which forward makes them.
    """
    numbers: Counter[str] = Counter()
    modules = dict(model.named_modules(remove_duplicate=False))
    by_key = {(id(vars(modules[region.path])), region.method): region for region in regions}

    def numbered(key: Key, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        region = by_key[key]
        numbers[region.name] += 1
        return handle(region, numbers[region.name] - 1, inner, args, kwargs)

    with handled([(modules[region.path], region.method) for region in regions], numbered):
        yield
