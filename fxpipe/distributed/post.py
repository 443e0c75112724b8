"""Post: what the ranks of a world tell each other beside their work, through a store, by a thread of its own.

A store may not answer, where the process that holds it is stopped: then only this thread waits.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from fxpipe.distributed.process_state import ProcessId
from fxpipe.distributed.whereabouts import Call

PERIOD = 0.5
"""Seconds between two exchanges."""
_PER_RANK = 0.0005  # seconds between two exchanges for each rank of a large world, all of which ask one store
_ANSWER = timedelta(seconds=10)
_LONGEST = 4000
"""Characters of a text that travels."""

ENDED = "ended"
"""The key under which a rank tells that its program ends with an error."""


def failed(number: int) -> str:
    """The key under which a rank tells that a call of the transport of that number has failed."""
    return f"{number}/failed"


class Ending(NamedTuple):
    """Why a run ends, in one rank's words. ``error``: it is an exception of that rank's own; else it is what it found
    of ``culprits``."""

    by: int
    error: bool
    text: str
    culprits: tuple[int, ...]

    def packed(self) -> str:
        return json.dumps(self._replace(text=self.text[:_LONGEST]))

    @staticmethod
    def unpacked(text: str) -> Ending:
        by, error, words, culprits = json.loads(text)
        return Ending(int(by), bool(error), str(words)[:_LONGEST], tuple(map(int, culprits)))


class Report(NamedTuple):
    """What a rank is doing, as others hear of it. ``where``: in words behind its number; ``age``: for how many seconds.
    ``waits_for``: what, and ``ranks``: for whom. ``extends``: whether others give it more time. ``left``: its program
    has ended. ``calls``: since ``epoch``."""

    process: ProcessId
    where: str
    age: float
    waits_for: str
    ranks: tuple[int, ...]
    extends: bool
    left: bool
    epoch: int
    calls: tuple[Call, ...]
    noted: tuple[str, ...]

    def packed(self, beat: int) -> str:
        return json.dumps([beat, *self])

    @staticmethod
    def unpacked(text: str) -> tuple[int, Report]:
        beat, process, where, age, waits_for, ranks, extends, left, epoch, calls, noted = json.loads(text)
        known = tuple(Call(n, part, name, None if some is None else tuple(some)) for n, part, name, some in calls)
        place = ProcessId(*process)
        state = Report(place, where, age, waits_for, tuple(ranks), extends, left, epoch, known, tuple(noted))
        return int(beat), state


class Heard(NamedTuple):
    """The last that was heard of a rank, and when it was new."""

    state: Report
    beat: int
    at: float


class Post:
    """Publishes this rank's state, and fetches what others have told, and how the ``wanted`` ones are."""

    def __init__(
        self, store: Store, rank: int, size: int, state: Callable[[], Report], is_on: Callable[[], bool]
    ) -> None:
        self._period = max(PERIOD, _PER_RANK * size)
        self._store, self._rank, self._state = _own_connection(store), rank, state
        self._is_on, self.broken, self._beat = is_on, False, 0
        self._thread = threading.Thread(target=self._run, name="fxpipe post", daemon=True)
        self._wake, self._stopping = threading.Event(), False
        self._requests: queue.SimpleQueue[tuple[str, Ending, threading.Event]] = queue.SimpleQueue()
        self._exchanged = threading.Condition()
        self.wanted: Collection[int] = ()
        self.heard: dict[int, Heard] = {}
        self.keys: list[str] = [ENDED]
        self.told: dict[str, Ending] = {}
        self.began = 0.0
        """When the last exchange that came to its end had begun."""

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self.broken:
            began, stopping = time.monotonic(), self._stopping
            try:
                if self._is_on():
                    self._exchange()
            except RuntimeError:  # the process that holds the store is gone
                self.broken = True
            with self._exchanged:
                self.began = began
                self._exchanged.notify_all()
            if stopping:  # and has told it
                return
            self._wake.wait(self._period)
            self._wake.clear()

    def tell(self, key: str, told: Ending, seconds: float = 2.0) -> None:
        """Tells all ranks, if nobody has told of another cause before. Returns when it is told, or the time is over."""
        done = threading.Event()
        self._requests.put((key, told, done))
        self._wake.set()
        if self._thread.is_alive() and not self.broken:
            done.wait(seconds)

    def refresh(self, seconds: float = 2.0) -> None:
        """Returns after an exchange that begins from now on, or when the time is over."""
        now = time.monotonic()
        self._wake.set()
        with self._exchanged:
            self._exchanged.wait_for(lambda: self.began >= now or self.broken, seconds)

    def stop(self, seconds: float = 2.0) -> None:
        """Publishes once more, and ends."""
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def outlast(self, ranks: Collection[int], seconds: float = 3.0) -> None:
        """Once it has stopped: waits for a while until these ranks have left, too."""
        until = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self.broken and time.monotonic() < until:
                self._hear_all(ranks)
                if all(heard.state.left for heard in self.heard.values()):
                    return
                self._wake.wait(0.05)
                self._wake.clear()

    def _exchange(self) -> None:
        while not self._requests.empty():
            key, told, done = self._requests.get()
            self._store.compare_set(key, "", told.packed())
            done.set()
        self._beat += 1
        self._store.set(_key(self._rank), self._state().packed(self._beat))
        self._hear_all(self.wanted)  # before what they have told: a rank tells, and is gone then
        for key in self.keys:
            if key not in self.told and self._store.check([key]):
                self.told[key] = Ending.unpacked(self._store.get(key).decode())

    def _hear_all(self, ranks: Collection[int]) -> None:
        there = [rank for rank in ranks if rank in self.heard or self._store.check([_key(rank)])]
        for rank, text in zip(there, self._store.multi_get(list(map(_key, there))) if there else (), strict=True):
            self._hear(rank, *Report.unpacked(text.decode()))

    def _hear(self, rank: int, beat: int, state: Report) -> None:
        before = self.heard.get(rank)
        if before is None or before.beat != beat:
            self.heard[rank] = Heard(state, beat, time.monotonic())


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _own_connection(store: Store) -> Store:
    """The same store over a connection of its own, so that nobody waits for a wait of somebody else."""
    own: Any = store.clone()  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):  # not every kind of store has one
        own.set_timeout(_ANSWER)
    return PrefixStore("fxpipe", own)
