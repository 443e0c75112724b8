"""Save later: checkpoints that are written on a thread while training goes on, and who hears of what fails there."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from concurrent.futures import Future, wait
from pathlib import Path

import torch

from fxpipe.distributed.gathering import Gathering
from fxpipe.errors import describe_error
from fxpipe.parameters.checkpoint.lock import FolderLock
from fxpipe.run.checkpoint.save_job import SaveJob

_LOOK = 0.5
_NICER = 10


class Later(Future[Path]):
    """A checkpoint that is being written. ``folder``: of the run. ``lock``: held for as long, whoever else lets go of
    it. ``heard``: whether somebody has waited for it, and so knows of its error."""

    heard = False

    def __init__(self, folder: Path, lock: FolderLock | None) -> None:
        super().__init__()
        self.folder, self.lock = folder, lock

    @property
    def unheard(self) -> BaseException | None:
        """Its error, where nobody has asked for it."""
        return None if self.heard or not self.done() else super().exception()

    def result(self, timeout: float | None = None) -> Path:
        try:
            return super().result(timeout)
        finally:
            self.heard = self.heard or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.heard = self.heard or self.done()

    def until_done(self) -> None:
        """Returns once it is; Ctrl-C is heard meanwhile."""
        while not self.done():
            wait([self], _LOOK)


def write_later(later: Later, job: SaveJob, gathering: Gathering, device: torch.device) -> None:
    """Starts the thread that writes it."""
    _WRITTEN_LATER[:] = [one for one in _WRITTEN_LATER if not one.done() or one.unheard] + [later]
    args = (later, job, gathering, device)
    threading.Thread(target=_write, args=args).start()  # no daemon: a program that ends waits for it


def _write(later: Later, job: SaveJob, gathering: Gathering, device: torch.device) -> None:
    try:
        with contextlib.suppress(OSError, AttributeError):  # Linux: a thread has a niceness, this one behind the others
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICER)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        path = job.write(gathering)
    except BaseException as error:
        later.lock = None  # before others hear of it, who may then ask for the lock
        later.set_exception(error)
    else:
        later.lock = None
        later.set_result(path)


def wait_for_writes(folder: Path) -> None:
    """Returns once this process writes nothing into a run's folder, given itself or by one of its checkpoints: what
    another ``forward_backward`` of it is writing would be missed, or taken for what a killed one has left."""
    places = folder.resolve(), folder.resolve().parent
    writing = [one for one in _WRITTEN_LATER if one.folder in places]
    for one in writing:
        one.until_done()


_WRITTEN_LATER: list[Later] = []
"""Those whose errors nobody may have heard of."""


@atexit.register
def _tell_unheard() -> None:
    """What could not be written and nobody has asked about. Threads are done by now: the interpreter waits for them."""
    for later in _WRITTEN_LATER:
        if (error := later.unheard) is not None:
            print(f"fxpipe: a checkpoint could not be written: {describe_error(error)}", file=sys.stderr)
