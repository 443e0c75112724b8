"""Safetensors file: written without the library. 8 bytes with the header's length, JSON, and the tensors' bytes.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.torch_compat import bytes_of

_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_GROUP = 2**28

Entries = Mapping[str, tuple[torch.Size, torch.dtype]]


def write_safetensors(path: Path, entries: Entries, read: Callable[[dict[str, Tensor]], None]) -> None:
    """Writes tensors by name, reading some at a time; complete or not at all.

    ``read``: fills tensors of these shapes and types, by name.

    Raises:
        CheckpointError: the file is there already, or a type is none of the format's.
    """
    if path.exists():
        raise CheckpointError(f"{path} is there already; remove it, or name another folder")
    odd = [f"{name} ({dtype})" for name, (_, dtype) in entries.items() if dtype not in _KINDS]
    if odd:
        raise CheckpointError(f"safetensors has no type for {odd[0]}; export the others with --prefix")
    names = sorted(entries, key=lambda name: (-entries[name][1].itemsize, name))  # so that each is aligned
    beside = path.with_name(f"{path.name}.partial")
    with beside.open("wb") as file:
        file.write(_header(entries, names))
        for group in _groups(entries, names):
            tensors = {name: torch.empty(entries[name][0], dtype=entries[name][1]) for name in group}
            read(tensors)
            for tensor in tensors.values():
                file.write(bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def _header(entries: Entries, names: list[str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        shape, dtype = entries[name]
        end = start + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _KINDS[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _groups(entries: Entries, names: list[str]) -> list[list[str]]:
    """The names, some at a time: as many as are small together."""
    groups: list[list[str]] = []
    size = _GROUP
    for name in names:
        shape, dtype = entries[name]
        size += shape.numel() * dtype.itemsize
        if size > _GROUP:
            groups.append([])
            size = shape.numel() * dtype.itemsize
        groups[-1].append(name)
    return groups
