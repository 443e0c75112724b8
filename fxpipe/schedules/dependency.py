"""Dependencies: what must have run before an action, and an order in which a table's cells can run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from fxpipe.graph.topological import topological_order
from fxpipe.schedules.action import Action, Op


class EdgeLike(Protocol):
    """What is asked of a value that passes between stages: a stage pair, or one of many values between a pair."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...


Half = tuple[int, int]
"""(stage, micro-batch, or a group's first) whose backward is split into I and W, or that has an R."""

Groups = Mapping[int, int]
"""Stage → how many micro-batches an action of it covers; of a stage that is not gathered there is none."""


def groups_of(rows: Iterable[Iterable[Action]]) -> Groups:
    """The groups of a table. What has groups of several sizes is for ``verify`` to name."""
    return {action.stage: action.count for row in rows for action in row if action.count != 1}


def group_of(groups: Groups, stage: int, microbatch: int) -> int:
    """The first micro-batch of the group that a micro-batch belongs to at a stage; itself where that has none."""
    return microbatch - microbatch % groups.get(stage, 1) if groups else microbatch


class Link(NamedTuple):
    """An edge of a bare stage graph."""

    source: int
    target: int


@dataclass(frozen=True)
class Dependencies:
    """What actions wait for. A group needs what each of its micro-batches needs; a micro-batch needs the gradient of
    the group it is in."""

    sources: Mapping[int, tuple[int, ...]]
    """The stages whose forward a stage's forward needs."""
    readers: Mapping[int, tuple[int, ...]]
    """The stages whose forward needs a stage's."""
    targets: Mapping[int, tuple[int, ...]]
    """The stages whose backward a stage's backward needs."""
    halves: Collection[Half] = ()
    """The backwards that a table has as I and W: a gradient comes from the I there, else from the B."""
    recomputed: Collection[Half] = ()
    """The forwards that a table has again, as R: a backward needs the R there, else the F."""
    groups: Groups = field(default_factory=dict)
    ahead: Mapping[int, int] = field(default_factory=dict)
    """Of stages without backward, how many values each may have made that its readers have not received:
    ``held_back``."""

    @staticmethod
    def of(edges: Sequence[EdgeLike], backward: Sequence[bool], rows: Sequence[Sequence[Action]] = ()) -> Dependencies:
        """The dependencies along ``edges``; ``backward``: whether each stage has one. ``rows``: the table."""

        def ran(op: Op) -> frozenset[Half]:
            return frozenset((action.stage, action.microbatch) for row in rows for action in row if action.op is op)

        return Dependencies(
            sources=_grouped((edge.target, edge.source) for edge in edges),
            readers=_grouped((edge.source, edge.target) for edge in edges),
            targets=_grouped((edge.source, edge.target) for edge in edges if backward[edge.target]),
            halves=ran(Op.I),
            recomputed=ran(Op.R),
            groups=groups_of(rows),
        )

    def before(self, action: Action) -> list[Action]:
        """The actions that must have run before this one."""
        needed = self.needs(action)
        if action.op is Op.F and action.stage in self.ahead:
            last = action.microbatch - self.ahead[action.stage]
            # The forwards that take what the stage made so long ago that it may make more.
            for reader in self.readers[action.stage] if last >= 0 else ():
                needed.append(Action(reader, Op.F, group_of(self.groups, reader, last), self.groups.get(reader, 1)))
        return needed

    def needs(self, action: Action) -> list[Action]:
        """Those of them whose results it is made from."""
        stage, op, microbatch, count = action
        if op is Op.F:
            sources = self.sources.get(stage, ())
            # The usual case by itself: tables of 10,000 actions ask this for each of them, several times.
            if count == 1:
                return [Action(source, Op.F, microbatch) for source in sources]
            # The forwards of a source that make its values of these micro-batches.
            sizes = [(source, self.groups.get(source, 1)) for source in sources]
            return [
                Action(source, Op.F, first, size)
                for source, size in sizes
                for first in range(microbatch - microbatch % size, microbatch + count, size)
            ]
        if op is Op.W or op is Op.R:
            return [Action(stage, Op.I if op is Op.W else Op.F, microbatch, count)]
        own = Action(stage, Op.R if (stage, microbatch) in self.recomputed else Op.F, microbatch, count)
        return [own, *[self.gradient(target, microbatch) for target in self.targets.get(stage, ())]]

    def gradient(self, stage: int, microbatch: int) -> Action:
        """The action that makes the gradients of a stage's inputs, for this micro-batch or the group that it is in."""
        first = group_of(self.groups, stage, microbatch)
        return Action(stage, Op.I if (stage, first) in self.halves else Op.B, first, self.groups.get(stage, 1))


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """First → the seconds beside it, each once."""
    found: dict[int, dict[int, None]] = {}
    for first, second in pairs:
        found.setdefault(first, {})[second] = None
    return {first: tuple(seconds) for first, seconds in found.items()}


