"""Search: of many layouts the one of the least simulated makespan within the memory of a rank.

Candidates are cuts of each order of the blocks, also with a part of the blocks on all ranks. The lower bound of a
layout says whether its table may be better than the best one, and the least makespan of the table whether it is; the
last few layouts are simulated.

Every choice depends on the work alone, never on a clock, so that all ranks of a run find the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from fxpipe.errors import PartitionError, ScheduleError
from fxpipe.graph.ranks import rank_count
from fxpipe.graph.topological import topological_order
from fxpipe.passes.union import Union
from fxpipe.plan.balance.block_graph import BlockGraph
from fxpipe.plan.balance.segments import (
    Cuts,
    Line,
    Order,
    balanced,
    between,
    depth_first,
    entries,
    orders,
    partition,
    segments_of,
)
from fxpipe.plan.balance.simulated_layouts import Judge, LayoutOutcome, Rerun, StageLayout
from fxpipe.schedules import Limited

CRUMB = 0.01
"""What takes no more than this part of the greatest part of its segment is no stage of its own."""


@dataclass(frozen=True)
class Recipe:
    """How a layout comes about: an order of blocks, where it is cut, and the rank of each segment.

    ``entries``: the sources of the graph that each block depends on. The parts of a segment that are not connected, or
    depend on other sources, become stages of their own, and their rank runs them one by one. None: a stage for each
    segment. ``shared``: the blocks of each stage that is on all ranks; ``order`` has all others.
    """

    order: Order
    cuts: Cuts
    rank_of: tuple[int, ...]
    entries: tuple[int, ...] | None
    origin: str
    shared: tuple[Order, ...] = ()


def recipes(
    work: BlockGraph, ranks: int, microbatches: int, memory: float | None, apart: frozenset[int] = frozenset()
) -> Iterator[Recipe]:
    """For each order its cuts into a segment a rank, and two; the towers in a segment as one stage, and as several.
    ``apart``: blocks that no segment has, closed under what they need."""
    reached = entries(work)
    within = reduce(or_, (reached[block] for block in apart), 0)
    sources = tuple(bits & ~within for bits in reached)
    for order in orders(work):
        line = Line(work, tuple(block for block in order if block not in apart))
        made = [(cuts, 1, f"{ranks} segments") for cuts in balanced(line, ranks, microbatches, memory)]
        if ranks > 1:
            made += [(cuts, 2, f"{2 * ranks} segments in laps") for cuts in balanced(line, 2 * ranks)]
        for cuts, laps, how in made:
            whole = Recipe(line.order, cuts, tuple(range(ranks)) * laps, None, how)
            yield whole
            if len({sources[block] for block in line.order}) > 1 and not work.given:
                yield replace(whole, entries=sources, origin=f"{how}, towers apart")


def layout_of(work: BlockGraph, recipe: Recipe) -> StageLayout:
    """The layout that a recipe makes."""
    group_of = segments_of(recipe.order, recipe.cuts)
    group_of |= {block: -1 - number for number, blocks in enumerate(recipe.shared) for block in blocks}
    everywhere = tuple(range(1 + max(recipe.rank_of)))
    ranks = [everywhere if group_of[b] < 0 else recipe.rank_of[group_of[b]] for b in range(len(work))]
    if work.given:
        return StageLayout(tuple(range(len(work))), tuple(ranks), recipe.origin)
    segments = [group_of[block] for block in range(len(work))]
    layout = None
    if recipe.entries is not None:
        layout = _of_groups(work, _apart(work, segments, recipe.entries), ranks, recipe)
    if layout is None and recipe.shared:
        layout = _of_groups(work, segments, ranks, recipe)
    return layout or StageLayout(tuple(segments), recipe.rank_of, recipe.origin)  # segments are in topological order


def _apart(work: BlockGraph, segment_of: Sequence[int], reached: Sequence[int]) -> list[int]:
    """Block → its group: the connected blocks of a segment that depend on the same sources; crumbs go with the largest
    group of their segment."""
    parts = connected(work, list(zip(segment_of, reached, strict=True)))
    seconds = {blocks[0]: work.seconds(blocks) for blocks in parts.groups()}
    largest: dict[int, int] = {}  # segment → the first block of its largest part
    for block in sorted(seconds, key=seconds.__getitem__, reverse=True):
        most = largest.setdefault(segment_of[block], block)
        if seconds[block] <= CRUMB * seconds[most]:
            parts.join(most, block)
    return [parts.find(block) for block in range(len(work))]


def _of_groups(
    work: BlockGraph, group_of: Sequence[int], ranks: Sequence[int | tuple[int, ...]], recipe: Recipe
) -> StageLayout | None:
    """A stage for each group, in topological order, the one first that begins first; None where groups wait for each
    other. ``ranks``: those of each block."""
    order = depth_first(work) if recipe.shared else recipe.order
    first = {group_of[block]: place for place, block in reversed(list(enumerate(order)))}
    number = topological_order(first, work.after(group_of))
    if len(number) < len(first):
        return None
    rank_of = dict(zip(group_of, ranks, strict=True))
    stage_of = tuple(number[group] for group in group_of)
    return StageLayout(stage_of, tuple(rank_of[group] for group in number), recipe.origin)


def connected(work: BlockGraph, class_of: Sequence[Hashable]) -> Union[int]:
    """The parts that values connect without leaving a class."""
    parts = Union(range(len(work)))
    for value in work.values:
        for target in value.targets:
            if class_of[value.source] == class_of[target]:
                parts.join(value.source, target)
    return parts


# --- a part on all ranks, beside the others, as an encoder in front of a model is ---

SMALL = 0.02
"""What takes less than this part of the whole is not put on all ranks."""
MOST_PARTS = 3
"""So many are tried, the largest first."""

STAGES = (1, 2, 4)
"""Into so many stages a part is cut, where it has as many blocks: shorter actions fit into shorter gaps."""


def on_all_ranks(
    work: BlockGraph, ranks: int, microbatches: int, memory: float | None, bound: Callable[[StageLayout], float]
) -> Iterator[StageLayout]:
    """Layouts with a part on all ranks, as one or several stages; of all cuts of the rest that of the least bound."""
    for part in _shareable(work):
        line = Line(work, tuple(block for block in depth_first(work) if block in part))
        seconds = between(line.time)
        for count in (count for count in STAGES if count <= len(part) and ranks <= len(work) - len(part)):
            beside = f", beside {'a stage' if count == 1 else f'{count} stages'} on all ranks"
            cuts = partition(([seconds] * count).__getitem__, count) or ()
            shared = tuple(line.order[start:end] for start, end in itertools.pairwise((0, *cuts)))
            found = (
                layout_of(work, replace(recipe, shared=shared, origin=recipe.origin + beside))
                for recipe in recipes(work, ranks, microbatches, memory, part)
            )
            yield from sorted(found, key=bound)[:1]


def _shareable(work: BlockGraph) -> list[frozenset[int]]:
    """The parts that may be on all ranks, the largest first."""
    # A stage on all ranks fills their bubbles where it may run at any time: it needs no other stage, and does not run
    # once for the whole batch.
    if work.given:
        free = (block for block in range(len(work)) if not work.sources[block] and block not in work.gather)
        found = [frozenset([block]) for block in free]
    else:  # large parts that depend on some of the graph's sources, as an image encoder does on the pixels
        reached = entries(work)
        # All blocks that depend on no other sources than one block does are closed under what they need.
        parts = (
            frozenset(b for b, mine in enumerate(reached) if mine & bits == mine) for bits in dict.fromkeys(reached)
        )
        found = [part for part in parts if work.seconds(part) > SMALL * work.seconds()]
    fitting = [part for part in found if part.isdisjoint(work.alone) and part.isdisjoint(work.result)]
    return sorted(fitting, key=lambda part: (-work.seconds(sorted(part)), min(part)))[:MOST_PARTS]


ACTIONS = 100_000
"""So many actions the tables of candidates have."""
MORE_ACTIONS = 80_000
"""So many have the tables by which the best candidates are improved."""
IMPROVED = 2
"""So many candidates of each origin are improved."""
RUNNERS_UP = 3
"""So many layouts are shown beside the best one."""
GAIN = 0.03
"""The part of a step that a cut inside of modules, or a stage on all ranks, must gain to be taken."""
SHARE = 0.5
"""The part of ``MORE_ACTIONS`` for the best candidate; the next one has the same part of the rest, and so on."""
LITTLE = 0.01
"""The part of a step that is not worth a candidate's table."""
STEPS = (1, -1, 2, -2, 4, -4, 8, -8)
"""By how many blocks a cut is moved."""


