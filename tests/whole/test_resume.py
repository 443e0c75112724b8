"""A run that is saved by torch's distributed checkpoint and resumed, in the same layout or another, goes on as it was.

The suite runs a quarter of the grid, each pair of ``zero`` and precision once; ``FXPIPE_ALL=1`` runs all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

import fxpipe
from fxpipe.tensors.pieces import Slice
from tests.pool import Pool
from tests.sharding.test_parallelize import in_a_new_world
from tests.thinned import ALL, every

pytestmark = pytest.mark.filterwarnings("ignore")  # torch: "assuming the intent is to save in a single process"

BEFORE, AFTER, ROWS = *((3, 4) if ALL else (2, 2)), 16
ORDERS = "one call", "model first", "optimizer first"


@dataclass(frozen=True)
class Layout:
    """How a model lies over ranks. ``nodes``: ranks to a node. ``plain``: torch's own model and optimizer."""

    pipe: int
    data: int
    zero: int
    precise: bool
    scope: str = "node"
    order: tuple[str, str] = ("pipe", "data")
    plain: bool = False

    @property
    def ranks(self) -> int:
        return self.pipe * self.data

    @property
    def topology(self) -> fxpipe.Topology:
        sizes = {"pipe": self.pipe, "data": self.data}
        return fxpipe.Topology(
            [(axis, sizes[axis]) for axis in self.order], ranks_per_node=2 if self.data > 1 else None
        )

    def __str__(self) -> str:
        axes = ",".join(self.order) if self.order != ("pipe", "data") else ""
        words = (f"{self.pipe}x{self.data}", f"zero{self.zero}", self.scope, "bf16" * self.precise, axes)
        return " ".join(word for word in words if word) if not self.plain else "plain"


