"""Saving: a run's state into a checkpoint that is complete or absent, at once or while training goes on.

1. All ranks agree that they can: arguments, the folder and its lock, what the write before has come to.
2. Each rank reports what it has; from that all know who writes what.
3. Each writes its share into a ``.partial`` folder; the first rank adds the manifest, gives it its name, makes it the
   latest and deletes old ones. With ``block=False`` this runs on a thread, on copies.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fxpipe.distributed.activity import announced
from fxpipe.distributed.gathering import TransportGathering, agreed, gathering_beside
from fxpipe.errors import CheckpointError
from fxpipe.parameters.checkpoint import run_folder
from fxpipe.parameters.checkpoint.plain import PLAIN as KINDS
from fxpipe.parameters.checkpoint.run_folder import FolderLock, lock_of
from fxpipe.parameters.checkpoint.writer import RankPlan
from fxpipe.parameters.own_buffers import own_buffers
from fxpipe.run.checkpoint.run_state import BUFFERS, PLAIN, plain_parts, savable, ties_of
from fxpipe.run.checkpoint.save_job import Destination, Later, SaveJob, wait_for_writes, write_later
from fxpipe.run.forward_backward import ForwardBackward, Inside, inside
from fxpipe.run.step.step import Steps
from fxpipe.schedules.costs import Costs
from fxpipe.seeds import RandomState
from fxpipe.validation import is_flag, shown


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
        loader: of the data, likewise: one whose state says which rows come next. A state that counts what one replica
            has drawn, as torchdata's StatefulDataLoader has it, is of other rows on another number of replicas: one in
            batches of the whole run says that it is not by an attribute, ``any_replicas = True``.
        extra: what ``load`` gives back; plain data, that is None, bool, int, float, str, bytes, list, tuple, dict with
            str or int keys, and tensors.
        keep: how many are kept; older ones are deleted once this one is complete. None: all.
        block: whether it is complete when this returns. False: it is copied to memory of the host and written while
            training goes on; an error of that is raised by the next ``save``, or printed when the program ends.

    Returns:
        A future whose ``result()`` is the checkpoint's folder: done already, or with ``block=False`` once it is
        complete.

    Raises:
        CheckpointError: on all ranks, with the earlier checkpoints as they were: something is not plain data, the
            disk is full or read-only, another run writes to the folder, or an earlier ``block=False`` has failed.
    """
    parts = inside(forward_backward)
    saver = _SAVERS.setdefault(forward_backward, _Saver())
    given = _Given(path_of(folder), optimizer, step, scheduler, loader, extra, keep, block)
    with (
        announced(f"save, step {step!r:.20}" + ("" if block else ", block=False"), extends=True),
        parts.failing.together(Exception),
    ):  # which all ranks raise, with nothing under way
        parts.failing.check_open()
        return saver.save(parts, given)


def path_of(folder: str | os.PathLike[str]) -> Path:
    """CheckpointError for what is no path. What is empty would be the working folder."""
    if not isinstance(folder, (str, os.PathLike)) or str(folder) == "" or "\0" in str(folder):
        raise CheckpointError(f"folder is {shown(folder)}; it is the path of a folder that all ranks see")
    return Path(folder)


_STATEFUL = {
    "scheduler": ", such as those of torch.optim.lr_scheduler",
    "loader": ": an object that counts the batches of the whole run, as Feed in examples/training_loop.py does",
}


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
                    f"that has{_STATEFUL[name]}"
                )


