"""Traffic: bytes by the formulas of a ring, what leaves a node, what a wait costs, and that nothing else changes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.distributed.collective import Collective
from fxpipe.distributed.stopwatch import HostClock, Stopwatch
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.traffic import Metered, Moved, Traffic
from fxpipe.distributed.transport import LocalTransport, Transport
from tests.pool import Pool
from tests.strict_transport import connect
from tests.thinned import seeds


def groups(topology: Topology, sharded_over: str = "node") -> dict[str, list[list[int]]]:
    """The groups of the data axis that a compiled model opens."""
    data, whole = topology.groups("data"), [list(range(topology.world_size))]
    if sharded_over == "data":
        alone = [[rank] for rank in range(topology.world_size)]
        return {"shard": data, "replica": alone, "gather": data, "flags": data, "all": whole}
    shard, replica = topology.shard_groups(), topology.replica_groups()
    return {"shard": shard, "replica": replica, "gather": shard, "flags": data, "all": whole}


class Still(LocalTransport):
    """A rank of a topology with nobody behind the others: it moves nothing, and ends nothing by itself."""

    def __init__(self, topology: Topology, rank: int = 0, sharded_over: str = "node") -> None:
        lists = {"pipe": topology.groups("pipe"), "data": topology.groups("data"), **groups(topology, sharded_over)}
        self._ranks: dict[Any, tuple[int, ...]] = {
            scope: tuple(next(group for group in ranks if rank in group)) for scope, ranks in lists.items()
        }
        self.pipe_rank = self._ranks["pipe"].index(rank)
        self.data_rank = self._ranks["data"].index(rank)
        self.data_size = len(self._ranks["data"])
        self.steps: list[Collective] = []
        self.works: list[Slow] = []
        self.something_else = "told"

    def ranks(self, scope: Any) -> tuple[int, ...]:
        return tuple(self._ranks["pipe"][place] for place in scope) if isinstance(scope, tuple) else self._ranks[scope]

    def send(self, pair: Any, buffer: Tensor) -> Slow:
        self.works.append(Slow())
        return self.works[-1]

    receive = send

    def start(self, steps: Sequence[Collective], what: str) -> Slow:
        self.steps += steps
        self.works.append(Slow([step.then for step in steps]))
        return self.works[-1]


class Ticks:
    """A clock that a test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, marks: Any) -> list[float]:
        return list(marks)


CLOCK = Ticks()


class Slow:
    """A work that ends ``takes`` seconds after its wait began, of a chain each step so long after the one before."""

    def __init__(self, follow: Sequence[Any] = (lambda: None,)) -> None:
        self.takes, self._follow = [0.0] * len(follow), follow

    def wait(self) -> str:
        for seconds, follow in zip(self.takes, self._follow, strict=True):
            CLOCK.now += seconds
            follow()
        return "waited"


def metered(topology: Topology, rank: int = 0, sharded_over: str = "node") -> Metered:
    CLOCK.now = 0.0
    return Metered(Still(topology, rank, sharded_over), topology, CLOCK)


