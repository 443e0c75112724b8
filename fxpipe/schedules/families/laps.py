"""Laps: the order of a chain that goes round its ranks, a group of micro-batches after the other, with several stages
per rank (interleaved 1F1B, Narayanan et al. 2021, Megatron-LM).

A rank runs a group of micro-batches through its first stage, then the same group through its second stage, and so on.
When the first stage has finished the group, the group's first micro-batch has reached the second stage. Backwards go
the other way.

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 ...
    rank 1       1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.limits import Maker, caps
from fxpipe.schedules.families.list_scheduler import ListScheduler, Unit, Units
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.kinds import Kind


def laps(problem: Problem, split: bool = False) -> list[Maker]:
    """Returns makers of tables, on any graph and placement: in groups of a lap, and in equal groups, if these differ.

    A lap is ⌈D / v⌉ stages deep, p on Megatron's chain: v is the most stages of a rank, D the depth of ranks with v
    stages. Groups of a lap hold least. But the last of them is smaller if the lap does not divide m, and ranks wait for
    it. Equal groups, ⌊m / lap⌋ of them and at least 1, whose sizes differ by 1 at most, reach the lower bound on
    Megatron's chain for each m ≥ p. ``split``: backwards are in halves. A larger ``in_flight`` adds tables before
    these: of groups, and of warm-ups, that are several times as large.
    """
    most, m = max(len(stages) for stages in problem.stages_of), problem.microbatches
    going_round = [stage for stages in problem.stages_of if len(stages) == most for stage in stages]
    lap = math.ceil(max(problem.depth[stage] for stage in going_round) / most)
    times = _times_as_many(problem, lap, split)
    makers: list[Maker] = []
    for scale in sorted({times, max(times - 1, 1), 1}, reverse=True):
        equal = max(m // (scale * lap), 1)
        groups = [*range(0, m, scale * lap), m], [m * number // equal for number in range(equal + 1)]
        scaled = partial(_in_groups, split=split, scale=scale)
        makers += [partial(scaled, ends=ends) for ends in dict.fromkeys(map(tuple, groups))]
    return makers


def _in_groups(problem: Problem, ends: Sequence[int], split: bool, scale: int) -> tuple[Row, ...]:
    return _Laps(problem, [range(*pair) for pair in pairwise(ends)], split, scale).run()


def _warm_up(problem: Problem, group: int, split: bool, scale: int = 1) -> list[int]:
    """Returns, per rank, the forwards before its first backward."""
    # A whole backward takes two actions' time; its half I takes as long as a forward, so fewer forwards precede it.
    hop = scale * (1 if split else 2)
    return [hop * (problem.depth[on[-1]] - 1) + (len(on) - 1) * group for on in problem.stages_of]


def _times_as_many(problem: Problem, lap: int, split: bool) -> int:
    """Returns how many times as many micro-batches as in groups of a lap ``in_flight`` allows on every rank."""
    if problem.in_flight is None:
        return 1
    warm_up, most = _warm_up(problem, lap, split), caps(problem)
    rooms = [sum(most[stage] for stage in on if problem.backward[stage]) for on in problem.stages_of]
    return max(min(room // (least + 1) for room, least in zip(rooms, warm_up, strict=True)), 1)


class _Laps(ListScheduler):
    """Lines of forwards, of backwards and of W's for each rank, which alternates, at any action times.

    A rank warms up with the forwards that it needs until the first backward reaches it. These are a group for each of
    its stages but the last, and the way from there to the sink and back. Then one forward, one backward. If that would
    deadlock, the waiting ranks run further forwards. With halves, each rank holds until W what the first rank holds
    until I. It holds at most D micro-batches for each of its stages, and one more where ranks would deadlock: then a W
    precedes the next forward. ``scale``: how many times as many forwards a rank warms up with.
    """

    def __init__(self, problem: Problem, groups: Sequence[range], split: bool, scale: int) -> None:
        units, backward = Units(problem.ranks, Costs.of(len(problem.placement))), problem.backward
        for rank, stages in enumerate(problem.stages_of):
            trained = [stage for stage in reversed(stages) if backward[stage]]
            units.add_line(rank, list(_line(Kind.F, stages, groups)))
            units.add_line(rank, list(_line(Kind.I if split else Kind.B, trained, groups)))
            units.add_line(rank, list(_line(Kind.W, trained, groups)) if split else [])
        halves = {Kind.I: {unit[0][::2] for unit in units.actions}} if split else {}
        units.need_by(replace(problem.dependencies, replacing=halves))
        super().__init__(units, [(unit[0].kind.messages is None, number) for number, unit in enumerate(units.actions)])
        self.backward = backward
        self.warm_up = _warm_up(problem, max(map(len, groups)), split, scale)
        deepest = scale * max((depth for depth, is_on in zip(problem.depth, backward, strict=True) if is_on), default=1)
        self.most = [min(max(self.warm_up) + 1, deepest * sum(backward[s] for s in on)) for on in problem.stages_of]
        if split:
            self.warm_up = [min(least, most - 1) for least, most in zip(self.warm_up, self.most, strict=True)]
        self.in_flight = [0] * problem.ranks
        self.unfinished = [0] * problem.ranks

    def may_begin(self, rank: int, unit: int, now: float, forced: bool) -> bool:
        # All ranks wait. The first rank that could run a forward instead of a backward does so. Such a rank exists:
        # take the first action that has not run, by group, stage in topological order, and micro-batch, with backwards
        # after all forwards and in reverse order. All actions that it needs come before it, and have run.
        kind = self.units.line_of[unit] % 3
        if kind == 2:
            return True
        if kind == 0 and forced and not self._forward_is_next(rank):
            self.warm_up[rank] += 1
        held_back = self.unfinished[rank] > self.in_flight[rank] and self.unfinished[rank] >= self.most[rank]
        if kind == 0 and held_back and not forced:
            return False
        return (kind == 0) == self._forward_is_next(rank)

    def _forward_is_next(self, rank: int) -> bool:
        """Whether a forward comes next: warm-up, then forwards and backwards in turns; frozen stages at once."""
        forwards, backwards = (self.units.lines[line][self.begun[line] :] for line in (3 * rank, 3 * rank + 1))
        if not forwards or not backwards:
            return not backwards
        ((stage, *_),) = self.units.actions[forwards[0]]
        return self.in_flight[rank] <= self.warm_up[rank] or not self.backward[stage]

    def begin(self, rank: int, unit: int) -> None:
        ((stage, kind, *_),) = self.units.actions[unit]
        if self.backward[stage]:
            self.in_flight[rank] += {Kind.F: 1, Kind.B: -1, Kind.I: -1, Kind.W: 0}[kind]
            self.unfinished[rank] += {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}[kind]


def _line(kind: Kind, stages: Iterable[int], groups: Iterable[range]) -> Iterator[Unit]:
    """Yields the actions in groups, each group through all ``stages``."""
    for group in groups:
        for stage in stages:
            for microbatch in group:
                yield (Action(stage, kind, microbatch),)
