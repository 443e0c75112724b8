"""Search: finds the layout of the least simulated makespan whose bytes fit the memory of a rank.

Candidates are cuts of several orders of the blocks, also with a part of the blocks on all ranks. A layout's lower bound
tells whether its table may beat the best table so far, and the table's least makespan tells whether it does. The last
few layouts are simulated.

Every choice depends only on the block graph, never on a clock, so all ranks of a run find the same layout.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_

from fxpipe.errors import DoesNotFit, PartitionError, ScheduleError
from fxpipe.graph.ranks import Placement, rank_count, ranks_of
from fxpipe.graph.topological import topological_order
from fxpipe.passes.union import Union
from fxpipe.progress import progress
from fxpipe.schedules import Limited
from fxpipe.schedules.families.v_min import FOLDING
from fxpipe.schedules.families.zero_bubble import folded
from fxpipe.search.block_graph import BlockGraph
from fxpipe.search.segments import (
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
from fxpipe.search.simulated_layouts import Judge, LayoutOutcome, Rerun, StageLayout

CRUMB = 0.01
"""A part that takes at most this fraction of the seconds of its segment's largest part is no stage of its own."""


@dataclass(frozen=True)
class Recipe:
    """The recipe of a layout: an order of blocks, the cuts of the order, and the rank of each segment.

    ``entries``: the graph sources on which each block depends. Parts of a segment that are not connected, or that
    depend on different sources, become separate stages on the segment's rank. None: each segment is a stage.
    ``shared``: the blocks of each stage on all ranks; ``order`` has all other blocks.
    """

    order: Order
    cuts: Cuts
    rank_of: tuple[int, ...]
    entries: tuple[int, ...] | None
    origin: str
    shared: tuple[Order, ...] = ()


def recipes(
    work: BlockGraph,
    ranks: int,
    microbatches: int,
    memory: float | None,
    apart: frozenset[int] = frozenset(),
    folds: bool = False,
) -> Iterator[Recipe]:
    """For each order, cuts into one and two segments per rank, with the towers of a segment in one stage or in several.
    ``apart``: blocks in no segment; they depend on no other blocks. ``folds``: two segments per rank, there and back.
    """
    reached = entries(work)
    within = reduce(or_, (reached[block] for block in apart), 0)
    sources = tuple(bits & ~within for bits in reached)
    for order in orders(work):
        line = Line(work, tuple(block for block in order if block not in apart))
        choices = [(cuts, 1, "a part on each rank") for cuts in balanced(line, ranks, microbatches, memory)]
        if ranks > 1:
            choices += [(cuts, 2, "two parts on each rank") for cuts in balanced(line, 2 * ranks)]
        if folds:
            choices = [(cuts, 2, "two parts on each rank, there and back") for cuts in balanced(line, 2 * ranks)]
        for cuts, laps, how in choices:
            whole = Recipe(line.order, cuts, folded(ranks) if folds else tuple(range(ranks)) * laps, None, how)
            yield whole
            if len({sources[block] for block in line.order}) > 1 and not work.blocks_are_stages:
                yield replace(whole, entries=sources, origin=f"{how}, towers in stages of their own")


def layout_of(work: BlockGraph, recipe: Recipe) -> StageLayout:
    """The layout that a recipe makes."""
    group_of = segments_of(recipe.order, recipe.cuts)
    group_of |= {block: -1 - number for number, blocks in enumerate(recipe.shared) for block in blocks}
    everywhere = tuple(range(1 + max(recipe.rank_of)))
    ranks = [everywhere if group_of[b] < 0 else recipe.rank_of[group_of[b]] for b in range(len(work))]
    if work.blocks_are_stages:
        return StageLayout(tuple(range(len(work))), tuple(ranks), recipe.origin)
    segments = [group_of[block] for block in range(len(work))]
    layout = None
    for block in work.gather:  # a stage of its own, on its segment's rank
        segments[block] = -1 - len(recipe.shared) - block
    if recipe.entries is not None:
        layout = _of_groups(work, _apart(work, segments, recipe.entries), ranks, recipe)
    if layout is None and (recipe.shared or work.gather):
        layout = _of_groups(work, segments, ranks, recipe)
    return layout or StageLayout(tuple(segments), recipe.rank_of, recipe.origin)  # segments are in topological order


