"""Reduce: whatever the way, the gradients of all ranks are those of plain PyTorch on the whole batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.distributed.transport import broadcast
from fxpipe.sharding.flat_bucket import FlatBucket
from tests.replicas import (
    CLEARS,
    PAIR,
    Layout,
    Parts,
    assert_parts,
    assert_walk,
    compiled_alone,
    every_zero,
    parts,
    random_moves,
    walk,
)
from tests.strict_transport import connect, run_strict
from tests.thinned import every, in_turn

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


LAYOUTS = [
    Layout(axes, per_node, zero, scope)
    for axes, nodes in (
        ((("pipe", 2), ("data", 2)), (None, 1, 2)),
        ((("data", 4), ("pipe", 2)), (None, 2, 4)),
        ((("pipe", 1), ("data", 3)), (None, 1)),
    )
    for per_node in nodes
    for zero in (0, 1, 2)
    for scope in (("node", "data") if zero else ("node",))
]


@pytest.mark.parametrize(
    ("layout", "tied", "total", "freezes"),
    in_turn(every(6, LAYOUTS), [False, True], [False, False, True, True], [False, True]),
    ids=str,
)
def test_any_walk_of_calls_gives_the_gradients_of_the_whole_batch(
    layout: Layout, tied: bool, total: bool, freezes: bool
) -> None:
    """Calls with and without synchronisation, gradients cleared in between or not: after each synchronised call they
    are those that plain PyTorch accumulates, and a parameter that was frozen keeps its own."""
    draw = random.Random(f"{layout} {tied} {total}")
    topology = layout.topology

    def batches() -> list[Tensor]:
        return list(torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(draw.randrange(100))).chunk(replicas))

    replicas = topology.size("data")
    kinds = ["call", "call", "later", "clear", "clear to zero"]
    moves = random_moves(draw, kinds, batches, [])
    for before, way in zip(["call", "later", "call", "later"], CLEARS, strict=True):
        moves += [(before, batches()), ("clear to zero", way), ("call", batches())]
    moves += [("set", "t"), ("call", batches()), ("later", batches()), ("set", "middle.weight"), ("call", batches())]
    for way in ("optimizer", "forward_backward"):
        moves += [("clear", way), ("set", "conv" if way == "optimizer" else ""), ("call", batches())]
    moves += [("zero", "last.weight"), ("call", batches()), ("later", batches())]
    if freezes:
        moves.append(("freeze", draw.choice(["middle.weight", "t"])))  # that one, or all weights
    moves.append(("call", batches()))

    def body(rank: int) -> list[Parts]:
        net = Net(tied, total)
        policy = fxpipe.Zero(layout.zero, layout.scope, bucket_mb=0.0008)
        step = fxpipe.compile(net, topology, microbatches=3, **layout.options | {"zero": policy})
        return walk(step, moves, topology.coordinate(rank)["data"], net)

    def accumulate(batches: Sequence[Tensor]) -> None:
        loss = model(torch.cat(list(batches)))
        (loss.total / loss.count if total else loss).backward()

    model = Net(tied, total)
    assert_walk(run_strict(body, topology.world_size, draw.randrange(100)), layout, model, moves, accumulate)


# --- what a parameter may be ---


class Branching(nn.Module):
    """A leaf of the capture that uses one of its parameters where the data says so."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.always
        return y * self.sometimes if bool((x > 0).any()) else y


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("users", [(), (1,), (0, 1, 2)], ids=["nobody", "one", "all"])
def test_a_parameter_that_no_replica_used_has_no_gradient_and_one_that_some_used_is_summed(
    zero: int, users: tuple[int, ...]
) -> None:
    topology = fxpipe.Topology([("pipe", 1), ("data", 3)])
    batches = [torch.full((2, 4), 1.0 if rank in users else -1.0) for rank in range(3)]

    def body(rank: int) -> tuple[Parts, list[Tensor | None]]:
        step = compiled_alone(Branching(), topology, microbatches=2, zero=zero)
        step(batches[rank])
        return parts(step), [parameter.grad for parameter in step.parameters()]

    model = Branching()
    for batch in batches:
        (model(batch).square().mean() / 3).backward()
    wanted = {"module." + name: parameter.grad for name, parameter in model.named_parameters()}
    every = run_strict(body, 3)
    assert (wanted["module.sometimes"] is None) == (users == ())
    assert_parts([found for found, _ in every], wanted)
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
        given = {"tracer": tracer, "example_args": (IDS,), **options}
        policy = fxpipe.Zero(zero, bucket_mb=BUCKET_MB)
        step = fxpipe.compile(Blocks(), topology, microbatches=2, zero=policy, **given)
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
        step = fxpipe.compile(Blocks(), topology, microbatches=1, zero=fxpipe.Zero(zero, bucket_mb=BUCKET_MB))
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
        step = compiled_alone(layers, topology, microbatches=3, zero=fxpipe.Zero(zero, bucket_mb=32 * 32 * 4 / 2**20))
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


@every_zero
def test_a_frozen_parameters_gradient_is_cleared_as_all_others(zero: int) -> None:
    def body(rank: int) -> list[float]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        step = compiled_alone(module, PAIR, microbatches=1, zero=fxpipe.Zero(zero, bucket_mb=1e-6))
        optimizer = step.optimizer(torch.optim.SGD, lr=1.0)
        step(torch.ones(2, 4))
        module.zero_grad(set_to_none=False)
        module[1].requires_grad_(False)
        before = [parameter.detach().clone() for parameter in module[1].parameters()]
        step(torch.ones(2, 4))
        optimizer.step()
        pairs = zip(module[1].parameters(), before, strict=True)
        return [(parameter.detach() - old).abs().max().item() for parameter, old in pairs]

    for moved in run_strict(body, 2):
        assert moved == [0.0, 0.0]
