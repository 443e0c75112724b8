"""Activity: records what this process does and waits for; its watchdog reads the record.

Recording takes a microsecond and no lock, and never waits. Collective calls are *announced*: all ranks make them in
the same order, so that the watchdog sees which rank is in a different call.
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
    """A collective call that this rank has entered: the ``local``-th call of its pipe group and the ``number``-th call
    of all ranks; ``number`` is 0 if only a pipe group makes the call."""

    local: int
    number: int
    name: str


class Alike(NamedTuple):
    """Values that must be the same on all ranks in a call. ``digest``: their hash, below 2^31; 0 means no values.
    ``facts``: returns names and values for a message; called if digests differ."""

    digest: int = 0
    facts: Callable[[], Mapping[str, str]] = dict


NOTHING = Alike()
# The low bits of a mark hold the digest of ``Alike``; the higher bits hold the hash of the call's name.
ALIKE_BITS = 31
_ALIKE, _MOST = (1 << ALIKE_BITS) - 1, (1 << 63) - 1


class Phase(NamedTuple):
    """A named phase that this rank is in. ``extends``: whether other ranks wait for it longer than their timeout."""

    name: str
    extends: bool


class Waiting(NamedTuple):
    """A wait of this process, in transport number ``number``. ``what`` returns a text for the event and its ranks.

    ``end`` ends the wait with an error, from another thread; a no-op if the wait polls the watchdog by itself.
    """

    number: int
    timeout: float
    since: float
    what: Callable[[], tuple[str, Sequence[int]]]
    end: Callable[[], object]


class LastCall(threading.local):
    """The collective call that a thread has entered last."""

    name, alike, mark = "", NOTHING, 0
    """``mark``: hash of the name and digest as a number below 2^63, the same on ranks in the same call and digest."""


CALLS_KEPT = 16
"""The number of calls that are remembered, for comparison with other ranks."""
ACTIONS_KEPT = 20


class Activity:
    """The state of a process. The main thread writes it, the watchdog's thread reads it."""

    def __init__(self) -> None:
        self.waiting: Waiting | None = None
        self.awaited: Callable[[], str] | None = None
        """Names the next message to receive, as the schedule's table does."""
        self.last: tuple[float, object] = (time.monotonic(), "")
        """(start in seconds, name) of the last action or call."""
        self.trail: deque[tuple[float, object]] = deque(maxlen=ACTIONS_KEPT)
        self.forget(0)

    def forget(self, epoch: int) -> None:
        """Restarts the counts of calls, as all ranks do for a new transport."""
        self.epoch, self.local, self.number = epoch, 0, 0
        # Tuples are replaced, never changed, so that the watchdog's thread reads a consistent state without a lock.
        self.calls: tuple[Call, ...] = ()
        self.inside: tuple[Phase, ...] = ()

    def at(self, action: object) -> None:
        """Records the start of an action."""
        self.last = moment = (time.monotonic(), action)
        self.trail.append(moment)

    def described(self) -> tuple[str, float]:
        """Returns a text that follows the rank's number and says what it does; and the start of that in seconds."""
        waiting, inside, (since, last) = self.waiting, self.inside, self.last
        if waiting is not None:
            return f"waits for {waiting.what()[0]}", waiting.since
        if inside:
            return f"is {'in' if last == inside[-1].name else 'at'} {last}", since
        line = _users_line()
        behind, at = f", behind {last}" if last else "", f", at {line}" if line else ""
        return f"is outside of fxpipe's calls{behind}{at}", since

    def when(self) -> str:
        """Returns a text on when a collective is made, equal on all ranks that make it: ", in forward_backward, step 5,
        before its first action"."""
        if not self.inside:
            return ""
        call, has_acted = self.inside[0].name, not isinstance(self.last[1], str)
        of_actions = call.startswith(("forward_backward", "evaluate"))
        return f", in {call}" + (f", {'behind its last' if has_acted else 'before its first'} action" * of_actions)


entered = LastCall()
here = Activity()
"""The activity of this process. Ranks that are threads of the same process share it, and have no watchdog."""


@contextlib.contextmanager
def phase(name: str, extends: bool = True) -> Iterator[None]:
    """Marks this rank as inside ``name``. ``extends``: other ranks that wait for this rank extend their timeout."""
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
    """Announces a collective call, of all ranks in the same order or of a pipe group.

    If a rank is in a different call while another rank waits for it, an error names both within two seconds. Announcing
    only records the call: it sends nothing and does not wait. A gather inside the call also sends the call's mark, so
    that no rank takes values of a different call. ``extends``: as in ``phase``.
    """
    entered.name, entered.alike = name, alike
    # High bits: the call; low bits: the digest. Ranks compare both as a single number.
    entered.mark = zlib.crc32(name.encode()) << ALIKE_BITS | alike.digest
    here.local, here.number = here.local + 1, here.number + of_all
    here.calls = (*here.calls[1 - CALLS_KEPT :], Call(here.local, of_all and here.number, name))
    with phase(name, extends):
        yield


_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<")


def _users_line() -> str:
    """Returns the user's line that the main thread executes, as "train.py:57 in main"; empty if there is none."""
    # Search from the innermost frame outwards for a frame outside fxpipe, torch and Python's standard library.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES) and "site-packages" not in code.co_filename:
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def are_apart(marks: Sequence[int]) -> bool:
    """Whether ranks with these marks are in different calls, or their digests differ."""
    calls, digests = {mark >> ALIKE_BITS for mark in marks}, {mark & _ALIKE for mark in marks}
    return len(calls) > 1 or len(digests - {0}) > 1


def words(mark: int, values: Sequence[bytes]) -> tuple[int, int, int, int]:
    """Returns four numbers of a rank that expects a gather to give ``values``; an all-reduce of their maxima shows
    whether all ranks expect the same.

    A gloo all-gather takes as many sequential hops as the group has ranks; a maximum over a few numbers is far faster.
    All ranks have the same hash h if max(h) = min(h), where min(h) = −max(−h)."""
    call, alike = mark >> ALIKE_BITS, mark & _ALIKE
    each_once = {value: index for index, value in enumerate(dict.fromkeys(values))}  # values may be long
    text = repr((call, list(each_once), [each_once[value] for value in values]))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
    # Numbers on the wire are 0 or more: most − h replaces −h. A rank sends 0 if nothing must be the same.
    return number, _MOST - number, alike, _ALIKE - alike if alike else 0


def agree(greatest: Sequence[int]) -> bool:
    """Whether ``words`` of all ranks, with these maxima, have the same expected values and equal digests, or 0."""
    most, least, alike, least_alike = greatest
    return most == _MOST - least and (not alike or alike == _ALIKE - least_alike)


def first_difference(mine: Sequence[Call], theirs: Sequence[Call], same_pipe: bool) -> tuple[str, str] | None:
    """Returns the names of the first call that differs between two ranks, among calls that both have remembered.

    >>> first_difference([Call(1, 1, "save"), Call(2, 2, "step")], [Call(1, 1, "step")], same_pipe=True)
    ('save', 'step')
    """
    # Compare by the count that both share: in the same pipe group all calls, otherwise only calls of all ranks.
    ours, others = ({call.local if same_pipe else call.number: call.name for call in calls} for calls in (mine, theirs))
    return next(((name, others[at]) for at, name in ours.items() if at and others.get(at, name) != name), None)
