"""zero=3: FSDP2 under the units of a rank's stages, against plain PyTorch on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxpipe
from fxpipe import StageGraph
from fxpipe.distributed.processes import connect
from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError, TopologyError
from fxpipe.graph.stage_graph import Edge
from fxpipe.precision import Precision
from fxpipe.sharding.fully_sharded import in_blocks
from fxpipe.tensors.dtensors import whole_of
from tests.pool import Pool
from tests.sharding.test_parallelize import in_a_new_world
from tests.thinned import every, in_turn

WIDTH, ROWS = 6, 24
ONE_NODE = Topology([("data", 2)])
TWO_NODES = Topology([("data", 4)], ranks_per_node=2)


# --- models of stages, and what plain PyTorch makes of them ---


class First(nn.Module):
    """A raw parameter without dimension, one with fewer rows than ranks, an LSTM that keeps a list of its own, a frozen
    weight in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.linear, self.lstm = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.spare = nn.Parameter(torch.randn(4, 3))
        self.bits = nn.Parameter(torch.eye(WIDTH).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x)) * self.scale + self.row
        return self.frozen(self.lstm(h)[0] @ self.bits.to(x.dtype))


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


class Counted(Last):
    """A loss that says how many items it is over: its gradients are scaled behind the step."""

    def forward(self, x: Tensor, h: Tensor) -> fxpipe.Sum:  # type: ignore[override]
        return fxpipe.Sum(super().forward(x, h) * 2.0, (x[:, 0] > 0).sum() + 1)


def counted_stages() -> StageGraph:
    torch.manual_seed(0)
    return StageGraph.from_callables({"a": First(), "b": Counted()}, [("a", "b")], {"a": ["x"], "b": ["x"]})


def traced() -> nn.Module:
    torch.manual_seed(0)
    return Traced()


Build = Callable[[], Any]
MODELS: dict[str, Build] = {"callables": two_stages, "tied": tied_stages, "traced": traced}


def batch() -> Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7)).clamp(-1, 1)
    x[-1, 0] = 3.0
    return x


def module_of(model: Any) -> nn.Module:
    return model.module if isinstance(model, StageGraph) else model


def plain(model: Any, x: Tensor) -> Any:
    if not isinstance(model, StageGraph):
        return model(x)
    values: dict[Edge, Any] = {}
    for stage in model:
        outputs = stage.function(*[x if isinstance(entry, str) else values[entry] for entry in stage.inputs])
        values |= dict(zip(stage.outputs, outputs, strict=False))
    return outputs[-1]


def plain_gradients(build: Build, replicas: int, parts: int, weights: Sequence[float] = ()) -> dict[str, Any]:
    """One process runs all micro-batches of all replicas. ``weights``: theirs, in order; none: all weigh the same."""
    model = build()
    module_of(model).eval()
    results = [plain(model, x) for part in batch().chunk(replicas) for x in part.chunk(parts)]
    if isinstance(results[0], fxpipe.Sum):
        loss = sum(one.total for one in results) / sum(one.count for one in results)
    else:
        pairs = list(zip(results, weights or [1.0] * len(results), strict=True))
        loss = sum(one * weight for one, weight in pairs if weight) / sum(weight for _, weight in pairs)
    loss.backward()
    return {name: parameter.grad for name, parameter in module_of(model).named_parameters()}


# --- and fxpipe ---


def compiled(
    build: Build, topology: Topology, parts: int = 2, scope: Any = "node", bucket_mb: float = 1e-6, **options: Any
) -> tuple[Any, Tensor]:
    """In evaluation mode, so that nothing is dropped; and this replica's rows. Each block is a unit of its own."""
    model = build()
    module_of(model).eval()
    policy = fxpipe.Zero(3, scope, bucket_mb)
    forward_backward = fxpipe.compile(model, topology, microbatches=parts, zero=policy, **options)
    replica = topology.coordinate(torch.distributed.get_rank())["data"]
    return forward_backward, batch().chunk(topology.size("data"))[replica]


