"""Advice: the one change of ``placement=`` that would shorten a step most, by the search, at measured costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fxpipe.errors import printable
from fxpipe.forecast.uneven import saving_of
from fxpipe.graph.ranks import named
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.graph.stage_work import in_ms
from fxpipe.plan.placement import Place
from fxpipe.plan.plans import WORTH_IT, Plans
from fxpipe.plan.tables import choose_table
from fxpipe.schedules import with_costs
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.search.block_graph import Block, BlockGraph, BlockValue
from fxpipe.search.moves import best_change
from fxpipe.search.node_costs import NodeCost, NodeCosts, ParameterCost
from fxpipe.search.simulated_layouts import Judge, Rerun, StageLayout


@dataclass(frozen=True)
class Advice:
    """The one change of ``placement=`` that would help most; prints with the ``placement=`` to paste."""

    change: str
    """The stages that move, in words: "stage `video` on ranks 1, 3"; empty if no change saves 1 % of a step."""
    placement: Mapping[str, Place]
    """Every stage's rank, or ranks, after the change."""
    seconds: float
    """The seconds of a step now: of its table, simulated at the measured costs."""
    saved: float
    """The seconds of a step that the change saves."""
    note: str = ""
    uneven: str = field(default="", compare=False)
    """The savings by ``microbatch_cost=`` and ``in_flight=``, in words, if they save 5 % of a step or more."""

    def __str__(self) -> str:
        now = f"{in_ms(self.seconds)} ms"
        text = f"no change of one stage's ranks saves {WORTH_IT:.0%} of the {now} of a step, by measured costs"
        if self.change:
            saved = f"saves {in_ms(self.saved)} of {now} of a step, by measured costs"
            text = f"{self.change}: {saved}; {self.note}placement={dict(self.placement)}"
        return printable("\n".join(filter(None, [text, self.uneven])))

    __repr__ = __str__


def advise(plans: Plans, costs: Costs, recorded: Timeline | None = None) -> Advice:
    """The change that helps most for the first plan, at each stage's measured costs; and what the micro-batches of the
    recorded step would save."""
    graph, schedule, options = plans.first.graph, plans.first.schedule, plans.options
    family = with_costs("greedy" if isinstance(options.schedule, Schedule) else options.schedule)
    staged = None if plans.shown is None else plans.captures.stage_work(plans.shown, graph.placement)
    work = _at(costs, _bare(graph) if staged is None else staged.work, graph, schedule)
    again = Rerun(tuple(name in graph.recomputed for name in graph.names)) if graph.recomputed else None
    if options.recompute is True:  # by the placement: where it saves memory
        again = Rerun.from_option(True, graph.names)
    judge = Judge(work, family, schedule.microbatches, None if staged is None else options.device.memory, again)
    layout = StageLayout(tuple(range(len(graph))), graph.placement)
    now = judge.staged(layout)
    seconds = schedule.simulate(now.costs).makespan + now.tied_seconds
    best = best_change(judge, layout, seconds * (1 - WORTH_IT))
    if best is not None and plans.shown is not None:  # compile may make another table, or recompute other stages
        anew = replace(plans, captures=plans.captures.without_search(), by_pattern={}, marks=None)
        table = choose_table(anew, replace(graph, placement=best.layout.rank_of), plans.shown).table
        planned = table.simulate(costs).makespan
        best = replace(best, seconds=planned + judge.staged(best.layout).tied_seconds)
        best = best if best.seconds < seconds * (1 - WORTH_IT) else None
    after = graph.placement if best is None else best.layout.rank_of
    moves = zip(graph.names, after, graph.placement, strict=True)
    moved = [f"stage `{name}` on {named(entry)}" for name, entry, before in moves if entry != before]
    is_auto = plans.captures.source.balancing.finds_cuts
    note = "write boundaries=forward_backward.cuts, " if is_auto else ""
    saved = 0.0 if best is None else seconds - best.seconds
    placement, uneven = dict(zip(graph.names, after, strict=True)), saving_of(plans, recorded)
    return Advice(" and ".join(moved), placement, seconds, saved, note, uneven)


def _at(costs: Costs, work: BlockGraph, graph: StageGraph, schedule: Schedule) -> BlockGraph:
    """The work of the stages, each a block, at measured costs: a hop of any size takes the measured latency."""
    blocks = []
    for stage, (block, size) in enumerate(zip(work.blocks, schedule.groups, strict=True)):
        forward, backward, weight = (kind[stage] / size for kind in (costs.forward, costs.backward, costs.weight))
        blocks.append(replace(block, cost=replace(block.cost, forward=forward, backward=backward, weight=weight)))
    return replace(
        work,
        blocks=tuple(blocks),
        values=tuple(replace(value, size=0) for value in work.values),
        costs=replace(work.costs, hardware=replace(work.costs.hardware, latency=costs.comm), source=costs.source),
        alone=work.alone | {stage.index for stage in graph if graph.written.intersection(stage.tensors)},
    )


def _bare(graph: StageGraph) -> BlockGraph:
    """The work of stages of unknown shapes: their parameters and the edges between them."""
    every = {id(tensor): ParameterCost.from_tensor(tensor) for stage in graph for tensor in stage.parameters.values()}
    keys = [frozenset(map(id, stage.parameters.values())) for stage in graph]
    costs_of = [NodeCost(parameters=mine, trains=any(every[key].trained for key in mine)) for mine in keys]
    blocks = [Block((stage.name,), cost) for stage, cost in zip(graph, costs_of, strict=True)]
    values = tuple(BlockValue(source, (target,), 0) for source, target in graph.stage_edges)
    costs = NodeCosts({}, parameters=every)
    return BlockGraph(tuple(blocks), values, (graph.output_stage,), costs, graph.gathers, blocks_are_stages=True)
