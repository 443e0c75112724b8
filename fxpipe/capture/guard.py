"""Guard: the facts of a micro-batch for which a capture is valid, and the captures of one kind of micro-batch.

Takes the pattern of a micro-batch. Gives whether a capture is valid for it, and otherwise the reasons in words.

A guard compares, in this order:

1. values: the inputs that are given, their fixed values and types, the flags of the model, and the modes of the call;
2. reads: the values of the attributes that forward reads;
3. answers: the outcomes of the questions that forward asks about its inputs;
4. sizes: the sizes and strides of the inputs.

A guard runs no model and reads no number of a tensor. Only ``Captures`` remembers captures, and drops them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch

from fxpipe.batch.description import Description
from fxpipe.batch.pattern import Pattern
from fxpipe.graph.gathering import Places
from fxpipe.graph.program import Program, SizeGuard
from fxpipe.graph.question import Answers
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.trace.checks.sizes import outline, tensors_of, varying
from fxpipe.trace.request import Place


@dataclass(frozen=True, eq=False)
class Sizes:
    """The sizes for which a capture is valid: those of ``shape``, and all for which ``holds_for`` returns True."""

    shape: Description
    """The micro-batch that was captured."""
    free: frozenset[Place] = frozenset()
    """The dimensions that the tracer may have kept symbolic."""
    holds_for: SizeGuard | None = None
    """The conditions on symbolic sizes; None if the capture has none."""

    def hold(self, shape: Description) -> bool:
        """Whether the capture is valid for a micro-batch of the same outline."""
        if shape == self.shape or self.holds_for is None:
            return shape == self.shape
        # A guard of torch.export reads the sizes and strides of tensors; tensors on the meta device take no memory.
        likes = (like for _, _, like in tensors_of(shape))
        return self.holds_for([torch.empty_strided(like.shape, like.stride, device="meta") for like in likes])


@dataclass(frozen=True, eq=False)
class Guard:
    """The facts for which a capture is valid. A guard is compared by identity: each capture has its own."""

    values: Pattern
    """The pattern of the micro-batch, without sizes and answers. It includes ``reads``."""
    sizes: Sizes | None = None
    """The sizes; None if the capture is valid for any sizes."""
    answers: Answers = ()

    @property
    def reads(self) -> tuple[int, ...]:
        """The number of the state of the attributes that forward reads; all ranks' numbers, if they differ."""
        return self.values.flags.states or (self.values.flags.state,)

    def holds(self, batch: Pattern) -> bool:
        """Whether the capture is valid for a micro-batch with this pattern."""
        if self.values != batch.for_any_shape():
            return False
        if self.sizes is None:
            return True
        answered = set(self.answers) <= set(batch.answered)
        return answered and batch.shape is not None and self.sizes.hold(batch.shape)


@dataclass(frozen=True, eq=False)
class Captured:
    """A capture: the stages of a micro-batch, and the guard for which they are valid."""

    graph: StageGraph
    guard: Guard | None
    """None for the user's own stages, which are valid for any batch."""
    text: str
    """The captured program, for the comparison between ranks."""
    tracer: str = ""
    program: Program | None = None
    """The program from which the stages were cut, if some stages gather."""
    fixed_sizes: str = ""
    """A report of the varying sizes that forward turns into numbers, and where."""
    places: Places = field(default_factory=dict)
    """The row dimensions of gathered values, if the stages are valid for one shape."""
    groups: tuple[Guard, ...] = ()
    """The guards of the captures for groups of micro-batches that gave their stages."""

    @property
    def of_one_shape(self) -> bool:
        """Whether the stages are tied to the captured shape."""
        return self.guard is not None and self.guard.sizes is not None

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards of all captures from which the stages are."""
        return tuple(filter(None, (self.guard, *self.groups)))

    def with_tensors_of_module(self) -> Captured:
        """The same capture, whose stages hold the module's present tensors."""
        return replace(self, graph=self.graph.with_tensors_of_module())


KindKey = tuple[Pattern, Hashable]


def kind_of(batch: Pattern, shape: Description | None) -> KindKey:
    """A key that is equal for micro-batches that differ only in answers and sizes. ``shape``: the micro-batch's
    inputs; None: the key is equal for any inputs of these names."""
    return batch.for_any_shape(), None if shape is None else outline(shape)


@dataclass(frozen=True)
class Family:
    """The captures of one kind of micro-batch, and the sizes in which its micro-batches were seen to differ."""

    captured: tuple[Captured, ...] = ()
    """In the order in which they are tried: for many sizes, the latest first, and then for one size."""
    latest: Description | None = None
    """The shape captured last."""
    varying: frozenset[Place] = frozenset()
    """Dimensions that were seen to vary."""

    def free(self, shape: Description) -> frozenset[Place]:
        """The dimensions of a new shape to be kept symbolic: they vary, and their size in the shape is not 1."""
        sizes = ((name, index, enumerate(like.shape)) for name, index, like in tensors_of(shape))
        large = {(name, index, dim) for name, index, dims in sizes for dim, size in dims if size > 1}
        return varying(shape, self.latest) | (self.varying & large)

    def with_captured(self, captured: Captured, sizes: Sizes | None) -> Family:
        """The family with one more capture."""
        if sizes is None:
            return Family((captured, *self.captured))
        is_general = sizes.holds_for is not None
        more = (captured, *self.captured) if is_general else (*self.captured, captured)
        return Family(more, sizes.shape, self.varying | varying(sizes.shape, self.latest))
