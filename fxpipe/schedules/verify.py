"""Verify: runs a table's instructions under the strictest model of message passing that a backend may show.

The model: each directed pair of ranks has one first-in-first-out queue. A send is started and not waited for, but
holds its place in the queue until its receive has been posted (rendezvous). A compute waits for what it needs, a
release until its message was taken, as one that is not described yet may. NCCL behaves so; a table that passes here
cannot hang there, nor on a backend that buffers. A reduction ends when all of its ranks have come to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import shifted
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.dependency import Dependencies, EdgeLike, Link
from fxpipe.schedules.lower import (
    Compute,
    Instruction,
    Message,
    Receive,
    Reduce,
    Release,
    Send,
    Use,
    lower,
    use_of,
    user_of,
)
from fxpipe.schedules.no_gc import paused
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.table import grid

Step = tuple[int, Instruction]
"""(rank, what it does)."""

Event = Action | Message | Reduce
"""What a rank may wait for: that an action has run, a message has arrived, or all have come to a reduction."""


@paused()
def verify(schedule: Schedule) -> None:
    """ScheduleError, with the table and the failing cells marked, unless every rank gets to the end of its row."""
    _check_cells(schedule)
    _check_groups(schedule)
    _check_complete(schedule)
    _check_gradients(schedule)
    machine = Machine(schedule.instructions, schedule.links, schedule.backward)
    for _ in machine.run():
        pass
    stuck = machine.stuck()
    if stuck:
        cells = [action for one in stuck for action in one.cells]
        _fail(schedule, cells, "the table deadlocks: " + "; ".join(one.reason for one in stuck))
    unmatched = machine.unmatched()
    if unmatched:
        _fail(schedule, (), f"{unmatched} is sent and never received, or received and never sent")


def execution_order(
    instructions: Sequence[Sequence[Instruction]], edges: Sequence[EdgeLike], backward: Sequence[bool]
) -> list[Step]:
    """All ranks' instructions in one order in which a single process can run them."""
    machine = Machine(instructions, edges, backward)
    order = list(machine.run())
    stuck = machine.stuck()
    if stuck:
        raise ScheduleError("the table deadlocks: " + "; ".join(one.reason for one in stuck))
    return order


def _check_cells(schedule: Schedule) -> None:
    """Every action is of a stage and micro-batches that exist, a group of its stage's, on its rank, and there once."""
    stages, last = len(schedule.placement), schedule.microbatches - 1
    found: set[Action] = set()
    sizes = schedule.groups
    for rank, row in enumerate(schedule.rows):
        for action in row:
            stage, _, microbatch, count = action
            if not 0 <= stage < stages:
                _fail(schedule, [action], f"{action} is of a stage outside of 0..{stages - 1}")
            if not 0 <= microbatch <= last - count + 1:
                _fail(schedule, [action], f"{action} is of a micro-batch outside of 0..{last}")
            if count != sizes[stage] or microbatch % count:
                fact = f"{action} is none of its stage's groups: stage {stage} runs {_one_by_one(sizes[stage])}"
                _fail(schedule, [action], fact)
            if (home := schedule.rank_of(stage, microbatch)) != rank:
                what = "its stage" if isinstance(schedule.placement[stage], int) else "it"
                _fail(schedule, [action], f"{action} stands on rank {rank}, but {what} is on rank {home}")
            if action in found:
                times = sum(row.count(action) for row in schedule.rows)
                _fail(schedule, [action], f"{action} stands {times} times in the table")
            found.add(action)


def _check_complete(schedule: Schedule) -> None:
    """Every F is there, and B (or I and W) for each stage that has a backward, and for no other; R for all or none."""
    found: dict[tuple[int, Op], set[int]] = {}
    for row in schedule.rows:
        for stage, op, microbatch, _ in row:
            found.setdefault((stage, op), set()).add(microbatch)
    for stage, has_backward in enumerate(schedule.backward):
        forwards, again, full, i, w = (found.get((stage, op), set()) for op in (Op.F, Op.R, Op.B, Op.I, Op.W))
        count = schedule.microbatches // schedule.groups[stage]
        whole = len(full) + len(i) == count and i == w and not full & i and len(again) in (0, count)
        if len(forwards) == count and (whole if has_backward else not (again or full or i or w)):
            continue
        for microbatch in range(0, schedule.microbatches, schedule.groups[stage]):
            ops = [op for op in Op if microbatch in found.get((stage, op), ())]
            _check_microbatch(schedule, stage, microbatch, ops, recomputed=bool(again))


