"""Offload: activations that wait in the host's memory, as cells O and P of a table: its times, bytes and errors."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import Cause
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import GATHERED
from fxpipe.schedules.families.offload import least_rooms, within_rooms
from fxpipe.schedules.in_flight import peak_bytes, peak_host_bytes
from fxpipe.schedules.kinds import Kind, Lane
from fxpipe.schedules.lower import Compute, Receive
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, WORKED, chain, random_bare

LAST = "1F0 1B0 1F1 1B1 1F2 1B2"


def two(first: str, last: str = LAST, backward: tuple[bool, bool] = (True, True)) -> Schedule:
    """A chain of two stages, each on a rank, with three micro-batches."""
    rows = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in (first, last))
    return Schedule(rows, edges=((0, 1),), placement=(0, 1), backward=backward, microbatches=3)


GOOD = two("0F0 0F1 0O0 0F2 0P0 0B0 0B1 0B2")


def balanced(name: str, stages: int, microbatches: int, copy: float, **options: Any) -> Schedule:
    """A chain whose ranks take F = 1 and B = 2, and hold 1 byte of a micro-batch; all stages may be offloaded."""
    placement = options.get("placement")
    share = 1.0 if placement is None else (1 + max(placement)) / stages
    costs = Costs.of(stages, share, 2 * share, activation_bytes=share, copy=copy * share)
    options = {"edges": chain(stages), "stages": stages, "costs": costs, "offload": [True] * stages, **options}
    return build(name, microbatches=microbatches, **options)  # type: ignore[arg-type]


def test_a_copy_starts_behind_its_forward_and_its_offload_and_backward_wait_for_it() -> None:
    """Rank 0: F0 0-1, and its copy of 1.5; F1 1-2; O0 at 2.5; F2 2.5-3.5; P0 at 3.5, and its copy until 5; B0 5-7."""
    timeline = GOOD.simulate(Costs.of(2, 1, 2, copy=1.5))
    times = {str(action): (span.start, span.end) for action, span in timeline.spans.items()}
    assert [times[cell] for cell in ("0O0", "0F2", "0P0", "0B0")] == [(2.5, 2.5), (2.5, 3.5), (3.5, 3.5), (5, 7)]
    assert timeline.waited(Action.parse("0O0")) == 0.5
    assert timeline.cause(Action.parse("0B0")) == Cause(Action.parse("0P0"), crosses=False)
    copies = [(str(copy.action), copy.lane, copy.start, copy.end) for copy in timeline.copies]
    assert copies == [("0F0", Lane.OUT, 1, 2.5), ("0P0", Lane.BACK, 3.5, 5)]


@pytest.mark.parametrize("duplex", [True, False])
def test_a_lane_runs_one_copy_after_the_other(duplex: bool) -> None:
    """Two copies to the host, of 3 each, from 1 and from 2 on: until 4, and until 7. The copy back begins at 4."""
    table = two("0F0 0F1 0F2 0O0 0P0 0O1 0B0 0P1 0B1 0B2")
    timeline = table.simulate(Costs.of(2, 1, 2, copy=3, duplex=duplex))
    ends = {str(copy.action): (copy.start, copy.end) for copy in timeline.copies}
    assert (ends["0F0"], ends["0F1"]) == ((1, 4), (4, 7))
    assert ends["0P0"] == ((4, 7) if duplex else (7, 10))


def test_bytes_leave_with_o_and_are_taken_again_with_p() -> None:
    costs = Costs.of(2, activation_bytes=[10, 1], kept_bytes=[2, 0])
    # F0 10, F1 20, O0 12, F2 22, P0 30: the most.
    assert GOOD.simulate(costs).peak_bytes == (30, 1)
    assert two("0F0 0F1 0O0 0F2 0B1 0P0 0B0 0B2", "1F0 1F1 1F2 1B1 1B0 1B2").simulate(costs).peak_bytes == (22, 3)
    assert GOOD.simulate().peak_in_flight == (3, 1)


WRONG = {
    "0F0 0F1 0P0 0F2 0O0 0B0 0B1 0B2": "deadlocks: rank 0 waits at 0P0 for 0O0",
    "0O0 0F0 0F1 0F2 0P0 0B0 0B1 0B2": "deadlocks: rank 0 waits at 0O0 for 0F0",
    "0F0 0F1 0O0 0F2 0B0 0P0 0B1 0B2": "deadlocks: rank 0 waits at 0B0 for 0P0",
    "0F0 0F1 0O0 0F2 0B0 0B1 0B2": "0F0 0B0 0O0 0P0, or .* the table has 0F0 0B0 0O0",
    "0F0 0F1 0P0 0F2 0B0 0B1 0B2": "the table has 0F0 0B0 0P0",
    "0F0 0F1 0O0 0O0 0F2 0P0 0B0 0B1 0B2": "0O0 stands 2 times",
    "0F0 0F1 0O0 0F2 0P0 0R0 0B0 0R1 0B1 0R2 0B2": "needs 0F0 0R0 0B0.*; the table has 0F0 0R0 0B0 0O0 0P0",
}


@pytest.mark.parametrize("row", WRONG)
def test_a_wrong_table_is_refused_with_its_cell(row: str) -> None:
    with pytest.raises(ScheduleError, match=WRONG[row]):
        two(row).verify()


def test_a_stage_without_backward_has_nothing_to_offload() -> None:
    with pytest.raises(ScheduleError, match=r"stage 0 has no backward, and needs 0F0 on rank 0; the table has 0F0 0O0"):
        two("0F0 0O0 0P0 0F1 0F2", backward=(False, True)).verify()
    schedule = build("1f1b", [(0, 1)], 4, backward=[False, True], offload=[True, True])
    assert not any(action.kind.lane for row in schedule.rows for action in row)  # a B follows each F of stage 1


def test_files_and_pictures_have_both_cells(tmp_path: Path) -> None:
    GOOD.verify()
    GOOD.to_csv(tmp_path / "table.csv")
    GOOD.to_csv(tmp_path / "messages.csv", communication=True)
    for name in ("table", "messages"):
        assert Schedule.from_csv(tmp_path / f"{name}.csv", edges=((0, 1),)).rows == GOOD.rows
    assert "0O0" in str(GOOD)
    assert "0P0" in str(GOOD)
    for write, name in ((GOOD.to_svg, "svg"), (GOOD.to_html, "html"), (GOOD.to_trace, "json")):
        write(tmp_path / name)
        text = (tmp_path / name).read_text()
        assert "offload" in text
        assert "prefetch" in text
        assert "0F0 to the host" in text
        assert "0F0 from the host" in text


def test_a_receive_is_posted_one_computing_action_ahead() -> None:
    """A copy's cell takes no time, so that a receive posted just before it would be an action late."""
    instructions = GOOD.instructions[0]
    for microbatch in range(3):
        posted = next(
            i
            for i, step in enumerate(instructions)
            if isinstance(step, Receive) and step.message.microbatch == microbatch
        )
        cells = [str(step.action) for step in instructions[posted:] if isinstance(step, Compute)]
        computing = [cell for cell in cells if "O" not in cell and "P" not in cell]
        assert computing[1] == f"0B{microbatch}"


