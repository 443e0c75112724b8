"""Reader: tensors and plain values out of a folder of torch.distributed.checkpoint, by this process alone, as data.

Whatever world it is in, no process asks another, and nothing that was read is run. What is stored
beside tensors is read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from fxpipe.checkpoint.files.manifest import Manifest, Piece, natural, pieces_of
from fxpipe.checkpoint.files.pieces import in_parts
from fxpipe.errors import CheckpointError, nearest
from fxpipe.parameters.dtensors import check_fits, local
from fxpipe.precision import converts, merged
from fxpipe.small_file import Budget, read_small
from fxpipe.torch_compat import METADATA_CLASSES, METADATA_FUNCTIONS, checked_zip, storage_info


class FolderReader:
    """A folder that is read from. ``names``: of tensors and plain values in it. ``tree``: these, nested as the values
    were, by their places where these were lists. ``tensors``: shape and type of each tensor, by name. ``asked``: the
    names that its plans fill. ``manifest``: the crc32 of each piece that is read is compared with it; None where that
    has been done."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder, self._manifest = folder, manifest
        self._checked: set[Piece] = set()
        if manifest is not None:
            size = manifest.files[METADATA].size if METADATA in manifest.files else 1
            manifest.check_pieces(folder, pieces_of(METADATA, 0, size))
        self.metadata: Metadata = read_metadata(folder)
        self.asked: set[str] = set()
        entries = self.metadata.state_dict_metadata
        self.names = list(entries)
        self.tree: dict[Any, Any] = self.metadata.planner_data
        self.tensors = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def plan(self, state: dict[str, Any]) -> Callable[[], None]:
        """Checks that a state dict, nested or flat, can be filled; returns what fills it, in place.

        Raises:
            CheckpointError: something is missing, or of another shape or kind.
        """
        # All is checked here, and filled later: a checkpoint that does not fit has changed nothing.
        planner = _DataOnlyPlanner()
        planner.set_up_planner(in_parts(state, ""), self.metadata)
        planner.original_state_dict = state  # values that are no tensors are put there
        for name, value in planner.state_dict.items():
            self._check(name, value)
        self.asked |= planner.state_dict.keys()
        plan = planner.create_local_plan()
        reader: Any = FileSystemReader(self.folder)
        reader.transforms = SimpleNamespace(transform_load_stream=lambda item, descriptors, part: checked_zip(part))
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)

        def fill() -> None:
            if self._manifest is not None:  # each piece of a file is looked through once
                stored = [self.metadata.storage_data[item.storage_index] for item in plan.items]
                read = {piece for at in stored for piece in pieces_of(at.relative_path, at.offset, at.length)}
                self._manifest.check_pieces(self.folder, sorted(read - self._checked))
                self._checked |= read
            try:
                reader.read_data(planner.finish_plan(plan), planner).wait()
            except Exception as error:  # of torch's unpickler for weights, of its zip reader, of the file
                why = str(error).partition("\n")[0][:300] or type(error).__name__
                raise CheckpointError(f"{self.folder} cannot be read, or was altered: {why}") from error

        return fill

    def _check(self, name: str, value: Any) -> None:
        entry = self.metadata.state_dict_metadata.get(name)
        if entry is None:
            beside = [other for other in self.names if other.partition(".")[0] == name.partition(".")[0]]
            alike = "; a tensor subclass is read as it was saved, on the same pieces" if ".<" in name else ""
            raise CheckpointError(f"{self.folder} has no {name!r}{alike}{nearest(name, beside)}")
        is_tensor = isinstance(value, Tensor)
        if is_tensor == isinstance(entry, BytesStorageMetadata):
            kinds = ("a tensor", "none") if is_tensor else ("no tensor", "one")
            raise CheckpointError(f"{name} is {kinds[0]}, {self.folder} has {kinds[1]} under this name")
        if is_tensor:
            check_fits(name, value, self.folder, *self.tensors[name])


