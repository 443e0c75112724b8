"""A plan beside a real step: what is longer than planned, worked out by hand and in general."""

from __future__ import annotations

import dataclasses
import random

import pytest

import fxpipe
from fxpipe import Action, Kind, Schedule, ScheduleError, Timeline
from fxpipe.distributed.stopwatch import Lap
from fxpipe.run.timeline_recorder import timeline_of
from fxpipe.schedules import Costs, build
from fxpipe.schedules.comparison import Comparison, Part, Share, Wait
from fxpipe.schedules.step_breakdown import Spell
from tests.graphs import FAMILIES, random_bare

parse = Action.parse


def by_hand() -> Comparison:
    """Two stages on two ranks, one micro-batch. Planned, in seconds: F = 1, B = 2, a hop 0.5.

    planned  rank 0  0F0 0–1                                     0B0 5–7
             rank 1           hop  1F0 1.5–2.5  1B0 2.5–4.5  hop
    real     rank 0  0F0 0–1.25                                  0B0 7–9
             rank 1           hop  1F0 2–3      1B0 3.25–6.25 hop
    """
    schedule = build("1f1b", [(0, 1)], 1, names=["first", "last"])
    laps = [
        Lap(parse("0F0"), 5.0, 5.0, 6.25),
        Lap(parse("1F0"), 5.0, 7.0, 8.0),
        Lap(parse("1B0"), 8.25, 8.25, 11.25),
        Lap(parse("0B0"), 6.25, 12.0, 14.0),
    ]
    return fxpipe.compare(schedule.simulate(1, 2, comm=0.5), timeline_of(schedule, laps))


def test_the_critical_path_tells_where_the_time_went() -> None:
    """Planned 7: 1 + .5 + 1 + 2 + .5 + 2. Real 9: 1.25 + .75 + 1 + .25 + 3 + .75 + 2."""
    comparison = by_hand()
    assert comparison.planned.makespan == 7
    assert comparison.real.makespan == 9
    assert set(comparison.path) == {
        Part("before the first action", 1, 0.0, 0.0),
        Part("F of stage 0: first", 1, 1.0, 1.25),
        Part("hop from rank 0 to rank 1", 1, 0.5, 0.75),
        Part("F of stage 1: last", 1, 1.0, 1.0),
        Part("rank 1, between actions", 1, 0.0, 0.25),
        Part("B of stage 1: last", 1, 2.0, 3.0),
        Part("hop from rank 1 to rank 0", 1, 0.5, 0.75),
        Part("B of stage 0: first", 1, 2.0, 2.0),
    }
    assert comparison.path[0].what == "B of stage 1: last"  # what is most longer than planned stands first
    assert comparison.slack == 0


def test_each_ranks_time_is_computing_waiting_the_end_and_what_is_between() -> None:
    """Rank 0 waits 1.25–7 for 0B0; rank 1 from 0 to 2 for 1F0, then loses .25; done at 6.25 of 9, not 4.5 of 7."""
    assert by_hand().shares == (
        Share(0, 3.0, 3.25, planned_waiting=4.0, waiting=5.75, planned_rest=0.0, rest=0.0, between=0.0),
        Share(1, 3.0, 4.0, planned_waiting=1.5, waiting=2.0, planned_rest=2.5, rest=2.75, between=0.25),
    )


def test_the_longest_waits_are_told_with_the_action_that_was_waited_for() -> None:
    assert by_hand().waits == (
        Wait(parse("0B0"), parse("1B0"), planned=4.0, real=5.75),
        Wait(parse("1F0"), parse("0F0"), planned=1.5, real=2.0),
    )