ROUND = [stage % 4 for stage in range(8)]
FOLDED = [0, 1, 2, 3, 3, 2, 1, 0]
ROOMS = {
    # d is a copy's time, in F: 1F1B takes (m + p − 1)(F + B) = 57, and holds 2 for d ≤ F, 3 for d = 2 F.
    "1f1b, d 1": (("1f1b", 4, 16, 1), None, 57, (2, 2, 2, 1)),
    "1f1b, d 1/4": (("1f1b", 4, 16, 0.25), None, 57, (2, 2, 2, 1)),
    "1f1b, d 2": (("1f1b", 4, 16, 2), None, 57, (3, 3, 2, 1)),
    "1f1b, d 2, room 2": (("1f1b", 4, 16, 2), 2, 70, (2, 2, 2, 1)),
    "1f1b, d 2.75, room 3": (("1f1b", 4, 16, 2.75), 3, 57.25, (3, 3, 2, 1)),
    "1f1b, d 3, room 3": (("1f1b", 4, 16, 3), 3, 58, (3, 3, 2, 1)),
    "1f1b of 8, d 1": (("1f1b", 8, 32, 1), 2, 117, (2, 2, 2, 2, 2, 2, 2, 1)),
    "1f1b of 8, d 2": (("1f1b", 8, 32, 2), 3, 117, (3, 3, 3, 3, 3, 3, 2, 1)),
    "1f1b of 8, d 2, room 2": (("1f1b", 8, 32, 2), 2, 146, (2, 2, 2, 2, 2, 2, 2, 1)),
    "1f1b of 8, d 3, room 3": (("1f1b", 8, 32, 3), 3, 123, (3, 3, 3, 3, 3, 3, 2, 1)),
    # GPipe holds m − ⌊m F / d⌋ + 1 for d > F.
    "gpipe, d 1": (("gpipe", 4, 16, 1), None, 57, (2, 2, 2, 3)),
    "gpipe, d 2": (("gpipe", 4, 16, 2), None, 57, (9, 9, 10, 10)),
    "gpipe, d 3": (("gpipe", 4, 16, 3), None, 57, (12, 12, 12, 13)),
    # v stages a rank: 2 / v.
    "interleaved of 2": (("interleaved_1f1b", 8, 16, 1, ROUND), None, 52.5, (1, 1, 1, 1)),
    "interleaved of 4": (("interleaved_1f1b", 32, 32, 1, [s % 8 for s in range(32)]), 0.5, 101.25, (0.5,) * 8),
    "zb_v": (("zb_v", 8, 16, 1, FOLDED), None, 49.5, (1, 1.5, 1.5, 1.5)),
    # W waits, too: see ``test_zero_bubble_holds_three_in_place_of_one_for_each_rank``.
    "zb_h1": (("zb_h1", 4, 16, 1), None, 51, (2, 3, 3, 3)),
    "zb_h1, d 1/4": (("zb_h1", 4, 16, 0.25), None, 51, (2, 3, 3, 3)),
    "zb_h1, no time": (("zb_h1", 4, 16, 0), None, 51, (1, 1, 1, 1)),
    "zb_h1, d 3/2": (("zb_h1", 4, 16, 1.5), None, 51, (3, 4, 4, 4)),
    "zb_h1 of 8": (("zb_h1", 8, 32, 1), None, 103, (2, 3, 3, 3, 3, 3, 3, 3)),
}


