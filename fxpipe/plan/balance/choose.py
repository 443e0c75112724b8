"""Balance: ``balance`` chooses the stages of a program and their ranks, ``place_stages`` the ranks of given stages.

A graph of thousands of nodes is first made one of hundreds of pieces, where the fewest bytes cross; pieces that are
whole modules put cuts at borders of modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tabulate import tabulate

from fxpipe.errors import PartitionError, ScheduleError
from fxpipe.graph.program import Program, called_in
from fxpipe.graph.ranks import Placement
from fxpipe.options import Recompute
from fxpipe.passes.partition import components
from fxpipe.plan.balance.block_graph import BlockGraph, work_of_program, work_of_stages
from fxpipe.plan.balance.candidates import connected
from fxpipe.plan.balance.node_costs import NodeCosts
from fxpipe.plan.balance.orders import entries, topological
from fxpipe.plan.balance.search import GAIN, Found, search
from fxpipe.plan.balance.segments import Line, segments_of
from fxpipe.plan.balance.simulated_layouts import LayoutOutcome, Rerun, StageLayout
from fxpipe.schedules import Family, ScheduleName, with_costs
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.no_gc import paused

BETWEEN = ", between modules"


@dataclass(frozen=True)
class Balanced:
    """A program with stages, their ranks, and what that comes to; ``str()`` is the choice beside its runners-up."""

    program: Program
    placement: Placement
    """The rank of each stage."""
    outcome: LayoutOutcome
    others: tuple[LayoutOutcome, ...]
    """The best layouts that were found in other ways, the best first."""
    what: str
    """What the costs are from, and what a parameter is reckoned at, in words."""

    @property
    def makespan(self) -> float:
        """Seconds of a step, the sums of tied gradients included."""
        return self.outcome.seconds

    @property
    def costs(self) -> Costs:
        """What the stages take."""
        return self.outcome.costs

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank: parameters, gradients, optimizer state, and activations at their most."""
        return self.outcome.peak_bytes

    def __str__(self) -> str:
        shown = [self.outcome, *self.others[:3]]
        rows = [
            (
                "chosen" if place == 0 else f"runner-up {place}",
                outcome.layout.origin,
                outcome.layout.stages,
                f"{outcome.seconds * 1e3:.3f}",
                f"{outcome.bubble:.1%}",
                f"{outcome.most_bytes / 2**20:,.1f}",
            )
            for place, outcome in enumerate(shown)
        ]
        headers = ["", "cut", "stages", "makespan, ms", "bubble", "peak of a rank, MiB"]
        grid = tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", "left", *["right"] * 4))
        return f"{grid}\n{self.what}"


@paused()
def balance(
    program: Program,
    ranks: int,
    microbatches: int,
    costs: NodeCosts,
    schedule: ScheduleName | Family = "1f1b",
    memory_per_rank: float | None = None,
    recompute: Recompute = False,
    several: bool = False,
) -> Balanced:
    """The program cut into stages for so many ranks, and placed, for the least makespan by simulation.

    ``program``: without boundaries, after ``passes.before_balance()``. ``memory_per_rank``: bytes. ``recompute``: as
    ``compile`` has it; "auto", or names, which stages have none yet: all are, if nothing fits without. ``several``:
    a stage may be on all ranks. PartitionError where the program has fewer pieces than there are ranks, or none of the
    layouts fits the memory.
    """
    fine = work_of_program(program, costs)
    if len(fine) < ranks:
        raise PartitionError(
            f"{ranks} pipe ranks, but the program has {len(fine)} pieces that a cut may separate; use fewer ranks"
        )
    family, found, refused = with_costs(schedule), None, None
    for piece_of, how in _pieces(program, fine, ranks):
        work = fine.merged(piece_of)
        again = Rerun.of(recompute, [""] * len(work))
        try:
            one = search(work, ranks, microbatches, family, memory_per_rank, keep=False, again=again, several=several)
        except (PartitionError, ScheduleError) as error:
            refused = error
            continue
        found = one.of_blocks(piece_of, how).unless(found, GAIN)
    if found is None:
        raise refused or AssertionError
    layout = found.best.layout
    stages = {name: layout.stage_of[number] for number, block in enumerate(fine.blocks) for name in block.nodes}
    return _balanced(program.replace(stage_of=stages), layout, found, costs)