class _Saver:
    """Saves one run: holds the lock of its folder, and what is being written."""

    def __init__(self) -> None:
        self._lock: FolderLock | None = None
        self._run = ""
        self._pending: Later | None = None
        self.known: dict[Path, int] = {}
        """Folders that this run has saved to or was loaded from → the number of the newest checkpoint there that it has
        written or found: those up to it are its own."""

    def save(self, parts: Inside, given: _Given) -> Future[Path]:
        gathering = TransportGathering(parts.transport)
        self.wait()
        begun = agreed(gathering, lambda: self._begin(given, gathering.rank, parts.steps))
        folder, number, partial, self._run, token, _ = begun[0]
        target = Destination(Path(folder), number, Path(partial), self._run, token, given.step, given.keep)
        try:
            costs = parts.steps.recorder.known_costs() if all(recorded for *_, recorded in begun) else None
            plan: list[RankPlan] = []
            everyone = agreed(gathering, lambda: _plan(parts, given, costs, plan))
            messages = [one["plan"] for one in everyone]
            job = SaveJob(target, parts.axes, ties_of(parts.model), messages, _state_file(everyone))
            job.prepare(plan[0], copies=not given.block)
            return self._write(job, parts, gathering, given.block)
        except BaseException:
            if gathering.rank == 0:
                shutil.rmtree(target.partial, ignore_errors=True)
                self.known[target.folder] = target.number - 1  # the next of this number may be another's
            raise

    def _write(self, job: SaveJob, parts: Inside, gathering: TransportGathering, block: bool) -> Future[Path]:
        beside = None if block else gathering_beside(parts.transport, job.target.token)
        later = Later(job.target.folder.resolve(), None if beside is None else self._lock)
        if beside is None:
            later.set_result(job.write(gathering))
            return later
        self._pending = later
        write_later(later, job, beside, parts.device)
        return later

    def wait(self) -> None:
        """Until the write before is done; Ctrl-C is heard meanwhile."""
        if self._pending is not None:
            self._pending.until_done()

    def _begin(self, given: _Given, rank: int, steps: Steps) -> list[Any]:
        """Checks what is given, and on the first rank makes the folder that is written into."""
        pending, self._pending = self._pending, None
        if pending is not None and (error := pending.unheard) is not None:
            pending.heard = True
            raise CheckpointError(f"the checkpoint before this one could not be written: {error}") from error
        given.check()
        if steps.has_unsummed:
            raise CheckpointError(
                "gradients that were not summed yet (set_requires_gradient_sync(False)) are in no checkpoint, and "
                "would be lost: save behind the call that sums them and optimizer.step(), or call zero_grad()"
            )
        if rank:
            return ["", 0, "", "", "", steps.recorder.has_costs]
        folder = given.folder.absolute()
        if run_folder.is_checkpoint(folder):
            raise CheckpointError(f"{folder} is a checkpoint itself; give the folder of the run, {folder.parent}")
        wait_for_writes(folder)
        folder.mkdir(parents=True, exist_ok=True)
        run = self._run or _run_id()
        if self._lock is None or Path(self._lock.file.name).parent != folder:
            self._lock = None
            self._lock = lock_of(folder, run)
        number = run_folder.next_number(folder)
        self._check_own(folder, number - 1)
        self.known[folder] = number
        return [
            str(folder),
            number,
            str(run_folder.begin(folder, given.step)),
            run,
            uuid.uuid4().hex,
            steps.recorder.has_costs,
        ]

    def _check_own(self, folder: Path, newest: int) -> None:
        """CheckpointError where another run's checkpoints would be mixed with this one's, and deleted in time."""
        there = run_folder.checkpoints(folder)
        if there and folder not in self.known:
            raise CheckpointError(
                f"{folder} has checkpoints already, {there[0].name} and {len(there) - 1} more, and this run was not "
                "loaded from there: call fxpipe.load(folder, ..., required=False) first, or give a new folder"
            )
        if newest > self.known.get(folder, 0):
            raise CheckpointError(
                f"{folder} has a newer checkpoint than this run has written or loaded, "
                f"{run_folder.newest(folder).name}: another model of this program, or another run, saves there; "
                "give each a folder of its own"
            )


def _plan(parts: Inside, given: _Given, costs: Costs | None, found: list[RankPlan]) -> dict[str, Any]:
    """What this rank has, and its plain data."""
    run = {"number": parts.steps.number, "seed": parts.steps.seed, "stages": list(parts.stages)}
    plain: dict[str, Any] = {
        "extra": given.extra,
        "random": RandomState([parts.device]).numbers,
        "run": {**run, "costs": None if costs is None else asdict(costs)},
    }
    for name, one in (("scheduler", given.scheduler), ("loader", given.loader)):
        if one is not None:
            plain[name] = one.state_dict()
    model = parts.module.state_dict()
    if parts.transport.data_rank:  # replicas differ in them: of the model's, each is the first replica's
        plain[BUFFERS] = {name: model.pop(name) for name in own_buffers(parts.module, model)}
    digests, trees, tensors = plain_parts(plain)
    states: dict[str, Any] = {
        name: one.state_to_fill(()) for name, one in savable(given.optimizer, parts.module).items()
    }
    states["model"] = model
    if given.scheduler is not None:
        states["scheduler"] = plain["scheduler"]  # for who reads it by torch alone; fxpipe reads each rank's
    if tensors:
        states[PLAIN] = tensors
    found.append(RankPlan(states, parts.transport.rank))
    return {"plan": found[0].message(), "parts": digests, "trees": trees}


def _state_file(everyone: Sequence[Any]) -> str:
    trees = {digest: tree for one in everyone for digest, tree in one["trees"].items()}
    return json.dumps({"ranks": [one["parts"] for one in everyone], "trees": trees})


def _run_id() -> str:
    """The same for restarts of a job, where its launcher says."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("SLURM_JOB_ID", "none")
    return next((name for name in given if name != "none"), "") or uuid.uuid4().hex[:12]


def _short(value: Any) -> str:
    return f"a {type(value).__name__}" if type(value) is not dict else "a dict with 'step'"


def continues(forward_backward: ForwardBackward, folder: Path) -> None:
    """From now on the checkpoints that are in a folder are this run's."""
    _SAVERS.setdefault(forward_backward, _Saver()).known[folder] = run_folder.next_number(folder) - 1


def wait_for_saves(forward_backward: ForwardBackward) -> None:
    """Returns once nothing is being written for it any more."""
    if (saver := _SAVERS.get(forward_backward)) is not None:
        saver.wait()


_SAVERS: WeakKeyDictionary[ForwardBackward, _Saver] = WeakKeyDictionary()
