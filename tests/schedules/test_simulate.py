"""Simulate: times worked out by hand, and earliest possible starts as on an independent network."""

from __future__ import annotations

import operator
import random

import pytest

from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Timeline
from tests.graphs import FAMILIES, JOINED, chain, joined, random_bare
from tests.schedules.network import Clocked
from tests.thinned import seeds


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


def test_costs_are_one_number_or_one_per_stage() -> None:
    schedule = build("1f1b", chain(2), 1)
    assert times(schedule.simulate(forward=[1, 3], backward=[4, 2])) == {
        "0F0": (0, 1), "1F0": (1, 4), "1B0": (4, 6), "0B0": (6, 10),
    }  # fmt: skip
    assert times(schedule.simulate(forward=(2, 2), backward=5)) == times(schedule.simulate(forward=2, backward=5))


# --- everything as early as it can be ---


@pytest.mark.parametrize("name", FAMILIES)
def test_every_action_starts_when_its_rank_is_free_and_its_messages_are_here(name: str) -> None:
    """As ranks do that run the lowered instructions, one message at a time between each two."""
    for seed in seeds(60):
        graph = random_bare(seed, frozen=seed % 2 == 0)
        draw = random.Random(seed)
        forward, backward = ([draw.choice([0.25, 1, 2, 5]) for _ in range(graph.stages)] for _ in range(2))
        comm = draw.choice([0, 0.25, 1, 3, 6])
        schedule = graph.build(name, 6)
        weight = [draw.choice([0, 0.25, 0.5, 1]) * whole for whole in backward]
        cost = {Kind.F: forward, Kind.B: backward, Kind.I: list(map(operator.sub, backward, weight)), Kind.W: weight}
        result = schedule.simulate(forward, backward, weight, comm=comm)
        ranks = Clocked(schedule, lambda action, cost=cost: cost[action.kind][action.stage], comm)
        assert ranks.ends(seed)
        assert result.spans == ranks.spans
        assert result.makespan == max(span.end for span in result.spans.values())
        for row in schedule.rows:
            ends = [0.0, *(result.spans[action].end for action in row)]
            assert [result.since[action] for action in row] == ends[:-1]


# --- links ---


@pytest.mark.parametrize("comm", [0, 0.5, 1, 1.5, 2, 5])
def test_a_link_carries_one_message_at_a_time(comm: float) -> None:
    """GPipe on a chain of p: the last rank's forwards come as fast as ranks make them and links carry them, and so do
    the first rank's gradients: (m − 1)(max(F, c) + max(B, c)) + p(F + B) + 2(p − 1)c."""
    p, m, f, b = 4, 16, 1, 2
    timeline = build("gpipe", chain(p), m).simulate(f, b, comm=comm)
    assert timeline.makespan == (m - 1) * (max(f, comm) + max(b, comm)) + p * (f + b) + 2 * (p - 1) * comm


@pytest.mark.parametrize("comm", [0, 0.25, 0.5])
def test_a_stage_that_is_held_back_waits_until_its_values_are_received_and_not_until_they_are_used(comm: float) -> None:
    """GPipe behind a frozen stage: it is held back by no more than messages hide, so forwards and backwards follow one
    another: m F + (p − 1)(F + c), and then m B + (p − 2)(B + c)."""
    p, m, f, b = 4, 8, 1, 2
    schedule = build("gpipe", chain(p), m, backward=[False] + [True] * (p - 1))
    assert schedule.dependencies.ahead[0] == 2
    forwards, backwards = m * f + (p - 1) * (f + comm), m * b + (p - 2) * (b + comm)
    assert schedule.simulate(f, b, comm=comm).makespan == forwards + backwards


def test_the_costs_of_a_plan_can_be_given_as_one_value() -> None:
    schedule = build("1f1b", chain(2), 3)
    costs = Costs.of(2, forward=[1, 2], backward=3, weight=1, comm=0.5, activation_bytes=4)
    assert schedule.simulate(costs) == schedule.simulate([1, 2], 3, 1, 0.5, 4)
    assert schedule.simulate(costs).costs == costs
    assert not schedule.simulate(costs).measured


# --- groups, and forwards that run again ---


def test_a_group_costs_once_and_waits_for_all_of_its_micro_batches() -> None:
    """F = 1, B = 2: the second stages end their last forward at 5; 6: the join's; 8: its gradients."""
    spans = joined(JOINED).simulate().spans
    assert spans[Action(4, Kind.F, 0, 4)] == (5, 6)
    assert spans[Action(4, Kind.B, 0, 4)] == (6, 8)
    assert [spans[Action(1, Kind.B, j)].start for j in range(4)] == [8, 10, 12, 14]


def test_a_forward_that_is_run_again_costs_a_forward_and_need_not_wait_for_its_gradient() -> None:
    spans = joined("0F0 0R0 0B0\n1F0 1B0", chain(2)).simulate([1, 4], [2, 8]).spans
    assert spans[Action(0, Kind.R, 0)] == (1, 2)
    assert spans[Action(0, Kind.B, 0)] == (13, 15)
