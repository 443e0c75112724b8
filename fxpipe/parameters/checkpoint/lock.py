"""Lock: one run writes to a folder at a time. The system lets go of it when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
import warnings
import weakref
from pathlib import Path

from fxpipe.errors import CheckpointError


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
