"""Weight files: each kind of checkpoint on disk, and how a tensor is copied out of it.

A file is mapped into memory while a piece of a tensor is copied, and no longer: a process that reads a part of a
checkpoint holds that part, and a piece.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.parameters.saving.manifest import MANIFEST, Manifest
from fxpipe.small_file import read_small

PIECE = 8 * 2**20
"""Bytes that are read at a time; a single row of more than that is read at once."""

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SUFFIXES = (".safetensors", *_TORCH_SUFFIXES)
_MOST_INDEX = 256 * 2**20  # bytes; that of a trillion parameters has some ten million


class WeightFile(Protocol):
    """A file of tensors, or a folder of torch.distributed.checkpoint."""

    @property
    def path(self) -> Path: ...

    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of each tensor in it."""

    def read_into(self, name: str, target: Tensor) -> None:
        """Copies a tensor into one of the same shape."""


def sources(path: Path) -> Iterator[WeightFile]:
    """The files that a checkpoint is made of; CheckpointError where it is none."""
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}")
    if path.is_dir():
        yield from _sources_in(path)
    elif path.name.endswith(".index.json"):
        yield from _indexed(path)
    elif path.suffix == ".safetensors":
        yield _Safetensors(path)
    else:
        yield _TorchFile(path)


def _sources_in(folder: Path) -> Iterable[WeightFile]:
    """What a folder holds, the first of: an index, what fxpipe.save wrote, safetensors files, what torch.distributed
    saved, one torch file."""
    for name in _INDICES:
        if (folder / name).exists():
            return _indexed(folder / name)
    for saved in (folder, folder / "latest"):
        if (saved / MANIFEST).exists():
            return [_SavedRun(saved)]
    if tensors := sorted(folder.glob("*.safetensors")):
        return map(_Safetensors, tensors)
    if (folder / ".metadata").exists():
        return [_Distributed(folder)]
    files = sorted(file for file in folder.iterdir() if file.suffix in _TORCH_SUFFIXES)
    if len(files) != 1:
        kinds = ", ".join(("*.safetensors", *_INDICES, ".metadata"))
        found = f"{len(files)} torch files" if files else "none of them, and no torch file"
        raise CheckpointError(f"{folder} holds {found}, so that it is no checkpoint ({kinds}); name the file to read")
    return map(_TorchFile, files)


def _indexed(index: Path) -> Iterator[WeightFile]:
    """The files that a Hugging Face index names, which are in its folder or below it."""
    try:
        names = set(json.loads(read_small(index, _MOST_INDEX))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of weights: it has no weight_map, tensor → file") from error
    odd = next((name for name in names if not _is_weight_file(name)), None)
    if odd is not None:
        kinds = ", ".join(f"*{suffix}" for suffix in _SUFFIXES)
        raise CheckpointError(f"{index} names {odd!r:.500}, which is no file of weights in its folder; write {kinds}")
    for name in sorted(names):
        if not os.path.isfile(index.parent / name):  # False, too, for a name that no file can bear
            raise CheckpointError(f"{index} names {name}, which is not in {index.parent}; fetch all of its files")
        yield from sources(index.parent / name)


def _is_weight_file(name: Any) -> bool:
    """Whether an index may name this: a relative path that does not leave the index's folder, to a file of weights."""
    if not isinstance(name, str):
        return False
    path = PurePath(name)
    return path.suffix in _SUFFIXES and not path.is_absolute() and ".." not in path.parts


# --- how each kind is read


@dataclass(frozen=True)
class _Safetensors:
    path: Path

    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        with self._open() as file:
            return {name: self._entry(file, name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)

    def read_into(self, name: str, target: Tensor) -> None:
        for rows in _pieces(target):
            with self._open() as file:
                if rows is None:
                    target.copy_(file.get_tensor(name))
                else:
                    target[rows].copy_(file.get_slice(name)[rows])

    @staticmethod
    def _entry(file: Any, name: str) -> tuple[torch.Size, torch.dtype]:
        part = file.get_slice(name)
        shape = torch.Size(part.get_shape())
        return shape, (part[0:0] if shape else file.get_tensor(name)).dtype

    def _open(self) -> Any:
        try:
            from safetensors import SafetensorError, safe_open  # an extra, only for who has such files
        except ImportError as error:
            raise CheckpointError(f"{self.path} needs the safetensors library: pip install safetensors") from error
        try:
            return safe_open(self.path, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{self.path} is no safetensors file, or a part of one: {error}") from error


@dataclass(frozen=True)
class _TorchFile:
    path: Path

    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        state = self._load()
        return {name: (value.shape, value.dtype) for name, value in state.items() if isinstance(value, Tensor)}

    def read_into(self, name: str, target: Tensor) -> None:
        for rows in _pieces(target):
            tensor = self._load()[name]
            if rows is None:
                target.copy_(tensor)
            else:
                target[rows].copy_(tensor[rows])
            del tensor  # before the file is mapped anew

    def _load(self) -> Mapping[str, Any]:
        try:
            state = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{self.path} cannot be read as a state dict: {first} Write it with "
                "torch.save(model.state_dict(), path)"
            ) from error
        if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
            entries = f", with the entries {', '.join(map(repr, state))}" if isinstance(state, Mapping) else ""
            raise CheckpointError(
                f"{self.path} holds a {type(state).__name__}{entries}, and no tensors by name; save the state dict "
                "alone: torch.save(model.state_dict(), path)"
            )
        return state


class _Distributed:
    """What torch.distributed.checkpoint has saved: read by this process alone, whatever world it is in, and as data."""

    def __init__(self, path: Path) -> None:
        from fxpipe.parameters.saving.reader import FolderReader  # it imports torch.distributed.checkpoint

        self.path, self._reader = path, FolderReader(path)

    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return self._reader.tensors

    def read_into(self, name: str, target: Tensor) -> None:
        self._reader.plan({name: target.detach()})()


class _SavedRun:
    """The model of a checkpoint that ``fxpipe.save`` has written: its own names, and of the optimizer the masters of
    what is kept rounded. Of the files' contents what is read is compared with the manifest."""

    def __init__(self, path: Path) -> None:
        from fxpipe.parameters.saving.model_values import ModelValues
        from fxpipe.parameters.saving.reader import FolderReader

        manifest = Manifest.read(path)
        manifest.check_sizes(path)
        self.path, self._values = path, ModelValues(FolderReader(path, manifest), manifest.ties)

    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return self._values.entries()

    def read_into(self, name: str, target: Tensor) -> None:
        self._values.plan({name: target})()


def _pieces(tensor: Tensor) -> Iterator[slice | None]:
    """The rows of a tensor, ``PIECE`` bytes or one row at a time; None for a number."""
    if not tensor.dim():
        yield None
        return
    in_row = max(1, tensor[:1].numel() * tensor.element_size())
    step = max(1, PIECE // in_row)
    for start in range(0, len(tensor), step):
        yield slice(start, start + step)
