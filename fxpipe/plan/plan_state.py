"""``PlanState``: an immutable value that holds the plans made so far and everything needed to make the next plan."""

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
from fxpipe.batch.pattern import Flags, Pattern, modules_of, parameters_in
from fxpipe.capture.captures import LATER, Captures
from fxpipe.capture.capturing import Capturing
from fxpipe.capture.guard import Captured, Guard
from fxpipe.capture.same_stages import called_alike, captured_for, each_once, joint, like, places_of_rows
from fxpipe.distributed.grid import BATCH
from fxpipe.distributed.topology import Topology
from fxpipe.errors import FxpipeError, PartitionError, ScheduleError
from fxpipe.graph.cuts import Cuts
from fxpipe.graph.gathering import Places
from fxpipe.graph.question import Unanswered
from fxpipe.graph.ranks import Placement
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.like import ObjectValue
from fxpipe.options import Options
from fxpipe.passes.defer_weights import defer_weights
from fxpipe.plan.placement import check_hooks, check_replicas, check_replicated, place_stages
from fxpipe.plan.plan import Plan, Planned, values_of
from fxpipe.plan.stage_compiler import Compiled, compiled_lazily
from fxpipe.plan.tables import choose_table
from fxpipe.progress import log, progress
from fxpipe.schedules import Limited
from fxpipe.schedules.lower import lower
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.stage_work import in_ms
from fxpipe.schedules.verify import prove
from fxpipe.stage.opaque_call import has_opaque_calls
from fxpipe.trace import Request
from fxpipe.trace.checks.capture_check import Sample
from fxpipe.trace.checks.sizes import outline

WORTH_IT = 0.01
"""The least fraction of a step's time that a new table must save to replace the present table; less is noise."""


