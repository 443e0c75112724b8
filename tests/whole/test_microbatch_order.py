"""A step that orders its micro-batches by ``microbatch_cost=`` is plain PyTorch's in that order, and bears the numbers
of the batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from fxpipe.schedules import pyramid
from tests.graphs import FAMILIES
from tests.harness import (
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
    stepped,
)
from tests.models import CASES, RANDOM, Case, Inputs
from tests.pool import Pool
from tests.random_models import WIDTH, RandomModel
from tests.thinned import ALL, seeds
from tests.whole.test_random_models import drawn

LONG = pytest.mark.long
SQUARE = Topology([("pipe", 2), ("data", 2)])


def cost_of(*inputs: Any) -> float:
    """A cost that the numbers of the inputs decide, another for each micro-batch."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return float(leaves[0].double().abs().sum())


def in_order(batches: Sequence[Inputs]) -> list[Inputs]:
    """Micro-batches in the order in which a step runs them."""
    return [batches[number] for number in pyramid([cost_of(*batch.values()) for batch in batches])]


def ordered(case: Case) -> Case:
    """The case whose micro-batches plain PyTorch runs in that order."""
    whole = case.cut or cut
    return replace(case, cut=lambda batch, count: in_order(whole(batch, count)))


def run(case: Case, batches: Sequence[Any], options: dict[str, Any]) -> Run:
    return stepped(compiled(case, microbatch_cost=cost_of, **options), case, batches)


# --- losses and gradients ---


@pytest.mark.parametrize(
    ("name", "family", "engine"),
    [
        pytest.param(
            name,
            FAMILIES[number % len(FAMILIES)],
            ["local", "strict 0", "distributed"][number % 3],
            marks=[LONG] * (number % 5 > 0),
        )
        for number, name in enumerate(CASES)
        if ALL or number % 5 < 3
    ],
)
def test_a_step_is_plain_pytorch_in_the_order_of_costs(name: str, family: str, engine: str, engines: Engines) -> None:
    case = replace(CASES[name], microbatches=4)
    batches = case.batches(2)
    runs = engines(engine)(case.ranks, partial(run, case, batches, {"schedule": family}))
    assert_run(runs, reference(ordered(case), batches)[0], case.tolerance)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_have_orders_of_their_own(zero: int, pool: Pool) -> None:
    case = replace(CASES["chain"], ranks=2)
    batches = [(case.batch(number, 9), case.batch(10 + number, 6)) for number in range(2)]
    first, second = (in_order(cut(batch, case.microbatches)) for batch in batches[0])
    assert [len(each["x"]) for each in first] != [len(each["x"]) for each in second]
    options = {"topology": SQUARE, "placement": None, "zero": zero}
    runs = pool.run(partial(run, case, batches, options))
    assert_run(runs, reference(ordered(case), batches)[0], 1e-6)


@pytest.mark.parametrize("name", ["Sum", "weighted mean"])
def test_a_micro_batch_without_weight_runs_in_its_turn(name: str, engines: Engines) -> None:
    """A ``Sum`` whose labels are all ignored, and a weight of 0."""
    case = CASES[name]
    batch = case.batch()
    batch["labels"][3:6] = -100  # of micro-batch 1
    runs = engines("strict 1")(case.ranks, partial(run, case, [batch], {}))
    assert_run(runs, reference(ordered(case), [batch])[0], 1e-12)


@pytest.mark.parametrize("part", [pytest.param(part, marks=[LONG] * (part > 5)) for part in seeds(80)])
def test_random_batches_of_random_models_on_random_placements(part: int) -> None:
    """20 batches of each, with micro-batches of 1 to 4 rows."""
    draw = drawn(part)
    chance = random.Random(part)
    family = ["1f1b", "gpipe", "zb_h1", "greedy", "interleaved_1f1b"][part % 5]
    model = RandomModel(draw.seed).double()
    options = {"placement": dict(draw.placement), "schedule": family, "microbatches": 6}
    step = fxpipe.compile(model, draw.topology, microbatch_cost=cost_of, **options)
    step.schedule.verify()
    plain = RandomModel(draw.seed).double()
    for number in range(20):
        generator = torch.Generator().manual_seed(number)
        rows = [chance.randint(1, 4) for _ in range(6)]
        batches = [
            {name: torch.randn(count, WIDTH, generator=generator).double() for name in ("x", "z", "y")}
            for count in rows
        ]
        step.zero_grad()
        plain.zero_grad()
        loss = step.step_microbatches([((), batch) for batch in batches])
        ran = in_order(batches)
        wanted, _ = accumulate(lambda _, batch: plain(**batch), ran)
        tolerance = 0.0 if draw.exact else 1e-12
        assert_same(loss, wanted, f"loss of batch {number} of {draw}", tolerance)
        assert_gradients(gradients_of(step.named_parameters()), plain, tolerance, f"batch {number} of {draw}: ")
        for micro, found in step.microbatch_losses.items():
            with torch.no_grad():
                assert_same(found, plain(**batches[micro]), f"loss of micro-batch {micro}", 1e-12)


