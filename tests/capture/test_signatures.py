"""Tracers that need shapes: each kind of micro-batch has a capture of its own, made once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
import fxpipe.capture.auto_opaque
from fxpipe import stage_boundary
from fxpipe.batch.pattern import modules_of, parameters_in
from tests.harness import assert_same, engine_of, gradients_of
from tests.models import Layers

WIDTH = 6
TRACERS = ["export", "record"]


class Flattening(Layers):
    """Its code depends on shapes and on a Python number; it drops out in training."""

    names, width = "first second third", WIDTH

    def forward(self, batch: Mapping[str, Tensor], scale: float = 1.0, double: bool = False) -> Any:
        x = batch["x"]
        rows, length = x.shape[:2]
        h = torch.tanh(self.first(x.view(rows * length, WIDTH))) * scale
        h = stage_boundary(h, name="second")
        h = F.relu(self.second(h) * (2 if double else 1))
        if length > 3:
            h = h * 0.5
        h = stage_boundary(h, name="third")
        out = self.third(h).view(rows, length, WIDTH)
        return {"loss": F.mse_loss(out, batch["y"]), "output": out}


def model() -> Flattening:
    torch.manual_seed(0)
    return Flattening()


def batch(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return {name: torch.randn(rows, length, WIDTH, generator=generator) for name in "xy"}


CALLS: list[tuple[dict[str, Tensor], dict[str, Any]]] = [
    (batch(8, 3), {}),
    (batch(8, 5), {}),
    (batch(10, 3), {"scale": 0.5}),
    (batch(8, 3), {"scale": 2.0, "double": True}),
]


def compiled(tracer: str) -> fxpipe.ForwardBackward:
    return fxpipe.compile(
        model(), fxpipe.Topology([("pipe", 3)]), microbatches=4, tracer=tracer, example_args=(batch(8, 3),)
    )


def steps(tracer: str) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    forward_backward = compiled(tracer)
    ran = []
    for values, options in CALLS:
        forward_backward.zero_grad()
        loss = forward_backward(values, **options)
        ran.append((loss, gradients_of(forward_backward.named_parameters())))
    return ran


@pytest.mark.parametrize(("engine", "tracer"), [("local", "record"), ("strict 1", "export")])
def test_calls_of_any_shape_are_plain_pytorchs(engine: str, tracer: str, request: pytest.FixtureRequest) -> None:
    ranks = engine_of(engine, lambda: request.getfixturevalue("pool"))(3, steps, tracer)
    for place, (values, options) in enumerate(CALLS):
        plain = model()
        total, rows = torch.zeros(()), len(values["x"])
        for part in zip(*(values[name].tensor_split(4) for name in "xy"), strict=True):
            share = len(part[0]) / rows
            loss = plain(dict(zip("xy", part, strict=True)), **options)["loss"] * share
            loss.backward()
            total = total + loss.detach()
        wanted = gradients_of(plain.named_parameters())
        for ran in ranks:
            assert_same(ran[place][0], total, f"loss of call {place}")
            for name, gradient in ran[place][1].items():
                assert_same(gradient, wanted[name], f"{name} of call {place}")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that are captured."""
    shapes: list[tuple[int, ...]] = []
    original = fxpipe.capture.auto_opaque.accepted

    def counting(request: Any, *others: Any) -> Any:
        shapes.append(request.example["batch"]["x"].shape)
        return original(request, *others)

    monkeypatch.setattr(fxpipe.capture.auto_opaque, "accepted", counting)
    return shapes


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_shape_is_captured_once(tracer: str, captured: list[tuple[int, ...]]) -> None:
    forward_backward = compiled(tracer)
    assert captured == [(2, 3, WIDTH)]
    forward_backward(batch(8, 3))
    assert len(captured) == 1
    forward_backward(batch(10, 3))  # 3, 3, 2 and 2 rows
    assert captured[1:] == [(3, 3, WIDTH)]
    forward_backward(batch(10, 5))
    # what export captures with rows and lengths symbolic holds for all others
    assert captured[2:] == [(3, 5, WIDTH), (2, 5, WIDTH)][: 1 if tracer == "export" else 2]
    trained = len(captured)
    for rows, length in ((8, 3), (10, 5), (12, 3), (8, 5)):
        forward_backward(batch(rows, length))
    assert len(captured) == trained
    forward_backward.evaluate(batch(8, 3))
    forward_backward.evaluate(batch(8, 3))
    assert captured[trained:] == [(2, 3, WIDTH)]


def test_auto_tells_which_tracer_it_was_and_asks_for_an_example_where_symbolic_refuses() -> None:
    *_, which, why = str(compiled("auto").stages).splitlines()
    assert which == "captured by the export tracer, checked against the model on 2 micro-batches"
    assert why.startswith("symbolic could not: ")
    assert "; " not in why  # advice would ask for what another tracer has made needless


def test_where_another_tracer_captures_the_line_asks_for_no_example() -> None:
    class Asks(Layers):
        names, width = "first second", WIDTH

        def forward(self, x: Tensor | list[Tensor]) -> Tensor:
            h = self.first(x if isinstance(x, Tensor) else x[0])
            return self.second(stage_boundary(h, name="second")).square().mean()

    example = (torch.ones(2, WIDTH),)
    *_, why = str(
        fxpipe.compile(Asks(), fxpipe.Topology([("pipe", 2)]), microbatches=1, example_args=example).stages
    ).splitlines()
    fact = "forward asks for the class of a value, as isinstance does, which a symbolic trace does not know"
    assert why == f"symbolic could not: {fact}"
    with pytest.raises(fxpipe.TraceError, match=r"(?s)symbolic: .*pass example_args= or example_kwargs="):
        fxpipe.compile(model(), fxpipe.Topology([("pipe", 3)]), microbatches=4)


class Shorter(Layers):
    """What passes between its stages depends on the length of a batch."""

    names, width = "first second", WIDTH

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if x.shape[1] > 3:
            h, more = stage_boundary((h, torch.tanh(h)))
            return (self.second(h) + more).square().mean()
        return self.second(stage_boundary(h)).square().mean()


def test_micro_batches_of_one_step_may_exchange_different_values() -> None:
    forward_backward = fxpipe.compile(
        Shorter(), fxpipe.Topology([("pipe", 2)]), microbatches=2, tracer="export", example_args=(batch(4, 5)["x"],)
    )
    plain, parts = Shorter(), [batch(2, 5)["x"], batch(2, 3)["x"]]
    plain.load_state_dict(forward_backward.state_dict(full=True))
    loss = forward_backward.step_microbatches([((part,), {}) for part in parts])
    assert_same(loss, sum(plain(part) for part in parts).detach() / 2, "loss")


def test_modules_and_parameters_are_torchs_in_its_order() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(
        nn.Sequential(shared, nn.BatchNorm1d(2)), nn.ModuleList([shared, nn.Linear(2, 2, bias=False)])
    )
    model.register_module("none", None)
    model[1][1].weight = shared.weight
    modules = modules_of(model)
    assert [id(one) for one in modules] == [id(one) for one in model.modules()]
    assert [id(one) for one in parameters_in(modules).values()] == [id(one) for one in model.parameters()]
