"""Small files: read whole, and no further than they may reach, whatever lies in their place; written all at once."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path


class Budget:
    """How much of ``what`` may yet be made of a file: a part that it names again counts again, so that a small file
    fills no memory."""

    def __init__(self, most: int, what: str) -> None:
        self._left, self._all = most, f"{most:,} {what}"

    def spend(self, amount: int) -> None:
        """ValueError where less is left."""
        self._left -= amount
        if self._left < 0:
            raise ValueError(f"it unfolds to more than {self._all}; no file that torch writes does")


def read_small(path: str | os.PathLike[str], most: int, more: int = 0) -> bytes:
    """What is in a file. OSError where it cannot be read, (EFBIG) has more than ``most`` bytes, or (EINVAL) is a device
    or a pipe, for whose other end one would wait. ``more``: flags of ``os.open``."""
    # O_NONBLOCK: opening a pipe would otherwise wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | more | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
        content: bytes = file.read()
    return content


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file in one piece: another process, which may write it, too, has all of it, or what was there before.

    A link or a device is written in its place. OSError where that fails.
    """
    target, content = Path(path), text.encode()
    if target.is_symlink() or (target.exists() and not target.is_file()):
        target.write_bytes(content)
        return
    # A rename within one folder is atomic, so the new content is written beside the old one first.
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        part.write_bytes(content)
        os.replace(part, target)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        part.unlink(missing_ok=True)
