"""Transparency: a compiled model trains as plain PyTorch does, to the last bit, on every engine."""

from __future__ import annotations

from dataclasses import replace
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
    Batches,
    Engines,
    Run,
    accumulate,
    assert_gradients,
    assert_run,
    assert_same,
    assert_trains,
    compiled,
    cut,
    gradients_of,
    reference,
    strict,
    trained,
)
from tests.models import CASES, IGNORED, PLAIN, RANDOM, WIDTH, Case, Inputs, linear
from tests.pool import Pool
from tests.thinned import ALL, in_turn

ENGINES = ["local", "strict 0", "strict 1", "distributed"]
SELDOM = ["local", "strict 0", "strict 1", "local", "strict 1", "strict 0", "distributed"]
RECOMPUTE = [False, False, True]
"""Lists of 7, 5 and 3 values, each taken in turn: within 35 models every value of one meets every value of another."""


RECOMPUTED = ["BatchNorm", "dict loss", "tied", "frozen middle", "loss function", "Sum in a dict"]
"""What a second forward could count, write, draw or add up twice."""


@pytest.mark.parametrize(
    ("name", "engine", "schedule", "recompute"),
    [
        *in_turn(list(CASES), ENGINES if ALL else SELDOM, FAMILIES, [False] if ALL else RECOMPUTE),
        *((name, "local", "gpipe", True) for name in RECOMPUTED),
    ],
)
def test_three_steps_equal_plain_pytorch(
    name: str, engine: str, schedule: str, recompute: bool, engines: Engines
) -> None:
    assert_trains(CASES[name], engines(engine), schedule=schedule, recompute=recompute)


@pytest.mark.parametrize(
    ("name", "microbatches"),
    in_turn(["encoder-decoder", "6 stages in turn on 3 ranks", "mixed values"], [1, 2, 10]),
)
def test_any_number_of_microbatches_equals_plain_pytorch(name: str, microbatches: int) -> None:
    assert_trains(CASES[name], strict(4), microbatches=microbatches)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", ["zb_v", "v_min"])
def test_a_folded_chain_equals_plain_pytorch(schedule: str, engine: str, engines: Engines) -> None:
    there_and_back = {"layers.0": 0} | {f"layer{place}": min(place, 5 - place) for place in range(1, 6)}
    case = replace(CASES["6 stages in turn on 3 ranks"], placement=there_and_back)
    assert_trains(case, engines(engine), schedule=schedule, microbatches=5)


# --- the data axis ---

SQUARE = Topology([("pipe", 2), ("data", 2)])


def replicas_of(case: Case, rows: tuple[int, int]) -> Batches:
    """Each step's rows of two replicas."""
    batches = [case.batch(number, sum(rows)) for number in range(STEPS)]
    return [tuple(part_of(batch, part) for part in (slice(rows[0]), slice(rows[0], None))) for batch in batches]


def part_of(batch: Inputs, part: slice) -> Inputs:
    return {name: value[part] for name, value in batch.items()}


@pytest.mark.parametrize(
    ("name", "rows", "zero", "engine"),
    [
        ("chain", (8, 8), 0, "strict 3"),
        ("tied", (9, 5), 0, "distributed"),
        ("frozen middle", (9, 5), 1, "strict 3"),
        ("frozen tower", (8, 8), 2, "strict 3"),
        ("encoder-decoder, context read twice", (9, 5), 2, "distributed"),
        ("two adapters", (9, 5), 3, "distributed"),
        ("Sum", (8, 8), 0, "distributed"),
        ("Sum in a dict", (10, 7), 1, "strict 1"),
        ("weighted mean", (10, 7), 0, "strict 2"),
    ],
)
def test_two_replicas_train_on_the_rows_of_both(
    name: str, rows: tuple[int, int], zero: int, engine: str, engines: Engines
) -> None:
    batches = replicas_of(CASES[name], rows)
    assert_trains(CASES[name], engines(engine), batches, topology=SQUARE, placement=None, zero=zero)


@pytest.mark.parametrize("name", ["Sum", "weighted mean"])
def test_a_replica_whose_labels_are_all_ignored_adds_nothing(name: str, pool: Pool) -> None:
    batch = CASES[name].batch()
    masked = batch | {"labels": torch.full_like(batch["labels"], IGNORED)}
    runs = pool.run(trained_on_square, name, [(batch, masked)])
    assert_run(runs, reference(CASES[name], [batch])[0], 1e-12)


def trained_on_square(name: str, batches: Batches) -> Run:
    return trained(CASES[name], batches, topology=SQUARE)


def test_a_device_mesh_does_for_a_topology(pool: Pool) -> None:
    case = CASES["two towers, image first"]
    assert_run(pool.run(train_on_mesh, "two towers, image first"), reference(case, case.batches())[0])


