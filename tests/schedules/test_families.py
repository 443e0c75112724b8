"""Every schedule of the table on every kind of stage graph; then the closed forms of each."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from fxpipe.errors import ScheduleError
from fxpipe.options import Options
from fxpipe.schedules import Problem, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.zero_bubble import in_halves
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, WORKED, Bare, bare, before, branches, chain, random_bare
from tests.thinned import every, seeds
from tests.thinned import pairwise as pairwise_of
from tests.work import steps

GRAPHS: dict[str, Bare] = {
    "one stage": bare((), 1),
    "chain of 2": bare(chain(2), 2),
    "chain of 5": bare(chain(5), 5),
    "worked example": bare(WORKED, 5),
    "2 branches of 4": bare(branches(2, 4), 9),
    "4 branches of 3": bare(branches(4, 3), 13),
    "skip over two stages": bare((*chain(4), (0, 3)), 4),
    "two sinks": bare(((0, 1), (0, 2), (2, 3)), 4),
    "stages that nothing connects": bare((), 3),
    "numbered against the order": bare(((3, 2), (2, 1), (1, 0)), 4),
    "an edge given twice": bare(((0, 1), (0, 1)), 2),
    "all on one rank": bare(WORKED, 5, (0, 0, 0, 0, 0)),
    "6 stages on 3 ranks in blocks": bare(chain(6), 6, (0, 0, 1, 1, 2, 2)),
    "6 stages on 3 ranks in turns": bare(chain(6), 6, (0, 1, 2, 0, 1, 2)),
    "6 stages back and forth": bare(chain(6), 6, (0, 1, 2, 2, 1, 0)),
    "worked example on 2 ranks": bare(WORKED, 5, (0, 0, 1, 1, 0)),
    "frozen first stage": bare(chain(3), 3, frozen=frozenset([0])),
    "frozen tower": bare(WORKED, 5, frozen=frozenset([2, 3])),
    "frozen tower beside a trained one": bare(WORKED, 5, (0, 1, 0, 1, 2), frozen=frozenset([2, 3])),
    "nothing to train": bare(chain(3), 3, frozen=frozenset([0, 1, 2])),
    **{f"random {seed}": random_bare(seed, frozen=seed % 2 == 1) for seed in range(12)},
}


def backward_ops(name: str) -> tuple[Kind, ...]:
    """What a family makes of a backward, in order: the first makes the gradients that other stages wait for."""
    return (Kind.I, Kind.W) if name == "zb_h1" else (Kind.B,)


# --- every schedule, every graph ---


@pytest.mark.parametrize(("name", "kind", "m"), pairwise_of(list(FAMILIES), list(GRAPHS), [1, 2, 8]))
def test_a_table_is_complete_and_ordered_and_its_peaks_are_counted(name: str, kind: str, m: int) -> None:
    """Every schedule of every graph, and both with every number of micro-batches."""
    graph = GRAPHS[kind]
    assert_every_action_stands_once_on_the_rank_of_its_stage(name, graph, m)
    assert_dependencies_hold_in_simulated_time(name, graph, m)
    assert_backwards_run_in_micro_batch_order(name, graph, m)
    assert_the_peak_is_the_most_forwards_that_wait_for_their_backward(name, graph, m)


def assert_every_action_stands_once_on_the_rank_of_its_stage(name: str, graph: Bare, m: int) -> None:
    found = Counter((rank, action) for rank, row in enumerate(graph.build(name, m).rows) for action in row)
    wanted = Counter(
        (graph.placement[stage], Action(stage, op, j))
        for stage in range(graph.stages)
        for op in (Kind.F, *backward_ops(name))
        for j in range(m)
        if op is Kind.F or graph.backward[stage]
    )
    assert found == wanted


def assert_dependencies_hold_in_simulated_time(name: str, graph: Bare, m: int) -> None:
    schedule = graph.build(name, m)
    forward = [1 + stage % 3 for stage in range(graph.stages)]
    spans = schedule.simulate(forward, backward=2.5, weight=0.75, comm=0.25).spans
    cost = {Kind.B: 2.5, Kind.I: 1.75, Kind.W: 0.75}
    split = Kind.I in backward_ops(name)
    halved = [(stage, j) for stage in range(graph.stages) for j in range(m)] if split else []
    for rank, row in enumerate(schedule.rows):
        for action in row:
            assert spans[action].duration == cost.get(action.kind, forward[action.stage])
            for other in before(graph, action, halved):
                hop = 0.25 if graph.placement[other.stage] != rank else 0
                assert spans[other].end + hop <= spans[action].start
        for first, second in pairwise(row):
            assert spans[first].end <= spans[second].start


def assert_backwards_run_in_micro_batch_order(name: str, graph: Bare, m: int) -> None:
    """So that gradients add up in it."""
    for row in graph.build(name, m).rows:
        for stage in range(graph.stages):
            for op in backward_ops(name):
                order = [action.microbatch for action in row if action.stage == stage and action.kind is op]
                assert order == sorted(order)


def assert_the_peak_is_the_most_forwards_that_wait_for_their_backward(name: str, graph: Bare, m: int) -> None:
    schedule = graph.build(name, m)
    result, last = schedule.simulate(), backward_ops(name)[-1]
    for stage in range(graph.stages):
        if graph.backward[stage]:
            held = [
                (result.spans[Action(stage, Kind.F, j)].end, result.spans[Action(stage, last, j)].end) for j in range(m)
            ]
            most = max(sum(start <= moment < end for start, end in held) for moment, _ in held)
            assert result.peak_in_flight[stage] == most
        else:
            assert result.peak_in_flight[stage] == 0


def made_and_judged(name: str, stages: int, microbatches: int) -> None:
    schedule = build(name, chain(stages), microbatches)
    schedule.verify()
    schedule.simulate()


@pytest.mark.parametrize("name", every(2, FAMILIES))
def test_a_table_of_four_times_as_many_actions_takes_four_times_the_work(name: str) -> None:
    """To build, verify and simulate."""
    work = steps(made_and_judged, name, 8, 32)
    assert steps(made_and_judged, name, 8, 128) <= 4.5 * work  # 16 times where a step is quadratic
    assert steps(made_and_judged, name, 32, 32) <= 4.5 * work


# --- families of one's own ---


def one_after_another(problem: Problem) -> list[list[Action]]:
    """A micro-batch at a time: there and back."""
    return [
        [
            action
            for j in range(problem.microbatches)
            for action in (
                *(Action(stage, Kind.F, j) for stage in stages),
                *(Action(stage, Kind.B, j) for stage in reversed(stages) if problem.backward[stage]),
            )
        ]
        for stages in problem.stages_of
    ]


def test_a_family_is_asked_with_all_that_the_user_said() -> None:
    asked: list[Problem] = []

    def family(problem: Problem) -> Sequence[Sequence[Action]]:
        asked.append(problem)
        return one_after_another(problem)

    costs = Costs.of(3, forward=[1, 2, 3], activation_bytes=7)
    schedule = build(family, [(0, 1), (1, 2)], 2, [1, 0, 0], costs=costs, in_flight=4, memory=[50, 60], tied=[[0, 2]])
    (problem,) = asked
    assert problem == Problem(((0, 1), (1, 2)), 2, (1, 0, 0), (True,) * 3, costs, (4, 4, 4), (50, 60))
    assert (problem.ranks, problem.stages_of, problem.depth) == (2, ((1, 2), (0,)), (3, 2, 1))
    assert schedule.tied == ((0, 2),)
    assert schedule.name == "family"
    assert build(functools.partial(one_after_another), [], 1).name == "custom"


def test_what_a_family_of_ones_own_gets_wrong_is_told_with_its_table() -> None:
    def forwards_alone(problem: Problem) -> list[list[Action]]:
        return [[Action(stage, Kind.F, 0) for stage in stages] for stages in problem.stages_of]

    with pytest.raises(ScheduleError, match="stage 0 needs 0F0 0B0, or 0F0 0I0 0W0 on rank 0; the table has 0F0"):
        build(forwards_alone, chain(2), 1)


# --- 1F1B ---


def test_1f1b_keeps_within_its_cap_with_several_stages_on_a_rank() -> None:
    for seed in seeds(200):
        graph = random_bare(5000 + seed, frozen=seed % 3 == 0)
        m = 1 + seed % 9
        peaks = graph.build("1f1b", m).simulate().peak_in_flight
        for stage, peak in enumerate(peaks):
            assert peak <= min(m, graph.depth(stage))


def test_1f1b_hides_the_second_of_two_stages_on_a_rank() -> None:
    """In blocks of two, a chain of 4 is a chain of 2 with stages twice as long: no worse than (m + 1) · 2(F + B)."""
    for m in (2, 4, 8):
        result = bare(chain(4), 4, (0, 0, 1, 1)).build("1f1b", m).simulate()
        assert result.makespan <= (m + 1) * 6


# --- what cannot be built ---


@pytest.mark.parametrize("m", [0, -3])
def test_no_micro_batch_is_an_error(m: int) -> None:
    with pytest.raises(ScheduleError, match=f"{m} micro-batches; at least 1"):
        build("1f1b", chain(2), m)


@pytest.mark.parametrize("edges", [[(0, 1), (1, 2), (2, 1)], [(0, 1), (2, 2)]], ids=["two stages", "one stage"])
def test_a_cycle_is_named(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(ScheduleError, match=r"cycle, (1 → 2 → 1|2 → 1 → 2|2 → 2);"):
        build("1f1b", edges, 2)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"edges": chain(5), "stages": 3}, "3 stages, and the edges need 5; write stages=5"),
        ({"edges": [], "stages": 0}, "0 stages, and the edges need 1"),
        ({"edges": [(-1, 0)]}, "edge -1-0 names a stage outside of 0..0"),
        ({"edges": chain(3), "placement": [0, 2, 0]}, r"placement \[0, 2, 0\] leaves a rank without stages"),
        ({"edges": chain(3), "placement": [1, 1, 2]}, r"placement \[1, 1, 2\] leaves a rank without stages"),
        ({"edges": chain(3), "placement": [0, 1]}, "2 stages, and the edges need 3"),
        ({"edges": chain(3), "placement": [0, 1, 2], "stages": 4}, r"placement= has 3 entries for 4 stages"),
        ({"edges": chain(3), "backward": [True]}, "backward= has 1 entries for 3 stages"),
        ({"edges": chain(3), "names": ["a", "b"]}, "stage_names has 2 entries for 3 stages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_with_the_values(arguments: dict[str, object], fact: str) -> None:
    with pytest.raises(ScheduleError, match=fact):
        build("1f1b", microbatches=2, **arguments)  # type: ignore[arg-type]


def test_stages_that_no_edge_mentions_count() -> None:
    assert len(build("1f1b", [(0, 1)], 2, stages=4).rows) == 4
    assert len(build("1f1b", [(0, 1)], 2, placement=[0, 1, 1]).placement) == 3


def test_rows_given_as_lists_are_kept_as_they_were() -> None:
    """A table that was verified cannot be changed behind its back."""
    rows = [[Action(0, Kind.F, 0), Action(0, Kind.B, 0)]]
    schedule = Schedule(rows, [], [0], [True], 1)  # type: ignore[arg-type]
    schedule.verify()
    rows[0].pop()
    assert schedule.rows == ((Action(0, Kind.F, 0), Action(0, Kind.B, 0)),)
    assert hash(schedule) == hash(Schedule(schedule.rows, (), (0,), (True,), 1))


def test_numbers_of_numpy_are_numbers() -> None:
    assert Costs.of(3, np.float32(1), np.array([1, 2, 3]), comm=np.int64(1)) == Costs.of(3, 1, [1, 2, 3], comm=1)
    limited = build("greedy", chain(3), 4, np.array([0, 1, 2]), in_flight=np.array([1, 1, 1]))  # type: ignore[arg-type]
    assert limited.simulate().peak_in_flight == (1, 1, 1)


# --- backwards in halves at costs of their own ---


def test_zb_h1_at_uneven_costs_is_no_slower_than_its_order_and_holds_no_more() -> None:
    shorter = 0
    for seed in seeds(120):
        draw = random.Random(seed)
        graph = random_bare(seed)
        n = graph.stages
        backward = [draw.choice([1, 2, 2, 4]) for _ in range(n)]
        weight = [draw.choice([0.25, 0.5, 0.75]) * whole for whole in backward]
        costs = Costs.of(n, [draw.choice([1, 1, 2, 3]) for _ in range(n)], backward, weight, draw.choice([0, 0.5]))
        order, made = (
            build(family, graph.edges, 6, graph.placement, n, costs=costs).planned() for family in (in_halves, "zb_h1")
        )
        assert made.makespan <= order.makespan
        deepest = max(graph.depth(stage) for stage in range(n))
        held = made.schedule.simulate(costs.forward, costs.backward, costs.weight, activation_bytes=1).peak_bytes or ()
        assert all(peak <= deepest * len(on) for peak, on in zip(held, made.schedule.stages_of, strict=True))
        shorter += made.makespan < order.makespan
    assert shorter > len(seeds(120)) // 6


def test_zb_h1_keeps_its_order_where_f_i_and_w_are_alike() -> None:
    alike = Costs.of(4, forward=3, backward=6)
    assert build("zb_h1", chain(4), 8, costs=alike).rows == build("zb_h1", chain(4), 8).rows


def test_greedy_puts_w_off_within_memory_where_the_costs_tell_what_that_holds() -> None:
    """1F1B's peak of 4 · 10 bytes is room enough for ZB-H1's time; with less it takes longer."""
    costs = Costs.of(4, activation_bytes=10, deferred_bytes=4)
    plain = build("greedy", chain(4), 8, costs=Costs.of(4, activation_bytes=10), memory=40)
    assert plain.planned().makespan == 33
    assert Kind.W not in {action.kind for row in plain.rows for action in row}
    assert Kind.W not in {action.kind for row in build("greedy", chain(4), 8, costs=costs).rows for action in row}
    times = []
    for memory in (40, 30, 20, 10):
        plan = build("greedy", chain(4), 8, costs=costs, memory=memory).planned()
        assert max(plan.peak_bytes or ()) <= memory
        times.append(plan.makespan)
    assert times[0] == 27 == 8 * 3 + 3
    assert times == sorted(times)


def test_greedy_with_halves_is_never_slower_within_the_same_memory() -> None:
    shorter = 0
    for seed in seeds(100):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 3 == 0)
        n = graph.stages
        sizes = [draw.choice([4, 10, 20]) for _ in range(n)]
        deferred = [size * draw.choice([0.25, 0.5, 1, 1.5]) for size in sizes]
        options = {"forward": [draw.choice([1, 2]) for _ in range(n)], "activation_bytes": sizes}
        whole, split = Costs.of(n, **options), Costs.of(n, **options, deferred_bytes=deferred)  # type: ignore[arg-type]
        memory = [sum(sizes) * draw.choice([1, 2]) for _ in range(graph.ranks)]
        plans = [
            build("greedy", graph.edges, 5, graph.placement, n, graph.backward, costs=costs, memory=memory).planned()
            for costs in (whole, split)
        ]
        assert plans[1].makespan <= plans[0].makespan
        assert all(held <= room for held, room in zip(plans[1].peak_bytes or (), memory, strict=True))
        shorter += plans[1].makespan < plans[0].makespan
    assert shorter > len(seeds(100)) // 5


@pytest.mark.parametrize("seed", seeds(40))
def test_list_scheduling_takes_the_best_action_that_is_ready_as_soon_as_one_is(seed: int) -> None:
    graph, m = random_bare(seed, frozen=seed % 2 == 0, most=10), 1 + seed % 5
    if graph.ranks == graph.stages:
        return  # a rank for each: 1F1B's closed form
    timeline = graph.build("1f1b", m).simulate(forward=1, backward=2)
    spans, rank_of, ahead = timeline.spans, graph.placement, timeline.schedule.dependencies.ahead
    depth = [graph.depth(stage) for stage in range(graph.stages)]
    others = 0
    for action, span in spans.items():
        here = [other for other in spans if rank_of[other.stage] == rank_of[action.stage]]
        begun = Counter((other.stage, other.kind) for other in here if spans[other].start < span.start)
        free = max((spans[other].end for other in here if spans[other].start < span.start), default=0)
        for other in here:
            stage, op, j, _ = other
            in_flight = begun[stage, Kind.F] - begun[stage, Kind.B]
            below = op is Kind.B or not graph.backward[stage] or in_flight < depth[stage]
            if j != begun[stage, op] or not below or other == action:
                continue
            ready = max([free, *(spans[one].end for one in before(graph, other, (), ahead))])
            keys = [(one.kind is Kind.F, depth[one.stage], one.microbatch) for one in (action, other)]
            assert (span.start, keys[0]) <= (ready, keys[1])
            others += 1
    assert others > 0 or m == 1


@pytest.mark.parametrize("returned", [None, 3, "1f1b", [None, None], build("1f1b", chain(2), 2)], ids=repr)
def test_a_family_that_returns_no_rows_is_refused_with_what_it_returned(returned: object) -> None:
    with pytest.raises(
        ScheduleError, match=r"what the family custom returns is .*; it is a list with a row of Actions"
    ):
        build(named("custom", lambda problem: returned), chain(2), 2)


def named(name: str, function: Any) -> Any:
    function.__name__ = name
    return function


def test_a_family_may_yield_its_rows() -> None:
    wanted = build("1f1b", chain(3), 4)
    assert build(lambda problem: (iter(row) for row in wanted.rows), chain(3), 4).rows == wanted.rows


# --- names of torch.distributed.pipelining ---


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("interleaved-1f1b", "interleaved_1f1b"),
        ("ZBVZeroBubble", "zb_v"),
        (torch_schedules.Schedule1F1B, "1f1b"),
        (torch_schedules.ScheduleGPipe, "gpipe"),
        (torch_schedules.ScheduleInterleaved1F1B, "interleaved_1f1b"),
        (torch_schedules.ScheduleZBVZeroBubble, "zb_v"),
    ],
)
def test_names_and_classes_of_torch_that_mean_the_same_will_do(given: Any, name: str) -> None:
    edges = [(0, 1), (1, 2), (2, 3)]
    got, wanted = (build(family, edges, 4, (0, 1, 1, 0)) for family in (given, name))
    assert (got.rows, got.name) == (wanted.rows, wanted.name)
    assert Options(schedule=given).schedule == name


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("InterleavedZeroBubble", 'write "zb_h1", with a stage on each rank, or "zb_v", with two'),
        (torch_schedules.ScheduleInterleavedZeroBubble, 'write "zb_h1", with a stage on each rank'),
        ("LoopedBFS", 'write "gpipe", with several stages on each rank'),
        ("DualPipeV", "a table of it in a file can run"),
    ],
)
def test_other_names_of_torch_say_what_comes_closest(given: Any, text: str) -> None:
    with pytest.raises(ScheduleError, match=f"unknown schedule '.*{text}"):
        build(given, [(0, 1)], 4)


def test_the_path_of_a_table_will_do(tmp_path: Path) -> None:
    build("gpipe", [(0, 1)], 4).to_csv(tmp_path / "mine.csv")
    assert Options(schedule=str(tmp_path / "mine.csv")).schedule.rows == build("gpipe", [(0, 1)], 4).rows
