"""Closed forms: what the papers say of each schedule on a balanced chain, held exactly. Costs are whole numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fxpipe.schedules import ScheduleName, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule, Timeline
from tests.graphs import WORKED, Pairs, branches, chain
from tests.thinned import ALL, every

PIPELINES = range(2, 17) if ALL else (2, 3, 4, 7, 8, 16)
"""p: how many ranks."""


def microbatch_counts(p: int) -> range:
    """From p to 4p."""
    return every(max(1, p // 2), range(p, 4 * p + 1))


def idle(timeline: Timeline) -> set[float]:
    """What each rank idles; one number where all idle alike."""
    return {timeline.makespan - busy for busy in timeline.busy}


def bubble(timeline: Timeline) -> Fraction:
    """The idle part of all ranks' time, from whole numbers."""
    makespan, ranks = Fraction(timeline.makespan), len(timeline.busy)
    return 1 - sum(map(Fraction, timeline.busy)) / (ranks * makespan)


def most_in_flight(schedule: Schedule) -> list[int]:
    """Per rank, the most micro-batches that all its stages together hold, each stage's counted."""
    peaks = []
    for row in schedule.rows:
        held = peak = 0
        for action in row:
            held += {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


# --- a stage a rank ---


@pytest.mark.parametrize("p", PIPELINES)
def test_gpipe_idles_p_minus_1_of_m_plus_p_minus_1_and_holds_all_micro_batches(p: int) -> None:
    for m in microbatch_counts(p):
        for forward, backward in ((1, 2), (3, 1)):
            timeline = build("gpipe", chain(p), m).simulate(forward, backward)
            assert bubble(timeline) == Fraction(p - 1, m + p - 1)
            assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
            assert timeline.makespan == (m + p - 1) * (forward + backward)
            assert timeline.peak_in_flight == (m,) * p


@pytest.mark.parametrize("p", PIPELINES)
def test_1f1b_idles_as_long_as_gpipe_and_holds_no_more_than_the_stages_left(p: int) -> None:
    for m in microbatch_counts(p):
        for forward, backward in ((1, 2), (3, 1)):
            timeline = build("1f1b", chain(p), m).simulate(forward, backward)
            assert bubble(timeline) == Fraction(p - 1, m + p - 1)
            assert timeline.makespan == (m + p - 1) * (forward + backward)
            assert timeline.peak_in_flight == tuple(min(m, p - s) for s in range(p))


@pytest.mark.parametrize("p", PIPELINES)
def test_zb_h1_idles_p_minus_1_times_f_plus_i_minus_w_and_holds_p_everywhere(p: int) -> None:
    """Qi et al. 2023, table 2: (p − 1)(T_F + T_B − T_W), their B being our I."""
    for m in microbatch_counts(p):
        schedule = build("zb_h1", chain(p), m)
        for f, i, w in ((1, 1, 1), (2, 3, 0), (2, 3, 1), (2, 3, 2), (5, 4, 4), (7, 3, 2)):
            timeline = schedule.simulate(forward=f, backward=i + w, weight=w)
            assert timeline.makespan - m * (f + i + w) == (p - 1) * (f + i - w)
            assert idle(timeline) == {(p - 1) * (f + i - w)}
            assert timeline.peak_in_flight == (p,) * p


@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 7])
def test_with_fewer_micro_batches_than_stages_the_peaks_end_at_m(p: int, m: int) -> None:
    assert build("1f1b", chain(p), m).simulate().peak_in_flight == tuple(min(m, p - s) for s in range(p))
    assert build("zb_h1", chain(p), m).simulate().peak_in_flight == (min(m, p),) * p


# --- several stages a rank ---


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p", PIPELINES)
def test_interleaved_1f1b_idles_a_vth_of_what_1f1b_does_and_warms_up_as_megatron_does(p: int, v: int) -> None:
    placement = [stage % p for stage in range(p * v)]
    for m in range(p, 4 * p + 1, p):
        schedule = build("interleaved_1f1b", chain(p * v), m, placement)
        warm_up = [2 * (p - r - 1) + (v - 1) * p for r in range(p)]
        peaks = [min(m * v, most + 1) for most in warm_up]
        assert most_in_flight(schedule) == peaks
        usual = build("1f1b", chain(p), m)
        for forward, backward in ((1, 2), (1, 1), (3, 2)):
            timeline = schedule.simulate(forward, backward, activation_bytes=1)
            assert idle(timeline) == {(p - 1) * (forward + backward)}
            whole = usual.simulate(v * forward, v * backward)
            assert idle(whole) == {v * (p - 1) * (forward + backward)}
            assert timeline.peak_bytes == tuple(peaks)


