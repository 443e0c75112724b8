"""Placement: assigns stages to pipe ranks, and refuses placements under which ranks would come to hold different
values.

Takes: a ``StageGraph`` and what the user wants. Gives: a ``Placement``, a rank or several ranks for each stage.

1. Without wishes, the stages are cut into contiguous groups, in topological order, one for each rank. The largest
   number of parameters of a group is as small as possible.
2. Otherwise each stage has the rank that the user names; "all" and several ranks mean that these take its micro-batches
   in turn.
3. ``check_replicated`` and ``check_replicas`` refuse code that writes different values on the copies of a tensor.
   ``check_hooks`` refuses hooks that would see a part of a gradient.

It simulates nothing: ``fxpipe.search`` finds placements by their step time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from torch import nn

from fxpipe.errors import PartitionError, nearest
from fxpipe.graph.ranks import Placement, as_placement, named, ranks_of
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.notebook import listed
from fxpipe.passes.effects import own_writes
from fxpipe.search.segments import between, partition, segments_of
from fxpipe.stage.opaque_call import opaque_calls
from fxpipe.torch_compat.modules import BATCH_STATISTICS
from fxpipe.torch_compat.tensors import hooks_of
from fxpipe.user_line import definition

Place = int | Sequence[int]
"""A rank, or several ranks that take a stage's micro-batches in turn."""


def place_stages(graph: StageGraph, ranks: int, wanted: Mapping[str, Place | Literal["all"]] | None) -> Placement:
    """The rank, or ranks, of each stage: as wanted, or in topological order, balanced by parameters.

    Args:
        graph: the stages, in topological order.
        ranks: the number of pipe ranks.
        wanted: stage's name → its rank, its ranks, or "all"; None for the balanced placement.

    Raises:
        PartitionError: there are more ranks than stages, a name is unknown, a stage is missing, or a rank has no stage.
    """
    if len(graph) < ranks and wanted is None:
        none = "" if len(graph) > 1 or graph[0].gathered else "no stage_boundary was reached; "
        raise PartitionError(
            f"{ranks} pipe ranks, but the model has {len(graph)} stage{'s' * (len(graph) > 1)} "
            f"({', '.join(graph.names)}); {none}"
            f"mark {ranks - len(graph)} more with fxpipe.stage_boundary or boundaries=, or use fewer ranks"
        )
    # 1. balanced groups
    if wanted is None:
        return _balanced([1 + sum(p.numel() for p in stage.parameters.values()) for stage in graph], ranks)
    # 2. as the user names them
    for name in wanted:
        if name not in graph.names:
            raise PartitionError(f"placement names stage {name!r}, which does not exist{nearest(name, graph.names)}")
    missing = [name for name in graph.names if name not in wanted]
    if missing:
        raise PartitionError(f"placement does not say where {missing} run; name all stages: {list(graph.names)}")
    every = tuple(range(ranks))
    places: list[Any] = [every if wanted[name] == "all" else wanted[name] for name in graph.names]
    placement = as_placement(places, graph.names, PartitionError)
    used = sorted({rank for entry in placement for rank in ranks_of(entry)})
    if used != list(every):
        raise PartitionError(f"placement uses ranks {used}; with {ranks} pipe ranks each needs a stage")
    return placement


def check_replicated(graph: StageGraph) -> None:
    """PartitionError for a stage on several ranks whose copies would come to differ."""
    # 3. copies of stages
    stages = [stage for stage in graph if len(graph.ranks(stage.index)) > 1]
    for stage in stages:
        where = f"stage {stage.name!r} is on {named(graph.placement[stage.index])}"
        # Each rank of the stage sees other micro-batches, so written tensors would come to differ. A BatchNorm in eval
        # mode is allowed: it writes its statistics only in training.
        for name in sorted(graph.written.intersection(stage.tensors)):
            owner = graph.module.get_submodule(name.rpartition(".")[0])
            if owner.training or not isinstance(owner, BATCH_STATISTICS):
                raise PartitionError(f"{where}, and {writes(name)}")
        for name, generator in graph.generators.items():
            if generator.stage == stage.index:
                raise PartitionError(f"{where}, and {writes(f'the random generator {name}')}")
        for call in opaque_calls(stage.module):
            for attribute in sorted(call.attributes):
                raise PartitionError(f"{where}, and {writes('.'.join(filter(None, attribute)))}")


def check_replicas(graph: StageGraph, replicas: int) -> None:
    """PartitionError for a parameter that each of several replicas would write by its own rows of the batch."""
    for stage in graph if replicas > 1 else ():
        own = own_writes(stage.module) if isinstance(stage.module, nn.Module) else []
        for name, parameter in stage.parameters.items():
            if name in graph.written_by_batch or any(tensor is parameter for tensor in own):
                raise PartitionError(
                    f"stage {stage.name!r} writes {name} by the rows of its batch, and each of {replicas} replicas has "
                    "other rows: they would come to hold different values. For an embedding, leave out max_norm, and "
                    "call renorm_(2, 0, max_norm) of its weight before fxpipe.compile and behind optimizer.step(). "
                    "Keep statistics, such as an averaged codebook, in a buffer: each replica has its own"
                )


def check_hooks(graph: StageGraph) -> None:
    """PartitionError if a parameter that several stages use has a hook, which each stage's backward would call."""
    for name, parameter, stages in graph.shared:
        if hooks := hooks_of(parameter):
            users = listed([graph.names[stage] for stage in stages])
            raise PartitionError(
                f"a hook on {name} would see parts of its gradient: each of the stages {users} uses it, and has a "
                "backward of its own. Cut the model so that one stage uses it, or change its .grad behind "
                f"forward_backward(...)\n{definition(hooks[0])}"
            )


def writes(name: str) -> str:
    """The part of a message that names a forbidden write of a stage on several ranks, and the remedy."""
    return (
        f"its forward writes {name}, and its ranks would come to hold different values; place it on one rank (a "
        "BatchNorm in eval mode only reads its statistics)"
    )


def _balanced(costs: list[int], ranks: int) -> tuple[int, ...]:
    """The rank of each stage in contiguous, non-empty groups that minimize the greatest cost of a group.

    By dynamic programming over the ends of groups (``search.segments.partition``). There are at least as many costs as
    ranks.
    """
    cost = between([0, *accumulate(costs)])
    ends = partition(lambda behind: cost, ranks)
    assert ends is not None  # the caller ensures as many stages as ranks
    return tuple(segments_of(tuple(range(len(costs))), ends).values())
