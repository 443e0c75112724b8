"""Collective: an operation of a group of ranks as data. Chains of collectives run in order, asynchronously to the
caller: on threads for CPU tensors, on streams for GPU tensors."""

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
"""Names this rank's group along "pipe", "data", "shard", …, or is the tuple of pipe ranks that own a parameter."""


class Work(Protocol):
    """A send, a receive or collectives under way."""

    def wait(self) -> object:
        """Returns once later work may use the buffers."""
        ...


class OnceAwaited(NamedTuple):
    """A work that runs when ``wait`` is called."""

    wait: Callable[[], object]


class PeerLost(RunError):
    """A wait ended because a peer is gone or has closed its connections, or because the watchdog has ended the wait.

    The text says what the rank waited for. ``ranks``: the peers. ``reason``: torch's error.
    """

    def __init__(self, what: str, ranks: Sequence[int] = (), reason: object = "") -> None:
        super().__init__(what)
        self.ranks, self.reason = ranks, str(reason)


def lost_in_stage(error: BaseException) -> PeerLost | None:
    """Returns the error of a collective that a stage itself makes, if a connection broke; None for any other error."""
    if isinstance(error, RunError) or not (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
        return None
    notes: list[str] = getattr(error, "__notes__", ["of a stage"])
    return PeerLost(f"a collective {notes[0].splitlines()[0]}", reason=error)


E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Clears the error's frames and causes: frames would keep connections open whose closing other ranks wait for."""
    for failure in (error, error.__context__):
        if failure is not None:
            traceback.clear_frames(failure.__traceback__)  # another handler may hold the same traceback
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


class Collective(NamedTuple):
    """An operation on a group of ranks.

    ``operation`` is the name of the operation. "all_reduce" and "maximum" work on ``output`` in place. For
    "reduce_scatter", ``input`` is as long as all outputs together, and may be overwritten. For "all_gather", ``output``
    is as long as all inputs together. "reduce" and "broadcast" work on ``output`` in place, to or from the group's rank
    number ``root``. ``then`` is called when the operation ends, before the next collective of its chain starts.
    """

    operation: str
    scope: Scope
    output: Tensor
    input: Tensor | None = None
    root: int = 0
    then: Callable[[], object] = lambda: None

    @property
    def whole(self) -> Tensor:
        """The longer buffer, which holds the elements of the whole group."""
        return self.output if self.input is None or self.operation == "all_gather" else self.input

    def followed_by(self, call: Callable[[], object]) -> Collective:
        """Returns a copy that calls ``call`` after ``then``."""
        return self._replace(then=lambda: [self.then(), call()])

    def in_bytes(self) -> Collective:
        """The operation on bytes if it only copies: gloo and NCCL do not know every dtype (float8, for example)."""
        if self.operation not in ("all_gather", "broadcast"):
            return self
        source = None if self.input is None else self.input.view(-1).view(torch.uint8)
        return self._replace(output=self.output.view(-1).view(torch.uint8), input=source)

    def alone(self) -> None:
        """Performs the operation for a group of a single rank."""
        if self.input is not None:
            self.output.copy_(self.input)

    def run(self, perform: Callable[[Collective], object], what: str) -> Exception | None:
        """Performs the operation and calls ``then``; returns the error, which the wait for the chain raises."""
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
"""A context manager around a wait. Its argument is a function that returns the awaited event as text, and its scope.
The manager yields a function, which the wait calls repeatedly, and which raises an error to end the wait."""


class ThreadedChain:
    """Collectives that run in order, each on the thread of its scope."""

    def __init__(self, steps: Sequence[Collective], what: str, waiting: LooksUp) -> None:
        self._steps: list[Collective | None] = list(steps)
        self._what = what
        self._named = [(f"{step} ({what})", step.scope) for step in steps]
        self._waiting = waiting
        self._done = [threading.Event() for _ in steps]
        self._error: Exception | None = None

    def run(self, index: int, perform: Callable[[Collective], object]) -> None:
        """Performs step ``index`` after the previous step is done."""
        if index:
            self._done[index - 1].wait()
        # Remove the step from the chain, so that its buffers are freed after it has run.
        step, self._steps[index] = self._steps[index], None
        # After an error later steps are skipped, but still marked as done: their threads must go on.
        if self._error is None and step is not None:
            self._error = step.run(perform, self._what) or self._error
        self._done[index].set()

    def fail(self, error: Exception) -> None:
        """Skips the remaining steps; ``wait`` raises the error."""
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
"""Seconds to wait before checking for a verdict or a signal: a gloo operation cannot be cancelled once started, and
keeps its connection open, so that no error would end the wait."""


def wait_in_slices(work: dist.Work, group: dist.ProcessGroup, look_up: Callable[[], None]) -> None:
    """Waits for a gloo collective in slices, so that Python handles signals; ``look_up`` may raise to end the wait."""
    try:
        while True:
            try:
                work.wait(datetime.timedelta(seconds=SLICE_SECONDS))
                return
            # The end of a slice and a broken connection both raise; is_completed tells them apart.
            except RuntimeError:
                if work.is_completed():  # done just now, or failed
                    work.wait()
                    return
            look_up()
    except BaseException:
        if not work.is_completed():
            # Leak both: gloo cannot cancel an operation that is under way, and its destructor waits for the end.
            for thing in (work, group):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        raise


# Seconds that a closing transport waits for collectives that are still under way.
_JOIN_SECONDS = 10.0


class Threads:
    """A thread for each scope, which performs the collectives of that scope in the order in which chains were started.

    An idle thread references only its queue, and ends with this object: a thread that referenced the transport would
    keep its groups, and all their threads, until the process ends.
    """

    def __init__(self, perform: Callable[[Collective], object], waiting: LooksUp) -> None:
        self._perform, self._waiting = perform, waiting
        # Scope → the queue of its thread: collectives of a group run in order, those of different groups in parallel.
        self._lanes: dict[Scope, _Lane] = {}
        self._threads: list[threading.Thread] = []
        self._chains: WeakSet[ThreadedChain] = WeakSet()
        weakref.finalize(self, _end, self._lanes)

    def start(self, steps: Sequence[Collective], what: str) -> Work:
        chain = ThreadedChain(steps, what, self._waiting)
        self._chains.add(chain)
        for index, step in enumerate(steps):
            self._lane(step.scope).put(partial(chain.run, index, self._perform))
        return chain

    def _lane(self, scope: Scope) -> _Lane:
        if scope not in self._lanes:
            lane = self._lanes[scope] = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(lane,), name=f"collectives {scope}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self._lanes[scope]

    def fail(self, error: Exception) -> None:
        """Ends all chains under way with an error."""
        for chain in list(self._chains):
            chain.fail(error)
        _end(self._lanes)

    def close(self) -> None:
        """Ends the threads; no chain may be under way."""
        _end(self._lanes)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)


_Lane = queue.SimpleQueue[Callable[[], None] | None]


def _serve(lane: _Lane) -> None:
    while (run := lane.get()) is not None:
        run()
        del run  # frees its buffers


def _end(lanes: Mapping[Scope, _Lane]) -> None:
    for lane in lanes.values():
        lane.put(None)


class Streams:
    """Like ``Threads``, with a stream for each scope; the host does not wait."""

    def __init__(self, perform: Callable[[Collective], object]) -> None:
        self._perform = perform
        # streams from torch's pool of 32, which NCCL's streams come from, too
        self._streams: defaultdict[Scope, torch.Stream] = defaultdict(torch.Stream)

    def start(self, steps: Sequence[Collective], what: str) -> Work:
        # Each step waits for the previous step, on any stream; the first step waits for the work on the caller's
        # stream, which fills the buffers.
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
        """``steps`` keeps the buffers alive until the caller's stream waits for the end."""
        torch.accelerator.current_stream().wait_event(end)
        if failure is not None:
            raise failure

    def fail(self, error: Exception) -> None:
        self._streams.clear()

    def close(self) -> None:
        torch.accelerator.synchronize()
