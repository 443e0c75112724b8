"""Watchdog: ends every wait of this process, with an error that names the awaited event and the other ranks' states.

A rank records its activity (``activity``) and publishes it (``heartbeat``). While the rank waits, a thread compares: a
peer that is gone, or in a different call, ends the wait within seconds; a slow, silent or stopped peer at the timeout.
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from fxpipe.distributed import heartbeat
from fxpipe.distributed.activity import Waiting, first_difference, here
from fxpipe.distributed.grid import BATCH
from fxpipe.distributed.heartbeat import PERIOD, PROGRAM, Ending, Heard, Heartbeat, Report
from fxpipe.distributed.topology import Topology
from fxpipe.errors import FxpipeError, describe_error, printable
from fxpipe.torch_compat.groups import default_store


def say(text: str) -> None:
    """Prints a line to stderr at once, since the process may be killed soon."""
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"fxpipe: {printable(' | '.join(text.splitlines()))}", file=sys.stderr, flush=True)


def write_trail(rank: int, head: str) -> None:
    """Writes the last actions of this rank to a file in the folder FXPIPE_DEBUG_DIR, if set."""
    folder = os.environ.get("FXPIPE_DEBUG_DIR")
    if not folder:
        return
    now = time.monotonic()
    lines = [f"{now - at:10.3f} s ago  {what}" for at, what in list(here.trail)]
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"rank{rank}.txt").write_text("\n".join([head, *lines, ""]))
    except OSError as error:
        say(f"FXPIPE_DEBUG_DIR is {folder!r}, which cannot be written to: {error}")


@contextlib.contextmanager
def ends_later() -> Iterator[None]:
    """Delays SIGTERM, by which launchers end the remaining processes, until the context has reported the cause."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


LOOK_AFTER = 1.0
"""Seconds of waiting after which a rank checks the states of other ranks."""
SAY_AFTER = 30.0
"""Seconds of waiting after which a rank prints which ranks it waits for."""
EXTENSION = 12
"""The most timeouts by which a wait is extended while other ranks capture, compile or save."""
_SOON = 0.01  # seconds between two checks after a connection broke: launchers end the other processes soon
_LEFT = 5.0  # seconds after which a wait for a rank whose program has ended fails
_CLOSE = 64  # the most ranks of a world in which a rank watches all others, and not only neighbours
_SHOWN = 3  # the most ranks that a message describes
_COMPARED, _LONGEST = 4, 200  # the most facts and ranks, and characters of a value, in a message on differences
_TIMED_OUT = "Timed out waiting"  # gloo's text
_BROKEN = ("Connection closed by peer", "Connection reset", "Broken pipe", _TIMED_OUT, "closure")


