"""A model on the meta device: each rank makes its own part, which is what one process would make."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary
from fxpipe.graph.stage_graph import all_tensors
from tests.harness import assert_same, engine_of, gradients_of, replica_of
from tests.thinned import every

WIDTH = 6
ENGINES = ["local", "strict 1", "distributed"]
TRACERS = ["symbolic", "export", "record"]


class Tied(nn.Module):
    """Four stages; the first and the last share a weight; a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = stage_boundary(self.embed(ids))
        for layer in self.layers:
            h = stage_boundary(torch.tanh(layer(h)) + h * self.scale)
        return F.cross_entropy(self.head(self.norm(h)), labels)


def init_weights(module: nn.Module) -> None:
    if isinstance(module, Tied):
        module.scale.fill_(0.5)
    fxpipe.reset_parameters(module)


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, 11, (8,), generator=generator) for name in ("ids", "labels")}


def plain() -> Tied:
    torch.manual_seed(1)
    return Tied()


def step(tracer: str, data: int, **options: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor | None], int]:
    topology = fxpipe.Topology([("pipe", 4 // data), ("data", data)])
    replica = replica_of(topology) if data > 1 else 0
    model = on_meta()
    torch.manual_seed(7 + replica)  # no seed need agree
    forward_backward = fxpipe.compile(
        model, topology, microbatches=4 // data, tracer=tracer, example_kwargs=batch(), **options
    )
    state = {name: tensor.clone() for name, tensor in forward_backward.state_dict(full=True).items()}
    loss = forward_backward(**{name: value.chunk(data)[replica] for name, value in batch().items()})
    made = sum(not tensor.is_meta for tensor in all_tensors(model).values())
    return loss, state, gradients_of(forward_backward.named_parameters()), made


@pytest.mark.parametrize(
    ("where", "tracer"),
    every(5, list(product([("local", 1), ("strict 1", 1), ("distributed", 1), ("distributed", 2)], TRACERS))),
)
def test_initialised_on_each_rank(where: tuple[str, int], tracer: str, request: pytest.FixtureRequest) -> None:
    engine, data = where
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    ranks = run(4, partial(step, init_fn=init_weights), tracer, data)
    first = ranks[0][1]
    model = plain()
    model.load_state_dict(first)
    wanted_loss, wanted = reference(model)
    for loss, state, gradients, made in ranks:
        assert_same(loss, wanted_loss, "loss", 1e-6)
        assert engine == "local" or made < len(all_tensors(model))
        for name, tensor in first.items():
            assert_same(state[name], tensor, name)
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[name], name, 1e-6)


def reference(model: Tied) -> tuple[Tensor, dict[str, Tensor | None]]:
    total = torch.zeros(())
    for ids, labels in zip(*(part.chunk(4) for part in batch().values()), strict=True):
        (loss := model(ids, labels) / 4).backward()
        total = total + loss.detach()
    return total, gradients_of(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("engine", ENGINES)
def test_loaded_from_a_checkpoint(engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = plain()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    wanted_loss, wanted = reference(model)
    path = str(tmp_path / "model.pt")
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    for loss, state, gradients, _ in run(4, partial(step, checkpoint=path, init_fn=init_weights), "auto", 1):
        assert_same(loss, wanted_loss, "loss")
        for name, tensor in plain().state_dict().items():
            assert_same(state[name], tensor, name)
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[name], name, 1e-6 if name in ("embed.weight", "head.weight") else 0.0)


def test_without_either_compile_says_what_to_write() -> None:
    with pytest.raises(fxpipe.RunError, match=r"on the meta device; pass init_fn=, or checkpoint="):
        step("symbolic", 1)
    with pytest.raises(fxpipe.CheckpointError, match="there is no checkpoint at nowhere"):
        step("symbolic", 1, checkpoint="nowhere.safetensors")


def test_a_preview_makes_nothing() -> None:
    model = on_meta()
    plan = fxpipe.preview(model, fxpipe.Topology([("pipe", 4)]), microbatches=4)
    assert all(tensor.is_meta for tensor in all_tensors(model).values())
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["embed", "layers.0", "layers.1", "head"]
    assert str(plan.schedule) in str(plan)
