"""Ahead: a stage without backward is no more than so many micro-batches ahead of its readers, and costs nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from fxpipe.schedules import Costs, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.dependency import Dependencies
from fxpipe.schedules.kinds import FORWARD, Kind
from fxpipe.schedules.lower import Compute, Instruction, Receive, Release, Send
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.simulate import simulate
from fxpipe.schedules.verify import prove
from tests.graphs import FAMILIES, bare, chain, random_bare
from tests.thinned import seeds

TOWER = ((0, 1), (1, 2), (2, 3), (3, 5), (4, 5))
"""An image tower of four stages, a text tower, and a loss."""


def tables() -> Iterator[Schedule]:
    for name in FAMILIES:
        for seed in seeds(40):
            yield random_bare(seed, frozen=True).build(name, 1 + seed % 16)


def most_ahead(schedule: Schedule, order: Sequence[Action]) -> Counter[int]:
    """Per stage without backward that others read, by how many micro-batches it was ahead of the last of these."""
    begun: Counter[int] = Counter()
    most: Counter[int] = Counter()
    readers = {s: {t for source, t in schedule.edges if source == s} for s in range(len(schedule.placement))}
    for action in order:
        if action.kind is Kind.F:
            begun[action.stage] += action.count
        for stage, mine in readers.items():
            if mine and not schedule.backward[stage]:
                most[stage] = max(most[stage], begun[stage] - min(begun[reader] for reader in mine))
    return most


def test_at_no_costs_is_a_stage_further_ahead_than_its_cap() -> None:
    """Of one on another rank it counts what is received: that begins once the reader's rank has come to the action in
    front of the one that reads it, which posts the receive."""
    capped, draw, comm = 0, random.Random(0), 0.25
    for schedule in tables():
        caps = schedule.dependencies.ahead
        costs = [draw.choice([0.5, 1, 3]) for _ in schedule.placement]
        spans = schedule.simulate(costs, [2 * cost for cost in costs], comm=comm).spans
        posted = posts(schedule)
        for stage, cap in caps.items():
            for reader in {t for source, t in schedule.edges if source == stage}:
                for j in range(cap, schedule.microbatches):
                    start = spans[Action(stage, Kind.F, j)].start
                    if schedule.placement[reader] == schedule.placement[stage]:
                        assert spans[Action(reader, Kind.F, j - cap)].end <= start
                    else:
                        before = posted[stage, schedule.placement[reader], j - cap]
                        assert (spans[before].end if before else 0) + comm <= start
                    capped += 1
    assert capped > 100


def posts(schedule: Schedule) -> dict[tuple[int, object, int], Action | None]:
    """(stage, other rank, micro-batch) → the action behind which the receive of the stage's value is posted there."""
    found: dict[tuple[int, object, int], Action | None] = {}
    for row in schedule.instructions:
        last = None
        for step in row:
            if isinstance(step, Compute):
                last = step.action
            elif isinstance(step, Receive) and step.message.direction is FORWARD:
                _, _, microbatch, _, receiver = step.message
                found.setdefault((schedule.edges[step.message.edge][0], receiver, microbatch), last)
    return found


def test_a_step_takes_no_longer_than_without_caps() -> None:
    for schedule in tables():
        free = Dependencies.from_edges(schedule.links, schedule.backward, schedule.rows)
        unbounded = simulate(schedule, Costs.of(len(schedule.placement)), free)
        assert schedule.simulate().makespan == unbounded.makespan


def test_a_sender_holds_no_more_messages_of_an_edge_than_the_cap() -> None:
    held_back = 0
    for schedule in tables():
        for stage, cap in schedule.dependencies.ahead.items():
            for row in schedule.instructions:
                for edge in {i for i, link in enumerate(schedule.edges) if link[0] == stage}:
                    held = most_held(row, edge)
                    assert held <= cap
                    held_back += held == cap < schedule.microbatches
    assert held_back > 5


def most_held(row: Sequence[Instruction], edge: int) -> int:
    """The most values of an edge that a rank has sent and not released."""
    held = most = 0
    for step in row:
        if isinstance(step, Send | Release) and step.message.edge == edge and step.message.direction is FORWARD:
            held += 1 if isinstance(step, Send) else -1
            most = max(most, held)
    return most


def test_one_process_that_plays_all_ranks_holds_no_more_either() -> None:
    schedule = build("1f1b", TOWER, 40, backward=[False] * 4 + [True] * 2)
    most = most_ahead(
        schedule,
        [
            step.action
            for _, step in prove(schedule, schedule.instructions, schedule.links)
            if isinstance(step, Compute)
        ],
    )
    assert most == Counter(dict.fromkeys(range(4), 2))


def test_a_table_that_needs_more_than_the_least_gets_it() -> None:
    """Stage 0 feeds 1, and 3 by way of 2; rank 1 runs all of 3 before 1, so that all of 0's come before 1's first."""
    rows = ["0F0 0F1 0F2 0F3 0F4", "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 1F0 1F1 1F2 1F3 1F4", "2F0 2F1 2F2 2F3 2F4"]
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    schedule = Schedule(parsed, ((0, 1), (0, 2), (2, 3)), (0, 1, 2, 1), (False, False, False, True), 5)
    schedule.verify()
    assert schedule.dependencies.ahead.get(0, 5) >= 5
    assert schedule.simulate().makespan == 1 + 1 + 5 * 3 + 5


@pytest.mark.parametrize("name", ["1f1b", "store_all", "group_interleaved", "cached"])
def test_in_front_of_a_group_a_frozen_tower_is_two_groups_ahead(name: str) -> None:
    """One that is taken, and one that is made meanwhile."""
    schedule = build(name, TOWER, 32, backward=[False] * 4 + [True] * 2, gather={5: 4})  # type: ignore[arg-type]
    assert schedule.dependencies.ahead[3] == 8
    free = Dependencies.from_edges(schedule.links, schedule.backward, schedule.rows)
    assert schedule.simulate().makespan == simulate(schedule, Costs.of(6), free).makespan


def test_on_one_rank_a_frozen_stage_does_not_fill_every_gap_with_what_nobody_takes() -> None:
    """Rank 0 idles while its neighbour works: it could make all 40 in the meantime, which gains nothing."""
    graph = bare(((0, 1), (1, 2)), 3, (0, 0, 1), frozen=frozenset([0]))
    schedule = build("1f1b", graph.edges, 40, graph.placement, backward=graph.backward, costs=Costs.of(3))
    (row, _) = schedule.rows
    most = most_ahead(schedule, row)
    assert 1 <= most[0] <= 2


def test_the_table_says_how_far_ahead() -> None:
    schedule = build("1f1b", chain(3), 8, backward=[False, False, True], names=["a", "b", "c"])
    assert "most ahead of those that read it: a 2, b 2" in str(schedule).splitlines()
    assert "ahead" not in str(build("1f1b", chain(3), 8))