def _apart(work: BlockGraph, segment_of: Sequence[int], reached: Sequence[int]) -> list[int]:
    """Block → its group. A group has the connected blocks of a segment that depend on the same sources; crumbs join
    the largest group of their segment."""
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
    """The layout with a stage for each group, in topological order, by the groups' first blocks; None if groups depend
    on each other in a cycle. ``ranks``: the rank, or ranks, of each block."""
    order = depth_first(work) if recipe.shared else recipe.order
    first = {group_of[block]: position for position, block in reversed(list(enumerate(order)))}
    number = topological_order(first, work.after(group_of))
    if len(number) < len(first):
        return None
    rank_of = dict(zip(group_of, ranks, strict=True))
    stage_of = tuple(number[group] for group in group_of)
    return StageLayout(stage_of, tuple(rank_of[group] for group in number), recipe.origin)


def connected(work: BlockGraph, class_of: Sequence[Hashable]) -> Union[int]:
    """The parts of the graph whose blocks are connected by values inside the same class; gathered blocks are alone."""
    parts = Union(range(len(work)))
    for value in work.values:
        for target in value.targets:
            if class_of[value.source] == class_of[target] and work.gather.keys().isdisjoint((value.source, target)):
                parts.join(value.source, target)
    return parts


# --- a part of the model on all ranks, such as an encoder in front of a model ---

SMALL = 0.02
"""A part that takes at most this fraction of all seconds is not put on all ranks."""
MOST_PARTS = 3
"""The most parts that are tried, the largest first."""

STAGES = (1, 2, 4)
"""The numbers of stages into which a part is cut, if it has enough blocks: shorter actions fit into shorter gaps."""


def on_all_ranks(
    work: BlockGraph, ranks: int, microbatches: int, memory: float | None, bound: Callable[[StageLayout], float]
) -> Iterator[StageLayout]:
    """Layouts with a part on all ranks, in one or several stages. The rest has the cuts with the least lower bound."""
    for part in _shareable(work):
        line = Line(work, tuple(block for block in depth_first(work) if block in part))
        seconds = between(line.time)
        for count in (count for count in STAGES if count <= len(part) and ranks <= len(work) - len(part)):
            beside = f", beside {'a stage' if count == 1 else f'{count} stages'} on all ranks"
            cuts = partition(([seconds] * count).__getitem__, count) or ()
            shared = tuple(line.order[start:end] for start, end in itertools.pairwise((0, *cuts)))
            layouts = (
                layout_of(work, replace(recipe, shared=shared, origin=recipe.origin + beside))
                for recipe in recipes(work, ranks, microbatches, memory, part)
            )
            yield from sorted(layouts, key=bound)[:1]


def _shareable(work: BlockGraph) -> list[frozenset[int]]:
    """The parts that may be on all ranks, the largest first."""
    # A stage on all ranks fills bubbles if it may run at any time: it must need no other stage, and must not run once
    # for the whole batch.
    if work.blocks_are_stages:
        free = (block for block in range(len(work)) if not work.sources[block] and block not in work.gather)
        candidates = [frozenset([block]) for block in free]
    else:  # large parts that depend on some of the graph's sources, as an image encoder does on the pixels
        reached = entries(work)
        # The blocks that depend only on the sources of some block also contain all blocks that they need.
        parts = (
            frozenset(b for b, mine in enumerate(reached) if mine & bits == mine) for bits in dict.fromkeys(reached)
        )
        candidates = [part for part in parts if work.seconds(part) > SMALL * work.seconds()]
    barred = {*work.alone, *work.result, *work.gather}
    fitting = [part for part in candidates if part.isdisjoint(barred)]
    return sorted(fitting, key=lambda part: (-work.seconds(sorted(part)), min(part)))[:MOST_PARTS]


ACTIONS = 100_000
"""The most actions in the tables of all candidates together."""
MORE_ACTIONS = 80_000
"""The most actions in the tables that improve the best candidates."""
IMPROVED = 2
"""The number of candidates of each origin that are improved."""
RUNNERS_UP = 3
"""The number of layouts that are shown after the best layout."""
GAIN = 0.03
"""The fraction of a step's time that a cut inside of modules, or a stage on all ranks, must gain to be chosen."""
SHARE = 0.5
"""The fraction of ``MORE_ACTIONS`` for the best candidate; the next gets the same fraction of the rest, and so on."""
LITTLE = 0.01
"""The fraction of a step's time that is too small a gain for making a candidate's table."""
STEPS = (1, -1, 2, -2, 4, -4, 8, -8)
"""The numbers of blocks by which a cut is moved."""


