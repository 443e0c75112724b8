"""Verify: tables broken by hand, the strict model against a simulator of its own, and reductions."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import build
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.lower import (
    Compute,
    Instruction,
    Message,
    Receive,
    Reduce,
    Release,
    Send,
    is_forward,
    lower,
)
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import Machine, execution_order, verify_replicas
from tests.graphs import FAMILIES, JOINED, RECOMPUTED, WORKED, Value, chain, gradient_of, joined, random_bare, values_of
from tests.thinned import seeds


def schedule_of(rows: str, edges: Sequence[tuple[int, int]], placement: Sequence[int] | None = None) -> Schedule:
    """A schedule from rows as they print; a rank for each stage where ``placement`` says nothing."""
    parsed = tuple(tuple(Action.parse(cell) for cell in line.split()) for line in rows.strip().splitlines())
    ranks = tuple(placement) if placement is not None else tuple(range(len(parsed)))
    m = 1 + max(action.microbatch for row in parsed for action in row)
    return Schedule(parsed, tuple(edges), ranks, (True,) * len(ranks), m)


GOOD = """
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
"""


def error_of(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as error:
        schedule.verify()
    return str(error.value)


def marked(message: str) -> list[str]:
    """What stands in brackets in the grid below the first line."""
    return re.findall(r"\[(\w+)\]", message.split("\n", 1)[1])


def test_a_good_table_passes() -> None:
    schedule_of(GOOD, chain(2)).verify()


# --- tables broken by hand ---


@dataclass(frozen=True)
class Broken:
    rows: str
    facts: tuple[str, ...]
    """What the error says."""
    marked: tuple[str, ...]
    """The cells in brackets."""


BROKEN = {
    "a forward is missing, and a later stage waits for it": Broken(
        """
        0F0 0B0 0B1
        1F0 1B0 1F1 1B1
        """,
        ("0F1 is missing", "waits for 0F1 on rank 0"),
        ("0B1",),
    ),
    "a backward is missing, and an earlier stage waits for it": Broken(
        """
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1
        """,
        ("stage 1 needs 1B1, or 1I1 and 1W1; the table has neither", "0B1 on rank 0 waits for 1B1 on rank 1"),
        ("0B1",),
    ),
    "a backward is missing that nobody waits for": Broken(
        """
        0F0 0F1 0B0
        1F0 1B0 1F1 1B1
        """,
        ("stage 0 needs 0B1", "it belongs on rank 0"),
        ("0F1",),
    ),
    "a half of a backward is missing": Broken(
        """
        0F0 0F1 0B0 0I1
        1F0 1B0 1F1 1I1 1W1
        """,
        ("stage 0 needs 0B1, or 0I1 and 0W1; the table has 0I1",),
        ("0I1",),
    ),
    "a backward stands whole and in halves": Broken(
        """
        0F0 0F1 0B0 0B1 0I1 0W1
        1F0 1B0 1F1 1B1
        """,
        ("the table has 0B1, 0I1, 0W1",),
        ("0B1", "0I1", "0W1"),
    ),
    "a backward stands twice": Broken(
        """
        0F0 0F1 0B0 0B0 0B1
        1F0 1B0 1F1 1B1
        """,
        ("0B0 stands 2 times",),
        ("0B0", "0B0"),
    ),
    "a forward stands on two ranks": Broken(
        """
        0F0 0F1 0B0 0B1
        1F0 1B0 0F1 1F1 1B1
        """,
        ("0F1 stands",),
        ("0F1", "0F1"),
    ),
    "an action stands on the wrong rank": Broken(
        """
        0F0 0F1 1B0 0B0 0B1
        1F0 1F1 1B1
        """,
        ("1B0 stands on rank 0, but its stage is on rank 1",),
        ("1B0",),
    ),
    "a backward stands before its forward": Broken(
        """
        0F0 0F1 0B0 0B1
        1F0 1B0 1B1 1F1
        """,
        ("rank 1 waits at 1B1 for 1F1 on rank 1", "rank 0 waits at 0B1 for 1B1 on rank 1"),
        ("0B1", "1B1"),
    ),
    "two ranks wait for each other": Broken(
        """
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
        """,
        ("rank 0 waits at 0B0 for 1B0 on rank 1", "rank 1 waits at 1F1 for 0F1 on rank 0"),
        ("0B0", "1F1"),
    ),
    "a weight gradient stands before its input gradient": Broken(
        """
        0F0 0F1 0W0 0I0 0B1
        1F0 1I0 1W0 1F1 1B1
        """,
        ("rank 0 waits at 0W0 for 0I0 on rank 0",),
        ("0W0",),
    ),
    "a stage does not exist": Broken(
        """
        0F0 0F1 7F0 0B0 0B1
        1F0 1B0 1F1 1B1
        """,
        ("7F0 is of a stage outside of 0..1",),
        ("7F0",),
    ),
    "a row ends early": Broken(
        """
        0F0 0F1 0B0 0B1
        1F0 1B0
        """,
        ("1F1 is missing; it belongs on rank 1",),
        ("1B0",),
    ),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_table_is_printed_with_the_failing_cell_marked(broken: Broken) -> None:
    schedule = schedule_of(broken.rows, chain(2))
    message = error_of(schedule)
    for fact in broken.facts:
        assert fact in message.splitlines()[0]
    assert tuple(sorted(marked(message))) == broken.marked
    cells = re.findall(r"\d+[FBIW]\d+", message.split("\n", 1)[1])
    assert sorted(cells) == sorted(str(action) for row in schedule.rows for action in row)


def test_a_micro_batch_out_of_range_is_marked() -> None:
    message = error_of(replace(schedule_of(GOOD, chain(2)), microbatches=1))
    assert "0F1 is of a micro-batch outside of 0..0" in message
    assert marked(message) == ["0F1"]


def test_a_backward_of_a_stage_that_has_none_is_marked() -> None:
    message = error_of(replace(schedule_of(GOOD, chain(2)), backward=(False, True)))
    assert "stage 0 has no backward, but 0B0 is in the table" in message
    assert marked(message) == ["0B0"]


def test_edges_in_a_circle_are_a_halt_that_names_both_ranks() -> None:
    message = error_of(schedule_of(GOOD, [(0, 1), (1, 0)]))
    assert "rank 0 waits at 0F0 for 1F0 on rank 1" in message
    assert "rank 1 waits at 1F0 for 0F0 on rank 0" in message


def test_a_backward_in_halves_passes_and_its_gradient_is_sent_after_the_first() -> None:
    rows = """
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    schedule = schedule_of(rows, chain(2))
    schedule.verify()
    last = [str(step.action) for step in schedule.instructions[1] if isinstance(step, Compute)]
    sends = [place for place, step in enumerate(schedule.instructions[1]) if isinstance(step, Send)]
    before_sends = [str(schedule.instructions[1][place - 1].action) for place in sends]  # type: ignore[union-attr]
    assert before_sends == ["1I0", "1I1"]
    assert last == rows.split()[6:]


