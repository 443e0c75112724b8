"""Balance: ``balance`` chooses the stages of a program and their ranks, or only the ranks of given stages.

A graph of thousands of nodes is first coarsened to hundreds of pieces, cut where the fewest bytes cross. Pieces that
are whole modules make cuts fall between modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, pairwise, takewhile
from operator import attrgetter
from typing import Any, TypeVar

import torch
from tabulate import tabulate

from fxpipe.batch.batch import joined_description
from fxpipe.batch.description import Description, example_of
from fxpipe.batch.pattern import Pattern
from fxpipe.distributed.grid import BATCH
from fxpipe.distributed.topology import Topology
from fxpipe.errors import DoesNotFit, PartitionError, RunError, ScheduleError, printable
from fxpipe.graph.cuts import Cuts
from fxpipe.graph.program import Program, called_in, named
from fxpipe.graph.ranks import Placement, rank_count, ranks_of
from fxpipe.graph.stage_work import in_ms
from fxpipe.hardware import Hardware
from fxpipe.no_gc import paused
from fxpipe.options import AUTO, Options, Recompute
from fxpipe.passes.partition import components
from fxpipe.passes.union import Union
from fxpipe.progress import log, progress
from fxpipe.schedules import Family, ScheduleName, placement_for, with_costs
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.zero_bubble import NotFolded
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.stage_work import stage_work_of
from fxpipe.search.block_graph import BlockGraph, work_of_program, work_of_stages
from fxpipe.search.memory import Account
from fxpipe.search.moves import (
    GAIN,
    RUNNERS_UP,
    SearchResult,
    connected,
    layout_of,
    placed_at,
    recipes,
    search,
)
from fxpipe.search.node_costs import CostUnknown, Group, NodeCosts, costs_from_shapes
from fxpipe.search.segments import Line, depth_first, entries, segments_of
from fxpipe.search.simulated_layouts import Judge, LayoutOutcome, Rerun, Staged, StageLayout
from fxpipe.trace.checks.sizes import bytes_of_inputs

Result = TypeVar("Result")
Layered = Callable[[], Program]

FINER = 0.4
"""The fraction of the usual effort for cuts inside of modules, if cuts between modules were found."""
BETWEEN = ", cut between modules"
REMEMBERED = 3
"""The number of costs of programs that are remembered: a step's, and those with two kinds of recomputation."""


@dataclass(frozen=True)
class Balanced:
    """A program with stages, their ranks, and the simulated outcome; ``str()`` compares the choice with runners-up."""

    program: Program
    placement: Placement
    outcome: LayoutOutcome
    others: tuple[LayoutOutcome, ...]
    """The best layouts of other origins, the best first."""
    what: str
    """The source of the costs, and the bytes of a parameter, in words."""
    blocks: tuple[tuple[str, ...], ...]
    """The nodes of each block of the layouts."""

    @staticmethod
    def from_search(program: Program, result: SearchResult, work: BlockGraph) -> Balanced:
        costs = work.costs
        best, what = result.best, f"{costs.source}; {costs.account}"
        if BETWEEN in best.layout.origin and any(other.seconds < best.seconds for other in result.others):
            what += f"\ncuts inside of modules are taken where they gain more than {GAIN:.0%}"
        notes = "\n".join(filter(None, [what, costs.guesses]))
        return Balanced(
            program, best.layout.rank_of, best, result.others, notes, tuple(block.nodes for block in work.blocks)
        )

    def __str__(self) -> str:
        rows = [
            (
                f"runner-up {number}" if number else "chosen",
                outcome.layout.origin,
                outcome.layout.stages,
                f"{in_ms(outcome.makespan)} ms"
                + f" + {in_ms(outcome.seconds - outcome.makespan)} of sums" * (outcome.seconds > outcome.makespan),
                f"{outcome.bubble:.1%}",
                f"{outcome.most_bytes / 2**20:,.1f}",
                self._stages(outcome),
            )
            for number, outcome in enumerate([self.outcome, *self.others[:RUNNERS_UP]])
        ]
        headers = ["", "how", "stages", "planned", "bubble", "peak of a rank, MiB", "stages of each rank"]
        grid = tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", "left", *["right"] * 4, "left"))
        return printable(f"{grid}\n{self.what}")

    def _stages(self, outcome: LayoutOutcome) -> str:
        """A line for each rank or set of ranks: the outermost modules that a single stage runs, or parts of modules;
        and the F and B of its stages."""
        layout, work = outcome.layout, stage_work_of(outcome.schedule, outcome.costs)
        assert work is not None  # costs by shapes are in seconds
        stage_of = {name: stage for names, stage in zip(self.blocks, layout.stage_of, strict=True) for name in names}
        paths = {node.name: called_in(node) for node in self.program.nodes if node.name in stage_of}
        users: dict[str, set[int]] = {}
        for name, modules in paths.items():
            for path in modules:
                users.setdefault(path, set()).add(stage_of[name])
        pieces: dict[tuple[tuple[int, ...], str], None] = {}
        for name, modules in paths.items():
            part = f"a part of {modules[-1]}" if modules else ""
            whole = next((path for path in modules if len(users[path]) == 1), part)
            pieces[ranks_of(layout.rank_of[stage_of[name]]), whole] = None
        # Of adjacent modules with one parent, only the first and the last are named.
        named: dict[tuple[int, ...], list[str]] = {}
        for (ranks, _), run in groupby(pieces, key=lambda piece: (piece[0], piece[1].rpartition(".")[0])):
            names = [whole for _, whole in run if whole]
            some = [f"{names[0]} to {names[-1].rpartition('.')[2]}"] if len(names) > 1 else names
            named.setdefault(ranks, []).extend(some)
        lines = []
        for ranks, names in sorted(named.items()):
            few = names if len(names) <= 4 else [*names[:2], f"{len(names) - 3} more", names[-1]]
            mine = [stage for stage, entry in enumerate(layout.rank_of) if ranks_of(entry) == ranks]
            share = sum(work.shares[stage] for stage in mine)
            times = [" + ".join(in_ms(kind[stage]) for stage in mine) for kind in (work.forward, work.backward)]
            part = f", {share:.0%} of {'their' if len(ranks) > 1 else 'its'} work" * (share < 0.995)
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            lines.append(f"{who}: {', '.join(few) or 'no submodule'}; F {times[0]}, B {times[1]} ms{part}")
        return "\n".join([*lines, *work.idle])


