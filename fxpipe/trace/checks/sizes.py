"""Sizes: finds the sizes in which micro-batches of one kind differ.

Takes: descriptions of micro-batches, which have shapes and no numbers. Gives: which dimensions vary (``varying``), and
maps from old to new sizes (``sizes_between``).

Micro-batches with an equal ``outline`` differ in sizes alone: ``fxpipe.capture.guard`` keeps a ``Family`` for them. A
dimension of size 1 never counts as varying: it may be broadcast, which is another program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from fxpipe.batch.description import Description, example_of
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.precision import Precision
from fxpipe.specs import TensorSpec
from fxpipe.trace.request import Place
from fxpipe.validation import is_list


def tensors_of(description: Description) -> list[tuple[str, int, TensorSpec]]:
    """Each tensor among the inputs: (input name, leaf index, description of the tensor)."""
    return [
        (name, index, leaf)
        for name, entry in description
        if entry.kind == "input"
        for index, leaf in enumerate(entry.detail[1])
        if isinstance(leaf, TensorSpec)
    ]


def changing(shapes: Iterable[Description]) -> tuple[list[str], list[str]]:
    """The inputs whose sizes differ between these micro-batches, and the inputs whose non-tensor leaves differ."""
    sizes, values = defaultdict[str, set[Any]](set), defaultdict[str, set[Any]](set)
    for name, entry in (pair for shape in shapes for pair in shape):
        sizes[name].add(tuple(entry.shapes))
        values[name].add(
            tuple(leaf for leaf in entry.detail[1] if not isinstance(leaf, TensorSpec)) if entry.spec else ()
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
    before = {name: value.spec for name, value in then if is_list(value.spec)}
    return _unambiguous([(len(before[name]), len(g.spec)) for name, g in now if name in before and is_list(g.spec)])


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

    # The key has the number of dimensions, and no sizes; strides follow from sizes, and are left out, too.
    def without_sizes(leaf: object) -> object:
        if not isinstance(leaf, TensorSpec):
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
        batch | {size: size.of(spec) for size in graph.sizes}
        for batch, spec, graph in zip(batches, map(example_of, shapes), graphs, strict=True)
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
