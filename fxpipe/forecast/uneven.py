"""Uneven: what steps take whose micro-batches have different costs, and what their order and more in flight save.

``uneven_preview`` is for real batches, by the costs of their samples. It cuts each batch as a step does, and also deals
it by ``fxpipe.deal``. At each stage a micro-batch takes the plan's times and bytes, by as much more or less as its
samples cost than the mean over all batches. ``saving_of`` is for a recorded step, by its measured times.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean
from typing import Any

import torch
from tabulate import tabulate

from fxpipe.dealing import deal
from fxpipe.errors import FxpipeError, RunError
from fxpipe.notebook import Tabular
from fxpipe.plan.plan import PlansSoFar
from fxpipe.plan.tables import choose_table, in_flight_of, mib
from fxpipe.schedules import with_costs
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.limits import InFlight
from fxpipe.schedules.microbatch_order import by_stage, pyramid, weighed
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.show.svg_picture import bar_chart
from fxpipe.schedules.table import in_seconds
from fxpipe.small_file import write_whole

COME = "as samples come"
SHOWN = 0.05
"""The least part of a step that must be saved, for a line to say it."""


@dataclass(frozen=True)
class UnevenRun:
    """The figures of a way to run the batches; of the lower bound, its times alone."""

    way: str
    makespan: float
    """The mean over batches, in seconds, or at F = 1 and B = 2 if no shapes are known."""
    speedup: float
    """How many times as fast a batch is as with samples as they come: the geometric mean over batches."""
    busy: Sequence[float] = ()
    """The time that each rank computes: the mean over batches."""
    in_flight: Sequence[int] = ()
    """The most micro-batches between forward and backward at each stage."""
    activations: float | None = None
    """The most bytes of activations on a rank, of all ranks and batches; None without shapes."""


@dataclass(frozen=True)
class UnevenPreview(Tabular):
    """How long steps of real batches would take, in several ways; prints as a table."""

    batches: int
    runs: Sequence[UnevenRun]
    """The ways, and then the lower bound of all tables and all orders of these micro-batches."""
    in_seconds: bool

    def to_svg(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture: for each way, a bar for each rank with its busy and its idle time. OSError if it fails."""
        bars = [(run.way, f"×{run.speedup:.2f}", run.makespan, run.busy) for run in self.runs]
        write_whole(path, bar_chart(f"the mean of {self.batches} batches: busy time, and idle time in grey", bars))

    def __str__(self) -> str:
        time: Callable[[float], str] = in_seconds if self.in_seconds else "{:.4g}".format
        rows = []
        for run in self.runs:
            size = mib(run.activations) if run.activations else ""
            rows.append((run.way, time(run.makespan), f"{run.speedup:.2f}", max(run.in_flight, default=""), size))
        headers = [f"mean of {self.batches} batches", "makespan", "times as fast", "in flight", "activations, MiB"]
        return tabulate(rows, headers, disable_numparse=True, colalign=["left", *["right"] * 4])


