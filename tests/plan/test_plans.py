"""``Plans``: one plan for one pattern, and another state where tensors, tracers or tables are others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.errors import PartitionError, ScheduleError
from fxpipe.options import Options
from fxpipe.plan.example import Example, plan_first
from fxpipe.plan.plans import Plans
from fxpipe.schedules import Costs, Problem, build, with_costs
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.verify import Machine, Step
from tests.models import WIDTH, Chain


def planned(options: Options) -> Plans:
    plans = Plans.empty(Chain(2), options, fxpipe.Topology([("pipe", 2)]), torch.device("cpu"))
    return plan_first(Example(plans, options))[0]


def test_a_batch_of_another_shape_has_the_table_of_the_first_one() -> None:
    """So that replicas whose batches differ reduce in one order; one's own family may answer otherwise each time."""
    asked = []

    def family(problem: Problem) -> list[list[Action]]:
        asked.append(problem)
        ops = (Kind.F, Kind.B)
        return [[Action(s, op, j) for j in range(2) for s in stages for op in ops] for stages in problem.stages_of]

    first, other = (
        Options(example_args=(torch.zeros(rows, WIDTH),) * 2, microbatches=2, tracer="record", schedule=family)
        for rows in (8, 12)
    )
    plans = planned(first)
    times = len(asked)
    _, plan = plans.plan(Example(plans, other).pattern())
    assert plan is not plans.first
    assert plan.schedule.rows == plans.first.schedule.rows
    assert len(asked) == times > 0


@pytest.mark.parametrize("schedule", ["1f1b", build("gpipe", [(0, 1)], 2)], ids=["a family", "a table"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compile_proves_the_list_that_runs_and_no_other(
    monkeypatch: pytest.MonkeyPatch, schedule: Any, recompute: bool
) -> None:
    proven = []
    run = Machine.run

    def counted(machine: Machine) -> Iterator[Step]:
        proven.append(machine._rows)
        return run(machine)

    monkeypatch.setattr(Machine, "run", counted)
    plan = planned(Options(schedule=schedule, microbatches=2, recompute=recompute and isinstance(schedule, str))).first
    assert proven == [plan.instructions]
    assert Counter(plan.order) == Counter((rank, step) for rank, row in enumerate(plan.instructions) for step in row)


def test_a_family_whose_table_would_hang_is_refused_with_the_cells_that_wait() -> None:
    def family(problem: Problem) -> list[list[Action]]:
        return [[Action.parse(cell) for cell in row.split()] for row in ("0F0 0B0", "1B0 1F0")]

    with pytest.raises(ScheduleError, match="the table deadlocks: rank 0 waits at 0B0 for 1B0 on rank 1; ") as error:
        planned(Options(schedule=family, microbatches=1))
    first, second = (line.split()[-2:] for line in str(error.value).splitlines()[-2:])
    assert (first, second) == (["0F0", "[0B0]"], ["[1B0]", "1F0"])


def test_changed_tensors_are_taken_up_by_a_new_state_and_the_old_one_stays_as_it_was() -> None:
    plans = planned(Options())
    old, new = plans.module.layers[0].weight, nn.Parameter(torch.ones(WIDTH, WIDTH))
    plans.module.layers[0].weight = new
    again = plans.with_tensors_of_module()
    assert again.first.graph[0].tensors["layers.0.weight"] is new
    assert plans.first.graph[0].tensors["layers.0.weight"] is old
    assert again.first.digest == plans.first.digest


@pytest.mark.parametrize(("rows", "wanted"), [(8, [3, 3, 2]), (2, [2, 2, 2])])
def test_an_example_is_cut_as_a_call_would_cut_it_and_one_of_too_few_rows_is_each_micro_batch(
    rows: int, wanted: list[int]
) -> None:
    options = Options(microbatches=3, example_args=(torch.zeros(rows, WIDTH),) * 2)
    shapes = Example(planned(options), options).pattern().shapes
    assert [dict(shape)["x"].shapes for shape in shapes] == [[(size, WIDTH)] for size in wanted]


def test_a_new_table_splits_backwards_that_were_whole_and_joins_them_again() -> None:
    plans = planned(Options())
    split, _ = plans.rescheduled(with_costs("zb_h1", Costs.of(2, 1, 2, 1)))
    joined, _ = split.rescheduled(with_costs("1f1b", Costs.of(2, 1, 2, 0.1), in_flight=[2, 1]))
    assert [one.first.schedule.name for one in (plans, split, joined)] == ["1f1b", "zb_h1", "1f1b"]
    for one, in_halves in ((plans, False), (split, True), (joined, False)):
        assert [stage.deferring is not None for stage in one.first.graph] == [in_halves] * 2


class Tied(nn.Module):
    """A tied head. Its checkpoint leaves training to "record", which names its weight as the head's, and evaluation to
    "export", which names it as the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids if len(ids) > 1 else ids.clone())
        x = checkpoint(self.layer, x, use_reentrant=False) if self.training else self.layer(x)
        return F.cross_entropy(self.head(fxpipe.stage_boundary(x)), ids)


def test_a_later_kind_of_batch_may_call_a_tied_parameter_by_another_of_its_names() -> None:
    model, ids = Tied(), torch.arange(8)
    options: Any = {"microbatches": 2, "example_args": (ids,)}
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), **options)
    assert forward_backward.evaluate(ids, outputs="loss").item() == pytest.approx(model(ids).item())


class Heads(nn.ModuleDict):
    def forward(self, x: Tensor, which: str) -> Tensor:
        return self[which](x).square().mean()  # type: ignore[no-any-return]


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(4, 4), Heads({name: nn.Linear(4, 4) for name in "ab"})

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.heads(fxpipe.stage_boundary(self.trunk(x)), which)  # type: ignore[no-any-return]


def test_a_later_kind_that_uses_another_head_is_told_what_to_keep_whole() -> None:
    model, x, topology = Chooses(), torch.randn(8, 4), fxpipe.Topology([("pipe", 2)])
    options: Any = {"microbatches": 2, "example_args": (x, "a")}
    with pytest.raises(PartitionError, match=r'uses heads.b.bias in .*: boundaries={"heads": "whole"}'):
        fxpipe.compile(model, topology, tracer="symbolic", **options)(x, "b")
    forward_backward = fxpipe.compile(model, topology, boundaries={"heads": "whole"}, **options)
    for which in "aba":
        assert forward_backward(x, which).item() == pytest.approx(model(x, which).item())
