"""A transport that behaves as NCCL does, without NCCL: every rank a thread of one process, taking turns.

- One first-in-first-out queue per directed pair of ranks. A send ends only when its receive has been posted, and not
  before those in front of it; its buffer is read at that moment.
- One first-in-first-out queue of collectives per group, likewise: one ends when all members have come to it, and
  their buffers are read and written at that moment.
- One rank runs until it must wait; a seed draws who goes on. Random state is therefore safe, every interleaving can
  be tried, and a hang replays: it is found at once, and told as who waits for whom.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from fxpipe import compiler
from fxpipe.distributed import processes
from fxpipe.distributed.collective import Collective, OnceAwaited, PeerLost, Scope, Work
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import NO_GROUPS, Groups, Pair, Transport
from fxpipe.errors import RunError
from fxpipe.plain_data import decode, encode_for_all
from tests import device

T = TypeVar("T")

_seat = threading.local()


def current_seat() -> Seat | None:
    """The place of this thread in a strict world, if it runs in one."""
    return getattr(_seat, "seat", None)


@dataclass(frozen=True)
class Seat:
    """One rank of a strict world."""

    world: StrictWorld
    rank: int


def run_strict(function: Callable[[int], T], ranks: int, seed: int = 0) -> list[T]:
    """``function(rank)`` on every rank of a strict world of that many; the results by rank.

    Inside, ``fxpipe.compile`` uses the strict transport. The first error of any rank is raised here, and a hang is a
    RunError that says who waits for what.
    """
    world = StrictWorld(ranks, seed)
    results: list[Any] = [None] * ranks
    threads_per_kernel = torch.get_num_threads()

    def body(rank: int) -> None:
        torch.set_num_threads(threads_per_kernel)  # OpenMP keeps this per thread, and it changes bits
        device.place()
        _seat.seat = Seat(world, rank)
        try:
            world.enter(rank)
            with torch.autograd.set_multithreading_enabled(False):  # autograd has one thread for all ranks on a GPU
                results[rank] = function(rank)
        except BaseException as error:  # handed to the caller below
            world.fail(error)
        finally:
            world.leave(rank)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(ranks)]
    with mock.patch.object(compiler, "connect", connect):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if world.error is not None:
        raise world.error
    return results


def connect(topology: Topology, *options: Any) -> Transport:
    """``processes.connect``, and in a thread of a strict world the strict transport of its rank."""
    seat = current_seat()
    if seat is None:
        return processes.connect(topology, *options)
    assert topology.world_size == seat.world.size
    return StrictTransport(seat, topology)


@dataclass
class StrictWorld:
    """The queues and groups of all ranks, and the baton that passes between them."""

    size: int
    seed: int
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._turn = threading.Condition()
        self._running: int | None = None
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {
            r: (lambda: True, "start") for r in range(self.size)
        }
        self._draw = random.Random(self.seed)
        self._entered = 0
        self.queues: dict[tuple[int, int, int], _PairQueue] = {}
        self.meetings: dict[tuple[Any, ...], _Meeting] = {}
        self.transports = [0] * self.size
        """How many each rank has made: all make them in the same order, so the number tells them apart."""

    def enter(self, rank: int) -> None:
        with self._turn:
            self._entered += 1
            if self._entered == self.size:
                self._pass_on()
            self._turn.wait_for(lambda: self._running == rank)
            self._waiting.pop(rank, None)

    def leave(self, rank: int) -> None:
        with self._turn:
            self._waiting.pop(rank, None)
            self._pass_on()

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Gives the turn away until ``ready()``; RunError where all wait and none is ready."""
        with self._turn:
            self._waiting[rank] = (ready, what)
            self._pass_on()
            self._turn.wait_for(lambda: self._running == rank)
            self._waiting.pop(rank)
            if not ready():
                raise PeerLost(str(self.error))

    def _pass_on(self) -> None:
        able = sorted(rank for rank, (ready, _) in self._waiting.items() if self.error is not None or ready())
        if not able and self._waiting:
            waits = "; ".join(f"rank {rank} waits for {what}" for rank, (_, what) in sorted(self._waiting.items()))
            self.error = RunError(f"the ranks hang (seed {self.seed}): {waits}")
            able = sorted(self._waiting)
        self._running = self._draw.choice(able) if able else None
        self._turn.notify_all()

    def fail(self, error: BaseException) -> None:
        """Everybody who waits, now or later, ends with an error; the first one is kept."""
        if self.error is None:
            self.error = error


