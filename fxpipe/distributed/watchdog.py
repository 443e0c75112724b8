"""Watchdog: every wait of this process ends, and says what it waited for, and what became of the other ranks.

A rank notes what it does (``activity``) and reports it (``heartbeat``). While it waits, a thread compares: a rank that
is gone, or in another call, ends the wait within seconds; one that is slow, silent or stopped, only at its timeout.
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
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from fxpipe.distributed import heartbeat
from fxpipe.distributed.activity import Waiting, first_difference, here
from fxpipe.distributed.heartbeat import PERIOD, PROGRAM, SILENT, Ending, Heard, Heartbeat, Report
from fxpipe.distributed.topology import Topology
from fxpipe.errors import FxpipeError, describe_error, printable
from fxpipe.torch_compat import default_store


def say(text: str) -> None:
    """One line to stderr, at once: what ends this process may leave no time later."""
    with contextlib.suppress(OSError, ValueError):  # there may be nobody to read it
        print(f"fxpipe: {printable(' | '.join(text.splitlines()))}", file=sys.stderr, flush=True)


def write_trail(rank: int, head: str) -> None:
    """The last actions of this rank, into the folder that FXPIPE_DEBUG_DIR names."""
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
    """A SIGTERM, by which launchers end those that are left, does so once it has been said why."""
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
"""Seconds of waiting after which a rank looks what others do."""
SAY_AFTER = 30.0
"""Seconds after which it says for whom it waits."""
EXTENSION = 12
"""How many times its timeout a wait lasts at most, while others capture, compile or save."""
_SOON = 0.01  # seconds between two looks, once a connection broke: launchers end the others soon
_LEFT = 5.0  # seconds after which one whose program has ended is not waited for any more
_CLOSE = 64  # ranks of a world in which each looks at all others, and not only at those of its groups
_SHOWN = 3  # ranks that a message names at once
_COMPARED, _LONGEST = 4, 200  # facts and ranks, and characters of a value, in a message about what differs
_TIMED_OUT = "Timed out waiting"  # as gloo says it
_BROKEN = ("Connection closed by peer", "Connection reset", "Broken pipe", _TIMED_OUT, "closure")


class Watchdog:
    """Looks at the waits of this process, one of a world of processes."""

    def __init__(self) -> None:
        self.rank, self._size, self._process = dist.get_rank(), dist.get_world_size(), heartbeat.this_process()
        self._peers: tuple[int, ...] = tuple(r for r in range(min(self._size, _CLOSE)) if r != self.rank)
        self._topology: Topology | None = None
        self._pipe: Sequence[int] = ()
        self._left = False
        self._verdicts: dict[int, Ending] = {}
        self._ended: dict[int, float] = {}  # rank → when it was first seen to have ended
        self._wait: Waiting | None = None
        self._stopping = threading.Event()
        self._heartbeat = Heartbeat(default_store(), self.rank, self._size, self._report, self._peers)
        self.is_on = self._heartbeat.is_on
        self._wakeup = SignalWakeup(PERIOD)
        self._thread = threading.Thread(target=self._run, name="fxpipe watchdog", daemon=True)
        self._thread.start()
        atexit.register(self._leave)  # before the world is left, which was begun earlier

    # --- what a transport asks

    def named(self, rank: int) -> str:
        """A rank with its coordinates: "rank 3 (pipe 1, data 1)"."""
        shown = ""
        if (topology := self._topology) is not None:
            place = topology.coordinate(rank)
            shown = ", ".join(f"{axis} {place[axis]}" for axis, size in topology.axes if size > 1)
        return f"rank {rank} ({shown})" if shown else f"rank {rank}"

    def take_up(self, number: int, topology: Topology) -> None:
        """A transport of that number begins, with ranks that lie so."""
        self._topology = topology
        self._pipe, data = (next(g for g in topology.groups(axis) if self.rank in g) for axis in ("pipe", "data"))
        if self._size > _CLOSE:
            self._heartbeat.wanted = self._peers = tuple({*self._pipe, *data} - {self.rank})
        here.forget(number)
        self._heartbeat.transports.add(number)
        self._heartbeat.refresh()

    def put_down(self, number: int) -> None:
        """That transport is closed."""
        self._heartbeat.transports.discard(number)

    def verdict(self, number: int) -> Ending | None:
        """Why the waits of a transport end, if they do."""
        endings = self._heartbeat.endings
        return self._verdicts.get(number) or endings.get(number) or endings.get(PROGRAM)

    def judge(self, number: int, ending: Ending) -> None:
        """This rank has found out why, or has itself failed."""
        if self._verdicts.setdefault(number, ending) is ending:
            where = here.described()[0]
            write_trail(self.rank, f"{self.named(self.rank)} {where}, as this was reported: {ending.text}")

    def end(self, number: int, ending: Ending) -> None:
        """Reports to all ranks why a transport ends."""
        self.judge(number, ending)
        self._heartbeat.end(number, ending)

    def why(self, number: int, ranks: Sequence[int], reason: str, seconds: float = 5.0) -> Ending:
        """Why a connection with one of ``ranks`` broke, once that is known; waits for it some seconds. ``reason``: what
        torch says."""
        # The end of a rank shows at once, its reason with the next exchange: hence several looks. A stopped rank never
        # says anything.
        until, others = time.monotonic() + seconds, ranks or self._peers
        while (found := self.verdict(number)) is None:
            self._lost(ranks, 0.0)  # notes since when: only an exchange that begins later has heard its last report
            self._heartbeat.refresh()
            if (found := self.verdict(number) or self._lost(ranks, 0.0)) is not None:
                break
            quiet = [rank for rank in others if self._heard(rank).system == "stopped"]
            if time.monotonic() > until or (quiet and _TIMED_OUT in reason):
                quiet = quiet or [rank for rank in others if self._heard(rank).is_silent]
                text = "; ".join(["a connection broke", *self._described(quiet or ranks), *filter(None, [reason])])
                return Ending(text, tuple(quiet))
            self._stopping.wait(_SOON)
        return found

    def message(self, ending: Ending, waited_for: str) -> str:
        """Why the run ends, in this rank's words. ``waited_for``: what it was in."""
        if ending.error:
            return f"another rank failed: {ending.text}"
        me = self.named(self.rank)
        return ending.text if f"{me} waits for" in ending.text else f"{ending.text}; {me} waited for {waited_for}"

    def difference(self, everyone: Mapping[int, Mapping[str, str]]) -> str:
        """In which facts ranks differ: "zero is 1 on rank 0 and 2 others, and 0 on rank 3 (pipe 1)"; else empty."""
        found = []
        for name in dict.fromkeys(name for facts in everyone.values() for name in facts):
            ranks: dict[str, list[int]] = {}
            for rank, facts in everyone.items():
                ranks.setdefault(facts.get(name, "not known"), []).append(rank)
            parts = []
            for value, some in ranks.items():
                others = f" and {len(some) - _COMPARED} others" if len(some) > _COMPARED else ""
                parts.append(f"{value:.{_LONGEST}} on {', '.join(map(self.named, some[:_COMPARED]))}{others}")
            if len(ranks) > 1:
                found.append(f"{name} is {', and '.join(parts)}")
        return "; ".join(found[:_COMPARED])

    def apart(self, calls: Mapping[int, str]) -> str:
        """Says which ranks are in which calls."""
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
        """Reports the exception that ends this rank's program; or, where another rank was the cause, waits some seconds
        until that one has ended: launchers take the first to end for the cause."""
        cause = self.verdict(here.epoch)
        broken = isinstance(error, RuntimeError) and any(words in str(error) for words in _BROKEN)
        if cause is None and broken and not isinstance(error, FxpipeError):  # torch's own, which says no more
            cause = self.why(here.epoch, [], str(error), seconds=6.0)
            if cause.culprits:
                say(self.message(cause, "a call of torch.distributed"))
        # The rank that caused it reports, and ends at once; the others end later, or a launcher would blame them.
        culprits = cause.culprits if cause else ()
        if not culprits or self.rank in culprits:
            text = f"{self.named(self.rank)}: {describe_error(error)}"
            self.end(PROGRAM, Ending(text, (self.rank,), error=True))
            return
        until = time.monotonic() + 5.0
        heard = [rank for rank in culprits if rank in self._heartbeat.heard]
        while time.monotonic() < until and any(self._heard(rank).system != "gone" for rank in heard):
            threading.Event().wait(0.05)

    def stop(self, stays_for: Sequence[int] = ()) -> None:
        """This rank's program has ended."""
        atexit.unregister(self._leave)
        self._left = True
        self._stopping.set()
        self._heartbeat.stop(stays_for)
        self._wakeup.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * PERIOD)

    def is_mine(self) -> bool:
        """Whether it is this process's, and not of one from which this was forked."""
        return self._process.pid == os.getpid()

    def _leave(self) -> None:
        if self.is_mine():
            holds = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # maybe the store
            self.stop(self._peers if holds else ())

    def _report(self) -> Report:
        waiting, (where, since) = here.waiting, here.described()
        words, ranks = waiting.what() if waiting is not None else ("", ())
        extends = waiting is None and any(phase.extends for phase in here.inside)
        doing = self._process, where, time.monotonic() - since, words, tuple(ranks)
        return Report(*doing, extends, self._left, here.epoch, here.calls)

    # --- the thread

    def _run(self) -> None:
        # Every period: Ctrl-C first, then whether a wait of the main thread is to end, and why.
        while not self._stopping.is_set():
            ctrl_c = self._wakeup.hears_ctrl_c()
            if not self.is_on():
                self._left = True
                self._heartbeat.stop(())
                return
            waiting = here.waiting
            if waiting is not None and ctrl_c:
                waiting.end()  # then Python's own handler runs, and raises KeyboardInterrupt
            elif waiting is not None and (found := self.verdict(waiting.number) or self._judged(waiting)):
                self.judge(waiting.number, found)
                waiting.end()

    def _judged(self, waiting: Waiting) -> Ending | None:
        now = time.monotonic()
        age = now - waiting.since
        # What is known of one wait: by how much it was extended, whether it was spoken of, when it was looked at.
        if self._wait is not waiting:
            self._wait, self._extended, self._spoken, self._looked = waiting, 0.0, False, now
        if age < LOOK_AFTER:
            return None
        words, ranks = waiting.what()
        found = self._lost(ranks, _LEFT) or self._elsewhere()
        if found is not None:
            return found
        # Ranks that wait for the same have come; the others are late, and the wait is theirs to explain.
        late = [rank for rank in ranks if self._heard(rank).report.waits_for != words] or ranks
        heard = [self._heard(rank) for rank in late if self._heard(rank).system != "stopped"]
        # A capture, a compilation or a save may take longer than any timeout: the clock stands while one runs.
        if any(peer.report.extends and not peer.is_silent for peer in heard):
            self._extended = min(self._extended + now - self._looked, EXTENSION * waiting.timeout)
        self._looked = now
        is_over = age > waiting.timeout + self._extended
        speaks = age > SAY_AFTER and not self._spoken and not all(self._heard(rank).waits for rank in late)
        if not (is_over or speaks):
            return None
        story = "; ".join([f"{self.named(self.rank)} waits for {words}, {age:.0f} s", *self._last_of_chain(late)])
        if not is_over:
            self._spoken = True
            say(story)
            return None
        more = f"longer than timeout={waiting.timeout:g} s; where it may be, write fxpipe.compile(..., timeout=)"
        return Ending(f"{story}: {more}")

    # --- what is known of the others

    def _heard(self, rank: int) -> Heard:
        return self._heartbeat.heard.get(rank, heartbeat.UNHEARD)

    def _lost(self, waited_for: Collection[int], patience: float) -> Ending | None:
        """Ranks whose processes have ended, once what they reported before was heard; and of those that are waited for
        such as left so many seconds ago: their programs have ended."""
        now, gone, left = time.monotonic(), list[int](), list[int]()
        for rank, heard in list(self._heartbeat.heard.items()):
            # Gone for certain, once its last words have had time to come: an exchange began since, or it stays silent.
            if heard.report.left or heard.system in ("ended", "gone"):
                since = self._ended.setdefault(rank, now)
                if not heard.report.left and (self._heartbeat.began > since or now - since > SILENT):
                    gone.append(rank)
                if heard.report.left and rank in waited_for and now - since >= patience:
                    left.append(rank)
        found = gone or left
        return Ending("; ".join(self._described(found)), tuple(found)) if found else None

    def _elsewhere(self) -> Ending | None:
        """A rank that has made another call than this one has."""
        for rank, (report, _) in list(self._heartbeat.heard.items()):
            names = first_difference(here.calls, report.calls, rank in self._pipe)
            if names is not None and report.epoch == here.epoch:
                return Ending(self.apart({self.rank: names[0], rank: names[1]}))
        return None

    def _last_of_chain(self, late: Sequence[int]) -> list[str]:
        """Those for whom all wait: the late ranks, or those for whom these wait in their turn, and so on."""
        # Follows the first of those that are waited for until somebody does not wait, or the chain is a circle.
        seen = {self.rank}
        while late and all(self._heard(rank).waits for rank in late):
            seen |= set(late)
            further = [rank for rank in self._heard(late[0]).report.ranks if rank not in seen]
            if not further:
                return self._described(late[:1])
            late = further
        return self._described(rank for rank in late if not self._heard(rank).waits)

    def _described(self, ranks: Iterable[int]) -> list[str]:
        """What became of some ranks, or what they do; of many, the first."""
        return [f"{self.named(rank)} {self._heard(rank)}" for rank in list(ranks)[:_SHOWN]]


