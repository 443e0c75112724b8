"""In flight: what stages hold of micro-batches, in number and in bytes."""

from __future__ import annotations

from fxpipe.schedules.action import Action
from fxpipe.schedules.schedule import Schedule
from tests.graphs import JOINED, RECOMPUTED, bare, chain, halves, joined


def test_a_micro_batch_is_in_flight_until_its_weight_gradients_are_made() -> None:
    assert halves(["0F0 0I0 0F1 0I1 0W0 0W1"]).simulate().peak_in_flight == (2,)
    assert halves(["0F0 0I0 0W0 0F1 0I1 0W1"]).simulate().peak_in_flight == (1,)


def test_the_bytes_of_a_rank_are_those_of_all_its_stages_at_once() -> None:
    """Rank 0 holds stage 0's of two micro-batches when stage 2's of the first one comes: never all of both."""
    rows = ["0F0 0F1 2F0 2B0 0B0 2F1 2B1 0B1", "1F0 1F1 1B0 1B1"]
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    schedule = Schedule(parsed, chain(3), (0, 1, 0), (True,) * 3, 2)
    schedule.verify()
    assert schedule.simulate(activation_bytes=[100, 30, 7]).peak_bytes == (100 + 100 + 7, 30 + 30)
    assert schedule.simulate(activation_bytes=5).peak_bytes == (15, 10)
    assert schedule.simulate().peak_bytes is None


def test_bytes_are_held_until_the_weight_gradient_and_not_at_all_without_a_backward() -> None:
    late = halves(["0F0 0I0 0F1 0I1 0W0 0W1"])
    assert late.simulate(activation_bytes=8).peak_bytes == (16,)
    frozen = bare(chain(2), 2, (0, 0), frozen=frozenset([0])).build("1f1b", 4)
    assert frozen.simulate(activation_bytes=[1000, 3]).peak_bytes == (3,)


def test_a_group_counts_as_all_of_its_micro_batches() -> None:
    timeline = joined(JOINED).simulate(activation_bytes=10)
    assert timeline.peak_in_flight == (4, 4, 4, 4, 4)
    assert timeline.peak_bytes == (40, 40, 40, 40, 40)


def test_a_recomputed_stage_holds_a_micro_batch_from_its_r_on() -> None:
    assert joined(RECOMPUTED).simulate().peak_in_flight == (1, 1, 4, 4, 4)
