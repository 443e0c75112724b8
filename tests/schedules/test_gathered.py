"""Stages that run once for a group of micro-batches: figures worked out by hand, random graphs, choices, refusals."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import Problem, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import GATHERED
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Direction, Kind
from fxpipe.schedules.lower import Compute, Receive
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.verify import prove
from tests.graphs import FAMILIES, WORKED, Bare, random_bare
from tests.thinned import seeds

every_schedule = pytest.mark.parametrize("name", [*FAMILIES, *GATHERED])


def worked(name: str, m: int, size: int | None = None, **options: Any) -> Timeline:
    return build(name, WORKED, m, gather={4: size}, **options).planned()  # type: ignore[arg-type]


# --- two branches of two and a join, F = 1, B = 2, the join's F and B once a group ---


def test_store_all_takes_all_forwards_the_join_and_all_backwards() -> None:
    """1 + 8 forwards, F and B of the join, 8 backwards and the first stage's last."""
    plan = worked("store_all", 8)
    assert plan.makespan == plan.lower_bound == 9 + 3 + 16 + 2
    assert plan.peak_in_flight == (8, 8, 8, 8, 8)


def test_cached_runs_forwards_again_and_holds_a_micro_batch_at_a_time() -> None:
    """9 + 3, 8 times F + B less the first F, which runs before the gradient comes, and the first stage's last B."""
    plan = worked("cached", 8)
    assert plan.makespan == 12 + (8 * 3 - 1) + 2 == 37
    assert plan.peak_in_flight == (1, 1, 1, 1, 8)
    assert plan.lower_bound <= 37


def test_groups_are_interleaved_where_a_flush_per_group_takes_a_third_longer() -> None:
    """The second stage works from time 1 on without a pause, 16 times F + B; behind it comes the first one's B."""
    assert 4 * worked("store_all", 4).makespan == 72
    plan = worked("group_interleaved", 16, 4)
    assert plan.makespan == plan.lower_bound == 1 + 16 * 3 + 2
    assert max(plan.peak_in_flight) == 8
    first = [action.kind for action in plan.schedule.rows[0]].index(Kind.B)
    assert first >= 4 + 3 - 1  # K + d − 1 forwards


def test_a_group_has_costs_of_its_own() -> None:
    plan = worked("store_all", 8, gather_cost=(5, 7))
    assert plan.makespan == 9 + 12 + 18
    assert plan.schedule.costs == Costs.of(5, [1, 1, 1, 1, 5], [2, 2, 2, 2, 7])
    assert worked("store_all", 8, costs=Costs.of(5, 1, 2, weight=0.5), gather_cost=(5, 8)).costs.weight[4] == 2


@pytest.mark.parametrize("m", [1, 6])
def test_groups_of_one_are_no_groups(m: int) -> None:
    for name in FAMILIES:
        assert build(name, WORKED, m, gather={4: 1}).rows == build(name, WORKED, m).rows
    assert build("store_all", WORKED, m, gather={4: 1}).rows == build("gpipe", WORKED, m).rows
    assert build("group_interleaved", WORKED, m, gather={4: 1}).planned().peak_in_flight[0] == min(m, 3)


# --- the choice ---


def test_1f1b_takes_the_fastest_that_keeps_within_memory_and_says_which() -> None:
    """Towers hold 10 bytes a micro-batch, or 1 until they run again: 8 of 10, or 7 of 1 and one of 10."""
    costs = Costs.of(5, activation_bytes=[10, 10, 10, 10, 1], input_bytes=1)
    for memory, name, held in ((80, "store_all", 80), (79, "cached", 17), (17, "cached", 17)):
        plan = worked("1f1b", 8, costs=costs, memory=memory)
        assert plan.schedule.name == f"1f1b ({name})"
        assert plan.peak_bytes == (held,) * 4 + (8,)
    with pytest.raises(ScheduleError, match=r"cached\) holds 17 bytes on rank 0, memory=16; .greedy. keeps"):
        worked("1f1b", 8, costs=costs, memory=16)
    assert worked("1f1b", 16, 4, costs=costs, memory=100).schedule.name == "1f1b (group_interleaved)"
    assert worked("greedy", 8, in_flight=[7, 8, 8, 8, 8]).schedule.name == "greedy (cached)"
    assert worked("interleaved_1f1b", 8).schedule.name == "interleaved_1f1b (store_all)"


