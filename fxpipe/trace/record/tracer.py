"""The record tracer: runs forward on fake tensors, and keeps submodules that hold no boundary opaque.

Takes: a ``Request`` with an example. Gives: a ``Program`` that is valid for the example's shapes. It has one node for
each opaque submodule, and one for each torch function between them.

1. Fake tensors replace parameters and buffers, and snapshots keep the model's attributes.
2. Forward runs by a ``RunPlan``. A ``Recorder`` writes its operations on a tape, and ``Calls`` decides which calls are
   opaque.
3. ``better_plan`` looks for obstacles. If another plan avoids them, the run is thrown away, and step 2 repeats with
   this plan. Plans only grow, so the loop ends. If none avoids them, the first obstacle is the TraceError.
4. ``Emitter`` turns the tape into a graph.
5. The model gets its tensors and attributes back.

An opaque submodule runs as in the model itself, with its hooks, its control flow and its activation checkpointing. Only
the code between opaque submodules must do without. Without any boundary, a submodule is opaque if its parameters have
at most 1/32 of the bytes, so that a search can cut between submodules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError, TraceError
from fxpipe.graph.boundary import recording
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.seeds import RandomState
from fxpipe.snapshots.snapshot import Snapshot
from fxpipe.stage.modes import within
from fxpipe.stage.opaque_call import PLAIN_LEAF
from fxpipe.torch_compat import pytree
from fxpipe.trace.cuts.cutting import check_boundaries, cutting
from fxpipe.trace.fake import FakeModel, fake_model, refuse_objects
from fxpipe.trace.opaque.region_calls import Regions
from fxpipe.trace.patching import as_in_run, refuse_changes
from fxpipe.trace.record.calls import Calls, RunPlan
from fxpipe.trace.record.emit import Emitter
from fxpipe.trace.record.recorder import Recorder, SetAttribute
from fxpipe.trace.record.tape import ModesNow, NamedSource, Obstacle, Operation, TapeValue, paths
from fxpipe.trace.request import Request
from fxpipe.user_line import definition, line_of

_FINE = 32
"""Without a boundary, a submodule is opaque if its parameters have at most 1/32 of the bytes of the model's tensors."""


@as_in_run
def record(request: Request) -> Program:
    """Captures a model by running it on fake tensors.

    Raises:
        TraceError: for code between submodules that it cannot record, with the user's line.
    """
    assert request.example is not None
    refuse_objects(request.example)
    random = RandomState(own=request.generators)
    plan = RunPlan(request.around_layers)
    try:
        with within(request.autocast):
            # each plan adds to the plan before; descend only grows, so the loop ends
            while True:
                captured = _capture(request, plan)
                if isinstance(captured, Program):
                    return captured
                plan = captured
    finally:
        random.rewind()


def _capture(request: Request, plan: RunPlan) -> Program | RunPlan:
    """Runs forward by the plan, and returns the program, or a better plan. The model is unchanged afterwards.

    With ``plan.settled`` forward runs once beforehand. Attributes that it sets only in its first call, as transformers'
    models install hooks, then stay unchanged in the recorded run.
    """
    _refuse_scripted(request.module)
    real = all_tensors(request.module)
    with fake_model(request.module, request.device, request.compute) as fake, contextlib.ExitStack() as stack:
        # 1. snapshots, which (5.) the stack restores
        untouched = [stack.enter_context(Snapshot(root)) for root in request.roots]
        # attributes that forward sets in its first call alone stay unchanged in the second call
        earlier: list[SetAttribute] = []
        if plan.settled:
            first = _RecordedRun(request, plan, fake, real, untouched)
            first.forward()
            earlier = first.recorder.sets
        # 2. the recorded run
        before = [Snapshot(root) for root in request.roots]
        run = _RecordedRun(request, plan, fake, real, before)
        run.forward()
        changed = [name for snapshot in before for name in snapshot.changes()]
        # 3. and 4. another plan, or the graph
        return run.better_plan(changed, earlier) or run.program()


