"""Run folder: the checkpoints of a run, each complete under its name or not there, and which is the latest.

    run/step-000800/   run/step-000812/   run/latest → step-000812   run/lock   run/step-000824.partial/

A checkpoint is written into a ``.partial`` folder, which is renamed when all of it is on the disk; old ones are renamed
to ``.removed`` before they are deleted. So a process may be killed at any moment.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import time
import warnings
import weakref
from pathlib import Path

from fxpipe.errors import CheckpointError
from fxpipe.parameters.checkpoint.manifest import MANIFEST, Manifest

LATEST = "latest"
PARTIAL, REMOVED = ".partial", ".removed"
_NAME = re.compile(r"step-\d{6,20}(-\d{1,6})?")
_LEFT = re.compile(rf"{_NAME.pattern}({re.escape(PARTIAL)}|{re.escape(REMOVED)})")


def is_checkpoint(path: Path) -> bool:
    """Whether it is a checkpoint's own folder, and not one of many."""
    return (path / MANIFEST).exists()


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, whole or damaged since, the one written last first.

    Those without a manifest that can be read come before the others: when they were written is not known.
    """
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=_order, reverse=True)


def _order(path: Path) -> tuple[int, int, str]:
    try:
        return 0, Manifest.read(path).number, path.name
    except CheckpointError:
        return 1, 0, path.name


def next_number(folder: Path) -> int:
    """One more than any checkpoint of the folder has."""
    return 1 + max((_order(path)[1] for path in checkpoints(folder)), default=0)


def newest(folder: Path) -> Path:
    """The checkpoint with the largest number, of a folder that has one."""
    return max(checkpoints(folder), key=lambda path: _order(path)[1])


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write into. What killed processes have left is deleted: the caller holds the lock."""
    for left in folder.iterdir():
        if _LEFT.fullmatch(left.name):
            shutil.rmtree(left)
    latest = folder / LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise CheckpointError(
            f"{latest} is a folder, and no link to a checkpoint, as where the run was copied by what follows links; "
            "delete it: the checkpoints beside it are all that is needed"
        )
    name = f"step-{step:06d}"
    again = 1
    while (folder / name).exists():  # a run that has gone back to an earlier step: nothing is ever overwritten
        again += 1
        name = f"step-{step:06d}-{again}"
    partial = folder / f"{name}{PARTIAL}"
    partial.mkdir()
    return partial


def complete(partial: Path) -> Path:
    """Gives a folder its name, once all its files are on the disk, and makes it the latest."""
    flush(partial)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    partial.rename(final)
    flush(final.parent)
    point_to(final)
    return final


def point_to(final: Path) -> None:
    """Makes a checkpoint the latest, at once: there is no moment without a latest one."""
    beside = final.parent / f"{LATEST}{PARTIAL}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(final.name, target_is_directory=True)
    beside.replace(final.parent / LATEST)


def keep_newest(folder: Path, keep: int | None) -> None:
    """Deletes all checkpoints but the ``keep`` that were written last; None: deletes none."""
    if keep is None:
        return
    readable = [path for path in checkpoints(folder) if _order(path)[0] == 0]  # others are for the user to look at
    for old in readable[keep:]:
        leaving = old.with_name(f"{old.name}{REMOVED}")
        old.rename(leaving)
        shutil.rmtree(leaving)


def flush(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- Lock: one run writes to a folder at a time. The system lets go of it when its process ends, however it ends ---


class FolderLock:
    """A folder's open lock file, closed when nobody refers to it."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a+")

    def __del__(self) -> None:
        self.file.close()


# A process loses a lock when it closes any handle of the file: so there is one for all that write to a folder.
_held: weakref.WeakValueDictionary[tuple[int, str], FolderLock] = weakref.WeakValueDictionary()


def lock_of(folder: Path, run: str) -> FolderLock:
    """A lock that is held until nobody refers to it, or its process ends.

    A POSIX record lock: not a forked data loader's, and over NFS as well. Where a file system has none, a warning says
    so.

    Raises:
        CheckpointError: another process writes to the folder; with its host, its number and since when.
    """
    path = folder / "lock"
    key = os.getpid(), str(path.resolve())
    if key in _held:
        return _held[key]
    lock = FolderLock(path)
    file = lock.file
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read(500) or "another process"
        raise CheckpointError(
            f"{folder} is written to by {holder}; give each run a folder of its own, or end that process"
        ) from None
    except OSError as error:
        warnings.warn(
            f"{path} cannot be locked ({error.strerror}): see to it that no other run writes to {folder}",
            RuntimeWarning,
            stacklevel=2,
        )
    file.seek(0)
    file.truncate()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()} (run {run}) since {since}")
    file.flush()
    _held[key] = lock
    return lock
