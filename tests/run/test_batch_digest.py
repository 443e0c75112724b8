"""A digest is the same where all values are, whatever their strides, and another wherever a bit or a place differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.run.step import batch_check
from fxpipe.run.step.batch_check import Digest

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
WHOLES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool)
DTYPES = [*FLOATS, *WHOLES, torch.complex64, torch.complex128]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def number(*values: Any) -> int:
    """Of one input, given in micro-batches."""
    return Digest([{"x": value} for value in values]).numbers()["x"]


def some(dtype: torch.dtype, rows: int = 6) -> Tensor:
    """Rows that all differ, (rows, 3); of bool, as many as can."""
    return (torch.arange(rows * 3).view(rows, 3).float() % 64).to(dtype)


# --- the formula ---


def splitmix(count: int) -> list[int]:
    """Steele, Lea and Flood 2014, figure 16, in Python's unbounded integers; seeded with 0."""
    found = []
    for place in range(1, count + 1):
        z = place * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        found.append(z ^ z >> 31)
    return found


def test_the_weights_are_those_of_splitmix() -> None:
    assert splitmix(1) == [0xE220A8397B1DCDAF]  # the first output of the authors' code for seed 0
    assert [weight % 2**64 for weight in batch_check.split_mix(torch.arange(1000)).tolist()] == splitmix(1000)


@pytest.mark.parametrize("at_a_time", [4, 6, 2**18])
def test_a_sum_is_that_of_bits_times_weights_and_wraps(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_check, "_AT_A_TIME", at_a_time)
    x = torch.tensor([[2**63 - 1, -(2**63)], [5, -1], [0, 2**62], [7, 8], [-9, 2**40]])
    flat, weights = x.flatten().tolist(), [weight | 1 for weight in splitmix(10)]
    pieces = [flat[start : start + at_a_time] for start in range(0, 10, at_a_time)]
    sums = [sum(v * w for v, w in zip(piece, weights, strict=False)) for piece in pieces]
    knuth = 6364136223846793005  # of MMIX
    wanted = sum(s * knuth**power for power, s in enumerate(reversed(sums))) % 2**64
    assert batch_check._sum_of(x).item() % 2**64 == wanted


# --- the same ---


@every_dtype
def test_strides_do_not_count(dtype: torch.dtype) -> None:
    x = some(dtype)
    aside = torch.zeros(7, 5).to(dtype)
    aside[1:, 1:4] = x
    assert number(x) == number(x.t().contiguous().t()) == number(aside[1:, 1:4]) == number(x.clone())


def test_a_broadcast_tensor_is_the_same_as_a_copy() -> None:
    row = torch.randn(1, 5)
    assert number(row.expand(4, 5)) == number(row.expand(4, 5).contiguous())


def test_a_lazily_conjugated_or_negated_tensor_is_the_same_as_a_copy() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    assert number(x.conj()) == number(x.conj().resolve_conj()) != number(x)
    assert number(x.conj().imag) == number(-x.imag) != number(x.imag)


def test_not_a_number_is_the_same_as_itself() -> None:
    assert number(torch.tensor([float("nan"), 1.0])) == number(torch.tensor([float("nan"), 1.0]))
    assert number(float("nan")) == number(float("nan"))


def test_large_tensors_are_the_same_whatever_their_strides() -> None:
    x = torch.randn(700, 1000)  # cut into several pieces
    assert number(x) == number(x.t().contiguous().t())


# --- not the same ---


@every_dtype
def test_permuted_rows_are_told_apart(dtype: torch.dtype) -> None:
    x = some(dtype)
    if dtype == torch.bool:
        x = torch.tensor([True, False, False, True, True, True])
    assert len({number(x), number(x.flip(0)), number(x.roll(1, 0)), number(x[[1, 0, 2, 3, 4, 5]])}) == 4


def test_two_rows_swapped_far_apart_are_told_apart() -> None:
    x = torch.arange(2**21).view(-1, 4)
    swapped = x.clone()
    swapped[[3, 2**19 - 2]] = x[[2**19 - 2, 3]]
    assert number(x) != number(swapped)


def test_a_bit_anywhere_is_told() -> None:
    x = torch.zeros(2**18 + 10)
    found = set()
    for place in (0, 1, 2**18 - 1, 2**18, 2**18 + 9):
        changed = x.clone()
        changed[place] = 1e-45
        found.add(number(changed))
    assert len(found | {number(x)}) == 6


def test_signed_zeros_and_payloads_are_told_apart() -> None:
    assert number(torch.tensor([0.0])) != number(torch.tensor([-0.0]))
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert number(payloads[:1]) != number(payloads[1:])


def test_two_tensors_swapped_are_told_apart() -> None:
    a, b = torch.randn(3), torch.randn(3)
    assert number([a, b]) != number([b, a])
    assert number({"a": a, "b": b}) != number({"a": b, "b": a})
    assert number(a, b) != number(b, a)
    swapped = Digest([{"x": b, "y": a}]).numbers(), Digest([{"x": a, "y": b}]).numbers()
    assert swapped[0] != swapped[1]


@pytest.mark.parametrize("pair", [(1, 2), (1, 1.0), (1, True), (0.0, -0.0), ("a", "b"), (1j, 2j)], ids=str)
def test_python_values_are_told_apart(pair: tuple[Any, Any]) -> None:
    assert number(pair[0]) != number(pair[1])
    assert number([torch.ones(2), pair[0]]) != number([torch.ones(2), pair[1]])


# --- the edges ---


@every_dtype
@pytest.mark.parametrize("shape", [(), (3, 0), (0, 3)], ids=str)
def test_any_shape_has_a_number(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert 0 <= number(torch.zeros(shape).to(dtype)) < 2**56


def test_what_is_none_has_no_number_and_other_objects_have_their_type_alone() -> None:
    assert Digest([{"x": None, "y": torch.ones(1)}]).numbers().keys() == {"y"}
    assert number(object()) == number(object())
    assert Digest([]).numbers() == {}


def test_rows_are_in_tensors_with_dimensions() -> None:
    given = {"image": torch.ones(2, 3), "scale": torch.tensor(2.0), "flag": True, "more": {"ids": [torch.ones(2)]}}
    assert Digest([given]).with_rows == {"image", "more"}


def test_a_batch_is_not_kept() -> None:
    import weakref

    x = torch.randn(4)
    seen = weakref.ref(x)
    digest = Digest([{"x": x}])
    del x
    assert seen() is None
    assert digest.numbers().keys() == {"x"}
