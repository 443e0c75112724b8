"""Traffic: what a rank moved in a step, between which ranks, and how long it stood still for it; and a transport that
counts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from tabulate import tabulate
from torch import Tensor

from fxpipe.distributed.collective import Collective, Scope, Work
from fxpipe.distributed.grid import abbreviated
from fxpipe.distributed.stopwatch import Clock
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Pair, Transport
from fxpipe.notebook import Tabular

T = TypeVar("T")

DATA_AXIS = ("shard", "replica", "gather")
"""The scopes on which gradients and parameters travel over the data axis."""


@dataclass(frozen=True)
class Moved:
    """One row: what a rank moved by one operation on one group."""

    operation: str
    """Of a collective, or "send" or "receive"."""
    scope: Scope
    """The group as the rank sees it; of a send and a receive, the pipe ranks of the two ends."""
    group: tuple[int, ...]
    """Its ranks, counted over the whole topology."""
    between_nodes: bool
    count: int
    bytes: float
    """What this rank sends, by the formulas of a ring; a receive is counted where it is sent, and objects are not."""
    exposed: float
    """For how many seconds this rank stood still, waiting for it; nan where waits were not timed yet."""
    leaving: float
    """What leaves this rank's node, of all groups of this kind in its data group together."""


@dataclass(frozen=True)
class Traffic(Tabular):
    """What one rank moved from the start of a call until now, largest first; prints as a table."""

    rank: int
    rows: tuple[Moved, ...]

    def select(self, operation: str | None = None, scope: Scope | None = None) -> tuple[Moved, ...]:
        """The rows of an operation, of a scope, or of both."""
        return tuple(
            row for row in self.rows if operation in (None, row.operation) and (scope is None or scope == row.scope)
        )

    @property
    def between(self) -> float:
        """The bytes of gradients and parameters that leave this node for others, over the data group of this rank."""
        return sum(row.leaving for row in self._data_axis)

    @property
    def inside(self) -> float:
        """The bytes of gradients and parameters that this rank sends on groups that stay in its node."""
        return sum(row.bytes for row in self._data_axis if not row.between_nodes)

    @property
    def exposed(self) -> float:
        """For how many seconds this rank stood still for any of it."""
        return sum(row.exposed for row in self.rows)

    @property
    def _data_axis(self) -> tuple[Moved, ...]:
        return tuple(row for row in self.rows if row.scope in DATA_AXIS)

    def __str__(self) -> str:
        if not self.rows:
            return f"rank {self.rank} moved nothing"
        rows = []
        for row in self.rows:
            nodes = "between" if row.between_nodes else "inside"
            exposed = "–" if math.isnan(row.exposed) else f"{row.exposed * 1e3:.2f}"
            rows.append((row.operation, _label(row), nodes, row.count, _size(row.bytes), exposed))
        table = tabulate(
            rows,
            headers=("operation", "group", "nodes", "count", "bytes", "ms exposed"),
            colalign=("left", "left", "left", "right", "right", "right"),
            disable_numparse=True,
        )
        untimed = math.isnan(self.exposed) and "waits are timed from the next call on"
        return (
            f"{table}\nrank {self.rank}, gradients and parameters: {_size(self.between)} leave the node for others, "
            f"{_size(self.inside)} stay in it; {untimed or f'{self.exposed * 1e3:.2f} ms exposed in all'}"
        )

    def __repr__(self) -> str:
        return f"<Traffic of rank {self.rank}: {_size(sum(row.bytes for row in self.rows))} in {len(self.rows)} rows>"


def _label(row: Moved) -> str:
    if row.operation in ("send", "receive"):
        return f"{row.group[0]} → {row.group[1]}"
    scope = row.scope if isinstance(row.scope, str) else "owners"
    return f"{scope} {abbreviated(list(row.group))}"


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:  # what rounds to 1000 is one of the next
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


_TWO_ROUNDS = ("all_reduce", "maximum")
_INT = 16  # with the number of the call

Key = tuple[str, Scope]
"""(operation, scope): what a row is about."""


class _Timed:
    """A work whose waits are timed. A wait counts in the step that does it."""

    __slots__ = ("_between", "_home", "_keys", "_work")

    def __init__(self, work: Work, home: Metered, keys: Sequence[Key], between: Sequence[Any] = ()) -> None:
        self._work, self._home, self._keys, self._between = work, home, keys, between

    def wait(self) -> object:
        before = self._home.mark()
        result = self._work.wait()
        self._home.waits.append((self._keys, (before, *self._between, self._home.mark())))
        return result