@paused()
def balance(
    program: Program,
    ranks: int,
    microbatches: int,
    costs: NodeCosts,
    schedule: ScheduleName | Family = "1f1b",
    memory: float | None = None,
    recompute: Recompute = False,
    several: bool = False,
    recut: bool = False,
    placement: Placement | None = None,
    work: BlockGraph | None = None,
) -> Balanced:
    """The program with stages and their ranks, chosen for the least simulated makespan.

    ``program``: after ``passes.before_balance()``: ``balance`` cuts it; or after ``partition``: its stages stay, but
    with ``recut`` only those that gather. ``memory``: the most bytes of a rank. ``recompute``: as in ``compile``; with
    "auto", or names of stages that do not exist yet, all stages recompute if no layout fits without. ``several``:
    whether a stage may be on all ranks. ``placement``: the ranks of the program's stages, for which nothing is
    searched. ``work``: the program's blocks, if they are known. PartitionError if there are fewer pieces or stages than
    ranks, or if no layout fits the memory.
    """
    is_cut = bool(program.stage_of) and not recut
    if work is None:
        work = work_of_stages(program, costs) if is_cut else work_of_program(program, costs)
    if len(work) < ranks:
        has = "the model has {} stages" if is_cut else "the program has {} pieces that a cut may separate"
        raise PartitionError(f"{ranks} pipe ranks, but {has.format(len(work))}; use fewer ranks")
    family, result, refused = with_costs(schedule), None, None
    if isinstance(recompute, tuple):  # the program has checkpointed the layers already
        recompute = tuple(name for name in recompute if not named(name, program.layers))
    for piece_of, how in [(tuple(range(len(work))), "")] if is_cut else _pieces(program, work, ranks):
        merged = work.merged(piece_of)
        again = Rerun.from_option(recompute, program.stage_names if is_cut else [""] * len(merged))
        try:
            effort = FINER if result is not None else 1.0
            limits = microbatches, family, memory, again
            if placement is not None:
                choice = placed_at(merged, placement, *limits)
            else:
                choice = search(merged, ranks, *limits, several, effort)
        except (PartitionError, ScheduleError) as error:
            refused = error
            continue
        # Coarser cuts are searched first; a finer cut replaces the result if it gains enough.
        result = choice.of_blocks(piece_of, how).unless(result, GAIN)
    if is_cut and isinstance(refused, NotFolded):
        raise refused.named(program.stage_names) from None
    if result is None:
        raise refused or AssertionError
    if not is_cut:
        stage_of = result.best.layout.stage_of
        stages = {name: stage_of[number] for number, block in enumerate(work.blocks) for name in block.nodes}
        program = program.replace(stage_of=stages, gathered={})
    return Balanced.from_search(program, result, work)


