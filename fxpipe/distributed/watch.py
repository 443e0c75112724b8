"""Watch: every wait of this process ends, and whoever ends it says what it waited for, and what became of the others.

A rank notes what it does (``whereabouts``) and tells it (``post``). While it waits, a thread compares: a rank that is
gone, or in another call, ends the wait within seconds; one that is slow, silent or stopped, only at its timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from fxpipe.distributed.bell import Bell
from fxpipe.distributed.others import Others
from fxpipe.distributed.post import ENDED, PERIOD, Ending, Post, Report, failed
from fxpipe.distributed.process_state import this_process
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.whereabouts import Waiting, here, users_line
from fxpipe.torch_compat import default_store

LOOK_AFTER = 1.0
"""Seconds of waiting after which a rank looks what others do."""
SAY_AFTER = 30.0
"""Seconds after which it says for whom it waits."""
EXTENSION = 12
"""How many times its timeout a wait lasts at most, while others capture, compile or save."""
_SOON = 0.01  # seconds between two looks, once a connection broke: launchers end the others soon
_CLOSE = 64  # ranks of a world in which each looks at all others, and not only at those of its groups
_TIMED_OUT = "Timed out waiting"  # as gloo says it
_SHOWN = 3  # ranks that a message tells of at once


class WorldWatch:
    """Looks at the waits of this process, one of a world of processes."""

    def __init__(self) -> None:
        self.rank, self.size, self.process = dist.get_rank(), dist.get_world_size(), this_process()
        self._world = weakref.ref(_world())
        self._peers: tuple[int, ...] = tuple(r for r in range(min(self.size, _CLOSE)) if r != self.rank)
        self._left = False
        self._verdicts: dict[int, Ending] = {}
        self._said: Waiting | None = None
        self._extended = 0.0
        self._stopping = threading.Event()
        self._written: set[str] = set()
        self._post = Post(default_store(), self.rank, self.size, self._state, self.is_on)
        self._others = Others(self.rank, self.process, self._post)
        self._bell = Bell(PERIOD)
        self._post.start()
        self._thread = threading.Thread(target=self._run, name="fxpipe watch", daemon=True)
        self._thread.start()
        atexit.register(self._leave)  # before the world is left, which was begun earlier

    # what others ask

    def named(self, rank: int) -> str:
        """A rank with its coordinates: "rank 3 (pipe 1, data 1)"."""
        return self._others.named(rank)

    def apart(self, calls: Mapping[int, str], notes: Mapping[int, str]) -> str:
        """Ranks that are in different calls, in words."""
        return self._others.apart(calls, notes)

    def take_up(self, number: int, topology: Topology) -> None:
        """A transport of that number begins, with ranks that lie so."""
        self._others.topology = topology
        here.forget(number)
        if self.size > _CLOSE:
            groups = [group for axis in ("pipe", "data") for group in topology.groups(axis) if self.rank in group]
            self._peers = tuple({rank for group in groups for rank in group} - {self.rank})
        self._post.keys = [ENDED, failed(number), *self._post.keys[1:]]
        self._post.refresh()

    def put_down(self, number: int) -> None:
        """That transport is closed."""
        self._post.keys = [key for key in self._post.keys if key != failed(number)]

    def look_at_peers(self) -> None:
        """Learns which processes the others are, once all have come."""
        self._post.wanted = self._peers
        self._post.refresh()

    def verdict(self, number: int) -> Ending | None:
        """Why the waits of a transport end, if they do."""
        return self._verdicts.get(number) or self._post.told.get(failed(number)) or self._post.told.get(ENDED)

    @property
    def cause(self) -> Ending | None:
        """Why the run ends that was begun last."""
        return self.verdict(here.epoch)

    def judge(self, number: int, told: Ending) -> None:
        """This rank has found out why, or has itself failed."""
        self._verdicts.setdefault(number, told)

    def why(self, number: int, ranks: Sequence[int], reason: str = "", seconds: float = 5.0) -> Ending:
        """Why a connection with one of ``ranks`` broke, once that is known; waits for it some seconds. ``reason``: what
        torch says."""
        until = time.monotonic() + seconds
        self._post.wanted = self._peers
        while True:
            self._others.gone()  # is noted now, so that what a rank that is gone has told is heard in what follows
            self._post.refresh()
            told = self._others.gone()
            left = [rank for rank in ranks if (heard := self._others.heard(rank)) and heard.state.left]
            if told is None and left:
                told = self._others.found(left[:1])
            told = self.verdict(number) or told
            if told is not None:
                return told
            others = ranks or self._peers
            stopped = [rank for rank in others if self._others.is_stopped(rank)]
            if stopped and _TIMED_OUT in reason:
                return self._others.found(stopped)
            if time.monotonic() > until:
                quiet = stopped or [rank for rank in others if self._others.is_silent(rank)]
                told_of = [self._others.described(rank) for rank in (quiet or ranks)[:_SHOWN]]
                text = "; ".join(["a connection broke", *told_of, *([reason] if reason else [])])
                return Ending(self.rank, False, text, tuple(quiet))
            self._stopping.wait(_SOON)

    def tell(self, key: str, told: Ending) -> None:
        """Tells all ranks why the run ends; what the first one says counts."""
        self._post.tell(key, told)
        self.write_trail(told)

    def message(self, told: Ending, waited_for: str) -> str:
        """Why the run ends, in this rank's words. ``waited_for``: what it was in."""
        if told.error:
            return f"another rank failed: {told.text}"
        me = self.named(self.rank)
        return told.text if f"{me} waits for" in told.text else f"{told.text}; {me} waited for {waited_for}"

    def say(self, text: str) -> None:
        """One line to stderr, at once: what ends this process may leave no time later."""
        with contextlib.suppress(OSError, ValueError):  # there may be nobody to read it
            print(f"fxpipe: {' | '.join(text.splitlines())}", file=sys.stderr, flush=True)

    def await_end_of(self, ranks: Sequence[int], seconds: float = 5.0) -> None:
        """Returns when these processes have ended, and their parents know: who ends first counts as the cause."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if all(self._others.system(rank) == "gone" for rank in ranks if self._others.heard(rank) is not None):
                return
            threading.Event().wait(0.05)

    def write_trail(self, told: Ending) -> None:
        """The last actions of this rank, into the folder that FXPIPE_DEBUG_DIR names."""
        folder = os.environ.get("FXPIPE_DEBUG_DIR")
        if not folder or told.text in self._written:
            return
        self._written.add(told.text)
        now = time.monotonic()
        notes = self._state().noted
        lines = [f"{now - at:10.3f} s ago  {what}" for at, what in list(here.trail)]
        head = f"{self.named(self.rank)} {self._state().where}, as this was told: {told.text}"
        text = "\n".join([head, *notes, *lines, ""])
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"rank{self.rank}.txt").write_text(text)
        except OSError as error:
            self.say(f"FXPIPE_DEBUG_DIR is {folder!r}, which cannot be written to: {error}")

    def stop(self) -> None:
        """This rank's program has ended."""
        atexit.unregister(self._leave)
        self._left = True
        self._stopping.set()
        self._post.stop()
        self._bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * PERIOD)
        self._bell.close()

    def _leave(self) -> None:
        if self.process.pid == os.getpid():  # and not one that was forked from it
            self.stop()
            if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self._post.outlast(self._peers)  # whose store may be here

    # the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            ctrl_c = self._bell.hears_ctrl_c()
            if not self.is_on():
                self._left = True
                self._post.stop()
                return
            for told in list(self._post.told.values()):
                self.write_trail(told)
            waiting = here.waiting
            if waiting is not None and ctrl_c:
                waiting.end()  # of which Python's own handler makes a KeyboardInterrupt
            elif waiting is not None:
                self._look_at(waiting)

    def is_on(self) -> bool:
        """Whether this process is still in the world that it watches; else torch.distributed was ended."""
        world = dist.GroupMember.WORLD  # each message asks
        return world is not None and world is self._world()

    def _look_at(self, waiting: Waiting) -> None:
        if self._said is not waiting:
            self._said, self._extended, self._spoken = waiting, 0.0, False
            self._looked = time.monotonic()
        found = self.verdict(waiting.number) or self._judged(waiting)
        if found is not None:
            told = self.verdict(waiting.number) or found  # a cause that was told meanwhile comes before what it led to
            self._verdicts.setdefault(waiting.number, told)
            waiting.end()

    def _judged(self, waiting: Waiting) -> Ending | None:
        age = time.monotonic() - waiting.since
        if age < LOOK_AFTER:
            return None
        self._post.wanted = self._peers
        found = self._others.gone() or self._others.left_behind(waiting) or self._others.elsewhere()
        if found is not None:
            return found
        late = self._others.late(waiting)
        before, self._looked = self._looked, time.monotonic()
        if any(map(self._others.extends, late)):
            self._extended = min(self._extended + self._looked - before, EXTENSION * waiting.timeout)
        if age > SAY_AFTER and not self._spoken and not all(self._others.waits(rank) for rank in late):
            self._spoken = True
            self.say(self._others.story(waiting, age))
        if age > waiting.timeout + self._extended:
            more = f"longer than timeout={waiting.timeout:g} s; where it may be, write fxpipe.compile(..., timeout=)"
            return Ending(self.rank, False, f"{self._others.story(waiting, age)}: {more}", ())
        return None

    # what is told of this rank

    def _state(self) -> Report:
        now, waiting, inside, (since, last) = time.monotonic(), here.waiting, here.inside, here.last
        words, ranks = (waiting.words(), tuple(waiting.ranks)) if waiting is not None else ("", ())
        if waiting is not None:
            where, since = f"waits for {words}", waiting.since
        elif inside and str(last) != inside[-1].name:
            where = f"is at {last}"
        elif inside:
            where, since = f"is in {inside[-1].name}", inside[-1].since
        else:
            line = users_line()
            where = (
                "is outside of fxpipe's calls" + (f", behind {last}" if last else "") + (f", at {line}" if line else "")
            )
        extends = waiting is None and any(phase.extends for phase in inside)
        noted = (*here.noted, *([here.handling] if here.handling else []))
        return Report(
            self.process, where, now - since, words, ranks, extends, self._left, here.epoch, here.calls, noted
        )


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


_current: WorldWatch | None = None


def watch() -> WorldWatch:
    """The watch of this process and its world; there is one from now on."""
    global _current
    if _current is None or _current.process.pid != os.getpid() or _current._world() is not _world():
        if _current is not None and _current.process.pid == os.getpid():
            _current.stop()
        _current = WorldWatch()
        here.forget(0)
    return _current


def current_watch() -> WorldWatch | None:
    """The watch of this process, if it has one."""
    return _current if _current is not None and _current.process.pid == os.getpid() else None


def _in_fork() -> None:
    """Signals of a forked process are not this one's."""
    if _current is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_fork)
