"""Whole-batch truth: whatever is masked where, loss and gradients are those of the batch computed in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import Engine, engine_of, gradients_of, replica_of
from tests.thinned import in_turn, pairwise

IGNORED = -100
CLASSES, LENGTH, WIDTH = 7, 4, 6
MICROBATCHES = 4
TOLERANCE = 1e-12

ROWS = {
    "even": (8, 8),
    "uneven": (10, 7),
}
"""Rows of each replica; with data = 1 they are one batch."""


ONE_REPLICA, TWO_REPLICAS = ["local", "strict 0", "strict 1", "distributed"], ["strict 2", "distributed"]
"""Engines."""


@pytest.fixture(params=ONE_REPLICA)
def one_replica(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param, lambda: request.getfixturevalue("pool"))


@pytest.fixture(params=TWO_REPLICAS)
def two_replicas(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param, lambda: request.getfixturevalue("pool"))


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


def model(kind: str, build: type[Tagger] | None = None) -> Tagger:
    torch.manual_seed(0)
    return (build or Tagger)(kind).double()


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
            gap = (gradient - gradients[name]).abs().max()
            assert gap <= TOLERANCE * gradients[name].abs().max(), f"{name} is off by {gap:.3g}"
        seen |= got_gradients.keys()
    assert seen == gradients.keys()


@pytest.mark.parametrize(
    ("kind", "rows", "one_replica"), pairwise(list(LOSSES), [8, 10, 11], ONE_REPLICA), indirect=["one_replica"]
)
def test_one_replica_has_the_whole_batchs_loss_and_gradients(kind: str, rows: int, one_replica: Engine) -> None:
    assert 0 in [(part != IGNORED).sum().item() for part in batch(rows)[1].tensor_split(MICROBATCHES)]
    assert_whole(one_replica(2, steps, kind, Topology([("pipe", 2)]), (rows,)), rows)


@pytest.mark.parametrize(
    ("kind", "rows", "two_replicas"),
    in_turn(list(LOSSES), list(ROWS.values()), TWO_REPLICAS),
    indirect=["two_replicas"],
)
def test_two_replicas_have_the_whole_batchs_loss_and_gradients(
    kind: str, rows: tuple[int, int], two_replicas: Engine
) -> None:
    labels = batch(sum(rows))[1].split(list(rows))[0]
    assert 0 in [(part != IGNORED).sum().item() for part in labels.tensor_split(MICROBATCHES)]
    topology = Topology([("pipe", 2), ("data", 2)])
    assert_whole(two_replicas(4, steps, kind, topology, rows), sum(rows))


@pytest.mark.parametrize(("kind", "one_replica"), in_turn(list(LOSSES), ONE_REPLICA), indirect=["one_replica"])
def test_gradients_of_whole_batches_accumulate_over_calls(kind: str, one_replica: Engine) -> None:
    assert_whole(one_replica(2, steps, kind, Topology([("pipe", 2)]), (10,), 3), 10, 3)


@pytest.mark.parametrize(("kind", "two_replicas"), in_turn(list(LOSSES), TWO_REPLICAS), indirect=["two_replicas"])
def test_gradients_of_two_replicas_accumulate_over_calls(kind: str, two_replicas: Engine) -> None:
    topology = Topology([("pipe", 2), ("data", 2)])
    assert_whole(two_replicas(4, steps, kind, topology, (10, 7), 3), 17, 3)


class WithAccuracy(Tagger):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return {"loss": super().forward(ids, labels), "share": (labels != IGNORED).double().mean()}


@pytest.mark.parametrize(
    ("kind", "build", "two_replicas"),
    in_turn(["Sum", "loss_weight"], [WithAccuracy, Tagger], TWO_REPLICAS),
    indirect=["two_replicas"],
)
def test_a_replica_that_is_fully_masked_adds_nothing(kind: str, build: type[Tagger], two_replicas: Engine) -> None:
    results = two_replicas(4, steps_with_a_masked_replica, kind, build)
    plain = model("loss_weight")
    loss = plain(*batch(10))
    loss.backward()
    gradients = gradients_of(plain.named_parameters())
    for got, metrics, got_gradients in results:
        assert abs(got - loss) <= TOLERANCE * loss
        assert metrics == ({"share"} if build is WithAccuracy else set())
        for name, gradient in got_gradients.items():
            assert (gradient - gradients[name]).abs().max() <= TOLERANCE * gradients[name].abs().max()


def steps_with_a_masked_replica(kind: str, build: type[Tagger]) -> tuple[Tensor, set[str], dict[str, Tensor | None]]:
    topology = Topology([("pipe", 2), ("data", 2)])
    weigh = tokens_counted if kind == "loss_weight" else None
    forward_backward = fxpipe.compile(model(kind, build), topology, microbatches=MICROBATCHES, loss_weight=weigh)
    ids, labels = batch(10)
    if replica_of(topology):
        labels = torch.full_like(labels, IGNORED)
    loss = forward_backward(ids, labels)
    return loss, set(forward_backward.metrics), gradients_of(forward_backward.named_parameters())
