"""What is refused: a clear error on every rank, and nobody left waiting: transports wait for half an hour."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.pool import Pool
from tests.strict_transport import run_strict
from tests.thinned import every


class Chain(nn.Module):
    """Four stages in a row, and a scalar loss."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = fxpipe.stage_boundary(torch.relu(layer(x)))
        return ((self.layers[-1](x) - y) ** 2).mean()


class Unmarked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x) - y).square().mean()


class Nothing(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fxpipe.stage_boundary(None)
        return super().forward(x, y)


class Branches(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return super().forward(x, y)


class Autocast(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, y)


class Vector(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * torch.ones_like(y[:, 0])


class Frozen(Chain):
    """The output stage is trainable, but the loss is cut from it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y).detach()


class BrokenStage(Chain):
    """The second stage fails when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Linear(5, 4)


def batch(rows: int = 8, others: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, 4), torch.zeros(rows if others is None else others, 4)


def chain(**options: object) -> fxpipe.ForwardBackward:
    return fxpipe.compile(Chain(), fxpipe.Topology([("pipe", 4)]), microbatches=4, **options)  # type: ignore[arg-type]


def no_boundary(rank: int) -> None:
    fxpipe.compile(Unmarked(), fxpipe.Topology([("pipe", 4)]))


def boundary_on_nothing(rank: int) -> None:
    fxpipe.compile(Nothing(), fxpipe.Topology([("pipe", 4)]))


def value_branch(rank: int) -> None:
    fxpipe.compile(Branches(), fxpipe.Topology([("pipe", 4)]))


def autocast_inside(rank: int) -> None:
    fxpipe.compile(Autocast(), fxpipe.Topology([("pipe", 4)]))


def two_stages_on_four_ranks(rank: int) -> None:
    model = Chain()
    model.layers = model.layers[:2]
    fxpipe.compile(model, fxpipe.Topology([("pipe", 4)]))


def vector_loss(rank: int) -> None:
    fxpipe.compile(Vector(), fxpipe.Topology([("pipe", 4)]), microbatches=4)(*batch())


def detached_loss(rank: int) -> None:
    fxpipe.compile(Frozen(), fxpipe.Topology([("pipe", 4)]), microbatches=4)(*batch())


def too_few_rows(rank: int) -> None:
    chain()(*batch(3))


def different_lengths(rank: int) -> None:
    chain()(*batch(8, others=6))


def different_lengths_between_ranks(rank: int) -> None:
    chain()(*batch(8 if rank else 12))


def missing_input(rank: int) -> None:
    chain()(batch()[0])


def input_that_a_stage_needs(rank: int) -> None:
    x, y = batch()
    chain()(x, None if rank == 3 else y)


def another_model_on_one_rank(rank: int) -> None:
    model = Chain()
    if rank == 2:
        model.layers[1] = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fxpipe.compile(model, fxpipe.Topology([("pipe", 4)]), microbatches=4)


def a_model_that_one_rank_cannot_compile(rank: int) -> None:
    fxpipe.compile(Branches() if rank == 1 else Chain(), fxpipe.Topology([("pipe", 4)]), microbatches=4)


def world_size_that_does_not_fit(rank: int) -> None:
    fxpipe.compile(Chain(), fxpipe.Topology([("pipe", 3)]))


def unknown_schedule(rank: int) -> None:
    chain(schedule="1f1bb")


def unknown_tracer(rank: int) -> None:
    chain(tracer="symbolik")


def a_stage_that_fails(rank: int) -> None:
    fxpipe.compile(BrokenStage(), fxpipe.Topology([("pipe", 4)]), microbatches=4)(*batch())


def a_weight_that_is_negative(rank: int) -> None:
    chain(loss_weight=lambda x, y: -1.0)(*batch())


def one_replica_with_too_few_rows(rank: int) -> None:
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    forward_backward = fxpipe.compile(Chain(), topology, microbatches=4)
    forward_backward(*batch(2 if rank % 2 else 8))


THIS_FILE = "test_refusals.py"
REFUSALS: list[tuple[Callable[[int], None], type[Exception], str]] = [
    (no_boundary, fxpipe.PartitionError, r"4 pipe ranks, but the model has 1 stage .*no stage_boundary was reached"),
    (boundary_on_nothing, fxpipe.TraceError, rf"NoneType(.|\n)*{THIS_FILE}.*\n.*stage_boundary\(None\)"),
    (value_branch, fxpipe.TraceError, rf"branches on the value(.|\n)*{THIS_FILE}.*\n.*if x.sum\(\) > 0"),
    (autocast_inside, fxpipe.TraceError, rf"autocast(.|\n)*{THIS_FILE}"),
    (two_stages_on_four_ranks, fxpipe.PartitionError, r"4 pipe ranks, but the model has 2 stages"),
    (vector_loss, fxpipe.RunError, r"the loss must be one number, .*shape \(2,\)"),
    (detached_loss, fxpipe.RunError, r"the loss needs no gradient"),
    (too_few_rows, fxpipe.RunError, r"3 rows cannot be cut into 4 micro-batches"),
    (different_lengths, fxpipe.RunError, r"different numbers of rows \(x: 8, y: 6\)"),
    (different_lengths_between_ranks, fxpipe.RunError, r"'x' differs.*rank 0 has \[12, 4\], rank 1 has \[8, 4\]"),
    (missing_input, fxpipe.RunError, r"missing inputs: y"),
    (input_that_a_stage_needs, fxpipe.RunError, r"rank 3 \(pipe 3\) needs input 'y', but was given None"),
    (
        another_model_on_one_rank,
        fxpipe.RunError,
        r"rank 0 .* and rank 2 \(pipe 2\) have compiled different programs",
    ),
    (a_model_that_one_rank_cannot_compile, fxpipe.FxpipeError, r"branches on the value"),
    (world_size_that_does_not_fit, fxpipe.TopologyError, r"3 ranks \(pipe 3\), but 4 processes"),
    (unknown_schedule, fxpipe.ScheduleError, r'unknown schedule .1f1bb.; did you mean "1f1b"'),
    (unknown_tracer, fxpipe.TraceError, r'unknown tracer .symbolik.; did you mean "symbolic"'),
    (a_stage_that_fails, Exception, r"mat1 and mat2 shapes cannot be multiplied"),
    (a_weight_that_is_negative, fxpipe.RunError, r"weights are finite and not negative"),
    (one_replica_with_too_few_rows, fxpipe.RunError, r"2 rows cannot be cut into 4 micro-batches"),
]


def refusal(function: Callable[[int], None]) -> tuple[type[BaseException] | None, str]:
    """(type of the error, its text) on this rank."""
    fxpipe.init()
    try:
        function(torch.distributed.get_rank())
    except Exception as error:
        return type(error), str(error)
    return None, ""


ON_PROCESSES = every(4, REFUSALS)
"""Ranks exchange there what they do in a strict world, which refuses all of them."""


@pytest.mark.parametrize(("function", "error", "text"), ON_PROCESSES, ids=[row[0].__name__ for row in ON_PROCESSES])
def test_refused_on_every_process(
    pool: Pool, function: Callable[[int], None], error: type[Exception], text: str
) -> None:
    for rank, (kind, message) in enumerate(pool.run(refusal, function)):
        assert kind is not None, f"rank {rank} was not refused"
        assert issubclass(kind, (error, fxpipe.RunError)), f"rank {rank}: {kind}: {message}"
        assert re.search(text, message), f"rank {rank}: {message}"


@pytest.mark.parametrize(("function", "error", "text"), REFUSALS, ids=[row[0].__name__ for row in REFUSALS])
def test_refused_in_a_strict_world(function: Callable[[int], None], error: type[Exception], text: str) -> None:
    with pytest.raises((error, fxpipe.RunError)) as caught:
        run_strict(function, 4)
    assert re.search(text, str(caught.value)), str(caught.value)


def test_a_refused_batch_loses_nothing_and_the_next_one_works() -> None:
    torch.manual_seed(0)
    model = Chain()
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 4)]), microbatches=4)
    first = forward_backward(*batch())
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for bad in (batch(3), batch(8, others=6)):
        with pytest.raises(fxpipe.RunError):
            forward_backward(*bad)
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))
    forward_backward.zero_grad()
    assert torch.equal(forward_backward(*batch()), first)


def fails_twice(rank: int) -> str:
    """What the call after a failed step says."""
    forward_backward = fxpipe.compile(BrokenStage(), fxpipe.Topology([("pipe", 4)]), microbatches=4)
    with pytest.raises((RuntimeError, fxpipe.RunError), match="mat1 and mat2"):
        forward_backward(*batch())
    with pytest.raises(fxpipe.RunError) as again:
        forward_backward(*batch())
    with pytest.raises(fxpipe.RunError, match="closed the connections"):
        forward_backward.state_dict(full=True)
    return str(again.value)


def test_after_a_step_has_failed_the_next_call_says_so(pool: Pool) -> None:
    for text in pool.run(fails_twice, 0):
        assert re.search(r"an earlier step failed .*mat1 and mat2.*compile again", text)


def test_one_process_alone_goes_on_after_an_error() -> None:
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Chain(), fxpipe.Topology([("pipe", 4)]), microbatches=4)
    expected = forward_backward(*batch())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        forward_backward(torch.ones(8, 5), torch.zeros(8, 4))
    forward_backward.zero_grad()
    assert torch.equal(forward_backward(*batch()), expected)
