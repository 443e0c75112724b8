"""Forwards of ``*args`` and ``**kwargs``: how inputs get their names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import RunError, TraceError
from tests.harness import assert_same, cut
from tests.layered import TRACERS, WIDTH, Layers, assert_trains, compiled, vectors
from tests.thinned import in_turn


class LowRank(nn.Module):
    """As PEFT's layers: the layer that was there, and a product of two thin matrices beside it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        for adapter in self.lora_A:
            result = result + self.lora_B[adapter](self.lora_A[adapter](x)) * 2.0
        return result  # type: ignore[no-any-return]


class Tuner(nn.Module):
    """As PEFT's LoraModel, which calls the model's forward itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class Adapted(nn.Module):
    """As PeftModel."""

    def __init__(self) -> None:
        super().__init__()
        model = Layers()
        for layer in model.layers:
            layer.linear = LowRank(layer.linear)
        self.base_model = Tuner(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kept = {name: value for name, value in kwargs.items() if name != "adapter_names"}
        return self.base_model.model(*args, **kept)


class AdaptedByName(Adapted):
    """As PeftModelForCausalLM: some inputs by name, the rest passed on."""

    def forward(self, x: Any = None, mask: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        return self.base_model(x=x, **kwargs)


@pytest.mark.parametrize(("tracer", "make"), in_turn(TRACERS, [Adapted, AdaptedByName]))
def test_a_forward_of_args_and_kwargs_takes_its_inputs_by_name(make: Any, tracer: str) -> None:
    cuts = ["base_model.model.layers.1", "base_model.model.layers.3"]
    forward_backward = assert_trains(make, [vectors(0), vectors(1), vectors(2)], cuts, stages=3, tracer=tracer)
    assert set(forward_backward.required_inputs) == {"x", "y"}


def test_what_is_given_by_place_to_a_forward_of_args_is_refused_with_what_to_write() -> None:
    batch = vectors(0)
    forward_backward = compiled(Adapted(), batch, ["base_model.model.layers.1"])
    with pytest.raises(RunError, match=r"takes \*args, and 1 inputs were given by place.*pass every input by its name"):
        forward_backward(batch["x"], y=batch["y"])


class OnlyArgs(Layers):
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args)


def test_a_forward_of_args_alone_is_refused() -> None:
    with pytest.raises(TraceError, match=r"takes \*args and nothing by name"):
        fxpipe.compile(OnlyArgs(), fxpipe.Topology([("pipe", 2)]), example_args=tuple(vectors(0).values()))


def test_an_adapted_model_of_hugging_face_is_given_the_number_of_its_labels() -> None:
    hf = pytest.importorskip("tests.hf")

    class Peft(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.base_model = Tuner(model)

        def get_base_model(self) -> nn.Module:
            return self.base_model.model

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.base_model.model, name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.get_base_model()(*args, **kwargs)

    torch.manual_seed(0)
    model = Peft(hf.llama())
    plain, batches = copy.deepcopy(model), [hf.causal(8, torch.Generator().manual_seed(n)) for n in (0, 1)]
    forward_backward = compiled(model, batches[0], ["base_model.model.model.layers.2"])
    loss = forward_backward(**batches[1])
    items = (batches[1]["labels"][:, 1:] != -100).sum()
    parts = [plain(**part, num_items_in_batch=items).loss for part in cut(batches[1], 2)]
    assert_same(loss, sum(parts[1:], start=parts[0]).detach(), "loss")
