"""Outputs: those of micro-batches, put together as the whole batch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.distributed.transport import Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.loss import Sum
from fxpipe.graph.packing import Meta, allocate, pack, unpack
from fxpipe.plan.inputs.rows import is_entries
from fxpipe.progress import log
from fxpipe.torch_compat import pytree
from fxpipe.validation import is_mapping, shown


@dataclass(frozen=True, eq=False)
class Entries:
    """A list that has an entry for each row: each holds what is that row's alone, numbers too. A leaf for pytree."""

    values: Sequence[Any]


Where = tuple[Any, ...]
"""Where a value is in an output: its key, or its place, in each container around it."""


def _called(where: Where) -> str:
    return f"output {'.'.join(map(str, where))!r}" if where else "an output"


class OutputRows:
    """Where outputs have their rows, where the sizes of an earlier step have left no doubt of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Where, int], int] = {}
        self._entries: dict[Where, bool] = {}
        self._apart: set[Where] = set()

    def apart(self, where: Where, shapes: str | None) -> bool:
        """Whether an output is given as a list, a tensor for each micro-batch: once its ``shapes`` have shown that its
        rows are in no place that could be meant, always."""
        if shapes is not None and where not in self._apart:
            self._apart.add(where)
            log(f"fxpipe: evaluate gives {_called(where)} as a list, a tensor for each micro-batch: {shapes}")
        return where in self._apart

    def of(self, leaf: Where, parts: Sequence[Tensor], rows: Sequence[int], along: Sequence[int]) -> int | None:
        """The dimension of the rows of a leaf; None where none is. RunError in doubt."""
        fits, key = _fitting(parts, rows, along), (leaf, parts[0].dim())
        if len(fits) == 1:
            self._known[key] = fits[0]
        if len(fits) < 2 or len(parts) == 1:
            return self._known.get(key, fits[0]) if fits else None
        if self._known.get(key) not in fits:
            raise RunError(
                f"{_called(leaf)} has shape {list(parts[0].shape)} for a micro-batch of {rows[0]} rows, so that "
                f"dimensions {fits[0]} and {fits[1]} could both be that of its rows; make them differ: with another "
                f"number of micro-batches or rows, or by .unsqueeze(0) where its rows are in dimension 0"
            )
        return self._known[key]

    def are_entries(self, where: Where, parts: Sequence[Sequence[Any]], rows: RowsOf) -> bool:
        """Whether lists, one of each micro-batch, have an entry for each row. RunError in doubt."""
        if len(parts) == 1:  # it is what it is
            return _may_be_entries(parts, rows)
        found = _are_entries(parts, rows)
        if found is not None:
            self._entries[where] = found
        if where not in self._entries:
            shapes = [list(leaf.shape) for leaf in pytree.tree_leaves(parts[0]) if isinstance(leaf, Tensor)]
            raise RunError(
                f"{_called(where)} is a {type(parts[0]).__name__} of {len(parts[0])} for a micro-batch of "
                f"{rows.sizes[0]} rows, with tensors of shapes {', '.join(map(str, shapes))}, so that it could have "
                "an entry for each row, or all rows in each of its tensors; make them differ, with another "
                "number of micro-batches or rows; or return a dict of tensors where each has all rows"
            )
        return self._entries[where]


@dataclass(frozen=True)
class RowsOf:
    """How many rows each of the outputs has that are put together, and in which dimensions they may be: the inputs',
    and the first; where all inputs are packed, ``along`` is empty.

    ``packed``: (dimension, sizes) of packed inputs, of which an output may have as many rows, such as tokens.
    ``in_lists``: whether an input is a list with an entry for each row, so that lists of outputs may be so, too;
    lists of dicts may always.
    """

    sizes: Sequence[int]
    along: Sequence[int]
    packed: Sequence[tuple[int, Sequence[int]]] = ()
    in_lists: bool = False


def join(outputs: Sequence[Any], shares: Sequence[float], rows: RowsOf, places: OutputRows, where: Where = ()) -> Any:
    """Micro-batch outputs as the whole batch's: rows concatenated, means weighted, the rest as it came first.

    A list with an entry for each row is put together as one, in ``Entries``; tensors whose rows are in no place that
    could be meant, as a row for each image, are a list of them. ``places``: what earlier calls have shown
    of where outputs have their rows. ``where`` these are in the output.
    RunError for an output whose rows are in more than one place that could be meant.
    """
    first = outputs[0]
    if all(map(is_entries, outputs)) and places.are_entries(where, outputs, rows):
        return Entries(type(first)(entry for part in outputs for entry in part))
    flat = [_children(output) for output in outputs]
    if len({str(spec) for _, spec in flat}) > 1:
        raise RunError(
            f"{_called(where)} has another structure for each micro-batch or group of them, which cannot be put "
            f"together: {shown([str(spec) for _, spec in flat])}; return a list with a dict for each row, or tensors "
            "with rows"
        )
    if flat[0][1].is_leaf():
        return _join_leaf(outputs, shares, where, partial(_rows_along, places, where, outputs, rows))
    columns = zip(*(children for children, _ in flat), strict=True)
    children = range(len(flat[0][0]))
    names = list(first) if is_mapping(first) and len(first) == len(children) else children
    joined = [join(column, shares, rows, places, (*where, name)) for name, column in zip(names, columns, strict=True)]
    return pytree.tree_unflatten(joined, flat[0][1])


def without_entries(output: Any) -> Any:
    """With lists in place of ``Entries``."""
    return pytree.tree_map_only(Entries, lambda entries: entries.values, output)


def _children(output: Any) -> tuple[list[Any], pytree.TreeSpec]:
    def is_leaf(node: Any) -> bool:
        return node is not output or isinstance(node, Sum)

    children, spec = pytree.tree_flatten(output, is_leaf=is_leaf)
    return children, spec


def _may_be_entries(parts: Sequence[Sequence[Any]], rows: RowsOf) -> bool:
    """Whether lists are as long as there are rows, and of a kind that is returned for each row."""
    as_rows = [len(part) for part in parts] == list(rows.sizes)
    return as_rows and (rows.in_lists or all(map(is_mapping, (entry for part in parts for entry in part))))


def _are_entries(parts: Sequence[Sequence[Any]], rows: RowsOf) -> bool | None:
    """Whether lists, one of each micro-batch, have an entry for each row; None in doubt.

    Else each is a container: of one structure in all micro-batches, of tensors with their rows, or of one shape.
    """
    if not _may_be_entries(parts, rows):
        return False
    if len(set(rows.sizes)) > 1 or len({str(pytree.tree_structure(part)) for part in parts}) > 1:
        return True
    columns = list(zip(*map(pytree.tree_leaves, parts), strict=True))
    tensors = [column for column in columns if all(isinstance(one, Tensor) for one in column)]
    tall = [column for column in tensors if all(one.dim() for one in column)]
    if not tall:
        return None if tensors else rows.in_lists and isinstance(parts[0], list)
    with_rows = [column for column in tall if _have_rows(column, rows)]
    if not with_rows:
        return True
    if not all(len({one.shape for one in column}) == 1 or _have_rows(column, rows) for column in tall):
        return True
    of_dicts = all(map(is_mapping, parts[0]))
    if rows.in_lists and of_dicts and rows.sizes[0] == 1:  # what detectors return, if with one box for each image
        return True
    vary = all(len({_shapes(entry) for entry in part}) > 1 for part in parts)
    return False if vary and len(with_rows) == len(tall) else None


def _have_rows(column: Sequence[Tensor], rows: RowsOf) -> bool:
    """Whether an output has its micro-batch's rows, or those of a packed input."""
    return bool(_fitting(column, rows.sizes, rows.along)) or any(_are(column, *each) for each in rows.packed)