def least_seconds(
    program: Program, work: BlockGraph, ranks: int, microbatches: int, schedule: ScheduleName | Family
) -> float:
    """A lower bound of the makespan over the layouts with which a search begins, without a table; infinity if the
    program has fewer pieces than ranks. Arguments as in ``balance``."""
    pieces, _ = next(_pieces(program, work, ranks))
    merged = work.merged(pieces)
    judge = Judge(merged, with_costs(schedule), microbatches, None)
    layouts = {layout_of(merged, recipe) for recipe in recipes(merged, ranks, microbatches, None)}
    return min(map(judge.lower_bound, layouts), default=math.inf)


def _pieces(program: Program, fine: BlockGraph, ranks: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yields block → piece and its description in words: first pieces of whole modules that take at most a rank's share
    of the seconds, then pieces of operators. Cuts separate pieces."""
    modules = whole_modules(program, fine, fine.seconds() / ranks)
    again = coarsened(fine.merged(modules), ranks)
    pieces = tuple(again[module] for module in modules)
    if ranks <= len(set(pieces)) < len(fine):
        yield pieces, BETWEEN
    yield coarsened(fine, ranks), ""


def whole_modules(program: Program, work: BlockGraph, most: float) -> tuple[int, ...]:
    """Block → piece; pieces are acyclic and connected.

    A piece is a call of the outermost module that takes at most ``most`` seconds. Blocks that are only in larger
    modules stay single, and so do blocks whose piece would be in a cycle, as when a module is called twice with other
    modules between the calls.
    """
    paths = {node.name: called_in(node) for node in program.nodes}
    inside = [_common([paths[name] for name in block.nodes]) for block in work.blocks]
    seconds: dict[str, float] = {}
    for block, modules in zip(work.blocks, inside, strict=True):
        for path in modules:
            seconds[path] = seconds.get(path, 0.0) + block.seconds
    # The outermost module of at most ``most`` seconds; a block without such a module stays single.
    kinds: list[Hashable] = [
        next((path for path in modules if seconds[path] <= most), number) for number, modules in enumerate(inside)
    ]
    # A module that is called twice, with other modules between, would wait for itself. The blocks of such a cycle of
    # pieces become single blocks again, until no cycle is left.
    while True:
        pieces = _numbered(connected(work, kinds))
        waiting = {piece for some in components(work.after(pieces)) if len(some) > 1 for piece in some}
        if not waiting:
            return pieces
        kinds = [block if piece in waiting else kinds[block] for block, piece in enumerate(pieces)]


def _numbered(parts: Union[int]) -> tuple[int, ...]:
    """Block → the number of its part; parts are numbered in the order of their first blocks."""
    piece_of = {block: number for number, blocks in enumerate(parts.groups()) for block in blocks}
    return tuple(piece_of[block] for block in range(len(piece_of)))


def _common(stacks: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The modules in which all nodes of a block are called, outermost first."""
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*stacks, strict=False))
    return tuple(level[0] for level in levels)


GRAINS = 256
"""The least number of pieces after coarsening; a graph with fewer blocks is not coarsened."""
GRAINS_A_RANK = 24


def coarsened(work: BlockGraph, ranks: int) -> tuple[int, ...]:
    """Block → piece; pieces are acyclic and connected.

    A linear order of the blocks is divided into many intervals of equal time. Each interval has a cut where the fewest
    bytes cross. More cuts separate blocks that depend on different sources of the graph, as towers and encoders do.
    """
    grains = max(GRAINS, GRAINS_A_RANK * ranks)
    if len(work) <= grains:
        return tuple(range(len(work)))
    line, reached = Line(work, depth_first(work)), entries(work)
    # A cut that moves inside an interval changes the balance by at most the interval, so the position with the smallest
    # messages is as good as any other.
    cheapest: dict[int, int] = {}  # interval → the position that the fewest bytes cross
    borders = []
    for position, (before, behind) in enumerate(pairwise(line.order), start=1):
        grain = int(line.time[position] / (line.time[-1] or 1.0) * grains)
        if line.crossing[position] < line.crossing[cheapest.setdefault(grain, position)]:
            cheapest[grain] = position
        # An encoder must not share a piece with text blocks: only a separate piece can be on other ranks.
        if reached[before] != reached[behind]:
            borders.append(position)
    ends = sorted({*cheapest.values(), *borders, len(work)})
    segment_of = segments_of(line.order, ends)
    return _numbered(connected(work, [segment_of[block] for block in range(len(work))]))


