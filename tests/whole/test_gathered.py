"""A loss over the whole batch: the stage behind a boundary that gathers runs once for a group of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import Engines, assert_gradients, assert_same, gradients_of, replica_of, strict
from tests.pool import Pool
from tests.strict_transport import run_strict
from tests.thinned import every, in_turn, pairwise
from tests.whole.gathered import (
    AsSum,
    Contrastive,
    InADict,
    InGroups,
    LocalLoss,
    OverReplicas,
    batch,
    by_hand,
    cut,
    model,
    store_all,
)

TOLERANCE = 1e-12
Gradients = dict[str, Tensor | None]
Result = tuple[list[Tensor], Gradients]

GATHERED = ["store_all", "group_interleaved", "cached"]
TRACERS = ["symbolic", "export", "record"]
PIPES = {4: (0, 1, 2, 3), 2: (0, 0, 1, 1)}
"""Pipe ranks → placement."""


def step(
    kind: type[nn.Module], topology: Topology, rows: tuple[int, ...], microbatches: int, options: dict[str, Any]
) -> Result:
    """A step on this replica's rows of the batch."""
    built = model(kind)
    group = getattr(built, "group", None)
    forward_backward = fxpipe.compile(
        built,
        topology,
        microbatches=microbatches,
        **{"schedule": store_all(PIPES[topology.size("pipe")], microbatches, group), **options},
    )
    replica = replica_of(topology) if len(rows) > 1 else 0
    mine = [tensor.split(list(rows))[replica] for tensor in batch(sum(rows))]
    if kind is LocalLoss:
        mine.append(torch.full((rows[replica],), replica))
    loss = forward_backward(*mine)
    metrics = [forward_backward.metrics[name] for name in sorted(forward_backward.metrics)]
    return [loss, *metrics], gradients_of(forward_backward.named_parameters())


def on_the_whole_batch(rows: int) -> Result:
    plain = model(Contrastive)
    loss = plain(*batch(rows))
    loss.backward()
    return [loss.detach()], gradients_of(plain.named_parameters())


def assert_alike(results: list[Result], wanted: Result, tolerance: float = TOLERANCE) -> None:
    losses, gradients = wanted
    seen: set[str] = set()
    for got, mine in results:
        for one, other in zip(got, losses, strict=True):
            assert abs(one - other) <= tolerance * abs(other), f"{one} and not {other}"
        for name, gradient in mine.items():
            other = gradients[name]
            assert gradient is not None
            assert other is not None
            assert (gradient - other).abs().max() <= tolerance * other.abs().max(), name
        seen |= mine.keys()
    assert seen == gradients.keys()


@pytest.mark.parametrize(
    ("schedule", "microbatches", "rows", "tracer", "on"),
    in_turn(GATHERED, [3, 1, 4], [24, 11], TRACERS, ["local", "strict 0", "distributed"]),
)
def test_loss_and_gradients_are_the_whole_batchs(
    schedule: str, microbatches: int, rows: int, tracer: str, on: str, engines: Engines
) -> None:
    options = {"tracer": tracer, "example_args": batch(rows), "schedule": schedule}
    results = engines(on)(4, step, Contrastive, Topology([("pipe", 4)]), (rows,), microbatches, options)
    assert_alike(results, on_the_whole_batch(rows))


@pytest.mark.parametrize(
    ("schedule", "microbatches", "rows", "on"),
    [("group_interleaved", 3, 11, "local"), ("cached", 8, 24, "distributed")],
)
def test_bits_are_those_of_a_loop_that_concatenates(
    schedule: str, microbatches: int, rows: int, on: str, engines: Engines
) -> None:
    plain = model(Contrastive)
    loss = by_hand(plain, cut(batch(rows), microbatches))
    wanted = gradients_of(plain.named_parameters())
    for got, mine in engines(on)(
        4, step, Contrastive, Topology([("pipe", 4)]), (rows,), microbatches, {"schedule": schedule}
    ):
        assert torch.equal(got[0], loss)
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in mine.items())


@pytest.mark.parametrize(
    ("kind", "schedule", "microbatches", "rows", "on"),
    every(
        2, pairwise([OverReplicas, LocalLoss], GATHERED, [1, 3, 8], [(12, 12), (8, 11)], ["strict 1", "distributed"])
    ),
)
def test_replicas_have_the_global_batchs_loss_and_gradients(
    kind: type[nn.Module],
    schedule: str,
    microbatches: int,
    rows: tuple[int, int],
    on: str,
    engines: Engines,
) -> None:
    topology = Topology([("pipe", 2), ("data", 2)])
    results = engines(on)(4, step, kind, topology, rows, microbatches, {"schedule": schedule})
    assert_alike(results, on_the_whole_batch(sum(rows)))


def test_batches_of_other_rows_are_captured_for_groups_too() -> None:
    forward_backward = fxpipe.compile(
        model(Contrastive), Topology([("pipe", 4)]), microbatches=4, tracer="export", example_args=batch(8)
    )
    for rows in (9, 8, 5, 14):
        forward_backward.zero_grad()
        got = [forward_backward(*batch(rows))], gradients_of(forward_backward.named_parameters())
        assert_alike([got], on_the_whole_batch(rows))


