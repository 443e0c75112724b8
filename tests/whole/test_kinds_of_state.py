"""Checkpoints of what some optimizers keep: tensor subclasses, numbers of groups, state whose form values decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import fxpipe
from fxpipe.errors import CheckpointError
from tests.pool import Pool
from tests.sharding.test_parallelize import in_a_new_world

pytestmark = pytest.mark.filterwarnings("ignore")  # torch: "assuming the intent is to save in a single process"

COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)


class Codes(Tensor):
    """8-bit codes and a scale, as torchao keeps moments: a write rounds to a scale of its own."""

    def __new__(cls, codes: Tensor, scale: Tensor, signed: bool = True) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale, made.signed = codes, scale, signed
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.signed, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], metadata: Any, size: Any, stride: Any) -> Codes:
        return cls(inner["codes"], inner["scale"], metadata[0])

    def floats(self) -> Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = args[0]
        if func in COPIES:
            copied = cls(func(one.codes), func(one.scale), one.signed)
            return return_and_correct_aliasing(func, args, kwargs or {}, copied)
        args = [each.floats() if isinstance(each, Codes) else each for each in args]
        if func is torch.ops.aten.copy_.default:
            one.scale.copy_(args[1].abs().max() / 100 + 1e-12)
            one.codes.copy_((args[1] / one.scale).round())
            return one
        return func(*args, **(kwargs or {}))


class Labelled(Tensor):
    """A subclass that does not say what it is made of."""


class Base(torch.optim.Optimizer):
    """Steps each parameter by its gradient and ``change(group, state, parameter)``."""

    change: Callable[[Any, Any, Any, Tensor], Tensor]

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self.change(group, self.state[parameter], parameter)
                    parameter.sub_(group["lr"] * (parameter.grad + change))


class Momentum8(Base):
    """torchao's in small."""

    def change(self, group: Any, state: Any, parameter: Tensor) -> Tensor:
        if not state:
            state["mean"] = [
                Codes(torch.zeros_like(parameter, dtype=torch.int8), torch.zeros((), device=parameter.device))
            ]
        mean = state["mean"][0].floats().lerp(parameter.grad, 0.1)
        state["mean"][0].copy_(mean)
        return mean


class Corrected(Base):
    """As apex's FusedAdam: what it corrects by is counted in the group, from its first step on."""

    def change(self, group: Any, state: Any, parameter: Tensor) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        return mean / (1 - 0.9 ** group["step"])


class Anchored(Base):
    """As Prodigy: keeps a parameter's first value, or a single 0. And what only some have, a list, a table."""

    def change(self, group: Any, state: Any, parameter: Tensor) -> Tensor:
        if not state:
            state["first"], state["sums"], state["seen"] = parameter.sum(), [], {0: 0}
            if parameter.any():
                state["first"], state["scale"] = parameter.flatten().clone(), parameter.abs().mean()
        state["sums"].append(parameter.grad.sum())
        state["seen"][0] += 1
        first = state["first"].view_as(parameter) if state["first"].ndim else state["first"]
        return 0.1 * (parameter - first) + sum(state["sums"]) * state.get("scale", 1) / state["seen"][0]


class OfLabels(Base):
    def change(self, group: Any, state: Any, parameter: Tensor) -> Tensor:
        state["kept"] = torch.zeros_like(parameter).as_subclass(Labelled)
        return torch.zeros_like(parameter)


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


