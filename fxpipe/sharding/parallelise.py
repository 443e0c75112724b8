"""Parallel: ``compile(parallelize=)``, what a function of the user's does to the stages of a rank.

The function is given a copy of each stage's module, with structure of its own and the model's very tensors. What it
makes of the tensors (DTensors) takes their place in the model, under the names that they bore; what it makes of the
modules (hooks, wrappers, other classes) stays in the copy, which is what runs. So the model keeps its names, and a
later capture, of another kind of batch, sees the model as it was built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Groups, Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.parameters.dtensors import description_of, is_dtensor, ranks_of
from fxpipe.parameters.ownership import Ownership, replace_tensors
from fxpipe.sharding.parallel_stages import Parallel, StageCopy, copy_of

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
    mine = [stage for stage in graph if transport.pipe_rank in (None, *graph.ranks(stage.index))]
    copies = {stage.index: copy_of(stage, graph) for stage in mine if isinstance(stage.module, nn.Module)}
    mesh = None if transport.pipe_rank is None else topology.mesh
    for copied in copies.values():
        parallelize(copied.module, mesh)
    changed = _together([(copied, _changed(copied)) for copied in copies.values()])
    _check_meshes(changed, graph, topology, transport)
    replace_tensors(graph.module, changed)
    _check_tied(graph.module, owners, transport)
    sharded: dict[int, FsdpStage] = {}
    if mesh is not None:
        from fxpipe.sharding.fsdp import sharded_stages  # it imports FSDP2, which takes its time

        sharded = sharded_stages({stage: copied.module for stage, copied in copies.items()})
    return Parallel({index: copied.without_tensors() for index, copied in copies.items()}, sharded)


def _changed(copied: StageCopy) -> dict[int, Tensor]:
    """id of a tensor of the model → what has taken its place in a stage."""
    stage = copied.stage
    changed: dict[int, Tensor] = {}
    for name, old in stage.tensors.items():
        new = copied.held(name)
        if not isinstance(new, Tensor) or isinstance(new, nn.Parameter) != isinstance(old, nn.Parameter):
            raise RunError(
                f"parallelize has left stage {stage.name} with {_kind(new)} in place of {_kind(old)} {name}; keep "
                "parameters and buffers under the names that they have in the model, and parametrise before compile"
            )
        if changed.get(id(old), new) is not new:
            raise RunError(
                f"{name} is tied, and parallelize has made two tensors of it; distribute it once, and put the same "
                "parameter in both places"
            )
        if new.shape != old.shape:
            raise RunError(f"parallelize has made {list(new.shape)} of {name}, whose shape is {list(old.shape)}")
        changed[id(old)] = new
    known_now = {id(tensor) for tensor in changed.values()} | {id(tensor) for tensor in stage.tensors.values()}
    for name, parameter in copied.module.named_parameters(remove_duplicate=False):
        if id(parameter) not in known_now:
            raise RunError(
                f"parallelize has given stage {stage.name} a parameter that the model lacks, {name}; add it to the "
                "model before fxpipe.compile"
            )
    return changed


def _kind(value: object) -> str:
    return "a parameter" if isinstance(value, nn.Parameter) else "a buffer" if isinstance(value, Tensor) else "nothing"


def _together(found: Sequence[tuple[StageCopy, Mapping[int, Tensor]]]) -> dict[int, Tensor]:
    """What all stages of a rank have changed. Each has modules of its own, so two of them cannot share a DTensor."""
    changed: dict[int, Tensor] = {}
    users: dict[int, StageCopy] = {}
    for copied, mine in found:
        names = {id(old): name for name, old in reversed(dict(copied.stage.tensors).items())}
        for key, new in mine.items():
            if changed.get(key, new) is not new:
                raise RunError(
                    f"{names[key]} is used by the stages {users[key].stage.name} and {copied.stage.name} of one rank, "
                    "and parallelize has changed it in one of them; place them on different ranks (placement=), or "
                    "cut the model elsewhere"
                )
            changed[key], users[key] = new, copied
    return changed


def _check_meshes(changed: Mapping[int, Tensor], graph: StageGraph, topology: Topology, transport: Transport) -> None:
    """A DTensor lies on ranks that run the same stages, and, of its data group, on all or on one alone."""
    if transport.pipe_rank is None:
        return
    names = {id(tensor): name for name, tensor in reversed(all_tensors(graph.module).items())}
    apart = {rank for group in topology.groups("pipe") for rank in group[transport.pipe_rank : transport.pipe_rank + 1]}
    data = set(transport.ranks("data"))
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
