"""What comes from outside, changed at random: a value or an FxpipeError comes out, and nothing else, in bounded memory.

Files that were valid are cut, doubled and mixed with words of their own kind. A new kind of file is a row of ``KINDS``:
what writes a valid one, the words that may stand in it, and what reads it.

    python -m tests.whole.test_fuzzed 10000 [KIND ...]  # so many of each kind; the suite runs 200, FXPIPE_ALL=1 as many
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
import sys
import tempfile
import tracemalloc
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fxpipe.checkpoint.files.manifest import MANIFEST, Manifest, Written
from fxpipe.checkpoint.files.plain import to_plain
from fxpipe.checkpoint.files.reader import METADATA, FolderReader
from fxpipe.errors import MOST_TOLD, CheckpointError, FxpipeError, ScheduleError
from fxpipe.parameters.weights import Weights
from fxpipe.run.run_state import PlainParts, plain_parts, tensors_for, value_of
from fxpipe.schedules import build
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, WORKED, chain
from tests.thinned import ALL

safetensors = pytest.importorskip("safetensors.torch")

TIMES = 10_000 if ALL else 200
pytestmark = [
    pytest.mark.timeout(3000 if ALL else 300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
MEMORY = 64 * 2**20
"""Bytes of Python's that one reading may take; a file here has some hundred."""


class Kind(NamedTuple):
    """A kind of file. ``write(draw, folder)`` → its path; ``words`` that may come into it; what ``read(path)`` does."""

    write: Callable[[random.Random, Path], Path]
    words: Sequence[bytes]
    read: Callable[[Path], object]


def changed(draw: random.Random, content: bytes, words: Sequence[bytes]) -> bytes:
    """The content with some parts taken out, doubled, moved, or overwritten by a word or by noise."""
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        first, last = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        last = draw.choice((first, min(first + 3, last), last))
        part = content[first:last]
        content = content[:first] + draw.choice((b"", part * 2, draw.choice(words), draw.randbytes(2))) + content[last:]
        if draw.random() < 0.2:
            place = draw.randrange(len(content) + 1)
            content = content[:place] + part + content[place:]
    return content


# --- schedules ---


def write_schedule(draw: random.Random, folder: Path) -> Path:
    edges, stages = draw.choice(((chain(1), 1), (chain(3), 3), (chain(4), 4), (WORKED, 5)))
    family = draw.choice([name for name in FAMILIES if name != "interleaved_1f1b"])
    schedule = build(family, edges, draw.randint(1, 4), None, stages)
    schedule.to_csv(folder / "table.csv", communication=draw.random() < 0.5)
    return folder / "table.csv"


def read_schedule(path: Path) -> None:
    for edges in (None, [(0, 1)]):
        with contextlib.suppress(ScheduleError):
            schedule = Schedule.from_csv(path, edges)
            assert len(str(schedule)) < 10**6
            schedule.verify()
            schedule.simulate()


TABLE_WORDS = (
    *b', " \r ; \x00 \xff F SEND_F RECV_B 0F0 1B1 999999999 0F999999999 3W0 2I2 0UNSHARD -1F0'.split(b" "),
    *(b"\n", b" ", b"(0F0;1B0)OVERLAP_F_B", "\u0663F0".encode(), b"1" * 200),
)

# --- checkpoints ---

STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1, dtype=torch.int8), "empty": torch.zeros(0, 2)}


