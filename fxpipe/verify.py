"""Verify: runs a table's instructions under the strictest model of message passing that a backend may show.

The model: each directed pair of ranks has one first-in-first-out queue. A send is started and not waited for, but
holds its place in the queue until its receive has been posted (rendezvous). A compute waits for what it needs. NCCL
behaves so; a table that passes here cannot hang there, nor on a backend that buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from fxpipe.action import Action, Op
from fxpipe.dependency import Dependencies, EdgeLike
from fxpipe.errors import ScheduleError
from fxpipe.lower import Compute, Instruction, Message, Receive, Release, Send, user_of
from fxpipe.show import grid

if TYPE_CHECKING:
    from fxpipe.schedule import Schedule

Step = tuple[int, Instruction]
"""(rank, what it does)."""


def verify(schedule: Schedule) -> None:
    """ScheduleError, with the table and the failing cells marked, unless every rank gets to the end of its row."""
    _check_cells(schedule)
    _check_complete(schedule)
    machine = Machine(schedule.instructions, schedule.links, schedule.backward)
    machine.run()
    stuck = machine.stuck()
    if stuck:
        cells = [action for halt in stuck for action in halt.cells]
        _fail(schedule, cells, "the table comes to a halt: " + "; ".join(halt.reason for halt in stuck))
    unmatched = machine.unmatched()
    if unmatched:
        _fail(schedule, (), f"{unmatched} is sent and never received, or received and never sent")


def execution_order(
    instructions: Sequence[Sequence[Instruction]], edges: Sequence[EdgeLike], backward: Sequence[bool]
) -> list[Step]:
    """All ranks' instructions in one order in which a single process can run them."""
    machine = Machine(instructions, edges, backward)
    machine.run()
    stuck = machine.stuck()
    if stuck:
        raise ScheduleError("the table comes to a halt: " + "; ".join(halt.reason for halt in stuck))
    return machine.order


def _check_cells(schedule: Schedule) -> None:
    """Every action is of a stage and a micro-batch that exist, on the stage's own rank, and there once."""
    found = Counter(action for row in schedule.rows for action in row)
    last = schedule.microbatches - 1
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if not 0 <= action.stage < len(schedule.placement):
                _fail(schedule, [action], f"{action} is of a stage outside of 0..{len(schedule.placement) - 1}")
            if not 0 <= action.microbatch <= last:
                _fail(schedule, [action], f"{action} is of a micro-batch outside of 0..{last}")
            home = schedule.placement[action.stage]
            if home != rank:
                _fail(schedule, [action], f"{action} stands on rank {rank}, but its stage is on rank {home}")
            if found[action] > 1:
                _fail(schedule, [action], f"{action} stands {found[action]} times in the table")


def _check_complete(schedule: Schedule) -> None:
    """Every F is there, and B (or I and W) for each stage that has a backward, and for no other."""
    found = {action for row in schedule.rows for action in row}
    for stage, has_backward in enumerate(schedule.backward):
        for microbatch in range(schedule.microbatches):
            forward, full, *halves = (Action(stage, op, microbatch) for op in (Op.F, Op.B, Op.I, Op.W))
            present = [action for action in (full, *halves) if action in found]
            if forward not in found:
                _fail_missing(schedule, forward, present[:1], f"{forward} is missing")
            if not has_backward and present:
                _fail(schedule, present, f"stage {stage} has no backward, but {present[0]} is in the table")
            if has_backward and present not in ([full], halves):
                got = ", ".join(map(str, present)) or "neither"
                fact = f"stage {stage} needs {full}, or {halves[0]} and {halves[1]}; the table has {got}"
                _fail_missing(schedule, full, present or [forward], fact)


def _fail_missing(schedule: Schedule, missing: Action, related: Collection[Action], fact: str) -> NoReturn:
    """Marks the first cell that waits for a missing action, or else those ``related`` to it, or its row's last."""
    rank = schedule.placement[missing.stage]
    for other, row in enumerate(schedule.rows):
        for action in row:
            if missing in schedule.dependencies.before(action):
                fact = f"{fact}; {action} on rank {other} waits for {missing} on rank {rank}"
                _fail(schedule, [action], fact)
    _fail(schedule, related or schedule.rows[rank][-1:], f"{fact}; it belongs on rank {rank}")


