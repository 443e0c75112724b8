"""Reader: tensors and plain values out of a folder of torch.distributed.checkpoint, by this process alone, as data.

Whatever world it is in, no process asks another, and nothing that was read is run: see ``metadata``. What is stored
beside tensors is read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from fxpipe.errors import CheckpointError, nearest
from fxpipe.parameters.saving.manifest import Manifest, Piece, pieces_of
from fxpipe.parameters.saving.metadata import METADATA, read_metadata
from fxpipe.precision import converts


class FolderReader:
    """A folder that is read from. ``tensors``: shape and type of each tensor in it, by name. ``asked``: the names that
    its plans fill. ``manifest``: of what is read the crc32 is compared with it; None where that has been done."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder, self._manifest = folder, manifest
        self._checked: set[Piece] = set()
        if manifest is not None:
            manifest.check_file(folder, METADATA)
        self.metadata: Metadata = read_metadata(folder)
        self.asked: set[str] = set()
        entries = self.metadata.state_dict_metadata.items()
        self.tensors = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def names(self) -> list[str]:
        """All that is in it, tensors and plain values."""
        return list(self.metadata.state_dict_metadata)

    def plan(self, state: dict[str, Any]) -> Callable[[], None]:
        """Checks that a state dict, nested or flat, can be filled; returns what fills it, in place.

        Raises:
            CheckpointError: something is missing, or of another shape or kind.
        """
        planner = _DataOnlyPlanner()
        planner.set_up_planner(state, self.metadata)
        for name, value in planner.state_dict.items():
            self._check(name, value)
        self.asked |= planner.state_dict.keys()
        plan = planner.create_local_plan()
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)

        def fill() -> None:
            if self._manifest is not None:
                self._check_contents(self._manifest, plan)
            try:
                reader.read_data(planner.finish_plan(plan), planner).wait()
            except Exception as error:  # of torch's unpickler for weights, of its zip reader, of the file
                raise CheckpointError(f"{self.folder} cannot be read, or was altered: {_line(error)}") from error

        return fill

    def _check_contents(self, manifest: Manifest, plan: LoadPlan) -> None:
        """CheckpointError where what a plan reads was altered; each piece of a file is looked through once."""
        places = [self.metadata.storage_data[item.storage_index] for item in plan.items]
        pieces = {piece for place in places for piece in pieces_of(place.relative_path, place.offset, place.length)}
        manifest.check_pieces(self.folder, sorted(pieces - self._checked))
        self._checked |= pieces

    def _check(self, name: str, value: Any) -> None:
        entry = self.metadata.state_dict_metadata.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no {name!r}{nearest(name, self._like(name))}")
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor == isinstance(entry, BytesStorageMetadata):
            kinds = ("a tensor", "none") if is_tensor else ("no tensor", "one")
            raise CheckpointError(f"{name} is {kinds[0]}, {self.folder} has {kinds[1]} under this name")
        if is_tensor and isinstance(entry, TensorStorageMetadata) and value.shape != entry.size:
            raise CheckpointError(
                f"{name} has shape {list(value.shape)}, {self.folder} has {list(entry.size)}; build the model with the "
                "configuration that was saved"
            )
        if is_tensor and isinstance(entry, TensorStorageMetadata) and not converts(entry.properties.dtype, value.dtype):
            raise CheckpointError(
                f"{name} is {value.dtype}, {self.folder} has it as {entry.properties.dtype}, and only floats of 16 to "
                "64 bits are converted; build the model with the types that were saved"
            )

    def _like(self, name: str) -> list[str]:
        """Names that begin alike: of thousands none would help."""
        part = name.partition(".")[0]
        found = [other for other in self.names if other.partition(".")[0] == part]
        return found if len(found) <= 2000 else found[:5]


class _DataOnlyPlanner(DefaultLoadPlanner):
    """torch's, but for its ``load_bytes``, which unpickles."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        *outer, last = self.mappings[read_item.dest_index.fqn]
        place: Any = self.original_state_dict
        for key in outer:
            place = place[key]
        place[last] = torch.load(value, weights_only=True)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__
