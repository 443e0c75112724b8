"""Clip: computes the norm of the whole model's gradient over all ranks, and clips by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.sharding.gradients import Piece
from fxpipe.tensors.dtensors import is_dtensor, local, whole_of
from fxpipe.validation import is_flag, shown


@torch.no_grad()
def clip_grad_norm_(
    pieces: Sequence[Piece],
    transport: Transport,
    sharded: bool,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients so that the whole model's gradient norm is at most ``max_norm``; returns the norm before.

    With n the norm of all gradients as a single vector, each gradient is multiplied by min(1, max_norm / (n + 1e-6)),
    as in ``torch.nn.utils.clip_grad_norm_``. A norm of order p is (Σ |gᵢ|ᵖ)^(1/p): the p-th powers of the ranks' own
    norms are summed over the pipe group and, if gradients are ``sharded``, over the shard group; ``norm_type=inf``
    takes the maximum. Only the first owner counts a tied parameter, and all owners scale it. Tensor-parallel gradients
    (DTensors) are summed over their own mesh. The norm is 0-dimensional, and the same bits on every rank; it is 0
    if there are no gradients.

    A collective call of all ranks.

    Raises:
        RunError: ``max_norm`` is no number from 0, ``norm_type`` no number above 0; or the norm is inf or nan, and
            ``error_if_nonfinite`` is True.
    """
    if isinstance(max_norm, Iterator) or not _number(max_norm) >= 0:
        hint = "; whose gradients these are, it knows" * isinstance(max_norm, (Iterator, list))
        raise RunError(f"max_norm is {shown(max_norm)}; it is the largest norm that stays, a number from 0{hint}")
    _check_order(norm_type)
    if not is_flag(error_if_nonfinite):
        raise RunError(f"error_if_nonfinite is {shown(error_if_nonfinite)}; it is True or False")
    max_norm, norm_type = float(max_norm), float(norm_type)
    gradients = [(piece, gradient) for piece in pieces if (gradient := piece.current_gradient()) is not None]
    total = grad_norm(pieces, transport, sharded, norm_type)
    wide = any(gradient.dtype == torch.float64 for _, gradient in gradients)
    norm = total if wide else total.float()
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RunError(
            f"the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped; "
            "look for the first inf or nan"
        )
    for group in _alike(gradient for _, gradient in gradients):
        # torch scales the .grad of tensors, by the norm in float64, whatever dtypes a rank has.
        holders = [gradient.detach() for gradient in group]
        for holder, gradient in zip(holders, group, strict=True):
            holder.grad = gradient
        torch.nn.utils.clip_grads_with_norm_(holders, max_norm, total)
    return norm


@torch.no_grad()
def grad_norm(pieces: Iterable[Piece], transport: Transport, sharded: bool, norm_type: float = 2.0) -> Tensor:
    """Returns the norm of the whole model's gradient as ``clip_grad_norm_`` does, in float64, and scales nothing. A
    collective call of all ranks."""
    found = [gradient for piece in pieces if piece.counts and (gradient := piece.current_gradient()) is not None]
    # For any order, the norm of norms is the norm of all: first over tensors, then over shards, then over stages.
    return _over("pipe", transport, _of_replica(found, transport, sharded, norm_type), norm_type)


@torch.no_grad()
def grad_norms(
    part: Mapping[str, Sequence[Piece]], transport: Transport, sharded: bool, norm_type: float
) -> dict[str, Tensor]:
    """Returns name → gradient norm of each parameter, counted as in ``clip_grad_norm_``; 0 without a gradient.
    ``part``: name → this rank's pieces of the parameter; the names are the same on all ranks.

    Norms are 0-dimensional, float64, the same bits on every rank. A collective call of all ranks. RunError:
    ``norm_type`` is no number above 0.
    """
    _check_order(norm_type)
    order = float(norm_type)
    total = torch.zeros(len(part), dtype=torch.float64, device=transport.device)
    for index, pieces in enumerate(part.values()):
        gradients = [
            gradient for piece in pieces if piece.counts and (gradient := piece.current_gradient()) is not None
        ]
        if gradients:
            total[index] = _norm(gradients, order, transport.device)
    if sharded:
        # A DTensor's norm is over its own mesh already: all ranks of the shard group have it.
        are_spread = [any(is_dtensor(piece.data) for piece in pieces) for pieces in part.values()]
        spread = torch.tensor(are_spread, device=transport.device)
        total = torch.where(spread, total, _over("shard", transport, total, order))
    total = _over("pipe", transport, total, order)
    return dict(zip(part, total.unbind(), strict=True))


def _of_replica(gradients: Sequence[Tensor], transport: Transport, sharded: bool, order: float) -> Tensor:
    """Returns the norm of the gradients of this pipe rank's stages, of which ranks have shards if they are ``sharded``;
    but DTensors are shards over their own mesh alone."""
    spread = [gradient for gradient in gradients if is_dtensor(gradient)]
    if not sharded or not spread:
        norm = _norm(gradients, order, transport.device)
        return _over("shard", transport, norm, order) if sharded else norm
    own = _norm([gradient for gradient in gradients if not is_dtensor(gradient)], order, transport.device)
    both = [_over("shard", transport, own, order), _norm(spread, order, transport.device)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(both), order)
    return total


def _check_order(norm_type: float) -> None:
    if not _number(norm_type, "inf") > 0:
        raise RunError(f"norm_type is {shown(norm_type)}; write a positive number, or inf for the largest gradient")


def _norm(gradients: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """Returns this rank's norm in float64, in which powers and their sums keep float32's precision and range."""
    filled = (_filled(gradient) for gradient in gradients if gradient.numel())
    parts = [torch.nn.utils.get_total_norm(group, order) for group in _alike(filled)]
    whole = [whole_of(part).double() for part in parts]
    if not whole:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([part.to(whole[0].device) for part in whole]), order)
    return norm


def _filled(gradient: Tensor) -> Tensor:
    """The gradient; with a zero as this rank's shard if that is empty: torch finds no largest element in it."""
    if not is_dtensor(gradient) or (shard := local(gradient)).numel():
        return gradient
    mesh, placements, shape, stride = gradient.device_mesh, gradient.placements, gradient.shape, gradient.stride()
    zero = shard.new_zeros([1] * shard.ndim)
    return gradient.from_local(zero, mesh, placements, run_check=False, shape=shape, stride=stride)


def _alike(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups gradients: plain tensors, and DTensors by mesh and placement."""
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if is_dtensor(gradient) else None
        groups.setdefault(key, []).append(gradient)
    return list(groups.values())


def _over(scope: str, transport: Transport, norm: Tensor, order: float) -> Tensor:
    """Combines the norms of a group's ranks to the norm of the group."""
    ranks = transport.ranks(scope)
    if len(ranks) == 1:
        return norm
    if math.isinf(order):
        # Each rank writes its own place: a maximum of gloo or NCCL may lose a nan, and a gather blocks the host.
        norms = norm.new_zeros(len(ranks), *norm.shape)
        norms[ranks.index(transport.rank)] = norm
        transport.all_reduce(scope, norms)
        return norms.amax(0)
    power = norm.pow(order)
    transport.all_reduce(scope, power)
    return power.pow(1.0 / order)


def _number(value: Any, *words: str) -> float:
    """Returns a number, a tensor's number, or the number of an allowed word; nan for anything else."""
    try:
        return math.nan if isinstance(value, str) and value not in words else float(value)
    except (TypeError, ValueError):
        return math.nan
