"""Outputs: joins the outputs of micro-batches to the whole batch's output, and sums their numbers over replicas.

Takes: the output of each micro-batch, on the ranks that make it. Gives: one output, on all ranks of the pipe group.

1. ``OutputRows.join`` joins outputs of the same structure, leaf by leaf. Tensors with rows are concatenated, counts
   (integers) are added, other numbers are averaged by weight.
2. A tensor whose rows are in no known dimension stays a list, with a tensor for each micro-batch; a line on stderr says
   so.
3. ``over_replicas`` sums the numbers over replicas, in one all-reduce.
4. ``from_rank`` sends the output to the other ranks of the pipe group.

For example, logits of shapes [2, 5] and [1, 5], and losses 1.0 and 4.0 with weights ⅔ and ⅓, become [3, 5] and 2.0.

Rows stay on their replica: a replica's output has the rows of its own batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fxpipe.batch.batch import Batch
from fxpipe.batch.group_inputs import beside, have_sizes, shapes_of
from fxpipe.batch.rows import rules_in
from fxpipe.batch.rules import InEntries, InPackedRows, InRows, is_entries
from fxpipe.distributed.transport import Transport, differing, member
from fxpipe.errors import RunError
from fxpipe.graph.gathering import of_groups
from fxpipe.graph.packing import Meta, allocate, pack, unpack
from fxpipe.progress import log
from fxpipe.stage.loss import Sum, is_mean, step_dtype
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.tensors import one_level, tensors_in
from fxpipe.validation import is_mapping, is_number, shown

Where = tuple[Any, ...]
"""The path of a value in an output: the key or the index in each container around the value."""


@dataclass(frozen=True, eq=False)
class Entries:
    """A list with an entry for each row; an entry's tensors and numbers belong to its row only. A leaf for pytree."""

    values: Sequence[Any]