def check(forward_backward: Any, expected: dict[str, Any], times: float = 1.0, **tolerance: float) -> None:
    for name, parameter in forward_backward.named_parameters():
        wanted, gradient = expected[name], parameter.grad
        assert (gradient is None) == (wanted is None), name
        if gradient is not None:
            found = whole_of(gradient)
            torch.testing.assert_close(found, wanted * times, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


@in_a_new_world
def several_calls(kind: str, topology: Topology, parts: int, scope: str) -> None:
    forward_backward, x = compiled(MODELS[kind], topology, parts, scope=scope)
    size = len((topology.shard_groups() if scope == "node" else topology.groups("data"))[0])
    for name, parameter in forward_backward.named_parameters():
        assert isinstance(parameter, DTensor) == bool(parameter.ndim), name
        assert not parameter.ndim or len(parameter.to_local()) <= -(-len(parameter) // size)
    expected = plain_gradients(MODELS[kind], topology.size("data"), parts)
    for times in (1, 1, 2):  # the last one adds to what is there
        if times == 1:
            forward_backward.zero_grad()
        forward_backward(x)
        check(forward_backward, expected, times)


WHERE = [
    (ONE_NODE, "node"),
    (TWO_NODES, "data"),
    (TWO_NODES, "node"),
    (Topology([("data", 2)], 1), "node"),
    (Topology([("pipe", 2), ("data", 2)]), "node"),
    (Topology([("data", 2), ("pipe", 2)], 2), "node"),
]


@pytest.mark.parametrize(("where", "kind", "parts"), in_turn(WHERE, list(MODELS), [1, 3]), ids=repr)
def test_gradients_are_those_of_the_whole_batch(pool: Pool, where: tuple[Topology, str], kind: str, parts: int) -> None:
    topology, scope = where
    pool.run(several_calls, kind, topology, parts, scope, ranks=topology.world_size)


@in_a_new_world
def without_weight(weights: list[float]) -> None:
    rows = list(batch().chunk(8))

    def weight_of(x: Tensor) -> float:
        return next(weight for weight, part in zip(weights, rows, strict=True) if torch.equal(part[:1], x[:1]))

    forward_backward, x = compiled(two_stages, TWO_NODES, loss_weight=weight_of)
    expected = plain_gradients(two_stages, 4, 2, weights)
    for _ in range(2):
        forward_backward.zero_grad()
        forward_backward(x)
        check(forward_backward, expected)


@pytest.mark.parametrize("weights", [[4, 0, 0, 2, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0]])
def test_a_replica_that_runs_no_last_backward_or_none_takes_part(pool: Pool, weights: list[float]) -> None:
    pool.run(without_weight, weights, ranks=4)


@in_a_new_world
def added_up(topology: Topology, build: Build, syncs: list[bool]) -> None:
    """Calls of the same batch in a row: only what this call makes is scaled, and no more than shards is ever kept."""
    forward_backward, x = compiled(build, topology)
    for sync in syncs:
        forward_backward.set_requires_gradient_sync(sync)
        forward_backward(x)
        gradients = [(p, p.grad) for p in forward_backward.parameters() if p.grad is not None]
        assert all(isinstance(grad, DTensor) == isinstance(p, DTensor) for p, grad in gradients)
    expected = plain_gradients(build, topology.size("data"), 2)
    check(forward_backward, expected, len(syncs))
    forward_backward.zero_grad()
    forward_backward(x)
    check(forward_backward, expected)
    forward_backward.set_requires_gradient_sync(False)
    forward_backward(x)
    for parameter in forward_backward.parameters():
        parameter.grad = None  # as torch's optimizers do
    forward_backward.set_requires_gradient_sync(True)
    forward_backward(x)
    check(forward_backward, expected)


@pytest.mark.parametrize(
    ("way", "syncs"),
    every(
        3,
        list(
            product(
                [(TWO_NODES, counted_stages), (ONE_NODE, two_stages)],
                [[False, False, True, True], [False, True], [True, False, True]],
            )
        ),
    ),
)
def test_calls_add_up_reduced_or_not(pool: Pool, way: tuple[Topology, Build], syncs: list[bool]) -> None:
    pool.run(added_up, *way, syncs, ranks=way[0].world_size)


@in_a_new_world
def evaluated() -> None:
    model = traced()
    forward_backward, x = compiled(lambda: model, TWO_NODES)
    reference = traced().eval()
    for rows in (3, 2):  # of which the second is another kind of batch
        found = forward_backward.evaluate(x[:rows])
        wanted = torch.stack([reference(part[:rows]) for part in batch().chunk(4)]).mean()
        torch.testing.assert_close(found, wanted.detach())
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert all(parameter.grad is None for parameter in forward_backward.parameters())
    forward_backward(x)
    for part in batch().chunk(4):
        (reference(part) / 4).backward()
    check(forward_backward, {name: parameter.grad for name, parameter in reference.named_parameters()})


def test_evaluation_gathers_and_frees_and_a_later_capture_runs_as_well(pool: Pool) -> None:
    pool.run(evaluated, ranks=4)


class Returning(nn.Module):
    """Returns a parameter, and a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.last(self.first(x).tanh())
        return {"loss": h.square().mean(), "weight": self.last.weight, "row": self.first.weight[1]}


def returning() -> nn.Module:
    torch.manual_seed(0)
    return Returning()


def sharded(stage: nn.Module, mesh: Any) -> None:
    fully_shard(stage, mesh=mesh["data"])


@in_a_new_world
def returned(options: dict[str, Any]) -> None:
    x = batch()[: ROWS // 2]
    forward_backward = fxpipe.compile(returning(), ONE_NODE, microbatches=1, example_args=(x,), **options)
    expected = returning()(x)
    for _ in range(2):  # the second call gathers into the same memory
        result = forward_backward.evaluate(x)
        forward_backward(x)
        for name in ("weight", "row"):
            torch.testing.assert_close(whole_of(result[name]), expected[name].detach())


@pytest.mark.parametrize("options", [{"zero": 3}, {"parallelize": sharded}], ids=["zero", "parallelize"])
def test_a_parameter_that_is_an_output_outlives_the_call(pool: Pool, options: dict[str, Any]) -> None:
    """Its memory was freed, and reading it ended the process."""
    pool.run(returned, options, ranks=2)


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


@in_a_new_world
def in_bfloat16(reduce: torch.dtype) -> None:
    graph = looking()
    forward_backward, x = compiled(lambda: graph, TWO_NODES, 3, precision=Precision(reduce=reduce))
    forward_backward(x)
    assert graph.module.a.seen == {torch.bfloat16}
    for parameter in forward_backward.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
    model = looking().module.a.bfloat16()
    expected = {f"a.{name}": torch.zeros(p.shape) for name, p in model.named_parameters()}
    for part in batch().chunk(12):  # each micro-batch's gradient is of bfloat16, and they add up in float32
        model.zero_grad()
        (model(part) / 12).backward()
        for name, p in model.named_parameters():
            expected[f"a.{name}"] += 0 if p.grad is None else p.grad.float()
    check(forward_backward, expected, **({} if reduce == torch.float32 else {"rtol": 0.03, "atol": 1e-3}))


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_computing_in_bfloat16_keeps_shards_and_sums_in_float32(pool: Pool, reduce: torch.dtype) -> None:
    pool.run(in_bfloat16, reduce, ranks=4)


@in_a_new_world
def refused_whole() -> str:
    forward_backward, _ = compiled(two_stages, ONE_NODE)
    forward_backward.optimizer(torch.optim.AdamW, ["a.scale"], elementwise=False)  # which is not sharded
    with pytest.raises(RunError) as error:
        forward_backward.optimizer(torch.optim.Adafactor, ["a.scale", "a.row"])
    return str(error.value)


def test_optimizers_that_need_whole_parameters_are_refused(pool: Pool) -> None:
    assert "the optimizer steps a.row as a whole, which zero=3 shards" in pool.run(refused_whole, ranks=2)[0]


# the middle pipe rank's data group straddles the two nodes
STRADDLING = Topology([("pipe", 3), ("data", 2)], ranks_per_node=3)


def tied_unevenly() -> tuple[list[int], str]:
    connect(STRADDLING)
    first, middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    middle.weight = first.weight
    stages = {"a": first, "m": middle, "b": TiedLast(first.weight)}
    tied = StageGraph.from_callables(stages, [("a", "m"), ("m", "b")], {"a": ["x"], "b": ["x"]})
    with pytest.raises(TopologyError) as error:
        fxpipe.compile(tied, STRADDLING, microbatches=1, zero=3)
    return list(STRADDLING.data_mesh().mesh.shape), str(error.value)


def test_tied_parameters_whose_shards_would_differ_are_refused(pool: Pool) -> None:
    results = pool.run(tied_unevenly, ranks=6)
    assert [shape for shape, _ in results] == [[1, 2], [1, 2], [2, 1], [2, 1], [1, 2], [1, 2]]
    for _, says in results:
        assert (
            "a.weight is tied over the pipe ranks [0, 1, 2], whose data groups have [2, 1, 2] ranks to a node" in says
        )


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.conv.weight.tag = "no decay"  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(-1, 2, 3, 1).expand(-1, -1, -1, 3)).square().mean()


def convolved() -> StageGraph:
    return StageGraph.from_callables({"a": Convolved()}, [], {"a": ["x"]})


@in_a_new_world
def attributes() -> tuple[list[Any], Any]:
    calls: list[Any] = []
    graph = convolved()
    forward_backward, x = compiled(lambda: graph, ONE_NODE)
    weight = dict(forward_backward.named_parameters())["a.conv.weight"]
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
    forward_backward(x)
    assert type(graph.module.a) is Convolved
    return calls, weight.tag


def test_hooks_and_attributes_of_parameters(pool: Pool) -> None:
    """The hook runs in both micro-batches."""
    assert pool.run(attributes, ranks=2) == [([True, True], "no decay")] * 2


HOOKED = ["a.row", "a.scale", "b.linear.weight"]


def hook_on(named: Mapping[str, nn.Parameter]) -> list[str]:
    """Normalises the gradient of each backward, or what has been added up; the list of calls."""
    calls: list[str] = []
    for name in HOOKED[:2]:
        named[name].register_hook(lambda gradient: (calls.append("each"), gradient / gradient.norm())[1])
    named[HOOKED[2]].register_post_accumulate_grad_hook(lambda p: (calls.append("sum"), p.grad.div_(p.grad.norm()))[0])
    return calls


def hooked_in_plain_pytorch(replica: int) -> dict[str, Any]:
    graph = two_stages()
    hook_on(dict(graph.module.eval().named_parameters()))
    for x in batch().chunk(2)[replica].chunk(2):
        (plain(graph, x) / 4).backward()
    return {name: parameter.grad for name, parameter in graph.module.named_parameters()}


@in_a_new_world
def hooked(options: dict[str, Any], before: bool) -> dict[str, Any]:
    graph = two_stages()
    calls = hook_on(dict(graph.module.eval().named_parameters())) if before else []
    step = fxpipe.compile(graph, ONE_NODE, microbatches=2, **options)
    calls = calls if before else hook_on(dict(step.named_parameters()))
    step(batch().chunk(2)[torch.distributed.get_rank()])
    assert sorted(calls) == ["each"] * 4 + ["sum"] * 2
    norms = {name: norm.item() for name, norm in step.grad_norms(HOOKED).items()}
    dict(step.named_parameters())[HOOKED[2]].register_post_accumulate_grad_hook(lambda p: p.sub_(p.grad))
    with pytest.raises(RunError, match="a hook has written"):
        step(batch()[:12])
    return norms


def stepped(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())


@in_a_new_world
def stepped_by_fsdp() -> None:
    x = batch()
    step = fxpipe.compile(returning(), ONE_NODE, microbatches=2, example_args=(x[:12],), parallelize=sharded)
    stepped(dict(step.named_parameters()))
    step(x.chunk(2)[torch.distributed.get_rank()])
    stepped(dict((plain := returning()).named_parameters()))
    plain(x)["loss"].backward()
    for name, parameter in step.named_parameters():
        torch.testing.assert_close(whole_of(parameter).detach(), plain.get_parameter(name).detach())


def test_hooks_of_fsdp_step_by_the_sum_of_all_replicas(pool: Pool) -> None:
    """FSDP2 runs them behind its reduction. They were refused, as hooks that see a replica's gradient are."""
    pool.run(stepped_by_fsdp, ranks=2)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 3}, {"zero": 3, "precision": Precision()}], ids=str)
