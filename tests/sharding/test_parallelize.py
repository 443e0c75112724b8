"""compile(parallelize=): tensor parallelism, FSDP2 and wrappers inside of stages, against plain PyTorch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fxpipe
from fxpipe import StageGraph, Topology
from fxpipe.errors import RunError
from fxpipe.run.step import agreement
from fxpipe.tensors.dtensors import settle_foreach, whole_of
from tests.harness import Run, assert_run, cut, replica_of
from tests.harness import trained as run_case
from tests.pool import Pool
from tests.thinned import every, in_turn

WIDTH, ROWS, PARTS, STEPS = 6, 8, 4, 2
Axes = list[tuple[str, int]]
PIPE_TENSOR = [("pipe", 2), ("tensor", 2)]
PIPE_DATA = [("pipe", 2), ("data", 2)]
DATA_TENSOR = [("data", 2), ("tensor", 2)]


# --- models of stages ---


class Block(nn.Module):
    """A residual block: a norm, and two linear layers that a tensor-parallel plan cuts by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Ends(Block):
    """A block and the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum(-1).mean()


class EndsInSum(Block):
    """A block and a loss that says how many items it is over: its gradients are scaled behind the step."""

    def forward(self, x: Tensor) -> fxpipe.Sum:
        items = super().forward(x).square().sum(-1)
        return fxpipe.Sum(items.sum(), (x[:, 0] > 0).sum() + 1)


class Square(nn.Module):
    """A loss without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1).mean()


class Counting(Block):
    """Counts its calls by a hook that was there before compile, and keeps a running sum in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(x.shape[0])
        return super().forward(self.drop(x))


def graph_of(last: Callable[[], nn.Module] = Ends, first: Callable[[], nn.Module] = Block) -> StageGraph:
    torch.manual_seed(0)
    return StageGraph.from_callables({"a": first(), "b": last()}, [("a", "b")], {"a": ["x"]})


class Traced(nn.Module):
    """Two blocks with a boundary between them, and a tensor that is no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Counting(), Block()
        self.shift = torch.linspace(0, 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(fxpipe.stage_boundary(self.a(x) + self.shift)).square().sum(-1).mean()


class TakenApart(nn.Module):
    """Runs a block's parts in training, and the block itself in evaluation; or, if it has a ``spare`` parameter without
    a use, the block itself for a single row."""

    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.spare = Block(), Block(), spare
        if spare:
            self.b.register_parameter("spare", nn.Parameter(torch.ones(1)))

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.a(x), name="b")
        whole = len(x) == 1 if self.spare else not self.training
        out = self.b(h) if whole else self.b.norm(self.b.down(self.b.up(h)))
        return out.square().sum(-1).mean()


class TiedEnds(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(x))).square().sum(-1).mean()


def tied_graph() -> StageGraph:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    return StageGraph.from_callables({"a": first, "b": TiedEnds(first[0].weight)}, [("a", "b")], {"a": ["x"]})


# --- what parallelize does ---

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tensor_parallel(stage: nn.Module, mesh: Any) -> None:
    parallelize_module(stage, mesh["tensor"], PLAN)


def norms_too(stage: nn.Module, mesh: Any) -> None:
    """The norm's parameters are replicated DTensors, whose gradients come as partial sums."""
    norm, rows = (
        stage.get_submodule("norm"),
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False),
    )
    parallelize_module(norm, mesh["tensor"], rows)
    parallelize_module(norm, mesh["tensor"], SequenceParallel(sequence_dim=0))
    parallelize_module(stage, mesh["tensor"], PLAN | {"up": ColwiseParallel(input_layouts=Shard(0))})


def fully_sharded(stage: nn.Module, mesh: Any) -> None:
    fully_shard(stage.get_submodule("up"), mesh=mesh["data"], reshard_after_forward=True)
    fully_shard(stage, mesh=mesh["data"])


def parts_sharded(stage: nn.Module, mesh: Any) -> None:
    """No root, and one layer stays whole."""
    for name in ("norm", "down"):
        fully_shard(stage.get_submodule(name), mesh=mesh["data"])


def up_sharded(stage: nn.Module, mesh: Any) -> None:
    fully_shard(stage.get_submodule("up"), mesh=mesh["data"])


