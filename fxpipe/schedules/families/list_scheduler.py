"""List scheduler: each rank, when free, begins the best of its ready units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies

Unit = tuple[Action, ...]
"""Actions that run one directly after the other: an R with its backward, or a single action."""


class Units:
    """Units by number, in lines: the units of a line run on one rank, in the order of the line."""

    # Numbers in lists instead of Actions: a search for stages and ranks makes hundreds of tables.

    def __init__(self, ranks: int, costs: Costs) -> None:
        self.ranks, self.costs = ranks, costs
        self.lines: list[range] = []
        self.actions: list[Unit] = []
        self.time: list[float] = []
        self.line_of: list[int] = []
        self.home: list[int] = []
        self.needs: list[int] = []  # how many other units each unit needs
        self.after: list[list[tuple[int, float]]] = []  # the units that need each, and the message's time

    def add_line(self, rank: int, line: Sequence[Unit]) -> None:
        """Appends a line of units, which need no other units yet."""
        self.line_of += [len(self.lines)] * len(line)
        self.lines.append(range(len(self.actions), len(self.actions) + len(line)))
        self.actions += line
        time = self.costs.time
        self.time += [time(unit[0]) if len(unit) == 1 else sum(map(time, unit)) for unit in line]
        self.home += [rank] * len(line)
        self.needs += [0] * len(line)
        self.after += [[] for _ in line]

    def need(self, units: Iterable[int], others: Iterable[int]) -> None:
        """Makes each unit need the unit at the same index of ``others``."""
        home, comm = self.home, self.costs.comm
        for unit, other in zip(units, others, strict=False):
            self.needs[unit] += 1
            self.after[other].append((unit, comm if home[unit] != home[other] else 0.0))

    def need_by(self, dependencies: Dependencies) -> None:
        """Makes each unit need the units that its actions depend on."""
        number_of = {action: number for number, unit in enumerate(self.actions) for action in unit}
        for number, unit in enumerate(self.actions):
            # Within a unit an R precedes its backward, so the unit does not wait for its own actions.
            needed = {number_of[other] for action in unit for other in dependencies.needs(action)} - {number}
            self.need([number] * len(needed), needed)


class ListScheduler:
    """A list schedule of units, and its progress. ``keys``: of the ready units, the unit with the least key begins."""

    def __init__(self, units: Units, keys: Sequence[Any]) -> None:
        self.units, self.keys = units, keys
        self.begun = [0] * len(units.lines)  # how many units of each line have begun
        self.free = [0.0] * units.ranks  # the time at which each rank is free
        self.missing: list[int] = []  # in ``run``: how many of the units that each unit needs have not begun
        self.arrives: list[float] = []  # the time at which the last message so far to each unit arrives

    def may_begin(self, rank: int, unit: int, now: float, forced: bool) -> bool:
        """Whether a rank begins a ready unit, or waits. ``forced``: True if all ranks would otherwise wait for ever."""
        raise NotImplementedError

    def begin(self, rank: int, unit: int) -> None:
        """Records that a unit begins."""

    def run(self) -> tuple[Row, ...]:
        """Returns the rows."""
        units, keys, free = self.units, self.keys, self.free
        homes, may_begin = units.home, self.may_begin
        missing = self.missing = list(units.needs)
        arrives = self.arrives = [0.0] * len(missing)
        head = [line.start if line else -1 for line in units.lines]
        # Rank → its units at the head of a line that need nothing more, in two heaps: by when their messages arrive,
        # and, once these are there, by key. So a moment costs no look at each line of a rank.
        coming: list[list[tuple[float, int]]] = [[] for _ in free]
        able: list[list[tuple[Any, int]]] = [[] for _ in free]
        for unit in head:
            if unit >= 0 and not missing[unit]:
                coming[homes[unit]].append((0.0, unit))
        rows: list[list[Action]] = [[] for _ in free]
        # moments at which a rank becomes free, or a message reaches a rank: time goes from one moment to the next
        moments = [(0.0, rank) for rank in range(len(free))]
        now, forced, left = 0.0, False, len(units.actions)
        while left:
            # All ranks wait for a unit that was held back. A held-back unit must begin, whatever it delays, or no unit
            # would.
            if not moments:
                moments, forced = [(now, rank) for rank in range(len(free))], True
            now, rank = heappop(moments)
            if free[rank] > now:
                continue
            waiting, candidates = coming[rank], able[rank]
            while waiting and waiting[0][0] <= now:
                _, unit = heappop(waiting)
                heappush(candidates, (keys[unit], unit))
            passed_over = []
            while candidates and not may_begin(rank, candidates[0][1], now, forced):
                passed_over.append(heappop(candidates))
            unit = heappop(candidates)[1] if candidates else -1
            for entry in passed_over:
                heappush(candidates, entry)
            if unit < 0:
                continue
            forced, left, line = False, left - 1, units.line_of[unit]
            rows[rank] += units.actions[unit]
            self.begun[line] += 1
            self.begin(rank, unit)
            following = head[line] = unit + 1 if unit + 1 < units.lines[line].stop else -1
            if following >= 0 and not missing[following]:
                heappush(waiting, (arrives[following], following))
            end = free[rank] = now + units.time[unit]
            heappush(moments, (end, rank))
            for user, hop in units.after[unit]:
                arrival, home = end + hop, homes[user]
                if arrival > arrives[user]:
                    arrives[user] = arrival
                missing[user] -= 1
                if not missing[user] and head[units.line_of[user]] == user:
                    heappush(coming[home], (arrives[user], user))
                if home != rank and arrival >= free[home]:
                    heappush(moments, (arrival, home))
        return tuple(map(tuple, rows))
