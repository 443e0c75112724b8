"""zero=3: FSDP2 under the units of a rank's stages, against plain PyTorch on the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpipe
from fxpipe import StageGraph
from fxpipe.distributed.processes import connect
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Transport
from fxpipe.errors import TopologyError
from fxpipe.graph.stage_calls import edges as roots_of
from fxpipe.graph.stage_graph import Edge, all_tensors
from fxpipe.parameters.ownership import Ownership, RankModule, ownership, release
from fxpipe.parameters.state_dicts import _whole, full_state_dict, load_into
from fxpipe.precision import Precision
from fxpipe.schedules.action import Op
from fxpipe.schedules.schedule import Schedule
from fxpipe.sharding.fsdp_gradients import FullyShardedGradients, fully_sharded
from tests.pool import Pool
from tests.thinned import ALL, every, in_turn

WIDTH, ROWS = 6, 12
ONE_NODE = Topology([("data", 2)])
TWO_NODES = Topology([("data", 4)], ranks_per_node=2)


# --- models of stages, and what plain PyTorch makes of them ---


class First(nn.Module):
    """A raw parameter without dimension, one with fewer rows than ranks, an LSTM that keeps a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.linear, self.lstm = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.spare = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.lstm(torch.tanh(self.linear(x)) * self.scale + self.row)[0])


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.branch = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        branch = self.branch(h) if (x[:, 0] > 2).any() else 0  # rows of the last replica alone
        return (self.linear(h) + branch).square().mean()


def two_stages() -> StageGraph:
    torch.manual_seed(0)
    return StageGraph.from_callables({"a": First(), "b": Last()}, [("a", "b")], {"a": ["x"], "b": ["x"]})


