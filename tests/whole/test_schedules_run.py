"""Every schedule that can run does, on processes of their own, and no table changes a bit of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Action, Op, Schedule, ScheduleError, Topology
from fxpipe.schedules import Costs, Problem, build, with_costs
from tests.graphs import FAMILIES
from tests.harness import Engines, accumulate, assert_run, compiled, cut, reference, strict, trained
from tests.models import CASES
from tests.pool import Pool
from tests.thinned import in_turn

MODELS = ["two towers, text first", "6 stages in turn on 3 ranks", "encoder-decoder"]


def train(name: str, schedule: Any) -> Any:
    case = CASES[name]
    return trained(case, [case.batch(number) for number in range(2)], schedule=schedule)


def assert_trains(pool: Pool, name: str, schedule: Any) -> None:
    """Two steps on processes equal plain PyTorch to the last bit."""
    case = CASES[name]
    wanted, _ = reference(case, [case.batch(number) for number in range(2)])
    assert_run(pool.run(train, name, schedule, ranks=case.ranks), wanted)


def table_of(name: str, schedule: str = "1f1b") -> Schedule:
    """The table that this model gets."""
    return compiled(CASES[name], schedule=schedule).schedule


@pytest.mark.parametrize(("name", "schedule"), in_turn(MODELS, FAMILIES))
def test_every_family_runs_on_processes_and_changes_no_bit(name: str, schedule: str, pool: Pool) -> None:
    assert_trains(pool, name, schedule)


def swapped(schedule: Schedule, rank: int, first: str, second: str) -> Schedule:
    """A table edited by hand: two cells of a row change places."""
    a, b = Action.parse(first), Action.parse(second)
    row = [{a: b, b: a}.get(action, action) for action in schedule.rows[rank]]
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


def test_a_table_edited_by_hand_runs_as_it_was_edited(pool: Pool) -> None:
    table = table_of("two towers, text first")
    rank = next(rank for rank, row in enumerate(table.rows) if Action(row[0].stage, Op.F, 2) in row[:3])
    stage = table.rows[rank][0].stage
    edited = swapped(table, rank, f"{stage}B0", f"{stage}F3")  # one more forward before the first backward
    assert edited.rows != table.rows
    assert_trains(pool, "two towers, text first", edited)


def test_a_table_with_whole_backwards_among_halves_runs() -> None:
    """The first micro-batch's backwards are in one, but for the first stage's."""
    name = "two towers, text first"
    table = table_of(name, "zb_h1")
    whole = [stage for stage in range(4) if stage != table.rows[0][0].stage]
    rows = []
    for row in table.rows:
        kept = [action for action in row if action[:3] not in {(stage, Op.W, 0) for stage in whole}]
        rows.append(tuple(Action(a.stage, Op.B, 0) if a[:3] in {(s, Op.I, 0) for s in whole} else a for a in kept))
    mixed = replace(table, rows=tuple(rows))
    assert sum(action.op is Op.B for row in mixed.rows for action in row) == 3
    assert_run(strict(3)(4, train, name, mixed), reference(CASES[name], [CASES[name].batch(n) for n in range(2)])[0])


def test_a_table_from_a_file_runs(pool: Pool, tmp_path: Path) -> None:
    name = MODELS[0]
    table = table_of(name, "gpipe")
    table.to_csv(tmp_path / "table.csv", communication=True)
    read = Schedule.from_csv(tmp_path / "table.csv")  # its edges are a chain's: the model's own replace them
    assert read.rows == table.rows
    assert_trains(pool, name, read)


def backwards_last(problem: Problem) -> Sequence[Sequence[Action]]:
    """A user's own family: all forwards micro-batch by micro-batch, then all backwards in the same order."""
    m = range(problem.microbatches)
    return [
        [
            *(Action(stage, Op.F, j) for j in m for stage in stages),
            *(Action(stage, Op.B, j) for j in m for stage in reversed(stages) if problem.backward[stage]),
        ]
        for stages in problem.stages_of
    ]