def test_hooks_on_parameters_run_as_in_plain_pytorch(pool: Pool, options: dict[str, Any], before: bool) -> None:
    first, second = (hooked_in_plain_pytorch(replica) for replica in range(2))
    wanted = {name: (first[name] + second[name]).norm().item() for name in HOOKED}
    for norms in pool.run(hooked, options, before, ranks=2):
        assert norms == pytest.approx(wanted, rel=0.05 if "precision" in options else 1e-4)


@in_a_new_world
def loaded_from_channels_last() -> bool:
    graph = convolved()
    optimizer = torch.optim.AdamW(graph.module.parameters())
    plain(graph, batch()).backward()
    optimizer.step()
    state = get_optimizer_state_dict(graph.module, optimizer)
    mine = compiled(convolved, ONE_NODE)[0].optimizer(torch.optim.AdamW)
    mine.load_state_dict(state)
    part, whole = (one["state"]["a.conv.weight"]["exp_avg"] for one in (mine.state_dict(), state))
    return torch.equal(part.local, whole.contiguous().view(-1)[part.start :][: len(part.local)])


def test_a_plain_optimizers_state_in_another_order_of_memory_is_loaded(pool: Pool) -> None:
    """torch could not copy it into a DTensor."""
    assert pool.run(loaded_from_channels_last, ranks=2) == [True] * 2


