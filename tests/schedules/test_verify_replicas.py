"""Verify replicas: their tables together, where a stage waits for the rows of all of them."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify_replicas import verify_replicas
from tests.graphs import FAMILIES, JOINED, RECOMPUTED, joined, random_bare
from tests.thinned import seeds


def with_row(schedule: Schedule, rank: int, row: str) -> Schedule:
    rows = list(schedule.rows)
    rows[rank] = tuple(map(Action.parse, row.split()))
    return replace(schedule, rows=tuple(rows))


def refused(tables: list[Schedule], shared: Collection[int]) -> str:
    """Each by itself comes to its end; together they do not."""
    for table in tables:
        table.verify()
    with pytest.raises(ScheduleError) as error:
        verify_replicas(tables, shared)
    return str(error.value)


@pytest.mark.parametrize("rows", [JOINED, RECOMPUTED])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_replicas_of_one_table_come_to_its_end(rows: str, count: int) -> None:
    verify_replicas([joined(rows)] * count, {4})
    verify_replicas([joined(rows)] * count, range(5))


@pytest.mark.parametrize("name", FAMILIES)
def test_so_they_do_whatever_the_graph_and_the_stages_that_see_all(name: str) -> None:
    for seed in seeds(24):
        graph = random_bare(seed, frozen=seed % 2 == 0)
        shared = random.Random(seed).sample(range(graph.stages), graph.stages // 2)
        verify_replicas([graph.build(name, 3)] * 2, shared)


def test_groups_in_another_order_are_refused() -> None:
    """One replica's second group runs forward, and the other's first one back: each waits for the other."""
    table = joined(RECOMPUTED)
    other = with_row(table, 4, "4F0-1 4I0-1 4W0-1 4F2-3 4I2-3 4W2-3")
    message = refused([table, other], {4})
    assert "rank 4 of replica 0 at 4F2-3; rank 4 of replica 1 at 4I0-1" in message
    assert "[4F2-3]" in message
    verify_replicas([table, other], ())


def test_a_circle_through_two_ranks_is_refused_though_each_gathers_once_and_in_one_order() -> None:
    """Each rank has a stage that sees all, and one that the other's feeds. In one replica the second rank begins, in
    the other the first: so each waits for a message from behind a collective that waits for the other replica."""
    edges, alone = ((1, 2), (0, 3)), {"placement": (0, 1, 0, 1), "backward": (False,) * 4, "microbatches": 1}
    rows = [["2F0 0F0", "1F0 3F0"], ["0F0 2F0", "3F0 1F0"]]
    tables = [
        Schedule(tuple(tuple(map(Action.parse, row.split())) for row in table), edges, **alone)  # type: ignore[arg-type]
        for table in rows
    ]
    message = refused(tables, {0, 1})
    assert "rank 1 of replica 0 at 1F0; rank 0 of replica 1 at 0F0" in message
    verify_replicas(tables[:1] * 2, {0, 1})
    verify_replicas(tables, {0})
    verify_replicas(tables, {1})


def test_a_replica_with_fewer_groups_is_refused() -> None:
    table = joined(RECOMPUTED)
    rows = [tuple(action for action in row if action.microbatch < 2) for row in table.rows]
    shorter = replace(table, rows=tuple(rows), microbatches=2)
    assert "rank 4 of replica 0 at 4F2-3; rank 4 of replica 1 at 4I0-1" in refused([table, shorter], {4})


def test_a_table_that_halts_by_itself_is_refused_as_ever() -> None:
    table = joined(JOINED.replace("1F2 1F3 1B0", "1F2 1B0 1F3"))
    with pytest.raises(ScheduleError, match="rank 1 waits at 1B0 for 4B0-3 on rank 4"):
        verify_replicas([table] * 2, {4})