MIXED = {
    "whole before halves": "0F0 0B0\n1F0 1I0 1W0",
    "halves before whole": "0F0 0I0 0W0\n1F0 1B0",
    "one micro-batch in halves": "0F0 0F1 0B0 0I1 0W1\n1F0 1B0 1F1 1I1 1W1",
    "another one at each stage": "0F0 0F1 0I0 0W0 0B1\n1F0 1B0 1F1 1I1 1W1",
}


@pytest.mark.parametrize("rows", MIXED.values(), ids=MIXED.keys())
def test_whole_backwards_and_halves_mix_and_wait_for_whatever_makes_the_gradient(rows: str) -> None:
    schedule = schedule_of(rows, chain(2))
    schedule.verify()
    for interleaving in range(5):
        assert network(schedule, [Value(0, 1, 0)]).ends(interleaving)
    *_, sender = (step for step in schedule.instructions[1] if isinstance(step, Compute) and step.action.op is not Op.W)
    place = schedule.instructions[1].index(sender)
    assert isinstance(schedule.instructions[1][place + 1], Send)


def test_a_whole_backward_before_the_half_that_it_waits_for_is_a_halt() -> None:
    message = error_of(schedule_of("0F0 0F1 0B0 0B1\n1F0 1F1 1W0 1I0 1B1", chain(2)))
    assert "rank 0 waits at 0B0 for 1I0 on rank 1" in message
    assert "rank 1 waits at 1W0 for 1I0 on rank 1" in message


