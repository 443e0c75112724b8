"""Search: of many layouts the one of the least simulated makespan within the memory of a rank.

Every choice depends on the work alone, never on a clock, so that all ranks of a run find the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxpipe.errors import PartitionError, ScheduleError
from fxpipe.graph.ranks import Placement, rank_count
from fxpipe.plan.balance.block_graph import BlockGraph
from fxpipe.plan.balance.candidates import Recipe, layout_of, recipes
from fxpipe.plan.balance.segments import Room
from fxpipe.plan.balance.several import layouts
from fxpipe.plan.balance.simulated_layouts import Judge, LayoutOutcome, Rerun, StageLayout, without_gaps
from fxpipe.schedules import Limited

ACTIONS = 150_000
"""So many actions are simulated to choose among candidates."""
MORE_ACTIONS = 250_000
"""So many to improve the best of them."""
IMPROVED = 3
"""So many of those that came about in the same way are improved."""
RUNNERS_UP = 3
"""So many layouts are shown beside the best one."""
GAIN = 0.03
"""The part of a step that a cut inside of modules, or a stage on all ranks, must gain to be taken."""
STEPS = (1, -1, 2, -2, 4, -4, 8, -8)
"""By how many blocks a cut is moved."""


@dataclass(frozen=True)
class Found:
    """The best layout, and the best ones that were found in other ways."""

    best: LayoutOutcome
    others: tuple[LayoutOutcome, ...]

    def of_blocks(self, piece_of: Sequence[int], how: str) -> Found:
        """The same for what the pieces were put together from. ``how``: words for the way in which they were."""
        best, *others = (_of_blocks(one, piece_of, how) for one in (self.best, *self.others))
        return Found(best, tuple(others))

    def unless(self, other: Found | None, gain: float) -> Found:
        """This, unless it is not faster than the other by so great a part; with the best that was found else."""
        if other is None:
            return self
        taken, left = (self, other) if self.best.seconds < other.best.seconds * (1 - gain) else (other, self)
        others = sorted((left.best, *taken.others, *left.others), key=_merit)
        different = {one.layout: one for one in others if one.layout != taken.best.layout}
        return Found(taken.best, tuple(different.values()))


def search(
    work: BlockGraph,
    ranks: int,
    microbatches: int,
    family: Limited,
    memory: float | None,
    keep: bool,
    again: Rerun | None = None,
    several: bool = False,
    effort: float = 1.0,
) -> Found:
    """The best layout of the work. ``keep``: each block is a stage, of which only the rank is open. ``several``: a
    stage may be on all ranks, where a step then takes less by ``GAIN``: an encoder or, of given stages and where there
    is a limit of memory, one that needs no other. ``effort``: the part of the usual number of
    actions that is simulated.

    PartitionError where none fits the memory, with the least that one takes; ScheduleError where the family has no
    table for any.
    """
    few = microbatches if work.gather else min(microbatches, 4 * ranks)
    at_need = again is not None and again.at_need
    judge = Judge(work, family, few, memory, None if at_need else again)
    room = Room(memory, few) if memory is not None else None
    rooms = [None] if room is None else [room, None]  # what is cut for speed alone may fit, too
    tried = [recipe for one in rooms for recipe in recipes(work, ranks, few, keep, one)]
    made = {layout_of(work, recipe, keep): recipe for recipe in tried}
    most = ACTIONS * effort
    outcomes = _simulated(judge, made, most)
    if not outcomes and at_need:
        judge = Judge(work, family, few, memory, again)
        outcomes = _simulated(judge, made, most)
    if not outcomes:
        raise _no_fit(judge, memory)
    starts = _best_of_each_way(outcomes, IMPROVED)
    better = [
        _improved(judge, made[start.layout], start, keep, judge.actions + effort * MORE_ACTIONS / len(starts))
        for start in starts
    ]
    ranked = _best_of_each_way(sorted([*outcomes, *better], key=_merit), 1)
    found = _finally(judge, ranked, microbatches)
    several &= memory is not None or not keep  # else the first stage of any chain would be on all ranks
    if several and work.seconds * microbatches / ranks < found.best.makespan * (1 - GAIN):

        def best_of(rest: BlockGraph) -> LayoutOutcome | None:
            with contextlib.suppress(PartitionError, ScheduleError):
                return search(rest, ranks, microbatches, family, memory, keep, effort=0.25).best
            return None

        exact = Judge(work, family, microbatches, memory, judge.again)
        for layout in layouts(work, ranks, keep, best_of):
            outcome = exact.outcome(layout)
            if outcome is not None and exact.fits(outcome):
                found = Found(outcome, ()).unless(found, GAIN)
    return found


def _merit(outcome: LayoutOutcome) -> tuple[float, float, int]:
    """Less is better: time, to a part in ten thousand; then bytes; then stages."""
    return float(f"{outcome.seconds:.4g}"), outcome.most_bytes, outcome.layout.stages


def _simulated(judge: Judge, layouts: Iterable[StageLayout], most: float) -> list[LayoutOutcome]:
    """The outcomes of layouts that fit, the best first, until enough has been simulated: of each way in turn the one
    of the least lower bound, unless its bound shows that it is no better."""
    ways: dict[str, list[StageLayout]] = {}
    for layout in sorted(layouts, key=lambda layout: judge.staged(layout).lower_bound):
        ways.setdefault(layout.origin, []).append(layout)
    found: list[LayoutOutcome] = []
    for layout in filter(None, itertools.chain(*itertools.zip_longest(*ways.values()))):
        if found and judge.actions >= most:
            break
        if layout is not ways[layout.origin][0] and found and judge.staged(layout).lower_bound >= found[0].seconds:
            continue
        outcome = judge.outcome(layout)
        if outcome is not None and judge.fits(outcome):
            found = sorted([*found, outcome], key=_merit)
    return found


def _no_fit(judge: Judge, memory: float | None) -> PartitionError | ScheduleError:
    if judge.refused is not None and judge.least_bytes == float("inf"):
        return judge.refused
    return PartitionError(
        f"no balance fits into {memory:,.0f} bytes a rank; the least that one was found to take is "
        f"{judge.least_bytes:,.0f} bytes on its fullest rank. Use more pipe ranks, smaller micro-batches, or recompute"
    )


def _improved(judge: Judge, recipe: Recipe, outcome: LayoutOutcome, keep: bool, until: float) -> LayoutOutcome:
    """Moves cuts, and then stages, as long as it helps and no more than so many actions have been simulated."""
    best, progress = outcome, True
    while progress and judge.actions < until:
        progress = False
        for other in _neighbours(judge.work, recipe):
            if judge.actions >= until:
                break
            layout = layout_of(judge.work, other, keep)
            candidate = _if_better(judge, layout, best)
            if candidate is not None:
                recipe, best, progress = other, candidate, True
                break
    return _moved(judge, best, until)


def _neighbours(work: BlockGraph, recipe: Recipe) -> Iterator[Recipe]:
    """The same recipe with one cut elsewhere, or two next to each other: those of the heaviest segments first."""
    cuts, starts = recipe.cuts, (0, *recipe.cuts[:-1])
    weight = [
        sum(work.blocks[recipe.order[position]].seconds for position in range(start, end))
        for start, end in zip(starts, cuts, strict=True)
    ]
    places = sorted(range(len(cuts) - 1), key=lambda place: (-max(weight[place], weight[place + 1]), place))
    for place in places:
        for step in STEPS:
            yield from _with_cuts(recipe, {place: cuts[place] + step})
    for place in places:
        for step in STEPS:
            for other in (step, -step):
                yield from _with_cuts(recipe, {place: cuts[place] + step, place + 1: cuts[place + 1] + other})


def _with_cuts(recipe: Recipe, moved: Mapping[int, int]) -> Iterator[Recipe]:
    """The recipe with some cuts elsewhere, if they still are one behind the other, and the last one where it was."""
    cuts = tuple(moved.get(place, cut) for place, cut in enumerate(recipe.cuts))
    if cuts[-1] == recipe.cuts[-1] and all(a < b for a, b in itertools.pairwise((0, *cuts))):
        yield dataclasses.replace(recipe, cuts=cuts)


def _moved(judge: Judge, best: LayoutOutcome, until: float) -> LayoutOutcome:
    """Moves single stages to other ranks, as long as it helps."""
    progress = True
    while progress and judge.actions < until:
        progress = False
        for rank_of in _exchanges(best.layout):
            if judge.actions >= until:
                break
            origin = best.layout.origin
            layout = StageLayout(
                best.layout.stage_of, rank_of, origin if "moved" in origin else f"{origin}, stages moved"
            )
            candidate = _if_better(judge, layout, best)
            if candidate is not None:
                best, progress = candidate, True
                break
    return best


def _exchanges(layout: StageLayout) -> Iterator[Placement]:
    """The ranks of the stages with one stage elsewhere, where its rank keeps another, or two stages changed."""
    rank_of = layout.rank_of
    ranks = rank_count(rank_of)
    if layout.stages == ranks:
        return
    for stage, rank in enumerate(rank_of):
        if rank_of.count(rank) > 1:
            for other in range(ranks):
                if other != rank:
                    yield (*rank_of[:stage], other, *rank_of[stage + 1 :])
    for one in range(layout.stages):
        for two in range(one + 1, layout.stages):
            if rank_of[one] != rank_of[two]:
                changed = list(rank_of)
                changed[one], changed[two] = changed[two], changed[one]
                yield tuple(changed)


def _if_better(judge: Judge, layout: StageLayout, best: LayoutOutcome) -> LayoutOutcome | None:
    """A layout's outcome where it fits and is better; simulated only where its lower bound does not rule that out."""
    if judge.staged(layout).lower_bound >= best.seconds:
        return None
    outcome = judge.outcome(layout)
    if outcome is None or not judge.fits(outcome) or _merit(outcome) >= _merit(best):
        return None
    return outcome


