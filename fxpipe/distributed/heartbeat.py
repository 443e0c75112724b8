"""Heartbeat: what the ranks of a world report of themselves, beside their work, through a store.

A thread does it: a store may not answer, where the process that holds it is stopped, and then only this thread waits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fxpipe.distributed.activity import Call
from fxpipe.graph.plain_data import decode, encode
from fxpipe.torch_compat import connection_of

PERIOD = 0.5
"""Seconds between two exchanges."""
# A large world exchanges less often, so many seconds for each of its ranks: all of them ask one store.
_PER_RANK = 0.0005
_CONNECT = 2.0  # seconds to reach a store that was lost
_LONGEST_PAUSE = 10.0  # seconds until the next attempt

SILENT = 5.0
"""Seconds without a new report after which a rank is called silent."""
PROGRAM = 0
"""In place of a transport's number: the program of a rank ends with an error."""


class ProcessId(NamedTuple):
    """A process, so that no later one is taken for it. ``machine``: as ``this_machine`` says. ``started``: in ticks
    since the machine started."""

    machine: str
    pid: int
    started: int


class Ending(NamedTuple):
    """Why a run ends, in one rank's words. ``error``: it is an exception of that rank's own; else it is what it found
    of ``culprits``."""

    text: str
    culprits: tuple[int, ...] = ()
    error: bool = False


class Report(NamedTuple):
    """What a rank is doing. ``where``: in words behind its number; ``age``: for how many seconds. ``waits_for``: what,
    and ``ranks``: for whom. ``extends``: whether others give it more time. ``left``: its program has ended. ``calls``:
    since ``epoch``. ``beat``: counts the reports."""

    process: ProcessId
    where: str
    age: float
    waits_for: str
    ranks: tuple[int, ...]
    extends: bool
    left: bool
    epoch: int
    calls: tuple[Call, ...]
    beat: int = 0


class Heard(NamedTuple):
    """The last report of a rank, and when it was new."""

    report: Report
    at: float

    @property
    def is_silent(self) -> bool:
        """Whether nothing new has come for some seconds."""
        return time.monotonic() - self.at > SILENT

    @property
    def waits(self) -> bool:
        """Whether this rank waits itself, so that another one is to blame."""
        return bool(self.report.waits_for) and not self.is_silent

    @property
    def system(self) -> str:
        """What the system says of its process, as ``state_of``."""
        return state_of(self.report.process)

    def __str__(self) -> str:
        """What became of this rank, or what it does: words that follow its name."""
        report, system, silence = self.report, self.system, time.monotonic() - self.at
        if self.at < 0:
            return "was not heard of"
        if report.left:
            return "has left: its program has ended"
        if system in ("ended", "gone"):
            return "is gone: its process has ended"
        last = f"{report.where}, {report.age:.0f} s"
        if system == "stopped":
            return f"is stopped, as by SIGSTOP; its last report: {last}"
        return f"is silent, {silence:.0f} s; its last report: {last}" if silence > SILENT else last


UNHEARD = Heard(Report(ProcessId("", 0, 0), "", 0.0, "", (), False, False, -1, ()), float("-inf"))