class Model(nn.Module):
    """Four stages: a channels_last convolution, tied weights, a frozen and an idle parameter, odd sizes, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.image = nn.Conv2d(3, 6, 2)
        self.image.weight.data = self.image.weight.data.to(memory_format=torch.channels_last)
        self.first, self.second, self.third = nn.Linear(6, 10), nn.Linear(10, 7), nn.Linear(7, 6)
        self.norm = nn.LayerNorm(10)
        self.norm.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.idle = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, image: Tensor, labels: Tensor) -> Tensor:
        h = self.embedding(ids) + self.image(image).mean((2, 3))
        h = fxpipe.stage_boundary(self.norm(self.first(h)))
        h = fxpipe.stage_boundary(self.second(h).tanh() * self.scale)
        h = fxpipe.stage_boundary(self.third(h))
        return nn.functional.cross_entropy(self.head(h).float(), labels)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(13, (2, ROWS), generator=generator)
    return ids[0], torch.randn(ROWS, 3, 4, 4, generator=generator), ids[1]


class Run:
    """A model, its optimizer with two groups, and a schedule of learning rates; fxpipe's or plain."""

    def __init__(self, layout: Layout, seed: int) -> None:
        torch.manual_seed(seed)
        self.layout, model = layout, Model()
        if layout.plain:
            self.model: Any = model
            named = dict(model.named_parameters())
            groups = [
                {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
            ]
            self.optimizer: Any = torch.optim.AdamW(groups, lr=0.02)
        else:
            precision = fxpipe.Precision() if layout.precise else None
            policy = fxpipe.Zero(layout.zero, layout.scope, bucket_mb=2e-4)
            self.model = fxpipe.compile(model, layout.topology, microbatches=4, zero=policy, precision=precision)
            whole = [
                {"params": lambda name, parameter: parameter.ndim > 1, "weight_decay": 0.1},
                {"params": lambda name, parameter: parameter.ndim < 2, "weight_decay": 0.0},
            ]
            self.optimizer = self.model.optimizer(torch.optim.AdamW, whole, lr=0.02)
        self.schedule = LambdaLR(self.optimizer, lambda step: 0.9**step)

    def step(self, number: int) -> Tensor:
        self.optimizer.zero_grad()
        if self.layout.plain:
            loss = self.model(*batch(number))
            loss.backward()
        else:
            mine = slice(self._replica, None, self.layout.data)
            loss = self.model(*(rows[mine] for rows in batch(number)))
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    @property
    def _replica(self) -> int:
        rank = torch.distributed.get_rank() if self.layout.ranks > 1 else 0
        return self.layout.topology.coordinate(rank)["data"]

    def save(self, folder: Path) -> None:
        dcp.save({**self._states(), "schedule": self.schedule}, checkpoint_id=folder)

    def load(self, folder: Path, order: str, from_plain: bool) -> None:
        states = self._states()
        parts = {
            "one call": [states],
            "model first": [{"model": states["model"]}, {"optim": states["optim"]}],
            "optimizer first": [{"optim": states["optim"]}, {"model": states["model"]}],
        }[order]
        for part in [*parts, {"schedule": self.schedule}]:
            # torch's get_optimizer_state_dict leaves out the state of what was never stepped
            dcp.load(part, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=from_plain))
        if self.layout.plain:
            set_model_state_dict(self.model, states["model"])
            set_optimizer_state_dict(self.model, self.optimizer, states["optim"])

    def _states(self) -> dict[str, Any]:
        if not self.layout.plain:
            return {"model": self.model, "optim": self.optimizer}
        state = get_model_state_dict(self.model)
        return {"model": state, "optim": get_optimizer_state_dict(self.model, self.optimizer)}

    def boxes(self) -> list[tuple[str, Any, Tensor]]:
        """What this process has of each parameter, master and moment: name, place, values."""
        state = self.model.state_dict() if self.layout.plain else self.model.state_dict(full=True)
        found: list[tuple[str, Any, Tensor]] = [(name, ..., tensor.clone()) for name, tensor in state.items()]
        optim = self._states()["optim"]
        optim = optim if self.layout.plain else optim.state_dict()
        for name, entry in optim["state"].items():
            for key, value in entry.items():
                if isinstance(value, Slice):
                    for item in value.__create_write_items__(name, value):
                        chunk = item.tensor_data.chunk
                        ends = zip(chunk.offsets, chunk.sizes, strict=True)
                        place = tuple(slice(start, start + size) for start, size in ends)
                        part = value.__get_tensor_shard__(item.index).clone()
                        found.append((f"{key} of {name}", (tuple(value.shape), place), part))
                else:
                    found.append((f"{key} of {name}", ..., value.clone()))
        return found


Boxes = list[tuple[str, Any, Tensor]]


def uninterrupted(layout: Layout, folder: Path) -> tuple[Boxes, list[float]]:
    """What a rank has when it saves, and the losses of the steps that follow."""
    run = Run(layout, seed=0)
    for step in range(BEFORE):
        run.step(step)
    run.save(folder)
    boxes = run.boxes()
    return boxes, closing(run, [run.step(step).item() for step in range(BEFORE, BEFORE + AFTER)])


def resumed(layout: Layout, folder: Path, order: str, from_plain: bool) -> tuple[Boxes, list[float]]:
    """The same for a run that starts from other values, and is told of the folder before or after a first step."""
    run = Run(layout, seed=1)
    if order == "model first":
        run.step(50)
    run.load(folder, order, from_plain)
    boxes = run.boxes()
    return boxes, closing(run, [run.step(step).item() for step in range(BEFORE, BEFORE + AFTER)])


@in_a_new_world
def in_world(function: Any, *args: Any) -> Any:
    return function(*args)


def closing(run: Run, result: list[float]) -> list[float]:
    if not run.layout.plain:
        run.model.close()
    return result


