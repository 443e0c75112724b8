"""Checkpoints as folders: what was written is known to the byte, and nothing that is read is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from fxpipe.checkpoint.files import manifest as saving_manifest
from fxpipe.checkpoint.files import run_folder
from fxpipe.checkpoint.files.manifest import MANIFEST, Manifest, Written, written_of
from fxpipe.checkpoint.files.plain import from_plain, to_plain
from fxpipe.checkpoint.files.reader import METADATA, FolderReader, read_metadata
from fxpipe.checkpoint.files.run_folder import FolderLock, lock_of
from fxpipe.checkpoint.files.writer import RankPlan
from fxpipe.distributed.topology import Topology
from fxpipe.errors import CheckpointError
from fxpipe.parameters.weights import Weights
from tests.pool import Pool, forking

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "model": {"weight": weight, "turned": weight.t(), "half": weight.to(torch.bfloat16), "count": torch.tensor(7)},
        "optim": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["weight"], "foreach": None}]},
    }


def empty() -> dict[str, Any]:
    like = state()
    like["model"] = {name: torch.zeros_like(tensor) for name, tensor in like["model"].items()}
    like["optim"]["param_groups"][0] = dict.fromkeys(like["optim"]["param_groups"][0], "nothing")
    return like


def check_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["optim"] == wanted["optim"]
    assert found["model"].keys() == wanted["model"].keys()
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in wanted["model"].items())


# --- torch's folders, read as data


def told(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (entry.properties.dtype, entry.size, entry.chunks) if isinstance(entry, TensorStorageMetadata) else entry
        for name, entry in entries.items()
    }


def test_what_torch_has_saved_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)
    mine, theirs = read_metadata(tmp_path), FileSystemReader(tmp_path).read_metadata()
    # a tensor's properties beyond its type are for who makes it anew; torch 2.15 tells its strides, too
    assert told(mine.state_dict_metadata) == told(theirs.state_dict_metadata)
    assert mine.storage_data == theirs.storage_data
    found = empty()
    FolderReader(tmp_path).plan(found)()
    check_equal(found, state())


class Runs:
    """A pickle that runs something."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def hostile(marker: Path) -> dict[str, bytes]:
    """Pickles that torch's reader would run, or that would take all memory."""
    metadata = "torch.distributed.checkpoint.metadata"
    return {
        "a call": pickle.dumps(Runs(marker)),
        "a call inside": pickle.dumps({"state_dict_metadata": Runs(marker)}),
        "a class's own method": f"c{metadata}\nMetadata.__init__\n(tR.".encode(),
        "an attribute of a class": f"c{metadata}\nMetadata\n(N}}S'__init__'\nNsbtb.".encode(),
        "torch.load": b"ctorch\nload\n(S'x'\ntR.",
        "a memo of 64 GB": b"\x80\x04}r\xff\xff\xff\x7f.",
        "an extension": b"\x80\x02\x82\x01.",
        "nothing": b"",
        "a plain dict": pickle.dumps({"a": 1}),
        "deep": b"\x80\x04" + b"(" * 100_000 + b".",
    }


