"""Saving: a run's state into a checkpoint that is complete or absent, at once or while training goes on.

1. All ranks agree that they can: arguments, the folder and its lock, what the write before has come to.
2. Each rank reports what it has; from that all know who writes what.
3. Each writes its share into a ``.partial`` folder; the first rank adds the manifest, gives it its name, makes it the
   latest and deletes old ones. With ``block=False`` this runs on a thread, on copies.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxpipe.checkpoint.files import run_folder
from fxpipe.checkpoint.files.manifest import Manifest, write_text, written_of
from fxpipe.checkpoint.files.plain import PLAIN as KINDS
from fxpipe.checkpoint.files.run_folder import FolderLock, lock_of
from fxpipe.checkpoint.files.writer import RankPlan
from fxpipe.checkpoint.gathering import Gathering, TransportGathering, Verdict, agreed, gathering_beside, values_of
from fxpipe.checkpoint.run_state import BUFFERS, PLAIN, STATE, plain_parts, savable, ties_of
from fxpipe.distributed.activity import announced
from fxpipe.errors import CheckpointError, describe_error
from fxpipe.parameters.ownership import own_buffers
from fxpipe.run.forward_backward import ForwardBackward, steps_of
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
    steps = steps_of(forward_backward)
    saver = _SAVERS.setdefault(forward_backward, _Saver())
    path = path_of(folder).absolute()
    stateful = {"scheduler": scheduler, "loader": loader}
    with (
        announced(f"save, step {step!r:.20}" + ("" if block else ", block=False"), extends=True),
        steps.failing.together(Exception),
    ):  # which all ranks raise, with nothing under way
        steps.failing.check_open()
        gathering = TransportGathering(steps.transport)
        wait_for_saves(forward_backward)

        def begin() -> dict[str, Any]:
            saver.raise_earlier_error()
            _check_arguments(step, stateful, extra, keep, block)
            if steps.has_unsummed:
                raise CheckpointError(
                    "gradients that were not summed yet (set_requires_gradient_sync(False)) are in no checkpoint, and "
                    "would be lost: save behind the call that sums them and optimizer.step(), or call zero_grad()"
                )
            partial = saver.begin(path, step) if gathering.rank == 0 else {}
            return {**partial, "has_costs": steps.recorder.has_costs}

        begun = agreed(gathering, path, begin)
        first = begun[0]
        # A collective call: made by all ranks or by none.
        costs = steps.recorder.known_costs() if all(rank["has_costs"] for rank in begun) else None
        try:
            versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
            run, ties = _run_id(), ties_of(steps.module)
            manifest = Manifest(step, first["number"], "", run, steps.topology.axes, versions, {}, ties)
            job = _Job(Path(first["partial"]), keep, manifest)
            everyone = agreed(
                gathering, path, lambda: job.collect(forward_backward, steps, optimizer, stateful, extra, costs)
            )
            agreed(gathering, path, lambda: job.settle(everyone, copies=not block))
            beside = None if block else gathering_beside(steps.transport, first["token"])
            if beside is not None:
                saver.pending = _write_later(job, beside, steps.state.device, saver.lock)
                return saver.pending
            done: Future[Path] = Future()
            done.set_result(job.write(gathering))
            return done
        except BaseException:
            if gathering.rank == 0:
                shutil.rmtree(first["partial"], ignore_errors=True)
                # Where it was not completed, the next of this number may be another's.
                saver.known[path] = min(first["number"], run_folder.newest(path))
            raise


def path_of(folder: str | os.PathLike[str]) -> Path:
    """CheckpointError for what is no path. What is empty would be the working folder."""
    if not isinstance(folder, (str, os.PathLike)) or str(folder) == "" or "\0" in str(folder):
        raise CheckpointError(f"folder is {shown(folder)}; it is the path of a folder that all ranks see")
    return Path(folder)


_STATEFUL = {
    "scheduler": ", such as those of torch.optim.lr_scheduler",
    "loader": ": an object that counts the batches of the whole run, as Feed in examples/training_loop.py does",
}


def _check_arguments(step: Any, stateful: Mapping[str, Any], extra: Any, keep: Any, block: Any) -> None:
    """CheckpointError for what cannot be meant."""
    if type(step) is not int or step < 0:
        raise CheckpointError(f"step={step!r} is no number of steps; write how many were made, from 0 on")
    if not is_flag(block):
        raise CheckpointError(f"block is {shown(block)}; it is True or False")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r} keeps no checkpoint; write 1 or more, or None for all")
    if extra is not None and (type(extra) is not dict or "step" in extra):
        what = "a dict with 'step'" if type(extra) is dict else f"a {type(extra).__name__}"
        raise CheckpointError(f"extra= is {what}; write a dict without 'step', to which load() adds the step: {KINDS}")
    for name, value in stateful.items():
        if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise CheckpointError(
                f"{name}= is a {type(value).__name__}, which has no state_dict() and load_state_dict(); give one "
                f"that has{_STATEFUL[name]}"
            )


@dataclass
class _Saver:
    """What is known of one run's saves: the lock of its folder, and what is being written.

    ``known``: folders that this run has saved to or was loaded from → the number of the newest checkpoint there that it
    has written or found: those up to it are its own.
    """

    known: dict[Path, int] = field(default_factory=dict)
    lock: FolderLock | None = None
    pending: Future[Path] | None = None

    def raise_earlier_error(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None and (error := pending.exception()) is not None:
            _writing.pop(pending, None)
            raise CheckpointError(f"the checkpoint before this one could not be written: {error}") from error

    def begin(self, folder: Path, step: int) -> dict[str, Any]:
        """On the first rank: makes the folder that is written into."""
        if run_folder.is_checkpoint(folder):
            raise CheckpointError(f"{folder} is a checkpoint itself; give the folder of the run, {folder.parent}")
        wait_for_writes(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.lock is None or not self.lock.is_of(folder):  # a process that was forked keeps its parent's
            self.lock = lock_of(folder, _run_id())
        newest = run_folder.newest(folder)
        # Numbers only grow, so that a larger one than this run's last was written by another run.
        if newest > self.known.get(folder, 0):  # they would be mixed with this run's, and deleted in time
            latest = run_folder.checkpoints(folder)[0].name
            raise CheckpointError(
                f"{folder} has a checkpoint that this run has not written or loaded, {latest}: call "
                "fxpipe.load(folder, ..., required=False) first, or give each model and each run a folder of its own"
            )
        self.known[folder] = newest + 1
        return {"number": newest + 1, "partial": str(run_folder.begin(folder, step)), "token": uuid.uuid4().hex}


_SAVERS: WeakKeyDictionary[ForwardBackward, _Saver] = WeakKeyDictionary()


def continues(forward_backward: ForwardBackward, folder: Path) -> None:
    """From now on the checkpoints that are in a folder are this run's."""
    _SAVERS.setdefault(forward_backward, _Saver()).known[folder] = run_folder.newest(folder)


