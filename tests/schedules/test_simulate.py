"""Simulate: times worked out by hand, earliest possible starts, and a lower bound that is one."""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import SCHEDULES, build
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Cause, Schedule, Timeline
from tests.graphs import WORKED, Bare, bare, before, branches, chain, random_bare
from tests.thinned import every


def times(result: Timeline) -> dict[str, tuple[float, float]]:
    return {str(action): (span.start, span.end) for action, span in result.spans.items()}


# --- by hand ---


def test_two_stages_and_two_micro_batches() -> None:
    """From 0 to 9, a column per unit of time, with B = 2F.

    0F0 0F1  .   .  0B0 0B0  .  0B1 0B1
     .  1F0 1B0 1B0 1F1 1B1 1B1  .   .
    """
    result = build("1f1b", chain(2), 2).simulate(forward=1, backward=2)
    assert times(result) == {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 6), "0B1": (7, 9),
        "1F0": (1, 2), "1B0": (2, 4), "1F1": (4, 5), "1B1": (5, 7),
    }  # fmt: skip
    assert result.makespan == 9
    assert result.bubble == pytest.approx(1 - 12 / 18)
    assert result.peak_in_flight == (2, 1)
    assert result.lower_bound == 9  # 1 + 2 · 3 + 2 on rank 1


def test_a_hop_between_ranks_costs_its_latency() -> None:
    result = build("1f1b", chain(2), 2).simulate(forward=1, backward=2, comm=0.5)
    assert times(result) == {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (5, 7), "0B1": (8, 10),
        "1F0": (1.5, 2.5), "1B0": (2.5, 4.5), "1F1": (4.5, 5.5), "1B1": (5.5, 7.5),
    }  # fmt: skip
    assert result.lower_bound == 1 + 0.5 + 6 + 0.5 + 2


def test_a_hop_inside_a_rank_costs_nothing() -> None:
    one_rank = bare(chain(3), 3, (0, 0, 0)).build("1f1b", 4)
    assert one_rank.simulate(comm=100).makespan == one_rank.simulate().makespan == 4 * 3 * 3


def test_costs_are_one_number_or_one_per_stage() -> None:
    schedule = build("1f1b", chain(2), 1)
    assert times(schedule.simulate(forward=[1, 3], backward=[4, 2])) == {
        "0F0": (0, 1), "1F0": (1, 4), "1B0": (4, 6), "0B0": (6, 10),
    }  # fmt: skip
    assert times(schedule.simulate(forward=(2, 2), backward=5)) == times(schedule.simulate(forward=2, backward=5))


def halves(rows: Sequence[str]) -> Schedule:
    """A schedule of the stages of a chain, one a rank, from rows as they print."""
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    m = 1 + max(action.microbatch for row in parsed for action in row)
    return Schedule(parsed, chain(len(rows)), tuple(range(len(rows))), (True,) * len(rows), m)


def test_a_backward_in_halves_costs_what_a_whole_one_costs() -> None:
    schedule = halves(["0F0 0I0 0W0", "1F0 1I0 1W0"])
    assert times(schedule.simulate(forward=1, backward=2)) == {
        "0F0": (0, 1), "1F0": (1, 2), "1I0": (2, 3), "1W0": (3, 4), "0I0": (3, 4), "0W0": (4, 5),
    }  # fmt: skip
    assert times(schedule.simulate(forward=1, backward=3, weight=[1, 0.5])) == {
        "0F0": (0, 1), "1F0": (1, 2), "1I0": (2, 4.5), "1W0": (4.5, 5), "0I0": (4.5, 6.5), "0W0": (6.5, 7.5),
    }  # fmt: skip


def test_a_micro_batch_is_in_flight_until_its_weight_gradients_are_made() -> None:
    assert halves(["0F0 0I0 0F1 0I1 0W0 0W1"]).simulate().peak_in_flight == (2,)
    assert halves(["0F0 0I0 0W0 0F1 0I1 0W1"]).simulate().peak_in_flight == (1,)


def test_the_bubble_is_the_mean_over_ranks_of_their_idle_part() -> None:
    result = build("1f1b", chain(2), 3).simulate(forward=[1, 2], backward=[1, 2])
    idle = [1 - 3 * 2 / result.makespan, 1 - 3 * 4 / result.makespan]
    assert result.bubble == pytest.approx(sum(idle) / 2)