def _best_of_each_way(ranked: Iterable[LayoutOutcome], count: int) -> list[LayoutOutcome]:
    """The first so many of each way of finding a layout, each layout once, in order."""
    seen: dict[str, set[StageLayout]] = {}
    found: list[LayoutOutcome] = []
    for outcome in ranked:
        way = seen.setdefault(outcome.layout.origin, set())
        if len(way) < count and not any(outcome.layout in layouts for layouts in seen.values()):
            way.add(outcome.layout)
            found.append(outcome)
    return found


def _of_blocks(outcome: LayoutOutcome, piece_of: Sequence[int], how: str) -> LayoutOutcome:
    layout = outcome.layout
    stage_of = [layout.stage_of[piece] for piece in piece_of]
    return dataclasses.replace(outcome, layout=without_gaps(stage_of, layout.rank_of, layout.origin + how))


def _finally(judge: Judge, ranked: list[LayoutOutcome], microbatches: int) -> Found:
    """The best with all micro-batches, where they were chosen with fewer; its table verified."""
    exact = Judge(judge.work, judge.family, microbatches, judge.memory, judge.again)
    again = [exact.outcome(outcome.layout) for outcome in ranked[: 1 + RUNNERS_UP]]
    kept = sorted((outcome for outcome in again if outcome is not None and exact.fits(outcome)), key=_merit)
    if not kept:
        raise _no_fit(exact, judge.memory)
    kept[0].schedule.verify()
    return Found(kept[0], tuple(kept[1:]))
