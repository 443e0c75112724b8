"""``compile(in_flight=)`` and ``preview(in_flight=)``: the table, its bytes, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import Hardware, Preview, ScheduleError, Topology
from fxpipe.schedules import build
from tests.graphs import chain
from tests.plan.test_recomputation import Blocks
from tests.plan.test_recomputation import preview as blocks_preview

WIDTH, MICROBATCHES = 8, 16
WIDTHS = (256,) * 4


def options(stages: int, **more: Any) -> dict[str, Any]:
    cuts: dict[str, Any] = {"boundaries": list(map(str, range(1, stages))), "microbatches": MICROBATCHES}
    loss = {"loss_fn": lambda y: y.square().mean(), "example_args": (torch.randn(2 * MICROBATCHES, WIDTH),)}
    return {**cuts, **loss, **more}


def layers(stages: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))


def preview(stages: int = 4, **more: Any) -> Preview:
    return fxpipe.preview(layers(stages), Topology([("pipe", 4)]), **options(stages, **more))


@pytest.mark.parametrize(
    ("family", "stages", "in_flight"),
    [
        *[("1f1b", 4, limit) for limit in ("2x", 8, [8, 6, 4, 2])],
        *[("interleaved_1f1b", 8, limit) for limit in ("2x", 20, [20, 18, 16, 14, 12, 10, 8, 6])],
        *[("zb_h1", 4, limit) for limit in ("2x", 8, [8, 7, 6, 5])],
    ],
    ids=str,
)
def test_the_limit_reaches_the_table(family: Any, stages: int, in_flight: Any) -> None:
    placement = [stage % 4 for stage in range(stages)]
    table = build(family, chain(stages), MICROBATCHES, placement, in_flight=in_flight)
    own = build(family, chain(stages), MICROBATCHES, placement)
    assert table.rows != own.rows
    more = {"schedule": family, "in_flight": in_flight}
    compiled = fxpipe.compile(layers(stages), Topology([("pipe", 4)]), **options(stages, **more))
    assert compiled.schedule.rows == preview(stages, **more).schedule.rows == table.rows


def test_the_bytes_and_the_limit_of_memory_count_the_room() -> None:
    own, more = preview(), preview(in_flight="2x")
    assert more.timeline.peak_in_flight == (8, 6, 4, 2)
    for before, after in zip(own.ranks, more.ranks, strict=True):
        assert after.activations == pytest.approx(2 * (before.activations or 0))
    between = (max(rank.total for rank in own.ranks) + max(rank.total for rank in more.ranks)) / 2
    limit: dict[str, Any] = {"hardware": Hardware(memory=between), "placement": {str(s): s for s in range(4)}}
    assert preview(**limit).fits
    assert preview(**limit, in_flight="2x").fits is False


def test_reschedule_keeps_the_limit() -> None:
    deep = fxpipe.compile(layers(4), Topology([("pipe", 4)]), **options(4, in_flight=[7, 5, 4, 2]))
    deep.record_timeline()
    deep(torch.randn(2 * MICROBATCHES, WIDTH))
    for family in ("greedy", "1f1b"):
        peaks = deep.reschedule(family).simulate().peak_in_flight  # type: ignore[arg-type]
        assert all(peak <= cap for peak, cap in zip(peaks, [7, 5, 4, 2], strict=True))
    with pytest.raises(ScheduleError, match="gpipe holds 16 micro-batches at stage 0, in_flight=7"):
        deep.reschedule("gpipe")


@pytest.mark.parametrize(
    ("in_flight", "message"),
    [
        ("3x", "in_flight is '3x'; it is a whole number, one for each stage, or \"2x\""),
        (True, "in_flight is True; it is a whole number"),
        (0, "at least 1 micro-batch must be in flight"),
        ([8, 6], "in_flight= has 2 entries"),
        (3, "1f1b holds 4 micro-batches at stage 0, in_flight=3"),
    ],
    ids=str,
)
def test_a_wrong_limit_is_refused(in_flight: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        preview(in_flight=in_flight)


@pytest.mark.parametrize("option", [{"in_flight": 8}, {"microbatch_cost": len}], ids=str)
def test_a_table_says_itself_what_runs_when(option: Any) -> None:
    table = build("1f1b", chain(4), MICROBATCHES)
    message = f"{next(iter(option))}= is for the tables of families, and schedule= is a table"
    with pytest.raises(fxpipe.RunError, match=message):
        preview(schedule=table, **option)


# --- offload="auto" makes room for more ---

FAST = Hardware(flops=75e12, flops_16=150e12, bandwidth=1.2e12, link=1e15, link_between=1e15, latency=0, host_link=2e11)


def auto(part: float, cost: Any = len, **figures: Any) -> Preview:
    """A preview whose ranks have this part of the memory that the fullest rank needs without more in flight."""
    names = blocks_preview(Blocks(WIDTHS)).graph.names
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "placement": {name: s for s, name in enumerate(names)}}
    most = max(rank.total for rank in blocks_preview(Blocks(WIDTHS), hardware=FAST, **given).ranks)
    hardware = dataclasses.replace(FAST, memory=part * most, **figures)
    return blocks_preview(Blocks(WIDTHS), hardware=hardware, offload="auto", microbatch_cost=cost, **given)


def in_flight(schedule: fxpipe.Schedule) -> tuple[int, ...]:
    """The most micro-batches at each stage between F and B, also while they are on the host."""
    peaks = []
    for stage, row in enumerate(schedule.rows):
        assert {action.stage for action in row} == {stage}
        changes = [{"F": 1, "B": -1}.get(action.kind.letter, 0) for action in row]
        peaks.append(max(itertools.accumulate(changes)))
    return tuple(peaks)


@pytest.mark.parametrize(("part", "leaving"), [(1.02, True), (1.4, True), (3, False)])
def test_offload_auto_holds_twice_as_many_within_the_memory(part: float, leaving: bool) -> None:
    own, more = auto(part, cost=None), auto(part)
    assert (in_flight(own.schedule), in_flight(more.schedule)) == ((4, 3, 2, 1), (8, 6, 4, 2))
    assert bool(more.schedule.dependencies.offloaded) == leaving
    assert (own.fits, more.fits) == (True, True)
    assert more.timeline.makespan <= own.timeline.makespan * 1.001
    assert "micro-batches in flight: blocks.0 4 → 8, block1 3 → 6, block2 2 → 4, block3 1 → 2\n" in str(more)
    assert "micro-batches in flight" not in str(own)


def test_without_the_time_or_the_memory_of_the_host_fewer_are_in_flight() -> None:
    # 6 of rank 0 fit without copies, and 5 do not fit the smaller memory.
    for part, link, most in ((1.4, 2e11, 8), (1.4, 5e9, 6), (1.02, 1e8, 4)):
        own, more = (auto(part, cost, host_link=link) for cost in (None, len))
        assert in_flight(more.schedule)[0] == most
        assert more.timeline.makespan <= own.timeline.makespan * 1.001
    needed = max(rank.host for rank in auto(1.02).ranks)
    little = auto(1.02, host_memory=4 * needed - 4)
    assert 4 < in_flight(little.schedule)[0] < 8
    assert max(rank.host for rank in little.ranks) < needed