@dataclass
class Balancing:
    """Costs programs, and cuts and places them, by the options of one ``compile``."""

    options: Options
    topology: Topology
    device: torch.device
    finds_cuts: bool = False
    """Whether a search cuts and places the stages; otherwise the user's marks cut them."""
    found: Cuts | None = None
    """The result of an earlier search, which is given in place of a search."""
    costed: dict[Hashable, NodeCosts] = field(default_factory=dict)
    """The latest ``REMEMBERED`` results of ``costs``, by its arguments."""
    known: dict[Hashable, Any] | None = None
    """The results that plans of the same model share, by their arguments; None: nothing is shared."""

    def once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """The result of ``make``, or the result of an earlier plan that had the same ``key``."""
        if self.known is None:
            return make()
        if key not in self.known:
            self.known[key] = make()
        shared: Result = self.known[key]
        return shared

    def finds_placement_of(self, stages: int) -> bool:
        """Whether the user left the stages' ranks open, and there is a choice of ranks or a memory limit to keep."""
        ranks = self.topology.size("pipe")
        # With recompute="auto" or offload=, the choice of tables already keeps the memory limit.
        limited = self.memory is not None and self.options.recompute != AUTO
        left = self.options.placement is None and not isinstance(self.options.schedule, Schedule)
        if self.finds_cuts:
            return left and self.found is not None
        return left and (stages > ranks > 1 or (limited and stages >= ranks))

    def placement_of(self, stages: int) -> Placement | None:
        """The ranks of the stages, if neither the user nor a search is to choose them: of cuts, or of the family."""
        ranks = self.topology.size("pipe")
        if self.found is None:
            return placement_for(self.options.schedule, stages, ranks)
        if rank_count(self.found.placement) != ranks:
            raise PartitionError(
                f"boundaries= gives cuts for {rank_count(self.found.placement)} pipe ranks, and the topology has "
                f'{ranks}; give placement=, or search again, with boundaries="auto"'
            )
        return self.found.placement

    @property
    def hardware(self) -> Hardware:
        """The hardware for which costs are computed; all links of a pipeline are as slow as the slowest link."""
        hardware = self.options.device.completed
        if self.topology.size("pipe") == 1:
            return hardware
        return replace(hardware, link=hardware.wire(self.topology.crosses_nodes("pipe")))

    @property
    def memory(self) -> float | None:
        """The bytes within which a search keeps each rank. None where offload decides what is on the device."""
        return None if self.options.offload else self.options.device.memory

    @property
    def compute(self) -> torch.dtype | None:
        """The type of floating-point parameters and inputs in stages, if ``precision`` changes it."""
        return None if self.options.precision is None else self.options.precision.compute

    def placed(
        self, program: Program, pattern: Pattern, shape: Description, layered: Layered | None = None
    ) -> Balanced | None:
        """The best placement found; None if the stages' costs are not known, and placement goes by parameters.
        ``layered``: as in ``searched``."""
        try:
            return self.searched(program, pattern, shape, layered)
        except CostUnknown as error:
            if self.options.device.memory is not None:
                raise
            if self.placement_of(len(program.stage_names)) is None:
                log(f"stages are placed by the number of their parameters: {error}")
            return None

    def stage_work(
        self, program: Program, pattern: Pattern, placement: Placement, layered: Program | None = None
    ) -> Staged | None:
        """The stages' work derived from the shapes of a pattern; None if shapes or costs are not known. ``layered``:
        the same program with checkpointed layers."""
        shape = pattern.shape
        if shape is None:
            return None

        def staged(program: Program, keep: bool = False, *others: Callable[[], Costs]) -> Staged:
            work = work_of_stages(program, self.costs(program, pattern, shape, keep))
            layout = StageLayout(tuple(range(len(work))), placement)
            return Staged(work, layout, pattern.microbatches, None, *others)

        run_by_layers = program if layered is None else layered
        others = cache(lambda: staged(program, True).costs), cache(lambda: staged(run_by_layers).costs)
        try:
            with progress("costing the stages"):
                return staged(program, False, *others)
        except CostUnknown as error:
            log(f"what the stages take is not known: {error}")
            return None

    def costs(self, program: Program, pattern: Pattern, shape: Description, keeping: bool = False) -> NodeCosts:
        """The costs of a program's nodes. ``keeping``: whether the model's own checkpoints
        keep their activations, as they do in an action R. A search, tables and a preview need the same costs."""
        key = (program.graph, pattern.ambient.autocast, shape, keeping, pattern.shapes, tuple(program.gathered))
        if key not in self.costed:
            account = Account.from_options(self.options, self.topology)
            batch = bytes_of_inputs(pattern.shapes, self.options.precision)

            def counted() -> NodeCosts:
                return costs_from_shapes(
                    program,
                    example_of(shape),
                    self.device,
                    pattern.ambient.autocast,
                    self.hardware,
                    self.compute,
                    account,
                    batch,
                    # no halves if backwards run as a whole, or if a compiler cuts them
                    halves=self.options.stage_compiler is None and self.options.parallelize is None,
                    groups=self._groups(program, pattern.microbatches, shape),
                    keeps=keeping,
                )

            node_costs = self.once(self._key(program, pattern, shape, keeping), counted)
            node_costs = node_costs.on(self.hardware, account, batch)
            self.costed[key] = replace(node_costs, source=f"costs by shapes on {self.options.device.source}")
            for old in [*self.costed][:-REMEMBERED]:
                del self.costed[old]
        return self.costed[key]

    def _key(self, program: Program, pattern: Pattern, shape: Description, keeping: bool) -> Hashable:
        """What the seconds and saved bytes of nodes depend on: groups of micro-batches on the batch and on replicas,
        too."""
        groups = (pattern.microbatches, self.topology.size(BATCH)) if program.gathered else ()
        return "costs", program.graph, pattern.ambient.autocast, shape, keeping, tuple(program.gathered), groups

    def blocks(self, program: Program, pattern: Pattern, shape: Description) -> BlockGraph:
        """The finest block graph of a program, at the costs of a pattern."""
        costs = self.costs(program, pattern, shape)
        key = "blocks", self._key(program, pattern, shape, False)
        return replace(self.once(key, lambda: work_of_program(program, costs)), costs=costs)

    def _groups(self, program: Program, microbatches: int, shape: Description) -> dict[int, Group]:
        """Gathered stage → the group of micro-batches for which it runs once, of this batch or of all replicas."""
        groups = {}
        for stage, gathered in program.gathered.items():
            replicas = self.topology.size(BATCH) if "global" in gathered.modes else 1
            size = gathered.group or microbatches
            times = size * replicas
            groups[stage] = Group(size, times, example_of(joined_description([shape] * times, self.options.batch_dim)))
        return groups

    def searched(
        self, program: Program, pattern: Pattern, shape: Description | None, layered: Layered | None = None
    ) -> Balanced:
        """Searches for the best stages and their ranks, logs them, and returns the program with them. ``layered``: the
        same program with checkpointed layers, which is searched if nothing fits the memory without."""
        if shape is None:
            raise RunError(
                'boundaries="auto" needs the shapes of a batch: pass example_args= or example_kwargs=, one batch as it '
                "will be passed in calls"
            )
        assert not isinstance(self.options.schedule, Schedule)  # a table has its own placement
        with progress("balancing the stages"):
            costs = self.costs(program, pattern, shape)
            ranks, schedule = (self.topology.size("pipe"), pattern.microbatches), self.options.schedule
            placement = self.placement_of(len(program.stage_names)) if program.stage_names else None
            recut = self.finds_cuts and self.found is None
            again, ranks_of_stages = self.options.recompute, None if recut else placement
            # Offload decides later how much of the activations is on the device.
            within = self.memory is not None
            limit = (self.options.device.memory, costs.account) if within else None

            def best(program: Program, memory: float | None) -> Balanced:
                work = None if program.stage_of and not recut else self.blocks(program, pattern, shape)
                costs = self.costs(program, pattern, shape)
                most = memory if within else None
                return balance(program, *ranks, costs, schedule, most, again, True, recut, ranks_of_stages, work)

            def fitting(memory: float | None) -> Balanced:
                try:
                    return best(program, memory)
                except DoesNotFit as error:
                    if layered is None:
                        raise
                    try:
                        return best(layered(), memory)
                    except DoesNotFit as other:
                        raise min(error, other, key=attrgetter("least_bytes")) from None

            counted = self._key(program, pattern, shape, False)
            key = counted, *ranks, schedule, limit, again, recut, ranks_of_stages, layered is None
            balanced = self.once(key, lambda: self.options.within_memory(fitting))
        if balanced.others and self.known is None:
            log(str(balanced))
        return balanced
