"""Stages on several ranks whose parameters are spread over other axes: by ``zero=3``, FSDP2 and tensor parallelism."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxpipe
from fxpipe import RunError, Topology
from fxpipe.tensors.dtensors import is_dtensor, local
from tests.harness import replica_of
from tests.pool import Pool
from tests.sharding.test_parallelize import in_a_new_world
from tests.thinned import every

WIDTH, ROWS, STEPS = 8, 12, 3
Axes = list[tuple[str, int]]
PIPE_DATA = [("pipe", 2), ("data", 2)]
PIPE_TENSOR = [("pipe", 2), ("tensor", 2)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Encoded(nn.Module):
    """``encoder``, which is on both ranks, and two more stages. ``scale`` has no dimension, and ``spare`` no use."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = nn.Sequential(Block(), Block()), nn.Parameter(torch.tensor(1.5))
        self.body, self.head, self.spare = Block(), nn.Linear(WIDTH, 1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.encoder(x) * self.scale, name="body")
        return self.head(fxpipe.stage_boundary(self.body(h), name="head")).square().mean()


def model() -> Encoded:
    torch.manual_seed(0)
    return Encoded()


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))


def blocks_sharded(stage: nn.Module, mesh: Any) -> None:
    for part in [part for part in stage.modules() if isinstance(part, Block)]:
        fully_shard(part, mesh=mesh["data"])


def all_sharded(stage: nn.Module, mesh: Any) -> None:
    blocks_sharded(stage, mesh)
    without_dimension = {parameter for parameter in stage.parameters() if not parameter.ndim}
    fully_shard(stage, mesh=mesh["data"], ignored_params=without_dimension)


def tensor_parallel(stage: nn.Module, mesh: Any) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for part in [part for part in stage.modules() if isinstance(part, Block)]:
        parallelize_module(part, mesh["tensor"], plan)


Trained = tuple[list[float], list[dict[str, float]], list[float], dict[str, Tensor]]


def plain(microbatches: int, replicas: int, norm: float) -> Trained:
    """Losses, norms of the gradients by name, losses of an evaluation, and the parameters at the end."""
    plain_model = model()
    optimizer = torch.optim.AdamW(plain_model.parameters(), lr=0.05)
    losses, norms, evaluated = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [part for replica in range(replicas) for part in batch(step, replica).tensor_split(microbatches)]
        loss = sum(plain_model(part) * len(part) for part in parts) / (ROWS * replicas)
        loss.backward()
        losses.append(loss.item())
        named = plain_model.named_parameters()
        norms.append({name: 0.0 if p.grad is None else p.grad.norm().item() for name, p in named})
        nn.utils.clip_grad_norm_(plain_model.parameters(), norm)
        optimizer.step()
        with torch.no_grad():
            evaluated.append(sum(plain_model(batch(9, replica)).item() for replica in range(replicas)) / replicas)
    return losses, norms, evaluated, plain_model.state_dict()


@in_a_new_world
def trained(
    axes: Axes, microbatches: int, norm: float, folder: Path, again: int = 0, **options: Any
) -> tuple[Trained, list[Tensor]]:
    """The same by fxpipe, and this rank's parameters at the end. Saves step 2 in ``folder``, and goes on; or, with
    ``again=2``, begins with what is saved there."""
    topology = Topology(axes)
    places: dict[str, Any] = {"placement": {"encoder": "all", "body": 0, "head": 1}}
    options = {"example_args": (batch(0, 0),), **places, **options}
    forward_backward = fxpipe.compile(model(), topology, microbatches=microbatches, **options)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.05)
    replica = replica_of(topology)
    if again:
        with torch.no_grad():
            for parameter in forward_backward.parameters():
                parameter.zero_()
        assert fxpipe.load(folder, forward_backward, optimizer)["step"] == again
    losses, norms, evaluated = [], [], []
    for step in range(again, STEPS):
        optimizer.zero_grad()
        losses.append(forward_backward(batch(step, replica)).item())
        norms.append({name: value.item() for name, value in forward_backward.grad_norms().items()})
        forward_backward.clip_grad_norm_(norm)
        optimizer.step()
        evaluated.append(forward_backward.evaluate(batch(9, replica), outputs="loss").item())
        if not again and step == 1:
            fxpipe.save(folder, forward_backward, optimizer, step=2)
    assert is_dtensor(forward_backward.module.get_parameter("encoder.1.up.weight"))
    mine = [local(parameter).detach().clone() for parameter in forward_backward.parameters()]
    return (losses, norms, evaluated, forward_backward.state_dict(full=True)), mine