def disturbed(schedule: Schedule, draw: random.Random, most: int, cell: Callable[[], Action]) -> Schedule:
    """The table with up to so many places changed: an action taken out, put in, or put in place of another."""
    rows = [list(row) for row in schedule.rows]
    for _ in range(draw.randint(0, most)):
        row = draw.choice(rows)
        place = draw.randint(0, len(row))
        row[place : place + draw.randint(0, 1)] = [cell() for _ in range(draw.randint(0, 1))]
    return replace(schedule, rows=tuple(map(tuple, rows)))


def test_whatever_is_wrong_with_a_table_is_a_schedule_error_and_it_can_still_be_printed() -> None:
    draw = random.Random(0)
    passed = 0
    for seed in range(300):
        graph = random_bare(seed, most=4, frozen=seed % 3 == 0)
        schedule = graph.build("1f1b", 1 + seed % 3)

        def cell(stages: int = graph.stages, microbatches: int = schedule.microbatches) -> Action:
            return Action(draw.randint(0, stages), draw.choice(list(Op)), draw.randint(0, microbatches))

        changed = disturbed(schedule, draw, 3, cell)
        assert str(changed).count("\n") > len(schedule.rows)
        if changed.rows == schedule.rows:
            changed.verify()
            passed += 1
        else:
            try:
                changed.verify()
            except ScheduleError:
                continue
            assert network(changed, values_of(graph.edges, seed)).ends(0)
    assert passed > 30


def test_everyone_in_a_circle_of_three_is_named() -> None:
    rows = """
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """
    message = error_of(schedule_of(rows, chain(3)))
    for told in ("rank 0 waits at 0B0 for 1B0", "rank 1 waits at 1F1 for 0F1", "rank 2 waits at 2F1 for 1F1"):
        assert told in message
    assert sorted(marked(message)) == ["0B0", "1F1", "2F1"]


# --- a simulator of message passing, independent of verify's ---


GRADIENT = (Op.B, Op.I)
"""What makes the gradients of a stage's inputs."""


QueueOf = Callable[[Message], object]


def per_directed_pair(message: Message) -> object:
    return message.sender, message.receiver


def per_pair(message: Message) -> object:
    return frozenset((message.sender, message.receiver))


def per_kind(message: Message) -> object:
    return per_pair(message), message.op


