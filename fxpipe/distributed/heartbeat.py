"""Heartbeat: the ranks of a world publish reports of their state through a store, in the background.

All ranks use one store, so each asks for little: the reports of some ranks, and whether a run ends; for the names of
calls, and further reports, once a wait is late. A thread does so: the store does not answer while its process is
stopped, and then only this thread waits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fxpipe.distributed.activity import Call, here
from fxpipe.plain_data import decode, encode
from fxpipe.torch_compat.groups import connection_of

PERIOD = 0.5
"""Seconds between two exchanges, in a world of at most ``PERIOD / _PER_RANK`` ranks."""
_PER_RANK = 0.0005  # seconds between exchanges per rank of a larger world
_CONNECT = 2.0  # seconds to reach a store that was lost
_LONGEST_PAUSE = 10.0  # seconds until the next attempt

SILENT = 5.0
"""Seconds without a new report after which a rank is called silent; at least three periods."""
PROGRAM = 0
"""The number, instead of a transport's, under which a rank reports that its program ends with an error."""


class ProcessId(NamedTuple):
    """Identifies a process uniquely, even if its pid is reused. ``machine``: see ``this_machine``. ``started``: ticks
    from the machine's boot to the process's start."""

    machine: str
    pid: int
    started: int


class Ending(NamedTuple):
    """Why a run ends, as a rank reports. ``error``: the rank itself has raised; otherwise the text is about the ranks
    ``culprits``."""

    text: str
    culprits: tuple[int, ...] = ()
    error: bool = False


class Report(NamedTuple):
    """A rank's state. ``where``: a text that follows the rank's number; ``age``: the state's duration in seconds.
    ``waits_for``: the awaited event; ``ranks``: the awaited ranks. ``extends``: whether others extend their timeout.
    ``left``: its program has ended. ``calls``: a digest of its calls. ``beat``: the number of the report."""

    process: ProcessId
    where: str
    age: float
    waits_for: str
    ranks: tuple[int, ...]
    extends: bool
    left: bool
    calls: int = 0
    beat: int = 0


class Heard(NamedTuple):
    """The last report of a rank; ``at``: the monotonic time in seconds at which this rank received it; ``limit``: the
    seconds after which the rank is silent."""

    report: Report
    at: float
    limit: float = SILENT

    @property
    def is_silent(self) -> bool:
        """Whether no new report has come for ``limit`` seconds."""
        return time.monotonic() - self.at > self.limit

    @property
    def waits(self) -> bool:
        """Whether this rank itself waits for other ranks, so that the cause is another rank."""
        return bool(self.report.waits_for) and not self.is_silent

    @property
    def system(self) -> str:
        """The state of the rank's process, see ``state_of``."""
        return state_of(self.report.process)

    def __str__(self) -> str:
        """A text that follows the rank's name and says what happened to the rank, or what the rank does."""
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
        return f"is silent, {silence:.0f} s; its last report: {last}" if silence > self.limit else last


UNHEARD = Heard(Report(ProcessId("", 0, 0), "", 0.0, "", (), False, False), float("-inf"))


