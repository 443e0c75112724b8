"""Transparency: a compiled model trains as plain PyTorch does, to the last bit, on every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.graphs import FAMILIES
from tests.harness import (
    STEPS,
    Engine,
    Run,
    accumulate,
    assert_run,
    assert_same,
    called,
    compiled,
    cut,
    engine_of,
    gradients_of,
    local,
    reference,
    replica_of,
    rows_of,
    strict,
    trained,
)
from tests.models import CASES, PLAIN, RANDOM, WIDTH, Case, ColumnBatch, Inputs, linear
from tests.pool import Pool
from tests.thinned import ALL, every, in_turn

ENGINES = ["local", "strict 0", "strict 1", "distributed"]
EVERY = CASES | PLAIN | RANDOM


def _engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param, lambda: request.getfixturevalue("pool"))


engine = pytest.fixture(params=ENGINES)(_engine)
SOME = ["local", "strict 2", "distributed"]
SELDOM = ["local", "strict 0", "strict 1", "local", "strict 1", "strict 0", "distributed"]
some_engine = pytest.fixture(params=SOME if ALL else SOME[:2])(_engine)
"""For behaviour that no order of the ranks should touch; processes cost most, and exchange what strict ranks do."""
MANY_RANKS = ["strict 3", "distributed"]
many_ranks = pytest.fixture(params=MANY_RANKS)(_engine)


def batches_of(case: Case, steps: int = STEPS) -> list[Inputs]:
    return [case.batch(number) for number in range(steps)]


def train_case(name: str, options: Mapping[str, Any]) -> Run:
    case = EVERY[name]
    return trained(case, batches_of(case), **options)


# --- three steps, every model, every engine ---

FIRST = every(2, list(CASES))
SECOND = [name for name in CASES if name != "skip of 1 MiB" and (ALL or name not in FIRST)]
"""Each model is in one of the two tests that follow; in both where all cases run."""


@pytest.mark.parametrize(("name", "engine"), in_turn(FIRST, ENGINES if ALL else SELDOM), indirect=["engine"])
def test_three_steps_equal_plain_pytorch(name: str, engine: Engine) -> None:
    case = CASES[name]
    runs = engine(case.ranks, train_case, name, {})
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
    wanted = reference(replaced(case, microbatches=microbatches), batches_of(case))[0]
    assert_run(runs, wanted)


def replaced(case: Case, **changes: Any) -> Case:
    return Case(**{**{name: getattr(case, name) for name in case.__dataclass_fields__}, **changes})


def test_no_input_of_the_caller_is_written(some_engine: Engine) -> None:
    case = CASES["written input"]
    for kept in some_engine(case.ranks, step_and_return_the_batch, "written input"):
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


@pytest.mark.parametrize(("name", "engine"), in_turn(list(RANDOM), ENGINES), indirect=["engine"])
def test_random_models_equal_a_loop_reseeded_per_stage_and_microbatch(name: str, engine: Engine) -> None:
    case, seeds = RANDOM[name], seeds_of(name)
    runs = engine(case.ranks, train_case, name, {})
    wanted, _ = reference(case, batches_of(case), lambda *place: seeds[place])
    assert_run(runs, wanted)
    assert len(set(seeds.values())) == len(seeds)


@pytest.mark.parametrize(
    ("schedule", "ranks", "order"), [("gpipe", 4, None), ("1f1b", 2, [0, 1, 0, 1]), ("gpipe", 3, [2, 0, 1, 2])]
)
def test_dropout_masks_depend_on_no_schedule_and_no_placement(
    schedule: str, ranks: int, order: list[int] | None
) -> None:
    case = RANDOM["dropout"]
    names = compiled(case).stages.names
    options = {
        "schedule": schedule,
        "topology": Topology([("pipe", ranks)]),
        "placement": dict(zip(names, order, strict=True)) if order else None,
    }
    seeds = seeds_of("dropout")
    wanted, _ = reference(case, batches_of(case), lambda *place: seeds[place])
    assert_run(strict(1)(ranks, train_case, "dropout", options), wanted)
    assert_run(local(ranks, train_case, "dropout", options), wanted)


def test_a_step_leaves_the_callers_random_numbers_alone(some_engine: Engine) -> None:
    for before, after in some_engine(4, random_state_around_a_step, "dropout"):
        assert torch.equal(before, after)


def random_state_around_a_step(name: str) -> tuple[Tensor, Tensor]:
    forward_backward = compiled(RANDOM[name])
    before = torch.get_rng_state()
    forward_backward(**RANDOM[name].batch())
    return before, torch.get_rng_state()


# --- tied parameters ---


def test_owners_of_a_tied_matrix_stay_equal_to_the_last_bit(many_ranks: Engine) -> None:
    parts = many_ranks(4, tied_owners, "tied")
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

REPLICAS = {"even rows": (8, 8), "uneven rows": (9, 5)}


@pytest.mark.parametrize(
    ("name", "rows", "many_ranks"),
    in_turn(["chain", "tied", "frozen middle"], list(REPLICAS.values()), MANY_RANKS),
    indirect=["many_ranks"],
)
def test_two_replicas_have_the_full_batchs_loss_and_gradients(
    name: str, rows: tuple[int, int], many_ranks: Engine
) -> None:
    case = CASES[name]
    runs = many_ranks(4, train_replicas, name, rows)
    model = case.model()
    optimizer = case.optimizer(model.parameters(), **case.optimizer_options)
    wanted = Run()
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = called(case, model, case.batch(number, sum(rows)))
        loss.backward()
        wanted.losses.append(loss.detach())
        wanted.metrics.append({})
        wanted.gradients.append(gradients_of(model.named_parameters(remove_duplicate=False)))
        optimizer.step()
    wanted.state = model.state_dict()
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
    optimizer = forward_backward.optimizer(case.optimizer, **case.optimizer_options)
    run = Run()
    for number in range(STEPS):
        whole = case.batch(number, sum(rows))
        mine = {key: value.split(list(rows))[replica] for key, value in whole.items()}
        optimizer.zero_grad()
        run.losses.append(forward_backward(**mine))
        run.metrics.append(dict(forward_backward.metrics))
        run.gradients.append(gradients_of(forward_backward.named_parameters()))
        optimizer.step()
    run.state = forward_backward.state_dict(full=True)
    return run


def test_each_replica_draws_masks_of_its_own(many_ranks: Engine) -> None:
    case, rows = RANDOM["dropout"], (9, 5)
    model = case.model()
    results = many_ranks(4, step_replicas_that_draw, rows)
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
        for name, gradient in gradients.items():
            assert_same(gradient, dict(model.named_parameters())[name].grad, name, 1e-6)
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
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    return trained(CASES[name], batches_of(CASES[name]), topology=mesh)


# --- batches of several sizes ---


@pytest.mark.parametrize(
    ("name", "some_engine"), in_turn(["encoder-decoder", "BatchNorm"], SOME), indirect=["some_engine"]
)
def test_a_smaller_and_a_larger_batch_have_the_right_loss(name: str, some_engine: Engine) -> None:
    case = CASES[name]
    sizes = (10, 8, 17, 10)
    runs = some_engine(case.ranks, train_sizes, name, sizes)
    assert_run(runs, reference(case, [case.batch(n, rows) for n, rows in enumerate(sizes)])[0])


def train_sizes(name: str, sizes: tuple[int, ...]) -> Run:
    return trained(CASES[name], [CASES[name].batch(number, rows) for number, rows in enumerate(sizes)])


def ragged(case: Case) -> list[Inputs]:
    """Three micro-batches of other numbers of rows and other lengths of sequence."""
    parts = []
    for number, (rows, length) in enumerate([(2, 5), (4, 3), (1, 4)]):
        batch = case.batch(number, rows)
        parts.append({key: value[:, :length] for key, value in batch.items()})
    return parts


def test_microbatches_already_split_may_have_any_shapes(some_engine: Engine) -> None:
    case = CASES["positions"]
    model = case.model()
    loss, _ = accumulate(lambda _, part: model(**part), ragged(case))
    wanted = dict(model.named_parameters())
    for got, gradients in some_engine(case.ranks, step_ragged, "positions"):
        assert_same(got, loss, "loss")
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[name].grad, name)


def step_ragged(name: str) -> tuple[Tensor, dict[str, Tensor | None]]:
    forward_backward = compiled(CASES[name])
    calls = [((part["ids"],), {"labels": part["labels"]}) for part in ragged(CASES[name])]
    loss = forward_backward.step_microbatches(calls)
    return loss, gradients_of(forward_backward.named_parameters())


def columns() -> Inputs:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(5, 10, WIDTH, generator=generator),
        "y": torch.randn(10, WIDTH, generator=generator),
        "scale": torch.randn(WIDTH, generator=generator),
    }


def test_each_input_is_cut_along_its_own_dimension(some_engine: Engine) -> None:
    torch.manual_seed(0)
    model, batch = ColumnBatch(), columns()
    xs, ys = batch["x"].tensor_split(4, 1), batch["y"].tensor_split(4)
    parts = [{"x": x, "y": y, "scale": batch["scale"]} for x, y in zip(xs, ys, strict=True)]
    loss, _ = accumulate(lambda _, part: model(**part), parts, [float(len(y)) for y in ys])
    wanted = dict(model.named_parameters())
    for got, gradients in some_engine(3, step_columns):
        assert_same(got, loss, "loss")
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[name].grad, name)


def step_columns() -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(0)
    topology = Topology([("pipe", 3)])
    forward_backward = fxpipe.compile(ColumnBatch(), topology, microbatches=4, batch_dim={"x": 1, "scale": None})
    loss = forward_backward(**columns())
    return loss, gradients_of(forward_backward.named_parameters())


def kinds_of_call(case: Case) -> list[Inputs]:
    mask = torch.arange(10 * WIDTH).view(10, WIDTH) % 3 > 0
    return [case.batch(0), case.batch(1) | {"mask": mask}, case.batch(2) | {"mode": "relu"}, case.batch(3)]


def test_a_call_with_other_inputs_is_captured_anew(some_engine: Engine) -> None:
    case = PLAIN["optional inputs"]
    runs = some_engine(case.ranks, train_kinds, "optional inputs")
    assert_run(runs, reference(case, kinds_of_call(case))[0])


def train_kinds(name: str) -> Run:
    return trained(PLAIN[name], kinds_of_call(PLAIN[name]))


def test_inputs_that_a_rank_does_not_need_may_be_none(many_ranks: Engine) -> None:
    case = PLAIN["bare"]
    wanted, _ = reference(case, batches_of(case))
    results = many_ranks(case.ranks, train_with_none, "bare")
    assert [required for _, required in results] == [("x",), (), ("y",)]
    assert_run([run for run, _ in results], wanted)


def train_with_none(name: str) -> tuple[Run, tuple[str, ...]]:
    """Every input that this rank does not require is None. A rank without parameters has an optimizer as well."""
    case = PLAIN[name]
    required = compiled(case).required_inputs
    batches = [{key: value if key in required else None for key, value in b.items()} for b in batches_of(case)]
    return trained(case, batches), required


# --- accumulation and weights ---


def test_gradients_accumulate_over_calls(engine: Engine) -> None:
    case = CASES["used often"]
    model = case.model()
    for number in range(2):
        accumulate(lambda _, part: model(**part), cut(case.batch(number), case.microbatches))
    wanted = dict(model.named_parameters())
    for gradients in engine(case.ranks, accumulated, "used often"):
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[name].grad, name)


def accumulated(name: str) -> dict[str, Tensor | None]:
    forward_backward = compiled(CASES[name])
    for number in range(2):
        forward_backward(**CASES[name].batch(number))
    return gradients_of(forward_backward.named_parameters())


class MaskedMean(nn.Module):
    """A mean over the items that are not masked: NaN where all of them are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.f = linear(), linear()

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        out = self.f(stage_boundary(torch.tanh(self.a(x))))
        return ((out - y).square().mean(1) * mask).sum() / mask.sum()


