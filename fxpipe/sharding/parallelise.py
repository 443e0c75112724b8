"""Parallelise: ``compile(parallelize=)`` applies a user's function to the stages of a rank, and runs the result.

The function gets a copy of each stage's module: new modules that hold the model's own tensors. The tensors that the
function makes (DTensors) replace the model's tensors under the same names. Its changes to modules (hooks, wrappers,
other classes) stay in the copies, and the stages run the copies. So the model keeps its names, and a later capture, of
another kind of batch, traces the original model: its new code calls the copies by the modules' names.
"""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

from torch import Tensor, fx, nn
from torch import distributed as dist

from fxpipe.distributed.forward_collectives import ContextCheck
from fxpipe.distributed.grid import BATCH_AXES, ROLES
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Groups, Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import Stage, StageGraph, all_tensors
from fxpipe.parameters.ownership import Ownership, check_no_extra_state, replace_tensors
from fxpipe.schedules.action import Action
from fxpipe.search.memory import ParameterPart
from fxpipe.sharding.data_axis import scope_of
from fxpipe.sharding.gradients import Use
from fxpipe.sharding.reducer import Reducer
from fxpipe.stage.activation_checkpoints import Checkpointed
from fxpipe.stage.awaiting import Waits
from fxpipe.stage.stage_calls import check_shapes
from fxpipe.tensors.dtensors import description_of, is_dtensor, lines_of, local
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.groups import ranks_without_processes
from fxpipe.torch_compat.modules import BATCH_NORM
from fxpipe.torch_compat.tensors import hooks_of
from fxpipe.trace.patching import backward_hooks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from fxpipe.sharding.fsdp import FsdpStage

Parallelize = Callable[[nn.Module, "DeviceMesh | None"], None]


def layer_groups(topology: Topology) -> Groups:
    """Returns the groups of the axes that layers of a stage communicate over, for ``Transport.open``."""
    return {axis: topology.groups(axis) for axis in ("tensor", "context") if topology.size(axis) > 1}


def changed_stages(
    graph: StageGraph, topology: Topology, transport: Transport, parallelize: Parallelize
) -> ChangedStages:
    """Applies ``parallelize`` to copies of the stages of this rank, and puts the tensors that it makes into
    ``graph.module``. A single process that plays all ranks passes None as the mesh.

    Raises:
        RunError: a stage's module cannot be copied; or a pipeline cannot run the modules that ``parallelize`` made.
    """
    mesh = None if transport.pipe_rank is None else topology.mesh
    stages = changed_copies(graph, transport.pipe_rank, mesh, parallelize)
    replace_tensors(graph.module, stages.changed)
    return stages


def changed_copies(
    graph: StageGraph, pipe_rank: int | None, mesh: DeviceMesh | None, parallelize: Parallelize
) -> ChangedStages:
    """As ``changed_stages``, but leaves ``graph.module`` as it is. ``pipe_rank``: None for the stages of all ranks."""
    copies = {
        stage.index: _copy_of(stage, graph)
        for stage in graph
        if pipe_rank in (None, *graph.ranks(stage.index)) and isinstance(stage.module, nn.Module)
    }
    for index, copied in copies.items():
        before = copied.uncalled()
        parallelize(copied.module, mesh)
        check_no_extra_state(copied.module)
        if path := next((path for path, part in copied.uncalled().items() if before.get(path, part) != part), ""):
            raise RunError(
                f"parallelize has replaced {path} of stage {graph[index].name}, or put hooks on it, but the stage does "
                f"not call it as a whole: it uses what is inside; parallelize that, or call {path} in forward"
            )
    return ChangedStages(copies, _changed(graph, copies))