@dataclass(frozen=True)
class OutputRows:
    """The number of rows in the outputs of each micro-batch, or group of micro-batches, and possible row dimensions.

    ``along``: the inputs' row dimensions, in addition to dimension 0; empty if all inputs are packed. ``packed``:
    (dimension, sizes) of packed inputs: an output may have the rows of a packed input, such as tokens. ``in_lists``:
    whether an input is a list with an entry for each row, so that an output may be such a list; a list of dicts always
    may. ``logged``: the paths of outputs that a log line has reported as lists.
    """

    sizes: Sequence[int]
    along: Sequence[int]
    packed: Sequence[tuple[int, Sequence[int]]] = ()
    in_lists: bool = False
    logged: set[Where] = field(default_factory=set)

    @staticmethod
    def from_batch(batch: Batch, group: int, sizes: Sequence[int], logged: set[Where]) -> OutputRows:
        """The rows of a batch's outputs. ``group``: the number of micro-batches in each output."""
        rules = list(rules_in(batch.given[0], batch.batch_dim).values())
        along = {rule.dim for rule, spec in rules if type(rule) is InRows and rule.length(spec) is not None}
        packed = [rule for rule, _ in rules if type(rule) is InPackedRows]
        in_lists = any(isinstance(rule, InEntries) for rule, _ in rules)
        several = [(rule.dim, of_groups(batch.part_sizes[rule.path], group)) for rule in packed]
        return OutputRows(sizes, sorted(along), several, in_lists, logged)

    def dims_in(self, column: Sequence[Tensor]) -> list[int]:
        """The dimensions in which all parts have their micro-batches' rows, or the rows of a packed input."""
        packed = [dim for dim, sizes in self.packed if have_sizes(column, dim, sizes)]
        own = (
            [dim for dim in (*self.along, 0) if have_sizes(column, dim, self.sizes)] if self.along or not packed else []
        )
        return list(dict.fromkeys(dim % column[0].dim() for dim in (*own, *packed)))

    def are_entries(self, parts: Sequence[Sequence[Any]], where: Where) -> bool:
        """Whether the micro-batches' lists have an entry for each row. RunError in doubt.

        A list without an entry for each row is a container: its tensors have all rows, or equal shapes in all parts.
        """
        is_of_rows = self.in_lists or all(is_mapping(entry) for part in parts for entry in part)
        if not is_of_rows or [len(part) for part in parts] != list(self.sizes):
            return False
        # Lists of different lengths or structures cannot be containers of the same tensors: each entry is for a row.
        structures = {str(pytree.tree_structure(part)) for part in parts}
        if len(parts) == 1 or len(set(self.sizes)) > 1 or len(structures) > 1:
            return True
        columns = list(zip(*map(pytree.tree_leaves, parts), strict=True))
        tensors = [column for column in columns if all(isinstance(leaf, Tensor) for leaf in column)]
        if not tensors:
            return self.in_lists and isinstance(parts[0], list)
        tall = [column for column in tensors if all(leaf.dim() for leaf in column)]
        without_rows = [column for column in tall if not self.dims_in(column)]
        have_none = tall and len(without_rows) == len(tall)
        if have_none or any(len({leaf.shape for leaf in column}) > 1 for column in without_rows):
            return True
        if tall and self.in_lists and self.sizes[0] == 1 and all(map(is_mapping, parts[0])):
            return True  # a detector's result with a box for each image
        # Entries have tensors of equal shapes; a container, such as (logits, hidden states), has different shapes.
        if tall and not without_rows and all(len(set(map(_shapes_in, part))) > 1 for part in parts):
            return False
        shapes = [list(tensor.shape) for tensor in tensors_in(parts[0])]
        raise RunError(
            f"{_called(where)} is a {type(parts[0]).__name__} of {len(parts[0])} for a micro-batch of as many rows, "
            f"with tensors of shapes {', '.join(map(str, shapes))}, so that it could have an entry for each row, or "
            "all rows in each of its tensors; take another number of micro-batches, or return a dict of tensors"
        )

    def join(self, outputs: Sequence[Any], shares: Sequence[float], where: Where = ()) -> Any:
        """The whole batch's output: rows are concatenated, integers added, other numbers averaged by weight in at least
        float32; other values are the first micro-batch's.

        ``shares``: the micro-batches' weights in means. ``where``: the path of ``outputs`` in the model's output.
        Lists with an entry for each row are joined to a single list, in ``Entries``. Tensors whose rows are neither in
        dimension 0 nor in the inputs' dimensions become a list of tensors. RunError if two dimensions may be meant.
        """
        # 1. lists of entries first, then containers, then leaves
        first = outputs[0]
        if all(map(is_entries, outputs)) and self.are_entries(outputs, where):
            return Entries(type(first)(entry for part in outputs for entry in part))
        flat = [one_level(output, Sum) for output in outputs]
        spec = flat[0][1]
        if len({str(spec) for _, spec in flat}) > 1:
            raise RunError(
                f"{_called(where)} has another structure for each micro-batch or group of them: "
                f"{shown([str(spec) for _, spec in flat])}; return a list with a dict for each row, or tensors"
            )
        if spec.is_leaf():
            return self._join_leaf(outputs, shares, where)
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        names = list(first) if is_mapping(first) and len(first) == len(columns) else range(len(columns))
        joined = [self.join(column, shares, (*where, name)) for name, column in zip(names, columns, strict=True)]
        return pytree.tree_unflatten(joined, spec)

    def _join_leaf(self, column: Sequence[Any], shares: Sequence[float], where: Where) -> Any:
        """One leaf of the whole batch's output, from this leaf of each micro-batch: see ``join``."""
        first = column[0]
        if isinstance(first, Sum):
            return Sum(torch.stack([part.total for part in column]).sum(), sum(part.count for part in column))
        if is_number(first) and len(where) < 2:  # deeper numbers are sizes or settings, and the same for all
            weighed = (number * share for number, share in zip(column, shares, strict=True) if share)
            return sum(weighed) if is_mean(first) else sum(column)
        if not isinstance(first, Tensor):
            return first
        if not first.dim():
            if not is_mean(first):
                return torch.stack(list(column)).sum()
            # A part of weight 0 may be nan, as the mean of no rows is, and 0 · nan would be nan.
            parts, dtype = zip(column, shares, strict=True), step_dtype(first.dtype)
            weighted = [part.to(dtype) * share for part, share in parts if share]
            return torch.stack(weighted).sum() if weighted else torch.zeros_like(first, dtype=dtype)
        if len(column) == 1:
            return first
        along = self._rows_along(column, where)
        if along is None:  # 2. no dimension has the rows
            return Entries(list(column))
        if len({beside(part, along) for part in column}) > 1:
            raise RunError(
                f"{_called(where)} has shapes {shapes_of(column)}, one for each micro-batch or group of them, which "
                f"are of different sizes beside their rows, in dimension {along}, as logits between rows are; evaluate "
                "a batch that divides evenly, or return what it is computed from, and compute it of evaluate's output"
            )
        return torch.cat(list(column), along)

    def _rows_along(self, column: Sequence[Tensor], where: Where) -> int | None:
        """The dimension in which each part has its micro-batch's rows: the inputs' or 0. None if neither has them."""
        fits, shapes = self.dims_in(column), f"{shapes_of(column)} for micro-batches of {list(self.sizes)} rows"
        if len(fits) == 1:
            return fits[0]
        if fits:
            raise RunError(
                f"{_called(where)} has shapes {shapes}, so that dimensions {fits[0]} and {fits[1]} could both be that "
                "of its rows, or of those of a packed input; make them differ: with another number of micro-batches "
                "or rows, or by .unsqueeze(0) where its rows are in dimension 0"
            )
        if len({part.dim() for part in column}) > 1:
            raise RunError(
                f"{_called(where)} has shapes {shapes}: squeeze() drops the dimension of a single row, too; write "
                "squeeze(-1), or which dimension is meant"
            )
        if where not in self.logged:
            self.logged.add(where)
            log(f"fxpipe: evaluate gives {_called(where)} as a list, a tensor for each micro-batch: {shapes}")
        return None


