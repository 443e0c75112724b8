"""Costs: the time of each action at each stage, the time of a message between two ranks, and the bytes held."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import mul
from statistics import fmean
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, KINDS, OFFLOADS, Held, Kind
from fxpipe.validation import is_list, shown

_BYTES = ("activation_bytes", "input_bytes", "deferred_bytes", "again_bytes", "kept_bytes")
_TIMES = ("forward", "backward", "weight", "copy")

Cost = float | Sequence[float | Sequence[float]]
"""One number for all stages, or a list with an entry per stage: a number, or a row with a number per micro-batch."""


@dataclass(frozen=True)
class Costs:
    """The time of each action at each stage, in one unit of time, and the bytes that stages hold. The time at a
    gathered stage is for a whole group. All bytes are per micro-batch. Make costs with ``Costs.of``.

    Where micro-batches differ, ``by_microbatch`` has the costs of each. The other fields then have, per stage, the mean
    of the times, and the most bytes.

    >>> costs = Costs.of(2, forward=[1, 3], backward=[2, 6], comm=0.25)
    >>> costs.weight, costs.input
    ((1.0, 3.0), (1.0, 3.0))
    >>> costs.per_microbatch(1, has_backward=True)
    9.0
    >>> uneven = Costs.of(2, forward=[[1, 2, 6], [1, 1, 1]])  # B defaults to twice F
    >>> uneven.time(Action(0, Kind.B, 2)), uneven.backward
    (12.0, (6.0, 2.0))
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
    by_microbatch: tuple[Costs, ...] = ()
    """The costs of each micro-batch, in which all micro-batches are alike; empty if the micro-batches do not differ.
    An action of a group takes the mean of its micro-batches' times."""

    @staticmethod
    def of(
        stages: int,
        forward: Cost = 1,
        backward: Cost | None = None,
        weight: Cost | None = None,
        comm: float = 0,
        activation_bytes: Cost | None = None,
        input_bytes: Cost | None = None,
        deferred_bytes: Cost | None = None,
        copy: Cost | None = None,
        kept_bytes: Cost | None = None,
        duplex: bool = True,
    ) -> Costs:
        """Returns the costs of so many stages. Each cost is one number for all stages, or a list with an entry per
        stage: a number, or a row with a number per micro-batch.

        Args:
            stages: the number of stages.
            forward: the time of an action F, and of an R.
            backward: the time of an action B, and of I and W together. None: 2; if ``forward`` has rows, twice
                ``forward``.
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
        named = {
            "forward": forward,
            "backward": backward,
            "weight": weight,
            "activation_bytes": activation_bytes,
            "input_bytes": input_bytes,
            "deferred_bytes": deferred_bytes,
            "copy": copy,
            "kept_bytes": kept_bytes,
        }
        given: dict[str, Any] = {name: cost for name, cost in named.items() if cost is not None}
        lengths = {len(row) for cost in given.values() for row in _rows(cost)}
        if len(lengths) > 1:
            raise ScheduleError(f"rows of {sorted(lengths)} costs; give each row one cost per micro-batch")
        if not lengths:
            return _by_stage(stages, comm, duplex, given)
        doubles = backward is None and bool(_rows(forward))
        columns = ({name: _column(cost, j) for name, cost in given.items()} for j in range(*lengths))
        return _joined([_by_stage(stages, comm, duplex, column, doubles) for column in columns])

    def __post_init__(self) -> None:
        object.__setattr__(self, "comm", _checked("comm", self.comm))
        for name in (*_TIMES, *_BYTES):
            cost = getattr(self, name)
            if cost is not None:
                object.__setattr__(self, name, _per_stage(name, tuple(cost), len(self.forward)))
        object.__setattr__(self, "by_microbatch", tuple(self.by_microbatch))
        for name, cost in _summary(self.by_microbatch).items():
            if getattr(self, name) != cost:
                raise ScheduleError(f"{name} of costs by micro-batch cannot change alone; change it by Costs.changed")

    def changed(self, change: Callable[[Costs], Costs]) -> Costs:
        """Returns the costs after a change, which is made to the costs of each micro-batch where these differ."""
        return _joined([*map(change, self.by_microbatch)]) if self.by_microbatch else change(self)

    def scaled(self, factors: Sequence[Sequence[float]]) -> Costs:
        """Returns the costs of micro-batches whose times and bytes are the means times these factors: a row per stage
        with a number per micro-batch."""
        known = {name: cost for name in (*_TIMES, *_BYTES) if (cost := getattr(self, name)) is not None}

        def times(column: Sequence[float]) -> Costs:
            changed: dict[str, Any] = {name: tuple(map(mul, cost, column)) for name, cost in known.items()}
            return replace(self, by_microbatch=(), **changed)

        return _joined(list(map(times, zip(*factors, strict=True))))

    def first(self, microbatches: int) -> Costs:
        """Returns the costs of a step of so many micro-batches, the first of this step."""
        return _joined(self.by_microbatch[:microbatches]) if self.by_microbatch else self

    def time(self, action: Action) -> float:
        """Returns how long an action takes, in the unit of the costs."""
        if self.by_microbatch:
            return self._mean(action, lambda costs: costs.time(action))
        return self._of[action.kind][action.stage]

    def held(self, action: Action, recomputed: bool = False) -> float:
        """Returns how many more bytes a stage with a backward holds after this action, a negative number if the action
        frees bytes; ``activation_bytes`` must be known. ``recomputed``: an R follows this F."""
        if self.by_microbatch:
            return self._mean(action, lambda costs: costs.held(action, recomputed))
        whole = (self.activation_bytes or ())[action.stage]
        inputs = 0 if self.input_bytes is None else self.input_bytes[action.stage]
        left = whole if self.deferred_bytes is None else self.deferred_bytes[action.stage]
        remains = 0 if self.kept_bytes is None else self.kept_bytes[action.stage]
        return action.count * action.kind.change(Held(whole, inputs, left, remains, recomputed))

    def copied(self, action: Action) -> float:
        """Returns how long the copy that an action begins takes: an F or an I to the host, or a P back."""
        if self.by_microbatch:
            return self._mean(action, lambda costs: costs.copied(action))
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

    def _mean(self, action: Action, figure: Callable[[Costs], float]) -> float:
        """The mean of a figure over an action's micro-batches."""
        return _mean([figure(self.by_microbatch[microbatch]) for microbatch in action.microbatches])

    def per_microbatch(self, stage: int, has_backward: bool) -> float:
        """Returns the time that a stage needs for a micro-batch in total, in the mean, or for a group at a gathered
        stage."""
        return self.forward[stage] + (self.backward[stage] if has_backward else 0)

    def with_recompute(self, stages: Collection[int]) -> Costs:
        """Returns the costs for a table without R: at these stages a backward takes F + B."""
        if self.by_microbatch:
            return self.changed(lambda costs: costs.with_recompute(stages))
        pairs = enumerate(zip(self.forward, self.backward, strict=True))
        return replace(self, backward=tuple(b + f * (stage in stages) for stage, (f, b) in pairs))

    def at_stages(self, stages: Collection[int], forward: float, backward: float) -> Costs:
        """Returns the costs with another F and B at these stages; the share of W in a backward does not change."""
        if self.by_microbatch:
            return self.changed(lambda costs: costs.at_stages(stages, forward, backward))
        forwards, backwards, weights = list(self.forward), list(self.backward), list(self.weight)
        for stage in stages:
            part = weights[stage] / backwards[stage] if backwards[stage] else 0.5
            forwards[stage], backwards[stage], weights[stage] = forward, backward, backward * part
        return replace(self, forward=tuple(forwards), backward=tuple(backwards), weight=tuple(weights))

    def or_else(self, other: Costs) -> Costs:
        """Returns these costs; byte counts and times of copies that are None here are taken from ``other``."""
        missing = {name: getattr(other, name) for name in (*_BYTES, "copy") if getattr(self, name) is None}
        return self.changed(lambda costs: replace(costs, **missing))

    @property
    def are_alike(self) -> bool:
        """Whether F, I and W take the same time at all stages, and a message takes none."""
        return len({*self.forward, *self.input, *self.weight}) <= 1 and not self.comm and not self.by_microbatch

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


