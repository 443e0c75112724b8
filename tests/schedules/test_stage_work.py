"""How the work of a table divides over stages and ranks, by formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.graph.stage_work import in_ms
from fxpipe.schedules import Costs, build
from fxpipe.schedules.stage_work import stage_work_of

SECONDS = replace(Costs.of(4, forward=[3, 1, 2, 0.02], backward=[6, 2, 4, 0.04]), source="costs measured")
"""Stage s takes 3 F of a micro-batch."""


def test_a_stage_has_its_share_of_its_rank_and_a_rank_its_share_of_all() -> None:
    """Stages of 9, 3, 6 and 0.06 a micro-batch; the first two are on rank 0, the others have one each."""
    schedule = build("1f1b", [(0, 1), (1, 2), (2, 3)], 4, placement=[0, 0, 1, 2])
    work = stage_work_of(schedule, SECONDS)
    assert work is not None
    assert work.shares == pytest.approx((9 / 12, 3 / 12, 1, 1))
    assert work.ranks == pytest.approx((12 / 18.06, 6 / 18.06, 0.06 / 18.06))
    assert work.idle == ("rank 2 has 0% of the work",)


def test_a_stage_on_several_ranks_shares_the_work_of_all_of_them() -> None:
    schedule = build("1f1b", [(0, 1), (1, 2), (2, 3)], 4, placement=[(0, 1, 2), 0, 1, 2])
    work = stage_work_of(schedule, SECONDS)
    assert work is not None
    assert work.shares[0] == pytest.approx(4 * 9 / (4 * 18.06))
    assert sum(work.ranks) == pytest.approx(1)


def test_a_forward_that_runs_again_is_work_of_its_stage() -> None:
    schedule = build("1f1b", [(0, 1)], 4, placement=[0, 0], recompute=[True, False])
    work = stage_work_of(schedule, replace(Costs.of(2), source="costs measured"))
    assert work is not None
    assert work.shares == pytest.approx((4 / 7, 3 / 7))  # 2 F + B beside F + B


def test_stages_without_backward_have_no_time_for_it() -> None:
    schedule = build("1f1b", [(0, 1)], 4, backward=[False, True])
    work = stage_work_of(schedule, replace(Costs.of(2), source="costs measured"))
    assert work is not None
    assert work.backward == (None, 2.0)
    assert work.ranks == pytest.approx((1 / 4, 3 / 4))


def test_costs_of_an_unknown_unit_are_no_seconds() -> None:
    assert stage_work_of(build("1f1b", [(0, 1)], 4), Costs.of(2)) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.0047519, "4.75"), (0.1234, "123"), (1.23456, "1,230"), (4e-6, "0.004")]
)
def test_milliseconds_have_three_digits(seconds: float | None, text: str) -> None:
    assert in_ms(seconds) == text
