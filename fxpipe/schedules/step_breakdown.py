"""Spells: how each process spent a measured step: it computed, it waited, or it did neither.

    before        compute  waiting  compute  between  compute  after
    ├─ settling ─┤├─ 0F0 ─┤├ 1B0 ──┤├─ 0B0 ─┤├──────┤├─ 0F1 ─┤├─ loss ─┤

The spells of a process follow one another without a gap, so their durations sum to the process's step.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import NamedTuple

from tabulate import tabulate

COMPUTE, WAITING, BETWEEN, BEFORE, AFTER = "compute", "waiting", "between", "before", "after"
CATEGORIES = COMPUTE, WAITING, BETWEEN, BEFORE, AFTER
_LONGEST = 3  # how many awaited messages a rank's row names


class Spell(NamedTuple):
    """A time span of a process. ``ranks``: the pipe ranks that the process played. ``what``: the computed action, the
    awaited message ("1B0 from rank 1"), or the work that a step does around its actions; empty for "between".

    Times are in seconds on the timeline's clock: "before" is below 0 on the rank that began first.
    """

    ranks: tuple[int, ...]
    category: str
    what: str
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Spent:
    """How a process's step divides, in seconds."""

    ranks: tuple[int, ...]
    seconds: Mapping[str, float]
    """Category → its seconds: "compute"; "waiting" for messages of other ranks; "between" actions, in which Python
    runs: sends, posted receives, started reductions, waits for gathered parameters; "before" the first action and
    "after" the last one. The values sum to ``wall``."""
    waits: Mapping[str, float]
    """Message → how many seconds the process waited for it, the longest wait first."""
    outside: Mapping[str, float]
    """Work before the first action and after the last one → its seconds, in order."""
    wall: float
    """The seconds from the call's beginning to its end."""

    @property
    def label(self) -> str:
        """The ranks as text: "2", or "0-3"."""
        return str(self.ranks[0]) if len(self.ranks) == 1 else f"{self.ranks[0]}-{self.ranks[-1]}"


def spent(spells: Sequence[Spell]) -> tuple[Spent, ...]:
    # One pass for each process sums waits by message, and the work around actions in its order.
    processes = []
    for ranks in sorted({spell.ranks for spell in spells}):
        mine = [spell for spell in spells if spell.ranks == ranks]
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        waits: dict[str, float] = {}
        outside: dict[str, float] = {}
        for spell in mine:
            seconds[spell.category] += spell.duration
            totals = waits if spell.category == WAITING else outside if spell.category in (BEFORE, AFTER) else {}
            totals[spell.what] = totals.get(spell.what, 0.0) + spell.duration
        longest = dict(sorted(waits.items(), key=lambda item: -item[1]))
        processes.append(Spent(ranks, seconds, longest, outside, mine[-1].end - mine[0].start))
    return tuple(processes)


def tabulated(spells: Sequence[Spell]) -> str:
    """Returns a table with a row for each process, in ms, and below it the mean times of work outside of actions."""
    each = spent(spells)
    rows = []
    for part in each:
        times = map(milliseconds, [part.wall, *map(part.seconds.__getitem__, CATEGORIES)])
        longest = [f"{what} {milliseconds(seconds)}" for what, seconds in part.waits.items()][:_LONGEST]
        rows.append([part.label, *times, ", ".join(longest)])
    headers = ["rank", "step ms", *CATEGORIES, "longest waits"]
    drawn = tabulate(rows, headers, disable_numparse=True, colalign=["left", *["right"] * 6, "left"])
    names = dict.fromkeys(name for part in each for name in part.outside)
    means = (f"{name} {milliseconds(sum(part.outside.get(name, 0.0) for part in each) / len(each))}" for name in names)
    return f"{drawn}\noutside of actions, mean over {'ranks' if len(each) > 1 else 'the process'}: {', '.join(means)}"


def in_csv(spells: Sequence[Spell]) -> str:
    """Returns a CSV text with a line for each spell, in seconds: ``0,waiting,1B0 from rank 1,0.0125,0.0131``."""
    file = StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(["rank", "category", "what", "start", "end"])
    for spell in spells:
        times = f"{spell.start:.9f}", f"{spell.end:.9f}"
        lines.writerow([" ".join(map(str, spell.ranks)), spell.category, spell.what, *times])
    return file.getvalue()


def milliseconds(seconds: float, sign: str = "") -> str:
    """Returns seconds as milliseconds with two decimals. ``sign``: "+" to mark positive numbers."""
    return f"{round(seconds * 1e3, 2) + 0.0:{sign}.2f}"  # and not -0.00
