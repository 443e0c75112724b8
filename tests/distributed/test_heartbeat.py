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

import pytest

from fxpipe.distributed.heartbeat import Heartbeat, Report, this_process
from fxpipe.distributed.processes import LOOPBACK, TCPStore
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
    return Report(this_process(), "is here", 0.0, "", (), False, False, 0, ())


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
