"""Modules in which something depends on values where no tracer looks: each trains as in plain PyTorch, or is refused.

A ``Part`` hides one dependence: a size, a branch, a hook, a counter, a cache, a closure. It is called behind a
boundary, as a submodule or (``inline``) as a part of the model's own forward, and trained on values that the example
did not have.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import fxpipe
from fxpipe import FxpipeError, stage_boundary
from fxpipe.seeds import seed_of
from tests.harness import accumulate, assert_same, cut, gradients_of
from tests.models import WIDTH, Inputs, linear
from tests.pool import Pool
from tests.thinned import ALL, every

TRACERS = ("symbolic", "export", "record", "auto")
STEPS, MICROBATCHES, TOLERANCE = 3, 2, 1e-5
PARTS: dict[str, Callable[[], Part]] = {}


class Part(nn.Module):
    """Rows of ``h``, and a whole number from 1 to ``WIDTH`` for each of them, to as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.start()

    def start(self) -> None:
        """What the part holds beside its layer."""

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            PARTS[cls.__name__] = cls

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Model(nn.Module):
    def __init__(self, part: Part, inline: bool) -> None:
        super().__init__()
        self.a, self.part, self.b, self.inline = linear(), part, linear(), inline

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(self.a(x), name="hides")
        h = self.part.forward(h, ids) if self.inline else self.part(h, ids)
        return F.mse_loss(self.b(stage_boundary(h, name="last")), y)


# --- sizes ---


class Packed(Part):
    def start(self) -> None:
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        steps = h.unsqueeze(1).expand(-1, WIDTH, -1)
        packed = pack_padded_sequence(steps, ids, batch_first=True, enforce_sorted=False)
        return self.inner(h) + self.recurrent(packed)[1][0]


class Experts(Part):
    def start(self) -> None:
        self.experts = nn.ModuleList([linear() for _ in range(WIDTH)])

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        out = self.inner(h)
        for number in ids.unique():
            rows = (ids == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, self.experts[int(number) - 1](h[rows]))
        return out


# --- branches ---


class BranchOnAParameter(Part):
    def start(self) -> None:
        self.scale = nn.Parameter(torch.tensor(0.999))

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.inner(h) * (self.scale if self.scale > 1 else self.scale * 3)


