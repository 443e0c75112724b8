"""Replicas: the numbers among an evaluation's outputs, put together over the data axis; rows stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.loss import Sum
from fxpipe.run.step.batch_digest import number_of
from fxpipe.torch_compat import pytree


def over_replicas(transport: Transport, output: Any, is_of_all: bool = False) -> Any:
    """A replica's output with the whole batch's numbers in it. A collective call of the replicas that have an output.

    A 0-dimensional tensor of fractions is this replica's part of a mean, weighted already by its share of the whole
    batch, so that the parts only add up; and so do counts (integers), and the total and count of a ``Sum``.
    ``is_of_all``: each replica's output is that of all rows, so that counts and sums are the whole batch's as they are.
    RunError on all of them where they have different numbers.
    """
    if transport.data_size == 1:
        return output
    leaves, spec = pytree.tree_flatten(output, is_leaf=lambda node: isinstance(node, Sum))
    if is_of_all:
        leaves = [leaf if _is_mean(leaf) else _Whole(leaf) for leaf in leaves]
    numbers = [number for leaf in leaves for number in _numbers_in(leaf)]
    _check_alike(transport, f"{spec} of {', '.join(map(_kind, numbers))}" if numbers else "none")
    summed = iter(_summed(transport, numbers))
    return pytree.tree_unflatten([_with_sums(leaf, [next(summed) for _ in _numbers_in(leaf)]) for leaf in leaves], spec)


def _numbers_in(leaf: Any) -> list[Any]:
    """What of a leaf is added up."""
    if isinstance(leaf, Sum):
        return [leaf.total, leaf.count]
    return [leaf] if isinstance(leaf, Tensor) and not leaf.dim() else []


def _is_mean(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.dim() and (leaf.is_floating_point() or leaf.is_complex())


class _Whole(NamedTuple):
    """What needs no summing."""

    leaf: Any


def _with_sums(leaf: Any, sums: Sequence[Any]) -> Any:
    if isinstance(leaf, _Whole):
        return leaf.leaf
    return Sum(*sums) if isinstance(leaf, Sum) else sums[0] if sums else leaf


def _summed(transport: Transport, numbers: Sequence[Any]) -> list[Any]:
    """Each number over all replicas, of the type that it was."""
    sums = list(numbers)
    for dtype in dict.fromkeys(map(_wide, numbers)):
        places = [place for place, number in enumerate(numbers) if _wide(number) == dtype]
        message = torch.stack([torch.as_tensor(numbers[p]).to(transport.device, dtype) for p in places])
        transport.all_reduce("data", message)
        for place, total in zip(places, message, strict=True):
            part = numbers[place]
            sums[place] = total.to(part.device, part.dtype) if isinstance(part, Tensor) else total.item()
    return sums


def _wide(number: Any) -> torch.dtype:
    """The type that a number travels in."""
    tensor = torch.as_tensor(number)
    if tensor.is_complex():
        return torch.complex128
    return torch.float64 if tensor.is_floating_point() else torch.int64


def _kind(number: Any) -> str:
    return str(number.dtype) if isinstance(number, Tensor) else type(number).__name__


def _check_alike(transport: Transport, mine: str) -> None:
    everyone = differing(transport, mine)
    if everyone:
        raise RunError(
            f"the replicas' outputs have different numbers, which cannot be averaged: {'; '.join(everyone)}. "
            "Evaluate batches of one kind on all replicas"
        )


def differing(transport: Transport, fact: Any) -> list[Any]:
    """Each replica's ``fact``, where they differ; nothing where all have one: then a number travels, its hash.

    A collective call of the data axis.
    """
    alike = len(set(transport.gather_int("data", number_of(fact)))) == 1
    return [] if alike else transport.gather("data", fact)