def test_a_users_own_family_runs(pool: Pool) -> None:
    assert compiled(CASES[MODELS[0]], schedule=backwards_last).schedule.name == "backwards_last"
    assert_trains(pool, MODELS[0], backwards_last)


def test_a_family_takes_costs_and_limits_along(pool: Pool) -> None:
    costs = Costs.of(6, forward=[1, 5, 1, 1, 2, 1], backward=[2, 9, 2, 2, 4, 2], comm=0.5)
    wide = with_costs("greedy", costs, in_flight=4)
    narrow = with_costs("greedy", costs, in_flight=1)
    name = "6 stages in turn on 3 ranks"
    tables = [compiled(CASES[name], schedule=family).schedule for family in (wide, narrow)]
    assert [max(table.simulate().peak_in_flight) for table in tables] == [4, 1]
    assert tables[0].name == "greedy"
    runs = strict(0)(3, train, name, narrow)
    assert_run(runs, reference(CASES[name], [CASES[name].batch(number) for number in range(2)])[0])


# --- what cannot run ---


def test_a_table_in_halves_is_refused_where_stages_are_not_the_captured_graphs() -> None:
    case = CASES[MODELS[0]]
    with pytest.raises(ScheduleError) as error:
        compiled(case, schedule="zb_h1", example_kwargs=case.batch(), parallelize=lambda stage, mesh: None)
    assert "zb_h1 has backwards in two halves" in str(error.value)
    assert 'write schedule="1f1b", or leave out parallelize=' in str(error.value)


def too_few(problem: Problem) -> Sequence[Sequence[Action]]:
    return backwards_last(problem)[:-1]


def not_actions(problem: Problem) -> Any:
    return [["0F0", "0B0"] for _ in problem.stages_of]


def test_a_users_family_that_is_wrong_is_told_what_is() -> None:
    graph = compiled(CASES[MODELS[0]]).stages
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


WIDTH, ROWS, PARTS = 8, 16, 4


class Forked(nn.Module):
    """``a`` feeds ``b``, ``c`` and ``d``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(torch.tanh(self.a(x)), name="b")
        g = fxpipe.stage_boundary(torch.tanh(self.b(h)), name="c")
        e = fxpipe.stage_boundary(self.c(g) * h, name="d")
        return (self.d(e) + h).square().sum(-1).mean()


def rows_of_step(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def forked() -> nn.Module:
    torch.manual_seed(0)
    return Forked()


def stepped(options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Losses of two steps and what their gradients sum to, and the bytes that the second one sent."""
    forward_backward = fxpipe.compile(forked(), Topology([("pipe", 2)]), microbatches=PARTS, **options)
    losses = [forward_backward(rows_of_step(step)) for step in range(2)]
    sent = int(sum(row.bytes for row in forward_backward.traffic().select("send")))  # of the last call
    gradients = {name: p.grad.clone() for name, p in forward_backward.named_parameters() if p.grad is not None}
    return losses, gradients, sent


APART = {"a": 0, "b": 1, "c": 1, "d": 1}


@pytest.mark.parametrize(("schedule", "engine"), [("1f1b", "distributed"), ("zb_h1", "strict 1")])
def test_gradients_are_plain_pytorchs(schedule: str, engine: str, engines: Engines) -> None:
    results = engines(engine)(2, stepped, {"placement": APART, "schedule": schedule})
    plain, losses = forked(), []
    for step in range(2):
        losses.append(accumulate(lambda _, part: plain(**part), cut({"x": rows_of_step(step)}, PARTS))[0])
    for found, gradients, _ in results:
        assert all(map(torch.equal, found, losses))
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_a_step_sends_the_value_once_and_each_readers_gradient(pool: Pool) -> None:
    """One value of ROWS x WIDTH floats to rank 1, of which three gradients come back: b's, c's and d's."""
    (_, _, first), (_, _, second) = pool.run(stepped, {"placement": APART}, ranks=2)
    value = 4 * ROWS * WIDTH
    assert (first, second) == (value, 3 * value)
