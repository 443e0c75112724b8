"""The heartbeat outlives silences of its store, and never holds up the end of a program."""

from __future__ import annotations

import contextlib
import datetime
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from fxpipe import Topology
from fxpipe.distributed import heartbeat, watchdog
from fxpipe.distributed.activity import Activity, Call, Phase, Waiting
from fxpipe.distributed.heartbeat import Heartbeat, Report, this_process
from fxpipe.distributed.processes import LOOPBACK, TCPStore
from fxpipe.distributed.watchdog import Watchdog
from tests.distributed.environment import clean_environment

SECONDS = 60.0


class Link:
    """A store, and a port that leads to it. ``answers``: while it is cleared, no answer goes through."""

    def __init__(self) -> None:
        self.store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self.listener = socket.create_server((LOOPBACK, 0))
        self.port = self.listener.getsockname()[1]
        self.answers, self.held_back, self.gave_up = threading.Event(), threading.Event(), threading.Event()
        self.answers.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, server = self.listener.accept()[0], socket.create_connection((LOOPBACK, self.store.port))
                self._sockets += [client, server]
                for ends in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, from_store: bool) -> None:
        with contextlib.suppress(OSError):  # it was cut
            while data := source.recv(1 << 16):
                if from_store and not self.answers.is_set():
                    self.held_back.set()
                    self.answers.wait()
                elif len(data) == 1 and not self.answers.is_set():  # by which torch's client cancels a wait
                    self.gave_up.set()
                target.sendall(data)
        self.cut()

    def fall_silent(self) -> None:
        """Returns once somebody waits for an answer."""
        self.answers.clear()
        assert self.held_back.wait(SECONDS)

    def cut(self) -> None:
        """Breaks all connections; new ones can be made."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.answers.set()
        self.listener.shutdown(socket.SHUT_RDWR)  # close alone would leave accept waiting
        self.listener.close()
        self.cut()


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


ENDS_WELL = """
import posix, sys
import fxpipe
from fxpipe.distributed.heartbeat import Heartbeat
from fxpipe.distributed.watchdog import watchdog

class Last:
    def __init__(self, thread):
        self.thread = f"/proc/self/task/{thread}"

    def __del__(self, write=posix.write, access=posix.access):  # Python ends: a thread that comes back aborts it
        write(1, b"ending\\n")
        while access(self.thread, 0):
            pass

fxpipe.init()
Heartbeat.stop.__defaults__ = (0.1,)
sys.last = Last(watchdog()._heartbeat._thread.native_id)
print("begun", flush=True)
input()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the script looks for its threads in /proc")
def test_a_program_ends_well_while_its_store_does_not_answer(link: Link) -> None:
    """It ended with SIGABRT: the answer came while Python took itself apart."""
    agent = {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(link.port)}
    with subprocess.Popen(
        [sys.executable, "-c", ENDS_WELL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(**agent, **place),
        text=True,
    ) as process:
        watch = threading.Timer(SECONDS, process.kill)
        watch.start()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        link.fall_silent()
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "ending\n"
        link.answers.set()
        assert process.wait() == 0
        watch.cancel()


def report() -> Report:
    return Report(this_process(), "is here", 0.0, "", (), False, False)


def silent(link: Link) -> None:
    """For longer than the client waits."""
    link.fall_silent()
    assert link.gave_up.wait(SECONDS)
    link.answers.set()


@pytest.mark.parametrize("fault", [silent, Link.cut])
def test_ranks_are_heard_again_after_a_fault_of_the_network(
    link: Link, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Link], None]
) -> None:
    """The first fault was the end of all reports."""
    monkeypatch.setattr(Heartbeat, "is_on", lambda heartbeat: True)
    limit = datetime.timedelta(seconds=1)
    client = TCPStore(LOOPBACK, link.port, is_master=False, timeout=limit, wait_for_workers=False)
    near, far = Heartbeat(link.store, 0, 2, report, [1]), Heartbeat(client, 1, 2, report, [0])
    far.transports = set()  # and so it asks for reports alone

    def hear_each_other() -> None:
        for heartbeat, other in ((near, 1), (far, 0)):
            before, until = heartbeat.heard.get(other), time.monotonic() + SECONDS
            while heartbeat.heard.get(other) == before:
                assert time.monotonic() < until
                threading.Event().wait(0.05)

    try:
        hear_each_other()
        fault(link)
        hear_each_other()
    finally:
        for heartbeat in (near, far):
            heartbeat.stop(())


