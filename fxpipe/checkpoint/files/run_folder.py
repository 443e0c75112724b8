"""Run folder: the checkpoints of a run, each complete under its final name or absent, with links to latest and best.

    run/step-000800/   run/latest → step-000812   run/lock
    run/step-000812/   run/best → step-000800     run/step-000824.partial/

A checkpoint is written to a ``.partial`` folder, which is renamed once all its files are on the disk. An old checkpoint
is renamed to ``.removed`` before its files are deleted. So a process may be killed at any moment. Manifests say which
checkpoint is the best; the links, which each save makes anew, are for readers.
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

LATEST, BEST = "latest", "best"
PARTIAL, REMOVED = ".partial", ".removed"
_NAME = re.compile(r"step-\d{6,20}(-\d{1,6})?")
_LEFT = re.compile(rf"{_NAME.pattern}({re.escape(PARTIAL)}|{re.escape(REMOVED)})")


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is the folder of a checkpoint, and not of a run."""
    return (path / MANIFEST).exists()


def run_of(path: Path) -> Path:
    """The folder of the run to which ``path`` belongs: the folder, its ``latest`` or ``best``, or a checkpoint."""
    return path.parent if is_link(path) or _NAME.fullmatch(path.name) else path


def is_link(path: Path) -> bool:
    """Whether ``path`` is a run's ``latest``, or its ``best``, which may also be the name of another run's folder."""
    return path.name == LATEST or (path.name == BEST and path.is_symlink())


def manifests(folder: Path) -> list[tuple[Manifest | None, Path]]:
    """The manifest and folder of each checkpoint of a run, whole or damaged, newest first.

    Checkpoints whose manifest cannot be read come first, with None as their manifest: their age is not known.
    """
    try:
        paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    pairs = [(_manifest(path), path) for path in paths]
    return sorted(pairs, key=lambda pair: (not pair[0], pair[0].number if pair[0] else 0, pair[1].name), reverse=True)


def _manifest(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except CheckpointError:
        return None


def checkpoints(folder: Path) -> list[Path]:
    """The folders of ``manifests``."""
    return [path for _, path in manifests(folder)]


def bests(folder: Path) -> list[Path]:
    """The checkpoints that were the run's best when they were saved, newest first; the first is the best of all."""
    return [path for manifest, path in manifests(folder) if manifest and manifest.best]


def newest(folder: Path) -> int:
    """The largest number of the folder's checkpoints; 0 without any."""
    return max((manifest.number for manifest, _ in manifests(folder) if manifest), default=0)


def begin(folder: Path, step: int) -> Path:
    """Makes an empty ``.partial`` folder. Deletes folders that killed processes left: the caller holds the lock."""
    for left in folder.iterdir():
        if _LEFT.fullmatch(left.name):
            shutil.rmtree(left)
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


def check_link(folder: Path, name: str) -> None:
    """CheckpointError if the run has a folder where ``make_links`` makes a link, as in a copy that follows links."""
    link = folder / name
    if link.is_dir() and not link.is_symlink():
        raise CheckpointError(f"{link} is a folder, and no link to a checkpoint; delete it, or give it another name")


def make_links(final: Path) -> None:
    """Waits until a folder's name is on the disk, and replaces the links ``latest`` and ``best`` atomically."""
    flush(final.parent)
    for name, target in ((LATEST, final), *((BEST, path) for path in bests(final.parent)[:1])):
        beside = final.parent / f"{name}{PARTIAL}"
        beside.unlink(missing_ok=True)
        beside.symlink_to(target.name, target_is_directory=True)
        beside.replace(final.parent / name)


def keep_newest(folder: Path, keep: int | None) -> None:
    """Deletes all checkpoints but the ``keep`` newest and the best; None deletes no checkpoint."""
    if keep is None:
        return
    readable = [path for manifest, path in manifests(folder) if manifest]  # the user has to inspect the others
    best = bests(folder)[:1]
    for old in (path for path in readable[keep:] if path not in best):
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
