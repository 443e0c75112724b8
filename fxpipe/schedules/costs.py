"""Costs: what an action costs at each stage, and a message between two ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action, Op
from fxpipe.validation import is_list, shown

_BYTES = ("activation_bytes", "input_bytes", "deferred_bytes", "again_bytes")

Cost = float | Sequence[float]
"""One number for all stages, or one per stage."""


@dataclass(frozen=True)
class Costs:
    """Per stage and action, in any one unit of time: of a gathered stage, what its whole group takes at once. Bytes are
    per micro-batch everywhere. Make it with ``Costs.of``.

    >>> costs = Costs.of(2, forward=[1, 3], backward=[2, 6], comm=0.25)
    >>> costs.weight, costs.input
    ((1.0, 3.0), (1.0, 3.0))
    >>> costs.per_microbatch(1, has_backward=True)
    9.0
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """The whole of it."""
    weight: tuple[float, ...]
    """The part of it that an action W does, the rest being I."""
    comm: float = 0.0
    """What a message between two ranks takes. Each directed pair of ranks carries one at a time."""
    activation_bytes: tuple[float, ...] | None = None
    """What a stage holds of a micro-batch from its forward to the end of its backward; None where that is not known."""
    input_bytes: tuple[float, ...] | None = None
    """What a recomputed stage keeps of a micro-batch from its F to its R; None: it counts for nothing."""
    deferred_bytes: tuple[float, ...] | None = None
    """What a stage holds of a micro-batch between its I and its W: inputs and output gradients of the calls that W
    differentiates. None: all of ``activation_bytes``."""
    again_bytes: tuple[float, ...] | None = None
    """What the backward of a micro-batch holds beside all that while it runs: the most that one of the model's own
    checkpoints computes again. None: nothing."""

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
    ) -> Costs:
        """Costs of that many stages; each is one number, or one per stage.

        Args:
            stages: how many.
            forward: what an action F takes, and an R.
            backward: what an action B takes, and I and W together.
            weight: the part of ``backward`` that W does; None: half of it.
            comm: what a message between two ranks takes.
            activation_bytes: what a stage holds per micro-batch in flight, in bytes; None where that is not known.
            input_bytes: what it keeps of one between F and R, where it is recomputed; None: it counts for nothing.
            deferred_bytes: what it holds of one between I and W; None: as much as before.

        Raises:
            ScheduleError: there are too many or too few, or one is negative or not finite.
        """
        full = _per_stage("backward", backward, stages)
        part = tuple(cost / 2 for cost in full) if weight is None else _per_stage("weight", weight, stages)
        for stage, (whole, half) in enumerate(zip(full, part, strict=True)):
            if half > whole:
                raise ScheduleError(f"weight={half:g} of stage {stage} is a part of backward={whole:g}, and exceeds it")
        given = zip(_BYTES, (activation_bytes, input_bytes, deferred_bytes), strict=False)
        sizes = {name: _per_stage(name, size, stages) for name, size in given if size is not None}
        return Costs(_per_stage("forward", forward, stages), full, part, comm, **sizes)

    def __post_init__(self) -> None:
        object.__setattr__(self, "comm", _checked("comm", self.comm))
        for name in ("forward", "backward", "weight", *_BYTES):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _per_stage(name, tuple(given), len(self.forward)))

    def time(self, action: Action) -> float:
        """How long an action takes."""
        return self._of[action.op][action.stage]

    def held(self, action: Action, recomputed: bool = False) -> float:
        """How many bytes more a stage that has a backward holds with this action, a negative number where it lets go
        of some; ``activation_bytes`` must be known. ``recomputed``: an R comes behind this F."""
        stage, op, _, count = action
        whole = (self.activation_bytes or ())[stage]
        kept = 0 if self.input_bytes is None else self.input_bytes[stage]
        left = whole if self.deferred_bytes is None else self.deferred_bytes[stage]
        # Over a micro-batch these sum to 0: F + B, F + R + B, or with I and W in place of B.
        if op is Op.F:
            return count * (kept if recomputed else whole)
        if op is Op.R:
            return count * (whole - kept)
        return count * (-whole if op is Op.B else left - whole if op is Op.I else -left)

    def beside(self, action: Action) -> float:
        """How many bytes an action holds beside what its stage does, while it runs."""
        if self.again_bytes is None or action.op not in (Op.B, Op.I):
            return 0.0
        return action.count * self.again_bytes[action.stage]

    def per_microbatch(self, stage: int, has_backward: bool) -> float:
        """What a stage needs for a micro-batch in all, a gathered one for a group."""
        return self.forward[stage] + (self.backward[stage] if has_backward else 0)

    def with_recompute(self, stages: Collection[int]) -> Costs:
        """Those of a table that has no R: at these stages a backward takes F + B."""
        pairs = enumerate(zip(self.forward, self.backward, strict=True))
        return replace(self, backward=tuple(b + f * (stage in stages) for stage, (f, b) in pairs))

    def at_stages(self, stages: Collection[int], forward: float, backward: float) -> Costs:
        """The same with other costs at these stages; W's part of a backward stays what it is."""
        forwards, backwards, weights = list(self.forward), list(self.backward), list(self.weight)
        for stage in stages:
            part = weights[stage] / backwards[stage] if backwards[stage] else 0.5
            forwards[stage], backwards[stage], weights[stage] = forward, backward, backward * part
        return replace(self, forward=tuple(forwards), backward=tuple(backwards), weight=tuple(weights))

    def or_else(self, other: Costs) -> Costs:
        """The same; what bytes these leave open, as ``other`` has them."""
        missing = {name: getattr(other, name) for name in _BYTES if getattr(self, name) is None}
        return replace(self, **missing)

    @property
    def are_alike(self) -> bool:
        """Whether F, I and W take one time at all stages, and a hop none."""
        return len({*self.forward, *self.input, *self.weight}) <= 1 and not self.comm

    @cached_property
    def input(self) -> tuple[float, ...]:
        """What an action I takes, per stage."""
        return tuple(whole - half for whole, half in zip(self.backward, self.weight, strict=True))

    @cached_property
    def _of(self) -> Mapping[Op, tuple[float, ...]]:
        return {Op.F: self.forward, Op.R: self.forward, Op.B: self.backward, Op.I: self.input, Op.W: self.weight}


def _per_stage(name: str, cost: Any, stages: int) -> tuple[float, ...]:
    if not is_list(cost):
        return (_checked(name, cost),) * stages
    if len(cost) != stages:
        raise ScheduleError(f"{name} has {len(cost)} costs for {stages} stages; give one number, or one per stage")
    return tuple(_checked(name, value) for value in cost)


def _checked(name: str, cost: Any) -> float:
    try:
        number = math.nan if isinstance(cost, str) else float(cost)  # a tensor of one number is one
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ScheduleError(f"{name} is {shown(cost)}; a cost is a finite number, 0 or more")
    return number
