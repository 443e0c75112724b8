"""Sizes: in what micro-batches of one kind differ, and for which of them a capture holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.batch.description import Description, example_of
from fxpipe.batch.pattern import Pattern
from fxpipe.graph.like import TensorLike
from fxpipe.graph.program import SizeGuard
from fxpipe.graph.question import Answers
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.precision import Precision
from fxpipe.trace.request import Place
from fxpipe.validation import is_list


def tensors_of(description: Description) -> list[tuple[str, int, TensorLike]]:
    """Each tensor among the inputs: the input, which of its leaves, and what it is."""
    return [
        (name, place, leaf)
        for name, given in description
        if given.kind == "input"
        for place, leaf in enumerate(given.detail[1])
        if isinstance(leaf, TensorLike)
    ]


def changing(shapes: Iterable[Description]) -> tuple[list[str], list[str]]:
    """The inputs of these micro-batches whose sizes are several, and those in which what is no tensor is."""
    sizes, values = defaultdict[str, set[Any]](set), defaultdict[str, set[Any]](set)
    for name, given in (pair for shape in shapes for pair in shape):
        sizes[name].add(tuple(given.shapes))
        values[name].add(
            tuple(leaf for leaf in given.detail[1] if not isinstance(leaf, TensorLike)) if given.like else ()
        )
    first, second = ([name for name, found in kind.items() if len(found) > 1] for kind in (sizes, values))
    return first, second


def sizes_between(then: Description, now: Description, or_same: bool = False) -> dict[int, int]:
    """Sizes of the inputs of one micro-batch, and what they are in another one; where one size has become several, it
    is left out. ``or_same``: but not where it is the same in some inputs, as a width is, and one other in the rest."""
    before = {(name, place): leaf.shape for name, place, leaf in tensors_of(then)}
    pairs = [
        pair
        for name, place, leaf in tensors_of(now)
        for pair in zip(before.get((name, place), ()), leaf.shape, strict=False)
    ]
    return _unambiguous(pairs, or_same)


def entries_between(then: Description, now: Description) -> dict[int, int]:
    """How many entries the lists among the inputs have had, and how many they have now, as ``sizes_between``."""
    before = {name: given.like for name, given in then if is_list(given.like)}
    return _unambiguous([(len(before[name]), len(g.like)) for name, g in now if name in before and is_list(g.like)])


def _unambiguous(pairs: Iterable[tuple[int, int]], or_same: bool = False) -> dict[int, int]:
    """What each number has become, of those that have become one."""
    found: dict[int, set[int]] = {}
    for old, new in pairs:
        found.setdefault(old, set()).add(new)
    if or_same:
        found = {old: new - {old} or new for old, new in found.items()}
    return {old: new.pop() for old, new in found.items() if len(new) == 1}


def unlike(then: Description, now: Description) -> tuple[int, int]:
    """How little one micro-batch shows of another: how many of its sizes are several there, and how many others."""
    several, sizes = sizes_between(then, now), {size for _, _, leaf in tensors_of(then) for size in leaf.shape}
    return len(sizes - several.keys()), sum(old != new for old, new in several.items())


def outline(description: Description) -> Hashable:
    """What micro-batches that differ in sizes alone have in common."""

    # How many dimensions, not how long: strides follow from sizes, and are left out with them.
    def without_sizes(leaf: object) -> object:
        if not isinstance(leaf, TensorLike):
            return leaf
        return len(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad

    return tuple(
        (name, given.kind, given.detail)
        if given.kind != "input"
        else (name, given.detail[0], tuple(map(without_sizes, given.detail[1])))
        for name, given in description
    )


def varying(now: Description, then: Description | None) -> frozenset[Place]:
    """The dimensions that have another size in a micro-batch of the same outline; none where there is no other one.

    A size of 1 is none of them: what a dimension of 1 means, such as to be expanded, is another program.
    """
    pairs = () if then is None else zip(tensors_of(now), tensors_of(then), strict=True)
    return frozenset(
        (name, place, dim)
        for (name, place, mine), (_, _, other) in pairs
        for dim, (size, old) in enumerate(zip(mine.shape, other.shape, strict=True))
        if size > 1 and old not in (1, size)
    )


def with_sizes(
    batches: Sequence[dict[str, Any]], graphs: Sequence[StageGraph], shapes: Sequence[Description]
) -> list[dict[str, Any]]:
    """The micro-batches, with the sizes that stages are given of inputs: all ranks know them, by the descriptions."""
    if not any(graph.sizes for graph in graphs):
        return list(batches)
    return [
        batch | {size: size.of(like) for size in graph.sizes}
        for batch, like, graph in zip(batches, map(example_of, shapes), graphs, strict=True)
    ]


def bytes_of_inputs(shapes: Iterable[Description], precision: Precision | None = None) -> dict[str, int]:
    """Input → the bytes of its tensors, in all of these micro-batches, with the copies that a step computes with where
    ``precision`` changes their type."""
    found: dict[str, int] = {}
    for shape in shapes:
        for name, _, leaf in tensors_of(shape):
            each = leaf.dtype.itemsize
            if precision is not None and leaf.dtype.is_floating_point and leaf.dtype != precision.compute:
                each += precision.compute.itemsize
            found[name] = found.get(name, 0) + math.prod(leaf.shape) * each
    return found


# --- Which sizes of micro-batches were seen to vary ---

FAMILIES = 256
"""So many are remembered."""


@dataclass(frozen=True)
class Family:
    """Micro-batches that differ in sizes alone: what was seen to vary, and the captures with symbolic sizes."""

    latest: Description | None = None
    """The shape captured last."""
    varying: frozenset[Place] = frozenset()
    """Dimensions that were seen to vary."""
    general: tuple[tuple[Pattern, SizeGuard], ...] = ()
    """The latest last."""

    def holding(self, shape: Description, answers: Answers) -> Pattern | None:
        """The pattern of the latest capture that holds for this shape, and these answers, too."""
        fitting = [entry for entry in reversed(self.general) if set(entry[0].answered) <= set(answers)]
        likes = [like for _, _, like in tensors_of(shape)]
        # A guard of torch.export asks tensors for their sizes and strides; on the meta device they take no memory.
        tensors = [torch.empty_strided(like.shape, like.stride, device="meta") for like in likes]
        return next((pattern for pattern, guard in fitting if guard(tensors)), None)

    def free(self, shape: Description) -> frozenset[Place]:
        """The dimensions of a new shape to be kept symbolic: those that vary, and are not of size 1 in it."""
        sizes = ((name, place, enumerate(like.shape)) for name, place, like in tensors_of(shape))
        large = {(name, place, dim) for name, place, dims in sizes for dim, size in dims if size > 1}
        return varying(shape, self.latest) | (self.varying & large)

    def noting(self, shape: Description, pattern: Pattern, guard: SizeGuard | None) -> Family:
        """The family, once a shape was captured."""
        return Family(
            shape,
            self.varying | varying(shape, self.latest),
            self.general if guard is None else (*self.general, (pattern, guard)),
        )
