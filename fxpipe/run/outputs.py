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
from fxpipe.kinds import is_mapping, shown
from fxpipe.plan.rows import is_entries
from fxpipe.torch_compat import pytree


class OutputRows:
    """In which dimension outputs have their rows, where the sizes of an earlier step have left no doubt of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}

    def of(self, leaf: int, parts: Sequence[Tensor], rows: Sequence[int], along: Sequence[int]) -> int | None:
        """The dimension of the rows of a leaf; None where none is. RunError in doubt."""
        fits, key = _fitting(parts, rows, along), (leaf, parts[0].dim())
        if len(fits) == 1:
            self._known[key] = fits[0]
        if len(fits) < 2 or len(parts) == 1:
            return self._known.get(key, fits[0]) if fits else None
        if self._known.get(key) not in fits:
            raise RunError(
                f"an output has shape {list(parts[0].shape)} for a micro-batch of {rows[0]} rows, so that dimensions "
                f"{fits[0]} and {fits[1]} could both be that of its rows; make them differ: with another number of "
                f"micro-batches or rows, or by .unsqueeze(0) where its rows are in dimension 0"
            )
        return self._known[key]


@dataclass(frozen=True)
class RowsOf:
    """How many rows each of the outputs has that are put together, and in which dimensions they may be: the inputs',
    and the first; where all inputs are packed, ``along`` is empty.

    ``packed``: (dimension, sizes) of packed inputs, of which an output may have as many rows, such as tokens.
    ``in_lists``: whether an input is a list with an entry for each row, so that lists are outputs' rows, too.
    """

    sizes: Sequence[int]
    along: Sequence[int]
    packed: Sequence[tuple[int, Sequence[int]]] = ()
    in_lists: bool = False


def join(outputs: Sequence[Any], shares: Sequence[float], rows: RowsOf, places: OutputRows) -> Any:
    """Micro-batch outputs as the whole batch's: rows concatenated, means weighted, the rest as it came first.

    A list of dicts that has as many as there are rows, and in them other tensors than with a row for each, has one for
    each row. ``places``: what earlier calls have shown of where outputs have their rows.
    RunError for an output whose rows are in no dimension that could be meant.
    """
    marked = _marked(outputs, rows)
    flat = [pytree.tree_flatten(output, is_leaf=lambda node: isinstance(node, Sum)) for output in marked]
    if len({str(spec) for _, spec in flat}) > 1:
        raise RunError(
            "an output has another structure for each micro-batch or group of them, which cannot be put together: "
            f"{shown([str(spec) for _, spec in flat])}; return a list with a dict for each row, or tensors with rows"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [
        _join_leaf(column, shares, partial(_rows_along, places, n, column, rows)) for n, column in enumerate(columns)
    ]
    return pytree.tree_unflatten(joined, flat[0][1])


@dataclass(frozen=True)
class _Entries:
    """A list with one for each row."""

    values: Any


def _marked(parts: Sequence[Any], rows: RowsOf) -> Sequence[Any]:
    """The parts of an output, with ``_Entries`` in place of lists in it that have one for each row."""
    if isinstance(parts[0], Sum):
        return parts
    if _have_entries(parts, rows):
        return [_Entries(part) for part in parts]
    flat = [_one_level(part) for part in parts]
    (first, spec), others = flat[0], [str(spec) for _, spec in flat[1:]]
    if spec.is_leaf() or not first or set(others) != {str(spec)}:
        return parts
    columns = [_marked(column, rows) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    return [pytree.tree_unflatten(list(each), spec) for each in zip(*columns, strict=True)]


def _one_level(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    return leaves, spec


def _have_entries(parts: Sequence[Any], rows: RowsOf) -> bool:
    """Whether each of what is in these is of one row. RunError in doubt."""
    sizes = rows.sizes
    if not all(is_entries(part) and len(part) == size for part, size in zip(parts, sizes, strict=True)):
        return False
    are_dicts = all(is_mapping(value) for part in parts for value in part)
    if not are_dicts and not rows.in_lists:
        return False
    leaves = [(leaf, size) for part, size in zip(parts, sizes, strict=True) for leaf in pytree.tree_leaves(part)]
    tensors = [(leaf, size) for leaf, size in leaves if isinstance(leaf, Tensor)]
    if any(leaf.dim() and not _fitting([leaf], [size], rows.along) for leaf, size in tensors):
        return True
    if isinstance(parts[0], tuple) or not tensors or (are_dicts and rows.in_lists):
        return isinstance(parts[0], list) and rows.in_lists
    if len(parts) == 1:
        return False
    raise RunError(
        f"an output has a list of {len(parts[0])} for a micro-batch of {sizes[0]} rows, in which each tensor could "
        "have all rows, or be of one row; make them differ, with another number of micro-batches or rows; or return a "
        "dict, or a tensor"
    )


def from_rank(rank: int, output: Any, transport: Transport, device: torch.device) -> Any:
    """What one rank of a pipe group has, on all of them, its tensors on ``device``. A collective call of the group."""
    meta, buffers = pack(output) if transport.pipe_rank == rank else (None, [])
    told = transport.gather("pipe", meta.tree if meta is not None else None)[rank]
    if meta is None:
        meta = Meta.of(told, member(transport, "pipe", rank))
        buffers = allocate(meta, device)
    buffers = [buffer.to(device) for buffer in buffers]
    for buffer in buffers:
        transport.broadcast("pipe", buffer, rank)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), unpack(meta, buffers))


def _join_leaf(column: Sequence[Any], shares: Sequence[float], rows_along: Callable[[], int]) -> Any:
    first = column[0]
    if isinstance(first, _Entries):
        return type(first.values)(entry for part in column for entry in part.values)
    if isinstance(first, Sum):
        return Sum(torch.stack([part.total for part in column]).sum(), sum(part.count for part in column))
    if not isinstance(first, Tensor):
        return first
    if first.dim():
        along = rows_along()
        _check_beside_rows(column, along)
        return torch.cat(list(column), along)
    if not first.is_floating_point() and not first.is_complex():
        return torch.stack(list(column)).sum()
    weighted = [part * share for part, share in zip(column, shares, strict=True) if share]
    return torch.stack(weighted).sum() if weighted else torch.zeros_like(first)


def _check_beside_rows(column: Sequence[Tensor], along: int) -> None:
    """RunError for parts of other sizes in another dimension than that of their rows, which are no tensor together."""
    beside = {part.shape[:along] + part.shape[along % part.dim() + 1 :] for part in column}
    if len(beside) > 1:
        shapes = ", ".join(str(list(part.shape)) for part in column)
        raise RunError(
            f"an output has shapes {shapes}, one for each micro-batch or group of them, which are of different sizes "
            f"beside their rows, in dimension {along}: what is computed between the rows of one, such as logits, is no "
            "one tensor where they differ. Evaluate a batch that divides evenly, which puts one under the other; or "
            "return what it is computed from, and compute it of evaluate's output"
        )


def _rows_along(places: OutputRows, leaf: int, column: Sequence[Tensor], rows: RowsOf) -> int:
    """The dimension of an output that holds its micro-batch's rows: that of the inputs, or else the first.

    Or the first, where it holds rows and another dimension in one: rows × tokens, as many for each row everywhere.
    """
    sizes = rows.sizes
    packed = {along % column[0].dim() for along, each in rows.packed if _are(column, along, each)}
    place = places.of(leaf, column, sizes, rows.along) if rows.along or not packed else None
    found = packed if place is None else packed | {place}
    if len(found) > 1 and len(column) > 1:
        raise RunError(
            f"an output of shapes {', '.join(str(list(part.shape)) for part in column)} has the batch's rows or those "
            f"of a packed input in dimensions {' and '.join(map(str, sorted(found)))}; make them differ, with another "
            "number of micro-batches or rows"
        )
    if found:
        return found.pop()
    shapes = ", ".join(str(list(tensor.shape)) for tensor in column)
    if len({tensor.dim() for tensor in column}) > 1:
        raise RunError(
            f"an output has as many dimensions as rows allow, shapes {shapes} for micro-batches of {list(sizes)} rows: "
            "squeeze() drops the dimension of a single row, too; write squeeze(-1), or which dimension is meant"
        )
    per_row = {divmod(tensor.shape[0], size) for tensor, size in zip(column, sizes, strict=True)}
    if len(per_row) == 1 and per_row.pop()[1] == 0:
        _check_none_beside(column, [sizes, *(each for _, each in rows.packed)])
        return 0
    raise RunError(
        f"an output of shapes {shapes} for micro-batches of {list(sizes)} rows cannot be put together; "
        "return one row per row of the input, or a number"
    )


def _check_none_beside(column: Sequence[Tensor], several: Sequence[Sequence[int]]) -> None:
    """RunError where what may hold several for each row in its first dimension has rows in another one."""
    places = [place for place in range(1, column[0].dim()) for sizes in several if _are(column, place, sizes)]
    if places and len(column) > 1 and any(part.shape[places[0]] != 1 for part in column):
        raise RunError(
            f"an output of shapes {', '.join(str(list(part.shape)) for part in column)} has as many in dimension "
            f"{places[0]} as there are rows, which are looked for in dimension 0: return it transposed, with its rows "
            "there; or, where it has several for each row, with .unflatten(0, (-1, several))"
        )


def _fitting(parts: Sequence[Tensor], rows: Sequence[int], along: Sequence[int]) -> list[int]:
    """Those of the inputs' dimensions, ``along``, and of the first, in which each part has its own number of rows."""
    dims = parts[0].dim()
    candidates = dict.fromkeys(place % dims for place in (*along, 0) if -dims <= place < dims)
    return [place for place in candidates if all(part.dim() == dims for part in parts) and _are(parts, place, rows)]


def _are(parts: Sequence[Tensor], place: int, rows: Sequence[int]) -> bool:
    has_place = all(-part.dim() <= place < part.dim() for part in parts)
    return has_place and [part.shape[place] for part in parts] == list(rows)
