"""Habits of real models: Python values as inputs, types that forward asks for, layers that are used twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import RunError, TraceError, stage_boundary
from tests.harness import assert_same, gradients_of
from tests.strict_transport import run_strict

every_tracer = pytest.mark.parametrize("tracer", ["export", "record"])
TWO = fxpipe.Topology([("pipe", 2)])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, how: Any) -> Tensor:
        h = stage_boundary(self.a(x))
        return (self.c(h) * _factor(how["by"])).square().mean()


def _factor(by: Any) -> float:
    if isinstance(by, torch.dtype):
        return float(by.itemsize)
    return 3.0 if isinstance(by, bool) else 0.5 if isinstance(by, float) else 1.0


@every_tracer
@pytest.mark.parametrize("values", [(2, 2.0), (True, 1), (torch.float64, torch.float16), (0.0, -0.0)])
def test_python_values_that_compare_equal_are_kinds_of_their_own(values: tuple[Any, Any], tracer: str) -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    forward_backward = fxpipe.compile(
        model, TWO, microbatches=1, tracer=tracer, example_args=(x,), example_kwargs={"how": {"by": values[0]}}
    )
    for value in (*values, *values):
        assert_same(forward_backward(x, how={"by": value}), plain(x, {"by": value}).detach(), f"loss for {value!r}")


class Setting:
    """Neither a tensor nor a plain value."""

    by = 1


@every_tracer
def test_an_object_among_the_inputs_is_refused(tracer: str) -> None:
    with pytest.raises(TraceError, match=r"'how' holds .*Setting"):
        fxpipe.compile(
            Scaled(),
            TWO,
            microbatches=1,
            tracer=tracer,
            example_args=(torch.randn(4, 4),),
            example_kwargs={"how": {"by": Setting()}},
        )


class Norm(nn.Module):
    """As in many language models: computes in float32, and goes back to the type that it was given."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(self.a(x))
        kind = h.dtype
        h = h.float()
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(kind)
        return self.c(h).float().square().mean()


@every_tracer
def test_types_that_forward_asks_for_are_those_of_precision(tracer: str) -> None:
    torch.manual_seed(0)
    model, x = Norm(True), torch.randn(6, 8)
    plain = copy.deepcopy(model).to(torch.bfloat16)
    forward_backward = fxpipe.compile(
        model, TWO, microbatches=2, tracer=tracer, example_args=(x,), precision=fxpipe.Precision()
    )
    for rows in (6, 5):
        parts = x[:rows].to(torch.bfloat16).tensor_split(2)
        wanted = sum(plain(part).detach() * (len(part) / rows) for part in parts)
        assert_same(forward_backward(x[:rows]), wanted, "loss")
    assert forward_backward.evaluate(x).dtype == torch.float32


def assert_a_step_is_plain_pytorchs(make: type[nn.Module], tracer: str, tolerance: float) -> None:
    """``tolerance``: of the gradients."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    forward_backward = fxpipe.compile(model, TWO, microbatches=1, tracer=tracer, example_args=(x,))
    assert_same(forward_backward(x), (loss := plain(x)).detach(), "loss")
    loss.backward()
    wanted = gradients_of(plain.named_parameters())
    for name, gradient in gradients_of(forward_backward.named_parameters()).items():
        assert_same(gradient, wanted[name], name, tolerance)


class Watched(nn.Module):
    """A value on its way to the next stage is read last inside of a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.a(x).T  # which the symbolic tracer records where it is first used
        with torch.no_grad():
            t = torch.sigmoid(turned)
        h, t = stage_boundary((turned, t))
        return (self.c(h.T) * t.T).square().mean()


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_a_value_that_is_handed_off_amid_no_grad_keeps_its_gradient(tracer: str) -> None:
    assert_a_step_is_plain_pytorchs(Watched, tracer, 0.0)


def test_a_stage_of_the_users_own_is_compiled_once() -> None:
    given: list[list[Callable[..., Any]]] = [[], []]

    def run(rank: int) -> Tensor:
        torch.manual_seed(0)
        parts: dict[str, Any] = {"a": nn.Linear(4, 4), "b": lambda h: h.square().mean()}
        graph = fxpipe.StageGraph.from_callables(parts, edges=[("a", "b")], inputs={"a": ["x"]})

        def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
            given[rank].append(function)
            return function

        forward_backward = fxpipe.compile(graph, TWO, microbatches=2, stage_compiler=compiler)
        return forward_backward(torch.ones(4, 4))

    first, second = run_strict(run, 2, 1)
    assert_same(first, second, "loss")
    assert [len(functions) for functions in given] == [1, 1]
    assert not any("compiled by" in repr(function) for functions in given for function in functions)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        logits = self.head(stage_boundary(self.e(ids))).flatten(0, 1)
        if num_items_in_batch is None:
            return F.cross_entropy(logits, labels.flatten())
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def test_a_number_of_items_given_on_one_replica_alone_is_refused_on_all() -> None:
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    ids = torch.zeros(4, 3, dtype=torch.long)

    def run(rank: int) -> None:
        torch.manual_seed(0)
        forward_backward = fxpipe.compile(Counted(), topology, microbatches=2, example_args=(ids, ids))
        own = {"num_items_in_batch": torch.tensor(12)} if topology.coordinate(rank)["data"] else {}
        forward_backward(ids, ids, **own)

    with pytest.raises(RunError, match="num_items_in_batch"):
        run_strict(run, 4, 1)


class Teacher(nn.Module):
    """Its layer is called with another one's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.t = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.func.functional_call(self.a, dict(self.t.named_parameters()), (x,))
        return self.a(stage_boundary(h)).square().mean()


@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_a_module_called_with_other_parameters_uses_those(tracer: str) -> None:
    assert_a_step_is_plain_pytorchs(Teacher, tracer, 1e-6)
    with pytest.raises(TraceError, match="other parameters or buffers than its own"):
        fxpipe.compile(Teacher(), TWO, microbatches=1, tracer="symbolic")


def test_the_same_layer_with_the_old_spectral_norm_in_two_stages_is_refused() -> None:
    layer = nn.utils.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(layer, nn.Tanh(), layer)
    with pytest.raises(fxpipe.PartitionError, match="must run in one stage"):
        fxpipe.compile(model, TWO, microbatches=2, loss_fn=F.mse_loss, tracer="symbolic", boundaries={"1": "after"})


def test_a_layer_without_a_shape_is_refused_with_what_to_do() -> None:
    with pytest.raises(RunError, match=r"0\.weight has no shape yet; call the model once"):
        fxpipe.compile(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), TWO, loss_fn=F.mse_loss, boundaries=["1"])
