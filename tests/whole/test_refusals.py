"""What is refused: a clear error on every rank, and nobody left waiting: transports wait for half an hour."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.device import DEVICE
from tests.models import WIDTH, Chain
from tests.pool import Pool
from tests.strict_transport import run_strict
from tests.two_ranks import TWO, Two


class Branches(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return super().forward(x, y)


class Frozen(Chain):
    """The output stage is trainable, but the loss is cut from it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y).detach()


class BrokenStage(Chain):
    """The second stage fails when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Linear(5, WIDTH)


def batch(rows: int = 8, others: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, WIDTH), torch.zeros(rows if others is None else others, WIDTH)


def chain() -> fxpipe.ForwardBackward:
    return fxpipe.compile(Chain(), fxpipe.Topology([("pipe", 4)]), microbatches=4)


def detached_loss(rank: int) -> None:
    fxpipe.compile(Frozen(), fxpipe.Topology([("pipe", 4)]), microbatches=4)(*batch())


def different_lengths_between_ranks(rank: int) -> None:
    chain()(*batch(8 if rank else 12))


def input_that_a_stage_needs(rank: int) -> None:
    x, y = batch()
    chain()(x, None if rank == 3 else y)


def another_model_on_one_rank(rank: int) -> None:
    model = Chain()
    if rank == 2:
        model.layers[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    fxpipe.compile(model, fxpipe.Topology([("pipe", 4)]), microbatches=4)


def a_model_that_one_rank_cannot_compile(rank: int) -> None:
    fxpipe.compile(Branches() if rank == 1 else Chain(), fxpipe.Topology([("pipe", 4)]), microbatches=4)


def world_size_that_does_not_fit(rank: int) -> None:
    fxpipe.compile(Chain(), fxpipe.Topology([("pipe", 3)]))


def a_stage_that_fails(rank: int) -> None:
    fxpipe.compile(BrokenStage(), fxpipe.Topology([("pipe", 4)]), microbatches=4)(*batch())


def one_replica_with_too_few_rows(rank: int) -> None:
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    forward_backward = fxpipe.compile(Chain(), topology, microbatches=4)
    forward_backward(*batch(2 if rank % 2 else 8))


REFUSALS: list[tuple[Callable[[int], None], type[Exception], str]] = [
    (detached_loss, fxpipe.RunError, r"the loss needs no gradient"),
    (
        different_lengths_between_ranks,
        fxpipe.RunError,
        r"'x' differs.*rank 0 has \[\(12, 6\)\], rank 1 has \[\(8, 6\)\]",
    ),
    (input_that_a_stage_needs, fxpipe.RunError, r"rank 3 \(pipe 3\) needs input 'y', but was given None"),
    (
        another_model_on_one_rank,
        fxpipe.RunError,
        r"rank 0 .* and rank 2 \(pipe 2\) have compiled different programs",
    ),
    (a_model_that_one_rank_cannot_compile, fxpipe.FxpipeError, r"branches on the value"),
    (world_size_that_does_not_fit, fxpipe.TopologyError, r"3 ranks \(pipe 3\), but 4 processes"),
    (a_stage_that_fails, Exception, r"mat1 and mat2 shapes cannot be multiplied"),
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


@pytest.mark.parametrize(("function", "error", "text"), REFUSALS, ids=[row[0].__name__ for row in REFUSALS])
def test_refused_on_every_process(
    pool: Pool, function: Callable[[int], None], error: type[Exception], text: str
) -> None:
    for rank, (kind, message) in enumerate(pool.run(refusal, function)):
        assert kind is not None, f"rank {rank} was not refused"
        assert issubclass(kind, (error, fxpipe.RunError)), f"rank {rank}: {kind}: {message}"
        assert re.search(text, message), f"rank {rank}: {message}"


def test_a_refused_batch_loses_nothing_and_the_next_one_works() -> None:
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


# --- ranks that were given other options, numbers or batches ---


def test_constants_made_with_different_seeds_are_told_apart() -> None:
    class Noisy(Two):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.randn(4)  # registered nowhere

        def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
            return super().forward(x + self.noise, mode)

    def body(rank: int) -> None:
        torch.manual_seed(rank)
        fxpipe.compile(Noisy(), TWO, microbatches=2)

    with pytest.raises(fxpipe.RunError, match=r"different programs(.|\n)*constant \[4\]"):
        run_strict(body, 2)


def test_a_batch_of_other_strides_under_autocast_is_another_kind() -> None:
    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        forward_backward = fxpipe.compile(Two(), TWO, microbatches=2)
        x = torch.arange(16.0).view(4, 4)
        losses = [forward_backward(x)]
        with torch.autocast(DEVICE, torch.bfloat16):
            losses.append(forward_backward(x.t().contiguous().t()))
        return losses

    for one, other in run_strict(body, 2):
        assert torch.allclose(one, other.float(), rtol=0.05)
