"""Lower: what it promises of each message, its send, its receive and its release."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Kind
from fxpipe.schedules.lower import Compute, Instruction, Message, Receive, Reduce, Release, Send, lower, pairs
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import prove
from tests.graphs import FAMILIES, JOINED, WORKED, Value, chain, gradient_of, joined, random_bare, values_of
from tests.thinned import seeds

Examples = list[tuple[Schedule, list[Value], tuple[tuple[Instruction, ...], ...]]]


@pytest.fixture(scope="module")
def examples() -> Examples:
    """Tables of every schedule, the values that pass between their stages, and what lowering makes of them."""
    made = []
    for name in FAMILIES:
        for seed in seeds(60):
            graph = random_bare(seed, frozen=seed % 2 == 0)
            schedule, values = graph.build(name, 1 + seed % 6), values_of(graph.edges, seed)
            ahead = schedule.dependencies.ahead
            lowered = lower(schedule.rows, values, schedule.placement, schedule.backward, (), ahead)
            made.append((schedule, values, lowered))
    return made


def messages(row: Sequence[Instruction], kind: type[Send] | type[Receive]) -> list[Message]:
    return [step.message for step in row if isinstance(step, kind)]


def made_by(message: Message, schedule: Schedule, values: Sequence[Value]) -> Action:
    """The action that makes a message."""
    value, j = values[message.edge], message.microbatch
    return (
        Action(value.source, Kind.F, j)
        if message.direction is FORWARD
        else gradient_of(value.target, j, halved(schedule))
    )


def used_by(message: Message, schedule: Schedule, values: Sequence[Value]) -> Action:
    """The action that needs a message."""
    value, j = values[message.edge], message.microbatch
    return (
        Action(value.target, Kind.F, j)
        if message.direction is FORWARD
        else gradient_of(value.source, j, halved(schedule))
    )


def halved(schedule: Schedule) -> set[tuple[int, int]]:
    return {(action.stage, action.microbatch) for row in schedule.rows for action in row if action.kind is Kind.I}


def test_the_computes_of_a_rank_are_its_row(examples: Examples) -> None:
    for schedule, _, lowered in examples:
        computed = tuple(tuple(step.action for step in row if isinstance(step, Compute)) for row in lowered)
        assert computed == schedule.rows


def test_every_value_and_gradient_that_changes_ranks_is_sent_once_and_received_once(examples: Examples) -> None:
    for schedule, values, lowered in examples:
        rank_of, m = schedule.placement, schedule.microbatches
        crossing = [(i, v) for i, v in enumerate(values) if rank_of[v.source] != rank_of[v.target]]
        wanted = [
            Message(i, FORWARD, j, rank_of[v.source], rank_of[v.target]) for i, v in crossing for j in range(m)
        ] + [
            Message(i, BACKWARD, j, rank_of[v.target], rank_of[v.source])
            for i, v in crossing
            for j in range(m)
            if schedule.backward[v.source]
        ]
        sent = [(rank, message) for rank, row in enumerate(lowered) for message in messages(row, Send)]
        received = [(rank, message) for rank, row in enumerate(lowered) for message in messages(row, Receive)]
        assert len(sent) == len(received) == len(wanted)
        assert set(sent) == {(message.sender, message) for message in wanted}
        assert set(received) == {(message.receiver, message) for message in wanted}


def test_a_send_follows_at_once_on_the_action_that_makes_its_message(examples: Examples) -> None:
    for schedule, values, lowered in examples:
        for row in lowered:
            action = None
            for step in row:
                if isinstance(step, Compute):
                    action = step.action
                elif isinstance(step, Send):
                    assert action == made_by(step.message, schedule, values)


def test_receives_are_posted_in_the_senders_order(examples: Examples) -> None:
    for _, _, lowered in examples:
        for sender, receiver in pairs(lowered):
            sent = [message for message in messages(lowered[sender], Send) if message.receiver == receiver]
            posted = [message for message in messages(lowered[receiver], Receive) if message.sender == sender]
            assert sent == posted


def test_a_receive_is_posted_at_least_one_action_ahead_or_at_the_start(examples: Examples) -> None:
    for schedule, values, lowered in examples:
        for row in lowered:
            computes = [place for place, step in enumerate(row) if isinstance(step, Compute)]
            for place, step in enumerate(row):
                if isinstance(step, Receive):
                    use = row.index(Compute(used_by(step.message, schedule, values)))
                    between = [compute for compute in computes if place < compute < use]
                    assert between or place < computes[0], f"{step.message} is posted just before its use"
                    assert place < use


def test_a_receive_is_posted_no_earlier_than_it_must(examples: Examples) -> None:
    """A buffer is held from the post on: one action ahead of the use, or of that of a later one in the queue."""
    for schedule, values, lowered in examples:
        for row in lowered:
            uses = {
                message: row.index(Compute(used_by(message, schedule, values))) for message in messages(row, Receive)
            }
            for place, step in enumerate(row):
                if isinstance(step, Receive):
                    queue = [message for message in uses if message.sender == step.message.sender]
                    soonest = min(uses[message] for message in queue[queue.index(step.message) :])
                    ahead = [s for s in row[place:soonest] if isinstance(s, Compute)]
                    assert len(ahead) <= 1


def test_a_release_stands_behind_its_send_and_some_sends_are_released_early(examples: Examples) -> None:
    released = 0
    for _, _, lowered in examples:
        for row in lowered:
            sent: set[Message] = set()
            for step in row:
                if isinstance(step, Send):
                    sent.add(step.message)
                elif isinstance(step, Release):
                    assert step.message in sent
                    sent.remove(step.message)  # and only once
                    released += 1
    assert released > 0


def test_on_a_chain_an_activation_is_released_when_its_gradient_comes() -> None:
    first, _ = build("1f1b", chain(2), 3).instructions
    told = []
    for step in first:
        if isinstance(step, Compute):
            told.append(str(step.action))
        elif isinstance(step, Release):
            told.append(f"release {step.message.direction.value}{step.message.microbatch}")
    assert told == ["0F0", "0F1", "0B0", "release F0", "0F2", "0B1", "release F1", "0B2", "release F2"]


def test_tied_stages_reduce_behind_all_else_on_each_rank_that_owns_one() -> None:
    tied = [(0, 4), (2, 3), (0, 2, 4)]
    schedule = build("1f1b", WORKED, 2, placement=[0, 1, 2, 2, 3], tied=tied)
    reductions = [[step for step in row if isinstance(step, Reduce)] for row in schedule.instructions]
    assert reductions == [
        [Reduce((0, 2, 3)), Reduce((0, 3))],
        [],
        [Reduce((0, 2, 3))],  # 2 and 3 are both on rank 2, where there is nothing to exchange
        [Reduce((0, 2, 3)), Reduce((0, 3))],
    ]
    for row, mine in zip(schedule.instructions, reductions, strict=True):
        assert list(row[len(row) - len(mine) :]) == mine
    assert str(Reduce((0, 3))) == "reduction over ranks 0, 3"


def test_groups_tied_over_the_same_ranks_are_reduced_together() -> None:
    schedule = build("1f1b", chain(4), 2, placement=[0, 1, 1, 0], tied=[(0, 1), (3, 2), (2, 0)])
    assert [[step for step in row if isinstance(step, Reduce)] for row in schedule.instructions] == [
        [Reduce((0, 1))],
        [Reduce((0, 1))],
    ]


# --- groups ---


def test_a_gathered_stage_is_sent_each_micro_batch_and_sends_each_its_gradient() -> None:
    *_, last = joined(JOINED).instructions
    sent = [(message.edge, message.direction, message.microbatch) for message in messages(last, Send)]
    received = [(message.edge, message.direction, message.microbatch) for message in messages(last, Receive)]
    assert sorted(received) == sorted((edge, FORWARD, j) for edge in (1, 3) for j in range(4))
    assert sent == [(edge, BACKWARD, j) for edge in (1, 3) for j in range(4)]
    computes = [place for place, step in enumerate(last) if isinstance(step, Compute)]
    assert [type(step) for step in last[: computes[0]]] == [Receive] * 8
    assert [type(step) for step in last[computes[1] + 1 :]] == [Send] * 8


def test_the_receives_of_a_group_are_spread_over_the_actions_in_front_of_it() -> None:
    """Stage 2 joins 0, on its own rank, and 1: micro-batch j is received while the rank's own forwards go on."""
    rows = [row.split() for row in ("0F0 0F1 0F2 0F3 2F0-3 2B0-3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3")]
    parsed = tuple(tuple(map(Action.parse, row)) for row in rows)
    schedule = Schedule(parsed, ((0, 2), (1, 2)), (0, 1, 0), (True,) * 3, 4)
    schedule.verify()
    steps = [
        f"get {step.message.microbatch}" if isinstance(step, Receive) else str(step.action)
        for step in schedule.instructions[0]
        if isinstance(step, Receive | Compute)
    ]
    assert steps[:9] == ["get 0", "0F0", "get 1", "0F1", "get 2", "0F2", "get 3", "0F3", "2F0-3"]


