"""Ranks: the rank of each action. A stage is on one rank, or on several, which take its micro-batches in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.errors import FxpipeError, ScheduleError

Placement = tuple[int | tuple[int, ...], ...]
"""Per stage, its rank or its r ranks: micro-batch i, or group i of a gathered stage, is on the (i mod r)-th."""


@dataclass(frozen=True)
class RankOf:
    """(stage, micro-batch) → the rank that runs the micro-batch, or its group, at the stage."""

    ranks: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    """The number of micro-batches in a group, per stage."""

    @staticmethod
    def from_placement(placement: Placement, groups: Mapping[int, int]) -> RankOf:
        sizes = tuple(groups.get(stage, 1) for stage in range(len(placement)))
        return RankOf(tuple(map(ranks_of, placement)), sizes)

    def __call__(self, stage: int, microbatch: int) -> int:
        ranks = self.ranks[stage]
        return ranks[microbatch // self.sizes[stage] % len(ranks)] if len(ranks) > 1 else ranks[0]


def as_placement(
    wanted: Sequence[int | Sequence[int]], names: Sequence[str] = (), error: type[FxpipeError] = ScheduleError
) -> Placement:
    """``wanted`` in tuples, a list of one rank as that rank. Raises ``error`` for no rank or a repeated rank."""
    placement: list[int | tuple[int, ...]] = []
    for name, entry in zip(names or map(str, range(len(wanted))), wanted, strict=True):
        ranks = tuple(map(int, entry)) if isinstance(entry, Sequence) else (int(entry),)
        if len(set(ranks)) != len(ranks) or not ranks:
            fact = "names a rank twice" if ranks else "names no rank"
            raise error(
                f"the placement of stage {name}, {list(ranks)}, {fact}; write each of its ranks once, as in (0, 1)"
            )
        placement.append(ranks if len(ranks) > 1 else ranks[0])
    return tuple(placement)


def ranks_of(entry: int | tuple[int, ...]) -> tuple[int, ...]:
    """Returns all ranks of a stage, in the order in which they take its micro-batches."""
    return entry if isinstance(entry, tuple) else (entry,)


def rank_count(placement: Placement) -> int:
    return 1 + max((rank for entry in placement for rank in ranks_of(entry)), default=-1)


def named(entry: int | tuple[int, ...]) -> str:
    """Returns a text: "rank 2", "ranks 0, 1"."""
    return f"rank {entry}" if isinstance(entry, int) else f"ranks {', '.join(map(str, entry))}"


def replicated(placement: Placement) -> tuple[int, ...]:
    """Returns the stages that are on several ranks."""
    return tuple(stage for stage, entry in enumerate(placement) if isinstance(entry, tuple))