class _Rare(nn.Module):
    """Its layer is left out on all numbers that are not far from those of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        if ids.max() > 3:
            h = self.layer(h)
        return h


class SkippedAsARule(Part):
    def start(self) -> None:
        self.skipped = _Rare()

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.skipped(self.inner(h), ids) * 2


class SkippedAndWritten(SkippedAsARule):
    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        h = self.inner(h) * 2
        self.skipped(h, ids).mul_(0.5)
        return h + 1


class WrittenOnlyIf(Part):
    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        h = self.inner(h).clone()
        if ids[0] > 2:
            h[0] = 0
        return h


# --- hooks ---


class ForwardHook(Part):
    def start(self) -> None:
        self.inner.register_forward_hook(lambda module, args, output: output * (2 if args[0].sum() > 0 else 1))

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.inner(h)


class TensorHook(Part):
    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        h = self.inner(h)
        if not isinstance(h, torch.fx.Proxy):
            h.register_hook(lambda gradient: gradient * ids.float().mean())
        return h


class ParameterHook(Part):
    def start(self) -> None:
        self.inner.weight.register_hook(lambda gradient: gradient * (2 if gradient.sum() > 0 else 1))

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.inner(h)


class BackwardHook(Part):
    def start(self) -> None:
        self.register_full_backward_hook(lambda module, given, got: (given[0] * (2 if got[0].sum() > 0 else 1), None))

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.inner(h)


# --- counters ---


class Counter(Part):
    def start(self) -> None:
        self.step = 0

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        self.step += 1
        return self.inner(h) * self.step


class _WarmUp(_Rare):
    calls = 0

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(h) if self.calls > 3 else h


class SkippedFirst(SkippedAsARule):
    def start(self) -> None:
        self.skipped = _WarmUp()


class CounterInABuffer(Part):
    def start(self) -> None:
        self.register_buffer("n", torch.zeros(()))

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        self.n += 1
        return self.inner(h) * self.n


calls = 0


class Global(Part):
    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        global calls
        calls += 1
        return self.inner(h) * calls


def _closure() -> Callable[[], int]:
    number = 0

    def call() -> int:
        nonlocal number
        number += 1
        return number

    return call


class Closure(Part):
    def start(self) -> None:
        self.number = _closure()

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.inner(h) * self.number()


# --- caches ---


class ByShape(Part):
    def start(self) -> None:
        self.cache: dict[Any, Tensor] = {}

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        key = tuple(h.shape)
        if key not in self.cache:
            self.cache[key] = h.detach().mean(0)
        return self.inner(h - self.cache[key])


class KeysAndValues(Part):
    def start(self) -> None:
        self.past = torch.zeros(4, WIDTH)

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        self.past = torch.cat([self.past, h.detach()])[-4:]
        return self.inner(h) + self.past.mean(0)


class DataDependentStart(Part):
    """As ActNorm does."""

    def start(self) -> None:
        self.register_buffer("initialised", torch.tensor(False))
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        if not self.initialised:
            self.shift.copy_(h.detach().mean(0))
            self.initialised.fill_(True)
        return self.inner(h - self.shift)


# --- gradients ---


class _Scaled(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        _Scaled.calls += 1
        ctx.factor = _Scaled.calls
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor


class GradientInside(Part):
    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        energy = torch.tanh(self.inner(h)).square().sum()
        (force,) = torch.autograd.grad(energy, h, create_graph=True)
        return h + force


# --- forwards of one line, of a part that holds its layer alone ---

FORWARDS: dict[str, Callable[[Part, Tensor, Tensor], Any]] = {
    "SelectedRows": lambda part, h, ids: h + part.inner(h)[ids == 3].sum(0),
    "Branch": lambda part, h, ids: part.inner(h) if h.sum() > 0 else h,
    "AsksForAType": lambda part, h, ids: part.inner(h) * 2 if isinstance(h, Tensor) else part.inner(h),
    "AsksForGradients": lambda part, h, ids: part.inner(h) * 2 if h.requires_grad is True else part.inner(h),
    "ThroughNumpy": lambda part, h, ids: part.inner(h) + torch.from_numpy(h.detach().numpy().cumsum(1)),
    "ThroughAList": lambda part, h, ids: part.inner(h) * torch.tensor(ids.tolist()).unsqueeze(1),
    "PythonsRandom": lambda part, h, ids: part.inner(h) * random.random(),
    "FunctionWithState": lambda part, h, ids: _Scaled.apply(part.inner(h)),
    "DetachedIf": lambda part, h, ids: part.inner(h.detach() if h.sum() > 0 else h),
}


class _OfOneLine(Part):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.body = FORWARDS[name]

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.body(self, h, ids)


PARTS |= {name: functools.partial(_OfOneLine, name) for name in FORWARDS}


# --- how they are run ---


def batch(step: int) -> Inputs:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, WIDTH, generator=generator) * (1 + step) + (-1) ** step
    ids = torch.randint(1, 3 + step, (8,), generator=generator)
    return {"x": x, "ids": ids, "y": torch.randn(8, WIDTH, generator=generator)}


def built(name: str, inline: bool) -> Model:
    """The model; and what it depends on beside itself as it is at the start."""
    global calls
    calls, _Scaled.calls = 0, 0
    random.seed(0)
    torch.manual_seed(0)
    return Model(PARTS[name](), inline)


Step = tuple[Tensor, dict[str, Tensor | None]]


@functools.cache
def plain(name: str, inline: bool = False) -> list[Step]:
    """The loss and the gradients of each step in plain PyTorch."""
    model = built(name, inline)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()

        def call(place: int, part: Inputs, step: int = step) -> Tensor:
            random.seed(seed_of(0, step, 1, place, 0))  # as stage 1 is, where its Python runs
            return model(**part)

        loss, _ = accumulate(call, cut(batch(step), MICROBATCHES))
        found.append((loss, gradients_of(model.named_parameters())))
        optimizer.step()
    return found


def trained(name: str, tracer: str, inline: bool = False) -> list[Step] | str:
    """The same with fxpipe on the engine that this process belongs to; or why it was refused."""
    model, found = built(name, inline), []
    topology = fxpipe.Topology([("pipe", 2)])
    try:
        forward_backward = fxpipe.compile(
            model, topology, microbatches=MICROBATCHES, tracer=tracer, example_kwargs=batch(0), placement=PLACEMENT
        )
        optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = forward_backward(**batch(step))
            found.append((loss, gradients_of(forward_backward.named_parameters())))
            optimizer.step()
    except FxpipeError as error:
        return str(error)
    return found


PLACEMENT = {"a": 0, "hides": 1, "last": 0}


def assert_right(got: list[Step], wanted: list[Step]) -> None:
    for step, ((loss, gradients), (wanted_loss, wanted_gradients)) in enumerate(zip(got, wanted, strict=True)):
        assert_same(loss, wanted_loss, f"the loss of step {step}", TOLERANCE)
        for name, gradient in gradients.items():
            assert_same(gradient, wanted_gradients[name], f"the gradient of {name} in step {step}", TOLERANCE)


@pytest.mark.parametrize(("name", "tracer"), every(4, list(itertools.product(PARTS, [*TRACERS, "record inline"]))))
def test_it_is_right_or_refused_on_one_process(name: str, tracer: str) -> None:
    inline = tracer.endswith("inline")
    got = trained(name, tracer.split()[0], inline)
    if isinstance(got, str):
        assert len(got) > 40, "a refusal tells why"
    else:
        assert_right(got, plain(name, inline))


def all_trained(tracer: str) -> dict[str, Any]:
    """Of a quarter: in several processes tracers see what they see in one."""
    return {name: trained(name, tracer) for name in every(4, list(PARTS))}


@pytest.mark.parametrize("tracer", TRACERS if ALL else ["auto"])  # which is any of them
def test_each_is_right_or_refused_on_two_processes(tracer: str, pool: Pool) -> None:
    for rank, outcomes in enumerate(pool.run(all_trained, tracer, ranks=2)):
        assert sum(not isinstance(got, str) for got in outcomes.values()) >= 5, "not everything is refused"
        for name, got in outcomes.items():
            if not isinstance(got, str):
                try:
                    assert_right(got, plain(name))
                except AssertionError as error:
                    raise AssertionError(f"{name} on rank {rank}: {error}") from error
