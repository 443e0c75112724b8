"""Run folder: the checkpoints of a run, each complete under its final name or absent, and a link to the latest.

    run/step-000800/   run/step-000812/   run/latest → step-000812   run/lock   run/step-000824.partial/

A checkpoint is written to a ``.partial`` folder, which is renamed once all its files are on the disk. An old checkpoint
is renamed to ``.removed`` before its files are deleted. So a process may be killed at any moment.
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
    """Whether ``path`` is the folder of a checkpoint, and not of a run."""
    return (path / MANIFEST).exists()


def run_of(path: Path) -> Path:
    """The folder of the run to which ``path`` belongs: the folder, its ``latest``, or one of its checkpoints."""
    return path.parent if path.name == LATEST or _NAME.fullmatch(path.name) else path


def numbered(folder: Path) -> list[tuple[int | None, Path]]:
    """The number and folder of each checkpoint of a run, whole or damaged, newest first.

    Checkpoints whose manifest cannot be read come first, with None as their number: their age is not known.
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
    """The folders of ``numbered``."""
    return [path for _, path in numbered(folder)]


def newest(folder: Path) -> int:
    """The largest number of the folder's checkpoints; 0 without any."""
    return max((number or 0 for number, _ in numbered(folder)), default=0)


def begin(folder: Path, step: int) -> Path:
    """Makes an empty ``.partial`` folder. Deletes folders that killed processes left: the caller holds the lock."""
    for left in folder.iterdir():
        if _LEFT.fullmatch(left.name):
            shutil.rmtree(left)
    latest = folder / LATEST
    if latest.is_dir() and not latest.is_symlink():  # made by a copy that follows links: replace() would fail
        raise CheckpointError(f"{latest} is a folder, and no link to a checkpoint; delete it")
    names = itertools.chain([f"step-{step:06d}"], (f"step-{step:06d}-{again}" for again in itertools.count(2)))
    free = next(name for name in names if not (folder / name).exists())  # never overwrites a checkpoint
    partial = folder / f"{free}{PARTIAL}"
    partial.mkdir()
    return partial


def complete(partial: Path) -> Path:
    """Renames a ``.partial`` folder to its final name, once all its files are on the disk."""
    # The order must hold: the final name may reach the disk only after the folder's files.
    flush(partial)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    partial.rename(final)
    return final


def make_latest(final: Path) -> None:
    """Waits until a folder's name is on the disk, and replaces the link ``latest`` atomically."""
    flush(final.parent)
    beside = final.parent / f"{LATEST}{PARTIAL}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(final.name, target_is_directory=True)
    beside.replace(final.parent / LATEST)


def keep_newest(folder: Path, keep: int | None) -> None:
    """Deletes all checkpoints but the ``keep`` newest; None deletes no checkpoint."""
    if keep is None:
        return
    readable = [path for number, path in numbered(folder) if number is not None]  # the user has to inspect the others
    for old in readable[keep:]:
        # Renames first: a partly deleted checkpoint must not have a checkpoint's name.
        leaving = old.with_name(f"{old.name}{REMOVED}")
        old.rename(leaving)
        shutil.rmtree(leaving)


def flush(folder: Path) -> None:
    """Waits until the folder's directory entries are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- Lock: only one run at a time writes to a folder. The system releases the lock when the process ends ---


class FolderLock:
    """A folder's open lock file; the file is closed when the object is garbage-collected."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "lock").open("a+")

    def is_of(self, folder: Path) -> bool:
        """Whether this is the lock file of ``folder``, and not of a deleted folder of the same path."""
        file = folder / "lock"
        return file.exists() and os.path.samestat(file.stat(), os.fstat(self.file.fileno()))

    def __del__(self) -> None:
        self.file.close()


# A process loses a lock when it closes any handle of the file: so all writers to a folder share a handle.
_held: weakref.WeakValueDictionary[tuple[int, str], FolderLock] = weakref.WeakValueDictionary()


def lock_of(folder: Path, run: str) -> FolderLock:
    """Locks a folder until the lock object is garbage-collected or the process ends.

    The lock is a POSIX record lock: forked data loaders do not inherit it, and it works over NFS. On a file system
    without such locks, the function warns.

    Raises:
        CheckpointError: another process writes to the folder; the message has its host, its process id and the time.
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
    # The file names the lock's holder, for the message to others; the system keeps the lock itself.
    file.seek(0)
    file.truncate()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()} (run {run}) since {since}")
    file.flush()
    _held[key] = lock
    return lock
