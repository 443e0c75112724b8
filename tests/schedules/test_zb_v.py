"""ZB-V: its closed form, its peak, the graphs and placements that it is not for; torch's table: whole/torch_agrees."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import Costs, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.families.zero_bubble import folded
from fxpipe.schedules.kinds import Kind
from tests.graphs import WORKED, chain


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_a_rank_idles_p_minus_1_forwards_and_holds_as_much_as_1f1b(p: int) -> None:
    """At F = I = W = 1 a rank's stages take 6 for a micro-batch; 1F1B's first rank holds p of stages twice as large."""
    for m in (2 * p - 1, 2 * p, 4 * p + 1):
        plan = build("zb_v", chain(2 * p), m, folded(p)).simulate(1, 2, activation_bytes=1)
        assert plan.makespan == 6 * m + p - 1
        assert max(plan.peak_bytes or ()) == min(2 * p, 2 * m)
        assert plan.makespan < build("zb_h1", chain(p), m).simulate(2, 4).makespan or p == 1


@pytest.mark.parametrize("m", [1, 2, 3])
def test_fewer_micro_batches_than_fill_it_run_too(m: int) -> None:
    plan = build("zb_v", chain(8), m, folded(4)).simulate()
    assert plan.lower_bound <= plan.makespan
    assert sorted(map(str, plan.spans)) == sorted(
        str(Action(stage, op, j)) for stage in range(8) for op in (Kind.F, Kind.I, Kind.W) for j in range(m)
    )


def test_skips_along_the_chain_are_welcome_and_numbers_need_not_be_in_order() -> None:
    unet = build("zb_v", [*chain(4), (0, 3), (1, 2)], 5, folded(2))
    assert unet.rows == build("zb_v", chain(4), 5, folded(2)).rows
    reverse = build("zb_v", [(3, 2), (2, 1), (1, 0)], 5, folded(2))
    assert reverse.simulate().makespan == unet.simulate().makespan


def test_frozen_stages_have_no_backward_and_marked_ones_are_run_again() -> None:
    frozen = build("zb_v", chain(4), 5, folded(2), backward=[False, True, True, True])
    assert {action.kind for action in frozen.rows[0] if action.stage == 0} == {Kind.F}
    again = build("zb_v", chain(4), 5, folded(2), recompute=[True] * 4, costs=Costs.of(4, activation_bytes=4))
    assert again.planned().makespan == again.planned().lower_bound == 5 * 8 + 1


@pytest.mark.parametrize(
    ("edges", "options", "fact"),
    [
        (WORKED, {}, '"zb_v" is for a chain of stages, and stage 2 is not fed by stage 0'),
        ((), {"stages": 2, "placement": [0, 0]}, "stage 1 is not fed by stage 0"),
        (chain(4), {}, "the 4 stages are on ranks [0, 1, 2, 3]; write placement=[0, 1, 1, 0]"),
        (chain(4), {"placement": [0, 1, 0, 1]}, "the 4 stages are on ranks [0, 1, 0, 1]; write placement=[0, 1, 1, 0]"),
        (chain(3), {"placement": [0, 1, 0]}, "the 3 stages are on ranks [0, 1, 0]; make it an even number of stages"),
        ((), {"stages": 1}, "the 1 stages are on ranks [0]; make it an even number of stages"),
        (chain(4), {"placement": [0, 1, 1, 0], "gather": {3: 2}}, "a stage here is gathered"),
    ],
    ids=str,
)
def test_other_graphs_and_placements_are_refused_with_the_reason(edges: Any, options: Any, fact: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(fact)):
        build("zb_v", edges, 4, **options)
