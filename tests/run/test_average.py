"""``fxpipe.Average``: the averages of torch's AveragedModel, whatever ranks share the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpipe
from fxpipe import Average, CheckpointError, FxpipeError, Precision, RunError, Topology
from fxpipe.tensors.dtensors import local as to_local
from tests.harness import engine_of, replica_of
from tests.pool import Pool
from tests.sharding.test_parallelize import in_a_new_world

STEPS, ROWS, DECAY = 3, 8, 0.9
Axes = list[tuple[str, int]]


class Model(nn.Module):
    """A channels_last convolution, tied weights on both ranks, a frozen, an idle and a 0-dimensional parameter, whole
    numbers, and a buffer that differs between replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 6, 2)
        self.image.weight.data = self.image.weight.data.to(memory_format=torch.channels_last)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.up.weight
        self.up.bias.requires_grad_(False)
        self.scale, self.idle = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(5))
        self.whole = nn.Parameter(torch.tensor([2**24 + 1, -3]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(x.float().mean())
        h = self.down(self.up(self.image(x).mean((2, 3)) + self.seen.to(x.dtype)).relu())
        h = fxpipe.stage_boundary(h, name="head") * self.scale
        return (self.head(h).float() + self.whole[1]).square().mean()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(ROWS, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + replica))


def warmed_up(updates: int) -> float:
    return min(DECAY, (1 + updates) / (10 + updates))


def reference(decay: Any) -> AveragedModel:
    """torch's, in which parameters of whole numbers, which it would round down, are left out by the tests."""

    def multi(averages: Any, present: Any, updates: Any) -> None:
        get_ema_multi_avg_fn(decay(int(updates)) if callable(decay) else decay)(averages, present, updates)

    return AveragedModel(model().float(), multi_avg_fn=multi)


def sharded(stage: nn.Module, mesh: Any) -> None:
    for name, part in stage.named_modules():
        if name == "down":
            fully_shard(part, mesh=mesh["data"])


def tensor_parallel(stage: nn.Module, mesh: Any) -> None:
    parallelize_module(stage, mesh["tensor"], {"down": RowwiseParallel(input_layouts=Replicate())})


def whole_state(forward_backward: fxpipe.ForwardBackward) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in forward_backward.state_dict(full=True).items()}


def compiled(axes: Axes, **options: Any) -> tuple[fxpipe.ForwardBackward, int]:
    """And the replica of this rank. Two ranks are a node."""
    topology = Topology(axes, ranks_per_node=2)
    if "parallelize" in options:
        options["example_args"] = (batch(0, 0),)
    options = {"microbatches": 2, **options}
    return fxpipe.compile(model(), topology, **options), replica_of(topology)


@dataclass
class Averaged:
    """The model's states after each step, its state and loss at the average, its state afterwards."""

    states: list[dict[str, Tensor]]
    applied: dict[str, Tensor]
    loss: Tensor
    after: dict[str, Tensor]
    replica: int
    elements: int
    """How many elements of averages the rank has."""


def trained(axes: Axes, decay: Any, folder: Path, **options: Any) -> Averaged:
    forward_backward, replica = compiled(axes, **options)
    average = Average(forward_backward, decay)  # and only then an optimizer, which lays out the parameters anew
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.05)
    states = []
    for step in range(STEPS):
        optimizer.zero_grad()
        forward_backward(batch(step, replica))
        optimizer.step()
        average.update()
        states.append(whole_state(forward_backward))
    fxpipe.save(folder, forward_backward, optimizer, step=STEPS, average=average)
    with average.applied():
        applied = whole_state(forward_backward)
        loss = forward_backward.evaluate(batch(9, replica), outputs="loss")
    elements = sum(to_local(values).numel() for values in average.state_dict().values() if isinstance(values, Tensor))
    return Averaged(states, applied, loss, whole_state(forward_backward), replica, elements)


def loaded(axes: Axes, folder: Path, **options: Any) -> tuple[int, dict[str, Tensor]]:
    """The number of updates, and the state at the average."""
    forward_backward, _ = compiled(axes, **options)
    average = Average(forward_backward, 0.5)
    fxpipe.load(folder, forward_backward, average=average)
    with average.applied():
        return average.updates, whole_state(forward_backward)


