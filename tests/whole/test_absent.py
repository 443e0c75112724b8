"""A modality that is absent from a batch, None, leaves out its tower's work; nobody waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary
from tests.harness import (
    Engines,
    Steps,
    accumulate,
    assert_gradients,
    assert_same,
    assert_steps,
    assert_trains,
    cut,
    distributed,
    gradients_of,
    replica_of,
    steps_of,
    strict,
)
from tests.models import Case, Layers
from tests.pool import Pool
from tests.thinned import ALL, in_turn

WIDTH = 6


class MaybeImage(Layers):
    """image → image0 → image1 ∥ text → meet; a text alone meets nothing."""

    names, width = "image0 image1 text join", WIDTH

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


MAYBE = Case(MaybeImage, ranks=2)


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


def steps() -> Steps:
    return steps_of(compiled(fxpipe.Topology([("pipe", 4)])), batches())


@pytest.mark.parametrize("engine", ["local", "distributed"])
def test_its_tower_gets_no_gradient_and_the_rest_is_plain_pytorchs(engine: str, engines: Engines) -> None:
    assert_steps(engines(engine)(4, steps), model(), batches(), 4)


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


@pytest.mark.parametrize("zero", [0, 1, 2, 3] if ALL else [2, 3])
def test_replicas_may_differ_in_it(zero: int, pool: Pool) -> None:
    """In each step one has images and the other has none, in turns."""
    parts = cut(batches()[0], 2)
    steps = [
        tuple(part | ({"image": None} if (step + replica) % 2 else {}) for replica, part in enumerate(parts))
        for step in range(3)
    ]
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    assert_trains(MAYBE, distributed(pool), steps, topology=topology, zero=zero, example_kwargs=parts[0])


class MaybeMixed(Layers):
    """start → mix → end; without an image the start's value goes to the end, between ranks that were strangers."""

    names, width = "start image mix end", WIDTH

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.start(text))
        if image is not None:
            h = torch.tanh(self.mix(stage_boundary(h, name="mix") + self.image(image)))
        return self.end(stage_boundary(h, name="end")).square().mean()


def mixed_steps() -> Steps:
    """Of two replicas, one meets the batch without an image a step earlier than the other."""
    topology = fxpipe.Topology([("pipe", 3), ("data", 2)])
    replica = replica_of(topology)
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(MaybeMixed(), topology, microbatches=4, example_kwargs=batches()[0])
    return steps_of(forward_backward, batches()[replica : replica + 2])


def test_ranks_that_sent_each_other_nothing_before_are_connected_when_such_a_batch_comes() -> None:
    plain = MaybeMixed()
    for step, (first, second) in enumerate(zip(*strict(1)(6, mixed_steps)[:2], strict=True)):
        plain.zero_grad()
        parts = [part for batch in batches()[step : step + 2] for part in cut(batch, 4)]
        loss, _ = accumulate(lambda _, part: plain(**part), parts)
        for found, gradients in (first, second):
            assert_same(found, loss, f"loss of step {step}", 1e-6)
            assert_gradients(gradients, plain, 1e-6, f"step {step}: ")


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


def mixed_in_a_step(kind: type[nn.Module], tracer: str, options: dict[str, Any], ranks: int) -> Steps:
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


@pytest.mark.parametrize(("of", "engine"), in_turn(KINDS_OF_MIX, ["strict 1", "local", "distributed"]))
def test_micro_batches_of_one_step_may_differ_in_it(of: Any, engine: str, engines: Engines) -> None:
    kind, *_, ranks = of
    for ran in engines(engine)(ranks, mixed_in_a_step, *of):
        for mix, (loss, gradients) in zip(MIXES, ran, strict=True):
            torch.manual_seed(0)
            plain = kind()
            wanted, _ = accumulate(lambda _, part, plain=plain: plain(**part), parts_of(mix))  # type: ignore[misc]
            assert_same(loss, wanted, f"loss of {mix}")
            assert_gradients(gradients, plain, what=f"{mix}: ")


class Retrieval(nn.Module):
    """As transformers' CLIPModel, whose loss asks for ``len(logits)``; the result's logits are made a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        v, t = stage_boundary(self.image(image), name="loss"), stage_boundary(self.text(text))
        logits = F.normalize(v) @ F.normalize(t).T
        loss = F.cross_entropy(self.scale * logits, torch.arange(len(logits)))
        return {"loss": loss, "logits": v @ t.T}


def test_an_output_that_only_evaluation_needs_runs_in_a_stage_of_training() -> None:
    plain, (image, text) = Retrieval(), torch.randn(2, 4, WIDTH)
    forward_backward = fxpipe.compile(plain, fxpipe.Topology([("pipe", 3)]), microbatches=2, example_args=(image, text))
    forward_backward(image, text)
    wanted = [plain(*part)["logits"] for part in zip(image.chunk(2), text.chunk(2), strict=True)]
    assert_same(forward_backward.evaluate(image, text)["logits"], torch.cat(wanted).detach(), "logits", 1e-6)
