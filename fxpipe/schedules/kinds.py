"""Kinds of actions: one row of a table for each, with all that the rest of fxpipe asks about it.

A new kind is a row here, and a runner in ``fxpipe.run.actions.RUNNERS``. No other code compares kinds with each other:
it asks the row, so that a kind which is neither a forward nor a backward is never taken for one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol


class Direction(enum.Enum):
    """The two ways of values through the stage graph: with its edges (values), and against them (gradients)."""

    FORWARD = "F"
    BACKWARD = "B"

    __hash__ = object.__hash__  # a member is one object; tables hash members often, and Enum's own hash is slow


class Lane(enum.Enum):
    """The two copy lanes of a rank, which run while its actions run."""

    OUT = "to the host"
    BACK = "from the host"

    __hash__ = object.__hash__


class Tone(NamedTuple):
    """The colour of a kind in pictures: OKLCH lightness and chroma; the hue is the stage's.

    ``stripes``: the lightness of stripes across it, if any.
    """

    lightness: float
    chroma: float
    stripes: float | None = None


class Times(Protocol):
    """The times of each stage, as ``Costs`` has them."""

    @property
    def forward(self) -> tuple[float, ...]: ...
    @property
    def backward(self) -> tuple[float, ...]: ...
    @property
    def input(self) -> tuple[float, ...]: ...
    @property
    def weight(self) -> tuple[float, ...]: ...
    @property
    def none(self) -> tuple[float, ...]: ...


class Held(NamedTuple):
    """What a stage holds of a micro-batch, in bytes or in micro-batches: ``whole`` from its forward on, ``inputs`` from
    a forward that an R follows to that R, ``left`` between I and W, ``remains`` between O and P. ``recomputed``: an R
    follows this forward."""

    whole: float
    inputs: float
    left: float
    remains: float
    recomputed: bool

    @property
    def remains_for_weights(self) -> float:
        """What stays between an O and a P after I: at most what W needs."""
        return min(self.remains, self.left)


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of action, for example ``Kind.F``. Each kind is a single object: compare with ``is``.

    F: forward. R: the forward again, for the backward (recomputation). B: full backward. I and W: the two halves of a
    backward, the gradients of inputs (I) and of weights (W). O: offload: the activations have left for the host's
    memory, and their memory on the device is free. P: prefetch: their memory on the device is taken again, and they
    begin to come back. OW and PW: the O and the P of what W needs, between I and W.

    OW and PW print as O and P. Their position in a row tells them apart: ``by_position``.
    """

    F: ClassVar[Kind]
    R: ClassVar[Kind]
    B: ClassVar[Kind]
    I: ClassVar[Kind]  # noqa: E741
    W: ClassVar[Kind]
    O: ClassVar[Kind]  # noqa: E741
    P: ClassVar[Kind]
    OW: ClassVar[Kind]
    PW: ClassVar[Kind]
    __members__: ClassVar[dict[str, Kind]]
    """``KINDS``, as of an enum: messages between ranks have a kind by its name."""

    letter: str
    """The kind's letter in a cell: "F" in ``2F0``."""
    words: str
    """The kind in words, for errors and pictures."""
    tone: Tone
    times: Callable[[Times], tuple[float, ...]]
    """``Costs`` → the action's time at each stage."""
    change: Callable[[Held], float]
    """How much more a stage with a backward holds of a micro-batch after the action; negative if the action frees it.
    Over all actions of a micro-batch the changes sum to 0."""
    part_of: Direction | None = None
    """The pass that the action belongs to. Evaluation runs the forward pass alone; a micro-batch without weight has no
    backward pass. None: neither, so that the action runs in every step of training."""
    messages: Direction | None = None
    """What the action takes from other stages and gives to other stages: values, gradients (BACKWARD), or nothing."""
    after: str | None = None
    """The name of the kind of the action of the same stage and micro-batch that must have run."""
    replaces: str | None = None
    """The name of a kind: where a table has this action, later actions of the pass wait for it in place of the action
    of that kind."""
    is_optional: bool = False
    """Whether tables may lack the action. If it is part of the backward pass, a stage has it for all micro-batches or
    for none, except for ``OFFLOADS``, which each micro-batch of a stage has or lacks."""
    completes_gradients: bool = False
    """Whether the gradients of the stage's parameters are complete after the action, for its micro-batch."""
    lane: Lane | None = None
    """The copy lane of an action that computes nothing. OUT: the copy begins at the end of the action ``after``, and
    this action waits for it. BACK: the copy begins here, and the action that waits for this action waits for it."""
    half: str = ""
    """The letter of the half of a backward that the action is for, where another kind has the same letter."""

    @property
    def name(self) -> str:
        """The name of the kind in code. No two kinds have the same name."""
        return self.letter + self.half

    def __str__(self) -> str:
        return self.letter

    def __repr__(self) -> str:
        return f"Kind.{self.name}"

    def __reduce__(self) -> tuple[Callable[[str], Kind], tuple[str]]:
        return kind_of, (self.name,)  # copies, and other processes, get the object of the table