def test_from_one_gathered_stage_to_another_there_is_a_message_for_each_group() -> None:
    rows = "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0-1 1F2-3 1B0-1 1B2-3\n2F0-1 2B0-1 2F2-3 2B2-3"
    _, gathered, behind = joined(rows, chain(3)).instructions
    assert [(m.direction, m.microbatch) for m in messages(gathered, Send) if m.edge == 1] == [
        (FORWARD, 0),
        (FORWARD, 2),
    ]
    assert [(m.direction, m.microbatch) for m in messages(behind, Send)] == [(BACKWARD, 0), (BACKWARD, 2)]
    gradients = [(m.direction, m.microbatch) for m in messages(gathered, Send) if m.edge == 0]
    assert gradients == [(BACKWARD, j) for j in range(4)]


def test_a_forward_that_is_run_again_waits_for_no_message_and_its_gradient_is_posted_before_it() -> None:
    """The receive stands an action ahead of its use, so that the R runs while the gradient is under way."""
    first = joined("0F0 0F1 0R0 0B0 0R1 0B1\n1F0 1B0 1F1 1B1", chain(2)).instructions[0]
    before = {str(second.action): first for first, second in pairwise(first) if isinstance(second, Compute)}
    assert before["0R0"] == Receive(Message(0, BACKWARD, 0, 1, 0))
    assert before["0R1"] == Receive(Message(0, BACKWARD, 1, 1, 0))
    assert sum(isinstance(step, Send) for step in first) == 2


