"""A loss function that is a module with parameters: they are trained, saved and loaded as the model's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fxpipe
from fxpipe.trace import TRACERS
from tests.harness import replica_of
from tests.pool import Pool
from tests.strict_transport import run_strict
from tests.thinned import in_turn

ROWS, STEPS = 8, 4
Batch = tuple[Tensor, Tensor]


class Net(nn.Sequential):
    """A forward that calls all of its submodules, one after another."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


class Weighted(nn.Module):
    """Class centres, and a weight for each of two terms: what metric learning and multi-task losses train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.centres, self.weights = nn.Embedding(3, 4), nn.Parameter(torch.zeros(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        terms = torch.stack([(output - self.centres(target)).square().mean(), output.abs().mean()])
        return (terms * (-self.weights).exp() + 0.5 * self.weights).sum()


def batch(step: int, replica: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def plain(steps: int, replicas: int = 1) -> tuple[list[Tensor], dict[str, Tensor]]:
    model, loss_fn, losses = Net(), Weighted(), []
    optimizer = torch.optim.AdamW([*model.parameters(), *loss_fn.parameters()], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        parts = [part for r in range(replicas) for part in zip(*(one.chunk(2) for one in batch(step, r)), strict=True)]
        found = []
        for x, target in parts:
            found.append(loss_fn(model(x), target) / len(parts))
            found[-1].backward()
        optimizer.step()
        losses.append(torch.stack(found).sum().detach())
    own = {f"loss_fn.{name}": value for name, value in loss_fn.state_dict().items()}
    return losses, {**model.state_dict(), **own}


def compiled(topology: fxpipe.Topology, loss_fn: Any = None, model: Any = None, **options: Any) -> Any:
    x, target = batch(0)
    given = {"boundaries": ["2"], "microbatches": 2, "example_args": (x,), "example_kwargs": {"target": target}}
    return fxpipe.compile(model or Net(), topology, loss_fn=loss_fn or Weighted(), **{**given, **options})


def trained(run: Any, optimizer: Any, topology: fxpipe.Topology, first: int, last: int) -> list[Tensor]:
    replica, losses = replica_of(topology) if topology.world_size > 2 else 0, []
    for step in range(first, last):
        optimizer.zero_grad()
        x, target = batch(step, replica)
        losses.append(run(x, target=target))
        optimizer.step()
    return losses


def state_of(run: Any) -> dict[str, Tensor]:
    """The plain model's, and this rank's own part."""
    full = {name: value.clone() for name, value in run.state_dict(full=True).items()}
    assert list(full) == list(Net().state_dict())
    Net().load_state_dict(full)
    run.load_state_dict(full)  # which has nothing of the loss function, and leaves it alone
    own = {name: value for name, value in run.named_parameters() if name.startswith("loss_fn.")}
    return {**full, **{name: value.detach().clone() for name, value in own.items()}}


def run_of(topology: fxpipe.Topology, steps: int, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    run = compiled(topology, **options)
    optimizer = run.optimizer(torch.optim.AdamW, ["loss_fn.*", "[0-9]*"], lr=0.1)
    losses = trained(run, optimizer, topology, 0, steps)
    found = losses, state_of(run) if options.get("zero", 0) < 3 else {}
    run.close()
    return found


def check(found: list[tuple[list[Tensor], dict[str, Tensor]]], replicas: int) -> None:
    losses, state = plain(STEPS, replicas)
    names: set[str] = set()
    for got, own in found:
        torch.testing.assert_close(got, losses if replicas == 1 else got)
        for name, value in own.items():
            torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)
        names.update(own)
    assert names in (state.keys(), set())


ONE_PROCESS = fxpipe.Topology([("pipe", 2)])
FUNCTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "a module": lambda loss: loss,
    "a method of one": lambda loss: loss.forward,
    "a partial function": functools.partial,
}


@pytest.mark.parametrize(("how", "tracer"), in_turn(list(FUNCTIONS), list(TRACERS)))
def test_its_parameters_are_trained_as_in_plain_pytorch(how: str, tracer: str) -> None:
    check([run_of(ONE_PROCESS, STEPS, {"loss_fn": FUNCTIONS[how](Weighted()), "tracer": tracer})], 1)


LAYOUTS: list[tuple[list[tuple[str, int]], dict[str, Any]]] = [
    ([("pipe", 2)], {}),
    ([("pipe", 2)], {"recompute": True, "precision": fxpipe.Precision(torch.float32)}),
    ([("pipe", 2), ("data", 2)], {"zero": 1}),
    ([("data", 2), ("pipe", 2)], {"zero": 2, "boundaries": "auto"}),
]


@pytest.mark.parametrize(("axes", "options"), LAYOUTS, ids=str)
def test_they_belong_to_the_rank_that_makes_the_loss(axes: list[tuple[str, int]], options: dict[str, Any]) -> None:
    topology = fxpipe.Topology(axes)
    check(run_strict(lambda rank: run_of(topology, STEPS, options), topology.world_size), topology.size("data"))


def shards(steps: int) -> dict[str, Tensor]:
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    run = compiled(topology, zero=3)
    trained(run, run.optimizer(torch.optim.AdamW, lr=0.1), topology, 0, steps)
    whole = {name: value.full_tensor() for name, value in run.named_parameters() if name.startswith("loss_fn.")}
    return {**whole, **run.state_dict(full=True)}


def test_fsdp_shards_them(pool: Pool) -> None:
    _, state = plain(STEPS, 2)
    found = pool.run(shards, STEPS, ranks=4)
    assert state.keys() in [own.keys() for own in found]
    for own in found:
        for name, value in own.items():
            torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["fxpipe", "dcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_checkpoint_has_them_for_another_number_of_ranks(way: str, tmp_path: Path) -> None:
    losses, state = plain(STEPS)
    single = fxpipe.Topology([("pipe", 1)])
    run = compiled(single, boundaries=())
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    trained(run, optimizer, single, 0, STEPS - 2)
    if way == "fxpipe":
        fxpipe.save(tmp_path, run, optimizer, step=STEPS - 2)
    else:
        dcp.save({"model": run, "optim": optimizer}, checkpoint_id=tmp_path)
    other, fresh = Weighted(), Net()
    for parameter in (*other.parameters(), *fresh.parameters()):
        nn.init.zeros_(parameter)
    again = compiled(ONE_PROCESS, other, fresh)
    optimizer = again.optimizer(torch.optim.AdamW, lr=0.1)
    if way == "fxpipe":
        fxpipe.load(tmp_path, again, optimizer)
    else:
        dcp.load({"model": again, "optim": optimizer}, checkpoint_id=tmp_path)
    torch.testing.assert_close(trained(again, optimizer, ONE_PROCESS, STEPS - 2, STEPS), losses[-2:])
    torch.testing.assert_close(state_of(again), state)


def test_a_checkpoint_of_the_plain_model_is_read_without_them(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "plain.pt")
    with torch.device("meta"):
        empty = Net()
    run = compiled(ONE_PROCESS, model=empty, checkpoint=tmp_path / "plain.pt")
    losses, _ = plain(1)
    torch.testing.assert_close(trained(run, run.optimizer(torch.optim.AdamW), ONE_PROCESS, 0, 1), losses)


def test_a_function_that_closes_over_them_is_told_to_pass_the_module() -> None:
    loss_fn = Weighted()
    with pytest.raises(fxpipe.TraceError, match="or pass the module that holds it as loss_fn= itself"):
        compiled(ONE_PROCESS, lambda output, target: loss_fn(output, target))


def test_a_model_with_a_loss_fn_of_its_own_is_refused() -> None:
    model = Net()
    model.loss_fn = nn.MSELoss()
    with pytest.raises(fxpipe.RunError, match="has a loss_fn of its own"):
        compiled(ONE_PROCESS, model=model)


def test_what_is_set_in_the_model_counts_in_the_next_step() -> None:
    model, loss_fn = Net(), Weighted()
    run = compiled(ONE_PROCESS, loss_fn, model, tracer="symbolic")
    x, target = batch(0)
    before = run(x, target=target)
    model[1] = nn.ReLU()
    with torch.no_grad():
        loss_fn.weights += 1.0
    wanted = torch.stack([loss_fn(model(a), b) / 2 for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]).sum()
    torch.testing.assert_close(run(x, target=target), wanted.detach())
    assert not torch.equal(before, wanted)
