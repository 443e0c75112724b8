"""Microbatch functions: calls ``microbatch_cost=`` and ``loss_weight=``, the user's functions of inputs.

One rank of a pipe group, which has the inputs, calls the function, and tells the other ranks the numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.schedules.microbatch_order import by_stage, weighed
from fxpipe.torch_compat import pytree
from fxpipe.validation import shown

Batches = Sequence[Mapping[str, Any]]
Function = Callable[..., Any]


def asks_costs(graph: StageGraph, rank: int | None) -> bool:
    """Whether a pipe rank calls ``microbatch_cost=``: the first that runs the first stage, which has most inputs."""
    return rank in (None, graph.ranks(0)[0])


def costs_of(
    transport: Transport,
    cost: Function,
    graph: StageGraph,
    signature: inspect.Signature,
    split: Callable[[], Batches],
) -> list[float]:
    """Returns a number for each micro-batch: the sum over stages of its costs, each divided by the stage's mean.

    A collective call of a pipe group. ``split``: returns the micro-batches, on the rank that calls ``cost``.
    """

    def numbers() -> list[float]:
        batches = split()
        named = [name for name, value in batches[0].items() if _on_device(value)]
        about = (
            f". It is given {named[0]!r}, which is on a device, with its shape and without its numbers: compute costs "
            "from shapes, or from inputs on the host"
            if named
            else ""
        )
        try:
            costs = [cost(*map(_without_numbers, inputs)) for inputs in in_call_order(signature, batches)]
        except Exception as error:
            raise RunError(f"microbatch_cost failed: {type(error).__name__}: {error}{about}") from error
        for number, returned in enumerate(costs):
            if _on_device(returned):
                raise RunError(
                    f"microbatch_cost returned a tensor on a device for micro-batch {number}, and reading it would "
                    f"wait for the device; return a number{about}"
                )
        return weighed([by_stage(each, f"the cost of micro-batch {n}", graph.names) for n, each in enumerate(costs)])

    return _told(transport, asks_costs(graph, transport.pipe_rank), "microbatch_cost", numbers)


def weights_of(
    transport: Transport, asks: bool, weight: Function, signature: inspect.Signature, batches: Batches
) -> list[float]:
    """Returns the weight of each micro-batch, by ``loss_weight=``. A collective call of a pipe group; ``asks``: whether
    this rank calls the function."""

    def numbers() -> list[float]:
        values = [weight(*inputs) for inputs in in_call_order(signature, batches)]
        weights = list(map(float, values))
        if not all(0 <= each < math.inf for each in weights):
            raise RunError(f"loss_weight returned {shown(values)}; weights are finite and not negative")
        return weights

    return _told(transport, asks, "loss_weight", numbers)


def in_call_order(signature: inspect.Signature, batches: Batches) -> list[list[Any]]:
    """The inputs of each micro-batch, in the order of the signature: all that any of them has. A micro-batch that lacks
    an input has forward's default in its place, or None."""
    names = dict.fromkeys(name for batch in batches for name in batch)
    ordered = [name for name in signature.parameters if name in names]
    ordered += [name for name in names if name not in signature.parameters]
    parameters = [signature.parameters.get(name) for name in ordered]
    defaults = [None if p is None or p.default is p.empty else p.default for p in parameters]
    return [list(map(batch.get, ordered, defaults)) for batch in batches]


def _told(transport: Transport, asks: bool, what: str, numbers: Callable[[], list[float]]) -> list[float]:
    """The numbers of the rank that asks, on every rank; RunError on all if they cannot be had."""
    mine: list[float] | str | None = None
    if asks:
        try:
            mine = numbers()
        except RunError as error:
            mine = str(error)
        except Exception as error:
            mine = f"{what} failed: {type(error).__name__}: {error}"
    told = next(item for item in transport.gather("pipe", mine) if item is not None)
    if isinstance(told, str):
        raise RunError(told)
    return list(told)


def _without_numbers(value: Any) -> Any:
    """An input in which tensors on a device have a shape and no numbers, so that nothing can wait for the device."""
    if not _on_device(value):
        return value
    return pytree.tree_map(lambda leaf: torch.empty_like(leaf, device="meta") if _on_device(leaf) else leaf, value)


def _on_device(value: Any) -> bool:
    leaves = [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)
    return any(isinstance(leaf, Tensor) and not leaf.is_cpu for leaf in leaves)