@pytest.mark.parametrize("case", ROOMS)
def test_ranks_hold_the_least_bytes_and_take_no_longer(case: str) -> None:
    (name, stages, microbatches, copy, *placement), room, makespan, peaks = ROOMS[case]
    options = {"placement": placement[0]} if placement else {}
    plan = balanced(name, stages, microbatches, copy, memory=room, **options).planned()
    assert (plan.makespan, plan.peak_bytes) == (makespan, peaks)


def test_zero_bubble_holds_three_in_place_of_one_for_each_rank() -> None:
    """ZB-H1 of p ranks takes m (F + I + W) + (p − 1)(F + I − W), and holds p. For d ≤ F = I = W, offload leaves 2 on
    the first rank, where W follows I at once, and min(p, 3) on the others.

    These are three at least. The last rank ends with I of the last micro-batch k, then W of k − 3, k − 2, and so on,
    without a gap. While W of k − 3 runs, k is on its way out, and k − 2 on its way back. On the ranks between, a
    micro-batch that leaves twice is on the device for 2 d + I from F to I, and for 2 d + W from I to W: 6 units of
    time. A micro-batch comes every 3. So 2 would be the mean, and the peak is more, since the times overlap.
    """
    for ranks in (2, 3, 5):
        m = 4 * ranks
        plan = balanced("zb_h1", ranks, m, 1).planned()
        makespan = 3 * m + ranks - 1
        assert (plan.makespan, plan.peak_bytes) == (makespan, (2, *[min(ranks, 3)] * (ranks - 1)))


