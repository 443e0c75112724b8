"""The folder of a cache: a file a capture, written whole or not at all; ranks and jobs may share it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from fxpipe.errors import RunError
from fxpipe.graph.plain_data import MOST_BYTES, decode
from fxpipe.progress import tell
from fxpipe.small_file import read_small, write_whole
from fxpipe.trace.cached.facts import versions


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Makes the folder where there is none; RunError where no file can be written into it."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(
            f"cache={os.fspath(folder)!r} is no folder that captures can be kept in: {error.strerror or error}; name "
            "one that this process may write into, or leave cache= out"
        ) from None


def read(folder: str, key: str) -> Any:
    """The data that was kept under a key; None where there is none, with a line where there is something else."""
    path = _path(folder, key)
    try:
        header, _, body = read_small(path, MOST_BYTES).partition(b"\n")
        if json.loads(header) != _header(key, body):
            raise ValueError("it is damaged, or not the capture that its name says")
        return decode(body, path.name)
    except FileNotFoundError:
        _tell_of_others(folder, key)
    except (OSError, ValueError, RecursionError, RunError) as error:
        unusable(folder, key, error)
    return None


def unusable(folder: str, key: str, error: Exception) -> None:
    """Says that a file is passed over; it is written anew."""
    tell(f"fxpipe: {_path(folder, key)} cannot be used ({type(error).__name__}: {str(error)[:200]}); captured anew")


def write(folder: str, key: str, body: bytes) -> None:
    """Keeps encoded data under a key. A disk that is full ends no training: a line says so."""
    try:
        write_whole(_path(folder, key), json.dumps(_header(key, body)).encode() + b"\n" + body)
    except OSError as error:
        tell(f"fxpipe: a capture could not be kept in {folder}: {error.strerror or error}")


def _header(key: str, body: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(body).hexdigest()
    return {"what": "fxpipe capture", "key": key, "versions": versions(), "sha256": digest}


def _tell_of_others(folder: str, key: str) -> None:
    """The same capture by other versions is no capture of these."""
    for path in sorted(Path(folder).glob(f"{key[:32]}-*.json")):
        try:
            other = json.loads(read_small(path, MOST_BYTES).partition(b"\n")[0])["versions"]
            differs = [
                f"{name} {other.get(name)}" for name, version in versions().items() if other.get(name) != version
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        mine = ", ".join(f"{name} {version}" for name, version in versions().items())
        tell(f"fxpipe: {path} was captured by {', '.join(differs)}; captured anew by {mine}")
        return


def _path(folder: str, key: str) -> Path:
    made_by = hashlib.sha256(json.dumps(versions()).encode()).hexdigest()
    return Path(folder) / f"{key[:32]}-{made_by[:8]}.json"
