"""Rules: count the rows of an input, split the input into micro-batches, and join them again, by ``batch_dim``.

Takes: an input's entry in ``batch_dim`` and its value. Gives: a rule, an object with five methods: ``check``,
``length``, ``rows``, ``split`` and ``join``.

The entry in ``batch_dim`` decides the rule:

- None: ``NotSplit``, one value for all micro-batches.
- A dimension (0 by default): ``InRows``, tensors with the batch's rows in this dimension.
- ``Packed``: ``InPackedRows``, tensors with a counted number of rows for each row of the batch.
- ``Packed``, and the input is a list: ``InEntries``, a counted number of entries for each row of the batch.
- ``Offsets``: ``ByOffsets``, the n + 1 offsets of n sequences.
- A dict: ``InDict``, a dict with a rule for each of its values.

``split`` and ``join`` work on tensors and on their descriptions alike, so that ranks can split a description. ``join``
undoes ``split``. A rule knows one input; ``rows`` compares several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fxpipe.batch.block_masks import block_mask_part, block_mask_rows
from fxpipe.batch.objects import PLAIN, has_numbers
from fxpipe.errors import RunError, nearest
from fxpipe.graph.gathering import concatenated
from fxpipe.packed import BatchDim, Offsets, Packed, Rule, rule_at, written
from fxpipe.specs import TensorSpec
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.tensors import one_level
from fxpipe.validation import is_mapping, shown

PartSizes = Mapping[str, tuple[int, ...]]
"""Path of a counted input → the size of each micro-batch's part of it. The empty path: each micro-batch's rows."""


@dataclass(frozen=True)
class NotSplit:
    """An input, or a value in a dict input, that each micro-batch takes unsplit. Other rules override the methods.

    A ``spec`` is an input with a ``TensorSpec`` in place of each tensor; a ``value`` has tensors or ``TensorSpec``.
    """

    path: str

    def each(self, spec: Any) -> Iterator[tuple[NotSplit, Any]]:
        """The rule and the input; for a dict input with a rule for each value, these rules and the values."""
        yield self, spec

    def check(self, value: Any) -> None:
        """RunError for a value that cannot be split by the rule."""

    def length(self, spec: Any) -> int | None:
        """The number of rows, entries or sequences that are split; None if nothing is split."""
        return None

    def rows(self, length: int) -> int | None:
        """The number of rows of a batch whose input has this length; None if the input does not decide the number."""
        return None

    def split(self, value: Any, sizes: PartSizes) -> list[Any]:
        """The part of each micro-batch. Parts are views; parts of offsets are copies."""
        return [value] * len(sizes[""])

    def join(self, parts: Sequence[Any]) -> Any:
        """The value joined from these parts."""
        return parts[0]


@dataclass(frozen=True)
class InRows(NotSplit):
    """An input whose tensors have the batch's rows in a dimension."""

    dim: int

    def check(self, value: Any) -> None:
        # transformers' BatchFeature is a mapping, and a leaf to pytree.
        if is_mapping(value) and not pytree.tree_structure(value).is_leaf():
            for name, inner in value.items():
                InRows(f"{self.path}.{name}", self.dim).check(inner)
            return
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, (Tensor, *PLAIN)) and has_numbers(leaf):
                raise RunError(
                    f"input {self.path!r} is or holds a {type(leaf).__name__}, which is not cut as tensors are; pass "
                    "tensors (torch.as_tensor, dict()); or make it for each micro-batch, and call step_microbatches; "
                    f"or write {written(self.path, 'None')} where each micro-batch takes all of it, or "
                    f"{written(self.path, 'fxpipe.Packed(1)')} where it is a list with an entry for each row"
                )

    def length(self, spec: Any) -> int | None:
        shapes = [leaf.shape for leaf in pytree.tree_leaves(spec) if isinstance(leaf, TensorSpec) and leaf.shape]
        for shape in shapes:
            if not -len(shape) <= self.dim < len(shape):
                raise RunError(
                    f"input {self.path!r} of shape {list(shape)} has no dimension {self.dim}; see batch_dim="
                )
        lengths = sorted({shape[self.dim] for shape in shapes})
        if len(lengths) > 1:
            raise RunError(
                f"input {self.path!r} holds tensors of {lengths[0]} and of {lengths[1]} rows; where it is a list with "
                f"an entry for each row, write {written(self.path, 'fxpipe.Packed(1)')}"
            )
        return lengths[0] if lengths else None

    def rows(self, length: int) -> int | None:
        return length

    def split(self, value: Any, sizes: PartSizes) -> list[Any]:
        own = sizes.get(self.path, sizes[""])
        if isinstance(value, Tensor):  # most inputs are: pytree would take ten times as long
            return list(self._split_leaf(value, own))
        leaves, spec = pytree.tree_flatten(value)
        columns = [self._split_leaf(leaf, own) for leaf in leaves]
        return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(len(own))]

    def _split_leaf(self, leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """The parts of a leaf with these sizes. A number, and a tensor without dimensions, is a part of every
        micro-batch."""
        if isinstance(leaf, TensorSpec):
            return [leaf.of_size(self.dim, size) for size in sizes]
        if (block_rows := block_mask_rows(leaf) or 1) > 1:
            if block_rows != (rows := sum(sizes)):
                raise RunError(f"input {self.path!r} is a BlockMask of {block_rows} rows, and the batch has {rows}")
            return [block_mask_part(leaf, start, size) for start, size in _spans(sizes)]
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(sizes) == 1:
            return [leaf] * len(sizes)
        return torch.split(leaf, list(sizes), self.dim)

    def join(self, parts: Sequence[Any]) -> Any:
        return pytree.tree_map(self._join_leaves, *parts)

    def _join_leaves(self, *leaves: Any) -> Any:
        """The concatenation of a leaf's parts; the first part for a leaf without rows."""
        first = leaves[0]
        if isinstance(first, TensorSpec) and first.shape:
            return first.resized(self.dim, sum(leaf.shape[self.dim] for leaf in leaves))
        return concatenated(leaves, self.dim) if isinstance(first, Tensor) and first.dim() else first


@dataclass(frozen=True)
class InPackedRows(InRows):
    """An input whose tensors have a different number of rows for each row of the batch; counts give the numbers."""

    packed: Packed

    def check(self, value: Any) -> None:
        pass

    def length(self, spec: Any) -> int | None:
        for path, _ in lists_in(self.path, spec):
            name = written(path, "fxpipe.Packed(...)")
            raise RunError(f"input {self.path!r} has a list in a dict; name the list, {name}")
        return super().length(spec)

    def rows(self, length: int) -> int | None:
        counts = self.packed.counts
        if self.packed.of is not None or not isinstance(counts, int):
            return None
        if length % counts:
            raise RunError(f"input {self.path!r} has {length} rows, which are not {counts} for each row of a batch")
        return length // counts


@dataclass(frozen=True)
class InEntries(InPackedRows):
    """A list, or tuple, with a counted number of entries for each row of the batch."""

    def length(self, spec: Any) -> int:
        return len(spec)

    def split(self, value: Any, sizes: PartSizes) -> list[Any]:
        return [value[start : start + size] for start, size in _spans(sizes[self.path])]

    def join(self, parts: Sequence[Any]) -> Any:
        return type(parts[0])(entry for part in parts for entry in part)


@dataclass(frozen=True)
class ByOffsets(InRows):
    """An input with the n + 1 offsets of n sequences. Parts overlap by an offset, and each part begins with 0."""

    of: str | None

    def length(self, spec: Any) -> int | None:
        offsets = super().length(spec)
        return offsets and offsets - 1

    def rows(self, length: int) -> int | None:
        return length if self.of is None else None

    def split(self, value: Any, sizes: PartSizes) -> list[Any]:
        spans = _spans(sizes[self.path])
        if isinstance(value, TensorSpec):
            return [replace(value, shape=(size + 1,), stride=(1,)) for _, size in spans]
        return [value[start : start + size + 1] - value[start] for start, size in spans]

    def join(self, parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], TensorSpec):
            return replace(parts[0], shape=(sum(part.shape[0] - 1 for part in parts) + 1,))
        joined = list(parts[:1])  # each later part continues at the end of the part before
        for part in parts[1:]:
            joined.append(part[1:] + joined[-1][-1])
        return torch.cat(joined)


