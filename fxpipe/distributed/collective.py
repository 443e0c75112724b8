"""Collective: one operation of a group of ranks as data, and how several of them run, one after another, beside the
caller: on threads where a CPU moves the bytes, on streams where a GPU does."""

from __future__ import annotations

import ctypes
import datetime
import queue
import threading
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import RunError

Scope = str | tuple[int, ...]
"""A group of ranks as one of them sees it: "pipe", "data", "shard", …, or the pipe ranks that own a parameter."""


class Work(Protocol):
    """A send, a receive or collectives under way."""

    def wait(self) -> object:
        """Returns once later work may use the buffers."""
        ...


class OnceAwaited:
    """A work that is done when it is waited for."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def wait(self) -> None:
        self._call()


class PeerLost(RunError):
    """A wait ended because the rank at the other end is gone, or has closed its connections; or the watch has ended it.

    Its text is what was waited for. ``ranks``: those at the other end. ``reason``: torch's.
    """

    def __init__(self, what: str, ranks: Sequence[int] = (), reason: object = "") -> None:
        super().__init__(what)
        self.ranks, self.reason = ranks, str(reason)


E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """The error without what led to it: frames would keep groups, and so connections, that others wait to be closed."""
    for failure in (error, error.__context__):
        if failure is not None:
            traceback.clear_frames(failure.__traceback__)  # whoever handles it may have the traceback, too
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


class Collective(NamedTuple):
    """One operation on one group.

    ``operation``: "all_reduce" and "maximum" (``output``, in place), "reduce_scatter" (``input``, which it may use up,
    is as long as all outputs together), "all_gather" (``output`` is as long as all inputs together), "reduce" and
    "broadcast" (``output``, in place, to or from the group's rank number ``root``). ``then`` is what follows it at
    once, before the next one of its chain starts.
    """

    operation: str
    scope: Scope
    output: Tensor
    input: Tensor | None = None
    root: int = 0
    then: Callable[[], object] = lambda: None

    @property
    def whole(self) -> Tensor:
        """The longest of its buffers: what the group as a whole works on."""
        return self.output if self.input is None or self.operation == "all_gather" else self.input

    def followed_by(self, call: Callable[[], object]) -> Collective:
        """The same, with ``call`` behind what follows it."""
        return self._replace(then=lambda: [self.then(), call()])

    def alone(self) -> None:
        """What it comes to where the group is one rank."""
        if self.input is not None:
            self.output.copy_(self.input)

    def run(self, perform: Callable[[Collective], object], what: str) -> Exception | None:
        """Performs it, and what follows it; gives the error, to be raised where its chain is waited for."""
        try:
            try:
                perform(self)
            except RuntimeError as error:
                raise PeerLost(f"{self} ({what})", reason=error) from None
            self.then()
        except Exception as error:
            return without_frames(error)
        return None

    def __str__(self) -> str:
        return f"{self.operation.replace('_', '-')} of {self.whole.numel()} elements over {self.scope}"


LooksUp = Callable[[Callable[[], tuple[str, Scope]]], AbstractContextManager[Callable[[], None]]]
"""A context around a wait. The function that it is given says what is waited for, and in which group of ranks. The
function that it yields is called now and then, and raises where the wait is to end."""


class ThreadedChain:
    """Collectives that run one after another, each on the thread of its scope."""

    def __init__(self, steps: Sequence[Collective], what: str, waiting: LooksUp) -> None:
        self._steps: list[Collective | None] = list(steps)
        self._what = what
        self._named = [(f"{step} ({what})", step.scope) for step in steps]
        self._waiting = waiting
        self._done = [threading.Event() for _ in steps]
        self._error: Exception | None = None

    def run(self, place: int, perform: Callable[[Collective], object]) -> None:
        """Performs step ``place`` once the one before is done."""
        if place:
            self._done[place - 1].wait()
        # Taken out of the chain, so that its buffers go once it has run.
        step, self._steps[place] = self._steps[place], None
        # Behind an error later steps run nothing, but pass: their threads must go on.
        if self._error is None and step is not None:
            self._error = step.run(perform, self._what) or self._error
        self._done[place].set()

    def fail(self, error: Exception) -> None:
        """Starts nothing more, and hands the error to whoever waits."""
        self._error = self._error or error
        for done in self._done:
            done.set()

    def wait(self) -> None:
        if not self._done[-1].is_set():
            with self._waiting(self._undone) as look_up:
                while not self._done[-1].wait(SLICE_SECONDS):
                    look_up()
        if self._error is not None:
            raise self._error

    def _undone(self) -> tuple[str, Scope]:
        undone = (named for named, done in zip(self._named, self._done, strict=True) if not done.is_set())
        return next(undone, self._named[-1])


SLICE_SECONDS = 0.5
"""How long to wait before looking up whether the wait is to end, or a signal was sent: an operation that a CPU has
under way cannot be ended, and keeps its connection open, so that nothing else would show it."""


def wait_in_slices(work: dist.Work, group: dist.ProcessGroup, look_up: Callable[[], None]) -> None:
    """Waits for a collective of gloo, so that signals are heard, and ``look_up`` may raise to end it."""
    try:
        while True:
            try:
                work.wait(datetime.timedelta(seconds=SLICE_SECONDS))
                return
            # The end of a slice and a broken connection both raise. Only the work itself knows which it was.
            except RuntimeError:
                if work.is_completed():  # now, or with an error
                    work.wait()
                    return
            look_up()
    except BaseException:
        if not work.is_completed():
            # Never destroyed: gloo cannot end an operation that is under way, and its destructor waits for the end.
            for thing in (work, group):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        raise


# How long a transport that closes waits for what is still under way.
_JOIN_SECONDS = 10.0


class Threads:
    """A thread for each scope, which performs the collectives of that scope in the order in which chains were started.

    An idle thread holds nothing but its queue, and ends with this object: a thread that held the transport would keep
    its groups, and all their threads, for as long as the process lives.
    """

    def __init__(self, perform: Callable[[Collective], object], waiting: LooksUp) -> None:
        self._perform, self._waiting = perform, waiting
        # Scope → the queue of its thread: one order for each group, and groups beside each other.
        self._lanes: dict[Scope, _Lane] = {}
        self._threads: list[threading.Thread] = []
        self._chains: WeakSet[ThreadedChain] = WeakSet()
        weakref.finalize(self, _end, self._lanes)

    def start(self, steps: Sequence[Collective], what: str) -> Work:
        chain = ThreadedChain(steps, what, self._waiting)
        self._chains.add(chain)
        for place, step in enumerate(steps):
            self._lane(step.scope).put(partial(chain.run, place, self._perform))
        return chain

    def _lane(self, scope: Scope) -> _Lane:
        if scope not in self._lanes:
            lane = self._lanes[scope] = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(lane,), name=f"collectives {scope}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self._lanes[scope]

    def fail(self, error: Exception) -> None:
        """Ends what is under way with an error."""
        for chain in list(self._chains):
            chain.fail(error)
        _end(self._lanes)

    def close(self) -> None:
        """Nothing is under way any more."""
        _end(self._lanes)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)


_Lane = queue.SimpleQueue[Callable[[], None] | None]


def _serve(lane: _Lane) -> None:
    while (run := lane.get()) is not None:
        run()
        del run  # its buffers, which nobody may need any more


def _end(lanes: Mapping[Scope, _Lane]) -> None:
    for lane in lanes.values():
        lane.put(None)


class Streams:
    """The same with a stream for each scope; the host waits for nothing."""

    def __init__(self, perform: Callable[[Collective], object]) -> None:
        self._perform = perform
        # of 32 that torch has for all, NCCL's own among them
        self._streams: defaultdict[Scope, torch.Stream] = defaultdict(torch.Stream)

    def start(self, steps: Sequence[Collective], what: str) -> Work:
        # Each step begins behind the one before it, on whatever stream that is; the first one behind what the caller
        # has put on its own stream, which makes the buffers.
        before, failure = torch.accelerator.current_stream().record_event(), None
        for step in steps:
            if failure is None:
                stream = self._streams[step.scope]
                stream.wait_event(before)
                with stream:
                    failure = step.run(self._perform, what)
                before = stream.record_event()
        return OnceAwaited(partial(self._wait, before, failure, steps))

    def _wait(self, end: torch.Event, failure: Exception | None, steps: Sequence[Collective]) -> None:
        """``steps``: their buffers stay until later work is behind the end."""
        torch.accelerator.current_stream().wait_event(end)
        if failure is not None:
            raise failure

    def fail(self, error: Exception) -> None:
        self._streams.clear()

    def close(self) -> None:
        torch.accelerator.synchronize()
