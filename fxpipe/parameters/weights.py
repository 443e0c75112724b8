"""Weights: a checkpoint on disk, of which only what is asked for is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError, nearest
from fxpipe.kinds import is_text, shown
from fxpipe.parameters.weight_files import WeightFile, sources
from fxpipe.precision import converts

_SHOWN = 5


@dataclass(frozen=True)
class Entry:
    """Where a tensor is, and what it is. ``key``: its name there."""

    source: WeightFile
    key: str
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint by name, each read when it is asked for."""

    path: Path
    entries: Mapping[str, Entry]

    @staticmethod
    def open(path: str | os.PathLike[str], rename: Callable[[str], str] | None = None) -> Weights:
        """A checkpoint; nothing of it is read but which tensors it has.

        Args:
            path: a ``.safetensors`` file, a file that ``torch.save`` made of a state dict, a Hugging Face index
                (``*.index.json``), or a folder that holds any of these, or what torch.distributed.checkpoint has saved.
            rename: the checkpoint's name of a tensor → the model's. ``lambda name: name.removeprefix("model.")``

        Raises:
            CheckpointError: there is no such file, it is of no known kind, or two tensors are given one name.
        """
        if not isinstance(path, (str, os.PathLike)) or path == "":  # which Path takes for the working folder
            hint = "; load_state_dict() takes a state dict" if isinstance(path, Mapping) else ""
            raise CheckpointError(f"the checkpoint is {shown(path)}; it is the path of a file or folder{hint}")
        if rename is not None and not callable(rename):
            raise CheckpointError(f"rename is {shown(rename)}; it is a function (name) -> name")
        path = Path(path)
        entries: dict[str, Entry] = {}
        for source in sources(path):
            for key, (shape, dtype) in source.entries().items():
                name = key if rename is None else rename(key)
                if not is_text(name):
                    raise CheckpointError(f"rename gives {shown(name)} for {key!r}; it gives a name")
                if name in entries:
                    _raise_twice(name, entries[name], source, key)
                entries[name] = Entry(source, key, shape, dtype)
        if not entries:
            raise CheckpointError(f"{path} holds no tensors by name; save a state dict: torch.save(model.state_dict())")
        return Weights(path, entries)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, as ``rename`` has made them."""
        return tuple(self.entries)

    def shape(self, name: str) -> torch.Size:
        """A tensor's shape, of which nothing is read. CheckpointError where there is none of this name."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is stored in. CheckpointError where there is none of this name."""
        return self._entry(name).dtype

    def read(self, name: str) -> Tensor:
        """A tensor of the checkpoint, in memory of its own."""
        entry = self._entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        entry.source.read_into(entry.key, tensor)
        return tensor

    def read_into(self, name: str, target: Tensor) -> None:
        """Copies a tensor of the checkpoint into ``target``, which has its shape; of any floating type, on any device.

        Raises:
            CheckpointError: the shapes differ, or the numbers mean something else in the type of ``target``.
        """
        self.check_fits(name, name, target)
        entry = self._entry(name)
        with torch.no_grad():
            entry.source.read_into(entry.key, target)

    def check_fits(self, name: str, bearer: str, target: Tensor) -> None:
        """CheckpointError unless the tensor ``name`` can be read into ``target``, which the model calls ``bearer``."""
        if not isinstance(target, Tensor):
            raise CheckpointError(f"{bearer} is {shown(target)}; it is a tensor to read into")
        entry = self._entry(name)
        if entry.shape != target.shape:
            raise CheckpointError(
                f"{bearer} has shape {list(target.shape)}, {self.path} has {list(entry.shape)}; build the model with "
                "the configuration that the checkpoint was saved with"
            )
        if not converts(entry.dtype, target.dtype):
            raise CheckpointError(
                f"{bearer} is {target.dtype}, {self.path} has it as {entry.dtype}, and only floats of 16 to 64 bits "
                "are converted, for others may need scales; save the checkpoint with the model's types"
            )

    def _entry(self, name: str) -> Entry:
        if not is_text(name) or name not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {shown(name)}{likeliest(name, self.names)}")
        return self.entries[name]


def likeliest(name: str, known: Sequence[str]) -> str:
    """The end of a message about a ``name`` that is in no checkpoint: the nearest there is, or the first few."""
    end = nearest(name, known)
    if len(known) <= _SHOWN or end.startswith("; did"):
        return end
    return f"{nearest(name, known[:_SHOWN])} and {len(known) - _SHOWN} more"


def _raise_twice(name: str, first: Entry, source: WeightFile, key: str) -> None:
    here, there = f"{first.key!r} in {first.source.path}", f"{key!r} in {source.path}"
    raise CheckpointError(f"two tensors of the checkpoint are called {name!r}: {here} and {there}")
