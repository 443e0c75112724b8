"""Writer: this rank's part of a checkpoint, by torch's own writer of files, with the crc32 of what goes to the disk.

Plans and results travel between ranks as lists of plain values, for ``json``: nothing of a peer is unpickled.
"""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from fxpipe.errors import CheckpointError
from fxpipe.parameters.checkpoint.manifest import PIECE, Written
from fxpipe.parameters.checkpoint.plain import to_plain
from fxpipe.torch_compat import storage_info

Message = list[Any]
"""Plain values, for ``json``."""


class RankPlan:
    """What a rank has of a state dict, and, once it knows all ranks' plans, what of it this rank writes.

    Raises:
        CheckpointError: a value that is no tensor is not plain data.
    """

    def __init__(self, state: dict[str, Any], rank: int) -> None:
        self._rank = rank
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(state, is_coordinator=rank == 0)
        for name, value in self._planner.state_dict.items():
            if not isinstance(value, Tensor):
                to_plain(value, name)
        self._plan = self._planner.create_local_plan()

    def message(self) -> Message:
        """For the other ranks."""
        return [[_item_message(item) for item in self._plan.items], list(self._plan.planner_data.items())]

    def settle(self, messages: Sequence[Message]) -> RankShare:
        """This rank's share. What several ranks have is written by one of them, each about as many bytes."""
        local = [
            SavePlan([_item_of(one) for one in items], planner_data={name: tuple(path) for name, path in paths})
            for items, paths in messages
        ]
        plans, metadata = self._planner.create_global_plan(local)
        return RankShare(self._rank, plans, metadata, self._planner)


class RankShare:
    """What one rank writes. ``size``: the bytes of tensors that all ranks write together."""

    def __init__(self, rank: int, plans: list[SavePlan], metadata: Metadata, planner: SavePlanner) -> None:
        self._rank, self._metadata = rank, metadata
        self._plans, self._planner = plans, planner
        self.size = sum(_bytes_of(item) for plan in plans for item in plan.items)

    def keep_copies(self) -> None:
        """Copies what this rank writes to memory of the host, so that training may go on meanwhile."""
        self._planner = _Copies(self._plans[self._rank], self._planner)

    def write(self, folder: Path) -> Message:
        """Writes it, and waits until it is on the disk; for ``finish``."""
        writer = _writer(folder, self._rank)
        if isinstance(self._planner, _Copies):
            writer.per_thread_copy_ahead = 0  # nothing is on a GPU any more
        plan = writer.prepare_global_plan(self._plans)[self._rank]
        with _without_torchs_crc32():
            done = writer.write_data(plan, self._planner)
            done.wait()
        results = [_result_message(result) for result in done.value()]
        return [results, writer.fs.written]

    def finish(self, folder: Path, messages: Sequence[Message]) -> dict[str, Written]:
        """Writes torch's ``.metadata`` once all ranks have written; the files that there are."""
        writer = _writer(folder, self._rank)
        writer.finish(self._metadata, [[_result_of(one) for one in results] for results, _ in messages])
        files = {name: Written(size, tuple(crcs)) for _, sent in messages for name, (size, crcs) in sent.items()}
        return {**files, **{name.removesuffix(".tmp"): Written(*one) for name, one in writer.fs.written.items()}}


@contextlib.contextmanager
def _without_torchs_crc32() -> Iterator[None]:
    """torch counts one of each tensor before it writes it; the manifest covers it, and is counted beside."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _writer(folder: Path, rank: int) -> _SummingWriter:
    writer = _SummingWriter(folder)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    return writer


class _SummingWriter(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=True)
        self.fs: _Checksums = _Checksums()


class _Checksums(FileSystem):
    """Files whose bytes and crc32 are known once they are written: ``written``, by name."""

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
        self._file.flush()  # torch asks when it waits for the disk, not always having flushed
        return self._file.fileno()


class _Copies(SavePlanner):
    """A planner of what is there already, as copies."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._data = {item.index: _copy(planner.resolve_data(item)) for item in plan.items}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._data.pop(write_item.index)  # each is asked for once, and its memory is needed no more

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    create_local_plan = create_global_plan = finish_plan = set_up_planner  # type: ignore[assignment]


def _copy(data: Tensor | io.BytesIO) -> Tensor | io.BytesIO:
    return data.detach().to("cpu", copy=True) if isinstance(data, Tensor) else data


# --- what ranks send each other


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _item_message(item: WriteItem) -> Message:
    data = item.tensor_data
    sent = None
    if data is not None:
        kind = str(data.properties.dtype).removeprefix("torch.")
        sent = [list(data.chunk.offsets), list(data.chunk.sizes), kind, list(data.size)]
    return [*_index_message(item.index), item.type.name, sent]


def _index_message(index: MetadataIndex) -> Message:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _index_of(name: str, offset: Sequence[int] | None, index: int | None) -> MetadataIndex:
    return MetadataIndex(name, None if offset is None else torch.Size(offset), index)


def _item_of(message: Message) -> WriteItem:
    name, offset, index, kind, sent = message
    data = None
    if sent is not None:
        offsets, sizes, dtype, size = sent
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=_dtype_of(dtype)), torch.Size(size))
    return WriteItem(_index_of(name, offset, index), WriteItemType[kind], tensor_data=data)


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"another rank says that a tensor is of type {name[:40]!r}")
    return dtype


def _result_message(result: WriteResult) -> Message:
    place = result.storage_data
    return [*_index_message(result.index), place.relative_path, place.offset, place.length]


def _result_of(message: Message) -> WriteResult:
    name, offset, index, file, start, length = message
    return WriteResult(_index_of(name, offset, index), length, storage_info(file, start, length))
