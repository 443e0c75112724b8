"""Saving: writes a run's state to a checkpoint that is complete or absent, at once or while training goes on.

1. All ranks agree that they can save: each checks the arguments, the folder, its lock and the previous write's result.
2. Each rank reports which values it has; from the reports every rank computes which rank writes which value.
3. Each rank writes its share to a ``.partial`` folder. The first rank adds the manifest, renames the folder, links
   ``latest`` to it and deletes old checkpoints. With ``block=False`` a thread does this step, on copies.
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
from fxpipe.distributed.activity import announced
from fxpipe.errors import CheckpointError, describe_error
from fxpipe.parameters.ownership import own_buffers
from fxpipe.progress import log
from fxpipe.run.forward_backward import ForwardBackward, steps_of
from fxpipe.run.run_state import BUFFERS, PLAIN, STATE, plain_parts, savable, ties_of
from fxpipe.run.step.step import Steps
from fxpipe.schedules.costs import Costs
from fxpipe.seeds import RandomState, state_of
from fxpipe.validation import is_flag, shown


def save(
    folder: str | os.PathLike[str],
    forward_backward: ForwardBackward,
    optimizer: Any = None,
    *,
    step: int,
    best: Any = False,
    scheduler: Any = None,
    loader: Any = None,
    average: Any = None,
    extra: dict[str, Any] | None = None,
    keep: int | None = 3,
    block: bool = True,
) -> Future[Path]:
    """Writes a checkpoint, ``folder/step-000812``, that is complete or absent. A collective call of all ranks.

    The checkpoint holds the model and the optimizer under the plain model's names, in the format of
    torch.distributed.checkpoint. It holds every rank's random state, the next step's number, and the seed of the
    stages' random numbers. It also holds the costs of the last recorded step, and the states of the other arguments.
    The files get their final folder name once all are on the disk, with a manifest of sizes and checksums;
    ``folder/latest`` is always complete.

    Args:
        folder: the run's folder; all ranks see it, and no other run writes to it.
        forward_backward: the object that ``fxpipe.compile`` returned.
        optimizer: the object that ``forward_backward.optimizer`` returned, a dict name → optimizer, or None; with
            ``zero=0`` and 3 also a torch optimizer of ``forward_backward.parameters()``.
        step: the number of steps made so far, from which ``load`` goes on.
        best: whether this is the run's best checkpoint so far, as a bool or a 0-dimensional tensor, the same on all
            ranks. ``folder/best`` is the newest such checkpoint, and ``keep`` does not delete it. ``extra`` holds the
            value for the next comparison: ``best=loss < best, extra={"best": min(loss, best)}``.
        scheduler: an object whose ``state_dict()`` is saved, on each rank.
        loader: the data loader, saved likewise; its state says which rows come next. A state that counts one replica's
            rows, as torchdata's StatefulDataLoader does, means other rows on another number of replicas. A loader that
            counts batches of the whole run declares this by an attribute, ``any_replicas = True``.
        average: a ``fxpipe.Average`` of the parameters.
        extra: the value that ``load`` returns; plain data, that is None, bool, int, float, str, bytes, list, tuple,
            dict with str or int keys, and tensors.
        keep: the number of checkpoints to keep, besides the best; older ones are deleted once this checkpoint is
            complete. None: all.
        block: whether the checkpoint is complete when the call returns. False: it is copied to host memory and written
            while training goes on; the next ``save`` raises an error of this write, or the program prints it at exit.

    Returns:
        A future whose ``result()`` is the checkpoint's folder. The future is done already or, with ``block=False``,
        once the checkpoint is complete.

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
    ):  # all ranks raise these errors, with no communication under way
        steps.failing.check_open()
        gathering = TransportGathering(steps.transport)

        def begin() -> dict[str, Any]:
            saver.raise_earlier_error()
            is_best = _flag_of(best)
            _check_arguments(step, {**stateful, "average": average}, extra, keep, block)
            if steps.has_unsummed:
                raise CheckpointError(
                    "gradients that were not summed yet (set_requires_gradient_sync(False)) are in no checkpoint, and "
                    "would be lost: save behind the call that sums them and optimizer.step(), or call zero_grad()"
                )
            partial = saver.begin(path, step, is_best) if gathering.rank == 0 else {}
            return {**partial, "has_costs": steps.recorder.has_costs, "best": is_best}

        begun = agreed(gathering, path, begin)
        first = begun[0]
        # A collective call: made by all ranks or by none.
        costs = steps.recorder.known_costs() if all(rank["has_costs"] for rank in begun) else None
        try:
            _check_same_best([rank["best"] for rank in begun])
            versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
            run, ties = _run_id(), ties_of(steps.module)
            axes, number = steps.topology.axes, first["number"]
            manifest = Manifest(step, number, "", run, axes, versions, {}, ties, first["best"])
            job = _Job(Path(first["partial"]), keep, manifest)
            values = forward_backward, steps, optimizer, average, stateful, extra, costs
            everyone = agreed(gathering, path, lambda: job.collect(*values))
            agreed(gathering, path, lambda: job.settle(everyone, copies=not block))
            if not block:
                beside = gathering_beside(steps.transport, first["token"])
                saver.pending = _write_later(job, beside, steps.rank_state.device, saver.lock)
                return saver.pending
            done: Future[Path] = Future()
            done.set_result(job.write(gathering))
            return done
        except BaseException:
            if gathering.rank == 0:
                shutil.rmtree(first["partial"], ignore_errors=True)
                # If the write did not complete, another run may use this number next.
                saver.numbers[path] = min(first["number"], run_folder.newest(path))
            raise


