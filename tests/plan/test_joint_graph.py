"""A stage compiled in three: forward, I and W against whole backwards and plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounter

import fxpipe
from fxpipe import RunError, StageGraph, Topology, stage_boundary
from fxpipe.graph.deferred import Deferred
from fxpipe.plan.joint_graph import InHalves
from tests.harness import replica_of
from tests.pool import Pool
from tests.strict_transport import run_strict

EAGER: Callable[..., Any] = partial(torch.compile, backend="aot_eager")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """Three stages: convolution and a batch norm whose buffers are written; layer norm, dropout, a group norm, what is
    frozen; a layer that uses the weight of another stage, and one of its own twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layer, self.linear, self.group = nn.LayerNorm(8), nn.Linear(8, 8), nn.GroupNorm(2, 4)
        self.frozen, self.unused = nn.Linear(8, 8).requires_grad_(False), nn.Linear(3, 3)
        self.tied, self.twice = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.linear.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x)))
        self.seen.add_(h.detach().sum())
        h = stage_boundary(h)
        h = self.group(F.dropout(F.gelu(self.frozen(self.linear(self.layer(h)))), 0.5, self.training))
        h = stage_boundary(h)
        return F.mse_loss(self.tied(self.twice(torch.tanh(self.twice(h)))), y)


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((8, 3, 8, 8), (8, 4, 8, 8))
    return [tuple(torch.randn(s, generator=generator, dtype=dtype) for s in shapes) for _ in range(2)]  # type: ignore[misc]


def trained(dtype: torch.dtype, autocast: bool = False, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Two steps of SGD: losses, gradients, buffers; and what made them."""
    model = Net().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        forward_backward = fxpipe.compile(model, Topology([("pipe", 3)]), microbatches=4, **options)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    found: dict[str, Tensor] = {}
    for number, batch in enumerate(batches(dtype)):
        optimizer.zero_grad()
        torch.manual_seed(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found[f"loss {number}"] = forward_backward(*batch)
        for name, parameter in forward_backward.named_parameters():
            if parameter.grad is not None:
                found[f"{name} {number}"] = parameter.grad.clone()
        optimizer.step()
    return found | {n: b.clone() for n, b in model.named_buffers()}, forward_backward


@functools.cache
def wholly(autocast: bool) -> dict[str, Tensor]:
    """With whole backwards, by no compiler."""
    return trained(torch.float64, autocast)[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "zb_h1": {},
    "autocast": {"autocast": True},
    "recomputed": {"recompute": True},
    "zb_h1, zero=2": {"zero": 2},
    "another compiler": {"stage_compiler": lambda function: function},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_whole_backwards(name: str) -> None:
    options = {"stage_compiler": EAGER, **OPTIONS[name]}
    got, halved = trained(torch.float64, schedule="zb_h1", **options)
    wanted = wholly(options.get("autocast", False))
    assert got.keys() == wanted.keys()
    assert sum(key.endswith("0") for key in got) == 14, "all that is trained, and the loss"
    tolerance = 1e-2 if "autocast" in options else 1e-12
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=tolerance, atol=tolerance, msg=key)
    told = str(halved.stages)
    assert ": I makes the gradients of group.weight, group.bias, too" in told
    assert told.count("I makes") == 1


def test_each_part_is_compiled_once() -> None:
    counter = CompileCounter()
    asked: list[fx.GraphModule] = []

    def compiler(module: fx.GraphModule) -> Any:
        asked.append(module)
        return torch.compile(module, backend=counter)

    trained(torch.float64, schedule="zb_h1", stage_compiler=compiler)
    assert len(asked) == 8, "the first stage has nothing for I to make"
    assert counter.frame_count == 8
    assert all(isinstance(module, fx.GraphModule) for module in asked)


def test_inductor_compiles_the_three_parts() -> None:
    torch.manual_seed(0)
    part, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(6, 4, requires_grad=True)
    wanted = torch.autograd.grad(part(x).square().sum(), [x, *part.parameters()])
    made = InHalves(lambda value: (part(value).square().sum(),), torch.compile)
    assert_halves(made, part, x, wanted)


# --- one call ---


def assert_halves(made: InHalves, part: nn.Module, x: Tensor, wanted: Sequence[Tensor], atol: float = 1e-6) -> None:
    """I makes the input's gradient and leaves ``.grad`` alone; W adds to it."""
    for parameter in part.parameters():
        parameter.grad = torch.ones_like(parameter)
    deferred, entered = Deferred(), x * 1
    (result,) = made(deferred, entered)
    with deferred.collecting():
        (found,) = torch.autograd.grad(result, [entered], retain_graph=False)
    torch.testing.assert_close(found, wanted[0], rtol=0, atol=atol)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in part.parameters() if p.grad is not None)
    deferred.accumulate()
    for parameter, gradient in zip(part.parameters(), wanted[1:], strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad - 1, gradient, rtol=0, atol=atol)
    assert deferred.kept == []


def identity(module: fx.GraphModule) -> Callable[..., Any]:
    return module


