"""Gradients inside forward, and what hooks read in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import TraceError, stage_boundary
from tests.layered import assert_trains
from tests.models import Layers
from tests.thinned import in_turn
from tests.two_ranks import TWO


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(4, 4)} for _ in range(3)]


def by_tensor_hook(h: Tensor, scale: Tensor) -> Tensor:
    h = h * 1
    h.register_hook(lambda gradient: gradient * scale)
    return h


def by_multi_hook(h: Tensor, scale: Tensor) -> Tensor:
    h = h * 1
    torch.autograd.graph.register_multi_grad_hook([h], lambda gradients: gradients[0].mul_(scale))
    return h


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return h * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.scale, None


def by_function(h: Tensor, scale: Tensor) -> Tensor:
    return Scale.apply(h, scale)  # type: ignore[no-untyped-call, no-any-return]


class Scaled(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.how(self.layer(x), scale)


class Hooked(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), Scaled(how), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        return self.c(self.b(h, x.exp())).square().mean()


@pytest.mark.parametrize("how", [by_tensor_hook, by_multi_hook, by_function])
def test_what_is_read_in_backward_alone_is_no_argument_unread(how: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_trains(lambda: Hooked(how), batches(), tracer="record")


class PackedBetween(Hooked):
    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 2):
            h = h.square()
        return self.c(h).square().mean()


def test_hooks_that_change_saved_tensors_between_submodules_are_seen_by_the_check() -> None:
    with pytest.raises(TraceError, match="do not compute what the model does: the gradient of"):
        fxpipe.compile(PackedBetween(by_function), TWO, tracer="record", example_args=(torch.ones(8, 4),))


class Field(nn.Module):
    """A force field: what is behind the energy's gradient ``by`` one of its inputs; a boundary at ``cut``."""

    def __init__(self, by: str = "h", cut: str = "before", **options: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.by, self.cut, self.options = by, cut, options

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h = stage_boundary(h) if self.cut == "before" else h
        k = torch.tanh(self.b(h))
        k = stage_boundary(k) if self.cut == "amid" else k
        energy = self.c(k)
        by = {"h": h, "weight": self.b.weight, "first": self.a.weight}[self.by]
        (force,) = torch.autograd.grad(energy.sum(), inputs=by, create_graph=True, **self.options)
        if self.cut == "behind":
            energy, force = stage_boundary((energy, force))
        return energy.square().mean() + self.c(force.mean(0, keepdim=True)).square().mean()


@pytest.mark.parametrize(("by", "cut"), [("h", "before"), ("weight", "behind"), ("first", "behind")])
def test_a_gradient_inside_forward_and_inside_a_stage_is_plain_pytorchs(by: str, cut: str) -> None:
    tolerance = 1e-6 if cut == "behind" else 0.0
    assert_trains(lambda: Field(by, cut), batches(), tolerance=tolerance, tracer="symbolic")


@pytest.mark.parametrize(
    ("by", "cut", "options"),
    [("first", "before", {}), ("h", "amid", {"materialize_grads": True}), ("weight", "amid", {"allow_unused": True})],
)
def test_a_gradient_inside_forward_through_a_boundary_is_refused(by: str, cut: str, options: dict[str, bool]) -> None:
    with pytest.raises(
        TraceError, match=r"test_gradients_in_forward.py.*autograd\.grad[\s\S]*through the stage boundary.*move"
    ):
        fxpipe.compile(Field(by, cut, **options), TWO, tracer="symbolic")


def test_cuts_that_are_found_leave_a_gradient_inside_forward_in_one_stage() -> None:
    assert_trains(lambda: Field("h", "none"), batches(), "auto", tolerance=1e-6, tracer="symbolic")


class Energy(Layers):
    """Energy and force of its own, in a submodule."""

    names, width = "b c", 4

    def forward(self, h: Tensor) -> Tensor:
        energy = self.c(torch.tanh(self.b(h)))
        (force,) = torch.autograd.grad(energy.sum(), h, create_graph=True)
        return energy + force


class Force(nn.Module):
    """The force of an energy that others have computed."""

    def forward(self, energy: Tensor, by: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(energy.sum(), by, create_graph=True, materialize_grads=True)
        return force


class Fields(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.a, self.energy, self.force, self.whole = nn.Linear(4, 4), Energy(), Force(), whole

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.whole:
            return self.energy(stage_boundary(h)).square().mean()
        energy = stage_boundary(h.square().sum(1))
        return self.force(energy, h).square().mean() + energy.mean()


def test_a_submodule_that_takes_a_gradient_of_its_own_is_opaque() -> None:
    assert_trains(lambda: Fields(True), batches(), tracer="record")


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record", "auto"])
def test_a_submodule_that_takes_a_gradient_of_what_others_have_computed_is_refused(tracer: str) -> None:
    with pytest.raises(TraceError, match=r"gradient[\s\S]*autograd\.grad"):
        fxpipe.compile(Fields(False), TWO, tracer=tracer, example_args=(torch.ones(8, 4),))


def by_method(model: nn.Module, h: Tensor) -> Tensor:
    h.sum().backward(retain_graph=True)
    return h


def by_func(model: nn.Module, h: Tensor) -> Tensor:
    return torch.func.grad(lambda t: model(t).sum())(h)


def by_jacobian(model: nn.Module, h: Tensor) -> Tensor:
    made = torch.autograd.functional.jacobian(lambda t: model(t).sum(), h, create_graph=True)
    assert isinstance(made, Tensor)
    return made


class Differentiates(nn.Module):
    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.how = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        return self.c(self.how(self.b, h)).square().mean()


@pytest.mark.parametrize(
    ("how", "tracer"), in_turn([by_method, by_func, by_jacobian], ["record", "symbolic", "export"])
)
def test_other_gradients_inside_forward_are_refused_with_the_line(how: Any, tracer: str) -> None:
    with pytest.raises(TraceError, match=r"test_gradients_in_forward\.py"):
        fxpipe.compile(Differentiates(how), TWO, tracer=tracer, example_args=(torch.ones(8, 4),))
