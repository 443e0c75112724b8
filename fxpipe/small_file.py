"""Small files: reads a regular file of limited size at once, and writes a file atomically."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path


class Budget:
    """The amount of ``what`` that a file's content may still expand to. A part that the file names again counts again,
    so that a small file cannot fill the memory."""

    def __init__(self, most: int, what: str) -> None:
        self._left, self._all = most, f"{most:,} {what}"

    def spend(self, amount: int) -> None:
        """Subtracts ``amount``; ValueError if less is left."""
        self._left -= amount
        if self._left < 0:
            raise ValueError(f"it unfolds to more than {self._all}; no file that torch writes does")


def read_small(path: str | os.PathLike[str], most: int, more: int = 0) -> bytes:
    """The bytes of a file. OSError if the file cannot be read, (EFBIG) has more than ``most`` bytes, or (EINVAL) is a
    device or a pipe, whose read could block. ``more``: flags of ``os.open``."""
    # O_NONBLOCK: otherwise, opening a pipe waits for the pipe's writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | more | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
        content: bytes = file.read()
    return content


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file atomically: other processes read the whole new content or the whole old content.

    A link's target or a device is written in place, not atomically. OSError if a write fails.
    """
    target, content = Path(path), text.encode()
    if target.is_symlink() or (target.exists() and not target.is_file()):
        target.write_bytes(content)
        return
    # A rename within a folder is atomic, so the new content is first written to another file of the folder.
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        part.write_bytes(content)
        os.replace(part, target)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        part.unlink(missing_ok=True)