def both(stage: nn.Module, mesh: Any) -> None:
    tensor_parallel(stage, mesh)
    fully_sharded(stage, mesh)


def sharded_and_checkpointed(stage: nn.Module, mesh: Any) -> None:
    for name in ("up", "down"):
        setattr(stage, name, checkpoint_wrapper(stage.get_submodule(name)))
    fully_shard(stage, mesh=mesh["data"])


def tables_by_columns(stage: nn.Module, mesh: Any) -> None:
    """The tied weight is cut alike on both ranks that own it."""
    table = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(
        stage, mesh["tensor"], {"0": table, "table": table, "out": ColwiseParallel(output_layouts=Replicate())}
    )


def all_sharded(stage: nn.Module, mesh: Any) -> None:
    fully_shard(stage, mesh=mesh["data"])


def blocks_tensor_parallel(stage: nn.Module, mesh: Any) -> None:
    parallelize_module(stage, mesh["tensor"], {f"{block}.{name}": way for block in "ab" for name, way in PLAN.items()})


def blocks_checkpointed(stage: nn.Module, mesh: Any) -> None:
    """Wrapped and sharded, each block by itself, inside of what is opaque to the tracer."""
    for module in list(stage.modules()):
        if isinstance(module, Block):
            module.up = checkpoint_wrapper(module.up)
            fully_shard(module, mesh=mesh["data"])


def nothing(stage: nn.Module, mesh: Any) -> None:
    pass


# --- fxpipe and plain PyTorch ---


def in_a_new_world(function: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that a worker runs: DTensor keeps meshes, which it takes for equal to those of earlier worlds."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _clear_sharding_prop_cache()
        x = torch.ones((), requires_grad=True)
        x.register_hook(lambda _: _clear_sharding_prop_cache())  # of the thread that runs backwards, on a GPU another
        x.backward()
        fxpipe.init()
        return function(*args, **kwargs)

    return run


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))


def run_of(graph: StageGraph, x: Tensor) -> Any:
    for stage in graph:
        x = stage.module(x)
    return x


def plain(
    build: Callable[[], StageGraph], replicas: int, weights: Sequence[float] = ()
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of the steps, and the parameters at the end.

    ``weights``: of all replicas' micro-batches in order; none: they all weigh the same.
    """
    graph = build()
    parameters = list(dict.fromkeys(graph.module.parameters()))
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = plain_loss(graph, step, replicas, weights)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5).item())
        optimizer.step()
    return losses, norms, {name: tensor.clone() for name, tensor in graph.module.state_dict().items()}


def plain_loss(graph: StageGraph, step: int, replicas: int, weights: Sequence[float] = ()) -> Tensor:
    results = [run_of(graph, x) for replica in range(replicas) for x in batch(step, replica).chunk(PARTS)]
    return loss_of(results, weights or [1.0] * len(results))


def loss_of(results: Sequence[Any], weights: Sequence[float]) -> Tensor:
    """The weighted mean of the micro-batches' losses, or their sums by their counts."""
    if isinstance(results[0], fxpipe.Sum):
        return sum(result.total for result in results) / sum(result.count for result in results)
    return sum(r * w for r, w in zip(results, weights, strict=True) if w) / sum(weights)


@in_a_new_world
def trained(
    build: Callable[[], Any], axes: Axes, parallelize: Any, **options: Any
) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, str]]:
    """The same by fxpipe; and what kind of tensor each parameter of this rank is."""
    topology = Topology(axes)
    forward_backward = fxpipe.compile(build(), topology, parallelize=parallelize, microbatches=PARTS, **options)
    replica = replica_of(topology)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(forward_backward(batch(step, replica)).item())
        norms.append(forward_backward.clip_grad_norm_(0.5).item())
        optimizer.step()
    kinds = {name: type(parameter).__name__ for name, parameter in forward_backward.named_parameters()}
    return losses, norms, forward_backward.state_dict(full=True), kinds


