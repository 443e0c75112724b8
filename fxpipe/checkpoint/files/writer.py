"""Writer: writes this rank's part of a checkpoint with torch's FileSystemWriter, and computes the files' crc32.

Ranks exchange plans and results as lists of plain values, for ``json``: a rank never unpickles data of a peer.
"""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from fxpipe.checkpoint.files.manifest import PIECE, Written
from fxpipe.checkpoint.files.plain import from_plain, to_plain
from fxpipe.device import to_host
from fxpipe.progress import progress
from fxpipe.tensors.pieces import in_parts
from fxpipe.torch_compat.saved_files import storage_info

Message = list[Any]
"""Plain values, for ``json``."""


class RankPlan:
    """A rank's part of a state dict and, after ``settle``, the share that this rank writes.

    Raises:
        CheckpointError: a value is neither plain data nor a tensor that can be read again.
    """

    def __init__(self, state: dict[str, Any], rank: int) -> None:
        self._rank = rank
        self._copies: Callable[[], dict[MetadataIndex, Any]] | None = None
        self._planner = _WritePlanner()
        self._planner.set_up_planner(in_parts(state, ""), is_coordinator=rank == 0)
        for name, value in self._planner.state_dict.items():
            if not isinstance(value, Tensor):  # turns subclasses of dict into dicts
                self._planner.state_dict[name] = from_plain(*to_plain(value, name))
        self._plan = self._planner.create_local_plan()

    def message(self) -> Message:
        """This rank's plan, for ``settle`` on the other ranks."""
        return [[_item_message(item) for item in self._plan.items], list(self._plan.planner_data.items())]

    def settle(self, messages: Sequence[Message]) -> None:
        """Computes this rank's share. One rank writes a value that several have; shares have about equal bytes."""
        local = [
            SavePlan([_item_of(*item) for item in items], planner_data={name: tuple(path) for name, path in paths})
            for items, paths in messages
        ]
        self._plans, self._metadata = self._planner.create_global_plan(local)

    def keep_copies(self) -> None:
        """Copies the share to host memory, so that training can go on during the write.

        A device copies asynchronously, before any work that is queued later; ``write`` waits for the copies.
        """
        there = {item.index: self._planner.resolve_data(item) for item in self._plans[self._rank].items}
        tensors = {index: data for index, data in there.items() if isinstance(data, Tensor)}
        names, arriving = list(tensors), to_host(list(tensors.values()))
        others = {index: data for index, data in there.items() if index not in tensors}
        self._copies = lambda: {**others, **dict(zip(names, arriving(), strict=True))}

    def write(self, folder: Path) -> Message:
        """Writes this rank's share and waits until its files are on the disk; returns the message for ``finish``."""
        if self._copies is not None:
            self._planner.copies, self._copies = self._copies(), None  # the only reference
        # torch's zip writer need not checksum each tensor, too: the manifest's checksums cover all bytes of the file.
        (writer, written), torchs_crc32 = self._writer(folder), get_crc32_options()
        if self._planner.copies is not None:
            writer.per_thread_copy_ahead = 0  # all data is in host memory
        plan = writer.prepare_global_plan(self._plans)[self._rank]
        set_crc32_options(False)
        total = sum(map(_bytes_of, plan.items))
        # A thread that writes while training goes on shows nothing between the user's own lines.
        is_shown = self._planner.copies is None
        try:
            with progress("saving", total, "bytes") if is_shown else nullcontext(None) as self._planner.advance:
                done = writer.write_data(plan, self._planner)
                done.wait()
        finally:
            set_crc32_options(torchs_crc32)
        return [[_result_message(result) for result in done.value()], written]

    def finish(self, folder: Path, messages: Sequence[Message]) -> dict[str, Written]:
        """Writes torch's ``.metadata`` once all ranks have written; returns all files by name."""
        writer, written = self._writer(folder)
        writer.finish(self._metadata, [[_result_of(*result) for result in results] for results, _ in messages])
        files = {name: Written(size, tuple(crcs)) for _, sent in messages for name, (size, crcs) in sent.items()}
        return {**files, **{name.removesuffix(".tmp"): file for name, file in written.items()}}

    def _writer(self, folder: Path) -> tuple[FileSystemWriter, dict[str, Written]]:
        """A FileSystemWriter, and name → size and crc32s of the files that it has written."""
        writer, checksums = FileSystemWriter(folder, overwrite=True), _Checksums()
        writer.fs = checksums
        writer.set_up_storage_writer(self._rank == 0, rank=self._rank, use_collectives=True)
        return writer, checksums.written


class _WritePlanner(DefaultSavePlanner):
    """torch's save planner, able to write copies. ``copies``: copies not written yet; None: writes the originals."""

    copies: dict[MetadataIndex, Any] | None = None
    advance: Callable[[float], None] | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if self.advance is not None:
            self.advance(_bytes_of(write_item))
        if self.copies is None:
            return super().resolve_data(write_item)
        data: Tensor | io.BytesIO = self.copies.pop(write_item.index)  # torch asks once: frees the memory
        return data


def _bytes_of(item: WriteItem) -> int:
    """The bytes of the tensor that an item writes; 0 for other values."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


class _Checksums(FileSystem):
    """A file system that records each written file. ``written``: name → size and crc32s."""

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = _Summed(stream)
            yield summed
        self.written[Path(path).name] = summed.written


class _Summed:
    """A file that is written from its beginning to its end, with the crc32 of each piece."""

    def __init__(self, file: io.IOBase) -> None:
        self._file, self._size, self._crc32s = file, 0, list[int]()

    @property
    def written(self) -> Written:
        return Written(self._size, tuple(self._crc32s))

    def write(self, data: Any) -> int:
        self._file.write(data)
        # Each checksum covers PIECE bytes of the file, wherever the writes begin and end.
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            if self._size % PIECE == 0:
                self._crc32s.append(0)
            part = left[: PIECE - self._size % PIECE]
            self._crc32s[-1] = zlib.crc32(part, self._crc32s[-1])
            self._size += len(part)
            left = left[len(part) :]
        return count

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def fileno(self) -> int:
        self._file.flush()  # torch calls fileno() for fsync, sometimes without a flush
        return self._file.fileno()


# --- messages between ranks


def _item_message(item: WriteItem) -> Message:
    data = item.tensor_data
    message = [*astuple(item.index), item.type.name]
    if data is not None:
        dtype = str(data.properties.dtype).removeprefix("torch.")
        message += [data.chunk.offsets, data.chunk.sizes, dtype, data.size]
    return message


def _item_of(name: str, offset: Any, index: Any, kind: str, *tensor: Any) -> WriteItem:
    data = None
    if tensor:
        offsets, sizes, dtype, size = tensor
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, dtype)), torch.Size(size))
    return WriteItem(MetadataIndex(name, offset, index), WriteItemType[kind], tensor_data=data)


def _result_message(result: WriteResult) -> Message:
    stored = result.storage_data
    return [*astuple(result.index), stored.relative_path, stored.offset, stored.length]


def _result_of(name: str, offset: Any, index: Any, file: str, start: int, length: int) -> WriteResult:
    return WriteResult(MetadataIndex(name, offset, index), length, storage_info(file, start, length))
