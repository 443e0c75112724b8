"""Verify: runs a table's instructions under the strictest model of message passing that a backend may have.

The model: each directed pair of ranks has one first-in-first-out queue. A rank starts a send and does not wait for the
send, but the send holds its place in the queue until its receive is posted (rendezvous). A compute waits for what it
needs; a release until its message was taken, since a backend may describe a message first. NCCL behaves so; a table
that passes here cannot deadlock there, nor on a backend that buffers. A reduction ends when all of its ranks have
entered it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NoReturn

from fxpipe.errors import ScheduleError
from fxpipe.no_gc import paused
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import ActionTable
from fxpipe.schedules.dependency import Dependencies, EdgeLike, in_order
from fxpipe.schedules.kinds import BACKWARD, BACKWARDS, KINDS, OFFLOADS, Kind
from fxpipe.schedules.lower import Compute, Instruction, Message, Receive, Reduce, Release, Send, Use, use_of, user_of
from fxpipe.schedules.table import grid

Step = tuple[int, Instruction]
"""(rank, the instruction that the rank runs)"""

Event = Action | Message | Reduce
"""What a rank may wait for: an action has run, a message has arrived, or all ranks have entered a reduction."""


@paused()
def verify(schedule: ActionTable) -> None:
    """ScheduleError, with the failing cells marked, if an action is wrong or ranks deadlock.

    A table whose cells can run in the order of their dependencies passes: ``lower`` posts a receive before its use, and
    in its sender's order. Instructions are made only if cells are stuck, or forwards are held back.
    """
    check(schedule)
    able = sum(1 for _ in in_order(schedule.rows, schedule.dependencies))
    if schedule.dependencies.ahead or able < sum(map(len, schedule.rows)):
        prove(schedule, schedule.instructions, schedule.links)


def check(schedule: ActionTable) -> None:
    """Raises ScheduleError, with the failing cells marked, if an action is wrong; does not check for deadlocks."""
    _check_complete(schedule, check_cells(schedule))
    _check_edges(schedule)


@paused()
def prove(
    schedule: ActionTable, instructions: Sequence[Sequence[Instruction]], edges: Sequence[EdgeLike]
) -> list[Step]:
    """Returns all ranks' instructions in an order in which one process can run them; raises ScheduleError, with the
    waiting cells marked, if no order exists."""
    machine = Machine(instructions, edges, schedule.backward)
    order = list(machine.run())
    if machine.waiting:
        cells = chain.from_iterable(map(_next_cell, machine.waiting.values()))
        _fail(schedule, list(cells), machine.deadlock())
    return order


Seen = Sequence[Mapping[int, int]]
"""Stage → micro-batch, or first of a group → the kinds that a table has, a bit of ``_bits`` each."""


def check_cells(schedule: ActionTable) -> Seen:
    """Checks that every action covers a group of its stage, is on the stage's rank, and occurs once."""
    groups, rank_of, bits = schedule.groups, schedule.rank_of, _bits()
    seen = [defaultdict[int, int](int) for _ in groups]
    for rank, row in enumerate(schedule.rows):
        for action in row:
            stage, kind, microbatch, count = action
            size = groups[stage]
            if count != size or microbatch % count:
                fact = f"{action} is no group of stage {stage}, which runs in groups of {size} from micro-batch 0 on"
                _fail(schedule, [action], fact)
            home = rank_of(stage, microbatch)
            if home != rank:
                what = "its stage" if isinstance(schedule.placement[stage], int) else "it"
                _fail(schedule, [action], f"{action} stands on rank {rank}, but {what} is on rank {home}")
            if seen[stage][microbatch] & bits[kind]:
                times = sum(row.count(action) for row in schedule.rows)
                _fail(schedule, [action], f"{action} stands {times} times in the table")
            seen[stage][microbatch] |= bits[kind]
    return seen


def _bits() -> dict[Kind, int]:
    """Kind → its bit, in the order of a row, so that a list of cells tells the two pairs of O and P apart."""
    order = (Kind.F, Kind.R, Kind.B, Kind.O, Kind.P, Kind.I, Kind.OW, Kind.PW, Kind.W)
    return {kind: 1 << number for number, kind in enumerate(dict.fromkeys((*order, *KINDS.values())))}


