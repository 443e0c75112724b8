"""Calls: how many functions of fxpipe's own a micro-batch costs in a steady step of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import fxpipe

OWN = str(Path(fxpipe.__file__).parent)


def calls_of_a_step(microbatches: int) -> int:
    options = {"microbatches": microbatches, "loss_fn": lambda y: y.square().mean()}
    step = fxpipe.compile(nn.Linear(8, 8), fxpipe.Topology([("pipe", 1)]), **options)
    for _ in range(3):
        step(torch.ones(microbatches, 8))
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OWN)

    sys.setprofile(note)
    try:
        step(torch.ones(microbatches, 8))
    finally:
        sys.setprofile(None)
    return count


def test_a_micro_batch_of_one_stage_calls_few_functions() -> None:
    """A forward and a backward; 46 of Python 3.11, where a comprehension is a function, too."""
    assert (calls_of_a_step(16) - calls_of_a_step(8)) / 8 <= 46