@pytest.mark.parametrize("kind", [InGroups, AsSum, InADict])
def test_the_loss_of_a_step_is_the_mean_over_groups_weighted_by_their_rows(kind: type[nn.Module]) -> None:
    rows, microbatches = 11, 4
    plain, wanted = model(Contrastive), []
    parts = cut(batch(rows), microbatches)
    for pair in (parts[:2], parts[2:]):
        image, text = (torch.cat(side) for side in zip(*pair, strict=True))
        loss = plain(image, text) * (len(image) / rows)
        loss.backward()
        wanted.append(loss.detach())
    losses = [torch.stack(wanted).sum()]
    if kind is InADict:  # metrics are averaged as the loss is
        losses.append(2 * losses[0])
    results = strict(3)(4, step, kind, Topology([("pipe", 4)]), (rows,), microbatches, {})
    assert_alike(results, (losses, gradients_of(plain.named_parameters())))


class InTwoSteps(Contrastive):
    """A projection of the batch's rows, and a loss over those of every replica, weighted by an input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, image: Tensor, text: Tensor, weight: Tensor) -> Any:
        v, t = stage_boundary(self.towers(image, text), name="head", gather="batch")
        v, t = stage_boundary((self.head(v), t), name="loss", gather="global")
        return {"loss": self.loss(v, t) * weight.mean(), "rows": (0 * v[:, 0] + 1).long().sum()}


def in_two_steps(rows: tuple[int, int]) -> Any:
    topology = TWO_REPLICAS
    forward_backward = fxpipe.compile(model(InTwoSteps), topology, microbatches=3)
    given = [*batch(sum(rows)), torch.arange(sum(rows)).double()]
    mine = [tensor.split(list(rows))[replica_of(topology)] for tensor in given]
    loss = forward_backward(*mine)
    output = forward_backward.evaluate(*mine, outputs="all")
    assert output["rows"] == sum(rows)
    return [loss, output["loss"]], gradients_of(forward_backward.named_parameters())


def test_the_rows_of_groups_are_gathered_once_more_over_the_replicas() -> None:
    rows = (7, 9)
    plain = model(InTwoSteps)
    loss = plain(*batch(sum(rows)), torch.arange(sum(rows)).double())["loss"]
    loss.backward()
    wanted = [loss.detach()] * 2, gradients_of(plain.named_parameters())
    assert_alike(strict(0)(4, in_two_steps, rows), wanted)


TWO_REPLICAS = Topology([("pipe", 2), ("data", 2)])
# --- open_clip's create_loss ---


class OpenClipsLoss(nn.Module):
    """What open_clip's ``create_loss`` makes does this: it keeps its labels, and gathers over ``world_size`` ranks."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size, self.number, self.labels = world_size, 0, torch.zeros(0)

    def forward(self, v: Tensor, t: Tensor, scale: Tensor) -> Tensor:
        if self.world_size > 1:
            every = [torch.zeros_like(v) for _ in range(self.world_size)]
            torch.distributed.all_gather(every, v)
            v = torch.cat(every)
        logits = scale * v @ t.T
        if self.number != len(t):
            self.number, self.labels = len(t), torch.arange(len(t))
        own = self.labels
        return (nn.functional.cross_entropy(logits, own) + nn.functional.cross_entropy(logits.T, own)) / 2


class OpenClipsTowers(Contrastive):
    def forward(self, image: Tensor, text: Tensor) -> Any:
        return (*self.towers(image, text), self.scale.exp())

    def towers(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.upper(self.lower(image))), torch.tanh(self.text(text))


class OpenClips(nn.Module):
    def __init__(self, world_size: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.loss = OpenClipsTowers(), OpenClipsLoss(world_size)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        gather: Any = None if self.loss.world_size > 1 else "global"
        loss: Tensor = self.loss(*stage_boundary(self.model(image, text), name="loss", gather=gather))
        return loss


def test_open_clips_loss_is_that_of_all_replicas_rows_and_its_scale_is_no_row() -> None:
    topology, data = TWO_REPLICAS, 2
    steps = [{"image": torch.randn(rows * data, 6), "text": torch.randn(rows * data, 5)} for rows in (4, 6)]

    def run(rank: int) -> tuple[list[Tensor], Tensor, Gradients]:
        replica = topology.coordinate(rank)["data"]
        mine = [{name: value.chunk(data)[replica] for name, value in one.items()} for one in steps]
        one = fxpipe.compile(OpenClips(), topology, microbatches=2, tracer="record", example_kwargs=mine[0])
        losses = [one(**batch) for batch in mine]
        gradients = gradients_of(one.named_parameters())
        return losses, one.evaluate(**mine[0], outputs="all"), gradients

    plain = OpenClips()
    wanted = []
    for one in steps:
        wanted.append(plain.loss(*plain.model(**one)))
        wanted[-1].backward()
    for losses, evaluated, gradients in run_strict(run, topology.world_size, 1):
        for loss, value in zip([*losses, evaluated], [*wanted, wanted[0]], strict=True):
            assert_same(loss, value.detach(), "loss", 1e-6)
        assert_gradients(gradients, plain, 1e-5)


def refused(tracer: Any) -> str:
    fxpipe.init()
    batch = {"image": torch.randn(4, 6), "text": torch.randn(4, 5)}
    options: dict[str, Any] = {"tracer": tracer, "example_kwargs": batch}
    with pytest.raises(fxpipe.TopologyError) as caught:
        fxpipe.compile(OpenClips(world_size=2), Topology([("pipe", 2)]), microbatches=2, **options)
    return str(caught.value)


@pytest.mark.parametrize("tracer", ["auto", fxpipe.Tracing("export", check=False)])
def test_a_collective_that_waits_for_other_stages_is_refused_at_capture(tracer: Any, pool: Pool) -> None:
    for rank, text in enumerate(pool.run(refused, tracer, ranks=2)):
        assert f"over ranks [0, 1], of which {[rank]} are replicas" in text
        assert 'gather="global"' in text
        assert "torch.distributed.all_gather(every, v)" in text