def _check_complete(schedule: ActionTable, seen: Seen) -> None:
    """Checks that all F are there, B (or I and W) for exactly the stages with a backward, and all R or none. A
    micro-batch has an O together with its P, and not with an R; the pair after I only with an I."""
    bits = _bits()
    free = sum(bit for kind, bit in bits.items() if kind.is_optional and kind.part_of is not BACKWARD)
    copies = sum(bits[kind] for pair in OFFLOADS.values() for kind in pair)
    for stage, size in enumerate(schedule.groups):
        right = [{Kind.F} | kinds for kinds in BACKWARDS] if schedule.backward[stage] else [{Kind.F}]
        # A stage is recomputed for all micro-batches or for none: it holds them from F on, or from R on.
        for kind in bits if schedule.backward[stage] else ():
            is_for_all = kind.is_optional and not bits[kind] & (free | copies)
            if is_for_all and any(found & bits[kind] for found in seen[stage].values()):
                right = [kinds | {kind} for kinds in right]
        with_copies: list[set[Kind]] = []
        for after, pair in OFFLOADS.items() if schedule.backward[stage] else ():
            fitting = [kinds for kinds in (*right, *with_copies) if after in kinds and Kind.R not in kinds]
            with_copies += [kinds | {*pair} for kinds in fitting]
        sums, more = ([sum(bits[kind] for kind in kinds) for kinds in some] for some in (right, with_copies))
        for microbatch in range(0, schedule.microbatches, size):
            found = seen[stage].get(microbatch, 0) & ~free
            if found in sums or found in more:
                continue
            here, *wanted = (
                [Action(stage, kind, microbatch, size) for kind in bits if kind in kinds]
                for kinds in [
                    {kind for kind in bits if found & bits[kind]},
                    *right,
                    *with_copies * bool(found & copies),
                ]
            )
            rank = schedule.rank_of(stage, microbatch)
            needed = ", or ".join(" ".join(map(str, actions)) for actions in wanted)
            present = " ".join(map(str, here)) or "none of them"
            lacks = "" if schedule.backward[stage] else " has no backward, and"
            fact = f"stage {stage}{lacks} needs {needed} on rank {rank}; the table has {present}"
            _fail(schedule, here or schedule.rows[rank][-1:], fact)


def _check_edges(schedule: ActionTable) -> None:
    """Checks that the stages after a gathered stage run in its groups, and that a stage with a backward that feeds
    other stages gets a gradient from at least one of them."""
    groups, backward = schedule.groups, schedule.backward
    # Only the same group can use a group's value; values of single micro-batches can join any group.
    for source, target in schedule.edges:
        if groups[source] not in (1, groups[target]):
            first = Action(target, Kind.F, 0, groups[target])
            fact = f"stage {source} runs in groups of {groups[source]} micro-batches and feeds stage {target}"
            _fail(schedule, [first], f"{fact}, which runs in groups of {groups[target]}; they need the same groups")
    for stage, readers in schedule.dependencies.readers.items():
        if backward[stage] and not any(backward[reader] for reader in readers):
            first = schedule.dependencies.gradient(stage, 0)
            fed = ", ".join(map(str, sorted(readers)))
            _fail(schedule, [first], f"{first} gets no gradient: stage {stage} feeds {fed}, which has no backward")


def _next_cell(left: Sequence[Instruction]) -> list[Action]:
    """Returns the first action among a rank's remaining instructions, if any."""
    return [step.action for step in left if isinstance(step, Compute)][:1]


def _fail(schedule: ActionTable, marked: Collection[Action], fact: str) -> NoReturn:
    raise ScheduleError(f"{fact}\n{grid(schedule, marked)}")