def test_calls_that_accumulate_are_ordered_each() -> None:
    case = CASES["chain"]
    step, batches = compiled(case, microbatch_cost=cost_of), case.batches(2)
    step.set_requires_gradient_sync(False)
    step(**batches[0])
    step.set_requires_gradient_sync(True)
    step(**batches[1])
    model = case.model()
    for batch in batches:
        accumulate(lambda _, part: model(**part), in_order(cut(batch, case.microbatches)))
    assert_gradients(gradients_of(step.named_parameters()), model)


# --- micro-batches that differ in more than their numbers ---


class WithImages(nn.Module):
    """Two stages; the first is another program for a micro-batch without images."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.head = nn.Embedding(9, 4), nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor, images: Tensor | None = None) -> Tensor:
        h = self.text(tokens).mean(1)
        if images is not None:
            h = h + torch.tanh(self.image(images)).sum(0)
        return F.softplus(self.head(fxpipe.stage_boundary(h))).mean()


IMAGES = [3, 0, 1, 0, 2, 0]
"""Of micro-batches 0, 1, …: ascending 1, 3, 5, 2, 4, 0, and so in a pyramid 1, 5, 4, 0, 2, 3."""


def batch_with_images(number: int, images: Sequence[int] = IMAGES) -> list[Inputs]:
    generator = torch.Generator().manual_seed(number)
    return [
        {
            "tokens": torch.randint(9, (2, 3 + place % 2), generator=generator),
            "images": torch.randn(count, 3, generator=generator) if count else None,
        }
        for place, count in enumerate(images)
    ]


def count_images(tokens: Tensor, images: Tensor | None) -> int:
    return 0 if images is None else len(images)


def trained_on_images(batches: Sequence[Sequence[Inputs]]) -> list[Any]:
    torch.manual_seed(0)
    options = {"batch_dim": {"images": None}, "example_kwargs": batch_with_images(0)[0]}
    step = fxpipe.compile(WithImages(), Topology([("pipe", 2)]), microbatch_cost=count_images, **options)
    found = []
    for batch in batches:
        step.zero_grad()
        loss = step.step_microbatches([((), inputs) for inputs in batch])
        found.append((loss, gradients_of(step.named_parameters())))
    return found


@pytest.mark.parametrize("engine", ["local", "strict 1", "distributed"])
def test_micro_batches_of_different_programs_change_places(engine: str, engines: Engines) -> None:
    orders = [IMAGES, IMAGES[::-1], IMAGES, [0, 0, 0, 1, 1, 5]]
    batches = [batch_with_images(number, images) for number, images in enumerate(orders)]
    runs = engines(engine)(2, trained_on_images, batches)
    torch.manual_seed(0)
    model = WithImages()
    for number, (images, batch) in enumerate(zip(orders, batches, strict=True)):
        model.zero_grad()
        ran = [batch[place] for place in pyramid(images)]
        loss, _ = accumulate(lambda _, inputs: model(**inputs), ran, [2.0] * len(ran))
        for each in runs:
            assert_same(each[number][0], loss, f"loss of batch {number}")
            assert_gradients(each[number][1], model, what=f"batch {number}: ")


class Optional(nn.Module):
    """Two optional inputs between the others, one with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, bias: Tensor | None = None, scale: float = 2.0, y: Tensor | None = None) -> Tensor:
        h = self.a(x) * scale if bias is None else self.a(x) * scale + bias
        h = fxpipe.stage_boundary(h)
        return F.mse_loss(self.b(h), y)


@pytest.mark.parametrize("option", ["microbatch_cost", "loss_weight"])
def test_inputs_that_some_micro_batches_lack_are_forwards_defaults(option: str) -> None:
    seen: list[tuple[bool, float]] = []

    def number(x: Tensor, bias: Tensor | None, scale: float, y: Tensor) -> int:
        assert x.shape[1:] == (4,)
        assert y.shape[1:] == (1,)
        seen.append((bias is None, scale))
        return len(x)

    example = {"x": torch.ones(2, 4), "bias": torch.ones(2, 4), "scale": 1.0, "y": torch.ones(2, 1)}
    step = fxpipe.compile(Optional(), Topology([("pipe", 2)]), example_kwargs=example, **{option: number})
    most = {"x": torch.ones(2, 4), "y": torch.ones(2, 1)}
    batches = [most, most | {"bias": torch.ones(2, 4)}, most | {"scale": 1.0}]
    assert torch.isfinite(step.step_microbatches([((), batch) for batch in batches]))
    assert seen[-3:] == [(True, 2.0), (False, 2.0), (True, 1.0)]


