"""Micro-batches of different costs: their times and bytes, their order, and more of them in flight."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import build, pyramid, with_costs
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import Kind
from tests.graphs import FAMILIES, WORKED, chain, random_bare

ROUND = [0, 1, 2, 3] * 2
UNEVEN = [[1, 2, 6, 1], [1, 1, 1, 1]]


def rows_for(stages: int, microbatches: int, seed: int) -> list[list[float]]:
    generator = random.Random(seed)
    return [[generator.lognormvariate(0, 1) for _ in range(microbatches)] for _ in range(stages)]


# --- costs ---


def test_rows_give_each_action_its_own_time_and_b_is_twice_f() -> None:
    timeline = build("gpipe", chain(2), 4).simulate(UNEVEN)
    took = {str(action): span.end - span.start for action, span in timeline.spans.items()}
    assert [took[f"0F{j}"] for j in range(4)] == [1, 2, 6, 1]
    assert [took[f"0B{j}"] for j in range(4)] == [2, 4, 12, 2]
    # Rank 1 waits for 0F2 until 9, then runs 1F2, 1F3 and four backwards; rank 0 then runs its last, of 4 to 2 time.
    assert timeline.spans[Action.parse("1F2")].start == 9
    halves = Costs.of(2, UNEVEN)
    assert halves.time(Action(0, Kind.W, 2)) == halves.time(Action(0, Kind.I, 2)) == 6
    assert Costs.of(2, UNEVEN, backward=3).time(Action(0, Kind.B, 2)) == 3
    assert Costs.of(2, 1, backward=[[1, 2], 5]).time(Action(1, Kind.B, 1)) == 5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(8))
def test_equal_rows_are_as_numbers_and_no_table_is_shorter_than_the_bound(family: Any, seed: int) -> None:
    graph, m = random_bare(seed), 4
    numbers = [float(1 + (seed + stage) % 3) for stage in range(graph.stages)]
    given = (graph.edges, m, graph.placement)
    kwargs: Any = {"stages": graph.stages, "backward": graph.backward}
    by_stage = Costs.of(graph.stages, numbers, [2 * number for number in numbers])
    equal = Costs.of(graph.stages, [[number] * m for number in numbers])
    schedule = build(family, *given, costs=by_stage, **kwargs)
    plans = schedule.simulate(by_stage), schedule.simulate(equal)
    assert plans[0].spans == plans[1].spans
    assert plans[0].lower_bound == plans[1].lower_bound
    uneven = Costs.of(graph.stages, rows_for(graph.stages, m, seed), activation_bytes=rows_for(graph.stages, m, -seed))
    timeline = build(family, *given, costs=uneven, **kwargs).simulate(uneven)
    assert timeline.lower_bound <= timeline.makespan * (1 + 1e-9)
    for action, span in timeline.spans.items():
        assert span.end - span.start == pytest.approx(uneven.time(action))


def test_the_bound_is_the_shortest_head_all_work_and_the_shortest_tail() -> None:
    forward = [[3, 1, 2], [5, 5, 7], [1, 4, 1]]
    schedule = build("1f1b", chain(3), 3)
    # rank 0: 18 and tail 0; rank 1: head 1, 51, tail 2·1; rank 2: head min(3+5, 1+5, 2+7), 18, tail twice as long
    assert schedule.simulate(forward).lower_bound == max(18, 1 + 51 + 2, 6 + 18 + 12)
    on_two = build("greedy", [(0, 1)], 4, [(0, 1), 0]).simulate([[1, 2, 3, 4], [1, 1, 1, 1]])
    assert on_two.lower_bound == 24  # rank 0 has 3 · (1 + 3) of stage 0 and 12 of stage 1
    gathered = build("store_all", [(0, 1)], 4, gather={1: 2}).simulate([[1, 2, 3, 4], [2, 2, 6, 6]])
    # stage 1 starts after F0 and F1, or F2 and F3, at 3 at least; F + B of its groups are 6 and 18; then two B's
    assert gathered.lower_bound == max(30, 3 + 24 + 6)


def test_bytes_of_each_micro_batch_count() -> None:
    sizes = [[1, 5, 2, 3], [4, 4, 4, 4]]
    assert build("gpipe", chain(2), 4).simulate(activation_bytes=sizes).peak_bytes == (11, 16)
    assert build("1f1b", chain(2), 4).simulate(activation_bytes=sizes).peak_bytes == (7, 4)  # 5 + 2
    costs = Costs.of(2, activation_bytes=sizes)
    with pytest.raises(ScheduleError, match=r"1f1b holds 7 bytes on rank 0, memory=6\.5"):
        build("1f1b", chain(2), 4, costs=costs, memory=[6.5, 8])
    kept = build("greedy", chain(2), 4, costs=costs, memory=[6.5, 8]).simulate(costs).peak_bytes or ()
    assert kept[0] <= 6.5


@pytest.mark.parametrize(
    ("costs", "fact"),
    [
        ({"forward": [[1, 2], [1, 2, 3]]}, "rows of [2, 3] costs; give each row one cost per micro-batch"),
        ({"forward": [[1, 2], 1], "copy": [[1], 1]}, "rows of [1, 2] costs"),
        ({"forward": [[1, 2]]}, "forward has 1 costs for 2 stages"),
        ({"forward": [[1, -2], 1]}, "forward is -2; a cost is a finite number"),
        ({"forward": [[1, float("nan")], 1]}, "forward is nan; a cost is a finite number"),
        ({"forward": [[], []]}, "forward is []; a cost is a finite number"),
        ({"weight": [[1, 3], 1]}, "weight=3 of stage 0 is a part of backward=2, and exceeds it"),
    ],
    ids=str,
)
def test_wrong_rows_are_refused_with_their_values(costs: dict[str, Any], fact: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(fact)):
        Costs.of(2, **costs)


def test_rows_of_another_number_of_micro_batches_are_refused() -> None:
    costs = Costs.of(2, UNEVEN)
    for run in (
        lambda: build("1f1b", chain(2), 3).simulate(costs),
        lambda: build("1f1b", chain(2), 5, costs=costs),
        lambda: dataclasses.replace(build("1f1b", chain(2), 3), costs=costs),
    ):
        with pytest.raises(ScheduleError, match=r"each row of costs has 4 entries for \d micro-batches"):
            run()
    with pytest.raises(ScheduleError, match="forward of costs by micro-batch cannot change alone"):
        dataclasses.replace(costs, forward=(1.0, 1.0))


def test_a_family_that_uses_costs_uses_rows() -> None:
    forward = rows_for(4, 16, 3)
    costs = Costs.of(4, forward)
    own, usual = (build(family, chain(4), 16, costs=costs, in_flight="2x") for family in ("greedy", "1f1b"))
    assert own.simulate(costs).makespan <= usual.simulate(costs).makespan
    assert "in the costs' unit" in str(own)
    for offload in (None, [True] * 4):
        sized = Costs.of(4, forward, activation_bytes=1)
        schedule = build("1f1b", chain(4), 16, costs=sized, in_flight="2x", memory=4, offload=offload)
        assert max(schedule.simulate(sized).peak_bytes or ()) <= 4


# --- order ---


def test_a_pyramid_ascends_and_descends() -> None:
    for seed in range(50):
        sizes = random.Random(seed).choices(range(6), k=seed)
        order = pyramid(sizes) if sizes else ()
        assert sorted(order) == list(range(seed))
        top = (seed + 1) // 2
        ran = [(sizes[number], number) for number in order]
        assert ran[:top] == sorted(ran)[::2]
        assert ran[top:] == sorted(ran)[1::2][::-1]
    with pytest.raises(ScheduleError, match="nan; a cost is a finite number"):
        pyramid([1, float("nan")])


# --- in flight ---


@pytest.mark.parametrize("in_flight", ["2x", 8, [8, 6, 4, 2]], ids=str)
def test_1f1b_holds_twice_as_many_at_the_same_makespan(in_flight: Any) -> None:
    timeline = build("1f1b", chain(4), 16, in_flight=in_flight).simulate()
    assert timeline.peak_in_flight == (8, 6, 4, 2)
    assert timeline.makespan == (16 + 4 - 1) * 3


def test_a_limit_of_a_stage_limits_the_stages_that_it_feeds() -> None:
    assert build("1f1b", WORKED, 16, in_flight=[6, 4, 3, 9, 9]).simulate().peak_in_flight == (6, 4, 3, 2, 1)


@pytest.mark.parametrize(("family", "placement"), [("zb_h1", None), ("zb_h1", ROUND), ("interleaved_1f1b", ROUND)])
def test_other_families_hold_up_to_twice_as_many_at_the_same_makespan(family: Any, placement: Any) -> None:
    edges = chain(8 if placement else 4)
    own, more = (build(family, edges, 16, placement, in_flight=limit).simulate() for limit in (None, "2x"))
    assert own.makespan == more.makespan == own.lower_bound
    assert own.schedule.name == more.schedule.name == family
    for before, after in zip(own.peak_in_flight, more.peak_in_flight, strict=True):
        assert before <= after <= 2 * before
    assert sum(more.peak_in_flight) > 1.7 * sum(own.peak_in_flight)
    slow = (table.schedule.simulate(comm=0.25).makespan for table in (own, more))
    assert next(slow) > next(slow)


@pytest.mark.parametrize("family", ["1f1b", "interleaved_1f1b", "zb_h1", "greedy"])
@pytest.mark.parametrize("seed", range(10))
def test_more_in_flight_never_deadlocks_nor_exceeds_the_limit(family: Any, seed: int) -> None:
    graph, m = random_bare(seed), 1 + seed % 9
    kwargs: Any = {"stages": graph.stages, "backward": graph.backward}
    own = build(family, graph.edges, m, graph.placement, **kwargs).simulate().peak_in_flight
    for limit in ("2x", [peak + 1 + seed % 4 for peak in own]):
        most = [max(2 * peak, 1) for peak in own] if limit == "2x" else limit
        more = build(family, graph.edges, m, graph.placement, in_flight=limit, **kwargs)
        more.verify()
        peaks = more.simulate().peak_in_flight
        assert all(peak <= cap for peak, cap in zip(peaks, most, strict=True))


def test_wrong_limits_are_refused_by_the_name_of_the_option() -> None:
    with pytest.raises(ScheduleError, match=r"in_flight=?.*'3x'.*a whole number, one for each stage, or \"2x\""):
        with_costs("1f1b", in_flight="3x")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"1f1b holds 4 micro-batches at stage 0, in_flight=3"):
        build("1f1b", chain(4), 8, in_flight=3)