def halves_of(function: Callable[..., Tensor]) -> InHalves:
    return InHalves(lambda *values: (function(*values),), identity)


def layer() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 4), torch.randn(6, 4, requires_grad=True)


def test_several_shapes_and_several_calls_in_flight() -> None:
    part, _ = layer()
    made = halves_of(lambda x: torch.tanh(part(x)).square().sum())
    waiting = []
    inputs = [torch.randn(rows, 4, requires_grad=True) for rows in (6, 3, 6, 9, 5)]
    for x in inputs:
        deferred = Deferred()
        waiting.append((deferred, made(deferred, x * 1)[0]))
    for deferred, result in waiting:
        with deferred.collecting():
            result.backward()
    assert part.weight.grad is None
    for deferred, _ in reversed(waiting):
        deferred.accumulate()
    plain, _ = layer()
    losses = [torch.tanh(plain(x)).square().sum() for x in inputs]
    wanted = torch.autograd.grad(sum(losses), [*plain.parameters(), *inputs])  # type: ignore[arg-type]
    found = [parameter.grad for parameter in (*part.parameters(), *inputs)]
    for got, gradient in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, gradient)


def test_a_parameter_that_is_a_result_itself_gets_its_gradient_from_w() -> None:
    part, x = layer()
    made = InHalves(lambda value: (part.weight.t(), part(value)), identity)
    deferred = Deferred()
    turned, result = made(deferred, x * 1)
    with deferred.collecting():
        (turned.square().sum() + result.square().sum()).backward()
    assert part.weight.grad is None
    deferred.accumulate()
    plain, y = layer()
    (plain.weight.square().sum() + plain(y).square().sum()).backward()
    assert part.weight.grad is not None
    torch.testing.assert_close(part.weight.grad, plain.weight.grad)
    torch.testing.assert_close(x.grad, y.grad)


def broken(part: nn.Module) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        h = torch.tanh(part(x))
        torch._dynamo.graph_break()
        return (part(h) * h).square().sum()  # the same layer in two graphs

    return function


def test_a_stage_of_several_graphs_and_its_shared_layer() -> None:
    part, x = layer()
    function = broken(part)
    wanted = torch.autograd.grad(function(x), [x, *part.parameters()])
    assert_halves(halves_of(function), part, x, wanted)


def test_what_cannot_be_captured_stays_in_i_and_is_named() -> None:
    class Amid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return apart(self.second, torch.tanh(self.first(x)))

    apart = torch.compiler.disable(lambda module, value: module(value))
    graph = StageGraph.from_callables({"amid": Amid(), "last": torch.sum}, [("amid", "last")], {"amid": ["x"]})
    found = []
    for options in ({}, {"schedule": "zb_h1", "stage_compiler": EAGER}):
        graph.module.zero_grad()
        torch.manual_seed(0)
        forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), microbatches=2, **options)
        assert "I makes" not in str(forward_backward.stages), "it is known after a step"
        forward_backward(torch.ones(4, 4))
        found.append([p.grad.clone() for p in forward_backward.parameters() if p.grad is not None])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)
    assert len(found[1]) == 4
    told = str(forward_backward.stages)
    assert "amid: I makes the gradients of amid.second.weight, amid.second.bias, too (50% of its parameters)" in told


def test_a_hook_sees_a_parameters_gradient_once_and_whole() -> None:
    part, x = layer()
    function = broken(part)
    wanted = torch.autograd.grad(function(x), [x, *part.parameters()])
    seen: list[Tensor] = []
    part.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    deferred = Deferred()
    (result,) = halves_of(function)(deferred, x * 1)
    with deferred.collecting():
        result.backward()
    deferred.accumulate()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], wanted[1])
    torch.testing.assert_close([part.weight.grad, part.bias.grad], list(wanted[1:]))


def test_hooked_parameters_alone_stay_in_i_and_are_named() -> None:
    class Tailed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return stage_boundary(self.second(torch.tanh(self.first(x)))).square().mean()

    x, plain, seen = torch.randn(6, 4), Tailed(), []
    plain(x).backward()
    model = Tailed()
    options: dict[str, Any] = {"schedule": "zb_h1", "stage_compiler": EAGER}
    forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), microbatches=1, **options)
    hook = None
    for staying in ((), ("second.weight",), ()):  # one that is put on, and taken off
        hook = model.second.weight.register_hook(seen.append) if staying else hook and hook.remove()
        model.zero_grad()
        forward_backward(x)
        assert forward_backward.stages.stages[0].staying == staying
        for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, wanted.grad, rtol=0, atol=1e-6)
    assert len(seen) == 1


def test_a_stage_that_cannot_be_captured_at_all_is_named() -> None:
    part, x = layer()
    apart = torch.compiler.disable(lambda value: part(value).square().sum())
    made, parameters = halves_of(lambda value: apart(value)), dict(part.named_parameters())  # type: ignore[no-any-return]
    parameters["frozen"] = nn.Parameter(torch.ones(1), False)
    deferred = Deferred()
    (result,) = made(deferred, x * 1)
    assert made.in_input(parameters) == (), "it is known after W"
    with deferred.collecting():
        result.backward()
    deferred.accumulate()
    assert made.in_input(parameters) == ("weight", "bias")