def check_equal(results: Sequence[Any], expected: Any) -> None:
    """Losses, norms and parameters are plain PyTorch's on every rank."""
    losses, norms, state = expected
    for found, found_norms, found_state, _ in results:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_state.keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(found_state[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "parallelize", "build"),
    [
        *every(
            5,
            [
                (PIPE_TENSOR, norms_too, partial(graph_of, EndsInSum)),
                (PIPE_TENSOR, tensor_parallel, graph_of),
                (DATA_TENSOR, tensor_parallel, partial(graph_of, EndsInSum)),
                (DATA_TENSOR, norms_too, graph_of),
                (PIPE_DATA, fully_sharded, graph_of),
            ],
        ),
        (DATA_TENSOR, both, partial(graph_of, EndsInSum)),
        (PIPE_DATA, parts_sharded, partial(graph_of, EndsInSum)),
        (PIPE_DATA, sharded_and_checkpointed, graph_of),
        (PIPE_DATA, nothing, partial(graph_of, EndsInSum)),
        (PIPE_DATA, all_sharded, partial(graph_of, Square)),  # a stage without parameters is a stage, too
        (PIPE_TENSOR, tables_by_columns, tied_graph),
        (PIPE_DATA, all_sharded, tied_graph),
    ],
)
def test_training_equals_plain_pytorch(pool: Pool, axes: Axes, parallelize: Any, build: Any) -> None:
    results = pool.run(trained, build, axes, parallelize)
    check_equal(results, plain(build, Topology(axes).size("data")))
    found = {kind for *_, kinds in results for kind in kinds.values()}
    assert ("DTensor" in found) == (parallelize is not nothing)


@pytest.mark.parametrize(
    ("axes", "parallelize"), [(PIPE_DATA, sharded_and_checkpointed), (PIPE_TENSOR, tensor_parallel)]
)
def test_what_it_made_of_a_stage_is_recomputed(pool: Pool, axes: Axes, parallelize: Any) -> None:
    results = pool.run(partial(trained, recompute=True, schedule="gpipe"), graph_of, axes, parallelize)
    check_equal(results, plain(graph_of, Topology(axes).size("data")))


class OneRow(nn.Module):
    """A parameter with a single row, so that one of two ranks has no part of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row, self.linear = nn.Parameter(torch.randn(1, WIDTH)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.row).square().mean()


@in_a_new_world
def norms_of_one_row(order: float, parallelize: Any) -> dict[str, float]:
    topology = Topology([("pipe", 1), ("data", 2)])
    x, zero = batch(0, replica_of(topology)), 0 if parallelize else 3
    step = fxpipe.compile(OneRow(), topology, microbatches=1, example_args=[x], parallelize=parallelize, zero=zero)
    step(x)
    norms = {name: norm.item() for name, norm in step.grad_norms("row", norm_type=order).items()}
    return norms | {"all": step.clip_grad_norm_(1.0, order).item()}


@pytest.mark.parametrize("order", [0.5, math.inf])
@pytest.mark.parametrize("parallelize", [all_sharded, None])
def test_norms_of_a_parameter_with_fewer_rows_than_ranks(pool: Pool, order: float, parallelize: Any) -> None:
    model = OneRow()
    model(torch.cat([batch(0, 0), batch(0, 1)])).backward()
    row = torch.linalg.vector_norm(model.row.grad, order).item()
    every = nn.utils.clip_grad_norm_(model.parameters(), 1.0, order).item()
    for norms in pool.run(norms_of_one_row, order, parallelize, ranks=2):
        assert norms == pytest.approx({"row": row, "all": every}, rel=1e-5)


def in_bfloat16(stage: nn.Module, mesh: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    fully_shard(stage, mesh=mesh["data"], mp_policy=policy)


def test_mixed_precision_is_fsdps(pool: Pool) -> None:
    """bfloat16 keeps 8 bits: the first step is within 1 % of float32's, and parameters stay in float32."""
    losses, norms, _ = plain(graph_of, 2)
    for found, found_norms, state, _ in pool.run(trained, graph_of, PIPE_DATA, in_bfloat16):
        assert found[0] == pytest.approx(losses[0], rel=0.01)
        assert found_norms[0] == pytest.approx(norms[0], rel=0.01)
        assert found[0] != pytest.approx(losses[0], rel=1e-5)
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def first_three(x: Tensor) -> float:
    """Weight 0 for the last micro-batch of the second replica."""
    return 0.0 if torch.equal(x, batch(0, 1).chunk(PARTS)[-1]) or torch.equal(x, batch(1, 1).chunk(PARTS)[-1]) else 1.0