KINDS = sorted(hostile(Path()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_metadata_is_refused_and_runs_nothing(tmp_path: Path, kind: str) -> None:
    """``checkpoint=`` of such a folder ran what it named."""
    folder, marker = tmp_path / "folder", tmp_path / "ran"
    dcp.save(state(), checkpoint_id=folder)
    (folder / METADATA).write_bytes(hostile(marker)[kind])
    with pytest.raises(CheckpointError, match=r"\.metadata is not what torch\.distributed\.checkpoint writes"):
        Weights.open(folder)
    assert not marker.exists()


def test_a_hostile_plain_value_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    folder, marker = tmp_path / "folder", tmp_path / "ran"
    dcp.save({"value": Runs(marker)}, checkpoint_id=folder)
    with pytest.raises(CheckpointError, match=r"folder cannot be read, or was altered"):
        FolderReader(folder).plan({"value": None})()
    assert not marker.exists()


def places(metadata: Any) -> dict[str, Any]:
    return {index.fqn: place for index, place in metadata.storage_data.items()}


def altered(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


ALTERED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "outside": (lambda m: setattr(places(m)["model.count"], "relative_path", "../x"), "'../x', which is no file"),
    "absolute": (lambda m: setattr(places(m)["model.count"], "relative_path", "/etc/hosts"), "'/etc/hosts', which is"),
    "number": (lambda m: setattr(places(m)["model.count"], "offset", -1), "'-1' stands where a number should"),
    "too far": (lambda m: setattr(places(m)["model.count"], "offset", 2**40), "bytes, and .* are expected"),
    "huge": (lambda m: setattr(m.state_dict_metadata["model.weight"], "size", torch.Size([2**50])), "does not fit"),
    "hole": (lambda m: m.state_dict_metadata["model.weight"].chunks.clear(), "have 0 elements of 15"),
    "nowhere": (lambda m: m.storage_data.clear(), "is stored nowhere"),
    "kind": (lambda m: setattr(m, "storage_data", [1]), "a list stands where a dict should"),
}


@pytest.mark.parametrize("kind", sorted(ALTERED))
def test_an_altered_metadata_is_told(tmp_path: Path, kind: str) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)
    change, message = ALTERED[kind]
    altered(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        read_metadata(tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_of_the_folder_is_not_opened(tmp_path: Path, kind: str) -> None:
    """A pipe without a writer was waited for, and a link was followed out of the folder."""
    dcp.save(state(), checkpoint_id=tmp_path / "folder")
    folder = tmp_path / "folder"
    file = folder / "__0_0.distcp"
    if kind == "link":
        file.rename(tmp_path / "outside")
        file.symlink_to("../outside")
    else:
        file.unlink()
        os.mkfifo(file)
        altered(folder, lambda m: [setattr(place, "length", 0) for place in places(m).values()])
        altered(folder, lambda m: [setattr(place, "offset", 0) for place in places(m).values()])
    with pytest.raises(CheckpointError, match=r"'__0_0\.distcp', which is no file of its folder \(a link is none\)"):
        read_metadata(folder)
    files = {file.name: Written(file.lstat().st_size, (0,) * (kind == "link"))}
    with pytest.raises(CheckpointError, match=r"distcp is a link, a pipe or a device, and no file of this folder"):
        Manifest(1, 1, "", "", (), {}, files).check_sizes(folder)


@pytest.mark.parametrize("name", [METADATA, MANIFEST])
def test_what_says_which_files_there_are_is_no_link(tmp_path: Path, name: str) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "folder")
    manifest(tmp_path / "folder")
    (tmp_path / "folder" / name).rename(tmp_path / "outside")
    (tmp_path / "folder" / name).symlink_to("../outside")
    read = {METADATA: read_metadata, MANIFEST: Manifest.read}[name]
    with pytest.raises(CheckpointError, match="symbolic links"):
        read(tmp_path / "folder")


def nested(depth: int) -> Any:
    """A tuple of two equal ones of two equal ones ...: a few bytes of a pickle, and 2**depth numbers."""
    value: Any = (1, 2)
    for _ in range(depth):
        value = (value, value)
    return value


def set_size(metadata: Any, size: Any) -> None:
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size, entry.chunks = size, [ChunkStorageMetadata(torch.Size([0] * 1000), size)]


def share_chunks(metadata: Any) -> None:
    """200 names, all of them with the same 200 parts."""
    entry = metadata.state_dict_metadata["model.weight"]
    entry.chunks *= 200
    metadata.state_dict_metadata = {str(number): entry for number in range(200)}


def repeat_part(metadata: Any) -> None:
    """A tensor of 1,000 times what is stored, by the same part again and again."""
    entry = metadata.state_dict_metadata["model.weight"]
    entry.chunks, entry.size = entry.chunks * 1000, torch.Size([5000, 3])


def share_path(metadata: Any) -> None:
    """1,000 names, all of them at the same place below 1,000 others."""
    path = ("a",) * 1000
    metadata.planner_data = {str(number): path for number in range(1000)}


class SizeOfList:
    """Pickled as a torch.Size, of a list: each of them would be a copy."""

    def __reduce__(self) -> Any:
        return torch.Size, ([5, 3],)


GROWING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a size of a list": (lambda m: set_size(m, SizeOfList()), "a list stands where a tuple should"),
    "shared parts": (share_chunks, r"it unfolds to more than [\d,]+ numbers"),
    "a part again and again": (repeat_part, r"it unfolds to more than [\d,]+ bytes"),
    "dimensions": (lambda m: set_size(m, torch.Size([2**61] * 1000)), "stands where a number should"),
    "a shared path": (share_path, r"it unfolds to more than [\d,]+ numbers"),
    "a key that is hashed for long": (
        lambda m: setattr(m, "planner_data", {nested(16): 1}),
        "a tuple stands where a str",
    ),
    "a path that is hashed for long": (
        lambda m: setattr(m, "planner_data", {"a": (nested(16), "b")}),
        "a tuple stands where a str",
    ),
    "a number that is printed for long": (
        lambda m: setattr(places(m)["model.count"], "offset", nested(16)),
        r"'\(+\.\.\.\), .{0,40}' stands where a number should",
    ),
}


@pytest.mark.parametrize("kind", sorted(GROWING))
def test_a_small_metadata_that_would_become_large_is_refused(tmp_path: Path, kind: str) -> None:
    """Half a megabyte became 32 GB, or was read for minutes: what a pickle shares was made for each name."""
    dcp.save(state(), checkpoint_id=tmp_path)
    change, message = GROWING[kind]
    altered(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        read_metadata(tmp_path)


def test_the_metadata_of_many_parts_is_read(tmp_path: Path) -> None:
    """What it makes is in proportion to its length, for any number of dimensions and parts, shared as torch shares."""
    tensors = {str(dims): torch.ones([2] * dims) for dims in range(17)}
    dcp.save(tensors, checkpoint_id=tmp_path)
    assert FolderReader(tmp_path).tensors["16"] == (torch.Size([2] * 16), torch.float32)


def deflated(content: bytes) -> bytes:
    """A zip file's records, written again in the same order."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as read, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        for record in read.infolist():
            written.writestr(record.filename, read.read(record))
    return file.getvalue()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("value", [torch.zeros(100_000), "x" * 100_000], ids=["tensor", "text"])
def test_a_file_that_unpacks_to_more_than_it_has_is_refused(tmp_path: Path, value: Any) -> None:
    """A megabyte became a gigabyte before it was found not to fit."""
    small = torch.zeros(4) if isinstance(value, Tensor) else "x"
    dcp.save({"value": small}, checkpoint_id=tmp_path)
    content = deflated(saved(value))
    (tmp_path / "__0_0.distcp").write_bytes(content)
    altered(tmp_path, lambda m: setattr(places(m)["value"], "length", len(content)))
    with pytest.raises(CheckpointError, match=rf"it unfolds to more than {len(content):,} bytes"):
        FolderReader(tmp_path).plan({"value": small})()
    (tmp_path / "weights.pt").write_bytes(deflated(saved({"value": value, "small": torch.zeros(1)})))
    with pytest.raises(CheckpointError, match=r"it unfolds to more than [\d,]+ bytes"):
        Weights.open(tmp_path / "weights.pt")


def test_what_does_not_fit_is_told_before_anything_is_read(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)
    reader, found = FolderReader(tmp_path), empty()
    with pytest.raises(CheckpointError, match=r"has no 'model\.wieght'; did you mean \"model\.weight\""):
        reader.plan({"model": {"wieght": torch.zeros(5, 3)}})
    with pytest.raises(CheckpointError, match=r"model\.weight has shape \[5, 4\], .* has \[5, 3\]"):
        reader.plan({"model": {**found["model"], "weight": torch.zeros(5, 4)}})
    with pytest.raises(CheckpointError, match=r"model\.weight is no tensor, .* has one"):
        reader.plan({"model": {"weight": 3}})
    assert not any(tensor.any() for tensor in found["model"].values())


# --- what is written


def write(folder: Path, value: dict[str, Any]) -> dict[str, Written]:
    """By one rank."""
    plan = RankPlan(value, 0)
    plan.settle([json.loads(json.dumps(plan.message()))])
    folder.mkdir()
    return plan.finish(folder, [json.loads(json.dumps(plan.write(folder)))])


def test_torch_reads_what_is_written_and_every_file_has_its_checksum(tmp_path: Path) -> None:
    files = write(tmp_path / "one", state())
    found = empty()
    dcp.load(found, checkpoint_id=tmp_path / "one")
    check_equal(found, state())
    assert set(files) == {path.name for path in (tmp_path / "one").iterdir()} == {METADATA, "__0_0.distcp"}
    for name, written in files.items():
        data = (tmp_path / "one" / name).read_bytes()
        assert written == (len(data), (zlib.crc32(data),))


def test_copies_are_of_the_moment(tmp_path: Path) -> None:
    value = state()
    plan = RankPlan(value, 0)
    plan.settle([plan.message()])
    plan.keep_copies()
    for tensor in value["model"].values():
        tensor.zero_()
    value["optim"]["param_groups"][0]["lr"] = 0.0
    plan.finish(tmp_path, [plan.write(tmp_path)])
    found = empty()
    FolderReader(tmp_path).plan(found)()
    check_equal(found, state())


def test_what_several_ranks_have_is_written_once() -> None:
    plans = [RankPlan({"a": torch.ones(100), "b": torch.ones(90), "c": torch.ones(10)}, rank) for rank in range(2)]
    for plan in plans:
        plan.settle([one.message() for one in plans])
    written = sorted(item.index.fqn for plan in plans for item in plan._plans[plan._rank].items)
    assert written == ["a", "b", "c"]


def test_a_value_that_could_not_be_read_back_is_not_written() -> None:
    with pytest.raises(CheckpointError, match=r"optim\.param_groups\.0\.lr is a .*Runs.*plain data alone"):
        RankPlan({"optim": {"param_groups": [{"lr": Runs(Path())}]}}, 0)


# --- plain data

PLAIN: list[Any] = [
    None,
    [True, -3, 2**70, 0.1, float("inf"), "é\0", b"\xff"],
    {1: {"a": (1, (2,))}, "1": [], "": {}},
    {"dict": 1, "tuple": (), "tensor": [{}]},
    OrderedDict(a=1),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back(value: Any) -> None:
    tree, tensors = to_plain(value, "value")
    found = from_plain(json.loads(json.dumps(tree)), tensors)
    assert found == value
    assert repr(found) == repr(dict(value) if isinstance(value, OrderedDict) else value)  # 1 is not True


def test_a_whole_number_of_another_type_comes_back_as_an_int() -> None:
    for number in (Topology([("pipe", 2)]).rank, np.int64(0)):
        assert type(to_plain(number, "value")[0]) is int


def test_tensors_come_back_and_equal_ones_are_kept_once() -> None:
    value = {"a": torch.tensor([1.0, float("nan")]), "b": [torch.tensor([1.0, float("nan")]), torch.tensor([1, 2])]}
    tree, tensors = to_plain(value, "value")
    assert len(tensors) == 2
    found = from_plain(tree, tensors)
    pairs: list[tuple[Tensor, Tensor]] = [(found["a"], value["a"]), *zip(found["b"], value["b"], strict=True)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(7), other.cpu().nan_to_num(7))


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(2000):
        value = [value]
    return value


def circle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"value\['a'\]\[1\] is a set, and a checkpoint holds plain data alone: None, bool"),
        ({"f": len}, r"value\['f'\] is a builtin_function_or_method"),
        ({(1,): 2}, r"value has the key \(1,\)"),
        ({None: 2}, r"value has the key None"),
        (1j, "value is a complex"),
        (Path("x"), r"value is a pathlib.*Path"),
        (torch.ones(2).to_sparse(), "a checkpoint holds plain tensors"),
        (torch.ones(2, device="meta"), "a checkpoint holds plain tensors"),
        (circle(), "value contains itself"),
        (deep(), "is nested too deeply"),
    ],
)
def test_other_values_are_refused_by_the_place_where_they_are(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        to_plain(value, "value")


# --- manifests


def manifest(folder: Path, number: int = 1) -> Manifest:
    folder.mkdir(exist_ok=True)
    (folder / "data").write_bytes(b"abc")
    files = {"data": Written(3, (zlib.crc32(b"abc"),))}
    made = Manifest(812, number, "2026-01-01", "run", (("pipe", 2), ("data", 2)), {"torch": "2.13"}, files)
    made.write(folder)
    return made


def test_a_cut_and_an_altered_file_are_told_with_both_values(tmp_path: Path) -> None:
    made = manifest(tmp_path)
    made.check_sizes(tmp_path)
    made.check_contents(tmp_path)
    (tmp_path / "data").write_bytes(b"abd")
    made.check_sizes(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"data was altered: the crc32 from byte 0 on is {zlib.crc32(b'abd'):08x}, .*352441c2"
    ):
        made.check_contents(tmp_path)
    (tmp_path / "data").write_bytes(b"ab")
    with pytest.raises(CheckpointError, match="data has 2 bytes, and its manifest expects 3"):
        made.check_sizes(tmp_path)
    (tmp_path / "data").unlink()
    with pytest.raises(CheckpointError, match=r"data cannot be read \(No such file.*expects 3 bytes"):
        made.check_sizes(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"null",
        b"[]",
        json.dumps({"format": 1, "crc32": 0, "checkpoint": {}}).encode(),
        json.dumps({"format": 99, "crc32": 0, "checkpoint": {}}).encode(),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"fxpipe\.json"):
        Manifest.read(tmp_path)


def test_a_manifest_names_files_of_its_folder_alone(tmp_path: Path) -> None:
    files = {"../outside": Written(1, (1,))}
    Manifest(1, 1, "", "", (), {}, files).write(tmp_path)
    with pytest.raises(CheckpointError, match=r"'\.\./outside' is no file of its folder"):
        Manifest.read(tmp_path)


def test_each_piece_of_a_file_is_looked_through_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_manifest, "PIECE", 1000)
    monkeypatch.setattr(saving_manifest, "_BUFFER", 300)
    data = random.Random(0).randbytes(9_999)
    (tmp_path / "x").write_bytes(data)
    pieces = [data[start : start + 1000] for start in range(0, len(data), 1000)]
    assert written_of(tmp_path / "x") == (9_999, tuple(map(zlib.crc32, pieces)))
    made = Manifest(1, 1, "", "", (), {}, {"x": written_of(tmp_path / "x")})
    made.check_contents(tmp_path)
    (tmp_path / "x").write_bytes(data[:5500] + b"?" + data[5501:])
    with pytest.raises(CheckpointError, match="x was altered: the crc32 from byte 5000 on is"):
        made.check_contents(tmp_path)
    found = []
    for rank in range(4):
        try:
            made.check_contents(tmp_path, rank, 4)
        except CheckpointError:
            found.append(rank)
    assert found == [5 % 4]


# --- the folder of a run


def made(folder: Path, step: int) -> Path:
    partial = run_folder.begin(folder, step)
    manifest(partial, 1 + run_folder.newest(folder))
    final = run_folder.complete(partial)
    run_folder.make_links(final)
    return final


def names(folder: Path) -> list[str]:
    return [path.name for path in run_folder.checkpoints(folder)]


def test_the_last_that_was_written_is_the_latest(tmp_path: Path) -> None:
    for step in (5, 800, 600):  # the run has gone back once
        made(tmp_path, step)
        assert os.readlink(tmp_path / "latest") == f"step-{step:06d}"
    assert names(tmp_path) == ["step-000600", "step-000800", "step-000005"]


def test_old_ones_go_and_what_cannot_be_read_stays(tmp_path: Path) -> None:
    for step in range(5):
        made(tmp_path, step)
    (tmp_path / "step-000004" / MANIFEST).write_text("{")
    (tmp_path / "step-notes").mkdir()
    run_folder.keep_newest(tmp_path, 2)
    assert names(tmp_path) == ["step-000004", "step-000003", "step-000002"]
    assert (tmp_path / "step-notes").exists()


def test_what_a_killed_process_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    made(tmp_path, 1)
    for name in ("step-000002.partial", "step-000003.removed", "mine.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    run_folder.begin(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("latest", "mine.partial", "step-000001", "step-000002.partial"),
    ]
    assert list((tmp_path / "step-000002.partial").iterdir()) == []


# --- the lock


def hold(folder: Path) -> int:
    """Takes a lock and keeps it until the next call."""
    held.append(lock_of(folder, "other"))
    return os.getpid()


def let_go() -> None:
    held.clear()


held: list[FolderLock] = []


def test_two_runs_do_not_write_to_one_folder(pool: Pool, tmp_path: Path) -> None:
    (holder,) = pool.run(hold, tmp_path, ranks=1)
    with pytest.raises(CheckpointError, match=rf"is written to by process {holder} on .* \(run other\) since 20"):
        lock_of(tmp_path, "mine")
    pool.run(let_go, ranks=1)
    one, again = lock_of(tmp_path, "mine"), lock_of(tmp_path, "mine")  # one process may, for several models
    del one
    with pytest.raises(AssertionError, match=rf"written to by process {os.getpid()}"):
        pool.run(hold, tmp_path, ranks=1)
    del again


def hold_and_die(folder: Path) -> None:
    lock_of(folder, "dead")
    os._exit(9)


def test_the_lock_of_a_dead_process_is_no_lock(tmp_path: Path) -> None:
    process = forking().Process(target=hold_and_die, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert "dead" in (tmp_path / "lock").read_text()
    lock_of(tmp_path, "mine")
