"""Parallelise: ``compile(parallelize=)``, what a user's function does to the stages of a rank, and how they run then.

The function is given a copy of each stage's module: modules of its own, and the model's very tensors. The tensors that
it makes (DTensors) take the old ones' places in the model, under the same names. What it does to the modules (hooks,
wrappers, other classes) stays in the copies, which are what runs. So the model keeps its names, and a later capture, of
another kind of batch, sees the model as it was built: it makes new code, which calls the copies by the modules' names.
"""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Groups, Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.awaiting import Waits
from fxpipe.graph.stage_calls import check_shapes
from fxpipe.graph.stage_graph import Stage, StageGraph, all_tensors
from fxpipe.parameters.dtensors import description_of, is_dtensor, ranks_of
from fxpipe.parameters.ownership import Ownership, replace_tensors
from fxpipe.schedules.action import Action
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.sharding.reducer import Reducer, Shared
from fxpipe.torch_compat import pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fxpipe.sharding.fsdp import FsdpStage

Parallelize = Callable[[nn.Module, "DeviceMesh | None"], None]


def tensor_groups(topology: Topology) -> Groups:
    """The groups of the tensor axis, for ``Transport.open``."""
    return {"tensor": topology.groups("tensor")} if topology.size("tensor") > 1 else {}


def parallelise_stages(
    graph: StageGraph, topology: Topology, transport: Transport, parallelize: Parallelize, owners: Ownership
) -> Parallel:
    """Has ``parallelize`` work on the stages of this rank, and puts the tensors that it made into ``graph.module``.

    A collective call of all ranks, once every rank's parameters have their values, and before an optimizer, or
    anything else, holds on to them. One process that plays all ranks passes None in place of the mesh.

    Raises:
        RunError: a stage's module cannot be copied; or what ``parallelize`` did cannot run in a pipeline.
    """
    copies = {
        stage.index: _copy_of(stage, graph)
        for stage in graph
        if transport.pipe_rank in (None, *graph.ranks(stage.index)) and isinstance(stage.module, nn.Module)
    }
    mesh = None if transport.pipe_rank is None else topology.mesh
    for copied in copies.values():
        parallelize(copied.module, mesh)
    changed = _changed(graph, copies)
    _check_meshes(changed, graph, topology, transport)
    replace_tensors(graph.module, changed)
    _check_tied(graph.module, owners, transport)
    sharded: dict[int, FsdpStage] = {}
    if mesh is not None:
        from fxpipe.sharding.fsdp import sharded_stages  # it imports FSDP2, which takes its time

        sharded = sharded_stages({stage: copied.module for stage, copied in copies.items()})
    return Parallel(copies, sharded)


# --- the copies that it works on


@dataclass(frozen=True)
class _StageCopy:
    """``original``: the module that was copied. ``module``: the copy. ``prefix``: what the model's names have in front
    of the copy's own. ``twins``: (a module of the model, its copy)."""

    original: nn.Module
    module: nn.Module
    prefix: str
    twins: tuple[tuple[nn.Module, nn.Module], ...]

    def held(self, name: str) -> Any:
        """What the copy now has under one of the model's names; None where that is nothing.

        Wrappers of modules hand on what they have not, so that the name need not list them.
        """
        try:
            return attrgetter(name.removeprefix(self.prefix))(self.module)
        except AttributeError:
            return None


