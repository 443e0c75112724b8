"""Save job: what a rank does for one checkpoint once all know who writes what, in a call or beside the training."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpipe.distributed.gathering import Gathering, Verdict, values_of
from fxpipe.errors import CheckpointError, describe_error
from fxpipe.parameters.checkpoint import run_folder
from fxpipe.parameters.checkpoint.manifest import Manifest, write_text, written_of
from fxpipe.parameters.checkpoint.run_folder import FolderLock
from fxpipe.parameters.checkpoint.writer import RankPlan, RankShare

STATE = "state.json"
"""The file of all ranks' plain data."""

_SPARE = 1.02  # of what tensors take; what is around them in the files is little


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint goes. ``token``: of this very save, which no other and no earlier one has."""

    folder: Path
    number: int
    partial: Path
    run: str
    token: str
    step: int
    keep: int | None

    def check(self, size: int) -> None:
        """CheckpointError where this rank does not see the folder, or there is no place for so many bytes."""
        if not self.partial.is_dir():
            raise CheckpointError(
                f"{self.partial}, which rank 0 has made, is not there for this rank; give a folder that all ranks share"
            )
        free = shutil.disk_usage(self.partial).free
        if size * _SPARE > free:
            raise CheckpointError(
                f"the checkpoint takes {size:,} bytes, and {self.folder} has {free:,} left; make room, or write keep=1"
            )


@dataclass
class SaveJob:
    """What a rank does for a checkpoint once all know who writes what. ``state``: all ranks' plain data, as JSON."""

    target: Destination
    axes: tuple[tuple[str, int], ...]
    ties: Mapping[str, str]
    messages: Sequence[Any]
    state: str
    _share: RankShare | None = None
    _prepared: Verdict | None = None

    def prepare(self, plan: RankPlan, copies: bool) -> None:
        """Settles this rank's share, and copies it. What fails is reported to the others when they meet."""
        self._prepared = Verdict(lambda: self._settle(plan, copies))

    def _settle(self, plan: RankPlan, copies: bool) -> None:
        self._share = plan.settle(self.messages)
        self.target.check(self._share.size)
        if copies:
            self._share.keep_copies()

    def write(self, gathering: Gathering) -> Path:
        """The checkpoint's folder; where one rank fails, all do, and nothing is left of it."""
        written = Verdict(self._write_share)
        outcome = Verdict(lambda: self._complete(gathering, written))
        if gathering.rank == 0 and outcome.error is not None:
            shutil.rmtree(self.target.partial, ignore_errors=True)
        given = gathering.from_first(outcome.message)
        if written.error is not None:
            raise written.error
        return Path(values_of([given], outcome)[0])

    def _complete(self, gathering: Gathering, written: Verdict) -> str:
        messages = gathering.to_first(written.message)
        return self._finish(values_of(messages, written)) if gathering.rank == 0 else ""

    def _write_share(self) -> Any:
        if self._prepared is not None and self._prepared.error is not None:
            raise self._prepared.error
        assert self._share is not None
        return self._share.write(self.target.partial)

    def _finish(self, messages: Sequence[Any]) -> str:
        """What the first rank does once all have written."""
        assert self._share is not None
        target = self.target
        files = self._share.finish(target.partial, messages)
        write_text(target.partial / STATE, self.state)
        files[STATE] = written_of(target.partial / STATE)
        saved_at = time.strftime("%Y-%m-%d %H:%M:%S%z")
        versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
        manifest = Manifest(target.step, target.number, saved_at, target.run, self.axes, versions, files, self.ties)
        manifest.write(target.partial)
        final = run_folder.complete(target.partial)
        try:
            run_folder.keep_newest(target.folder, target.keep)
        except OSError as error:  # this one is complete all the same
            warnings.warn(f"old checkpoints in {target.folder} could not be deleted: {error}", stacklevel=2)
        return str(final)


# --- Save later ---

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