def parts_of(graph: StageGraph, topology: Topology, parallelize: Parallelize) -> dict[int, ParameterPart]:
    """Returns id of a parameter → the first rank's part of it, for the parameters that ``parallelize`` spreads. Applies
    ``parallelize`` to copies, on a mesh of ranks that have no processes.

    Raises:
        RunError: as ``changed_stages``; or this process is in a process group.
    """
    if dist.is_initialized():
        raise RunError("preview(parallelize=) makes ranks of its own; call it in a process before fxpipe.init()")
    with ranks_without_processes(topology.world_size):
        mesh = Topology(topology.axes, topology.ranks_per_node).mesh
        stages = changed_copies(graph, None, mesh, parallelize)
        from fxpipe.sharding.fsdp import summed_by_fsdp  # importing FSDP2 is slow

        managed: dict[int, tuple[int, ...]] = {}
        for copied in stages.copies.values():
            managed |= {id(shard): tuple(sorted(ranks)) for shard, ranks in summed_by_fsdp(copied.module)}
        parts = {}
        for key, tensor in stages.changed.items():
            if not is_dtensor(tensor) or not isinstance(tensor, nn.Parameter):
                continue
            lines = zip(tensor.placements, lines_of(tensor), strict=True)
            spread = set().union(*(_axes_along(line, topology) for placement, line in lines if placement.is_shard()))
            count, gathers = local(tensor).numel(), managed.get(id(tensor), ())
            parts[key] = ParameterPart(
                count,
                gathered=count * len(gathers),
                summed_over=gathers or _ranks_along(set(BATCH_AXES) - spread, topology),
                exchanged_over=_ranks_along({"expert"}, topology) if "expert" in spread else (),
            )
    return parts


def _ranks_along(axes: set[str], topology: Topology) -> tuple[int, ...]:
    """Returns the ranks that differ from rank 0 in these roles of axes alone."""
    ranks = range(topology.world_size)
    return tuple(rank for rank in ranks if _axes_along([0, rank], topology) <= axes)


def parallelise_stages(
    graph: StageGraph, topology: Topology, transport: Transport, owners: Ownership, stages: ChangedStages
) -> Parallel:
    """Returns the changed stages, which run from now on.

    A collective call of all ranks, after all parameters have their values, and before an optimizer or other object
    references them. RunError if a pipeline cannot sum the gradients of the tensors that ``parallelize`` made.
    """
    copies, changed = stages.copies, stages.changed
    names = {id(tensor): name for name, tensor in reversed(all_tensors(graph.module).items())}
    axes = _axes_of(changed, names, topology, transport)
    _check_tied(graph.module, owners, transport)
    sharded: dict[int, FsdpStage] = {}
    managed: dict[int, set[int]] = {}
    if transport.pipe_rank is not None:
        from fxpipe.sharding.fsdp import sharded_stages, summed_by_fsdp  # importing FSDP2 is slow

        sharded = sharded_stages({stage: copied.module for stage, copied in copies.items()})
        # FSDP2 sums over its own mesh, also where this has a dimension of replicas.
        for copied in copies.values():
            managed |= {id(shard): ranks for shard, ranks in summed_by_fsdp(copied.module)}
    scopes = {}
    for tensor in changed.values():
        key = id(tensor)
        if is_dtensor(tensor) and isinstance(tensor, nn.Parameter) and key in axes:
            _check_replicas(tensor, names[key], axes[key], managed.get(key, set()), topology)
            scopes[key] = scope_of(set(BATCH_AXES).difference(*axes[key]), topology)
    return Parallel(copies, sharded, scopes, transport.ranks("context") if topology.size("context") > 1 else ())


# --- the copies that parallelize changes


