"""``Plans``: an immutable value that holds the plans made so far and everything needed to make the next plan.

Takes: the model, the options and the topology; then, for each kind of batch, a ``Pattern``. Gives: ``plan(pattern,
sample) → (new ``Plans``, Plan)``.

1. If the pattern has a plan, or its shape-free pattern has one, this plan is returned.
2. Otherwise each micro-batch is captured, or an earlier capture is valid for it (``fxpipe.capture``).
3. Patterns whose micro-batches have the same captures share a plan.
4. The stages get the first plan's numbers and names, and are placed on ranks.
5. A table is chosen, lowered to instructions for each rank, and proven free of deadlocks.
6. A later plan must use the stages of the first plan: no tensor may change its rank.

No method changes the plans. If a rank fails, all ranks keep the old plans, so nothing is undone. It does not run
anything, and does not talk to other ranks (``together``).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch.description import check_objects
from fxpipe.batch.label_count import Items
from fxpipe.batch.pattern import Flags, Pattern, flags_of, modules_of
from fxpipe.capture.captures import LATER, Captures
from fxpipe.capture.capturing import Capturing
from fxpipe.capture.guard import Captured, Guard
from fxpipe.capture.same_stages import (
    adapted_to,
    captured_for,
    map_distinct,
    places_of_rows,
    union_of,
    with_shared_names,
)
from fxpipe.distributed.grid import BATCH
from fxpipe.distributed.topology import Topology
from fxpipe.errors import FxpipeError, PartitionError, ScheduleError
from fxpipe.graph.cuts import Cuts
from fxpipe.graph.gathering import Places
from fxpipe.graph.question import Unanswered
from fxpipe.graph.ranks import Placement
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.graph.stage_work import in_ms
from fxpipe.options import Options
from fxpipe.passes.defer_weights import defer_weights
from fxpipe.plan.activations import BY_LAYERS, checkpointed, marks_of
from fxpipe.plan.placement import check_hooks, check_replicas, check_replicated, place_stages
from fxpipe.plan.plan import Plan, PlansSoFar, values_of
from fxpipe.plan.stage_compiler import Compiled, compiled_lazily
from fxpipe.plan.tables import choose_table
from fxpipe.progress import log, progress
from fxpipe.schedules import Costs, Limited, Problem
from fxpipe.schedules.families.solve import in_numbers
from fxpipe.schedules.lower import lower
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import prove
from fxpipe.specs import ObjectValue
from fxpipe.stage.opaque_call import has_opaque_calls
from fxpipe.trace import Request
from fxpipe.trace.checks.capture_check import Sample
from fxpipe.trace.checks.sizes import outline

WORTH_IT = 0.01
"""The least fraction of a step's time that a new table must save to replace the present table; less is noise."""