@dataclass(frozen=True)
class InDict(NotSplit):
    """A dict input with a rule for each value. ``written``: the rules that ``batch_dim`` has for these values."""

    written: Mapping[str, Any]

    def _rule(self, name: str, value: Any) -> NotSplit:
        return _rule_of(f"{self.path}.{name}", self.written.get(name, 0), value)

    def each(self, spec: Any) -> Iterator[tuple[NotSplit, Any]]:
        if not is_mapping(spec):
            raise RunError(f"batch_dim names what is in input {self.path!r}, which is {shown(spec)} and no dict")
        others = [name for name in spec if name not in self.written]
        for name in self.written:
            if name not in spec and (hint := nearest(name, others)).startswith("; did"):
                raise RunError(f"batch_dim names {name!r}, which is not in input {self.path!r}{hint}")
        for name, value in spec.items():
            yield from self._rule(name, value).each(value) if value is not None else ()

    def check(self, value: Any) -> None:
        if not is_mapping(value) or pytree.tree_structure(value).is_leaf():
            InRows(self.path, 0).check(value)
        else:
            for name, inner in value.items():
                self._rule(name, inner).check(inner)

    def split(self, value: Any, sizes: PartSizes) -> list[Any]:
        columns = [self._rule(name, inner).split(inner, sizes) for name, inner in value.items()]
        return [_with_values(value, parts) for parts in zip(*columns, strict=True)]

    def join(self, parts: Sequence[Any]) -> Any:
        first = parts[0]
        return _with_values(first, [self._rule(n, first[n]).join([part[n] for part in parts]) for n in first])


