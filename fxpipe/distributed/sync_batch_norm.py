"""Synchronised batch norms: whom they wait for in forward. In a pipeline only replicas of a stage come there."""

from __future__ import annotations

from collections.abc import Iterator

from torch import distributed as dist
from torch import nn

from fxpipe.distributed.topology import Topology
from fxpipe.errors import TopologyError
from fxpipe.graph.stage_graph import StageGraph


def check_sync_batch_norms(model: nn.Module | StageGraph, topology: Topology) -> None:
    """TopologyError for a ``nn.SyncBatchNorm`` that would wait for ranks that run other stages, or none of it."""
    if not dist.is_initialized():  # so it is a plain batch norm
        return
    replicas = replicas_of(topology)
    for name, part in _named_modules(model):
        if not isinstance(part, nn.SyncBatchNorm):
            continue
        waits_for = dist.get_process_group_ranks(part.process_group or dist.group.WORLD)
        if not set(waits_for) <= set(replicas):
            raise TopologyError(
                f"{name} is a SyncBatchNorm over ranks {waits_for}, of which {replicas} are replicas of this rank's "
                'stages: the others never come; write process_group=topo.group("data") in nn.SyncBatchNorm(...), or '
                'in nn.SyncBatchNorm.convert_sync_batchnorm(model, topo.group("data"))'
            )


def replicas_of(topology: Topology) -> list[int]:
    """The ranks that run this rank's stages, a tensor group's among them."""
    pipes = topology.groups("pipe")
    place = next(pipe.index(dist.get_rank()) for pipe in pipes if dist.get_rank() in pipe)
    return sorted(pipe[place] for pipe in pipes)


def _named_modules(model: nn.Module | StageGraph) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield from model.named_modules()
        return
    for stage in model:
        if isinstance(stage.module, nn.Module):
            yield from stage.module.named_modules(prefix=stage.name)
