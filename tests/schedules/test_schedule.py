"""Schedule and Timeline: parts that fit each other, and what a timeline tells."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import Cause
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, JOINED, RECOMPUTED, bare, chain, halves, joined, random_bare


def test_the_cause_of_an_action_is_what_it_waited_for_last() -> None:
    """Two stages, two micro-batches, B = 2F; a column per unit of time.

    0F0 0F1  .   .  0B0 0B0  .  0B1 0B1
     .  1F0 1B0 1B0 1F1 1B1 1B1  .   .
    """
    timeline = build("1f1b", chain(2), 2).simulate(forward=1, backward=2)
    causes = {
        "0F0": None, "0F1": ("0F0", False), "0B0": ("1B0", True), "0B1": ("1B1", True),
        "1F0": ("0F0", True), "1B0": ("1F0", False), "1F1": ("1B0", False), "1B1": ("1F1", False),
    }  # fmt: skip
    for action in timeline.spans:
        cause = timeline.cause(action)
        assert (cause and (str(cause.action), cause.crosses)) == causes[str(action)]
    assert list(map(str, timeline.critical_path)) == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_a_cause_on_the_same_rank_does_not_cross() -> None:
    timeline = bare(chain(3), 3, (0, 1, 0)).build("gpipe", 1).simulate(comm=0.5)
    crossing = {str(action): timeline.cause(action) for action in timeline.spans}
    assert crossing["1F0"] == Cause(Action(0, Kind.F, 0), True)
    assert crossing["2B0"] == Cause(Action(2, Kind.F, 0), False)
    assert crossing["0F0"] is None


@pytest.mark.parametrize("name", FAMILIES)
def test_the_critical_path_leads_from_0_to_the_makespan_without_a_gap_but_messages(name: str) -> None:
    """Whose link may be busy, and whose receive may be posted late; and a frozen stage may be held back."""
    for seed in range(60):
        graph = random_bare(seed, frozen=seed % 2 == 0)
        draw = random.Random(seed)
        forward, backward = ([draw.randint(1, 5) for _ in range(graph.stages)] for _ in range(2))
        comm = draw.choice([0, 1, 3])
        timeline = graph.build(name, 4).simulate(forward, backward, comm=comm)
        path = [timeline.spans[action] for action in timeline.critical_path]
        assert path[0].start == 0
        assert path[-1].end == timeline.makespan
        crossings = [bool(cause and cause.crosses) for cause in map(timeline.cause, timeline.critical_path)]
        gaps = [second.start - first.end for first, second in pairwise(path)]
        assert all(gap >= comm if crosses else gap == 0 for gap, crosses in zip(gaps, crossings[1:], strict=True))
        assert timeline.makespan == sum(span.duration for span in path) + sum(gaps)


def test_each_rank_has_a_bubble_of_its_own_and_their_mean_is_the_bubble() -> None:
    timeline = build("1f1b", chain(2), 2).simulate(forward=[1, 2], backward=[2, 4])
    assert timeline.makespan == 1 + 2 * 6 + 2
    assert timeline.busy == (6, 12)
    assert timeline.bubbles == (pytest.approx(9 / 15), pytest.approx(3 / 15))
    assert timeline.bubble == pytest.approx(6 / 15)


def test_a_rank_without_actions_idles_all_the_time_and_an_empty_table_takes_none() -> None:
    half_used = Schedule(((Action(0, Kind.F, 0),), ()), (), (0, 1), (False, False), 1).simulate()
    assert (half_used.bubbles, half_used.bubble) == ((0, 1), 0.5)
    empty = Schedule(((), ()), (), (0, 1), (False, False), 1).simulate()
    assert (empty.makespan, empty.bubble, empty.critical_path) == (0, 0, ())


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"backward": (True,)}, "backward has 1 entries for 2 stages"),
        ({"stage_names": ("a",)}, "stage_names has 1 entries for 2 stages"),
        ({"edges": ((0, 2),)}, "edge 0-2 names a stage outside of 0..1"),
        ({"microbatches": 1}, r"0F1 is of a micro-batch outside of 0\.\.0"),
        ({"rows": (("0F0",), ())}, "'0F0' is no Action; write Action"),
        ({"rows": ((Action(2, Kind.F, 0),), ())}, r"2F0 is of a stage outside of 0\.\.1"),
        ({"placement": (0, 2)}, r"placement=\(0, 2\) names a rank outside of 0\.\.1"),
        ({"tied": ((0, 1), (1, 2))}, r"tied=.* names a stage outside of 0\.\.1"),
    ],
    ids=str,
)
def test_a_schedule_whose_parts_do_not_fit_cannot_be_made(changes: dict[str, tuple[object, ...]], fact: str) -> None:
    with pytest.raises(ScheduleError, match=fact):
        replace(build("1f1b", chain(2), 2), **changes)  # type: ignore[arg-type]


# --- In flight: what stages hold of micro-batches, in number and in bytes ---


def test_bytes_are_held_until_the_weight_gradient_and_not_at_all_without_a_backward() -> None:
    late = halves(["0F0 0I0 0F1 0I1 0W0 0W1"])
    assert late.simulate(activation_bytes=8).peak_bytes == (16,)
    frozen = bare(chain(2), 2, (0, 0), frozen=frozenset([0])).build("1f1b", 4)
    assert frozen.simulate(activation_bytes=[1000, 3]).peak_bytes == (3,)


def test_a_group_counts_as_all_of_its_micro_batches() -> None:
    timeline = joined(JOINED).simulate(activation_bytes=10)
    assert timeline.peak_in_flight == (4, 4, 4, 4, 4)
    assert timeline.peak_bytes == (40, 40, 40, 40, 40)


def test_a_recomputed_stage_holds_a_micro_batch_from_its_r_on() -> None:
    assert joined(RECOMPUTED).simulate().peak_in_flight == (1, 1, 4, 4, 4)