def rule_of(batch_dim: BatchDim, name: str, value: Any) -> NotSplit:
    """The rule of an input. The kind of rule depends on the input's entry in ``batch_dim``, and on its value."""
    return _rule_of(name, rule_at(batch_dim, name), value)


def _rule_of(path: str, rule: Rule, value: Any) -> NotSplit:
    """The rule at a path, for its entry in ``batch_dim``: see the table of the module."""
    if value is None or rule is None:
        return NotSplit(path)
    if isinstance(rule, Mapping):
        return InDict(path, rule)
    if isinstance(rule, Offsets):
        return ByOffsets(path, 0, rule.of)
    if isinstance(rule, Packed):
        return (InEntries if is_entries(value) else InPackedRows)(path, rule.dim, rule)
    return InRows(path, int(rule))


def is_entries(value: Any) -> bool:
    """Whether a value is a list, or a tuple without names."""
    return isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields"))


def sequences_in(path: str, spec: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """(path, list) for each list, or tuple without names, that is an input or a value in a dict input."""
    if is_mapping(spec):
        for name, value in spec.items():
            yield from sequences_in(f"{path}.{name}", value)
    elif is_entries(spec) and spec:
        yield path, spec


def lists_in(path: str, spec: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """(path, list) for each list of tensors or of dicts that is an input or a value in a dict input."""
    for inner, listed in sequences_in(path, spec):
        if all(isinstance(entry, TensorSpec) or is_mapping(entry) for entry in listed):
            yield inner, listed


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, size) of each part."""
    return zip(accumulate(sizes, initial=0), sizes, strict=False)


def _with_values(mapping: Any, values: Sequence[Any]) -> Any:
    """A dict input of the same class with new values."""
    return pytree.tree_unflatten(list(values), one_level(mapping)[1])