@pytest.mark.parametrize("parallelize", every(2, [fully_sharded, parts_sharded]))
def test_a_backward_that_one_replica_leaves_out_leaves_the_sums_in_step(pool: Pool, parallelize: Any) -> None:
    results = pool.run(partial(trained, loss_weight=first_three), graph_of, PIPE_DATA, parallelize)
    check_equal(results, plain(graph_of, 2, [1.0] * PARTS + [1.0] * (PARTS - 1) + [0.0]))


# --- several calls ---


@in_a_new_world
def accumulated(axes: Axes, parallelize: Any, last: Any, sync: bool) -> dict[str, Tensor]:
    """The gradients of two calls, the first of them without synchronisation where ``sync`` is False."""
    topology = Topology(axes)
    forward_backward = fxpipe.compile(graph_of(last), topology, parallelize=parallelize, microbatches=PARTS)
    replica = replica_of(topology)
    forward_backward.set_requires_gradient_sync(sync)
    forward_backward(batch(0, replica))
    forward_backward.set_requires_gradient_sync(True)
    forward_backward(batch(1, replica))
    return {name: whole_of(p.grad).clone() for name, p in forward_backward.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("way", "last", "sync"),
    in_turn([(PIPE_DATA, fully_sharded, 2), (DATA_TENSOR, tensor_parallel, 2)], [Ends, EndsInSum], [False, True]),
)
def test_gradients_of_several_calls_add_up(pool: Pool, way: tuple[Axes, Any, int], last: Any, sync: bool) -> None:
    axes, parallelize, replicas = way
    graph = graph_of(last)
    for step in range(2):
        plain_loss(graph, step, replicas).backward()
    for gradients in pool.run(accumulated, axes, parallelize, last, sync):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, graph.module.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@in_a_new_world
def frozen_in_turn(parallelize: Any) -> list[dict[str, Any]]:
    """Gradients where one layer is frozen in the first and the last of three calls."""
    graph = graph_of()
    graph["a"].module.up.requires_grad_(False)
    topology = Topology(PIPE_DATA)
    forward_backward = fxpipe.compile(graph, topology, parallelize=parallelize, microbatches=PARTS)
    found = []
    for step, is_frozen in enumerate((True, False, True)):
        graph["a"].module.up.requires_grad_(not is_frozen)
        forward_backward.zero_grad()
        forward_backward(batch(step, replica_of(topology)))
        gradients = {n: p.grad for n, p in forward_backward.named_parameters()}
        found.append({n: None if gradient is None else whole_of(gradient).clone() for n, gradient in gradients.items()})
    return found


@pytest.mark.parametrize("parallelize", every(2, [up_sharded, fully_sharded]))
def test_what_is_sharded_may_be_frozen_and_unfrozen(pool: Pool, parallelize: Any) -> None:
    results = pool.run(frozen_in_turn, parallelize)
    for step, is_frozen in enumerate((True, False, True)):
        graph = graph_of()
        graph["a"].module.up.requires_grad_(not is_frozen)
        plain_loss(graph, step, 2).backward()
        for found in results:
            for name, gradient in found[step].items():
                expected = graph.module.get_parameter(name).grad
                assert (gradient is None) == (expected is None), name
                assert gradient is None or torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6), name


# --- at the start ---


@in_a_new_world
def started() -> tuple[dict[str, Tensor], int]:
    """The state of a model that each rank has built with a seed of its own, and the seed of a forward."""
    rank = torch.distributed.get_rank()

    def seeded(seed: int) -> StageGraph:
        torch.manual_seed(seed)
        return StageGraph.from_callables({"a": Block(), "b": Ends()}, [("a", "b")], {"a": ["x"]})

    forward_backward = fxpipe.compile(seeded(rank), Topology(PIPE_TENSOR), parallelize=tensor_parallel)
    seed = forward_backward.seed("a", microbatch=1, step=2)
    return forward_backward.state_dict(full=True), seed


def test_ranks_of_a_tensor_group_start_alike_whatever_they_were_seeded_with(pool: Pool) -> None:
    results = pool.run(started)
    torch.manual_seed(0)
    first = Block()
    torch.manual_seed(2)
    Block()
    last = Ends()
    expected = {f"a.{n}": t for n, t in first.state_dict().items()} | {
        f"b.{n}": t for n, t in last.state_dict().items()
    }
    for state, seed in results:
        assert seed == results[0][1]
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


