"""Counts: the number of a packed input's rows for each row of the batch, as a rank reads it from its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fxpipe.batch.rules import rule_of
from fxpipe.errors import RunError
from fxpipe.packed import BatchDim, Offsets, Packed, counted, read_by, rule_at, written
from fxpipe.validation import is_mapping, shown

Numbers = tuple[int, ...]
"""A count for each row."""
Counts = Mapping[str, Numbers]
"""Path of an input that is cut by counts → its count for each row of the batch, or of another packed input."""


def counts_of(values: Mapping[str, Any], batch_dim: BatchDim) -> dict[str, Numbers]:
    """The counts that this rank can read from its inputs. RunError for numbers that are no counts."""
    read = {path: _read(path, rule, values, batch_dim) for path, rule in counted(batch_dim).items()}
    return {path: numbers for path, numbers in read.items() if numbers is not None}


def check_cut(values: Mapping[str, Any], batch_dim: BatchDim) -> None:
    """RunError for an input that cannot be split: each micro-batch would take all of it."""
    for name, value in values.items():
        rule_of(batch_dim, name, value).check(value)


def _read(path: str, rule: Packed | Offsets, values: Mapping[str, Any], batch_dim: BatchDim) -> Numbers | None:
    if isinstance(rule, Offsets):
        return _lengths(path, _at(values, path))
    if isinstance(rule.counts, int):
        return None
    if isinstance(rule.counts, str):
        counts, source = _at(values, rule.counts), rule_at(batch_dim, rule.counts)
        if isinstance(source, Offsets):
            return _lengths(rule.counts, counts)
        if isinstance(counts, list | tuple) and not isinstance(source, Packed):
            raise RunError(
                f"the counts of {path!r} are in {rule.counts!r}, a {type(counts).__name__} of Python's, and each micro-"
                f"batch would be given all of it; pass a tensor, or write {written(rule.counts, 'fxpipe.Packed(1)')}"
            )
        return None if counts is None else _numbers(path, counts)
    # A function of inputs: if this rank lacks a required input, another rank counts.
    inputs = {name: values[name] for name in read_by(rule) if values.get(name) is not None}
    if any(needed and name not in inputs for name, needed in read_by(rule).items()):
        return None
    try:
        numbers = rule.counts(**inputs)
    except Exception as error:
        raise RunError(f"what counts {path!r} failed: {type(error).__name__}: {error}") from error
    return _numbers(path, numbers)


def _at(values: Mapping[str, Any], path: str) -> Any:
    """The value at a path such as "images", or "batch.images" in a dict input; None if it is absent."""
    value: Any = values
    for name in path.split("."):
        value = value.get(name) if is_mapping(value) else None
    return value


def _numbers(path: str, counts: Any) -> Numbers:
    """Counts as Python numbers; waits for a GPU. RunError for other values."""
    try:
        # a list becomes a tensor on the CPU, not on torch's default device
        tensor = counts if isinstance(counts, Tensor) else torch.as_tensor(counts, device="cpu")
        numbers = tuple(tensor.tolist())
    except Exception:  # any error, such as that of a meta tensor, means that these are no numbers
        numbers = (None,)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise RunError(
            f"the counts of {path!r} are {shown(counts)}; they are whole numbers from 0 in one dimension, one for each "
            "row, in a tensor or a list"
        )
    return tuple(map(int, numbers))


def _lengths(path: str, offsets: Any) -> Numbers | None:
    """The lengths of the sequences between offsets."""
    if offsets is None:
        return None
    numbers = _numbers(path, offsets) if isinstance(offsets, Tensor) else ()
    lengths = tuple(after - before for before, after in pairwise(numbers))
    if not numbers or numbers[0] != 0 or any(length < 0 for length in lengths):
        raise RunError(
            f"input {path!r} is {shown(offsets)}; offsets are a 1-dimensional tensor of integers that begin with 0, "
            "and none is below the one before it"
        )
    return lengths


def merge_counts(everyone: Sequence[Counts]) -> Counts:
    """The merged counts of all ranks of a pipe group; RunError if the counts of two ranks differ."""
    merged: dict[str, tuple[int, Numbers]] = {}
    for rank, counts in enumerate(everyone):
        for path, numbers in counts.items():
            first, its = merged.setdefault(path, (rank, numbers))
            if numbers != its:
                raise RunError(
                    f"the counts of {path!r} differ between the ranks of a pipe group: rank {first} counts "
                    f"{shown(its)}, rank {rank} {shown(numbers)}; all of them pass the same batch"
                )
    return {path: numbers for path, (_, numbers) in merged.items()}