class Heartbeat:
    """Publishes this rank's report, and fetches those of the ``wanted`` ranks, and why runs end."""

    def __init__(
        self, store: Store, rank: int, size: int, report: Callable[[], Report], wanted: Collection[int]
    ) -> None:
        self._connect(store)
        self._rank, self._report = rank, report
        self._period, world = max(PERIOD, _PER_RANK * size), dist.group.WORLD
        # Weakly: a destroyed world must be able to go.
        self._world = weakref.ref(world) if world is not None else lambda: None
        self._broken, self._stopping, self._beat = False, False, 0
        self._wake, self._exchanged = threading.Event(), threading.Condition()
        self._unsent: dict[int, Ending] = {}
        self.wanted = wanted
        self.transports = {PROGRAM}
        """The numbers of those that are open."""
        self.heard: dict[int, Heard] = {}
        self.endings: dict[int, Ending] = {}
        """Why a transport ends, by its number."""
        self.began = 0.0
        """When the last exchange that came to its end had begun."""
        self._thread = threading.Thread(target=self._run, name="fxpipe heartbeat", daemon=True)
        self._thread.start()

    def is_on(self) -> bool:
        """Whether this process is still in the world of its reports; else torch.distributed was ended."""
        world = dist.GroupMember.WORLD  # each message asks
        return world is not None and world is self._world()

    def end(self, number: int, ending: Ending) -> None:
        """Reports to all ranks why a transport ends; what the first rank reports counts."""
        self._unsent.setdefault(number, ending)
        self.refresh()

    def refresh(self, seconds: float = 2.0) -> None:
        """Returns after an exchange that begins from now on, or when the time is over."""
        now = time.monotonic()
        self._wake.set()
        with self._exchanged:
            self._exchanged.wait_for(lambda: self.began >= now or self._broken, seconds)

    def stop(self, stays_for: Collection[int], seconds: float = 3.0) -> None:
        """Publishes once more, and ends. ``stays_for``: ranks whose store this process holds; it ends after them."""
        until = time.monotonic() + seconds
        self._stopping = True
        self._wake.set()
        self._thread.join(seconds)
        # Python must not end while the thread is inside of torch: coming back, it would abort the process.
        if self._thread.is_alive() and (connection := connection_of(self._own)) is not None:
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            self._thread.join(seconds)
        with contextlib.suppress(RuntimeError):
            while stays_for and not self._broken and time.monotonic() < until:
                self._hear(stays_for)
                if all(heard.report.left for heard in self.heard.values()):
                    return
                threading.Event().wait(0.05)

    def _run(self) -> None:
        pause = self._period
        while not (self._broken and self._stopping):
            began, stopping = time.monotonic(), self._stopping
            try:
                if self.is_on():
                    if self._broken and self._address is not None:
                        # torch's own attempt would wait for long, and warn.
                        socket.create_connection(self._address, _CONNECT).close()
                        self._connect(self._own)
                    self._exchange()
                self._broken, pause = False, self._period
            except (RuntimeError, OSError):  # the process that holds the store is gone, or cannot be reached
                self._broken, pause = True, min(2 * pause, _LONGEST_PAUSE)
            with self._exchanged:
                self.began = began
                self._exchanged.notify_all()
            if stopping:  # and has reported it
                return
            self._wake.wait(pause)
            self._wake.clear()

    def _connect(self, store: Any) -> None:
        """A connection of its own, so that nobody waits for a wait of somebody else."""
        self._own = store.clone()
        self._store: Any = PrefixStore("fxpipe", self._own)  # its values are bytes, whatever its signatures say
        with connection_of(self._own) or contextlib.nullcontext() as connection:
            self._address = None if connection is None else connection.getpeername()[:2]

    def _exchange(self) -> None:
        while self._unsent:
            number, ending = next(iter(self._unsent.items()))
            self._store.compare_set(f"{number}/ending", "", encode(ending))
            del self._unsent[number]
        self._beat += 1
        self._store.set(_place(self._rank), encode(self._report()._replace(beat=self._beat)))
        if self._stopping:  # it asks for nothing more, which might take long
            return
        # Reports first, endings second: a rank reports its ending and is gone then, so whoever sees it gone here hears
        # in the same exchange, or has heard, why.
        self._hear(self.wanted)
        for number in self.transports - self.endings.keys():
            if self._store.check([f"{number}/ending"]):
                self.endings[number] = decode(self._store.get(f"{number}/ending"), "a rank")

    def _hear(self, ranks: Collection[int]) -> None:
        there = [rank for rank in ranks if rank in self.heard or self._store.check([_place(rank)])]
        for rank, text in zip(there, self._store.multi_get(list(map(_place, there))) if there else (), strict=True):
            report: Report = decode(text, f"rank {rank}")
            if self.heard.get(rank, UNHEARD).report.beat != report.beat:
                self.heard[rank] = Heard(report, time.monotonic())


def _place(rank: int) -> str:
    return f"rank/{rank}"


# --- what the system says of a process on this machine


@functools.cache
def this_machine() -> str:
    """What numbers its processes together: host, boot and namespace; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def this_process() -> ProcessId:
    """This very process."""
    return ProcessId(this_machine(), os.getpid(), _stat(os.getpid())[1])


def state_of(process: ProcessId) -> str:
    """ "running", "stopped" (by SIGSTOP or its like), "gone", or "ended" (gone, and its parent has not looked yet); ""
    where nobody can say: it is on another machine."""
    if not process.machine or process.machine != this_machine():
        return ""
    # A pid is given out again: only with the same start time is it the same process.
    letter, started = _stat(process.pid)
    if started != process.started:
        return "gone"
    return {"T": "stopped", "Z": "ended", "X": "ended"}.get(letter, "running")


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time, by proc(5); a time of -1 where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", -1
    return fields[0], int(fields[19])
