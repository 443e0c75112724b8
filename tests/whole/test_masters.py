"""Gradients that are cleared or set by hand, master weights, and what a rank holds over many steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.harness import gradients_of
from tests.pool import Pool
from tests.replicas import PAIR, Parts, assert_parts, compiled_alone, every_zero, linear, parts
from tests.strict_transport import run_strict
from tests.thinned import in_turn


@pytest.mark.parametrize(("zero", "total"), [(0, False), (1, True), (2, False)])
def test_one_optimizers_zero_grad_leaves_what_another_ones_parameters_have(zero: int, total: bool) -> None:
    """Gradients of an unsynchronised call in which one replica has no weight."""
    x = torch.randn(2, 4)

    def body(rank: int) -> Parts:
        module = nn.Sequential(linear(), linear())
        options = {"loss_weight": lambda x: float(bool(x[0, 0])), "total": total, "zero": zero}
        step = compiled_alone(module, PAIR, microbatches=1, **options)
        first, _second = (step.optimizer(torch.optim.SGD, [f"module.{place}.weight"], lr=0.1) for place in (0, 1))
        step.set_requires_gradient_sync(False)
        step(torch.zeros(2, 4) if rank else x)
        step.set_requires_gradient_sync(True)
        first.zero_grad()
        step(torch.ones(2, 4))
        return parts(step)

    model = nn.Sequential(linear(), linear())
    model(x).square().mean().backward()  # the mean of as many of them as have any weight
    model[0].weight.grad = None
    model(torch.ones(2, 4)).square().mean().backward()
    assert_parts(run_strict(body, 2), gradients_of(model.named_parameters("module")))


@every_zero
def test_gradients_set_by_hand_are_what_steps(zero: int) -> None:
    """Evolution strategies: with zero=1 and 2 the step used what the call had left. All 32 elements are 0.5."""

    def body(rank: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        step = compiled_alone(nn.Sequential(linear(), linear()), PAIR, microbatches=1, zero=zero)
        optimizer, norms = step.optimizer(torch.optim.SGD, lr=1.0), []
        for calls in (False, True):
            for _ in range(calls):
                step(torch.ones(2, 4))
            for parameter in step.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            norms.append(step.clip_grad_norm_(1.0))
            optimizer.step()
        return step.state_dict(full=True), norms

    for state, norms in run_strict(body, 2):
        torch.testing.assert_close(norms, [torch.tensor(0.5 * 32**0.5)] * 2)
        for weight in state.values():
            torch.testing.assert_close(weight, linear().weight.detach() - 2 / 32**0.5)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_replicas_gradient_that_is_replaced_before_the_sum_is_summed(zero: int) -> None:
    """Clipping by hand in accumulation: each replica kept its own as if it were the sum, and replicas differed."""
    x = torch.randn(4, 4)

    def body(rank: int) -> Parts:
        step = compiled_alone(nn.Sequential(linear(), linear()), PAIR, microbatches=1, zero=zero)
        step.set_requires_gradient_sync(False)
        step(x[2 * rank : 2 * rank + 2])
        for parameter in step.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5
        step.set_requires_gradient_sync(True)
        step(torch.ones(2, 4))
        return parts(step)

    model = nn.Sequential(linear(), linear())
    (0.5 * model(x).square().mean() + model(torch.ones(2, 4)).square().mean()).backward()
    assert_parts(run_strict(body, 2), gradients_of(model.named_parameters("module")))


# --- masters that are made late, let go of, and written by hand ---


@pytest.mark.parametrize(("late", "zero"), [("written", 1), ("loaded", 0), ("stepped", 1)])
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


@pytest.mark.parametrize(("way", "options"), in_turn(list(BY_HAND), [{}, {"offload": True}]))
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


def test_other_memory_for_a_parameter_that_has_a_master_is_refused() -> None:
    model, forward_backward, optimizer = stepped_model(offload=True)
    model[1].bias.data = torch.ones_like(model[1].bias)
    forward_backward(torch.ones(4, 4), target=None)
    with pytest.raises(fxpipe.RunError, match=r"1\.bias was given other memory, as by parameter\.data = "):
        optimizer.step()


# --- what is held over many steps ---


WIDE = 512  # a weight of 1 MiB


def steps_twice(rounds: int) -> tuple[Tensor, list[bool]]:
    """A parameter after rounds of one call and two steps; and whether it was plain PyTorch's after each of them."""
    fxpipe.init()
    step = compiled_alone(linear(WIDE), PAIR, microbatches=1, zero=fxpipe.Zero(1, bucket_mb=100.0))
    optimizer = step.optimizer(torch.optim.SGD, lr=0.5, momentum=0.5)
    model = linear(WIDE)
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    right = []
    for number in range(rounds):
        x = torch.randn(2, WIDE, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        plain.zero_grad()
        step(x)  # the same for both replicas
        model(x).square().mean().backward()
        for _ in range(2):
            optimizer.step()
            plain.step()
        here = step.module.get_parameter("module.weight")
        right.append(torch.allclose(here, model.weight, rtol=1e-4, atol=1e-6))
    return here.detach().clone(), right


def test_two_steps_behind_one_call_do_not_race(pool: Pool) -> None:
    (first, right), (second, also) = pool.run(steps_twice, 10, ranks=2)
    assert right == also == [True] * 10
    assert torch.equal(first, second)


def live(numel: int) -> int:
    """How many floating-point buffers of at least that many elements Python has made since ``gc.freeze()``."""
    tensors = [one for one in gc.get_objects() if type(one) is Tensor and one.is_floating_point()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size >= numel * 4 for size in storages.values())


def most_live(microbatches: int) -> int:
    """The most buffers of the gradient's size that both ranks have, as gradients come, beside those of parameters."""
    counts: list[int] = []

    def body(rank: int) -> None:
        module = linear(256)
        step = compiled_alone(module, PAIR, microbatches=microbatches, zero=2)
        counts.append(-live(256 * 256))
        module.weight.register_post_accumulate_grad_hook(lambda _: counts.append(live(256 * 256)))
        step(torch.ones(8, 256))

    gc.collect()
    gc.freeze()
    try:
        run_strict(body, 2)
    finally:
        gc.unfreeze()
    return max(counts)


def test_the_buffers_of_zero_2_do_not_grow_with_the_number_of_micro_batches() -> None:
    few, many = (most_live(microbatches) for microbatches in (4, 8))
    assert 0 < few == many <= 2 * 5