class SignalWakeup:
    """Hears signals while the main thread waits inside of torch, where Python handles none: those of a process whose
    main thread has made it, and in which nobody else is woken up by signals."""

    def __init__(self, seconds: float) -> None:
        # Python writes the signal's number into a file descriptor at once, even where its handler cannot run yet.
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(seconds)
        self._theirs.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            # Somebody else's descriptor, such as asyncio's, is put back: theirs stays.
            before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            if before >= 0:
                signal.set_wakeup_fd(before)

    def hears_ctrl_c(self) -> bool:
        """Waits for some seconds, or for a signal: whether it was one that ends what the main thread does."""
        try:
            rung = self._ours.recv(64)
        except TimeoutError:
            return False
        return signal.SIGINT in rung and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def close(self) -> None:
        """Ends a wait at once. Signals come here no more; if another thread than the main one closes it, unheard."""
        self._theirs.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not threading.main_thread():
            self._theirs.detach()
        elif (before := signal.set_wakeup_fd(-1)) != self._theirs.fileno():
            signal.set_wakeup_fd(before)


_current: Watchdog | None = None


def watchdog() -> Watchdog:
    """The watchdog of this process and its world; there is one from now on."""
    global _current
    if _current is None:
        before = sys.excepthook  # prints an exception that nobody handles: first, so that nobody's repeats it before

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
    """Signals of a forked process are not this one's."""
    if _current is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_fork)
