"""Costs: the time of each action at each stage, the time of a message between two ranks, and the bytes held."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, KINDS, OFFLOADS, Held, Kind
from fxpipe.validation import is_list, shown

_BYTES = ("activation_bytes", "input_bytes", "deferred_bytes", "again_bytes", "kept_bytes")

Cost = float | Sequence[float]
"""One number for all stages, or a list with a number per stage."""


@dataclass(frozen=True)
class Costs:
    """The time of each action at each stage, in one unit of time, and the bytes that stages hold. The time at a
    gathered stage is for a whole group. All bytes are per micro-batch. Make costs with ``Costs.of``.

    >>> costs = Costs.of(2, forward=[1, 3], backward=[2, 6], comm=0.25)
    >>> costs.weight, costs.input
    ((1.0, 3.0), (1.0, 3.0))
    >>> costs.per_microbatch(1, has_backward=True)
    9.0
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """The time of the full backward, I and W together."""
    weight: tuple[float, ...]
    """The part of the backward's time that W takes; I takes the rest."""
    comm: float = 0.0
    """The time of a message between two ranks. Each directed pair of ranks carries one message at a time."""
    activation_bytes: tuple[float, ...] | None = None
    """The bytes that a stage holds of a micro-batch from its forward to the end of its backward; None if unknown."""
    input_bytes: tuple[float, ...] | None = None
    """The bytes that a recomputed stage holds of a micro-batch from its F to its R; None counts as 0."""
    deferred_bytes: tuple[float, ...] | None = None
    """The bytes that a stage holds of a micro-batch between its I and its W: inputs and output gradients of the calls
    that W differentiates. None: all of ``activation_bytes``."""
    again_bytes: tuple[float, ...] | None = None
    """The additional bytes that the backward of a micro-batch holds while it runs: the largest recomputation of any of
    the model's own checkpoints. None: 0 bytes."""
    source: str = field(default="", compare=False)
    """The origin of times in seconds, in words: "costs measured"; empty if the unit may be another."""
    kept_bytes: tuple[float, ...] | None = None
    """The bytes that an offloaded stage holds of a micro-batch between O and P; None counts as 0. Between an O and a P
    after I the stage holds at most what W needs."""
    copy: tuple[float, ...] | None = None
    """The time of a copy of a micro-batch's activations to the host, and of the copy back; None: as long as F. A rank
    has a lane each way, which copies one action's micro-batches at a time, while the rank's actions run. The copy of
    what W needs takes the part of this time that ``deferred_bytes`` is of ``activation_bytes``."""
    duplex: bool = True
    """Whether the two lanes of a rank copy at the same time. False: they take turns."""

    @staticmethod
    def of(
        stages: int,
        forward: Cost = 1,
        backward: Cost = 2,
        weight: Cost | None = None,
        comm: float = 0,
        activation_bytes: Cost | None = None,
        input_bytes: Cost | None = None,
        deferred_bytes: Cost | None = None,
        copy: Cost | None = None,
        kept_bytes: Cost | None = None,
        duplex: bool = True,
    ) -> Costs:
        """Returns the costs of so many stages; each cost is one number for all stages, or a list with one per stage.

        Args:
            stages: the number of stages.
            forward: the time of an action F, and of an R.
            backward: the time of an action B, and of I and W together.
            weight: the part of ``backward`` that W takes; None: half of ``backward``.
            comm: the time of a message between two ranks.
            activation_bytes: the bytes that a stage holds per micro-batch in flight; None if unknown.
            input_bytes: the bytes that a recomputed stage holds of a micro-batch between F and R; None counts as 0.
            deferred_bytes: the bytes that a stage holds of a micro-batch between I and W; None: as many as before I.
            copy: the time of a copy of a micro-batch's activations to the host, and of the copy back; None: as long as
                F.
            kept_bytes: the bytes that an offloaded stage holds of a micro-batch between O and P; None counts as 0.
            duplex: whether a rank's copies to the host and its copies back run at the same time.

        Raises:
            ScheduleError: a list has too many or too few costs, or a cost is negative or not finite.
        """
        full = _per_stage("backward", backward, stages)
        part = tuple(cost / 2 for cost in full) if weight is None else _per_stage("weight", weight, stages)
        for stage, (whole, half) in enumerate(zip(full, part, strict=True)):
            if half > whole:
                raise ScheduleError(f"weight={half:g} of stage {stage} is a part of backward={whole:g}, and exceeds it")
        others: dict[str, Any] = {
            "activation_bytes": activation_bytes,
            "input_bytes": input_bytes,
            "deferred_bytes": deferred_bytes,
            "kept_bytes": kept_bytes,
            "copy": copy,
        }
        return Costs(_per_stage("forward", forward, stages), full, part, comm, duplex=duplex, **others)

    def __post_init__(self) -> None:
        object.__setattr__(self, "comm", _checked("comm", self.comm))
        for name in ("forward", "backward", "weight", "copy", *_BYTES):
            cost = getattr(self, name)
            if cost is not None:
                object.__setattr__(self, name, _per_stage(name, cost, len(self.forward)))

    def time(self, action: Action) -> float:
        """Returns how long an action takes, in the unit of the costs."""
        return self._of[action.kind][action.stage]

    def held(self, action: Action, recomputed: bool = False) -> float:
        """Returns how many more bytes a stage with a backward holds after this action, a negative number if the action
        frees bytes; ``activation_bytes`` must be known. ``recomputed``: an R follows this F."""
        whole = (self.activation_bytes or ())[action.stage]
        inputs = 0 if self.input_bytes is None else self.input_bytes[action.stage]
        left = whole if self.deferred_bytes is None else self.deferred_bytes[action.stage]
        remains = 0 if self.kept_bytes is None else self.kept_bytes[action.stage]
        return action.count * action.kind.change(Held(whole, inputs, left, remains, recomputed))

    def copied(self, action: Action) -> float:
        """Returns how long the copy that an action begins takes: an F or an I to the host, or a P back."""
        stage, whole, left = action.stage, self.activation_bytes, self.deferred_bytes
        part = 1.0
        if action.kind in (Kind.I, *OFFLOADS[Kind.I]) and whole is not None and left is not None and whole[stage]:
            part = left[stage] / whole[stage]
        return part * (self.forward[stage] if self.copy is None else action.count * self.copy[stage])

    def beside(self, action: Action) -> float:
        """Returns the additional bytes that an action holds while it runs."""
        if self.again_bytes is None or action.kind.messages is not BACKWARD:
            return 0.0
        return action.count * self.again_bytes[action.stage]

    def per_microbatch(self, stage: int, has_backward: bool) -> float:
        """Returns the time that a stage needs for a micro-batch in total, or for a group at a gathered stage."""
        return self.forward[stage] + (self.backward[stage] if has_backward else 0)

    def with_recompute(self, stages: Collection[int]) -> Costs:
        """Returns the costs for a table without R: at these stages a backward takes F + B."""
        pairs = enumerate(zip(self.forward, self.backward, strict=True))
        return replace(self, backward=tuple(b + f * (stage in stages) for stage, (f, b) in pairs))

    def at_stages(self, stages: Collection[int], forward: float, backward: float) -> Costs:
        """Returns the costs with another F and B at these stages; the share of W in a backward does not change."""
        forwards, backwards, weights = list(self.forward), list(self.backward), list(self.weight)
        for stage in stages:
            part = weights[stage] / backwards[stage] if backwards[stage] else 0.5
            forwards[stage], backwards[stage], weights[stage] = forward, backward, backward * part
        return replace(self, forward=tuple(forwards), backward=tuple(backwards), weight=tuple(weights))

    def or_else(self, other: Costs) -> Costs:
        """Returns these costs; byte counts and times of copies that are None here are taken from ``other``."""
        missing = {name: getattr(other, name) for name in (*_BYTES, "copy") if getattr(self, name) is None}
        return replace(self, **missing)

    @property
    def are_alike(self) -> bool:
        """Whether F, I and W take the same time at all stages, and a message takes none."""
        return len({*self.forward, *self.input, *self.weight}) <= 1 and not self.comm

    @cached_property
    def input(self) -> tuple[float, ...]:
        """The time of an action I, per stage."""
        return tuple(whole - half for whole, half in zip(self.backward, self.weight, strict=True))

    @property
    def none(self) -> tuple[float, ...]:
        """The time of an action that computes nothing, per stage."""
        return (0.0,) * len(self.forward)

    @cached_property
    def _of(self) -> Mapping[Kind, tuple[float, ...]]:
        return {kind: kind.times(self) for kind in KINDS.values()}


def _per_stage(name: str, cost: Any, stages: int) -> tuple[float, ...]:
    if not is_list(cost):
        return (_checked(name, cost),) * stages
    if len(cost) != stages:
        raise ScheduleError(f"{name} has {len(cost)} costs for {stages} stages; give one number, or one per stage")
    return tuple(_checked(name, value) for value in cost)


def _checked(name: str, cost: Any) -> float:
    try:
        number = math.nan if isinstance(cost, str) else float(cost)  # a tensor with one element counts as a number
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ScheduleError(f"{name} is {shown(cost)}; a cost is a finite number, 0 or more")
    return number