SPLIT_LAST = "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"
SPLIT = two("0F0 0F1 0O0 0F2 0P0 0I0 0O0 0I1 0P0 0W0 0I2 0W1 0W2", SPLIT_LAST)


def test_after_i_the_same_letters_are_what_w_needs() -> None:
    """Rank 0, with copies of 1.5 and, of what W needs, half of that: I0 5-6, and its copy until 6.75, so that O0 is
    after I1, 6-7. P0 at 7, and its copy until 7.75; W0 waits for that."""
    SPLIT.verify()
    row = SPLIT.rows[0]
    assert [action.kind for action in row if action.kind.lane] == [Kind.O, Kind.P, Kind.OW, Kind.PW]
    costs = Costs.of(2, 1, 2, activation_bytes=10, deferred_bytes=5, kept_bytes=[2, 0], copy=1.5)
    table = two("0F0 0F1 0O0 0F2 0P0 0I0 0I1 0O0 0P0 0W0 0I2 0W1 0W2", SPLIT_LAST)
    plan = table.simulate(costs)
    first = Action(0, Kind.I, 0)
    spans = {action: (span.start, span.end) for action, span in plan.spans.items() if action.microbatch == 0}
    assert (spans[Action(0, Kind.P, 0)], spans[first]) == ((3.5, 3.5), (5, 6))
    assert (spans[Action(0, Kind.OW, 0)], spans[Action(0, Kind.PW, 0)]) == ((7, 7), (7, 7))
    assert spans[Action(0, Kind.W, 0)] == (7.75, 8.75)
    copies = [(copy.what, copy.start, copy.end) for copy in plan.copies]
    assert copies[2:] == [("0I0 to the host", 6, 6.75), ("0I0 from the host", 7, 7.75)]
    assert plan.cause(Action(0, Kind.W, 0)) == Cause(Action(0, Kind.PW, 0), crosses=False)
    # F0 10, F1 20, O0 12, F2 22, P0 30, I0 25, O0 22: of the 5 that W needs 2 remain.
    assert SPLIT.simulate(costs).peak_bytes == (30, 10)
    assert [costs.held(Action(0, kind, 0)) for kind in (Kind.OW, Kind.PW)] == [-3, 3]
    # On the host F0 has 8 until I0, and then 3 until W0.
    assert peak_host_bytes(SPLIT, costs) == (8, 0)
    assert peak_host_bytes(two("0F0 0F1 0F2 0I0 0O0 0I1 0P0 0W0 0I2 0W1 0W2", SPLIT_LAST), costs) == (3, 0)
    assert SPLIT.simulate().peak_in_flight == (3, 1)


def test_files_and_pictures_tell_by_the_position_which_o_it_is(tmp_path: Path) -> None:
    SPLIT.to_csv(tmp_path / "table.csv")
    SPLIT.to_csv(tmp_path / "messages.csv", communication=True)
    for name in ("table", "messages"):
        assert Schedule.from_csv(tmp_path / f"{name}.csv", edges=((0, 1),)).rows == SPLIT.rows
    assert pickle.loads(pickle.dumps(SPLIT)).rows == SPLIT.rows
    SPLIT.to_svg(tmp_path / "table.svg")
    text = (tmp_path / "table.svg").read_text()
    for words in ("offload for W", "prefetch for W", "0F0 to the host", "0I0 to the host", "0I0 from the host"):
        assert words in text