class TiedLast(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.own = weight, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return (self.own(h) @ self.weight.t()).square().mean()


def tied_stages() -> StageGraph:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    return StageGraph.from_callables({"a": first, "b": TiedLast(first.weight)}, [("a", "b")], {"a": ["x"], "b": ["x"]})


class Traced(nn.Module):
    """Raw parameters in two modules, and one layer that stands on both sides of a boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.linear = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.drop, self.norm = nn.Dropout(0.5), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.linear(x) * self.gain)
        return (self.norm(self.linear(self.drop(h)) + self.gain) - x).square().sum(-1).mean()


def traced_stages(training: bool = True) -> StageGraph:
    torch.manual_seed(0)
    model = Traced()
    return captured(model)


def captured(model: nn.Module) -> StageGraph:
    """As a call would capture it."""
    from fxpipe import passes
    from fxpipe.passes.chain import chain
    from fxpipe.trace import Request, capture

    return passes.split(chain(passes.default(), capture(Request(model, ("x",), {}, None), "symbolic")))


GRAPHS: dict[str, Callable[[], StageGraph]] = {"callables": two_stages, "tied": tied_stages, "traced": traced_stages}


def batch() -> Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7)).clamp(-1, 1)
    x[-1, 0] = 3.0
    return x


def plain(graph: StageGraph, x: Tensor) -> Tensor:
    values: dict[Edge, Any] = {}
    for stage in graph:
        outputs = stage.function(*[x if isinstance(entry, str) else values[entry] for entry in stage.inputs])
        values |= dict(zip(stage.outputs, outputs, strict=False))
    return outputs[-1]


def plain_gradients(
    build: Callable[[], StageGraph], replicas: int, shares: Sequence[float], times: float = 1.0
) -> dict[str, Tensor | None]:
    """One process runs all micro-batches of all replicas, one after another."""
    graph = build()
    graph.module.eval()
    for part in batch().chunk(replicas):
        for x, share in zip(part.chunk(len(shares)), shares, strict=True):
            if share:
                (plain(graph, x) * share * times).backward()
    return {name: parameter.grad for name, parameter in graph.module.named_parameters()}


# --- running a table by hand ---


@dataclass
class Rank:
    """One process: its stages, sharded."""

    graph: StageGraph
    schedule: Schedule
    transport: Transport
    owners: Ownership
    module: RankModule
    gradients: FullyShardedGradients

    def run(self, x: Tensor, shares: Sequence[float], factor: float | None = None, sync: bool = True) -> None:
        """One call; micro-batches of share 0 get no backward."""
        pipe_rank = self.transport.pipe_rank
        row = self.schedule.rows[pipe_rank]
        values: dict[Any, Any] = {}
        sends: list[Any] = []
        parts = x.chunk(len(shares))
        self.gradients.begin([self.graph], row, sync, scales=True)
        for action in row:
            if action.op is Op.F:
                self.gradients.settle(action.stage)
                self._compute(action, parts, shares, values, sends)
                continue
            self.gradients.before(action)
            if shares[action.microbatch]:
                self._compute(action, parts, shares, values, sends)
            self.gradients.after(action)
        self.gradients.flush()
        self.gradients.end(None if factor is None else torch.tensor(factor))
        for work, _ in sends:
            work.wait()

    def _compute(self, action: Any, parts: Any, shares: Any, values: Any, sends: Any) -> None:
        stage, m = self.graph[action.stage], action.microbatch
        here, ranks = self.transport.pipe_rank, self.graph.placement

        def give(key: Any, value: Tensor, there: int) -> None:
            values[key] = value
            if there != here:
                sends.append((self.transport.send((here, there), value.detach().contiguous()), value))

        def take(key: Any, there: int) -> Tensor:
            if there != here:
                values[key] = torch.empty(len(parts[m]), WIDTH)
                self.transport.receive((there, here), values[key]).wait()
            return values.pop(key)

        if action.op is Op.F:
            inputs = [
                parts[m] if isinstance(e, str) else take((e, m), ranks[e.source]).requires_grad_() for e in stage.inputs
            ]
            outputs, saved = stage.forward(*inputs)
            if stage.returns_result:
                saved.roots[-1] = roots_of(outputs[-1] * shares[m])
            values[stage.index, m] = saved
            for edge, value in zip(stage.outputs, outputs, strict=False):
                give((edge, m), value, ranks[edge.target])
        else:
            arriving = [take((edge, m, "gradient"), ranks[edge.target]) for edge in stage.outputs]
            returned = stage.backward(values.pop((stage.index, m)), arriving + [True] * stage.returns_result)
            for entry, gradient in zip(stage.inputs, returned, strict=True):
                if isinstance(entry, Edge):
                    give((entry, m, "gradient"), gradient, ranks[entry.source])

    def gathered(self) -> dict[str, Tensor | None]:
        """Every gradient as a whole."""
        return {
            name: None if p.grad is None else _whole(p.grad, self.transport)
            for name, p in self.module.named_parameters()
        }

    def part(self, x: Tensor) -> Tensor:
        return x.chunk(self.transport.data_size)[self.transport.data_rank]


def sharded(
    build: Callable[[], StageGraph], topology: Topology, microbatches: int, scope: str = "node", precision: Any = None
) -> Rank:
    """What compile does."""
    graph = build()
    graph.module.eval()
    ranks = topology.size("pipe")
    graph = dataclasses.replace(graph, placement=tuple(min(stage.index, ranks - 1) for stage in graph))
    schedule = fxpipe.schedules.build(
        "1f1b", graph.stage_edges, microbatches, graph.placement, stages=len(graph), tied=graph.tied
    )
    transport, owners = connect(topology), ownership(graph)
    groups = {"shard": topology.shard_groups(), "replica": topology.replica_groups()}
    if scope == "data":
        groups = {"shard": topology.groups("data"), "replica": [[r] for r in range(topology.world_size)]}
    groups |= {"gather": groups["shard"], "flags": topology.groups("data")}
    transport.open([(a, b) for a in range(ranks) for b in range(ranks) if a != b], list(owners.tied), groups)
    mine = owners.names[transport.pipe_rank]
    release(graph.module, mine)
    mesh = topology.data_mesh(scope)
    gradients = fully_sharded(graph.module, [graph], mesh, transport, owners, precision)
    graph = graph.with_tensors_of_module()
    return Rank(graph, schedule, transport, owners, RankModule(graph.module, mine), gradients)


def shares_of(rank: Rank, microbatches: int) -> list[float]:
    return [1 / (microbatches * rank.transport.data_size)] * microbatches


def check(rank: Rank, expected: dict[str, Tensor | None], **tolerance: float) -> None:
    for name, gradient in rank.gathered().items():
        wanted = expected[name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


# --- tests ---


def one_call(kind: str, topology: Topology, microbatches: int, scope: str) -> None:
    rank = sharded(GRAPHS[kind], topology, microbatches, scope)
    size = topology.shard_groups()[0] if scope == "node" else topology.groups("data")[0]
    for name, parameter in rank.module.named_parameters():
        assert isinstance(parameter, DTensor) == bool(parameter.ndim and name != "a.none"), name
        if isinstance(parameter, DTensor):
            assert parameter.to_local().shape[0] <= -(-parameter.shape[0] // len(size))
    shares = shares_of(rank, microbatches)
    expected = plain_gradients(GRAPHS[kind], rank.transport.data_size, shares)
    for _ in range(2):
        rank.gradients.clear()
        rank.run(rank.part(batch()), shares)
        check(rank, expected)
    rank.run(rank.part(batch()), shares)  # adds to what is there
    check(rank, plain_gradients(GRAPHS[kind], rank.transport.data_size, shares, times=2))


WHERE = [
    (ONE_NODE, "node"),
    (TWO_NODES, "node"),
    (TWO_NODES, "data"),
    (Topology([("data", 2)], 1), "node"),
    (Topology([("pipe", 2), ("data", 2)]), "node"),
    (Topology([("data", 2), ("pipe", 2)], 2), "node"),
]


@pytest.mark.parametrize(("where", "kind", "microbatches"), in_turn(WHERE, list(GRAPHS), [1, 3]), ids=repr)
def test_gradients_are_those_of_the_whole_batch(
    pool: Pool, where: tuple[Topology, str], kind: str, microbatches: int
) -> None:
    topology, scope = where
    pool.run(one_call, kind, topology, microbatches, scope, ranks=topology.world_size)


def without_weight(shares: dict[int, list[float]]) -> None:
    """``shares``: by replica."""
    rank = sharded(two_stages, TWO_NODES, 2)
    graph = two_stages()
    graph.module.eval()
    for replica, part in enumerate(batch().chunk(4)):
        for x, share in zip(part.chunk(2), shares[replica], strict=True):
            if share:
                (plain(graph, x) * share).backward()
    for _ in range(2):
        rank.gradients.clear()
        rank.run(rank.part(batch()), shares[rank.transport.data_rank])
        check(rank, {name: parameter.grad for name, parameter in graph.module.named_parameters()})


@pytest.mark.parametrize(
    "shares",
    every(
        2,
        [
            {0: [0.5, 0], 1: [0, 0.25], 2: [0.125, 0.125], 3: [0, 0]},
            {0: [0, 0], 1: [0, 0], 2: [0, 1.0], 3: [0, 0]},
            {0: [0, 0], 1: [0, 0], 2: [0, 0], 3: [0, 0]},
        ],
    ),
)
def test_a_replica_that_runs_no_last_backward_or_none_takes_part(pool: Pool, shares: dict[int, list[float]]) -> None:
    pool.run(without_weight, shares, ranks=4)


def several_calls(topology: Topology, factor: float | None, syncs: list[bool]) -> None:
    """Calls of the same batch in a row: only what this call makes is scaled, and what is not reduced waits."""
    rank = sharded(two_stages, topology, 2)
    shares = shares_of(rank, 2)
    for sync in syncs:
        rank.run(rank.part(batch()), shares, factor, sync)
    check(rank, plain_gradients(two_stages, rank.transport.data_size, shares, len(syncs) * (factor or 1.0)))
    rank.gradients.clear()
    assert all(parameter.grad is None for parameter in rank.module.parameters())
    rank.run(rank.part(batch()), shares)
    check(rank, plain_gradients(two_stages, rank.transport.data_size, shares))


@pytest.mark.parametrize(
    ("way", "syncs"),
    every(
        3,
        list(
            product(
                [(TWO_NODES, 0.5), (ONE_NODE, None)],
                [[False, False, True, True], [True, True], [False, True], [True, False, True]],
            )
        ),
    ),
    ids=repr,
)
def test_calls_add_up_reduced_or_not(pool: Pool, way: tuple[Topology, float | None], syncs: list[bool]) -> None:
    topology, factor = way
    pool.run(several_calls, topology, factor, syncs, ranks=topology.world_size)


def cleared_between() -> None:
    rank = sharded(two_stages, ONE_NODE, 2)
    rank.run(rank.part(batch()), shares_of(rank, 2), sync=False)
    for parameter in rank.module.parameters():
        parameter.grad = None  # as torch's optimizers do
    rank.run(rank.part(batch()), shares_of(rank, 2))
    check(rank, plain_gradients(two_stages, 2, shares_of(rank, 2)))


def test_zero_grad_of_a_plain_optimizer_drops_what_is_not_reduced_yet(pool: Pool) -> None:
    pool.run(cleared_between, ranks=2)


def trained(topology: Topology, kind: str) -> None:
    """AdamW steps; then the whole state dict, evaluation, and loading."""
    rank = sharded(GRAPHS[kind], topology, 2)
    reference = GRAPHS[kind]()
    reference.module.eval()
    optimizer = torch.optim.AdamW(rank.module.parameters(), lr=0.01)
    plain_optimizer = torch.optim.AdamW(reference.module.parameters(), lr=0.01)
    shares, replicas = shares_of(rank, 2), rank.transport.data_size
    for _ in range(20 if ALL else 5):  # AdamW corrects the first steps most
        optimizer.zero_grad()
        rank.run(rank.part(batch()), shares)
        optimizer.step()
        plain_optimizer.zero_grad()
        for part in batch().chunk(replicas):
            for x, share in zip(part.chunk(2), shares, strict=True):
                (plain(reference, x) * share).backward()
        plain_optimizer.step()
    model = rank.graph.module
    state = full_state_dict(model, rank.module, rank.owners, rank.transport, torch.device("cpu"))
    for name, tensor in reference.module.state_dict().items():
        torch.testing.assert_close(state[name], tensor, msg=name, rtol=0, atol=1e-6)
    fresh = GRAPHS[kind]().module.state_dict()
    load_into(model, rank.module, fresh)
    again = full_state_dict(model, rank.module, rank.owners, rank.transport, torch.device("cpu"))
    load_into(model, rank.module, rank.module.state_dict())
    assert all(torch.equal(again[name], tensor) for name, tensor in fresh.items())


@pytest.mark.parametrize(("kind", "topology"), in_turn(list(GRAPHS), [TWO_NODES, Topology([("pipe", 2), ("data", 2)])]))
def test_some_steps_and_a_checkpoint(pool: Pool, topology: Topology, kind: str) -> None:
    pool.run(trained, topology, kind, ranks=4)


def evaluated() -> None:
    rank = sharded(traced_stages, TWO_NODES, 2)
    model = rank.graph.module
    reference = traced_stages()
    other = captured(model)  # of the sharded model, as a call of another kind does
    other = dataclasses.replace(other, placement=(0, 0))
    for graph in (rank.graph, other):
        x = rank.part(batch())
        row = [action for action in rank.schedule.rows[0] if action.op is Op.F]
        values: dict[Any, Any] = {}
        with rank.gradients.evaluating([graph], rank.schedule.rows[0]), torch.no_grad():
            for action in row:
                rank.gradients.settle(action.stage)
                part, stage = x.chunk(2)[action.microbatch], graph[action.stage]
                inputs = [part if isinstance(e, str) else values[e, action.microbatch] for e in stage.inputs]
                outputs, _ = stage.forward(*inputs)
                values |= {(e, action.microbatch): v for e, v in zip(stage.outputs, outputs, strict=False)}
                if stage.returns_result:
                    torch.testing.assert_close(outputs[-1], plain(captured(reference.module.eval()), part).detach())
        for module in (model, *(stage.module for stage in graph)):
            assert all(isinstance(p, DTensor) for p in module.parameters())
        assert all(p.grad is None for p in rank.module.parameters())
    rank.graph = other
    rank.run(rank.part(batch()), shares_of(rank, 2))
    check(rank, plain_gradients(traced_stages, 4, shares_of(rank, 2)))


def test_evaluation_gathers_and_frees_and_a_later_capture_runs_as_well(pool: Pool) -> None:
    pool.run(evaluated, ranks=4)


class Looking(nn.Module):
    """Says in which type it computes; some micro-batches leave a parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.branch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.seen = nn.Parameter(torch.tensor(2.0)), set[Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {self.linear.weight.dtype, self.scale.dtype}
        h = self.linear(x.bfloat16()) * self.scale
        return (self.branch(h) if (x[:, 0] > 2).any() else h).float().square().mean()


def looking() -> StageGraph:
    torch.manual_seed(0)
    return StageGraph.from_callables({"a": Looking()}, [], {"a": ["x"]})


def in_bfloat16(reduce: torch.dtype) -> None:
    rank = sharded(looking, TWO_NODES, 3, precision=Precision(reduce=reduce))
    rank.run(rank.part(batch()), shares_of(rank, 3))
    assert rank.graph.module.a.seen == {torch.bfloat16}
    for parameter in rank.module.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
    model = looking().module.a.bfloat16()
    expected = {f"a.{name}": torch.zeros(p.shape) for name, p in model.named_parameters()}
    for part in batch().chunk(4):  # each micro-batch's gradient is of bfloat16, and they add up in float32
        for x in part.chunk(3):
            model.zero_grad()
            (model(x) / 12).backward()
            for name, p in model.named_parameters():
                expected[f"a.{name}"] += 0 if p.grad is None else p.grad.float()
    loose = {} if reduce == torch.float32 else {"rtol": 0.03, "atol": 1e-3}
    check(rank, expected, **loose)


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_computing_in_bfloat16_keeps_shards_and_sums_in_float32(pool: Pool, reduce: torch.dtype) -> None:
    pool.run(in_bfloat16, reduce, ranks=4)


def pieces_of(topology: Topology) -> dict[str, tuple[int, int, bool]]:
    rank = sharded(tied_stages if topology.size("pipe") > 1 else two_stages, topology, 2)
    rank.run(rank.part(batch()), shares_of(rank, 2))
    for piece in rank.gradients.pieces():
        gradient, parameter = piece.gradient(), piece.parameter
        assert isinstance(parameter, DTensor) == bool(parameter.ndim)
        assert piece.data.numel() == piece.stop - piece.start
        assert gradient is None or gradient.shape == piece.data.shape
        with torch.no_grad():
            piece.data.zero_()
            assert not (parameter.to_local() if isinstance(parameter, DTensor) else parameter).any()
    assert rank.gradients.shards == (rank.gradients.way.shards > 1)
    rank.gradients.publish(rank.gradients.claim(["a.scale"], whole=False))
    rank.gradients.settle()
    return {piece.name: (piece.start, piece.stop, piece.counts) for piece in rank.gradients.pieces()}


def test_pieces_cover_every_parameter_once(pool: Pool) -> None:
    one, two, *_ = pool.run(pieces_of, TWO_NODES, ranks=4)
    assert (one["a.scale"], two["a.scale"]) == ((0, 1, True), (0, 1, False))
    assert (one["a.row"], two["a.row"]) == ((0, 6, True), (6, 6, True))
    assert (one["b.linear.weight"], two["b.linear.weight"]) == ((0, 18, True), (18, 30, True))


def test_a_tied_parameter_counts_with_its_first_owner(pool: Pool) -> None:
    first, _, last, _ = pool.run(pieces_of, Topology([("pipe", 2), ("data", 2)]), ranks=4)
    assert first["a.weight"] == (0, 18, True)
    assert last["a.weight"] == (0, 18, False)


def refused_whole() -> str:
    rank = sharded(two_stages, ONE_NODE, 1)
    assert [piece.name for piece in rank.gradients.claim(["a.scale"], whole=True).pieces] == ["a.scale"]
    with pytest.raises(fxpipe.RunError) as error:
        rank.gradients.claim(["a.scale", "a.row"], whole=True)
    return str(error.value)


def test_optimizers_that_need_whole_parameters_are_refused(pool: Pool) -> None:
    assert "the optimizer steps a.row as a whole, which zero=3 shards" in pool.run(refused_whole, ranks=2)[0]


def three_tied_stages() -> StageGraph:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    stages = {"a": first, "m": nn.Linear(WIDTH, WIDTH), "b": TiedLast(first.weight)}
    return StageGraph.from_callables(stages, [("a", "m"), ("m", "b")], {"a": ["x"], "b": ["x"]})


# the middle pipe rank's data group straddles the two nodes
STRADDLING = Topology([("pipe", 3), ("data", 2)], ranks_per_node=3)


def tied_unevenly() -> tuple[list[int], str]:
    connect(STRADDLING)
    shape = list(STRADDLING.data_mesh().mesh.shape)

    def tied() -> StageGraph:  # over the first pipe rank and the middle one
        graph = three_tied_stages()
        graph[1].module.weight = graph[0].module.weight
        return dataclasses.replace(
            graph, stages=tuple(dataclasses.replace(s, tensors=all_tensors(s.module, s.name)) for s in graph)
        )

    with pytest.raises(TopologyError) as error:
        fxpipe.compile(tied(), STRADDLING, microbatches=1, zero=3)
    return shape, str(error.value)


def test_tied_parameters_whose_shards_would_differ_are_refused(pool: Pool) -> None:
    results = pool.run(tied_unevenly, ranks=6)
    assert [shape for shape, _ in results] == [[1, 2], [1, 2], [2, 1], [2, 1], [1, 2], [1, 2]]
    for _, says in results:
        assert (
            "a.weight is tied over the pipe ranks [0, 1, 2], whose data groups have [2, 1, 2] ranks to a node" in says
        )


def failing(rank_that_fails: int) -> None:
    rank = sharded(two_stages, ONE_NODE, 2)
    if rank.transport.data_rank == rank_that_fails:
        rank.transport.abort("it broke")
        raise ValueError("it broke")
    rank.run(rank.part(batch()), shares_of(rank, 2))


def test_when_a_rank_fails_the_others_end(pool: Pool) -> None:
    outcomes = pool.outcomes(failing, 1, ranks=2)
    assert isinstance(outcomes[0].error, fxpipe.RunError), outcomes[0]


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.tag = "no decay"  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def hooked() -> tuple[list[Any], Any]:
    calls: list[Any] = []
    rank = sharded(lambda: StageGraph.from_callables({"a": Hooked()}, [], {"a": ["x"]}), ONE_NODE, 2)
    weight = dict(rank.module.named_parameters())["a.linear.weight"]
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
    rank.run(rank.part(batch()), shares_of(rank, 2))
    assert type(rank.graph.module.a) is Hooked
    return calls, weight.tag


def test_hooks_and_attributes_of_parameters(pool: Pool) -> None:
    assert pool.run(hooked, ranks=2) == [([True], "no decay")] * 2


def frozen_later() -> None:
    rank = sharded(two_stages, ONE_NODE, 2)
    dict(rank.module.named_parameters())["a.linear.weight"].requires_grad_(False)
    rank.run(rank.part(batch()), shares_of(rank, 2))
    expected = plain_gradients(two_stages, 2, shares_of(rank, 2))
    check(rank, expected | {"a.linear.weight": None})


def test_a_parameter_may_be_frozen_after_compile(pool: Pool) -> None:
    pool.run(frozen_later, ranks=2)