class Network:
    """Ranks that issue sends and receives to queues. Each rank works through its side of a queue in order of issue:
    a send and a receive are over when both stand at the head of their sides. Nothing blocks but a compute."""

    def __init__(
        self,
        instructions: Sequence[Sequence[Instruction]],
        edges: Sequence[Value],
        placement: Sequence[int | tuple[int, ...]],
        backward: Sequence[bool],
        queue_of: QueueOf = per_directed_pair,
    ) -> None:
        self.instructions, self.edges, self.placement = instructions, edges, placement
        self.backward, self.queue_of = backward, queue_of
        self.sides: dict[tuple[int, object], list[tuple[str, Message]]] = {}
        self.place = [0] * len(instructions)
        self.over: set[Message] = set()
        self.ran: set[Action] = set()
        computes = (step.action for row in instructions for step in row if isinstance(step, Compute))
        self.halved = {(action.stage, action.microbatch) for action in computes if action.op is Op.I}

    def ends(self, seed: int) -> bool:
        """Plays the ranks in an order drawn at random; whether all get to their end and nothing is left over."""
        draw = random.Random(seed)
        while True:
            able = [rank for rank in range(len(self.place)) if self.is_able(rank)]
            if not able:
                break
            self.step(draw.choice(able))
        done = all(place == len(row) for place, row in zip(self.place, self.instructions, strict=True))
        return done and not any(self.sides.values())

    def is_able(self, rank: int) -> bool:
        if self.place[rank] == len(self.instructions[rank]):
            return False
        step = self.instructions[rank][self.place[rank]]
        if isinstance(step, Reduce):
            return all(step in self.instructions[other][: self.place[other] + 1] for other in step.ranks)
        if isinstance(step, Release) and not self.backward[self.edges[step.message.edge].source]:
            return step.message in self.over  # in front of a forward that is held back
        return not isinstance(step, Compute) or (
            self.inputs(step.action) <= self.over and self.locals(step.action) <= self.ran
        )

    def step(self, rank: int) -> None:
        step = self.instructions[rank][self.place[rank]]
        self.place[rank] += 1
        if isinstance(step, Compute):
            self.ran.add(step.action)
        elif isinstance(step, Release):
            assert step.message in self.over, f"a release would have waited: {step.message}"
        elif not isinstance(step, Reduce):
            kind = "send" if isinstance(step, Send) else "receive"
            self.sides.setdefault((rank, self.queue_of(step.message)), []).append((kind, step.message))
            self.match(self.queue_of(step.message), step.message.sender, step.message.receiver)

    def match(self, queue: object, one: int, other: int) -> None:
        """Ends what stands at the heads of both sides of a queue, as long as one sends and the other receives."""
        first, second = (self.sides.setdefault((rank, queue), []) for rank in (one, other))
        while first and second and first[0][0] != second[0][0]:
            (_, sent), (_, posted) = first.pop(0), second.pop(0)
            assert sent == posted, f"{sent} lands in the buffer of {posted}"
            self.over.add(sent)

    def rank(self, stage: int, microbatch: int) -> int:
        place = self.placement[stage]
        return place if isinstance(place, int) else place[microbatch % len(place)]

    def inputs(self, action: Action) -> set[Message]:
        """The messages that an action needs, from the edges."""
        found = set()
        for index, (source, target, _) in enumerate(self.edges):
            here, there = self.rank(source, action.microbatch), self.rank(target, action.microbatch)
            if here != there and action.op is Op.F and target == action.stage:
                found.add(Message(index, Op.F, action.microbatch, here, there))
            if here != there and action.op in GRADIENT and source == action.stage and self.backward[target]:
                found.add(Message(index, Op.B, action.microbatch, there, here))
        return found

    def locals(self, action: Action) -> set[Action]:
        """The actions of the same rank that an action needs, from the edges."""
        stage, op, j, _ = action
        if op is Op.W:
            return {Action(stage, Op.I, j)}
        found = {Action(stage, Op.F, j)} if op in GRADIENT else set()
        for source, target, _ in self.edges:
            if self.rank(source, j) == self.rank(target, j):
                if op is Op.F and target == stage:
                    found.add(Action(source, Op.F, j))
                if op in GRADIENT and source == stage and self.backward[target]:
                    found.add(gradient_of(target, j, self.halved))
        return found


def network(schedule: Schedule, values: Sequence[Value], queue_of: QueueOf = per_directed_pair) -> Network:
    lowered = lower(
        schedule.rows, values, schedule.placement, schedule.backward, schedule.tied, schedule.dependencies.ahead
    )
    return Network(lowered, values, schedule.placement, schedule.backward, queue_of)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_verified_table_hangs_whatever_the_interleaving(name: str) -> None:
    for seed in seeds(120):
        graph = random_bare(seed, frozen=seed % 3 == 0)
        schedule = graph.build(name, 1 + seed % 6)
        values = values_of(graph.edges, seed)
        for interleaving in range(3):
            assert network(schedule, values).ends(interleaving), (graph, interleaving)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_table_hangs_when_only_its_forwards_run(name: str) -> None:
    for seed in seeds(80):
        graph = random_bare(seed, frozen=seed % 3 == 0)
        whole = network(graph.build(name, 1 + seed % 6), values_of(graph.edges, seed))
        whole.instructions = [list(filter(is_forward, row)) for row in whole.instructions]
        assert whole.ends(seed)


def without(row: Sequence[Instruction], left_out: set[int]) -> list[Instruction]:
    """A rank's instructions where the micro-batches ``left_out`` have no backward."""
    kept: list[Instruction] = []
    skipping = False
    for step in row:
        if isinstance(step, Compute):
            skipping = step.action.op is not Op.F and step.action.microbatch in left_out
            kept += [] if skipping else [step]
        elif isinstance(step, Release) and skipping:
            continue  # the answer that tells of the arrival never comes
        elif step.message.op is Op.F or step.message.microbatch not in left_out:
            kept.append(step)
    return kept


