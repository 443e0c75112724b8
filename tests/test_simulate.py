"""Simulate: times worked out by hand, earliest possible starts, and a lower bound that is one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from fxpipe.action import Action, Op
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.schedules import SCHEDULES, build
from fxpipe.simulate import Simulation
from tests.graphs import WORKED, Bare, bare, branches, chain, random_bare


def times(result: Simulation) -> dict[str, tuple[float, float]]:
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
        result = schedule.simulate(forward, backward, comm=comm)
        assert result.makespan == max(span.end for span in result.spans.values())
        for rank, row in enumerate(schedule.rows):
            free = 0.0
            for action in row:
                arrivals = [
                    result.spans[other].end + comm * (graph.placement[other.stage] != rank)
                    for other in before(graph, action)
                ]
                start, end = result.spans[action]
                assert start == max([free, *arrivals])
                assert end == start + (forward if action.op is Op.F else backward)[action.stage]
                free = end


def before(graph: Bare, action: Action) -> list[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.op is Op.F:
        return [Action(source, Op.F, microbatch) for source in graph.sources(stage)]
    later = [Action(target, Op.B, microbatch) for target in graph.targets(stage) if graph.backward[target]]
    return [Action(stage, Op.F, microbatch), *later]


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


def linear_orders(actions: list[Action]) -> Iterator[tuple[Action, ...]]:
    """The orders of a rank's actions in which each backward stands behind its forward."""
    for order in itertools.permutations(actions):
        place = {action: index for index, action in enumerate(order)}
        if all(place[Action(a.stage, Op.F, a.microbatch)] < place[a] for a in order if a.op is Op.B):
            yield order


@pytest.mark.parametrize(
    "graph",
    [
        bare(chain(2), 2),
        bare(chain(2), 2, frozen=frozenset([0])),
        bare(chain(2), 2, frozen=frozenset([1])),
        bare(chain(2), 2, (0, 0)),
        bare(((0, 1), (0, 2)), 3, (0, 1, 1), frozen=frozenset([0, 2])),
        bare(chain(3), 3, (0, 1, 0), frozen=frozenset([0, 1])),
    ],
    ids=["chain", "frozen first", "last without backward", "one rank", "a side branch", "there and back"],
)
@pytest.mark.parametrize("comm", [0, 1])
def test_no_table_at_all_is_below_the_lower_bound(graph: Bare, comm: int) -> None:
    draw = random.Random(1)
    for m in (1, 2):
        rows = [
            [
                Action(stage, op, j)
                for stage, owner in enumerate(graph.placement)
                for op in (Op.F, Op.B)
                for j in range(m)
                if owner == rank and (op is Op.F or graph.backward[stage])
            ]
            for rank in range(graph.ranks)
        ]
        forward, backward = ([draw.randint(1, 4) for _ in range(graph.stages)] for _ in range(2))
        shortest, bound = float("inf"), 0.0
        for orders in itertools.product(*map(linear_orders, rows)):
            schedule = Schedule(orders, graph.edges, graph.placement, graph.backward, m)
            try:
                result = schedule.simulate(forward, backward, comm=comm)
            except ScheduleError:
                continue  # it halts
            shortest, bound = min(shortest, result.makespan), result.lower_bound
        assert 0 < bound <= shortest < float("inf")


# --- what cannot be simulated ---


@pytest.mark.parametrize("costs", [{"forward": [1]}, {"backward": [1, 2, 3]}, {"weight": []}], ids=str)
def test_costs_for_another_number_of_stages_are_refused(costs: dict[str, list[float]]) -> None:
    with pytest.raises(ScheduleError, match=r"\d costs for 2 stages; give one number, or one per stage"):
        build("1f1b", chain(2), 2).simulate(**costs)  # type: ignore[arg-type]


def test_a_table_that_halts_is_told_with_the_cells_that_wait() -> None:
    with pytest.raises(ScheduleError, match="comes to a halt at 0B0, 1F1; "):
        halves(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]).simulate()
