"""Weights: checkpoints of every kind give the tensors that were saved, and of each only what is asked for is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fxpipe.checkpoint.files.commands import write_safetensors
from fxpipe.errors import CheckpointError
from fxpipe.parameters.weights import Weights

safetensors = pytest.importorskip("safetensors.torch")

State = dict[str, Tensor]


def state() -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(5, 3, generator=generator),
        "a.half": torch.randn(4, 2, generator=generator).to(torch.bfloat16),
        "b.number": torch.tensor(7.5),
        "b.count": torch.tensor([1, 2, 3]),
        "b.mask": torch.tensor([[True, False]]),
        "empty": torch.zeros(0, 4),
    }


def as_safetensors(state: State, folder: Path) -> Path:
    safetensors.save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_several_safetensors(state: State, folder: Path) -> Path:
    names = list(state)
    for place in range(2):
        safetensors.save_file({name: state[name] for name in names[place::2]}, folder / f"part{place}.safetensors")
    return folder


def as_indexed(save: Callable[[State, Path], None], index: str, suffix: str) -> Callable[[State, Path], Path]:
    def write(state: State, folder: Path) -> Path:
        names = list(state)
        for place in range(2):
            save({name: state[name] for name in names[place::2]}, folder / f"part{place}{suffix}")
        where = {name: f"part{place % 2}{suffix}" for place, name in enumerate(names)}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))
        return folder

    return write


def as_torch_file(state: State, folder: Path) -> Path:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def as_torch_folder(state: State, folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def as_distributed(state: State, folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


KINDS: dict[str, Callable[[State, Path], Path]] = {
    "safetensors": as_safetensors,
    "several": as_several_safetensors,
    "indexed": as_indexed(safetensors.save_file, "model.safetensors.index.json", ".safetensors"),
    "torch": as_torch_file,
    "torch folder": as_torch_folder,
    "torch indexed": as_indexed(torch.save, "pytorch_model.bin.index.json", ".bin"),
    "distributed": as_distributed,
}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_checkpoint_gives_what_was_saved(kind: str, tmp_path: Path) -> None:
    weights = Weights.open(KINDS[kind](state(), tmp_path))
    assert set(weights.names) == set(state())
    for name, tensor in state().items():
        assert weights.shape(name) == tensor.shape
        assert weights.dtype(name) == tensor.dtype
        read = weights.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_read_into_another_floating_type(kind: str, tmp_path: Path) -> None:
    weights = Weights.open(KINDS[kind](state(), tmp_path))
    target = torch.empty(5, 3, dtype=torch.bfloat16)
    weights.read_into("a.weight", target)
    assert torch.equal(target, state()["a.weight"].to(torch.bfloat16))
    double = torch.empty(3, 5, dtype=torch.float64).T  # of other strides, too
    weights.read_into("a.weight", double)
    assert torch.equal(double, state()["a.weight"].double())


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_tensor_larger_than_a_piece_is_read_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.parameters.weights.PIECE", 7 * 4 * 3)  # 7 rows of 3 numbers, the last piece has 6
    big = {"big": torch.randn(20, 3), "row": torch.randn(1, 100)}
    weights = Weights.open(KINDS[kind](big, tmp_path))
    for name, tensor in big.items():
        assert torch.equal(weights.read(name), tensor)


def test_names_can_be_changed(tmp_path: Path) -> None:
    path = as_safetensors(state(), tmp_path)
    weights = Weights.open(path, rename=lambda name: name.replace("a.", "encoder."))
    assert "encoder.weight" in weights.names
    assert torch.equal(weights.read("encoder.weight"), state()["a.weight"])
    with pytest.raises(CheckpointError, match=r"two tensors of the checkpoint are called 'x': 'a.half' in .* and 'a"):
        Weights.open(path, rename=lambda name: "x" if name.startswith("a.") else name)


def test_a_model_beside_other_things_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    dcp.save(
        {"model": state(), "step": 3, "optim": {"a.weight": torch.ones(5, 3)}}, checkpoint_id=tmp_path, no_dist=True
    )
    weights = Weights.open(tmp_path, rename=lambda name: name.removeprefix("model."))
    assert torch.equal(weights.read("a.weight"), state()["a.weight"])


def test_an_unknown_tensor_is_told_with_the_nearest(tmp_path: Path) -> None:
    weights = Weights.open(as_safetensors(state(), tmp_path))
    with pytest.raises(CheckpointError, match=r"has no tensor 'a.weights'; did you mean \"a.weight\"\?"):
        weights.read("a.weights")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_numbers_that_may_need_a_scale_are_not_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = Weights.open(as_safetensors({"w": torch.ones(4).to(dtype)}, tmp_path))
    with pytest.raises(CheckpointError, match=f"w is torch.float32, .* has it as {dtype}"):
        weights.read_into("w", torch.empty(4))
    same = torch.empty(4, dtype=dtype)
    weights.read_into("w", same)
    assert torch.equal(same.float(), torch.ones(4))


class Opaque:
    pass


def write_folder_of_two(folder: Path) -> Path:
    for name in ("a.pt", "b.pt"):
        torch.save(state(), folder / name)
    return folder


def write_index(weight_map: object) -> Callable[[Path], Path]:
    def write_to(folder: Path) -> Path:
        inner = folder / "inner"
        inner.mkdir()
        for place in (folder, inner):
            safetensors.save_file(state(), place / "part.safetensors")
        (inner / "folder.bin").mkdir()
        told = json.dumps({"weight_map": weight_map}).replace("HERE", str(folder))
        (inner / "model.safetensors.index.json").write_text(told)
        return inner

    return write_to


def write(name: str, value: object, **options: object) -> Callable[[Path], Path]:
    def write_to(folder: Path) -> Path:
        torch.save(value, folder / name, **options)
        return folder / name

    return write_to


def write_text(folder: Path) -> Path:
    (folder / "notes.safetensors").write_text("these are no weights")
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "gone", "there is no checkpoint at .*gone"),
        (lambda folder: folder, "none of them, and no torch file"),
        (write_folder_of_two, "holds 2 torch files.*name the file"),
        (write_index(["part.safetensors"]), "it has no weight_map"),
        (write_index({"a": 5}), "names 5, which is no file of weights in its folder; write .*safetensors"),
        (
            write_index({"a": "../part.safetensors"}),
            r"names '\.\./part\.safetensors', which is no file of weights in its",
        ),
        (write_index({"a": "HERE/part.safetensors"}), "part.safetensors', which is no file of weights in its folder"),
        (write_index({"a": "model.safetensors.index.json"}), "index.json', which is no file of weights in its folder"),
        (write_index({"a": "folder.bin"}), "names folder.bin, which is not in .*inner"),
        (write_text, "no safetensors file, or a part of one"),
        (write("old.pt", state(), _use_new_zipfile_serialization=False), "cannot be read as a state dict: mmap"),
        (write("class.pt", {"a": Opaque()}), "cannot be read as a state dict: Weights only"),
        (write("nested.pt", {"model": state(), "step": 3}), "a dict, with the entries 'model', 'step', and no tensors"),
        (write("tensor.pt", torch.ones(3)), "holds a Tensor, and no tensors by name"),
    ],
)
def test_what_is_no_checkpoint_is_told(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Weights.open(make(tmp_path))


def test_an_index_may_name_files_below_its_folder(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    safetensors.save_file(state(), tmp_path / "parts" / "one.safetensors")
    where = dict.fromkeys(state(), "parts/one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert set(Weights.open(tmp_path).names) == set(state())


def test_the_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_safetensors(state(), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match="needs the safetensors library: pip install"):
        Weights.open(path)


def test_a_default_device_changes_nothing_that_is_written(tmp_path: Path) -> None:
    file, value = tmp_path / "one.safetensors", torch.arange(6.0, device="cpu").view(2, 3)
    with torch.device("meta"):
        write_safetensors(file, {"a": (value.shape, value.dtype)}, lambda name, tensor: tensor.copy_(value))
    assert torch.equal(Weights.open(file).read("a").cpu(), value)
