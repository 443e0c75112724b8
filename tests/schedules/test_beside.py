"""Stages on several ranks: where their actions stand, what the tables take, and that none hangs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fxpipe import ScheduleError, compare
from fxpipe.schedules import SCHEDULES, Costs, Problem, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.families.limits import ScheduleName
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule
from tests.graphs import Bare, random_bare, values_of
from tests.schedules.network import network
from tests.thinned import seeds

NAMES: Sequence[ScheduleName] = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "greedy"]
RANKS = 8

FASTEST = {  # m → the makespans of an encoder of F = v and B = 2v on all ranks, trained and frozen, for v = 1, 2, 4
    8: ((48, 51, 57), (46, 47, 49)),
    16: ((72, 79, 91), (70, 71, 75)),
    32: ((123, 134, 154), (118, 119, 127)),
}


def beside_a_chain(
    microbatches: int, cost: float, trained: bool = True, name: ScheduleName = "1f1b", ranks: int = RANKS
) -> Schedule:
    """An encoder on all ranks, in front of a chain with a stage of F = 1 and B = 2 on each."""
    return build(
        name,
        edges=[(stage, stage + 1) for stage in range(ranks)],
        microbatches=microbatches,
        placement=[tuple(range(ranks)), *range(ranks)],
        backward=[trained] + [True] * ranks,
        costs=Costs.of(ranks + 1, [cost] + [1] * ranks, [2 * cost] + [2] * ranks),
    )


@pytest.mark.parametrize("microbatches", FASTEST)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_an_encoder_on_all_ranks_fills_the_bubble(microbatches: int, trained: bool) -> None:
    for cost, fastest in zip((1, 2, 4), FASTEST[microbatches][not trained], strict=True):
        plan = beside_a_chain(microbatches, cost, trained).planned()
        assert plan.makespan <= 1.01 * fastest
        in_stage_0 = microbatches * (3 + cost * (3 if trained else 1)) + 3 * (RANKS - 1)
        assert plan.makespan < in_stage_0
        # head and tail of a language stage, with m (F + B) between: no table can be shorter
        assert plan.lower_bound >= (cost * (3 if trained else 1)) + 3 * (RANKS - 1) + 3 * microbatches
        assert plan.peak_in_flight[1:] == tuple(range(min(RANKS, microbatches), 0, -1))  # those of 1F1B


def test_the_language_stages_keep_the_order_of_their_family() -> None:
    alone = build("1f1b", edges=[(0, 1), (1, 2), (2, 3)], microbatches=6)
    for name, wanted in (("1f1b", alone.rows), ("gpipe", build("gpipe", alone.edges, 6).rows)):
        beside = beside_a_chain(6, 2, name=name, ranks=4)
        kept = [[str(a._replace(stage=a.stage - 1)) for a in row if a.stage] for row in beside.rows]
        assert kept == [[str(action) for action in row] for row in wanted]


def test_beside_interleaved_stages_it_costs_no_more_than_its_own_first_and_last() -> None:
    """An encoder of F = 1 and B = 2 in front of Megatron's chain of 2 stages a rank, 8 micro-batches on 4 ranks."""
    costs = Costs.of(9, [1] + [0.5] * 8, [2] + [1] * 8)
    placement = [tuple(range(4)), *range(4), *range(4)]
    plan = build("interleaved_1f1b", [(n, n + 1) for n in range(8)], 8, placement, costs=costs).planned()
    alone = build("interleaved_1f1b", [(n, n + 1) for n in range(7)], 8, placement[1:], costs=Costs.of(8, 0.5, 1))
    assert plan.makespan == plan.lower_bound == 3 + alone.planned().makespan


def test_micro_batch_i_is_on_the_i_mod_r_th_rank() -> None:
    schedule = build("1f1b", edges=[(0, 1), (1, 2)], microbatches=5, placement=[(2, 0), 0, (1, 2, 0)])
    for rank, row in enumerate(schedule.rows):
        for stage, _, microbatch, _ in row:
            assert rank == {0: (2, 0), 1: (0,), 2: (1, 2, 0)}[stage][microbatch % (2, 1, 3)[stage]]
    assert schedule.rank(Action(0, Kind.B, 3)) == 0
    assert schedule.placement == ((2, 0), 0, (1, 2, 0))
    heads = [line.split()[:4] for line in str(schedule).splitlines()[2:5]]
    assert [head[0] for head in heads] == ["0", "1", "2"]
    assert [re.findall(r"\d", " ".join(head[1:]))[:2] for head in heads] == [["0", "1"], ["2", "2"], ["0", "2"]]


def test_a_family_of_ones_own_is_refused_there() -> None:
    """It would be asked another problem, and its rows changed."""

    def mine(problem: Problem) -> Sequence[Sequence[Action]]:
        return SCHEDULES["1f1b"](problem)

    options: Any = {"edges": [(0, 1)], "microbatches": 4}
    assert build(mine, **options).rows == build("1f1b", **options).rows
    with pytest.raises(ScheduleError, match=r"mine is a family of your own, .* give a Schedule"):
        build(mine, **options, placement=[(0, 1), (1, 0)])


