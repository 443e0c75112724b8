"""Offload on simulated GPUs: a step takes its plan's time, holds its plan's bytes, and the host waits no more."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Schedule
from fxpipe.device import HostCopies, OnHost
from fxpipe.run.actions.actions import BackwardAction, BoundAction, Offload, WeightsAction
from fxpipe.schedules.action import Action
from fxpipe.schedules.schedule import Timeline
from tests import simulated_gpu
from tests.gpus import Gpus
from tests.offload_work import Case, Measured, compiled, steps_of
from tests.virtual_work import MS, Setting, chain
from tests.whole.test_virtual_time import ALIKE, FOLDED, TOWERS

HALF = (0.5,) * 8
ROUND = tuple(stage % 4 for stage in range(8))


def on_a_chain(schedule: str, m: int, lead: float, **more: Any) -> Case:
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
    "zb_h1, for W": on_a_chain("zb_h1", 8, 1, for_weights=True),
    "interleaved": on_a_chain("interleaved_1f1b", 8, 0.5),
    "zb_v": on_a_chain("zb_v", 8, 0.5),
    "zb_v, for W": on_a_chain("zb_v", 8, 0.5, for_weights=True),
    "two towers": towers("1f1b", 8, 1),
    "a loss of all": towers("store_all", 8, 1, gather="batch"),
}


COPIES = (0.0, 0.25, 0.5, 1.0, 2.0)
"""The times of a copy, in forwards."""


def timelines(case: Case, copy: float) -> tuple[Timeline, Timeline]:
    """A steady step's timeline as measured, and as planned, in ms. All ranks call it."""
    simulated_gpu.costs(**simulated_gpu.STRUCTURE)
    forward_backward = compiled(case)
    batch = torch.arange(4.0 * case.setting.microbatches, device="cuda").reshape(-1, 4) / 7
    for _ in range(2):
        forward_backward(batch)
    simulated_gpu.costs(copy_latency=copy * MS)
    forward_backward.record_timeline()
    forward_backward(batch)
    simulated_gpu.costs(copy_latency=0)
    measured, planned = forward_backward.timeline(), forward_backward.schedule.simulate(case.costs(copy))
    forward_backward.close()
    return measured, planned


def times_of_copies(timeline: Timeline, unit: float = 1) -> dict[tuple[int, str], tuple[float, float]]:
    """The start and the end of each copy, from its rank's first action on: simulated GPUs have no common clock."""
    first = [unit * min(timeline.spans[action].start for action in row) for row in timeline.schedule.rows]
    return {
        (copy.rank, copy.what): (unit * copy.start - first[copy.rank], unit * copy.end - first[copy.rank])
        for copy in timeline.copies
    }


@pytest.mark.parametrize("name", ["1f1b", pytest.param("zb_h1, for W", marks=pytest.mark.long)])
def test_a_timeline_has_the_copies_when_the_plan_has_them(name: str, gpus: Gpus) -> None:
    """In room for one copy at a time, copies of 2 F queue up in their lane, and backwards wait for them."""
    measured, planned = gpus.run(timelines, CASES[name], 2.0, ranks=4)[0]
    assert len(planned.copies) > 8
    expected, found = times_of_copies(planned), times_of_copies(measured, 1e3)
    assert found.keys() == expected.keys()
    for key, times in expected.items():
        assert found[key] == pytest.approx(times, abs=1e-3), key
    waits = {spell.what for spell in measured.spells if spell.category == "waiting"}
    awaited = {f"{cause} to the host" for action, cause in planned.awaited.items() if action.kind.letter == "O"}
    assert awaited
    assert awaited <= waits
    assert "copies of all ranks: " in str(measured)


def assert_as_planned(case: Case, copies: Sequence[float], gpus: Gpus) -> None:
    """A step takes the plan's time, and holds the plan's bytes, but for what a step without offload needs beside them:
    the copy of the loss to the host, and a micro-batch's temporaries."""
    plain: list[list[Measured]] = gpus.run(steps_of, case._replace(lead=None), copies, ranks=4, seconds=200)
    measured: list[list[Measured]] = gpus.run(steps_of, case, copies, ranks=4, seconds=200)
    most = max(row[0].planned_peak for row in plain)
    assert max(row[0].planned_peak for row in measured) < most, "the table offloads"
    if case.for_weights:
        assert [row[0].planned_peak for row in measured] == [2, 3, 3, 3]  # of stages, in zb_v
    for rank, (rows, without) in enumerate(zip(measured, plain, strict=True)):
        for copy, step, other in zip(copies, rows, without, strict=True):
            where = f"rank {rank}, copies of {copy}"
            assert step.took - step.planned == pytest.approx(copy, abs=1e-6), where
            assert other.took - other.planned == pytest.approx(copy, abs=1e-6), where
            assert step.peak - step.planned_peak == pytest.approx(other.peak - other.planned_peak, abs=0.01), where
            assert step.waits == other.waits, where
            assert step.gradients == other.gradients, where


QUICK = ["zb_h1", "zb_h1, for W"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in CASES])
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