def uneven_preview(given: Any, plans: PlansSoFar, costs_of: Callable[[Schedule], Costs]) -> UnevenPreview:
    """The preview of batches by their samples' costs.

    Args:
        given: for each batch a list with the cost of each sample: a number, or a dict stage name → number.
        plans: the plans, whose first table is compared with the same family's table with other numbers in flight.
        costs_of: returns the costs of a table's mean micro-batch.

    Raises:
        RunError: a batch has fewer samples than micro-batches, a cost is no finite number of 0 or more, or a name is no
            stage. Or a stage is gathered: its groups need the batch's order.
        ScheduleError: the plan's table is no family's.
    """
    names, count = plans.first.graph.names, plans.first.schedule.microbatches
    if plans.first.graph.gathers:
        raise RunError("costs= is for micro-batches in any order, and a gathered stage runs for groups in their order")
    batches = [
        [by_stage(cost, f"costs[{b}][{s}]", names) for s, cost in enumerate(each)] for b, each in enumerate(given)
    ]
    usual, deeper, timelines = _table(plans, None), plans.first.schedule, dict[str, list[Timeline]]()
    if in_flight_of(deeper) == in_flight_of(usual):
        deeper = _table(plans, "2x")
    means = [cost / count / len(batches) for cost in _sum([sample for batch in batches for sample in batch])]
    for batch in batches:
        parts = torch.arange(len(batch)).tensor_split(count), deal(weighed(batch), count)
        cut, dealt = ([_sum([batch[sample] for sample in part]) for part in each] for each in parts)
        ordered = [dealt[number] for number in pyramid(weighed(dealt))]
        ways = [(COME, usual, cut), ("dealt", usual, dealt), ("dealt, in order", usual, ordered)]
        ways += [("more in flight", deeper, cut), ("dealt, in order, more in flight", deeper, ordered)]
        for way, table, sums in ways:
            rows = [[each[stage] / mean if mean else 1.0 for each in sums] for stage, mean in enumerate(means)]
            timelines.setdefault(way, []).append(table.simulate(costs_of(table).scaled(rows)))

    def run(way: str, makespans: Sequence[float], *figures: Any) -> UnevenRun:
        pairs = zip(timelines[COME], makespans, strict=True)
        # A batch may take no time, if all its samples cost 0.
        ratios = [plan.makespan / makespan if makespan else 1.0 for plan, makespan in pairs]
        return UnevenRun(way, fmean(makespans), geometric_mean(ratios), *figures)

    runs = []
    for way, each in timelines.items():
        busy = [fmean(times) for times in zip(*(plan.busy for plan in each), strict=True)]
        most = max((math.ceil(size) for plan in each for size in plan.peak_bytes or ()), default=None)
        runs.append(run(way, [plan.makespan for plan in each], busy, in_flight_of(each[0].schedule), most))
    bounds = [min(plan.lower_bound for plan in each) for each in zip(*timelines.values(), strict=True)]
    return UnevenPreview(len(batches), [*runs, run("lower bound", bounds)], bool(costs_of(usual).source))


def saving_of(plans: PlansSoFar, recorded: Timeline | None) -> str:
    """Says what ``microbatch_cost=``, ``in_flight="2x"`` or both would save of a step whose micro-batches take the
    times of the recorded step; empty if less than ``SHOWN``, or if the plan cannot have these options.

    At a stage, a micro-batch counts as longer or shorter only as far as both F and B differ from their medians: the
    times of single actions vary in any step.
    """
    table = plans.first.schedule
    fixed = isinstance(plans.options.schedule, Schedule) or plans.first.graph.gathers
    if recorded is None or fixed or recorded.schedule.microbatches != table.microbatches:
        return ""
    ratios = defaultdict[tuple[int, int], list[float]](list)
    for action, span in recorded.spans.items():
        if usual := recorded.costs.time(action):
            ratios[action.stage, action.microbatch].append(span.duration / usual)
    closest = {key: min(each, key=lambda ratio: abs(ratio - 1)) for key, each in ratios.items()}
    stages, numbers = range(len(table.placement)), range(table.microbatches)
    rows = [[closest.get((stage, number), 1.0) for number in numbers] for stage in stages]
    order = pyramid(_sum(rows))
    ordered = recorded.costs.scaled([[row[number] for number in order] for row in rows])
    costs, ways = recorded.costs.scaled(rows), {"microbatch_cost=": table.simulate(ordered)}
    with contextlib.suppress(FxpipeError):  # more in flight may not fit the memory
        deeper = _table(plans, "2x")
        ways['in_flight="2x"'] = deeper.simulate(costs)
        ways['microbatch_cost= and in_flight="2x"'] = deeper.simulate(ordered)
    savings = {way: 1 - plan.makespan / table.simulate(costs).makespan for way, plan in ways.items()}
    told = [f"{way} would save {part:.0%}" for way, part in savings.items() if part >= SHOWN]
    return f"the recorded step's micro-batches differ: {', '.join(told)}" if told else ""


def _table(plans: PlansSoFar, in_flight: InFlight | None) -> Schedule:
    """The first plan's table, with this number in flight."""
    family = replace(with_costs(plans.options.schedule), in_flight=in_flight)  # type: ignore[arg-type]
    options = replace(plans.options, schedule=family, in_flight=None, microbatch_cost=None)
    anew = replace(plans, options=options, by_pattern={}, captures=plans.captures.without_search())
    return choose_table(anew, plans.first.graph, next(iter(plans.by_pattern))).table


def _sum(costs: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*costs, strict=True)]