def in_order(
    rows: Sequence[Sequence[Action]], dependencies: Dependencies
) -> Iterator[tuple[int, Action, list[Action]]]:
    """(rank, action, what had to run before) of a table's cells, in an order in which they can run; it ends early
    where the table deadlocks."""
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}  # action → the ranks that can go on once it has run
    place = [0] * len(rows)
    able = deque(range(len(rows)))
    # Each rank runs until something is missing, and is woken by that: each action is looked at once for each of its
    # needs.
    while able:
        rank = able.popleft()
        while place[rank] < len(rows[rank]):
            action = rows[rank][place[rank]]
            before = dependencies.before(action)
            missing = next((other for other in before if other not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action, before
            done.add(action)
            place[rank] += 1
            able.extend(waiting.pop(action, ()))


def in_steps(rows: Sequence[Sequence[Action]], dependencies: Dependencies) -> list[list[Action | None]]:
    """The rows with a cell for each step, each action as early as its row and its dependencies allow; None where a
    rank idles. A table that deadlocks has steps too: what cannot run stands at the end of its row."""
    stepped: list[list[Action | None]] = [[] for _ in rows]
    after: dict[Action, int] = {}  # action → the step behind it
    # A step later than the last of its needs; what the rank idles until then are empty cells.
    for rank, action, before in in_order(rows, dependencies):
        cells = stepped[rank]
        cells += [None] * (max((after[other] for other in before), default=0) - len(cells))
        cells.append(action)
        after[action] = len(cells)
    for row, cells in zip(rows, stepped, strict=True):
        cells += row[len(cells) - cells.count(None) :]
    width = max(map(len, stepped), default=0)
    return [cells + [None] * (width - len(cells)) for cells in stepped]


# --- how far a stage without backward, which waits for nobody behind it, may run ahead of the stages that read it ---


def held_back(
    free: Dependencies,
    backward: Sequence[bool],
    microbatches: int,
    makespan: Callable[[Dependencies], float],
    turns: Sequence[int],
) -> Dependencies:
    """``free`` with the least caps by which a step takes no longer.

    What a stage without backward has made and nobody has taken is held, so its F of micro-batch k waits until its
    readers' ranks have received k − cap. ``before`` has the readers' F of k − cap, which orders the table; ``simulate``
    waits for the messages. Where a table runs further ahead than the least caps, or would take longer, all caps are
    doubled until it does not; a cap of all micro-batches is none.

    Nothing can deadlock by it: a table that simulates with these waits has an order in which all its actions can run,
    and the messages that a cap waits for are posted before the action that it names.

    Args:
        free: the table's dependencies without caps.
        backward: whether each stage has one.
        microbatches: how many.
        makespan: of a step by such dependencies; infinite where it deadlocks.
        turns: on how many ranks each stage is: who waits has sent what it waits for.
    """
    caps = _least_caps(free, backward, turns)
    unheld = makespan(free) if caps else math.inf
    # Caps that cost time are doubled: at all micro-batches they hold nobody back, so that it ends after log2(m) tries.
    while unheld < math.inf and any(cap < microbatches for cap in caps.values()):
        held = replace(free, ahead=caps)
        if makespan(held) <= unheld * (1 + 1e-9):
            return held
        caps = {stage: 2 * cap for stage, cap in caps.items()}
    return free


def _least_caps(free: Dependencies, backward: Sequence[bool], turns: Sequence[int]) -> dict[int, int]:
    """As many as keep a stage and what lies between it and its readers busy: 1 + d(s) − d(t) for a reader t, 2 for the
    next stage, and so many groups where t runs in groups."""
    readers = {stage: free.readers.get(stage, ()) for stage in range(len(turns))}
    depth = [1] * len(turns)
    for stage in reversed(list(topological_order({stage: stage for stage in readers}, readers))):
        depth[stage] = 1 + max((depth[reader] for reader in readers[stage]), default=0)
    caps = {}
    for stage in free.readers:
        if not backward[stage]:
            wanted = ((1 + depth[stage] - depth[reader]) * free.groups.get(reader, 1) for reader in readers[stage])
            # A whole number of rounds over the stage's ranks: who waits then has sent what it waits for.
            one_round = turns[stage] * free.groups.get(stage, 1)
            caps[stage] = math.ceil(max(wanted) / one_round) * one_round
    return caps