class Watchdog:
    """Watches the waits of this process, as a rank of its world."""

    def __init__(self) -> None:
        self.rank, self._size, self._process = dist.get_rank(), dist.get_world_size(), heartbeat.this_process()
        self._hears_all = self._size <= _CLOSE
        self._peers: Collection[int] = self._near(range(self._size))
        self._fellows: Collection[int] = self._peers  # in a large world the ranks of its groups
        self._topology: Topology | None = None
        self._pipe: Sequence[int] = ()
        self._left = False
        self._verdicts: dict[int, Ending] = {}
        self._ended: dict[int, float] = {}  # rank → the time in seconds at which its end was first seen
        self._wait: Waiting | None = None
        self._stopping = threading.Event()
        self._heartbeat = Heartbeat(default_store(), self.rank, self._size, self._report, self._peers)
        self.is_on = self._heartbeat.is_on
        self._wakeup = SignalWakeup(PERIOD)
        self._thread = threading.Thread(target=self._run, name="fxpipe watchdog", daemon=True)
        self._thread.start()
        atexit.register(self._leave)  # runs before the world's atexit handler, which was registered earlier

    # --- calls by a transport

    def named(self, rank: int) -> str:
        """Names a rank with its coordinates: "rank 3 (pipe 1, data 1)"."""
        shown = ""
        if (topology := self._topology) is not None:
            coordinate = topology.coordinate(rank)
            shown = ", ".join(f"{axis} {coordinate[axis]}" for axis, size in topology.axes if size > 1)
        return f"rank {rank} ({shown})" if shown else f"rank {rank}"

    def watch(self, number: int, topology: Topology) -> None:
        """Starts watching transport ``number`` with this topology."""
        self._topology = topology
        self._pipe, data = (next(g for g in topology.groups(axis) if self.rank in g) for axis in ("pipe", BATCH))
        near = map(self._near, (range(self._size), self._pipe, data))
        self._heartbeat.wanted = self._peers = {*chain.from_iterable(near)}
        self._fellows = self._peers if self._hears_all else {*self._pipe, *data} - {self.rank}
        here.forget(number)
        self._heartbeat.transports.add(number)
        self._heartbeat.refresh()

    def unwatch(self, number: int) -> None:
        """Stops watching a closed transport."""
        self._heartbeat.transports.discard(number)

    def verdict(self, number: int) -> Ending | None:
        """Returns why the waits of a transport end; None if they go on."""
        endings = self._heartbeat.endings
        return self._verdicts.get(number) or endings.get(number) or endings.get(PROGRAM)

    def record_verdict(self, number: int, ending: Ending) -> None:
        """Records the first reason that this rank has found, or its own failure."""
        if self._verdicts.setdefault(number, ending) is ending:
            where = here.described()[0]
            write_trail(self.rank, f"{self.named(self.rank)} {where}, as this was reported: {ending.text}")

    def end(self, number: int, ending: Ending) -> None:
        """Reports to all ranks why a transport ends."""
        self.record_verdict(number, ending)
        self._heartbeat.end(number, ending)

    def why(self, number: int, ranks: Sequence[int], reason: str, seconds: float = 5.0) -> Ending:
        """Returns why a connection with one of ``ranks`` broke; waits for the cause at most ``seconds``. ``reason``:
        torch's error."""
        # The end of a rank shows at once, its reason only at the next exchange: hence repeated checks. A stopped rank
        # reports nothing.
        until, ranks = time.monotonic() + max(seconds, self._heartbeat.silent), self._near(ranks)
        others = ranks or self._peers
        while (ending := self.verdict(number)) is None:
            self._heartbeat.awaited = ranks
            self._lost(ranks, 0.0)  # records the time: only an exchange that begins later has read the last report
            self._heartbeat.refresh()
            if (ending := self.verdict(number) or self._lost(ranks, 0.0)) is not None:
                break
            quiet = [rank for rank in others if self._heard(rank).system == "stopped"]
            if time.monotonic() > until or (quiet and _TIMED_OUT in reason):
                quiet = quiet or [rank for rank in others if self._heard(rank).is_silent]
                text = "; ".join(["a connection broke", *self._described(quiet or ranks), *filter(None, [reason])])
                return Ending(text, tuple(quiet))
            self._stopping.wait(_SOON if self._hears_all else self._heartbeat.period)
        return ending

    def message(self, ending: Ending, waited_for: str) -> str:
        """Returns this rank's message on why the run ends. ``waited_for``: the event that this rank waited for."""
        if ending.error:
            return f"another rank failed: {ending.text}"
        me = self.named(self.rank)
        return ending.text if f"{me} waits for" in ending.text else f"{ending.text}; {me} waited for {waited_for}"

    def difference(self, everyone: Mapping[int, Mapping[str, str]]) -> str:
        """Describes facts that differ, as "zero is 1 on rank 0 and 2 others, and 0 on rank 3 (pipe 1)"; or empty."""
        texts = []
        for name in dict.fromkeys(name for facts in everyone.values() for name in facts):
            ranks: dict[str, list[int]] = {}
            for rank, facts in everyone.items():
                ranks.setdefault(facts.get(name, "not known"), []).append(rank)
            parts = []
            for value, some in ranks.items():
                others = f" and {len(some) - _COMPARED} others" if len(some) > _COMPARED else ""
                parts.append(f"{value:.{_LONGEST}} on {', '.join(map(self.named, some[:_COMPARED]))}{others}")
            if len(ranks) > 1:
                texts.append(f"{name} is {', and '.join(parts)}")
        return "; ".join(texts[:_COMPARED])

    def describe_calls(self, calls: Mapping[int, str]) -> str:
        """Returns a message that says which ranks are in which calls."""
        ranks: dict[str, list[str]] = {}
        for rank, name in sorted(calls.items()):
            ranks.setdefault(name, []).append(self.named(rank))
        where = ", ".join(f"{', '.join(some)} in {name}" for name, some in ranks.items())
        return (
            f"ranks are in different calls: {where}; all ranks must make the same calls of fxpipe, in one order: none "
            "under `if rank == 0`, and as many on each, as with topo.sampler(dataset)"
        )

    # --- the end of this process

    def end_with(self, error: BaseException) -> None:
        """Reports the exception that ends this rank's program. If another rank is the cause, waits some seconds until
        that rank has ended: launchers report the first process to end as the cause."""
        cause = self.verdict(here.epoch)
        broken = isinstance(error, RuntimeError) and any(words in str(error) for words in _BROKEN)
        if cause is None and broken and not isinstance(error, FxpipeError):  # torch's own error, which names no cause
            cause = self.why(here.epoch, [], str(error), seconds=6.0)
            if cause.culprits:
                say(self.message(cause, "a call of torch.distributed"))
        # The rank that is the cause reports and ends at once; other ranks end later, or a launcher would blame them.
        culprits = cause.culprits if cause else ()
        if not culprits or self.rank in culprits:
            text = f"{self.named(self.rank)}: {describe_error(error)}"
            self.end(PROGRAM, Ending(text, (self.rank,), error=True))
            return
        until = time.monotonic() + 5.0
        heard = [rank for rank in culprits if rank in self._heartbeat.heard]
        while time.monotonic() < until and any(self._heard(rank).system != "gone" for rank in heard):
            threading.Event().wait(0.05)

    def stop(self, stays_for: Collection[int] = ()) -> None:
        """Ends the watchdog at the end of this rank's program."""
        atexit.unregister(self._leave)
        self._left = True
        self._stopping.set()
        self._heartbeat.stop(stays_for)
        self._wakeup.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * PERIOD)

    def is_mine(self) -> bool:
        """Whether this watchdog belongs to this process, and not to the process that this process was forked from."""
        return self._process.pid == os.getpid()

    def _leave(self) -> None:
        if self.is_mine():
            holds = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # may hold the store
            self.stop(self._fellows if holds else ())

    def _report(self) -> Report:
        waiting, (where, since) = here.waiting, here.described()
        words, ranks = waiting.what() if waiting is not None else ("", ())
        extends = waiting is None and any(phase.extends for phase in here.inside)
        return Report(self._process, where, time.monotonic() - since, words, self._near(ranks), extends, self._left)

    # --- the thread

    def _run(self) -> None:
        # In every period: check for Ctrl-C first, then whether a wait of the main thread must end, and why.
        while not self._stopping.is_set():
            ctrl_c = self._wakeup.hears_ctrl_c()
            if not self.is_on():
                self._left = True
                self._heartbeat.stop(())
                return
            waiting = here.waiting
            if waiting is None:
                self._heartbeat.awaited = None
            elif ctrl_c:
                waiting.end()  # then Python's own handler runs, and raises KeyboardInterrupt
            elif (ending := self.verdict(waiting.number) or self._judged(waiting)) is not None:
                self.record_verdict(waiting.number, ending)
                waiting.end()

    def _judged(self, waiting: Waiting) -> Ending | None:
        now = time.monotonic()
        age = now - waiting.since
        # The state of the present wait: its extension in seconds, whether it was printed, the time of the last check.
        if self._wait is not waiting:
            self._wait, self._extended, self._spoken, self._looked = waiting, 0.0, False, now
        words, awaited = waiting.what()
        ranks = self._near(awaited)
        # A period before they are looked at, so that they have come by then.
        self._heartbeat.awaited = ranks if age >= LOOK_AFTER - PERIOD else None
        if age < LOOK_AFTER:
            return None
        ending = self._lost(ranks, _LEFT) or self._elsewhere()
        if ending is not None:
            return ending
        # Ranks that wait for the same event have arrived; the other ranks are late, and may explain the wait.
        late = [rank for rank in ranks if self._heard(rank).report.waits_for != words] or ranks
        heard = [self._heard(rank) for rank in late if self._heard(rank).system != "stopped"]
        # A capture, a compilation or a save may take longer than any timeout: extend the wait while it runs, in a large
        # world on any rank.
        far = not self._hears_all and now - self._heartbeat.extended_at < self._heartbeat.silent
        if far or any(peer.report.extends and not peer.is_silent for peer in heard):
            self._extended = min(self._extended + now - self._looked, EXTENSION * waiting.timeout)
        self._looked = now
        # If all that are heard wait, too, a neighbour of the rank that is late says so before.
        all_wait = all(self._heard(rank).waits for rank in late)
        patience = 2 * self._heartbeat.period if all_wait and not self._hears_all else 0.0
        is_over = age > waiting.timeout + self._extended + patience
        speaks = age > SAY_AFTER and not self._spoken and not all_wait
        if not (is_over or speaks):
            return None
        story = "; ".join([f"{self.named(self.rank)} waits for {words}, {age:.0f} s", *self._last_of_chain(late)])
        if not is_over:
            self._spoken = True
            say(story)
            return None
        more = (
            f"longer than timeout={waiting.timeout:g} s; where it may be, write fxpipe.compile(..., "
            "checks=fxpipe.Checks(timeout=...))"
        )
        return Ending(f"{story}: {more}")

    # --- the states of other ranks

    def _near(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Returns the ranks of a group that this rank hears: in a large world its two neighbours, as in a ring, since
        one of the ranks that wait for a late rank is its neighbour."""
        if self._hears_all:
            return tuple(rank for rank in ranks if rank != self.rank)
        ring = sorted({*ranks, self.rank})
        mine = ring.index(self.rank)
        return tuple({ring[mine - 1], ring[(mine + 1) % len(ring)]} - {self.rank})

    def _heard(self, rank: int) -> Heard:
        return self._heartbeat.heard.get(rank, heartbeat.UNHEARD)

    def _lost(self, waited_for: Collection[int], patience: float) -> Ending | None:
        """Returns an ending for ranks whose processes have ended, once their last reports were read; or for awaited
        ranks whose programs ended at least ``patience`` seconds ago; else None."""
        now, gone, left = time.monotonic(), list[int](), list[int]()
        for rank, heard in list(self._heartbeat.heard.items()):
            # A rank counts as gone once its last report could arrive: after a newer exchange, or once it is silent.
            if heard.report.left or heard.system in ("ended", "gone"):
                since = self._ended.setdefault(rank, now)
                if not heard.report.left and (self._heartbeat.began > since or now - since > self._heartbeat.silent):
                    gone.append(rank)
                if heard.report.left and rank in waited_for and now - since >= patience:
                    left.append(rank)
        ranks = gone or left
        return Ending("; ".join(self._described(ranks)), tuple(ranks)) if ranks else None

    def _elsewhere(self) -> Ending | None:
        """Returns an ending for a rank whose calls differ from this rank's calls; else None."""
        for rank, (epoch, calls) in list(self._heartbeat.calls.items()):
            names = first_difference(here.calls, calls, rank in self._pipe)
            if names is not None and epoch == here.epoch:
                return Ending(self.describe_calls({self.rank: names[0], rank: names[1]}))
        return None

    def _last_of_chain(self, late: Sequence[int]) -> list[str]:
        """Describes the ranks at the end of the chain of waits: the late ranks, or the ranks that these wait for."""
        # Follow the first awaited rank until a rank does not wait, or the chain is a circle.
        seen = {self.rank}
        while late and all(self._heard(rank).waits for rank in late):
            seen |= set(late)
            further = [rank for rank in self._heard(late[0]).report.ranks if rank not in seen]
            further = [rank for rank in further if self._hears_all or rank in self._heartbeat.heard]
            if not further:
                return self._described(late[:1])
            late = further
        return self._described(rank for rank in late if not self._heard(rank).waits)

    def _described(self, ranks: Iterable[int]) -> list[str]:
        """Describes the states of the first few of ``ranks``."""
        return [f"{self.named(rank)} {self._heard(rank)}" for rank in list(ranks)[:_SHOWN]]


class SignalWakeup:
    """Receives signals while the main thread waits inside torch, where Python runs no handlers. Works if the main
    thread makes this object, and no other code has set a wakeup file descriptor."""

    def __init__(self, seconds: float) -> None:
        # Python writes the signal's number into a file descriptor at once, even if its handler cannot run yet.
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(seconds)
        self._theirs.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            # Another library's descriptor, such as asyncio's, is restored.
            before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            if before >= 0:
                signal.set_wakeup_fd(before)

    def hears_ctrl_c(self) -> bool:
        """Waits for a signal or the timeout; returns whether the signal was a SIGINT with Python's default handler."""
        try:
            rung = self._ours.recv(64)
        except TimeoutError:
            return False
        return signal.SIGINT in rung and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def close(self) -> None:
        """Ends a wait at once, and stops receiving signals; off the main thread, leaves the descriptor open, unread."""
        self._theirs.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not threading.main_thread():
            self._theirs.detach()
        elif (before := signal.set_wakeup_fd(-1)) != self._theirs.fileno():
            signal.set_wakeup_fd(before)


_current: Watchdog | None = None


def watchdog() -> Watchdog:
    """Returns the watchdog of this process and its world; makes it if necessary."""
    global _current
    if _current is None:
        before = sys.excepthook  # prints the exception first, before other output can repeat it

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            end_with(error)

        sys.excepthook = hook
    if _current is None or not _current.is_mine() or not _current.is_on():
        if _current is not None and _current.is_mine():
            _current.stop()
        _current = Watchdog()
        here.forget(0)
    return _current


def end_with(error: BaseException) -> None:
    """Reports the exception that ends this process's program, if it has a watchdog."""
    if _current is not None and _current.is_mine():
        _current.end_with(error)


def _in_fork() -> None:
    """Stops a forked process from sending its signals to the parent's watchdog."""
    if _current is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_fork)