FORWARD, BACKWARD = Direction

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "F",
            "forward",
            Tone(0.85, 0.085),
            part_of=FORWARD,
            messages=FORWARD,
            times=lambda costs: costs.forward,
            change=lambda load: load.inputs if load.recomputed else load.whole,
        ),
        Kind(
            "R",
            "recomputation",
            Tone(0.78, 0.085, stripes=0.86),
            part_of=BACKWARD,
            after="F",
            replaces="F",
            is_optional=True,
            times=lambda costs: costs.forward,
            change=lambda load: load.whole - load.inputs,
        ),
        Kind(
            "B",
            "backward",
            Tone(0.52, 0.135),
            part_of=BACKWARD,
            messages=BACKWARD,
            after="F",
            completes_gradients=True,
            times=lambda costs: costs.backward,
            change=lambda load: -load.whole,
        ),
        Kind(
            "I",
            "input gradients",
            Tone(0.68, 0.125),
            part_of=BACKWARD,
            messages=BACKWARD,
            after="F",
            replaces="B",
            times=lambda costs: costs.input,
            change=lambda load: load.left - load.whole,
        ),
        Kind(
            "W",
            "weight gradients",
            Tone(0.90, 0.05, stripes=0.79),
            part_of=BACKWARD,
            after="I",
            completes_gradients=True,
            times=lambda costs: costs.weight,
            change=lambda load: -load.left,
        ),
        Kind(
            "O",
            "offload",
            Tone(0.90, 0.03),
            part_of=BACKWARD,
            after="F",
            is_optional=True,
            lane=Lane.OUT,
            times=lambda costs: costs.none,
            change=lambda load: load.remains - load.whole,
        ),
        Kind(
            "P",
            "prefetch",
            Tone(0.70, 0.03),
            part_of=BACKWARD,
            after="O",
            replaces="F",
            is_optional=True,
            lane=Lane.BACK,
            times=lambda costs: costs.none,
            change=lambda load: load.whole - load.remains,
        ),
        Kind(
            "O",
            "offload for W",
            Tone(0.95, 0.03),
            part_of=BACKWARD,
            after="I",
            is_optional=True,
            lane=Lane.OUT,
            half="W",
            times=lambda costs: costs.none,
            change=lambda load: load.remains_for_weights - load.left,
        ),
        Kind(
            "P",
            "prefetch for W",
            Tone(0.75, 0.03),
            part_of=BACKWARD,
            after="OW",
            replaces="I",
            is_optional=True,
            lane=Lane.BACK,
            half="W",
            times=lambda costs: costs.none,
            change=lambda load: load.left - load.remains_for_weights,
        ),
    )
}
"""Name → kind, in the order of legends."""

Kind.__members__ = KINDS
for _kind in KINDS.values():
    setattr(Kind, _kind.name, _kind)

BACKWARDS = ({Kind.B}, {Kind.I, Kind.W})
"""The two ways to make a backward: the whole, or its two halves."""
OFFLOADS = {Kind.F: (Kind.O, Kind.P), Kind.I: (Kind.OW, Kind.PW)}
"""The kind of the action after which activations may leave → the offload and the prefetch before their next use. A
micro-batch has both or neither, and no R."""


def by_position(kind: Kind, is_after_i: bool) -> Kind:
    """Returns the kind of a cell, by its letter, and by whether the cell comes after the I of its micro-batch."""
    early, late = OFFLOADS.values()
    for pair in (early, late):
        if kind in pair:
            return (late if is_after_i else early)[pair.index(kind)]
    return kind


def kind_of(name: str) -> Kind:
    return KINDS[name]
