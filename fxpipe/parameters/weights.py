"""Weights: a checkpoint on disk, of which only the requested tensors are read.

Each kind of file has a class. ``entries()`` returns name → shape and type of each tensor in the file; ``read_into(name,
target)`` copies a tensor into ``target``, which has the same shape.
"""

from __future__ import annotations

import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from fxpipe.checkpoint.files.manifest import MANIFEST, Manifest
from fxpipe.errors import CheckpointError, nearest
from fxpipe.small_file import read_small
from fxpipe.tensors.dtensors import check_fits
from fxpipe.torch_compat.saved_files import checked_zip
from fxpipe.validation import is_text, shown

if TYPE_CHECKING:
    from fxpipe.checkpoint.files.reader import FolderReader, ModelValues

PIECE = 8 * 2**20
"""Bytes that a read copies at a time; a single row of more bytes is read at once."""

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SUFFIXES = (".safetensors", *_TORCH_SUFFIXES)
_MOST_INDEX = 256 * 2**20  # bytes; the index of a trillion parameters has about ten million


WeightFile: TypeAlias = "_Safetensors | _TorchFile | _Folder"


def sources(path: Path) -> Iterator[WeightFile]:
    """The files that a checkpoint consists of; CheckpointError if ``path`` is no checkpoint."""
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
    """The first kind found: an index, fxpipe.save's manifest, safetensors files, DCP's .metadata, or one torch file."""
    # The order matters: a folder with an index also holds the index's files, one with a manifest torch's .metadata.
    for name in _INDICES:
        if (folder / name).exists():
            return _indexed(folder / name)
    for saved in (folder, folder / "latest"):
        if (saved / MANIFEST).exists():
            return [_Folder(saved, is_run=True)]
    if tensors := sorted(folder.glob("*.safetensors")):
        return map(_Safetensors, tensors)
    if (folder / ".metadata").exists():
        return [_Folder(folder, is_run=False)]
    files = sorted(file for file in folder.iterdir() if file.suffix in _TORCH_SUFFIXES)
    if len(files) != 1:
        kinds = ", ".join(("*.safetensors", *_INDICES, ".metadata"))
        content = f"{len(files)} torch files" if files else "none of them, and no torch file"
        raise CheckpointError(f"{folder} holds {content}, so that it is no checkpoint ({kinds}); name the file to read")
    return map(_TorchFile, files)