@in_a_new_world
def in_shards(run: Callable[[], Any]) -> Any:
    return run()


def check(found: Sequence[Averaged], decay: Any) -> None:
    average, plain = reference(decay), model()
    for state in found[0].states:
        plain.load_state_dict(state)  # converts bfloat16 to float32
        average.update_parameters(plain)
    parameters = {name for name, p in plain.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    for rank in found:
        for name, tensor in rank.states[-1].items():
            wanted = average.module.get_parameter(name) if name in parameters else tensor
            assert torch.equal(rank.applied[name], wanted.to(tensor.dtype)), name
            assert torch.equal(rank.after[name], tensor)
    losses = []
    for rank in found:  # each replica has statistics of its own
        plain.load_state_dict(rank.applied)
        losses.append(plain.eval()(batch(9, rank.replica)).item())
    rounding = 1e-2 if found[0].applied["scale"].dtype == torch.bfloat16 else 1e-5
    expected = sum(losses) / len(losses)
    assert found[0].loss.item() == pytest.approx(expected, rel=rounding)


PIPE, PIPE_DATA = [("pipe", 2)], [("pipe", 2), ("data", 2)]
CASES: dict[str, tuple[str, Axes, dict[str, Any]]] = {
    "one process": ("local", PIPE, {}),
    "pipe": ("strict 0", PIPE, {}),
    "zero=0": ("strict 1", PIPE_DATA, {}),
    "zero=1": ("strict 2", PIPE_DATA, {"zero": 1}),
    "zero=2, two nodes": ("strict 3", [("pipe", 1), ("data", 4)], {"zero": 2}),
    "bfloat16": ("strict 4", [("data", 2), ("pipe", 2)], {"zero": 1, "precision": Precision()}),
    "a stage on both": ("strict 5", PIPE_DATA, {"zero": 1, "placement": {"image": 0, "head": "all"}}),
    "zero=3": ("distributed", PIPE_DATA, {"zero": 3}),
    "FSDP2": ("distributed", PIPE_DATA, {"parallelize": sharded}),
    "tensor": ("distributed", [("pipe", 2), ("tensor", 2)], {"parallelize": tensor_parallel}),
}
LONG = "FSDP2", "tensor"


@pytest.fixture
def run(pool: Pool) -> Callable[..., list[Any]]:
    """Runs a function, with a case's engine, axes and options."""

    def on_ranks(case: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        name, axes, options = CASES[case]
        call = partial(function, axes, *args, **options)
        ranks = math.prod(size for _, size in axes)
        if name == "distributed":
            return pool.run(in_shards, call, ranks=ranks)
        return engine_of(name, lambda: pool)(ranks, call)

    return on_ranks


@pytest.mark.parametrize(
    ("case", "elsewhere", "decay"),
    [
        ("pipe", "one process", warmed_up),
        ("zero=1", "zero=2, two nodes", DECAY),
        ("zero=2, two nodes", "a stage on both", DECAY),
        ("zero=3", "zero=0", DECAY),
        *(
            pytest.param(*case, DECAY, marks=pytest.mark.long)
            for case in [
                ("one process", "zero=0"),
                ("zero=0", "bfloat16"),
                ("bfloat16", "pipe"),
                ("a stage on both", "zero=3"),
                ("FSDP2", "tensor"),
                ("tensor", "zero=3"),
            ]
        ),
    ],
)
def test_it_is_torchs_averaged_model_and_is_loaded_elsewhere(
    run: Any, tmp_path: Path, case: str, elsewhere: str, decay: Any
) -> None:
    found = run(case, trained, decay, tmp_path)
    check(found, decay)
    for updates, state in run(elsewhere, loaded, tmp_path):
        assert updates == STEPS
        for name, _ in model().named_parameters():
            close = {"rtol": 2**-8, "atol": 1e-6} if "bfloat16" in (case, elsewhere) else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(state[name], found[0].applied[name], check_dtype=False, **close)


@pytest.mark.parametrize("case", ["zero=0", "zero=2, two nodes"])
def test_ranks_that_hold_the_same_parameters_share_the_averages(run: Any, tmp_path: Path, case: str) -> None:
    found, (alone,) = run(case, trained, DECAY, tmp_path), run("one process", trained, DECAY, tmp_path / "alone")
    axes = dict(CASES[case][1])
    tied = 6 * 10 * (axes["pipe"] - 1)
    groups = 4 // axes["pipe"] // 2  # of two ranks that share
    assert sum(rank.elements for rank in found) == groups * (alone.elements + tied)
    assert max(rank.elements for rank in found) < alone.elements


# --- what cannot be ---


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(fxpipe.stage_boundary(self.below(x), name="above")).square().mean()


def test_what_would_train_or_save_the_average_is_refused_where_it_is_applied(tmp_path: Path) -> None:
    forward_backward = fxpipe.compile(Two(), Topology(PIPE), microbatches=2)
    optimizer, average = forward_backward.optimizer(torch.optim.AdamW), Average(forward_backward, 0.9)
    forward_backward(torch.ones(4, 3))
    optimizer.step()
    average.update()
    state = forward_backward.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    calls: list[tuple[type[FxpipeError], Callable[[], Any]]] = [
        (RunError, lambda: forward_backward(torch.ones(4, 3))),
        (RunError, optimizer.step),
        (RunError, lambda: forward_backward.optimizer(torch.optim.AdamW)),
        (CheckpointError, lambda: Average(forward_backward, 0.9)),
        (CheckpointError, average.update),
        (CheckpointError, average.applied().__enter__),
        (CheckpointError, lambda: forward_backward.load_state_dict(before)),
        (CheckpointError, lambda: fxpipe.save(tmp_path, forward_backward, optimizer, step=1)),
        (CheckpointError, lambda: fxpipe.load(tmp_path, forward_backward, optimizer)),
    ]
    for error, call in calls:
        with average.applied(), pytest.raises(error, match=r"inside of `with average\.applied\(\):`"):
            call()
    assert all(torch.equal(state[name], before[name]) for name in before)
    optimizer.step()


@pytest.mark.parametrize("decay", [-0.1, 1.5, "0.9", None, float("nan"), lambda updates: 2.0])
def test_a_decay_is_a_number_from_zero_to_one_or_gives_one(decay: Any) -> None:
    with pytest.raises(RunError, match="it is a number from 0 to 1, or a function that returns one"):
        Average(fxpipe.compile(Two(), Topology(PIPE)), decay)


def test_what_a_checkpoint_lacks_or_nobody_asks_for_is_told(tmp_path: Path) -> None:
    forward_backward = fxpipe.compile(Two(), Topology(PIPE), microbatches=2)
    optimizer, average = forward_backward.optimizer(torch.optim.AdamW), Average(forward_backward, 0.9)
    fxpipe.save(tmp_path, forward_backward, optimizer, step=1)
    with pytest.raises(CheckpointError, match="has no state of average=: it was saved without it"):
        fxpipe.load(tmp_path, forward_backward, optimizer, average=average)
    fxpipe.save(tmp_path, forward_backward, optimizer, step=2, average=average)
    with pytest.warns(RuntimeWarning, match="the state of the average, which nobody has asked for"):
        fxpipe.load(tmp_path, forward_backward, optimizer)
    with pytest.raises(CheckpointError, match=r"average= is a float, which has no state_dict.*fxpipe\.Average"):
        fxpipe.save(tmp_path, forward_backward, optimizer, step=3, average=0.9)


def test_torchs_own_checkpoints_take_it(tmp_path: Path) -> None:
    forward_backward = fxpipe.compile(Two(), Topology(PIPE), microbatches=2)
    average = Average(forward_backward, 0.9)
    average.update()
    dcp.save({"average": average}, checkpoint_id=tmp_path, no_dist=True)
    other = Average(fxpipe.compile(Two(), Topology(PIPE)), 0.9)
    dcp.load({"average": other}, checkpoint_id=tmp_path, no_dist=True)
    assert other.updates == 1
    for name, value in average.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=0)
    with pytest.raises(KeyError, match=r"parameters\.below\.weight"):
        other.load_state_dict({"updates": 1})