# --- everything as early as it can be ---


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_starts_when_its_rank_is_free_and_its_inputs_are_here(name: str) -> None:
    for seed in range(60):
        graph = random_bare(seed, frozen=seed % 2 == 0)
        draw = random.Random(seed)
        forward, backward = ([draw.randint(1, 5) for _ in range(graph.stages)] for _ in range(2))
        comm = draw.choice([0, 1, 3])
        schedule = graph.build(name, 4)
        weight = [draw.randint(0, whole) for whole in backward]
        cost = {Op.F: forward, Op.B: backward, Op.I: list(map(operator.sub, backward, weight)), Op.W: weight}
        result = schedule.simulate(forward, backward, weight, comm=comm)
        halved = {(action.stage, action.microbatch) for row in schedule.rows for action in row if action.op is Op.I}
        assert result.makespan == max(span.end for span in result.spans.values())
        for rank, row in enumerate(schedule.rows):
            free = 0.0
            for action in row:
                arrivals = [
                    result.spans[other].end + comm * (graph.placement[other.stage] != rank)
                    for other in before(graph, action, halved)
                ]
                start, end = result.spans[action]
                assert result.since[action] == free
                assert start == max([free, *arrivals])
                assert end == start + cost[action.op][action.stage]
                free = end


# --- the lower bound ---


@pytest.mark.parametrize(
    ("graph", "m", "forward", "backward", "bound"),
    [
        (bare((), 1), 5, 1, 2, 15),
        (bare(chain(4), 4), 8, 1, 2, (8 + 3) * 3),
        (bare(WORKED, 5), 8, 1, 2, 30),
        (bare(branches(4, 3), 13), 8, 1, 2, 33),
        # the middle stage is the bottleneck: 1 before it, 4 · 15 of its own, 2 behind it
        (bare(chain(3), 3), 4, [1, 5, 1], [2, 10, 2], 1 + 60 + 2),
        # rank 1 has stages 1 and 2: 1 before them, 3 · 2 · 3 of their own, 2 behind
        (bare(chain(4), 4, (0, 1, 1, 2)), 3, 1, 2, 1 + 18 + 2),
        # rank 0 has the first and the last stage: nothing before it or behind
        (bare(chain(3), 3, (0, 1, 0)), 3, 1, 2, 18),
        # a frozen first stage adds its forward in front, and nothing behind
        (bare(chain(2), 2, frozen=frozenset([0])), 4, 3, 2, 3 + 4 * 5),
    ],
    ids=["one stage", "chain", "worked example", "branches", "bottleneck", "two on a rank", "there and back", "frozen"],
)
def test_the_lower_bound_is_the_designs_formula(
    graph: Bare, m: int, forward: float | list[float], backward: float | list[float], bound: float
) -> None:
    assert graph.build("1f1b", m).simulate(forward, backward).lower_bound == bound


Half = tuple[int, int]
"""(stage, micro-batch)."""

TINY = {
    "chain": bare(chain(2), 2),
    "frozen first": bare(chain(2), 2, frozen=frozenset([0])),
    "last without backward": bare(chain(2), 2, frozen=frozenset([1])),
    "one rank": bare(chain(2), 2, (0, 0)),
    "a side branch": bare(((0, 1), (0, 2)), 3, (0, 1, 1), frozen=frozenset([0, 2])),
    "there and back": bare(chain(3), 3, (0, 1, 0), frozen=frozenset([0, 1])),
    "chain of 3": bare(chain(3), 3),
}
every_tiny_graph = pytest.mark.parametrize("graph", TINY.values(), ids=TINY.keys())


def linear_orders(actions: list[Action]) -> Iterator[tuple[Action, ...]]:
    """The orders of a rank's actions in which F stands before B, and F before I before W."""
    chains: dict[Half, list[Action]] = {}
    for action in actions:
        chains.setdefault((action.stage, action.microbatch), []).append(action)
    whose = [key for key, chain_of in chains.items() for _ in chain_of]
    for order in sorted(set(itertools.permutations(whose))):
        left = {key: iter(chain_of) for key, chain_of in chains.items()}
        yield tuple(next(left[key]) for key in order)


