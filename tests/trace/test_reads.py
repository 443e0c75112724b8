"""What of a model's Python changes between steps counts from then on, as in plain PyTorch, whatever has captured it."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxpipe
from fxpipe.capture import auto_opaque
from fxpipe.errors import RunError
from fxpipe.graph.program import Program
from fxpipe.trace.reads import MOST, Reads, noting
from fxpipe.trace.request import Request
from tests.harness import assert_same, current_seat, strict
from tests.thinned import every, in_turn

TRACERS = ["symbolic", "export", "record"]


class Schedule:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.weight, self.rate, self.power, self.tensor = 1.0, [1.0], 1, torch.ones(())

    @property
    def doubled(self) -> float:
        return self.rate[0] * 2

    def __call__(self) -> float:
        return 2.0**self.power


@dataclass(slots=True)
class Slotted:
    """Settings in slots, as each class of attrs has them."""

    scale: float = 1.0


class Attributes(dict[str, Any]):
    """A mapping whose attributes are its items, so that to ask for one that it lacks is a KeyError."""

    __getattr__ = dict.__getitem__

    def __deepcopy__(self, memo: Any) -> Attributes:
        return Attributes(self)


class Unsized(tuple[float, ...]):
    """A sequence that has no length, as e3nn's representations have none."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


class Model(nn.Module):
    """It reads numbers, flags, containers, objects of settings, and objects of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.norm, self.above = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.dropout, self.act = nn.Dropout(0.0), nn.ReLU()
        self.beta, self.halved, self.weights, self.settings = 1.0, False, {"loss": [1.0]}, SimpleNamespace(shift=0.0)
        self.schedule, self.named, self.unsized = Schedule(), Attributes(bias=0.0), Unsized((1.0,))
        self.slotted, self.array = [Slotted()], np.ones(3)
        self.seen = 0

    def factor(self) -> Any:
        schedule = self.schedule
        own = schedule.weight * schedule.doubled * schedule() * schedule.tensor
        return own * self.slotted[0].scale * float(self.array[1])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.act(self.norm(self.below(x))))
        loss = F.cross_entropy(self.above(self.dropout(h)), y) * self.beta * self.weights["loss"][0]
        return (loss * 0.5 if self.halved else loss) * self.factor() + self.settings.shift + self.named.bias


def compiled(tracer: Any = "symbolic", build: Callable[[], Any] = Model) -> tuple[Any, Any, fxpipe.ForwardBackward]:
    torch.manual_seed(0)
    plain = build()
    model, example = copy.deepcopy(plain), None if tracer == "symbolic" else batch(0)
    topology = fxpipe.Topology([("pipe", 2)])
    return plain, model, fxpipe.compile(model, topology, microbatches=2, tracer=tracer, example_args=example)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 3, generator=generator), torch.randint(3, (8,), generator=generator)


def step(plain: Model, x: Tensor, y: Tensor, train: bool = True) -> Tensor:
    losses = [plain(*part) / 2 for part in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses if train else ():
        loss.backward()
    return torch.stack([loss.detach() for loss in losses]).sum()


def another_forward(model: Model) -> None:
    inner = model.above.forward
    model.above.forward = lambda h: inner(h) * 2  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a number": lambda model: setattr(model, "beta", 0.3),
    "a flag": lambda model: setattr(model, "halved", True),
    "a number in containers": lambda model: model.weights["loss"].__setitem__(0, 0.2),
    "a number in an object of settings": lambda model: setattr(model.settings, "shift", 2.0),
    "an option of a layer": lambda model: setattr(model.norm, "eps", 0.5),
    "what a layer writes": lambda model: setattr(model.norm, "momentum", 0.5),
    "dropout": lambda model: setattr(model.dropout, "p", 1.0),
    "a layer without parameters": lambda model: setattr(model, "act", nn.Tanh()),
    "an attribute of an object": lambda model: setattr(model.schedule, "weight", 0.5),
    "what a property of an object reads": lambda model: model.schedule.rate.__setitem__(0, 0.5),
    "what an object reads when it is called": lambda model: setattr(model.schedule, "power", -1),
    "a tensor in an object": lambda model: setattr(model.schedule, "tensor", torch.tensor(0.5)),
    "an item that is an attribute": lambda model: model.named.update(bias=2.0),
    "the numbers of a tensor in an object": lambda model: model.schedule.tensor.fill_(0.5),
    "a hook of a layer": lambda model: model.above.register_forward_hook(lambda _, given, output: output * 2),
    "a hook of the model": lambda model: model.register_forward_hook(lambda _, given, output: output * 2),
    "a hook in front": lambda model: model.below.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
    "forward of a layer": another_forward,
    "a slot of an object in a list": lambda model: setattr(model.slotted[0], "scale", 0.5),
    "an item of an array": lambda model: model.array.__setitem__(1, 0.5),
}


@pytest.mark.parametrize(("tracer", "change"), in_turn(TRACERS, list(CHANGES)))
def test_what_changes_between_steps_counts_as_in_plain_pytorch(change: str, tracer: str) -> None:
    plain, model, forward_backward = compiled(tracer)
    for number in range(2):
        plain.zero_grad()
        forward_backward.zero_grad()
        assert torch.equal(forward_backward(*batch(number)), step(plain, *batch(number)))
        for part, plain_part in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(part.grad, plain_part.grad, change)
        for name, value in model.state_dict().items():
            assert_same(value, plain.state_dict()[name], name)
        with torch.no_grad():
            wanted = step(copy.deepcopy(plain).eval(), *batch(9), train=False)
        assert torch.equal(forward_backward.evaluate(*batch(9)), wanted)
        if number == 0:
            CHANGES[change](plain)
            CHANGES[change](model)


SCALES = {"of a global": 1.0, "of a helper": [1.0]}
SCALE = 1.0
SETTINGS = types.SimpleNamespace(scale=1.0, step=0, inner=types.SimpleNamespace(scale=1.0))


def helped() -> Any:
    return SCALES["of a helper"][0]  # type: ignore[index]


class OutsideOfIt(nn.Module):
    """It reads a global, a global dict, a helper function's list, and a global object's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(fxpipe.stage_boundary(self.below(x))) * SCALE * self.factor()

    def factor(self) -> Any:
        return SCALES["of a global"] * helped() * SETTINGS.scale * SETTINGS.inner.scale


