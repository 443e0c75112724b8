"""Transparency: a compiled model trains as plain PyTorch does, to the last bit, on every engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.device import DEVICE
from tests.graphs import FAMILIES
from tests.harness import (
    STEPS,
    Engines,
    Run,
    accumulate,
    assert_gradients,
    assert_run,
    assert_same,
    compiled,
    cut,
    gradients_of,
    reference,
    replica_of,
    rows_of,
    stepped,
    strict,
    trained,
)
from tests.models import CASES, PLAIN, RANDOM, WIDTH, Case, ColumnBatch, Inputs, linear
from tests.pool import Pool
from tests.thinned import ALL, every, in_turn

ENGINES = ["local", "strict 0", "strict 1", "distributed"]
EVERY = CASES | PLAIN | RANDOM


SELDOM = ["local", "strict 0", "strict 1", "local", "strict 1", "strict 0", "distributed"]


def batches_of(case: Case, steps: int = STEPS, rows: int | None = None) -> list[Inputs]:
    return [case.batch(number, rows) for number in range(steps)]


def train_case(name: str, options: Mapping[str, Any]) -> Run:
    case = EVERY[name]
    return trained(case, batches_of(case), **options)


# --- three steps, every model, every engine ---

FIRST = every(2, list(CASES))
SECOND = [name for name in CASES if name != "skip of 1 MiB" and (ALL or name not in FIRST)]
"""Each model is in one of the two tests that follow; in both where all cases run."""


@pytest.mark.parametrize(("name", "engine"), in_turn(FIRST, ENGINES if ALL else SELDOM))
def test_three_steps_equal_plain_pytorch(name: str, engine: str, engines: Engines) -> None:
    case = CASES[name]
    runs = engines(engine)(case.ranks, train_case, name, {})
    assert_run(runs, reference(case, batches_of(case))[0], case.tolerance)


@pytest.mark.parametrize(("name", "schedule"), every(2, in_turn(SECOND, FAMILIES)))
def test_no_schedule_changes_a_bit(name: str, schedule: str) -> None:
    case = CASES[name]
    runs = strict(2)(case.ranks, train_case, name, {"schedule": schedule})
    assert_run(runs, reference(case, batches_of(case))[0], case.tolerance)


@pytest.mark.parametrize(
    ("name", "microbatches"),
    in_turn(["encoder-decoder", "6 stages in turn on 3 ranks", "mixed values"], [1, 2, 10]),
)
def test_any_number_of_microbatches_equals_plain_pytorch(name: str, microbatches: int) -> None:
    case = CASES[name]
    runs = strict(4)(case.ranks, train_case, name, {"microbatches": microbatches})
    wanted = reference(dataclasses.replace(case, microbatches=microbatches), batches_of(case))[0]
    assert_run(runs, wanted)


def test_no_input_of_the_caller_is_written() -> None:
    case = CASES["written input"]
    for kept in strict(2)(case.ranks, step_and_return_the_batch, "written input"):
        for name, tensor in case.batch().items():
            assert_same(kept[name], tensor, name)


def step_and_return_the_batch(name: str) -> Inputs:
    batch = CASES[name].batch()
    compiled(CASES[name])(**batch)
    return batch


# --- random numbers ---


def seeds_of(name: str) -> dict[tuple[int, int, int], int]:
    """(stage, micro-batch, step) → the seed that the compiled model says it draws under."""
    case = RANDOM[name]
    forward_backward = compiled(case)
    places = [(s, m, n) for s in range(case.stages) for m in range(case.microbatches) for n in range(STEPS)]
    return {place: forward_backward.seed(*place) for place in places}


@pytest.mark.parametrize(("name", "engine"), in_turn(list(RANDOM), ["local", "distributed"]))
def test_random_models_equal_a_loop_reseeded_per_stage_and_microbatch(name: str, engine: str, engines: Engines) -> None:
    case, seeds = RANDOM[name], seeds_of(name)
    runs = engines(engine)(case.ranks, train_case, name, {})
    wanted, _ = reference(case, batches_of(case), lambda *place: seeds[place])
    assert_run(runs, wanted)
    assert len(set(seeds.values())) == len(seeds)


@pytest.mark.parametrize(("schedule", "ranks", "order"), [("1f1b", 2, [0, 1, 0, 1]), ("gpipe", 3, [2, 0, 1, 2])])
def test_dropout_masks_depend_on_no_schedule_and_no_placement(schedule: str, ranks: int, order: list[int]) -> None:
    case = RANDOM["dropout"]
    names = compiled(case).stages.names
    options = {
        "schedule": schedule,
        "topology": Topology([("pipe", ranks)]),
        "placement": dict(zip(names, order, strict=True)),
    }
    seeds = seeds_of("dropout")
    wanted, _ = reference(case, batches_of(case), lambda *place: seeds[place])
    assert_run(strict(1)(ranks, train_case, "dropout", options), wanted)


# --- tied parameters ---


def test_owners_of_a_tied_matrix_stay_equal_to_the_last_bit(pool: Pool) -> None:
    parts = pool.run(tied_owners, "tied", ranks=4)
    first, last = parts[0], parts[-1]
    for step in range(STEPS):
        assert_same(first[step]["embed.weight"], last[step]["embed.weight"], f"step {step}")
        assert_same(first[step]["embed.weight"], first[step]["head.weight"], f"step {step}, two names")
    assert not torch.equal(first[0]["embed.weight"], first[1]["embed.weight"])
    assert all("embed.weight" not in part[0] for part in parts[1:-1])


def tied_owners(name: str) -> list[dict[str, Tensor]]:
    """This rank's own part of the state after each step."""
    case = CASES[name]
    forward_backward = compiled(case)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.01)
    states = []
    for batch in batches_of(case):
        optimizer.zero_grad()
        forward_backward(**batch)
        optimizer.step()
        states.append({key: tensor.clone() for key, tensor in forward_backward.state_dict().items()})
    return states