@dataclass(frozen=True, eq=False)
class PlanState(Planned):
    """The planner's knowledge of a model (or of the user's own stage graph) on a topology. Making a plan returns a new
    state; if a rank fails to make the plan, all ranks keep the old state."""

    places: Mapping[Hashable, Places] = field(default_factory=dict)
    """The row dimensions of gathered values, for each kind of batch."""
    adopt: Callable[[StageGraph], StageGraph] | None = None
    """Makes a graph's stages run the modules that ``parallelize`` returned; None before ``parallelize`` was called."""

    @staticmethod
    def empty(model: nn.Module | StageGraph, options: Options, topology: Topology, device: torch.device) -> PlanState:
        """The state before the first plan. ``device``: the device on which a model without a device will run."""
        options = options.for_calls()
        return PlanState(topology, options, Captures.empty(model, options, topology, device))

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
        return Items.of(self.module if own is None else own.graph, given)

    @property
    def flags(self) -> Flags:
        """The facts of the model on which captures depend: training flags, ``requires_grad`` and attributes read."""
        modules = modules_of(self.module)
        training = bytes([module.training for module in modules])
        trainable = bytes([parameter.requires_grad for parameter in parameters_in(modules)])
        return Flags(training, trainable, self.captures.reads.number)

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
        return list({id(graph): graph for plan in self.plans.values() for graph in plan.graphs}.values())

    @property
    def needs_shapes(self) -> bool:
        """Whether the stages are valid only for the shapes and the Python numbers with which they were captured."""
        return self.captures.questions.by_value or any(pattern.shapes for pattern in self.plans)

    def with_captures(self, **changes: Any) -> PlanState:
        """The state with these changes of its captures."""
        return replace(self, captures=replace(self.captures, **changes))

    def at_present(self, objects: Mapping[ObjectValue, Any]) -> PlanState:
        """The state with the present values of the attributes that captures have read. ``objects``: more objects that
        captures take as inputs."""
        reads, present = self.captures.reads.at_present(), self.captures.objects
        if reads is self.captures.reads and not objects:
            return self
        return self.with_captures(reads=reads, objects={**present, **objects})

    def asking(self, error: Unanswered) -> PlanState:
        """The state after all ranks received the same question about their inputs."""
        return self.with_captures(questions=self.captures.questions.asking(error))

    def plan(self, pattern: Pattern, sample: Sample | str = LATER) -> tuple[PlanState, Plan]:
        """Returns the state with a plan for a pattern of inputs, and the plan. TraceError, PartitionError or
        ScheduleError if no plan can be made.

        ``sample``: the micro-batches on which new stages are checked against the model, or the reason for no check.
        """
        return self._plan(Capturing(pattern, sample))

    def plan_evaluation(self, pattern: Pattern, sample: Sample | str) -> PlanState:
        """The state with a plan that evaluates the example. Its stages may use tensors that no stage of the first plan
        uses: see ``holding_what_all_use``. If no plan can be made, the state only notes the tracers that failed."""
        capturing = Capturing(pattern, sample)
        try:
            return self._plan(capturing, at_compile=True)[0]
        except Unanswered:
            raise
        except FxpipeError:  # evaluate() raises the error again for such inputs
            return self.with_captures(wrong={**self.captures.wrong, **capturing.wrong})

    def _plan(self, capturing: Capturing, at_compile: bool = False) -> tuple[PlanState, Plan]:
        pattern, is_traced = capturing.pattern, self.captures.source.own is None
        for shape in pattern.shapes if is_traced else ():
            check_objects(shape)
        # 1. A plan whose capture is valid for all shapes is stored under the pattern without shapes.
        if (same := self.plans.get(pattern) or self.plans.get(pattern.for_any_shape())) is not None:
            return self, same
        captures, captured = captured_for(self.captures, capturing)
        state = replace(self, captures=captures, shown=self.shown or pattern)
        key = pattern if captured[0].guard.sizes else pattern.for_any_shape()
        # 2. Captures with symbolic sizes are valid for several patterns: patterns with the same captures share a plan.
        used = tuple(itertools.chain.from_iterable(each.guards for each in captured))
        alike = (key.training, key.microbatches, used)
        plans = ((plan, (other.training, other.microbatches, plan.captures)) for other, plan in self.plans.items())
        plan = next((plan for plan, facts in plans if is_traced and facts == alike), None)
        # 3. A new plan places the stages on ranks, and chooses the table that the ranks run.
        if plan is None:
            graphs = state._placed(captured, pattern.inputs)
            if pattern.training:
                check_hooks(joint(graphs))
            program = "\n".join(dict.fromkeys(each.text for each in captured))
            plan = state._scheduled(graphs, pattern, program, used, captured[0].places)
            if self.plans:
                self._check_same_stages(plan, at_compile)
        for line in state.captures.reports[len(self.captures.reports) :]:
            log(line)
        return replace(state, plans={**self.plans, key: plan}), plan

    def holding_what_all_use(self) -> PlanState:
        """The state whose first plan's stages also hold the tensors that only later plans use: an evaluation head's."""
        (key, first), *later = self.plans.items()
        ids, more = first.graph.held, dict[str, Mapping[str, Tensor]]()
        for stage in (stage for _, plan in later for stage in plan.graph):
            more[stage.name] = {name: tensor for name, tensor in stage.tensors.items() if id(tensor) not in ids}
        graphs = each_once(first.graphs, partial(_holding, more=more))
        return replace(self, plans={**self.plans, key: replace(first, graph=joint(graphs), graphs=graphs)})

    def only(self, wanted: Collection[Plan]) -> PlanState:
        """The state with the first plan, these plans, and the captures that made them; the rest is dropped."""
        identities = {id(plan) for plan in (self.first, *wanted)}
        plans = {pattern: plan for pattern, plan in self.plans.items() if id(plan) in identities}
        used = {guard for plan in plans.values() for guard in plan.captures}
        # row places are dropped: a later plan of the same pattern may come from another capture
        return replace(self, plans=plans, captures=self.captures.only(used), places={})

    def with_row_places(self, plan: Plan, pattern: Pattern) -> tuple[PlanState, Places]:
        """Returns a state, and the row dimensions of the values that a step of such micro-batches gathers, by their
        names in ``plan``. The state remembers the dimensions."""
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
        for graph in graphs:
            check_replicas(graph, self.topology.size(BATCH))
        if self.plans:
            graphs = each_once(graphs, lambda graph: like(graph, self.first.graph))
        graphs = called_alike(graphs)
        if not self.plans:
            # Later captures are cut as the first capture was. A capture with symbolic sizes may have replaced it here.
            for captured_before in self.captures:
                more = {stage.name: stage.tensors for stage in captured_before.graph}
                graphs = each_once(graphs, partial(_holding, more=more))
        every = joint(graphs)
        placement = place_stages(every, self.ranks, self._wanted(every))
        read = {name for stage in every for name in stage.batch_inputs}
        labels = self.items.note(inputs, read)
        placed = partial(replace, placement=placement, labels=labels)
        check_replicated(placed(every))
        return each_once(graphs, lambda graph: self._ready(placed(graph)))

    def _ready(self, graph: StageGraph) -> StageGraph:
        """The graph with its stages parallelized and compiled, as the options ask."""
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

    def rescheduled(self, family: Limited) -> tuple[PlanState, Plan]:
        """Returns the state with this family's tables for training, and its first plan; ``self`` if its table stays.

        The present table stays if it keeps the family's limits and the new table saves less than ``WORTH_IT`` of a
        step. Limits of the present family remain in force unless the new family sets others. ScheduleError if the
        family has no such table.
        """
        if isinstance(self.options.schedule, Limited):
            family = family.or_else(self.options.schedule)
        options = replace(self.options, schedule=family)
        state = replace(self, options=options, again=self.first.graph.recomputed, plans={})
        new_plans: dict[int, Plan] = {}
        # Plans of evaluation keep their tables: the costs were measured in training steps.
        for pattern, plan in self.plans.items():
            if pattern.training and id(plan) not in new_plans:
                new_plans[id(plan)] = state._scheduled(plan.graphs, pattern, plan.program, plan.captures, plan.places)
            state = replace(state, plans={**state.plans, pattern: new_plans.get(id(plan), plan)})
        # Both tables are simulated at the new costs: the present table was made for other costs.
        present, new = self.first.schedule, state.first.schedule
        before, after = (table.simulate(family.costs or 1).makespan for table in (present, new))
        costed = replace(family, costs=new.costs or family.costs)  # may add bytes from shapes
        stays = costed.excess(present) is None and after > before * (1 - WORTH_IT)
        chosen, left = ((present, before), (new, after)) if stays else ((new, after), (present, before))
        times = f"{chosen[0].name}, {in_ms(chosen[1])} ms planned, in place of {left[0].name}, {in_ms(left[1])} ms"
        log(f"fxpipe: {'kept' if stays else 'took'} {times}")
        state = self if stays else state
        return state, state.first

    def with_tensors_of_module(self, adopt: Callable[[StageGraph], StageGraph] | None = None) -> PlanState:
        """The same plans, whose stages hold the module's present tensors and release the tensors that it dropped.

        ``adopt``: makes the stages, and those of later plans, run the modules that ``parallelize`` returned.
        """
        state = replace(self, captures=self.captures.with_tensors_of_module(), adopt=adopt or self.adopt)

        def taken_up(plan: Plan) -> Plan:
            graphs = each_once(plan.graphs, lambda graph: state._ready(graph.with_tensors_of_module()))
            return replace(plan, graph=joint(graphs), graphs=graphs)

        return replace(state, plans={pattern: taken_up(plan) for pattern, plan in self.plans.items()})

    def _wanted(self, graph: StageGraph) -> Mapping[str, Any] | None:
        """The rank of each stage: from the first plan, the user's table, ``placement`` or the search, in this order."""
        searched, table = self.captures.searched, self.options.schedule
        ranks: Placement | None
        if self.plans and graph.names == self.first.graph.names:
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
        """The plan that runs the table chosen for these graphs. ``captures``: the guards of the graphs' captures."""
        graph = joint(graphs)
        schedule = choose_table(self, graph, pattern)
        ahead, values = schedule.dependencies.ahead, values_of(graphs)
        # The (edge, micro-batch) pairs without a message: a text-only micro-batch has no image features.
        lacking = {id(each): [i for i, edge in enumerate(graph.edges) if edge not in each.edges] for each in graphs}
        absent = {(index, microbatch) for microbatch, each in enumerate(graphs) for index in lacking[id(each)]}
        instructions = lower(
            schedule.rows, graph.edges, schedule.placement, schedule.backward, schedule.tied, ahead, values, absent
        )
        order = prove(schedule, instructions, graph.edges)
        if pattern.training:
            graphs = self._in_halves(graphs, schedule)
        again = frozenset(graph.names[stage] for stage, _ in schedule.dependencies.recomputed)
        graphs = each_once(graphs, lambda each: replace(each, recomputed=again))
        return Plan(joint(graphs), graphs, schedule, instructions, tuple(order), program, captures, places)

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

        return each_once(graphs, halved)

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