def test_what_was_sent_into_a_group_is_released_when_its_gradient_has_come() -> None:
    first = joined("0F0 0F1 0B0 0B1\n1F0-1 1B0-1", chain(2)).instructions[0]
    assert first[first.index(Compute(Action(0, Kind.B, 0))) + 1 :][:2] == (
        Release(Message(0, FORWARD, 0, 0, 1)),
        Release(Message(0, FORWARD, 1, 0, 1)),
    )


def test_a_value_is_sent_once_to_a_rank_and_each_stage_there_sends_a_gradient() -> None:
    """Stage 0 feeds 1 and 2 on rank 1, of which 2 runs first in micro-batch 1, and 3 on rank 2."""
    rows = "0F0 0F1 0B0 0B1", "1F0 2F0 2F1 1F1 2B0 1B0 2B1 1B1", "3F0 3B0 3F1 3B1"
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    edges = [Value(0, 1, 0), Value(0, 2, 0), Value(0, 3, 0), Value(0, 2, 1)]
    lowered = lower(parsed, edges, (0, 1, 1, 2), (True,) * 4, values=["x", "x", "x", "y"])
    first, second, third = ([(m.edge, m.direction, m.microbatch) for m in messages(row, Send)] for row in lowered)
    assert first == [(edge, FORWARD, j) for j, edges in ((0, (0, 2, 3)), (1, (1, 2, 3))) for edge in edges]
    assert sorted(second) == sorted((edge, BACKWARD, j) for edge in (0, 1, 3) for j in range(2))
    assert third == [(2, BACKWARD, 0), (2, BACKWARD, 1)]
    schedule = Schedule(parsed, ((0, 1), (0, 2), (0, 3)), (0, 1, 1, 2), (True,) * 4, 2)
    assert len(prove(schedule, lowered, edges)) == sum(map(len, lowered))