# --- a large world: threads do not run, and ranks exchange by hand ---


class Counted:
    """A store that counts requests, and bytes of values."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests, self.bytes = store, 0, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            result = getattr(self.store, name)(*given)
            self.requests += 1
            values = [*given[1:], *(result if isinstance(result, list) else [result])]
            self.bytes += sum(len(value) for value in values if isinstance(value, bytes))
            return result

        return call


@pytest.fixture
def watched(link: Link, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Topology], Watchdog]:
    """Makes the watchdog of a rank, whose activity is its own."""
    for owner, name in ((threading.Thread, "start"), (watchdog.atexit, "register"), (Heartbeat, "refresh")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    monkeypatch.setattr(watchdog, "SignalWakeup", lambda seconds: None)
    monkeypatch.setattr(watchdog, "default_store", lambda: link.store)

    def make(rank: int, topology: Topology) -> Watchdog:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: topology.world_size)
        made = Watchdog()
        made.watch(1, topology)
        return made

    return make


@pytest.mark.parametrize("size", [8, 64, 1024, 16384])
def test_a_world_of_any_size_asks_little_of_its_store(
    watched: Callable[[int, Topology], Watchdog], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = watched(5, Topology([("pipe", 4), ("data", size // 4)]))._heartbeat
    monkeypatch.setattr(heartbeat.here, "calls", tuple(Call(i, i, f"forward_backward, step {i}") for i in range(16)))
    store = beats._store
    for _ in range(3):
        counted = beats._store = Counted(store)
        beats._exchange()  # the first ones look for ranks that have not reported yet
        for rank in beats.wanted:
            store.set(f"rank/{rank}", store.get("rank/5"))
    assert counted.requests == 2  # its report; its peers' reports, and whether a run ends
    assert len(beats.wanted) == (size - 1 if size <= 64 else 4)
    assert counted.bytes * size / beats.period < 5e6  # in a second, of all ranks together


WORLD = Topology([("pipe", 3), ("data", 23)])
"""Of 69 ranks, in which a rank hears few."""


@pytest.mark.parametrize("fault", ["", "gone", "elsewhere", "saves"])
def test_neighbours_of_a_rank_tell_all_what_became_of_it(
    watched: Callable[[int, Topology], Watchdog], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """All wait for an all-reduce; rank 30 is at another one, its process has ended, or it saves."""
    lost, told, waited = 30, {}, 400.0 if fault == "saves" else 2.0
    ranks = [watched(rank, WORLD) for rank in range(WORLD.world_size)]
    for _ in range(4):
        for each in ranks:
            mine = Activity()
            mine.epoch, mine.calls = 1, (Call(1, 1, "save" if fault == "elsewhere" and each.rank == lost else "step"),)
            others = [rank for rank in range(WORLD.world_size) if rank != each.rank]
            wait = Waiting(1, 300.0, time.monotonic() - waited, lambda others=others: ("an all-reduce", others), int)
            mine.waiting = None if fault and each.rank == lost else wait
            mine.inside = (Phase("save", fault == "saves" and each.rank == lost),)
            monkeypatch.setattr(watchdog, "here", mine)
            monkeypatch.setattr(heartbeat, "here", mine)
            if fault == "gone" and each.rank == lost:
                each._process = this_process()._replace(started=1)
            each._heartbeat._exchange()
            each._heartbeat.began = time.monotonic()
            if mine.waiting is not None:
                each._wait, each._extended, each._spoken, each._looked = wait, 150.0, True, time.monotonic()
                told[each.rank] = each._judged(wait)
    texts = {rank: ending.text for rank, ending in told.items() if ending}
    near = {29, 31, 7, 53}  # by number, and in pipe; its neighbours in data are those by number, too
    words = {"gone": "rank 30 (pipe 1, data 7) is gone", "elsewhere": "rank 30 (pipe 1, data 7) in save"}
    assert set(texts) == (near if fault in words else set())
    assert all(words[fault] in text for text in texts.values())
    extended = {each.rank for each in ranks if time.monotonic() - each._heartbeat.extended_at < SECONDS}
    assert extended == (set(told) if fault == "saves" else set())
