"""Bare stage graphs for the tests of schedules: chains, branches that join, the worked example, random ones."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from fxpipe.schedules import build
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.schedule import Schedule

Pairs = tuple[tuple[int, int], ...]


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


def before(graph: Bare, action: Action, halved: Collection[tuple[int, int]]) -> list[Action]:
    """What an action waits for, from the edges; ``halved``: the (stage, micro-batch) whose backward is I and W."""
    stage, op, j = action
    if op is Op.F:
        return [Action(source, Op.F, j) for source in graph.sources(stage)]
    if op is Op.W:
        return [Action(stage, Op.I, j)]
    later = [target for target in graph.targets(stage) if graph.backward[target]]
    gradients = [Action(target, Op.I if (target, j) in halved else Op.B, j) for target in later]
    return [Action(stage, Op.F, j), *gradients]
