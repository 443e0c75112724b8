"""Opaque regions, as ``boundaries=`` names them, and the effects that their calls were seen to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from fxpipe.graph.like import TensorLike
from fxpipe.graph.listed import can_be_joined
from fxpipe.graph.opaque_call import Structure
from fxpipe.torch_compat import pytree

WHOLE = "whole"


@dataclass(frozen=True)
class Region:
    """A submodule, or a method of one, whose Python runs for real. ``returns``: what it returns, with a tensor of any
    device for each tensor, where the user has said it. ``varies``: whether that may have other sizes in each step."""

    name: str
    path: str
    method: str = "__call__"
    returns: Any = None
    varies: bool = True


@dataclass(frozen=True)
class SeenCall:
    """The effects of one call of a region, seen on real numbers.

    ``returned``: what it returned, with a ``TensorLike`` for each tensor. ``parts``: the submodules that it has called;
    ``reads``: the parameters and buffers that it may use, ``writes``: those that it has written, by name; ``sets``: the
    attributes that it has changed, (the path of their module, their name); ``asks``: those that it or another region
    has changed and that it has read. ``given``: sizes of the tensors that it was given, and of lists of strings.
    """

    returned: Any
    parts: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    sets: frozenset[tuple[str, str]] = frozenset()
    asks: frozenset[tuple[str, str]] = frozenset()
    given: frozenset[int] = frozenset()

    @property
    def likes(self) -> list[TensorLike]:
        """A description of each tensor that the call returns; of a list, of their concatenation and then of each."""
        return Structure(self.returned).tensors

    def guessed(self, sizes: Mapping[int, int], lengths: Mapping[int, int], entries: Mapping[int, int]) -> SeenCall:
        """What it may do for a batch of other ``sizes``: those of its inputs then → those now; ``lengths``: how many
        tensors its lists have, ``entries``: how many containers. A guess, from which a capture begins: what it returns
        is held against the capture in each step."""
        # those of sizes that it was given: a length may equal a layer's width
        own, own_lengths = ({old: new for old, new in each.items() if old in self.given} for each in (sizes, lengths))
        return replace(self, returned=_guessed(self.returned, own, own_lengths, entries))

    @property
    def general(self) -> SeenCall:
        """The call with another size in place of 0 and 1, which a capture might treat as special."""
        returned = pytree.tree_map_only(TensorLike, lambda like: _resized(like, {0: _SOME, 1: _SOME}), self.returned)
        return replace(self, returned=returned)


_SOME = 3
"""A size that is like any other."""


def _guessed(returned: Any, sizes: Mapping[int, int], lengths: Mapping[int, int], entries: Mapping[int, int]) -> Any:
    """A value for other sizes; a list of tensors is as long as such a size is, as one for each image is, and so is a
    list of containers, whatever the sizes in each."""
    if isinstance(returned, TensorLike):
        many = _resized(returned, {old: new for old, new in sizes.items() if old > 1})
        is_one = many.shape[:1] == (1,)  # one image may be several
        return replace(many, shape=(sizes.get(1, 1), *many.shape[1:])) if is_one else many
    if type(returned) in (list, tuple):
        # one entry for each image: as many as there are images now
        parts = [_guessed(part, sizes, lengths, entries) for part in returned]
        if entries.get(len(parts), len(parts)) != len(parts) and _are_containers_alike(parts):
            return type(returned)(parts[:1] * entries[len(parts)])
        count = lengths.get(len(parts), len(parts)) if can_be_joined(returned) else len(parts)
        return type(returned)(islice(cycle(parts), count))
    leaves, spec = pytree.tree_flatten(returned, is_leaf=lambda part: part is not returned)
    if spec.is_leaf():
        return returned
    return pytree.tree_unflatten([_guessed(leaf, sizes, lengths, entries) for leaf in leaves], spec)


def _are_containers_alike(parts: Sequence[Any]) -> bool:
    """Whether each is a dict with tensors, say, of any sizes."""

    def of_any_size(like: TensorLike) -> TensorLike:  # an image's may have a size of its own
        return replace(like, shape=(_SOME,) * len(like.shape), stride=())

    outlines = [pytree.tree_map_only(TensorLike, of_any_size, part) for part in parts]
    leaves = pytree.tree_leaves(parts[:1])
    holds = any(leaf is not parts[0] and isinstance(leaf, TensorLike) for leaf in leaves)
    return holds and all(outline == outlines[0] for outline in outlines)


def _resized(like: TensorLike, sizes: Mapping[int, int]) -> TensorLike:
    """With other sizes in place of some. Of three dimensions and more, one as large as the first, as tokens of an image
    may be as many as images, is another thing; so is the width of (rows, tokens, width) that is as large as a row."""
    fixed = {dim for dim, size in enumerate(like.shape) if len(like.shape) > 2 and dim and size == like.shape[0]}
    if len(like.shape) == 3 and like.shape[1] == like.shape[2]:
        fixed.add(2)
    shape = tuple(size if dim in fixed else sizes.get(size, size) for dim, size in enumerate(like.shape))
    if shape == like.shape:
        return like
    # the strides of a dense tensor whose dimensions lie in memory in the same order
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like.stride[dim], -dim)):
        stride[dim], step = step, step * max(shape[dim], 1)
    return replace(like, shape=shape, stride=tuple(stride))
