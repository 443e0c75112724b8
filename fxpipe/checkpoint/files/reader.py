"""Reader: reads tensors and plain values from a folder of torch.distributed.checkpoint, as data.

Each process reads alone, in a world of any size, and runs no code from the folder. Values other than tensors are read
by ``torch.load(weights_only=True)``.
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
from fxpipe.errors import CheckpointError, nearest
from fxpipe.precision import converts, merged
from fxpipe.progress import progress
from fxpipe.small_file import Budget, read_small
from fxpipe.tensors.dtensors import check_fits, local
from fxpipe.tensors.pieces import in_parts
from fxpipe.torch_compat.saved_files import METADATA_CLASSES, METADATA_FUNCTIONS, checked_zip, storage_info


class FolderReader:
    """A checkpoint's folder. ``names``: the names of its tensors and plain values. ``tree``: the same names, nested as
    the values were, with an index as the key for a list. ``tensors``: name → shape and type. ``requested``: the names
    that the reader's plans fill. ``manifest``: each piece that is read must have the manifest's crc32; None: no check,
    if the caller has compared or the folder has no manifest."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder, self._manifest = folder, manifest
        self._checked: set[Piece] = set()
        if manifest is not None:
            size = manifest.files[METADATA].size if METADATA in manifest.files else 1
            manifest.check_pieces(folder, pieces_of(METADATA, 0, size))
        self.metadata: Metadata = read_metadata(folder)
        self.requested: set[str] = set()
        entries = self.metadata.state_dict_metadata
        self.names = list(entries)
        self.tree: dict[Any, Any] = self.metadata.planner_data
        self.tensors = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def plan(self, state: dict[str, Any]) -> Callable[[], None]:
        """Checks that the folder can fill a state dict, nested or flat; returns a function that fills it in place.

        Raises:
            CheckpointError: the folder lacks a value, or has a value of another shape or kind.
        """
        # The checks come first, the writes later: a checkpoint that does not fit changes no value.
        planner = _DataOnlyPlanner()
        planner.set_up_planner(in_parts(state, ""), self.metadata)
        planner.original_state_dict = state  # load_bytes writes values other than tensors to this dict
        for name, value in planner.state_dict.items():
            self._check(name, value)
        self.requested |= planner.state_dict.keys()
        plan = planner.create_local_plan()
        reader: Any = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)

        def fill() -> None:
            if self._manifest is not None:  # checks each piece of a file once
                stored = [self.metadata.storage_data[item.storage_index] for item in plan.items]
                read = {piece for at in stored for piece in pieces_of(at.relative_path, at.offset, at.length)}
                self._manifest.check_pieces(self.folder, sorted(read - self._checked))
                self._checked |= read
            sizes = {item.storage_index: self.metadata.storage_data[item.storage_index].length for item in plan.items}

            def opened(item: ReadItem, descriptors: Any, part: Any) -> Any:
                advance(sizes.pop(item.storage_index, 0))
                return checked_zip(part)

            reader.transforms = SimpleNamespace(transform_load_stream=opened)
            try:
                with progress("loading", sum(sizes.values()), "bytes") as advance:
                    reader.read_data(planner.finish_plan(plan), planner).wait()
            except Exception as error:  # from torch's unpickler, its zip reader or the file
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
    """torch's load planner with a ``load_bytes`` that runs no pickled code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        *outer, last = self.mappings[read_item.dest_index.fqn]
        container: Any = self.original_state_dict
        for key in outer:
            container = container[own_key(container, key)]
        container[own_key(container, last)] = torch.load(value, weights_only=True)


def own_key(container: Any, key: Any) -> Any:
    """The key of ``container`` whose text is ``key``: torch writes keys as text. Without such a key, ``key`` itself."""
    return {str(own): own for own in container}.get(key, key) if isinstance(container, Mapping) else key


MODEL = "model."
"""The prefix of the model's names in a checkpoint."""
_OPTIMIZER, _STATE, _MASTER = "optim", ".state.", ".master"