# --- state ---


@in_a_new_world
def reloaded(axes: Axes, parallelize: Any, state: dict[str, Tensor]) -> tuple[bool, bool]:
    """Whether a plain state dict, and this rank's own part of it, come back as they were loaded."""
    forward_backward = fxpipe.compile(graph_of(), Topology(axes), parallelize=parallelize)
    forward_backward.load_state_dict(state)
    whole = forward_backward.state_dict(full=True)
    own = {name: tensor.clone() for name, tensor in forward_backward.state_dict().items()}
    with torch.no_grad():
        for parameter in forward_backward.parameters():
            parameter.zero_()
    forward_backward.load_state_dict(own)
    again = forward_backward.state_dict(full=True)
    return all(torch.equal(whole[n], state[n]) for n in state), all(torch.equal(again[n], state[n]) for n in state)


@pytest.mark.parametrize(("axes", "parallelize"), every(2, [(DATA_TENSOR, both), (PIPE_TENSOR, tensor_parallel)]))
def test_a_plain_state_dict_loads_and_comes_back(pool: Pool, axes: Axes, parallelize: Any) -> None:
    state = {name: torch.randn_like(tensor) for name, tensor in graph_of().module.state_dict().items()}
    assert pool.run(reloaded, axes, parallelize, state) == [(True, True)] * 4


def test_foreach_is_off_where_a_group_mixes_kinds_of_tensors() -> None:
    class OnAMesh(nn.Parameter):
        device_mesh, placements = "mesh", ()

    plain_one, spread = nn.Parameter(torch.ones(2)), OnAMesh(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [plain_one, spread]}, {"params": [nn.Parameter(torch.ones(2))]}])
    settle_foreach(optimizer)
    assert [group["foreach"] for group in optimizer.param_groups] == [False, None]


# --- traced models ---


def traced() -> Traced:
    torch.manual_seed(0)
    model = Traced()
    model.a.drop.p = 0.0
    return model


def traced_walk(optimizer: Any, step: Callable[[int, int], Tensor], evaluate: Callable[[int], Tensor]) -> list[float]:
    """Losses of steps of other shapes, and of an evaluation behind each."""
    losses = []
    for number, rows in enumerate((ROWS, ROWS - 1)):
        optimizer.zero_grad()
        losses.append(step(number, rows).item())
        optimizer.step()
        losses.append(evaluate(number).item())
    return losses


@in_a_new_world
def traced_run(parallelize: Any, axes: Axes) -> tuple[list[float], int, list[str], dict[str, Tensor]]:
    """Losses, how often a hook was called, names of modules, the state."""
    topology, model = Topology(axes), traced()
    replica, calls = replica_of(topology), list[str]()
    model.a.register_forward_hook(lambda module, args, output: calls.append("a"))
    forward_backward = fxpipe.compile(
        model, topology, parallelize=parallelize, microbatches=PARTS, example_args=(batch(0, replica),)
    )
    losses = traced_walk(
        forward_backward.optimizer(torch.optim.SGD, lr=0.1),
        lambda number, rows: forward_backward(batch(number, replica)[:rows]),
        lambda number: forward_backward.evaluate(batch(number, replica), outputs="all"),
    )
    return losses, len(calls), [name for name, _ in model.named_modules()], forward_backward.state_dict(full=True)


@pytest.mark.parametrize(
    ("axes", "parallelize"),
    every(3, [(PIPE_DATA, blocks_checkpointed), (PIPE_TENSOR, blocks_tensor_parallel), (PIPE_DATA, all_sharded)]),
)
def test_a_traced_model_keeps_its_names_its_hooks_and_its_later_captures(
    pool: Pool, axes: Axes, parallelize: Any
) -> None:
    model, replicas = traced(), range(Topology(axes).size("data"))

    def step(number: int, rows: int) -> Tensor:
        parts = [x for replica in replicas for x in batch(number, replica)[:rows].chunk(PARTS)]
        loss = sum(model.train()(x) * len(x) for x in parts) / (rows * len(replicas))
        loss.backward()
        return loss

    def evaluate(number: int) -> Tensor:
        return torch.stack([model.eval()(batch(number, replica)) for replica in replicas]).mean()

    wanted = traced_walk(torch.optim.SGD(model.parameters(), lr=0.1), step, evaluate)
    results = pool.run(traced_run, parallelize, axes)
    for losses, _, names, state in results:
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert names == [name for name, _ in model.named_modules()]
        assert state.pop("a.seen") == ROWS + ROWS - 1  # a running sum of this replica's rows alone
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-6)
    calls = [count for _, count, _, _ in results]
    # a hook runs in each capture, on all ranks, and on its own rank for each micro-batch: two steps, two
    # evaluations of as many
    assert [number - calls[-1] for number in calls] == [4 * PARTS, 4 * PARTS, 0, 0]


