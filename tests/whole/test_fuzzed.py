"""What comes from outside, changed at random: a value or an FxpipeError comes out, and nothing else, in bounded memory.

Files that were valid are cut, doubled and mixed with words of their own kind. A new kind of file is a row of ``KINDS``:
what writes a valid one, the words that may stand in it, and what reads it.

    python -m tests.whole.test_fuzzed 10000             # so many of each kind; the suite runs 200, FXPIPE_ALL=1 as many
    python -m tests.whole.test_fuzzed 10000 manifests   # of one kind
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import struct
import sys
import tempfile
import time
import tracemalloc
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fxpipe.__main__ import main
from fxpipe.distributed.topology import Topology
from fxpipe.errors import MOST_TOLD, CheckpointError, FxpipeError, ScheduleError, TopologyError
from fxpipe.parameters.checkpoint.manifest import MANIFEST, Manifest, Written
from fxpipe.parameters.checkpoint.plain import tensors_in, to_plain
from fxpipe.parameters.checkpoint.reader import METADATA, FolderReader
from fxpipe.parameters.weights import Weights
from fxpipe.run.checkpoint.run_state import PlainParts, plain_parts, tensors_for, value_of
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
    *(b",", b"\n", b'"', b"\r", b";", b" ", b"\x00", b"\xff", b"F", b"SEND_F", b"RECV_B", b"0F0", b"1B1", b"999999999"),
    *(b"0F999999999", b"3W0", b"2I2", b"(0F0;1B0)OVERLAP_F_B", b"0UNSHARD", "\u0663F0".encode(), b"-1F0", b"1" * 200),
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
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b"null",
        b"true",
        b"1e999",
        b"-1",
        b"0",
        b"\\u0000",
        b"\\ud800",
        b"\xff",
    ),
    *(b"..", b"/", b"../one.safetensors", b"/etc/passwd", b"model.safetensors.index.json", b"weight_map", b"[" * 2000),
    *(b"a" * 300, b".", b"\\", b".bin", b"[]", b"{}"),
)
HEADER_WORDS = (
    *(*JSON_WORDS, b"F32", b"BOOL", b"F8_E4M3", b"F4", b"shape", b"dtype", b"data_offsets", b"__metadata__"),
    *(
        b"18446744073709551615",
        b"9223372036854775808",
        b"4294967296",
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 2**27),
    ),
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
    known = {
        f"plain.{name}": (torch.Size([]), torch.float32) for name in tensors_in(to_plain(torch.tensor(1.0), "")[0])
    }
    for tree in PlainParts.read(path).trees.values():
        value_of(tree, tensors_for(tree, known))


SAVED_WORDS = (
    *(*JSON_WORDS, b"crc32", b"checkpoint", b"files", b"axes", b"ties", b"format", b"step", b"fxpipe.json"),
    *(b"ranks", b"trees", b'"extra"', b'"dict"', b'"tuple"', b'"counter"', b'"tensor"', b'"bytes"', b"YQ=="),
    *(b"4611686018427387904", b"1" * 30, b"16777217", b"9" * 5000, b"[" * 400 + b"]" * 400),
)
PICKLE_WORDS = (
    *(b"cos\nsystem\n", b"c__builtin__\neval\n", b"R", b"\x85", b"\x93", b"\x81", b"b", b".", b"\x80\x02", b"(", b"t"),
    *(b"\x8a\xff", b"B\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8, b"]", b"}"),
    *(b"torch", b"float64", b"__0_0.distcp", b"../__0_0.distcp", b"\x8c\x04Size", b"I01\n", b"\x88", b"N"),
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
        b"0F999999999",
        b"0F0,0F999999999,0B999999999",
        b"0F0,0B0\n" * 500,
        b"," * 200_000 + b"0F0",
        b"0F0" + b"\n" * 200_000,
        b'"' + b"0F0" * 50_000 + b'"',
        b"0" * 100_000 + b"F0",
    ],
    ids=["a number", "a gap", "one table many times", "cells", "lines", "a long cell", "many digits"],
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
        header({}, 2**62),
        header({}, 2**64 - 1),
        header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]}}),
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"1234",
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}) + b"12345678",
        header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}) + b"1234",
        header({"a": {"dtype": "PY", "shape": [1], "data_offsets": [0, 4]}}) + b"1234",
    ],
    ids=["length", "largest length", "beyond its end", "overflow", "negative", "backwards", "overlap", "type"],
)
def test_a_hostile_header_of_safetensors_takes_no_memory(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read_weights(tmp_path / "a.safetensors")


# --- topologies ---

AXES = ("pipe", "data", "tensor", "pp", "dp", "tp", "model", "", "Pipe", "x" * 10**5)
SIZES = (1, 2, 2, 3, 4, 8, 0, -1, 5)


def make_topologies(times: int) -> int:
    """How many are refused."""
    made = 0
    for seed in range(times):
        draw = random.Random(seed)
        names = draw.sample(AXES[: draw.choice((3, 3, 6, 10))], draw.randint(0, 3))
        axes = [(name, draw.choice(SIZES[: draw.choice((6, 6, 9))])) for name in names]
        with contextlib.suppress(TopologyError):
            topology = Topology(axes, draw.choice((None, None, *SIZES)))
            made += 1
            assert len(str(topology)) < 10**5
            topology.groups(draw.choice(AXES))
            rank = draw.randint(-2, topology.world_size)
            assert topology.rank(**topology.coordinate(rank)) == rank
    assert made > times // 20
    return times - made


def test_a_topology_is_made_or_refused() -> None:
    make_topologies(TIMES)


# --- the command line ---

WORDS = (
    *("show", "compare", "topology", *FAMILIES, "table.csv", "absent.csv", "nonsense", "--full", "--communication"),
    *("--edges", "--stages", "-m", "--placement", "--in-flight", "--memory", "--forward", "--backward", "--weight"),
    *("--comm", "--bytes", "--csv", "--ranks-per-node", "0-1,1-2", "0-1,1-4,2-3,3-4", "0-0", "1-0,0-1"),
    *("pipe=2,data=4", "pipe", "=", "a=b", "0", "1", "2", "5", "-3", "1,2,1", "1,x", "nan"),
    *("inf", "1e308", "1e-308", "9" * 5000, "\u0663", "", "-", "--", "0,1,2", "out.csv"),
)
BEGINNINGS = (
    *(("show", "1f1b", "--stages", "3"), ("show", "table.csv"), ("compare", "--stages", "2"), ("topology",), ()),
    *(("checkpoint", "show"), ("checkpoint", "verify"), ("checkpoint", "export")),
)


def run_command_lines(times: int) -> int:
    """How many are refused, in the working folder."""
    build("1f1b", [(0, 1)], 2).to_csv("table.csv")
    codes: Counter[Any] = Counter()
    for seed in range(times):
        draw = random.Random(seed)
        arguments = [*draw.choice(BEGINNINGS), *draw.choices(WORDS, k=draw.randint(0, 4))]
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            try:
                codes[main(arguments)] += 1
            except SystemExit as end:  # argparse's
                codes[end.code] += 1
            except BaseException as error:
                error.add_note(f"seed {seed}: {arguments}"[:500])
                raise
        assert len(told.getvalue()) < 10**5
        build("1f1b", [(0, 1)], 2).to_csv("table.csv")  # it may have been written over
    assert codes.keys() == {0, 1, 2}
    return times - codes[0]


def test_the_command_line_ends_with_one_of_its_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_command_lines(TIMES)


def test_what_many_words_would_quote_is_shortened() -> None:
    with pytest.raises(TopologyError) as error:
        Topology([("x" * 10**6, 2)])
    assert len(str(error.value)) < MOST_TOLD + 1


def run_all(times: int, kinds: Sequence[str]) -> None:
    """Prints, for each kind, how many were refused, and in how long; the first that raises anything else ends it."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    runs: dict[str, Callable[[], int]] = {
        **{kind: partial(read_changed, kind, Path(kind.replace(" ", "_")), times) for kind in KINDS},
        "topologies": partial(make_topologies, times),
        "command lines": partial(run_command_lines, times),
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for kind in kinds or runs:
            Path(kind.replace(" ", "_")).mkdir()
            start = time.perf_counter()
            refused = runs[kind]()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"{times} {kind}: {refused} refused, {time.perf_counter() - start:.0f} s, peak of memory {peak} MiB")


if __name__ == "__main__":
    run_all(int(sys.argv[1]), sys.argv[2:])
