"""Metered: a transport that counts what a rank moves, and times what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

from torch import Tensor

from fxpipe.distributed.collective import Collective, Scope, Work
from fxpipe.distributed.stopwatch import Clock
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.traffic import Moved, Traffic
from fxpipe.distributed.transport import Pair, Transport

# What each rank of a ring of k sends to work on n bytes in all is this many times n(k − 1)/k. To or from a root it is
# so on average: one end of the chain sends nothing. What gather carries is a few bytes.
_RING = {
    "all_reduce": 2,
    "maximum": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "reduce": 1,
    "broadcast": 1,
    "gather": 0,
    "gather_int": 1,
}
_INT = 16  # with the number of the call

Key = tuple[str, Scope]
"""(operation, scope): what a row is about."""


class TrafficMeter:
    """Counts and marks now, and computes nothing until it is asked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.mark: Callable[[], Any] = clock.mark
        self.begin()

    def begin(self) -> None:
        self.counts: dict[Key, tuple[int, int]] = {}  # how many, and the bytes that their groups worked on
        self._waits: list[tuple[Sequence[Key], Any, Sequence[Any], Any]] = []

    def count(self, key: Key, size: int) -> None:
        count, total = self.counts.get(key, (0, 0))
        self.counts[key] = (count + 1, total + size)

    def waited(self, keys: Sequence[Key], before: Any, between: Sequence[Any], after: Any) -> None:
        """A wait for a chain of collectives; ``between``: when each of them but the last had ended."""
        self._waits.append((keys, before, between, after))

    def exposed(self) -> dict[Key, float]:
        """Seconds of waiting: for each of a chain that part of the wait which lay between its predecessor's end and
        its own."""
        waits = [(keys, (before, *between, after)) for keys, before, between, after in self._waits]
        moments = iter(self._clock.seconds([mark for _, marks in waits for mark in marks]))
        exposed: dict[Key, float] = {}
        for keys, marks in waits:
            first, *middle, last = [next(moments) for _ in marks]
            within = [first, *(min(max(moment, first), last) for moment in middle), last]
            for key, (start, end) in zip(keys, pairwise(within), strict=False):
                exposed[key] = exposed.get(key, 0.0) + max(end - start, 0.0)
        return exposed


class _Timed:
    """A work of which each wait is timed. It belongs to whatever step it is waited for in."""

    __slots__ = ("_between", "_keys", "_meter", "_work")

    def __init__(self, work: Work, meter: TrafficMeter, keys: Sequence[Key], between: Sequence[Any] = ()) -> None:
        self._work, self._meter, self._keys, self._between = work, meter, keys, between

    def wait(self) -> object:
        before = self._meter.mark()
        result = self._work.wait()
        self._meter.waited(self._keys, before, self._between, self._meter.mark())
        return result


