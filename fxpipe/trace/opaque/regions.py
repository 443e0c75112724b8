"""Opaque regions, as ``boundaries=`` names them, and the observed effects of their calls.

Takes: names of submodules or methods from ``cuts``, and runs on real tensors from ``observed``. Gives: two frozen
values, ``Region`` and ``SeenCall``. ``SeenCall.guessed`` predicts a call for other sizes.

A guess is only the beginning of a capture: each step compares the real result with the captured one, and raises if a
tensor has other sizes than the code behind it allows. The guess follows these rules:

1. A size that is a size of the call's arguments becomes what it is in the new batch; other sizes stay.
2. A list of tensors whose length is a size of the arguments gets the new length.
3. A list of containers gets as many containers as the new batch has entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from fxpipe.specs import TensorSpec
from fxpipe.stage.listed import can_be_joined
from fxpipe.stage.opaque_call import Structure
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.tensors import one_level

WHOLE = "whole"


@dataclass(frozen=True)
class Region:
    """A submodule or method whose Python code runs in every step. ``returns``: the user's description of its result,
    with tensors on any device, or None. ``varies``: whether the result may have other sizes in each step."""

    name: str
    path: str
    method: str = "__call__"
    returns: Any = None
    varies: bool = True


@dataclass(frozen=True)
class SeenCall:
    """The effects of one call of a region, observed in a run on real tensors.

    ``returned``: the call's result, with a ``TensorSpec`` for each tensor. ``parts``: the paths of the submodules that
    the call ran; ``reads``: the names of the parameters and buffers that it may use; ``writes``: the names of the
    parameters and buffers that it wrote; ``sets``: (module's path, name) of each attribute that it changed; ``asks``:
    the attributes that it read and some region changed. ``sizes``: the sizes of its tensors and lists of strings.
    ``overwrites``: the positions, among the leaves of its arguments, of the tensors into which it wrote. ``moved``: the
    names of the random generators from which it drew.
    """

    returned: Any
    parts: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    sets: frozenset[tuple[str, str]] = frozenset()
    asks: frozenset[tuple[str, str]] = frozenset()
    sizes: frozenset[int] = frozenset()
    overwrites: frozenset[int] = frozenset()
    moved: frozenset[str] = frozenset()

    @property
    def specs(self) -> list[TensorSpec]:
        """A ``TensorSpec`` for each tensor in the call's result; for a list, of the concatenation, then each tensor."""
        return Structure(self.returned).tensors

    def guessed(self, sizes: Mapping[int, int], lengths: Mapping[int, int], entries: Mapping[int, int]) -> SeenCall:
        """A guess of the call for a batch of other sizes, from which a capture starts; each step checks the result.

        Args:
            sizes: an input's old size → its new size.
            lengths: the same for the number of tensors in a list.
            entries: the same for the number of containers in a list.
        """
        # only sizes of the call's own arguments change: a length may equal a layer's width
        own, own_lengths = ({old: new for old, new in each.items() if old in self.sizes} for each in (sizes, lengths))
        return replace(self, returned=_guessed(self.returned, own, own_lengths, entries))

    @property
    def general(self) -> SeenCall:
        """The call with size 3 in place of 0 and 1, which a capture may specialize."""
        returned = pytree.tree_map_only(TensorSpec, lambda spec: _resized(spec, {0: _SOME, 1: _SOME}), self.returned)
        return replace(self, returned=returned)


_SOME = 3
"""A size that no capture specializes."""


def _guessed(returned: Any, sizes: Mapping[int, int], lengths: Mapping[int, int], entries: Mapping[int, int]) -> Any:
    """The value with other sizes. A list of tensors may get another length, as a list with a tensor for each image, and
    so may a list of containers, whatever the sizes in each container."""
    if isinstance(returned, TensorSpec):
        many = _resized(returned, {old: new for old, new in sizes.items() if old > 1})
        is_one = many.shape[:1] == (1,)  # a batch of one image may become a batch of several
        return replace(many, shape=(sizes.get(1, 1), *many.shape[1:])) if is_one else many
    if type(returned) in (list, tuple):
        # a list with an entry for each image gets the new number of images as its length
        parts = [_guessed(part, sizes, lengths, entries) for part in returned]
        if entries.get(len(parts), len(parts)) != len(parts) and _are_containers_alike(parts):
            return type(returned)(parts[:1] * entries[len(parts)])
        count = lengths.get(len(parts), len(parts)) if can_be_joined(returned) else len(parts)
        return type(returned)(islice(cycle(parts), count))
    leaves, spec = one_level(returned)
    if spec.is_leaf():
        return returned
    return pytree.tree_unflatten([_guessed(leaf, sizes, lengths, entries) for leaf in leaves], spec)


def _are_containers_alike(parts: Sequence[Any]) -> bool:
    """Whether all parts are containers of tensors with the same structure, such as dicts with the same keys."""
    leaves = pytree.tree_leaves(parts[:1])
    holds = any(leaf is not parts[0] and isinstance(leaf, TensorSpec) for leaf in leaves)
    return holds and all(pytree.tree_structure(part) == pytree.tree_structure(parts[0]) for part in parts)


def _resized(spec: TensorSpec, sizes: Mapping[int, int]) -> TensorSpec:
    """The tensor with ``sizes`` replaced. In 3 or more dimensions, a later size equal to the first stays: an image may
    have as many tokens as the batch has images. In (rows, tokens, width), a width equal to tokens stays, too."""
    fixed = {dim for dim, size in enumerate(spec.shape) if len(spec.shape) > 2 and dim and size == spec.shape[0]}
    if len(spec.shape) == 3 and spec.shape[1] == spec.shape[2]:
        fixed.add(2)
    shape = tuple(size if dim in fixed else sizes.get(size, size) for dim, size in enumerate(spec.shape))
    if shape == spec.shape:
        return spec
    # the strides of a dense tensor with the same order of dimensions in memory
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (spec.stride[dim], -dim)):
        stride[dim], step = step, step * max(shape[dim], 1)
    return replace(spec, shape=shape, stride=tuple(stride))
