"""Checkpoints: state dicts in the plain model's own names. With zero=3 a rank holds shards, as DTensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fxpipe.distributed.collective import Collective
from fxpipe.distributed.transport import Transport, broadcast, overwrite
from fxpipe.errors import CheckpointError, nearest
from fxpipe.parameters.dtensors import is_cut_over, is_dtensor, local, part_of, whole_of
from fxpipe.parameters.own_buffers import mark_own_buffers
from fxpipe.parameters.ownership import Ownership
from fxpipe.precision import converts
from fxpipe.validation import shown


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's state dict; CheckpointError where it has more than tensors, which would be lost."""
    state: dict[str, Tensor] = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name!r} is a module's extra state, which no rank owns; keep it in a buffer")
    return state


def full_state_dict(
    model: nn.Module, mine: nn.Module, owners: Ownership, transport: Transport, device: torch.device
) -> dict[str, Tensor]:
    """The whole model's state dict, on every rank: each tensor comes from the first rank that holds it.

    A collective call of a pipe group, and with shards of all ranks. On ranks that do not hold a tensor it is on
    ``device``.
    """
    held = mine.state_dict()
    state: dict[str, Tensor] = {}
    for name, like in tensors_of(model).items():
        owner = owners.first_owner(name)
        tensor = held.get(name, like)
        if transport.pipe_rank is not None:
            if transport.pipe_rank == owner:
                tensor = _whole(tensor, transport).to(device)
            else:
                tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
            broadcast([tensor], transport, "pipe", owner)
        state[name] = tensor
    if transport.data_rank:
        mark_own_buffers(model, state)
    return state


def _whole(tensor: Tensor, transport: Transport) -> Tensor:
    """A shard's whole tensor: a collective call of the ranks that hold the shards.

    ``full_tensor`` would do, but over groups that nobody closes where a rank fails, and by a mesh that torch caches
    beyond the end of a world of processes.
    """
    own = local(tensor)
    if not is_dtensor(tensor):
        return tensor
    if not is_cut_over(tensor, transport.ranks("gather")):  # the user's own mesh, which parallelize= was given
        return whole_of(tensor)
    ranks = len(transport.ranks("gather"))
    part = own.new_zeros((-(-tensor.shape[0] // ranks), *tensor.shape[1:]))
    part[: len(own)] = own
    whole = part.new_empty((ranks * len(part), *tensor.shape[1:]))
    transport.start([Collective("all_gather", "gather", whole, part)], "a parameter for the state dict").wait()
    return whole[: tensor.shape[0]].clone()


def load_into(model: nn.Module, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies what ``module`` holds out of a state dict of its own or of the whole ``model``; all of it or nothing."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state dict is {shown(state)}; it is what model.state_dict() gives, name -> tensor")
    held, whole = module.state_dict(), tensors_of(model)
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
        if not isinstance(state[name], Tensor) or state[name].is_meta or state[name].layout is not torch.strided:
            raise CheckpointError(f"{name} of the state dict is {shown(state[name])}; it is a dense tensor with values")
        if not converts(state[name].dtype, tensor.dtype):
            raise CheckpointError(
                f"{name} is {tensor.dtype}, the state dict has it as {state[name].dtype}, and only floats of 16 to 64 "
                "bits are converted; load one of the model's types"
            )
        if state[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, the state dict has {list(state[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in held.items():
            overwrite(local(tensor), part_of(tensor, state[name]))