def on_ranks(pool: Pool, layout: Layout, function: Any, *args: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The whole tensors by name, and the losses, which all ranks of a pipe group have alike."""
    if layout.ranks == 1:
        results = [function(layout, *args)]
    else:
        results = pool.run(in_world, function, layout, *args, ranks=layout.ranks)
    assert len({tuple(losses) for _, losses in results}) == 1
    return assembled([boxes for boxes, _ in results]), results[0][1]


def assembled(ranks: Sequence[Boxes]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for name, place, values in (box for boxes in ranks for box in boxes):
        if place is ...:
            assert name not in whole or torch.equal(whole[name], values), name
            whole[name] = values
        else:
            shape, part = place
            whole.setdefault(name, torch.full(shape, float("nan"), dtype=values.dtype))[part] = values
    return whole


def same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], precise: bool) -> None:
    """The same bits by name. A parameter under ``Precision`` is compared by its master: zero=3 holds no rounded one."""
    idle = {f"{key} of idle" for key in ("step", "exp_avg", "exp_avg_sq")}  # which torch leaves out
    assert {name for name in got if " of " in name} - idle == {name for name in wanted if " of " in name} - idle
    for name, tensor in wanted.items():
        if not precise or " of " in name:
            assert not tensor.isnan().any(), name
            assert torch.equal(got[name], tensor), name


GRID = [
    Layout(pipe, data, zero, precise)
    for pipe, data in [(2, 1), (4, 1), (2, 2), (1, 4)]
    for zero in range(4)
    for precise in (False, True)
]
OTHER = {(2, 1): (1, 4), (4, 1): (2, 2), (2, 2): (4, 1), (1, 4): (2, 2)}


def elsewhere(layout: Layout, number: int) -> Layout:
    """Another grid of ranks, another ``zero``, the other scope, and for some the other order of axes."""
    pipe, data = OTHER[layout.pipe, layout.data]
    order = ("data", "pipe") if number % 3 == 1 else ("pipe", "data")
    scope = "data" if number % 2 or order[0] == "data" else "node"
    return Layout(pipe, data, (layout.zero + 1 + number % 3) % 4, layout.precise, scope, order)


SHOWN = GRID if ALL else [GRID[8 * ranks + place] for ranks in range(4) for place in (ranks, 4 + (ranks + 1) % 4)]
"""Of each grid of ranks two, which are all eight pairs of ``zero`` and precision."""
PLAIN = Layout(1, 1, 0, False, plain=True)
RESUMES = [(layout, layout, ORDERS[number % 3]) for number, layout in enumerate(SHOWN)]
RESUMES += [(layout, elsewhere(layout, number), ORDERS[(number + 1) % 3]) for number, layout in enumerate(SHOWN)]
UNROUNDED = [layout for layout in SHOWN if not layout.precise]
RESUMES += [(layout, PLAIN, "one call") for layout in every(2, [layout for layout in UNROUNDED if layout.zero])]
RESUMES += [(PLAIN, layout, "one call") for layout in every(2, UNROUNDED)]

RESUMES.sort(key=lambda resume: str(resume[0]))  # those that go on from one run stand beside each other, and share it

Saved = Callable[[Layout], tuple[Path, dict[str, Tensor], list[float]]]


@pytest.fixture(scope="module")
def saved_by(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder, the tensors and the later losses of a run of that layout: one for all that go on from it."""

    @functools.cache
    def run(layout: Layout) -> tuple[Path, dict[str, Tensor], list[float]]:
        folder = tmp_path_factory.mktemp("run")
        return (folder, *on_ranks(pool, layout, uninterrupted, folder))

    return run


@pytest.mark.parametrize(("source", "sink", "order"), every(2, RESUMES), ids=lambda value: str(value))
def test_a_run_goes_on_as_it_was(pool: Pool, saved_by: Saved, source: Layout, sink: Layout, order: str) -> None:
    folder, saved, losses = saved_by(source)
    loaded, after = on_ranks(pool, sink, resumed, folder, order, source.plain)
    same(loaded, saved, source.precise)
    if source == sink:
        assert after == losses
    else:
        assert after == pytest.approx(losses, abs=1e-2 if source.precise else 1e-6)