@dataclass(frozen=True)
class _StageCopy:
    """``original``: the module that was copied. ``module``: the copy. ``prefix``: the prefix of the model's names to
    remove for the copy's names. ``twins``: (module of the model, its copy) pairs."""

    original: nn.Module
    module: nn.Module
    prefix: str
    twins: tuple[tuple[nn.Module, nn.Module], ...]

    def attribute(self, name: str) -> Any:
        """Returns the copy's present attribute under a name of the model; None if it has none.

        Wrapper modules forward attributes that they lack, so that the name need not contain the wrappers.
        """
        try:
            return attrgetter(name.removeprefix(self.prefix))(self.module)
        except AttributeError:
            return None

    def taken_apart(self) -> list[str]:
        """Returns the paths of the user's innermost modules that the stage does not call, but only what is inside."""
        paths = [path for path, (part, _) in self.uncalled().items() if type(part).forward is not nn.Module.forward]
        return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]

    def uncalled(self) -> dict[str, tuple[nn.Module, int]]:
        """Returns path → (part, number of its hooks), for the parts that a captured stage's code takes apart. No call
        would run new hooks, or a new part; FSDP2's hooks need not run, see ``FsdpStage``."""
        if not isinstance(self.original, fx.GraphModule):
            return {}
        called = tuple(f"{node.target}." for node in self.original.graph.nodes if node.op == "call_module")
        return {
            path: (part, len(part._forward_pre_hooks) + len(part._forward_hooks) + len(backward_hooks(part)))
            for path, part in self.module.named_modules()
            if path and not f"{path}.".startswith(called) and not hasattr(part, "set_reshard_after_forward")
        }


def _copy_of(stage: Stage, graph: StageGraph) -> _StageCopy:
    """Copies a stage's module. RunError if a part of it cannot be copied, or has other names than in the model."""
    module = stage.module
    assert isinstance(module, nn.Module)
    if any(isinstance(part, Checkpointed) and [*part.body.parameters()] for part in module.modules()):
        raise RunError(
            f"stage {stage.name} has modules in a function given to torch.utils.checkpoint, where parallelize= does "
            "not see them by their names; write recompute=True, or checkpoint_wrapper in parallelize, instead"
        )
    # deepcopy does not copy objects in its memo: the copy has the model's tensors and generators, and new modules.
    shared = [*all_tensors(graph.module).values(), *all_tensors(module).values()]
    memo: dict[int, Any] = {id(each): each for each in (*shared, *(own.value for own in graph.generators.values()))}
    is_users = graph.module._modules.get(stage.name) is module  # otherwise the module is a capture's code
    try:
        copied = copy.deepcopy(module, memo)
        if not is_users:
            _name_parts(copied, stage, graph.module, memo)
    except Exception as error:
        raise RunError(
            f"parallelize= works on copies of modules that share their tensors, but one in stage {stage.name} cannot "
            f"be copied: {type(error).__name__}: {error}; give it a __deepcopy__, or keep what cannot be copied out of "
            "its attributes"
        ) from error
    parts = dict.fromkeys([*module.modules(), *graph.module.modules()])
    twins = tuple((part, memo[id(part)]) for part in parts if id(part) in memo)
    return _StageCopy(module, copied, f"{stage.name}." if is_users else "", twins)