@pytest.mark.parametrize("name", FAMILIES)
def test_no_table_hangs_when_some_micro_batches_have_no_backward(name: str) -> None:
    draw = random.Random(0)
    for seed in seeds(80):
        graph = random_bare(seed, frozen=seed % 3 == 0)
        m = 1 + seed % 6
        whole = network(graph.build(name, m), values_of(graph.edges, seed))
        left_out = {microbatch for microbatch in range(m) if draw.random() < 0.5}
        whole.instructions = [without(row, left_out) for row in whole.instructions]
        assert whole.ends(seed)


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
    for seed in range(400):
        graph = random_bare(seed, most=5)
        schedule = shuffled(graph.build("1f1b", 2 + seed % 4), draw)
        ends = [network(schedule, values_of(graph.edges, seed)).ends(interleaving) for interleaving in (0, 1)]
        assert ends[0] == ends[1]
        if ends[0]:
            schedule.verify()
        else:
            hung += 1
            assert "the table deadlocks: rank" in error_of(schedule)
    assert 50 < hung < 350  # both cases were met


@pytest.mark.parametrize("edges", [chain(3), WORKED], ids=["chain", "worked example"])
def test_1f1b_would_hang_with_one_queue_for_both_directions_and_does_not_with_one_for_each(
    edges: tuple[tuple[int, int], ...],
) -> None:
    schedule = build("1f1b", edges, 8)
    values = [Value(*edge, 0) for edge in edges]
    assert network(schedule, values, per_directed_pair).ends(0)
    assert not network(schedule, values, per_pair).ends(0)


def test_queues_for_activations_and_gradients_would_hang_with_several_stages_on_a_rank() -> None:
    graphs = [random_bare(seed) for seed in range(60)]
    tables = [(graph.build("1f1b", 6), values_of(graph.edges, 0)) for graph in graphs]
    assert all(network(*table, per_directed_pair).ends(0) for table in tables)
    assert not all(network(*table, per_kind).ends(0) for table in tables)


# --- the machine on instructions that lowering would not make ---

FIRST, SECOND = (Message(edge, Op.F, 0, 0, 1) for edge in (0, 1))
TWO_VALUES = [Value(0, 1, 0), Value(0, 1, 1)]
FORWARD, NEXT = Compute(Action(0, Op.F, 0)), Compute(Action(1, Op.F, 0))
SENDER = (FORWARD, Send(FIRST), Send(SECOND))


def machine_of(*rows: tuple[Instruction, ...]) -> Machine:
    machine = Machine(rows, TWO_VALUES, [False, False])
    for _ in machine.run():
        pass
    return machine


def test_receives_in_the_senders_order_arrive() -> None:
    machine = machine_of(SENDER, (Receive(FIRST), Receive(SECOND), NEXT))
    assert machine.stuck() == []
    assert machine.unmatched() is None


def test_receives_in_another_order_than_the_senders_never_arrive() -> None:
    (one,) = machine_of(SENDER, (Receive(SECOND), Receive(FIRST), NEXT)).stuck()
    assert one.cells == (NEXT.action,)
    assert one.reason.startswith("rank 1 waits at 1F0 for the value ")


def test_a_receive_behind_one_that_is_never_sent_never_arrives() -> None:
    (one,) = machine_of((FORWARD, Send(SECOND)), (Receive(FIRST), Receive(SECOND), NEXT)).stuck()
    assert "the value 1 of micro-batch 0 from rank 0 to rank 1" in one.reason


def test_a_receive_posted_after_the_compute_that_needs_it_is_a_halt() -> None:
    (one,) = machine_of(SENDER, (Receive(FIRST), NEXT, Receive(SECOND))).stuck()
    assert one.cells == (NEXT.action,)


def test_a_send_that_nobody_receives_is_told() -> None:
    machine = machine_of(SENDER, (Receive(FIRST), NEXT))
    assert machine.stuck() == []
    assert machine.unmatched() == SECOND


def test_a_release_before_the_message_has_arrived_is_a_halt_even_at_the_end_of_a_row() -> None:
    (one,) = machine_of((*SENDER, Release(SECOND)), (Receive(FIRST), NEXT)).stuck()
    assert one.cells == ()
    assert one.reason == "rank 0 waits for the value 1 of micro-batch 0 from rank 0 to rank 1"