@dataclass(frozen=True)
class Found:
    """The best layout, and the best ones that were found in other ways."""

    best: LayoutOutcome
    others: tuple[LayoutOutcome, ...]

    def of_blocks(self, piece_of: Sequence[int], how: str) -> Found:
        """The same layouts of the blocks that pieces were put together from. ``how``: words added to their origin."""

        def of_blocks(outcome: LayoutOutcome) -> LayoutOutcome:
            layout = outcome.layout
            stage_of = tuple(layout.stage_of[piece] for piece in piece_of)
            return replace(outcome, layout=StageLayout(stage_of, layout.rank_of, layout.origin + how))

        return Found(of_blocks(self.best), tuple(map(of_blocks, self.others)))

    def unless(self, other: Found | None, gain: float) -> Found:
        """This where its step is shorter by the part ``gain``, or else the other; the runners-up of both."""
        if other is None:
            return self
        # A layout with drawbacks of its own, such as a cut inside of a module, must gain enough to be worth them.
        taken, left = (self, other) if self.best.seconds < other.best.seconds * (1 - gain) else (other, self)
        others = sorted((left.best, *taken.others, *left.others), key=_merit)
        different = {outcome.layout: outcome for outcome in others if outcome.layout != taken.best.layout}
        return Found(taken.best, tuple(different.values()))