@dataclass
class _PairQueue:
    """One directed pair's transfers: sends and receives matched in order."""

    sends: deque[_Transfer] = field(default_factory=deque)
    receives: deque[_Transfer] = field(default_factory=deque)

    def match(self) -> None:
        while self.sends and self.receives:
            send, receive = self.sends.popleft(), self.receives.popleft()
            if send.buffer.shape != receive.buffer.shape or send.buffer.dtype != receive.buffer.dtype:
                sizes = [f"{buffer.numel()} {buffer.dtype}" for buffer in (send.buffer, receive.buffer)]
                raise RunError(f"a message of {sizes[0]} meets a receive of {sizes[1]}")
            receive.buffer.copy_(send.buffer)
            send.done = receive.done = True


@dataclass
class _Transfer:
    seat: Seat
    buffer: Tensor
    what: str
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            self.seat.world.wait(self.seat.rank, lambda: self.done, self.what)


@dataclass
class _StrictChain:
    """Collectives of one rank that run one after another."""

    seat: Seat
    steps: Sequence[Collective]
    what: str
    done: int = 0

    def go_on(self) -> None:
        """A step is over."""
        self.steps[self.done].then()
        self.done += 1

    def wait(self) -> None:
        if self.done < len(self.steps):
            self.seat.world.wait(self.seat.rank, lambda: self.done == len(self.steps), self.what)


@dataclass
class _Meeting:
    """One collective call: what each member brought, and its result once all have come."""

    kind: str
    brought: dict[int, Any] = field(default_factory=dict)
    left: int = 0
    """How many members have taken the result."""


