"""Verify: its strict model against a simulator of its own, reductions, and the order for one process."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import ScheduleName, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import Direction, Kind
from fxpipe.schedules.lower import Compute, Instruction, Message, Receive, Reduce, Release, Send, is_forward, lower
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import prove
from tests.graphs import FAMILIES, WORKED, Value, chain, halves, random_bare, values_of
from tests.schedules.network import Network, network, per_directed_pair, per_kind, per_pair
from tests.thinned import seeds

# --- backwards in halves ---

MIXED = {
    "whole before halves": "0F0 0B0\n1F0 1I0 1W0",
    "halves before whole": "0F0 0I0 0W0\n1F0 1B0",
    "one micro-batch in halves": "0F0 0F1 0B0 0I1 0W1\n1F0 1B0 1F1 1I1 1W1",
    "another one at each stage": "0F0 0F1 0I0 0W0 0B1\n1F0 1B0 1F1 1I1 1W1",
}


@pytest.mark.parametrize("rows", MIXED.values(), ids=MIXED.keys())
def test_whole_backwards_and_halves_mix_and_the_one_that_makes_the_gradient_sends_it(rows: str) -> None:
    schedule = halves(rows.splitlines())
    schedule.verify()
    for interleaving in range(5):
        assert network(schedule, [Value(0, 1, 0)]).ends(interleaving)
    *_, sender = (
        step for step in schedule.instructions[1] if isinstance(step, Compute) and step.action.kind is not Kind.W
    )
    place = schedule.instructions[1].index(sender)
    assert isinstance(schedule.instructions[1][place + 1], Send)


# --- whatever the interleaving ---


def without(row: Sequence[Instruction], left_out: set[int]) -> list[Instruction]:
    """A rank's instructions where the micro-batches ``left_out`` have no backward."""
    kept: list[Instruction] = []
    skipping = False
    for step in row:
        if isinstance(step, Compute):
            skipping = step.action.kind is not Kind.F and step.action.microbatch in left_out
            kept += [] if skipping else [step]
        elif isinstance(step, Release) and skipping:
            continue  # the answer that tells of the arrival never comes
        elif (
            isinstance(step, Reduce)
            or step.message.direction is Direction.FORWARD
            or step.message.microbatch not in left_out
        ):
            kept.append(step)
    return kept


@pytest.mark.parametrize("name", FAMILIES)
def test_no_verified_table_hangs_whole_or_in_part_whatever_the_interleaving(name: str) -> None:
    draw = random.Random(0)
    reduced = 0
    for seed in seeds(48):
        graph, m = random_bare(seed, frozen=seed % 3 == 0), 1 + seed % 6
        groups = [tuple(draw.sample(range(graph.stages), draw.randint(1, graph.stages))) for _ in range(seed % 5)]
        schedule, values = replace(graph.build(name, m), tied=tuple(groups)), values_of(graph.edges, seed)
        schedule.verify()
        reduced += any(isinstance(step, Reduce) for row in schedule.instructions for step in row)
        for interleaving in range(3):
            assert network(schedule, values).ends(interleaving), (graph, interleaving)
        forwards, partly = network(schedule, values), network(schedule, values)
        forwards.instructions = [list(filter(is_forward, row)) for row in forwards.instructions]
        left_out = {microbatch for microbatch in range(m) if draw.random() < 0.5}
        partly.instructions = [without(row, left_out) for row in partly.instructions]
        assert forwards.ends(seed)
        assert partly.ends(seed)
    assert reduced > len(seeds(48)) // 4


def shuffled(schedule: Schedule, draw: random.Random) -> Schedule:
    """The same actions, with a few pairs of neighbours exchanged."""
    rows = [list(row) for row in schedule.rows]
    for _ in range(draw.randint(1, 4)):
        row = draw.choice([row for row in rows if len(row) > 1])
        place = draw.randrange(len(row) - 1)
        row[place], row[place + 1] = row[place + 1], row[place]
    return replace(schedule, rows=tuple(map(tuple, rows)))


def test_verify_and_the_simulator_agree_on_which_shuffled_tables_hang() -> None:
    draw = random.Random(0)
    hung = 0
    for seed in range(160):
        graph = random_bare(seed, most=5)
        schedule = shuffled(graph.build("1f1b", 2 + seed % 4), draw)
        ends = [network(schedule, values_of(graph.edges, seed)).ends(interleaving) for interleaving in (0, 1)]
        assert ends[0] == ends[1]
        if ends[0]:
            schedule.verify()
        else:
            hung += 1
            with pytest.raises(ScheduleError, match="the table deadlocks: rank"):
                schedule.verify()
    assert 20 < hung < 140  # both cases were met


@pytest.mark.parametrize("edges", [chain(3), WORKED], ids=["chain", "worked example"])
def test_1f1b_would_hang_with_one_queue_for_both_directions_and_does_not_with_one_for_each(
    edges: tuple[tuple[int, int], ...],
) -> None:
    schedule = build("1f1b", edges, 8)
    values = [Value(*edge, 0) for edge in edges]
    assert network(schedule, values, per_directed_pair).ends(0)
    assert not network(schedule, values, per_pair).ends(0)


