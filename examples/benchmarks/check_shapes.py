"""What it costs that steps hold the shapes which kept submodules return against those that they were captured with.

    python examples/benchmarks/check_shapes.py

Transformer layers are opaque to ``tracer="record"``, in two stages of one process. The printed code of the stages
tells how often a step checks; a check is timed alone, a step as a whole, and both by the processor's clock.
"""

from __future__ import annotations

import statistics
import time
import timeit

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe.stage.stage_calls import check_shapes, shapes_of

MICROBATCHES, TOKENS, STEPS, CALLS = 4, 32, 30, 10_000


class Layers(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(nn.ModuleList([layer, nn.LayerNorm(width)]) for _ in range(count))
        self.middle = count // 2

    def forward(self, x: Tensor) -> Tensor:
        for place, (layer, norm) in enumerate(self.layers):
            x = norm(layer(fxpipe.stage_boundary(x) if place == self.middle else x))
        return x.square().mean()


def row(count: int, width: int) -> list[str]:
    x = torch.randn(4 * MICROBATCHES, TOKENS, width)
    step = fxpipe.compile(
        Layers(count, width),
        fxpipe.Topology([("pipe", 2)]),
        microbatches=MICROBATCHES,
        tracer=fxpipe.Tracing("record", check=False),
        example_args=(x,),
    )
    checks = MICROBATCHES * sum(str(stage.forward).count("check_shapes(") for stage in step.stages)
    result = x[: len(x) // MICROBATCHES]
    shapes = shapes_of(result)
    one = (
        timeit.timeit(lambda: check_shapes(result, shapes, "layer", False), number=CALLS, timer=time.process_time)
        / CALLS
    )
    taken = []
    for _ in range(STEPS):
        begun = time.process_time()
        step(x)
        taken.append(time.process_time() - begun)
    whole = statistics.median(taken)
    return [
        f"{count} layers of {width}",
        str(checks),
        f"{1e6 * one:.1f}",
        f"{1e3 * whole:.1f}",
        f"{100 * checks * one / whole:.3f} %",
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row(count, width) for count, width in [(2, 32), (4, 64), (8, 128)]]
    print(
        tabulate(
            rows, ["model", "checks a step", "µs a check", "ms a step", "of a step"], colalign=["left"] + ["right"] * 4
        )
    )
