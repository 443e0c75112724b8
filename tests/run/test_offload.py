"""Offload: saved tensors go to the host's memory and come back, and gradients have the bits of plain autograd."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import Schedule, StageGraph, Topology
from fxpipe.device import HostCopies
from fxpipe.run.actions.offload import Offloaded, storages
from fxpipe.schedules.action import Action
from fxpipe.torch_compat.tensors import storage_id
from tests.harness import assert_same, gradients_of
from tests.offloading import Left, Offloading, leaving
from tests.pool import Pool

WIDTH = 8
CPU = torch.device("cpu")


class Parts(nn.Module):
    """The parameters and buffers of the kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.embedding, self.sparse = nn.Embedding(10, WIDTH), nn.Embedding(10, WIDTH, sparse=True)
        self.batch_norm, self.layer_norm, self.conv = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.Conv1d(3, 3, 3)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.register_buffer("large", torch.randn(100, 100))
        self.register_buffer("ids", torch.tensor([1, 2, 3]))


class InCtx(torch.autograd.Function):
    """Keeps its input in an attribute, which hooks do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.x * gradient


class SavesBoth(torch.autograd.Function):
    """Saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradient * y + 0 * x


def in_place(p: Parts, x: Tensor) -> Tensor:
    y = x @ p.weight
    y.mul_(2).relu_()
    return y * x