class Metered:
    """A transport over another one that also counts what this rank moves, and times what it waits for.

    It counts and marks now, and computes nothing until it is asked. The bytes that all-gathers move after a call belong
    to that call, and the time for which the next call waits for them belongs to the next one: it is that call which
    stood still.

    ``timed``: whether waits are timed from the next ``begin_step`` on. ``traffic`` sets it: two events for each wait
    are a tenth of the host's time for an action of a GPU, and nobody may ask.
    """

    def __init__(self, transport: Transport, topology: Topology, clock: Clock, timed: bool = True) -> None:
        self._inner, self._clock, self.timed = transport, clock, timed
        self._per_node = topology.ranks_per_node or topology.world_size
        self.pipe_rank: int | None = transport.pipe_rank
        self.data_rank, self.data_size, self.device = transport.data_rank, transport.data_size, transport.device
        self.open, self.open_more, self.ranks = transport.open, transport.open_more, transport.ranks
        self.abort, self.close, self.explain = transport.abort, transport.close, transport.explain
        self.begin_step()

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    # what a transport does

    def send(self, pair: Pair, buffer: Tensor) -> Work:
        return self._counted(("send", pair), buffer.nbytes, self._inner.send(pair, buffer))

    def receive(self, pair: Pair, buffer: Tensor) -> Work:
        return self._counted(("receive", pair), 0, self._inner.receive(pair, buffer))

    def tell(self, scope: Scope, tensor: Tensor, source: int) -> Work:
        return self._counted(("broadcast", scope), tensor.nbytes, self._inner.tell(scope, tensor, source))

    def gather(self, scope: str, item: Any) -> list[Any]:
        return self._together("gather", scope, 0, self._inner.gather, item)

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        size = _INT * len(self._inner.ranks(scope))
        return self._together("gather_int", scope, size, self._inner.gather_int, item)

    def all_reduce(self, scope: Scope, tensor: Tensor) -> None:
        self._together("all_reduce", scope, tensor.nbytes, self._inner.all_reduce, tensor)

    def broadcast(self, scope: Scope, tensor: Tensor, source: int) -> None:
        self._together("broadcast", scope, tensor.nbytes, self._inner.broadcast, tensor, source)

    def _together(self, operation: str, scope: Scope, size: int, call: Callable[..., T], *args: Any) -> T:
        """A call that this rank stands still for."""
        key = (operation, scope)
        before = self.mark()
        result = call(scope, *args)
        self.waits.append(((key,), (before, self.mark())))
        self._count(key, size)
        return result

    def start(self, steps: Sequence[Collective], what: str) -> Work:
        ends: list[Any] = []
        marked = [step.followed_by(lambda: ends.append(self.mark())) for step in steps[:-1]]
        work = self._inner.start([*marked, *steps[-1:]], what)
        keys = [(step.operation, step.scope) for step in steps]
        for key, step in zip(keys, steps, strict=True):
            self._count(key, step.whole.nbytes)
        return _Timed(work, self, keys, ends)

    def _counted(self, key: Key, size: int, work: Work) -> Work:
        self._count(key, size)
        return _Timed(work, self, (key,))

    def _count(self, key: Key, size: int) -> None:
        count, total = self.counts.get(key, (0, 0))
        self.counts[key] = (count + 1, total + size)

    # what moved

    def begin_step(self) -> None:
        """Starts a new table."""
        self.counts: dict[Key, tuple[int, int]] = {}  # how many, and the bytes that their groups worked on
        self.mark: Callable[[], Any] = self._clock.mark if self.timed else lambda: None
        self.waits: list[tuple[Sequence[Key], Sequence[Any]]] = []
        """For a chain of collectives: the wait's beginning, when each of them but the last had ended, and its end."""

    def exposed(self) -> dict[Key, float]:
        """Seconds of waiting: for each of a chain that part of the wait which lay between its predecessor's end and
        its own."""
        waits = [(keys, marks) for keys, marks in self.waits if None not in marks]  # those that were timed
        moments = iter(self._clock.seconds([mark for _, marks in waits for mark in marks]))
        exposed: dict[Key, float] = {}
        for keys, marks in waits:
            first, *middle, last = [next(moments) for _ in marks]
            # A step that ended before the wait began was hidden whole; what is exposed of the next begins with the
            # wait.
            within = [first, *(min(max(moment, first), last) for moment in middle), last]
            for key, (start, end) in zip(keys, pairwise(within), strict=False):
                exposed[key] = exposed.get(key, 0.0) + max(end - start, 0.0)
        return exposed

    def traffic(self) -> Traffic:
        """What this rank moved since ``begin_step``. On a GPU it waits until that has happened."""
        data = self._inner.ranks("data")
        rank = data[self.data_rank]
        exposed, unknown = self.exposed(), 0.0 if self.mark == self._clock.mark else math.nan
        self.timed = True
        rows = []
        for key in dict.fromkeys([*self.counts, *exposed]):
            count, size = self.counts.get(key, (0, 0))
            if key[0] in ("send", "receive"):
                pipe, sent = self._inner.ranks("pipe"), float(size)
                group = tuple(pipe[int(end)] for end in key[1])
            else:
                group = self._inner.ranks(key[1])
                # What each rank of a ring of k sends to work on n bytes in all: n(k − 1)/k in each round. To or from a
                # root it is so on average: one end of the chain sends nothing.
                sent = (1 + (key[0] in _TWO_ROUNDS)) * size * (len(group) - 1) / len(group)
            nodes = {member // self._per_node for member in group}
            leaving = sent * self._edges(group, rank, data)
            rows.append(Moved(*key, group, len(nodes) > 1, count, sent, exposed.get(key, unknown), leaving))
        rows.sort(key=lambda row: (-row.bytes, -row.exposed))
        return Traffic(rank, tuple(row for row in rows if len(row.group) > 1))

    def _edges(self, group: tuple[int, ...], rank: int, data: tuple[int, ...]) -> int:
        """How many edges of a ring lead out of this node, of all such rings in the data group together."""
        nodes, here = [member // self._per_node for member in group], rank // self._per_node
        # A ring of k ranks sends its share over each of k edges; those from this node to another one leave it.
        edges = sum(node == here != other for node, other in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        if not set(group) <= set(data):
            return edges
        # Rings over the data axis run side by side, one for each position in a node: this rank has one of them.
        return edges * sum(member // self._per_node == here for member in data) // nodes.count(here)
