"""Precision: types that are checked, parameters that stay themselves when they are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import RunError
from fxpipe.precision import Precision, cast_parameters
from fxpipe.specs import cast_batch
from tests.device import DEVICE


@pytest.mark.parametrize(
    ("field", "dtype"), [("compute", torch.int32), ("reduce", torch.float8_e4m3fn), ("master", "bf16")]
)
def test_a_type_that_does_not_compute_is_refused(field: str, dtype: object) -> None:
    with pytest.raises(RunError, match=rf"Precision\({field}=.*write torch.bfloat16"):
        Precision(**{field: dtype})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compute", "gradient"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_gradients_add_up_in_float32_at_least(compute: torch.dtype, gradient: torch.dtype) -> None:
    model = nn.Linear(3, 2)
    cast_parameters(model, Precision(compute=compute))
    model(torch.ones(1, 3, dtype=compute)).sum().backward()
    assert model.weight.grad is not None
    assert (model.weight.dtype, model.weight.grad.dtype) == (compute, gradient)


def test_parameters_are_rounded_and_remain_the_same_objects() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    before = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    originals = cast_parameters(model, Precision())
    assert originals.keys() == values.keys()
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert torch.equal(originals[name], values[name])
        assert torch.equal(parameter, values[name].bfloat16())
    assert not model[0].weight.requires_grad
    assert model[1].running_mean.dtype == torch.float32


def test_tied_and_integer_parameters_and_those_on_meta() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    model[1].weight = model[0].weight
    model.register_parameter("count", nn.Parameter(torch.tensor([1]), requires_grad=False))
    originals = cast_parameters(model, Precision())
    assert list(originals) == ["0.weight", "0.bias", "1.bias"]
    assert model[1].weight is model[0].weight
    assert model.count.dtype == torch.int64
    assert model[2].weight.dtype == torch.bfloat16


def test_a_batch_is_cast_where_it_is_floating_point() -> None:
    batch = {"x": torch.ones(2), "ids": torch.tensor([1]), "more": (torch.ones(1, dtype=torch.float64), "text", None)}
    cast = cast_batch(batch, torch.bfloat16)
    assert cast["x"].dtype == cast["more"][0].dtype == torch.bfloat16
    assert cast["ids"] is batch["ids"]
    assert cast["more"][1:] == ("text", None)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_is_cast_after_compile_is_refused(training: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)
    options: Any = {"boundaries": ["1"], "loss_fn": nn.functional.mse_loss, "microbatches": 2}
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), **options)
    model.to(DEVICE, torch.float32)  # which it is
    forward_backward(x, target=x)
    model.to(torch.float64)
    with pytest.raises(RunError, match=r"torch.float64, and was torch.float32 when .* model.to\(\) before"):
        (forward_backward if training else forward_backward.evaluate)(x.double(), target=x)
