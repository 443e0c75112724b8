"""Small models: what a tracer captures gives plain PyTorch's outputs, gradients and buffers, to the last bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fxpipe import stage_boundary
from tests.capturing import assert_equal, assert_trains_alike, called, capture_by, staged
from tests.device import DEVICE
from tests.models import Layers

WIDTH = 6
Batch = dict[str, Any]


def random_of(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(seed: int) -> Batch:
    return {"x": random_of(4, WIDTH, seed=seed), "y": random_of(4, WIDTH, seed=seed + 10)}


class Two(Layers):
    """Two layers with something between them."""

    names, width = "a b", WIDTH

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(h).float(), y)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(stage_boundary(self.a(x)), y)


# --- writes, buffers, constants ---


class ShiftRight(nn.Module):
    """As Hugging Face's encoder-decoder models shift labels: in place, on views of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        h = stage_boundary(self.embed(input_ids) * attention_mask[..., None])
        shifted = labels.new_zeros(labels.shape)
        shifted[:, 1:] = labels[:, :-1].clone()
        shifted[:, 0] = 0
        shifted.masked_fill_(shifted == 7, 0)
        h = (h + self.embed(shifted)).transpose(0, 1)
        h[0].mul_(2)
        h[1:, 0, :2] += 1
        h = stage_boundary(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.t().reshape(-1))


def tokens(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(1, 50, (2, 7), generator=generator) for _ in range(2))
    return {"input_ids": ids, "attention_mask": (ids > 5).long(), "labels": labels}


class Buffers(Two):
    """Buffers that are set, written in place, and written by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("row", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(self.a(x))
        before = self.ema
        with torch.no_grad():
            self.ema = 0.9 * self.ema + 0.1 * h.mean(0)
            self.calls += 1
            self.row[1].add_(h.sum(0))
        h = h - self.ema + before
        return self.loss(h, y) * self.row[1].tanh().mean() + self.calls


class Constants(Two):
    def __init__(self) -> None:
        super().__init__()
        self.unregistered = torch.linspace(0, 1, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.others = [torch.ones(WIDTH), self.scale]
        self.ready = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.ready = True  # in the first call alone
        h = self.a(x) * self.unregistered + torch.tensor([1.0] * WIDTH)
        h[:, 0] = 3.0
        return self.loss(stage_boundary(h) * self.others[1] + self.others[0], y)


class InPlaceBehind(Two):
    """What crosses a boundary is made by a batch norm, and written behind it; another is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.twice = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.relu(stage_boundary(self.norm(self.a(x))))
        h = stage_boundary(self.twice(self.twice(h).tanh()))
        return self.loss(h.mul(2).tanh_(), y)


class WritesInput(Two):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.a(x)
        loss = self.loss(stage_boundary(h), y.mul_(2)[1:].add_(1).new_ones(4, 1) * y)
        return loss, x, self.b.bias


# --- modes and random numbers ---


class Modes(Two):
    """Boundaries inside autocast regions, one nested in another, and values without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            h = stage_boundary(F.linear(x, self.a.weight) @ self.a.weight, name="inside")
            h = self.b(h)
            with torch.autocast(DEVICE, enabled=False):
                h = stage_boundary(h.float() @ self.c.weight, name="nested")
                h = h @ self.c.weight
            h = h.matmul(h.mT).sum(0)
        with torch.no_grad():
            frozen = self.c(x)
        return h.float().sum() + frozen.sum() * 2 + y.sum()


class Noisy(Two):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(F.dropout(self.a(x), 0.5, self.training))
        h = h + torch.randn(WIDTH) + torch.rand_like(x)
        attended = F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3)[0]
        return self.loss(attended, y)


# --- what goes in and comes out ---


class Keywords(Two):
    def forward(
        self, x: Tensor, *, y: Tensor, scale: float, count: int = 2, mask: Tensor | None = None, square: bool = False
    ) -> dict[str, Any]:
        h = self.a(x) * scale
        for _ in range(count):
            h = h.tanh()
        h = stage_boundary(h if mask is None else h * mask)
        loss = self.loss(h.square() if square else h, y)
        return {"loss": loss, "parts": [loss.detach() * 2, None, ("mean", {"h": h})], "count": count, "scale": scale}


def keywords(seed: int) -> Batch:
    return {**vectors(seed), "scale": 0.5, "mask": None, "square": True}


class Point(NamedTuple):
    x: Tensor
    rest: list[Tensor]


class Containers(Two):
    def forward(self, inputs: Mapping[str, Any], point: Point) -> tuple[Any, ...]:
        h = stage_boundary({"h": self.a(inputs["x"]), "n": 1, "rest": [point.rest[0]]})
        loss = self.loss(h["h"] + h["rest"][0], inputs["deep"]["y"]) * h["n"]
        low, high = h["h"].chunk(2, -1)
        return loss, Point(low, [point.x]), {"best": high.max(-1), "turned": [high.T, None, 3]}


def containers(seed: int) -> Batch:
    x, y = vectors(seed).values()
    return {"inputs": {"x": x, "deep": {"y": y}}, "point": Point(y[:, 0], [x * 2])}


@torch.library.custom_op("fxpipe_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return 3 * x


thrice.register_fake(torch.empty_like)
thrice.register_autograd(lambda ctx, gradient: 3 * gradient)


@torch.library.custom_op("fxpipe_tests::increase", mutates_args=("x",))
def increase(x: Tensor) -> None:
    x.add_(1)


class OwnOperators(Two):
    """Operators of the user's own, one of which writes and returns nothing; and writes through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(thrice(self.a(x)))
        increase(self.calls)
        torch._foreach_add_([self.calls], 1.0)
        h.data.mul_(2)
        return self.loss(h * self.calls, y)