def on_one_rank(cells: str) -> tuple[fxpipe.ForwardBackward, Tensor]:
    device = fxpipe.init()
    row = tuple(map(Action.parse, cells.split()))
    table = Schedule((row,), edges=((0, 1),), placement=(0, 0), backward=(True, True), microbatches=2)
    torch.manual_seed(0)
    model = Blocks().to(device)
    topology = fxpipe.Topology([("pipe", 1)])
    forward_backward = fxpipe.compile(model, topology, microbatches=2, schedule=table, tracer="symbolic")
    return forward_backward, torch.randn(2 * 1024, 64).to(device)


def bytes_behind(cells: str) -> dict[str, int]:
    """The bytes that the device holds behind each action, over those before the step."""
    forward_backward, batch = on_one_rank(cells)
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
    small = 1 << 17  # the output, and less than 64 KiB each
    assert behind["0F0"] > 12 << 20  # two of gelu's tensors, and softmax
    assert behind["0O0"] < small
    assert behind["0P0"] - behind["1W0" if halves else "1B0"] == behind["0F0"] - behind["0O0"]


def test_all_that_w_needs_is_free_after_o(gpus: Gpus) -> None:
    """As free as after W, but for the output of the other micro-batch."""
    first, last = "0F0 1F0 0F1 1F1 1I0 1W0 0I0", "1I1 1W1 0I1 0W1"
    (behind,), (plain,) = (gpus.run(bytes_behind, f"{first} {amid} {last}", ranks=1) for amid in ("0O0 0P0 0W0", "0W0"))
    small = 1 << 17
    assert behind["0I0"] == plain["0I0"]
    assert behind["0I0"] - behind["0O0"] > 4 << 20  # the inputs of three linear layers, and their gradients
    assert abs(behind["0O0"] - plain["0W0"]) < small
    assert behind["0P0"] - behind["0O0"] == behind["0I0"] - behind["0O0"]
    assert behind["0W0"] == plain["0W0"]


def waits_for_nothing(action: type[BoundAction]) -> Any:
    """An action does not let the rank's stream wait for copies."""
    return mock.patch.object(action, "await_copies")


def begins_at_once(method: str) -> Any:
    """Copies one way do not wait for the rank's stream, but for their own."""
    plain = getattr(HostCopies, method)

    def without(self: HostCopies, copied: Any, mark: Any) -> Any:
        own = self._streams.get(method == "out") or torch.cuda.current_stream()
        with mock.patch.object(torch.accelerator, "current_stream", return_value=own):
            return plain(self, copied, mark)

    return mock.patch.object(HostCopies, method, without)


ORDERINGS = {
    "none": contextlib.nullcontext,
    "O waits for the copy": partial(waits_for_nothing, Offload),
    "B waits for the copy": partial(waits_for_nothing, BackwardAction),
    "W waits for the copy": partial(waits_for_nothing, WeightsAction),
    "a copy to the host waits for F": partial(begins_at_once, "out"),
    "a copy to the device waits for its memory": partial(begins_at_once, "back"),
}
WHOLE = "0F0 0O0 1F0 0F1 0O1 1F1 1B0 0P0 0B0 1B1 0P1 0B1"
HALVES = "0F0 1F0 0F1 1F1 1I0 1W0 0I0 0O0 1I1 1W1 0I1 0P0 0W0 0O1 0P1 0W1"


def faults_without(ordering: str, cells: str) -> list[str]:
    """The kinds of faults that the device reports in three steps without an ordering."""
    forward_backward, batch = on_one_rank(cells)
    with ORDERINGS[ordering](), simulated_gpu.watched() as reports:
        for _ in range(3):
            forward_backward(batch)
    forward_backward.close()
    return sorted({report.kind for report in simulated_gpu.faults(reports)})


@pytest.mark.parametrize(
    ("ordering", "cells"),
    [(each, WHOLE) for each in ORDERINGS if each[0] != "W"] + [(each, HALVES) for each in ORDERINGS if each[0] != "B"],
)
def test_the_device_notices_an_ordering_that_is_missing(ordering: str, cells: str, gpus: Gpus) -> None:
    (found,) = gpus.run(faults_without, ordering, cells, ranks=1)
    print(ordering, found)
    assert bool(found) == (ordering != "none")


def a_step_that_fails() -> list[float]:
    """Losses of a step, of a step that fails while copies are under way, and of the step again."""
    forward_backward, batch = on_one_rank("0F0 0O0 1F0 0F1 0O1 1F1 1B0 0P0 0P1 0B0 1B1 0B1")
    losses, beside = [float(forward_backward(batch))], HostCopies._beside
    for number in (1, 3):
        copies = iter(range(number))

        @contextlib.contextmanager
        def fails(self: HostCopies, on_host: OnHost, to_host: bool, mark: Any, copies: Any = copies) -> Any:
            with beside(self, on_host, to_host, mark):
                yield
            if next(copies, None) is None:
                raise ZeroDivisionError

        with mock.patch.object(HostCopies, "_beside", fails), contextlib.suppress(ZeroDivisionError):
            forward_backward(batch)
        losses.append(float(forward_backward(batch)))
    forward_backward.close()
    return losses


def test_copies_under_way_when_a_step_fails_harm_nothing(gpus: Gpus) -> None:
    (losses,) = gpus.run(a_step_that_fails, ranks=1)
    assert len(set(losses)) == 1