def test_a_compute_that_waits_for_what_no_rank_has_is_told_so() -> None:
    (one,) = machine_of((Compute(Action(0, Op.B, 0)),)).stuck()
    assert one.reason == "rank 0 waits at 0B0 for 0F0, which is not in the table"


# --- reductions of tied parameters ---


@pytest.mark.parametrize("name", FAMILIES)
def test_no_table_with_tied_stages_hangs_whatever_the_interleaving(name: str) -> None:
    draw = random.Random(0)
    reduced = 0
    for seed in seeds(60):
        graph = random_bare(seed, frozen=seed % 3 == 0)
        groups = [
            tuple(draw.sample(range(graph.stages), draw.randint(1, graph.stages))) for _ in range(draw.randint(1, 4))
        ]
        tied = replace(graph.build(name, 1 + seed % 4), tied=tuple(groups))
        tied.verify()
        reduced += any(isinstance(step, Reduce) for row in tied.instructions for step in row)
        for interleaving in range(3):
            assert network(tied, values_of(graph.edges, seed)).ends(interleaving), (graph, groups)
    assert reduced > len(seeds(60)) // 4


def test_a_rank_that_never_comes_to_a_reduction_is_told() -> None:
    (one,) = machine_of((FORWARD, Reduce((0, 1))), ()).stuck()
    assert one.cells == ()
    assert one.reason == "rank 0 waits for rank 1 to come to the reduction over ranks 0, 1"


def test_all_ranks_that_are_absent_from_a_reduction_are_told() -> None:
    one, two = machine_of((Reduce((0, 1, 2, 3)),), (), (Reduce((0, 1, 2, 3)),), ()).stuck()
    for each, rank in ((one, 0), (two, 2)):
        over = "to come to the reduction over ranks 0, 1, 2, 3"
        assert each.reason == f"rank {rank} waits for rank 1 {over} and rank 3 {over}"


def test_two_ranks_that_come_to_their_reductions_in_different_orders_are_told() -> None:
    pair, trio = Reduce((0, 1)), Reduce((0, 1, 2))
    stuck = machine_of((pair, trio), (trio, pair), (trio,)).stuck()
    assert [one.reason for one in stuck] == [
        "rank 0 waits for rank 1 to come to the reduction over ranks 0, 1",
        "rank 1 waits for rank 0 to come to the reduction over ranks 0, 1, 2",
        "rank 2 waits for rank 0 to come to the reduction over ranks 0, 1, 2",
    ]
    assert machine_of((pair, trio), (pair, trio), (trio,)).stuck() == []


def test_a_reduction_in_front_of_what_another_rank_waits_for_is_a_halt() -> None:
    both = Reduce((0, 1))
    stuck = machine_of((both, FORWARD, Send(FIRST)), (Receive(FIRST), NEXT, both)).stuck()
    assert [one.cells for one in stuck] == [(FORWARD.action,), (NEXT.action,)]
    assert "rank 0 waits at 0F0 for rank 1 to come to the reduction over ranks 0, 1" in stuck[0].reason


# --- the order for one process ---


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_for_one_process_runs_everything_once_and_nothing_too_early(name: str) -> None:
    for seed in seeds(40):
        graph = random_bare(seed, frozen=seed % 2 == 0)
        schedule, values = graph.build(name, 3), values_of(graph.edges, seed)
        lowered = lower(schedule.rows, values, schedule.placement, schedule.backward, (), schedule.dependencies.ahead)
        player = Network(lowered, values, schedule.placement, schedule.backward)
        for rank, step in execution_order(lowered, values, schedule.backward):
            assert player.is_able(rank)
            assert lowered[rank][player.place[rank]] == step
            player.step(rank)
        assert player.place == [len(row) for row in lowered]


def test_there_is_no_order_for_a_table_that_halts() -> None:
    schedule = schedule_of(BROKEN["two ranks wait for each other"].rows, chain(2))
    with pytest.raises(ScheduleError, match="rank 0 waits at 0B0 for 1B0 on rank 1"):
        execution_order(schedule.instructions, schedule.links, schedule.backward)


# --- groups, and forwards that are run again ---


