"""FSDP unit: parameters that torch's FSDP2 gathers, reduces and frees together, at fxpipe's word.

FSDP2 is applied to a shell, a module that holds these parameters and nothing else and is never called; its collectives
go through fxpipe's transport, so that they are ordered, counted and aborted like all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx

from fxpipe.distributed.collective import Collective, Work
from fxpipe.distributed.transport import Transport
from fxpipe.precision import Precision
from fxpipe.torch_compat import fsdp_end_backward, fsdp_groups, fsdp_set_up

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FsdpUnit:
    """Parameters that are gathered, reduced and freed together."""

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
        shell, floating = nn.Module(), True
        for place, parameter in enumerate(parameters.values()):
            shell.register_parameter(str(place), parameter)
            floating = parameter.is_floating_point()
        what = f"{self.names[0]}" + (f" and {len(self.names) - 1} more" if len(self.names) > 1 else "")
        policy = MixedPrecisionPolicy()
        if precision is not None and floating:
            policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
        self.shell: FSDPModule = fully_shard(shell, mesh=mesh["shard"], reshard_after_forward=False, mp_policy=policy)
        self._all_gather = _AllGather(transport, f"parameters {what}")
        self.shell.set_custom_all_gather(cast(Any, self._all_gather))
        self.shell.set_custom_reduce_scatter(cast(Any, _ReduceScatter(transport, f"gradients {what}")))
        # Shares are of the whole batch, so gradients are summed; and a sum alone, without a factor, is what gloo can.
        self.shell.set_gradient_divide_factor(1.0)
        self.shell.set_force_sum_reduction_for_comms(True)
        if mesh.size(0) > 1:
            self.shell.set_all_reduce_hook(_AllReduce(transport, f"gradients {what}"))
        self._shards = dict(zip(self.names, self._present(), strict=True))
        for shard, old in zip(self._shards.values(), parameters.values(), strict=True):
            vars(shard).update(vars(old))
        self._whole: list[nn.Parameter] = []
        self._handle: Any = None
        self._reduced = False

    def _present(self) -> list[nn.Parameter]:
        return list(cast(nn.Module, self.shell)._parameters.values())  # type: ignore[arg-type]

    def shards(self) -> dict[str, nn.Parameter]:
        """The DTensors, by name: what the model holds between calls."""
        return self._shards

    def gather(self) -> None:
        self._handle = self.shell.unshard(async_op=True)

    def gathered(self) -> dict[str, nn.Parameter]:
        """Waits for the all-gather; the whole parameters, the same objects in every call."""
        self._all_gather.wait()
        self._handle.wait()
        self._whole = self._present()
        for parameter, shard in zip(self._whole, self._shards.values(), strict=True):
            if parameter.requires_grad != shard.requires_grad:
                parameter.requires_grad_(shard.requires_grad)
            accumulating(parameter, self._precision)
        return dict(zip(self.names, self._whole, strict=True))

    def free(self) -> None:
        self.shell.reshard()

    def reduce(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Starts the reduction of what the backwards left, or of these gradients, and frees the whole parameters.

        What this replica did not use adds zeros, so that the buffers of all replicas match.
        """
        for name, parameter in zip(self.names, self._whole, strict=True):
            if gradients is not None:
                parameter.grad = gradients.get(name)
            if parameter.requires_grad and parameter.grad is None:
                dtype = parameter.grad_dtype or parameter.dtype
                parameter.grad = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        for group in fsdp_groups(self.shell):
            group.post_backward()
        self._reduced = True

    def finish(self) -> None:
        """The shards' ``.grad`` may be used."""
        if self._reduced:
            fsdp_end_backward(self.shell)
        self._reduced = False


class _AllGather:
    """FSDP2's all-gather over the transport, beside the caller; the unit waits for it."""

    def __init__(self, transport: Transport, what: str) -> None:
        self._transport, self._what = transport, what
        self._work: Work | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        step = Collective("all_gather", "gather", output_tensor, input_tensor)
        self._work = self._transport.start([step], self._what)

    def wait(self) -> None:
        if self._work is not None:  # none where a shard group is one rank
            self._work.wait()
        self._work = None


class _ReduceScatter:
    """FSDP2's reduce-scatter over the transport. It uses the result at once, so it is waited for here."""

    def __init__(self, transport: Transport, what: str) -> None:
        self._transport, self._what = transport, what

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        step = Collective("reduce_scatter", "shard", output_tensor, input_tensor)
        self._transport.start([step], self._what).wait()


class _AllReduce:
    """The sum of a shard over the nodes, which FSDP2 calls behind its reduce-scatter."""

    def __init__(self, transport: Transport, what: str) -> None:
        self._transport, self._what = transport, what

    def __call__(self, shard: Tensor) -> None:
        self._transport.start([Collective("all_reduce", "replica", shard)], self._what).wait()


def finish_setup(shells: Sequence[FSDPModule]) -> None:
    """One set of streams for all units, and what FSDP2 makes at the first forward, which a shell never has."""
    share_comm_ctx(list(shells))
    for shell in shells:
        fsdp_set_up(shell)


def accumulating(parameter: nn.Parameter, precision: Precision | None) -> nn.Parameter:
    """The parameter, whose gradients add up over micro-batches in no less than float32."""
    if precision is not None and parameter.requires_grad and parameter.is_floating_point():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if parameter.grad_dtype != wide:
            parameter.grad_dtype = wide
    return parameter