# --- units ---


def test_units_are_whole_blocks_of_a_least_size() -> None:
    sizes = {
        "embed.weight": 4,
        "layers.0.a.weight": 6,
        "layers.0.b.0.weight": 2,
        "layers.1.a.weight": 9,
        "norm.weight": 1,
    }
    parameters = {name: nn.Parameter(torch.zeros(size, dtype=torch.uint8), False) for name, size in sizes.items()}

    def names(least: int) -> list[list[str]]:
        return [list(group) for group in in_blocks(parameters, least)]

    embed, a, b, layer_1, norm = sizes
    assert names(0) == [[embed], [a, b], [layer_1], [norm]]
    assert names(5) == [[embed, a, b], [layer_1], [norm]]
    assert names(1000) == [[embed, a, b, layer_1, norm]]


class Chain(nn.Module):
    """Layers of which some are frozen, one is used twice, and all are behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in (*self.layers, self.layers[0]):
            x = layer(x) * self.gain + self.gain.detach()
        return x.square().mean()


def chain() -> nn.Module:
    torch.manual_seed(0)
    return Chain()


IDS = torch.arange(ROWS * 2).view(ROWS, 2) % 8


@in_a_new_world
def trained_in_blocks(options: dict[str, Any]) -> list[list[str]]:
    """The units in the order in which the third step waits for them, and reduces them; the step is plain PyTorch's."""
    forward_backward = fxpipe.compile(
        chain(), ONE_NODE, microbatches=2, zero=fxpipe.Zero(3, bucket_mb=1e-6), example_args=(IDS,), **options
    )
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    rows = IDS.chunk(2)[torch.distributed.get_rank()]
    model = chain()
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events: list[list[str]] = [[], []]
    for step in range(3):
        if step == 2:
            for unit in forward_backward._reducer._units:
                name = next(iter(unit.shards)).removesuffix(".weight").removesuffix(".0")
                unit.wait = noting(events[0], name, unit.wait)
                unit.reduce = noting(events[1], name, unit.reduce)
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        forward_backward(rows)
        model(IDS).backward()
        optimizer.step()
        plain_optimizer.step()
    for name, value in forward_backward.state_dict(full=True).items():
        torch.testing.assert_close(value, model.state_dict()[name], msg=name)
    return events


