"""Advice: the one change of placement that helps most, against every such change, built one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import ScheduleError, Topology
from fxpipe.forecast.advice import advise
from fxpipe.graph.ranks import Placement, ranks_of
from fxpipe.options import Options
from fxpipe.plan.example import Example
from fxpipe.plan.plans import Plans
from fxpipe.plan.together import plan_first
from fxpipe.schedules import Costs, build

RANKS, MICROBATCHES = 3, 6
NAMES = ["video", "words", "middle", "loss"]
EDGES = [("video", "middle"), ("words", "middle"), ("middle", "loss")]


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Counting(nn.Module):
    """Its forward writes a buffer, so that it is on one rank only."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


def planned(placement: dict[str, Any], schedule: Any = "1f1b", **options: Any) -> Plans:
    stages: dict[str, Any] = {
        "video": lambda x: x,
        "words": lambda y: y,
        "middle": lambda v, t: v + t,
        "loss": Last(),
    }
    graph = fxpipe.StageGraph.from_callables(stages, EDGES, {"video": ["x"], "words": ["y"]})
    backward = [replace(stage, has_backward=True) for stage in graph]
    graph = replace(graph, stages=tuple(backward))
    given = Options(microbatches=MICROBATCHES, placement=placement, schedule=schedule, **options)
    plans = Plans.empty(graph, given, Topology([("pipe", RANKS)]), torch.device("cpu"))
    return plan_first(Example(plans, given))[0]


def changed(placement: Placement) -> Iterator[Placement]:
    """Every placement with one stage on one, two or all ranks, or one more; and every exchange of two stages."""
    for stage, entry in enumerate(placement):
        for count in (1, 2, RANKS):
            for some in itertools.combinations(range(RANKS), count):
                if some != ranks_of(entry):
                    yield (*placement[:stage], some if count > 1 else some[0], *placement[stage + 1 :])
    for a, b in itertools.combinations(range(len(placement)), 2):
        places = list(placement)
        places[a], places[b] = places[b], places[a]
        yield tuple(places)


def seconds(placement: Placement, costs: Costs, plans: Plans) -> float:
    schedule = plans.first.schedule
    if {rank for entry in placement for rank in ranks_of(entry)} != set(range(RANKS)):
        return float("inf")
    try:
        table = build("1f1b", schedule.edges, MICROBATCHES, placement, costs=costs, backward=schedule.backward)
    except ScheduleError:
        return float("inf")
    return table.simulate(costs).makespan


@pytest.mark.parametrize("forward", [[4, 1, 1, 1], [1, 1, 4, 1], [3, 3, 1, 1], [1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("comm", [0.0, 0.5])
def test_it_is_the_best_of_all_single_changes(forward: list[float], comm: float) -> None:
    plans = planned({"video": 0, "words": 0, "middle": 1, "loss": 2})
    costs = replace(Costs.of(4, forward, [2 * f for f in forward], comm=comm), source="costs measured")
    told = advise(plans, costs)
    now = plans.first.schedule.simulate(costs).makespan
    placement = plans.first.graph.placement
    least = min(seconds(other, costs, plans) for other in changed(placement))
    assert told.seconds == pytest.approx(now)
    assert bool(told.change) == (forward != [1, 2, 3, 4])  # there compile's table for the best placement saves nothing
    if not told.change:
        return
    assert seconds(tuple(told.placement[name] for name in plans.first.graph.names), costs, plans) == (
        pytest.approx(least)
    )
    # What is pasted gives what was promised: the table that compile makes, which knows no measured costs.
    assert planned(dict(told.placement)).first.schedule.simulate(costs).makespan == (
        pytest.approx(told.seconds - told.saved)
    )


def test_it_prints_what_moves_what_that_saves_and_what_to_paste() -> None:
    plans = planned({"video": 0, "words": 0, "middle": 1, "loss": 2})
    costs = replace(Costs.of(4, [0.004, 0.001, 0.001, 0.001], [0.008, 0.002, 0.002, 0.002]), source="costs measured")
    told = advise(plans, costs)
    text = str(told)
    assert repr(told) == text
    assert text.startswith(f"{told.change}: saves ")
    assert f"of {told.seconds * 1e3:.3g} ms of a step, by measured costs" in text
    scope: dict[str, Any] = {}
    exec(text.partition("; ")[2], scope)
    assert scope["placement"] == told.placement
    again = planned(scope["placement"])
    assert again.first.schedule.simulate(costs).makespan == pytest.approx(told.seconds - told.saved)


def test_with_recomputation_what_is_pasted_gives_what_was_promised() -> None:
    """Where a stage saves nothing by it depends on the placement."""
    stages, x = ["0", "1", "2", "3"], torch.randn(16, 8)

    def compiled(placement: dict[str, Any]) -> Plans:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in stages))
        given = Options(
            microbatches=8,
            placement=placement,
            boundaries=stages[1:],
            recompute=True,
            loss_fn=lambda y: y.square().mean(),
            example_args=(x,),
        )
        plans = Plans.empty(model, given, Topology([("pipe", 2)]), torch.device("cpu"))
        return plan_first(Example(plans, given))[0]

    plans = compiled({"0": 0, "1": 0, "2": 1, "3": 1})
    for forward in ([2.5, 3.1, 3.6, 1.0], [2, 1, 1, 1], [1, 1, 1, 2]):
        costs = replace(Costs.of(4, forward, [2, 1, 1, 1]), source="costs measured")
        told = advise(plans, costs)
        again = compiled(dict(told.placement)).first.schedule.simulate(costs).makespan
        assert again == pytest.approx(told.seconds - told.saved, rel=1e-3)


class TwoStages(nn.Module):
    def __init__(self, counting: int) -> None:
        super().__init__()
        own = [nn.Sequential(nn.Linear(4, 4), *[Counting()] * (number < counting)) for number in range(2)]
        self.first, self.last = own

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(fxpipe.stage_boundary(self.first(x)))
        return y.square().mean()


@pytest.mark.parametrize("counting", [0, 1, 2])
def test_a_stage_that_writes_stays_on_one_rank_and_where_nothing_helps_it_says_so(counting: int) -> None:
    given = Options(microbatches=4, example_args=(torch.randn(8, 4),))
    plans = Plans.empty(TwoStages(counting), given, Topology([("pipe", 2)]), torch.device("cpu"))
    plans = plan_first(Example(plans, given))[0]
    told = advise(plans, replace(Costs.of(2, [8, 2], [16, 4]), source="costs measured"))
    assert isinstance(told.placement[plans.first.graph.names[0]], tuple) == (counting == 0)
    if counting == 2:
        assert not told.change
        assert told.saved == 0
        assert str(told).startswith("no change of one stage's ranks saves 1% of the ")


def test_the_plan_beside_a_step_ends_with_it_and_advise_returns_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    forward_backward = fxpipe.compile(
        model,
        Topology([("pipe", 2)]),
        loss_fn=nn.functional.mse_loss,
        boundaries=["1", "2", "3"],
        microbatches=4,
        placement={"0": 0, "1": 0, "2": 0, "3": 1},
    )
    with pytest.raises(fxpipe.RunError, match="no step was recorded"):
        forward_backward.advise()
    forward_backward.record_timeline()
    forward_backward(x, target=y)
    real = forward_backward.timeline()
    told = forward_backward.advise()
    assert told == advise(forward_backward._plans, real.costs)
    assert str(fxpipe.compare(real.schedule.simulate(real.costs), real)).endswith(f"\n\n{told}")
    assert set(told.placement) == {"0", "1", "2", "3"}