class ModelValues:
    """The model's tensors in a checkpoint, in the highest precision that the checkpoint has.

    A parameter that ``precision`` keeps rounded has a master in the optimizer's state, ``optim.state.NAME.master``. An
    element takes the master's value if the master rounds to the parameter's saved value; otherwise the parameter was
    written after the optimizer's step, and its saved value counts.

    ``ties``: a parameter's name → its first name. ``leave``: masters to ignore, since an optimizer reads these.

    ``masters``: a model name → the name of its master in the checkpoint, if the master's type has more bits.
    ``tensors``: a model name → shape and type of the tensor that is read.
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
        """Checks that tensors, by the model's names, can be filled; returns a function that fills them."""
        # For a parameter with a master, reads the master and the rounded value, and merges the two tensors.
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
_MOST = 2**30  # bytes of the file
_DEPTH = 100  # nested containers
_NUMBERS = 4  # elements of shapes and lists per byte of pickle: a pickle refers again to a value that tensors share

_OPERATIONS = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE BINUNICODE
    STACK_GLOBAL EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT NEWOBJ BUILD MEMOIZE
    BINGET LONG_BINGET""".split()
"""The opcodes of torch's pickles in protocols 4 and 5, which count memoised values; ``_Unpickler`` adds its own."""


def read_metadata(folder: Path) -> Metadata:
    """Reads a folder's ``.metadata``, without running code of the file or reading outside of the folder.

    Raises:
        CheckpointError: the file is missing or damaged, has content that torch does not write, or names short files.
    """
    path = folder / METADATA
    try:
        pickled = read_small(path, _MOST, os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _metadata(_Unpickler(pickled).load(), folder, Budget(_NUMBERS * len(pickled), "numbers"))
    except Exception as error:  # an altered pickle raises errors of any type
        why = str(error)[:200] or type(error).__name__
        text = f"{path} is not what torch.distributed.checkpoint writes, or was altered: {why}"
        raise CheckpointError(text) from error


class _Record:
    """Replaces a pickled class: an instance keeps the state that the pickle sets."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Python's unpickler, limited to the opcodes in ``dispatch``. No opcode copies, compares or hashes a container that
    another opcode has made: a few bytes could repeat such work, or, as LONG_BINPUT does, request any memory size."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        # New classes for each pickle: its changes to them do not outlive the unpickler.
        # Classes become records, and functions return their argument: a pickle names both and runs neither.
        self._known: dict[tuple[str, str], Any] = {key: type(key[1], (_Record,), {}) for key in METADATA_CLASSES}
        self._known |= dict.fromkeys(METADATA_FUNCTIONS, itemgetter(0))
        self._known |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":
            return bool  # the path of the save, which is not used
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


# --- checks of the values that were read


def _metadata(read: Any, folder: Path, numbers: Budget) -> Metadata:
    top = _fields(read, "Metadata")
    # Compares every name, offset and length with the folder's files before torch's reader uses them. Only regular files
    # count: a link may lead out of the folder, and a read from a pipe could block.
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
            if isinstance(within.get(key), str):  # ranks differ: one has a value here, another a container
                del within[key]
            within = within.setdefault(key, {})
        within.setdefault(last, _the(str, name))
    return Metadata(entries, tree, stored)


def _the(kind: type, value: Any) -> Any:
    """Returns the value; ValueError unless ``type(value)`` is ``kind``."""
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
    """The number of elements of a shape; ValueError if no disk could hold as many."""
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
    """Raises ValueError unless each chunk of a tensor is inside the tensor and stored with enough bytes, and all chunks
    together fill the tensor. ``disk``: the bytes on disk; each chunk spends its bytes, so no shape exceeds the disk."""
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
    # Chunks inside the tensor whose volumes add up to its volume fill it, unless they overlap; torch never writes that.
    volume = sum(map(_volume, (chunk.sizes for chunk in entry.chunks)))
    if volume != _volume(entry.size):
        raise ValueError(f"parts of {name[:80]} have {volume} elements of {_volume(entry.size)}")
