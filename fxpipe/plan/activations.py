"""Activations: decides for each stage whether its activations stay until the backward, are made again, all at once or
layer by layer, or wait on the host.

Takes the options ``recompute`` and ``offload``, a function that makes a family's table for a choice, and the stages'
costs. Gives a ``Choice``. Without "auto" the options name the stages. With "auto" a search marks stages one by one, by
simulated time, until every rank fits the memory:

1. Of the stages on ranks above the limit, the mark is set with which the table fits in the least time; if none fits,
   the mark that removes most excess bytes per second.
2. Marks that later marks made needless are removed, or replaced by a faster mark.

A search that takes one mark after another may do worse with more kinds of marks. So a search runs for each kind alone,
and one for recomputation and offload together if both are "auto". The shortest table is kept, and step 2 is repeated
with all kinds.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter, itemgetter
from typing import NamedTuple

from fxpipe.errors import DoesNotFit, PartitionError, ScheduleError, nearest
from fxpipe.graph.program import LAYERS, named
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.options import AUTO, IN_BOTH, Options
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.offload import least_rooms
from fxpipe.schedules.schedule import Schedule
from fxpipe.search.simulated_layouts import Staged


class Kept(enum.Enum):
    """How a stage's activations of a micro-batch reach its backward."""

    KEEP = "kept"
    AGAIN = "recomputed"
    BY_LAYERS = "recomputed by layers"
    HOST = "offloaded"

    __hash__ = object.__hash__


KEEP, AGAIN, BY_LAYERS, HOST = Kept
Choice = tuple[Kept, ...]
"""A ``Kept`` for each stage."""
Make = Callable[[Choice, "Sequence[float] | None"], Schedule]
"""(choice, the bytes of activations that each rank may hold) → table. None: as few bytes as possible."""


def marked(choice: Choice, kind: Kept) -> tuple[bool, ...]:
    """Returns, per stage, whether it has this mark."""
    return tuple(each is kind for each in choice)


def marks_of(graph: StageGraph) -> dict[str, Kept]:
    """Returns the mark of each stage of a plan, by the stages' names."""
    marks = dict.fromkeys(graph.names, KEEP)
    for kind, names in (HOST, graph.offloaded), (AGAIN, graph.recomputed), (BY_LAYERS, graph.by_layers):
        marks |= dict.fromkeys(names, kind)
    return marks


def checkpointed(graph: StageGraph, choice: Choice) -> StageGraph:
    """Returns the graph whose stages run their code with checkpointed layers where the choice says so."""
    stages, layers = list(graph), dict(graph.layers)
    chosen = [stage for stage in graph if choice[stage.index] is BY_LAYERS]
    for stage in chosen:
        if (code := stage.by_layers) is not None:  # a micro-batch may lack what the stage computes
            stages[stage.index] = replace(stage, module=code.module, function=code.module)
            layers |= dict.fromkeys(code.layers, "")
    return replace(graph, stages=tuple(stages), layers=layers, by_layers=frozenset(stage.name for stage in chosen))


def named_choice(options: Options, graph: StageGraph, gains: Callable[[], Sequence[bool]]) -> Choice:
    """The choice of options without "auto". ``gains``: finds the stages in which recomputation saves memory.

    Raises:
        PartitionError: an option names a stage that does not exist.
    """
    again, host = _both_named(options, graph)
    if options.recompute is True:
        again = frozenset(graph.names[stage] for stage, gained in enumerate(gains()) if gained) - host
    marks = dict.fromkeys(host, HOST) | dict.fromkeys(again, AGAIN)
    return tuple(marks.get(stage.name, KEEP) if stage.has_backward else KEEP for stage in graph)


def searched_choice(options: Options, graph: StageGraph, make: Make, work: Staged, memory: float) -> Choice:
    """The fastest choice that fits ``memory`` bytes on each rank, which was found.

    Raises:
        DoesNotFit: no choice fits.
        PartitionError: an option names a stage that does not exist.
    """
    again, host = _both_named(options, graph)
    is_auto = options.recompute == AUTO
    layers = frozenset(stage.name for stage in graph if stage.by_layers is not None)
    kinds = {AGAIN: again, BY_LAYERS: layers, HOST: host} if is_auto else {HOST: host}
    wanted = {kind: names for kind, names in kinds.items() if names}
    searches = [{kind: names} for kind, names in wanted.items()]
    if wanted.keys() >= {AGAIN, HOST}:
        searches.append({AGAIN: again, HOST: host})
    search = _Search(graph, make, work, memory, () if is_auto else again, [kind.value for kind in wanted])
    found, refused = list[Choice](), list[DoesNotFit]()
    for some in searches:
        try:
            found.append(search.run(some))
        except DoesNotFit as error:
            refused.append(error)
    if not found and BY_LAYERS in wanted:
        smallest = search.smallest(wanted)
        found += [smallest] * (search.figures(smallest).over == 0)
    if not found:
        raise min(refused, key=attrgetter("least_bytes"))
    best = min(found, key=lambda choice: search.figures(choice).seconds)
    return search.refined(best, wanted) if BY_LAYERS in wanted else best


