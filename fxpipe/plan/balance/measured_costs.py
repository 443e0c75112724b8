"""Measured costs: each node of a program run on real tensors and timed, where shapes do not tell the time.

On a processor without the matrix units that the roofline reckons with, or with kernels of one's own, what a node takes
is found by running it. Backward keeps the ratio to forward that the shapes say.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.errors import PartitionError
from fxpipe.graph.like import TensorLike
from fxpipe.graph.modes import Autocast, modes_restored, within
from fxpipe.graph.program import Program
from fxpipe.plan.balance.hardware import Hardware
from fxpipe.plan.balance.node_costs import NodeCost, NodeCosts, call_node, costs_from_shapes, left_as_it_is, modes_of
from fxpipe.torch_compat import pytree

RUNS = 3
"""Each node is timed so often; the median counts, so that a first run, which is slow, does not."""


def costs_measured(
    program: Program,
    example: Mapping[str, Any],
    device: torch.device = torch.device("cpu"),  # noqa: B008  (it is immutable)
    autocast: Sequence[Autocast] = (),
    hardware: Hardware | None = None,
) -> NodeCosts:
    """The costs of ``costs_from_shapes`` with forward seconds measured on ``device``, and backward to match.

    Inputs are normal random numbers, zeros for integers and ones for bools. The node's modules run; buffers and random
    state are afterwards as they were. Times differ from process to process: measure in one, and give the costs to all,
    or they will balance differently. PartitionError where parameters are on the meta device.
    """
    known = costs_from_shapes(program, example, device, autocast, hardware)
    meta = next((name for name, tensor in program.module.named_parameters() if tensor.is_meta), None)
    if meta is not None:
        raise PartitionError(f"{meta} is on the meta device, where nothing can be measured; use costs from shapes")
    buffers = [(buffer, buffer.clone()) for buffer in program.module.buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            left_as_it_is(program.module),
            torch.random.fork_rng(devices),
            torch.no_grad(),
            modes_restored(),
            within(autocast),
        ):
            seconds = _timed(program, example, device)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    nodes = {name: _scaled(known, name, seconds.get(name, 0.0)) for name in known.nodes}
    return dataclasses.replace(known, nodes=nodes, origin="nodes measured one by one")


def _scaled(known: NodeCosts, name: str, seconds: float) -> NodeCost:
    cost = known[name]
    ratio = seconds / cost.forward if cost.forward else 0.0
    return dataclasses.replace(cost, forward=seconds, backward=cost.backward * ratio, weight=cost.weight * ratio)


def _timed(program: Program, example: Mapping[str, Any], device: torch.device) -> dict[str, float]:
    """Node → the median of its forward's seconds. Values that no later node needs are let go."""
    values: dict[fx.Node, Any] = {}
    found: dict[str, float] = {}
    left = {node: len(node.users) for node in program.graph.nodes}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = pytree.tree_map_only(
                TensorLike, lambda like: _made_up(like, device), example[str(node.target)]
            )
        elif node.op == "get_attr":
            values[node] = program.attribute(str(node.target))
        elif node.op != "output":
            values[node], found[node.name] = _run(program, node, values, device)
        for operand in node.all_input_nodes:
            left[operand] -= 1
            if not left[operand]:
                values.pop(operand, None)
    return found


def _run(program: Program, node: fx.Node, values: Mapping[fx.Node, Any], device: torch.device) -> tuple[Any, float]:
    """The node's value and its time. What it is given is copied for the runs that are timed, in case it writes."""
    given = {operand: values[operand] for operand in node.all_input_nodes}
    times = []
    for _ in range(RUNS):
        copies = {operand: _copied(value) for operand, value in given.items()}
        _wait(device)
        start = time.perf_counter()
        with modes_of(node):
            call_node(program, node, copies)
        _wait(device)
        times.append(time.perf_counter() - start)
    with modes_of(node):
        return call_node(program, node, given), statistics.median(times)


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t if isinstance(t, nn.Parameter) else t.clone(), value)


def _made_up(like: TensorLike, device: torch.device) -> Tensor:
    memory = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device)
    if like.dtype is torch.bool:
        return memory.fill_(True)
    return memory.normal_() if like.dtype.is_floating_point else memory.zero_()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
