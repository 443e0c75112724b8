"""Rows: the number of rows of a batch, from its inputs, and of each micro-batch; checks counts against their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fxpipe.batch.counts import Counts
from fxpipe.batch.description import Description, example_of
from fxpipe.batch.rules import NotSplit, lists_in, rule_of, sequences_in
from fxpipe.errors import RunError
from fxpipe.like import TensorLike
from fxpipe.packed import BatchDim, Offsets, Packed, counted, read_by, written
from fxpipe.torch_compat import pytree
from fxpipe.validation import is_mapping, shown


def rules_in(description: Description, batch_dim: BatchDim) -> dict[str, tuple[NotSplit, Any]]:
    """Path → the rule of an input, or of a value in a dict input, and the input with ``TensorLike`` for tensors."""
    inputs = example_of(description).items()
    return {
        rule.path: (rule, part) for name, like in inputs for rule, part in rule_of(batch_dim, name, like).each(like)
    }


def row_count(description: Description, batch_dim: BatchDim, counts: Counts | None = None) -> int | None:
    """The number of rows of a batch; None if no input gives it. ``counts``: merged counts; None: no check of counts.

    ``description``: the ranks' merged description, without this rank's objects, so that all ranks raise alike.

    RunError if inputs have different numbers of rows, or counts do not fit their input.
    """
    # All inputs with rows, and all counts for the batch's rows, must give the same number of rows.
    rules = rules_in(description, batch_dim)
    lengths = {path: rule.length(like) for path, (rule, like) in rules.items()}
    by_input = {path: rules[path][0].rows(length) for path, length in lengths.items() if length is not None}
    for path, rule in counted(batch_dim).items():
        if lengths.get(path, 0) is None:
            raise RunError(
                f"input {path!r} is named in batch_dim as packed, and holds no tensor with rows to be counted"
            )
        if rule.of is None and path in (counts or {}):
            by_input[f"counts of {path}"] = len((counts or {})[path])
    rows = {name: number for name, number in by_input.items() if number is not None}
    likes = {path: rules[path][1] for path in rows if path in rules and not _is_named(path, batch_dim)}
    _check_lists(likes, rows)
    if len(set(rows.values())) > 1:
        apart = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise RunError(
            f"the inputs have different numbers of rows ({apart}); what is not cut into micro-batches is named in "
            "batch_dim={'name': None}, and what has several rows for one of the batch's, or none, in "
            "batch_dim={'name': fxpipe.Packed(counts)}"
        )
    number = next(iter(rows.values()), None)
    if counts is not None:
        _check_counts(lengths, number, counts, batch_dim)
    return number


def _check_lists(likes: Mapping[str, Any], rows: Mapping[str, int]) -> None:
    """RunError for a list that may have an entry for each row. ``likes``: the inputs that ``batch_dim`` does not name.
    ``rows``: the number of rows that each input gives."""
    # A list of images, 3 × height × width, looks like a list of tensors with 3 rows each. torchvision's detectors take
    # a list of images, and a DataLoader makes a list of tensors with rows.
    lists = {path: list(lists_in(path, like)) for path, like in likes.items()}
    is_alone = all(map(lists.get, rows))
    for path in likes:
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
        for name, (_, like) in rules_in(description, batch_dim).items()
        for path, listed in sequences_in(name, like)
        if len(listed) == rows
        and (isinstance(listed, list) or isinstance(listed[0], str))
        and not _is_named(path, batch_dim)
        and not any(isinstance(leaf, TensorLike) for leaf in pytree.tree_leaves(listed))
    ]


def _is_named(path: str, batch_dim: BatchDim) -> bool:
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
    """The rows of each micro-batch, cut as by ``torch.tensor_split``; 1 each if no input has rows."""
    if rows is None:
        return (1,) * microbatches
    if rows < microbatches:
        raise RunError(
            f"a batch of {rows} rows cannot be cut into {microbatches} micro-batches; "
            f"pass at least {microbatches} rows, or compile with microbatches={max(rows, 1)}"
        )
    return tuple(rows // microbatches + (number < rows % microbatches) for number in range(microbatches))
