"""A run of a tensor's elements is a few boxes, and what torch.distributed.checkpoint does with it keeps its values."""

from __future__ import annotations

import copy
import io
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from fxpipe.tensors.pieces import Slice, memory_order
from tests.thinned import seeds

pytestmark = pytest.mark.filterwarnings("ignore")  # torch: "assuming the intent is to save in a single process"


def tensor_of(shape: list[int], order: list[int]) -> Tensor:
    """0, 1, 2, … in the order of memory, whose outermost dimension is ``order[0]``."""
    stored = torch.arange(float(math.prod(shape))).view([shape[dim] for dim in order])
    return stored.permute([order.index(dim) for dim in range(len(shape))])


def slice_of(tensor: Tensor, start: int, stop: int) -> Slice:
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return Slice(flat[start:stop].clone(), start, tensor.shape, memory_order(tensor))


@pytest.mark.parametrize("seed", seeds(200))
def test_boxes_cover_the_run_once_and_hold_its_values_in_any_order_of_memory(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randint(1, 5) for _ in range(draw.randint(0, 4))]
    order = draw.sample(range(len(shape)), len(shape))
    whole = tensor_of(shape, order)
    start = draw.randint(0, whole.numel())
    stop = draw.randint(start, whole.numel())
    part = slice_of(whole, start, stop)
    seen = torch.zeros(shape)
    for chunk in part.__create_chunk_list__():
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        place = tuple(slice(begin, begin + size) for begin, size in ends)
        assert torch.equal(whole[place], part.__get_tensor_shard__(MetadataIndex("any", chunk.offsets)))
        seen[place] += 1
    assert torch.equal(seen, ((whole >= start) & (whole < stop)).float())


def save_and_load(state: dict[str, Tensor], into: dict[str, Tensor], folder: Path, asynchronous: bool = False) -> None:
    if asynchronous:
        dcp.async_save(state, checkpoint_id=folder, no_dist=True).result(60)
    else:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    dcp.load(into, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_part_is_saved_is_read_by_whoever_has_a_part_of_that(
    tmp_path: Path, order: list[int], asynchronous: bool
) -> None:
    whole = tensor_of([4, 3, 5], order)
    inside = slice_of(torch.zeros(4, 3, 5), 8, 21)  # of the elements 7 to 45, in the order of another memory
    into = Slice(torch.zeros(0), 0, (4, 3, 5), (0, 1, 2))
    save_and_load({"w": slice_of(whole, 0, 60)}, {"w": into}, tmp_path / "none", asynchronous)
    save_and_load({"w": slice_of(whole, 0, 60)}, {"w": inside}, tmp_path / "part", asynchronous)
    assert torch.equal(inside.local, whole.contiguous().view(-1)[8:21])
    plain = torch.zeros(4, 3, 5)
    save_and_load({"w": slice_of(whole, 0, 60)}, {"w": plain}, tmp_path / "plain", asynchronous)
    assert torch.equal(plain, whole)
    back = slice_of(torch.zeros(4, 3, 5), 17, 44)
    save_and_load({"w": whole.contiguous()}, {"w": back}, tmp_path / "back", asynchronous)
    assert torch.equal(back.local, whole.contiguous().view(-1)[17:44])


def test_copies_files_and_moves_keep_place_and_values() -> None:
    part = slice_of(torch.arange(12.0).view(3, 4), 2, 9)
    file = io.BytesIO()
    torch.save({"w": part}, file)
    file.seek(0)
    for same in (copy.deepcopy(part), part.clone(), part.detach(), torch.load(file)["w"], part.to(torch.float64)):
        assert isinstance(same, Slice)
        assert (same.start, same.shape, same.order) == (part.start, part.shape, part.order)
        assert torch.equal(same.local.float(), part.local)
    other = slice_of(torch.zeros(3, 4), 2, 9)
    other.copy_(part)
    assert torch.equal(other.local, part.local)


def test_what_needs_the_whole_tensor_is_refused() -> None:
    part = slice_of(torch.arange(12.0).view(3, 4), 2, 9)
    with pytest.raises(NotImplementedError, match=r"Slice\(\[3, 4\].*write .local"):
        part + 1
    with pytest.raises(NotImplementedError, match=r"write \.local"):
        part.copy_(slice_of(torch.zeros(3, 4), 3, 9))


@pytest.mark.parametrize("module", ["fxpipe.sharding.optimizer_state", "fxpipe.checkpoint.files.pieces"])
def test_a_file_that_names_the_class_in_a_former_module_is_loaded(module: str, tmp_path: Path) -> None:
    part = slice_of(torch.arange(6.0).view(2, 3), 1, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slice, "__module__", module)
        patch.setitem(sys.modules, module, SimpleNamespace(Slice=Slice))
        torch.save(part, tmp_path / "part.pt")
    loaded = torch.load(tmp_path / "part.pt", weights_only=True)
    assert type(loaded) is Slice
    assert (loaded.start, loaded.local.tolist()) == (1, [1.0, 2.0, 3.0, 4.0])