def path_of(folder: str | os.PathLike[str]) -> Path:
    """Returns the path; CheckpointError if ``folder`` is no path, or is empty, which would mean the working folder."""
    if not isinstance(folder, (str, os.PathLike)) or str(folder) == "" or "\0" in str(folder):
        raise CheckpointError(f"folder is {shown(folder)}; it is the path of a folder that all ranks see")
    return Path(folder)


def _flag_of(best: Any) -> bool:
    value = best.item() if isinstance(best, torch.Tensor) and best.numel() == 1 else best
    if not is_flag(value):
        raise CheckpointError(f"best is {shown(best)}; it is True or False, for example best=loss < best")
    return bool(value)


def _check_same_best(of_rank: Sequence[bool]) -> None:
    if len(set(of_rank)) > 1:
        raise CheckpointError(
            f"best is True on rank {of_rank.index(True)} and False on rank {of_rank.index(False)}; compare a value "
            'that all ranks have, such as the result of forward_backward.evaluate(..., outputs="loss")'
        )


def _check_arguments(step: Any, stateful: Mapping[str, Any], extra: Any, keep: Any, block: Any) -> None:
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
                f"{name}= is a {type(value).__name__}, which has no state_dict() and load_state_dict(); give one that "
                "has, as torch.optim.lr_scheduler's, fxpipe.Average and Feed in examples/training_loop.py have"
            )


@dataclass
class _Saver:
    """The state of a run's saves: the lock of its folder, and the write under way (``pending``).

    ``numbers``: folder that this run has saved to or was loaded from → number of the newest checkpoint there that this
    run has written or found. The run owns all checkpoints up to this number.
    """

    numbers: dict[Path, int] = field(default_factory=dict)
    lock: FolderLock | None = None
    pending: Future[Path] | None = None

    def raise_earlier_error(self) -> None:
        """Waits for the write under way; CheckpointError if it fails."""
        pending, self.pending = self.pending, None
        if pending is not None and (error := pending.exception()) is not None:
            _writing.pop(pending, None)
            raise CheckpointError(f"the checkpoint before this one could not be written: {error}") from error

    def claim(self, folder: Path) -> None:
        """On the first rank: makes the run's folder, and locks the folder for this process."""
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"{folder} cannot be written to by this process; give a folder that save() can write")
        run_folder.check_link(folder, run_folder.LATEST)
        if self.lock is None or not self.lock.is_of(folder):  # a forked process keeps its parent's lock object
            self.lock = lock_of(folder, _run_id())

    def begin(self, folder: Path, step: int, is_best: bool) -> dict[str, Any]:
        """On the first rank: makes the ``.partial`` folder."""
        if run_folder.is_checkpoint(folder):
            raise CheckpointError(f"{folder} is a checkpoint itself; give the folder of the run, {folder.parent}")
        wait_for_writes(folder)
        self.claim(folder)
        if is_best:
            run_folder.check_link(folder, run_folder.BEST)
        newest = run_folder.newest(folder)
        # Numbers only grow: another run wrote a checkpoint with a larger number than this run's last.
        if newest > self.numbers.get(folder, 0):  # keep= would count, and delete, the other run's checkpoints
            latest = run_folder.checkpoints(folder)[0].name
            raise CheckpointError(
                f"{folder} has a checkpoint that this run has not written or loaded, {latest}: call "
                "fxpipe.load(folder, ..., required=False) first, or give each model and each run a folder of its own. "
                "fxpipe.save(..., best=loss < best) keeps the best in the run's own folder"
            )
        self.numbers[folder] = newest + 1
        return {"number": newest + 1, "partial": str(run_folder.begin(folder, step)), "token": uuid.uuid4().hex}


_SAVERS: WeakKeyDictionary[ForwardBackward, _Saver] = WeakKeyDictionary()


def claim(forward_backward: ForwardBackward, folder: Path) -> None:
    """On the first rank: locks the folder that this run will save to. CheckpointError if another process writes to the
    folder, this process cannot, or a folder is where ``save`` makes a link."""
    run = run_folder.run_of(folder)
    if run_folder.is_link(folder) or not run_folder.is_checkpoint(folder):
        _SAVERS.setdefault(forward_backward, _Saver()).claim(run)
        run_folder.check_link(run, run_folder.BEST)