def test_captures_that_are_dropped_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives the modules that run a constant of its own; the steps are those of plain PyTorch all along."""
    monkeypatch.setattr(agreement, "MOST", 2)
    model = traced()
    plain = copy.deepcopy(model)
    forward_backward = fxpipe.compile(
        model, Topology([("pipe", 2)]), parallelize=nothing, microbatches=1, example_args=(batch(0, 0),)
    )
    plans, seen = forward_backward._plans, WeakSet[Any]()
    for rows in [2, 3, 4, 2, ROWS]:
        x = batch(0, 0)[:rows]
        assert forward_backward(x).item() == pytest.approx(plain(x).item(), rel=1e-6)
        seen.update(stage.module for graph in plans.graphs for stage in graph)
        kept = {id(stage.module) for graph in plans.graphs for stage in graph}
        gc.collect()
        homes = [stage.function.module for stage in plans.first.graph]  # type: ignore[attr-defined]
        assert sum("_of_capture_" in name for home in homes for name in dir(home)) <= 2
    assert len(kept) < 10
    assert {id(module) for module in seen} == kept, "what was dropped is gone"


@in_a_new_world
def whole_ones_alive() -> tuple[int, int]:
    """How many of the model's first parameters live on after compile, and after a step of another shape."""
    model = Traced()
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    topology = Topology(PIPE_DATA)
    forward_backward = fxpipe.compile(
        model, topology, parallelize=all_sharded, microbatches=PARTS, example_args=(batch(0, 0),)
    )
    del model
    gc.collect()
    after_compile = sum(ref() is not None for ref in before)
    forward_backward(batch(0, replica_of(topology))[: ROWS - 1])
    gc.collect()
    return after_compile, sum(ref() is not None for ref in before)


def test_what_has_been_sharded_is_freed(pool: Pool) -> None:
    assert pool.run(whole_ones_alive) == [(0, 0)] * 4


# --- a Hugging Face model ---


def megatron(stage: nn.Module, mesh: Any) -> None:
    """Attention by heads, the feed-forward layers by columns and then rows."""
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name, _ in stage.named_modules() if name.endswith(columns)}
    rows = ("o_proj", "down_proj")
    plan |= {name: RowwiseParallel() for name, _ in stage.named_modules() if name.endswith(rows)}
    parallelize_module(stage, mesh["tensor"], plan)


