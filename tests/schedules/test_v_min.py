"""V-Min: its closed form and its peak, both lower than ``greedy``'s; what it refuses as ``zb_v`` does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import ScheduleError
from fxpipe.schedules import Costs, ScheduleName, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.families.zero_bubble import folded
from fxpipe.schedules.kinds import Kind
from tests.graphs import chain


def makespan(p: int, m: int) -> int:
    """6 a micro-batch, and what the first and the last take: p − 1 hops four times, and a slot on the way."""
    return 6 * m if p == 1 else 6 * m + 4 * p - 5 + (p % 3 == 0)


@pytest.mark.parametrize("p", range(1, 13))
def test_makespan_and_peak_are_those_of_the_closed_form(p: int) -> None:
    for m in (1, 2, 5, 4 * p):
        plan = build("v_min", chain(2 * p), m, folded(p)).simulate(1, 2, activation_bytes=1)
        assert plan.makespan == makespan(p, m)
        assert max(plan.peak_bytes or ()) <= 2 * ((p + 4) // 3)


@pytest.mark.parametrize(("p", "published", "greedy"), [(4, 107, 125), (6, 161, 187), (8, 219, 245)])
def test_it_is_within_2_percent_of_the_papers_generator_and_shorter_than_greedy_with_its_memory(
    p: int, published: int, greedy: int
) -> None:
    costs = Costs.of(2 * p, activation_bytes=1, deferred_bytes=1)
    m, memory = 4 * p, 2 * ((p + 4) // 3)
    plans = {name: build(name, chain(2 * p), m, folded(p), costs=costs, memory=memory).planned() for name in BOTH}
    assert published <= plans["v_min"].makespan < 1.02 * published
    assert plans["greedy"].makespan == greedy


BOTH = "v_min", "greedy"


def test_every_action_runs_once_and_a_frozen_stage_has_no_backward() -> None:
    frozen = build("v_min", chain(4), 5, folded(2), backward=[False, True, True, True])
    assert sorted(map(str, frozen.simulate().spans)) == sorted(
        str(Action(stage, op, j))
        for stage in range(4)
        for op in ((Kind.F, Kind.I, Kind.W) if stage else [Kind.F])
        for j in range(5)
    )


def test_skips_along_the_chain_and_recomputation_are_welcome() -> None:
    plain = build("v_min", chain(8), 5, folded(4))
    assert build("v_min", [*chain(8), (0, 7), (1, 6)], 5, folded(4)).rows == plain.rows
    again = build("v_min", chain(8), 5, folded(4), recompute=[True] * 8, costs=Costs.of(8, activation_bytes=4))
    assert again.planned().makespan >= 5 * 8
    assert max(again.planned().peak_bytes or ()) < max(plain.simulate(1, 2, activation_bytes=4).peak_bytes or ())


def test_at_other_costs_and_with_messages_that_take_time_the_order_stays() -> None:
    costs = Costs.of(12, forward=range(1, 13), backward=range(2, 26, 2), comm=0.5)
    table = build("v_min", chain(12), 9, folded(6), costs=costs)
    assert table.rows == build("v_min", chain(12), 9, folded(6)).rows
    assert table.planned().lower_bound <= table.planned().makespan


@pytest.mark.parametrize(
    ("edges", "placement", "fact"),
    [
        ([(0, 2), (1, 2), (2, 3)], [0, 1, 1, 0], '"v_min" is for a chain of stages, and stage 1 is not fed by stage 0'),
        (chain(4), [0, 1, 0, 1], '"v_min" is for two stages a rank, there and back, and the 4 stages are on ranks'),
    ],
    ids=["no chain", "not folded"],
)
def test_other_graphs_and_placements_are_refused(edges: list[tuple[int, int]], placement: list[int], fact: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(fact)):
        build("v_min", edges, 4, placement)


@pytest.mark.parametrize("family", ["v_min", "zb_v"])
def test_compile_names_the_placement_that_it_takes(family: ScheduleName) -> None:
    def compiled(placement: dict[str, Any] | None) -> fxpipe.ForwardBackward:
        return fxpipe.compile(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
            fxpipe.Topology([("pipe", 2)]),
            boundaries=["1", "2", "3"],
            microbatches=4,
            loss_fn=nn.functional.mse_loss,
            schedule=family,
            placement=placement,
        )

    with pytest.raises(ScheduleError, match="write placement=") as refused:
        compiled({"0": 0, "1": 0, "2": 1, "3": 1})
    scope: dict[str, Any] = {}
    exec(str(refused.value).partition("write ")[2], scope)
    assert scope["placement"] == {"0": 0, "1": 1, "2": 1, "3": 0}
    assert [compiled(each).schedule.placement for each in (scope["placement"], None)] == [(0, 1, 1, 0)] * 2


@pytest.mark.parametrize("family", ["v_min", "zb_v"])
@pytest.mark.parametrize("boundaries", ["auto", ["1", "2", "3"]], ids=["auto", "named"])
def test_with_an_example_the_fold_is_found(family: ScheduleName, boundaries: Any) -> None:
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    preview = fxpipe.preview(
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))),
        fxpipe.Topology([("pipe", 2)]),
        boundaries=boundaries,
        microbatches=4,
        loss_fn=nn.functional.mse_loss,
        schedule=family,
        example_args=(x,),
        example_kwargs={"target": y},
    )
    assert preview.schedule.placement == (0, 1, 1, 0)