@functools.cache
def _run_id() -> str:
    """The same for restarts of a job, where its launcher says."""
    ids = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("SLURM_JOB_ID", "none")
    return next((name for name in ids if name != "none"), "") or uuid.uuid4().hex[:12]


@dataclass
class _Job:
    """What a rank does for a checkpoint: ``collect``, ``settle`` with what all have collected, ``write``.

    ``manifest``: of it, but for files and time. ``state``: all ranks' plain data, as JSON.
    """

    partial: Path
    keep: int | None
    manifest: Manifest
    plan: RankPlan = field(init=False)
    state: str = field(init=False)

    def collect(
        self,
        forward_backward: ForwardBackward,
        steps: Steps,
        optimizer: Any,
        stateful: Mapping[str, Any],
        extra: Any,
        costs: Costs | None,
    ) -> dict[str, Any]:
        """What this rank has, for the others, and its plain data."""
        module, stages = forward_backward.module, forward_backward.stages.names
        run = {"number": steps.number, "seed": steps.seed, "stages": list(stages)}
        plain: dict[str, Any] = {
            "extra": extra,
            "random": RandomState([steps.state.device]).numbers,
            "run": {**run, "costs": None if costs is None else asdict(costs)},
            **{name: value.state_dict() for name, value in stateful.items() if value is not None},
        }
        model = module.state_dict()
        if steps.transport.data_rank:  # replicas differ in them: of the model's, each is the first replica's
            plain[BUFFERS] = {name: model.pop(name) for name in own_buffers(module, model)}
        digests, trees, tensors = plain_parts(plain)
        states: dict[str, Any] = {name: each.state_to_fill(()) for name, each in savable(optimizer, module).items()}
        # One state dict for model and optimizers: torch's planner divides the writing over ranks.
        states["model"] = model
        if "scheduler" in plain:
            states["scheduler"] = plain["scheduler"]  # for who reads it by torch alone; fxpipe reads each rank's
        if tensors:
            states[PLAIN] = tensors
        self.plan = RankPlan(states, steps.transport.rank)
        return {"plan": self.plan.message(), "parts": digests, "trees": trees}

    def settle(self, everyone: Sequence[Any], copies: bool) -> None:
        """Finds what this rank writes. CheckpointError where it does not see the folder."""
        self.plan.settle([rank["plan"] for rank in everyone])
        trees = {digest: tree for rank in everyone for digest, tree in rank["trees"].items()}
        self.state = json.dumps({"ranks": [rank["parts"] for rank in everyone], "trees": trees})
        if not self.partial.is_dir():
            raise CheckpointError(
                f"{self.partial}, which rank 0 has made, is not there for this rank; give a folder that all ranks share"
            )
        if copies:
            self.plan.keep_copies()

    def write(self, gathering: Gathering) -> Path:
        """The checkpoint's folder; where one rank fails, all do, and nothing is left of it."""
        # A rank whose write failed still meets the others, who would wait for it.
        written = Verdict(self.partial, lambda: self.plan.write(self.partial))

        def complete() -> str:
            messages = gathering.to_first(written.message)
            return str(self._finish(values_of(messages, written))) if gathering.rank == 0 else ""

        outcome = Verdict(self.partial, complete)
        if gathering.rank == 0 and outcome.error is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
        message = gathering.from_first(outcome.message)
        if written.error is not None:
            raise written.error
        return Path(values_of([message], outcome)[0])

    def _finish(self, messages: Sequence[Any]) -> Path:
        """What the first rank does once all have written."""
        files = self.plan.finish(self.partial, messages)
        write_text(self.partial / STATE, self.state)
        files[STATE] = written_of(self.partial / STATE)
        replace(self.manifest, saved_at=time.strftime("%Y-%m-%d %H:%M:%S%z"), files=files).write(self.partial)
        # The rename is the moment from which the checkpoint is there: all before it may be lost.
        final = run_folder.complete(self.partial)
        try:
            run_folder.make_latest(final)
            run_folder.keep_newest(final.parent, self.keep)
        except OSError as error:
            warnings.warn(f"{final} is complete, but latest or older ones were not changed: {error}", stacklevel=2)
        return final