def layers_sharded(stage: nn.Module, mesh: Any) -> None:
    """As in torchtitan: activation checkpointing and FSDP for each layer, and for the rest."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    apply_activation_checkpointing(stage, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    for layer in [module for module in stage.modules() if isinstance(module, LlamaDecoderLayer)]:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(stage, mesh=mesh["data"])


def llama() -> Any:
    """Without masks, which the layers would expand to all heads."""
    from tests import hf

    return dataclasses.replace(hf.MODELS["Llama"], inputs=words, stages=2, ranks=2, **hf.SGD)


def words(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(0, 48, (rows, 10), generator=generator)
    return {"input_ids": ids, "labels": ids}


@in_a_new_world
def llama_trained(axes: Axes, parallelize: Any) -> Run:
    """On this replica's rows of each batch."""
    topology, case = Topology(axes), llama()
    batches = [cut(batch, topology.size("data"))[replica_of(topology)] for batch in case.batches(STEPS)]
    options = {"boundaries": ["model.layers.1"], "microbatches": PARTS // topology.size("data")}
    return run_case(case, batches, topology=topology, parallelize=parallelize, example_kwargs=batches[0], **options)


@pytest.mark.parametrize(("axes", "parallelize"), every(2, [(PIPE_TENSOR, megatron), (PIPE_DATA, layers_sharded)]))
def test_an_unmodified_llama(pool: Pool, axes: Axes, parallelize: Any) -> None:
    hf = pytest.importorskip("tests.hf")
    runs, wanted = pool.run(llama_trained, axes, parallelize), hf.trained_plainly(llama(), llama().batches(STEPS))
    assert_run(runs, wanted, 1e-5)


def test_one_process_gets_no_mesh_and_equals_plain_pytorch() -> None:
    meshes: list[Any] = []

    def wrap(stage: nn.Module, mesh: Any) -> None:
        meshes.append(mesh)
        stage.up = checkpoint_wrapper(stage.get_submodule("up"))

    graph, reference = graph_of(), graph_of()
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), parallelize=wrap, microbatches=PARTS)
    loss = forward_backward(batch(0, 0))
    expected = plain_loss(reference, 0, 1)
    expected.backward()
    assert meshes == [None, None]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in forward_backward.named_parameters():
        torch.testing.assert_close(parameter.grad, reference.module.get_parameter(name).grad)


def test_a_stage_may_be_compiled_in_it() -> None:
    compiled: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    def compile_it(stage: nn.Module, mesh: Any) -> None:
        stage.compile(backend=backend)

    forward_backward = fxpipe.compile(graph_of(), Topology([("pipe", 2)]), parallelize=compile_it, microbatches=PARTS)
    assert forward_backward(batch(0, 0)).item() == pytest.approx(plain_loss(graph_of(), 0, 1).item(), rel=1e-6)
    assert len(compiled) == 2


# --- what cannot be ---


def add_a_parameter(stage: nn.Module, mesh: Any) -> None:
    stage.adapter = nn.Parameter(torch.ones(2))


def lose_a_parameter(stage: nn.Module, mesh: Any) -> None:
    stage.up = nn.Identity()


