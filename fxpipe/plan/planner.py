"""Planner: makes a ``Plan``, all that is known about a step before it runs, for each pattern of inputs. Cached."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch.description import check_objects
from fxpipe.batch.label_count import Items
from fxpipe.batch.pattern import Flags, Pattern, modules_of, parameters_in
from fxpipe.distributed.topology import Topology
from fxpipe.errors import PartitionError, ScheduleError
from fxpipe.graph.gathering import Places
from fxpipe.graph.like import ObjectValue
from fxpipe.graph.opaque_call import has_opaque_calls
from fxpipe.graph.ranks import Placement
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.options import Options
from fxpipe.passes.defer_weights import defer_weights
from fxpipe.plan.capture.capture_check import Sample
from fxpipe.plan.capture.captures import LATER, Captured, Captures
from fxpipe.plan.capture.same_stages import called_alike, each_once, for_groups, joint, like, places_of_rows
from fxpipe.plan.capture.sizes import outline
from fxpipe.plan.placement import check_replicated, place
from fxpipe.plan.plan import Plan, values_of
from fxpipe.plan.stage_compiler import Compiled, compiled_lazily
from fxpipe.plan.tables import Tables, tells_bytes
from fxpipe.progress import log, progress
from fxpipe.schedules import Limited
from fxpipe.schedules.lower import lower
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import prove
from fxpipe.trace import Request

WORTH_IT = 0.01
"""The part of a step by which a new table must be faster to be taken: less is within the noise of a measurement."""


@dataclass(frozen=True, eq=False)
class Planner:
    """Makes plans for a model (or the user's own stage graph) on a topology, and keeps them."""

    model: nn.Module | StageGraph
    topology: Topology
    options: Options
    captures: Captures | None
    """Where the stages of a model come from; None for the user's own."""
    tables: Tables
    """What chooses the table of the next plan."""
    adopt: Callable[[StageGraph], StageGraph] | None = None
    """Has a graph's stages run the modules that ``parallelize`` has made, once there are any."""
    plans: dict[Pattern, Plan] = field(default_factory=dict)
    places: dict[Hashable, Places] = field(default_factory=dict)
    """In which dimension gathered values have their rows."""

    @staticmethod
    def empty(model: nn.Module | StageGraph, options: Options, topology: Topology, device: torch.device) -> Planner:
        """Before the first plan. ``device``: where a model that is on no device yet will run."""
        options = options.for_calls()
        captures = Captures.empty(model, options, topology, device) if isinstance(model, nn.Module) else None
        return Planner(model, topology, options, captures, Tables(options, captures))

    @property
    def ranks(self) -> int:
        """Of a pipeline."""
        return self.topology.size("pipe")

    @property
    def module(self) -> nn.Module:
        return self.model.module if isinstance(self.model, StageGraph) else self.model

    @cached_property
    def signature(self) -> inspect.Signature:
        """The signature of ``forward_backward``."""
        if isinstance(self.model, StageGraph):
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            return inspect.Signature([inspect.Parameter(name, kind) for name in self.model.inputs])
        return Request.signature(self.model, self.options.loss_fn)

    @cached_property
    def items(self) -> Items:
        """How the model's labels are counted."""
        given = [name for name in ("loss_fn", "loss_weight") if getattr(self.options, name) is not None]
        return Items.of(self.model, f"{given[0]}= is given" if given else "")

    @property
    def flags(self) -> Flags:
        """What a capture depends on in the present model; RunError where that changes with every step."""
        modules = modules_of(self.module)
        training = bytes([module.training for module in modules])
        trainable = bytes([parameter.requires_grad for parameter in parameters_in(modules)])
        return Flags(training, trainable, 0 if self.captures is None else self.captures.reads.state())

    @property
    def microbatches(self) -> int:
        """How many a batch is cut into."""
        return self.options.microbatches_on(self.ranks)

    @property
    def first(self) -> Plan:
        """The plan that was made first, whose stages all later ones must have."""
        return next(iter(self.plans.values()))

    @property
    def leaves_unused(self) -> bool:
        """Whether no stage of the first plan uses some parameter, or some buffer that is saved: others are tables, of
        which many models hold more than they read."""
        # Buffers with persistent=False are tables that forward may or may not read: nothing is lost where none does.
        saved = self.module.state_dict(keep_vars=True).values()
        return not self.first.graph.held.issuperset(id(one) for one in saved if isinstance(one, Tensor))

    @property
    def shown(self) -> Pattern:
        """The pattern of the first plan, with its shapes."""
        assert self.tables.shown is not None
        return self.tables.shown

    @property
    def graphs(self) -> list[StageGraph]:
        """The stages of all plans, each once."""
        return list({id(graph): graph for plan in self.plans.values() for graph in plan.graphs}.values())

    @property
    def objects(self) -> dict[ObjectValue, Any]:
        """Where captures find the objects that this rank was given."""
        return {} if self.captures is None else self.captures.objects

    @property
    def needs_shapes(self) -> bool:
        """Whether the stages hold for micro-batches of one shape, and for Python's numbers as they were."""
        by_value = self.captures is not None and self.captures.by_value
        return by_value or any(pattern.shapes for pattern in self.plans)

    def plan(self, pattern: Pattern, sample: Sample | str = LATER, at_compile: bool = False) -> Plan:
        """The plan for a pattern of inputs; TraceError, PartitionError or ScheduleError where there can be none.

        ``sample``: the micro-batches on which new stages are checked against the model; or why they are not.
        ``at_compile``: its stages may use what no stage of the first plan does: see ``hold_what_all_use``.
        """
        if self.captures is not None:
            for shape in pattern.shapes:
                check_objects(shape)
        # 1. One plan holds for all shapes where the capture does: it is kept without them.
        known = self.plans.get(pattern) or self.plans.get(pattern.for_any_shape())
        if known is not None:
            return known
        captured = self._captured(pattern, sample)
        if not self.plans:
            self.tables.shown = pattern
        key = pattern if captured[0].of_one_shape else pattern.for_any_shape()
        # 2. Captures with symbolic sizes hold for several patterns: those made from the same ones share a plan.
        used = () if self.captures is None else tuple(self.captures.used)
        for other, plan in self.plans.items():
            same = (other.training, other.microbatches) == (pattern.training, pattern.microbatches)
            if used and same and plan.captures == used:
                self.plans[key] = plan
                return plan
        # 3. The stages go to ranks, and these run a table.
        graphs = self._placed(captured, pattern.inputs)
        program = "\n".join(dict.fromkeys(one.text for one in captured))
        plan = self._scheduled(graphs, pattern, program, used, captured[0].places)
        if self.plans:
            self._check_same_stages(plan, at_compile)
        self.plans[key] = plan
        return plan

    def hold_what_all_use(self) -> None:
        """Has the first plan's stages hold what no plan uses but later ones, such as a head of evaluation alone."""
        (key, first), *later = self.plans.items()
        held, more = first.graph.held, dict[str, Mapping[str, Tensor]]()
        for stage in (stage for _, plan in later for stage in plan.graph):
            more[stage.name] = {name: one for name, one in stage.tensors.items() if id(one) not in held}
        graphs = each_once(first.graphs, partial(_holding, more=more))
        self.plans[key] = replace(first, graph=joint(graphs), graphs=graphs)

    def keep(self, wanted: Collection[Plan]) -> None:
        """Drops all plans but these and the first one, and the captures that only dropped ones were made from."""
        kept = {id(plan) for plan in (self.first, *wanted)}
        for pattern in [pattern for pattern, plan in self.plans.items() if id(plan) not in kept]:
            del self.plans[pattern]
        self.places.clear()  # a later plan of the same pattern may be of another capture
        if self.captures is not None:
            self.captures.keep({one for plan in self.plans.values() for one in plan.captures})

    @contextlib.contextmanager
    def rolled_back_on_error(self) -> Iterator[None]:
        """If the block fails, no plan and no capture that was made in it is kept."""
        before = dict(self.plans)
        try:
            with contextlib.nullcontext() if self.captures is None else self.captures.rolled_back_on_error():
                yield
        except BaseException:
            self.plans.clear()
            self.plans.update(before)
            raise

    def _captured(self, pattern: Pattern, sample: Sample | str) -> list[Captured]:
        if isinstance(self.model, StageGraph):
            return [Captured(self.model.with_backward(), f"{self.model}")] * pattern.microbatches
        assert self.captures is not None
        self.captures.used.clear()
        wrong = len(self.captures.wrong)
        captured = self.captures.of(pattern, sample)
        captured = for_groups(captured, self.captures, pattern, sample)
        if len(self.captures.wrong) > wrong:  # a group may have shown it, once the micro-batches were captured so
            return self._captured(pattern, sample)
        return captured

    def row_places(self, plan: Plan, pattern: Pattern) -> Places:
        """Where the values that a step of such micro-batches gathers have their rows, by the names in ``plan``."""
        assert self.captures is not None  # the user's own stages gather nothing
        if plan.captures[0].shapes:
            return plan.places
        key = pattern.for_any_shape(), *map(outline, pattern.shapes[:1])
        if key not in self.places:
            with progress("finding the rows of what is gathered"):
                self.places[key] = places_of_rows(self.captures, plan.captures[0], pattern)
        return self.places[key]

    def _placed(self, captured: Sequence[Captured], inputs: Collection[str]) -> tuple[StageGraph, ...]:
        """The graphs of the micro-batches, with their stages on ranks; equal ones remain one object."""
        # All micro-batches run one table: so stages have the numbers of the first plan, values have one name, and the
        # stages that any micro-batch has are placed.
        found = [one.graph for one in captured]
        graphs = called_alike(each_once(found, lambda graph: like(graph, self.first.graph)) if self.plans else found)
        if not self.plans and self.captures is not None:
            # later captures are cut as the first was, which one with symbolic sizes may have replaced in this plan
            for captured_before in self.captures.kept.values():
                more = {stage.name: stage.tensors for stage in captured_before.graph}
                graphs = each_once(graphs, partial(_holding, more=more))
        every = joint(graphs)
        placement = place(every, self.ranks, self._wanted(every))
        read = {name for stage in every for name in stage.batch_inputs}
        labels = self.items.note(inputs, read)
        placed = partial(replace, placement=placement, labels=labels)
        check_replicated(placed(every), self.options)
        return each_once(graphs, lambda graph: self._ready(placed(graph)))

    def _ready(self, graph: StageGraph) -> StageGraph:
        """The graph as it runs: its stages parallelised and compiled, where that is asked for."""
        if self.adopt is not None:
            graph = self.adopt(graph)
        if self.options.stage_compiler is None:
            return graph
        stages = []
        for stage in graph:
            is_opaque = has_opaque_calls(stage.module)
            if is_opaque and not self.plans:
                log(f"stage {stage.name!r} holds an opaque region, and runs unchanged, without stage_compiler=")
            stages.append(stage if is_opaque else compiled_lazily(stage, self.options.stage_compiler))
        return replace(graph, stages=tuple(stages))

    def rescheduled(self, family: Limited) -> Planner:
        """A planner with this family's tables for training; this very one where its table may stay.

        It may where it keeps within the family's limits, and the new one is not faster by ``WORTH_IT`` at its costs.
        Limits of the family in force go on, unless the new one has others. ScheduleError where there is no such table.
        """
        if isinstance(self.options.schedule, Limited):
            family = family.or_else(self.options.schedule)
        by_shapes = self.tables.by_shapes
        if family.costs is not None and not tells_bytes(family.costs) and by_shapes is not None:
            family = replace(family, costs=family.costs.or_else(by_shapes))
        options = replace(self.options, schedule=family)
        tables = replace(self.tables, options=options, again=self.first.graph.recomputed)
        planner = replace(self, options=options, tables=tables, plans={})
        made: dict[int, Plan] = {}
        # Evaluation keeps its tables: costs were measured in steps.
        for pattern, plan in self.plans.items():
            if pattern.training and id(plan) not in made:
                made[id(plan)] = planner._scheduled(plan.graphs, pattern, plan.program, plan.captures, plan.places)
            planner.plans[pattern] = made.get(id(plan), plan)
        # Both tables at the new costs: the present one was made for others.
        present, new = self.first.schedule, planner.first.schedule
        before, after = (table.simulate(family.costs or 1).makespan for table in (present, new))
        costed = replace(family, costs=new.costs or family.costs)  # with bytes, where shapes gave them
        stays = costed.excess(present) is None and after > before * (1 - WORTH_IT)
        return self if stays else planner

    def with_tensors_of_module(self, adopt: Callable[[StageGraph], StageGraph] | None = None) -> Planner:
        """The same plans; their stages hold what the module now holds, and nothing that it has let go of.

        ``adopt``: has stages, of later plans, too, run the modules that ``parallelize`` has made.
        """
        captures = None if self.captures is None else self.captures.with_tensors_of_module()
        planner = replace(
            self,
            model=self.model.with_tensors_of_module() if isinstance(self.model, StageGraph) else self.model,
            captures=captures,
            tables=replace(self.tables, captures=captures),
            adopt=adopt or self.adopt,
            plans={},
        )
        for pattern, plan in self.plans.items():
            graphs = each_once(plan.graphs, lambda graph: planner._ready(graph.with_tensors_of_module()))
            planner.plans[pattern] = replace(plan, graph=joint(graphs), graphs=graphs)
        return planner

    def _wanted(self, graph: StageGraph) -> Mapping[str, Any] | None:
        """The rank of each stage: as in the first plan, as the user's table or ``placement`` says, or as found."""
        found = None if self.captures is None else self.captures.found
        table = self.options.schedule
        ranks: Placement
        if self.plans and graph.names == self.first.graph.names:
            ranks = self.first.graph.placement
        elif isinstance(table, Schedule):
            ranks = table.placement
        elif self.options.placement is not None or found is None:
            return self.options.placement
        else:
            ranks = found.placement
        if len(ranks) != len(graph):
            raise ScheduleError(f"the schedule is for {len(ranks)} stages, the model has {len(graph)}")
        return dict(zip(graph.names, ranks, strict=True))

    def _scheduled(
        self,
        graphs: tuple[StageGraph, ...],
        pattern: Pattern,
        program: str,
        captures: tuple[Pattern, ...],
        places: Places,
    ) -> Plan:
        """The plan that runs the table of these graphs, which come from ``captures``."""
        graph = joint(graphs)
        schedule = self.tables.schedule(graph, pattern, self.first if self.plans else None)
        ahead, values = schedule.dependencies.ahead, values_of(graphs)
        # Edge × micro-batch, of those between which nothing is sent: a text-only micro-batch has no image features.
        lacking = {id(one): [i for i, edge in enumerate(graph.edges) if edge not in one.edges] for one in graphs}
        absent = {(index, place) for place, one in enumerate(graphs) for index in lacking[id(one)]}
        instructions = lower(
            schedule.rows, graph.edges, schedule.placement, schedule.backward, schedule.tied, ahead, values, absent
        )
        order = prove(schedule, instructions, graph.edges)
        if pattern.training:
            graphs = self._in_halves(graphs, schedule)
        again = frozenset(graph.names[stage] for stage, _ in schedule.dependencies.recomputed)
        graphs = each_once(graphs, lambda one: replace(one, recomputed=again))
        return Plan(joint(graphs), graphs, schedule, instructions, tuple(order), program, captures, places)

    def _in_halves(self, graphs: tuple[StageGraph, ...], schedule: Schedule) -> tuple[StageGraph, ...]:
        """The graphs; the stages whose backward the table has as I and W can leave gradients to W, and no others."""
        split = {stage for stage, _ in schedule.dependencies.halves}
        if split and self.options.parallelize is not None:
            raise ScheduleError(
                f"{schedule.name} has backwards in two halves, I and W, which stages under parallelize= cannot run; "
                'write schedule="1f1b", or leave out parallelize='
            )

        def halved(graph: StageGraph) -> StageGraph:
            if not split and not any(stage.deferring or stage.in_input for stage in graph):
                return graph
            stages = [replace(stage, deferring=None, in_input=()) for stage in graph]
            # A compiler's own graphs hide what the pass would cut, so a compiled stage is cut by AOTAutograd.
            for index in split:
                stage, compiled = stages[index], stages[index].function
                stages[index] = (
                    replace(stage, deferring=compiled.in_halves)
                    if isinstance(compiled, Compiled)
                    else defer_weights(stage)
                )
            return replace(graph, stages=tuple(stages))

        return each_once(graphs, halved)

    def _check_same_stages(self, plan: Plan, at_compile: bool) -> None:
        """A later capture must leave every stage and every tensor where it is."""
        # A tensor that no rank took up at compile would have no owner, no gradient bucket and no place in a checkpoint.
        held = self.first.graph.held
        for before, after in zip(self.first.graph, plan.graph, strict=True):
            own = before.held
            moved = sorted(name for name, tensor in after.tensors.items() if id(tensor) not in own)
            if moved and not (at_compile and held.isdisjoint(id(after.tensors[name]) for name in moved)):
                raise PartitionError(
                    f"this kind of batch uses {moved[0]} in stage {after.name}, which the first kind did not; "
                    "use example_args= of the kind that uses most of the model"
                )


def _holding(graph: StageGraph, more: Mapping[str, Mapping[str, Tensor]]) -> StageGraph:
    """The graph, whose stages hold more, by their names."""

    def wider(stage: Stage) -> Stage:
        here = stage.held
        others = {name: one for name, one in more.get(stage.name, {}).items() if id(one) not in here}
        return replace(stage, tensors={**stage.tensors, **others})

    return replace(graph, stages=tuple(map(wider, graph)))
