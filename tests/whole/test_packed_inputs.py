"""Packed inputs and lists: a step is plain PyTorch's over micro-batches that are cut by hand, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import FxpipeError, Packed, RunError, Topology
from fxpipe.batch.rows import split_rows
from tests import models
from tests import packed_models as packed
from tests.harness import (
    Batches,
    Engines,
    Run,
    Steps,
    accumulate,
    assert_gradients,
    assert_run,
    assert_same,
    gradients_of,
    reference,
    steps_of,
    strict,
    trained,
)
from tests.packed_models import SIX
from tests.pool import Pool
from tests.thinned import every


class Case(NamedTuple):
    """``batch(rows, seed)``, ``cut(batch, rows, sizes)``: ``rows`` is what each row has. ``batches``: three of them."""

    model: Callable[[], nn.Module]
    stages: int
    rules: Mapping[str, Any]
    batch: Callable[..., dict[str, Any]]
    cut: Callable[..., list[dict[str, Any]]]
    batches: Sequence[Any]


ROWS_OF_IMAGES = [SIX, [[(1, 1, 2)], [(1, 2, 2), (1, 2, 1)], [], []], [[], [], [], [(1, 2, 2)] * 2, [(1, 1, 1)]]]
BOXES = [[2, 1, 3, 2, 4], [1, 2, 1, 2], [3] * 6]
CASES = {
    "images": Case(packed.Seeing, 3, packed.IMAGES, packed.seen_batch, packed.cut_images, ROWS_OF_IMAGES),
    "sum": Case(packed.Summed, 3, packed.IMAGES, packed.seen_batch, packed.cut_images, ROWS_OF_IMAGES),
    "documents": Case(
        packed.Documents,
        3,
        packed.DOCUMENTS,
        packed.documents,
        packed.cut_documents,
        [packed.LENGTHS, [4, 1, 1, 6], [2, 9, 3, 3, 5, 2, 1]],
    ),
    "lists": Case(packed.Detecting, 2, packed.LISTS, packed.pictures, packed.cut_pictures, BOXES),
}


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def compiled(case: Case, microbatches: int, topology: Topology | None = None, **options: Any) -> fxpipe.ForwardBackward:
    """Captured by what takes sizes that vary, or lists."""
    example = case.batch(case.batches[0])
    checks = fxpipe.Checks(batches=False)
    options = {"batch_dim": case.rules, "checks": checks, "example_kwargs": example} | options
    topology = topology or Topology([("pipe", case.stages)])
    return fxpipe.compile(built(case), topology, microbatches=microbatches, **options)


def wanted(case: Case, microbatches: int, seed: int = 0) -> Steps:
    """Loss and gradients of a step for each of the batches, in plain PyTorch."""
    found = []
    for place, rows in enumerate(case.batches):
        model, sizes = built(case), split_rows(len(rows), microbatches)
        parts = case.cut(case.batch(rows, seed + place), rows, sizes)
        loss, _ = accumulate(lambda _, part, model=model: model(**part), parts, [float(size) for size in sizes])
        found.append((loss, gradients_of(model.named_parameters())))
    return found


def ran(name: str, microbatches: int, options: dict[str, Any]) -> Steps:
    """The same on this engine, where each rank is given what it needs, and nothing else."""
    case = CASES[name]
    forward_backward = compiled(case, microbatches, **options)
    found = []
    for place, rows in enumerate(case.batches):
        needed = forward_backward.required_inputs
        batch = {name: value if name in needed else None for name, value in case.batch(rows, place).items()}
        found += steps_of(forward_backward, [batch])
    return found


def check(runs: Sequence[Steps], name: str, microbatches: int) -> None:
    tolerance = 1e-6 if name == "sum" else 0.0
    for place, (loss, gradients) in enumerate(wanted(CASES[name], microbatches)):
        assert any(gradient is not None and gradient.any() for gradient in gradients.values())
        for run in runs:
            assert_same(run[place][0], loss, f"loss of batch {place}", tolerance)
            for parameter, gradient in run[place][1].items():
                assert_same(gradient, gradients[parameter], f"{parameter} of batch {place}", tolerance)


@pytest.mark.parametrize(
    ("name", "microbatches"),
    every(2, [*product(["images", "documents"], [1, 2, 3, 4]), ("sum", 3)]),
)
def test_a_step_is_that_of_micro_batches_cut_by_hand(name: str, microbatches: int) -> None:
    check([ran(name, microbatches, {})], name, microbatches)


@pytest.mark.parametrize(
    ("name", "engine"),
    [("documents", "strict 1"), ("images", "distributed"), ("lists", "distributed")],
)
def test_so_it_is_on_ranks_of_which_each_is_given_what_it_needs(name: str, engine: str, engines: Engines) -> None:
    check(engines(engine)(CASES[name].stages, ran, name, 4, {}), name, 4)


# --- the whole batch in one go


def test_evaluate_gives_rows_tokens_and_lists_as_the_whole_batch_has_them() -> None:
    batches: list[tuple[str, Any]] = [("images", SIX), ("documents", packed.LENGTHS), ("lists", [2, 1, 3, 2, 4])]
    batches += [("documents", [3] * 4), ("lists", [1] * 4)]  # as many everywhere are no rows of one
    for name, rows in batches:
        case = CASES[name]
        batch = {key: value for key, value in case.batch(rows).items() if key not in ("labels", "targets")}
        with torch.no_grad():
            plain = built(case).eval()(**batch)
        output = compiled(case, 4).evaluate(**batch)
        if name == "lists":
            assert [list(one) for one in output] == [["boxes", "score"]] * len(rows)
            for mine, its in zip(output, plain, strict=True):
                assert_same(mine["boxes"], its["boxes"], "boxes", 1e-6)
                assert_same(mine["score"], its["score"], "score", 1e-6)
        else:
            assert_same(output, plain, name, 1e-6)


# --- other ways in


def stepped(name: str) -> Steps:
    """A step of micro-batches that are split already, of other shapes each."""
    case = CASES[name]
    forward_backward = compiled(case, 4)
    parts = [case.batch(rows, place) for place, rows in enumerate(case.batches)]
    loss = forward_backward.step_microbatches([((), part) for part in parts])
    return [(loss, gradients_of(forward_backward.named_parameters()))]


@pytest.mark.parametrize("name", ["documents", "lists"])
def test_micro_batches_that_are_split_already_need_no_cutting(name: str) -> None:
    case = CASES[name]
    model, parts = built(case), [case.batch(rows, place) for place, rows in enumerate(case.batches)]
    loss, _ = accumulate(lambda _, part: model(**part), parts, [float(len(rows)) for rows in case.batches])
    ((got, gradients),) = stepped(name)
    assert_same(got, loss, "loss")
    assert_gradients(gradients, model)


def test_a_dict_input_is_cut_by_rules_for_its_values() -> None:
    batch, case = packed.seen_batch(SIX), CASES["images"]
    rules = {
        "batch": {
            "image_grid_thw": Packed(lambda batch: (batch["input_ids"] == packed.START).sum(1)),
            "pixel_values": Packed(lambda batch: batch["image_grid_thw"].prod(1), of="batch.image_grid_thw"),
        }
    }
    forward_backward = compiled(case._replace(model=packed.Dicts), 4, batch_dim=rules, example_kwargs={"batch": batch})
    loss = forward_backward(batch)
    assert_same(loss, wanted(case, 4)[0][0], "loss")


def test_random_images_and_lengths_take_few_captures(captured: list[Any]) -> None:
    """With sizes of 0, 1 and more of rows, images and patches apart."""
    case, draw = CASES["images"], random.Random(0)
    forward_backward = compiled(case, 4, tracer="export")
    made = []
    for step in range(12):
        rows = [[(1, draw.randint(1, 3), 2)] * draw.choice([0, 0, 1, 2]) for _ in range(draw.randint(4, 8))]
        if any(rows):
            forward_backward(**packed.seen_batch(rows, step))
            made.append(len(captured))
    assert made[-1] < 14
    assert made[-1] < made[6] + 3


def test_packed_inputs_of_a_stage_that_gathers_are_put_in_a_row() -> None:
    plain, batch = packed.Contrasting(), packed.documents(packed.LENGTHS)
    del batch["labels"]
    loss = plain(**batch)
    loss.backward()
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(
        packed.Contrasting(),
        Topology([("pipe", 2)]),
        microbatches=3,
        batch_dim={name: rule for name, rule in packed.DOCUMENTS.items() if name in batch},
        example_kwargs=batch,
        tracer="record",
    )
    assert_same(forward_backward(**batch), loss.detach(), "loss", 1e-6)
    assert_gradients(gradients_of(forward_backward.named_parameters()), plain, 1e-5)


def gathered_over_replicas(tracer: str) -> None:
    topology, batch = Topology([("pipe", 2), ("data", 2)]), packed.documents(packed.LENGTHS)
    del batch["labels"]
    rules = {name: rule for name, rule in packed.DOCUMENTS.items() if name in batch}
    model = packed.Contrasting("global")
    options: Any = {"microbatches": 2, "batch_dim": rules, "example_kwargs": batch, "tracer": tracer}
    forward_backward = fxpipe.compile(model, topology, **options, checks=fxpipe.Checks(batches=False))
    forward_backward(**batch)


@pytest.mark.parametrize(
    ("tracer", "message"),
    [
        ("symbolic", "'cu_seqlens' is packed, and is given to a stage that gathers the rows of all replicas"),
        ("record", 'capture it for all rows: write tracer="symbolic", or gather="batch"'),
    ],
)
def test_packed_inputs_of_a_stage_that_gathers_over_replicas_are_refused(tracer: str, message: str) -> None:
    with pytest.raises(FxpipeError) as caught:
        strict(0)(4, gathered_over_replicas, tracer)
    assert message in str(caught.value)


# --- on a data axis

REPLICAS = [SIX, [[(1, 2, 2)] * 3, [], [(1, 1, 2)], []]]
"""Of other numbers of rows and images."""


def cut_of_replica(batch: models.Inputs, microbatches: int) -> list[models.Inputs]:
    rows = next(rows for rows in REPLICAS if len(rows) == len(batch["input_ids"]))
    return packed.cut_images(batch, rows, split_rows(len(rows), microbatches))


SGD: Any = {"optimizer": torch.optim.SGD, "optimizer_options": {"lr": 0.1}}
REPLICATED = models.Case(packed.Seeing, stages=3, cut=cut_of_replica, **SGD)


def on_replicas(batches: Batches) -> Run:
    checks = fxpipe.Checks(batches=False)
    options = {"batch_dim": packed.IMAGES, "example_kwargs": packed.seen_batch(SIX), "checks": checks, "zero": 1}
    return trained(REPLICATED, batches, topology=Topology([("pipe", 2), ("data", 2)]), **options)


def test_replicas_may_have_other_numbers_of_images(pool: Pool) -> None:
    batches = [
        tuple(packed.seen_batch(rows, 10 * step + replica) for replica, rows in enumerate(REPLICAS))
        for step in range(2)
    ]
    assert_run(pool.run(on_replicas, batches), reference(REPLICATED, batches)[0], 1e-5)


# --- what is refused, on all ranks, before anything is sent


def refusals() -> list[str]:
    """What each of these calls is refused with; and a good one behind each works."""
    case = CASES["images"]
    forward_backward, rank = compiled(case, 4), torch.distributed.get_rank()
    good = case.batch(SIX)
    bad = [
        {"pixel_values": good["pixel_values"][:-1]},
        {"image_grid_thw": good["image_grid_thw"][1:]},
        {"image_grid_thw": -good["image_grid_thw"]},
        {"image_grid_thw": good["image_grid_thw"].float()},
        {"image_grid_thw": good["image_grid_thw"][:, 0]},
        {"image_grid_thw": None},
        {"input_ids": good["input_ids"].flip(0) if rank == 1 else good["input_ids"]},
    ]
    found = []
    for each in bad:
        with pytest.raises(RunError) as caught:
            forward_backward(**good | each)
        found.append(str(caught.value))
        forward_backward(**good)
    return found


REFUSED = [
    "the counts of 'pixel_values' sum to 22 for the 5 rows of 'image_grid_thw', and it has 21 rows; they are [4, 6,",
    "the counts of 'image_grid_thw' sum to 5 for the 6 rows of the batch, and it has 4 rows; they are [1, 0, 2, 1, 0",
    "the counts of 'pixel_values' are tensor([-4, -6, -2, -4, -6]); they are whole numbers from 0 in one dimension",
    "the counts of 'pixel_values' are tensor([4., 6., 2., 4., 6.]); they are whole numbers from 0 in one dimension",
    "what counts 'pixel_values' failed: IndexError: Dimension out of range",
    "input 'pixel_values' is counted for the rows of 'image_grid_thw', which no rank was given",
    "the counts of 'image_grid_thw' differ between the ranks of a pipe group: rank 0 counts (1, 0, 2, 1, 0, 1), rank 1",
]


def test_counts_that_do_not_fit_are_refused_on_all_ranks_alike(pool: Pool) -> None:
    for found in pool.run(refusals, ranks=3):
        for message, wanted_message in zip(found, REFUSED, strict=True):
            assert wanted_message in message
