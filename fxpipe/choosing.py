"""``choose``: compares the plans of a model on a number of ranks, and says which to take.

1. The grid has all ways to split the ranks and the batch, with each ``zero``, ``recompute`` and ``offload``.
2. One plan is simulated as ``fxpipe.preview`` does. Its costs give estimates for all others.
3. The plan with the least estimate is simulated next, until no estimate is below the fastest plan that fits.
4. If no plan fits, the smallest plans are simulated, and the changes that would make them fit.

All plans share one capture for each number of rows of a micro-batch, and what was counted, cut and split for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch.description import bind, describe
from fxpipe.batch.rows import counts_of, row_count
from fxpipe.batch.rules import InRows, rule_of
from fxpipe.compiler import PreviewArguments, previewed_plans
from fxpipe.distributed.grid import BATCH
from fxpipe.distributed.topology import Topology
from fxpipe.errors import FxpipeError, RunError, TopologyError, TraceError
from fxpipe.forecast.choice import Choice, ChosenPlan, written
from fxpipe.forecast.estimate import Estimates, GridPlan, MicrobatchWork, work_of
from fxpipe.forecast.figures import Stepping, preview_of
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.hardware import Hardware
from fxpipe.no_gc import paused
from fxpipe.options import AUTO, Options, Recompute, taking
from fxpipe.packed import counted
from fxpipe.plan.example import check_model
from fxpipe.plan.plans import Plans
from fxpipe.policies import Zero, ZeroLevel
from fxpipe.schedules.schedule import Schedule
from fxpipe.search.choose import least_seconds
from fxpipe.search.memory import Account
from fxpipe.search.node_costs import NodeCosts
from fxpipe.stage.with_loss import about_target
from fxpipe.torch_compat import pytree
from fxpipe.trace import Request
from fxpipe.validation import Expected, check, is_mapping, is_number, is_whole, list_of

LITTLE = 0.02
"""The fraction of a step's time that is too small a gain for simulating a plan."""
TIMES = 3
"""The most searches with less memory, for a plan that messages make too large."""
MOST = 48
"""The most plans that are simulated."""
NEAREST = 3
"""The number of plans that are simulated if none fits by its estimate."""


