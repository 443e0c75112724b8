"""What tests of replicas share: a model on a grid of strict ranks, and its gradients beside plain PyTorch's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import gradients_of
from tests.strict_transport import run_strict

PAIR = Topology([("pipe", 1), ("data", 2)])
SQUARE = Topology([("pipe", 2), ("data", 2)])

every_zero = pytest.mark.parametrize("zero", [0, 1, 2], ids="zero={}".format)

Parts = dict[str, list[tuple[int, int, Tensor | None]]]
"""Name → (start, stop, what a rank has of the gradient)."""


def compiled_alone(module: nn.Module, topology: Topology, **options: Any) -> fxpipe.ForwardBackward:
    """One stage of its own for a module, and a loss behind it; ``total``: a Sum."""
    total = options.pop("total", False)

    def loss(y: Tensor) -> Any:
        return fxpipe.Sum(y.square().sum(), y.numel()) if total else y.square().mean()

    graph = fxpipe.StageGraph.from_callables({"module": module, "loss": loss}, [("module", "loss")], {"module": ["x"]})
    return fxpipe.compile(graph, topology, placement={"module": 0, "loss": 0}, **options)


def parts(step: fxpipe.ForwardBackward) -> Parts:
    """What this rank has of the summed gradients."""
    found: Parts = {}
    for piece in step._reducer.pieces():
        gradient = piece.gradient()
        if gradient is not None:
            gradient = in_memory_order(gradient).clone()
            assert gradient.shape == (piece.stop - piece.start,)
        found.setdefault(piece.name, []).append((piece.start, piece.stop, gradient))
    return found


def in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def assert_parts(ranks: Sequence[Parts], wanted: Mapping[str, Tensor | None], what: str = "") -> None:
    """Every rank's parts are those of the whole gradients."""
    assert {name for found in ranks for name in found} == wanted.keys()
    for rank, found in enumerate(ranks):
        for name, pieces in found.items():
            whole = wanted[name]
            for start, stop, gradient in pieces:
                if whole is None or gradient is None:
                    assert gradient is whole is None, f"{what}, rank {rank}: {name} has {gradient}, wanted {whole}"
                else:
                    torch.testing.assert_close(
                        gradient,
                        in_memory_order(whole)[start:stop],
                        rtol=1e-4,
                        atol=1e-5,
                        msg=lambda text, name=name, rank=rank: f"{what}, rank {rank}: {name}\n{text}",
                    )


@dataclass(frozen=True)
class Layout:
    """Ranks, and how they shard."""

    axes: tuple[tuple[str, int], ...]
    ranks_per_node: int | None
    zero: int
    scope: str = "node"

    @property
    def topology(self) -> Topology:
        return Topology(self.axes, self.ranks_per_node)

    @property
    def options(self) -> dict[str, Any]:
        return {"zero": fxpipe.Zero(self.zero, scope=self.scope)}

    def assert_covered(self, ranks: Sequence[Parts]) -> None:
        """The parts of a shard group, and of its parameters' other owners, cover each parameter once; the ranks that
        have the same part have the same bits."""
        topology = self.topology
        whole = [[rank] for rank in range(topology.world_size)]
        shards = topology.shard_groups() if self.scope == "node" else topology.groups("data")
        pipes = [[rank for pipe in topology.groups("pipe") if {*pipe} & {*group} for rank in pipe] for group in shards]
        for group in pipes if self.zero else whole:
            for name in {name for rank in group for name in ranks[rank]}:
                pieces = [piece[:2] for rank in group for piece in ranks[rank].get(name, [])]
                ends = [0, *(stop for _, stop in sorted(pieces))]
                assert [start for start, _ in sorted(pieces)] == ends[:-1], f"{name} is covered by {sorted(pieces)}"
        same_parts = topology.replica_groups() if self.scope == "node" else []
        for first, *others in same_parts if self.zero else topology.groups("data"):
            for rank in others:
                torch.testing.assert_close(ranks[rank], ranks[first], rtol=0, atol=0)


# --- walks: calls of a step, and what is done to its gradients in between ---

Move = tuple[str, Any]
"""("call" or "later", each replica's batch): a call whose gradients are summed, or not yet. ("clear" or
"clear to zero", by which way). ("drop", "zero", "set" or "freeze", the end of a parameter's name)."""


