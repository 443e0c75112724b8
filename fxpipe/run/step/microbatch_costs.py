"""Microbatch costs: asks ``microbatch_cost=`` what each micro-batch of a step costs, so that a step can order them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.schedules.microbatch_order import factors
from fxpipe.torch_compat import pytree
from fxpipe.validation import shown

Batches = Sequence[Mapping[str, Any]]


def asked(graph: StageGraph, rank: int | None) -> bool:
    """Whether a pipe rank asks ``microbatch_cost=``: the first that runs the first stage, which has most inputs."""
    return rank in (None, graph.ranks(0)[0])


def costs_of(
    transport: Transport, cost: Callable[..., Any], graph: StageGraph, split: Callable[[], Batches]
) -> Sequence[float]:
    """Returns a number for each micro-batch: the sum over stages of its costs, each divided by the stage's mean.

    A collective call of a pipe group, in which a single rank calls ``cost``; all raise its RunError. ``split``: returns
    that rank's micro-batches.
    """
    mine = _costs(cost, graph.names, split()) if asked(graph, transport.pipe_rank) else None
    told = next(item for item in transport.gather("pipe", mine) if item is not None)
    if isinstance(told, str):
        raise RunError(told)
    return list(told)


def _costs(cost: Callable[..., Any], stages: Sequence[str], batches: Batches) -> list[float] | str:
    """Returns the costs, or an error text."""
    if len({tuple(batch) for batch in batches}) > 1:  # passing by position would mix up inputs
        names = shown([list(batch) for batch in batches])
        return (
            f"microbatch_cost= is given inputs by place, and micro-batches have {names}; pass None for what one lacks"
        )
    try:
        costs = [cost(*map(_without_numbers, batch.values())) for batch in batches]
    except Exception as error:
        return f"microbatch_cost failed: {type(error).__name__}: {error}{_about_devices(batches)}"
    for number, returned in enumerate(costs):
        if _on_device(returned):
            return (
                f"microbatch_cost returned a tensor on a device for micro-batch {number}, and reading it would wait "
                f"for the device; return a number{_about_devices(batches)}"
            )
    try:
        return [sum(column) for column in zip(*factors(costs, stages), strict=True)]
    except RunError as error:
        return f"microbatch_cost: {error}"


def _without_numbers(value: Any) -> Any:
    """An input in which tensors on a device have a shape and no numbers, so that nothing can wait for the device."""
    if not _on_device(value):
        return value
    return pytree.tree_map(lambda leaf: torch.empty_like(leaf, device="meta") if _on_device(leaf) else leaf, value)


def _on_device(value: Any) -> bool:
    leaves = [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)
    return any(isinstance(leaf, Tensor) and not leaf.is_cpu for leaf in leaves)


def _about_devices(batches: Batches) -> str:
    names = [name for name, value in batches[0].items() if _on_device(value)]
    if not names:
        return ""
    return (
        f". It is given {names[0]!r}, which is on a device, with its shape and without its numbers: compute costs from "
        "shapes, or from inputs on the host"
    )