def on_several(graph: Bare, draw: random.Random) -> list[int | tuple[int, ...]]:
    """The graph's placement, with some stages on up to four ranks."""
    ranks = list(range(1 + max(graph.placement)))
    several = [tuple(draw.sample(ranks, draw.randint(1, min(4, len(ranks))))) for _ in graph.placement]
    return [
        some if draw.random() < 0.5 and place in some else place
        for place, some in zip(graph.placement, several, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_table_with_stages_on_several_ranks_hangs(name: ScheduleName) -> None:
    replicated = 0
    for seed in seeds(80):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 3 == 0)
        placement = on_several(graph, draw)
        costs = [draw.choice([0.5, 1, 3]) for _ in placement]
        m = 1 + seed % 7
        at = Costs.of(len(placement), costs, 2, comm=seed % 2)
        schedule = build(name, graph.edges, m, placement, backward=graph.backward, costs=at)
        assert schedule.simulate().makespan > 0
        replicated += schedule.placement != graph.placement
        for interleaving in range(20 if seed % 20 == 0 else 1):
            assert network(schedule, values_of(graph.edges, seed)).ends(interleaving), (graph, placement)
    assert replicated > len(list(seeds(80))) // 3


def test_a_gathered_stage_takes_turns_by_groups() -> None:
    schedule = build("1f1b", [(0, 1)], 8, placement=[0, (0, 1)], gather={1: 2})
    assert {str(a) for a in schedule.rows[1]} == {"1F2-3", "1B2-3", "1F6-7", "1B6-7"}
    with pytest.raises(ScheduleError, match="stage 1 is gathered, and on 2 ranks, with 1 group of 8 micro-batches"):
        build("1f1b", [(0, 1)], 8, placement=[0, (0, 1)], gather={1: None})


def test_recomputed_stages_and_memory() -> None:
    costs = Costs.of(3, 1, 2, activation_bytes=[5, 1, 1])
    schedule = build("1f1b", [(0, 1), (1, 2)], 8, [(0, 1), 0, 1], costs=costs, memory=8)
    assert max(schedule.planned().peak_bytes or ()) <= 8
    again = build("1f1b", [(0, 1), (1, 2)], 8, [(0, 1), 0, 1], recompute=[True, False, False])
    assert sum(action.kind is Kind.R for row in again.rows for action in row) == 8
    with pytest.raises(ScheduleError, match=r"rank 0 may hold 5 bytes, .* its stages \[0, 1\] takes 6"):
        build("1f1b", [(0, 1), (1, 2)], 8, [(0, 1), 0, 1], costs=costs, memory=5)
    for room in (6, 7, 11, 12, 20):
        greedy = build("greedy", [(0, 1), (1, 2)], 8, [(0, 1), 0, 1], costs=costs, memory=room)
        assert max(greedy.planned().peak_bytes or ()) <= room


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ([(0, 0), 1], r"the placement of stage 0, \[0, 0\], names a rank twice"),
        ([(), 0], r"the placement of stage 0, \[\], names no rank"),
        ([(0, 2), 0], "leaves a rank without stages"),
        ([(0, -1), 0], "leaves a rank without stages"),
        ([("0", 1), 0], "it is a list with the rank, or ranks, of each stage"),
    ],
)
def test_what_is_no_placement_is_refused(placement: list[object], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        build("1f1b", [(0, 1)], 4, placement=placement)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["zb_v", "v_min"])
def test_a_fold_wants_one_rank_for_each_stage(name: ScheduleName) -> None:
    with pytest.raises(ScheduleError, match=f'"{name}" is for two stages a rank'):
        build(name, [(0, 1), (1, 2)], 4, placement=[(0, 1), 1, 0])


def test_a_list_of_one_rank_is_that_rank() -> None:
    assert build("1f1b", [(0, 1)], 4, placement=[[1], [0]]).placement == (1, 0)


def test_csv_finds_the_ranks_of_a_stage_in_its_cells(tmp_path: object) -> None:
    for number, placement in enumerate(([(1, 0, 2), 0, 1, 2], [(0, 1), (1, 2), 2, 0], [0, 1, 2, (2, 0)])):
        schedule = build("1f1b", [(0, 1), (1, 2), (2, 3)], 7, placement)
        for communication in (False, True):
            path = f"{tmp_path}/{number}{communication}.csv"
            schedule.to_csv(path, communication)
            read = Schedule.from_csv(path, schedule.edges)
            read.verify()
            assert (read.rows, read.placement) == (schedule.rows, schedule.placement)


def test_pictures_pages_and_traces_have_its_actions_on_their_ranks(tmp_path: Path) -> None:
    schedule = beside_a_chain(6, 1, ranks=3)
    plan = schedule.planned()
    for name in ("svg", "html", "trace"):
        getattr(plan, f"to_{name}")(tmp_path / name)
    assert "<title>0F2 on rank 2: forward of micro-batch 2 in stage 0; " in (tmp_path / "html").read_text()
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    ran = {event["name"].split()[0]: event["tid"] for event in events if event["ph"] == "X"}
    first = ran["0F0"]
    assert [ran[f"0F{microbatch}"] - first for microbatch in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"][1] == "rank 1 (0, 2)"
    assert "between actions" in str(compare(plan, plan))
