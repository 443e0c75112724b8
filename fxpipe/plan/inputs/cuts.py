"""Cuts: the inputs of a batch, or their descriptions, cut into micro-batches, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.graph.gathering import concatenated
from fxpipe.graph.like import TensorLike
from fxpipe.packed import BatchDim, Offsets, Packed, Rule, rule_at, written
from fxpipe.plan.inputs.batch import Description, described, example_of
from fxpipe.plan.inputs.counts import Counts
from fxpipe.plan.inputs.rows import is_entries, pieces_of
from fxpipe.torch_compat import block_mask_part, block_mask_rows, pytree

Pieces = Mapping[str, tuple[int, ...]]


def split(values: Mapping[str, Any], batch_dim: BatchDim, sizes: Sequence[int], counts: Counts) -> list[dict[str, Any]]:
    """One dict of inputs per micro-batch: views of the batch, no copies but of offsets. ``sizes``: their rows."""
    pieces = pieces_of(batch_dim, sizes, counts)
    columns = [_parts(name, value, rule_at(batch_dim, name), sizes, pieces) for name, value in values.items()]
    return [dict(zip(values, parts, strict=True)) for parts in zip(*columns, strict=True)] or [{} for _ in sizes]


def split_description(
    description: Description, batch_dim: BatchDim, sizes: Sequence[int], counts: Counts
) -> list[Description]:
    """The descriptions of the micro-batches."""
    return [_described(description, part) for part in split(example_of(description), batch_dim, sizes, counts)]


def _described(description: Description, likes: Mapping[str, Any]) -> Description:
    """A description with these in place of its inputs."""
    return tuple(
        (name, described(likes[name], not any(type(leaf) is str for leaf in given.detail[1])))
        if name in likes
        else (name, given)
        for name, given in description
    )


# --- a value → its parts


def _parts(path: str, value: Any, rule: Rule, sizes: Sequence[int], pieces: Pieces) -> list[Any]:
    if value is None or rule is None:
        return [value] * len(sizes)
    if isinstance(rule, Mapping):
        parts = {name: _parts(f"{path}.{name}", one, rule.get(name, 0), sizes, pieces) for name, one in value.items()}
        # Only the dict is taken apart here: what it holds has rules of its own.
        _, spec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
        return [pytree.tree_unflatten(list(each), spec) for each in zip(*parts.values(), strict=True)]
    # Offsets (n + 1 of n sequences) overlap by one: the last of a part is the first of the next. Each begins with 0.
    if isinstance(rule, Offsets):
        starts = [0, *accumulate(pieces[path])]
        spans = zip(starts, pieces[path], strict=False)
        if isinstance(value, TensorLike):
            return [replace(value, shape=(size + 1,), stride=(1,)) for _, size in spans]
        return [value[start : start + size + 1] - value[start] for start, size in spans]
    if isinstance(rule, Packed):
        sizes = pieces[path]
        if is_entries(value):
            ends = list(accumulate(sizes))
            return [value[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    along = rule.dim if isinstance(rule, Packed) else rule
    leaves, spec = pytree.tree_flatten(value)
    columns = [_cut_leaf(path, leaf, along, sizes) for leaf in leaves]
    return [pytree.tree_unflatten([column[place] for column in columns], spec) for place in range(len(sizes))]


def _cut_leaf(path: str, leaf: Any, along: int, sizes: Sequence[int]) -> list[Any]:
    if isinstance(leaf, TensorLike) and leaf.shape:
        return [_of_size(leaf, along, size) for size in sizes]
    if (block_rows := block_mask_rows(leaf) or 1) > 1:
        if block_rows != sum(sizes):
            raise RunError(f"input {path!r} is a BlockMask of {block_rows} rows, and the batch has {sum(sizes)}")
        return [block_mask_part(leaf, end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return [leaf] * len(sizes)
    if leaf.is_nested:
        raise RunError(
            f"input {path!r} is a nested tensor, which torch cannot cut into rows; pass its values padded, with a "
            f"mask or lengths, or packed, with {written(path, 'fxpipe.Packed(counts)')}; or write "
            f"{written(path, 'None')} if each micro-batch takes all of it"
        )
    return list(torch.split(leaf, list(sizes), along))


def _of_size(like: TensorLike, along: int, size: int) -> TensorLike:
    """A view of so many rows: as torch.split makes it, whose strides are those of the whole."""
    shape = list(like.shape)
    shape[along] = size
    return replace(like, shape=tuple(shape))


# --- and parts → a value


def joined(batches: Sequence[Mapping[str, Any]], batch_dim: BatchDim) -> dict[str, Any]:
    """The inputs of several micro-batches in a row; what has no rows, or is not split, is the first's."""
    return {name: joined_input([batch[name] for batch in batches], rule_at(batch_dim, name)) for name in batches[0]}


def joined_description(descriptions: Sequence[Description], batch_dim: BatchDim) -> Description:
    """The description of several micro-batches in a row."""
    return _described(descriptions[0], joined(list(map(example_of, descriptions)), batch_dim))


def joined_input(parts: Sequence[Any], rule: Rule) -> Any:
    """An input's rows in a row."""
    first = parts[0]
    if first is None or rule is None or len(parts) == 1:
        return first
    if isinstance(rule, Mapping):
        values = [joined_input([part[name] for part in parts], rule.get(name, 0)) for name in first]
        _, spec = pytree.tree_flatten(first, is_leaf=lambda node: node is not first)
        return pytree.tree_unflatten(values, spec)
    if isinstance(rule, Packed) and is_entries(first):
        return type(first)(entry for part in parts for entry in part)
    if isinstance(rule, Offsets):
        return _offsets_in_a_row(parts)
    flat, spec = [pytree.tree_leaves(part) for part in parts], pytree.tree_structure(first)
    along = rule.dim if isinstance(rule, Packed) else rule
    return pytree.tree_unflatten([_in_a_row(column, along) for column in zip(*flat, strict=True)], spec)


def _in_a_row(column: Sequence[Any], along: int) -> Any:
    first = column[0]
    if isinstance(first, TensorLike) and first.shape:
        return resized(first, along, sum(leaf.shape[along] for leaf in column))
    return concatenated(column, along) if isinstance(first, Tensor) and first.dim() else first


def _offsets_in_a_row(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], TensorLike):
        return replace(parts[0], shape=(sum(part.shape[0] - 1 for part in parts) + 1,))
    found = list(parts[:1])  # each later part goes on where the one before it ends
    for part in parts[1:]:
        found.append(part[1:] + found[-1][-1])
    return torch.cat(found)


def with_rows(description: Description, batch_dim: BatchDim, rows: int) -> Description:
    """The description of a batch of so many rows; what is packed stays unchanged."""
    return _described(
        description,
        {
            name: pytree.tree_map_only(TensorLike, partial(resized, along=rule, size=rows), like)
            for name, like in example_of(description).items()
            if isinstance(rule := rule_at(batch_dim, name), int)
        },
    )


def resized(leaf: TensorLike, along: int, size: int) -> TensorLike:
    """A tensor of another size, dense as long as it was."""
    if not leaf.shape:
        return leaf
    # Where the new size reaches the stride of an outer dimension, outer strides grow, or entries would overlap.
    inside = leaf.stride[along]
    larger = any(inside < step < inside * size for step in leaf.stride)
    stride = tuple(step * size if larger and step > inside else step for step in leaf.stride)
    return replace(_of_size(leaf, along, size), stride=stride)