def _pieces(program: Program, fine: BlockGraph, ranks: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """What cuts may separate, block → piece, with words for it: modules that take no more than a rank's part, then
    what they are made of."""
    modules = whole_modules(program, fine, fine.seconds / ranks)
    again = coarsened(fine.merged(modules), ranks)
    pieces = tuple(again[module] for module in modules)
    if ranks <= len(set(pieces)) < len(fine):
        yield pieces, BETWEEN
    yield coarsened(fine, ranks), ""


@paused()
def place_stages(
    program: Program,
    ranks: int,
    microbatches: int,
    costs: NodeCosts,
    schedule: ScheduleName | Family = "1f1b",
    memory_per_rank: float | None = None,
    recompute: Recompute = False,
    several: bool = False,
) -> Balanced:
    """The ranks of a program's given stages, of which there are at least as many, for the least makespan.

    ``program``: after ``partition``. ``recompute``: as ``compile`` has it; "auto": all are, if nothing fits without.
    PartitionError where there are fewer stages than ranks, or no placement fits.
    """
    work = work_of_stages(program, costs)
    if len(work) < ranks:
        raise PartitionError(f"{ranks} pipe ranks, but the model has {len(work)} stages; use fewer ranks")
    work = dataclasses.replace(work, gather={stage: one.group for stage, one in program.gathered.items()})
    again = Rerun.of(recompute, program.stage_names)
    family = with_costs(schedule)
    found = search(work, ranks, microbatches, family, memory_per_rank, keep=True, again=again, several=several)
    return _balanced(program, found.best.layout, found, costs)


def _balanced(program: Program, layout: StageLayout, found: Found, costs: NodeCosts) -> Balanced:
    what = f"costs from shapes; {costs.account}"
    if BETWEEN in layout.origin and any(other.seconds < found.best.seconds for other in found.others):
        what += f"\ncuts inside of modules are taken where they gain more than {GAIN:.0%}"
    notes = "\n".join(filter(None, [what, costs.guesses]))
    return Balanced(program, layout.rank_of, found.best, found.others, notes)


def whole_modules(program: Program, work: BlockGraph, most: float) -> tuple[int, ...]:
    """For each block the piece that it becomes a part of; pieces are acyclic, and connected.

    A piece is one call of the outermost module that takes no more than ``most`` seconds. What stands in larger ones
    alone stays unchanged, and so does what would wait for itself, such as a module that is called twice with others
    between.
    """
    paths = {node.name: called_in(node) for node in program.graph.nodes}
    inside = [_common([paths[name] for name in block.nodes]) for block in work.blocks]
    seconds: dict[str, float] = {}
    for block, modules in zip(work.blocks, inside, strict=True):
        for path in modules:
            seconds[path] = seconds.get(path, 0.0) + block.seconds
    kinds: list[Hashable] = []
    for number, modules in enumerate(inside):
        kinds.append(next((path for path in modules if seconds[path] <= most), number))
    while True:
        parts = connected(work, kinds)
        pieces = [parts.find(block) for block in range(len(work))]
        waiting = _waiting(work, pieces)
        if not waiting:
            break
        kinds = [block if piece in waiting else kinds[block] for block, piece in enumerate(pieces)]
    number_of: dict[int, int] = {}
    return tuple(number_of.setdefault(piece, len(number_of)) for piece in pieces)


def _common(stacks: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The modules that all of a block's nodes are called in, outermost first."""
    found = []
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        found.append(level[0])
    return tuple(found)


def _waiting(work: BlockGraph, pieces: Sequence[int]) -> set[int]:
    """The pieces that wait for each other."""
    after: dict[int, set[int]] = {piece: set() for piece in pieces}
    for value in work.values:
        after[pieces[value.source]] |= {pieces[target] for target in value.targets} - {pieces[value.source]}
    return {piece for component in components(after) if len(component) > 1 for piece in component}


GRAINS = 256
"""As many pieces as a work is cut into at least, where it has as many blocks."""
GRAINS_A_RANK = 24


def coarsened(work: BlockGraph, ranks: int) -> tuple[int, ...]:
    """For each block the piece that it becomes a part of; pieces are acyclic, and connected.

    The blocks stand in a line, which is cut once in each of many intervals of equal time, where the fewest bytes
    cross, and wherever blocks begin to depend on other sources of the graph, as towers and encoders do.
    """
    grains = max(GRAINS, GRAINS_A_RANK * ranks)
    if len(work) <= grains:
        return tuple(range(len(work)))
    line = Line(work, topological(work))
    ends = sorted({*_cheapest(line, grains), *_borders(line)})
    parts = connected(work, segments_of(line.order, [*ends, len(work)]))
    number: dict[int, int] = {}
    return tuple(number.setdefault(parts.find(block), len(number)) for block in range(len(work)))


def _cheapest(line: Line, grains: int) -> list[int]:
    """In each interval of equal time the position that the fewest bytes cross, the first of equal ones."""
    whole = line.time[-1] or 1.0
    best: dict[int, int] = {}
    for position in range(1, len(line.order)):
        grain = int(line.time[position] / whole * grains)
        if grain not in best or line.crossing[position] < line.crossing[best[grain]]:
            best[grain] = position
    return list(best.values())


def _borders(line: Line) -> list[int]:
    """Where a tower, an encoder or what joins them begins: they depend on different sources of the graph."""
    reached = entries(line.work)
    return [place for place, (a, b) in enumerate(pairwise(line.order), start=1) if reached[a] != reached[b]]
