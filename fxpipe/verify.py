"""Verify: runs a table's instructions under the strictest model of message passing that a backend may show.

The model: each directed pair of ranks has one first-in-first-out queue. A send is started and not waited for, but
holds its place in the queue until its receive has been posted (rendezvous). A compute waits for what it needs. NCCL
behaves so; a table that passes here cannot hang there, nor on a backend that buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from fxpipe.action import Action, Op
from fxpipe.errors import ScheduleError
from fxpipe.lower import Compute, EdgeLike, Instruction, Message, Receive, Release, Send, needs, user_of
from fxpipe.show import grid

if TYPE_CHECKING:
    from fxpipe.schedule import Schedule

Step = tuple[int, Instruction]
"""(rank, what it does)."""


def verify(schedule: Schedule) -> None:
    """ScheduleError, with the table and the failing cell marked, unless every rank gets to the end of its row."""
    _check_cells(schedule)
    machine = Machine(schedule.instructions, schedule.links, schedule.backward)
    machine.run()
    stuck = machine.stuck()
    if stuck:
        action, reasons = stuck
        _fail(schedule, action, "the table comes to a halt: " + "; ".join(reasons))
    unreceived = machine.unmatched()
    if unreceived:
        _fail(schedule, None, f"{unreceived} is sent and never received, or received and never sent")


def execution_order(
    instructions: Sequence[Sequence[Instruction]], edges: Sequence[EdgeLike], backward: Sequence[bool]
) -> list[Step]:
    """All ranks' instructions in one order in which a single process can run them."""
    machine = Machine(instructions, edges, backward)
    machine.run()
    if machine.stuck():
        raise ScheduleError("the table comes to a halt; verify() says where")
    return machine.order


def _check_cells(schedule: Schedule) -> None:
    """Every F once, and every B (or I and W) once for each stage that has a backward, on the stage's own rank."""
    found = Counter(action for row in schedule.rows for action in row)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if not 0 <= action.stage < len(schedule.placement):
                _fail(schedule, action, f"{action} is of a stage that does not exist")
            if not 0 <= action.microbatch < schedule.microbatches:
                _fail(
                    schedule,
                    action,
                    f"{action} is of a micro-batch outside of 0..{schedule.microbatches - 1}",
                )
            if schedule.placement[action.stage] != rank:
                home = schedule.placement[action.stage]
                _fail(schedule, action, f"{action} stands on rank {rank}, but its stage is on rank {home}")
            if found[action] > 1:
                _fail(schedule, action, f"{action} stands {found[action]} times in the table")
    for stage, has_backward in enumerate(schedule.backward):
        for microbatch in range(schedule.microbatches):
            full, halves = (
                Action(stage, Op.B, microbatch),
                [Action(stage, op, microbatch) for op in (Op.I, Op.W)],
            )
            present = [action for action in (full, *halves) if action in found]
            if Action(stage, Op.F, microbatch) not in found:
                _fail(schedule, None, f"{Action(stage, Op.F, microbatch)} is missing")
            if present not in ([[full], halves] if has_backward else [[]]):
                wanted = f"{full}, or {halves[0]} and {halves[1]}" if has_backward else "no backward"
                got = ", ".join(map(str, present)) or "none"
                _fail(schedule, None, f"stage {stage} needs {wanted} for micro-batch {microbatch}; found: {got}")


def _fail(schedule: Schedule, action: Action | None, fact: str) -> NoReturn:
    raise ScheduleError(f"{fact}\n{grid(schedule, marked=action)}")


@dataclass
class Machine:
    """Plays all ranks' instructions under the strict model. ``order`` is what has run, in an order that works."""

    instructions: Sequence[Sequence[Instruction]]
    edges: Sequence[EdgeLike]
    backward: Sequence[bool]
    order: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = [0] * len(self.instructions)
        self._sent: dict[tuple[int, int], list[Message]] = {}
        self._posted: dict[tuple[int, int], list[Message]] = {}
        self._done: set[Action] = set()
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
                while self._next[rank] < len(row) and not self._waits_for(rank, row[self._next[rank]]):
                    self._execute(rank, row[self._next[rank]])
                    self._next[rank] += 1
                    progress = True

    def _execute(self, rank: int, step: Instruction) -> None:
        self.order.append((rank, step))
        if isinstance(step, Compute):
            self._done.add(step.action)
        elif isinstance(step, Send | Receive):
            queues = self._sent if isinstance(step, Send) else self._posted
            queues.setdefault((step.message.sender, step.message.receiver), []).append(step.message)

    def _arrived(self, message: Message) -> bool:
        """Whether a message's turn came: both ends of its queue have got to it, and agree on all before it."""
        pair = message.sender, message.receiver
        sent, posted = self._sent.get(pair, []), self._posted.get(pair, [])
        both = min(len(sent), len(posted))
        return message in sent[:both] and sent[: sent.index(message) + 1] == posted[: sent.index(message) + 1]

    def _waits_for(self, rank: int, step: Instruction) -> list[str]:
        if isinstance(step, Release) and not self._arrived(step.message):
            return [f"rank {rank} waits until rank {step.message.receiver} has received {step.message}"]
        if not isinstance(step, Compute):
            return []
        action = step.action
        key = (rank, action.stage, action.microbatch, action.op is Op.F)
        missing = [] if action.op is Op.W else [m for m in self._awaited.get(key, ()) if not self._arrived(m)]
        reasons = [f"rank {rank} waits at {action} for {message}" for message in missing]
        for other in needs(action, self.edges, self.backward):
            if other not in self._done and not reasons:
                reasons.append(f"rank {rank} waits at {action} for {other}, which has not run")
        return reasons

    def stuck(self) -> tuple[Action, list[str]] | None:
        """The first action that cannot run, and who waits for what; None if all got to the end."""
        first, reasons = None, []
        for rank, row in enumerate(self.instructions):
            if self._next[rank] < len(row):
                step = row[self._next[rank]]
                first = first or next(s.action for s in row[self._next[rank] :] if isinstance(s, Compute))
                reasons += self._waits_for(rank, step)
        return (first, reasons) if first is not None else None

    def unmatched(self) -> Message | None:
        """A message that one end of a queue knows and the other does not, once all ranks got to the end."""
        for pair in {*self._sent, *self._posted}:
            sent, posted = self._sent.get(pair, []), self._posted.get(pair, [])
            if sent != posted:
                return next(m for m in [*sent, *posted] if m not in sent or m not in posted)
        return None