WRONG_SPLIT = {
    "0F0 0F1 0F2 0I0 0P0 0O0 0W0 0I1 0W1 0I2 0W2": "deadlocks: rank 0 waits at 0P0 for 0O0",
    "0F0 0F1 0F2 0I0 0O0 0W0 0P0 0I1 0W1 0I2 0W2": "deadlocks: rank 0 waits at 0W0 for 0P0",
    "0F0 0F1 0F2 0I0 0W0 0O0 0P0 0I1 0W1 0I2 0W2": "deadlocks: rank 0 waits at 0W0 for 0P0",
    "0F0 0F1 0F2 0I0 0O0 0W0 0I1 0W1 0I2 0W2": (
        "or 0F0 0O0 0P0 0I0 0W0, or 0F0 0I0 0O0 0P0 0W0, .*; the table has 0F0 0I0 0O0 0W0\n"
    ),
    "0F0 0F1 0F2 0I0 0P0 0W0 0I1 0W1 0I2 0W2": "the table has 0F0 0I0 0P0 0W0\n",
    "0F0 0O0 0F1 0F2 0I0 0P0 0W0 0I1 0W1 0I2 0W2": "the table has 0F0 0O0 0I0 0P0 0W0\n",
    "0F0 0F1 0F2 0I0 0O0 0O0 0P0 0W0 0I1 0W1 0I2 0W2": "0O0 stands 2 times",
    "0F0 0F1 0F2 0R0 0I0 0O0 0P0 0W0 0R1 0I1 0W1 0R2 0I2 0W2": "needs .*; the table has 0F0 0R0 0I0 0O0 0P0 0W0\n",
}


@pytest.mark.parametrize("row", WRONG_SPLIT)
def test_a_wrong_table_with_o_after_i_is_refused_with_its_cell(row: str) -> None:
    with pytest.raises(ScheduleError, match=WRONG_SPLIT[row]):
        two(row, SPLIT_LAST).verify()


def test_between_i_and_w_nothing_is_copied_that_gains_nothing() -> None:
    """The first rank's W follows I at once, the second holds 3 without; and where all fits, nothing leaves."""
    first, *others = balanced("zb_h1", 4, 16, 1).rows
    assert not any(action.kind is Kind.OW for action in first)
    assert [any(action.kind is Kind.OW for action in row) for row in others] == [False, True, True]
    assert balanced("zb_h1", 4, 16, 1, memory=4).rows == build("zb_h1", chain(4), 16).rows


def test_the_towers_of_a_loss_over_the_whole_batch_hold_two_where_recomputation_takes_longer() -> None:
    """CLIP: the loss runs once for 16 micro-batches. GradCache's recomputation takes 69 and holds 2.5."""
    costs = Costs.of(5, activation_bytes=10, input_bytes=1, copy=1)
    towers: Any = {"edges": WORKED, "microbatches": 16, "costs": costs, "gather": {4: None}, "gather_cost": (1, 2)}
    offloaded = build("store_all", **towers, offload=[True] * 5).planned()
    again = build("cached", **towers).planned()
    assert (offloaded.makespan, offloaded.peak_bytes) == (54, (20, 20, 20, 20, 160))
    assert (again.makespan, again.peak_bytes) == (69, (25, 25, 25, 25, 160))


