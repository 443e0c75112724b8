"""The backward of a ``Sum`` begins with 1 / the step's items, where inputs decide them: whatever sees a gradient on its
way, a hook or a function's own backward, sees plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.pool import Pool, RankFailed
from tests.thinned import in_turn

ROWS, WIDTH, CLASSES, MICROBATCHES = 8, 6, 4, 4
LEFT_OUT = -100


class Balanced(torch.autograd.Function):
    """Adds the gradient of a loss of its own, as DeepSeek's does of its balance loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class Net(nn.Module):
    """``count``: how its items are counted. ``balanced``: with a loss injected by a function."""

    def __init__(self, count: str = "labels", balanced: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.count, self.balanced = count, balanced

    def forward(self, x: Tensor, y: Tensor) -> fxpipe.Sum:
        h = self.a(x).tanh()
        if self.balanced:
            h = Balanced.apply(h, h.square().mean())
        logits = self.b(h)
        total = F.cross_entropy(logits, y, reduction="sum", ignore_index=LEFT_OUT)
        if self.count == "labels":
            return fxpipe.Sum(total, (y != LEFT_OUT).sum())
        return fxpipe.Sum(total, y.numel() if self.count == "size" else (logits > -1e3).sum() // CLASSES)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)
    return x, torch.where(torch.arange(ROWS) % 3 == 1, LEFT_OUT, y)


def clamped(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    for _, parameter in named:
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def decayed(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    for _, parameter in named:
        parameter.register_hook(lambda gradient, p=parameter: gradient + 0.01 * p.detach())


def stepped(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """An optimizer for each parameter steps behind its last gradient."""
    for _, parameter in named:
        optimizer, seen = torch.optim.SGD([parameter], lr=0.1, momentum=0.9), [0]

        def step(_: Tensor, optimizer: torch.optim.SGD = optimizer, seen: list[int] = seen) -> None:
            seen[0] += 1
            if seen[0] % MICROBATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


Install = Callable[[Iterable[tuple[str, nn.Parameter]]], None]


def compiled(model: nn.Module, data: int, pipe: int, **options: Any) -> fxpipe.ForwardBackward:
    x, y = (part[: ROWS // data] for part in batch())
    options |= {"boundaries": ["b"], "microbatches": MICROBATCHES // data, "example_args": (x, y)}
    return fxpipe.compile(model, fxpipe.Topology([("pipe", pipe), ("data", data)]), **options)


def trained(model: nn.Module, install: Install | None, data: int, pipe: int, **options: Any) -> dict[str, Tensor]:
    """The parameters behind three steps, over this run's replicas."""
    model, parts = copy.deepcopy(model), batch()
    forward_backward = compiled(model, data, pipe, **options)
    if install is not None:
        install(forward_backward.named_parameters())
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    mine = [part.chunk(data)[forward_backward.topology.data_rank] for part in parts]
    for _ in range(3):
        optimizer.zero_grad()
        forward_backward(*mine)
        optimizer.step()
    return forward_backward.state_dict(full=True)


def plainly(model: nn.Module, install: Install | None) -> dict[str, Tensor]:
    model, (x, y) = copy.deepcopy(model), batch()
    if install is not None:
        install(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    items = ROWS if model.count == "size" else int((y != LEFT_OUT).sum())
    for _ in range(3):
        optimizer.zero_grad()
        for part in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (model(*part).total / items).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("install", "count", "tracer", "pipe"),
    [
        (clamped, "labels", "symbolic", 1),
        (clamped, "size", "record", 2),
        (decayed, "labels", "export", 2),
        (decayed, "size", "symbolic", 1),
        (stepped, "labels", "record", 2),
        (stepped, "size", "export", 1),
    ],
)
def test_hooks_see_the_gradients_of_plain_pytorch(install: Install, count: str, tracer: str, pipe: int) -> None:
    """As plain PyTorch runs it, to the bit."""
    model = Net(count)
    wanted = plainly(model, install)
    for name, tensor in trained(model, install, 1, pipe, tracer=tracer).items():
        assert torch.equal(tensor, wanted[name]), name


def test_so_do_functions_whose_backward_adds_a_gradient_of_its_own() -> None:
    model = Net(balanced=True)
    wanted = plainly(model, None)
    for name, tensor in trained(model, None, 1, 2).items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.processes
@pytest.mark.parametrize(("pipe", "options"), in_turn([1, 2], [{}, {"zero": 1}]))
def test_and_so_they_do_on_replicas_whose_counts_differ(pipe: int, options: dict[str, Any], pool: Pool) -> None:
    model = Net(balanced=True)
    wanted = plainly(model, clamped)
    for run in pool.run(trained, model, clamped, 2, pipe, ranks=2 * pipe):
        for name, tensor in run.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-7)


# --- a count that a stage makes is known when the backward is over ---


def test_a_count_of_what_stages_make_divides_behind_the_backward() -> None:
    model, (x, y) = Net("logits"), batch()
    plain = copy.deepcopy(model)
    forward_backward = compiled(model, 1, 2)
    forward_backward(x, y)
    total, items = plain(x, y)
    (total / items).backward()
    for name, parameter in forward_backward.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


class OfAll(nn.Module):
    """A contrastive loss over the gathered batch, a Sum of one item."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> fxpipe.Sum:
        h, x = fxpipe.stage_boundary((self.a(x), x), name="loss", gather="batch")
        return fxpipe.Sum(F.cross_entropy(self.b(h) @ x.T, torch.arange(x.shape[0], device=x.device)), 1)


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_the_items_of_a_loss_of_all_micro_batches_are_counted_once(tracer: str) -> None:
    model, (x, _) = OfAll(), batch()
    plain = copy.deepcopy(model)
    forward_backward = fxpipe.compile(
        model, fxpipe.Topology([("pipe", 2)]), microbatches=MICROBATCHES, example_args=(x,), tracer=tracer
    )
    forward_backward(x)
    plain(x).total.backward()
    for name, parameter in forward_backward.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_a_hook_that_would_be_given_the_gradient_of_the_sum_is_refused() -> None:
    forward_backward = compiled(Net("logits"), 1, 2)
    clamped(forward_backward.named_parameters())
    with pytest.raises(fxpipe.RunError, match=r"parameter 'a.weight' has a hook, .* Compute the count from the inputs"):
        forward_backward(*batch())


def test_a_function_that_adds_its_own_gradient_is_refused_there() -> None:
    with pytest.raises(fxpipe.TraceError, match=r"the gradient of a.weight .* is not proportional"):
        compiled(Net("logits", balanced=True), 1, 2)


@pytest.mark.processes
def test_replicas_whose_hooks_write_parameters_are_refused(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"a hook has written parameter '[ab].weight' in the backward"):
        pool.run(trained, Net(), stepped_at_once, 2, 1, ranks=2)


def stepped_at_once(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    for _, parameter in named:
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
