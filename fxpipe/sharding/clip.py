"""Clip: the norm of a whole model's gradient, whoever has which part of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.parameters.dtensors import is_dtensor, whole_of
from fxpipe.sharding.gradients import Piece
from fxpipe.validation import is_flag, shown


def clip_grad_norm_(
    pieces: Sequence[Piece],
    transport: Transport,
    sharded: bool,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients so that the norm of the whole model's gradient is at most ``max_norm``; returns that norm.

    With n the norm of all gradients as one vector, each is multiplied by min(1, max_norm / (n + 1e-6)), as in
    ``torch.nn.utils.clip_grad_norm_``. A norm of order p is (Σ |gᵢ|ᵖ)^(1/p): the p-th powers of the ranks' own norms
    are summed over the pipe group and, where gradients are ``sharded``, over the shard group; ``norm_type=inf`` is
    their maximum. A tied parameter is counted by its first owner alone, and scaled by all. Tensor-parallel gradients
    (DTensors) are summed over their own mesh. The norm is 0-dimensional, and the same bits on every rank; it is 0
    where there are no gradients.

    A collective call of all ranks.

    Raises:
        RunError: ``max_norm`` is no number from 0, ``norm_type`` none above 0; or the norm is inf or nan, and
            ``error_if_nonfinite``.
    """
    if isinstance(max_norm, Iterator) or not _number(max_norm) >= 0:
        hint = "; whose gradients these are, it knows" * isinstance(max_norm, (Iterator, list))
        raise RunError(f"max_norm is {shown(max_norm)}; it is the largest norm that stays, a number from 0{hint}")
    _check_order(norm_type)
    if not is_flag(error_if_nonfinite):
        raise RunError(f"error_if_nonfinite is {shown(error_if_nonfinite)}; it is True or False")
    max_norm, norm_type = float(max_norm), float(norm_type)
    gradients = [(piece, gradient) for piece in pieces if (gradient := piece.current_gradient()) is not None]
    # The norm of norms is the norm of all, of whatever order: first over tensors, then over shards, then over stages.
    total = _norm([gradient for piece, gradient in gradients if piece.counts], norm_type, transport.device)
    for scope in ("shard", "pipe") if sharded else ("pipe",):
        total = _over(scope, transport, total, norm_type)
    wide = any(gradient.dtype == torch.float64 for _, gradient in gradients)
    norm = total if wide else total.float()
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RunError(
            f"the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped; "
            "look for the first inf or nan, or write error_if_nonfinite=False to go on"
        )
    for group in _alike(gradient for _, gradient in gradients):
        # torch scales what it finds in the .grad of something, by the norm in float64, whatever types a rank has.
        holders = [gradient.detach() for gradient in group]
        for holder, gradient in zip(holders, group, strict=True):
            holder.grad = gradient
        torch.nn.utils.clip_grads_with_norm_(holders, max_norm, total)
    return norm


def grad_norms(
    part: Mapping[str, Sequence[Piece]], transport: Transport, sharded: bool, norm_type: float
) -> dict[str, Tensor]:
    """The norm of the gradient of each of these parameters, as ``clip_grad_norm_`` counts them; 0 where there is none.
    ``part``: the names of some parameters, the same on all ranks, and this rank's pieces of each.

    0-dimensional, float64, the same bits on every rank. A collective call of all ranks. RunError:
    ``norm_type`` is no number above 0.
    """
    _check_order(norm_type)
    order = float(norm_type)
    total = torch.zeros(len(part), dtype=torch.float64, device=transport.device)
    for place, pieces in enumerate(part.values()):
        gradients = [
            gradient for piece in pieces if piece.counts and (gradient := piece.current_gradient()) is not None
        ]
        if gradients:
            total[place] = _norm(gradients, order, transport.device)
    for scope in ("shard", "pipe") if sharded else ("pipe",):
        total = _over(scope, transport, total, order)
    return dict(zip(part, total.unbind(), strict=True))


def _check_order(norm_type: float) -> None:
    if not _number(norm_type, "inf") > 0:
        raise RunError(f"norm_type is {shown(norm_type)}; write a positive number, or inf for the largest gradient")


def _norm(gradients: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """This rank's norm, in float64, where powers and their sums lose nothing that float32 has."""
    parts = [torch.nn.utils.get_total_norm(group, order) for group in _alike(g for g in gradients if g.numel())]
    whole = [whole_of(part).double() for part in parts]
    if not whole:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([part.to(whole[0].device) for part in whole]), order)
    return norm


def _alike(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Plain tensors apart from DTensors, and these by mesh and placement."""
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if is_dtensor(gradient) else None
        groups.setdefault(key, []).append(gradient)
    return list(groups.values())


def _over(scope: str, transport: Transport, norm: Tensor, order: float) -> Tensor:
    """Norms over a group of ranks, each with its part."""
    ranks = transport.ranks(scope)
    if len(ranks) == 1:
        return norm
    if math.isinf(order):
        # Each rank's in a place of its own: a maximum of gloo or NCCL may lose a nan, and a gather is waited for.
        norms = norm.new_zeros(len(ranks), *norm.shape)
        norms[ranks.index(transport.rank)] = norm
        transport.all_reduce(scope, norms)
        return norms.amax(0)
    power = norm.pow(order)
    transport.all_reduce(scope, power)
    return power.pow(1.0 / order)


def _number(given: Any, *words: str) -> float:
    """A number, or a tensor with one; nan for anything else, but for these words."""
    try:
        return math.nan if isinstance(given, str) and given not in words else float(given)
    except (TypeError, ValueError):
        return math.nan