def test_a_backward_after_one_that_failed_gives_its_gradients_itself() -> None:
    part, x = layer()
    fails = False

    def compiler(module: fx.GraphModule) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            if fails:
                raise MemoryError("no memory for I")
            return module(*inputs)

        return run

    made = InHalves(lambda value: (part(value).square().sum(),), compiler)
    deferred = Deferred()
    (result,) = made(deferred, x * 1)
    fails = True
    with deferred.collecting(), pytest.raises(MemoryError):
        result.backward()
    fails = False
    for parameter in part.parameters():
        parameter.register_hook(lambda gradient: None)  # now they stay in I
    (result,) = made(Deferred(), x * 1)
    found = torch.autograd.grad(result, [*part.parameters()])
    plain, y = layer()
    wanted = torch.autograd.grad(plain(y).square().sum(), [*plain.parameters()])
    torch.testing.assert_close(found, wanted)


# --- on a data axis ---


class Tied(nn.Module):
    """Two stages, which share a weight; the second has a group norm, which stays in I."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.leave = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.leave.weight, self.group = self.enter.weight, nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(self.norm(torch.tanh(self.enter(x))))
        return self.leave(torch.tanh(self.group(h))).square().mean()  # type: ignore[no-any-return]


def outside_of_backwards(module: fx.GraphModule, seen: set[fx.GraphModule]) -> Callable[..., Any]:
    """``module``; ``seen`` has it once it runs while autograd does not: a forward, or W."""

    def run(*inputs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            seen.add(module)
        return module(*inputs)

    return run


def on_data_axis(**options: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Two steps of SGD: the whole model after them, and what stays in I on this rank."""
    topology = Topology([("pipe", 2), ("data", 2)])
    forward_backward = fxpipe.compile(Tied().double(), topology, microbatches=4, **options)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + replica_of(topology))
        forward_backward(torch.randn(8, 4, generator=generator, dtype=torch.float64))
        optimizer.step()
    named = [name for stage in forward_backward.stages for name in stage.staying]
    state = {name: tensor.clone() for name, tensor in forward_backward.state_dict(full=True).items()}
    forward_backward.close()
    return state, named


def assert_trained_alike(found: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    begun = Tied().double().state_dict()
    assert found.keys() == plain.keys() == begun.keys()
    for name, tensor in plain.items():
        assert not torch.equal(tensor, begun[name]), name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


STAYING = [[], [], ["group.weight", "group.bias"], ["group.weight", "group.bias"]]
"""By rank, in the order of how many they are."""


@pytest.mark.parametrize("zero", [0, 2])
def test_w_has_work_on_a_data_axis_and_its_sums_are_those_of_1f1b(zero: int) -> None:
    def in_halves(rank: int) -> tuple[dict[str, Tensor], list[str], int]:
        seen: set[fx.GraphModule] = set()
        compiler = partial(outside_of_backwards, seen=seen)
        return *on_data_axis(schedule="zb_h1", zero=zero, stage_compiler=compiler), len(seen)

    found = run_strict(in_halves, 4)
    wanted = run_strict(lambda rank: on_data_axis(schedule="1f1b", zero=zero), 4)
    for (state, _, outside), (plain, _) in zip(found, wanted, strict=True):
        assert outside == 2, "the forward and W"
        assert_trained_alike(state, plain)
    assert sorted((named for _, named, _ in found), key=len) == STAYING


def with_shards() -> list[tuple[dict[str, Tensor], list[str]]]:
    fxpipe.init()
    compiled: dict[str, Any] = {"schedule": "zb_h1", "stage_compiler": EAGER}
    return [on_data_axis(zero=3, **options) for options in ({"schedule": "1f1b"}, compiled)]


def test_of_shards_those_are_named_whose_whole_gradients_i_makes(pool: Pool) -> None:
    found = pool.run(with_shards, ranks=4)
    for (plain, _), (state, _) in found:
        assert_trained_alike(state, plain)
    assert sorted((named for _, (_, named) in found), key=len) == STAYING


# --- what is refused ---


def test_what_w_needs_may_not_be_written_after_i() -> None:
    part, x = layer()
    entered, deferred = x.detach().clone(), Deferred()
    (result,) = halves_of(lambda value: part(value).square().sum())(deferred, entered)
    with deferred.collecting():
        result.backward()
    entered.add_(1)
    with pytest.raises(RunError, match="what W needs was written in place since I; write it out of place"):
        deferred.accumulate()


def test_a_backward_that_is_not_i_is_refused() -> None:
    part, x = layer()
    (result,) = halves_of(lambda value: part(value).square().sum())(Deferred(), x * 1)
    with pytest.raises(RunError, match='cannot be in two halves then: write schedule="1f1b"'):
        result.backward()
