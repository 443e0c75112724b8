"""Sizes: finds the sizes in which micro-batches of one kind differ, and the captures that are valid for a shape.

Takes: descriptions of micro-batches, which have shapes and no numbers. Gives: which dimensions were seen to vary
(``varying``), maps from old to new sizes (``sizes_between``), and ``Family``, the memory of one kind of micro-batch.

1. Micro-batches with an equal ``outline`` are a family: they differ in sizes alone.
2. The first shape of a family is captured with its sizes as numbers.
3. The second shape shows which dimensions vary. These stay symbolic in its capture, and in all later captures.
4. A later shape first looks for a capture of the family whose guard is true for it (``holding``).

A dimension of size 1 never counts as varying: it may be broadcast, which is another program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.batch.description import Description, example_of
from fxpipe.batch.pattern import Pattern
from fxpipe.graph.program import SizeGuard
from fxpipe.graph.question import Answers
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.like import TensorLike
from fxpipe.precision import Precision
from fxpipe.trace.request import Place
from fxpipe.validation import is_list


def tensors_of(description: Description) -> list[tuple[str, int, TensorLike]]:
    """Each tensor among the inputs: (input name, leaf index, description of the tensor)."""
    return [
        (name, index, leaf)
        for name, entry in description
        if entry.kind == "input"
        for index, leaf in enumerate(entry.detail[1])
        if isinstance(leaf, TensorLike)
    ]


def changing(shapes: Iterable[Description]) -> tuple[list[str], list[str]]:
    """The inputs whose sizes differ between these micro-batches, and the inputs whose non-tensor leaves differ."""
    sizes, values = defaultdict[str, set[Any]](set), defaultdict[str, set[Any]](set)
    for name, entry in (pair for shape in shapes for pair in shape):
        sizes[name].add(tuple(entry.shapes))
        values[name].add(
            tuple(leaf for leaf in entry.detail[1] if not isinstance(leaf, TensorLike)) if entry.like else ()
        )
    first, second = ([name for name, seen in kind.items() if len(seen) > 1] for kind in (sizes, values))
    return first, second


def sizes_between(then: Description, now: Description, or_same: bool = False) -> dict[int, int]:
    """Size in one micro-batch → size in another. A size that maps to several sizes is left out. ``or_same``: a size
    that stays the same in some inputs, as a width does, and maps to one other size in the rest maps to the latter."""
    before = {(name, index): leaf.shape for name, index, leaf in tensors_of(then)}
    pairs = [
        pair
        for name, index, leaf in tensors_of(now)
        for pair in zip(before.get((name, index), ()), leaf.shape, strict=False)
    ]
    return _unambiguous(pairs, or_same)


def entries_between(then: Description, now: Description) -> dict[int, int]:
    """The old number of list entries → the new number, for the lists among the inputs, as ``sizes_between``."""
    before = {name: value.like for name, value in then if is_list(value.like)}
    return _unambiguous([(len(before[name]), len(g.like)) for name, g in now if name in before and is_list(g.like)])


def _unambiguous(pairs: Iterable[tuple[int, int]], or_same: bool = False) -> dict[int, int]:
    """Old number → new number, for the old numbers that map to exactly one new number."""
    targets: dict[int, set[int]] = {}
    for old, new in pairs:
        targets.setdefault(old, set()).add(new)
    if or_same:
        targets = {old: new - {old} or new for old, new in targets.items()}
    return {old: new.pop() for old, new in targets.items() if len(new) == 1}


def unlike(then: Description, now: Description) -> tuple[int, int]:
    """A distance between micro-batches: the number of sizes that map to several sizes, and of sizes that change."""
    several, sizes = sizes_between(then, now), {size for _, _, leaf in tensors_of(then) for size in leaf.shape}
    return len(sizes - several.keys()), sum(old != new for old, new in several.items())


def outline(description: Description) -> Hashable:
    """A key that is equal for micro-batches that differ only in sizes.

    It has the numbers of dimensions, dtypes, devices and ``requires_grad`` of tensors, and the values of other leaves.
    """

    # 1. The key has the number of dimensions, and no sizes; strides follow from sizes, and are left out, too.
    def without_sizes(leaf: object) -> object:
        if not isinstance(leaf, TensorLike):
            return leaf
        return len(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad

    return tuple(
        (name, entry.kind, entry.detail)
        if entry.kind != "input"
        else (name, entry.detail[0], tuple(map(without_sizes, entry.detail[1])))
        for name, entry in description
    )


def varying(now: Description, then: Description | None) -> frozenset[Place]:
    """The dimensions whose size differs in a micro-batch ``then`` of the same outline; none if ``then`` is None.

    Dimensions of size 1 are left out: a dimension of 1 may be broadcast, which is another program.
    """
    pairs = () if then is None else zip(tensors_of(now), tensors_of(then), strict=True)
    return frozenset(
        (name, index, dim)
        for (name, index, mine), (_, _, other) in pairs
        for dim, (size, old) in enumerate(zip(mine.shape, other.shape, strict=True))
        if size > 1 and old not in (1, size)
    )


def with_sizes(
    batches: Sequence[dict[str, Any]], graphs: Sequence[StageGraph], shapes: Sequence[Description]
) -> list[dict[str, Any]]:
    """The micro-batches with the input sizes that stages take as inputs; all ranks know them from the descriptions."""
    if not any(graph.sizes for graph in graphs):
        return list(batches)
    return [
        batch | {size: size.of(like) for size in graph.sizes}
        for batch, like, graph in zip(batches, map(example_of, shapes), graphs, strict=True)
    ]


def bytes_of_inputs(shapes: Iterable[Description], precision: Precision | None = None) -> dict[str, int]:
    """Input → the bytes of its tensors over all of these micro-batches. If ``precision`` changes a tensor's type, the
    bytes of the cast copy are added."""
    totals: dict[str, int] = {}
    for shape in shapes:
        for name, _, leaf in tensors_of(shape):
            each = leaf.dtype.itemsize
            if precision is not None and leaf.dtype.is_floating_point and leaf.dtype != precision.compute:
                each += precision.compute.itemsize
            totals[name] = totals.get(name, 0) + math.prod(leaf.shape) * each
    return totals


# --- Which sizes of micro-batches were seen to vary ---

FAMILIES = 256
"""The most families that are remembered."""


@dataclass(frozen=True)
class Family:
    """Micro-batches that differ only in sizes: the dimensions seen to vary, and the captures with symbolic sizes. A
    value: ``noting`` returns a new one."""

    latest: Description | None = None
    """The shape captured last."""
    varying: frozenset[Place] = frozenset()
    """Dimensions that were seen to vary."""
    general: tuple[tuple[Pattern, SizeGuard], ...] = ()
    """(pattern, guard) of each capture with symbolic sizes, the latest last."""

    def holding(self, shape: Description, answers: Answers) -> Pattern | None:
        """The pattern of the latest capture that is valid for this shape and these answers."""
        fitting = [entry for entry in reversed(self.general) if set(entry[0].answered) <= set(answers)]
        likes = [like for _, _, like in tensors_of(shape)]
        # 4. A guard of torch.export reads the sizes and strides of tensors; tensors on the meta device take no memory.
        tensors = [torch.empty_strided(like.shape, like.stride, device="meta") for like in likes]
        return next((pattern for pattern, guard in fitting if guard(tensors)), None)

    def free(self, shape: Description) -> frozenset[Place]:
        """The dimensions of a new shape to be kept symbolic: they vary, and their size in the shape is not 1."""
        # 3. vary now, or have varied before
        sizes = ((name, index, enumerate(like.shape)) for name, index, like in tensors_of(shape))
        large = {(name, index, dim) for name, index, dims in sizes for dim, size in dims if size > 1}
        return varying(shape, self.latest) | (self.varying & large)

    def noting(self, shape: Description, pattern: Pattern, guard: SizeGuard | None) -> Family:
        """The family after a capture of this shape. ``guard``: the capture's, or None if it has no symbolic sizes."""
        return Family(
            shape,
            self.varying | varying(shape, self.latest),
            self.general if guard is None else (*self.general, (pattern, guard)),
        )
