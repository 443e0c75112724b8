"""Waits inside of torch.distributed, which the watchdog may end."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from fxpipe.distributed.activity import Wait, here
from fxpipe.distributed.collective import SLICE_SECONDS, PeerLost, Work

if TYPE_CHECKING:
    from fxpipe.distributed.torch_transport import DistributedTransport

_SLICE = datetime.timedelta(seconds=SLICE_SECONDS)
_AT_ONCE = datetime.timedelta(milliseconds=1)


class OnItsWay:
    """A send or receive under way. It lets go of the work, which keeps a connection open, once it was waited for."""

    __slots__ = ("_home", "_peer", "_sends", "_work")

    def __init__(self, home: DistributedTransport, work: dist.Work | None, peer: int, sends: bool) -> None:
        self._home, self._work, self._peer, self._sends = home, work, peer, sends

    def wait(self) -> None:
        if self._work is None:
            return
        here.waiting = Wait(self._home.number, self._home.timeout, time.monotonic(), self._what, self._end)
        try:
            self._work.wait(*self._home.for_good)
        except RuntimeError as error:
            raise PeerLost(*self._what(), error) from None
        finally:
            here.waiting = self._work = None

    def _what(self) -> tuple[str, Sequence[int]]:
        name, awaited = self._home.watchdog.named(self._peer), here.awaited
        if self._sends:
            return f"{name} to take a message", (self._peer,)
        return f"{awaited() if awaited is not None else 'a message'} from {name}", (self._peer,)

    def _end(self) -> None:
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
            # Never destroyed: gloo cannot end an operation that is under way, and its destructor waits for the end.
            for thing in (work, group):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        raise