def _shapes(entry: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(entry) if isinstance(leaf, Tensor))


def from_rank(rank: int, output: Any, transport: Transport, device: torch.device) -> Any:
    """What one rank of a pipe group has, on all of them, its tensors on ``device``. A collective call of the group."""
    meta, buffers = pack(output) if transport.pipe_rank == rank else (None, [])
    tree = transport.gather("pipe", meta.tree if meta is not None else None)[rank]
    if meta is None:
        meta = Meta.of(tree, member(transport, "pipe", rank))
        buffers = allocate(meta, device)
    buffers = [buffer.to(device) for buffer in buffers]
    for buffer in buffers:
        transport.broadcast("pipe", buffer, rank)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), unpack(meta, buffers))


def _join_leaf(
    column: Sequence[Any], shares: Sequence[float], where: Where, rows_along: Callable[[], int | None]
) -> Any:
    first = column[0]
    if isinstance(first, Sum):
        return Sum(torch.stack([part.total for part in column]).sum(), sum(part.count for part in column))
    if not isinstance(first, Tensor):
        return first
    if first.dim():
        along = rows_along()
        if along is None:
            return Entries(list(column))
        _check_beside_rows(column, along, where)
        return torch.cat(list(column), along)
    if not first.is_floating_point() and not first.is_complex():
        return torch.stack(list(column)).sum()
    weighted = [part * share for part, share in zip(column, shares, strict=True) if share]
    return torch.stack(weighted).sum() if weighted else torch.zeros_like(first)


