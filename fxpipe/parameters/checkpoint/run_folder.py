"""Run folder: the checkpoints of a run, each complete under its name or not there, and which is the latest.

    run/step-000800/   run/step-000812/   run/latest → step-000812   run/lock   run/step-000824.partial/

A checkpoint is written into a ``.partial`` folder, which is renamed when all of it is on the disk; old ones are renamed
to ``.removed`` before they are deleted. So a process may be killed at any moment.
"""

from __future__ import annotations

import os
import re
import shutil
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
