"""Gradients inside forward, and what hooks read in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import backward

import fxpipe
from fxpipe import TraceError, stage_boundary
from tests.harness import assert_same, gradients_of
from tests.two_ranks import TWO


def assert_as_plain(model: nn.Module, batch: dict[str, Tensor], tolerance: float = 0.0, **options: Any) -> None:
    """Two steps of micro-batches of two halves, the second on other numbers, leave the loop's loss and gradients."""
    plain = copy.deepcopy(model)
    forward_backward = fxpipe.compile(model, TWO, microbatches=2, example_kwargs=batch, **options)
    for scale in (1.0, -2.0):
        given = {name: value * scale if value.is_floating_point() else value for name, value in batch.items()}
        wanted = torch.zeros(())
        for place in range(2):
            loss = plain(**{name: value.chunk(2)[place].clone() for name, value in given.items()}) * 0.5
            loss.backward()
            wanted = wanted + loss.detach()
        assert_same(forward_backward(**given), wanted, "loss", tolerance)
        gradients = gradients_of(plain.named_parameters())
        for name, gradient in gradients_of(forward_backward.named_parameters()).items():
            assert_same(gradient, gradients[name], name, tolerance)


def by_tensor_hook(h: Tensor, scale: Tensor) -> Tensor:
    h = h * 1
    h.register_hook(lambda gradient: gradient * scale)
    return h


def by_node_hook(h: Tensor, scale: Tensor) -> Tensor:
    h = h * 1
    h.grad_fn.register_hook(lambda into, out: (into[0] * scale, *into[1:]))  # type: ignore[union-attr]
    return h


def by_multi_hook(h: Tensor, scale: Tensor) -> Tensor:
    h = h * 1
    torch.autograd.graph.register_multi_grad_hook([h], lambda gradients: gradients[0].mul_(scale))
    return h


def by_saved_tensors(h: Tensor, scale: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * scale):
        return h.square()


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


@pytest.mark.parametrize("how", [by_tensor_hook, by_node_hook, by_multi_hook, by_saved_tensors, by_function])
def test_what_is_read_in_backward_alone_is_no_argument_unread(how: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert_as_plain(Hooked(how), {"x": torch.randn(4, 4)}, tracer="record")


class PackedBetween(Hooked):
    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 2):
            h = h.square()
        return self.c(h).square().mean()


def test_hooks_on_saved_tensors_between_submodules_are_refused() -> None:
    with pytest.raises(TraceError, match=r"how tensors are saved for backward[\s\S]*saved_tensors_hooks"):
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


@pytest.mark.parametrize(
    ("by", "cut"), [("h", "before"), ("weight", "before"), ("h", "behind"), ("weight", "behind"), ("first", "behind")]
)
def test_a_gradient_inside_forward_and_inside_a_stage_is_plain_pytorchs(by: str, cut: str) -> None:
    torch.manual_seed(0)
    assert_as_plain(Field(by, cut), {"x": torch.randn(4, 4)}, 1e-6 if cut == "behind" else 0.0, tracer="symbolic")


@pytest.mark.parametrize("options", [{}, {"materialize_grads": True}, {"allow_unused": True}])
@pytest.mark.parametrize(("by", "cut"), [("first", "before"), ("h", "amid"), ("weight", "amid"), ("first", "amid")])
def test_a_gradient_inside_forward_through_a_boundary_is_refused(by: str, cut: str, options: dict[str, bool]) -> None:
    with pytest.raises(
        TraceError, match=r"test_gradients_in_forward.py.*autograd\.grad[\s\S]*through the stage boundary.*move"
    ):
        fxpipe.compile(Field(by, cut, **options), TWO, tracer="symbolic")


def test_cuts_that_are_found_leave_a_gradient_inside_forward_in_one_stage() -> None:
    torch.manual_seed(0)
    assert_as_plain(Field("h", "none"), {"x": torch.randn(4, 4)}, 1e-6, tracer="symbolic", boundaries="auto")


class Energy(nn.Module):
    """Energy and force of its own, in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4)

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
    torch.manual_seed(0)
    assert_as_plain(Fields(True), {"x": torch.randn(4, 4)}, tracer="record")


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record", "auto"])
def test_a_submodule_that_takes_a_gradient_of_what_others_have_computed_is_refused(tracer: str) -> None:
    with pytest.raises(TraceError, match=r"gradient[\s\S]*autograd\.grad"):
        fxpipe.compile(Fields(False), TWO, tracer=tracer, example_args=(torch.ones(8, 4),))


def by_method(model: nn.Module, h: Tensor) -> Tensor:
    h.sum().backward(retain_graph=True)
    return h


def by_autograd(model: nn.Module, h: Tensor) -> Tensor:
    torch.autograd.backward(h.sum(), retain_graph=True)
    return h


def by_bound_name(model: nn.Module, h: Tensor) -> Tensor:
    backward(h.sum(), retain_graph=True)
    return h


def by_func(model: nn.Module, h: Tensor) -> Tensor:
    return torch.func.grad(lambda t: model(t).sum())(h)


def by_vjp(model: nn.Module, h: Tensor) -> Tensor:
    made, pull = torch.func.vjp(model, h)
    return pull(made)[0]  # type: ignore[no-any-return]


def by_jvp(model: nn.Module, h: Tensor) -> Tensor:
    return torch.func.jvp(model, (h,), (h,))[1]  # type: ignore[no-any-return]


def by_jacobian(model: nn.Module, h: Tensor) -> Tensor:
    made = torch.autograd.functional.jacobian(lambda t: model(t).sum(), h, create_graph=True)
    assert isinstance(made, Tensor)
    return made


def by_dual_numbers(model: nn.Module, h: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        made = model(torch.autograd.forward_ad.make_dual(h, h))
        return torch.autograd.forward_ad.unpack_dual(made).tangent


OTHERS = [by_method, by_autograd, by_bound_name, by_func, by_vjp, by_jvp, by_jacobian, by_dual_numbers]


class Differentiates(nn.Module):
    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor], cut: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c, self.how = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        return self.c(self.how(self.b, h)).square().mean()


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
@pytest.mark.parametrize(
    "how",
    OTHERS,
    ids=lambda how: how.__name__,
)
def test_other_gradients_inside_forward_are_refused_with_the_line(how: Any, tracer: str) -> None:
    told = r"test_gradients_in_forward\.py"
    if torch.__version__.startswith("2.12.") and how is by_jvp and tracer == "export":
        told = "torch.export cannot follow the model"  # its own error there, which comes from no line of the user's
    with pytest.raises(TraceError, match=told):
        fxpipe.compile(Differentiates(how), TWO, tracer=tracer, example_args=(torch.ones(8, 4),))


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, h: Tensor) -> Tensor:
        return by_method(self, self.layer(h))


def test_backward_inside_a_submodule_is_refused_as_it_would_be_lost_in_front_of_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Backwards())
    with pytest.raises(TraceError, match="forward calls backward"):
        fxpipe.compile(
            model,
            TWO,
            tracer="record",
            loss_fn=F.mse_loss,
            boundaries=["1"],
            example_args=(torch.ones(8, 4),),
            example_kwargs={"target": torch.ones(8, 4)},
        )
