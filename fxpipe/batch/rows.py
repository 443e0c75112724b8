"""Rows: the counts of packed inputs, as a rank reads them, the number of rows of a batch, and the rows of each
micro-batch.

Takes: a rank's inputs, or descriptions, and ``batch_dim=``. Gives: ``counts_of`` (path of a packed input → a count for
each row), ``row_count``, and ``split_rows``.

1. A rank reads the counts from its own inputs: another input, offsets, or a function of inputs. This waits for a GPU.
2. ``merge_counts`` joins the counts of all ranks, which must be equal.
3. ``row_count`` asks the rule of each input for its rows. All inputs that have rows must have as many.
4. The counts must fit: one for each row, which sum to the length of their input.
5. ``split_rows`` divides the rows.

Lists that may have an entry for each row, or all rows in each tensor, are refused: the user says which
(``fxpipe.Packed(1)``, or 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fxpipe.batch.description import Description, example_of
from fxpipe.batch.rules import NotSplit, lists_in, rule_of, sequences_in
from fxpipe.errors import RunError
from fxpipe.packed import BatchDim, Offsets, Packed, counted, read_by, rule_at, written
from fxpipe.specs import TensorSpec
from fxpipe.torch_compat import pytree
from fxpipe.validation import is_mapping, shown

Numbers = tuple[int, ...]
"""A count for each row."""
Counts = Mapping[str, Numbers]
"""Path of an input that is cut by counts → its count for each row of the batch, or of another packed input."""


def counts_of(values: Mapping[str, Any], batch_dim: BatchDim) -> dict[str, Numbers]:
    """The counts that this rank can read from its inputs. RunError for numbers that are no counts."""
    # 1. read what this rank has
    read = {path: _read(path, rule, values, batch_dim) for path, rule in counted(batch_dim).items()}
    return {path: numbers for path, numbers in read.items() if numbers is not None}


def check_cut(values: Mapping[str, Any], batch_dim: BatchDim) -> None:
    """RunError for an input that cannot be split: each micro-batch would take all of it."""
    for name, value in values.items():
        rule_of(batch_dim, name, value).check(value)


def _read(path: str, rule: Packed | Offsets, values: Mapping[str, Any], batch_dim: BatchDim) -> Numbers | None:
    """The counts of one packed input; None if they are one number for all rows, or if this rank lacks what they are
    read from."""
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
    # 2. of all ranks
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


# --- the rows of a batch


def rules_in(description: Description, batch_dim: BatchDim) -> dict[str, tuple[NotSplit, Any]]:
    """Path → the rule of an input, or of a value in a dict input, and the input with ``TensorSpec`` for tensors."""
    inputs = example_of(description).items()
    return {
        rule.path: (rule, part) for name, spec in inputs for rule, part in rule_of(batch_dim, name, spec).each(spec)
    }


def row_count(description: Description, batch_dim: BatchDim, counts: Counts | None = None) -> int | None:
    """The number of rows of a batch; None if no input gives it. ``counts``: merged counts; None: no check of counts.

    ``description``: the ranks' merged description, without this rank's objects, so that all ranks raise alike.

    RunError if inputs have different numbers of rows, or counts do not fit their input.
    """
    # 3. All inputs with rows, and all counts for the batch's rows, must give the same number of rows.
    rules = rules_in(description, batch_dim)
    lengths = {path: rule.length(spec) for path, (rule, spec) in rules.items()}
    by_input = {path: rules[path][0].rows(length) for path, length in lengths.items() if length is not None}
    for path, rule in counted(batch_dim).items():
        if lengths.get(path, 0) is None:
            raise RunError(
                f"input {path!r} is named in batch_dim as packed, and holds no tensor with rows to be counted"
            )
        if rule.of is None and path in (counts or {}):
            by_input[f"counts of {path}"] = len((counts or {})[path])
    rows = {name: number for name, number in by_input.items() if number is not None}
    specs = {path: rules[path][1] for path in rows if path in rules and not _is_named(path, batch_dim)}
    _check_lists(specs, rows)
    if len(set(rows.values())) > 1:
        apart = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise RunError(
            f"the inputs have different numbers of rows ({apart}); what is not cut into micro-batches is named in "
            "batch_dim={'name': None}, and what has several rows for one of the batch's, or none, in "
            "batch_dim={'name': fxpipe.Packed(counts)}"
        )
    number = next(iter(rows.values()), None)
    if counts is not None:  # 4. do the counts fit
        _check_counts(lengths, number, counts, batch_dim)
    return number


def _check_lists(specs: Mapping[str, Any], rows: Mapping[str, int]) -> None:
    """RunError for a list that may have an entry for each row. ``specs``: the inputs that ``batch_dim`` does not name.
    ``rows``: the number of rows that each input gives."""
    # A list of images, 3 × height × width, looks like a list of tensors with 3 rows each. torchvision's detectors take
    # a list of images, and a DataLoader makes a list of tensors with rows.
    lists = {path: list(lists_in(path, spec)) for path, spec in specs.items()}
    is_alone = all(map(lists.get, rows))
    for path in specs:
        for inner, listed in lists[path]:
            if _may_be_rows(listed, rows[path], is_alone):
                raise RunError(
                    f"input {inner!r} is a list of {len(listed)}, and it is not clear where it has the batch's rows: "
                    f"write {written(inner, 'fxpipe.Packed(1)')} where it has an entry for each row, or "
                    f"{written(inner, '0')} where each of its tensors has all rows in dimension 0"
                )


def whole_lists(description: Description, batch_dim: BatchDim, rows: int) -> list[str]:
    """The paths of lists without tensors whose length is the batch's rows, and that ``batch_dim`` does not name.

    A ``DataLoader`` makes such lists, and tuples of strings. A tuple of numbers is a shape, or a mean.
    """
    return [
        path
        for name, (_, spec) in rules_in(description, batch_dim).items()
        for path, listed in sequences_in(name, spec)
        if len(listed) == rows
        and (isinstance(listed, list) or isinstance(listed[0], str))
        and not _is_named(path, batch_dim)
        and not any(isinstance(leaf, TensorSpec) for leaf in pytree.tree_leaves(listed))
    ]


def _is_named(path: str, batch_dim: BatchDim) -> bool:
    """Whether ``batch_dim`` has an entry for a path."""
    rule: Any = batch_dim
    for name in path.split("."):
        if not isinstance(rule, Mapping) or name not in rule:
            return False
        rule = rule[name]
    return True


def _may_be_rows(listed: Sequence[Any], rows: int, is_alone: bool) -> bool:
    """Whether a list may have an entry for each row. A list of dicts may; a list of tensors may if it has as many
    tensors as there are rows, or if the tensors are images and no other input has rows."""
    if any(map(is_mapping, listed)):
        return True
    dims = {len(entry.shape) for entry in listed}
    if len(dims) > 1 or min(dims) < 2 or len({entry.dtype for entry in listed}) > 1:
        return False
    return len(listed) == rows or (is_alone and dims == {3})


def _check_counts(lengths: Mapping[str, int | None], rows: int | None, counts: Counts, batch_dim: BatchDim) -> None:
    """RunError if a row has no count, or if counts do not sum to the length of their input."""
    # counted() yields inputs that are packed for the batch's rows before inputs that are packed for rows of the former.
    rules = counted(batch_dim)
    for path, rule in rules.items():
        length = lengths.get(path)
        if length is None:  # not in this batch
            continue
        owner, wanted = (repr(rule.of), lengths.get(rule.of)) if rule.of in rules else ("the batch", rows)
        if wanted is None:
            raise RunError(f"input {path!r} is counted for the rows of {owner}, which no rank was given")
        numbers = _numbers_of(path, rule, wanted, counts)
        wanted_for = f"for the {wanted} rows of {owner}"
        if len(numbers) != wanted:
            hint = "" if rule.of is not None else "; where they are for the rows of another packed input, write of="
            raise RunError(f"the counts of {path!r} are {len(numbers)} numbers {wanted_for}{hint}")
        if isinstance(rule, Packed) and sum(numbers) != length:
            raise RunError(
                f"the counts of {path!r} sum to {sum(numbers)} {wanted_for}, and it has {length} rows; they are "
                f"{shown(list(numbers))}"
            )


def _numbers_of(path: str, rule: Packed | Offsets, rows: int, counts: Counts) -> Sequence[int]:
    """The counts of a packed input for so many rows. RunError if no rank could read them."""
    if isinstance(rule, Packed) and isinstance(rule.counts, int):
        return (rule.counts,) * rows
    if path in counts:
        return counts[path]
    read = ", ".join(read_by(rule)) if isinstance(rule, Packed) else path
    raise RunError(
        f"input {path!r} is cut by counts that are read from {read}, and no rank was given all of it; give it to the "
        f"ranks that are given {path!r}"
    )


# --- the split


def split_rows(rows: int | None, microbatches: int) -> tuple[int, ...]:
    """The rows of each micro-batch, cut as by ``torch.tensor_split``; 1 each if no input has rows.

    RunError for 0 rows, and for fewer rows than micro-batches.

    >>> split_rows(10, 4)
    (3, 3, 2, 2)
    """
    if rows is None:
        return (1,) * microbatches
    if not rows:
        raise RunError(
            f"a batch of 0 rows has no micro-batch; leave it out on all ranks, or pass {microbatches} rows or more"
        )
    if rows < microbatches:
        raise RunError(
            f"a batch of {rows} rows cannot be cut into {microbatches} micro-batches; "
            f"pass at least {microbatches} rows, or compile with microbatches={rows}"
        )
    # 5. the first micro-batches take the rest
    return tuple(rows // microbatches + (number < rows % microbatches) for number in range(microbatches))
