"""Scenarios: small runs on simulated GPUs, which go through what orders streams in fxpipe, and are plain PyTorch.

Each fails where a loss or a parameter is not plain PyTorch's, and, as all calls of ``gpus``, where the device finds a
race or a fault of lifetime. See orderings.py.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fxpipe
from tests.harness import assert_same

WIDTH, ROWS, STEPS = 8, 8, 3
TOLERANCE = 1e-5


class Two(nn.Module):
    """Two stages of two layers. ``tied``: by one weight. ``gather``: the second sees all rows. ``sums``: the loss is a
    ``Sum``."""

    def __init__(self, tied: bool = False, gather: Any = None, sums: bool = False) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if tied:
            self.two[1].weight = self.one[0].weight
        self.gather, self.sums = gather, sums

    def forward(self, x: Tensor) -> Any:
        h = fxpipe.stage_boundary(self.one(x * self.scale).tanh(), name="two", gather=self.gather)
        squares = (self.two(h) - h.mean(0) if self.gather else self.two(h)).square()
        return fxpipe.Sum(squares.sum(), squares.numel()) if self.sums else squares.mean()


@dataclass(frozen=True)
class Scenario:
    """``run``: what is done with the compiled model. ``options`` are ``compile``'s, and ``optimizer`` that one's."""

    pipe: int = 1
    data: int = 1
    per_node: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[[Trained], None] = lambda trained: trained.steps()

    @property
    def ranks(self) -> int:
        return self.pipe * self.data

    def __call__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # fxpipe's, of a loss that is not finite
            trained = Trained(self)
            self.run(trained)
            trained.check_parameters()
            trained.step.close()


class Trained:
    """A scenario's compiled model, its plain twin, and an optimizer of each."""

    def __init__(self, scenario: Scenario) -> None:
        device = fxpipe.init()
        axes = [("pipe", scenario.pipe), ("data", scenario.data)]
        self._topology = fxpipe.Topology(axes, ranks_per_node=scenario.per_node)
        torch.manual_seed(0)
        model = Two(**scenario.model).to(device)
        self.plain = copy.deepcopy(model)
        self.plain.sums = False
        self._batches = [torch.randn(ROWS, WIDTH).to(device) for _ in range(STEPS)]
        options = {"microbatches": 2, "example_args": [self._mine(self._batches[0])], **scenario.options}
        self.step = fxpipe.compile(model, self._topology, **options)
        self.optimizer = self.step.optimizer(torch.optim.AdamW, lr=0.01, **scenario.optimizer)
        self._plainly = torch.optim.AdamW(self.plain.parameters(), lr=0.01)

    def _mine(self, batch: Tensor) -> Tensor:
        return batch.chunk(self._topology.data_size)[self._topology.data_rank]

    def steps(self, calls: int = 1, updates: int = 1) -> None:
        """``calls`` of the model for each step, whose gradients add up, and ``updates`` by the optimizer."""
        losses, expected = [], []
        for batch in self._batches:
            for call in range(calls):
                self.step.set_requires_gradient_sync(call == calls - 1)
                losses.append(self.step(self._mine(batch)))
                expected.append(self.plain(batch))
                expected[-1].backward()
            for optimizer in (self.optimizer, self._plainly):
                for _ in range(updates):
                    optimizer.step()
                optimizer.zero_grad()
        # Behind all steps: the host would wait for what it looks at, and that would order streams, too.
        for number, (loss, other) in enumerate(zip(losses, expected, strict=True)):
            assert_same(loss + 0, other.detach(), f"loss {number}", TOLERANCE)

    def check_parameters(self) -> None:
        for name, value in self.step.state_dict(full=True).items():
            wanted = self.plain.state_dict()[name]
            assert_same(value.to(wanted.device), wanted, name, 10 * TOLERANCE)


def saves(trained: Trained) -> None:
    """In the background, while training goes on; what is loaded is what was there."""
    trained.steps()
    then = copy.deepcopy(trained.plain)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        later = fxpipe.save(folder[0], trained.step, trained.optimizer, step=STEPS, block=False)
        trained.steps()
        later.result()
        fxpipe.load(folder[0], trained.step, trained.optimizer)
        dist.barrier()
    trained.plain = then


def shards(stage: nn.Module, mesh: Any) -> None:
    fully_shard(stage, mesh=mesh["data"])


SPREAD = {"one": "all", "two": "all"}
"""Where stages are: on all pipe ranks, which take micro-batches in turn."""

SCENARIOS: Mapping[str, Scenario] = {
    "pipe": Scenario(pipe=2),
    "pipe, tied": Scenario(pipe=2, model={"tied": True}),
    "pipe, offload": Scenario(pipe=2, optimizer={"offload": True}),
    "pipe, saves": Scenario(pipe=2, run=saves),
    "gathered": Scenario(data=2, model={"gather": "global"}),
    **{f"zero {zero}": Scenario(data=2, options={"zero": zero}) for zero in range(4)},
    "zero 0, sums of two calls": Scenario(data=2, model={"sums": True}, run=partial(Trained.steps, calls=2)),
    "zero 1, two updates": Scenario(data=2, options={"zero": 1}, run=partial(Trained.steps, updates=2)),
    "zero 1, two nodes": Scenario(data=4, per_node=2, options={"zero": 1}),
    "zero 2, four micro-batches": Scenario(data=2, options={"zero": 2, "microbatches": 4}),
    "zero 2, spread": Scenario(pipe=2, data=2, options={"zero": 2, "placement": SPREAD}),
    "fully_shard": Scenario(data=2, options={"parallelize": shards}),
}
