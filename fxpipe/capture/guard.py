"""Guard: the facts of a micro-batch for which a capture is valid, and the captures of one kind of micro-batch.

Takes the pattern of a micro-batch. Gives whether a capture is valid for it, and otherwise the reasons in words.

A guard compares, in this order:

1. Values: the inputs that are given, their fixed values and types, the flags of the model, and the modes of the call.
2. Reads: the values of the attributes that forward reads.
3. Answers: the outcomes of the questions that forward asks about its inputs.
4. Sizes: the sizes and strides of the inputs.

A guard runs no model and reads no number of a tensor. Only ``Captures`` remembers captures, and drops them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn

from fxpipe.batch.description import Description
from fxpipe.batch.pattern import Pattern
from fxpipe.capture.questions import Questions
from fxpipe.graph.gathering import Places
from fxpipe.graph.program import Program, SizeGuard
from fxpipe.graph.question import Answers
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.notebook import listed
from fxpipe.specs import TensorSpec
from fxpipe.trace.checks.sizes import outline, tensors_of, varying
from fxpipe.trace.reads import Reads
from fxpipe.trace.request import Place, named


@dataclass(frozen=True, eq=False)
class Sizes:
    """The sizes for which a capture is valid: the sizes of ``shape``, and all for which ``holds_for`` returns True."""

    shape: Description
    """The micro-batch that was captured."""
    free: frozenset[Place] = frozenset()
    """The dimensions that the tracer may have kept symbolic."""
    holds_for: SizeGuard | None = None
    """The conditions on symbolic sizes; None if the capture has none."""

    @cached_property
    def outline(self) -> Hashable:
        """The inputs without their sizes."""
        return outline(self.shape)

    def hold(self, shape: Description) -> bool:
        """Whether the capture is valid for a micro-batch of this shape."""
        if shape == self.shape or self.holds_for is None or outline(shape) != self.outline:
            return shape == self.shape
        # A guard of torch.export reads the sizes and strides of tensors; tensors on the meta device take no memory.
        likes = (like for _, _, like in tensors_of(shape))
        return self.holds_for([torch.empty_strided(like.shape, like.stride, device="meta") for like in likes])

    def __str__(self) -> str:
        return "these sizes" if self.holds_for is None else f"these sizes, and others of {named(self.free)}"


@dataclass(frozen=True, eq=False)
class Guard:
    """The facts for which a capture is valid. A guard is compared by identity: each capture has its own."""

    values: Pattern
    """The pattern of the micro-batch, without sizes and answers. It includes ``reads``."""
    sizes: Sizes | None = None
    """The sizes; None if the capture is valid for any sizes."""
    answers: Answers = ()

    @property
    def shape(self) -> Description | None:
        """The micro-batch that was captured; None if the capture is valid for any sizes."""
        return None if self.sizes is None else self.sizes.shape

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

    def why_not(self, batch: Pattern, model: nn.Module, reads: Reads, questions: Questions) -> list[str]:
        """The reasons why the capture is not valid for a micro-batch, in words; empty if it is valid.

        Args:
            batch: the pattern of the micro-batch.
            model: the captured model, for the names of its modules and parameters.
            reads: the attributes that forward reads, in their present state. Their names are in the text.
            questions: the questions that forward asks. Their lines are in the text.
        """
        if self.holds(batch):
            return []
        mine, its, answered = self.values, batch, dict(batch.answered)
        # 1. Values.
        then, now = _described(mine, self.shape), _described(its, self.shape and its.shape)
        pairs = ((name, now.get(name, "not given"), then.get(name, "not given")) for name in {**then, **now})
        reasons = [f"input {name!r} is {new}, and was {old}" for name, new, old in pairs if new != old]
        reasons += ["its loss is computed" if its.with_loss else "it has no loss"] * (mine.with_loss != its.with_loss)
        if modes := mine.ambient.difference(its.ambient):
            reasons.append(f"it is called under different {modes}")
        if flags := mine.flags.difference(its.flags, model):
            reasons.append(f"{flags} has changed")
        # 2. Reads.
        if self.reads != Guard(its).reads:
            reasons.append(f"{reads.difference(mine.flags.state) or 'an attribute that forward reads'} has changed")
        # 3. Answers.
        asked = ((questions.line(key), answered.get(key, old), old) for key, old in self.answers)
        reasons += [f"the outcome of {line!r} is {new}, and was {old}" for line, new, old in asked if new != old]
        return reasons or ["its inputs have other strides, containers or devices"]

    def described(self, questions: Questions) -> str:
        """The micro-batches of the kind for which the capture is valid, in words."""
        asked = (f", where the outcome of {questions.line(key)!r} is {answer}" for key, answer in self.answers)
        return "".join([f"{self.sizes or 'any sizes'}", *asked])

    @property
    def inputs(self) -> str:
        """The inputs of the captured micro-batch, in words."""
        inputs = _described(self.values, self.shape)
        return ", ".join(f"{name} {words}" for name, words in inputs.items())


def _described(batch: Pattern, shape: Description | None) -> dict[str, str]:
    """The inputs of a micro-batch, in words: "float32 [4, 8]". ``shape``: their description; None: it is not known."""

    def words(leaf: Any) -> str:
        if isinstance(leaf, TensorSpec):
            return f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.")
        return leaf[1] if isinstance(leaf, tuple) else f"{leaf}"

    if shape is None:
        given = batch.given[0]
        return {**dict.fromkeys(given.inputs, "given"), **{name: repr(value) for name, value in given.fixed}}
    return {
        name: listed(list(map(words, entry.detail[1]))) if entry.kind == "input" else repr(entry.detail)
        for name, entry in shape
    }


@dataclass(frozen=True, eq=False)
class Captured:
    """A capture: the stages of a micro-batch, and the guard for which they are valid."""

    graph: StageGraph
    guard: Guard
    text: str
    """The captured program, for the comparison between ranks."""
    tracer: str = ""
    program: Program | None = None
    """The program from which the stages were cut, if some stages gather."""
    fixed_sizes: str = ""
    """A report of the varying sizes that forward turns into numbers, and where."""
    places: Places = field(default_factory=dict)
    """The row dimensions of gathered values, if the stages are valid for one shape."""
    why: str = ""
    """Why it was captured, in words."""
    groups: tuple[Guard, ...] = ()
    """The guards of the captures for groups of micro-batches that gave their stages."""

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards of all captures from which the stages are."""
        return (self.guard, *self.groups)

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
    """The captures of one kind of micro-batch, and the sizes in which its micro-batches were seen to differ.

    1. The first shape of a family is captured with its sizes as numbers.
    2. The second shape shows which dimensions vary. These stay symbolic in its capture, and in all later captures.
    3. A later shape first looks for a capture of the family that is valid for it (``holding``).

    A value: ``with_captured`` returns a new one.
    """

    captured: tuple[Captured, ...] = ()
    """In the order in which they were made."""
    latest: Description | None = None
    """The shape captured last."""
    varying: frozenset[Place] = frozenset()
    """Dimensions that were seen to vary."""

    def free(self, shape: Description) -> frozenset[Place]:
        """The dimensions of a new shape to be kept symbolic: they vary, and their size in the shape is not 1."""
        # 2. vary now, or have varied before
        sizes = ((name, index, enumerate(like.shape)) for name, index, like in tensors_of(shape))
        large = {(name, index, dim) for name, index, dims in sizes for dim, size in dims if size > 1}
        return varying(shape, self.latest) | (self.varying & large)

    def with_captured(self, captured: Captured) -> Family:
        """The family with one more capture."""
        more, shape = (*self.captured, captured), captured.guard.shape
        return Family(more, shape, self.varying | varying(shape, self.latest) if shape else frozenset())

    def holding(self, batch: Pattern) -> Captured | None:
        """The capture that is valid for a micro-batch: the latest for many sizes, or else for its sizes."""
        # 3. symbolic sizes first
        general = (each for each in reversed(self.captured) if each.guard.sizes and each.guard.sizes.holds_for)
        valid = (each for each in chain(general, self.captured) if each.guard.holds(batch))
        return next(valid, None)
