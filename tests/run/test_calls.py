"""Calls: how many functions of fxpipe's own a steady step costs: each micro-batch, and a step of two replicas. And a
call of what is not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpipe
from tests.pool import Pool

OWN = str(Path(fxpipe.__file__).parent)


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def calls_of_a_step(microbatches: int, replicas: int = 1) -> int:
    """On its thread, with the comprehensions of Python 3.11, which are functions, too."""
    topology, found = fxpipe.Topology([("pipe", 1), ("data", replicas)]), list[str]()
    step = fxpipe.compile(nn.Linear(8, 8), topology, microbatches=microbatches, loss_fn=mean_square)
    for number in range(4):
        note = lambda frame, event, _: found.append(event) if frame.f_code.co_filename.startswith(OWN) else None  # noqa: E731
        sys.setprofile(note if number == 3 else None)
        step(torch.ones(microbatches, 8))
    sys.setprofile(None)
    return found.count("call")


def test_a_micro_batch_of_one_stage_calls_few_functions() -> None:
    """A forward and a backward; 46 of Python 3.11."""
    assert (calls_of_a_step(16) - calls_of_a_step(8)) / 8 <= 46


def test_a_step_of_two_replicas_calls_few_functions(pool: Pool) -> None:
    """With one micro-batch; 534 of Python 3.11."""
    assert max(pool.run(calls_of_a_step, 1, 2, ranks=2)) <= 535


def test_a_name_that_is_not_there_has_one_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    """Python adds one of its own, "_steps", to an error that has the name and the object."""
    step = fxpipe.compile(nn.Linear(8, 8), fxpipe.Topology([("pipe", 1)]), loss_fn=mean_square)
    try:
        step.steps  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError:
        sys.__excepthook__(*sys.exc_info())  # type: ignore[arg-type]
    assert re.findall("[Dd]id you mean.*", capsys.readouterr().err) == ['did you mean "stages"?']