def all_tables(graph: Bare, m: int, halved: Collection[Half]) -> Iterator[Schedule]:
    """Every table of a graph that does not halt; ``halved``: the backwards that are I and W in it."""
    rows = [
        [
            Action(stage, op, j)
            for stage, owner in enumerate(graph.placement)
            for j in range(m)
            for op in (Op.F, *(((Op.I, Op.W) if (stage, j) in halved else (Op.B,)) if graph.backward[stage] else ()))
            if owner == rank
        ]
        for rank in range(graph.ranks)
    ]
    for orders in itertools.product(*(list(linear_orders(row)) for row in rows)):
        schedule = Schedule(orders, graph.edges, graph.placement, graph.backward, m)
        with contextlib.suppress(ScheduleError):
            schedule.simulate()
            yield schedule


def every_split(graph: Bare, m: int) -> list[tuple[Half, ...]]:
    """All choices of backwards that are made in halves."""
    trained = [(stage, j) for stage in range(graph.stages) for j in range(m) if graph.backward[stage]]
    return [chosen for count in range(len(trained) + 1) for chosen in itertools.combinations(trained, count)]


@every_tiny_graph
@pytest.mark.parametrize("comm", [0, 1])
def test_no_table_at_all_is_below_the_lower_bound(graph: Bare, comm: int) -> None:
    draw = random.Random(1)
    for m in (1, 2):
        forward, backward = ([draw.randint(1, 4) for _ in range(graph.stages)] for _ in range(2))
        results = [table.simulate(forward, backward, comm=comm) for table in all_tables(graph, m, ())]
        assert len({result.lower_bound for result in results}) == 1
        assert 0 < results[0].lower_bound <= min(result.makespan for result in results)


@pytest.mark.parametrize(("name", "comm"), every(3, list(itertools.product(TINY, [0, 1]))))
def test_no_table_with_halves_is_below_the_lower_bound_be_it_mixed_or_not(name: str, comm: int) -> None:
    graph = TINY[name]
    draw = random.Random(2)
    for m in (1, 2):
        for halved in every_split(graph, m):
            if sum(graph.backward) * m > 3 and len(halved) > (3 if graph.ranks > 1 else 1):
                continue  # too many tables
            forward, backward = ([draw.randint(1, 4) for _ in range(graph.stages)] for _ in range(2))
            weight = [draw.randint(0, whole) for whole in backward]
            results = [table.simulate(forward, backward, weight, comm) for table in all_tables(graph, m, halved)]
            assert len({result.lower_bound for result in results}) == 1
            assert 0 < results[0].lower_bound <= min(result.makespan for result in results)


# --- what a timeline tells ---


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
    assert crossing["1F0"] == Cause(Action(0, Op.F, 0), True)
    assert crossing["2B0"] == Cause(Action(2, Op.F, 0), False)
    assert crossing["0F0"] is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_critical_path_leads_from_0_to_the_makespan_without_a_gap_but_latency(name: str) -> None:
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
        for first, second, crosses in zip(path, path[1:], crossings[1:], strict=False):
            assert second.start == first.end + comm * crosses
        assert timeline.makespan == sum(span.duration for span in path) + comm * sum(crossings)


def test_each_rank_has_a_bubble_of_its_own_and_their_mean_is_the_bubble() -> None:
    timeline = build("1f1b", chain(2), 2).simulate(forward=[1, 2], backward=[2, 4])
    assert timeline.makespan == 1 + 2 * 6 + 2
    assert timeline.busy == (6, 12)
    assert timeline.bubbles == (pytest.approx(9 / 15), pytest.approx(3 / 15))
    assert timeline.bubble == pytest.approx(6 / 15)


def test_a_rank_without_actions_idles_all_the_time_and_an_empty_table_takes_none() -> None:
    half_used = Schedule(((Action(0, Op.F, 0),), ()), (), (0, 1), (False, False), 1).simulate()
    assert (half_used.bubbles, half_used.bubble) == ((0, 1), 0.5)
    empty = Schedule(((), ()), (), (0, 1), (False, False), 1).simulate()
    assert (empty.makespan, empty.bubble, empty.critical_path) == (0, 0, ())


