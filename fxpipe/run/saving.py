"""Saving: a run's state into a checkpoint that is complete or absent, at once or while training goes on.

1. All ranks agree that they can: arguments, the folder and its lock, what the write before has come to.
2. Each rank tells what it has; from that all know who writes what.
3. Each writes its share into a ``.partial`` folder; the first rank adds the manifest, gives it its name, makes it the
   latest and deletes old ones. With ``block=False`` this runs on a thread, on copies.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxpipe.distributed.gathering import Gathering, TransportGathering, Verdict, agreed, gathering_beside, values_of
from fxpipe.distributed.whereabouts import announced
from fxpipe.errors import CheckpointError, told
from fxpipe.kinds import is_flag, shown
from fxpipe.parameters.saving import run_folder
from fxpipe.parameters.saving.lock import FolderLock
from fxpipe.parameters.saving.manifest import Manifest, write_text, written_of
from fxpipe.parameters.saving.plain import PLAIN as KINDS
from fxpipe.parameters.saving.writer import RankPlan, RankShare
from fxpipe.run.forward_backward import ForwardBackward, Inside, inside
from fxpipe.run.random_state import random_state
from fxpipe.run.run_state import BUFFERS, PLAIN, own_buffers, plain_parts, savable
from fxpipe.run.step import Steps
from fxpipe.schedules.costs import Costs

STATE = "state.json"
"""The file of all ranks' plain data."""

_SPARE = 1.02  # of what tensors take; what is around them in the files is little
_LOOK = 0.5
_NICER = 10


def save(
    folder: str | os.PathLike[str],
    forward_backward: ForwardBackward,
    optimizer: Any,
    *,
    step: int,
    scheduler: Any = None,
    loader: Any = None,
    extra: dict[str, Any] | None = None,
    keep: int | None = 3,
    block: bool = True,
) -> Future[Path]:
    """Writes a checkpoint, ``folder/step-000812``, that is complete or not there. A collective call of all ranks.

    It has the model and the optimizer in the plain model's names, as torch.distributed.checkpoint writes them; the
    random state of every rank, the number of the next step and the seed for what stages draw; the costs of the last
    recorded step; and what is given beside. It is written beside and renamed when all of it is on the disk, with a
    manifest of sizes and checksums; ``folder/latest`` is always a complete one.

    Args:
        folder: of the run; all ranks see it, and no other run writes to it.
        forward_backward: what ``fxpipe.compile`` returned.
        optimizer: what ``forward_backward.optimizer`` returned, a dict name → optimizer of several, or None; with
            ``zero=0`` and 3 torch's own of ``forward_backward.parameters()``, too.
        step: how many steps were made: where ``load`` goes on.
        scheduler: its ``state_dict()`` goes along, on each rank.
        loader: of the data, likewise: one whose state says which rows come next.
        extra: what ``load`` gives back; plain data, that is None, bool, int, float, str, bytes, list, tuple, dict with
            str or int keys, and tensors.
        keep: how many are kept; older ones are deleted once this one is complete. None: all.
        block: whether it is complete when this returns. False: it is copied to memory of the host and written while
            training goes on; an error of that is raised by the next ``save``, or told when the program ends.

    Returns:
        A future whose ``result()`` is the checkpoint's folder: done already, or with ``block=False`` once it is
        complete.

    Raises:
        CheckpointError: on all ranks alike, with the earlier checkpoints as they were: something is not plain data, the
            disk is full or read-only, another run writes to the folder, or an earlier ``block=False`` has failed.
    """
    parts = inside(forward_backward)
    saver = _SAVERS.setdefault(forward_backward, _Saver())
    given = _Given(path_of(folder), optimizer, step, scheduler, loader, extra, keep, block)
    with (
        announced(f"save, step {step}", extends=True),
        parts.failing.together(Exception),
    ):  # which all ranks raise alike, with nothing under way
        parts.failing.check_open()
        return saver.save(parts, given)


def path_of(folder: str | os.PathLike[str]) -> Path:
    """CheckpointError for what is no path. What is empty would be the working folder."""
    if not isinstance(folder, (str, os.PathLike)) or str(folder) == "" or "\0" in str(folder):
        raise CheckpointError(f"folder is {shown(folder)}; it is the path of a folder that all ranks see")
    return Path(folder)


