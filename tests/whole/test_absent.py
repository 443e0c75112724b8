"""A modality that is absent from a batch, None, leaves out its tower's work; nobody waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary
from tests.harness import assert_same, engine_of, gradients_of, replica_of
from tests.pool import Pool
from tests.thinned import ALL

WIDTH = 6
ENGINES = ["local", "strict 1", "distributed"]


class MaybeImage(nn.Module):
    """image → image0 → image1 ∥ text → meet; a text alone meets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.image0, self.image1 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.text, self.join = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        t = stage_boundary(torch.tanh(self.text(text)), name="meet")
        if image is None:
            return self.join(t).square().mean()
        h = stage_boundary(torch.relu(self.image0(image)), name="image1")
        v = stage_boundary(self.image1(h), name="meet")
        return F.mse_loss(self.join(v + t), t)


def model() -> MaybeImage:
    torch.manual_seed(0)
    return MaybeImage()


def batches() -> list[dict[str, Any]]:
    """With an image, without, with, without."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for step in range(4):
        batch: dict[str, Any] = {"text": torch.randn(8, WIDTH, generator=generator)}
        batch["image"] = None if step % 2 else torch.randn(8, WIDTH, generator=generator)
        made.append(batch)
    return made


def compiled(topology: fxpipe.Topology) -> fxpipe.ForwardBackward:
    return fxpipe.compile(model(), topology, microbatches=4, example_kwargs=batches()[0])


def steps(data: int) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    topology = fxpipe.Topology([("pipe", 4 // data), ("data", data)])
    replica = replica_of(topology) if data > 1 else 0
    forward_backward = compiled(topology)
    ran = []
    for batch in batches():
        forward_backward.zero_grad()
        part = {name: None if value is None else value.chunk(data)[replica] for name, value in batch.items()}
        loss = forward_backward(**part)
        ran.append((loss, gradients_of(forward_backward.named_parameters())))
    return ran


def reference(batch: dict[str, Any], parts: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    plain = model()
    total = torch.zeros(())
    for place in range(parts):
        part = {name: None if value is None else value.chunk(parts)[place] for name, value in batch.items()}
        loss = plain(**part) / parts
        loss.backward()
        total = total + loss.detach()
    return total, gradients_of(plain.named_parameters())


@pytest.mark.parametrize("engine", ENGINES)
def test_its_tower_gets_no_gradient_and_the_rest_is_plain_pytorchs(engine: str, request: pytest.FixtureRequest) -> None:
    for rank, ran in enumerate(engine_of(engine, lambda: request.getfixturevalue("pool"))(4, steps, 1)):
        for batch, (loss, gradients) in zip(batches(), ran, strict=True):
            wanted_loss, wanted = reference(batch, 4)
            assert_same(loss, wanted_loss, f"rank {rank}: loss")
            for name, gradient in gradients.items():
                assert_same(gradient, wanted[name], f"rank {rank}: {name}")


@pytest.mark.parametrize("engine", ["strict 2", "distributed"])
def test_beside_a_data_axis(engine: str, request: pytest.FixtureRequest) -> None:
    for rank, ran in enumerate(engine_of(engine, lambda: request.getfixturevalue("pool"))(4, steps, 2)):
        for batch, (loss, gradients) in zip(batches(), ran, strict=True):
            wanted_loss, wanted = reference(batch, 8)
            assert_same(loss, wanted_loss, f"rank {rank}: loss", 1e-6)
            for name, gradient in gradients.items():
                assert_same(gradient, wanted[name], f"rank {rank}: {name}", 1e-6)


def test_its_stages_do_nothing_in_the_table_of_such_a_batch() -> None:
    """They keep their places in it, so that replicas whose batches differ reduce in one order."""
    forward_backward = compiled(fxpipe.Topology([("pipe", 4)]))
    forward_backward(**batches()[1])
    agreed = forward_backward._steps.agreement._settled.popitem()[1]
    idle = [stage for stage in agreed.plan.graph if not stage.inputs]
    assert [stage.name for stage in idle] == ["image0", "image1"]
    assert all(stage.run() == () and not stage.tensors for stage in idle)
    assert agreed.plan.schedule.rows == forward_backward.schedule.rows
    assert len(agreed.plan.graph.edges) < len(forward_backward.stages.edges)


def of_different_kinds(zero: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Steps in which one replica has images and the other has none, in turns."""
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    replica = replica_of(topology)
    part = {name: value.chunk(2)[replica] for name, value in batches()[0].items()}
    forward_backward = fxpipe.compile(model(), topology, microbatches=4, zero=zero, example_kwargs=part)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        absent = {"image": None} if (step + replica) % 2 else {}
        losses.append(forward_backward(**part | absent))
        optimizer.step()
    return losses, forward_backward.state_dict(full=True)


