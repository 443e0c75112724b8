"""Broadcast: what one rank holds, to all of a group, a flat buffer per type at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxpipe.distributed.collective import Scope
from fxpipe.distributed.transport import Transport


def broadcast(tensors: Sequence[Tensor], transport: Transport, scope: Scope, source: int) -> None:
    """Overwrites the tensors by those of the group's rank number ``source``."""
    # as bytes: a backend may not know every type
    in_flat_buffers(tensors, lambda flat: transport.broadcast(scope, flat.view(torch.uint8), source))


def in_flat_buffers(tensors: Sequence[Tensor], call: Callable[[Tensor], object]) -> None:
    """Has ``call`` change the tensors in place: all of a type at once, as one flat buffer."""
    for group in _by_type([tensor.detach() for tensor in tensors]):
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        call(flat)
        offset = 0
        for tensor in group:
            _overwrite(tensor, flat[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """Into an expanded tensor, into whose repetitions torch writes nothing: what repeats, once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim]:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
