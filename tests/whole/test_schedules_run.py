"""Tables by hand, from files and of users' own families run, and no table changes a bit of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fxpipe import Action, Kind, Schedule, ScheduleError
from fxpipe.schedules import Costs, Problem, build, with_costs
from tests.harness import assert_trains, compiled, distributed, strict
from tests.models import CASES, WIDTH
from tests.pool import Pool

TOWERS = "two towers, text first"


def table_of(name: str, schedule: Any = "1f1b") -> Schedule:
    """The table that this model gets."""
    return compiled(CASES[name], schedule=schedule).schedule


def swapped(schedule: Schedule, rank: int, first: str, second: str) -> Schedule:
    """A table edited by hand: two cells of a row change places."""
    a, b = Action.parse(first), Action.parse(second)
    row = [{a: b, b: a}.get(action, action) for action in schedule.rows[rank]]
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


def test_a_table_edited_by_hand_runs_as_it_was_edited(pool: Pool) -> None:
    table = table_of(TOWERS)
    rank = next(rank for rank, row in enumerate(table.rows) if Action(row[0].stage, Kind.F, 2) in row[:3])
    stage = table.rows[rank][0].stage
    edited = swapped(table, rank, f"{stage}B0", f"{stage}F3")  # one more forward before the first backward
    assert edited.rows != table.rows
    assert_trains(CASES[TOWERS], distributed(pool), schedule=edited)


def test_a_table_with_whole_backwards_among_halves_runs() -> None:
    """The first micro-batch's backwards are in one, but for the first stage's."""
    table = table_of(TOWERS, "zb_h1")
    whole = [stage for stage in range(4) if stage != table.rows[0][0].stage]
    rows = []
    for row in table.rows:
        kept = [action for action in row if action[:3] not in {(stage, Kind.W, 0) for stage in whole}]
        rows.append(tuple(Action(a.stage, Kind.B, 0) if a[:3] in {(s, Kind.I, 0) for s in whole} else a for a in kept))
    mixed = replace(table, rows=tuple(rows))
    assert sum(action.kind is Kind.B for row in mixed.rows for action in row) == 3
    assert_trains(CASES[TOWERS], strict(3), schedule=mixed)


def test_a_table_from_a_file_runs(pool: Pool, tmp_path: Path) -> None:
    table = table_of(TOWERS, "gpipe")
    table.to_csv(tmp_path / "table.csv", communication=True)
    read = Schedule.from_csv(tmp_path / "table.csv")  # its edges are a chain's: the model's own replace them
    assert read.rows == table.rows
    assert_trains(CASES[TOWERS], distributed(pool), schedule=read)


def backwards_last(problem: Problem) -> Sequence[Sequence[Action]]:
    """A user's own family: all forwards micro-batch by micro-batch, then all backwards in the same order."""
    m = range(problem.microbatches)
    return [
        [
            *(Action(stage, Kind.F, j) for j in m for stage in stages),
            *(Action(stage, Kind.B, j) for j in m for stage in reversed(stages) if problem.backward[stage]),
        ]
        for stages in problem.stages_of
    ]


def test_a_users_own_family_runs(pool: Pool) -> None:
    assert table_of(TOWERS, backwards_last).name == "backwards_last"
    assert_trains(CASES[TOWERS], distributed(pool), schedule=backwards_last)


def test_a_family_takes_costs_and_limits_along() -> None:
    costs = Costs.of(6, forward=[1, 5, 1, 1, 2, 1], backward=[2, 9, 2, 2, 4, 2], comm=0.5)
    wide = with_costs("greedy", costs, in_flight=4)
    narrow = with_costs("greedy", costs, in_flight=1)
    name = "6 stages in turn on 3 ranks"
    tables = [table_of(name, family) for family in (wide, narrow)]
    assert [max(table.simulate().peak_in_flight) for table in tables] == [4, 1]
    assert tables[0].name == "greedy"
    assert_trains(CASES[name], strict(0), schedule=narrow)


# --- what cannot run ---


def test_a_table_in_halves_is_refused_where_stages_are_not_the_captured_graphs() -> None:
    case = CASES[TOWERS]
    with pytest.raises(ScheduleError) as error:
        compiled(case, schedule="zb_h1", example_kwargs=case.batch(), parallelize=lambda stage, mesh: None)
    assert "zb_h1 has backwards in two halves" in str(error.value)
    assert 'write schedule="1f1b", or leave out parallelize=' in str(error.value)


def too_few(problem: Problem) -> Sequence[Sequence[Action]]:
    return backwards_last(problem)[:-1]


def not_actions(problem: Problem) -> Any:
    return [["0F0", "0B0"] for _ in problem.stages_of]


def test_a_users_family_that_is_wrong_is_told_what_is() -> None:
    graph = compiled(CASES[TOWERS]).stages
    for family, told in ((too_few, "3 rows for 4 ranks"), (not_actions, "'0F0' is no Action")):
        with pytest.raises(ScheduleError, match=told):
            build(family, graph.stage_edges, 4, graph.placement)


@pytest.mark.parametrize("family", ["1f1b", "gpipe", backwards_last])
def test_a_limit_that_a_family_does_not_keep_is_an_error(family: Any) -> None:
    with pytest.raises(ScheduleError, match=r"holds 4 micro-batches at stage 0, in_flight=2; .greedy"):
        build(family, [(0, 1), (1, 2), (2, 3)], 4, in_flight=2)
    costs = Costs.of(4, activation_bytes=10)
    with pytest.raises(ScheduleError, match=r"holds 40 bytes on rank 0, memory=25; .greedy"):
        build(with_costs(family, costs, memory=25), [(0, 1), (1, 2), (2, 3)], 4)
    with pytest.raises(ScheduleError, match="needs the costs' activation_bytes"):
        build(family, [(0, 1)], 4, memory=25)


# --- a value that several stages of a rank use crosses to it once ---


def sent_in_a_step(name: str) -> int:
    """Bytes of the second step: the first describes its messages."""
    forward_backward = compiled(CASES[name])
    for _ in range(2):
        forward_backward(**CASES[name].batch())
    return int(sum(row.bytes for row in forward_backward.traffic().select("send")))


def test_a_step_sends_the_value_once_and_each_readers_gradient(pool: Pool) -> None:
    """The floats of one value go to rank 1, and three gradients come back: b's, c's and d's."""
    value = 4 * CASES["forked"].rows * WIDTH
    assert pool.run(sent_in_a_step, "forked", ranks=2) == [value, 3 * value]
