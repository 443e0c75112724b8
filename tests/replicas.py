"""What tests of replicas share: a model on a grid of strict ranks, and its gradients beside plain PyTorch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
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
        kept = None if gradient is None else gradient.flatten().clone()
        found.setdefault(piece.name, []).append((piece.start, piece.stop, kept))
    return found


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
                        whole.flatten()[start:stop],
                        rtol=1e-4,
                        atol=1e-5,
                        msg=lambda text, name=name, rank=rank: f"{what}, rank {rank}: {name}\n{text}",
                    )


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
