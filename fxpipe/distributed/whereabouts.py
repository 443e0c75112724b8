"""Whereabouts: what this process is doing, noted as it goes, for its watch to read.

Noting takes a microsecond, no lock, and never waits. Collective calls are *announced*: all ranks make them in one
order, so that the watch can tell which rank is in another one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Call(NamedTuple):
    """A collective call that this rank has come to, the ``number``-th of all ranks; or, with ``members``, the
    ``part``-th of these ranks alone since then."""

    number: int
    part: int
    name: str
    members: tuple[int, ...] | None


class Alike(NamedTuple):
    """What all ranks in a call must have alike. ``digest``: of it, below 2^31; 0: of nothing. ``told``: it in words,
    what → value, asked for where digests differ."""

    digest: int = 0
    told: Callable[[], Mapping[str, str]] = dict


NOTHING = Alike()
ALIKE_BITS = 31
"""Of a mark; above them stands the call."""


class Phase(NamedTuple):
    """What this rank is inside of. ``extends``: whether others give it more time than their timeout."""

    name: str
    since: float
    extends: bool


class Waiting(Protocol):
    """A wait of this process. ``ranks``: those that it waits for. ``number``, ``timeout``: its transport's."""

    since: float

    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def number(self) -> int: ...
    @property
    def timeout(self) -> float: ...

    def words(self) -> str:
        """What it waits for."""

    def end(self) -> None:
        """Ends it with an error; called by another thread. A wait that looks up by itself does nothing here."""


class LastCall(threading.local):
    """The collective call that a thread has come to last."""

    name, alike, mark = "", NOTHING, 0
    """``mark``: both as one number below 2^63, the same on all ranks that are in the same call, alike."""


CALLS_KEPT = 16
"""How many calls are remembered, for comparison with other ranks."""
ACTIONS_KEPT = 20


class Whereabouts:
    """What one process is doing. Written by its main thread, read by its watch."""

    def __init__(self) -> None:
        self.waiting: Waiting | None = None
        self.awaited: Callable[[], str] | None = None
        """What the next message received is, in the table's words."""
        self.last: tuple[float, object] = (time.monotonic(), "")
        """The last action or call, and when it began."""
        self.trail: deque[tuple[float, object]] = deque(maxlen=ACTIONS_KEPT)
        self.noted: deque[str] = deque(maxlen=4)
        """What else there is to tell where the run ends, such as a thread that has died."""
        self.handling = ""
        """The exception that was on its way when the last call began, in words."""
        self.forget(0)

    def forget(self, epoch: int) -> None:
        """All ranks begin to count anew."""
        self.epoch, self.number = epoch, 0
        self.calls: tuple[Call, ...] = ()
        self._parts: dict[tuple[int, ...], int] = {}
        self.inside: tuple[Phase, ...] = ()

    def at(self, action: object) -> None:
        """An action begins."""
        self.last = moment = (time.monotonic(), action)
        self.trail.append(moment)

    def come_to(self, name: str, members: Sequence[int] | None, alike: Alike) -> None:
        """A collective call begins."""
        entered.name, entered.alike = name, alike
        error = sys.exception()  # as in a finally: block of the user's
        self.handling = f"{name} was called as {type(error).__name__}: {error!s:.200} was handled" if error else ""
        entered.mark = zlib.crc32(name.encode()) << ALIKE_BITS | alike.digest
        if members is None:
            self.number, self._parts = self.number + 1, {}
            call = Call(self.number, 0, name, None)
        else:
            some = tuple(members)
            part = self._parts[some] = self._parts.get(some, 0) + 1
            call = Call(self.number, part, name, some)
        self.calls = (*self.calls[1 - CALLS_KEPT :], call)


entered = LastCall()
here = Whereabouts()
"""Of this process. Ranks that are threads of one process share it, and have no watch."""


@contextlib.contextmanager
def phase(name: str, extends: bool = True) -> Iterator[None]:
    """This rank is inside of ``name``. ``extends``: and others that wait for it give it more time."""
    before = here.inside
    here.at(name)
    here.inside = (*before, Phase(name, here.last[0], extends))
    try:
        yield
    finally:
        here.inside = before
        here.last = (time.monotonic(), name)


@contextlib.contextmanager
def announced(
    name: str, members: Sequence[int] | None = None, extends: bool = False, alike: Alike = NOTHING
) -> Iterator[None]:
    """A collective call of all ranks, or of ``members``, which all make in one order.

    A rank that is in another one while somebody waits for it is named within a second or two. It is announced by
    being noted: nothing is sent for it, and nothing waits. But where ranks gather something in a call, a number for it
    goes along, so that none takes for its own call's what another one meant. ``extends``: as of ``phase``.
    """
    here.come_to(name, members, alike)
    with phase(name, extends):
        yield


_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<")


def users_line() -> str:
    """The line of the user's code that the main thread is at, "train.py:57 in main"; empty where there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES) and "site-packages" not in code.co_filename:
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def are_apart(marks: Sequence[int]) -> bool:
    """Whether ranks with these marks are in different calls, or differ in what must be alike there."""
    calls, digests = {mark >> ALIKE_BITS for mark in marks}, {mark & (1 << ALIKE_BITS) - 1 for mark in marks}
    return len(calls) > 1 or len(digests - {0}) > 1


def first_difference(mine: Sequence[Call], theirs: Sequence[Call], me: int, other: int) -> tuple[Call, Call] | None:
    """The first call that two ranks have both come to, and that is not the same; of those that both remember.

    >>> mine, theirs = Call(1, 0, "save", None), Call(1, 0, "step", None)
    >>> first_difference([mine], [theirs], 0, 1) == (mine, theirs)
    True
    """
    ours = [[c for c in calls if c.members is None or who in c.members] for calls, who in ((mine, other), (theirs, me))]
    if not all(ours):
        return None
    begin = max(calls[0][:2] for calls in ours)
    ours = [[call for call in calls if call[:2] >= begin] for calls in ours]
    pairs: Any = zip(*ours, strict=False)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)