def masked() -> Inputs:
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(10, WIDTH, generator=generator), torch.randn(10, WIDTH, generator=generator)
    mask = torch.tensor([1.0, 1, 0, 0, 0, 0, 1, 0, 1, 1])  # rows 3, 4, 5 are the second micro-batch
    return {"x": x, "y": y, "mask": mask}


def count_unmasked(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return mask.sum()


@pytest.mark.parametrize(("schedule", "engine"), in_turn(["1f1b", "zb_h1"], ENGINES), indirect=["engine"])
def test_a_microbatch_of_weight_zero_adds_nothing_even_if_its_loss_is_nan(engine: Engine, schedule: str) -> None:
    torch.manual_seed(0)
    model = MaskedMean()
    parts = cut(masked(), 4)
    assert model(**parts[1]).isnan()
    loss, _ = accumulate(lambda _, part: model(**part), parts, [float(part["mask"].sum()) for part in parts])
    wanted = dict(model.named_parameters())
    for losses, gradients in engine(2, step_masked, schedule):
        for got in losses:
            assert_same(got, loss, "loss")
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[name].grad, name)


def step_masked(schedule: str) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(
        MaskedMean(), Topology([("pipe", 2)]), microbatches=4, loss_weight=count_unmasked, schedule=schedule
    )
    losses = []
    for _ in range(2):
        forward_backward.zero_grad()
        losses.append(forward_backward(**masked()))
    return losses, gradients_of(forward_backward.named_parameters())


