"""A stage compiled in three: forward, I and W against whole backwards and plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounter

import fxpipe
from fxpipe import RunError, Topology, stage_boundary
from fxpipe.plan.stage_compiler import in_halves
from fxpipe.stage.deferred import Deferred
from tests.device import DEVICE
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


def trained(autocast: bool = False, **options: Any) -> dict[str, Tensor]:
    """Two steps of SGD: losses, gradients, buffers."""
    model, generator = Net().double(), torch.Generator().manual_seed(1)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        forward_backward = fxpipe.compile(model, Topology([("pipe", 3)]), microbatches=4, **options)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    found: dict[str, Tensor] = {}
    for number in range(2):
        batch = [torch.randn(8, channels, 8, 8, generator=generator).double() for channels in (3, 4)]
        optimizer.zero_grad()
        torch.manual_seed(number)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            found[f"loss {number}"] = forward_backward(*batch)
        for name, parameter in forward_backward.named_parameters():
            if parameter.grad is not None:
                found[f"{name} {number}"] = parameter.grad.clone()
        optimizer.step()
    return found | {n: b.clone() for n, b in model.named_buffers()}


@pytest.mark.parametrize("options", [{"recompute": True, "zero": 2}, {"autocast": True}], ids=str)
def test_gradients_are_those_of_whole_backwards_and_each_part_is_compiled_once(options: dict[str, Any]) -> None:
    counter, asked = CompileCounter(), list[fx.GraphModule]()

    def compiler(module: fx.GraphModule) -> Any:
        asked.append(module)
        return torch.compile(module, backend=counter)

    got = trained(schedule="zb_h1", stage_compiler=compiler, **options)
    wanted = trained("autocast" in options)
    assert sum(key.endswith("0") for key in got) == 14, "all that is trained, and the loss"
    tolerance = 1e-2 if "autocast" in options else 1e-12
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert len(asked) == counter.frame_count == 8, "the first stage has nothing for I to make"


# --- one call ---


def run_halves(made: Callable[..., Any], x: Tensor) -> None:
    """I, then W, of a call."""
    deferred = Deferred()
    (result,) = made(deferred, x * 1)
    with deferred.collecting():
        result.backward(torch.ones_like(result))
    deferred.accumulate()
    assert deferred.pending == []


def test_inductor_compiles_the_three_parts() -> None:
    """Of a product, for which it has no kernel to compile."""
    part, x = nn.Linear(4, 4, bias=False), torch.randn(6, 4, requires_grad=True)
    wanted = torch.autograd.grad(part(x), [x, part.weight], torch.ones(6, 4))
    part.weight.grad = torch.ones_like(part.weight)
    run_halves(in_halves(lambda value: (part(value),), torch.compile), x)
    torch.testing.assert_close([x.grad, part.weight.grad - 1], list(wanted), rtol=0, atol=1e-6)


def identity(module: fx.GraphModule) -> Callable[..., Any]:
    return module


def halves_of(function: Callable[..., Tensor]) -> Callable[..., Any]:
    return in_halves(lambda *values: (function(*values),), identity)


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
    made = in_halves(lambda value: (part.weight.t(), part(value)), identity)
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


def test_what_cannot_be_captured_stays_in_i() -> None:
    part, x = layer()
    apart = torch.compiler.disable(lambda value: part(value))
    made = halves_of(lambda value: (apart(part(value)) * value).sum())
    plain, y = layer()
    (plain(plain(y)) * y).sum().backward()
    run_halves(made, x)
    for got, gradient in ((part.weight.grad, plain.weight.grad), (part.bias.grad, plain.bias.grad), (x.grad, y.grad)):
        torch.testing.assert_close(got, gradient)


def test_a_hook_sees_a_parameters_gradient_once_and_whole() -> None:
    part, x = layer()
    function = broken(part)
    wanted = torch.autograd.grad(function(x), [x, *part.parameters()])
    seen: list[Tensor] = []
    part.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    run_halves(halves_of(function), x)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], wanted[1])
    torch.testing.assert_close([part.weight.grad, part.bias.grad], list(wanted[1:]))


def test_a_backward_after_one_that_failed_gives_its_gradients_itself() -> None:
    part, x = layer()
    fails = False

    def compiler(module: fx.GraphModule) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            if fails:
                raise MemoryError("no memory for I")
            return module(*inputs)

        return run

    made = in_halves(lambda value: (part(value).square().sum(),), compiler)
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


def on_data_axis(**options: Any) -> dict[str, Tensor]:
    """Two steps of SGD: the whole model after them."""
    topology = Topology([("pipe", 2), ("data", 2)])
    forward_backward = fxpipe.compile(Tied().double(), topology, microbatches=4, **options)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + replica_of(topology))
        forward_backward(torch.randn(8, 4, generator=generator, dtype=torch.float64))
        optimizer.step()
    state = {name: tensor.clone() for name, tensor in forward_backward.state_dict(full=True).items()}
    forward_backward.close()
    return state


def assert_trained_alike(found: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)
    for name, begun in Tied().double().state_dict().items():
        assert not torch.equal(found[name], begun), name


def test_w_has_work_on_a_data_axis_and_its_sums_are_those_of_1f1b() -> None:
    def halved(rank: int) -> tuple[dict[str, Tensor], int]:
        seen: set[fx.GraphModule] = set()

        def compiler(module: fx.GraphModule) -> Callable[..., Any]:
            def run(*inputs: Any) -> Any:
                if torch._C._current_graph_task_id() == -1:  # autograd does not run: a forward, or W
                    seen.add(module)
                return module(*inputs)

            return run

        return on_data_axis(schedule="zb_h1", zero=2, stage_compiler=compiler), len(seen)

    found = run_strict(halved, 4)
    wanted = run_strict(lambda rank: on_data_axis(schedule="1f1b", zero=2), 4)
    for (state, outside), plain in zip(found, wanted, strict=True):
        assert outside == 2, "the forward and W"
        assert_trained_alike(state, plain)


def with_shards() -> list[dict[str, Tensor]]:
    fxpipe.init()
    compiled: dict[str, Any] = {"schedule": "zb_h1", "stage_compiler": EAGER}
    return [on_data_axis(zero=3, **options) for options in ({"schedule": "1f1b"}, compiled)]


def test_of_shards_i_makes_whole_gradients(pool: Pool) -> None:
    for plain, state in pool.run(with_shards, ranks=4):
        assert_trained_alike(state, plain)


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
