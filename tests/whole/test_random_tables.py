"""Random graphs and placements: what verify lets through runs on the strict transport; every circle is caught."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

import pytest
import torch

from fxpipe import Kind, Schedule, ScheduleError, Topology
from fxpipe.run import exchange as exchange_module
from fxpipe.run.exchange import WireExchange
from fxpipe.schedules.dependency import Link
from fxpipe.schedules.lower import Compute, Instruction, Message, Receive, Reduce, Release, Send, lower, user_of
from tests.graphs import FAMILIES, random_bare
from tests.messages import ByMessage
from tests.strict_transport import StrictTransport, current_seat, run_strict
from tests.thinned import ALL

TABLES, CYCLES, PARTS = (10_000, 1_000, 20) if ALL else (400, 100, 2)


def table(seed: int) -> Schedule:
    """A verified table of a random graph on random ranks, of each family in turn."""
    graph = random_bare(seed, most=6, frozen=seed % 4 == 0)
    schedule = graph.build(FAMILIES[seed % len(FAMILIES)], 1 + seed % 3)
    trained = [stage for stage in range(graph.stages) if graph.backward[stage]]
    draw = random.Random(seed)
    tied = [tuple(sorted(draw.sample(trained, 2))) for _ in range(draw.choice([0, 1, 3])) if len(trained) > 1]
    return replace(schedule, tied=tuple(tied))


def play(rank: int, instructions: Sequence[Sequence[Instruction]], edges: Sequence[Link]) -> int:
    """Two steps of stages that compute nothing: the first describes messages, the second posts ahead. Counts."""
    seat = current_seat()
    assert seat is not None
    transport = StrictTransport(seat, Topology([("pipe", len(instructions))]))
    sends = [step.message for row in instructions for step in row if isinstance(step, Send)]
    owners = sorted({step.ranks for row in instructions for step in row if isinstance(step, Reduce)})
    transport.open(sorted({(message.sender, message.receiver) for message in sends}), owners)
    exchange = ByMessage(WireExchange(transport, torch.device("cpu")))
    awaited: dict[tuple[int, int, bool], list[Message]] = {}
    for step in instructions[rank]:
        if isinstance(step, Receive):
            awaited.setdefault(user_of(step.message, edges), []).append(step.message)
    taken = 0
    shapes = [1 + place % 3 for place in range(1 + max((message.microbatch for message in sends), default=0))]
    receives = [step.message for step in instructions[rank] if isinstance(step, Receive)]
    for _ in range(2):
        exchange.begin(0, shapes, receives)
        for step in instructions[rank]:
            if isinstance(step, Receive):
                exchange.post(step.message)
            elif isinstance(step, Send):
                exchange.send(step.message, torch.zeros(shapes[step.message.microbatch]))
            elif isinstance(step, Release):
                exchange.release(step.message)
            elif isinstance(step, Reduce):
                transport.all_reduce(step.ranks, torch.zeros(1))
            elif isinstance(step, Compute) and step.action.kind is not Kind.W:
                stage, kind, microbatch, _ = step.action
                for message in awaited.get((stage, microbatch, kind.messages), ()):
                    taken += len(exchange.take(message)) == shapes[message.microbatch]
        exchange.finish()
    return taken


@pytest.mark.parametrize("part", range(PARTS))
def test_no_verified_table_hangs_on_the_strict_transport(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many receives are posted at once."""
    messages = 0
    for seed in range(part * TABLES // PARTS, (part + 1) * TABLES // PARTS):
        schedule = table(seed)
        schedule.verify()
        draw = random.Random(seed)
        monkeypatch.setattr(exchange_module, "BURST", draw.choice([0, 8, 20, 1000]))
        values = [link for link in schedule.links for _ in range(draw.choice([1, 1, 2]))]  # some pairs share several
        draw.shuffle(values)
        carried = None if seed % 2 else [draw.randrange(2) for _ in values]  # of a stage's several values two are one
        ahead = schedule.dependencies.ahead
        instructions = lower(
            schedule.rows, values, schedule.placement, schedule.backward, schedule.tied, ahead, carried
        )
        taken = run_strict(lambda rank, i=instructions, v=values: play(rank, i, v), len(instructions), seed)  # type: ignore[misc]
        wanted = [sum(isinstance(step, Receive) for step in row) for row in instructions]
        assert taken == [2 * count for count in wanted], seed
        messages += sum(wanted)
    assert messages > TABLES // PARTS


def has_cycle(schedule: Schedule) -> bool:
    """Whether what must come before what, by dependencies and by the order of the rows, goes round in a circle."""
    sorter: TopologicalSorter[object] = TopologicalSorter()
    for row in schedule.rows:
        for place, action in enumerate(row):
            sorter.add(action, *schedule.dependencies.before(action), *row[:place][-1:])
    try:
        sorter.prepare()
    except CycleError:
        return True
    return False


def test_verify_catches_every_injected_cycle() -> None:
    """An action is moved to the front of its row or a part of it; where that closes a circle, verify must say so."""
    caught = seed = 0
    while caught < CYCLES:
        seed += 1
        schedule, draw = table(seed), random.Random(seed)
        rank = draw.randrange(len(schedule.rows))
        row = list(schedule.rows[rank])
        if len(row) < 2:
            continue
        later = draw.randrange(1, len(row))
        row.insert(draw.randrange(later), row.pop(later))
        changed = replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))
        if not has_cycle(changed):
            changed.verify()
            continue
        with pytest.raises(ScheduleError, match="the table deadlocks: rank ") as error:
            changed.verify()
        told, grid = str(error.value).split("\n", 1)
        waiting = re.findall(r"waits at (\w+) for", told)
        assert waiting
        assert sorted(re.findall(r"\[(\w+)\]", grid)) == sorted(waiting)
        caught += 1
    assert seed < 10 * CYCLES