@dataclass(frozen=True)
class SearchResult:
    """The best layout, and the best layouts of other origins."""

    best: LayoutOutcome
    others: tuple[LayoutOutcome, ...]

    def of_blocks(self, piece_of: Sequence[int], how: str) -> SearchResult:
        """The same layouts, in terms of the blocks of each piece. ``how``: words added to the layouts' origins."""

        def of_blocks(outcome: LayoutOutcome) -> LayoutOutcome:
            layout = outcome.layout
            stage_of = tuple(layout.stage_of[piece] for piece in piece_of)
            return replace(outcome, layout=StageLayout(stage_of, layout.rank_of, layout.origin + how))

        return SearchResult(of_blocks(self.best), tuple(map(of_blocks, self.others)))

    def unless(self, other: SearchResult | None, gain: float) -> SearchResult:
        """``self`` if its step is shorter by the fraction ``gain``, else ``other``, with the runners-up of both."""
        if other is None:
            return self
        # A layout with drawbacks, such as a cut inside of a module, must gain enough to be worth the drawbacks.
        taken, left = (self, other) if self.best.seconds < other.best.seconds * (1 - gain) else (other, self)
        others = sorted((left.best, *taken.others, *left.others), key=_merit)
        different = {outcome.layout: outcome for outcome in others if outcome.layout != taken.best.layout}
        return SearchResult(taken.best, tuple(different.values()))


def search(
    work: BlockGraph,
    ranks: int,
    microbatches: int,
    family: Limited,
    memory: float | None,
    again: Rerun | None = None,
    several: bool = False,
    effort: float = 1.0,
) -> SearchResult:
    """The best layout of a block graph. ``several``: whether a stage may be on all ranks if a step then gains ``GAIN``:
    an encoder or, of given stages with a memory limit, a stage that needs no other stage. ``effort``: the fraction of
    the usual number of actions that all tables together may have.

    PartitionError if no layout fits the memory, with the least bytes of any layout; ScheduleError if the family has no
    table for any layout.
    """
    # 4 micro-batches per rank show a layout's bubble well enough for a choice, and their table is made fast. At the
    # end, the best layouts of different origins are simulated with all micro-batches.
    few = microbatches if work.gather else min(microbatches, 4 * ranks)
    memories = [memory] if memory is None else [memory, None]  # a layout cut only for speed may fit, too
    made = partial(recipes, work, ranks, few, folds=family.family in FOLDING and len(work) >= 2 * ranks)
    recipe_of = {layout_of(work, recipe): recipe for most in memories for recipe in made(most)}
    # "auto" recomputes only if no layout fits without.
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
        # Small moves cannot help a layout whose lower bound is above the best layout's time.
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
    result = SearchResult(simulated[0], tuple(simulated[1:]))
    # Without a memory limit, the first of given stages would be on all ranks of any chain.
    several &= memory is not None or not work.blocks_are_stages
    if several and work.seconds() * microbatches / ranks < result.best.makespan * (1 - GAIN):
        for layout in on_all_ranks(work, ranks, few, memory, exact.lower_bound):
            if exact.lower_bound(layout) < result.best.seconds * (1 - GAIN) and exact.estimate(layout) is not None:
                outcome = exact.outcome(layout)
                result = result if outcome is None else SearchResult(outcome, ()).unless(result, GAIN)
    return result


def placed_at(
    work: BlockGraph,
    placement: Placement,
    microbatches: int,
    family: Limited,
    memory: float | None,
    again: Rerun | None = None,
) -> SearchResult:
    """The outcome of given stages on given ranks; the errors of ``search``."""
    layout = StageLayout(tuple(range(len(work))), placement, "the ranks given")
    for rerun in [None, again] if again is not None and again.at_need else [again]:
        judge = Judge(work, family, microbatches, memory, rerun)
        if judge.estimate(layout) is not None and (outcome := judge.outcome(layout)) is not None:
            return SearchResult(outcome, ())
    raise _no_fit(judge)


def _merit(outcome: LayoutOutcome) -> tuple[float, float, int]:
    """A sort key, less is better: seconds to four digits, then bytes, then the number of stages."""
    return float(f"{outcome.seconds:.4g}"), outcome.most_bytes, outcome.layout.stages


def _estimated(judge: Judge, layouts: Iterable[StageLayout], most: float) -> list[LayoutOutcome]:
    """The estimated outcomes of layouts that fit, the best first, until their tables have ``most`` actions.

    First the layout with the least lower bound of each origin gets a table. Then all layouts do in order of their
    bounds, until a bound shows that no layout left is better by ``LITTLE``.
    """
    # A bound is cheap, and a table is not. An origin whose bounds are all high may still have the best table.
    ranked = sorted(layouts, key=judge.lower_bound)
    firsts = {layout.origin: layout for layout in reversed(ranked)}
    outcomes: list[LayoutOutcome] = []
    ordered = dict.fromkeys([*sorted(firsts.values(), key=judge.lower_bound), *ranked])
    with progress("balancing", len(ordered), "candidates") as advance:
        for layout in ordered:
            if outcomes and judge.actions >= most:
                break
            first = layout is firsts[layout.origin]
            if outcomes and not first and judge.lower_bound(layout) >= (1 - LITTLE) * outcomes[0].seconds:
                break
            if (outcome := judge.estimate(layout)) is not None:
                outcomes = sorted([*outcomes, outcome], key=_merit)
            advance(1)
    return outcomes


