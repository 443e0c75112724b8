"""What comes from outside, changed at random: a value or an FxpipeError comes out, and nothing else, in bounded memory.

Files that were valid are cut, doubled and mixed with words of their own kind. A new kind of file, such as a manifest,
is a row of ``KINDS``: what writes a valid one, the words that may stand in it, and what reads it.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fxpipe.__main__ import main
from fxpipe.distributed.topology import Topology
from fxpipe.errors import MOST_TOLD, CheckpointError, FxpipeError, ScheduleError, TopologyError
from fxpipe.parameters.weights import Weights
from fxpipe.schedules import build
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, WORKED, chain
from tests.thinned import ALL

safetensors = pytest.importorskip("safetensors.torch")

TIMES = 10_000 if ALL else 300
pytestmark = pytest.mark.timeout(3000 if ALL else 300)
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

KINDS = {
    "schedules": Kind(write_schedule, TABLE_WORDS, read_schedule),
    "indices of weights": Kind(write_index, JSON_WORDS, read_weights),
    "safetensors": Kind(write_safetensors, HEADER_WORDS, read_weights),
    "torch files": Kind(write_torch_file, (b"PK", b"\x80\x02", b"c", b"R", b".", b"\xff\xff\xff\x7f"), read_weights),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    write, words, read = KINDS[kind]
    refused = longest = 0
    for seed in range(TIMES):
        draw = random.Random(seed)
        path = write(draw, tmp_path)
        path.write_bytes(changed(draw, path.read_bytes(), words))
        try:
            read(path)
        except FxpipeError as error:
            refused += 1
            longest = max(longest, len(str(error)))
        except BaseException as error:
            error.add_note(f"seed {seed}: {path.read_bytes()!r:.2000}")
            raise
    assert refused > TIMES // 20 or kind == "schedules"  # which catches its own, of one reading out of two
    assert longest < MOST_TOLD + 1


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
SIZES = (1, 2, 2, 3, 4, 8, 0, -1, 10**30)


def test_a_topology_is_made_or_refused() -> None:
    made = 0
    for seed in range(TIMES):
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
    assert made > TIMES // 20


# --- the command line ---

WORDS = (
    *("show", "compare", "topology", *FAMILIES, "table.csv", "absent.csv", "nonsense", "--full", "--communication"),
    *("--edges", "--stages", "-m", "--placement", "--in-flight", "--memory", "--forward", "--backward", "--weight"),
    *("--comm", "--bytes", "--csv", "--ranks-per-node", "0-1,1-2", "0-1,1-4,2-3,3-4", "0-0", "1-0,0-1", "0-999999999"),
    *(
        "pipe=2,data=4",
        "pipe=1000000,data=1000000",
        "pipe",
        "=",
        "a=b",
        "0",
        "1",
        "2",
        "5",
        "-3",
        "1,2,1",
        "1,x",
        "nan",
    ),
    *("inf", "1e308", "1e-308", "9" * 30, "9" * 5000, "\u0663", "", "-", "--", "0,1,2", "out.csv"),
)
BEGINNINGS = (
    *(("show", "1f1b", "--stages", "3"), ("show", "table.csv"), ("compare", "--stages", "2"), ("topology",), ()),
    *(("checkpoint", "show"), ("checkpoint", "verify"), ("checkpoint", "export")),
)


def test_the_command_line_ends_with_one_of_its_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build("1f1b", [(0, 1)], 2).to_csv("table.csv")
    codes = set()
    for seed in range(TIMES):
        draw = random.Random(seed)
        arguments = [*draw.choice(BEGINNINGS), *draw.choices(WORDS, k=draw.randint(0, 4))]
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            try:
                codes.add(main(arguments))
            except SystemExit as end:  # argparse's
                codes.add(end.code)
            except BaseException as error:
                error.add_note(f"seed {seed}: {arguments}"[:500])
                raise
        assert len(told.getvalue()) < 10**5
        build("1f1b", [(0, 1)], 2).to_csv("table.csv")  # it may have been written over
    assert codes == {0, 1, 2}


def test_what_many_words_would_quote_is_shortened() -> None:
    with pytest.raises(TopologyError) as error:
        Topology([("x" * 10**6, 2)])
    assert len(str(error.value)) < MOST_TOLD + 1
