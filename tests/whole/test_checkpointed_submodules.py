"""Cuts beside, around and amid what the model itself checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fxpipe import TraceError
from tests.harness import accumulate, assert_same, cut, engine_of, gradients_of
from tests.layered import Layers, assert_trains, compiled, vectors
from tests.pool import Pool


class Checkpointed(Layers):
    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedClosures(Layers):
    def run(self, x: Tensor) -> Tensor:
        def called(layer: nn.Module) -> Callable[..., Any]:
            return lambda *args: layer(*args)

        for layer in self.layers:
            x = checkpoint(called(layer), x, use_reentrant=False)
        return x


class CheckpointedPairs(Layers):
    def run(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)  # type: ignore[no-any-return]


class CheckpointedTwice(Layers):
    def run(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return checkpoint(self.layers[2], x, use_reentrant=False)  # type: ignore[no-any-return]

        for layer in (self.layers[0], inner, self.layers[3]):
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(
    ("make", "cuts", "stages"),
    [
        (Checkpointed, {"layers.1": "before", "layers.3": "before"}, 3),
        (Checkpointed, {"layers.1": "both"}, 3),
        (Checkpointed, {"layers.*": {"every": 2}}, 2),
        (CheckpointedReentrant, {"layers.1": "both"}, 3),
        (CheckpointedClosures, {"layers.1": "before", "layers.2": "after"}, 3),
        (CheckpointedPairs, {"layers.2": "before"}, 2),
        (CheckpointedPairs, {"layers.1": "after"}, 2),
        (CheckpointedTwice, {"layers.2": "both"}, 3),
        (CheckpointedPairs, "auto", None),
    ],
)
def test_a_cut_beside_a_checkpointed_submodule_lies_outside_of_the_checkpoint(
    make: Any, cuts: Any, stages: int | None
) -> None:
    forward_backward = assert_trains(make, [vectors(0), vectors(1)], cuts, stages)
    assert "record" in str(forward_backward.stages)
    assert any("checkpoint_" in str(stage.forward) for stage in forward_backward.stages)


def checkpointed_losses(engine: str) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    torch.manual_seed(0)
    forward_backward = compiled(Checkpointed(), vectors(0), ["layers.2"])
    return [(forward_backward(**vectors(1)), gradients_of(forward_backward.named_parameters()))]


def test_it_does_so_on_two_processes(pool: Pool) -> None:
    torch.manual_seed(0)
    plain = Checkpointed()
    wanted_loss, _ = accumulate(lambda _, part: plain(**part), cut(vectors(1), 2))
    wanted = gradients_of(plain.named_parameters())
    for ((loss, gradients),) in engine_of("distributed", lambda: pool)(2, checkpointed_losses, ""):
        assert_same(loss, wanted_loss, "loss")
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[name], name)


def test_a_cut_amid_a_checkpointed_function_is_refused_and_auto_is_named() -> None:
    with pytest.raises(TraceError, match=r'\(layers\.1\) lies amid a function.*boundaries="auto"'):
        compiled(CheckpointedPairs(), vectors(0), ["layers.1"])
