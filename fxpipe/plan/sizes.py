"""Sizes: in what micro-batches of one kind differ, and for which of them a capture holds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from fxpipe.graph.like import TensorLike
from fxpipe.graph.program import SizeGuard
from fxpipe.plan.batch import Description
from fxpipe.trace.request import Place


class _Sized(NamedTuple):
    """Answers what a guard asks of a tensor."""

    like: TensorLike

    def size(self) -> tuple[int, ...]:
        return self.like.shape

    def stride(self) -> tuple[int, ...]:
        return self.like.stride

    def storage_offset(self) -> int:
        return 0


def tensors_of(description: Description) -> list[tuple[str, int, TensorLike]]:
    """Each tensor among the inputs: the input, which of its leaves, and what it is."""
    return [
        (name, place, leaf)
        for name, given in description
        if given.kind == "input"
        for place, leaf in enumerate(given.detail[1])
        if isinstance(leaf, TensorLike)
    ]


def outline(description: Description) -> Hashable:
    """What micro-batches that differ in sizes alone have in common."""
    return tuple(
        (name, given.kind, given.detail)
        if given.kind != "input"
        else (name, given.detail[0], tuple(_without_sizes(leaf) for leaf in given.detail[1]))
        for name, given in description
    )


def _without_sizes(leaf: object) -> object:
    if not isinstance(leaf, TensorLike):
        return leaf
    return len(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad


def varying(description: Description, others: Sequence[Description]) -> frozenset[Place]:
    """The dimensions that have another size in some of the others, which have the same outline.

    A size of 1 is none of them: what a dimension of 1 means, such as to be expanded, is another program.
    """
    found = set()
    for (name, place, mine), *rest in zip(*map(tensors_of, [description, *others]), strict=True):
        for dim, size in enumerate(mine.shape):
            if size > 1 and any(other.shape[dim] not in (1, size) for _, _, other in rest):
                found.add((name, place, dim))
    return frozenset(found)


def names_of(shapes: Sequence[Description]) -> str:
    """The inputs, and in which dimensions they differ, in words."""
    places = frozenset().union(*(varying(shape, shapes) for shape in shapes))
    return ", ".join(f"{name!r} in dimension {dim}" for name, _, dim in sorted(places))


def holds(guard: SizeGuard, description: Description) -> bool:
    """Whether a capture with this guard holds for such micro-batches, whose outline is that of its own."""
    return guard([_Sized(tensor) for _, _, tensor in tensors_of(description)])