@in_a_new_world
def other_tables(**options: Any) -> list[str]:
    """Errors of a step and of an evaluation in which the second replica has one row, which one rank encodes."""
    topology = Topology(PIPE_DATA)
    placement: dict[str, Any] = {"encoder": "all", "body": 0, "head": 1}
    checks = fxpipe.Checks(timeout=20)
    options = {
        "example_args": (batch(0, 0),),
        "microbatches": 4,
        "placement": placement,
        "checks": checks,
        **options,
    }
    forward_backward = fxpipe.compile(model(), topology, **options)
    replica, errors = replica_of(topology), []
    parts = [((part,), {}) for part in batch(0, replica)[: 1 if replica else 2].split(1)]
    for call in (
        lambda: forward_backward.step_microbatches(parts),
        lambda: forward_backward.evaluate(batch(0, replica)[: 1 if replica else ROWS], outputs="loss"),
    ):
        with pytest.raises(RunError) as error:
            call()
        errors.append(str(error.value))
    forward_backward(batch(1, replica))
    return errors


@pytest.mark.parametrize("options", every(2, [{"zero": 3}, {"parallelize": all_sharded}]), ids=str)
def test_replicas_of_which_one_does_not_run_a_sharded_stage_on_a_rank_are_refused(pool: Pool, options: Any) -> None:
    for errors in pool.run(partial(other_tables, **options)):
        assert all("in the order of the table, but the replicas run tables of their own" in error for error in errors)


WAYS: dict[str, tuple[Axes, dict[str, Any]]] = {
    "zero=3": (PIPE_DATA, {"zero": 3}),
    "FSDP2": (PIPE_DATA, {"parallelize": all_sharded}),
    "FSDP2 of blocks": (PIPE_DATA, {"parallelize": blocks_sharded}),
    "tensor": (PIPE_TENSOR, {"parallelize": tensor_parallel}),
}
QUICK = ("zero=3", 3), ("FSDP2", 4)
CASES = [(way, m, (number + turn) % 2 == 1) for number, way in enumerate(WAYS) for turn, m in enumerate((1, 4, 3))]


@pytest.mark.parametrize(
    ("way", "microbatches", "recompute"),
    [pytest.param(*case, marks=[] if case[:2] in QUICK else pytest.mark.long) for case in CASES],
)
def test_it_trains_as_plain_pytorch_and_resumes_with_the_same_bits(
    pool: Pool, tmp_path: Path, way: str, microbatches: int, recompute: bool
) -> None:
    axes, options = WAYS[way]
    run = partial(trained, axes, microbatches, 0.5, tmp_path, recompute=recompute, **options)
    found, resumed = pool.run(run, ranks=4), pool.run(partial(run, again=2), ranks=4)
    losses, norms, evaluated, state = plain(microbatches, dict(axes).get("data", 1), 0.5)
    first: dict[str, Tensor] = {}
    for (each, mine), (later, also) in zip(found, resumed, strict=True):
        assert each[0] == pytest.approx(losses, rel=1e-5)
        assert each[2] == pytest.approx(evaluated, rel=1e-5)
        for some, wanted in zip(each[1], norms, strict=True):
            assert some == pytest.approx(wanted, rel=1e-4, abs=1e-7)
        for name, tensor in state.items():
            torch.testing.assert_close(each[3][name], tensor, rtol=1e-4, atol=2e-6)
            assert torch.equal(first.setdefault(name, each[3][name]), each[3][name])
            assert torch.equal(later[3][name], each[3][name])
        assert [part[2:] for part in each[:3]] == [*later[:3]]
        assert all(map(torch.equal, mine, also))
