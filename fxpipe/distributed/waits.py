"""Waits: a wait inside of torch.distributed, told to the watch, which may end it."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from fxpipe.distributed.collective import SLICE_SECONDS, PeerLost, Scope, Work
from fxpipe.distributed.watch import WorldWatch
from fxpipe.distributed.whereabouts import here

_SLICE = datetime.timedelta(seconds=SLICE_SECONDS)
_AT_ONCE = datetime.timedelta(milliseconds=1)


class Home(Protocol):
    """What a wait asks of its transport. ``for_good``: how long torch may wait, where it is to be told."""

    rank: int
    number: int
    timeout: float
    watch: WorldWatch
    for_good: tuple[datetime.timedelta, ...]

    @property
    def is_over(self) -> bool: ...
    def ranks(self, scope: Scope) -> Sequence[int]: ...


class OnItsWay:
    """A send or receive under way. It lets go of the work, which keeps a connection open, once it was waited for."""

    __slots__ = ("_home", "_peer", "_sends", "_work", "since")

    def __init__(self, home: Home, work: dist.Work | None, peer: int, sends: bool) -> None:
        self._home, self._work, self._peer, self._sends = home, work, peer, sends

    def wait(self) -> None:
        if self._work is None:
            return
        self.since = time.monotonic()
        here.waiting = self
        try:
            self._work.wait(*self._home.for_good)
        except RuntimeError as error:
            raise PeerLost(self.words(), self.ranks, error) from None
        finally:
            here.waiting = self._work = None

    # for the watch

    @property
    def ranks(self) -> Sequence[int]:
        return (self._peer,)

    @property
    def number(self) -> int:
        return self._home.number

    @property
    def timeout(self) -> float:
        return self._home.timeout

    def words(self) -> str:
        name = self._home.watch.named(self._peer)
        if self._sends:
            return f"{name} to take a message"
        awaited = here.awaited
        return f"{awaited() if awaited is not None else 'a message'} from {name}"

    def end(self) -> None:
        """gloo breaks the connection where a wait, be it another thread's, is over before the message is there."""
        work = self._work
        if work is not None and self._home.for_good:
            with contextlib.suppress(RuntimeError):
                work.wait(_AT_ONCE)


class SeveralWorks:
    """Works that are waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class SlicedWait:
    """A wait that looks up by itself whether it is to end."""

    def __init__(self, home: Home, what: Callable[[], tuple[str, Scope]]) -> None:
        self._home, self._what, self.since = home, what, time.monotonic()
        self.number, self.timeout = home.number, home.timeout

    @property
    def ranks(self) -> Sequence[int]:
        return [rank for rank in self._home.ranks(self._what()[1]) if rank != self._home.rank]

    def words(self) -> str:
        return self._what()[0]

    def end(self) -> None:
        pass

    def look_up(self) -> None:
        if self._home.is_over:
            raise PeerLost(self.words(), self.ranks)


def wait_in_slices(work: dist.Work, group: dist.ProcessGroup, look_up: Callable[[], None]) -> None:
    """Waits for a collective of gloo, so that signals are heard, and ``look_up`` may raise to end it."""
    try:
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():  # now, or with an error
                    work.wait()
                    return
            look_up()
    except BaseException:
        if not work.is_completed():
            _keep_for_good(work, group)
        raise


def _keep_for_good(*things: object) -> None:
    """Never destroys these: gloo cannot end an operation that is under way, and its destructor waits for the end."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
