"""FSDP: all that fxpipe has torch's FSDP2 do; parameters that it gathers, reduces and frees together.

A pipeline runs a stage's forward and backward once for each micro-batch, in the order of a table. By itself FSDP2 would
gather parameters for each of them. Here, whatever ``reshard_after_forward`` says, they are gathered ahead of a stage's
first forward, stay whole until its last backward, and are reduced and freed then: the same collectives in the same
order on all replicas, also where a replica has other micro-batches, or leaves a backward out.

  FsdpUnit    zero=3: parameters in a shell of their own; collectives go through fxpipe's transport
  FsdpStage   what the user has sharded with ``fully_shard`` in ``parallelize``; collectives are torch's own
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx

from fxpipe.distributed.collective import Collective, Work
from fxpipe.distributed.transport import Transport
from fxpipe.precision import Precision
from fxpipe.torch_compat import fsdp_end_backward, fsdp_forget, fsdp_groups, fsdp_set_up, fsdp_state


class _FsdpModules:
    """FSDP modules that are gathered, reduced and freed together. ``parameters``: the shards, DTensors, of them."""

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = list(modules)
        for module in self._modules:
            # Shares are of the whole batch, so gradients are summed; and a sum alone is what gloo can.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._managed = [one for module in self._modules for group in fsdp_groups(module) for one in group.fsdp_params]
        self.parameters: list[nn.Parameter] = [managed.sharded_param for managed in self._managed]

    def _post_backward(self) -> list[nn.Parameter]:
        """Starts the reduction of what the backwards have left, and frees the whole parameters.

        Returns the shards whose parameters this replica has used. The others add zeros, so that the buffers of all
        replicas match.
        """
        used = []
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


class FsdpUnit(_FsdpModules):
    """Parameters in a shell, a module that holds these and nothing else and is never called.

    ``stages``: those that use them. ``shards``: by name, what the model holds between calls.
    """

    def __init__(
        self,
        stages: frozenset[int],
        parameters: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
        transport: Transport,
        precision: Precision | None,
    ) -> None:
        self.stages, self.names = stages, tuple(parameters)
        self._precision = precision
        shell = nn.Module()
        for place, parameter in enumerate(parameters.values()):
            shell.register_parameter(str(place), parameter)
        what = self.names[0] + f" and {len(self.names) - 1} more" * (len(self.names) > 1)
        policy = MixedPrecisionPolicy()
        if precision is not None and parameter.is_floating_point():  # as all of them
            policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
        self.shell: FSDPModule = fully_shard(shell, mesh=mesh["shard"], reshard_after_forward=False, mp_policy=policy)
        self._all_gather = _Through(transport, "all_gather", "gather", f"parameters {what}", waits=False)
        self.shell.set_custom_all_gather(cast(Any, self._all_gather))
        scatter = _Through(transport, "reduce_scatter", "shard", f"gradients {what}")
        self.shell.set_custom_reduce_scatter(cast(Any, scatter))
        super().__init__([self.shell])
        if mesh.size(0) > 1:
            # the sum of a shard over the nodes, which FSDP2 calls behind its reduce-scatter
            self.shell.set_all_reduce_hook(_Through(transport, "all_reduce", "replica", f"gradients {what}"))
        self.shards = dict(zip(self.names, self.parameters, strict=True))
        for shard, old in zip(self.parameters, parameters.values(), strict=True):
            vars(shard).update(vars(old))
        self._handle: Any = None
        self._reduced = False

    def gather(self) -> None:
        self._handle = self.shell.unshard(async_op=True)

    def gathered(self) -> dict[str, nn.Parameter]:
        """Waits for the all-gather; the whole parameters, the same objects in every call."""
        self._all_gather.wait()
        self._handle.wait()
        whole = [accumulating(managed.unsharded_param, self._precision) for managed in self._managed]
        return dict(zip(self.names, whole, strict=True))

    def free(self) -> None:
        self.shell.reshard()

    def reduce(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Starts the reduction of what the backwards left, or of these gradients, and frees the whole parameters."""
        if gradients is not None:
            for name, managed in zip(self.names, self._managed, strict=True):
                managed.unsharded_param.grad = gradients.get(name)
        self._post_backward()
        self._reduced = True

    def finish(self) -> None:
        """The shards' ``.grad`` may be used."""
        if self._reduced:
            fsdp_end_backward(self.shell)
        self._reduced = False