def search(
    work: BlockGraph,
    ranks: int,
    microbatches: int,
    family: Limited,
    memory: float | None,
    again: Rerun | None = None,
    several: bool = False,
    effort: float = 1.0,
) -> Found:
    """The best layout of the work. ``several``: a stage may be on all ranks, where a step then takes less by ``GAIN``:
    an encoder or, of given stages and where there is a limit of memory, a stage that needs no other. ``effort``: the
    part of the usual number of actions that tables may have in all.

    PartitionError where no layout fits the memory, with the least bytes that a layout takes; ScheduleError where the
    family has no table for any layout.
    """
    # 4 micro-batches a rank show a layout's bubble well enough to choose by, and their table is made fast. The best
    # layouts of different origins are simulated with all micro-batches at the end.
    few = microbatches if work.gather else min(microbatches, 4 * ranks)
    memories = [memory] if memory is None else [memory, None]  # what is cut for speed alone may fit, too
    recipe_of = {layout_of(work, recipe): recipe for most in memories for recipe in recipes(work, ranks, few, most)}
    # "auto" recomputes only where nothing fits without.
    reruns = [None, again] if again is not None and again.at_need else [again]
    for rerun in reruns:
        judge = Judge(work, family, few, memory, rerun)
        if outcomes := _estimated(judge, recipe_of, ACTIONS * effort):
            break
    else:
        raise _no_fit(judge)
    starts = _best_of_each_origin(outcomes, IMPROVED)
    better: list[LayoutOutcome] = []
    last = judge.actions + effort * MORE_ACTIONS
    for start in starts:
        # Cuts that are bound to be slow are not made fast by moving them a little.
        if judge.lower_bound(start.layout) > min(outcome.seconds for outcome in [*outcomes, *better]):
            continue
        until = judge.actions + SHARE * (last - judge.actions)
        better.append(_climbed(judge, start, recipe_of[start.layout], until))
    exact = judge if few == microbatches else Judge(work, family, microbatches, memory, judge.again)
    ranked = _best_of_each_origin(sorted([*outcomes, *better], key=_merit), 1)[: 1 + RUNNERS_UP]
    fitting = [outcome.layout for outcome in ranked if exact.estimate(outcome.layout) is not None]
    simulated = sorted(filter(None, map(exact.outcome, fitting)), key=_merit)
    if not simulated:
        raise _no_fit(exact)
    found = Found(simulated[0], tuple(simulated[1:]))
    # Without a limit of memory the first of given stages would be on all ranks of any chain.
    several &= memory is not None or not work.given
    if several and work.seconds() * microbatches / ranks < found.best.makespan * (1 - GAIN):
        for layout in on_all_ranks(work, ranks, few, memory, exact.lower_bound):
            if exact.lower_bound(layout) < found.best.seconds * (1 - GAIN) and exact.estimate(layout) is not None:
                outcome = exact.outcome(layout)
                found = found if outcome is None else Found(outcome, ()).unless(found, GAIN)
    return found


def _merit(outcome: LayoutOutcome) -> tuple[float, float, int]:
    """Less is better: time, to a part in ten thousand; then bytes; then stages."""
    return float(f"{outcome.seconds:.4g}"), outcome.most_bytes, outcome.layout.stages