# --- evaluation ---


@pytest.mark.parametrize(
    ("outputs", "rows", "some_engine"), in_turn(["last", "all"], [10, 3], SOME), indirect=["some_engine"]
)
def test_evaluate_returns_the_output_of_the_whole_batch(outputs: str, rows: int, some_engine: Engine) -> None:
    case = CASES["loss function"]
    results = some_engine(case.ranks, evaluated, outputs, rows)
    batch = case.batch(0, rows)
    with torch.no_grad():
        output = torch.cat([case.model()(part, invert=True) for part in batch["x"].tensor_split(min(4, rows))])
    for got in results if outputs == "all" else results[-1:]:
        assert_same(got, output, "output")
        assert not got.requires_grad
    if outputs == "last":
        assert results[:-1] == [None] * (len(results) - 1)


def evaluated(outputs: str, rows: int) -> Tensor | None:
    case = CASES["loss function"]
    return compiled(case).evaluate(case.batch(0, rows)["x"], invert=True, outputs=outputs)


def test_evaluate_with_a_target_returns_the_loss(some_engine: Engine) -> None:
    case = CASES["loss function"]
    model = case.model()
    with torch.no_grad():
        parts = cut(case.batch(), case.microbatches)
        wanted = sum(called(case, model, part).double() * (rows_of(part) / case.rows) for part in parts)
    for got in some_engine(case.ranks, evaluated_loss):
        assert got.item() == pytest.approx(wanted.item(), rel=1e-6)