class Heartbeat:
    """Publishes this rank's report; fetches the reports of the ``wanted`` ranks, and the endings of transports."""

    def __init__(
        self, store: Store, rank: int, size: int, report: Callable[[], Report], wanted: Collection[int]
    ) -> None:
        self._connect(store)
        self._rank, self._report = rank, report
        self.period, world = max(PERIOD, _PER_RANK * size), dist.group.WORLD
        self.silent = max(SILENT, 3 * self.period)
        # A weak reference, so that a destroyed world can be freed.
        self._world = weakref.ref(world) if world is not None else lambda: None
        self._broken, self._stopping, self._beat = False, False, 0
        self._wake, self._exchanged = threading.Event(), threading.Condition()
        self._unsent: dict[int, Ending] = {}
        self.wanted = wanted
        self.awaited: Collection[int] | None = None
        """The ranks that a late wait is for, which are heard, too; None if no wait is late."""
        self.transports = {PROGRAM}
        """The numbers of the open transports."""
        self.heard: dict[int, Heard] = {}
        self.calls: dict[int, tuple[int, tuple[Call, ...]]] = {}
        """Rank → the number of a transport, and the last calls since; of ranks that a late wait has asked."""
        self._read: dict[int, int] = {}  # rank → the digest of its calls that were read
        self.extended_at, self._extensions = float("-inf"), 0
        """The monotonic time in seconds at which a late wait saw a rank that captures, compiles or saves."""
        self.endings: dict[int, Ending] = {}
        """Transport number → why the transport ends."""
        self.began = 0.0
        """The monotonic time in seconds at which the last complete exchange began."""
        self._thread = threading.Thread(target=self._run, name="fxpipe heartbeat", daemon=True)
        self._thread.start()

    def is_on(self) -> bool:
        """Whether this process's world still exists; False after ``destroy_process_group()``."""
        world = dist.GroupMember.WORLD  # a fast access, since each message calls this
        return world is not None and world is self._world()

    def end(self, number: int, ending: Ending) -> None:
        """Reports to all ranks why a transport ends; the first report of any rank counts."""
        self._unsent.setdefault(number, ending)
        self.refresh()

    def refresh(self, seconds: float = 2.0) -> None:
        """Waits for an exchange that begins from now on, at most ``seconds``."""
        now = time.monotonic()
        self._wake.set()
        with self._exchanged:
            self._exchanged.wait_for(lambda: self.began >= now or self._broken, seconds)

    def stop(self, stays_for: Collection[int], seconds: float = 3.0) -> None:
        """Publishes a last report, and ends. ``stays_for``: ranks that use this process's store, and must end first."""
        until = time.monotonic() + seconds + self.period - PERIOD
        self._stopping = True
        self._wake.set()
        self._thread.join(seconds)
        # Python must not end while the thread is inside torch: on its return the thread would abort the process.
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
        pause = self.period
        while not (self._broken and self._stopping):
            began, stopping = time.monotonic(), self._stopping
            try:
                if self.is_on():
                    if self._broken and self._address is not None:
                        # Probe first: torch's own reconnect would wait long, and warn.
                        socket.create_connection(self._address, _CONNECT).close()
                        self._connect(self._own)
                    self._exchange()
                self._broken, pause = False, self.period
            except (RuntimeError, OSError):  # the process that holds the store is gone, or cannot be reached
                self._broken, pause = True, min(2 * pause, _LONGEST_PAUSE)
            with self._exchanged:
                self.began = began
                self._exchanged.notify_all()
            if stopping:  # the last report has been published
                return
            self._wake.wait(pause)
            self._wake.clear()

    def _connect(self, store: Any) -> None:
        """Opens a separate connection to the store, since a wait on a shared connection blocks its other users."""
        self._own, self._digest = store.clone(), 0  # a new connection publishes the calls again
        self._store: Any = PrefixStore("fxpipe", self._own)  # the store's values are bytes, unlike its annotations
        with connection_of(self._own) or contextlib.nullcontext() as connection:
            self._address = None if connection is None else connection.getpeername()[:2]

    def _exchange(self) -> None:
        while self._unsent:
            number, ending = next(iter(self._unsent.items()))
            self._store.compare_set(f"{number}/ending", "", encode(ending))
            self._store.add("endings", 1)
            del self._unsent[number]
        if not self._beat:
            self._store.add("endings", 0)  # so that the key exists
        self._beat += 1
        # Calls before the report that has their digest.
        calls = encode((here.epoch, here.calls))
        if self._digest != (digest := zlib.crc32(calls)):
            self._store.set(f"calls/{self._rank}", calls)
            self._digest = digest
        report = self._report()._replace(calls=digest, beat=self._beat)
        self._store.set(f"rank/{self._rank}", encode(report))
        if report.extends:
            self._store.add("extensions", 1)
        if self._stopping:  # skip the reads, which might take long
            return
        # Read reports before endings: a rank publishes its ending before it exits, so a rank that is seen as gone here
        # has its ending read in this exchange at the latest.
        awaited = self.awaited
        any_ends = self._hear({*self.wanted, *(awaited or ())})
        if awaited is not None:
            self._ask()
        for number in self.transports - self.endings.keys() if any_ends else ():
            if self._store.check([f"{number}/ending"]):
                self.endings[number] = decode(self._store.get(f"{number}/ending"), "a rank")

    def _hear(self, ranks: Collection[int]) -> bool:
        """Reads the reports of these ranks; returns whether any transport of any rank has ended with an error."""
        there = [rank for rank in ranks if rank in self.heard or self._store.check([f"rank/{rank}"])]
        heard = {}
        *texts, endings = self._store.multi_get([*(f"rank/{rank}" for rank in there), "endings"])
        for rank, text in zip(there, texts, strict=True):
            report: Report = decode(text, f"rank {rank}")
            last = self.heard.get(rank, UNHEARD)
            heard[rank] = last if last.report.beat == report.beat else Heard(report, time.monotonic(), self.silent)
        self.heard = heard  # only ranks that are read still: others would seem silent
        return bool(endings != b"0")

    def _ask(self) -> None:
        """Reads the calls of ranks whose calls are others than this rank's, and whether any rank extends waits."""
        for rank, (report, *_) in self.heard.items():
            if report.calls not in (0, self._digest, self._read.get(rank)):
                self.calls[rank] = decode(self._store.get(f"calls/{rank}"), f"rank {rank}")
                self._read[rank] = report.calls
        if self._extensions != (count := self._store.add("extensions", 0)):
            self.extended_at, self._extensions = time.monotonic(), count


# --- the state of a process on this machine


@functools.cache
def this_machine() -> str:
    """Identifies the pid namespace: host, boot and namespace; empty if the system does not provide them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def this_process() -> ProcessId:
    """Returns the id of this process."""
    return ProcessId(this_machine(), os.getpid(), _stat(os.getpid())[1])


def state_of(process: ProcessId) -> str:
    """Returns "running", "stopped" (as by SIGSTOP), "gone" or "ended" (a zombie, which its parent has not reaped); ""
    if the process is on another machine."""
    if not process.machine or process.machine != this_machine():
        return ""
    # The system reuses pids: only the same start time means the same process.
    letter, started = _stat(process.pid)
    if started != process.started:
        return "gone"
    return {"T": "stopped", "Z": "ended", "X": "ended"}.get(letter, "running")


def _stat(pid: int) -> tuple[str, int]:
    """Returns the state letter and the start time in ticks, from proc(5); the time is -1 if the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", -1
    return fields[0], int(fields[19])