class Machine:
    """Runs all ranks' instructions under the strict model."""

    def __init__(
        self, instructions: Sequence[Sequence[Instruction]], edges: Sequence[EdgeLike], backward: Sequence[bool]
    ) -> None:
        self._rows, self._edges = instructions, edges
        actions = [[step.action for step in row if isinstance(step, Compute)] for row in instructions]
        self._dependencies = Dependencies.from_edges(edges, backward, actions)
        # Action → its rank. A part of a table may lack actions that other actions wait for.
        self._home = {action: rank for rank, row in enumerate(actions) for action in row}
        self._next = [0] * len(instructions)
        self._done: set[Event] = set()
        self._come: defaultdict[Reduce, set[int]] = defaultdict(set)  # reduction → the ranks that have come to it
        # (sender, receiver) → the started sends and the posted receives that have not met yet
        self._queues = defaultdict[tuple[int, int], tuple[deque[Message], deque[Message]]](lambda: (deque(), deque()))
        self._takers = {use_of(action): action for action in self._home}
        self._awaited: defaultdict[Use | None, list[Message]] = defaultdict(list)
        for step in chain.from_iterable(instructions):
            if isinstance(step, Receive):
                self._awaited[self._use(step.message)].append(step.message)

    def _use(self, message: Message) -> Use:
        return user_of(message, self._edges, self._dependencies.groups)

    def run(self) -> Iterator[Step]:
        """Runs each rank until it must wait, then the ranks that may continue; yields each instruction that ran."""
        # The order of the ranks does not matter: a step that can run remains able to run until it has run, so in any
        # order the same steps are stuck in the end.
        able = deque(range(len(self._rows)))
        blocked: dict[Event, list[int]] = {}
        while able:
            rank = able.popleft()
            row = self._rows[rank]
            while self._next[rank] < len(row):
                step = row[self._next[rank]]
                if isinstance(step, Reduce):
                    self._come[step].add(rank)
                missing = next(self._missing(step), None)
                if missing is not None:
                    blocked.setdefault(missing, []).append(rank)
                    break
                self._next[rank] += 1
                for event in self._execute(step):
                    self._done.add(event)
                    able.extend(blocked.pop(event, ()))
                yield rank, step

    def _missing(self, step: Instruction) -> Iterator[Event]:
        """Yields the events that a step still waits for."""
        needed: Iterable[Event] = ()
        if isinstance(step, Compute):
            needed = chain(self._dependencies.before(step.action), self._awaited.get(use_of(step.action), ()))
        elif isinstance(step, Release):
            # Arrival is not enough if a backend describes messages first: the receiver must have taken it.
            needed = (step.message, self._takers[self._use(step.message)])
        elif isinstance(step, Reduce) and len(self._come[step]) < len(step.ranks):
            needed = (step,)
        return (event for event in needed if event not in self._done)

    def _execute(self, step: Instruction) -> Sequence[Event]:
        """Runs a step, and returns the events that have happened with this step."""
        if isinstance(step, Release):
            return ()
        if isinstance(step, Reduce):
            return (step,)
        if isinstance(step, Compute):
            return (step.action,)
        message, met = step.message, []
        # Rendezvous: only the heads of a queue meet. A send whose receive is not posted blocks all later sends.
        sent, posted = self._queues[message.sender, message.receiver]
        (sent if isinstance(step, Send) else posted).append(message)
        while sent and posted and sent[0] == posted[0]:
            met.append(sent.popleft())
            posted.popleft()
        return met

    @property
    def waiting(self) -> dict[int, Sequence[Instruction]]:
        """The ranks that cannot continue, with their remaining instructions; empty if all ranks finished."""
        rows = zip(self._rows, self._next, strict=True)
        return {rank: row[cell:] for rank, (row, cell) in enumerate(rows) if cell < len(row)}

    def deadlock(self) -> str:
        """Returns a message that says for which events each waiting rank waits."""
        facts = []
        for rank, left in self.waiting.items():
            at = "".join(f" at {cell}" for cell in _next_cell(left))
            facts.append(f"rank {rank} waits{at} for {' and '.join(self._lacks(left[0]))}")
        return f"the table deadlocks: {'; '.join(facts)}"

    def _lacks(self, step: Instruction) -> list[str]:
        """Describes the events that a step waits for; messages only if all needed actions have run."""
        if isinstance(step, Reduce):
            absent = [rank for rank in step.ranks if rank not in self._come[step]]
            return [f"rank {rank} to come to the {step}" for rank in absent]
        events = list(self._missing(step))
        actions = [event for event in events if isinstance(event, Action)]
        if actions:
            return [f"{each} on rank {self._home[each]}" if each in self._home else str(each) for each in actions]
        return [f"the {event}" for event in events]