def evaluated_loss() -> Tensor:
    case = CASES["loss function"]
    return compiled(case).evaluate(**case.batch(), outputs="all")


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


def test_evaluate_runs_in_eval_mode_and_goes_back(some_engine: Engine) -> None:
    torch.manual_seed(0)
    model = Modes().eval()
    with torch.no_grad():
        wanted = torch.cat([model(part)["output"] for part in modes_batch().tensor_split(4)])
    results = some_engine(2, evaluated_between_steps)
    for outputs, state, losses in results:
        assert_same(outputs[0], wanted, "before training")
        assert not torch.equal(outputs[1], wanted)
        for name, tensor in model.state_dict().items():
            assert_same(state[name], tensor, f"{name} after evaluation")
        for evaluated, undisturbed in zip(*losses, strict=True):
            assert_same(evaluated, undisturbed, "losses of training with and without evaluation")


def evaluated_between_steps() -> Any:
    """Outputs in evaluation before and after steps; the state after the first; losses with and without evaluating."""
    outputs, losses, state = [], [], {}
    for evaluates in (True, False):
        torch.manual_seed(0)
        forward_backward = fxpipe.compile(Modes(), Topology([("pipe", 2)]), microbatches=4)
        optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
        losses.append([])
        for _ in range(2):
            if evaluates:
                outputs.append(forward_backward.evaluate(modes_batch(), outputs="all")["output"])
                state = state or {k: v.clone() for k, v in forward_backward.state_dict(full=True).items()}
            optimizer.zero_grad()
            losses[-1].append(forward_backward(modes_batch()))
            optimizer.step()
        assert forward_backward.module.training
    return outputs, state, losses


def test_training_in_eval_mode_keeps_statistics_and_drops_nothing(some_engine: Engine) -> None:
    torch.manual_seed(0)
    model = Modes().eval()
    accumulate(lambda _, part: model(part), list(modes_batch().tensor_split(4)), [3.0] * 4)
    for gradients, state in some_engine(2, step_in_eval_mode):
        for name, gradient in gradients.items():
            assert_same(gradient, dict(model.named_parameters())[name].grad, name)
        for name, tensor in model.state_dict().items():
            assert_same(state[name], tensor, name)


