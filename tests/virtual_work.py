"""Stage graphs whose work takes exactly known virtual time on simulated GPUs, and what a step takes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.graph.ranks import Placement
from fxpipe.schedules import Costs, pyramid
from tests import simulated_gpu

MS = 1e-3
Sources = tuple[tuple[int, ...], ...]
"""Of each stage those that it reads."""


class Work(nn.Module):
    """Takes ``forward`` ms, and twice that backward: half for the input's gradient, half for the parameter's.

    ``uneven``: for each row. Whole backwards alone: a call whose seconds depend on sizes is not left to W."""

    def __init__(self, forward: float, uneven: bool) -> None:
        super().__init__()
        self.weight, self.seconds, self.uneven = nn.Parameter(torch.ones(4)), forward * MS, uneven

    def forward(self, x: Tensor) -> Tensor:
        work, seconds = torch.ops.sim.work, self.seconds * (x.shape[0] if self.uneven else 1)
        return work(x, seconds, seconds) * work(self.weight, 0.0, seconds)  # type: ignore[no-any-return]


class Stages(nn.Module):
    """A stage for each entry; those that read none read the input. ``gather``: of the last one."""

    def __init__(
        self, forward: Sequence[float], sources: Sources, gather: str | None = None, uneven: bool = False
    ) -> None:
        super().__init__()
        self.work = nn.ModuleList(Work(seconds, uneven) for seconds in forward)
        self.sources, self.gather = sources, gather
        # so that their inputs, too, have a gradient to be computed
        self.scales = nn.ParameterList(torch.ones(4) for source in sources if not source)

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        scales = iter(self.scales)
        for stage, (work, sources) in enumerate(zip(self.work, self.sources, strict=True)):
            gather = self.gather if stage == len(self.sources) - 1 else None
            read = [fxpipe.stage_boundary(made[source], name=f"s{stage}", gather=gather) for source in sources]
            made.append(work(sum(read[1:], start=read[0]) if read else x * next(scales)))
        return made[-1].mean()


class Setting(NamedTuple):
    """A step: ``forward`` ms of each stage, ``frozen`` first stages, and what ``fxpipe.compile`` is given. ``rows``: of
    each micro-batch, if they differ; a step then runs them in a pyramid."""

    schedule: str
    microbatches: int
    forward: tuple[float, ...]
    sources: Sources
    placement: Placement
    frozen: int = 0
    gather: str | None = None
    recompute: bool = False
    rows: tuple[int, ...] = ()
    in_flight: Any = None

    def __str__(self) -> str:
        graph = " ".join(
            f"{seconds:g}<{','.join(map(str, read))}" for seconds, read in zip(self[2], self[3], strict=True)
        )
        extras = [f"{self.frozen} frozen"] * (self.frozen > 0) + ["gathered"] * (self.gather is not None)
        extras += ["recomputed"] * self.recompute + [f"rows {self.rows}, {self.in_flight}"] * bool(self.rows)
        return f"{self.schedule}, m {self.microbatches}, {graph} on {self.placement} {' '.join(extras)}".strip()

    def costs(self, comm: float) -> Costs:
        if self.rows:
            order = pyramid(self.rows)
            uneven = [[seconds * self.rows[number] for number in order] for seconds in self.forward]
            return Costs.of(len(self.forward), uneven, comm=comm)
        backward = [2 * seconds * (stage >= self.frozen) for stage, seconds in enumerate(self.forward)]
        weight = [whole / 2 for whole in backward]
        if self.frozen:  # the stage behind it gives no gradient back
            backward[self.frozen] = weight[self.frozen]
        return Costs.of(len(self.forward), self.forward, backward, weight, comm)


def chain(stages: int) -> Sources:
    return ((), *((stage,) for stage in range(stages - 1)))


def compiled(setting: Setting) -> fxpipe.ForwardBackward:
    torch.manual_seed(0)
    model = Stages(setting.forward, setting.sources, setting.gather, bool(setting.rows))
    if setting.frozen:
        model.work[: setting.frozen].requires_grad_(False)
        model.scales.requires_grad_(False)
    names = [f"s{stage}" if read else f"work.{stage}" for stage, read in enumerate(setting.sources)]
    return fxpipe.compile(
        model.to(fxpipe.init()),
        fxpipe.Topology([("pipe", 4)]),
        microbatches=setting.microbatches,
        schedule=setting.schedule,  # type: ignore[arg-type]
        placement=dict(zip(names, setting.placement, strict=True)),
        recompute=setting.recompute,
        in_flight=setting.in_flight,
        microbatch_cost=len if setting.rows else None,
    )


def virtual_ms(step: Callable[[], object]) -> float:
    """From a common start of all ranks until this one's stream is through."""
    start = simulated_gpu.align()
    step()
    return (simulated_gpu.now() - start) / MS


def steps_of(settings: Sequence[Setting], comms: Sequence[float]) -> list[tuple[str, float, float, float]]:
    """(setting, comm, planned ms, this rank's virtual ms) of a step of each, where stages' work alone takes time, and
    messages take ``comm`` ms. All ranks call it."""
    return list(_steps_of(settings, comms))


def _steps_of(settings: Sequence[Setting], comms: Sequence[float]) -> Iterator[tuple[str, float, float, float]]:
    simulated_gpu.costs(**simulated_gpu.STRUCTURE)
    for setting in settings:
        forward_backward = compiled(setting)
        rows = setting.rows or (1,) * setting.microbatches
        batch = [((torch.ones(count, 4, device="cuda"),), {}) for count in rows]
        for _ in range(2):  # messages are described
            forward_backward.step_microbatches(batch)
        for comm in comms:
            simulated_gpu.costs(p2p_latency=comm * MS)
            planned = forward_backward.schedule.simulate(setting.costs(comm)).makespan
            yield str(setting), comm, planned, virtual_ms(partial(forward_backward.step_microbatches, batch))
        simulated_gpu.costs(p2p_latency=0)
        forward_backward.close()


def slowest(results: Sequence[list[Any]]) -> list[tuple[str, float, float, float]]:
    """Of what each rank measured, the step of the last one."""
    return [(*rows[0][:3], max(row[3] for row in rows)) for rows in zip(*results, strict=True)]
