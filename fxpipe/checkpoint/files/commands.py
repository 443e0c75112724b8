"""Commands: ``python -m fxpipe checkpoint show|verify|export``, which need a checkpoint's folder and no model.

``export`` writes the safetensors file without the library: 8 bytes with the length of the header in bytes, the header
as JSON, and the bytes of the tensors.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from fxpipe.checkpoint.files import run_folder
from fxpipe.checkpoint.files.manifest import Manifest
from fxpipe.checkpoint.files.reader import MODEL, FolderReader, ModelValues
from fxpipe.device import bytes_of
from fxpipe.errors import CheckpointError

_SHOWN = 40


def checkpoints_in(path: Path) -> list[Path]:
    """``path`` itself if it is a checkpoint, or a run's checkpoints, newest first; CheckpointError without any."""
    if run_folder.is_checkpoint(path):
        return [path]
    folders = run_folder.checkpoints(path)
    if not folders:
        raise CheckpointError(f"{path} has no checkpoint of fxpipe.save")
    return folders


def show(path: Path) -> str:
    """For a run, a line per checkpoint; for a checkpoint, its files and tensors."""
    folders = checkpoints_in(path)
    if folders == [path]:
        return _of_one(path)
    best = run_folder.bests(path)[:1]
    return tabulate([_line(folder, " (best)" * (folder in best)) for folder in folders], _HEADERS)


_HEADERS = ["checkpoint", "step", "saved at", "ranks", "bytes", "files"]


def _line(folder: Path, mark: str) -> list[str]:
    try:
        manifest = Manifest.read(folder, sizes=True)
    except CheckpointError as error:
        return [folder.name, "", "", "", "", str(error)[:200]]
    size = sum(written.size for written in manifest.files.values())
    name, files = folder.name + mark, str(len(manifest.files))
    return [name, str(manifest.step), manifest.saved_at, _axes(manifest), f"{size:,}", files]


def _axes(manifest: Manifest) -> str:
    return " × ".join(f"{name} {size}" for name, size in manifest.axes)


def _of_one(folder: Path) -> str:
    manifest, reader = Manifest.read(folder, sizes=True), FolderReader(folder)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    head = f"step {manifest.step}, saved at {manifest.saved_at} by run {manifest.run}: {_axes(manifest)}; {versions}"
    model = {name: entry for name, entry in reader.tensors.items() if name.startswith(MODEL)}
    numbers = sum(shape.numel() for shape, _ in model.values())
    rows = [
        (name.removeprefix(MODEL), str(list(shape)), str(dtype).removeprefix("torch."))
        for name, (shape, dtype) in sorted(model.items())[:_SHOWN]
    ]
    more = f"\n… and {len(model) - _SHOWN} more" if len(model) > _SHOWN else ""
    written = sorted(manifest.files.items())[:_SHOWN]
    files = tabulate([(name, f"{size:,} bytes") for name, (size, _) in written], disable_numparse=True)
    table = tabulate(rows, ["tensor", "shape", "type"], disable_numparse=True)
    return f"{head}\n{files}\nmodel: {len(model)} tensors, {numbers:,} numbers\n{table}{more}"


def verify(path: Path) -> str:
    """Reads all bytes of each checkpoint, and returns a line per checkpoint.

    Raises:
        CheckpointError: a file of a checkpoint was cut or altered; the message has the lines of all checkpoints.
    """
    lines, damaged = [], False
    for folder in checkpoints_in(path):
        try:
            manifest = Manifest.read(folder, sizes=True)
            manifest.check_contents(folder)
            FolderReader(folder)
            lines.append(f"{folder.name}: whole, step {manifest.step}, {len(manifest.files)} files")
        except CheckpointError as error:
            damaged = True
            lines.append(f"{folder.name}: {error}")
    if damaged:
        raise CheckpointError("\n".join(lines))
    return "\n".join(lines)


def export(path: Path, out: Path, config: Path | None, prefix: str) -> str:
    """Writes the plain model's parameters and buffers as ``out/model.safetensors``; for a run, the newest checkpoint's.

    A parameter that ``precision`` keeps rounded is written with its master's values. With ``config``, the model's
    ``config.json``, ``from_pretrained`` can load the folder.

    Raises:
        CheckpointError: the checkpoint is damaged, no name begins with ``prefix``, or the file exists already.
    """
    folder = checkpoints_in(path)[0]
    manifest = Manifest.read(folder, sizes=True)
    manifest.check_contents(folder)
    values = ModelValues(FolderReader(folder), manifest.ties)
    entries = {name.removeprefix(prefix): entry for name, entry in values.tensors.items() if name.startswith(prefix)}
    if not entries:
        raise CheckpointError(f"{folder} has no tensor of the model whose name begins with {prefix!r}")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "model.safetensors"
    write_safetensors(file, entries, lambda name, tensor: values.plan({prefix + name: tensor})())
    if config is not None:
        json.loads(config.read_bytes())  # a syntax error is reported here
        shutil.copyfile(config, out / "config.json")
    return f"{file}: {len(entries)} tensors of step {manifest.step}"


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

Entries = Mapping[str, tuple[torch.Size, torch.dtype]]


def write_safetensors(path: Path, entries: Entries, read: Callable[[str, Tensor], None]) -> None:
    """Writes a safetensors file, complete or not at all; reads one tensor at a time. ``read``: fills a named tensor.

    Raises:
        CheckpointError: the file exists already, or the format lacks a tensor's type.
    """
    if path.exists():
        raise CheckpointError(f"{path} is there already; remove it, or name another folder")
    odd = [f"{name} ({dtype})" for name, (_, dtype) in entries.items() if dtype not in _KINDS]
    if odd:
        raise CheckpointError(f"safetensors has no type for {odd[0]}; export the others with --prefix")
    names = sorted(entries, key=lambda name: (-entries[name][1].itemsize, name))  # aligns each tensor
    # The file is written under another name and renamed, so that a file with the final name is complete.
    beside = path.with_name(f"{path.name}.partial")
    with beside.open("wb") as file:
        file.write(_header(entries, names))
        for name in names:
            shape, dtype = entries[name]
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            read(name, tensor)
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
    text += b" " * (-len(text) % 8)  # in the format, tensors begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text
