"""Checkpoints: state dicts in the plain model's own names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError, nearest
from fxpipe.ownership import Ownership
from fxpipe.reduce import broadcast
from fxpipe.transport import Transport


def full_state_dict(
    model: nn.Module, mine: nn.Module, owners: Ownership, transport: Transport, device: torch.device
) -> dict[str, Tensor]:
    """The whole model's state dict, on every rank: each tensor comes from the first rank that holds it.

    A collective call of a pipe group. On ranks that do not hold a tensor it is on ``device``.
    """
    held = mine.state_dict()
    state: dict[str, Tensor] = {}
    for name, like in model.state_dict().items():
        if not isinstance(like, Tensor):
            raise CheckpointError(f"{name!r} is a module's extra state, which no rank owns; keep it in a buffer")
        owner = owners.first_owner(name)
        tensor = held[name] if name in held else torch.empty_like(like, device=device)
        if transport.pipe_rank is not None:
            tensor = tensor.to(device) if transport.pipe_rank == owner else torch.empty_like(like, device=device)
            broadcast([tensor], transport, "pipe", owner)
        state[name] = tensor
    return state


def load_into(model: nn.Module, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies what ``module`` holds out of a state dict of its own or of the whole ``model``; all of it or nothing."""
    held, whole = module.state_dict(), model.state_dict()
    unknown = [name for name in state if name not in whole]
    if unknown:
        raise CheckpointError(f"the model has no {unknown[0]!r}{nearest(unknown[0], whole)}")
    missing = [name for name in held if name not in state]
    if missing:
        raise CheckpointError(
            f"the state dict lacks {len(missing)} of {len(held)} tensors, first {missing[0]!r}"
            f"{nearest(missing[0], state)}; load a plain model's state dict, or this rank's own part"
        )
    for name, tensor in held.items():
        if state[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, the state dict has {list(state[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(state[name])