def _indexed(index: Path) -> Iterator[WeightFile]:
    """The files that a Hugging Face index names, in the index's folder or in its subfolders."""
    try:
        names = set(json.loads(read_small(index, _MOST_INDEX))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of weights: it has no weight_map, tensor → file") from error
    for odd in [name for name in names if not _is_weight_file(name)]:
        kinds = ", ".join(f"*{suffix}" for suffix in _SUFFIXES)
        raise CheckpointError(f"{index} names {odd!r:.500}, which is no file of weights in its folder; write {kinds}")
    for name in sorted(names):
        if not os.path.isfile(index.parent / name):  # False, too, for an invalid file name
            raise CheckpointError(f"{index} names {name}, which is not in {index.parent}; fetch all of its files")
        yield from sources(index.parent / name)


def _is_weight_file(name: Any) -> bool:
    """Whether an index may hold this name: a relative path to a file of weights, inside the index's folder."""
    if not isinstance(name, str):
        return False
    path = PurePath(name)
    return path.suffix in _SUFFIXES and not path.is_absolute() and ".." not in path.parts


# --- a class for each kind of file


@dataclass(frozen=True)
class _Safetensors:
    path: Path

    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        with self._open() as file:
            return {name: self._entry(file, name) for name in file.keys()}  # noqa: SIM118  (file is no mapping)

    def read_into(self, name: str, target: Tensor) -> None:
        def read(rows: slice | None) -> Tensor:
            with self._open() as file:
                part: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
                return part

        _copy_by_rows(target, read)

    @staticmethod
    def _entry(file: Any, name: str) -> tuple[torch.Size, torch.dtype]:
        part = file.get_slice(name)
        shape = torch.Size(part.get_shape())
        return shape, (part[0:0] if shape else file.get_tensor(name)).dtype

    def _open(self) -> Any:
        try:
            from safetensors import SafetensorError, safe_open  # an optional dependency
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
        # The file is mapped to memory: only each tensor's shape and type are read.
        state = self._load()
        return {name: (value.shape, value.dtype) for name, value in state.items() if isinstance(value, Tensor)}

    def read_into(self, name: str, target: Tensor) -> None:
        _copy_by_rows(target, lambda rows: self._load()[name][... if rows is None else rows])

    def _load(self) -> Mapping[str, Any]:
        try:
            if zipfile.is_zipfile(self.path):  # torch.load reports other kinds of files
                with self.path.open("rb") as file:
                    checked_zip(file)
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


@dataclass(frozen=True)
class _Folder:
    """A folder of torch.distributed.checkpoint. This process alone reads the folder, as data, in a world of any size.

    Of a checkpoint of ``fxpipe.save`` the model's tensors are read, under the model's names; a parameter that was kept
    rounded takes the optimizer's master value. Each piece of a file that is read is compared with the manifest.
    """

    path: Path
    is_run: bool

    @functools.cached_property
    def _values(self) -> ModelValues | FolderReader:
        # these import torch.distributed.checkpoint
        from fxpipe.checkpoint.files.reader import FolderReader, ModelValues

        if not self.is_run:
            return FolderReader(self.path)
        manifest = Manifest.read(self.path, sizes=True)
        return ModelValues(FolderReader(self.path, manifest), manifest.ties)

    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return self._values.tensors

    def read_into(self, name: str, target: Tensor) -> None:
        self._values.plan({name: target.detach()})()


def _copy_by_rows(target: Tensor, read: Callable[[slice | None], Tensor]) -> None:
    """Fills a tensor by ``PIECE`` bytes, or one row, at a time. ``read``: returns the rows, or with None the scalar."""
    if not target.dim():
        target.copy_(read(None))
        return
    in_row = max(1, target[:1].numel() * target.element_size())
    step = max(1, PIECE // in_row)
    # Each read opens the file anew: pages of a mapping stay in memory until the mapping is closed.
    for start in range(0, len(target), step):
        rows = slice(start, start + step)
        target[rows].copy_(read(rows))


@dataclass(frozen=True)
class Entry:
    """A tensor's file, shape and type. ``key``: the tensor's name in the file."""

    source: WeightFile
    key: str
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint by name; a tensor's values are read on request."""

    path: Path
    entries: Mapping[str, Entry]

    @staticmethod
    def open(path: str | os.PathLike[str], rename: Callable[[str], str] | None = None) -> Weights:
        """Opens a checkpoint; reads the names, shapes and types of its tensors, and no values.

        Args:
            path: a ``.safetensors`` file, a file that ``torch.save`` made of a state dict, a Hugging Face index
                (``*.index.json``), a folder that holds any of these, or a folder of torch.distributed.checkpoint.
            rename: the checkpoint's name of a tensor → the model's. ``lambda name: name.removeprefix("model.")``

        Raises:
            CheckpointError: the file does not exist or is of no known kind, or two tensors get the same name.
        """
        if not isinstance(path, (str, os.PathLike)) or path == "":  # Path("") is the working folder
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
                    first = entries[name]
                    here, there = f"{first.key!r} in {first.source.path}", f"{key!r} in {source.path}"
                    raise CheckpointError(f"two tensors of the checkpoint are called {name!r}: {here} and {there}")
                entries[name] = Entry(source, key, shape, dtype)
        return Weights(path, entries)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, after ``rename``."""
        return tuple(self.entries)

    def shape(self, name: str) -> torch.Size:
        """A tensor's shape, without a read of its values. CheckpointError if no tensor has this name."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is stored in. CheckpointError if no tensor has this name."""
        return self._entry(name).dtype

    def read(self, name: str) -> Tensor:
        """Returns a tensor of the checkpoint, in new memory."""
        entry = self._entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        entry.source.read_into(entry.key, tensor)
        return tensor

    def read_into(self, name: str, target: Tensor) -> None:
        """Copies a tensor of the checkpoint into ``target``, of the same shape, any floating type and any device.

        Raises:
            CheckpointError: the shapes differ, or the stored type does not convert to the type of ``target``.
        """
        self.check_fits(name, name, target)
        entry = self._entry(name)
        with torch.no_grad():
            entry.source.read_into(entry.key, target)

    def check_fits(self, name: str, bearer: str, target: Tensor) -> None:
        """Raises CheckpointError unless tensor ``name`` fits ``target``; ``bearer`` is the name in the model."""
        entry = self._entry(name)
        check_fits(bearer, target, self.path, entry.shape, entry.dtype)

    def _entry(self, name: str) -> Entry:
        if not is_text(name) or name not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {shown(name)}{nearest(name, self.names)}")
        return self.entries[name]
