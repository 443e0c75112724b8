"""DTensors: helpers for tensors that are spread over a mesh of ranks.

These functions import torch.distributed only when they get a DTensor: a torch build may lack torch.distributed.
"""

from __future__ import annotations

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
    to_local = getattr(tensor, "to_local", None)  # not isinstance: torch.distributed may not exist
    shard: Tensor = tensor if to_local is None else to_local()
    return shard


def lines_of(tensor: DTensor) -> list[list[int]]:
    """The global ranks along each dimension of a DTensor's mesh that this rank is among."""
    from torch import distributed as dist

    mesh = tensor.device_mesh
    return [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)]


def whole_of(tensor: Tensor) -> Tensor:
    """The full tensor; for a DTensor this is a collective call of all ranks of its mesh."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


def part_of(like: Tensor, value: Tensor) -> Tensor:
    """The part of ``value``, a full tensor or spread like ``like``, for ``like``'s local shard; no communication."""
    if is_dtensor(value) or not is_dtensor(like):
        return local(value)
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: each rank has the same full tensor and takes its own part of it.
    value = value.detach().to(like.device)
    return local(distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None))


def shard_of(spread: DTensor, whole: Tensor) -> DTensor:
    """``whole``, spread like ``spread``, in memory of its own; no communication: all ranks have the same ``whole``."""
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        return distribute_tensor(whole.detach(), spread.device_mesh, spread.placements, src_data_rank=None).clone()  # type: ignore[return-value]


def description_of(tensor: Tensor) -> str:
    """Describes how a tensor is spread; ranks that spread it in the same way get equal texts."""
    if not is_dtensor(tensor):
        return "whole"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dimension {index}" for index in range(mesh.ndim))
    parts = zip(tensor.placements, names, mesh.mesh.shape, strict=True)
    return ", ".join(f"{placement} over {name} of {size}" for placement, name, size in parts)


def check_fits(name: str, target: Tensor, where: object, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raises CheckpointError unless ``target`` can take values of this shape and type, which ``where`` holds."""
    if target.shape != shape:
        raise CheckpointError(
            f"{name} has shape {list(target.shape)}, {where} has {list(shape)}; build the model with the configuration "
            "that was saved, or call it once before fxpipe.compile if its forward gives the buffer a shape"
        )
    if not converts(dtype, target.dtype):
        raise CheckpointError(
            f"{name} is {target.dtype}, {where} has it as {dtype}, and only floats of 16 to 64 bits are converted, for "
            "others may need scales; build the model with the types that were saved"
        )


def settle_foreach(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer with ``foreach=False`` in each group that mixes plain tensors and DTensors, or meshes.

    torch's ``foreach`` implementations cannot mix them. A group whose ``foreach`` the user has set stays unchanged.
    """
    for group in optimizer.param_groups:
        # foreach=None leaves the choice to torch. A group with the user's choice, or with fused, is left alone.
        kinds = {tensor.device_mesh if is_dtensor(tensor) else None for tensor in group["params"]}
        if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False
    return optimizer
