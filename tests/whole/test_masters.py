"""Master weights: made late, let go of, and written by hand between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.replicas import PAIR, compiled_alone, linear
from tests.strict_transport import run_strict


@pytest.mark.parametrize("zero", [0, 1], ids="zero={}".format)
@pytest.mark.parametrize("late", ["written", "loaded", "stepped"])
def test_masters_of_a_late_optimizer_are_the_parameters_present_values(zero: int, late: str) -> None:
    """Those before rounding where nothing has written the parameter since, or where they were loaded."""
    values = torch.randn(4, 4)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        module = nn.Sequential(linear(), linear())
        step = compiled_alone(module, PAIR, microbatches=1, zero=zero, precision=fxpipe.Precision())
        if late == "written":
            with torch.no_grad():
                step.module.get_parameter("module.0.weight").copy_(values)
        elif late == "loaded":
            state = {name: values.clone() for name in step.state_dict()}
            step.load_state_dict(state)
            for tensor in state.values():
                tensor.fill_(99.0)  # it is the user's
        else:
            first = step.optimizer(torch.optim.SGD, lr=1.0)
            step(torch.ones(2, 4))
            first.step()
            step.zero_grad()
        now = step.module.get_parameter("module.0.weight").detach().clone()
        optimizer = step.optimizer(torch.optim.SGD, lr=0.0)
        step(torch.ones(2, 4))
        optimizer.step()  # which writes masters back
        assert torch.equal(step.module.get_parameter("module.0.weight"), now)
        masters = torch.full((2, 16), torch.nan)
        for piece, target in ((target.piece, target) for target in optimizer._flat):
            masters[int(piece.name[7]), piece.start : piece.stop] = target.tensor.flatten()
        return now.flatten().float(), masters

    ranks = run_strict(body, 2)
    masters = ranks[0][1] if zero == 0 else ranks[0][1].where(~ranks[0][1].isnan(), ranks[1][1])
    now, original = ranks[0][0], linear().weight.detach().flatten()
    if late == "written":
        assert torch.equal(now, values.bfloat16().float().flatten())
        assert torch.equal(masters, torch.stack([now, original]))
    elif late == "loaded":
        assert torch.equal(masters, values.flatten().expand(2, -1))
    else:
        assert torch.equal(masters[0], now)
        assert not torch.equal(now, original.bfloat16().float())


@pytest.mark.parametrize("zero", [0, 1], ids="zero={}".format)
def test_values_before_rounding_are_let_go_of_once_an_optimizer_has_them(zero: int) -> None:
    def body(rank: int) -> list[list[str]]:
        module = nn.Sequential(linear(), linear())
        step = compiled_alone(module, PAIR, microbatches=1, zero=zero, precision=fxpipe.Precision())
        kept = []
        for params in (None, "module.0.weight", "module.1.weight"):
            optimizer = step.optimizer(torch.optim.SGD, params, lr=0.1) if params else None
            kept.append(sorted(step._state.originals))
            del optimizer
        return kept

    both = ["module.0.weight", "module.1.weight"]
    assert run_strict(body, 2) == [[both, both[1:], []]] * 2


BY_HAND: dict[str, Callable[[nn.Module, dict[str, Tensor]], Any]] = {
    "no_grad": lambda model, values: [p.detach().copy_(values[name]) for name, p in model.named_parameters()],
    "data": lambda model, values: [p.data.copy_(values[name]) for name, p in model.named_parameters()],
    "load_state_dict": lambda model, values: model.load_state_dict(values),
}


def stepped_model(**options: Any) -> tuple[nn.Module, fxpipe.ForwardBackward, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    precision = None if options else fxpipe.Precision()
    topology = fxpipe.Topology([("pipe", 1)])
    forward_backward = fxpipe.compile(
        model, topology, loss_fn=lambda output, target: output.mean(), precision=precision
    )
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=2**-10, **options)
    forward_backward(torch.ones(4, 4), target=None)
    optimizer.step()
    optimizer.zero_grad()
    return model, forward_backward, optimizer


@pytest.mark.parametrize("options", [{}, {"offload": True}], ids=["precision", "offload"])
@pytest.mark.parametrize("way", BY_HAND)
def test_masters_follow_weights_written_by_hand(way: str, options: dict[str, Any]) -> None:
    model, forward_backward, optimizer = stepped_model(**options)
    wanted = {name: torch.full_like(parameter, 0.5) for name, parameter in model.named_parameters()}
    BY_HAND[way](model, wanted)
    forward_backward(torch.ones(4, 4), target=None)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        wanted[name] = (wanted[name].float() - 2**-10 * parameter.grad.float()).to(parameter.dtype)
    optimizer.step()
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"offload": True}], ids=["precision", "offload"])
def test_other_memory_for_a_parameter_that_has_a_master_is_refused(options: dict[str, Any]) -> None:
    model, forward_backward, optimizer = stepped_model(**options)
    model[1].bias.data = torch.ones_like(model[1].bias)
    forward_backward(torch.ones(4, 4), target=None)
    with pytest.raises(fxpipe.RunError, match=r"1\.bias was given other memory, as by parameter\.data = "):
        optimizer.step()
