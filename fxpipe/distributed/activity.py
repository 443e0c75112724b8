"""Activity: what this process does and waits for, noted as it goes, for its watchdog to read.

Noting takes a microsecond, no lock, and never waits. Collective calls are *announced*: all ranks make them in one
order, so that the watchdog can see which rank is in another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Call(NamedTuple):
    """A collective call that this rank has come to: the ``place``-th of its pipe group, and the ``number``-th of all
    ranks; 0 where only a pipe group makes it."""

    place: int
    number: int
    name: str


class Alike(NamedTuple):
    """What must be the same on all ranks in a call. ``digest``: its hash, below 2^31; 0: nothing must. ``facts``: names
    and values for a message; called where digests differ."""

    digest: int = 0
    facts: Callable[[], Mapping[str, str]] = dict


NOTHING = Alike()
# Of a mark: what must be the same; above these bits stands the call.
ALIKE_BITS = 31
_ALIKE, _MOST = (1 << ALIKE_BITS) - 1, (1 << 63) - 1


class Phase(NamedTuple):
    """What this rank is inside of. ``extends``: whether others give it more time than their timeout."""

    name: str
    extends: bool


class Waiting(NamedTuple):
    """A wait of this process, in the transport of that ``number``. ``what``: says what it waits for, and which ranks.

    ``end``: ends it with an error; called by another thread. A wait that looks up by itself does nothing there.
    """

    number: int
    timeout: float
    since: float
    what: Callable[[], tuple[str, Sequence[int]]]
    end: Callable[[], object]


class LastCall(threading.local):
    """The collective call that a thread has come to last."""

    name, alike, mark = "", NOTHING, 0
    """``mark``: both as one number below 2^63. Ranks in the same call with the same digest have the same mark."""


CALLS_KEPT = 16
"""How many calls are remembered, for comparison with other ranks."""
ACTIONS_KEPT = 20


class Activity:
    """What one process is doing. Written by its main thread, read by its watchdog."""

    def __init__(self) -> None:
        self.waiting: Waiting | None = None
        self.awaited: Callable[[], str] | None = None
        """What the next message received is, in the table's words."""
        self.last: tuple[float, object] = (time.monotonic(), "")
        """The last action or call, and when it began."""
        self.trail: deque[tuple[float, object]] = deque(maxlen=ACTIONS_KEPT)
        self.forget(0)

    def forget(self, epoch: int) -> None:
        """All ranks begin to count anew."""
        self.epoch, self.place, self.number = epoch, 0, 0
        # A tuple that is replaced, so that the watchdog's thread reads one state or the other, without a lock.
        self.calls: tuple[Call, ...] = ()
        self.inside: tuple[Phase, ...] = ()

    def at(self, action: object) -> None:
        """An action begins."""
        self.last = moment = (time.monotonic(), action)
        self.trail.append(moment)

    def described(self) -> tuple[str, float]:
        """Says what this rank does, in words that follow its number, and since when."""
        waiting, inside, (since, last) = self.waiting, self.inside, self.last
        if waiting is not None:
            return f"waits for {waiting.what()[0]}", waiting.since
        if inside:
            return f"is {'in' if last == inside[-1].name else 'at'} {last}", since
        line = _users_line()
        behind, at = f", behind {last}" if last else "", f", at {line}" if line else ""
        return f"is outside of fxpipe's calls{behind}{at}", since


entered = LastCall()
here = Activity()
"""Of this process. Ranks that are threads of one process share it, and have no watchdog."""


@contextlib.contextmanager
def phase(name: str, extends: bool = True) -> Iterator[None]:
    """This rank is inside of ``name``. ``extends``: and others that wait for it give it more time."""
    before = here.inside
    here.at(name)
    here.inside = (*before, Phase(name, extends))
    try:
        yield
    finally:
        here.inside = before
        here.last = (time.monotonic(), name)


@contextlib.contextmanager
def announced(name: str, of_all: bool = True, extends: bool = False, alike: Alike = NOTHING) -> Iterator[None]:
    """A collective call of all ranks, which all make in one order, or of a pipe group.

    A rank that is in another one while somebody waits for it is named within a second or two. It is announced by
    being noted: nothing is sent for it, and nothing waits. But where ranks gather something in a call, a number for it
    goes along, so that none takes for its own call's what another one meant. ``extends``: as of ``phase``.
    """
    entered.name, entered.alike = name, alike
    # The call above, what must be the same below: ranks compare both with one number.
    entered.mark = zlib.crc32(name.encode()) << ALIKE_BITS | alike.digest
    here.place, here.number = here.place + 1, here.number + of_all
    here.calls = (*here.calls[1 - CALLS_KEPT :], Call(here.place, of_all and here.number, name))
    with phase(name, extends):
        yield


_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<")


def _users_line() -> str:
    """The line of the user's code that the main thread is at, "train.py:57 in main"; empty where there is none."""
    # From the innermost call outwards: the first frame of neither fxpipe, torch nor Python's own library.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES) and "site-packages" not in code.co_filename:
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def are_apart(marks: Sequence[int]) -> bool:
    """Whether ranks with these marks are in different calls, or differ in what must be the same there."""
    calls, digests = {mark >> ALIKE_BITS for mark in marks}, {mark & _ALIKE for mark in marks}
    return len(calls) > 1 or len(digests - {0}) > 1


def words(mark: int, values: Sequence[bytes]) -> tuple[int, int, int, int]:
    """What a rank that expects a gather to give ``values`` brings, so that all learn whether they expect the same.

    An all-gather of gloo takes a hop for each rank of the group, one behind another; a maximum over a few numbers takes
    far less. It shows whether all brought the same h: where max(h) = min(h), and the minimum is −max(−h).
    """
    call, alike = mark >> ALIKE_BITS, mark & _ALIKE
    each_once = {value: place for place, value in enumerate(dict.fromkeys(values))}  # they may be long
    text = repr((call, list(each_once), [each_once[value] for value in values]))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
    # Numbers on the wire are 0 or more: most − h in place of −h. 0 is brought where nothing must be the same.
    return number, _MOST - number, alike, _ALIKE - alike if alike else 0


def agree(greatest: Sequence[int]) -> bool:
    """Whether all ranks that brought words with these maxima expect the same, and have the same where they must."""
    most, least, alike, least_alike = greatest
    return most == _MOST - least and (not alike or alike == _ALIKE - least_alike)


def first_difference(mine: Sequence[Call], theirs: Sequence[Call], same_pipe: bool) -> tuple[str, str] | None:
    """The first call that two ranks have both come to, and that is not the same; of those that both remember.

    >>> first_difference([Call(1, 1, "save"), Call(2, 2, "step")], [Call(1, 1, "step")], same_pipe=True)
    ('save', 'step')
    """
    # Places count from where both began: in one pipe group all its calls, between two of them those of all ranks.
    ours, others = ({call.place if same_pipe else call.number: call.name for call in calls} for calls in (mine, theirs))
    return next(((name, others[at]) for at, name in ours.items() if at and others.get(at, name) != name), None)
