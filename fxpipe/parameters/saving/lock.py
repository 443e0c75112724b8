"""Lock: one run writes to a folder at a time. The system lets go of it when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
import weakref
from io import TextIOWrapper
from pathlib import Path

from fxpipe.errors import CheckpointError

LOCK = "lock"


class FolderLock:
    """Held from when it is made until nobody refers to it, or its process ends.

    A POSIX record lock: not a forked data loader's, and over NFS as well. Where a file system has none, a warning says
    so.

    Raises:
        CheckpointError: another process writes to the folder; with its host, its number and since when.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.path = folder / LOCK
        self._handle = _opened(self.path)
        file = self._handle.file
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = _holder(file)
            raise CheckpointError(
                f"{folder} is written to by {holder}; give each run a folder of its own, or end that process"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{self.path} cannot be locked ({error.strerror}): see to it that no other run writes to {folder}",
                RuntimeWarning,
                stacklevel=2,
            )
        file.seek(0)
        file.truncate()
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "run": run, "since": _now()}, file)
        file.flush()


class _Handle:
    """An open file, closed when nobody refers to it."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a+")

    def __del__(self) -> None:
        self.file.close()


# A process loses a lock when it closes any handle of the file: so there is one handle for all that write to a folder.
_handles: weakref.WeakValueDictionary[tuple[int, str], _Handle] = weakref.WeakValueDictionary()


def _opened(path: Path) -> _Handle:
    key = (os.getpid(), str(path.resolve()))
    handle = _handles.get(key)
    if handle is None:
        handle = _handles[key] = _Handle(path)
    return handle


def _holder(file: TextIOWrapper) -> str:
    try:
        file.seek(0)
        told = json.loads(file.read(4096))
        return (
            f"process {int(told['pid'])} on {str(told['host'])[:100]} (run {str(told['run'])[:100]}) since "
            + (str(told["since"])[:40])
        )
    except (ValueError, KeyError, TypeError, OSError):
        return "another process"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
