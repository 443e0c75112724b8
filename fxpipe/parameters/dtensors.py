"""DTensors: what fxpipe has to know of a tensor that is spread over a mesh of ranks.

Nothing here imports torch.distributed unless a DTensor is at hand, which can only be where it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.precision import converts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over a mesh."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)  # by what it can do: torch.distributed may not be there
    shard: Tensor = tensor if to_local is None else to_local()
    return shard


def ranks_of(tensor: DTensor) -> frozenset[int]:
    """The ranks that a DTensor is spread over, counted over all processes."""
    return frozenset(tensor.device_mesh.mesh.flatten().tolist())


def is_cut_over(tensor: DTensor, ranks: Sequence[int]) -> bool:
    """Whether a DTensor is cut along its first dimension over these ranks, in this order, and not otherwise spread."""
    (placement, *others) = tensor.placements
    return not others and placement.is_shard(0) and tensor.device_mesh.mesh.tolist() == list(ranks)


def whole_of(tensor: Tensor) -> Tensor:
    """The whole of a tensor. For a DTensor a collective call of its mesh."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


def part_of(held: Tensor, given: Tensor) -> Tensor:
    """What of ``given``, a whole tensor or spread as ``held`` is, goes where ``held``'s memory is. Nothing travels."""
    if is_dtensor(given) or not is_dtensor(held):
        return local(given)
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: each rank has the same whole tensor, and takes its part of it.
    given = given.detach().to(held.device)
    return local(distribute_tensor(given, held.device_mesh, held.placements, src_data_rank=None))


def description_of(tensor: Tensor) -> str:
    """How a tensor is spread, in words that are equal on ranks where it is spread in the same way."""
    if not is_dtensor(tensor):
        return "whole"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dimension {place}" for place in range(mesh.ndim))
    parts = zip(tensor.placements, names, mesh.mesh.shape, strict=True)
    return ", ".join(f"{placement} over {name} of {size}" for placement, name, size in parts)


def check_fits(name: str, target: Tensor, where: object, shape: torch.Size, dtype: torch.dtype) -> None:
    """CheckpointError unless numbers of this shape and type, which ``where`` has, go into ``target``."""
    if target.shape != shape:
        raise CheckpointError(
            f"{name} has shape {list(target.shape)}, {where} has {list(shape)}; build the model with the configuration "
            "that was saved"
        )
    if not converts(dtype, target.dtype):
        raise CheckpointError(
            f"{name} is {target.dtype}, {where} has it as {dtype}, and only floats of 16 to 64 bits are converted, for "
            "others may need scales; build the model with the types that were saved"
        )


def settle_foreach(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer; where a group has plain tensors and DTensors, or those of several meshes, it steps one by one.

    torch's ``foreach`` implementations cannot mix them. A group for which the user has chosen stays unchanged.
    """
    for group in optimizer.param_groups:
        # foreach=None leaves the choice to torch. Whoever has made one, or asks for fused, keeps it.
        kinds = {tensor.device_mesh if is_dtensor(tensor) else None for tensor in group["params"]}
        if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False
    return optimizer