def _by_stage(stages: int, comm: float, duplex: bool, given: Mapping[str, Any], doubles: bool = False) -> Costs:
    """The costs without rows. ``doubles``: B is twice F, not 2, if it is not given."""
    costs: dict[str, Any] = {name: _per_stage(name, cost, stages) for name, cost in given.items()}
    forward = costs.pop("forward")
    full = costs.pop("backward", tuple(2 * cost if doubles else 2.0 for cost in forward))
    part = costs.pop("weight", tuple(cost / 2 for cost in full))
    for stage, (whole, half) in enumerate(zip(full, part, strict=True)):
        if half > whole:
            raise ScheduleError(f"weight={half:g} of stage {stage} is a part of backward={whole:g}, and exceeds it")
    return Costs(forward, full, part, comm, duplex=duplex, **costs)


def _joined(by_microbatch: Sequence[Costs]) -> Costs:
    """The costs of a step whose micro-batches have these costs."""
    return replace(by_microbatch[0], by_microbatch=tuple(by_microbatch), **_summary(by_microbatch))


def _summary(by_microbatch: Sequence[Costs]) -> dict[str, Any]:
    """Field → its value for all micro-batches, per stage: the mean of times, and the most bytes."""
    if not by_microbatch:
        return {}
    named = {name: [getattr(costs, name) for costs in by_microbatch] for name in (*_TIMES, *_BYTES)}
    return {
        name: None if columns[0] is None else tuple(map(_mean if name in _TIMES else max, zip(*columns, strict=True)))
        for name, columns in named.items()
    }


def _mean(values: Sequence[float]) -> float:
    """The mean; of equal values the value itself, without rounding."""
    return values[0] if len(set(values)) == 1 else fmean(values)


def _rows(cost: Any) -> list[Any]:
    """The rows of a cost: its entries with a number per micro-batch."""
    return list(filter(_is_row, cost)) if is_list(cost) else []


def _is_row(entry: Any) -> bool:
    return is_list(entry) and len(entry) > 0


def _column(cost: Any, microbatch: int) -> Any:
    """The cost of a micro-batch, without rows."""
    return [entry[microbatch] if _is_row(entry) else entry for entry in cost] if is_list(cost) else cost


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
