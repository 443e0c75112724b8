"""How ``evaluate`` puts the outputs of micro-batches together."""

from __future__ import annotations

import torch
from torch import Tensor

import fxpipe
from tests.two_ranks import TWO, Pooled, Two


def test_evaluate_weighs_a_loss_as_training_does() -> None:
    class Masked(Two):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            errors = self.b(fxpipe.stage_boundary(self.a(x))).square().mean(1)
            return (errors * mask).sum() / mask.sum()

    forward_backward = fxpipe.compile(Masked(), TWO, microbatches=3, loss_weight=lambda x, mask: mask.sum())
    x, mask = torch.randn(6, 4), torch.tensor([1.0, 1, 0, 0, 1, 0])
    assert torch.allclose(forward_backward.evaluate(x, mask), forward_backward(x, mask))


def test_evaluate_joins_rows_where_they_are() -> None:
    model = Pooled()
    forward_backward = fxpipe.compile(
        model,
        TWO,
        loss_fn=lambda y, t: (y - t).mean(),
        loss_weight=lambda x, target: target.sum(),  # of no use where there is no target
        microbatches=2,
        batch_dim={"x": 1},
    )
    x = torch.randn(5, 4, 4)
    assert torch.allclose(forward_backward.evaluate(x), model(x), atol=1e-6)


def test_evaluate_gives_an_output_without_rows_for_each_micro_batch() -> None:
    class Summed(Two):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.b(fxpipe.stage_boundary(self.a(x))).sum(0)

    model = Summed()
    forward_backward = fxpipe.compile(model, TWO, loss_fn=lambda y, t: y.mean(), microbatches=2)
    x = torch.randn(6, 4)
    torch.testing.assert_close(list(forward_backward.evaluate(x)), [model(part).detach() for part in x.chunk(2)])


def test_evaluate_needs_no_table_of_the_users_own() -> None:
    table = fxpipe.schedules.build("gpipe", [(0, 1)], 4)
    model = Two()
    forward_backward = fxpipe.compile(model, TWO, microbatches=4, schedule=table)
    x = torch.randn(2, 4)
    assert torch.allclose(forward_backward.evaluate(x), model(x))