@pytest.mark.parametrize("zero", [0, 1, 2, 3] if ALL else [2, 3])
def test_replicas_may_differ_in_it(zero: int, pool: Pool) -> None:
    plain, wanted = model(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        total = torch.zeros(())
        for place in range(8):  # four micro-batches of the first replica, four of the second
            part = {name: value.chunk(8)[place] for name, value in batches()[0].items()}
            absent = {"image": None} if (step + place // 4) % 2 else {}
            (loss := plain(**part | absent) / 8).backward()
            total = total + loss.detach()
        wanted.append(total)
        optimizer.step()
    for losses, state in pool.run(of_different_kinds, zero):
        for loss, wanted_loss in zip(losses, wanted, strict=True):
            assert_same(loss, wanted_loss, "loss", 1e-6)
        for name, tensor in plain.state_dict().items():
            assert_same(state[name], tensor, name, 1e-6)


class MaybeMixed(nn.Module):
    """start → mix → end; without an image the start's value goes to the end, between ranks that were strangers."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.image, self.mix, self.end = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.start(text))
        if image is not None:
            h = torch.tanh(self.mix(stage_boundary(h, name="mix") + self.image(image)))
        return self.end(stage_boundary(h, name="end")).square().mean()


def mixed_steps(data: int) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    """Of two replicas, one meets the batch without an image a step earlier than the other."""
    topology = fxpipe.Topology([("pipe", 3), ("data", data)])
    replica = replica_of(topology) if data > 1 else 0
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(MaybeMixed(), topology, microbatches=4, example_kwargs=batches()[0])
    ran = []
    for batch in batches()[replica : replica + 4 - data]:
        forward_backward.zero_grad()
        loss = forward_backward(**batch)
        ran.append((loss, gradients_of(forward_backward.named_parameters())))
    return ran


@pytest.mark.parametrize(("engine", "data"), [("local", 1), ("strict 1", 2), ("distributed", 1)])
def test_ranks_that_sent_each_other_nothing_before_are_connected_when_such_a_batch_comes(
    engine: str, data: int, request: pytest.FixtureRequest
) -> None:
    runs = engine_of(engine, lambda: request.getfixturevalue("pool"))(3 * data, mixed_steps, data)
    torch.manual_seed(0)
    plain = MaybeMixed()
    for step in range(len(runs[0])):
        plain.zero_grad()
        total = torch.zeros(())
        for batch in batches()[step : step + data]:
            for place in range(4):
                part = {name: None if value is None else value.chunk(4)[place] for name, value in batch.items()}
                loss = plain(**part) / (4 * data)
                loss.backward()
                total = total + loss.detach()
        for run in runs:
            assert_same(run[step][0], total, f"loss of step {step}", 1e-6 * (data - 1))
            for name, gradient in run[step][1].items():
                wanted = plain.get_parameter(name).grad
                assert_same(gradient, wanted, f"{name} of step {step}", 1e-6 * (data - 1))


MIXES = [(1, 0, 1, 0), (0, 1, 1, 0), (0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 1, 0)]
"""Which micro-batches of a step have an image."""


def parts_of(mix: tuple[int, ...]) -> list[dict[str, Any]]:
    """Micro-batches of text, some with an image; the others have None, or lack the name."""
    parts = [{name: value.chunk(4)[place] for name, value in batches()[0].items()} for place in range(4)]
    lacking = [{"image": None}, {}]
    return [
        part if has else {"text": part["text"]} | lacking[place % 2]
        for place, (part, has) in enumerate(zip(parts, mix, strict=True))
    ]


def mixed_in_a_step(kind: type[nn.Module], tracer: str, options: dict[str, Any], ranks: int) -> list[Any]:
    torch.manual_seed(0)
    topology = fxpipe.Topology([("pipe", ranks)])
    forward_backward = fxpipe.compile(kind(), topology, tracer=tracer, example_kwargs=batches()[0], **options)
    ran = []
    for mix in MIXES:
        forward_backward.zero_grad()
        loss = forward_backward.step_microbatches([((), part) for part in parts_of(mix)])
        ran.append((loss, gradients_of(forward_backward.named_parameters())))
    return ran


KINDS_OF_MIX = [
    (MaybeImage, "symbolic", {}, 4),
    (MaybeImage, "export", {}, 2),
    (MaybeImage, "record", {"schedule": "zb_h1"}, 2),
    (MaybeImage, "auto", {"recompute": True}, 3),
    (MaybeMixed, "auto", {}, 3),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kind", "tracer", "options", "ranks"), KINDS_OF_MIX)
def test_micro_batches_of_one_step_may_differ_in_it(
    kind: type[nn.Module],
    tracer: str,
    options: dict[str, Any],
    ranks: int,
    engine: str,
    request: pytest.FixtureRequest,
) -> None:
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    for rank, ran in enumerate(run(ranks, mixed_in_a_step, kind, tracer, options, ranks)):
        for mix, (loss, gradients) in zip(MIXES, ran, strict=True):
            torch.manual_seed(0)
            plain, total = kind(), torch.zeros(())
            for part in parts_of(mix):
                (one := plain(**part) / 4).backward()
                total = total + one.detach()
            assert_same(loss, total, f"rank {rank}: loss of {mix}")
            wanted = gradients_of(plain.named_parameters())
            for name, gradient in gradients.items():
                assert_same(gradient, wanted[name], f"rank {rank}: {name} of {mix}")


def test_a_batch_that_needs_more_than_the_first_kind_is_refused() -> None:
    forward_backward = fxpipe.compile(
        model(), fxpipe.Topology([("pipe", 2)]), microbatches=2, example_kwargs=batches()[1]
    )
    with pytest.raises(fxpipe.PartitionError, match="uses most of the model"):
        forward_backward(**batches()[0])


class Retrieval(nn.Module):
    """Its logits are what the loss is made of, or, ``anew``, made a second time for the result alone."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.anew = nn.Parameter(torch.tensor(2.0)), anew

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        v, t = stage_boundary(self.image(image), name="loss"), stage_boundary(self.text(text))
        logits = F.normalize(v) @ F.normalize(t).T
        loss = F.cross_entropy(self.scale * logits, torch.arange(len(logits)))
        return {"loss": loss, "logits": v @ t.T if self.anew else logits}


@pytest.mark.parametrize("anew", [False, True])
def test_an_output_that_only_evaluation_needs_runs_in_a_stage_of_training(anew: bool) -> None:
    torch.manual_seed(0)
    plain, (image, text) = Retrieval(anew), torch.randn(2, 4, WIDTH)
    forward_backward = fxpipe.compile(plain, fxpipe.Topology([("pipe", 3)]), microbatches=2, example_args=(image, text))
    forward_backward(image, text)
    wanted = [plain(*part)["logits"] for part in zip(image.chunk(2), text.chunk(2), strict=True)]
    assert_same(forward_backward.evaluate(image, text)["logits"], torch.cat(wanted).detach(), "logits", 1e-6)