# --- the data axis ---


@pytest.mark.parametrize(
    ("name", "rows", "engine"),
    in_turn(["chain", "tied", "frozen middle"], [(8, 8), (9, 5)], ["strict 3", "distributed"]),
)
def test_two_replicas_have_the_full_batchs_loss_and_gradients(
    name: str, rows: tuple[int, int], engine: str, engines: Engines
) -> None:
    case = CASES[name]
    runs = engines(engine)(4, train_replicas, name, rows)
    wanted, _ = reference(dataclasses.replace(case, microbatches=1, rows=sum(rows)), batches_of(case, rows=sum(rows)))
    assert_run(runs, wanted, tolerance=1e-6)


def train_replicas(name: str, rows: tuple[int, int]) -> Run:
    """pipe 2 × data 2; replicas whose models begin differently, since the first one's is the one that counts."""
    case = CASES[name]
    topology = Topology([("pipe", 2), ("data", 2)])
    replica = replica_of(topology)
    model = case.model()
    if replica:
        nn.init.zeros_(next(model.parameters()))
    forward_backward = fxpipe.compile(model, topology, microbatches=case.microbatches)
    batches = batches_of(case, rows=sum(rows))
    mine = [{key: value.split(list(rows))[replica] for key, value in batch.items()} for batch in batches]
    return stepped(forward_backward, case, mine)


def test_each_replica_draws_masks_of_its_own(pool: Pool) -> None:
    case, rows = RANDOM["dropout"], (9, 5)
    model = case.model()
    results = pool.run(step_replicas_that_draw, rows)
    batch = case.batch(0, sum(rows))
    total = 0.0
    for replica, share in enumerate(rows):
        seeds = next(seeds for number, seeds, *_ in results if number == replica)
        mine = {key: value.split(list(rows))[replica] for key, value in batch.items()}
        for place, part in enumerate(cut(mine, case.microbatches)):
            values: Any = tuple(part.values())
            for stage, function in enumerate(model.parts()):
                torch.manual_seed(seeds[stage, place])
                values = function(*values)
            weighted = values * (rows_of(part) / share) * (share / sum(rows))
            weighted.backward()
            total += weighted.item()
    for _, _, loss, gradients in results:
        assert loss.item() == pytest.approx(total, rel=1e-6)
        assert_gradients(gradients, model, 1e-6)
    drawn = [seed for replica in (0, 1) for seed in next(s for n, s, *_ in results if n == replica).values()]
    assert len(set(drawn)) == len(drawn)