class Metered:
    """A transport over another one that also counts what this rank moves, and times what it waits for.

    The bytes that all-gathers move after a call belong to that call, and the time for which the next call waits for
    them belongs to the next one: it is that call which stood still.
    """

    def __init__(self, transport: Transport, topology: Topology, clock: Clock) -> None:
        self._inner = transport
        self._per_node = topology.ranks_per_node or topology.world_size
        self._meter = TrafficMeter(clock)
        self.pipe_rank: int | None = transport.pipe_rank
        self.data_rank, self.data_size, self.device = transport.data_rank, transport.data_size, transport.device
        self.open, self.open_more, self.ranks = transport.open, transport.open_more, transport.ranks
        self.abort, self.close, self.explain = transport.abort, transport.close, transport.explain

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    # what a transport does

    def send(self, pair: Pair, buffer: Tensor) -> Work:
        key = ("send", pair)
        work = self._inner.send(pair, buffer)
        self._meter.count(key, buffer.nbytes)
        return _Timed(work, self._meter, (key,))

    def receive(self, pair: Pair, buffer: Tensor) -> Work:
        key = ("receive", pair)
        work = self._inner.receive(pair, buffer)
        self._meter.count(key, 0)
        return _Timed(work, self._meter, (key,))

    def gather(self, scope: str, item: Any) -> list[Any]:
        return cast(list[Any], self._together("gather", scope, 0, self._inner.gather, item))

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        size = _INT * len(self._inner.ranks(scope))
        return cast(tuple[int, ...], self._together("gather_int", scope, size, self._inner.gather_int, item))

    def all_reduce(self, scope: Scope, tensor: Tensor) -> None:
        self._together("all_reduce", scope, tensor.nbytes, self._inner.all_reduce, tensor)

    def broadcast(self, scope: Scope, tensor: Tensor, source: int) -> None:
        self._together("broadcast", scope, tensor.nbytes, self._inner.broadcast, tensor, source)

    def tell(self, scope: Scope, tensor: Tensor, source: int) -> Work:
        key = ("broadcast", scope)
        work = self._inner.tell(scope, tensor, source)
        self._meter.count(key, tensor.nbytes)
        return _Timed(work, self._meter, (key,))

    def _together(self, operation: str, scope: Scope, size: int, call: Callable[..., Any], *args: Any) -> Any:
        """A call that this rank stands still for."""
        key = (operation, scope)
        before = self._meter.mark()
        result = call(scope, *args)
        self._meter.waited((key,), before, (), self._meter.mark())
        self._meter.count(key, size)
        return result

    def start(self, steps: Sequence[Collective], what: str, ended: Callable[[], object] | None = None) -> Work:
        keys = [(step.operation, step.scope) for step in steps]
        ends: list[Any] = []
        if len(steps) > 1:
            marked = [step._replace(then=self._marking(step.then, ends)) for step in steps[:-1]]
            steps = [*marked, steps[-1]]
        work = self._inner.start(steps, what, ended)
        for key, step in zip(keys, steps, strict=True):
            self._meter.count(key, step.whole.nbytes)
        return _Timed(work, self._meter, keys, ends)

    def _marking(self, then: Callable[[], object] | None, ends: list[Any]) -> Callable[[], None]:
        mark = self._meter.mark

        def follow() -> None:
            if then is not None:
                then()
            ends.append(mark())

        return follow

    # what moved

    def begin_step(self) -> None:
        """Starts a new table."""
        self._meter.begin()

    def traffic(self) -> Traffic:
        """What this rank moved since ``begin_step``. On a GPU it waits until that has happened."""
        data = self._inner.ranks("data")
        rank = data[self.data_rank]
        exposed = self._meter.exposed()
        rows = []
        for key in dict.fromkeys([*self._meter.counts, *exposed]):
            count, size = self._meter.counts.get(key, (0, 0))
            group = self._group(*key)
            sent = _sent(key[0], size, len(group))
            nodes = {member // self._per_node for member in group}
            leaving = sent * self._edges(group, rank, data)
            rows.append(Moved(*key, group, len(nodes) > 1, count, sent, exposed.get(key, 0.0), leaving))
        rows.sort(key=lambda row: (-row.bytes, -row.exposed))
        return Traffic(rank, tuple(row for row in rows if len(row.group) > 1))

    def _edges(self, group: tuple[int, ...], rank: int, data: tuple[int, ...]) -> int:
        """How many edges of a ring lead out of this node, of all such rings in the data group together."""
        nodes, here = [member // self._per_node for member in group], rank // self._per_node
        edges = sum(one == here != other for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        if not set(group) <= set(data):
            return edges
        return edges * sum(member // self._per_node == here for member in data) // nodes.count(here)

    def _group(self, operation: str, scope: Scope) -> tuple[int, ...]:
        if operation in ("send", "receive"):
            pipe = self._inner.ranks("pipe")
            return tuple(pipe[int(end)] for end in scope)
        return self._inner.ranks(scope)


def _sent(operation: str, size: int, ranks: int) -> float:
    """What a rank sends of operations on ``size`` bytes in all."""
    if operation in ("send", "receive"):
        return float(size)
    return _RING[operation] * size * (ranks - 1) / ranks
