"""A rank's module holds the stages' own tensors: what would reach nothing there, or part from them, is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.snapshots.snapshot import Snapshot
from fxpipe.stage.elsewhere import Elsewhere

TWO = fxpipe.Topology([("pipe", 2)])


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](fxpipe.stage_boundary(self.layers[0](x))).square().mean()


def test_other_tensors_are_not_put_where_the_stages_hold_theirs() -> None:
    """The stages would go on with the old ones."""
    module = fxpipe.compile(TwoLayers(), TWO, microbatches=2).module
    layer: Any = module.get_submodule("layers.0")
    with pytest.raises(fxpipe.RunError, match=r"weight is set to another tensor than the stages hold, .*copy_"):
        layer.weight = nn.Parameter(torch.ones(4, 4))
    layer.weight = layer.weight
    layer.note = "as on any module"
    with pytest.raises(fxpipe.RunError, match="weight is what the stages hold, and they would go on with it"):
        nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(fxpipe.RunError, match="0 is set to another module than the stages hold, and they would go on"):
        setattr(module.layers, "0", nn.Linear(4, 4))
    with pytest.raises(fxpipe.RunError, match=r"in_features is set in forward_backward\.module, but stages use"):
        layer.in_features = 5


def test_what_would_reach_nothing_by_a_ranks_module_is_refused_and_modes_reach_the_model() -> None:
    """Its parts have the model's tensors, and are neither called nor of the model's classes."""
    model = TwoLayers()
    module = fxpipe.compile(model, TWO, microbatches=2).module
    layer = module.get_submodule("layers.0")
    for register in (layer.register_forward_hook, layer.register_full_backward_hook, layer.register_forward_pre_hook):
        with pytest.raises(
            fxpipe.RunError, match=r"hook\(\) of forward_backward.module reaches nothing: its parts are ne"
        ):
            register(lambda *given: None)
    with pytest.raises(fxpipe.RunError, match=r"apply\(\) of forward_backward.module .* call it on the model itself"):
        module.apply(lambda part: None)
    with pytest.raises(fxpipe.RunError, match=r"move or cast the model before"):
        layer.double()
    layer.eval()
    assert [part.training for part in (model, model.get_submodule("layers.0"))] == [True, False]


def test_a_rank_s_module_tells_the_modes_that_the_model_has_now() -> None:
    model = TwoLayers()
    model.layers[0].eval()
    module = fxpipe.compile(model, TWO, microbatches=2).module
    layers = [module.get_submodule("layers.0"), module.get_submodule("layers.1")]
    assert [part.training for part in (module, *layers)] == [True, False, True]
    model.eval()
    assert [part.training for part in (module, *layers)] == [False, False, False]
    layers[1].training = True
    assert [part.training for part in model.layers] == [False, True]


def test_modes_that_a_model_keeps_by_itself_stay() -> None:
    """As those of a frozen normalisation do, that is in eval mode always."""

    class Kept(TwoLayers):
        def train(self, mode: bool = True) -> Kept:
            super().train(mode)
            self.layers[0].eval()
            return self

    model = Kept()
    module = fxpipe.compile(model, TWO, microbatches=2).module.train()
    for one in (model, module):
        assert [one.training, *(one.get_submodule(f"layers.{place}").training for place in (0, 1))] == [
            True,
            False,
            True,
        ]


def test_a_parameter_of_another_rank_that_was_rounded_is_not_seen_to_change() -> None:
    """With ``precision=`` export refused each capture behind the first, as if forward set ``.data``."""
    model = nn.Linear(4, 4)
    model.weight = Elsewhere.in_place_of(model.weight, "on rank 1", torch.device("cpu"))  # type: ignore[assignment]
    model.weight.data = model.weight.detach().to(torch.bfloat16)
    assert list(Snapshot(model).changes()) == []
    with pytest.raises(fxpipe.RunError, match="on rank 1"):
        model.weight.data = torch.ones(4, 4)


def test_a_parameter_of_another_rank_is_skipped_by_optimizers_and_missed_by_a_norm() -> None:
    """As nanoGPT trains: its optimizer and its ``clip_grad_norm_`` are given all of the model's parameters."""
    model = nn.Linear(4, 4)
    model.weight = Elsewhere.in_place_of(model.weight, "on rank 1", torch.device("cpu"))  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before, model.bias.grad = model.bias.detach().clone(), torch.ones(4)
    optimizer.step()
    assert torch.equal(model.bias, before - 1)
    with pytest.raises(fxpipe.RunError, match="on rank 1"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    assert model.bias.grad is None