# --- the numbers of the batch ---


@pytest.mark.parametrize(("name", "engine"), [("dropout", "local"), ("noise in two stages", "strict 1")])
def test_random_numbers_belong_to_the_micro_batch(name: str, engine: str, engines: Engines) -> None:
    """A seed depends on the number of the micro-batch in the batch."""
    case = RANDOM[name]
    alone, batches = compiled(case), case.batches(2)
    orders = [pyramid([cost_of(*part.values()) for part in cut(batch, case.microbatches)]) for batch in batches]
    runs = engines(engine)(case.ranks, partial(run, case, batches, {}))
    seed = lambda stage, place, step: alone.seed(stage, orders[step][place], step)  # noqa: E731
    assert_run(runs, reference(ordered(case), batches, seed)[0])


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    """With dropout, whose seeds go on."""
    case = RANDOM["dropout"]
    batches = case.batches(4)

    def started() -> tuple[Any, Any]:
        step = compiled(case, microbatch_cost=cost_of)
        return step, step.optimizer(torch.optim.AdamW, lr=0.01)

    def losses(step: Any, optimizer: Any, numbers: Sequence[int]) -> list[Tensor]:
        found = []
        for number in numbers:
            optimizer.zero_grad()
            found.append(step(**batches[number]))
            optimizer.step()
        return found

    whole, stopped, resumed = started(), started(), started()
    wanted = losses(*whole, range(4))
    losses(*stopped, range(2))
    fxpipe.save(tmp_path, *stopped, step=2)
    fxpipe.load(tmp_path, *resumed)
    for number, loss in zip((2, 3), losses(*resumed, (2, 3)), strict=True):
        assert_same(loss, wanted[number], f"loss of step {number}")
    for name, tensor in resumed[0].state_dict(full=True).items():
        assert_same(tensor, whole[0].state_dict(full=True)[name], name)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.a(x))
        torch._assert_async(h.new_ones(()) * (x != 2.0).all(), "x is 2")
        return (self.b(h) * torch.where(x == 3.0, math.inf, 1.0)).square().mean()


def test_errors_and_numbers_that_are_not_finite_bear_the_number_in_the_batch() -> None:
    x, strict = torch.tensor([[4.0], [0.0], [5.0], [1.0]]), fxpipe.Checks(nonfinite="raise")
    for number in (2, 0):
        given = x.clone()
        given[number] = 3.0
        step = fxpipe.compile(Fails(), Topology([("pipe", 2)]), microbatches=4, microbatch_cost=float, checks=strict)
        with pytest.raises(fxpipe.RunError, match=f"micro-batch {number} is the first"):
            step(given)
    x[2] = 2.0
    with pytest.raises(RuntimeError, match="x is 2") as failed:
        step(x)
    assert "micro-batch 2, step 1" in "".join(failed.value.__notes__)


def recorded(folder: Path, cost: Callable[..., Any] | None) -> None:
    case = CASES["two towers, image first"]
    step = compiled(case, microbatch_cost=cost)
    with step.record_values(folder):
        step(**case.batch())


def test_recorded_values_bear_the_number_in_the_batch(tmp_path: Path, pool: Pool) -> None:
    """Of a run in another order, only sums over micro-batches have other bits."""
    recorded(tmp_path / "one", None)
    pool.run(recorded, tmp_path / "two", cost_of)
    found = fxpipe.bisect(tmp_path / "one", tmp_path / "two", rtol=1e-5)
    assert found.first is None, str(found)


def test_the_timeline_says_which_micro_batch_ran_when() -> None:
    case = CASES["chain"]
    step = compiled(case, microbatch_cost=cost_of)
    step.record_timeline()
    step(**case.batch())
    order = pyramid([cost_of(*part.values()) for part in cut(case.batch(), case.microbatches)])
    assert order != tuple(range(4))
    assert step.timeline().order == order
    assert f"of the table are these of the batch: {', '.join(map(str, order))}" in str(step.timeline())