# --- while training goes on

_writing: dict[Future[Path], Path] = {}
"""What is written beside the training, or could not be: → the folder of the run."""


def _write_later(job: _Job, gathering: Gathering, device: torch.device, lock: FolderLock | None) -> Future[Path]:
    """Starts a thread that writes it. ``lock``: held for as long, whoever else lets go of it."""
    later: Future[Path] = Future()

    def write() -> None:
        nonlocal lock
        with contextlib.suppress(OSError, AttributeError):  # Linux: this thread comes behind those that compute
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device)
            path = job.write(gathering)
        except BaseException as error:
            lock = None  # before others hear of it, who may then ask for the lock
            later.set_exception(error)
        else:
            lock = None
            _writing.pop(later)
            later.set_result(path)

    _writing[later] = job.partial.parent.resolve()
    threading.Thread(target=write).start()  # no daemon: a program that ends waits for it
    return later


def wait_for_saves(forward_backward: ForwardBackward) -> None:
    """Returns once nothing is being written for it any more."""
    saver = _SAVERS.get(forward_backward)
    if saver is not None and saver.pending is not None:
        wait([saver.pending])


def wait_for_writes(folder: Path) -> None:
    """Returns once this process writes nothing into a run's folder, given itself or by one of its checkpoints: what
    another ``forward_backward`` of it is writing would be missed, or taken for what a killed one has left."""
    runs = folder.resolve(), folder.resolve().parent
    wait([later for later, run in list(_writing.items()) if run in runs])


@atexit.register
def _report_failed() -> None:
    """What could not be written, and no later save has raised. Threads are done by now."""
    for later in _writing:
        if (error := later.exception()) is not None:
            print(f"fxpipe: a checkpoint could not be written: {describe_error(error)}", file=sys.stderr)
