"""Reduce: whatever the way, the gradients of all ranks are those of plain PyTorch on the whole batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.distributed.transport import broadcast
from fxpipe.sharding.flat_bucket import FlatBucket
from fxpipe.sharding.gradients import Piece
from tests.strict_transport import connect, run_strict
from tests.thinned import ALL, every

ROWS = 24  # of a whole batch


class Net(nn.Module):
    """Two stages of parameters of many shapes. ``tied``: both share one. ``total``: the loss is a Sum."""

    def __init__(self, tied: bool, total: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 40), nn.Linear(40, 8)
        self.again = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.conv = nn.Parameter(torch.randn(8, 1, 5, 1).to(memory_format=torch.channels_last))
        if tied:
            self.again.weight = self.first.weight
        self.total = total

    def forward(self, x: Tensor) -> Any:
        x = fxpipe.stage_boundary(self.first(x).tanh())
        x = self.last(self.middle(x).relu() * self.conv.reshape(40)) * self.scale
        x = self.again(x).square()
        return fxpipe.Sum(x.sum(), x.shape[0] * 3) if self.total else x.mean()


@dataclass(frozen=True)
class Setup:
    axes: tuple[tuple[str, int], ...]
    ranks_per_node: int | None
    zero: int
    scope: str

    @property
    def topology(self) -> fxpipe.Topology:
        return fxpipe.Topology(self.axes, self.ranks_per_node)


SETUPS = [
    Setup(axes, per_node, zero, scope)
    for axes, nodes in (
        ((("pipe", 2), ("data", 2)), (None, 1, 2)),
        ((("data", 4), ("pipe", 2)), (None, 2, 4)),
        ((("pipe", 1), ("data", 3)), (None, 1)),
    )
    for per_node in nodes
    for zero in (0, 1, 2)
    for scope in (("node", "data") if zero else ("node",))
]

Gradients = dict[str, list[tuple[int, int, Tensor | None]]]
"""Name → (start, stop, what a rank has of the gradient)."""


def part_of(batch: Tensor, setup: Setup, rank: int) -> Tensor:
    return batch.chunk(setup.topology.size("data"))[setup.topology.coordinate(rank)["data"]]


def had(pieces: list[Piece]) -> Gradients:
    found: Gradients = {}
    for piece in pieces:
        gradient = piece.gradient()
        if gradient is not None:
            gradient = in_memory_order(gradient).clone()
            assert gradient.shape == (piece.stop - piece.start,)
        found.setdefault(piece.name, []).append((piece.start, piece.stop, gradient))
    return found


def in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def assert_gradients(setup: Setup, ranks: list[Gradients], wanted: dict[str, Tensor | None], what: str) -> None:
    """Every rank's pieces are the reference's; over each shard group, and its parameters' other owners, they cover each
    parameter once."""
    topology = setup.topology
    shards = topology.shard_groups() if setup.scope == "node" else topology.groups("data")
    pipes = [[rank for pipe in topology.groups("pipe") if {*pipe} & {*group} for rank in pipe] for group in shards]
    for group in pipes if setup.zero else [[rank] for rank in range(topology.world_size)]:
        for name in {name for rank in group for name in ranks[rank]}:
            pieces = sorted((piece for rank in group for piece in ranks[rank].get(name, [])), key=lambda one: one[:2])
            reference = wanted[name]
            ends = 0
            for start, stop, gradient in pieces:
                assert start == ends, f"{what}: {name} is covered {'twice' if start < ends else 'in part'}"
                ends = stop
                if reference is None or gradient is None:
                    assert gradient is reference is None, f"{what}: {name} has {gradient}, wanted {reference}"
                else:
                    torch.testing.assert_close(
                        gradient, in_memory_order(reference)[start:stop], rtol=1e-5, atol=1e-6, msg=f"{what}: {name}"
                    )
            sizes = {one: reference.numel() for one, reference in wanted.items() if reference is not None}
            assert ends == sizes.get(name, ends)
    replicas = topology.replica_groups() if setup.zero and setup.scope == "node" else []
    for group in replicas if setup.zero else topology.groups("data"):
        for rank in group[1:]:
            assert_bits(ranks[group[0]], ranks[rank])


def assert_bits(first: Gradients, second: Gradients) -> None:
    assert first.keys() == second.keys()
    for name, pieces in first.items():
        for one, other in zip(pieces, second[name], strict=True):
            assert one[:2] == other[:2]
            assert (one[2] is None) == (other[2] is None)
            assert one[2] is None or torch.equal(one[2], other[2]), name


def names(setup: object) -> str | None:
    if not isinstance(setup, Setup):
        return None
    axes = "×".join(f"{name}{size}" for name, size in setup.axes)
    return f"{axes}, {setup.ranks_per_node or 'all'} to a node, zero={setup.zero} {setup.scope}"


LOSSES = list(product([False, True], [False, True]))
"""(tied, total)."""
WALKS = every(
    3,  # one or two of a layout's five
    [(setup, *LOSSES[loss % 4]) for number, setup in enumerate(SETUPS) for loss in (range(4) if ALL else [number])],
)
"""Each layout, each ``zero`` and scope, and each loss."""


@pytest.mark.parametrize(("setup", "tied", "total"), every(2, WALKS), ids=names)
def test_any_walk_of_calls_gives_the_gradients_of_the_whole_batch(setup: Setup, tied: bool, total: bool) -> None:
    """Calls with and without synchronisation, gradients cleared in between or not: after each synchronised call they
    are those that plain PyTorch accumulates."""
    draw = random.Random(f"{setup} {tied} {total}")
    walk = [draw.choice(["call", "call", "later", "clear", "clear to zero"]) for _ in range(10 if ALL else 6)] + [
        "later",
        "call",
    ]
    batches = [torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(place)) for place in range(len(walk))]

    def body(rank: int) -> list[Gradients]:
        step = fxpipe.compile(
            Net(tied, total),
            setup.topology,
            microbatches=3,
            zero=setup.zero,
            zero_scope=setup.scope,
            bucket_cap_mb=0.0008,
        )
        seen = []
        for place, what in enumerate(walk):
            if what.startswith("clear"):
                step.zero_grad(set_to_none=what == "clear")
                continue
            step.set_requires_gradient_sync(what == "call")
            step(part_of(batches[place], setup, rank))
            if what == "call":
                seen.append(had(step._reducer.pieces()))
        return seen

    every = run_strict(body, setup.topology.world_size, seed=draw.randrange(100))

    model = Net(tied, total)
    count = 0
    for place, what in enumerate(walk):
        if what.startswith("clear"):
            model.zero_grad()
            continue
        loss = model(batches[place])
        (loss.total / loss.count if total else loss).backward()
        if what == "call":
            wanted = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
            assert_gradients(setup, [seen[count] for seen in every], wanted, f"after {walk[: place + 1]}")
            count += 1


@pytest.mark.parametrize(("setup", "frozen"), every(26, list(product(SETUPS, ["middle.weight", "all"]))), ids=names)
def test_what_was_frozen_since_a_call_that_was_not_summed_is_summed_with_the_next(setup: Setup, frozen: str) -> None:
    """As in plain PyTorch, where a gradient stays that a parameter had when it was frozen."""
    batches = [torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(place)) for place in range(2)]

    def freeze(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in parameters:
            if name == frozen or (frozen == "all" and name != "again.bias"):
                parameter.requires_grad_(False)

    def body(rank: int) -> Gradients:
        model = Net(True, False)
        options = {"zero": setup.zero, "zero_scope": setup.scope, "bucket_cap_mb": 0.0008}
        step = fxpipe.compile(model, setup.topology, microbatches=3, **options)
        step.set_requires_gradient_sync(False)
        step(part_of(batches[0], setup, rank))
        freeze(model.named_parameters(remove_duplicate=False))
        step.set_requires_gradient_sync(True)
        step(part_of(batches[1], setup, rank))
        return had(step._reducer.pieces())

    model = Net(True, False)
    model(batches[0]).backward()
    freeze(model.named_parameters(remove_duplicate=False))
    model(batches[1]).backward()
    wanted = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    assert_gradients(setup, run_strict(body, setup.topology.world_size), wanted, "after the second call")


# --- what a parameter may be ---


class Branching(nn.Module):
    """A leaf of the capture that uses one of its parameters where the data says so."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.always
        return y * self.sometimes if bool((x > 0).any()) else y