def test_evaluation_keeps_the_order_of_the_batch() -> None:
    seen: list[float] = []

    def cost(x: Tensor) -> float:
        seen.append(float(x.sum()))
        return seen[-1]

    step = fxpipe.compile(Fails(), Topology([("pipe", 2)]), microbatches=4, microbatch_cost=cost)
    step.evaluate(torch.tensor([[4.0], [0.0], [5.0], [1.0]]))
    assert seen == []
    step(torch.tensor([[4.0], [0.0], [5.0], [1.0]]))
    assert seen == [4.0, 0.0, 5.0, 1.0]


# --- what a cost may be ---


def stepped_by(cost: Callable[..., Any]) -> str:
    """The error of a step with these costs; a step with good costs follows."""
    step = fxpipe.compile(
        Fails(), Topology([("pipe", 2)]), microbatches=4, microbatch_cost=lambda x: cost(x) if bad else 1
    )
    bad = True
    with pytest.raises(fxpipe.RunError) as failed:
        step(torch.arange(4.0).view(4, 1) + 4)
    bad = False
    assert torch.isfinite(step(torch.arange(4.0).view(4, 1) + 4))
    return str(failed.value)


def divides(x: Tensor) -> float:
    return 1 / 0


BAD: list[tuple[Callable[..., Any], str]] = [
    (lambda x: -1.0, "the cost of micro-batch 0 is -1.0"),
    (lambda x: math.nan, "the cost of micro-batch 0 is nan"),
    (lambda x: "much", "the cost of micro-batch 0 is 'much'"),
    (lambda x: x, "the cost of micro-batch 0 is"),
    (lambda x: {"stage9": 1}, "the cost of micro-batch 0 names 'stage9', which is no stage"),
    (lambda x: {"b": None}, "the cost of micro-batch 0 at 'b' is None"),
    (divides, "microbatch_cost failed: ZeroDivisionError"),
    (lambda x: x.to("meta").sum(), "returned a tensor on a device"),
]


@pytest.mark.parametrize("engine", ["local", "distributed"])
def test_a_wrong_cost_is_named_and_nothing_is_lost(engine: str, engines: Engines) -> None:
    for number, (_, text) in enumerate(BAD):
        for said in engines(engine)(2, bad_step, number):
            assert text in said, said


def bad_step(number: int) -> str:
    return stepped_by(BAD[number][0])


def test_costs_by_stage_count_in_their_means() -> None:
    """Images of 100 and tokens of 1 in the mean weigh as much as each other."""
    costs = [{"a": 100, "b": 1}, {"a": 0, "b": 3}, {"a": 200, "b": 1}, {"a": 100, "b": 0}]
    told = iter(costs)
    step = fxpipe.compile(Fails(), Topology([("pipe", 2)]), microbatches=4, microbatch_cost=lambda x: next(told))
    step.record_timeline()
    step(torch.arange(4.0).view(4, 1) + 4)
    # over the means 100 and 1.25: 1.8, 2.4, 2.8, 1.0
    assert step.timeline().order == (3, 1, 2, 0)


def test_it_is_told_to_ranks_without_inputs(pool: Pool) -> None:
    pool.run(trained_where_needed, ranks=2)


def trained_where_needed() -> None:
    topology = Topology([("pipe", 2)])
    model = CASES["loss function"].model()
    options = {"loss_fn": CASES["loss function"].loss_fn, "microbatch_cost": cost_of_features, "placement": None}
    step = fxpipe.compile(model, topology, microbatches=4, **options)
    batch = CASES["loss function"].batch()
    assert step.required_inputs == (("x", "target") if torch.distributed.get_rank() == 0 else ("target",))
    step.record_timeline()
    step(**batch | ({} if "x" in step.required_inputs else {"x": None}))
    assert step.timeline().order == pyramid([float(part.sum().abs()) for part in batch["target"].tensor_split(4)])


def cost_of_features(x: Tensor, invert: bool, target: Tensor) -> float:
    return float(target.sum().abs())


# --- what is refused ---


def test_a_table_and_stages_that_gather_are_refused() -> None:
    case = CASES["chain"]
    table = compiled(case).schedule
    for option in ({"microbatch_cost": cost_of}, {"in_flight": "2x"}):
        with pytest.raises(fxpipe.RunError, match=f"{next(iter(option))}= is for the tables of families"):
            compiled(case, schedule=table, **option)

    class Gathers(Fails):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(fxpipe.stage_boundary(self.a(x), gather="batch")).square().mean()

    with pytest.raises(fxpipe.PartitionError, match="microbatch_cost= orders micro-batches, and stage"):
        fxpipe.compile(Gathers(), Topology([("pipe", 2)]), microbatches=4, microbatch_cost=cost_of)
