"""Stages on simulated GPUs whose activations have a known size, and whose copies take a known time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.schedules import Costs
from tests import simulated_gpu
from tests.offloading import Offloading
from tests.virtual_work import MS, Setting, Stages, virtual_ms

SIZE = 1 << 22
"""The bytes that a stage holds of a micro-batch, and a gathered stage of all."""


@torch.library.custom_op("offload_work::hold", mutates_args=())
def hold(x: Tensor) -> tuple[Tensor, Tensor]:
    """x, and ones that its backward needs."""
    return x.clone(), torch.ones(SIZE // 4, device=x.device)


@hold.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(SIZE // 4)


def _save(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
    (ones,) = ctx.saved_tensors
    return gradient * ones[:1] * ones[-1:]  # type: ignore[no-any-return]


hold.register_autograd(_backward, setup_context=_save)


class Holds(nn.Module):
    """Work of a stage, and its activations."""

    def __init__(self, work: nn.Module) -> None:
        super().__init__()
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.offload_work.hold(self.work(x))[0]  # type: ignore[no-any-return]


@torch.library.custom_op("offload_work::ones", mutates_args=())
def ones(x: Tensor) -> Tensor:
    """As many ones as a stage holds bytes of."""
    return torch.ones(1, SIZE // 4, device=x.device)


@ones.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(1, SIZE // 4)


class HoldsForWeights(nn.Module):
    """Work of a stage, and activations that the gradient of a parameter needs, and no other gradient."""

    def __init__(self, work: nn.Module) -> None:
        super().__init__()
        self.work, self.factors = work, nn.Parameter(torch.zeros(1, SIZE // 4))
        self.factors.data[0, 0] = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x) * F.linear(torch.ops.offload_work.ones(x.detach()), self.factors)  # type: ignore[no-any-return]


class Case(NamedTuple):
    """A setting, and the time of a copy that its table is made for; None: without offload. ``for_weights``: whether W
    needs the activations."""

    setting: Setting
    lead: float | None
    memory: float | None = None
    for_weights: bool = False

    def costs(self, copy: float) -> Costs:
        """Each stage holds as many bytes as it takes ms, so that ranks that take as long hold as much."""
        setting = self.setting
        count = [1] * len(setting.forward)
        if setting.gather:
            count[-1] = setting.microbatches  # all of them in one action
        return replace(
            setting.costs(0),
            activation_bytes=tuple(1 / many for many in count),
            deferred_bytes=None if self.for_weights else (0.0,) * len(count),  # what I frees does not wait for W
            copy=tuple(copy / many for many in count),
        )


class Measured(NamedTuple):
    """A step on one rank. ``peak``: of the device, over that before the step, in ``SIZE``. ``waits``: of the host."""

    planned: float
    took: float
    planned_peak: float
    peak: float
    waits: int
    gradients: list[Any]


def compiled(case: Case) -> fxpipe.ForwardBackward:
    setting = case.setting
    torch.manual_seed(0)
    model = Stages(setting.forward, setting.sources, setting.gather)
    model.work = nn.ModuleList(map(HoldsForWeights if case.for_weights else Holds, model.work))
    names = [f"s{stage}" if read else f"work.{stage}" for stage, read in enumerate(setting.sources)]
    schedule: Any = setting.schedule
    if case.lead is not None:
        memory = None if case.memory is None else (case.memory,) * 4
        schedule = Offloading(schedule, case.costs(case.lead), memory)
    return fxpipe.compile(
        model.to(fxpipe.init()),
        fxpipe.Topology([("pipe", 4)]),
        microbatches=setting.microbatches,
        schedule=schedule,
        placement=dict(zip(names, setting.placement, strict=True)),
        tracer="symbolic",
    )


def steps_of(case: Case, copies: Sequence[float]) -> list[Measured]:
    """A steady step for each time of a copy, in ms. All ranks call it."""
    simulated_gpu.costs(**simulated_gpu.STRUCTURE)
    forward_backward = compiled(case)
    batch = torch.arange(4.0 * case.setting.microbatches, device="cuda").reshape(-1, 4) / 7
    for _ in range(3):
        forward_backward(batch)
    measured = [_step(forward_backward, batch, case, copy) for copy in copies]
    forward_backward.close()
    return measured


def _step(forward_backward: fxpipe.ForwardBackward, batch: Tensor, case: Case, copy: float) -> Measured:
    simulated_gpu.costs(copy_latency=copy * MS)
    forward_backward.zero_grad()
    plan = forward_backward.schedule.simulate(case.costs(copy))
    torch.cuda.reset_peak_memory_stats()
    before, waits = torch.cuda.memory_allocated(), simulated_gpu.counts().get("host waits", 0)
    took = virtual_ms(partial(forward_backward, batch))
    waits = simulated_gpu.counts().get("host waits", 0) - waits
    peak = (torch.cuda.max_memory_allocated() - before) / SIZE
    simulated_gpu.costs(copy_latency=0)
    gradients = [
        (name, parameter.grad.flatten()[:4].tolist(), parameter.grad.sum().item())
        for name, parameter in forward_backward.named_parameters()
        if parameter.grad is not None
    ]
    rank = torch.distributed.get_rank()
    return Measured(plan.makespan, took, (plan.peak_bytes or ())[rank], peak, waits, gradients)