@pytest.mark.parametrize(("p", "v", "most"), [(4, 2, 19), (8, 4, 18), (3, 3, 11)])
def test_interleaved_families_reach_the_bound_for_every_number_of_micro_batches(p: int, v: int, most: int) -> None:
    """mv(F + B) + (p − 1)(F + B), also where p does not divide m; torch's interleaved 1F1B at (8, 4, 9): 129."""
    placement = [stage % p for stage in range(p * v)]
    for m in range(p, most):
        whole, halves = (build(name, chain(p * v), m, placement).simulate() for name in ("interleaved_1f1b", "zb_h1"))
        assert (whole.makespan, halves.makespan) == (3 * (m * v + p - 1), 3 * m * v + p - 1)
        # Equal groups have ⌈m / ⌊m / p⌋⌉ micro-batches at most, groups of Megatron's order p.
        group = p if m % p == 0 else -(-m // (m // p))
        peaks = most_in_flight(whole.schedule)
        assert all(peak <= min(m * v, 2 * (p - r - 1) + (v - 1) * group + 1) for r, peak in enumerate(peaks))


def test_interleaved_1f1b_takes_the_longer_table_where_the_shorter_holds_too_much() -> None:
    """Equal groups of 5 hold 12 chunks on the first of 4 ranks, groups of 4, 4 and 2 hold 11."""
    costs, placement = Costs.of(8, activation_bytes=1), [stage % 4 for stage in range(8)]
    tables = [build("interleaved_1f1b", chain(8), 10, placement, costs=costs, memory=room) for room in (12, 11)]
    assert [table.simulate().makespan for table in tables] == [69, 79]


def test_interleaved_1f1b_with_a_stage_a_rank_is_1f1b() -> None:
    for edges in (chain(4), WORKED, branches(3, 2)):
        assert build("interleaved_1f1b", edges, 6).rows == build("1f1b", edges, 6).rows


# --- the worked example: A1 → A2 → J ← B2 ← B1, five stages that are three deep ---


def test_the_worked_example_takes_36_as_a_chain_30_as_a_graph_and_26_with_zb_h1() -> None:
    as_chain, as_graph = (build("1f1b", edges, 8).simulate(forward=1, backward=2) for edges in (chain(5), WORKED))
    split = build("zb_h1", WORKED, 8).simulate(forward=1, backward=2, weight=1)
    assert (as_chain.makespan, as_chain.peak_in_flight) == (36, (5, 4, 3, 2, 1))
    assert (as_graph.makespan, as_graph.peak_in_flight) == (30, (3, 2, 3, 2, 1))
    assert (split.makespan, split.peak_in_flight) == (26, (3, 3, 3, 3, 3))
    assert as_graph.makespan == as_graph.lower_bound


@pytest.mark.parametrize(("count", "length", "makespan"), [(4, 3, 33), (8, 2, 30)])
def test_branches_that_join_take_as_long_as_one_of_them(count: int, length: int, makespan: int) -> None:
    timeline = build("1f1b", branches(count, length), 8).simulate(forward=1, backward=2)
    assert timeline.makespan == timeline.lower_bound == makespan == (8 + length) * 3


# --- tables drawn by hand ---

CHAIN_OF_3 = """
    0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
     .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
     .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .
"""

WORKED_EXAMPLE = """
    0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
     .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
    2F0 2F1 2F2  .   .  2B0 2F3 2B1  .  2B2  .  2B3
     .  3F0 3F1  .  3B0 3F2 3B1 3F3 3B2  .  3B3  .
     .   .  4F0 4B0 4F1 4B1 4F2 4B2 4F3 4B3  .   .
"""

GPIPE_CHAIN_OF_3 = """
    0F0 0F1 0F2  .   .   .   .  0B0 0B1 0B2
     .  1F0 1F1 1F2  .   .  1B0 1B1 1B2  .
     .   .  2F0 2F1 2F2 2B0 2B1 2B2  .   .
"""

INTERLEAVED = """
    0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
     .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .
"""
"""Megatron's order for p = 2, v = 2, m = 4: warm-ups of 4 and 2 forwards, groups of two micro-batches."""

ZB_H1 = """
    0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
     .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
     .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
"""
"""Qi et al. 2023, figure 3, for p = 3: the last stage is two weight gradients behind, the middle one is one."""


@pytest.mark.parametrize(
    ("name", "edges", "m", "placement", "picture"),
    [
        ("1f1b", chain(3), 4, None, CHAIN_OF_3),
        ("1f1b", WORKED, 4, None, WORKED_EXAMPLE),
        ("gpipe", chain(3), 3, None, GPIPE_CHAIN_OF_3),
        ("interleaved_1f1b", chain(4), 4, [0, 1, 0, 1], INTERLEAVED),
        ("zb_h1", chain(3), 4, None, ZB_H1),
    ],
    ids=["1f1b on a chain", "1f1b on the worked example", "gpipe", "interleaved_1f1b", "zb_h1"],
)
def test_the_table_is_the_one_that_is_known(
    name: str, edges: Pairs, m: int, placement: list[int] | None, picture: str
) -> None:
    """In the picture a column is a unit of time, which every action takes."""
    schedule = build(name, edges, m, placement)
    drawn = [line.split() for line in picture.strip().splitlines()]
    spans = schedule.simulate(forward=1, backward=2 if name == "zb_h1" else 1).spans
    assert [[str(action) for action in row] for row in schedule.rows] == [[c for c in row if c != "."] for row in drawn]
    assert {str(action): span.start for action, span in spans.items()} == {
        cell: column for row in drawn for column, cell in enumerate(row) if cell != "."
    }


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "greedy"])
@pytest.mark.parametrize("m", [8, 40])
def test_a_frozen_tower_costs_its_first_forward_and_is_at_most_two_messages_ahead(name: ScheduleName, m: int) -> None:
    """CLIP with an image tower of four stages, text and loss: trained it is five deep and takes (m + D − 1)(F + B);
    frozen, its first micro-batch passes at F a stage, the loss takes m(F + B), and text has the last B. With two
    values that are not received, one that is received an action ahead, and one that its reader runs, each takes turns
    with the next, however many micro-batches there are."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 5), (4, 5)]
    trained = build(name, edges, m).simulate()
    frozen = build(name, edges, m, backward=[False] * 4 + [True] * 2).simulate()
    assert trained.makespan == (m + 5 - 1) * 3
    assert frozen.makespan == 4 + m * 3 + 2
    for stage, reader in ((0, 1), (1, 2), (2, 3), (3, 5)):
        for j in range(m):
            start = frozen.spans[Action(stage, Kind.F, j)].start
            ended = sum(frozen.spans[Action(reader, Kind.F, k)].end <= start for k in range(m))
            assert j + 1 - ended <= 2 + 2