def inner_gradient(p: Parts, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((x @ p.weight).pow(3).sum(), x, create_graph=True)
    return gradient.square()


def own_hooks(p: Parts, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x @ p.weight).exp()


def attention(p: Parts, x: Tensor) -> Tensor:
    heads = (x @ p.weight).reshape(1, 5, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(*heads.expand(3, 1, 2, 5, 4), is_causal=True)


def compiled(p: Parts, x: Tensor) -> Tensor:
    return torch.compile(lambda x, weight: F.gelu(x @ weight) ** 2, backend="aot_eager")(x, p.weight)  # type: ignore[no-any-return]


def jagged(p: Parts, x: Tensor) -> Tensor:
    nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    return (nested.sin() * nested.exp()).values()  # type: ignore[no-any-return]


def odd_bytes(p: Parts, x: Tensor) -> Tensor:
    """A storage of 10 bytes: two float32 and, with the two bytes behind, ten booleans."""
    memory = torch.tensor([0, 0, 128, 63, 0, 0, 0, 64, 1, 1], dtype=torch.uint8)
    factors, mask = memory[:8].view(torch.float32), memory.view(torch.bool)
    return x[:, :2] * factors + torch.where(mask, x.reshape(4, 10), 0.0).sum()


def conjugate(p: Parts, x: Tensor) -> Tensor:
    z = torch.view_as_complex((x @ p.weight).reshape(-1, 2))
    return torch.view_as_real(z.conj() * z * z) * z.conj().imag[:, None]


Kind = Callable[[Parts, Tensor], Tensor]
KINDS: dict[str, Kind] = {  # x is no parameter and no input of the batch
    "linear": lambda p, x: x @ p.weight.t(),
    "written in place, then saved": in_place,
    "views of one storage": lambda p, x: (lambda a, b: a * b)(*x.chunk(2, -1)),
    "transposed": lambda p, x: x.t() * x.t(),
    "expanded": lambda p, x: x[:1].expand(5, WIDTH) * x[:1].expand(5, WIDTH),
    "strided": lambda p, x: x[::2] * x[1:4],
    "permuted": lambda p, x: (lambda y: y * y)(x.reshape(5, 2, 4).permute(2, 0, 1)),
    # 8 elements over 8 places, of which two are empty: a copy with these strides would write places twice
    "overlapping": lambda p, x: (lambda y: y * y)(x.as_strided((2, 2, 2), (1, 1, 5))) + x[:1].exp().sum(),
    "part of a storage": lambda p, x: (x[2:3] * x[3:4]).exp()[:0] + x[2:3] * x[3:4],
    "saved outputs": lambda p, x: x.softmax(-1).exp(),
    "dropout": lambda p, x: F.dropout(x, 0.5),
    "where": lambda p, x: torch.where(x > 0, x, x.exp()),
    "indices": lambda p, x: x[p.ids] * 2.5,
    "embedding": lambda p, x: p.embedding(p.ids.clone()) + x[:3],
    "sparse gradients": lambda p, x: p.sparse(p.ids.clone()) * x[:3],
    "complex": lambda p, x: torch.fft.fft(x @ p.weight).abs(),
    "conjugate": conjugate,
    "float64": lambda p, x: (x.double() ** 2).float(),
    "bfloat16": lambda p, x: ((x @ p.weight).bfloat16() ** 2).float(),
    "no elements": lambda p, x: (x[:0] ** 2).sum() + x,
    "batch norm": lambda p, x: p.batch_norm(x),
    "layer norm": lambda p, x: p.layer_norm(x),
    "conv": lambda p, x: p.conv(x[:3][None]),
    "lstm": lambda p, x: p.lstm(x[None])[0],
    "encoder layer": lambda p, x: p.layer(x[None]),
    "attention": attention,
    "attribute of a ctx": lambda p, x: InCtx.apply(x),
    "save_for_backward": lambda p, x: SavesBoth.apply(x),
    "checkpoint": lambda p, x: checkpoint(lambda y: (y @ p.weight).exp(), x, use_reentrant=False) * x,
    "reentrant checkpoint": lambda p, x: checkpoint(lambda y: (y @ p.weight).exp(), x, use_reentrant=True) + x,
    "differentiates": inner_gradient,
    "hooks of its own": own_hooks,
    "vmap": lambda p, x: torch.vmap(lambda row: (row**2).sum())(x),
    "view of a buffer": lambda p, x: p.large[3:8, 2:10] * x,
    "detached parameter": lambda p, x: x @ p.weight.detach() @ p.weight.t().detach(),
    "torch.compile": compiled,
    "jagged": jagged,
    "storage of odd size": odd_bytes,
}


@dataclass
class Plain:
    """Plain autograd, and the storages that it saves of tensors that are not among ``stays``."""

    stays: set[int] = field(default_factory=set)
    saved: dict[int, Tensor] = field(default_factory=dict)

    def saving(self) -> Any:
        def note(tensor: Tensor) -> Tensor:
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if tensor.is_nested else [tensor]
            for part in parts:
                owner = getattr(part, "_base", None)
                is_own = not isinstance(owner if part._is_view() else part, nn.Parameter)
                if is_own and not (tensor.is_nested and part.dtype is torch.int64) and part.nbytes:
                    self.saved |= {storage_id(part): part}
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


def ran(kind: Kind, hooks: Offloaded | Plain) -> list[Tensor | None]:
    """The output, and all gradients; a storage that leaves is overwritten while it is away."""
    torch.manual_seed(0)
    parts = Parts()
    hooks.stays = storages([*parts.parameters(), *parts.buffers()])
    leaf = torch.randn(5, WIDTH, requires_grad=True)
    x = leaf * 1.0
    with hooks.saving():
        out = kind(parts, x)
    result = out.detach().clone()
    if isinstance(hooks, Offloaded):
        hooks.leave()
        away = [memory.source.untyped_storage() for memory in hooks._memories if memory.source is not None]
        hooks.release()
        for storage in away:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
        hooks.fetch()
        hooks.arrive()
    out.sum().backward()
    gradients = [parameter.grad for parameter in parts.parameters()]
    return [result, leaf.grad, *(g.to_dense() if g is not None and g.is_sparse else g for g in gradients)]


STAY = {"attribute of a ctx", "hooks of its own"}  # hooks do not see them
STAY |= {"indices", "no elements", "view of a buffer", "detached parameter"}


@pytest.mark.parametrize("name", KINDS)
def test_gradients_have_the_bits_of_plain_autograd(name: str, moved: list[Left]) -> None:
    offloaded, plain = new(), Plain()
    offloaded.copies.page = 64  # a storage lies in several pages
    for got, wanted in zip(ran(KINDS[name], offloaded), ran(KINDS[name], plain), strict=True):
        assert_same(got, wanted, name)
    ((_, count, _),) = moved
    assert count == len(set(plain.saved).difference(plain.stays)) - (
        name == "conjugate"
    )  # which stays with its storage
    assert (count == 0) == (name in STAY)


@pytest.fixture
def moved() -> Iterator[list[Left]]:
    """Of each forward, what leaves."""
    with leaving() as left:
        yield left


def new(*stays: Tensor, copies: HostCopies | None = None) -> Offloaded:
    return Offloaded(copies or HostCopies(CPU), storages(stays), "amid")


def there_and_back(offloaded: Offloaded) -> None:
    for move in (offloaded.leave, offloaded.release, offloaded.fetch, offloaded.arrive):
        move()


def leaf() -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()


# --- saved tensors that are written ---

WRITTEN = "modified by an inplace operation"


def exp_squared(offloaded: Offloaded) -> tuple[Tensor, Tensor, Tensor]:
    """A leaf, its exponential, which is saved, and the result."""
    x = leaf()
    with offloaded.saving():
        y = x.exp()
        return x, y, y * y


@pytest.mark.parametrize("when", ["before the copy", "while it may run"])
def test_a_write_before_the_memory_is_free_raises_what_plain_autograd_raises(when: str) -> None:
    _, y, z = exp_squared(offloaded := new())
    if when == "before the copy":
        y.detach().add_(1)
        offloaded.leave()
    else:
        offloaded.leave()
        y.detach().add_(1)
    for move in (offloaded.release, offloaded.fetch, offloaded.arrive):
        move()
    with pytest.raises(
        RuntimeError, match=WRITTEN + r": a tensor of shape \[5, 8\] is at version 1; expected version 0"
    ):
        z.sum().backward()


def test_a_write_after_that_is_none_as_the_host_has_the_values_that_were_saved() -> None:
    x, y, z = exp_squared(offloaded := new())
    wanted = 2 * y.detach() ** 2  # (exp(x)²)'
    offloaded.leave()
    offloaded.release()
    y.detach().zero_()
    offloaded.fetch()
    offloaded.arrive()
    z.sum().backward()
    torch.testing.assert_close(x.grad, wanted)


def test_a_write_to_a_nested_tensor_raises() -> None:
    x = leaf()
    with (offloaded := new()).saving():
        nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged).exp()
        z = (nested * nested).values()
    nested.detach().add_(1)
    there_and_back(offloaded)
    with pytest.raises(RuntimeError, match=WRITTEN):
        z.sum().backward()


class WritesInBackward(torch.autograd.Function):
    """Writes what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            return gradient * x.add_(1)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_backward_that_writes_what_another_needs_raises(leaves: bool) -> None:
    x = leaf() * 1.0
    with (offloaded := new()).saving() if leaves else contextlib.nullcontext():
        y = x * 2
        square = y * y
        z = WritesInBackward.apply(y) + square  # made last, runs back first
    if leaves:
        there_and_back(offloaded)
    with pytest.raises(RuntimeError, match=WRITTEN):
        z.sum().backward()


# --- what stays, and what it costs ---


def test_memory_that_its_owner_has_freed_is_not_copied(moved: list[Left]) -> None:
    """FSDP2 frees a whole parameter after F, and makes it anew before B."""
    x, whole = leaf(), torch.randn(WIDTH, WIDTH)
    numbers, bytes_ = whole.clone(), whole.untyped_storage().nbytes()
    with (offloaded := new()).saving():
        z = (x * 1.0).exp() @ whole
    whole.untyped_storage().resize_(0)
    offloaded.leave()
    offloaded.release()
    whole.untyped_storage().resize_(bytes_)
    whole.data.copy_(numbers)
    offloaded.fetch()
    offloaded.arrive()
    z.sum().backward()
    plain = leaf()
    ((plain * 1.0).exp() @ numbers).sum().backward()
    assert_same(x.grad, plain.grad, "gradient")
    assert moved == [(1, 1, 5 * WIDTH * 4)], "the exponential, and not the parameter"


def test_views_of_a_parameter_in_no_list_stay(moved: list[Left]) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    with (offloaded := new()).saving():
        (leaf() @ weight.t() @ weight[:, :WIDTH]).sum().backward()
    offloaded.leave()
    assert moved == [(2, 2, 2 * 5 * WIDTH * 4)], "the two inputs of matmul"


def test_a_storage_leaves_once_and_only_the_part_in_use(moved: list[Left]) -> None:
    big = torch.randn(10_000, WIDTH).requires_grad_() * 1.0
    with (offloaded := new()).saving():
        z = big[100:104] * big[102:106] * big[104:112:2]
    there_and_back(offloaded)
    z.sum().backward()
    # Rows 100 to 110; from a multiple of 512 bytes on. Row 100 begins at 3200; 3072 is the multiple. And a product.
    assert moved == [(4, 2, 111 * WIDTH * 4 - 3072 + 4 * WIDTH * 4)]


def test_small_storages_stay(moved: list[Left]) -> None:
    """A small view leaves with its storage: else it would keep all of it."""
    copies = HostCopies(CPU)
    copies.least = 1024
    with (offloaded := new(copies=copies)).saving():
        x = leaf() * 1.0
        first = x * x  # 160 bytes
        y = torch.randn(100, WIDTH).requires_grad_() * 1.0
        second = (y[:1] * y[:1]).sum() + (y * y).sum()
    there_and_back(offloaded)
    (first.sum() + second).backward()
    assert moved == [(4, 1, 100 * WIDTH * 4)]


def test_all_memory_is_free_after_o_and_after_b() -> None:
    """No cycle holds anything until the collector comes: reference counts alone free it."""
    gc.collect()
    gc.disable()
    try:
        x = leaf()
        with (offloaded := new()).saving():
            y = (x * 1.0).exp()
            z = SavesBoth.apply(y.softmax(-1))
        saved, objects = weakref.ref(y), [weakref.ref(offloaded), weakref.ref(z.grad_fn)]
        del y
        offloaded.leave()
        offloaded.release()
        assert saved() is None
        offloaded.fetch()
        there = [weakref.ref(memory.there) for memory in offloaded._memories]
        assert len(there) == 3  # the exponential, softmax, and its exponential
        offloaded.arrive()
        z.sum().backward()
        assert not any(ref() for ref in there)
        del z, offloaded
        assert not any(ref() for ref in objects)
    finally:
        gc.enable()


def test_a_forward_that_fails_leaves_no_cycle() -> None:
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError), (offloaded := new()).saving():
            y = (leaf() * 1.0).exp().softmax(-1)
            raise ZeroDivisionError
        gone = [weakref.ref(offloaded), weakref.ref(y)]
        del y, offloaded
        assert not any(ref() for ref in gone)
    finally:
        gc.enable()


def test_a_saved_tensor_may_be_asked_for_twice() -> None:
    x, _, z = exp_squared(offloaded := new())
    there_and_back(offloaded)
    z.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    z.sum().backward()
    assert_same(x.grad, first, "second pass")


def test_pages_are_used_again_and_never_more_than_were_in_use_at_once(
    moved: list[Left], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths vary, and three micro-batches are in flight."""
    copies, taken = HostCopies(CPU), list[int]()
    copies.page = 4096
    draw, empty = random.Random(0), torch.empty

    def made(size: int, **options: Any) -> Tensor:
        if "pin_memory" in options:
            taken.append(size)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", made)
    flying, most = list[Offloaded](), 0
    lengths = [draw.randint(1, 500) for _ in range(100)]
    for number, rows in enumerate(lengths * 2):
        if number == 100:
            before = len(taken)
        x = torch.randn(rows, WIDTH).requires_grad_() * 1.0
        with (offloaded := new(copies=copies)).saving():
            x * x
        offloaded.leave()
        flying.append(offloaded)
        most = max(most, sum(left.bytes for left in moved[-len(flying) :]))
        if len(flying) == 3:
            flying.pop(0).arrive()
    assert len(taken) == before, "the same lengths again take none"
    # Beside whole pages, each micro-batch in flight has a last page. It is a power of two: together below 2 × 4096.
    assert sum(taken) <= most + 3 * 2 * 4096


# --- whole steps ---


class Fails(nn.Linear):
    """Fails in its fourth call."""

    def __init__(self, calls: int = 0) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4:
            raise ZeroDivisionError
        return super().forward(x).exp().softmax(-1)


def squares(y: Tensor, h: Tensor) -> Tensor:
    return F.mse_loss(h, y)


def three(make: Callable[[], Any], schedule: Any, **options: Any) -> fxpipe.ForwardBackward:
    """A linear stage, a stage that ``make`` makes, and a loss."""
    torch.manual_seed(0)
    stages = {"first": nn.Linear(WIDTH, WIDTH), "amid": make(), "last": squares}
    graph = StageGraph.from_callables(stages, [("first", "amid"), ("amid", "last")], {"first": ["x"], "last": ["y"]})
    return fxpipe.compile(graph, Topology([("pipe", 3)]), microbatches=8, schedule=schedule, **options)


BATCH = [torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(2)]


def gradients(forward_backward: fxpipe.ForwardBackward) -> list[Tensor]:
    forward_backward.zero_grad()
    loss = forward_backward(*BATCH)
    return [loss, *gradients_of(forward_backward.named_parameters()).values()]


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "zb_h1"])
def test_a_step_that_failed_is_repeated_with_equal_bits_and_holds_nothing(family: str) -> None:
    forward_backward = three(Fails, Offloading(family))
    left = list[weakref.ref[Any]]()
    plain = Offloaded.leave

    def leave(self: Offloaded, mark: Any) -> None:
        plain(self, mark)
        left.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offloaded, "leave", leave)
        with pytest.raises(ZeroDivisionError):
            forward_backward(*BATCH)
    gc.collect()  # the error's frames
    assert len(left) > 3
    assert not any(ref() for ref in left)
    for got, wanted in zip(gradients(forward_backward), gradients(three(partial(Fails, 4), family)), strict=True):
        assert_same(got, wanted, family)


