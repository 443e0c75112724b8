"""What a model may return as its loss, and what comes back of it: sums, counts and metrics."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.stage.loss import StepLoss, columns_of, combined_metrics, read_loss
from tests.strict_transport import run_strict

HERE = torch.get_default_device()


def test_every_real_number_beside_the_loss_is_a_metric() -> None:
    result = {
        "loss": torch.tensor(1.0),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "count": torch.tensor(3),
        "flag": torch.tensor(True),
        "rows": 4,
        "rate": 0.25,
        "on": False,
        "vector": torch.ones(2),
        "complex": torch.tensor(1j),
        "text": "no number",
        "nothing": None,
    }
    assert list(read_loss(result).metrics) == ["half", "count", "flag", "rows", "rate", "on"]


OTHER_LOSSES: dict[str, Any] = {
    r"a mean .* in one {} and a fxpipe\.Sum .* in another": fxpipe.Sum(torch.tensor(1.0), 2),
    r"of torch\.float32 .* in one {} and .* of torch\.float64": {"loss": torch.tensor(1.0).double(), "a": 1.0},
    r"metrics \['a'\] in one {} and .* metrics \['a', 'b'\]": {"loss": torch.tensor(1.0), "a": 1.0, "b": 2.0},
}


@pytest.mark.parametrize("told", OTHER_LOSSES)
def test_losses_of_several_kinds_have_no_mean(told: str) -> None:
    """Which of them were last would decide what comes back."""
    step = StepLoss()
    step.add(read_loss({"loss": torch.tensor(1.0), "a": 1.0}), 0.5, 0)
    step.add(read_loss(OTHER_LOSSES[told]), 0.0, 1)  # which adds nothing
    with pytest.raises(fxpipe.RunError, match=told.format("micro-batch")):
        step.add(read_loss(OTHER_LOSSES[told]), 0.5, 2)


class Turning(nn.Module):
    """A head in Python whose result is another one after so many micro-batches, which no capture looks at."""

    def __init__(self, result: Any, after: int) -> None:
        super().__init__()
        self.linear, self.result, self.left = nn.Linear(2, 1), result, after

    def forward(self, h: Tensor) -> Any:
        loss = self.linear(h).mean()
        self.left -= 1
        if self.left >= 0:
            return {"loss": loss, "a": loss.detach()}
        result = self.result
        if isinstance(result, dict):
            return {name: loss.to(value.dtype) if name == "loss" else value for name, value in result.items()}
        return fxpipe.Sum(loss, result.count) if isinstance(result, fxpipe.Sum) else loss


@pytest.mark.parametrize("where", ["local", "strict"])
@pytest.mark.parametrize("told", OTHER_LOSSES)
def test_a_kind_of_batch_has_one_kind_of_loss(told: str, where: str) -> None:
    def two_steps() -> None:
        graph = fxpipe.StageGraph.from_callables(
            {"body": nn.Linear(2, 2), "head": Turning(OTHER_LOSSES[told], 2)},
            edges=[("body", "head")],
            inputs={"body": ["x"]},
        )
        forward_backward = fxpipe.compile(graph, fxpipe.Topology([("pipe", 2)]), microbatches=2)
        forward_backward(x=torch.ones(4, 2))
        forward_backward(x=torch.ones(4, 2))

    with pytest.raises(fxpipe.RunError, match=told.format("step")):
        two_steps() if where == "local" else run_strict(lambda rank: two_steps(), 2, 0)


ITEM, NUMBER = re.escape("pass loss_fn=lambda out: out[1] to fxpipe.compile"), "the loss must be one number"
NO_LOSS: list[tuple[Any, str]] = [
    *(
        ({"loss": loss}, "the loss must be one number")
        for loss in (torch.tensor(1), 1.0, torch.ones(2), torch.tensor(1j))
    ),
    ((torch.ones(2), torch.tensor(1.0)), ITEM),
    ({0: torch.ones(2), 1: torch.tensor(1.0)}, ITEM),
]


def test_tensors_that_a_step_does_not_return_are_named_in_containers_too() -> None:
    """As DETR returns the terms of its loss. A Python bool is an option of the model, and no count."""
    one = torch.tensor(1.0)
    result = {"loss": one, "loss_dict": {"loss_ce": one}, "logits": torch.ones(2), "sizes": (3, 4), "on": True, "n": 3}
    part = read_loss(result)
    assert part.left_out == ("loss_dict", "logits")
    assert columns_of(part.metrics) == {("on", "mean"): True, ("n", "integer"): 3}


@pytest.mark.parametrize(("result", "told"), NO_LOSS)
def test_what_is_no_loss_is_refused(result: Any, told: str) -> None:
    with pytest.raises(fxpipe.RunError, match=told):
        read_loss(result)


@pytest.mark.parametrize(
    ("loss", "metric"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_integers_are_added_and_floats_averaged_in_at_least_float32(loss: torch.dtype, metric: torch.dtype) -> None:
    step = StepLoss()
    for microbatch, (share, count, rows, rate, total) in enumerate([(0.25, 3, 1001, 1.0, 5), (0.75, 7, 1001, 0.0, 2)]):
        value = torch.tensor(1 + 2**-6, dtype=loss)  # times 1/4, and 3/4: bfloat16 would round it
        accuracy = fxpipe.Sum(torch.tensor(total, dtype=loss), count)
        result = {"loss": value, "count": torch.tensor(count), "rows": rows, "rate": rate, "accuracy": accuracy}
        step.add(read_loss(result), share, microbatch)
    metrics = combined_metrics(step.metrics(), loss)
    wanted = {"count": 10, "rows": 2002, "rate": 0.25, "accuracy": torch.tensor(0.7, dtype=metric).item()}
    assert {name: value.item() for name, value in metrics.items()} == wanted
    assert [value.dtype for value in metrics.values()] == [torch.int64, torch.int64, metric, metric]
    assert step.value().dtype == metric
    assert step.value() == 1 + 2**-6


@pytest.mark.parametrize("count", [2, 2.0, torch.tensor(2), torch.tensor([2.0]), torch.ones(2).sum()])
def test_a_count_is_a_number_or_a_tensor_and_keeps_no_graph(count: Any) -> None:
    step = StepLoss()
    for microbatch in range(3):
        step.add(read_loss(fxpipe.Sum(torch.tensor(5.0), count)), 1 / 3, microbatch)
    numbers = step.numbers((), HERE)
    assert numbers.tolist() == [15.0, 6.0]
    assert not numbers.requires_grad


def test_a_default_device_changes_nothing() -> None:
    step = StepLoss()
    with torch.device("meta"):
        step.add(read_loss({"loss": fxpipe.Sum(torch.tensor(5.0, device=HERE), 2), "rows": 3}), 1.0, 0)
        assert step.numbers((("rows", "integer"),), HERE).tolist() == [5.0, 2.0, 3.0]


class Soft(nn.Module):
    """Items that count by learned weights, held fixed, and metrics of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = fxpipe.stage_boundary(self.one(x))
        y = self.two(h)
        weights = y.sigmoid()
        total = fxpipe.Sum((weights * y.square()).sum(), weights.sum().detach())
        rate = fxpipe.Sum((y > 0).sum(), y.shape[0])
        return {
            "loss": total,
            "positive": (y > 0).sum(),
            "any": (y > 0).any(),
            "rows": y.shape[0],
            "rate": rate,
            "y": y,
        }