def _copy_of(stage: Stage, graph: StageGraph) -> _StageCopy:
    """A copy of a stage's module. RunError where a part of it cannot be copied."""
    module = stage.module
    assert isinstance(module, nn.Module)
    # deepcopy takes what is in its memo for copied already: tensors stay the model's, modules are new.
    tensors = [*all_tensors(graph.module).values(), *all_tensors(module).values()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise RunError(
            f"parallelize= works on copies of modules that share their tensors, but one in stage {stage.name} cannot "
            f"be copied: {type(error).__name__}: {error}; give it a __deepcopy__, or keep what cannot be copied out of "
            "its attributes"
        ) from error
    twins = tuple((part, memo[id(part)]) for part in module.modules() if id(part) in memo)
    is_users = graph.module._modules.get(stage.name) is module  # and no code of a capture
    return _StageCopy(module, made, f"{stage.name}." if is_users else "", twins)


# --- what it has done to them


def _changed(graph: StageGraph, copies: Mapping[int, _StageCopy]) -> dict[int, Tensor]:
    """id of a tensor of the model → what has taken its place in the stages of this rank."""
    changed: dict[int, Tensor] = {}
    users: dict[int, str] = {}
    for index, copied in copies.items():
        stage = graph[index]
        for name, old in stage.tensors.items():
            new = copied.held(name)
            if not isinstance(new, Tensor) or isinstance(new, nn.Parameter) != isinstance(old, nn.Parameter):
                raise RunError(
                    f"parallelize has left stage {stage.name} with {_kind(new)} in place of {_kind(old)} {name}; keep "
                    "parameters and buffers under the names that they have in the model, and parametrise before compile"
                )
            if new.shape != old.shape:
                raise RunError(f"parallelize has made {list(new.shape)} of {name}, whose shape is {list(old.shape)}")
            if changed.get(id(old), new) is not new:
                if users[id(old)] == stage.name:
                    raise RunError(
                        f"{name} is tied, and parallelize has made two tensors of it; distribute it once, and put the "
                        "same parameter in both places"
                    )
                # Each stage has modules of its own, so two of them cannot share a DTensor.
                raise RunError(
                    f"{name} is used by the stages {users[id(old)]} and {stage.name} of one rank, and parallelize has "
                    "changed it in one of them; place them on different ranks (placement=), or cut the model elsewhere"
                )
            changed[id(old)], users[id(old)] = new, stage.name
        known = {id(tensor) for tensor in (*changed.values(), *stage.tensors.values())}
        for name, parameter in copied.module.named_parameters(remove_duplicate=False):
            if id(parameter) not in known:
                raise RunError(
                    f"parallelize has given stage {stage.name} a parameter that the model lacks, {name}; add it to the "
                    "model before fxpipe.compile"
                )
    return changed


def _kind(value: object) -> str:
    return "a parameter" if isinstance(value, nn.Parameter) else "a buffer" if isinstance(value, Tensor) else "nothing"


def _check_meshes(changed: Mapping[int, Tensor], graph: StageGraph, topology: Topology, transport: Transport) -> None:
    """A DTensor lies on ranks that run the same stages, and, of its data group, on all or on one alone."""
    if transport.pipe_rank is None:
        return
    names = {id(tensor): name for name, tensor in reversed(all_tensors(graph.module).items())}
    apart = {rank for group in topology.groups("pipe") for rank in group[transport.pipe_rank : transport.pipe_rank + 1]}
    data = set(transport.ranks("data"))
    # Over a part of the data axis, some replicas would be summed by the mesh and others by nobody.
    for key, tensor in changed.items():
        if not is_dtensor(tensor):
            continue
        ranks, name = ranks_of(tensor), names.get(key, "a parameter")
        if not ranks <= apart:
            raise RunError(
                f"parallelize has spread {name} over ranks {sorted(ranks)}, but only ranks {sorted(apart)} run its "
                f'stage; name the axes of the mesh, as in fully_shard(module, mesh=mesh["data"])'
            )
        if 1 < len(ranks & data) < len(data):
            raise RunError(
                f"parallelize has spread {name} over ranks {sorted(ranks & data)} of the data group {sorted(data)}; "
                "use all of the data axis, or none of it"
            )


def _check_tied(model: nn.Module, owners: Ownership, transport: Transport) -> None:
    """The owners of a tied parameter hold the same part of it. A collective call of a pipe group."""
    if transport.pipe_rank is None or not owners.tied:
        return
    # Owners sum their local parts, so these must be the same part: spread over the same axes in the same placement.
    held = all_tensors(model)
    tied = {name: holders for holders, names in owners.tied.items() for name in names}
    mine = {name: description_of(held[name]) for name, holders in tied.items() if transport.pipe_rank in holders}
    everyone = transport.gather("pipe", mine)
    for name, holders in tied.items():
        kinds = {member(transport, "pipe", rank): everyone[rank][name] for rank in holders}
        if len(set(kinds.values())) > 1:
            text = "; ".join(f"{who}: {kind}" for who, kind in kinds.items())
            raise RunError(
                f"{name} is tied over several ranks, and parallelize has spread it differently on them ({text}); "
                "spread it in the same way, so that its gradients can be summed"
            )


# --- how they run


class Parallel:
    """The stages of this rank, as ``parallelize`` has made them: ``copies``, and of them what FSDP2 manages."""

    def __init__(self, copies: Mapping[int, _StageCopy], sharded: Mapping[int, FsdpStage]) -> None:
        self.copies, self.sharded = copies, sharded
        self._adopted: weakref.WeakKeyDictionary[nn.Module, _StageFunction] = weakref.WeakKeyDictionary()
        self._captures = 0

    def adopt(self, graph: StageGraph) -> StageGraph:
        """The same graph; the stages of this rank run the modules that ``parallelize`` has worked on.

        For the graph that was parallelised, and for later captures of the same model. RunError where a later capture
        takes the modules apart in another way.
        """
        stages = tuple(self._adopt(stage) if stage.index in self.copies else stage for stage in graph)
        return replace(graph, stages=stages)

    def _adopt(self, stage: Stage) -> Stage:
        if isinstance(stage.function, _StageFunction) or not isinstance(stage.module, nn.Module):
            return stage  # done, or idle: what it works on is absent from the batch
        home, module = self.copies[stage.index], stage.module
        if module not in self._adopted:
            code: Callable[..., Any] | None = None  # the module's own forward, which the user has written
            # A captured stage is code over the model's modules. Its forward is bound to the first capture's copy, so
            # that it finds under their names what parallelize has made of them.
            if not home.prefix:
                assert isinstance(module, fx.GraphModule)
                _share_tensors(stage, module)
                _let_be_sharded(module)
                if module is not home.original:
                    self._captures += 1
                    _move_in(stage, module, home, self._captures)
                code = types.MethodType(type(module).forward, home.module)
            self._adopted[module] = _StageFunction(stage.name, home.module, code, max(len(stage.outputs), 1))
        return replace(stage, function=self._adopted[module])


@dataclass(eq=False)
class _StageFunction:
    """A stage's function: a call of its module, so that hooks on it run, too.

    ``code``: the forward of the capture that it is for; None: the module's own, whose result goes out ``uses`` times.
    """

    name: str
    module: nn.Module
    code: Callable[..., Any] | None
    uses: int

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.code is None:
            outputs = (self.module(*inputs),) * self.uses
        else:
            # Several captures share the module: each call sets its own code, and goes through the module's hooks.
            self.module.__dict__["forward"] = self.code
            outputs = self.module(*inputs)
        if any(is_dtensor(leaf) for leaf in pytree.tree_leaves(outputs)):
            raise RunError(
                f"stage {self.name} returns a DTensor, but what passes between stages, and the loss, is the same "
                "plain tensor on all ranks of a tensor group; give the last module of the plan "
                "output_layouts=Replicate(), use_local_output=True"
            )
        return outputs


def _share_tensors(stage: Stage, module: fx.GraphModule) -> None:
    """Has a captured module hold the model's new tensors; of the module only the code runs."""
    for node in module.graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and name in stage.tensors:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            table[leaf] = stage.tensors[name]


def _let_be_sharded(module: fx.GraphModule) -> None:
    """Takes out checks of shapes, for results may be shards now; not those of modules whose code looks at values."""
    checks = [node for node in module.graph.nodes if node.target is check_shapes and not node.args[3]]
    for node in checks:
        module.graph.erase_node(node)
    if checks:
        module.recompile()


def _move_in(stage: Stage, module: fx.GraphModule, home: _StageCopy, number: int) -> None:
    """Makes the code of a later capture run on the modules that ``parallelize`` has worked on.

    What the model does not have (constants, modules made for the capture) is given to them, under names of its own,
    for as long as the capture is there. RunError where a module is called that ``parallelize`` has not seen.
    """
    first = {str(node.target) for node in home.original.graph.nodes if node.op in ("get_attr", "call_module")}  # type: ignore[union-attr]
    originals = {id(original) for original, _ in home.twins}
    renamed: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        target = str(node.target)
        value = attrgetter(target)(module)
        # What belongs to the model is in the copy under the same name, unless the first capture took it apart.
        has_tensors = any(name == target or name.startswith(f"{target}.") for name in stage.tensors)
        if has_tensors or id(value) in originals:
            there = home.held(target)
            if target not in first and (there is None or (node.op == "call_module" and type(there) is nn.Module)):
                raise RunError(
                    f"this kind of batch runs {target} of stage {stage.name} as a whole, which the first kind took "
                    "apart, and parallelize has not seen it so; compile with example_args= of this kind"
                )
            continue
        if target not in renamed:
            renamed[target] = f"{target.replace('.', '_')}_of_capture_{number}"
            if isinstance(value, Tensor):
                home.module.register_buffer(renamed[target], value, persistent=False)
            else:
                setattr(home.module, renamed[target], value)
            # Captures come and go with kinds of batches; what they brought goes with them.
            weakref.finalize(module, delattr, home.module, renamed[target])
        node.target = renamed[target]
        setattr(module, renamed[target], value)
    if renamed:
        module.recompile()


class ParallelGradients(Reducer):
    """The gradients of a rank some of whose parameters are DTensors, which lie in no bucket."""

    def __init__(
        self,
        shared: Sequence[Shared],
        alone: Mapping[str, nn.Parameter],
        transport: Transport,
        sums: GradientSums,
        capacity: int,
        tied: Mapping[tuple[int, ...], Sequence[str]],
        parallel: Parallel,
    ) -> None:
        super().__init__(shared, alone, transport, sums, capacity, tied)
        self._sharded = parallel.sharded
        self._twins = [pair for copied in parallel.copies.values() for pair in copied.twins]
        self._names = {id(parameter): name for name, parameter in self._own.items()}
        self._managed = {self._names[id(shard)] for stage in self._sharded.values() for shard in stage.parameters}
        # A DTensor that lies on all of the data axis is summed by its own mesh: by FSDP2, or by redistribution.
        data = set(transport.ranks("data")) if transport.data_size > 1 else set()
        self._to_sum = [n for n, p in self._own.items() if is_dtensor(p) and not data <= ranks_of(p)]
        self._used: set[str] = set()

    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        super().begin(graphs, row, sync, scales)
        self._used.clear()
        self._take_flags()

    def _set_earlier_aside(self, wanted: bool = True) -> None:
        super()._set_earlier_aside()  # so that only this call's gradients are summed

    def _take_flags(self) -> None:
        """The copies are in training, or not, as the model's modules are."""
        for original, twin in self._twins:
            twin.training = original.training

    def awaited(self, stage: int) -> Waits:
        for wait in super().awaited(stage).values():
            wait()
        if stage in self._sharded:  # FSDP2 gathers ahead of the whole stage
            self._sharded[stage].gather()
        return {}

    def after(self, action: Action) -> None:
        """Behind a stage's last backward, what FSDP2 shards of it is reduced."""
        super().after(action)
        if self._lasts[action.stage] == action and action.stage in self._sharded:
            self._used |= {self._names[id(shard)] for shard in self._sharded[action.stage].reduce()}

    def flush(self) -> None:
        """Frees, too, what stages without a backward have gathered, and asks who has used what."""
        for sharded in self._sharded.values():
            sharded.free()
        # Of what FSDP2 manages, reduce() has said who has used it: every rank has a gradient of it by now.
        super().flush()
        self._used |= {n for n, p in self._own.items() if p.grad is not None and n not in self._managed}
        self._own_asked = self._ask_who_used(self._used)

    def _finish_own(self, factor: Tensor | None) -> None:
        self._sum_used(self._own_asked.wait(), self._to_sum, factor)

    @contextlib.contextmanager
    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> Iterator[None]:
        self._take_flags()
        with super().evaluating(graphs, row):
            yield
        for sharded in self._sharded.values():
            sharded.free()