def test_a_timeline_has_the_copies_of_a_step() -> None:
    forward_backward = three(partial(nn.Linear, WIDTH, WIDTH), Offloading("1f1b"))
    forward_backward.record_timeline()
    gradients(forward_backward)
    timeline = forward_backward.timeline()
    offloaded = [action for action in timeline.spans if action.kind.letter == "O"]
    assert len(offloaded) == 3 * 8
    spans = {str(action): span for action, span in timeline.spans.items()}
    assert len(timeline.copies) == 2 * len(offloaded)
    for copy in timeline.copies:  # on the CPU the host copies, while the action that began the copy runs
        assert copy.rank == timeline.schedule.rank(copy.action)
        assert spans[str(copy.action)].start <= copy.start <= copy.end <= spans[str(copy.action)].end
    said = r"copies of all ranks: \S+ ms to the host, \S+ ms from the host; the ranks waited for them 0 ms"
    assert re.search(said, str(timeline))


def test_the_batch_and_parameters_stay(moved: list[Left]) -> None:
    forward_backward = three(partial(nn.Linear, WIDTH, WIDTH), Offloading("gpipe"))
    forward_backward(*BATCH)
    rows = 2 * WIDTH * 4
    # Of first nothing, of amid its input, of the loss its input, and not the target.
    assert sorted(moved) == 8 * [(0, 0, 0)] + 16 * [(1, 1, rows)]