@pytest.mark.parametrize(
    "engine",
    [lambda body: [body(0)], lambda body: run_strict(body, 2)],
    ids=["local", "strict"],
)
def test_counts_out_of_a_graph_and_metrics_of_all_types(engine: Callable[[Callable[[int], Any]], list[Any]]) -> None:
    def built() -> Soft:
        torch.manual_seed(0)
        return Soft()

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    model = built()
    parts = [model(part) for part in x.chunk(3)]
    count = sum(part["loss"].count.detach() for part in parts)
    (sum(part["loss"].total for part in parts) / count).backward()
    loss = sum(part["loss"].total.detach() for part in parts) / count
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    metrics = {name: torch.tensor(sum(int(part[name]) for part in parts)) for name in ("positive", "any", "rows")}
    metrics["rate"] = metrics["positive"] / metrics["rows"]

    def body(rank: int) -> Any:
        forward_backward = fxpipe.compile(built(), fxpipe.Topology([("pipe", 2)]), microbatches=3)
        loss = forward_backward(x)
        output = forward_backward.evaluate(x, outputs="all")
        numbers = [int(number) for number in (output["positive"], output["any"], output["rows"], *output["rate"])]
        return loss, forward_backward.metrics, {n: p.grad for n, p in forward_backward.named_parameters()}, numbers

    for got_loss, got_metrics, got_gradients, evaluated in engine(body):
        assert not got_loss.requires_grad
        torch.testing.assert_close(got_loss, loss)
        assert got_metrics.keys() == metrics.keys()
        for name, value in metrics.items():
            torch.testing.assert_close(got_metrics[name], value)
        assert evaluated == [*(metrics[name].item() for name in ("positive", "any", "rows", "positive", "rows"))]
        for name, gradient in got_gradients.items():
            torch.testing.assert_close(gradient, gradients[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_micro_batchs_weight_is_to_the_bit_that_of_a_loss_multiplied_by_it(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    loss_fn = lambda output, target: (output - target).square().mean()  # noqa: E731
    x, y = torch.randn(11, 4).to(dtype), torch.randn(11, 1).to(dtype)
    losses = []
    for part, target in zip(x.split([4, 4, 3]), y.split([4, 4, 3]), strict=True):
        loss = loss_fn(model(part), target)
        (loss * (len(part) / 11)).backward()
        losses.append(loss.detach().to(torch.promote_types(dtype, torch.float32)) * (len(part) / 11))
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 1)]), microbatches=3, loss_fn=loss_fn)
    assert torch.equal(forward_backward(x, target=y), losses[0] + losses[1] + losses[2])
    for parameter, gradient in zip(forward_backward.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


class Pair(nn.Module):
    """Returns outputs and, where it is given targets, its loss: nanoGPT's form."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y = self.two(self.one(x).tanh())
        return y, None if target is None else (y - target).square().mean()


class Second(nn.Module):
    """A loss without parameters, called as a module is."""

    def forward(self, out: tuple[Tensor, Tensor], *, which: int = 1) -> Tensor:
        return out[which]


OF_OUTPUT_ALONE: dict[str, Callable[..., Tensor]] = {
    "a function": lambda out: out[1],
    "a module": Second(),
    "a method of a module": Second().forward,
    "a partial function": functools.partial(Second().forward, which=1),
}


@pytest.mark.parametrize("how", OF_OUTPUT_ALONE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_function_of_one_argument_needs_no_target(how: str, ranks: int) -> None:
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    plain = Pair()
    loss = sum(plain(*part)[1] / 3 for part in zip(x.chunk(3), y.chunk(3), strict=True))
    loss.backward()

    def body(rank: int) -> None:
        options: dict[str, Any] = {"boundaries": ["two"], "microbatches": 3, "example_args": (x, y)}
        two = fxpipe.Topology([("pipe", 2)])
        forward_backward = fxpipe.compile(Pair(), two, loss_fn=OF_OUTPUT_ALONE[how], **options)
        torch.testing.assert_close(forward_backward(x, y), loss.detach())
        for name, parameter in forward_backward.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        # evaluation gives what the model returns, the loss where that is asked for, and needs no targets
        output, with_it = forward_backward.evaluate(x, y, outputs="all")
        torch.testing.assert_close(output, plain(x)[0].detach())
        torch.testing.assert_close(with_it, loss.detach())
        torch.testing.assert_close(forward_backward.evaluate(x, y, outputs="loss"), loss.detach())
        output, without = forward_backward.evaluate(x, outputs="all")
        torch.testing.assert_close(output, plain(x)[0].detach())
        assert without is None

    body(0) if ranks == 1 else run_strict(body, ranks)


def test_an_optional_target_is_taken_where_it_is_given() -> None:
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    plain = nn.Linear(3, 1)

    def loss_fn(output: Tensor, target: Tensor | float = 3.0) -> Tensor:
        return (output - target).square().mean()

    options: dict[str, Any] = {"microbatches": 1, "loss_fn": loss_fn, "example_args": (x,)}
    forward_backward = fxpipe.compile(plain, fxpipe.Topology([("pipe", 1)]), **options)
    assert torch.equal(forward_backward(x), loss_fn(plain(x)).detach())
    assert torch.equal(forward_backward(x, target=y), loss_fn(plain(x), y).detach())
    assert torch.equal(forward_backward.evaluate(x), plain(x).detach())
    assert torch.equal(forward_backward.evaluate(x, outputs="loss"), loss_fn(plain(x)).detach())


def test_a_preview_asks_for_no_target_that_the_loss_does_not_take() -> None:
    options: dict[str, Any] = {"boundaries": "auto", "example_args": (torch.randn(6, 3), torch.randn(6, 1))}
    two = fxpipe.Topology([("pipe", 2)])
    assert len(fxpipe.preview(Pair(), two, microbatches=2, loss_fn=lambda out: out[1], **options).graph) == 2