def test_what_fits_is_never_copied() -> None:
    assert balanced("1f1b", 4, 16, 1, memory=4).rows == build("1f1b", chain(4), 16).rows


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"even with offload= .* rank 0 0\.5 of 4, rank 1 0\.5 of 3"):
        balanced("1f1b", 4, 16, 1, memory=0.5)
    with pytest.raises(ScheduleError, match="stage 1 is in recompute= and in offload="):
        balanced("1f1b", 4, 16, 1, recompute=[False, True, False, False])
    with pytest.raises(ScheduleError, match="offload= has 3 entries for 4 stages"):
        balanced("1f1b", 4, 16, 1, offload=[True] * 3)


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.long] * (part > 0)) for part in range(5)])
def test_random_graphs_fit_their_room_and_do_not_deadlock(part: int) -> None:
    refused = 0
    for seed in range(200 * part, 200 * (part + 1)):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 3 == 0)
        name = draw.choice([*FAMILIES, "store_all", "group_interleaved"])
        costs = Costs.of(
            graph.stages,
            [draw.choice([0, 1, 1, 3]) for _ in range(graph.stages)],
            [draw.choice([0, 2, 2, 5]) for _ in range(graph.stages)],
            activation_bytes=[draw.choice([0, 1, 2]) for _ in range(graph.stages)],
            kept_bytes=0,
            copy=[draw.choice([0, 0.5, 2]) for _ in range(graph.stages)],
            duplex=draw.random() < 0.5,
        )
        gather = (
            {stage: None for stage in range(graph.stages) if not graph.targets(stage)} if name in GATHERED else None
        )
        options: Any = {"backward": graph.backward, "costs": costs, "gather": gather}
        m = draw.choice([1, 3, 6])
        plain = build(name, graph.edges, m, graph.placement, **options).planned()  # type: ignore[arg-type]
        room = [draw.uniform(0.4, 1) * peak + 1e-3 for peak in plain.peak_bytes or ()]
        marks = [draw.random() < 0.8 for _ in range(graph.stages)]
        try:
            schedule = build(name, graph.edges, m, graph.placement, memory=room, offload=marks, **options)  # type: ignore[arg-type]
        except ScheduleError as error:
            refused += "offload=" in str(error)
            continue
        schedule.verify()
        plan = schedule.planned()
        assert plan.makespan >= plain.makespan - 1e-9, seed
        assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(_peaks(schedule, costs), room, strict=True)), seed
        if any(map(all, zip(marks, graph.backward, strict=True))):  # else the family itself keeps within the memory
            others = [[action for action in row if action.kind.lane is None] for row in schedule.rows]
            assert tuple(map(tuple, others)) == plain.schedule.rows
    assert refused < 150


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.long] * (part > 0)) for part in range(5)])
def test_the_least_room_of_a_table_is_enough_and_nothing_leaves_twice(part: int) -> None:
    for seed in range(80 * part, 80 * (part + 1)):
        draw = random.Random(seed)
        graph, name = random_bare(seed), draw.choice(["1f1b", "gpipe", "interleaved_1f1b", "zb_h1"])
        costs = Costs.of(
            graph.stages,
            [draw.choice([0, 1, 1, 3]) for _ in range(graph.stages)],
            [draw.choice([0, 2, 2, 5]) for _ in range(graph.stages)],
            activation_bytes=[draw.choice([1, 2, 3]) for _ in range(graph.stages)],
            deferred_bytes=draw.choice([None, 0.25, 1]),
            copy=[draw.choice([0, 0.5, 2]) for _ in range(graph.stages)],
            kept_bytes=draw.choice([0, 0.5]),
        )
        table = build(name, graph.edges, draw.choice([3, 6]), graph.placement, backward=graph.backward, costs=costs)  # type: ignore[arg-type]
        stages = [stage for stage in range(graph.stages) if draw.random() < 0.8]
        least = least_rooms(table, costs, stages)
        for factor in (1, 1.3):
            rooms = [factor * room + 1e-9 for room in least]
            fitting = within_rooms(table, costs, stages, rooms)
            assert fitting is not None, seed
            fitting.verify()
            assert all(peak <= room for peak, room in zip(peak_bytes(fitting, costs), rooms, strict=True)), seed


def _peaks(schedule: Schedule, costs: Costs) -> list[float]:
    """The bytes that each rank holds, counted from the letters alone."""
    peaks = []
    for row in schedule.rows:
        here: dict[tuple[int, int], float] = {}
        peak = 0.0
        for stage, kind, microbatch, count in row:
            whole = count * (costs.activation_bytes or ())[stage] * schedule.backward[stage]
            if kind.letter in "FP":
                here[stage, microbatch] = whole
            peak = max(peak, sum(here.values()))
            if kind.letter in "OBW":
                here.pop((stage, microbatch), None)
        peaks.append(peak)
    return peaks
