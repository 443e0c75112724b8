"""Sizes: in what micro-batches of one kind differ, and for which of them a capture holds."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fxpipe.errors import TraceError
from fxpipe.graph.like import TensorLike
from fxpipe.graph.program import SizeGuard
from fxpipe.graph.question import Answers
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.plan.inputs.batch import Description, InputDescription
from fxpipe.plan.inputs.pattern import Pattern
from fxpipe.precision import Precision
from fxpipe.progress import log
from fxpipe.trace.request import Place
from fxpipe.validation import is_list


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


def sizes_between(then: Description, now: Description, or_same: bool = False) -> dict[int, int]:
    """Sizes of the inputs of one micro-batch, and what they are in another one; where one size has become several, it
    is left out. ``or_same``: but not where it is the same in some inputs, as a width is, and one other in the rest."""
    before = {(name, place): leaf for name, place, leaf in tensors_of(then)}
    found: dict[int, set[int]] = {}
    for name, place, leaf in tensors_of(now):
        for old, new in zip(before[name, place].shape if (name, place) in before else (), leaf.shape, strict=False):
            found.setdefault(old, set()).add(new)
    if or_same:
        found = {old: new - {old} or new for old, new in found.items()}
    return {old: new.pop() for old, new in found.items() if len(new) == 1}


def entries_between(then: Description, now: Description) -> dict[int, int]:
    """How many entries the lists among the inputs have had, and how many they have now, as ``sizes_between``."""
    before, found = dict(then), dict[int, set[int]]()
    for name, given in now:
        if is_list(given.like) and name in before and is_list(before[name].like):
            found.setdefault(len(before[name].like), set()).add(len(given.like))
    return {old: new.pop() for old, new in found.items() if len(new) == 1}


def unlike(then: Description, now: Description) -> tuple[int, int]:
    """How little one micro-batch shows of another: how many of its sizes are several there, and how many others."""
    several, sizes = sizes_between(then, now), {size for _, _, leaf in tensors_of(then) for size in leaf.shape}
    return len(sizes - several.keys()), sum(old != new for old, new in several.items())


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


def varying(description: Description, others: Iterable[Description]) -> frozenset[Place]:
    """The dimensions that have another size in some of the others, which have the same outline.

    A size of 1 is none of them: what a dimension of 1 means, such as to be expanded, is another program.
    """
    found = set()
    for (name, place, mine), *rest in zip(*map(tensors_of, [description, *others]), strict=True):
        for dim, size in enumerate(mine.shape):
            if size > 1 and any(other.shape[dim] not in (1, size) for _, _, other in rest):
                found.add((name, place, dim))
    return frozenset(found)


def differences(shapes: Iterable[Description]) -> str:
    """Which inputs differ between micro-batches, and in which dimensions, in words."""
    found: dict[str, list[InputDescription | None]] = {}
    described = [dict(shape) for shape in shapes]
    for name in dict.fromkeys(name for one in described for name in one):
        found[name] = [one.get(name) for one in described]
    return ", ".join(_in_words(name, given) for name, given in found.items() if len(set(given)) > 1)


def _in_words(name: str, given: Sequence[InputDescription | None]) -> str:
    """An input, and the dimensions in which it varies, where nothing else does."""
    if None in given or len({outline(((name, one),)) for one in given if one is not None}) > 1:
        return f"{name!r}"
    shapes = zip(*(one.shapes for one in given if one is not None), strict=True)
    dims = {dim for leaf in shapes for dim, sizes in enumerate(zip(*leaf, strict=True)) if len(set(sizes)) > 1}
    return f"{name!r} in dimension {' and '.join(map(str, sorted(dims)))}"


def size_at(description: Description, place: Place) -> int:
    """The size of a dimension of an input."""
    name, leaf, dim = place
    return next(like.shape[dim] for one, number, like in tensors_of(description) if (one, number) == (name, leaf))


def holds(guard: SizeGuard, description: Description) -> bool:
    """Whether a capture with this guard holds for such micro-batches, whose outline is that of its own."""
    return guard([_Sized(tensor) for _, _, tensor in tensors_of(description)])


@contextlib.contextmanager
def naming_what_is_absent(description: Description) -> Iterator[None]:
    """A TraceError names the inputs of which a micro-batch has nothing, where it has of others."""
    try:
        yield
    except TraceError as error:
        nothing = [
            f"{name!r} has shape {list(like.shape)}" for name, _, like in tensors_of(description) if 0 in like.shape
        ]
        if not nothing:
            raise
        raise TraceError(
            f"{error}\nthis is a micro-batch in which {' and '.join(nothing)}; where the model cannot take that, as "
            ".view(..., -1) of nothing cannot, give each micro-batch some: order the rows so, or write fewer "
            "microbatches=, or add what counts for nothing, such as an image whose words have no labels"
        ) from error


def with_sizes(
    batches: Sequence[dict[str, Any]], graphs: Sequence[StageGraph], shapes: Sequence[Description]
) -> list[dict[str, Any]]:
    """The micro-batches, with the sizes that stages are given of inputs: all ranks know them, by the descriptions."""
    if not any(graph.sizes for graph in graphs):
        return list(batches)
    likes = [{name: given.like for name, given in shape} for shape in shapes]
    return [
        batch | {size: size.of(like) for size in graph.sizes}
        for batch, like, graph in zip(batches, likes, graphs, strict=True)
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


# --- Varying: which sizes of micro-batches were seen to vary, and how many captures that took ---

FAMILIES = 256
"""So many are remembered."""
_REMEMBERED = 20
"""With so many captured shapes a new one is compared; of earlier ones it is known what varied."""


@dataclass
class Family:
    """Micro-batches that differ in sizes alone: those captured so far, and the captures with symbolic sizes."""

    shapes: deque[Description] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    varying: frozenset[Place] = frozenset()
    """Dimensions that were seen to vary, by shapes that are no longer remembered, too."""
    general: list[tuple[Pattern, SizeGuard]] = field(default_factory=list)

    def copy(self) -> Family:
        """One that changes by itself."""
        return dataclasses.replace(self, shapes=self.shapes.copy(), general=list(self.general))

    def holding(self, shape: Description | None, answers: Answers = ()) -> Pattern | None:
        """The pattern of the latest capture that holds for this shape, and these answers, too."""
        if shape is None:
            return None
        fitting = [entry for entry in reversed(self.general) if set(entry[0].answered) <= set(answers)]
        return next((pattern for pattern, guard in fitting if holds(guard, shape)), None)

    def free(self, shape: Description | None) -> frozenset[Place]:
        """The dimensions of a new shape to be kept symbolic: those that vary, and are not of size 1 in it."""
        if shape is None:
            return frozenset()
        return varying(shape, self.shapes) | frozenset(place for place in self.varying if size_at(shape, place) > 1)

    def note(self, shape: Description, pattern: Pattern, guard: SizeGuard | None) -> None:
        """A shape was captured."""
        self.varying |= varying(shape, self.shapes)
        self.shapes.append(shape)
        self.general += [] if guard is None else [(pattern, guard)]


@dataclass
class Count:
    """Of captures, for a word where they are many."""

    shapes: deque[Description] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    number: int = 0
    fixed: dict[str, None] = field(default_factory=dict)
    """What was reported of sizes that captures have as numbers."""

    def copy(self) -> Count:
        """One that changes by itself."""
        return dataclasses.replace(self, shapes=self.shapes.copy(), fixed=dict(self.fixed))

    def note(self, shape: Description, fixed_sizes: str, tracer: str, asked: Sequence[str]) -> None:
        """Tells of sizes that a capture has as numbers, and of the tenth capture. ``asked``: what forward asks."""
        self.shapes.append(shape)
        self.number += 1
        if fixed_sizes and fixed_sizes not in self.fixed:
            self.fixed[fixed_sizes] = None
            log(f"fxpipe: {fixed_sizes}")
        if self.number == MANY:
            ways = [differences(self.shapes), "what forward asks about their values" + _ASKS if asked else ""]
            what = f"{MANY} captures by now, since batches differ in {', and in '.join(filter(None, ways))}"
            log("\n".join([f"fxpipe: {what}{_REMEDY.get(tracer, '')}", *self.fixed, *asked]))


MANY = 10
"""So many captures are worth a word."""
_ASKS = ', where computing with tensors, or an opaque part, boundaries={"name.of.it": "whole"}, would take one'
_REMEDY = {
    "record": "; what record captures has each size and number as it was: pad batches to a few sizes, or, where it "
    'captures the model, write tracer="export", which keeps sizes that vary symbolic'
}


def family_of(pattern: Pattern, shape: Description) -> Hashable:
    return dataclasses.replace(pattern, shapes=(), answers=()), outline(shape)