@pytest.mark.parametrize("rows", [JOINED, RECOMPUTED])
def test_tables_with_groups_pass(rows: str) -> None:
    schedule = joined(rows)
    schedule.verify()
    order = [
        str(step.action)
        for _, step in execution_order(schedule.instructions, schedule.links, schedule.backward)
        if isinstance(step, Compute)
    ]
    first = next(cell for cell in order if cell[:2] in ("4B", "4I"))
    assert all(
        order.index(f"{stage}F{j}") < order.index("4F0-3" if "4F0-3" in order else "4F0-1")
        for stage in (1, 3)
        for j in range(2)
    )
    assert all(order.index(first) < order.index(cell) for cell in ("1B0", "1B1", "0B0"))


WRONG_GROUPS = {
    "a gradient before the whole group is there": (
        JOINED.replace("1F2 1F3 1B0", "1F2 1B0 1F3"),
        ("rank 1 waits at 1B0 for 4B0-3 on rank 4", "rank 4 waits at 4F0-3 for 1F3 on rank 1"),
    ),
    "groups of two sizes": (
        JOINED.replace("4B0-3", "4B0-1 4B2-3"),
        ("4F0-3 is none of its stage's groups", "groups of 2"),
    ),
    "a group that begins amid one": (JOINED.replace("4F0-3", "4F0-1 4F1-2"), ("4F0-1 is none", "groups of 4")),
    "a micro-batch alone beside groups": (JOINED.replace("4B0-3", "4B0"), ("4B0 is none", "groups of 4")),
    "a group that reaches over the end": (
        RECOMPUTED.replace("4W2-3", "4W4-5"),
        ("4W4-5 is of a micro-batch outside of 0..3",),
    ),
    "a group is missing": (RECOMPUTED.replace("4F2-3 ", ""), ("4F2-3 is missing",)),
    "half of a group's backward": (RECOMPUTED.replace(" 4W2-3", ""), ("stage 4 needs 4B2-3, or 4I2-3 and 4W2-3",)),
    "an R behind its backward": (RECOMPUTED.replace("1R3 1B3", "1B3 1R3"), ("rank 1 waits at 1B3 for 1R3 on rank 1",)),
    "an R in front of its forward": (
        RECOMPUTED.replace("1F0 1F1 1F2 1F3 1R0", "1R0 1F0 1F1 1F2 1F3"),
        ("rank 1 waits at 1R0 for 1F0",),
    ),
    "an R too few": (
        RECOMPUTED.replace("0R2 ", ""),
        ("0R2 is missing; it has an R for each of its backwards, or for none",),
    ),
    "an R too many": (RECOMPUTED.replace("0R2", "0R2 0R2"), ("0R2 stands 2 times",)),
}


@pytest.mark.parametrize(("rows", "facts"), WRONG_GROUPS.values(), ids=WRONG_GROUPS.keys())
def test_a_table_with_wrong_groups_is_refused(rows: str, facts: tuple[str, ...]) -> None:
    schedule = replace(joined(JOINED), rows=joined(rows).rows)
    message = error_of(schedule)
    for fact in facts:
        assert fact in message.splitlines()[0]
    assert marked(message.replace("-", ""))


def test_groups_divide_the_micro_batches_and_nothing_behind_them_runs_alone() -> None:
    message = error_of(joined("0F0 0F1 0F2 0B0 0B1 0B2\n1F0-1 1B0-1", chain(2)))
    assert "stage 1 runs in groups of 2, which do not divide 3 micro-batches" in message
    alone = "0F0-1 0B0-1\n1F0 1F1 1B0 1B1"
    assert "stage 0 makes a value of 2 micro-batches at once, and stage 1 runs micro-batch by micro-batch" in error_of(
        joined(alone, chain(2))
    )
    other = "0F0-1 0F2-3 0B0-1 0B2-3\n1F0-3 1B0-3"
    assert "stage 0 makes a value of 2 micro-batches at once, and stage 1 runs in groups of 4" in error_of(
        joined(other, chain(2))
    )


def test_an_r_of_a_stage_without_a_backward_is_refused() -> None:
    schedule = replace(joined("0F0 0R0\n1F0 1B0", chain(2)), backward=(False, True))
    assert "stage 0 has no backward, but 0R0 is in the table" in error_of(schedule)