@pytest.mark.parametrize("tracer", TRACERS)
def test_globals_and_closures_count_as_in_plain_pytorch(tracer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = 1.0
    helper: list[float] = [1.0]
    monkeypatch.setitem(SCALES, "of a helper", helper)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * weight

    (x, y), plain = batch(0), OutsideOfIt()
    example = {} if tracer == "symbolic" else {"example_args": (x,), "example_kwargs": {"target": y}}
    pipe, model = fxpipe.Topology([("pipe", 2)]), copy.deepcopy(plain)
    forward_backward = fxpipe.compile(model, pipe, microbatches=2, loss_fn=loss_fn, tracer=tracer, **example)
    losses = []
    for number in range(7):
        monkeypatch.setattr(SETTINGS, "scale", 5.0 if number == 5 else 1.0)
        monkeypatch.setattr(SETTINGS.inner, "scale", 6.0 if number == 6 else 1.0)
        monkeypatch.setattr(SETTINGS, "step", number)  # which forward does not read
        weight = 2.0 if number == 1 else 1.0
        monkeypatch.setitem(globals(), "SCALE", 2.0 if number == 2 else 1.0)
        monkeypatch.setitem(SCALES, "of a global", 3.0 if number == 3 else 1.0)
        helper[0] = 4.0 if number == 4 else 1.0
        losses.append(forward_backward(x, target=y))
        wanted = sum(loss_fn(plain(part), labels) / 2 for part, labels in zip(x.chunk(2), y.chunk(2), strict=True))
        assert_same(losses[-1], wanted, f"loss {number}")
    assert len(set(map(float, losses))) == 7
    assert len(forward_backward._steps.agreement.plans.captures.reads.states) == 7


class Scaled(Model):
    def factor(self) -> Any:
        return 2.0 * self.schedule.tensor


def test_numbers_that_a_symbolic_capture_has_computed_with_are_not_used_once_they_are_others() -> None:
    _, model, forward_backward = compiled(build=Scaled)
    forward_backward(*batch(0))
    model.schedule.tensor = torch.tensor(0.5)  # which is captured anew
    assert torch.equal(forward_backward(*batch(1)), step(copy.deepcopy(model), *batch(1), train=False))
    model.schedule.tensor.fill_(0.25)
    with pytest.raises(RunError, match="schedule, a tensor that is no buffer, was written"):
        forward_backward(*batch(2))


def test_a_model_that_goes_back_and_forth_is_captured_once_for_each(capfd: pytest.CaptureFixture[str]) -> None:
    _, model, forward_backward = compiled()
    losses = []
    for number in range(6):
        model.beta = (1.0, 0.25)[number % 2]
        losses.append(forward_backward(*batch(0)))
    assert len(forward_backward._plans.by_pattern) == 2  # one for each capture that was made
    assert all(torch.equal(loss, losses[0] * (1.0, 0.25)[number % 2]) for number, loss in enumerate(losses))


class KeepsTheMean(nn.Module):
    """Sets in training what it reads in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mean = nn.Linear(3, 4), nn.Linear(4, 3), torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = x.mean(0)
        return self.b(fxpipe.stage_boundary(self.a(x - self.mean))).square().mean()


@pytest.mark.parametrize("tracer", TRACERS)
def test_what_one_kind_of_batch_sets_and_another_reads_is_refused(tracer: Any) -> None:
    x, _ = batch(0)
    topology = fxpipe.Topology([("pipe", 2)])
    forward_backward = fxpipe.compile(KeepsTheMean(), topology, microbatches=2, tracer=tracer, example_args=(x,))
    assert torch.isfinite(forward_backward(x))
    with pytest.raises(fxpipe.FxpipeError, match=r"sets KeepsTheMean\.mean.* in a buffer"):
        forward_backward.evaluate(x)


class Collects(nn.Module):
    """Collects values on itself, as Monodepth2's encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)
        self.features, self.rows, self.loss = ["none"], 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.features, self.rows = [self.a(x)], x.shape[0]
        self.features.append(self.b(fxpipe.stage_boundary(self.features[0].tanh())))
        self.loss = self.features[1].square().mean() + self.features[0].mean()
        return self.loss


USES: list[Callable[[Any], Any]] = [
    lambda model: model.features[0],
    lambda model: len(copy.deepcopy(model).features),
    lambda model: torch.ones(()) + model.loss,
    lambda model: torch.stack([model.loss]) + model.loss.item(),
    lambda model: float(model.rows),
]


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_value_that_forward_sets_is_no_earlier_value_after_the_call(tracer: Any) -> None:
    model, (x, _) = Collects(), batch(0)
    plain = copy.deepcopy(model)
    topology = fxpipe.Topology([("pipe", 2)])
    forward_backward = fxpipe.compile(model, topology, microbatches=2, tracer=tracer, example_args=(x,))
    for rows, call in ((8, forward_backward), (6, forward_backward.evaluate), (8, forward_backward)):
        wanted = sum(plain(part) / 2 for part in x[:rows].chunk(2))
        assert_same(call(x[:rows]), wanted, f"loss of {rows} rows")
        for use in USES:
            with pytest.raises(RunError, match=r"forward sets Collects\.(?s:.*) return the value(?s:.*), in forward"):
                use(model)
        assert repr(model.loss).startswith("<forward sets Collects.loss")
        assert model(x) is model.loss


def test_what_is_not_read_may_change_with_every_step() -> None:
    _, model, forward_backward = compiled()
    for number in range(MOST + 1):
        model.seen = number
        forward_backward(*batch(number))
    assert len(forward_backward._plans.by_pattern) == 1


def test_what_changes_with_every_step_is_refused_with_what_to_write() -> None:
    _, model, forward_backward = compiled()
    for number in range(MOST):
        model.beta = 1.0 + number
        forward_backward(*batch(0))
    model.beta = 0.0
    with pytest.raises(RunError, match=r"Model\.beta, which the model reads, .* give what changes .* as an input"):
        forward_backward(*batch(0))
    model.beta = 2.0  # which it has seen
    forward_backward(*batch(0))


def assign_all(model: Model) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


class Buffered(nn.Module):
    """It reads a buffer of its own, one that may be there or not, and counts its calls in one that forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("mask", None)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls = self.calls + 1
        h = fxpipe.stage_boundary(self.below(x) * self.scale)
        return F.cross_entropy(self.above(h) if self.mask is None else self.above(h) * self.mask, y)


ANOTHER_PARAMETER, ANOTHER_BUFFER = "is another parameter than when it was", "is another buffer than when the model was"
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    f"the model's below.weight {ANOTHER_PARAMETER}": (Model, assign_all),
    f"the model's above.weight {ANOTHER_PARAMETER}": (Model, lambda m: setattr(m, "above", nn.Linear(4, 3))),
    f"the model's above.bias {ANOTHER_PARAMETER}": (
        Model,
        lambda m: setattr(m.above, "bias", nn.Parameter(torch.ones(3))),
    ),
    f"the model's above.parametrizations.weight.original0 {ANOTHER_PARAMETER}": (
        Model,
        lambda m: parametrizations.weight_norm(m.above),
    ),
    f"norm.running_mean {ANOTHER_BUFFER}": (Model, lambda m: setattr(m.norm, "running_mean", torch.ones(4))),
    f"Buffered.scale {ANOTHER_BUFFER}": (Buffered, lambda m: setattr(m, "scale", torch.full((4,), 3.0))),
    f"Buffered.mask {ANOTHER_BUFFER}": (Buffered, lambda m: setattr(m, "mask", torch.zeros(3))),
    f"Buffered.calls {ANOTHER_BUFFER}": (
        Buffered,
        lambda m: vars(m).update(_buffers={**m._buffers, "calls": torch.ones(())}),
    ),
}
WITH_TRACERS = [(told, tracer) for told in OTHERS for tracer in (TRACERS if "Buffered" not in told else TRACERS[1:])]


@pytest.mark.parametrize(("told", "tracer"), every(2, WITH_TRACERS))
def test_other_tensors_than_were_compiled_are_refused(told: str, tracer: str) -> None:
    """The step would use the new one, and a state dict would have the old one."""
    build, change = OTHERS[told]
    _, model, forward_backward = compiled(tracer, build)
    forward_backward(*batch(0))
    forward_backward.evaluate(*batch(0))
    if build is Buffered:
        model.scale.fill_(2.0)  # what there is may be written
        forward_backward(*batch(1))
        assert model.calls == 6  # two micro-batches a call
    change(model)
    with pytest.raises(RunError, match=told):
        forward_backward(*batch(1))


def other_forward(x: Tensor) -> Tensor:
    return x


MORE_CHANGES: dict[str, Callable[[Model], object]] = {
    "an item more": lambda model: model.weights.update(more=[]),
    "one that is gone": lambda model: delattr(model, "halved"),
    "one that is none": lambda model: model._modules.update(act=None),
    "the table of submodules": lambda model: vars(model).update(_modules={**model._modules, "act": nn.Tanh()}),
    "what was a method": lambda model: setattr(model.norm, "forward", other_forward),
    "what was a submodule": lambda model: vars(model).update(act=other_forward),
}


NUMBERS = "the numbers of a tensor in an object"  # which versions of tensors tell


@pytest.mark.parametrize("what", [what for what in CHANGES | MORE_CHANGES if what != NUMBERS])
def test_any_change_between_steps_that_found_none_is_another_state(what: str) -> None:
    model = Model()
    with noting() as noted:
        model(torch.randn(2, 3), torch.tensor([0, 1]))
    reads = Reads().with_capture(noted, Request(model, ()), Program(model, torch.fx.Graph())).after_compile()
    for _ in range(3):
        reads = reads.at_present()
        assert reads.number == 0
    model.seen += 1  # which it does not read
    model.beta = float("1.0")  # the same, and another object
    for _ in range(2):
        reads = reads.at_present()
        assert reads.number == 0
    (CHANGES | MORE_CHANGES)[what](model)
    for _ in range(3):
        reads = reads.at_present()
        assert reads.number == 1


class ReadsLater(nn.Module):
    """Reads a number in batches of one kind alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.late = nn.Linear(3, 4), nn.Linear(4, 3), 1.0

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        h = self.b(fxpipe.stage_boundary(torch.tanh(self.a(x))))
        return (h if more is None else h * self.late + more).square().mean()


def test_what_a_capture_has_read_that_another_rank_could_not_make_tells_no_ranks_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted, failed = auto_opaque.accepted, list[str]()

    def failing(request: Any, *others: Any) -> Any:
        seat = current_seat()
        if "more" in request.inputs and seat is not None and seat.rank == 1 and not failed:
            failed.append("once")
            raise fxpipe.TraceError("no luck on this rank")
        return accepted(request, *others)

    monkeypatch.setattr(auto_opaque, "accepted", failing)
    torch.manual_seed(0)
    plain = ReadsLater()
    wanted = [plain(batch(0)[0])]
    plain.late = 3.0
    wanted += [plain(batch(0)[0]), plain(*2 * [batch(0)[0]])]
    for losses in strict(1)(2, one_capture_fails, plain.state_dict()):
        for got, loss in zip(losses, wanted, strict=True):
            assert_same(got, loss.detach(), "loss")


def one_capture_fails(state: dict[str, Tensor]) -> list[Tensor]:
    model, (x, _) = ReadsLater(), batch(0)
    model.load_state_dict(state)
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=1)
    losses = [forward_backward(x)]
    with pytest.raises(fxpipe.FxpipeError, match="no luck"):
        forward_backward(x, x)
    model.late = 3.0
    return [*losses, forward_backward(x), forward_backward(x, x)]


