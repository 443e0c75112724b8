"""The run that faults happen to, and where in it they do. It goes on from its newest checkpoint, where it has one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fxpipe
from fxpipe.checkpoint.files.writer import RankPlan
from fxpipe.distributed import torch_transport
from fxpipe.run.actions.actions import BackwardAction, ForwardAction

RANKS = 4
STEPS = 4

LAYOUTS: dict[str, tuple[fxpipe.Topology, dict[str, Any]]] = {
    "pipe 4": (fxpipe.Topology([("pipe", 4)]), {}),
    **{f"2 x 2, zero {z}": (fxpipe.Topology([("pipe", 2), ("data", 2)]), {"zero": z}) for z in range(4)},
}
PHASES = "capture, pre-flight, forward, backward, reduction, optimizer, evaluation, checkpoint, dcp.save".split(", ")


@dataclass(frozen=True)
class Fault:
    """``victim`` gets a signal in a phase, the second time that it comes to it, where there is one."""

    layout: str
    phase: str
    signal: str
    victim: int
    timeout: float

    def __str__(self) -> str:
        return f"{self.signal} of rank {self.victim} in {self.phase}, {self.layout}"


TIMEOUT = 6.0
SIGNALS = ("SIGKILL", "SIGSTOP")


def cases() -> list[Fault]:
    """144 of them: each rank, in each phase, killed and stopped, in a chain of four; in turn over other layouts."""
    chain, *others = LAYOUTS
    every = [Fault(chain, *one, TIMEOUT) for one in product(PHASES, SIGNALS, range(RANKS))]
    turns = [
        Fault(layout, phase, kind, (turn + place) % RANKS, TIMEOUT)
        for (place, phase), kind, (turn, layout) in product(enumerate(PHASES), SIGNALS, enumerate(others))
    ]
    return every + turns


class Model(nn.Module):
    """Four stages; a two-stage layout has two of them on a rank."""

    def __init__(self, in_forward: Callable[[], None]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.in_forward = in_forward

    def forward(self, x: Tensor) -> Tensor:
        self.in_forward()
        for number, part in enumerate(self.parts):
            x = part(x).relu() if number == 0 else part(fxpipe.stage_boundary(x)).relu()
        return x.mean()


def nothing() -> None:
    pass


def train(fault: Fault, rank: int, folder: Path, strikes: bool) -> None:
    """Trains, evaluates and saves in turn, until the fault happens to ``fault.victim``, or to the end where it does
    not; the first rank notes the losses."""

    def strike(*_: object) -> None:
        (folder / "struck").write_text(str(time.monotonic()))
        os.kill(os.getpid(), getattr(signal, fault.signal))

    def struck_in(phase: str) -> bool:
        return strikes and rank == fault.victim and phase == fault.phase

    if struck_in("pre-flight"):
        torch_transport.facts_of = before(strike, torch_transport.facts_of)  # type: ignore[assignment]
    topology, options = LAYOUTS[fault.layout]
    torch.manual_seed(0)
    model = Model(strike if struck_in("capture") else nothing)
    checks = fxpipe.Checks(timeout=fault.timeout)
    forward_backward = fxpipe.compile(model, topology, microbatches=4, checks=checks, **options)
    optimizer = forward_backward.optimizer(torch.optim.AdamW)
    begin = 0
    if (folder / "run" / "latest").exists():
        begin = fxpipe.load(folder / "run", forward_backward, optimizer)["step"]
    for step in range(begin, STEPS):
        if step == 1:
            _arm(strike, struck_in, forward_backward, optimizer)
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        loss = forward_backward(batch)
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{step} {loss.item().hex()}\n")
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and struck_in("evaluation"):
            ForwardAction.__call__ = before(strike, ForwardAction.__call__)  # type: ignore[method-assign]
        forward_backward.evaluate(batch)
        fxpipe.save(folder / "run", forward_backward, optimizer, step=step + 1)
        if strikes:
            dcp.save({"model": forward_backward, "optim": optimizer}, checkpoint_id=folder / f"dcp{step}")


def before(first: Callable[..., object], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both


def _arm(strike: Callable[..., None], struck_in: Callable[[str], bool], forward_backward: Any, optimizer: Any) -> None:
    """For what happens in the second step."""
    if struck_in("forward"):
        ForwardAction.__call__ = before(strike, ForwardAction.__call__)  # type: ignore[method-assign]
    if struck_in("backward"):
        BackwardAction.__call__ = before(strike, BackwardAction.__call__)  # type: ignore[method-assign]
    if struck_in("reduction"):
        forward_backward._reducer.end = before(strike, forward_backward._reducer.end)
    if struck_in("optimizer"):
        optimizer._step = before(strike, optimizer._step)
    if struck_in("checkpoint"):
        RankPlan.write = before(strike, RankPlan.write)  # type: ignore[method-assign]
    if struck_in("dcp.save"):
        forward_backward.state_dict = before(strike, forward_backward.state_dict)