class Frozen8(nn.Module):
    """A frozen weight of codes, in front of one that is trained, whose bias is zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-90, 90, (7, 7), dtype=torch.int8)
        self.base = nn.Parameter(Codes(codes, torch.tensor(0.01)), requires_grad=False)
        self.linear = nn.Linear(7, 7)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x @ self.base.floats() if isinstance(self.base, Codes) else x)


def compiled(seed: int, cls: Any, frozen: bool, pipe: int, options: dict[str, Any], data: int = 1, **kw: Any) -> Any:
    torch.manual_seed(seed)
    parts = [Frozen8() if frozen else nn.Linear(7, 7) for _ in range(2)]
    for part in parts:
        if not frozen:
            nn.init.zeros_(part.bias)
    topology = fxpipe.Topology([("pipe", pipe), ("data", data)])
    forward_backward = fxpipe.compile(
        nn.Sequential(*parts),
        topology,
        boundaries=["1"],
        microbatches=2,
        loss_fn=mean_square,
        **options,
    )
    return forward_backward, forward_backward.optimizer(cls, **kw)


def losses(run: Any, first: int, count: int) -> list[float]:
    forward_backward, optimizer = run
    found = []
    for number in range(first, first + count):
        optimizer.zero_grad()
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(number))
        found.append(float(forward_backward(x, target=x)))
        optimizer.step()
    return found


@in_a_new_world
def saved(by: str, folder: Path, steps: int, cls: Any, frozen: bool, layout: Any) -> list[float]:
    """The losses that follow upon a save."""
    run = compiled(0, cls, frozen, **layout)
    losses(run, 0, steps)
    if by == "fxpipe":
        fxpipe.save(folder, *run, step=steps)
    else:
        dcp.save({"model": run[0], "optim": run[1]}, checkpoint_id=folder)
    return losses(run, 5, 4)


@in_a_new_world
def loaded(by: str, folder: Path, cls: Any, frozen: bool, layout: Any) -> list[float]:
    run = compiled(1, cls, frozen, **layout)
    if by == "fxpipe":
        fxpipe.load(folder, *run)
    else:
        dcp.load({"model": run[0], "optim": run[1]}, checkpoint_id=folder)
    return losses(run, 5, 4)


PIPE, PIECES = {"pipe": 2, "options": {}}, {"pipe": 1, "data": 2, "options": {"zero": 1}, "elementwise": True}


BOTH = ("fxpipe", "dcp")


def goes_on(pool: Pool, folder: Path, by: str, steps: int, *run: Any) -> None:
    wanted = pool.run(saved, by, folder, steps, *run, ranks=2)
    assert pool.run(loaded, by, folder, *run, ranks=2) == wanted


@pytest.mark.parametrize("layout", [PIPE, PIECES])
@pytest.mark.parametrize("by", BOTH)
def test_state_of_a_tensor_subclass_is_saved_by_its_parts(pool: Pool, tmp_path: Path, by: str, layout: Any) -> None:
    """What fxpipe.save wrote of it made all of the checkpoint unreadable."""
    goes_on(pool, tmp_path, by, 2, Momentum8, False, layout)


def test_a_weight_of_a_tensor_subclass_keeps_its_bits(pool: Pool, tmp_path: Path) -> None:
    goes_on(pool, tmp_path, "fxpipe", 2, Momentum8, True, PIPE)


@pytest.mark.parametrize("layout", [PIPE, PIECES])
@pytest.mark.parametrize("steps", [2, 0])
@pytest.mark.parametrize("by", BOTH)
def test_numbers_that_the_first_step_puts_into_groups_are_loaded(
    pool: Pool, tmp_path: Path, by: str, steps: int, layout: Any
) -> None:
    """A resumed run counted its steps from 1 on."""
    goes_on(pool, tmp_path, by, steps, Corrected, False, layout)


@pytest.mark.parametrize("steps", [2, 0])
def test_what_was_saved_says_the_form_of_state_that_depends_on_values(pool: Pool, tmp_path: Path, steps: int) -> None:
    """A run that was saved could not be resumed."""
    goes_on(pool, tmp_path, "fxpipe", steps, Anchored, False, PIPE)


def test_pieces_of_a_tensor_subclass_load_where_they_were(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved, "fxpipe", tmp_path, 2, Momentum8, False, PIECES, ranks=2)
    with pytest.raises(CheckpointError, match=r"a tensor subclass is read as it was saved, on the same pieces"):
        fxpipe.load(tmp_path, *compiled(1, Momentum8, False, pipe=2, options={}))


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    run = compiled(0, OfLabels, False, pipe=2, options={})
    losses(run, 0, 1)
    with pytest.raises(CheckpointError, match=r"0\.weight\.kept is a Labelled .*: a checkpoint holds plain tensors"):
        fxpipe.save(tmp_path, *run, step=1)
    assert not list(tmp_path.glob("step*"))
