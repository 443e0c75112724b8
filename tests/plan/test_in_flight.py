"""``compile(in_flight=)`` and ``preview(in_flight=)``: the table, its bytes, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe import Hardware, Preview, ScheduleError, Topology
from fxpipe.schedules import build
from tests.graphs import chain
from tests.plan.test_recomputation import Blocks, preview

FAST = Hardware(flops=75e12, flops_16=150e12, bandwidth=1.2e12, link=1e15, link_between=1e15, latency=0, host_link=2e11)
EIGHT = [*range(20, 4, -2)]


def planned(stages: int = 4, **options: Any) -> Preview:
    placement = {name: stage % 4 for stage, name in enumerate(preview(Blocks((256,) * stages)).graph.names)}
    return preview(Blocks((256,) * stages), **{"microbatches": 16, "placement": placement, **options})


def counted(schedule: fxpipe.Schedule) -> tuple[int, ...]:
    """The most micro-batches of each rank between F and B, also while they are on the host."""
    changes = ([{"F": 1, "B": -1}.get(action.kind.letter, 0) for action in row] for row in schedule.rows)
    return tuple(max(itertools.accumulate(each)) for each in changes)


CASES = [
    *[("1f1b", 4, limit) for limit in ("2x", 8, [8, 6, 4, 2])],
    *[("interleaved_1f1b", 8, limit) for limit in ("2x", 20, EIGHT)],
    *[("zb_h1", 4, limit) for limit in ("2x", 8, [8, 7, 6, 5])],
]


@pytest.mark.parametrize(("family", "stages", "in_flight"), CASES, ids=str)
def test_the_limit_reaches_the_table(family: Any, stages: int, in_flight: Any) -> None:
    own, table = (
        build(family, chain(stages), 16, [0, 1, 2, 3] * (stages // 4), in_flight=n) for n in (None, in_flight)
    )
    assert planned(stages, schedule=family, in_flight=in_flight).schedule.rows == table.rows != own.rows


def test_the_bytes_and_the_limit_of_memory_count_the_room() -> None:
    own, more = planned(), planned(in_flight="2x")
    for before, after in zip(own.ranks, more.ranks, strict=True):
        assert after.activations == pytest.approx(2 * (before.activations or 0))
    between = Hardware(memory=sum(max(rank.total for rank in each.ranks) for each in (own, more)) / 2)
    assert [planned(hardware=between, in_flight=limit).fits for limit in (None, "2x")] == [True, False]


def test_reschedule_keeps_the_limit() -> None:
    step = fxpipe.compile(Blocks(), Topology([("pipe", 4)]), microbatches=16, in_flight=[7, 5, 4, 2])
    assert counted(step.schedule) == (7, 5, 3, 1)  # at most 5/3 of what rank 1 holds without the limit
    step.record_timeline()
    step(torch.randn(32, 32))
    assert all(map(int.__le__, counted(step.reschedule("greedy")), (7, 5, 4, 2)))
    with pytest.raises(ScheduleError, match="gpipe holds 16 micro-batches at stage 0, in_flight=7"):
        step.reschedule("gpipe")
    assert counted(step.reschedule("greedy", in_flight=2)) <= (2, 2, 2, 2)  # a limit of its own goes before it


WRONG = [
    ({"in_flight": "3x"}, "in_flight is '3x'; it is a whole number, one for each stage, or \"2x\""),
    ({"in_flight": 0}, "at least 1 micro-batch must be in flight"),
    ({"in_flight": [8, 6]}, "in_flight= has 2 entries"),
    ({"in_flight": 3}, "1f1b holds 4 micro-batches at stage 0, in_flight=3"),
    ({"in_flight": 8, "schedule": build("1f1b", chain(4), 16)}, "in_flight= is for the tables of families, and sched"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_a_wrong_limit_is_refused(options: Any, message: str) -> None:
    with pytest.raises((ScheduleError, fxpipe.RunError), match=re.escape(message)):
        planned(**options)


def auto(part: float, cost: Any = len, costs: Any = None, **figures: Any) -> Preview:
    """The plan with this part of the memory that the fullest rank needs without more in flight."""
    memory = part * max(rank.total for rank in planned(hardware=FAST).ranks)
    hardware = dataclasses.replace(FAST, memory=memory, **figures)
    return planned(hardware=hardware, offload="auto", microbatch_cost=cost, costs=costs)


@pytest.mark.parametrize(
    ("part", "link", "most", "leave"),
    # With a slow link, none leaves: 5 micro-batches of rank 0 fit 1.4 times the memory, and not 1.02 times.
    [(1.02, 2e11, 8, True), (1.4, 2e11, 8, True), (3, 2e11, 8, False), (1.4, 5e9, 5, False), (1.02, 1e8, 4, False)],
)
def test_offload_auto_holds_up_to_twice_as_many(part: float, link: float, most: int, leave: bool) -> None:
    own, more = (auto(part, cost, host_link=link) for cost in (None, len))
    assert (counted(own.schedule)[0], counted(more.schedule)[0]) == (4, most)
    assert (own.fits, more.fits, bool(more.schedule.dependencies.offloaded)) == (True, True, leave)
    assert more.timeline.makespan <= own.timeline.makespan * 1.001
    assert (f"micro-batches in flight: blocks.0 4 → {most}, block1 3 → " in str(more)) == (most > 4)


def test_what_the_host_cannot_hold_is_not_in_flight() -> None:
    needed = max(rank.host for rank in auto(1.02).ranks)
    little = auto(1.02, host_memory=4 * needed - 4)
    assert 4 < counted(little.schedule)[0] < 8
    assert max(rank.host for rank in little.ranks) < needed
