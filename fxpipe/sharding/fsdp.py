"""FSDP: runs torch's FSDP2 in a pipeline: for ``zero=3``, and for modules that ``parallelize`` has ``fully_shard``-ed.

A pipeline runs a stage's forward and backward for each micro-batch, in the order of a schedule. By default FSDP2 would
gather parameters for each run. Here, whatever ``reshard_after_forward`` says, a stage's first forward gathers the
parameters, and its last backward reduces the gradients. Between the two, parameters stay unsharded, except for those
that ``zero=3`` frees where a step has one micro-batch (``fully_sharded``). All replicas run the same collectives in the
same order, even if a replica has other micro-batches, or leaves a backward out.

  FsdpStage   modules that the user has sharded in ``parallelize``; torch runs the collectives
  FsdpUnit    zero=3, in ``fully_sharded``: parameters in a shell module; collectives go through fxpipe's transport
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule, share_comm_ctx

from fxpipe.torch_compat.fsdp import fsdp_end_backward, fsdp_groups, fsdp_set_up, fsdp_state


class FsdpModules:
    """FSDP modules that are gathered, reduced and freed together. ``parameters``: their shards, which are DTensors."""

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = list(modules)
        for module in self._modules:
            # Losses are weighted by shares of the whole batch, so gradients are summed; gloo supports only the sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        groups = [group for module in self._modules for group in fsdp_groups(module)]
        self._managed = [managed for group in groups for managed in group.fsdp_params]
        self.parameters: list[nn.Parameter] = [managed.sharded_param for managed in self._managed]

    @property
    def gathered(self) -> list[nn.Parameter]:
        """The whole parameters, after the first gather."""
        return [managed.unsharded_param for managed in self._managed if hasattr(managed, "unsharded_param")]

    def post_backward(self) -> list[nn.Parameter]:
        """Starts the reduction of the gradients that the backwards have made.

        Returns the shards whose parameters this replica has used.
        """
        used = []
        # FSDP2 reduces all gradients in a single buffer. Zeros for missing gradients make the replicas' buffers match.
        for managed in self._managed:
            whole: nn.Parameter = managed.unsharded_param
            if whole.grad is not None or managed.unsharded_accumulated_grad is not None:
                used.append(managed.sharded_param)
            elif whole.requires_grad:
                whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
        for module in reversed(self._modules):
            for group in fsdp_groups(module):
                group.post_backward()
        return used


# --- modules that parallelize has sharded


class FsdpStage(FsdpModules):
    """The FSDP modules of a stage: ``roots``, and the FSDP modules inside them."""

    def __init__(self, roots: Sequence[FSDPModule]) -> None:
        self._roots = list(roots)
        self._gathered = False
        for root in self._roots:
            fsdp_set_up(root)
            if isinstance(root, fx.GraphModule):  # a captured stage may return views: nothing writes into them
                name = re.escape(type(root).__name__)
                warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({name}\) returned a view tensor")
        together: dict[int, FSDPModule] = {}
        for part in (part for root in roots for part in cast(nn.Module, root).modules()):
            if isinstance(part, FSDPModule):  # modules that were sharded together share a state: take the first
                together.setdefault(id(fsdp_state(part)), part)
        super().__init__(list(together.values()))
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            # Unsharded modules need no prefetch; torch's default prefetch uses indices that another stage has cleared.
            module.set_modules_to_backward_prefetch([module])

    def gather(self) -> None:
        """Gathers the parameters into the modules before a forward."""
        if self._gathered:
            return
        self._set_gathered(True)
        for handle in [module.unshard(async_op=True) for module in self._modules]:
            if handle is not None:
                handle.wait()

    def reduce(self) -> list[nn.Parameter]:
        """Starts summing gradients into the shards' ``.grad`` after the last backward; frees the unsharded parameters.

        Returns the shards whose parameters this replica has used.
        """
        self._set_gathered(False)
        used = self.post_backward()
        for root in self._roots:
            fsdp_end_backward(root)
        return used

    def _set_gathered(self, gathered: bool) -> None:
        """Sets whether parameters stay unsharded and gradients accumulate."""
        self._gathered = gathered
        # FSDP2 would reduce and free in each micro-batch's backward. While gathered, no backward counts as the last.
        for root in self._roots:
            root.set_is_last_backward(not gathered)
        for module in self._modules:
            module.set_requires_gradient_sync(not gathered, recurse=False)
            module.set_reshard_after_backward(not gathered, recurse=False)

    def free(self) -> None:
        """Frees the unsharded parameters of a stage that runs no backward."""
        if self._gathered:
            for root in self._roots:
                root.reset_iter_state()
        self._gathered = False


def sharded_stages(modules: Mapping[int, nn.Module]) -> dict[int, FsdpStage]:
    """Returns stage → its ``FsdpStage``, for a rank's stages that have FSDP modules. All share their streams."""
    roots = {stage: inner for stage, module in modules.items() if (inner := list(_roots_in(module)))}
    if roots:
        share_comm_ctx([root for inner in roots.values() for root in inner])
    return {stage: FsdpStage(inner) for stage, inner in roots.items()}


def summed_by_fsdp(module: nn.Module) -> Iterator[tuple[nn.Parameter, set[int]]]:
    """Yields each shard of the FSDP modules inside ``module``, and the ranks over which FSDP2 sums its gradient."""
    for part in module.modules():
        for group in fsdp_groups(part) if isinstance(part, FSDPModule) else ():
            for managed in group.fsdp_params:
                yield managed.sharded_param, set(managed.mesh_info.mesh.mesh.flatten().tolist())


def _roots_in(module: nn.Module) -> Iterator[FSDPModule]:
    """Yields the FSDP modules that are not inside another FSDP module."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _roots_in(child)