def noting(events: list[str], event: str, call: Callable[[], object]) -> Callable[[], object]:
    return lambda: [events.append(event), call()]


@pytest.mark.parametrize(
    ("tracer", "options"),
    in_turn(["symbolic", "export", "record"], [{}, {"recompute": True}, {"schedule": "zb_h1"}]),
    ids=str,
)
def test_blocks_are_waited_for_in_order_and_reduced_in_reverse(
    pool: Pool, tracer: str, options: dict[str, Any]
) -> None:
    for waited, reduced in pool.run(trained_in_blocks, {"tracer": tracer, **options}, ranks=2):
        assert waited == ["embedding", "layers.0", "gain", "layers.1", "layers.2"]
        assert reduced == waited[::-1]


class Stack(nn.Module):
    """Layers. ``reads``: whether the first layer's backward reads the last layer's weight."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.layers = reads, nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * (self.layers[3].weight.detach()[0] if self.reads else 2)
        for layer in self.layers[1:]:
            x = layer(x)
        return x.square().mean()


@in_a_new_world
def weights_in_backward(reads: bool, parts: int) -> list[int]:
    """How many whole weights have memory when each of them is reduced in the second call, in reverse of first use."""
    forward_backward, x = compiled(lambda: seeded_stack(reads), ONE_NODE, parts, example_args=(batch(),))
    forward_backward(x)
    forward_backward.zero_grad()
    units, counts = forward_backward._reducer._units, list[int]()
    for unit in units:

        def reduce(call: Callable[[], None] = unit.reduce) -> None:
            counts.append(sum(bool(p.untyped_storage().nbytes()) for unit in units for p in unit.whole.values()))
            call()

        unit.reduce = reduce
    forward_backward(x)
    check(forward_backward, plain_gradients(lambda: seeded_stack(reads), 2, parts))
    return counts


def seeded_stack(reads: bool) -> nn.Module:
    torch.manual_seed(0)
    return Stack(reads)


@pytest.mark.parametrize(("reads", "counts"), [(False, [4, 3, 2, 1]), (True, [4, 3, 3, 2])])
def test_weights_are_freed_once_no_backward_reads_them(pool: Pool, reads: bool, counts: list[int]) -> None:
    assert pool.run(weights_in_backward, reads, 3, ranks=2) == [counts, counts]
