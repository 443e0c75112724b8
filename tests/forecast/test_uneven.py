"""Batches whose samples have different costs: what a preview says of them, and what a recorded step would save."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.forecast.advice import advise
from fxpipe.forecast.uneven import saving_of
from fxpipe.schedules import Costs, build, pyramid
from fxpipe.schedules.action_times import Span
from tests.graphs import chain
from tests.plan.test_in_flight import auto, planned
from tests.plan.test_recomputation import Blocks

BATCHES = (8 * torch.rand(3, 64, generator=torch.Generator().manual_seed(0))).tolist()
TABLE, DEEPER = (build("1f1b", chain(4), 16, in_flight=limit) for limit in (None, "2x"))
MEAN = sum(map(sum, BATCHES)) / 48


def test_each_way_is_the_simulation_of_its_micro_batches() -> None:
    """Without an example, F = 1 and B = 2 for a micro-batch of the mean cost."""
    *runs, bound = planned(example_args=None, costs=BATCHES).uneven.runs  # type: ignore[union-attr]
    spans = []
    for batch in BATCHES:
        cut = [sum(batch[first : first + 4]) / MEAN for first in range(0, 64, 4)]
        dealt = [sum(batch[sample] for sample in part) / MEAN for part in fxpipe.deal(batch, 16)]
        ordered = [dealt[number] for number in pyramid(dealt)]
        ways = (TABLE, cut), (TABLE, dealt), (TABLE, ordered), (DEEPER, cut), (DEEPER, ordered)
        spans.append([table.simulate([row] * 4).makespan for table, row in ways])
    come = [makespans[0] for makespans in spans]
    for run, makespans in zip(runs, zip(*spans, strict=True), strict=True):
        assert run.makespan == pytest.approx(fmean(makespans))
        assert run.speedup == pytest.approx(geometric_mean(map(float.__truediv__, come, makespans)))
        assert sum(run.busy) == pytest.approx(4 * 16 * 3)
        assert bound.makespan <= run.makespan
    assert [tuple(run.in_flight) for run in runs] == [(4, 3, 2, 1)] * 3 + [(8, 6, 4, 2)] * 2


def test_a_dict_counts_at_its_stages_and_bytes_grow_with_costs(tmp_path: Path) -> None:
    plan = planned(costs=[[{"block1": 2 * (sample >= 32)} for sample in range(64)]])
    come, dealt, *_ = plan.uneven.runs  # type: ignore[union-attr]
    # As samples come, eight micro-batches have nothing at block1, and eight have twice the mean.
    assert come.activations == plan.as_dict()["uneven"][0]["activations"] == 2 * (plan.ranks[1].activations or 0)
    assert dealt.makespan == pytest.approx(plan.timeline.makespan)
    assert str(plan.uneven) in str(plan)
    plan.uneven.to_svg(tmp_path / "uneven.svg")  # type: ignore[union-attr]
    assert (tmp_path / "uneven.svg").read_text().count(": idle ") == 2 * 4 * 5


def test_the_room_of_the_plan_is_compared() -> None:
    runs = auto(1.4, host_link=5e9, costs=BATCHES).uneven.runs  # type: ignore[union-attr]
    assert [max(run.in_flight) for run in runs[:-1]] == [4, 4, 4, 5, 5]


WRONG: list[Any] = [
    (3, "costs is 3; it is for each batch a list with the cost of each sample"),
    ([[]], "costs is [[]]; it is for each batch a list"),
    ([[1] * 15], "15 samples cannot be dealt to 16 micro-batches"),
    ([[1] * 16, [1] * 15 + [-1]], "costs[1][15] is -1; a cost is a finite number, 0 or more"),
    ([[float("nan")] * 16], "costs[0][0] is nan; a cost is a finite number"),
    ([[{"blok1": 1}] * 16], "costs[0][0] names 'blok1', which is no stage; did you mean"),
]


@pytest.mark.parametrize(("costs", "message"), WRONG, ids=lambda value: str(value)[-20:])
def test_wrong_costs_are_refused(costs: Any, message: str) -> None:
    with pytest.raises(fxpipe.RunError, match=re.escape(message)):
        planned(costs=costs)


def test_a_recorded_step_tells_what_order_and_room_would_save() -> None:
    row = [sum(BATCHES[0][first : first + 4]) / 1000 for first in range(0, 64, 4)]
    usual = replace(Costs.of(4, median(row), 2 * median(row)), source="costs measured")
    plan, ordered = TABLE.simulate([row] * 4), [[row[number] for number in pyramid(row)]] * 4
    recorded = replace(plan, costs=usual, measured=True)
    ways = {"microbatch_cost=": (TABLE, ordered), 'in_flight="2x"': (DEEPER, [row] * 4)}
    ways['microbatch_cost= and in_flight="2x"'] = DEEPER, ordered
    saved = {way: 1 - table.simulate(rows).makespan / plan.makespan for way, (table, rows) in ways.items()}
    assert min(saved.values()) > 0.05
    text = ", ".join(f"{way} would save {part:.0%}" for way, part in saved.items())
    step = fxpipe.compile(Blocks(), fxpipe.Topology([("pipe", 4)]), microbatches=16)
    assert saving_of(step._plans, recorded) == f"the recorded step's micro-batches differ: {text}"
    assert str(advise(step._plans, usual, recorded)).endswith(text)
    assert "makespan planned" in str(fxpipe.compare(plan, recorded))
    # A long F alone is no reason.
    noisy = TABLE.simulate(Costs.of(4, [row] * 4, backward=2 * median(row)))
    assert saving_of(step._plans, replace(noisy, costs=usual)) == ""


def test_reschedule_and_advise_say_it(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = fxpipe.compile(Blocks(), fxpipe.Topology([("pipe", 4)]), microbatches=16)
    step.record_timeline()
    step(torch.randn(32, 32))
    real = step.timeline()
    spans = {action: Span(0, real.costs.time(action) * (1 + 5 * (action.microbatch < 2))) for action in real.spans}
    monkeypatch.setattr(step._steps.recorder, "recorded", lambda: replace(real, spans=spans))
    step.reschedule("1f1b")
    assert "ms; the recorded step's micro-batches differ: " in capfd.readouterr().err
    assert "would save" in str(step.advise())