def test_the_bytes_of_a_rank_are_those_of_all_its_stages_at_once() -> None:
    """Rank 0 holds stage 0's of two micro-batches when stage 2's of the first one comes: never all of both."""
    rows = ["0F0 0F1 2F0 2B0 0B0 2F1 2B1 0B1", "1F0 1F1 1B0 1B1"]
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    schedule = Schedule(parsed, chain(3), (0, 1, 0), (True,) * 3, 2)
    schedule.verify()
    assert schedule.simulate(activation_bytes=[100, 30, 7]).peak_bytes == (100 + 100 + 7, 30 + 30)
    assert schedule.simulate(activation_bytes=5).peak_bytes == (15, 10)
    assert schedule.simulate().peak_bytes is None


def test_bytes_are_held_until_the_weight_gradient_and_not_at_all_without_a_backward() -> None:
    late = halves(["0F0 0I0 0F1 0I1 0W0 0W1"])
    assert late.simulate(activation_bytes=8).peak_bytes == (16,)
    frozen = bare(chain(2), 2, (0, 0), frozen=frozenset([0])).build("1f1b", 4)
    assert frozen.simulate(activation_bytes=[1000, 3]).peak_bytes == (3,)


def test_the_costs_of_a_plan_can_be_given_as_one_value() -> None:
    schedule = build("1f1b", chain(2), 3)
    costs = Costs.of(2, forward=[1, 2], backward=3, weight=1, comm=0.5, activation_bytes=4)
    assert schedule.simulate(costs) == schedule.simulate([1, 2], 3, 1, 0.5, 4)
    assert schedule.simulate(costs).costs == costs
    assert not schedule.simulate(costs).measured


# --- what cannot be simulated ---


@pytest.mark.parametrize("costs", [{"forward": [1]}, {"backward": [1, 2, 3]}, {"weight": []}], ids=str)
def test_costs_for_another_number_of_stages_are_refused(costs: dict[str, list[float]]) -> None:
    with pytest.raises(ScheduleError, match=r"\d costs for 2 stages; give one number, or one per stage"):
        build("1f1b", chain(2), 2).simulate(**costs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("costs", "fact"),
    [
        ({"forward": -1}, "forward is -1; a cost is a finite number, 0 or more"),
        ({"backward": [1, float("nan")]}, "backward is nan; a cost is a finite number, 0 or more"),
        ({"forward": float("inf")}, "forward is inf; a cost is a finite number"),
        ({"comm": -0.5}, "comm is -0.5; a cost is a finite number"),
        ({"comm": float("nan")}, "comm is nan; a cost is a finite number"),
        ({"weight": -1}, "weight is -1; a cost is a finite number"),
        ({"activation_bytes": [1, -2]}, "activation_bytes is -2; a cost is a finite number"),
        ({"forward": ["1", 2]}, "forward is '1'; a cost is a finite number"),
        ({"activation_bytes": [1]}, "activation_bytes has 1 costs for 2 stages; give one number, or one per stage"),
        ({"weight": 3}, "weight=3 of stage 0 is a part of backward=2, and exceeds it"),
        ({"backward": [4, 1], "weight": [4, 2]}, "weight=2 of stage 1 is a part of backward=1, and exceeds it"),
    ],
    ids=str,
)
def test_costs_that_cannot_be_are_refused_with_their_name_and_value(costs: dict[str, Any], fact: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(fact)):
        Costs.of(2, **costs)
    with pytest.raises(ScheduleError, match=re.escape(fact)):
        build("1f1b", chain(2), 2).simulate(**costs)


def test_an_action_of_a_stage_that_the_costs_do_not_know_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"2F0 is of a stage outside of 0\.\.1"):
        Costs.of(2).time(Action(2, Op.F, 0))
    with pytest.raises(ScheduleError, match=r"7F0 is of a stage outside of 0\.\.0"):
        Schedule(((Action(7, Op.F, 0),),), (), (0,), (True,), 1).simulate()


def test_a_table_that_halts_is_told_with_the_cells_that_wait() -> None:
    with pytest.raises(ScheduleError, match="comes to a halt at 0B0, 1F1; "):
        halves(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]).simulate()
