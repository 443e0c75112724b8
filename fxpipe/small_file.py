"""Small files: read whole, and no further than they may reach, whatever lies in their place; written all at once."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path


def read_small(path: str | os.PathLike[str], most: int, only_regular: bool = True) -> bytes:
    """What is in a file. OSError where it cannot be read, or (EFBIG) has more than ``most`` bytes.

    ``only_regular``: a device, or a pipe for whose other end one would wait, is an OSError, too.
    """
    with open(path, "rb", opener=_without_waiting if only_regular else None) as file:
        found = os.fstat(file.fileno())
        is_regular = stat.S_ISREG(found.st_mode)
        if only_regular and not is_regular:
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
        content: bytes = file.read(1 + (min(found.st_size, most) if is_regular else most))
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
    return content


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file in one piece: another process has all of it, or what was there before.

    OSError where that fails.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        part.write_bytes(content)
        os.replace(part, target)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        part.unlink(missing_ok=True)