def _check_groups(schedule: Schedule) -> None:
    """Groups divide the micro-batches, and what is behind a gathered stage runs in the same ones."""
    groups, m = schedule.groups, schedule.microbatches
    first = {action.stage: action for row in reversed(schedule.rows) for action in reversed(row)}
    for stage, size in enumerate(groups):
        if m % size:
            _fail(
                schedule,
                [first[stage]],
                f"stage {stage} runs in groups of {size}, which do not divide {m} micro-batches",
            )
    for source, target in schedule.edges:
        if groups[source] not in (1, groups[target]) and {source, target} <= first.keys():
            fact = f"stage {source} makes a value of {groups[source]} micro-batches at once, and stage {target}"
            _fail(schedule, [first[target]], f"{fact} runs {_one_by_one(groups[target])}; they need the same groups")


def _check_gradients(schedule: Schedule) -> None:
    """Where a stage has a backward and feeds others, one of them at least sends it a gradient."""
    fed_by: dict[int, set[int]] = {}
    for source, target in schedule.edges:
        fed_by.setdefault(source, set()).add(target)
    for stage, has_backward in enumerate(schedule.backward):
        targets = sorted(fed_by.get(stage, ()))
        if has_backward and targets and not any(schedule.backward[target] for target in targets):
            marked = [schedule.dependencies.gradient(stage, 0)]
            fed = ", ".join(map(str, targets))
            _fail(schedule, marked, f"{marked[0]} gets no gradient: stage {stage} feeds {fed}, which has no backward")


def _check_microbatch(schedule: Schedule, stage: int, microbatch: int, ops: Sequence[Op], recomputed: bool) -> None:
    """``ops``: what the table has of a stage and a micro-batch. ``recomputed``: it has an R for some."""
    count = schedule.groups[stage]
    forward, again, full, *halves = (Action(stage, op, microbatch, count) for op in (Op.F, Op.R, Op.B, Op.I, Op.W))
    present = [Action(stage, op, microbatch, count) for op in ops if op not in (Op.F, Op.R)]
    if Op.F not in ops:
        _fail_missing(schedule, forward, present[:1], f"{forward} is missing")
    if not schedule.backward[stage] and Op.R in ops:
        _fail(schedule, [again], f"stage {stage} has no backward, but {again} is in the table")
    if schedule.backward[stage] and recomputed and Op.R not in ops:
        fact = (
            f"stage {stage} is recomputed, but {again} is missing; it has an R for each of its backwards, or for none"
        )
        _fail_missing(schedule, again, present[:1], fact)
    if not schedule.backward[stage] and present:
        _fail(schedule, present, f"stage {stage} has no backward, but {present[0]} is in the table")
    if schedule.backward[stage] and present not in ([full], halves):
        got = ", ".join(map(str, present)) or "neither"
        fact = f"stage {stage} needs {full}, or {halves[0]} and {halves[1]}; the table has {got}"
        if full in present:
            _fail(schedule, present, fact)
        _fail_missing(schedule, full, present or [forward], fact)


def _one_by_one(size: int) -> str:
    return "micro-batch by micro-batch" if size == 1 else f"in groups of {size} from micro-batch 0 on"


def _fail_missing(schedule: Schedule, missing: Action, related: Collection[Action], fact: str) -> NoReturn:
    """Marks the first cell that waits for a missing action, or else those ``related`` to it, or its row's last."""
    rank = schedule.rank_of(missing.stage, missing.microbatch)
    for other, row in enumerate(schedule.rows):
        for action in row:
            if missing in schedule.dependencies.before(action):
                fact = f"{fact}; {action} on rank {other} waits for {missing} on rank {rank}"
                _fail(schedule, [action], fact)
    _fail(schedule, related or schedule.rows[rank][-1:], f"{fact}; it belongs on rank {rank}")


def _fail(schedule: Schedule, marked: Collection[Action], fact: str) -> NoReturn:
    raise ScheduleError(f"{fact}\n{grid(schedule, marked)}")


@dataclass(frozen=True)
class Blocked:
    """A rank that cannot go on: the cell at which it waits, if any is left in its row, and for what."""

    cells: tuple[Action, ...]
    reason: str