# --- submodules that the record tracer calls as they are ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x)).relu_()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(self.first(x))
        return self.second(h * self.scale.exp()) * 2 - y


class Straight(torch.autograd.Function):
    """Rounds forward, and passes ten times the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        return (x * scale).round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * 10 + x, None


class Rounded(Two):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(Straight.apply(self.a(x), 3.0))
        return Straight.apply(self.b(h), 2.0) - y  # type: ignore[no-any-return]


class Halved(torch.autograd.Function):
    """Returns its arguments, a parameter among them, and halves their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(gradient / 2 for gradient in gradients)


class GivesWeight(Two):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, weight = Halved.apply(self.a(x), self.b.weight)
        return torch.tanh(stage_boundary(h @ weight) @ weight) - y


class Checkpointing(nn.Module):
    """Checkpoints functions: a submodule, a closure over a value, one in a submodule, one inside of another."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b = Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        self.c, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((), 2.0))
        self.reentrant = reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(checkpoint(self.a, x.requires_grad_(), use_reentrant=self.reentrant))
        skip = h * 3

        def inner(h: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(DEVICE, torch.bfloat16):
                y = self.b(h) * self.scale
            return y.float() + (0 if self.reentrant else skip), torch.tanh(y)

        def outer(h: Tensor) -> Tensor:
            return checkpoint(self.c, h, use_reentrant=self.reentrant).exp()

        h, z = checkpoint(inner, h, use_reentrant=self.reentrant)
        return checkpoint(outer, h, use_reentrant=self.reentrant) + z.float() - y  # type: ignore[no-any-return]


class Branching(nn.Module):
    """Control flow on values, a size that depends on values in between, a write into a buffer, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        h = self.inner(x) if x.sum() > 0 else self.other(x)
        return h + h[(y > 0).all(-1)].sum() + torch.rand(()), x


class Experts(Two):
    def __init__(self) -> None:
        super().__init__()
        self.branch = Branching()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, _ = self.branch(self.a(x), y)
        return self.b(stage_boundary(h))  # type: ignore[no-any-return]


class Storing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, store: list[Tensor] | None = None) -> Tensor:
        h = self.inner(x)
        if store is not None:
            store.append(h)
        return h.relu()


class Collected(nn.Module):
    """Reads what a submodule has put aside, and a parameter of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Storing(), Storing()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        store: list[Tensor] = []
        h = stage_boundary(self.a(x, store))
        return self.b(h) @ self.a.inner.weight + store[0] - y


class Swapped(Two):
    """Calls a submodule with the parameters of another one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x) + functional_call(self.a, dict(self.b.named_parameters()), (x,))
        return self.loss(stage_boundary(h), y)


class Evaluating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.part.eval()
        h = F.dropout(self.part(x), 0.5, self.part.training)
        self.part.train()
        return h


class SetsInside(Two):
    """A submodule sets, in every step, an attribute of a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sets = Evaluating()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(stage_boundary(self.sets(self.a(x))), y)


@torch.library.custom_op("fxpipe_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x.numpy(force=True).__mul__(2).sum() * torch.ones(WIDTH, device=x.device)


class Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return without_fake(x.detach())


class Foreign(Two):
    """A kernel that nothing but real memory will do for: it runs on made-up numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Kernel()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        return self.loss(stage_boundary(h) + self.kernel(h), y)