def rooms_of(choice: Choice, make: Make, work: Staged, memory: float) -> Sequence[float] | None:
    """The bytes of activations that each rank may hold of ``memory``; None if no stage is offloaded.

    A rank that cannot fit, whatever leaves, gets the least room that it needs.
    """
    if HOST not in choice:
        return None
    plain = make(tuple(KEEP if each is HOST else each for each in choice), None)
    hosts = {stage for stage, each in enumerate(choice) if each is HOST}
    least = least_rooms(plain, costs_at(work, choice), hosts)
    return [max(memory - size, room) for size, room in zip(work.static_bytes, least, strict=True)]


def costs_at(work: Staged, choice: Choice) -> Costs:
    """The stages' costs under a choice."""
    return work.costs_with(marked(choice, AGAIN), marked(choice, BY_LAYERS))


def _both_named(options: Options, graph: StageGraph) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the stages that ``recompute`` and ``offload`` mark, or, with "auto", may mark."""
    again, host = (named_stages(options, option, graph) for option in ("recompute", "offload"))
    if isinstance(options.recompute, tuple) and isinstance(options.offload, tuple) and again & host:
        raise PartitionError(IN_BOTH.format(min(again & host)))
    return again, host


def named_stages(options: Options, option: str, graph: StageGraph) -> frozenset[str]:
    """The names of the stages that an option marks, or, with "auto", may mark.

    PartitionError for a name that is neither of a stage nor, in ``recompute``, of a layer.
    """
    wanted = getattr(options, option)
    if wanted == LAYERS and not graph.layers:
        raise PartitionError(
            'recompute="layers" finds no layers: forward calls no two entries of one class in a list; name '
            'submodules, recompute=["encoder.*"], or write recompute=True for whole stages'
        )
    if isinstance(wanted, bool | str):
        return frozenset(graph.names) if wanted and wanted != LAYERS else frozenset()
    found = set[str]()
    for pattern in wanted:
        names = named(pattern, graph.names)
        if not names and option == "recompute" and named(pattern, graph.layers):
            continue  # the capture has checkpointed these layers
        if not names:
            layers = [path for path, _ in graph.module.named_modules() if path] if option == "recompute" else []
            raise PartitionError(
                f"{option} names stage {pattern!r}, which does not exist{nearest(pattern, [*graph.names, *layers])}"
            )
        found.update(names)
    return frozenset(found)


class _Figures(NamedTuple):
    """``over``: the sum of all ranks' bytes above the memory."""

    seconds: float
    peaks: tuple[float, ...]
    over: float


