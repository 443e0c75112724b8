"""What a step waits for the data axis, in the virtual time of simulated GPUs: no more than nothing can run beside.

Eight linear layers, forward 1 ms and backward 2 ms each, and an embedding in front of them, or none, which takes no
time. Each layer is a bucket, whose all-reduce takes T and whose reduce-scatter and all-gather take T/2; the embedding's
bucket is a quarter of that. Behind the last kernel of a backward come the gradients of the first layer and of the
embedding, and the first kernel of the next forward needs both: nothing can hide these, and everything else can be
hidden, as a layer takes longer than its reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.distributed.topology import Topology
from tests import simulated_gpu
from tests.gpus import Gpus
from tests.thinned import every

WIDTH, LAYERS, MICROBATCHES = 64, 8, 4
LAYER_BYTES = WIDTH * WIDTH * 4
TINY = 1e-3
"""Of T: flags of who used a parameter, and what FSDP2 sends for scalars, take their bytes' time."""


class Layers(nn.Module):
    def __init__(self, stages: int, embeds: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH // 4, WIDTH) if embeds else None
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.cuts = [number * LAYERS // stages for number in range(1, stages)]

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for number, layer in enumerate(self.layers):
            if number in self.cuts:
                x = fxpipe.stage_boundary(x, name=f"layer_{number}")
            x = layer(x)
        return x.mean()


class Shape(NamedTuple):
    pipe: int
    data: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        if self.stages == self.pipe:
            return {}
        return {"schedule": "interleaved_1f1b"}


class Exposed(NamedTuple):
    """Milliseconds by which a step is longer than where collectives take no time. ``gather``: by which a step behind a
    step of the optimizer is longer than one that follows none."""

    step: float
    gather: float


def exposed(shape: Shape, zero: int, tracer: str, embeds: bool, milliseconds: float) -> Exposed:
    device = fxpipe.init()
    simulated_gpu.costs(**simulated_gpu.STRUCTURE)
    simulated_gpu.fix({"aten::mm": 1e-3})
    torch.manual_seed(0)
    x = torch.randint(WIDTH // 4, (MICROBATCHES, 2)) if embeds else torch.randn(MICROBATCHES, 2, WIDTH)
    forward_backward = fxpipe.compile(
        Layers(shape.stages, embeds).to(device),
        Topology([("pipe", shape.pipe), ("data", shape.data)]),
        microbatches=MICROBATCHES,
        zero=fxpipe.Zero(zero, bucket_mb=LAYER_BYTES / 2**20),
        tracer=tracer,
        example_args=(x.to(device),),
        checks=fxpipe.Checks(batches=False),
        **shape.options,
    )
    optimizer, batch = forward_backward.optimizer(torch.optim.SGD, lr=0.1), x.to(device)
    sent = 2 * (shape.data - 1) / shape.data * LAYER_BYTES  # by each rank, in a ring's all-reduce

    def two_steps() -> None:
        forward_backward(batch)
        optimizer.step()
        forward_backward(batch)

    def longer(run: Callable[[], object]) -> float:
        times = []
        for rate in (float("inf"), sent / (milliseconds * 1e-3)):
            simulated_gpu.costs(ring_bytes=rate)
            times.append(virtual_time(run))
        return (times[1] - times[0]) * 1e3

    for _ in range(2):  # the first steps find out what later ones know
        two_steps()
    step, both = longer(lambda: forward_backward(batch)), longer(two_steps)
    forward_backward.close()
    return Exposed(step, both - 2 * step)


def virtual_time(run: Callable[[], object]) -> float:
    """From a common start until the last rank is through."""
    start = simulated_gpu.align()
    run()
    return simulated_gpu.align() - start


SHAPES = {"data 2": Shape(1, 2, 1), "pipe 2 × data 2": Shape(2, 2, 2), "interleaved": Shape(2, 2, 4)}
CASES = [
    (shape, zero, tracer, embeds)
    for shape in SHAPES
    for zero in (0, 1, 2, 3)
    for tracer, embeds in (("symbolic", True), ("export", False), ("record", True))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "zero", "tracer", "embeds"), every(11, CASES))
def test_what_is_exposed_is_what_nothing_can_hide(gpus: Gpus, shape: str, zero: int, tracer: str, embeds: bool) -> None:
    milliseconds = 1.0
    first = milliseconds * (1.25 if embeds else 1.0)
    step, gather = {0: (first, 0.0), 1: (first / 2, first / 2), 2: (first / 2, first / 2), 3: (first, 0.0)}[zero]
    ranks = SHAPES[shape].pipe * SHAPES[shape].data
    for found in gpus.run(exposed, SHAPES[shape], zero, tracer, embeds, milliseconds, ranks=ranks):
        assert found.step == pytest.approx(step, abs=TINY * LAYERS)
        assert found.gather == pytest.approx(gather, abs=TINY * LAYERS)