def step_in_eval_mode() -> Any:
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Modes(), Topology([("pipe", 2)]), microbatches=4)
    forward_backward.module.eval()
    forward_backward(modes_batch())
    return gradients_of(forward_backward.named_parameters()), forward_backward.state_dict(full=True)


# --- state ---


@pytest.mark.parametrize(
    ("name", "some_engine"), in_turn(["BatchNorm", "tied", "callables"], SOME), indirect=["some_engine"]
)
def test_a_plain_model_loads_what_a_compiled_one_saves(name: str, some_engine: Engine, tmp_path: Path) -> None:
    case = CASES[name]
    wanted = reference(case, batches_of(case))[1].state_dict()
    results = some_engine(case.ranks, trained_state, name)
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
    assert len(parts) == 1 or all(part.keys() < wanted.keys() for part in parts)


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


@pytest.mark.parametrize(("name", "some_engine"), in_turn(["BatchNorm", "tied"], SOME), indirect=["some_engine"])
def test_a_compiled_model_loads_what_a_plain_one_saves(name: str, some_engine: Engine, tmp_path: Path) -> None:
    case = CASES[name]
    plain = reference(case, batches_of(case, 2))[1]
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    plain.zero_grad()
    loss, _ = accumulate(lambda _, part: plain(**part), cut(case.batch(2), case.microbatches))
    gradients = dict(plain.named_parameters())
    for got, mine, again in some_engine(case.ranks, load_and_step, name, str(tmp_path / "model.pt")):
        assert_same(got, loss, "loss", case.tolerance)
        assert_same(again, loss, "loss after loading this rank's own part", case.tolerance)
        for key, gradient in mine.items():
            assert_same(gradient, gradients[key].grad, key, case.tolerance)


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


def test_a_state_dict_that_lacks_a_tensor_or_has_another_shape_changes_nothing() -> None:
    case = CASES["chain"]
    forward_backward = compiled(case)
    plain = case.model().state_dict()
    broken: list[Callable[[dict[str, Tensor]], Any]] = [
        lambda state: state.pop("layers.3.bias"),
        lambda state: state.update({"layers.3.bias": torch.zeros(2)}),
    ]
    for change in broken:
        state = {key: torch.zeros_like(tensor) for key, tensor in plain.items()}
        change(state)
        with pytest.raises(fxpipe.CheckpointError, match=r"layers\.3\.bias"):
            forward_backward.load_state_dict(state)
    for key, tensor in forward_backward.state_dict(full=True).items():
        assert_same(tensor, plain[key], key)


# --- optimizers ---


def test_parameter_groups_and_a_plain_optimizer_train_as_in_plain_pytorch(some_engine: Engine) -> None:
    case = CASES["two towers, image first"]
    model = case.model()
    optimizer = torch.optim.SGD(groups_of(model), lr=0.1)
    for batch in batches_of(case):
        optimizer.zero_grad()
        accumulate(lambda _, part: model(**part), cut(batch, case.microbatches))
        optimizer.step()
    for state in some_engine(case.ranks, train_groups):
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


def test_a_layer_may_be_unfrozen_between_steps() -> None:
    case = CASES["frozen middle"]
    model, forward_backward = case.model(), compiled(case)
    for step in range(2):
        loss = forward_backward(**case.batch(step))
        wanted, _ = accumulate(lambda _, part: model(**part), cut(case.batch(step), case.microbatches))
        assert_same(loss, wanted, f"loss of step {step}")
        for name, parameter in forward_backward.named_parameters():
            assert_same(parameter.grad, dict(model.named_parameters())[name].grad, f"step {step}: {name}")
        for parameter in [*model.parameters(), *forward_backward.parameters()]:
            parameter.requires_grad_(True)
            parameter.grad = None


# --- processes that go on after a failure ---


class NoLoss(nn.Module):
    """Its loss is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.f = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.f(stage_boundary(self.a(x)))


def test_the_reason_reaches_ranks_that_have_compiled_more_models_than_others(pool: Pool) -> None:
    pool.run(train_case, "U-Net", {}, ranks=3)
    for outcome in pool.outcomes(step_without_a_loss, ranks=4):
        assert "the loss must be one number" in str(outcome.error), f"rank {outcome.rank}: {outcome.error}"


def step_without_a_loss() -> None:
    forward_backward = fxpipe.compile(NoLoss(), Topology([("pipe", 2), ("data", 2)]), microbatches=2)
    forward_backward(torch.ones(4, WIDTH))