class StrictTransport:
    """One rank's view of a strict world."""

    def __init__(self, seat: Seat, topology: Topology) -> None:
        self._seat = seat
        self.number, self.rank = 1, seat.rank
        self._ranks: dict[Scope, list[int]] = {
            scope: next(group for group in topology.groups(axis) if seat.rank in group)
            for scope, axis in (("pipe", "pipe"), ("data", "batch"))
        }
        self._ranks["all"] = list(range(topology.world_size))
        self.pipe_rank: int | None = self._ranks["pipe"].index(seat.rank)
        self.data_rank = self._ranks["data"].index(seat.rank)
        self.data_size = len(self._ranks["data"])
        self.device = torch.get_default_device()
        self._calls: dict[tuple[Any, ...], int] = {}
        seat.world.transports[seat.rank] += 1
        self._generation = seat.world.transports[seat.rank]

        self._lanes: dict[Scope, deque[tuple[_StrictChain, int]]] = {}

    def ranks(self, scope: Scope) -> tuple[int, ...]:
        return tuple(self._ranks[scope])

    def open(self, pairs: Sequence[Pair], owners: Sequence[tuple[int, ...]], groups: Groups = NO_GROUPS) -> None:
        pipe = self._ranks["pipe"]
        self._pairs: dict[Pair, Pair] = {}
        self.open_more(pairs)
        self._ranks |= {owner: [pipe[rank] for rank in owner] for owner in owners if self.pipe_rank in owner}
        for scope, ranks in groups.items():
            self._ranks[scope] = list(next(group for group in ranks if self._seat.rank in group))

    def open_more(self, pairs: Sequence[Pair]) -> None:
        pipe = self._ranks["pipe"]
        self._pairs |= {(sender, receiver): (pipe[sender], pipe[receiver]) for sender, receiver in pairs}

    def _queue(self, pair: Pair) -> _PairQueue:
        return self._seat.world.queues.setdefault((self._generation, *self._pairs[pair]), _PairQueue())

    def send(self, pair: Pair, buffer: Tensor) -> Work:
        transfer = _Transfer(self._seat, buffer, f"rank {self._pairs[pair][1]} to receive")
        queue = self._queue(pair)
        queue.sends.append(transfer)
        queue.match()
        return transfer

    def receive(self, pair: Pair, buffer: Tensor) -> Work:
        transfer = _Transfer(self._seat, buffer, f"a message from rank {self._pairs[pair][0]}")
        queue = self._queue(pair)
        queue.receives.append(transfer)
        queue.match()
        return transfer

    def gather(self, scope: str, item: Any) -> list[Any]:
        told = self._meet(scope, "gather", encode_for_all(item))
        return [decode(each, f"rank {rank}") for each, rank in zip(told, self._ranks[scope], strict=True)]

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        return tuple(self._meet(scope, "gather_int", item))

    def all_reduce(self, scope: Scope, tensor: Tensor) -> None:
        brought = self._meet(scope, "all_reduce", tensor.clone())
        total = brought[0].clone()
        for other in brought[1:]:
            total += other
        tensor.copy_(total)

    def broadcast(self, scope: Scope, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._meet(scope, "broadcast", tensor.clone())[source])

    def tell(self, scope: Scope, tensor: Tensor, source: int) -> Work:
        return OnceAwaited(partial(self.broadcast, scope, tensor, source))

    def start(self, steps: Sequence[Collective], what: str) -> Work:
        chain = _StrictChain(self._seat, steps, what)
        for place, step in enumerate(steps):
            self._lanes.setdefault(step.scope, deque()).append((chain, place))
        self._advance()
        return chain

    def _advance(self) -> None:
        """Comes to every meeting that is next on its lane; one that is complete takes its members on."""
        for scope, lane in self._lanes.items():
            if not lane or lane[0][0].done != lane[0][1]:
                continue
            chain, place = lane[0]
            members = tuple(self._ranks[scope])
            number = self._calls.get((scope, *members), 0)
            meeting = self._seat.world.meetings.setdefault(
                (self._generation, scope, members, number), _Meeting(chain.steps[place].operation)
            )
            if self._seat.rank in meeting.brought:
                continue
            if meeting.kind != chain.steps[place].operation:
                raise RunError(f"rank {self._seat.rank} comes to {chain.steps[place]} where others {meeting.kind}")
            meeting.brought[self._seat.rank] = self, chain
            if len(meeting.brought) == len(members):
                del self._seat.world.meetings[self._generation, scope, members, number]
                self._end(scope, [meeting.brought[rank] for rank in members])

    @staticmethod
    def _end(scope: Scope, members: Sequence[tuple[StrictTransport, _StrictChain]]) -> None:
        perform([chain.steps[chain.done] for _, chain in members])
        for transport, chain in members:
            transport._lanes[scope].popleft()
            key = (scope, *transport._ranks[scope])
            transport._calls[key] = transport._calls.get(key, 0) + 1
            chain.go_on()
        for transport, _ in members:
            transport._advance()

    def _meet(self, scope: Scope, kind: str, item: Any) -> list[Any]:
        """What every member brought to its next collective call on this group, by rank."""
        members = tuple(self._ranks[scope])
        number = self._calls[members] = self._calls.get(members, 0) + 1
        key = (self._generation, members, number)
        meeting = self._seat.world.meetings.setdefault(key, _Meeting(kind))
        if meeting.kind != kind:
            raise RunError(f"rank {self._seat.rank} calls {kind} where others call {meeting.kind} on ranks {members}")
        meeting.brought[self._seat.rank] = item
        if len(meeting.brought) < len(members):
            what = f"ranks {sorted(set(members) - set(meeting.brought))} to join {kind}"
            self._seat.world.wait(self._seat.rank, lambda: len(meeting.brought) == len(members), what)
        meeting.left += 1
        if meeting.left == len(members):
            del self._seat.world.meetings[key]
        return [meeting.brought[rank] for rank in members]

    def abort(self, reason: str) -> None:
        self._seat.world.fail(RunError(f"rank {self._seat.rank}: {reason}"))

    def close(self) -> None:
        pass

    def explain(self, lost: PeerLost) -> str:
        return f"another rank failed: {lost}"


def perform(steps: Sequence[Collective]) -> None:
    """One collective, on the buffers of all members of its group in order."""
    operation, root = steps[0].operation, steps[0].root
    sizes = {(step.output.numel(), step.output.dtype, step.root) for step in steps}
    if len(sizes) > 1:
        raise RunError(f"{operation}: the members' buffers or roots differ, {sorted(map(str, sizes))}")
    if operation == "all_gather":
        result = torch.cat([_input(step) for step in steps])
    elif operation == "broadcast":
        result = steps[root].output.clone()
    else:
        given = [step.output if operation in ("all_reduce", "maximum", "reduce") else _input(step) for step in steps]
        result = given[0].clone()
        for other in given[1:]:
            result = result.maximum(other) if operation == "maximum" else result + other
    for place, step in enumerate(steps):
        if operation == "reduce_scatter":
            step.output.copy_(result.chunk(len(steps))[place])
        elif operation != "reduce" or place == root:
            step.output.copy_(result)


def _input(step: Collective) -> Tensor:
    assert step.input is not None
    return step.input