def _no_fit(judge: Judge) -> PartitionError | ScheduleError:
    if judge.refused is not None and judge.least_bytes == float("inf"):
        return judge.refused
    return DoesNotFit(
        f"no balance fits into {judge.memory:,.0f} bytes a rank; the least that one was found to take is "
        f"{judge.least_bytes:,.0f} bytes on its fullest rank. Use more pipe ranks, smaller micro-batches, or recompute",
        judge.least_bytes,
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
    """Hill climbing: goes to the first better layout that is a move away, and on from there, until no move helps.
    Only a layout whose lower bound is below the best time gets a table."""
    # The climb takes the first better layout, not the best: tables are expensive, and the moves that are most likely to
    # help come first.
    others = _moves(judge.work, best.layout, recipe)
    while judge.actions < until and (moved := next(others, None)) is not None:
        layout, other = moved
        outcome = judge.estimate(layout) if judge.lower_bound(layout) < best.seconds else None
        if outcome is not None and _merit(outcome) < _merit(best):
            best, others = outcome, _moves(judge.work, layout, other)
    return best


def best_change(judge: Judge, layout: StageLayout, most: float) -> LayoutOutcome | None:
    """The layout of the shortest step, in fewer than ``most`` seconds, that differs from ``layout`` in a stage's ranks,
    or by two stages exchanged; None if there is none. Blocks are stages."""
    best: LayoutOutcome | None = None
    for other in sorted(dict.fromkeys(_changes(judge, layout)), key=judge.lower_bound):
        if judge.lower_bound(other) >= most or judge.actions >= ACTIONS:
            break
        outcome = judge.outcome(other) if (least := judge.estimate(other)) and least.seconds < most else None
        if outcome is not None and outcome.seconds < most:
            best, most = outcome, outcome.seconds
    return best


def _changes(judge: Judge, layout: StageLayout) -> Iterator[StageLayout]:
    """Layouts in which a stage is on one rank, on two, on all, or on one more than now; or two stages are exchanged."""
    yield from (other for other, _ in _moves(judge.work, layout, None))
    ranks = range(rank_count(layout.rank_of))
    for stage, entry in enumerate(layout.rank_of):
        alone, runs = stage in judge.work.alone, judge.microbatches // judge.staged(layout).groups[stage]
        sets = {(rank,) for rank in ranks} | set(itertools.combinations(ranks, 2)) | {tuple(ranks)}
        sets |= {tuple(sorted({*ranks_of(entry), rank})) for rank in ranks}
        for some in sorted(sets - {ranks_of(entry)}):
            ranks_after = (*layout.rank_of[:stage], some if len(some) > 1 else some[0], *layout.rank_of[stage + 1 :])
            used = {rank for after in ranks_after for rank in ranks_of(after)}
            if len(used) == len(ranks) and len(some) <= (1 if alone else runs):
                yield StageLayout(layout.stage_of, ranks_after)


def _moves(work: BlockGraph, layout: StageLayout, recipe: Recipe | None) -> Iterator[tuple[StageLayout, Recipe | None]]:
    """Layouts a move away: with a cut moved, the heaviest segments' cuts first; with a stage on another rank, if its
    rank keeps another stage; with two stages exchanged. The recipe is None after a stage has moved: cuts then stay."""
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
    # A rank must keep a stage, so only stages of ranks with several stages may move; any two may be exchanged.
    exchanges: list[dict[int, int | tuple[int, ...]]] = [
        {stage: rank} for stage in stages if rank_of.count(rank_of[stage]) > 1 for rank in range(ranks)
    ]
    exchanges += [{a: rank_of[b], b: rank_of[a]} for a, b in itertools.combinations(stages, 2)]
    origin = layout.origin if "moved" in layout.origin else f"{layout.origin}, stages moved to other ranks"
    for exchange in exchanges:
        exchanged = tuple(exchange.get(stage, rank) for stage, rank in enumerate(rank_of))
        if exchanged != layout.rank_of:
            yield StageLayout(layout.stage_of, exchanged, origin), None
