"""Batches whose samples have different costs: what a preview says of them, and what a recorded step would save."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe import RunError
from fxpipe.forecast.advice import advise
from fxpipe.forecast.uneven import saving_of
from fxpipe.schedules import Costs, build, pyramid
from fxpipe.schedules.action_times import Span
from tests.graphs import chain
from tests.plan.test_in_flight import auto, planned
from tests.plan.test_recomputation import Blocks

BATCHES = (8 * torch.rand(3, 64, generator=torch.Generator().manual_seed(0))).tolist()


def test_each_way_is_the_simulation_of_its_micro_batches() -> None:
    """Without an example, F = 1 and B = 2 for a micro-batch of the mean cost."""
    uneven = planned(example_args=None, costs=BATCHES).uneven
    assert uneven is not None
    mean = sum(map(sum, BATCHES)) / 48
    tables = [build("1f1b", chain(4), 16, in_flight=limit) for limit in (None, "2x")]
    spans: list[tuple[float, ...]] = []
    for batch in BATCHES:
        cut = [sum(batch[first : first + 4]) / mean for first in range(0, 64, 4)]
        dealt = [sum(batch[sample] for sample in part) / mean for part in fxpipe.deal(batch, 16)]
        ordered = [dealt[number] for number in pyramid(dealt)]
        ways = (0, cut), (0, dealt), (0, ordered), (1, cut), (1, ordered)
        spans.append(tuple(tables[more].simulate([row] * 4).makespan for more, row in ways))
    makespans = list(zip(*spans, strict=True))
    *runs, bound = uneven.runs
    assert [run.makespan for run in runs] == pytest.approx(list(map(fmean, makespans)))
    ratios = [geometric_mean(map(float.__truediv__, makespans[0], each)) for each in makespans]
    assert [run.speedup for run in runs] == pytest.approx(ratios)
    assert bound.makespan <= min(run.makespan for run in runs)
    assert [tuple(run.in_flight) for run in runs] == [(4, 3, 2, 1)] * 3 + [(8, 6, 4, 2)] * 2
    assert [sum(run.busy) for run in runs] == pytest.approx([4 * 16 * 3] * 5)  # each action once


def test_a_dict_counts_at_its_stages_and_bytes_grow_with_costs(tmp_path: Path) -> None:
    costs = [[{"block1": 2 * (sample >= 32)} for sample in range(64)]]
    plan = planned(costs=costs)
    assert plan.uneven is not None
    come, dealt, *_ = plan.uneven.runs
    # As samples come, eight micro-batches have nothing at block1, and eight have twice the mean.
    assert come.activations == 2 * (plan.ranks[1].activations or 0)
    assert dealt.makespan == pytest.approx(plan.timeline.makespan)
    assert plan.as_dict()["uneven"][0]["activations"] == come.activations
    assert str(plan.uneven) in str(plan)
    plan.uneven.to_svg(tmp_path / "uneven.svg")
    assert (tmp_path / "uneven.svg").read_text().count(": idle ") == 2 * 4 * 5


def test_the_room_of_the_plan_is_what_is_compared() -> None:
    plan = auto(1.4, host_link=5e9, costs=BATCHES)
    assert plan.uneven is not None
    assert [max(run.in_flight) for run in plan.uneven.runs[:-1]] == [4, 4, 4, 5, 5]


WRONG = [
    (3, "costs is 3; it is for each batch a list with the cost of each sample"),
    ([[1] * 15], "15 samples cannot be dealt to 16 micro-batches"),
    ([[1] * 16, [1] * 15 + [-1]], "costs[1][15] is -1; the cost of a sample is a finite number, 0 or more"),
    ([[float("nan")] * 16], "costs[0][0] is nan; the cost of a sample is a finite number"),
    ([[{"blok1": 1}] * 16], "costs[0][0] names 'blok1', which is no stage; did you mean"),
]


@pytest.mark.parametrize(("costs", "message"), WRONG, ids=lambda value: str(value)[-20:])
def test_wrong_costs_are_refused(costs: Any, message: str) -> None:
    with pytest.raises(RunError, match=re.escape(message)):
        planned(costs=costs)


# --- a recorded step ---


def test_a_recorded_step_tells_what_order_and_room_would_save() -> None:
    step = fxpipe.compile(Blocks(), fxpipe.Topology([("pipe", 4)]), microbatches=16)
    row = [sum(BATCHES[0][first : first + 4]) / 1000 for first in range(0, 64, 4)]
    order = pyramid(row)
    usual = dataclasses.replace(Costs.of(4, median(row), 2 * median(row)), source="costs measured")
    table, deeper = (build("1f1b", chain(4), 16, in_flight=limit) for limit in (None, "2x"))
    plan, ordered = table.simulate([row] * 4), [[row[number] for number in order]] * 4
    recorded = dataclasses.replace(plan, costs=usual, measured=True)
    plans = table.simulate(ordered), deeper.simulate([row] * 4), deeper.simulate(ordered)
    saved = [f"{1 - other.makespan / plan.makespan:.0%}" for other in plans]
    text = saving_of(step._plans, recorded)
    both = f'microbatch_cost= and in_flight="2x" would save {saved[2]}'
    assert f'microbatch_cost= would save {saved[0]}, in_flight="2x" would save {saved[1]}, {both}' in text
    assert str(advise(step._plans, usual, recorded)).endswith(text)
    # A single action that takes long is no reason: B of the same micro-batch does not.
    table_costs = Costs.of(4, [row] * 4, backward=2 * median(row))
    assert saving_of(step._plans, dataclasses.replace(table.simulate(table_costs), costs=usual)) == ""
    assert "makespan planned" in str(fxpipe.compare(plan, recorded))


def test_reschedule_says_it_on_its_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = fxpipe.compile(Blocks(), fxpipe.Topology([("pipe", 4)]), microbatches=16)
    step.record_timeline()
    step(torch.randn(32, 32))
    recorded = step._steps.recorder.recorded()
    assert recorded is not None
    spans = {
        action: Span(0, recorded.costs.time(action) * (1 + 5 * (action.microbatch < 2))) for action in recorded.spans
    }
    monkeypatch.setattr(step._steps.recorder, "recorded", lambda: dataclasses.replace(recorded, spans=spans))
    step.reschedule("1f1b")
    assert "ms; the recorded step's micro-batches differ: " in capfd.readouterr().err
    assert "would save" in str(step.advise())