class _Through:
    """A collective of FSDP2's, through the transport, so that it is ordered, counted and aborted like all others.

    ``waits``: FSDP2 uses the result at once; else it runs beside the caller, and who needs it waits.
    """

    def __init__(self, transport: Transport, operation: str, scope: str, what: str, waits: bool = True) -> None:
        self._transport, self._operation, self._scope = transport, operation, scope
        self._what, self._waits = what, waits
        self._work: Work | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor | None = None, **options: Any) -> None:
        """``options``: its group, what it sums by and whether it waits, which are the transport's to say."""
        step = Collective(self._operation, self._scope, output_tensor, input_tensor)
        self._work = self._transport.start([step], self._what)
        if self._waits:
            self.wait()

    def wait(self) -> None:
        if self._work is not None:  # none where a shard group is one rank
            self._work.wait()
        self._work = None


def finish_setup(units: Sequence[FsdpUnit]) -> None:
    """One set of streams for all units, and what FSDP2 makes at the first forward, which a shell never has."""
    share_comm_ctx([unit.shell for unit in units])
    for unit in units:
        fsdp_set_up(unit.shell)


def accumulating(parameter: nn.Parameter, precision: Precision | None) -> nn.Parameter:
    """The parameter, whose gradients add up over micro-batches in no less than float32."""
    if precision is not None and parameter.requires_grad and parameter.is_floating_point():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if parameter.grad_dtype != wide:
            parameter.grad_dtype = wide
    return parameter


class FsdpStage(_FsdpModules):
    """The FSDP modules of one stage: ``roots``, and those inside of them."""

    def __init__(self, roots: Sequence[FSDPModule]) -> None:
        self._roots = list(roots)
        self._gathered = False
        for root in self._roots:
            fsdp_set_up(root)
            if isinstance(root, fx.GraphModule):  # a captured stage may return views: nobody writes into them
                name = re.escape(type(root).__name__)
                warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({name}\) returned a view tensor")
        inside = [one for root in roots for one in cast(nn.Module, root).modules() if isinstance(one, FSDPModule)]
        together: dict[int, FSDPModule] = {}
        for one in inside:  # of several that were sharded together, one
            together.setdefault(id(fsdp_state(one)), one)
        super().__init__(list(together.values()))
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            # What is whole needs no prefetch; torch's own looks up indices that another stage's end has cleared.
            module.set_modules_to_backward_prefetch([module])

    def gather(self) -> None:
        """Ahead of a forward: the parameters lie whole in the modules."""
        if self._gathered:
            return
        self._set_gathered(True)
        for handle in [module.unshard(async_op=True) for module in self._modules]:
            if handle is not None:
                handle.wait()

    def reduce(self) -> list[nn.Parameter]:
        """After the last backward: starts summing gradients into the shards' ``.grad``, and frees the rest.

        Returns the shards whose parameters this replica has used.
        """
        self._set_gathered(False)
        used = self._post_backward()
        for root in self._roots:
            fsdp_end_backward(root)
        return used

    def _set_gathered(self, gathered: bool) -> None:
        """Parameters stay whole, and gradients add up, as long as they are gathered."""
        self._gathered = gathered
        for root in self._roots:
            root.set_is_last_backward(not gathered)
        for module in self._modules:
            module.set_requires_gradient_sync(not gathered, recurse=False)
            module.set_reshard_after_backward(not gathered, recurse=False)

    def free(self) -> None:
        """Without a backward: only shards are left."""
        if self._gathered:
            for root in self._roots:
                fsdp_forget(root)
        self._gathered = False


def sharded_stages(modules: Mapping[int, nn.Module]) -> dict[int, FsdpStage]:
    """By stage, what FSDP2 manages in the modules of a rank, where that is anything. They share streams."""
    roots = {stage: found for stage, module in modules.items() if (found := list(_roots_in(module)))}
    if roots:
        share_comm_ctx([root for found in roots.values() for root in found])
    return {stage: FsdpStage(found) for stage, found in roots.items()}


def _roots_in(module: nn.Module) -> Iterator[FSDPModule]:
    """The FSDP modules that are inside of no other."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _roots_in(child)
