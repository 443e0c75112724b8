"""Offload on simulated GPUs: a step takes the plan's time, the device holds the plan's bytes, the host waits no more."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Schedule
from fxpipe.run.actions.actions import BoundAction
from fxpipe.schedules.action import Action
from tests.gpus import Gpus
from tests.offload_work import Case, Measured, steps_of
from tests.virtual_work import Setting, chain
from tests.whole.test_virtual_time import ALIKE, FOLDED, TOWERS

HALF = (0.5,) * 8
ROUND = tuple(stage % 4 for stage in range(8))


def on_a_chain(schedule: str, m: int, lead: float, **more: float) -> Case:
    forward, placement = {"zb_v": (HALF, FOLDED), "interleaved_1f1b": (HALF, ROUND)}.get(
        schedule, (ALIKE, (0, 1, 2, 3))
    )
    return Case(Setting(schedule, m, forward, chain(len(forward)), placement), lead, **more)


def towers(schedule: str, m: int, lead: float, gather: str | None = None) -> Case:
    return Case(Setting(schedule, m, ALIKE, TOWERS, (0, 1, 2, 3), gather=gather), lead)


CASES = {
    "1f1b": on_a_chain("1f1b", 8, 1),
    "1f1b for slow copies": on_a_chain("1f1b", 16, 2),
    "1f1b in less room": on_a_chain("1f1b", 16, 2, memory=2),
    "gpipe": on_a_chain("gpipe", 8, 1),
    "zb_h1": on_a_chain("zb_h1", 8, 1),
    "interleaved": on_a_chain("interleaved_1f1b", 8, 0.5),
    "zb_v": on_a_chain("zb_v", 8, 0.5),
    "two towers": towers("1f1b", 8, 1),
    "a loss of all": towers("store_all", 8, 1, gather="batch"),
}


COPIES = (0.0, 0.25, 0.5, 1.0, 2.0)
"""The times of a copy, in forwards."""


def assert_as_planned(case: Case, copies: Sequence[float], gpus: Gpus) -> None:
    """A step takes the plan's time, and holds the plan's bytes, but for what a step without offload needs beside them:
    the copy of the loss to the host, and a micro-batch's temporaries."""
    plain: list[list[Measured]] = gpus.run(steps_of, case._replace(lead=None), copies, ranks=4, seconds=200)
    measured: list[list[Measured]] = gpus.run(steps_of, case, copies, ranks=4, seconds=200)
    most = max(row[0].planned_peak for row in plain)
    assert max(row[0].planned_peak for row in measured) < most, "the table offloads"
    for rank, (rows, without) in enumerate(zip(measured, plain, strict=True)):
        for copy, step, other in zip(copies, rows, without, strict=True):
            where = f"rank {rank}, copies of {copy}"
            assert step.took - step.planned == pytest.approx(copy, abs=1e-9), where
            assert other.took - other.planned == pytest.approx(copy, abs=1e-9), where
            assert step.peak - step.planned_peak == pytest.approx(other.peak - other.planned_peak, abs=0.01), where
            assert step.waits == other.waits, where
            assert step.gradients == other.gradients, where


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_the_time_and_the_bytes_of_its_plan(name: str, gpus: Gpus) -> None:
    assert_as_planned(CASES[name], COPIES, gpus)


class Blocks(nn.Module):
    """Two stages on a rank. The activations of the first are mostly inputs of its parameters' calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)
        self.again = nn.Linear(64, 1024)

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(self.down(F.gelu(self.up(x))).relu()).softmax(-1)
        return fxpipe.stage_boundary(h.sum(-1), name="last").square().mean()


def bytes_behind(cells: str) -> dict[str, int]:
    """The bytes that the device holds behind each action, over those before the step."""
    device = fxpipe.init()
    row = tuple(map(Action.parse, cells.split()))
    table = Schedule((row,), edges=((0, 1),), placement=(0, 0), backward=(True, True), microbatches=2)
    torch.manual_seed(0)
    model = Blocks().to(device)
    topology = fxpipe.Topology([("pipe", 1)])
    forward_backward = fxpipe.compile(model, topology, microbatches=2, schedule=table, tracer="symbolic")
    batch = torch.randn(2 * 1024, 64).to(device)
    for _ in range(2):
        forward_backward.zero_grad(set_to_none=False)
        forward_backward(batch)
    behind, before, call = dict[str, int](), torch.cuda.memory_allocated(), BoundAction.__call__

    def note(self: BoundAction) -> None:
        call(self)
        behind[str(self.action)] = torch.cuda.memory_allocated() - before

    with mock.patch.object(BoundAction, "__call__", note):
        forward_backward(batch)
    forward_backward.close()
    return behind


@pytest.mark.parametrize("halves", [False, True])
def test_all_that_autograd_has_saved_is_free_after_o(halves: bool, gpus: Gpus) -> None:
    rest = "1I0 1W0 0P0 0I0 0W0 1I1 1W1 0I1 0W1" if halves else "1B0 0P0 0B0 1B1 0B1"
    (behind,) = gpus.run(bytes_behind, f"0F0 0O0 1F0 0F1 1F1 {rest}", ranks=1)
    print(behind)
    small = 1 << 17  # the output, and less than 64 KiB each
    assert behind["0F0"] > 12 << 20  # two of gelu's tensors, and softmax
    assert behind["0O0"] < small
    assert behind["0P0"] - behind["1W0" if halves else "1B0"] == behind["0F0"] - behind["0O0"]