class Doubled(Storing):
    """As Hugging Face's layers: a ``__call__`` of its own class."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


class Odd(nn.Module):
    """Writes that nothing reads, an operator for each way to write one, a submodule under two names, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.norm = Doubled(), nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.again = self.own
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
        self.compiled = torch.compile(layers, backend="eager")
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        unused = torch.zeros(8)
        unused[0] = 1
        unused.add_(2)
        h = stage_boundary(self.again(self.own(x)) + self.norm(y))
        h = 2 - (2 ** h.tanh()) + (1 / (h.abs() + 1)) - (h.detach() // 2) % 3 + (-h) * abs(h)
        h = h * ((h > 0) & (h < 1) | ~(h > 2)) + h.topk(2).values.sum() + h.sort()[0]
        h = self.spectral(torch.stack([row * place for place, row in enumerate(h)]))
        low, high = reversed(self.compiled(h).split(4, 1))
        h = torch.cat([low, high.T.mT.T.double().to(h).type_as(h)], 1) @ self.own.inner.weight.T.contiguous()
        h = h * self.scale[0] + torch.arange(WIDTH) + torch.tensor([1.0] * WIDTH) + h.new_ones(WIDTH)
        return torch.einsum("bi,ij->bj", torch.where(h > 0, h, 0.0), self.own.inner.weight)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()
        self.calls: list[str] = []
        self.b.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.b.inner.register_forward_hook(lambda module, args, output: self.calls.append("forward"))
        self.b.register_full_backward_hook(lambda module, inputs, outputs: self.calls.append("backward"))
        self.b.inner.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(stage_boundary(self.a(x))) - y  # type: ignore[no-any-return]


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random())


class Previous(nn.Module):
    """Reads what it was given in the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.previous: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        previous, self.previous = self.previous, x.detach()
        return torch.zeros(x.shape) if previous is None else previous


class InTwoStages(Two):
    """Two stages use the result of a submodule, which runs once."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.part(x * 2)
        return self.loss(stage_boundary(self.a(z)), y) + z.sum()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """``batch``: seed → inputs. ``whole``: the submodules and functions that record calls as they are, if told."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch] = vectors
    stages: int = 2
    tracers: Sequence[str] = ("export", "record")
    whole: Sequence[str] | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()


RECORD = ("record",)
CHECKPOINTS = ["checkpoint_0", "checkpoint_1", "checkpoint_3"]
CASES = {
    "writes to views": Case(ShiftRight, tokens, 3),
    "buffers": Case(Buffers),
    "constants": Case(Constants),
    "written behind a boundary": Case(InPlaceBehind, stages=3),
    "inputs written and returned": Case(WritesInput),
    "modes": Case(Modes, stages=3),
    "random": Case(Noisy),
    "keywords, none, scalars": Case(Keywords, keywords),
    "containers": Case(Containers, containers, 3),
    "operators of the user's": Case(OwnOperators),
    "submodules": Case(Residual, whole=["first", "second"]),
    "an autograd function": Case(Rounded, tracers=RECORD, whole=["a", "Straight_0", "b", "Straight_1"]),
    "a parameter that an autograd function returns": Case(GivesWeight, tracers=RECORD, whole=["a", "Halved_0"]),
    "checkpoints": Case(lambda: Checkpointing(False), tracers=RECORD, whole=CHECKPOINTS),
    "reentrant checkpoints": Case(lambda: Checkpointing(True), tracers=RECORD, whole=CHECKPOINTS),
    "branches inside": Case(Experts, tracers=RECORD, whole=["a", "branch", "b"]),
    "a value by a side way": Case(Collected, whole=["a.inner", "b"]),
    "parameters of another": Case(Swapped, whole=["a", "b"]),
    "attributes set inside": Case(SetsInside, tracers=RECORD, whole=["a", "sets", "b"]),
    "no fake kernel": Case(Foreign, tracers=RECORD, whole=["a", "kernel", "b"]),
    "hooks": Case(Hooked, tracers=RECORD),
    "random numbers of Python's inside": Case(lambda: InTwoStages(Noise()), tracers=RECORD),
    "an attribute of the step before": Case(lambda: InTwoStages(Previous()), tracers=RECORD),
    "whatever way": Case(Odd, tracers=RECORD, whole=["own", "own", "norm", "spectral", "compiled"]),
}


TRACED = [(name, tracer) for name, case in CASES.items() for tracer in case.tracers]


@pytest.mark.parametrize(("name", "tracer"), TRACED)
def test_stages_equal_eager_to_the_last_bit(name: str, tracer: str) -> None:
    case = CASES[name]
    model, plain = case.model(), case.model()
    returns_loss = isinstance(case.model()(**case.batch(0)), Tensor)  # or all that it returns is compared
    state, drawn, attributes = copy.deepcopy(model.state_dict()), torch.get_rng_state(), dict(vars(model))
    program = capture_by(tracer, model, case.batch(0), training=returns_loss)
    assert_equal(dict(model.state_dict()), dict(state))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert vars(model) == attributes
    if tracer == "record" and case.whole is not None:
        assert called(program) == case.whole
    graph = staged(program)
    assert len(graph) == case.stages
    for seed in range(2):
        assert_trains_alike(graph, model, plain, case.batch(seed))