def test_queues_for_activations_and_gradients_would_hang_with_several_stages_on_a_rank() -> None:
    graphs = [random_bare(seed) for seed in range(30)]
    tables = [(graph.build("1f1b", 6), values_of(graph.edges, 0)) for graph in graphs]
    assert all(network(*table, per_directed_pair).ends(0) for table in tables)
    assert not all(network(*table, per_kind).ends(0) for table in tables)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "greedy"])
def test_a_table_is_built_and_verified_in_a_few_bytes_an_action(name: ScheduleName) -> None:
    """A cell takes about 130 bytes; its instructions would take 900 more."""
    tracemalloc.start()
    try:
        schedule = build(name, chain(16), 64, placement=[*range(8), *range(8)] if name == "interleaved_1f1b" else None)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "instructions" not in vars(schedule)
    assert most < 512 * sum(map(len, schedule.rows))


# --- instructions that lowering would not make ---

FIRST, SECOND = (Message(edge, Direction.FORWARD, 0, 0, 1) for edge in (0, 1))
TWO_VALUES = [Value(0, 1, 0), Value(0, 1, 1)]
FORWARD, NEXT = Compute(Action(0, Kind.F, 0)), Compute(Action(1, Kind.F, 0))
SENDER = (FORWARD, Send(FIRST), Send(SECOND))
PAIR, TRIO, ALL = Reduce((0, 1)), Reduce((0, 1, 2)), Reduce((0, 1, 2, 3))


def table_of(rows: Sequence[Sequence[Instruction]]) -> Schedule:
    """The table that such instructions of stages 0 and 1 would be of."""
    actions = tuple(tuple(step.action for step in row if isinstance(step, Compute)) for row in rows)
    return Schedule(actions, ((0, 1),), (0, len(rows) - 1), (False, False), 1)


@pytest.mark.parametrize(
    "rows",
    [
        (SENDER, (Receive(FIRST), Receive(SECOND), NEXT)),
        ((PAIR, TRIO), (PAIR, TRIO), (TRIO,)),
    ],
)
def test_what_stands_in_one_order_at_both_ends_ends(rows: tuple[tuple[Instruction, ...], ...]) -> None:
    assert len(prove(table_of(rows), rows, TWO_VALUES)) == sum(map(len, rows))


@pytest.mark.parametrize(
    ("rows", "waits"),
    [
        ((SENDER, (Receive(SECOND), Receive(FIRST), NEXT)), ["rank 1 waits at 1F0 for the value "]),
        (((FORWARD, Send(SECOND)), (Receive(FIRST), Receive(SECOND), NEXT)), ["rank 1 waits at 1F0 for the value 0"]),
        ((SENDER, (Receive(FIRST), NEXT, Receive(SECOND))), ["rank 1 waits at 1F0 for the value 1"]),
        (
            ((*SENDER, Release(SECOND)), (Receive(FIRST), NEXT)),
            ["rank 0 waits for the value 1 of micro-batch 0 from rank 0 to rank 1"],
        ),
        (((Compute(Action(0, Kind.B, 0)),),), ["rank 0 waits at 0B0 for 0F0"]),
        (((FORWARD, PAIR), ()), ["rank 0 waits for rank 1 to come to the reduction over ranks 0, 1"]),
        (
            ((ALL,), (), (ALL,), ()),
            [f"rank {rank} waits for rank 1 to come to the {ALL} and rank 3 to come to the {ALL}" for rank in (0, 2)],
        ),
        (
            ((PAIR, TRIO), (TRIO, PAIR), (TRIO,)),
            [
                f"rank 0 waits for rank 1 to come to the {PAIR}",
                f"rank 1 waits for rank 0 to come to the {TRIO}",
                f"rank 2 waits for rank 0 to come to the {TRIO}",
            ],
        ),
        (
            ((PAIR, FORWARD, Send(FIRST)), (Receive(FIRST), NEXT, PAIR)),
            [f"rank 0 waits at 0F0 for rank 1 to come to the {PAIR}", "rank 1 waits at 1F0 for "],
        ),
    ],
)
def test_what_does_not_is_a_halt_that_names_who_waits_for_what(
    rows: tuple[tuple[Instruction, ...], ...], waits: list[str]
) -> None:
    with pytest.raises(ScheduleError) as error:
        prove(table_of(rows), rows, TWO_VALUES)
    fact, *grid = str(error.value).splitlines()
    assert len(grid) == 2 + len(rows)
    found = fact.removeprefix("the table deadlocks: ").split("; ")
    assert [one.startswith(other) for one, other in zip(found, waits, strict=True)] == [True] * len(waits)


# --- the order for one process ---


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_for_one_process_runs_everything_once_and_nothing_too_early(name: str) -> None:
    for seed in seeds(40):
        graph = random_bare(seed, frozen=seed % 2 == 0)
        schedule, values = graph.build(name, 3), values_of(graph.edges, seed)
        lowered = lower(schedule.rows, values, schedule.placement, schedule.backward, (), schedule.dependencies.ahead)
        player = Network(lowered, values, schedule.placement, schedule.backward)
        for rank, step in prove(schedule, lowered, values):
            assert player.is_able(rank)
            assert lowered[rank][player.place[rank]] == step
            player.step(rank)
        assert player.place == [len(row) for row in lowered]
