"""Bare stage graphs for the tests of schedules: chains, branches that join, the worked example, random ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from fxpipe.schedules import SCHEDULES, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.families.gathered import GATHERED
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.table import table
from tests.thinned import seeds

Pairs = tuple[tuple[int, int], ...]

FAMILIES = [name for name in SCHEDULES if name not in GATHERED and name not in ("zb_v", "v_min")]
"""The families that take any stage graph; the others are for stages that are gathered, or for a folded chain."""


@dataclass(frozen=True)
class Bare:
    """A stage graph without a model. ``placement``: the rank of each stage. ``backward``: whether it has one."""

    edges: Pairs
    placement: tuple[int, ...]
    backward: tuple[bool, ...]

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return len(set(self.placement))

    @lru_cache(512)  # noqa: B019 - several tests look at each of some hundred tables
    def build(self, name: str, microbatches: int) -> Schedule:
        return build(name, self.edges, microbatches, self.placement, self.stages, self.backward)

    def sources(self, stage: int) -> list[int]:
        return [source for source, target in self.edges if target == stage]

    def targets(self, stage: int) -> list[int]:
        return [target for source, target in self.edges if source == stage]

    def depth(self, stage: int) -> int:
        """d(s) of the design: the stages on the longest path from s to a sink, s included."""
        return 1 + max((self.depth(target) for target in self.targets(stage)), default=0)


def bare(
    edges: Pairs, stages: int, placement: tuple[int, ...] | None = None, frozen: frozenset[int] = frozenset()
) -> Bare:
    """A stage graph, a rank for each stage where ``placement`` says nothing; ``frozen`` stages have no backward."""
    backward = tuple(stage not in frozen for stage in range(stages))
    return Bare(edges, tuple(range(stages)) if placement is None else placement, backward)


def chain(stages: int) -> Pairs:
    return tuple((stage, stage + 1) for stage in range(stages - 1))


def branches(count: int, length: int) -> Pairs:
    """``count`` chains of ``length`` stages side by side, and a join: stage count × length."""
    join = count * length
    edges = []
    for first in range(0, join, length):
        edges += [(stage, stage + 1) for stage in range(first, first + length - 1)] + [(first + length - 1, join)]
    return tuple(edges)


WORKED: Pairs = ((0, 1), (1, 4), (2, 3), (3, 4))
"""The worked example of the design, A1→A2→J←B2←B1: stages 0, 1, then 2, 3, then 4."""


@cache
def random_bare(seed: int, *, one_each: bool = False, frozen: bool = False, most: int = 8) -> Bare:
    """A random acyclic graph, its stages numbered in no particular order, on random ranks.

    ``one_each``: a rank for each stage. ``frozen``: some stages with nothing to train before them have no backward.
    """
    draw = random.Random(seed)
    stages = draw.randint(1, most)
    number = draw.sample(range(stages), stages)  # place in the order → stage
    density = draw.choice([0.2, 0.4, 0.8])
    pairs = [(number[a], number[b]) for a in range(stages) for b in range(a + 1, stages) if draw.random() < density]
    draw.shuffle(pairs)
    ranks = stages if one_each else draw.randint(1, stages)
    placement = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(placement)
    backward = [True] * stages
    if frozen:
        for stage in number:
            before = [source for source, target in pairs if target == stage]
            backward[stage] = any(backward[source] for source in before) or draw.random() < 0.5
    return Bare(tuple(pairs), tuple(placement), tuple(backward))


def before(
    graph: Bare, action: Action, halved: Collection[tuple[int, int]], ahead: Mapping[int, int] = MappingProxyType({})
) -> list[Action]:
    """What an action waits for, from the edges; ``halved``: the (stage, micro-batch) whose backward is I and W;
    ``ahead``: by how many micro-batches a stage may be ahead of those that read it."""
    stage, op, j, _ = action
    if op is Kind.F:
        last = j - ahead.get(stage, j + 1)
        taken = [Action(target, Kind.F, last) for target in graph.targets(stage) if last >= 0]
        return taken + [Action(source, Kind.F, j) for source in graph.sources(stage)]
    if op is Kind.W:
        return [Action(stage, Kind.I, j)]
    later = [target for target in graph.targets(stage) if graph.backward[target]]
    gradients = [Action(target, Kind.I if (target, j) in halved else Kind.B, j) for target in later]
    return [Action(stage, Kind.F, j), *gradients]


@cache
def random_timelines(name: str) -> list[Timeline]:
    """Random graphs at random costs, some of them 0; every third one is called measured, in seconds."""
    made = []
    for seed in seeds(24):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 2 == 0)
        stages = graph.stages
        forward = [draw.choice([0, 0.5, 1, 3]) for _ in range(stages)]
        timeline = graph.build(name, draw.randint(1, 12)).simulate(forward, backward=draw.choice([0, 1, 2]), comm=0.25)
        made.append(dataclasses.replace(timeline, measured=seed % 3 == 0))
    return made


def examples(name: str) -> list[Schedule]:
    """A few small schedules of a family, each of two ranks or more."""
    turns = build(name, chain(4), 4, (0, 1, 0, 1))
    return [build(name, chain(3), 2), build(name, WORKED, 3), turns]


def halves(rows: Sequence[str]) -> Schedule:
    """A schedule of the stages of a chain, one a rank, from rows as they print."""
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    m = 1 + max(action.microbatch for row in parsed for action in row)
    return Schedule(parsed, chain(len(rows)), tuple(range(len(rows))), (True,) * len(rows), m)


def joined(rows: str, edges: Sequence[tuple[int, int]] = WORKED) -> Schedule:
    """A schedule from rows as they print, a stage each, some of them in groups."""
    parsed = tuple(tuple(map(Action.parse, line.split())) for line in rows.strip().splitlines())
    m = max(action.microbatches.stop for row in parsed for action in row)
    return Schedule(parsed, tuple(edges), tuple(range(len(parsed))), (True,) * len(parsed), m)


JOINED = """
    0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
    2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
    3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3
    4F0-3 4B0-3
"""
"""The worked example for 4 micro-batches, its join for all of them at once."""

RECOMPUTED = """
    0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3
    1F0 1F1 1F2 1F3 1R0 1B0 1R1 1B1 1R2 1B2 1R3 1B3
    2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
    3F0 3F1 3F2 3F3 3I0 3W0 3I1 3W1 3I2 3W2 3I3 3W3
    4F0-1 4F2-3 4I0-1 4W0-1 4I2-3 4W2-3
"""
"""The same in two groups, one branch recomputed, some backwards in halves."""


class Value(NamedTuple):
    """One of many values between a pair of stages, as lowering sees them."""

    source: int
    target: int
    number: int


def gradient_of(stage: int, microbatch: int, halved: Collection[tuple[int, int]]) -> Action:
    return Action(stage, Kind.I if (stage, microbatch) in halved else Kind.B, microbatch)


def values_of(edges: Sequence[tuple[int, int]], seed: int) -> list[Value]:
    """One to three values per pair of stages, in no particular order."""
    draw = random.Random(seed)
    values = [Value(*edge, number) for edge in sorted(set(edges)) for number in range(draw.randint(1, 3))]
    draw.shuffle(values)
    return values


def whole_table(what: Schedule | Timeline) -> str:
    """The printed table of a schedule or a timeline, not folded."""
    if isinstance(what, Schedule):
        return table(what, what.planned, full=True)
    return table(what.schedule, lambda: what, full=True)
