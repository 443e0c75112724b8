"""``compile(in_flight=)`` and ``preview(in_flight=)``: the table, its bytes, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import Hardware, Preview, ScheduleError, Topology
from fxpipe.schedules import build
from tests.graphs import chain

WIDTH, MICROBATCHES = 8, 16


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
        ("3x", 'in_flight is \'3x\'; it is a whole number, one for each stage, or "2x"'),
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
