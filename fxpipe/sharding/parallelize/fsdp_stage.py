"""Sharded stage: what FSDP2 shards inside of one stage, gathered and reduced once in a call.

A pipeline runs a stage's forward and backward once for each micro-batch, in the order of a table. By itself FSDP2 would
gather parameters for each of them. Here, whatever ``reshard_after_forward`` says, they are gathered ahead of a stage's
first forward, stay whole until its last backward, and are reduced and freed then: the same collectives in the same
order on all replicas, also where a replica has other micro-batches, or leaves a backward out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule, share_comm_ctx

from fxpipe.torch_compat import fsdp_end_backward, fsdp_forget, fsdp_groups, fsdp_set_up, fsdp_state


class ShardedStage:
    """The FSDP modules of one stage. ``parameters``: the shards, DTensors, that it manages."""

    def __init__(self, roots: Sequence[FSDPModule]) -> None:
        self._roots = list(roots)
        self._modules = [module for root in roots for module in _sharded_in(root)]
        self._gathered = False
        for root in self._roots:
            fsdp_set_up(root)
            _may_return_views(root)
        for module in self._modules:
            # Shares are of the whole batch, so gradients are summed; and a sum alone is what gloo can.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_forward(False, recurse=False)
            # What is whole needs no prefetch; torch's own looks up indices that another stage's end has cleared.
            module.set_modules_to_backward_prefetch([module])
        self._managed = [managed for module in self._modules for managed in _managed_by(module)]
        self.parameters: list[nn.Parameter] = [managed.sharded_param for managed in self._managed]

    def gather(self) -> None:
        """Ahead of a forward: the parameters lie whole in the modules."""
        if self._gathered:
            return
        self._gathered = True
        for root in self._roots:
            root.set_is_last_backward(False)
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        for handle in [module.unshard(async_op=True) for module in self._modules]:
            if handle is not None:
                handle.wait()
        for managed in self._managed:
            if managed.unsharded_param.requires_grad != managed.sharded_param.requires_grad:
                managed.unsharded_param.requires_grad_(managed.sharded_param.requires_grad)

    def reduce(self) -> list[nn.Parameter]:
        """After the last backward: starts summing gradients into the shards' ``.grad``, and frees the rest.

        Returns the shards whose parameters this replica has used; the others get zeros of it.
        """
        used = [managed.sharded_param for managed in self._managed if _has_gradient(managed)]
        for managed in self._managed:  # so that the buffers of all replicas match
            if managed.unsharded_param.requires_grad and not _has_gradient(managed):
                managed.unsharded_param.grad = torch.zeros_like(managed.unsharded_param)
        for root in self._roots:
            root.set_is_last_backward(True)
        for module in reversed(self._modules):
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
            for group in fsdp_groups(module):
                group.post_backward()
        for root in self._roots:
            fsdp_end_backward(root)
        self._gathered = False
        return used

    def free(self) -> None:
        """Without a backward: only shards are left."""
        if self._gathered:
            for root in self._roots:
                fsdp_forget(root)
        self._gathered = False


def sharded_stages(modules: Sequence[nn.Module]) -> list[ShardedStage | None]:
    """What FSDP2 manages in each of a rank's stages; None where that is nothing. They share streams."""
    roots = [list(_roots_in(module)) for module in modules]
    together = [root for found in roots for root in found]
    if together:
        share_comm_ctx(together)
    return [ShardedStage(found) if found else None for found in roots]


def _may_return_views(root: FSDPModule) -> None:
    """Silences torch's warning about views that a captured stage returns: nobody writes into them."""
    if isinstance(root, fx.GraphModule):
        name = re.escape(type(root).__name__)
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({name}\) returned a view tensor")


def _roots_in(module: nn.Module) -> Iterator[FSDPModule]:
    """The FSDP modules that are inside of no other."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _roots_in(child)


def _sharded_in(root: FSDPModule) -> list[FSDPModule]:
    """The FSDP modules of a root, outermost first; of several that were sharded together, one."""
    assert isinstance(root, nn.Module)
    found: dict[int, FSDPModule] = {}
    for module in root.modules():
        if isinstance(module, FSDPModule):
            found.setdefault(id(fsdp_state(module)), module)
    return list(found.values())


def _managed_by(module: FSDPModule) -> list:  # type: ignore[type-arg]
    return [managed for group in fsdp_groups(module) for managed in group.fsdp_params]


def _has_gradient(managed) -> bool:  # type: ignore[no-untyped-def]
    return managed.unsharded_accumulated_grad is not None or managed.unsharded_param.grad is not None