class _Search:
    """The search for a choice. ``again``: the stages that are recomputed whatever the search finds. ``ways``: words for
    the marks that it may set."""

    def __init__(
        self,
        graph: StageGraph,
        make: Make,
        work: Staged,
        memory: float,
        again: Collection[str],
        ways: Sequence[str],
    ) -> None:
        self._ways = " or ".join(ways)
        self._graph, self._make, self._work, self._memory = graph, cache(make), work, memory
        self._first: Choice = tuple(AGAIN if s.has_backward and s.name in again else KEEP for s in graph)
        self.figures = cache(self._figures)

    def _figures(self, choice: Choice) -> _Figures:
        rooms = rooms_of(choice, self._make, self._work, self._memory)
        as_planned = tuple(KEEP if each is BY_LAYERS else each for each in choice)  # layers need no cells
        table = self._make(as_planned, None if rooms is None else tuple(rooms))
        plan = table.planned(costs_at(self._work, choice))
        peaks = self._work.peaks(plan.schedule, plan.costs)
        return _Figures(plan.makespan, peaks, sum(max(peak - self._memory, 0.0) for peak in peaks))

    def run(self, kinds: Mapping[Kept, Collection[str]]) -> Choice:
        """Searches with these kinds of marks, each for the stages of these names.

        A greedy choice: it need not be the optimum. For s stages and k kinds it simulates about k s²/2 choices at most,
        and one where each rank above the limit has one stage and there is one kind.
        """
        choice, forced = self._first, set[int]()
        # 1. Mark stages on ranks above the limit until all ranks fit.
        while self.figures(choice).over:
            before = self.figures(choice)
            if only := self._only(choice, before.peaks, kinds):
                forced |= {stage for stage, _ in only}
                for stage, kind in only:
                    choice = _with(choice, stage, kind)
                continue
            ranked: list[tuple[tuple[bool, float, float], Choice]] = []
            for stage, kind in itertools.product(self._full(choice, before.peaks), kinds):
                if self._graph.names[stage] not in kinds[kind]:
                    continue
                after = self.figures(tried := _with(choice, stage, kind))
                if after.over < before.over:
                    longer = max(after.seconds - before.seconds, 0.0)
                    cost = longer / (before.over - after.over) if after.over else after.seconds
                    ranked.append(((after.over > 0, cost, after.over), tried))
            if not ranked:
                raise self._does_not_fit(before.peaks)
            _, choice = min(ranked, key=itemgetter(0))
        return self.refined(choice, kinds, forced)

    def refined(
        self, choice: Choice, kinds: Mapping[Kept, Collection[str]], forced: Collection[int] = frozenset()
    ) -> Choice:
        """Step 2: a later mark may have made an earlier mark needless, or another mark faster. ``forced``: the stages
        whose marks stay."""
        marked = [stage for stage, kind in enumerate(choice) if kind is not self._first[stage]]
        for stage in (stage for stage in reversed(marked) if stage not in forced):
            if not self.figures(tried := _with(choice, stage, KEEP)).over:
                choice = tried
                continue
            for kind in [kind for kind, names in kinds.items() if self._graph.names[stage] in names]:
                after = self.figures(tried := _with(choice, stage, kind))
                if not after.over and after.seconds < self.figures(choice).seconds * (1 - 1e-9):
                    choice = tried
        return choice

    def smallest(self, kinds: Mapping[Kept, Collection[str]]) -> Choice:
        """For each stage the kind with which its fullest rank takes the fewest bytes if all stages have this kind."""
        every = [
            tuple(
                kind if stage.has_backward and stage.name in names and mark is KEEP else mark
                for stage, mark in zip(self._graph, self._first, strict=True)
            )
            for kind, names in kinds.items()
        ]
        peaks = [self.figures(choice).peaks for choice in every]

        def fullest(stage: int, of: int) -> float:
            return max(peaks[of][rank] for rank in self._graph.ranks(stage))

        return tuple(
            every[min(range(len(every)), key=partial(fullest, stage))][stage] for stage in range(len(self._first))
        )

    def _full(self, choice: Choice, peaks: Sequence[float]) -> list[int]:
        """The stages without a mark on ranks above the limit: others cost time, and their ranks lack no bytes."""
        return [
            stage.index
            for stage in self._graph
            if stage.has_backward
            and choice[stage.index] is KEEP
            and max(peaks[rank] for rank in self._graph.ranks(stage.index)) > self._memory
        ]

    def _only(
        self, choice: Choice, peaks: Sequence[float], kinds: Mapping[Kept, Collection[str]]
    ) -> list[tuple[int, Kept]]:
        """The marks without a choice: of ranks above the limit that can set one mark only."""
        marks: dict[int, list[tuple[int, Kept]]] = {}
        for stage, (kind, names) in itertools.product(self._full(choice, peaks), kinds.items()):
            if self._graph.names[stage] in names:
                for rank in self._graph.ranks(stage):
                    marks.setdefault(rank, []).append((stage, kind))
        return [some[0] for rank, some in marks.items() if len(some) == 1 and peaks[rank] > self._memory]

    def _does_not_fit(self, peaks: Sequence[float]) -> DoesNotFit:
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        return DoesNotFit(
            f"rank {rank} takes {peaks[rank]:,.0f} bytes even where all its stages that this helps are "
            f"{self._ways}, and the memory of hardware= is {self._memory:,.0f} bytes; "
            "use more pipe ranks, smaller micro-batches, or a schedule that holds fewer of them",
            peaks[rank],
        )


def _with(choice: Choice, stage: int, kind: Kept) -> Choice:
    """The choice with one stage's mark changed."""
    return (*choice[:stage], kind, *choice[stage + 1 :])


def no_costs(option: str) -> ScheduleError:
    """The error of an option that needs the stages' costs, where these are not known."""
    return ScheduleError(
        f"{option} needs the stages' costs: pass example_args= or example_kwargs=, one batch as it will be passed in "
        f"calls; for stages of your own, name them: {option.partition('=')[0]}=[...]"
    )
