"""Watch: every wait of this process ends, and whoever ends it says what it waited for, and what became of the others.

A rank notes what it does (``whereabouts``) and tells it (``post``). While it waits, a thread compares: a rank that is
gone, or in another call, ends the wait within seconds; one that is slow, silent or stopped, only at its timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from fxpipe.distributed.post import ENDED, PERIOD, Ending, Post, Report, failed
from fxpipe.distributed.process_state import state_of, this_process
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.whereabouts import Call, Waiting, first_difference, here
from fxpipe.torch_compat import default_store

LOOK_AFTER = 1.0
"""Seconds of waiting after which a rank looks what others do."""
SAY_AFTER = 30.0
"""Seconds after which it says for whom it waits."""
EXTENSION = 12
"""How many times its timeout a wait lasts at most, while others capture, compile or save."""
_SOON = 0.01  # seconds between two looks, once a connection broke: launchers end the others soon
_SILENT = 5.0  # seconds without a sign after which a rank is called silent
_LEFT = 5.0  # seconds after which one whose program has ended is not waited for any more
_CLOSE = 64  # ranks of a world in which each looks at all others, and not only at those of its groups
_TIMED_OUT = "Timed out waiting"  # as gloo says it
_SHOWN = 3  # ranks that a message tells of at once


class WorldWatch:
    """Looks at the waits of this process, one of a world of processes."""

    def __init__(self) -> None:
        self.rank, self.size, self.process = dist.get_rank(), dist.get_world_size(), this_process()
        self._world = weakref.ref(_world())
        self._topology: Topology | None = None
        self._peers: tuple[int, ...] = tuple(r for r in range(min(self.size, _CLOSE)) if r != self.rank)
        self._left = False
        self._verdicts: dict[int, Ending] = {}
        self._suspects: dict[int, float] = {}  # rank → when it was first seen to be gone
        self._said: Waiting | None = None
        self._extended = 0.0
        self._stopping = threading.Event()
        self._written: set[str] = set()
        self._post = Post(default_store(), self.rank, self.size, self._state, self._is_on)
        self._bell, self._rings, self._rang_before = _wake_up_calls()
        self._post.start()
        self._thread = threading.Thread(target=self._run, name="fxpipe watch", daemon=True)
        self._thread.start()
        atexit.register(self._leave)  # before the world is left, which was begun earlier

    # what others ask

    def named(self, rank: int) -> str:
        """A rank with its coordinates: "rank 3 (pipe 1, data 1)"."""
        if self._topology is None:
            return f"rank {rank}"
        place = self._topology.coordinate(rank)
        told = ", ".join(f"{axis} {place[axis]}" for axis, size in self._topology.axes if size > 1)
        return f"rank {rank} ({told})" if told else f"rank {rank}"

    def take_up(self, number: int, topology: Topology) -> None:
        """A transport of that number begins, with ranks that lie so."""
        self._topology = topology
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
            self._gone()  # whom the system calls gone now, so that what they told is heard in the exchange that follows
            self._post.refresh()
            told = self._gone()
            left = [rank for rank in ranks if (heard := self._post.heard.get(rank)) and heard.state.left]
            if told is None and left:
                told = self._found(left[:1])
            told = self.verdict(number) or told
            if told is not None:
                return told
            others = ranks or self._peers
            stopped = [rank for rank in others if self._is_stopped(rank)]
            if stopped and _TIMED_OUT in reason:
                return self._found(stopped)
            if time.monotonic() > until:
                quiet = stopped or [rank for rank in others if self._is_silent(rank)]
                told_of = [self._described(rank) for rank in (quiet or ranks)[:_SHOWN]]
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
            states = [
                state_of(heard.state.process, self.process) for rank in ranks if (heard := self._post.heard.get(rank))
            ]
            if all(state == "gone" for state in states):
                return
            threading.Event().wait(0.05)

    def write_trail(self, told: Ending) -> None:
        """The last actions of this rank, into the folder that FXPIPE_DEBUG_DIR names."""
        folder = os.environ.get("FXPIPE_DEBUG_DIR")
        if not folder or told.text in self._written:
            return
        self._written.add(told.text)
        now = time.monotonic()
        lines = [f"{now - at:10.3f} s ago  {what}" for at, what in list(here.trail)]
        head = f"{self.named(self.rank)} {self._state().where}, as this was told: {told.text}"
        text = "\n".join([head, *here.noted, *lines, ""])
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
        self._hang_up()

    def _leave(self) -> None:
        if self.process.pid == os.getpid():  # and not one that was forked from it
            self.stop()
            if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self._post.outlast(self._peers)  # whose store may be here

    # the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._hear_signals()
            if not self._is_on():
                self._left = True
                self._post.stop()
                return
            for told in list(self._post.told.values()):
                self.write_trail(told)
            waiting = here.waiting
            if waiting is not None:
                self._look_at(waiting)

    def _is_on(self) -> bool:
        """Whether this process is still in the world that it watches."""
        world = dist.group.WORLD if dist.is_initialized() else None
        return world is not None and world is self._world()

    def _look_at(self, waiting: Waiting) -> None:
        if self._said is not waiting:
            self._said, self._extended, self._spoken = waiting, 0.0, False
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
        found = self._gone() or self._left_behind(waiting) or self._elsewhere()
        if found is not None:
            return found
        late = self._late(waiting)
        if any(map(self._extends, late)):
            self._extended = min(self._extended + PERIOD, EXTENSION * waiting.timeout)
        if age > SAY_AFTER and not self._spoken and not all(self._waits(rank) for rank in late):
            self._spoken = True
            self.say(self._story(waiting, age))
        if age > waiting.timeout + self._extended:
            more = f"longer than timeout={waiting.timeout:g} s; where it may be, write fxpipe.compile(..., timeout=)"
            return Ending(self.rank, False, f"{self._story(waiting, age)}: {more}", ())
        return None

    # what became of the others

    def _gone(self) -> Ending | None:
        """Ranks whose processes have ended, where the system says so, and no cause was told before they did."""
        now = time.monotonic()
        for rank, heard in list(self._post.heard.items()):
            if not heard.state.left and state_of(heard.state.process, self.process) in ("ended", "gone"):
                self._suspects.setdefault(rank, now)
        sure = [rank for rank, seen in self._suspects.items() if self._post.began > seen or now - seen > _SILENT]
        sure = [rank for rank in sure if not self._post.heard[rank].state.left]
        return self._found(sure) if sure else None

    def _found(self, ranks: Sequence[int]) -> Ending:
        return Ending(self.rank, False, "; ".join(map(self._described, ranks[:_SHOWN])), tuple(ranks))

    def _left_behind(self, waiting: Waiting) -> Ending | None:
        now = time.monotonic()
        heard = {rank: self._post.heard.get(rank) for rank in waiting.ranks}
        left = [rank for rank, one in heard.items() if one and one.state.left and now - one.at > _LEFT]
        return self._found(left[:_SHOWN]) if left else None

    def _elsewhere(self) -> Ending | None:
        """Ranks that have made another call than this one has, where both should have made the same."""
        for rank, heard in list(self._post.heard.items()):
            if heard.state.epoch != here.epoch:
                continue
            differing = first_difference(here.calls, heard.state.calls, self.rank, rank)
            if differing is not None:
                mine, theirs = differing
                everyone = {self.rank: mine.name} | {
                    other: call.name
                    for other, one in self._post.heard.items()
                    if one.state.epoch == here.epoch
                    and (call := _call_like(mine, one.state.calls, self.rank)) is not None
                }
                everyone[rank] = theirs.name
                return Ending(self.rank, False, self._apart(everyone), ())
        return None

    def _apart(self, calls: dict[int, str]) -> str:
        ranks: dict[str, list[int]] = {}
        for rank, name in sorted(calls.items()):
            ranks.setdefault(name, []).append(rank)
        told = [f"{_listed([self.named(rank) for rank in some])} in {name}" for name, some in ranks.items()]
        told[0] = told[0].replace(" in ", " is in " if len(ranks[next(iter(ranks))]) == 1 else " are in ", 1)
        return f"{', '.join(told)}; all ranks must make the same calls of fxpipe, in one order"

    def _late(self, waiting: Waiting) -> list[int]:
        """The ranks that are waited for; of a group those that have not come."""
        words = waiting.words()
        heard = {rank: self._post.heard.get(rank) for rank in waiting.ranks}
        late = [rank for rank, one in heard.items() if one is None or one.state.waits_for != words]
        return late or list(waiting.ranks)

    def _waits(self, rank: int) -> bool:
        heard = self._post.heard.get(rank)
        return heard is not None and bool(heard.state.waits_for) and not self._is_silent(rank)

    def _story(self, waiting: Waiting, age: float) -> str:
        """Who waits for whom, from this rank on to one that does not wait."""
        parts, seen, late = [f"{self.named(self.rank)} waits for {waiting.words()}, {age:.0f} s"], {self.rank}, None
        late = self._late(waiting)
        while late := [rank for rank in late if rank not in seen]:
            slow = [rank for rank in late if not self._waits(rank)]
            shown = slow[:_SHOWN] or late[:1]
            parts += map(self._described, shown)
            seen |= set(late)
            late = [] if slow else list(self._post.heard[shown[0]].state.ranks)
        noted = [f"on {self.named(rank)} {note}" for rank in seen - {self.rank} for note in self._notes(rank)]
        return "; ".join([*parts, *noted])

    def _notes(self, rank: int) -> Sequence[str]:
        heard = self._post.heard.get(rank)
        return heard.state.noted if heard is not None else ()

    def _is_silent(self, rank: int) -> bool:
        heard = self._post.heard.get(rank)
        return heard is None or time.monotonic() - heard.at > _SILENT

    def _is_stopped(self, rank: int) -> bool:
        heard = self._post.heard.get(rank)
        return heard is not None and state_of(heard.state.process, self.process) == "stopped"

    def _extends(self, rank: int) -> bool:
        """Whether a rank is known to work on what may take long."""
        heard = self._post.heard.get(rank)
        return heard is not None and heard.state.extends and not self._is_silent(rank) and not self._is_stopped(rank)

    def _described(self, rank: int) -> str:
        name, heard = self.named(rank), self._post.heard.get(rank)
        if heard is None:
            return f"{name} was not heard of"
        system = state_of(heard.state.process, self.process)
        if heard.state.left:
            return f"{name} has left: its program has ended"
        if system in ("ended", "gone"):
            return f"{name} is gone: its process has ended"
        where = f"{heard.state.where}, {heard.state.age:.0f} s"
        if system == "stopped":
            return f"{name} is stopped, as by SIGSTOP; when it was last heard of it {_past(where)}"
        if self._is_silent(rank):
            return f"{name} is silent, {time.monotonic() - heard.at:.0f} s; when it was last heard of it {_past(where)}"
        return f"{name} {where}"

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
            where = "is outside of fxpipe's calls" + (f", behind {last}" if last else "")
        extends = waiting is None and any(phase.extends for phase in inside)
        noted = tuple(here.noted)
        return Report(
            self.process, where, now - since, words, ranks, extends, self._left, here.epoch, here.calls, noted
        )

    # signals

    def _hear_signals(self) -> None:
        """Waits for a while, or for a signal. Python handles Ctrl-C only once a wait inside of torch is over."""
        if self._bell is None:
            self._stopping.wait(PERIOD)
            return
        try:
            rung = self._bell.recv(64)
        except TimeoutError:
            return
        except OSError:  # closed as this process ends
            self._stopping.wait(PERIOD)
            return
        if rung and self._rang_before >= 0:
            with contextlib.suppress(OSError):
                os.write(self._rang_before, rung)
        waiting = here.waiting
        ctrl_c = signal.SIGINT in rung and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ctrl_c and waiting is not None:
            waiting.end()

    def _hang_up(self) -> None:
        if self._rings is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.set_wakeup_fd(-1) == self._rings.fileno():
            signal.set_wakeup_fd(self._rang_before)
        self._thread.join(2 * PERIOD)
        for end in (self._bell, self._rings):
            if end is not None:
                end.close()


def _wake_up_calls() -> tuple[socket.socket | None, socket.socket | None, int]:
    """Where a byte arrives for each signal that Python handles, what it is sent from, and where it went before."""
    if threading.current_thread() is not threading.main_thread():
        return None, None, -1
    bell, rings = socket.socketpair()
    bell.settimeout(PERIOD)
    rings.setblocking(False)
    return bell, rings, signal.set_wakeup_fd(rings.fileno(), warn_on_full_buffer=False)


def _call_like(mine: Call, calls: Sequence[Call], rank: int) -> Call | None:
    """What another rank has made in place of this rank's call: the first of its calls that is not before it."""
    shared = [call for call in calls if call.members is None or rank in call.members]
    return next((call for call in shared if call[:2] == mine[:2] and call.members == mine.members), None)


def _past(where: str) -> str:
    for now, then in (("is ", "was "), ("waits ", "waited ")):
        if where.startswith(now):
            return then + where.removeprefix(now)
    return where


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


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
