"""Runs one fault: four processes as under torchrun, one of which is struck; what the others say and do then; and how
the run goes on when it is started again."""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import re
import sys
import tempfile
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch.distributed as dist

from tests.faults.training import RANKS, STEPS, Fault, train
from tests.pool import _variables, forking

TO_BEGIN = 90.0  # seconds until the fault, at most
TO_END = 30.0  # seconds from then on in which all must be gone; with SIGSTOP, beyond the timeout


def faults(fault: Fault) -> list[str]:
    """What was not as it should be: nothing, where all the others have ended in time and have said why, and the losses,
    before and after a restart, are to the bit those of a run to which nothing happens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = _run(fault, folder, strikes=True)
        if not found and (again := _run(fault, folder, strikes=False)):
            found = ["it could not go on", *again]
        if not found and not _losses(folder) <= _undisturbed(fault.layout):
            found = [f"losses are {sorted(_losses(folder))}, undisturbed {sorted(_undisturbed(fault.layout))}"]
        return found


def _losses(folder: Path) -> set[str]:
    """Step and loss of all steps, those that were made twice included."""
    return set((folder / "losses").read_text().splitlines())


@functools.cache
def _undisturbed(layout: str) -> set[str]:
    with tempfile.TemporaryDirectory() as name:
        found = _run(Fault(layout, "", "", -1, TO_BEGIN), Path(name), strikes=False)
        assert not found, found
        losses = _losses(Path(name))
    assert len(losses) == STEPS
    return losses


def _run(fault: Fault, folder: Path, strikes: bool) -> list[str]:
    """What was wrong with one run."""
    # As torchrun's agent has it: whoever dies, the store lives on.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    process = forking().Process
    workers = [process(target=_work, args=(rank, fault, store.port, folder, strikes)) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    try:
        return _found(fault, workers, folder) if strikes else _unfinished(workers, folder)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _work(rank: int, fault: Fault, port: int, folder: Path, strikes: bool) -> None:
    """One process, which ends as a script's would."""
    os.environ.update(_variables(rank, RANKS, port))
    file = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # of all ranks, in order
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    _await_all(port)
    code = 0
    try:
        train(fault, rank, folder, strikes)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    atexit._run_exitfuncs()
    os._exit(code)


def _await_all(port: int) -> None:
    """All begin together: how long a process takes to start is no fault, and timeouts here are short."""
    wait = datetime.timedelta(seconds=TO_BEGIN)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=wait)  # type: ignore[attr-defined]
    if store.add("ready", 1) == RANKS:
        store.set("go", "")
    store.wait(["go"])


def _unfinished(workers: list[ForkServerProcess], folder: Path) -> list[str]:
    until = time.monotonic() + TO_BEGIN
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    codes = [worker.exitcode for worker in workers]
    return [] if codes == [0] * RANKS else [f"exit codes are {codes}", *_said(folder)]


def _found(fault: Fault, workers: list[ForkServerProcess], folder: Path) -> list[str]:
    survivors = [worker for rank, worker in enumerate(workers) if rank != fault.victim]
    until = time.monotonic() + TO_BEGIN
    while not _time_in(folder / "struck"):
        if time.monotonic() > until or not all(worker.is_alive() for worker in survivors):
            return ["it did not come to the fault", *_said(folder)]
        survivors[0].join(0.05)
    allowed = TO_END + (fault.timeout if fault.signal == "SIGSTOP" else 0.0)
    until = _time_in(folder / "struck") + allowed
    for worker in survivors:
        worker.join(max(0.0, until - time.monotonic()))
    said = _said(folder)
    found = [
        f"rank {rank} is still there"
        for rank, worker in enumerate(workers)
        if worker in survivors and worker.is_alive()
    ]
    codes = [worker.exitcode for worker in survivors]
    if not found and codes != [1, 1, 1]:
        found.append(f"exit codes are {codes}")
    became = "is stopped" if fault.signal == "SIGSTOP" else "is gone"
    first = next((line for line in said if line.startswith("fxpipe: ") and not re.search("capturing|saved", line)), "")
    if not re.search(rf"rank {fault.victim} (\([^)]*\) )?{became}", first):
        found.append(f"the first message is {first!r}")
    return [*found, *said] if found else []


def _time_in(file: Path) -> float:
    try:
        return float(file.read_text() or 0)
    except FileNotFoundError:
        return 0.0


def _said(folder: Path) -> list[str]:
    try:
        return (folder / "said").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