def test_it_prints_both_makespans_and_bubbles_and_three_tables() -> None:
    text = str(by_hand())
    first, *_ = text.splitlines()
    # busy: 6 of 14 planned, 7.25 of 18 real
    assert first == ("1f1b: makespan planned 7000.00 ms, real 9000.00 ms, +28.6%; bubble planned 57.1%, real 59.7%")
    assert len(text.split("\n\n")) == 4
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "B of stage 1: last 1 2000.00 3000.00 +1000.00" in lines
    assert "0B0 1B0 from rank 1 4000.00 5750.00" in lines
    assert "1 3000.00 4000.00 1500.00 2000.00 2500.00 2750.00 250.00" in lines


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_and_shares_sum_to_the_makespans(name: str) -> None:
    for seed in range(60):
        graph, draw = random_bare(seed, frozen=seed % 3 == 0), random.Random(seed)
        schedule = graph.build(name, 1 + seed % 5)
        cost = [draw.uniform(1, 3) for _ in range(graph.stages)]
        planned = schedule.simulate(cost, cost, comm=draw.choice([0, 0.5]))
        real = jittered(schedule, planned.costs, draw)
        comparison = fxpipe.compare(planned, real)
        assert sum(part.real for part in comparison.path) == pytest.approx(real.makespan)
        assert sum(part.planned for part in comparison.path) + comparison.slack == pytest.approx(planned.makespan)
        assert comparison.slack >= -1e-9
        for share in comparison.shares:
            assert share.compute + share.waiting + share.rest + share.between == pytest.approx(real.makespan)
            assert share.between >= -1e-9
        assert str(comparison)


def jittered(schedule: Schedule, costs: Costs, draw: random.Random) -> Timeline:
    """A real step: every action takes longer by a random part, and begins a little later than it could."""
    ends: dict[Action, float] = {}
    free = [0.0] * len(schedule.rows)
    laps = []
    planned = schedule.simulate(costs)
    for action in sorted(planned.spans, key=lambda action: planned.spans[action].start):
        rank = schedule.placement[action.stage]
        since = free[rank] + draw.uniform(0, 0.1)
        arrivals = [
            ends[other] + (costs.comm + 0.1) * (schedule.placement[other.stage] != rank)
            for other in schedule.dependencies.needs(action)
        ]
        start = max([since, *arrivals])
        ends[action] = free[rank] = start + costs.time(action) * draw.uniform(1, 1.5)
        laps.append(Lap(action, since, start, ends[action]))
    return timeline_of(schedule, laps)


def test_a_plan_beside_itself_has_nothing_to_tell() -> None:
    plan = build("1f1b", [(0, 1), (1, 2)], 4).simulate(0.1, 0.2)
    comparison = fxpipe.compare(plan, plan)
    assert all(part.planned == pytest.approx(part.real) for part in comparison.path)
    assert comparison.waits == ()
    assert "waited for" not in str(comparison)
    assert "one process" not in str(comparison)


def test_a_step_that_one_process_played_says_so() -> None:
    schedule = build("1f1b", [(0, 1)], 2)
    real = dataclasses.replace(schedule.simulate(0.1, 0.2), measured=True, spells=(Spell((0, 1), "compute", "", 0, 1),))
    told = str(fxpipe.compare(schedule.simulate(0.1, 0.2), real))
    assert "one process played all ranks of the real step" in told


def test_timelines_of_different_tables_are_refused() -> None:
    one, other = (build(name, [(0, 1)], 4).simulate() for name in ("1f1b", "gpipe"))
    with pytest.raises(ScheduleError, match=r"different tables(.|\n)*compare one.csv two.csv"):
        fxpipe.compare(one, other)


def test_a_plan_in_forwards_beside_a_step_in_seconds_is_refused_with_what_to_write() -> None:
    real = by_hand().real
    with pytest.raises(ScheduleError, match=r"real\.schedule\.simulate\(real\.costs\)"):
        fxpipe.compare(real.schedule.simulate(), real)
    fxpipe.compare(real.schedule.simulate(real.costs), real)


def test_what_ran_in_one_of_two_steps_alone_counts_as_longer() -> None:
    """A micro-batch without weight has no backward."""
    real = by_hand().real
    forwards = [Lap(action, start, start, end) for action, (start, end) in real.spans.items() if action.kind is Kind.F]
    shorter = timeline_of(real.schedule, forwards)
    parts = {part.what: part for part in fxpipe.compare(shorter, real).path}
    assert parts["B of stage 1: last"] == Part("B of stage 1: last", 1, 0.0, 3.0)
    assert str(fxpipe.compare(real, shorter))
