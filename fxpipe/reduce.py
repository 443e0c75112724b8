"""Reduce: sums gradients over groups of ranks, a flat buffer per type at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fxpipe.transport import Transport


def sum_gradients(parameters: Sequence[nn.Parameter], transport: Transport, scope: str | tuple[int, ...]) -> None:
    """Sums ``.grad`` over the group; a parameter that nobody used keeps None, as in torch's DDP."""
    if not parameters:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device="cpu")
    used = transport.maximum(scope, used)
    shared = [parameter for parameter, anyone in zip(parameters, used.tolist(), strict=True) if anyone]
    for parameter in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for gradients in _by_type([p.grad for p in shared if p.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        transport.all_reduce(scope, flat)
        offset = 0
        for gradient in gradients:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()


def broadcast(tensors: Sequence[Tensor], transport: Transport, scope: str | tuple[int, ...], source: int) -> None:
    """Overwrites the tensors by those of the group's rank number ``source``."""
    for group in _by_type([tensor.detach() for tensor in tensors]):
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        transport.broadcast(scope, flat.view(torch.uint8), source)  # bytes: a backend may not know every type
        offset = 0
        for tensor in group:
            tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