class Saves(nn.Linear):
    """Saves its output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp()


class WritesTheLast(Saves):
    """Writes the output of its last call, which autograd has saved."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None:
            self.last.mul_(2)
        y = super().forward(x)
        self.last = y.detach()
        return y


def on_one_rank(make: Callable[[], nn.Module], cells: str) -> list[Tensor]:
    """Loss and gradients of two stages on a rank."""
    torch.manual_seed(0)
    stages = {"first": make(), "last": lambda y, h: h.sum()}  # which saves nothing
    graph = StageGraph.from_callables(stages, [("first", "last")], {"first": ["x"], "last": ["y"]})
    row = tuple(map(Action.parse, cells.split()))
    table = Schedule((row,), edges=((0, 1),), placement=(0, 0), backward=(True, True), microbatches=2)
    return gradients(fxpipe.compile(graph, Topology([("pipe", 1)]), microbatches=2, schedule=table))


class TwoLinear(nn.Module):
    """Two stages on a rank. W of the first needs an input, and the gradients of two results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(x)))
        return fxpipe.stage_boundary(h, name="last").square().sum()


def in_halves(cells: str, **options: Any) -> list[Tensor]:
    """Loss and gradients of two micro-batches of 8 rows."""
    torch.manual_seed(0)
    row = tuple(map(Action.parse, cells.split()))
    table = Schedule((row,), edges=((0, 1),), placement=(0, 0), backward=(True, True), microbatches=2)
    topology = Topology([("pipe", 1)])
    step = fxpipe.compile(TwoLinear(), topology, microbatches=2, schedule=table, tracer="symbolic", **options)
    loss = step(BATCH[0])
    return [loss, *gradients_of(step.named_parameters()).values()]


PLAIN = "0F0 1F0 0F1 1F1 1I0 1W0 0I0 1I1 1W1 0I1 0W0 0W1"
FROM_I_TO_W = "0F0 1F0 0F1 1F1 1I0 1W0 0I0 0O0 1I1 1W1 0I1 0O1 0P0 0W0 0P1 0W1"
FROM_F_AS_WELL = "0F0 1F0 0O0 0F1 1F1 1I0 1W0 0P0 0I0 0O0 1I1 1W1 0I1 0P0 0W0 0W1"


@pytest.fixture
def overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of each tensor that leaves is overwritten at O."""
    plain = Offloaded.release

    def release(self: Offloaded) -> None:
        away = [memory.source.untyped_storage() for memory in self._memories if memory.source is not None]
        plain(self)
        for storage in away:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)

    monkeypatch.setattr(Offloaded, "release", release)