def write_index(draw: random.Random, folder: Path) -> Path:
    for name in ("one.safetensors", "two.safetensors"):
        if not (folder / name).exists():
            safetensors.save_file({f"{name}.{key}": tensor for key, tensor in STATE.items()}, folder / name)
    where = {"one.safetensors.a": "one.safetensors", "two.safetensors.a": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder / "model.safetensors.index.json"


def write_safetensors(draw: random.Random, folder: Path) -> Path:
    safetensors.save_file(STATE, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def write_torch_file(draw: random.Random, folder: Path) -> Path:
    torch.save(STATE, folder / "weights.pt")
    return folder / "weights.pt"


def read_weights(path: Path) -> None:
    weights = Weights.open(path)
    for name in weights.names:
        if weights.shape(name).numel() < 1000:
            weights.read(name)


JSON_WORDS = (
    *b'{ } [ ] {} [] " : , . .. / \\ null true 1e999 -1 0 \\u0000 \\ud800 \xff weight_map .bin'.split(),
    *b"../one.safetensors /etc/passwd model.safetensors.index.json".split(),
    *(b"[" * 2000, b"a" * 300),
)
HEADER_WORDS = (
    *(*JSON_WORDS, *b"F32 BOOL F8_E4M3 F4 shape dtype data_offsets __metadata__".split()),
    *b"18446744073709551615 9223372036854775808 4294967296".split(),
    *(struct.pack("<Q", 2**63), struct.pack("<Q", 2**27)),
)

# --- what fxpipe.save writes ---

FILES = {"__0_0.distcp": Written(700, (1,)), ".metadata": Written(80, (2,))}
SAVED = Manifest(812, 3, "2026-01-01", "run", (("pipe", 2), ("data", 2)), {"torch": "2.13"}, FILES, {"b": "a"})


def again(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """A file of the folder as it was made, which is done once."""
    if not (folder / "whole").exists():
        make(folder)
        (folder / name).rename(folder / "whole")
    (folder / name).write_bytes((folder / "whole").read_bytes())
    return folder / name


def write_manifest(draw: random.Random, folder: Path) -> Path:
    return again(folder, MANIFEST, SAVED.write)


def read_manifest(path: Path) -> None:
    """Whose checksum knows every change."""
    assert Manifest.read(path.parent) == SAVED  # only spaces


def read_signed_manifest(path: Path) -> None:
    """Whose checksum was made anew, by who has changed it."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        told = json.loads(path.read_bytes())
        told["crc32"] = zlib.crc32(json.dumps(told["checkpoint"], sort_keys=True).encode())
        path.write_text(json.dumps(told))
    found = Manifest.read(path.parent)
    assert len(str(found)) < 10**5
    for check in (found.check_sizes, found.check_contents):
        with contextlib.suppress(CheckpointError):
            check(path.parent)


def write_metadata(draw: random.Random, folder: Path) -> Path:
    saved = {"model": STATE, "optim": {"lr": 0.1}}
    return again(folder, METADATA, lambda folder: dcp.save(saved, checkpoint_id=folder, no_dist=True))


def read_folder(path: Path) -> None:
    reader = FolderReader(path.parent)
    assert sum(shape.numel() * dtype.itemsize for shape, dtype in reader.tensors.values()) < 10**6


def write_plain_parts(draw: random.Random, folder: Path) -> Path:
    extra = {"best": 0.5, 7: (b"a", None), "list": [1, {"deep": Counter(a=2)}], "at": torch.tensor(1.0)}
    digests, trees, _ = plain_parts({"extra": extra, "random": b"state", "run": {"number": 3}})
    (folder / "state.json").write_text(json.dumps({"ranks": [digests, digests], "trees": trees}))
    return folder / "state.json"


def read_plain_parts(path: Path) -> None:
    known = {f"plain.{name}": (torch.Size([]), torch.float32) for name in to_plain(torch.tensor(1.0), "")[1]}
    for tree in PlainParts.read(path).trees.values():
        value_of(tree, tensors_for(tree, known))


SAVED_WORDS = (
    *(*JSON_WORDS, *b"crc32 checkpoint files axes ties format step fxpipe.json ranks trees YQ==".split()),
    *b'"extra" "dict" "tuple" "counter" "tensor" "bytes" 4611686018427387904 16777217'.split(),
    *(b"1" * 30, b"9" * 5000, b"[" * 400 + b"]" * 400),
)
PICKLE_WORDS = (
    *(b"cos\nsystem\n", b"c__builtin__\neval\n", b"I01\n", b"\x95" + b"\xff" * 8, b"\x8c\x04Size"),
    *b"R b . ( t ] } N torch float64 __0_0.distcp ../__0_0.distcp \x85 \x93 \x81 \x88 \x80\x02 \x8a\xff".split(),
    *b"B\xff\xff\xff\x7f r\xff\xff\xff\x7f j\xff\xff\xff\x7f".split(),
)

KINDS = {
    "manifests": Kind(write_manifest, SAVED_WORDS, read_manifest),
    "signed manifests": Kind(write_manifest, SAVED_WORDS, read_signed_manifest),
    "metadata": Kind(write_metadata, PICKLE_WORDS, read_folder),
    "plain data of ranks": Kind(write_plain_parts, SAVED_WORDS, read_plain_parts),
    "schedules": Kind(write_schedule, TABLE_WORDS, read_schedule),
    "indices of weights": Kind(write_index, JSON_WORDS, read_weights),
    "safetensors": Kind(write_safetensors, HEADER_WORDS, read_weights),
    "torch files": Kind(write_torch_file, (b"PK", b"\x80\x02", b"c", b"R", b".", b"\xff\xff\xff\x7f"), read_weights),
}


def read_changed(kind: str, folder: Path, times: int) -> int:
    """How many changed files were refused; that no message of theirs is long, and nothing else is raised."""
    write, words, read = KINDS[kind]
    refused = longest = 0
    for seed in range(times):
        draw = random.Random(seed)
        path = write(draw, folder)
        path.write_bytes(changed(draw, path.read_bytes(), words))
        try:
            read(path)
        except FxpipeError as error:
            refused += 1
            longest = max(longest, len(str(error)))
        except BaseException as error:
            error.add_note(f"seed {seed}: {path.read_bytes()!r:.2000}")
            raise
    assert refused > times // 20 or kind == "schedules"  # which catches its own, of one reading out of two
    assert longest < MOST_TOLD + 1
    return refused


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    read_changed(kind, tmp_path, TIMES)


@pytest.mark.parametrize(
    "content",
    [
        b"0F0,0F999999999,0B999999999",
        b"0F0,0B0\n" * 500,
        b"," * 200_000 + b"0F0",
        b"0" * 100_000 + b"F0",
    ],
    ids=["a gap", "one table many times", "cells", "many digits"],
)
def test_a_hostile_schedule_takes_no_memory(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(content)
    tracemalloc.start()
    try:
        read_schedule(tmp_path / "table.csv")
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def header(tensors: dict[str, Any], length: int | None = None) -> bytes:
    told = json.dumps(tensors).encode()
    return struct.pack("<Q", len(told) if length is None else length) + told


@pytest.mark.parametrize(
    "content",
    [
        header({}, 2**64 - 1),
        header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]}}),
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"1234",
        header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}) + b"1234",
    ],
    ids=["length", "beyond its end", "overflow", "negative", "overlap"],
)
def test_a_hostile_header_of_safetensors_takes_no_memory(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read_weights(tmp_path / "a.safetensors")


def main(times: int, kinds: Sequence[str]) -> None:
    """Prints how many of each kind were refused; the first that raises anything else ends it."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    for kind in kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{times} {kind}: {read_changed(kind, Path(folder), times)} refused")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