def compiled_alone(module: nn.Module, topology: fxpipe.Topology, **options: object) -> fxpipe.ForwardBackward:
    """One stage of its own for a module, and a loss behind it."""
    stages = {"module": module, "loss": lambda y: y.square().mean()}
    graph = fxpipe.StageGraph.from_callables(stages, [("module", "loss")], {"module": ["x"]})
    return fxpipe.compile(graph, topology, placement={"module": 0, "loss": 0}, **options)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("users", [(), (1,), (0, 1, 2)], ids=["nobody", "one", "all"])
def test_a_parameter_that_no_replica_used_has_no_gradient_and_one_that_some_used_is_summed(
    zero: int, users: tuple[int, ...]
) -> None:
    topology = fxpipe.Topology([("pipe", 1), ("data", 3)])
    batches = [torch.full((2, 4), 1.0 if rank in users else -1.0) for rank in range(3)]

    def body(rank: int) -> tuple[Gradients, list[Tensor | None]]:
        step = compiled_alone(Branching(), topology, microbatches=2, zero=zero)
        step(batches[rank])
        return had(step._reducer.pieces()), [parameter.grad for parameter in step.parameters()]

    model = Branching()
    for batch in batches:
        (model(batch).square().mean() / 3).backward()
    wanted = {"module." + name: parameter.grad for name, parameter in model.named_parameters()}
    every = run_strict(body, 3)
    assert (wanted["module.sometimes"] is None) == (users == ())
    setup = Setup((("pipe", 1), ("data", 3)), None, zero, "data")
    assert_gradients(setup, [found for found, _ in every], wanted, "after a step")
    for _, shown in every:
        assert [gradient is None for gradient in shown] == [False, users == (), True]


