"""Recomputation: an R for each backward of the stages that are marked, whatever the family; its time and its bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import build
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import GATHERED
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, WORKED, Bare, chain, random_bare
from tests.thinned import seeds

every_schedule = pytest.mark.parametrize("name", [*FAMILIES, *GATHERED])


def marked(name: str, seed: int, costs: Costs | None = None, **options: Any) -> tuple[Schedule, Bare, list[bool]]:
    """A random graph, some of its stages marked; for the families that want one, the last stages gathered."""
    draw = random.Random(seed)
    graph = random_bare(seed, frozen=seed % 3 == 0)
    again = [draw.random() < 0.6 for _ in range(graph.stages)]
    gather = {stage: None for stage in range(graph.stages) if not graph.targets(stage)} if name in GATHERED else None
    options = {"costs": costs, "recompute": again, "gather": gather, **options}
    made = build(name, graph.edges, draw.choice([1, 3, 6]), graph.placement, backward=graph.backward, **options)  # type: ignore[arg-type]
    return made, graph, again


@every_schedule
def test_each_backward_of_a_marked_stage_has_one_forward_run_again_and_no_other_has(name: str) -> None:
    for seed in seeds(60):
        schedule, graph, again = marked(name, seed)
        for stage in range(graph.stages):
            row = [action for action in schedule.rows[graph.placement[stage]] if action.stage == stage]
            backwards = [(action.microbatch, action.count) for action in row if action.kind in (Kind.B, Kind.I)]
            rerun = [(action.microbatch, action.count) for action in row if action.kind is Kind.R]
            assert rerun == (backwards if again[stage] or (name == "cached" and rerun) else [])
            for j, count in rerun:
                forward, r, *_ = [a.kind for a in row if (a.microbatch, a.count) == (j, count)]
                assert (forward, r) == (Kind.F, Kind.R)


@every_schedule
def test_the_lower_bound_counts_what_is_run_again(name: str) -> None:
    for seed in seeds(60):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 3 == 0)
        costs = Costs.of(
            graph.stages,
            [draw.choice([0, 1, 1, 3]) for _ in range(graph.stages)],
            [draw.choice([0, 2, 2, 5]) for _ in range(graph.stages)],
            comm=draw.choice([0, 1]),
        )
        timeline = marked(name, seed, costs)[0].simulate(costs)
        assert max(timeline.busy) <= timeline.lower_bound + 1e-9
        assert timeline.lower_bound <= timeline.makespan + 1e-9, seed


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "greedy"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (3, 1), (4, 2), (4, 8), (2, 7)])
def test_on_a_balanced_chain_only_the_forwards_themselves_are_added(name: str, p: int, m: int) -> None:
    """(p − 1)(F + B) + m(2F + B): behind the last stage nobody waits for an R, which runs before its gradient comes."""
    plan = build(name, chain(p), m, stages=p, recompute=[True] * p).planned()  # type: ignore[arg-type]
    assert plan.makespan == plan.lower_bound == (p - 1) * 3 + m * 4


def test_zb_h1_on_a_balanced_chain_has_i_of_f_and_i() -> None:
    """ZB-H1's makespan with F + I in place of I, but for the last way back, where the R runs ahead of its gradient:
    m(F + R + I + W) + (p − 1)(F + I − W)."""
    assert build("zb_h1", chain(4), 8, recompute=[True] * 4).planned().makespan == 8 * 4 + 3


def test_1f1b_holds_the_inputs_of_d_micro_batches_and_one_whole() -> None:
    costs = Costs.of(4, activation_bytes=10, input_bytes=1)
    plan = build("1f1b", chain(4), 8, costs=costs, recompute=[True] * 4).planned()
    assert plan.peak_bytes == (3 + 10, 2 + 10, 1 + 10, 10)
    assert plan.peak_in_flight == (1, 1, 1, 1)
    some = build("1f1b", chain(4), 8, costs=costs, recompute=[True, False, True, False]).planned()
    assert some.peak_bytes == (13, 30, 11, 10)


def test_bytes_between_i_and_w_are_those_deferred() -> None:
    """d = 1 of D = 3 has two W's put off while the third micro-batch is there whole."""
    whole = Costs.of(3, activation_bytes=10)
    part = Costs.of(3, activation_bytes=10, deferred_bytes=4)
    assert build("zb_h1", chain(3), 8).simulate(whole).peak_bytes == (30, 30, 30)
    assert build("zb_h1", chain(3), 8).simulate(part).peak_bytes == (30, 24, 18)
    again = Costs.of(3, activation_bytes=10, input_bytes=1, deferred_bytes=4)
    assert build("zb_h1", chain(3), 8, recompute=[True] * 3, costs=again).planned().peak_bytes == (12, 15, 18)