class _RecordedRun:
    """One run of forward on fake tensors, with its recorder."""

    def __init__(
        self,
        request: Request,
        plan: RunPlan,
        fake: FakeModel,
        real: Mapping[str, Tensor],
        before: Sequence[Snapshot],
    ) -> None:
        self._request, self._plan, self._real = request, plan, real
        stand_ins = {_known(fake, name, tensor): tensor for name, tensor in all_tensors(request.module).items()}
        # a meta tensor is on another rank; request.numbers has the buffer's values from before it moved there
        numbers = {**real, **{name: values for name, values in request.numbers.items() if real[name].is_meta}}
        real_of = {id(tensor): numbers[name] for name, tensor in stand_ins.items()}
        self.recorder = Recorder(fake, real, stand_ins, request.generators, before if plan.watch else ())
        self._calls = Calls(self.recorder, request, plan, real_of)
        is_value, calls = (lambda leaf: isinstance(leaf, Tensor)), self._calls
        self._regions = Regions(request, is_value, calls.keep_region, calls.rehearses)
        self._around = ModesNow.current()

    def forward(self) -> None:
        """Runs the call on fake inputs, and keeps its result on the tape's terms. TraceError for an error inside
        forward."""
        request, recorder, calls = self._request, self.recorder, self._calls
        assert request.example is not None
        values = recorder.fake.inputs(request.example, request.any_words)
        self._sources = [NamedSource("placeholder", name, value) for name, value in values.items()]
        for source in self._sources:
            for path, leaf in paths(source.result):
                if isinstance(leaf, Tensor):
                    recorder.name(leaf, TapeValue(source, path))
        try:
            with recorder.fake.mode, recorder.touched, calls.watched(), recorder:
                cuts = cutting(request.module, request.cuts, request.may_lack_cuts)
                with recording(recorder.record_boundary), self._regions.as_nodes(), cuts:
                    output = request.wanted(request.call(values))
                calls.write_buffers()
                recorder.check_random()
                result = pytree.tree_map(lambda leaf: _leaf(recorder, leaf), output)
        except FxpipeError:
            raise
        except Exception as error:
            fact, line = f"the record tracer cannot follow the model: {type(error).__name__}: {error}", line_of(error)
            raise TraceError("\n".join([fact, *([line] if line else [])])) from error
        self._flat, self._spec = pytree.tree_flatten(result)

    def better_plan(self, changed: Sequence[str], earlier: Sequence[SetAttribute]) -> RunPlan | None:
        """A better plan, or None if this run suffices; TraceError for a problem that no other plan solves.

        ``changed``: the attributes that the run changed. ``earlier``: the attributes that the run beforehand set.
        """
        plan, recorder, calls = self._plan, self.recorder, self._calls
        problems = [entry for entry in recorder.tape if isinstance(entry, Obstacle)]
        # 1. Submodules that cannot be opaque. Better plans come before refusals: an obstacle may be inside of an opaque
        # call in the next run.
        descend = {problem.descend for problem in problems if problem.descend is not None} - plan.descend
        if descend:
            return replace(plan, descend=plan.descend | descend)
        # 2. Obstacles that no plan avoids.
        if problems:
            raise TraceError(problems[0].message)
        # 3. Without a boundary the model itself would be one opaque call, and "auto" could cut nowhere.
        if not recorder.boundaries and plan.limit is None:
            size = sum(tensor.numel() * tensor.element_size() for tensor in self._real.values())
            return replace(plan, limit=size // _FINE)
        model, opaque = self._request.module, tuple(f"{path}." for path in calls.whole)
        sets = [*earlier, *recorder.sets]
        # 4. Attributes that forward changes outside of opaque calls: perhaps it does so in its first call only. Opaque
        # calls set attributes in every step, as in the model
        excused = recorder.set_inside - {change.name for change in sets}
        lost = [name for name in changed if name not in excused and not name.startswith(opaque)]
        if lost and not plan.watch:
            return replace(plan, settled=True, watch=plan.settled)
        if lost:
            refuse_changes(model, lost, _KEEP_IT, next((change.line for change in sets if change.name == lost[0]), ""))
        for name, line, is_other in sets:
            if is_other and name.startswith(opaque):
                raise TraceError(_RESET.format(name=name, line=line or definition(model.forward)))
        return None

    def program(self) -> Program:
        """The program of the tape. The number of its boundaries is compared with the number that forward reached."""
        recorder, calls = self.recorder, self._calls
        opaque = {**calls.opaque, **self._regions.opaque}
        emitter = Emitter(self._request.module, opaque, recorder.storages, recorder.fake.bare)
        operations = [entry for entry in recorder.tape if isinstance(entry, Operation)]
        graph = emitter.graph(operations, self._sources, self._flat, self._around)
        check_boundaries(graph, recorder.boundaries)
        used = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
        return Program(
            self._request.module,
            graph,
            constants={name: tensor for name, tensor in recorder.constants.items() if name in used},
            tracer="record",
            result=self._spec,
            opaque={name: part for name, part in emitter.opaque.items() if name in used},
            effects=emitter.effects,
            sets=calls.own.taken,
        )


_KEEP_IT = (
    "return the value instead, keep it in a buffer (register_buffer), or set it inside a submodule that holds no "
    "boundary, which then runs as a whole"
)
_RESET = (
    "forward sets {name} from outside of that submodule, which is called as a whole and in a pipeline would keep the "
    "value that it had before; set it before the model is compiled, or inside that submodule's forward\n{line}"
)


def _known(fake: FakeModel, name: str, tensor: Tensor) -> str:
    """The name of the parameter or buffer that a fake tensor replaces; TraceError if forward put the tensor there."""
    if id(tensor) not in fake.names:
        raise TraceError(
            f"forward registers {name!r}, or sets it to a tensor of another shape; register it in __init__, with the "
            "shape and type that it keeps, and write into it in place"
        )
    return fake.names[id(tensor)]


def _refuse_scripted(module: nn.Module) -> None:
    """TraceError for a TorchScript module: its tensors are new objects at each access, so that no table knows them."""
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise TraceError(
                f"{path or type(module).__name__} is a TorchScript module, whose parameters cannot be distinguished; "
                "use the module that it was made from"
            )


def _leaf(recorder: Recorder, leaf: Any) -> Any:
    """The graph's value for a leaf of the model's result; None for an object that is neither tensor nor plain value."""
    if isinstance(leaf, Tensor):
        return recorder.value_of(leaf)
    return leaf if isinstance(leaf, PLAIN_LEAF) else None