def zero_each(step: fxpipe.ForwardBackward, set_to_none: bool) -> None:
    for parameter in step.parameters():
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


CLEARS: dict[str, Callable[[fxpipe.ForwardBackward, Any, bool], object]] = {
    "optimizer": lambda step, optimizer, set_to_none: optimizer.zero_grad(set_to_none=set_to_none),
    "forward_backward": lambda step, optimizer, set_to_none: step.zero_grad(set_to_none=set_to_none),
    "module": lambda step, optimizer, set_to_none: step.module.zero_grad(set_to_none=set_to_none),
    "each": lambda step, optimizer, set_to_none: zero_each(step, set_to_none),
}


def change(named: Iterable[tuple[str, nn.Parameter]], what: str, end: str, times: int = 1) -> None:
    for name, parameter in named:
        if not name.endswith(end):
            continue
        if what == "drop":
            parameter.grad = None
        elif what == "set":
            ramp = torch.arange(float(parameter.numel())).view(parameter.shape)
            parameter.grad = times * ramp
        elif what == "freeze":
            parameter.requires_grad_(False)
        elif parameter.grad is not None:
            parameter.grad.zero_()


def walk(
    step: fxpipe.ForwardBackward, moves: Sequence[Move], replica: int, model: nn.Module | None = None
) -> list[Parts]:
    """What this rank has of the gradients after each call that sums them. ``model``: has the parameters to freeze."""
    optimizer, seen = step.optimizer(torch.optim.SGD, lr=0.1), []
    for what, given in moves:
        if what.startswith("clear"):
            CLEARS[given](step, optimizer, what == "clear")
        elif what in ("call", "later"):
            step.set_requires_gradient_sync(what == "call")
            step(given[replica])
            seen += [parts(step)] if what == "call" else []
        else:
            owner = model if model is not None and what == "freeze" else step
            change(owner.named_parameters(), what, given)
    return seen


def assert_walk(
    ranks: Sequence[list[Parts]],
    layout: Layout,
    model: nn.Module,
    moves: Sequence[Move],
    accumulate: Callable[[Sequence[Tensor]], None],
) -> None:
    """The parts are those of the plain model's gradients. ``accumulate``: adds to these, by the replicas' batches."""
    count, names = 0, [what for what, _ in moves]
    for place, (what, given) in enumerate(moves):
        if what.startswith("clear"):
            model.zero_grad(set_to_none=what == "clear" or layout.zero > 0)
        elif what in ("call", "later"):
            accumulate(given)
        else:  # a part that is cleared to zero is as if it had never been
            # what is set while gradients are not summed yet is each replica's own
            times = layout.topology.size("data") if names[place - 1] == "later" else 1
            change(model.named_parameters(), "drop" if what == "zero" and layout.zero else what, given, times)
        if what == "call":
            found = [seen[count] for seen in ranks]
            assert_parts(found, gradients_of(model.named_parameters()), f"after {names[: place + 1]}")
            layout.assert_covered(found)
            count += 1


def random_moves(
    draw: random.Random, kinds: Sequence[str], batch: Callable[[], Any], names: Sequence[str]
) -> list[Move]:
    moves: list[Move] = []
    for what in (draw.choice(kinds) for _ in range(8)):
        given = batch() if what in ("call", "later") else draw.choice([*CLEARS] if "clear" in what else names)
        moves.append((what, given))
    return moves


def refusals(body: Callable[[int], object], ranks: int) -> list[str]:
    """What each rank of a strict world says as it refuses."""
    said = [""] * ranks

    def refused(rank: int) -> None:
        with pytest.raises(fxpipe.FxpipeError) as error:
            body(rank)
        said[rank] = f"{type(error.value).__name__}: {error.value}"

    with contextlib.suppress(fxpipe.FxpipeError):  # the strict world's own
        run_strict(refused, ranks)
    return said


def linear(width: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, width, bias=False)


class Kinds(nn.Module):
    """A loss of any kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, total: bool = False, metric: str = "") -> Any:
        y = self.b(stage_boundary(self.a(x))).square()
        loss = fxpipe.Sum(y.sum(), y.numel()) if total else y.mean()
        return {"loss": loss, metric: y.detach().max()} if metric else loss