def without_entries(output: Any) -> Any:
    """The output, with lists in place of ``Entries``."""
    return pytree.tree_map_only(Entries, lambda entries: entries.values, output)


def _called(where: Where) -> str:
    """An output's name in messages."""
    return f"output {'.'.join(map(str, where))!r}" if where else "an output"


def _shapes_in(entry: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors in an entry of a list."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(entry))


# --- over ranks ---


def over_replicas(transport: Transport, output: Any, is_of_all: bool, agreed: str | None) -> tuple[Any, str]:
    """A replica's output with the whole batch's numbers, and the form of these numbers. A collective call of the
    replicas that have an output. ``agreed``: the form, if the replicas have agreed on it.

    A number, or 0-dimensional tensor, of floating-point or complex type is this replica's part of a mean. It is already
    weighted by its share of the whole batch, so the parts add up. Counts (integers) add up, too, and so do the total
    and count of a ``Sum``. ``is_of_all``: whether each replica's output is of all rows, so that counts and sums are
    already the whole batch's. RunError on all replicas if their outputs have different numbers.
    """
    if transport.data_size == 1:
        return output, ""
    leaves, spec = pytree.tree_flatten(output, is_leaf=lambda node: isinstance(node, Sum))
    own = _indices_of_own_numbers(output)

    def numbers_in(leaf: Any, index: int) -> Sequence[Any]:
        """The numbers of a leaf that replicas add up."""
        if isinstance(leaf, Sum):
            return () if is_of_all else leaf
        is_scalar = index in own or (isinstance(leaf, Tensor) and not leaf.dim())
        return (leaf,) if is_scalar and (is_mean(leaf) or not is_of_all) else ()

    numbers = [number for index, leaf in enumerate(leaves) for number in numbers_in(leaf, index)]
    kinds = [str(number.dtype) if isinstance(number, Tensor) else type(number).__name__ for number in numbers]
    form = f"{spec} of {', '.join(kinds)}" if numbers else "none"
    everyone = differing(transport, "data", form) if agreed is None else [agreed, form] * (agreed != form)
    if everyone:
        raise RunError(
            f"the replicas' outputs have different numbers, which cannot be averaged: {'; '.join(everyone)}. "
            "Evaluate batches of one kind on all replicas"
        )
    if not numbers:
        return output, form
    # 3. A single all-reduce for all numbers: complex128 represents each type, integers exactly up to 2^53.
    tensors = [torch.as_tensor(number).to(transport.device, torch.complex128) for number in numbers]
    message = torch.view_as_real(torch.stack(tensors))
    transport.all_reduce("data", message)
    sums = iter(map(_of_type, numbers, message))
    for index, leaf in enumerate(leaves):
        if totals := [next(sums) for _ in numbers_in(leaf, index)]:
            leaves[index] = Sum(*totals) if isinstance(leaf, Sum) else totals[0]
    return pytree.tree_unflatten(leaves, spec), form


def _indices_of_own_numbers(output: Any) -> set[int]:
    """The indices, among the leaves of an output, of Python's numbers in its outermost container."""
    children = one_level(output, Sum)[0]
    counts = (len(pytree.tree_leaves(child, is_leaf=lambda node: isinstance(node, Sum))) for child in children)
    return {index for index, child in zip(accumulate(counts, initial=0), children, strict=False) if is_number(child)}


def _of_type(number: Any, total: Tensor) -> Any:
    """Converts a total, [real, imaginary] in double precision, to the type of its number."""
    if not isinstance(number, Tensor):
        return type(number)(total[0].item())
    value = torch.view_as_complex(total) if number.is_complex() else total[0]
    return value.to(number.device, number.dtype)


def from_rank(rank: int, output: Any, transport: Transport, device: torch.device) -> Any:
    """Returns a rank's ``output`` on all ranks of its pipe group, with tensors on ``device``. A collective call."""
    # 4. the structure, then the tensors
    meta, buffers = pack(output) if transport.pipe_rank == rank else (None, [])
    tree = transport.gather("pipe", meta.tree if meta is not None else None)[rank]
    if meta is None:
        meta = Meta.from_tree(tree, member(transport, "pipe", rank))
        buffers = allocate(meta, device)
    buffers = [buffer.to(device) for buffer in buffers]
    for buffer in buffers:
        transport.broadcast("pipe", buffer, rank)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), unpack(meta, buffers))