def train_on_mesh(name: str) -> Run:
    fxpipe.init()
    mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE, (4,), mesh_dim_names=("pp",))
    return trained(CASES[name], CASES[name].batches(), topology=mesh)


# --- random numbers ---


def train_random(name: str, batches: Batches, options: dict[str, Any]) -> Run:
    return trained(RANDOM[name], batches, **options)


@pytest.mark.parametrize(
    ("name", "engine", "order", "replicas", "options"),
    [
        ("dropout", "local", [0, 1, 2, 3], 1, {}),
        ("noise in two stages", "distributed", [0, 1, 2], 1, {"recompute": True}),
        ("dropout", "strict 1", [0, 1, 0, 1], 1, {"recompute": True}),
        ("dropout", "strict 1", [2, 0, 1, 2], 1, {"schedule": "gpipe"}),
        ("dropout", "distributed", [0, 0, 1, 1], 2, {}),
        ("dropout", "distributed", [0, 1, 0, 1], 2, {"recompute": True, "zero": 3, "schedule": "gpipe"}),
    ],
)
def test_random_models_equal_a_loop_reseeded_per_replica_stage_and_microbatch(
    name: str, engine: str, order: list[int], replicas: int, options: dict[str, Any], engines: Engines
) -> None:
    """Whatever the schedule, the ranks of the stages, and what is drawn again in a recomputation."""
    case, pipe = RANDOM[name], max(order) + 1
    alone = compiled(case)
    options |= {
        "topology": Topology([("pipe", pipe), ("data", replicas)]),
        "placement": dict(zip(alone.stages.names, order, strict=True)),
    }
    batches = replicas_of(case, (9, 5)) if replicas == 2 else case.batches()
    drawn: set[int] = set()

    def seed(stage: int, place: int, step: int) -> int:
        replica, microbatch = divmod(place, case.microbatches)
        found = alone.seed(stage, microbatch, step, replica)
        assert found not in drawn
        drawn.add(found)
        return found

    runs = engines(engine)(pipe * replicas, train_random, name, batches, options)
    assert_run(runs, reference(case, batches, seed)[0], 1e-6 * (replicas - 1))


# --- what each input is ---


def step_and_return_the_batch(name: str) -> Inputs:
    batch = CASES[name].batch()
    compiled(CASES[name])(**batch)
    return batch


def test_no_input_of_the_caller_is_written() -> None:
    case = CASES["written input"]
    for kept in strict(2)(case.ranks, step_and_return_the_batch, "written input"):
        for name, tensor in case.batch().items():
            assert_same(kept[name], tensor, name)


def test_inputs_that_a_rank_does_not_need_may_be_none(pool: Pool) -> None:
    case = PLAIN["bare"]
    results = pool.run(train_with_none, "bare", ranks=case.ranks)
    assert [required for _, required in results] == [("x",), (), ("y",)]
    assert_run([run for run, _ in results], reference(case, case.batches())[0])


def train_with_none(name: str) -> tuple[Run, tuple[str, ...]]:
    """Every input that this rank does not require is None. A rank without parameters has an optimizer as well."""
    case = PLAIN[name]
    required = compiled(case).required_inputs
    batches = [{key: value if key in required else None for key, value in b.items()} for b in case.batches()]
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


MODES = Case(Modes, lambda rows, generator: {"x": torch.randn(rows, WIDTH, generator=generator) + 3}, ranks=2)


def test_training_in_eval_mode_keeps_statistics_and_drops_nothing() -> None:
    model = MODES.model().eval()
    accumulate(lambda _, part: model(**part), cut(MODES.batch(), 4))
    for gradients, state in strict(2)(2, step_in_eval_mode):
        assert_gradients(gradients, model)
        for name, tensor in model.state_dict().items():
            assert_same(state[name], tensor, name)


def step_in_eval_mode() -> Any:
    forward_backward = compiled(MODES)
    forward_backward.module.eval()
    forward_backward(**MODES.batch())
    return gradients_of(forward_backward.named_parameters()), forward_backward.state_dict(full=True)


# --- state ---


@pytest.mark.parametrize("name", ["BatchNorm", "tied"])
def test_a_compiled_model_loads_what_a_plain_one_saves(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain = reference(case, case.batches(2))[1]
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    plain.zero_grad()
    loss, _ = accumulate(lambda _, part: plain(**part), cut(case.batch(2), case.microbatches))
    results = strict(2)(case.ranks, load_and_step, name, str(tmp_path / "model.pt"))
    for got, mine, again, _ in results:
        assert_same(got, loss, "loss", case.tolerance)
        assert_same(again, loss, "loss after loading this rank's own part", case.tolerance)
        assert_gradients(mine, plain, case.tolerance)
    parts = [own for *_, own in results]
    assert set().union(*parts) == plain.state_dict().keys()
    assert all(own < plain.state_dict().keys() for own in parts)


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
    return loss, gradients, forward_backward(**case.batch(2)), own.keys()
