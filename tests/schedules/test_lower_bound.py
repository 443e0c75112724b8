"""Bounds: no table beats the lower bound, some reach it, and none holds more in flight than it may."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import Problem, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.laps import laps
from fxpipe.schedules.families.limits import round_trip_caps
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.simulate import least_makespan
from tests.graphs import FAMILIES, WORKED, Bare, Pairs, bare, branches, chain, random_bare
from tests.thinned import ALL, in_turn, seeds

every_schedule = pytest.mark.parametrize("name", FAMILIES)
SEEDS = 400 if ALL else 30  # random graphs for a property


def random_costs(stages: int, draw: random.Random) -> Costs:
    """Costs of every kind: equal or not, 0 among them, W from none of B to all of it, with a latency or without."""
    if draw.random() < 0.3:
        return Costs.of(stages, comm=draw.choice([0, 0.25, 1]))
    forward = [draw.choice([0, 0.5, 1, 1, 2, 5]) for _ in range(stages)]
    backward = [draw.choice([0, 1, 2, 2, 4, 7]) for _ in range(stages)]
    weight = [draw.choice([0, 0.25, 0.5, 1]) * whole for whole in backward]
    return Costs.of(stages, forward, backward, weight, comm=draw.choice([0, 0, 0.25, 1, 3]))


def build_with(name: str, graph: Bare, m: int, costs: Costs, **options: object) -> Schedule:
    return build(name, graph.edges, m, graph.placement, backward=graph.backward, costs=costs, **options)  # type: ignore[arg-type]


def problem_of(graph: Bare, costs: Costs, m: int = 8) -> Problem:
    return Problem(graph.edges, m, graph.placement, graph.backward, costs)


# --- the lower bound ---


@every_schedule
def test_no_schedule_of_a_random_graph_is_below_the_lower_bound(name: str) -> None:
    for seed in range(2000 if ALL else 40):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 4 == 0, one_each=seed % 5 == 0)
        costs = random_costs(graph.stages, draw)
        timeline = build_with(name, graph, draw.choice([1, 2, 3, 5, 9]), costs).simulate(costs)
        assert timeline.makespan >= max(timeline.busy)
        assert timeline.makespan >= timeline.lower_bound - 1e-9, (graph, costs)


@every_schedule
def test_the_least_makespan_is_no_longer_than_a_simulated_one(name: str) -> None:
    for seed in seeds(40):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 4 == 0, one_each=seed % 5 == 0)
        costs = random_costs(graph.stages, draw)
        table = build_with(name, graph, draw.choice([1, 2, 3, 5, 9]), costs)
        free = replace(costs, comm=0.0)
        assert least_makespan(table, costs) <= table.simulate(costs).makespan
        if all(graph.backward):
            assert least_makespan(table, free) == table.simulate(free).makespan


@pytest.mark.parametrize("name", ["store_all", "group_interleaved", "cached"])
@pytest.mark.parametrize("group", [2, None])
def test_the_same_of_groups(name: str, group: int | None) -> None:
    costs = Costs.of(4, forward=[1, 2, 1, 3])
    table = build(name, [(0, 2), (1, 2), (2, 3)], 8, [0, 1, 1, 2], gather={2: group}, costs=costs)
    assert least_makespan(table, costs) == table.simulate(costs).makespan


def test_a_table_that_deadlocks_takes_for_ever() -> None:
    rows = [tuple(Action(stage, op, 0) for op in (Kind.F, Kind.B)) for stage in range(2)]
    for first, makespan in ((rows[0], 6), (rows[0][::-1], math.inf)):
        table = Schedule((first, rows[1]), ((0, 1),), (0, 1), (True, True), 1)
        assert least_makespan(table, Costs.of(2)) == makespan


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 1), (5, 5)])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "greedy"])
def test_balanced_graphs_with_a_stage_a_rank_reach_the_lower_bound(name: str, forward: int, backward: int) -> None:
    for seed in seeds(150):
        graph = random_bare(seed, one_each=True)
        depths = [graph.depth(stage) for stage in range(graph.stages)]
        for m in (1, 4, 9):
            timeline = graph.build(name, m).simulate(forward, backward)
            assert timeline.makespan == timeline.lower_bound == (m + max(depths) - 1) * (forward + backward)
            if name == "1f1b":
                assert timeline.peak_in_flight == tuple(min(m, depth) for depth in depths)


def test_a_table_of_halves_has_a_bound_of_its_own_for_its_weight_gradients_may_come_last() -> None:
    split = build("zb_h1", chain(2), 4)
    # the second rank: a forward before it, four of F + I + W, and behind the last I either all W's or the first's I
    assert split.simulate(forward=1, backward=1, weight=0).lower_bound == 1 + 4 * 2 + 1
    assert split.simulate(forward=1, backward=3, weight=2).lower_bound == 1 + 4 * 4
    # the first rank is the bottleneck
    assert split.simulate(forward=1, backward=[9, 2], weight=[0, 1]).lower_bound == 4 * 10
    # one micro-batch: three forwards, I of 1, then I of 3 twice, beside which W of 2 counts for nothing
    one = build("zb_h1", chain(3), 1).simulate(forward=1, backward=3, weight=[0, 0, 2])
    assert one.makespan == one.lower_bound == 3 + 1 + 3 + 3


# --- in flight ---


def most_held(schedule: Schedule, sizes: Sequence[float]) -> list[float]:
    """Per rank, the most that its stages hold from a forward to the end of its backward; ``sizes``: per micro-batch."""
    peaks = []
    for row in schedule.rows:
        held: dict[Action, float] = {}
        peak = 0.0
        for stage, op, j, _ in row:
            if op is Kind.F and schedule.backward[stage]:
                held[Action(stage, Kind.F, j)] = sizes[stage]
            elif op in (Kind.B, Kind.W):
                del held[Action(stage, Kind.F, j)]
            peak = max(peak, sum(held.values()))
        assert not held
        peaks.append(peak)
    return peaks


def test_greedy_never_holds_more_than_in_flight_allows() -> None:
    reached = 0
    for seed in range(SEEDS):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 4 == 0)
        costs = random_costs(graph.stages, draw)
        limits = [draw.randint(1, 6) for _ in range(graph.stages)]
        peaks = build_with("greedy", graph, 6, costs, in_flight=limits).simulate(costs).peak_in_flight
        assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
        reached += any(peak == limit > 1 for peak, limit in zip(peaks, limits, strict=True))
    assert reached > SEEDS // 8  # it does use what it may, where that helps


def test_greedy_never_holds_more_than_memory_allows_or_says_that_it_cannot() -> None:
    refused = 0
    for seed in range(SEEDS):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 4 == 0)
        sizes = [draw.choice([0, 1, 10, 100]) for _ in range(graph.stages)]
        costs = Costs.of(graph.stages, comm=draw.choice([0, 2]), activation_bytes=sizes)
        memory = [draw.choice([60, 150, 400]) for _ in range(graph.ranks)]
        least = [0] * graph.ranks
        for stage, rank in enumerate(graph.placement):
            least[rank] += sizes[stage] * graph.backward[stage]
        if any(need > has for need, has in zip(least, memory, strict=True)):
            refused += 1
            with pytest.raises(ScheduleError, match=r"rank \d+ may hold \d+ bytes, but one micro-batch at each of its"):
                build_with("greedy", graph, 6, costs, memory=memory)
            continue
        schedule = build_with("greedy", graph, 6, costs, memory=memory)
        assert all(held <= has for held, has in zip(most_held(schedule, sizes), memory, strict=True))
        assert schedule.simulate(costs).peak_bytes == tuple(most_held(schedule, sizes))
    assert SEEDS // 8 < refused < 7 * SEEDS // 8


def test_one_limit_holds_for_every_stage_or_every_rank() -> None:
    costs = Costs.of(4, activation_bytes=10)
    assert build("greedy", chain(4), 8, in_flight=2).simulate().peak_in_flight == (2, 2, 2, 1)
    held = build("greedy", chain(4), 8, placement=[0, 0, 1, 1], costs=costs, memory=30).simulate(costs).peak_bytes
    assert held is not None
    assert max(held) <= 30


def test_more_memory_never_makes_a_longer_table_where_a_latency_is_to_hide() -> None:
    costs = Costs.of(4, comm=1, activation_bytes=1)
    makespans = [
        build("greedy", chain(4), 16, costs=costs, memory=memory).simulate(costs).makespan for memory in (1, 2, 4, 8)
    ]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[0] == 16 * (4 * 3 + 2 * 3)  # one micro-batch at a time: there and back
    assert makespans[-1] < makespans[0] / 2


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"memory": 100}, "memory= needs the costs' activation_bytes: what a stage holds of a micro-batch"),
        (
            {"memory": 24, "costs": Costs.of(3, activation_bytes=[10, 5, 15])},
            r"rank 1 may hold 24 bytes, but one micro-batch at each of its stages \[0, 2\] takes 25; use smaller",
        ),
        ({"memory": [1, 2, 3], "costs": Costs.of(3, activation_bytes=1)}, "memory= has 3 entries for 2 ranks"),
        ({"in_flight": [1, 2]}, "in_flight= has 2 entries for 3 stages"),
        ({"in_flight": [1, 0, 2]}, r"in_flight=\(1, 0, 2\); at least 1 micro-batch must be in flight"),
        ({"costs": Costs.of(2)}, "costs.forward has 2 entries for 3 stages"),
    ],
    ids=["no bytes known", "too little", "per rank", "per stage", "none in flight", "other costs"],
)
def test_limits_that_cannot_be_kept_are_refused_with_the_values(options: dict[str, object], fact: str) -> None:
    with pytest.raises(ScheduleError, match=fact):
        build("greedy", chain(3), 4, placement=[1, 0, 1], **options)  # type: ignore[arg-type]


# --- greedy ---


def test_greedy_is_no_longer_than_1f1b_with_as_many_in_flight() -> None:
    shorter = 0
    for seed in range(SEEDS):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 4 == 0)
        costs, m = random_costs(graph.stages, draw), draw.choice([2, 5, 8])
        depth = [graph.depth(stage) for stage in range(graph.stages)]
        usual = build_with("1f1b", graph, m, costs).simulate(costs)
        listed = build_with("greedy", graph, m, costs, in_flight=depth).simulate(costs)
        assert listed.makespan <= usual.makespan + 1e-9
        assert all(peak <= min(m, cap) for peak, cap in zip(listed.peak_in_flight, depth, strict=True))
        shorter += listed.makespan < usual.makespan - 1e-9
    assert shorter > SEEDS // 10


def test_greedy_hides_a_latency_of_a_quarter_of_a_forward_with_one_micro_batch_more() -> None:
    """Two branches of two and a join: the join is busy from its first value to its last gradient."""
    costs = Costs.of(5, forward=1, backward=2, comm=0.25)
    graph = bare(branches(2, 2), 5)
    caps = round_trip_caps(problem_of(graph, costs, 32))
    timeline = build_with("greedy", graph, 32, costs, in_flight=[cap + 1 for cap in caps]).simulate(costs)
    assert timeline.makespan == timeline.lower_bound == (1 + 0.25) * 2 + 32 * 3 + (2 + 0.25) * 2
    assert timeline.makespan < build_with("1f1b", graph, 32, costs).simulate(costs).makespan


def test_greedy_reaches_the_bound_where_one_stage_is_the_bottleneck() -> None:
    """Depth alone would let stage 0 hold three micro-batches; two are enough before a bottleneck."""
    costs = Costs.of(3, forward=[1, 5, 1], backward=[2, 10, 2])
    timeline = build("greedy", chain(3), 8, costs=costs).simulate(costs)
    assert timeline.makespan == timeline.lower_bound == 1 + 8 * 15 + 2
    assert timeline.peak_in_flight == (2, 2, 1)


# --- the caps that a round trip asks for ---


def test_round_trip_caps_are_depths_where_costs_are_equal_and_nothing_is_late() -> None:
    for seed in seeds(200):
        graph = random_bare(seed, one_each=True)
        depths = tuple(graph.depth(stage) for stage in range(graph.stages))
        for forward, backward in ((1, 2), (0.1, 0.2), (3, 1)):
            assert round_trip_caps(problem_of(graph, Costs.of(graph.stages, forward, backward))) == depths


@pytest.mark.parametrize(
    ("edges", "placement", "costs", "caps"),
    [
        # own costs 3, 15, 3; period 15; round trips 21, 18, 3
        (chain(3), (0, 1, 2), Costs.of(3, [1, 5, 1], [2, 10, 2]), (2, 2, 1)),
        # a hop of 2 there and one back: round trips 10, 3; with one hop it would be 8, and three in flight
        (chain(2), (0, 1), Costs.of(2, comm=2), (4, 1)),
        # the same on one rank, which does 6 per micro-batch and needs no hop: round trips 6, 3
        (chain(2), (0, 0), Costs.of(2, comm=1), (1, 1)),
        # period 6 on both ranks: round trips 12, 9, 6, 3, and 2 for the hop that the first two have in front of them
        (chain(4), (0, 0, 1, 1), Costs.of(4, comm=1), (3, 2, 1, 1)),
        # the branch of 2 · 9 is longer than that of 2 · 3: round trips 21, 12, 9, 6, 3; period 9
        (WORKED, (0, 1, 2, 3, 4), Costs.of(5, [3, 3, 1, 1, 1], [6, 6, 2, 2, 2]), (3, 2, 1, 1, 1)),
        # nothing takes any time: depths
        (WORKED, (0, 1, 2, 3, 4), Costs.of(5, 0, 0), (3, 2, 3, 2, 1)),
    ],
    ids=[
        "bottleneck",
        "both ways",
        "one rank",
        "two ranks",
        "uneven branches",
        "no time at all",
    ],
)
def test_round_trip_caps_by_hand(edges: Pairs, placement: tuple[int, ...], costs: Costs, caps: tuple[int, ...]) -> None:
    assert round_trip_caps(problem_of(bare(edges, len(placement), placement), costs)) == caps


def test_a_frozen_stage_counts_its_forward_alone_in_a_round_trip() -> None:
    """Own costs 9, 3, 3, so that the period is 9 and round trips are 15, 6, 3."""
    graph = bare(chain(3), 3, frozen=frozenset([0]))
    assert round_trip_caps(problem_of(graph, Costs.of(3, [9, 1, 1], [18, 2, 2]))) == (2, 1, 1)


def test_no_more_are_in_flight_than_there_are_micro_batches_however_far_a_hop() -> None:
    far = Costs.of(2, comm=1e9, activation_bytes=1)
    assert round_trip_caps(problem_of(bare(chain(2), 2), far, m=5)) == (5, 1)
    assert build("greedy", chain(2), 5, costs=far, memory=3).simulate().peak_in_flight == (3, 1)
    assert build("greedy", chain(2), 5, costs=Costs.of(2, 1e-320, 0, comm=1)).simulate().peak_in_flight[0] <= 5


def test_a_limit_that_is_an_exact_sum_is_kept() -> None:
    """0.1 + 0.3 + 0.7 is 1.1 in decimals, and not in binary: room for one or two micro-batches a stage will do."""
    for seed in range(SEEDS):
        draw = random.Random(seed)
        graph = random_bare(seed)
        sizes = [draw.choice([0.1, 0.3, 0.7, 1.1]) for _ in range(graph.stages)]
        costs = Costs.of(graph.stages, activation_bytes=sizes)
        rooms = [0.0] * graph.ranks
        for stage, rank in enumerate(graph.placement):
            rooms[rank] = round(rooms[rank] + draw.choice([1, 2]) * sizes[stage], 6)
        held = build_with("greedy", graph, 6, costs, memory=rooms).simulate(costs).peak_bytes
        assert held is not None
        assert all(peak <= room + 1e-6 for peak, room in zip(held, rooms, strict=True))


# --- families with several stages a rank ---


def test_interleaved_is_never_slower_than_1f1b() -> None:
    """At F = 1 and B = 2, on whatever graph and placement."""
    faster = 0
    for seed in range(SEEDS):
        graph = random_bare(seed, frozen=seed % 4 == 0)
        m = [1, 2, 4, 8, 16][seed % 5]
        interleaved, usual = (graph.build(name, m).simulate().makespan for name in ("interleaved_1f1b", "1f1b"))
        assert interleaved <= usual
        faster += interleaved < usual
    assert faster > SEEDS // 20


@pytest.mark.parametrize(
    ("graph", "makespan"),
    [
        # contiguous blocks, as compile places stages: a chain of 4 ranks with stages twice as long, (8 + 3) · 6
        (bare(chain(8), 8, (0, 0, 1, 1, 2, 2, 3, 3)), 66),
        # a join beside the first of two branches' stages: its rank is never idle, 8 · 2 · 3
        (bare(branches(2, 2), 5, (0, 1, 2, 3, 0)), 48),
        # round four ranks, twice: idle (p − 1)(F + B)
        (bare(chain(8), 8, (0, 1, 2, 3, 0, 1, 2, 3)), 8 * 2 * 3 + 3 * 3),
    ],
    ids=["blocks", "join beside a branch", "round"],
)
def test_interleaved_is_good_on_placements_of_all_kinds(graph: Bare, makespan: int) -> None:
    assert graph.build("interleaved_1f1b", 8).simulate().makespan <= makespan


def test_laps_are_as_deep_as_the_graph_and_not_as_many_as_its_ranks() -> None:
    """Two branches of four, each round its own two ranks, and a join: a lap is ⌈5 / 2⌉ deep, and five ranks there are.

    So stages 0 and 2 of rank 0 take turns by groups of three micro-batches.
    """
    graph = bare(branches(2, 4), 9, (0, 1, 0, 1, 2, 3, 2, 3, 4))
    problem = problem_of(graph, Costs.of(9), m=6)
    row = laps(problem)[0](problem)[0]
    forwards = [action for action in row if action.kind is Kind.F]
    assert [str(action) for action in forwards[:6]] == ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2"]
    # rank 0's last stage is d = 3 deep: 2 · 2 forwards behind it, and a lap of 3 for its other stage
    first = next(place for place, action in enumerate(row) if action.kind is Kind.B)
    assert first == 2 * (3 - 1) + 3 + 1


def test_zb_h1_holds_no_more_than_the_depth_of_what_is_trained_for_each_stage_of_a_rank() -> None:
    for seed in seeds(300):
        graph, m = random_bare(seed, frozen=seed % 2 == 0), 1 + seed % 9
        deepest = max((graph.depth(s) for s in range(graph.stages) if graph.backward[s]), default=0)
        table = graph.build("zb_h1", m)
        most = [min(m, deepest) * sum(graph.backward[stage] for stage in stages) for stages in table.stages_of]
        held = table.simulate(activation_bytes=1).peak_bytes or ()
        more = [peak - limit for peak, limit in zip(held, most, strict=True)]
        assert max(more) <= (1 if seed in (17, 68) else 0)  # where laps would deadlock, a rank runs one forward more


# --- the formula, and every table of tiny graphs ---


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
    """Every table of a graph; ``halved``: the backwards that are I and W in it."""
    rows = [
        [
            Action(stage, op, j)
            for stage, owner in enumerate(graph.placement)
            for j in range(m)
            for op in (
                Kind.F,
                *(((Kind.I, Kind.W) if (stage, j) in halved else (Kind.B,)) if graph.backward[stage] else ()),
            )
            if owner == rank
        ]
        for rank in range(graph.ranks)
    ]
    for orders in itertools.product(*(list(linear_orders(row)) for row in rows)):
        yield Schedule(orders, graph.edges, graph.placement, graph.backward, m)


def every_split(graph: Bare, m: int) -> list[tuple[Half, ...]]:
    """All choices of backwards that are made in halves."""
    trained = [(stage, j) for stage in range(graph.stages) for j in range(m) if graph.backward[stage]]
    return [chosen for count in range(len(trained) + 1) for chosen in itertools.combinations(trained, count)]


MOST_HALVED = 3 if ALL else 2


@pytest.mark.parametrize(("name", "comm"), in_turn(list(TINY), [0, 1]))
def test_no_table_with_halves_is_below_the_lower_bound_be_it_mixed_or_not(name: str, comm: int) -> None:
    graph = TINY[name]
    draw = random.Random(2)
    for m in (1, 2):
        for halved in every_split(graph, m):
            if sum(graph.backward) * m > 3 and len(halved) > (MOST_HALVED if graph.ranks > 1 else MOST_HALVED - 2):
                continue  # too many tables
            forward, backward = ([draw.randint(1, 4) for _ in range(graph.stages)] for _ in range(2))
            weight = [draw.randint(0, whole) for whole in backward]
            results = []
            for table in all_tables(graph, m, halved):
                with contextlib.suppress(ScheduleError):  # it deadlocks
                    results.append(table.simulate(forward, backward, weight, comm))
            assert len({result.lower_bound for result in results}) == 1
            assert 0 < results[0].lower_bound <= min(result.makespan for result in results)