@dataclass
class _Channel:
    """One directed pair's messages: as sent, as posted, and how many at their heads have met."""

    sent: list[Message] = field(default_factory=list)
    posted: list[Message] = field(default_factory=list)
    met: int = 0

    def meet(self) -> list[Message]:
        """The messages whose turn has come: both ends have got to them, and agree on all before."""
        before = self.met
        while self.met < len(self.sent) and self.met < len(self.posted):
            if self.sent[self.met] != self.posted[self.met]:
                break
            self.met += 1
        return self.sent[before : self.met]


@dataclass
class Machine:
    """Plays all ranks' instructions under the strict model."""

    instructions: Sequence[Sequence[Instruction]]
    edges: Sequence[EdgeLike]
    backward: Sequence[bool]

    def __post_init__(self) -> None:
        self._next = [0] * len(self.instructions)
        self._queues: dict[tuple[int, int], _Channel] = {}
        self._arrived: set[Message] = set()
        self._come: dict[Reduce, set[int]] = {}  # reduction → the ranks that have come to it
        self._done: set[Action] = set()
        rows = [[step.action for step in row if isinstance(step, Compute)] for row in self.instructions]
        self._dependencies = Dependencies.of(self.edges, self.backward, rows)
        self._awaited: dict[Use, list[Message]] = {}
        groups = self._dependencies.groups
        for row in self.instructions:
            for step in row:
                if isinstance(step, Receive):
                    self._awaited.setdefault(user_of(step.message, self.edges, groups), []).append(step.message)

    def run(self) -> Iterator[Step]:
        """Runs each rank until it must wait, then those that it has let go on; yields what ran."""
        able = deque(range(len(self.instructions)))
        waiting: dict[Event, list[int]] = {}
        while able:
            rank = able.popleft()
            row = self.instructions[rank]
            while self._next[rank] < len(row):
                step = row[self._next[rank]]
                if isinstance(step, Reduce):
                    self._come.setdefault(step, set()).add(rank)
                missing = next(self._waits_for(step), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                self._next[rank] += 1
                for event in self._execute(step):
                    able.extend(waiting.pop(event, ()))
                yield rank, step

    def _waits_for(self, step: Instruction) -> Iterator[Event]:
        """What a step still waits for."""
        if isinstance(step, Compute):
            yield from (action for action in self._dependencies.before(step.action) if action not in self._done)
            yield from (message for message in self._messages_for(step.action) if message not in self._arrived)
        elif isinstance(step, Release):
            message, user = step.message, self._user(step.message)
            yield from (message,) if message not in self._arrived else (user,) if user not in self._done else ()
        elif isinstance(step, Reduce) and len(self._come[step]) < len(step.ranks):
            yield step

    def _execute(self, step: Instruction) -> Sequence[Event]:
        """What has come about with this step."""
        if isinstance(step, Compute):
            self._done.add(step.action)
            return (step.action,)
        if isinstance(step, Reduce):
            return (step,)
        if isinstance(step, Release):
            return ()
        message = step.message
        queue = self._queues.get((message.sender, message.receiver))
        if queue is None:
            queue = self._queues[message.sender, message.receiver] = _Channel()
        (queue.sent if isinstance(step, Send) else queue.posted).append(message)
        met = queue.meet()
        self._arrived.update(met)
        return met

    def _user(self, message: Message) -> Action:
        """The action that takes a message, which has arrived by then, be it described or not."""
        stage, microbatch, is_forward = user_of(message, self.edges, self._dependencies.groups)
        if not is_forward:
            return self._dependencies.gradient(stage, microbatch)
        return Action(stage, Op.F, microbatch, self._dependencies.groups.get(stage, 1))

    def _messages_for(self, action: Action) -> Sequence[Message]:
        use = use_of(action)
        return self._awaited.get(use, ()) if use is not None else ()

    def _lacks(self, step: Instruction) -> list[str]:
        """What a step still waits for, in words; messages only where all actions before it have run."""
        events = list(self._waits_for(step))
        if isinstance(step, Reduce):
            absent = [rank for rank in step.ranks if rank not in self._come[step]]
            return [f"rank {rank} to come to the {step}" for rank in absent]
        actions = [f"{event}{self._home(event)}" for event in events if isinstance(event, Action)]
        return actions or [f"the {event}{self._behind(event)}" for event in events if isinstance(event, Message)]

    def waiting(self) -> list[Step]:
        """The ranks that cannot go on, and at what; none if all got to the end."""
        rows = zip(self._next, self.instructions, strict=True)
        return [(rank, row[place]) for rank, (place, row) in enumerate(rows) if place < len(row)]

    def stuck(self) -> list[Blocked]:
        """The same, with the cells and in words."""
        return [self._blocked(rank, self.instructions[rank][self._next[rank] :]) for rank, _ in self.waiting()]

    def _blocked(self, rank: int, left: Sequence[Instruction]) -> Blocked:
        cells = tuple(step.action for step in left if isinstance(step, Compute))[:1]
        at = f" at {cells[0]}" if cells else ""
        return Blocked(cells, f"rank {rank} waits{at} for " + " and ".join(self._lacks(left[0])))

    def _home(self, action: Action) -> str:
        """Where an action stands, in words."""
        homes = (f" on rank {rank}" for rank, row in enumerate(self.instructions) if Compute(action) in row)
        return next(homes, ", which is not in the table")

    def _behind(self, message: Message) -> str:
        """Why a message that was made has not arrived, in words."""
        queue = self._queues.get((message.sender, message.receiver), _Channel())
        if queue.met < min(len(queue.sent), len(queue.posted)):
            return f", which is behind a disagreement: the {queue.sent[queue.met]} is sent where the " + (
                f"{queue.posted[queue.met]} is received"
            )
        return ""

    def unmatched(self) -> Message | None:
        """A message that one end of a queue knows and the other does not, once all ranks got to the end."""
        for _, queue in sorted(self._queues.items(), key=lambda item: item[0]):
            for message in (*queue.sent[queue.met :], *queue.posted[queue.met :]):
                return message
        return None


# --- Verify replicas: tables whose stages see the rows of all replicas, played together ---


@dataclass(frozen=True, slots=True)
class Meet(Reduce):
    """Wait until these ranks, one of each replica, have come to the collective of this action."""

    action: Action


@paused()
def verify_replicas(tables: Sequence[Schedule], shared: Collection[int]) -> None:
    """ScheduleError, with its table and the failing cells marked, unless every rank of every replica gets to the end
    of its row. ``tables``: a replica's each, of the same stages. ``shared``: those that see the rows of all."""
    for table in tables:
        table.verify()
    ranks, stages = len(tables[0].rows), len(tables[0].placement)
    instructions: list[tuple[Instruction, ...]] = []
    rows = [row for number, table in enumerate(tables) for row in _shifted(table.rows, number * stages)]
    links = [Link(a + n * stages, b + n * stages) for n, table in enumerate(tables) for a, b in table.edges]
    placement = tuple(shifted(place, n * ranks) for n, table in enumerate(tables) for place in table.placement)
    tied = [[stage + n * stages for stage in group] for n, table in enumerate(tables) for group in table.tied]
    backward = [flag for table in tables for flag in table.backward]
    ahead = {s + n * stages: cap for n, table in enumerate(tables) for s, cap in table.dependencies.ahead.items()}
    for rank, row in enumerate(lower(rows, links, placement, backward, tied, ahead)):
        meeting = tuple(range(rank % ranks, len(rows), ranks))
        instructions.append(tuple(step for one in row for step in _with_meeting(one, meeting, stages, shared)))
    machine = Machine(instructions, links, backward)
    for _ in machine.run():
        pass
    waiting = {rank: step.action for rank, step in machine.waiting() if isinstance(step, Meet)}
    if waiting:
        waits = [f"rank {rank % ranks} of replica {rank // ranks} at {action}" for rank, action in waiting.items()]
        first = next(iter(waiting)) // ranks
        marked = [action for rank, action in waiting.items() if rank // ranks == first]
        raise ScheduleError(
            "the replicas wait for each other: a stage that sees the rows of all runs when all have come to it, and "
            f"these wait for the other replicas: {'; '.join(waits)}. The table of replica {first}:\n"
            f"{grid(tables[first], marked)}"
        )


def _shifted(rows: Sequence[Sequence[Action]], first: int) -> list[list[Action]]:
    return [[action._replace(stage=action.stage + first) for action in row] for row in rows]


def _with_meeting(
    step: Instruction, ranks: tuple[int, ...], stages: int, shared: Collection[int]
) -> tuple[Instruction, ...]:
    """A step, and the collective that is a part of it."""
    if not isinstance(step, Compute) or step.action.op not in (Op.F, Op.B, Op.I):
        return (step,)
    action = step.action._replace(stage=step.action.stage % stages)
    return (step, Meet(ranks, action)) if action.stage in shared else (step,)