ROWS = 8 * WIDTH * 4  # bytes of a tensor of a micro-batch


@pytest.mark.usefixtures("overwritten")
@pytest.mark.parametrize(
    ("cells", "leaves"),
    [
        (FROM_I_TO_W, [(3, 3, 3 * ROWS)] * 2),
        (FROM_F_AS_WELL, [(2, 2, 2 * ROWS), (3, 3, 3 * ROWS)]),  # gelu's input and output; the batch stays
    ],
)
def test_what_w_needs_leaves_after_i_and_no_bit_changes(cells: str, leaves: Any, moved: list[Left]) -> None:
    for got, wanted in zip(in_halves(cells), in_halves(PLAIN), strict=True):
        assert_same(got, wanted, cells)
    assert moved == leaves


@pytest.mark.usefixtures("overwritten")
@pytest.mark.parametrize("cells", [FROM_I_TO_W, FROM_F_AS_WELL])
def test_what_w_of_a_compiled_stage_needs_leaves_after_i(cells: str, moved: list[Left]) -> None:
    options = {"stage_compiler": lambda module: module}
    for got, wanted in zip(in_halves(cells, **options), in_halves(PLAIN, **options), strict=True):
        assert_same(got, wanted, cells)
    assert moved[-1].bytes >= 3 * ROWS