@pytest.mark.parametrize("zero", [1, 2])
def test_an_earlier_gradient_of_a_parameter_that_one_rank_steps_stays_on_all(zero: int) -> None:
    def body(rank: int) -> list[bool]:
        step = compiled_alone(Branching(), fxpipe.Topology([("data", 2)]), microbatches=1, zero=zero)
        step.optimizer(torch.optim.Adafactor)
        for sign in (1.0, -1.0):  # the second call does not use one of them
            step(torch.full((2, 4), sign))
        return [parameter.grad is None for parameter in step.parameters()]

    assert run_strict(body, 2) == [[False, False, True]] * 2


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("norm", [False, True])
def test_a_sharded_gradient_is_not_taken_for_a_gradient(zero: int, norm: bool) -> None:
    topology = fxpipe.Topology([("pipe", 1), ("data", 2)])

    def body(rank: int) -> None:
        step = compiled_alone(nn.Linear(4, 4), topology, microbatches=2, zero=zero)
        plain = torch.optim.AdamW(step.parameters())
        step(torch.ones(2, 4))
        with pytest.raises(fxpipe.RunError, match=r"forward_backward\.optimizer.*forward_backward\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(list(step.parameters()), 1.0) if norm else plain.step()
        assert all(p.isfinite().all() and p.grad is not None for p in step.parameters())

    run_strict(body, 2)


def test_a_sparse_gradient_is_refused_on_all_ranks() -> None:
    topology = fxpipe.Topology([("pipe", 1), ("data", 2)])

    def body(rank: int) -> None:
        compiled_alone(nn.Embedding(5, 4, sparse=True), topology, microbatches=1)(torch.tensor([1, 2]))

    with pytest.raises(fxpipe.RunError, match=r"gradient of module\.weight is sparse.*sparse=False"):
        run_strict(body, 2)


def test_a_gradient_is_a_view_with_the_strides_of_its_parameter() -> None:
    topology = fxpipe.Topology([("pipe", 1), ("data", 2)])

    def body(rank: int) -> tuple[Any, ...]:
        convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        step = compiled_alone(convolution, topology, microbatches=2)
        step(torch.ones(2, 2, 4, 4))
        weight, bias = (parameter.grad for parameter in step.parameters())
        again = weight
        step.zero_grad()
        step(torch.ones(2, 2, 4, 4))
        (weight, _) = (parameter.grad for parameter in step.parameters())
        same = weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
        return weight.stride(), convolution.weight.stride(), same, weight.data_ptr() == again.data_ptr()

    for strides, wanted, together, zero_copy in run_strict(body, 2):
        assert strides == wanted
        assert together
        assert zero_copy


# --- what happens when ---


class Log:
    """A work under way that tells when it is waited for."""

    def __init__(self, work: Any, what: str, events: list[str]) -> None:
        self._work, self._what, self._events = work, what, events

    def wait(self) -> None:
        self._events.append(f"wait for {self._what}")
        self._work.wait()


@pytest.mark.parametrize("zero", [1, 2])
def test_gathered_parameters_are_waited_for_where_the_next_forward_first_uses_them(zero: int) -> None:
    topology = fxpipe.Topology([("pipe", 1), ("data", 2)])

    def body(rank: int) -> list[str]:
        one, two = nn.Linear(16, 16), nn.Linear(16, 16)
        graph = fxpipe.StageGraph.from_callables(
            {"one": one, "two": two, "loss": lambda y: y.square().mean()},
            [("one", "two"), ("two", "loss")],
            {"one": ["x"]},
        )
        step = fxpipe.compile(graph, topology, microbatches=2, zero=zero)
        optimizer = step.optimizer(torch.optim.SGD, lr=0.1)
        step(torch.ones(4, 16))
        optimizer.step()
        events: list[str] = []
        for bucket in step._reducer._buckets:
            bucket.gathering = Log(bucket.gathering, bucket.members[0].slot.name.partition(".")[0], events)
        one.register_forward_pre_hook(lambda *_: events.append("one"))
        two.register_forward_pre_hook(lambda *_: events.append("two"))
        step(torch.ones(4, 16))
        return events

    for events in run_strict(body, 2):
        assert events[:4] == ["wait for one", "one", "wait for two", "two"]
        assert [event for event in events if event.startswith("wait")] == ["wait for one", "wait for two"]


class Blocks(nn.Module):
    """An embedding and linear layers, each of a bucket of its own, and a parameter that no module calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(16, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(ids)).tanh()
        x = self.blocks[1](x * self.gain).tanh()
        return self.blocks[2](x).square().mean()


BUCKET_MB = 16 * 16 * 4 / 2**20
IDS = torch.arange(4 * 16).view(4, 16) % 16


class Operations(TorchDispatchMode):
    """Notes the operations that use a parameter of ``Blocks``."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("embedding", "mm", "mul", "embedding_dense_backward"):
            self._events.append(name)
        return func(*args, **(kwargs or {}))


def name_of(bucket: FlatBucket) -> str:
    (member,) = bucket.members
    return member.slot.name.removesuffix(".weight")


@pytest.mark.parametrize(
    ("tracer", "zero", "options"),
    [
        ("symbolic", 1, {}),
        ("export", 2, {}),
        ("record", 1, {}),
        ("symbolic", 1, {"recompute": True}),
        ("symbolic", 2, {"schedule": "zb_h1"}),
        ("export", 1, {"schedule": "zb_h1"}),
    ],
)
def test_a_forward_waits_for_each_bucket_where_it_first_reads_it(
    tracer: str, zero: int, options: dict[str, Any]
) -> None:
    topology = fxpipe.Topology([("pipe", 1), ("data", 2)])

    def body(rank: int) -> tuple[list[str], list[str]]:
        given = {"tracer": tracer, "example_args": (IDS,), "bucket_cap_mb": BUCKET_MB, **options}
        step = fxpipe.compile(Blocks(), topology, microbatches=2, zero=zero, **given)
        optimizer = step.optimizer(torch.optim.SGD, lr=0.1)
        step(IDS)
        order, events = list[str](), list[str]()
        for bucket in step._reducer._buckets:
            bucket.gather = noting(order, name_of(bucket), bucket.gather)
        optimizer.step()
        for bucket in step._reducer._buckets:
            bucket.gathering = Log(bucket.gathering, name_of(bucket), events)
        with Operations(events):
            step(IDS)
        return order, events[events.index("wait for embedding") :]

    for order, events in run_strict(body, 2):
        assert order == ["embedding", "blocks.0", "gain", "blocks.1", "blocks.2"], "in the order of the forward"
        reads = {"embedding": "embedding", "blocks.0": "mm", "gain": "mul", "blocks.1": "mm", "blocks.2": "mm"}
        assert events[:10] == [event for name, use in reads.items() for event in (f"wait for {name}", use)]
        assert not any(event.startswith("wait") for event in events[10:])


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_bucket_is_summed_ahead_of_the_backward_of_the_layer_before(zero: int) -> None:
    topology = fxpipe.Topology([("pipe", 1), ("data", 2)])

    def body(rank: int) -> list[str]:
        step = fxpipe.compile(Blocks(), topology, microbatches=1, zero=zero, bucket_cap_mb=BUCKET_MB)
        step(IDS)
        events: list[str] = []
        for bucket in step._reducer._buckets:
            bucket.start = noting(events, f"sum {name_of(bucket)}", bucket.start)
        with Operations(events):
            step(IDS)
        return events[events.index("sum blocks.2") :]

    # each linear layer's backward is two products, for its weight and its input
    products = ["mm", "mm"]
    for events in run_strict(body, 2):
        sums = [event for event in events if event.startswith("sum") or event in ("mm", "embedding_dense_backward")]
        assert sums == [
            "sum blocks.2",
            *(*products, "sum blocks.1"),
            "sum gain",
            *(*products, "sum blocks.0"),
            *("embedding_dense_backward", "sum embedding"),
        ]


def noting(events: list[str], event: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        events.append(event)
        return call(*args)

    return noted


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sums_start_in_the_last_micro_batch_alone_and_with_zero_2_in_each(zero: int) -> None:
    topology = fxpipe.Topology([("pipe", 1), ("data", 2)])

    def body(rank: int) -> list[int]:
        layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
        step = compiled_alone(layers, topology, microbatches=3, zero=zero, bucket_cap_mb=32 * 32 * 4 / 2**20)
        counts = []
        for on in (False, True):
            step.set_requires_gradient_sync(on)
            step(torch.ones(6, 32))
            moved = step.traffic().select(scope="shard")
            counts.append(sum(row.count for row in moved))
        return counts

    per_call = {0: [0, 4], 1: [0, 4], 2: [12, 12]}[zero]
    assert run_strict(body, 2) == [per_call, per_call]


def test_broadcast_overwrites_whatever_a_model_holds() -> None:
    def values() -> list[Tensor]:
        return [
            torch.tensor([True, False, True]),
            torch.tensor(7),  # num_batches_tracked
            torch.tensor([1.5, float("nan"), -0.0]),
            torch.tensor([[1.5]], dtype=torch.bfloat16),
            torch.arange(6.0).view(2, 3).t(),
            torch.arange(5, dtype=torch.uint8),
            torch.tensor([1 + 2j]),
            torch.empty(0),
            torch.empty(0, 3, dtype=torch.int64),
            nn.Parameter(torch.ones(2, 2)),
        ]

    def body(rank: int) -> list[Tensor]:
        held, transport = values(), connect(fxpipe.Topology([("data", 3)]))
        if rank != 1:
            with torch.no_grad():
                for tensor in held:
                    tensor.zero_()
        broadcast(held, transport, "data", 1)
        return held

    for held in run_strict(body, 3):
        for tensor, wanted in zip(held, values(), strict=True):
            assert tensor.dtype == wanted.dtype
            assert tensor.stride() == wanted.stride()
            assert tensor.requires_grad == wanted.requires_grad
            bits = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (tensor, wanted))
            assert torch.equal(*bits)