def test_greedy_keeps_within_memory_with_stages_that_are_run_again() -> None:
    """13: the inputs of three and one whole; with less fewer are in flight, down to one whole and nothing beside it."""
    costs = Costs.of(4, activation_bytes=10, input_bytes=1)
    times = []
    for memory in (13, 12, 11, 10):
        plan = build("greedy", chain(4), 8, costs=costs, memory=memory, recompute=[True] * 4).planned()
        assert max(plan.peak_bytes or ()) <= memory
        times.append(plan.makespan)
    assert times[0] == 3 * 3 + 8 * 4
    assert times == sorted(times)
    with pytest.raises(ScheduleError, match="rank 0 may hold 5 bytes, but what is run again at once takes 9"):
        build("greedy", chain(4), 8, costs=costs, memory=5, recompute=[True] * 4)
    with pytest.raises(ScheduleError, match=r"rank 0 may hold 0\.5 bytes, but one micro-batch"):
        build("greedy", chain(4), 8, costs=costs, memory=9.5, recompute=[True] * 4)


def test_room_is_set_aside_for_a_whole_group_that_is_run_again() -> None:
    """The join's group of 8 takes 8 · (10 − 1) beside its inputs of 8; each of two stages in front keeps 8 inputs."""
    costs = Costs.of(3, activation_bytes=10, input_bytes=1)
    given = {"gather": {2: None}, "costs": costs, "recompute": [True, True, True], "placement": [0, 1, 0]}
    plan = build("1f1b", [(0, 2), (1, 2)], 8, memory=88, **given).planned()  # type: ignore[arg-type]
    assert plan.peak_bytes == (8 + 80, 7 + 10)
    with pytest.raises(ScheduleError, match="rank 0 may hold 71 bytes, but what is run again at once takes 72"):
        build("1f1b", [(0, 2), (1, 2)], 8, memory=71, **given)  # type: ignore[arg-type]


def test_backwards_are_not_split_because_stages_are_run_again() -> None:
    costs = Costs.of(4, activation_bytes=10, input_bytes=1)
    schedule = build("greedy", chain(4), 8, costs=costs, memory=100, recompute=[True] * 4)
    assert {action.kind for row in schedule.rows for action in row} == {Kind.F, Kind.R, Kind.B}


def test_greedy_within_memory_on_random_graphs() -> None:
    built, refused = 0, []
    for seed in seeds(150):
        draw = random.Random(seed)
        stages = random_bare(seed, frozen=seed % 3 == 0).stages
        sizes = [draw.choice([4, 10, 40]) for _ in range(stages)]
        costs = Costs.of(stages, activation_bytes=sizes, input_bytes=[size / 4 for size in sizes])
        try:
            schedule, *_ = marked("greedy", seed, costs, memory=draw.choice([40, 80, 150]))
        except ScheduleError as error:
            refused.append(str(error))
            continue
        built += 1
        assert max(schedule.planned().peak_bytes or (0,)) <= 150
    assert built > len(seeds(150)) // 3
    assert all("may hold" in refusal for refusal in refused)


def test_a_stage_that_feeds_a_gathered_one_is_run_again_once_however_it_was_marked() -> None:
    costs = Costs.of(5, activation_bytes=10, input_bytes=1)
    plain = build("cached", WORKED, 8, gather={4: None}, costs=costs)
    both = build("cached", WORKED, 8, gather={4: None}, costs=costs, recompute=[True, True, True, True, False])
    assert both.rows == plain.rows
    every = build("1f1b", WORKED, 8, gather={4: None}, costs=costs, recompute=[True] * 5)
    assert every.name == "1f1b (store_all)"
    assert every.planned().makespan == 37 + 1  # as cached, and the join's R
    assert every.planned().peak_bytes == (17, 17, 17, 17, 80)


def test_marks_are_a_flag_for_each_stage() -> None:
    with pytest.raises(ScheduleError, match="recompute= has 2 entries for 3 stages"):
        build("1f1b", chain(3), 2, recompute=[True, False])
    with pytest.raises(ScheduleError, match=r"recompute is \[2\]; it is a list with True or False for each stage"):
        build("1f1b", chain(3), 2, recompute=[2])  # type: ignore[list-item]
    for name in FAMILIES:
        assert build(name, chain(3), 4, recompute=[False] * 3).rows == build(name, chain(3), 4).rows