def _estimated(judge: Judge, layouts: Iterable[StageLayout], most: float) -> list[LayoutOutcome]:
    """The estimated outcomes of layouts that fit, the best first, until their tables have ``most`` actions.

    Of each origin the layout of the least lower bound gets a table, then all layouts by their bounds until these show
    that none is better by ``LITTLE``.
    """
    # The bound is cheap, a table is not. An origin whose bounds are all high may still have the best table.
    ranked = sorted(layouts, key=judge.lower_bound)
    firsts = {layout.origin: layout for layout in reversed(ranked)}
    found: list[LayoutOutcome] = []
    for layout in dict.fromkeys([*sorted(firsts.values(), key=judge.lower_bound), *ranked]):
        if found and judge.actions >= most:
            break
        first = layout is firsts[layout.origin]
        if found and not first and judge.lower_bound(layout) >= (1 - LITTLE) * found[0].seconds:
            break
        if (outcome := judge.estimate(layout)) is not None:
            found = sorted([*found, outcome], key=_merit)
    return found


def _no_fit(judge: Judge) -> PartitionError | ScheduleError:
    if judge.refused is not None and judge.least_bytes == float("inf"):
        return judge.refused
    return PartitionError(
        f"no balance fits into {judge.memory:,.0f} bytes a rank; the least that one was found to take is "
        f"{judge.least_bytes:,.0f} bytes on its fullest rank. Use more pipe ranks, smaller micro-batches, or recompute"
    )


def _best_of_each_origin(ranked: Iterable[LayoutOutcome], count: int) -> list[LayoutOutcome]:
    """The first ``count`` outcomes of each origin, each layout once, in order."""
    origins: Counter[str] = Counter()
    best: dict[StageLayout, LayoutOutcome] = {}
    for outcome in ranked:
        if origins[outcome.layout.origin] < count and outcome.layout not in best:
            origins[outcome.layout.origin] += 1
            best[outcome.layout] = outcome
    return list(best.values())


# --- moving cuts and stages ---


def _climbed(judge: Judge, best: LayoutOutcome, recipe: Recipe | None, until: float) -> LayoutOutcome:
    """From here to the first layout a move away that is better, and on from there, until there is none. A layout is
    measured only where its lower bound does not rule that out."""
    # The first better layout is taken, not the best one: tables are what costs, and moves come in the order in which
    # they are likely to help.
    others = _moves(judge.work, best.layout, recipe)
    while judge.actions < until and (moved := next(others, None)) is not None:
        layout, other = moved
        outcome = judge.estimate(layout) if judge.lower_bound(layout) < best.seconds else None
        if outcome is not None and _merit(outcome) < _merit(best):
            best, others = outcome, _moves(judge.work, layout, other)
    return best


def _moves(work: BlockGraph, layout: StageLayout, recipe: Recipe | None) -> Iterator[tuple[StageLayout, Recipe | None]]:
    """The layout with a cut elsewhere, those of the heaviest segments first; with one stage on another rank, where its
    own keeps another, or with two stages exchanged. None: stages have moved, so that cuts no longer do."""
    ends = () if recipe is None else (0, *recipe.cuts)
    weight = [] if recipe is None else [work.seconds(recipe.order[a:b]) for a, b in itertools.pairwise(ends)]
    for number in sorted(range(1, len(ends) - 1), key=lambda number: -max(weight[number - 1], weight[number])):
        for step in STEPS:
            cut = ends[number] + step
            # No segment may become empty, and the last segment ends where it did.
            if recipe is not None and ends[number - 1] < cut < ends[number + 1]:
                moved = replace(recipe, cuts=(*ends[1:number], cut, *ends[number + 1 :]))
                yield layout_of(work, moved), moved
    rank_of, stages, ranks = list(layout.rank_of), range(layout.stages), rank_count(layout.rank_of)
    if layout.stages == ranks:
        return
    # A rank must keep a stage, so only a stage of a rank that has several may move; any two may be exchanged.
    exchanges: list[dict[int, int | tuple[int, ...]]] = [
        {stage: rank} for stage in stages if rank_of.count(rank_of[stage]) > 1 for rank in range(ranks)
    ]
    exchanges += [{a: rank_of[b], b: rank_of[a]} for a, b in itertools.combinations(stages, 2)]
    origin = layout.origin if "moved" in layout.origin else f"{layout.origin}, stages moved"
    for exchange in exchanges:
        exchanged = tuple(exchange.get(stage, rank) for stage, rank in enumerate(rank_of))
        if exchanged != layout.rank_of:
            yield StageLayout(layout.stage_of, exchanged, origin), None