def test_whatever_is_wrong_with_a_table_of_groups_is_a_schedule_error_and_it_can_still_be_printed() -> None:
    draw = random.Random(1)
    passed = 0
    for _ in range(400):
        schedule = joined(draw.choice([JOINED, RECOMPUTED]))

        def cell() -> Action:
            return Action(draw.randint(0, 5), draw.choice(list(Op)), draw.randint(0, 4), draw.choice([1, 1, 2, 3, 4]))

        changed = disturbed(schedule, draw, 2, cell)
        assert str(changed).count("\n") > len(schedule.rows)
        if changed.rows == schedule.rows:
            changed.verify()
            passed += 1
        else:
            with pytest.raises(ScheduleError):
                changed.verify()
    assert passed > 50


# --- Verify replicas: their tables together, where a stage waits for the rows of all of them ---


def with_row(schedule: Schedule, rank: int, row: str) -> Schedule:
    rows = list(schedule.rows)
    rows[rank] = tuple(map(Action.parse, row.split()))
    return replace(schedule, rows=tuple(rows))


def refused(tables: list[Schedule], shared: Collection[int]) -> str:
    """Each by itself comes to its end; together they do not."""
    for table in tables:
        table.verify()
    with pytest.raises(ScheduleError) as error:
        verify_replicas(tables, shared)
    return str(error.value)


@pytest.mark.parametrize("rows", [JOINED, RECOMPUTED])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_replicas_of_one_table_come_to_its_end(rows: str, count: int) -> None:
    verify_replicas([joined(rows)] * count, {4})
    verify_replicas([joined(rows)] * count, range(5))


@pytest.mark.parametrize("name", FAMILIES)
def test_so_they_do_whatever_the_graph_and_the_stages_that_see_all(name: str) -> None:
    for seed in seeds(24):
        graph = random_bare(seed, frozen=seed % 2 == 0)
        shared = random.Random(seed).sample(range(graph.stages), graph.stages // 2)
        verify_replicas([graph.build(name, 3)] * 2, shared)


def test_groups_in_another_order_are_refused() -> None:
    """One replica's second group runs forward, and the other's first one back: each waits for the other."""
    table = joined(RECOMPUTED)
    other = with_row(table, 4, "4F0-1 4I0-1 4W0-1 4F2-3 4I2-3 4W2-3")
    message = refused([table, other], {4})
    assert "rank 4 of replica 0 at 4F2-3; rank 4 of replica 1 at 4I0-1" in message
    assert "[4F2-3]" in message
    verify_replicas([table, other], ())


def test_a_circle_through_two_ranks_is_refused_though_each_gathers_once_and_in_one_order() -> None:
    """Each rank has a stage that sees all, and one that the other's feeds. In one replica the second rank begins, in
    the other the first: so each waits for a message from behind a collective that waits for the other replica."""
    edges, alone = ((1, 2), (0, 3)), {"placement": (0, 1, 0, 1), "backward": (False,) * 4, "microbatches": 1}
    rows = [["2F0 0F0", "1F0 3F0"], ["0F0 2F0", "3F0 1F0"]]
    tables = [
        Schedule(tuple(tuple(map(Action.parse, row.split())) for row in table), edges, **alone)  # type: ignore[arg-type]
        for table in rows
    ]
    message = refused(tables, {0, 1})
    assert "rank 1 of replica 0 at 1F0; rank 0 of replica 1 at 0F0" in message
    verify_replicas(tables[:1] * 2, {0, 1})
    verify_replicas(tables, {0})
    verify_replicas(tables, {1})


def test_a_replica_with_fewer_groups_is_refused() -> None:
    table = joined(RECOMPUTED)
    rows = [tuple(action for action in row if action.microbatch < 2) for row in table.rows]
    shorter = replace(table, rows=tuple(rows), microbatches=2)
    assert "rank 4 of replica 0 at 4F2-3; rank 4 of replica 1 at 4I0-1" in refused([table, shorter], {4})


def test_a_table_that_halts_by_itself_is_refused_as_ever() -> None:
    table = joined(JOINED.replace("1F2 1F3 1B0", "1F2 1B0 1F3"))
    with pytest.raises(ScheduleError, match="rank 1 waits at 1B0 for 4B0-3 on rank 4"):
        verify_replicas([table] * 2, {4})