def step_replicas_that_draw(rows: tuple[int, int]) -> Any:
    """The replica, its seeds, the loss and this rank's gradients."""
    case = RANDOM["dropout"]
    topology = Topology([("pipe", 2), ("data", 2)])
    replica = replica_of(topology)
    forward_backward = compiled(case, topology=topology)
    places = [(stage, microbatch) for stage in range(case.stages) for microbatch in range(case.microbatches)]
    seeds = {place: forward_backward.seed(*place, 0, replica) for place in places}
    batch = {key: value.split(list(rows))[replica] for key, value in case.batch(0, sum(rows)).items()}
    return replica, seeds, forward_backward(**batch), gradients_of(forward_backward.named_parameters())


def test_a_device_mesh_does_for_a_topology(pool: Pool) -> None:
    case = CASES["two towers, image first"]
    runs = pool.run(train_on_mesh, "two towers, image first")
    assert_run(runs, reference(case, batches_of(case))[0])


def train_on_mesh(name: str) -> Run:
    fxpipe.init()
    mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE, (4,), mesh_dim_names=("pp",))
    return trained(CASES[name], batches_of(CASES[name]), topology=mesh)


# --- what each input is ---


def columns() -> Inputs:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(5, 10, WIDTH, generator=generator),
        "y": torch.randn(10, WIDTH, generator=generator),
        "scale": torch.randn(WIDTH, generator=generator),
    }


def test_each_input_is_cut_along_its_own_dimension() -> None:
    torch.manual_seed(0)
    model, batch = ColumnBatch(), columns()
    xs, ys = batch["x"].tensor_split(4, 1), batch["y"].tensor_split(4)
    parts = [{"x": x, "y": y, "scale": batch["scale"]} for x, y in zip(xs, ys, strict=True)]
    loss, _ = accumulate(lambda _, part: model(**part), parts, [float(len(y)) for y in ys])
    for got, gradients in strict(2)(3, step_columns):
        assert_same(got, loss, "loss")
        assert_gradients(gradients, model)


def step_columns() -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(0)
    topology = Topology([("pipe", 3)])
    forward_backward = fxpipe.compile(ColumnBatch(), topology, microbatches=4, batch_dim={"x": 1, "scale": None})
    loss = forward_backward(**columns())
    return loss, gradients_of(forward_backward.named_parameters())


def test_inputs_that_a_rank_does_not_need_may_be_none(pool: Pool) -> None:
    case = PLAIN["bare"]
    wanted, _ = reference(case, batches_of(case))
    results = pool.run(train_with_none, "bare", ranks=case.ranks)
    assert [required for _, required in results] == [("x",), (), ("y",)]
    assert_run([run for run, _ in results], wanted)


def train_with_none(name: str) -> tuple[Run, tuple[str, ...]]:
    """Every input that this rank does not require is None. A rank without parameters has an optimizer as well."""
    case = PLAIN[name]
    required = compiled(case).required_inputs
    batches = [{key: value if key in required else None for key, value in b.items()} for b in batches_of(case)]
    return trained(case, batches), required


# --- in eval mode ---


