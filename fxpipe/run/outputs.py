"""Outputs: those of micro-batches, put together as the whole batch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.distributed.transport import Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.gathering import RowPlaces
from fxpipe.graph.loss import Sum
from fxpipe.graph.packing import Meta, allocate, pack, unpack
from fxpipe.options import BatchDim
from fxpipe.plan.batch import dimensions
from fxpipe.torch_compat import pytree


def join(
    outputs: Sequence[Any], shares: Sequence[float], sizes: Sequence[int], batch_dim: BatchDim, places: RowPlaces
) -> Any:
    """Micro-batch outputs as the whole batch's: rows concatenated, means weighted, the rest as it came first.

    ``sizes``: the rows of each micro-batch. ``places``: what earlier calls have shown of where outputs have their rows.
    RunError for an output whose rows are in no dimension that could be meant.
    """
    along = dimensions(batch_dim)
    flat = [pytree.tree_flatten(output, is_leaf=lambda node: isinstance(node, Sum)) for output in outputs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [
        _join_leaf(column, shares, partial(_rows_along, places, n, column, sizes, along))
        for n, column in enumerate(columns)
    ]
    return pytree.tree_unflatten(joined, flat[0][1])


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
    if isinstance(first, Sum):
        return Sum(torch.stack([part.total for part in column]).sum(), sum(part.count for part in column))
    if not isinstance(first, Tensor):
        return first
    if first.dim():
        return torch.cat(list(column), rows_along())
    if not first.is_floating_point() and not first.is_complex():
        return torch.stack(list(column)).sum()
    weighted = [part * share for part, share in zip(column, shares, strict=True) if share]
    return torch.stack(weighted).sum() if weighted else torch.zeros_like(first)


def _rows_along(
    places: RowPlaces, leaf: int, column: Sequence[Tensor], sizes: Sequence[int], along: Sequence[int]
) -> int:
    """The dimension of an output that holds its micro-batch's rows: that of the inputs, or else the first.

    Or the first, where it holds rows and another dimension in one: rows × tokens, as many for each row everywhere.
    """
    place = places.of("an output", leaf, column, sizes, along)
    if place is not None:
        return place
    shapes = ", ".join(str(list(tensor.shape)) for tensor in column)
    if len({tensor.dim() for tensor in column}) > 1:
        raise RunError(
            f"an output has as many dimensions as rows allow, shapes {shapes} for micro-batches of {list(sizes)} rows: "
            "squeeze() drops the dimension of a single row, too; write squeeze(-1), or which dimension is meant"
        )
    per_row = {divmod(tensor.shape[0], size) for tensor, size in zip(column, sizes, strict=True)}
    if len(per_row) == 1 and per_row.pop()[1] == 0:
        return 0
    raise RunError(
        f"an output of shapes {shapes} for micro-batches of {list(sizes)} rows cannot be put together; "
        "return one row per row of the input, or a number"
    )