@dataclass(frozen=True)
class _Given:
    folder: Path
    optimizer: Any
    step: int
    scheduler: Any
    loader: Any
    extra: Any
    keep: int | None
    block: bool

    def check(self) -> None:
        """CheckpointError for what cannot be meant."""
        if type(self.step) is not int or self.step < 0:
            raise CheckpointError(f"step={self.step!r} is no number of steps; write how many were made, from 0 on")
        if not is_flag(self.block):
            raise CheckpointError(f"block is {shown(self.block)}; it is True or False")
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise CheckpointError(f"keep={self.keep!r} keeps no checkpoint; write 1 or more, or None for all")
        if self.extra is not None and (type(self.extra) is not dict or "step" in self.extra):
            raise CheckpointError(
                f"extra= is {_short(self.extra)}; write a dict without 'step', to which load() adds the step: {KINDS}"
            )
        for name, one in (("scheduler", self.scheduler), ("loader", self.loader)):
            if one is not None and not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise CheckpointError(
                    f"{name}= is a {type(one).__name__}, which has no state_dict() and load_state_dict(); give one "
                    "that has, such as torchdata's StatefulDataLoader for a loader"
                )


class _Later(Future[Path]):
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


class _Saver:
    """Saves one run: holds the lock of its folder, and what is being written."""

    def __init__(self) -> None:
        self._lock: FolderLock | None = None
        self._run = ""
        self._pending: _Later | None = None
        self.folders: set[Path] = set()
        """Those that this run has saved to or was loaded from: its checkpoints there are its own."""

    def save(self, parts: Inside, given: _Given) -> Future[Path]:
        gathering = TransportGathering(parts.transport)
        self.wait()
        begun = agreed(gathering, lambda: self._begin(given, gathering.rank, parts.steps))
        folder, number, partial, self._run, token, _ = begun[0]
        target = _Destination(Path(folder), number, Path(partial), self._run, token, given.step, given.keep)
        try:
            costs = parts.steps.recorder.known_costs() if all(recorded for *_, recorded in begun) else None
            plan: list[RankPlan] = []
            everyone = agreed(gathering, lambda: _plan(parts, given, costs, plan))
            job = _Job(target, parts.axes, [one["plan"] for one in everyone], _state_file(everyone))
            job.prepare(plan[0], copies=not given.block)
            return self._write(job, parts, gathering, given.block)
        except BaseException:
            if gathering.rank == 0:
                shutil.rmtree(target.partial, ignore_errors=True)
            raise

    def _write(self, job: _Job, parts: Inside, gathering: TransportGathering, block: bool) -> Future[Path]:
        beside = None if block else gathering_beside(parts.transport, job.target.token)
        later = _Later(job.target.folder.resolve(), None if beside is None else self._lock)
        if beside is None:
            later.set_result(job.write(gathering))
            return later
        self._pending = later
        _WRITTEN_LATER[:] = [one for one in _WRITTEN_LATER if not one.done() or one.unheard] + [later]
        args = (later, job, beside, parts.device)
        threading.Thread(target=_on_thread, args=args).start()  # no daemon: a program that ends waits for it
        return later

    def wait(self) -> None:
        """Until the write before is done; Ctrl-C is heard meanwhile."""
        while self._pending is not None and not self._pending.done():
            wait([self._pending], _LOOK)

    def _begin(self, given: _Given, rank: int, steps: Steps) -> list[Any]:
        """Checks what is given, and on the first rank makes the folder that is written into."""
        pending, self._pending = self._pending, None
        if pending is not None and (error := pending.unheard) is not None:
            pending.heard = True
            raise CheckpointError(f"the checkpoint before this one could not be written: {error}") from error
        given.check()
        if not steps.sync:
            raise CheckpointError(
                "gradients that were not summed yet (set_requires_gradient_sync(False)) are in no checkpoint, and "
                "would be lost: save behind optimizer.step()"
            )
        if rank:
            return ["", 0, "", "", "", steps.recorder.has_costs]
        folder = given.folder.absolute()
        if run_folder.is_checkpoint(folder):
            raise CheckpointError(f"{folder} is a checkpoint itself; give the folder of the run, {folder.parent}")
        wait_for_writes(folder)
        folder.mkdir(parents=True, exist_ok=True)
        run = self._run or _run_id()
        if self._lock is None or self._lock.path.parent != folder:
            self._lock = None
            self._lock = FolderLock(folder, run)
        self._check_own(folder)
        number = run_folder.next_number(folder)
        return [
            str(folder),
            number,
            str(run_folder.begin(folder, given.step)),
            run,
            uuid.uuid4().hex,
            steps.recorder.has_costs,
        ]

    def _check_own(self, folder: Path) -> None:
        """CheckpointError where another run's checkpoints would be mixed with this one's, and deleted in time."""
        there = run_folder.checkpoints(folder)
        if there and folder not in self.folders:
            raise CheckpointError(
                f"{folder} has checkpoints already, {there[0].name} and {len(there) - 1} more, and this run was not "
                "loaded from there: call fxpipe.load(folder, ..., required=False) first, or give a new folder"
            )
        self.folders.add(folder)