@dataclass
class ChangedStages:
    """``copies``: stage → its copy, which ``parallelize`` has changed. ``changed``: id of a tensor of the model → the
    tensor in its place."""

    copies: Mapping[int, _StageCopy]
    changed: Mapping[int, Tensor]

    def take(self, new: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Puts tensors with values into the copies. ``new``: id of a meta tensor → the tensor. Returns the same for the
        model's tensors from before ``parallelize``."""
        for copied in self.copies.values():
            replace_tensors(copied.module, new)
        before = self.changed
        self.changed = {key: new.get(id(tensor), tensor) for key, tensor in before.items()}
        return {key: new[id(tensor)] for key, tensor in before.items() if id(tensor) in new}


def _name_parts(made: nn.Module, stage: Stage, model: nn.Module, memo: dict[int, Any]) -> None:
    """Puts copies of the user's modules in place of a captured stage's bare containers, where the stage uses all of
    their tensors, so that ``parallelize`` finds them by name and class."""
    users, used = dict(model.named_modules(remove_duplicate=False)), set(map(id, stage.tensors.values()))
    for path, part in list(made.named_modules()):
        if type(part) is nn.Module and path in users and used.issuperset(map(id, all_tensors(users[path]).values())):
            made.set_submodule(path, copy.deepcopy(users[path], memo))


# --- the changes that parallelize made


def _changed(graph: StageGraph, copies: Mapping[int, _StageCopy]) -> dict[int, Tensor]:
    """Returns id of a model tensor → the tensor that has replaced it in the stages of this rank."""
    changed: dict[int, Tensor] = {}
    users: dict[int, str] = {}
    for index, copied in copies.items():
        stage = graph[index]
        for name, old in stage.tensors.items():
            new = copied.attribute(name)
            if not isinstance(new, Tensor) or isinstance(new, nn.Parameter) != isinstance(old, nn.Parameter):
                raise RunError(
                    f"parallelize has left stage {stage.name} with {_kind(new)} in place of {_kind(old)} {name}; keep "
                    "parameters and buffers under the names that they have in the model, and parametrise before compile"
                )
            if new.shape != old.shape:
                raise RunError(f"parallelize has made {list(new.shape)} of {name}, whose shape is {list(old.shape)}")
            if new is not old and hooks_of(old):
                raise RunError(
                    f"{name} has a hook, and parallelize has put another tensor in its place, which has none; register "
                    "it in parallelize (FSDP2 calls none), or change .grad behind forward_backward(...)"
                )
            if changed.get(id(old), new) is not new:
                if users[id(old)] == stage.name:
                    raise RunError(
                        f"{name} is tied, and parallelize has made two tensors of it; distribute it once, and put the "
                        "same parameter in both places"
                    )
                # Each stage has its own modules, so two stages cannot share a DTensor.
                raise RunError(
                    f"{name} is used by the stages {users[id(old)]} and {stage.name} of one rank, and parallelize has "
                    "changed it in one of them; place them on different ranks (placement=), or cut the model elsewhere"
                )
            changed[id(old)], users[id(old)] = new, stage.name
        ids = {id(tensor) for tensor in (*changed.values(), *stage.tensors.values())}
        for name, parameter in copied.module.named_parameters(remove_duplicate=False):
            if id(parameter) not in ids:
                raise RunError(
                    f"parallelize has given stage {stage.name} a parameter that the model lacks, {name}; add it to the "
                    "model before fxpipe.compile"
                )
    return changed


def _kind(value: object) -> str:
    return "a parameter" if isinstance(value, nn.Parameter) else "a buffer" if isinstance(value, Tensor) else "nothing"


def _axes_of(
    changed: Mapping[int, Tensor], names: Mapping[int, str], topology: Topology, transport: Transport
) -> dict[int, list[set[str]]]:
    """Returns id of a DTensor → for each dimension of its mesh, the topology's axes along which the ranks lie.
    ``names``: id of a tensor → its name in the model.

    RunError unless a DTensor's ranks run the same stages, and are all ranks of each axis or a single rank.
    """
    if transport.pipe_rank is None:
        return {}
    found: dict[int, list[set[str]]] = {}
    apart = {rank for group in topology.groups("pipe") for rank in group[transport.pipe_rank : transport.pipe_rank + 1]}
    data = set(transport.ranks("data"))
    # On a part of a batch axis, the mesh would sum the gradients of some replicas, and nothing those of the others.
    for tensor in filter(is_dtensor, changed.values()):
        ranks, name = set(tensor.device_mesh.mesh.flatten().tolist()), names[id(tensor)]
        if not ranks <= apart:
            raise RunError(
                f"parallelize has spread {name} over ranks {sorted(ranks)}, but only ranks {sorted(apart)} run its "
                f'stage; name the axes of the mesh, as in fully_shard(module, mesh=mesh["data"])'
            )
        found[id(tensor)] = [_axes_along(line, topology) for line in lines_of(tensor)]
        batch = set().union(*found[id(tensor)]).intersection(BATCH_AXES)
        if math.prod(map(topology.size, batch)) != len(ranks & data):
            raise RunError(
                f"parallelize has spread {name} over ranks {sorted(ranks & data)} of the data group {sorted(data)}; "
                "use all of the data axis, or none of it"
            )
    return found


def _axes_along(ranks: Sequence[int], topology: Topology) -> set[str]:
    """Returns the roles of the axes along which the ranks differ."""
    coordinates = [topology.coordinate(rank) for rank in ranks]
    return {ROLES[name] for name, _ in topology.axes if len({coordinate[name] for coordinate in coordinates}) > 1}


def _check_replicas(
    tensor: DTensor, name: str, axes: Sequence[set[str]], managed: set[int], topology: Topology
) -> None:
    """RunError for a parameter whose gradient nothing would sum over some ranks. ``managed``: the ranks over which
    FSDP2 sums it."""
    for placement, along, line in zip(tensor.placements, axes, lines_of(tensor), strict=True):
        batch = along.intersection(BATCH_AXES)
        if batch and not placement.is_shard() and not managed.issuperset(line):
            axis = " × ".join(sorted(batch))
            raise RunError(
                f"parallelize has made {name} a DTensor with {placement!r} over the {axis} axis, so that nothing sums "
                f"its gradient over the {axis} ranks; leave it a plain parameter, which fxpipe sums, or shard it: "
                f'fully_shard(module, mesh=mesh["data"])'
            )
    if "expert" in set().union(*axes) and "tensor" not in set().union(*axes) and topology.size("tensor") > 1:
        raise RunError(
            f"parallelize has spread {name} over the expert axis and not over the tensor axis, whose ranks may run it "
            "on tokens of their own, and nothing would sum its gradient over them; leave the tensor axis out, or shard "
            "it over both"
        )


def _check_tied(model: nn.Module, owners: Ownership, transport: Transport) -> None:
    """RunError if the owners of a tied parameter hold different parts of it. A collective call of a pipe group."""
    if transport.pipe_rank is None or not owners.tied:
        return
    # Owners sum their local parts, so the parts must have the same mesh axes and placements.
    tensors = all_tensors(model)
    tied = {name: holders for holders, names in owners.tied.items() for name in names}
    mine = {name: description_of(tensors[name]) for name, holders in tied.items() if transport.pipe_rank in holders}
    everyone = transport.gather("pipe", mine)
    for name, holders in tied.items():
        kinds = {member(transport, "pipe", rank): everyone[rank][name] for rank in holders}
        if len(set(kinds.values())) > 1:
            text = "; ".join(f"{who}: {kind}" for who, kind in kinds.items())
            raise RunError(
                f"{name} is tied over several ranks, and parallelize has spread it differently on them ({text}); "
                "spread it in the same way, so that its gradients can be summed"
            )


# --- running the copies


@dataclass(eq=False)
class Parallel:
    """The ``copies`` of this rank's stages that ``parallelize`` has changed. ``sharded``: their FSDP2 modules.
    ``scopes``: id of a DTensor parameter → the scope of the batch axes that its mesh leaves out, "" for none.
    ``context``: the ranks of this rank's context group, if there is one."""

    copies: Mapping[int, _StageCopy]
    sharded: Mapping[int, FsdpStage]
    scopes: Mapping[int, str]
    context: Sequence[int]
    _adopted: WeakKeyDictionary[nn.Module, _StageFunction] = field(default_factory=WeakKeyDictionary)
    _captures: int = 0

    def adopt(self, graph: StageGraph) -> StageGraph:
        """Returns the graph, with this rank's stages running the modules that ``parallelize`` has changed.

        Works for the parallelised graph, and for later captures of the same model. RunError if a later capture
        splits the modules differently.
        """
        stages = tuple(self._adopt(stage) if stage.index in self.copies else stage for stage in graph)
        return replace(graph, stages=stages)

    def _adopt(self, stage: Stage) -> Stage:
        if isinstance(stage.function, _StageFunction) or not isinstance(stage.module, nn.Module):
            return stage  # adopted already, or idle because the batch lacks its inputs
        home, module = self.copies[stage.index], stage.module
        if module not in self._adopted:
            code: Callable[..., Any] | None = None  # None: the forward that the user has written
            # A captured stage is code that calls the model's modules. Its forward is bound to the first capture's
            # copy, so that the code finds the changed modules under the same names.
            if not home.prefix:
                assert isinstance(module, fx.GraphModule)
                _share_tensors(stage, module)
                _let_be_sharded(module)
                if module is not home.original:
                    self._captures += 1
                    _move_in(stage, module, home, self._captures)
                code = types.MethodType(type(module).forward, home.module)
            check = ContextCheck(self.context, stage.name) if self.context else None
            uses = max(len(stage.outputs), 1)
            self._adopted[module] = _StageFunction(stage.name, home.module, code, uses, check, home.taken_apart())
        return replace(stage, function=self._adopted[module])


@dataclass(eq=False)
class _StageFunction:
    """A stage's function: calls the stage's module, so that the module's hooks run, too.

    ``code``: the forward of the capture; None: the module's own forward, whose result is returned ``uses`` times.
    ``check``: of the first call, on a context axis. ``apart``: the modules that ``code`` takes apart.
    """

    name: str
    module: nn.Module
    code: Callable[..., Any] | None
    uses: int
    check: ContextCheck | None
    apart: Sequence[str]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.check is not None:
            check, self.check = self.check, None
            tensors = (*self.module.named_parameters(), *self.module.named_buffers())
            with check.watch(inputs, [(name, tensor) for name, tensor in tensors if not is_dtensor(tensor)]):
                outputs = self(*inputs)
            check.check()
            return outputs
        if self.code is None:
            outputs = (self.module(*inputs),) * self.uses
        else:
            # Several captures share the module: each call sets its code as forward, and runs the module's hooks.
            self.module.__dict__["forward"] = self.code
            try:
                outputs = self.module(*inputs)
            except RuntimeError as error:
                if self.apart:
                    error.add_note(
                        f"stage {self.name} calls only what is inside of {self.apart[0]}, by captured code with the "
                        "sizes and types from before parallelize; if they do not fit, a Hugging Face model needs "
                        "use_cache=False"
                    )
                raise
        if any(is_dtensor(leaf) for leaf in pytree.tree_leaves(outputs)):
            raise RunError(
                f"stage {self.name} returns a DTensor, but what passes between stages, and the loss, is the same "
                "plain tensor on all ranks of a tensor group; give the last module of the plan "
                "output_layouts=Replicate(), use_local_output=True"
            )
        return outputs


def _share_tensors(stage: Stage, module: fx.GraphModule) -> None:
    """Puts the model's new tensors into a captured module, of which only the code runs."""
    for node in module.graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and name in stage.tensors:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            table[leaf] = stage.tensors[name]


def _let_be_sharded(module: fx.GraphModule) -> None:
    """Removes shape checks, since results may now be shards; keeps checks of modules whose code reads values."""
    checks = [node for node in module.graph.nodes if node.target is check_shapes and not node.args[3]]
    for node in checks:
        module.graph.erase_node(node)
    if checks:
        module.recompile()


def _move_in(stage: Stage, module: fx.GraphModule, home: _StageCopy, number: int) -> None:
    """Makes the code of a later capture run on the modules that ``parallelize`` has changed.

    Objects that the model lacks (constants, modules made for the capture) become attributes of the copy, under new
    names, for the lifetime of the capture. RunError if the code calls a module that ``parallelize`` has not seen.
    """
    first = {str(node.target) for node in home.original.graph.nodes if node.op in ("get_attr", "call_module")}  # type: ignore[union-attr]
    originals = {id(original) for original, _ in home.twins}
    renamed: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        target = str(node.target)
        value = attrgetter(target)(module)
        # A part of the model has the same name in the copy, unless the first capture split it.
        has_tensors = any(name == target or name.startswith(f"{target}.") for name in stage.tensors)
        if has_tensors or id(value) in originals:
            there = home.attribute(target)
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
            # Captures are dropped with their kinds of batch; their attributes are removed with them.
            finalize(module, delattr, home.module, renamed[target])
        node.target = renamed[target]
        setattr(module, renamed[target], value)
    if renamed:
        module.recompile()


class ParallelGradients(Reducer):
    """The gradients of a rank that has DTensor parameters, which are in no bucket."""

    def __init__(self, *parameters: Any, parallel: Parallel) -> None:
        super().__init__(*parameters)
        self._sharded, self.shards_parameters = parallel.sharded, bool(parallel.sharded)
        self._twins = [pair for copied in parallel.copies.values() for pair in copied.twins]
        self._names = {id(parameter): name for name, parameter in self._own.items()}
        # torch cannot take one norm of plain gradients and DTensors, and a DTensor's own is soon this rank's part's.
        every = [*self._own.values(), *(each.parameter for each in self._shared.values())]
        meshes = {parameter.device_mesh if is_dtensor(parameter) else None for parameter in every}
        self._marks = self._marks or len(meshes) > 1
        self._managed = {self._names[id(shard)] for stage in self._sharded.values() for shard in stage.parameters}
        # A DTensor's shards have their gradients' sums over the mesh already, from FSDP2 or a stage's own collectives.
        self._to_sum: dict[str, list[str]] = {scope: [] for scope in sorted({*parallel.scopes.values()} - {""})}
        for name, parameter in self._own.items():
            if scope := parallel.scopes.get(id(parameter)):
                self._to_sum[scope].append(name)
        self._used: set[str] = set()

    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        super().begin(graphs, row, sync, scales)
        self._used.clear()
        self._take_flags()

    def _set_earlier_aside(self, wanted: bool = True) -> None:
        super()._set_earlier_aside()  # always, so that only this call's gradients are summed

    def _take_flags(self) -> None:
        """Copies the training flags of the model's modules, and the momentum of batch norms, to the copies."""
        for original, twin in self._twins:
            twin.training = original.training
            if isinstance(original, BATCH_NORM):
                twin.momentum = original.momentum

    def awaited(self, stage: int) -> Waits:
        for wait in super().awaited(stage).values():
            wait()
        if stage in self._sharded:  # FSDP2 gathers all parameters before the stage runs
            self._sharded[stage].gather()
        return Waits()

    def gathered(self) -> Iterable[Tensor]:
        return [parameter for sharded in self._sharded.values() for parameter in sharded.gathered]

    def after(self, action: Action) -> None:
        """Starts the reduction of a stage's FSDP2 parameters after the stage's last backward."""
        super().after(action)
        if self._lasts[action.stage] == action and action.stage in self._sharded:
            self._used |= {self._names[id(shard)] for shard in self._sharded[action.stage].reduce()}

    def flush(self) -> None:
        """Also frees the parameters of stages that ran no backward."""
        for sharded in self._sharded.values():
            sharded.free()
        # reduce() has recorded the used FSDP2 parameters: here every rank already has gradients for all of them.
        super().flush()
        self._used |= {n for n, p in self._own.items() if p.grad is not None and n not in self._managed}

    def _whether_used(self) -> dict[str, Use]:
        return super()._whether_used() | self._whether_own_used(self._used)

    def _finish_own(self, factor: Tensor | None) -> None:
        self._sum_used(self._to_sum, factor)

    @contextlib.contextmanager
    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> Iterator[None]:
        self._take_flags()
        with super().evaluating(graphs, row):
            yield
        for sharded in self._sharded.values():
            sharded.free()
