"""Traffic: the bytes that a rank moved in a step, by operation and group, and the seconds it waited; and a transport
that counts them."""

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
ALONE = " alone"
"""The end of the scopes over some of the batch axes, for parameters that are sharded over the others."""


@dataclass(frozen=True)
class Moved:
    """A row: the bytes that a rank moved by an operation on a group."""

    operation: str
    """The operation of a collective, or "send" or "receive"."""
    scope: Scope
    """The scope of the group; for a send or receive, the pipe ranks of both ends."""
    group: tuple[int, ...]
    """The ranks of the group, numbered over the whole topology."""
    between_nodes: bool
    count: int
    bytes: float
    """The bytes this rank sends, by the formulas of a ring; the sender counts messages; gathered objects count 0."""
    exposed: float
    """The seconds for which this rank was blocked waiting; nan if waits were not timed."""
    leaving: float
    """The bytes that leave this rank's node, summed over the groups of this scope in this rank's data group."""


@dataclass(frozen=True)
class Traffic(Tabular):
    """The rows of a rank's traffic since the start of a call, largest first; prints as a table."""

    rank: int
    rows: tuple[Moved, ...]

    def select(self, operation: str | None = None, scope: Scope | None = None) -> tuple[Moved, ...]:
        """Returns the rows with this operation and this scope; None selects all."""
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
        """The seconds for which this rank was blocked by communication."""
        return sum(row.exposed for row in self.rows)

    @property
    def _data_axis(self) -> tuple[Moved, ...]:
        return tuple(row for row in self.rows if row.scope in DATA_AXIS or str(row.scope).endswith(ALONE))

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
        if number < 999.5:  # a number that rounds to 1000 takes the next unit
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


_TWO_ROUNDS = ("all_reduce", "maximum")
_INT = 16  # bytes of an integer with the call's mark

Key = tuple[str, Scope]
"""(operation, scope) of a row."""


class _Timed:
    """A work whose waits are timed. A wait counts in the step that waits."""

    __slots__ = ("_between", "_home", "_keys", "_work")

    def __init__(self, work: Work, home: Metered, keys: Sequence[Key], between: Sequence[Any] = ()) -> None:
        self._work, self._home, self._keys, self._between = work, home, keys, between

    def wait(self) -> object:
        before = self._home.mark()
        result = self._work.wait()
        self._home.waits.append((self._keys, (before, *self._between, self._home.mark())))
        return result


class Metered:
    """Wraps a transport, counts the bytes that this rank moves, and times this rank's waits.

    During a step it only records counts and marks; ``traffic`` computes the rest. The bytes of all-gathers that run
    after a call belong to that call; the time for which the next call waits for them belongs to the next call, which
    is blocked.

    ``timed``: whether waits are timed from the next ``begin_step`` on. ``traffic`` sets ``timed``, since the two events
    of each wait cost a tenth of the host's time for a GPU action, for a result that may never be read.
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
        return getattr(self._inner, name)

    # the methods of a transport

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
        """Makes, counts and times a blocking call."""
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

    # the measurements

    def begin_step(self) -> None:
        """Starts a new table."""
        self.counts: dict[Key, tuple[int, int]] = {}  # the number of calls, and the bytes of their buffers
        self.mark: Callable[[], Any] = self._clock.mark if self.timed else lambda: None
        self.waits: list[tuple[Sequence[Key], Sequence[Any]]] = []
        """(a chain's keys, marks); marks: the wait's start, each collective's end but the last's, the wait's end."""

    def exposed(self) -> dict[Key, float]:
        """Returns the seconds of waiting per key: in a chain, each collective counts the part of the wait between its
        predecessor's end and its own end."""
        waits = [(keys, marks) for keys, marks in self.waits if None not in marks]  # only timed waits
        moments = iter(self._clock.seconds([mark for _, marks in waits for mark in marks]))
        exposed: dict[Key, float] = {}
        for keys, marks in waits:
            first, *middle, last = [next(moments) for _ in marks]
            # A collective that ended before the wait began was hidden entirely; the next is exposed from the wait's
            # start.
            within = [first, *(min(max(moment, first), last) for moment in middle), last]
            for key, (start, end) in zip(keys, pairwise(within), strict=False):
                exposed[key] = exposed.get(key, 0.0) + max(end - start, 0.0)
        return exposed

    def traffic(self) -> Traffic:
        """Returns this rank's traffic since ``begin_step``. Waits for a GPU's work."""
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
                # Each rank of a ring of k sends n(k − 1)/k bytes per round for a buffer of n bytes. With a root, this
                # is the average: a rank at the end of the chain sends nothing.
                sent = (1 + (key[0] in _TWO_ROUNDS)) * size * (len(group) - 1) / len(group)
            nodes = {member // self._per_node for member in group}
            leaving = sent * self._edges(group, rank, data)
            rows.append(Moved(*key, group, len(nodes) > 1, count, sent, exposed.get(key, unknown), leaving))
        rows.sort(key=lambda row: (-row.bytes, -row.exposed))
        return Traffic(rank, tuple(row for row in rows if len(row.group) > 1))

    def _edges(self, group: tuple[int, ...], rank: int, data: tuple[int, ...]) -> int:
        """Returns the number of ring edges that leave this node, summed over the rings in the data group."""
        nodes, here = [member // self._per_node for member in group], rank // self._per_node
        # A ring of k ranks sends a share over each of k edges; count the edges from this node to other nodes.
        edges = sum(node == here != other for node, other in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        if not set(group) <= set(data):
            return edges
        # Rings over the data axis run in parallel, a ring for each position in a node; this rank is in a single ring.
        return edges * sum(member // self._per_node == here for member in data) // nodes.count(here)