def filled(numbers: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(numbers, dtype=dtype)


# --- a step of the data axis, as the reducer does it: one bucket ---

ELEMENTS = 48 * 16  # of a stage: divides by every group below
G_BYTES, P_BYTES = 4 * ELEMENTS, 2 * ELEMENTS  # gradients in float32, parameters in bfloat16


def reduce_scatter(transport: Transport, whole: Tensor) -> Collective:
    return Collective("reduce_scatter", "shard", whole[: len(whole) // len(transport.ranks("shard"))].clone(), whole)


def all_gather(transport: Transport, dtype: torch.dtype) -> Collective:
    part = filled(ELEMENTS // len(transport.ranks("gather")), dtype)
    return Collective("all_gather", "gather", filled(ELEMENTS, dtype), part)


def zero_1(transport: Transport, microbatches: int) -> None:
    scattered = reduce_scatter(transport, filled(ELEMENTS))
    transport.start([scattered, Collective("all_reduce", "replica", scattered.output)], "bucket 0").wait()
    transport.start([all_gather(transport, torch.bfloat16)], "parameters 0").wait()


def data_topology(nodes: int, per_node: int) -> Topology:
    return Topology([("data", nodes * per_node)], ranks_per_node=per_node)


def bytes_of(traffic: Traffic) -> set[tuple[Any, ...]]:
    return {(row.operation, row.scope, row.group, row.count, row.bytes, row.leaving) for row in traffic.rows}


@pytest.mark.parametrize("axes", [[("pipe", 2), ("data", 4)], [("data", 4), ("pipe", 2)]])
def test_the_other_axis_moves_nothing_of_it(axes: list[tuple[str, int]]) -> None:
    """8 ranks, 4 to a node: with pipe outermost a data group is one node, else it has 2 ranks in each."""
    topology = Topology(axes, ranks_per_node=4)
    transport = metered(topology, 3)
    nodes, per_node = (1, 4) if axes[0][0] == "pipe" else (2, 2)
    zero_1(transport, 1)
    transport.send((0, 1), filled(100)).wait()
    transport.all_reduce("pipe", filled(100))
    traffic = transport.traffic()
    assert traffic.between == 2 * G_BYTES * (nodes - 1) / nodes
    assert traffic.inside == (G_BYTES + P_BYTES) * (per_node - 1) / per_node


# --- rows ---


def only(rows: Sequence[Moved]) -> Moved:
    (row,) = rows
    return row


RING = {"all_reduce": 2, "maximum": 2, "reduce_scatter": 1, "all_gather": 1, "reduce": 1, "broadcast": 1}
"""How often a rank of a ring sends (k - 1)/k of the whole."""


def random_call(draw: random.Random, transport: Metered) -> tuple[Any, ...]:
    """Makes a call; its operation, its scope, and the bytes that this rank sends by the formulas."""
    scope = draw.choice(["shard", "replica", "gather", "flags", "all", "data", "pipe", (0, 1)])
    ranks, numbers = len(transport.ranks(scope)), 24 * draw.randint(1, 9)
    kind = draw.choice(
        [*RING, "all_reduce, blocking", "broadcast, blocking", "gather", "gather_int", "send", "receive"]
    )
    if kind in RING:
        whole, part = filled(numbers), filled(numbers // ranks)
        buffers = {"reduce_scatter": (part, whole), "all_gather": (whole, part)}.get(kind, (whole, None))
        transport.start([Collective(kind, scope, *buffers)], "it").wait()  # type: ignore[arg-type]
        return kind, scope, RING[kind] * 4 * numbers * (ranks - 1) / ranks
    if kind == "all_reduce, blocking":
        transport.all_reduce(scope, filled(numbers))
        return "all_reduce", scope, 2 * 4 * numbers * (ranks - 1) / ranks
    if kind == "broadcast, blocking":
        transport.broadcast(scope, filled(numbers), 0)
        return "broadcast", scope, 4 * numbers * (ranks - 1) / ranks
    if kind == "gather":
        transport.gather(scope, "anything")
        return kind, scope, 0  # objects are counted without their bytes
    if kind == "gather_int":
        transport.gather_int(scope, 7)
        return kind, scope, 16 * (ranks - 1)
    pair = draw.choice([(0, 1), (1, 0)])
    getattr(transport, kind)(pair, filled(numbers)).wait()
    return kind, pair, 4 * numbers if kind == "send" else 0


@pytest.mark.parametrize("seed", seeds(24))
def test_random_calls_are_counted_with_the_bytes_of_rings(seed: int) -> None:
    draw = random.Random(seed)
    axes = [("pipe", 2), ("data", draw.choice([1, 2, 4]))]
    topology = Topology(axes if draw.random() < 0.5 else axes[::-1], ranks_per_node=draw.choice([None, 1, 2]))
    transport = metered(topology, draw.randrange(topology.world_size))
    wanted: dict[Any, tuple[int, float]] = {}
    for _ in range(20):
        operation, scope, size = random_call(draw, transport)
        count, total = wanted.get((operation, scope), (0, 0.0))
        if len(transport.ranks(scope)) > 1:  # one rank moves nothing
            wanted[operation, scope] = count + 1, total + size
    rows = transport.traffic().rows
    assert {(row.operation, row.scope): (row.count, row.bytes) for row in rows} == wanted
    assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)
    per_node = topology.ranks_per_node or topology.world_size
    here = transport.ranks("data")[transport.data_rank] // per_node
    for row in rows:
        assert row.group == transport.ranks(row.scope)
        nodes = {rank // per_node for rank in row.group}
        assert row.between_nodes == (len(nodes) > 1)
        # Of each ring one edge leads out of this node; there are several rings of replicas side by side.
        rings = topology.replica_groups() if row.scope == "replica" else [list(row.group)]
        beside = [ring for ring in rings if set(ring) <= set(transport.ranks("data")) or row.scope != "replica"]
        out = sum(here in {rank // per_node for rank in ring} for ring in beside)
        assert row.leaving == (row.bytes * out if len(nodes) > 1 else 0)
    for row in rows[:3]:
        assert row in transport.traffic().select(row.operation)
        assert transport.traffic().select(row.operation, row.scope) == (row,)


def test_a_group_of_one_rank_moves_nothing() -> None:
    transport = metered(data_topology(1, 1))
    zero_1(transport, 1)
    assert str(transport.traffic()) == "rank 0 moved nothing"


# --- time ---


def takes(transport: Metered, *seconds: float) -> None:
    """What was started last takes so long, from when it is waited for."""
    transport.works[-1].takes = list(seconds)


def test_a_wait_is_exposed_and_computing_beside_it_is_not() -> None:
    transport = metered(data_topology(1, 2))
    step = [Collective("all_reduce", "shard", filled(8))]
    work = transport.start(step, "bucket 0")
    takes(transport, 0.25)
    CLOCK.now += 5.0  # backward goes on meanwhile
    assert work.wait() == "waited"
    work = transport.start(step, "bucket 1")
    takes(transport, 0.5)
    work.wait()
    work.wait()
    assert only(transport.traffic().rows).exposed == 0.25 + 0.5 + 0.5
    message = transport.receive((0, 0), filled(1))
    takes(transport, 2.0)
    message.wait()
    assert transport.traffic().exposed == 1.25 + 2.0


def test_where_marks_cost_something_waits_are_timed_once_traffic_was_asked_for() -> None:
    topology = data_topology(2, 2)
    CLOCK.now = 0.0
    transport = Metered(Still(topology), topology, CLOCK, timed=False)

    def step() -> Traffic:
        transport.begin_step()
        transport.all_reduce("data", filled(100))
        chain = [
            Collective("all_reduce", "shard", filled(8), then=lambda: None),
            Collective("all_reduce", "replica", filled(8)),
        ]
        work = transport.start(chain, "bucket 0")
        takes(transport, 0.25, 0.5)
        work.wait()
        return transport.traffic()

    first, second = step(), step()
    assert bytes_of(first) == bytes_of(second)
    assert all(math.isnan(row.exposed) for row in first.rows)
    assert "waits are timed from the next call on" in str(first)
    assert {row.scope: row.exposed for row in second.rows} == {"data": 0.0, "shard": 0.25, "replica": 0.5}
    assert second.exposed == 0.75
    assert "750.00 ms exposed in all" in str(second)


def test_of_a_chain_each_step_is_exposed_while_it_runs() -> None:
    topology = data_topology(2, 2)
    transport, followed = metered(topology), []
    steps = [
        Collective("reduce_scatter", "shard", filled(4), filled(8), then=lambda: followed.append("scattered")),
        Collective("all_reduce", "replica", filled(4)),
        Collective("all_gather", "gather", filled(8), filled(4), then=lambda: followed.append("gathered")),
    ]
    steps[-1] = steps[-1].followed_by(lambda: followed.append("ended"))
    work = transport.start(steps, "bucket 0")
    takes(transport, 0.25, 4.0, 0.5)
    work.wait()
    assert followed == ["scattered", "gathered", "ended"]
    exposed = {row.operation: row.exposed for row in transport.traffic().rows}
    assert exposed == {"reduce_scatter": 0.25, "all_reduce": 4.0, "all_gather": 0.5}


def test_what_of_a_chain_was_done_before_the_wait_is_not_exposed() -> None:
    transport = metered(data_topology(2, 2))
    steps = [
        Collective("reduce_scatter", "shard", filled(4), filled(8)),
        Collective("all_reduce", "replica", filled(4)),
    ]
    work = transport.start(steps, "bucket 0")
    CLOCK.now = 1.0
    transport.steps[0].then()  # ends beside the caller, in its second 1
    CLOCK.now = 3.0
    transport.works[-1]._follow = (lambda: None,) * 2
    takes(transport, 0.0, 2.0)
    work.wait()
    exposed = {row.operation: row.exposed for row in transport.traffic().rows}
    assert exposed == {"reduce_scatter": 0.0, "all_reduce": 2.0}


def test_a_table_covers_a_call_and_what_followed_it() -> None:
    """The all-gathers after the optimizer's step count with the call before it; the wait with the call that waits."""
    transport = metered(data_topology(1, 2))
    transport.begin_step()
    transport.start([Collective("reduce_scatter", "shard", filled(4), filled(8))], "bucket 0").wait()
    parameters = transport.start([Collective("all_gather", "gather", filled(8), filled(4))], "parameters 0")
    takes(transport, 0.75)
    first = transport.traffic()
    assert [(row.operation, row.count, row.exposed) for row in first.rows] == [
        ("reduce_scatter", 1, 0.0), ("all_gather", 1, 0.0),
    ]  # fmt: skip
    transport.begin_step()
    assert transport.traffic().rows == ()
    parameters.wait()
    assert [(row.operation, row.count, row.exposed) for row in transport.traffic().rows] == [("all_gather", 0, 0.75)]
    assert first.rows[0].count == 1


# --- a transport like the other ---


def test_everything_else_is_the_other_transports() -> None:
    topology = Topology([("pipe", 2), ("data", 2)])
    transport: Transport = Metered(Still(topology, 3), topology, HostClock())
    assert (transport.pipe_rank, transport.data_rank, transport.data_size) == (1, 1, 2)
    assert transport.device == torch.device("cpu")
    assert transport.ranks("pipe") == (1, 3)
    assert transport.something_else == "told"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="nothing_like_it"):
        transport.nothing_like_it  # type: ignore[attr-defined] # noqa: B018


def between_processes() -> tuple[Traffic, list[float], list[Any]]:
    """A step of DDP over two "nodes" of two ranks, really run; its result, and when its chain ran."""
    topology = data_topology(2, 2)
    transport = Metered(connect(topology), topology, HostClock())
    transport.open([], [], groups(topology))
    stopwatch = Stopwatch(HostClock())
    whole = torch.arange(ELEMENTS, dtype=torch.float32)
    part, gathered = filled(ELEMENTS // 2), torch.zeros(ELEMENTS)
    steps = [
        Collective("reduce_scatter", "shard", part, whole),
        Collective("all_reduce", "replica", part),
        Collective("all_gather", "gather", gathered, part),
    ]
    steps[-1] = steps[-1].followed_by(stopwatch.started("bucket 0"))
    transport.start(steps, "bucket 0").wait()
    traffic = transport.traffic()
    transport.close()
    return traffic, gathered.tolist(), stopwatch.reductions()


def test_between_processes_it_is_the_same(pool: Pool) -> None:
    for traffic, gathered, reductions in pool.run(between_processes, ranks=4):
        assert gathered == [4.0 * number for number in range(ELEMENTS)]
        assert traffic.between == 2 * G_BYTES / 2
        assert traffic.inside == 2 * G_BYTES / 2
        assert {row.operation for row in traffic.rows} == {"reduce_scatter", "all_reduce", "all_gather"}
        (chain,) = reductions
        assert traffic.exposed > 0
        assert chain.start < chain.end


# --- the table ---


def test_the_table_reads_well() -> None:
    topology = Topology([("pipe", 2), ("data", 4)], ranks_per_node=2)
    transport = metered(topology, 1)
    for _ in range(2):
        work = transport.start(
            [
                Collective("reduce_scatter", "shard", filled(3_000_000), filled(6_000_000)),
                Collective("all_reduce", "replica", filled(3_000_000)),
            ],
            "bucket 0",
        )
        takes(transport, 0.001, 0.0125)
        work.wait()
    transport.send((0, 1), filled(512))
    transport.gather("pipe", None)
    assert str(transport.traffic()).splitlines() == [
        "operation       group           nodes      count    bytes    ms exposed",
        "--------------  --------------  -------  -------  -------  ------------",
        "all_reduce      replica [1, 3]  between        2    24 MB         25.00",
        "reduce_scatter  shard [0, 1]    inside         2    24 MB          2.00",
        "send            1 → 5           between        1  2.05 kB          0.00",
        "gather          pipe [1, 5]     between        1      0 B          0.00",
        "rank 1, gradients and parameters: 48 MB leave the node for others, 24 MB stay in it; 27.00 ms exposed in all",
    ]


# --- Traffic: the rows that are asked for, and the table ---


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600_000, "1 GB"), (1.5e12, "1.5 TB")],
)
def test_sizes(size: float, told: str) -> None:
    row = Moved("all_reduce", "data", tuple(range(64)), False, 1, size, 0.0, 0.0)
    assert told in str(Traffic(0, (row,)))
    assert "data [0, 1, 2, 3, …, 63]" in str(Traffic(0, (row,)))
