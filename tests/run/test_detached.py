"""The loss that a step returns: a plain detached tensor, which says so where backward is called on it by habit."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxpipe
from fxpipe.run.step.step_outcome import detached
from tests.device import DEVICE
from tests.pool import Pool
from tests.two_ranks import TWO, Two


def step(**options: Any) -> tuple[fxpipe.ForwardBackward, Tensor]:
    forward_backward = fxpipe.compile(Two(), TWO, microbatches=2, **options)
    return forward_backward, forward_backward(torch.ones(4, 4))


@pytest.mark.parametrize(
    "habit",
    [
        lambda loss: loss.backward(),
        lambda loss: loss.requires_grad_().backward(),
        lambda loss: (loss / 4).backward(),  # as accumulation is written in transformers' scripts without a Trainer
        lambda loss: (0.5 * loss).backward(),
        lambda loss: torch.amp.GradScaler(DEVICE).scale(loss),  # whose step would divide the gradients by 65536
        lambda loss: torch.amp.GradScaler(DEVICE).scale([loss]),
    ],
)
def test_a_backward_by_habit_says_that_gradients_are_there(habit: Callable[[Tensor], object]) -> None:
    forward_backward, loss = step()
    before = [parameter.grad.clone() for parameter in forward_backward.parameters()]
    with pytest.raises(fxpipe.RunError, match="gradients are there already"):
        habit(loss)
    assert all(map(torch.equal, before, (parameter.grad for parameter in forward_backward.parameters())))


def test_a_scaler_that_is_turned_off_leaves_it_as_it_is() -> None:
    _, loss = step()
    assert torch.amp.GradScaler(DEVICE, enabled=False).scale(loss) is loss


def test_what_needs_a_gradient_of_its_own_gets_it() -> None:
    _, loss = step()
    scale = torch.tensor(2.0, requires_grad=True)
    for total in (loss * scale, scale * loss, loss / scale * scale * scale, loss + scale * loss):
        scale.grad = None
        total.backward()
        torch.testing.assert_close(scale.grad, loss.detach())


PLAIN = {
    "detach": lambda loss: loss.detach(),
    "clone": lambda loss: loss.clone(),
    "add": lambda loss: loss + 0,
    "stack": lambda loss: torch.stack([loss, loss])[0],
    "deepcopy": copy.deepcopy,
    "pickle": lambda loss: pickle.loads(pickle.dumps(loss)),
    "compiled": lambda loss: torch.compile(lambda x: x + 0, backend="eager", fullgraph=True)(loss),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN.keys())
def test_what_is_made_from_it_is_a_plain_tensor(make: Callable[[Tensor], Tensor]) -> None:
    _, loss = step()
    made = make(loss)
    assert type(made) is Tensor
    assert float(made) == float(loss)


def test_it_passes_for_a_plain_tensor() -> None:
    _, loss = step()
    plain = torch.tensor(float(loss))
    assert isinstance(loss, Tensor)
    assert torch.is_tensor(loss)
    assert loss.__class__ is Tensor  # as wandb.util.get_full_typename reads it
    assert (loss.dim(), loss.requires_grad, loss.is_leaf, loss.grad_fn) == (0, False, True, None)
    torch.testing.assert_close(loss, plain, rtol=0, atol=0)
    assert repr(loss) == repr(plain)
    assert str(loss) == str(plain)
    assert f"{loss:.3f} {loss}" == f"{plain:.3f} {plain}"
    assert f"{loss / 2:.3f}" == f"{plain / 2:.3f}"
    assert loss.item() == float((loss.cpu() if loss.is_cuda else loss).numpy()) == loss.tolist() == plain.item()
    assert loss == plain
    assert math.isclose(loss, plain)
    assert max(loss, plain - 1) is loss
    assert {loss: 1}[loss] == 1
    total = 0.0
    total += loss
    assert type(total) is Tensor


def test_a_checkpoint_with_it_loads_as_weights_alone() -> None:
    _, loss = step()
    file = io.BytesIO()
    torch.save({"loss": loss, "mean": loss / 2}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(value) for value in loaded.values()} == {Tensor}
    assert torch.equal(loaded["loss"], loss)


def test_nothing_but_the_user_keeps_it_alive() -> None:
    _, loss = step()
    reference = weakref.ref(loss)
    gc.disable()
    try:
        del loss
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("value", [1.0, torch.ones(2), torch.tensor(1.0, requires_grad=True), NotImplemented])
def test_only_a_loss_without_a_gradient_becomes_one(value: Any) -> None:
    assert detached(value) is value


def averaged() -> tuple[float, float]:
    """As scripts average their losses over ranks."""
    fxpipe.init()
    _, loss = step()
    loss.mul_(1 + dist.get_rank())
    mine = float(loss)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, loss)
    assert [type(other) for other in everyone] == [Tensor, Tensor]
    dist.all_reduce(loss)
    return mine, float(loss)


def test_it_travels_between_ranks(pool: Pool) -> None:
    (one, total), (two, same) = pool.run(averaged, ranks=2)
    assert total == same == pytest.approx(one + two)