def another_shape(stage: nn.Module, mesh: Any) -> None:
    stage.get_submodule("up").weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 3}, "zero=3 and parallelize= both decide"),
        ({"precision": fxpipe.Precision(compute=torch.bfloat16)}, "MixedPrecisionPolicy"),
        ({"tracer": "export"}, 'write tracer="record"'),
        ({"stage_compiler": torch.compile}, "both replace what a stage runs"),
        ({"parallelize": "fsdp"}, "it is a function"),
        ({"parallelize": add_a_parameter}, "a parameter that the model lacks, adapter"),
        ({"parallelize": lose_a_parameter}, "nothing in place of a parameter a.up.weight"),
        ({"parallelize": another_shape}, r"made \[2\] of a.up.weight"),
    ],
)
def test_what_cannot_be_is_refused_by_compile(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        fxpipe.compile(graph_of(), Topology([("pipe", 2)]), **{"parallelize": nothing} | options)


# --- what it is given are the user's modules, and what it does to them happens ---


def taken_apart(parallelize: Any, model: nn.Module, ranks: int = 2, **options: Any) -> fxpipe.ForwardBackward:
    defaults: dict[str, Any] = {"microbatches": PARTS, "example_args": (batch(0, 0),), "parallelize": parallelize}
    return fxpipe.compile(model, Topology([("pipe", ranks)]), **defaults, **options)


def test_a_block_that_is_taken_apart_in_training_alone_is_itself_in_evaluation() -> None:
    model = TakenApart()
    plain = copy.deepcopy(model).eval()
    forward_backward = taken_apart(nothing, model)
    forward_backward(batch(0, 0))
    expected = torch.stack([plain(x) for x in batch(0, 0).chunk(PARTS)]).mean()
    assert forward_backward.evaluate(batch(0, 0)).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_capture_in_other_pieces_is_refused() -> None:
    forward_backward = taken_apart(nothing, TakenApart(spare=True))
    forward_backward(batch(0, 0))
    with pytest.raises(RunError, match="runs b of stage b as a whole, which the first kind took apart"):
        forward_backward(batch(0, 0)[:PARTS])


class Nested(nn.Module):
    """``inner`` has the blocks in a list, and no boundary is marked."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner, self.head, self.checkpointed = nn.Module(), nn.Linear(WIDTH, 1), checkpointed
        self.inner.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("options", [{}, {"boundaries": "auto"}, {"boundaries": "auto", "ranks": 2}], ids=str)
def test_without_boundaries_the_users_modules_are_there_by_name_and_class_and_are_called(options: Any) -> None:
    calls: list[str] = []

    def watched(stage: nn.Module, mesh: Any) -> None:
        for name, part in stage.named_modules():
            if isinstance(part, Block | nn.Linear | nn.LayerNorm):
                part.register_forward_hook(lambda *_, name=name: calls.append(name))

    model = Nested()
    expected = torch.stack([model(x) for x in batch(0, 0).chunk(PARTS)]).mean()
    forward_backward = taken_apart(watched, model, **{"ranks": 1, **options})
    assert forward_backward(batch(0, 0)).item() == pytest.approx(expected.item(), rel=1e-6)
    leaves = [name for name, part in model.named_modules() if isinstance(part, Block | nn.Linear | nn.LayerNorm)]
    assert sorted(calls) == sorted(leaves * PARTS)


def hooked(stage: nn.Module, mesh: Any) -> None:
    for part in stage.modules():
        if isinstance(part, Block):
            part.register_forward_hook(lambda *_: None)


def wrapped(stage: nn.Module, mesh: Any) -> None:
    for name, part in list(stage.named_modules()):
        if isinstance(part, Block):
            stage.set_submodule(name, checkpoint_wrapper(part))


@pytest.mark.parametrize(
    ("parallelize", "model", "ranks", "message"),
    [
        (hooked, TakenApart(), 2, "has replaced b of stage b, or put hooks on it, but the stage does not call it"),
        (wrapped, TakenApart(), 2, "has replaced b of stage b, or put hooks on it, but the stage does not call it"),
        (nothing, Nested(checkpointed=True), 1, r"given to torch\.utils\.checkpoint.*write recompute=True"),
    ],
)
def test_what_would_never_run_is_refused(parallelize: Any, model: nn.Module, ranks: int, message: str) -> None:
    with pytest.raises(RunError, match=message):
        taken_apart(parallelize, model, ranks)


@in_a_new_world
def message_of(axes: Axes, parallelize: Any, build: Any) -> str:
    try:
        forward_backward = fxpipe.compile(build(), Topology(axes), parallelize=parallelize, microbatches=PARTS)
        forward_backward.optimizer(torch.optim.AdamW, offload=True)
        forward_backward(batch(0, 0))
    except RunError as error:
        return str(error)
    return "no error"


def sharded_over_everybody(stage: nn.Module, mesh: Any) -> None:
    fully_shard(stage)


def spread_leaves(stage: nn.Module, mesh: Any) -> None:
    def spread(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return DTensor.from_local(output, mesh["tensor"], [Replicate()])

    stage.register_forward_hook(spread)


def tied_otherwise(stage: nn.Module, mesh: Any) -> None:
    table = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(stage, mesh["tensor"], {"0": table})


def hooked_graph() -> StageGraph:
    graph = graph_of()
    next(graph.module.parameters()).register_hook(lambda gradient: gradient)
    return graph


@pytest.mark.parametrize(
    ("axes", "parallelize", "build", "message"),
    [
        (
            PIPE_DATA,
            sharded_over_everybody,
            graph_of,
            "has spread a.norm.weight over ranks [0, 1, 2, 3], but only ranks [0, 1] run its stage; name the axes",
        ),
        (PIPE_TENSOR, tied_otherwise, tied_graph, "has spread it differently on them (rank 0 (pipe 0): "),
        (DATA_TENSOR, all_sharded, tied_graph, "is used by the stages a and b of one rank"),
        (PIPE_DATA, all_sharded, graph_of, "offload=True needs plain parameters"),
        (PIPE_TENSOR, spread_leaves, graph_of, "returns a DTensor"),
        (PIPE_DATA, all_sharded, hooked_graph, "has a hook, and parallelize has put another tensor in its place"),
    ],
)
def test_what_cannot_run_in_a_pipeline_is_said_on_some_rank(
    pool: Pool, axes: Axes, parallelize: Any, build: Any, message: str
) -> None:
    assert any(message in told for told in pool.run(message_of, axes, parallelize, build))
