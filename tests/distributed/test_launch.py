"""launch: results by rank, the first failure, and that no process is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxpipe.distributed.processes import init, launch
from fxpipe.errors import RunError, TopologyError
from tests.pool import forking
from tests.scripts import Scripts

SECONDS = 200.0  # for anything that starts processes; each imports torch


def report(scale: int, values: torch.Tensor) -> tuple[int, torch.Tensor, dict[str, Any]]:
    """A rank's own part, computed with the others, and what it found around it."""
    rank = dist.get_rank()
    total = values * rank
    dist.all_reduce(total)
    around = {
        "threads": torch.get_num_threads(),
        "local rank": os.environ["LOCAL_RANK"],
        "device": init().type,
        "world": dist.get_world_size(),
        "listens on": listens_on(),
    }
    return rank * scale, total, around


def sum_after_a_second_start() -> float:
    """The sum of ones over all ranks, where torch.distributed was ended and started again."""
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    init(timeout=30)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def listens_on() -> set[str]:
    """The addresses on which this process listens, as Linux has them; nothing elsewhere."""
    own = set()
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            own.add(os.readlink(path))
    tables = [path for path in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")) if path.exists()]
    lines = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


def test_launch_returns_the_results_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, children = dict(os.environ), set(multiprocessing.active_children())
    results = launch(report, 2, 10, torch.tensor([1.0, 2.0]))
    assert [scaled for scaled, _, _ in results] == [0, 10]
    for rank, (_, total, around) in enumerate(results):
        assert total.tolist() == [1.0, 2.0]
        assert around["threads"] == 1
        assert around["local rank"] == str(rank)
        assert around["world"] == 2
        assert around["listens on"] == ({"0100007F"} if sys.platform == "linux" else set())  # 127.0.0.1
        assert around["device"] == ("cuda" if torch.cuda.device_count() >= 2 else "cpu")
    assert dict(os.environ) == before
    assert not set(multiprocessing.active_children()) - children


def fail_in_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    threading.Event().wait(10 * SECONDS)


def die_in_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(1), src=1)


def leave_in_rank_1() -> None:
    if dist.get_rank() == 1:
        sys.exit("rank one leaves")
    threading.Event().wait(10 * SECONDS)


class Forked(ForkServerProcess):
    """Has the variables of the moment in which it is started, as a spawned process has."""

    def start(self) -> None:
        self._args = (dict(os.environ), self._target, *self._args)
        self._target = with_variables
        super().start()


def with_variables(variables: Mapping[str, str], function: Callable[..., None], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    function(*args)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """``launch`` without the seconds in which a spawned process imports torch; other tests of this file spawn them."""
    context = SimpleNamespace(Pipe=forking().Pipe, Process=Forked)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: {"spawn": context}[method])


@pytest.mark.usefixtures("forked")
def test_what_was_ended_can_be_started_again() -> None:
    assert launch(sum_after_a_second_start, 2) == [2.0, 2.0]


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("this does not travel")


NO_END = r"rank 1 of 2 ended without a result, killed by signal 9"
RAISED = r"(?s)rank 1 of 2 failed:\nTraceback.*in fail_in_rank_1.*ValueError: rank one has had enough"


@pytest.mark.parametrize(
    ("fn", "ranks", "says"),
    [
        (fail_in_rank_1, 2, RAISED),
        (die_in_rank_1, 2, NO_END),
        (leave_in_rank_1, 2, "(?s)rank 1 of 2 failed.*SystemExit: rank one leaves"),
        (Unpicklable, 1, "(?s)rank 0 of 1 failed:.*this does not travel"),
        (lambda: None, 2, r"<lambda> and its arguments cannot be sent .* at the top of a module"),
        (fail_in_rank_1, 0, "nproc is 0; it is a whole number, 1 or more"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_a_failing_rank_ends_the_launch(fn: Any, ranks: int, says: str) -> None:
    children = set(multiprocessing.active_children())
    with pytest.raises((RunError, TopologyError), match=says):
        launch(fn, ranks)
    assert not set(multiprocessing.active_children()) - children


# --- no orphans ---

# Each rank sends its launcher's number over a connection, whose end then tells the test that the rank has ended.
HANG = """
import os, signal, socket, sys
from fxpipe.distributed.processes import launch

def hang(port):
    line = socket.create_connection(("127.0.0.1", port))
    line.sendall(os.getppid().to_bytes(4, "big"))
    line.settimeout(600)
    line.recv(1)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    launch(hang, 2, int(sys.argv[1]))
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(SECONDS)
        yield server


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_launching_process(
    tmp_path: Path, listener: socket.socket, scripts: Scripts, number: signal.Signals
) -> None:
    (tmp_path / "hang.py").write_text(HANG)
    with ThreadPoolExecutor() as threads:
        launcher = threads.submit(scripts.outcome, ["hang.py", str(listener.getsockname()[1])], tmp_path)
        lines = [listener.accept()[0] for _ in range(2)]
        for line in lines:
            line.settimeout(SECONDS)
        (pid,) = {int.from_bytes(line.recv(4), "big") for line in lines}
        os.kill(pid, number)
        for line in lines:
            assert line.recv(1) == b""
            line.close()
        status, _, errors = launcher.result()
    assert status == -number
    assert ("KeyboardInterrupt" in errors) is (number == signal.SIGINT)