class _DataOnlyPlanner(DefaultLoadPlanner):
    """torch's, but for its ``load_bytes``, which unpickles."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        *outer, last = self.mappings[read_item.dest_index.fqn]
        container: Any = self.original_state_dict
        for key in outer:
            container = container[own_key(container, key)]
        container[own_key(container, last)] = torch.load(value, weights_only=True)


def own_key(container: Any, key: Any) -> Any:
    """The key of a dict that torch has written as text."""
    return {str(own): own for own in container}.get(key, key) if isinstance(container, Mapping) else key


MODEL = "model."
"""What names of the model begin with in a checkpoint."""
_OPTIMIZER, _STATE, _MASTER = "optim", ".state.", ".master"


class ModelValues:
    """The model's tensors in a checkpoint, as exact as it has them.

    A parameter that ``precision`` keeps rounded has its master among the optimizer's state,
    ``optim.state.NAME.master``. Where the master rounds to what the model has, it is the value; elsewhere somebody has
    written the parameter since.

    ``ties``: names of the model → the first name of the same parameter. ``leave``: masters that an optimizer reads.

    ``masters``: names of the model → that of the master in the checkpoint, where there is one that is more exact.
    ``tensors``: shape and type of each tensor of the model, by its name there.
    """

    def __init__(self, reader: FolderReader, ties: Mapping[str, str], leave: Collection[str] = ()) -> None:
        self._reader, tensors = reader, reader.tensors
        self._own = {name.removeprefix(MODEL): entry for name, entry in tensors.items() if name.startswith(MODEL)}
        masters: dict[str, str] = {}
        for name in tensors:
            # "optim.state.NAME.master", or "optim.one.state.NAME.master" of the optimizer "one" of several
            optimizer, _, parameter = name.removesuffix(_MASTER).partition(_STATE)
            is_master = name.endswith(_MASTER) and optimizer.partition(".")[0] == _OPTIMIZER
            if is_master and name not in leave:
                masters[parameter] = name
        firsts = {name: masters.get(ties.get(name, name), "") for name in self._own}
        self.masters = {name: master for name, master in firsts.items() if master and self._is_finer(name, master)}
        self.tensors = {name: tensors[self.masters.get(name, MODEL + name)] for name in firsts}

    def _is_finer(self, name: str, master: str) -> bool:
        (shape, dtype), (its_shape, its_dtype) = self._own[name], self._reader.tensors[master]
        return shape == its_shape and converts(its_dtype, dtype) and its_dtype.itemsize > dtype.itemsize

    def plan(self, into: Mapping[str, Tensor]) -> Callable[[], None]:
        """Checks that tensors can be filled, by the model's names; returns what fills them."""
        # Where there is a master, both it and the rounded value are read, and merged: two tensors for one.
        plain: dict[str, Tensor] = {MODEL + name: tensor for name, tensor in into.items()}
        finer: list[tuple[Tensor, Tensor, Tensor]] = []
        for name, tensor in into.items():
            master = self.masters.get(name)
            if master is None:
                continue
            tensor = tensor.detach()
            rounded = torch.empty_like(tensor, dtype=self._own[name][1])
            finest = self._reader.tensors[master][1]
            exact = tensor if tensor.dtype == finest else torch.empty_like(tensor, dtype=finest)
            plain |= {MODEL + name: rounded, master: plain.get(master, exact)}
            finer.append((tensor, rounded, plain[master]))
        fill = self._reader.plan(plain)

        def run() -> None:
            fill()
            for tensor, rounded, exact in finer:
                local(tensor).copy_(merged(local(exact), local(rounded), rounded.dtype))

        return run


# --- torch's .metadata, as data

METADATA = ".metadata"
_MOST = 2**30  # bytes of what is read
_DEPTH = 100  # of containers in each other
_NUMBERS = 4  # of shapes and lists, for each byte: a pickle names twice what two tensors have

_OPERATIONS = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE BINUNICODE
    STACK_GLOBAL EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT NEWOBJ BUILD MEMOIZE
    BINGET LONG_BINGET""".split()
"""What torch's pickles are made of, beside those of ``_Unpickler``: protocols 4 and 5, which count memoised values."""


def read_metadata(folder: Path) -> Metadata:
    """What a folder holds, and where. Nothing is run, and nothing is read outside of the folder.

    Raises:
        CheckpointError: there is none, it is damaged, names what torch does not write, or files that are too short.
    """
    path = folder / METADATA
    try:
        pickled = read_small(path, _MOST, os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _metadata(_Unpickler(pickled).load(), folder, Budget(_NUMBERS * len(pickled), "numbers"))
    except Exception as error:  # an altered pickle raises anything
        why = str(error)[:200] or type(error).__name__
        text = f"{path} is not what torch.distributed.checkpoint writes, or was altered: {why}"
        raise CheckpointError(text) from error


class _Record:
    """Stands in for a class: keeps the state that its instance is given."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Python's own, of these operations alone. None copies, compares or hashes what another one has made: a few bytes
    could ask for that again and again, and each of them for any amount of memory, as LONG_BINPUT does."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        # Made anew: whatever a pickle does to them is gone with them.
        # Classes become records, and functions hand on their argument: a pickle names them, and runs nothing of them.
        self._known: dict[tuple[str, str], Any] = {key: type(key[1], (_Record,), {}) for key in METADATA_CLASSES}
        self._known |= dict.fromkeys(METADATA_FUNCTIONS, itemgetter(0))
        self._known |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":
            return bool  # where it was saved: nothing asks for it
        if (module, name) not in self._known:
            raise ValueError(f"it names {module}.{name}")
        return self._known[module, name]

    def refuse(self: Any) -> None:
        raise ValueError("it has an operation that torch does not write")

    def call(self: Any) -> None:
        self.append(self.stack.pop(-2)(_the(tuple, self.stack.pop())))

    def set_items(self: Any, items: Any = None) -> None:
        pairs = iter(items or self.pop_mark())
        for key, value in zip(pairs, pairs, strict=True):  # a tuple of tuples of tuples would be hashed for hours
            _the(dict, self.stack[-1])[key if isinstance(key, _Record) else _the(str, key)] = value

    dispatch: ClassVar[dict[int, Any]] = dict.fromkeys(pickle._Unpickler.dispatch, refuse)
    dispatch |= {opcode: pickle._Unpickler.dispatch[opcode] for (opcode,) in map(partial(getattr, pickle), _OPERATIONS)}
    dispatch |= {pickle.REDUCE[0]: call, pickle.SETITEMS[0]: set_items}
    dispatch[pickle.SETITEM[0]] = lambda self: self.set_items([self.stack.pop(-2), self.stack.pop()])


# --- checking what was read


def _metadata(read: Any, folder: Path, numbers: Budget) -> Metadata:
    top = _fields(read, "Metadata")
    # Every name, offset and length is compared with the files that are there, before torch's reader follows them. What
    # is no regular file is none of them: a link leads out of the folder, and for a pipe's other end one would wait.
    lengths = {file.name: file.stat().st_size for file in os.scandir(folder) if file.is_file(follow_symlinks=False)}
    stored = {_index(key, numbers): _place(value, lengths) for key, value in _the(dict, top["storage_data"]).items()}
    entries = {
        _the(str, name): _entry(value, numbers) for name, value in _the(dict, top["state_dict_metadata"]).items()
    }
    disk = Budget(sum(lengths.values()), "bytes")
    for name, entry in entries.items():
        _check_stored(name, entry, stored, disk)
    tree: dict[Any, Any] = {}
    for name, path in _the(dict, top.get("planner_data") or {}).items():
        numbers.spend(len(_the(tuple, path)))
        *outer, last = (key if type(key) is int else _the(str, key) for key in path)
        within = tree
        for key in outer[:_DEPTH]:
            if isinstance(within.get(key), str):  # another rank has a value where this one has several
                del within[key]
            within = within.setdefault(key, {})
        within.setdefault(last, _the(str, name))
    return Metadata(entries, tree, stored)


def _the(kind: type, value: Any) -> Any:
    """The value; ValueError unless it is of this very type."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} should")
    return value


