"""Whole-batch truth: whatever is masked where, loss and gradients are those of the batch computed in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import Engines, assert_same, gradients_of, replica_of
from tests.pool import Pool
from tests.thinned import in_turn

IGNORED = -100
CLASSES, LENGTH, WIDTH = 7, 4, 6
MICROBATCHES = 4
TOLERANCE = 1e-12


class Tagger(nn.Module):
    """Logits for each token; the loss in the form that ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.loss = LOSSES[kind]

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        h = stage_boundary(torch.tanh(self.mix(self.embed(ids))))
        return self.loss(self.head(h).flatten(0, 1), labels.flatten())


def total_and_count(logits: Tensor, labels: Tensor) -> fxpipe.Sum:
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return fxpipe.Sum(total, (labels != IGNORED).sum())


def in_a_dict(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    return {"loss": total_and_count(logits, labels)}


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


LOSSES = {"Sum": total_and_count, "Sum in a dict": in_a_dict, "loss_weight": mean}


def tokens_counted(ids: Tensor, labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def model(kind: str) -> Tagger:
    torch.manual_seed(0)
    return Tagger(kind).double()


def batch(rows: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """A fifth of the tokens is ignored, and everything in rows 3 to 5, of which one micro-batch at least consists."""
    generator = torch.Generator().manual_seed(10 + number)
    ids = torch.randint(0, 11, (rows, LENGTH), generator=generator)
    labels = torch.randint(0, CLASSES, (rows, LENGTH), generator=generator)
    labels[torch.rand(rows, LENGTH, generator=generator) < 0.2] = IGNORED
    labels[3:6] = IGNORED
    return ids, labels


def whole(rows: int, batches: int = 1) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Plain PyTorch: each batch in one piece; the gradients of all of them together."""
    plain = model("loss_weight")
    losses = []
    for number in range(batches):
        loss = plain(*batch(rows, number))
        loss.backward()
        losses.append(loss.detach())
    return losses, gradients_of(plain.named_parameters())


def steps(
    kind: str, topology: Topology, rows: tuple[int, ...], batches: int = 1
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Gradients accumulate over the batches, as in ``whole``."""
    forward_backward = fxpipe.compile(
        model(kind),
        topology,
        microbatches=MICROBATCHES,
        loss_weight=tokens_counted if kind == "loss_weight" else None,
    )
    replica = replica_of(topology) if len(rows) > 1 else 0
    losses = []
    for number in range(batches):
        mine = [tensor.split(list(rows))[replica] for tensor in batch(sum(rows), number)]
        losses.append(forward_backward(*mine))
    return losses, gradients_of(forward_backward.named_parameters())


def assert_whole(results: list[Any], rows: int, batches: int = 1) -> None:
    losses, gradients = whole(rows, batches)
    seen: set[str] = set()
    for got_losses, got_gradients in results:
        for got, wanted in zip(got_losses, losses, strict=True):
            assert got.dtype == torch.float64
            assert abs(got - wanted) <= TOLERANCE * abs(wanted)
        for name, gradient in got_gradients.items():
            assert_same(gradient, gradients[name], name, TOLERANCE)
        seen |= got_gradients.keys()
    assert seen == gradients.keys()


@pytest.mark.parametrize(
    ("kind", "rows", "engine"),
    in_turn(list(LOSSES), [(8,), (11,), (8, 8), (10, 7)], ["local", "strict 1", "strict 2", "distributed"]),
)
def test_loss_and_gradients_are_the_whole_batchs_and_accumulate_over_calls(
    kind: str, rows: tuple[int, ...], engine: str, engines: Engines
) -> None:
    """Of one replica or two, with the rows of each."""
    labels = batch(sum(rows))[1].split(list(rows))[0]
    assert 0 in [(part != IGNORED).sum().item() for part in labels.tensor_split(MICROBATCHES)]
    topology = Topology([("pipe", 2), ("data", len(rows))])
    assert_whole(engines(engine)(2 * len(rows), steps, kind, topology, rows, 2), sum(rows), 2)


@pytest.mark.parametrize("kind", ["Sum", "loss_weight"])
def test_a_replica_that_is_fully_masked_adds_nothing(kind: str, pool: Pool) -> None:
    losses, gradients = whole(10)
    for got, got_gradients in pool.run(step_with_a_masked_replica, kind):
        assert abs(got - losses[0]) <= TOLERANCE * losses[0]
        for name, gradient in got_gradients.items():
            assert_same(gradient, gradients[name], name, TOLERANCE)


def step_with_a_masked_replica(kind: str) -> tuple[Tensor, dict[str, Tensor | None]]:
    topology = Topology([("pipe", 2), ("data", 2)])
    weigh = tokens_counted if kind == "loss_weight" else None
    forward_backward = fxpipe.compile(model(kind), topology, microbatches=MICROBATCHES, loss_weight=weigh)
    ids, labels = batch(10)
    if replica_of(topology):
        labels = torch.full_like(labels, IGNORED)
    return forward_backward(ids, labels), gradients_of(forward_backward.named_parameters())