@dataclass(frozen=True, eq=False)
class ChooseArguments(Options):
    """The parameters of ``choose``. The options are checked where a plan takes them."""

    model: nn.Module
    ranks: int = field(kw_only=True)
    rows: int | None = field(default=None, kw_only=True)
    memory: float | None = field(default=None, kw_only=True)
    ranks_per_node: int | None = field(default=None, kw_only=True)
    axes: Mapping[str, Sequence[int]] = field(default_factory=dict, kw_only=True)
    optimizer: str | Callable[..., torch.optim.Optimizer] = field(default="adamw", kw_only=True)
    boundaries: Any = field(default=AUTO, kw_only=True)
    zero: ZeroLevel | Zero | None = field(default=None, kw_only=True)  # type: ignore[assignment]
    recompute: Recompute | None = field(default=None, kw_only=True)  # type: ignore[assignment]
    offload: Recompute | None = field(default=None, kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check(RunError, _KINDS, ranks=self.ranks, axes=self.axes)
        check(RunError, _KINDS, **{name: getattr(self, name) for name in _MAYBE if getattr(self, name) is not None})


_WHOLE = Expected(lambda value: is_whole(value) and value > 0, "a whole number of at least 1")
_MAYBE = "rows", "memory", "ranks_per_node"
_KINDS: Mapping[str, Expected] = {
    **dict.fromkeys(("ranks", "rows", "ranks_per_node"), _WHOLE),
    "memory": Expected(lambda value: is_number(value) and value > 0, "a number of bytes, as 80e9"),
    "axes": Expected(
        lambda value: is_mapping(value) and all(list_of(_WHOLE.fits)(sizes) and len(sizes) for sizes in value.values()),
        'a dict axis -> the sizes to try, as {"tensor": (1, 2, 4), "pipe": (4, 8)}',
    ),
}


@taking(ChooseArguments)
def choose(given: ChooseArguments) -> Choice:  # noqa: D417  (the parameters are the fields of its class)
    """Compares the plans of a model on ``ranks`` ranks, in one process without GPUs: the best, in order, as a table.

    A plan is a split of the ranks over the axes, a number of micro-batches, ``zero``, ``recompute`` and ``offload``.
    What the call leaves out is chosen; ``zero=1`` or ``microbatches=32`` is kept as it is. Each plan of the result has
    its ``fxpipe.preview``, and ``code``, the call of ``fxpipe.compile`` to paste. No plan that is left out is
    estimated to be faster by 2 %. The model and the example may be on the meta device. ``fxpipe.preview`` explains the
    other arguments.

    Args:
        model: as in ``fxpipe.compile``.
        ranks: the number of ranks.
        rows: the rows of a batch, over all replicas. None: as many as the example has.
        memory: the bytes of a rank that a plan may use. None: the memory of ``hardware``.
        ranks_per_node: the ranks that reach each other fast. None: all.
        axes: axis → the sizes to try. "pipe" and "data" have all sizes unless they are named here. Name "tensor",
            "expert" and "context" if ``parallelize`` uses them; they are the innermost, in this order.
        hardware: a GPU's name, or a ``fxpipe.Hardware`` with speeds.
        example_args: a batch of any number of rows; its rows are repeated.

    Raises:
        RunError: an argument is out of its range, ``hardware`` has no speeds, or no way to split the ranks divides the
            rows.
        TraceError, PartitionError, ScheduleError, TopologyError: as ``fxpipe.preview``, where no plan can be made.
    """
    with paused():
        return _Choosing(given).choice()


class _Fitting(PreviewArguments):
    """Options of a preview that raises DoesNotFit if no plan fits."""

    shows_nearest = False


class RepeatedExample:
    """The example of a call, as a batch with any number of rows.

    ``inputs``: by name; ``rows``: how many the example has. RunError without an example, or if its rows cannot be
    repeated.
    """

    def __init__(self, given: ChooseArguments | PreviewArguments) -> None:
        check_model(given.model, given)
        if isinstance(given.model, StageGraph):
            raise RunError(
                "rows are repeated for a model, and this is a StageGraph; give fxpipe.preview a batch of all rows"
            )
        if not given.has_example:
            raise RunError("repeating rows needs the shapes of a batch: pass example_args= or example_kwargs=")
        if rules := counted(given.batch_dim):
            raise RunError(f"the rows of the example cannot be repeated: batch_dim= packs {', '.join(rules)}")
        signature = Request.signature(given.model, given.loss_fn)
        try:
            bound = bind(signature, tuple(given.example_args or ()), given.example_kwargs or {})
        except TypeError as error:
            hint = about_target(given.loss_fn, error)
            raise RunError(f"example_args= and example_kwargs= are no batch of the model: {error}{hint}") from None
        self.rows = row_count(describe(bound), given.batch_dim, counts_of(bound, given.batch_dim)) or 1
        self.inputs, self._batch_dim = bound, given.batch_dim

    def batch(self, rows: int) -> dict[str, Any]:
        """The inputs with this number of rows, at least 1: the example's own rows, again and again."""
        check(RunError, _KINDS, rows=rows)

        def repeated(tensor: Tensor, dim: int) -> Tensor:
            have = tensor.shape[dim]
            return tensor.index_select(dim, torch.arange(rows, device=tensor.device) % have)

        batch = dict(self.inputs)
        for name, value in batch.items():
            rule = rule_of(self._batch_dim, name, value)
            if type(rule) is InRows:
                batch[name] = pytree.tree_map_only(Tensor, partial(repeated, dim=rule.dim), value)
        return batch


class _Choosing:
    """One call of ``choose``."""

    def __init__(self, given: ChooseArguments) -> None:
        self.given, self.known = given, dict[Hashable, Any]()
        hardware = Hardware.of(given.hardware)
        if not hardware.has_speeds:
            raise RunError('choose compares seconds, and hardware= has no speeds; write hardware="h100"')
        self.hardware = hardware if given.memory is None else replace(hardware, memory=float(given.memory))
        values = {name: getattr(given, name) for name in [*(each.name for each in fields(Options)), "optimizer"]}
        default = {each.name: each.default for each in fields(PreviewArguments)}
        self.options = {name: value for name, value in values.items() if value is not default[name]}
        for name in ("example_args", "example_kwargs", "hardware", "microbatches", "zero", "recompute", "offload"):
            self.options.pop(name, None)
        self.example = RepeatedExample(given)
        self.rows = given.rows or self.example.rows
        self._costed = dict[int, tuple[Plans, Stepping]]()
        self._work = cache(self._work_of)
        self.estimates = Estimates(self._work, self._static, self._uneven, self.hardware, given.schedule)
        self.plans = dict[GridPlan, ChosenPlan]()
        self.refused = dict[GridPlan, FxpipeError]()

    # 1. the grid

    def grid(self, ranks: int, **freed: Any) -> Iterator[GridPlan]:
        """All plans. ``freed``: options in place of the call's own; None: all its values."""
        given = {name: getattr(self.given, name) for name in ("microbatches", "zero", "recompute", "offload")} | freed
        names = [name for name in ("tensor", "expert", "context") if name in self.given.axes]
        for sizes in itertools.product(*(self.given.axes[name] for name in names)):
            inner = tuple(zip(names, sizes, strict=True))
            if ranks % math.prod(sizes):
                continue
            left, expert = ranks // math.prod(sizes), dict(inner).get("expert", 1)
            for pipe in _divisors(left):
                axes = (("pipe", pipe), ("data", left // pipe), *inner)
                if any(size not in self.given.axes.get(name, (size,)) for name, size in axes):
                    continue
                replicas = left // pipe * expert
                if self.rows % replicas:
                    continue
                counts = [each for each in _divisors(self.rows // replicas) if given["microbatches"] in (None, each)]
                settings = itertools.product(counts, self._zeros(axes, given["zero"]), self._ways(given))
                for count, (zero, shards), (again, host) in settings:
                    yield GridPlan(axes, count, self.rows // replicas // count, zero, again, host, shards)

    def _zeros(self, axes: Sequence[tuple[str, int]], wanted: ZeroLevel | Zero | None) -> Iterator[tuple[Zero, int]]:
        """The settings of ``zero``, with the number of ranks that shard."""
        try:
            topology = Topology(axes, self.given.ranks_per_node)
        except TopologyError:  # nodes would not be alike
            return
        whole, node = topology.groups(BATCH), topology.shard_groups()
        sizes = {"data": min(map(len, whole)), "node": min(map(len, node))}
        if wanted is not None:
            zero = wanted if isinstance(wanted, Zero) else Zero(wanted)
            yield zero, sizes[zero.scope] if zero.level else sizes["data"]
            return
        yield Zero(0), sizes["data"]
        levels: tuple[ZeroLevel, ...] = (1, 2, 3) if self.given.parallelize is None else (1, 2)
        for level in levels if sizes["data"] > 1 else ():
            if sizes["node"] > 1:
                yield Zero(level), sizes["node"]
            if sizes["node"] != sizes["data"]:
                yield Zero(level, "data"), sizes["data"]

    def _ways(self, given: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """The settings of ``recompute`` and ``offload``: with a limit of memory also "auto"."""
        limited = self.hardware.memory is not None
        copies = limited and self.hardware.host_link is not None
        again = [False, *[AUTO] * limited] if given["recompute"] is None else [given["recompute"]]
        host = [False, *[AUTO] * copies] if given["offload"] is None else [given["offload"]]
        # Two searches at once take long, and gain little over the better of them.
        is_open = given["recompute"] is None and given["offload"] is None
        return [ways for ways in itertools.product(again, host) if not is_open or False in ways]

    # 2. and 3. simulated plans

    def simulate(self, plan: GridPlan, nearest: bool = False) -> ChosenPlan | None:
        """The plan as ``fxpipe.preview`` has it; None if there is no table for it, or if it does not fit. ``nearest``:
        whether the nearest plan is simulated if it does not fit."""
        chosen, limit = self._simulated(plan, self.hardware, nearest), self.hardware.memory
        # Searches do not count messages. A plan of "auto" that these make too large gets less memory.
        memory = limit
        for _ in range(TIMES):
            if chosen is None or limit is None or memory is None or nearest or chosen.fits or plan.keeps_all:
                break
            memory -= chosen.bytes - limit
            chosen = self._simulated(plan, replace(self.hardware, memory=memory), nearest)
        if chosen is not None:
            self.plans[plan] = chosen
            self.estimates.learn(plan, chosen.seconds)
        return chosen

    def _simulated(self, plan: GridPlan, hardware: Hardware, nearest: bool) -> ChosenPlan | None:
        ours: dict[str, Any] = {"microbatches": plan.microbatches, "zero": plan.zero}
        ours |= {name: value for name in ("recompute", "offload") if (value := getattr(plan, name)) is not False}
        ours["hardware"] = self.given.hardware if hardware == Hardware.of(self.given.hardware) else hardware
        axes = [(name, size) for name, size in plan.axes if size > 1 or name == "pipe" or name in self.given.axes]
        try:
            topology = Topology(axes, self.given.ranks_per_node)
            batch = self.example.batch(plan.rows * plan.microbatches)
            arguments_of = PreviewArguments if nearest else _Fitting
            arguments = arguments_of(self.given.model, topology, **self.options, **ours, example_kwargs=batch)
            plans, stepping, parts = previewed_plans(arguments, self.known)
            preview = preview_of(plans, stepping, parts)
        except FxpipeError as error:
            if isinstance(error, TraceError) and not self.plans:
                raise
            self.refused[plan] = error
            return None
        if preview.seconds is None:
            raise RunError("choose compares seconds, and the costs of this model are not known from its shapes")
        # A capture for "auto" also has checkpointed layers, whose bytes the estimates of such plans need.
        if plan.rows not in self._costed or (plan.recompute == AUTO and self._costs_of(plan.rows)[2] is None):
            self._costed[plan.rows] = plans, stepping
            self._work.cache_clear()
        return ChosenPlan(topology, ours, self.options, preview, plan.rows, self.hardware.memory)

    def _work_of(self, rows: int) -> MicrobatchWork:
        """The work of a micro-batch, from the costs of as many rows, or of the nearest number of rows."""
        near = min(self._costed, key=lambda other: (abs(math.log(other / rows)), other))
        program, costs, by_layers = self._costs_of(near)
        return work_of(program, costs, rows / near, by_layers)

    def _costs_of(self, rows: int) -> tuple[Program, NodeCosts, NodeCosts | None]:
        """The program of so many rows, its costs, and those with checkpointed layers, if a search may checkpoint."""
        plans, _ = self._costed[rows]
        shown, first = plans.shown, plans.captures.first
        assert shown is not None
        assert shown.shape is not None
        assert first is not None
        costs = partial(plans.captures.source.balancing.costs, pattern=shown, shape=shown.shape)
        return first.program, costs(first.program), None if first.layered is None else costs(first.layered)

    def _static(self, zero: Zero, shards: int) -> float:
        """The bytes of all parameters, gradients and states on the ranks of a replica together."""
        rows, (_, stepping) = next(iter(self._costed.items()))
        account = Account(zero.level if shards > 1 else 0, shards, self.given.precision, stepping.states)
        _, costs, _ = self._costs_of(rows)
        return sum(each.on(account).sum for each in costs.parameters.values() if each.count)

    def _uneven(self, pipe: int) -> float:
        """The least seconds of the layouts of a search, as a multiple of the seconds of equal stages. 1 without a
        search."""
        rows, (plans, _) = next(iter(self._costed.items()))
        balancing, shown, schedule = plans.captures.source.balancing, plans.shown, self.given.schedule
        if not balancing.finds_cuts or pipe == 1 or isinstance(schedule, Schedule):
            return 1.0
        program, _, _ = self._costs_of(rows)
        assert shown is not None
        assert shown.shape is not None
        count, work = 4 * pipe, balancing.blocks(program, shown, shown.shape)
        seconds = least_seconds(program, work, pipe, count, schedule)
        return max(seconds / self.estimates.of_equal_stages(self._work(rows), pipe, count), 1.0)

    def choice(self) -> Choice:
        """The plans in order."""
        waiting = list(self.grid(self.given.ranks))
        if not waiting:
            raise RunError(
                f"no way to split {self.given.ranks} ranks over the axes divides the {self.rows} rows of a batch; pass "
                "other rows=, axes=, microbatches= or ranks_per_node="
            )
        count = len(waiting)
        # The first plan: neither the longest pipeline nor the shortest, and the smallest micro-batches.
        middle = math.sqrt(self.given.ranks)
        waiting.sort(key=lambda plan: (plan.rows, abs(math.log(plan.pipe / middle)), not plan.keeps_all))
        while waiting and not self.plans:
            first = waiting.pop(0)
            if self.simulate(first, nearest=True) is None:  # perhaps there are fewer stages than ranks
                waiting = [plan for plan in waiting if plan.pipe != first.pipe]
        if not self.plans:
            raise next(iter(self.refused.values()))
        left = self._search(waiting)
        fitting = [plan for plan in self.plans.values() if plan.fits]
        remedies = () if fitting else tuple(self._remedies())
        refused = {f"{plan}": str(error) for plan, error in self.refused.items()}
        return Choice(tuple(sorted(self.plans.values(), key=_merit)), count, refused, self._ways_left(left), remedies)

    def _ways_left(self, plans: Sequence[GridPlan]) -> dict[str, float]:
        """``recompute`` and ``offload`` → the least estimate of these plans' seconds."""
        ways: dict[str, list[GridPlan]] = {}
        for plan in plans:
            pairs = (("recompute", plan.recompute), ("offload", plan.offload))
            way = ", ".join(f"{name}={value!r}" for name, value in pairs if value is not False) or "neither"
            ways.setdefault(way, []).append(plan)
        fastest = {way: self.estimates.fastest(some) for way, some in ways.items()}
        least = {way: self.estimates.seconds(plan) for way, plan in fastest.items() if plan is not None}
        return dict(sorted(least.items(), key=itemgetter(1)))

    def _search(self, waiting: list[GridPlan]) -> list[GridPlan]:
        """Simulates plans, the one with the least estimate first, until no estimate is below the fastest that fits.
        Returns the other plans that fit by their estimates."""
        memory = math.inf if self.hardware.memory is None else self.hardware.memory
        waiting = [plan for plan in waiting if plan not in self.refused]
        while waiting and len(self.plans) + len(self.refused) < MOST:
            fitting = [plan for plan in waiting if self.estimates.bytes(plan) <= memory]
            done = [each for each in self.plans.values() if each.fits]
            best = min((each.seconds for each in done), default=math.inf)
            plan = self.estimates.fastest(fitting)
            if plan is None or self.estimates.seconds(plan) >= (1 - LITTLE) * best:
                break
            waiting.remove(plan)
            chosen = self.simulate(plan)
            # Where everything stays in memory, "auto" changes nothing.
            if chosen is not None and chosen.fits and plan.keeps_all:
                waiting = [other for other in waiting if replace(other, recompute=False, offload=False) != plan]
        if not any(each.fits for each in self.plans.values()):
            for plan in sorted(waiting, key=self.estimates.bytes)[:NEAREST]:
                self.simulate(plan, nearest=True)
        return [plan for plan in waiting if self.estimates.bytes(plan) <= memory and plan not in self.refused]

    def _remedies(self) -> Iterator[tuple[str, ChosenPlan]]:
        """What would make a plan fit: each option that the call fixes, left open; or twice the ranks."""
        simulated, self.plans = self.plans, {}
        for name in ("recompute", "offload", "zero", "microbatches"):
            if (own := getattr(self.given, name)) is not None:
                own = Zero(own) if name == "zero" and not isinstance(own, Zero) else own
                grid = self.grid(self.given.ranks, **{name: None})
                for plan, chosen in self._smallest(plan for plan in grid if getattr(plan, name) != own):
                    yield f"{name}={written(name, getattr(plan, name))}", chosen
        more = 2 * self.given.ranks
        yield from ((f"{more} ranks", chosen) for _, chosen in self._smallest(self.grid(more)))
        self.plans = simulated

    def _smallest(self, grid: Iterator[GridPlan]) -> Iterator[tuple[GridPlan, ChosenPlan]]:
        """The plan with the least estimate of its bytes, simulated; none if no plan has a table."""
        for plan in sorted(grid, key=self.estimates.bytes):
            if (chosen := self.simulate(plan, nearest=True)) is not None:
                yield plan, chosen
                return


def _merit(plan: ChosenPlan) -> tuple[bool, float, float]:
    """A sort key, less is better: plans that fit by their seconds, to four digits, then by bytes; others by bytes."""
    fits = plan.fits
    return not fits, float(f"{plan.seconds:.4g}") if fits else 0.0, plan.bytes


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
