"""Gathering: values of several micro-batches, or replicas, put together as those of a group; and cut up again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.torch_compat import pytree


def rows_along(parts: Sequence[Tensor], rows: Sequence[int], along: Sequence[int]) -> list[int]:
    """Those of the inputs' dimensions, ``along``, and of the first, in which each part has its own number of rows."""
    dims = parts[0].dim()
    candidates = dict.fromkeys(place % dims for place in (*along, 0) if -dims <= place < dims)
    return [place for place in candidates if all(part.dim() == dims for part in parts) and _are(parts, place, rows)]


def _are(parts: Sequence[Tensor], place: int, rows: Sequence[int]) -> bool:
    return [part.shape[place] for part in parts] == list(rows)


class RowPlaces:
    """In which dimension values have their rows, where the sizes of an earlier step have left no doubt of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], int] = {}

    def of(
        self, name: str, leaf: int, parts: Sequence[Tensor], rows: Sequence[int], along: Sequence[int]
    ) -> int | None:
        """The dimension of the rows of a leaf of the value ``name``; None where none is. RunError in doubt."""
        fits, key = rows_along(parts, rows, along), (name, leaf, parts[0].dim())
        if len(fits) == 1:
            self._known[key] = fits[0]
        if len(fits) < 2 or len(parts) == 1:
            return self._known.get(key, fits[0]) if fits else None
        if self._known.get(key) not in fits:
            raise RunError(
                f"{name} has shape {list(parts[0].shape)} for a micro-batch of {rows[0]} rows, so that dimensions "
                f"{fits[0]} and {fits[1]} could both be that of its rows; make them differ: with another number of "
                f"micro-batches or rows, or by .unsqueeze(0) where its rows are in dimension 0"
            )
        return self._known[key]


def concatenated(parts: Sequence[Tensor], along: int) -> Tensor:
    """The parts in a row, cut from where they came from; it requires a gradient if one of them does."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([part.detach() for part in parts], along)
    return whole.requires_grad_(any(part.requires_grad for part in parts))


def added(one: Any, other: Any) -> Any:
    """The sum of a value's gradients by two ways; None is no gradient."""
    if one is None or other is None:
        return other if one is None else one
    leaves, spec = pytree.tree_flatten(one)
    sums = [
        b if a is None else a if b is None else a + b for a, b in zip(leaves, pytree.tree_leaves(other), strict=True)
    ]
    return pytree.tree_unflatten(sums, spec)
