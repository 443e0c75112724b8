"""Save job: what a rank does for one checkpoint once all know who writes what, in a call or beside the training."""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpipe.distributed.gathering import Gathering, Verdict, values_of
from fxpipe.errors import CheckpointError
from fxpipe.parameters.checkpoint import run_folder
from fxpipe.parameters.checkpoint.manifest import Manifest, write_text, written_of
from fxpipe.parameters.checkpoint.writer import RankPlan, RankShare

STATE = "state.json"
"""The file of all ranks' plain data."""

_SPARE = 1.02  # of what tensors take; what is around them in the files is little


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint goes. ``token``: of this very save, which no other and no earlier one has."""

    folder: Path
    number: int
    partial: Path
    run: str
    token: str
    step: int
    keep: int | None

    def check(self, size: int) -> None:
        """CheckpointError where this rank does not see the folder, or there is no place for so many bytes."""
        if not self.partial.is_dir():
            raise CheckpointError(
                f"{self.partial}, which rank 0 has made, is not there for this rank; give a folder that all ranks share"
            )
        free = shutil.disk_usage(self.partial).free
        if size * _SPARE > free:
            raise CheckpointError(
                f"the checkpoint takes {size:,} bytes, and {self.folder} has {free:,} left; make room, or write keep=1"
            )


@dataclass
class SaveJob:
    """What a rank does for a checkpoint once all know who writes what. ``state``: all ranks' plain data, as JSON."""

    target: Destination
    axes: tuple[tuple[str, int], ...]
    ties: Mapping[str, str]
    messages: Sequence[Any]
    state: str
    _share: RankShare | None = None
    _prepared: Verdict | None = None

    def prepare(self, plan: RankPlan, copies: bool) -> None:
        """Settles this rank's share, and copies it. What fails is reported to the others when they meet."""
        self._prepared = Verdict(lambda: self._settle(plan, copies))

    def _settle(self, plan: RankPlan, copies: bool) -> None:
        self._share = plan.settle(self.messages)
        self.target.check(self._share.size)
        if copies:
            self._share.keep_copies()

    def write(self, gathering: Gathering) -> Path:
        """The checkpoint's folder; where one rank fails, all do, and nothing is left of it."""
        written = Verdict(self._write_share)
        outcome = Verdict(lambda: self._complete(gathering, written))
        if gathering.rank == 0 and outcome.error is not None:
            shutil.rmtree(self.target.partial, ignore_errors=True)
        given = gathering.from_first(outcome.message)
        if written.error is not None:
            raise written.error
        return Path(values_of([given], outcome)[0])

    def _complete(self, gathering: Gathering, written: Verdict) -> str:
        messages = gathering.to_first(written.message)
        return self._finish(values_of(messages, written)) if gathering.rank == 0 else ""

    def _write_share(self) -> Any:
        if self._prepared is not None and self._prepared.error is not None:
            raise self._prepared.error
        assert self._share is not None
        return self._share.write(self.target.partial)

    def _finish(self, messages: Sequence[Any]) -> str:
        """What the first rank does once all have written."""
        assert self._share is not None
        target = self.target
        files = self._share.finish(target.partial, messages)
        write_text(target.partial / STATE, self.state)
        files[STATE] = written_of(target.partial / STATE)
        saved_at = time.strftime("%Y-%m-%d %H:%M:%S%z")
        versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
        manifest = Manifest(target.step, target.number, saved_at, target.run, self.axes, versions, files, self.ties)
        manifest.write(target.partial)
        final = run_folder.complete(target.partial)
        try:
            run_folder.keep_newest(target.folder, target.keep)
        except OSError as error:  # this one is complete all the same
            warnings.warn(f"old checkpoints in {target.folder} could not be deleted: {error}", stacklevel=2)
        return str(final)
