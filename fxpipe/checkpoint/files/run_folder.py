"""Run folder: the checkpoints of a run, each complete under its name or not there, and which is the latest.

    run/step-000800/   run/step-000812/   run/latest → step-000812   run/lock   run/step-000824.partial/

A checkpoint is written into a ``.partial`` folder, which is renamed when all of it is on the disk; old ones are renamed
to ``.removed`` before they are deleted. So a process may be killed at any moment.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import socket
import time
import warnings
import weakref
from pathlib import Path

from fxpipe.checkpoint.files.manifest import MANIFEST, Manifest
from fxpipe.errors import CheckpointError

LATEST = "latest"
PARTIAL, REMOVED = ".partial", ".removed"
_NAME = re.compile(r"step-\d{6,20}(-\d{1,6})?")
_LEFT = re.compile(rf"{_NAME.pattern}({re.escape(PARTIAL)}|{re.escape(REMOVED)})")


def is_checkpoint(path: Path) -> bool:
    """Whether it is a checkpoint's own folder, and not one of many."""
    return (path / MANIFEST).exists()


def numbered(folder: Path) -> list[tuple[int | None, Path]]:
    """The checkpoints of a run, whole or damaged since, each with its number, the one written last first.

    Those without a manifest that can be read come before the others, with None: when they were written is not known.
    """
    try:
        paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    pairs = [(_number(path), path) for path in paths]
    return sorted(pairs, key=lambda pair: (pair[0] is None, pair[0] or 0, pair[1].name), reverse=True)


def _number(path: Path) -> int | None:
    try:
        return Manifest.read(path).number
    except CheckpointError:
        return None


def checkpoints(folder: Path) -> list[Path]:
    """Those of ``numbered``."""
    return [path for _, path in numbered(folder)]


def newest(folder: Path) -> int:
    """The largest number that a checkpoint of the folder has; 0 where there is none."""
    return max((number or 0 for number, _ in numbered(folder)), default=0)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write into. What killed processes have left is deleted: the caller holds the lock."""
    for left in folder.iterdir():
        if _LEFT.fullmatch(left.name):
            shutil.rmtree(left)
    latest = folder / LATEST
    if latest.is_dir() and not latest.is_symlink():  # a copy by what follows links: it could never be replaced
        raise CheckpointError(f"{latest} is a folder, and no link to a checkpoint; delete it")
    names = itertools.chain([f"step-{step:06d}"], (f"step-{step:06d}-{again}" for again in itertools.count(2)))
    free = next(name for name in names if not (folder / name).exists())  # nothing is ever overwritten
    partial = folder / f"{free}{PARTIAL}"
    partial.mkdir()
    return partial


def complete(partial: Path) -> Path:
    """Gives a folder its name, once all its files are on the disk."""
    # The order must hold: a name is on the disk only after everything that it names.
    flush(partial)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    partial.rename(final)
    return final


def make_latest(final: Path) -> None:
    """Waits until a folder's name is on the disk, and makes it the latest. There is no moment without a latest one."""
    flush(final.parent)
    beside = final.parent / f"{LATEST}{PARTIAL}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(final.name, target_is_directory=True)
    beside.replace(final.parent / LATEST)


def keep_newest(folder: Path, keep: int | None) -> None:
    """Deletes all checkpoints but the ``keep`` that were written last; None: deletes none."""
    if keep is None:
        return
    readable = [path for number, path in numbered(folder) if number is not None]  # others are for the user to look at
    for old in readable[keep:]:
        # Renamed first: a checkpoint that is half deleted must not bear a checkpoint's name.
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

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "lock").open("a+")

    def is_of(self, folder: Path) -> bool:
        """Whether it is that folder's, and not of one that was there before."""
        file = folder / "lock"
        return file.exists() and os.path.samestat(file.stat(), os.fstat(self.file.fileno()))

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
    key = os.getpid(), str(folder.resolve())
    if key in _held and _held[key].is_of(folder):
        return _held[key]
    lock = FolderLock(folder)
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
            f"{file.name} cannot be locked ({error.strerror}): see to it that no other run writes to {folder}",
            RuntimeWarning,
            stacklevel=2,
        )
    # Who holds it, for the message to others; the lock itself is the system's.
    file.seek(0)
    file.truncate()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()} (run {run}) since {since}")
    file.flush()
    _held[key] = lock
    return lock
