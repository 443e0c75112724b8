"""Collectives in forward: refuses collectives that wait for ranks of other stages, which never join them; and, on a
context axis, stages that take this rank's positions for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import distributed as dist
from torch import nn

from fxpipe.distributed.topology import Topology
from fxpipe.errors import TopologyError
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.groups import groups_of_call
from fxpipe.torch_compat.modules import BATCH_STATISTICS
from fxpipe.torch_compat.operators import TorchDispatchMode
from fxpipe.user_line import current_line


def collectives_refused(topology: Topology) -> contextlib.AbstractContextManager[Any]:
    """In this context, a collective whose ranks do not all run this rank's stages raises TopologyError."""
    if not dist.is_initialized() or topology.size("pipe") == 1:
        return contextlib.nullcontext()
    return _Refused(replicas_of(topology))


class _Refused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, replicas: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._replicas = replicas

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for group in groups_of_call(func, args, kwargs or {}):
            ranks = dist.get_process_group_ranks(group)
            if not set(ranks) <= set(self._replicas):
                name = func.__name__.partition(".")[0].strip("_")
                raise TopologyError(
                    f"forward calls the collective {name!r} over ranks {ranks}, of which {self._replicas} are replicas "
                    "of one stage: the others run other stages and never come. For the rows of all replicas write "
                    'fxpipe.stage_boundary(value, gather="global") in front of it, and world_size=1 in a loss that '
                    'gathers by itself; for what replicas share pass group=topo.group("data")\n' + current_line()
                )
        return func(*args, **(kwargs or {}))


class ContextCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a stage's forward on a rank that has some positions of each row.

    ``check`` refuses attention in a forward that met none of them: it saw this rank's positions alone. It always
    refuses a convolution along positions with padding, since the padding lies where other ranks' positions are. It also
    refuses an embedding of positions that forward counts itself, and a table of positions that is read from its first
    row.
    """

    supports_higher_order_operators = True

    def __init__(self, context: Sequence[int], stage: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks, self._others, self._stage = len(context), set(context) - {dist.get_rank()}, stage
        self._called, self._is_met, self._pads, self._counts = set[str](), False, False, False
        self._lengths, self._tables = set[int](), dict[int, str]()
        self._sliced, self._multiplied = set[int](), set[int]()
        self._counted: list[torch.UntypedStorage] = []
        """The memory of what ``torch.arange`` has returned."""

    def watch(self, inputs: Sequence[Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> Self:
        """Returns this mode, for a forward of inputs [rows, positions, ...] by a stage that has these tensors."""
        leaves = [leaf for leaf in pytree.tree_leaves(list(inputs)) if isinstance(leaf, torch.Tensor)]
        self._lengths = {leaf.shape[1] for leaf in leaves if leaf.dim() > 1}
        self._tables = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors}
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0].strip("_")
        if name not in ("softmax", "safe_softmax") or args[0].dim() > 2:  # a router's has tokens and experts alone
            self._called.add(name)
        if name == "convolution":  # input, weight, bias, stride, padding
            self._pads = self._pads or (args[0].dim() == 3 and any(args[4]))
        if name == "embedding":  # weight, indices
            self._counts |= args[1].numel() > 1 and args[1].untyped_storage() in self._counted
        if name == "slice" and self._begins(*args):
            self._sliced.add(args[0].untyped_storage().data_ptr())
        if name in ("mm", "addmm", "bmm", "linear"):  # a part of a weight, as of in_proj_weight[:width], is no table
            self._multiplied |= {each.untyped_storage().data_ptr() for each in args if type(each) is torch.Tensor}
        for group in groups_of_call(func, args, kwargs or {}):
            self._is_met = self._is_met or not self._others.isdisjoint(dist.get_process_group_ranks(group))
        result = func(*args, **(kwargs or {}))
        if name == "arange":
            self._counted.append(result.untyped_storage())
        return result

    def _begins(self, table: torch.Tensor, dim: int = 0, start: int = 0, end: int | None = None, *_: Any) -> bool:
        """Whether a slice takes as many rows as this rank has positions from the beginning of a table of all."""
        is_of_all = end in self._lengths and table.shape[dim] >= self._ranks * (end or 0)
        is_plain = type(table) in (torch.Tensor, nn.Parameter)
        return not start and is_of_all and is_plain and table.untyped_storage().data_ptr() in self._tables

    def check(self) -> None:
        """TopologyError if the forward took this rank's positions for all."""
        is_fused = any("attention" in name or "attn" in name for name in self._called)
        products, scores = {"bmm", "baddbmm"} & self._called, {"softmax", "safe_softmax"} & self._called
        if not self._is_met and (is_fused or (products and scores)):
            raise TopologyError(
                f"stage {self._stage} has computed attention on this context rank's positions alone: it made no "
                "collective with the other context ranks; let parallelize= replace each attention of the stage by one "
                "that sees the keys and values of all context ranks"
            )
        if self._counts:
            raise TopologyError(
                f"stage {self._stage} looks up an embedding of positions that it counts itself (torch.arange), and a "
                "context rank would count its own from 0; give forward the positions, cut by topo.context_part"
            )
        if tables := [self._tables[memory] for memory in sorted(self._sliced - self._multiplied)]:
            raise TopologyError(
                f"stage {self._stage} takes the first rows of {tables[0]} as of a table of positions, such as "
                "freqs_cis[:length], and a context rank would take those of the first positions for its own; give "
                "forward the positions, cut by topo.context_part, and let it look them up: freqs_cis[positions]"
            )
        if self._pads:
            raise TopologyError(
                f"stage {self._stage} has a convolution along positions that pads the ends of this context rank's "
                "part, where positions of other ranks lie, as layers of Mamba and linear attention do; let "
                "parallelize= replace each by one that sees the positions of all context ranks, or leave the context "
                "axis out"
            )


# --- Synchronised batch norms: in a pipeline only replicas of a stage reach the norm's collective in forward ---


def check_sync_batch_norms(model: nn.Module | StageGraph, topology: Topology) -> None:
    """TopologyError for a ``nn.SyncBatchNorm`` whose process group has ranks that do not run this rank's stages, and
    for any norm with statistics over positions that lie on several context ranks."""
    if not dist.is_initialized():  # without process groups a SyncBatchNorm is a plain batch norm
        return
    replicas = replicas_of(topology)
    module = model if isinstance(model, nn.Module) else model.module
    for name, part in module.named_modules():
        if topology.size("context") > 1 and isinstance(part, BATCH_STATISTICS):
            raise TopologyError(
                f"{name} is a {type(part).__name__}, and its statistics on a context axis would be those of this "
                "rank's positions alone; write nn.LayerNorm or nn.RMSNorm, or leave the context axis out"
            )
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
    """Returns the ranks that run this rank's stages, including the ranks of its tensor group."""
    pipes = topology.groups("pipe")
    index = next(pipe.index(dist.get_rank()) for pipe in pipes if dist.get_rank() in pipe)
    return sorted(pipe[index] for pipe in pipes)