def one_rank_writes(state: dict[str, Tensor], changes: list[str]) -> list[Tensor]:
    """The losses of a step before rank 0 alone changes something, of two behind that, and of an evaluation."""
    model, (x, y) = Model(), batch(0)
    model.load_state_dict(state)
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=1)
    losses = [forward_backward(x, y)]
    seat = current_seat()
    for what in changes:
        if seat is not None and seat.rank == 0:
            WRITTEN[what](model)
        losses.append(forward_backward(x, y))
    return [*losses, forward_backward.evaluate(x, y, outputs="loss")]


WRITTEN: dict[str, Callable[[Model], Any]] = {
    "an attribute that is not read, as save_pretrained sets": lambda model: setattr(model.schedule, "saved", "now"),
    "another value of one that is not read": lambda model: setattr(model.schedule, "saved", "later"),
    "an item that is not read": lambda model: model.weights.update(run=[7.0]),
    "one that is read": lambda model: setattr(model.schedule, "weight", 0.5),
}


def test_what_one_rank_alone_writes_and_forward_does_not_read_is_no_difference() -> None:
    plain = Model()
    state, (x, y) = copy.deepcopy(plain.state_dict()), batch(0)
    wanted = [plain(x, y).detach() for _ in range(4)]
    with torch.no_grad():
        wanted.append(plain.eval()(x, y))
    for losses in strict(1)(2, one_rank_writes, state, list(WRITTEN)[:3]):
        for got, loss in zip(losses, wanted, strict=True):
            assert_same(got, loss, "loss")


def test_what_forward_reads_and_one_rank_alone_has_changed_is_refused() -> None:
    phrase = r"rank 0 \(pipe 0\) and rank 1 \(pipe 1\) have compiled different programs"
    with pytest.raises(RunError, match=phrase):
        strict(1)(2, one_rank_writes, Model().state_dict(), ["one that is read"])