def continues(forward_backward: ForwardBackward, folder: Path) -> None:
    """Makes this run the owner of all checkpoints that a folder has now."""
    _SAVERS.setdefault(forward_backward, _Saver()).numbers[folder] = run_folder.newest(folder)


@functools.cache
def _run_id() -> str:
    """The run's id: the launcher's job id, which restarts share, or else a random id."""
    ids = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("SLURM_JOB_ID", "none")
    return next((name for name in ids if name != "none"), "") or uuid.uuid4().hex[:12]


@dataclass
class _Job:
    """A rank's work for a checkpoint: ``collect``, then ``settle`` with the results of all ranks, then ``write``.

    ``manifest``: the checkpoint's manifest without files and time. ``state``: all ranks' plain data, as JSON.
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
        average: Any,
        stateful: Mapping[str, Any],
        extra: Any,
        costs: Costs | None,
    ) -> dict[str, Any]:
        """The description of this rank's values and its plain data, for the other ranks."""
        module, stages = forward_backward.module, forward_backward.stages.names
        run = {"number": steps.number, "seed": steps.seed, "stages": list(stages)}
        plain: dict[str, Any] = {
            "extra": extra,
            "random": RandomState([steps.rank_state.device]).numbers,
            "generators": {name: state_of(each) for name, each in steps.generators(of_rank=True).items()},
            "run": {**run, "costs": None if costs is None else asdict(costs)},
            **{name: value.state_dict() for name, value in stateful.items() if value is not None},
        }
        model = module.state_dict()
        if steps.transport.data_rank:  # replicas differ in these; the model's buffers are replica 0's
            plain[BUFFERS] = {name: model.pop(name) for name in own_buffers(module, model)}
        digests, trees, tensors = plain_parts(plain)
        states: dict[str, Any] = {name: each.state_to_fill(()) for name, each in savable(optimizer, module).items()}
        states |= {"average": average.state_dict()} if average is not None else {}
        # One state dict for model and optimizers: torch's planner divides the writing over ranks.
        states["model"] = model
        if "scheduler" in plain:
            states["scheduler"] = plain["scheduler"]  # for readers that use torch alone; fxpipe reads each rank's
        if tensors:
            states[PLAIN] = tensors
        self.plan = RankPlan(states, steps.transport.rank)
        return {"plan": self.plan.message(), "parts": digests, "trees": trees}

    def settle(self, everyone: Sequence[Any], copies: bool) -> None:
        """Computes this rank's share of the write. CheckpointError if this rank does not see the folder."""
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
        """Writes this rank's share; returns the final folder. If a rank fails, all raise and the folder is deleted."""
        # A rank whose write failed still joins the gathering, for which the other ranks wait.
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
        """On the first rank: completes the checkpoint once all ranks have written their shares."""
        files = self.plan.finish(self.partial, messages)
        write_text(self.partial / STATE, self.state)
        files[STATE] = written_of(self.partial / STATE)
        replace(self.manifest, saved_at=time.strftime("%Y-%m-%d %H:%M:%S%z"), files=files).write(self.partial)
        # The rename makes the checkpoint visible: a crash before it loses only the new checkpoint.
        final = run_folder.complete(self.partial)
        try:
            run_folder.make_links(final)
            run_folder.keep_newest(final.parent, self.keep)
        except OSError as error:
            warnings.warn(f"{final} is complete, but latest or older ones were not changed: {error}", stacklevel=2)
        log(f"fxpipe: saved {final}")
        return final


# --- while training goes on

_writing: dict[Future[Path], Path] = {}
"""Each write that a thread makes during training, or that has failed → the run's folder."""


def _write_later(job: _Job, gathering: Gathering, device: torch.device, lock: FolderLock | None) -> Future[Path]:
    """Starts a thread that writes the checkpoint. ``lock``: the thread holds the folder's lock until it is done."""
    later: Future[Path] = Future()

    def write() -> None:
        nonlocal lock
        with contextlib.suppress(OSError, AttributeError):  # Linux: threads that compute go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device)
            path = job.write(gathering)
        except BaseException as error:
            lock = None  # before the error is visible: its receiver may take the lock
            later.set_exception(error)
        else:
            lock = None
            _writing.pop(later)
            later.set_result(path)

    _writing[later] = job.partial.parent.resolve()
    threading.Thread(target=write).start()  # no daemon: the program's exit waits for this thread
    return later


def wait_for_writes(folder: Path) -> None:
    """Waits until this process has no write under way to a run's folder; ``folder`` is that folder or a checkpoint's.
    Otherwise another ``forward_backward``'s write would be missed, or deleted as left over from a killed process."""
    runs = folder.resolve(), folder.resolve().parent
    wait([later for later, run in list(_writing.items()) if run in runs])


@atexit.register
def _report_failed() -> None:
    """Prints each write error that no later save has raised. All threads have ended by now."""
    for later in _writing:
        if (error := later.exception()) is not None:
            print(f"fxpipe: a checkpoint could not be written: {describe_error(error)}", file=sys.stderr)