class Modes(nn.Module):
    """Three things that evaluation changes: statistics, a dropout module, a dropout function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.f, self.norm, self.drop = linear(), linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = stage_boundary(self.drop(self.norm(self.a(x))))
        out = F.dropout(self.f(h), 0.5, self.training)
        return {"loss": out.square().mean(), "output": out}


def modes_batch() -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(5)) + 3


def test_training_in_eval_mode_keeps_statistics_and_drops_nothing() -> None:
    torch.manual_seed(0)
    model = Modes().eval()
    accumulate(lambda _, part: model(part), list(modes_batch().tensor_split(4)), [3.0] * 4)
    for gradients, state in strict(2)(2, step_in_eval_mode):
        assert_gradients(gradients, model)
        for name, tensor in model.state_dict().items():
            assert_same(state[name], tensor, name)


def step_in_eval_mode() -> Any:
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Modes(), Topology([("pipe", 2)]), microbatches=4)
    forward_backward.module.eval()
    forward_backward(modes_batch())
    return gradients_of(forward_backward.named_parameters()), forward_backward.state_dict(full=True)


# --- state ---


@pytest.mark.parametrize("name", ["BatchNorm", "tied", "callables"])
def test_a_plain_model_loads_what_a_compiled_one_saves(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    wanted = reference(case, batches_of(case))[1].state_dict()
    results = strict(2)(case.ranks, trained_state, name)
    for rank, (full, _) in enumerate(results):
        torch.save(full, tmp_path / f"{rank}.pt")
        plain = case.build()
        plain.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True))
        for key, tensor in wanted.items():
            assert_same(plain.state_dict()[key], tensor, f"rank {rank}: {key}", case.tolerance)
        if name != "callables":  # whose order is the user's
            assert list(full) == list(wanted)
    parts = [part for _, part in results]
    assert set().union(*parts) == wanted.keys()
    assert all(part.keys() < wanted.keys() for part in parts)


def trained_state(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """After three steps the whole model's state, and what this rank holds of it."""
    case = CASES[name]
    forward_backward = compiled(case)
    optimizer = forward_backward.optimizer(case.optimizer, **case.optimizer_options)
    for batch in batches_of(case):
        optimizer.zero_grad()
        forward_backward(**batch)
        optimizer.step()
    return forward_backward.state_dict(full=True), forward_backward.state_dict()


@pytest.mark.parametrize("name", ["BatchNorm", "tied"])
def test_a_compiled_model_loads_what_a_plain_one_saves(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain = reference(case, batches_of(case, 2))[1]
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    plain.zero_grad()
    loss, _ = accumulate(lambda _, part: plain(**part), cut(case.batch(2), case.microbatches))
    for got, mine, again in strict(2)(case.ranks, load_and_step, name, str(tmp_path / "model.pt")):
        assert_same(got, loss, "loss", case.tolerance)
        assert_same(again, loss, "loss after loading this rank's own part", case.tolerance)
        assert_gradients(mine, plain, case.tolerance)


def load_and_step(name: str, path: str) -> Any:
    """Loads a plain model's file, and after a step this rank's own part of it; the loss each time."""
    case = CASES[name]
    forward_backward = compiled(case)
    forward_backward.load_state_dict(torch.load(path, weights_only=True))
    own = {key: tensor.clone() for key, tensor in forward_backward.state_dict().items()}
    loss = forward_backward(**case.batch(2))
    gradients = gradients_of(forward_backward.named_parameters())
    for parameter in forward_backward.parameters():
        nn.init.zeros_(parameter)
    forward_backward.load_state_dict(own)
    forward_backward.zero_grad()
    return loss, gradients, forward_backward(**case.batch(2))


# --- optimizers ---


def test_parameter_groups_and_a_plain_optimizer_train_as_in_plain_pytorch() -> None:
    case = CASES["two towers, image first"]
    model = case.model()
    optimizer = torch.optim.SGD(groups_of(model), lr=0.1)
    for batch in batches_of(case):
        optimizer.zero_grad()
        accumulate(lambda _, part: model(**part), cut(batch, case.microbatches))
        optimizer.step()
    for state in strict(2)(case.ranks, train_groups):
        for name, tensor in model.state_dict().items():
            assert_same(state[name], tensor, name)


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Biases learn slowly."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" in name], "lr": 0.01},
        {"params": [p for name, p in named if "bias" not in name]},
    ]


def train_groups() -> dict[str, Tensor]:
    case = CASES["two towers, image first"]
    forward_backward = compiled(case)
    optimizer = forward_backward.optimizer(torch.optim.SGD, groups_of(forward_backward), lr=0.1)
    for batch in batches_of(case):
        optimizer.zero_grad()
        forward_backward(**batch)
        optimizer.step()
    return forward_backward.state_dict(full=True)
