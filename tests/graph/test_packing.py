"""Wire: what is packed and unpacked is the same value, to the last bit and stride, and dense tensors are not copied."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.graph.packing import Meta, allocate, pack, unpack
from fxpipe.plain_data import decode, encode

HERE = torch.get_default_device()
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.bool, torch.int64, torch.int8, torch.uint8,
]  # fmt: skip


def travel(value: Any) -> Any:
    """The value behind a wire: its description told, its bytes copied into buffers allocated from it alone."""
    meta, buffers = pack(value)
    arrived = Meta.from_tree(decode(encode(meta.tree), "rank 0"), "rank 0")
    assert arrived == meta
    received = allocate(arrived, HERE)
    assert [(b.shape, b.dtype) for b in received] == [(b.shape, b.dtype) for b in buffers]
    for source, target in zip(buffers, received, strict=True):
        assert source.dtype == torch.uint8
        target.copy_(source)
    return unpack(arrived, received)


def bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def assert_same(arrived: Any, value: Tensor) -> None:
    assert type(arrived) is Tensor
    assert arrived.shape == value.shape
    assert arrived.dtype == value.dtype
    assert arrived.requires_grad == value.requires_grad
    assert arrived.is_leaf
    assert torch.equal(bits(arrived), bits(value))


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 100
    return (numbers > 0) if dtype is torch.bool else numbers.to(dtype)


LAYOUTS: dict[str, Tensor] = {
    "contiguous": sample(2, 3, 4),
    "0 dimensions": sample(1)[0],
    "transposed": sample(3, 5).t(),
    "permuted": sample(2, 3, 4).permute(2, 0, 1),
    "channels_last": sample(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": sample(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
    "from the middle of its storage": sample(10)[3:7],
    "rows with gaps": sample(4, 6)[:, 1:4],
    "every second": sample(12)[::2],
    "every second of every second": sample(8, 8)[::2, 1::2],
    "expanded": sample(3, 1).expand(3, 4),
    "expanded in front": sample(3).expand(4, 3),
    "one number expanded": sample(1)[0].expand(2, 3),
    "expanded with gaps": sample(6, 1)[::2].expand(3, 4),
    "overlapping windows": sample(10).unfold(0, 4, 2),
    "empty": torch.empty(0),
    "empty of two dimensions": torch.empty(3, 0, 2).transpose(0, 2),
    "conjugated": sample(3, 4, dtype=torch.complex64).conj(),
    "conjugated with gaps": sample(6, 4, dtype=torch.complex64)[::2, 1:3].conj(),
    "negated imaginary part": sample(3, 4, dtype=torch.complex64).conj().imag,
    "not a number": torch.tensor([float("nan"), -0.0, float("inf")]),
    "a parameter": nn.Parameter(sample(2, 2)),
    "in the middle of a graph": (nn.Parameter(sample(2, 2)) * 2),
}


LAYOUTS |= {
    f"{layout} {dtype}": layout_of(sample(4, 6, dtype=dtype))
    for dtype in DTYPES
    for layout, layout_of in {
        "whole": lambda base: base,
        "transposed": torch.t,
        "gaps": lambda base: base[1:, ::2],
        "expanded": lambda base: base[:, :1].expand(4, 3),
        "0 dimensions": lambda base: base[2, 3],
        "empty": lambda base: base[:0],
    }.items()
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_arrives_as_it_was(name: str) -> None:
    arrived = travel(LAYOUTS[name])
    assert_same(arrived, LAYOUTS[name])
    if "conj" not in name and "negated" not in name:
        assert arrived.stride() == LAYOUTS[name].stride()


def test_a_gradient_can_be_taken_behind_the_wire_and_not_where_none_is_wanted() -> None:
    weight = nn.Parameter(sample(3, 4))
    wanted, unwanted = travel([weight.t() * 2, weight.detach()])
    (wanted * unwanted.t()).sum().backward()
    assert torch.equal(wanted.grad, unwanted.t())
    assert unwanted.grad is None


# --- what travels ---

ELEMENTS = {
    "contiguous": 24, "0 dimensions": 1, "from the middle of its storage": 4, "transposed": 15, "permuted": 24,
    "channels_last": 120, "channels_last_3d": 240, "expanded": 3, "in the middle of a graph": 4, "rows with gaps": 12,
    "every second": 6, "every second of every second": 16, "expanded in front": 3, "one number expanded": 1,
    "expanded with gaps": 3, "overlapping windows": 10,
}  # fmt: skip
COPIED = {"rows with gaps", "every second", "every second of every second", "expanded with gaps"}


@pytest.mark.parametrize("name", ELEMENTS)
def test_no_gap_and_no_repetition_travels_and_a_dense_tensor_is_not_copied(name: str) -> None:
    _, (buffer,) = pack(LAYOUTS[name])
    assert buffer.numel() == ELEMENTS[name] * 4
    assert (buffer.data_ptr() == LAYOUTS[name].data_ptr()) == (name not in COPIED)
    assert not buffer.requires_grad


def test_nothing_travels_of_what_is_empty_or_no_tensor() -> None:
    assert pack((torch.empty(0, 3), 1, None, "text"))[1] == []


# --- containers ---


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    "container",
    [
        (1, 2.5, "text", None, True),
        [1, [2, [3]]],
        {"b": 1, "a": {"c": (2,)}},
        Pair(1, Pair(2, 3)),
        OrderedDict(b=1, a=2),
        (),
        None,
        7,
        (torch.float32, slice(1, 2)),
    ],
    ids=str,
)
def test_containers_and_what_is_no_tensor_arrive_as_they_were(container: Any) -> None:
    arrived = travel(container)
    assert arrived == container
    assert type(arrived) is type(container)


def test_tensors_in_containers_find_their_places() -> None:
    value = {"a": [sample(2), 5, torch.empty(0)], "b": Pair(sample(3).to(torch.bfloat16), (None, torch.tensor(True)))}
    arrived = travel(value)
    assert (arrived["a"][1], arrived["b"].second[0], type(arrived["b"])) == (5, None, Pair)
    for got, wanted in zip(pytree.tree_leaves(arrived), pytree.tree_leaves(value), strict=True):
        if isinstance(wanted, Tensor):
            assert_same(got, wanted)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (sample(2, 3), sample(3, 2)),
        (sample(2, 3), sample(3, 2).t()),
        (sample(2), sample(2).double()),
        (sample(2), sample(2).requires_grad_()),
        ((sample(2),), [sample(2)]),
        ({"a": sample(2)}, {"b": sample(2)}),
        ((sample(2), 1), (sample(2), 2)),
        ((sample(2), None), (sample(2),)),
    ],
    ids=["shape", "stride", "dtype", "requires_grad", "container", "key", "number", "length"],
)
def test_descriptions_differ_where_the_values_could_not_share_a_buffer_or_a_container(one: Any, other: Any) -> None:
    assert pack(one)[0] == pack(one)[0]
    assert pack(one)[0] != pack(other)[0]