def _plan(parts: Inside, given: _Given, costs: Costs | None, found: list[RankPlan]) -> dict[str, Any]:
    """What this rank has, and its plain data."""
    run = {"number": parts.steps.number, "seed": parts.steps.seed, "stages": list(parts.stages)}
    plain: dict[str, Any] = {
        "extra": given.extra,
        "random": random_state(parts.device),
        "run": {**run, "costs": None if costs is None else asdict(costs)},
    }
    for name, one in (("scheduler", given.scheduler), ("loader", given.loader)):
        if one is not None:
            plain[name] = one.state_dict()
    model = parts.module.state_dict()
    if parts.transport.data_rank:  # replicas differ in them: of the model's, each is the first replica's
        plain[BUFFERS] = {name: model.pop(name) for name in own_buffers(parts.module)}
    digests, trees, tensors = plain_parts(plain)
    states: dict[str, Any] = {name: one.state_dict() for name, one in savable(given.optimizer, parts.module).items()}
    states["model"] = model
    if given.scheduler is not None:
        states["scheduler"] = plain["scheduler"]  # for who reads it by torch alone; fxpipe reads each rank's
    if tensors:
        states[PLAIN] = tensors
    found.append(RankPlan(states, parts.transport.rank))
    return {"plan": found[0].message(), "parts": digests, "trees": trees}


@dataclass(frozen=True)
class _Destination:
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
class _Job:
    """What a rank does for a checkpoint once all know who writes what. ``state``: all ranks' plain data, as JSON."""

    target: _Destination
    axes: tuple[tuple[str, int], ...]
    messages: Sequence[Any]
    state: str
    _share: RankShare | None = None
    _prepared: Verdict | None = None

    def prepare(self, plan: RankPlan, copies: bool) -> None:
        """Settles this rank's share, and copies it. What fails is told to the others when they meet."""
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
        manifest = Manifest(target.step, target.number, saved_at, target.run, self.axes, versions, files)
        manifest.write(target.partial)
        final = run_folder.complete(target.partial)
        try:
            run_folder.keep_newest(target.folder, target.keep)
        except OSError as error:  # this one is complete all the same
            warnings.warn(f"old checkpoints in {target.folder} could not be deleted: {error}", stacklevel=2)
        return str(final)


def _on_thread(later: _Later, job: _Job, gathering: Gathering, device: torch.device) -> None:
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


def _state_file(everyone: Sequence[Any]) -> str:
    trees = {digest: tree for one in everyone for digest, tree in one["trees"].items()}
    return json.dumps({"ranks": [one["parts"] for one in everyone], "trees": trees})


def _run_id() -> str:
    """The same for restarts of a job, where its launcher tells."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("SLURM_JOB_ID", "none")
    return next((name for name in given if name != "none"), "") or uuid.uuid4().hex[:12]


def _short(value: Any) -> str:
    return f"a {type(value).__name__}" if type(value) is not dict else "a dict with 'step'"


def continues(forward_backward: ForwardBackward, folder: Path) -> None:
    """From now on the checkpoints in a folder are this run's."""
    _SAVERS.setdefault(forward_backward, _Saver()).folders.add(folder)


def wait_for_saves(forward_backward: ForwardBackward) -> None:
    """Returns once nothing is being written for it any more."""
    if (saver := _SAVERS.get(forward_backward)) is not None:
        saver.wait()


def wait_for_writes(folder: Path) -> None:
    """Returns once this process writes nothing into a run's folder, given itself or by one of its checkpoints: what
    another ``forward_backward`` of it is writing would be missed, or taken for what a killed one has left."""
    places = folder.resolve(), folder.resolve().parent
    writing = [one for one in _WRITTEN_LATER if one.folder in places]
    while not all(one.done() for one in writing):
        wait(writing, _LOOK)


_SAVERS: WeakKeyDictionary[ForwardBackward, _Saver] = WeakKeyDictionary()
_WRITTEN_LATER: list[_Later] = []
"""Those whose errors nobody may have heard of."""


@atexit.register
def _tell_unheard() -> None:
    """What could not be written and nobody has asked about. Threads are done by now: the interpreter waits for them."""
    for later in _WRITTEN_LATER:
        if (error := later.unheard) is not None:
            print(f"fxpipe: a checkpoint could not be written: {told(error)}", file=sys.stderr)