def _check_beside_rows(column: Sequence[Tensor], along: int, where: Where) -> None:
    """RunError for parts of other sizes in another dimension than that of their rows, which are no tensor together."""
    beside = {part.shape[:along] + part.shape[along % part.dim() + 1 :] for part in column}
    if len(beside) > 1:
        shapes = ", ".join(str(list(part.shape)) for part in column)
        raise RunError(
            f"{_called(where)} has shapes {shapes}, one for each micro-batch or group of them, which are of different "
            f"sizes beside their rows, in dimension {along}: what is computed between the rows of one, such as "
            "logits, is no one tensor where they differ. Evaluate a batch that divides evenly, which puts one "
            "under the other; or return what it is computed from, and compute it of evaluate's output"
        )


def _rows_along(places: OutputRows, leaf: Where, column: Sequence[Tensor], rows: RowsOf) -> int | None:
    """The dimension of an output that holds its micro-batch's rows: that of the inputs, or else the first; None where
    there is none.

    Or the first, where it holds rows and another dimension in one: rows × tokens, as many for each row everywhere.
    """
    sizes = rows.sizes
    if places.apart(leaf, None):
        return None
    packed = {along % column[0].dim() for along, each in rows.packed if _are(column, along, each)}
    place = places.of(leaf, column, sizes, rows.along) if rows.along or not packed else None
    found = packed if place is None else packed | {place}
    if len(found) > 1 and len(column) > 1:
        raise RunError(
            f"{_called(leaf)} of shapes {', '.join(str(list(part.shape)) for part in column)} has the batch's rows or "
            f"those of a packed input in dimensions {' and '.join(map(str, sorted(found)))}; make them differ, with "
            "another number of micro-batches or rows"
        )
    if found:
        return found.pop()
    shapes = ", ".join(str(list(tensor.shape)) for tensor in column)
    if len({tensor.dim() for tensor in column}) > 1:
        raise RunError(
            f"{_called(leaf)} has as many dimensions as rows allow, shapes {shapes} for micro-batches of "
            f"{list(sizes)} rows: squeeze() drops the dimension of a single row, too; "
            "write squeeze(-1), or which dimension is meant"
        )
    per_row = {divmod(tensor.shape[0], size) for tensor, size in zip(column, sizes, strict=True)}
    if len(per_row) == 1 and per_row.pop()[1] == 0:
        _check_none_beside(column, [sizes, *(each for _, each in rows.packed)], leaf)
        return 0
    places.apart(leaf, f"{shapes} for micro-batches of {list(sizes)} rows")
    return None


def _check_none_beside(column: Sequence[Tensor], several: Sequence[Sequence[int]], where: Where) -> None:
    """RunError where what may hold several for each row in its first dimension has rows in another one."""
    places = [place for place in range(1, column[0].dim()) for sizes in several if _are(column, place, sizes)]
    if places and len(column) > 1 and any(part.shape[places[0]] != 1 for part in column):
        raise RunError(
            f"{_called(where)} of shapes {', '.join(str(list(part.shape)) for part in column)} has as many in "
            f"dimension {places[0]} as there are rows, which are looked for in dimension 0: return it transposed, "
            "with its rows there; or, where it has several for each row, with .unflatten(0, (-1, several)); or "
            'leave it out: evaluate(outputs="loss")'
        )


def _fitting(parts: Sequence[Tensor], rows: Sequence[int], along: Sequence[int]) -> list[int]:
    """Those of the inputs' dimensions, ``along``, and of the first, in which each part has its own number of rows."""
    dims = parts[0].dim()
    candidates = dict.fromkeys(place % dims for place in (*along, 0) if -dims <= place < dims)
    return [place for place in candidates if all(part.dim() == dims for part in parts) and _are(parts, place, rows)]


def _are(parts: Sequence[Tensor], place: int, rows: Sequence[int]) -> bool:
    has_place = all(-part.dim() <= place < part.dim() for part in parts)
    return has_place and [part.shape[place] for part in parts] == list(rows)