@dataclass(frozen=True, eq=False)
class Plans(PlansSoFar):
    """The planner's knowledge of a model (or of the user's own stage graph) on a topology. Making a plan returns a new
    value; if a rank fails to make the plan, all ranks keep the old value."""

    places: Mapping[Hashable, Places] = field(default_factory=dict)
    """The row dimensions of gathered values, for each kind of batch."""
    adopt: Callable[[StageGraph], StageGraph] | None = None
    """Makes a graph's stages run the modules that ``parallelize`` returned; None before ``parallelize`` was called."""

    @staticmethod
    def empty(
        model: nn.Module | StageGraph,
        options: Options,
        topology: Topology,
        device: torch.device,
        known: dict[Hashable, Any] | None = None,
    ) -> Plans:
        """The plans before the first plan. ``device``: the device on which a model without a device will run.
        ``known``: as in ``Captures.empty``."""
        options = options.for_calls()
        return Plans(topology, options, Captures.empty(model, options, topology, device, known))

    @property
    def ranks(self) -> int:
        """The number of ranks in a pipeline."""
        return self.topology.size("pipe")

    @property
    def module(self) -> nn.Module:
        """The model, or the module that holds the user's own stages."""
        return self.captures.source.model

    @cached_property
    def signature(self) -> inspect.Signature:
        """The signature of ``forward_backward``."""
        if (own := self.captures.source.own) is not None:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            return inspect.Signature([inspect.Parameter(name, kind) for name in own.graph.inputs])
        return Request.signature(self.module, self.options.loss_fn)

    @cached_property
    def items(self) -> Items:
        """How the model's labels are counted."""
        functions = [name for name in ("loss_fn", "loss_weight") if getattr(self.options, name) is not None]
        given, own = f"{functions[0]}= is given" if functions else "", self.captures.source.own
        return Items.from_model(self.module if own is None else own.graph, given)

    @property
    def flags(self) -> Flags:
        """The facts of the model on which captures depend: training flags, ``requires_grad`` and attributes read."""
        return flags_of(modules_of(self.module), self.module.parameters(), self.captures.reads.number)

    @property
    def cuts(self) -> Cuts | None:
        """The stages that a search found; None if the user named or marked them."""
        first = self.captures.program
        found = first is not None and self.captures.source.balancing.finds_cuts
        return Cuts.of(first, self.first.graph.placement) if first is not None and found else None

    @property
    def microbatches(self) -> int:
        """The number of micro-batches in a batch."""
        return self.options.microbatches_on(self.ranks)

    @property
    def leaves_unused(self) -> bool:
        """Whether the stages of the first plan leave some parameter or some persistent buffer unused."""
        # Buffers with persistent=False do not count: many models hold such tables unread, and no checkpoint saves them.
        saved = self.module.state_dict(keep_vars=True).values()
        return not self.first.graph.held.issuperset(id(tensor) for tensor in saved if isinstance(tensor, Tensor))

    @property
    def graphs(self) -> list[StageGraph]:
        """The stages of all plans, each once."""
        return list({id(graph): graph for plan in self.by_pattern.values() for graph in plan.graphs}.values())

    @property
    def needs_shapes(self) -> bool:
        """Whether the stages are valid only for the shapes and the Python numbers with which they were captured."""
        return self.captures.questions.by_value or any(pattern.shapes for pattern in self.by_pattern)

    def with_captures(self, **changes: Any) -> Plans:
        """The plans with these changes of its captures."""
        return replace(self, captures=replace(self.captures, **changes))

    def at_present(self, objects: Mapping[ObjectValue, Any]) -> Plans:
        """The plans with the present values of the attributes that captures have read. ``objects``: more objects that
        captures take as inputs."""
        reads, present = self.captures.reads.at_present(), self.captures.objects
        if reads is self.captures.reads and not objects:
            return self
        return self.with_captures(reads=reads, objects={**present, **objects})

    def asking(self, error: Unanswered) -> Plans:
        """The plans after all ranks received the same question about their inputs."""
        return self.with_captures(questions=self.captures.questions.asking(error))

    def plan(self, pattern: Pattern, sample: Sample | str = LATER) -> tuple[Plans, Plan]:
        """Returns the plans with a plan for a pattern of inputs, and the plan.

        Args:
            pattern: the kind of batch.
            sample: the micro-batches on which new stages are checked against the model, or the reason for no check.

        Raises:
            TraceError: no tracer captures the model for these inputs.
            PartitionError: it cannot be cut, or its stages differ from the first plan's.
            ScheduleError: the schedule has no table for these stages.
            Unanswered: forward asks a question about the inputs; see ``asking``.
        """
        return self._plan(Capturing(pattern, sample))

    def plan_evaluation(self, pattern: Pattern, sample: Sample | str) -> Plans:
        """The plans with a plan that evaluates the example. Its stages may use tensors that no stage of the first plan
        uses: see ``holding_what_all_use``. If no plan can be made, the result only notes the tracers that failed."""
        capturing = Capturing(pattern, sample)
        try:
            return self._plan(capturing, at_compile=True)[0]
        except Unanswered:
            raise
        except FxpipeError:  # evaluate() raises the error again for such inputs
            return self.with_captures(wrong={**self.captures.wrong, **capturing.wrong})

    def _plan(self, capturing: Capturing, at_compile: bool = False) -> tuple[Plans, Plan]:
        """``plan`` for the pattern of ``capturing``. ``at_compile``: a stage may then use tensors that no stage of the
        first plan has."""
        pattern, is_traced = capturing.pattern, self.captures.source.own is None
        for shape in pattern.shapes if is_traced else ():
            check_objects(shape)
        # 1. and 2. A plan whose capture is valid for all shapes is stored under the pattern without shapes.
        if (same := self.by_pattern.get(pattern) or self.by_pattern.get(pattern.for_any_shape())) is not None:
            return self, same
        captures, captured = captured_for(self.captures, capturing)
        plans = replace(self, captures=captures, shown=self.shown or pattern)
        key = pattern if captured[0].guard.sizes else pattern.for_any_shape()
        # 3. Captures with symbolic sizes are valid for several patterns: patterns with the same captures share a plan.
        used = tuple(itertools.chain.from_iterable(each.guards for each in captured))
        alike = (key.training, key.microbatches, used)
        known = ((plan, (other.training, other.microbatches, plan.captures)) for other, plan in self.by_pattern.items())
        plan = next((plan for plan, facts in known if is_traced and facts == alike), None)
        # 4. to 6. A new plan places the stages on ranks, and chooses the table that the ranks run.
        if plan is None:
            graphs = plans._placed(captured, pattern.inputs)
            if pattern.training:
                check_hooks(union_of(graphs))
            program = "\n".join(dict.fromkeys(each.text for each in captured))
            plan = plans._scheduled(graphs, pattern, program, used, captured[0].places)
            if self.by_pattern:
                self._check_same_stages(plan, at_compile)
        for line in plans.captures.reports[len(self.captures.reports) :]:
            log(line)
        return replace(plans, by_pattern={**self.by_pattern, key: plan}), plan

    def holding_what_all_use(self) -> Plans:
        """The plans whose first plan's stages also hold the tensors that only later plans use: an evaluation head's."""
        (key, first), *later = self.by_pattern.items()
        ids, more = first.graph.held, dict[str, Mapping[str, Tensor]]()
        for stage in (stage for _, plan in later for stage in plan.graph):
            more[stage.name] = {name: tensor for name, tensor in stage.tensors.items() if id(tensor) not in ids}
        graphs = map_distinct(first.graphs, partial(_holding, more=more))
        return replace(self, by_pattern={**self.by_pattern, key: replace(first, graph=union_of(graphs), graphs=graphs)})

    def only(self, wanted: Collection[Plan]) -> Plans:
        """The plans with the first plan, these plans, and the captures that made them; the rest is dropped."""
        identities = {id(plan) for plan in (self.first, *wanted)}
        by_pattern = {pattern: plan for pattern, plan in self.by_pattern.items() if id(plan) in identities}
        used = {guard for plan in by_pattern.values() for guard in plan.captures}
        # row places are dropped: a later plan of the same pattern may come from another capture
        return replace(self, by_pattern=by_pattern, captures=self.captures.only(used), places={})

    def with_row_places(self, plan: Plan, pattern: Pattern) -> tuple[Plans, Places]:
        """Returns the plans, and the row dimensions of the values that a step of such micro-batches gathers, by their
        names in ``plan``. The plans remember the dimensions."""
        if plan.captures[0].sizes is not None:
            return self, plan.places
        key = pattern.for_any_shape(), *map(outline, pattern.shapes[:1])
        if key in self.places:
            return self, self.places[key]
        with progress("finding the rows of what is gathered"):
            places = places_of_rows(self.captures, plan.captures[0], pattern)
        return replace(self, places={**self.places, key: places}), places

    def _placed(self, captured: Sequence[Captured], inputs: Collection[str]) -> tuple[StageGraph, ...]:
        """The graphs of the micro-batches, with their stages placed on ranks; equal graphs remain one object."""
        # All micro-batches run one table. So stages have the first plan's numbers, a value has the same name in all
        # graphs, and the placement covers the stages of all micro-batches.
        graphs: Sequence[StageGraph] = [each.graph for each in captured]
        for graph in {id(graph): graph for graph in graphs}.values():
            check_replicas(graph, self.topology.size(BATCH))
        if self.by_pattern:
            graphs = map_distinct(graphs, lambda graph: adapted_to(graph, self.first.graph))
        graphs = with_shared_names(graphs)
        if not self.by_pattern:
            # Later captures are cut as the first capture was. A capture with symbolic sizes may have replaced it here.
            for captured_before in self.captures:
                more = {stage.name: stage.tensors for stage in captured_before.graph}
                graphs = map_distinct(graphs, partial(_holding, more=more))
        every = union_of(graphs)
        placement = place_stages(every, self.ranks, self._wanted(every))
        read = {name for stage in every for name in stage.batch_inputs}
        labels = self.items.note(inputs, read)
        placed = partial(replace, placement=placement, labels=labels)
        check_replicated(placed(every))
        return map_distinct(graphs, lambda graph: self._ready(placed(graph)))

    def _ready(self, graph: StageGraph) -> StageGraph:
        """The graph with its stages parallelized and compiled, as the options ask."""
        if self.adopt is not None:
            graph = self.adopt(graph)
        if self.options.stage_compiler is None:
            return graph
        stages = []
        for stage in graph:
            is_opaque = has_opaque_calls(stage.module)
            if is_opaque and not self.by_pattern:
                log(f"stage {stage.name!r} holds an opaque region, and runs unchanged, without stage_compiler=")
            stages.append(stage if is_opaque else compiled_lazily(stage, self.options.stage_compiler))
        return replace(graph, stages=tuple(stages))

    def rescheduled(self, family: Limited, note: Callable[[Plans], str] = lambda plans: "") -> tuple[Plans, Plan]:
        """Returns the plans with this family's tables for training, and its first plan; ``self`` if its table stays.

        The present table stays if it keeps the family's limits and the new table saves less than ``WORTH_IT`` of a
        step. Limits of the present family remain in force unless the new family sets others. Only tables change:
        stages, placement and captures stay, so no tensor moves. ``note``: a text about the plans, for the line on
        stderr.

        ScheduleError if the family has no such table.
        """
        if isinstance(self.options.schedule, Limited):
            family = family.or_else(self.options.schedule)
        options = replace(self.options, schedule=family, in_flight=None)  # ``or_else`` has kept its limit
        plans = replace(self, options=options, marks=marks_of(self.first.graph), by_pattern={})
        new_plans: dict[int, Plan] = {}
        # Plans of evaluation keep their tables: the costs were measured in training steps.
        for pattern, plan in self.by_pattern.items():
            if pattern.training and id(plan) not in new_plans:
                new_plans[id(plan)] = plans._scheduled(plan.graphs, pattern, plan.program, plan.captures, plan.places)
            plans = replace(plans, by_pattern={**plans.by_pattern, pattern: new_plans.get(id(plan), plan)})
        # Both tables are simulated at the new costs: the present table was made for other costs.
        present, new = self.first.schedule, plans.first.schedule
        before, after = (table.simulate(family.costs or 1).makespan for table in (present, new))
        costed = replace(family, costs=new.costs or family.costs)  # may add bytes from shapes
        placed = present.edges, present.microbatches, present.placement, present.backward
        problem = Problem(*placed, costed.costs or Costs.of(len(present.placement)), groups=present.groups)
        stays = in_numbers(costed, problem).excess(present) is None and after > before * (1 - WORTH_IT)
        chosen, left = ((present, before), (new, after)) if stays else ((new, after), (present, before))
        times = f"{chosen[0].name}, {in_ms(chosen[1])} ms planned, in place of {left[0].name}, {in_ms(left[1])} ms"
        plans = self if stays else plans
        log("; ".join(filter(None, [f"fxpipe: {'kept' if stays else 'took'} {times}", note(plans)])))
        return plans, plans.first

    def with_tensors_of_module(self, adopt: Callable[[StageGraph], StageGraph] | None = None) -> Plans:
        """The same plans, whose stages hold the module's present tensors and release the tensors that it dropped.

        ``adopt``: makes these stages, and the stages of later plans, run the modules that ``parallelize`` returned.
        """
        plans = replace(self, captures=self.captures.with_tensors_of_module(), adopt=adopt or self.adopt)

        def taken_up(plan: Plan) -> Plan:
            graphs = map_distinct(plan.graphs, lambda graph: plans._ready(graph.with_tensors_of_module()))
            return replace(plan, graph=union_of(graphs), graphs=graphs)

        return replace(plans, by_pattern={pattern: taken_up(plan) for pattern, plan in self.by_pattern.items()})

    def _wanted(self, graph: StageGraph) -> Mapping[str, Any] | None:
        """The rank of each stage: from the first plan, the user's table, ``placement`` or the search, in this order."""
        searched, table = self.captures.searched, self.options.schedule
        ranks: Placement | None
        if self.by_pattern and graph.names == self.first.graph.names:
            ranks = self.first.graph.placement
        elif isinstance(table, Schedule):
            ranks = table.placement
        elif self.options.placement is not None:
            return self.options.placement
        else:
            balancing = self.captures.source.balancing
            ranks = balancing.placement_of(len(graph)) if searched is None else searched.placement
        if ranks is None:
            return None
        if len(ranks) != len(graph):
            raise ScheduleError(f"the schedule is for {len(ranks)} stages, the model has {len(graph)}")
        return dict(zip(graph.names, ranks, strict=True))

    def _scheduled(
        self,
        graphs: tuple[StageGraph, ...],
        pattern: Pattern,
        program: str,
        captures: tuple[Guard, ...],
        places: Places,
    ) -> Plan:
        """The plan that runs the table chosen for these graphs.

        1. Choose the table. 2. Leave out messages that a micro-batch lacks. 3. Lower the table to each rank's
           instructions. 4. Prove that they run without deadlock. 5. Split the backwards that the table splits.

        Args:
            graphs: the placed stages of each micro-batch.
            pattern: the kind of batch.
            program: the captured program as text, for ``Plan.description``.
            captures: the guards of the graphs' captures.
            places: the row dimensions of gathered values.
        """
        schedule, choice = choose_table(self, union_of(graphs), pattern)  # 1. the table
        if BY_LAYERS in choice:
            graphs = map_distinct(graphs, lambda each: checkpointed(each, choice))
        graph = union_of(graphs)
        ahead, values = schedule.dependencies.ahead, values_of(graphs)
        # 2. The (edge, micro-batch) pairs without a message: a text-only micro-batch has no image features.
        lacking = {id(each): [i for i, edge in enumerate(graph.edges) if edge not in each.edges] for each in graphs}
        absent = {(index, microbatch) for microbatch, each in enumerate(graphs) for index in lacking[id(each)]}
        # 3. to 5. lower, prove, split
        instructions = lower(
            schedule.rows, graph.edges, schedule.placement, schedule.backward, schedule.tied, ahead, values, absent
        )
        order = prove(schedule, instructions, graph.edges)
        if pattern.training:
            graphs = self._in_halves(graphs, schedule)
        again, host = (
            frozenset(graph.names[stage] for stage, _ in halves)
            for halves in (schedule.dependencies.recomputed, schedule.dependencies.offloaded)
        )
        graphs = map_distinct(graphs, lambda each: replace(each, recomputed=again, offloaded=host))
        return Plan(union_of(graphs), graphs, schedule, instructions, tuple(order), program, captures, places)

    def _in_halves(self, graphs: tuple[StageGraph, ...], schedule: Schedule) -> tuple[StageGraph, ...]:
        """The graphs in which exactly the stages that the table runs as I and W can defer weight gradients to W."""
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
            # The pass cannot cut a compiler's own graphs, so AOTAutograd cuts a compiled stage.
            for index in split:
                stage, compiled = stages[index], stages[index].function
                stages[index] = (
                    replace(stage, deferring=compiled.in_halves)
                    if isinstance(compiled, Compiled)
                    else defer_weights(stage)
                )
            return replace(graph, stages=tuple(stages))

        return map_distinct(graphs, halved)

    def _check_same_stages(self, plan: Plan, at_compile: bool) -> None:
        """PartitionError if a stage of a later plan uses a tensor that this stage does not hold in the first plan."""
        # A tensor that no rank holds at compile would have no owner, no gradient bucket and no entry in a checkpoint.
        ids = self.first.graph.held
        for before, after in zip(self.first.graph, plan.graph, strict=True):
            own = before.held
            moved = sorted(name for name, tensor in after.tensors.items() if id(tensor) not in own)
            if moved and not (at_compile and ids.isdisjoint(id(after.tensors[name]) for name in moved)):
                part = _choosing(moved[0], before, self.first.graph, self.module)
                instead = (
                    f"keep {part} whole" if part else "keep whole a method or a submodule with the code that chooses"
                )
                raise PartitionError(
                    f"this kind of batch uses {moved[0]} in stage {after.name}, which the first kind did not; use "
                    f"example_args= of the kind that uses most of the model, or {instead}, so that its stage has all "
                    f'of it: boundaries={{"{part or "its name"}": "whole"}}'
                )


def _choosing(name: str, stage: Stage, graph: StageGraph, model: nn.Module) -> str:
    """The innermost submodule with a forward that holds a tensor of the name and tensors of the stage, and none of
    another stage; "" if no submodule does."""
    path = name
    while path := path.rpartition(".")[0]:
        users = {each.index for each in graph if any(used.startswith(f"{path}.") for used in each.tensors)}
        if users and type(model.get_submodule(path)).forward is not nn.Module.forward:
            return path if users == {stage.index} else ""
    return ""


def _holding(graph: StageGraph, more: Mapping[str, Mapping[str, Tensor]]) -> StageGraph:
    """The graph with more tensors in its stages. ``more``: stage name → tensors."""

    def wider(stage: Stage) -> Stage:
        here = stage.held
        others = {name: tensor for name, tensor in more.get(stage.name, {}).items() if id(tensor) not in here}
        return replace(stage, tensors={**stage.tensors, **others})

    return replace(graph, stages=tuple(map(wider, graph)))