def test_a_write_after_i_to_what_w_needs_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it may be on its way to the host."""
    plain = Offloaded.leave_for_weights

    def leave(self: Offloaded, deferred: Any, mark: Any) -> None:
        seeds = list(deferred.pending)
        plain(self, deferred, mark)
        seeds[0].zero_()

    monkeypatch.setattr(Offloaded, "leave_for_weights", leave)
    with pytest.raises(RuntimeError, match=WRITTEN):
        in_halves(FROM_I_TO_W)


def test_a_forward_that_writes_activations_is_an_error_until_they_have_left() -> None:
    plain = "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"
    writes = partial(WritesTheLast, WIDTH, WIDTH)
    for cells in (plain, "0F0 1F0 0F1 0O0 1F1 1B0 0P0 0B0 1B1 0B1"):
        with pytest.raises(fxpipe.RunError, match="needs a tensor that was written in place since its forward"):
            on_one_rank(writes, cells)
    left = on_one_rank(writes, "0F0 1F0 0O0 0F1 1F1 1B0 0P0 0B0 1B1 0B1")
    for got, wanted in zip(left, on_one_rank(partial(Saves, WIDTH, WIDTH), plain), strict=True):
        assert_same(got, wanted, "the values that were saved")


def test_a_stage_that_uses_torch_func_is_an_error_of_its_first_forward() -> None:
    def amid(x: Tensor) -> Tensor:
        return x * torch.func.grad(lambda y: y.pow(3).sum())(x)

    told = "stage 'amid' cannot be offloaded: it differentiates with torch.func.*leave the stage out of offload="
    with pytest.raises(fxpipe.RunError, match=told) as caught:
        three(lambda: amid, Offloading("1f1b"))(*BATCH)
    assert "in the forward of stage 1 `amid`, micro-batch 0, step 0" in str(caught.value.__notes__)


def test_something_that_goes_back_through_activations_that_are_away_is_an_error() -> None:
    _, _, z = exp_squared(offloaded := new())
    offloaded.leave()
    offloaded.release()
    with pytest.raises(
        fxpipe.RunError, match=r"the activations of stage 'amid' are in the host's memory.*leave the stage out"
    ):
        z.sum().backward()


def test_evaluations_and_batches_of_other_sizes_leave_a_steps_bits_alone() -> None:
    seen = []
    for schedule in ("1f1b", Offloading("1f1b")):
        forward_backward = three(partial(Saves, WIDTH, WIDTH), schedule)
        seen.append([*gradients(forward_backward), forward_backward.evaluate(*BATCH)])
        for rows in (8, 11, 16):
            forward_backward.zero_grad()
            seen[-1].append(forward_backward(*(each[:rows] for each in BATCH)))
            seen[-1] += gradients_of(forward_backward.named_parameters()).values()
    for got, wanted in zip(*seen, strict=True):
        assert_same(got, wanted, "with offload")


def shards(offload: bool) -> list[Tensor]:
    """Output and local gradients of layers whose parameters and activations are DTensors."""
    fxpipe.init()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(1)]).requires_grad_()
    weight = nn.Parameter(weight.detach())
    x = distribute_tensor(leaf().detach(), mesh, [Replicate()]).requires_grad_()
    offloaded = new(weight)
    with offloaded.saving() if offload else contextlib.nullcontext(), leaving() as left:
        z = (x @ weight).exp().softmax(-1) * 2.0
        z = z * z
        if offload:
            for move in (offloaded.leave, offloaded.release, offloaded.fetch, offloaded.arrive):
                move()
            assert left[0].tensors > 2
            assert left[0].bytes < 5 * WIDTH * WIDTH * 4
    z.sum().backward()
    return [part.to_local() for part in (z.detach(), x.grad, weight.grad)]  # type: ignore[union-attr]


def test_dtensors_leave_by_their_parts(pool: Pool) -> None:
    for got, wanted in zip(*(pool.run(shards, offload, ranks=2) for offload in (True, False)), strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other, "a local part")