def _fields(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"a {type(record).__name__} stands where a {name} should")
    fields: dict[str, Any] = _the(dict, {} if record.state is None else record.state)
    return fields


def _sizes(value: Any, numbers: Budget) -> torch.Size:
    numbers.spend(len(_the(tuple, value)))
    return torch.Size(map(natural, value))


def _volume(sizes: torch.Size) -> int:
    """How many elements a shape has; ValueError where they could not be on a disk."""
    return reduce(lambda volume, size: natural(volume * size), sizes, 1)


def _index(key: Any, numbers: Budget) -> MetadataIndex:
    fields = _fields(key, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    offset = None if offset is None else _sizes(offset, numbers)
    return MetadataIndex(_the(str, fields["fqn"]), offset, None if index is None else natural(index))


def _place(read: Any, lengths: Mapping[str, int]) -> Any:
    fields = _fields(read, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError("its tensors were written through extensions")
    file, offset, length = _the(str, fields["relative_path"]), natural(fields["offset"]), natural(fields["length"])
    if file not in lengths:
        raise ValueError(f"it names {file[:80]!r}, which is no file of its folder (a link is none)")
    if offset + length > lengths[file]:
        raise ValueError(f"{file} has {lengths[file]} bytes, and {offset + length} are expected")
    return storage_info(file, offset, length)


def _entry(read: Any, numbers: Budget) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(read).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(read, "TensorStorageMetadata")
    numbers.spend(len(_the(list, fields["chunks"])))
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=_the(torch.dtype, fields["properties"].state[0])),
        _sizes(fields["size"], numbers),
        [ChunkStorageMetadata(*(_sizes(chunk[name], numbers) for name in ("offsets", "sizes"))) for chunk in chunks],
    )


def _check_stored(
    name: str, entry: TensorStorageMetadata | BytesStorageMetadata, stored: Mapping[MetadataIndex, Any], disk: Budget
) -> None:
    """ValueError unless each part of a tensor is inside of it and stored, with bytes enough, and together they fill it.
    So no shape is larger than what is on disk, of which each part counts as often as it is named."""
    if isinstance(entry, BytesStorageMetadata):
        if MetadataIndex(name) not in stored:
            raise ValueError(f"{name[:80]} is stored nowhere")
        disk.spend(stored[MetadataIndex(name)].length)
        return
    for chunk in entry.chunks:
        where = stored.get(MetadataIndex(name, chunk.offsets))
        needed = _volume(chunk.sizes) * entry.properties.dtype.itemsize
        ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
        inside = len(chunk.sizes) == len(entry.size) and all(map(int.__le__, ends, entry.size))
        if where is None or where.length < needed or not inside:
            raise ValueError(f"a part of {name[:80]} is stored nowhere, or does not fit")
        disk.spend(needed)
    # Chunks that are inside and have the tensor's volume together fill it, but for overlaps, which torch never writes.
    volume = sum(map(_volume, (chunk.sizes for chunk in entry.chunks)))
    if volume != _volume(entry.size):
        raise ValueError(f"parts of {name[:80]} have {volume} elements of {_volume(entry.size)}")