def _fail(schedule: Schedule, marked: Collection[Action], fact: str) -> NoReturn:
    raise ScheduleError(f"{fact}\n{grid(schedule, marked)}")


@dataclass(frozen=True)
class Halt:
    """A rank that cannot go on: the cell at which it waits, if any is left in its row, and for what."""

    cells: tuple[Action, ...]
    reason: str


@dataclass
class _Queue:
    """One directed pair's messages: as sent, as posted, and how many at their heads have met."""

    sent: list[Message] = field(default_factory=list)
    posted: list[Message] = field(default_factory=list)
    met: int = 0

    def meet(self) -> list[Message]:
        """The messages whose turn has come: both ends have got to them, and agree on all before."""
        before = self.met
        while self.met < min(len(self.sent), len(self.posted)) and self.sent[self.met] == self.posted[self.met]:
            self.met += 1
        return self.sent[before : self.met]


@dataclass
class Machine:
    """Plays all ranks' instructions under the strict model. ``order`` is what has run, in an order that works."""

    instructions: Sequence[Sequence[Instruction]]
    edges: Sequence[EdgeLike]
    backward: Sequence[bool]
    order: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = [0] * len(self.instructions)
        self._queues: dict[tuple[int, int], _Queue] = {}
        self._arrived: set[Message] = set()
        self._done: set[Action] = set()
        self._dependencies = Dependencies.of(self.edges, self.backward)
        self._awaited: dict[tuple[int, int, int, bool], list[Message]] = {}
        for rank, row in enumerate(self.instructions):
            for step in row:
                if isinstance(step, Receive):
                    self._awaited.setdefault((rank, *user_of(step.message, self.edges)), []).append(step.message)

    def run(self) -> None:
        """Lets each rank run until it must wait, in turns, until none can go on."""
        progress = True
        while progress:
            progress = False
            for rank, row in enumerate(self.instructions):
                while self._next[rank] < len(row) and not self._lacks(rank, row[self._next[rank]]):
                    self._execute(rank, row[self._next[rank]])
                    self._next[rank] += 1
                    progress = True

    def _execute(self, rank: int, step: Instruction) -> None:
        self.order.append((rank, step))
        if isinstance(step, Compute):
            self._done.add(step.action)
        elif isinstance(step, Send | Receive):
            queue = self._queues.setdefault((step.message.sender, step.message.receiver), _Queue())
            (queue.sent if isinstance(step, Send) else queue.posted).append(step.message)
            self._arrived.update(queue.meet())

    def _lacks(self, rank: int, step: Instruction) -> list[Action | Message]:
        """What a rank waits for before ``step``: actions that have not run, messages that have not arrived."""
        if isinstance(step, Release):
            return [] if step.message in self._arrived else [step.message]
        if not isinstance(step, Compute):
            return []
        action = step.action
        key = (rank, action.stage, action.microbatch, action.op is Op.F)
        messages = [] if action.op is Op.W else self._awaited.get(key, [])
        return [
            *(other for other in self._dependencies.before(action) if other not in self._done),
            *(message for message in messages if message not in self._arrived),
        ]

    def stuck(self) -> list[Halt]:
        """The ranks that cannot go on; none if all got to the end."""
        return [
            self._halt(rank, row[self._next[rank] :])
            for rank, row in enumerate(self.instructions)
            if self._next[rank] < len(row)
        ]

    def _halt(self, rank: int, left: Sequence[Instruction]) -> Halt:
        cells = tuple(step.action for step in left if isinstance(step, Compute))[:1]
        lacks = self._lacks(rank, left[0])
        actions = [f"{other}{self._home(other)}" for other in lacks if isinstance(other, Action)]
        messages = [f"the {other}" for other in lacks if isinstance(other, Message)]
        at = f" at {cells[0]}" if cells else ""
        return Halt(cells, f"rank {rank} waits{at} for " + " and ".join(actions or messages))

    def _home(self, action: Action) -> str:
        """Where an action stands, in words."""
        homes = (f" on rank {rank}" for rank, row in enumerate(self.instructions) if Compute(action) in row)
        return next(homes, ", which is not in the table")

    def unmatched(self) -> Message | None:
        """A message that one end of a queue knows and the other does not, once all ranks got to the end."""
        for _, queue in sorted(self._queues.items(), key=lambda item: item[0]):
            for message in (*queue.sent[queue.met :], *queue.posted[queue.met :]):
                return message
        return None
