"""What compiling takes grows with the size of what is compiled, and not with its square: lines of Python are counted.

A function whose work is proportional to the size runs 4 times the lines at 4 times the size, and 16 times where it is
the square.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.options import TracerName
from fxpipe.schedules import ScheduleName, build
from fxpipe.schedules.lower import lower
from tests.thinned import every

PACKAGE = str(Path(fxpipe.__file__).parent)
TIMES = 4
NAMES: list[ScheduleName] = ["1f1b", "interleaved_1f1b", "greedy"]
MOST = 2 * TIMES
"""Between what is proportional, with a logarithm, and the square."""


class Blocks(nn.Module):
    """Residual blocks with a boundary after every so many; the first one's output is read in the last stage, too."""

    def __init__(self, blocks: int, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(2))
        self.a_stage = blocks // stages

    def forward(self, x: Tensor) -> Tensor:
        scale, first = self.scale.exp(), x  # the one is copied into all stages
        for place, layer in enumerate(self.layers):
            if place and place % self.a_stage == 0:
                x = fxpipe.stage_boundary(x)
            x = x + torch.tanh(layer(x)) * scale
            first = x if place == 0 else first
        return (x + first).square().mean()


def counted(run: Callable[[], object]) -> Counter[CodeType]:
    """How many lines of each of fxpipe's functions are run; a comprehension's turn is one."""
    lines: Counter[CodeType] = Counter()

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        lines[frame.f_code] += 1
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines


def check_grows_linearly(run: Callable[[int], object], size: int) -> None:
    """``run(size)`` against ``run(TIMES * size)``."""
    run(size)  # what is imported and cached once
    small, large = counted(lambda: run(size)), counted(lambda: run(TIMES * size))
    # Looking through the modules of this process costs the same for each size, however much it is.
    assert sum(small[code] for code, count in large.items() if count > 2 * small[code]) > 100 * size
    steep = {
        f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}": (small[code], count)
        for code, count in large.items()
        if count > 10 * TIMES * size and count > MOST * small[code]
    }
    assert not steep


def previewed(model: nn.Module, ranks: int, tracer: TracerName, microbatches: int = 4) -> fxpipe.Preview:
    topology = fxpipe.Topology([("pipe", ranks)])
    example = None if tracer == "symbolic" else (torch.randn(microbatches, 2),)
    return fxpipe.preview(model, topology, microbatches=microbatches, tracer=tracer, example_args=example)


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_nodes(tracer: TracerName) -> None:
    check_grows_linearly(lambda blocks: previewed(Blocks(blocks, 2), 2, tracer), 8)


def test_stages_of_as_many_ranks() -> None:
    check_grows_linearly(lambda stages: previewed(Blocks(stages, stages), stages, "export"), 8)


@pytest.mark.parametrize("name", NAMES[:2])
def test_microbatches(name: ScheduleName) -> None:
    check_grows_linearly(lambda microbatches: table(name, 4, 2, microbatches), 16)


def test_microbatches_of_a_call() -> None:
    def called(microbatches: int) -> None:
        topology = fxpipe.Topology([("pipe", 2)])
        fxpipe.compile(Blocks(4, 2), topology, microbatches=microbatches)(torch.ones(microbatches, 2))

    check_grows_linearly(called, 16)


@pytest.mark.parametrize("name", every(2, NAMES))
def test_stages_of_a_table(name: ScheduleName) -> None:
    check_grows_linearly(lambda stages: table(name, 4, stages // 4, 6), 12)


def table(name: ScheduleName, ranks: int, a_rank: int, microbatches: int) -> object:
    """A chain with so many stages a rank, in laps: generated, verified, lowered, simulated, printed."""
    stages = ranks * a_rank
    edges = list(pairwise(range(stages)))
    made = build(name, edges, microbatches, placement=[stage % ranks for stage in range(stages)])
    return lower(made.rows, made.links, made.placement, made.backward), made.simulate(), str(made)