def test_group_interleaved_takes_less_memory_where_it_must_and_then_more_time() -> None:
    """Never fewer than K + d − 1: with less the first group could not come to its backward while the next begins."""
    costs = Costs.of(5, activation_bytes=1)
    times = {memory: worked("group_interleaved", 16, 4, costs=costs, memory=memory).makespan for memory in (8, 7, 6)}
    assert 51 == times[8] < times[7] < times[6] < 72
    with pytest.raises(ScheduleError, match=r'holds 6 bytes on rank 0, memory=5; "greedy" keeps within limits'):
        worked("group_interleaved", 16, 4, costs=costs, memory=5)
    assert worked("1f1b", 16, 4, costs=costs, memory=5).schedule.name == "1f1b (cached)"


# --- random graphs ---


def behind(graph: Bare, gather: dict[int, int | None], m: int) -> list[int]:
    """Per stage K, from the edges: of a stage that is gathered or reached from one."""
    sizes = [1] * graph.stages
    for stage, size in gather.items():
        reached, new = {stage}, [stage]
        while new:
            new = [target for one in new for target in graph.targets(one) if target not in reached]
            reached.update(new)
        for one in reached:
            sizes[one] = size or m
    return sizes


def random_gathered(seed: int) -> tuple[Bare, int, dict[int, int | None], list[int]]:
    draw = random.Random(seed)
    graph = random_bare(seed, frozen=seed % 3 == 0)
    m = draw.choice([2, 4, 6, 12])
    size = draw.choice([None, 2, m // 2])
    gather = dict.fromkeys(draw.sample(range(graph.stages), draw.randint(1, min(2, graph.stages))), size)
    return graph, m, gather, behind(graph, gather, m)


def built(name: str, seed: int, costs: Costs | None = None) -> tuple[Schedule, Bare, list[int]]:
    graph, m, gather, sizes = random_gathered(seed)
    made = build(name, graph.edges, m, graph.placement, backward=graph.backward, gather=gather, costs=costs)  # type: ignore[arg-type]
    return made, graph, sizes


def covering(stage: int, op: Kind, j: int, size: int) -> Action:
    return Action(stage, op, j // size * size, size)


@every_schedule
def test_every_micro_batch_is_covered_once_on_the_rank_of_its_stage_and_nothing_runs_too_early(name: str) -> None:
    for seed in seeds(40):
        schedule, graph, sizes = built(name, seed)
        m = schedule.microbatches
        timeline = schedule.simulate(forward=[1 + stage % 3 for stage in range(graph.stages)], comm=0.25)
        spans, placement = timeline.spans, graph.placement
        ops = {action.kind for action in spans}
        half = Kind.I if Kind.I in ops else Kind.B
        wanted = Counter(
            (placement[stage], covering(stage, op, j, sizes[stage]))
            for stage in range(graph.stages)
            for op in (
                (Kind.F, *((Kind.I, Kind.W) if half is Kind.I else (Kind.B,))) if graph.backward[stage] else (Kind.F,)
            )
            for j in range(0, m, sizes[stage])
        )
        found = [
            (rank, action) for rank, row in enumerate(schedule.rows) for action in row if action.kind is not Kind.R
        ]
        assert Counter(found) == wanted
        assert schedule.groups == tuple(sizes)
        for action, span in spans.items():
            stage, op, first, count = action
            forward = op is Kind.F
            others = graph.sources(stage) if forward else [t for t in graph.targets(stage) if graph.backward[t]]
            for other in others if op in (Kind.F, half) else ():
                for j in range(first, first + count):
                    needed = covering(other, Kind.F if forward else half, j, sizes[other])
                    hop = 0.25 * (placement[other] != placement[stage])
                    assert spans[needed].end + hop <= span.start
            if op is not Kind.F:
                assert spans[Action(stage, Kind.F, first, count)].end <= span.start
            if op is Kind.R:
                assert span.end <= spans[Action(stage, half, first, count)].start


@every_schedule
def test_the_lower_bound_holds_for_groups(name: str) -> None:
    for seed in seeds(60):
        draw = random.Random(seed)
        graph = random_gathered(seed)[0]
        forward = [draw.choice([0, 1, 1, 3]) for _ in range(graph.stages)]
        backward = [draw.choice([0, 2, 2, 5]) for _ in range(graph.stages)]
        costs = Costs.of(graph.stages, forward, backward, comm=draw.choice([0, 1]))
        timeline = built(name, seed, costs)[0].simulate(costs)
        assert max(timeline.busy) <= timeline.lower_bound + 1e-9
        assert timeline.lower_bound <= timeline.makespan + 1e-9, seed


@every_schedule
def test_a_group_runs_when_all_of_its_messages_have_arrived_and_a_message_is_used_once(name: str) -> None:
    for seed in seeds(30):
        schedule, graph, sizes = built(name, seed)
        arrived: set[tuple[int, int, Direction, int]] = set()
        for rank, step in prove(schedule, schedule.instructions, schedule.links):
            if isinstance(step, Receive):
                arrived.add((rank, step.message.edge, step.message.direction, step.message.microbatch))
            if not isinstance(step, Compute) or step.action.kind in (Kind.R, Kind.W):
                continue
            stage, op, first, count = step.action
            for index, (source, target) in enumerate(graph.edges):
                if graph.placement[source] == graph.placement[target]:
                    continue
                numbers = {j // sizes[source] * sizes[source] for j in range(first, first + count)}
                if op is Kind.F and target == stage:
                    assert {(rank, index, FORWARD, j) for j in numbers} <= arrived
                elif op is not Kind.F and source == stage and graph.backward[target]:
                    assert {(rank, index, BACKWARD, j) for j in numbers} <= arrived


def test_what_feeds_no_gathered_stage_is_not_recomputed() -> None:
    """0 feeds the gathered 1, and 2, which runs micro-batch by micro-batch; 3 is behind the gathered one."""
    schedule = build("cached", [(0, 1), (0, 2), (1, 3)], 4, gather={1: None})
    assert {action.stage for row in schedule.rows for action in row if action.kind is Kind.R} == {0}
    assert schedule.groups == (1, 4, 1, 4)


# --- refusals ---


@pytest.mark.parametrize("name", GATHERED)
def test_without_a_gathered_stage_the_families_for_it_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(f'"{name}" is for a stage that runs once for several')):
        build(name, WORKED, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gather", "fact"),
    [
        ({4: 3}, "stage 4 is gathered in groups of 3, which do not divide 8 micro-batches"),
        ({4: 0}, "stage 4 is gathered in groups of 0"),
        ({4: 2.0}, "stage 4 is gathered in groups of 2.0"),
        ({5: None}, "gather names stage 5; they are 0 to 4"),
        ([4], "gather is [4]; it is a dict, stage → micro-batches in a group"),
        ({1: 4, 3: 8}, "stage 4 is behind groups of two sizes, [4, 8] micro-batches"),
    ],
    ids=str,
)
def test_a_gather_that_cannot_be_is_refused(gather: Any, fact: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(fact)):
        build("1f1b", WORKED, 8, gather=gather)


@pytest.mark.parametrize("cost", [(1,), 3, ("1", 2), (1, -2)], ids=str)
def test_costs_of_a_group_are_two_numbers(cost: Any) -> None:
    with pytest.raises(ScheduleError, match=r"gather_cost|a cost is a finite number"):
        build("1f1b", WORKED, 8, gather={4: None}, gather_cost=cost)


def test_costs_of_a_group_need_a_gathered_stage() -> None:
    with pytest.raises(ScheduleError, match="gather_cost= is of the stages of gather=, and there is none"):
        build("1f1b", WORKED, 8, gather_cost=(1, 2))


def test_a_family_that_runs_a_gathered_stage_micro_batch_by_micro_batch_is_refused() -> None:
    def blind(problem: Problem) -> tuple[Row, ...]:
        return build("gpipe", problem.edges, problem.microbatches).rows

    with pytest.raises(ScheduleError, match=r"blind runs stages in groups of .* 1\) .*, and .* 2\) are asked for"):
        build(blind, WORKED, 4, gather={4: 2})
