"""The data axis against torch's own: DDP, ZeroRedundancyOptimizer and FSDP2 on the unsplit model, and plain PyTorch.

Ranks share this process as a strict world, 8 of them where there are 8; what needs torch's process groups runs on gloo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fxpipe
from fxpipe import Topology, stage_boundary
from fxpipe.options import Options
from tests.device import DEVICE
from tests.harness import cut, replica_of
from tests.pool import Pool
from tests.strict_transport import current_seat, run_strict
from tests.thinned import ALL, every, in_turn, pairwise

VOCABULARY, WIDTH, HIDDEN, ROWS, LENGTH = 11, 7, 13, 6, 3
LR, STEPS = 1e-3, 20 if ALL else 4  # which step it is makes a difference in the first three only
CLIP = 0.3
State = dict[str, Tensor]
Trained = tuple[list[float], State]
"""The norm of each step's gradients, and the whole model's state in the end."""


class Network(nn.Module):
    """Four stages; tied: the output head is the embedding, so that the first and the last share a parameter."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = stage_boundary(self.embed(ids))
        h = stage_boundary(torch.tanh(self.a(h)))
        h = stage_boundary(self.norm(self.b(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def network(tied: bool) -> Network:
    torch.manual_seed(0)
    return Network(tied)


def batch(step: int, replica: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    ids, labels = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    return {"ids": ids, "labels": labels}


def copies(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_near(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], most: float = 1e-6) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        gap = (got[name].double() - tensor.double()).abs().max().item()
        assert gap <= most, f"{name} is off by {gap:.3g}"


# --- fxpipe ---


def topology_of(pipe: int, data: int, order: str, per_node: int | None = None) -> Topology:
    """Two ranks of a data group in a node, where the order of axes allows it."""
    sizes = {"pipe": pipe, "data": data}
    if per_node is None and data > 1:
        per_node = 4 if (pipe, data, order) == (2, 4, "data, pipe") else 2
    return Topology([(axis, sizes[axis]) for axis in order.split(", ")], ranks_per_node=per_node)


def assert_trained(got: Trained, wanted: Trained) -> None:
    assert min(wanted[0]) > CLIP, "nothing was clipped"
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    assert_near(got[1], wanted[1])


def number_of(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def trained(topology: Topology, tied: bool, microbatches: int, **options: Any) -> Trained:
    """Steps of AdamW on clipped gradients; for each rank of the engine it is called on."""
    forward_backward = fxpipe.compile(network(tied), topology, microbatches=microbatches, **options)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=LR)
    replica, norms = replica_of(topology), []
    for step in range(STEPS):
        optimizer.zero_grad()
        forward_backward(**batch(step, replica))
        if step % 2:  # AdamW sees no factor that is the same in all steps
            norms.append(number_of(forward_backward.clip_grad_norm_(CLIP)))
        optimizer.step()
    state = copies(forward_backward.state_dict(full=True))
    forward_backward.close()
    return norms, state


def on_strict(topology: Topology, body: Callable[[], Any]) -> list[Any]:
    return run_strict(lambda rank: body(), topology.world_size)


# --- torch ---


def stepped(model: Any, optimizer: Any, microbatches: int, silent: Callable[[bool], Any]) -> list[float]:
    """Steps on this rank's batches; ``silent(whether)``: the context of a backward that is not to be reduced."""
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for place, part in enumerate(cut(batch(step, dist.get_rank()), microbatches)):
            with silent(place < microbatches - 1):
                (model(**part) / microbatches).backward()
        if step % 2:
            norms.append(number_of(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return norms


def with_ddp(tied: bool, microbatches: int, sharded: bool) -> Trained:
    model = DistributedDataParallel(network(tied))
    optimizer: Any = (
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=LR)
        if sharded
        else torch.optim.AdamW(model.parameters(), lr=LR)
    )

    def silent(whether: bool) -> Any:
        return model.no_sync() if whether else contextlib.nullcontext()

    norms = stepped(model, optimizer, microbatches, silent)
    return norms, copies(model.module.state_dict())


def with_fsdp2(tied: bool, microbatches: int) -> Trained:
    model: Any = fully_shard(network(tied), mesh=dist.init_device_mesh(DEVICE, (dist.get_world_size(),)))

    def silent(whether: bool) -> Any:
        model.set_requires_gradient_sync(not whether)
        return contextlib.nullcontext()

    norms = stepped(model, torch.optim.AdamW(model.parameters(), lr=LR), microbatches, silent)
    return norms, {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


ORACLES: dict[str, Callable[[bool, int], Trained]] = {
    "DDP": functools.partial(with_ddp, sharded=False),
    "ZeroRedundancyOptimizer": functools.partial(with_ddp, sharded=True),
    "FSDP2": with_fsdp2,
}
Oracle = Callable[[int, str, bool, int], Trained]
"""(size of the data axis, oracle, tied, micro-batches) → norms, and the parameters in the end."""


def oracle_in_world(name: str, tied: bool, microbatches: int) -> Trained:
    fxpipe.init()
    return ORACLES[name](tied, microbatches)


@pytest.fixture(scope="module")
def oracle(pool: Pool) -> Oracle:
    """What torch makes of the unsplit model, once for all tests that ask."""
    return functools.cache(lambda data, *key: pool.run(oracle_in_world, *key, ranks=data)[0])


# --- parameters after some steps ---


ORDERS = ["pipe, data", "data, pipe"]
SHAPES = [(1, 4, ORDERS[0]), (2, 2, ORDERS[0]), (2, 2, ORDERS[1]), (4, 1, ORDERS[0])]
LARGE = [(2, 4, ORDERS[0]), (2, 4, ORDERS[1])]
"""(pipe, data, order); an axis of size 1 has no place in an order."""
WAYS: dict[str, dict[str, Any]] = {
    "zero_0": {"zero": 0},
    "zero_1_node": {"zero": 1},
    "zero_1_data": {"zero": fxpipe.Zero(1, scope="data")},
    "zero_2_node": {"zero": 2},
    "zero_2_data": {"zero": fxpipe.Zero(2, scope="data")},
}


def level(way: str) -> int:
    return Options(zero=WAYS[way]["zero"]).sharding.level


ORACLE_OF = {0: "DDP", 1: "ZeroRedundancyOptimizer", 2: "ZeroRedundancyOptimizer", 3: "FSDP2"}


@pytest.mark.parametrize(
    ("shape", "tied", "microbatches", "way"), in_turn(SHAPES + LARGE, [True, False], [6, 1, 1], list(WAYS))
)
def test_norms_and_parameters_are_those_of_torch(
    oracle: Oracle, shape: tuple[int, int, str], tied: bool, microbatches: int, way: str
) -> None:
    pipe, data, order = shape
    topology = topology_of(pipe, data, order)
    for found in on_strict(topology, lambda: trained(topology, tied, microbatches, **WAYS[way])):
        assert_trained(found, oracle(data, ORACLE_OF[level(way)], tied, microbatches))


def several_on_gloo(topology: Topology, ways: list[Mapping[str, Any]], tied: bool, microbatches: int) -> list[Trained]:
    fxpipe.init()
    return [trained(topology, tied, microbatches, **way) for way in ways]


@pytest.mark.parametrize(
    ("pipe", "data", "order", "tied", "microbatches"),
    [(*shape, tied, number) for shape, tied, number in every(7, pairwise(SHAPES, [False, True], [1, 6]))],
)
def test_zero_3_is_fsdp2(
    pool: Pool, oracle: Oracle, pipe: int, data: int, order: str, tied: bool, microbatches: int
) -> None:
    topology = topology_of(pipe, data, order)
    scopes: list[dict[str, Any]] = [{"zero": 3}]
    scopes.append({"zero": fxpipe.Zero(3, scope="data")} if tied else {"zero": 3, "schedule": "zb_h1"})
    for runs in pool.run(several_on_gloo, topology, scopes, tied, microbatches, ranks=pipe * data):
        for found in runs:
            assert_trained(found, oracle(data, "FSDP2", tied, microbatches))


# --- plain PyTorch on the unsplit model, all replicas in turn ---


def gradients_of(model: nn.Module, step: int, replicas: int, microbatches: int = 1) -> dict[str, Tensor | None]:
    """The mean over replicas of what each has after its micro-batches; what a hook does is done on each of them."""
    held = dict(model.named_parameters())
    total: dict[str, Tensor | None] = dict.fromkeys(held)
    for replica in range(replicas):
        for parameter in held.values():
            parameter.grad = None
        for part in cut(batch(step, replica), microbatches):
            (model(**part) / microbatches).backward()
        for name, parameter in held.items():
            if parameter.grad is not None:
                one, so_far = parameter.grad / replicas, total[name]
                total[name] = one if so_far is None else so_far + one
    return total


# --- what each rank holds, and what moves ---


class Even(nn.Module):
    """Sizes that divide: no byte of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


EVEN_BYTES = 4 * 4 * (64 * 64 + 64)


def odd() -> nn.Module:
    return nn.Sequential(nn.Linear(97, 101), nn.Tanh(), nn.Linear(101, 89), nn.Tanh(), nn.Linear(89, 3))


class Odd(nn.Module):
    """Two stages of sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = odd(), nn.Sequential(nn.Linear(3, 97), odd())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(stage_boundary(self.first(x))).square().mean()


def state_numel(optimizer: torch.optim.Optimizer) -> int:
    """Elements of AdamW's two moments that this rank keeps."""
    return sum(state[key].numel() for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))


def state_after_a_step(topology: Topology, zero: int, scope: str) -> tuple[int, int]:
    """What this rank keeps of AdamW's moments, and the parameters of its stages."""
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Odd(), topology, microbatches=2, zero=fxpipe.Zero(zero, scope=scope))
    optimizer = forward_backward.optimizer(torch.optim.AdamW)
    forward_backward(torch.randn(4, 97))
    optimizer.step()
    return state_numel(optimizer), sum(parameter.numel() for parameter in forward_backward.parameters())


@pytest.mark.parametrize(
    ("zero", "scope", "topology"),
    pairwise([0, 1, 2], ["node", "data"], [topology_of(1, 4, ORDERS[0]), topology_of(2, 4, ORDERS[0])]),
    ids=str,
)
def test_each_rank_keeps_its_part_of_the_optimizer_state(topology: Topology, zero: int, scope: str) -> None:
    parts = {"node": 2, "data": 4}[scope] if zero else 1
    kept = on_strict(topology, lambda: state_after_a_step(topology, zero, scope))
    for held, parameters in kept:
        assert held == pytest.approx(2 * parameters / parts, rel=0.02)


def moved(topology: Topology, microbatches: int, zero: Any = 0, **options: Any) -> tuple[float, float]:
    """Bytes between nodes, per node, and inside them, per rank: of the second step, its parameter gather included."""
    torch.manual_seed(0)
    policy = dataclasses.replace(zero if isinstance(zero, fxpipe.Zero) else fxpipe.Zero(zero), bucket_mb=0.02)
    forward_backward = fxpipe.compile(Even(), topology, microbatches=microbatches, zero=policy, **options)
    optimizer = forward_backward.optimizer(torch.optim.AdamW)
    for _ in range(2):
        optimizer.zero_grad()
        forward_backward(torch.randn(6, 64))
        optimizer.step()
    traffic = forward_backward.traffic()
    assert str(traffic)
    return traffic.between, traffic.inside


def by_formula(way: str, nodes: int, ranks: int, microbatches: int) -> tuple[float, float]:
    """evidence.md's table, with as many bytes of parameters as of gradients; (between, inside)."""
    g = p = EVEN_BYTES
    world = nodes * ranks
    across = 2 * g * (nodes - 1) / nodes
    if way == "zero_0":
        return across, 2 * g * (ranks - 1) / ranks
    if way == "zero_1_data":
        everything = (g + p) * (world - 1) / world
        return (everything, 0.0) if nodes > 1 else (0.0, everything)
    times = microbatches if way == "zero_2_node" else 1
    return across, (times * g + p) * (ranks - 1) / ranks


@pytest.mark.parametrize(
    ("way", "nodes", "microbatches"),
    every(2, pairwise(["zero_0", "zero_1_node", "zero_1_data", "zero_2_node"], [1, 2, 4], [1, 3])),
)
def test_bytes_are_those_of_the_formulas(way: str, nodes: int, microbatches: int) -> None:
    topology = topology_of(1, 4, ORDERS[0], per_node=4 // nodes)
    for between, inside in on_strict(topology, lambda: moved(topology, microbatches, **WAYS[way])):
        assert (between, inside) == pytest.approx(by_formula(way, nodes, 4 // nodes, microbatches))


# --- overlap ---


class FourBuckets(nn.Module):
    """Four layers of a megabyte: each fills a bucket of that size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def recorded(zero: int, microbatches: int, schedule: str) -> tuple[int, int]:
    """How many reductions a step had, and how many of them began before the last backward had ended: by hand."""
    fxpipe.init()
    topology = Topology([("data", dist.get_world_size())])
    forward_backward = fxpipe.compile(
        FourBuckets(), topology, microbatches=microbatches, zero=fxpipe.Zero(zero, bucket_mb=1.0), schedule=schedule
    )
    optimizer = forward_backward.optimizer(torch.optim.AdamW)
    forward_backward.record_timeline()
    for _ in range(2):
        optimizer.zero_grad()
        forward_backward(torch.randn(64, 512))
        optimizer.step()
    timeline = forward_backward.timeline()
    ended = max(span.end for action, span in timeline.spans.items() if action.kind is not fxpipe.Kind.F)
    forward_backward.close()
    return len(timeline.reductions), sum(reduction.start < ended for reduction in timeline.reductions)


@pytest.mark.parametrize(("zero", "calls"), in_turn([0, 1], [(1, "1f1b"), (3, "1f1b"), (3, "zb_h1")]))
def test_reductions_start_while_backward_goes_on(pool: Pool, zero: int, calls: tuple[int, str]) -> None:
    microbatches, schedule = calls
    for count, early in pool.run(recorded, zero, microbatches, schedule, ranks=2):
        assert count == 4
        assert early >= 3


# --- backwards in two halves ---


class Halving(Network):
    """A layer of many operations among them, whose gradients I makes."""

    def __init__(self, tied: bool) -> None:
        super().__init__(tied)
        self.norm = nn.GRU(WIDTH, WIDTH, batch_first=True)  # type: ignore[assignment]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(self.embed(ids))))
        h, _ = self.norm(self.b(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def halved(topology: Topology, tied: bool, options: Mapping[str, Any]) -> tuple[State, State]:
    """The whole model and what this rank holds, after some steps with clipping; the first layer frozen for a while."""
    torch.manual_seed(0)
    model = Halving(tied)
    forward_backward = fxpipe.compile(model, topology, microbatches=3, **options)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=LR)
    for step in range(STEPS):
        model.a.weight.requires_grad_(step != 2)
        optimizer.zero_grad()
        forward_backward(**batch(step, replica_of(topology)))
        forward_backward.clip_grad_norm_(0.5)
        optimizer.step()
    whole = copies(forward_backward.state_dict(full=True))
    held = {n: p for n, p in forward_backward.module.named_parameters(remove_duplicate=False) if not p.is_meta}
    forward_backward.close()
    return whole, copies(held)


@pytest.mark.parametrize(
    ("precise", "way", "tied"), in_turn([True, False], ["zero_0", "zero_1_node", "zero_2_node"], [True])
)
def test_in_two_halves_replicas_stay_bit_identical_and_as_they_are_in_one(precise: bool, way: str, tied: bool) -> None:
    topology = topology_of(2, 2, ORDERS[0])
    options = WAYS[way] | ({} if precise else {"precision": fxpipe.Precision()})
    runs = {
        name: on_strict(topology, lambda name=name: halved(topology, tied, options | {"schedule": name}))
        for name in ("1f1b", "zb_h1")
    }
    for (whole, _), (wanted, _) in zip(runs["zb_h1"], runs["1f1b"], strict=True):
        assert_near(whole, wanted, 1e-6 if precise else 1e-3)
    held = [state for _, state in runs["zb_h1"]]
    alike = [
        (one[name], other[name]) for one in held for other in held if one is not other for name in one.keys() & other
    ]
    assert len(alike) >= 2 * len(dict(Halving(tied).named_parameters()))
    assert all(torch.equal(*pair) for pair in alike)
    if tied:
        owners = [one[name] for one in held for name in ("embed.weight", "head.weight") if name in one]
        assert len(owners) >= len(held), "each rank owns it"
        assert all(torch.equal(tensor, owners[0]) for tensor in owners)


# --- hooks ---


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def halve_what_is_there(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def put_another(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


def put_on_node(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """As Megatron does: on the node that adds gradients up, which lives as long as somebody holds it."""
    parameter.node = get_gradient_edge(parameter).node
    parameter.node.register_hook(lambda *_: hook(parameter))


HOOKS: dict[str, Callable[[nn.Parameter], object]] = {
    "on the gradient": lambda parameter: parameter.register_hook(halve),
    "behind it": lambda parameter: parameter.register_post_accumulate_grad_hook(halve_what_is_there),
    "behind it, another tensor": lambda parameter: parameter.register_post_accumulate_grad_hook(put_another),
    "behind autograd's node": lambda parameter: put_on_node(parameter, halve_what_is_there),
    "behind autograd's node, another tensor": lambda parameter: put_on_node(parameter, put_another),
}
HOOKED = ("embed.weight", "a.weight", "b.bias")


def hooked(topology: Topology, way: Mapping[str, Any], hook: str, early: bool, microbatches: int) -> State:
    model = network(False)
    if early:
        put_hooks(model.named_parameters(), hook)
    forward_backward = fxpipe.compile(model, topology, microbatches=microbatches, **way)
    if not early:
        put_hooks(forward_backward.named_parameters(), hook)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        forward_backward(**batch(step, replica_of(topology)))
        optimizer.step()
    return copies(forward_backward.state_dict(full=True))


def put_hooks(named: Iterable[tuple[str, nn.Parameter]], hook: str) -> None:
    for name, parameter in named:
        if name in HOOKED:
            HOOKS[hook](parameter)


@pytest.mark.parametrize(
    ("hook", "early", "microbatches", "way"), every(12, list(product(HOOKS, [True, False], [1, 3], WAYS)))
)
def test_hooks_act_once_and_on_what_they_act_on_in_plain_pytorch(
    hook: str, early: bool, microbatches: int, way: str
) -> None:
    if microbatches > 1 and hook != "on the gradient" and level(way) == 2:
        pytest.skip("there is nothing that has accumulated: each micro-batch's gradient is reduced at once")
    topology = topology_of(2, 2, ORDERS[0])
    model = network(False)
    put_hooks(model.named_parameters(), hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        gradients = gradients_of(model, step, 2, microbatches)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
    for state in on_strict(topology, lambda: hooked(topology, WAYS[way], hook, early, microbatches)):
        assert_near(state, model.state_dict())


# --- inf and nan ---


def poisoned(topology: Topology, way: Mapping[str, Any], victim: int, poison: float) -> tuple[list[State], int]:
    """This rank's parameters after each of four steps, in two of which one rank's gradient has one bad number; and how
    many steps the optimizer says it has skipped."""
    half = fxpipe.Precision(torch.float16)
    forward_backward = fxpipe.compile(network(True), topology, microbatches=2, precision=half, **way)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-2)
    seat = current_seat()
    assert seat is not None
    states = []
    for step in range(4):
        optimizer.zero_grad()
        spoils = step in (1, 2) and seat.rank == victim
        with poisoning(forward_backward, poison) if spoils else contextlib.nullcontext():
            forward_backward(**batch(step, replica_of(topology)))
        optimizer.step()
        states.append(copies(dict(forward_backward.named_parameters())))
    return states, optimizer.skipped_steps


@contextlib.contextmanager
def poisoning(forward_backward: fxpipe.ForwardBackward, poison: float) -> Iterator[None]:
    """Spoils the last element of one parameter's gradient."""

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[-1] = poison
        return spoilt

    *_, parameter = forward_backward.parameters()
    handle = parameter.register_hook(spoil)
    yield
    handle.remove()


@pytest.mark.parametrize(("way", "spoilt"), in_turn(list(WAYS), [(0, float("nan")), (3, float("inf"))]))
def test_a_bad_number_in_one_ranks_gradient_skips_the_step_on_all(way: str, spoilt: tuple[int, float]) -> None:
    victim, poison = spoilt
    topology = topology_of(2, 2, ORDERS[0])
    # as the sum shows it: to both replicas, or to the one with the first half of the stage's bucket
    first = victim // 2 * 2
    bad = f"rank {first}" if level(way) else f"ranks {first}, {first + 1}"
    says = rf"step 1 \(from 0\) was skipped on all ranks: the gradient on {bad} has"
    with pytest.warns(RuntimeWarning, match=says) as said:
        ranks = on_strict(topology, lambda: poisoned(topology, WAYS[way], victim, poison))
    assert [warning.filename for warning in said] == [__file__]
    for rank, ((one, second, third, fourth), skipped) in enumerate(ranks):
        assert skipped == 2
        assert_near(second, one, 0.0)
        assert_near(third, one, 0.0)
        assert all(tensor.isfinite().all() for tensor in fourth.values())
        assert all(not torch.equal(fourth[name], third[name]) for name in fourth)
        assert_near(fourth, ranks[rank // 2 * 2][0][-1], 0.0)  # the other replica's


# --- an optimizer's own methods ---


class Averaging(torch.optim.SGD):
    """It evaluates at another point than it steps from, as schedule-free optimizers do, and says which one it is at."""

    evaluates, rate = False, 0.5

    def eval(self) -> Averaging:
        if not self.evaluates:
            self._swap()
        self.evaluates = self.param_groups[0]["evaluates"] = True
        return self

    def train(self) -> None:
        if self.evaluates:
            self._swap()
        self.evaluates = self.param_groups[0]["evaluates"] = False

    def fails(self) -> Tensor:
        return torch.stack(
            [p.grad for p in self.param_groups[0]["params"] if p.grad is not None and p.grad.isnan().any()]
        )

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            average = self.state[parameter].setdefault("average", parameter.detach().clone())
            now = parameter.clone()
            parameter.copy_(average)
            average.lerp_(now, self.rate)


def evaluated(optimizer: Any, step: Callable[[int], None], loss: Callable[[], Tensor]) -> list[Tensor]:
    """Losses where it steps, and where it evaluates."""
    found = []
    for number in range(3):
        step(number)
        optimizer.step()
        found.append(loss())
        assert optimizer.eval() is optimizer
        assert optimizer.evaluates
        assert optimizer.param_groups[0]["evaluates"]
        found.append(loss())
        optimizer.train()
    return [*found, loss()]


def averaged(options: dict[str, Any]) -> list[Tensor]:
    topology = topology_of(2, 2, "data, pipe")
    forward_backward = fxpipe.compile(network(False), topology, microbatches=1, **options)
    optimizer = forward_backward.optimizer(Averaging, lr=0.5, elementwise=options["zero"] == 3)
    with pytest.raises(AttributeError, match="DistributedOptimizer of Averaging' object has no attribute 'average'"):
        optimizer.average  # noqa: B018
    replica = replica_of(topology)

    def step(number: int) -> None:
        optimizer.zero_grad()
        forward_backward(**batch(number, replica))

    found = evaluated(optimizer, step, lambda: forward_backward.evaluate(**batch(9, 0), outputs="all"))
    with pytest.raises(fxpipe.RunError, match=r"Averaging\.fails\(\) failed on this rank"):
        optimizer.fails()
    return [*found, forward_backward.evaluate(**batch(9, 0), outputs="all")]


AVERAGED = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 1, "precision": fxpipe.Precision(torch.float32)}]


@pytest.mark.parametrize("options", AVERAGED, ids=str)
def test_an_optimizers_own_methods_act_on_the_parameters(options: dict[str, Any]) -> None:
    check_averaged(run_strict(lambda rank: averaged(options), 4))


def test_an_optimizers_own_methods_act_on_the_parameters_of_fsdp(pool: Pool) -> None:
    check_averaged(pool.run(averaged, {"zero": 3}, ranks=4))


def check_averaged(found: list[list[Tensor]]) -> None:
    plain = network(False)
    optimizer = Averaging(plain.parameters(), lr=0.5)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for replica in range(2):
            (plain(**batch(number, replica)) / 2).backward()

    wanted = evaluated(optimizer, step, lambda: plain(**batch(9, 0)).detach())
    for losses in found:
        torch.testing.assert_close(losses, [*wanted, wanted[-1]], rtol=1e-5, atol=1e-6)
