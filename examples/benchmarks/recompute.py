"""What each stage holds of a step's activations, with and without recompute=True.

    python examples/benchmarks/recompute.py          # tiny GPT-2 and CLIP of transformers
    python examples/benchmarks/recompute.py T5 ViT   # others of tests/hf.py

One process plays four ranks, 4 micro-batches, gpipe and 1f1b. Bytes are those of what autograd saves and of the inputs
that a recomputed stage keeps, counted in a step: each tensor's memory once, at their most, without parameters, buffers
and the batch. Gradients are compared bit for bit, dropout included.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import fxpipe
from fxpipe import Topology

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.activations import counted
from tests.harness import assert_same, gradients_of
from tests.hf import MODELS

Gradients = dict[str, Tensor | None]


def step(name: str, schedule: Any, recompute: bool) -> tuple[fxpipe.ForwardBackward, Gradients, list[int]]:
    """A compiled model, its gradients after a step, and each stage's most bytes in another."""
    case = MODELS[name]
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(
        case.model().train(),
        Topology([("pipe", case.ranks)]),
        microbatches=4,
        boundaries=case.boundaries,
        placement=case.placement,
        schedule=schedule,
        recompute=recompute,
        example_kwargs=case.batch(),
    )
    forward_backward(**case.batch())
    gradients = gradients_of(forward_backward.named_parameters())
    with counted(forward_backward, batch := case.batch()) as held:
        forward_backward(**batch)
    return forward_backward, gradients, [held.peak[stage.index] for stage in forward_backward.stages]


def rows(name: str, schedule: Any) -> list[list[str]]:
    forward_backward, plain, before = step(name, schedule, recompute=False)
    again, recomputed, after = step(name, schedule, recompute=True)
    for key, gradient in plain.items():
        assert_same(recomputed[key], gradient, f"the gradient of {key}")
    return [
        [
            name,
            schedule,
            stage.name,
            f"{before[stage.index]:,}",
            f"{after[stage.index]:,}" if stage.name in again.stages.recomputed else "as before",
            f"{after[stage.index] / before[stage.index]:.0%}",
        ]
        for stage in forward_backward.stages
    ]


def main() -> None:
    names = sys.argv[1:] or ["GPT-2", "CLIP"]
    every = [row for name in names for schedule in ("gpipe", "1f1b") for row in rows(name, schedule)]
    headers = ["model", "schedule", "stage", "bytes", "recomputed", "of it"]
    print(tabulate(every, headers, tablefmt="github", disable_numparse=True, colalign=("left",) * 3 + ("right",) * 3))


if __name__ == "__main__":
    main()
