"""Spells: the parts of a step by hand, their sums, and how they are told."""

from __future__ import annotations

import csv
import json
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fxpipe.run.timeline_recorder import timeline_of
from fxpipe.schedules import build
from fxpipe.schedules.schedule import Timeline
from fxpipe.schedules.show.chrome_trace import chrome_trace
from fxpipe.schedules.show.html_page import html
from fxpipe.schedules.step_breakdown import AFTER, BEFORE, BETWEEN, COMPUTE, WAITING, Spell
from tests.run.test_measured_timeline import COURSES, laps_by_hand


def by_hand() -> Timeline:
    """Two stages on two ranks, with the parts of each rank's step: times are from 10.0 on."""
    return timeline_of(build("1f1b", [(0, 1)], 2), laps_by_hand(), courses=COURSES)


RANK_1 = [
    (BEFORE, "settling", -1.0, 0.25),
    (BEFORE, "preparing", 0.25, 0.5),
    (WAITING, "0F0 from rank 0", 0.5, 1.25),
    (COMPUTE, "1F0", 1.25, 2.25),
    (BETWEEN, "", 2.25, 2.5),  # 1B0 needs no other rank's: the time in front of it is this rank's own
    (COMPUTE, "1B0", 2.5, 7.0),
    (COMPUTE, "1F1", 7.0, 8.0),
    (COMPUTE, "1B1", 8.0, 14.0),
    (AFTER, "messages", 14.0, 14.5),
    (AFTER, "loss", 14.5, 16.5),
]


def test_a_step_is_cut_where_its_rank_stood_ready_began_and_ended() -> None:
    mine = [spell[1:] for spell in by_hand().spells if spell.ranks == (1,)]
    assert mine == RANK_1


def test_spells_follow_one_another_and_sum_to_the_step() -> None:
    timeline = by_hand()
    for spells in ([one for one in timeline.spells if one.ranks == (rank,)] for rank in (0, 1)):
        assert all(first.end == second.start for first, second in pairwise(spells))
    first, second = timeline.spent
    assert first.wall == sum(first.seconds.values()) == 17.75  # 9.0 to 26.75
    assert second.wall == sum(second.seconds.values()) == 17.5
    assert second.seconds == {COMPUTE: 12.5, WAITING: 0.75, BETWEEN: 0.25, BEFORE: 1.5, AFTER: 2.5}
    assert first.seconds[WAITING] == 4.5 + 4.75
    assert list(first.waits.items()) == [("1B1 from rank 1", 4.75), ("1B0 from rank 1", 4.5)]
    assert second.outside == {"settling": 1.25, "preparing": 0.25, "messages": 0.5, "loss": 2.0}


def test_where_one_process_plays_all_ranks_nothing_comes_from_others() -> None:
    laps = [lap._replace(since=lap.start) for lap in laps_by_hand() if lap.action.stage == 0]
    (spent,) = timeline_of(build("1f1b", [(0, 1)], 2), laps, in_turns=True, courses=COURSES[:1]).spent
    assert spent.label == "0-1"
    assert spent.seconds[WAITING] == 0
    assert spent.seconds[BETWEEN] == 4.5 + 4.75
    assert spent.wall == sum(spent.seconds.values()) == 17.75


def test_a_rank_without_actions_is_outside_of_them_all_the_time() -> None:
    laps = [lap for lap in laps_by_hand() if lap.action.stage == 0]
    alone = timeline_of(build("1f1b", [(0, 1)], 2), laps, courses=COURSES).spent[1]
    assert alone.seconds[COMPUTE] == alone.seconds[WAITING] == alone.seconds[BETWEEN] == 0
    assert alone.wall == sum(alone.seconds.values()) == 17.5


def test_moments_that_a_device_tells_out_of_order_keep_the_sum() -> None:
    laps = [lap._replace(end=lap.start - 0.5) if str(lap.action) == "1F1" else lap for lap in laps_by_hand()]
    for one in timeline_of(build("1f1b", [(0, 1)], 2), laps, courses=COURSES).spent:
        assert min(one.seconds.values()) >= 0
        assert one.wall == pytest.approx(sum(one.seconds.values()))


def test_the_text_has_a_row_for_each_rank_in_milliseconds() -> None:
    timeline = by_hand()
    told = str(timeline).removeprefix(f"{replace(timeline, spells=())}\n").splitlines()
    assert [line.split()[:7] for line in told[2:4]] == [
        ["0", "17750.00", "7000.00", "9250.00", "0.00", "1000.00", "500.00"],
        ["1", "17500.00", "12500.00", "750.00", "250.00", "1500.00", "2500.00"],
    ]
    assert told[0].split() == ["rank", "step", "ms", COMPUTE, WAITING, BETWEEN, BEFORE, AFTER, "longest", "waits"]
    assert told[2].endswith("1B1 from rank 1 4750.00, 1B0 from rank 1 4500.00")
    assert told[4].endswith("settling 1000.00, preparing 250.00, messages 500.00, loss 1000.00")
    assert "1B1 from rank 1 4750.00" in timeline._repr_html_()
    assert "1B1 from rank 1 4750.00" in html(timeline)


def test_less_than_nothing_that_is_rounding_is_told_as_nothing() -> None:
    timeline = by_hand()
    spells = tuple(one._replace(end=one.start - 1e-9) if one.category == BETWEEN else one for one in timeline.spells)
    told = str(replace(timeline, spells=spells))
    assert " 0.00" in told
    assert "-0.00" not in told


def test_csv_has_a_line_for_each_spell(tmp_path: Path) -> None:
    timeline = by_hand()
    timeline.to_csv(tmp_path / "spells.csv")
    with open(tmp_path / "spells.csv", newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    told = [
        Spell((int(row["rank"]),), row["category"], row["what"], float(row["start"]), float(row["end"])) for row in read
    ]
    assert tuple(told) == timeline.spells


def test_a_trace_shows_them_beside_the_actions_and_begins_with_the_step() -> None:
    timeline = by_hand()
    events = [event for event in json.loads(chrome_trace(timeline))["traceEvents"] if event["ph"] == "X"]
    for rank in (0, 1):
        thread = sorted((event["ts"], event["dur"]) for event in events if event["tid"] == 1 + rank)
        spells = [spell for spell in timeline.spells if spell.ranks == (rank,)]
        assert thread == [(1e6 * (spell.start + 1.0), 1e6 * spell.duration) for spell in spells]
    assert min(event["ts"] for event in events) == 0
    assert {"settling", "waiting for 1B0 from rank 1", "between actions", "loss"} <= {one["name"] for one in events}


def test_a_plan_has_none_and_says_nothing_of_them() -> None:
    plan = build("1f1b", [(0, 1)], 2).simulate()
    assert plan.spells == plan.spent == ()
    assert "outside of actions" not in str(plan) + html(plan)
    assert pickle.loads(pickle.dumps(by_hand())).spells == by_hand().spells
